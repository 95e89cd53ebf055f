"""A session that plans ahead in groups that are atomic: what its streams have of epochs, and what of them it plans."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from sublet_borrower.fetch.database import Reader
from sublet_borrower.planner.atomic_plans import first_completed, steps
from sublet_borrower.planner.micro_batch import Lent, Most
from sublet_borrower.planner.plan_ledger import Planning
from sublet_protocol.domain.epochs import LowerFrontier
from sublet_protocol.messages.messages import Grant
from sublet_storage.readers import epoch_steps
from sublet_storage.readers.epoch_steps import Marks, Step, WholeEpochs

TOGETHER_S = 0.25
"""Streams that come within this time of one another have their epochs in the same batch."""
ONE_EPOCH = Most(messages=1)
"""As few as there are, where a stream has a block that cannot be decoded: up to before the epoch that is in it."""
COMPLETED_S = 0.1
"""Between two looks at whether epochs are completed that streams have messages of."""


class EpochPlanner:
    """Looks at the streams of a `Planning` through a reader. `spaces`: {stream: the name of its space} of these."""

    def __init__(
        self, planning: Planning, reader: Reader, spaces: Callable[[Iterable[int]], Mapping[int, str]]
    ) -> None:
        self._planning, self._reader, self._spaces = planning, reader, spaces
        self._completed_at = float("-inf")
        self._last: dict[str, LowerFrontier] = {}

    def steps(self, most: Most, allowed: Callable[[Lent], bool], *, finite: bool) -> dict[int, Step]:
        """Of groups that are atomic, {stream: its step}: as many whole epochs as are allowed, space by space."""
        found: dict[str, dict[int, WholeEpochs]] = {}
        if time.monotonic() < self._planning.moved_at + TOGETHER_S:
            return {}
        lent = self._planning.idle_whole(allowed)
        spaces = self._spaces([one.grant.stream_id for one, _ in lent])
        for one, whole in self._worth_a_look(lent):
            if not self._known(one.grant, whole, one.head or 0):
                return {}  # the database is away
        for one, whole in lent:
            found.setdefault(spaces[one.grant.stream_id], {})[one.grant.stream_id] = whole
        planned: dict[int, Step] = {}
        cautious = {spaces[one.grant.stream_id] for one, _ in lent if one.poison is not None}
        for space, streams in found.items():
            planned |= steps(streams, ONE_EPOCH if space in cautious else most, self._last.get(space))
            if finite and space not in self._last and (completed := first_completed(streams)) is not None:
                self._last[space] = completed
        return planned

    def _worth_a_look(self, lent: list[tuple[Lent, WholeEpochs]]) -> list[tuple[Lent, WholeEpochs]]:
        """Those that go on, and those that wait for epochs to be completed, of which there may be news."""
        waiting = [one.grant.stream_id for one, whole in lent if whole.is_waiting]
        completed: Mapping[int, Marks] = {}
        if waiting and time.monotonic() >= self._completed_at:
            self._completed_at = time.monotonic() + COMPLETED_S
            completed = self._reader.completed(waiting)
        return [
            (one, whole)
            for one, whole in lent
            if (one.head or 0) > whole.scanned
            or (one.grant.stream_id in completed and completed[one.grant.stream_id].lower != whole.lower)
        ]

    def prepare(self) -> None:
        """Find the steps of what was planned under earlier grants: with the same messages, wherever blocks end now."""
        for lent, whole, consumed in self._planning.unprepared():
            if self._known(lent.grant, whole, consumed.upto):
                lent.step = whole.step_to(consumed.upto, consumed.lower)

    def _known(self, grant: Grant, whole: WholeEpochs, upto: int) -> bool:
        """Look at a stream's blocks up to its head, and at least up to there; False while the database is away."""
        while True:
            marks = self._reader.ask(
                lambda connection: epoch_steps.marks(connection, grant.stream_id, grant.generation_id, whole.scanned)
            )
            if marks is None:
                return False
            whole.note(marks)
            self._planning.note_heads([(grant.stream_id, marks.head)])
            if whole.scanned >= max(upto, marks.head):
                return True
