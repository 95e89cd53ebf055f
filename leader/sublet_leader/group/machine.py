"""The machine of one group's leader, which takes every event."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from msgspec import Struct, field

from sublet_leader.group.assignment_manager import AssignmentManager
from sublet_leader.group.events import (
    AgentProcessesEnded,
    BorrowerMessageReceived,
    Event,
    ForcedRevokeRequested,
    GroupOutcome,
    MemberRightRevoked,
    StreamsChanged,
    WritesCommitted,
    WritesNotCommitted,
)
from sublet_leader.group.grant_transitions import GrantTransitionEvent
from sublet_leader.group.group_timers import GroupTimers
from sublet_leader.group.members import Member, Members
from sublet_leader.group.session_fencing import SessionFencing
from sublet_leader.group.stream_table import StreamEntry, StreamTable
from sublet_leader.group.watch_events import EVICT, FENCE, GONE, JOIN, LEAVE, transient_record
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.epoch_frontiers import GroupFrontier
from sublet_protocol.domain.grant_keys import timeline_number
from sublet_protocol.domain.limits import SLICE_ITEMS
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    HeldGrant,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    PingResponse,
    RevokeFinished,
    StreamProgress,
    ToBorrower,
    UpdateProgress,
)
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.desired_state import format_pause
from sublet_storage.groups.model.records import (
    COMMAND,
    AdvancePosition,
    ForceRelease,
    FreeReservedStream,
    GrantStream,
    Group,
    GroupDesiredState,
    GroupWriteResult,
    GroupWrites,
    HistoryRecord,
    Lending,
    LendingChange,
    LendingChangeResult,
    LendingOutcome,
    LendingStatus,
    ReclaimStream,
    RecordHistory,
    ReleaseStream,
)

MAX_REASON_CHARS = 500
"""Maximum length of the reason of a leave."""


class _OutcomeBuilder(Struct):
    """The parts of an outcome while an event is handled."""

    sends: list[tuple[str, ToBorrower]] = field(default_factory=list)
    stop: str | None = None
    history: list[HistoryRecord] = field(default_factory=list)


class GroupLeader:
    """Leads one group under one term, from the rows loaded after the claim was committed.

    Held streams are reserved for their borrowers to reclaim until the grace period ends; the others are free.
    `previous_leader_until`: until then the previous leader may still answer their pings.
    """

    def __init__(
        self,
        group: Group,
        term: int,
        rows: Iterable[Lending],
        settings: LeaderSettings,
        now: float,
        previous_leader_until: float = float("-inf"),
    ) -> None:
        self.group, self.term, self.settings = group, term, settings
        self.members = Members()
        self.streams = StreamTable(rows, term, now, settings, previous_leader_until, group.options.session_expiry_s)
        self.timers = GroupTimers(settings, now, previous_leader_until)
        self.epochs: tuple[GroupFrontier, ...] = ()
        self.desired_state = group.desired_state
        self.members.set_weights(group.desired_state.weights)
        self._out = _OutcomeBuilder()
        self._assignments = AssignmentManager(group, term, self.streams, self.members, settings, self._send)
        self._session_fencing = SessionFencing(
            group, self.streams, self.members, self._assignments, settings, self._end_as_fenced
        )

    # --- entry point --------------------------------------------------------------------------------------------------

    def decide(self, event: Event, now: float) -> GroupOutcome:
        """Handle one event and return the outcome."""
        self._out = _OutcomeBuilder()
        match event:
            case BorrowerMessageReceived():
                self._receive(event.agent, event, now)
            case WritesCommitted():
                self._apply_result(event.result, now)
            case WritesNotCommitted():
                self._put_back(event.writes, now)
            case ForcedRevokeRequested():
                self._assignments.revoke(event.stream_ids, event.reason, now, now + self.settings.revoke_deadline_s)
            case MemberRightRevoked():
                self._deny(event, now)
            case AgentProcessesEnded():
                self._end_holders(event, now)
            case StreamsChanged():
                self.timers.sync_soon(now)
            case Tick():
                self._pass_time(now)
            case _:
                assert_never(event)
        if self.timers.take_rebalance_due(now):
            self._allocate(now)
        changes = self.streams.take_writable(now)
        renew = self.timers.take_sync_due(now)
        violations = tuple(self._assignments.strategy_errors())
        out = self._out
        return GroupOutcome(changes, renew, tuple(out.sends), self._wake_at(), out.stop, violations, tuple(out.history))

    def _put_back(self, writes: GroupWrites, now: float) -> None:
        if writes.needs_stream_sync:
            self.timers.sync_soon(now + self.settings.resend_interval_s)
        for change in writes.changes:
            entry = self.streams.put_back(change, now + self.settings.resend_interval_s)
            self._assignments.free_denied(entry)
            if self.streams.drop_finished(entry) or entry.is_quiet:
                self.timers.note_stream_freed(entry.retry_at)

    def _send(self, agent: str, message: ToBorrower) -> None:
        self._out.sends.append((agent, message))

    def _note(self, event: str, borrower_id: str, agent: str, session: str | None, reason: str) -> None:
        """Add an event for watchers that is in no commit; written changes are announced when they are committed."""
        record = transient_record(self.group.group_id, self.term, event, reason, borrower_id, agent, session)
        self._out.history.append(record)

    def _note_membership_change(self, now: float) -> None:
        self.timers.note_membership_change(now)
        self._assignments.forget_plan()

    def _end_as_fenced(self, agent: str, borrower_id: str, term: int, session: str) -> None:
        detail = f"a newer process goes by the name {session!r}"
        self._send(agent, Invalidate(borrower_id, term, BorrowerEndReason.FENCED, detail))
        self._note(FENCE, borrower_id, agent, session, detail)

    def _wake_at(self) -> float:
        return min(self.timers.wake_at(), self.streams.retry_at())

    # --- messages ---------------------------------------------------------------------------------------------------

    def _receive(self, agent: str, received: BorrowerMessageReceived, now: float) -> None:
        message = received.message
        match message:
            case LeaderWanted():
                self._welcome(agent, message, now)
            case Ping():
                for borrower_id in message.borrower_ids:
                    self._answer_ping(agent, borrower_id, message.sent_at, now)
            case UpdateProgress():
                if self._verify_member(agent, message.borrower_id, message.term, now):
                    for progress in message.streams:
                        self._take_progress(agent, message.borrower_id, progress, now)
            case RevokeFinished():
                if self._verify_member(agent, message.borrower_id, message.term, now):
                    assignment = self._assignments.find(message.stream_id, message.grant_id, message.borrower_id, agent)
                    self._assignments.apply_event(assignment, GrantTransitionEvent.REVOKE_FINISHED, now)
                    self._assignments.confirm(agent, message.borrower_id, message.stream_id, message.grant_id)
                    self.timers.note_stream_freed(now)
                    self._disconnect_borrowers(message.borrower_id, now)
            case Disconnect():
                self._on_disconnect(agent, message, now)
            case _:
                assert_never(message)

    def _verify_member(self, agent: str, borrower_id: str, term: int | None, now: float) -> bool:
        """Return whether the borrower is a member and the term is this leader's (None: a ping, which has none); if not,
        invalidate it."""
        member = self._find_member(agent, borrower_id)
        if member is None or term not in (None, self.term):
            self._send(
                agent, Invalidate(borrower_id, term or 0, BorrowerEndReason.RETRY, "not a member under this term")
            )
            return False
        member.last_message_at = now
        return True

    def _find_member(self, agent: str, borrower_id: str) -> Member | None:
        """Return the borrower, None unless it is this agent's: no agent may send for another's."""
        member = self.members.get(borrower_id)
        return member if member is not None and member.agent == agent else None

    def _welcome(self, agent: str, request: LeaderWanted, now: float) -> None:
        if not self._session_fencing.admit(agent, request, self.term, now):
            return
        member = self._find_member(agent, request.borrower_id)
        if member is None and (self.members.get(request.borrower_id) or self.members.is_former(request.borrower_id)):
            reason = BorrowerEndReason.DONE if self.members.has_left(request.borrower_id) else BorrowerEndReason.RETRY
            self._send(agent, Invalidate(request.borrower_id, 0, reason, "this borrower is over"))
            return
        if any(self._is_later(grant, agent, request.borrower_number) for grant in request.reclaim):
            detail = "a later borrower of its agent has what it held"
            self._send(agent, Invalidate(request.borrower_id, 0, BorrowerEndReason.RETRY, detail))
            return
        if member is None:
            w = request
            member = Member(w.borrower_id, agent, w.weight, w.session, now, w.leaving)
            member.session_epoch, member.borrower_number = w.session_epoch, w.borrower_number
            member.lock_valid_s = w.lock_valid_s
            member.validity_extended_at = now if w.reclaim else member.validity_extended_at
            self.members.add(member)
            self._note(JOIN, w.borrower_id, agent, w.session, f"after {w.predecessor}" if w.predecessor else "joined")
            self._note_membership_change(now)
        member.last_message_at, member.is_leaving = now, member.is_leaving or request.leaving
        self._send(agent, LeaderConnectResponse(request.borrower_id, self.term, self.group.group_id))
        lost = [grant for grant in request.reclaim if not self._reclaim(member, grant, now)]
        for grant in lost[:SLICE_ITEMS]:  # the borrower reports the others in time, in messages that are divided
            assignment = self._assignments.find(grant.stream_id, grant.grant_id, member.borrower_id, agent)
            self._assignments.apply_event(assignment, GrantTransitionEvent.PROGRESS, now)
        predecessor = self.members.get(request.predecessor or "")
        if predecessor is not None and predecessor.agent == agent:
            self._assignments.apply_final_progress(predecessor, (), now)
            self.members.mark_replaced(predecessor.borrower_id, now)
            self._note(LEAVE, predecessor.borrower_id, agent, predecessor.session, f"succeeded by {member.borrower_id}")

    def _is_later(self, grant: HeldGrant, agent: str, number: int) -> bool:
        """Return whether a later borrower of that agent has the grant: then this message is older than its reclaim."""
        entry = self.streams.get(grant.stream_id)
        if entry is None or entry.assignment is None or entry.lending.grant_id != grant.grant_id:
            return False
        holder = self._find_member(agent, entry.assignment.borrower_id)
        return holder is not None and holder.borrower_number > number

    def _reclaim(self, member: Member, grant: HeldGrant, now: float) -> bool:
        """Confirm a grant of the borrower's predecessor, if the agent still holds it: same stream, same grant id.
        Return False if it is lost."""
        entry = self.streams.get(grant.stream_id)
        if entry is not None and entry.assignment is not None and entry.assignment.borrower_id == member.borrower_id:
            return True
        if entry is None or entry.lending.grant_id != grant.grant_id or not entry.is_held_by(member.agent):
            return False
        self._assignments.reclaim(entry, member, grant, now)
        if self.desired_state.pause_reason is not None:
            self._take_back([grant.stream_id], now)
        return True

    def _answer_ping(self, agent: str, borrower_id: str, sent_at: float, now: float) -> None:
        if self._verify_member(agent, borrower_id, None, now):
            member = self.members.get(borrower_id)
            assert member is not None
            member.last_ping_sent_at = sent_at
            self._send_ping_response(member, self._assignments.extend_validity(member, now))

    def _send_ping_response(self, member: Member, without: tuple[tuple[int, int], ...]) -> None:
        self.members.unannounced.pop(member.borrower_id, None)
        sent_at, valid_s = member.last_ping_sent_at or 0.0, self.settings.ping_valid_for_s
        self._send(member.agent, PingResponse(member.borrower_id, self.term, sent_at, valid_s, self.epochs, without))

    def _take_progress(self, agent: str, borrower_id: str, progress: StreamProgress, now: float) -> None:
        assignment = self._assignments.find(progress.stream_id, progress.grant_id, borrower_id, agent)
        entry = self.streams.get(progress.stream_id)
        if entry is not None and entry.assignment is assignment:
            entry.meter.record(progress.grant_id, progress.size, progress.lag, now)
            if not progress.final:
                self._assignments.record_read_error(assignment, progress.read_error, now)
            elif (progress.poison or progress.beyond_head) and not assignment.is_final_queued:
                assignment.poison, assignment.is_beyond_head = progress.poison, progress.beyond_head
                assignment.reason = progress.read_error
        kind = GrantTransitionEvent.FINAL if progress.final else GrantTransitionEvent.PROGRESS
        assignment.delivered_end, assignment.consumed, assignment.in_doubt = (
            progress.delivered_end,
            progress.consumed,
            progress.in_doubt,
        )
        self._assignments.apply_event(assignment, kind, now, progress.position)

    def _on_disconnect(self, agent: str, disconnect: Disconnect, now: float) -> None:
        self._assignments.confirm_fenced(agent, disconnect.borrower_id)
        member = self._find_member(agent, disconnect.borrower_id)
        if member is None or disconnect.term not in (0, self.term):
            settled = not disconnect.streams or self.members.has_left(disconnect.borrower_id)
            reason = BorrowerEndReason.DONE if settled else BorrowerEndReason.RETRY
            detail = "not a member under this term"
            self._send(agent, Invalidate(disconnect.borrower_id, disconnect.term, reason, detail))
            return
        member.last_message_at = now
        member.leave_reason = disconnect.reason[:MAX_REASON_CHARS]
        if not member.is_disconnecting:
            member.is_disconnecting = True
            self._note_membership_change(now)
        self._assignments.apply_final_progress(member, disconnect.streams, now)
        self._disconnect_borrowers(member.borrower_id, now)

    def _disconnect_borrowers(self, borrower_id: str, now: float) -> None:
        """Confirm to a disconnecting borrower that all its progress is durable, once nothing is left to write."""
        member = self.members.get(borrower_id)
        if member is not None and member.is_disconnecting and not member.streams:
            self._send(member.agent, Invalidate(borrower_id, self.term, BorrowerEndReason.DONE))
            self._note(LEAVE, borrower_id, member.agent, member.session, "left, all that it had is durable")
            self.members.mark_left(borrower_id, now)

    # --- answers of the database ------------------------------------------------------------------------------------

    def _apply_result(self, result: GroupWriteResult, now: float) -> None:
        if result.has_stale_term:
            self._out.stop = "stale_term"
            return
        for answer in result.results:
            entry = self.streams.complete(answer, now)
            if entry is not None:
                self._take_answer(entry, answer, now)
        for row in result.synced:
            self._take_row(row, now)
        if result.needs_stream_sync:
            self.timers.sync_soon(now + self.settings.resend_interval_s)
        if result.epochs not in ((), self.epochs):
            self.epochs = result.epochs
            self.members.mark_unannounced()
            self._announce(now)
        if result.desired_state not in (None, self.desired_state):
            self._apply_desired_state(result.desired_state, now)

    def _apply_desired_state(self, desired_state: GroupDesiredState, now: float) -> None:
        self.desired_state = desired_state
        self.members.set_weights(desired_state.weights)
        if desired_state.pause_reason is not None:
            self._take_back(self.streams.assigned_stream_ids(), now)
        self._out.history.append(transient_record(self.group.group_id, self.term, COMMAND, desired_state.format()))
        self._note_membership_change(now)

    def _take_back(self, stream_ids: Iterable[int], now: float) -> None:
        """Take streams back, as the group is paused."""
        reason = format_pause(self.desired_state.pause_reason)
        self._assignments.revoke(stream_ids, reason, now, now + self.settings.revoke_deadline_s)

    def _announce(self, now: float) -> None:
        """Send the frontiers to some members that have not received them, in a repeated answer to their last ping."""
        for member in self.members.list_unannounced(SLICE_ITEMS):
            self._send_ping_response(member, self._assignments.list_not_extended(member, now))
        self.timers.note_announced(now, is_complete=not self.members.unannounced)

    def _take_answer(self, entry: StreamEntry, answer: LendingChangeResult, now: float) -> None:
        applied = answer.outcome is LendingOutcome.APPLIED
        holder = entry.assignment.borrower_id if entry.assignment else None
        match answer.change:
            case ReclaimStream() | AdvancePosition() | ReleaseStream() if answer.outcome is LendingOutcome.INVALID:
                self._end_as_invalid(entry, answer.change, answer.problem, now)
            case GrantStream() | ReclaimStream():
                self._assignments.grant_written(entry, answer.change, applied, now)
            case AdvancePosition():
                self._assignments.progress_written(entry, answer.change, applied, now)
            case ReleaseStream() | ForceRelease():
                self._assignments.end_written(entry, answer.change, applied, now)
                if self.desired_state.pause_reason is not None:  # a successor has it by now
                    self._take_back([answer.change.stream_id], now)
            case FreeReservedStream() | RecordHistory():
                pass  # the row has the present state
            case _:
                assert_never(answer.change)
        is_progress = isinstance(answer.change, ReclaimStream | AdvancePosition | ReleaseStream)
        if self.group.options.atomic and applied and is_progress:
            self.timers.sync_soon(now)  # with it an epoch may be consumed
        self._assignments.free_denied(entry)
        if self.streams.drop_finished(entry) or entry.is_quiet:
            self.timers.note_stream_freed(max(now, entry.retry_at))
        if holder is not None:
            self._disconnect_borrowers(holder, now)

    def _end_as_invalid(
        self, entry: StreamEntry, change: ReclaimStream | AdvancePosition | ReleaseStream, problem: str, now: float
    ) -> None:
        """End the borrower that has sent invalid progress, with the reason, and free its streams. The grant is still in
        force; where its borrower has gone meanwhile, or waits for its end, that end is still to be written."""
        holder = None if isinstance(change, ReclaimStream) else entry.assignment
        if holder is not None and holder.grant_id != change.grant_id:  # another has it by now
            holder = None
        if not entry.is_ending:
            if entry.assignment is None:
                self.streams.enqueue(ForceRelease(change.stream_id, change.grant_id, problem, ends_doubt=True))
            elif holder is not None:
                holder.is_final_queued = False
        if (sender := self.members.get(getattr(holder or change, "borrower_id", ""))) is not None:
            self._evict(sender, BorrowerEndReason.DENIED, problem, now)

    def _take_row(self, row: Lending, now: float) -> None:
        entry = self.streams.update_row(row, now)
        assignment = entry.assignment
        if assignment is not None and assignment.grant_id and row.grant_id > assignment.grant_id:
            # A stream sync blocked or skipped it under its holder: what is being written of the grant will be refused.
            self._assignments.apply_event(assignment, GrantTransitionEvent.LOST, now)
            self._disconnect_borrowers(assignment.borrower_id, now)
        if self.streams.drop_finished(entry):
            self.timers.note_stream_freed(now)
            return
        if row.is_closed and row.status is LendingStatus.HELD and row.position >= row.head and not entry.queue:
            # Its holder reported the end before the stream was closed: no more progress will come.
            self.streams.enqueue(AdvancePosition(row.stream_id, row.grant_id, row.position))
        if entry.is_quiet:
            self.timers.note_stream_freed(now)

    # --- time -------------------------------------------------------------------------------------------------------

    def _pass_time(self, now: float) -> None:
        if self.timers.is_announcement_due(now):
            self._announce(now)
        if self.timers.take_grace_due(now):
            self._end_grace(now)
        if not self.timers.take_sweep_due(now):
            return
        silent = [m for m in self.members if now >= m.last_message_at + self.settings.eviction_timeout_s]
        for member in silent[:SLICE_ITEMS]:
            self._evict(member, BorrowerEndReason.RETRY, "evicted: no ping in time", now)
        if len(silent) > SLICE_ITEMS:
            self.timers.sweep_soon(now)
        self.members.expire_former(now - self.settings.eviction_timeout_s)
        self._assignments.resend(now)
        idle = not len(self.members) and all(s.in_flight is None and not s.queue for s in self.streams)
        if self.timers.is_idle_timeout(idle, now):
            self._out.stop = "idle"

    def _end_grace(self, now: float) -> None:
        """Free the streams that were not reclaimed."""
        for entry in self.streams.find_unclaimed():
            self._assignments.force_release(entry, "not reclaimed", now)

    def _evict(self, member: Member, end: BorrowerEndReason, reason: str, now: float) -> None:
        """Evict a member. Nothing is reserved for the session of one that is denied, neither what it left in doubt."""
        is_denied = end is BorrowerEndReason.DENIED
        self._assignments.evict(member, reason, now, is_denied=is_denied)
        if is_denied and member.session is not None and member.session_epoch:
            self._assignments.deny_session(member.session)
        self._send(member.agent, Invalidate(member.borrower_id, self.term, end, reason))
        self._note(EVICT, member.borrower_id, member.agent, member.session, reason)
        self._note_membership_change(now)

    def _end_holders(self, gone: AgentProcessesEnded, now: float) -> None:
        """Evict members whose process has ended, free what is not reclaimed. Locks of another timeline are others."""
        if gone.timeline not in (None, timeline_number(self.term)):
            return
        for member in self.members:
            if member.agent in gone.agents and self.settings.is_lock_short(member.lock_valid_s):
                self._assignments.void_validity(member)
                self._evict(member, BorrowerEndReason.RETRY, GONE, now)
        for entry in self.streams.find_unclaimed(gone.agents):
            if timeline_number(entry.lending.grant_id) == gone.timeline:
                entry.valid_until = float("-inf")
                self._assignments.force_release(entry, GONE, now)

    def _deny(self, denied: MemberRightRevoked, now: float) -> None:
        """Evict a member without the right to be one."""
        if (member := self.members.get(denied.borrower_id)) is not None:
            self._evict(member, BorrowerEndReason.DENIED, denied.reason, now)

    # --- allocation ---------------------------------------------------------------------------------------------------

    def _allocate(self, now: float) -> None:
        if self.desired_state.pause_reason is not None:
            return
        self.timers.rebalance_by(self._assignments.rebalance(now))

    def knows_borrower(self, borrower_id: str) -> bool:
        """Return whether the borrower is a member, or was one recently."""
        return self.members.get(borrower_id) is not None or self.members.is_former(borrower_id)

    def invalidations(self, detail: str) -> tuple[tuple[str, ToBorrower], ...]:
        """Return the message that sends every member to the next leader when this one is over; they keep their
        streams."""
        return tuple(
            (m.agent, Invalidate(m.borrower_id, self.term, BorrowerEndReason.RETRY, detail)) for m in self.members
        )

    def pending_changes(self) -> tuple[LendingChange, ...]:
        """Return the changes that are not written yet, for which a graceful stop waits."""
        return tuple(e for s in self.streams for e in ((s.in_flight,) if s.in_flight else ()) + tuple(s.queue))
