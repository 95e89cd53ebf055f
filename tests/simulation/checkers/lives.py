"""The lives of the groups: a group deleted and made again is another one, and shares nothing with the first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import Group
from tests.simulation.publishing import Journal
from tests.simulation.world import World
from tests.support.memory_store.catalogue import MemoryCatalogue

Key = tuple[int, int]
"""(group id, stream id)."""


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(slots=True)
class Life:
    """`starts`: where it began in the streams there were. Of those that are not in it it wants nothing; those that were
    opened later it wants from their beginning. `lost`: a failover has made it undone, which is how it was deleted."""

    group: Group
    starts: dict[int, int]
    existed: frozenset[int]
    deleted_at: float | None = None
    lost: bool = False

    def start(self, stream_id: int) -> int | None:
        """From where it wants the stream; None: it does not."""
        return self.starts.get(stream_id, None if stream_id in self.existed else 0)


@dataclass(frozen=True, slots=True)
class Continued:
    """What a group goes on with that is made from the export of another: as in `Life`."""

    starts: dict[int, int]
    existed: frozenset[int]


class Lives:
    """All that ever were, by id."""

    def __init__(self, world: World, streams: MemoryCatalogue, journal: Journal) -> None:
        self._world, self._streams, self._journal = world, streams, journal
        self._lives: dict[int, Life] = {}

    def __getitem__(self, group_id: int) -> Life:
        return self._lives[group_id]

    def live(self) -> list[Life]:
        return [life for life in self._lives.values() if life.deleted_at is None]

    def is_deleted(self, group_id: int) -> bool:
        """True for one that was there once."""
        life = self._lives.get(group_id)
        return life is not None and life.deleted_at is not None

    def saved(self) -> frozenset[int]:
        return frozenset(self._lives)

    def failed_over(self, saved: frozenset[int]) -> None:
        """Those that were opened since were never there, on the new server. (In a run that has one nobody deletes.)"""
        for group_id in self._lives.keys() - saved:
            self.deleted(group_id)
            self._lives[group_id].lost = True

    def opened(self, group: Group, rows: Mapping[int, LendingRow], before: Continued | None) -> bool:
        """A new one begins where its start says, or where the one before was, in this instant: nothing else of a former
        life may show in its rows. False for one that was there before."""
        if group.group_id in self._lives:
            return False
        if any(row.grant_id for row in rows.values()):
            raise Violation(f"{group} is born with grants: {rows}")
        if any(life.group.subscription == group.subscription for life in self.live()):
            raise Violation(f"{group} is born while another of its name lives")
        if before is None:
            starts, existed = self._starts(group), frozenset(self._streams.streams)
        else:
            starts, existed = before.starts, before.existed
        self._lives[group.group_id] = life = Life(group, starts, existed)
        self._check_rows(life, rows)
        return True

    def _starts(self, group: Group) -> dict[int, int]:
        """Of the streams that it wants. What is closed is over, unless it goes back in time."""
        starts = {}
        for stream_id, stream in self._streams.streams.items():
            if stream.generation.gone or (stream.closed and group.starting_position.policy in ("latest", "offset")):
                continue
            match group.starting_position.policy:
                case "earliest":
                    starts[stream_id] = 0
                case "latest":
                    starts[stream_id] = stream.head
                case "offset":
                    starts[stream_id] = min(group.starting_position.value, stream.head)
                case "time":
                    starts[stream_id] = self._journal.since(stream_id, group.starting_position.value)
        return starts

    def _check_rows(self, life: Life, rows: Mapping[int, LendingRow]) -> None:
        for stream_id in {*life.starts, *rows}:
            start, row, stream = life.start(stream_id), rows.get(stream_id), self._streams.streams[stream_id]
            nothing = stream.closed and start in (None, stream.head)
            if not nothing and (row is None or row.position != start):
                raise Violation(f"{life.group} begins stream {stream_id} (head {stream.head}) at {row}, not at {start}")

    def was_reset(self, group: Group, moves: Mapping[int, int]) -> None:
        """From now on it wants these streams from there on."""
        life = self._lives[group.group_id]
        life.group, life.starts = group, {**life.starts, **moves}

    def deleted(self, group_id: int) -> None:
        """From now on nothing of it may be written."""
        self._lives[group_id].deleted_at = self._world.now
