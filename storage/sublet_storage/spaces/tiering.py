"""Moves payloads out of Postgres: first the object, then the row that names it.

A stream's blocks are gone through once, in their order; `stream.tiered_offset` has how far. Of some blocks at a time
the objects to come are registered, the objects are written, and one short transaction lets those blocks name them that
are still what was read, and frees their payloads. A crash in between leaves registered objects.

Blocks that are smaller than `MIN_BYTES` stay: their row is as large. What could not be moved holds up nothing that lies
behind it: each pass goes through all that follows it again, and tries it again.
"""

from __future__ import annotations

import contextlib
import hashlib
import secrets
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import psycopg
from msgspec import Struct
from msgspec.structs import replace
from psycopg import sql

from sublet_protocol.domain.errors import PayloadUnavailable, PoisonBlock, StaleTerm
from sublet_storage.db.store_connection import Guard
from sublet_storage.log.fetch import count_contiguous
from sublet_storage.objects import unreferenced_objects
from sublet_storage.objects.location import new_object_name, parse_location
from sublet_storage.objects.object_stores import get_store
from sublet_storage.objects.parallel_calls import TO_CHANGE, run_parallel, run_single
from sublet_storage.objects.unreferenced_objects import BlockOwner
from sublet_storage.spaces import small_block_compaction
from sublet_storage.spaces.rollover import partition_table
from sublet_storage.spaces.routing import Space

MIN_BYTES: Final = 4096
BATCH_BYTES: Final = 8 << 20
BATCH_BLOCKS: Final = 256
MAX_S: Final = 10.0
"""A pass over a space ends soon after this time; the next goes on."""

STREAMS_TO_TIER: Final = """
select * from stream where space_id = %(space)s and is_to_tier
union all
select * from stream where state = 'open' and space_id = %(space)s and coalesce(tiered_offset, 0) < head"""
"""In SQL: the streams of a space with blocks that are still to be examined, also gone ones."""

_WORK = f"""
select s.stream_id, s.generation_id, s.state = 'closed', s.tiered_offset, coalesce(s.tiered_offset, 0)
  from ({STREAMS_TO_TIER}) s join generation g using (generation_id)
 where g.state <> 'gone' and (s.state = 'closed' or %(after)s::float8 is not null)
 order by s.generation_id, s.stream_id"""

# Of an open stream the next block, in its partition: for the table itself the server would look up all of them.
_IS_DUE = """
select coalesce((
  select appended_at from {block}
   where generation_id = %(generation)s and stream_id = %(stream)s and end_offset > %(offset)s
   order by end_offset limit 1
) <= clock_timestamp() - make_interval(secs => %(after)s::float8), false)"""

_BLOCKS = """
select end_offset, count, case when is_moved then payload end, is_due
  from (select *, sum(case when is_moved then octet_length(payload) else 0 end) over (order by end_offset) as upto
          from (select *, is_due and octet_length(payload) >= %(least)s as is_moved
                  from (select *, %(closed)s or appended_at <= clock_timestamp()
                                    - make_interval(secs => %(after)s::float8) as is_due
                          from block
                         where generation_id = %(generation)s and stream_id = %(stream)s and end_offset > %(offset)s
                         order by end_offset limit %(blocks)s) found) judged) sized
 where upto - case when is_moved then octet_length(payload) else 0 end < %(bytes)s
 order by end_offset"""

_KNOWN = """
select marker, is_marked, exists (
    select from space where space_id = %(space)s and payload_locations @> array[%(location)s::text])
  from payload_location where prefix = %(prefix)s"""

_WISHED = "insert into payload_location (prefix, marker) values (%s, %s) on conflict do nothing"

_MARKED = "update payload_location set marker = %s, is_marked = true where prefix = %s and not is_marked"

_PREPARED = """
update space set payload_locations = payload_locations || %(location)s::text
 where space_id = %(space)s and payload_location = %(location)s
   and not payload_locations @> array[%(location)s::text]"""

# Before the streams, in the order of changes of spaces, and of appends with advances.
_LOCK = "lock table space in row exclusive mode"

_STILL = "select from space where space_id = %s and payload_location = %s and dropped_at is null"

_LOCK_BLOCKS = """
select from block where generation_id = %s and stream_id = %s and end_offset = any(%s) order by end_offset for update"""

_NAME = """
update block b set payload = null, uri = n.uri, uri_bytes = n.bytes
  from unnest(%(ends)s::bigint[], %(uris)s::text[], %(bytes)s::bigint[], %(digests)s::bytea[])
       as n (end_offset, uri, bytes, digest)
 where b.generation_id = %(generation)s and b.stream_id = %(stream)s and b.end_offset = n.end_offset
   and sha256(b.payload) = n.digest
returning b.uri"""

_ADVANCE = "update stream set tiered_offset = %s where stream_id = %s"

Connection = psycopg.Connection[Any]


class TieringResult(Struct, frozen=True):
    """The result of a pass: `blocks` of `size` bytes were moved. `is_complete`: there is no more to move for now."""

    blocks: int
    size: int
    is_complete: bool


class _Stream(Struct):
    """A stream with blocks that this pass has not seen: those behind `offset`. `done`: up to where nothing was left
    that was to be moved; null: it has not begun. `is_patchy`: something was left in this pass."""

    stream_id: int
    generation_id: int
    is_closed: bool
    done: int | None
    offset: int
    is_patchy: bool = False


class _Block(Struct, frozen=True):
    """A block to be moved, and the name of its object."""

    end_offset: int
    payload: bytes
    name: str
    uri: str


def tier_space(conn: Connection, space: Space, guard: Guard | None = None, most_s: float = MAX_S) -> TieringResult:
    """Move due payloads to the space's location, for about `most_s`; none if it has no location. Autocommit.

    Errors of one object or stream are raised after all others were moved, and `PayloadUnavailable` if the location is
    away: what was moved until then stays moved.
    """
    if space.payload_location is None:
        return TieringResult(0, 0, True)
    deadline, is_late = time.monotonic() + most_s, False
    mover = _Mover(conn, space, guard)
    for stream in mover.work():
        try:
            while not (mover.is_over or is_late) and mover.move_batch(stream):
                is_late = time.monotonic() >= deadline
        except StaleTerm:
            raise
        except Exception as error:  # what ails one stream must not hold up the others
            if conn.closed:
                raise
            mover.problems.append(error)
            mover.is_over |= isinstance(error, PayloadUnavailable)
    if mover.problems:
        raise mover.problems[0]
    return TieringResult(mover.blocks, mover.size, mover.is_over or not is_late)


class _Mover:
    """A pass over a space, with what it has moved. `is_over`: its location was removed, or is away. `problems`: errors
    of what could not be moved."""

    def __init__(self, conn: Connection, space: Space, guard: Guard | None) -> None:
        self._conn, self._space = conn, space
        self._location = parse_location(space.payload_location or "")
        self._store = get_store(self._location)
        self._guard: Guard = guard or (lambda _: None)
        self.is_over = False
        self.blocks = self.size = 0
        self.problems: list[Exception] = []

    def work(self) -> list[_Stream]:
        """Return the streams with blocks to examine, once the location is known to be available."""
        due = {"space": self._space.space_id, "after": self._space.tier_after_s}
        streams = [_Stream(*row) for row in self._conn.execute(_WORK, due).fetchall()]
        due_streams = [stream for stream in streams if stream.is_closed or self._is_due(stream)]
        return due_streams if due_streams and self._prepare() else []

    def _is_due(self, stream: _Stream) -> bool:
        parameters = {
            "generation": stream.generation_id,
            "stream": stream.stream_id,
            "offset": stream.offset,
            "after": self._space.tier_after_s,
        }
        with contextlib.suppress(psycopg.errors.UndefinedTable):  # dropped meanwhile
            statement = sql.SQL(_IS_DUE).format(block=partition_table(stream.generation_id))
            return self._conn.execute(statement, parameters).fetchone() == (True,)
        return False

    def move_batch(self, stream: _Stream) -> bool:
        """Move some of its blocks; return False if there are no more."""
        if stream.done is None and not self._begin_stream(stream):
            return True
        rows = self._read_blocks(stream)
        blocks = [self._plan_block(stream, row) for row in rows if row[2] is not None]
        written = self._write(stream, blocks) if blocks else []
        moved = self._attach_objects(stream, rows, blocks, written) if rows else []
        self.blocks, self.size = self.blocks + len(moved), self.size + sum(len(block.payload) for block in moved)
        return bool(rows)

    def _begin_stream(self, stream: _Stream) -> bool:
        """Begin with a stream: merge small blocks of a closed one. Return False if there was no time for all."""
        if stream.is_closed:  # few large objects rather than many small ones
            deadline = time.monotonic() + MAX_S
            with contextlib.suppress(PoisonBlock):  # all others are merged, and it is moved as it is
                saved = small_block_compaction.compact_stream(
                    self._conn, stream.stream_id, older_than_s=0, guard=self._guard, most_s=MAX_S
                )
                if saved and time.monotonic() >= deadline:
                    return False
        stream.done = 0
        return True

    def _prepare(self) -> bool:
        """Ensure that a location in use has a marker, and the space has it; return False if it got another
        meanwhile."""
        prefix = self._location.prefix
        parameters = {"space": self._space.space_id, "location": self._space.payload_location, "prefix": prefix}
        row = self._conn.execute(_KNOWN, parameters).fetchone()
        if row is None:
            self._conn.execute(_WISHED, (prefix, secrets.token_hex(16)))
            row = self._conn.execute(_KNOWN, parameters).fetchone()
        assert row is not None
        marker, is_marked, is_in_use = row
        if not is_marked:
            with self._conn.transaction():
                self._guard(self._conn)
            stored_marker = run_single(self._store, TO_CHANGE, partial(self._store.write_marker, marker))
            self._conn.execute(_MARKED, (stored_marker, prefix))
            marker, _, is_in_use = self._conn.execute(_KNOWN, parameters).fetchone() or row
        self._store = get_store(replace(self._location, marker=marker))
        run_single(self._store, TO_CHANGE, self._store.check_marker)
        run_single(
            self._store, TO_CHANGE, self._store.check_writable
        )  # a node without the permission fails before more is stored
        if is_in_use:
            return True
        with self._conn.transaction():
            self._guard(self._conn)
            return self._conn.execute(_PREPARED, parameters).rowcount > 0

    def _read_blocks(self, stream: _Stream) -> list[tuple[Any, ...]]:
        rows = self._conn.execute(
            _BLOCKS,
            {
                "generation": stream.generation_id,
                "stream": stream.stream_id,
                "offset": stream.offset,
                "closed": stream.is_closed,
                "after": self._space.tier_after_s,
                "least": MIN_BYTES,
                "blocks": BATCH_BLOCKS,
                "bytes": BATCH_BYTES,
            },
            prepare=False,
            binary=True,
        ).fetchall()
        young = next((index for index, row in enumerate(rows) if not row[3]), len(rows))
        return rows[: min(young, count_contiguous([(row[0] - row[1], row[0]) for row in rows]))]

    def _plan_block(self, stream: _Stream, row: Sequence[Any]) -> _Block:
        end_offset, _, payload = row[:3]
        name = new_object_name(stream.generation_id, stream.stream_id, end_offset, payload).text
        return _Block(end_offset, payload, name, f"{self._store.location.prefix}/{name}")

    def _write(self, stream: _Stream, blocks: list[_Block]) -> list[_Block]:
        """Return the blocks whose objects are there. If the location hangs, registered objects are orphaned after a
        while: they may still be written."""
        with self._conn.transaction():
            self._guard(self._conn)
            unreferenced_objects.register_objects(
                self._conn, self._make_owner(stream), [(block.uri, block.end_offset) for block in blocks]
            )
        put = self._store.put
        outcomes = run_parallel(self._store, TO_CHANGE, lambda block: put(block.name, block.payload), blocks)
        self.problems += [outcome for outcome in outcomes if outcome is not None][:1]
        try:
            run_single(self._store, TO_CHANGE, self._store.check_marker)
        except PayloadUnavailable:  # writes to a location that has gone away meanwhile went elsewhere
            self._mark_orphans(stream, blocks)
            raise
        return [block for block, outcome in zip(blocks, outcomes, strict=True) if outcome is None]

    def _attach_objects(
        self, stream: _Stream, rows: Sequence[Sequence[Any]], blocks: list[_Block], written: list[_Block]
    ) -> list[_Block]:
        """Let the blocks name their objects; return the blocks that are moved now. The objects of others are orphaned,
        and these blocks are tried again."""
        try:
            with self._conn.transaction():
                self._guard(self._conn)
                self._conn.execute(_LOCK)
                target = (self._space.space_id, self._space.payload_location)
                self.is_over = not self._conn.execute(_STILL, target).rowcount
                usable = [] if self.is_over else written
                claimed = unreferenced_objects.claim_objects(self._conn, [block.uri for block in usable])
                moved_uris = self._store_uris(stream, [block for block in usable if block.uri in claimed])
                unmoved = [block for block in blocks if block.uri not in moved_uris]
                self._mark_orphans(stream, unmoved)
                if not self.is_over:
                    self._advance(stream, rows, min((block.end_offset for block in unmoved), default=None))
        except Exception:
            # No block names them now; a writer that is still at work may have forgotten those that come late.
            if not self._conn.closed:
                self._mark_orphans(stream, blocks)
            raise
        return [block for block in blocks if block.uri in moved_uris]

    def _advance(self, stream: _Stream, rows: Sequence[Sequence[Any]], first_left: int | None) -> None:
        """Continue the pass behind these rows; the next begins behind those before the first that was left."""
        if not stream.is_patchy:
            done = (row[0] for row in rows if first_left is None or row[0] < first_left)
            stream.done = max(done, default=stream.done)
        self._conn.execute(_ADVANCE, (stream.done, stream.stream_id))
        stream.offset, stream.is_patchy = rows[-1][0], stream.is_patchy or first_left is not None

    def _store_uris(self, stream: _Stream, blocks: list[_Block]) -> set[str]:
        ends = [block.end_offset for block in blocks]
        self._conn.execute(_LOCK_BLOCKS, (stream.generation_id, stream.stream_id, ends), prepare=False)
        parameters = {
            "generation": stream.generation_id,
            "stream": stream.stream_id,
            "ends": ends,
            "uris": [block.uri for block in blocks],
            "bytes": [len(block.payload) for block in blocks],
            "digests": [hashlib.sha256(block.payload).digest() for block in blocks],
        }
        return {row[0] for row in self._conn.execute(_NAME, parameters, prepare=False)}

    def _mark_orphans(self, stream: _Stream, blocks: list[_Block]) -> None:
        unreferenced_objects.mark_for_deletion(
            self._conn, self._make_owner(stream), [(block.uri, block.end_offset) for block in blocks], was_named=False
        )

    def _make_owner(self, stream: _Stream) -> BlockOwner:
        return BlockOwner(self._space.space_id, stream.generation_id, stream.stream_id)
