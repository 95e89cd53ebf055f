"""What a consumer writes itself, on the real database: its progress in its own transaction, its session's epoch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import LiteralString

import psycopg
import pytest
from msgspec.structs import replace

from sublet_protocol.domain.errors import GrantLost, UnknownOutcome
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.coordinator.history_queries import NewestHistory, delete_old_history, read_history
from sublet_storage.groups.model.history_record_builder import reason_with_user
from sublet_storage.groups.model.records import AdvancePosition, ForceRelease, GroupOptions, ReleaseStream
from tests.contract.group_world import LEASE_S, ONE, SHARE, TWO, PostgresWorld, events, grant_of, granted
from tests.contract.test_group_postgres import waiting_for_locks
from tests.kit import eventually


@pytest.mark.conforms("E25", "E17")
def test_progress_commits_with_the_users_work(postgres: PostgresWorld) -> None:
    group, term, stream, held = postgres.granted(10)
    (longer,) = postgres.add_space("longer", "longer/#")
    postgres.append(longer, 20)
    ours = grant_of(group, held)
    postgres.connection.execute("create table output (n integer)")
    with psycopg.connect(postgres.url) as user:  # the user's own, without our search_path
        user.execute("insert into sublet.output values (1)")
        consumer_progress.advance(user, *ours, 4)
        user.commit()
        assert consumer_progress.read_position(user, *ours) == 4
        user.execute("insert into sublet.output values (2)")
        consumer_progress.advance(user, *ours, 7)
        user.rollback()
        assert consumer_progress.read_position(user, *ours) == 4
        user.commit()
        for position in (3, 4, 11):
            user.execute("insert into sublet.output values (3)")
            with pytest.raises(GrantLost, match=f"stream {stream} of group .* grant {held.grant_id} .* Roll"):
                consumer_progress.advance(user, *ours, position)
            user.rollback()
        postgres.apply(group, term, ForceRelease(stream, held.grant_id, "silent"))
        with pytest.raises(GrantLost):
            consumer_progress.advance(user, *ours, 8)
        user.rollback()
        assert consumer_progress.read_position(user, *ours) == 4, "history knows how far it came"
        assert consumer_progress.read_position(user, *ours[:2], held.grant_id - 1, ours[-1]) is None
    assert postgres.connection.execute("select n from output").fetchall() == [(1,)]
    assert postgres.row(group, term, stream).position == 4


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
    group, _, _, held = postgres.granted(5)
    limit = "show idle_in_transaction_session_timeout"
    with psycopg.connect(postgres.url, options=f"-c idle_in_transaction_session_timeout={before}") as user:
        *grant, key = grant_of(group, held)
        user.execute("select sublet." + call, (*grant, key.reveal()))
        assert user.execute(limit).fetchall() == [(then,)]
        user.commit()
        assert user.execute(limit).fetchall() == [(before,)]


@pytest.mark.conforms("E27")
def test_progress_counts_behind_the_last_plan_only(postgres: PostgresWorld) -> None:
    group, term, stream, held = postgres.granted(10)
    older, newer = InDoubtRange(held.grant_id, 0, 4, 60.0), InDoubtRange(held.grant_id, 0, 6, 60.0)
    postgres.apply(group, term, AdvancePosition(stream, held.grant_id, 0, None, newer))
    with psycopg.connect(postgres.url, autocommit=True) as user:
        with pytest.raises(GrantLost):
            consumer_progress.advance(user, *grant_of(group, held), 4, in_doubt=older)
        consumer_progress.advance(user, *grant_of(group, held), 6, in_doubt=newer)
    assert postgres.row(group, term, stream).position == 6


@pytest.mark.conforms("E17", "E25")
def test_a_callers_temporary_tables_do_not_shadow_ours(postgres: PostgresWorld) -> None:
    group, _, _, held = postgres.granted(5)
    with psycopg.connect(postgres.url) as user:
        for table in ("lending", "lending_history", "stream", "session_epoch"):
            user.execute(f"create temporary table {table} as select * from sublet.{table}")
        consumer_progress.advance(user, *grant_of(group, held), 4)
        user.commit()
    assert postgres.connection.execute("select position from sublet.lending").fetchone() == (4,)


@pytest.mark.conforms("E25")
def test_a_position_is_read_after_who_moves_it(postgres: PostgresWorld) -> None:
    group, _, _, held = postgres.granted(5)
    ours = grant_of(group, held)
    with connect(postgres.url) as asking, connect(postgres.url) as moving, ThreadPoolExecutor(1) as pool:
        with moving.transaction():
            consumer_progress.advance(moving, *ours, 3)
            answer = pool.submit(consumer_progress.read_position, asking, *ours)
            eventually(waiting_for_locks(postgres))
        assert answer.result(30) == 3


@pytest.mark.conforms("E25", "A7")
def test_a_deleted_groups_grants_have_a_position(postgres: PostgresWorld) -> None:
    group, _, _, held = postgres.granted(5)
    ours = grant_of(group, held)
    with connect(postgres.url) as user, ThreadPoolExecutor(1) as pool:
        with user.transaction():
            consumer_progress.advance(user, *ours, 3)
            deleted = pool.submit(postgres.store.delete_group, SHARE)
            eventually(waiting_for_locks(postgres))
        assert deleted.result(30) == group.group_id
        assert consumer_progress.read_position(user, *ours) == 3


@pytest.mark.conforms("E35", "A4")
@pytest.mark.parametrize("target", [ResetTarget.earliest(), ResetTarget.latest()], ids=["back", "on"])
def test_a_grant_ended_by_a_reset_has_a_position(postgres: PostgresWorld, target: ResetTarget) -> None:
    group, _, _, held = postgres.granted(5)
    consumer_progress.advance(postgres.connection, *grant_of(group, held), 3)
    postgres.reset(group, target, force=True, reason=reason_with_user(f"reset to {target}", "me; was at 4"))
    assert consumer_progress.read_position(postgres.connection, *grant_of(group, held)) == 3


@pytest.mark.conforms("E35", "A4")
def test_a_grant_ended_by_a_parents_reset_has_one(postgres: PostgresWorld) -> None:
    """What it had of a stream that waits for its parent from then on is not what the reset was about."""
    group, term, parent, held = postgres.granted(5)
    (child,) = postgres.rollover(1)
    postgres.apply(group, term, AdvancePosition(parent, held.grant_id, 5))
    postgres.append(child, 5)
    postgres.write(group, term, renew=True)
    ours = grant_of(group, granted(postgres, group, term, child))
    consumer_progress.advance(postgres.connection, *ours, 3)
    postgres.reset(group, ResetTarget.earliest(), parent, force=True)
    assert consumer_progress.read_position(postgres.connection, *ours) == 3


@pytest.mark.conforms("E35")
def test_a_server_knows_what_became_of_a_commit(postgres: PostgresWorld) -> None:
    group, _, _, held = postgres.granted(5)
    ours = grant_of(group, held)
    with connect(postgres.url) as user:
        with user.transaction():
            attempt = consumer_progress.advance(user, *ours, 3)
            with pytest.raises(UnknownOutcome, match="still in progress"):
                consumer_progress.is_committed(postgres.connection, attempt, 0.0)
        assert consumer_progress.is_committed(postgres.connection, attempt)
        with user.transaction(force_rollback=True):
            attempt = consumer_progress.advance(user, *ours, 4)
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
    clock = "select (extract(epoch from clock_timestamp()) * 1000000)::bigint"
    row = postgres.connection.execute(clock).fetchone()
    assert row is not None
    assert consumer_progress.next_session_epoch(postgres.connection, SHARE, "etl") >= row[0]
    postgres.connection.execute("update session_epoch set last = last + 1000000000000")
    (ahead,) = postgres.connection.execute("select last from session_epoch").fetchone() or (0,)
    assert consumer_progress.next_session_epoch(postgres.connection, SHARE, "etl") == ahead + 1


def test_a_consumers_role_needs_no_right_on_the_tables(postgres: PostgresWorld) -> None:
    group, _, _, held = postgres.granted(5)
    with connect(postgres.url) as user:
        user.execute("drop role if exists a_consumer")
        user.execute("create role a_consumer")
        user.execute("grant usage on schema sublet to a_consumer")
        user.execute("grant execute on function advance, read_progress, next_session_epoch to a_consumer")
        user.execute("set role a_consumer")
        try:
            with pytest.raises(psycopg.errors.InsufficientPrivilege):
                user.execute("select * from lending")
            consumer_progress.advance(user, *grant_of(group, held), 2)
            assert consumer_progress.read_position(user, *grant_of(group, held)) == 2
            assert consumer_progress.next_session_epoch(user, SHARE, "etl") > 0
        finally:
            user.execute("reset role")
            user.execute("drop owned by a_consumer")
            user.execute("drop role a_consumer")


# --- history, as people read it -------------------------------------------------------------------------------------


def test_history_is_read_from_its_end(postgres: PostgresWorld) -> None:
    group, term, (first, second) = postgres.led(2)
    for stream in (first, second, first):
        held = granted(postgres, group, term, stream)
        postgres.apply(group, term, ReleaseStream(stream, held.grant_id, 0, "leave"))
    everything = postgres.store.history(group.group_id)
    assert len(everything) == 7
    assert read_history(postgres.connection, group.group_id) == NewestHistory(everything, 7)
    assert read_history(postgres.connection, group.group_id, limit=2) == NewestHistory(everything[-2:], 7)
    ours = tuple(line for line in everything if line.stream_id == first)
    assert len(ours) == 4
    assert read_history(postgres.connection, group.group_id, first) == NewestHistory(ours, 4)
    assert read_history(postgres.connection, group.group_id, first, 1) == NewestHistory(ours[-1:], 4)
    assert [line.event for line in read_history(postgres.connection, group.group_id, 0).records] == ["takeover"]
    assert read_history(postgres.connection, group.group_id + 1) == NewestHistory()


def test_old_history_is_forgotten(postgres: PostgresWorld) -> None:
    """Kept is why a stream is blocked, and who leads now; not what another group has blocked."""
    group, term, (blocked, unblocked, moved) = postgres.led(3)
    for stream in (blocked, unblocked):
        lost = ReleaseStream(stream, granted(postgres, group, term, stream).grant_id, 0, "its end", is_beyond_head=True)
        postgres.apply(group, term, lost)
    postgres.connection.execute("update lending set status = 'free' where stream_id = %s", (unblocked,))
    postgres.store.declare_group(Subscription.parse("$share/other/orders/#"), GroupOptions())
    other = "update lending set status = 'blocked' where stream_id = %s and group_id <> %s"
    assert postgres.connection.execute(other, (unblocked, group.group_id)).rowcount == 1
    granted(postgres, group, term, moved)
    assert len(events(postgres, group)) == 5
    postgres.connection.execute("update lending_history set at = clock_timestamp() - interval '2 hours'")
    postgres.clock.now_us = round(now_s(postgres) * 1_000_000)
    postgres.store.claim(group.group_id, ONE, LEASE_S)
    postgres.clock.advance(LEASE_S)
    postgres.lead(group, TWO)
    assert delete_old_history(postgres.connection, 3 * 3600.0) == 0
    assert delete_old_history(postgres.connection, 3600.0, limit=2) == 5
    left = postgres.store.history(group.group_id)
    assert [(line.event, line.stream_id) for line in left] == [("block", blocked), ("takeover", 0)]
    assert delete_old_history(postgres.connection, 3600.0, limit=2) == 0


def now_s(world: PostgresWorld) -> float:
    row = world.connection.execute("select extract(epoch from clock_timestamp())::float8").fetchone()
    assert row is not None
    return float(row[0])
