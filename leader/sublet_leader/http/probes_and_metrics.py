"""Probes and metrics: health and readiness, and metrics rendered at most once a second."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response

from sublet_leader.http.responses import json_response
from sublet_leader.observe.health import CHECKS, Health, HealthCheck
from sublet_protocol.domain.errors import NotFound


class HealthProbes:
    """The probe endpoints. `get_health` works from memory, so these need no thread; `node` is its name. `is_brief`:
    unauthenticated callers may read them, so they return one word."""

    def __init__(self, node: str, get_health: Callable[[], Health], is_brief: bool = False) -> None:
        self._node, self._get_health, self._is_brief = node, get_health, is_brief

    async def answer_live(self, request: Request) -> Response:
        """Return 200 as long as the process can work; other problems are reported, and no reason to restart."""
        health = self._get_health()
        return json_response(self._to_json(health), 200 if health.is_alive else 503)

    async def answer_ready(self, request: Request) -> Response:
        """Return 200 if this node can serve; a group without a leader is reported, and is not this node's failure."""
        health = self._get_health()
        return json_response(self._to_json(health), 200 if health.is_ready else 503)

    async def answer_check(self, request: Request) -> Response:
        """Return 200 if that one check is ok. Raise `NotFound`."""
        name = request.path_params["name"]
        if name not in CHECKS:
            raise NotFound(f"there is no check {name[:40]!r}: there are {', '.join(CHECKS)}.")
        check = self._get_health().check_named(name)
        fields = {"state": check.state} if self._is_brief else {"node": self._node, **check_to_json(check)}
        return json_response(fields, 200 if check.is_ok else 503)

    def _to_json(self, health: Health) -> dict[str, object]:
        worst = health.worst_check
        if self._is_brief:
            return {"state": worst.state}
        return {
            "node": self._node,
            "state": worst.state,
            "detail": worst.detail,
            "alive": health.is_alive,
            "ready": health.is_ready,
            "checks": [check_to_json(check) for check in health.checks],
        }


def check_to_json(check: HealthCheck) -> dict[str, object]:
    """Return a check as JSON."""
    return {"name": check.name, "state": check.state, "detail": check.detail, "required": check.is_required}


FRESH_S = 1.0


class MetricsPage:
    """Renders the metrics. Thread-safe: concurrent requests share one rendering."""

    def __init__(self, registry: CollectorRegistry, clock: Callable[[], float] = time.monotonic) -> None:
        self._registry, self._clock = registry, clock
        self._turn = threading.Lock()
        self._renderings: dict[str, tuple[float, bytes]] = {}

    def render(self, request: Request) -> Response:
        """Return the metrics in the requested format: Prometheus text, or OpenMetrics."""
        try:
            encode, content_type = choose_encoder(request.headers.get("Accept", ""))
        except (TypeError, ValueError):  # an invalid version
            encode, content_type = choose_encoder("")
        with self._turn:
            now = self._clock()
            # The client chooses the version: what is cached must not grow with every other one.
            self._renderings = {
                kind: rendering for kind, rendering in self._renderings.items() if now - rendering[0] < FRESH_S
            }
            if content_type not in self._renderings:
                text = encode(self._registry)
                self._renderings[content_type] = self._clock(), text
            return Response(self._renderings[content_type][1], media_type=content_type)
