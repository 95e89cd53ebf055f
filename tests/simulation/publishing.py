"""Everything that is published in a run: keys and their order, publishers of one or two spaces, mostly in epochs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, UpperFrontier
from sublet_storage.log.block_encoder import BlockEpochRange

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


_PLACES = 8
_RING = 1 << 64
_TOPICS = ("orders/new", "other/old")
Key = tuple[str, int]
_MOST = 3
_LEASE_S = (2.0, 10.0)
"""Bounds of the time until the capability of a dead publisher expires."""


@dataclass(slots=True)
class Part:
    """Messages of one key in one stream: the offset of the last one."""

    stream_id: int
    last: int


class Journal:
    """What publishers published: the key of each message, and the order of messages of a key. A key is a topic and a
    position on the hash ring; all messages of one key come from one publisher. Parents of streams are not recorded.

    Has its own random generator. `keys`: {stream: the key of each message}; `parts`: {key: its parts in the order in
    which they were published}; `appended`: {stream: (end offset, time) of each block}."""

    def __init__(self, simulation: Simulation) -> None:
        self._streams = simulation.streams
        self._random = Random(f"the keys of {simulation.seed}")
        self.keys: dict[int, list[Key]] = defaultdict(list)
        self.parts: dict[Key, list[Part]] = defaultdict(list)
        self.appended: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def append(self, stream_id: int, count: int, at_us: int) -> None:
        own, keys = self._may_have(stream_id), self.keys[stream_id]
        for _ in range(count):
            key = own[int(self._random.random() * len(own))]
            parts = self.parts[key]
            if parts and parts[-1].stream_id == stream_id:
                parts[-1].last = len(keys)
            else:
                parts.append(Part(stream_id, len(keys)))
            keys.append(key)
        self.appended[stream_id].append((len(keys), at_us))

    def lower_head(self, stream_id: int, head: int) -> None:
        keys = self.keys[stream_id]
        del keys[head:]
        last = {key: offset for offset, key in enumerate(keys)}
        self.appended[stream_id] = [(end, at_us) for end, at_us in self.appended[stream_id] if end <= head]
        for key, parts in self.parts.items():
            self.parts[key] = [part for part in parts if part.stream_id != stream_id or key in last]
            for part in self.parts[key]:
                part.last = last[key] if part.stream_id == stream_id else part.last

    def since(self, stream_id: int, at_us: int) -> int:
        """Return the offset of the first message appended at or after that time; the head, if there is none."""
        begin = 0
        for end, when in self.appended[stream_id]:
            if when >= at_us:
                return begin
            begin = end
        return begin

    def _may_have(self, stream_id: int) -> list[Key]:
        """Return the keys that publishers would now append to that stream."""
        stream, spaces = self._streams.streams[stream_id], self._streams.live_spaces()
        apart = any(space.filter.text.startswith("other/") for space in spaces)
        of_space = {space.space_id: space.filter.text for space in spaces}[stream.generation.space_id]
        topics = [t for t in _TOPICS if (t.startswith("other/") and apart) == of_space.startswith("other/")]
        places = [n * _RING // _PLACES + 1 for n in range(_PLACES)]
        return [(topic, place) for topic in topics for place in places if stream.hash_from <= place < stream.hash_to]


@dataclass(slots=True, eq=False)
class Publisher:
    """A publisher that may publish at or after what it holds. A dead one publishes nothing more, and still holds it."""

    held: LowerFrontier
    alive: bool = True


PublisherFrontier = tuple[Publisher, LowerFrontier]


class Publishers:
    """The publishers of one space, each with its own capability. `epochs`: {stream: the epoch of each message}, which
    grows."""

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


class Publishing:
    """Has its own random generator, so that all else in a run is the same as without epochs.

    `epochs`: {stream: the epoch of each message}.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation, self._streams = simulation, simulation.streams
        self._random = Random(f"what is published by {simulation.seed}")
        self._intruding = self._random.choice((0.0, 0.05, 0.3))
        self.epochs: dict[int, list[Epoch | None]] = defaultdict(list)
        self._of: dict[int, Publishers] = {}
        self._past = Random(f"the past of {simulation.seed}")
        self.past_s = self._past.choice((0.0, 3_600.0, 100 * 3_600.0))

    def begin(self) -> None:
        """Begin, in some runs with a second space, and in some with a past, some of which retention may have
        deleted."""
        if self._random.random() < 0.25:
            self._streams.add_space("other", "other/#", self._random.randint(1, 2))
        self._of = {space_id: Publishers(self._simulation, space_id, self.epochs) for space_id in self._streams.spaces}
        self._simulation.world.shift_clock(-self.past_s)
        self._live_all()
        self._simulation.world.shift_clock(self._left_s)

    def _live_all(self) -> None:
        self._left_s = self.past_s
        if self._random.random() < 0.7:
            self._live_through(self._random.randint(1, 8))
            if self._random.random() < 0.4:
                self._streams.rollover(1)
                self._live_through(self._random.randint(0, 3))
                if self._random.random() < 0.6:
                    self._streams.expire_generation(1)

    def created(self, space_id: int) -> None:
        self._of[space_id] = Publishers(self._simulation, space_id, self.epochs)

    def dropped(self, space_id: int) -> None:
        self._of.pop(space_id).end(for_good=True)

    def any_space(self) -> int:
        return self._random.choice(list(self._of))

    def saved(self) -> dict[int, list[PublisherFrontier]]:
        return {space_id: publishers.saved() for space_id, publishers in self._of.items()}

    def failed_over(self, saved: dict[int, list[PublisherFrontier]]) -> None:
        """Restore what publishers held then; the ends of the streams are lost."""
        for stream_id, stream in self._streams.streams.items():
            del self.epochs[stream_id][stream.head :]
        for space_id, held in saved.items():
            if space_id in self._of:
                self._of[space_id].failed_over(held)

    def publish(self, stream_id: int, count: int) -> None:
        self._of[self._streams.streams[stream_id].generation.space_id].publish(stream_id, count)

    def turn(self) -> None:
        for publishers in self._of.values():
            publishers.turn()

    def intrude(self) -> None:
        """Use, and perhaps complete, an epoch between two statements of a leader's transaction."""
        for publishers in self._of.values():
            if not self._simulation.world.calm and self._random.random() < self._intruding:
                publishers.publish_faster()

    def end(self) -> None:
        """Remove all publishers. In some runs a new one stays, and its last epochs are never completed."""
        for publishers in self._of.values():
            publishers.end()

    def _live_through(self, rounds: int) -> None:
        for _ in range(rounds):
            for space_id in self._of:
                for stream_id in self._streams.open_streams(space_id):
                    if self._random.random() < 0.4:
                        self.publish(stream_id, self._random.randint(1, 5))
            self.turn()
            self._let_time_pass()

    def _let_time_pass(self) -> None:
        """Let hours pass now and then, in which streams may roll over although nothing was published."""
        passed_s = self._past.uniform(0.0, self._left_s / 3)
        self._left_s -= passed_s
        self._simulation.world.shift_clock(passed_s)
        if self.past_s and self._past.random() < 0.15:
            for _ in range(self._past.randint(1, 3)):
                self._streams.rollover(self._past.choice(list(self._of)), self._past.choice((None, None, 1, 2, 4)))
