"""Streams that lose their last blocks under idle holders, on the same timeline.

All that the stream had was consumed, and no process is notified. It has its own random generator, and is part of runs
without failover and users' transactions, while there are no atomic groups and no queries.

Nothing is published into the stream before a leader of each group has synced its streams: a loss that no process could
see cannot be reported. What is published then are other messages, and none may be skipped. Some holders notice, and
release the stream; others never check.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import LendingStatus
from tests.simulation.world import Happenings
from tests.support.memory_store.catalogue import MemoryStream

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_AT_REST = (LendingStatus.BLOCKED, LendingStatus.FINISHED)


class LoweredHeads(Happenings):
    """Lowers heads in a part of all runs. `happened`: how often."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the lowered heads")
        self._unseen: dict[int, set[int]] = {}
        self.happened = 0

    def begin(self, until: float) -> None:
        self._until = until
        if self._random.random() < 0.3 and not self._simulation.failover.runs and not self._simulation.users.runs:
            self._repeat(self._befall, 6.0)

    def holds(self, stream_id: int) -> bool:
        """Return whether nothing may be published there yet."""
        if not self._unseen.get(stream_id):
            return False
        head = self._streams.streams[stream_id].head
        beyond = {row.group_id for row in self._rows(stream_id) if row.position > head and row.status not in _AT_REST}
        return bool(beyond & self._unseen[stream_id])

    def synced(self, group_id: int) -> None:
        """Record that a leader has synced its group's streams, except rows locked by others."""
        for stream_id, groups in self._unseen.items():
            if (group_id, stream_id) not in self._simulation.store.locked:
                groups.discard(group_id)

    def concerns(self, group_id: int) -> bool:
        """Return whether a stream of the group is in a state that cannot be exported."""
        rows = self._simulation.store.rows(group_id)
        heads = self._streams.streams
        return any(
            row.position > heads[row.stream_id].head or row.status is LendingStatus.BLOCKED
            for row in rows.values()
            if row.stream_id in self._unseen
        )

    def _befall(self) -> None:
        groups = self._simulation.checkers.live_groups()
        has_query = any(agent.checkpoint is not None for agent in self._simulation.living())
        if has_query or any(group.options.atomic for group in groups):
            return
        found = [each for each in self._streams.streams.values() if self._is_quiet(each)]
        if found:
            self._lower(self._random.choice(found))

    def _is_quiet(self, stream: MemoryStream) -> bool:
        rows = self._rows(stream.stream_id)
        held = [row for row in rows if row.status is LendingStatus.HELD and row.agent in self._simulation.agents]
        consumed = all(row.position == stream.head and row.pending_in_doubt is None for row in rows)
        return bool(held) and consumed and not stream.closed and bool(stream.block_summaries)

    def _rows(self, stream_id: int) -> list[LendingRow]:
        """Return the stream's rows of all existing groups."""
        rows = (self._simulation.store.rows(group.group_id) for group in self._simulation.checkers.live_groups())
        return [own[stream_id] for own in rows if stream_id in own]

    def _lower(self, stream: MemoryStream) -> None:
        head = self._random.choice([0, *(each.end for each in stream.block_summaries[:-1])])
        self._world.say("database", f"loses the end of stream {stream.stream_id}: it ends at {head}, not {stream.head}")
        self.happened += 1
        self._unseen[stream.stream_id] = {row.group_id for row in self._rows(stream.stream_id)}
        self._streams.lower_head(stream.stream_id, head)
        self._simulation.journal.lower_head(stream.stream_id, head)
        del self._simulation.publishing.epochs[stream.stream_id][head:]
        self._simulation.checkers.deliveries.head_lowered(stream.stream_id, head)
        self._simulation.checkers.record.head_lowered(stream.stream_id, head)
