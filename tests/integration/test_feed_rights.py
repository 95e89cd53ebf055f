"""What it costs a node to find out which streams a member may read."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest

from sublet_leader.feed.member_fetch import check_may_fetch, filter_fetchable
from sublet_protocol.domain.access.rights import AccessRule, AccessRules, AccessSnapshot, Right
from sublet_protocol.domain.errors import PermissionDenied
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate.access_cache import AccessCache
from sublet_protocol.gate.audit import RefusalLog
from sublet_protocol.gate.gate import Caller
from sublet_protocol.messages.member_reads import FetchRequest
from tests.integration.log_kit import Connection


@pytest.mark.conforms("X4")
def test_a_call_for_heads_reads_each_group_once(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not a row for each stream of each group; and none at all, and no statement, for who may join no group."""
    conn.execute(
        "insert into consumer_group (kind, name, filter)"
        " select 'share', 'g' || i, 'orders/' || i % 2 || '/#' from generate_series(1, 20) i"
    )
    conn.execute(
        "insert into lending (group_id, stream_id, position)"
        " select group_id, s, 0 from consumer_group, generate_series(1001, 1050) s"
        " where filter <> 'orders/1/#' or s > 1010"
    )
    rows: list[list[Any]] = []
    parsed: list[str] = []
    fetch = psycopg.Cursor.fetchall

    def fetchall(cursor: psycopg.Cursor[Any]) -> list[Any]:
        rows.append(fetch(cursor))
        return rows[-1]

    def parse(text: str) -> TopicFilter:
        parsed.append(text)
        return TopicFilter(text)

    monkeypatch.setattr(psycopg.Cursor, "fetchall", fetchall)
    monkeypatch.setattr("sublet_storage.groups.admin.access_snapshot.TopicFilter", parse)
    rule = AccessRule("user:member", Right.JOIN, TopicFilter("orders/1/#"))
    cache = AccessCache(AccessSnapshot("1", AccessRules([rule]), {}), time.monotonic)
    streams = range(1001, 1101)
    member, stranger = (Caller(name, "", "Heads", cache, RefusalLog()) for name in ("user:member", "user:stranger"))
    assert sorted(filter_fetchable(conn, member, streams)) == list(range(1011, 1051))
    assert sum(map(len, rows)) <= 20 + 40
    assert sorted(parsed) == ["orders/0/#", "orders/1/#"]
    rows.clear()
    assert not filter_fetchable(conn, stranger, streams)
    with pytest.raises(PermissionDenied):
        check_may_fetch(conn, stranger, FetchRequest(1001, 0, TopicFilter("orders/1/#"), 1, 1, 1))
    assert not rows
