"""A process with a session that starts others: nothing about that on its stderr, and its session is its own."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sublet_storage.producer import Publisher
from tests.integration.feed_kit import address_of
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet
from tests.postgres_proxy import PostgresProxy
from tests.readme import environment


@pytest.fixture
def node(database: str, tmp_path: Path) -> Iterator[str]:
    """The address of a node that serves, and does not evict a consumer that is stopped for some seconds."""
    fleet = Fleet(database, tmp_path, speed=0.5)
    yield address_of(fleet.node("n1"))
    fleet.close()


USES = """
import asyncio, multiprocessing, os, sublet
from sublet_borrower.planner.grant_key_files import read_grant_keys
from sublet_borrower.planner.micro_batch_planner import MicroBatchPlanner
from sublet_protocol.domain.errors import UsageError

URL = os.environ["SUBLET_DATABASE_URL"]
with sublet.Publisher() as publisher:
    for number in range(40):
        publisher.publish(f"a/{number}", b"1").result(30)
session = sublet.Session("$share/g/#", starting_position="earliest", max_batch_bytes=1, auto_ack=False)
batch = session.poll(30)
waiting = sublet.AsyncSession("$share/waiting/#")
asyncio.run(waiting.open())

def work():
    def says(what, use):
        try:
            use()
        except UsageError as error:
            print(what, "UsageError", f"process {os.getppid()}" in str(error), f"process {os.getpid()}" in str(error))
        else:
            print(what, "did it")
    for what, use in {
        "poll": lambda: session.poll(1),
        "iteration": lambda: next(iter(session)),
        "ack": batch.ack,
        "transaction": lambda: batch.transaction().__enter__(),
        "wait": lambda: session.wait(0),
        "may_continue": lambda: session.may_continue(batch),
        "drain": session.drain,
        "leave": session.leave,
        "assignment": session.assignment,
        "wakeup": session.wakeup,
        "async poll": lambda: asyncio.run(waiting.poll(1)),
        "async drain": waiting.drain,
        "async assignment": waiting.assignment,
    }.items():
        says(what, use)
    session.close()
    asyncio.run(waiting.close())
    try:
        sublet.Session("$share/g/#")
    except UsageError as error:
        print("another:", error)

child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join(60)
print("child ended", child.exitcode)
assert session.assignment()
batch.ack()
assert session.poll(30) is not None
session.close()
asyncio.run(waiting.close())

def held():
    return [keys.session.epoch for keys in read_grant_keys("$share/g/#", "q")]

planner = MicroBatchPlanner("$share/g/#", URL, name="q", hold_s=60.0)
before = held()
child = os.fork()
if child == 0:
    planner.close()
    os._exit(0)
os.waitpid(child, 0)
assert held() == before != []
planner.close()
assert held() == []
print("parent went on")
"""


def test_a_forked_child_may_not_use_a_session(database: str, node: str) -> None:
    """Nor close a planner: what commits a plan finds its keys in the parent's file, which closing removes."""
    done = subprocess.run(
        [sys.executable, "-c", USES],
        env=environment(database),
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.partition(" UsageError ")[2] for line in lines[:13]] == ["True True"] * 13
    assert lines[13].startswith("another: process ")
    assert "`spawn`" in lines[13]
    assert lines[14:] == ["child ended 0", "parent went on"]


READS = """
import os, sys, sublet

with sublet.Feed(NODE) as feed, feed.follow("#", "earliest") as reader:
    assert reader.read(30).num_rows == 1
    child = os.fork()
    if child == 0:
        try:
            reader.read(1)
        except sublet.errors.UsageError as error:
            print(error, flush=True)
        try:
            sublet.Feed(NODE).publish("a", b"of the child").result(10)
        except sublet.errors.UsageError as error:
            print(error, flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
    feed.publish("a", b"2").result(30)
    assert reader.read(30).num_rows == 1
"""


def test_a_forked_child_has_no_feed(database: str, node: str) -> None:
    """Neither its parent's, nor one of its own: grpc would wait there for ever. And it ends, though the block around
    its parent's reader closes the reader."""
    with Publisher(database) as publisher:
        publisher.publish("a", b"1")
    with subprocess.Popen(
        [sys.executable, "-c", f"NODE = {node!r}\n{READS}"],
        env=environment(database),
        stdout=subprocess.PIPE,
        text=True,
        process_group=0,
    ) as program:
        try:
            said, _ = program.communicate(timeout=60)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == 0
    of_reader, of_feed = said.splitlines()
    assert of_reader.startswith("this reader was made in process ")
    assert of_feed.startswith("process ")
    assert "was forked from one that has used a session or a feed" in of_feed


PARTS = """
import gc, os, signal, sys, time, sublet

session = sublet.Session("$share/g/#", PG, nodes=[NODE], starting_position="earliest", max_batch_bytes=1)
batch = session.poll(30)
assert batch is not None
with session, batch.transaction() as connection:
    connection.execute("select 1")
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.kill(parent, signal.SIGSTOP)
        while open(f"/proc/{parent}/stat").read().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        print("stopped", os.getpid(), flush=True)
        sys.stdin.readline()
        del batch, connection
        session.close()
        del session
        gc.collect()
        sys.exit(0)
    os.waitpid(child, 0)
    connection.execute("select 2")
print("parent went on", flush=True)
"""


def test_what_a_child_drops_sends_nothing(database: str, node: str) -> None:
    with Publisher(database) as publisher:
        publisher.publish("a", b"1")
    with PostgresProxy(database) as database_side, PostgresProxy(f"tcp://{node}") as node_side:
        program = f"PG = {database_side.url!r}\nNODE = '127.0.0.1:{node_side.port}'\n{PARTS}"
        parent = subprocess.Popen(
            [sys.executable, "-c", program],
            env=environment(database),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert parent.stdout is not None
        assert parent.stdin is not None
        try:
            word, pid = parent.stdout.readline().split()
            assert word == b"stopped"
            before = settled(lambda: (database_side.sent, node_side.sent))
            assert min(before) > 0
            parent.stdin.write(b"go\n")
            parent.stdin.flush()
            eventually(lambda: Path(f"/proc/{int(pid)}/stat").read_text().rpartition(")")[2].split()[0] == "Z", WAIT_S)
            assert settled(lambda: (database_side.sent, node_side.sent)) == before
        finally:
            parent.send_signal(signal.SIGCONT)
            said, complaints = parent.communicate(timeout=60)
        assert (parent.returncode, said) == (0, b"parent went on\n"), complaints
        assert b"Traceback" not in complaints, "no more than a transaction that could not be rolled back in the child"


def settled(count: Callable[[], tuple[int, int]]) -> tuple[int, int]:
    """The counts once all that is on its way has come: the same in thirty looks, one after the other."""
    seen: list[tuple[int, int]] = []

    def unchanged() -> bool:
        seen.append(count())
        return len(seen) > 30 and len(set(seen[-30:])) == 1

    eventually(unchanged, WAIT_S)
    return seen[-1]
