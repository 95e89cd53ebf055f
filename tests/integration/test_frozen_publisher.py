"""A publisher whose Postgres is frozen: its connections stay open, its kernel acknowledges, and no answer comes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from sublet_protocol.domain.errors import Unavailable
from sublet_storage.producer import Publisher, sender
from tests.kit import eventually

SPARE_S = 3.0
"""For a busy machine."""


@contextlib.contextmanager
def frozen(conn: psycopg.Connection[Any]) -> Iterator[None]:
    """The publishers' backends stand still meanwhile."""
    rows = conn.execute(
        "select pid from pg_stat_activity where application_name = 'sublet publisher' and datname = current_database()"
    ).fetchall()
    assert rows
    for (pid,) in rows:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for (pid,) in rows:
            os.kill(pid, signal.SIGCONT)


def no_threads_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("sublet publisher")]


@pytest.mark.parametrize("size", [10, 900_000], ids=["waiting for an answer", "in the middle of sending"])
def test_close_returns_and_says_what_failed(database: str, conn: psycopg.Connection[Any], size: int) -> None:
    publisher = Publisher(database)
    publisher.publish("t", b"first").result(20)
    with frozen(conn):
        sent = [publisher.publish(f"t/{index}", os.urandom(size)) for index in range(10)]
        eventually(lambda: publisher._buffer._queued < 10)
        later = publisher.publish("t", b"later")
        began = time.monotonic()
        reported = (
            r"before the publisher was closed that it is stored, and given up: it had not answered yet\. It may be"
        )
        with pytest.raises(Unavailable, match=reported):
            publisher.close(timeout_s=1)
        assert time.monotonic() - began < 1 + SPARE_S
        assert all(delivery.done for delivery in (*sent, later))
        with pytest.raises(Unavailable, match=r"given up: there was no time left to send it\. Publish it again\."):
            later.result(0)
        eventually(no_threads_left)


def test_retry_timeout_bounds_a_frozen_server(
    database: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "MIN_ATTEMPT_S", 0.2)
    publisher = Publisher(database, delivery_timeout_s=1)
    publisher.publish("t", b"first").result(20)
    with frozen(conn):
        began = time.monotonic()
        delivery = publisher.publish("t", b"lost")
        with pytest.raises(
            Unavailable, match=r"within 1 s that it is stored, and given up: .* It may be stored or not"
        ):
            delivery.result(20)
        assert time.monotonic() - began < 1 + SPARE_S
    publisher.publish("t", b"next").result(20)
    with pytest.raises(Unavailable):
        publisher.close()


def test_another_connection_is_tried(
    database: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ATTEMPT_TIMEOUT_S", 0.5)
    with Publisher(database) as publisher:
        publisher.publish("t", b"first").result(20)
        with frozen(conn):
            assert publisher.publish("t", b"second").result(20).offset == 1
        assert publisher.publish("t", b"third").result(20).offset == 2


def test_a_server_that_answers_is_waited_for_as_ever(
    database: str, conn: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ATTEMPT_TIMEOUT_S", 0.3)
    with Publisher(database) as publisher:
        publisher.publish("t", b"first").result(20)
        first = publisher._sender._reconnecting.current
        for pause_s in (0.0, 0.5, 0.0):
            time.sleep(pause_s)  # longer than an answer may take: nothing is asked meanwhile
            publisher.publish("t", b"x").result(20)
        assert publisher._sender._reconnecting.current is first
    eventually(no_threads_left)
