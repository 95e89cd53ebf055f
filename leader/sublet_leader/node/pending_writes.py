"""The changes of a node's groups that wait for its next commits, which are of bounded size."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct, field

from sublet_leader.group.stream_table import StreamEntry
from sublet_storage.groups.model.records import GroupWrites, Lending, LendingChange

MAX_CHANGES_PER_COMMIT = 500
"""Changes of one transaction. Thousands would take longer than the server lets a leader's transaction be where the
machine is busy, and would all be done again, for ever."""
EPOCHS_PER_CHANGE = 20
"""Consumed epochs that count as one more change: to read and write a thousand takes as long as 50 plain ones."""
MAX_SYNCS_PER_COMMIT = 100
"""Groups whose streams one transaction syncs: a rollover has each finish its rows of all streams that it closes."""


class PendingWrites(Struct):
    """Changes of one group for the next commits, under that term. `find_stream`: the entry of a stream by its
    id. `sync_after`: how many of them come before a stream sync; None: no sync is due."""

    term: int
    find_stream: Callable[[int], StreamEntry | None]
    changes: list[LendingChange] = field(default_factory=list)
    sync_after: int | None = None

    def add(self, changes: Iterable[LendingChange], needs_sync: bool) -> None:
        """Append the changes, and a sync behind them."""
        self.changes.extend(changes)
        if needs_sync and self.sync_after is None:
            self.sync_after = len(self.changes)

    def take(self, group_id: int, limit: int, *, may_sync: bool) -> tuple[GroupWrites, int]:
        """Remove the first changes that count as `limit` together, one at least, and if it may be, the sync, where all
        that comes before it is among them. Return them, and as how many they count."""
        count, weight = 0, 0
        for change in self.changes:
            change_weight = self._weigh(change)
            if count and weight + change_weight > limit:
                break
            count, weight = count + 1, weight + change_weight
        part, self.changes = tuple(self.changes[:count]), self.changes[count:]
        is_sync_due = may_sync and self.sync_after is not None and self.sync_after <= len(part)
        self.sync_after = None if is_sync_due or self.sync_after is None else max(self.sync_after - len(part), 0)
        return GroupWrites(group_id, self.term, part, is_sync_due), weight

    def _weigh(self, change: LendingChange) -> int:
        """Return as how many changes it counts, by its epochs and those of the row that it changes."""
        entry = self.find_stream(change.stream_id)
        epochs = _count_epochs(change) + (0 if entry is None else _count_epochs(entry.lending))
        return 1 + epochs // EPOCHS_PER_CHANGE

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is left to write."""
        return not self.changes and self.sync_after is None


def _count_epochs(reported: LendingChange | Lending) -> int:
    """Return how many consumed epochs a change, or a row, has."""
    doubt = getattr(reported, "in_doubt", None)
    frontiers = getattr(reported, "consumed", None), None if doubt is None else doubt.consumed
    return sum(len(each.lower.least) for each in frontiers if each is not None and each.lower is not None)


def take_batch(pending_writes: dict[int, PendingWrites]) -> tuple[GroupWrites, ...]:
    """Remove and return what the next transaction writes, of the groups in their order. A group that has more comes
    behind the others next time."""
    batch: list[GroupWrites] = []
    room, syncs = MAX_CHANGES_PER_COMMIT, MAX_SYNCS_PER_COMMIT
    for group_id, writes in tuple(pending_writes.items()):
        if (room if writes.changes else syncs) <= 0:
            continue
        del pending_writes[group_id]
        taken, weight = writes.take(group_id, room, may_sync=syncs > 0)
        batch.append(taken)
        room -= weight
        syncs -= batch[-1].needs_stream_sync
        if not writes.is_empty:
            pending_writes[group_id] = writes
    return tuple(batch)
