"""What somebody without a token can cost a node."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import psycopg
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sublet_protocol.domain.limits import MAX_OPEN_CALLS_OF_ADDRESS, MAX_OPEN_REQUEST_BYTES
from sublet_protocol.gate.client_address_counts import to_source
from sublet_protocol.gate.unauthenticated_call_limiter import parse_host
from tests.integration.access_kit import serve_asking
from tests.kit import eventually
from tests.kit_nodes import Fleet

WAIT_S = 30.0


@pytest.fixture
def node(empty_fleet: Fleet, conn: psycopg.Connection[Any]) -> Iterator[grpc.Channel]:
    """One that asks who calls."""
    with grpc.insecure_channel(serve_asking(empty_fleet, conn)) as channel:
        yield channel


def refused(call: Callable[[], Any]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    code: grpc.StatusCode = raised.value.code()
    return code


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


@pytest.mark.conforms("X4")
def test_watches_of_health_are_bounded(node: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(node)
    large = health_pb2.HealthCheckRequest(service="x" * MAX_OPEN_REQUEST_BYTES)
    assert refused(lambda: health.Check(large, timeout=WAIT_S)) is grpc.StatusCode.INVALID_ARGUMENT
    assert refused(lambda: next(health.Watch(large, timeout=WAIT_S))) is grpc.StatusCode.INVALID_ARGUMENT
    own = health_pb2.HealthCheckRequest(service="live")
    watches = [health.Watch(own) for _ in range(MAX_OPEN_CALLS_OF_ADDRESS)]
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
