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
        try:
            encode, content_type = choose_encoder(request.accept)
        except (TypeError, ValueError):  # a version that is none
            encode, content_type = choose_encoder("")
        with self._turn:
            now = self._clock()
            # Who asks names the version: what is kept must not grow with every other one.
            self._made = {kind: made for kind, made in self._made.items() if now - made[0] < FRESH_S}
            if content_type not in self._made:
                text = encode(self._registry)
                self._made[content_type] = self._clock(), text
            return Response(200, self._made[content_type][1], content_type)
