"""Bringing payloads back into Postgres: read, checked, stored again; their objects are doomed in that transaction."""

from __future__ import annotations

from typing import Any, Final

import psycopg

from storage.payloads import objects
from storage.payloads.objects import Owner
from storage.payloads.outside import fetched

BATCH_BLOCKS: Final = 32

_OUTSIDE = """
select g.generation_id, s.stream_id from generation g join stream s using (generation_id)
 where g.space_id = %s and g.state <> 'gone' and s.tiered_offset > 0 order by 1, 2"""

_BLOCKS = """
select end_offset, count, codec, topics, payload, (
         select array[uri, uri_bytes::text] || payload_places_of(g.space_id) from generation g
          where g.generation_id = b.generation_id)
  from block b
 where generation_id = %s and stream_id = %s and end_offset > %s and uri is not null order by end_offset limit %s"""

_BACK = """
update block set payload = %s, uri = null, uri_bytes = null
 where generation_id = %s and stream_id = %s and end_offset = %s and uri = %s"""

Connection = psycopg.Connection[Any]


def recall(conn: Connection, space_id: int) -> int:
    """Bring all payloads of a space back, whose place was taken from it before; how many blocks. It may be repeated.

    Raises `PayloadUnavailable`, `PayloadDamaged`: what was brought back until then has been.
    """
    brought = 0
    for generation_id, stream_id in conn.execute(_OUTSIDE, (space_id,)).fetchall():
        owner, after = Owner(space_id, generation_id, stream_id), -1
        while rows := conn.execute(_BLOCKS, (generation_id, stream_id, after, BATCH_BLOCKS), binary=True).fetchall():
            after = rows[-1][0]
            brought += _bring(conn, owner, rows)
        conn.execute("update stream set tiered_offset = 0 where stream_id = %s", (stream_id,))
    return brought


def _bring(conn: Connection, owner: Owner, rows: list[tuple[Any, ...]]) -> int:
    whole = fetched(owner.generation_id, owner.stream_id, rows)
    with conn.transaction():
        back = []
        for row, found in zip(rows, whole, strict=True):
            where = (owner.generation_id, owner.stream_id, row[0], row[5][0])
            if conn.execute(_BACK, (memoryview(found[4]), *where)).rowcount:
                back.append((row[5][0], row[0]))
        objects.doom(conn, owner, back, was_named=True)
    return len(back)
