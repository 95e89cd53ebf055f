"""The reader: a stream is one sequence of pages, each the direct successor of the one before; and its connection."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus

from sublet_borrower.fetch import database_reader as module
from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.machine.events import ProgressReported, StreamGranted, StreamRemoved
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_borrower.streams.session_assignment import SessionAssignment
from sublet_protocol.domain.errors import DatabaseUnreachable, PositionGone, TimelineChanged, UnknownOutcome
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import Grant, GrantEndOutcome
from sublet_storage.db.reconnecting_connection import ReconnectingConnection
from sublet_storage.log import fetch
from sublet_storage.log.fetch import LogPage
from sublet_storage.util.retry import MAX_PAUSE_S
from tests.kit import GRANT_KEY


class Connection:
    """Open until it is closed."""

    closed = False
    info = SimpleNamespace(transaction_status=TransactionStatus.IDLE)

    def close(self) -> None:
        self.closed = True

    def timeline_number(self) -> int:
        return 0


class Log:
    """In the place of `sublet_storage.log.fetch`: what is asked is remembered, and answered by a script."""

    def __init__(self) -> None:
        self.script: list[LogPage | Exception] = []
        self.asked: list[tuple[Any, ...]] = []
        self.next: list[LogPage | None] = []

    def fetch_next(self, connection: Connection, *asked: Any, may_be_empty: bool) -> LogPage | None:
        self.asked.append(("next", may_be_empty))
        return self.next.pop(0)

    def fetch(self, connection: Connection, stream_id: int, offset: int, **how: Any) -> LogPage:
        self.asked.append((stream_id, offset, how))
        assert not connection.closed
        answer = self.script.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    log = Log()
    monkeypatch.setattr(module, "message_log", log)
    return log


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """Those that were made."""
    made: list[Connection] = []

    def connect(url: str, **settings: Any) -> Connection:
        made.append(Connection())
        return made[-1]

    monkeypatch.setattr(module, "connect", connect)
    return made


def page(start: int, end: int, head: int = 100, closed: bool = False) -> LogPage:
    return LogPage((), start, end, head, closed)


def always(_: GrantedStream) -> bool:
    return True


def granted(position: int = 0) -> GrantedStream:
    return GrantedStream(7, 1, 3, TopicFilter("a/#"), position, grant_key=GRANT_KEY)


# --- the direct successor, and nothing else ---------------------------------------------------------------------------


@pytest.mark.conforms("P2")
def test_of_nothing_nothing_is_outstanding() -> None:
    stream = granted(5)
    assert stream.advance_read(5, 5, 5)
    assert (stream.outstanding, stream.next_read_offset, stream.head) == ({}, 5, 5)


PAGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=60)


@pytest.mark.conforms("P2")
@given(PAGES, st.integers(0, 12), st.booleans())
def test_of_any_pages_only_successors_are_taken(arriving: list[tuple[int, int]], first: int, over: bool) -> None:
    stream = granted(first)
    stream.is_ended = over
    taken: list[tuple[int, int]] = []
    for start, count in arriving:
        before = (stream.next_read_offset, stream.head, stream.acknowledged_offset, dict(stream.outstanding))
        expected = not over and start == stream.next_read_offset
        assert stream.advance_read(start, start + count, 100) is expected
        if expected:
            taken.append((start, start + count))
            assert (stream.next_read_offset, stream.head) == (start + count, 100)
        else:
            assert (stream.next_read_offset, stream.head, stream.acknowledged_offset, stream.outstanding) == before
    ends = [first, *(end for _, end in taken)]
    assert [start for start, _ in taken] == ends[:-1], "no hole and no overlap"


@pytest.mark.conforms("P2")
@pytest.mark.parametrize("answer", [page(3, 7), page(6, 9), page(5, 4), page(5, 101)])
def test_another_page_is_discarded_and_read_again(log: Log, connections: list[Connection], answer: LogPage) -> None:
    reader, stream = DatabaseMessageReader("url", 100, 30.0), granted(5)
    log.script = [answer, page(5, 8), page(8, 10)]
    assert reader.fetch(stream, always) is None
    assert (stream.next_read_offset, stream.head, stream.acknowledged_offset, stream.outstanding) == (5, None, 5, {})
    assert reader.fetch(stream, always) == page(5, 8)
    assert reader.fetch(stream, always) == page(8, 10)
    assert [offset for _, offset, _ in log.asked] == [5, 5, 8]
    assert len(connections) == 1


@pytest.mark.conforms("P2", "E10")
def test_a_page_of_an_old_grant_is_discarded() -> None:
    reports: list[ProgressReported] = []
    handler = SessionAssignment(reports.append)
    handler.apply_update(StreamGranted(Grant("b", 1, 7, 1, 0, 3, 0, 1 << 64, "#", grant_key=GRANT_KEY)))
    old = handler.next_readable(lambda _: True)
    assert old is not None
    handler.apply_update(StreamGranted(Grant("b", 1, 7, 2, 0, 3, 0, 1 << 64, "#", grant_key=GRANT_KEY)))
    assert not old.advance_read(0, 5, 5)
    new = handler.next_readable(lambda _: True)
    assert new is not None
    assert new.next_read_offset == 0
    assert new.advance_read(0, 5, 5)
    handler.apply_update(StreamRemoved(7, 2, GrantEndOutcome.LOST))
    assert not new.advance_read(5, 6, 6)


# --- what is asked, and what is answered ------------------------------------------------------------------------------


def test_a_page_is_asked_for_by_what_was_granted(log: Log, connections: list[Connection]) -> None:
    log.script = [page(5, 5, head=5)]
    stream = granted(5)
    assert DatabaseMessageReader("url", 1234, 30.0).fetch(stream, always) == page(5, 5, head=5)
    assert log.asked == [(7, 5, {"filter": TopicFilter("a/#"), "generation_id": 3, "limit_bytes": 1234})]
    assert not stream.may_have_more


NEXT_BYTES = fetch.NEXT_BLOCKS * fetch.NEXT_BLOCK_BYTES


@pytest.mark.parametrize(
    ("head", "batch_bytes", "is_next"),
    [(5, NEXT_BYTES, True), (5, NEXT_BYTES - 1, False), (5_000_000, NEXT_BYTES, False), (None, NEXT_BYTES, False)],
    ids=["awaited", "in small batches", "far behind", "never read"],
)
def test_a_short_page_that_was_awaited_is_read_at_once(
    log: Log, connections: list[Connection], head: int | None, batch_bytes: int, is_next: bool
) -> None:
    """And as any other where that shows nothing."""
    reader, stream = DatabaseMessageReader("url", batch_bytes, 30.0), granted(5)
    stream.head = head
    log.next, log.script = [page(5, 6, 6), None], [page(5, 6, 6), page(6, 9, 9)]
    assert reader.fetch(stream, always) == page(5, 6, 6)
    assert [asked[0] for asked in log.asked] == ["next" if is_next else 7]
    if is_next:
        log.script.pop(0)
        assert reader.fetch(stream, always) == page(6, 9, 9)
        assert [asked[0] for asked in log.asked] == ["next", "next", 7]


@pytest.mark.conforms("E34")
def test_a_page_that_may_not_be_taken_is_discarded(log: Log, connections: list[Connection]) -> None:
    """By the time that it has come."""
    reader, stream = DatabaseMessageReader("url", 100, 30.0), granted(5)
    log.script = [page(5, 8), page(5, 8)]
    assert reader.fetch(stream, lambda _: False) is None
    assert stream.next_read_offset == 5
    assert reader.fetch(stream, always) == page(5, 8)


@pytest.mark.conforms("E13")
@pytest.mark.parametrize("error", [psycopg.OperationalError("gone away"), DatabaseUnreachable("not there")])
def test_a_database_away_is_tried_with_pauses(
    log: Log,
    connections: list[Connection],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    """And read on when it is back, in the same place."""
    caplog.set_level("INFO")
    now = 0.0
    monkeypatch.setattr("sublet_storage.util.retry.time.monotonic", lambda: now)
    reader, stream = DatabaseMessageReader("url", 1, 30.0), granted(5)
    log.script = [error, error, error, page(5, 6), error]
    for _ in range(3):
        assert [reader.fetch(stream, always) for _ in range(100)] == [None] * 100
        now += MAX_PAUSE_S
    assert len(connections) == 3, "once after each pause"
    assert stream.next_read_offset == 5
    assert reader.fetch(stream, always) == page(5, 6)
    assert [connection.closed for connection in connections] == [True, True, True, False]
    reader.fetch(stream, always)
    said = [record.message.partition(",")[0] for record in caplog.records]
    assert said == ["database unavailable", "database available again", "database unavailable"]
    reader.close()
    reader.close()
    assert all(connection.closed for connection in connections)


@pytest.mark.parametrize("error", [PositionGone(7, 5, 9), psycopg.DataError("our own mistake")])
def test_other_errors_pass_through(log: Log, connections: list[Connection], error: Exception) -> None:
    log.script = [error]
    with pytest.raises(type(error)):
        DatabaseMessageReader("url", 1, 30.0).fetch(granted(5), always)


# --- a connection that reconnects -------------------------------------------------------------------------------------


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
