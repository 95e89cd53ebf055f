"""Consumption of an atomic group's streams: whole epochs in several calls, with the product's planner."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
from msgspec.structs import replace

from sublet_borrower.streams.complete_epoch_stream import CompleteEpochStream, EpochStepMessages
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.log.fetch import LogPage
from sublet_storage.readers.epoch_steps import EpochStepPlanner
from tests.simulation.work import Work

if TYPE_CHECKING:
    from tests.simulation.agents import SimulatedAgent

_MAX_BYTES = (1, 5, 20, 1000)
"""Bounds of a step; here a message is one byte."""
_ROWS = pa.schema([("offset", pa.int64()), ("epoch", pa.list_(pa.int64()))])


@dataclass(slots=True)
class AtomicWork(Work):
    """A stream installed in a session of an atomic group."""

    granted: CompleteEpochStream = field(repr=False)  # a trace has no addresses
    consumed: ConsumedFrontier

    @classmethod
    def of(cls, group_id: int, grant: Grant) -> AtomicWork:
        """Return the work that begins with that grant."""
        assert grant.consumed is not None
        plan = EpochStepPlanner(grant.position, grant.consumed)
        filter = TopicFilter.parse(grant.filter)
        granted = CompleteEpochStream(
            grant.stream_id,
            grant.grant_id,
            grant.generation_id,
            filter,
            grant.position,
            step_planner=plan,
            grant_key=grant.grant_key,
        )
        return cls(group_id, grant.stream_id, grant.grant_id, grant.position, granted, grant.consumed)


class AtomicReading:
    """Consumes such streams for a session: it reads summaries, fetches a step page by page, and gives parts of it to
    the user. `later` calls a function of its process after a while, if it is still alive."""

    def __init__(
        self, agent: SimulatedAgent, handle: int, whims: Random, later: Callable[[float, Callable[[], None]], None]
    ) -> None:
        self._agent, self._handle, self._whims, self._later = agent, handle, whims, later
        self._simulation, self._world = agent.simulation, agent.world

    def go_on(self, work: AtomicWork) -> None:
        """Begin a user call if there is something to do and it is allowed, else retry later."""
        over = work.over or work.busy or (work.granted.is_stopping and work.granted.is_quiescent)
        if self._agent.alive and not over and not self._begin_call(work):
            self._later(self._world.random.uniform(0.1, 0.8), lambda: self.go_on(work))

    def stop(self, work: AtomicWork) -> None:
        """Finish the current step. Some users abort in the middle of a call, others after it."""
        work.granted.is_stopping = True
        whim = self._whims.random()
        if work.granted.is_mid_step or work.busy:
            if whim < 0.1:
                self._give_up(work)
                return
            if whim < 0.25:
                self._world.say(self._agent.name, f"leaves the step of {work}")
                work.granted.abort_step()
        if work.granted.is_quiescent:
            self._report(work)

    def note(self, work: AtomicWork, reported: Sequence[GroupFrontier]) -> None:
        """Record that more epochs may be completed."""
        work.granted.has_new_frontier = work.granted.has_new_frontier or bool(reported)

    def _give_up(self, work: AtomicWork) -> None:
        self._world.say(self._agent.name, f"gives up {work}")
        work.granted.abort_step()
        work.granted.is_abandoned = True
        work.busy, work.over = False, True
        self._report(work)

    def _begin_call(self, work: AtomicWork) -> bool:
        found = work.granted.next_rows() if self._may(work) else None
        while found is None:
            if not self._may(work) or not self._read(work) or self._world.chance(0.2):
                return False
            found = work.granted.next_rows()
        self._call(work, found[0])
        return True

    def _may(self, work: AtomicWork) -> bool:
        """Return whether a call may begin; a step that has begun is finished also during a revoke."""
        machine, agent = self._agent.machine, self._agent
        ask = machine.may_continue if work.granted.is_mid_step else machine.may_start_call
        return ask(self._handle, work.stream_id, work.grant_id, agent.now)

    def _read(self, work: AtomicWork) -> bool:
        """Read a page of the step, or plan the next; return False if there is nothing to read for now."""
        granted, stream = work.granted, self._simulation.streams.streams[work.stream_id]
        if stream.generation.gone:
            granted.is_unreadable = True
        if granted.is_unreadable or granted.is_aborted or not self._agent.may_read(work.grant_id):
            return False
        if granted.next_run is None:
            return self._look(work)
        step, run = granted.next_run
        start, end = granted.next_read_offset, self._world.random.randint(granted.next_read_offset + 1, run.end)
        work.read_at = self._world.now
        beyond = min(end + self._world.random.randint(0, 2), stream.head)
        if granted.advance_read(start, beyond, stream.head) and not granted.add_page(
            self._page(work, start, beyond), step, run
        ):
            granted.mark_done(granted.ticket)
            self._report(work)
        return True

    def _look(self, work: AtomicWork) -> bool:
        """Plan from some of the block summaries, after a hint of new data and now and then; return whether it was
        tried."""
        granted, rnd = work.granted, self._world.random
        if not (granted.may_have_more or self._world.chance(0.3)):
            return False
        marks, known = (
            self._simulation.streams.block_summaries(work.stream_id, granted.step_planner.scanned),
            granted.step_planner.scanned,
        )
        page = marks.blocks[: rnd.choice((1, 2, 5, 1000))]
        most_bytes = rnd.choice(_MAX_BYTES)
        begun = granted.begin_step(most_bytes)
        if not begun:
            granted.add_summaries(replace(marks, blocks=page))
            begun = granted.begin_step(most_bytes)
        if begun:
            self._report(work)
        return begun or granted.step_planner.scanned > known

    def _page(self, work: AtomicWork, start: int, end: int) -> LogPage:
        epochs = self._simulation.publishing.epochs[work.stream_id][start:end]
        rows = pa.RecordBatch.from_pydict({"offset": list(range(start, end)), "epoch": epochs}, schema=_ROWS)
        return LogPage((rows,), start, end, end, is_closed=False)

    def _call(self, work: AtomicWork, piece: EpochStepMessages) -> None:
        offsets = piece.table.column("offset").to_pylist()
        work.busy = True
        counts = self._simulation.checkers.deliveries.call_started(self._agent.name, work, offsets)
        rnd = self._world.random
        slow = rnd.uniform(5, 18) if self._world.chance(0.02) else rnd.uniform(0.05, 0.4)
        if self._world.now < self._agent.slow_until:
            slow = self._whims.uniform(1.0, 6.0)
        self._later(slow, lambda: self._finish(work, piece, offsets, counts))

    def _finish(self, work: AtomicWork, piece: EpochStepMessages, offsets: Sequence[int], counts: bool) -> None:
        if not self._agent.alive or (work.over and not work.busy):
            return
        work.busy = False
        work.granted.mark_done(piece.ticket)
        if counts:
            self._simulation.checkers.deliveries.call_finished(work, offsets)
        if not work.over:
            self._report(work)
            self.go_on(work)

    def _report(self, work: AtomicWork) -> None:
        reported = work.granted.to_progress()
        assert reported.consumed is not None
        work.position, work.consumed = reported.position, reported.consumed
        self._agent.say(self._handle, work, reported)
