"""What was acknowledged is there: after kill -9 of the publisher, of a node, of whoever rolls over, and of Postgres."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.db.connect import connect
from sublet_storage.log.append import AppendOutcome, BlockAppend, ProducerStamp, append
from sublet_storage.log.block import PackedBlock
from sublet_storage.log.fetch import read_heads
from sublet_storage.spaces.space_changes import reshard
from sublet_storage.spaces.space_queries import open_streams
from tests.integration.log_kit import block, everything, kill_postgres, stamped
from tests.kit import eventually, server_directory
from tests.kit_nodes import Fleet

ROLLER = """
import itertools, sys
from sublet_storage.db.connect import connect
from sublet_storage.spaces.space_changes import reshard
with connect(sys.argv[1]) as conn:
    for shards in itertools.cycle((2, 3)):
        reshard(conn, "default", shards)
"""


class Victims:
    """A publisher, a node and a process that reshards without end, all on one embedded Postgres."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory, self.url = directory, url
        self.fleet = Fleet(url, directory)
        self.acknowledged: list[int] = []
        command = [sys.executable, "-m", "tests.integration.publisher_process", url]
        self.publisher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        self.roller: subprocess.Popen[bytes] | None = None

    def _listen(self) -> None:
        assert self.publisher.stdout is not None
        self.acknowledged += (int(line) for line in self.publisher.stdout if line.endswith("\n"))

    def begin(self) -> None:
        """Start those that are not running."""
        node = self.fleet.node("n1")
        eventually(lambda: "serves on" in node.output(), 30, node.output)
        self.roller = subprocess.Popen([sys.executable, "-c", ROLLER, self.url])

    def kill_helpers(self) -> None:
        """kill -9 the node and the roller, wherever they are."""
        self.fleet.nodes["n1"].kill()
        if self.roller is not None:
            self.roller.kill()
            self.roller.wait()

    def kill_publisher(self) -> None:
        """kill -9, and read what it had said."""
        self.publisher.kill()
        self.publisher.wait()
        self._listener.join(20)

    def close(self) -> None:
        self.kill_publisher()
        if self.roller is not None:
            self.roller.kill()
            self.roller.wait()
        self.fleet.close()

    def published(self, more: int) -> None:
        """Wait until that many more are acknowledged."""
        least = len(self.acknowledged) + more
        eventually(lambda: len(self.acknowledged) >= least, 60)


@contextmanager
def victims(server: EmbeddedPostgres, directory: Path) -> Iterator[Victims]:
    made = Victims(directory, server.url)
    try:
        yield made
    finally:
        made.close()


def stored(url: str) -> list[int]:
    with connect(url) as conn:
        return [int(message["value"]) for messages in everything(conn).values() for message in messages]


@pytest.mark.conforms("W1", "W2")
def test_nothing_acknowledged_is_ever_lost() -> None:
    directory = server_directory()
    try:
        with EmbeddedPostgres(directory / "data") as server:
            migrate(server.url)
            with victims(server, directory) as scene:
                for _ in range(3):
                    scene.begin()
                    scene.published(200)
                    scene.kill_helpers()
                    scene.published(100)
                    before = tuple(scene.acknowledged)
                    kill_postgres(directory / "data")
                    server.start()
                    assert set(before) <= set(stored(server.url)), "acknowledged before Postgres was killed"
                scene.published(100)
                scene.kill_publisher()
                eventually(lambda: not _publishing(server.url))
                found = stored(server.url)
                assert set(scene.acknowledged) <= set(found)
                assert len(found) == len(set(found)), "stored once"
                _in_order(server.url)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _publishing(url: str) -> int:
    with connect(url) as conn:
        row = conn.execute(
            "select count(*) from pg_stat_activity where application_name = 'sublet publisher'"
        ).fetchone()
    return int(row[0]) if row else 0


def _in_order(url: str) -> None:
    """What has no key is in order per topic; streams of one topic follow each other by their ids."""
    topics: dict[str, list[int]] = defaultdict(list)
    with connect(url) as conn:
        for _, messages in sorted(everything(conn).items()):
            for message in messages:
                topics[message["topic"]].append(int(message["value"]))
    assert len(topics) == 3
    for values in topics.values():
        assert values == sorted(values)


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(database) as connection:
        reshard(connection, "default", 3)
        yield connection


@pytest.mark.conforms("W1")
def test_an_append_to_several_streams_is_whole(conn: psycopg.Connection[Any]) -> None:
    streams = [each.stream_id for each in open_streams(conn)]
    good = block(b"x", b"y")
    bad = PackedBlock(0, good.first_timestamp, good.last_timestamp, good.topics, good.codec, good.payload)
    with pytest.raises(psycopg.errors.CheckViolation):
        append(conn, [BlockAppend(streams[0], good), BlockAppend(streams[1], bad), BlockAppend(streams[2], good)])
    assert {head.head for head in read_heads(conn, streams).values()} == {0}
    assert conn.execute("select count(*) from block").fetchone() == (0,)
    assert append(conn, [BlockAppend(streams[0], good)])[0].outcome is AppendOutcome.APPENDED


@pytest.mark.conforms("W1")
def test_an_append_whose_backend_is_killed_before_its_commit_is_not_there_at_all(
    database: str, conn: psycopg.Connection[Any]
) -> None:
    streams = [each.stream_id for each in open_streams(conn)]
    with suppress(psycopg.OperationalError), connect(database) as doomed:
        doomed.execute("begin")
        append(doomed, [BlockAppend(stream_id, block(b"x", b"y")) for stream_id in streams])
        conn.execute("select pg_terminate_backend(%s, 5000)", (doomed.info.backend_pid,))
    assert {head.head for head in read_heads(conn, streams).values()} == {0}
    assert all(not messages for messages in everything(conn).values())


@pytest.mark.conforms("W2")
def test_a_retry_of_an_append_to_several_streams_stores_none_of_it_twice(conn: psycopg.Connection[Any]) -> None:
    streams = [each.stream_id for each in open_streams(conn)]
    batch = [stamped(stream_id, ProducerStamp("p", 1, 1), b"x", b"y") for stream_id in streams]
    first = append(conn, batch)
    reshard(conn, "default", 2)
    again = append(conn, batch)
    assert {each.outcome for each in first} == {AppendOutcome.APPENDED}
    assert {each.outcome for each in again} == {AppendOutcome.DUPLICATE}
    assert [each.end_offset for each in again] == [each.end_offset for each in first] == [2, 2, 2]
