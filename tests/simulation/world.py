"""Virtual time, the random generator, the weather and the trace of a run."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

EPOCH_US = 1_700_000_000_000_000
"""The database's clock at virtual time 0."""


@dataclass(frozen=True, slots=True)
class Weather:
    """Reliability of the network and the database. Probabilities are per message, times in seconds."""

    lost: float = 0.02
    repeated: float = 0.02
    delayed: float = 0.1
    slow_database: float = 0.01
    stalled_database: float = 0.0015
    failing_database: float = 0.008

    @classmethod
    def calm(cls) -> Weather:
        """Return weather without faults."""
        return _CALM


_CALM = Weather(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


class World:
    """A heap of scheduled events; everything random comes from one generator."""

    def __init__(self, seed: int, trace: bool = False) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.weather = Weather()
        self.lines: list[str] | None = [] if trace else None
        self._heap: list[tuple[float, int, Callable[[], object]]] = []
        self._count = 0
        self._clock_off_us = self._hours_us = 0

    @property
    def calm(self) -> bool:
        """Return whether the faults are over."""
        return self.weather is _CALM

    def clock_us(self) -> int:
        """Return the database's clock, by which all leases are checked."""
        return EPOCH_US + round(self.now * 1_000_000) + self._clock_off_us

    def wall_us(self) -> int:
        """Return the time of appended messages: between two of them hours may pass that leases do not see."""
        return self.clock_us() + self._hours_us

    def let_hours_pass(self, hours: float) -> None:
        """Let hours pass at once, without any event."""
        self._hours_us += round(hours * 3_600_000_000)

    @property
    def hours_s(self) -> float:
        """Return the seconds that have passed in this way."""
        return self._hours_us / 1_000_000

    def shift_clock(self, seconds: float) -> None:
        """Shift the database's clock, to record events of the past."""
        self._clock_off_us += round(seconds * 1_000_000)

    def set_clock_back(self, seconds: float) -> None:
        self._clock_off_us -= round(seconds * 1_000_000)
        self.say("database", f"its clock is set back by {seconds:.1f} s")

    def after(self, delay_s: float, happening: Callable[[], object]) -> None:
        self.at(self.now + delay_s, happening)

    def at(self, moment: float, happening: Callable[[], object]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (moment, self._count, happening))

    def run_until(self, end: float) -> None:
        while self._heap and self._heap[0][0] <= end:
            self.now, _, happening = heapq.heappop(self._heap)
            happening()
        self.now = end

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.random.random() < probability

    def say(self, who: str, *what: object) -> None:
        if self.lines is not None:
            self.lines.append(f"{self.now:9.3f} {who:<8} {' '.join(map(str, what))}")


class Happenings:
    """Something that befalls a run, until the safety phase ends. It has its own random generator, so that all else in
    the run is the same as without it."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self._simulation, self._world, self._streams = simulation, simulation.world, simulation.streams
        self._random = random.Random(f"{name} of {simulation.seed}")
        self._until = float("-inf")

    def _repeat(
        self,
        happening: Callable[[], object],
        interval_s: float,
        chance: random.Random | None = None,
        first_s: float | None = None,
    ) -> None:
        """Call it at random intervals of about that length until the phase ends; `first_s`: the first, 0: at once."""
        chance = chance or self._random

        def happen() -> None:
            if self._world.now < self._until:
                self._world.after(chance.expovariate(1 / interval_s), happen)
                happening()

        if first_s == 0.0:
            happen()
        else:
            self._world.after(first_s or chance.expovariate(1 / interval_s), happen)
