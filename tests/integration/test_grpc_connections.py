"""Connections to a node's gRPC port on which nothing is said, or nobody answers any more, do not stay."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress

import psutil
import pytest

from sublet import Feed
from sublet_protocol.domain.errors import Unavailable
from sublet_protocol.domain.limits import MAX_CALLS_OF_CONNECTION
from sublet_protocol.pubsub.node_connection import CHANNEL_OPTIONS
from sublet_protocol.tls.channel import open_channel
from sublet_protocol.v1 import sublet_pb2_grpc
from tests.integration.feed_kit import Serving, follow_request, serving
from tests.kit import eventually
from tests.postgres_proxy import PostgresProxy

pytestmark = pytest.mark.conforms("X4")

WAIT_S = 300.0
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY = 1, 3, 4, 6, 7
MAX_CONCURRENT_STREAMS = 3
NO_SETTINGS = bytes((0, 0, 0, SETTINGS, 0, 0, 0, 0, 0))


@pytest.fixture
def node(database: str) -> Iterator[Serving]:
    with serving(database) as found:
        yield found


def connect(node: Serving) -> socket.socket:
    host, _, port = node.address.rpartition(":")
    return socket.create_connection((host, int(port)), WAIT_S)


def frame(kind: int, flags: int, content: bytes) -> bytes:
    """One of the connection's first call."""
    return len(content).to_bytes(3) + bytes((kind, flags, 0, 0, 0, 1)) + content


def frames(connection: socket.socket) -> Iterator[tuple[int, bytes]]:
    """Kind and content, until the other side closes it."""
    with connection.makefile("rb") as read:
        while len(head := read.read(9)) == 9:
            yield head[3], read.read(int.from_bytes(head[:3]))


def reason_to_close(connection: socket.socket) -> bytes:
    return b"; ".join(content[8:] for kind, content in frames(connection) if kind == GOAWAY)


def connections_of(node: Serving) -> int:
    port = int(node.address.rpartition(":")[2])
    return sum(
        each.laddr.port == port and each.status == psutil.CONN_ESTABLISHED
        for each in psutil.Process().net_connections("tcp")
    )


def test_a_connection_has_so_many_calls(node: Serving) -> None:
    with closing(connect(node)) as connection:
        connection.sendall(PREFACE + NO_SETTINGS)
        kind, content = next(frames(connection))
        assert kind == SETTINGS
        assert dict(struct.iter_unpack("!HI", content))[MAX_CONCURRENT_STREAMS] == MAX_CALLS_OF_CONNECTION == 1024


def test_who_resets_a_call_must_answer_a_ping(node: Serving) -> None:
    """Before more of its calls are taken in: one that does so without end stops others for seconds."""
    call = b"\x83\x86\x84" + b"".join(
        b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value
        for name, value in ((b":authority", b"n"), (b"content-type", b"application/grpc"), (b"te", b"trailers"))
    )
    with closing(connect(node)) as connection:
        connection.sendall(PREFACE + NO_SETTINGS + frame(HEADERS, 4, call) + frame(RST_STREAM, 0, bytes(4)))
        assert PING in (kind for kind, _ in frames(connection))


@pytest.mark.long
def test_who_begins_no_http_2_is_let_go(node: Serving) -> None:
    with closing(connect(node)) as silent:
        assert b"handshake timeout" in reason_to_close(silent)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_connections_without_a_call_are_closed(node: Serving) -> None:
    """A client whose connection was closed makes another one for its next call, which does not fail."""
    with ExitStack() as stack:
        feed = stack.enter_context(Feed([node.address], node_timeout_s=0.001))
        feed.history("#")
        idle = stack.enter_context(closing(connect(node)))
        idle.sendall(PREFACE + NO_SETTINGS)
        assert b"connection idle" in reason_to_close(idle)
        idle.close()
        eventually(lambda: connections_of(node) == 0, WAIT_S)
        feed.history("#")


def test_a_distant_node_is_reached_at_once(node: Serving) -> None:
    """By the first attempt of a newcomer, and not when its pauses have grown as long as the way is."""
    with PostgresProxy(f"grpc://{node.address}") as way:
        way.slow(0.3)

        def is_reached() -> bool:
            with Feed([f"127.0.0.1:{way.port}"], node_timeout_s=0.001) as newcomer, suppress(Unavailable):
                newcomer.history("#")
                return True
            return False

        eventually(is_reached, WAIT_S)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_node_that_is_cut_off_is_noticed(node: Serving) -> None:
    """By our clients sooner than by one that leaves to gRPC how long an answer to a ping may take."""
    with ExitStack() as stack:
        networks = [stack.enter_context(PostgresProxy(f"grpc://{node.address}")) for _ in range(2)]
        others = [option for option in CHANNEL_OPTIONS if option[0] != "grpc.http2.ping_timeout_ms"]
        calls = []
        for network, options in zip(networks, (CHANNEL_OPTIONS, others), strict=True):
            channel = stack.enter_context(open_channel(f"127.0.0.1:{network.port}", options))
            calls.append(sublet_pb2_grpc.FeedStub(channel).Follow(follow_request()))
        eventually(lambda: node.feed.readers.inside == 2, WAIT_S)
        for network in networks:
            network.hold()
        ours, leaving_it = calls
        eventually(ours.done, WAIT_S)
        assert not leaving_it.done()
        eventually(lambda: node.feed.readers.inside == 0, WAIT_S, "the node does not notice it")
