"""The page of metrics keeps what it has made for a second, and no longer, whatever formats are asked for."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Gauge
from starlette.requests import Request

from sublet_leader.http.probes import FRESH_S, MetricsPage


def test_a_page_is_kept_for_a_second() -> None:
    """And not for every version that was ever asked for."""
    now = 0.0
    registry = CollectorRegistry()
    gauge = Gauge("one", "One.", registry=registry)
    page = MetricsPage(registry, lambda: now)

    def reported(version: str) -> bytes:
        accept = f"application/openmetrics-text;version={version}"
        return bytes(page.page(Request({"type": "http", "headers": [(b"accept", accept.encode())]})).body)

    gauge.set(1)
    first = reported("1.0.0")
    gauge.set(2)
    assert reported("1.0.0") == first
    now += FRESH_S
    assert b"one 2.0" in reported("1.0.1")
    now -= FRESH_S
    assert b"one 2.0" in reported("1.0.0"), "the old page is not there any more"
