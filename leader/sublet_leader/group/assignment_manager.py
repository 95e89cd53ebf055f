"""The assignments of one group: which stream is granted to which borrower."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sublet_leader.group.grant_actions import GrantActionHandlers, make_grant
from sublet_leader.group.grant_transitions import TRANSITIONS, GrantStatus, GrantTransitionEvent
from sublet_leader.group.members import Member, Members
from sublet_leader.group.rebalancer import Rebalancer
from sublet_leader.group.stream_table import (
    DeferredForceRelease,
    StreamAssignment,
    StreamEntry,
    StreamTable,
    give_back,
)
from sublet_leader.settings import LeaderSettings
from sublet_protocol.messages.borrower_leader import (
    HeldGrant,
    StreamProgress,
    ToBorrower,
)
from sublet_storage.groups.model.lending_row import is_of_former_timeline
from sublet_storage.groups.model.records import (
    READABLE,
    UNREADABLE,
    AdvancePosition,
    ForceRelease,
    FreeReservedStream,
    GrantStream,
    Group,
    LendingStatus,
    ReclaimStream,
    RecordHistory,
    ReleaseStream,
)

_NEVER = float("inf")
_RESERVED = "reserved for its session"
"""The reason of a grant to the session that the stream was reserved for."""


class AssignmentManager:
    """Decides about stream entries and members; messages go through `send`, writes through the stream table."""

    def __init__(
        self,
        group: Group,
        term: int,
        streams: StreamTable,
        members: Members,
        settings: LeaderSettings,
        send: Callable[[str, ToBorrower], None],
    ) -> None:
        self._term, self._settings = term, settings
        self._streams, self._members = streams, members
        self._actions = GrantActionHandlers(group, term, streams, members, settings, send)
        self._rebalancer = Rebalancer(streams, members, group.options.strategy, settings)
        self._releasing: set[int] = set()
        self._unrecorded: set[int] = set()

    # --- the table --------------------------------------------------------------------------------------------------

    def apply_event(
        self, assignment: StreamAssignment, kind: GrantTransitionEvent, now: float, position: int = 0
    ) -> None:
        """Make one step of the table. Raise for a pair that the table lacks, which is a bug."""
        row = TRANSITIONS[assignment.status]
        if kind not in row:
            transition = f"{kind.value} at {now:.3f} ({position=})"
            raise AssertionError(f"the table says that this cannot happen to {assignment}: {transition}")
        assignment.status, action = row[kind]
        getattr(self._actions, action.value)(assignment, now, position)

    def find(self, stream_id: int, grant_id: int, borrower_id: str, agent: str) -> StreamAssignment:
        """Return the assignment of exactly this stream, grant and borrower, granted or revoked; else an absent one."""
        entry = self._streams.get(stream_id)
        for assignment in (
            entry.assignment if entry else None,
            self._members.unconfirmed.get((stream_id, grant_id)),
        ):
            # Id 0 is no grant, but a grant that is not written yet: no borrower has received it.
            if (
                assignment is not None
                and grant_id
                and (assignment.grant_id, assignment.borrower_id) == (grant_id, borrower_id)
            ):
                return assignment
        return StreamAssignment(stream_id, borrower_id, agent, 0.0, GrantStatus.ABSENT, grant_id)

    def begin_grant(self, entry: StreamEntry, member: Member, now: float, grant_id: int = 0) -> None:
        """Begin to grant the stream to the member; the row is still to be written."""
        stream_id = entry.lending.stream_id
        entry.assignment = StreamAssignment(stream_id, member.borrower_id, member.agent, now, grant_id=grant_id)
        entry.denied_session = None
        member.streams.add(stream_id)

    def confirm(self, agent: str, borrower_id: str, stream_id: int, grant_id: int) -> None:
        """Record that the borrower does not have the stream under that grant."""
        entry, member = self._streams.get(stream_id), self._members.get(borrower_id)
        if member is not None:
            member.taken.discard((stream_id, grant_id))
        if entry is None or entry.assignment is not None or entry.last_holder is None:
            return
        if (entry.last_holder.agent, entry.last_holder.borrower_id) == (agent, borrower_id):
            entry.valid_until = float("-inf")

    def reclaim(self, entry: StreamEntry, member: Member, grant: HeldGrant, now: float) -> None:
        """Move the grant to another borrower of the same agent; a revoke under way continues."""
        previous = entry.assignment
        self._actions.detach(entry)
        self.begin_grant(entry, member, now, grant_id=grant.grant_id)
        epoch = member.session_epoch or None if member.session == entry.lending.session else None
        fields = (grant.stream_id, grant.grant_id, grant.position, member.borrower_id, member.agent, epoch)
        self._streams.enqueue(ReclaimStream(*fields, grant.consumed, member.lock_valid_s))
        if previous is not None and previous.status is GrantStatus.REVOKING:
            self.revoke((grant.stream_id,), previous.reason, now, previous.deadline)

    def force_release(
        self, entry: StreamEntry, reason: str, now: float, reserve_s: float | None = None, *, is_denied: bool = False
    ) -> None:
        """End the grant without final progress, also one that was not reclaimed. A grant that is not written yet ends
        when its answer comes; one whose end is being written is left alone. Nothing is written while
        the holder may begin calls: until then the grant is in force, for the next leader too.

        `reserve_s`: how long to reserve the stream for its holder's session (None: by the group's options). If that
        `is_denied`, nothing is reserved for it.
        """
        row, assignment = entry.lending, entry.assignment
        unclaimed = entry.is_unclaimed
        borrower_id, agent = (assignment or row).borrower_id, (assignment or row).agent
        entry.valid_until = self._actions.compute_valid_until(entry)
        if is_denied:
            reserve_s = 0.0
        elif reserve_s is None:
            reserve_s = self._actions.compute_reserved_s(entry)
        self._actions.detach(entry)
        if unclaimed or (assignment is not None and assignment.grant_id and not assignment.is_final_queued):
            grant_id = assignment.grant_id if assignment is not None else row.grant_id
            change = ForceRelease(row.stream_id, grant_id, reason, reserve_s, is_denied)
            if entry.valid_until <= now:
                self._streams.enqueue(change)
                return
            self._streams.enqueue(RecordHistory(row.stream_id, grant_id, "revoke", reason))
            entry.pending_release = DeferredForceRelease(change, entry.valid_until, borrower_id, agent)
            self._releasing.add(row.stream_id)

    def evict(
        self, member: Member, reason: str, now: float, reserve_s: float | None = None, *, is_denied: bool = False
    ) -> None:
        """Drop the borrower, and end all its grants without final progress. Its id is not admitted again: a grant that
        is still on its way to it is over."""
        for entry, _ in self._streams.find_assigned(member.streams):
            self.force_release(entry, reason, now, reserve_s, is_denied=is_denied)
        self._members.mark_replaced(member.borrower_id, now)

    def deny_session(self, session: str) -> None:
        """Free what this session left in doubt, once it is written: it may not come back."""
        for entry in self._streams.streams_of_session(session):
            entry.denied_session = session
            self.free_denied(entry)

    def free_denied(self, entry: StreamEntry) -> None:
        """Free a stream that is reserved for a session that may not come back."""
        row = entry.lending
        if row.status is LendingStatus.RESERVED and row.session == entry.denied_session and entry.is_quiet:
            reason = f"session {row.session!r} may not come back to what it left in doubt"
            self._streams.enqueue(FreeReservedStream(row.stream_id, row.grant_id, reason, is_forced=True))

    def void_validity(self, member: Member) -> None:
        """End the validity of the grants of a member whose process has ended. Of a former timeline, the holder may be
        another."""
        member.validity_extended_at = float("-inf")
        for entry, _ in self._streams.find_assigned(member.streams):
            if not is_of_former_timeline(entry.lending.grant_id, self._term):
                entry.valid_until = float("-inf")

    def confirm_fenced(self, agent: str, borrower_id: str) -> None:
        """Write the pending releases of a fenced borrower at once, as it has confirmed."""
        for entry, pending in self._find_pending_releases():
            if (pending.agent, pending.borrower_id) == (agent, borrower_id):
                self._write_in_time(entry, pending)

    def _find_pending_releases(self) -> list[tuple[StreamEntry, DeferredForceRelease]]:
        entries = [entry for stream_id in self._releasing if (entry := self._streams.get(stream_id)) is not None]
        pending = [(entry, entry.pending_release) for entry in entries if entry.pending_release is not None]
        self._releasing = {entry.lending.stream_id for entry, _ in pending}
        return pending

    def _write_in_time(self, entry: StreamEntry, pending_release: DeferredForceRelease) -> None:
        entry.pending_release = None
        self._streams.enqueue(pending_release.change)

    def extend_validity(self, member: Member, now: float) -> tuple[tuple[int, int], ...]:
        """Let the borrower begin calls for a while longer; return (stream, grant id) of the excepted grants."""
        member.validity_extended_at = now
        return self.list_not_extended(member, now)

    def list_not_extended(self, member: Member, now: float) -> tuple[tuple[int, int], ...]:
        """Return (stream, grant id) of what was taken from the borrower by force, or ends before it would be valid
        no more."""
        assignments = [assignment for _, assignment in self._streams.find_assigned(member.streams)]
        validity_s = self._settings.grant_validity_s
        ending = {(a.stream_id, a.grant_id) for a in assignments if now >= a.deadline - validity_s}
        return tuple(sorted(member.taken | ending))

    # --- messages and commands --------------------------------------------------------------------------------------

    def revoke(self, stream_ids: Iterable[int], reason: str, now: float, deadline: float = _NEVER) -> None:
        """Revoke streams, at the deadline without final progress."""
        for _, assignment in self._streams.find_assigned(stream_ids):
            # Repeating a revoke does not extend its deadline: otherwise a forced release could be put off for ever.
            assignment.reason, assignment.deadline = reason, min(deadline, assignment.deadline)
            if assignment.grant_id and assignment.status is not GrantStatus.REVOKING:
                self._streams.enqueue(RecordHistory(assignment.stream_id, assignment.grant_id, "revoke", reason))
            self.apply_event(assignment, GrantTransitionEvent.REVOKE, now)

    def record_read_error(self, assignment: StreamAssignment, read_error: str, now: float) -> None:
        """Record a change of the holder's read error in the history, at most one error of a stream in the resend
        interval; an empty error means that it can read again, which is recorded at once behind one that was."""
        assignment.read_error = read_error
        self._record_reading(assignment.stream_id, now)

    def _record_reading(self, stream_id: int, now: float) -> None:
        """Record what history does not have of the holder's reading, or leave it to a later call if it is too early."""
        entry = self._streams.get(stream_id)
        a = entry.assignment if entry is not None else None
        self._unrecorded.discard(stream_id)
        if entry is None or a is None or a.is_final_queued or a.read_error == a.recorded_read_error:
            return
        if a.read_error and now < entry.read_error_recorded_at + self._settings.resend_interval_s:
            self._unrecorded.add(stream_id)
            return
        entry.read_error_recorded_at = now if a.read_error else entry.read_error_recorded_at
        a.recorded_read_error = a.read_error
        event, reason = (UNREADABLE, a.read_error) if a.read_error else (READABLE, "it can be read again")
        self._streams.enqueue(RecordHistory(a.stream_id, a.grant_id, event, reason))

    def apply_final_progress(self, member: Member, streams: Iterable[StreamProgress], now: float) -> None:
        """Apply the progress of a disconnect, which names every stream that the borrower has; it never had the others,
        such as those whose grant is not written yet.

        Progress that is not final ended in the middle of a batch: messages after its position may be seen twice.
        """
        progress_by_grant = {(p.stream_id, p.grant_id): p for p in streams if p.stream_id in member.streams}
        for entry, assignment in self._streams.find_assigned(member.streams):
            if not assignment.grant_id:
                self._actions.detach(entry)
                continue
            progress = progress_by_grant.get((assignment.stream_id, assignment.grant_id))
            if progress is None:
                self.apply_event(assignment, GrantTransitionEvent.REVOKE_FINISHED, now)
            else:
                assignment.delivered_end, assignment.consumed = progress.delivered_end, progress.consumed
                assignment.is_beyond_head = progress.beyond_head
                self.apply_event(
                    assignment,
                    GrantTransitionEvent.FINAL if progress.final else GrantTransitionEvent.ABORTED,
                    now,
                    progress.position,
                )

    # --- answers of the database ------------------------------------------------------------------------------------

    def grant_written(self, entry: StreamEntry, change: GrantStream | ReclaimStream, applied: bool, now: float) -> None:
        """Handle a written or rejected grant. If its borrower has gone meanwhile, end the grant."""
        assignment = entry.assignment
        if not applied:
            entry.retry_at = now + self._settings.resend_interval_s
        if assignment is None or assignment.borrower_id != change.borrower_id:
            # Otherwise a successor has reclaimed it meanwhile.
            if applied and assignment is None and entry.pending_release is None:
                self._streams.enqueue(give_back(entry, change, self._compute_reserved_s(entry, change)))
            return
        if not applied:
            self.apply_event(
                assignment,
                GrantTransitionEvent.LOST if isinstance(change, ReclaimStream) else GrantTransitionEvent.GRANT_REFUSED,
                now,
            )
            return
        assignment.grant_id = entry.lending.grant_id
        self._actions.waiting.add(assignment.stream_id)
        self.apply_event(assignment, GrantTransitionEvent.GRANT_WRITTEN, now)

    def _compute_reserved_s(self, entry: StreamEntry, change: GrantStream | ReclaimStream) -> float:
        """Return how long the stream of a borrower that was lost while this was written is reserved for its session, in
        seconds: 0 if it was not the session's before, or that may not come back."""
        is_new = isinstance(change, GrantStream) and change.reason != _RESERVED
        is_over = is_new or entry.denied_session == entry.lending.session
        return 0.0 if is_over else self._actions.compute_reserved_s(entry)

    def progress_written(self, entry: StreamEntry, change: AdvancePosition, applied: bool, now: float) -> None:
        """Handle written progress: it is durable, has finished the stream, or came under a grant that is over."""
        assignment = entry.assignment
        if assignment is None or assignment.grant_id != change.grant_id:
            return
        if not applied:
            self.apply_event(assignment, GrantTransitionEvent.LOST, now)
        elif entry.lending.status is LendingStatus.FINISHED:
            self.apply_event(assignment, GrantTransitionEvent.ENDED, now)
        else:
            self.apply_event(assignment, GrantTransitionEvent.SAVED, now, entry.lending.position)

    def end_written(self, entry: StreamEntry, change: ReleaseStream | ForceRelease, applied: bool, now: float) -> None:
        """Handle the written end of a grant, with or without final progress; not `applied`: it was over before."""
        assignment = entry.assignment
        if applied:
            entry.valid_until = float("-inf")
        if assignment is not None and assignment.grant_id == change.grant_id:
            self.apply_event(assignment, GrantTransitionEvent.ENDED if applied else GrantTransitionEvent.LOST, now)
        successor = change.successor if isinstance(change, ReleaseStream) else None
        if applied and successor is not None and entry.lending.status is LendingStatus.HELD:
            member = self._members.get(successor.borrower_id)
            if member is not None and member.is_eligible:
                self.begin_grant(entry, member, now)
            self.grant_written(entry, successor, True, now)

    # --- time and balance -------------------------------------------------------------------------------------------

    def resend(self, now: float) -> None:
        """Resend what was not answered, and end at its deadline what is to be taken by force."""
        for waiting, pending in self._find_pending_releases():
            if now >= pending.at:
                self._write_in_time(waiting, pending)
        for stream_id in tuple(self._unrecorded):
            self._record_reading(stream_id, now)
        for stream_id in tuple(self._actions.waiting):
            entry = self._streams.get(stream_id)
            assignment = entry.assignment if entry else None
            if assignment is None or assignment.status is GrantStatus.GRANTED:
                self._actions.waiting.discard(stream_id)
            elif now >= assignment.deadline and not assignment.is_final_queued:
                self.apply_event(assignment, GrantTransitionEvent.DEADLINE, now)
            elif now >= assignment.resend_at:
                self.apply_event(assignment, GrantTransitionEvent.RESEND, now)
        for assignment in self._members.unconfirmed.values():
            if now >= assignment.resend_at:
                self.apply_event(assignment, GrantTransitionEvent.RESEND, now)

    def rebalance(self, now: float) -> float:
        """Grant and revoke by the strategy's plan; return when to try again what could not move yet."""
        balanced = self._rebalancer.plan(now)
        for stream_id, borrower_id in balanced.reclaimed:
            self._grant(stream_id, borrower_id, _RESERVED, now)
        for stream_id in balanced.expired_reservations:
            self._unreserve(stream_id)
        for stream_id, borrower_id in balanced.plan.grants:
            self._grant(stream_id, borrower_id, "allocated", now)
        self.revoke(balanced.plan.revokes, "rebalance", now)
        self._actions.next_holders = dict(balanced.plan.moves)
        return balanced.retry_at

    def forget_plan(self) -> None:
        """Leave what is being revoked to the next plan, as the group has changed since the last."""
        self._actions.next_holders = {}

    def strategy_errors(self) -> list[str]:
        """Return the strategy's errors since the last call, for operators."""
        problems, self._rebalancer.strategy_errors = self._rebalancer.strategy_errors, []
        return problems

    def _grant(self, stream_id: int, borrower_id: str, reason: str, now: float) -> None:
        entry, member = self._streams.get(stream_id), self._members.get(borrower_id)
        assert entry is not None
        assert member is not None
        self.begin_grant(entry, member, now)
        self._streams.enqueue(make_grant(stream_id, member, reason))

    def _unreserve(self, stream_id: int) -> None:
        entry = self._streams.get(stream_id)
        assert entry is not None
        row = entry.lending
        reason = f"session {row.session!r} has not come back to what it left in doubt"
        self._streams.enqueue(FreeReservedStream(stream_id, row.grant_id, reason))
