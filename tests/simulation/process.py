"""A process with a clock of its own, which can be paused as by SIGSTOP."""

from __future__ import annotations

import math
from collections.abc import Callable

from tests.simulation.world import World

MAX_DRIFT = 0.08
"""How far a clock's rate may be off: a margin of 1 s in a lease of 10 s tolerates a little less than a tenth."""


class Process:
    """Base of simulated processes; events during a pause wait in order.

    Its clock is monotonic, begins anywhere and runs a little too fast or too slow, the same in all incarnations:
    comparing the times of two processes fails at once. There is no wall clock that could jump, since no machine uses
    one; the only dates are the database's own, whose clock may jump.
    """

    def __init__(self, world: World, name: str, drift: float) -> None:
        self.world, self.name = world, name
        self.rate = 1.0 + world.random.uniform(-drift, drift)
        self._begun_at = world.random.uniform(0.0, 1e6)
        self._backlog: list[Callable[[], object]] | None = None
        self._tick_at = self._alarm_at = math.inf

    @property
    def now(self) -> float:
        """Return the seconds of its own clock."""
        return self._begun_at + self.world.now * self.rate

    def until(self, moment: float) -> float:
        """Return the real seconds until its clock has that time, always a little more than none."""
        return max((moment - self.now) / self.rate, 0.0005)

    def pause(self, duration_s: float) -> None:
        if self._backlog is None:
            self.world.say(self.name, f"pauses for {duration_s} s")
            self._backlog = []
            self.world.after(duration_s, self._resume)

    def awake(self, happening: Callable[[], object]) -> None:
        """Call it now, or as soon as the process is not paused."""
        if self._backlog is None:
            happening()
        else:
            self._backlog.append(happening)

    def tick(self) -> None:
        raise NotImplementedError

    def tick_at(self, moment: float) -> None:
        """Let it tick at that time of its clock, instead of the previously set one."""
        self._tick_at = self.world.now + self.until(moment)
        self._set_alarm()

    def _set_alarm(self) -> None:
        """Set an alarm; one that fires too early sets the next."""
        if self._tick_at < self._alarm_at:
            self._alarm_at = at = self._tick_at
            self.world.at(at, lambda: self._ring(at))

    def _ring(self, at: float) -> None:
        if at == self._alarm_at:
            self._alarm_at = math.inf
            self.awake(self._tick_if_due)

    def _tick_if_due(self) -> None:
        if self.world.now >= self._tick_at:
            self._tick_at = math.inf
            self.tick()
        else:
            self._set_alarm()

    def _resume(self) -> None:
        backlog, self._backlog = self._backlog or [], None
        self.world.say(self.name, f"goes on, {len(backlog)} things waited")
        for happening in backlog:
            self.awake(happening)
