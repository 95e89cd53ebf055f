"""Whole epochs without a group, through retention, deaths, restarts and load."""

from __future__ import annotations

import subprocess
import sys
import threading

import psycopg
import pytest

from sublet_protocol.domain.errors import PositionGone
from sublet_storage.db.connect import connect
from sublet_storage.log import epoch_leases
from sublet_storage.log.epoch_leases import hold, release
from sublet_storage.producer import Publisher
from sublet_storage.readers.complete_epoch_tail import EpochTailItem, EpochTailReader
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import create_space, reshard, rollover
from sublet_storage.spaces.space_queries import find_space
from tests.integration.epoch_kit import ALL, A, B, EpochBlocks, check_course, numbers, reported, seen
from tests.integration.log_kit import Connection
from tests.kit import eventually
from tests.kit_nodes import ROOT


@pytest.fixture
def story(conn: Connection) -> EpochBlocks:
    return EpochBlocks(conn)


# --- retention ------------------------------------------------------------------------------------------------------


def take_what_is_closed(conn: Connection) -> None:
    conn.execute("update space set retention_s = 1")
    conn.execute("update generation set closed_at = closed_at - interval '9 s' where state = 'closed'")
    assert apply_retention(conn)


@pytest.mark.conforms("S7")
@pytest.mark.parametrize("begin", ["earliest", "active"])
def test_epochs_taken_in_part_do_not_come(conn: Connection, story: EpochBlocks, begin: str) -> None:
    story.three_and_five()
    rollover(conn, "default")
    story.publish(A, 5, 6)
    take_what_is_closed(conn)
    reading = EpochTailReader(conn, ALL, begin)
    messages = list(reading.read_available(conn))
    story.publish(A, 4, 5, 6, stream=1)
    story.publish(A, 6, 7)
    assert numbers(seen([*messages, *reading.read_available(conn)])) == {6: 3, 7: 1}


@pytest.mark.conforms("S3")
def test_losing_what_was_to_come_ends_the_reading(conn: Connection, story: EpochBlocks) -> None:
    story.three_and_five()
    gone: list[PositionGone] = []
    torn, partial = EpochTailReader(conn, ALL), EpochTailReader(conn, ALL, entire=False, on_data_loss=gone.append)
    untouched = EpochTailReader(conn, ALL, on_data_loss=gone.append)
    story.publish(A, 5)
    list(untouched.read_available(conn))
    story.publish(A, 6)
    list(partial.read_available(conn))
    story.publish(A, 6)
    list(untouched.read_available(conn))
    rollover(conn, "default")
    take_what_is_closed(conn)
    story.publish(A, 6)
    for _ in range(2):
        with pytest.raises(PositionGone):
            list(torn.read_available(conn))
    assert numbers(seen(partial.read_available(conn))) == {6: 1}
    assert numbers(seen(untouched.read_available(conn))) == {6: 1}
    assert len(gone) == 1


def test_losing_what_is_left_out_harms_nothing(conn: Connection, story: EpochBlocks) -> None:
    story.three_and_five()
    gone: list[PositionGone] = []
    reading = EpochTailReader(conn, ALL, on_data_loss=gone.append)
    story.publish(A, 3, 5)
    rollover(conn, "default")
    take_what_is_closed(conn)
    story.publish(A, 5, 6)
    assert numbers(seen(reading.read_available(conn))) == {6: 1}
    assert len(gone) == 1


# --- deaths and restarts --------------------------------------------------------------------------------------------

DYING = """
import os, signal, sys
from sublet_storage.producer import Publisher

publisher = Publisher(sys.argv[1], space="default", epoch_lease_s=1)
publisher.advance(3)
publisher.in_epoch(4).publish("t", b"unfinished").result(30)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.conforms("S4")
def test_a_dead_publishers_epochs_are_completed(database: str, conn: Connection, story: EpochBlocks) -> None:
    story.advance(A, 2)
    reading = EpochTailReader(conn, ALL)
    messages = list(reading.read_available(conn))
    subprocess.run([sys.executable, "-c", DYING, database], cwd=ROOT, check=False, timeout=60)
    story.publish(A, 7)
    story.advance(A, 9)
    messages += reading.read_available(conn)
    assert numbers(seen(messages)) == {4: 1, 7: 1}
    assert reported(messages) == [((3,),)]
    eventually(lambda: list(epoch_leases.expire(conn)), 30)
    assert reported(reading.read_available(conn)) == [((9,),)]


def test_it_goes_on_over_another_connection(database: str, conn: Connection, story: EpochBlocks) -> None:
    story.three_and_five()
    story.publish(A, 5, stream=1)
    with connect(database) as first:
        reading = EpochTailReader(first, ALL, "active")
        course = reading.read_available(first)
        messages = [next(course), next(course)]
        conn.execute("select pg_terminate_backend(%s)", (first.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            list(course)
    story.the_rest()
    messages += reading.read_available(conn)
    assert numbers(seen(messages)) == {3: 2, 4: 1, 5: 4, 6: 2, 7: 1, 8: 1}
    check_course(messages)


WRITERS = [("default", "t", 40), ("default", "u", 25), ("eu", "eu/1", 40)]
"""Space, topic, and how many epochs are published."""
HOLDERS = {"default": A, "eu": B}
"""They keep what is unfinished from being completed before the writers come."""
READERS = ["latest", "active", "earliest"] * 3


class Load:
    """Publishers, a space that is cut anew, and readers that join all the time; each in a thread of its own."""

    def __init__(self, database: str) -> None:
        self.database = database
        self.courses: list[tuple[str, list[EpochTailItem]]] = []
        self._over = threading.Event()
        self._writers = [threading.Thread(target=self._publish, args=each) for each in WRITERS]
        self._writers.append(threading.Thread(target=self._reshard))
        self._readers = [threading.Thread(target=self._read, args=(begin,)) for begin in READERS]

    def run(self, conn: Connection) -> None:
        """Run until all is published and completed."""
        for space, who in HOLDERS.items():
            hold(conn, find_space(conn, space).space_id, who, [(0,)], lease_s=600)
        for writer in self._writers:
            writer.start()
        for number, reader in enumerate(self._readers):
            self._after(conn, 100 * number)
            reader.start()
        for writer in self._writers:
            writer.join(60)
        for space, who in HOLDERS.items():
            release(conn, find_space(conn, space).space_id, who)
        self._over.set()
        for reader in self._readers:
            reader.join(60)
        assert not any(thread.is_alive() for thread in (*self._writers, *self._readers))

    def _after(self, conn: Connection, messages: int) -> None:
        over = self._writers[:-1]
        eventually(lambda: published(conn) >= messages or not any(each.is_alive() for each in over), 60)

    def _publish(self, space: str, topic: str, until: int) -> None:
        with Publisher(self.database, space=space, linger_ms=1) as publisher:
            for epoch in range(until):
                for early in range(3):
                    publisher.publish_batch({"topic": topic, "value": [b"x"] * 5, "epoch": [[epoch + early]] * 5})
                publisher.advance(epoch + 1)

    def _reshard(self) -> None:
        with connect(self.database) as conn:
            for number, shards in enumerate((3, 1, 2), start=1):
                self._after(conn, 200 * number)
                reshard(conn, "default", shards)

    def _read(self, begin: str) -> None:
        with connect(self.database) as conn:
            reading, messages = EpochTailReader(conn, ALL, begin), list[EpochTailItem]()
            self.courses.append((begin, messages))
            while not self._over.is_set():
                messages += reading.read_available(conn)
            messages += reading.read_available(conn)


def published(conn: Connection) -> int:
    row = conn.execute("select coalesce(sum(head), 0)::bigint from stream").fetchone()
    return int(row[0]) if row else 0


@pytest.mark.conforms("S3", "S4", "S5")
def test_under_load_all_readers_get_entire_epochs(database: str, conn: Connection) -> None:
    create_space(conn, "eu", "eu/#", shards=2)
    load = Load(database)
    load.run(conn)
    had = seen(EpochTailReader(conn, ALL, "earliest", entire=False).read_available(conn))
    assert len(load.courses) == len(READERS)
    for begin, messages in load.courses:
        check_course(messages)
        given = seen(messages)
        assert {epoch: had[epoch] for epoch in given} == given, begin
        assert begin != "earliest" or given == had
    assert any(seen(messages) for begin, messages in load.courses if begin == "latest")
