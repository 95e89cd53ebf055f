"""The load of each member, and which has the most room.

A member's **level** is its load per weight. Members are kept in one heap per class of weights (within a class they
differ by less than a factor of two), so that both queries, the lowest member and the member that would be the lowest
with a given stream, take logarithmic time: the answer is the best of the lowest of each class.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

_LIGHTEST = 1e-6
"""Weights are relative to the greatest; a lower weight counts as this."""

_Entry = tuple[float, float, str, int]
"""(level, -weight, borrower, load); stale once the borrower has another load, or no room by count."""


class MemberLoads:
    """Counts and loads of the members, as they are and as a plan would make them. Every cost is at least 1.

    `bounds`: maximum number of streams of each member, at least 1. `costs`: of all streams that are to be shared.
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
        """The level that all members would have if loads could be split."""
        classes: dict[int, list[_Entry]] = {}
        self._heap = {b: classes.setdefault(math.frexp(weight)[1], []) for b, weight in self._weights.items()}
        for borrower, heap in self._heap.items():
            heap.append(self._make_entry(borrower))
        self._heaps = list(classes.values())
        for heap in self._heaps:
            heapq.heapify(heap)
        self._empty = [(-self._weights[b], b) for b, count in self.count.items() if not count]
        heapq.heapify(self._empty)
        self.idle_count = len(self._empty)
        """Number of members without a stream."""

    def load_of(self, borrower: str, added_load: int = 0) -> float:
        """Return the member's load per weight, with `added_load` added to the load."""
        return (self.load[borrower] + added_load) / self._weights[borrower]

    def count_surplus(self, borrower: str) -> int:
        """Return by how many streams the member exceeds its bound; 0 or less: it has room for that many more."""
        return self.count[borrower] - self._bounds[borrower]

    def add(self, borrower: str, cost: int) -> None:
        """Add a stream of that cost to the member."""
        self.idle_count -= not self.count[borrower]
        self.load[borrower] += cost
        self.count[borrower] += 1
        self._update_entry(borrower)

    def remove(self, borrower: str, cost: int) -> None:
        """Remove a stream of that cost from a member that has several."""
        self.load[borrower] -= cost
        self.count[borrower] -= 1
        self._update_entry(borrower)

    def find_idle_member(self) -> str | None:
        """Return the member with the greatest weight of those that hold nothing; None if there is none."""
        while self._empty and self.count[self._empty[0][1]]:
            heapq.heappop(self._empty)
        return self._empty[0][1] if self._empty else None

    def add_to_least_loaded(self, cost: int) -> str | None:
        """Add the cost to the member with the most room; return it, None if none has room. Takes a shortcut where all
        weights are of one class, as this is the hot path."""
        if len(self._heaps) > 1:
            if borrower := self.find_least_loaded(cost):
                self.add(borrower, cost)
            return borrower
        head = self._find_lowest_entry(self._heaps[0], None)
        if not head:
            return None
        _, minus, borrower, load = head
        self.idle_count -= not load
        self.load[borrower] = load = load + cost
        self.count[borrower] += 1
        # The entry may be out of room now; then it is dropped when it is next read.
        heapq.heapreplace(self._heaps[0], (load / -minus, minus, borrower, load))
        return borrower

    def find_least_loaded(self, cost: int, avoid: str | None = None) -> str | None:
        """Return the member with room by count that would have the lowest level with a stream of that cost."""
        heads = [head for heap in self._heaps if (head := self._find_lowest_entry(heap, avoid))]
        fits = [((load + cost) / -minus, minus, borrower) for _, minus, borrower, load in heads]
        return min(fits)[2] if fits else None

    def _find_lowest_entry(self, heap: list[_Entry], avoid: str | None) -> _Entry | None:
        """Return the lowest entry that is not `avoid`'s, and drop stale entries before it."""
        load, count, bounds = self.load, self.count, self._bounds
        while heap:
            _, _, borrower, entry_load = heap[0]
            if load[borrower] != entry_load or count[borrower] >= bounds[borrower]:
                heapq.heappop(heap)
            elif borrower != avoid:
                return heap[0]
            else:
                put_aside = heapq.heappop(heap)
                head = self._find_lowest_entry(heap, avoid)
                heapq.heappush(heap, put_aside)
                return head
        return None

    def _make_entry(self, borrower: str) -> _Entry:
        load, weight = self.load[borrower], self._weights[borrower]
        return load / weight, -weight, borrower, load

    def _update_entry(self, borrower: str) -> None:
        heap = self._heap[borrower]
        if heap and heap[0][2] == borrower:
            heapq.heapreplace(heap, self._make_entry(borrower))
        else:
            heapq.heappush(heap, self._make_entry(borrower))
