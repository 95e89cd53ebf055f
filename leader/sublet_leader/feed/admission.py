"""Limits a node's concurrent feed requests; rejects the rest with a time to retry."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
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
            free, own = self._requests - self.inside, self._by_principal[principal]
            is_limited = principal is not None and own > 0
            if free < 1 or (is_limited and own >= free):
                self._refuse(principal, size)
            self._add_bytes(size, principal, is_limited)
            self.inside += 1
            self._by_principal[principal] += 1

    def _add_bytes(self, size: int, principal: str | None, is_limited: bool) -> None:
        free, own = self._size - self.bytes_inside - size, self._bytes_by_principal[principal] + size
        if size > 0 and (free < 0 or (is_limited and own > free)):
            self._refuse(principal, size)
        self.bytes_inside += size
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
    def admit(self, size: int = 0, principal: str | None = None) -> Iterator[Callable[[int], None]]:
        """Admit a request of `size` bytes for as long as the block lasts; yield what changes its size. Both raise as
        `acquire` does."""
        self.acquire(size, principal)
        admitted = size

        def resize(to: int) -> None:
            nonlocal admitted
            with self._lock:
                self._add_bytes(to - admitted, principal, principal is not None and self._by_principal[principal] > 1)
            admitted = to

        try:
            yield resize
        finally:
            self.release(admitted, principal)

    def _refuse(self, principal: str | None, size: int) -> NoReturn:
        own, own_bytes = self._by_principal[principal], self._bytes_by_principal[principal]
        free, free_bytes = self._requests - self.inside, self._size - self.bytes_inside
        inside, bytes_inside, where = self.inside, self.bytes_inside, "under way"
        max_inside, max_bytes = self._requests, self._size
        if principal is not None and free > 0 and size <= free_bytes:
            inside, bytes_inside, where = own, own_bytes, f"under way of {principal}"
            max_inside, max_bytes = (free + own) // 2, (free_bytes + own_bytes) // 2
        text = f"{inside} {self._request_kind} are {where}"
        if self._size:
            text += f", and with this one {bytes_inside + size} bytes; the limits are {max_inside} and {max_bytes}"
        else:
            text += f"; the limit is {max_inside}"
        raise NodeBusy(text, self._retry_after_ms)
