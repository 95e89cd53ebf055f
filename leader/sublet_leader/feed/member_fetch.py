"""Fetches pages for group members without access to the database, on the pool's threads.

A page is for a granted stream, and contains what `sublet_storage.log.fetch` reads. It may end before the block does:
positions are per message, so the next page continues there.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

import psycopg
import pyarrow as pa

from sublet_leader.feed.history_and_follow import READ_BYTES, encode, split_table
from sublet_protocol.domain.access.rights import ALL, Right
from sublet_protocol.domain.errors import PositionGone, Unavailable
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate.gate import Caller
from sublet_protocol.messages.member_reads import FetchedPage, FetchPositionGone, FetchRequest
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.groups.admin.access_snapshot import (
    find_streams_of_groups,
    read_deleted_groups,
    read_groups_of_streams,
)
from sublet_storage.groups.consumer_progress import check_granted_here
from sublet_storage.log import fetch as message_log
from sublet_storage.log.deleted_streams import find_deleted_streams

PAGE_BYTES = 8 << 20
"""A page is cut off after this many bytes. More than `READ_BYTES` of compressed messages mostly expand to, as what is
cut off is read again."""
VALID_S = 2.0
"""How long a group that was deleted may still be one that reads a stream."""
MAX_KNOWN = 20_000
"""Number of (principal, stream) for which that is stored."""


class StreamRights:
    """Which streams members may fetch: those that a group reads which they may join. That a group reads a stream is
    looked up at most once in `VALID_S`; rights are checked each time. Thread-safe."""

    def __init__(self) -> None:
        self._groups: dict[tuple[str, int], tuple[float, str, TopicFilter]] = {}
        """{(principal, stream): until when, name and filter of a group that it may join}"""

    def check(self, conn: psycopg.Connection[Any], caller: Caller, request: FetchRequest) -> None:
        """Raise `PermissionDenied` unless a group that the caller may join reads the stream, within the requested
        range; `Unavailable` where it may join one that was deleted a moment ago. A deleted stream is of no group:
        reading it, which returns that it is gone, needs the right to join some group."""
        stream_ids = [request.stream_id]
        if self.filter(conn, caller, stream_ids, request.filter):
            return
        if caller.may_somewhere(Right.JOIN):
            if not read_groups_of_streams(conn, stream_ids) and find_deleted_streams(conn, stream_ids):
                return
            if any(_may_join(caller, *group, request.filter) for group in read_deleted_groups(conn)):
                raise Unavailable("the group of the session was deleted a moment ago.")
        raise caller.denied_error(Right.JOIN, request.filter)

    def filter(
        self, conn: psycopg.Connection[Any], caller: Caller, stream_ids: Sequence[int], range: TopicFilter | None = None
    ) -> Sequence[int]:
        """Return those of the streams that are read by groups that the caller may join, within the range; without a
        right to join any, none, and the database is not queried."""
        if caller.principal is None:
            return stream_ids
        caller.check_token()
        if not stream_ids or not caller.may_somewhere(Right.JOIN):
            return ()
        now = time.monotonic()
        known = [id for id in stream_ids if self._is_known(caller, id, range, now)]
        if len(known) == len(stream_ids):
            return known
        found = self._find(conn, caller, set(stream_ids).difference(known), range)
        if len(self._groups) + len(found) > MAX_KNOWN:
            self._groups.clear()
        self._groups |= {(caller.principal, id): (now + VALID_S, *group) for id, group in found.items()}
        return [*known, *found]

    def _is_known(self, caller: Caller, stream_id: int, range: TopicFilter | None, now: float) -> bool:
        until, name, filter = self._groups.get((str(caller.principal), stream_id)) or (now, "", ALL)
        return until > now and _may_join(caller, name, filter, range)

    def _find(
        self, conn: psycopg.Connection[Any], caller: Caller, stream_ids: Collection[int], range: TopicFilter | None
    ) -> dict[int, tuple[str, TopicFilter]]:
        groups = {
            group_id: (name, filter)
            for group_id, name, filter in read_groups_of_streams(conn, stream_ids)
            if _may_join(caller, name, filter, range)
        }
        found = find_streams_of_groups(conn, stream_ids, groups) if groups else {}
        return {stream_id: groups[group_id] for stream_id, group_id in found.items()}


def _may_join(caller: Caller, name: str, filter: TopicFilter, range: TopicFilter | None) -> bool:
    return (range is None or filter.covers(range)) and caller.may(Right.JOIN, filter, name)


def fetch_page(conn: BoundedConnection, request: FetchRequest) -> FetchedPage | FetchPositionGone:
    """Return the next page of the stream. Raise `PositionBeyondHead`, `TimelineChanged`, `NotFound`, and
    `ValueTooLarge` for a message that cannot be sent."""
    check_granted_here(conn, request.stream_id, request.grant_id)
    try:
        page = message_log.fetch(
            conn,
            request.stream_id,
            request.position,
            filter=request.filter,
            generation_id=request.generation_id,
            limit_bytes=min(request.limit_bytes, READ_BYTES),
        )
    except PositionGone as error:
        return FetchPositionGone(error.oldest)
    if not page.batches:
        return FetchedPage(page.start, page.position, page.head, page.is_closed)
    entire = pa.Table.from_batches(page.batches)
    first_part = next(split_table(entire, PAGE_BYTES))
    end = page.position if len(first_part) == len(entire) else first_part.column("offset")[-1].as_py() + 1
    return FetchedPage(page.start, end, page.head, page.is_closed, encode(first_part))


def read_heads(conn: psycopg.Connection[Any], stream_ids: Sequence[int]) -> dict[int, tuple[int, bool]]:
    """Return {stream: (head, closed)} of the streams that exist."""
    return {id: (head.head, head.is_closed) for id, head in message_log.read_heads(conn, stream_ids).items()}
