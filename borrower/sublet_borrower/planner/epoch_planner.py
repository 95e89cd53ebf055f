"""The planner of whole epochs, for the streams of a session in atomic groups."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from sublet_borrower.fetch.database_reader import DatabaseReader
from sublet_borrower.planner.epoch_plans import meet_completed, plan_steps
from sublet_borrower.planner.plan_ledger import PlanLedger
from sublet_borrower.planner.planned_ranges import PlanLimits, PlannerStream
from sublet_protocol.domain.epochs import ConsumedFrontier, LowerFrontier
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.readers import epoch_steps
from sublet_storage.readers.epoch_steps import EpochStep, EpochStepPlanner

TOGETHER_S = 0.25
"""Streams that come within this time of one another have their epochs in the same batch."""
ONE_EPOCH = PlanLimits(max_messages=1)
"""One epoch at a time, where a stream has a block that cannot be decoded: up to before the epoch in that block."""
COMPLETED_S = 0.1
"""Between two checks whether epochs are completed that streams have messages of."""


class EpochPlanner:
    """Plans steps of whole epochs for the streams of a `PlanLedger`, which it looks at through a reader. `spaces`:
    returns {stream: the name of its space} of these (stream, grant id).
    """

    def __init__(
        self,
        planning: PlanLedger,
        reader: DatabaseReader,
        spaces: Callable[[Iterable[tuple[int, int]]], Mapping[int, str]],
    ) -> None:
        self._planning, self._reader, self._spaces = planning, reader, spaces
        self._look_at = float("-inf")
        self._looked: set[int] = set()
        self._last: dict[str, LowerFrontier | None] = {}

    def plan_steps(
        self, limits: PlanLimits, allowed: Callable[[PlannerStream], bool], *, finite: bool
    ) -> dict[int, EpochStep]:
        """Return {stream: its step} for groups that are atomic: as many whole epochs as are allowed, space by space.
        `finite`: only of what was there and completed when the streams were first looked at.
        """
        streams_by_space: dict[str, dict[int, EpochStepPlanner]] = {}
        if time.monotonic() < self._planning.moved_at + TOGETHER_S:
            return {}
        granted = self._planning.plannable_atomic_streams(allowed)
        spaces = self._spaces([(stream.grant.stream_id, stream.grant.grant_id) for stream, _ in granted])
        if not self._look([each for each in granted if not finite or each[0].goal is None]):
            return {}  # the database is away
        for stream, atomic in granted:
            streams_by_space.setdefault(spaces[stream.grant.stream_id], {})[stream.grant.stream_id] = atomic
        planned: dict[int, EpochStep] = {}
        cautious = {spaces[stream.grant.stream_id] for stream, _ in granted if stream.poison is not None}
        for space, streams in streams_by_space.items():
            last = self._last.setdefault(space, meet_completed(streams)) if finite else None
            planned |= plan_steps(streams, ONE_EPOCH if space in cautious else limits, last)
        if finite:
            for stream, atomic in granted:
                if stream.goal is None:
                    last = self._last[spaces[stream.grant.stream_id]]
                    stream.goal = ConsumedFrontier(atomic.scanned, last) if atomic.is_waiting else atomic.consumed
        return planned

    def _look(self, granted: list[tuple[PlannerStream, EpochStepPlanner]]) -> bool:
        """Look at all streams where one may have new messages: one without messages holds its space's epochs back until
        it is known to have none of them. Return False while the database is away.
        """
        goes_on = any(
            (stream.head or 0) > atomic.scanned or stream.grant.grant_id not in self._looked
            for stream, atomic in granted
        )
        waits = time.monotonic() >= self._look_at and any(atomic.is_waiting for _, atomic in granted)
        if not (goes_on or waits):
            return True
        summaries = self._reader.fetch_frontiers([stream.grant.stream_id for stream, _ in granted])
        for stream, atomic in granted:
            if stream.grant.stream_id in summaries:
                marks = summaries[stream.grant.stream_id]
                atomic.add_summaries(marks)
                if marks.head > atomic.scanned and not self._known(stream.grant, atomic, marks.head):
                    return False
        if not summaries:
            return False
        self._look_at = time.monotonic() + COMPLETED_S
        self._looked = {stream.grant.grant_id for stream, _ in granted}
        return True

    def restore_steps(self) -> None:
        """Find the steps of what was planned under earlier grants: with the same messages, wherever blocks end now."""
        for granted, atomic, consumed in self._planning.steps_to_restore():
            if self._known(granted.grant, atomic, consumed.upto):
                granted.step = atomic.step_to(consumed.upto, consumed.lower)

    def _known(self, grant: Grant, atomic: EpochStepPlanner, upto: int) -> bool:
        """Look at a stream's blocks up to its head, and at least up to there; return False while the database is
        away.
        """
        while True:
            marks = self._reader.query(
                lambda connection: epoch_steps.read_block_summaries(
                    connection, grant.stream_id, grant.generation_id, atomic.scanned
                )
            )
            if marks is None:
                return False
            atomic.add_summaries(marks)
            self._planning.update_heads([(grant.stream_id, marks.head)])
            if atomic.scanned >= max(upto, marks.head):
                return True
