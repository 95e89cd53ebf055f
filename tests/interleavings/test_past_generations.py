"""Deletion of the rows of an empty generation, against leaders that make rows for it at that moment."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.admin import progress_transfer
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.options import GroupOptions
from sublet_storage.groups.model.records import ForceRelease, Group, GroupWriteResult, GroupWrites, StartingPosition
from sublet_storage.log.append import BlockAppend, append
from sublet_storage.spaces import space_changes
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.retention import apply_retention
from tests.contract.group_world import ONE
from tests.integration.log_kit import block, stream_of
from tests.interleavings.harness import Connection, Interleavings, Run, in_transaction

LATE, AHEAD, COPY = (Subscription.parse(f"$share/{name}/eu/#") for name in ("late", "ahead", "copy"))
EARLIEST = GroupOptions(StartingPosition.EARLIEST)
PAST = "select from generation where state <> 'open' and not coalesce(is_past, false)"
ORPHANS = "select group_id, stream_id, status from lending where stream_id not in (select stream_id from stream)"


class Stage:
    """An empty generation whose rows are due to go, and two groups with leaders. One has not noticed it yet; the other
    has, and finished its stream."""

    def __init__(self, conn: Connection) -> None:
        store = PostgresGroupStore(lambda: conn)
        self.late, self.ahead = (store.declare_group(each, EARLIEST) for each in (LATE, AHEAD))
        self.terms = {each: store.claim(each.group_id, ONE, 3600).term for each in (self.late, self.ahead)}
        space_changes.rollover(conn, "eu")
        while apply_retention(conn) or delete(conn) or conn.execute(PAST).rowcount:
            pass
        self.empty = stream_of(conn, "eu")
        space_changes.rollover(conn, "eu")
        self._renew(conn, self.ahead)
        conn.execute("update generation set state = 'gone' where state = 'closed'")
        while apply_retention(conn):
            pass
        conn.execute("update generation set is_past = true where state = 'gone'")
        # as when a later generation had messages, and is deleted
        conn.execute("insert into lost_generation select 'eu/#', max(generation_id), max(stream_id) from stream")

    def sync(self, conn: Connection) -> GroupWriteResult:
        return self._renew(conn, self.late)[0]

    def sync_both(self, conn: Connection) -> GroupWriteResult:
        """Sync both in one transaction, which has the finished row locked."""
        return self._renew(conn, self.late, self.ahead)[0]

    def _renew(self, conn: Connection, *groups: Group) -> tuple[GroupWriteResult, ...]:
        # of two one also has to do with the row of the stream
        more = {self.ahead: (ForceRelease(self.empty, 1, "late"),)} if len(groups) > 1 else {}
        batch = [GroupWrites(each.group_id, self.terms[each], more.get(each, ()), True) for each in groups]
        results = PostgresGroupStore(lambda: conn).commit(batch)
        assert not any(each.has_stale_term for each in results)
        return results


def delete(conn: Connection) -> list[int]:
    return EmptyGenerationCleaner(rest_s=0)(conn)


@pytest.fixture
def stage(conn: Connection) -> Stage:
    return Stage(conn)


SYNC, FIRST, LOCKED = {"sync": "insert into lending"}, {"delete": "select exists"}, {"delete": "where parents &&"}


@pytest.mark.conforms("E39", "A4")
@pytest.mark.parametrize(
    ("sync", "ahead"),
    [
        pytest.param(Stage.sync, LOCKED | SYNC, id="one group"),
        pytest.param(Stage.sync_both, SYNC | FIRST, id="leader locks its row first"),
        pytest.param(Stage.sync_both, LOCKED | SYNC, id="leader finds its row locked", marks=pytest.mark.long),
    ],
)
def test_no_row_outlives_its_stream(
    orders: Interleavings, stage: Stage, sync: Callable[[Stage, Connection], object], ahead: dict[str, str]
) -> None:
    def judge(run: Run) -> None:
        assert not run.errors
        assert [step for step in run.steps if "from generation" in step.statement and step.waits] == []
        assert run.conn.execute(ORPHANS).fetchall() == []
        with run.conn.transaction():
            progress_transfer.clone(run.conn, LATE, COPY, "x")

    orders.explore({"delete": delete, "sync": lambda conn: sync(stage, conn)}, judge, ahead)


@pytest.mark.conforms("E39")
@pytest.mark.usefixtures("stage")
def test_who_locks_a_past_generation_waits_no_more(orders: Interleavings, conn: Connection) -> None:
    """Else leaders would wait for the publishers of its children."""
    child = BlockAppend(stream_of(conn, "eu"), block(b"x", topic="eu/1"))

    def judge(run: Run) -> None:
        assert not run.errors
        deletes = [step for step in run.steps if step.who == "delete"]
        locks = [index for index, step in enumerate(deletes) if "for update skip locked" in step.statement]
        assert [step for step in deletes[locks[0] :] if step.waits] == []

    orders.explore({"delete": delete, "append": in_transaction(lambda conn: append(conn, [child]))}, judge)
