"""Everything that is published in a run, in one or two spaces with publishers."""

from __future__ import annotations

from collections import defaultdict
from random import Random
from typing import TYPE_CHECKING

from sublet_protocol.domain.epoch_frontiers import Epoch
from tests.simulation.publishers import PublisherFrontier, Publishers

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


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
        """Stop publishing into a dropped space."""
        self._of.pop(space_id).end(for_good=True)

    def any_space(self) -> int:
        """Return the id of a space."""
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
        """Let publishers join, advance, leave and die."""
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
