"""Time in which a leader computes and writes the consumed frontier of an atomic group."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import psycopg

from bench._report import Beside
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions, GroupWrites
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.producer import Publisher
from sublet_storage.spaces.routing import MAX_SHARDS
from sublet_storage.spaces.space_changes import create_space, reshard

LEASE_S = 3600.0
NODE = NodeIncarnation("bench", "bench#1", "127.0.0.1:1")
STATEMENT_TIMEOUT_S = 60.0
BESIDE = {"count": "select count(*) of its rows", "update": "UPDATE of as many rows", "advance": "publisher.advance"}
RENEWALS = {"idle": "all consumed to the end", "behind": "all behind, each elsewhere"}


class Frontiers:
    """An atomic group with `streams` streams, each with a row, in a fresh database whose spaces have epochs."""

    def __init__(self, url: str, streams: int) -> None:
        with contextlib.ExitStack() as opened:
            self._conn = opened.enter_context(connect(url))
            spaces = _spaces(self._conn, streams)
            self._publishers = [opened.enter_context(Publisher(url, name, epoch_lease_s=LEASE_S)) for name in spaces]
            self._epoch = 0
            self._advance_all()
            self._store = PostgresGroupStore(url, statement_timeout_s=STATEMENT_TIMEOUT_S)
            opened.callback(self._store.close)
            options = GroupOptions(StartingPosition.parse("earliest"), atomic=True)
            self._group_id = self._store.declare_group(Subscription.parse("$share/bench/#"), options).group_id
            self._term = self._store.claim(self._group_id, NODE, LEASE_S).term
            self._rows = self._copy()
            self._opened = opened.pop_all()

    def close(self) -> None:
        """Close the database's connections and publishers."""
        self._opened.close()

    def figures(self, rounds: int) -> list[Beside]:
        """Return medians over rounds in which all contenders take turns."""
        ms = self._medians(rounds)
        return [
            Beside(f"renewal, {what}", ms[name], "ms", peer, ms[beside])
            for name, what in RENEWALS.items()
            for beside, peer in BESIDE.items()
        ]

    def _copy(self) -> int:
        """Copy the rows to a table that the peer changes; return their number."""
        self._conn.execute("create table bare (like lending including indexes)")
        return self._conn.execute("insert into bare select * from lending").rowcount

    def _medians(self, rounds: int) -> dict[str, float]:
        """Return medians in milliseconds, without a first round to warm up."""
        took: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for behind, name in enumerate(RENEWALS):
                self._set(behind=bool(behind))
                for each, contender in {name: self._renew, **self._peers()}.items():
                    started = time.perf_counter()
                    contender()
                    if number:
                        took.setdefault(each, []).append(1000 * (time.perf_counter() - started))
        return {name: statistics.median(some) for name, some in took.items()}

    def _peers(self) -> dict[str, Callable[[], None]]:
        return {"count": self._count, "update": self._update, "advance": self._advance}

    def _set(self, *, behind: bool) -> None:
        """Let the next sync move the frontier, or with `behind` let each row hold it back."""
        self._advance_all()
        self._conn.execute("update stream set head = %s where state = 'open'", (int(behind),))
        self._conn.execute(
            "update lending set consumed = jsonb_build_object('upto', 0, 'least', jsonb_build_array(jsonb_build_array("
            "stream_id))) where group_id = %s",
            (self._group_id,),
        )
        for table in ("stream", "lending", "bare"):
            self._conn.execute(f"vacuum analyze {table}")

    def _renew(self) -> None:
        (result,) = self._store.commit([GroupWrites(self._group_id, self._term, (), needs_stream_sync=True)])
        assert result.epochs

    def _count(self) -> None:
        row = self._conn.execute("select count(*) from lending where group_id = %s", (self._group_id,)).fetchone()
        assert row == (self._rows,)

    def _update(self) -> None:
        changed = self._conn.execute("update bare set position = position where group_id = %s", (self._group_id,))
        assert changed.rowcount == self._rows

    def _advance(self) -> None:
        self._epoch += 1
        self._publishers[0].advance(self._epoch)

    def _advance_all(self) -> None:
        self._epoch += 1
        for publisher in self._publishers:
            publisher.advance(self._epoch)


def _spaces(conn: psycopg.Connection[Any], streams: int) -> list[str]:
    """Create the fewest spaces that can have that many streams, evenly distributed; return their names."""
    names = ["default", *(f"bench{number}" for number in range(1, math.ceil(streams / MAX_SHARDS)))]
    for name in names[1:]:
        create_space(conn, name, f"{name}/#", shards=streams // len(names))
    reshard(conn, "default", streams - streams // len(names) * (len(names) - 1))
    return names
