"""What the tests of the log share: making blocks, reading everything back, judging the order of keys."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar

import psycopg
import pyarrow as pa

from sublet_protocol.domain.epoch_frontiers import Epoch
from sublet_storage.db.connect import connect
from sublet_storage.log.append import BlockAppend, ProducerStamp, append
from sublet_storage.log.block_encoder import PackedBlock, pack
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.log.fetch import fetch
from sublet_storage.spaces.space_changes import create_space, reshard
from sublet_storage.spaces.space_queries import find_space
from tests.support.streams import open_streams


class OfStream(Protocol):
    """Something that has the number of its stream."""

    @property
    def stream_id(self) -> int: ...


O = TypeVar("O", bound=OfStream)  # noqa: E741
Message = dict[str, Any]
Connection = psycopg.Connection[Any]


def batch(values: Iterable[bytes], topic: str | Sequence[str] = "t", key: bytes | None = None) -> pa.RecordBatch:
    """Messages of one key, at timestamp 0."""
    held = list(values)
    topics = [topic] * len(held) if isinstance(topic, str) else list(topic)
    nothing = [None] * len(held)
    columns = [topics, [key] * len(held), held, nothing, [0] * len(held), nothing]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, BLOCK_SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=BLOCK_SCHEMA)


def block(*values: bytes, topic: str | Sequence[str] = "t") -> PackedBlock:
    return pack(batch(values, topic))


def in_epochs(*epochs: Epoch) -> PackedBlock:
    """A block with a message in each of these epochs."""
    plain = batch(b"%d" % number for number in range(len(epochs)))
    place = BLOCK_SCHEMA.get_field_index("epoch")
    column = pa.array([list(epoch) for epoch in epochs], BLOCK_SCHEMA.field(place).type)
    return pack(plain.set_column(place, BLOCK_SCHEMA.field(place), column))


def put(conn: psycopg.Connection[Any], stream_id: int, *values: bytes, topic: str = "t") -> int:
    """Append one block without a stamp; its end offset."""
    (answer,) = append(conn, [BlockAppend(stream_id, block(*values, topic=topic))])
    assert answer.end_offset is not None
    return answer.end_offset


def count_page_reads(conn: Connection, work: Callable[[], object]) -> int:
    """Return how many pages of tables and indexes this connection reads, cached or not, while the work is done 100
    times in one transaction."""
    with conn.transaction():
        before = _read_page_count(conn)
        for _ in range(100):
            work()
        return _read_page_count(conn) - before


@contextmanager
def beside_an_open_transaction(url: str, conn: Connection, work: Callable[[], object]) -> Iterator[tuple[int, int]]:
    """Yield `count_page_reads` of the work at first, and after it was done 2000 times, each the least of three: where
    Postgres analyzes a table meanwhile, its planner reads pages too. An older transaction is open until the block
    ends, and keeps all versions of the rows that the work changes."""
    with connect(url, autocommit=False, idle_in_transaction_timeout_s=600) as old:
        old.execute("select pg_current_xact_id()")
        work()
        first = min(count_page_reads(conn, work) for _ in range(3))
        for _ in range(2000):
            work()
        conn.execute("analyze")
        yield first, min(count_page_reads(conn, work) for _ in range(3))


def _read_page_count(conn: Connection) -> int:
    counts = """
select sum(pg_stat_get_xact_blocks_fetched(oid)) from pg_class where relnamespace = current_schema()::regnamespace"""
    ((count,),) = conn.execute(counts).fetchall()
    return int(count)


def go_over_to_another_timeline(conn: psycopg.Connection[Any]) -> None:
    """Change the timeline, as if a standby had been promoted that lacks nothing."""
    conn.execute("update timeline set number = number + 2, name = timeline_now()")


def swap_filters(conn: psycopg.Connection[Any]) -> None:
    """Swap the filters of `eu` and `us`, as if the spaces had been created the other way round."""
    for space, filter in (("eu", "none"), ("us", "eu/#"), ("eu", "us/#")):
        conn.execute("update space set filter = %s where name = %s", (filter, space))


def stream_of(conn: psycopg.Connection[Any], space: str) -> int:
    """The first stream of a space that is open."""
    space_id = find_space(conn, space).space_id
    return next(each.stream_id for each in open_streams(conn) if each.space_id == space_id)


def generation_of(conn: Connection, stream_id: int) -> int:
    """The generation that a stream belongs to."""
    ((generation_id,),) = conn.execute("select generation_id from stream where stream_id = %s", (stream_id,)).fetchall()
    return int(generation_id)


@contextmanager
def with_a_short_lived_space(database: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection; the spaces `default` and `eu`, of one stream each, and of `eu` retention takes what is old."""
    with connect(database) as connection:
        reshard(connection, "default", 1)
        create_space(connection, "eu", "eu/#", shards=1, retention_s=100)
        yield connection


def of_stream(found: Iterable[O], stream_id: int) -> O:
    """Return the one of this stream."""
    (one,) = [each for each in found if each.stream_id == stream_id]
    return one


def stamped(stream_id: int, stamp: ProducerStamp, *values: bytes) -> BlockAppend:
    return BlockAppend(stream_id, block(*values), stamp)


def read(
    conn: psycopg.Connection[Any], stream_id: int, offset: int = 0, columns: Sequence[str] = (), **limits: Any
) -> list[Message]:
    """Return all messages of a stream from an offset on, page by page, with these columns or all."""
    found: list[Message] = []
    while True:
        page = fetch(conn, stream_id, offset, **limits)
        found += [row for each in page.batches for row in each.select(columns or each.schema.names).to_pylist()]
        if page.position == page.head:
            return found
        assert page.position > offset, "a page that is not the last moves on"
        offset = page.position


def everything(conn: psycopg.Connection[Any], columns: Sequence[str] = ()) -> dict[int, list[Message]]:
    """Return all messages of all streams, or these columns of them; assert that offsets have no gap."""
    ids = [row[0] for row in conn.execute("select stream_id from stream order by stream_id")]
    streams = {stream_id: read(conn, stream_id, columns=columns) for stream_id in ids}
    for found in streams.values():
        assert [message["offset"] for message in found] == list(range(len(found)))
    return streams


_BY_KEY = ("offset", "key", "value")
"""All columns of a message as objects of Python take ten times as long."""


def by_key(conn: psycopg.Connection[Any]) -> dict[bytes, list[bytes]]:
    """The values of each key in the order in which a group would be granted them: parents before children.

    Asserts that wherever a key moved, its new stream descends from its old one: else a group could overtake.
    """
    parents = {row[0]: set(row[1]) for row in conn.execute("select stream_id, parents from stream")}
    ancestors: dict[int, set[int]] = {}
    for stream_id in sorted(parents):
        ancestors[stream_id] = parents[stream_id].union(*(ancestors[parent] for parent in parents[stream_id]))
    values: dict[bytes, list[bytes]] = defaultdict(list)
    last: dict[bytes, int] = {}
    for stream_id, messages in sorted(everything(conn, _BY_KEY).items()):
        for message in messages:
            key = message["key"]
            before = last.setdefault(key, stream_id)
            assert before == stream_id or before in ancestors[stream_id], f"{key!r} jumped to {stream_id}"
            last[key] = stream_id
            values[key].append(message["value"])
    return values


def kill_postgres(data_dir: Path) -> None:
    """kill -9 the postmaster of an embedded server; its backends die of it."""
    pid = int(next(data_dir.rglob("postmaster.pid")).read_text().split()[0])
    os.kill(pid, signal.SIGKILL)


def waiting_for_locks(url: str) -> int:
    """Return how many of a database's connections wait for a lock."""
    query = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
    with connect(url) as conn:
        (row,) = conn.execute(query).fetchall()
    return int(row[0])
