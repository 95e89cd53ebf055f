"""A stream granted by an atomic group, read, delivered and reported in entire epochs; no I/O.

What comes next is planned from the summaries of its blocks (`sublet_storage.readers.epoch_steps`), a step at a time:
one or more pages of messages, with which epochs end. Progress moves when a step is done, never inside of it. A stream
that is to be handed over is read to the end of the step that has begun; if that is aborted (`abort_step`), it is
delivered again by the next holder.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pyarrow as pa

from sublet_borrower.machine.events import ProgressReported
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_storage.log.fetch import LogPage
from sublet_storage.readers.epoch_steps import BlockEpochSummaries, BlockRun, EpochStep, EpochStepPlanner


class StepBoundaryProgress(msgspec.Struct, frozen=True):
    """The progress of a stream between two steps."""

    position: int
    consumed: ConsumedFrontier


class EpochStepMessages(msgspec.Struct, frozen=True):
    """Messages of [first, end) that were read for a step."""

    table: pa.Table
    first: int
    end: int
    ticket: int


class _BegunStep(msgspec.Struct):
    """A step that has begun. `tickets`: what was given out of it and is not done; `furthest`: up to where that was."""

    step_end: StepBoundaryProgress
    tickets: set[int] = msgspec.field(default_factory=set)
    is_complete: bool = False
    furthest: int = 0


@dataclass(slots=True, eq=False)
class CompleteEpochStream(GrantedStream):
    """A granted stream of an atomic group. `next_read_offset`: while there is no step, up to where summaries are known.

    `has_new_frontier`: there may be another step. `has_smallest_steps`: each ends with the next epochs that may end it.
    `withdrawn`: tickets of what was given out of a step that cannot be read to its end.
    `pieces`: what was read and not given out yet, since it is not known whether the step ends with it. `lock`: the
    assignment's, which its session's thread takes here to read on: another thread may abort a step, or acknowledge.
    """

    step_planner: EpochStepPlanner = field(kw_only=True)
    lock: AbstractContextManager[object] = field(default_factory=threading.RLock, kw_only=True, repr=False)
    step: EpochStep | None = None
    has_new_frontier: bool = False
    has_smallest_steps: bool = False
    is_aborted: bool = False
    withdrawn: set[int] = field(default_factory=set)
    pieces: deque[EpochStepMessages] = field(default_factory=deque)
    _run: int = 0
    _begun_steps: deque[_BegunStep] = field(default_factory=deque)
    _step_end: StepBoundaryProgress = field(init=False)
    _withdrawn_end: int = 0

    def __post_init__(self) -> None:
        self._step_end = StepBoundaryProgress(self.step_planner.position, self.step_planner.consumed)

    @property
    def acknowledged_offset(self) -> int:
        """Return the offset before which everything is done."""
        return self._step_end.position

    @property
    def may_have_more(self) -> bool:
        """Return whether reading, or looking for a step, is worthwhile now."""
        if self.is_ended or self.is_unreadable or self.is_aborted:
            return False
        if self.pieces or self.step is not None:
            return True
        return not self.is_stopping and (self.has_new_frontier or self.has_more)

    @property
    def is_waiting(self) -> bool:
        """Return whether it waits for epochs to be completed."""
        return self.step is None and self.step_planner.is_waiting and not (self.is_ended or self.is_stopping)

    @property
    def is_mid_step(self) -> bool:
        """Return whether some of a step is given out, and some is not."""
        return not self.is_ended and (self.step is not None or bool(self.pieces))

    @property
    def is_quiescent(self) -> bool:
        """Return whether nothing will be acknowledged any more."""
        return self.is_abandoned or not (
            self.outstanding or self.is_reading or (self.step is not None and not self.is_aborted)
        )

    def add_summaries(self, summaries: BlockEpochSummaries) -> None:
        """Record the summaries of the blocks that follow."""
        self.step_planner.add_summaries(summaries)
        self.head, self.next_read_offset, self.head_hint, self.has_new_frontier = (
            summaries.head,
            self.step_planner.scanned,
            0,
            False,
        )

    def begin_step(self, limit_bytes: int) -> bool:
        """Begin the next step, of about `limit_bytes`, from the known summaries; return False if there is none."""
        step = self.step_planner.next_step(0 if self.has_smallest_steps else limit_bytes)
        with self.lock:
            if self.is_ended or self.is_stopping or step is None:
                return False
            self.step_planner.complete_step(step)
            self._begun_steps.append(_BegunStep(StepBoundaryProgress(step.position, step.consumed)))
            self.step, self._run = step, 0
            self._begin_run()
            return True

    def advance_read(self, start: int, end: int, head: int) -> bool:
        """Take what was read for the step, and return whether it was accepted, as `GrantedStream.advance_read` does."""
        with self.lock:
            if (
                self.is_ended
                or self.is_aborted
                or self.step is None
                or start != self.next_read_offset
                or not start < end <= head
            ):
                return False
            begun_step, run = self._begun_steps[-1], self.step.runs[self._run]
            end = min(end, run.end)
            self.ticket += 1
            self.outstanding[self.ticket] = start
            begun_step.tickets.add(self.ticket)
            self.next_read_offset, self.head = end, head
            if end == run.end:
                self._run += 1
                self._begin_run()
            self.is_reading = False
            return True

    def add_page(self, page: LogPage, step: EpochStep, run: BlockRun, *, atomic: bool = False) -> bool:
        """Take the matching messages of a page that was read for the run; return False if no batch results yet, or none
        will, as the step was aborted meanwhile. `atomic`: all of a step together.
        """
        matching = [rows for batch in page.batches if (rows := step.filter_batch(run, batch)).num_rows]
        if not matching:
            return False
        piece = EpochStepMessages(pa.Table.from_batches(matching), page.start, min(page.position, run.end), self.ticket)
        with self.lock:
            if atomic and self.pieces:
                self.pieces.append(_join_pieces(self.pieces.pop(), piece))
                return False
            self.pieces.append(piece)
            self._drop_aborted()
            return not self.is_aborted

    @property
    def next_run(self) -> tuple[EpochStep, BlockRun] | None:
        """Return the step that is being read, and the next run of it; None between steps."""
        return None if self.step is None else (self.step, self.step.runs[self._run])

    def next_rows(self) -> tuple[EpochStepMessages, StepBoundaryProgress | None] | None:
        """Return what is to be given out now, and where the stream is once that is done, if a step ends with it."""
        with self.lock:
            begun_step = self._begun_steps[-1] if self._begun_steps else None
            if not self.pieces or begun_step is None or not (begun_step.is_complete or len(self.pieces) > 1):
                return None
            piece = self.pieces.popleft()
            begun_step.furthest = max(begun_step.furthest, piece.end)
            return piece, None if self.pieces else begun_step.step_end

    def mark_done(self, ticket: int) -> bool:
        """Mark the batch as done; return False if it was before."""
        if self.outstanding.pop(ticket, None) is None:
            return False
        for begun_step in self._begun_steps:
            begun_step.tickets.discard(ticket)
        self._settle()
        return True

    def mark_done_upto(self, ticket: int, position: int) -> None:
        """Do nothing: progress does not move inside of a step."""

    def read_state(self) -> tuple[Any, ...]:
        """Return the state, as `GrantedStream.read_state` does, with what is planned and the step that has begun."""
        with self.lock:
            steps = [(begun_step, begun_step.is_complete, begun_step.furthest) for begun_step in self._begun_steps]
            position = self.next_read_offset, self.ticket, self.size, self.step, self._run, self.max_bytes
            reading = (*position, self._step_end)
            return reading, steps, tuple(self.pieces), self.step_planner.copy(), self.has_smallest_steps

    def go_back(self, read_state: tuple[Any, ...]) -> None:
        """Go back to a state, as `GrantedStream.go_back` does."""
        reading, step_states, pieces, step_planner, has_smallest_steps = read_state
        if has_smallest_steps != self.has_smallest_steps:
            return  # the step of that state was withdrawn
        self.step_planner = step_planner
        self.next_read_offset, self.ticket, self.size, self.step, self._run, self.max_bytes, self._step_end = reading
        self.pieces, self._begun_steps = deque(pieces), deque(begun_step for begun_step, _, _ in step_states)
        for begun_step, complete, furthest in step_states:
            begun_step.is_complete, begun_step.furthest = complete, furthest
            begun_step.tickets.intersection_update(range(self.ticket + 1))
        for ticket in [ticket for ticket in self.outstanding if ticket > self.ticket]:
            del self.outstanding[ticket]
        self._drop_aborted()
        self._settle()

    def restart_in_smallest_steps(self) -> bool:
        """Withdraw the step that is being read, with what was given out of it, and read on from where it began in the
        smallest steps: of the epochs in it some may be readable. Return False if it is one of these."""
        if self.step is None:
            return False
        left = self._begun_steps[-1]
        for ticket in left.tickets:
            self.outstanding.pop(ticket, None)
        self.pieces = deque(piece for piece in self.pieces if piece.ticket not in left.tickets)
        self.withdrawn |= left.tickets
        left.tickets.clear()
        if self.has_smallest_steps:
            return False
        self._begun_steps.pop()
        self._withdrawn_end = left.furthest
        reached = self._begun_steps[-1].step_end if self._begun_steps else self._step_end
        self.step_planner = EpochStepPlanner(reached.position, reached.consumed)
        self.step, self.next_read_offset = None, self.step_planner.scanned
        self.has_new_frontier = self.has_smallest_steps = True
        return True

    def abort_step(self) -> None:
        """Leave the step that has begun undone."""
        self.is_aborted = True
        self._drop_aborted()

    def to_progress(self) -> ProgressReported:
        """Return what to report, as `GrantedStream.to_progress` does."""
        final, step_end = self.is_handed_back, self._step_end
        lag = None if self.head is None else max(self.head - step_end.position, 0)
        withdrawn_end = self._withdrawn_end if self._withdrawn_end > step_end.consumed.upto else 0
        ends = (withdrawn_end, *(begun_step.furthest for begun_step in self._begun_steps))
        progress = ProgressReported(
            self.stream_id,
            self.grant_id,
            step_end.position,
            final,
            self.size,
            lag,
            max(ends) if final else 0,
            consumed=step_end.consumed,
        )
        return self._add_read_error(progress)

    def _drop_aborted(self) -> None:
        """Drop what was read and not given out of a step that was aborted. It is not marked as done, so that progress
        stops before the step."""
        if self.is_aborted:
            for piece in self.pieces:
                self.outstanding.pop(piece.ticket, None)
            self.pieces.clear()

    def _begin_run(self) -> None:
        assert self.step is not None
        if self._run < len(self.step.runs):
            run = self.step.runs[self._run]
            self.next_read_offset, self.max_bytes = run.start, run.size
            return
        self._begun_steps[-1].is_complete = self.has_new_frontier = True
        self.step, self.next_read_offset = None, self.step_planner.scanned
        self._settle()

    def _settle(self) -> None:
        """Move progress on behind steps that are done, up to the first that is not."""
        while self._begun_steps and self._begun_steps[0].is_complete and not self._begun_steps[0].tickets:
            self._step_end = self._begun_steps.popleft().step_end


def _join_pieces(piece: EpochStepMessages, following: EpochStepMessages) -> EpochStepMessages:
    """Return both in one, under the ticket of the first."""
    table = pa.concat_tables((piece.table, following.table))
    return EpochStepMessages(table, min(piece.first, following.first), max(piece.end, following.end), piece.ticket)
