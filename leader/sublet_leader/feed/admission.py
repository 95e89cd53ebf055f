"""Limits a node's concurrent feed requests; rejects the rest with a time to retry."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from sublet_protocol.domain.errors import Unavailable


class NodeBusy(Unavailable):
    """Raised when the node is at its limit of concurrent requests."""

    def __init__(self, reason: str, retry_after_ms: int) -> None:
        self.retry_after_ms = retry_after_ms
        super().__init__(f"the node is busy: {reason}. Try again in {retry_after_ms} ms, or another node.")


class AdmissionLimiter:
    """Limits the concurrent requests and their bytes. A principal has at most as much of both as is left free, alone
    half, so that several leave something for the next; and one request where there is room. Thread-safe."""

    def __init__(self, request_kind: str, requests: int, size: int, retry_after_ms: int) -> None:
        self._request_kind, self._retry_after_ms = request_kind, retry_after_ms
        self._requests, self._size = requests, size
        self._by_principal: Counter[str | None] = Counter()
        self._bytes_by_principal: Counter[str | None] = Counter()
        self._lock = threading.Lock()
        self.inside = self.bytes_inside = 0

    def acquire(self, size: int = 0, principal: str | None = None) -> None:
        """Admit a request of `size` bytes, for which the caller then calls `release` once. Raise `NodeBusy` if there
        is no room. `principal` None: no one's."""
        with self._lock:
            free, free_bytes = self._requests - self.inside, self._size - self.bytes_inside
            own, own_bytes = self._by_principal[principal], self._bytes_by_principal[principal] + size
            if free < 1 or size > free_bytes:
                self._refuse(self.inside, self.bytes_inside + size, self._requests, self._size, "under way")
            if principal is not None and own and (own >= free or own_bytes > free_bytes - size):
                max_bytes = (free_bytes + own_bytes - size) // 2
                self._refuse(own, own_bytes, (free + own) // 2, max_bytes, f"under way of {principal}")
            self.inside += 1
            self.bytes_inside += size
            self._by_principal[principal] += 1
            self._bytes_by_principal[principal] += size

    def release(self, size: int = 0, principal: str | None = None) -> None:
        """End an admitted request of `size` bytes."""
        with self._lock:
            self.inside -= 1
            self.bytes_inside -= size
            self._by_principal[principal] -= 1
            self._bytes_by_principal[principal] -= size
            if not self._by_principal[principal]:
                del self._by_principal[principal], self._bytes_by_principal[principal]

    @contextmanager
    def admit(self, size: int = 0, principal: str | None = None) -> Iterator[None]:
        """Admit a request of `size` bytes for as long as the block lasts. Raise as `acquire` does."""
        self.acquire(size, principal)
        try:
            yield
        finally:
            self.release(size, principal)

    def _refuse(self, inside: int, size: int, max_inside: int, max_size: int, where: str) -> NoReturn:
        text = f"{inside} {self._request_kind} are {where}"
        if self._size:
            text += f", and with this one {size} bytes; the limits are {max_inside} and {max_size}"
        else:
            text += f"; the limit is {max_inside}"
        raise NodeBusy(text, self._retry_after_ms)
