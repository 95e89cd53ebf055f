"""What a node exports of itself and of the groups that it leads, where its database does not answer."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sublet_leader.observe.collector import NodeCollector
from sublet_leader.observe.health import Health, HealthCheck, HealthState
from sublet_leader.observe.metrics_settings import MetricsSettings
from sublet_protocol.domain.errors import DatabaseUnreachable
from tests.unit.leader_bench import Bench

STREAMS = 3


class UnreachablePool:
    """Counts who asks for a connection."""

    asked_count = 0

    def connection(self) -> Any:
        """Raise as it does without a database."""
        self.asked_count += 1
        raise DatabaseUnreachable("gone")


def collect(
    pool: UnreachablePool,
    max_stream_series: int = STREAMS,
    leaderless: int | None = None,
    database: HealthState = HealthState.OK,
    *,
    leads: bool = True,
) -> dict[str, float]:
    """Return the values of what has no labels, or has that of the streams."""
    node: Any = SimpleNamespace(
        ref=SimpleNamespace(name="n1", incarnation="n1-1"),
        version="1",
        sessions=SimpleNamespace(held_polls=0),
        health_signals=SimpleNamespace(leaderless_group_count=leaderless),
        health=lambda: Health((HealthCheck("database", database, ""),)),
        leaders=lambda: {1: Bench(STREAMS).leader} if leads else {},
        is_maintenance_leader=lambda: False,
        **dict.fromkeys(("agent_count", "subscribed_stream_count"), lambda: 0),
        **dict.fromkeys(("leadership_counts", "session_counters", "notification_counters"), dict),
    )
    collector = NodeCollector(node, pool, MetricsSettings(max_stream_series=max_stream_series))  # type: ignore[arg-type]
    samples = [sample for family in collector.collect() for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.labels in ({}, {"series": "streams"})}


@pytest.mark.parametrize(("most", "beyond"), [(STREAMS, 0), (STREAMS - 1, 1)])
def test_series_of_streams_are_bounded(most: int, beyond: int) -> None:
    found = collect(UnreachablePool(), max_stream_series=most)
    assert found["sublet_groups_not_exported"] == beyond
    assert "sublet_scrape_duration_seconds" not in found


@pytest.mark.parametrize("leads", [True, False])
def test_who_leads_nothing_asks_nothing(leads: bool) -> None:
    pool = UnreachablePool()
    collect(pool, leads=leads)
    assert pool.asked_count == leads


@pytest.mark.parametrize(
    ("leaderless", "database", "expected"),
    [(2, HealthState.OK, [2]), (None, HealthState.OK, []), (2, HealthState.UNREACHABLE, [])],
)
def test_groups_without_a_leader_are_of_now(leaderless: int | None, database: HealthState, expected: list[int]) -> None:
    found = collect(UnreachablePool(), leaderless=leaderless, database=database)
    assert [value for name, value in found.items() if name == "sublet_groups_without_leader"] == expected
