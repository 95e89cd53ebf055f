"""A streaming query with the product's own planner; its checkpoint and its sink survive it.

Spark's part between its calls is implemented here in a few lines: a micro-batch is written into the offset log before
it begins, and into the commit log when it is in the sink; the sink accepts a batch once, by its number. A new process
begins from the checkpoint. One process at a time.

It consumes streams of atomic groups as any other session does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from sublet_borrower.machine.events import (
    AssignmentUpdate,
    ProgressReported,
    RevokeStarted,
    SavedProgress,
    StreamGranted,
    StreamRemoved,
)
from sublet_borrower.planner.plan_ledger import MicroBatchPlanLedger
from sublet_borrower.planner.planned_ranges import (
    PlannedRange,
    PlannedRangeStatus,
    PlannerStream,
    RunnablePlannedRange,
    resolve_outcome,
)
from sublet_protocol.messages.borrower_leader import GrantEndOutcome
from sublet_storage.groups.consumer_progress import LastPlannedRange
from sublet_storage.groups.model.records import LendingStatus
from tests.simulation.sessions import Session, Work
from tests.simulation.world import Happenings

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedAgent
    from tests.simulation.simulation import Simulation

_HOLDS_S = (1.0, 6.0, 20.0, 20.0)
_DIES = 0.06
"""Probability that a query dies between two of its steps."""


@dataclass(frozen=True, slots=True)
class Batch:
    """An entry of the offset log: its ranges, and ranges done before that may not be saved yet."""

    group_id: int
    ranges: tuple[PlannedRange, ...]
    done: tuple[PlannedRange, ...]


@dataclass(slots=True)
class Checkpoint:
    """Checkpoint of the query of that name: its batches, the number of committed ones, the number in the sink."""

    name: str
    hold_s: float
    batches: list[Batch] = field(default_factory=list)
    committed: int = 0
    in_sink: int = 0


class Query(Session):
    def __init__(self, agent: SimulatedAgent, handle: int, checkpoint: Checkpoint) -> None:
        super().__init__(agent, handle)
        self._checkpoint = checkpoint
        self._planning = MicroBatchPlanLedger(self._said, checkpoint.hold_s)
        self._streams: dict[int, Work] = {}
        self._group_id = 0
        self._over = False
        self._soon(self._begin)

    def reported(self, notify: AssignmentUpdate, group_id: int | None) -> None:
        match notify:
            case StreamGranted(grant) if grant.consumed is None:
                assert group_id is not None
                self._group_id = group_id
                work = Work(group_id, grant.stream_id, grant.grant_id, grant.position)
                self._streams[grant.stream_id] = work
                self._simulation.checkers.names.installed(work)
                self._planning.apply_update(notify)
            case StreamRemoved(reason=reason) if notify.stream_id in self._streams:
                self._simulation.checkers.removed(self._streams.pop(notify.stream_id), reason is GrantEndOutcome.LOST)
                self._planning.apply_update(notify)
            case RevokeStarted() | SavedProgress() if notify.stream_id in self._streams:
                self._planning.apply_update(notify)
            case _:
                super().reported(notify, group_id)

    def is_idle(self, stream_id: int) -> bool:
        return stream_id not in self._streams and super().is_idle(stream_id)

    def leave(self) -> None:
        self._over = True
        self._planning.abandon()

    def close(self) -> None:
        super().close()
        self._over = True

    # --- batch by batch ---------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Begin from the checkpoint: after a complete batch, or in the middle of one."""
        batches, committed = self._checkpoint.batches, self._checkpoint.committed
        if len(batches) == committed:
            done = (*batches[-1].done, *batches[-1].ranges) if batches else ()
            self._planning.restore(done, ())
            self._plan()
            return
        batch = batches[-1]
        before = batches[-2].ranges if len(batches) > 1 else ()
        self._planning.restore((*before, *batch.done), batch.ranges)
        self._resume(list(batch.ranges), [])

    def _resume(self, open: list[PlannedRange], again: list[RunnablePlannedRange]) -> None:
        """Resolve which ranges of the batch are to be repeated; lost ones are left out of it."""
        for planned in tuple(open):
            if (found := self._planning.restart(planned)) is not None:
                again.append(found)
                open.remove(planned)
            elif (
                became := self._status(self._checkpoint.batches[-1].group_id, planned)
            ) is not PlannedRangeStatus.OPEN:
                self._world.say(self._agent.name, f"in batch {len(self._checkpoint.batches)}, {became}:", planned)
                self._planning.drop_started(planned)
                open.remove(planned)
        if open:
            self._soon(lambda: self._resume(open, again))
        else:
            self._run(again)

    def _status(self, group_id: int, planned: PlannedRange) -> PlannedRangeStatus:
        """Return the status of a range, as the database's function `read_planned_ranges` would."""
        row = self._simulation.store.rows(group_id).get(planned.stream_id)
        if row is None or row.in_doubt is None:
            return resolve_outcome(planned, None)
        is_ours = row.session == self._checkpoint.name
        held = row.grant_id if is_ours and row.status is LendingStatus.HELD else None
        return resolve_outcome(planned, LastPlannedRange(row.in_doubt, row.pending_in_doubt is not None, is_ours, held))

    def _unsaved(self) -> tuple[PlannedRange, ...]:
        for planned in self._planning.unsaved_ranges():
            if self._status(self._group_id, planned) is not PlannedRangeStatus.OPEN:
                self._planning.drop_done(planned)
        return self._planning.unsaved_ranges()

    def _plan(self) -> None:
        """Finish the last batch, and plan the next from streams with messages."""
        planning, batches = self._planning, self._checkpoint.batches
        if batches:
            planning.acknowledge(batches[-1].ranges)
        streams = self._simulation.streams.streams
        heads = [(stream_id, streams[stream_id].head) for stream_id in self._streams]
        planning.update_heads(heads)
        planning.end_beyond_head(heads, planning.known_ends(self._streams))
        planning.plan(dict(self._ends(planning.plannable_streams(self._may_start))))
        planning.report_progress()
        self._await_written()

    def _ends(self, waiting: Sequence[PlannerStream]) -> Iterator[tuple[int, int]]:
        """Yield (stream, end): for some streams a part of what they have, at the end of the run all of it."""
        for granted in waiting:
            if self._world.calm:
                yield granted.grant.stream_id, granted.plannable_end
            elif self._whims.random() < 0.6:
                yield granted.grant.stream_id, self._whims.randint(granted.position + 1, granted.plannable_end)

    def _await_written(self) -> None:
        if self._planning.has_unsaved_plan():
            self._soon(self._await_written)
            return
        begun = self._planning.take_saved_plans()
        if not begun:
            self._soon(self._plan)
        else:
            self._soon(lambda: self._write_down(begun))

    def _write_down(self, begun: Sequence[RunnablePlannedRange]) -> None:
        batch = Batch(self._group_id, tuple(one.planned for one in begun), self._unsaved())
        self._checkpoint.batches.append(batch)
        self._world.say(self._agent.name, f"begins batch {len(self._checkpoint.batches)}:", batch)
        self._run(begun)

    def _run(self, begun: Sequence[RunnablePlannedRange]) -> None:
        slow = self._whims.uniform(5, 18) if self._whims.random() < 0.05 else self._whims.uniform(0.05, 1.0)
        self._later(slow, self._if_alive(lambda: self._put_into_sink(begun)))

    def _put_into_sink(self, begun: Sequence[RunnablePlannedRange]) -> None:
        checkpoint = self._checkpoint
        number, group_id = len(checkpoint.batches), checkpoint.batches[-1].group_id
        if checkpoint.in_sink < number:
            checkpoint.in_sink = number
            for one in begun:
                self._simulation.checkers.deliveries.batch_stored(checkpoint.name, group_id, one)
        self._soon(self._commit)

    def _commit(self) -> None:
        self._checkpoint.committed = len(self._checkpoint.batches)
        self._soon(self._plan)

    # --- inside -----------------------------------------------------------------------------------------------------

    def _said(self, reported: ProgressReported) -> None:
        work = self._streams.get(reported.stream_id)
        if work is not None and work.grant_id == reported.grant_id:
            work.position = reported.position
            self._agent.say(self._handle, work, reported)

    def _may_start(self, granted: PlannerStream) -> bool:
        return self._agent.machine.may_start_call(
            self._handle, granted.grant.stream_id, granted.grant.grant_id, self._agent.now
        )

    def _soon(self, happening: Callable[[], None]) -> None:
        self._later(self._whims.uniform(0.01, 0.4), self._if_alive(happening))

    def _if_alive(self, happening: Callable[[], None]) -> Callable[[], None]:
        def unless_over() -> None:
            if not self._agent.alive or self._over:
                return
            if not self._world.calm and self._whims.random() < _DIES:
                self._agent.crash()
            else:
                happening()

        return unless_over


class Queries(Happenings):
    """Runs a query in some runs. It dies again and again, and mostly restarts; it has its own random generator."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the queries")
        self._life: SimulatedAgent | None = None

    def begin(self, until: float) -> None:
        """Start it, with faults of its own until that time."""
        if self._random.random() < 0.4:
            self._until = until
            checkpoint = Checkpoint("query", self._random.choice(_HOLDS_S))
            self._world.after(self._random.uniform(0.0, 6.0), lambda: self._see_to(checkpoint))

    def _see_to(self, checkpoint: Checkpoint) -> None:
        if self._world.now <= self._until:
            if self._life is None or not self._life.alive or not self._life.wishes:
                self._life = self._simulation.start_query(checkpoint)
            later_s = self._random.choice((0.2, 1.0, 5.0))
            self._world.after(min(later_s, max(self._until - self._world.now, 0.1)), lambda: self._see_to(checkpoint))
