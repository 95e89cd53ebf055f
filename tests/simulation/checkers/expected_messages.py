"""Which messages atomic groups are to be given, and which they have been: the memory of those who check epochs."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, is_at_or_before
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import Group
from sublet_storage.spaces.routing import Space
from tests.simulation.checkers.lives import Key, Lives, Violation
from tests.simulation.checkers.record import Record

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


@dataclass(slots=True)
class First:
    """What is left out by a group: epochs that were `completed` when it began, and those at or before what had `begun`
    in front of it."""

    completed: LowerFrontier | None
    begun: Collection[Epoch]
    _known: dict[Epoch, bool] = field(default_factory=dict)

    def leaves_out(self, epoch: Epoch) -> bool:
        """Whether the group is given nothing of it."""
        if epoch not in self._known:
            over = self.completed is not None and not self.completed.admits(epoch)
            self._known[epoch] = over or any(is_at_or_before(epoch, other) for other in self.begun)
        return self._known[epoch]


class ExpectedMessages:
    """`given` and `done`: offsets that were in calls, and in calls that ended."""

    def __init__(self, simulation: Simulation, lives: Lives, record: Record) -> None:
        self._simulation, self._lives, self._record = simulation, lives, record
        self._first: dict[tuple[int, int], First] = {}
        self.given: dict[Key, set[int]] = defaultdict(set)
        self.done: dict[Key, set[int]] = defaultdict(set)

    def opened(self, group: Group, rows: Mapping[int, LendingRow]) -> None:
        """It is given those epochs of which nothing had begun before its start positions, or is gone."""
        for space_id in self._simulation.streams.spaces:
            begun = {
                epoch
                for stream_id, epochs in self.published(space_id)
                for epoch in epochs[: self._begun(stream_id, rows[stream_id].position) if stream_id in rows else None]
                if epoch is not None
            }
            lower = (
                self._simulation.streams.lowers.get(space_id) if group.starting_position.policy == "latest" else None
            )
            self._first[group.group_id, space_id] = First(lower, begun)
        for row in rows.values():
            self._check_first(group, row)

    def _begun(self, stream_id: int, position: int) -> int:
        """Up to where messages count as begun: a block that has begun counts as a whole."""
        ends = [end for end, _ in self._simulation.journal.appended[stream_id]]
        begins = zip((0, *ends), ends, strict=False)
        return max((end for begin, end in begins if begin < position), default=0)

    def imported(self, group: Group, before: Group) -> None:
        """It goes on where that group was."""
        new, old = group.group_id, before.group_id
        for (group_id, space_id), first in tuple(self._first.items()):
            if group_id == old:
                self._first[new, space_id] = first
        for had in (self.given, self.done):
            for at in [key for key in had if key[0] == old]:
                had[new, at[1]] = set(had[at])

    def forget(self, group_id: int) -> None:
        """The group begins anew."""
        for had in (self.given, self.done):
            for at in [key for key in had if key[0] == group_id]:
                del had[at]

    def _check_first(self, group: Group, row: LendingRow) -> None:
        space_id = self.space(row.stream_id).space_id
        for epoch in self.around(space_id):
            if row.consumed is None or row.consumed.needs(epoch) == self.leaves_out(group.group_id, space_id, epoch):
                raise Violation(f"{group} begins with {row}, and epoch {epoch} is on the wrong side of that")

    def leaves_out(self, group_id: int, space_id: int, epoch: Epoch) -> bool:
        """Whether the group is given nothing of it."""
        of_space = self._first.setdefault((group_id, space_id), First(None, ()))  # nothing, where that came later
        return of_space.leaves_out(epoch)

    def is_wanted(self, key: Key, offset: int, epoch: Epoch | None) -> bool:
        """Whether it is to be given the message of that epoch, sooner or later."""
        begin = self._lives[key[0]].start(key[1]) or 0
        return offset >= begin and (epoch is None or not self.leaves_out(key[0], self.space(key[1]).space_id, epoch))

    def missing(self, key: Key) -> Iterator[tuple[int, Epoch | None]]:
        """(offset, epoch) of each message that it is to be given, that was in no call that ended, and not skipped."""
        done, skipped = self.done[key], self._record.skipped.get(key, 0)
        for offset, epoch in enumerate(self._simulation.publishing.epochs[key[1]]):
            if offset >= skipped and offset not in done and self.is_wanted(key, offset, epoch):
                yield offset, epoch

    def may_come(self, stream_id: int, epoch: Epoch | None) -> bool:
        """Whether more of the epoch may be published."""
        lower = self._simulation.streams.lowers.get(self.space(stream_id).space_id)
        return epoch is not None and (lower is None or lower.admits(epoch))

    def around(self, space_id: int) -> set[Epoch]:
        """Epochs that were used, and those about them."""
        used = {epoch for _, epochs in self.published(space_id) for epoch in epochs if epoch is not None}
        return {
            tuple(map(sum, zip(epoch, by, strict=True)))
            for epoch in used
            for by in product((-1, 0, 1), repeat=len(epoch))
        }

    def published(self, space_id: int) -> Iterator[tuple[int, list[Epoch | None]]]:
        """(stream, of each message its epoch)."""
        for stream_id in self._simulation.streams.streams:
            if self.space(stream_id).space_id == space_id:
                yield stream_id, self._simulation.publishing.epochs[stream_id]

    def space(self, stream_id: int) -> Space:
        streams = self._simulation.streams
        return streams.spaces[streams.streams[stream_id].generation.space_id]
