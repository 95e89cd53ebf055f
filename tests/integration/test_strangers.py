"""What somebody without a token can cost a node."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psycopg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sublet_protocol.domain.limits import MAX_PUBLIC_CALLS_OF_ADDRESS, MAX_PUBLIC_REQUEST_BYTES
from sublet_protocol.gate.client_address_counts import to_source
from sublet_protocol.gate.public_call_limiter import parse_host
from tests.integration.access_kit import serve_asking
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet


@pytest.fixture
def address(empty_fleet: Fleet, conn: psycopg.Connection[Any]) -> str:
    """Return the address of a node that authenticates callers."""
    return serve_asking(empty_fleet, conn)


@pytest.fixture
def node(address: str) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(address) as channel:
        yield channel


def refused(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    code: grpc.StatusCode = raised.value.code()
    return code


@pytest.mark.long
@pytest.mark.conforms("X4")
def test_a_strangers_message_is_not_waited_for(node: grpc.Channel) -> None:
    """It is refused by its head: what it has sent of a message is not kept. Health has to read a request, and waits for
    it no longer than it says."""
    over = threading.Event()

    def unfinished() -> Iterator[bytes]:
        over.wait()
        yield b""

    def call(method: str) -> grpc.StatusCode:
        return refused(lambda: node.stream_unary(method)(unfinished(), timeout=WAIT_S))

    try:
        for name in ("Feed/Publish", "Feed/Heads", "Session/Poll", "Session/Commands"):
            assert call(f"/sublet.v1.{name}") is grpc.StatusCode.UNAUTHENTICATED
        assert call("/x/y") is grpc.StatusCode.PERMISSION_DENIED
        assert call("/grpc.health.v1.Health/Check") is grpc.StatusCode.INVALID_ARGUMENT
    finally:
        over.set()


def head_of_call(path: bytes, stream: int) -> bytes:
    """A frame of HTTP/2 that begins a call, and ends it."""
    fields = ((b":path", path), (b":authority", b"n"), (b"content-type", b"application/grpc"), (b"te", b"trailers"))
    texts = (bytes((len(text),)) + text for field in fields for text in field)
    block = b"\x83\x86" + b"".join(b"\0" + name + value for name, value in zip(texts, texts, strict=True))
    return len(block).to_bytes(3) + b"\x01\x05" + stream.to_bytes(4) + block


@pytest.mark.conforms("X4")
def test_a_path_that_is_no_text_ends_no_server(address: str) -> None:
    """With grpcio from 1.84 on it did: the node's port was closed, to all, and the node led on."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), WAIT_S) as connection, connection.makefile("rb") as read:
        settings = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
        calls = head_of_call(b"/\xff", 1) + head_of_call(b"/x/y", 3)
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + settings + calls)
        while len(head := read.read(9)) == 9 and head[3:4] + head[5:] != b"\x01\0\0\0\x03":
            read.read(int.from_bytes(head[:3]))
    assert head, "the node has closed the connection, and not answered the second call"
    with grpc.insecure_channel(address) as channel:
        assert is_answered(health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest(service="live"))


@pytest.mark.conforms("X4")
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
