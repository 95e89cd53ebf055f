"""What users wrote in their own transactions: each message once, and none passed over (E25, E35)."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import TYPE_CHECKING

from tests.simulation.checkers.deliveries import Deliveries
from tests.simulation.checkers.lives import Key, Violation

if TYPE_CHECKING:
    from tests.simulation.work import Work


class Transactions:
    """Of each stream that was written so, the offsets that are in users' output."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._stored: dict[Key, set[int]] = {}
        self.stored = 0

    def saved(self) -> dict[Key, set[int]]:
        return deepcopy(self._stored)

    def failed_over(self, saved: dict[Key, set[int]]) -> None:
        """What was written since is lost."""
        self._stored = saved

    def was_reset(self, at: Key, position: int) -> None:
        """An operator wants what follows again."""
        self._stored[at] = {offset for offset in self._stored.get(at, ()) if offset < position}

    def committed(
        self, advances: Sequence[tuple[int, int, int, int]], stored: Sequence[tuple[int, int, range]]
    ) -> None:
        """A transaction was, with what it wrote."""
        for group_id, stream_id, offsets in stored:
            had = self._stored.setdefault((group_id, stream_id), set())
            if twice := had.intersection(offsets):
                raise Violation(f"{group_id, stream_id}: {sorted(twice)} are written twice, by {advances}, {stored}")
            had.update(offsets)
            self.stored += len(offsets)
        for group_id, stream_id, _, position in advances:
            self._check((group_id, stream_id), position, f"progress to {position} is committed with {stored}")
            self._deliveries.written((group_id, stream_id), position)

    def reported(self, work: Work) -> None:
        """A session says that everything before its position is done."""
        if not self._deliveries.is_over(work):
            self._check((work.group_id, work.stream_id), work.position, work)

    def _check(self, at: Key, position: int, what: object) -> None:
        had, begin = self._stored.get(at, set()), self._deliveries.consumed(*at)
        if left_out := [offset for offset in range(begin, position) if offset not in had]:
            raise Violation(f"{what}, but {left_out} of {at} were never written")
