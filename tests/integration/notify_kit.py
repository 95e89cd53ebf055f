"""What the tests of notifications share: a node's ears with all they have heard, and its line in the directory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from sublet_storage.db.connect import connect
from sublet_storage.nodes import NodeRef, register, remove
from sublet_storage.notify.changes import Change, Envelope, Hello, NotifySettings, Snapshot, stream_change
from sublet_storage.notify.codec import encode
from sublet_storage.notify.drivers import registry
from sublet_storage.notify.drivers.base import Capabilities, OnConnected, OnLost, OnMessage
from sublet_storage.notify.snapshot import ReadSnapshot, reading
from sublet_storage.notify.subscriber import Ears
from tests.kit import eventually

SETTINGS = NotifySettings(
    max_idle_s=0.5, gap_window_s=0.1, catch_up_every_s=0.1, spread_s=0.1, poll_s=0.2, review_s=600, tell_look_s=0.3
)
"""Quick, but for the reads that nobody asked for."""

NODE = NodeRef("listening", "one", "127.0.0.1:1")


class Heard:
    """Ears and all that they have handed on, with the time; how often each kind was read."""

    def __init__(
        self,
        url: str,
        driver: str = "postgres",
        read: ReadSnapshot | None = None,
        settings: NotifySettings = SETTINGS,
        fails: Callable[[Change], bool] = lambda change: False,
    ) -> None:
        self.changes: list[tuple[float, Change]] = []
        self.reads: list[str] = []
        self._read, self._fails = read or reading(lambda: ()), fails
        self.ears = Ears(url, registry.load(driver)(url), self._counted, self._take, settings=settings)

    def _counted(self, conn: psycopg.Connection[Any], kind: str) -> Snapshot:
        self.reads.append(kind)
        return self._read(conn, kind)

    def _take(self, change: Change) -> None:
        self.changes.append((time.monotonic(), change))
        if self._fails(change):
            raise ValueError("this handler does not like it")

    def of(self, kind: str, key: str) -> list[Change]:
        return [change for _, change in list(self.changes) if (change.kind, change.key) == (kind, key)]


@contextmanager
def listening(
    url: str, driver: str = "postgres", node: NodeRef = NODE, through: str | None = None, **how: Any
) -> Iterator[Heard]:
    """Ears that are in the directory, and have caught up. `through`: another way for them to the same database."""
    heard = Heard(through or url, driver, **how)
    try:
        with connect(url) as conn:
            register(conn, node, 60, 1, notify=heard.ears.endpoint)
            assert heard.ears.wait_caught_up(10)
            yield heard
            remove(conn, node)
    finally:
        heard.ears.close()


class Loose:
    """A driver that delivers what the test says."""

    name = "loose"
    capabilities = Capabilities(ordered=False, lossless=False, payload_limit=None, pushes=True)
    endpoint = "loose:"

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def inlet(self, on_message: OnMessage, on_connected: OnConnected, on_lost: OnLost) -> Loose:
        self.deliver = on_message
        on_connected()
        return self

    def outlet(self, endpoints: object) -> Any:
        raise NotImplementedError

    def close(self) -> None:
        """Nothing."""


class Bench:
    """Ears on a `Loose` driver, and a publisher on paper."""

    def __init__(self, url: str, stream: int, on_change: Callable[[Change], None] = lambda change: None) -> None:
        self.driver = Loose()
        self.url, self.stream = url, stream
        settings = NotifySettings(gap_window_s=0.2, catch_up_every_s=0.1, poll_s=0.2, spread_s=0.01, review_s=600)
        self.ears = Ears(url, self.driver, reading(lambda: [stream]), on_change, channels=["stream"], settings=settings)
        assert self.ears.wait_caught_up(10)
        self.hear_hello()
        eventually(lambda: self.ears.counters().get("catch_ups_first_sight"))

    def hear_hello(self) -> None:
        self.driver.deliver(encode(Hello("p", "i", {})))

    def hear(self, number: int) -> None:
        change = stream_change(self.stream, number, False)
        self.driver.deliver(encode(Envelope("p", "i", "stream", number, number - 1, (change,))))

    def knows(self, number: int) -> bool:
        return self.ears.get("stream", str(self.stream)) == stream_change(self.stream, number, False)


def threads() -> set[str]:
    """The names of our threads that run now."""
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("sublet")}
