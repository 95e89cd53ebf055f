"""What a session knows of its streams: how far each is read and done, and when its final progress may be reported."""

from __future__ import annotations

from decimal import Decimal
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pytest

from sublet_borrower.machine.events import (
    GroupFrontiersAdvanced,
    ProgressReported,
    RevokeStarted,
    StreamGranted,
    StreamRemoved,
)
from sublet_borrower.streams.batch import Batch
from sublet_borrower.streams.granted_stream import MAX_AWAITED, GrantedStream
from sublet_borrower.streams.session_assignment import SessionAssignment
from sublet_protocol.domain.epoch_frontiers import GroupFrontier, LowerFrontier
from sublet_protocol.domain.errors import PoisonBlock, UsageError
from sublet_protocol.messages.borrower_leader import Grant, GrantEndOutcome
from tests.kit import GRANT_KEY

FROM = 10


class Play:
    """A handler with one stream that is granted from `FROM` on, and what it reported."""

    def __init__(self) -> None:
        self.reports: list[ProgressReported] = []
        self.handler = SessionAssignment(self.reports.append)
        self.granted = self.lend(1)

    def grant(self, stream_id: int, grant_id: int = 1) -> None:
        grant = Grant("b", 1, stream_id, grant_id, FROM, 1, 0, 1, "#", grant_key=GRANT_KEY)
        self.handler.apply_update(StreamGranted(grant))

    def lend(self, grant_id: int) -> GrantedStream:
        self.grant(7, grant_id)
        found = self.handler.next_readable(lambda _: True)
        assert found is not None
        self.handler.release_read(found)
        return found

    def give(self, count: int) -> int:
        """A batch of so many messages; its first offset."""
        first = self.granted.next_read_offset
        assert self.granted.advance_read(first, first + count, 1_000)
        self.handler.mark_delivered(self.granted, 0)
        return first

    def done(self, first: int) -> None:
        """The batch from this offset on is acknowledged."""
        self.handler.mark_acknowledged(self.granted, first)

    def stop(self, grant_id: int = 1) -> None:
        """Its leader wants the stream back."""
        self.handler.apply_update(RevokeStarted(7, grant_id))

    def remove(self, outcome: GrantEndOutcome, grant_id: int = 1) -> None:
        self.handler.apply_update(StreamRemoved(7, grant_id, outcome))

    def state(self) -> tuple[bool, bool]:
        """Whether the grant has ended, and whether it is lost."""
        return self.granted.is_ended, self.granted.is_lost

    def last(self) -> tuple[int, bool]:
        return self.reports[-1].position, self.reports[-1].is_final


def test_new_streams_are_read_before_the_others_again() -> None:
    play = Play()
    for stream_id in (8, 9, 10):
        play.grant(stream_id)
    play.handler.apply_update(StreamRemoved(8, 1, GrantEndOutcome.LOST))
    play.grant(11)
    read = [play.handler.next_readable(lambda _: True) for _ in range(4)]
    assert [each.stream_id for each in read if each is not None] == [9, 10, 11, 7]
    assert play.handler.next_readable(lambda _: False) is None


def test_a_stream_that_goes_leaves_new_ones_in_order() -> None:
    play = Play()
    for stream_id in (8, 9):
        play.grant(stream_id)
    play.remove(GrantEndOutcome.SAVED)
    play.grant(10)
    read = [play.handler.next_readable(lambda _: True) for _ in range(3)]
    assert [each.stream_id for each in read if each is not None] == [8, 9, 10]


def test_only_what_follows_directly_is_taken() -> None:
    """And nothing once the stream is gone; of nothing there is no batch."""
    play = Play()
    for start, end, head in ((FROM + 1, FROM + 2, 99), (FROM - 1, FROM + 2, 99), (FROM, FROM - 1, 99), (FROM, 99, 98)):
        assert not play.granted.advance_read(start, end, head)
    assert play.granted.advance_read(FROM, FROM, 99)
    assert (play.granted.outstanding, play.granted.next_read_offset) == ({}, FROM)
    play.remove(GrantEndOutcome.LOST)
    assert not play.granted.advance_read(FROM, FROM + 1, 99)


@pytest.mark.parametrize(
    ("head", "hint", "is_awaited"),
    [(None, 0, False), (MAX_AWAITED, 0, True), (MAX_AWAITED + 1, 0, False), (0, MAX_AWAITED + 1, False)],
)
def test_of_a_stream_with_little_left_more_is_awaited(head: int | None, hint: int, is_awaited: bool) -> None:
    granted = Play().granted
    granted.head, granted.head_hint = None if head is None else FROM + head, FROM + hint
    assert granted.is_awaited == is_awaited


def test_streams_are_tried_again_at_their_times() -> None:
    play, problem = Play(), OSError("away")
    play.grant(8)
    other = play.handler.next_readable(lambda granted: granted.stream_id == 8)
    assert other is not None
    assert not play.handler.mark_readable(play.granted)
    play.handler.defer(play.granted, problem, 0.0, 5.0)
    play.handler.defer(other, problem, 0.0, 1.0)
    tried = []
    for now in (0.9, 1.0, 4.9, 5.0):
        play.handler.retry_deferred(now)
        tried.append((other.may_have_more, play.granted.may_have_more))
    assert tried == [(False, False), (True, False), (True, False), (True, True)]
    assert [play.handler.mark_readable(play.granted) for _ in range(2)] == [True, False], "said once"


def test_what_was_not_given_is_read_again() -> None:
    play = Play()
    first, state = play.give(3), play.granted.read_state()
    play.give(4)
    play.handler.go_back(play.granted, state)
    assert (list(play.granted.outstanding), play.granted.next_read_offset) == ([first], FROM + 3)
    assert not play.handler.is_mid_step


@pytest.mark.conforms("E8")
def test_final_progress_waits_for_what_is_outstanding() -> None:
    play = Play()
    first, second = play.give(3), play.give(4)
    play.stop()
    assert play.reports == []
    play.done(first)
    assert play.last() == (second, False)
    play.done(second)
    assert (play.last(), play.reports[-1].delivered_end) == ((FROM + 7, True), 0)
    assert play.handler.next_readable(lambda _: True) is None
    idle = Play()
    idle.stop()
    assert idle.last() == (FROM, True)


@pytest.mark.conforms("W10")
@pytest.mark.parametrize("given_up", [False, True])
def test_at_a_bad_block_final_progress_waits(given_up: bool) -> None:
    """For what lies ahead of it; where that is given up, the final progress is not of the block."""
    play = Play()
    first = play.give(3)
    poison = PoisonBlock(7, (FROM + 3, FROM + 5), "is garbage.")
    assert [play.handler.end_unreadable(play.granted, poison) for _ in range(2)] == [True, False]
    play.handler.release_read(play.granted)
    assert (play.reports, play.granted.may_have_more) == ([], False)
    if given_up:
        play.handler.abandon_outstanding()
        said, position = ("", 0), FROM
    else:
        play.done(first)
        said, position = (str(poison), FROM + 5), FROM + 3
    last = play.reports[-1]
    assert (last.position, last.is_final, last.read_error, last.poison) == (position, True, *said)


@pytest.mark.conforms("P5", "X4")
def test_what_another_reports_is_worth_one_look() -> None:
    play = Play()
    worth = []
    assert play.granted.advance_read(FROM, FROM + 3, FROM + 3)
    worth.append(play.granted.may_have_more)
    play.handler.hint_heads([(7, 2**40)])
    worth.append(play.granted.may_have_more)
    play.handler.mark_acknowledged(play.granted, FROM)
    assert (play.reports[-1].lag, play.handler.lags()) == (0, {7: 0})
    assert play.granted.advance_read(FROM + 3, FROM + 3, FROM + 3)  # the look finds nothing
    worth.append(play.granted.may_have_more)
    play.handler.hint_heads([(7, 2**40)])
    play.handler.update_heads([(7, FROM + 3)])
    worth.append(play.granted.may_have_more)
    play.handler.update_heads([(7, FROM), (8, FROM)])  # it ends before what was read of it
    worth.append(play.granted.may_have_more)
    play.granted.is_reading = True
    play.handler.update_heads([(7, FROM)])  # that was asked for before what is being read came
    worth.append(play.granted.may_have_more)
    assert worth == [False, True, False, False, True, False]


@pytest.mark.conforms("E29")
def test_a_batch_does_not_stand_for_one_before_it() -> None:
    play = Play()
    first, second, third = play.give(3), play.give(4), play.give(5)
    play.done(second)
    assert play.reports[-1].delivered_end == 0
    play.handler.mark_progress(play.granted, third, third + 1)
    assert play.last() == (FROM, False)
    play.done(third)
    assert play.last() == (FROM, False)
    play.done(first)
    assert play.last() == (FROM + 12, False)


def test_what_is_skipped_counts_in_its_turn() -> None:
    play = Play()
    first = play.give(3)
    assert play.granted.advance_read(FROM + 3, FROM + 9, 1_000)
    play.handler.mark_skipped(play.granted, FROM + 3)
    assert play.reports == []
    play.done(first)
    assert play.last() == (FROM + 9, False)
    play.handler.mark_skipped(play.granted, FROM + 3)
    assert len(play.reports) == 1, "that is known"


def test_progress_within_a_batch_is_not_final() -> None:
    play = Play()
    first = play.give(5)
    play.stop()
    play.handler.mark_progress(play.granted, first, FROM + 2)
    assert play.last() == (FROM + 2, False)
    play.done(first)
    assert play.last() == (FROM + 5, True)


@pytest.mark.conforms("E8", "E11")
@pytest.mark.parametrize("stops_first", [False, True])
def test_what_is_given_up_is_not_waited_for(stops_first: bool) -> None:
    """It does not count, and the final progress, which is reported once, is up to where it was given out."""
    play = Play()
    first, second = play.give(5), play.give(5)
    play.done(first)
    play.handler.mark_progress(play.granted, second, FROM + 7)
    steps = [play.handler.abandon_outstanding, play.stop]
    for step in reversed(steps) if stops_first else steps:
        assert play.last() == (FROM + 7, False)
        step()
    assert (play.last(), play.reports[-1].delivered_end) == ((FROM + 7, True), FROM + 10)
    reported = len(play.reports)
    play.handler.abandon_outstanding()
    assert len(play.reports) == reported


@pytest.mark.conforms("E8")
def test_while_it_reads_final_progress_waits() -> None:
    """What is being read may yet become a batch."""
    play = Play()
    granted = play.handler.next_readable(lambda _: True)
    assert granted is play.granted
    play.stop()
    assert play.reports == []
    play.handler.release_read(granted)
    assert play.last() == (FROM, True)
    play.remove(GrantEndOutcome.SAVED)
    play.handler.release_read(granted)
    assert len(play.reports) == 1, "it is gone"


@pytest.mark.conforms("E8", "E29")
def test_what_was_taken_is_outstanding() -> None:
    """Whatever breaks off the session then."""
    play = Play()
    granted = play.handler.next_readable(lambda _: True)
    assert granted is play.granted
    assert granted.advance_read(FROM, FROM + 3, 1_000)
    play.handler.release_read(granted)
    play.handler.abandon_outstanding()
    assert play.reports == [], "the stream is not to be handed over yet"
    play.stop()
    assert (play.last(), play.reports[-1].delivered_end) == ((FROM, True), FROM + 3)


@pytest.mark.conforms("E11", "E36")
def test_a_grant_that_the_database_ended_is_given_up() -> None:
    """With the range that was given out."""
    play = Play()
    first = play.give(5)
    play.handler.lose(7, 2)
    play.handler.lose(8, 1)
    assert play.reports == [], "these are other grants"
    play.handler.mark_progress(play.granted, first, FROM + 2)
    play.handler.lose(7, 1)
    assert (play.last(), play.reports[-1].delivered_end) == ((FROM + 2, True), FROM + 5)
    assert (play.state(), play.handler.positions()) == ((True, True), {})


def test_a_new_grant_ends_the_old() -> None:
    """A word about another grant means nothing."""
    play = Play()
    first = play.give(5)
    play.stop(2)
    play.remove(GrantEndOutcome.LOST, 2)
    assert (play.granted.is_stopping, play.granted.is_ended) == (False, False)
    old, new = play.granted, play.lend(2)
    assert (play.state(), new.is_ended) == ((True, True), False)
    play.handler.mark_acknowledged(old, first)
    assert (play.reports, play.handler.positions()) == ([], {7: FROM})


def test_a_stream_handed_over_is_not_lost() -> None:
    play = Play()
    play.remove(GrantEndOutcome.SAVED, 1)
    assert (play.state(), play.handler.positions()) == ((True, False), {})


def test_a_stream_handed_back_is_not_held() -> None:
    """Its leader may grant it to another before it confirms that."""
    play = Play()
    first = play.give(3)
    play.stop()
    assert play.handler.positions() == {7: FROM}
    play.handler.mark_acknowledged(play.granted, first)
    assert (play.last(), play.handler.positions()) == ((FROM + 3, True), {})


@pytest.mark.conforms("P10")
def test_a_space_that_has_anothers_number_begins_anew() -> None:
    """A failover has lost the other, which had come further, or its first epochs, which had as many numbers."""
    play, far, near, pairs = Play(), *(LowerFrontier((epoch,)) for epoch in ((1000,), (4,), (4, 1)))
    for space, frontier in (("eu", far), ("us", near), ("us", pairs)):
        play.handler.apply_update(GroupFrontiersAdvanced((GroupFrontier(space, 2, frontier, frontier),)))
        assert play.handler.epochs[2].consumed == frontier


class Popping(dict[int, int]):
    """Its owner acknowledges the last batch while another thread looks: after its first look there is none."""

    def __bool__(self) -> bool:
        return len(self) > 0

    def __len__(self) -> int:
        found = super().__len__()
        self.clear()
        return found


def test_positions_while_another_thread_acknowledges() -> None:
    play = Play()
    play.give(3)
    play.granted.outstanding = Popping(play.granted.outstanding)
    assert play.handler.positions() == {7: FROM}


class Acknowledging(int):
    """An offset; whoever compares it does so while another thread acknowledges a batch."""

    outstanding: ClassVar[dict[int, int]]

    def __lt__(self, other: int) -> bool:
        self.outstanding.pop(FROM + 3, None)
        return int(self) < other


def test_a_transaction_while_another_acknowledges() -> None:
    play = Play()
    first, second, third = play.give(3), play.give(4), play.give(5)
    play.granted.outstanding = Acknowledging.outstanding = {Acknowledging(first): first, second: second, third: third}
    batch = Batch(pa.table({"offset": [first]}), first, first + 3, play.granted, play.handler.mark_acknowledged)
    batch.begin_transaction()
    batch.join_transaction([batch])
    assert batch.has_uncommitted_transaction


@pytest.mark.parametrize("given", [float("nan"), FROM + 1.0, np.float64(FROM + 1), True, "1", Decimal(1)], ids=ascii)
def test_only_an_integer_is_an_offset(given: Any) -> None:
    """All else acknowledges nothing: a NaN, which pandas has as the greatest offset of no rows, was everything."""
    play = Play()
    first = play.give(3)
    table, calls = pa.table({"offset": []}), (play.handler.mark_acknowledged, play.handler.mark_progress)
    batch = Batch(table, first, first + 3, play.granted, *calls)
    with pytest.raises(UsageError, match="is no offset, so that nothing is acknowledged"):
        batch.ack(up_to_offset=given)
    assert play.granted.outstanding == {first: first}
    batch.ack(up_to_offset=np.int64(first + 1))  # type: ignore[arg-type]
    ((ticket, position),) = play.granted.outstanding.items()
    assert (ticket, position, type(position)) == (first, first + 1, int)
