"""Sessions, feeds and watchers at nodes that ask who calls: rights are given and taken away while they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest

from sublet import Session
from sublet_borrower.node_client.feed_client import Feed
from sublet_borrower.node_client.group_event_watcher import (
    FindLeaderResponse,
    GroupEventsUnavailable,
    GroupEventWatcher,
)
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.errors import PermissionDenied, SubscriptionEnded, Unauthenticated
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.messages.member_reads import (
    FetchPositionGone,
    FetchRequest,
    decode_fetch_reply,
    encode_fetch_request,
)
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_storage.groups.admin.access_tokens import revoke_token
from sublet_storage.groups.coordinator.session_name_owners import release
from sublet_storage.producer import Publisher
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import rollover
from tests.integration.access_kit import allow, bearer, revoke, rule, serve_asking, token_of
from tests.integration.feed_kit import stub
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet

pytestmark = pytest.mark.conforms("X1")

GROUP = "$share/billing/orders/#"
FAST = BorrowerSettings().scaled(SPEED)
JOIN = rule("user:spark", Right.JOIN, "orders/#", "billing")
READ, PUBLISH = rule("user:spark", Right.READ, "orders/#"), rule("user:spark", Right.PUBLISH, "orders/#")
WATCH = rule("user:spark", Right.WATCH, "orders/#", "b*")


@pytest.fixture
def tokens(conn: psycopg.Connection[Any]) -> dict[str, str]:
    """Return tokens by user, given with their rights before the node starts, so that it has read them."""
    elsewhere = rule("user:spark", Right.JOIN, "bills/#")
    for each in (JOIN, READ, PUBLISH, WATCH, elsewhere, rule("user:third", Right.JOIN, "#")):
        allow(conn, each)
    return {name: token_of(conn, f"user:{name}") for name in ("spark", "other", "third")}


@pytest.fixture
def address(empty_fleet: Fleet, conn: psycopg.Connection[Any], tokens: dict[str, str]) -> str:
    """Return the address of a node that authenticates callers."""
    return serve_asking(empty_fleet, conn)


@pytest.fixture(params=["database", "nodes"])
def through(database: str, address: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the transport of a session."""
    return {"transport": request.param} | ({"nodes": [address]} if request.param == "nodes" else {"url": database})


def is_known(address: str, token: str) -> bool:
    """Return whether the node accepts the token by now."""
    with stub(address) as feed:
        call = feed.Heads.future(pb.HeadsRequest(protocol_version=PROTOCOL_VERSION), metadata=bearer(token))
        return call.code() is not grpc.StatusCode.UNAUTHENTICATED


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


def test_a_token_that_was_used_has_a_day(conn: psycopg.Connection[Any], address: str, tokens: dict[str, str]) -> None:
    assert is_known(address, tokens["spark"])
    used = "select token_id from token where last_used is not null"
    eventually(lambda: conn.execute(used).fetchall() == [(tokens["spark"][4:12],)], WAIT_S)


def test_a_member_with_the_right_consumes(
    database: str, through: dict[str, Any], tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(database, 100)
    monkeypatch.setenv("SUBLET_TOKEN", tokens["spark"])
    with Session(GROUP, **through, name="s", starting_position="earliest", settings=FAST) as session:
        found = 0

        def all_came() -> bool:
            nonlocal found
            found += polled(session)
            return found == 100

        eventually(all_came, WAIT_S)


def test_a_session_without_the_right_is_denied(
    database: str, conn: psycopg.Connection[Any], address: str, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with Session(GROUP, database, settings=FAST) as session:
        assert "denied: " in (why := poll_to_the_end(session))
        assert "SUBLET_TOKEN" in why
    monkeypatch.setenv("SUBLET_TOKEN", tokens["other"])
    with Session(GROUP, database, settings=FAST) as session:
        assert "user:other has no right to join 'orders/#' in group 'billing'" in poll_to_the_end(session)
    assert conn.execute("select count(*) from consumer_group").fetchone() == (0,), "nor is the group made"


@pytest.mark.conforms("X5")
def test_a_sessions_name_is_not_another_principals(
    conn: psycopg.Connection[Any], through: dict[str, Any], tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is drawn in the database or at the node, until somebody releases it. A session that would only be
    shown under it joins without a name."""
    monkeypatch.setenv("SUBLET_TOKEN", tokens["spark"])
    with Session(GROUP, **through, name="etl", settings=FAST) as session:
        eventually(lambda: polled(session) == 0 and len(session.assignment()) == 2, WAIT_S)
        monkeypatch.setenv("SUBLET_TOKEN", tokens["third"])
        with pytest.raises((PermissionDenied, SubscriptionEnded), match=r"'etl' of .* is another principal's"):
            open_and_poll(through)
        assert polled(session) == 0
        assert len(session.assignment()) == 2
        with Session(GROUP, **through, name="etl", is_name_stable=False, settings=FAST) as other:
            eventually(lambda: polled(session) == polled(other) == 0 and len(other.assignment()) == 1, WAIT_S)
            held = "select coalesce(session, '-') from lending where status = 'held' order by 1"
            assert conn.execute(held.encode()).fetchall() == [("-",), ("etl",)]
        release(conn, Subscription.parse(GROUP), "etl")
        with Session(GROUP, **through, name="etl", settings=FAST) as other:
            eventually(lambda: polled(other) == 0 and len(other.assignment()) == 2, WAIT_S)
            assert "fenced" in poll_to_the_end(session)


def open_and_poll(through: dict[str, Any]) -> None:
    with Session(GROUP, **through, name="etl", settings=FAST) as session:
        eventually(lambda: polled(session) < 0, WAIT_S)


def test_a_member_that_loses_its_right_is_denied(
    database: str, conn: psycopg.Connection[Any], address: str, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And another gets its streams, though it had planned what it would keep for a day."""
    monkeypatch.setenv("SUBLET_TOKEN", tokens["spark"])
    with Session(GROUP, database, name="one", settings=FAST) as session:
        eventually(lambda: polled(session) == 0 and len(session.assignment()) == 2, WAIT_S)
        publish(database, 100)
        planned = "jsonb_build_object('grant_id', grant_id, 'start', 0, 'end', 1, 'hold_s', 86400, 'consumed', null)"
        assert conn.execute(f"update lending set in_doubt = {planned}, planned_by = session".encode()).rowcount == 2
        monkeypatch.setenv("SUBLET_TOKEN", tokens["third"])
        revoke(conn, JOIN)
        eventually(lambda: conn.execute("select from lending where session = 'one'").rowcount == 0, WAIT_S)
        assert conn.execute("select count(*) from lending_history where redelivery_end > 0").fetchone() == (2,)
        assert "denied" in (why := poll_to_the_end(session))
        assert "user:spark has no right to join" in why
    with Session(GROUP, database, settings=FAST) as session:
        eventually(lambda: polled(session) == 0 and len(session.assignment()) == 2, WAIT_S)


def test_a_revoked_token_ends_its_session(
    database: str, conn: psycopg.Connection[Any], address: str, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tokens["spark"]
    monkeypatch.setenv("SUBLET_TOKEN", token)
    with Session(GROUP, database, settings=FAST) as session:
        eventually(lambda: polled(session) == 0 and len(session.assignment()) == 2, WAIT_S)
        revoke_token(conn, token[4:12])
        assert "denied" in poll_to_the_end(session)


def test_a_token_is_replaced_while_its_bearer_runs(
    database: str,
    conn: psycopg.Connection[Any],
    address: str,
    tokens: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    file = tmp_path / "token"
    file.write_text(tokens["spark"])
    file.chmod(0o600)
    monkeypatch.setenv("SUBLET_TOKEN_FILE", str(file))
    second = token_of(conn, "user:spark")
    eventually(lambda: is_known(address, second), WAIT_S)
    with Session(GROUP, database, settings=FAST) as session:
        eventually(lambda: polled(session) == 0 and len(session.assignment()) == 2, WAIT_S)
        grants = conn.execute("select grant_id from lending order by 1").fetchall()
        file.write_text(second)
        revoke_token(conn, tokens["spark"][4:12])
        eventually(lambda: not is_known(address, tokens["spark"]), WAIT_S)
        publish(database, 10)
        eventually(lambda: polled(session) > 0, WAIT_S)
        assert conn.execute("select grant_id from lending order by 1").fetchall() == grants, "it was not let go"


@pytest.mark.conforms("E39")
def test_a_deleted_stream_is_gone_for_its_reader(
    database: str, conn: psycopg.Connection[Any], address: str, tokens: dict[str, str]
) -> None:
    """A member may read on before it is notified that the stream was taken from its group; of others nobody reads."""
    publish(database, 1)
    read = "select stream_id, generation_id from stream where head > 0"
    ((stream, generation),) = conn.execute(read).fetchall()
    rollover(conn, "default")
    conn.execute("update space set retention_s = 1")
    conn.execute("update generation set closed_at = closed_at - interval '1 hour'")
    cleaner = EmptyGenerationCleaner(rest_s=0)
    eventually(lambda: (apply_retention(conn), cleaner(conn), conn.execute(read).rowcount == 0)[-1], WAIT_S)
    ((other,),) = conn.execute("select min(stream_id) from stream").fetchall()
    with stub(address) as feed:
        asked = [FetchRequest(each, 0, TopicFilter("orders/#"), generation, 1, 1) for each in (stream, other)]
        calls = [feed.Read.future(encode_fetch_request(each), metadata=bearer(tokens["spark"])) for each in asked]
        assert decode_fetch_reply(calls[0].result(WAIT_S)) == FetchPositionGone(None)
        assert calls[1].code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_feed_follows_until_its_right_is_revoked(
    database: str, conn: psycopg.Connection[Any], address: str, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tokens["spark"]
    monkeypatch.setenv("SUBLET_TOKEN", token)
    with Feed(address) as feed, feed.follow("orders/+", "earliest") as reader:
        feed.publish("orders/eu", b"1").result()
        assert reader.read(WAIT_S) is not None
        revoke(conn, READ)
        publish(database, 1)

        with pytest.raises(PermissionDenied, match="user:spark has no right to read"):
            eventually(lambda: reader.read(5.0) is None, WAIT_S)
    monkeypatch.setenv("SUBLET_TOKEN", token[:-1] + ("A" if token[-1] != "A" else "B"))
    with pytest.raises(Unauthenticated, match="sublet access token"), Feed(address) as feed:
        feed.publish("orders/eu", b"1").result()


def test_a_watcher_that_loses_its_right_sees_no_more(
    conn: psycopg.Connection[Any], address: str, tokens: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SUBLET_TOKEN", tokens["spark"])

    def next_kind(watch: GroupEventWatcher) -> type:
        return type(watch.next_event(5.0))

    with GroupEventWatcher(GROUP) as watch:
        watch.set_nodes([address])
        eventually(lambda: next_kind(watch) is FindLeaderResponse, WAIT_S)
        revoke(conn, WATCH)
        eventually(lambda: next_kind(watch) is GroupEventsUnavailable, WAIT_S)
