"""What a session knows of a stream of an atomic group: what is given out of a step, and when progress moves."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa

from sublet_borrower.machine.events import Install, Progressed, Remove, Stop
from sublet_borrower.streams.assignment import Handler
from sublet_borrower.streams.atomic_stream import Piece, Place, WholeLent
from sublet_protocol.domain.epochs import ConsumedFrontier, LowerFrontier
from sublet_protocol.messages.messages import Grant, RevokedReason
from sublet_storage.log.block import Epochs, deliver
from sublet_storage.log.column_layout import BLOCK_SCHEMA
from sublet_storage.log.log import Page
from sublet_storage.readers.epoch_steps import Mark, Marks

BLOCK = 10


def before(epoch: int) -> LowerFrontier:
    return LowerFrontier(((epoch,),))


def consumed(upto: int, epoch: int) -> ConsumedFrontier:
    return ConsumedFrontier(upto, before(epoch))


class Play:
    """A stream with a block for each of these epochs, lent to a handler; all before `completed` is completed."""

    def __init__(self, *epochs: int, completed: int) -> None:
        self.epochs = epochs
        self.reports: list[Progressed] = []
        self.handler = Handler(self.reports.append)
        self.handler.take(Install(Grant("b", 1, 7, 1, 0, 1, 0, 1, "#", consumed=consumed(0, 0))))
        self.look(completed)

    @property
    def lent(self) -> WholeLent:
        found = self.handler.next_to_read(lambda _: True)
        assert isinstance(found, WholeLent)
        self.handler.not_read(found)
        return found

    def look(self, completed: int) -> None:
        lent = self.lent
        blocks = [
            Mark(BLOCK * place, BLOCK * (place + 1), 1, before(epoch), Epochs(((epoch,),), ((epoch,),)))
            for place, epoch in enumerate(self.epochs)
        ]
        lent.look(Marks(tuple(blocks), BLOCK * len(blocks), False, before(completed)))
        lent.go_on(limit_bytes=1)

    def skip(self) -> None:
        """A block of the step that has begun, of which nothing is wanted."""
        lent = self.lent
        assert lent.run is not None
        step, run = lent.run
        page = Page((), lent.read, lent.read + BLOCK, BLOCK * len(self.epochs), False)
        assert lent.take(page.start, page.position, page.head)
        assert not lent.offer(page, step, run)
        self.handler.skipped(lent, lent.ticket)

    def read(self) -> tuple[Piece, Place | None] | None:
        """A block of the step that has begun; what is given out by now."""
        lent = self.lent
        assert lent.run is not None
        step, run = lent.run
        first, epoch = lent.read, self.epochs[lent.read // BLOCK]
        rows = {
            "topic": ["t"] * BLOCK,
            "key": [None] * BLOCK,
            "value": [b"v"] * BLOCK,
            "headers": [None] * BLOCK,
            "timestamp": [datetime(2026, 1, 1, tzinfo=UTC)] * BLOCK,
            "epoch": [[epoch]] * BLOCK,
        }
        batch = deliver(pa.RecordBatch.from_pydict(rows, schema=BLOCK_SCHEMA), 7, first)
        page = Page((batch,), first, first + BLOCK, BLOCK * len(self.epochs), False)
        assert lent.take(page.start, page.position, page.head)
        assert lent.offer(page, step, run)
        return lent.next_piece()

    def last(self) -> tuple[int, ConsumedFrontier | None, bool]:
        return self.reports[-1].position, self.reports[-1].consumed, self.reports[-1].final


def test_the_last_of_a_step_says_so_and_progress_moves_behind_the_whole() -> None:
    play = Play(1, 1, 2, completed=2)
    lent = play.lent
    assert play.read() is None, "it is not known whether the step ends with it"
    found = play.read()
    assert found is not None
    first, place = found
    assert (first.first, first.end, place) == (0, 10, None)
    found = lent.next_piece()
    assert found is not None
    second, place = found
    assert (second.first, second.end, place) == (10, 20, Place(20, consumed(20, 2)))
    play.handler.acknowledged(lent, second.ticket)
    assert play.last() == (0, consumed(0, 0), False)
    play.handler.acknowledged(lent, first.ticket)
    assert play.last() == (20, consumed(20, 2), False)
    assert lent.waits


def test_who_is_told_to_stop_within_a_step_gives_the_rest_of_it_out_first() -> None:
    play = Play(1, 1, completed=2)
    lent = play.lent
    play.read()
    play.handler.take(Stop(7, 1))
    assert play.reports == []
    assert lent.may_have_more
    found = play.read()
    assert found is not None
    for piece, _ in (found, lent.next_piece() or found):
        play.handler.acknowledged(lent, piece.ticket)
    assert play.last() == (20, consumed(20, 2), True)
    assert play.reports[-1].until == 0
    assert not lent.may_have_more


def test_who_is_told_to_stop_begins_no_further_step() -> None:
    play = Play(1, 2, completed=3)
    lent = play.lent
    found = play.read()
    assert found is not None
    play.handler.take(Stop(7, 1))
    play.handler.acknowledged(lent, found[0].ticket)
    assert play.last() == (10, consumed(10, 2), True)
    assert not lent.go_on(1)


def test_a_step_that_is_cut_short_is_left_undone_and_said_to_be_seen_again() -> None:
    play = Play(1, 1, 1, completed=2)
    lent = play.lent
    play.read()
    found = play.read()
    assert found is not None
    play.handler.cut_short()
    play.handler.take(Stop(7, 1))
    assert play.reports == [], "one is in the user's hands"
    play.handler.acknowledged(lent, found[0].ticket)
    assert play.last() == (0, consumed(0, 0), True)
    assert play.reports[-1].until == 10
    assert not lent.may_have_more
    assert lent.next_piece() is None


def test_what_is_given_up_is_said_to_be_seen_again() -> None:
    play = Play(1, 1, completed=2)
    play.read()
    play.read()
    play.handler.take(Stop(7, 1))
    play.handler.give_up()
    assert play.last() == (0, consumed(0, 0), True)
    assert play.reports[-1].until == 10


def test_batches_of_two_steps_may_be_in_hand_and_progress_follows_their_order() -> None:
    play = Play(1, 2, completed=3)
    lent = play.lent
    first = play.read()
    assert first is not None
    assert lent.may_have_more, "another step may follow on what is known"
    assert lent.go_on(1)
    second = play.read()
    assert second is not None
    play.handler.acknowledged(lent, second[0].ticket)
    assert play.last() == (0, consumed(0, 0), False)
    play.handler.acknowledged(lent, first[0].ticket)
    assert play.last() == (20, consumed(20, 3), False)


def test_completed_epochs_of_which_there_is_nothing_are_progress_too() -> None:
    play = Play(5, completed=3)
    lent = play.lent
    play.handler.moved(lent)
    assert play.last() == (0, consumed(10, 3), False)
    assert lent.waits


def test_what_comes_when_the_stream_is_gone_is_discarded() -> None:
    play = Play(1, completed=2)
    lent = play.lent
    play.handler.take(Remove(7, 1, RevokedReason.LOST))
    assert not lent.take(0, 10, 10)
    assert not lent.is_within_a_step
    assert lent.lost


def test_what_does_not_follow_directly_is_discarded() -> None:
    play = Play(1, 1, completed=2)
    lent = play.lent
    assert not lent.take(10, 20, 20)
    assert not lent.take(0, 0, 20)
    assert lent.outstanding == {}


def test_a_page_without_anything_wanted_moves_nothing_before_the_step_is_done() -> None:
    play = Play(1, 1, 1, completed=2)
    lent = play.lent
    play.skip()
    assert play.last() == (0, consumed(0, 0), False)
    assert play.read() is None
    play.skip()
    found = lent.next_piece()
    assert found is not None
    piece, place = found
    assert place == Place(30, consumed(30, 2)), "it is the last that is given out"
    play.handler.acknowledged(lent, piece.ticket)
    assert play.last() == (30, consumed(30, 2), False)
