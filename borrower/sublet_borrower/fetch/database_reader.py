"""Reads blocks from the log in the database, and retries while it is away.

What is read of a stream is one sequence: each page has its first offset, and is taken only if that is where the page
taken last ended.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Final, TypeVar

import psycopg

from sublet_borrower.streams.complete_epoch_stream import CompleteEpochStream
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_protocol.domain.errors import DatabaseUnreachable
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from sublet_storage.db.reconnecting_connection import ReconnectingConnection
from sublet_storage.groups.consumer_progress import check_granted_here
from sublet_storage.log import fetch as message_log
from sublet_storage.readers import epoch_steps
from sublet_storage.readers.epoch_steps import BlockEpochSummaries
from sublet_storage.util import arrow_compute as pc

log = logging.getLogger(__name__)

_NEXT_BYTES: Final = message_log.NEXT_BLOCKS * message_log.NEXT_BLOCK_BYTES

_T = TypeVar("_T")


class DatabaseMessageReader:
    """A reader over one connection in autocommit: no snapshot is held while a user processes. Not thread-safe.

    A server that is silent for `timeout_s` in the middle of a read counts as away.
    """

    def __init__(self, url: str, max_batch_bytes: int, timeout_s: float) -> None:
        self._url, self._batch_bytes, self._timeout_s = url, max_batch_bytes, timeout_s
        self._reconnecting = ReconnectingConnection(self._connect, log)

    def warm_up(self, filter: TopicFilter = message_log.MATCH_ALL) -> None:
        """Prepare the first reads with that filter before anything is granted, since all streams granted at once wait
        for each other's: connect, and read. The first function of Arrow loads pyarrow.compute, and pandas where it is
        installed.
        """
        pc.add(0, 0)
        self.query(lambda connection: message_log.warm_up(connection, filter))

    def fetch(self, granted: GrantedStream, allowed: Callable[[GrantedStream], bool]) -> message_log.LogPage | None:
        """Return the messages that follow on what was taken of the stream so far; they count as taken then.

        None while the database is away, and where the page is discarded: it is not the direct successor, or taking it
        is not `allowed` any more, which is checked when it has come. Raise `PositionGone`, `PoisonBlock`,
        `TimelineChanged`, and `PayloadUnavailable` of payloads outside of Postgres.
        """
        page = self._query_granted(granted.stream_id, granted.grant_id, partial(self._fetch, granted))
        accepted = page is not None and allowed(granted) and granted.advance_read(page.start, page.position, page.head)
        return page if accepted else None

    def fetch_block_summaries(self, granted: CompleteEpochStream) -> BlockEpochSummaries | None:
        """Return the summaries that follow on those that are known; None while the database is away. Raise
        `PositionGone`, `TimelineChanged`.
        """
        scanned = granted.step_planner.scanned
        return self.fetch_summaries_behind(granted.stream_id, granted.grant_id, granted.generation_id, scanned)

    def fetch_summaries_behind(
        self, stream_id: int, grant_id: int, generation_id: int, offset: int
    ) -> BlockEpochSummaries | None:
        """Return the summaries of the blocks behind an offset, as `fetch_block_summaries` does."""
        return self._query_granted(
            stream_id,
            grant_id,
            lambda connection: epoch_steps.read_block_summaries(connection, stream_id, generation_id, offset),
        )

    def fetch_frontiers(self, stream_ids: Iterable[int]) -> Mapping[int, BlockEpochSummaries]:
        """Return where streams end and what is completed in their spaces; empty while the database is away."""
        return self.query(lambda connection: epoch_steps.read_stream_frontiers(connection, stream_ids)) or {}

    def fetch_heads(self, stream_ids: Iterable[int]) -> list[tuple[int, int]]:
        """Return (stream, head) of each, as they are now; empty while the database is away."""
        heads = self.query(lambda connection: message_log.read_heads(connection, stream_ids))
        return [(stream_id, head.head) for stream_id, head in (heads or {}).items()]

    def close(self) -> None:
        """Close the connection."""
        self._reconnecting.close()

    def _fetch(self, granted: GrantedStream, connection: BoundedConnection) -> message_log.LogPage:
        """Read a short page that was waited for with the statement for that, and use the general one for any other
        result.
        """
        stream_id, offset, limit_bytes = granted.stream_id, granted.next_read_offset, self._batch_bytes
        limit_bytes = min(limit_bytes, granted.max_bytes or limit_bytes)
        if granted.is_awaited and limit_bytes >= _NEXT_BYTES:
            is_hinted = granted.head == offset
            page = message_log.fetch_next(
                connection, stream_id, offset, granted.generation_id, granted.filter, may_be_empty=is_hinted
            )
            if page is not None:
                return page
        return message_log.fetch(
            connection,
            stream_id,
            offset,
            filter=granted.filter,
            generation_id=granted.generation_id,
            limit_bytes=limit_bytes,
        )

    def _query_granted(self, stream_id: int, grant_id: int, read: Callable[[BoundedConnection], _T]) -> _T | None:
        def check_and_read(connection: BoundedConnection) -> _T:
            check_granted_here(connection, stream_id, grant_id)
            return read(connection)

        return self.query(check_and_read)

    def query(self, read: Callable[[BoundedConnection], _T]) -> _T | None:
        """Return the answer; None while the database is away, which is not tried again at once. A read changes nothing,
        so the caller can repeat it."""
        try:
            with self._reconnecting as connection:
                return read(connection)
        except (psycopg.OperationalError, DatabaseUnreachable):
            return None

    def _connect(self) -> BoundedConnection:
        return connect(self._url, application_name="sublet reader", receive_timeout_s=self._timeout_s)
