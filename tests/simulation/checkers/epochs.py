"""What atomic groups got: every epoch whole, after it was completed, and rows that say no more than that (S3, S8)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from sublet_borrower.machine.events import ProgressReported
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, Epoch
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import GrantStream, Group, GroupWriteResult, Lending, LendingStatus
from tests.simulation.checkers.announcements import Announcements
from tests.simulation.checkers.expected_messages import ExpectedMessages
from tests.simulation.checkers.lives import Key, Life, Lives, Violation
from tests.simulation.checkers.record import Record
from tests.simulation.journal import Key as Named

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation
    from tests.simulation.work import Work

StreamOffset = tuple[int, ConsumedFrontier]
"""Of a row: (position, what is consumed behind it)."""


class Epochs:
    """Knows of each message its epoch, and in which calls it was. `groups`: so many were atomic; `given`: so many
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
        """A session says how far it is: the position and the epochs go together."""
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
