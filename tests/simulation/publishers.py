"""The publishers of a space, mostly in epochs, each with its own capability."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, UpperFrontier
from sublet_storage.log.block_encoder import BlockEpochRange

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_MOST = 3
_LEASE_S = (2.0, 10.0)
"""Bounds of the time until the capability of a dead publisher expires."""


@dataclass(slots=True, eq=False)
class Publisher:
    """A publisher that may publish at or after what it holds. A dead one publishes nothing more, and still holds it."""

    held: LowerFrontier
    alive: bool = True


PublisherFrontier = tuple[Publisher, LowerFrontier]


class Publishers:
    """The publishers of one space. `epochs`: {stream: the epoch of each message}, which grows."""

    def __init__(self, simulation: Simulation, space_id: int, epochs: dict[int, list[Epoch | None]]) -> None:
        self._world, self._streams, self._space_id, self._epochs = (
            simulation.world,
            simulation.streams,
            space_id,
            epochs,
        )
        self._lowered_heads = simulation.lowered_heads
        self._journal = simulation.journal
        self._random = Random(f"the epochs of {simulation.seed} in space {space_id}")
        self._numbers = self._random.choice((0, 1, 1, 1, 1, 1, 2, 2))
        self._holding: list[Publisher] = []

    def saved(self) -> list[PublisherFrontier]:
        return [(one, one.held) for one in self._holding]

    def failed_over(self, saved: Sequence[PublisherFrontier]) -> None:
        """Restore what publishers held; a dead one's capability expires after its lease again."""
        self._holding = [one for one, _ in saved]
        for one, held in saved:
            one.held = held
            if not one.alive:
                self._world.after(self._random.uniform(*_LEASE_S), partial(self._expire, one))

    def publish(self, stream_id: int, count: int) -> None:
        """Append a block of a running publisher, or of one that does not use epochs."""
        living = [one for one in self._holding if one.alive]
        one = self._random.choice([None, *living, *living])
        self._append(stream_id, [self._epoch(one) for _ in range(count)])

    def turn(self) -> None:
        """Let publishers join, advance, leave and die."""
        if not self._numbers:
            return
        for one in tuple(self._holding):
            self._live_on(one)
        if len(self._holding) < _MOST and self._random.random() < 0.3:
            self._join()
        self._settle()

    def publish_faster(self) -> None:
        """Let one publisher use an epoch, and complete one."""
        living = [one for one in self._holding if one.alive]
        open_streams = self._streams.open_streams(self._space_id)
        if living and open_streams:
            one = self._random.choice(living)
            self._append(self._random.choice(open_streams), [self._epoch(one)])
            self._advance(one)
            self._settle()

    def end(self, for_good: bool = False) -> None:
        """Remove all publishers. In some runs a new one stays, and its last epochs are never completed, unless
        `for_good`."""
        self._holding.clear()
        if not self._numbers:
            return
        self._settle()
        if not for_good and self._random.random() < 0.5:
            self._join()
            self._settle()
            for stream_id in self._streams.open_streams(self._space_id):
                self.publish(stream_id, self._random.randint(1, 5))
            self._advance(self._holding[0])
            self._settle()

    def _append(self, stream_id: int, epochs: Sequence[Epoch | None]) -> None:
        if self._lowered_heads.holds(stream_id):
            return
        some = {epoch for epoch in epochs if epoch is not None}
        bounds = BlockEpochRange(
            LowerFrontier.from_epochs(some).least, UpperFrontier.from_epochs(some).greatest, None in epochs
        )
        at_us = self._world.wall_us()
        self._streams.append(stream_id, len(epochs), at_us, bounds if some else None)
        self._journal.append(stream_id, len(epochs), at_us)
        self._epochs[stream_id] += epochs
        self._world.say("publish", f"stream {stream_id}, to {len(self._epochs[stream_id])}:", epochs)

    def _epoch(self, one: Publisher | None) -> Epoch | None:
        """Return the epoch of the next message: mostly one that is about to be completed, seldom one far ahead."""
        rnd = self._random
        if one is None or not one.held.least or rnd.random() < 0.1:
            return None
        ahead = rnd.choice((0, 0, 0, 0, 0, 1, 1, 2, 3))
        if rnd.random() < 0.02:
            ahead = rnd.randint(5, 12)
        return tuple(number + rnd.randint(0, ahead) for number in rnd.choice(one.held.least))

    def _live_on(self, one: Publisher) -> None:
        chance = self._random.random()
        if not one.alive:
            return
        if chance < 0.03:
            one.alive = False
            self._world.after(self._random.uniform(*_LEASE_S), lambda: self._expire(one))
        elif chance < 0.05:
            self._holding.remove(one)
        elif chance < 0.5:
            self._advance(one)

    def _advance(self, one: Publisher) -> None:
        """Let the publisher complete an epoch, or skip some after it."""
        rnd = self._random
        if not one.held.least:
            return
        skipped = 0 if rnd.random() < 0.8 else rnd.randint(1, 3)
        done = tuple(number + skipped for number in rnd.choice(one.held.least))
        beyond = one.held.after_completing(UpperFrontier((done,))).least
        one.held = LowerFrontier.from_epochs(rnd.sample(beyond, min(len(beyond), rnd.randint(1, 3))))

    def _join(self) -> None:
        """Add a publisher at the current frontier."""
        lower = self._streams.lowers.get(self._space_id) or LowerFrontier.from_epochs([(0,) * self._numbers])
        self._holding.append(one := Publisher(lower))
        if self._random.random() < 0.2:
            self._advance(one)

    def _expire(self, one: Publisher) -> None:
        if one in self._holding:
            self._holding.remove(one)
            self._settle()

    def _settle(self) -> None:
        """Set the space's lower frontier to the meet of all that is held; if nothing is, beyond all that has begun."""
        before = self._streams.lowers.get(self._space_id)
        if self._holding:
            lower = LowerFrontier().meet(*(one.held for one in self._holding))
        elif before is not None:
            begun = self._begun()
            lower = before.after_completing(UpperFrontier.from_epochs(begun))
        else:
            return
        if lower != before:
            self._streams.lowers[self._space_id] = lower
            self._world.say("publish", f"what may still come is at or after {lower.least}")

    def _begun(self) -> set[Epoch]:
        own = [s.stream_id for s in self._streams.streams.values() if s.generation.space_id == self._space_id]
        return {epoch for stream_id in own for epoch in self._epochs[stream_id] if epoch is not None}
