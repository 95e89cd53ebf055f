"""Virtual time, the network, and the trace."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

EPOCH_US = 1_700_000_000_000_000
"""What the database's clock says at virtual time 0."""


@dataclass(frozen=True, slots=True)
class Weather:
    """What the network and the database do to messages. Chances are per message, times in seconds."""

    lost: float = 0.02
    repeated: float = 0.02
    delayed: float = 0.1
    slow_database: float = 0.01
    stalled_database: float = 0.0015
    failing_database: float = 0.004

    @classmethod
    def calm(cls) -> Weather:
        """Nothing goes wrong."""
        return cls(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class Process:
    """Something that can be stopped for a while, as by SIGSTOP: what befalls it meanwhile waits in order."""

    def __init__(self, world: World) -> None:
        self._of = world
        self._backlog: list[Callable[[], object]] | None = None

    def pause(self, duration_s: float) -> None:
        """Do nothing for so long."""
        if self._backlog is None:
            self._backlog = []
            self._of.after(duration_s, self._resume)

    def awake(self, happening: Callable[[], object]) -> None:
        """Now, or as soon as it is not paused any more."""
        if self._backlog is None:
            happening()
        else:
            self._backlog.append(happening)

    def _resume(self) -> None:
        backlog, self._backlog = self._backlog or [], None
        for happening in backlog:
            happening()


class World:
    """A heap of things to happen; everything random comes from one generator."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.weather = Weather()
        self.lines: list[str] | None = [] if trace else None
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def clock_us(self) -> int:
        """The database's clock."""
        return EPOCH_US + round(self.now * 1_000_000)

    def after(self, delay_s: float, happening: Callable[[], None]) -> None:
        """Let something happen later."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, happening))

    def run_until(self, end: float) -> None:
        """Let everything happen that is due by then."""
        while self._heap and self._heap[0][0] <= end:
            self.now, _, happening = heapq.heappop(self._heap)
            happening()
        self.now = end

    def chance(self, probability: float) -> bool:
        """True as often as that."""
        return self.random.random() < probability

    def say(self, who: str, what: object) -> None:
        """A line of the trace."""
        if self.lines is not None:
            self.lines.append(f"{self.now:9.3f} {who:<8} {what}")

    def transmit(self, deliver: Callable[[], None]) -> None:
        """A message: usually within milliseconds, sometimes late, lost or twice."""
        if self.chance(self.weather.lost):
            return
        for _ in range(2 if self.chance(self.weather.repeated) else 1):
            late = self.random.uniform(0.1, 3.0) if self.chance(self.weather.delayed) else 0.0
            self.after(late + self.random.uniform(0.0005, 0.005), deliver)
