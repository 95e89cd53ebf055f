"""The gRPC service `Feed`: publishing and reading for clients without database access.

A node has no client state that matters: published messages are in the log and in their producer's row, and a reader's
position is its own. All resources that a client can use are bounded; requests above the bounds are rejected with a time
to retry.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from functools import partial
from typing import Any, TypeVar

import grpc
import psycopg
from msgspec import Struct

from sublet_leader.feed.admission import AdmissionLimiter, NodeBusy
from sublet_leader.feed.database_threads import DatabaseThreads
from sublet_leader.feed.head_poller import FeedHeadPoller
from sublet_leader.feed.history_and_follow import EXPANDED_BYTES, ClientStalled, FeedReadCall
from sublet_leader.feed.member_fetch import StreamRights, fetch_page, read_heads
from sublet_leader.feed.page_memory import PageMemory, ReaderMemory
from sublet_leader.feed.publish import FeedPublishWriter, to_publish_result
from sublet_leader.run_with_timeout import run_with_timeout
from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.errors import (
    Conflict,
    MalformedRow,
    NotFound,
    PayloadUnavailable,
    PermissionDenied,
    SubletError,
    Unauthenticated,
    Unavailable,
    UsageError,
)
from sublet_protocol.domain.subscriptions import Bookmark, Subscription
from sublet_protocol.gate.bounded_request_parser import RETRY_AFTER_METADATA
from sublet_protocol.gate.gate import AccessGate
from sublet_protocol.gate.principal_concurrency_limiter import call_when_over
from sublet_protocol.messages import feed_messages, member_reads
from sublet_protocol.v1 import sublet_pb2_grpc
from sublet_storage.db.bounded_connection import BoundedConnection, get_timeline
from sublet_storage.groups.coordinator import session_name_owners
from sublet_storage.log import fetch as message_log

log = logging.getLogger(__name__)

_Query = TypeVar("_Query")
_Result = TypeVar("_Result")

MAX_ERROR_CHARS = 2000
"""Characters of an error: it travels in a header."""

_CODES: tuple[tuple[type[SubletError], grpc.StatusCode], ...] = (
    (PayloadUnavailable, grpc.StatusCode.UNAVAILABLE),
    (Unauthenticated, grpc.StatusCode.UNAUTHENTICATED),
    (PermissionDenied, grpc.StatusCode.PERMISSION_DENIED),
    (UsageError, grpc.StatusCode.INVALID_ARGUMENT),
    (NotFound, grpc.StatusCode.NOT_FOUND),
    (Conflict, grpc.StatusCode.FAILED_PRECONDITION),
    (MalformedRow, grpc.StatusCode.FAILED_PRECONDITION),
    (SubletError, grpc.StatusCode.INTERNAL),
)


POSITION_BYTES, CURSOR_BYTES = 160, 400
"""Memory of a stream's position in the bookmark that a reader gives, and of each stream that it reads."""


class FeedLimits(Struct, frozen=True):
    """What a node takes on at a time, and with how many connections to the database. Times are in milliseconds.

    Where callers authenticate, one principal has at most as much of it as is left free.
    """

    max_batches: int = 64
    """Requests to publish that are under way."""
    max_batch_bytes: int = 64 << 20
    """Most bytes of requests to publish that are under way."""
    max_readers: int = 1000
    """Calls to read: each may hold a page or two."""
    max_reader_bytes: int = 64 << 20
    """Most memory of the bookmarks that these calls begin at, and of the streams that they have yet to read."""
    max_page_bytes: int = 128 << 20
    """What these calls, and those of members, have read, or are about to, and their clients have not taken yet."""
    max_reads: int = 64
    """Calls of members of groups that are under way."""
    publishing_connections: int = 5
    reading_connections: int = 5
    retry_after_ms: int = 50
    """When a publisher or a member that was refused shall come again."""
    reader_retry_after_ms: int = 1000


class FeedServer(sublet_pb2_grpc.FeedServicer):  # type: ignore[misc]
    """The service `Feed`. Made, used and closed on one event loop; `update_heads` may be called from any thread.

    `on_stored` is called, on the loop, with the new heads after something was published here: {stream: head}.
    `batches`, `readers` and `reads` count the requests under way (`inside`), `pages` what readers and members have not
    taken yet.
    """

    def __init__(
        self,
        url: str,
        limits: FeedLimits | None = None,
        on_stored: Callable[[Mapping[int, int]], None] = lambda heads: None,
        gate: AccessGate | None = None,
    ) -> None:
        limits = limits or FeedLimits()
        self._writing = DatabaseThreads(url, limits.publishing_connections, "feed publishing")
        self._reading = DatabaseThreads(url, limits.reading_connections, "feed reading")
        self._watching = DatabaseThreads(url, 1, "feed watching")
        self._on_stored = on_stored
        self._gate = gate or AccessGate()
        self._writer, self._rights = FeedPublishWriter(), StreamRights()
        self.batches = AdmissionLimiter("batches", limits.max_batches, limits.max_batch_bytes, limits.retry_after_ms)
        self.readers = AdmissionLimiter(
            "readers", limits.max_readers, limits.max_reader_bytes, limits.reader_retry_after_ms
        )
        self.pages = PageMemory(limits.max_page_bytes)
        self.reads = AdmissionLimiter("reads", limits.max_reads, 0, limits.retry_after_ms)
        self.head_poller = FeedHeadPoller(lambda ids: self._watching.run(partial(_read_heads, stream_ids=ids)))
        self.pages_written = 0

    def register(self, server: Any) -> None:
        """Add the service to a `grpc.aio.server`."""
        sublet_pb2_grpc.add_FeedServicer_to_server(self, server)

    def update_heads(self, heads: Mapping[int, int]) -> None:
        """Record known heads of streams and wake their readers."""
        self.head_poller.update_heads(heads)

    async def close(self) -> None:
        """Close the database connections, after the gRPC server was stopped."""
        await self.head_poller.close()
        pools = (self._writing, self._reading, self._watching)
        await asyncio.gather(*(run_with_timeout("close feed connections", pool.close) for pool in pools))

    # --- the service ---

    async def Publish(self, request: Any, context: Any) -> Any:  # noqa: N802 (the service's own spelling)
        """Store a batch exactly once."""
        try:
            batch = feed_messages.decode_publish(request)
            stored, count = await asyncio.wrap_future(self._submit(batch))
        except Exception as error:
            await _refuse(context, error)
            raise
        self.update_heads(stored.heads)
        self._on_stored(stored.heads)
        return feed_messages.encode_published(to_publish_result(stored), count)

    async def History(self, request: Any, context: Any) -> None:  # noqa: N802 (the service's own spelling)
        """Send the stored messages, page by page."""
        read = _decode_read(request)
        del request  # it may be large, and the call may last
        await self._serve(read, context, FeedReadCall.history)

    async def Follow(self, request: Any, context: Any) -> None:  # noqa: N802 (the service's own spelling)
        """Send the stored messages, and then new ones."""
        read = _decode_read(request)
        del request
        await self._serve(read, context, FeedReadCall.follow)

    async def Read(self, request: Any, context: Any) -> Any:  # noqa: N802 (the service's own spelling)
        """Return a page of a granted stream."""
        caller = self._gate.get_caller()

        def fetch(conn: BoundedConnection, fetch_request: member_reads.FetchRequest) -> Any:
            self._rights.check(conn, caller, fetch_request)
            return fetch_page(conn, fetch_request)

        return await self._answer(
            request, context, member_reads.decode_fetch_request, fetch, member_reads.encode_fetch_reply, EXPANDED_BYTES
        )

    async def Heads(self, request: Any, context: Any) -> Any:  # noqa: N802 (the service's own spelling)
        """Return the heads of streams."""
        caller = self._gate.get_caller()

        def read(conn: psycopg.Connection[Any], stream_ids: Sequence[int]) -> dict[int, tuple[int, bool]]:
            return read_heads(conn, self._rights.filter(conn, caller, stream_ids))

        return await self._answer(
            request, context, member_reads.decode_heads_request, read, member_reads.encode_heads_reply
        )

    async def SessionEpoch(self, request: Any, context: Any) -> Any:  # noqa: N802 (the service's own spelling)
        """Return an epoch above all that were drawn before for that session name. Rejects a name of another
        principal."""

        caller = self._gate.get_caller()

        def draw(conn: psycopg.Connection[Any], session_key: tuple[Subscription, str]) -> int:
            caller.check(Right.JOIN, session_key[0].filter, session_key[0].group)
            try:
                return session_name_owners.next_session_epoch(conn, *session_key, caller.principal)
            except PermissionDenied:
                caller.note_refusal(f"session {session_key[1]!r} of {session_key[0]}")
                raise

        return await self._answer(
            request, context, member_reads.decode_session_epoch_request, draw, member_reads.encode_session_epoch_reply
        )

    # --- inside ---

    async def _answer(
        self,
        request: Any,
        context: Any,
        decode: Callable[[Any], _Query],
        work: Callable[[BoundedConnection, _Query], _Result],
        encode: Callable[[_Result], Any],
        expected_bytes: int = 0,
    ) -> Any:
        """Handle a member's call and return its answer. It counts until the answer has left, and where the client has
        gone before, until its work is over. Where the answer may be large, there is room for `expected_bytes` first."""
        principal = self._gate.get_caller().principal
        memory, future = ReaderMemory(self.pages, principal or context.peer()), Future[Any]()
        future.set_result(None)  # there is no work yet
        try:
            query = decode(request)
            self.reads.acquire(principal=principal)
            call_when_over(lambda: future.add_done_callback(lambda _: self.reads.release(principal=principal)))
            call_when_over(lambda: memory.resize(0))
            if expected_bytes:
                await memory.reserve(expected_bytes)
            future = self._reading.submit(lambda conn: work(conn, query), principal)
            answer = encode(await asyncio.wrap_future(future))
        except Exception as error:
            await _refuse(context, error)
            raise
        memory.resize(answer.ByteSize())
        return answer

    def _submit(self, batch: feed_messages.FeedPublishRequest) -> Future[Any]:
        """Submit a batch, which counts until it is over, also where the client has gone."""
        size, caller = len(batch.messages), self._gate.get_caller()
        self.batches.acquire(size, caller.principal)
        future = self._writing.submit(lambda conn: self._writer.store(conn, batch, caller), caller.principal)
        future.add_done_callback(lambda _: self.batches.release(size, caller.principal))
        return future

    async def _serve(
        self, read: feed_messages.FeedReadRequest | SubletError, context: Any, operation: Callable[[FeedReadCall], Any]
    ) -> None:
        if isinstance(read, SubletError):
            await _refuse(context, read)
            return
        caller, start = self._gate.get_caller(), read.starting_position
        size = POSITION_BYTES * len(start.offsets) if isinstance(start, Bookmark) else 0

        run = partial(self._reading.run, principal=caller.principal)

        def check_right() -> None:
            caller.check(Right.READ, read.filter)

        async def write(page: Any) -> None:
            await context.write(page)
            self.pages_written += 1

        memory, held = ReaderMemory(self.pages, caller.principal or context.peer()), ExitStack()
        held.callback(memory.resize, 0)
        call_when_over(held.close)  # a client that takes nothing keeps its call, and a page, until its connection ends
        try:
            check_right()
            resize = held.enter_context(self.readers.admit(size, caller.principal))

            def reserve(streams: int) -> None:
                resize(size + CURSOR_BYTES * streams)

            await operation(FeedReadCall(run, self.head_poller, read, write, check_right, reserve, memory))
        except Exception as error:  # noqa: BLE001 - as above
            if isinstance(error, SubletError | ClientStalled):
                error.__traceback__ = None  # whose frames have what was read
            if not (context.cancelled() or context.done()):  # else the client has gone, and the page with it
                await _refuse(context, error)


def _decode_read(request: Any) -> feed_messages.FeedReadRequest | SubletError:
    try:
        return feed_messages.decode_read(request)
    except SubletError as error:
        return error.with_traceback(None)  # whose frames have the request


def _read_heads(
    conn: psycopg.Connection[Any], stream_ids: list[int]
) -> tuple[str | None, dict[int, message_log.HeadState]]:
    return get_timeline(conn), message_log.read_heads_or_ends(conn, stream_ids)


async def _refuse(context: Any, error: Exception) -> None:
    """Reject the call with the error, and whether and when the client may retry."""
    if isinstance(error, NodeBusy):
        hint = ((RETRY_AFTER_METADATA, str(error.retry_after_ms)),)
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error), hint)
    if isinstance(error, Unavailable | ClientStalled) and not isinstance(error, PayloadUnavailable):
        await context.abort(grpc.StatusCode.UNAVAILABLE, str(error) or "no page was taken for too long")
    if not isinstance(error, SubletError):
        log.error("feed request failed", exc_info=error)
        error = SubletError("the node failed at this request; its log says why")
    code = next(code for kind, code in _CODES if isinstance(error, kind))
    name = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == SubletError.__module__)
    await context.abort(code, str(error)[:MAX_ERROR_CHARS], ((feed_messages.ERROR_METADATA, name),))
