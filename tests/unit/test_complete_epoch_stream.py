"""What a session knows of a stream of an atomic group: what is given out of a step, and when progress moves."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pyarrow as pa
import pytest
from msgspec.structs import replace

from sublet_borrower.machine.events import ProgressReported, RevokeStarted, StreamGranted, StreamRemoved
from sublet_borrower.streams.batch import Batch
from sublet_borrower.streams.complete_epoch_stream import CompleteEpochStream, EpochStepMessages, StepBoundaryProgress
from sublet_borrower.streams.session_assignment import SessionAssignment
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.errors import PoisonBlock, UsageError
from sublet_protocol.messages.borrower_leader import Grant, GrantEndOutcome
from sublet_storage.log.block_encoder import BlockEpochRange, add_position_columns
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.log.fetch import LogPage, beyond_head_error
from sublet_storage.readers.epoch_steps import BlockEpochSummaries, BlockEpochSummary, BlockRun, EpochStep
from tests.kit import GRANT_KEY, WAIT_S

BLOCK = 10

FetchedPage = tuple[LogPage, EpochStep, BlockRun]


def before(epoch: int) -> LowerFrontier:
    return LowerFrontier(((epoch,),))


def consumed(upto: int, epoch: int) -> ConsumedFrontier:
    return ConsumedFrontier(upto, before(epoch))


class Play:
    """A stream with a block for each of these epochs, granted to a handler; all before `completed` is completed.
    `on_report` is called with each report, in the middle of the handler's call."""

    def __init__(self, *epochs: int, completed: int, limit_bytes: int = 1) -> None:
        self.epochs = epochs
        self.reports: list[ProgressReported] = []
        self.on_report: Callable[[], None] = lambda: None
        self.handler = SessionAssignment(self._report)
        self.handler.apply_update(
            StreamGranted(Grant("b", 1, 7, 1, 0, 1, 0, 1, "#", consumed=consumed(0, 0), grant_key=GRANT_KEY))
        )
        self.look(completed, limit_bytes)

    @property
    def granted(self) -> CompleteEpochStream:
        found = self.handler.next_readable(lambda _: True)
        assert isinstance(found, CompleteEpochStream)
        self.handler.release_read(found)
        return found

    def _report(self, report: ProgressReported) -> None:
        self.reports.append(report)
        self.on_report()

    def look(self, completed: int, limit_bytes: int = 1) -> None:
        granted, places = self.granted, range(0, BLOCK * len(self.epochs), BLOCK)
        blocks = [
            BlockEpochSummary(start, start + BLOCK, 1, before(epoch), BlockEpochRange(((epoch,),), ((epoch,),)))
            for start, epoch in zip(places, self.epochs, strict=True)
        ]
        granted.add_summaries(BlockEpochSummaries(tuple(blocks), BLOCK * len(blocks), False, before(completed), 1))
        granted.begin_step(limit_bytes)

    def skip(self) -> None:
        """A block of the step that has begun, of which nothing is wanted."""
        granted = self.granted
        assert granted.next_run is not None
        step, run = granted.next_run
        page = LogPage((), granted.next_read_offset, granted.next_read_offset + BLOCK, BLOCK * len(self.epochs), False)
        assert granted.advance_read(page.start, page.position, page.head)
        assert not granted.add_page(page, step, run)
        self.handler.mark_skipped(granted, granted.ticket)

    def read(self) -> tuple[EpochStepMessages, StepBoundaryProgress | None]:
        """A block of the step that has begun; what is given out by now."""
        found = self.read_on()
        assert found is not None
        return found

    def read_on(self, *, atomic: bool = False) -> tuple[EpochStepMessages, StepBoundaryProgress | None] | None:
        """A block of the step that has begun; what is given out by now, if anything is."""
        granted = self.granted
        page, step, run = self.fetch()
        assert granted.add_page(page, step, run, atomic=atomic) != (atomic and page.start > 0)
        return granted.next_rows()

    def fetch(self) -> FetchedPage:
        """A block of the step that has begun, which is taken as read."""
        granted = self.granted
        assert granted.next_run is not None
        step, run = granted.next_run
        first, epoch = granted.next_read_offset, self.epochs[granted.next_read_offset // BLOCK]
        row = {"topic": "t", "value": b"v", "timestamp": datetime(2026, 1, 1, tzinfo=UTC), "epoch": [epoch]}
        batch = add_position_columns(pa.RecordBatch.from_pylist([row] * BLOCK, schema=BLOCK_SCHEMA), 7, first)
        page = LogPage((batch,), first, first + BLOCK, BLOCK * len(self.epochs), False)
        assert granted.advance_read(page.start, page.position, page.head)
        return page, step, run

    def stop(self) -> None:
        """Its leader wants the stream back."""
        self.handler.apply_update(RevokeStarted(7, 1))

    def last(self) -> tuple[int, ConsumedFrontier | None, bool]:
        return self.reports[-1].position, self.reports[-1].consumed, self.reports[-1].is_final


def test_progress_moves_behind_the_entire_step() -> None:
    """The last of a step says so."""
    play = Play(1, 1, 2, completed=2)
    granted = play.granted
    assert (granted.is_waiting, play.handler.is_mid_step) == (False, True)
    assert play.read_on() is None, "it is not known whether the step ends with it"
    first, place = play.read()
    assert (first.first, first.end, place) == (0, 10, None)
    second, place = granted.next_rows() or (first, None)
    assert (second.first, second.end, place) == (10, 20, StepBoundaryProgress(20, consumed(20, 2)))
    play.handler.mark_acknowledged(granted, second.ticket)
    assert play.last() == (0, consumed(0, 0), False)
    play.handler.mark_acknowledged(granted, first.ticket)
    assert play.last() == (20, consumed(20, 2), False)
    assert (granted.is_waiting, play.handler.is_mid_step) == (True, False)
    assert play.handler.streams_waiting_for_epochs() == [granted]
    play.look(2)
    assert not granted.may_have_more
    known = BlockEpochSummaries((), 30, False, before(2), 1)
    play.handler.update_frontiers({8: known, 7: known})
    play.handler.update_frontiers({})
    assert not granted.may_have_more
    play.handler.update_frontiers({7: replace(known, lower=before(3))})
    assert granted.may_have_more


def test_a_stream_without_messages_left_waits_for_none() -> None:
    play = Play(1, completed=2)
    granted = play.granted
    piece, _ = play.read()
    play.handler.mark_acknowledged(granted, piece.ticket)
    assert not granted.is_waiting
    assert play.handler.streams_waiting_for_epochs() == []


def test_a_step_may_be_given_out_as_one() -> None:
    play = Play(1, 1, completed=2)
    assert play.read_on(atomic=True) is None
    found = play.read_on(atomic=True)
    assert found is not None
    piece, place = found
    assert (piece.first, piece.end, piece.table.num_rows, place) == (
        0,
        20,
        20,
        StepBoundaryProgress(20, consumed(20, 2)),
    )


def test_what_was_given_out_before_remains_outstanding() -> None:
    """When what was read since is taken back."""
    play = Play(1, 1, 1, completed=2)
    granted = play.granted
    play.read_on()
    state = granted.read_state()
    play.read_on()
    assert len(granted.outstanding) == 2
    play.handler.go_back(granted, state)
    assert (list(granted.outstanding), granted.next_read_offset) == ([granted.ticket], 10)


def test_what_was_done_meanwhile_remains_done() -> None:
    """When what was read since is taken back."""
    play = Play(1, 2, completed=3)
    granted = play.granted
    piece, _ = play.read()
    state = granted.read_state()
    assert granted.begin_step(1)
    play.handler.mark_acknowledged(granted, piece.ticket)
    play.handler.go_back(granted, state)
    play.handler.report(granted)
    assert play.last() == (10, consumed(10, 2), False)


def test_a_step_is_given_out_entirely_before_it_stops() -> None:
    play = Play(1, 1, completed=2)
    granted = play.granted
    play.read_on()
    play.stop()
    assert play.reports == []
    assert granted.may_have_more
    found = play.read()
    for piece, _ in (found, granted.next_rows() or found):
        play.handler.mark_acknowledged(granted, piece.ticket)
    assert play.last() == (20, consumed(20, 2), True)
    assert play.reports[-1].delivered_end == 0
    assert not granted.may_have_more


def test_who_is_asked_to_stop_begins_no_further_step() -> None:
    play = Play(1, 2, completed=3)
    granted = play.granted
    rows, _ = play.read()
    play.stop()
    play.handler.mark_acknowledged(granted, rows.ticket)
    assert play.last() == (10, consumed(10, 2), True)
    assert not granted.begin_step(1)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_a_step_that_is_cut_short_is_left_undone(is_given_up: bool) -> None:
    """What was given out of it is said to be seen again."""
    play = Play(1, 1, 1, completed=2)
    granted = play.granted
    play.read_on()
    rows, _ = play.read()
    play.handler.abort_steps()
    play.stop()
    assert play.reports == [], "one is in the user's hands"
    if is_given_up:
        play.handler.abandon_outstanding()
    else:
        play.handler.mark_acknowledged(granted, rows.ticket)
    assert play.last() == (0, consumed(0, 0), True)
    assert play.reports[-1].delivered_end == 10
    assert not granted.may_have_more
    assert granted.next_rows() is None


@pytest.mark.conforms("S8")
@pytest.mark.parametrize("atomic", [False, True])
def test_a_step_aborted_in_a_read_stays_undone(atomic: bool) -> None:
    """Its last page has come, and is given out neither as the end of a step without its beginning nor ever."""
    play = Play(1, 1, completed=2)
    granted = play.granted
    assert play.read_on(atomic=atomic) is None
    page, step, run = play.fetch()
    play.handler.abort_steps()
    assert not granted.add_page(page, step, run, atomic=atomic)
    play.handler.mark_skipped(granted, granted.ticket)
    assert granted.next_rows() is None
    play.stop()
    assert play.last() == (0, consumed(0, 0), True)
    assert play.reports[-1].delivered_end == 0


@pytest.mark.conforms("S8")
def test_a_read_taken_back_leaves_a_step_aborted() -> None:
    play = Play(1, 1, completed=2)
    granted = play.granted
    play.read_on()
    state = granted.read_state()
    play.read()
    play.handler.abort_steps()
    play.handler.go_back(granted, state)
    assert granted.next_rows() is None
    play.stop()
    assert play.last() == (0, consumed(0, 0), True)


READS: dict[str, Callable[[CompleteEpochStream, FetchedPage], object]] = {
    "begin_step": lambda granted, page: granted.begin_step(1),
    "advance_read": lambda granted, page: granted.advance_read(10, 20, 20),
    "add_page": lambda granted, page: granted.add_page(*page),
    "next_rows": lambda granted, page: granted.next_rows(),
    "read_state": lambda granted, page: granted.read_state(),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_read_waits_for_the_change_of_another_thread(
    read: Callable[[CompleteEpochStream, FetchedPage], object],
) -> None:
    """Such as an acknowledgement: neither sees in part what the other changes."""
    play = Play(1, 1, completed=2)
    granted, page = play.granted, play.fetch()
    is_held, may_go = threading.Event(), threading.Event()

    def hold() -> None:
        is_held.set()
        assert may_go.wait(WAIT_S)

    play.on_report = hold
    with ThreadPoolExecutor(2) as pool:
        acknowledging = pool.submit(play.handler.mark_acknowledged, granted, granted.ticket)
        assert is_held.wait(WAIT_S)
        reading = pool.submit(read, granted, page)
        try:
            with pytest.raises(TimeoutError):
                reading.result(0.1)
        finally:
            may_go.set()
        acknowledging.result(WAIT_S)
        reading.result(WAIT_S)


@pytest.mark.conforms("W10")
def test_a_step_that_cannot_be_decoded_is_made_smaller() -> None:
    """The smallest that cannot be is left undone."""
    play = Play(1, 2, completed=3)
    granted, poison = play.granted, PoisonBlock(7, (10, 20), "cannot be decoded")
    assert granted.next_run is not None
    assert not play.handler.end_unreadable(granted, poison)
    assert (granted.is_mid_step, granted.next_read_offset, granted.outstanding) == (False, 0, {})
    play.look(3)
    assert granted.next_run is not None
    assert play.handler.end_unreadable(granted, poison)
    assert granted.is_aborted


@pytest.mark.conforms("W10")
@pytest.mark.parametrize("is_broken_off", [False, True])
def test_a_step_in_the_users_hands_is_made_smaller(is_broken_off: bool) -> None:
    """What was given out of it comes again, with the ends of its epochs, also if that read is broken off."""
    play = Play(1, 1, 2, completed=3, limit_bytes=3)
    granted, poison = play.granted, PoisonBlock(7, (20, 30), "cannot be decoded")
    play.read_on()
    first, _ = play.read()
    state = granted.read_state()
    assert not play.handler.end_unreadable(granted, poison)
    if is_broken_off:
        play.handler.go_back(granted, state)
    play.handler.mark_acknowledged(granted, first.ticket)
    assert (play.last(), granted.outstanding) == ((0, consumed(0, 0), False), {})
    batch = Batch(first.table, first.first, first.end, granted, None, ticket=first.ticket)
    with pytest.raises(UsageError, match=r"cannot be decoded.* come again in other batches"):
        batch.join_transaction([batch])
    play.look(3)
    play.read_on()
    again, none = play.read()
    last, place = granted.next_rows() or (again, none)
    assert (again.first, last.end, none, place) == (0, 20, None, StepBoundaryProgress(20, consumed(20, 2)))
    play.handler.mark_acknowledged(granted, again.ticket)
    play.handler.mark_acknowledged(granted, last.ticket)
    assert granted.begin_step(1)
    assert play.handler.end_unreadable(granted, poison)
    play.handler.release_read(granted)
    assert play.last() == (20, consumed(20, 2), True)
    assert (play.reports[-1].poison, play.reports[-1].delivered_end) == (30, 0)


@pytest.mark.conforms("W10")
def test_a_step_that_cannot_end_is_not_waited_for() -> None:
    """It is the smallest, and its beginning is in the user's hands, to be done with its end."""
    play = Play(1, 1, 1, completed=2)
    granted, poison = play.granted, PoisonBlock(7, (20, 30), "cannot be decoded")
    for is_smallest in (False, True):
        play.read_on()
        play.read()
        assert play.handler.end_unreadable(granted, poison) == is_smallest
        if not is_smallest:
            play.look(2)
    play.handler.release_read(granted)
    assert play.last() == (0, consumed(0, 0), True)
    assert (play.reports[-1].poison, play.reports[-1].delivered_end) == (30, 10)


def test_what_was_taken_back_is_reported_as_given_up() -> None:
    """Where the stream goes before it has come again."""
    play = Play(1, 1, 2, completed=3, limit_bytes=3)
    play.read_on()
    play.read()
    play.handler.end_unreadable(play.granted, PoisonBlock(7, (20, 30), "cannot be decoded"))
    play.stop()
    assert (play.last(), play.reports[-1].delivered_end) == ((0, consumed(0, 0), True), 10)


def test_a_stream_that_ends_before_a_step_is_left() -> None:
    """As smaller steps would help nothing."""
    play = Play(1, 2, completed=3)
    granted = play.granted
    assert play.handler.end_unreadable(granted, beyond_head_error(7, 10, 5))
    assert granted.is_aborted


def test_progress_follows_the_order_of_steps_in_hand() -> None:
    play = Play(1, 2, completed=3)
    granted = play.granted
    first, _ = play.read()
    assert granted.may_have_more, "another step may follow on what is known"
    assert granted.begin_step(1)
    second, _ = play.read()
    play.handler.mark_acknowledged(granted, second.ticket)
    assert play.last() == (0, consumed(0, 0), False)
    play.handler.mark_acknowledged(granted, first.ticket)
    assert play.last() == (20, consumed(20, 3), False)


def test_completed_epochs_without_messages_count() -> None:
    play = Play(5, completed=3)
    play.handler.report(play.granted)
    assert play.last() == (0, consumed(10, 3), False)
    granted = play.granted
    assert granted.is_waiting
    play.handler.apply_update(StreamRemoved(7, 1, GrantEndOutcome.LOST))
    assert not granted.is_waiting


def test_what_does_not_follow_directly_is_discarded() -> None:
    """Nor is anything taken once the stream is gone."""
    play = Play(1, 1, completed=2)
    granted = play.granted
    assert not granted.advance_read(10, 20, 20)
    assert not granted.advance_read(0, 0, 20)
    assert granted.outstanding == {}
    play.handler.apply_update(StreamRemoved(7, 1, GrantEndOutcome.LOST))
    assert not granted.advance_read(0, 10, 20)
    assert not granted.is_mid_step
    assert granted.is_lost


def test_a_skipped_page_moves_nothing_within_a_step() -> None:
    play = Play(1, 1, 1, completed=2)
    granted = play.granted
    play.skip()
    assert play.last() == (0, consumed(0, 0), False)
    assert play.read_on() is None
    play.skip()
    found = granted.next_rows()
    assert found is not None
    piece, place = found
    assert place == StepBoundaryProgress(30, consumed(30, 2)), "it is the last that is given out"
    play.handler.mark_acknowledged(granted, piece.ticket)
    assert play.last() == (30, consumed(30, 2), False)
