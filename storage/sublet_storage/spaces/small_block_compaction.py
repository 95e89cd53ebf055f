"""Merges small blocks into larger ones: same offsets, same content, same order.

A trickle of messages leaves one block each, which costs eight times the bytes and a row per message to read. Blocks
never change once written, so a run of neighbours can be replaced by their concatenation in one transaction; a reader
sees the old or the new rows, and slices a block that begins before its position. Blocks that differ in their epochs and
frontiers are not merged: a replay must see frontiers where they mattered. The time at which each of them was appended
is stored, so that a window by time has the same messages as before.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import psycopg
import pyarrow as pa
from msgspec import Struct
from psycopg import sql

from sublet_protocol.domain.errors import PoisonBlock
from sublet_storage.db.store_connection import Guard
from sublet_storage.log.arrow_batch_decoder import decode_block, is_decodable
from sublet_storage.log.block_encoder import MAX_PACKED_BYTES, check_epoch_bounds, pack
from sublet_storage.spaces.rollover import partition_table

_Time = TypeVar("_Time", datetime, int)

BLOCK_MESSAGES = 1000
BLOCK_BYTES = 256 * 1024
SCANNED = 5000
MAX_S = 2.0
"""A pass over a stream ends soon after this time, and the next goes on: what few bytes stand for may take long."""

# Each statement is about one generation, and names its partition. For the table itself the server would look up all
# partitions that there are, for each new connection and each rollover.

# Of the streams with enough blocks that are small, in messages and in bytes, those with enough that have a neighbour to
# be merged with: what cannot be merged must not be looked at in each pass.
_FRAGMENTED = """
with tiny as (
  select b.stream_id from {block} b
   where b.stream_id = any(%(streams)s::bigint[]) and {small} group by b.stream_id having count(*) >= %(least)s)
select t.stream_id, stream.found from tiny t
  cross join lateral (
    select count(*) filter (where merges) as found from (
      select kin = lag(kin) over neighbours or kin = lead(kin) over neighbours as merges from (
        select end_offset, case when {small} then {frontiers} end as kin from {block} b
         where b.stream_id = t.stream_id) blocks
      window neighbours as (order by end_offset)) judged) stream
 where stream.found >= %(least)s"""
_PRESENT = """
select generation_id, stream_id from stream join generation g using (generation_id) where g.state <> 'gone'"""
_UNSEEN = """
select s.generation_id, s.stream_id, s.head, g.state = 'gone'
  from (select stream_id, generation_id, head from stream where state = 'open' and head > seen_offset
        union all
        (select stream_id, generation_id, head from stream where state = 'closed' and not is_compact
          order by stream_id limit 1000)) s
  join generation g using (generation_id)"""
# A stream's last block that is old enough; one that has grown since it was looked at may have none.
_LAST = """
select u.stream_id, coalesce((
         select b.end_offset from {block} b
          where b.stream_id = u.stream_id and b.appended_at < clock_timestamp() - make_interval(secs => %(age)s)
          order by b.end_offset desc limit 1), 0)
  from unnest(%(streams)s::bigint[]) as u (stream_id)"""
# Locked in the order of their ids, as appends do.
_SEEN = """
with examined as materialized (
  select s.stream_id, u.upto
    from unnest(%(streams)s::bigint[], %(upto)s::bigint[]) as u (stream_id, upto) join stream s using (stream_id)
   where (s.seen_offset, s.is_compact) <> (u.upto, s.state = 'closed' and s.head = u.upto)
   order by s.stream_id for no key update of s)
update stream s set seen_offset = e.upto, is_compact = s.state = 'closed' and s.head = e.upto
  from examined e where s.stream_id = e.stream_id"""
_SMALL = """
  (b.count < %(messages)s and octet_length(b.payload) < %(bytes)s
   and b.appended_at < clock_timestamp() - make_interval(secs => %(age)s))"""
# A hash, as each may take 340 kB. Whoever appends chooses them: two that are not equal must not have the same one.
_FRONTIERS = "sha256(convert_to(coalesce(lower_frontier::text, '') || '|' || coalesce(epoch_bounds::text, ''), 'UTF8'))"

_RUNS = f"""
select end_offset, count, octet_length(payload), {_FRONTIERS} from {{block}}
 where stream_id = %s and end_offset > %s and uri is null
   and appended_at < clock_timestamp() - make_interval(secs => %s)
 order by end_offset limit %s"""
_READ = """
select end_offset, count, codec, payload, appended_at, case when end_offset = %(first)s then lower_frontier::text end,
       case when end_offset = %(first)s then epoch_bounds::text end, piece_starts, piece_times, xmin::text
  from {block}
 where stream_id = %(stream)s and end_offset = any(%(ends)s) and uri is null order by end_offset"""
_LOCKED = """
select xmin::text from {block} where stream_id = %s and end_offset = any(%s) order by end_offset for update"""
_REPLACED = "delete from {block} where stream_id = %s and end_offset = any(%s)"
_MERGED = """
insert into {block} (generation_id, stream_id, end_offset, count, first_timestamp, last_timestamp, appended_at, topics,
                     lower_frontier, epoch_bounds, codec, payload, piece_starts, piece_times)
values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"""


class _RunTooLarge(Exception):
    """An error for a run whose blocks before the one at `index` fill a block: few compressed bytes can stand for
    many."""

    def __init__(self, index: int) -> None:
        self.index = index
        super().__init__(f"the first {index} blocks of a run fill a block")


class _RunUndecodable(Exception):
    """An error for a run with blocks at these `indexes` that cannot be decoded; `first` is that of one of them."""

    def __init__(self, indexes: Sequence[int], first: PoisonBlock) -> None:
        self.indexes, self.first = indexes, first
        super().__init__(f"{len(indexes)} blocks of a run cannot be decoded")


class BlockToMerge(Struct, frozen=True):
    """A block to be merged. `frontiers`: a hash of its epochs and frontiers."""

    end_offset: int
    count: int
    size: int
    frontiers: bytes


def compact_stream(
    conn: psycopg.Connection[Any],
    stream_id: int,
    *,
    older_than_s: float = 60.0,
    block_messages: int = BLOCK_MESSAGES,
    block_bytes: int = BLOCK_BYTES,
    guard: Guard | None = None,
    most_s: float = math.inf,
    unfinished: dict[int, int] | None = None,
) -> int:
    """Merge runs of blocks smaller than half the target, appended longer ago than `older_than_s`; return the number of
    blocks saved.

    One transaction per run, on an autocommit connection. A run that was merged meanwhile is left alone. So is a block
    that cannot be decoded: the first such `PoisonBlock` is raised when all others are merged, and the stream is not
    listed again before it has more. After `most_s` the pass ends, and `unfinished`, {stream: offset}, has where the
    next one begins.
    """
    row = conn.execute(
        "select s.generation_id, p.compression from stream s join space p using (space_id)"
        " join generation g using (generation_id) where s.stream_id = %s and g.state <> 'gone'",
        (stream_id,),
    ).fetchone()
    if row is None:
        return 0
    generation_id, compression = row
    deadline, unfinished = time.monotonic() + most_s, {} if unfinished is None else unfinished
    saved, poison, begin = 0, None, unfinished.pop(stream_id, -1)
    last_offset = begin
    merge = partial(_merge, conn, generation_id, stream_id, compression, guard)
    with contextlib.suppress(psycopg.errors.UndefinedTable):  # dropped meanwhile
        while rows := _scan(conn, generation_id, stream_id, last_offset, older_than_s):
            for run in find_runs(rows, block_messages, block_bytes):
                merged, problem = _merge_decodable(run, merge)
                saved, poison = saved + merged, poison or problem
                if time.monotonic() >= deadline:
                    unfinished[stream_id] = run[-1].end_offset
                    break
            last_offset = rows[-1].end_offset
            if stream_id in unfinished:
                break
    if stream_id not in unfinished and (poison is not None or begin >= 0):
        _set_seen(conn, guard, [(stream_id, last_offset)])
    if poison is not None:
        raise poison
    return saved


def list_fragmented_streams(
    conn: psycopg.Connection[Any],
    at_least: int = 100,
    older_than_s: float = 60.0,
    among: Sequence[tuple[int, int]] | None = None,
) -> list[int]:
    """Return the streams, not gone, with at least `at_least` blocks to merge of less than a tenth of the target; the
    most fragmented first. `among`: of these (generation, stream) only."""
    parameters = {
        "messages": BLOCK_MESSAGES // 10,
        "bytes": BLOCK_BYTES // 10,
        "age": older_than_s,
        "least": at_least,
    }
    counts: list[tuple[int, int]] = []
    for generation_id, streams in _group_by_generation(conn.execute(_PRESENT) if among is None else among).items():
        counts += _query_partition(conn, _FRAGMENTED, generation_id, {**parameters, "streams": streams})
    return [stream_id for stream_id, _ in sorted(counts, key=lambda entry: (-entry[1], entry[0]))]


def list_newly_fragmented(
    conn: psycopg.Connection[Any], guard: Guard | None = None, at_least: int = 100, older_than_s: float = 60.0
) -> list[int]:
    """Return the fragmented ones of the streams with new blocks; the others are not examined again before they have
    more."""
    unseen = conn.execute(_UNSEEN).fetchall()
    examined = [(stream_id, head) for _, stream_id, head, is_gone in unseen if is_gone]
    among = [(generation_id, stream_id) for generation_id, stream_id, _, is_gone in unseen if not is_gone]
    last_offsets: list[tuple[int, int]] = []
    for generation_id, streams in _group_by_generation(among).items():
        last_offsets += _query_partition(conn, _LAST, generation_id, {"streams": streams, "age": older_than_s})
    fragmented = list_fragmented_streams(conn, at_least, older_than_s, among) if among else []
    examined += [(stream_id, upto) for stream_id, upto in last_offsets if stream_id not in fragmented]
    if examined:
        _set_seen(conn, guard, examined)
    return fragmented


def _set_seen(conn: psycopg.Connection[Any], guard: Guard | None, examined: Sequence[tuple[int, int]]) -> None:
    """Note that these streams need not be examined again before they have more than up to these offsets."""
    with conn.transaction():
        if guard is not None:
            guard(conn)
        conn.execute(_SEEN, {"streams": [entry[0] for entry in examined], "upto": [entry[1] for entry in examined]})


def _group_by_generation(streams: Iterable[tuple[int, int]]) -> dict[int, list[int]]:
    streams_by_generation: dict[int, list[int]] = {}
    for generation_id, stream_id in streams:
        streams_by_generation.setdefault(generation_id, []).append(stream_id)
    return streams_by_generation


def _query_partition(
    conn: psycopg.Connection[Any], statement: str, generation_id: int, parameters: dict[str, Any]
) -> list[tuple[int, int]]:
    """Return the answer of a generation's partition; nothing where that was dropped meanwhile."""
    with contextlib.suppress(psycopg.errors.UndefinedTable):
        return conn.execute(_format_statement(statement, generation_id), parameters).fetchall()
    return []


def _format_statement(statement: str, generation_id: int) -> sql.Composed:
    parts = {"block": partition_table(generation_id), "small": sql.SQL(_SMALL), "frontiers": sql.SQL(_FRONTIERS)}
    return sql.SQL(statement).format(**parts)


def _scan(
    conn: psycopg.Connection[Any], generation_id: int, stream_id: int, last_offset: int, older_than_s: float
) -> list[BlockToMerge]:
    rows = conn.execute(_format_statement(_RUNS, generation_id), (stream_id, last_offset, older_than_s, SCANNED))
    return [BlockToMerge(*row) for row in rows]


def find_runs(rows: Iterable[BlockToMerge], block_messages: int, block_bytes: int) -> Iterator[list[BlockToMerge]]:
    """Yield runs of at least two neighbours that fit into one block together, each smaller than half of it."""
    run: list[BlockToMerge] = []
    for row in rows:
        small = row.count * 2 <= block_messages and row.size * 2 <= block_bytes
        if run and not (small and _is_mergeable(run, row, block_messages, block_bytes)):
            if len(run) > 1:
                yield run
            run = []
        if small:
            run.append(row)
    if len(run) > 1:
        yield run


def _is_mergeable(run: list[BlockToMerge], row: BlockToMerge, block_messages: int, block_bytes: int) -> bool:
    return (
        run[-1].end_offset == row.end_offset - row.count
        and run[-1].frontiers == row.frontiers
        and sum(each.count for each in run) + row.count <= block_messages
        and sum(each.size for each in run) + row.size <= block_bytes
    )


def _merge_decodable(
    run: list[BlockToMerge], merge: Callable[[list[BlockToMerge]], int]
) -> tuple[int, PoisonBlock | None]:
    """Merge the run, or what lies between its blocks that cannot be decoded, or in parts where it would be too large.
    Return the number of blocks saved, and the error of such a block."""
    merged, problem, parts = 0, None, [run]
    while parts:
        part = parts.pop()
        if len(part) < 2:
            continue
        try:
            merged += merge(part)
        except _RunUndecodable as undecodable:
            problem = problem or undecodable.first
            borders = [-1, *undecodable.indexes, len(part)]
            parts += [part[begin + 1 : end] for begin, end in pairwise(borders)]
        except _RunTooLarge as large:
            parts += part[large.index :], part[: large.index]
    return merged, problem


def _merge(
    conn: psycopg.Connection[Any],
    generation_id: int,
    stream_id: int,
    compression: str,
    guard: Guard | None,
    run: list[BlockToMerge],
) -> int:
    """Replace the run by one block with the same end, which has the times when its pieces were appended. Return the
    number of blocks saved: 0 if the run has changed meanwhile."""
    ends = [row.end_offset for row in run]
    parameters = {"stream": stream_id, "ends": ends, "first": ends[0]}
    rows = conn.execute(_format_statement(_READ, generation_id), parameters, binary=True).fetchall()
    if [(row[0], row[1]) for row in rows] != [(row.end_offset, row.count) for row in run]:
        return 0
    entire = pa.Table.from_batches(list(_decode_rows(stream_id, rows))).combine_chunks().to_batches()[0]
    block = pack(entire, compression, has_bounds=False)
    starts, times = compute_append_times([(row[1], row[4], *row[7:9]) for row in rows])
    with conn.transaction():  # from here on: what few bytes stand for may take longer than one may be idle
        if guard is not None:
            guard(conn)
        locked = conn.execute(_format_statement(_LOCKED, generation_id), (stream_id, ends)).fetchall()
        if [xmin for (xmin,) in locked] != [row[9] for row in rows]:
            return 0
        conn.execute(_format_statement(_REPLACED, generation_id), (stream_id, ends))
        conn.execute(
            _format_statement(_MERGED, generation_id),
            (
                generation_id,
                stream_id,
                ends[-1],
                block.count,
                block.first_timestamp,
                block.last_timestamp,
                times[-1],
                block.topics,
                rows[0][5],
                rows[0][6],
                block.codec,
                memoryview(block.payload),
                starts if len(starts) > 1 else None,
                times if len(starts) > 1 else None,
            ),
        )
    return len(run) - 1


def _decode_rows(stream_id: int, rows: Sequence[tuple[Any, ...]]) -> Iterator[pa.RecordBatch]:
    """Yield the batches of blocks to be merged. Raise `_RunTooLarge` before they are more than a block may have, and
    `_RunUndecodable`."""
    size, check = 0, partial(check_epoch_bounds, rows[0][6])  # of the first row: those of a run are the same
    for index, (end_offset, count, codec, payload, *_) in enumerate(rows):
        try:
            batch = decode_block(codec, payload, stream_id, end_offset, count, check)
        except PoisonBlock as error:
            others = enumerate(rows[index + 1 :], index + 1)
            indexes = [index, *(n for n, row in others if not is_decodable(row[2], row[3], row[1], check))]
            # Without its traceback, whose frames hold all the rows.
            raise _RunUndecodable(indexes, PoisonBlock(stream_id, error.offsets, error.detail)) from None
        size += batch.nbytes
        if index and size > MAX_PACKED_BYTES:
            raise _RunTooLarge(index)
        yield batch


def compute_append_times(
    blocks: Iterable[tuple[int, _Time, Sequence[int] | None, Sequence[_Time] | None]],
) -> tuple[list[int], list[_Time]]:
    """Return where what was appended later than all before it begins in the merged block, and when that was. Of each
    block: its messages, when it was appended, and of a merged one its own pieces.

    A clock that was set back makes no piece: the first message at or after a time is the same without.
    """
    starts, times, rows_before = list[int](), list[_Time](), 0
    for count, appended_at, own_starts, own_times in blocks:
        for start, moment in zip(own_starts or [0], own_times or [appended_at], strict=True):
            if not times or moment > times[-1]:
                starts.append(rows_before + start)
                times.append(moment)
        rows_before += count
    return starts, times
