"""Limits a node's concurrent feed requests; rejects the rest with a time to retry."""

from __future__ import annotations

import threading

from sublet_protocol.domain.errors import Unavailable


class NodeBusy(Unavailable):
    """Raised when the node is at its limit of concurrent requests."""

    def __init__(self, reason: str, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(f"the node is busy: {reason}. Try again in {retry_after_ms} ms, or another node.")


class AdmissionLimiter:
    """Limits the concurrent requests and their bytes. Thread-safe."""

    def __init__(self, request_kind: str, requests: int, size: int, retry_after_ms: int) -> None:
        self._request_kind, self._retry_after_ms = request_kind, retry_after_ms
        self._requests, self._size = requests, size
        self._lock = threading.Lock()
        self.inside = self.bytes_inside = 0

    def acquire(self, size: int = 0) -> None:
        """Admit a request of `size` bytes, for which the caller then calls `release` once. Raises `NodeBusy` if there
        is no room."""
        with self._lock:
            if self.inside >= self._requests or self.bytes_inside + size > self._size:
                room = f"{self.inside} {self._request_kind} of {self.bytes_inside} bytes are under way"
                raise NodeBusy(f"{room}, and the limits are {self._requests} and {self._size}", self._retry_after_ms)
            self.inside += 1
            self.bytes_inside += size

    def release(self, size: int = 0) -> None:
        """End an admitted request of `size` bytes."""
        with self._lock:
            self.inside -= 1
            self.bytes_inside -= size
