"""Retention, and the drop of a space, against groups that are promised messages at that moment."""

from __future__ import annotations

from typing import Any

import pytest

from sublet_protocol.domain.errors import Conflict
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.admin import progress_transfer, reset_transaction
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import Group, GroupOptions, StartingPosition
from sublet_storage.log.append import AppendOutcome, BlockAppend, append
from sublet_storage.spaces import retention, space_changes
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.routing import Space
from sublet_storage.spaces.space_queries import read_generation_filters
from tests.integration.log_kit import block, put, stream_of
from tests.interleavings.harness import Connection, Interleavings, Run, Work, in_transaction

QUEUE, SHARED, NEW = map(Subscription.parse, ("$queue/q/eu/#", "$share/s/eu/#", "$queue/new/eu/#"))
EARLIEST = GroupOptions(StartingPosition.EARLIEST)


@pytest.fixture(autouse=True)
def old(conn: Connection) -> None:
    """A closed stream of one message, which is due to go: a queue has consumed it, and a shared group, which holds
    nothing back, has not."""
    put(conn, stream_of(conn, "eu"), b"old", topic="eu/1")
    store = PostgresGroupStore(lambda: conn)
    group, _ = (store.declare_group(each, EARLIEST) for each in (QUEUE, SHARED))
    space_changes.rollover(conn, "eu")
    conn.execute("update lending set status = 'finished', position = 1 where group_id = %s", (group.group_id,))
    conn.execute("update generation set closed_at = closed_at - interval '101 s' where state = 'closed'")


def declare(conn: Connection) -> Group:
    return PostgresGroupStore(lambda: conn).declare_group(NEW, EARLIEST)


@in_transaction
def reset(conn: Connection) -> None:
    reset_transaction.execute_reset(conn, group_lifecycle.get_live(conn, QUEUE), ResetTarget.earliest(), reason="x")


@in_transaction
def clone(conn: Connection) -> Group:
    return progress_transfer.clone(conn, SHARED, NEW, "x")[0]


@pytest.mark.conforms("W11")
@pytest.mark.parametrize("promise", [declare, reset, clone], ids=lambda work: work.__name__)
def test_retention_takes_nothing_a_queue_is_promised(orders: Interleavings, promise: Work) -> None:
    def judge(run: Run) -> None:
        assert not run.errors
        taken = run.conn.execute(
            "select g.name from lending l join consumer_group g using (group_id) join stream s using (stream_id)"
            " join generation n using (generation_id)"
            " where g.kind = 'queue' and n.state = 'gone' and l.position < s.head"
        ).fetchall()
        # a clone shows what its source shows, which may be that its messages were gone before
        assert not taken or (promise is clone and run.places("retention")[-1] < run.places("clone")[1])

    orders.explore({"retention": retention.mark_expired_gone, promise.__name__: promise}, judge)


@pytest.mark.conforms("W6")
def test_a_group_begun_in_a_drop_misses_no_stream(orders: Interleavings) -> None:
    def judge(run: Run) -> None:
        assert not run.errors
        group = run.answers["declare"]
        matching = read_generation_filters(run.conn).matching(group.subscription.filter)
        wanted = [one.text for one, now in matching.items() if now]
        missed = run.conn.execute(
            "select s.stream_id from stream s join generation n using (generation_id) join consumer_group g"
            " on g.group_id = %s where s.state = 'open' and n.generation_id <= g.after_generation"
            " and n.filter = any(%s) and not exists ("
            "  select from lending l where l.group_id = g.group_id and l.stream_id = s.stream_id)",
            (group.group_id, wanted),
        ).fetchall()
        assert missed == []

    orders.explore({"drop": lambda conn: space_changes.drop_space(conn, "eu"), "declare": declare}, judge)


def test_what_a_drop_has_checked_stays_so(orders: Interleavings, conn: Connection) -> None:
    """No publisher adds to the space while that is looked at, or after it."""
    stream = stream_of(conn, "eu")

    def check(conn: Any, _: Space) -> None:
        if conn.execute("select from block where stream_id = %s", (stream,)).rowcount:
            raise Conflict("messages are left")

    def judge(run: Run) -> None:
        assert all(isinstance(error, Conflict) for error in run.errors)
        ((appended,), refused) = run.answers["append"], run.answers["drop"]
        assert (appended.outcome is AppendOutcome.APPENDED) == (refused is not None)

    participants = {
        "append": lambda conn: append(conn, [BlockAppend(stream, block(b"x"))]),
        "drop": lambda conn: space_changes.drop_space(conn, "eu", check),
    }
    orders.explore(participants, judge)


@pytest.mark.conforms("E39")
def test_a_look_for_ended_generations_waits_for_none(orders: Interleavings) -> None:
    """It leaves those that another changes to the next look: rows in two orders would be a deadlock."""

    def judge(run: Run) -> None:
        assert not run.errors
        assert [step.statement for step in run.steps if step.who == "look" and step.waits] == []

    orders.explore({"retention": retention.mark_expired_gone, "look": EmptyGenerationCleaner(rest_s=0)}, judge)
