"""The dashboard speaks of metrics that there are, under labels that they have."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from sublet_leader.group.watch_events import JOIN, GroupWatchEvent, transient_record
from sublet_leader.observe.event_counters import OTHERS, NodeCounters, reason_category
from sublet_leader.observe.metric_definitions import METRIC_DEFINITIONS

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana" / "sublet.json"
LABELS = {
    name: {*family.labels, "le", "instance", "job"} for family in METRIC_DEFINITIONS for name in family.exported_names
}
_METRIC = re.compile(r"\b(sublet_\w+)(?:\{([^}]*)\})?")
_BY = re.compile(r"by \(([^)]*)\) \(")


def queries() -> Iterator[str]:
    board = json.loads(DASHBOARD.read_text())
    for panel in board["panels"]:
        yield from (target["expr"] for target in panel["targets"])
    yield from (each["query"] for each in board["templating"]["list"] if each["type"] == "query")


@pytest.mark.parametrize("query", list(queries()))
def test_each_query_names_metrics_that_exist(query: str) -> None:
    named = _METRIC.findall(query)
    assert named
    for metric, selector in named:
        assert metric in LABELS, f"there is no metric {metric}"
        for label in re.findall(r"(\w+)\s*(?:=~|!=|=)", selector):
            assert label in LABELS[metric], f"{metric} has no label {label}"
    for grouping in _BY.findall(query):
        for label in re.split(r",\s*", grouping):
            assert any(label in LABELS[metric] for metric, _ in named), f"nothing in {query} has a label {label}"


def test_names_are_by_convention() -> None:
    assert len({family.name for family in METRIC_DEFINITIONS}) == len(METRIC_DEFINITIONS)
    for family in METRIC_DEFINITIONS:
        assert re.fullmatch(r"sublet_[a-z]+(_[a-z]+)*", family.name), family
        assert not family.name.endswith("_total"), family
        assert family.help.endswith("."), family


def test_groups_beyond_the_limit_are_one_series() -> None:
    registry = CollectorRegistry()
    counters = NodeCounters(registry, max_groups=2)
    for name in ("a", "b", "c", "d", "a"):
        joined = transient_record(1, 1, JOIN, "joined", "a/1", "a")
        counters.record_history([GroupWatchEvent(f"$share/{name}/#", joined)])
    counted = {
        sample.labels["subscription"]: sample.value
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name == "sublet_member_events_total"
    }
    assert counted == {"$share/a/#": 2, "$share/b/#": 1, OTHERS: 2}


@pytest.mark.parametrize(
    ("reason", "label"),
    [
        ("allocated", "allocated"),
        ("evicted: no ping in time", "evicted: no ping in time"),
        ("deadline: balance", "deadline: balance"),
        ("paused: the sink's down, call 12345", "paused"),
        ("not reclaimed; lost 5 times at offset 77", "not reclaimed"),
        ("session 'a b' has not come back to what it left in doubt",
         "session N has not come back to what it left in doubt"),
        ("x" * 1000, "x" * 60),
        ("", "none"),
    ],
)  # fmt: skip
def test_reasons_of_history_become_few_labels(reason: str, label: str) -> None:
    assert reason_category(reason) == label
