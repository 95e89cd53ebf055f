"""Restores payloads into Postgres; their objects are orphaned in the same transaction.

What cannot be restored holds up nothing else: it stays where it is, and is reported at the end.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg
from msgspec import Struct

from sublet_protocol.domain.errors import PoisonBlock, SubletError
from sublet_storage.objects import unreferenced_objects
from sublet_storage.objects.remote_reads import read_payloads
from sublet_storage.objects.unreferenced_objects import BlockOwner

BATCH_BLOCKS: Final = 32

_OUTSIDE = """
select g.generation_id, s.stream_id from generation g join stream s using (generation_id)
 where g.space_id = %s and g.state <> 'gone' and s.tiered_offset is not null
   and check_partition(g.generation_id, s.stream_id) order by 1, 2"""

_BLOCKS = """
select end_offset, count, codec, topics, payload, array[uri, uri_bytes::text] || (select payload_locations_of(%s))
  from block
 where generation_id = %s and stream_id = %s and end_offset > %s and uri is not null order by end_offset limit %s"""

_BACK = """
update block set payload = %s, uri = null, uri_bytes = null
 where generation_id = %s and stream_id = %s and end_offset = %s and uri = %s"""

_ALL_BACK = "update stream set tiered_offset = null where stream_id = %s"

Connection = psycopg.Connection[Any]


class _RestoreFailures(Struct):
    """The payloads that could not be restored: their number, and the error of the first."""

    count: int = 0
    first: Exception | None = None

    def note(self, error: Exception) -> None:
        self.count, self.first = self.count + 1, self.first or error


def restore_payloads(conn: Connection, space_id: int) -> int:
    """Restore all payloads of a space whose location was removed before; return the number of blocks. It may be
    repeated.

    Raise the error of the first that could not be restored, after all others were: `PayloadUnavailable`,
    `PayloadObjectUnreadable`, `PayloadDamaged`.
    """
    brought, failures = 0, _RestoreFailures()
    for generation_id, stream_id in conn.execute(_OUTSIDE, (space_id,)).fetchall():
        owner, last_offset, previous_count = BlockOwner(space_id, generation_id, stream_id), -1, failures.count
        while rows := _read_next(conn, owner, last_offset):
            last_offset = rows[-1][0]
            brought += _restore_blocks(conn, owner, rows, failures)
        if failures.count == previous_count:
            conn.execute(_ALL_BACK, (stream_id,))
    if failures.first is not None:
        raise _summarize_failures(brought, failures.count, failures.first)
    return brought


def _read_next(conn: Connection, owner: BlockOwner, last_offset: int) -> list[tuple[Any, ...]]:
    parameters = (owner.space_id, owner.generation_id, owner.stream_id, last_offset, BATCH_BLOCKS)
    return conn.execute(_BLOCKS, parameters, prepare=False, binary=True).fetchall()


def _restore_blocks(
    conn: Connection, owner: BlockOwner, rows: list[tuple[Any, ...]], failures: _RestoreFailures
) -> int:
    payloads = read_payloads(owner.generation_id, owner.stream_id, rows)
    with conn.transaction():
        back = []
        for row, payload in zip(rows, payloads, strict=True):
            if isinstance(payload, Exception):
                failures.note(payload)
                continue
            assert payload is not None, "only what lies outside was asked for"
            block_key = (owner.generation_id, owner.stream_id, row[0], row[5][0])
            if conn.execute(_BACK, (memoryview(payload), *block_key), prepare=False).rowcount:
                back.append((row[5][0], row[0]))
        unreferenced_objects.mark_for_deletion(conn, owner, back, was_named=True)
    return len(back)


def _summarize_failures(brought: int, failed_count: int, error: Exception) -> Exception:
    """Return what hindered the first, which names it, and how much else there is."""
    prefix = f"{brought} payloads are back in Postgres, and {failed_count} are not. The first: "
    if isinstance(error, PoisonBlock):
        return type(error)(error.stream_id, error.offsets, error.detail, prefix)
    return type(error)(f"{prefix}{error}") if isinstance(error, SubletError) else error
