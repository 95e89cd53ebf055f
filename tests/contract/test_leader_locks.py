"""A group is claimed from a leader whose lease runs, when nobody holds the lock that it has declared."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace

from sublet_leader.election import LivenessLockLost, OwnLivenessLockAcquired, PeerLocksChecked
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.limits import MAX_SUBSCRIBERS
from sublet_storage.db import liveness_lock
from sublet_storage.db.bounded_connection import is_direct
from sublet_storage.db.connect import connect
from sublet_storage.db.liveness_lock import LOCK_CLASS, LivenessLockKeeper, acquire_lock, find_free_locks
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.model.records import LeaderLivenessLock
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.util.stoppable_thread import StoppableThread
from tests.contract.group_world import LEASE_S, ONE, TWO, PostgresWorld, World
from tests.kit import WAIT_S, eventually

FIRST, SECOND = LeaderLivenessLock.of(ONE.incarnation), LeaderLivenessLock.of(TWO.incarnation)
THIRD_KEY = LeaderLivenessLock.of("incarnation-3").key
THREE = NodeIncarnation("three", "incarnation-3", "127.0.0.1:3")


@pytest.mark.conforms("E13")
def test_a_held_lock_keeps_its_leader(world: World) -> None:
    first = world.store.claim(1, ONE, LEASE_S, FIRST.key)
    with world.leader_lock(FIRST.key):
        assert world.store.claim(1, TWO, LEASE_S, SECOND.key, FIRST) == first
        world.clock.advance(LEASE_S)
        assert world.store.claim(1, TWO, LEASE_S, SECOND.key, FIRST).node == TWO, "a frozen one has its lock"


@pytest.mark.conforms("E13", "E15")
def test_a_free_lock_ends_a_lease(world: World) -> None:
    """What the leader before wrote is over, and the row says how long its lease would have lasted."""
    first = world.store.claim(1, ONE, LEASE_S, FIRST.key)
    world.clock.advance(4)
    second = world.store.claim(1, TWO, LEASE_S, SECOND.key, FIRST)
    assert (second.node, second.lock) == (TWO, SECOND)
    assert (second.remaining_s, second.previous_leader_s) == (LEASE_S, LEASE_S - 4)
    assert second.term > first.term
    assert world.store.renew(ONE, {1: first.term}, LEASE_S, FIRST.key) == frozenset()
    assert world.store.release(ONE, {1: first.term}) == frozenset()
    assert world.store.read_leaderships([1]) == {1: second}


def test_a_free_lock_counts_for_its_leader_alone(world: World) -> None:
    """Whoever looked saw that of another, or one that is not declared."""
    world.store.claim(1, ONE, LEASE_S, FIRST.key)
    second = world.store.claim(1, TWO, LEASE_S, SECOND.key, FIRST)
    assert world.store.claim(1, THREE, LEASE_S, None, FIRST) == second
    for other in (replace(SECOND, key=FIRST.key), replace(FIRST, key=SECOND.key)):
        assert world.store.claim(1, THREE, LEASE_S, None, other) == second
    for undeclared in (None, FIRST.key):
        assert world.store.renew(TWO, {1: second.term}, LEASE_S, undeclared) == {1}
        assert world.store.claim(1, THREE, LEASE_S, None, SECOND).node == TWO


def test_a_lease_without_a_lock_lasts(world: World) -> None:
    first = world.store.claim(1, ONE, LEASE_S)
    assert first.lock is None
    assert world.store.claim(1, TWO, LEASE_S, SECOND.key, FIRST) == first


@pytest.mark.conforms("E7", "E16")
def test_a_deposed_lease_counts_for_later_leaders(world: World) -> None:
    """Though the next leader goes soon: the one before may answer pings all that time."""
    world.store.claim(1, ONE, LEASE_S, FIRST.key)
    world.clock.advance(2)
    second = world.store.claim(1, TWO, LEASE_S, SECOND.key, FIRST)
    world.store.release(TWO, {1: second.term})
    world.clock.advance(1)
    third = world.store.claim(1, THREE, LEASE_S)
    assert (third.node, third.previous_leader_s) == (THREE, LEASE_S - 3)
    world.clock.advance(LEASE_S)
    assert world.store.claim(1, ONE, LEASE_S).previous_leader_s == 0


def test_a_lock_is_free_when_its_connection_ends(postgres: PostgresWorld) -> None:
    """It is one connection's at a time; who looks holds nothing afterwards."""
    keys = (FIRST.key, SECOND.key)
    with connect(postgres.url) as holder:
        assert is_direct(holder)
        assert acquire_lock(holder, FIRST.key)
        assert find_free_locks(postgres.connection, keys) == {SECOND.key}
        assert not acquire_lock(postgres.connection, FIRST.key)
    eventually(lambda: find_free_locks(postgres.connection, keys) == set(keys), WAIT_S)
    with connect(postgres.url) as holder:
        assert acquire_lock(holder, FIRST.key)


@pytest.mark.conforms("X4")
def test_many_free_locks_fit_into_the_lock_table(postgres: PostgresWorld) -> None:
    """While it is checked, each is an entry there, of which the server has some thousands for all its users."""
    keys = range(2 * MAX_SUBSCRIBERS)  # as many as a node checks, and more than that table holds
    assert find_free_locks(postgres.connection, keys) == set(keys)


def test_a_claim_by_lock_is_for_a_moment(postgres: PostgresWorld) -> None:
    """The lock of the leader before is free again, for that one to take."""
    postgres.store.claim(1, ONE, LEASE_S, FIRST.key)
    second = postgres.store.claim(1, TWO, LEASE_S, SECOND.key, FIRST)
    assert acquire_lock(postgres.connection, FIRST.key)
    for rival in (replace(FIRST, key=SECOND.key), replace(SECOND, key=THIRD_KEY)):
        found = leadership.claim(postgres.connection, 1, THREE, LEASE_S, postgres.clock.now_us, None, rival)
        assert found == second, "another leads, or with another lock, since it was looked at"


Events = SimpleQueue[OwnLivenessLockAcquired | LivenessLockLost | PeerLocksChecked]


@contextmanager
def keeping(
    url: str, rivals: Sequence[int] = (), clock: Callable[[], float] = time.monotonic, **more: Any
) -> Iterator[tuple[LivenessLockKeeper, Events]]:
    """Yield a keeper of the first lock, whose next check is due in an hour, once it has that lock, and its events."""
    events: Events = SimpleQueue()
    times = dataclasses.replace(LeaderSettings(), lock_check_interval_s=3600.0).lock_times
    keeper = LivenessLockKeeper(url, ONE.incarnation, times, lambda: rivals, events.put, clock, **more)
    keeper.start()
    try:
        assert events.get(timeout=WAIT_S) == OwnLivenessLockAcquired(FIRST.key)
        yield keeper, events
    finally:
        keeper.stop()


def test_a_lost_lock_is_tried_again_at_once(postgres: PostgresWorld) -> None:
    """Also where another process has it for a moment; not only when the next check is due."""
    tried = threading.Event()
    take = "select pg_advisory_lock(%s, %s::integer)"
    with keeping(postgres.url, on_absent=tried.set) as (_, events):
        with connect(postgres.url) as other:
            taken = threading.Thread(target=other.execute, args=(take, (LOCK_CLASS, FIRST.key)))
            taken.start()
            waiting = "select from pg_locks where locktype = 'advisory' and not granted"
            eventually(lambda: postgres.connection.execute(waiting).rowcount > 0, WAIT_S)
            postgres.connection.execute(
                "select pg_terminate_backend(pid) from pg_locks join pg_database on oid = database"
                " where locktype = 'advisory' and granted and datname = current_database()"
            )
            taken.join(WAIT_S)
            assert isinstance(events.get(timeout=WAIT_S), LivenessLockLost)
            assert tried.wait(WAIT_S)
        assert events.get(timeout=WAIT_S) == OwnLivenessLockAcquired(FIRST.key)


def test_between_checks_that_fail_there_is_a_pause(postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the lock itself was acquired each time."""
    pauses: SimpleQueue[float] = SimpleQueue()

    def sleep(keeper: StoppableThread, seconds: float) -> bool:
        pauses.put(seconds)
        return StoppableThread.sleep(keeper, seconds)

    monkeypatch.setattr(LivenessLockKeeper, "sleep", sleep)
    with keeping(postgres.url, [1 << 40], clock=lambda: 0.0):  # which is no key: the statement fails
        assert pauses.get(timeout=WAIT_S) == LeaderSettings().lock_recheck_delay_s


def test_a_new_rival_is_checked_at_once(postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not only when the next check is due."""
    rivals: list[int] = []
    looked_at: list[float] = []

    def find(connection: psycopg.Connection[Any], keys: Sequence[int]) -> frozenset[int]:
        looked_at.append(time.monotonic())
        return find_free_locks(connection, keys)

    monkeypatch.setattr(liveness_lock, "find_free_locks", find)
    with keeping(postgres.url, rivals) as (keeper, events):
        rivals.append(SECOND.key)
        keeper.wakeup()
        check = events.get(timeout=WAIT_S)
        assert isinstance(check, PeerLocksChecked)
        assert check.free == {SECOND.key}
        assert check.connected_at <= check.sent_at <= looked_at[0] <= check.answered_at
        assert [(check.timeline,)] == postgres.connection.execute("select timeline_number()").fetchall()
    keeper.join(WAIT_S)
    assert not any(isinstance(events.get(), LivenessLockLost) for _ in range(events.qsize()))
