"""The thread that publishes through nodes: sends numbered batches and settles their deliveries.

A batch keeps its number until it is answered, so that sending it again, also to another node, stores it once. Nothing
else is sent meanwhile: order is kept by waiting.
"""

from __future__ import annotations

import threading
import uuid
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from sublet_borrower.node_client.node_calls import FailoverNodeClient, RetryableCallError
from sublet_protocol.domain.errors import SubletError, Unavailable, UnknownOutcome
from sublet_protocol.domain.topics import check_topic
from sublet_protocol.messages.feed_messages import (
    MAX_BATCH_BYTES,
    MAX_BATCH_MESSAGES,
    FeedPublishRequest,
    PublishedSpan,
    PublishResult,
    decode_published,
    encode_publish,
)
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_storage.producer.batches.pending_block import PendingArrowBatch, PendingBlock, find_entered_at
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.batches.routing_table import RoutedRows as Routed
from sublet_storage.producer.delivery import AppendedSpan, DeliveryTimeout, Doubt, Rows
from sublet_storage.producer.send_buffer import SendBuffer
from sublet_storage.util import arrow_compute as pc
from sublet_storage.util.retry import Backoff, call_with_retry

ATTEMPT_TIMEOUT_S = 15.0
MIN_ATTEMPT_S = 1.0
"""The time without an answer after which a batch is sent again, to this node or another."""

HINT = "It may be stored or not: look before you publish it again. Start a node there, or give several."

_ENVELOPE_BYTES = 64 * 1024
"""Reserved for what Arrow adds to the columns."""


class SingleRouteTable(PublisherRoutingTable):
    """A routing table with one route, in order: the node does the routing."""

    def __init__(self) -> None:
        super().__init__((), (), None)
        self._good: set[str] = set()

    def find_stream(self, topic: str, key: bytes | None) -> int:
        """Return the only route, 0. Raise `InvalidTopic`."""
        if topic not in self._good:
            check_topic(topic)
            if len(self._good) >= 10_000:
                self._good.clear()
            self._good.add(topic)
        return 0

    def check(self, batch: pa.RecordBatch) -> None:
        """Raise `InvalidTopic` for the first topic that may not be published to."""
        for topic in batch.column("topic").unique().to_pylist():
            self.find_stream(topic, None)

    def partition_rows(self, batch: pa.RecordBatch, rows: Rows) -> list[Routed]:
        """Return all rows in one part."""
        return [(0, batch, rows)]

    def get_compression(self, stream_id: int) -> str:
        """Return "none": nodes take plain batches."""
        return "none"


class NodePublishSender(threading.Thread):
    """The thread that sends until the buffer is closed and empty."""

    def __init__(self, nodes: Sequence[str], buffer: SendBuffer, delivery_timeout_s: float) -> None:
        self._producer, self._number = uuid.uuid4().hex, 0
        super().__init__(name=f"sublet feed {self._producer}", daemon=True)
        self._calls, self._buffer, self._timeout = (
            FailoverNodeClient(nodes),
            buffer,
            DeliveryTimeout(delivery_timeout_s),
        )
        self._giving_up = threading.Event()

    def run(self) -> None:
        """Take, send and settle batches; every error reaches the deliveries."""
        try:
            while (loads := self._buffer.take(self._timeout.age_spread_s)) is not None:
                for load in loads:
                    self._deliver(load)
        except Exception as error:  # noqa: BLE001 - fails the deliveries that are waited for
            self._buffer.abandon(error)
        finally:
            self._calls.close()

    def give_up(self) -> None:
        """Stop waiting for nodes: what has no answer by now fails, and what still waits is not sent."""
        self._giving_up.set()
        self._calls.close()

    def _deliver(self, load: PendingBlock) -> None:
        entered_at = find_entered_at([load])
        for batch, pieces in _split_load(load):
            try:
                for part in self._publish(batch, entered_at):
                    _complete_pieces(part, pieces)
            except SubletError as error:
                self._buffer.prepare_failure(error)
                for piece in pieces:
                    piece.ticket.fail(piece.count, error)
        self._buffer.release_batches([load])

    def _publish(self, batch: pa.RecordBatch, entered_at: float) -> tuple[PublishedSpan, ...]:
        """Return where the messages of a batch lie. Raise what is wrong with it, `Unavailable` where it was not sent,
        `UnknownOutcome` where it may be stored.
        """
        self._check_time(entered_at)
        self._number += 1
        request = encode_publish(
            FeedPublishRequest(self._producer, 1, self._number, _drop_null_buffers(batch).serialize().to_pybytes())
        )
        backoff = self._timeout.make_backoff(entered_at)
        doubt = Doubt()

        def call_node() -> PublishResult:
            doubt.begin_attempt()
            return self._call_node(request, batch.num_rows, backoff)

        def may_try_again(error: Exception) -> bool:
            if not isinstance(error, RetryableCallError) or self._giving_up.is_set():
                return False
            if not error.after_s:
                doubt.add_lost_attempt()
            self._calls.use_next_node()
            return not doubt.is_final

        try:
            answer = call_with_retry("publish", call_node, may_try_again, backoff, self._giving_up.wait)
        except RetryableCallError as error:
            self._timeout.record_timeout()
            if self._giving_up.is_set():
                raise UnknownOutcome(f"no word from {error} before the feed was closed. {HINT}") from error
            period = "days" if doubt.is_final else f"{self._timeout.timeout_s:g} s"
            raise UnknownOutcome(f"{error}. Given up after {period}. {HINT}") from error
        except SubletError as error:
            if doubt:
                raise UnknownOutcome(f"{error} An earlier attempt had no answer. {HINT}") from error
            raise
        self._timeout.record_success()
        if answer.spans is None:
            raise MalformedMessage("it is stored, but the node does not know where any more")
        return answer.spans

    def _check_time(self, entered_at: float) -> None:
        if self._giving_up.is_set():
            raise Unavailable("not sent before the feed was closed, as no time was left. Publish it again.")
        if self._timeout.is_over(entered_at):
            raise Unavailable(
                f"not sent within {self._timeout.timeout_s:g} s, as no node, {self._calls.address} the last, has "
                "answered what was published before it. Publish it again."
            )

    def _call_node(self, request: Any, count: int, backoff: Backoff) -> PublishResult:
        if self._giving_up.is_set():
            raise RetryableCallError(self._calls.address, "no time was left to send it again")
        timeout_s = min(ATTEMPT_TIMEOUT_S, max(MIN_ATTEMPT_S, backoff.left_s))
        try:
            return decode_published(self._calls.call("Publish", request, timeout_s), count)
        except ValueError as closed:  # the channel was closed under the call
            raise RetryableCallError(self._calls.address, str(closed)) from closed


def _drop_null_buffers(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Copy a slice of nothing but nulls, which may still hold what it was cut from."""
    count = batch.num_rows
    columns = [pa.nulls(count, each.type) if each.null_count == count else each for each in batch.columns]
    return pa.RecordBatch.from_arrays(columns, schema=batch.schema)


def _split_load(load: PendingBlock) -> Iterator[tuple[pa.RecordBatch, list[PendingArrowBatch]]]:
    """Yield a load as batches that a node takes, each with the pieces that its messages are of."""
    pieces = [small for piece in load.pieces for small in _split_piece(piece)]
    while pieces:
        count = _count_fitting(pieces)
        block_pieces, pieces = pieces[:count], pieces[count:]
        yield PendingBlock(load.stream_id, block_pieces).to_batch(), block_pieces


def _split_piece(piece: PendingArrowBatch) -> Iterator[PendingArrowBatch]:
    """Yield the rows in halves, until each fits into a batch."""
    if piece.count == 1 or (
        piece.batch.nbytes <= MAX_BATCH_BYTES - _ENVELOPE_BYTES and piece.count <= MAX_BATCH_MESSAGES
    ):
        yield piece
    else:
        for half in piece.split(piece.count // 2):
            yield from _split_piece(half)


def _count_fitting(pieces: Sequence[PendingArrowBatch]) -> int:
    """Return how many of them fit into one batch together, at least one."""
    size = messages = 0
    for index, piece in enumerate(pieces):
        size, messages = size + piece.batch.nbytes, messages + piece.count
        if index and (size > MAX_BATCH_BYTES - _ENVELOPE_BYTES or messages > MAX_BATCH_MESSAGES):
            return index
    return len(pieces)


def _complete_pieces(part: PublishedSpan, pieces: Iterable[PendingArrowBatch]) -> None:
    """Settle the messages of every piece that went to this stream with their offsets."""
    start = 0
    for piece in pieces:
        end = start + piece.count
        low, high = bisect_left(part.rows, start), bisect_left(part.rows, end)
        if low < high:
            rows = _pick_rows(piece.rows, part.rows[low:high], start)
            piece.ticket.complete_span(AppendedSpan(part.stream_id, part.first_offset + low, rows))
        start = end


def _pick_rows(rows: Rows, picked: Sequence[int], start: int) -> Rows:
    """Return the numbers in its ticket of the messages picked, whose numbers in the batch count from `start`."""
    if isinstance(picked, range) and isinstance(rows, range):
        return rows[picked.start - start : picked.stop - start]
    indices = pa.array([row - start for row in picked], pa.int64())
    return pc.add(indices, rows.start) if isinstance(rows, range) else rows.take(indices)
