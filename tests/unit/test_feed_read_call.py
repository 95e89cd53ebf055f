"""A call that reads through a node, whose client takes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pytest

from sublet_leader.feed import history_and_follow as module
from sublet_leader.feed.history_and_follow import EXPANDED_BYTES, ClientStalled, FeedReadCall, split_table
from sublet_leader.feed.page_memory import PageMemory, ReaderMemory
from sublet_protocol.domain.errors import (
    PositionBeyondHead,
    PositionGone,
    Unauthenticated,
    ValueTooLarge,
)
from sublet_protocol.domain.subscriptions import Bookmark, StartingPosition
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.feed_messages import FeedReadRequest, decode_page
from sublet_storage.log.fetch import HeadState
from sublet_storage.readers.tail import TailPage

READ = FeedReadRequest(TopicFilter("#"), StartingPosition.parse("earliest"), "s")


class Reader:
    """In place of one with the database: it has so many pages, the first of which were there when it began."""

    stream_count, is_stale = 1, False
    open_streams: Collection[int] = (1,)
    bookmark = Bookmark(1, {}, None)

    def __init__(self, *pages: TailPage, old: int = 1) -> None:
        self._pages, self._old = pages, old
        self._taken = 0

    @property
    def is_caught_up(self) -> bool:
        return self._taken >= self._old

    def readable_cursors(self) -> Sequence[object]:
        return self._pages[self._taken :][:1]

    def read(self, *_: object) -> TailPage:
        self._taken += 1
        return self._pages[self._taken - 1]

    def check_timeline(self, timeline: str | None) -> None:
        pass

    def check_heads(self, heads: Mapping[int, HeadState]) -> None:
        raise PositionBeyondHead(f"{heads}")

    def is_beyond(self, heads: Mapping[int, HeadState]) -> bool:
        return False

    def update_heads(self, heads: Mapping[int, HeadState]) -> None:
        pass

    def raise_read_error(self) -> None:
        pass


async def run(work: Callable[..., Any]) -> Any:
    return work(None)


async def never(page: object) -> None:
    await asyncio.Event().wait()


def make_call(
    write: Callable[[Any], Awaitable[None]],
    check_right: Callable[[], None] = lambda: None,
    memory: PageMemory | None = None,
    watch: object = None,
) -> FeedReadCall:
    own = ReaderMemory(memory or PageMemory(EXPANDED_BYTES), "a")
    return FeedReadCall(run, cast(Any, watch), READ, write, check_right, lambda streams: None, own, hello_s=0.001)


def read(check_right: Callable[[], None], memory: PageMemory | None = None) -> None:
    asyncio.run(asyncio.wait_for(make_call(never, check_right, memory).history(), 60))


@pytest.fixture(autouse=True)
def reader(monkeypatch: pytest.MonkeyPatch) -> Callable[[Reader], None]:
    """Set what the call reads with; by itself a reader without pages."""

    def set_reader(one: Reader) -> None:
        monkeypatch.setattr(module, "MultiStreamReader", lambda conn, filter, start: one)

    set_reader(Reader())
    return set_reader


@pytest.mark.conforms("X4")
def test_rights_are_checked_while_nothing_is_taken() -> None:
    """So that a call ends whose token was revoked, and what it has read with it."""
    checks: list[None] = []

    def check_right() -> None:
        checks.append(None)
        if len(checks) > 3:
            raise Unauthenticated("the token was revoked")

    with pytest.raises(Unauthenticated):
        read(check_right)


def test_who_takes_nothing_for_long_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise what was read for it would be kept for ever."""
    monkeypatch.setattr(module, "WRITE_TIMEOUT_S", 0.0)
    with pytest.raises(ClientStalled):
        read(lambda: None)


class ShortMemory(PageMemory):
    """For which somebody always waits."""

    is_short = True


def test_who_takes_nothing_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sooner than without others that wait for its memory."""
    monkeypatch.setattr(module, "CONTENDED_WRITE_TIMEOUT_S", 0.0)
    with pytest.raises(ClientStalled):
        read(lambda: None, ShortMemory(1))


def messages(*offsets: int) -> tuple[pa.RecordBatch, ...]:
    return (pa.RecordBatch.from_pydict({"offset": offsets}),) if offsets else ()


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        (TailPage(1, 5, 5), []),
        (TailPage(1, 5, 9), [(5, 9, False)]),
        (TailPage(1, 5, 7, messages(5, 6)), [(5, 7, True)]),
        (TailPage(1, 5, 9, messages(5, 6)), [(5, 7, True), (7, 9, False)]),
        (TailPage(1, 5, 9, gone=PositionGone(1, 5, 9)), [(5, 9, False)]),
    ],
    ids=["nothing", "no match", "all", "no match behind", "gone"],
)
def test_one_read_is_sent_without_empty_pages(
    reader: Callable[[Reader], None], page: TailPage, expected: list[tuple[int, int, bool]]
) -> None:
    """And what came after the beginning is left to another call."""
    sent: list[Any] = []

    async def write(page: Any) -> None:
        sent.append(page)

    reader(Reader(page, TailPage(1, 9, 10)))
    asyncio.run(asyncio.wait_for(make_call(write).history(), 60))
    bookmark, *pages = map(decode_page, sent)
    assert bookmark.bookmark is not None
    assert [(each.start, each.position, each.messages is not None) for each in pages] == expected
    assert [each.oldest_offset for each in pages] == [page.gone and page.gone.oldest] * len(pages)


def test_who_follows_no_stream_looks_for_new_ones(reader: Callable[[Reader], None]) -> None:
    """At intervals, as no new head will show that there is one."""

    class Empty(Reader):
        is_stale, looks = True, 0
        open_streams = ()

        def refresh_streams(self, conn: object) -> Reader:
            self.looks += 1
            return self

    found, sent = Empty(), list[Any]()

    async def write(page: Any) -> None:
        sent.append(page)
        if len(sent) == 6:
            raise Unauthenticated("the token was revoked")

    async def wait_for_heads(timeout_s: float) -> dict[int, HeadState]:
        return {}

    waiter = SimpleNamespace(watched=(), set_streams=lambda stream_ids: None, wait_for_heads=wait_for_heads)
    reader(found)
    watch = SimpleNamespace(timeline=None, add_waiter=lambda on_lowered: waiter)
    with pytest.raises(Unauthenticated):
        asyncio.run(asyncio.wait_for(make_call(write, watch=watch).follow(), 60))
    assert found.looks == 3, "each is sent as a bookmark, and a keep-alive in between"


@pytest.mark.conforms("P10")
def test_a_lowered_head_ends_the_call_for_good(reader: Callable[[Reader], None]) -> None:
    """Others may have appended by the time that it writes, so that the head no longer shows what was lost."""
    sent: list[Any] = []

    async def write(page: Any) -> None:
        sent.append(page)
        watch.on_lowered({1: HeadState(3, False, False)})

    watch = SimpleNamespace(timeline=None)

    def add_waiter(on_lowered: Any) -> Any:
        watch.on_lowered = on_lowered
        return SimpleNamespace(set_streams=lambda stream_ids: None)

    watch.add_waiter = add_waiter
    reader(Reader(TailPage(1, 5, 9)))
    with pytest.raises(PositionBeyondHead):
        asyncio.run(asyncio.wait_for(make_call(write, watch=watch).follow(), 60))
    assert len(sent) == 1, "the bookmark"


def test_a_table_is_split_into_what_can_be_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single message larger than a page is a page, up to the limit."""
    table = pa.table({"stream": [1, 1], "offset": [7, 8], "value": [b"x" * 99] * 2})
    one = table.slice(0, 1)
    for page_bytes, rows in ((table.nbytes, [2]), (table.nbytes - 1, [1, 1]), (1, [1, 1])):
        assert [part.num_rows for part in split_table(table, page_bytes)] == rows
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", one.nbytes)
    assert list(split_table(one, 1)) == [one]
    monkeypatch.setattr(module, "MAX_PAGE_BYTES", one.nbytes - 1)
    with pytest.raises(ValueTooLarge, match="stream 1, offset 7"):
        list(split_table(one, 1))
