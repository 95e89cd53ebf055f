"""What the tests of the feed share: a node's feed on a port of its own, and requests as a stranger would write them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import pyarrow as pa
import pytest

from sublet_leader.feed.service import FeedLimits, FeedServer
from sublet_protocol.gate.bounded_request_parser import RETRY_AFTER_METADATA
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_protocol.messages.feed_messages import (
    ERROR_METADATA,
    FeedPublishRequest,
    encode_publish,
)
from sublet_protocol.pubsub.server import SERVER_OPTIONS
from sublet_protocol.v1 import sublet_pb2 as pb
from sublet_protocol.v1 import sublet_pb2_grpc
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from tests.kit import eventually
from tests.kit_nodes import Process

Row = dict[str, Any]


class Serving:
    """A feed that serves, on a loop in a thread of its own. `feed` is to be looked at, and not called. `port`: that of
    one that has stopped, say."""

    def __init__(self, url: str, limits: FeedLimits | None = None, port: int = 0) -> None:
        self._url, self._limits, self._port = url, limits, port
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)
        self.feed: FeedServer
        self.address: str

    def start(self) -> None:
        self._thread.start()
        assert self._ready.wait(30)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    async def _serve(self) -> None:
        self._loop, self._over = asyncio.get_running_loop(), asyncio.Event()
        server = grpc.aio.server(options=SERVER_OPTIONS)
        self.feed = FeedServer(self._url, self._limits)
        self.feed.register(server)
        self.address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{self._port}')}"
        await server.start()
        self._ready.set()
        await self._over.wait()
        await server.stop(0.1)
        await self.feed.close()


@contextmanager
def serving(url: str, limits: FeedLimits | None = None) -> Iterator[Serving]:
    server = Serving(url, limits)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def stub(address: str) -> Iterator[Any]:
    """The service, without our client before it."""
    with grpc.insecure_channel(address) as channel:
        yield sublet_pb2_grpc.FeedStub(channel)


def batch(*rows: Row) -> bytes:
    """Messages as they travel; each has a topic, and what else it says."""
    full = [{"timestamp": 0, **row} for row in rows]
    payload: bytes = pa.RecordBatch.from_pylist(full, schema=BLOCK_SCHEMA).serialize().to_pybytes()
    return payload


def publish(address: str, number: int, *rows: Row, producer: str = "p", incarnation: int = 1) -> Any:
    """Publish a batch of that number; the reply."""
    with stub(address) as service:
        return service.Publish(
            encode_publish(FeedPublishRequest(producer, incarnation, number, batch(*rows))), timeout=20
        )


def places(reply: Any) -> set[tuple[int, int, int]]:
    """Return where the messages of a batch lie: {(number in the batch, stream, offset)}."""
    return {
        (row, part.stream_id, part.first_offset + index)
        for part in reply.parts
        for index, row in enumerate(part.rows or range(part.count))
    }


def values(tables: Sequence[pa.Table]) -> list[bytes]:
    return [value for table in tables for value in table.column("value").to_pylist()]


def read_values(reader: Any, count: int, timeout_s: float = 20.0) -> list[bytes]:
    """The next so many values, or fewer if they do not come."""
    found: list[bytes] = []
    while len(found) < count and (table := reader.read(timeout_s)) is not None:
        found += table.column("value").to_pylist()
    return found


def address_of(node: Process) -> str:
    """Return the address of a node's process, once it serves."""
    found = eventually(lambda: re.search(r"serves on (\S+)", node.output()), 60, node.output)
    return found[1]


def follow_request(bookmark: Any = None, starting_position: str = "latest", subscription: str = "s") -> Any:
    """A `FollowRequest` for everything."""
    begin = {"starting_position": starting_position} if bookmark is None else {"bookmark": bookmark}
    return pb.FollowRequest(protocol_version=PROTOCOL_VERSION, filter="#", subscription_id=subscription, **begin)


@contextmanager
def refused(
    text: str | None = None, code: grpc.StatusCode | None = None, *, error: str = "", retry_after_ms: str = ""
) -> Iterator[None]:
    """What is called within is refused by a node, for these reasons."""
    with pytest.raises(grpc.RpcError, match=text and re.escape(text)) as raised:
        yield
    found = dict(raised.value.trailing_metadata())
    assert code in (None, raised.value.code())
    assert error in ("", found.get(ERROR_METADATA))
    assert retry_after_ms in ("", found.get(RETRY_AFTER_METADATA))
