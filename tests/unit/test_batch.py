"""What a transaction takes of batches and their parts, and which batch is given out again first."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pyarrow as pa
import pytest

from sublet_borrower.consumer.redelivery_queue import RedeliveryQueue
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.messages.borrower_leader import GrantEndOutcome
from tests.unit.test_assignment import FROM, Play


def given(play: Play, count: int, left_out: int = 0) -> Batch:
    """A batch of so many messages, and of offsets behind them that do not match."""
    first = play.give(count + left_out)
    calls = (play.handler.mark_acknowledged, play.handler.mark_progress, contextlib.nullcontext)
    table = pa.table({"offset": range(first, first + count)})
    return Batch(table, first, first + count + left_out, play.granted, *calls)  # type: ignore[arg-type]


Choose = Callable[[Batch, Batch], list[Batch]]
TAKEN: dict[str, Choose] = {
    "the first": lambda one, two: [one],
    "both": lambda one, two: [one, two],
    "the first, in parts, and the second": lambda one, two: [one.slice(1, 3), two, one.slice(0, 1)],
    "a part of the first": lambda one, two: [one.slice(0, 1)],
    "a part of a part": lambda one, two: [one.slice(0, 2).slice(0, 1)],
}
REFUSED: dict[str, tuple[Choose, str]] = {
    "the second": (lambda one, two: [two], f"that begins at offset {FROM} is still to be done"),
    "a later part": (lambda one, two: [one.slice(1, 1)], f"offset {FROM}, which comes before it, is still to be"),
    "a gap": (lambda one, two: [one.slice(0, 1), one.slice(2, 2)], f"offset {FROM + 1}, which comes before it"),
    "a part twice": (lambda one, two: [one.slice(0, 2), one.slice(1, 3)], f"messages up to offset {FROM + 1} are done"),
    "nothing": (lambda one, two: [one.slice(0, 0)], "there is nothing in it"),
    "a part, then the second": (lambda one, two: [one.slice(0, 3), two], f"offset {FROM + 3}, which comes before it"),
}


def join(batches: list[Batch]) -> None:
    for batch in batches:
        batch.join_transaction(batches)


@pytest.mark.parametrize("choose", TAKEN.values(), ids=TAKEN)
def test_a_transaction_takes_what_comes_next(choose: Choose) -> None:
    play = Play()
    join(choose(given(play, 4), given(play, 2)))


@pytest.mark.conforms("E29")
@pytest.mark.parametrize(("choose", "reported"), REFUSED.values(), ids=REFUSED)
def test_a_transaction_passes_nothing_over(choose: Choose, reported: str) -> None:
    play = Play()
    chosen = choose(given(play, 4), given(play, 2))
    with pytest.raises(UsageError, match=reported):
        join(chosen)


@pytest.mark.conforms("E29")
@pytest.mark.parametrize("is_part", [False, True])
def test_what_is_done_is_in_no_transaction(is_part: bool) -> None:
    play = Play()
    committed, acknowledged, done = (given(play, 2) for _ in range(3))
    committed.complete_transaction()
    acknowledged.ack()
    play.done(done.ticket)
    for batch, reported in ((committed, "committed"), (acknowledged, "acknowledged"), (done, "acknowledged")):
        chosen = batch.slice(0, 1) if is_part and batch is not committed else batch
        with pytest.raises(UsageError, match=f"is {reported} already"):
            join([chosen])


def test_a_batch_of_no_session_has_no_transaction() -> None:
    play = Play()
    with pytest.raises(UsageError, match="belongs to no session that could commit its progress"):
        Batch(pa.table({"offset": [FROM]}), FROM, FROM + 1, play.granted, None).transaction()


def test_what_is_left_of_a_failed_batch_comes_again() -> None:
    """Where nothing in it matches, it is done."""
    play, queue = Play(), RedeliveryQueue("$share/g/#")
    first, second = given(play, 3, left_out=2), given(play, 1)
    queue.add(first)
    queue.add(second)
    assert [queue.has_earlier(each) for each in (first, second)] == [False, True]
    first.ack(FROM + 1)
    again = queue.next(lambda _: True)
    assert again is not None
    assert (again.first, len(again), again.is_same_as(first), again.is_same_as(second)) == (FROM + 1, 2, True, False)
    first.ack(FROM + 3)
    left = queue.next(lambda _: True)
    assert left is not None
    assert (left.first, first.is_done, queue.has_earlier(second)) == (second.first, True, False)
    other = Play()
    other.granted.stream_id = 8
    other.give(9)
    assert not queue.has_earlier(given(other, 1)), "it is of another stream"


def test_a_batch_is_done_up_to_its_end() -> None:
    """Before its beginning there is nothing to do, and nothing once it is done or its stream is gone."""
    play, calls = Play(), list[None]()
    batch, other = given(play, 2, left_out=1), given(play, 1)
    batch.ack(FROM)
    batch.ack(FROM - 1)
    assert (play.reports, batch.is_outstanding, batch.is_done) == ([], True, False)
    batch.ack(batch.end)
    assert (play.last(), batch.is_outstanding, batch.is_done) == ((FROM + 3, False), False, True)
    play.handler.came_back = lambda: calls.append(None)
    batch.ack(FROM + 1)
    assert calls == []
    play.remove(GrantEndOutcome.LOST)
    assert (other.is_outstanding, batch.is_done) == (False, False)
    assert not batch.is_same_as(given(Play(), 2))


@pytest.mark.conforms("E29")
def test_a_transaction_is_over_when_all_is_done() -> None:
    play = Play()
    batch, other = given(play, 2, left_out=1), given(play, 2)
    assert not batch.has_uncommitted_transaction
    for each in (batch, other):
        each.begin_transaction()
        assert each.has_uncommitted_transaction
    batch.ack(FROM + 2)
    other.complete_transaction()
    assert [each.has_uncommitted_transaction for each in (batch, other)] == [False, False]


def test_only_what_was_committed_is_recovered() -> None:
    """The rows of which its user does not know that yet, all together or less, and not without any."""
    batch = given(Play(), 4)
    batch.slice(1, 2).complete_transaction(recovered=True)
    parts = {part: batch.slice(*part) for part in ((1, 2), (1, 1), (2, 1), (0, 2), (1, 3), (1, 0), (3, 0))}
    assert {part for part, each in parts.items() if each.is_recovered} == {(1, 2), (1, 1), (2, 1)}
    parts[1, 1].forget_recovery()
    assert {part for part, each in parts.items() if each.is_recovered} == {(2, 1)}
