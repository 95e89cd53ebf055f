"""Bounds what is stored or under way for each caller, and for all together."""

from __future__ import annotations

from collections import Counter


class CallerCountLimit:
    """Counts up to `of_caller` for one caller and `in_all` for all; where it `keeps_rest_free`, for one caller also no
    more than is then left free for others. Every call is O(1)."""

    def __init__(self, of_caller: int, in_all: int, *, keeps_rest_free: bool = False) -> None:
        self._of_caller, self._in_all, self._keeps_rest_free = of_caller, in_all, keeps_rest_free
        self._counts: Counter[str] = Counter()
        self.total = self.refused = 0

    def add(self, caller: str, count: int = 1) -> bool:
        """Add `count` to what the caller has. Return False, and add nothing, if that is over a bound."""
        own, free = self._counts[caller] + count, self._in_all - self.total - count
        if own > self._of_caller or free < (own if self._keeps_rest_free else 0):
            self.refused += 1
            self.remove(caller, 0)
            return False
        self._counts[caller] += count
        self.total += count
        return True

    def remove(self, caller: str, count: int = 1) -> None:
        """Remove what was added."""
        self.total -= count
        self._counts[caller] -= count
        if not self._counts[caller]:
            del self._counts[caller]
