"""The thread that appends blocks, retries after lost connections, and settles deliveries.

A load keeps its sequence until it is settled, so that sending it again after a lost connection stores it once. Nothing
else is taken meanwhile: order is kept by waiting. A message that comes while the thread has nothing to do is sent by
its publisher's thread, so that it need not wait for another to wake; the answer is received by the sender's.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psycopg

from sublet_protocol.domain.epoch_frontiers import Epoch
from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    ProducerFenced,
    PublisherClosed,
    SubletError,
    Unavailable,
    UnknownOutcome,
    format_error,
)
from sublet_storage.db.bounded_connection import BoundedConnection, has_gone_over
from sublet_storage.db.connect import connect
from sublet_storage.db.reconnecting_connection import ReconnectingConnection
from sublet_storage.log import epoch_leases
from sublet_storage.log.append import (
    UNNAMED,
    AppendOutcome,
    AppendResult,
    BlockAppend,
    ProducerIdentity,
    ProducerStamp,
    SingleAppender,
    append,
    producer_fenced_error,
    register_again,
)
from sublet_storage.notify.drivers.postgres import NOTIFY_HEAD, encode_head_parameters
from sublet_storage.notify.publisher import shared_publisher
from sublet_storage.producer.batches.pending_block import PendingBlock, find_entered_at
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.delivery import DeliveryTimeout, Doubt
from sublet_storage.producer.send_buffer import SendBuffer
from sublet_storage.util.retry import Backoff, call_with_retry

LOCK_TIMEOUT_S = 10.0
TRANSACTION_TIMEOUT_S = 30.0
"""A publisher that freezes while it sends keeps the others from its streams for no longer than this."""

ATTEMPT_TIMEOUT_S = 45.0
MIN_ATTEMPT_S = 5.0
"""A server without an answer for this long is treated as lost; the second applies if less time is left for retries."""

Retryable = (Unavailable, psycopg.OperationalError)
"""Nothing is wrong with the request: connection lost or refused, lock not to be had, deadlock, server restarting."""


_REFUSALS: dict[AppendOutcome, Callable[[str], SubletError]] = {
    AppendOutcome.COMPLETED: epoch_leases.epoch_completed_error,
    AppendOutcome.EXPIRED: epoch_leases.capability_expired_error,
}
"""What comes of loads that were not stored while the others were."""

Advance = Callable[[psycopg.Connection[Any], Sequence[BlockAppend], Sequence[Epoch]], epoch_leases.EpochAdvanceResult]

_T = TypeVar("_T")


class Sender(threading.Thread):
    """A thread that runs until the buffer is closed and empty, or the producer is fenced.

    `advance`: what moves the producer on to other epochs in a transaction, if all of these blocks are stored in it.
    `timeline`: of the database, when the buffer's routes were read and the producer was registered.
    """

    def __init__(
        self,
        url: str,
        buffer: SendBuffer,
        producer: ProducerIdentity,
        space: str | None,
        delivery_timeout_s: float,
        advance: Advance | None = None,
        timeline: str | None = None,
    ) -> None:
        super().__init__(name=f"sublet publisher {producer.producer_id}", daemon=True)
        self._url, self._buffer, self._producer, self._space = url, buffer, producer, space
        self._timeout, self._advance = DeliveryTimeout(delivery_timeout_s), advance
        self._attempt_timeout_s = ATTEMPT_TIMEOUT_S
        self._reconnecting = ReconnectingConnection(self._connect)
        self._timeline = timeline
        self._sequences: defaultdict[int, int] = defaultdict(int)
        self._appender: SingleAppender | None = None
        self._unanswered: BlockAppend | None = None
        self._giving_up = threading.Event()
        self._notifier = shared_publisher(url)
        buffer.sender = self

    def run(self) -> None:
        """Take, send, settle; every error is passed to the deliveries."""
        try:
            while (loads := self._buffer.take(self._timeout.age_spread_s)) is not None:
                if loads or not self._buffer.needs_routes:
                    self._deliver(loads)
                if self._buffer.needs_routes:  # only now: what was taken before would come behind what is moved
                    self._buffer.needs_routes = False
                    self._reroute([])
        except Exception as error:  # noqa: BLE001 - it fails the deliveries that are waited for
            self._buffer.abandon(error)
        finally:
            # A caller in the middle of a batch when it was closed, and one that waits behind it, gets an error.
            self._buffer.abandon(PublisherClosed("this publisher was closed before it was stored."))
            self._reconnecting.close()

    def give_up(self) -> None:
        """Wait for the database no longer: what has no answer by now fails, and what still waits is not sent."""
        self._giving_up.set()
        self._reconnecting.stop_waiting()

    @property
    def is_ready(self) -> bool:
        """Return whether a caller may send a block while this thread is idle."""
        conn, appender = self._reconnecting.current, self._appender
        if conn is None or appender is None or self._giving_up.is_set():
            return False
        return appender.conn is conn and appender.is_ready

    def send_at_once(self, load: PendingBlock) -> None:
        """Send it on the caller's thread while this one is idle. An exception of a signal handler may end it anywhere;
        what is `_unanswered` by then, this thread appends, or receives the answer to."""
        self._unanswered = self._stamp(load)
        if self._appender is not None:
            with contextlib.suppress(psycopg.Error):
                self._send_announced(self._appender, self._unanswered)

    def _deliver(self, loads: list[PendingBlock]) -> None:
        entered_at, sent = find_entered_at(loads), self._unanswered
        try:
            if sent is None and self._timeout.is_over(entered_at):
                raise DatabaseUnreachable(
                    f"not sent within {self._timeout.timeout_s:g} s, as the database has not answered what was "
                    "published before it. Publish it again."
                )
            appends = [self._count(sent or self._stamp(load)) for load in loads]
            epochs = None if sent else self._buffer.due_advance(loads)
            answers = self._append_blocks(appends, epochs, entered_at)
        except SubletError as error:
            self._unanswered = None
            self._buffer.fail_batches(loads, error)
            if isinstance(error, ProducerFenced):
                raise
            return
        heads, appender = _find_heads(loads, answers), self._appender
        is_announced = appender is not None and appender.has_follow_up
        if not is_announced:
            self._notifier.publish_heads(heads)
        for load, first_offset in _find_first_offsets(loads, answers):
            load.complete(first_offset)
        outcomes: dict[AppendOutcome, list[PendingBlock]] = {outcome: [] for outcome in AppendOutcome}
        for load, answer in zip(loads, answers, strict=True):
            outcomes[answer.outcome].append(load)
        self._buffer.release_batches(outcomes[AppendOutcome.APPENDED] + outcomes[AppendOutcome.DUPLICATE])
        if appender is not None and is_announced and not appender.finish():
            self._notifier.publish_heads(heads)
        self._handle_refused(outcomes)

    def _handle_refused(self, outcomes: dict[AppendOutcome, list[PendingBlock]]) -> None:
        for outcome, refusal in _REFUSALS.items():
            if outcomes[outcome]:
                self._buffer.fail_batches(outcomes[outcome], refusal(self._producer.producer_id))
        if outcomes[AppendOutcome.CLOSED]:
            self._reroute(outcomes[AppendOutcome.CLOSED])
        if outcomes[AppendOutcome.FENCED]:
            self._stop_fenced(outcomes[AppendOutcome.FENCED])

    def _stamp(self, load: PendingBlock) -> BlockAppend:
        """Return the append with the next sequence of its stream, which is not counted yet."""
        block = load.pack(self._buffer.routes.get_compression(load.stream_id))
        sequence = self._sequences[load.stream_id] + 1
        stamp = ProducerStamp(self._producer.producer_id, self._producer.incarnation, sequence)
        return BlockAppend(load.stream_id, block, stamp)

    def _count(self, append: BlockAppend) -> BlockAppend:
        self._sequences[append.stream_id] += 1
        return append

    def _append_blocks(
        self, appends: list[BlockAppend], epochs: Sequence[Epoch] | None, entered_at: float
    ) -> list[AppendResult]:
        if epochs is None:
            return self._call_with_retry(lambda conn: self._append(conn, appends), entered_at)
        assert self._advance is not None, "who publishes without epochs queues no advance"
        advance = self._advance
        result = self._call_with_retry(lambda conn: advance(conn, appends, epochs), entered_at)
        if result.error is not None:
            self._buffer.fail_batches([], result.error)
        elif result.change is not None:
            self._buffer.complete_advance(epochs)
        return result.results

    def _append(self, conn: BoundedConnection, appends: list[BlockAppend]) -> list[AppendResult]:
        if len(appends) > 1:
            return append(conn, appends)
        if self._appender is None or self._appender.conn is not conn:
            self._appender = SingleAppender(conn, NOTIFY_HEAD)
        if self._appender.is_ready:
            self._appender.send(appends[0])
        return [self._appender.receive()]

    def _send_announced(self, appender: SingleAppender, append: BlockAppend) -> None:
        """Send it, and behind it the announcement that its stream has grown, where that reaches all who listen."""
        is_followed = self._notifier.may_announce
        appender.send(append, is_followed=is_followed)
        if is_followed and (announcement := self._notifier.announce_head(append.stream_id)) is not None:
            appender.send_follow_up(encode_head_parameters(*announcement, append.stream_id))

    def _stop_fenced(self, loads: list[PendingBlock]) -> None:
        error = producer_fenced_error(self._producer.producer_id, self._producer.incarnation)
        self._buffer.fail_batches(loads, error)
        raise error

    def _reroute(self, closed: list[PendingBlock]) -> None:
        """Route what closed streams refused, and all that waits for closed streams, to their children."""
        try:
            routes = self._call_with_retry(
                lambda conn: PublisherRoutingTable.load(conn, self._space), find_entered_at(closed)
            )
        except SubletError as error:
            if closed:
                self._buffer.fail_batches(closed, error)
            if isinstance(error, ProducerFenced):
                raise
            return
        self._buffer.reroute(routes, closed)

    def _call_with_retry(self, attempt: Callable[[BoundedConnection], _T], entered_at: float) -> _T:
        """Call until there is an answer, over as many connections as it takes, for `delivery_timeout_s` at most since
        the messages were handed over; once at least.

        Raise `Unavailable` when the time is up, `SubletError` for what no retry can mend.
        """
        backoff = self._timeout.make_backoff(entered_at)
        doubt = Doubt()

        def send(conn: BoundedConnection) -> _T:
            doubt.begin_attempt()
            return attempt(conn)

        def may_try_again(error: Exception) -> bool:
            if isinstance(error, UnknownOutcome) or self._unanswered is not None:
                doubt.add_lost_attempt()
            return isinstance(error, Retryable) and not self._giving_up.is_set() and not doubt.is_final

        try:
            answer = call_with_retry(
                "publish", lambda: self._try_once(send, backoff), may_try_again, backoff, self._giving_up.wait
            )
        except Retryable as error:
            self._timeout.record_timeout()
            raise self._delivery_timeout_error(error, doubt) from error
        except psycopg.Error as error:
            raise SubletError(f"the database refuses to store it: {format_error(error)}") from error
        self._timeout.record_success()
        return answer

    def _try_once(self, attempt: Callable[[BoundedConnection], _T], backoff: Backoff) -> _T:
        """Make one attempt, which ends in time also if the server is frozen."""
        self._check_time()
        self._attempt_timeout_s = min(ATTEMPT_TIMEOUT_S, max(MIN_ATTEMPT_S, backoff.left_s))
        if self._unanswered is not None:
            self._reconnecting.expect_answer()
        with self._reconnecting as conn:
            conn.receive_timeout_s = self._attempt_timeout_s
            self._check_time()  # again: from here on `give_up` ends the waiting
            self._unanswered = None
            if conn.timeline != self._timeline:
                self._follow_timeline(conn)
            return attempt(conn)

    def _check_time(self) -> None:
        if self._giving_up.is_set():
            raise (UnknownOutcome if self._unanswered else DatabaseUnreachable)("there was no time left to send it.")

    def _delivery_timeout_error(self, error: Exception, doubt: Doubt) -> Unavailable:
        period = "for days" if doubt.is_final else f"within {self._timeout.timeout_s:g} s"
        detail = format_error(error) + "."
        if self._giving_up.is_set():
            period = "before the publisher was closed"
            if isinstance(error, (psycopg.OperationalError, UnknownOutcome)):
                detail = "it had not answered yet."
        message = f"no word from the database {period} that it is stored, and given up: {detail}"
        if doubt:
            return UnknownOutcome(f"{message} It may be stored or not: look before you publish it again.")
        return DatabaseUnreachable(f"{message} Publish it again.")

    def _connect(self) -> BoundedConnection:
        return connect(
            self._url,
            application_name="sublet publisher",
            lock_timeout_s=LOCK_TIMEOUT_S,
            transaction_timeout_s=TRANSACTION_TIMEOUT_S,
            receive_timeout_s=self._attempt_timeout_s,
        )

    def _follow_timeline(self, conn: BoundedConnection) -> None:
        if has_gone_over(conn, self._timeline):
            follow_timeline(conn, self._buffer.routes, self._producer)
        self._timeline = conn.timeline or self._timeline


def follow_timeline(conn: psycopg.Connection[Any], routes: PublisherRoutingTable, producer: ProducerIdentity) -> None:
    """Check the routes on another timeline of the database, and register the producer again if it is named. Raise
    `ProducerFenced`."""
    routes.check_timeline(conn, producer.producer_id)
    if producer.incarnation > UNNAMED:
        register_again(conn, producer)


def _find_heads(loads: list[PendingBlock], answers: list[AppendResult]) -> dict[int, int]:
    """Return {stream: head} of those that have grown; the last block of a stream comes last."""
    grown = {
        load.stream_id: answer.end_offset
        for load, answer in zip(loads, answers, strict=True)
        if answer.outcome is AppendOutcome.APPENDED
    }
    return {stream_id: head for stream_id, head in grown.items() if head is not None}


def _find_first_offsets(loads: list[PendingBlock], answers: list[AppendResult]) -> list[tuple[PendingBlock, int]]:
    """Return the first offset of each stored load. The log stores the end of a producer's last block only; those before
    it in the same transaction lie right before it, because their stream was locked."""
    stored: list[tuple[PendingBlock, int]] = []
    starts: dict[int, int] = {}
    for load, answer in zip(reversed(loads), reversed(answers), strict=True):
        if answer.outcome in (AppendOutcome.APPENDED, AppendOutcome.DUPLICATE):
            end = starts[load.stream_id] if answer.end_offset is None else answer.end_offset
            starts[load.stream_id] = end - load.count
            stored.append((load, end - load.count))
    return stored[::-1]
