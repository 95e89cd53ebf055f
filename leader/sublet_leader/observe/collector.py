"""Collects metrics at a scrape: the node's state in memory, and groups' lags.

The node that runs the maintenance also exports the leaderless groups, so that a lag is visible also where all consumers
are gone. The groups cost few statements, however many scrape at once, and are read at most once a second. While the
database is unavailable their offsets are absent, and all other metrics are exported.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping

import psycopg
from msgspec import Struct, field
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sublet_leader.group.machine import GroupLeader
from sublet_leader.observe import metric_definitions
from sublet_leader.observe.health import HealthState
from sublet_leader.observe.http_database_pool import HttpDatabasePool
from sublet_leader.observe.metric_definitions import MetricDefinition, MetricType
from sublet_leader.observe.metrics_settings import MetricsSettings
from sublet_leader.observe.node_view import NodeView
from sublet_protocol.domain.errors import SubletError
from sublet_storage.db.store_connection import Connection
from sublet_storage.groups.status.lag_queries import (
    LagByStatus,
    StreamLag,
    read_lags_by_status,
    read_stream_lags,
    sum_by_status,
)
from sublet_storage.groups.status.overview import list_leaderless_groups
from sublet_storage.groups.status.overview_model import GroupOverview

log = logging.getLogger(__name__)


class ScrapedLags(Struct, frozen=True):
    """Lags in the database; `took_s` None: it did not answer. `sums`: of groups led here, `leaderless`: groups without
    a leader, `not_exported_count`: further groups without a leader; `streams`: of some of both."""

    streams: tuple[StreamLag, ...] = ()
    sums: tuple[LagByStatus, ...] = ()
    leaderless: tuple[GroupOverview, ...] = ()
    not_exported_count: int = 0
    stream_series_groups: frozenset[int] = frozenset()
    took_s: float | None = None


class _MetricFamilies(Struct):
    """Metrics being collected, one per definition."""

    made: dict[str, GaugeMetricFamily | CounterMetricFamily] = field(default_factory=dict)

    def add(self, definition: MetricDefinition, value: float, *labels: str) -> None:
        """Add a sample."""
        if definition.name not in self.made:
            kind = CounterMetricFamily if definition.kind is MetricType.COUNTER else GaugeMetricFamily
            self.made[definition.name] = kind(definition.name, definition.help, labels=definition.labels)
        self.made[definition.name].add_metric(labels, value)


class NodeCollector(Collector):
    """Called by `prometheus_client` for each scrape; the caller ensures that one call runs at a time."""

    def __init__(self, node_view: NodeView, pool: HttpDatabasePool, settings: MetricsSettings) -> None:
        self._node_view, self._pool, self._settings = node_view, pool, settings

    def describe(self) -> Iterator[Metric]:
        """Return nothing: collecting at registration would cost statements."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return all metrics of this moment."""
        out = _MetricFamilies()
        self._add_node(out.add)
        leaders = self._node_view.leaders()
        exported = dict(sorted(leaders.items())[: self._settings.max_group_series])
        lags = self._read_lags(exported)
        shown, all_of_them = (
            len(exported) + len(lags.leaderless),
            len(leaders) + len(lags.leaderless) + lags.not_exported_count,
        )
        out.add(metric_definitions.NOT_EXPORTED, all_of_them - shown, "all")
        out.add(metric_definitions.NOT_EXPORTED, all_of_them - len(lags.stream_series_groups), "streams")
        names = {group_id: str(leader.group.subscription) for group_id, leader in exported.items()}
        for group_id, leader in exported.items():
            _add_led_group(out.add, names[group_id], leader)
        names |= {each.group.group_id: each.group.subscription for each in lags.leaderless}
        for overview in lags.leaderless:
            _add_leaderless_group(out.add, overview)
        _add_offsets(out.add, names, exported, lags)
        yield from out.made.values()

    def _add_node(self, add: Callable[..., None]) -> None:
        node_view, health = self._node_view, self._node_view.health()
        add(metric_definitions.NODE, 1, node_view.ref.name, node_view.version, node_view.ref.incarnation)
        for state in HealthState:
            add(metric_definitions.HEALTH, health.worst_check.state is state, state)
        for check in health.checks:
            add(metric_definitions.CHECK, check.is_ok, check.name)
        add(metric_definitions.DATABASE_UP, health.check_named("database").state is not HealthState.UNREACHABLE)
        for status, count in node_view.leadership_counts().items():
            add(metric_definitions.LEADERSHIPS, count, status)
        if node_view.health_signals.leaderless_group_count is not None and health.check_named("database").is_ok:
            add(metric_definitions.LEADERLESS, node_view.health_signals.leaderless_group_count)
        add(metric_definitions.AGENTS, node_view.agent_count())
        add(metric_definitions.HELD_POLLS, node_view.sessions.held_polls)
        add(metric_definitions.SUBSCRIBED_STREAMS, node_view.subscribed_stream_count())
        for event, count in node_view.session_counters().items():
            add(metric_definitions.PUBSUB_EVENTS, count, event)
        for event, count in node_view.notification_counters().items():
            add(metric_definitions.NOTIFICATIONS, count, event)

    def _read_lags(self, led: Mapping[int, GroupLeader]) -> ScrapedLags:
        is_maintenance_leader = self._node_view.is_maintenance_leader()
        sizes = {group_id: len(leader.streams) for group_id, leader in led.items()}
        if not led and not is_maintenance_leader:
            return ScrapedLags()
        began = time.monotonic()
        try:
            with self._pool.connection() as connection:
                leaderless, total = self._read_leaderless_groups(connection, led) if is_maintenance_leader else ((), 0)
                sizes |= {each.group.group_id: sum(each.statuses.values()) for each in leaderless}
                single = _select_within_budget(sizes, self._settings.max_stream_series)
                streams = read_stream_lags(connection, tuple(single)) if single else []
                summed_groups = tuple(group_id for group_id in led if group_id not in single)
                sums = read_lags_by_status(connection, summed_groups) if summed_groups else []
        except (SubletError, psycopg.Error) as error:
            log.debug("group lag not read for this scrape: %s", error)
            return ScrapedLags(stream_series_groups=_select_within_budget(sizes, self._settings.max_stream_series))
        of_led = [lag for lag in streams if lag.group_id in led]
        took_s = time.monotonic() - began
        by_status = (*sum_by_status(of_led), *sums)
        return ScrapedLags(tuple(streams), by_status, leaderless, total - len(leaderless), single, took_s)

    def _read_leaderless_groups(
        self, connection: Connection, led: Mapping[int, GroupLeader]
    ) -> tuple[tuple[GroupOverview, ...], int]:
        """Return the leaderless groups, as far as there is room, and their total number. The database may not yet have
        what is led here."""
        overviews, total = list_leaderless_groups(connection, max(self._settings.max_group_series - len(led), 0))
        leaders = self._node_view.leaders()
        leaderless = tuple(each for each in overviews if each.group.group_id not in leaders)
        return leaderless, max(total - (len(overviews) - len(leaderless)), 0)


def _select_within_budget(sizes: Mapping[int, int], stream_budget: int) -> frozenset[int]:
    """Return the groups, in their order, that have at most `stream_budget` streams together."""
    group_ids: set[int] = set()
    for group_id, size in sizes.items():
        stream_budget -= size
        if stream_budget >= 0:
            group_ids.add(group_id)
    return frozenset(group_ids)


def _add_leaderless_group(add: Callable[..., None], overview: GroupOverview) -> None:
    """Export what the database has of a group without a leader."""
    name, counts = overview.group.subscription, overview.counts
    add(metric_definitions.MEMBERS, 0, name)
    add(metric_definitions.PAUSED, overview.group.desired_state.pause_reason is not None, name)
    add(metric_definitions.UNREADABLE_STREAMS, counts.unreadable_count, name)
    for status, count in counts.statuses.items():
        add(metric_definitions.STREAMS, count, name, status)
    _add_sums(add, name, counts.known_lag, counts.max_lag, counts.unknown_lag_count)


def _add_led_group(add: Callable[..., None], name: str, leader: GroupLeader) -> None:
    add(metric_definitions.MEMBERS, len(leader.members), name)
    add(metric_definitions.PAUSED, leader.desired_state.pause_reason is not None, name)
    add(metric_definitions.TERM, leader.term, name)
    add(metric_definitions.UNREADABLE_STREAMS, leader.streams.unreadable_count(), name)


def _add_offsets(add: Callable[..., None], names: Mapping[int, str], led: Iterable[int], lags: ScrapedLags) -> None:
    if lags.took_s is None:
        return
    add(metric_definitions.SCRAPE, lags.took_s)
    heads: dict[tuple[str, str], int] = {}
    for stream_lag in lags.streams:
        labels = (names[stream_lag.group_id], stream_lag.space, str(stream_lag.stream_id))
        heads[stream_lag.space, labels[2]] = stream_lag.head
        add(metric_definitions.OFFSET, stream_lag.position, *labels)
        if stream_lag.lag is not None:
            add(metric_definitions.LAG, stream_lag.lag, *labels)
    for (space, stream), head in heads.items():
        add(metric_definitions.HEAD, head, space, stream)
    by_group: dict[int, list[LagByStatus]] = {group_id: [] for group_id in led}
    for each in lags.sums:
        by_group[each.group_id].append(each)
        add(metric_definitions.STREAMS, each.streams, names[each.group_id], each.status)
    for group_id, sums in by_group.items():
        largest = max((each.largest for each in sums if each.largest is not None), default=None)
        _add_sums(add, names[group_id], sum(each.lag for each in sums), largest, sum(each.unknown for each in sums))


def _add_sums(add: Callable[..., None], name: str, known_lag: int, largest: int | None, unknown: int) -> None:
    add(metric_definitions.UNKNOWN, unknown, name)
    add(metric_definitions.LAG_KNOWN, known_lag, name)
    if not unknown:
        add(metric_definitions.LAG_SUM, known_lag, name)
    if largest is not None:
        add(metric_definitions.LAG_MAX, largest, name)
