"""The load of each member, and which has the most room.

A member's **level** is its load per weight. Members are kept in one heap per class of weights (within a class they
differ by less than a factor of two), so that both questions, "who is the lowest" and "who would be the lowest with this
stream", are answered in logarithmic time: the answer is the best of the lowest of each class.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

_LIGHTEST = 1e-6
"""Weights are relative to the greatest; what is less than this counts as this."""

_Entry = tuple[float, float, str, int]
"""(level, -weight, borrower, load); stale once the borrower has another load, or no room by count."""


class MemberLoads:
    """Counts and loads of the members, as they are and as a plan would make them. Every cost is at least 1.

    `bounds`: how many streams each may hold, at least 1. `costs`: of all streams that are to be shared.
    """

    def __init__(
        self,
        weights: Mapping[str, float],
        bounds: Mapping[str, int],
        holdings: Mapping[str, list[int]],
        costs: Mapping[int, int],
    ) -> None:
        greatest = max(weights.values())
        self._weights = {borrower: max(weight / greatest, _LIGHTEST) for borrower, weight in weights.items()}
        self._bounds = bounds
        self.load = {borrower: sum(map(costs.__getitem__, streams)) for borrower, streams in holdings.items()}
        self.count = {borrower: len(streams) for borrower, streams in holdings.items()}
        self.mean = sum(costs.values()) / math.fsum(self._weights.values())
        """The level that all would have if loads could be split."""
        classes: dict[int, list[_Entry]] = {}
        self._heap = {b: classes.setdefault(math.frexp(weight)[1], []) for b, weight in self._weights.items()}
        for borrower, heap in self._heap.items():
            heap.append(self._entry(borrower))
        self._heaps = list(classes.values())
        for heap in self._heaps:
            heapq.heapify(heap)
        self._empty = [(-self._weights[b], b) for b, count in self.count.items() if not count]
        heapq.heapify(self._empty)
        self.idle_count = len(self._empty)
        """How many members hold nothing."""

    def load_of(self, borrower: str, more: int = 0) -> float:
        """Load per weight, with that much more."""
        return (self.load[borrower] + more) / self._weights[borrower]

    def count_surplus(self, borrower: str) -> int:
        """Return how many more it holds than it may; 0 or less: there is room for so many."""
        return self.count[borrower] - self._bounds[borrower]

    def add(self, borrower: str, cost: int) -> None:
        """It gets a stream."""
        self.idle_count -= not self.count[borrower]
        self.load[borrower] += cost
        self.count[borrower] += 1
        self._changed(borrower)

    def remove(self, borrower: str, cost: int) -> None:
        """It loses one of several streams."""
        self.load[borrower] -= cost
        self.count[borrower] -= 1
        self._changed(borrower)

    def find_idle_member(self) -> str | None:
        """Return, of the members that hold nothing, the one with the greatest weight."""
        while self._empty and self.count[self._empty[0][1]]:
            heapq.heappop(self._empty)
        return self._empty[0][1] if self._empty else None

    def add_to_least_loaded(self, cost: int) -> str | None:
        """To the roomiest; who that is. Shorter where all weights are of one class: this is what takes the time."""
        if len(self._heaps) > 1:
            if borrower := self.find_least_loaded(cost):
                self.add(borrower, cost)
            return borrower
        head = self._head(self._heaps[0], None)
        if not head:
            return None
        _, minus, borrower, load = head
        self.idle_count -= not load
        self.load[borrower] = load = load + cost
        self.count[borrower] += 1
        # The entry may be out of room now; then it is thrown away when it is looked at.
        heapq.heapreplace(self._heaps[0], (load / -minus, minus, borrower, load))
        return borrower

    def find_least_loaded(self, cost: int, avoid: str | None = None) -> str | None:
        """Return, of those with room by count, the one whose level would be the lowest with a stream of that cost."""
        if len(self._heaps) == 1:
            head = self._head(self._heaps[0], avoid)
            return head[2] if head else None
        heads = [head for heap in self._heaps if (head := self._head(heap, avoid))]
        fits = [((load + cost) / -minus, minus, borrower) for _, minus, borrower, load in heads]
        return min(fits)[2] if fits else None

    def _head(self, heap: list[_Entry], avoid: str | None) -> _Entry | None:
        """Return the lowest that is not `avoid`; what is stale is thrown away on the way to it."""
        load, count, bounds = self.load, self.count, self._bounds
        while heap:
            _, _, borrower, then = heap[0]
            if load[borrower] != then or count[borrower] >= bounds[borrower]:
                heapq.heappop(heap)
            elif borrower != avoid:
                return heap[0]
            else:
                put_aside = heapq.heappop(heap)
                head = self._head(heap, avoid)
                heapq.heappush(heap, put_aside)
                return head
        return None

    def _entry(self, borrower: str) -> _Entry:
        load, weight = self.load[borrower], self._weights[borrower]
        return load / weight, -weight, borrower, load

    def _changed(self, borrower: str) -> None:
        heap = self._heap[borrower]
        if self.count[borrower] >= self._bounds[borrower]:
            return
        if heap and heap[0][2] == borrower:
            heapq.heapreplace(heap, self._entry(borrower))
        else:
            heapq.heappush(heap, self._entry(borrower))
