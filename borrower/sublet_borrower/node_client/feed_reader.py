"""Reads a feed as tables of messages, over as many calls and nodes as it takes."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from types import TracebackType
from typing import Any, TypeAlias

import pyarrow as pa

from sublet_borrower.node_client.feed_cursor import FeedCursor, FeedPageAcceptance
from sublet_borrower.node_client.node_calls import (
    FailoverNodeClient,
    FeedPagePrefetcher,
    RetryableCallError,
)
from sublet_borrower.util.session_fork_guard import SessionForkGuard
from sublet_borrower.util.unfinished_work import check_has_run
from sublet_protocol.domain.errors import (
    InvalidFilter,
    PayloadUnavailable,
    PositionGone,
    SchemaMismatch,
    SubletError,
    UsageError,
)
from sublet_protocol.domain.subscriptions import Bookmark, StartingPosition
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.feed_messages import (
    HEARTBEAT_INTERVAL_S,
    FeedPage,
    FeedReadRequest,
    decode_page,
    encode_read,
)
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_storage.log.arrow_batch_decoder import InvalidRecordBatch, decode_stream
from sublet_storage.log.block_encoder import DELIVERED_SCHEMA
from sublet_storage.producer.batches.input_conversion import as_timestamp_us
from sublet_storage.util.retry import INITIAL_PAUSE_S, Backoff
from sublet_storage.util.timeouts import check_timeout

RECEIVE_TIMEOUT_S = 5 * HEARTBEAT_INTERVAL_S
"""After how long a silent node counts as lost."""

HINT = "Start a node there (`sublet leader`), correct the address, or give several nodes."

FeedStart: TypeAlias = "str | int | datetime | StartingPosition | Bookmark"


class FeedReader(Iterator[pa.Table]):
    """Tables of messages in the order of their streams, parents before children; made by `Feed`. Not thread-safe.

    When a node is lost, reading goes on from where it was, at the next node. Where no node answers for
    `node_timeout_s`, `Unavailable` is raised, and the next read tries again. What retention has taken raises
    `PositionGone` once, unless there is `on_data_loss`, which is called. It belongs to the process that made it: in a
    fork of that `read` raises `UsageError`, and `close` does nothing."""

    def __init__(
        self,
        nodes: Sequence[str],
        kind: Any,
        filter: str | TopicFilter,
        start: FeedStart,
        on_data_loss: Callable[[PositionGone], None] | None,
        node_timeout_s: float,
    ) -> None:
        if not isinstance(filter, str | TopicFilter):
            raise InvalidFilter(f"filter {ascii(filter)[:60]}: it is a text, such as orders/#.")
        self._owner = SessionForkGuard()
        self._calls, self._kind, self._node_timeout_s = FailoverNodeClient(nodes), kind, node_timeout_s
        self._filter = filter if isinstance(filter, TopicFilter) else TopicFilter.parse(filter)
        self._begin, self._on_data_loss = parse_feed_start(start), on_data_loss
        self._cursor = FeedCursor(secrets.token_hex(8))
        self._pages: FeedPagePrefetcher | None = None
        self._backoff: Backoff | None = None
        self._there_at_first: frozenset[int] = frozenset()
        self.is_finished = False
        self._find_beginning()

    @property
    def bookmark(self) -> Bookmark:
        """Return the reader's position: everything given out lies before it. As a `starting_position`, also as text,
        reading resumes there.
        """
        bookmark = self._cursor.bookmark
        assert bookmark is not None
        return bookmark

    def read(self, timeout_s: float | None = None) -> pa.Table | None:
        """Return the next table; None if the history is over (`is_finished`), or nothing has come in time. What an
        exception of a signal handler keeps from being returned, the next call returns."""
        self._owner.check("this reader")
        timeout_s = check_timeout(timeout_s)
        deadline = float("inf") if timeout_s is None else time.monotonic() + timeout_s
        self._cursor.confirm()
        try:
            return self._read_until(deadline)
        except BaseException as error:
            if not isinstance(error, SubletError):
                self._undo()
            raise

    def _read_until(self, deadline: float) -> pa.Table | None:
        while not self.is_finished:
            page = self._fetch_next(deadline)
            if page is None:
                break
            table = self._accept(page)
            if table is not None:
                return table
        return None

    def close(self) -> None:
        """End it; `bookmark` stays. In a process forked from the reader's it does nothing."""
        if self._owner.is_forked:  # whose copy of a channel never ends, as its threads are the parent's
            return
        self.is_finished = True
        self._hang_up()
        self._calls.close()

    def __del__(self) -> None:
        if sys.is_finalizing():  # no thread starts any more: it would be waited for without end
            return
        if getattr(self, "_pages", None) is not None and not self._owner.is_forked:
            self._hang_up()

    def __next__(self) -> pa.Table:
        table = self.read()
        if table is None:
            raise StopIteration
        return table

    def __enter__(self) -> FeedReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # --- pages ------------------------------------------------------------------------------------------------------

    def _find_beginning(self) -> None:
        """Wait until a node has sent where the beginning is: from then on nothing is missed."""
        try:
            while self._cursor.bookmark is None and (page := self._fetch_next(float("inf"))) is not None:
                self._accept(page)
        except BaseException:
            self.close()
            raise
        self._there_at_first = frozenset(self.bookmark.offsets)

    def _fetch_next(self, deadline: float) -> FeedPage | None:
        """Return a page; None at the deadline, or when the node has sent the last."""
        while True:
            try:
                page = self._wait(deadline)
                if page is None or page.bookmark is None:  # a call that begins sends that also before it fails
                    self._backoff = None
                return page
            except TimeoutError:
                return None
            except RetryableCallError as error:
                if not self._try_again(error, deadline):
                    return None

    def _wait(self, deadline: float) -> FeedPage | None:
        """Return a page of the call under way. Raise `TimeoutError` at the deadline, `RetryableCallError` if the call
        failed.
        """
        pages = self._pages = self._pages or self._calls.open_stream(self._make_request())
        left_s = RECEIVE_TIMEOUT_S - pages.idle_s
        try:
            wire = pages.get(max(0.0, min(left_s, deadline - time.monotonic())))
        except TimeoutError:
            if pages.idle_s < RECEIVE_TIMEOUT_S:
                raise
            raise RetryableCallError(self._calls.address, f"no word for {RECEIVE_TIMEOUT_S:g} s") from None
        except PayloadUnavailable as error:
            raise RetryableCallError(self._calls.address, str(error).rstrip(".")) from None
        except SubletError:
            self._hang_up()  # the next read asks again
            raise
        if wire is None:
            self._end()
            return None
        try:
            return decode_page(wire)
        except SubletError as error:
            raise RetryableCallError(self._calls.address, f"a page that cannot be ({error})") from error

    def _make_request(self) -> Any:
        read = FeedReadRequest(self._filter, self._cursor.bookmark or self._begin, self._cursor.new_subscription_id())
        return encode_read(read, self._kind)

    def _end(self) -> None:
        """End the reading, as the node has nothing more. Raise `RetryableCallError` if it has not sent where the
        beginning is.
        """
        if self._cursor.bookmark is None:
            raise RetryableCallError(self._calls.address, "it ended without a beginning")
        self.close()

    def _try_again(self, error: RetryableCallError, deadline: float) -> bool:
        """Wait a moment, then take the next node; return False if the deadline comes first."""
        self._hang_up()
        backoff = self._backoff = self._backoff or Backoff(total_s=self._node_timeout_s)
        pause_s = backoff.next_pause_s(error.after_s)
        if pause_s is None:
            self._backoff = None
            raise error.given_up(self._node_timeout_s, HINT)
        self._calls.use_next_node()
        left_s = deadline - time.monotonic()
        time.sleep(max(0.0, min(pause_s, left_s)))
        return pause_s < left_s

    def _undo(self) -> None:
        """Have the next read begin a call behind what was given out."""
        self._hang_up()
        self._cursor.go_back()

    def _hang_up(self) -> None:
        pages, self._pages = self._pages, None
        if pages is not None:
            pages.close()

    # --- what is in them --------------------------------------------------------------------------------------------

    def _accept(self, page: FeedPage) -> pa.Table | None:
        """Return its messages, if it is the next page and has any."""
        try:
            table = None if page.messages is None else decode_messages(page.messages)
        except MalformedMessage:
            self._hang_up()  # the next read begins there again
            raise
        match self._cursor.accept(page):
            case FeedPageAcceptance.ADVANCED if page.is_gone:
                self._handle_gone(page)
            case FeedPageAcceptance.ADVANCED:
                return table
            case FeedPageAcceptance.GAP:
                self._hang_up()
                time.sleep(INITIAL_PAUSE_S)
            case FeedPageAcceptance.HEARTBEAT | FeedPageAcceptance.STALE:
                pass
        return None

    def _handle_gone(self, page: FeedPage) -> None:
        gone = PositionGone(page.stream_id, page.start, page.oldest_offset)
        if self._on_data_loss is not None:
            self._cursor.confirm()
            check_has_run(self._on_data_loss(gone), "on_data_loss")
        elif not (
            self._begin == StartingPosition.EARLIEST and page.start == 0 and page.stream_id in self._there_at_first
        ):
            raise gone


def parse_feed_start(start: FeedStart) -> StartingPosition | Bookmark:
    """Return where to begin. Raise `UsageError`."""
    if isinstance(start, StartingPosition | Bookmark):
        return start
    if isinstance(start, datetime):
        return StartingPosition.at_time(as_timestamp_us(start))
    if isinstance(start, int) and not isinstance(start, bool):
        return StartingPosition.at_offset(start)
    if isinstance(start, str):
        return Bookmark.parse(start) if start.startswith("{") else StartingPosition.parse(start)
    raise UsageError(f"start of type {type(start).__name__}: give earliest, latest, an offset, a time or a Bookmark.")


def decode_messages(messages: bytes) -> pa.Table:
    """Return the Arrow of a page. Raise `MalformedMessage`."""
    try:
        return decode_stream(messages, DELIVERED_SCHEMA)
    except InvalidRecordBatch as error:
        raise MalformedMessage(f"a page whose Arrow cannot be read: {error}") from error
    except SchemaMismatch:
        raise MalformedMessage(
            "a page in another schema: the node is of another release of sublet. Upgrade one."
        ) from None
