"""Clients that freeze in the middle of a transaction, their connections open: a stopped process, a paused machine."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import psycopg
import pytest

from storage.connect import UnknownOutcome, connect
from storage.groups import leadership
from storage.groups.channel import Channel
from storage.groups.postgres import PostgresGroups
from storage.publish import Publisher, sender
from tests.contract.group_world import ONE, SHARE, TWO, PostgresWorld
from tests.kit import eventually
from tests.postgres_proxy import PostgresProxy

KEYS = "abcdefghijkl"


@pytest.mark.conforms("E13", "E12")
def test_a_leader_frozen_in_the_middle_of_a_renewal_does_not_keep_its_successor_out(postgres: PostgresWorld) -> None:
    """`idle_in_transaction_session_timeout` runs only where the client has ended its turn."""
    postgres.add_space(shards=1)
    group = postgres.store.open_group(SHARE)
    begun = postgres.store.claim(group.group_id, ONE, 0.0)
    frozen, thawed = Event(), Event()
    channel = Channel(lambda: connect(postgres.url, idle_in_transaction_timeout_s=0.2))

    def renew(connection: psycopg.Connection[tuple[object, ...]]) -> None:
        now_us = postgres.clock.now_us
        leadership.renew(connection, ONE, {group.group_id: begun.term}, 0.0, now_us, wait=True)
        leadership.locked(leadership.lock(connection, (group.group_id,), now_us))
        frozen.set()
        thawed.wait()

    successor = PostgresGroups(postgres.url, postgres.clock)
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
    successor.close()
    channel.close()


@pytest.mark.conforms("W2")
@pytest.mark.usefixtures("untold")
def test_a_publisher_frozen_in_the_middle_of_an_append_does_not_stop_the_others(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender, "TRANSACTION_TIMEOUT_S", 4.0)  # for so long its lock can be seen
    with connect(database) as connection, PostgresProxy(database) as cutter:
        frozen = Publisher(cutter.url)
        frozen.publish("a", "first").result(10)
        cutter.freeze(3_000_000)
        sent = [frozen.publish("a", os.urandom(400_000), key=key) for key in KEYS]
        assert cutter.frozen.wait(10)

        def locked() -> bool:
            try:
                connection.execute("select from stream for update nowait")
            except psycopg.errors.LockNotAvailable:
                return True
            return False

        eventually(locked)
        with Publisher(database) as other:
            for delivery in [other.publish("a", "b", key=key) for key in KEYS]:
                delivery.result(8)
        cutter.thaw()
        frozen.close()
        for delivery in sent:
            delivery.result(0)
