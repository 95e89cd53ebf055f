"""Load on the server: WAL and disk per message, connections, and the cost of idling.

`python -m bench volume --messages 100000`. One Postgres; publishers, a node and consumers with default settings.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from bench import _postgres as postgres
from bench import _report as report
from bench._report import Beside
from bench.peers.ours import POLL, node
from sublet_borrower.consumer.session import Session
from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space

VALUE_BYTES = 100
BLOCKS = (1, 10, 100, 1000, 10_000)
IDLE_S = 10.0
PROSE = """*WAL* and *disk* are of one message of {value} random bytes without a key, {messages:,} of them (a tenth for
blocks of 1 and 10) in blocks of so many, each a commit: the WAL written, and the growth of the table with its index and
what is stored out of line, beside the message's own bytes. *JSON* are values of {json:,} bytes that differ in their
numbers, in blocks of 1,000. *Consuming* is what the progress of one session over them writes, and all else that its
node writes meanwhile. *Idle* is a node with one consumer that waits on 16 streams, for {idle:g} s, beside the server
without them. *Connections* are counted while a node, a publisher and a session are at work, by the name that they go
by in pg_stat_activity."""


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    options = _options(arguments)
    with postgres.server() as server:
        with connect(url := postgres.database(server, 1)) as conn:
            figures = [*_blocks(url, conn, options.messages), *_json(url, conn, options.messages)]
        with connect(url := postgres.database(server, 3)) as conn, tempfile.TemporaryDirectory() as directory:
            figures += _at_work(url, conn, Path(directory), options.messages, options.idle)
    settings = {"messages": options.messages, "value_bytes": VALUE_BYTES, "idle_s": options.idle}
    report.save("volume", settings, {"figures": [each.judged() for each in figures]}, options.json)
    prose = PROSE.format(value=VALUE_BYTES, messages=options.messages, json=len(_order(0)), idle=options.idle)
    report.page(options.page, "volume", " ".join(prose.split()), report.table(figures))
    print(report.table(figures))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench volume", description=__doc__)
    parser.add_argument("--messages", type=int, default=200_000)
    parser.add_argument("--idle", type=float, default=IDLE_S, help="seconds")
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    return parser.parse_args(arguments)


def _wal(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("select pg_current_wal_insert_lsn() - '0/0'::pg_lsn").fetchone()
    assert row is not None
    return int(row[0])


def _disk(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute(
        "select coalesce(sum(pg_total_relation_size(inhrelid)), 0) from pg_inherits where inhparent = 'block'::regclass"
    ).fetchone()
    assert row is not None
    return int(row[0])


def _cost(conn: psycopg.Connection[Any], act: Callable[[], None]) -> tuple[int, int]:
    """Return (bytes of WAL, bytes of disk) that `act` has written."""
    conn.execute("checkpoint")
    wal, disk = _wal(conn), _disk(conn)
    act()
    return _wal(conn) - wal, _disk(conn) - disk


def _publish(url: str, topic: str, values: list[bytes], block: int) -> None:
    with Publisher(url) as publisher:
        for first in range(0, len(values), block):
            publisher.publish_batch({"topic": topic, "value": pa.array(values[first : first + block], pa.binary())})
            publisher.flush()


def _blocks(url: str, conn: psycopg.Connection[Any], messages: int) -> list[Beside]:
    found = []
    for block in BLOCKS:
        count = messages // 10 if block < 100 else messages
        values = [os.urandom(VALUE_BYTES) for _ in range(count)]
        wal, disk = _cost(conn, partial(_publish, url, "t", values, block))
        peer = "its value"
        found.append(Beside(f"WAL of a message, blocks of {block:,}", wal / count, "bytes", peer, VALUE_BYTES))
        found.append(Beside(f"disk of a message, blocks of {block:,}", disk / count, "bytes", peer, VALUE_BYTES))
    return found


def _order(number: int) -> bytes:
    fields = {"id": number, "customer": f"customer-{number % 97}", "amount": number % 1000 / 10, "currency": "EUR"}
    return json.dumps({**fields, "state": "created", "warehouse": f"w{number % 7}"}).encode()


def _json(url: str, conn: psycopg.Connection[Any], messages: int) -> list[Beside]:
    values = [_order(number) for number in range(messages)]
    size = sum(map(len, values)) / messages
    found = []
    for compression in ("none", "lz4", "zstd"):
        create_space(conn, compression, f"{compression}/#", shards=1, compression=compression)
        _, disk = _cost(conn, partial(_publish, url, f"{compression}/t", values, 1000))
        found.append(Beside(f"disk of a message of JSON, {compression}", disk / messages, "bytes", "its value", size))
    return found


def _at_work(url: str, conn: psycopg.Connection[Any], directory: Path, messages: int, idle_s: float) -> list[Beside]:
    quiet = _idle(conn, idle_s)
    with (
        node(url, POLL, directory / "node.log") as process,
        Session("$share/g/t", url, starting_position="latest") as session,
    ):
        while not session.assignment():
            session.poll(0.1)
        resident = _resident(process.pid)
        with Publisher(url) as publisher:
            publisher.publish("t", b"one").result()
            for batch in session:
                batch.ack()
                break
            connections = _connections(conn)
        busy = _idle(conn, idle_s, session)
        _publish(url, "t", [os.urandom(VALUE_BYTES) for _ in range(messages)], 1000)
        wal, _ = _cost(conn, partial(_consume, session, messages))
    return [
        Beside("WAL of consuming a message", wal / messages, "bytes", "its value", VALUE_BYTES),
        Beside("WAL a second, idle", busy, "bytes", "without a node", quiet),
        *(Beside(f"connections named {who!r}", count, "", "process", 1) for who, count in sorted(connections.items())),
        Beside("memory of an idle node", resident / 2**20, "MiB", "of Python with nothing", _bare() / 2**20),
    ]


def _idle(conn: psycopg.Connection[Any], seconds: float, session: Session | None = None) -> float:
    """Return the bytes of WAL per second, without a checkpoint, whose pages would be counted."""
    before, end = _wal(conn), time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        if session is None:
            time.sleep(left)
        else:
            session.poll(left)
    return max(1.0, (_wal(conn) - before) / seconds)


def _consume(session: Session, messages: int) -> None:
    left = messages
    while left > 0:
        batch = session.poll(10)
        assert batch is not None, f"{left} messages did not come"
        left -= len(batch)
        batch.ack()


def _resident(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _bare() -> int:
    """Return the resident memory of an interpreter that does nothing."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        time.sleep(1)
        resident = _resident(process.pid)
        process.kill()
    return resident


def _connections(conn: psycopg.Connection[Any]) -> dict[str, int]:
    """Return {application name: connections}, without the one used for counting."""
    return dict(
        conn.execute(
            "select application_name, count(*) from pg_stat_activity where pid <> pg_backend_pid()"
            " and backend_type = 'client backend' and datname = current_database() group by 1"
        ).fetchall()
    )
