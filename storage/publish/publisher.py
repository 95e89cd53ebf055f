"""The publisher that users hold."""

from __future__ import annotations

import uuid
from contextlib import ExitStack
from datetime import datetime
from types import TracebackType

import psycopg

from protocol.errors import DatabaseUnreachable, InvalidSetting, PublisherClosed
from storage.catalogue import find_space
from storage.connect import connect
from storage.database import open_database
from storage.log import register_producer
from storage.publish.buffer import Buffer, Limits
from storage.publish.columns import (
    Columns,
    Headers,
    as_bytes,
    as_headers,
    as_timestamp_us,
    check_size,
    check_sizes,
    normalise,
    size_of,
)
from storage.publish.delivery import BatchDelivery, Delivery
from storage.publish.routes import Routes
from storage.publish.sender import Producer, Sender

MAX_MESSAGE_BYTES = 1024 * 1024
MAX_BUFFERED_BYTES = 32 * 1024 * 1024
RETRY_TIMEOUT_S = 120.0


class Publisher:
    """Publishes messages durably, from any thread; a context manager that delivers all before it ends.

    `url`: the database; without one SUBLET_DATABASE_URL, else the embedded server. `space`: refuse topics outside of
    that space. `producer`: a name that outlives the process; a new publisher of the same name fences the older one.
    `linger_ms`: let a message wait for company; 0 sends at once, and load alone makes the blocks large.
    `block_messages` and `block_bytes` bound a block, `blocks_per_commit` the blocks of a stream that are committed
    together when many wait, `max_buffered_bytes` what waits: beyond it `publish` blocks.
    A lost database is retried for `retry_timeout_s`, after which deliveries fail.
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
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        producer: str | None = None,
    ) -> None:
        _check_settings(
            block_messages=block_messages,
            block_bytes=block_bytes,
            blocks_per_commit=blocks_per_commit,
            max_buffered_bytes=max_buffered_bytes,
            max_message_bytes=max_message_bytes,
        )
        self._max_message_bytes = max_message_bytes
        limits = Limits(block_messages, block_bytes, blocks_per_commit, max_buffered_bytes, max(0.0, linger_ms) / 1000)
        with ExitStack() as stack:
            database = stack.enter_context(open_database(url))
            routes, writer = _begin(database.url, space, producer)
            self._buffer = Buffer(routes, limits)
            self._sender = Sender(database.url, self._buffer, writer, space, retry_timeout_s)
            self._database = stack.pop_all()
        self._sender.start()

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
        microseconds since 1970, now by default. Blocks while the buffer is full. Raises `InvalidTopic`,
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
        batches = normalise(data)
        for batch in batches:
            check_sizes(batch, self._max_message_bytes)
            self._buffer.routes.check(batch)
        return self._buffer.add_batches(batches)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all published so far is durable. Raises the first delivery error since the last flush."""
        self._buffer.flush(timeout_s)
        if (error := self._buffer.pop_error()) is not None:
            raise error

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver what is queued, then end. After `timeout_s` what is left fails. Raises the first delivery error."""
        self._buffer.close(PublisherClosed("this publisher is closed."))
        self._sender.join(timeout_s)
        if self._sender.is_alive():
            self._sender.give_up()
            self._sender.join()
        self._database.close()
        if (error := self._buffer.pop_error()) is not None:
            raise error

    def __enter__(self) -> Publisher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:  # noqa: BLE001 - the error that is under way says more
            error.add_note(f"and while closing the publisher: {failure}")

    def _offer(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None,
        headers: Headers | None,
        timestamp: datetime | int | None,
        wait: bool,
    ) -> Delivery | None:
        """`publish`; without `wait`, None instead of blocking."""
        plain_key, plain_value = as_bytes("key", key), as_bytes("value", value)
        pairs = as_headers(headers)
        check_size(size_of(topic, plain_key, plain_value, pairs), self._max_message_bytes, "the message")
        return self._buffer.add(topic, plain_key, plain_value, pairs, as_timestamp_us(timestamp), wait)


def _begin(url: str, space: str | None, producer: str | None) -> tuple[Routes, Producer]:
    try:
        with connect(url, application_name="sublet publisher") as conn:
            if space is not None:
                find_space(conn, space)
            routes = Routes.load(conn, space)
            if producer is None:
                return routes, Producer(uuid.uuid4().hex, 1)
            return routes, Producer(producer, register_producer(conn, producer))
    except psycopg.OperationalError as error:
        raise DatabaseUnreachable(f"the database went away while opening a publisher: {error}") from error


def _check_settings(**settings: int) -> None:
    for name, value in settings.items():
        if value < 1:
            raise InvalidSetting(f"{name} {value}: must be at least 1. Leave it out for the default.")
