"""A connection that is kept: when it is opened, what closes it, and what is said of a database that is away."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from psycopg.pq import TransactionStatus

from sublet_protocol.domain.errors import DatabaseUnreachable, Gone, UnknownOutcome
from sublet_storage.db.kept_connection import KeptConnection


class Connection:
    """Open until it is closed."""

    closed = False
    info = SimpleNamespace(transaction_status=TransactionStatus.IDLE)

    def close(self) -> None:
        self.closed = True


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


def test_it_is_opened_when_it_is_first_needed_and_used_again() -> None:
    server = Server()
    kept = KeptConnection(server.connect)
    assert server.made == []
    for _ in range(3):
        with kept as connection:
            assert connection is kept.ready() is server.made[0]
    kept.close()
    assert server.made[0].closed
    with kept as connection:
        assert connection is server.made[1]


@pytest.mark.parametrize(
    ("error", "is_kept"),
    [
        (Gone(7, 5, 9), True),
        (DatabaseUnreachable("gone away"), False),
        (UnknownOutcome("gone away in a commit"), False),
        (psycopg.OperationalError("gone away"), False),
        (psycopg.DataError("our own mistake"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_what_breaks_off_a_block_closes_it_but_for_what_is_wrong_with_the_request(
    error: BaseException, is_kept: bool
) -> None:
    server = Server()
    kept = KeptConnection(server.connect)
    with pytest.raises(type(error)), kept:
        raise error
    assert server.made[0].closed is not is_kept
    assert kept.ready() is server.made[0 if is_kept else 1]


def test_a_block_that_never_came_to_its_end_closes_it_when_the_next_begins() -> None:
    server = Server()
    kept = KeptConnection(server.connect)
    kept.__enter__()  # and a signal's exception before `__exit__` has done anything
    with kept as connection:
        assert server.made == [server.made[0], connection]
    assert [each.closed for each in server.made] == [True, False]


@pytest.mark.parametrize("log", [None, logging.getLogger(__name__)])
def test_a_database_that_refuses_is_reported_once_and_left_alone_for_a_while_by_who_wants_that(
    log: logging.Logger | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    now = 1000.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    server = Server()
    server.refusal = DatabaseUnreachable("nobody listens")
    kept = KeptConnection(server.connect, log)
    for _ in range(2):
        with pytest.raises(DatabaseUnreachable, match="nobody listens"), kept:
            pass
        now += 10
    with pytest.raises(DatabaseUnreachable), kept:
        pass
    server.refusal = None
    if log is not None:
        with pytest.raises(DatabaseUnreachable, match="was away a moment ago"), kept:
            pass
        now += 10
    with kept:
        pass
    said = ["the database is away, it goes on when it is back: nobody listens", "the database is back"]
    assert [record.message for record in caplog.records] == ([] if log is None else said)
