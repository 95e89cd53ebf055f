"""Changes that wait for a node's loop, merged by object: what waits is bounded, however many changes come."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Set
from dataclasses import dataclass, field

from sublet_protocol.messages.field_checks import MAX_INT64
from sublet_storage.groups.model.records import GroupWrites, LendingChange
from sublet_storage.notify.changes import EPOCHS, GROUP, SPACE, ObjectChange

MAX_HEADS = 10_000
"""Streams without a subscriber that wait at a time; of more nothing is passed on."""
MAX_GROUPS = 100
"""Groups that wait at a time; instead of more, all groups of the node look."""
MAX_CHANGES_PER_COMMIT = 500
"""Changes of one transaction. Thousands would take longer than the server lets a leader's transaction be where the
machine is busy, and would all be done again, for ever."""


@dataclass(frozen=True, slots=True)
class ChangedGroups:
    """What groups are to look at. `is_of_spaces`: all of them at all; `is_of_epochs`: all of them at completed
    epochs."""

    group_ids: frozenset[int] = frozenset()
    is_of_spaces: bool = False
    is_of_epochs: bool = False


@dataclass(slots=True)
class PendingWrites:
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


class PendingNotifications:
    """Thread-safe. `add_head` and `add_group_change` return whether nothing of the kind waited before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heads: dict[int, int] = {}
        self._for_groups = ChangedGroups()

    def add_head(self, change: ObjectChange, followed: Set[int]) -> bool:
        """Add the change of a stream, instead of an earlier one."""
        stream_id = parse_stream_id(change.key)
        if stream_id is None or change.is_deleted or change.version // 2 > MAX_INT64:
            return False
        with self._lock:
            if stream_id not in self._heads and stream_id not in followed and len(self._heads) >= MAX_HEADS:
                return False
            self._heads[stream_id] = change.version
            return len(self._heads) == 1

    def add_group_change(self, change: ObjectChange) -> bool:
        """Add a change that groups are to look at."""
        with self._lock:
            before = self._for_groups
            group_id = _parse_commanded_group(change) if change.kind == GROUP else None
            groups = before.group_ids if group_id is None else before.group_ids | {group_id}
            spaces = before.is_of_spaces or change.kind == SPACE or len(groups) > MAX_GROUPS
            self._for_groups = ChangedGroups(
                frozenset() if spaces else groups, spaces, before.is_of_epochs or change.kind == EPOCHS
            )
            return before == ChangedGroups() != self._for_groups

    def take_heads(self, limit: int) -> tuple[dict[int, int], bool]:
        """Return the versions of so many streams, and whether others wait."""
        with self._lock:
            taken = {stream_id: self._heads[stream_id] for stream_id, _ in zip(self._heads, range(limit), strict=False)}
            for stream_id in taken:
                del self._heads[stream_id]
            return taken, bool(self._heads)

    def take_group_changes(self) -> ChangedGroups:
        """Return all that groups are to look at."""
        with self._lock:
            taken, self._for_groups = self._for_groups, ChangedGroups()
            return taken


def _parse_commanded_group(change: ObjectChange) -> int | None:
    """Return the group whose desired state has changed; None for another change. Other fields are ignored."""
    data = change.data or {}
    group_id, revision = data.get("group_id"), data.get("revision")
    if not isinstance(group_id, int) or not isinstance(revision, int):
        return None
    return group_id if revision > 0 and 0 <= group_id <= MAX_INT64 else None


def parse_stream_id(key: str) -> int | None:
    """Return the stream's id; None for a key that is not a stream's, which any client may send."""
    is_number = key.isdecimal() and len(key) <= len(str(MAX_INT64)) and int(key) <= MAX_INT64
    return int(key) if is_number else None
