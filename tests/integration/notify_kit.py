"""What tests of notifications share: a node's subscriber with all that it received, and its line in the directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sublet_storage.db.connect import connect
from sublet_storage.node_directory import NodeIncarnation, deregister, register
from sublet_storage.notify.catch_up_reads import ReadSnapshot, make_snapshot_reader
from sublet_storage.notify.changes import (
    CatchUpSnapshot,
    ChangeNotification,
    NotificationHeartbeat,
    NotifySettings,
    ObjectChange,
    stream_change,
)
from sublet_storage.notify.codec import encode
from sublet_storage.notify.drivers import registry
from sublet_storage.notify.drivers.base import NotificationDriverCapabilities, OnConnected, OnLost, OnMessage
from sublet_storage.notify.subscriber import NotificationSubscriber
from tests.integration.log_kit import Connection
from tests.kit import eventually

SETTINGS = NotifySettings(
    hello_interval_s=0.5,
    gap_window_s=0.1,
    catch_up_min_interval_s=0.1,
    catch_up_jitter_s=0.1,
    poll_interval_s=0.2,
    catch_up_interval_s=600,
    endpoint_refresh_interval_s=0.3,
)
"""Quick, but for the reads that nobody asked for."""

NODE = NodeIncarnation("listening", "one", "127.0.0.1:1")


class Received:
    """Subscribers and all that they have handed on, with the time; how often each kind was read."""

    def __init__(
        self,
        url: str,
        driver: str = "postgres",
        read: ReadSnapshot | None = None,
        settings: NotifySettings = SETTINGS,
        fails: Callable[[ObjectChange], bool] = lambda change: False,
    ) -> None:
        self.changes: list[tuple[float, ObjectChange]] = []
        self.reads: list[str] = []
        self._read, self._fails = read or make_snapshot_reader(lambda: ()), fails
        self.subscriber = NotificationSubscriber(
            url, registry.load_driver(driver)(url), self._counted, self._take, settings=settings
        )

    def _counted(self, conn: Connection, kind: str) -> CatchUpSnapshot:
        self.reads.append(kind)
        return self._read(conn, kind)

    def _take(self, change: ObjectChange) -> None:
        self.changes.append((time.monotonic(), change))
        if self._fails(change):
            raise ValueError("this handler does not like it")

    def of(self, kind: str, key: str) -> list[ObjectChange]:
        return [change for _, change in list(self.changes) if (change.kind, change.key) == (kind, key)]


def wait_until_caught_up(subscriber: NotificationSubscriber, timeout_s: float = 10) -> None:
    """Wait until every channel has been read once, and its changes are passed on."""
    eventually(lambda: subscriber.is_caught_up, timeout_s)


@contextmanager
def listening(
    url: str, driver: str = "postgres", node: NodeIncarnation = NODE, through: str | None = None, **how: Any
) -> Iterator[Received]:
    """Subscribers that are in the directory, and have caught up. `through`: another URL of the same database."""
    received = Received(through or url, driver, **how)
    try:
        with connect(url) as conn:
            register(conn, node, 60, 1, notify_endpoint=received.subscriber.endpoint)
            wait_until_caught_up(received.subscriber)
            yield received
            deregister(conn, node)
    finally:
        received.subscriber.close()


class Loose:
    """A driver that delivers what the test says."""

    name = "loose"
    capabilities = NotificationDriverCapabilities(is_ordered=False, is_lossless=False, payload_limit=None, is_push=True)
    endpoint = "loose:"

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def open_receiver(self, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> Loose:
        self.deliver = on_message
        on_connected()
        return self

    def open_sender(self, endpoints: object) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing."""


class Bench:
    """A subscriber on a `Loose` driver, and messages of a publisher that does not exist."""

    def __init__(self, url: str, stream: int, on_change: Callable[[ObjectChange], None] = lambda change: None) -> None:
        self.driver = Loose()
        self.url, self.stream = url, stream
        settings = NotifySettings(
            gap_window_s=0.2,
            catch_up_min_interval_s=0.1,
            poll_interval_s=0.2,
            catch_up_jitter_s=0.01,
            catch_up_interval_s=600,
        )
        self.subscriber = NotificationSubscriber(
            url, self.driver, make_snapshot_reader(lambda: [stream]), on_change, channels=["stream"], settings=settings
        )
        wait_until_caught_up(self.subscriber)
        self.receive_hello()
        eventually(lambda: self.subscriber.counters().get("catch_ups_new_publisher"))

    def receive_hello(self) -> None:
        self.driver.deliver(encode(NotificationHeartbeat("p", "i", {})))

    def receive(self, number: int) -> None:
        change = stream_change(self.stream, number, False)
        self.driver.deliver(encode(ChangeNotification("p", "i", "stream", number, number - 1, (change,))))

    def knows(self, number: int) -> bool:
        return self.subscriber.get("stream", str(self.stream)) == stream_change(self.stream, number, False)


def threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("sublet")}
