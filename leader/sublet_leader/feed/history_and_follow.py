"""Reads for clients without access to the database: `History` and `Follow`.

Each is one coroutine. A reader's entire state is its position, and the client has that too: it continues from there
after a broken call, at this node or another. The next page is read when the one before has been taken, so that a slow
client costs a page.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import psycopg
import pyarrow as pa

from sublet_leader.feed.database_threads import Work
from sublet_leader.feed.head_poller import FeedHeadPoller, HeadWaiter
from sublet_leader.feed.page_memory import ReaderMemory
from sublet_protocol.domain.errors import PositionBeyondHead, ValueTooLarge
from sublet_protocol.domain.subscriptions import Bookmark, StartingPosition
from sublet_protocol.messages.feed_messages import HEARTBEAT_INTERVAL_S, FeedPage, FeedReadRequest, encode_page
from sublet_storage.log.fetch import MAX_EXPANSION, HeadState
from sublet_storage.readers.tail import MultiStreamReader, StreamCursor, TailPage, TailStart

READ_BYTES = 512 * 1024
"""Maximum bytes of one read of a stream, if that is a block or more."""

PAGE_BYTES = 1 << 20
"""A larger block is sent as several pages. One that a client never takes stays in memory as long as its connection."""

EXPANDED_BYTES = READ_BYTES * MAX_EXPANSION
"""What a read may come to, but for a single block that is larger."""

MAX_PAGE_BYTES = 48 << 20
"""A single message above that cannot be sent."""

WRITE_TIMEOUT_S = 600.0
"""The call of a client that takes no page for this long ends; it can call again at any time."""

CONTENDED_WRITE_TIMEOUT_S = 10.0
"""The same, while other calls wait for memory."""

_T = TypeVar("_T")


class ClientStalled(Exception):
    """Raised when the client took no page for too long."""


class FeedReadCall:
    """One call. `run` runs its database work, on another thread, as all that takes longer the more streams there are.
    `write` returns when the encoded page has been taken, or soon will be. `check_right` raises where the caller may
    read no more, and `reserve` where there is no room for so many streams. `memory` is for what was read and not taken
    yet; what it holds at the end is with gRPC until the connection ends."""

    def __init__(
        self,
        run: Callable[[Work[Any]], Awaitable[Any]],
        watch: FeedHeadPoller,
        read: FeedReadRequest,
        write: Callable[[Any], Awaitable[None]],
        check_right: Callable[[], None],
        reserve: Callable[[int], None],
        memory: ReaderMemory,
        hello_s: float = HEARTBEAT_INTERVAL_S,
    ) -> None:
        self._run, self._watch, self._read, self._hello_s = run, watch, read, hello_s
        self._write_page, self._check_right, self._reserve = write, check_right, reserve
        self._memory = memory
        self._reading: MultiStreamReader | None = None
        self._lost_end: PositionBeyondHead | None = None

    async def history(self) -> None:
        """Send the stored messages, up to the present heads of the streams."""
        reading = await self._begin()
        while not reading.is_caught_up and (turn := reading.readable_cursors()):
            for cursor in turn:
                await self._send_pages(reading, cursor)
        if not reading.is_caught_up:
            reading.raise_read_error()

    async def follow(self) -> None:
        """Send the stored messages, then new ones, until the call is cancelled."""
        waiter = self._watch.add_waiter(self._on_lowered)
        try:
            reading = await self._begin()
            while True:
                await self._send_available(reading)
                new_heads = await self._wait_for_heads(waiter, reading)
                if reading.is_beyond(new_heads):  # or these are older than what was read since
                    await self._run_with_heartbeats(reading.refresh_heads)
                reading.update_heads(new_heads)
        finally:
            waiter.set_streams(())

    def _on_lowered(self, heads: Mapping[int, HeadState]) -> None:
        """Note that the call is to end where what it has read is lost. Others may append until nothing shows that."""
        try:
            if self._reading is not None:
                self._reading.check_timeline(self._watch.timeline)
                self._reading.check_heads(heads)
        except PositionBeyondHead as error:
            self._lost_end = error

    async def _send_available(self, reading: MultiStreamReader) -> None:
        while True:
            for cursor in reading.readable_cursors():
                await self._send_pages(reading, cursor)
            if reading.is_stale:
                await self._list_streams(reading.refresh_streams)
            if not reading.readable_cursors():
                break
        reading.raise_read_error()

    async def _wait_for_heads(self, waiter: HeadWaiter, reading: MultiStreamReader) -> dict[int, Any]:
        """Wait for new messages without a time limit, with a keep-alive at intervals; return the new heads, empty where
        there is no stream to wait for."""
        waiter.set_streams(reading.open_streams)
        while not (new_heads := await waiter.wait_for_heads(self._hello_s)):
            reading.check_timeline(self._watch.timeline)
            await self._write_heartbeat()
            if not waiter.watched:
                break
        return new_heads

    async def _begin(self) -> MultiStreamReader:
        start = to_tail_start(self._read.starting_position)
        return await self._list_streams(lambda conn: MultiStreamReader(conn, self._read.filter, start))

    async def _list_streams(self, work: Callable[[psycopg.Connection[Any]], MultiStreamReader]) -> MultiStreamReader:
        """Return the reader that `work` returns with its streams, after its bookmark was sent."""

        def run(conn: psycopg.Connection[Any]) -> tuple[MultiStreamReader, Any]:
            reading = work(conn)
            return reading, encode_page(FeedPage(self._read.subscription_id, bookmark=reading.bookmark))

        reading, page = await self._run_with_heartbeats(run)
        self._reading = reading
        self._reserve(reading.stream_count)
        await self._write(page)
        return reading

    async def _send_pages(self, reading: MultiStreamReader, cursor: StreamCursor) -> None:
        await self._wait_for(self._memory.reserve(EXPANDED_BYTES), self._write_heartbeat)
        pages = await self._run_with_heartbeats(lambda conn: self._encode_pages(reading.read(conn, cursor, READ_BYTES)))
        while pages:
            self._memory.resize(sum(page.ByteSize() for page in pages))
            page = pages.pop(0)
            try:
                await self._write(page)
            except BaseException:
                self._memory.resize(page.ByteSize())
                raise
        self._memory.resize(0)

    def _encode_pages(self, page: TailPage) -> list[Any]:
        """Return the pages of one read, encoded."""
        return [encode_page(each) for each in self._split(page)]

    def _split(self, page: TailPage) -> list[FeedPage]:
        make_page = partial(FeedPage, self._read.subscription_id, stream_id=page.stream_id)
        if page.gone is not None:
            return [make_page(start=page.start, position=page.position, is_gone=True, oldest_offset=page.gone.oldest)]
        if not page.batches:
            return [make_page(start=page.start, position=page.position)] if page.start < page.position else []
        pages, start = [], page.start
        for table in split_table(pa.Table.from_batches(page.batches)):
            end = table.column("offset")[-1].as_py() + 1
            pages.append(make_page(start=start, position=end, messages=encode(table)))
            start = end
        return [*pages, make_page(start=start, position=page.position)] if start < page.position else pages

    async def _run_with_heartbeats(self, work: Callable[[psycopg.Connection[Any]], _T]) -> _T:
        """Run `work` on the database, and send the client keep-alives meanwhile."""
        return await self._wait_for(self._run(work), self._write_heartbeat)

    async def _write_heartbeat(self) -> None:
        await self._write(encode_page(FeedPage(self._read.subscription_id)))

    async def _write(self, page: Any) -> None:
        if self._lost_end is not None:
            raise self._lost_end
        self._check_right()
        began_at = time.monotonic()

        async def check() -> None:
            self._check_right()
            limit_s = CONTENDED_WRITE_TIMEOUT_S if self._memory.is_short else WRITE_TIMEOUT_S
            if time.monotonic() > began_at + limit_s:
                raise ClientStalled

        await self._wait_for(self._write_page(page), check)

    async def _wait_for(self, work: Awaitable[_T], meanwhile: Callable[[], Awaitable[None]]) -> _T:
        """Return the result of the work; call `meanwhile` at intervals until then, whose error ends the work."""
        future = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait({future}, timeout=self._hello_s))[0]:
                await meanwhile()
            return future.result()
        finally:
            future.cancel()


def to_tail_start(begin: StartingPosition | Bookmark) -> TailStart:
    """Return the starting position in the form of the log's reader."""
    if isinstance(begin, Bookmark):
        return begin
    match begin.policy:
        case "time":
            return begin.to_datetime
        case "offset":
            return begin.value
        case policy:
            return policy


def encode(table: pa.Table) -> bytes:
    """Return the table as an Arrow IPC stream."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    entire: bytes = sink.getvalue().to_pybytes()
    return entire


def split_table(table: pa.Table, page_bytes: int = PAGE_BYTES) -> Iterator[pa.Table]:
    """Yield the table, halved until each part can be sent. Raise `ValueTooLarge` for a message that cannot."""
    if table.nbytes <= page_bytes:
        yield table
    elif table.num_rows > 1:
        half = table.num_rows // 2
        yield from split_table(table.slice(0, half), page_bytes)
        yield from split_table(table.slice(half), page_bytes)
    elif table.nbytes > MAX_PAGE_BYTES:
        location = f"stream {table.column('stream')[0]}, offset {table.column('offset')[0]}"
        raise ValueTooLarge(
            f"the message at {location} has {table.nbytes} bytes, and a node sends {MAX_PAGE_BYTES} at most. Read it "
            "with access to the database, or begin after it."
        )
    else:
        yield table
