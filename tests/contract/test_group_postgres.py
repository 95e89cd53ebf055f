"""What only real connections can show: locks that are waited for, lost connections, and the database's own clock."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from threading import Barrier
from typing import Any

import psycopg
import pytest
from msgspec import structs

from sublet_protocol.domain.errors import (
    Conflict,
    DatabaseUnreachable,
    MalformedRow,
    NotFound,
    StaleTerm,
    UnknownOutcome,
)
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.db.connect import connect
from sublet_storage.db.store_connection import GroupStoreConnection, TransactionRolledBack
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.coordinator import group_lifecycle, leadership
from sublet_storage.groups.coordinator.history_queries import read_behind
from sublet_storage.groups.coordinator.leader_commits import commit_batch
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.coordinator.store import GroupStore
from sublet_storage.groups.model.desired_state import PauseGroup, ResumeGroup
from sublet_storage.groups.model.records import AdvancePosition, ForceRelease, GrantStream, GroupWrites, ReleaseStream
from sublet_storage.util.log_throttle import MIN_INTERVAL_S
from tests.contract.group_world import LEASE_S, ONE, SHARE, TWO, Led, PostgresWorld, grant, outcome
from tests.integration.log_kit import beside_an_open_transaction, go_over_to_another_timeline, waiting_for_locks
from tests.kit import eventually


def patient(world: PostgresWorld) -> PostgresGroupStore:
    """Return a store with a clock frozen now that waits long for locks."""
    now_us = world.clock.now_us
    return world.another_store(lambda: now_us, lock_timeout_s=30, statement_timeout_s=30)


@contextmanager
def blocking(world: PostgresWorld, statement: str) -> Iterator[tuple[psycopg.Connection[Any], ThreadPoolExecutor]]:
    """Yield somebody's open transaction, which has made this statement, and threads for those that wait for it. It ends
    with the block."""
    with ThreadPoolExecutor(2) as pool, connect(world.url) as blocker, blocker.transaction():
        blocker.execute(statement.encode())
        yield blocker, pool


def commit_all(store: GroupStore, groups: Sequence[Led], *entries: Any, sync: bool = False) -> list[str]:
    """Grant the stream to each of the groups in one batch, or make the entries that are given; the outcomes."""
    given = entries or [grant(led.stream) for led in groups]
    batch = [led.writes(entry, sync=sync) for led, entry in zip(groups, given, strict=True)]
    return [result.results[0].outcome for result in store.commit(batch)]


def test_a_creation_out_of_time_names_the_command(postgres: PostgresWorld) -> None:
    store = postgres.another_store(lock_timeout_s=30, statement_timeout_s=0.2)
    named = r"`sublet groups create '\$share/slow/#' --from earliest`"
    with (
        blocking(postgres, "lock table space in access exclusive mode"),
        pytest.raises(TransactionRolledBack, match=named),
    ):
        store.open_group(Subscription.parse("$share/slow/#"), StartingPosition("earliest"))


def test_a_deletion_out_of_time_names_the_command(postgres: PostgresWorld) -> None:
    postgres.group()
    store = postgres.another_store(lock_timeout_s=30, statement_timeout_s=0.2)
    named = r"`sublet groups delete '\$share/billing/orders/#'`"
    with (
        blocking(postgres, "lock table lending in access exclusive mode"),
        pytest.raises(TransactionRolledBack, match=named),
    ):
        store.delete_group(SHARE)
    assert postgres.store.find_live_group(SHARE) is not None


def test_no_failover_leaves_a_locked_grant(postgres: PostgresWorld) -> None:
    """It is of the timeline before, and ends when it can be written."""
    held = postgres.granted(5)
    postgres.connection.execute("update leadership set timeline = 'the former'")
    with (
        blocking(postgres, "select from lending for update"),
        pytest.raises(TransactionRolledBack, match="keeps rows locked that its first leader here has to free"),
    ):
        postgres.store.claim(held.led.group_id, TWO, LEASE_S)
    assert postgres.lead(held.led.group, TWO).row(held.stream).status == "free"


def reports(caplog: pytest.LogCaptureFixture, led: Led) -> list[Any]:
    """Return the records of a group's writes being rejected."""
    return [one for one in caplog.records if f"rejected: group_id={led.group_id}: " in one.getMessage()]


REFUSE = (
    "create or replace function refuse() returns trigger language plpgsql as"
    " $$ begin raise exception 'refused'{}; end $$"
)
NOT_TEXT = "not\0text"


def test_an_open_transaction_costs_progress_little(postgres: PostgresWorld) -> None:
    """It keeps a version of the row for each position; a commit does not read them all."""
    held = postgres.granted(5000)
    positions = count(1)
    connection = postgres.connection

    def advance() -> None:
        writes = held.led.writes(AdvancePosition(held.stream, held.grant_id, next(positions)))
        with connection.transaction():
            (result,) = commit_batch(connection, [writes], postgres.clock.now_us)
        assert [each.outcome for each in result.results] == ["applied"]

    with beside_an_open_transaction(postgres.url, connection, advance) as (first, last):
        assert last <= 1.5 * first


@pytest.mark.parametrize(
    ("too_large", "found"), [("stream_id", "refused"), ("grant_id", "refused"), ("position", "invalid")]
)
def test_a_number_beyond_postgres_is_answered(postgres: PostgresWorld, too_large: str, found: str) -> None:
    """And costs no other change of its group, as an error of the server does."""
    led = postgres.led(2)
    held = led.grant()
    plain = AdvancePosition(held.stream, held.grant_id, 3)
    writes = led.writes(structs.replace(plain, **{too_large: 2**63}), grant(led.streams[1]))
    results = postgres.store.commit([writes])[0].results
    assert [each.outcome for each in results] == [found, "applied"]


def test_streams_are_synced_after_the_changes(postgres: PostgresWorld) -> None:
    """Of the same commit, which a group without a leader does not disturb; a stream is reported as it is then."""
    held, unled = postgres.granted(10), postgres.group(Subscription.parse("$share/unled/#"))
    postgres.rollover(1)
    writes = held.led.writes(ReleaseStream(held.stream, held.grant_id, 7, "leave"), sync=True)
    with postgres.connection.transaction():
        batch = [writes, GroupWrites(unled.group_id, held.led.term)]
        result, other = commit_batch(postgres.connection, batch, postgres.clock.now_us)
    assert (result.has_stale_term, other.has_stale_term) == (False, True)
    renewed = {row.stream_id: (row.status, row.position) for row in result.synced}
    assert renewed[held.stream] == ("free", 7)


@pytest.mark.conforms("E1")
def test_many_first_subscribers_make_one_group(postgres: PostgresWorld) -> None:
    postgres.add_space(shards=2)
    start = Barrier(12)

    def subscribe(_: int) -> int:
        store = postgres.another_store()
        start.wait(timeout=30)
        return store.open_group(SHARE).group_id

    with ThreadPoolExecutor(12) as pool:
        assert len(set(pool.map(subscribe, range(12)))) == 1
    rows = postgres.connection.execute("select count(*), count(distinct group_id) from lending").fetchone()
    assert rows == (2, 1)


@pytest.mark.conforms("W6")
def test_a_group_made_in_a_rollover_misses_no_stream(postgres: PostgresWorld) -> None:
    postgres.add_space()
    with blocking(postgres, "lock table space in share row exclusive mode") as (roller, pool):
        roller.execute("update stream set state = 'closed', head = 3")
        roller.execute("insert into generation (generation_id, space_id, ordinal, filter) overriding system value"
                       " values (2, 1, 1, '#')")  # fmt: skip
        opened = pool.submit(patient(postgres).open_group, SHARE)
        eventually(lambda: waiting_for_locks(postgres.url))
        roller.execute("insert into stream (stream_id, space_id, generation_id, hash_from, hash_to)"
                       " overriding system value values (2, 1, 2, 0, 5)")  # fmt: skip
    assert list(postgres.lead(opened.result(timeout=30)).rows()) == [2]


@pytest.mark.conforms("E21", "W3")
def test_a_space_dropped_in_a_renewal_hides_nothing(postgres: PostgresWorld) -> None:
    postgres.add_space("default", "#")
    postgres.add_space("orders", "orders/#", rolls=(1,))
    led = postgres.lead(postgres.group())
    postgres.rollover(1)
    with blocking(postgres, "lock table lending in share mode") as (_, pool):
        renewal = pool.submit(patient(postgres).commit, [led.writes(sync=True)])
        eventually(lambda: waiting_for_locks(postgres.url))
        (heir,) = postgres.drop_space(2, rolls=(1,))
    assert not renewal.result(timeout=30)[0].has_stale_term
    postgres.append(heir, 1)
    led.sync()
    assert led.grant(heir).row.position == 0


@pytest.mark.conforms("E13")
def test_a_successor_waits_for_a_commit_under_way(postgres: PostgresWorld) -> None:
    led = postgres.led()
    slow = patient(postgres)
    postgres.clock.advance(LEASE_S)
    with blocking(postgres, "lock table lending_history in exclusive mode") as (_, pool):
        commit = pool.submit(commit_all, slow, [led])
        eventually(lambda: waiting_for_locks(postgres.url))
        claim = pool.submit(patient(postgres).claim, led.group_id, TWO, LEASE_S)
        eventually(lambda: waiting_for_locks(postgres.url) == 2)
        assert not claim.done()
    assert commit.result(timeout=30) == ["applied"]
    assert claim.result(timeout=30).node == TWO
    assert postgres.lead(led.group, TWO).row(led.stream).status == "held"


@pytest.mark.conforms("E13", "E14")
def test_a_lease_that_ends_before_a_commit_is_over(postgres: PostgresWorld) -> None:
    (stream,) = postgres.add_space()
    store = postgres.another_store(lock_timeout_s=30, statement_timeout_s=30)
    group = store.open_group(SHARE)
    led = Led(postgres, group, store.claim(group.group_id, ONE, 1.0).term)
    with blocking(postgres, "select from leadership for update") as (_, pool):
        commit = pool.submit(store.commit, [led.writes(grant(stream))])
        eventually(lambda: waiting_for_locks(postgres.url))
        expired = "select bool_and(expires_at < clock_timestamp()) from leadership"
        eventually(lambda: postgres.connection.execute(expired).fetchone() == (True,))
    assert commit.result(timeout=30)[0].has_stale_term
    assert led.events() == []


@pytest.mark.conforms("E14")
@pytest.mark.parametrize("off_s", [600.0, -600.0])
def test_only_the_databases_clock_counts(
    postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch, off_s: float
) -> None:
    true_time, true_monotonic = time.time, time.monotonic
    right, wrong = postgres.another_store(), postgres.another_store()
    claim = right.claim(1, ONE, 30.0)
    monkeypatch.setattr(time, "time", lambda: true_time() + off_s)
    monkeypatch.setattr(time, "monotonic", lambda: true_monotonic() + off_s)
    seen = wrong.claim(1, TWO, 30.0)
    assert (seen.node, seen.term) == (ONE, claim.term)
    assert 0 < seen.remaining_s <= 30
    assert wrong.renew(ONE, {1: claim.term}, 60.0) == {1}
    assert 30 < right.read_leaderships([1])[1].remaining_s <= 60
    monkeypatch.undo()


@pytest.mark.conforms("E32")
def test_a_users_open_transaction_stalls_nobody_else(postgres: PostgresWorld) -> None:
    first, second = postgres.add_space(shards=2)
    groups = [postgres.lead(postgres.group(Subscription.parse(f"$share/g{i}/#"))) for i in range(3)]
    held = groups[0].grant(first)
    postgres.append(first, 5)
    impatient = postgres.another_store(postgres.clock, lock_timeout_s=0.2)
    with connect(postgres.url) as user, user.transaction():
        consumer_progress.advance(user, *held.uses, 3)
        batch = [led.writes(grant(second), sync=True) for led in groups[1:]]
        final = ReleaseStream(first, held.grant_id, 2, "leave")
        results = impatient.commit([groups[0].writes(final, grant(second), sync=True), *batch])
        assert [[r.outcome for r in result.results] for result in results] == [
            ["busy", "applied"], ["applied"], ["applied"],
        ]  # fmt: skip
        every = {led.group_id: led.term for led in groups}
        assert impatient.renew(ONE, every, LEASE_S) == every.keys()
        postgres.clock.advance(LEASE_S)
        term = impatient.claim(groups[0].group_id, TWO, LEASE_S).term
        assert impatient.load(groups[0].group_id, term)[0].position == 0
    assert outcome(held.under(postgres.lead(groups[0].group, TWO)).release(2)) == "applied, free at 3"


def test_what_is_committed_while_a_leader_waits_stays(postgres: PostgresWorld) -> None:
    held = postgres.granted()
    slow = patient(postgres)
    with blocking(postgres, "select from leadership for update") as (_, pool):
        writes = held.led.writes(AdvancePosition(held.stream, held.grant_id, 8))
        commit = pool.submit(slow.commit, [writes])
        eventually(lambda: waiting_for_locks(postgres.url))
        postgres.append(held.stream, 9)
        consumer_progress.advance(postgres.connection, *held.uses, 9)
    assert outcome(commit.result(timeout=30)[0].results[0]) == "applied, held at 9"


# --- what one group costs the others ----------------------------------------------------------------------------------


def test_an_error_costs_only_the_group_that_causes_it(
    postgres: PostgresWorld, caplog: pytest.LogCaptureFixture
) -> None:
    groups = postgres.several(3)
    good = grant(groups[0].stream)
    hostile = GrantStream(groups[0].stream, NOT_TEXT, "a", None, "share")
    assert commit_all(postgres.store, groups, good, hostile, good) == ["applied", "busy", "applied"]
    found = [(one.levelname, one.exc_info is None) for one in reports(caplog, groups[1])]
    assert found == [("ERROR", False)], "this one needs its traceback"
    assert [led.events() for led in groups] == [[("grant", 0, False)], [], [("grant", 0, False)]]


@pytest.mark.conforms("E32")
def test_an_error_nobody_foresaw_costs_only_its_group(
    postgres: PostgresWorld, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = postgres.several(4)

    def commit_or_fail(connection: Any, batch: Sequence[GroupWrites], now_us: int | None) -> object:
        if any(writes.group_id == groups[1].group_id for writes in batch):
            raise KeyError("nothing")
        return commit_batch(connection, batch, now_us)

    monkeypatch.setattr("sublet_storage.groups.coordinator.postgres_store.commit_batch", commit_or_fail)
    for expected in ("applied", "refused"):
        assert commit_all(postgres.store, groups, sync=True) == [expected, "busy", expected, expected]
    assert [(one.levelname, one.exc_info is None) for one in reports(caplog, groups[1])] == [("ERROR", False)]
    monkeypatch.undo()
    assert groups[1].is_granted()


@pytest.mark.conforms("E32")
@pytest.mark.parametrize(("hostile", "most", "written"), [({17}, 13, 29), (set(range(30)), 12, 0)], ids=["one", "all"])
def test_a_refusal_costs_few_transactions(
    postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch, hostile: set[int], most: int, written: int
) -> None:
    groups = postgres.several(30)
    good, bad = grant(groups[0].stream), GrantStream(groups[0].stream, NOT_TEXT, "a", None, "share")
    tried, write = [], GroupStoreConnection.write

    def counted(connection: GroupStoreConnection, work: Any) -> Any:
        tried.append(work)
        return write(connection, work)

    monkeypatch.setattr(GroupStoreConnection, "write", counted)
    entries = [bad if i in hostile else good for i in range(30)]
    assert commit_all(postgres.store, groups, *entries).count("applied") == written
    assert len(tried) <= most


@pytest.mark.conforms("E32")
@pytest.mark.parametrize("where", [slice(0, 12), slice(12, 24), slice(0, 24, 2)], ids=["first", "last", "among"])
@pytest.mark.long
def test_refused_groups_hold_up_no_other(postgres: PostgresWorld, where: slice) -> None:
    groups = postgres.several(24)
    hostile = {led.group_id for led in groups[where]}
    postgres.connection.execute(REFUSE.format(""))

    def refuse(some: set[int]) -> None:
        postgres.connection.execute(
            "create or replace trigger refuse before update on lending for each row when"
            f" (new.group_id in ({', '.join(map(str, some))})) execute function refuse()"
        )

    def written() -> set[int]:
        outcomes = commit_all(postgres.store, groups)
        return {led.group_id for led, found in zip(groups, outcomes, strict=True) if found != "busy"}

    refuse(hostile)
    for _ in range(3):
        assert not written() & hostile, "until it is found out which they are"
    others = {led.group_id for led in groups} - hostile
    assert [written() for _ in range(3)] == [others] * 3
    well_again = {max(hostile)}
    refuse(hostile - well_again)
    assert set.union(*(written() for _ in range(3))) == others | well_again
    postgres.connection.execute("drop trigger refuse on lending")
    assert written() == others | hostile


def lose_connections(world: PostgresWorld, group: Led, when: str) -> None:
    """Have the server end each connection that writes for this group."""
    world.connection.execute(
        "create or replace function vanish() returns trigger language plpgsql as"
        " $$ begin perform pg_terminate_backend(pg_backend_pid()), pg_sleep(60); return new; end $$"
    )
    world.connection.execute(f"{when} for each row when (new.group_id = {group.group_id}) execute function vanish()")


IN_COMMIT = "create constraint trigger vanish after insert on lending_history deferrable initially deferred"


@pytest.mark.conforms("E32")
def test_a_group_that_costs_connections_is_found(postgres: PostgresWorld) -> None:
    """What others write is written meanwhile, by one call or another."""
    groups = postgres.several(8)
    lose_connections(postgres, groups[5], "create trigger vanish before update on lending")

    def written() -> set[int]:
        try:
            outcomes = commit_all(postgres.store, groups)
        except DatabaseUnreachable:
            return set()
        return {nth for nth, found in enumerate(outcomes) if found != "busy"}

    others = set(range(8)) - {5}
    assert set.union(*(written() for _ in range(4))) == others
    assert [written() for _ in range(3)] == [others] * 3
    postgres.connection.execute("drop trigger vanish on lending")
    assert written() == others | {5}


@pytest.mark.conforms("E32")
@pytest.mark.parametrize("apart_s", [60.0, 0.0])
def test_a_rejected_group_stays_apart_for_a_while(
    postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch, apart_s: float
) -> None:
    """Also once it was written: what it costs next, it costs alone."""
    monkeypatch.setattr("sublet_storage.groups.coordinator.postgres_store.SEPARATION_S", apart_s)
    groups = postgres.several(2)
    hostile = GrantStream(groups[0].stream, NOT_TEXT, "a", None, "share")
    for expected in ("busy", "applied"):
        entry = hostile if expected == "busy" else grant(groups[0].stream)
        assert commit_all(postgres.store, groups, entry, entry) == [expected] * 2
    lose_connections(postgres, groups[1], "create trigger vanish before update on lending")
    ends = [ForceRelease(led.stream, led.rows()[led.stream].grant_id, "test") for led in groups]
    if apart_s:
        assert commit_all(postgres.store, groups, *ends) == ["applied", "busy"]
    else:
        with pytest.raises(DatabaseUnreachable):
            commit_all(postgres.store, groups, *ends)


@pytest.mark.conforms("E32")
def test_a_part_lost_in_its_commit_leaves_others_known(postgres: PostgresWorld) -> None:
    groups = postgres.several(4)
    lose_connections(postgres, groups[3], IN_COMMIT)
    with pytest.raises(UnknownOutcome):
        commit_all(postgres.store, groups)
    for unknown in ([False, False, True, True], [False, False, False, True]):
        batch = [led.writes(grant(led.stream)) for led in groups]
        assert [result.is_outcome_unknown for result in postgres.store.commit(batch)] == unknown
    assert [bool(led.events()) for led in groups] == [True, True, True, False]


@pytest.mark.conforms("E32")
def test_a_statement_of_one_group_leaves_no_doubt(postgres: PostgresWorld) -> None:
    """It fails before the commit of all is sent."""
    groups = postgres.several(2)
    lose_connections(postgres, groups[1], "create trigger vanish after insert on lending_history")
    with pytest.raises(DatabaseUnreachable, match="nothing was written") as raised:
        commit_all(postgres.store, groups)
    assert not isinstance(raised.value, UnknownOutcome)


@pytest.mark.conforms("E32")
def test_slow_refusals_end_a_commit_by_the_clock(postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases are not renewed meanwhile; the next call goes on with the half in which it was."""
    groups = postgres.several(4)
    store = postgres.another_store(postgres.clock, lock_timeout_s=0.01)
    postgres.connection.execute(REFUSE.format(""))
    postgres.connection.execute(
        "create trigger refuse before update on lending for each row"
        f" when (new.group_id = {groups[3].group_id} and pg_sleep(0.13) is not null) execute function refuse()"
    )
    found = [commit_all(store, groups) for _ in range(4)]
    assert found[0] == ["busy"] * 4
    assert found[-1] == ["refused", "refused", "refused", "busy"]


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
    groups = postgres.several(3)
    postgres.connection.execute("alter table lending drop constraint lending_check")
    write = f"update lending set {column} = %s where group_id = %s".encode()
    postgres.connection.execute(write, (value, groups[1].group_id))
    assert commit_all(postgres.store, groups) == ["applied", "busy", "applied"]
    (reported,) = reports(caplog, groups[1])
    assert (reported.levelname, "is stored as " in reported.getMessage()) == ("WARNING", True)
    with pytest.raises(MalformedRow, match="write another value"):
        groups[1].rows()


@pytest.mark.conforms("X4")
def test_a_group_refused_repeatedly_is_logged_once(postgres: PostgresWorld, caplog: pytest.LogCaptureFixture) -> None:
    groups = postgres.several(2)
    hostile = GrantStream(groups[0].stream, NOT_TEXT, "a", None, "share")
    began = time.monotonic()
    for _ in range(20):
        assert set(commit_all(postgres.store, groups, hostile, hostile)) == {"busy"}
    assert all(reports(caplog, led) for led in groups)
    most = 1 + int((time.monotonic() - began) / MIN_INTERVAL_S)
    assert len(caplog.records) <= 3 * most, "one for the whole, and one for each group"


def test_a_locked_leadership_costs_only_its_own_group(
    postgres: PostgresWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """And one line in the log."""
    groups = postgres.several(2)
    impatient = postgres.another_store(postgres.clock, lock_timeout_s=0.1)
    locks = f"select from leadership where leadership_id = {groups[0].group_id} for update"
    with blocking(postgres, locks):
        assert impatient.renew(ONE, {led.group_id: led.term for led in groups}, LEASE_S) == {groups[1].group_id}
        assert commit_all(impatient, groups) == ["busy", "applied"]
    reported = [record for record in caplog.records if "group write rejected" in record.getMessage()]
    assert [(one.levelname, one.exc_info, "\n" in one.getMessage()) for one in reported] == [("WARNING", None, False)]


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
    """Some streams with a sync, and what is there is read and reported entirely, in pages; another group of the same
    node, which is synced together with it, is not delayed."""
    behind = postgres.led()
    for ordinal in range(1, 5):
        add_closed_generation(postgres, ordinal, behind.stream, 1500)
    other = postgres.lead(postgres.group(Subscription.parse("$share/other/#")))
    add_closed_generation(postgres, 5, behind.stream, 3)
    store = patient(postgres)
    first = store.commit([led.writes(sync=True) for led in (behind, other)])
    assert [len(result.synced) for result in first] == [3000, 3]
    assert [len(store.commit([behind.writes(sync=True)])[0].synced) for _ in range(3)] == [4500, 6000, 6003]
    loaded = store.load(behind.group_id, behind.term)
    assert len({lending.stream_id for lending in loaded}) == len(loaded) == 6004
    assert [lending.stream_id for lending in loaded if not lending.parents] == [behind.stream]
    for ordinal in (6, 7):
        add_closed_generation(postgres, ordinal, behind.stream, 3)
    later = store.commit([led.writes(sync=True) for led in (behind, other)])
    assert [len(result.synced) for result in later] == [6006, 9]
    finish = "update lending set status = 'finished' where group_id = %s"
    postgres.connection.execute(finish, (behind.group_id,))
    add_closed_generation(postgres, 8, behind.stream, 3)
    assert len(store.commit([behind.writes(sync=True)])[0].synced) == 6, "what is finished does not count"


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


@pytest.mark.conforms("A7")
def test_what_another_timeline_recorded_is_read(postgres: PostgresWorld) -> None:
    """A standby that lacks the last commits gives their transactions' numbers once more, and so does a server with
    lower ones, into which a dump is restored."""
    group, conn = postgres.group(), postgres.connection
    postgres.store.apply_command(SHARE, PauseGroup("the sink is repaired"))
    first = read_behind(conn, group.group_id, None, 1000)
    go_over_to_another_timeline(conn)
    postgres.store.apply_command(SHARE, ResumeGroup())
    conn.execute("update lending_history set xact = '3' where reason not like 'paused%'")
    later = read_behind(conn, group.group_id, first.next, 1000)
    assert [record.reason.split(",")[0] for _, record in later.lines] == ["paused: the sink is repaired", "resumed"]
    assert read_behind(conn, group.group_id, later.next, 1000).lines == ()


# --- connections and locks that are lost ------------------------------------------------------------------------------


def store_backends(world: PostgresWorld, wait_event: str | None = None) -> list[int]:
    sql = "select pid from pg_stat_activity where datname = current_database() and application_name = 'sublet groups'"
    if wait_event:
        sql += f" and wait_event = '{wait_event}'"
    return [row[0] for row in world.connection.execute(sql).fetchall()]


def test_a_long_statement_is_sent_to_its_end(postgres: PostgresWorld) -> None:
    """Also one that is longer than what the socket takes while the server is at work on another."""

    def work(connection: psycopg.Connection[Any]) -> list[Any]:
        connection.execute("select pg_sleep(0.1)")
        connection.execute("select %s::text", ("x" * 8_000_000,))
        return connection.execute("select 2").fetchall()

    assert GroupStoreConnection(lambda: connect(postgres.url, receive_timeout_s=10)).write(work) == [(2,)]


def test_a_connection_lost_between_calls_is_replaced(postgres: PostgresWorld) -> None:
    led = postgres.led()
    for pid in store_backends(postgres):
        postgres.connection.execute("select pg_terminate_backend(%s, 5000)", (pid,))
    with pytest.raises(DatabaseUnreachable, match="nothing was written"):
        led.ask()
    assert led.is_granted()
    assert len(led.events()) == 1


@pytest.mark.parametrize(("when", "error"), [("before", DatabaseUnreachable), ("during", UnknownOutcome)])
def test_a_connection_lost_in_a_commit_is_doubt(postgres: PostgresWorld, when: str, error: type[Exception]) -> None:
    """One that is lost before the commit is not."""
    led = postgres.led()
    slow = patient(postgres)
    table = "lending_history" if when == "during" else "leadership"
    postgres.connection.execute(
        "create function nap() returns trigger language plpgsql as $$ begin perform pg_sleep(60); return null; end $$"
    )
    postgres.connection.execute(
        f"create constraint trigger nap after insert on {table} deferrable initially deferred"
        " for each row execute function nap()"
    )
    with blocking(postgres, "select" + " from leadership for update" * (when == "before")) as (_, pool):
        commit = pool.submit(commit_all, slow, [led])
        asleep = "PgSleep" if when == "during" else "transactionid"
        (pid,) = eventually(lambda: store_backends(postgres, asleep))
        postgres.connection.execute("select pg_terminate_backend(%s)", (pid,))
        with pytest.raises(error) as raised:
            commit.result(timeout=30)
    assert type(raised.value) is error
    postgres.connection.execute(f"drop trigger nap on {table}")
    assert slow.load(led.group_id, led.term)[0].status == "free"


def test_maintenance_is_guarded_by_its_term(postgres: PostgresWorld) -> None:
    claim = postgres.store.claim(0, ONE, LEASE_S)
    now_us = postgres.clock.now_us
    with connect(postgres.url) as keeper, keeper.transaction():
        leadership.check_term(keeper, 0, claim.term, now_us)
        assert postgres.store.claim(0, TWO, LEASE_S) == claim, "a look at it waits for no lock"
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
        impatient = postgres.another_store(postgres.clock, lock_timeout_s=0.02)
        impatient.claim(leadership_id, ONE, 0.0)
        with blocking(postgres, "select from leadership for update"):
            for _ in range(refusals):
                with pytest.raises(TransactionRolledBack):
                    impatient.claim(leadership_id, TWO, LEASE_S)
        assert impatient.claim(leadership_id, TWO, LEASE_S).node.name == TWO.name, refusals


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
    held = postgres.granted(5)
    group = held.led.group
    with psycopg.connect(postgres.url, application_name="somebody's") as user:
        consumer_progress.advance(user, *held.uses, 3)
        locker = rf"process {user.info.backend_pid} of the server \(database user {user.info.user}, application .some"
        with pytest.raises(Conflict, match=rf"has a row that an open transaction keeps locked: {locker}.*Nothing is"):
            postgres.store.delete_group(group.subscription)
        assert postgres.store.find_live_group(group.subscription) == group
    postgres.connection.execute(
        REFUSE.format(" using errcode = 'serialization_failure'")
        + "; create trigger refuse before update on consumer_group for each row execute function refuse()"
    )
    with pytest.raises(TransactionRolledBack, match="refused"):
        postgres.store.delete_group(group.subscription)
    postgres.connection.execute("drop trigger refuse on consumer_group")
    assert postgres.store.delete_group(group.subscription) == group.group_id


def test_a_group_deleted_meanwhile_is_not_changed(postgres: PostgresWorld) -> None:
    """Another process was faster, between the look for it and the change."""
    group = postgres.group()
    postgres.store.delete_group(SHARE)
    with postgres.connection.transaction():
        assert group_lifecycle.apply_command(postgres.connection, group, PauseGroup(), None) is None
        assert not group_lifecycle.delete(postgres.connection, group.group_id, None)
    with pytest.raises(NotFound, match="there is no such group"):
        group_lifecycle.get_live(postgres.connection, SHARE)
