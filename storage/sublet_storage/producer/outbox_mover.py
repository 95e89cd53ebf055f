"""Moves messages that were published by SQL from the outbox into the log.

`publish(...)` in `migrations/sql/0101_outbox.sql` writes a row of `outbox` in its caller's transaction. What has
committed is read here without a lock, made into blocks, and then moved in one short transaction: the rows are deleted
and the blocks appended, or neither. So a message is stored exactly once, whatever dies when.

Each look takes the oldest rows that are visible at that instant, by transaction and id, and comes after the last move.
A transaction that begins after another has committed has the higher number, and lies behind it. The leadership row and
the streams are locked for the move alone, since renewals and publishers wait for them.

While a transaction is open for long, Postgres can vacuum nothing that was deleted since, and a read from the first row
on walks over all of it. So a look begins where the last one ended, and besides reads the transactions that were running
then.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

import psycopg
from msgspec import Struct

from sublet_storage.db.store_connection import Guard
from sublet_storage.log.append import AppendOutcome, BlockAppend, append
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.outbox_conversion import FETCHED_BYTES, OutboxRow, build_appends, validate_rows

MOVED_ROWS: Final = 8192
MOVED_BYTES: Final = 4 * 1024 * 1024
"""Maximum number and size of messages moved at once; a single one may be larger."""

ROUTING_MAX_AGE_S: Final = 5.0
"""A closed stream is noticed at once; this is for what else may have changed in a space."""

LOCKED_S: Final = 10.0
"""How long locked rows are skipped after one was found; it takes a write per row to find them."""

RETRY_INTERVAL_S: Final = 60.0
"""How often everything is looked at, in case rows were written under a transaction that is not their own."""

# What could not be published is not even fetched where it is too large; a time that has no microseconds since 1970
# becomes one that is refused for certain. The snapshot is that of the statement, and comes with the first line.
_READ = """
select place::text, outbox_id, topic, case when size <= %(fetched)s then key end,
       case when size <= %(fetched)s then value end, case when size <= %(fetched)s then headers::text end,
       case when moment >= '10000-01-01 00:00:00+00' then 4611686018427387904
            when moment < '0001-01-01 00:00:00+00' then -4611686018427387904
            else (extract(epoch from moment) * 1000000)::bigint end,
       size, sized.xact::text, case when coalesce(before, 0) = 0 then pg_current_snapshot()::text end
  from (values (true)) as always (line) left join (
    select *, sum(size) over (order by xact, outbox_id) - size as before from (
      select *, coalesce("timestamp", at) as moment,
             least(octet_length(topic) + coalesce(octet_length(key), 0)::bigint + coalesce(octet_length(value), 0)
                   + coalesce(pg_column_size(headers), 0), 1000000000)::integer as size
        from {rows} order by xact, outbox_id limit %(rows)s {locked}) near) sized on before < %(bytes)s
 order by sized.xact, outbox_id"""
_ALL = "(select ctid as place, * from outbox) waiting"
_SINCE = """(
  (select ctid as place, * from outbox where xact = any(%(running)s::text[]::xid8[])
    order by xact, outbox_id limit %(rows)s)
  union all
  (select ctid as place, * from outbox
    where (xact, outbox_id) > (%(xact)s::text::xid8, %(outbox_id)s::bigint) and xact <> all(%(running)s::text[]::xid8[])
    order by xact, outbox_id limit %(rows)s)) waiting"""
_READ_ALL = _READ.format(rows=_ALL, locked="")
_READ_FREE = _READ.format(rows=_ALL, locked="for update skip locked")
_READ_SINCE = _READ.format(rows=_SINCE, locked="")

# By place, which costs the same however much was deleted before; the ids show whether they are still the same rows.
_TAKE = "delete from outbox where ctid = any(%s::text::tid[]) returning outbox_id"
_SET_ASIDE = """
with gone as (delete from outbox where ctid = any(%s::text::tid[]) returning *)
insert into outbox_rejected (outbox_id, topic, key, value, headers, "timestamp", at, reason)
select outbox_id, topic, key, value, headers, "timestamp", at, bad.reason
  from gone join unnest(%s::bigint[], %s::text[]) as bad (outbox_id, reason) using (outbox_id)
returning outbox_id"""

_WAITING = """
select count(*), extract(epoch from clock_timestamp() - min(at))::float8, (select count(*) from outbox_rejected)
  from outbox"""


class OutboxBacklog(Struct, frozen=True):
    """The number of messages still to be moved, the age in seconds of the oldest, and the number of rejected ones."""

    messages: int
    oldest_age_s: float | None
    rejected: int


class OutboxMoveResult(Struct, frozen=True):
    """The result of one move: messages moved into the log, the new heads {stream_id: head}, {outbox_id: why rejected}.

    `has_more`: it moved the maximum of one move, and the next need not wait.
    """

    messages: int
    heads: Mapping[int, int]
    rejected: Mapping[int, str]
    has_more: bool = False


NOTHING: Final = OutboxMoveResult(0, {}, {})


class _ScanPosition(Struct, frozen=True):
    """The last moved row: all up to it are moved, except what the transactions wrote that were running then."""

    xact: str
    outbox_id: int
    running: list[str]


class _MoveConflict(Exception):
    """An error that rolls a move back: a stream was closed, or a row taken or locked by hand, since they were read."""


class OutboxMover:
    """The mover of the outbox, over one autocommit connection. `guard` is called first in each move."""

    def __init__(self, conn: psycopg.Connection[Any], guard: Guard) -> None:
        self._conn, self._guard = conn, guard
        self._routes: PublisherRoutingTable | None = None
        self._scan_position: _ScanPosition | None = None
        self._routed_at = self._locked_at = self._scanned_at = float("-inf")

    def move(self, rows: int = MOVED_ROWS, bytes: int = MOVED_BYTES) -> OutboxMoveResult:
        """Move the oldest messages into the log, and aside what could not have been published: all of it, or nothing.

        `NOTHING` also where a stream was closed meanwhile: the next call routes again. A row that is kept locked is
        passed over from the next call on. Raise what the guard does; errors of the database pass through, and the next
        call moves what was not moved.
        """
        messages, scan_position = self._read(rows, bytes)
        if not messages:
            self._scan_position = scan_position
            return NOTHING
        routes = self._refresh_routes()
        batches, refused = validate_rows(messages, routes)
        heads = self._store(messages, refused, [each for batch in batches for each in build_appends(batch, routes)])
        if heads is None:
            return NOTHING
        self._scan_position = scan_position
        more = len(messages) == rows or sum(row.size for row in messages) >= bytes
        return OutboxMoveResult(len(messages) - len(refused), heads, refused, more)

    def _store(
        self, rows: Sequence[OutboxRow], refused: Mapping[int, str], appends: Sequence[BlockAppend]
    ) -> dict[int, int] | None:
        """Return the move itself, in one transaction as short as can be: the new heads. None: it has to be done
        over."""
        try:
            with self._conn.transaction():
                self._guard(self._conn)
                self._take([row for row in rows if row.outbox_id not in refused])
                self._set_aside([row for row in rows if row.outbox_id in refused], refused)
                return self._append(appends)
        except _MoveConflict:
            self._routes = self._scan_position = None
            return None

    def _read(self, rows: int, bytes: int) -> tuple[list[OutboxRow], _ScanPosition | None]:
        """Return the oldest rows, and what will have been seen once they are moved."""
        now = time.monotonic()
        passing_over = now < self._locked_at + LOCKED_S
        if passing_over or now > self._scanned_at + RETRY_INTERVAL_S:
            self._scanned_at, self._scan_position = now, None
        statement = _READ_FREE if passing_over else _READ_SINCE if self._scan_position else _READ_ALL
        limits: dict[str, Any] = {"rows": rows, "bytes": bytes, "fetched": FETCHED_BYTES}
        since = self._scan_position or _ScanPosition("0", 0, [])
        limits |= {"xact": since.xact, "outbox_id": since.outbox_id, "running": since.running}
        outbox_rows = [OutboxRow._make(row) for row in self._conn.execute(statement, limits, prepare=True, binary=True)]
        scan_position = None if passing_over else _parse_scan_position(outbox_rows)
        return [] if outbox_rows[0].ctid is None else outbox_rows, scan_position

    def _refresh_routes(self) -> PublisherRoutingTable:
        if self._routes is None or time.monotonic() > self._routed_at + ROUTING_MAX_AGE_S:
            self._routed_at = time.monotonic()
            self._routes = PublisherRoutingTable.load(self._conn)
        return self._routes

    def _take(self, rows: Sequence[OutboxRow]) -> None:
        try:
            cursor = self._conn.execute(_TAKE, (_format_tuple_ids(rows),), prepare=True, binary=True)
        except psycopg.errors.LockNotAvailable:
            self._locked_at = time.monotonic()
            raise _MoveConflict from None
        _check_same(rows, cursor)

    def _set_aside(self, rows: Sequence[OutboxRow], reasons: Mapping[int, str]) -> None:
        if rows:
            details = [reasons[row.outbox_id] for row in rows]
            _check_same(
                rows,
                self._conn.execute(_SET_ASIDE, (_format_tuple_ids(rows), [row.outbox_id for row in rows], details)),
            )

    def _append(self, appends: Sequence[BlockAppend]) -> dict[int, int]:
        """Return the new head of each stream that got something."""
        heads: dict[int, int] = {}
        for each, answer in zip(appends, append(self._conn, appends) if appends else (), strict=True):
            if answer.outcome is not AppendOutcome.APPENDED or answer.end_offset is None:
                raise _MoveConflict
            heads[each.stream_id] = answer.end_offset
        return heads


def read_backlog(conn: psycopg.Connection[Any]) -> OutboxBacklog:
    """Return what lies in the outbox now, committed."""
    row = conn.execute(_WAITING).fetchone()
    assert row is not None
    return OutboxBacklog(*row)


def _parse_scan_position(rows: Sequence[OutboxRow]) -> _ScanPosition:
    """Return the last row from a snapshot of Postgres, xmin:xmax:running,running,...; an empty outbox is one row of
    nulls."""
    assert rows[0].snapshot is not None
    _, next_xact, running = rows[0].snapshot.split(":")
    last = (int(rows[-1].xact or next_xact), rows[-1].outbox_id or 0)
    # A row restored from a backup may bear a number that is still to come: what comes must not be taken for seen.
    xact, outbox_id = min(last, (int(next_xact), 0))
    return _ScanPosition(str(xact), outbox_id, running.split(",") if running else [])


def _format_tuple_ids(rows: Sequence[OutboxRow]) -> str:
    """Return the text of a Postgres array: made from a list, large ones would take their time."""
    return "{" + ",".join(f'"{row.ctid}"' for row in rows) + "}"


def _check_same(rows: Sequence[OutboxRow], deleted: psycopg.Cursor[Any]) -> None:
    if {row.outbox_id for row in rows} != {outbox_id for (outbox_id,) in deleted}:
        raise _MoveConflict
