"""Who should have which stream now: what the group's strategy is asked, and what comes before it is asked.

A stream that is kept for a session, free or reserved, goes to that session alone, if it is there, and else waits until
it is kept no longer. All others are the strategy's to share out. One that breaks the rules of its interface is replaced
by `even` for the rest of this leader's life.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sublet_leader.allocation import EvenStrategy, Load, Plan, Situation, Strategy, checked, find_strategy
from sublet_leader.group.members import Member, Members
from sublet_leader.group.stream_table import Slot, Slots
from sublet_leader.group.table import Status
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import InvalidSetting
from sublet_storage.groups.model.records import LendingStatus

_NEVER = float("inf")


@dataclass(slots=True)
class _View:
    """The group as the strategy is to see it. `again_at`: when something that cannot move now may."""

    held: dict[int, str] = field(default_factory=dict)
    free: list[int] = field(default_factory=list)
    moving: list[int] = field(default_factory=list)
    movable: list[int] = field(default_factory=list)
    last: dict[int, str] = field(default_factory=dict)
    load: dict[int, Load] = field(default_factory=dict)
    returning: list[tuple[int, str]] = field(default_factory=list)
    overdue: list[int] = field(default_factory=list)
    unripe: bool = False
    again_at: float = _NEVER


@dataclass(frozen=True, slots=True)
class Balanced:
    """`returning`: (stream, borrower) of streams that go back to the session they were kept for. `overdue`: reserved
    streams whose session has not come back in time. `again_at`: look again at that time."""

    plan: Plan
    returning: tuple[tuple[int, str], ...]
    overdue: tuple[int, ...]
    again_at: float


class Balance:
    """Asks the strategy named `strategy`; `problems` tells people what was wrong with it."""

    def __init__(self, slots: Slots, members: Members, strategy: str, settings: LeaderSettings) -> None:
        self._slots, self._members, self._settings = slots, members, settings
        self.problems: list[str] = []
        self._strategy: Strategy = EvenStrategy()
        try:
            self._strategy = find_strategy(strategy)
        except InvalidSetting as problem:
            self.problems.append(f"{problem} Until this leader is over its streams are shared out evenly.")

    def now(self, now: float) -> Balanced:
        """What to grant and revoke at this moment."""
        view = self._look(now)
        weights = self._members.weights()
        situation = Situation(view.held, view.free, weights, view.movable, view.moving, view.last, view.load)
        plan = self._ask(situation)
        if view.unripe:
            view.again_at = min(view.again_at, now + self._settings.min_hold_s)
        return Balanced(plan, tuple(view.returning), tuple(view.overdue), view.again_at)

    def _ask(self, situation: Situation) -> Plan:
        try:
            return checked(self._strategy.plan(situation), situation)
        except Exception as problem:
            if isinstance(self._strategy, EvenStrategy):
                raise
            said = f"{type(problem).__name__}: {problem}"
            self.problems.append(f"the strategy {self._strategy!r} failed, `even` goes on in its place: {said}")
            self._strategy = EvenStrategy()
            return self._strategy.plan(situation)

    def _look(self, now: float) -> _View:
        view = _View()
        ripe = now - self._settings.min_hold_s
        by_agent = {(m.agent, m.session): m for m in self._members}
        for slot in self._slots:
            stream_id, assignment = slot.lending.stream_id, slot.assignment
            load = slot.meter.load()
            if load is not None:
                view.load[stream_id] = load
            barred_until = max(slot.retry_at, slot.promised_until)
            if slot.quiet and barred_until > now:
                view.again_at = min(view.again_at, barred_until)
            if assignment is not None and assignment.status is not Status.REVOKING:
                view.held[stream_id] = assignment.borrower_id
                if assignment.status is Status.GRANTED and assignment.since <= ripe:
                    view.movable.append(stream_id)
                else:
                    view.unripe = True
            elif self._slots.grantable(slot, now):
                self._offer(slot, now, view, by_agent)
            elif assignment is not None or slot.in_flight is not None:
                view.moving.append(stream_id)
        return view

    def _offer(self, slot: Slot, now: float, view: _View, by_agent: dict[tuple[str, str | None], Member]) -> None:
        stream_id, is_reserved = slot.lending.stream_id, slot.lending.status is LendingStatus.RESERVED
        if slot.kept_until > now and slot.lending.session is not None:
            owner = self._members.named(slot.lending.session)
            if owner is not None and owner.takes_part:
                view.held[stream_id] = owner.borrower_id
                view.returning.append((stream_id, owner.borrower_id))
                view.unripe = True
            else:
                view.again_at = min(view.again_at, slot.kept_until)
            return
        if is_reserved:
            view.overdue.append(stream_id)
            return
        view.free.append(stream_id)
        if slot.last is not None:
            before = self._members.get(slot.last.borrower_id) or by_agent.get((slot.last.agent, slot.last.session))
            if before is not None and before.takes_part:
                view.last[stream_id] = before.borrower_id
