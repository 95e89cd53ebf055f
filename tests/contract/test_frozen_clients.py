"""Clients that freeze in the middle of a transaction, their connections open: a stopped process, a paused machine."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import psycopg
import pytest

from sublet_protocol.domain.errors import UnknownOutcome
from sublet_storage.db.connect import connect
from sublet_storage.db.store_connection import GroupStoreConnection
from sublet_storage.groups.coordinator import leadership
from sublet_storage.producer import Delivery, Publisher, sender
from tests.contract.group_world import ONE, SHARE, TWO, PostgresWorld
from tests.kit import eventually
from tests.kit_nodes import Process
from tests.postgres_proxy import PostgresProxy

KEYS = "abcdefghijkl"
LARGE = b"x" * 200_000  # too large for one call of several blocks


@pytest.mark.conforms("E13", "E12")
def test_a_leader_frozen_in_a_renewal_is_succeeded(postgres: PostgresWorld) -> None:
    """`idle_in_transaction_session_timeout` runs only where the client has ended its turn."""
    postgres.add_space(shards=1)
    group = postgres.store.open_group(SHARE)
    begun = postgres.store.claim(group.group_id, ONE, 0.0)
    frozen, thawed = Event(), Event()
    channel = GroupStoreConnection(lambda: connect(postgres.url, idle_in_transaction_timeout_s=0.2))

    def renew(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        now_us = postgres.clock.now_us
        leadership.renew(connection, ONE, {group.group_id: begun.term}, 0.0, now_us, wait=True)
        leadership.fetch_locked(leadership.lock(connection, (group.group_id,), now_us))
        frozen.set()
        thawed.wait()

    successor = postgres.another_store(postgres.clock)
    with ThreadPoolExecutor(1) as pool:
        renewal = pool.submit(channel.write, renew)
        try:
            assert frozen.wait(10)
            claim = successor.claim(group.group_id, TWO, 10.0)
        finally:
            thawed.set()
        assert claim.node.name == TWO.name
        with pytest.raises(UnknownOutcome):
            renewal.result(10)
    channel.close()


@pytest.mark.long
@pytest.mark.conforms("W2")
@pytest.mark.usefixtures("without_notifications")
def test_a_publisher_frozen_in_an_append_stops_nobody(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "TRANSACTION_TIMEOUT_S", 8.0)  # for so long its lock can be seen
    with connect(database) as connection, PostgresProxy(database) as cutter:
        frozen = Publisher(cutter.url)
        frozen.publish("a", "first").result(10)
        cutter.freeze(b"COMMIT")  # which follows on appends of large blocks to several streams
        sent: list[Delivery] = []
        try:
            while not cutter.frozen.wait(0.05):
                sent += [frozen.publish("a", LARGE, key=key) for key in KEYS]

            def locked() -> bool:
                try:
                    connection.execute("select from stream for update nowait")
                except psycopg.errors.LockNotAvailable:
                    return True
                return False

            eventually(locked)
            with Publisher(database) as other:
                for delivery in [other.publish("a", "b", key=key) for key in KEYS]:
                    delivery.result(60)
        finally:
            cutter.thaw()
            frozen.close()
        for delivery in sent:
            delivery.result(0)


@pytest.mark.conforms("E36")
@pytest.mark.parametrize("number", ["SIGSTOP", "SIGKILL"])
def test_a_consumer_stopped_before_commit_is_revoked(postgres: PostgresWorld, tmp_path: Path, number: str) -> None:
    """Progress that it has written and not committed counts for nothing."""
    held = postgres.granted(5)
    postgres.connection.execute("create table public.output (n integer)")
    *ids, key = held.uses
    facts = (*map(str, ids), key.reveal().hex())
    stopped = Process("tests.processes.committing", postgres.url, *facts, number, log=tmp_path / "log")
    try:
        eventually(lambda: "advanced" in stopped.output(), 60.0, stopped.output)
        eventually(lambda: held.force_release().outcome == "applied", 60.0)
        stopped.signal(signal.SIGCONT)
        eventually(lambda: not stopped.alive, 30.0)
        assert stopped.returncode == (0 if number == "SIGSTOP" else -signal.SIGKILL), stopped.output()
    finally:
        stopped.kill()
    assert held.now().position == 0
    assert postgres.connection.execute("select count(*) from public.output").fetchone() == (0,)
