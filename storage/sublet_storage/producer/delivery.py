"""The future of a published message: its offset, once durable, and its timeout."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from typing import TypeAlias

import pyarrow as pa
from msgspec import Struct

from sublet_protocol.domain.errors import UnknownOutcome
from sublet_storage.util.boottime_clock import boottime_clock
from sublet_storage.util.fork_guard import OwnerProcess
from sublet_storage.util.retry import Backoff
from sublet_storage.util.timeouts import check_timeout

Rows: TypeAlias = range | pa.Array
"""Which messages of a ticket: a range of their numbers, or an Arrow array of them."""

AGE_SPREAD_S = 1.0
"""While the database fails, only messages published within this time are sent together."""

MAX_DOUBT_S = 6 * 86400.0
"""For how long what may be stored is sent again: the server recognises a retry for a day more."""


def wake_loop(loop: asyncio.AbstractEventLoop, wake: Callable[[], object]) -> None:
    """Wake the waiters on a loop; none where it is closed, as they are gone with it."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(wake)


class Position(Struct, frozen=True):
    """The position of one message."""

    stream: int
    offset: int


class AppendedSpan(Struct, frozen=True):
    """The positions of some messages of a batch: number `rows[i]` is at `first_offset + i` of the stream."""

    stream: int
    first_offset: int
    rows: Rows

    def offset_of(self, row: int) -> int | None:
        """Return the offset of the message of that number; None if it is not in this span."""
        if isinstance(self.rows, range):
            index = row - self.rows.start if row in self.rows else -1
        else:
            index = self.rows.index(row).as_py()
        return None if index < 0 else self.first_offset + index


class SharedPublishResult:
    """The common state of messages published together: settled when each of them is durable or has failed."""

    __slots__ = ("_callbacks", "_error", "_lock", "_pending_count", "_process", "_spans", "entered", "entered_at")

    def __init__(self, count: int) -> None:
        self._lock = threading.Lock()
        self._pending_count = count
        self._spans: list[AppendedSpan] = []
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] = []
        self._process = os.getpid()
        self.entered = 0  # how many of a batch have been queued, which is done part by part
        self.entered_at = time.monotonic()  # of a batch, when its last part was queued before any had failed

    @property
    def stored_count(self) -> int:
        """Return the number of messages that are known to be durable."""
        return sum(len(span.rows) for span in self._spans)

    def expect(self, count: int) -> None:
        """Set the number of messages, while none is sent."""
        self._pending_count = count

    @property
    def is_done(self) -> bool:
        """Return whether all messages are settled."""
        return self._pending_count == 0

    @property
    def pending_count(self) -> int:
        """Return the number of messages that are not settled."""
        return self._pending_count

    def complete_span(self, span: AppendedSpan) -> None:
        """Settle messages that are durable."""
        self._settle(len(span.rows), span, None)

    def complete_empty(self) -> None:
        """Settle everything without positions in the log."""
        self._settle(None, None, None)

    def fail(self, count: int, error: Exception) -> None:
        """Settle messages that will not be published, or of which it is unknown whether they were."""
        self._settle(count, None, error)

    def abandon(self, error: Exception) -> None:
        """Settle everything that is pending with this error."""
        self._settle(None, None, error)

    def wait(self, timeout_s: float | None) -> tuple[AppendedSpan, ...]:
        """Wait until settled; return the spans, or raise the `error`. Raise TimeoutError."""
        self.wait_until_settled(timeout_s)
        return self.outcome()

    def wait_until_settled(self, timeout_s: float | None) -> None:
        """Wait until settled, whatever the outcome. Raise TimeoutError."""
        if not self.is_settled_within(check_timeout(timeout_s)):
            raise TimeoutError(f"not durable after {timeout_s} s; it is still being tried")

    def is_settled_within(self, timeout_s: float | None) -> bool:
        """Return whether it is settled, at the latest when the time is over. The wait is for a bare lock: what a signal
        handler raises breaks nothing then."""
        done = threading.Lock()
        done.acquire()
        self.add_done_callback(done.release)
        try:
            return done.acquire(timeout=-1 if timeout_s is None else min(max(timeout_s, 0), threading.TIMEOUT_MAX))
        finally:
            with self._lock, contextlib.suppress(ValueError):
                self._callbacks.remove(done.release)

    def outcome(self) -> tuple[AppendedSpan, ...]:
        """Return the spans of a settled ticket; raises its error."""
        if self._error is not None:
            raise self._error
        return self.spans

    @property
    def spans(self) -> tuple[AppendedSpan, ...]:
        """Return the positions of the messages that are known to be durable."""
        return tuple(self._spans)

    @property
    def error(self) -> Exception | None:
        """Return the first failure so far, or the last one after which messages may be stored or not."""
        return self._error

    def add_done_callback(self, callback: Callable[[], None]) -> None:
        """Call back once, from the publisher's thread, or at once if it is settled already."""
        self._check_process()
        with self._lock:
            if self._pending_count:
                self._callbacks.append(callback)
                return
        callback()

    def _check_process(self) -> None:
        """Raise `UsageError` in a process where nothing will ever settle it."""
        if self._pending_count:
            OwnerProcess(self._process).check("this delivery", "Wait for it in the process that published.")

    def _settle(self, count: int | None, span: AppendedSpan | None, error: Exception | None) -> None:
        """Settle `count` more messages; None: all."""
        with self._lock:
            if span is not None:
                self._spans.append(span)
            if not self._pending_count:
                return
            self._error = error if isinstance(error, UnknownOutcome) else self._error or error
            self._pending_count -= self._pending_count if count is None else count
            if self._pending_count:
                return
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()


class _DeliveryBase:
    """The common base of Delivery and BatchDelivery."""

    __slots__ = ("_ticket",)

    def __init__(self, ticket: SharedPublishResult) -> None:
        self._ticket = ticket

    @property
    def is_done(self) -> bool:
        """Return whether the outcome is known."""
        return self._ticket.is_done

    def _make_loop_future(self) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def wake() -> None:
            if not future.done():
                future.set_result(None)

        self._ticket.add_done_callback(partial(wake_loop, loop, wake))
        return future


class Delivery(_DeliveryBase):
    """The delivery of one message: `result()` or `await` returns its position once it is durable, or raises."""

    __slots__ = ("_row",)

    def __init__(self, ticket: SharedPublishResult, row: int) -> None:
        super().__init__(ticket)
        self._row = row

    def result(self, timeout_s: float | None = None) -> Position:
        """Wait for the position and return it. Raise what went wrong, or TimeoutError while it is still being tried."""
        self._ticket.wait_until_settled(timeout_s)
        return self._find_position()

    def __await__(self) -> Generator[None, None, Position]:
        yield from self._make_loop_future()
        return self._find_position()

    def _find_position(self) -> Position:
        for span in self._ticket.spans:
            offset = span.offset_of(self._row)
            if offset is not None:
                return Position(span.stream, offset)
        raise self._ticket.error or AssertionError(f"message {self._row} is in none of {self._ticket.spans}")


class BatchDelivery(_DeliveryBase):
    """The delivery of a batch: `result()` or `await` returns the spans of its messages once all are durable."""

    __slots__ = ()

    @property
    def error(self) -> Exception | None:
        """Return what went wrong so far: the first failure, or one after which messages may be stored or not."""
        return self._ticket.error

    @property
    def stored_count(self) -> int:
        """Return the number of messages that are known to be durable by now."""
        return self._ticket.stored_count

    def result(self, timeout_s: float | None = None) -> tuple[AppendedSpan, ...]:
        """Wait for the spans and return them. Raise what went wrong, or TimeoutError while it is still being tried."""
        return self._ticket.wait(timeout_s)

    def __await__(self) -> Generator[None, None, tuple[AppendedSpan, ...]]:
        yield from self._make_loop_future()
        return self._ticket.outcome()


class Doubt:
    """Whether an attempt had no answer, so that what it sent may be stored, and since when."""

    def __init__(self) -> None:
        self._attempted_at, self._since = boottime_clock(), math.inf

    def begin_attempt(self) -> None:
        """Record the time, by a clock that goes on while the machine sleeps. Raise `UnknownOutcome` where it may not be
        sent again."""
        if self.is_final:
            raise UnknownOutcome("it was sent days ago.")
        self._attempted_at = boottime_clock()

    def add_lost_attempt(self) -> None:
        """Record that the attempt had no answer."""
        self._since = min(self._since, self._attempted_at)

    def __bool__(self) -> bool:
        return self._since < math.inf

    @property
    def is_final(self) -> bool:
        """Return whether it may not be sent again: it could be stored twice."""
        return boottime_clock() > self._since + MAX_DOUBT_S


class DeliveryTimeout:
    """The timeout of deliveries, `timeout_s` after a message was handed over: what waits behind others that fail is
    tried for no longer than they are. For one thread."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._failed_at = -math.inf

    def make_backoff(self, entered_at: float) -> Backoff:
        """Return the pauses between attempts to store what was handed over at that time."""
        return Backoff(total_s=entered_at + self.timeout_s - time.monotonic())

    def is_over(self, entered_at: float) -> bool:
        """Return whether the message is not even to be sent: its time is over, and others failed while it waited. While
        others are answered it is tried once, however long it had to wait for its turn."""
        return entered_at < self._failed_at and entered_at + self.timeout_s <= time.monotonic()

    def record_timeout(self) -> None:
        """Record that something was not stored in its time."""
        self._failed_at = time.monotonic()

    def record_success(self) -> None:
        """Record that something was answered."""
        self._failed_at = -math.inf

    @property
    def age_spread_s(self) -> float:
        """Return within how long the messages that are sent together were handed over, as they fail together, when the
        oldest has to."""
        return math.inf if self._failed_at == -math.inf else AGE_SPREAD_S
