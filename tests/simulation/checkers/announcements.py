"""How far groups say that they have come: only forward, once for each step, and never too far (S4, S8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from sublet_protocol.domain.epoch_frontiers import GroupFrontier, LowerFrontier, format_frontier
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import EPOCHS_CONSUMED, Group, GroupWriteResult
from tests.simulation.checkers.expected_messages import ExpectedMessages
from tests.simulation.checkers.lives import Life, Lives, Violation

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


class Announcements:
    """Remembers the frontier of each group in each space."""

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
