"""What a session knows of a stream of an atomic group: what is given out of a step, and when progress moves."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa

from sublet_borrower.machine.events import RevokeStarted, SessionProgress, StreamGranted, StreamRemoved
from sublet_borrower.streams.assignment import SessionAssignment
from sublet_borrower.streams.epoch_stream import EpochGrantedStream, StepEnd, StepRows
from sublet_protocol.domain.epochs import ConsumedFrontier, LowerFrontier
from sublet_protocol.messages.borrower_leader import Grant, RevokedReason
from sublet_storage.log.block import EpochBounds, add_position_columns
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.log.fetch import LogPage
from sublet_storage.readers.epoch_steps import BlockEpochSummaries, BlockEpochSummary

BLOCK = 10


def before(epoch: int) -> LowerFrontier:
    return LowerFrontier(((epoch,),))


def consumed(upto: int, epoch: int) -> ConsumedFrontier:
    return ConsumedFrontier(upto, before(epoch))


class Play:
    """A stream with a block for each of these epochs, lent to a handler; all before `completed` is completed."""

    def __init__(self, *epochs: int, completed: int) -> None:
        self.epochs = epochs
        self.reports: list[SessionProgress] = []
        self.handler = SessionAssignment(self.reports.append)
        self.handler.apply_update(StreamGranted(Grant("b", 1, 7, 1, 0, 1, 0, 1, "#", consumed=consumed(0, 0))))
        self.look(completed)

    @property
    def granted(self) -> EpochGrantedStream:
        found = self.handler.next_readable(lambda _: True)
        assert isinstance(found, EpochGrantedStream)
        self.handler.release_read(found)
        return found

    def look(self, completed: int) -> None:
        granted = self.granted
        blocks = [
            BlockEpochSummary(
                BLOCK * place, BLOCK * (place + 1), 1, before(epoch), EpochBounds(((epoch,),), ((epoch,),))
            )
            for place, epoch in enumerate(self.epochs)
        ]
        granted.add_summaries(BlockEpochSummaries(tuple(blocks), BLOCK * len(blocks), False, before(completed)))
        granted.begin_step(limit_bytes=1)

    def skip(self) -> None:
        """A block of the step that has begun, of which nothing is wanted."""
        granted = self.granted
        assert granted.next_run is not None
        step, run = granted.next_run
        page = LogPage((), granted.next_read_offset, granted.next_read_offset + BLOCK, BLOCK * len(self.epochs), False)
        assert granted.advance_read(page.start, page.position, page.head)
        assert not granted.add_page(page, step, run)
        self.handler.mark_skipped(granted, granted.ticket)

    def read(self) -> tuple[StepRows, StepEnd | None] | None:
        """A block of the step that has begun; what is given out by now."""
        granted = self.granted
        assert granted.next_run is not None
        step, run = granted.next_run
        first, epoch = granted.next_read_offset, self.epochs[granted.next_read_offset // BLOCK]
        rows = {
            "topic": ["t"] * BLOCK,
            "key": [None] * BLOCK,
            "value": [b"v"] * BLOCK,
            "headers": [None] * BLOCK,
            "timestamp": [datetime(2026, 1, 1, tzinfo=UTC)] * BLOCK,
            "epoch": [[epoch]] * BLOCK,
        }
        batch = add_position_columns(pa.RecordBatch.from_pydict(rows, schema=BLOCK_SCHEMA), 7, first)
        page = LogPage((batch,), first, first + BLOCK, BLOCK * len(self.epochs), False)
        assert granted.advance_read(page.start, page.position, page.head)
        assert granted.add_page(page, step, run)
        return granted.next_rows()

    def last(self) -> tuple[int, ConsumedFrontier | None, bool]:
        return self.reports[-1].position, self.reports[-1].consumed, self.reports[-1].is_final


def test_the_last_of_a_step_says_so_and_progress_moves_behind_the_whole() -> None:
    play = Play(1, 1, 2, completed=2)
    granted = play.granted
    assert play.read() is None, "it is not known whether the step ends with it"
    found = play.read()
    assert found is not None
    first, place = found
    assert (first.first, first.end, place) == (0, 10, None)
    found = granted.next_rows()
    assert found is not None
    second, place = found
    assert (second.first, second.end, place) == (10, 20, StepEnd(20, consumed(20, 2)))
    play.handler.mark_acknowledged(granted, second.ticket)
    assert play.last() == (0, consumed(0, 0), False)
    play.handler.mark_acknowledged(granted, first.ticket)
    assert play.last() == (20, consumed(20, 2), False)
    assert granted.is_waiting


def test_who_is_told_to_stop_within_a_step_gives_the_rest_of_it_out_first() -> None:
    play = Play(1, 1, completed=2)
    granted = play.granted
    play.read()
    play.handler.apply_update(RevokeStarted(7, 1))
    assert play.reports == []
    assert granted.may_have_more
    found = play.read()
    assert found is not None
    for piece, _ in (found, granted.next_rows() or found):
        play.handler.mark_acknowledged(granted, piece.ticket)
    assert play.last() == (20, consumed(20, 2), True)
    assert play.reports[-1].delivered_end == 0
    assert not granted.may_have_more


def test_who_is_told_to_stop_begins_no_further_step() -> None:
    play = Play(1, 2, completed=3)
    granted = play.granted
    found = play.read()
    assert found is not None
    play.handler.apply_update(RevokeStarted(7, 1))
    play.handler.mark_acknowledged(granted, found[0].ticket)
    assert play.last() == (10, consumed(10, 2), True)
    assert not granted.begin_step(1)


def test_a_step_that_is_cut_short_is_left_undone_and_said_to_be_seen_again() -> None:
    play = Play(1, 1, 1, completed=2)
    granted = play.granted
    play.read()
    found = play.read()
    assert found is not None
    play.handler.abort_steps()
    play.handler.apply_update(RevokeStarted(7, 1))
    assert play.reports == [], "one is in the user's hands"
    play.handler.mark_acknowledged(granted, found[0].ticket)
    assert play.last() == (0, consumed(0, 0), True)
    assert play.reports[-1].delivered_end == 10
    assert not granted.may_have_more
    assert granted.next_rows() is None


def test_what_is_given_up_is_said_to_be_seen_again() -> None:
    play = Play(1, 1, completed=2)
    play.read()
    play.read()
    play.handler.apply_update(RevokeStarted(7, 1))
    play.handler.abandon_outstanding()
    assert play.last() == (0, consumed(0, 0), True)
    assert play.reports[-1].delivered_end == 10


def test_batches_of_two_steps_may_be_in_hand_and_progress_follows_their_order() -> None:
    play = Play(1, 2, completed=3)
    granted = play.granted
    first = play.read()
    assert first is not None
    assert granted.may_have_more, "another step may follow on what is known"
    assert granted.begin_step(1)
    second = play.read()
    assert second is not None
    play.handler.mark_acknowledged(granted, second[0].ticket)
    assert play.last() == (0, consumed(0, 0), False)
    play.handler.mark_acknowledged(granted, first[0].ticket)
    assert play.last() == (20, consumed(20, 3), False)


def test_completed_epochs_of_which_there_is_nothing_are_progress_too() -> None:
    play = Play(5, completed=3)
    granted = play.granted
    play.handler.report(granted)
    assert play.last() == (0, consumed(10, 3), False)
    assert granted.is_waiting


def test_what_comes_when_the_stream_is_gone_is_discarded() -> None:
    play = Play(1, completed=2)
    granted = play.granted
    play.handler.apply_update(StreamRemoved(7, 1, RevokedReason.LOST))
    assert not granted.advance_read(0, 10, 10)
    assert not granted.is_mid_step
    assert granted.is_lost


def test_what_does_not_follow_directly_is_discarded() -> None:
    play = Play(1, 1, completed=2)
    granted = play.granted
    assert not granted.advance_read(10, 20, 20)
    assert not granted.advance_read(0, 0, 20)
    assert granted.outstanding == {}


def test_a_page_without_anything_wanted_moves_nothing_before_the_step_is_done() -> None:
    play = Play(1, 1, 1, completed=2)
    granted = play.granted
    play.skip()
    assert play.last() == (0, consumed(0, 0), False)
    assert play.read() is None
    play.skip()
    found = granted.next_rows()
    assert found is not None
    piece, place = found
    assert place == StepEnd(30, consumed(30, 2)), "it is the last that is given out"
    play.handler.mark_acknowledged(granted, piece.ticket)
    assert play.last() == (30, consumed(30, 2), False)
