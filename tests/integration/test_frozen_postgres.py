"""A server process of Postgres that is frozen in the middle of a read: not waited for without end."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_storage.db.connect import connect
from sublet_storage.spaces.space_changes import reshard
from sublet_storage.spaces.space_queries import open_streams
from tests.integration.log_kit import put
from tests.kit import eventually
from tests.kit_nodes import SPEED, Fleet

WAIT_S = 40.0
GROUP = "$share/g/#"
SETTINGS = replace(BorrowerSettings().scaled(SPEED), read_timeout_s=30.0)


@contextmanager
def frozen(conn: psycopg.Connection[Any], application: str) -> Iterator[None]:
    """The server processes of that application's connections, until the block ends. Each is frozen while it waits for
    its client, when it has none of the locks that all of Postgres would then wait for."""
    found = "select pid from pg_stat_activity where application_name = %s and datname = current_database()"
    idle = "select from pg_stat_activity where pid = %s and state = 'idle' and wait_event = 'ClientRead'"
    pids = [row[0] for row in conn.execute(found, (application,))]
    assert pids

    def freeze(pid: int) -> bool:
        os.kill(pid, signal.SIGSTOP)
        if conn.execute(idle, (pid,)).fetchone() is not None:
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    try:
        for pid in pids:
            eventually(partial(freeze, pid), WAIT_S)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def in_time(work: Callable[[], Any]) -> Any:
    """Its result; an AssertionError if it does not come back."""
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(work()), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert results, "it hangs"
    return results[0]


def test_a_session_gets_over_a_frozen_reader(database: str, tmp_path: Path) -> None:
    fleet = Fleet(database, tmp_path)
    settings = replace(BorrowerSettings().scaled(SPEED), read_timeout_s=0.5)
    try:
        node = fleet.node("n1")
        eventually(lambda: "serves on" in node.output(), WAIT_S, node.output)
        with connect(database) as conn:
            reshard(conn, "default", 1)
            (stream,) = (each.stream_id for each in open_streams(conn))
            with Session(GROUP, database, starting_position="earliest", settings=settings) as session:
                put(conn, stream, b"before", topic="a")
                first = in_time(lambda: session.poll(WAIT_S))
                with frozen(conn, "sublet reader"):
                    put(conn, stream, b"meanwhile", topic="a")
                    second = in_time(lambda: session.poll(WAIT_S))
    finally:
        fleet.close()
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    assert [batch.table.column("value").to_pylist() for batch in (first, second)] == [[b"before"], [b"meanwhile"]]
    assert second.first == first.end


@pytest.mark.conforms("A8", "E16")
def test_a_node_gets_over_a_frozen_connection(database: str, tmp_path: Path) -> None:
    fleet = Fleet(database, tmp_path)
    try:
        node = fleet.node("n1")
        eventually(lambda: "serves on" in node.output(), WAIT_S, node.output)
        with (
            connect(database) as conn,
            Session(GROUP, database, starting_position="earliest", settings=SETTINGS) as session,
        ):
            reshard(conn, "default", 1)
            (stream,) = (each.stream_id for each in open_streams(conn))
            put(conn, stream, b"before", topic="a")
            assert in_time(lambda: session.poll(WAIT_S))
            with frozen(conn, "sublet groups"):
                put(conn, stream, b"meanwhile", topic="a")
                batch = in_time(lambda: session.poll(WAIT_S))
                batch.ack()
                saved = "select position from lending where stream_id = %s"
                eventually(lambda: conn.execute(saved, (stream,)).fetchone() == (batch.end,), WAIT_S, node.output)
    finally:
        fleet.close()


def test_silence_closes_the_connection(database: str) -> None:
    with connect(database) as conn, connect(database, application_name="silent", silence_s=0.3) as silent:
        assert silent.execute("select 1").fetchone() == (1,)
        with frozen(conn, "silent"), pytest.raises(psycopg.OperationalError, match=r"not a byte .* for 0\.3 s"):
            in_time_or_raise(lambda: silent.execute("select 2"))
        assert silent.closed


def test_an_answer_in_pieces_is_waited_for(database: str) -> None:
    with connect(database, silence_s=0.4) as conn:
        begun = time.monotonic()
        rows = conn.execute(
            "select length(repeat('x', 9000)), pg_sleep(0.02)::text, repeat('x', 9000) from generate_series(1, 40)"
        ).fetchall()
        assert len(rows) == 40
        assert time.monotonic() - begun > 0.4, "it was no longer than the silence that is allowed"


def in_time_or_raise(work: Callable[[], Any]) -> None:
    """As `in_time`, and raises what the work raised."""

    def caught() -> BaseException | str:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 it is raised by the caller
            return error
        return "done"

    result = in_time(caught)
    if isinstance(result, BaseException):
        raise result
