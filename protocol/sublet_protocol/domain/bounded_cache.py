"""A cache of results by text, bounded by bytes, since texts of peers may be long."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from sublet_protocol.domain.limits import MAX_CACHED_BYTES

_V = TypeVar("_V")


class BoundedCache(Generic[_V]):
    """A cache of the results of `compute` by text; the one used longest ago is dropped first. Thread-safe. Exceptions
    of `compute` are not cached.
    """

    def __init__(self, compute: Callable[[str], _V], max_entries: int, max_bytes: int = MAX_CACHED_BYTES) -> None:
        self._compute, self._max_entries, self._max_bytes = compute, max_entries, max_bytes
        self._lock = threading.Lock()
        self._results: OrderedDict[str, _V] = OrderedDict()
        self.size_bytes = 0

    def __len__(self) -> int:
        return len(self._results)

    def get(self, text: str) -> _V:
        """Return the result for the text."""
        with self._lock:
            if text in self._results:
                self._results.move_to_end(text)
                return self._results[text]
        result = self._compute(text)
        with self._lock:
            if text not in self._results:
                self._results[text] = result
                self.size_bytes += _count_bytes(text)
            while len(self._results) > self._max_entries or self.size_bytes > self._max_bytes:
                self.size_bytes -= _count_bytes(self._results.popitem(last=False)[0])
        return result


def _count_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))
