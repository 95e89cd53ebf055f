"""Rebalances a group: returns reserved streams to their sessions, and calls the strategy for all others.

A stream that is reserved for a session goes to that session alone, if it is connected, and else waits until the
reservation ends; where something is in doubt until another member is there, too. A strategy that breaks the rules of
its interface is replaced by `even` for the rest of this leader's term. Of the streams whose next messages may have
ended their holders a borrower has one at a time.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field
from msgspec.structs import replace

from sublet_leader.allocation import (
    AllocationInput,
    AllocationPlan,
    AllocationStrategy,
    EvenStrategy,
    StreamLoad,
    load_strategy,
    validate_plan,
)
from sublet_leader.group.grant_transitions import GrantStatus
from sublet_leader.group.members import Member, Members
from sublet_leader.group.stream_table import StreamEntry, StreamTable
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import InvalidSetting
from sublet_storage.groups.model.records import LendingStatus

ISOLATION_S = 60.0
"""For how long a borrower that has a suspect, and goes on with nothing of it, gets no other one."""

_NEVER = float("inf")


class _GroupView(Struct):
    """The group as the strategy gets it. `retry_at`: when streams that cannot move now may."""

    holders: dict[int, str] = field(default_factory=dict)
    free_streams: list[int] = field(default_factory=list)
    moving_streams: list[int] = field(default_factory=list)
    movable_streams: list[int] = field(default_factory=list)
    last_holders: dict[int, str] = field(default_factory=dict)
    loads: dict[int, StreamLoad] = field(default_factory=dict)
    reclaimed: list[tuple[int, str]] = field(default_factory=list)
    expired_reservations: list[int] = field(default_factory=list)
    has_immovable_streams: bool = False
    retry_at: float = _NEVER


class RebalanceResult(Struct, frozen=True):
    """The plan of one rebalance. `reclaimed`: (stream, borrower) of streams that go back to the session they were
    reserved for. `expired_reservations`: reserved streams whose session has not come back in time, and that others are
    there for. `retry_at`: when to rebalance again."""

    plan: AllocationPlan
    reclaimed: tuple[tuple[int, str], ...]
    expired_reservations: tuple[int, ...]
    retry_at: float


class Rebalancer:
    """Calls the strategy named `strategy`; `strategy_errors` collects its errors for operators."""

    def __init__(self, streams: StreamTable, members: Members, strategy: str, settings: LeaderSettings) -> None:
        self._streams, self._members, self._settings = streams, members, settings
        self.strategy_errors: list[str] = []
        self._strategy: AllocationStrategy = EvenStrategy()
        try:
            self._strategy = load_strategy(strategy)
        except InvalidSetting as problem:
            self.strategy_errors.append(f"{problem} Until this leader is over its streams are shared out evenly.")

    def plan(self, now: float) -> RebalanceResult:
        """Return what to grant and what to revoke at this moment."""
        view = self._build_view(now)
        weights = self._members.weights()
        allocation_input = AllocationInput(
            view.holders,
            view.free_streams,
            weights,
            view.movable_streams,
            view.moving_streams,
            view.last_holders,
            view.loads,
        )
        plan = self._call_strategy(allocation_input)
        if withheld := self._find_withheld((*view.reclaimed, *plan.grants), now):
            view.reclaimed = [grant for grant in view.reclaimed if grant[0] not in withheld]
            plan = replace(plan, grants=tuple(grant for grant in plan.grants if grant[0] not in withheld))
            view.retry_at = min(view.retry_at, now + self._settings.rebalance_debounce_s)
        if view.has_immovable_streams:
            view.retry_at = min(view.retry_at, now + self._settings.min_grant_duration_s)
        return RebalanceResult(plan, tuple(view.reclaimed), tuple(view.expired_reservations), view.retry_at)

    def _find_withheld(self, grants: Iterable[tuple[int, str]], now: float) -> set[int]:
        """Return the suspects among these streams whose borrowers have another one, or get it."""
        suspects = [entry for entry in self._streams if entry.lending.is_suspect]
        isolating = {
            entry.assignment.borrower_id
            for entry in suspects
            if entry.assignment is not None and now < entry.assignment.granted_at + ISOLATION_S
        }
        stream_ids, withheld = {entry.lending.stream_id for entry in suspects}, set[int]()
        for stream_id, borrower_id in grants:
            if stream_id in stream_ids:
                if borrower_id in isolating:
                    withheld.add(stream_id)
                isolating.add(borrower_id)
        return withheld

    def _call_strategy(self, allocation_input: AllocationInput) -> AllocationPlan:
        try:
            return validate_plan(self._strategy.plan(allocation_input), allocation_input)
        except Exception as problem:
            if isinstance(self._strategy, EvenStrategy):
                raise
            problem_text = f"{type(problem).__name__}: {problem}"
            self.strategy_errors.append(
                f"the strategy {self._strategy!r} failed, `even` goes on in its place: {problem_text}"
            )
            self._strategy = EvenStrategy()
            return self._strategy.plan(allocation_input)

    def _build_view(self, now: float) -> _GroupView:
        view = _GroupView()
        ripe = now - self._settings.min_grant_duration_s
        eligible = {(m.agent, m.session): m for m in self._members if m.is_eligible}
        for entry in self._streams:
            stream_id, assignment = entry.lending.stream_id, entry.assignment
            load = entry.meter.load()
            if load is not None:
                view.loads[stream_id] = load
            barred_until = max(entry.retry_at, entry.valid_until)
            if entry.is_quiet and barred_until > now:
                view.retry_at = min(view.retry_at, barred_until)
            if (successor := entry.successor) is not None:
                view.holders[stream_id] = successor.borrower_id
                view.has_immovable_streams = True
            elif assignment is not None and assignment.status is not GrantStatus.REVOKING:
                view.holders[stream_id] = assignment.borrower_id
                if assignment.status is GrantStatus.GRANTED and assignment.granted_at <= ripe:
                    view.movable_streams.append(stream_id)
                else:
                    view.has_immovable_streams = True
            elif self._streams.is_grantable(entry, now):
                self._offer(entry, now, view, eligible)
            elif assignment is not None or entry.in_flight is not None:
                view.moving_streams.append(stream_id)
        return view

    def _offer(
        self, entry: StreamEntry, now: float, view: _GroupView, eligible: dict[tuple[str, str | None], Member]
    ) -> None:
        row, stream_id = entry.lending, entry.lending.stream_id
        is_waited_for = entry.reserved_until > now and row.session is not None
        if is_waited_for or row.status is LendingStatus.RESERVED:
            owner = self._members.find_by_session(row.session or "")
            if owner is not None and owner.is_eligible:
                view.holders[stream_id] = owner.borrower_id
                view.reclaimed.append((stream_id, owner.borrower_id))
                view.has_immovable_streams = True
            elif is_waited_for:
                view.retry_at = min(view.retry_at, entry.reserved_until)
            elif eligible:  # else nobody would get it, and what its session has in doubt would be forgotten for nothing
                view.expired_reservations.append(stream_id)
            return
        view.free_streams.append(stream_id)
        if entry.last_holder is not None:
            holder = entry.last_holder
            member = self._members.get(holder.borrower_id) or eligible.get((holder.agent, holder.session))
            if member is not None and member.is_eligible:
                view.last_holders[stream_id] = member.borrower_id
