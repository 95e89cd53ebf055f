"""What probes are told: `/healthz` (restart it?), `/readyz` (use it?) and `/readyz/CHECK`, each as named JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

from leader.health import CHECKS, Check, Health
from leader.http.request import Request
from leader.http.response import Response, as_json
from protocol.errors import NotFound


class Probes:
    """`look` judges the node at this moment; `node` is its name."""

    def __init__(self, node: str, look: Callable[[], Health]) -> None:
        self._node, self._look = node, look

    def live(self, request: Request) -> Response:
        """200 as long as the process can do its work; all else that is wrong is told, and is no reason to restart."""
        health = self._look()
        return as_json(self._told(health), 200 if health.alive else 503)

    def ready(self, request: Request) -> Response:
        """200 if this node can serve; a group without a leader is told, and is not this node's failure."""
        health = self._look()
        return as_json(self._told(health), 200 if health.ready else 503)

    def one(self, request: Request) -> Response:
        """200 if that one check is well. Raises `NotFound`."""
        name = request.path.rpartition("/")[2]
        if name not in CHECKS:
            raise NotFound(f"there is no check {name[:40]!r}: there are {', '.join(CHECKS)}.")
        check = self._look().named(name)
        return as_json({"node": self._node, **_told(check)}, 200 if check.well else 503)

    def _told(self, health: Health) -> dict[str, object]:
        worst = health.worst
        return {
            "node": self._node,
            "state": worst.state,
            "why": worst.why,
            "alive": health.alive,
            "ready": health.ready,
            "checks": [_told(check) for check in health.checks],
        }


def _told(check: Check) -> dict[str, object]:
    return asdict(check)
