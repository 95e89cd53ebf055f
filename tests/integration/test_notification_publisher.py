"""Telling: who is reached, when, at which price; over a real Postgres, with real drivers and processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet_storage.db.connect import connect
from sublet_storage.node_directory import NodeRef, deregister, register
from sublet_storage.notify import publisher as publisher_module
from sublet_storage.notify.changes import KINDS, Change, space_change, stream_change
from sublet_storage.notify.drivers.base import DriverCapabilities
from sublet_storage.notify.drivers.registry import load_driver
from sublet_storage.notify.publisher import NotificationPublisher, publish_once, shared_publisher
from sublet_storage.notify.subscriber import NotificationSubscriber
from tests.integration.notify_kit import NODE, SETTINGS, listening
from tests.kit import eventually
from tests.postgres_proxy import PostgresProxy

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(database) as conn:
        yield conn


@pytest.fixture
def notifier(database: str) -> Iterator[NotificationPublisher]:
    notifier = NotificationPublisher(database, settings=SETTINGS)
    yield notifier
    notifier.close()


@pytest.mark.conforms("D6")
def test_a_node_that_comes_later_is_found_and_greeted(database: str, notifier: NotificationPublisher) -> None:
    with listening(database, "zmq") as one:
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: one.of("stream", "5"))
        with listening(database, "zmq", NodeRef("other", "x", "h:1")) as two:

            def reported() -> list[Change]:
                notifier.publish([stream_change(5, int(time.monotonic() * 1000), False)])
                return two.of("stream", "5")

            eventually(reported, every_s=0.05)
            assert two.subscriber.counters()["publishers"] == 1


def test_after_nobody_listened_another_incarnation_speaks(database: str, conn: psycopg.Connection[Any]) -> None:
    notifier = NotificationPublisher(database, publisher="p", settings=SETTINGS)
    with listening(database) as received:
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: received.of("stream", "5"))
        deregister(conn, NODE)

        def is_deaf() -> bool:
            notifier.publish([stream_change(5, 2, False)])
            return notifier._deaf_until > time.monotonic()

        eventually(is_deaf, every_s=0.05)
        register(conn, NODE, 60, 1, notify_endpoint=received.subscriber.endpoint)

        def restarted() -> int:
            notifier.publish([stream_change(5, 3, False)])
            return received.subscriber.counters()["restarts"]

        eventually(restarted, every_s=0.05)
        notifier.close()


def test_a_teller_that_closes_is_not_missed(database: str) -> None:
    with listening(database) as received:
        notifier = NotificationPublisher(database, settings=SETTINGS)
        notifier.publish([stream_change(5, 1, False)])
        notifier.close()
        eventually(lambda: received.of("stream", "5"))
        eventually(lambda: received.subscriber.counters()["received"] == 3)
        before = received.subscriber.counters()["catch_ups"]
        other = NotificationPublisher(database, settings=SETTINGS)
        other.publish([stream_change(6, 1, False)])
        eventually(lambda: received.of("stream", "6"))
        eventually(lambda: received.subscriber.counters()["catch_ups"] >= before)
        assert received.subscriber.counters()["publisher_timeouts"] == 0
        other.close()


def test_an_idle_teller_says_hello_and_is_not_missed(database: str, notifier: NotificationPublisher) -> None:
    with listening(database) as received:
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: received.subscriber.counters()["received"] >= 4)
        assert received.subscriber.counters()["publisher_timeouts"] == 0


@pytest.mark.conforms("D10")
@pytest.mark.parametrize("driver", ["postgres", "zmq"])
def test_a_short_lived_process_tells_and_leaves(database: str, driver: str) -> None:
    before = set(threading.enumerate())
    with listening(database, driver) as received:
        assert publish_once(database, [space_change("eu", 3)])
        eventually(lambda: received.of("space", "eu"))
        eventually(lambda: received.subscriber.counters()["received"] == 3)
    assert not [thread for thread in set(threading.enumerate()) - before if "publisher" in thread.name]


@pytest.mark.conforms("D10")
def test_telling_at_once_never_raises_and_never_takes_long(database: str) -> None:
    began = time.monotonic()
    assert not publish_once("postgresql://127.0.0.1:1/nowhere", [space_change("eu", 3)])
    assert not publish_once("not a url", [space_change("eu", 3)])
    assert not publish_once(database, [space_change("eu", 3)]), "nobody listens"
    with PostgresProxy(database) as proxy:
        proxy.hold()
        assert not publish_once(proxy.url, [space_change("eu", 3)], timeout_s=0.2)
        proxy.resume()
    assert time.monotonic() - began < 6


def test_a_driver_that_is_not_installed_here_is_said_once_and_harms_nobody(
    database: str, conn: psycopg.Connection[Any], notifier: NotificationPublisher, caplog: pytest.LogCaptureFixture
) -> None:
    register(conn, NodeRef("odd", "x", "h:1"), 60, 1, notify_endpoint="carrier-pigeon:coop 7")
    with listening(database) as received:
        for head in range(1, 4):
            notifier.publish([stream_change(5, head, False)])
            eventually(lambda head=head: received.of("stream", "5")[-1:] == [stream_change(5, head, False)])  # type: ignore[misc]
    assert sum("carrier-pigeon" in record.getMessage() for record in caplog.records) == 1


class Bad:
    """A driver of somebody else that fails wherever it is told to."""

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at
        self.tried = False

    def _perhaps(self, where: str) -> None:
        if where == self._fails_at:
            self.tried = True
            raise ValueError(f"no broker.toml at {where}")

    def made(self, url: str) -> Bad:
        self._perhaps("making")
        return self

    @property
    def capabilities(self) -> DriverCapabilities:
        self._perhaps("capabilities")
        limit = "long" if self._fails_at == "limit" else None
        self.tried = True
        return DriverCapabilities(is_ordered=True, is_lossless=True, payload_limit=limit, is_push=True)  # type: ignore[arg-type]

    def outlet(self, endpoints: object) -> Bad:
        self._perhaps("outlet")
        return self

    def send(self, message: bytes) -> None:
        self._perhaps("send")

    def close(self) -> None:
        self._perhaps("close")


@pytest.mark.conforms("D2", "D9")
@pytest.mark.parametrize("fails_at", ["loading", "making", "capabilities", "limit", "outlet", "send", "close"])
def test_a_bad_driver_of_somebody_else_publisher_timeouts_nobody(
    database: str, conn: psycopg.Connection[Any], fails_at: str
) -> None:
    bad = Bad(fails_at)

    def found(name: str) -> Any:
        if name == "bad":
            bad._perhaps("loading")
            return bad.made
        return load_driver(name)

    register(conn, NodeRef("odd", "x", "h:1"), 60, 1, notify_endpoint="bad:somewhere")
    notifier = NotificationPublisher(database, settings=SETTINGS, load=found)
    with listening(database) as received:
        for head in range(1, 4):
            notifier.publish([stream_change(5, head, False)])
            eventually(lambda head=head: received.of("stream", "5")[-1:] == [stream_change(5, head, False)])  # type: ignore[misc]
        deregister(conn, NodeRef("odd", "x", "h:1"))
        with listening(database, node=NodeRef("new", "x", "h:2")) as late:

            def reported() -> list[Change]:
                notifier.publish([stream_change(6, int(time.monotonic() * 1000), False)])
                return late.of("stream", "6")

            eventually(reported, every_s=0.05)
        notifier.close()
    assert bad.tried


def test_ten_thousand_a_second_are_heard_at_their_newest_in_few_messages(
    database: str, notifier: NotificationPublisher
) -> None:
    with listening(database) as received:
        notifier.publish([stream_change(0, 1, False)])
        eventually(lambda: received.of("stream", "0"))
        began, before = time.monotonic(), notifier.sent
        for number in range(10_000):
            notifier.publish([stream_change(number % 50, number + 2, False)])
        reported_s = time.monotonic() - began
        eventually(lambda: received.of("stream", "49")[-1:] == [stream_change(49, 10_001, False)])
        took_s = time.monotonic() - began
        assert notifier.sent - before <= 200 * took_s + 10
        assert {len(received.subscriber.objects("stream"))} == {50}
        assert reported_s < 10_000 * 100e-6


def test_a_fork_is_silent_and_speaks_with_a_voice_of_its_own(database: str) -> None:
    notifier = shared_publisher(database)
    assert shared_publisher(database) is notifier
    with listening(database) as received:
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: received.of("stream", "5"))
        child = multiprocessing.get_context("fork").Process(
            target=_in_a_fork, args=(notifier, received.subscriber, database)
        )
        child.start()
        child.join(20)
        assert child.exitcode == 0
        eventually(lambda: received.of("stream", "7"))
        assert not received.of("stream", "6")
        notifier.publish([stream_change(5, 2, False)])
        eventually(lambda: len(received.of("stream", "5")) == 2)
        assert received.subscriber.counters()["disconnects"] == 0
    notifier.close()


def _in_a_fork(notifier: NotificationPublisher, subscriber: NotificationSubscriber, database: str) -> None:
    notifier.publish([stream_change(6, 1, False)])
    assert not notifier._reported
    notifier.close()
    subscriber.close()
    assert shared_publisher(database) is not notifier
    own = NotificationPublisher(database, settings=SETTINGS)
    own.publish([stream_change(7, 1, False)])
    own.close()
    assert own.sent >= 2
    os._exit(0)


def test_who_could_not_look_looks_again_by_itself(database: str) -> None:
    with PostgresProxy(database) as proxy, listening(database) as received:
        proxy.go_away()
        notifier = NotificationPublisher(proxy.url, settings=SETTINGS)
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: notifier._look_at > 0 and not notifier._is_looking)
        proxy.resume()
        eventually(lambda: received.of("stream", "5"))
        notifier.close()


def test_a_teller_at_rest_keeps_nothing_open_and_is_not_missed(
    database: str, monkeypatch: pytest.MonkeyPatch, notifier: NotificationPublisher
) -> None:
    monkeypatch.setattr(publisher_module, "REST_S", 0.7)
    others = set(threading.enumerate())

    def speaks() -> bool:
        return any(thread.name == "sublet notify postgres sender" for thread in set(threading.enumerate()) - others)

    with listening(database) as received:
        notifier.publish([stream_change(5, 1, False)])
        eventually(speaks)
        eventually(lambda: received.of("stream", "5"))
        eventually(lambda: not notifier._senders and not speaks())
        notifier.publish([stream_change(5, 2, False)])
        eventually(lambda: len(received.of("stream", "5")) == 2)
        counters = received.subscriber.counters()
        assert (counters["restarts"], counters["publisher_timeouts"]) == (1, 0)


@pytest.mark.conforms("D3")
def test_when_too_much_was_told_at_once_another_incarnation_says_so(
    database: str, monkeypatch: pytest.MonkeyPatch, notifier: NotificationPublisher
) -> None:
    with listening(database) as received:
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: received.of("stream", "5"))
        monkeypatch.setattr(publisher_module, "MAX_PENDING_CHANGES", 3)
        for head in range(2, 1000):
            notifier.publish([stream_change(5, head, False)])
        eventually(lambda: received.subscriber.counters()["restarts"])


STORY = """
import sys, time
from sublet_storage.notify.changes import stream_change
from sublet_storage.notify.publisher import NotificationPublisher
from tests.integration.notify_kit import SETTINGS
publisher = NotificationPublisher(sys.argv[1], settings=SETTINGS)
publisher.publish([stream_change(5, 1, False)])
time.sleep(60)
"""


@pytest.mark.conforms("D5")
def test_a_publisher_that_is_killed_is_read_for(database: str) -> None:
    with (
        listening(database) as received,
        subprocess.Popen([sys.executable, "-c", STORY, database], cwd=REPOSITORY) as process,
    ):
        eventually(lambda: received.of("stream", "5"), timeout_s=30)
        assert "catch_ups_publisher_timeout" not in received.subscriber.counters()
        process.kill()
        eventually(lambda: received.subscriber.counters().get("catch_ups_publisher_timeout") == len(KINDS))
