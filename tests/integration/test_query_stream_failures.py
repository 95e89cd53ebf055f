"""A streaming query of an atomic group: its epochs stay whole, and a stream that cannot be read stops no other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.machine.events import StreamGranted
from sublet_borrower.planner.complete_epoch_planner import EpochPlanner
from sublet_borrower.planner.plan_ledger import MicroBatchPlanLedger
from sublet_borrower.planner.planned_ranges import PlanLimits, PlannedRange
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.grant_keys import TIMELINE_US
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.groups.admin.admin import create_group
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.groups.status import diagnosis_queries
from sublet_storage.groups.status.diagnosis_facts import StallReason
from sublet_storage.groups.status.overview import describe_group
from sublet_storage.groups.status.overview_model import StreamView
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space, drop_space, reshard
from tests.integration.cli_kit import Shell
from tests.integration.log_kit import Connection, generation_of, go_over_to_another_timeline, of_stream, put, stream_of
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


def line_of(conn: Connection, stream: int) -> StreamView:
    return of_stream(describe_group(conn, GROUP).streams, stream)


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
    line = line_of(conn, eu)
    assert (line.status, "offset 6 is beyond the head 3" in str(line.blocked_reason)) == ("blocked", True)
    publish(database, "us", "us/t", 1, b"goes on")
    run.until(1)
    assert run.checkpoint.values() == [b"goes on"]


@pytest.mark.conforms("W4", "E23")
def test_a_gone_stream_keeps_no_other_back(
    database: str, conn: Connection, start: Start, eu: int, shell: Shell, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams that came from it wait for it, by the order of keys; what was lost is counted, and shown."""
    publish(database, "eu", "eu/t", 1, b"first")
    run = start()
    run.until(1)
    eventually(lambda: not run.step() and line_of(conn, eu).status == "held", WAIT_S)
    with unseen(database, eu):
        publish(database, "eu", "eu/t", 2, b"gone")
        drop_space(conn, "eu", purge=True)
        for epoch in (1, 2):
            publish(database, "us", "us/t", epoch, b"goes on")
            run.until(1 + epoch)
        assert caplog.text.count(f"messages gone, stream no longer read: subscription={GROUP} stream_id={eu}:") == 1
    eventually(lambda: not run.step() and line_of(conn, eu).status == "blocked", WAIT_S)
    line, reason = line_of(conn, eu), "offset 1 is gone by retention, 1 messages in all"
    assert (line.blocked_reason, line.lag, line.lost_message_count, line.head_state) == (reason, None, 1, "gone")
    assert f"blocked stream {eu}: {reason}" in " ".join(shell.run("groups", "describe", str(GROUP)).out.split())
    streams = shell.run("groups", "describe", str(GROUP), "--json").object["streams"]
    assert {each["stream_id"]: each["blocked_reason"] for each in streams}[eu] == reason
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


OF_EACH = 12


@pytest.fixture
def publisher(database: str) -> Iterator[Publisher]:
    with Publisher(database, space="default", block_messages=3) as publisher:
        yield publisher


def publish_epoch(publisher: Publisher, epoch: int, advance: bool = True) -> None:
    """An epoch's messages under many keys, and some without an epoch."""
    for number in range(OF_EACH):
        publisher.in_epoch(epoch).publish("t", b"%d" % epoch, key=b"k%d" % number)
    publisher.publish("t", b"-", key=b"k%d" % epoch)
    if advance:
        publisher.advance(epoch + 1)


def batches(checkpoint: Checkpoint) -> list[Counter[bytes]]:
    """Return the messages of each batch in the sink, by epoch."""
    return [Counter(value for _, _, value in rows) for _, rows in sorted(checkpoint.sink.items())]


def are_complete(checkpoint: Checkpoint, epochs: int) -> None:
    """Each epoch is in one batch with all its messages."""
    seen = [epoch for batch in batches(checkpoint) for epoch in batch if epoch != b"-"]
    assert sorted(seen) == sorted(b"%d" % epoch for epoch in range(epochs))
    assert all(count == OF_EACH for batch in batches(checkpoint) for epoch, count in batch.items() if epoch != b"-")


def consumed(conn: Connection) -> Any:
    return conn.execute("select least from consumed_frontier").fetchone()


@pytest.mark.conforms("S11", "S8")
def test_a_batch_has_entire_epochs_of_all_streams(start: Start, publisher: Publisher, conn: Connection) -> None:
    """It has none that is open."""
    run = start(wholeEpochs=True)
    publish_epoch(publisher, 0)
    publish_epoch(publisher, 1, advance=False)
    publisher.flush()
    run.until(OF_EACH + 1)
    for _ in range(5):
        run.step()
    are_complete(run.checkpoint, 1)
    publisher.advance(2)
    publish_epoch(publisher, 2)
    run.until(3 * OF_EACH + 3)
    are_complete(run.checkpoint, 3)
    eventually(lambda: [run.step(), consumed(conn) == ([[3]],)][1], 20.0, lambda: str(consumed(conn)))


@pytest.mark.conforms("S11")
@pytest.mark.parametrize(("option", "most"), [("maxOffsetsPerTrigger", 30), ("maxBytesPerTrigger", 1)])
@pytest.mark.long
def test_a_limit_divides_between_epochs(start: Start, publisher: Publisher, option: str, most: int) -> None:
    for epoch in range(8):
        publish_epoch(publisher, epoch)
    publisher.flush()
    run = start(**{option: most})
    run.until(8 * (OF_EACH + 1))
    are_complete(run.checkpoint, 8)
    per_batch = [sum(epoch != b"-" for epoch in batch) for batch in batches(run.checkpoint)]
    assert max(per_batch) <= 2
    assert sum(count > 0 for count in per_batch) >= 4


@pytest.mark.conforms("S11", "S8", "E27")
@pytest.mark.parametrize("point", ["logged", "read", "sunk"])
@pytest.mark.long
def test_a_batch_done_again_has_the_same_epochs(
    database: str, start: Start, publisher: Publisher, conn: Connection, point: str
) -> None:
    checkpoint = Checkpoint()
    for epoch in range(6):
        publish_epoch(publisher, epoch)
        if epoch == 2:
            reshard(conn, "default", 3)
    publisher.flush()
    for life in range(3):
        start(checkpoint, inDoubtTimeout=60, maxOffsetsPerTrigger=30).until_dead(point)
        publish_epoch(publisher, 6 + life)
    start(checkpoint, inDoubtTimeout=60, maxOffsetsPerTrigger=30).until(9 * (OF_EACH + 1))
    seen: dict[int, Any] = {}
    for number, rows in checkpoint.runs:
        assert seen.setdefault(number, rows) == rows
    places: dict[tuple[bytes, int], set[int]] = {}
    for number, rows in checkpoint.sink.items():
        for stream, _, value in rows:
            places.setdefault((value, stream), set()).add(number)
    assert all(len(numbers) == 1 for (value, _), numbers in places.items() if value != b"-"), "of a stream it is whole"
    counts = Counter(value for rows in checkpoint.sink.values() for _, _, value in rows)
    assert counts == {b"-": 9, **{b"%d" % epoch: OF_EACH for epoch in range(9)}}


@pytest.mark.conforms("S11")
def test_available_now_gives_out_what_was_there(start: Start, publisher: Publisher) -> None:
    """It gives out no more, and ends though an epoch is open."""
    for epoch in range(3):
        publish_epoch(publisher, epoch)
    publish_epoch(publisher, 3, advance=False)
    publisher.flush()
    run = start(maxOffsetsPerTrigger=1)
    run.reader.prepareForTriggerAvailableNow()
    while run.step():
        publisher.publish("t", b"later", key=b"k0")
        publish_epoch(publisher, 2 + len(run.checkpoint.offsets))
        publisher.flush()
    are_complete(run.checkpoint, 3)
    assert b"later" not in run.checkpoint.values()


def test_a_group_that_is_not_atomic_is_refused(start: Start, publisher: Publisher) -> None:
    run = start(subscription="$share/other/#", wholeEpochs=True)
    with pytest.raises(InvalidSetting, match="option wholeEpochs is true, and the group of \\$share/other/# is not at"):
        eventually(lambda: run.step() and False, 20.0)
