"""What a session knows of its streams: how far each is read and done, and when its last word may be given."""

from __future__ import annotations

from typing import ClassVar

import pyarrow as pa
import pytest

from sublet_borrower.machine.events import RevokeStarted, SessionProgress, StreamGranted, StreamRemoved
from sublet_borrower.streams.assignment import SessionAssignment
from sublet_borrower.streams.batch import Batch
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_protocol.domain.errors import PoisonBlock
from sublet_protocol.messages.borrower_leader import Grant, RevokedReason

FROM = 10


class Play:
    """A handler with one stream that is lent from `FROM` on, and what it reported."""

    def __init__(self) -> None:
        self.reports: list[SessionProgress] = []
        self.handler = SessionAssignment(self.reports.append)
        self.granted = self.lend(1)

    def lend(self, grant_id: int) -> GrantedStream:
        self.handler.apply_update(StreamGranted(Grant("b", 1, 7, grant_id, FROM, 1, 0, 1, "#")))
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

    def last(self) -> tuple[int, bool]:
        return self.reports[-1].position, self.reports[-1].is_final


@pytest.mark.conforms("E8")
def test_the_last_word_waits_for_all_that_is_outstanding() -> None:
    play = Play()
    first, second = play.give(3), play.give(4)
    play.handler.apply_update(RevokeStarted(7, 1))
    assert play.reports == []
    play.handler.mark_acknowledged(play.granted, first)
    assert play.last() == (second, False)
    play.handler.mark_acknowledged(play.granted, second)
    assert play.last() == (FROM + 7, True)


@pytest.mark.conforms("W10")
@pytest.mark.parametrize("given_up", [False, True])
def test_at_a_bad_block_the_last_word_waits_for_what_lies_ahead_of_it_and_is_not_of_it_where_that_is_given_up(
    given_up: bool,
) -> None:
    play = Play()
    first = play.give(3)
    poison = PoisonBlock(7, (FROM + 3, FROM + 5), "is garbage.")
    assert [play.handler.poisoned(play.granted, poison) for _ in range(2)] == [True, False]
    play.handler.release_read(play.granted)
    assert (play.reports, play.granted.may_have_more) == ([], False)
    if given_up:
        play.handler.abandon_outstanding()
        said, position = ("", 0), FROM
    else:
        play.handler.mark_acknowledged(play.granted, first)
        said, position = (str(poison), FROM + 5), FROM + 3
    last = play.reports[-1]
    assert (last.position, last.is_final, last.read_error, last.poison) == (position, True, *said)


@pytest.mark.conforms("P5", "X4")
def test_what_somebody_says_is_worth_a_look_and_no_more() -> None:
    play = Play()
    worth = []

    def note() -> None:
        worth.append(play.granted.may_have_more)

    assert play.granted.advance_read(FROM, FROM + 3, FROM + 3)
    note()
    play.handler.hint_heads([(7, 2**40)])
    note()
    play.handler.mark_acknowledged(play.granted, FROM)
    assert (play.reports[-1].lag, play.handler.lags()) == (0, {7: 0})
    assert play.granted.advance_read(FROM + 3, FROM + 3, FROM + 3)  # the look finds nothing
    note()
    play.handler.hint_heads([(7, 2**40)])
    play.handler.update_heads([(7, FROM + 3)])
    note()
    assert worth == [False, True, False, False]


@pytest.mark.conforms("E29")
def test_a_batch_that_is_done_does_not_stand_for_one_before_it_that_is_not() -> None:
    play = Play()
    first, second, third = play.give(3), play.give(4), play.give(5)
    play.handler.mark_acknowledged(play.granted, second)
    play.handler.mark_progress(play.granted, third, third + 1)
    assert play.last() == (FROM, False)
    play.handler.mark_acknowledged(play.granted, third)
    assert play.last() == (FROM, False)
    play.handler.mark_acknowledged(play.granted, first)
    assert play.last() == (FROM + 12, False)


def test_what_is_skipped_counts_when_all_before_it_is_done() -> None:
    play = Play()
    first = play.give(3)
    assert play.granted.advance_read(FROM + 3, FROM + 9, 1_000)
    play.handler.mark_skipped(play.granted, FROM + 3)
    assert play.reports == []
    play.handler.mark_acknowledged(play.granted, first)
    assert play.last() == (FROM + 9, False)


@pytest.mark.conforms("E8")
def test_a_stream_without_anything_outstanding_has_its_last_word_at_once() -> None:
    play = Play()
    play.handler.apply_update(RevokeStarted(7, 1))
    assert play.last() == (FROM, True)
    assert play.handler.next_readable(lambda _: True) is None


def test_progress_within_a_batch_is_not_final() -> None:
    play = Play()
    first = play.give(5)
    play.handler.apply_update(RevokeStarted(7, 1))
    play.handler.mark_progress(play.granted, first, FROM + 2)
    assert play.last() == (FROM + 2, False)
    play.handler.mark_acknowledged(play.granted, first)
    assert play.last() == (FROM + 5, True)


def test_what_is_given_up_is_not_waited_for_and_does_not_count() -> None:
    play = Play()
    first = play.give(5)
    play.handler.mark_acknowledged(play.granted, first)
    play.give(5)
    play.handler.abandon_outstanding()
    play.handler.apply_update(RevokeStarted(7, 1))
    assert play.last() == (FROM + 5, True)


@pytest.mark.conforms("E8", "E11")
def test_the_last_word_says_what_was_given_out_and_is_given_up() -> None:
    play = Play()
    first = play.give(5)
    play.handler.mark_progress(play.granted, first, FROM + 2)
    play.handler.abandon_outstanding()
    play.handler.apply_update(RevokeStarted(7, 1))
    assert (play.last(), play.reports[-1].delivered_end) == ((FROM + 2, True), FROM + 5)


@pytest.mark.conforms("E8")
def test_who_was_told_to_stop_while_it_reads_has_its_last_word_when_that_is_over() -> None:
    play = Play()
    granted = play.handler.next_readable(lambda _: True)
    assert granted is play.granted
    play.handler.apply_update(RevokeStarted(7, 1))
    assert play.reports == [], "what is being read may yet become a batch"
    play.handler.release_read(granted)
    assert play.last() == (FROM, True)


@pytest.mark.conforms("E8", "E29")
def test_what_was_taken_is_outstanding_whatever_breaks_off_the_session_then() -> None:
    play = Play()
    granted = play.handler.next_readable(lambda _: True)
    assert granted is play.granted
    assert granted.advance_read(FROM, FROM + 3, 1_000)
    play.handler.release_read(granted)
    play.handler.abandon_outstanding()
    play.handler.apply_update(RevokeStarted(7, 1))
    assert (play.last(), play.reports[-1].delivered_end) == ((FROM, True), FROM + 3)


@pytest.mark.conforms("E8")
def test_whoever_was_told_to_stop_has_its_last_word_at_once_when_the_rest_is_given_up() -> None:
    play = Play()
    first = play.give(5)
    play.give(5)
    play.handler.apply_update(RevokeStarted(7, 1))
    play.handler.mark_acknowledged(play.granted, first)
    assert play.last() == (FROM + 5, False)
    play.handler.abandon_outstanding()
    assert play.last() == (FROM + 5, True)
    reported = len(play.reports)
    play.handler.abandon_outstanding()
    assert len(play.reports) == reported


@pytest.mark.conforms("E11", "E36")
def test_a_grant_that_the_database_says_is_over_is_given_up_with_its_range() -> None:
    play = Play()
    first = play.give(5)
    play.handler.lose(7, 2)
    assert play.reports == [], "that was another grant"
    play.handler.mark_progress(play.granted, first, FROM + 2)
    play.handler.lose(7, 1)
    assert (play.last(), play.reports[-1].delivered_end) == ((FROM + 2, True), FROM + 5)
    assert (play.granted.is_ended, play.granted.is_lost, play.handler.positions()) == (True, True, {})


def test_a_word_about_another_grant_means_nothing_and_a_new_grant_ends_the_old() -> None:
    play = Play()
    first = play.give(5)
    play.handler.apply_update(RevokeStarted(7, 2))
    play.handler.apply_update(StreamRemoved(7, 2, RevokedReason.LOST))
    assert (play.granted.is_stopping, play.granted.is_ended) == (False, False)
    old = play.granted
    play.granted = play.lend(2)
    assert (old.is_ended, old.is_lost) == (True, True)
    play.handler.mark_acknowledged(old, first)
    assert play.reports == []
    assert play.handler.positions() == {7: FROM}


def test_a_stream_that_was_handed_over_is_over_and_not_lost() -> None:
    play = Play()
    play.handler.apply_update(StreamRemoved(7, 1, RevokedReason.SAVED))
    assert (play.granted.is_ended, play.granted.is_lost) == (True, False)
    assert play.handler.positions() == {}


class Popping(dict[int, int]):
    """Its owner acknowledges the last batch while another thread looks: after its first look there is none."""

    def __bool__(self) -> bool:
        return len(self) > 0

    def __len__(self) -> int:
        found = super().__len__()
        self.clear()
        return found


def test_where_a_stream_stands_can_be_asked_while_its_owner_acknowledges() -> None:
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


def test_a_transaction_may_begin_while_another_thread_acknowledges() -> None:
    play = Play()
    first, second, third = play.give(3), play.give(4), play.give(5)
    play.granted.outstanding = Acknowledging.outstanding = {Acknowledging(first): first, second: second, third: third}
    batch = Batch(pa.table({"offset": [first]}), first, first + 3, play.granted, play.handler.mark_acknowledged)
    batch.join_transaction([batch])
    assert batch.began
