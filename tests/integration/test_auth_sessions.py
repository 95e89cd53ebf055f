"""Sessions, feeds and watchers at nodes that ask who calls: rights are given and taken away while they run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
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
from tests.integration.log_kit import Connection
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet

pytestmark = pytest.mark.conforms("X1")

GROUP = "$share/billing/orders/#"
FAST = BorrowerSettings().scaled(SPEED)
JOIN = rule("user:spark", Right.JOIN, "orders/#", "billing")
READ, PUBLISH = rule("user:spark", Right.READ, "orders/#"), rule("user:spark", Right.PUBLISH, "orders/#")
WATCH = rule("user:spark", Right.WATCH, "orders/#", "b*")


class AskingNode:
    """A node that asks who calls, with rights that it has read, and tokens of users."""

    def __init__(self, url: str, conn: Connection, fleet: Fleet, environment: pytest.MonkeyPatch) -> None:
        self.url, self.conn, self._environment = url, conn, environment
        elsewhere = rule("user:spark", Right.JOIN, "bills/#")
        for each in (JOIN, READ, PUBLISH, WATCH, elsewhere, rule("user:third", Right.JOIN, "#")):
            allow(conn, each)
        self.tokens = {name: token_of(conn, f"user:{name}") for name in ("spark", "other", "third")}
        self.address = serve_asking(fleet, conn)

    def show(self, user: str) -> None:
        """Have clients of this process show the user's token."""
        self._environment.setenv("SUBLET_TOKEN", self.tokens[user])

    def rows(self, statement: str) -> list[Any]:
        return self.conn.execute(statement.encode()).fetchall()


@pytest.fixture
def node(database: str, conn: Connection, empty_fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> AskingNode:
    return AskingNode(database, conn, empty_fleet, monkeypatch)


@pytest.fixture(params=["database", "nodes"])
def through(node: AskingNode, request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return the transport of a session."""
    return {"transport": request.param} | ({"nodes": [node.address]} if request.param == "nodes" else {"url": node.url})


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


def wait_for_streams(session: Session) -> None:
    eventually(lambda: polled(session) == 0 and len(session.assignment()) == 2, WAIT_S)


def poll_to_the_end(session: Session) -> str:
    """Why it ended."""
    with pytest.raises(SubscriptionEnded) as ended:
        eventually(lambda: polled(session) < 0, WAIT_S)
    return f"{ended.value.reason}: {ended.value}"


def test_a_member_with_the_right_consumes(node: AskingNode, through: dict[str, Any]) -> None:
    publish(node.url, 100)
    node.show("spark")
    with Session(GROUP, **through, name="s", starting_position="earliest", settings=FAST) as session:
        found: list[int] = []
        eventually(lambda: found.append(polled(session)) or sum(found) == 100, WAIT_S)  # type: ignore[func-returns-value]


def test_a_session_without_the_right_is_denied(node: AskingNode) -> None:
    with Session(GROUP, node.url, settings=FAST) as session:
        assert "denied: " in (why := poll_to_the_end(session))
        assert "SUBLET_TOKEN" in why
    node.show("other")
    with Session(GROUP, node.url, settings=FAST) as session:
        assert "user:other has no right to join 'orders/#' in group 'billing'" in poll_to_the_end(session)
    assert node.conn.execute("select count(*) from consumer_group").fetchone() == (0,), "nor is the group made"


@pytest.mark.conforms("X5")
def test_a_sessions_name_is_not_another_principals(node: AskingNode, through: dict[str, Any]) -> None:
    """Whether it is drawn in the database or at the node, until somebody releases it. A session that would only be
    shown under it joins without a name."""
    node.show("spark")
    with Session(GROUP, **through, name="etl", settings=FAST) as session:
        wait_for_streams(session)
        node.show("third")
        with pytest.raises((PermissionDenied, SubscriptionEnded), match=r"'etl' of .* is another principal's"):
            open_and_poll(through)
        assert polled(session) == 0
        assert len(session.assignment()) == 2
        with Session(GROUP, **through, name="etl", is_name_stable=False, settings=FAST) as other:
            eventually(lambda: polled(session) == polled(other) == 0 and len(other.assignment()) == 1, WAIT_S)
            held = "select coalesce(session, '-') from lending where status = 'held' order by 1"
            assert node.rows(held) == [("-",), ("etl",)]
        release(node.conn, Subscription.parse(GROUP), "etl")
        with Session(GROUP, **through, name="etl", settings=FAST) as other:
            wait_for_streams(other)
            assert "fenced" in poll_to_the_end(session)


def open_and_poll(through: dict[str, Any]) -> None:
    with Session(GROUP, **through, name="etl", settings=FAST) as session:
        eventually(lambda: polled(session) < 0, WAIT_S)


def test_a_member_that_loses_its_right_is_denied(node: AskingNode) -> None:
    """And another gets its streams, though it had planned what it would keep for a day."""
    node.show("spark")
    with Session(GROUP, node.url, name="one", settings=FAST) as session:
        wait_for_streams(session)
        publish(node.url, 100)
        planned = "jsonb_build_object('grant_id', grant_id, 'start', 0, 'end', 1, 'hold_s', 86400, 'consumed', null)"
        assert (
            node.conn.execute(f"update lending set in_doubt = {planned}, planned_by = session".encode()).rowcount == 2
        )
        node.show("third")
        revoke(node.conn, JOIN)
        eventually(lambda: node.conn.execute("select from lending where session = 'one'").rowcount == 0, WAIT_S)
        assert node.conn.execute("select count(*) from lending_history where redelivery_end > 0").fetchone() == (2,)
        assert "denied" in (why := poll_to_the_end(session))
        assert "user:spark has no right to join" in why
    with Session(GROUP, node.url, settings=FAST) as session:
        wait_for_streams(session)


def test_a_revoked_token_ends_its_session(node: AskingNode) -> None:
    """One that was used has the day."""
    node.show("spark")
    token_id = node.tokens["spark"][4:12]
    with Session(GROUP, node.url, settings=FAST) as session:
        wait_for_streams(session)
        used = "select token_id from token where last_used is not null"
        eventually(lambda: node.rows(used) == [(token_id,)], WAIT_S)
        revoke_token(node.conn, token_id)
        assert "denied" in poll_to_the_end(session)


def test_a_token_is_replaced_while_its_bearer_runs(
    node: AskingNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text(node.tokens["spark"])
    file.chmod(0o600)
    monkeypatch.setenv("SUBLET_TOKEN_FILE", str(file))
    second = token_of(node.conn, "user:spark")
    eventually(lambda: is_known(node.address, second), WAIT_S)
    with Session(GROUP, node.url, settings=FAST) as session:
        wait_for_streams(session)
        grants = node.rows("select grant_id from lending order by 1")
        file.write_text(second)
        revoke_token(node.conn, node.tokens["spark"][4:12])
        eventually(lambda: not is_known(node.address, node.tokens["spark"]), WAIT_S)
        publish(node.url, 10)
        eventually(lambda: polled(session) > 0, WAIT_S)
        assert node.rows("select grant_id from lending order by 1") == grants, "it was not let go"


@pytest.mark.conforms("E39")
def test_a_deleted_stream_is_gone_for_its_reader(node: AskingNode) -> None:
    """A member may read on before it is notified that the stream was taken from its group; of others nobody reads."""
    publish(node.url, 1)
    read = "select stream_id, generation_id from stream where head > 0"
    ((stream, generation),) = node.rows(read)
    rollover(node.conn, "default")
    node.conn.execute("update space set retention_s = 1")
    node.conn.execute("update generation set closed_at = closed_at - interval '1 hour'")
    cleaner = EmptyGenerationCleaner(rest_s=0)
    eventually(
        lambda: (apply_retention(node.conn), cleaner(node.conn), node.conn.execute(read).rowcount == 0)[-1], WAIT_S
    )
    ((other,),) = node.rows("select min(stream_id) from stream")
    with stub(node.address) as feed:
        asked = [FetchRequest(each, 0, TopicFilter("orders/#"), generation, 1, 1) for each in (stream, other)]
        calls = [feed.Read.future(encode_fetch_request(each), metadata=bearer(node.tokens["spark"])) for each in asked]
        assert decode_fetch_reply(calls[0].result(WAIT_S)) == FetchPositionGone(None)
        assert calls[1].code() is grpc.StatusCode.PERMISSION_DENIED


def test_a_feed_follows_until_its_right_is_revoked(node: AskingNode) -> None:
    node.show("spark")
    with Feed(node.address) as feed, feed.follow("orders/+", "earliest") as reader:
        feed.publish("orders/eu", b"1").result()
        assert reader.read(WAIT_S) is not None
        revoke(node.conn, READ)
        publish(node.url, 1)
        with pytest.raises(PermissionDenied, match="user:spark has no right to read"):
            eventually(lambda: reader.read(5.0) is None, WAIT_S)
    token = node.tokens["spark"]
    node.tokens["nobody"] = token[:-1] + ("A" if token[-1] != "A" else "B")
    node.show("nobody")
    with pytest.raises(Unauthenticated, match="sublet access token"), Feed(node.address) as feed:
        feed.publish("orders/eu", b"1").result()


def test_a_watcher_that_loses_its_right_sees_no_more(node: AskingNode) -> None:
    node.show("spark")

    def next_kind(watch: GroupEventWatcher) -> type:
        return type(watch.next_event(5.0))

    with GroupEventWatcher(GROUP) as watch:
        watch.set_nodes([node.address])
        eventually(lambda: next_kind(watch) is FindLeaderResponse, WAIT_S)
        revoke(node.conn, WATCH)
        eventually(lambda: next_kind(watch) is GroupEventsUnavailable, WAIT_S)
