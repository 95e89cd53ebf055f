"""Sessions, feeds and watchers at nodes that ask who calls: rights are given and taken away while they run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet import Session
from sublet_borrower.node_client.feed import Feed
from sublet_borrower.node_client.group_event_watcher import GroupEventWatcher, LeaderInfo, NodeUnreachable
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.errors import PermissionDenied, SubscriptionEnded, Unauthenticated
from sublet_protocol.domain.rights import Right
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin.access_tokens import revoke_token
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.integration.access_kit import allow, revoke, rule, token_of
from tests.kit import eventually
from tests.kit_nodes import SPEED, Fleet

pytestmark = pytest.mark.conforms("X1")

GROUP = "$share/billing/orders/#"
WAIT_S = 40.0
FAST = BorrowerSettings().scaled(SPEED)
JOIN = rule("user:spark", Right.JOIN, "orders/#", "billing")


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(database) as connection:
        reshard(connection, "default", 2)
        yield connection


@pytest.fixture
def address(empty_fleet: Fleet, conn: psycopg.Connection[Any]) -> str:
    """Of a node that asks who calls."""
    allow(conn, JOIN)
    empty_fleet.extra = {"SUBLET_AUTH": "required"}
    empty_fleet.serve("n1")
    ((found,),) = conn.execute("select address from node").fetchall()
    return str(found)


def publish(url: str, count: int) -> None:
    with Publisher(url) as publisher:
        for number in range(count):
            publisher.publish("orders/eu", b"%d" % number, key=b"%d" % number)


def polled(session: Session) -> int:
    batch = session.poll(0.2)
    return 0 if batch is None else len(batch)


def poll_to_the_end(session: Session) -> str:
    """Why it ended."""
    with pytest.raises(SubscriptionEnded) as ended:
        eventually(lambda: polled(session) < 0, WAIT_S)
    return f"{ended.value.reason}: {ended.value}"


@pytest.mark.parametrize("transport", ["database", "nodes"])
def test_a_member_with_the_right_consumes(
    database: str, conn: psycopg.Connection[Any], address: str, transport: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(database, 100)
    monkeypatch.setenv("SUBLET_TOKEN", token_of(conn, "user:spark"))
    where = {"nodes": [address]} if transport == "nodes" else {"url": database}
    with Session(GROUP, **where, transport=transport, name="s", starting_position="earliest", settings=FAST) as session:
        found = 0

        def all_came() -> bool:
            nonlocal found
            found += polled(session)
            return found == 100

        eventually(all_came, WAIT_S)


def test_a_session_without_the_right_is_denied(
    database: str, conn: psycopg.Connection[Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(GROUP, database, settings=FAST) as session:
        assert "denied: " in (why := poll_to_the_end(session))
        assert "SUBLET_TOKEN" in why
    monkeypatch.setenv("SUBLET_TOKEN", token_of(conn, "user:other"))
    with Session(GROUP, database, settings=FAST) as session:
        assert "user:other has no right to join 'orders/#' in group 'billing'" in poll_to_the_end(session)
    assert conn.execute("select count(*) from consumer_group").fetchone() == (0,), "nor is the group made"


def test_a_member_that_loses_its_right_is_denied(
    database: str, conn: psycopg.Connection[Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And another gets its streams."""
    other = rule("user:other", Right.JOIN, "#")
    allow(conn, other)
    monkeypatch.setenv("SUBLET_TOKEN", token_of(conn, "user:spark"))
    with Session(GROUP, database, name="one", settings=FAST) as session:
        eventually(lambda: polled(session) == 0 and len(session.assignment()) == 2, WAIT_S)
        monkeypatch.setenv("SUBLET_TOKEN", token_of(conn, "user:other"))
        revoke(conn, JOIN)
        assert "denied" in (why := poll_to_the_end(session))
        assert "user:spark has no right to join" in why
    with Session(GROUP, database, settings=FAST) as session:
        eventually(lambda: polled(session) == 0 and len(session.assignment()) == 2, WAIT_S)


def test_a_revoked_token_ends_its_session(
    database: str, conn: psycopg.Connection[Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = token_of(conn, "user:spark")
    monkeypatch.setenv("SUBLET_TOKEN", token)
    with Session(GROUP, database, settings=FAST) as session:
        eventually(lambda: polled(session) == 0 and len(session.assignment()) == 2, WAIT_S)
        revoke_token(conn, token[4:12])
        assert "denied" in poll_to_the_end(session)


def test_a_token_is_replaced_while_its_bearer_runs(
    database: str, conn: psycopg.Connection[Any], address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    first = token_of(conn, "user:spark")
    file.write_text(first)
    file.chmod(0o600)
    monkeypatch.setenv("SUBLET_TOKEN_FILE", str(file))
    with Session(GROUP, database, settings=FAST) as session:
        eventually(lambda: polled(session) == 0 and len(session.assignment()) == 2, WAIT_S)
        file.write_text(token_of(conn, "user:spark"))
        publish(database, 10)
        eventually(lambda: polled(session) > 0, WAIT_S)
        revoke_token(conn, first[4:12])
        version = conn.execute("select max(number) from access_history").fetchone()
        assert version is not None
        for _ in range(2):
            publish(database, 10)
            eventually(lambda: polled(session) > 0, WAIT_S)
        assert len(session.assignment()) == 2
    used = conn.execute("select count(*) from token where last_used is not null").fetchone()
    assert used == (2,)


def test_a_feed_follows_until_its_right_is_revoked(
    database: str, conn: psycopg.Connection[Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = rule("user:spark", Right.READ, "orders/#")
    allow(conn, reads)
    allow(conn, rule("user:spark", Right.PUBLISH, "orders/#"))
    token = token_of(conn, "user:spark")
    monkeypatch.setenv("SUBLET_TOKEN", token)
    with Feed(address) as feed, feed.follow("orders/+", "earliest") as reader:
        eventually(lambda: feed.publish("orders/eu", b"1").result() is not None, WAIT_S)
        assert reader.read(WAIT_S) is not None
        revoke(conn, reads)
        publish(database, 1)

        with pytest.raises(PermissionDenied, match="user:spark has no right to read"):
            eventually(lambda: reader.read(5.0) is None, WAIT_S)
    monkeypatch.setenv("SUBLET_TOKEN", token[:-1] + ("A" if token[-1] != "A" else "B"))
    with pytest.raises(Unauthenticated, match="sublet access token"), Feed(address) as feed:
        feed.publish("orders/eu", b"1").result()


def test_a_watcher_that_loses_its_right_sees_no_more(
    conn: psycopg.Connection[Any], address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    watches = rule("user:spark", Right.WATCH, "orders/#", "b*")
    allow(conn, watches)
    monkeypatch.setenv("SUBLET_TOKEN", token_of(conn, "user:spark"))

    def next_kind(watch: GroupEventWatcher) -> type:
        return type(watch.next_event(5.0))

    with GroupEventWatcher(GROUP) as watch:
        watch.set_nodes([address])
        eventually(lambda: next_kind(watch) is LeaderInfo, WAIT_S)
        revoke(conn, watches)
        eventually(lambda: next_kind(watch) is NodeUnreachable, WAIT_S)
