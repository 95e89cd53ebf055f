"""Of HTTP requests: numbers in a query, and the page of metrics, whatever formats are asked for."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Gauge
from starlette.requests import Request

from sublet_leader.http.probes_and_metrics import FRESH_S, MetricsPage
from sublet_leader.http.query_fields import read_integer
from sublet_protocol.domain.errors import UsageError


def limit_in(query: str) -> int:
    request = Request({"type": "http", "path": "/groups", "query_string": query.encode()})
    return read_integer(request, "limit", 50, 500)


@pytest.mark.parametrize(("query", "limit"), [("limit=0", 0), ("limit=500", 500), ("offset=7", 50)])
def test_a_number_in_its_range_is_taken(query: str, limit: int) -> None:
    assert limit_in(query) == limit


@pytest.mark.parametrize("value", ["-1", "501", "+1", "1.0", "", "\N{ARABIC-INDIC DIGIT THREE}", "0" * 20])
def test_another_value_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="a whole number from 0 to 500"):
        limit_in(f"limit={value}")


def test_a_page_is_cached_for_a_second() -> None:
    """And not for every version that was ever asked for."""
    now = 0.0
    registry = CollectorRegistry()
    gauge = Gauge("one", "One.", registry=registry)
    page = MetricsPage(registry, lambda: now)

    def reported(version: str) -> bytes:
        accept = f"application/openmetrics-text;version={version}"
        return bytes(page.render(Request({"type": "http", "headers": [(b"accept", accept.encode())]})).body)

    gauge.set(1)
    first = reported("1.0.0")
    gauge.set(2)
    assert reported("1.0.0") == first
    now += FRESH_S
    assert b"one 2.0" in reported("1.0.1")
    now -= FRESH_S
    assert b"one 2.0" in reported("1.0.0"), "the old page is not there any more"
