"""Which pages a reader of a feed takes."""

from __future__ import annotations

import pytest

from sublet_borrower.remote.cursor import Cursor, Taken
from sublet_protocol.domain.subscriptions import MAX_OFFSET, Bookmark
from sublet_protocol.messages.feed import Page


@pytest.fixture
def cursor() -> Cursor:
    cursor = Cursor("r")
    assert cursor.bookmark is None
    assert cursor.take(Page(cursor.subscription, bookmark=Bookmark(2, {1: 5, 2: 0}))) is Taken.NOTHING
    return cursor


def step(cursor: Cursor, stream: int, start: int, position: int) -> Taken:
    return cursor.take(Page(cursor.subscription, stream_id=stream, start=start, position=position))


@pytest.mark.conforms("P2")
def test_only_the_direct_successor_is_taken(cursor: Cursor) -> None:
    assert step(cursor, 1, 5, 8) is Taken.STEP
    before = cursor.bookmark
    assert step(cursor, 1, 5, 8) is Taken.DISCARDED
    assert step(cursor, 1, 0, 8) is Taken.DISCARDED
    assert step(cursor, 1, 9, 12) is Taken.DOUBT
    assert step(cursor, 1, 7, 12) is Taken.DOUBT
    assert step(cursor, 3, 0, 1) is Taken.DOUBT
    assert cursor.bookmark == before == Bookmark(2, {1: 8, 2: 0})
    assert step(cursor, 1, 8, 12) is Taken.STEP
    assert step(cursor, 2, 0, 0) is Taken.STEP


@pytest.mark.conforms("P2", "P5")
def test_a_page_of_an_older_call_is_discarded(cursor: Cursor) -> None:
    old = cursor.subscription
    assert cursor.renew() != old
    for page in (Page(old, stream_id=1, start=5, position=6), Page(old, bookmark=Bookmark(9, {1: 7})), Page(old)):
        assert cursor.take(page) is Taken.DISCARDED
    assert cursor.bookmark == Bookmark(2, {1: 5, 2: 0})
    assert step(cursor, 1, 5, 6) is Taken.STEP


def test_a_bookmark_brings_streams_and_says_of_the_others_what_is_known(cursor: Cursor) -> None:
    assert step(cursor, 1, 5, 8) is Taken.STEP
    assert cursor.take(Page(cursor.subscription, bookmark=Bookmark(4, {1: 9, 3: 0}))) is Taken.DOUBT
    assert cursor.take(Page(cursor.subscription, bookmark=Bookmark(1, {1: 8}))) is Taken.DOUBT
    assert cursor.take(Page(cursor.subscription, bookmark=Bookmark(4, {1: 8, 3: 0}))) is Taken.NOTHING
    assert cursor.bookmark == Bookmark(4, {1: 8, 3: 0})
    assert step(cursor, 3, 0, 1) is Taken.STEP


def test_a_step_before_any_beginning_is_doubted() -> None:
    cursor = Cursor("r")
    assert step(cursor, 1, 0, 1) is Taken.DOUBT
    assert cursor.take(Page(cursor.subscription)) is Taken.NOTHING
    assert cursor.bookmark is None


@pytest.mark.conforms("P10")
def test_a_bookmark_bears_the_timeline_of_its_database(cursor: Cursor) -> None:
    at = Bookmark(2, {1: 5, 2: 0}, "7312/00000001")
    assert cursor.take(Page(cursor.subscription, bookmark=at)) is Taken.NOTHING
    assert step(cursor, 1, 5, 8) is Taken.STEP
    assert cursor.bookmark == Bookmark(2, {1: 8, 2: 0}, "7312/00000001")


def test_a_bookmark_is_kept_as_text() -> None:
    for bookmark in (Bookmark(), Bookmark(7, {1: 2, 30: 4}), Bookmark.of({5: 6}), Bookmark(7, {1: 2}, "7312/00000002")):
        assert Bookmark.parse(str(bookmark)) == bookmark
    assert Bookmark.of({5: 6}).known == MAX_OFFSET
