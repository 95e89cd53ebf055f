"""Rollovers without messages, also several in a row and with other widths, and moving topics.

A space comes and goes, and its topics move with it. It has its own random generator.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.simulation.world import Happenings

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_MAX_STREAMS = 28


class Rollovers(Happenings):
    """Acts in a part of all runs."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the turnover")

    def begin(self, until: float) -> None:
        self._until = until
        if self._random.random() < 0.5:
            self._later()

    def _later(self) -> None:
        self._world.after(self._random.expovariate(1 / 9.0), self._act)

    def _act(self) -> None:
        if self._world.now >= self._until:
            return
        if self._random.random() < 0.15:
            self._move_topics()
        else:
            self._roll_again(self._random.choice(self._streams.live_spaces()).space_id, self._random.randint(1, 4))
        self._later()

    def _roll_again(self, space_id: int, times: int) -> None:
        """Roll over several times, before anything is published again."""
        over = self._world.now >= self._until or space_id in self._streams.dropped
        if len(self._streams.streams) < _MAX_STREAMS and not over:
            self._world.say("operator", f"rolls space {space_id} over, and {times - 1} times more")
            self._streams.rollover(space_id, self._random.choice((None, None, 1, 2, 3, 5)))
            if times > 1 and self._random.random() < 0.7:
                self._roll_again(space_id, times - 1)
            elif times > 1:
                self._world.after(self._random.uniform(0.01, 1.5), lambda: self._roll_again(space_id, times - 1))

    def _move_topics(self) -> None:
        """Create a space for topics of another, or drop it, so that they move back."""
        other = next((space for space in self._streams.live_spaces() if space.name != "default"), None)
        if len(self._streams.streams) >= _MAX_STREAMS:
            return
        if other is not None:
            self._world.say("operator", f"drops space {other}")
            self._streams.drop_space(other.space_id, rolls=(1,))
            self._simulation.publishing.dropped(other.space_id)
        elif len(self._streams.spaces) < 3:
            name = f"other{len(self._streams.spaces)}"
            self._world.say("operator", f"creates space {name}")
            self._streams.add_space(name, "other/#", self._random.randint(1, 3), rolls=(1,))
            self._simulation.publishing.created(len(self._streams.spaces))
