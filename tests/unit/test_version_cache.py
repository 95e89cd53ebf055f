"""What is known, and what a change or a snapshot does to it."""

from __future__ import annotations

import pytest

from sublet_storage.notify.changes import CatchUpSnapshot, ObjectChange
from sublet_storage.notify.version_cache import ENTRY_BYTES, ChangeNovelty, VersionCache
from tests.support.notifications import list_objects

NOW = 0.0


def space(key: str, version: int, deleted: bool = False) -> ObjectChange:
    return ObjectChange("space", key, version, deleted)


def holding(*changes: ObjectChange, tombstone_bytes: int = 1 << 20) -> VersionCache:
    cache = VersionCache(tombstone_s=100.0, tombstone_bytes=tombstone_bytes)
    for change in changes:
        assert cache.apply(change, NOW) is ChangeNovelty.NEWER
    return cache


def merge(
    cache: VersionCache, *changes: ObjectChange, keys: frozenset[str] | None = None, now: float = NOW
) -> list[ObjectChange]:
    return cache.merge("space", CatchUpSnapshot(changes, keys), cache.begin_snapshot(), now)


@pytest.mark.conforms("D7")
def test_an_older_version_never_overwrites_a_newer_one() -> None:
    cache = holding(space("a", 5))
    for older in (space("a", 4), space("a", 5), space("a", 4, deleted=True)):
        assert cache.apply(older, NOW) is ChangeNovelty.OLD
    assert (cache.get("space", "a"), cache.old) == (space("a", 5), 3)


@pytest.mark.conforms("D6", "D7")
def test_an_invented_change_holds_until_the_next_read() -> None:
    cache = holding(space("a", 1_000), space("b", 1_000, deleted=True))
    assert merge(cache, space("a", 5), space("b", 5)) == [space("a", 5), space("b", 5)]
    assert cache.apply(space("a", 6), NOW) is ChangeNovelty.NEWER


@pytest.mark.conforms("D7")
def test_deleted_stays_deleted_until_made_again() -> None:
    cache = holding(space("a", 5), space("a", 5, deleted=True))
    assert cache.apply(space("a", 5), NOW) is ChangeNovelty.OLD
    assert cache.get("space", "a") is None
    assert cache.apply(space("a", 6), NOW) is ChangeNovelty.NEWER
    assert list_objects(cache, "space") == {"a": space("a", 6)}


@pytest.mark.conforms("D7")
def test_tombstones_end_by_time_or_bytes() -> None:
    """Also those of what was not known."""
    cache = holding(space("a", 5, deleted=True))
    assert cache.apply(space("a", 4), NOW + 99) is ChangeNovelty.OLD
    assert cache.apply(space("a", 4), NOW + 100) is ChangeNovelty.NEWER
    cache = holding(*(space(key, 5, deleted=True) for key in "abc"), tombstone_bytes=2 * (ENTRY_BYTES + 200))
    assert [cache.apply(space(key, 4), NOW).value for key in "abc"] == ["newer", "old", "old"]


@pytest.mark.conforms("D6", "D7")
def test_a_snapshot_adds_newer_and_takes_gone() -> None:
    cache = holding(space("a", 5), space("b", 5), space("c", 5))
    found = merge(cache, space("a", 6), space("b", 5), space("d", 1))
    assert found == [space("a", 6), space("d", 1), space("c", 5, deleted=True)]
    assert list_objects(cache, "space") == {"a": space("a", 6), "b": space("b", 5), "d": space("d", 1)}
    assert merge(cache, space("a", 6), space("b", 5), space("d", 1)) == []


@pytest.mark.conforms("D6")
def test_changes_during_a_snapshot_remain() -> None:
    cache = holding(space("a", 5))
    begun = cache.begin_snapshot()
    cache.apply(space("b", 1), NOW)
    cache.apply(space("a", 6), NOW)
    assert cache.merge("space", CatchUpSnapshot((space("a", 5),)), begun, NOW) == []
    assert list_objects(cache, "space") == {"a": space("a", 6), "b": space("b", 1)}


@pytest.mark.conforms("D7")
def test_only_a_snapshot_revives() -> None:
    cache = holding(space("a", 5))
    assert merge(cache) == [space("a", 5, deleted=True)]
    assert cache.apply(space("a", 5), NOW) is ChangeNovelty.OLD
    assert cache.apply(space("a", 6), NOW) is ChangeNovelty.AMBIGUOUS
    assert cache.get("space", "a") is None
    assert merge(cache, space("a", 6)) == [space("a", 6)]
    assert cache.apply(space("a", 7), NOW) is ChangeNovelty.NEWER
    assert merge(cache) == [space("a", 7, deleted=True)]
    assert merge(cache, space("a", 6)) == [], "a version from before"
    assert merge(cache, space("a", 7)) == [space("a", 7)], "a node whose lease had run out, and that goes on"
    assert merge(cache) == [space("a", 7, deleted=True)]
    assert cache.apply(space("a", 8, deleted=True), NOW) is ChangeNovelty.NEWER
    assert cache.apply(space("a", 9), NOW) is ChangeNovelty.NEWER, "its end is known"


def test_a_snapshot_of_some_has_nothing_of_the_others() -> None:
    cache = holding(space("a", 5), space("b", 5), space("c", 5))
    assert merge(cache, space("a", 6), keys=frozenset("ab")) == [space("a", 6), space("b", 5, deleted=True)]
    assert cache.get("space", "c") == space("c", 5)


def test_unasked_keys_are_forgotten_in_time() -> None:
    cache = holding(space("a", 5), space("c", 5))
    merge(cache, space("a", 5), keys=frozenset("a"), now=NOW + 100)
    assert cache.get("space", "c") is not None
    assert merge(cache, space("a", 5), keys=frozenset("a"), now=NOW + 101) == []
    assert list_objects(cache, "space") == {"a": space("a", 5)}


@pytest.mark.conforms("X4")
def test_made_up_changes_are_bounded_by_bytes() -> None:
    """Living and deleted ones, by their keys and data; what was read stays, and what a change has replaced is known."""
    cache = VersionCache(tombstone_s=100.0, notified_bytes=100_000, tombstone_bytes=50_000)
    merge(cache, space("true", 5))
    deletions = [space(f"{number}" + "x" * 5_000, 1, deleted=True) for number in range(1_000)]
    for number, deletion in enumerate(deletions):
        assert cache.apply(ObjectChange("space", f"{number}", 1, data={"filter": "x" * 5_000}), NOW).value == "newer"
        cache.apply(deletion, NOW)
    assert len(list_objects(cache, "space")) == 1 + 100_000 // 5_900
    assert cache.get("space", "true") == space("true", 5)
    assert cache.get("space", "999") is not None
    known = [each for each in reversed(deletions) if cache.apply(each, NOW) is ChangeNovelty.OLD]
    assert len(known) == 50_000 // 5_700
    merge(cache, space("true", 5))
    assert list_objects(cache, "space") == {"true": space("true", 5)}


def test_what_a_reading_has_confirmed_takes_no_room() -> None:
    cache = VersionCache(tombstone_s=100.0, notified_bytes=8_000)
    a, b, c = (ObjectChange("space", key, 5, data={"filter": "x" * 5_000}) for key in "abc")
    cache.apply(a, NOW)
    assert merge(cache, space("a", 5)) == []
    assert cache.apply(b, NOW) is ChangeNovelty.NEWER
    assert list_objects(cache, "space") == {"a": space("a", 5), "b": b}
    cache.apply(c, NOW)
    assert list_objects(cache, "space") == {"a": space("a", 5), "c": c}
