"""The known versions of objects; late, repeated and reordered changes have no effect.

Deleted objects leave a tombstone, which keeps an older change from reviving them. A change has the version of its
deletion; of what is merely absent from a snapshot the version is unknown, and only another snapshot can revive that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from sublet_storage.notify.changes import CatchUpSnapshot, ObjectChange

MAX_TOMBSTONES = 10_000
"""Maximum number of tombstones; beyond it, the oldest is deleted early."""


class ChangeNovelty(Enum):
    """The novelty of a change to the cache."""

    NEWER = "newer"  # it was taken in
    OLD = "old"  # this version or a later one is known
    AMBIGUOUS = "ambiguous"  # a snapshot did not have the object, and may be newer or older than this


@dataclass(slots=True)
class _CachedVersion:
    """A cached change. `at`: when it was last applied, or a snapshot last confirmed it. `turn`: the number of its
    application."""

    change: ObjectChange
    turn: int
    at: float


class VersionCache:
    """The versions of objects of all kinds. Not thread-safe."""

    def __init__(self, tombstone_s: float, most_tombstones: int = MAX_TOMBSTONES) -> None:
        self.old = 0
        """Changes that were not newer than what was known."""
        self._tombstone_s, self._most_tombstones = tombstone_s, most_tombstones
        self._live: dict[str, dict[str, _CachedVersion]] = {}
        self._dead: OrderedDict[tuple[str, str], _CachedVersion] = OrderedDict()  # by when they died
        self._turn = 0
        self._absent: set[tuple[str, str]] = set()  # of the dead: missing from a snapshot, version unknown

    def get(self, kind: str, key: str) -> ObjectChange | None:
        """Return the newest change of an object that exists."""
        entry = self._live.get(kind, {}).get(key)
        return entry.change if entry else None

    def list_objects(self, kind: str) -> dict[str, ObjectChange]:
        """Return all living objects of a kind, by key."""
        return {key: entry.change for key, entry in self._live.get(kind, {}).items()}

    def apply(self, change: ObjectChange, now: float) -> ChangeNovelty:
        """Apply a change, if it is newer than the cached one."""
        self._expire(now)
        object_key = change.kind, change.key
        if object_key in self._absent and not change.is_deleted:
            verdict = (
                ChangeNovelty.AMBIGUOUS if change.version > self._dead[object_key].change.version else ChangeNovelty.OLD
            )
        else:
            verdict = ChangeNovelty.NEWER if change.order_key > self._rank(object_key) else ChangeNovelty.OLD
        if verdict is ChangeNovelty.NEWER:
            self._put(change, now)
        self.old += verdict is ChangeNovelty.OLD
        return verdict

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
        for key, entry in list(self._live.get(kind, {}).items()):
            if key in keys or entry.turn > begun:
                continue
            if snapshot.keys is None or key in snapshot.keys:
                changes.append(self._delete_absent(entry, now))
            elif now > entry.at + self._tombstone_s:
                del self._live[kind][key]  # no longer requested
        return changes

    # --- entries ----------------------------------------------------------------------------------------------------

    def _confirm(self, change: ObjectChange, begun: int, now: float) -> bool:
        """Apply the snapshot's state of one object; return whether it was new."""
        object_key = change.kind, change.key
        if object_key in self._absent and self._dead[object_key].turn <= begun and not change.is_deleted:
            is_new = change.version >= self._dead[object_key].change.version
        else:
            is_new = change.order_key > self._rank(object_key) or self._is_refuted(object_key, change, begun)
        if is_new:
            self._put(change, now)
        elif entry := self._live.get(change.kind, {}).get(change.key):
            entry.at = now
        return is_new

    def _is_refuted(self, object_key: tuple[str, str], change: ObjectChange, begun: int) -> bool:
        """Return whether the snapshot refutes an entry from before its reading began: a true version would be in it, as
        versions only grow, and are sent after they are committed."""
        entry = self._live.get(change.kind, {}).get(change.key) or self._dead.get(object_key)
        return entry is not None and entry.turn <= begun and change.order_key < entry.change.order_key

    def _rank(self, object_key: tuple[str, str]) -> int:
        kind, key = object_key
        entry = self._live.get(kind, {}).get(key) or self._dead.get(object_key)
        return entry.change.order_key if entry else -1

    def _put(self, change: ObjectChange, now: float) -> None:
        object_key = change.kind, change.key
        self._turn += 1
        entry = _CachedVersion(change, self._turn, now)
        self._dead.pop(object_key, None)
        self._absent.discard(object_key)
        if change.is_deleted:
            self._live.get(change.kind, {}).pop(change.key, None)
            self._dead[object_key] = entry
            self._expire(now)
        else:
            self._live.setdefault(change.kind, {})[change.key] = entry

    def _delete_absent(self, entry: _CachedVersion, now: float) -> ObjectChange:
        last = entry.change
        deletion = ObjectChange(last.kind, last.key, last.version, is_deleted=True)
        self._put(deletion, now)
        self._absent.add((deletion.kind, deletion.key))
        return deletion

    def _expire(self, now: float) -> None:
        for object_key in list(self._list_expired(now)):
            del self._dead[object_key]
            self._absent.discard(object_key)

    def _list_expired(self, now: float) -> Iterator[tuple[str, str]]:
        too_many = len(self._dead) - self._most_tombstones
        for object_key, entry in self._dead.items():
            if too_many <= 0 and now < entry.at + self._tombstone_s:
                return
            too_many -= 1
            yield object_key
