"""What is looked up when somebody scrapes: the node's state in its memory, and how far the groups it leads are.

The groups cost one or two statements, however many scrape at once, and less than one a second. While the database is
away the groups' offsets are absent, and all else is there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import psycopg
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from leader.group.machine import GroupLeader
from leader.health import State
from leader.http import families
from leader.http.facts import Facts
from leader.http.families import Family, Kind
from leader.http.reading import Reading
from leader.http.settings import HttpSettings
from protocol.errors import SubletError
from storage.groups.lags import StatusLag, StreamLag, status_lags, stream_lags, summed

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lags:
    """What the database says of the groups led here; `took_s` None: it did not."""

    streams: tuple[StreamLag, ...] = ()
    sums: tuple[StatusLag, ...] = ()
    took_s: float | None = None


@dataclass(slots=True)
class _Families:
    """Metrics in the making, one per family."""

    made: dict[str, GaugeMetricFamily | CounterMetricFamily] = field(default_factory=dict)

    def add(self, family: Family, value: float, *labels: str) -> None:
        """A sample."""
        if family.name not in self.made:
            kind = CounterMetricFamily if family.kind is Kind.COUNTER else GaugeMetricFamily
            self.made[family.name] = kind(family.name, family.help, labels=family.labels)
        self.made[family.name].add_metric(labels, value)


class NodeCollector(Collector):
    """Asked by `prometheus_client` for each scrape; the caller sees to it that one asks at a time."""

    def __init__(self, facts: Facts, reading: Reading, settings: HttpSettings) -> None:
        self._facts, self._reading, self._settings = facts, reading, settings

    def describe(self) -> Iterator[Metric]:
        """Nothing: asking at registration would cost statements."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Everything, of this moment."""
        out = _Families()
        self._node(out.add)
        leaders = self._facts.leaders()
        kept = dict(sorted(leaders.items())[: self._settings.metric_groups])
        single = _within(kept, self._settings.metric_streams)
        out.add(families.LEFT_OUT, len(leaders) - len(kept), "all")
        out.add(families.LEFT_OUT, len(leaders) - len(single), "streams")
        names = {group_id: str(leader.group.subscription) for group_id, leader in kept.items()}
        for group_id, leader in kept.items():
            _memory(out.add, names[group_id], leader)
        lags = self._lags(tuple(single), tuple(group_id for group_id in kept if group_id not in single))
        _offsets(out.add, names, lags)
        yield from out.made.values()

    def _node(self, add: Callable[..., None]) -> None:
        facts, health = self._facts, self._facts.health()
        add(families.NODE, 1, facts.ref.name, facts.version, facts.ref.incarnation)
        for state in State:
            add(families.HEALTH, health.worst.state is state, state)
        for check in health.checks:
            add(families.CHECK, check.well, check.name)
        add(families.DATABASE_UP, health.named("database").state is not State.UNREACHABLE)
        for status, count in facts.standings().items():
            add(families.LEASES, count, status)
        if facts.vitals.unled is not None:
            add(families.UNLED, facts.vitals.unled)
        add(families.AGENTS, facts.agents())
        add(families.HELD_POLLS, facts.sessions.held_polls)
        add(families.NEWS_KNOWN, facts.followed())
        for what, count in facts.session_counters().items():
            add(families.SESSIONS, count, what)
        for what, count in facts.news().items():
            add(families.NEWS, count, what)

    def _lags(self, single: tuple[int, ...], others: tuple[int, ...]) -> Lags:
        if not single and not others:
            return Lags()
        began = time.monotonic()
        try:
            with self._reading.connection() as connection:
                streams = stream_lags(connection, single) if single else []
                sums = status_lags(connection, others) if others else []
        except (SubletError, psycopg.Error) as error:
            log.debug("groups have no offsets in this scrape: %s", error)
            return Lags()
        return Lags(tuple(streams), (*summed(streams), *sums), time.monotonic() - began)


def _within(leaders: Mapping[int, GroupLeader], most: int) -> set[int]:
    """Groups, the oldest first, that have not more streams together than that."""
    found: set[int] = set()
    for group_id, leader in leaders.items():
        most -= len(leader.slots)
        if most >= 0:
            found.add(group_id)
    return found


def _memory(add: Callable[..., None], name: str, leader: GroupLeader) -> None:
    add(families.MEMBERS, len(leader.members), name)
    add(families.PAUSED, leader.orders.paused is not None, name)
    add(families.TERM, leader.term, name)


def _offsets(add: Callable[..., None], names: Mapping[int, str], lags: Lags) -> None:
    if lags.took_s is not None:
        add(families.SCRAPE, lags.took_s)
    heads: dict[tuple[str, str], int] = {}
    for line in lags.streams:
        labels = (names[line.group_id], line.space, str(line.stream_id))
        heads[line.space, labels[2]] = line.head
        add(families.OFFSET, line.position, *labels)
        if line.lag is not None:
            add(families.LAG, line.lag, *labels)
    for (space, stream), head in heads.items():
        add(families.HEAD, head, space, stream)
    by_group: dict[int, list[StatusLag]] = {}
    for each in lags.sums:
        by_group.setdefault(each.group_id, []).append(each)
        add(families.STREAMS, each.streams, names[each.group_id], each.status)
    for group_id, sums in by_group.items():
        _sums(add, names[group_id], sums)


def _sums(add: Callable[..., None], name: str, sums: list[StatusLag]) -> None:
    known, unknown = sum(each.lag for each in sums), sum(each.unknown for each in sums)
    largest = [each.largest for each in sums if each.largest is not None]
    add(families.UNKNOWN, unknown, name)
    add(families.LAG_KNOWN, known, name)
    if not unknown:
        add(families.LAG_SUM, known, name)
    if largest:
        add(families.LAG_MAX, max(largest), name)
