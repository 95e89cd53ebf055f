"""Fetches messages of streams from an offset on, and reads where streams end.

A read returns whole blocks' worth of messages and the position after them, which moves on also over blocks that the
filter skipped. It is one statement: the head, the state of the generation and the blocks are of one instant.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache, partial
from itertools import compress, groupby, pairwise
from typing import Any, Final

import psycopg
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace
from psycopg.errors import InsufficientPrivilege, UndefinedTable
from psycopg.types.numeric import Int8

from sublet_protocol.domain.errors import (
    NotFound,
    PayloadDamaged,
    PoisonBlock,
    PositionBeyondHead,
    PositionGone,
    SubletError,
)
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import newest_stream
from sublet_storage.log.arrow_batch_decoder import (
    MAX_PAYLOAD_BYTES,
    MIN_ARROW_VALUES,
    count_undecodable,
    decode_block,
    restore,
    validate_block,
)
from sublet_storage.log.block_encoder import (
    add_position_columns,
    check_epoch_bounds,
    drop_before,
    encode,
    filter_by_topic,
)
from sublet_storage.log.column_encoding import BLOCK_SCHEMA, has_one_epoch
from sublet_storage.log.complete_epoch_filter import ExcludedEpochs, drop_excluded
from sublet_storage.log.deleted_streams import find_deleted_streams
from sublet_storage.log.fast_small_block_decoder import decode_small_blocks
from sublet_storage.log.message_predicate import BLOCK_MAY_MATCH, MessagePredicate
from sublet_storage.log.partition_reads import keep_plan, read_blocks, read_partition
from sublet_storage.objects.remote_reads import attach_payloads
from sublet_storage.util import arrow_compute as pc

PAGE_BLOCKS: Final = 256
PAGE_BYTES: Final = 4 * 1024 * 1024
MAX_DECODED_BYTES: Final = 64 << 20
"""The maximum size in memory of a page of several blocks."""
MAX_EXPANSION: Final = 16
"""The same, where that is less, in terms of the maximum that is stored of it."""

NEXT_BLOCKS: Final = 16
NEXT_BLOCK_BYTES: Final = 1 << 16
"""`fetch_next` reads fewer than `NEXT_BLOCKS` blocks, each stored in at most this number of bytes."""

MATCH_ALL = TopicFilter("#")

UNKNOWN: Final = MAX_OFFSET
"""The head of a stream that had messages, whose number is no longer known."""

MAX_PATTERN_COST: Final = 1000
"""Most levels `+` times distinct characters of a filter that Postgres applies too: it compiles a pattern of so many in
0.02 s, and some filters of 4 kB in more than 40 s. The others are applied after reading."""

_SINCE = """
select s.head, s.state = 'closed', g.state = 'gone', b.end_offset, b.count, b.codec, b.topics, b.payload,
       case when b.uri is not null then array[b.uri, b.size::text] || (
         select payload_locations_of(space_id) from generation where generation_id = %(generation)s) end,
       b.epoch_bounds
  from {newest} s join generation g using (generation_id)
  left join lateral (
    select *, sum(size) over (order by end_offset) - size as before from (
      select end_offset, count, codec, topics, epoch_bounds::text,
             case when matched then case when octet_length(payload) <= {most} then payload
                                         else substring(payload, 1, {most} + 1) end end as payload,
             case when matched then uri end as uri,
             case when matched then coalesce(octet_length(payload), uri_bytes) else 0 end as size
        from (
          select *, {matched} as matched from {{block}}
           where generation_id = %(generation)s and stream_id = %(stream)s and end_offset > %(offset)s
           order by end_offset limit %(blocks)s) found) sized) b on b.before < %(bytes)s
 order by b.end_offset"""

_NEXT = """
select end_offset, count, codec, topics, case when octet_length(payload) <= %s then payload end, epoch_bounds::text
  from {block} where generation_id = %s and stream_id = %s and end_offset > %s order by end_offset limit %s"""

_HEADS = f"""
select s.stream_id, s.head, s.state = 'closed', g.state = 'gone'
  from unnest(%s::bigint[]) as u (stream_id)
  cross join lateral {newest_stream("u.stream_id", "stream_id, generation_id, head, state")} s
  join generation g using (generation_id)"""

_TOPIC_MATCHES = "topics is null or exists (select from unnest(topics) as t(topic) where topic ~ %(regex)s)"

_EPOCH_MATCHES = """(epoch_bounds is null or coalesce((epoch_bounds ->> 'has_unset')::boolean, true) or exists (
             select from jsonb_array_elements(epoch_bounds -> 'greatest') as mine(epoch)
              where not is_covered(jsonb_build_array(mine.epoch), %(covered)s::jsonb)
                and (%(least)s::jsonb is null or frontier_admits(%(least)s::jsonb, mine.epoch))))"""

_WITHIN = """
select u.stream_id, least(u.range_end, coalesce(max(b.end_offset) filter (where b.size_before < u.most), u.range_end))
  from (select *, %(most)s::bigint as most
          from unnest(%(streams)s::bigint[], %(generations)s::bigint[], %(starts)s::bigint[], %(ends)s::bigint[])
               as r (stream_id, generation_id, range_start, range_end)) u
  left join lateral (
    select end_offset,
           sum(coalesce(octet_length(payload), uri_bytes)) over (order by end_offset)
             - coalesce(octet_length(payload), uri_bytes) as size_before
      from block k
     where k.generation_id = any(%(generations)s::bigint[]) and k.generation_id = u.generation_id
       and k.stream_id = u.stream_id and k.end_offset > u.range_start and k.end_offset - k.count < u.range_end
     order by end_offset limit 4096) b on true
 group by u.stream_id, u.range_end"""

_BEFORE_END = "end_offset - count < %(end)s"


class LogPage(Struct, frozen=True):
    """The result of one read: batches in `DELIVERED_SCHEMA`, of the offsets from `start` up to before `position`.

    `head` and `is_closed` are the stream's at that instant. Batches may be fewer than blocks, where the filter skipped.
    """

    batches: tuple[pa.RecordBatch, ...]
    start: int
    position: int
    head: int
    is_closed: bool

    @property
    def is_finished(self) -> bool:
        """Return whether nothing comes after this page, now or later."""
        return self.is_closed and self.position == self.head

    def truncate(self, offset: int) -> LogPage:
        """Return the part of the page before an offset."""
        if self.position <= offset:
            return self
        cut = [batch.filter(pc.less(batch.column("offset"), offset)) for batch in self.batches]
        return replace(self, batches=tuple(batch for batch in cut if batch.num_rows), position=offset)


class HeadState(Struct, frozen=True):
    """The end of a stream now. `is_gone`: retention has taken its messages."""

    head: int
    is_closed: bool
    is_gone: bool


def fetch(
    conn: psycopg.Connection[Any],
    stream_id: int,
    offset: int,
    *,
    filter: TopicFilter = MATCH_ALL,
    generation_id: int | None = None,
    excluded: ExcludedEpochs | None = None,
    predicate: MessagePredicate | None = None,
    end: int | None = None,
    limit_blocks: int = PAGE_BLOCKS,
    limit_bytes: int = PAGE_BYTES,
    few: int = 0,
) -> LogPage:
    """Read the messages at and after `offset` that match the filter, a page of blocks at most, at least one.

    `excluded`: without the messages of these epochs; blocks that have no others are not fetched, nor are those without
    messages that match `predicate`, or before the offset `end`. `generation_id` saves a look-up. `few`: blocks with
    fewer messages on average come as one batch, where they need not be filtered. Raise `PositionGone` if the offset is
    older than retention, `PositionBeyondHead` after the end, `NotFound`; `PayloadUnavailable`,
    `PayloadObjectUnreadable` and `PoisonBlock` of the first block only, as a page ends before the next that cannot be
    read.
    """
    if generation_id is None:
        generation_id = _read_generation_id(conn, stream_id, offset)
    statement = _format_statement(
        _is_for_postgres(filter), excluded is not None, predicate is not None, end is not None
    )
    parameters = {
        "generation": Int8(generation_id),
        "stream": Int8(stream_id),
        "offset": Int8(offset),
        "blocks": Int8(max(1, limit_blocks)),
        "bytes": Int8(max(1, limit_bytes)),
        "regex": filter.regex,
        **({} if excluded is None else excluded.to_json()),
        **({} if predicate is None else predicate.to_parameters()),
        **({} if end is None else {"end": Int8(end)}),
    }

    find = partial(_read_stream, conn, statement, parameters, generation_id, stream_id, offset)
    try:
        head, closed, blocks = find()
    except PayloadDamaged:  # or the row was outdated when the object was read, as when retention has taken both
        head, closed, blocks = find()
    if not blocks:
        return LogPage((), offset, offset, head, closed)
    is_entire = excluded is None and predicate is None
    batches = _read_small_blocks(stream_id, offset, filter, blocks) if is_entire else None
    if batches is None:
        blocks = _decode_blocks(stream_id, blocks, limit_bytes)
        parts = _group_small_blocks(blocks, few) if is_entire and filter == MATCH_ALL else [[block] for block in blocks]
        read = (_select_messages(stream_id, offset, filter, excluded, predicate, part) for part in parts)
        batches = tuple(batch for batch in read if batch is not None)
    page = LogPage(batches, offset, blocks[-1][0], head, closed)
    return page if end is None else page.truncate(end)


def fetch_next(
    conn: psycopg.Connection[Any],
    stream_id: int,
    offset: int,
    generation_id: int,
    filter: TopicFilter = MATCH_ALL,
    *,
    may_be_empty: bool = False,
) -> LogPage | None:
    """Return what follows on `offset`, if it follows directly, is all there is, and is small, in half the time of
    `fetch`, which the caller uses where this returns None. Raise `PoisonBlock`.

    A stream ends where its last block does. Whether it is closed is not read, nor, if the page `may_be_empty` as
    `offset` was the head when it was last read, why nothing follows.
    """
    parameters = (Int8(NEXT_BLOCK_BYTES), Int8(generation_id), Int8(stream_id), Int8(offset), Int8(NEXT_BLOCKS))
    rows = read_blocks(conn, _NEXT, parameters, generation_id)
    if may_be_empty and not rows:
        return LogPage((), offset, offset, offset, False)
    spans = [(offset, offset), *((row[0] - row[1], row[0]) for row in rows)]
    if not 0 < len(rows) < NEXT_BLOCKS or count_contiguous(spans) < len(spans) or any(row[4] is None for row in rows):
        return None
    batches = _read_small_blocks(stream_id, offset, filter, rows)
    if batches is not None:
        return LogPage(batches, offset, rows[-1][0], rows[-1][0], False)
    blocks = _decode_blocks(stream_id, rows, PAGE_BYTES)
    read = (_select_messages(stream_id, offset, filter, None, None, [block]) for block in blocks)
    batches = tuple(batch for batch in read if batch is not None)
    return LogPage(batches, offset, blocks[-1][0], rows[-1][0], False)


def warm_up(conn: BoundedConnection, filter: TopicFilter) -> None:
    """Do what the first reads of a connection and of a process take longest for: the server loads its catalogs and
    plans, and Arrow its functions. No message is read, which may be large, elsewhere or damaged."""
    newest = "select stream_id, head, generation_id from stream order by stream_id desc limit 1"
    with suppress(SubletError, InsufficientPrivilege):  # the reads raise what prevents it
        conn.timeline_number()
        for stream_id, head, generation_id in conn.execute(newest).fetchall():
            keep_plan(conn, partial(fetch, conn, stream_id, head, filter=filter, generation_id=generation_id))
    message = {"topic": "t", "key": b"", "value": b"", "timestamp": 0}
    codec, payload = encode(pa.RecordBatch.from_pylist([message] * 8, schema=BLOCK_SCHEMA))
    add_position_columns(decode_block(codec, payload, 0, 8, 8), 0, 0)


def read_heads(conn: psycopg.Connection[Any], stream_ids: Iterable[int]) -> dict[int, HeadState]:
    """Return {stream: its head}, read in one statement; unknown ids are absent."""
    rows = conn.execute(_HEADS, (list(stream_ids),), prepare=True)
    return {stream_id: HeadState(*facts) for stream_id, *facts in rows}


def read_heads_or_ends(conn: psycopg.Connection[Any], stream_ids: Iterable[int]) -> dict[int, HeadState]:
    """Return {stream: its head}; streams without a row have the end that `read_ends` returns."""
    requested_ids = list(stream_ids)
    heads = read_heads(conn, requested_ids)
    return heads | read_ends(conn, [stream_id for stream_id in requested_ids if stream_id not in heads])


def read_ends(conn: psycopg.Connection[Any], absent: Sequence[int]) -> dict[int, HeadState]:
    """Return {stream: its head} for streams without a row: `UNKNOWN` if it existed and had messages, else 0. Open are
    those that the database never had, or not any more since it was restored."""
    deleted_streams = find_deleted_streams(conn, absent) if absent else {}
    ends = {stream_id: HeadState(UNKNOWN if had else 0, True, had) for stream_id, had in deleted_streams.items()}
    return dict.fromkeys(absent, HeadState(0, False, False)) | ends


def limit_ranges_by_size(
    conn: psycopg.Connection[Any], ranges: Iterable[tuple[int, int, int, int]], limit_bytes: int
) -> dict[int, int]:
    """Return {stream: an end not behind the range's, before which about `limit_bytes` are stored, at least a block} for
    each range (stream, generation, start, end)."""
    columns = zip(("streams", "generations", "starts", "ends"), zip(*ranges, strict=True), strict=True)
    parameters = {"most": limit_bytes, **{name: list(column) for name, column in columns}}
    return dict(conn.execute(_WITHIN, parameters, prepare=False).fetchall())


def read_space_names(conn: psycopg.Connection[Any], stream_ids: Iterable[int]) -> dict[int, str]:
    """Return {stream: the name of its space}; unknown ids are absent."""
    rows = conn.execute(
        "select s.stream_id, p.name from stream s join space p using (space_id) where s.stream_id = any(%s::bigint[])",
        (list(stream_ids),),
    )
    return dict(rows.fetchall())


def offset_at_time(conn: psycopg.Connection[Any], stream_id: int, when: datetime) -> int:
    """Return the offset of the first message appended at or after `when` (the database's clock); the head if there is
    none."""
    row = conn.execute(
        "select coalesce(offset_at_time(generation_id, stream_id, %(when)s),"
        f" case when check_partition(generation_id, stream_id) then head end) from {newest_stream('%(stream)s')} s",
        {"when": when, "stream": stream_id},
    ).fetchone()
    if row is None:
        raise stream_not_found_error(conn, stream_id)
    return int(row[0])


def _read_generation_id(conn: psycopg.Connection[Any], stream_id: int, offset: int = 0) -> int:
    row = conn.execute(newest_stream("%(stream)s", "generation_id"), {"stream": stream_id}).fetchone()
    if row is None:
        raise stream_not_found_error(conn, stream_id, offset)
    return int(row[0])


def stream_not_found_error(conn: psycopg.Connection[Any], stream_id: int, offset: int = 0) -> PositionGone | NotFound:
    """Return `PositionGone` if the stream was deleted with its generation, else `NotFound`."""
    if find_deleted_streams(conn, [stream_id]):
        return PositionGone(stream_id, offset, None)
    return NotFound(f"stream {stream_id}: there is no such stream in this database. Look at the catalogue of streams.")


def check_retained(stream_id: int, offset: int, head: int, gone: bool, oldest: int | None) -> None:
    if offset > head:
        raise beyond_head_error(stream_id, offset, head)
    if (gone or oldest is None) and offset < head:
        raise PositionGone(stream_id, offset, None)
    if oldest is not None and oldest > offset:
        raise PositionGone(stream_id, offset, oldest)


def beyond_head_error(stream_id: int, offset: int, head: int) -> PositionBeyondHead:
    """Return the error for an offset beyond the head, where the stream ended once according to the caller."""
    return PositionBeyondHead(
        f"stream {stream_id}: offset {offset} is beyond the head {head}. Was the database restored from a backup, or a "
        "standby promoted that lacked the last messages? "
        "Read from an offset up to the head. `sublet groups reset` says where a group goes on."
    )


def count_contiguous(spans: Sequence[tuple[int, int]]) -> int:
    """Return how many of these [first, end) are contiguous; what lies behind a hole is left to the next read, which
    reports it."""
    for index, (previous, following) in enumerate(pairwise(spans), start=1):
        if following[0] != previous[1]:
            return index
    return len(spans)


def _read_stream(
    conn: psycopg.Connection[Any], statement: str, parameters: Any, generation_id: int, stream_id: int, offset: int
) -> tuple[int, bool, list[tuple[Any, ...]]]:
    """Return the stream's head, whether it is closed, and its blocks with their payloads."""
    rows = read_stream_blocks(conn, statement, parameters, generation_id, stream_id, offset, 3)
    head, closed, _, first_end = rows[0][:4]
    blocks = [] if first_end is None else [row[3:] for row in rows]
    blocks = blocks[: count_contiguous([(row[0] - row[1], row[0]) for row in blocks])]
    return head, closed, attach_payloads(generation_id, stream_id, blocks)


def read_stream_blocks(
    conn: psycopg.Connection[Any],
    statement: str,
    parameters: Any,
    generation_id: int,
    stream_id: int,
    offset: int,
    end_column: int,
) -> list[tuple[Any, ...]]:
    """Return the rows of a statement for `read_blocks`, at least one. They begin with the stream's head, whether it is
    closed, and whether it is gone; the column `end_column` is a block's end, null if there is none, the next its count.

    Raise what `check_retained` raises, and `NotFound`.
    """
    rows = read_blocks(conn, statement, parameters, generation_id)
    if rows and rows[0][end_column] is None and offset < rows[0][0] and not rows[0][2]:
        # A server process may go on without a partition that was attached while it looked for partitions.
        # In a savepoint: it may have been dropped, and a user may read the table only.
        with suppress(UndefinedTable, InsufficientPrivilege), conn.transaction():
            rows = read_partition(conn, statement, parameters, generation_id)
    if not rows:
        raise stream_not_found_error(conn, stream_id, offset)
    head, _, gone = rows[0][:3]
    end, count = rows[0][end_column : end_column + 2]
    check_retained(stream_id, offset, head, gone, None if end is None else end - count)
    return rows


def _decode_blocks(stream_id: int, blocks: Sequence[tuple[Any, ...]], limit_bytes: int) -> list[tuple[Any, ...]]:
    """Return the blocks with batches in place of the payloads, up to before the first that cannot be decoded, or would
    make a page of `limit_bytes` too large. Raise `PoisonBlock` if that is the very first."""
    decoded_blocks: list[tuple[Any, ...]] = []
    size, max_size = 0, min(MAX_DECODED_BYTES, MAX_EXPANSION * limit_bytes)
    for row in blocks:
        end_offset, count, codec, _, payload = row[:5]
        batch = None
        if payload is not None:
            try:
                check = partial(check_epoch_bounds, row[-1])
                batch, decoded_bytes = validate_block(codec, payload, stream_id, end_offset, count, check)
            except PoisonBlock as error:
                if decoded_blocks:
                    break
                run_end = _find_run_end(blocks)
                raise PoisonBlock(stream_id, error.offsets, error.detail, run_end=run_end) from None
            if size and size + decoded_bytes > max_size:
                break
            size += decoded_bytes
        decoded_blocks.append((*row[:4], batch))
    return decoded_blocks


def _find_run_end(blocks: Sequence[tuple[Any, ...]]) -> int:
    """Return the end of the last of the first blocks none of which can be decoded: a group skips them at once. Only as
    many are looked at as a page may decompress."""
    others = count_undecodable(((row[2], row[4], row[1]) for row in blocks[1:]), MAX_DECODED_BYTES)
    return int(blocks[others][0])


def _read_small_blocks(
    stream_id: int, offset: int, filter: TopicFilter, blocks: Sequence[tuple[Any, ...]]
) -> tuple[pa.RecordBatch, ...] | None:
    """Return the matching messages of contiguous blocks; None where one of them is large, or needs the general
    decoder."""
    if not all(_is_small(count, payload) for _, count, _, _, payload, *_ in blocks):
        return None
    batches = []
    for (codec, topics), group in groupby(blocks, lambda row: row[2:4]):
        part = list(group)
        first = part[0][0] - part[0][1]
        entire = decode_small_blocks(codec, [(row[1], row[4]) for row in part], stream_id, first)
        if entire is None:
            return None
        batches.append(filter_by_topic(drop_before(entire, first, offset), filter, topics))
    return tuple(batch for batch in batches if batch.num_rows)


def _is_small(count: int, payload: object) -> bool:
    return isinstance(payload, bytes) and count < MIN_ARROW_VALUES and len(payload) <= NEXT_BLOCK_BYTES


def _is_for_postgres(filter: TopicFilter) -> bool:
    return filter != MATCH_ALL and filter.text.count("+") * len(set(filter.text)) <= MAX_PATTERN_COST


@lru_cache
def _format_statement(*selected: bool) -> str:
    """Return the statement for `read_blocks` with the requested ones of these conditions."""
    conditions = compress((_TOPIC_MATCHES, _EPOCH_MATCHES, BLOCK_MAY_MATCH, _BEFORE_END), selected)
    matched = " and ".join(f"({condition})" for condition in conditions) or "true"
    newest = newest_stream("%(stream)s", "generation_id, head, state")
    return _SINCE.format(matched=matched, most=MAX_PAYLOAD_BYTES, newest=newest)


def _group_small_blocks(blocks: Sequence[tuple[Any, ...]], few: int) -> list[list[tuple[Any, ...]]]:
    """Return groups of consecutive blocks with the same layout, if they have fewer messages than `few` on average; the
    others one by one."""
    parts = []
    for (codec, _), group in groupby(blocks, lambda row: (row[2], row[4] is not None)):
        part = list(group)
        if not has_one_epoch(codec) and sum(row[1] for row in part) < few * len(part):
            parts.append(part)
        else:
            parts += [[row] for row in part]
    return parts


def _select_messages(
    stream_id: int,
    offset: int,
    filter: TopicFilter,
    excluded: ExcludedEpochs | None,
    predicate: MessagePredicate | None,
    blocks: Sequence[tuple[Any, ...]],
) -> pa.RecordBatch | None:
    """Return the matching messages of a block, or of several with the same layout; None if there are none."""
    end_offset, count, codec, topics, stored = blocks[0][:5]
    if stored is None:
        return None
    first = end_offset - count
    entire = add_position_columns(restore(codec, [row[4] for row in blocks]), stream_id, first)
    messages = filter_by_topic(drop_before(entire, first, offset), filter, topics)
    if excluded is not None:
        messages = drop_excluded(messages, excluded)
    if predicate is not None:
        messages = predicate.filter_batch(messages)
    return messages if messages.num_rows else None
