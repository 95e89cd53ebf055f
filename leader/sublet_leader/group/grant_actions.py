"""The actions of the assignments' transition table: messages to send and lending changes to write."""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from sublet_leader.group.members import Member, Members
from sublet_leader.group.stream_table import LastHolder, StreamAssignment, StreamEntry, StreamTable
from sublet_leader.settings import LeaderSettings
from sublet_protocol.messages.borrower_leader import Grant as GrantMessage
from sublet_protocol.messages.borrower_leader import GrantEndOutcome, ProgressSaved, Revoke, Revoked, ToBorrower
from sublet_storage.groups.model.records import (
    AdvancePosition,
    ForceRelease,
    GrantStream,
    Group,
    LendingStatus,
    OnPoison,
    ReleaseStream,
)


class GrantActionHandlers:
    """Has a method for each `grant_transitions.GrantAction`. `waiting`: streams whose borrower has not answered yet.
    `next_holders`: {stream: borrower} by the last plan, of streams that are being revoked."""

    def __init__(
        self,
        group: Group,
        term: int,
        streams: StreamTable,
        members: Members,
        settings: LeaderSettings,
        send: Callable[[str, ToBorrower], None],
    ) -> None:
        self._group, self._term, self._settings = group, term, settings
        self._streams, self._members, self._send = streams, members, send
        self.waiting: set[int] = set()
        self.next_holders: dict[int, str] = {}

    def detach(self, entry: StreamEntry) -> None:
        """Drop the assignment, and its grant if that only waits to be written (again); writes in flight for the stream
        continue."""
        assignment, entry.assignment = entry.assignment, None
        if assignment is not None:
            self._streams.drop_waiting_grant(entry)
            member = self._members.get(assignment.borrower_id)
            session = member.session if member is not None else entry.lending.session
            entry.last_holder = LastHolder(assignment.borrower_id, assignment.agent, session)
            self.waiting.discard(assignment.stream_id)
            if member is not None:
                member.streams.discard(assignment.stream_id)

    def compute_valid_until(self, entry: StreamEntry) -> float:
        """Return until when its holder may begin calls on it, of this leader or a former one."""
        member = self._members.get(entry.assignment.borrower_id) if entry.assignment else None
        if member is None:
            return entry.valid_until
        return max(entry.valid_until, member.validity_extended_at + self._settings.grant_validity_s)

    def compute_reserved_s(self, entry: StreamEntry) -> float:
        """Return how long the stream of a leaving holder is reserved for its session once it is free."""
        return self._group.options.session_expiry_s if entry.lending.session_epoch else 0.0

    def ignore(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Do nothing: the table's action for an event without effect."""

    def send_grant(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Send the grant, which is written."""
        row = self._get_entry(assignment).lending
        assignment.resend_at = now + self._settings.resend_interval_s
        end = row.head if row.is_closed else None
        assert row.grant_key is not None, "a grant that is written has a key"
        self._send(
            assignment.agent,
            GrantMessage(
                assignment.borrower_id,
                self._term,
                row.stream_id,
                assignment.grant_id,
                row.position,
                row.generation_id,
                row.hash_from,
                row.hash_to,
                self._group.subscription.filter.text,
                end,
                row.consumed,
                row.pending_in_doubt,
                grant_key=row.grant_key,
            ),
        )

    def send_revoke(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Send a revoke, if the grant is written and no final progress has come."""
        assignment.resend_at = now + self._settings.resend_interval_s
        if assignment.grant_id and not assignment.is_final_queued:
            self.waiting.add(assignment.stream_id)
            self._send(
                assignment.agent,
                Revoke(assignment.borrower_id, self._term, assignment.stream_id, assignment.grant_id),
            )

    def send_revoked(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Send `Revoked` after the grant's end was written; the assignment stays until the borrower confirms."""
        entry = self._streams.get(assignment.stream_id)
        if entry is not None and entry.assignment is assignment:
            finished = entry.lending.status is LendingStatus.FINISHED
            ended = GrantEndOutcome.LOST if assignment.is_aborted else GrantEndOutcome.SAVED
            assignment.revoked_reason = GrantEndOutcome.FINISHED if finished else ended
            self.detach(entry)
            self._await_confirmation(assignment, is_taken=assignment.is_aborted)
        self._send_revoked_message(assignment, now)

    def _await_confirmation(self, assignment: StreamAssignment, is_taken: bool) -> None:
        """Keep the assignment until its borrower confirms; a disconnecting borrower need not."""
        member, key = self._members.get(assignment.borrower_id), (assignment.stream_id, assignment.grant_id)
        if member is not None and is_taken:
            member.taken.add(key)
        if member is not None and not member.is_disconnecting:
            self._members.unconfirmed[key] = assignment

    def _send_revoked_message(self, assignment: StreamAssignment, now: float) -> None:
        a = assignment
        a.resend_at = now + self._settings.resend_interval_s
        if not self._is_ending(a):
            self._send(a.agent, Revoked(a.borrower_id, self._term, a.stream_id, a.grant_id, a.revoked_reason))

    def send_lost(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Send `Revoked` for a lost grant; an assignment that this leader does not have is answered, and not kept."""
        entry = self._streams.get(assignment.stream_id)
        if entry is not None and entry.assignment is assignment:
            is_taken = not assignment.is_final_queued
            if is_taken:
                entry.valid_until = self.compute_valid_until(entry)
            self.detach(entry)
            self._await_confirmation(assignment, is_taken)
        self._send_revoked_message(assignment, now)

    def _is_ending(self, assignment: StreamAssignment) -> bool:
        """Return whether the grant's end is being written. Until it is written, its borrower must not be notified: it
        would drop the stream with its unreported progress, which the next leader, to whom the grant is in force, would
        never receive."""
        entry = self._streams.get(assignment.stream_id)
        return entry is not None and entry.lending.grant_id == assignment.grant_id and entry.is_ending

    def send_progress_saved(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Report to the borrower what of its progress is durable."""
        a, row = assignment, self._get_entry(assignment).lending
        saved = ProgressSaved(a.borrower_id, self._term, a.stream_id, a.grant_id, position, row.consumed, row.in_doubt)
        self._send(a.agent, saved)

    def forget(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Drop the assignment, also one that only waited for its borrower to confirm."""
        self._members.unconfirmed.pop((assignment.stream_id, assignment.grant_id), None)
        entry = self._streams.get(assignment.stream_id)
        if entry is not None and entry.assignment is assignment:
            self.detach(entry)

    def write_progress(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Write the borrower's progress, unless its final progress is being written."""
        if not assignment.is_final_queued:
            a = assignment
            self._streams.enqueue(AdvancePosition(a.stream_id, a.grant_id, position, a.consumed, a.in_doubt))

    def write_final(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Write final progress, which ends the grant."""
        if not assignment.is_final_queued:
            assignment.is_final_queued = True
            member = self._members.get(assignment.borrower_id)
            goes = member is None or member.is_disconnecting
            reserved_s = self.compute_reserved_s(self._get_entry(assignment)) if goes else 0.0
            cause = "left in the middle of a batch" if assignment.delivered_end > position else "its borrower left"
            cause = (member.leave_reason if member is not None else "") or cause
            cause = "its borrower found it to end before what it had read" if assignment.is_beyond_head else cause
            reason = assignment.reason or (cause if goes else "handed back by its borrower")
            a = assignment
            skips = self._group.options.on_poison is OnPoison.SKIP
            final = ReleaseStream(a.stream_id, a.grant_id, position, reason, reserved_s, a.delivered_end, a.consumed)
            successor = self._make_successor(assignment)
            unread = {"poison": a.poison, "may_skip": skips, "is_beyond_head": a.is_beyond_head}
            self._streams.enqueue(replace(final, successor=successor, **unread))

    def _make_successor(self, assignment: StreamAssignment) -> GrantStream | None:
        """Return the grant to the stream's next holder; None where there is no other, or the next plan is to find
        one."""
        member = self._members.get(self.next_holders.get(assignment.stream_id, ""))
        is_suspect = self._get_entry(assignment).lending.is_suspect
        if member is None or not member.is_eligible or member.borrower_id == assignment.borrower_id or is_suspect:
            return None
        return make_grant(assignment.stream_id, member, "allocated")

    def write_aborted(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Write progress that ended in the middle of a batch, and end the grant without final progress."""
        if not assignment.is_final_queued:
            self._streams.enqueue(
                AdvancePosition(assignment.stream_id, assignment.grant_id, position, assignment.consumed)
            )
            member = self._members.get(assignment.borrower_id)
            reason = (member.leave_reason if member else "") or "left in the middle of a batch"
            self._abort(assignment, reason, self.compute_reserved_s(self._get_entry(assignment)))

    def write_not_held(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """Write the row's position as final: it is exact, as the borrower does not have the stream."""
        assignment.reason = assignment.reason or "its borrower does not have it"
        self.write_final(assignment, now, self._get_entry(assignment).lending.position)

    def write_force_release(self, assignment: StreamAssignment, now: float, position: int) -> None:
        """End the grant at its deadline, without final progress."""
        self._abort(assignment, f"deadline: {assignment.reason}", 0.0)

    def _abort(self, assignment: StreamAssignment, reason: str, reserve_s: float) -> None:
        assignment.is_final_queued = assignment.is_aborted = True
        self._streams.enqueue(ForceRelease(assignment.stream_id, assignment.grant_id, reason, reserve_s))

    def _get_entry(self, assignment: StreamAssignment) -> StreamEntry:
        """Return the entry of a stream that is granted or about to be: it exists as long as that is so."""
        entry = self._streams.get(assignment.stream_id)
        assert entry is not None
        return entry


def make_grant(stream_id: int, member: Member, reason: str) -> GrantStream:
    """Return the change that grants a free stream to the member."""
    epoch = member.session_epoch or None
    return GrantStream(stream_id, member.borrower_id, member.agent, member.session, reason, epoch, member.lock_valid_s)
