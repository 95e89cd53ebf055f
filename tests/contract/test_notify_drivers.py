"""The notification drivers that come with sublet, by the suite that anybody's has to pass."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import re
import socket
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import psycopg
import pytest
import zmq

from sublet_protocol.domain.errors import InvalidSetting
from sublet_storage.db.connect import connect
from sublet_storage.notify.drivers import postgres, registry
from sublet_storage.notify.drivers.base import NotificationReceiver
from sublet_storage.notify.drivers.postgres import (
    PAYLOAD_LIMIT,
    PostgresNotificationDriver,
    channel_name,
    decode_payload,
    encode_payload,
)
from sublet_storage.notify.drivers.registry import create_driver, list_drivers, load_driver
from tests.contract.notify_conformance import BLOCKED_S, Subject, checks, connected, receiving, sending
from tests.kit import eventually

THREE = ("poll", "postgres", "zmq")


class PostgresSubject(Subject):
    """The server ends the listener's connection; rubbish is whatever others say on its channel."""

    def cut(self, receiver: NotificationReceiver) -> None:
        with connect(self.url) as conn:
            conn.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity "
                "where application_name = 'sublet listen' and datname = current_database()"
            )

    def rubbish(self, receiver: NotificationReceiver) -> None:
        with connect(self.url) as conn:
            for text in ("", "t", "b", "b0", "b0?", "b0YQ", "x0y", "{}", "ä", "b0ä", "\x7f" * 7000):
                if text != "b0":
                    conn.execute("select pg_notify(%s, %s)", (channel_name("sublet"), text))

    @contextlib.contextmanager
    def deaf(self) -> Iterator[str]:
        with connect(self.url) as conn:
            conn.execute(f"listen {channel_name('sublet')}")
            yield "postgres:"


class ZmqSubject(Subject):
    """Connections are cut under the feet of both ends; rubbish is what a port scanner, a stranger and a publisher that
    breaks the rules send."""

    def cut(self, receiver: NotificationReceiver) -> None:
        port = port_of(receiver.endpoint)
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/self/fd/{number}").startswith("socket:"):  # a copy of another would be left open
                    with socket.socket(fileno=os.dup(int(number))) as copy:
                        if copy.family == socket.AF_INET and copy.getpeername()[1] == port:
                            copy.shutdown(socket.SHUT_RDWR)

    def rubbish(self, receiver: NotificationReceiver) -> None:
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\0" + b"NULL".ljust(20, b"\0") + bytes(32)
        for data in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), greeting, greeting + b"\2" + b"\xff" * 8):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", port_of(receiver.endpoint))) as raw,
            ):
                raw.sendall(data)
        address, key = receiver.endpoint.removeprefix("zmq:").split("?key=")
        with zmq.Context() as context, context.socket(zmq.PUSH) as peer:
            peer.linger = 1000
            peer.curve_publickey, peer.curve_secretkey = zmq.curve_keypair()
            peer.curve_serverkey = bytes.fromhex(key)
            peer.connect(address)
            peer.send_multipart([b"two", b"parts"])
            peer.send(bytes(1024 * 1024 + 1))

    @contextlib.contextmanager
    def deaf(self) -> Iterator[str]:
        with socket.create_server(("127.0.0.1", 0)) as server:
            yield f"zmq:tcp://127.0.0.1:{server.getsockname()[1]}?key={'0' * 64}"


def port_of(endpoint: str) -> int:
    found = re.search(r":(\d+)(\?|$)", endpoint)
    assert found, endpoint
    return int(found[1])


SUBJECTS: dict[str, type[Subject]] = {"poll": Subject, "postgres": PostgresSubject, "zmq": ZmqSubject}


@pytest.fixture
def subject(request: pytest.FixtureRequest, database: str) -> Subject:
    return SUBJECTS[request.param](request.param, database)


@pytest.mark.conforms("D2")
@pytest.mark.parametrize(
    ("subject", "check"),
    [pytest.param(name, check, id=f"{name}-{check.__name__}") for name in THREE for check in checks(name)],
    indirect=["subject"],
)
def test_driver(subject: Subject, check: Callable[[Subject], None]) -> None:
    check(subject)


# --- by name --------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("D2")
def test_the_three_are_installed() -> None:
    assert set(THREE) <= set(list_drivers())
    made = {name: load_driver(name)("postgresql:///x") for name in THREE}
    pushes = {name: driver.capabilities.is_push for name, driver in made.items()}
    assert pushes == {"poll": False, "postgres": True, "zmq": True}


def entry(name: str, value: str, package: str) -> EntryPoint:
    """Return the entry point of an installed distribution of that name."""

    class Distribution:
        pass

    found = EntryPoint(name, value, registry.GROUP)
    brought_by: Any = Distribution()
    brought_by.name = package
    vars(found)["dist"] = brought_by
    return found


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes entry points of other distributions appear."""

    def appear(*entries: EntryPoint) -> None:
        def found(group: str, name: str | None = None) -> list[EntryPoint]:
            return [each for each in entries if each.group == group and name in (None, each.name)]

        monkeypatch.setattr(registry, "entry_points", found)

    return appear


@pytest.mark.conforms("D2")
def test_a_driver_is_found_by_its_entry_point(others: Callable[..., None], database: str) -> None:
    others(entry("pigeon", "sublet_storage.notify.drivers.no_push:NoPushDriver", "carrier"))
    assert list_drivers() == ["pigeon", "poll", "postgres", "zmq"]
    assert load_driver("pigeon")(database).capabilities.is_push is False


def test_ours_are_there_where_nothing_is_installed(others: Callable[..., None], database: str) -> None:
    """The source on a path, or code shipped to executors."""
    others()
    assert [load_driver(name)(database).name for name in THREE] == list(THREE)


POLL = "sublet_storage.notify.drivers.no_push:NoPushDriver"


@pytest.mark.parametrize(
    ("name", "installed", "story"),
    [
        ("kafka", [], r"'kafka'.* Installed are .*poll, postgres.*zmq: choose one of these"),
        ("zmq", [], r"'zmq' .* cannot be loaded \(.*zmq.*\)\. Run `pip install 'sublet\[zmq\]'`"),
        (
            "pigeon",
            [("sublet_storage.notify.drivers.no_push:Nothing", "carrier")],
            r"'pigeon'.*Nothing.*package carrier",
        ),
        ("pigeon", [("pigeonhole:Driver", "carrier")], r"'pigeon' .* cannot be loaded \(no coop\).*package carrier"),
        ("pigeon", [(POLL, "a"), (POLL, "b")], r"'pigeon' is brought by several packages \(a, b\)"),
    ],
    ids=["unknown", "without its library", "without its class", "broken", "brought twice"],
)
def test_a_driver_that_cannot_be_loaded_is_named(
    others: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    installed: list[tuple[str, str]],
    story: str,
) -> None:
    (tmp_path / "pigeonhole.py").write_text("raise RuntimeError('no coop')")
    monkeypatch.setitem(sys.modules, "sublet_storage.notify.drivers.zmq", None)
    monkeypatch.syspath_prepend(str(tmp_path))
    others(*(entry(name, value, package) for value, package in installed))
    with pytest.raises(InvalidSetting, match=story):
        load_driver(name)


def test_ours_is_never_replaced(others: Callable[..., None]) -> None:
    others(entry("postgres", POLL, "a"))
    assert load_driver("postgres") is PostgresNotificationDriver


def test_a_driver_that_cannot_be_made_is_named(others: Callable[..., None], database: str) -> None:
    others(entry("pigeon", "tests.contract.test_notify_drivers:coopless", "carrier"))
    with pytest.raises(InvalidSetting, match=r"'pigeon' cannot be used here \(no coop at ::1\).*or use another one"):
        create_driver("pigeon", database, host="::1")
    with pytest.raises(InvalidSetting, match="'kafka'"):
        create_driver("kafka", database)


def coopless(url: str, *, host: str) -> Any:
    raise ValueError(f"no coop at {host}")


# --- postgres -------------------------------------------------------------------------------------------------------


def test_schemas_receive_nothing_of_each_other(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = load_driver("postgres")(database)
    monkeypatch.setenv("SUBLET_SCHEMA", "other")
    other = load_driver("postgres")(database)
    with connected(one) as (here, sender), connected(other) as (there, second):
        sender.send(b"one")
        second.send(b"other")
        eventually(lambda: (here.messages, there.messages) == ([b"one"], [b"other"]))


def test_every_schema_has_a_channel_of_its_own() -> None:
    names = [channel_name("s" * length) for length in (1, 56, 57, 63)] + [channel_name("s" * 62 + "t")]
    assert all(len(name) <= 63 for name in names)
    assert len(set(names)) == len(names)


@pytest.mark.parametrize("message", [b"", b"text", b"\0", "ä".encode(), bytes(PAYLOAD_LIMIT), b"a" * PAYLOAD_LIMIT])
def test_a_payload_is_text_within_postgres_limit(message: bytes) -> None:
    payloads = {encode_payload(message, place) for place in range(64)}
    assert len(payloads) == 64
    assert all(len(payload) < 8000 and payload.isascii() for payload in payloads)
    assert {decode_payload(payload.encode()) for payload in payloads} == {message}
    assert encode_payload(b"a\1b\2", 1) == "t1a\1b\2", "the server replaces the marks in it"


@pytest.mark.parametrize("payload", [b"", b"t", b"b", b"x0text", b"b0%", b"b0A"])
def test_what_is_no_payload_is_no_message(payload: bytes) -> None:
    assert decode_payload(payload) is None


def test_what_waits_outlives_a_lost_connection(database: str) -> None:
    driver = load_driver("postgres")(database)
    with connected(driver) as (received, sender):
        sender.send(b"before")
        eventually(lambda: b"before" in received.messages)
        with connect(database) as conn:
            ended = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'sublet notify'"
            assert conn.execute(f"{ended} and datname = current_database()").rowcount == 1
        for number in range(100):
            sender.send(b"%d" % number)
        eventually(lambda: len(received.messages) >= 101)
        assert sender.dropped == 0
        assert received.events == ["connected"]


def test_no_more_files_for_a_moment_end_no_thread(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tries = itertools.count()

    def connect_later(*arguments: Any, **options: Any) -> Any:
        if next(tries) < 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return connect(*arguments, **options)

    monkeypatch.setattr(postgres, "connect", connect_later)
    with connected(load_driver("postgres")(database)) as (received, sender):
        sender.send(b"after")
        eventually(lambda: b"after" in received.messages)


def test_a_database_that_is_away_is_no_error(server_url: str) -> None:
    away = psycopg.conninfo.make_conninfo(server_url, host="/nonexistent")
    driver = load_driver("postgres")(away)
    reported: list[str] = []
    say = reported.append
    receiver = driver.open_receiver(lambda _: None, lambda: say("connected"), lambda: say("lost"))
    sender = driver.open_sender([receiver.endpoint])
    for _ in range(3000):
        sender.send(b"message")
    sender.close()
    receiver.close()
    assert sender.dropped == 3000
    assert reported == []


# --- zmq ------------------------------------------------------------------------------------------------------------


def test_messages_without_the_key_are_dropped(database: str) -> None:
    driver = load_driver("zmq")(database)
    with receiving(driver) as (received,), zmq.Context() as context, context.socket(zmq.PUSH) as stranger:
        address, key = received.receiver.endpoint.removeprefix("zmq:").split("?key=")
        stranger.linger = 0
        stranger.connect(address)
        forged = f"zmq:{address}?key={key[::-1]}"
        other = driver.open_sender([forged])
        with sending(driver, [received]) as (sender,):
            for number in range(20):
                with contextlib.suppress(zmq.Again):  # it was let go of already
                    stranger.send(b"forged", zmq.NOBLOCK)
                other.send(b"forged")
                sender.send(b"%d" % number)
            eventually(lambda: b"19" in received.messages)
        other.close()
        assert b"forged" not in received.messages


def test_an_unreachable_node_holds_up_no_end(database: str) -> None:
    """With whatever time the process has."""
    with ZmqSubject("zmq", database).deaf() as deaf:
        sender = load_driver("zmq")(database).open_sender([deaf])
        sender.send(b"message")
        begun = time.monotonic()
        sender.close(BLOCKED_S)
        assert time.monotonic() - begun < BLOCKED_S


def test_ipv6_and_names(database: str) -> None:
    for host, address in (("localhost", r"tcp://(127\.0\.0\.1|\[::1\]):\d+"), ("::1", r"tcp://\[::1\]:\d+")):
        driver = load_driver("zmq")(database, host=host)
        with connected(driver) as (received, sender):
            assert re.fullmatch(rf"zmq:{address}\?key=[0-9a-f]{{64}}", received.receiver.endpoint)
            sender.send(b"message")
            eventually(lambda: received.messages == [b"message"])


@pytest.mark.parametrize("host", ["198.51.100.7", "no such host"])
def test_a_host_that_is_not_this_machines_is_refused(database: str, host: str) -> None:
    with pytest.raises(InvalidSetting, match=rf"host '{host}'.*Give an address of this machine"):
        load_driver("zmq")(database, host=host).open_receiver(lambda message: None, lambda: None, lambda: None)
