"""A token counts from the moment that it is made, also where a node has not been notified of it."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Iterator
from typing import Any

import pytest

from sublet import Feed
from sublet_leader.jobs import access_refresh
from sublet_leader.jobs.access_refresh import AccessRefreshThread
from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.errors import Unauthenticated, Unavailable
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate.gate import AccessGate
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin.access_snapshot import CHANNEL, has_changed
from tests.integration.access_kit import allow, revoked_token, rule, token_of
from tests.integration.http_kit import Http
from tests.integration.log_kit import Connection
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet

pytestmark = pytest.mark.conforms("X8")

SILENT = """
select replace(
  pg_get_functiondef('note_access'::regproc), 'perform pg_notify(''sublet_access'', tg_table_schema)', 'null')"""
COUNT = 5
"""So many that not all of them can be made just before a node reads anyway."""


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    """Yield a connection to a database without notifications of changes."""
    with connect(database) as connection:
        ((function,),) = connection.execute(SILENT).fetchall()
        connection.execute(function)
        allow(connection, rule("*", Right.PUBLISH, "t/#"))
        allow(connection, rule("*", Right.WATCH, "#"))
        yield connection


def test_a_token_counts_at_once(conn: Connection, empty_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_fleet.extra = {"SUBLET_AUTH": "required", "SUBLET_HTTP": "yes"}
    empty_fleet.serve("n1")
    port = Http.of(empty_fleet.nodes["n1"])
    ((address,),) = conn.execute("select address from node").fetchall()
    for number in range(COUNT):
        monkeypatch.setenv("SUBLET_TOKEN", token_of(conn, f"user:feed-{number}"))
        with Feed([address]) as feed:
            feed.publish("t/1", b"1").result()
        token = token_of(conn, f"user:http-{number}")
        assert port.ask("/api/v1/node", headers={"Authorization": f"Bearer {token}"}).status == 200


@pytest.fixture
def reader(database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> Iterator[AccessRefreshThread]:
    """One that reads when it is asked only."""
    monkeypatch.setattr(access_refresh, "READ_INTERVAL_S", 1e6)
    reader = AccessRefreshThread(database, lambda: None, time.monotonic)
    yield reader
    reader.stop()
    assert not reader.is_alive()


def test_an_unknown_token_is_looked_up_once(reader: AccessRefreshThread, conn: Connection) -> None:
    asked = 0

    def read_anew() -> Any:
        nonlocal asked
        asked += 1
        return reader.read_anew()

    gate = AccessGate(reader.open(), read_anew)
    reader.start()
    unknown = [None, "", "Basic x", "Bearer x"]
    read = [f"Bearer {each}" for each in (revoked_token(conn, "user:a"), "sub_aaaaaaaa_" + "x" * 43)]
    for _ in range(2):
        for header in unknown + read:
            asyncio.run(gate.read_unknown(header))
            with pytest.raises(Unauthenticated):
                gate.identify(header, "", "")
    assert asked == len(read)
    fresh = f"Bearer {token_of(conn, 'user:a')}"
    asyncio.run(gate.read_unknown(fresh))
    assert gate.identify(fresh, "", "").principal == "user:a"


def test_a_token_is_looked_up_again_after_an_outage(conn: Connection, reader: AccessRefreshThread) -> None:
    """What could not be read is not unknown."""
    gate = AccessGate(reader.open(), reader.read_anew)
    header = f"Bearer {token_of(conn, 'user:a')}"
    conn.execute("alter table token rename to away")
    reader.start()
    with pytest.raises(Unavailable, match="cannot read the tokens"):
        asyncio.run(gate.read_unknown(header))
    conn.execute("alter table away rename to token")

    def is_known() -> bool:
        with contextlib.suppress(Unavailable):
            return asyncio.run(gate.read_unknown(header))
        return False

    eventually(is_known, WAIT_S)


def test_so_many_callers_wait_for_a_reading(reader: AccessRefreshThread) -> None:
    reader.open()
    waiting = [reader.read_anew() for _ in range(access_refresh.MAX_WAITING)]
    assert None not in waiting
    assert reader.read_anew() is None
    reader.start()
    assert all(each.result(120.0) for each in waiting if each is not None)
    assert reader.read_anew() is not None


def test_rules_are_read_anew_over_another_connection(reader: AccessRefreshThread, conn: Connection) -> None:
    """After a failover the last change may be another one with the same number."""
    cache = reader.open()
    assert cache.find_rule("user:a", Right.PUBLISH, TopicFilter("t/1")) is not None
    conn.execute("alter table access disable trigger noted")
    conn.execute("delete from access where may = 'publish'")
    conn.execute("select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'sublet access'")
    reader.start()

    def is_read() -> bool:
        reading = reader.read_anew()
        return reading is not None and reading.result(60)

    eventually(is_read, 60.0)
    assert cache.find_rule("user:a", Right.PUBLISH, TopicFilter("t/1")) is None


@pytest.mark.conforms("X6")
def test_a_load_without_triggers_is_read_in_time(
    reader: AccessRefreshThread, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(access_refresh, "REREAD_INTERVAL_S", 0.0)
    cache = reader.open()
    assert cache.find_rule("user:a", Right.PUBLISH, TopicFilter("t/1")) is not None
    conn.execute("alter table access disable trigger noted")
    conn.execute("delete from access where may = 'publish'")
    reader.start()
    reading = reader.read_anew()
    assert reading is not None
    assert reading.result(60)
    assert cache.find_rule("user:a", Right.PUBLISH, TopicFilter("t/1")) is None


@pytest.mark.conforms("X4")
def test_unknown_tokens_cause_few_readings(
    reader: AccessRefreshThread, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And without callers and changes there are none."""
    monkeypatch.setattr(access_refresh, "MIN_READ_INTERVAL_S", 0.5)
    read: list[str] = []

    def look(connection: BoundedConnection, version: str) -> bool:
        read.append(version)
        return has_changed(connection, version)

    monkeypatch.setattr(access_refresh, "has_changed", look)
    reader.open()
    reader.start()
    conn.execute("select pg_sleep(0.1)")
    assert read == []
    began = time.monotonic()
    for number in (1, 2):
        waiting = reader.read_anew()
        assert waiting is not None
        assert waiting.result(60)
        assert len(read) == number
    assert time.monotonic() - began >= 0.5


@pytest.mark.conforms("X4")
def test_notifications_that_wait_are_one_reading(
    reader: AccessRefreshThread, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is left with psycopg, which keeps what nobody takes."""
    opened: list[BoundedConnection] = []

    def open_connection(url: str, **more: Any) -> BoundedConnection:
        opened.append(connect(url, **more))
        return opened[-1]

    monkeypatch.setattr(access_refresh, "connect", open_connection)
    reader.open()
    (connection,) = opened
    conn.execute("select pg_notify(%s, repeat('x', 7000) || n) from generate_series(1, 300) n", (CHANNEL,))
    backlog = connection._notifies_backlog
    assert backlog is not None
    eventually(lambda: connection.execute("select") and len(backlog) == 300)
    left: list[int] = []

    def read(connection: BoundedConnection, version: str) -> bool:
        left.append(len(list(connection.notifies(timeout=0))))
        return has_changed(connection, version)

    monkeypatch.setattr(access_refresh, "has_changed", read)
    reader.start()
    eventually(lambda: left)
    assert left[0] == 0
