"""Fetches pages for group members without access to the database, on the pool's threads.

A page is for a granted stream, and contains what `sublet_storage.log.fetch` reads. It may end before the block does:
positions are per message, so the next page continues there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pyarrow as pa

from sublet_leader.feed.history_and_follow import READ_BYTES, encode, split_table
from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.errors import PositionGone
from sublet_protocol.gate.gate import Caller
from sublet_protocol.messages.member_reads import FetchedPage, FetchPositionGone, FetchRequest
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.groups.admin.access_snapshot import find_streams_of_groups, read_groups_of_streams
from sublet_storage.groups.consumer_progress import check_granted_here
from sublet_storage.log import fetch as message_log
from sublet_storage.log.deleted_streams import find_deleted_streams

PAGE_BYTES = 8 << 20
"""A page is cut off after this many bytes. More than `READ_BYTES` of compressed messages mostly expand to, as what is
cut off is read again."""


def check_may_fetch(conn: psycopg.Connection[Any], caller: Caller, request: FetchRequest) -> None:
    """Raise `PermissionDenied` unless a group that the caller may join reads the stream, within the requested range. A
    deleted stream is of no group: reading it, which returns that it is gone, needs the right to join some group."""
    if caller.principal is None:
        return
    caller.check_token()
    if not caller.may_somewhere(Right.JOIN):
        raise caller.denied_error(Right.JOIN, request.filter)
    groups = read_groups_of_streams(conn, [request.stream_id])
    if any(filter.covers(request.filter) and caller.may(Right.JOIN, filter, group) for _, group, filter in groups):
        return
    if groups or not find_deleted_streams(conn, [request.stream_id]):
        raise caller.denied_error(Right.JOIN, request.filter)


def filter_fetchable(conn: psycopg.Connection[Any], caller: Caller, stream_ids: Sequence[int]) -> Sequence[int]:
    """Return those of the streams that are read by groups that the caller may join; without a right to join any, none,
    and the database is not queried."""
    if caller.principal is None:
        return stream_ids
    caller.check_token()
    if not caller.may_somewhere(Right.JOIN):
        return ()
    groups = read_groups_of_streams(conn, stream_ids)
    may_join = [group_id for group_id, name, filter in groups if caller.may(Right.JOIN, filter, name)]
    return find_streams_of_groups(conn, stream_ids, may_join) if may_join else ()


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
