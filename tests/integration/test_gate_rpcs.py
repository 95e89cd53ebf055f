"""Every RPC of a node that asks who calls: real processes, real Postgres, and a client with the proto alone."""

from __future__ import annotations

import asyncio
import gc
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import grpc
import grpc.aio
import pytest

from sublet_leader.feed.service import FeedLimits
from sublet_protocol.domain.access.rights import AccessRules, AccessSnapshot, Right, ValidToken
from sublet_protocol.domain.access.token import NewToken
from sublet_protocol.domain.limits import (
    MAX_BATCHES_OF_PRINCIPAL,
    MAX_COMMANDS,
    MAX_GROUP_CHARACTERS,
    MAX_SUBSCRIBERS_OF_PRINCIPAL,
    MAX_UNREAD_BYTES_OF_PRINCIPAL,
    MAX_WATCHERS_OF_PRINCIPAL,
)
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.gate.access_cache import AccessCache
from sublet_protocol.gate.bounded_request_parser import RETRY_AFTER_METADATA
from sublet_protocol.gate.gate import AccessGate
from sublet_protocol.gate.interceptor import GateInterceptor
from sublet_protocol.gate.rpc_rights import RPC_RIGHTS
from sublet_protocol.messages.agent_secret import derive_agent_id
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin.access_tokens import revoke_token
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions
from tests.integration.access_kit import allow, bearer, expired_token, revoked_token, rule, serve_asking, token_of
from tests.integration.feed_kit import batch
from tests.integration.log_kit import Connection
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet

pytestmark = pytest.mark.conforms("X1")

GROUP = "$share/billing/orders/#"
V: dict[str, Any] = {"protocol_version": PROTOCOL_VERSION}


def session() -> dict[str, Any]:
    key = secrets.token_bytes(32)
    return {**V, "subscriber_id": f"{derive_agent_id(key)}.1", "agent_key": key}


def commands(subscription: str = GROUP) -> pb.CommandBatch:
    me = session()
    wanted = pb.LeaderWanted(
        borrower_id=f"{me['subscriber_id'][:-2]}/1", subscription=subscription, weight=1, starting_position="earliest"
    )
    query = f'{{"watch": "{subscription}"}}'.encode()
    return pb.CommandBatch(
        **me,
        number=1,
        commands=[
            pb.Command(message=pb.ToLeader(leader_wanted=wanted)),
            pb.Command(subscribe=pb.Subject(channel=pb.CHANNEL_GROUP, key=subscription)),
            pb.Command(subscribe=pb.Subject(channel=pb.CHANNEL_STREAM, key="1")),
            pb.Command(group_event=query),
        ],
    )


REQUESTS: dict[str, Callable[[str], Any]] = {
    "Commands": lambda topic: commands(f"$share/billing/{topic}"),
    "Poll": lambda topic: pb.PollRequest(**session()),
    "Publish": lambda topic: pb.PublishRequest(
        **V, producer="p", incarnation=1, number=1, messages=batch({"topic": f"{topic.rstrip('#')}eu"})
    ),
    "History": lambda topic: pb.HistoryRequest(**V, filter=topic, starting_position="earliest", subscription_id="s"),
    "Follow": lambda topic: pb.FollowRequest(**V, filter=topic, starting_position="earliest", subscription_id="s"),
    "Read": lambda topic: pb.FetchRequest(
        **V, stream_id=1, filter=topic, generation_id=1, limit_bytes=1000, grant_id=1
    ),
    "Heads": lambda topic: pb.HeadsRequest(**V, stream_ids=[1]),
    "SessionEpoch": lambda topic: pb.SessionEpochRequest(**V, subscription=f"$share/billing/{topic}", session="s"),
}
METHODS = [
    (f"/{service.full_name}/{method.name}", method)
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
]
NAMES = [name for name, _ in METHODS]
HEADS = next(each for each in METHODS if each[1].name == "Heads")


Tokens = dict[str, str | None]


@pytest.fixture(scope="module")
def conn(shared_database: str) -> Iterator[Connection]:
    with connect(shared_database) as connection:
        assert connection.execute("select generation_id from stream where stream_id = 1").fetchall() == [(1,)]
        yield connection


@pytest.fixture(scope="module")
def tokens(shared_database: str, conn: Connection) -> Tokens:
    """One of each kind. What they may do is given before the node starts."""
    with closing(PostgresGroupStore(shared_database)) as store:
        store.declare_group(Subscription.parse(GROUP), GroupOptions())
    for right in Right:
        allow(conn, rule("user:other", right, "bills/#"))
    counts = all_rights(conn, "user:right")
    return {
        "none": None,
        "wrong": counts[:-1] + ("A" if counts[-1] != "A" else "B"),
        "no token": "nonsense",
        "expired": expired_token(conn, "user:right"),
        "revoked": revoked_token(conn, "user:right"),
        "other": token_of(conn, "user:other"),
        "right": counts,
    }


def all_rights(conn: Connection, principal: str) -> str:
    """Return a token of a principal that may do all with orders; one of a test's own, where it uses up its limits."""
    for right in Right:
        allow(conn, rule(principal, right, "orders/#"))
    return token_of(conn, principal)


@pytest.fixture(scope="module")
def address(idle_fleet: Fleet, tokens: Tokens, conn: Connection) -> str:
    """The address of a node that authenticates callers, one for all of these tests. It counts nobody as silent who
    has much to send on a busy machine."""
    return serve_asking(idle_fleet, conn, SUBLET_LEASE_DURATION_S="120", SUBLET_POLL_HOLD_S="60")


@pytest.fixture(scope="module")
def node(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


def messages_stored(conn: Connection) -> int:
    ((count,),) = conn.execute("select sum(head)::bigint from stream").fetchall()
    return int(count)


def call(node: grpc.Channel, name: str, method: Any, request: Any, token: str | None) -> Any:
    """The first reply; raise `grpc.RpcError`."""
    reply = getattr(pb, method.output_type.name).FromString
    if method.server_streaming:
        pages = node.unary_stream(name, request.SerializeToString, reply)(
            request, timeout=WAIT_S, metadata=bearer(token)
        )
        try:
            return next(iter(pages))
        finally:
            pages.cancel()
    return node.unary_unary(name, request.SerializeToString, reply)(request, timeout=WAIT_S, metadata=bearer(token))


def refusal(node: grpc.Channel, name: str, method: Any, request: Any, token: str | None) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as raised:
        call(node, name, method, request, token)
    return raised.value.code(), raised.value.details()


def test_every_rpc_has_a_row() -> None:
    health = {name for name, row in RPC_RIGHTS.items() if row.is_public}
    assert set(RPC_RIGHTS) - health == set(NAMES)
    assert {name.split("/")[1] for name in health} == {"grpc.health.v1.Health"}
    assert {name.rpartition("/")[2] for name in NAMES} == set(REQUESTS), "and a request of this test"


def test_no_rpc_answers_without_a_right(node: grpc.Channel, tokens: Tokens) -> None:
    texts = set()
    for name, method in METHODS:
        for kind in ("none", "wrong", "no token", "expired", "revoked"):
            for topic in ("orders/#", "nothing/#"):
                code, text = refusal(node, name, method, REQUESTS[method.name](topic), tokens[kind])
                assert code is grpc.StatusCode.UNAUTHENTICATED, (name, kind)
                texts.add(text)
    assert len(texts) == 1, "whatever it is that is wrong, and whether or not the thing exists"
    denies_all(node, "user:other", tokens["other"])


def denies_all(node: grpc.Channel, principal: str, token: str | None = None) -> None:
    """Each RPC, to a caller that is known and has no right to what it asks for."""
    for name, method in METHODS:
        request = REQUESTS[method.name]("orders/#")
        if method.name == "Commands":
            errors = call(node, name, method, request, token).errors
            assert [error.index for error in errors] == [0, 1, 3], errors
            assert all(f"{principal} has no right to" in error.text for error in errors)
        elif method.name == "Heads":
            assert not call(node, name, method, request, token).heads
        elif method.name == "Poll":
            call(node, name, method, request, token)
        else:
            existing = refusal(node, name, method, request, token)
            code, text = refusal(node, name, method, REQUESTS[method.name]("nothing/#"), token)
            assert existing[0] is code is grpc.StatusCode.PERMISSION_DENIED, name
            assert existing[1].replace("orders", "nothing") == text, name


def answers_all(node: grpc.Channel, token: str | None = None) -> None:
    for name, method in METHODS:
        reply = call(node, name, method, REQUESTS[method.name]("orders/#"), token)
        if method.name == "Commands":
            assert not reply.errors
        if method.name == "Heads":
            assert len(reply.heads) == 1


def test_every_rpc_answers_the_right_principal(node: grpc.Channel, tokens: Tokens, conn: Connection) -> None:
    answers_all(node, tokens["right"])
    found = conn.execute("select distinct producer_id from producer where producer_id like 'feed/%'").fetchall()
    assert found == [("feed/user:right/p",)]


def test_a_method_without_a_row_is_refused(node: grpc.Channel, tokens: Tokens) -> None:
    for name in ("/sublet.v1.Feed/Drop", "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo", "/x/y"):
        with pytest.raises(grpc.RpcError) as raised:
            node.unary_unary(name)(b"", timeout=WAIT_S, metadata=bearer(tokens["right"]))
        assert raised.value.code() is grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize("name", ["Commands", "Poll", "Publish"])
def test_a_request_after_a_revocation_is_refused(
    node: grpc.Channel, tokens: Tokens, conn: Connection, name: str
) -> None:
    """Though its call was begun before; some of these wait for their turn to be read, too."""
    method, described = next(each for each in METHODS if each[1].name == name)
    is_revoked, token, before = threading.Event(), token_of(conn, "user:right"), messages_stored(conn)

    def late() -> Iterator[bytes]:
        is_revoked.wait(WAIT_S)
        yield REQUESTS[name]("orders/#").SerializeToString()

    calls = [
        node.stream_unary(method).future(late(), timeout=WAIT_S, metadata=bearer(token))
        for _ in range(MAX_BATCHES_OF_PRINCIPAL + 2)
    ]
    try:
        call(node, *HEADS, REQUESTS["Heads"]("orders/#"), token)  # begun after these
        revoke_token(conn, token[4:12])
        eventually(lambda: refused_code(node, token) is grpc.StatusCode.UNAUTHENTICATED, WAIT_S)
    finally:
        is_revoked.set()
    assert {each.code() for each in calls} == {grpc.StatusCode.UNAUTHENTICATED}
    assert messages_stored(conn) == before
    call(node, method, described, REQUESTS[name]("orders/#"), tokens["right"])


@pytest.mark.conforms("X4")
def test_who_may_not_publish_is_refused_unread(node: grpc.Channel, tokens: Tokens, conn: Connection) -> None:
    """Its batch is not waited for, and so neither stored nor decoded."""
    over = threading.Event()

    def unfinished() -> Iterator[bytes]:
        over.wait()
        yield b""

    allow(conn, rule("user:reader", Right.READ, "#"))
    publish = node.stream_unary("/sublet.v1.Feed/Publish")
    try:
        with pytest.raises(grpc.RpcError) as refused:
            publish(unfinished(), timeout=WAIT_S, metadata=bearer(token_of(conn, "user:reader")))
    finally:
        over.set()
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "`sublet access allow user:reader publish FILTER`" in refused.value.details()


def refused_code(node: grpc.Channel, token: str | None) -> grpc.StatusCode | None:
    """Return why a call with this token is refused; None where it is answered."""
    try:
        call(node, *HEADS, REQUESTS["Heads"]("orders/#"), token)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        return code
    return None


@pytest.mark.conforms("X4")
def test_a_principal_has_so_many_subscribers(conn: Connection, tokens: Tokens, address: str) -> None:
    """On however many connections. One more is answered when to come again; another principal is served."""

    def poll(channel: grpc.Channel, token: str | None) -> Any:
        return sublet_pb2_grpc.SessionStub(channel).Poll.future(
            pb.PollRequest(**session()), timeout=WAIT_S, metadata=bearer(token)
        )

    many = all_rights(conn, "user:many")
    with ExitStack() as stack:
        own = (("grpc.use_local_subchannel_pool", 1),)
        channels = [stack.enter_context(grpc.insecure_channel(address, own)) for _ in range(3)]
        for number in range(0, MAX_SUBSCRIBERS_OF_PRINCIPAL, 100):
            for call in [poll(channels[number // 100 % 2], many) for _ in range(100)]:
                call.result()
        with pytest.raises(grpc.RpcError) as refused:
            poll(channels[2], many).result()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "user:many has 1000 subscriber ids at this node, which is the limit" in refused.value.details()
        assert dict(refused.value.trailing_metadata())[RETRY_AFTER_METADATA]
        poll(channels[2], tokens["other"]).result()


@pytest.mark.conforms("X4")
def test_a_principal_has_so_many_ids_on_a_key(node: grpc.Channel, conn: Connection, tokens: Tokens) -> None:
    """One more is refused that command alone."""
    token = all_rights(conn, "user:watching")
    wanted = pb.Command(subscribe=pb.Subject(channel=pb.CHANNEL_GROUP, key=GROUP))

    def subscribe() -> list[str]:
        batch = pb.CommandBatch(**session(), number=1, commands=[wanted])
        reply = sublet_pb2_grpc.SessionStub(node).Commands(batch, timeout=WAIT_S, metadata=bearer(token))
        return [error.text for error in reply.errors]

    limit = MAX_WATCHERS_OF_PRINCIPAL
    assert [subscribe() for _ in range(limit)] == limit * [[]]
    (refused,) = subscribe()
    assert refused.startswith(f"{limit} subscriber ids of this principal have subscribed to '{GROUP}' of channel group")


@pytest.mark.conforms("X4")
def test_a_principal_leaves_so_much_unread(node: grpc.Channel, conn: Connection, tokens: Tokens) -> None:
    """Errors of batches, with texts that are wide in memory. Another principal is served meanwhile."""
    stub = sublet_pb2_grpc.SessionStub(node)
    subscription = f"$share/\N{GRINNING FACE}{'g' * (MAX_GROUP_CHARACTERS - 1)}/{'x' * 200}"
    wanted = pb.LeaderWanted(borrower_id="b", subscription=subscription, weight=1, starting_position="earliest")
    batches = [
        pb.CommandBatch(
            **session(), number=1, commands=MAX_COMMANDS * [pb.Command(message=pb.ToLeader(leader_wanted=wanted))]
        )
        for _ in range(MAX_UNREAD_BYTES_OF_PRINCIPAL // (MAX_COMMANDS * 4 * 2 * MAX_GROUP_CHARACTERS))
    ]

    token = token_of(conn, "user:unread")

    def send(request: pb.CommandBatch, token: str | None = token) -> Any:
        return stub.Commands(request, timeout=WAIT_S, metadata=bearer(token))

    def send_all() -> None:
        for request in batches:
            send(request)
            request.number += 1

    with pytest.raises(grpc.RpcError) as refused:
        send_all()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert f"send no more from {MAX_UNREAD_BYTES_OF_PRINCIPAL // 2} on" in refused.value.details()
    assert dict(refused.value.trailing_metadata())[RETRY_AFTER_METADATA]
    assert not send(commands(), tokens["right"]).errors
    for request in batches:
        del request.commands[:]
    send_all()  # who sends the next batch has the errors of the last: the fourth of these is again below the bound


@pytest.mark.conforms("X4")
def test_a_principal_has_half_of_the_readers(node: grpc.Channel, conn: Connection, tokens: Tokens) -> None:
    """And half of the batches to publish, and of the reads of members. Another principal is served meanwhile."""

    def follow(token: str | None, topic: str) -> Any:
        """Return the call, once it counts."""
        call = sublet_pb2_grpc.FeedStub(node).Follow(REQUESTS["Follow"](topic), timeout=WAIT_S, metadata=bearer(token))
        next(call)  # that it has begun; who takes nothing may be ended for others
        return call

    token = all_rights(conn, "user:reading")
    calls = [follow(token, "orders/#") for _ in range(FeedLimits().max_readers // 2)]
    with pytest.raises(grpc.RpcError) as refused:
        next(follow(token, "orders/#"))
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "500 readers are under way of user:reading" in refused.value.details()
    other = follow(tokens["other"], "bills/#")
    for call in [other, *calls]:
        assert call.is_active()
        call.cancel()


class Refusing(sublet_pb2_grpc.FeedServicer, sublet_pb2_grpc.SessionServicer):  # type: ignore[misc]
    async def Publish(self, request: Any, context: Any) -> None:  # noqa: N802 (the service's own spelling)
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "no")

    async def Poll(self, request: Any, context: Any) -> Any:  # noqa: N802 (the service's own spelling)
        return pb.PollReply()


@pytest.mark.conforms("X4")
def test_a_call_that_is_over_keeps_nothing() -> None:
    """Else requests of megabytes would wait for the collector, which counts objects."""
    token, publishes = NewToken.draw(), rule("user:a", Right.PUBLISH, "#")
    valid = {token.token_id: ValidToken(token.digest, "user:a", 1e6)}
    cache = AccessCache(AccessSnapshot("1", AccessRules([publishes]), valid), time.monotonic)

    def calls_in_memory() -> int:
        return sum(type(each).__name__ == "RPCState" for each in gc.get_objects())

    async def test() -> None:
        server = grpc.aio.server(interceptors=(GateInterceptor(AccessGate(cache)),))
        sublet_pb2_grpc.add_FeedServicer_to_server(Refusing(), server)
        sublet_pb2_grpc.add_SessionServicer_to_server(Refusing(), server)
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        before = calls_in_memory()
        async with grpc.aio.insecure_channel(address) as channel:
            metadata = bearer(token.token.reveal())
            for _ in range(20):
                with pytest.raises(grpc.RpcError, match="PERMISSION_DENIED"):
                    await sublet_pb2_grpc.FeedStub(channel).Publish(pb.PublishRequest(), metadata=metadata)
                await sublet_pb2_grpc.SessionStub(channel).Poll(pb.PollRequest(), metadata=metadata)
        deadline = time.monotonic() + WAIT_S
        while calls_in_memory() > before + 2 and time.monotonic() < deadline:
            await asyncio.sleep(0.01)
        assert calls_in_memory() <= before + 2, "those that the server waits for"
        await server.stop(0)

    gc.collect()
    gc.disable()
    try:
        asyncio.run(test())
    finally:
        gc.enable()


def test_health_is_open_and_has_one_word(node: grpc.Channel) -> None:
    reply = node.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=WAIT_S)
    assert reply == b"\x08\x01"


def test_a_batch_is_stored_with_all_topics_or_not(node: grpc.Channel, tokens: Tokens, conn: Connection) -> None:
    messages = batch(*({"topic": topic} for topic in ("orders/eu", "orders/us", "bills/eu")))
    request = pb.PublishRequest(**V, producer="p", incarnation=1, number=1, messages=messages)
    name, method = next(each for each in METHODS if each[1].name == "Publish")
    before = messages_stored(conn)
    code, text = refusal(node, name, method, request, tokens["right"])
    assert (code, "'bills/eu'" in text) == (grpc.StatusCode.PERMISSION_DENIED, True)
    assert messages_stored(conn) == before
