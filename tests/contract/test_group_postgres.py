"""What only real connections can show: locks that are waited for, lost connections, and the database's own clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from typing import Any

import psycopg
import pytest

from sublet_protocol.domain.errors import Conflict, DatabaseUnreachable, MalformedRow, StaleTerm, UnknownOutcome
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.db.store_connection import GroupStoreConnection, TransactionRolledBack
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.coordinator.history_queries import read_behind
from sublet_storage.groups.coordinator.leader_commits import commit_batch
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import AdvancePosition, GrantStream, GroupWrites, ReleaseStream
from sublet_storage.util.log_throttle import MIN_INTERVAL_S
from tests.contract.group_world import (
    APPLIED,
    BUSY,
    FREE,
    HELD,
    LEASE_S,
    ONE,
    REFUSED,
    SHARE,
    TWO,
    PostgresWorld,
    events,
    grant,
    grant_of,
    granted,
    outcome,
)
from tests.kit import eventually


def waiting_for_locks(world: PostgresWorld, count: int = 1) -> Callable[[], bool]:
    def waits() -> bool:
        sql = "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
        row = world.connection.execute(sql).fetchone()
        return row is not None and row[0] == count

    return waits


def unfinished(future: Future[Any]) -> bool:
    return not future.done()


def patient(world: PostgresWorld) -> PostgresGroupStore:
    """Return a store with a clock frozen now that waits long for locks."""
    now_us = world.clock.now_us
    store = PostgresGroupStore(world.url, lambda: now_us, lock_timeout_s=30, statement_timeout_s=30)
    world.other_stores.append(store)
    return store


@pytest.mark.conforms("E1")
def test_many_first_subscribers_make_one_group(postgres: PostgresWorld) -> None:
    postgres.add_space(shards=2)
    start = Barrier(12)

    def subscribe(_: int) -> int:
        store = PostgresGroupStore(postgres.url)
        start.wait(timeout=30)
        group = store.open_group(SHARE)
        store.close()
        return group.group_id

    with ThreadPoolExecutor(12) as pool:
        assert len(set(pool.map(subscribe, range(12)))) == 1
    rows = postgres.connection.execute("select count(*), count(distinct group_id) from lending").fetchone()
    assert rows == (2, 1)


@pytest.mark.conforms("W6")
def test_a_group_made_in_a_rollover_misses_no_stream(postgres: PostgresWorld) -> None:
    postgres.add_space()
    with connect(postgres.url) as roller, ThreadPoolExecutor(1) as pool:
        with roller.transaction():
            roller.execute("lock table space in share row exclusive mode")
            roller.execute("update stream set state = 'closed', head = 3")
            roller.execute("insert into generation (generation_id, space_id, ordinal, filter) overriding system value"
                           " values (2, 1, 1, '#')")  # fmt: skip
            opened = pool.submit(patient(postgres).open_group, SHARE)
            eventually(waiting_for_locks(postgres))
            roller.execute("insert into stream (stream_id, space_id, generation_id, hash_from, hash_to)"
                           " overriding system value values (2, 1, 2, 0, 5)")  # fmt: skip
        group = opened.result(timeout=30)
    assert [row.stream_id for row in postgres.store.load(group.group_id, postgres.lead(group))] == [2]


@pytest.mark.conforms("E21", "W3")
def test_a_space_dropped_in_a_renewal_hides_nothing(postgres: PostgresWorld) -> None:
    postgres.add_space("default", "#")
    postgres.add_space("orders", "orders/#", rolls=(1,))
    group = postgres.group()
    term = postgres.lead(group)
    postgres.rollover(1)
    with connect(postgres.url) as blocker, ThreadPoolExecutor(1) as pool:
        with blocker.transaction():
            blocker.execute("lock table lending in share mode")
            renewal = pool.submit(patient(postgres).commit, [GroupWrites(group.group_id, term, (), True)])
            eventually(waiting_for_locks(postgres))
            (heir,) = postgres.drop_space(2, rolls=(1,))
        assert not renewal.result(timeout=30)[0].has_stale_term
    postgres.append(heir, 1)
    postgres.write(group, term, renew=True)
    assert granted(postgres, group, term, heir).position == 0


@pytest.mark.conforms("E13")
def test_a_successor_waits_for_a_commit_under_way(postgres: PostgresWorld) -> None:
    group, term, (stream,) = postgres.led()
    slow = patient(postgres)
    postgres.clock.advance(LEASE_S)
    with connect(postgres.url) as blocker, ThreadPoolExecutor(2) as pool:
        with blocker.transaction():
            blocker.execute("lock table lending_history in exclusive mode")
            commit = pool.submit(slow.commit, [GroupWrites(group.group_id, term, (grant(stream),))])
            eventually(waiting_for_locks(postgres))
            claim = pool.submit(patient(postgres).claim, group.group_id, TWO, LEASE_S)
            eventually(waiting_for_locks(postgres, 2))
            assert unfinished(claim)
        assert commit.result(timeout=30)[0].results[0].outcome is APPLIED
        successor = claim.result(timeout=30)
    assert successor.node == TWO
    assert postgres.row(group, successor.term, stream).status is HELD


@pytest.mark.conforms("E13", "E14")
def test_a_lease_that_ends_before_a_commit_is_over(postgres: PostgresWorld) -> None:
    (stream,) = postgres.add_space()
    store = PostgresGroupStore(postgres.url, lock_timeout_s=30, statement_timeout_s=30)
    group = store.open_group(SHARE)
    term = store.claim(group.group_id, ONE, 1.0).term
    with connect(postgres.url) as blocker, ThreadPoolExecutor(1) as pool:
        with blocker.transaction():
            blocker.execute("select from leadership for update")
            commit = pool.submit(store.commit, [GroupWrites(group.group_id, term, (grant(stream),))])
            eventually(waiting_for_locks(postgres))
            expired = "select bool_and(expires_at < clock_timestamp()) from leadership"
            eventually(lambda: postgres.connection.execute(expired).fetchone() == (True,))
        assert commit.result(timeout=30)[0].has_stale_term
    assert events(postgres, group) == []
    store.close()


@pytest.mark.conforms("E14")
@pytest.mark.parametrize("off_s", [600.0, -600.0])
def test_only_the_databases_clock_counts(
    postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    true_time, true_monotonic = time.time, time.monotonic
    right, wrong = PostgresGroupStore(postgres.url), PostgresGroupStore(postgres.url)
    claim = right.claim(1, ONE, 30.0)
    monkeypatch.setattr(time, "time", lambda: true_time() + off_s)
    monkeypatch.setattr(time, "monotonic", lambda: true_monotonic() + off_s)
    seen = wrong.claim(1, TWO, 30.0)
    assert (seen.node, seen.term) == (ONE, claim.term)
    assert 0 < seen.remaining_s <= 30
    assert wrong.renew(ONE, {1: claim.term}, 60.0) == {1}
    assert 30 < right.read_leaderships([1])[1].remaining_s <= 60
    monkeypatch.undo()
    for store in (right, wrong):
        store.close()


@pytest.mark.conforms("E32")
def test_a_users_open_transaction_stalls_nobody_else(postgres: PostgresWorld) -> None:
    first, second = postgres.add_space(shards=2)
    groups = [postgres.group(Subscription.parse(f"$share/g{i}/#")) for i in range(3)]
    terms = [postgres.lead(group) for group in groups]
    held = granted(postgres, groups[0], terms[0], first)
    postgres.append(first, 5)
    impatient = PostgresGroupStore(postgres.url, postgres.clock, lock_timeout_s=0.2)
    with connect(postgres.url) as user, user.transaction():
        consumer_progress.advance(user, *grant_of(groups[0], held), 3)
        final = ReleaseStream(first, held.grant_id, 2, "leave")
        batch = [GroupWrites(g.group_id, t, (grant(second),), True) for g, t in zip(groups, terms, strict=True)]
        batch[0] = GroupWrites(groups[0].group_id, terms[0], (final, grant(second)), True)
        verdicts = [[r.outcome for r in result.results] for result in impatient.commit(batch)]
        assert verdicts == [[BUSY, APPLIED], [APPLIED], [APPLIED]]
        every = {group.group_id: term for group, term in zip(groups, terms, strict=True)}
        assert impatient.renew(ONE, every, LEASE_S) == every.keys()
        postgres.clock.advance(LEASE_S)
        term = impatient.claim(groups[0].group_id, TWO, LEASE_S).term
        assert impatient.load(groups[0].group_id, term)[0].position == 0
    assert outcome(postgres.apply(groups[0], term, final)) == (APPLIED, FREE, 3)
    impatient.close()


def test_what_is_committed_while_a_leader_waits_stays(postgres: PostgresWorld) -> None:
    group, term, stream, held = postgres.granted()
    slow = patient(postgres)
    with connect(postgres.url) as blocker, ThreadPoolExecutor(1) as pool:
        with blocker.transaction():
            blocker.execute("select from leadership for update")
            writes = GroupWrites(group.group_id, term, (AdvancePosition(stream, held.grant_id, 8),))
            commit = pool.submit(slow.commit, [writes])
            eventually(waiting_for_locks(postgres))
            postgres.append(stream, 9)
            consumer_progress.advance(postgres.connection, *grant_of(group, held), 9)
        assert outcome(commit.result(timeout=30)[0].results[0]) == (APPLIED, HELD, 9)


@pytest.mark.conforms("E17", "E25")
def test_advance_moves_only_its_own_grant_forward(postgres: PostgresWorld) -> None:
    group, term, stream, held = postgres.granted(5)
    postgres.apply(group, term, AdvancePosition(stream, held.grant_id, 2))
    call, key = "select advance(%s, %s, %s, %s, %s)", grant_of(group, held)[-1].reveal()
    with connect(postgres.url) as user:
        for grant_off, position in ((0, 2), (0, 1), (0, 6), (1, 3), (-1, 3)):
            with pytest.raises(psycopg.Error, match="must not commit") as refused:
                user.execute(call, (group.group_id, stream, held.grant_id + grant_off, position, key))
            assert refused.value.sqlstate == "SB001"
            assert postgres.row(group, term, stream).position == 2, (grant_off, position)
        user.execute(call, (group.group_id, stream, held.grant_id, 3, key))
    assert postgres.row(group, term, stream).position == 3


def test_an_error_costs_only_the_group_that_causes_it(
    postgres: PostgresWorld, caplog: pytest.LogCaptureFixture
) -> None:
    (stream,) = postgres.add_space()
    groups = [postgres.group(Subscription.parse(f"$share/g{i}/#")) for i in range(3)]
    terms = [postgres.lead(group) for group in groups]
    batch = [GroupWrites(g.group_id, t, (grant(stream),)) for g, t in zip(groups, terms, strict=True)]
    batch[1] = GroupWrites(groups[1].group_id, terms[1], (GrantStream(stream, "not\0text", "a", None, "share"),))
    verdicts = [result.results[0].outcome for result in postgres.store.commit(batch)]
    assert verdicts == [APPLIED, BUSY, APPLIED]
    reported = [
        record for record in caplog.records if f"rejected: group_id={groups[1].group_id}: " in record.getMessage()
    ]
    assert [(one.levelname, one.exc_info is None) for one in reported] == [("ERROR", False)], (
        "this one needs its traceback"
    )
    assert [events(postgres, group) for group in groups] == [[("grant", 0, False)], [], [("grant", 0, False)]]


@pytest.mark.conforms("E32")
def test_an_error_nobody_foresaw_costs_only_its_group(
    postgres: PostgresWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stream,) = postgres.add_space()
    groups = [postgres.group(Subscription.parse(f"$share/g{i}/#")) for i in range(4)]
    terms = [postgres.lead(group) for group in groups]

    def commit_or_fail(connection: Any, batch: Sequence[GroupWrites], now_us: int | None) -> object:
        if any(writes.group_id == groups[1].group_id for writes in batch):
            raise KeyError("nothing")
        return commit_batch(connection, batch, now_us)

    monkeypatch.setattr("sublet_storage.groups.coordinator.postgres_store.commit_batch", commit_or_fail)
    batch = [
        GroupWrites(group.group_id, term, (grant(stream),), needs_stream_sync=True)
        for group, term in zip(groups, terms, strict=True)
    ]
    for expected in ([APPLIED, BUSY, APPLIED, APPLIED], [REFUSED, BUSY, REFUSED, REFUSED]):
        assert [result.results[0].outcome for result in postgres.store.commit(batch)] == expected
    rejected = f"rejected: group_id={groups[1].group_id}: "
    reported = [record for record in caplog.records if rejected in record.getMessage()]
    assert [(one.levelname, one.exc_info is None) for one in reported] == [("ERROR", False)]
    monkeypatch.undo()
    assert postgres.write(groups[1], terms[1], grant(stream)).results[0].outcome is APPLIED


@pytest.mark.conforms("E32")
@pytest.mark.parametrize(("hostile", "most", "written"), [({17}, 13, 29), (set(range(30)), 12, 0)], ids=["one", "all"])
def test_a_refusal_costs_few_transactions(
    postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch, hostile: set[int], most: int, written: int
) -> None:
    (stream,) = postgres.add_space()
    groups = [postgres.group(Subscription.parse(f"$share/g{i}/#")) for i in range(30)]
    bad = (GrantStream(stream, "not\0text", "a", None, "share"),)
    batch = [
        GroupWrites(group.group_id, postgres.lead(group), bad if i in hostile else (grant(stream),))
        for i, group in enumerate(groups)
    ]
    tried, write = [], GroupStoreConnection.write

    def counted(connection: GroupStoreConnection, work: Any) -> Any:
        tried.append(work)
        return write(connection, work)

    monkeypatch.setattr(GroupStoreConnection, "write", counted)
    verdicts = [result.results[0].outcome for result in postgres.store.commit(batch)]
    assert verdicts.count(APPLIED) == written
    assert len(tried) <= most


@pytest.mark.conforms("E32")
@pytest.mark.parametrize("where", [slice(0, 12), slice(12, 24), slice(0, 24, 2)], ids=["first", "last", "among"])
@pytest.mark.long
def test_refused_groups_hold_up_no_other(postgres: PostgresWorld, where: slice) -> None:
    (stream,) = postgres.add_space()
    groups = [postgres.group(Subscription.parse(f"$share/g{i}/#")) for i in range(24)]
    batch = [GroupWrites(group.group_id, postgres.lead(group), (grant(stream),)) for group in groups]
    hostile = {group.group_id for group in groups[where]}
    postgres.connection.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin raise exception 'refused'; end $$"
    )

    def refuse(some: set[int]) -> None:
        postgres.connection.execute(
            "create or replace trigger refuse before update on lending for each row when"
            f" (new.group_id in ({', '.join(map(str, some))})) execute function refuse()"
        )

    def written() -> set[int]:
        found = postgres.store.commit(batch)
        return {one.group_id for one in found if one.results[0].outcome is not BUSY}

    refuse(hostile)
    for _ in range(3):
        assert not written() & hostile, "until it is found out which they are"
    others = {group.group_id for group in groups} - hostile
    assert [written() for _ in range(3)] == [others] * 3
    well_again = {max(hostile)}
    refuse(hostile - well_again)
    assert set.union(*(written() for _ in range(3))) == others | well_again
    postgres.connection.execute("drop trigger refuse on lending")
    assert written() == others | hostile


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("in_doubt", '{"grant_id": 1, "start": 0, "end": 1, "hold_s": "z", "consumed": null}'),
        ("in_doubt", "[]"),
        ("consumed", '{"upto": 1e300, "least": [["a"]]}'),
    ],
)
def test_a_malformed_row_costs_only_its_own_group(
    postgres: PostgresWorld, caplog: pytest.LogCaptureFixture, column: str, value: str
) -> None:
    """Where it was stored before the checks that refuse it now."""
    (stream,) = postgres.add_space()
    groups = [postgres.group(Subscription.parse(f"$share/g{i}/#")) for i in range(3)]
    terms = [postgres.lead(group) for group in groups]
    postgres.connection.execute("alter table lending drop constraint lending_check")
    write = f"update lending set {column} = %s where group_id = %s".encode()
    postgres.connection.execute(write, (value, groups[1].group_id))
    batch = [GroupWrites(g.group_id, t, (grant(stream),)) for g, t in zip(groups, terms, strict=True)]
    assert [result.results[0].outcome for result in postgres.store.commit(batch)] == [APPLIED, BUSY, APPLIED]
    (reported,) = [one for one in caplog.records if f"rejected: group_id={groups[1].group_id}: " in one.getMessage()]
    assert (reported.levelname, "is stored as " in reported.getMessage()) == ("WARNING", True)
    with pytest.raises(MalformedRow, match="write another value"):
        postgres.store.load(groups[1].group_id, terms[1])


@pytest.mark.conforms("X4")
def test_a_group_refused_repeatedly_is_logged_once(postgres: PostgresWorld, caplog: pytest.LogCaptureFixture) -> None:
    (stream,) = postgres.add_space()
    groups = [postgres.group(Subscription.parse(f"$share/g{i}/#")) for i in range(2)]
    terms = [postgres.lead(group) for group in groups]
    hostile = (GrantStream(stream, "not\0text", "a", None, "share"),)
    began = time.monotonic()
    for _ in range(20):
        batch = [GroupWrites(g.group_id, t, hostile) for g, t in zip(groups, terms, strict=True)]
        assert {r.results[0].outcome for r in postgres.store.commit(batch)} == {BUSY}
    for group in groups:
        assert any(f"rejected: group_id={group.group_id}: " in record.getMessage() for record in caplog.records)
    reports = 1 + int((time.monotonic() - began) / MIN_INTERVAL_S)
    assert len(caplog.records) <= 3 * reports, "one for the whole, and one for each group"


def add_closed_generation(world: PostgresWorld, ordinal: int, parent: int, streams: int) -> None:
    """Add a closed generation with a message in each of its streams."""
    world.connection.execute(
        """
with made as (
  insert into generation (generation_id, space_id, ordinal, filter, state) overriding system value
  select 1 + %(ordinal)s, space_id, %(ordinal)s, filter, 'closed' from generation where ordinal = 0 returning *
)
insert into stream (stream_id, space_id, generation_id, hash_from, hash_to, parents, head, state)
overriding system value
select %(ordinal)s * 10000 + n, space_id, generation_id, 0, 1, array[%(parent)s], 1, 'closed'
  from made, generate_series(1, %(streams)s) n""",
        {"ordinal": ordinal, "parent": parent, "streams": streams},
    )


@pytest.mark.conforms("E33")
def test_a_group_far_behind_gets_the_oldest_first(postgres: PostgresWorld) -> None:
    """Some streams with a sync, and what is there is read and reported entirely, in pages."""
    group, term, (first,) = postgres.led()
    for ordinal in range(1, 5):
        add_closed_generation(postgres, ordinal, first, 1500)
    store, reported = patient(postgres), []
    for _ in range(4):
        (result,) = store.commit([GroupWrites(group.group_id, term, needs_stream_sync=True)])
        reported.append(len(result.synced))
    assert reported == [3000, 4500, 6000, 6000]
    loaded = store.load(group.group_id, term)
    assert len({lending.stream_id for lending in loaded}) == len(loaded) == 6001
    assert [lending.stream_id for lending in loaded if not lending.parents] == [first]


def test_a_group_far_behind_delays_no_other(postgres: PostgresWorld) -> None:
    """Groups of one node are synced together, and one of them may stand still for long."""
    behind, behind_term, (first,) = postgres.led()
    for ordinal in range(1, 5):
        add_closed_generation(postgres, ordinal, first, 1500)
    other = postgres.group(Subscription.parse("$share/other/#"))
    other_term = postgres.lead(other)
    add_closed_generation(postgres, 5, first, 3)
    groups = [GroupWrites(behind.group_id, behind_term, needs_stream_sync=True)]
    groups.append(GroupWrites(other.group_id, other_term, needs_stream_sync=True))
    assert [len(result.synced) for result in patient(postgres).commit(groups)] == [3000, 3]


def test_a_locked_leadership_costs_only_its_own_group(
    postgres: PostgresWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """And one line in the log."""
    (stream,) = postgres.add_space()
    groups = [postgres.group(Subscription.parse(f"$share/g{i}/#")) for i in range(2)]
    terms = [postgres.lead(group) for group in groups]
    impatient = PostgresGroupStore(postgres.url, postgres.clock, lock_timeout_s=0.1)
    with connect(postgres.url) as blocker, blocker.transaction():
        blocker.execute("select from leadership where leadership_id = %s for update", (groups[0].group_id,))
        every = {group.group_id: term for group, term in zip(groups, terms, strict=True)}
        assert impatient.renew(ONE, every, LEASE_S) == {groups[1].group_id}
        batch = [GroupWrites(g.group_id, t, (grant(stream),)) for g, t in zip(groups, terms, strict=True)]
        verdicts = [result.results[0].outcome for result in impatient.commit(batch)]
        assert verdicts == [BUSY, APPLIED]
    impatient.close()
    reported = [record for record in caplog.records if "group write rejected" in record.getMessage()]
    assert [(one.levelname, one.exc_info, "\n" in one.getMessage()) for one in reported] == [("WARNING", None, False)]


@pytest.mark.conforms("A7")
def test_records_of_a_restored_dump_are_not_new(postgres: PostgresWorld) -> None:
    """Their transactions were of another server, and have numbers that are still to come on this one."""
    group, conn = postgres.group(), postgres.connection
    conn.execute(
        "insert into lending_history (at, group_id, stream_id, event, reason, grant_id, position, term, xact)"
        " select now(), %s, 0, 'take_over', '', 0, 0, 0, ((pg_current_xact_id()::text)::bigint + n)::text::xid8"
        " from generate_series(1, 300) n",
        (group.group_id,),
    )
    with conn.transaction():
        conn.execute("set transaction isolation level repeatable read")
        first = read_behind(conn, group.group_id, None, 1000)
        assert len(first.lines) == 300
        assert read_behind(conn, group.group_id, first.next, 1000).lines == ()


def store_backends(world: PostgresWorld, wait_event: str | None = None) -> list[int]:
    sql = "select pid from pg_stat_activity where datname = current_database() and application_name = 'sublet groups'"
    if wait_event:
        sql += f" and wait_event = '{wait_event}'"
    return [row[0] for row in world.connection.execute(sql).fetchall()]


def test_a_connection_lost_between_calls_is_replaced(postgres: PostgresWorld) -> None:
    group, term, (stream,) = postgres.led()
    for pid in store_backends(postgres):
        postgres.connection.execute("select pg_terminate_backend(%s, 5000)", (pid,))
    with pytest.raises(DatabaseUnreachable, match="nothing was written"):
        postgres.apply(group, term, grant(stream))
    assert granted(postgres, group, term, stream).status is HELD
    assert len(events(postgres, group)) == 1


@pytest.mark.parametrize(("when", "error"), [("before", DatabaseUnreachable), ("during", UnknownOutcome)])
def test_a_connection_lost_in_a_commit_is_doubt(postgres: PostgresWorld, when: str, error: type[Exception]) -> None:
    """One that is lost before the commit is not."""
    group, term, (stream,) = postgres.led()
    slow = patient(postgres)
    table = "lending_history" if when == "during" else "leadership"
    postgres.connection.execute(
        "create function nap() returns trigger language plpgsql as $$ begin perform pg_sleep(60); return null; end $$"
    )
    postgres.connection.execute(
        f"create constraint trigger nap after insert on {table} deferrable initially deferred"
        " for each row execute function nap()"
    )
    with connect(postgres.url) as blocker, ThreadPoolExecutor(1) as pool:
        if when == "before":
            blocker.execute("begin")
            blocker.execute("select from leadership for update")
        commit = pool.submit(slow.commit, [GroupWrites(group.group_id, term, (grant(stream),))])
        asleep = "PgSleep" if when == "during" else "transactionid"
        (pid,) = eventually(lambda: store_backends(postgres, asleep))
        postgres.connection.execute("select pg_terminate_backend(%s)", (pid,))
        with pytest.raises(error) as raised:
            commit.result(timeout=30)
    assert type(raised.value) is error
    postgres.connection.execute(f"drop trigger nap on {table}")
    assert slow.load(group.group_id, term)[0].status is FREE
    slow.close()


def test_maintenance_is_guarded_by_its_term(postgres: PostgresWorld) -> None:
    claim = postgres.store.claim(0, ONE, LEASE_S)
    now_us = postgres.clock.now_us
    with connect(postgres.url) as keeper, keeper.transaction():
        leadership.check_term(keeper, 0, claim.term, now_us)
        with connect(postgres.url) as other, pytest.raises(psycopg.errors.LockNotAvailable):
            other.execute("select from leadership for no key update nowait")
        for term, at_us in ((claim.term - 1, now_us), (claim.term, now_us + 11_000_000)):
            with pytest.raises(StaleTerm):
                leadership.check_term(keeper, 0, term, at_us)


@pytest.mark.conforms("E13", "E12")
def test_a_claim_refused_for_its_lock_is_granted_later(postgres: PostgresWorld) -> None:
    """A leader frozen in a transaction holds its row until the server ends that: however often others asked until then.

    From the sixth time on the driver prepares the statement.
    """
    for leadership_id, refusals in enumerate((1, 4, 5, 6, 7, 8, 12), start=1):
        impatient = PostgresGroupStore(postgres.url, postgres.clock, lock_timeout_s=0.02)
        impatient.claim(leadership_id, ONE, 0.0)
        with connect(postgres.url) as frozen, frozen.transaction():
            frozen.execute("select from leadership for update")
            for _ in range(refusals):
                with pytest.raises(TransactionRolledBack):
                    impatient.claim(leadership_id, TWO, LEASE_S)
        assert impatient.claim(leadership_id, TWO, LEASE_S).node.name == TWO.name, refusals
        impatient.close()


@pytest.mark.conforms("A8")
def test_a_claim_behind_the_last_term_is_a_data_error(postgres: PostgresWorld) -> None:
    """A node's health ignores those of claims: they are about one group's row."""
    postgres.connection.execute(
        "insert into leadership (leadership_id, term, expires_at) values (7, 9223372036854775807, 'epoch')"
    )
    with pytest.raises(psycopg.DataError, match="out of range"):
        postgres.store.claim(7, ONE, LEASE_S)
    assert postgres.store.claim(8, ONE, LEASE_S).node.name == ONE.name


@pytest.mark.conforms("A9")
def test_who_cannot_delete_a_group_learns_why(postgres: PostgresWorld) -> None:
    group, _, _, held = postgres.granted(5)
    with psycopg.connect(postgres.url, application_name="somebody's") as user:
        consumer_progress.advance(user, *grant_of(group, held), 3)
        locker = rf"process {user.info.backend_pid} of the server \(database user {user.info.user}, application .some"
        with pytest.raises(Conflict, match=rf"has a row that an open transaction keeps locked: {locker}.*Nothing is"):
            postgres.store.delete_group(group.subscription)
        assert postgres.store.find_live_group(group.subscription) == group
    postgres.connection.execute(
        "create function refuse() returns trigger language plpgsql as"
        " $$ begin raise exception 'not now' using errcode = 'serialization_failure'; end $$;"
        " create trigger refuse before update on consumer_group for each row execute function refuse()"
    )
    with pytest.raises(TransactionRolledBack, match="not now"):
        postgres.store.delete_group(group.subscription)
    postgres.connection.execute("drop trigger refuse on consumer_group")
    assert postgres.store.delete_group(group.subscription) == group.group_id
