"""Which pages a reader of a feed takes."""

from __future__ import annotations

import pytest

from sublet_borrower.node_client.feed_cursor import FeedCursor, FeedPageAcceptance
from sublet_protocol.domain.subscriptions import MAX_OFFSET, Bookmark
from sublet_protocol.messages.feed_messages import FeedPage

ADVANCED, STALE = FeedPageAcceptance.ADVANCED, FeedPageAcceptance.STALE
GAP, HEARTBEAT = FeedPageAcceptance.GAP, FeedPageAcceptance.HEARTBEAT


@pytest.fixture
def cursor() -> FeedCursor:
    cursor = FeedCursor("r")
    assert cursor.bookmark is None
    assert heartbeat(cursor, Bookmark(2, {1: 5, 2: 0})) is HEARTBEAT
    return cursor


def step(cursor: FeedCursor, stream: int, start: int, position: int) -> FeedPageAcceptance:
    return cursor.accept(FeedPage(cursor.subscription, stream_id=stream, start=start, position=position))


def heartbeat(cursor: FeedCursor, bookmark: Bookmark) -> FeedPageAcceptance:
    return cursor.accept(FeedPage(cursor.subscription, bookmark=bookmark))


@pytest.mark.conforms("P2")
def test_only_the_direct_successor_is_taken(cursor: FeedCursor) -> None:
    assert step(cursor, 1, 5, 8) is ADVANCED
    before = cursor.bookmark
    steps = ((1, 5, 8), (1, 0, 8), (1, 9, 12), (1, 7, 12), (3, 0, 1))
    assert [step(cursor, *each) for each in steps] == [STALE, STALE, GAP, GAP, GAP]
    assert cursor.bookmark == before == Bookmark(2, {1: 8, 2: 0})
    assert step(cursor, 1, 8, 12) is ADVANCED
    assert step(cursor, 2, 0, 0) is ADVANCED


@pytest.mark.conforms("P2")
def test_a_page_that_was_not_given_out_is_taken_again(cursor: FeedCursor) -> None:
    cursor.go_back()
    for _ in range(2):
        assert step(cursor, 1, 5, 8) is ADVANCED
        cursor.go_back()
        assert cursor.bookmark == Bookmark(2, {1: 5, 2: 0})
    assert step(cursor, 1, 5, 8) is ADVANCED
    cursor.confirm()
    cursor.go_back()
    assert cursor.bookmark == Bookmark(2, {1: 8, 2: 0})


@pytest.mark.conforms("P2", "P5")
def test_a_page_of_an_older_call_is_discarded(cursor: FeedCursor) -> None:
    old = cursor.subscription
    assert cursor.new_subscription_id() != old
    for page in (
        FeedPage(old, stream_id=1, start=5, position=6),
        FeedPage(old, bookmark=Bookmark(9, {1: 7})),
        FeedPage(old),
    ):
        assert cursor.accept(page) is STALE
    assert cursor.bookmark == Bookmark(2, {1: 5, 2: 0})
    assert step(cursor, 1, 5, 6) is ADVANCED


def test_a_bookmark_brings_streams(cursor: FeedCursor) -> None:
    """It says of the others what is known."""
    assert step(cursor, 1, 5, 8) is ADVANCED
    assert heartbeat(cursor, Bookmark(4, {1: 9, 3: 0})) is GAP
    assert heartbeat(cursor, Bookmark(1, {1: 8})) is GAP
    assert heartbeat(cursor, Bookmark(4, {1: 8, 3: 0})) is HEARTBEAT
    assert cursor.bookmark == Bookmark(4, {1: 8, 3: 0})
    assert step(cursor, 3, 0, 1) is ADVANCED


@pytest.mark.conforms("P3")
def test_a_bookmark_leaves_out_what_is_gone(cursor: FeedCursor) -> None:
    """A stream of which nothing is left would be reported again wherever the bookmark is used."""
    for oldest, offsets in ((7, {1: 7, 2: 0}), (None, {2: 0})):
        page = FeedPage(cursor.subscription, stream_id=1, start=5, position=7, is_gone=True, oldest_offset=oldest)
        assert cursor.accept(page) is ADVANCED
        assert cursor.bookmark == Bookmark(2, offsets)
        cursor.go_back()
        assert cursor.bookmark == Bookmark(2, {1: 5, 2: 0})


def test_a_step_before_any_beginning_is_doubted() -> None:
    cursor = FeedCursor("r")
    assert step(cursor, 1, 0, 1) is GAP
    assert cursor.accept(FeedPage(cursor.subscription)) is HEARTBEAT
    assert cursor.bookmark is None


@pytest.mark.conforms("P10")
def test_a_bookmark_bears_the_timeline_of_its_database(cursor: FeedCursor) -> None:
    assert heartbeat(cursor, Bookmark(2, {1: 5, 2: 0}, "7312/00000001")) is HEARTBEAT
    assert step(cursor, 1, 5, 8) is ADVANCED
    assert cursor.bookmark == Bookmark(2, {1: 8, 2: 0}, "7312/00000001")


def test_a_bookmark_is_stored_as_text() -> None:
    large = Bookmark(0, {MAX_OFFSET: MAX_OFFSET}, "x" * 100)
    for bookmark in (Bookmark(), Bookmark(7, {1: 2, 30: 4}), Bookmark.of({5: 6}), Bookmark(7, {1: 2}, "7312/1"), large):
        assert Bookmark.parse(str(bookmark)) == bookmark
    assert Bookmark.of({5: 6}).known == MAX_OFFSET
