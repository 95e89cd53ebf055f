"""Limits a node's concurrent feed requests; rejects the rest with a time to retry."""

from __future__ import annotations

import threading
from collections import Counter

from sublet_protocol.domain.errors import Unavailable


class NodeBusy(Unavailable):
    """Raised when the node is at its limit of concurrent requests."""

    def __init__(self, reason: str, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(f"the node is busy: {reason}. Try again in {retry_after_ms} ms, or another node.")


class AdmissionLimiter:
    """Limits the concurrent requests and their bytes, and the requests of one principal. Thread-safe."""

    def __init__(
        self, request_kind: str, requests: int, size: int, retry_after_ms: int, of_principal: int | None = None
    ) -> None:
        self._request_kind, self._retry_after_ms = request_kind, retry_after_ms
        self._requests, self._size, self._of_principal = requests, size, of_principal or requests
        self._by_principal: Counter[str | None] = Counter()
        self._lock = threading.Lock()
        self.inside = self.bytes_inside = 0

    def acquire(self, size: int = 0, principal: str | None = None) -> None:
        """Admit a request of `size` bytes, for which the caller then calls `release` once. Raise `NodeBusy` if there
        is no room. `principal` None: no one's."""
        with self._lock:
            if self.inside >= self._requests or self.bytes_inside + size > self._size:
                room = f"{self.inside} {self._request_kind} of {self.bytes_inside} bytes are under way"
                raise NodeBusy(f"{room}, and the limits are {self._requests} and {self._size}", self._retry_after_ms)
            if principal is not None and self._by_principal[principal] >= self._of_principal:
                room = f"{self._of_principal} {self._request_kind} of {principal} are under way"
                raise NodeBusy(f"{room}, which is the limit of a principal", self._retry_after_ms)
            self.inside += 1
            self.bytes_inside += size
            self._by_principal[principal] += 1

    def release(self, size: int = 0, principal: str | None = None) -> None:
        """End an admitted request of `size` bytes."""
        with self._lock:
            self.inside -= 1
            self.bytes_inside -= size
            self._by_principal[principal] -= 1
            if not self._by_principal[principal]:
                del self._by_principal[principal]
