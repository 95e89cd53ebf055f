"""The known versions of objects; late, repeated and reordered changes have no effect.

Deleted objects leave a tombstone, which keeps an older change from reviving them. A change has the version of its
deletion; of what is merely absent from a snapshot the version is unknown, and only another snapshot can revive that.

Changes may name objects that do not exist. So what no snapshot has confirmed is bounded by bytes, and tombstones are.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from enum import Enum

from msgspec import Struct

from sublet_protocol.domain.limits import MAX_NOTIFIED_CACHE_BYTES, MAX_TOMBSTONE_BYTES
from sublet_storage.notify.changes import CatchUpSnapshot, ObjectChange

ENTRY_BYTES = 600
"""What an entry takes besides its key and data."""

_Key = tuple[str, str]


class ChangeNovelty(Enum):
    """The novelty of a change to the cache."""

    NEWER = "newer"  # it was taken in
    OLD = "old"  # this version or a later one is known
    AMBIGUOUS = "ambiguous"  # a snapshot did not have the object, and may be newer or older than this


class _CachedVersion(Struct):
    """A cached change. `at`: when it was last applied, or a snapshot last confirmed it. `turn`: the number of its
    application."""

    change: ObjectChange
    turn: int
    at: float


class VersionCache:
    """The versions of objects of all kinds. Not thread-safe.

    `notified_bytes`: for changes that no snapshot has confirmed; of more, the oldest is forgotten, until a snapshot has
    it. `tombstone_bytes`: for what was deleted; of more, the oldest is forgotten.
    """

    def __init__(
        self,
        tombstone_s: float,
        notified_bytes: int = MAX_NOTIFIED_CACHE_BYTES,
        tombstone_bytes: int = MAX_TOMBSTONE_BYTES,
    ) -> None:
        self.old = 0
        """Changes that were not newer than what was known."""
        self._tombstone_s = tombstone_s
        self.live: dict[str, dict[str, _CachedVersion]] = {}
        """Objects that exist, by kind and key."""
        self._notified = _BoundedKeys(notified_bytes)  # of the living: not confirmed by a snapshot
        self._dead: OrderedDict[_Key, _CachedVersion] = OrderedDict()  # by when they died
        self._tombstones = _BoundedKeys(tombstone_bytes)  # all of the dead
        self._turn = 0
        self._absent: set[_Key] = set()  # of the dead: missing from a snapshot, version unknown

    def get(self, kind: str, key: str) -> ObjectChange | None:
        """Return the newest change of an object that exists."""
        entry = self.live.get(kind, {}).get(key)
        return entry.change if entry else None

    def apply(self, change: ObjectChange, now: float) -> ChangeNovelty:
        """Apply a change, if it is newer than the cached one."""
        self._expire(now)
        object_key = change.kind, change.key
        if object_key in self._absent and not change.is_deleted:
            novelty = (
                ChangeNovelty.AMBIGUOUS if change.version > self._dead[object_key].change.version else ChangeNovelty.OLD
            )
        else:
            novelty = ChangeNovelty.NEWER if change.order_key > self._get_order_key(object_key) else ChangeNovelty.OLD
        if novelty is ChangeNovelty.NEWER:
            self._put(change, now)
            if not change.is_deleted:
                self._notified.add(object_key, _count_bytes(change))
                while (oldest := self._notified.excess) is not None:
                    self._remove(oldest)
        self.old += novelty is ChangeNovelty.OLD
        return novelty

    def begin_snapshot(self) -> int:
        """Call before a snapshot is read, and hand what it returns to `merge`."""
        return self._turn

    def merge(self, kind: str, snapshot: CatchUpSnapshot, begun: int, now: float) -> list[ObjectChange]:
        """Apply a snapshot whose reading began at `begun`; return what was new in it.

        Cached objects that it should have and does not are deleted, unless they were applied since.
        """
        self._expire(now)
        changes = [change for change in snapshot.changes if self._confirm(change, begun, now)]
        keys = {change.key for change in snapshot.changes}
        for key, entry in list(self.live.get(kind, {}).items()):
            if key in keys or entry.turn > begun:
                continue
            if snapshot.keys is None or key in snapshot.keys:
                changes.append(self._delete_absent(entry, now))
            elif now > entry.at + self._tombstone_s:
                self._remove((kind, key))  # no longer requested
        return changes

    # --- entries ----------------------------------------------------------------------------------------------------

    def _confirm(self, change: ObjectChange, begun: int, now: float) -> bool:
        """Apply the snapshot's state of one object; return whether it was new."""
        object_key = change.kind, change.key
        if object_key in self._absent and self._dead[object_key].turn <= begun and not change.is_deleted:
            is_new = change.version >= self._dead[object_key].change.version
        else:
            is_new = change.order_key > self._get_order_key(object_key) or self._is_refuted(object_key, change, begun)
        if is_new:
            self._put(change, now)
        elif entry := self.live.get(change.kind, {}).get(change.key):
            entry.at = now
            if change.order_key == entry.change.order_key:
                entry.change = change  # other fields of a notification are not trusted
                self._notified.discard(object_key)
        return is_new

    def _is_refuted(self, object_key: _Key, change: ObjectChange, begun: int) -> bool:
        """Return whether the snapshot refutes an entry from before its reading began: a true version would be in it, as
        versions only grow, and are sent after they are committed."""
        entry = self.live.get(change.kind, {}).get(change.key) or self._dead.get(object_key)
        return entry is not None and entry.turn <= begun and change.order_key < entry.change.order_key

    def _get_order_key(self, object_key: _Key) -> int:
        kind, key = object_key
        entry = self.live.get(kind, {}).get(key) or self._dead.get(object_key)
        return entry.change.order_key if entry else -1

    def _put(self, change: ObjectChange, now: float) -> None:
        object_key = change.kind, change.key
        self._remove(object_key)
        self._turn += 1
        entry = _CachedVersion(change, self._turn, now)
        if change.is_deleted:
            self._dead[object_key] = entry
            self._tombstones.add(object_key, _count_bytes(change))
            self._expire(now)
        else:
            self.live.setdefault(change.kind, {})[change.key] = entry

    def _remove(self, object_key: _Key) -> None:
        kind, key = object_key
        self.live.get(kind, {}).pop(key, None)
        self._notified.discard(object_key)
        self._dead.pop(object_key, None)
        self._tombstones.discard(object_key)
        self._absent.discard(object_key)

    def _delete_absent(self, entry: _CachedVersion, now: float) -> ObjectChange:
        last = entry.change
        deletion = ObjectChange(last.kind, last.key, last.version, is_deleted=True)
        self._put(deletion, now)
        self._absent.add((deletion.kind, deletion.key))
        return deletion

    def _expire(self, now: float) -> None:
        while self._dead:
            object_key, entry = next(iter(self._dead.items()))
            if self._tombstones.excess is None and now < entry.at + self._tombstone_s:
                return
            self._remove(object_key)


class _BoundedKeys:
    """The bytes of entries, by the time they were added."""

    def __init__(self, limit: int) -> None:
        self.size = 0
        self._limit = limit
        self._sizes: OrderedDict[_Key, int] = OrderedDict()

    @property
    def excess(self) -> _Key | None:
        """Return the oldest key while they are too many bytes."""
        return next(iter(self._sizes)) if self.size > self._limit else None

    def add(self, object_key: _Key, size: int) -> None:
        self._sizes[object_key] = size
        self.size += size

    def discard(self, object_key: _Key) -> None:
        self.size -= self._sizes.pop(object_key, 0)


def _count_bytes(change: ObjectChange) -> int:
    """Return the bytes that an entry with this change takes."""
    fields = {} if change.data is None else change.data
    return (
        ENTRY_BYTES
        + sys.getsizeof(change.key)
        + sys.getsizeof(fields)
        + sum(sys.getsizeof(name) + sys.getsizeof(value) for name, value in fields.items())
    )
