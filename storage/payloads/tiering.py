"""Moving payloads out of Postgres: an object first, then the row that names it.

A stream's blocks are gone through once, in their order; `stream.tiered_offset` says how far. Of some blocks at a time
it is written down which objects there will be, the objects are written, and one short transaction lets those blocks
name them that are still what was read, and frees their payloads. Who dies in between leaves objects written down.

Blocks that are smaller than `LEAST_BYTES` stay: their row is as large.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import psycopg

from storage import compaction
from storage.log import consecutive
from storage.payloads import objects
from storage.payloads.objects import Owner
from storage.payloads.place import named, parse
from storage.payloads.stores import Store, store
from storage.payloads.together import together
from storage.routing import Space
from storage.turnover import Guard

LEAST_BYTES: Final = 4096
BATCH_BYTES: Final = 8 << 20
BATCH_BLOCKS: Final = 256
MOST_S: Final = 10.0
"""A pass over a space ends soon after that; the next goes on."""

_WORK = """
select s.stream_id, s.generation_id, s.tiered_offset, g.state = 'closed'
  from stream s join generation g using (generation_id)
 where g.space_id = %(space)s and g.state <> 'gone' and s.tiered_offset < s.head
   and (g.state = 'closed' or %(after)s::float8 is not null)
 order by s.generation_id, s.stream_id"""

_BLOCKS = """
select end_offset, count, codec, case when is_large then payload end,
       %(closed)s or appended_at <= clock_timestamp() - make_interval(secs => %(after)s::float8)
  from (select *, sum(case when is_large then octet_length(payload) else 0 end) over (order by end_offset) as upto
          from (select *, octet_length(payload) >= %(least)s as is_large from block
                 where generation_id = %(generation)s and stream_id = %(stream)s and end_offset > %(offset)s
                 order by end_offset limit %(blocks)s) found) sized
 where upto - case when is_large then octet_length(payload) else 0 end < %(bytes)s
 order by end_offset"""

_PREPARED = """
update space set payload_places = payload_places || %(place)s::text
 where space_id = %(space)s and payloads = %(place)s and not payload_places @> array[%(place)s::text]"""

_STILL = "select from space where space_id = %s and payloads = %s for share"

_NAME = """
update block b set payload = null, uri = n.uri, uri_bytes = n.bytes
  from unnest(%(ends)s::bigint[], %(counts)s::integer[], %(codecs)s::smallint[], %(uris)s::text[], %(bytes)s::bigint[],
              %(digests)s::bytea[]) as n (end_offset, count, codec, uri, bytes, digest)
 where b.generation_id = %(generation)s and b.stream_id = %(stream)s and b.end_offset = n.end_offset
   and b.count = n.count and b.codec = n.codec and b.uri is null and sha256(b.payload) = n.digest
returning b.uri"""

_ADVANCE = "update stream set tiered_offset = %s where stream_id = %s"

Connection = psycopg.Connection[Any]


@dataclass(frozen=True, slots=True)
class Moved:
    """What was moved: so many blocks, of so many bytes. `all`: there is no more to move for now."""

    blocks: int
    size: int
    all: bool


@dataclass(slots=True)
class _Stream:
    """One with blocks that were not looked at: those behind `offset`."""

    stream_id: int
    generation_id: int
    offset: int
    closed: bool


@dataclass(frozen=True, slots=True)
class _Block:
    """One to be moved, and its object to be."""

    end_offset: int
    count: int
    codec: int
    payload: bytes
    name: str
    uri: str


def tier_space(conn: Connection, space: Space, guard: Guard | None = None, most_s: float = MOST_S) -> Moved:
    """Move what is due to the space's place, for about so long; nothing where it has none. Autocommit.

    Raises `PayloadUnavailable`: what was moved until then has been.
    """
    if space.payloads is None:
        return Moved(0, 0, True)
    begun, blocks, size = time.monotonic(), 0, 0
    mover = _Mover(conn, space, store(parse(space.payloads)), guard)
    for stream in mover.work():
        while True:
            moved = mover.batch(stream)
            blocks, size = blocks + moved.blocks, size + moved.size
            if moved.all:
                break
            if time.monotonic() - begun >= most_s:
                return Moved(blocks, size, False)
    return Moved(blocks, size, True)


class _Mover:
    """One pass over a space."""

    def __init__(self, conn: Connection, space: Space, place: Store, guard: Guard | None) -> None:
        self._conn, self._space, self._store = conn, space, place
        self._guard: Guard = guard or (lambda _: None)

    def work(self) -> list[_Stream]:
        """The streams with something to look at, when the place is known to be there."""
        due = {"space": self._space.space_id, "after": self._space.tier_after_s}
        found = [_Stream(*row) for row in self._conn.execute(_WORK, due)]
        if found:
            self._prepare()
        return found

    def batch(self, stream: _Stream) -> Moved:
        """Some of its blocks."""
        if stream.closed and stream.offset == 0:  # few large objects rather than many small ones
            compaction.compact_stream(self._conn, stream.stream_id, older_than_s=0, guard=self._guard)
        rows = self._rows(stream)
        if not rows:
            return Moved(0, 0, True)
        blocks = [self._planned(stream, row) for row in rows if row[3] is not None]
        if blocks:
            self._write(stream, blocks)
        moved = self._let_them_name(stream, rows, blocks)
        return Moved(len(moved), sum(len(block.payload) for block in moved), len(moved) < len(blocks))

    def _prepare(self) -> None:
        """A place in use has a marker, and the space knows it; another may be told to it meanwhile."""
        row = self._conn.execute(
            "select payload_places @> array[payloads] from space where space_id = %s", (self._space.space_id,)
        ).fetchone()
        is_known = row is not None and row[0]
        if is_known:
            self._store.check()
        self._store.prepare()  # also where it is there: who may not write is to know it before objects are written down
        if is_known:
            return
        with self._conn.transaction():
            self._guard(self._conn)
            self._conn.execute(_PREPARED, {"space": self._space.space_id, "place": self._space.payloads})

    def _rows(self, stream: _Stream) -> list[tuple[Any, ...]]:
        rows = self._conn.execute(
            _BLOCKS,
            {
                "generation": stream.generation_id,
                "stream": stream.stream_id,
                "offset": stream.offset,
                "closed": stream.closed,
                "after": self._space.tier_after_s,
                "least": LEAST_BYTES,
                "blocks": BATCH_BLOCKS,
                "bytes": BATCH_BYTES,
            },
            binary=True,
        ).fetchall()
        young = next((index for index, row in enumerate(rows) if not row[4]), len(rows))
        return rows[: min(young, consecutive([(row[0] - row[1], row[0]) for row in rows]))]

    def _planned(self, stream: _Stream, row: Sequence[Any]) -> _Block:
        end_offset, count, codec, payload = row[:4]
        name = named(stream.generation_id, stream.stream_id, end_offset, payload).text
        return _Block(end_offset, count, codec, payload, name, f"{self._store.place.prefix}/{name}")

    def _write(self, stream: _Stream, blocks: list[_Block]) -> None:
        with self._conn.transaction():
            self._guard(self._conn)
            objects.intend(self._conn, self._owner(stream), [(block.uri, block.end_offset) for block in blocks])
        together(lambda block: self._store.put(block.name, block.payload), blocks)

    def _let_them_name(self, stream: _Stream, rows: Sequence[Sequence[Any]], blocks: list[_Block]) -> list[_Block]:
        """The blocks that are moved now. Of others the objects are doomed, and they are looked at again."""
        with self._conn.transaction():
            self._guard(self._conn)
            is_wanted = self._conn.execute(_STILL, (self._space.space_id, self._space.payloads)).rowcount
            claimed = objects.claim(self._conn, [block.uri for block in blocks]) if is_wanted else set()
            named = self._name(stream, [block for block in blocks if block.uri in claimed])
            left = [block for block in blocks if block.uri not in named]
            objects.doom(self._conn, self._owner(stream), [(block.uri, block.end_offset) for block in left])
            first_left = min((block.end_offset for block in left), default=None)
            stream.offset = max(
                (row[0] for row in rows if first_left is None or row[0] < first_left), default=stream.offset
            )
            self._conn.execute(_ADVANCE, (stream.offset, stream.stream_id))
        return [block for block in blocks if block.uri in named]

    def _name(self, stream: _Stream, blocks: list[_Block]) -> set[str]:
        parameters = {
            "generation": stream.generation_id,
            "stream": stream.stream_id,
            "ends": [block.end_offset for block in blocks],
            "counts": [block.count for block in blocks],
            "codecs": [block.codec for block in blocks],
            "uris": [block.uri for block in blocks],
            "bytes": [len(block.payload) for block in blocks],
            "digests": [hashlib.sha256(block.payload).digest() for block in blocks],
        }
        return {row[0] for row in self._conn.execute(_NAME, parameters)}

    def _owner(self, stream: _Stream) -> Owner:
        return Owner(self._space.space_id, stream.generation_id, stream.stream_id)
