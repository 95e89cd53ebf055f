"""A leader's writes against consumers, publishers, rollovers and resets."""

from __future__ import annotations

from contextlib import closing
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from sublet_borrower.consumer import transaction
from sublet_borrower.consumer.transaction import ProgressTransactions
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.errors import Conflict, GrantLost, NotFound
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.admin import reset_transaction
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.desired_state import GroupCommand, OverrideSessionWeight, PauseGroup
from sublet_storage.groups.model.records import (
    AdvancePosition,
    ForceRelease,
    GrantStream,
    Group,
    GroupDesiredState,
    GroupOptions,
    GroupWriteResult,
    GroupWrites,
    LendingChange,
    LendingOutcome,
    StartingPosition,
)
from sublet_storage.log import epoch_leases
from sublet_storage.log.append import BlockAppend, ProducerIdentity, ProducerStamp, append
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.spaces import space_changes
from sublet_storage.spaces.space_queries import find_space
from tests.contract.group_world import grant_of
from tests.integration.log_kit import block, in_epochs, put, stream_of
from tests.interleavings.harness import Connection, Interleavings, Run, Work

NODE, WHO = NodeIncarnation("n1", "n1-1", "127.0.0.1:1"), ProducerIdentity("p", 1)
ATOMIC, SHARED = Subscription.parse("$share/atomic/eu/#"), Subscription.parse("$share/plain/eu/#")


class Stage:
    """A stream of one message, and two groups, each with a leader. One is atomic and has consumed it, and all epochs up
    to 1; to a consumer of the other the stream is granted."""

    def __init__(self, conn: Connection, url: str) -> None:
        self.conn, self.space, self.stream = conn, find_space(conn, "eu").space_id, stream_of(conn, "eu")
        epoch_leases.hold(conn, self.space, WHO, [(1,)], 600)
        put(conn, self.stream, b"x", topic="eu/1")
        with closing(PostgresGroupStore(url)) as store:
            self.atomic = store.declare_group(ATOMIC, GroupOptions(atomic=True))
            self.plain = store.declare_group(SHARED, GroupOptions(StartingPosition.EARLIEST))
            self.terms = {each: store.claim(each.group_id, NODE, 3600).term for each in (self.atomic, self.plain)}
            self._write(store, self.plain, renew=True)  # the stream's parents are empty, and over
            granted = self._write(store, self.plain, GrantStream(self.stream, "b", "a", "s", "share"))
        assert granted.results[0].lending is not None
        self.held = granted.results[0].lending
        self.grant = self.held.grant_id
        assert granted.results[0].outcome is LendingOutcome.APPLIED

    def renew(self, conn: Connection) -> GroupWriteResult:
        return self._write(PostgresGroupStore(lambda: conn), self.atomic, renew=True)

    def force_release(self, conn: Connection) -> GroupWriteResult:
        return self._write(
            PostgresGroupStore(lambda: conn), self.plain, ForceRelease(self.stream, self.grant, "gone"), renew=True
        )

    def report(self, conn: Connection) -> GroupWriteResult:
        """Report that the message is consumed."""
        return self._write(PostgresGroupStore(lambda: conn), self.plain, AdvancePosition(self.stream, self.grant, 1))

    def sync(self, conn: Connection) -> GroupWriteResult:
        return self._write(PostgresGroupStore(lambda: conn), self.plain, renew=True)

    def reset(self, conn: Connection) -> None:
        with conn.transaction():
            group = group_lifecycle.get_live(conn, SHARED)
            reset_transaction.execute_reset(conn, group, ResetTarget.earliest(), reason="x", force=True)

    def consume(self, conn: Connection) -> None:
        """Consume in the consumer's own transaction, after another message."""
        append(conn, [BlockAppend(self.stream, block(b"y"))])
        with conn.transaction():
            consumer_progress.advance(conn, *grant_of(self.plain, self.held), 1)

    def publish(self, conn: Connection) -> Any:
        """Publish in epoch 2, and finish it: all up to 4 is completed."""
        stamp = ProducerStamp(WHO.producer_id, WHO.incarnation, 1)
        block = BlockAppend(stream_of(conn, "eu"), in_epochs((2,)), stamp)
        moved = epoch_leases.append_and_advance(conn, [block], self.space, WHO, [(5,)], 600)
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

    def grant_atomic(self, url: str) -> tuple[int, int, int, GrantSecret]:
        """Grant the stream to a consumer of the atomic group; return what it needs to use the grant."""
        with closing(PostgresGroupStore(url)) as store:
            granted = self._write(store, self.atomic, GrantStream(self.stream, "b", "a", "s", "share"))
        assert granted.results[0].lending is not None
        return grant_of(self.atomic, granted.results[0].lending)

    def _write(
        self, store: PostgresGroupStore, group: Group, *entries: LendingChange, renew: bool = False
    ) -> GroupWriteResult:
        (result,) = store.commit([GroupWrites(group.group_id, self.terms[group], entries, renew)])
        assert not result.has_stale_term
        return result


@pytest.fixture
def stage(conn: Connection, database: str) -> Stage:
    return Stage(conn, database)


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
    assert orders.explore({"renew": stage.renew, **others}, judge) > 1


@pytest.mark.timeout(600)
@pytest.mark.conforms("E17", "A5")
def test_progress_stays_and_a_past_grant_commits_none(orders: Interleavings, stage: Stage) -> None:
    def judge(run: Run) -> None:
        asked = "select status, position, grant_id from lending where group_id = %s and stream_id = %s"
        ((status, position, grant),) = run.conn.execute(asked, (stage.plain.group_id, stage.stream)).fetchall()
        consumed = run.answers["consume"] is None
        assert consumed or isinstance(run.answers["consume"], GrantLost)
        if "force_release" in run.answers:
            ended = run.answers["force_release"].results[0].outcome is LendingOutcome.APPLIED
            assert position == consumed
        else:
            ended = run.answers["reset"] is None
            assert ended or isinstance(run.answers["reset"], Conflict)
            assert position == (consumed and not ended)
        assert (status, grant == stage.grant) == (("free", False) if ended else ("held", True))
        assert consumed or ended
        if consumed and ended:
            asked = "select redelivery_end from lending_history where grant_id = %s and forced"
            assert run.conn.execute(asked, (stage.grant,)).fetchall() == [(2,)], "all that it can have had in hand"

    for act in (stage.force_release, stage.reset):
        assert orders.explore({"consume": stage.consume, act.__name__: act}, judge) > 1


@pytest.mark.conforms("E17")
@pytest.mark.parametrize("act", [Stage.report, Stage.sync], ids=lambda act: act.__name__)
def test_a_leader_takes_no_progress_back(conn: Connection, database: str, stage: Stage, act: Any) -> None:
    """Whatever it has read before; `sync` ends the grant, as retention has taken the message."""
    append(conn, [BlockAppend(stage.stream, block(b"y"))])
    if act is Stage.sync:
        stage.roll_over(conn)
        conn.execute("update generation set state = 'gone' where state = 'closed'")

    def consume(conn: Connection) -> None:
        with conn.transaction():
            consumer_progress.advance(conn, *grant_of(stage.plain, stage.held), 2)

    def judge(run: Run) -> None:
        assert all(isinstance(error, GrantLost) for error in run.errors)
        if run.answers["consume"] is None:
            asked = "select position from lending where group_id = %s and stream_id = %s"
            assert run.conn.execute(asked, (stage.plain.group_id, stage.stream)).fetchall() == [(2,)]

    with Interleavings(database) as orders:
        assert orders.explore({"consume": consume, "lead": lambda conn: act(stage, conn)}, judge) > 1


@pytest.mark.conforms("E25")
def test_a_position_is_read_when_a_commit_is_over(orders: Interleavings, stage: Stage) -> None:
    """Such as by who got no answer to it."""
    grant = grant_of(stage.plain, stage.held)

    def commit(conn: Connection) -> None:
        with conn.transaction():
            consumer_progress.advance(conn, *grant, 1)

    def judge(run: Run) -> None:
        assert not run.errors
        assert run.answers["read"] == (1 if run.places("commit")[0] < run.places("read")[0] else 0)

    read = orders.explore({"commit": commit, "read": lambda conn: consumer_progress.read_position(conn, *grant)}, judge)
    assert read > 1


@pytest.mark.conforms("E25")
def test_a_frontier_is_read_when_a_commit_is_over(stage: Stage, database: str) -> None:
    """That of an atomic group, for the same."""
    grant, consumed = stage.grant_atomic(database), ConsumedFrontier(1, LowerFrontier(((9,),)))

    def commit(conn: Connection) -> None:
        with conn.transaction():
            consumer_progress.advance(conn, *grant, 1, consumed=consumed)

    def judge(run: Run) -> None:
        assert not run.errors
        assert (run.answers["read"] == consumed) == (run.places("commit")[0] < run.places("read")[0])

    with Interleavings(database) as orders:
        read = orders.explore(
            {"commit": commit, "read": lambda conn: consumer_progress.read_consumed_frontier(conn, *grant)}, judge
        )
    assert read > 1


@pytest.mark.conforms("E25")
def test_a_transaction_locks_rows_in_their_order(stage: Stage, database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the order of its batches, and of the rows in the table: so it and a deletion, which locks all of the
    group, end without a deadlock."""
    streams = sorted((stream_of(stage.conn, "default"), stage.stream))
    put(stage.conn, stream_of(stage.conn, "default"), b"x")
    with closing(PostgresGroupStore(database)) as store:
        group = store.declare_group(Subscription.parse("$share/both/#"), GroupOptions(StartingPosition.EARLIEST))
        term = store.claim(group.group_id, NODE, 3600).term
        store.commit([GroupWrites(group.group_id, term, (), True)])
        grants = tuple(GrantStream(stream, "b", "a", "s", "share") for stream in streams)
        (granted,) = store.commit([GroupWrites(group.group_id, term, grants, False)])
    stage.conn.execute("update lending set updated_at = updated_at where stream_id = %s", (streams[0],))
    held = [grant_of(group, each.lending) for each in granted.results if each.lending is not None]
    batches: list[Any] = [
        SimpleNamespace(
            stream_id=stream,
            grant_id=grant,
            grant_key=key,
            ticket=0,
            next_offset=1,
            consumed_frontier=None,
            complete_transaction=lambda *, recovered: None,
        )
        for _, stream, grant, key in reversed(held)
    ]

    def consume(conn: Connection) -> None:
        monkeypatch.setattr(transaction, "connect", lambda *_, **__: conn)
        with ProgressTransactions(database, lambda: group.group_id, 60.0).begin(batches):
            pass

    def delete(conn: Connection) -> None:
        with conn.transaction():
            for way in ("indexscan", "bitmapscan"):
                conn.execute(f"set local enable_{way} = off")
            group_lifecycle.delete(conn, group.group_id, None)

    def judge(run: Run) -> None:
        assert all(isinstance(error, GrantLost) for error in run.errors)

    with Interleavings(database) as orders:
        assert orders.explore({"consume": consume, "delete": delete}, judge) > 1


def test_of_two_commands_neither_is_lost(orders: Interleavings, stage: Stage) -> None:
    commands: dict[str, GroupCommand] = {"pause": PauseGroup("maintenance"), "weigh": OverrideSessionWeight("s", 2.0)}

    def apply(conn: Connection, name: str) -> None:
        with conn.transaction():
            group_lifecycle.apply_command(conn, stage.plain, commands[name], None)

    def judge(run: Run) -> None:
        assert not run.errors
        wanted = GroupDesiredState().apply(commands["pause"]).apply(commands["weigh"])
        assert group_lifecycle.get_live(run.conn, SHARED).desired_state == wanted

    assert orders.explore({name: partial(apply, name=name) for name in commands}, judge) > 1


@pytest.mark.conforms("E23")
@pytest.mark.parametrize("has_leader", [False, True])
def test_a_reset_gives_a_deleted_group_no_rows(stage: Stage, database: str, has_leader: bool) -> None:
    """Also without a leader, whose row both would lock; where there is one, they lock in one order."""
    with closing(PostgresGroupStore(database)) as store:
        group = store.declare_group(Subscription.parse("$share/new/eu/#"), GroupOptions())
        if has_leader:
            store.claim(group.group_id, NODE, 3600)

    def reset(conn: Connection) -> None:
        with conn.transaction():
            reset_transaction.execute_reset(conn, group, ResetTarget.earliest(), reason="x")

    def delete(conn: Connection) -> None:
        with conn.transaction():
            group_lifecycle.delete(conn, group.group_id, None)

    def judge(run: Run) -> None:
        assert [error for error in run.errors if not isinstance(error, NotFound)] == []
        rows = run.conn.execute("select from lending where group_id = %s", (group.group_id,))
        assert rows.rowcount == 0

    with Interleavings(database) as orders:
        assert orders.explore({"reset": reset, "delete": delete}, judge) > 1
