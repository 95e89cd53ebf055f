"""Rollover: closes the open streams of spaces, and opens the next generations.

All in one transaction, so that no key has two open streams at any instant. The parents of a new stream are the streams
closed in that transaction from which one of its keys may come; a group grants a child only after all its parents are
consumed, and so the order of each key survives the move.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import psycopg
from msgspec import Struct
from psycopg import sql

from sublet_protocol.domain.errors import Unavailable
from sublet_storage.log.partition_reads import format_partition_name
from sublet_storage.spaces.routing import HashRange, Space, has_moved_topics, ranges_overlap, split_ring
from sublet_storage.util.retry import Backoff, call_with_retry

LOCK_TIMEOUT_S = 2.0
RETRY_TIMEOUT_S = 20.0

_LOCKED = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)

_T = TypeVar("_T")


class _Parent(Struct, frozen=True):
    """A stream that is being closed, with the space it belonged to as that was before the change."""

    stream_id: int
    space: Space
    range: HashRange


def retry_on_lock_timeout(conn: psycopg.Connection[Any], change: Callable[[], _T]) -> _T:
    """Run the change in a transaction of its own; begin again on a lock timeout."""

    def attempt() -> _T:
        with conn.transaction():
            conn.execute(f"set local lock_timeout = '{LOCK_TIMEOUT_S}s'")
            return change()

    backoff = Backoff(max_s=0.5, total_s=RETRY_TIMEOUT_S)
    try:
        return call_with_retry("lock spaces", attempt, lambda error: isinstance(error, _LOCKED), backoff)
    except _LOCKED as error:
        raise Unavailable(
            f"the spaces are locked by others: no change within {RETRY_TIMEOUT_S:g} s. "
            "Look for a long transaction (pg_stat_activity), then try again."
        ) from error


def roll_over_spaces(
    conn: psycopg.Connection[Any], closing_spaces: list[Space], opening_spaces: list[Space], changed: int
) -> dict[int, int]:
    """Close all open streams of `closing_spaces`, and open the next generation of each of `opening_spaces`; return
    {space_id: generation_id}.

    Only in or from the `changed` space may parents be of another space.
    """
    opened = {space.space_id: _open_generation(conn, space) for space in opening_spaces}
    parents = _close(conn, closing_spaces)
    for space in opening_spaces:
        streams = [
            (space.space_id, opened[space.space_id], *hash_range, _find_parents(parents, space, hash_range, changed))
            for hash_range in split_ring(space.shards)
        ]
        with conn.cursor() as cursor:
            cursor.executemany(
                "insert into stream (space_id, generation_id, hash_from, hash_to, parents) values (%s, %s, %s, %s, %s)",
                streams,
            )
    return opened


def _find_parents(closed: list[_Parent], space: Space, range_: HashRange, changed: int) -> list[int]:
    return [
        parent.stream_id
        for parent in closed
        if ranges_overlap(parent.range, range_) and has_moved_topics(parent.space, space, changed)
    ]


def _open_generation(conn: psycopg.Connection[Any], space: Space) -> int:
    """Return the next generation with its partition: LIKE and ATTACH, which wait for no reader and hold none up."""
    row = conn.execute(
        "insert into generation (space_id, ordinal, filter) select %(space)s, coalesce(max(ordinal) + 1, 0), %(filter)s"
        " from generation where space_id = %(space)s returning generation_id",
        {"space": space.space_id, "filter": space.filter.text},
    ).fetchone()
    assert row is not None
    conn.execute("select create_partition(%s)", (row[0],))
    return int(row[0])


def partition_table(generation_id: int) -> sql.Identifier:
    """Return the table that holds the blocks of a generation."""
    return sql.Identifier(format_partition_name(generation_id))


def lock_streams(conn: psycopg.Connection[Any], spaces: list[Space]) -> None:
    """Lock the streams of these spaces against appends until the transaction ends."""
    conn.execute(
        "select from stream where space_id = any(%s) and state = 'open' order by stream_id for no key update",
        ([space.space_id for space in spaces],),
    )


def _close(conn: psycopg.Connection[Any], spaces: list[Space]) -> list[_Parent]:
    by_id = {space.space_id: space for space in spaces}
    ids = list(by_id)
    lock_streams(conn, spaces)
    rows = conn.execute(
        "update stream set state = 'closed', closed_at = clock_timestamp() where space_id = any(%s) and state = 'open'"
        " returning stream_id, space_id, hash_from::text, hash_to::text",
        (ids,),
    ).fetchall()
    conn.execute(
        "update generation g set state = 'closed', closed_at = clock_timestamp() where state = 'open'"
        " and exists (select from stream s where s.generation_id = g.generation_id)"  # the one just opened has none
        " and space_id = any(%s)",
        (ids,),
    )
    return [_Parent(stream, by_id[space], (int(low), int(high))) for stream, space, low, high in sorted(rows)]
