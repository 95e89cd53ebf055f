"""No request costs a server much before it is refused, be it a stranger's: each method has a bound."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import psycopg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sublet_borrower.spark.job.driver_endpoint import DriverReportServer
from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.limits import (
    MAX_BATCHES_OF_PRINCIPAL,
    MAX_COMMANDS,
    MAX_ITEMS,
    MAX_PUBLIC_CALLS_OF_ADDRESS,
    MAX_PUBLIC_REQUEST_BYTES,
    MAX_SESSION_REQUEST_BYTES,
)
from sublet_protocol.gate.client_address_counts import to_source
from sublet_protocol.gate.public_call_limiter import parse_host
from sublet_protocol.gate.rpc_rights import RPC_RIGHTS
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_storage.db.connect import connect
from tests.integration.access_kit import allow, bearer, rule, serve_asking, token_of
from tests.integration.test_gate_rpcs import commands, session
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet

pytestmark = pytest.mark.conforms("X4")

METHODS = [
    f"/{service.full_name}/{method.name}"
    for file in (pb.DESCRIPTOR, health_pb2.DESCRIPTOR)
    for service in file.services_by_name.values()
    for method in service.methods
]
EMPTY_STREAMS = b"\x1a\x00" * 300_000
"""The streams of a progress, with nothing in them."""


@pytest.fixture(scope="module")
def conn(shared_database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(shared_database) as connection:
        yield connection


@pytest.fixture(scope="module")
def tokens(conn: psycopg.Connection[Any]) -> dict[str, str]:
    for name in ("member", "next"):
        allow(conn, rule(f"user:{name}", Right.JOIN, "orders/#"))
    allow(conn, rule("user:publisher", Right.PUBLISH, "orders/#"))
    return {name: token_of(conn, f"user:{name}") for name in ("member", "next", "publisher", "nobody")}


@pytest.fixture(scope="module")
def address(idle_fleet: Fleet, tokens: dict[str, str], conn: psycopg.Connection[Any]) -> str:
    """The address of a node that authenticates callers."""
    return serve_asking(idle_fleet, conn)


@pytest.fixture
def node(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


@pytest.fixture
def driver() -> Iterator[str]:
    """The address of a Spark driver's endpoint."""
    endpoint = DriverReportServer("127.0.0.1", "127.0.0.1", lambda: None)
    yield endpoint.address
    endpoint.close()


def refusal(channel: grpc.Channel, method: str, raw: bytes, token: str | None = None) -> tuple[grpc.StatusCode, str]:
    """Return the answer to a client without the proto or sublet's library."""
    call = channel.unary_stream(method)(raw, timeout=WAIT_S, metadata=bearer(token))
    with pytest.raises(grpc.RpcError) as refused:
        next(iter(call))
    return refused.value.code(), str(refused.value.details())


def progress(streams: bytes) -> bytes:
    """A command."""
    return _field(3, _field(3, streams))


def _field(number: int, content: bytes) -> bytes:
    length, size = bytearray(), len(content)
    while size > 127:
        length.append(size & 127 | 128)
        size >>= 7
    return bytes([number << 3 | 2, *length, size]) + content


def of_commands(*contents: bytes) -> bytes:
    return pb.CommandBatch(protocol_version=PROTOCOL_VERSION).SerializeToString() + b"".join(
        _field(4, content) for content in contents
    )


def test_each_method_has_a_bound(node: grpc.Channel, tokens: dict[str, str]) -> None:
    """One byte more is refused unparsed; what is as large as that, and no request at all, after it was parsed."""
    assert set(METHODS) == set(RPC_RIGHTS)
    for method in METHODS:
        token = tokens["publisher" if method.endswith("Publish") else "nobody"]
        limit = RPC_RIGHTS[method].max_bytes
        code, text = refusal(node, method, bytes(limit + 1), token)
        assert (code, f"limit of this method is {limit}" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), method
        code, text = refusal(node, method, b"\xff" * limit, token)
        assert (code, "cannot be parsed" in text) == (grpc.StatusCode.INVALID_ARGUMENT, True), method


def test_a_strangers_empty_fields_are_not_parsed(node: grpc.Channel) -> None:
    """Parsed, they are a request of 0 bytes."""
    for method in ("Check", "Watch"):
        code, text = refusal(node, f"/grpc.health.v1.Health/{method}", b"\x0a\x00" * MAX_PUBLIC_REQUEST_BYTES)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"a request of {2 * MAX_PUBLIC_REQUEST_BYTES} bytes" in text


@pytest.mark.parametrize(
    ("raw", "story"),
    [
        (of_commands(progress(EMPTY_STREAMS)), "300000 items"),
        (of_commands(*[progress(b"\x1a\x00" * (MAX_ITEMS + 1))] * 30), f"{MAX_ITEMS + 1} items"),
        (of_commands(*[b""] * 300_000), "300000 commands"),
        (of_commands(*[progress(b"")] * (MAX_COMMANDS + 1)), "1001 commands"),
    ],
)  # fmt: skip
def test_many_empty_items_are_refused(node: grpc.Channel, tokens: dict[str, str], raw: bytes, story: str) -> None:
    """By their number, and none is looked at after those that are too many."""
    assert len(raw) < MAX_SESSION_REQUEST_BYTES
    code, text = refusal(node, "/sublet.v1.Session/Commands", raw, tokens["nobody"])
    assert (code, text.startswith(story)) == (grpc.StatusCode.INVALID_ARGUMENT, True), text


def test_no_server_takes_compressed_requests(address: str, driver: str, tokens: dict[str, str]) -> None:
    for server in (address, driver):
        with grpc.insecure_channel(server, compression=grpc.Compression.Gzip) as channel:
            for method in ("/sublet.v1.Session/Commands", "/grpc.health.v1.Health/Check"):
                code, text = refusal(channel, method, bytes(1_000), tokens["nobody"])
                assert (code, "ompression" in text) == (grpc.StatusCode.UNIMPLEMENTED, True), (method, code, text)


def test_a_driver_has_the_bounds_too(driver: str) -> None:
    with grpc.insecure_channel(driver) as channel:
        for streams, story in ((EMPTY_STREAMS * 2, "limit of this method is"), (EMPTY_STREAMS, "300000 items")):
            assert story in refusal(channel, "/sublet.v1.Session/Commands", of_commands(progress(streams)))[1]


@contextmanager
def unfinished() -> Iterator[Callable[[], Iterator[bytes]]]:
    """Yield what makes requests of which nothing comes before the end."""
    over = threading.Event()

    def request() -> Iterator[bytes]:
        over.wait()
        yield b""

    try:
        yield request
    finally:
        over.set()


@pytest.mark.long
def test_a_sessions_request_comes_in_time(node: grpc.Channel, tokens: dict[str, str]) -> None:
    """One that is left unfinished is not kept, and another principal's is read meanwhile."""
    call, nobody = node.stream_unary("/sublet.v1.Session/Commands"), bearer(tokens["nobody"])
    with unfinished() as request:
        calls = [call.future(request(), timeout=WAIT_S, metadata=nobody) for _ in range(MAX_BATCHES_OF_PRINCIPAL)]
        empty = pb.CommandBatch().SerializeToString()
        code, _ = refusal(node, "/sublet.v1.Session/Commands", empty, tokens["member"])
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert {each.code() for each in calls} == {grpc.StatusCode.DEADLINE_EXCEEDED}


@pytest.mark.conforms("X5")
def test_a_poll_is_by_the_agents_principal(node: grpc.Channel, tokens: dict[str, str]) -> None:
    """Another gets nothing, though it knows the agent's key."""
    mine = commands()
    key: dict[str, Any] = {"subscriber_id": mine.subscriber_id, "agent_key": mine.agent_key}
    name = key | {"protocol_version": PROTOCOL_VERSION}
    poll, batch = pb.PollRequest(**name).SerializeToString(), pb.CommandBatch(**name, number=2).SerializeToString()
    stranger = pb.PollRequest(**session()).SerializeToString()

    def call(method: str, raw: bytes, token: str) -> bytes:
        answer: bytes = node.unary_unary(f"/sublet.v1.Session/{method}")(raw, timeout=WAIT_S, metadata=bearer(token))
        return answer

    call("Commands", mine.SerializeToString(), tokens["member"])
    for method, raw in (("Poll", poll), ("Commands", batch)):
        code, text = refusal(node, f"/sublet.v1.Session/{method}", raw, tokens["nobody"])
        assert (code, "is not user:nobody's" in text) == (grpc.StatusCode.PERMISSION_DENIED, True), text
    assert pb.PollReply.FromString(call("Poll", poll, tokens["member"])).incarnation
    assert call("Poll", stranger, tokens["nobody"]), "who has registered no agent is no other's"


def reclaim(batch: pb.CommandBatch, stream_id: int, *, more: bool = False) -> pb.CommandBatch:
    """Return a batch that requests the leader, and names one stream."""
    named = pb.CommandBatch()
    named.CopyFrom(batch)
    del named.commands[1:]
    wanted = named.commands[0].message.leader_wanted
    wanted.more = more
    wanted.reclaim.append(pb.HeldGrant(stream_id=stream_id, grant_id=1, position=1))
    return named


@pytest.mark.conforms("X5")
def test_parts_end_with_their_agents_subscription(node: grpc.Channel, tokens: dict[str, str]) -> None:
    """Another principal that knows the agent's key is refused until the node has dropped the agent, and then goes on
    from nothing."""
    mine = commands()
    first, last = reclaim(mine, 998, more=True), reclaim(mine, 999)
    last.subscriber_id = f"{mine.subscriber_id[:-2]}.2"
    poll = pb.PollRequest(subscriber_id=last.subscriber_id, agent_key=last.agent_key, hold_ms=100)
    poll.protocol_version = PROTOCOL_VERSION

    def call(method: str, request: pb.CommandBatch | pb.PollRequest, name: str) -> bytes:
        call = node.unary_unary(f"/sublet.v1.Session/{method}")
        answer: bytes = call(request.SerializeToString(), timeout=WAIT_S, metadata=bearer(tokens[name]))
        return answer

    def revoked() -> set[int]:
        """Request the leader, perhaps again, as there may be none yet, and return the streams that are lost."""
        try:
            call("Commands", last, "next")
        except grpc.RpcError:
            return set()
        last.number += 1
        messages = pb.PollReply.FromString(call("Poll", poll, "next")).messages
        return {each.to_borrower.revoked.stream_id for each in messages if each.to_borrower.HasField("revoked")}

    call("Commands", first, "member")
    assert eventually(revoked, WAIT_S) == {999}


def refused(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    code: grpc.StatusCode = raised.value.code()
    return code


@pytest.mark.long
def test_a_strangers_message_is_not_waited_for(node: grpc.Channel) -> None:
    """It is refused by its head: what it has sent of a message is not kept. Health has to read a request, and waits for
    it no longer than it says."""
    with unfinished() as request:

        def call(method: str) -> grpc.StatusCode:
            return refused(lambda: node.stream_unary(method)(request(), timeout=WAIT_S))

        for name in ("Feed/Publish", "Feed/Heads", "Session/Poll", "Session/Commands"):
            assert call(f"/sublet.v1.{name}") is grpc.StatusCode.UNAUTHENTICATED
        assert call("/x/y") is grpc.StatusCode.PERMISSION_DENIED
        assert call("/grpc.health.v1.Health/Check") is grpc.StatusCode.DEADLINE_EXCEEDED


def head_of_call(path: bytes, stream: int, more: bytes = b"") -> bytes:
    """A frame of HTTP/2 that begins a call, and ends it; `more`: further fields, encoded."""
    fields = ((b":path", path), (b":authority", b"n"), (b"content-type", b"application/grpc"), (b"te", b"trailers"))
    texts = (bytes((len(text),)) + text for field in fields for text in field)
    block = b"\x83\x86" + b"".join(b"\0" + name + value for name, value in zip(texts, texts, strict=True)) + more
    return len(block).to_bytes(3) + b"\x01\x05" + stream.to_bytes(4) + block


def assert_the_next_call_is_answered(address: str, call: bytes) -> None:
    """After this one, over the same connection, and over others."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection, connection.makefile("rb") as read:
        settings = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + call + head_of_call(b"/x/y", 3))
        while len(head := read.read(9)) == 9 and head[3:4] + head[5:] != b"\x01\0\0\0\x03":
            read.read(int.from_bytes(head[:3]))
    assert head, "the node has closed the connection, and not answered the second call"
    with grpc.insecure_channel(address) as channel:
        assert is_answered(health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service="live"))


def test_a_path_that_is_no_text_ends_no_server(address: str) -> None:
    """With grpcio from 1.84 on it did: the node's port was closed, to all, and the node led on."""
    assert_the_next_call_is_answered(address, head_of_call(b"/\xff", 1))


def test_a_strangers_headers_are_not_logged(address: str, idle_fleet: Fleet) -> None:
    """Each of three bytes was a line of a hundred on the node's standard error: a stranger could fill its disk."""
    before = idle_fleet.nodes["n1"].output()
    assert_the_next_call_is_answered(address, head_of_call(b"/x/y", 1, b"\x08\x01x" * 20))
    assert idle_fleet.nodes["n1"].output() == before


def test_watches_of_health_are_bounded(node: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(node)
    large = health_pb2.HealthCheckRequest(service="x" * MAX_PUBLIC_REQUEST_BYTES)
    assert refused(lambda: health.Check(large, timeout=WAIT_S)) is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(lambda: next(health.Watch(large, timeout=WAIT_S))) is grpc.StatusCode.INVALID_ARGUMENT
    own = health_pb2.HealthCheckRequest(service="live")
    watches = [health.Watch(own) for _ in range(MAX_PUBLIC_CALLS_OF_ADDRESS)]
    assert {next(each).status for each in watches} == {health_pb2.HealthCheckResponse.SERVING}
    assert refused(lambda: health.Check(own, timeout=WAIT_S)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    for each in watches:
        each.cancel()
    eventually(lambda: is_answered(health, own), WAIT_S)


def is_answered(health: Any, request: Any) -> bool:
    try:
        return bool(health.Check(request, timeout=WAIT_S).status == health_pb2.HealthCheckResponse.SERVING)
    except grpc.RpcError:
        return False


def test_an_address_is_one_without_its_port() -> None:
    def source(peer: str) -> str:
        return to_source(parse_host(peer))

    assert source("ipv4:10.0.0.1:4711") == "10.0.0.1"
    assert source("ipv6:%5B2001:db8::1%5D:4711") == source("ipv6:[2001:db8::2]:5") == "2001:db8::/64"
    assert source("unix:") == "unix:"
