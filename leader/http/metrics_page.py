"""`/metrics`: the registry as text, made anew at most once a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from leader.http.request import Request
from leader.http.response import Response

FRESH_S = 1.0


class MetricsPage:
    """Thread-safe: whoever comes while it is being made waits for that."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._turn = threading.Lock()
        self._made: dict[str, tuple[float, bytes]] = {}

    def __call__(self, request: Request) -> Response:
        """In the format that was asked for: Prometheus' text, or OpenMetrics."""
        encode, content_type = choose_encoder(request.accept)
        with self._turn:
            made_at, text = self._made.get(content_type, (float("-inf"), b""))
            if self._clock() - made_at >= FRESH_S:
                text = encode(self._registry)
                self._made[content_type] = self._clock(), text
        return Response(200, text, content_type)
