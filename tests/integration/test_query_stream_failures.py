"""A streaming query of an atomic group, and one of its streams that cannot be read on: all others go on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

import psycopg
import pytest

from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.machine.events import StreamGranted
from sublet_borrower.planner.complete_epoch_planner import EpochPlanner
from sublet_borrower.planner.plan_ledger import MicroBatchPlanLedger
from sublet_borrower.planner.planned_ranges import PlanLimits, PlannedRange
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.grant_keys import TIMELINE_US
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.groups.admin.admin import create_group
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.groups.status import diagnosis_queries
from sublet_storage.groups.status.diagnosis_facts import StallReason
from sublet_storage.groups.status.overview import describe_group
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space, drop_space
from tests.integration.log_kit import Connection, generation_of, go_over_to_another_timeline, put, stream_of
from tests.integration.query_kit import Checkpoint, Start
from tests.kit import GRANT_KEY, WAIT_S, eventually
from tests.kit_nodes import Fleet

GROUP = Subscription.parse("$share/g/#")


@pytest.fixture(autouse=True)
def _atomic_group(database: str, fleet: Fleet, conn: Connection) -> None:
    create_group(database, GROUP, GroupOptions(StartingPosition.EARLIEST, atomic=True))


@pytest.fixture
def eu(conn: Connection) -> int:
    """The stream of a space; there is another one, `us`."""
    for name in ("eu", "us"):
        create_space(conn, name, f"{name}/#", shards=1)
    return stream_of(conn, "eu")


def publish(url: str, space: str, topic: str, epoch: int, *values: bytes) -> None:
    """An epoch of one key, three messages to a block, and complete it."""
    with Publisher(url, space=space, block_messages=3) as publisher:
        publisher.advance(epoch)
        for value in values:
            publisher.in_epoch(epoch).publish(topic, value, key=b"k")
        publisher.flush()
        publisher.advance(epoch + 1)


def holder(conn: Connection, stream: int) -> str | None:
    """Return the agent that holds the stream."""
    found = conn.execute("select agent from lending where stream_id = %s and status = 'held'", (stream,)).fetchone()
    return None if found is None else str(found[0])


@contextmanager
def unseen(url: str, stream: int) -> Iterator[None]:
    """Leaders leave out a row that another has locked: what becomes of the stream only its holder sees."""
    with psycopg.connect(url) as connection:  # without the timeouts of ours
        connection.execute("select from sublet.lending where stream_id = %s for update", (stream,))
        yield


def status_of(conn: Connection, stream: int) -> tuple[str, str | None]:
    (line,) = [each for each in describe_group(conn, GROUP).streams if each.stream_id == stream]
    return line.status, line.blocked_reason


@pytest.mark.conforms("S11", "S9")
@pytest.mark.parametrize("epoch", [None, 1, (1, 1)])
def test_a_space_of_a_reused_name_has_its_own_epochs(
    database: str, conn: Connection, start: Start, epoch: int | tuple[int, int] | None
) -> None:
    """It holds back no epoch of the space that was dropped."""
    create_space(conn, "elsewhere", "b/#", shards=1)
    create_space(conn, "s", "a/#", shards=2)
    publish(database, "s", "a/t", 7, *(b"%d" % number for number in range(10)))
    drop_space(conn, "s")
    create_space(conn, "s", "b/x/#", shards=2)
    with Publisher(database, space="s") as publisher:
        if epoch is not None:
            publisher.advance(epoch)
            for number in range(8):
                publisher.in_epoch(epoch).publish("b/x/t", b"new", key=b"%d" % number)
            publisher.flush()
        run = start(wholeEpochs=True)
        run.until(10)
        assert b"new" not in run.checkpoint.values()


@pytest.mark.conforms("P10", "E23")
def test_a_head_before_what_is_in_doubt_blocks_it(
    database: str, conn: Connection, start: Start, eu: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A batch is to be done again, and its stream loses its end between the grant and the first look. Only its holder
    sees that: others append until it is as long as before.
    """
    publish(database, "eu", "eu/t", 1, *(b"%d" % number for number in range(6)))
    checkpoint = Checkpoint()
    start(checkpoint, inDoubtTimeout=600).until_dead("logged")
    former = holder(conn, eu)
    run = start(checkpoint, inDoubtTimeout=600)
    run.join()
    eventually(lambda: holder(conn, eu) not in (former, None), WAIT_S)
    resumed = threading.Thread(target=run.step, daemon=True)
    with unseen(database, eu):
        with conn.transaction():
            conn.execute("delete from block where stream_id = %s and end_offset > 3", (eu,))
            conn.execute("update stream set head = 3 where stream_id = %s", (eu,))
        resumed.start()
        eventually(lambda: f"stream {eu}: offset 6 is beyond the head 3" in caplog.text, WAIT_S)
        put(conn, eu, *(b"new" for _ in range(6)), topic="eu/t")
    eventually(lambda: not resumed.is_alive(), WAIT_S)
    status, reason = status_of(conn, eu)
    assert (status, "offset 6 is beyond the head 3" in str(reason)) == ("blocked", True)
    publish(database, "us", "us/t", 1, b"goes on")
    run.until(1)
    assert run.checkpoint.values() == [b"goes on"]


@pytest.mark.conforms("W4", "E23")
def test_a_gone_stream_keeps_no_other_back(
    database: str, conn: Connection, start: Start, eu: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams that came from it wait for it, by the order of keys."""
    publish(database, "eu", "eu/t", 1, b"first")
    run = start()
    run.until(1)
    eventually(lambda: not run.step() and status_of(conn, eu)[0] == "held", WAIT_S)
    with unseen(database, eu):
        publish(database, "eu", "eu/t", 2, b"gone")
        drop_space(conn, "eu", purge=True)
        for epoch in (1, 2):
            publish(database, "us", "us/t", epoch, b"goes on")
            run.until(1 + epoch)
        assert caplog.text.count(f"messages gone, stream no longer read: subscription={GROUP} stream_id={eu}:") == 1
    eventually(lambda: not run.step() and status_of(conn, eu)[0] == "blocked", WAIT_S)
    assert status_of(conn, eu)[1] == "offset 1 is gone by retention, 1 messages in all"
    child = stream_of(conn, "default")
    put(conn, child, b"waits")
    publish(database, "us", "us/t", 3, b"goes on")
    run.until(4)
    assert b"waits" not in run.checkpoint.values()
    (stalled,) = [
        each.diagnosis for each in diagnosis_queries.diagnose_group(conn, GROUP)[1] if each.stream.stream_id == child
    ]
    assert stalled.reason is StallReason.WAITING_FOR_PARENTS


@pytest.mark.conforms("P10")
@pytest.mark.parametrize("in_doubt", [None, InDoubtRange(1, 0, 2, 60.0, ConsumedFrontier(2))])
def test_a_grant_of_another_timeline_is_not_planned(
    database: str, conn: Connection, in_doubt: InDoubtRange | None
) -> None:
    """Nor is what is in doubt under it; another stream of its space is."""
    former, here = (stream for (stream,) in conn.execute("select stream_id from stream where state = 'open'"))
    for stream in (former, here):
        put(conn, stream, b"a", b"b")
    go_over_to_another_timeline(conn)
    ((number,),) = conn.execute("select timeline_number()")
    ledger = MicroBatchPlanLedger(lambda _: None, 60.0)
    ledger.restore((), [] if in_doubt is None else [PlannedRange.from_in_doubt(former, in_doubt)])
    for stream, grant_id, doubt in ((former, 2, in_doubt), (here, number * TIMELINE_US, None)):
        generation, begin = generation_of(conn, stream), ConsumedFrontier(0)
        grant = Grant("b", 1, stream, grant_id, 0, generation, 0, 1, "#", None, begin, doubt, grant_key=GRANT_KEY)
        ledger.apply_update(StreamGranted(grant))
    with closing(DatabaseMessageReader(database, 1 << 20, 10.0)) as reader:
        planner = EpochPlanner(ledger, reader, str(GROUP))
        planner.restore_steps()
        assert ledger.take_saved_plans() == []
        steps = eventually(lambda: planner.plan_steps(PlanLimits(), lambda _: True, finite=False), WAIT_S)
    assert list(steps) == [here]


def test_no_step_is_restored_without_a_database() -> None:
    ledger, planned = MicroBatchPlanLedger(lambda _: None, 60.0), InDoubtRange(1, 0, 2, 60.0, ConsumedFrontier(2))
    ledger.restore((), [PlannedRange.from_in_doubt(1, planned)])
    grant = Grant("b", 1, 1, 2, 0, 1, 0, 1, "#", None, ConsumedFrontier(0), planned, grant_key=GRANT_KEY)
    ledger.apply_update(StreamGranted(grant))
    assert list(ledger.steps_to_restore()), "there is one to restore"
    with closing(DatabaseMessageReader("postgresql://u@127.0.0.1:1/nothing", 1 << 20, 10.0)) as reader:
        EpochPlanner(ledger, reader, str(GROUP)).restore_steps()
    assert ledger.take_saved_plans() == []
