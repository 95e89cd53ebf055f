"""Queries and writes of consumers: progress in their own transactions, session epochs, and plans.

All are functions of the database that run with its owner's rights: a consumer's role needs no right on the tables. What
is about a grant demands the grant's key, what is about a session its name and epoch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any

import psycopg
from msgspec import Struct
from psycopg import sql

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import GrantLost, PermissionDenied, UnknownOutcome, UsageError
from sublet_protocol.domain.grant_keys import GrantSecret, timeline_number
from sublet_protocol.domain.in_doubt_range import InDoubtRange, pending_in_doubt
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.bounded_connection import BoundedConnection, check_timeline_number
from sublet_storage.db.connect import map_rejection, resolve_schema_name
from sublet_storage.spaces.space_queries import read_matching_filters

BEFORE_COMMIT_S = 10.0
"""How long a client that has moved progress may idle before its COMMIT. Then the server rolls back: a frozen client
would block the stream for every session."""

OUTCOME_TIMEOUT_S = 20.0
"""How long a client that lost the answer to a commit waits until the server has ended that transaction: longer than it
lets a client idle there."""

MAX_IDLE_S = 2_000_000.0
"""Postgres takes no more than 2^31 milliseconds."""

POLL_INTERVAL_S = 0.02
"""Between two checks whether it has."""

_LOST = "SB001"
"""The SQL state by which the function `advance` reports that it moved nothing."""
_ISOLATION = "SB003"
"""That by which a table of ours refuses a transaction of another isolation level than read committed."""

_TIMELINE = "substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8)"

_ADVANCE = sql.SQL(
    f"""
select pg_current_xact_id()::text, {_TIMELINE}, set_config('idle_in_transaction_session_timeout', %s, true),
       {{}}.advance(%s::bigint, %s::bigint, %s::bigint, %s::bigint, %s::bytea, %s::jsonb, %s::jsonb)"""
)

_STATUS = f"select case when {_TIMELINE} = %(timeline)s then pg_xact_status(%(number)s::xid8) end"


class LastPlannedRange(Struct, frozen=True):
    """The last planned range of a stream, by the calling session; `is_ours`: it holds the stream, or the stream is
    reserved for it; `is_pending`: the range is not done. `grant_id`: under which the session holds it now; None if it
    does not. `saved_at`: when it was saved, by the database's clock."""

    in_doubt: InDoubtRange
    is_pending: bool
    is_ours: bool
    grant_id: int | None
    saved_at: float = 0.0

    @property
    def is_done(self) -> bool:
        """Return whether there were messages in it, and progress has passed them."""
        return not self.is_pending and self.in_doubt.end > self.in_doubt.start

    @property
    def timeline_number(self) -> int:
        """Return that of the database where it was granted."""
        return timeline_number(self.in_doubt.grant_id)


class SessionIdentity(Struct, frozen=True):
    """A process of a session with a stable name; a higher epoch means a newer process."""

    name: str
    epoch: int


class PostgresTransactionId(Struct, frozen=True):
    """A transaction that is about to commit: its number on the server, on one timeline of the server's. After a
    failover the numbers of lost transactions are used again."""

    transaction: str
    timeline: str


def compute_idle_limit_s(batch_s: float) -> float:
    """Return how long a client may idle in a user's transaction: longer than a batch may take."""
    return min(batch_s + BEFORE_COMMIT_S, MAX_IDLE_S)


class LaggingStream(Struct, frozen=True):
    """A stream with messages that the group has not consumed; `is_anothers`: another session holds it, or it is
    reserved for one."""

    stream_id: int
    position: int
    head: int
    status: str
    is_anothers: bool


def next_session_epoch(
    conn: psycopg.Connection[Any], subscription: Subscription, session: str, *, schema: str | None = None
) -> int:
    """Return a number above all that were drawn before for that name in that group, also after the database was
    restored from a backup. Drawing one does not fence any process. Raise `PermissionDenied` where the database's user
    has drawn for too many names.

    Call it outside of a transaction: the next caller waits for its end.
    """
    call = sql.SQL("select {}.next_session_epoch(%s::text, %s::text)").format(
        sql.Identifier(resolve_schema_name(schema, conn))
    )
    with map_rejection(PermissionDenied):
        ((epoch,),) = conn.execute(call, (str(subscription), session)).fetchall()
    return int(epoch)


def advance(
    conn: psycopg.Connection[Any],
    group_id: int,
    stream_id: int,
    grant_id: int,
    grant_key: GrantSecret,
    position: int,
    *,
    consumed: ConsumedFrontier | None = None,
    in_doubt: InDoubtRange | None = None,
    schema: str | None = None,
) -> PostgresTransactionId:
    """Move the group's progress in the transaction that is open, so that it commits with it or not at all. Of a group
    that is atomic, `consumed` is part of the progress. `in_doubt`: only if that is still what was planned last.

    The result shows later whether it was committed: `is_committed`. From now on the server ends the transaction
    when the client idles for `BEFORE_COMMIT_S`. Raise `GrantLost` unless the stream is held under that grant, of
    which this is the key, on the timeline on which it was granted, its progress is below this one, and its head not.
    The transaction is then broken, and can only be rolled back. `UsageError` where it is not at read committed.
    """
    documents = [None if part is None else json.dumps(part.to_json()) for part in (consumed, in_doubt)]
    idle = f"{BEFORE_COMMIT_S:g}s"
    try:
        row = conn.execute(
            _ADVANCE.format(sql.Identifier(resolve_schema_name(schema, conn))),
            (idle, group_id, stream_id, grant_id, position, grant_key.reveal(), *documents),
        ).fetchone()
    except psycopg.Error as error:
        if error.sqlstate == _LOST:
            raise GrantLost(group_id, stream_id, grant_id, position) from error
        if error.sqlstate == _ISOLATION:
            raise UsageError(f"{error.diag.message_primary}. {error.diag.message_hint}") from error
        raise
    assert row is not None
    return PostgresTransactionId(row[0], row[1])


def is_committed(
    conn: psycopg.Connection[Any], attempt: PostgresTransactionId, timeout_s: float = OUTCOME_TIMEOUT_S
) -> bool | None:
    """Return whether the transaction of that number was committed; None if this server cannot answer, as it is another
    since.

    False is certain. True is to be confirmed by what it moved: after a crash of the server, numbers whose transactions
    had left nothing on disk are given to others. Waits for the transaction's end; raises `UnknownOutcome` if it has
    none after `timeout_s`. Call it outside of a transaction.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            row = conn.execute(_STATUS, {"timeline": attempt.timeline, "number": attempt.transaction}).fetchone()
        except psycopg.errors.InvalidParameterValue:  # after such a crash the number is in the future
            return False
        assert row is not None
        (status,) = row
        if status is None:
            return None
        if status != "in progress":
            return bool(status == "committed")
        if time.monotonic() >= deadline:
            raise UnknownOutcome(
                f"transaction {attempt.transaction}, whose commit got no answer, is still in progress on the server. "
                "Try again."
            )
        time.sleep(POLL_INTERVAL_S)


def check_granted_here(conn: BoundedConnection, stream_id: int, grant_id: int) -> None:
    """Raise `TimelineChanged` where the stream was granted on another timeline of the database: what follows there on
    what was read may be something else on this one. The group's first leader on this one grants it anew."""
    check_timeline_number(conn, timeline_number(grant_id), f"stream {stream_id} was granted")


def read_position(
    conn: psycopg.Connection[Any],
    group_id: int,
    stream_id: int,
    grant_id: int,
    grant_key: GrantSecret,
    *,
    schema: str | None = None,
) -> int | None:
    """Return how far the stream came under that grant, also when it is over; None where the history does not have it,
    or the key is another's.

    Waits for a transaction that is about to move it, so that it can be called after a connection was lost in a commit.
    """
    position = _read_of_grant(conn, "read_progress", (group_id, stream_id, grant_id), grant_key, schema)
    return None if position is None else int(position)


def read_consumed_frontier(
    conn: psycopg.Connection[Any],
    group_id: int,
    stream_id: int,
    grant_id: int,
    grant_key: GrantSecret,
    *,
    schema: str | None = None,
) -> ConsumedFrontier | None:
    """Return what an atomic group has consumed of the stream in entire epochs; None if the grant is over, or the key is
    of another grant."""
    consumed = _read_of_grant(conn, "read_consumed_frontier", (group_id, stream_id, grant_id), grant_key, schema)
    return None if consumed is None else ConsumedFrontier.from_json(consumed)


def _read_of_grant(
    conn: psycopg.Connection[Any],
    function: str,
    grant: tuple[int, int, int],
    grant_key: GrantSecret,
    schema: str | None,
) -> Any:
    """Return what that function of the database has about a grant: (group id, stream id, grant id)."""
    call = sql.SQL("select {}.{}(%s::bigint, %s::bigint, %s::bigint, %s::bytea)").format(
        sql.Identifier(resolve_schema_name(schema, conn)), sql.Identifier(function)
    )
    row = conn.execute(call, (*grant, grant_key.reveal())).fetchone()
    return None if row is None else row[0]


def read_last_planned_ranges(
    conn: psycopg.Connection[Any],
    group_id: int,
    session: SessionIdentity,
    stream_ids: Iterable[int] | None,
    *,
    schema: str | None = None,
) -> dict[int, LastPlannedRange]:
    """Return {stream: its last planned range} for those of the streams, or of all, whose last range was planned by this
    session, and which has no later process."""
    call = sql.SQL("select * from {}.read_planned_ranges(%s::bigint, %s::text, %s::bigint, %s::bigint[])").format(
        sql.Identifier(resolve_schema_name(schema, conn))
    )
    planned_ranges = {}
    of_streams = None if stream_ids is None else list(stream_ids)
    rows = conn.execute(call, (group_id, session.name, session.epoch, of_streams)).fetchall()
    for stream_id, is_ours, grant_id, reached, frontier, doubt, saved_at in rows:
        in_doubt = InDoubtRange.from_json(doubt)
        done_before = None if frontier is None else ConsumedFrontier.from_json(frontier)
        is_open = pending_in_doubt(in_doubt, reached, done_before) is not None
        planned_ranges[stream_id] = LastPlannedRange(in_doubt, is_open, is_ours, grant_id, saved_at)
    return planned_ranges


def read_ended_grants(
    conn: psycopg.Connection[Any],
    group_id: int,
    session: SessionIdentity,
    grants: Iterable[tuple[int, int]],
    *,
    schema: str | None = None,
) -> dict[tuple[int, int], tuple[int, bool]]:
    """Return {(stream, grant): (the offset that this session reached under it, whether that was the stream's end)} for
    those of the `grants` that history has, except of streams that were reset since."""
    call = sql.SQL(
        "select * from {}.read_ended_grants(%s::bigint, %s::text, %s::bigint, %s::bigint[], %s::bigint[])"
    ).format(sql.Identifier(resolve_schema_name(schema, conn)))
    streams, grant_ids = zip(*grants, strict=True)
    rows = conn.execute(call, (group_id, session.name, session.epoch, list(streams), list(grant_ids))).fetchall()
    return {(stream_id, grant_id): (reached, is_finished) for stream_id, grant_id, reached, is_finished in rows}


def read_lagging_streams(
    conn: psycopg.Connection[Any],
    group_id: int,
    session: SessionIdentity,
    filter: TopicFilter,
    *,
    schema: str | None = None,
) -> dict[int, LaggingStream]:
    """Return {stream: what the session's group has before it}, of those that it has something before it in, also where
    no leader has made a row yet. What a session is to have read that ends when it has had all there was is known by
    this."""
    call = sql.SQL("select * from {}.ahead_of(%s::bigint, %s::text, %s::bigint, %s::text[], %s::text[])")
    filters = read_matching_filters(conn, filter)
    identity = (group_id, session.name, session.epoch)
    rows = conn.execute(
        call.format(sql.Identifier(resolve_schema_name(schema, conn))), (*identity, filters["open"], filters["closed"])
    )
    return {row[0]: LaggingStream(*row) for row in rows}
