"""What atomic groups got and announced: every epoch whole, after it was completed, and consumed once (S3, S4, S8)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from borrower.machine.events import Progressed
from protocol.epochs import ConsumedFrontier, Epoch, GroupFrontier, LowerFrontier, at_or_before, shown
from storage.groups.model import CONSUMED, Grant, Group, GroupResult, Lending, LendingStatus
from storage.groups.rules import Row
from storage.routing import Space
from tests.simulation.checkers.lives import Key, Life, Lives, Violation
from tests.simulation.checkers.record import Record

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.work import Work

Place = tuple[int, ConsumedFrontier]
"""Of a row: (position, what is consumed behind it)."""


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
            over = self.completed is not None and not self.completed.may_come(epoch)
            self._known[epoch] = over or any(at_or_before(epoch, other) for other in self.begun)
        return self._known[epoch]


class Epochs:
    """Knows of each message its epoch, and in which calls it was."""

    def __init__(self, simulation: Simulation, lives: Lives, record: Record) -> None:
        self._simulation, self._lives, self._record = simulation, lives, record
        self.groups = self.given = self.announcements = 0
        self._first: dict[tuple[int, int], First] = {}
        self._done: dict[Key, set[int]] = defaultdict(set)
        self._given: dict[Key, set[int]] = defaultdict(set)
        self._said: dict[Key, set[Place]] = defaultdict(set)
        self._rows: dict[Key, Place] = {}
        self._frontiers: dict[tuple[int, int], LowerFrontier | None] = {}

    # --- how a group begins -----------------------------------------------------------------------------------------

    def opened(self, group: Group, rows: Mapping[int, Row]) -> None:
        """It is given those epochs of which nothing had begun before its start positions, or is gone."""
        self.groups += 1
        streams = self._simulation.streams
        for space_id in streams.spaces:
            begun = {
                epoch
                for stream_id, epochs in self._published(space_id)
                for epoch in epochs[: rows[stream_id].position if stream_id in rows else None]
                if epoch is not None
            }
            lower = streams.lowers.get(space_id) if group.start.policy == "latest" else None
            self._first[group.group_id, space_id] = First(lower, begun)
        for row in rows.values():
            self._check_first(group, row)

    def _check_first(self, group: Group, row: Row) -> None:
        assert row.consumed is not None
        space = self._space(row.stream_id)
        self._frontiers[group.group_id, space.space_id] = row.consumed.lower
        self._said[group.group_id, row.stream_id].add((row.position, row.consumed))
        for epoch in self._around(space.space_id):
            if row.consumed.wants(epoch) == self._first[group.group_id, space.space_id].leaves_out(epoch):
                raise Violation(f"{group} begins with {row}, and epoch {epoch} is on the wrong side of that")

    def _around(self, space_id: int) -> set[Epoch]:
        """Epochs that were used, and those about them."""
        used = {epoch for _, epochs in self._published(space_id) for epoch in epochs if epoch is not None}
        return {
            tuple(map(sum, zip(epoch, by, strict=True)))
            for epoch in used
            for by in product((-1, 0, 1), repeat=len(epoch))
        }

    def _published(self, space_id: int) -> Iterator[tuple[int, list[Epoch | None]]]:
        """(stream, of each message its epoch)."""
        for stream_id in self._simulation.streams.streams:
            if self._space(stream_id).space_id == space_id:
                yield stream_id, self._simulation.publishing.epochs[stream_id]

    def _space(self, stream_id: int) -> Space:
        streams = self._simulation.streams
        return streams.spaces[streams.streams[stream_id].generation.space_id]

    def _wants(self, key: Key, epoch: Epoch | None) -> bool:
        first = self._first.get((key[0], self._space(key[1]).space_id))
        return epoch is None or first is None or not first.leaves_out(epoch)

    # --- what a group wants, and has ---------------------------------------------------------------------------------

    def is_consumed(self, key: Key) -> bool:
        """All that the group wants of a stream was in calls that ended, or was skipped."""
        return not any(True for _ in self._missing(key))

    def _missing(self, key: Key) -> Iterator[tuple[int, Epoch | None]]:
        """(offset, epoch) of each message that the group wants and that was in no call that ended."""
        group_id, stream_id = key
        begin = max(self._lives[group_id].start(stream_id) or 0, self._record.skipped.get(key, 0))
        done = self._done[key]
        for offset, epoch in enumerate(self._simulation.publishing.epochs[stream_id]):
            if offset >= begin and offset not in done and self._wants(key, epoch):
                yield offset, epoch

    def _lower(self, stream_id: int) -> LowerFrontier | None:
        return self._simulation.streams.lowers.get(self._space(stream_id).space_id)

    def _is_open(self, stream_id: int, epoch: Epoch | None) -> bool:
        lower = self._lower(stream_id)
        return epoch is not None and (lower is None or lower.may_come(epoch))

    # --- calls ------------------------------------------------------------------------------------------------------

    def call_started(self, key: Key, offsets: Sequence[int]) -> None:
        """No message of an epoch is given out before it is completed, and none of those that are left out."""
        epochs = self._simulation.publishing.epochs[key[1]]
        start = self._lives[key[0]].start(key[1]) or 0
        for offset in offsets:
            epoch = epochs[offset]
            self.given += epoch is not None
            if self._is_open(key[1], epoch):
                raise Violation(f"{key}: offset {offset} is given out, and of its epoch {epoch} more may come")
            if offset < start or not self._wants(key, epoch):
                raise Violation(f"{key}: offset {offset} of epoch {epoch}, from before the group began, is given out")
        self._given[key].update(offsets)

    def call_finished(self, key: Key, offsets: Sequence[int]) -> None:
        """Its user is done with these."""
        self._done[key].update(offsets)

    def reported(self, work: Work, told: Progressed) -> None:
        """A session says how far it is: the position and the epochs go together."""
        if told.consumed is not None:
            self._said[work.group_id, work.stream_id].add((told.position, told.consumed))

    # --- rows -------------------------------------------------------------------------------------------------------

    def committed(self, result: GroupResult) -> None:
        """A transaction of a leader, or of an operator's hand, with its answers."""
        life = self._lives[result.group_id]
        if not life.group.options.atomic or result.deposed:
            return
        for answer in result.results:
            if answer.lending is not None:
                key = result.group_id, answer.lending.stream_id
                self._check_row(key, answer.lending, is_grant=isinstance(answer.entry, Grant))
        self._check_frontiers(life, result)

    def _check_row(self, key: Key, row: Lending, is_grant: bool) -> None:
        """A row is where a session said it was, and what it counts as consumed was in calls that ended."""
        if row.consumed is None:
            raise Violation(f"{key} is of an atomic group, and its row says nothing of epochs: {row}")
        if row.status is LendingStatus.FINISHED and key in self._record.skipped:
            return
        place = row.position, row.consumed
        before = self._rows.get(key)
        if place == before:
            return
        self._rows[key] = place
        if key not in self._said and is_grant and row.position == 0 == row.consumed.upto:
            self._said[key].add(place)
        if place not in self._said[key]:
            raise Violation(f"{key}: position and epochs are not what any session said: {row}")
        if before is not None and not _is_at_or_before(before[1], row.consumed):
            raise Violation(f"{key}: consumed epochs went back from {before[1]}: {row}")
        for offset, epoch in self._missing(key):
            passed = epoch is None or not row.consumed.wants(epoch)
            if offset < row.position or (offset < row.consumed.upto and passed):
                raise Violation(f"{key}: offset {offset} of epoch {epoch} was in no call that ended, but {row}")

    # --- announcements ----------------------------------------------------------------------------------------------

    def _check_frontiers(self, life: Life, result: GroupResult) -> None:
        """The group's frontier never goes back, and each step of it is one line of history."""
        lines = [line.reason for line in result.recorded if line.event == CONSUMED]
        for found in result.epochs:
            key = result.group_id, self._named(found.space)
            before = self._frontiers.get(key)
            if found.consumed == before:
                continue
            self._frontiers[key] = found.consumed
            if before is not None and not before.is_at_or_before(found.consumed):
                raise Violation(f"group {key}: the frontier went back from {shown(before)} to {found}")
            said = f"space {found.space}: consumed are all epochs before {shown(found.consumed)}"
            if lines.count(said) != 1:
                raise Violation(f"group {key}: {found} is to be announced once in {lines}")
            lines.remove(said)
            self.announcements += 1
            self._check_consumed(life, found)
        if lines:
            raise Violation(f"group {result.group_id}: announced without a step: {lines}, {result.epochs}")

    def _check_consumed(self, life: Life, found: GroupFrontier) -> None:
        """Everything in the epochs that it completes was in calls that ended."""
        for stream_id, _ in self._published(self._named(found.space)):
            if life.start(stream_id) is None:
                continue
            for offset, epoch in self._missing((life.group.group_id, stream_id)):
                if epoch is not None and not found.consumed.may_come(epoch):
                    where = f"offset {offset} of stream {stream_id}, epoch {epoch}"
                    raise Violation(f"group {life.group.group_id}: {found}, but {where} was in no call that ended")

    def _named(self, name: str) -> int:
        return next(space.space_id for space in self._simulation.streams.spaces.values() if space.name == name)

    def announced(self, group_id: int, epochs: Sequence[GroupFrontier]) -> None:
        """What a session hears is never ahead of history."""
        for heard in epochs:
            known = self._frontiers.get((group_id, self._named(heard.space)))
            if known is None or not heard.consumed.is_at_or_before(known):
                raise Violation(f"group {group_id}: a session hears {heard}, history has {known}")

    # --- at the end -------------------------------------------------------------------------------------------------

    def check_rest(self, life: Life, rows: Mapping[int, Row]) -> None:
        """What is completed is consumed, and the frontier is that of the space."""
        group_id = life.group.group_id
        for stream_id, stream in self._simulation.streams.streams.items():
            row = rows.get(stream_id)
            if life.start(stream_id) is None or row is None:
                continue
            left = list(self._missing((group_id, stream_id)))
            if late := [each for each in left if not self._is_open(stream_id, each[1])]:
                raise Violation(f"group {group_id}, stream {stream_id}: completed, and not consumed: {late}, {row}")
            assert row.consumed is not None
            end = left[0][0] if left else stream.head
            if row.position > end or (not left and row.position != end):
                raise Violation(f"group {group_id}, stream {stream_id} (head {stream.head}) rests at {row}: {left}")
        self._check_whole(life)
        self._check_last_frontier(life)

    def _check_whole(self, life: Life) -> None:
        """Of every epoch all that the group's streams have was given out, or nothing, unless retention took some."""
        given: dict[tuple[int, Epoch], set[bool]] = defaultdict(set)
        for stream_id, epochs in self._simulation.publishing.epochs.items():
            key = life.group.group_id, stream_id
            if life.start(stream_id) is None:
                continue
            skipped, space_id = self._record.skipped.get(key, 0), self._space(stream_id).space_id
            for offset, epoch in enumerate(epochs):
                if epoch is not None and (offset in self._given[key] or offset >= skipped):
                    given[space_id, epoch].add(offset in self._given[key])
        if split := sorted(epoch for epoch, found in given.items() if len(found) > 1):
            raise Violation(f"{life.group}: these epochs were given out in part: {split}")

    def _check_last_frontier(self, life: Life) -> None:
        for space_id, lower in self._simulation.streams.lowers.items():
            found = self._frontiers.get((life.group.group_id, space_id))
            first = self._first[life.group.group_id, space_id]
            for epoch in self._around(space_id):
                over = not lower.may_come(epoch) or first.leaves_out(epoch)
                if found is None or over == found.may_come(epoch):
                    raise Violation(f"{life.group} rests at {found}, and its space at {lower}, see {epoch}")


def _is_at_or_before(one: ConsumedFrontier, other: ConsumedFrontier) -> bool:
    forward = one.lower is None or (other.lower is not None and one.lower.is_at_or_before(other.lower))
    return one.upto <= other.upto and forward
