"""What atomic groups got (S3, S8), and how far they say that they have come (S4, S8)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any

from sublet_borrower.machine.events import ProgressReported
from sublet_protocol.domain.epoch_frontiers import (
    ConsumedFrontier,
    Epoch,
    GroupFrontier,
    LowerFrontier,
    format_frontier,
    is_at_or_before,
)
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import (
    EPOCHS_CONSUMED,
    GrantStream,
    Group,
    GroupWriteResult,
    Lending,
    LendingStatus,
)
from sublet_storage.spaces.routing import Space
from tests.simulation.checkers.lives import Key, Life, Lives, Violation
from tests.simulation.checkers.record import Record
from tests.simulation.publishing import Key as Named

if TYPE_CHECKING:
    from tests.simulation.sessions import Work
    from tests.simulation.simulation import Simulation

StreamOffset = tuple[int, ConsumedFrontier]
"""Of a row: (position, what is consumed behind it)."""


@dataclass(slots=True)
class First:
    """What is left out by a group: epochs that were `completed` when it began, and those at or before what had `begun`
    in front of it."""

    completed: LowerFrontier | None
    begun: Collection[Epoch]
    _known: dict[Epoch, bool] = field(default_factory=dict)

    def leaves_out(self, epoch: Epoch) -> bool:
        if epoch not in self._known:
            over = self.completed is not None and not self.completed.admits(epoch)
            self._known[epoch] = over or any(is_at_or_before(epoch, other) for other in self.begun)
        return self._known[epoch]


class ExpectedMessages:
    """Which messages atomic groups are to be given, and which they have been. `given` and `done`: offsets that were in
    calls, and in calls that ended."""

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
        for had in (self.given, self.done):
            for at in [key for key in had if key[0] == group_id]:
                del had[at]

    def _check_first(self, group: Group, row: LendingRow) -> None:
        space_id = self.space(row.stream_id).space_id
        for epoch in self.around(space_id):
            if row.consumed is None or row.consumed.needs(epoch) == self.leaves_out(group.group_id, space_id, epoch):
                raise Violation(f"{group} begins with {row}, and epoch {epoch} is on the wrong side of that")

    def leaves_out(self, group_id: int, space_id: int, epoch: Epoch) -> bool:
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


class Announcements:
    """How far groups say that they have come: only forward, once for each step, and never too far. Remembers the
    frontier of each group in each space."""

    def __init__(self, simulation: Simulation, lives: Lives, wanted: ExpectedMessages) -> None:
        self._simulation, self._lives, self._wanted = simulation, lives, wanted
        self.count = 0
        self._frontiers: dict[tuple[int, int], LowerFrontier | None] = {}
        self._former: dict[tuple[int, int], list[LowerFrontier]] = {}

    def opened(self, group: Group, rows: Mapping[int, LendingRow]) -> None:
        """A group begins, and announces nothing yet."""
        for row in rows.values():
            space_id = self._wanted.space(row.stream_id).space_id
            before = self._frontiers.get((group.group_id, space_id))
            if before is not None:  # it was reset, and who does not know may say for a while where it was
                self._former.setdefault((group.group_id, space_id), []).append(before)
            self._frontiers[group.group_id, space_id] = None if row.consumed is None else row.consumed.lower

    def saved(self) -> dict[tuple[int, int], LowerFrontier | None]:
        return dict(self._frontiers)

    def failed_over(self, saved: dict[tuple[int, int], LowerFrontier | None]) -> None:
        """They are there again; who does not know may say for a while how far they came."""
        for key, frontier in self._frontiers.items():
            if frontier is not None:
                self._former.setdefault(key, []).append(frontier)
        self._frontiers = saved

    def imported(self, group: Group, before: Group) -> None:
        """It has come as far as that one had."""
        for (group_id, space_id), frontier in tuple(self._frontiers.items()):
            if group_id == before.group_id:
                self._frontiers[group.group_id, space_id] = frontier

    def committed(self, result: GroupWriteResult) -> None:
        """The group's frontier never goes back, and each step of it is one line of history."""
        lines = [line.reason for line in result.history if line.event == EPOCHS_CONSUMED]
        for found in result.epochs:
            key = result.group_id, self._named(found.space)
            before = self._frontiers.get(key)
            if found.consumed == before:
                continue
            self._frontiers[key] = found.consumed
            if before is not None and not before.is_at_or_before(found.consumed):
                raise Violation(f"group {key}: the frontier went back from {format_frontier(before)} to {found}")
            said = f"space {found.space}: consumed are all epochs before {format_frontier(found.consumed)}"
            if lines.count(said) != 1:
                raise Violation(f"group {key}: {found} is to be announced once in {lines}")
            lines.remove(said)
            self.count += 1
            self._check_consumed(key, found)
        if lines:
            raise Violation(f"group {result.group_id}: announced without a step: {lines}, {result.epochs}")

    def _check_consumed(self, key: tuple[int, int], found: GroupFrontier) -> None:
        """Everything in the epochs that it completes was in calls that ended."""
        for stream_id, _ in self._wanted.published(key[1]):
            if self._lives[key[0]].start(stream_id) is None:
                continue
            for offset, epoch in self._wanted.missing((key[0], stream_id)):
                if epoch is not None and not found.consumed.admits(epoch):
                    where = f"offset {offset} of stream {stream_id}, epoch {epoch}"
                    raise Violation(f"group {key[0]}: {found}, but {where} was in no call that ended")

    def received(self, group_id: int, epochs: Sequence[GroupFrontier]) -> None:
        """What a session receives is never ahead of history."""
        for received in epochs:
            key = group_id, self._named(received.space)
            known = self._frontiers.get(key)
            said = [*self._former.get(key, ()), *([] if known is None else [known])]
            if not any(received.consumed.is_at_or_before(one) for one in said):
                raise Violation(f"group {group_id}: a session receives {received}, history has {known}")

    def check_rest(self, life: Life) -> None:
        """It has come as far as its space."""
        for space_id, lower in self._simulation.streams.lowers.items():
            found = self._frontiers.get((life.group.group_id, space_id))
            if not any(self._is_had(life, stream_id) for stream_id, _ in self._wanted.published(space_id)):
                continue  # a space that was dropped before the group began, or before the time it begins at
            for epoch in self._wanted.around(space_id):
                left_out = self._wanted.leaves_out(life.group.group_id, space_id, epoch)
                if found is None or found.admits(epoch) == (left_out or not lower.admits(epoch)):
                    raise Violation(f"{life.group} rests at {found}, and its space at {lower}, see {epoch}")

    def _is_had(self, life: Life, stream_id: int) -> bool:
        """Whether the group has a row of the stream, or wants something of it."""
        stream, start = self._simulation.streams.streams[stream_id], life.start(stream_id)
        nothing = start is None or (stream.closed and start == stream.head)
        return not nothing or (start is not None and stream_id in self._simulation.store.rows(life.group.group_id))

    def _named(self, name: str) -> int:
        return next(space.space_id for space in self._simulation.streams.spaces.values() if space.name == name)


class Epochs:
    """Every epoch comes whole, after it was completed, and rows say no more than that. Knows of each message its epoch,
    and in which calls it was. `groups`: so many were atomic; `given`: so many
    messages of epochs were in calls."""

    def __init__(self, simulation: Simulation, lives: Lives, record: Record) -> None:
        self._simulation, self._lives, self._record = simulation, lives, record
        self._wanted = ExpectedMessages(simulation, lives, record)
        self.announcements = Announcements(simulation, lives, self._wanted)
        self.groups = self.given = 0
        self._said: dict[Key, set[StreamOffset]] = defaultdict(set)
        self._rows: dict[Key, StreamOffset] = {}

    def opened(self, group: Group, rows: Mapping[int, LendingRow], before: Group | None = None) -> None:
        """A group that is atomic begins; `before`: where that one was."""
        self.groups += 1
        if before is None:
            self._wanted.opened(group, rows)
            self.announcements.opened(group, rows)
        else:
            self._wanted.imported(group, before)
            self.announcements.imported(group, before)
        for row in rows.values():
            if row.consumed is not None:
                self._said[group.group_id, row.stream_id].add((row.position, row.consumed))

    def saved(self) -> tuple[Any, ...]:
        return dict(self._rows), deepcopy((self._wanted.given, self._wanted.done)), self.announcements.saved()

    def failed_over(self, saved: tuple[Any, ...]) -> None:
        """The rows are as they were then, and what was had since comes again."""
        self._rows, (self._wanted.given, self._wanted.done), announcements = saved
        self.announcements.failed_over(announcements)

    def was_reset(self, group: Group, rows: Mapping[int, LendingRow]) -> None:
        """It begins anew, at other positions."""
        self._wanted.forget(group.group_id)
        for at in [key for key in (*self._said, *self._rows) if key[0] == group.group_id]:
            self._said.pop(at, None)
            self._rows.pop(at, None)
        self.opened(group, rows)

    # --- calls ------------------------------------------------------------------------------------------------------

    def call_started(self, key: Key, offsets: Sequence[int]) -> None:
        """No message of an epoch is given out before it is completed, and none of those that are left out."""
        epochs = self._simulation.publishing.epochs[key[1]]
        for offset in offsets:
            epoch = epochs[offset]
            self.given += epoch is not None
            if self._wanted.may_come(key[1], epoch):
                raise Violation(f"{key}: offset {offset} is given out, and of its epoch {epoch} more may come")
            if not self._wanted.is_wanted(key, offset, epoch):
                raise Violation(f"{key}: offset {offset} of epoch {epoch}, from before the group began, is given out")
        self._wanted.given[key].update(offsets)

    def call_finished(self, key: Key, offsets: Sequence[int]) -> None:
        self._wanted.done[key].update(offsets)

    def is_consumed(self, key: Key) -> bool:
        """All that the group wants of a stream was in calls that ended, or was skipped."""
        return next(self._wanted.missing(key), None) is None

    def first_missing(self, key: Key) -> int | None:
        """The first offset of those that are left of what the group wants."""
        return next((offset for offset, _ in self._wanted.missing(key)), None)

    def is_over(self, key: Key, named: Named, last: int) -> bool:
        """Nothing more of that key is to come up to that offset."""
        keys = self._simulation.journal.keys[key[1]]
        return not any(offset <= last and keys[offset] == named for offset, _ in self._wanted.missing(key))

    # --- rows and what is said of them ------------------------------------------------------------------------------

    def reported(self, work: Work, reported: ProgressReported) -> None:
        if reported.consumed is not None:
            self._said[work.group_id, work.stream_id].add((reported.position, reported.consumed))

    def committed(self, result: GroupWriteResult) -> None:
        """A transaction of a leader, or of an operator's hand, with its answers."""
        if result.has_stale_term or not self._lives[result.group_id].group.options.atomic:
            return
        for answer in result.results:
            if answer.lending is not None:
                key = result.group_id, answer.lending.stream_id
                self._check_row(key, answer.lending, is_grant=isinstance(answer.change, GrantStream))
        self.announcements.committed(result)

    def _check_row(self, key: Key, row: Lending, is_grant: bool) -> None:
        """A row is where a session said it was, and goes forward. A new one is at the beginning."""
        if row.consumed is None:
            raise Violation(f"{key} is of an atomic group, and its row says nothing of epochs: {row}")
        if row.status is LendingStatus.FINISHED and key in self._record.skipped:
            return
        place, before = (row.position, row.consumed), self._rows.get(key)
        if place == before:
            return
        self._rows[key] = place
        if key not in self._said and is_grant and row.position == 0 == row.consumed.upto:
            self._said[key].add(place)
        if place not in self._said[key]:
            raise Violation(f"{key}: position and epochs are not what any session said: {row}")
        if before is not None and not _is_at_or_before(before[1], row.consumed):
            raise Violation(f"{key}: consumed epochs went back from {before[1]}: {row}")
        self._check_done(key, row.position, row.consumed)

    def _check_done(self, key: Key, position: int, consumed: ConsumedFrontier) -> None:
        """What counts as consumed was in calls that ended."""
        for offset, epoch in self._wanted.missing(key):
            passed = offset < consumed.upto and (epoch is None or not consumed.needs(epoch))
            if offset < position or passed:
                place = f"{position}, {consumed}"
                raise Violation(
                    f"{key}: offset {offset} of epoch {epoch} was in no call that ended, the row is at {place}"
                )

    # --- at the end -------------------------------------------------------------------------------------------------

    def check_rest(self, life: Life, rows: Mapping[int, LendingRow]) -> None:
        """What is completed is consumed, and the frontier is that of the space."""
        for stream_id, row in rows.items():
            if life.start(stream_id) is not None:
                self._check_row_at_rest((life.group.group_id, stream_id), row)
        self._check_atomic(life)
        self.announcements.check_rest(life)

    def _check_row_at_rest(self, key: Key, row: LendingRow) -> None:
        left = list(self._wanted.missing(key))
        if late := [each for each in left if not self._wanted.may_come(key[1], each[1])]:
            raise Violation(f"{key}: completed, and not consumed: {late}, {row}")
        end = left[0][0] if left else self._simulation.streams.streams[key[1]].head
        if row.position > end or (not left and row.position != end):
            raise Violation(f"{key} rests at {row}, and this is left: {left}")

    def _check_atomic(self, life: Life) -> None:
        """Of every epoch all that the group's streams have was given out, or nothing, unless retention took some."""
        given: dict[tuple[int, Epoch], set[bool]] = defaultdict(set)
        for stream_id, epochs in self._simulation.publishing.epochs.items():
            key = life.group.group_id, stream_id
            if life.start(stream_id) is None:
                continue
            skipped, space_id = self._record.skipped.get(key, 0), self._wanted.space(stream_id).space_id
            for offset, epoch in enumerate(epochs):
                if epoch is not None and (offset in self._wanted.given[key] or offset >= skipped):
                    given[space_id, epoch].add(offset in self._wanted.given[key])
        if split := sorted(epoch for epoch, found in given.items() if len(found) > 1):
            raise Violation(f"{life.group}: these epochs were given out in part: {split}")


def _is_at_or_before(one: ConsumedFrontier, other: ConsumedFrontier) -> bool:
    forward = one.lower is None or (other.lower is not None and one.lower.is_at_or_before(other.lower))
    return one.upto <= other.upto and forward
