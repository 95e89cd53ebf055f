"""The log against the raw limits of the same Postgres, and against one row per message.

`python -m bench.log --messages 1000000 --json out.json`. Every round measures every contender once, on a fresh
database, and ratios are taken within the round.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, TypeAlias

import psycopg
import pyarrow as pa

from bench import _postgres as postgres
from bench import _report as report
from bench._report import Beside, Claim, Series
from sublet_storage.db.connect import connect
from sublet_storage.log.fetch import fetch
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.support.streams import open_streams

VALUE_BYTES = 100
BLOCKS = (1000, 10000)
OF_COPY_WITH_KEYS = {1000: 1.0, 10000: 0.8}
SLICES = 3
AWAITED = 500
"""Messages that are awaited one by one."""
ROWS_SHARE = 5
"""One row per message is slow, so that it gets a fifth of each slice."""

Contender: TypeAlias = Callable[[range], int]
"""Publishes the messages of the given calls, or reads everything; returns the number of messages."""
WalBytes = dict[str, list[float]]
"""{contender: bytes of WAL for each message, round by round}."""
TOPIC = "orders/eu/created"
HEADER = b"PGCOPY\n\xff\r\n\0" + struct.pack("!ii", 0, 0)
END = struct.pack("!h", -1)
PROSE = """Messages of {value} bytes, {messages:,} per round, {rounds} rounds; durable (fsync, synchronous_commit on).
Every ratio is the median over rounds of two contenders that
took turns, slice by slice, in the same round. *1000* and *10000* are the messages per columnar call, block and commit;
*keys* have a topic, key and value each and are spread over 16 streams, so that a call makes 16 small blocks. *COPY*
writes the same values, one row each, into a table without an index, encoded beforehand. *rows* is a table (stream,
offset, topic, key, value, timestamp) with a primary key, written by psycopg with the better of COPY and executemany and
the same commits, and read by pages of 10,000. *publish* includes checks, routing, encoding and acknowledgement;
*consume* includes the decoding into Arrow with the columns stream and offset. *Each awaited* is one message after the
other, each with a commit of its own. *WAL* is what the server wrote to its log for each message."""


class Payload:
    """The same messages in the form that is fastest for each contender."""

    def __init__(self, messages: int, block: int) -> None:
        self.blocks = [[os.urandom(VALUE_BYTES) for _ in range(block)] for _ in range(messages // block)]
        self.block, self.count = block, block * len(self.blocks)
        self.arrays = [pa.array(values, pa.binary()) for values in self.blocks]
        self.copies = [HEADER + b"".join(map(_copy_row, values)) + END for values in self.blocks]
        keys = [[os.urandom(8) for _ in values] for values in self.blocks]
        topics = [f"orders/{index % 100}/created" for index in range(block)]
        encoded = [topic.encode() for topic in topics]
        self.keys = [pa.array(each, pa.binary()) for each in keys]
        self.topics = pa.array(topics)
        self.keyed_copies = [
            HEADER + b"".join(map(_copy_row, encoded, *pair)) + END for pair in zip(keys, self.blocks, strict=True)
        ]


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the tables."""
    parser = argparse.ArgumentParser(prog="bench.log", description=__doc__)
    parser.add_argument("--messages", type=int, default=1_000_000, help="per round and contender")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    options = parser.parse_args(arguments)
    series, wal = Series(), WalBytes()
    payloads = [Payload(options.messages, block) for block in BLOCKS]
    with postgres.server() as url:
        _round(
            postgres.database(url, 0), [Payload(options.messages // 10, block) for block in BLOCKS], Series(), {}, True
        )
        for number in range(1, options.rounds + 1):
            _round(postgres.database(url, number), payloads, series, wal, number % 2 == 0)
            print(f"round {number} of {options.rounds}", flush=True)
    settings = {"messages": options.messages, "rounds": options.rounds, "value_bytes": VALUE_BYTES}
    section = report.write("log", settings, series, _claims(), options.json, _wal_figures(wal))
    prose = PROSE.format(value=VALUE_BYTES, messages=options.messages, rounds=options.rounds)
    report.page(options.page, "log", prose, section)
    print(section)


def _wal_figures(wal: WalBytes) -> list[Beside]:
    return [
        Beside(
            f"WAL, {what} {block}",
            statistics.median(wal[f"{what} {block}"]),
            "bytes a message",
            peer,
            statistics.median(wal[f"{peer} {block}"]),
        )
        for block in BLOCKS
        for what, peer in (("publish", "COPY in"), ("publish", "rows in, COPY"), ("publish keys", "COPY in keys"))
    ]


def _claims() -> list[Claim]:
    claims = [Claim("publish / bare INSERT, each awaited", "publish, each awaited", "bare INSERT, each awaited", 0.65)]
    for block in BLOCKS:
        claims += [
            Claim(f"publish / COPY in, blocks of {block}", f"publish {block}", f"COPY in {block}", 0.8),
            Claim(
                f"publish many keys / COPY in, {block} a call",
                f"publish keys {block}",
                f"COPY in keys {block}",
                OF_COPY_WITH_KEYS[block],
            ),
            Claim(f"publish / rows in, {block} per commit", f"publish {block}", f"rows in {block}", None),
            Claim(f"consume / COPY out, blocks of {block}", f"consume {block}", f"COPY out {block}", 2.0),
            Claim(f"consume / rows out, blocks of {block}", f"consume {block}", f"rows out {block}", 3.0),
        ]
    return claims


def _round(url: str, payloads: list[Payload], series: Series, wal: WalBytes, turned: bool) -> None:
    with connect(url) as conn:
        conn.execute("create table raw (value bytea)")
        conn.execute("create table raw_keys (topic text, key bytea, value bytea)")
        conn.execute(
            "create table rows (stream_id bigint, off bigint, topic text, key bytea, value bytea, at timestamptz,"
            " primary key (stream_id, off))"
        )
        for payload in payloads:
            _contend(url, conn, payload, series, wal, turned)
        _one_by_one(url, conn, payloads[0], series)


def _contend(
    url: str, conn: psycopg.Connection[Any], payload: Payload, series: Series, wal: WalBytes, turned: bool
) -> None:
    """Measure all contenders at one size. Those that are compared take turns, so that the machine's load affects both
    alike."""

    def compare(contenders: dict[str, Contender]) -> None:
        conn.execute("checkpoint")
        gc.collect()
        for contender, used in _take_turns(conn, contenders, len(payload.blocks), turned).items():
            series.add(f"{contender} {payload.block}", used.messages, used.seconds)
            wal.setdefault(f"{contender} {payload.block}", []).append(used.wal_bytes / used.messages)

    with _publisher(url, payload) as publisher:
        compare(
            {
                "publish keys": lambda part: _publish_keys(publisher, payload, part),
                "COPY in keys": lambda part: _copy_in(conn, payload, "raw_keys", part),
            }
        )
        reshard(conn, "default", 1)
        publisher.publish(TOPIC, b"").result()
        compare(
            {
                "publish": lambda part: _publish(publisher, payload, part),
                "COPY in": lambda part: _copy_in(conn, payload, "raw", part),
                "rows in, COPY": lambda part: _rows_copy(conn, payload, _some(part)),
                "rows in, executemany": lambda part: _rows_executemany(conn, payload, _some(part)),
            }
        )
    best = max(series.rates[f"rows in, {how} {payload.block}"][-1] for how in ("COPY", "executemany"))
    series.rates.setdefault(f"rows in {payload.block}", []).append(best)
    reader = Reader(conn, payload.count + 1)
    compare({"consume": reader.consume, "COPY out": reader.copy_out, "rows out": reader.rows_out})
    reshard(conn, "default", 16)
    conn.execute("truncate raw, raw_keys, rows")


@dataclass
class Used:
    """What one contender has used over its slices."""

    messages: int = 0
    seconds: float = 0.0
    wal_bytes: int = 0


def _take_turns(
    conn: psycopg.Connection[Any], contenders: dict[str, Contender], blocks: int, turned: bool
) -> dict[str, Used]:
    """Return what each has used, slice by slice; the first of a turn is the last of the next."""
    used = {contender: Used() for contender in contenders}
    cuts = [blocks * number // SLICES for number in range(SLICES + 1)]
    for number, part in enumerate(range(*each) for each in pairwise(cuts)):
        order = list(contenders)
        for contender in reversed(order) if turned is (number % 2 == 0) else order:
            written, started = _wal_bytes(conn), time.perf_counter()
            used[contender].messages += contenders[contender](part)
            used[contender].seconds += time.perf_counter() - started
            used[contender].wal_bytes += _wal_bytes(conn) - written
    return used


def _wal_bytes(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("select (pg_current_wal_insert_lsn() - '0/0')::bigint").fetchone()
    assert row is not None
    return int(row[0])


def _some(part: range) -> range:
    """Return a part of a slice, enough for the rate of contenders that are many times slower."""
    return part[: max(1, len(part) // ROWS_SHARE)]


def _publisher(url: str, payload: Payload) -> Publisher:
    """Return a publisher of one block per call and commit; over many streams, one block each."""
    return Publisher(url, block_messages=payload.block, block_bytes=1 << 21, blocks_per_commit=1)


def _publish(publisher: Publisher, payload: Payload, part: range) -> int:
    for index in part:
        publisher.publish_batch({"topic": TOPIC, "value": payload.arrays[index]})
    publisher.flush()
    return payload.block * len(part)


def _publish_keys(publisher: Publisher, payload: Payload, part: range) -> int:
    for index in part:
        data = {"topic": payload.topics, "value": payload.arrays[index], "key": payload.keys[index]}
        publisher.publish_batch(data)
    publisher.flush()
    return payload.block * len(part)


def _one_by_one(url: str, conn: psycopg.Connection[Any], payload: Payload, series: Series) -> None:
    """Measure `publish` per message, and with each delivery awaited beside a bare INSERT and its commit."""
    with Publisher(url) as publisher:
        started = time.perf_counter()
        for values in payload.blocks[:100]:
            for value in values:
                publisher.publish(TOPIC, value)
        publisher.flush()
        series.add(
            "publish message by message", len(payload.blocks[:100]) * payload.block, time.perf_counter() - started
        )

        def insert(value: bytes) -> object:
            return conn.execute("insert into raw values (%b)", (value,), prepare=True)

        contenders: dict[str, Callable[[bytes], object]] = {
            "publish, each awaited": lambda value: publisher.publish(TOPIC, value).result(),
            "bare INSERT, each awaited": insert,
        }
        for contender, send in contenders.items():
            started = time.perf_counter()
            for value in payload.blocks[0][:AWAITED]:
                send(value)
            series.add(contender, len(payload.blocks[0][:AWAITED]), time.perf_counter() - started)


def _copy_in(conn: psycopg.Connection[Any], payload: Payload, table: Literal["raw", "raw_keys"], part: range) -> int:
    copies = payload.copies if table == "raw" else payload.keyed_copies
    for index in part:
        with conn.cursor() as cursor, cursor.copy(f"copy {table} from stdin (format binary)") as copy:
            copy.write(copies[index])
    return payload.block * len(part)


def _rows(payload: Payload, index: int, stream: int) -> list[tuple[object, ...]]:
    start, at = index * payload.block, "2026-01-01 00:00:00+00"
    return [(stream, start + row, TOPIC, None, value, at) for row, value in enumerate(payload.blocks[index])]


def _rows_executemany(conn: psycopg.Connection[Any], payload: Payload, part: range) -> int:
    with conn.cursor() as cursor:
        for index in part:
            with conn.transaction():
                cursor.executemany("insert into rows values (%s, %s, %s, %s, %s, %s)", _rows(payload, index, 2))
    return payload.block * len(part)


def _rows_copy(conn: psycopg.Connection[Any], payload: Payload, part: range) -> int:
    for index in part:
        with conn.cursor() as cursor, cursor.copy("copy rows from stdin") as copy:
            for row in _rows(payload, index, 1):
                copy.write_row(row)
    return payload.block * len(part)


class Reader:
    """Reads everything back, by each method."""

    def __init__(self, conn: psycopg.Connection[Any], count: int) -> None:
        self._conn, self._count = conn, count

    def copy_out(self, _: range) -> int:
        """Read the raw values."""
        with self._conn.cursor() as cursor, cursor.copy("copy raw to stdout (format binary)") as copy:
            for _row in copy:
                pass
        return self._count - 1

    def consume(self, _: range) -> int:
        """Read pages of Arrow batches."""
        stream = open_streams(self._conn)[0]
        position = seen = 0
        while seen < self._count:
            page = fetch(self._conn, stream.stream_id, position, generation_id=stream.generation_id)
            seen, position = seen + sum(batch.num_rows for batch in page.batches), page.position
        return seen

    def rows_out(self, _: range) -> int:
        """Read pages of tuples, until there are no more."""
        position, seen = -1, 0
        while True:
            rows = self._conn.execute(
                "select off, topic, key, value, at from rows where stream_id = 1 and off > %s order by off limit 10000",
                (position,),
                prepare=True,
                binary=True,
            ).fetchall()
            if not rows:
                return seen
            seen, position = seen + len(rows), rows[-1][0]


def _copy_row(*fields: bytes) -> bytes:
    return struct.pack("!h", len(fields)) + b"".join(struct.pack("!i", len(field)) + field for field in fields)


if __name__ == "__main__":
    main()
