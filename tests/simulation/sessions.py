"""A session that works on all its streams concurrently, call by call, and reports progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TYPE_CHECKING

import pyarrow as pa
from msgspec.structs import replace

from sublet_borrower.machine.events import (
    AssignmentUpdate,
    GroupFrontiersAdvanced,
    RevokeStarted,
    SavedProgress,
    StreamGranted,
    StreamRemoved,
)
from sublet_borrower.streams.complete_epoch_stream import CompleteEpochStream, EpochStepMessages
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import Grant, GrantEndOutcome
from sublet_storage.log.fetch import LogPage
from sublet_storage.readers.epoch_steps import EpochStepPlanner

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedAgent


BEYOND_HEAD = "beyond the head"
"""The read error of a holder that finds a stream to end before its position."""
_MAX_BYTES = (1, 5, 20, 1000)
"""Bounds of a step; here a message is one byte."""
_ROWS = pa.schema([("offset", pa.int64()), ("epoch", pa.list_(pa.int64()))])


@dataclass(slots=True)
class Work:
    """A stream installed in a session: everything before `position` is done. `busy`: a call runs. `since`: the offset
    from which messages are in running calls. `read_at`: when it was last read; None: whenever a call begins."""

    group_id: int
    stream_id: int
    grant_id: int
    position: int
    busy: bool = field(default=False, kw_only=True)
    over: bool = field(default=False, kw_only=True)
    since: int | None = field(default=None, kw_only=True)
    read_at: float | None = field(default=None, kw_only=True)


@dataclass(slots=True)
class AtomicWork(Work):
    """A stream installed in a session of an atomic group."""

    granted: CompleteEpochStream = field(repr=False)  # a trace has no addresses
    consumed: ConsumedFrontier

    @classmethod
    def of(cls, group_id: int, grant: Grant) -> AtomicWork:
        assert grant.consumed is not None
        plan, filter = EpochStepPlanner(grant.position, grant.consumed), TopicFilter.parse(grant.filter)
        place = grant.stream_id, grant.grant_id, grant.generation_id, filter, grant.position
        granted = CompleteEpochStream(*place, step_planner=plan, grant_key=grant.grant_key)
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


@dataclass(slots=True)
class CountedWork(Work):
    """A stream that is consumed message by message. `begun`: its first position; `in_hand`: messages in the current
    call; `beyond_head`: the stream was found to end before its position."""

    begun: int
    in_hand: int = 0
    stopping: bool = False
    beyond_head: bool = False


class Session:
    """The session of one subscription."""

    def __init__(self, agent: SimulatedAgent, handle: int) -> None:
        self._agent, self._handle = agent, handle
        self._simulation, self._world = agent.simulation, agent.world
        self._work: dict[int, CountedWork | AtomicWork] = {}
        # A generator of its own, so that all else is the same as if no user aborted.
        self._whims = Random(f"{agent.simulation.seed} {agent.name} {handle}")
        self._sees_lower_heads = Random(f"{agent.simulation.seed} {agent.name} sees lower heads").random() < 0.5
        self._complete = AtomicReading(agent, handle, self._whims, self._later)

    def reported(self, notify: AssignmentUpdate, group_id: int | None) -> None:
        """Handle an update from the borrower, in order."""
        match notify:
            case StreamGranted(grant):
                assert group_id is not None
                self._install(group_id, grant)
            case RevokeStarted():
                self._stop(self._work[notify.stream_id])
            case StreamRemoved(reason=reason):
                work = self._work.pop(notify.stream_id)
                work.over = True
                self._simulation.checkers.removed(work, reason is GrantEndOutcome.LOST)
            case GroupFrontiersAdvanced(epochs):
                assert group_id is not None
                self._simulation.checkers.epochs.announcements.received(group_id, epochs)
                for work in self._work.values():
                    if isinstance(work, AtomicWork):
                        self._complete.note(work, epochs)
            case SavedProgress():
                pass

    def is_idle(self, stream_id: int) -> bool:
        """Return whether no call runs on the stream."""
        work = self._work[stream_id]
        return not (work.busy or (isinstance(work, AtomicWork) and work.granted.is_mid_step))

    def leave(self) -> None:
        """Do nothing: current calls are finished when the revokes arrive."""

    def close(self) -> None:
        for work in self._work.values():
            work.over = True

    def _install(self, group_id: int, grant: Grant) -> None:
        work = AtomicWork.of(group_id, grant) if grant.consumed is not None else None
        counted = CountedWork(group_id, grant.stream_id, grant.grant_id, grant.position, grant.position)
        self._work[grant.stream_id] = work or counted
        self._simulation.checkers.names.installed(work or counted)
        if work is not None:
            self._complete.go_on(work)
        else:
            self._next(counted)

    def _stop(self, work: CountedWork | AtomicWork) -> None:
        if isinstance(work, AtomicWork):
            self._complete.stop(work)
            return
        work.stopping = True
        if not work.busy:
            self._report(work)
        elif self._whims.random() < 0.1:
            self._give_up(work)

    def _give_up(self, work: CountedWork) -> None:
        """Abort in the middle of a call, as a user may when the stream is revoked."""
        self._world.say(self._agent.name, f"gives up {work}")
        work.busy, work.over = False, True
        self._agent.report(self._handle, work, final=True, until=work.position + work.in_hand)

    def _next(self, work: CountedWork) -> None:
        """Begin a user call if there is something to do and it is allowed, else retry later."""
        agent, rnd = self._agent, self._world.random
        if not agent.alive or work.over or work.stopping:
            return
        allowed = agent.machine.may_start_call(self._handle, work.stream_id, work.grant_id, agent.now)
        ready = self._simulation.streams.streams[work.stream_id].head - work.position
        if ready < 0 and self._sees_lower_heads:
            work.stopping = work.beyond_head = True
            self._report(work)
            return
        if not allowed or ready <= 0 or not agent.may_read(work.grant_id):
            self._later(rnd.uniform(0.2, 0.8), lambda: self._next(work))
            return
        count = rnd.randint(1, ready)
        work.busy, work.in_hand = True, count
        offsets = range(work.position, work.position + count)
        counts = self._simulation.checkers.deliveries.call_started(agent.name, work, offsets)
        slow = rnd.uniform(5, 18) if self._world.chance(0.03) else rnd.uniform(0.05, 0.6)
        if self._world.now < agent.slow_until:
            slow = self._whims.uniform(1.0, 6.0)
        self._later(slow, lambda: self._finish(work, offsets, counts))

    def _finish(self, work: CountedWork, offsets: range, counts: bool) -> None:
        if not self._agent.alive or (work.over and not work.busy):
            return
        work.busy = False
        work.position = offsets.stop
        if counts:
            self._simulation.checkers.deliveries.call_finished(work, offsets)
        self._report(work)
        self._next(work)

    def _report(self, work: CountedWork) -> None:
        if not work.over:
            self._agent.report(self._handle, work, work.stopping)

    def _later(self, delay_s: float, happening: Callable[[], None]) -> None:
        self._world.after(delay_s, lambda: self._agent.awake(happening))
