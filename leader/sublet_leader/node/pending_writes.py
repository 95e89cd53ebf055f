"""The changes of a node's groups that wait for its next commits, which are of bounded size."""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct, field

from sublet_storage.groups.model.records import GroupWrites, LendingChange

MAX_CHANGES_PER_COMMIT = 500
"""Changes of one transaction. Thousands would take longer than the server lets a leader's transaction be where the
machine is busy, and would all be done again, for ever."""


class PendingWrites(Struct):
    """Changes of one group for the next commits, under that term. `sync_after`: how many of them come before a stream
    sync; None: no sync is due."""

    term: int
    changes: list[LendingChange] = field(default_factory=list)
    sync_after: int | None = None

    def add(self, changes: Iterable[LendingChange], needs_sync: bool) -> None:
        """Append the changes, and a sync behind them."""
        self.changes.extend(changes)
        if needs_sync and self.sync_after is None:
            self.sync_after = len(self.changes)

    def take(self, group_id: int, limit: int) -> GroupWrites:
        """Remove and return the first `limit` changes, and the sync if all that comes before it is among them."""
        part, self.changes = tuple(self.changes[:limit]), self.changes[limit:]
        is_sync_due = self.sync_after is not None and self.sync_after <= len(part)
        self.sync_after = None if is_sync_due or self.sync_after is None else self.sync_after - len(part)
        return GroupWrites(group_id, self.term, part, is_sync_due)

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is left to write."""
        return not self.changes and self.sync_after is None


def take_batch(pending_writes: dict[int, PendingWrites]) -> tuple[GroupWrites, ...]:
    """Remove and return what the next transaction writes, of the groups in their order. A group that has more comes
    behind the others next time."""
    batch: list[GroupWrites] = []
    room = MAX_CHANGES_PER_COMMIT
    for group_id, writes in tuple(pending_writes.items()):
        if writes.changes and not room:
            continue
        del pending_writes[group_id]
        batch.append(writes.take(group_id, room))
        room -= len(batch[-1].changes)
        if not writes.is_empty:
            pending_writes[group_id] = writes
    return tuple(batch)
