"""The reader: a stream is one sequence of pages, each the direct successor of the one before; and a database away."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest
from hypothesis import given
from hypothesis import strategies as st
from psycopg.pq import TransactionStatus

from sublet_borrower.fetch import database as module
from sublet_borrower.fetch.database import Reader
from sublet_borrower.machine.events import Install, Progressed, Remove
from sublet_borrower.streams.assignment import Handler
from sublet_borrower.streams.granted_stream import Lent
from sublet_protocol.domain.errors import DatabaseUnreachable, Gone
from sublet_protocol.domain.topics import Filter
from sublet_protocol.messages.messages import Grant, RevokedReason
from sublet_storage.db.kept_connection import LONGEST_PAUSE_S
from sublet_storage.log.log import Head, Page


class Connection:
    """Open until it is closed; nothing is asked of it here."""

    closed = False
    info = SimpleNamespace(transaction_status=TransactionStatus.IDLE)

    def close(self) -> None:
        self.closed = True


class Log:
    """In the place of `sublet_storage.log.log`: what is asked is remembered, and answered by a script."""

    def __init__(self) -> None:
        self.script: list[Page | Exception | dict[int, Head]] = []
        self.asked: list[tuple[Any, ...]] = []

    def since(self, connection: Connection, stream_id: int, offset: int, **how: Any) -> Page:
        self.asked.append((stream_id, offset, how))
        answer = self._next(connection)
        assert isinstance(answer, Page)
        return answer

    def heads(self, connection: Connection, stream_ids: Any) -> dict[int, Head]:
        self.asked.append(tuple(stream_ids))
        answer = self._next(connection)
        assert isinstance(answer, dict)
        return answer

    def _next(self, connection: Connection) -> object:
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


def page(start: int, end: int, head: int = 100, closed: bool = False) -> Page:
    return Page((), start, end, head, closed)


def always(_: Lent) -> bool:
    return True


def lent(position: int = 0) -> Lent:
    return Lent(7, 1, 3, Filter("a/#"), position)


# --- the direct successor, and nothing else ---------------------------------------------------------------------------

PAGES = st.lists(st.tuples(st.integers(0, 12), st.integers(0, 6)), max_size=60)


@pytest.mark.conforms("P2")
@given(PAGES, st.integers(0, 12), st.booleans())
def test_of_any_pages_in_any_order_those_are_taken_that_follow_directly(
    arriving: list[tuple[int, int]], first: int, over: bool
) -> None:
    stream = lent(first)
    stream.over = over
    taken: list[tuple[int, int]] = []
    for start, count in arriving:
        before = (stream.read, stream.head, stream.acknowledged, dict(stream.outstanding))
        expected = not over and start == stream.read
        assert stream.take(start, start + count, 100) is expected
        if expected:
            taken.append((start, start + count))
            assert (stream.read, stream.head) == (start + count, 100)
        else:
            assert (stream.read, stream.head, stream.acknowledged, stream.outstanding) == before
    ends = [first, *(end for _, end in taken)]
    assert [start for start, _ in taken] == ends[:-1], "no hole and no overlap"


@pytest.mark.conforms("P2")
@given(st.permutations([(start, start + 3) for start in range(0, 30, 3)] * 3))
def test_shuffled_repeats_of_a_whole_log_bring_each_part_at_most_once_and_in_order(
    pages: list[tuple[int, int]],
) -> None:
    stream = lent()
    taken = [each for each in pages if stream.take(*each, 30)]
    assert taken == [(start, start + 3) for start in range(0, stream.read, 3)]


@pytest.mark.conforms("E29")
def test_a_page_that_comes_when_the_stream_is_not_ours_any_more_is_discarded(
    log: Log, connections: list[Connection]
) -> None:
    reader, stream = Reader("url", 100, 30.0), lent(5)
    log.script = [page(5, 8), page(5, 8)]
    assert reader.page(stream, lambda _: log.asked == []) is None, "it is asked when the page is there"
    assert stream.read == 5
    assert reader.page(stream, always) == page(5, 8)


@pytest.mark.conforms("P2")
@pytest.mark.parametrize("answer", [page(0, 5), page(3, 7), page(6, 9), page(5, 4), page(5, 101), page(40, 50)])
def test_a_repeat_and_a_page_of_the_future_are_discarded_and_the_same_place_is_read_again(
    log: Log, connections: list[Connection], answer: Page
) -> None:
    reader, stream = Reader("url", 100, 30.0), lent(5)
    log.script = [answer, page(5, 8), page(8, 10)]
    assert reader.page(stream, always) is None
    assert (stream.read, stream.head, stream.acknowledged, stream.outstanding) == (5, None, 5, {})
    assert reader.page(stream, always) == page(5, 8)
    assert reader.page(stream, always) == page(8, 10)
    assert [offset for _, offset, _ in log.asked] == [5, 5, 8]
    assert len(connections) == 1


@pytest.mark.conforms("P2", "E10")
def test_what_comes_under_a_grant_that_is_over_is_discarded() -> None:
    reports: list[Progressed] = []
    handler = Handler(reports.append)
    handler.take(Install(Grant("b", 1, 7, 1, 0, 3, 0, 1 << 64, "#")))
    old = handler.next_to_read(lambda _: True)
    assert old is not None
    handler.take(Install(Grant("b", 1, 7, 2, 0, 3, 0, 1 << 64, "#")))
    assert not old.take(0, 5, 5)
    new = handler.next_to_read(lambda _: True)
    assert new is not None
    assert new.read == 0
    assert new.take(0, 5, 5)
    handler.take(Remove(7, 2, RevokedReason.LOST))
    assert not new.take(5, 6, 6)


# --- what is asked, and what is answered ------------------------------------------------------------------------------


def test_a_page_is_asked_for_by_what_was_lent(log: Log, connections: list[Connection]) -> None:
    log.script = [page(5, 5, head=5)]
    stream = lent(5)
    assert Reader("url", 1234, 30.0).page(stream, always) == page(5, 5, head=5)
    assert log.asked == [(7, 5, {"filter": Filter("a/#"), "generation_id": 3, "limit_bytes": 1234})]
    assert not stream.may_have_more


def test_heads_are_those_of_the_streams_asked_for(log: Log, connections: list[Connection]) -> None:
    log.script = [{7: Head(9, closed=False, gone=False), 8: Head(4, closed=True, gone=False)}]
    assert Reader("url", 1, 30.0).heads([7, 8]) == [(7, 9), (8, 4)]
    assert log.asked == [(7, 8)]


@pytest.mark.conforms("E13")
@pytest.mark.parametrize("error", [psycopg.OperationalError("gone away"), DatabaseUnreachable("not there")])
def test_a_database_that_is_away_is_said_once_tried_with_pauses_and_read_on_when_it_is_back(
    log: Log,
    connections: list[Connection],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
) -> None:
    caplog.set_level("INFO")
    now = 0.0
    monkeypatch.setattr("sublet_storage.util.retry.time.monotonic", lambda: now)
    reader, stream = Reader("url", 1, 30.0), lent(5)
    log.script = [error, error, error, page(5, 6), error]
    for _ in range(3):
        assert [reader.page(stream, always) for _ in range(100)] == [None] * 100
        now += LONGEST_PAUSE_S
    assert len(connections) == 3, "once after each pause"
    assert stream.read == 5
    assert reader.page(stream, always) == page(5, 6)
    assert [connection.closed for connection in connections] == [True, True, True, False]
    said = [record.message for record in caplog.records]
    assert len(said) == 2
    assert "the database is away" in said[0]
    assert "is back" in said[1]
    reader.page(stream, always)
    assert len(caplog.records) == 3, "away again"


@pytest.mark.parametrize("error", [Gone(7, 5, 9), psycopg.DataError("our own mistake")])
def test_what_is_not_the_databases_absence_passes_through(
    log: Log, connections: list[Connection], error: Exception
) -> None:
    log.script = [error]
    with pytest.raises(type(error)):
        Reader("url", 1, 30.0).page(lent(5), always)


def test_a_connection_that_cannot_be_made_is_a_database_away(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(url: str, **settings: Any) -> Connection:
        raise DatabaseUnreachable("nobody listens")

    monkeypatch.setattr(module, "connect", refuse)
    assert Reader("url", 1, 30.0).heads([7]) == []


@pytest.mark.parametrize("use", [lambda reader: reader.heads([7]), lambda reader: None])
def test_closing_closes_what_was_opened(
    log: Log, connections: list[Connection], use: Callable[[Reader], object]
) -> None:
    log.script = [{}]
    reader = Reader("url", 1, 30.0)
    use(reader)
    reader.close()
    reader.close()
    assert all(connection.closed for connection in connections)
