"""Publishing notifications: who is reached, when, at which price; over Postgres, with real drivers and processes."""

from __future__ import annotations

import errno
import itertools
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sublet_storage.db.connect import connect
from sublet_storage.node_directory import NodeIncarnation, deregister, register
from sublet_storage.notify import publisher as publisher_module
from sublet_storage.notify.changes import KINDS, ObjectChange, space_change, stream_change
from sublet_storage.notify.drivers.base import NotificationDriverCapabilities
from sublet_storage.notify.drivers.registry import load_driver
from sublet_storage.notify.publisher import NotificationPublisher, publish_once, shared_publisher
from sublet_storage.notify.publisher_machine import NotificationPublisherMachine
from sublet_storage.notify.subscriber import NotificationSubscriber
from tests.integration.log_kit import Connection
from tests.integration.notify_kit import NODE, SETTINGS, listening
from tests.kit import WAIT_S, eventually
from tests.postgres_proxy import PostgresProxy

REPOSITORY = Path(__file__).parents[2]


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
        with listening(database, "zmq", NodeIncarnation("other", "x", "h:1")) as two:

            def reported() -> list[ObjectChange]:
                notifier.publish([stream_change(5, int(time.monotonic() * 1000), False)])
                return two.of("stream", "5")

            eventually(reported, every_s=0.05)
            assert two.subscriber.counters()["publishers"] == 1


def threads(name: str) -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == f"sublet {name}"}


def senders() -> set[threading.Thread]:
    return threads("notify postgres sender")


def test_after_silence_an_incarnation_begins(database: str, conn: Connection, notifier: NotificationPublisher) -> None:
    """Where nobody listened for a while, who listens again is notified that something may be missing."""
    others = senders()
    with listening(database) as received:
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: received.of("stream", "5"))
        deregister(conn, NODE)

        def is_deaf() -> bool:
            notifier.publish([stream_change(5, 2, False)])
            return senders() <= others

        eventually(is_deaf, every_s=0.05)
        register(conn, NODE, 60, 1, notify_endpoint=received.subscriber.endpoint)

        def restarted() -> int:
            notifier.publish([stream_change(5, 3, False)])
            return received.subscriber.counters()["restarts"]

        eventually(restarted, every_s=0.05)


def test_an_idle_publisher_sends_hello(database: str, notifier: NotificationPublisher) -> None:
    with listening(database) as received:
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: received.subscriber.counters()["received"] >= 4)
        assert received.subscriber.counters()["publisher_timeouts"] == 0


@pytest.mark.conforms("D10")
@pytest.mark.parametrize(("driver", "round_trip_s"), [("postgres", 0.0), ("postgres", 0.3), ("zmq", 0.0)])
def test_a_short_lived_process_notifies_and_leaves(database: str, driver: str, round_trip_s: float) -> None:
    before = set(threading.enumerate())
    with listening(database, driver) as received, PostgresProxy(database) as proxy:
        proxy.slow(round_trip_s)
        publish_once(proxy.url, [space_change("eu", 3)], timeout_s=WAIT_S)
        eventually(lambda: received.of("space", "eu"))
        eventually(lambda: received.subscriber.counters()["received"] == 3)
        assert received.subscriber.counters()["publisher_timeouts"] == 0
    assert not [thread for thread in set(threading.enumerate()) - before if "publisher" in thread.name]


@pytest.mark.conforms("D10")
def test_publishing_once_never_raises(database: str) -> None:
    publish_once("postgresql://127.0.0.1:1/nowhere", [space_change("eu", 3)])
    publish_once("not a url", [space_change("eu", 3)])
    publish_once(database, [space_change("eu", 3)])  # nobody listens
    with PostgresProxy(database) as proxy:
        proxy.hold()
        publish_once(proxy.url, [space_change("eu", 3)], timeout_s=0.2)
        proxy.resume()


class Bad:
    """A driver of somebody else that fails wherever the test says so."""

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at

    def perhaps(self, where: str) -> None:
        if where == self._fails_at:
            raise ValueError(f"no broker.toml at {where}")

    def made(self, url: str) -> Bad:
        self.perhaps("making")
        return self

    @property
    def capabilities(self) -> NotificationDriverCapabilities:
        self.perhaps("capabilities")
        limit = "long" if self._fails_at == "limit" else None
        return NotificationDriverCapabilities(is_ordered=True, is_lossless=True, payload_limit=limit, is_push=True)  # type: ignore[arg-type]

    def open_sender(self, endpoints: object) -> Bad:
        self.perhaps("opening")
        return self

    def send(self, message: bytes) -> None:
        self.perhaps("send")

    def close(self, timeout_s: float) -> None:
        self.perhaps("close")


class Noting(Bad):
    """A driver that notes which threads send."""

    def __init__(self) -> None:
        super().__init__("")
        self.threads: list[threading.Thread] = []

    def send(self, message: bytes) -> None:
        self.threads.append(threading.current_thread())


@pytest.mark.conforms("D11")
def test_a_caller_sends_where_nothing_waits(database: str, conn: Connection) -> None:
    driver = Noting()
    register(conn, NodeIncarnation("odd", "x", "h:1"), 60, 1, notify_endpoint="bad:somewhere")

    def found(name: str) -> Any:
        return driver.made

    notifier = NotificationPublisher(database, settings=SETTINGS, load=found)
    heads = itertools.count(1)

    def is_sent_here() -> bool:
        notifier.publish([stream_change(5, next(heads), False)])
        return threading.current_thread() in driver.threads

    eventually(is_sent_here)
    notifier.close()


@pytest.mark.conforms("D2", "D9")
@pytest.mark.parametrize(
    "fails_at", ["not installed", "loading", "making", "capabilities", "limit", "opening", "send", "close"]
)
@pytest.mark.long
def test_a_bad_driver_is_reported_and_harms_no_other(
    database: str, conn: Connection, caplog: pytest.LogCaptureFixture, fails_at: str
) -> None:
    bad = Bad(fails_at)

    def found(name: str) -> Any:
        if name != "bad" or fails_at == "not installed":
            return load_driver(name)
        bad.perhaps("loading")
        return bad.made

    register(conn, NodeIncarnation("odd", "x", "h:1"), 60, 1, notify_endpoint="bad:somewhere")
    notifier = NotificationPublisher(database, settings=SETTINGS, load=found)
    with listening(database) as received:
        for head in range(1, 4):
            notifier.publish([stream_change(5, head, False)])
            eventually(lambda head=head: received.of("stream", "5")[-1:] == [stream_change(5, head, False)])  # type: ignore[misc]
        deregister(conn, NodeIncarnation("odd", "x", "h:1"))
        with listening(database, node=NodeIncarnation("new", "x", "h:2")) as late:

            def reported() -> list[ObjectChange]:
                notifier.publish([stream_change(6, int(time.monotonic() * 1000), False)])
                return late.of("stream", "6")

            eventually(reported, every_s=0.05)
        notifier.close()
    complaints = [record for record in caplog.records if record.name == "sublet_storage.notify.publisher"]
    assert len(complaints) == 1, "it is said once"


def test_a_fork_notifies_by_a_publisher_of_its_own(database: str) -> None:
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
    subscriber.close()
    assert shared_publisher(database) is not notifier
    own = NotificationPublisher(database, settings=SETTINGS)
    own.publish([stream_change(7, 1, False)])
    own.close()
    assert own.sent >= 2
    os._exit(0)


def test_who_could_not_look_looks_again_by_itself(database: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "sublet_storage.notify.publisher")
    with PostgresProxy(database) as proxy, listening(database) as received:
        proxy.go_away()
        notifier = NotificationPublisher(proxy.url, settings=SETTINGS)
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: "node directory not read" in caplog.text)
        proxy.resume()
        eventually(lambda: received.of("stream", "5"))
        notifier.close()


def test_a_directory_that_is_late_costs_nothing(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []
    has_pending = NotificationPublisherMachine.has_pending

    def look(machine: NotificationPublisherMachine) -> bool:
        looks.append(time.monotonic())
        return bool(has_pending.__get__(machine))

    monkeypatch.setattr(NotificationPublisherMachine, "has_pending", property(look))
    settings = replace(SETTINGS, endpoint_refresh_interval_s=0.1)
    with PostgresProxy(database) as proxy:
        proxy.hold()
        notifier = NotificationPublisher(proxy.url, settings=settings)
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: len(looks) >= 8)
        notifier.close(0.1)
        assert looks[7] - looks[0] > 3 * settings.endpoint_refresh_interval_s
        proxy.resume()


def test_no_more_files_for_a_moment_are_no_silence(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = itertools.count()

    def connect_later(*arguments: Any, **options: Any) -> Any:
        if not next(tries):
            raise OSError(errno.EMFILE, "Too many open files")
        return connect(*arguments, **options)

    monkeypatch.setattr(publisher_module, "connect", connect_later)
    with listening(database) as received:
        notifier = NotificationPublisher(database, settings=replace(SETTINGS, endpoint_refresh_interval_s=0.1))
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: received.of("stream", "5"))
        notifier.close()


def test_who_closes_waits_for_no_directory(database: str) -> None:
    publishing, reading = threads("notification publisher"), threads("directory")
    with PostgresProxy(database) as proxy:
        proxy.hold()
        notifier = NotificationPublisher(proxy.url, settings=SETTINGS)
        notifier.publish([stream_change(5, 1, False)])
        (publisher,) = threads("notification publisher") - publishing
        reads = eventually(lambda: threads("directory") - reading)
        notifier.close(0.1)
        publisher.join(60)
        assert not publisher.is_alive()
        assert reads <= threads("directory"), "it has not waited for the end of that"
        proxy.resume()


def test_a_publisher_at_rest_keeps_nothing_open(
    database: str, monkeypatch: pytest.MonkeyPatch, notifier: NotificationPublisher
) -> None:
    """It takes its leave, is not missed, and sends again when there is a change."""
    monkeypatch.setattr(publisher_module, "REST_S", 0.7)
    others = senders()
    with listening(database) as received:
        notifier.publish([stream_change(5, 1, False)])
        eventually(lambda: senders() > others)
        eventually(lambda: received.of("stream", "5"))
        eventually(lambda: senders() <= others)
        notifier.publish([stream_change(5, 2, False)])
        eventually(lambda: len(received.of("stream", "5")) == 2)
        counters = received.subscriber.counters()
        assert (counters["restarts"], counters["publisher_timeouts"]) == (1, 0)


@pytest.mark.conforms("D3")
def test_too_much_at_once_begins_an_incarnation(
    database: str, monkeypatch: pytest.MonkeyPatch, notifier: NotificationPublisher
) -> None:
    """Everybody finds from it that something is missing."""
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
