"""What a consumer writes itself, on the real database: its progress in its own transaction, its session's epoch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import LiteralString

import psycopg
import pytest
from msgspec.structs import replace

from sublet_protocol.domain.errors import GrantLost, UnknownOutcome
from sublet_protocol.domain.grant_keys import timeline_number
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.coordinator.history_queries import NewestHistory, delete_old_history, read_history
from sublet_storage.groups.model.history_record_builder import reason_with_user
from tests.contract.group_world import SHARE, TWO, PostgresWorld
from tests.integration.log_kit import waiting_for_locks
from tests.kit import eventually


@pytest.mark.conforms("E25", "E17")
def test_progress_commits_with_the_users_work(postgres: PostgresWorld) -> None:
    held = postgres.granted(10)
    (longer,) = postgres.add_space("longer", "longer/#")
    postgres.append(longer, 20)
    group_id, stream, grant_id, key = held.uses
    postgres.connection.execute("create table output (n integer)")
    with psycopg.connect(postgres.url) as user:  # the user's own, without our search_path
        user.execute("insert into sublet.output values (1)")
        consumer_progress.advance(user, *held.uses, 4)
        user.commit()
        assert consumer_progress.read_position(user, *held.uses) == 4
        user.execute("insert into sublet.output values (2)")
        consumer_progress.advance(user, *held.uses, 7)
        user.rollback()
        assert consumer_progress.read_position(user, *held.uses) == 4
        user.commit()
        for other, position in ((0, 3), (0, 4), (0, 11), (1, 5), (-1, 5)):
            user.execute("insert into sublet.output values (3)")
            named = f"stream {stream} of group .* grant {grant_id + other} .* Roll"
            with pytest.raises(GrantLost, match=named):
                consumer_progress.advance(user, group_id, stream, grant_id + other, key, position)
            user.rollback()
            assert held.now().position == 4, (other, position)
        held.force_release()
        with pytest.raises(GrantLost):
            consumer_progress.advance(user, *held.uses, 8)
        user.rollback()
        assert consumer_progress.read_position(user, *held.uses) == 4, "history knows how far it came"
        assert consumer_progress.read_position(user, group_id, stream, grant_id - 1, key) is None
    assert postgres.connection.execute("select n from output").fetchall() == [(1,)]
    assert held.now().position == 4


@pytest.mark.conforms("P10")
@pytest.mark.parametrize("draw", ["next_session_epoch('$share/g/#', 'etl')", "register_producer('p')"])
def test_an_open_draw_keeps_no_leader_away(postgres: PostgresWorld, draw: LiteralString) -> None:
    """After a failover; and has the number of the timeline that the leader has."""
    led = postgres.led()
    postgres.connection.execute("update timeline set (name, number) = ('1/00000007', 7)")
    with connect(postgres.url) as user, user.transaction():
        ((drawn,),) = user.execute(f"select {draw}").fetchall()
        term = led.succeed().term
    assert timeline_number(drawn) == timeline_number(term) > 6


@pytest.mark.conforms("E36")
@pytest.mark.parametrize(("before", "then"), [("0", "30min"), ("2h", "30min"), ("7s", "7s")])
@pytest.mark.parametrize(
    "call",
    [
        "advance(%s, %s, %s, 3, %s)",
        "read_progress(%s, %s, %s, %s)",
        "read_consumed_frontier(%s, %s, %s, %s)",
    ],
)
def test_a_transaction_with_progress_idles_not_long(
    postgres: PostgresWorld, call: LiteralString, before: str, then: str
) -> None:
    """Nor one that has read it: that holds the row's lock too."""
    *ids, key = postgres.granted(5).uses
    limit = "show idle_in_transaction_session_timeout"
    with psycopg.connect(postgres.url, options=f"-c idle_in_transaction_session_timeout={before}") as user:
        user.execute("select sublet." + call, (*ids, key.reveal()))
        assert user.execute(limit).fetchall() == [(then,)]
        user.commit()
        assert user.execute(limit).fetchall() == [(before,)]


@pytest.mark.conforms("E27")
def test_progress_counts_behind_the_last_plan_only(postgres: PostgresWorld) -> None:
    held = postgres.granted(10)
    older, newer = held.doubt(0, 4), held.doubt(0, 6)
    held.advance(0, None, newer)
    with psycopg.connect(postgres.url, autocommit=True) as user:
        with pytest.raises(GrantLost):
            consumer_progress.advance(user, *held.uses, 4, in_doubt=older)
        consumer_progress.advance(user, *held.uses, 6, in_doubt=newer)
    assert held.now().position == 6


@pytest.mark.conforms("E17", "E25")
def test_a_callers_temporary_tables_do_not_shadow_ours(postgres: PostgresWorld) -> None:
    held = postgres.granted(5)
    with psycopg.connect(postgres.url) as user:
        for table in ("lending", "lending_history", "stream", "session_epoch"):
            user.execute(f"create temporary table {table} as select * from sublet.{table}")
        consumer_progress.advance(user, *held.uses, 4)
        user.commit()
    assert postgres.connection.execute("select position from sublet.lending").fetchone() == (4,)


@pytest.mark.conforms("E25")
def test_a_position_is_read_after_who_moves_it(postgres: PostgresWorld) -> None:
    held = postgres.granted(5)
    with connect(postgres.url) as asking, connect(postgres.url) as moving, ThreadPoolExecutor(1) as pool:
        with moving.transaction():
            consumer_progress.advance(moving, *held.uses, 3)
            answer = pool.submit(consumer_progress.read_position, asking, *held.uses)
            eventually(lambda: waiting_for_locks(postgres.url))
        assert answer.result(30) == 3


@pytest.mark.conforms("E25", "A7")
def test_a_deleted_groups_grants_have_a_position(postgres: PostgresWorld) -> None:
    held = postgres.granted(5)
    with connect(postgres.url) as user, ThreadPoolExecutor(1) as pool:
        with user.transaction():
            consumer_progress.advance(user, *held.uses, 3)
            deleted = pool.submit(postgres.store.delete_group, SHARE)
            eventually(lambda: waiting_for_locks(postgres.url))
        assert deleted.result(30) == held.led.group_id
        assert consumer_progress.read_position(user, *held.uses) == 3


@pytest.mark.conforms("E35", "A4")
@pytest.mark.parametrize("target", [ResetTarget.earliest(), ResetTarget.latest()], ids=["back", "on"])
def test_a_grant_ended_by_a_reset_has_a_position(postgres: PostgresWorld, target: ResetTarget) -> None:
    held = postgres.granted(5)
    consumer_progress.advance(postgres.connection, *held.uses, 3)
    postgres.reset(held.led, target, force=True, reason=reason_with_user(f"reset to {target}", "me; was at 4"))
    assert consumer_progress.read_position(postgres.connection, *held.uses) == 3


@pytest.mark.conforms("E35", "A4")
def test_a_grant_ended_by_a_parents_reset_has_one(postgres: PostgresWorld) -> None:
    """What it had of a stream that waits for its parent from then on is not what the reset was about."""
    parent = postgres.granted(5)
    (child,) = postgres.rollover(1)
    parent.advance(5)
    postgres.append(child, 5)
    parent.led.sync()
    held = parent.led.grant(child)
    consumer_progress.advance(postgres.connection, *held.uses, 3)
    postgres.reset(parent.led, ResetTarget.earliest(), parent.stream, force=True)
    assert consumer_progress.read_position(postgres.connection, *held.uses) == 3


@pytest.mark.conforms("E35")
def test_a_server_knows_what_became_of_a_commit(postgres: PostgresWorld) -> None:
    held = postgres.granted(5)
    with connect(postgres.url) as user:
        with user.transaction():
            attempt = consumer_progress.advance(user, *held.uses, 3)
            with pytest.raises(UnknownOutcome, match="still in progress"):
                consumer_progress.is_committed(postgres.connection, attempt, 0.0)
        assert consumer_progress.is_committed(postgres.connection, attempt)
        with user.transaction(force_rollback=True):
            attempt = consumer_progress.advance(user, *held.uses, 4)
        assert consumer_progress.is_committed(postgres.connection, attempt) is False
        assert consumer_progress.is_committed(postgres.connection, replace(attempt, timeline="0000FFFF")) is None


def test_session_epochs_only_grow(postgres: PostgresWorld) -> None:
    def draw(_: int) -> list[int]:
        with connect(postgres.url) as connection:
            return [consumer_progress.next_session_epoch(connection, SHARE, "etl") for _ in range(50)]

    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(draw, range(8)))
    assert all(mine == sorted(mine) for mine in drawn)
    assert len({epoch for mine in drawn for epoch in mine}) == 400
    before = now_us(postgres)
    assert postgres.next_session_epoch("etl") >= before
    postgres.connection.execute("update session_epoch set last = last + 1000000000000")
    (ahead,) = postgres.connection.execute("select last from session_epoch").fetchone() or (0,)
    assert postgres.next_session_epoch("etl") == ahead + 1


# --- history, as people read it -------------------------------------------------------------------------------------


def test_history_is_read_from_its_end(postgres: PostgresWorld) -> None:
    led = postgres.led(2)
    first, second = led.streams
    for stream in (first, second, first):
        led.grant(stream).release(0)
    everything = postgres.store.history(led.group_id)
    ours = tuple(line for line in everything if line.stream_id == first)
    assert (len(everything), len(ours)) == (7, 4)
    for asked, lines, count in (
        ((), everything, 7),
        ((None, 2), everything[-2:], 7),
        ((first,), ours, 4),
        ((first, 1), ours[-1:], 4),
    ):
        newest = read_history(postgres.connection, led.group_id, *asked)
        assert newest == NewestHistory(lines, count), asked
        assert newest.is_truncated is (len(lines) < count), asked
    assert [line.event for line in read_history(postgres.connection, led.group_id, 0).records] == ["takeover"]
    assert read_history(postgres.connection, led.group_id + 1) == NewestHistory()


def test_old_history_is_forgotten(postgres: PostgresWorld) -> None:
    """Kept is why a stream is blocked or its holder cannot read it, and who leads now; not what another group has
    blocked, nor what another grant, holder or stream could not read."""
    led = postgres.led(3)
    blocked, unblocked, moved = led.streams
    for stream in (blocked, unblocked):
        led.grant(stream).release(0, "its end", is_beyond_head=True)
    postgres.connection.execute("update lending set status = 'free' where stream_id = %s", (unblocked,))
    postgres.declare(Subscription.parse("$share/other/orders/#"))
    other = "update lending set status = 'blocked' where stream_id = %s and group_id <> %s"
    assert postgres.connection.execute(other, (unblocked, led.group_id)).rowcount == 1
    damaged = led.grant(moved)
    for event in ("unreadable", "readable", "unreadable"):
        damaged.record(event, "damaged")
    assert len(led.events()) == 8
    copy = """
        insert into lending_history (at, group_id, stream_id, event, reason, grant_id, borrower_id, position, term)
        select at, %s, %s, %s, reason, grant_id + %s, %s, 0, 0
          from lending_history where event = 'unreadable' limit 1"""
    taken = (
        "update lending set (status, grant_id, borrower_id) = ('held', %s, 'b1') where (group_id, stream_id) = (%s, %s)"
    )
    postgres.connection.execute(taken, (damaged.grant_id + 1, led.group_id + 1, moved))
    for line in (
        (led.group_id, unblocked, "unreadable", 0, "b1"),
        (led.group_id, moved, "unreadable", 1, "b1"),
        (led.group_id, moved, "unreadable", 0, "b2"),
        (led.group_id, blocked, "readable", 0, "b1"),
        (led.group_id + 1, moved, "readable", 0, "b1"),
    ):
        postgres.connection.execute(copy, line)
    postgres.connection.execute("update lending_history set at = clock_timestamp() - interval '2 hours'")
    postgres.clock.now_us = now_us(postgres)
    postgres.lead(led.group).succeed(TWO)
    assert delete_old_history(postgres.connection, 3 * 3600.0) == 0
    assert delete_old_history(postgres.connection, 3600.0, limit=2, most_s=0.0) == 2, "the next goes on"
    assert delete_old_history(postgres.connection, 3600.0, limit=2) == 10
    left = [(line.event, line.stream_id) for line in led.history()]
    assert left == [("block", blocked), ("unreadable", moved), ("takeover", 0)]
    assert delete_old_history(postgres.connection, 3600.0, limit=2) == 0
    postgres.connection.execute("update lending set status = 'blocked' where stream_id = %s", (moved,))
    assert delete_old_history(postgres.connection, 3600.0) == 1, "it is held no more"


def now_us(world: PostgresWorld) -> int:
    row = world.connection.execute("select (extract(epoch from clock_timestamp()) * 1000000)::bigint").fetchone()
    assert row is not None
    return int(row[0])
