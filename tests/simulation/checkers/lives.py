"""The lives of the groups: a group deleted and made again is another one, and shares nothing with the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from storage.groups.memory_streams import MemoryStreams
from storage.groups.model import Group
from storage.groups.rules import Row
from tests.simulation.world import World

Key = tuple[int, int]
"""(group id, stream id)."""


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(slots=True)
class Life:
    """`starts`: where it began in the streams there were. Of those that are not in it it wants nothing; those that were
    opened later it wants from their beginning."""

    group: Group
    starts: dict[int, int]
    existed: frozenset[int]
    deleted_at: float | None = None

    def start(self, stream_id: int) -> int | None:
        """From where it wants the stream; None: it does not."""
        return self.starts.get(stream_id, None if stream_id in self.existed else 0)


class Lives:
    """All that ever were, by id."""

    def __init__(self, world: World, streams: MemoryStreams) -> None:
        self._world, self._streams = world, streams
        self._lives: dict[int, Life] = {}

    def __getitem__(self, group_id: int) -> Life:
        return self._lives[group_id]

    def live(self) -> list[Life]:
        """Those that are not deleted."""
        return [life for life in self._lives.values() if life.deleted_at is None]

    def is_deleted(self, group_id: int) -> bool:
        """True for one that was there once."""
        life = self._lives.get(group_id)
        return life is not None and life.deleted_at is not None

    def opened(self, group: Group, rows: Mapping[int, Row]) -> bool:
        """A new one begins where its rows say in this instant: nothing of a former life may show in them. False for one
        that was there before."""
        if group.group_id in self._lives:
            return False
        if any(row.grant_id for row in rows.values()):
            raise Violation(f"{group} is born with grants: {rows}")
        if any(life.group.subscription == group.subscription for life in self.live()):
            raise Violation(f"{group} is born while another of its name lives")
        for stream_id, row in rows.items():
            stream = self._streams.streams[stream_id]
            if row.position != stream.position_of(group.start):
                raise Violation(f"{group} begins stream {stream_id} (head {stream.head}) at {row.position}")
        starts = {stream_id: row.position for stream_id, row in rows.items()}
        self._lives[group.group_id] = Life(group, starts, frozenset(self._streams.streams))
        return True

    def deleted(self, group_id: int) -> None:
        """From now on nothing of it may be written."""
        self._lives[group_id].deleted_at = self._world.now
