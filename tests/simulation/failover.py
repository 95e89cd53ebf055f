"""Failovers to a standby that is slightly behind: the last writes are lost.

The database is on another timeline, by a clock that may be behind by more than that. Nodes and consumers continue with
what they remember. It has its own random generator, and runs without queries.

That a term of another timeline is over, and its grants with it, is implemented here (`FENCED`) as in the database's
functions, which the twin does not have. If streams were opened in the moments that would be lost, the failover is
postponed.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.simulation.publishers import PublisherFrontier
from tests.simulation.world import Happenings
from tests.support.memory_store.catalogue import MemoryCatalogue

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

FENCED = True
"""Whether a term ends with its timeline."""
_RETRY_INTERVAL_S = 1.5


@dataclass(frozen=True, slots=True)
class Standby:
    store: tuple[Any, ...]
    streams: dict[int, tuple[Any, ...]]
    gone: frozenset[tuple[int, bool]]
    journal: tuple[Any, ...]
    checkers: tuple[Any, ...]
    holding: dict[int, list[PublisherFrontier]]
    committed: frozenset[str]


class Failover(Happenings):
    """At most one failover per run."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the failover")
        self.runs = self._random.random() < 0.1
        self.happened = 0

    def begin(self, until: float) -> None:
        if self.runs:
            self._until = until
            self._world.after(self._random.uniform(10.0, 35.0), self._fall_behind)

    def _fall_behind(self) -> None:
        if self._world.now < self._until - 4.0:
            standby = self._standby()
            self._world.after(self._random.uniform(0.1, 3.0), lambda: self._promote(standby))

    def _standby(self) -> Standby:
        simulation = self._simulation
        streams, journal = simulation.streams, simulation.journal
        return Standby(
            simulation.store.saved(),
            {i: (s.head, s.closed, s.blocks[:], s.block_summaries[:]) for i, s in streams.streams.items()},
            _gone(streams),
            (deepcopy(journal.parts), deepcopy(journal.appended), dict(streams.lowers)),
            simulation.checkers.saved(),
            simulation.publishing.saved(),
            frozenset(simulation.users.committed),
        )

    def _promote(self, standby: Standby) -> None:
        simulation, streams = self._simulation, self._simulation.streams
        if standby.streams.keys() != streams.streams.keys() or standby.gone != _gone(streams):
            self._world.after(_RETRY_INTERVAL_S, self._fall_behind)
            return
        lost = sum(s.head - standby.streams[i][0] for i, s in streams.streams.items())
        self._world.say("database", f"fails over to a standby: {lost} messages are lost")
        self.happened += 1
        for stream_id, stream in streams.streams.items():
            stream.head, stream.closed, stream.blocks, stream.block_summaries = standby.streams[stream_id]
            del simulation.journal.keys[stream_id][stream.head :]
        simulation.publishing.failed_over(standby.holding)
        simulation.users.committed = set(standby.committed)
        simulation.journal.parts, simulation.journal.appended, streams.lowers = standby.journal
        simulation.checkers.failed_over(standby.checkers, FENCED)
        simulation.store.restore(standby.store, FENCED)
        if self._random.random() < 0.5:
            self._world.set_clock_back(self._random.uniform(0.0, 20.0))
        down_s = self._random.uniform(0.1, 4.0)
        for node in simulation.nodes:
            node.way.down(down_s)
        simulation.lock_fault_injector.fail_over()


def _gone(streams: MemoryCatalogue) -> frozenset[tuple[int, bool]]:
    """What retention has taken, and whether its rows are deleted."""
    return frozenset((g.generation_id, g.deleted) for g in streams.generations.values() if g.gone)
