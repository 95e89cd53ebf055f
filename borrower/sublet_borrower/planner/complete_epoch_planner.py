"""The planner of whole epochs, for the streams of a session in atomic groups."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeAlias

from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.planner.common_epoch_end import meet_completed, plan_steps
from sublet_borrower.planner.plan_ledger import MicroBatchPlanLedger
from sublet_borrower.planner.planned_ranges import PlanLimits, PlannerStream
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.errors import NotFound, PositionBeyondHead, PositionGone, TimelineChanged
from sublet_protocol.domain.grant_keys import timeline_number
from sublet_storage.log.fetch import beyond_head_error
from sublet_storage.readers.epoch_steps import EpochStep, EpochStepPlanner

log = logging.getLogger(__name__)

TOGETHER_S = 0.25
"""Streams that come within this time of one another have their epochs in the same batch."""
COMPLETED_S = 0.1
"""Between two checks whether epochs are completed that streams have messages of."""

SpaceKey: TypeAlias = tuple[int, int]
"""A space's id, and the number of the database's timeline: on another one the space of that id may be another."""


class EpochPlanner:
    """Plans steps of whole epochs for the streams of a `MicroBatchPlanLedger`, which it looks at through a reader. What
    keeps it from reading a stream is the stream's: all others are planned."""

    def __init__(self, planning: MicroBatchPlanLedger, reader: DatabaseMessageReader, subscription: str) -> None:
        self._planning, self._reader, self._subscription = planning, reader, subscription
        self._poll_at = float("-inf")
        self._polled: set[PlannerStream] = set()
        self._last: dict[SpaceKey, LowerFrontier | None] = {}

    def plan_steps(
        self, limits: PlanLimits, allowed: Callable[[PlannerStream], bool], *, finite: bool
    ) -> dict[int, EpochStep]:
        """Return {stream: its step} for groups that are atomic: as many whole epochs as are allowed, space by space.
        `finite`: only of what was there and completed when the streams were first looked at.
        """
        if time.monotonic() < self._planning.moved_at + TOGETHER_S:
            return {}
        granted = self._planning.plannable_atomic_streams(allowed)
        if not self._poll_streams([each for each in granted if not finite or each[0].goal is None]):
            return {}  # the database is away
        streams_by_space: dict[SpaceKey, dict[PlannerStream, EpochStepPlanner]] = {}
        for stream, atomic in granted:
            if stream.space_id is not None:
                space = stream.space_id, timeline_number(stream.grant.grant_id)
                streams_by_space.setdefault(space, {})[stream] = atomic
        planned: dict[int, EpochStep] = {}
        for space, streams in streams_by_space.items():
            atomics = {stream.grant.stream_id: atomic for stream, atomic in streams.items()}
            last = self._last.setdefault(space, meet_completed(atomics)) if finite else None
            poison = {each.grant.stream_id: each.poison.offsets for each in streams if each.poison is not None}
            planned |= plan_steps(atomics, limits, last, poison)
            for stream, atomic in streams.items():
                if finite and stream.goal is None:
                    stream.goal = ConsumedFrontier(atomic.scanned, last)
        return planned

    def _poll_streams(self, granted: list[tuple[PlannerStream, EpochStepPlanner]]) -> bool:
        """Look at all streams where one may have new messages: one without messages holds its space's epochs back until
        it is known to have none of them. Return False while the database is away.
        """
        goes_on = any((stream.head or 0) > atomic.scanned or stream not in self._polled for stream, atomic in granted)
        waits = time.monotonic() >= self._poll_at and any(
            atomic.is_waiting or stream.space_id is None for stream, atomic in granted
        )
        if not (goes_on or waits):
            return True
        summaries = self._reader.fetch_frontiers([stream.grant.stream_id for stream, _ in granted])
        if not summaries:
            return False
        for stream, atomic in granted:
            stream_summaries = summaries.get(stream.grant.stream_id)
            # None: it was deleted with its generation
            stream.space_id = None if stream_summaries is None else stream_summaries.space_id
            if stream_summaries is not None:
                atomic.add_summaries(stream_summaries)
                if stream_summaries.head != atomic.scanned and not self._scan(stream, atomic, stream_summaries.head):
                    return False
        self._poll_at = time.monotonic() + COMPLETED_S
        self._polled = {stream for stream, _ in granted}
        return True

    def restore_steps(self) -> None:
        """Find the steps of what was planned under earlier grants: with the same messages, wherever blocks end now."""
        for stream, atomic, consumed in self._planning.steps_to_restore():
            self._scan(stream, atomic, consumed.upto)
            if stream.space_id is not None:
                stream.step = atomic.step_to(consumed.upto, consumed.lower)

    def _scan(self, stream: PlannerStream, atomic: EpochStepPlanner, upto: int) -> bool:
        """Look at a stream's blocks up to its head, and at least up to there; return False while the database is away.
        One that cannot be read on has no `space_id` then: a session that holds such a stream does the same.
        """
        stream.space_id = None
        try:
            return self._scan_blocks(stream, atomic, upto)
        except TimelineChanged:
            pass  # its leader grants it anew
        except PositionBeyondHead as error:
            self._planning.end_unreadable(stream, error)
            text = "stream unreadable, handed back: subscription=%s stream_id=%d: %s"
            log.warning(text, self._subscription, stream.grant.stream_id, error)
        except (PositionGone, NotFound) as error:
            stream.is_gone = True  # its leader sees it, too
            text = "messages gone, stream no longer read: subscription=%s stream_id=%d: %s"
            log.warning(text, self._subscription, stream.grant.stream_id, error)
        return True

    def _scan_blocks(self, stream: PlannerStream, atomic: EpochStepPlanner, upto: int) -> bool:
        grant = stream.grant
        while self._planning.is_held(stream):
            known_end = atomic.scanned
            stream_summaries = self._reader.fetch_summaries_behind(
                grant.stream_id, grant.grant_id, grant.generation_id, atomic.scanned
            )
            if stream_summaries is None:
                return False
            atomic.add_summaries(stream_summaries)
            self._planning.update_heads([(grant.stream_id, stream_summaries.head)])
            if atomic.scanned >= max(upto, stream_summaries.head):
                stream.space_id = stream_summaries.space_id
                return True
            if atomic.scanned == known_end:  # it ends before what was planned of it
                raise beyond_head_error(grant.stream_id, upto, stream_summaries.head)
        return True
