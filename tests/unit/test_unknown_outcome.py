"""What a session knows of a transaction whose commit got no answer, without a server."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from sublet_borrower.consumer import transaction
from sublet_borrower.consumer.transaction import ProgressTransactions
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import DatabaseUnreachable, UnknownOutcome, UsageError
from sublet_storage.groups import consumer_progress
from tests.unit.test_assignment import FROM, Play
from tests.unit.test_batch import given


def batch(ticket: int, stream_id: int = 7, consumed: ConsumedFrontier | None = None) -> Any:
    facts = {"grant_key": None, "consumed_frontier": consumed, "complete_transaction": lambda **_: None}
    return SimpleNamespace(stream_id=stream_id, grant_id=1, ticket=ticket, next_offset=ticket + 5, **facts)


class Server:
    """In a server's place: the answer to each commit is lost, and what became of it is as a test sets it."""

    def __init__(self) -> None:
        self.asked = 0
        self.was_committed: bool | None = None
        self.position: int | None = None
        self.consumed: ConsumedFrontier | None = None
        self.is_away = True
        self.lost = SimpleNamespace(closed=True)
        self.transactions = ProgressTransactions("", lambda: 1, 60.0)

    def is_committed(self, *_: object) -> bool | None:
        self.asked += 1
        if self.is_away:
            raise psycopg.OperationalError
        return self.was_committed

    @contextlib.contextmanager
    def commit(self, connection: object, advance: Callable[[], None]) -> Iterator[None]:
        yield
        advance()
        raise psycopg.OperationalError

    def leave_in_doubt(self, *batches: Any) -> None:
        with pytest.raises(UnknownOutcome), self.transactions.begin(batches):
            pass
        self.asked = 0


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    connecting = SimpleNamespace(close=lambda: None)
    monkeypatch.setattr(transaction, "ReconnectingConnection", lambda _: connecting)
    server = Server()
    connecting.get_answering_connection = connecting.get_connection = lambda: server.lost
    monkeypatch.setattr(transaction, "user_transaction", server.commit)
    for name, call in (
        ("advance", lambda *_, **__: None),
        ("is_committed", server.is_committed),
        ("read_position", lambda *_: server.position),
        ("read_consumed_frontier", lambda *_: server.consumed),
    ):
        monkeypatch.setattr(consumer_progress, name, call)
    return server


@pytest.mark.conforms("E29")
def test_only_its_own_batch_waits_for_a_transaction(server: Server) -> None:
    """While it is open, and while its outcome is unknown."""
    known = server.transactions
    with contextlib.suppress(UnknownOutcome), known.begin([batch(10)]):
        known.check_outcome(7, 1, 20)
        known.check_outcome(8, 1, 10)
        with pytest.raises(UsageError, match="its transaction is open"):
            known.check_outcome(7, 1, 10)
        with pytest.raises(UsageError, match="is open already"), known.begin([batch(20)]):
            pytest.fail("it runs")
    places = ((7, None), (7, 10), (7, 20), (8, None), (8, 10))
    assert [place for place in places if known.is_in_doubt(*place)] == [(7, None), (7, 10)]
    known.check_outcome(7, 1, 20)
    with pytest.raises(UnknownOutcome):
        known.check_outcome(7, 1, 10)


def test_without_a_database_are_no_transactions() -> None:
    known = ProgressTransactions(None, lambda: 1, 60.0)
    with pytest.raises(UsageError, match="this session goes through nodes"), known.run([given(Play(), 1)]):
        pass


def test_an_outcome_is_asked_for_once_in_a_while(server: Server) -> None:
    server.transactions.resolve(3600.0)
    assert not server.transactions.find_out()
    server.leave_in_doubt(batch(10))
    for _ in range(2):
        server.transactions.resolve(3600.0)
    assert server.asked == 1
    server.transactions.resolve()
    assert server.asked == 2


@pytest.mark.conforms("E29")
@pytest.mark.parametrize(
    ("was_committed", "position", "is_done"),
    [
        (None, 14, False),
        (None, 15, True),
        (True, 15, True),
        (True, 14, False),
        (False, 14, False),
        (False, None, False),
    ],
)
def test_what_is_durable_was_committed(
    server: Server, was_committed: bool | None, position: int | None, is_done: bool
) -> None:
    """What the server has rolled back was not, whoever has the stream now."""
    server.leave_in_doubt(batch(10))
    server.is_away, server.was_committed, server.position = False, was_committed, position
    assert server.transactions.find_out() is is_done


@pytest.mark.conforms("E29")
@pytest.mark.parametrize(("upto", "is_done"), [(14, False), (15, True)])
def test_atomic_progress_is_durable_by_its_frontier(server: Server, upto: int, is_done: bool) -> None:
    """Whatever the position is."""
    server.leave_in_doubt(batch(10, consumed=ConsumedFrontier(15)))
    server.is_away, server.position, server.consumed = False, 14 if is_done else 15, ConsumedFrontier(upto)
    assert server.transactions.find_out() is is_done


@pytest.mark.conforms("E35")
def test_an_answer_with_an_error_leaves_no_doubt(server: Server) -> None:
    """A constraint that is checked at the commit, for one: the server has rolled back, and its error is the user's."""
    server.lost.closed = False
    with pytest.raises(psycopg.OperationalError), server.transactions.begin([batch(10)]):
        pass
    assert (server.transactions.is_in_doubt(7), server.asked) == (False, 0)


@pytest.mark.parametrize(
    ("is_closed", "error"), [(True, DatabaseUnreachable), (False, psycopg.OperationalError)], ids=["lost", "refused"]
)
def test_a_repetition_that_loses_its_server_is_retried(server: Server, is_closed: bool, error: type[Exception]) -> None:
    """What the server answers is the user's."""
    server.lost.closed = is_closed
    with pytest.raises(error), server.transactions.rolled_back():
        raise psycopg.OperationalError


@pytest.mark.conforms("E35")
def test_what_is_committed_is_not_begun_with_more(server: Server) -> None:
    play = Play()
    done, more = given(play, 4), given(play, 2)
    server.leave_in_doubt(done)
    server.is_away, server.position = False, FROM + 4
    refused = pytest.raises(UsageError, match="Do the rest in a transaction without that")
    with refused, server.transactions.run([done, more]):
        pytest.fail("it runs")


@pytest.mark.conforms("E29")
@pytest.mark.parametrize(
    ("choose", "is_refused"),
    [
        (lambda one, two: (one.slice(0, 2), one.slice(0, 2)), False),
        (lambda one, two: (one.slice(0, 2), one), True),
        (lambda one, two: (one, two), True),
        (lambda one, two: (two, one), True),
    ],
    ids=["the same", "more of it", "a later one", "an earlier one"],
)
def test_what_was_not_begun_is_not_acknowledged(
    server: Server, choose: Callable[[Batch, Batch], tuple[Batch, Batch]], is_refused: bool
) -> None:
    """A block does not run while another's outcome is unknown, though that turns out to be committed."""
    play, known = Play(), server.transactions
    doubted, again = choose(given(play, 4), given(play, 2))
    server.leave_in_doubt(doubted)
    with pytest.raises(UnknownOutcome), known.run([again]):
        pytest.fail("it runs")
    server.is_away, server.position = False, FROM + 100
    assert known.find_out()
    with pytest.raises(UsageError) if is_refused else contextlib.nullcontext():
        known.check_outcome(7, 1, again.ticket)
    known.check_outcome(7, 1, again.ticket)
