"""A leader's writes against consumers, publishers, rollovers and resets; a group's history, and names of sessions."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sublet_borrower.consumer import transaction
from sublet_borrower.consumer.transaction import ProgressTransactions
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.errors import Conflict, GrantLost, NotFound, PermissionDenied, SessionRowLocked
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.admin import reset_transaction
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.coordinator import group_lifecycle, leadership, session_name_owners
from sublet_storage.groups.coordinator.history_queries import read_behind
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model import records
from sublet_storage.groups.model.desired_state import GroupCommand, OverrideSessionWeight, PauseGroup
from sublet_storage.groups.model.records import (
    Group,
    GroupDesiredState,
    GroupOptions,
    GroupWriteResult,
    LeaderLivenessLock,
    LendingOutcome,
)
from sublet_storage.log import epoch_leases
from sublet_storage.log.append import BlockAppend, ProducerIdentity, ProducerStamp, append
from sublet_storage.spaces import space_changes
from sublet_storage.spaces.space_queries import find_space
from tests.contract.group_world import ONE, SHARE, TWO, grant
from tests.integration.log_kit import block, in_epochs, put, stream_of
from tests.interleavings.harness import Connection, Interleavings, Run, Work, in_transaction

WHO = ProducerIdentity("p", 1)
ATOMIC, SHARED, NEW = (Subscription.parse(f"$share/{name}/eu/#") for name in ("atomic", "plain", "new"))
RIVAL = LeaderLivenessLock.of(ONE.incarnation)
ROW = "select status, position, grant_id from lending where group_id = %s and stream_id = %s"


def grant_of(group: Group, held: records.Lending) -> tuple[int, int, int, GrantSecret]:
    """Return what the holder needs to use the grant."""
    assert held.grant_key is not None
    return group.group_id, held.stream_id, held.grant_id, held.grant_key


class Stage:
    """A stream of one message, and two groups, each with a leader. One is atomic and has consumed it, and all epochs up
    to 1; to a consumer of the other the stream is granted."""

    def __init__(self, conn: Connection) -> None:
        self.conn, self.space, self.stream = conn, find_space(conn, "eu").space_id, stream_of(conn, "eu")
        epoch_leases.hold(conn, self.space, WHO, [(1,)], 600)
        put(conn, self.stream, b"x", topic="eu/1")
        self.store, self.terms = PostgresGroupStore(lambda: conn), dict[Group, int]()
        self.atomic = self.led(ATOMIC, GroupOptions(atomic=True))
        self.plain = self.led(SHARED, GroupOptions(records.StartingPosition.EARLIEST))
        self.write(conn, self.plain, renew=True)  # the stream's parents are empty, and over
        (self.held,) = self.granted(self.plain, self.stream)
        self.grant = grant_of(self.plain, self.held)

    def led(self, subscription: Subscription, options: GroupOptions) -> Group:
        """Declare a group, and lead it."""
        group = self.store.declare_group(subscription, options)
        self.terms[group] = self.store.claim(group.group_id, ONE, 3600).term
        return group

    def write(
        self, conn: Connection, group: Group, *entries: records.LendingChange, renew: bool = False
    ) -> GroupWriteResult:
        writes = records.GroupWrites(group.group_id, self.terms[group], entries, renew)
        (result,) = PostgresGroupStore(lambda: conn).commit([writes])
        assert not result.has_stale_term
        return result

    def granted(self, group: Group, *streams: int) -> list[records.Lending]:
        results = self.write(self.conn, group, *map(grant, streams)).results
        assert {each.outcome for each in results} == {LendingOutcome.APPLIED}
        return [each.lending for each in results if each.lending is not None]

    def renew(self, conn: Connection) -> GroupWriteResult:
        return self.write(conn, self.atomic, renew=True)

    def force_release(self, conn: Connection) -> GroupWriteResult:
        seizure = records.ForceRelease(self.stream, self.held.grant_id, "gone")
        return self.write(conn, self.plain, seizure, renew=True)

    def report(self, conn: Connection) -> GroupWriteResult:
        """Report that the message is consumed."""
        return self.write(conn, self.plain, records.AdvancePosition(self.stream, self.held.grant_id, 1))

    def sync(self, conn: Connection) -> GroupWriteResult:
        return self.write(conn, self.plain, renew=True)

    @in_transaction
    def reset(self, conn: Connection) -> None:
        group = group_lifecycle.get_live(conn, SHARED)
        reset_transaction.execute_reset(conn, group, ResetTarget.earliest(), reason="x", force=True)

    def advance(self, position: int, **consumed: Any) -> Work:
        """Return the transaction of a consumer that has come so far in the plain group."""
        return in_transaction(lambda conn: consumer_progress.advance(conn, *self.grant, position, **consumed))

    def consume(self, conn: Connection) -> None:
        """Consume in the consumer's own transaction, after another message."""
        append(conn, [BlockAppend(self.stream, block(b"y"))])
        self.advance(1)(conn)

    def publish(self, conn: Connection) -> Any:
        """Publish in epoch 2, and finish it: all up to 4 is completed."""
        stamp = ProducerStamp(WHO.producer_id, WHO.incarnation, 1)
        moved = epoch_leases.append_and_advance(
            conn, [BlockAppend(stream_of(conn, "eu"), in_epochs((2,)), stamp)], self.space, WHO, [(5,)], 600
        )
        assert moved.change is not None
        return moved

    def roll_over(self, conn: Connection) -> int:
        return space_changes.rollover(conn, "eu")

    def at_once(self, work: Work) -> Work:
        """Return the work as one step, so that others see it only once it is committed."""

        def step(conn: Connection) -> Any:
            conn.execute("select")
            return work(self.conn)

        return step


@pytest.fixture
def stage(conn: Connection) -> Stage:
    return Stage(conn)


@pytest.mark.conforms("S8", "W6")
def test_no_epoch_with_something_unread_is_consumed(orders: Interleavings, stage: Stage) -> None:
    def judge(run: Run) -> None:
        assert not run.errors
        behind = run.conn.execute(
            "select b.stream_id, e.epoch, f.least from block b join stream s using (stream_id)"
            " join consumed_frontier f on f.space_id = s.space_id"
            " left join lending l on l.stream_id = s.stream_id and l.group_id = f.group_id"
            " cross join jsonb_array_elements(b.epoch_bounds -> 'least') as e(epoch)"
            " where b.end_offset > coalesce(l.position, 0) and f.least <> 'null'"
            " and not frontier_admits(f.least, e.epoch)"
        ).fetchall()
        assert behind == []

    others = {"publish": stage.at_once(stage.publish), "roll over": stage.at_once(stage.roll_over)}
    orders.explore({"renew": stage.renew, **others}, judge)


@pytest.mark.timeout(600)
@pytest.mark.conforms("E17", "A5")
def test_progress_stays_and_a_past_grant_commits_none(orders: Interleavings, stage: Stage) -> None:
    def judge(run: Run) -> None:
        ((status, position, grant),) = run.conn.execute(ROW, (stage.plain.group_id, stage.stream)).fetchall()
        consumed = run.answers["consume"] is None
        assert consumed or isinstance(run.answers["consume"], GrantLost)
        if "force_release" in run.answers:
            ended = run.answers["force_release"].results[0].outcome is LendingOutcome.APPLIED
            assert position == consumed
        else:
            ended = run.answers["reset"] is None
            assert ended or isinstance(run.answers["reset"], Conflict)
            assert position == (consumed and not ended)
        assert (status, grant == stage.held.grant_id) == (("free", False) if ended else ("held", True))
        assert consumed or ended
        if consumed and ended:
            asked = "select redelivery_end from lending_history where grant_id = %s and forced"
            assert run.conn.execute(asked, (stage.held.grant_id,)).fetchall() == [(2,)], "all that it may have had"

    for act in ("force_release", "reset"):
        orders.explore({"consume": stage.consume, act: getattr(stage, act)}, judge)


@pytest.mark.conforms("A4", "E17")
def test_a_reset_to_where_it_is_takes_nothing_back(orders: Interleavings, stage: Stage) -> None:
    """Of a group that is consuming: by force."""

    @in_transaction
    def reset(conn: Connection) -> Any:
        target = ResetTarget.current()
        return reset_transaction.execute_reset(conn, stage.plain, target, [stage.stream], reason="x", force=True)

    def judge(run: Run) -> None:
        ((_, position, _),) = run.conn.execute(ROW, (stage.plain.group_id, stage.stream)).fetchall()
        assert position == (run.answers["consume"] is None)
        if not isinstance(run.answers["reset"], Conflict):
            assert [(move.before, move.after) for move in run.answers["reset"]] == [(position, position)]

    orders.explore({"consume": stage.consume, "reset": reset}, judge)


@pytest.mark.conforms("E14")
def test_a_successor_finds_all_that_was_committed(orders: Interleavings, stage: Stage) -> None:
    """Nothing is committed under a term that is over, whatever the leader has read before."""
    group = stage.plain.group_id
    declare = "update leadership set incarnation = %s, lock_key = %s where leadership_id = %s"
    stage.conn.execute(declare, (RIVAL.incarnation, RIVAL.key, group))

    def commit(conn: Connection) -> bool:
        seizure = records.ForceRelease(stage.stream, stage.held.grant_id, "gone")
        writes = records.GroupWrites(group, stage.terms[stage.plain], (seizure,))
        return not PostgresGroupStore(lambda: conn).commit([writes])[0].has_stale_term

    def judge(run: Run) -> None:
        assert not run.errors
        assert run.answers["claim"].node == TWO
        assert not run.answers["commit"] or run.places("commit")[-1] < run.places("claim")[-1]

    claim = in_transaction(lambda conn: leadership.claim(conn, group, TWO, 3600, None, None, RIVAL))
    orders.explore({"commit": commit, "claim": claim}, judge)


@pytest.mark.conforms("E17")
@pytest.mark.parametrize("act", ["report", "sync"])
def test_a_leader_takes_no_progress_back(orders: Interleavings, stage: Stage, conn: Connection, act: str) -> None:
    """Whatever it has read before; `sync` ends the grant, as retention has taken the message."""
    append(conn, [BlockAppend(stage.stream, block(b"y"))])
    if act == "sync":
        stage.roll_over(conn)
        conn.execute("update generation set state = 'gone' where state = 'closed'")

    def judge(run: Run) -> None:
        assert all(isinstance(error, GrantLost) for error in run.errors)
        if not isinstance(run.answers["consume"], GrantLost):
            ((_, position, _),) = run.conn.execute(ROW, (stage.plain.group_id, stage.stream)).fetchall()
            assert position == 2

    orders.explore({"consume": stage.advance(2), "lead": getattr(stage, act)}, judge)


@pytest.mark.conforms("E25")
@pytest.mark.parametrize("what", ["position", "frontier"])
def test_progress_is_read_when_a_commit_is_over(orders: Interleavings, stage: Stage, what: str) -> None:
    """Such as by who got no answer to it; of an atomic group its frontier."""
    read: Any = consumer_progress.read_position
    before: Any = 0
    after: Any = 1
    more = {}
    if what == "frontier":
        (held,) = stage.granted(stage.atomic, stage.stream)
        stage.grant, read = grant_of(stage.atomic, held), consumer_progress.read_consumed_frontier
        before, after = read(stage.conn, *stage.grant), ConsumedFrontier(1, LowerFrontier(((9,),)))
        more = {"consumed": after}

    def judge(run: Run) -> None:
        assert not run.errors
        assert run.answers["read"] == (after if run.places("commit")[0] < run.places("read")[0] else before)

    orders.explore({"commit": stage.advance(1, **more), "read": lambda conn: read(conn, *stage.grant)}, judge)


@pytest.mark.conforms("E25")
def test_a_transaction_locks_rows_in_their_order(
    orders: Interleavings, stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of its batches, and of the rows in the table: so it and a deletion, which locks all of the
    group, end without a deadlock."""
    streams = sorted((stream_of(stage.conn, "default"), stage.stream))
    put(stage.conn, stream_of(stage.conn, "default"), b"x")
    group = stage.led(Subscription.parse("$share/both/#"), GroupOptions(records.StartingPosition.EARLIEST))
    stage.write(stage.conn, group, renew=True)
    held = [grant_of(group, each) for each in stage.granted(group, *streams)]
    stage.conn.execute("update lending set updated_at = updated_at where stream_id = %s", (streams[0],))
    done = {"ticket": 0, "next_offset": 1, "consumed_frontier": None, "complete_transaction": lambda *, recovered: None}
    batches: list[Any] = [
        SimpleNamespace(stream_id=stream, grant_id=grant, grant_key=key, **done)
        for _, stream, grant, key in reversed(held)
    ]

    def consume(conn: Connection) -> None:
        monkeypatch.setattr(transaction, "connect", lambda *_, **__: conn)
        with ProgressTransactions("", lambda: group.group_id, 60.0).begin(batches):
            pass

    @in_transaction
    def delete_by_scan(conn: Connection) -> None:
        for way in ("indexscan", "bitmapscan", "nestloop", "mergejoin"):
            conn.execute(f"set local enable_{way} = off")
        group_lifecycle.delete(conn, group.group_id, None)

    def judge(run: Run) -> None:
        assert all(isinstance(error, GrantLost) for error in run.errors)

    orders.explore({"consume": consume, "delete": delete_by_scan}, judge)


def test_of_two_commands_neither_is_lost(orders: Interleavings, stage: Stage) -> None:
    commands: dict[str, GroupCommand] = {"pause": PauseGroup("maintenance"), "weigh": OverrideSessionWeight("s", 2.0)}

    def apply(name: str, conn: Connection) -> None:
        with conn.transaction():
            group_lifecycle.apply_command(conn, stage.plain, commands[name], None)

    def judge(run: Run) -> None:
        assert not run.errors
        wanted = GroupDesiredState().apply(commands["pause"]).apply(commands["weigh"])
        assert group_lifecycle.get_live(run.conn, SHARED).desired_state == wanted

    orders.explore({name: partial(apply, name) for name in commands}, judge)


@pytest.mark.conforms("E23")
@pytest.mark.parametrize("has_leader", [False, True])
def test_a_reset_gives_a_deleted_group_no_rows(orders: Interleavings, stage: Stage, has_leader: bool) -> None:
    """Also without a leader, whose row both would lock; where there is one, they lock in one order."""
    group = stage.led(NEW, GroupOptions()) if has_leader else stage.store.declare_group(NEW, GroupOptions())

    @in_transaction
    def reset(conn: Connection) -> None:
        reset_transaction.execute_reset(conn, group, ResetTarget.earliest(), reason="x")

    @in_transaction
    def delete(conn: Connection) -> None:
        group_lifecycle.delete(conn, group.group_id, None)

    def judge(run: Run) -> None:
        assert [error for error in run.errors if not isinstance(error, NotFound)] == []
        assert run.conn.execute("select from lending where group_id = %s", (group.group_id,)).rowcount == 0

    orders.explore({"reset": reset, "delete": delete}, judge)


@pytest.mark.conforms("A7")
def test_who_reads_on_is_given_each_line_once(orders: Interleavings, conn: Connection) -> None:
    PostgresGroupStore(lambda: conn).declare_group(SHARE)

    def pause(conn: Connection) -> None:
        group = group_lifecycle.get_live(conn, SHARE)
        with conn.transaction():
            group_lifecycle.apply_command(conn, group, PauseGroup("x"), None)

    def judge(run: Run) -> None:
        assert not run.errors
        first = run.answers["look"]
        later = read_behind(run.conn, 1, first.next, 1000)
        seen = [number for number, _ in (*first.lines, *later.lines)]
        assert sorted(seen) == [number for number, _ in read_behind(run.conn, 1, None, 1000).lines]
        assert len(seen) == 2
        assert read_behind(run.conn, 1, later.next, 1000).lines == ()

    lead = in_transaction(lambda conn: leadership.claim(conn, 1, ONE, 30, None))
    orders.explore({"pause": pause, "lead": lead, "look": lambda conn: read_behind(conn, 1, None, 1000)}, judge)


def test_of_two_who_bind_a_name_one_has_it(orders: Interleavings, conn: Connection) -> None:
    session_name_owners.next_session_epoch(conn, SHARE, "etl", None)

    def bind(principal: str, conn: Connection) -> str:
        session_name_owners.bind(conn, SHARE, "etl", principal)
        return principal

    def judge(run: Run) -> None:
        owner = run.conn.execute("select principal from session_epoch").fetchall()
        assert all(isinstance(error, PermissionDenied | SessionRowLocked) for error in run.errors)
        assert [(answer,) for answer in run.answers.values() if isinstance(answer, str)] == owner

    orders.explore({name: partial(bind, name) for name in ("user:a", "user:b")}, judge)


def test_of_two_releases_of_a_name_one_has_it(orders: Interleavings, conn: Connection) -> None:
    """And recorded in the history of rights."""
    session_name_owners.next_session_epoch(conn, SHARE, "etl", "user:a")
    release = in_transaction(lambda conn: session_name_owners.release(conn, SHARE, "etl"))

    def judge(run: Run) -> None:
        assert {type(answer) for answer in run.answers.values()} == {str, NotFound}
        assert run.conn.execute("select from access_history").rowcount == 1

    orders.explore({"release": release, "release again": release}, judge)
