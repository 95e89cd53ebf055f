"""Server processes of Postgres that are frozen: connections stay open, the kernel acknowledges, and no answer comes.

A reader, a node and a publisher do not wait for them without end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import psycopg
import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_leader.jobs import maintenance, outbox_relay
from sublet_leader.jobs.maintenance import MaintenanceThreads
from sublet_leader.jobs.outbox_relay import OutboxRelay
from sublet_leader.observe import health as health_module
from sublet_leader.observe.health import Health, HealthState, evaluate_health
from sublet_leader.observe.health_signals import HealthSignals
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import DatabaseUnreachable, Unavailable, UnknownOutcome
from sublet_storage.db import reconnecting_connection
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.notify.drivers import postgres
from sublet_storage.producer import Publisher, sender
from tests.integration.feed_kit import address_of
from tests.integration.log_kit import Connection, everything, put, stream_of
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet
from tests.postgres_proxy import PostgresProxy

GROUP = "$share/g/#"
SETTINGS = replace(BorrowerSettings().scaled(SPEED), read_timeout_s=30.0)


def processes(conn: Connection, application: str) -> list[int]:
    """The server's, of that application's connections."""
    found = "select pid from pg_stat_activity where application_name = %s and datname = current_database()"
    return [row[0] for row in conn.execute(found, (application,))]


@contextmanager
def frozen(conn: Connection, application: str) -> Iterator[None]:
    """The server processes of that application's connections, until the block ends. Each is frozen while it waits for
    its client, when it has none of the locks that all of Postgres would then wait for."""
    idle = "select from pg_stat_activity where pid = %s and state = 'idle' and wait_event = 'ClientRead'"
    pids = processes(conn, application)
    assert pids

    def freeze(pid: int) -> bool:
        os.kill(pid, signal.SIGSTOP)
        if conn.execute(idle, (pid,)).fetchone() is not None:
            return True
        os.kill(pid, signal.SIGCONT)
        return False

    try:
        for pid in pids:
            eventually(partial(freeze, pid), WAIT_S)
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def in_time(work: Callable[[], Any]) -> Any:
    """Return its result, or raise its error; an AssertionError if it does not return in time."""
    results: list[Any] = []

    def caught() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 it is raised below
            results.append(error)

    thread = threading.Thread(target=caught, daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert results, "it hangs"
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


def test_a_session_gets_over_a_frozen_reader(database: str, conn: Connection, fleet: Fleet) -> None:
    settings = replace(BorrowerSettings().scaled(SPEED), read_timeout_s=0.5)
    stream = stream_of(conn, "default")
    address_of(fleet.nodes["n1"])
    with Session(GROUP, database, starting_position="earliest", settings=settings) as session:
        put(conn, stream, b"before", topic="a")
        first = in_time(lambda: session.poll(WAIT_S))
        with frozen(conn, "sublet reader"):
            put(conn, stream, b"meanwhile", topic="a")
            second = in_time(lambda: session.poll(WAIT_S))
    assert isinstance(first, Batch)
    assert isinstance(second, Batch)
    assert [batch.table.column("value").to_pylist() for batch in (first, second)] == [[b"before"], [b"meanwhile"]]
    assert second.first == first.end


@pytest.mark.conforms("A8", "E16")
def test_a_node_gets_over_a_frozen_connection(database: str, conn: Connection, fleet: Fleet) -> None:
    stream = stream_of(conn, "default")
    address_of(fleet.nodes["n1"])
    with Session(GROUP, database, starting_position="earliest", settings=SETTINGS) as session:
        put(conn, stream, b"before", topic="a")
        assert in_time(lambda: session.poll(WAIT_S))
        with frozen(conn, "sublet groups"):
            put(conn, stream, b"meanwhile", topic="a")
            batch = in_time(lambda: session.poll(WAIT_S))
            batch.ack()
            saved, said = "select position from lending where stream_id = %s", fleet.nodes["n1"].output
            eventually(lambda: conn.execute(saved, (stream,)).fetchone() == (batch.end,), WAIT_S, said)


@pytest.mark.parametrize("trouble", ["frozen", "ended"])
def test_an_idle_transactions_connection_is_replaced(
    database: str, conn: Connection, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Before a user's work begins that would be lost with it."""
    monkeypatch.setattr(reconnecting_connection, "IDLE_S", 0.0)
    monkeypatch.setattr(reconnecting_connection, "ANSWER_TIMEOUT_S", 0.5)
    stream, done = stream_of(conn, "default"), "select position from lending where stream_id = %s"
    with Session(GROUP, database, starting_position="earliest", settings=SETTINGS, auto_ack=False) as session:
        for number in (1, 2):
            put(conn, stream, b"x", topic="a")
            batch = in_time(lambda: session.poll(WAIT_S))
            with contextlib.ExitStack() as stack:
                if number == 2 and trouble == "frozen":
                    stack.enter_context(frozen(conn, "sublet transaction"))
                elif number == 2:
                    for pid in processes(conn, "sublet transaction"):
                        conn.execute("select pg_terminate_backend(%s, 5000)", (pid,))
                with batch.transaction() as transaction:
                    transaction.execute("select 1")
                assert conn.execute(done, (stream,)).fetchone() == (number,)


def test_silence_closes_the_connection(database: str, conn: Connection) -> None:
    with connect(database, application_name="silent", receive_timeout_s=0.3) as silent:
        assert silent.execute("select 1").fetchone() == (1,)
        with frozen(conn, "silent"), pytest.raises(psycopg.OperationalError, match=r"not a byte .* for 0\.3 s"):
            in_time(lambda: silent.execute("select 2"))
        assert silent.closed


@pytest.mark.conforms("E36")
def test_a_frozen_listening_connection_is_replaced(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing may come to it for hours: that it is silent says nothing."""
    monkeypatch.setattr(postgres, "QUIET_S", 0.05)
    monkeypatch.setattr(postgres, "RECEIVE_TIMEOUT_S", 2.0)
    driver, said = postgres.PostgresNotificationDriver(database), list[object]()
    with (
        contextlib.closing(driver.open_sender([postgres.ENDPOINT])) as sender,
        contextlib.closing(driver.open_receiver(said.append, partial(said.append, "on"), partial(said.append, "lost"))),
    ):
        eventually(lambda: said == ["on"], WAIT_S)
        with frozen(conn, "sublet listen"):
            eventually(lambda: said == ["on", "lost", "on"], WAIT_S)
            sender.send(b"meanwhile")
            eventually(lambda: said[3:] == [b"meanwhile"], WAIT_S)


def test_an_answer_in_pieces_is_waited_for(database: str) -> None:
    """It takes longer than the silence that is allowed."""
    with connect(database, receive_timeout_s=0.4) as conn:
        rows = conn.execute(
            "select length(repeat('x', 9000)), pg_sleep(0.02)::text, repeat('x', 9000) from generate_series(1, 40)"
        ).fetchall()
        assert len(rows) == 40


# --- the maintenance ------------------------------------------------------------------------------------------------


@contextmanager
def frozen_in_a_step(database: str, conn: Connection, application: str) -> Iterator[None]:
    """A server process of that application, until the block ends. It is frozen while it waits for a lock that the
    statement needs, and gets it afterwards: what others take does not conflict."""
    found = (
        "select pid from pg_stat_activity where application_name = %s and wait_event_type = 'Lock'"
        " and datname = current_database()"
    )
    stopped: list[int] = []

    def freeze() -> bool:
        for (pid,) in conn.execute(found, (application,)).fetchall():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)
                if (pid,) in conn.execute(found, (application,)).fetchall():
                    stopped.append(pid)
                    return True
                os.kill(pid, signal.SIGCONT)
        return False

    try:
        with connect(database) as holder, holder.transaction():
            holder.execute("lock table space, generation in access exclusive mode")
            eventually(freeze, WAIT_S)
        yield
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)


@pytest.fixture
def term(conn: Connection) -> int:
    """Claim the maintenance for an hour; return the term."""
    return leadership.claim(conn, MAINTENANCE, NodeIncarnation("n1", "n1-1", "localhost:1"), 3600, None).term


@pytest.mark.conforms("A8", "E16")
@pytest.mark.parametrize("application", ["sublet maintenance", "sublet payloads"])
def test_maintenance_goes_on_over_another_connection(
    database: str,
    conn: Connection,
    term: int,
    monkeypatch: pytest.MonkeyPatch,
    application: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(maintenance, "RECEIVE_TIMEOUT_S", 3.0)
    connected: list[str] = []
    keeper = MaintenanceThreads(
        database, lambda: term, 86_400.0, 0.05, on_connected=lambda name, _: connected.append(name)
    )
    keeper.start()
    try:
        with frozen_in_a_step(database, conn, application):
            conn.execute("insert into sink_batch values ('write', 0, 1, true, clock_timestamp() - interval '2 d')")
            before = connected.count(application)
            eventually(lambda: connected.count(application) > before, WAIT_S)
            eventually(lambda: conn.execute("select from sink_batch").fetchone() is None, WAIT_S)
    finally:
        keeper.stop()
    assert f"job failed, retrying: job={application}: " in caplog.text
    assert "steps failed" not in caplog.text, "the others are not tried over a connection that is closed"


def test_an_unforeseen_error_does_not_end_a_job(database: str, term: int) -> None:
    connected: list[str] = []

    def fail_at_first(name: str, _: object) -> None:
        connected.append(name)
        if connected.count(name) == 1:
            raise RuntimeError("unforeseen")

    keeper = MaintenanceThreads(database, lambda: term, 86_400.0, 0.05, on_connected=fail_at_first)
    relay = OutboxRelay(database, lambda: term, fail_at_first)
    keeper.start()
    relay.start()
    try:
        jobs = ("sublet maintenance", "sublet payloads", "sublet relay")
        eventually(lambda: all(connected.count(name) > 1 for name in jobs), WAIT_S)
    finally:
        keeper.stop()
        relay.stop()


@pytest.mark.conforms("A8")
def test_health_shows_a_silent_connection_of_a_job(
    database: str, conn: Connection, term: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it lasts, and without taking the node out of service."""
    monkeypatch.setattr(outbox_relay, "STATEMENT_TIMEOUT_S", 600.0)
    health_signals = HealthSignals(time.monotonic)

    def health() -> Health:
        health_signals.beat()
        return evaluate_health(health_signals, LeaderSettings())

    relay = OutboxRelay(database, lambda: term, health_signals.on_job_connected)
    relay.start()
    try:
        eventually(lambda: health_signals.job_connections and health().check_named("maintenance").is_ok, WAIT_S)
        with frozen(conn, "sublet relay"):
            monkeypatch.setattr(health_module, "SILENT_SHARE", 0.001)
            eventually(lambda: health().worst_check.state is HealthState.STALLED, WAIT_S)
            assert "'sublet relay'" in health().worst_check.detail
            assert health().is_ready
            assert health().is_alive
        eventually(lambda: health().worst_check.is_ok, WAIT_S)
    finally:
        relay.stop()


# --- a publisher ------------------------------------------------------------------------------------------------------


def no_threads_left() -> bool:
    return not [thread for thread in threading.enumerate() if thread.name.startswith("sublet publisher")]


@pytest.mark.parametrize("size", [10, 900_000], ids=["waiting for an answer", "in the middle of sending"])
def test_close_returns_and_reports_what_failed(database: str, without_notifications: None, size: int) -> None:
    with PostgresProxy(database) as proxy:
        publisher = Publisher(proxy.url)
        publisher.publish("t", b"first").result(20)
        proxy.freeze()
        sent = [publisher.publish(f"t/{index}", os.urandom(size)) for index in range(10)]
        assert proxy.frozen.wait(60), "nothing was sent"
        later = publisher.publish("t", b"later")
        reported = (
            r"before the publisher was closed that it is stored, and given up: it had not answered yet\. It may be"
        )
        with pytest.raises(Unavailable, match=reported):
            publisher.close(timeout_s=1)
        assert all(delivery.is_done for delivery in (*sent, later))
        with pytest.raises(Unavailable, match=r"given up: there was no time left to send it\. Publish it again\."):
            later.result(0)
        eventually(no_threads_left)


def test_retry_timeout_bounds_a_frozen_server(database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "MIN_ATTEMPT_S", 0.2)
    publisher = Publisher(database, delivery_timeout_s=1)
    publisher.publish("t", b"first").result(20)
    with frozen(conn, "sublet publisher"):
        delivery = publisher.publish("t", b"lost")
        with pytest.raises(
            Unavailable, match=r"within 1 s that it is stored, and given up: .* It may be stored or not"
        ):
            delivery.result(60)
    publisher.publish("t", b"next").result(20)
    with pytest.raises(Unavailable):
        publisher.close()


@pytest.mark.long
def test_what_waits_behind_a_timeout_is_not_sent(database: str, conn: Connection) -> None:
    """Else each would be waited for as long again. The first is waited for 5 s, beyond the time of all that wait."""
    publisher = Publisher(database, delivery_timeout_s=0.1, block_messages=1, blocks_per_commit=1)
    publisher.publish("t", b"first").result(20)
    with frozen(conn, "sublet publisher"):
        lost = publisher.publish("t", b"lost")
        waiting = [publisher.publish("t", b"waiting") for _ in range(3)]
        with pytest.raises(UnknownOutcome):
            lost.result(60)
        for delivery in waiting:
            with pytest.raises(DatabaseUnreachable, match=r"not sent within 0\.1 s, .* Publish it again"):
                delivery.result(60)
    publisher.publish("t", b"next").result(20)
    with pytest.raises(UnknownOutcome):
        publisher.close()
    stored = [message["value"] for messages in everything(conn).values() for message in messages]
    assert [value for value in stored if value != b"lost"] == [b"first", b"next"]


def test_lingering_beyond_the_timeout_is_tried_once(database: str) -> None:
    with Publisher(database, linger_ms=300, delivery_timeout_s=0.1) as publisher:
        assert [publisher.publish("t", b"x").result(20).offset for _ in range(2)] == [0, 1]


def test_another_connection_is_tried(database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "ATTEMPT_TIMEOUT_S", 0.5)
    with Publisher(database) as publisher:
        publisher.publish("t", b"first").result(20)
        with frozen(conn, "sublet publisher"):
            assert publisher.publish("t", b"second").result(20).offset == 1
        assert publisher.publish("t", b"third").result(20).offset == 2


def test_a_server_that_answers_is_waited_for_as_ever(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "ATTEMPT_TIMEOUT_S", 2.0)
    with Publisher(database) as publisher:
        publisher.publish("t", b"first").result(20)
        before = processes(conn, "sublet publisher")
        for pause_s in (0.0, 2.5, 0.0):
            time.sleep(pause_s)  # longer than an answer may take: nothing is asked meanwhile
            publisher.publish("t", b"x").result(20)
        assert processes(conn, "sublet publisher") == before
    eventually(no_threads_left)
