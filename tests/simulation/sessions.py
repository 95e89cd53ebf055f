"""A session that works on all its streams concurrently, call by call, and reports progress.

Streams of atomic groups are consumed in whole epochs (`atomic`), all others message by message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from sublet_borrower.machine.events import (
    AssignmentUpdate,
    GroupFrontiersAdvanced,
    RevokeStarted,
    SavedProgress,
    StreamGranted,
    StreamRemoved,
)
from sublet_protocol.messages.borrower_leader import Grant, GrantEndOutcome
from tests.simulation.atomic import AtomicReading, AtomicWork
from tests.simulation.work import Work

if TYPE_CHECKING:
    from tests.simulation.agents import SimulatedAgent


@dataclass(slots=True)
class CountedWork(Work):
    """A stream that is consumed message by message. `begun`: its first position; `in_hand`: messages in the current
    call; `beyond_head`: the stream was found to end before its position."""

    begun: int
    in_hand: int = 0
    stopping: bool = False
    beyond_head: bool = False


class Session:
    """The session of one subscription."""

    def __init__(self, agent: SimulatedAgent, handle: int) -> None:
        self._agent, self._handle = agent, handle
        self._simulation, self._world = agent.simulation, agent.world
        self._work: dict[int, CountedWork | AtomicWork] = {}
        # A generator of its own, so that all else is the same as if no user aborted.
        self._whims = Random(f"{agent.simulation.seed} {agent.name} {handle}")
        self._sees_lower_heads = Random(f"{agent.simulation.seed} {agent.name} sees lower heads").random() < 0.5
        self._complete = AtomicReading(agent, handle, self._whims, self._later)

    def reported(self, notify: AssignmentUpdate, group_id: int | None) -> None:
        """Handle an update from the borrower, in order."""
        match notify:
            case StreamGranted(grant):
                assert group_id is not None
                self._install(group_id, grant)
            case RevokeStarted():
                self._stop(self._work[notify.stream_id])
            case StreamRemoved(reason=reason):
                work = self._work.pop(notify.stream_id)
                work.over = True
                self._simulation.checkers.removed(work, reason is GrantEndOutcome.LOST)
            case GroupFrontiersAdvanced(epochs):
                assert group_id is not None
                self._simulation.checkers.epochs.announcements.received(group_id, epochs)
                for work in self._work.values():
                    if isinstance(work, AtomicWork):
                        self._complete.note(work, epochs)
            case SavedProgress():
                pass

    def is_idle(self, stream_id: int) -> bool:
        """Return whether no call runs on the stream."""
        work = self._work[stream_id]
        return not (work.busy or (isinstance(work, AtomicWork) and work.granted.is_mid_step))

    def leave(self) -> None:
        """Do nothing: current calls are finished when the revokes arrive."""

    def close(self) -> None:
        """End the session, in the middle of anything."""
        for work in self._work.values():
            work.over = True

    def _install(self, group_id: int, grant: Grant) -> None:
        work = AtomicWork.of(group_id, grant) if grant.consumed is not None else None
        counted = CountedWork(group_id, grant.stream_id, grant.grant_id, grant.position, grant.position)
        self._work[grant.stream_id] = work or counted
        self._simulation.checkers.names.installed(work or counted)
        if work is not None:
            self._complete.go_on(work)
        else:
            self._next(counted)

    def _stop(self, work: CountedWork | AtomicWork) -> None:
        if isinstance(work, AtomicWork):
            self._complete.stop(work)
            return
        work.stopping = True
        if not work.busy:
            self._report(work)
        elif self._whims.random() < 0.1:
            self._give_up(work)

    def _give_up(self, work: CountedWork) -> None:
        """Abort in the middle of a call, as a user may when the stream is revoked."""
        self._world.say(self._agent.name, f"gives up {work}")
        work.busy, work.over = False, True
        self._agent.report(self._handle, work, final=True, until=work.position + work.in_hand)

    def _next(self, work: CountedWork) -> None:
        """Begin a user call if there is something to do and it is allowed, else retry later."""
        agent, rnd = self._agent, self._world.random
        if not agent.alive or work.over or work.stopping:
            return
        allowed = agent.machine.may_start_call(self._handle, work.stream_id, work.grant_id, agent.now)
        ready = self._simulation.streams.streams[work.stream_id].head - work.position
        if ready < 0 and self._sees_lower_heads:
            work.stopping = work.beyond_head = True
            self._report(work)
            return
        if not allowed or ready <= 0 or not agent.may_read(work.grant_id):
            self._later(rnd.uniform(0.2, 0.8), lambda: self._next(work))
            return
        count = rnd.randint(1, ready)
        work.busy, work.in_hand = True, count
        offsets = range(work.position, work.position + count)
        counts = self._simulation.checkers.deliveries.call_started(agent.name, work, offsets)
        slow = rnd.uniform(5, 18) if self._world.chance(0.03) else rnd.uniform(0.05, 0.6)
        if self._world.now < agent.slow_until:
            slow = self._whims.uniform(1.0, 6.0)
        self._later(slow, lambda: self._finish(work, offsets, counts))

    def _finish(self, work: CountedWork, offsets: range, counts: bool) -> None:
        if not self._agent.alive or (work.over and not work.busy):
            return
        work.busy = False
        work.position = offsets.stop
        if counts:
            self._simulation.checkers.deliveries.call_finished(work, offsets)
        self._report(work)
        self._next(work)

    def _report(self, work: CountedWork) -> None:
        if not work.over:
            self._agent.report(self._handle, work, work.stopping)

    def _later(self, delay_s: float, happening: Callable[[], None]) -> None:
        self._world.after(delay_s, lambda: self._agent.awake(happening))
