"""The ledger of a planning session: what is planned, durable and done of each stream.

Plain bookkeeping, no I/O. The work is done elsewhere and its end is known late, as a Spark query does with
its micro-batches. So a range is planned, made durable as in doubt, and only then started; when it is done it is
acknowledged, and the next may be planned. A stream has one range at a time. What was in doubt when an earlier grant
ended, of this process or of an earlier one of the same session, comes with the next grant: what was started is done
again, and nothing else is planned of that stream before.

What the agent reports is handled on the agent's thread, at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import assert_never

from sublet_borrower.machine.events import (
    AssignmentUpdate,
    GroupFrontiersAdvanced,
    ProgressReported,
    RevokeStarted,
    SavedProgress,
    StreamGranted,
    StreamRemoved,
)
from sublet_borrower.planner.planned_ranges import PlannedRange, PlannerStream, RunnablePlannedRange
from sublet_borrower.streams.granted_stream import with_final_error
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import PoisonBlock, PositionBeyondHead
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import Grant, GrantEndOutcome
from sublet_storage.log.fetch import beyond_head_error
from sublet_storage.readers.epoch_steps import EpochStep, EpochStepPlanner


class MicroBatchPlanLedger:
    """The ledger of one session's streams. `apply_update` is for the agent's thread, the rest for the session's;
    `report` for both.

    `hold_s`: how long what is in doubt is reserved for this session if it is lost. `moved_at`: when a stream last came
    or went (time.monotonic). `on_grant` is called with each grant, before anything is planned under it.
    """

    def __init__(
        self,
        report: Callable[[ProgressReported], None],
        hold_s: float,
        on_grant: Callable[[Grant], None] = lambda grant: None,
    ) -> None:
        self._report, self._hold_s, self._on_grant = report, hold_s, on_grant
        self._granted: dict[int, PlannerStream] = {}
        self._done: dict[int, PlannedRange] = {}
        self._started: dict[int, PlannedRange] = {}
        self._unreported: dict[int, PlannerStream] = {}
        self._recalled = self._leaving = False
        self._turn = 0
        self.moved_at = float("-inf")
        self.changed = threading.Condition(threading.RLock())

    def apply_update(self, update: AssignmentUpdate) -> None:
        """Act on an update from the agent."""
        with self.changed:
            match update:
                case StreamGranted(grant):
                    self._on_grant(grant)
                    atomic = None if grant.consumed is None else EpochStepPlanner(grant.position, grant.consumed)
                    granted = PlannerStream(
                        grant, grant.position, released_in_doubt=grant.in_doubt, step_planner=atomic
                    )
                    self._granted[grant.stream_id] = granted
                    self.moved_at = time.monotonic()
                    self._settle(granted)
                case RevokeStarted(stream_id, grant_id):
                    self._stop(stream_id, grant_id)
                case StreamRemoved(stream_id, grant_id, reason):
                    self._remove(stream_id, grant_id, reason)
                case SavedProgress():
                    self._mark_saved(update)
                case GroupFrontiersAdvanced():
                    pass
                case _:
                    assert_never(update)
            self.changed.notify_all()

    def _stop(self, stream_id: int, grant_id: int) -> None:
        if (granted := self._find_granted(stream_id, grant_id)) is not None:
            granted.is_stopping = True
            if granted.is_idle or self._leaving:
                self._report_progress(granted)

    def _remove(self, stream_id: int, grant_id: int, reason: GrantEndOutcome) -> None:
        if self._find_granted(stream_id, grant_id) is not None:
            del self._granted[stream_id]
            self._unreported.pop(stream_id, None)
            self.moved_at = time.monotonic()
            if reason is not GrantEndOutcome.LOST:
                self._done.pop(stream_id, None)

    def _mark_saved(self, saved: SavedProgress) -> None:
        granted = self._find_granted(saved.stream_id, saved.grant_id)
        if granted is None:
            return
        done = self._done.get(saved.stream_id)
        if done is not None and done.is_passed(saved.position, saved.consumed):
            del self._done[saved.stream_id]
        if granted.in_doubt is None or granted.in_doubt != saved.in_doubt or granted.is_plan_saved:
            return
        if granted.is_behind(saved.position, saved.consumed):
            # An earlier process of this session has done a part of it before it was saved: plan it again.
            granted.in_doubt, granted.step = None, None
            granted.advance(saved.position, saved.consumed)
        else:
            granted.is_plan_saved = True

    # --- how far the streams go -------------------------------------------------------------------------------------

    def caught_up_streams(self) -> dict[int, tuple[int, int]]:
        """Return {stream: (grant id, head)} of those planned to where they ended when last looked at."""
        with self.changed:
            return {
                stream_id: (granted.grant.grant_id, granted.known_end)
                for stream_id, granted in self._granted.items()
                if not granted.is_stopping and granted.head == granted.known_end
            }

    def update_heads(self, heads: Iterable[tuple[int, int]]) -> None:
        """Record each (stream, head) from the log. A head before what is planned of its stream has it polled again."""
        with self.changed:
            for stream_id, head in heads:
                granted = self._granted.get(stream_id)
                if granted is not None:
                    granted.has_head_hint = head < granted.known_end
                    granted.head = max(head, granted.head or 0, granted.known_end)

    def known_ends(self, stream_ids: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Return {stream: (grant id, how far it is planned)}, for `end_beyond_head`."""
        with self.changed:
            held = {stream_id: self._granted[stream_id] for stream_id in stream_ids if stream_id in self._granted}
            return {stream_id: (granted.grant.grant_id, granted.known_end) for stream_id, granted in held.items()}

    def end_beyond_head(
        self, heads: Iterable[tuple[int, int]], known_ends: Mapping[int, tuple[int, int]]
    ) -> dict[int, PositionBeyondHead]:
        """Plan no more of streams that end before what was planned of them; return {stream: that error} of those of
        which it was not known. `known_ends`: as that method returned them before the heads were read; a grant or a plan
        that came meanwhile may be further than these."""
        found = {}
        with self.changed:
            for stream_id, head in heads:
                grant_id, known_end = known_ends.get(stream_id, (0, 0))
                granted = self._find_granted(stream_id, grant_id) if head < known_end else None
                if granted is not None and granted.beyond_head is None:
                    found[stream_id] = granted.beyond_head = beyond_head_error(stream_id, known_end, head)
        return found

    def hint_heads(self, heads: Iterable[tuple[int, int]]) -> None:
        """Record each (stream, head) as a hint from a source that may be wrong: only what the log has is planned."""
        with self.changed:
            for stream_id, head in heads:
                granted = self._granted.get(stream_id)
                if granted is not None:
                    granted.has_head_hint = head > (granted.head or 0)

    def streams_to_poll(self) -> list[int]:
        """Return the streams that were not looked at yet, or not since the last head hint."""
        with self.changed:
            return [
                stream_id
                for stream_id, granted in self._granted.items()
                if granted.head is None or granted.has_head_hint
            ]

    def lags(self) -> dict[int, tuple[int, int]]:
        """Return {stream: (next offset to acknowledge, head)} of all that were looked at."""
        with self.changed:
            return {
                s: (granted.position, granted.head) for s, granted in self._granted.items() if granted.head is not None
            }

    def has_streams(self) -> bool:
        """Return whether it holds any."""
        with self.changed:
            return bool(self._granted)

    # --- what is left of before -------------------------------------------------------------------------------------

    def restore(self, done: Iterable[PlannedRange], started: Iterable[PlannedRange]) -> None:
        """Restore the checkpoint's ranges of this session's earlier processes: those that are `done`, which progress
        may not have passed, and those `started`, which are to be done again. Other planned ranges were never started.
        """
        with self.changed:
            self._done = {planned.stream_id: planned for planned in done}
            self._started = {planned.stream_id: planned for planned in started}
            self._recalled = True
            for granted in self._granted.values():
                self._settle(granted)

    def restart(self, planned: PlannedRange) -> RunnablePlannedRange | None:
        """Return the started range, as it is to be done again; None if its stream is no longer held."""
        with self.changed:
            granted = self._granted.get(planned.stream_id)
            runnable = None if granted is None else granted.to_runnable
            return runnable if runnable is not None and runnable.planned == planned else None

    def drop_started(self, planned: PlannedRange) -> None:
        """Drop a started range that is no longer this session's."""
        with self.changed:
            self._started.pop(planned.stream_id, None)

    def put_off(self, poison: Mapping[PlannedRange, PoisonBlock]) -> None:
        """Take back started ranges with a block that cannot be decoded. What lies before that block may be planned
        anew, once the rows have that.
        """
        with self.changed:
            for planned, problem in poison.items():
                self._started.pop(planned.stream_id, None)
                granted = self._granted.get(planned.stream_id)
                if granted is not None and granted.in_doubt is not None and planned.matches(granted.in_doubt):
                    granted.in_doubt, granted.step, granted.is_plan_saved, granted.poison = None, None, False, problem
                    self._report_progress(granted, planned.cut)

    def hand_back(self) -> None:
        """Give up streams that end before what was planned of them, and those of which all is done that lies before a
        block that cannot be decoded: their group blocks or skips it.
        """
        with self.changed:
            for granted in self._granted.values():
                poison = granted.poison if granted.step_planner is None else None  # else the next step shows it
                at_poison = poison is not None and granted.position >= poison.offsets[0]
                if granted.may_be_planned and (at_poison or granted.beyond_head is not None):
                    self._end(granted)

    def end_unreadable(self, granted: PlannerStream, problem: PositionBeyondHead) -> None:
        """Give up a stream that ends before what was planned or looked at of it, and of which nothing is started."""
        with self.changed:
            if self.is_held(granted):
                granted.beyond_head, granted.in_doubt, granted.is_plan_saved = problem, None, False
                self._end(granted)

    def _end(self, granted: PlannerStream) -> None:
        granted.is_at_end = True
        self._report_progress(granted)

    def _settle(self, granted: PlannerStream) -> None:
        """Settle the range in doubt that came with the grant: it is started again, or done, or nothing of it is in
        doubt.
        """
        left, stream_id = granted.released_in_doubt, granted.grant.stream_id
        if not self._recalled:
            return
        done, started = self._done.get(stream_id), self._started.get(stream_id)
        if done is not None and (left is None or not done.matches(left)):
            done = None
            del self._done[stream_id]
        if left is None:
            return
        granted.released_in_doubt = None
        if started is not None and started.matches(left):
            granted.in_doubt, granted.is_plan_saved = left, True
            return
        if done is not None:
            granted.advance(left.end, left.consumed)
        nothing = InDoubtRange(granted.grant.grant_id, granted.position, granted.position, 0.0)
        self._report_progress(granted, nothing)

    # --- planning ---------------------------------------------------------------------------------------------------

    def plannable_streams(
        self, allowed: Callable[[PlannerStream], bool], targets: Mapping[int, int] | None = None
    ) -> list[PlannerStream]:
        """Return the streams with messages that may be planned by offsets; the one that has waited longest first.
        `targets`: {stream: up to where}, nothing of others; None: all of them to their ends.
        """
        with self.changed:
            for stream_id, granted in self._granted.items():
                granted.plannable_end = granted.head or 0
                if targets is not None:
                    granted.plannable_end = min(granted.plannable_end, targets.get(stream_id, 0))
                if granted.poison is not None:
                    granted.plannable_end = min(granted.plannable_end, granted.poison.offsets[0])
            plannable = [
                granted
                for granted in self._granted.values()
                if granted.step_planner is None
                and granted.may_be_planned
                and granted.plannable_end > granted.position
                and allowed(granted)
            ]
            return sorted(plannable, key=lambda granted: granted.last_planned_turn)

    def plannable_atomic_streams(
        self, allowed: Callable[[PlannerStream], bool]
    ) -> list[tuple[PlannerStream, EpochStepPlanner]]:
        """Return the streams of atomic groups of which something may be planned."""
        with self.changed:
            return [
                (granted, granted.step_planner)
                for granted in self._granted.values()
                if granted.step_planner is not None
                and granted.may_be_planned
                and not granted.is_gone
                and allowed(granted)
            ]

    def is_held(self, granted: PlannerStream) -> bool:
        """Return whether the stream is held under that grant."""
        with self.changed:
            return self._granted.get(granted.grant.stream_id) is granted

    def has_non_atomic(self) -> bool:
        """Return whether there is a stream of a group that is not atomic."""
        with self.changed:
            return any(granted.step_planner is None for granted in self._granted.values())

    def steps_to_restore(self) -> list[tuple[PlannerStream, EpochStepPlanner, ConsumedFrontier]]:
        """Return the streams of atomic groups with a planned range but no step, and the frontier that it is planned
        to.
        """
        with self.changed:
            return [
                (granted, granted.step_planner, granted.in_doubt.consumed)
                for granted in self._granted.values()
                if granted.step_planner is not None
                and granted.step is None
                and not granted.is_gone
                and granted.in_doubt is not None
                and granted.in_doubt.consumed
            ]

    def is_caught_up(self, targets: Mapping[int, int]) -> bool:
        """Return whether all is done before these offsets. `targets`: {stream: up to where}."""
        with self.changed:
            return all(granted.is_caught_up(targets.get(stream_id, 0)) for stream_id, granted in self._granted.items())

    def plan(self, ends: Mapping[int, int]) -> None:
        """Plan up to these offsets, each behind its stream's position; a plan may be started when it is saved."""
        with self.changed:
            self._turn += 1
            for stream_id, end in ends.items():
                granted = self._granted.get(stream_id)
                if granted is None or not granted.may_be_planned or granted.head is None:
                    continue  # it was taken away meanwhile, or granted anew and not looked at yet
                self._plan(granted, InDoubtRange(granted.grant.grant_id, granted.position, end, self._hold_s))

    def plan_steps(self, steps: Mapping[int, EpochStep]) -> None:
        """Plan these steps of streams of atomic groups. A step without messages is done at once."""
        with self.changed:
            for stream_id, step in steps.items():
                granted = self._granted.get(stream_id)
                if granted is None or not granted.may_be_planned or granted.space_id is None:
                    continue
                if granted.poison is not None and step.reads(*granted.poison.offsets):
                    self._end(granted)
                    continue
                if not step.runs:
                    granted.advance(step.position, step.consumed)
                    self._report_progress(granted)
                    continue
                granted.step = step
                grant_id, hold_s = granted.grant.grant_id, self._hold_s
                self._plan(granted, InDoubtRange(grant_id, granted.position, step.position, hold_s, step.consumed))

    def _plan(self, granted: PlannerStream, doubt: InDoubtRange) -> None:
        granted.in_doubt, granted.is_plan_saved, granted.last_planned_turn = doubt, False, self._turn
        self._report_progress(granted)

    def has_unsaved_plan(self) -> bool:
        """Return whether something is planned and not saved yet."""
        with self.changed:
            return any(granted.in_doubt is not None and not granted.is_plan_saved for granted in self._granted.values())

    def take_saved_plans(self) -> list[RunnablePlannedRange]:
        """Return what is planned and saved, by stream, and mark it as started."""
        with self.changed:
            ready = [
                granted.to_runnable for _, granted in sorted(self._granted.items()) if granted.to_runnable is not None
            ]
            self._started.update({runnable.planned.stream_id: runnable.planned for runnable in ready})
            return ready

    def acknowledge(self, done: Iterable[PlannedRange]) -> None:
        """Mark ranges as done for good: reported with what is planned next of their streams, or by `report_progress`. A
        repeated call has no effect.
        """
        with self.changed:
            for planned in done:
                if self._started.get(planned.stream_id) != planned:
                    continue
                del self._started[planned.stream_id]
                self._done[planned.stream_id] = planned
                granted = self._granted.get(planned.stream_id)
                if granted is not None and granted.in_doubt is not None and planned.matches(granted.in_doubt):
                    granted.advance(planned.end, planned.consumed_frontier)
                    granted.in_doubt, granted.step, granted.is_plan_saved = None, None, False
                    self._unreported[planned.stream_id] = granted

    def unsaved_ranges(self) -> tuple[PlannedRange, ...]:
        """Return the ranges that are done and that progress is not known to have passed: a later process must get them,
        or would do them again.
        """
        with self.changed:
            return tuple(self._done.values())

    def drop_done(self, planned: PlannedRange) -> None:
        """Drop a done range that cannot come back with a grant: see `PlannedRangeStatus`."""
        with self.changed:
            if self._done.get(planned.stream_id) == planned:
                del self._done[planned.stream_id]

    def report_progress(self) -> None:
        """Report what was acknowledged and was not reported with a plan."""
        with self.changed:
            for granted in tuple(self._unreported.values()):
                self._report_progress(granted)

    def abandon(self) -> None:
        """Acknowledge nothing more: the final progress of a stream in doubt is where its range begins."""
        with self.changed:
            self._leaving = True
            for granted in self._granted.values():
                if granted.is_stopping:
                    self._report_progress(granted)

    def _report_progress(self, granted: PlannerStream, in_doubt: InDoubtRange | None = None) -> None:
        """Report a stream's progress: finally once nothing more will be planned, and nothing is in doubt or will be
        decided.
        """
        self._unreported.pop(granted.grant.stream_id, None)
        grant, final = granted.grant, granted.is_ending and (granted.is_idle or self._leaving)
        lag = None if granted.head is None else max(granted.head - granted.position, 0)
        doubt = in_doubt or granted.in_doubt
        consumed = None if granted.step_planner is None else granted.step_planner.consumed
        progress = ProgressReported(
            grant.stream_id, grant.grant_id, granted.position, final, lag=lag, consumed=consumed, in_doubt=doubt
        )
        problem = (granted.beyond_head or granted.poison) if granted.is_at_end else None
        self._report(progress if problem is None else with_final_error(progress, problem))

    def _find_granted(self, stream_id: int, grant_id: int) -> PlannerStream | None:
        granted = self._granted.get(stream_id)
        return granted if granted is not None and granted.grant.grant_id == grant_id else None
