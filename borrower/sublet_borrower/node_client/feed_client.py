"""Publishing and reading through nodes, for clients without access to the database."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import partial
from types import TracebackType

from sublet_borrower.node_client.feed_reader import FeedReader, FeedStart
from sublet_borrower.node_client.node_calls import validate_nodes
from sublet_borrower.node_client.node_publish_sender import NodePublishSender, SingleRouteTable
from sublet_borrower.util.session_fork_guard import SessionForkGuard
from sublet_protocol.domain.errors import PositionGone, PublisherClosed, UnknownOutcome, UsageError
from sublet_protocol.domain.subscriptions import Bookmark
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.feed_messages import MAX_MESSAGE_BYTES
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_storage.producer.arguments import MAX_LINGER_MS, check_duration, check_int
from sublet_storage.producer.batches.input_conversion import (
    Columns,
    Headers,
    as_bytes,
    as_headers,
    as_timestamp_us,
    check_size,
    check_sizes,
    size_of,
    to_record_batches,
)
from sublet_storage.producer.delivery import BatchDelivery, Delivery
from sublet_storage.producer.send_buffer import BufferLimits, SendBuffer
from sublet_storage.util.fork_guard import DropMonitor, describe_origin
from sublet_storage.util.timeouts import check_timeout

BATCH_MESSAGES = 4000
BATCH_BYTES = 1 << 20
MAX_BUFFERED_BYTES = 32 << 20
DELIVERY_TIMEOUT_S = 120.0
NODE_TIMEOUT_S = 20.0
SENDER_STOP_TIMEOUT_S = 2.0
"""The extra time that `close` gives the sender once its own time is over."""

HINT = "publish it with access to the database: Publisher(max_message_bytes=...)."


class Feed:
    """A client that publishes and reads through nodes, one at a time; a context manager.

    No node is called before it is used. Publishing is for any thread, and is what `Publisher` is: durable deliveries,
    order per key, stored once despite retries, `max_buffered_bytes` of back-pressure. It is tried until
    `delivery_timeout_s` (math.inf: for ever) after it was published. Readers go on at the next node by themselves;
    `node_timeout_s` is how long no node may answer. It belongs to the process that made it, and a process that was
    forked from one that has used a session or a feed can make none. One that is dropped without `close` ends by itself,
    with a `ResourceWarning`: what is queued is delivered. Raises `InvalidSetting`, `UsageError`.
    """

    def __init__(
        self,
        nodes: str | Sequence[str],
        *,
        linger_ms: float = 0,
        max_buffered_bytes: int = MAX_BUFFERED_BYTES,
        delivery_timeout_s: float = DELIVERY_TIMEOUT_S,
        node_timeout_s: float = NODE_TIMEOUT_S,
    ) -> None:
        self._owner = SessionForkGuard()
        self._nodes = validate_nodes(nodes)
        buffered = check_int("max_buffered_bytes", max_buffered_bytes, 2**63 - 1)
        linger_s = check_duration("linger_ms", linger_ms, MAX_LINGER_MS) / 1000
        self._node_timeout_s = check_duration("node_timeout_s", node_timeout_s, math.inf)
        self._buffer = SendBuffer(SingleRouteTable(), BufferLimits(BATCH_MESSAGES, BATCH_BYTES, 1, buffered, linger_s))
        self._sender = NodePublishSender(
            self._nodes, self._buffer, check_duration("delivery_timeout_s", delivery_timeout_s, math.inf)
        )
        self._sender.start()
        self._drop_monitor = DropMonitor(
            self._owner,
            describe_origin("a Feed"),
            "what is queued is still delivered",
            partial(self._buffer.close, PublisherClosed("this feed was dropped.")),
        )
        self._drop_monitor.start(self)
        self._reader: FeedReader | None = None

    # --- publishing -------------------------------------------------------------------------------------------------

    def publish(
        self,
        topic: str,
        value: bytes | str | None,
        key: bytes | str | None = None,
        headers: Headers | None = None,
        timestamp: datetime | int | None = None,
    ) -> Delivery:
        """Publish one message; its Delivery gives its position once it is durable. As `Publisher.publish`."""
        self._owner.check("this feed")
        plain_key, plain_value = as_bytes("key", key), as_bytes("value", value)
        pairs = as_headers(headers)
        check_size(size_of(topic, plain_key, plain_value, pairs), MAX_MESSAGE_BYTES, "the message", HINT)
        delivery = self._buffer.add(topic, plain_key, plain_value, pairs, as_timestamp_us(timestamp))
        assert delivery is not None
        return delivery

    def publish_batch(self, data: Columns) -> BatchDelivery:
        """Publish a table, a record batch or a mapping of columns, by columns. As `Publisher.publish_batch`."""
        self._owner.check("this feed")
        batches = to_record_batches(data)
        for batch in batches:
            check_sizes(batch, MAX_MESSAGE_BYTES)
            if batch["epoch"].null_count < batch.num_rows:
                raise UsageError("messages with an epoch: only a Publisher, with access to the database, has epochs.")
            self._buffer.routes.check(batch)
        return self._buffer.add_batches(batches)

    def flush(self, timeout_s: float | None = None) -> None:
        """Wait until all published so far is durable. Raise the first delivery error since the last flush."""
        self._owner.check("this feed")
        self._buffer.flush(timeout_s)
        if (error := self._buffer.pop_error()) is not None:
            raise error

    # --- reading ----------------------------------------------------------------------------------------------------

    def history(
        self,
        filter: str | TopicFilter = "#",
        starting_position: FeedStart = "earliest",
        on_data_loss: Callable[[PositionGone], None] | None = None,
    ) -> FeedReader:
        """Return what is stored and matches, from `starting_position` to where the streams end now: an iterator of
        Arrow tables.

        `starting_position`: earliest, latest, a time (when it was stored; `datetime` or text), an offset (`int`: in
        every stream), or the `bookmark` of an earlier reader of the same filter, also as text. Where it begins is
        settled when this returns.
        """
        return self._read(pb.HistoryRequest, filter, starting_position, on_data_loss)

    def follow(
        self,
        filter: str | TopicFilter = "#",
        starting_position: FeedStart = "latest",
        on_data_loss: Callable[[PositionGone], None] | None = None,
    ) -> FeedReader:
        """Return the same, and then what is published, as it comes: an iterator without an end."""
        return self._read(pb.FollowRequest, filter, starting_position, on_data_loss)

    @property
    def bookmark(self) -> Bookmark:
        """Return the bookmark of the reader that was begun last."""
        if self._reader is None:
            raise UsageError("this feed has read nothing yet: call history() or follow() first.")
        return self._reader.bookmark

    def _read(
        self,
        kind: type,
        filter: str | TopicFilter,
        starting_position: FeedStart,
        on_data_loss: Callable[[PositionGone], None] | None,
    ) -> FeedReader:
        self._owner.check("this feed")
        self._reader = FeedReader(self._nodes, kind, filter, starting_position, on_data_loss, self._node_timeout_s)
        return self._reader

    # --- the end ----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float | None = None) -> None:
        """Deliver what is queued, then end. After `timeout_s` what is left fails. Raise the first delivery error.

        Readers are not closed by this. In a process forked from the feed's it does nothing.
        """
        if self._owner.is_forked:
            return
        timeout_s = check_timeout(timeout_s)
        self._buffer.close(PublisherClosed("this feed is closed."))
        self._sender.join(timeout_s)
        if self._sender.is_alive():
            self._sender.give_up()
            self._sender.join(SENDER_STOP_TIMEOUT_S)
        if self._sender.is_alive():
            self._buffer.abandon(UnknownOutcome(f"no word within the {timeout_s} s of close() that it is stored."))
        self._drop_monitor.stop()
        if (error := self._buffer.pop_error()) is not None:
            raise error

    def __enter__(self) -> Feed:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failure:  # noqa: BLE001 - the error that is under way matters more
            error.add_note(f"and while closing the feed: {failure}")
