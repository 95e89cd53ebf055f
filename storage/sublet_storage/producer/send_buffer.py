"""The queues of pending messages per stream, bounded in bytes.

Advances to other epochs wait among them, each for all that was published before it.

Routing happens under the buffer's lock, so that while a closed stream's messages are moved to its children no newer
message of the same key can get ahead of them.

A signal handler may raise at any point of a caller's call. The message, or the part of a batch, that it interrupts is
entered completely or not at all; and a caller waits on a bare lock of its own, since a `Condition` that is torn out of
its wait may release what another thread holds.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import pyarrow as pa
from msgspec import Struct

from sublet_protocol.domain.epoch_frontiers import Epoch
from sublet_protocol.domain.errors import PublisherClosed, SubletError
from sublet_storage.log.block_encoder import MAX_PACKED_BYTES, pack
from sublet_storage.producer.batches.fast_small_block_packer import Header, Message
from sublet_storage.producer.batches.input_conversion import size_of
from sublet_storage.producer.batches.pending_block import (
    BlockSender,
    PendingArrowBatch,
    PendingBlock,
    PendingMessageBatch,
    count_fitting,
    count_packable,
    split_into_blocks,
)
from sublet_storage.producer.batches.piece_routing import reroute_piece, route_piece
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.batches.unsettled_results import UnsettledResults
from sublet_storage.producer.delivery import AGE_SPREAD_S, BatchDelivery, Delivery, SharedPublishResult
from sublet_storage.util.reentry import check_reentry
from sublet_storage.util.timeouts import check_timeout

COMMIT_BYTES = 4 * 1024 * 1024
MAX_ROUTED_ROWS = 1 << 16
MAX_SENT_AT_ONCE = 64 * 1024
"""Bytes of a message that its publisher's thread may send: a large one is first converted by Arrow."""
ADVANCE_PAUSE_S = 0.02
"""Minimum time between advances under load that no caller waits for: each takes as much of the database as a block."""


class BufferLimits(Struct):
    """The limits of a block and of the buffer, and how long a message may wait for others."""

    block_messages: int
    block_bytes: int
    blocks_per_commit: int
    buffered_bytes: int
    linger_s: float


class SendBuffer:
    """Queues that callers fill and the sender empties, settles and re-routes; any thread may call any method."""

    def __init__(self, routes: PublisherRoutingTable, limits: BufferLimits) -> None:
        self._routes, self._limits = routes, limits
        self._lock = threading.RLock()  # entered once at a time: see `check_reentry`
        self._work = threading.Condition(self._lock)  # the sender's alone
        self._queues: dict[int, deque[PendingArrowBatch | PendingMessageBatch]] = {}
        self.sender: BlockSender | None = None
        self._is_sender_idle = False
        self._taken_count = 1
        self._sent: PendingBlock | None = None  # what a caller has sent, or has tried to
        self._unsettled = UnsettledResults()
        self._waiting_for_room: dict[Callable[[], None], None] = {}
        self._bytes = 0
        self.queued_count = 0
        """Messages that were not taken yet."""
        self._oldest_at = 0.0
        self._advanced_at = float("-inf")
        self.needs_routes = False
        self._closed: Exception | None = None
        self._error: Exception | None = None

    # --- callers --------------------------------------------------------------------------------------------------

    def add(
        self,
        topic: str,
        key: bytes | None,
        value: bytes | None,
        headers: list[Header] | None,
        timestamp_us: int,
        epoch: Epoch | None = None,
        wait: bool = True,
    ) -> Delivery | None:
        """Queue one message, or have `sender` send it if nothing else is under way; waits for room, or returns None at
        once if it is not to wait."""
        check_reentry(self._lock)
        message, size = (topic, key, value, headers, timestamp_us, epoch), size_of(topic, key, value, headers)
        while True:
            with self._lock:
                if self._has_room():
                    stream_id = self._routes.find_stream(topic, key)
                    if self.sender is not None and self._is_alone(size) and self.sender.is_ready:
                        return self._send(self.sender, stream_id, message, size)
                    growing = self._add_to_last(stream_id, message, size)
                    return Delivery(growing.ticket, growing.count - 1)
                if not wait:
                    return None
                room = self._make_room_lock()
            room.acquire()

    def add_batches(self, batches: Iterable[pa.RecordBatch]) -> BatchDelivery:
        """Queue batches, part by part as there is room."""
        check_reentry(self._lock)
        batches = list(batches)
        total = sum(batch.num_rows for batch in batches)
        ticket = SharedPublishResult(total)
        start = 0
        try:
            for batch in batches:
                for offset in range(0, batch.num_rows, MAX_ROUTED_ROWS):
                    chunk = batch.slice(offset, MAX_ROUTED_ROWS)
                    self._add_chunk(PendingArrowBatch(chunk, range(start, start + chunk.num_rows), ticket))
                    start += chunk.num_rows
        except BaseException:
            ticket.fail(total - ticket.entered, SubletError("not all of the batch was accepted."))
            with self._lock:
                if ticket.is_done:
                    self._unsettled.remove(ticket)
                self._work.notify_all()  # an advance may have waited for it alone
            raise
        return BatchDelivery(ticket)

    def advance(self, epochs: Sequence[Epoch]) -> SharedPublishResult:
        """Queue an advance to these epochs, behind all that is queued. If something fails first, it is given up; if
        something has failed and was not raised yet, that is raised."""
        check_reentry(self._lock)
        with self._lock:
            self.check_open()
            if (error := self.pop_error()) is not None:
                raise error
            ticket = self._unsettled.add_advance(epochs)
            try:
                if not self.queued_count:
                    self._work.notify_all()
            except BaseException:
                self._unsettled.remove_advance(ticket)
                raise
            return ticket

    def add_room_callback(self, callback: Callable[[], None]) -> None:
        """Call back once, soon, when there may be room; for callers that must not block."""
        with self._lock:
            if self._bytes >= self._limits.buffered_bytes and self._closed is None:
                self._waiting_for_room[callback] = None
                return
        callback()

    def remove_room_callback(self, callback: Callable[[], None]) -> None:
        """Do not call back any more: whoever waited is gone."""
        with self._lock:
            self._waiting_for_room.pop(callback, None)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all that is queued now is settled. Raise TimeoutError."""
        check_reentry(self._lock)
        timeout_s = check_timeout(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            tickets = self._unsettled.flush()
            self._work.notify_all()
        for ticket in tickets:
            if not ticket.is_settled_within(None if deadline is None else deadline - time.monotonic()):
                raise TimeoutError("not everything was durable in time; it is still being tried")

    def pop_error(self) -> Exception | None:
        """Return the first failure since the last call."""
        with self._lock:
            error, self._error = self._error, None
            return error

    def check_open(self) -> None:
        """Raise `PublisherClosed` where nothing more is taken."""
        if self._closed is not None:
            raise PublisherClosed(f"{self._closed} Make a new Publisher.") from self._closed

    def request_routes(self) -> None:
        """Have the sender read the routes anew, unless they are new."""
        check_reentry(self._lock)
        with self._lock:
            self.needs_routes = self.needs_routes or (self._closed is None and self._routes.may_be_outdated)
            self._work.notify_all()

    def close(self, reason: Exception) -> None:
        """Take nothing more; what is queued can still be taken out."""
        check_reentry(self._lock)
        with self._lock:
            self._closed, self.needs_routes = self._closed or reason, False
            self._work.notify_all()
        self.release_batches([])

    # --- the sender -----------------------------------------------------------------------------------------------

    @property
    def routes(self) -> PublisherRoutingTable:
        """Return the table in force."""
        return self._routes

    def take(self, age_spread_s: float = math.inf) -> list[PendingBlock] | None:
        """Wait for work; return as much as goes into one transaction, an empty list for advances alone or where routes
        are needed, or None once the buffer is closed and empty. What is taken was handed over within `age_spread_s` of
        the oldest that is first in a queue. A block that a caller has sent comes alone."""
        with self._lock:
            self._is_sender_idle = self._taken_count == 1 and not self.queued_count  # else more come together
            self._wait_for_work()
            self._is_sender_idle, self._taken_count = False, 1
            if self._sent is not None:
                sent, self._sent = self._sent, None
                return [sent]
            if not self.queued_count:
                return [] if self.needs_routes or self._unsettled.find_due_advance(()) is not None else None
            newest_at = min(queue[0].ticket.entered_at for queue in self._queues.values()) + age_spread_s
            loads: list[PendingBlock] = []
            for stream_id in list(self._queues):
                if sum(load.size for load in loads) >= COMMIT_BYTES:
                    break
                loads += self._cut_blocks(stream_id, newest_at)
            self._taken_count = sum(load.count for load in loads)
            return loads

    def due_advance(self, loads: Sequence[PendingBlock]) -> Sequence[Epoch] | None:
        """Return where to advance to once these loads, which were taken, are stored: of several that are due, the last.
        None also where it can wait, as more is sent at once; an advance that was taken alone does not wait."""
        with self._lock:
            is_early = bool(loads) and time.monotonic() < self._advanced_at + ADVANCE_PAUSE_S
            if is_early and self.queued_count and self._pause() <= 0 and not self._unsettled.is_flushing:
                return None
            return self._unsettled.find_due_advance(loads)

    def complete_advance(self, epochs: Sequence[Epoch]) -> None:
        """Complete the advances that were due."""
        with self._lock:
            self._advanced_at = time.monotonic()
            self._unsettled.complete_advance(epochs)

    def prepare_failure(self, error: Exception) -> None:
        """Record it before tickets fail: a caller woken by one reads the first failure at once."""
        with self._lock:
            self._error = self._error or error

    def fail_batches(self, loads: Sequence[PendingBlock], error: Exception) -> None:
        """Fail these loads' tickets, and settle them. The advances behind them are given up; without loads all are: it
        is an advance that cannot be made."""
        self.prepare_failure(error)
        for load in loads:
            load.fail(error)
        self.release_batches(loads, error)

    def release_batches(self, loads: Sequence[PendingBlock], error: Exception | None = None) -> None:
        """Remove settled loads, and let callers in that wait for room. `error`: give up the advances behind them."""
        with self._lock:
            if error is not None:
                self._unsettled.fail_advances(error, {piece.ticket for load in loads for piece in load.pieces})
            for load in loads:
                self._bytes -= load.size
                for piece in load.pieces:
                    if piece.ticket.is_done:
                        self._unsettled.remove(piece.ticket)
            callbacks, self._waiting_for_room = self._waiting_for_room, {}
        for callback in callbacks:
            callback()

    def reroute(self, routes: PublisherRoutingTable, closed: list[PendingBlock]) -> None:
        """Put a newer table in force; move what was for closed streams, first the loads they refused, in order. What it
        has no stream for fails, and epochs whose topic is another space's."""
        unroutable: list[tuple[PendingBlock, SubletError]] = []
        with self._lock:
            self._routes, anywhere = routes, routes.without_space_limit()
            refused: dict[int, list[PendingArrowBatch]] = {}
            for load in closed:
                refused.setdefault(load.stream_id, []).extend(load.pieces)
            dead = [stream_id for stream_id in self._queues if not routes.is_open(stream_id)]
            for stream_id in dict.fromkeys([*refused, *dead]):
                waiting = [piece.seal() for piece in self._queues.pop(stream_id, ())]
                self.queued_count -= sum(piece.count for piece in waiting)
                for piece in [*refused.get(stream_id, ()), *waiting]:
                    parts, failed = reroute_piece(routes, anywhere, piece)
                    self._bytes += sum(part.size for part, _ in failed) - piece.size
                    unroutable += [(PendingBlock(stream_id, [part]), error) for part, error in failed]
                    self._enqueue(parts)
        for load, reason in unroutable:
            self.fail_batches([load], reason)

    def abandon(self, error: Exception) -> None:
        """Close, and fail everything that is not settled."""
        self.close(error)
        with self._lock:
            tickets = self._unsettled.clear()
            self._queues.clear()
            self.queued_count = self._bytes = 0
            if tickets:
                self._error = self._error or error
        for ticket in tickets:
            ticket.abandon(error)

    # --- under the lock -------------------------------------------------------------------------------------------

    def _wait_for_work(self) -> None:
        """Wait until a block was sent, messages have lingered, an advance or routes are due, or it is closed."""
        while self._sent is None and not self.needs_routes:
            pause = self._pause() if self.queued_count else None
            if pause is None and (self._closed is not None or self._unsettled.find_due_advance(()) is not None):
                return
            if pause is not None and pause <= 0:
                return
            self._work.wait(pause)

    def _is_alone(self, size: int) -> bool:
        """Return whether a message that comes now, and is small, waits for nothing else, and the sender for it."""
        has_others = bool(self.queued_count) or self._unsettled.has_advances
        return self._is_sender_idle and size <= MAX_SENT_AT_ONCE and not (has_others or self._limits.linger_s)

    def _send(self, sender: BlockSender, stream_id: int, message: Message, size: int) -> Delivery:
        """Send one message on the caller's thread. If that is interrupted, the sender sees how far it got: it is woken
        first, as nothing else would do it then."""
        piece = PendingMessageBatch()
        piece.add(message, size)
        load, previous_bytes = PendingBlock(stream_id, [piece.seal()]), self._bytes
        try:
            self._unsettled.add(piece.ticket)
            self._bytes += size
            self._work.notify_all()
            self._is_sender_idle, self._sent = False, load
        except BaseException:
            self._bytes = previous_bytes
            self._unsettled.remove(piece.ticket)
            raise
        sender.send_at_once(load)
        return Delivery(piece.ticket, 0)

    def _add_chunk(self, chunk: PendingArrowBatch) -> None:
        """Route and encode outside of the lock, which keeps the sender going; again if the routes changed meanwhile."""
        routes = None
        while True:
            if routes is not self._routes:
                routes = self._routes
                parts = self._route_chunk(routes, chunk)
            with self._lock:
                room = None if self._has_room() else self._make_room_lock()
                if room is None and routes is self._routes:
                    self._enter(parts)
                    return
            if room is not None:
                room.acquire()

    def _route_chunk(
        self, routes: PublisherRoutingTable, chunk: PendingArrowBatch
    ) -> list[tuple[int, PendingArrowBatch]]:
        limits = self._limits.block_messages, self._limits.block_bytes
        parts = [
            (stream_id, block)
            for stream_id, part in route_piece(routes, chunk)
            for block in split_into_blocks(part, *limits)
        ]
        for stream_id, part in parts:
            if self._is_full_block(part):
                part.packed = pack(part.batch, routes.get_compression(stream_id))
        return parts

    def _add_to_last(self, stream_id: int, message: Message, size: int) -> PendingMessageBatch:
        """Add it to what grows at the end of the queue, or begin another there; or nothing, whatever is raised."""
        queue = self._queues.get(stream_id)
        last = queue[-1] if queue else None
        if not isinstance(last, PendingMessageBatch) or not self._has_room_in(last, size):
            builder = PendingMessageBatch()
            builder.add(message, size)
            self._enter([(stream_id, builder)])
            return builder
        previous_state = self.queued_count, self._bytes, last.count, last.size
        try:
            last.add(message, size)
            self._count_added(last.ticket, 1, size)
        except BaseException:
            self.queued_count, self._bytes, *former = previous_state
            last.cut_back(*former)
            raise
        return last

    def _enter(self, parts: Sequence[tuple[int, PendingArrowBatch | PendingMessageBatch]]) -> None:
        """Queue all of these parts of one ticket, or none, whatever is raised."""
        ticket = parts[0][1].ticket
        previous_state, is_known = (self.queued_count, self._bytes), ticket in self._unsettled
        try:
            if ticket.error is None:
                ticket.entered_at = time.monotonic()
            self._enqueue(parts)
            ticket.entered += sum(part.count for _, part in parts)
        except BaseException:
            self.queued_count, self._bytes = previous_state
            for stream_id, part in reversed(parts):
                if (queue := self._queues.get(stream_id)) and queue[-1] is part:
                    queue.pop()
                if not queue:
                    self._queues.pop(stream_id, None)
            if not is_known:
                self._unsettled.remove(ticket)
            raise

    def _enqueue(self, parts: Sequence[tuple[int, PendingArrowBatch | PendingMessageBatch]]) -> None:
        for stream_id, part in parts:
            self._queues.setdefault(stream_id, deque()).append(part)
            self._count_added(part.ticket, part.count, part.size)

    def _is_full_block(self, piece: PendingArrowBatch) -> bool:
        """Return whether it will be a block of its own, which may be encoded early."""
        messages, size = self._limits.block_messages, self._limits.block_bytes
        return piece.count <= messages and piece.size <= size and (2 * piece.count > messages or 2 * piece.size > size)

    def _count_added(self, ticket: SharedPublishResult, count: int, size: int) -> None:
        self._unsettled.add(ticket)
        is_first = not self.queued_count
        if is_first:
            self._oldest_at = time.monotonic()
        self.queued_count += count
        self._bytes += size
        if is_first or (self._limits.linger_s and self._is_block_full()):
            self._work.notify_all()

    def _has_room(self) -> bool:
        """Return whether there is room. Raise if the publisher is closed."""
        self.check_open()
        return self._bytes < self._limits.buffered_bytes

    def _make_room_lock(self) -> threading.Lock:
        """Return a lock that can be had once there may be room, or the publisher is closed; not while holding the
        buffer's."""
        room = threading.Lock()
        room.acquire()
        self._waiting_for_room[room.release] = None
        return room

    def _has_room_in(self, growing: PendingMessageBatch, size: int) -> bool:
        if growing.count >= self._limits.block_messages or growing.size + size > self._limits.block_bytes:
            return False
        return time.monotonic() <= growing.ticket.entered_at + AGE_SPREAD_S

    def _pause(self) -> float:
        """Return the seconds left to linger before taking what is queued."""
        if not self._limits.linger_s or self._unsettled.is_flushing or self._closed or self._is_block_full():
            return 0
        return self._oldest_at + self._limits.linger_s - time.monotonic()

    def _is_block_full(self) -> bool:
        """Return whether what is queued, or being sent, fills a block: the sender lingers no longer."""
        return self.queued_count >= self._limits.block_messages or self._bytes >= self._limits.block_bytes

    def _cut_blocks(self, stream_id: int, newest_at: float) -> list[PendingBlock]:
        loads: list[PendingBlock] = []
        while len(loads) < self._limits.blocks_per_commit and (pieces := self._cut(stream_id, newest_at)):
            loads.append(PendingBlock(stream_id, pieces))
        return loads

    def _cut(self, stream_id: int, newest_at: float) -> list[PendingArrowBatch]:
        """Take a block's worth from the head of a queue, and return it; the stream then stands last in line."""
        queue = self._queues.get(stream_id)
        if not queue or queue[0].ticket.entered_at > newest_at:
            return []
        del self._queues[stream_id]
        count, size, room = self._limits.block_messages, self._limits.block_bytes, MAX_PACKED_BYTES
        pieces: list[PendingArrowBatch] = []
        while queue and count > 0 and queue[0].ticket.entered_at <= newest_at:
            piece = queue.popleft().seal()
            share = max(count_packable(piece, count_fitting(piece, count, size), room), 0 if pieces else 1)
            if share < piece.count:
                if share:
                    first, remaining = piece.split(share)
                    self._bytes += first.size + remaining.size - piece.size
                    pieces.append(first)
                    piece = remaining
                queue.appendleft(piece)
                break
            pieces.append(piece)
            count, size, room = count - piece.count, size - piece.size, room - piece.nbytes
        if queue:
            self._queues[stream_id] = queue
        self.queued_count -= sum(piece.count for piece in pieces)
        return pieces
