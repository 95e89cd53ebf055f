"""What a consumer writes and asks itself: progress within its own transaction, which life of its session is the newer,
what is planned, and what lies before its group.

All are functions of the database that run with its owner's rights: a consumer's role needs no right on the tables.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from protocol.epochs import ConsumedFrontier
from protocol.errors import GrantLost
from protocol.in_doubt import InDoubt, still_open
from protocol.words import Filter
from storage.catalogue import filled
from storage.connect import schema_name

_LOST = "SB001"
"""The SQL state by which the function `advance` says that it moved nothing."""


@dataclass(frozen=True, slots=True)
class LastPlan:
    """What was planned last of a stream; `session`: who holds it, or for whom it is kept; `is_open`: it is not done.
    `grant_id`: under which it is held now; None if it is not."""

    in_doubt: InDoubt
    is_open: bool
    session: str | None
    grant_id: int | None


@dataclass(frozen=True, slots=True)
class Ahead:
    """A stream with messages that the group has not consumed; `session`: who has it, or for whom it is kept."""

    stream_id: int
    position: int
    head: int
    status: str
    session: str | None

    def is_anothers(self, session: str) -> bool:
        """Whether another member has it, or it is kept for one."""
        return self.status in ("held", "reserved") and self.session != session


def draw_session_epoch(conn: psycopg.Connection[Any], *, schema: str | None = None) -> int:
    """A number above all that any caller was given before, also after the database was restored from a backup.

    Draw outside of a transaction: whoever draws next waits for its end.
    """
    call = sql.SQL("select {}.draw_session_epoch()").format(sql.Identifier(schema_name(schema)))
    row = conn.execute(call).fetchone()
    assert row is not None
    return int(row[0])


def advance(
    conn: psycopg.Connection[Any],
    group_id: int,
    stream_id: int,
    grant_id: int,
    position: int,
    *,
    consumed: ConsumedFrontier | None = None,
    in_doubt: InDoubt | None = None,
    schema: str | None = None,
) -> None:
    """Move the group's progress in the transaction that is open, so that it commits with it or not at all. Of a group
    that is atomic, `consumed` is part of the progress. `in_doubt`: only if that is still what was planned last.

    Raises `GrantLost` unless the stream is held under that grant, its progress is below this one, and its head not. The
    transaction is then broken, and can only be rolled back.
    """
    call = sql.SQL("select {}.advance(%s::bigint, %s::bigint, %s::bigint, %s::bigint, %s::jsonb, %s::jsonb)")
    stored = [None if part is None else json.dumps(part.to_json()) for part in (consumed, in_doubt)]
    try:
        conn.execute(
            call.format(sql.Identifier(schema_name(schema))), (group_id, stream_id, grant_id, position, *stored)
        )
    except psycopg.Error as error:
        if error.sqlstate == _LOST:
            raise GrantLost(group_id, stream_id, grant_id, position) from error
        raise


def position(
    conn: psycopg.Connection[Any], group_id: int, stream_id: int, grant_id: int, *, schema: str | None = None
) -> int | None:
    """How far the stream came under that grant, also when it is over; None where history knows nothing of it.

    Waits for a transaction that is about to move it, so that whoever lost the connection in a commit can ask.
    """
    call = sql.SQL("select {}.progress(%s::bigint, %s::bigint, %s::bigint)").format(sql.Identifier(schema_name(schema)))
    row = conn.execute(call, (group_id, stream_id, grant_id)).fetchone()
    return None if row is None or row[0] is None else int(row[0])


def consumed(
    conn: psycopg.Connection[Any], group_id: int, stream_id: int, grant_id: int, *, schema: str | None = None
) -> ConsumedFrontier | None:
    """What is consumed of the stream in whole epochs, of a group that is atomic; None where the grant is over."""
    call = sql.SQL("select {}.consumed(%s::bigint, %s::bigint, %s::bigint)").format(sql.Identifier(schema_name(schema)))
    row = conn.execute(call, (group_id, stream_id, grant_id)).fetchone()
    return None if row is None or row[0] is None else ConsumedFrontier.of_json(row[0])


def last_plans(
    conn: psycopg.Connection[Any], group_id: int, stream_ids: Iterable[int], *, schema: str | None = None
) -> dict[int, LastPlan]:
    """{stream: what was planned last of it}, of those of which something was."""
    call = sql.SQL("select * from {}.planned(%s::bigint, %s::bigint[])").format(sql.Identifier(schema_name(schema)))
    found = {}
    rows = conn.execute(call, (group_id, list(stream_ids))).fetchall()
    for stream_id, session, grant_id, reached, frontier, doubt in rows:
        if doubt is not None:
            in_doubt = InDoubt.of_json(doubt)
            done_before = None if frontier is None else ConsumedFrontier.of_json(frontier)
            is_open = still_open(in_doubt, reached, done_before) is not None
            found[stream_id] = LastPlan(in_doubt, is_open, session, grant_id)
    return found


def ahead(
    conn: psycopg.Connection[Any], group_id: int, filter: Filter, *, schema: str | None = None
) -> dict[int, Ahead]:
    """{stream: what the group has before it}, of those that it has something before it in, also where no leader has
    made a row yet. What a session is to have read that ends when it has had all there was is known by this."""
    wanted = filled(conn).wanted(filter)
    call = sql.SQL("select * from {}.ahead_of(%s::bigint, %s::text[], %s::text[])")
    filters = [filter.text for filter, now in wanted.items() if now], [filter.text for filter in wanted]
    rows = conn.execute(call.format(sql.Identifier(schema_name(schema))), (group_id, *filters))
    return {row[0]: Ahead(*row) for row in rows}
