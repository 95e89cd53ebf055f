"""The streams a session holds: what is read and acknowledged, and which is read next.

Plain bookkeeping, no I/O. A stream may have batches outstanding: given out and not acknowledged. Progress stops before
the first of them, even if later ones are acknowledged, and final progress can only be reported when there is none, or
when they are given up: then it has the range that may be delivered again.

The agent's updates are applied on the agent's thread, at once: while the session's own thread works on a batch, its
other streams come and go; and other threads may leave, or acknowledge. A change by one thread is never seen in part by
another.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, assert_never

from sublet_borrower.machine.events import (
    AssignmentUpdate,
    GroupFrontiersAdvanced,
    ProgressReported,
    RevokeStarted,
    SavedProgress,
    StreamGranted,
    StreamRemoved,
)
from sublet_borrower.streams.complete_epoch_stream import CompleteEpochStream
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_borrower.util.interrupted_lock_release import release_fully
from sublet_protocol.domain.epoch_frontiers import GroupFrontier, have_same_dimensions
from sublet_protocol.domain.errors import PoisonBlock, PositionBeyondHead
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import Grant, GrantEndOutcome
from sublet_storage.readers.epoch_steps import BlockEpochSummaries, EpochStepPlanner


class SessionAssignment:
    """The assignment of one session. `apply_update` is for the agent's thread, the rest for the session's; `report`,
    `abort_steps`, `mark_acknowledged`, `mark_progress` and `abandon_outstanding` for any.

    `epochs`: {space id: how far its group has come}, where that is atomic. `came_back` is called with each
    acknowledgement.
    """

    def __init__(self, report: Callable[[ProgressReported], None]) -> None:
        self._report = report
        self.came_back: Callable[[], None] = lambda: None
        self.epochs: dict[int, GroupFrontier] = {}
        self._lock = threading.RLock()
        self._granted: dict[int, GrantedStream] = {}
        self._turn: deque[int] = deque()
        self._new_count = 0  # of the streams first in turn: those that were granted, and not looked at yet
        self._again_at = math.inf

    def apply_update(self, update: AssignmentUpdate) -> None:
        """Apply an update of the agent."""
        with self._lock:
            match update:
                case StreamGranted(grant):
                    self._install(grant)
                case RevokeStarted(stream_id, grant_id):
                    granted = self._find_granted(stream_id, grant_id)
                    if granted is not None:
                        granted.is_stopping = True
                        if granted.is_handed_back:
                            self._report(granted.to_progress())
                case StreamRemoved(stream_id, grant_id, reason):
                    if self._find_granted(stream_id, grant_id) is not None:
                        self._remove(stream_id, reason)
                case GroupFrontiersAdvanced(epochs):
                    self._note_epochs(epochs)
                case SavedProgress():
                    pass
                case _:
                    assert_never(update)

    def next_readable(self, allowed: Callable[[GrantedStream], bool]) -> GrantedStream | None:
        """Return the next stream worth reading, each in its turn; it is being read until `GrantedStream.advance_read`
        or `release_read`."""
        with self._lock:
            for _ in range(len(self._turn)):
                granted = self._granted[self._turn[0]]
                self._new_count = max(0, self._new_count - 1)
                self._turn.rotate(-1)  # at once: an exception here must not leave a stream out
                if granted.may_have_more and allowed(granted):
                    granted.is_reading = True
                    return granted
        return None

    def defer(self, granted: GrantedStream, problem: Exception, now: float, after_s: float) -> bool:
        """Read the stream again only after `after_s`, and report the error to its leader; return whether no stream had
        that error before."""
        with self._lock:
            granted.is_unreadable, granted.retry_at = True, now + after_s
            self._again_at = min(self._again_at, granted.retry_at)
            is_first = str(problem) not in self.read_errors()
            if granted.read_failure.record(problem, now):
                self.report(granted)
            return is_first

    def end_unreadable(self, granted: GrantedStream, problem: PoisonBlock | PositionBeyondHead) -> bool:
        """Hand the stream back when all before is done, as no session can read on; return whether this is new. Of an
        atomic group all entire epochs before it are read first."""
        with self._lock:
            if isinstance(granted, CompleteEpochStream):
                if isinstance(problem, PoisonBlock) and granted.restart_in_smallest_steps():
                    return False
                granted.abort_step()
            is_first, granted.is_unreadable, granted.retry_at = granted.final_error is None, True, None
            granted.final_error = problem
            return is_first

    def mark_readable(self, granted: GrantedStream) -> bool:
        """Note that the stream could be read; return whether it could not be before, which is reported to its
        leader."""
        with self._lock:
            if not granted.read_failure.current_error:
                return False
            if granted.read_failure.clear():
                self.report(granted)
            return True

    def retry_deferred(self, now: float) -> None:
        """Make streams readable again whose `retry_at` has come."""
        if now < self._again_at:
            return
        with self._lock:
            for granted in self._granted.values():
                if granted.retry_at is not None and granted.retry_at <= now:
                    granted.is_unreadable, granted.retry_at = False, None
            waiting = (granted.retry_at for granted in self._granted.values() if granted.retry_at is not None)
            self._again_at = min(waiting, default=math.inf)

    def read_errors(self) -> set[str]:
        """Return the read errors of streams that are tried again."""
        with self._lock:
            return {
                granted.read_failure.current_error
                for granted in self._granted.values()
                if granted.read_failure.current_error
            }

    def caught_up_streams(self) -> dict[int, tuple[int, int]]:
        """Return {stream: (grant id, head)} of those read to where they ended when last looked at."""
        with self._lock:
            return {
                stream_id: (granted.grant_id, granted.next_read_offset)
                for stream_id, granted in self._granted.items()
                if not (granted.is_stopping or granted.is_unreadable or granted.may_have_more)
            }

    def has_non_atomic(self) -> bool:
        """Return whether there is a stream of a group that is not atomic."""
        with self._lock:
            return any(not isinstance(granted, CompleteEpochStream) for granted in self._granted.values())

    def streams_waiting_for_epochs(self) -> list[CompleteEpochStream]:
        """Return the streams with messages of epochs that are not completed."""
        with self._lock:
            return [
                granted
                for granted in self._granted.values()
                if isinstance(granted, CompleteEpochStream) and granted.is_waiting
            ]

    def update_frontiers(self, summaries: Mapping[int, BlockEpochSummaries]) -> None:
        """Mark the waiting streams in whose spaces more is completed, from summaries that have what is completed."""
        with self._lock:
            for granted in self.streams_waiting_for_epochs():
                if granted.stream_id in summaries and summaries[granted.stream_id].lower != granted.step_planner.lower:
                    granted.has_new_frontier = True

    @property
    def is_mid_step(self) -> bool:
        """Return whether some epochs are given out in part."""
        with self._lock:
            return any(
                isinstance(granted, CompleteEpochStream) and granted.is_mid_step for granted in self._granted.values()
            )

    def abort_steps(self) -> None:
        """Abort all steps: nothing more is read of epochs that are given out in part."""
        with self._lock:
            for granted in self._granted.values():
                if isinstance(granted, CompleteEpochStream):
                    granted.abort_step()

    def report(self, granted: GrantedStream) -> None:
        """Report the stream's progress, as it may have moved on."""
        with self._lock:
            if not granted.is_ended:
                self._report(granted.to_progress())

    def update_heads(self, heads: Iterable[tuple[int, int]]) -> None:
        """Set heads, (stream, head), as read from the log. A head before what was read of the stream makes it be read,
        which then raises."""
        with self._lock:
            for stream_id, head in heads:
                granted = self._granted.get(stream_id)
                if granted is not None:
                    granted.head, granted.head_hint = (
                        None
                        if head < granted.next_read_offset and not granted.is_reading
                        else max(head, granted.next_read_offset),
                        0,
                    )

    def hint_heads(self, heads: Iterable[tuple[int, int]]) -> None:
        """Set heads, (stream, head), that are unverified."""
        with self._lock:
            for stream_id, head in heads:
                granted = self._granted.get(stream_id)
                if granted is not None:
                    granted.head_hint = head

    def release_read(self, granted: GrantedStream) -> None:
        """Note that the stream is no longer being read."""
        with self._lock:
            granted.is_reading = False
            if granted.is_handed_back and not granted.is_ended:
                self._report(granted.to_progress())

    def go_back(self, granted: GrantedStream, read_state: tuple[Any, ...]) -> None:
        """Go back to that place: what was taken since was not given to the user."""
        with self._lock:
            if not granted.is_ended:
                granted.go_back(read_state)

    def recover_read(self) -> None:
        """Recover from an interrupted read: nothing is being read, and heads are to be read again."""
        release_fully(self._lock.release)
        with self._lock:
            for granted in tuple(self._granted.values()):
                granted.head = None
                self.release_read(granted)

    def mark_skipped(self, granted: GrantedStream, ticket: int) -> None:
        """Note that what was taken under that ticket has nothing for this subscription."""
        with self._lock:
            is_first = granted.mark_done(ticket)
            if is_first and not (granted.outstanding or granted.is_ended):
                self._report(granted.to_progress())

    def mark_delivered(self, granted: GrantedStream, size: int) -> None:
        """Note that what was taken last, of `size` bytes, is a batch given to the user."""
        with self._lock:
            granted.size += size

    def mark_acknowledged(self, granted: GrantedStream, ticket: int) -> None:
        """Mark the batch as done."""
        self.came_back()
        with self._lock:
            granted.mark_done(ticket)
            self.report(granted)

    def mark_progress(self, granted: GrantedStream, ticket: int, position: int) -> None:
        """Mark the batch as done up to `position`, and still outstanding."""
        self.came_back()
        with self._lock:
            if ticket in granted.outstanding:  # else a transaction of an unknown outcome was committed
                granted.mark_done_upto(ticket, position)
                self.report(granted)

    def abandon_outstanding(self) -> None:
        """Note that nothing outstanding will be acknowledged any more."""
        with self._lock:
            for granted in self._granted.values():
                awaited, granted.is_abandoned = granted.is_ending and not granted.is_quiescent, True
                if awaited:
                    self._report(granted.to_progress())

    def lose(self, stream_id: int, grant_id: int) -> None:
        """Drop a grant that the database reports to be over. Its leader is notified that nothing more comes."""
        with self._lock:
            granted = self._find_granted(stream_id, grant_id)
            if granted is not None:
                granted.is_stopping = granted.is_abandoned = True
                self._report(granted.to_progress())
                self._remove(stream_id, GrantEndOutcome.LOST)

    def abandon(self) -> str:
        """Drop all streams. Return a description of what was given out of them and not acknowledged."""
        with self._lock:
            unacknowledged = [
                f"stream {s} from offset {granted.acknowledged_offset}"
                for s, granted in self._granted.items()
                if granted.outstanding
            ]
            for stream_id in tuple(self._granted):
                self._remove(stream_id, GrantEndOutcome.LOST)
            return ", ".join(unacknowledged)

    def lags(self) -> dict[int, int]:
        """Return {stream: messages that were left when it was last looked at}, of those that were."""
        with self._lock:
            lags = {stream_id: granted.to_progress().lag for stream_id, granted in self._granted.items()}
        return {stream_id: lag for stream_id, lag in lags.items() if lag is not None}

    def positions(self) -> dict[int, int]:
        """Return {stream: next offset to deliver} of everything held and not handed back; from any thread."""
        held = tuple(self._granted.items())
        return {s: granted.acknowledged_offset for s, granted in held if not granted.is_handed_back}

    def _install(self, grant: Grant) -> None:
        self._remove(grant.stream_id, GrantEndOutcome.LOST)
        facts = (grant.stream_id, grant.grant_id, grant.generation_id, TopicFilter.parse(grant.filter), grant.position)
        if grant.consumed is None:
            self._granted[grant.stream_id] = GrantedStream(*facts, grant_key=grant.grant_key, assignment=self)
        else:
            self._granted[grant.stream_id] = CompleteEpochStream(
                *facts,
                grant_key=grant.grant_key,
                assignment=self,
                step_planner=EpochStepPlanner(grant.position, grant.consumed),
                lock=self._lock,
            )
        self._turn.insert(self._new_count, grant.stream_id)  # its first messages come before more of the others
        self._new_count += 1

    def _note_epochs(self, epochs: tuple[GroupFrontier, ...]) -> None:
        """Record the groups' progress, and mark the streams for which more may be completed."""
        for frontier in epochs:
            known = self.epochs.get(frontier.space_id)
            if known is None or frontier.lower != known.lower:
                for granted in self.streams_waiting_for_epochs():
                    granted.has_new_frontier = True
            # A failover may have lost the space of that id, which then belongs to another, or its first epochs.
            if (
                known is None
                or known.space != frontier.space
                or not have_same_dimensions(known.consumed, frontier.consumed)
                or known.consumed.is_at_or_before(frontier.consumed)
            ):
                self.epochs[frontier.space_id] = frontier

    def _find_granted(self, stream_id: int, grant_id: int) -> GrantedStream | None:
        granted = self._granted.get(stream_id)
        return granted if granted is not None and granted.grant_id == grant_id else None

    def _remove(self, stream_id: int, reason: GrantEndOutcome) -> None:
        granted = self._granted.pop(stream_id, None)
        if granted is not None:
            granted.is_ended, granted.is_lost = True, reason is GrantEndOutcome.LOST
            self._new_count -= self._turn.index(stream_id) < self._new_count
            self._turn.remove(stream_id)
