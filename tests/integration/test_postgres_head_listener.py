"""Notifications from publishers straight to sessions: who may listen, what arrives, and that nothing rests on it."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any

import psycopg
import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.new_data.postgres_head_listener import PostgresHeadListener, subscribe_heads
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.limits import MAX_NOTIFICATIONS_PER_S
from sublet_storage.db.connect import connect, resolve_schema_name
from sublet_storage.node_directory import NodeIncarnation, deregister, register
from sublet_storage.notify.changes import ChangeNotification, NotifySettings, stream_change
from sublet_storage.notify.codec import encode
from sublet_storage.notify.drivers.listener_slots import (
    DEFAULT_LISTENER_SLOTS,
    LOCK_CLASS,
    VARIABLE,
    acquire_listener_slot,
)
from sublet_storage.notify.drivers.postgres import channel_name, encode_payload
from sublet_storage.producer import Publisher
from tests.integration.feed_kit import address_of
from tests.integration.notify_kit import NODE
from tests.integration.sharing_kit import Stage
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED
from tests.postgres_proxy import PostgresProxy

Connection = psycopg.Connection[Any]


@pytest.fixture
def listened(conn: Connection) -> None:
    """Some node is notified by LISTEN and NOTIFY."""
    register(conn, NODE, 600, 1, notify_endpoint="postgres:")


@pytest.fixture
def stage_settings() -> dict[str, str]:
    """Nodes are not notified."""
    times = asdict(NotifySettings().scaled(SPEED))
    return {"SUBLET_NOTIFY": "poll"} | {f"SUBLET_NOTIFY_{name.upper()}": str(value) for name, value in times.items()}


@contextmanager
def received(url: str) -> Iterator[dict[int, int]]:
    """Yield {stream: head} as notified to this process so far."""
    heads: dict[int, int] = {}
    feed = subscribe_heads(url, heads.update, lambda _: None)
    try:
        yield heads
    finally:
        feed.stop()


def say(conn: Connection, stream: int, head: int) -> None:
    """Notify as a publisher does."""
    message = encode(ChangeNotification("p", "i", "stream", 1, 0, (stream_change(stream, head, closed=False),)))
    conn.execute("select pg_notify(%s, %s)", (channel_name(resolve_schema_name()), encode_payload(message, 0)))


def listeners(conn: Connection) -> int:
    """Return how many slots are taken."""
    return len(holders(conn))


def connections(conn: Connection) -> int:
    """Return the number of this process's connections for listening."""
    ours = "application_name = 'sublet direct listener' and datname = current_database()"
    return conn.execute(f"select from pg_stat_activity where {ours}").rowcount


def holders(conn: Connection) -> list[int]:
    """Server processes that have a place."""
    ours = "locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())"
    return [pid for (pid,) in conn.execute(f"select pid from pg_locks where classid = {LOCK_CLASS} and {ours}")]


def listening_threads() -> list[PostgresHeadListener]:
    return [thread for thread in threading.enumerate() if isinstance(thread, PostgresHeadListener)]


def may_listen(url: str) -> bool:
    """Whether one more connection gets a place, which it has only as long as this takes."""
    with connect(url) as conn:
        return acquire_listener_slot(conn)


def take_all(url: str, places: ExitStack) -> None:
    for _ in range(DEFAULT_LISTENER_SLOTS):
        assert acquire_listener_slot(places.enter_context(connect(url)))


@pytest.mark.conforms("D1", "D11")
def test_the_places_to_listen_are_limited(database: str, conn: Connection) -> None:
    register(conn, NodeIncarnation("other", "x", "h:1"), 600, 1, notify_endpoint="poll:")
    assert not may_listen(database)
    register(conn, NODE, 600, 1, notify_endpoint="postgres:")
    with ExitStack() as places:
        take_all(database, places)
        assert listeners(conn) == DEFAULT_LISTENER_SLOTS
        assert not may_listen(database)
    eventually(lambda: listeners(conn) == 0)
    assert may_listen(database)
    deregister(conn, NODE)
    assert not may_listen(database)


@pytest.mark.usefixtures("listened")
def test_behind_a_pooler_nobody_listens(database: str) -> None:
    with PostgresProxy(database) as proxy:
        assert may_listen(proxy.url)
        proxy.pool()
        assert not may_listen(proxy.url)


@pytest.mark.usefixtures("listened")
def test_heads_arrive_and_nothing_stays_behind(database: str, conn: Connection) -> None:
    with received(database) as heads, Publisher(database) as publisher:
        eventually(lambda: listeners(conn) == 1)
        position = publisher.publish("t", b"value").result(10)
        assert eventually(lambda: heads.get(position.stream)) == position.offset + 1
        with received(database) as others:
            publisher.publish("t", b"more").result(10)
            assert eventually(lambda: others.get(position.stream)) == position.offset + 2
            assert connections(conn) == 1
        last = publisher.publish("t", b"last").result(10)
        eventually(lambda: heads[position.stream] == last.offset + 1)
    eventually(lambda: connections(conn) == 0)


@pytest.mark.conforms("D11")
def test_schemas_share_the_places_to_listen(database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    register(conn, NODE, 600, 1, notify_endpoint="postgres:")
    conn.execute("create schema other; create table other.node (like sublet.node); insert into other.node table node")
    with ExitStack() as taken:
        monkeypatch.setenv("SUBLET_SCHEMA", "other")
        take_all(database, taken)
        monkeypatch.delenv("SUBLET_SCHEMA")
        assert not may_listen(database)


@pytest.mark.usefixtures("listened")
def test_a_late_change_of_the_schema_moves_no_listener(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(database) as conn:
        monkeypatch.setenv("SUBLET_SCHEMA", "other")
        assert acquire_listener_slot(conn)
        assert conn.execute("select pg_listening_channels()").fetchall() == [(channel_name("sublet"),)]


@pytest.mark.usefixtures("listened")
def test_a_process_that_is_configured_so_never_listens(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, "0")
    feed = subscribe_heads(database, print, print)
    assert listening_threads() == []
    feed.stop()
    monkeypatch.setenv(VARIABLE, "1")
    with connect(database) as one:
        assert [acquire_listener_slot(one), may_listen(database)] == [True, False]


@pytest.mark.parametrize("text", ["", "-1", "eight", "1.5", "1001"])
def test_a_number_of_places_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv(VARIABLE, text)
    with pytest.raises(
        InvalidSetting, match=rf"^{VARIABLE} is .*: it must be a whole number from 0 to 1000\. Leave it out for 8\.$"
    ):
        subscribe_heads("postgresql:///x", print, print)


@pytest.mark.usefixtures("listened")
def test_a_process_short_of_files_listens_later(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def connect_or_not(*arguments: Any, **named: Any) -> Connection:
        tries.append(arguments)
        if len(tries) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return connect(*arguments, **named)

    monkeypatch.setattr("sublet_borrower.new_data.postgres_head_listener.connect", connect_or_not)
    with received(database):
        eventually(lambda: listeners(conn) == 1)


@pytest.mark.usefixtures("listened")
def test_a_dead_thread_is_replaced(database: str, conn: Connection) -> None:
    with received(database):
        (first,) = listening_threads()
        first.stop()
        with received(database):
            eventually(lambda: listeners(conn) == 1)


@pytest.mark.usefixtures("listened")
def test_a_connection_that_is_lost_is_made_again(database: str, conn: Connection) -> None:
    with PostgresProxy(database) as proxy, received(proxy.url) as heads:

        def is_notified() -> bool:
            say(conn, 5, 1)
            return bool(heads)

        eventually(is_notified)
        (before,) = holders(conn)
        proxy.hang_up()
        eventually(lambda: [pid for pid in holders(conn) if pid != before])
        heads.clear()
        eventually(is_notified)


@pytest.mark.usefixtures("listened")
def test_who_waits_listens_itself_if_it_is_alone(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it does not wait, or there are others, the thread listens."""
    monkeypatch.setattr("sublet_storage.notify.drivers.postgres.QUIET_S", 86_400.0)
    threads: dict[int, int] = {}
    feed = subscribe_heads(database, lambda heads: threads.update(dict.fromkeys(heads, threading.get_ident())), print)
    assert feed.listener is not None
    wait = partial(feed.listener.wait, WAIT_S)
    eventually(lambda: listeners(conn) == 1)
    for head in (1, 3):
        eventually(lambda: feed.listener is not None and feed.listener.wait(0.001))
        say(conn, head, 1)
        assert wait()
        assert threads[head] == threading.get_ident()
        say(conn, head + 1, 1)
        assert eventually(lambda head=head: threads.get(head + 1)) != threading.get_ident()  # type: ignore[misc]
    threading.Timer(0.0, feed.listener.end_wait).start()
    assert wait()
    with received(database) as others:
        assert not wait()
        say(conn, 5, 1)
        eventually(lambda: 5 in threads and 5 in others)
    feed.stop()


@pytest.mark.usefixtures("listened")
def test_who_listens_notices_a_lost_connection(database: str, conn: Connection) -> None:
    feed = subscribe_heads(database, print, print)
    assert feed.listener is not None
    for _ in range(2):
        (pid,) = eventually(lambda: holders(conn))
        eventually(lambda: feed.listener is not None and feed.listener.wait(0.001))
        conn.execute("select pg_terminate_backend(%s)", (pid,))
        while pid in holders(conn) or not holders(conn):
            feed.listener.wait(0.001)
    feed.stop()


@pytest.mark.conforms("D1", "P5")
@pytest.mark.usefixtures("listened")
def test_an_invented_head_disturbs_no_session(database: str, conn: Connection, stage: Stage) -> None:
    """Its own node receives nothing: what it receives comes straight from publishers, or whoever says to be one."""
    stage.serve("n1")
    nodes, settings = [address_of(stage.fleet.nodes["n1"])], BorrowerSettings().scaled(SPEED)
    with Session("$share/g/t", database, nodes=nodes, settings=settings) as session, Publisher(database) as publisher:
        eventually(lambda: session.poll(0.1) is None and session.assignment(), WAIT_S)
        eventually(lambda: listeners(conn) == 1)
        stream = publisher.publish("t", b"1").result(10).stream
        assert [batch.table["value"].to_pylist() for batch in [session.poll(10)] if batch] == [[b"1"]]

        def is_believed() -> bool:
            session.poll(0.05)
            before = session.head_counters.pushed
            say(conn, stream, 2**40)
            session.poll(0.05)
            return session.head_counters.pushed > before

        eventually(is_believed)
        publisher.publish("t", b"2").result(10)
        batch = session.poll(10)
        assert batch is not None
        assert batch.table["value"].to_pylist() == [b"2"]
    eventually(lambda: connections(conn) == 0 and listeners(conn) == 0)


@pytest.mark.conforms("X4")
def test_a_direct_listener_takes_so_many_a_second() -> None:
    """What any user of the database sends is not decoded without end."""
    listener = PostgresHeadListener("never opened")
    taken: list[int] = []
    listener.handlers = ((lambda heads: taken.extend(heads.values()), lambda _: None),)
    for head in range(1, MAX_NOTIFICATIONS_PER_S + 100):
        message = encode(ChangeNotification("p", "i", "stream", 1, 0, (stream_change(1, head, closed=False),)))
        listener.receive(encode_payload(message, 0).encode(), 5.0)
    assert len(taken) == MAX_NOTIFICATIONS_PER_S
    listener.receive(encode_payload(message, 0).encode(), 6.0)
    assert taken[-1] == MAX_NOTIFICATIONS_PER_S + 99
