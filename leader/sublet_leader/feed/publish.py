"""Storing what clients without access to the database publish: on the pool's threads, each batch in one transaction."""

from __future__ import annotations

from typing import Any

import psycopg
import xxhash

from sublet_leader.feed.batch_decoder import read_batch
from sublet_protocol.domain.errors import Unavailable
from sublet_protocol.messages import feed
from sublet_storage.producer.batches.routing_table import Routes
from sublet_storage.producer.idempotent_batch import Batch, Stored, StreamClosed, store

ATTEMPTS = 10
"""How many rollovers in a row a batch is routed after."""

PRODUCER = "feed/"
"""Before the producers' ids, so that nobody can fence a publisher that has access to the database."""


class Writer:
    """Keeps the routes that all batches go by until a stream turns out to be closed. Any thread may call."""

    def __init__(self) -> None:
        self._routes: Routes | None = None

    def store(self, conn: psycopg.Connection[Any], request: feed.Publish) -> tuple[Stored, int]:
        """What became of the batch, and how many messages it has. Raises what is wrong with it, `ProducerFenced`,
        `NumberTaken`."""
        messages = read_batch(request.messages)
        digest = xxhash.xxh3_64_intdigest(request.messages) >> 1
        batch = Batch(PRODUCER + request.producer, request.incarnation, request.number, messages, digest)
        for _ in range(ATTEMPTS):
            routes = self._routes = self._routes or Routes.load(conn)
            try:
                routes.check(messages)
                return store(conn, routes, batch), messages.num_rows
            except StreamClosed:
                self._routes = None
        raise Unavailable(f"its streams were closed {ATTEMPTS} times in a row. Try again.")


def answer(stored: Stored) -> feed.Published:
    """As the client is told."""
    if stored.spans is None:
        return feed.Published(None, stored.repeated)
    parts = [
        feed.Part(span.stream, span.first_offset, span.rows if isinstance(span.rows, range) else span.rows.to_pylist())
        for span in stored.spans
    ]
    return feed.Published(tuple(parts), stored.repeated)
