"""Stable sessions: the newer process of a name fences the older for good, and a name gets its own back (E23, E30)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_protocol.messages.borrower_leader import BorrowerEndReason
from sublet_storage.groups.model.records import (
    ForceRelease,
    GrantStream,
    Lending,
    LendingChangeResult,
    LendingOutcome,
    LendingStatus,
    ReleaseStream,
)
from tests.simulation.checkers.lives import Key, Lives, Violation
from tests.simulation.world import MAX_DRIFT

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedAgent, Wish
    from tests.simulation.sessions import Work
    from tests.simulation.simulation import Simulation

_WANTED_AWAY = ("rebalance", "operator", "deadline", "by hand", "handed back", "paused")
"""Reasons for which a stream leaves a session that might have stayed: then it is kept for nobody. (One that is handed
back was revoked by a leader before.)"""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who was granted a stream."""

    agent: str
    session: str | None
    epoch: int


class Names:
    """Knows from outside which processes bear which name, and since when."""

    def __init__(self, simulation: Simulation, lives: Lives) -> None:
        self._simulation, self._lives = simulation, lives
        self._holders: dict[Key, Holder] = {}
        self._reconnecting: dict[Key, tuple[str, float]] = {}
        self._installed: set[tuple[int, int, int]] = set()
        self.returned = self.fenced = 0

    def installed(self, work: Work) -> None:
        """From now on the stream is that session's own; a grant that never reached it is nobody's loss."""
        self._installed.add((work.group_id, work.stream_id, work.grant_id))

    def saved(self) -> tuple[Any, ...]:
        return dict(self._holders), dict(self._reconnecting)

    def failed_over(self, saved: tuple[Any, ...], fenced: bool) -> None:
        """The rows are as they were then; with its timeline a grant is over, and its stream kept for nobody."""
        self._holders, self._reconnecting = saved
        if fenced:
            self._holders.clear()

    def was_taken_back(self, key: Key) -> None:
        """An operator has set the stream, or what comes before it, to another position: it is kept for nobody."""
        self._holders.pop(key, None)
        self._reconnecting.pop(key, None)

    def answered(self, group_id: int, answer: LendingChangeResult) -> None:
        key = group_id, answer.change.stream_id
        status = answer.lending.status if answer.lending is not None else None
        if answer.outcome is LendingOutcome.APPLIED and isinstance(answer.change, GrantStream):
            self._granted(key, answer.change)
        elif answer.outcome is LendingOutcome.APPLIED and isinstance(answer.change, ReleaseStream | ForceRelease):
            self._ended(key, answer.change, status is LendingStatus.FREE)
        if answer.lending is not None:
            self.read(group_id, answer.lending)

    def read(self, group_id: int, row: Lending) -> None:
        """The stream's row says so now: what is blocked or finished is held by nobody."""
        if row.status is not LendingStatus.HELD:
            self._holders.pop((group_id, row.stream_id), None)

    def _granted(self, key: Key, entry: GrantStream) -> None:
        """Never to an older process of a name whose newer one has streams; what is kept for a name, only to that name.
        (Of a newer one that has had nothing for a while no row says so to a new leader.)"""
        epoch = entry.session_epoch or 0
        if entry.session is not None and epoch:
            rival = self._rival(key[0], entry.session, epoch)
            if rival is not None:
                raise Violation(f"{key}: {entry}, but a newer process of that session has streams: {rival}")
        retained = self._reconnecting.pop(key, None)
        if retained is not None and self._simulation.world.now < retained[1]:
            if entry.session != retained[0]:
                raise Violation(f"{key}: {entry}, but until {retained[1]:.3f} it is kept for {retained[0]!r}")
            self.returned += 1
        self._holders[key] = Holder(entry.agent, entry.session, epoch)

    def _rival(self, group_id: int, session: str, epoch: int) -> Holder | None:
        return next(
            (h for (g, _), h in self._holders.items() if g == group_id and h.session == session and h.epoch > epoch),
            None,
        )

    def _ended(self, key: Key, entry: ReleaseStream | ForceRelease, free: bool) -> None:
        """The end of a grant whose named holder has gone: from here on it is to be kept, if the group wants that."""
        holder = self._holders.pop(key, None)
        if not free or holder is None or holder.session is None or not holder.epoch:
            return
        expiry_s = self._lives[key[0]].group.options.session_expiry_s
        fenced = entry.reason.startswith("fenced")
        if fenced:
            expiry_s = max(expiry_s, self._simulation.fence_s)
        own = (*key, entry.grant_id) in self._installed
        gone = fenced or (own and self._has_gone(key, holder) and not entry.reason.startswith(_WANTED_AWAY))
        if gone and expiry_s:
            # A leader counts the time by its own clock, which may be fast.
            until = self._simulation.world.now + expiry_s / (1 + MAX_DRIFT) - 0.1
            self._reconnecting[key] = (holder.session, until)

    def _has_gone(self, key: Key, holder: Holder) -> bool:
        agent = self._simulation.agents[holder.agent]
        subscription = self._lives[key[0]].group.subscription
        return not any(w.subscription == subscription and w.epoch == holder.epoch for w in agent.wishes.values())

    def closed(self, agent: SimulatedAgent, closed: SubscriptionClosed, wish: Wish | None, left: bool) -> None:
        """Each end has its cause: it left, its group was deleted, or a newer process of its name came."""
        match closed.reason:
            case BorrowerEndReason.DONE:
                right = left
            case BorrowerEndReason.DELETED:
                right = wish is not None and wish.group_id is not None and self._lives.is_deleted(wish.group_id)
            case BorrowerEndReason.FENCED:
                right = wish is not None and self._is_superseded(agent, wish)
                self.fenced += 1
            case BorrowerEndReason.DENIED:
                right = wish is not None and wish.subscription in self._simulation.groups.retired
            case _:
                right = False
        if not right:
            raise Violation(f"{agent.name}: {closed} without a cause, {wish}")

    def _is_superseded(self, agent: SimulatedAgent, wish: Wish) -> bool:
        return any(
            other.session == agent.session and newest > wish.epoch
            for other in self._simulation.agents.values()
            for newest in other.epochs.get(wish.subscription, ())
        )
