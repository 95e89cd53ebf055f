"""What consumes: a session that works on all its streams at once, call by call, and reports how far it is."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from borrower.machine.events import Install, Remove, Saved, Stop, Tell
from protocol.messages import RevokedReason

if TYPE_CHECKING:
    from tests.simulation.agents import SimulatedAgent


@dataclass(slots=True)
class Work:
    """A stream installed in a session."""

    group_id: int
    stream_id: int
    grant_id: int
    position: int
    begun: int
    in_hand: int = 0
    busy: bool = False
    stopping: bool = False
    over: bool = False


class Session:
    """The counterpart of one subscription."""

    def __init__(self, agent: SimulatedAgent, handle: int) -> None:
        self._agent, self._handle = agent, handle
        self._simulation, self._world = agent.simulation, agent.world
        self._work: dict[int, Work] = {}
        # Chances of its own, so that all else is as if no user gave anything up.
        self._whims = Random(f"{agent.simulation.seed} {agent.name} {handle}")

    def told(self, tell: Tell, group_id: int | None) -> None:
        """By the borrower, in order."""
        match tell:
            case Install(grant):
                assert group_id is not None
                self._work[grant.stream_id] = work = Work(
                    group_id, grant.stream_id, grant.grant_id, grant.position, grant.position
                )
                self._simulation.checkers.installed(work)
                self._next(work)
            case Stop():
                work = self._work[tell.stream_id]
                work.stopping = True
                if not work.busy:
                    self._report(work)
                elif self._whims.random() < 0.1:
                    self._give_up(work)
            case Remove(reason=reason):
                work = self._work.pop(tell.stream_id)
                work.over = True
                self._simulation.checkers.removed(work, reason is RevokedReason.LOST)
            case Saved():
                pass

    def is_idle(self, stream_id: int) -> bool:
        """Nothing is being done on the stream."""
        return not self._work[stream_id].busy

    def close(self) -> None:
        """The subscription is over, whatever it was doing."""
        for work in self._work.values():
            work.over = True

    def _give_up(self, work: Work) -> None:
        """The user breaks off in the middle of a call, which may happen whenever he is told to stop."""
        self._world.say(self._agent.name, f"gives up {work}")
        work.busy, work.over = False, True
        self._agent.report(self._handle, work, final=True, until=work.position + work.in_hand)

    def _next(self, work: Work) -> None:
        """Begin a user call if there is something to do and it is allowed, else look again later."""
        agent, rnd = self._agent, self._world.random
        if not agent.alive or work.over or work.stopping:
            return
        allowed = agent.machine.may_start(self._handle, work.stream_id, work.grant_id, agent.now)
        ready = self._simulation.streams.streams[work.stream_id].head - work.position
        if not allowed or ready <= 0:
            self._later(rnd.uniform(0.2, 0.8), lambda: self._next(work))
            return
        count = rnd.randint(1, ready)
        work.busy, work.in_hand = True, count
        counts = self._simulation.checkers.call_started(agent.name, work, count)
        slow = rnd.uniform(5, 18) if self._world.chance(0.03) else rnd.uniform(0.05, 0.6)
        self._later(slow, lambda: self._finish(work, count, counts))

    def _finish(self, work: Work, count: int, counts: bool) -> None:
        if not self._agent.alive or (work.over and not work.busy):
            return
        work.busy = False
        work.position += count
        if counts:
            self._simulation.checkers.call_finished(work)
        self._report(work)
        self._next(work)

    def _report(self, work: Work) -> None:
        if not work.over:
            self._agent.report(self._handle, work, work.stopping)

    def _later(self, delay_s: float, happening: object) -> None:
        assert callable(happening)
        self._world.after(delay_s, lambda: self._agent.awake(happening))
