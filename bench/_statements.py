"""Duration of a node's two most frequent statements, beside bare ones on as many rows."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench._report import Beside
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import (
    AdvancePosition,
    GrantStream,
    GroupWrites,
    LendingChange,
    LendingOutcome,
)
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.spaces.space_changes import reshard

LEASE_S = 3600.0
HEAD = 1_000_000_000
NODE = NodeIncarnation("bench", "bench#1", "127.0.0.1:1")
FIRST_LEADERSHIP = 1_000_000
"""First id of leaderships that are only renewed and belong to no group."""

Contenders = dict[str, Callable[[int], Callable[[], object]]]
"""{name: what prepares what is timed}; its argument is larger than in all calls before."""


class Statements:
    """`groups` groups of `streams` streams each, every stream granted, in a fresh database."""

    def __init__(self, url: str, groups: int, streams: int, leaderships: int) -> None:
        self._store = PostgresGroupStore(url)
        self._conn = connect(url)
        reshard(self._conn, "default", streams)
        ids = [self._store.declare_group(_subscription(n)).group_id for n in range(groups)]
        self._conn.execute("update stream set head = %s", (HEAD,))
        self._terms = {group_id: self._store.claim(group_id, NODE, LEASE_S).term for group_id in ids}
        self._grants = {group_id: self._lend(group_id) for group_id in ids}
        self._renewed = {
            number: self._store.claim(number, NODE, LEASE_S).term
            for number in range(FIRST_LEADERSHIP, FIRST_LEADERSHIP + leaderships)
        }
        self._copy()

    def close(self) -> None:
        """Close the connections."""
        self._store.close()
        self._conn.close()

    def figures(self, entries: tuple[int, ...], rounds: int) -> list[Beside]:
        """Return medians over rounds in which the contenders take turns."""
        contenders: Contenders = {}
        for count in entries:
            keys = self._keys(count)
            contenders[f"commit {count}"] = lambda number, keys=keys: self._commit(keys, number)  # type: ignore[misc]
            contenders[f"bare {count}"] = lambda number, keys=keys: self._bare(keys, number)  # type: ignore[misc]
        one = dict([next(iter(self._renewed.items()))])
        contenders["renew all"] = lambda _: partial(self._renew, self._renewed)
        contenders["renew one"] = lambda _: partial(self._renew, one)
        ms = _medians(contenders, rounds)
        found = [
            Beside(
                f"commit of {count:,} progress entries over {len(self._terms)} groups",
                ms[f"commit {count}"],
                "ms",
                "bare UPDATE ... FROM unnest",
                ms[f"bare {count}"],
            )
            for count in entries
        ]
        what = f"renewal of {len(self._renewed):,} leaderships, one statement"
        return [*found, Beside(what, ms["renew all"], "ms", "renewal of one", ms["renew one"])]

    def _lend(self, group_id: int) -> dict[int, int]:
        """Grant all streams to one borrower; return {stream: grant id}."""
        rows = self._store.load(group_id, self._terms[group_id])
        entries = tuple(GrantStream(row.stream_id, "a/1", "a", None, "bench") for row in rows)
        (result,) = self._store.commit([GroupWrites(group_id, self._terms[group_id], entries)])
        return {one.lending.stream_id: one.lending.grant_id for one in result.results if one.lending is not None}

    def _copy(self) -> None:
        """Copy the rows to a table with nothing but progress."""
        self._conn.execute(
            "create table bare (group_id bigint, stream_id bigint, position bigint not null,"
            " primary key (group_id, stream_id)) with (fillfactor = 50)"
        )
        self._conn.execute("insert into bare select group_id, stream_id, position from lending")
        self._conn.execute("vacuum analyze bare, lending, leadership, stream")

    def _keys(self, count: int) -> list[tuple[int, int]]:
        """Return `count` (group, stream), evenly distributed over the groups."""
        each = max(count // len(self._grants), 1)
        return [(group_id, stream) for group_id, grants in self._grants.items() for stream in list(grants)[:each]]

    def _commit(self, keys: list[tuple[int, int]], number: int) -> Callable[[], object]:
        entries: dict[int, list[LendingChange]] = {}
        for group_id, stream in keys:
            entries.setdefault(group_id, []).append(AdvancePosition(stream, self._grants[group_id][stream], number))
        batch = [GroupWrites(group_id, self._terms[group_id], tuple(some)) for group_id, some in entries.items()]
        return partial(self._store.commit, batch)

    def _bare(self, keys: list[tuple[int, int]], number: int) -> Callable[[], object]:
        parameters: dict[str, Any] = {
            "groups": [group_id for group_id, _ in keys],
            "streams": [stream for _, stream in keys],
            "positions": [number] * len(keys),
        }
        statement = (
            "update bare b set position = u.position"
            "  from unnest(%(groups)b::bigint[], %(streams)b::bigint[], %(positions)b::bigint[])"
            "       as u (group_id, stream_id, position)"
            " where b.group_id = u.group_id and b.stream_id = u.stream_id"
        )
        return partial(self._conn.execute, statement, parameters)

    def _renew(self, terms: dict[int, int]) -> None:
        assert len(self._store.renew(NODE, terms, LEASE_S)) == len(terms)


def _subscription(number: int) -> Any:
    return Subscription.parse(f"$share/g{number}/#")


def _medians(contenders: Contenders, rounds: int) -> dict[str, float]:
    """Return medians in milliseconds, without two first rounds to warm up."""
    took: dict[str, list[float]] = {name: [] for name in contenders}
    numbers = itertools.count(1)
    for turn in range(rounds + 2):
        for name, contender in contenders.items():
            work = contender(next(numbers))
            started = time.perf_counter()
            answer = work()
            if turn >= 2:
                took[name].append(1000 * (time.perf_counter() - started))
            _check(answer)
    return {name: statistics.median(some) for name, some in took.items()}


def _check(answer: object) -> None:
    """Raise AssertionError where a commit has not written all of its entries."""
    if isinstance(answer, tuple):
        assert {each.outcome for result in answer for each in result.results} == {LendingOutcome.APPLIED}
