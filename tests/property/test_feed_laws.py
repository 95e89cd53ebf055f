"""Whatever becomes of pages on their way, a reader of a feed gets each message once, in order, and none after a gap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sublet_borrower.node_client.feed_cursor import FeedCursor, FeedPageAcceptance
from sublet_protocol.domain.subscriptions import Bookmark
from sublet_protocol.messages.feed_messages import (
    FeedPage,
    PublishedSpan,
    PublishResult,
    decode_published,
    encode_published,
)  # fmt: skip


@pytest.mark.conforms("P2")
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12), st.integers(0, 5), st.booleans()), max_size=60))
def test_what_is_taken_of_a_stream_has_no_gap(arriving: list[tuple[int, int, int, bool]]) -> None:
    cursor = FeedCursor("r")
    old = cursor.subscription
    cursor.new_subscription_id()
    cursor.accept(FeedPage(cursor.subscription, bookmark=Bookmark(3, {1: 0, 2: 0, 3: 0})))
    seen: dict[int, list[int]] = {1: [], 2: [], 3: []}
    for stream, start, count, late in arriving:
        page = FeedPage(old if late else cursor.subscription, stream_id=stream, start=start, position=start + count)
        if cursor.accept(page) is FeedPageAcceptance.ADVANCED:
            assert not late
            seen[stream] += range(start, start + count)
    for stream, offsets in seen.items():
        assert offsets == list(range(len(offsets)))
        assert cursor.bookmark is not None
        assert cursor.bookmark.offsets[stream] == len(offsets)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.booleans())
def test_answers_are_the_same_after_the_wire(streams: list[int], repeated: bool) -> None:
    by_stream = {s: tuple(row for row, at in enumerate(streams) if at == s) for s in sorted(set(streams))}
    parts = tuple(PublishedSpan(stream + 1, 10 * stream, rows) for stream, rows in by_stream.items())
    answer = decode_published(encode_published(PublishResult(parts, repeated), len(streams)), len(streams))
    assert answer.is_duplicate == repeated
    assert [(p.stream_id, p.first_offset, tuple(p.rows)) for p in answer.spans or ()] == [
        (p.stream_id, p.first_offset, p.rows) for p in parts
    ]
