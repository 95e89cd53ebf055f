"""Merges small blocks into larger ones: same offsets, same content, same order.

A trickle of messages leaves one block each, which costs eight times the bytes and a row per message to read. Blocks
never change once written, so a run of neighbours can be replaced by their concatenation in one transaction; a reader
sees the old or the new rows, and slices a block that begins before its position. Blocks that differ in their epochs and
frontiers are not merged: a replay must see frontiers where they mattered. The time at which each of them was appended
is stored, so that a window by time has the same messages as before.

Maintenance looks only behind a stream's `seen_offset`. That advances when what lies before it is merged, or had nothing
to merge in so many blocks that they are not to be read again; the last block stays behind it, for those that come.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime
from functools import partial
from itertools import pairwise
from typing import Any, TypeVar

import psycopg
import pyarrow as pa
from msgspec import Struct, field
from psycopg import sql

from sublet_protocol.domain.errors import PoisonBlock, ValueTooLarge
from sublet_storage.db.store_connection import Guard
from sublet_storage.log.arrow_batch_decoder import decode_block, is_decodable
from sublet_storage.log.block_encoder import MAX_PACKED_BYTES, check_epoch_bounds, pack
from sublet_storage.spaces.rollover import partition_table

_Time = TypeVar("_Time", datetime, int)

BLOCK_MESSAGES = 1000
BLOCK_BYTES = 256 * 1024
SCANNED = 5000
"""Maximum number of blocks of a stream that are read at a time."""
MAX_UNSETTLED = 1000
"""Of so many blocks even a few are merged, as they are not looked at again."""
MAX_S = 2.0
"""A pass over a stream ends soon after this time, and the next goes on: what few bytes stand for may take long."""

# Each statement is about one generation, and names its partition. For the table itself the server would look up all
# partitions that there are, for each new connection and each rollover.

# By the entire key: without it the server sorts all blocks of a stream, and before 18 reads the partition's index.
_STORED = "b.generation_id = {generation} and b.stream_id = "
_OLD = "b.appended_at < clock_timestamp() - make_interval(secs => %(age)s)"
# Of each stream the last of the next blocks, their number, and, if enough of them are small, in messages and in bytes,
# how many of these have a neighbour to be merged with.
_LOOK = f"""
with behind as materialized (
  select s.stream_id, s.seen_offset, b.*
    from unnest(%(streams)s::bigint[]) as u (stream_id) join stream s using (stream_id) cross join lateral (
      select coalesce(max(end_offset), s.seen_offset) as upto, count(*) as blocks,
             count(*) filter (where is_tiny) as tiny
        from (select b.end_offset, {{small}} as is_tiny from {{block}} b
               where {_STORED} u.stream_id and b.end_offset > s.seen_offset and {_OLD}
               order by b.end_offset limit {SCANNED}) b) b)
select stream_id, upto, blocks, case when tiny >= %(least)s or tiny > 1 and blocks >= {MAX_UNSETTLED} then (
         select count(*) filter (where merges) from (
           select kin = lag(kin) over neighbours or kin = lead(kin) over neighbours as merges from (
             select b.end_offset, case when {{small}} then {{frontiers}} end as kin from {{block}} b
              where {_STORED} behind.stream_id and b.end_offset > behind.seen_offset and b.end_offset <= behind.upto
             ) blocks
           window neighbours as (order by end_offset)) judged)
         else 0 end
  from behind"""
_UNSEEN = """
select s.generation_id, s.stream_id, s.head, s.is_open, g.state = 'gone'
  from (select stream_id, generation_id, head, true as is_open from stream where state = 'open' and head > seen_offset
        union all
        (select stream_id, generation_id, head, false from stream where state = 'closed' and not is_compact
          order by stream_id limit 1000)) s
  join generation g using (generation_id)"""
# Locked in the order of their ids, as appends do.
_SEEN = """
with examined as materialized (
  select s.stream_id, u.upto
    from unnest(%(streams)s::bigint[], %(upto)s::bigint[]) as u (stream_id, upto) join stream s using (stream_id)
   where u.upto > s.seen_offset or s.state = 'closed' and s.head = u.upto and not s.is_compact
   order by s.stream_id for no key update of s)
update stream s set seen_offset = greatest(s.seen_offset, e.upto),
                    is_compact = s.is_compact or s.state = 'closed' and s.head = e.upto
  from examined e where s.stream_id = e.stream_id"""
_SMALL = f"(b.count < %(messages)s and octet_length(b.payload) < %(bytes)s and {_OLD})"
# A hash, as each may take 340 kB. Whoever appends chooses them: two that are not equal must not have the same one.
_FRONTIERS = "sha256(convert_to(coalesce(lower_frontier::text, '') || '|' || coalesce(epoch_bounds::text, ''), 'UTF8'))"

_RUNS = f"""
select end_offset, count, octet_length(payload), {_FRONTIERS} from {{block}} b
 where {_STORED} %(stream)s and end_offset > %(offset)s and uri is null and {_OLD}
 order by end_offset limit {SCANNED}"""
_READ = f"""
select end_offset, count, codec, payload, appended_at, case when end_offset = %(first)s then lower_frontier::text end,
       case when end_offset = %(first)s then epoch_bounds::text end, piece_starts, piece_times, xmin::text
  from {{block}} b
 where {_STORED} %(stream)s and end_offset = any(%(ends)s) and uri is null order by end_offset"""
_LOCKED = f"""
select xmin::text from {{block}} b where {_STORED} %s and end_offset = any(%s) order by end_offset for update"""
_REPLACED = f"delete from {{block}} b where {_STORED} %s and end_offset = any(%s)"
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


class CompactionProgress(Struct):
    """What maintenance remembers of streams from pass to pass. `unfinished`: those whose last pass ended early, or
    failed; whose turn was longest ago comes first. `looked_at`, {stream: (offset, time)}: where too few blocks to merge
    them yet were found, up to which offset, and when by a monotonic clock."""

    unfinished: dict[int, None] = field(default_factory=dict)
    looked_at: dict[int, tuple[int, float]] = field(default_factory=dict)

    def forget_all_but(self, stream_ids: Collection[int]) -> None:
        """Forget other streams, which have no new blocks or are gone."""
        for known in (self.unfinished, self.looked_at):
            for stream_id in known.keys() - stream_ids:
                known.pop(stream_id)


class _Look(Struct, frozen=True):
    """The blocks of a stream behind its `seen_offset`, up to that of the last. `mergeable`: how many small ones have a
    neighbour to be merged with, 0 if there are few."""

    stream_id: int
    upto: int
    blocks: int
    mergeable: int


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
    progress: CompactionProgress | None = None,
) -> int:
    """Merge runs of blocks smaller than half the target, appended longer ago than `older_than_s`; return the number of
    blocks saved.

    One transaction per run, on an autocommit connection. A run that was merged meanwhile is left alone. So is a block
    that cannot be decoded: the first such `PoisonBlock` is raised when all others are merged, and the stream is not
    listed again before it has more. After `most_s` the pass ends. With `progress` it begins behind what earlier passes
    have seen, so that each raises what it has met; else at the stream's first block.
    """
    row = conn.execute(
        "select s.generation_id, p.compression, s.seen_offset from stream s join space p using (space_id)"
        " join generation g using (generation_id) where s.stream_id = %s and g.state <> 'gone'",
        (stream_id,),
    ).fetchone()
    if row is None:
        return 0
    generation_id, compression, seen_offset = row
    if progress is not None:  # until it is done it waits behind all others
        progress.unfinished.pop(stream_id, None)
        progress.unfinished[stream_id] = None
    deadline, begin = time.monotonic() + most_s, -1 if progress is None else seen_offset
    saved, poison, has_changed, is_complete, done = 0, None, False, False, begin
    merge = partial(_merge, conn, generation_id, stream_id, compression, guard)
    with contextlib.suppress(psycopg.errors.UndefinedTable):  # dropped meanwhile
        while not is_complete:
            rows = _scan(conn, generation_id, stream_id, done, older_than_s)
            is_complete = len(rows) < SCANNED
            for run in find_runs(rows, block_messages, block_bytes):
                merged, problem, is_changed = _merge_decodable(run, merge)
                saved, poison, has_changed = saved + merged, poison or problem, has_changed or is_changed
                if time.monotonic() >= deadline and run[-1] is not rows[-1]:
                    done, is_complete = run[-1].end_offset, False
                    break
            else:
                done = rows[-1].end_offset - 1 if rows else done  # the last may be merged with what comes
            if time.monotonic() >= deadline:
                break
    if progress is not None and is_complete:
        del progress.unfinished[stream_id]
    if done > begin and not has_changed:
        _set_seen(conn, guard, [(stream_id, done)])
    if poison is not None and (is_complete or progress is not None):
        raise poison
    return saved


def list_newly_fragmented(
    conn: psycopg.Connection[Any],
    guard: Guard | None = None,
    progress: CompactionProgress | None = None,
    at_least: int = 100,
    older_than_s: float = 60.0,
) -> list[int]:
    """Return the fragmented ones of the streams with new blocks; the others are not examined again before they have
    more, nor within `older_than_s`, as `progress` has it."""
    progress, now = progress or CompactionProgress(), time.monotonic()
    unseen = conn.execute(_UNSEEN).fetchall()
    progress.forget_all_but({stream_id for _, stream_id, *_ in unseen})

    def is_due(stream_id: int, head: int) -> bool:
        upto, at = progress.looked_at.get(stream_id, (-1, -math.inf))
        return upto != head and now >= at + older_than_s

    examined = [(stream_id, head) for _, stream_id, head, _, is_gone in unseen if is_gone]
    among = [
        (generation_id, stream_id)
        for generation_id, stream_id, head, is_open, is_gone in unseen
        if not is_gone and (not is_open or is_due(stream_id, head))
    ]
    ends = {(stream_id, head) for _, stream_id, head, is_open, _ in unseen if not is_open}
    looks = _look(conn, among, at_least, older_than_s)
    fragmented = _select_fragmented(looks, at_least)
    for look in looks:
        if look.stream_id in fragmented:
            continue
        progress.looked_at[look.stream_id] = look.upto, now
        if (look.stream_id, look.upto) in ends:
            examined.append((look.stream_id, look.upto))
        elif look.blocks >= MAX_UNSETTLED:
            examined.append((look.stream_id, look.upto - 1))  # the last may be merged with what comes
    if examined:
        _set_seen(conn, guard, examined)
    return fragmented


def _look(
    conn: psycopg.Connection[Any], streams: Iterable[tuple[int, int]], at_least: int, older_than_s: float
) -> list[_Look]:
    parameters = {
        "messages": BLOCK_MESSAGES // 10,
        "bytes": BLOCK_BYTES // 10,
        "age": older_than_s,
        "least": at_least,
    }
    streams_by_generation: dict[int, list[int]] = {}
    for generation_id, stream_id in streams:
        streams_by_generation.setdefault(generation_id, []).append(stream_id)
    looks: list[_Look] = []
    for generation_id, stream_ids in streams_by_generation.items():
        with contextlib.suppress(psycopg.errors.UndefinedTable):  # dropped meanwhile
            rows = conn.execute(_format_statement(_LOOK, generation_id), {**parameters, "streams": stream_ids})
            looks += [_Look(*row) for row in rows]
    return looks


def _select_fragmented(looks: Iterable[_Look], at_least: int) -> list[int]:
    found = [
        (-look.mergeable, look.stream_id)
        for look in looks
        if look.mergeable >= at_least or (look.mergeable and look.blocks >= MAX_UNSETTLED)
    ]
    return [stream_id for _, stream_id in sorted(found)]


def _set_seen(conn: psycopg.Connection[Any], guard: Guard | None, examined: Sequence[tuple[int, int]]) -> None:
    """Note that these streams need not be examined again before they have more than up to these offsets."""
    with conn.transaction():
        if guard is not None:
            guard(conn)
        conn.execute(_SEEN, {"streams": [entry[0] for entry in examined], "upto": [entry[1] for entry in examined]})


def _format_statement(statement: str, generation_id: int) -> sql.Composed:
    return sql.SQL(statement).format(
        block=partition_table(generation_id),
        generation=sql.Literal(generation_id),
        small=sql.SQL(_SMALL),
        frontiers=sql.SQL(_FRONTIERS),
    )


def _scan(
    conn: psycopg.Connection[Any], generation_id: int, stream_id: int, offset: int, older_than_s: float
) -> list[BlockToMerge]:
    parameters = {"stream": stream_id, "offset": offset, "age": older_than_s}
    return [BlockToMerge(*row) for row in conn.execute(_format_statement(_RUNS, generation_id), parameters)]


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
) -> tuple[int, PoisonBlock | None, bool]:
    """Merge the run, or what lies between its blocks that cannot be decoded, or in parts where it would be too large.
    Return the number of blocks saved, the error of such a block, and whether any has changed meanwhile."""
    saved, problem, has_changed, parts = 0, None, False, [run]
    while parts:
        part = parts.pop()
        if len(part) < 2:
            continue
        try:
            merged = merge(part)
            saved, has_changed = saved + merged, has_changed or not merged
        except _RunUndecodable as undecodable:
            problem = problem or undecodable.first
            borders = [-1, *undecodable.indexes, len(part)]
            parts += [part[begin + 1 : end] for begin, end in pairwise(borders)]
        except _RunTooLarge as large:
            parts += part[large.index :], part[: large.index]
    return saved, problem, has_changed


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
    try:
        block = pack(entire, compression, has_bounds=False)
    except ValueTooLarge:  # together they have nulls, and more of Arrow's buffers
        raise _RunTooLarge(len(run) - 1) from None
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
