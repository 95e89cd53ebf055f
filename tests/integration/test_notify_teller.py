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
from sublet_storage.nodes import NodeRef, register, remove
from sublet_storage.notify import publisher as teller_module
from sublet_storage.notify.changes import KINDS, Change, space_change, stream_change
from sublet_storage.notify.drivers.base import Capabilities
from sublet_storage.notify.drivers.registry import load
from sublet_storage.notify.publisher import Teller, shared, tell_now
from sublet_storage.notify.subscriber import Ears
from tests.integration.notify_kit import NODE, SETTINGS, listening
from tests.kit import eventually
from tests.postgres_proxy import PostgresProxy

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(database) as conn:
        yield conn


@pytest.fixture
def teller(database: str) -> Iterator[Teller]:
    teller = Teller(database, settings=SETTINGS)
    yield teller
    teller.close()


@pytest.mark.conforms("D6")
def test_a_node_that_comes_later_is_found_and_greeted(database: str, teller: Teller) -> None:
    with listening(database, "zmq") as one:
        teller.tell([stream_change(5, 1, False)])
        eventually(lambda: one.of("stream", "5"))
        with listening(database, "zmq", NodeRef("other", "x", "h:1")) as two:

            def told() -> list[Change]:
                teller.tell([stream_change(5, int(time.monotonic() * 1000), False)])
                return two.of("stream", "5")

            eventually(told, every_s=0.05)
            assert two.ears.counters()["publishers"] == 1


def test_after_nobody_listened_another_incarnation_speaks(database: str, conn: psycopg.Connection[Any]) -> None:
    teller = Teller(database, publisher="p", settings=SETTINGS)
    with listening(database) as heard:
        teller.tell([stream_change(5, 1, False)])
        eventually(lambda: heard.of("stream", "5"))
        remove(conn, NODE)

        def is_deaf() -> bool:
            teller.tell([stream_change(5, 2, False)])
            return teller._deaf_until > time.monotonic()

        eventually(is_deaf, every_s=0.05)
        register(conn, NODE, 60, 1, notify=heard.ears.endpoint)

        def restarted() -> int:
            teller.tell([stream_change(5, 3, False)])
            return heard.ears.counters()["restarts"]

        eventually(restarted, every_s=0.05)
        teller.close()


def test_a_teller_that_closes_is_not_missed(database: str) -> None:
    with listening(database) as heard:
        teller = Teller(database, settings=SETTINGS)
        teller.tell([stream_change(5, 1, False)])
        teller.close()
        eventually(lambda: heard.of("stream", "5"))
        eventually(lambda: heard.ears.counters()["received"] == 3)
        before = heard.ears.counters()["catch_ups"]
        other = Teller(database, settings=SETTINGS)
        other.tell([stream_change(6, 1, False)])
        eventually(lambda: heard.of("stream", "6"))
        eventually(lambda: heard.ears.counters()["catch_ups"] >= before)
        assert heard.ears.counters()["silences"] == 0
        other.close()


def test_an_idle_teller_says_hello_and_is_not_missed(database: str, teller: Teller) -> None:
    with listening(database) as heard:
        teller.tell([stream_change(5, 1, False)])
        eventually(lambda: heard.ears.counters()["received"] >= 4)
        assert heard.ears.counters()["silences"] == 0


@pytest.mark.conforms("D10")
@pytest.mark.parametrize("driver", ["postgres", "zmq"])
def test_a_short_lived_process_tells_and_leaves(database: str, driver: str) -> None:
    before = set(threading.enumerate())
    with listening(database, driver) as heard:
        assert tell_now(database, [space_change("eu", 3)])
        eventually(lambda: heard.of("space", "eu"))
        eventually(lambda: heard.ears.counters()["received"] == 3)
    assert not [thread for thread in set(threading.enumerate()) - before if "teller" in thread.name]


@pytest.mark.conforms("D10")
def test_telling_at_once_never_raises_and_never_takes_long(database: str) -> None:
    began = time.monotonic()
    assert not tell_now("postgresql://127.0.0.1:1/nowhere", [space_change("eu", 3)])
    assert not tell_now("not a url", [space_change("eu", 3)])
    assert not tell_now(database, [space_change("eu", 3)]), "nobody listens"
    with PostgresProxy(database) as proxy:
        proxy.hold()
        assert not tell_now(proxy.url, [space_change("eu", 3)], timeout_s=0.2)
        proxy.resume()
    assert time.monotonic() - began < 6


def test_a_driver_that_is_not_installed_here_is_said_once_and_harms_nobody(
    database: str, conn: psycopg.Connection[Any], teller: Teller, caplog: pytest.LogCaptureFixture
) -> None:
    register(conn, NodeRef("odd", "x", "h:1"), 60, 1, notify="carrier-pigeon:coop 7")
    with listening(database) as heard:
        for head in range(1, 4):
            teller.tell([stream_change(5, head, False)])
            eventually(lambda head=head: heard.of("stream", "5")[-1:] == [stream_change(5, head, False)])  # type: ignore[misc]
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
    def capabilities(self) -> Capabilities:
        self._perhaps("capabilities")
        limit = "long" if self._fails_at == "limit" else None
        self.tried = True
        return Capabilities(ordered=True, lossless=True, payload_limit=limit, pushes=True)  # type: ignore[arg-type]

    def outlet(self, endpoints: object) -> Bad:
        self._perhaps("outlet")
        return self

    def send(self, message: bytes) -> None:
        self._perhaps("send")

    def close(self) -> None:
        self._perhaps("close")


@pytest.mark.conforms("D2", "D9")
@pytest.mark.parametrize("fails_at", ["loading", "making", "capabilities", "limit", "outlet", "send", "close"])
def test_a_bad_driver_of_somebody_else_silences_nobody(
    database: str, conn: psycopg.Connection[Any], fails_at: str
) -> None:
    bad = Bad(fails_at)

    def found(name: str) -> Any:
        if name == "bad":
            bad._perhaps("loading")
            return bad.made
        return load(name)

    register(conn, NodeRef("odd", "x", "h:1"), 60, 1, notify="bad:somewhere")
    teller = Teller(database, settings=SETTINGS, load=found)
    with listening(database) as heard:
        for head in range(1, 4):
            teller.tell([stream_change(5, head, False)])
            eventually(lambda head=head: heard.of("stream", "5")[-1:] == [stream_change(5, head, False)])  # type: ignore[misc]
        remove(conn, NodeRef("odd", "x", "h:1"))
        with listening(database, node=NodeRef("new", "x", "h:2")) as late:

            def told() -> list[Change]:
                teller.tell([stream_change(6, int(time.monotonic() * 1000), False)])
                return late.of("stream", "6")

            eventually(told, every_s=0.05)
        teller.close()
    assert bad.tried


def test_ten_thousand_a_second_are_heard_at_their_newest_in_few_messages(database: str, teller: Teller) -> None:
    with listening(database) as heard:
        teller.tell([stream_change(0, 1, False)])
        eventually(lambda: heard.of("stream", "0"))
        began, before = time.monotonic(), teller.sent
        for number in range(10_000):
            teller.tell([stream_change(number % 50, number + 2, False)])
        told_s = time.monotonic() - began
        eventually(lambda: heard.of("stream", "49")[-1:] == [stream_change(49, 10_001, False)])
        took_s = time.monotonic() - began
        assert teller.sent - before <= 200 * took_s + 10
        assert {len(heard.ears.objects("stream"))} == {50}
        assert told_s < 10_000 * 100e-6


def test_a_fork_is_silent_and_speaks_with_a_voice_of_its_own(database: str) -> None:
    teller = shared(database)
    assert shared(database) is teller
    with listening(database) as heard:
        teller.tell([stream_change(5, 1, False)])
        eventually(lambda: heard.of("stream", "5"))
        child = multiprocessing.get_context("fork").Process(target=_in_a_fork, args=(teller, heard.ears, database))
        child.start()
        child.join(20)
        assert child.exitcode == 0
        eventually(lambda: heard.of("stream", "7"))
        assert not heard.of("stream", "6")
        teller.tell([stream_change(5, 2, False)])
        eventually(lambda: len(heard.of("stream", "5")) == 2)
        assert heard.ears.counters()["losses"] == 0
    teller.close()


def _in_a_fork(teller: Teller, ears: Ears, database: str) -> None:
    teller.tell([stream_change(6, 1, False)])
    assert not teller._told
    teller.close()
    ears.close()
    assert shared(database) is not teller
    own = Teller(database, settings=SETTINGS)
    own.tell([stream_change(7, 1, False)])
    own.close()
    assert own.sent >= 2
    os._exit(0)


def test_who_could_not_look_looks_again_by_itself(database: str) -> None:
    with PostgresProxy(database) as proxy, listening(database) as heard:
        proxy.go_away()
        teller = Teller(proxy.url, settings=SETTINGS)
        teller.tell([stream_change(5, 1, False)])
        eventually(lambda: teller._look_at > 0 and not teller._is_looking)
        proxy.resume()
        eventually(lambda: heard.of("stream", "5"))
        teller.close()


def test_a_teller_at_rest_keeps_nothing_open_and_is_not_missed(
    database: str, monkeypatch: pytest.MonkeyPatch, teller: Teller
) -> None:
    monkeypatch.setattr(teller_module, "REST_S", 0.7)
    others = set(threading.enumerate())

    def speaks() -> bool:
        return any(thread.name == "sublet notify postgres sender" for thread in set(threading.enumerate()) - others)

    with listening(database) as heard:
        teller.tell([stream_change(5, 1, False)])
        eventually(speaks)
        eventually(lambda: heard.of("stream", "5"))
        eventually(lambda: not teller._voices and not speaks())
        teller.tell([stream_change(5, 2, False)])
        eventually(lambda: len(heard.of("stream", "5")) == 2)
        counters = heard.ears.counters()
        assert (counters["restarts"], counters["silences"]) == (1, 0)


@pytest.mark.conforms("D3")
def test_when_too_much_was_told_at_once_another_incarnation_says_so(
    database: str, monkeypatch: pytest.MonkeyPatch, teller: Teller
) -> None:
    with listening(database) as heard:
        teller.tell([stream_change(5, 1, False)])
        eventually(lambda: heard.of("stream", "5"))
        monkeypatch.setattr(teller_module, "MOST_TOLD", 3)
        for head in range(2, 1000):
            teller.tell([stream_change(5, head, False)])
        eventually(lambda: heard.ears.counters()["restarts"])


STORY = """
import sys, time
from sublet_storage.notify.changes import stream_change
from sublet_storage.notify.publisher import Teller
from tests.integration.notify_kit import SETTINGS
teller = Teller(sys.argv[1], settings=SETTINGS)
teller.tell([stream_change(5, 1, False)])
time.sleep(60)
"""


@pytest.mark.conforms("D5")
def test_a_publisher_that_is_killed_is_read_for(database: str) -> None:
    with (
        listening(database) as heard,
        subprocess.Popen([sys.executable, "-c", STORY, database], cwd=REPOSITORY) as process,
    ):
        eventually(lambda: heard.of("stream", "5"), timeout_s=30)
        assert "catch_ups_silence" not in heard.ears.counters()
        process.kill()
        eventually(lambda: heard.ears.counters().get("catch_ups_silence") == len(KINDS))
