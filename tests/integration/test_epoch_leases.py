"""Publishers that die or freeze with epochs unfinished: real processes, a real node."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from sublet_storage.db.connect import connect
from sublet_storage.log.epoch_leases import read_lower_frontier
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_queries import find_space
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import ROOT

STORY = """
import sys
from sublet_protocol.domain.errors import EpochCapabilityExpired
from sublet_storage.producer import Publisher

publisher = Publisher(sys.argv[1], space="default", epoch_lease_s=2)
publisher.advance(3)
publisher.in_epoch(3).publish("t", b"unfinished").result(30)
print("has begun", flush=True)
for _ in sys.stdin:
    try:
        publisher.in_epoch(3).publish("t", b"more").result(30)
        print("published", flush=True)
    except EpochCapabilityExpired as expired:
        print("EpochCapabilityExpired", flush=True)
"""


@contextmanager
def story(database: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", STORY, database]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "has begun\n"
            yield process
        finally:
            process.kill()


def goes_on(process: subprocess.Popen[str]) -> str:
    """Let it publish once more; what it says of that."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go on\n")
    process.stdin.flush()
    return process.stdout.readline()


def frontier(database: str) -> tuple[tuple[int, ...], ...]:
    with connect(database) as conn:
        found = read_lower_frontier(conn, find_space(conn, "default").space_id)
    return found.least if found is not None else ()


@pytest.mark.conforms("S9")
@pytest.mark.usefixtures("fleet")
@pytest.mark.long
def test_a_frozen_publisher_finds_its_epochs_closed(database: str) -> None:
    """It keeps them for longer than its lease while it lives."""
    with story(database) as process, connect(database) as conn:

        def renewed() -> bool:
            row = conn.execute(
                "select expires_at - interval '2 s' > p.updated_at + interval '4 s'"
                " from capability c join producer p using (producer_id) where p.stream_id > 0"
            ).fetchone()
            return bool(row and row[0])

        eventually(renewed, WAIT_S)
        assert goes_on(process) == "published\n"
        process.send_signal(signal.SIGSTOP)
        eventually(lambda: frontier(database) == ((4,),), WAIT_S)
        process.send_signal(signal.SIGCONT)
        assert goes_on(process) == "EpochCapabilityExpired\n"


@pytest.mark.usefixtures("fleet")
def test_a_dropped_publisher_holds_nothing(database: str) -> None:
    """What it had queued is stored, and its space goes on when its lease is over."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        publisher = Publisher(database, space="default", epoch_lease_s=2, linger_ms=60_000)
        delivery = publisher.in_epoch(3).publish("t", b"queued")
        del publisher
        gc.collect()
    assert any(f"a Publisher, made at {__file__}:" in str(each.message) for each in caught)
    delivery.result(WAIT_S)
    with connect(database) as conn:
        connections = "select from pg_stat_activity where datname = current_database() and application_name like %s"
        eventually(lambda: conn.execute(connections, ("sublet publisher%",)).fetchone() is None, WAIT_S)
    eventually(lambda: frontier(database) == ((4,),), WAIT_S)
