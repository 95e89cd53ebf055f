"""Stores batches of clients without access to the database, each in one transaction."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from sublet_leader.feed.batch_decoder import decode_batch
from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.errors import MalformedRow, Unavailable, UnknownSpace
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate.gate import Caller
from sublet_protocol.messages import feed_messages
from sublet_storage.db.bounded_connection import get_timeline
from sublet_storage.producer.arguments import FEED_PREFIX
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.multi_stream_batch import BatchStoreResult, IdempotentBatch, StreamClosedError, store_batch

ATTEMPTS = 10
"""Maximum number of rollovers in a row after which a batch is routed again."""

MAX_CHECKS = 64
"""Maximum number of batches whose topics are checked at a time, one of each principal: a check holds the interpreter's
lock, and each thread that wants it makes all others wait longer."""


class FeedPublishWriter:
    """Caches the routes of all batches, with the database timeline on which they were read, until a stream turns out to
    be closed, or older ones refuse a topic. Thread-safe."""

    def __init__(self) -> None:
        self._routes: tuple[str | None, PublisherRoutingTable] | None = None
        self._checking = [threading.Lock() for _ in range(MAX_CHECKS)]

    def store(
        self, conn: psycopg.Connection[Any], request: feed_messages.FeedPublishRequest, caller: Caller
    ) -> tuple[BatchStoreResult, int]:
        """Store the batch; return its outcome and its number of messages. Raise what is wrong with it,
        `PermissionDenied`, `ProducerFenced`, `BatchNumberConflict`."""
        messages = decode_batch(request.messages)
        with self._checking[hash(caller.principal) % MAX_CHECKS]:
            check_topics(caller, messages)
        digest = xxhash.xxh3_64_intdigest(request.messages) >> 1
        batch = IdempotentBatch(
            make_producer_id(caller, request.producer), request.incarnation, request.number, messages, digest
        )
        for _ in range(ATTEMPTS):
            routes = self._refresh_routes(conn)
            try:
                routes.check(messages)
                return store_batch(conn, routes, batch), messages.num_rows
            except StreamClosedError:
                self._routes = None
            except (MalformedRow, UnknownSpace):
                if not routes.may_be_outdated:
                    raise
                self._routes = None
        raise Unavailable(f"its streams were closed {ATTEMPTS} times in a row. Try again.")

    def _refresh_routes(self, conn: psycopg.Connection[Any]) -> PublisherRoutingTable:
        """Return the routes, read anew after a change of timeline: old ones may lead to streams that are missing or
        reused."""
        timeline, cached = get_timeline(conn), self._routes
        if cached is None or cached[0] != timeline:
            cached = self._routes = timeline, PublisherRoutingTable.load(conn)
        return cached[1]


def make_producer_id(caller: Caller, name: str) -> str:
    """Return the producer's id, which includes the principal where callers are known, so that none can use another's. A
    slash in a principal is escaped: `user:a` with the name `b/c` is not `user:a/b` with the name `c`."""
    if caller.principal is None:
        return f"{FEED_PREFIX}{name}"
    return f"{FEED_PREFIX}{caller.principal.replace('%', '%25').replace('/', '%2F')}/{name}"


def check_topics(caller: Caller, messages: pa.RecordBatch) -> None:
    """Raise `PermissionDenied` unless the caller may publish to every topic of the batch; `Unauthenticated` where its
    token or certificate is no longer valid.
    """
    if caller.principal is not None:
        caller.check_token()
        for topic in pc.unique(messages.column("topic")).to_pylist():
            if not caller.may(Right.PUBLISH, TopicFilter(topic)):
                raise caller.denied_error(Right.PUBLISH, TopicFilter(topic))


def to_publish_result(stored: BatchStoreResult) -> feed_messages.PublishResult:
    """Return the result in the client's form."""
    if stored.spans is None:
        return feed_messages.PublishResult(None, stored.is_duplicate)
    parts = [
        feed_messages.PublishedSpan(
            span.stream, span.first_offset, span.rows if isinstance(span.rows, range) else span.rows.to_pylist()
        )
        for span in stored.spans
    ]
    return feed_messages.PublishResult(tuple(parts), stored.is_duplicate)
