"""Counters of a node's events and database requests, in the node's own registry."""

from __future__ import annotations

import re
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from sublet_leader.group.watch_events import EVICT, FENCE, JOIN, LEAVE, STEP_DOWN, GroupWatchEvent
from sublet_leader.node.events import CommitWrites, DatabaseRequest, NodeEvent, WritesCommitFailed, WritesCommitted
from sublet_leader.observe import metric_definitions
from sublet_leader.observe.metric_definitions import MetricDefinition
from sublet_storage.groups.model.records import TAKEOVER

OTHERS = "(others)"
"""Stands for groups, or reasons, beyond the limit."""
MAX_REASONS = 64
_MEMBERS = (JOIN, LEAVE, EVICT, FENCE)
_LEADERS = (TAKEOVER, STEP_DOWN)
_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class NodeCounters:
    """The counters of one node. `max_groups`: beyond this number, groups are counted together."""

    def __init__(self, registry: CollectorRegistry, max_groups: int) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one more series for each, of no use

        def make_counter(definition: MetricDefinition) -> Counter:
            return Counter(definition.name, definition.help, definition.labels, registry=registry)

        self._lendings = make_counter(metric_definitions.LENDINGS)
        self._members = make_counter(metric_definitions.MEMBERSHIP)
        self._leading = make_counter(metric_definitions.LEADING)
        self._broken = make_counter(metric_definitions.INVARIANT_VIOLATIONS)
        self._commits = make_counter(metric_definitions.COMMITS)
        self._entries = make_counter(metric_definitions.COMMITTED)
        self._failures = make_counter(metric_definitions.FAILURES)
        latency = metric_definitions.LATENCY
        self._latency = Histogram(latency.name, latency.help, latency.labels, registry=registry, buckets=_BUCKETS_S)
        self._groups, self._reasons = _LabelLimiter(max_groups), _LabelLimiter(MAX_REASONS)

    def record_history(self, events: Iterable[GroupWatchEvent], violations: int = 0) -> None:
        """Count events that have happened. `violations`: number of leaders that broke an invariant."""
        self._broken.inc(violations)
        for event in events:
            record = event.record
            if record.event in _LEADERS:
                self._leading.labels(record.event).inc()
            elif record.event in _MEMBERS:
                self._members.labels(self._groups.to_label(event.subscription), record.event).inc()
            elif record.stream_id:
                reason = self._reasons.to_label(reason_category(record.reason))
                forced = "true" if record.is_forced else "false"
                self._lendings.labels(self._groups.to_label(event.subscription), record.event, reason, forced).inc()

    def on_request(self, request: DatabaseRequest) -> None:
        """Count a request that is sent to the database."""

    def on_answer(self, request: DatabaseRequest, answer: NodeEvent, problem: Exception | None, took_s: float) -> None:
        """Count the answer or the failure."""
        kind = type(request).__name__
        self._latency.labels(kind).observe(took_s)
        if problem is not None:
            self._failures.labels(kind).inc()
        match answer:
            case WritesCommitted(CommitWrites(batch)):
                self._commits.labels("written").inc()
                self._entries.inc(sum(len(writes.changes) for writes in batch))
            case WritesCommitFailed(is_outcome_unknown=unknown):
                self._commits.labels("unknown" if unknown else "failed").inc()
            case _:
                pass


class _LabelLimiter:
    """Returns the first `max_count` names unchanged, and one name for all others."""

    def __init__(self, max_count: int) -> None:
        self._max_count = max_count
        self._names: set[str] = set()

    def to_label(self, name: str) -> str:
        if name in self._names:
            return name
        if len(self._names) >= self._max_count:
            return OTHERS
        self._names.add(name)
        return name


def reason_category(reason: str) -> str:
    """Return the kind of a history record's reason, without operators' texts, names and numbers."""
    general = re.split(r"[;(]", reason, maxsplit=1)[0]
    head, _, cause = general.partition(":")
    if head.strip() == "deadline":
        return f"deadline: {reason_category(cause)}"
    general = general if head.strip() == "evicted" else head
    return re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "N", general).strip()[:60] or "none"
