"""A connection that reconnects: when it is opened, what closes it, and what is said of a database that is away."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from sublet_protocol.domain.errors import DatabaseUnreachable, PositionGone, TimelineChanged, UnknownOutcome
from sublet_storage.db.reconnecting_connection import ReconnectingConnection


class Connection:
    """Open until it is closed."""

    closed = False
    info = SimpleNamespace(transaction_status=TransactionStatus.IDLE)

    def close(self) -> None:
        self.closed = True

    def timeline_number(self) -> int:
        return 0


class Server:
    """Where connections are made; `refusal`: why not."""

    def __init__(self) -> None:
        self.made: list[Any] = []
        self.refusal: Exception | None = None

    def connect(self) -> Any:
        if self.refusal is not None:
            raise self.refusal
        self.made.append(Connection())
        return self.made[-1]


def test_it_is_opened_when_needed_and_used_again() -> None:
    server = Server()
    reconnecting = ReconnectingConnection(server.connect)
    assert server.made == []
    for _ in range(3):
        with reconnecting as connection:
            assert connection is reconnecting.get_connection() is server.made[0]
    reconnecting.close()
    assert server.made[0].closed
    with reconnecting as connection:
        assert connection is server.made[1]


@pytest.mark.parametrize(
    ("error", "is_reused"),
    [
        (PositionGone(7, 5, 9), True),
        (TimelineChanged("granted elsewhere"), False),
        (DatabaseUnreachable("gone away"), False),
        (UnknownOutcome("gone away in a commit"), False),
        (psycopg.OperationalError("gone away"), False),
        (psycopg.errors.ProgramLimitExceeded("too many notifications in the NOTIFY queue"), False),
        (psycopg.DataError("our own mistake"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_an_error_closes_it(error: BaseException, is_reused: bool) -> None:
    """But for what is wrong with the request."""
    server = Server()
    reconnecting = ReconnectingConnection(server.connect)
    with pytest.raises(type(error)), reconnecting:
        raise error
    assert server.made[0].closed is not is_reused
    assert reconnecting.get_connection() is server.made[0 if is_reused else 1]


def test_a_block_without_end_closes_it() -> None:
    server = Server()
    reconnecting = ReconnectingConnection(server.connect)
    reconnecting.__enter__()  # and a signal's exception before `__exit__` has done anything
    with reconnecting as connection:
        assert server.made == [server.made[0], connection]
    assert [each.closed for each in server.made] == [True, False]


@pytest.mark.parametrize("log", [None, logging.getLogger(__name__)])
def test_a_database_away_is_logged_once(
    log: logging.Logger | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And, by who wants that, left alone for a while."""
    caplog.set_level("INFO")
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    server = Server()
    server.refusal = DatabaseUnreachable("nobody listens")
    reconnecting = ReconnectingConnection(server.connect, log)
    for _ in range(2):
        with pytest.raises(DatabaseUnreachable, match="nobody listens"), reconnecting:
            pass
        now += 10
    with pytest.raises(DatabaseUnreachable), reconnecting:
        pass
    server.refusal = None
    if log is not None:
        with pytest.raises(DatabaseUnreachable, match="was away a moment ago"), reconnecting:
            pass
        now += 10
    with reconnecting:
        pass
    said = ["database unavailable, retrying: nobody listens", "database available again"]
    assert [record.message for record in caplog.records] == ([] if log is None else said)
