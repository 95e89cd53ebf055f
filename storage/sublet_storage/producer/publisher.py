"""The publisher that users call."""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType

from sublet_protocol.domain.epoch_frontiers import Epoch, check_epoch
from sublet_protocol.domain.errors import (
    InvalidTopic,
    MalformedRow,
    PublisherClosed,
    UnknownOutcome,
    UnknownSpace,
    UsageError,
)
from sublet_protocol.domain.limits import MAX_ANTICHAIN
from sublet_storage.bootstrap.given_or_embedded_database import open_database
from sublet_storage.db.connect import connect, map_loss
from sublet_storage.log.append import UNNAMED, ProducerIdentity, register_producer
from sublet_storage.log.arrow_batch_decoder import MAX_BLOCK_MESSAGES
from sublet_storage.log.block_encoder import compute_epoch_bounds
from sublet_storage.log.epoch_leases import LEASE_S, MAX_LEASE_S, MIN_LEASE_S
from sublet_storage.producer.arguments import (
    MAX_BYTES,
    MAX_LINGER_MS,
    check_duration,
    check_int,
    check_producer_name,
    check_text,
)
from sublet_storage.producer.batches.input_conversion import (
    Columns,
    Headers,
    as_bytes,
    as_headers,
    as_timestamp_us,
    check_size,
    check_sizes,
    set_epoch,
    size_of,
    to_record_batches,
)
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.delivery import BatchDelivery, Delivery
from sublet_storage.producer.epoch_lease import EpochCapability
from sublet_storage.producer.send_buffer import BufferLimits, SendBuffer
from sublet_storage.producer.sender import ATTEMPT_TIMEOUT_S, TRANSACTION_TIMEOUT_S, Sender, follow_timeline
from sublet_storage.spaces.space_queries import find_space
from sublet_storage.util.fork_guard import DropMonitor, OwnerProcess, describe_origin
from sublet_storage.util.reentry import check_reentry
from sublet_storage.util.timeouts import check_timeout

MAX_MESSAGE_BYTES = 1024 * 1024
MAX_BUFFERED_BYTES = 32 * 1024 * 1024
DELIVERY_TIMEOUT_S = 120.0

MAX_BLOCKS = 1000
"""How many rejections of a stream in one transaction are reported to a retry."""

REGISTER_TIMEOUT_S = TRANSACTION_TIMEOUT_S + 5.0
"""How long a named producer waits for what its predecessor is writing: a frozen one is cut off before that."""

SENDER_STOP_TIMEOUT_S = 0.5
"""What `close` grants the sender, and the leaving of an embedded server, once its own time is over."""


class Publisher:
    """Publishes messages durably, from any thread; a context manager that delivers all before it ends.

    `url`: the database; without one the embedded server of `data_dir`, else SUBLET_DATABASE_URL, else the default
    embedded server. `space`: refuse topics outside of that space. `producer`: a name that outlives the process; a new
    publisher of the same name fences the older one. `linger_ms`: how long a message waits for others; 0 sends at once,
    and load alone makes the blocks large. `block_messages` and `block_bytes` bound a block, `blocks_per_commit` the
    blocks of a stream that are committed together when many wait, `max_buffered_bytes` what waits: beyond it `publish`
    blocks. A lost database, or one that does not answer, is retried until `delivery_timeout_s` (math.inf: for ever)
    after a message was published, then its delivery fails, with all that is sent together with it. What has been sent
    by then is given 5 s at least to be answered; what waited behind others that failed is not sent any more.
    `epoch_lease_s`: for so long after its process has died, the epochs that it had not finished stay open. It belongs
    to the process that made it: in a fork of that, every use but `close` raises `UsageError`; so does each in a signal
    handler in the middle of its thread's own call. One that is dropped without `close` ends by itself, with a
    `ResourceWarning`: what is queued is delivered, and its unfinished epochs stay open for their lease.
    Raises `UnknownSpace`, `DatabaseUnreachable`, `SchemaMismatch`, `InvalidSetting`.
    """

    def __init__(
        self,
        url: str | None = None,
        space: str | None = None,
        *,
        linger_ms: float = 0,
        block_messages: int = 1000,
        block_bytes: int = 256 * 1024,
        blocks_per_commit: int = 8,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        producer: str | None = None,
        epoch_lease_s: float = LEASE_S,
        data_dir: Path | str | None = None,
    ) -> None:
        self._owner = OwnerProcess()
        self._max_message_bytes = check_int("max_message_bytes", max_message_bytes, MAX_BYTES)
        limits = self._limits = BufferLimits(
            check_int("block_messages", block_messages, MAX_BLOCK_MESSAGES),
            check_int("block_bytes", block_bytes, MAX_BYTES),
            check_int("blocks_per_commit", blocks_per_commit, MAX_BLOCKS),
            check_int("max_buffered_bytes", max_buffered_bytes, 2**63 - 1),
            check_duration("linger_ms", linger_ms, MAX_LINGER_MS) / 1000,
        )
        delivery_timeout_s = check_duration("delivery_timeout_s", delivery_timeout_s, math.inf)
        lease_s = check_duration("epoch_lease_s", epoch_lease_s, MAX_LEASE_S, minimum=MIN_LEASE_S)
        producer, url, space = check_producer_name(producer), check_text("url", url), check_text("space", space)
        with ExitStack() as stack:
            database = stack.enter_context(open_database(url, data_dir))
            routes, writer, space_id, timeline = _open_log(database.url, space, producer)
            self._capability = None
            self._advancing = threading.RLock()  # advances are queued in the order in which they were allowed
            buffer = self._buffer = SendBuffer(routes, limits)
            if space_id is not None:
                self._capability = EpochCapability(
                    database.url,
                    space_id,
                    writer,
                    delivery_timeout_s,
                    lease_s,
                    timeline,
                    lambda conn: follow_timeline(conn, buffer.routes, writer),
                )
            advance = None if self._capability is None else self._capability.advance
            self._sender = Sender(database.url, self._buffer, writer, space, delivery_timeout_s, advance, timeline)
            self._database = stack.pop_all()
        self._sender.start()
        self._drop_monitor = DropMonitor(
            self._owner,
            describe_origin("a Publisher"),
            "what is queued is still delivered",
            partial(_end_dropped, buffer, self._sender, self._capability, self._database),
        )
        self._drop_monitor.start(self)

    def publish(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: datetime | int | None = None,
    ) -> Delivery:
        """Publish one message; its Delivery gives its position once it is durable.

        Messages of one key (of one topic, without keys) keep their order. `timestamp` is an aware datetime or
        microseconds since 1970, now by default. Blocks while the buffer is full. Raise `InvalidTopic`,
        `ValueTooLarge`, `UsageError`, `PublisherClosed`.
        """
        delivery = self._offer(topic, value, key, headers, timestamp, wait=True)
        assert delivery is not None
        return delivery

    def publish_batch(self, data: Columns) -> BatchDelivery:
        """Publish an Arrow table or record batch, or a mapping of columns, by columns: the fast way.

        Columns: topic and value; key, headers, timestamp, epoch if wanted. In a mapping, a single topic or key stands
        for all. Bad input raises before any of it is accepted; the order per key is that of the rows.
        """
        return self._publish_batch(data, None)

    def _publish_batch(self, data: Columns, epoch: Epoch | None) -> BatchDelivery:
        self._owner.check("this publisher")
        batches = to_record_batches(data)
        if epoch is not None:
            batches = [set_epoch(batch, epoch) for batch in batches]
        for batch in batches:
            check_sizes(batch, self._max_message_bytes)
            try:
                self._buffer.routes.check(batch)
            except InvalidTopic:
                raise
            except (MalformedRow, UnknownSpace, UsageError):
                self._buffer.request_routes()
                raise
            if epoch is None and (bounds := compute_epoch_bounds(batch["epoch"])) is not None:
                self._check_epochs(bounds.least)
                for greatest in bounds.greatest:
                    check_epoch(greatest)
        return self._buffer.add_batches(batches)

    def in_epoch(self, epoch: int | Sequence[int]) -> SingleEpochPublisher:
        """Publish in an epoch: `publisher.in_epoch(7).publish(...)`.

        An epoch is an integer, or a tuple of integers in product order; all epochs of a space have as many numbers. The
        first one that is used, or advanced to, begins what this publisher may publish: anything at or after it, where
        others have not gone further. Raise `InvalidEpoch`, `EpochAlreadyCompleted`, `EpochCapabilityExpired`, and
        `UsageError` for a publisher without a space.
        """
        self._owner.check("this publisher")
        checked_epoch = check_epoch(epoch)
        self._check_epochs([checked_epoch])
        return SingleEpochPublisher(self, checked_epoch)

    def advance(self, *epochs: int | Sequence[int], wait: bool = True) -> None:
        """Publish only at or after this epoch (or any of these) from now on. It is done, and durable, once all that was
        published so far is durable; without `wait` it may be done later, at the next `flush` at the latest.

        When all publishers of the space have gone past an epoch it is completed: nothing more is published in it, and
        consumers of entire epochs get it. Closing the publisher gives all up. Raise what `in_epoch` raises, and the
        first delivery error since the last flush, in which case nothing has advanced.
        """
        self._owner.check("this publisher")
        checked_epochs = [check_epoch(epoch) for epoch in epochs]
        if not checked_epochs:
            raise UsageError("advance() without an epoch: give the one that is next.")
        capability = self._get_capability()
        check_reentry(self._advancing)
        with self._advancing:
            capability.reserve(checked_epochs)
            try:
                delivery = self._buffer.advance(checked_epochs)
            except Exception:
                capability.cancel_reservations()
                raise
        if wait:
            self.flush()
            if delivery.error is not None:
                raise delivery.error  # another caller has got its error first

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all published, and advanced, so far is durable. Raise the first delivery error since the last
        flush."""
        self._owner.check("this publisher")
        self._buffer.flush(timeout_s)
        if (error := self._buffer.pop_error()) is not None:
            if self._capability is not None:
                self._capability.cancel_reservations()  # with it all advances that were queued are given up
            raise error

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver what is queued, then end. After `timeout_s` what is left fails. Raise the first delivery error.

        Epochs that it has not advanced from are finished by it, unless there is such an error: then they stay open
        until the lease has run out. It returns a second after its timeout at the latest, also where the database does
        not answer. In a process forked from the publisher's it does nothing.
        """
        self._close(timeout_s, abandon=False)

    def _close(self, timeout_s: float | None, *, abandon: bool) -> None:
        if self._owner.is_forked:
            return
        timeout_s = check_timeout(timeout_s)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        if self._capability is not None:
            self._capability.check_idle()
        self._buffer.close(PublisherClosed("this publisher is closed."))
        self._sender.join(timeout_s)
        if self._sender.is_alive():
            self._sender.give_up()
            self._sender.join(SENDER_STOP_TIMEOUT_S)
        if self._sender.is_alive():
            self._buffer.abandon(UnknownOutcome(f"no word within the {timeout_s} s of close() that it is stored."))
        error = self._buffer.pop_error()
        self._close_connections(deadline, abandon=abandon or error is not None)
        self._drop_monitor.stop()
        if error is not None:
            raise error

    def __enter__(self) -> Publisher:
        self._buffer.check_open()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self._close(None, abandon=True)
        except Exception as failure:  # noqa: BLE001 - the error that is under way matters more
            error.add_note(f"and while closing the publisher: {failure}")

    def _offer(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None,
        headers: Headers | None,
        timestamp: datetime | int | None,
        epoch: Epoch | None = None,
        *,
        wait: bool,
    ) -> Delivery | None:
        """Publish as `publish` does; without `wait`, return None instead of blocking."""
        self._owner.check("this publisher")
        plain_key, plain_value = as_bytes("key", key), as_bytes("value", value)
        pairs, timestamp_us = as_headers(headers), as_timestamp_us(timestamp)
        check_size(size_of(topic, plain_key, plain_value, pairs), self._max_message_bytes, "the message")
        try:
            return self._buffer.add(topic, plain_key, plain_value, pairs, timestamp_us, epoch, wait)
        except InvalidTopic:
            raise
        except (MalformedRow, UnknownSpace, UsageError):
            self._buffer.request_routes()
            raise

    def _check_epochs(self, epochs: Sequence[Epoch]) -> None:
        self._get_capability().check(epochs)
        if len(epochs[0]) > 1:  # each message of a block may have a least epoch of its own
            self._limits.block_messages = min(self._limits.block_messages, MAX_ANTICHAIN)

    def _get_capability(self) -> EpochCapability:
        if self._capability is None:
            raise UsageError(
                "epochs are a space's own, and this publisher is for all spaces. Name one: Publisher(space='default')."
            )
        return self._capability

    def _close_connections(self, deadline: float | None, *, abandon: bool) -> None:
        """Release the capability, and the database. That takes long where it does not answer, and where the last user
        of an embedded server stops one of whose processes is frozen."""
        if deadline is None:
            _release(self._capability, self._database, abandon=abandon)
            return
        release = partial(_release, self._capability, self._database, abandon=abandon)
        leaving = threading.Thread(target=release, name="sublet publisher leaving", daemon=True)
        leaving.start()
        leaving.join(max(SENDER_STOP_TIMEOUT_S, deadline - time.monotonic()))


class SingleEpochPublisher:
    """A publisher, in one epoch."""

    def __init__(self, publisher: Publisher, epoch: Epoch) -> None:
        self._publisher, self.epoch = publisher, epoch

    def check(self) -> None:
        """Raise `EpochAlreadyCompleted` if it may be published no more."""
        self._publisher._owner.check("this publisher")
        self._publisher._get_capability().check([self.epoch])

    def publish(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: datetime | int | None = None,
    ) -> Delivery:
        """Publish as `Publisher.publish` does, in this epoch."""
        self.check()
        delivery = self._publisher._offer(topic, value, key, headers, timestamp, self.epoch, wait=True)
        assert delivery is not None
        return delivery

    def publish_batch(self, data: Columns) -> BatchDelivery:
        """Publish as `Publisher.publish_batch` does; all messages are in this epoch."""
        self.check()
        return self._publisher._publish_batch(data, self.epoch)


def _release(capability: EpochCapability | None, database: ExitStack, *, abandon: bool) -> None:
    if capability is not None:
        capability.close(abandon=abandon)
    database.close()


def _end_dropped(buffer: SendBuffer, sender: Sender, capability: EpochCapability | None, database: ExitStack) -> None:
    """Deliver what is queued of a publisher that was dropped, then end it; its epochs stay open for a lease."""
    buffer.close(PublisherClosed("this publisher was dropped."))
    sender.join()
    _release(capability, database, abandon=True)


def _open_log(
    url: str, space: str | None, producer: str | None
) -> tuple[PublisherRoutingTable, ProducerIdentity, int | None, str | None]:
    """Return the routes, the producer's identity, the id of the one space if it is for one, and the database's
    timeline."""
    connecting = connect(
        url, application_name="sublet publisher", lock_timeout_s=REGISTER_TIMEOUT_S, receive_timeout_s=ATTEMPT_TIMEOUT_S
    )
    with map_loss("opening a publisher"), connecting as conn:
        space_id = None if space is None else find_space(conn, space).space_id
        routes = PublisherRoutingTable.load(conn, space)
        if producer is None:
            return routes, ProducerIdentity(uuid.uuid4().hex, UNNAMED), space_id, conn.timeline
        return routes, ProducerIdentity(producer, register_producer(conn, producer)), space_id, conn.timeline
