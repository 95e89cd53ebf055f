"""The streaming source without Spark: its calls in Spark's order, real nodes, a real Postgres, and death at each point.

What Spark itself makes of it is in `tests/spark/test_source.py`.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from sublet_borrower.consumer.session import Session
from sublet_borrower.planner import micro_batch_planner as module
from sublet_borrower.planner.micro_batch_planner import MicroBatchPlanner
from sublet_borrower.planner.planned_ranges import PlanLimits
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.common.malloc_and_gc_tuning import freeze_loaded_objects
from sublet_borrower.spark.source.offsets import Offset
from sublet_borrower.spark.source.range_reader import RangePartition, read_task
from sublet_borrower.spark.source.stream_reader import SubletStreamReader
from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    InDoubtRangeReassigned,
    InvalidSetting,
    PositionGone,
    SubscriptionEnded,
    TimelineChanged,
    Unavailable,
)
from sublet_protocol.domain.grant_keys import TIMELINE_US
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin import admin
from sublet_storage.groups.model.desired_state import PauseGroup
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.integration.log_kit import Connection, generation_of, go_over_to_another_timeline, put, stream_of
from tests.integration.query_kit import POINTS, Checkpoint, Died, Run, Start
from tests.kit import eventually
from tests.kit_nodes import SPEED, Fleet
from tests.postgres_proxy import PostgresProxy
from tests.support.streams import open_streams

LONG, SHORT = 60.0, 0.5


def publish(url: str, first: int, count: int, block: int = 5) -> list[bytes]:
    values = [b"%06d" % number for number in range(first, first + count)]
    with Publisher(url, block_messages=block) as publisher:
        for value in values:
            publisher.publish(f"t/{value[-1] % 3}", value, key=value)
            publisher.flush()
    return values


def lending(conn: Connection) -> dict[int, tuple[str, int, Any]]:
    """Return {stream: (status, position, in doubt)} of those that are not finished."""
    rows = conn.execute("select stream_id, status, position, in_doubt from lending where status <> 'finished'")
    return {stream: (status, position, doubt) for stream, status, position, doubt in rows}


def until_both_have(count: int, *both: Run) -> None:
    """Go on with all of them until so many messages are in their sinks together."""

    def there() -> bool:
        for run in both:
            run.step()
        return sum(len(run.checkpoint.values()) for run in both) >= count

    eventually(there, 30.0, lambda: str([run.checkpoint for run in both]))


def events(conn: Connection) -> list[str]:
    return [event for (event,) in conn.execute("select event from lending_history order by history_id")]


def test_everything_is_in_the_sink_and_acknowledged(database: str, start: Start, conn: Connection) -> None:
    """Once; also what comes in the children of streams that are closed meanwhile."""
    run = start()
    values = publish(database, 0, 40)
    run.until(40)
    reshard(conn, "default", 3)
    values += publish(database, 40, 20)
    run.until(60)
    assert run.checkpoint.values() == values
    assert not run.step(), "which acknowledges the last batch"
    heads = dict(conn.execute("select stream_id, head from stream where state = 'open'").fetchall())
    eventually(lambda: {s: row[1] for s, row in lending(conn).items()} == heads, 10.0)
    assert set(heads.values()) != {0}


@pytest.mark.conforms("E27")
@pytest.mark.usefixtures("fleet")
def test_no_batch_waits_forever_for_the_database(database: str) -> None:
    """Its tasks need the names of the spaces, which are read when the plan is saved."""
    publish(database, 0, 10)
    with PostgresProxy(database) as proxy:
        run = Run(Checkpoint(), proxy.url, availableNowWait="1 s")
        run.wait_until_granted(10)

        def retried(call: Callable[[], Any]) -> Any:
            """Return the result of the call, which may fail once."""

            def attempt() -> Any:
                with contextlib.suppress(Unavailable):
                    return call()

            return eventually(attempt, 60.0)

        end = retried(lambda: run.reader.latestOffset({}, ReadAllAvailable()))
        proxy.go_away()
        with pytest.raises(DatabaseUnreachable, match="spaces of the planned streams could not be read for 1 s"):
            run.reader.partitions({}, end)
        proxy.resume()
        assert retried(lambda: run.reader.partitions({}, end))
        run.stop()


@pytest.mark.conforms("E26", "E27")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.long
def test_a_query_may_die_at_any_point(database: str, start: Start, conn: Connection, point: str) -> None:
    """It goes on as if it had not."""
    checkpoint = Checkpoint()
    values = publish(database, 0, 30)
    for _ in range(3):
        start(checkpoint, inDoubtTimeout=LONG, maxOffsetsPerTrigger=7).until_dead(point)
    start(checkpoint, inDoubtTimeout=LONG, maxOffsetsPerTrigger=7).until(30)
    assert checkpoint.values() == values
    seen: dict[int, Any] = {}
    for number, rows in checkpoint.runs:
        assert seen.setdefault(number, rows) == rows, "a batch that is done again has the same messages"
    if point in ("read", "sunk"):
        assert len(checkpoint.runs) > len(seen)
    assert "unreserve" not in events(conn)


@pytest.mark.long
def test_a_killed_leader_does_not_end_a_query(database: str, fleet: Fleet, start: Start) -> None:
    checkpoint = Checkpoint()
    values = publish(database, 0, 20)
    run = start(checkpoint, maxOffsetsPerTrigger=5, inDoubtTimeout=LONG)
    run.until(5)
    fleet.nodes["n1"].kill()
    values += publish(database, 20, 20)
    fleet.node("n2")
    run.until(40)
    assert checkpoint.values() == values


@pytest.mark.conforms("E26", "E27")
@pytest.mark.parametrize("point", ["committed", "read"])
@pytest.mark.long
def test_what_was_done_is_not_done_again(database: str, start: Start, point: str) -> None:
    """Of two streams that a batch has had, one comes late to the next process, which goes on with the other."""
    checkpoint = Checkpoint()
    values = publish(database, 0, 30)
    start(checkpoint, inDoubtTimeout=LONG).until_dead("committed")
    late, *_ = streams = sorted(checkpoint.offsets[0]["streams"])
    assert len(streams) > 1
    with connect(database) as user, user.transaction():
        user.execute("select from lending where stream_id = %s for update", (int(late),))
        second = start(checkpoint, inDoubtTimeout=LONG)

        def goes_on() -> bool:
            values.extend(publish(database, len(values), 10))
            return second.step(die=point if len(checkpoint.offsets) > 1 else "")

        with pytest.raises(Died):
            eventually(lambda: goes_on() and False, 30.0)
    assert len(checkpoint.offsets) == 3
    for offset in checkpoint.offsets[1:]:
        assert late not in offset["streams"]
        assert offset["done"][late] == checkpoint.offsets[0]["streams"][late]
    third = start(checkpoint, inDoubtTimeout=LONG)
    third.until(len(values))
    assert checkpoint.values() == values

    def is_known() -> bool:
        values.extend(publish(database, len(values), 10))
        third.until(len(values))
        return "done" not in checkpoint.offsets[-1]

    eventually(is_known, 20.0, lambda: f"what the group knows is in {checkpoint.offsets[-1]}", 0.5)


@pytest.mark.conforms("E26", "E27")
@pytest.mark.long
def test_others_get_all_but_what_is_in_doubt(database: str, start: Start, conn: Connection) -> None:
    ours, theirs = Checkpoint(), Checkpoint()
    values = publish(database, 0, 30)
    start(ours, inDoubtTimeout=LONG, maxOffsetsPerTrigger=8).until_dead("read")
    other = start(theirs, sessionName="other")
    eventually(lambda: [other.step(), "reserved" in {row[0] for row in lending(conn).values()}][1], 20.0)
    back = start(ours, inDoubtTimeout=LONG)
    until_both_have(30, other, back)
    assert sorted(ours.values() + theirs.values()) == values
    assert ours.runs[0] == ours.runs[1]


@pytest.mark.conforms("E26", "E27")
@pytest.mark.parametrize("point", [pytest.param("read", marks=pytest.mark.long), "committed", "stopped"])
def test_a_query_alone_may_stay_away_for_long(database: str, start: Start, conn: Connection, point: str) -> None:
    """It acknowledges its last batch when it is back, as one with the trigger `once` does at each run."""
    checkpoint = Checkpoint()
    values = publish(database, 0, 30)
    taken = "select from lending where status = 'held' or held_until > clock_timestamp()"
    for _ in range(2):
        run = start(checkpoint, inDoubtTimeout=SHORT, maxOffsetsPerTrigger=7)
        if point == "stopped":
            run.until(len(checkpoint.values()) + 1)
            run.stop()
        else:
            run.until_dead(point)
        eventually(lambda: conn.execute(taken).fetchone() is None, 30.0)
    start(checkpoint, inDoubtTimeout=SHORT, maxOffsetsPerTrigger=7).until(30)
    assert checkpoint.values() == values
    seen = dict(checkpoint.runs)
    assert all(seen[number] == rows for number, rows in checkpoint.runs), "a batch that is done again has the same"
    assert "unreserve" not in events(conn)


@pytest.mark.conforms("E26", "E27")
@pytest.mark.parametrize("policy", [pytest.param("drop", marks=pytest.mark.long), "fail"])
def test_after_the_hold_others_have_it(database: str, start: Start, conn: Connection, policy: str) -> None:
    """The query that comes back does not read it again."""
    ours, theirs = Checkpoint(), Checkpoint()
    values = publish(database, 0, 30)
    start(ours, inDoubtTimeout=SHORT, maxOffsetsPerTrigger=8).until_dead("read")
    other = start(theirs, sessionName="other")
    other.until(30)
    assert theirs.values() == values
    assert "unreserve" in events(conn)
    back = start(ours, inDoubtTimeout=SHORT, onRangeLost=policy)
    if policy == "fail":
        with pytest.raises(InDoubtRangeReassigned, match="had begun messages that others may have got meanwhile"):
            back.step()
    else:
        back.step()
        assert ours.sink == {0: []}
        publish(database, 30, 10)
        until_both_have(40, other, back)


def test_of_two_of_one_name_the_newer_goes_on(database: str, start: Start) -> None:
    """It goes on with the batch that the older had begun."""
    checkpoint = Checkpoint()
    values = publish(database, 0, 30)
    older = start(checkpoint, inDoubtTimeout=LONG, maxOffsetsPerTrigger=8)
    older.until(8)
    copy = Checkpoint(list(checkpoint.offsets), checkpoint.committed, dict(checkpoint.sink))
    start(copy, inDoubtTimeout=LONG).until(30)
    assert copy.values() == values
    with pytest.raises(SubscriptionEnded, match="fenced"):
        eventually(lambda: older.step() and False, 20.0)


def test_the_first_call_waits_for_streams(database: str, start: Start) -> None:
    """With the trigger `once` Spark makes no other."""
    values, run = publish(database, 0, 20), start()
    assert run.step()
    assert run.checkpoint.values() == values


def test_a_later_batch_of_another_stream_is_noticed(start: Start, conn: Connection) -> None:
    """The newest checkpoint is not, though its stream was planned only once."""
    checkpoint = Checkpoint()
    run = start(checkpoint)
    for number, stream in enumerate(open_streams(conn)[:3]):
        put(conn, stream.stream_id, b"x")
        run.until(number + 1)
    run.step()
    run.stop()
    newest = start(checkpoint, onRangeLost="fail")
    assert not newest.step()
    newest.stop()
    with pytest.raises(InvalidSetting, match="the checkpoint is older than what session 'etl' has done since"):
        start(Checkpoint(checkpoint.offsets[:1], 0), onRangeLost="fail").step()


@pytest.mark.parametrize("policy", ["drop", "fail"])
@pytest.mark.parametrize("in_a_batch", [False, True], ids=["between batches", "in a batch"])
def test_an_old_checkpoint_is_noticed(
    database: str, start: Start, policy: str, in_a_batch: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Its next batches have numbers that a sink may have stored already."""
    checkpoint = Checkpoint()
    values = publish(database, 0, 40)
    run = start(checkpoint, maxOffsetsPerTrigger=16)
    run.until(40)
    assert not run.step(), "which acknowledges the last batch"
    run.stop()
    copy = Checkpoint(checkpoint.offsets[:1], -1 if in_a_batch else 0, {})
    back = start(copy, onRangeLost=policy)
    outdated = "the checkpoint is older than what session 'etl' has done since: it ends at stream"
    if policy == "fail":
        with pytest.raises(InvalidSetting, match=outdated):
            back.step()
        return
    back.step()
    assert outdated in caplog.text
    assert copy.values() == []
    values += publish(database, 40, 10)
    back.until(10)
    assert copy.values() == values[40:]


@pytest.mark.conforms("E26")
def test_a_query_that_stops_hands_over_at_once(database: str, start: Start, conn: Connection) -> None:
    publish(database, 0, 10)
    run = start()
    run.until(10)
    while run.step():
        pass
    run.stop()
    assert {row[0] for row in lending(conn).values()} == {"free"}
    publish(database, 10, 10)
    start(sessionName="other").until(10)


def test_a_query_that_stops_in_a_batch_reserves_it(database: str, start: Start, conn: Connection) -> None:
    """The rest is left free."""
    publish(database, 0, 10)
    run = start(maxOffsetsPerTrigger=1)
    planned: dict[str, Any] = {}
    while not planned:
        planned = run.reader.latestOffset({}, ReadMaxRows(1))
    run.stop()
    states = {str(stream): row[0] for stream, row in lending(conn).items()}
    assert {stream for stream, state in states.items() if state == "reserved"} == set(planned["streams"])
    assert set(states.values()) == {"reserved", "free"}


@pytest.mark.parametrize(
    ("option", "limit", "most", "kind"),
    [("maxOffsetsPerTrigger", 4, 4, ReadMaxRows), ("maxBytesPerTrigger", 1, 2, ReadMaxBytes)],
)
def test_a_batch_is_as_large_as_the_query_allows(
    database: str, start: Start, option: str, limit: int, most: int, kind: type[ReadLimit]
) -> None:
    checkpoint = Checkpoint()
    values = publish(database, 0, 24, block=1)
    run = start(checkpoint, **{option: limit})
    run.until(24)
    assert checkpoint.values() == values
    assert max(len(rows) for rows in checkpoint.sink.values()) <= most, "of bytes: a block of each stream"
    assert isinstance(run.reader.getDefaultReadLimit(), kind)
    assert isinstance(start(checkpoint).reader.getDefaultReadLimit(), ReadAllAvailable)


@pytest.mark.parametrize("option", ["minPartitions", "maxPartitions"])
def test_a_batch_has_as_many_tasks_as_are_asked_for(
    database: str, start: Start, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    counts: list[int] = []
    partitions = SubletStreamReader.partitions

    def counted(self: SubletStreamReader, start: Offset, end: Offset) -> Sequence[InputPartition]:
        tasks = partitions(self, start, end)
        counts.append(len(tasks))
        return tasks

    monkeypatch.setattr(SubletStreamReader, "partitions", counted)
    values = publish(database, 0, 40)
    run = start(**{option: 7 if option == "minPartitions" else 1})
    run.wait_until_granted(40)
    run.until(40)
    assert run.checkpoint.values() == values
    if option == "minPartitions":
        assert max(counts) >= 7, "as few as that, or more, where they divide so"
    else:
        assert set(counts) == {1}
        assert max(len(offset["streams"]) for offset in run.checkpoint.offsets) > 1


@pytest.mark.parametrize("count", [0, 30], ids=["nothing", "some"])
def test_available_now_takes_what_is_there_and_ends(database: str, start: Start, count: int) -> None:
    values = publish(database, 0, count)
    run = start(maxOffsetsPerTrigger=8)
    run.reader.prepareForTriggerAvailableNow()
    assert run.step() == (count > 0)
    publish(database, 30, 10)
    while run.step():
        pass
    assert run.checkpoint.values() == values, "what came meanwhile is for the next run"
    assert len(run.checkpoint.sink) >= count / 8


@pytest.mark.conforms("E26")
@pytest.mark.long
def test_available_now_waits_for_what_is_given_back(database: str, start: Start, conn: Connection) -> None:
    """Which takes longer than any leader needs to grant what is free."""
    values = publish(database, 0, 30)
    other = Session("$share/g/#", database, starting_position="earliest", settings=BorrowerSettings().scaled(SPEED))
    try:
        eventually(lambda: len(other.assignment()) == len(lending(conn)) > 0, 30.0)
        gives_back = threading.Timer(4.0, other.close)
        gives_back.start()
        run = start()
        run.reader.prepareForTriggerAvailableNow()
        while run.step():
            pass
        gives_back.join()
    finally:
        other.close()
    assert run.checkpoint.values() == values


@pytest.mark.long
def test_available_now_fails_if_not_granted_in_time(database: str, start: Start) -> None:
    publish(database, 0, 30)
    group, _ = admin.create_group(database, Subscription.parse("$share/g/#"), GroupOptions(StartingPosition.EARLIEST))
    admin.send_command(database, group.subscription, PauseGroup("repairs"))
    run = start(availableNowWait="5 s")
    run.reader.prepareForTriggerAvailableNow()
    with pytest.raises(Unavailable, match=r"streams \[.*were not granted to it within 5 s.*availableNowWait"):
        run.step()


def test_the_progress_has_how_far_behind_the_query_is(database: str, start: Start, conn: Connection) -> None:
    publish(database, 0, 12)
    run = start(maxOffsetsPerTrigger=6)
    assert run.reader.reportLatestOffset() is None
    run.until(6)
    report = run.reader.reportLatestOffset()
    assert report is not None
    heads = dict(conn.execute("select stream_id, head from stream where state = 'open'").fetchall())
    assert report["heads"] == {str(stream): head for stream, head in heads.items()}
    assert 6 <= report["lag"] <= 12


def test_a_checkpoint_of_something_else_is_refused(start: Start) -> None:
    run = start(Checkpoint(offsets=[{"topic": {"0": 17}}], committed=0))
    with pytest.raises(InvalidSetting, match="is not of sublet: it belongs to another query"):
        run.step()


@pytest.fixture
def stream(conn: Connection) -> int:
    """One of ten messages."""
    stream = stream_of(conn, "default")
    for number in range(10):
        put(conn, stream, b"%d" % number)
    return stream


def task_offsets(database: str, conn: Connection, stream: int, *, fails: bool = True) -> list[int]:
    """Return what a task reads of the stream. `fails`: by what is gone."""
    generation = generation_of(conn, stream)
    place = "default", database, "sublet", "here"
    task = RangePartition(stream, generation, 0, 10, "#", *place, fails, timeline_number=0)
    read = read_task(task, pa.schema([pa.field("offset", pa.int64())]))
    return [offset for batch in read for offset in batch.column("offset").to_pylist()]


def test_what_is_gone_fails_a_task_or_is_left_out(database: str, conn: Connection, stream: int) -> None:
    conn.execute("delete from block where stream_id = %s and end_offset <= 3", (stream,))
    with pytest.raises(PositionGone):
        task_offsets(database, conn, stream)
    assert task_offsets(database, conn, stream, fails=False) == list(range(3, 10))


@pytest.mark.conforms("P10")
def test_a_plan_of_another_timeline_fails_a_task(database: str, conn: Connection, stream: int) -> None:
    go_over_to_another_timeline(conn)
    with pytest.raises(TimelineChanged, match=f"stream {stream} was planned on another timeline"):
        task_offsets(database, conn, stream)


def test_a_worker_collects_little_after_its_first_task(database: str, conn: Connection, stream: int) -> None:
    freeze_loaded_objects.cache_clear()
    gc.unfreeze()
    task_offsets(database, conn, stream)
    left = len(gc.get_objects())
    gc.unfreeze()
    assert left < len(gc.get_objects()) / 10  # Spark's worker collects after each task


@pytest.mark.conforms("E26")
@pytest.mark.parametrize("finite", [False, True])
def test_a_plan_that_is_not_written_is_begun_later(
    fleet: Fleet, database: str, monkeypatch: pytest.MonkeyPatch, finite: bool
) -> None:
    """A plan that no leader writes down keeps its query for a while only."""
    monkeypatch.setattr(module, "PLAN_SAVED_TIMEOUT_S", 0.5)
    settings = BorrowerSettings().scaled(SPEED)
    planner = MicroBatchPlanner(
        "$share/g/#",
        database,
        name="q",
        hold_s=60.0,
        starting_position="earliest",
        granted_within_s=1.0,
        settings=settings,
    )
    with Publisher(database) as publisher:
        for value in (b"1", b"2"):
            publisher.publish("t", value).result()
    (first,) = eventually(lambda: planner.plan(PlanLimits(1, None), 0.2), 60)
    planner.acknowledge([first.planned])
    (node,) = fleet.nodes.values()
    node.signal(signal.SIGSTOP)
    try:
        if finite:
            with pytest.raises(Unavailable, match=r"no leader has written down .* within 1 s"):
                planner.plan(PlanLimits(None, None), finite=True)
        else:
            assert planner.plan(PlanLimits(None, None), 0.1) == [], "nobody has written it down"
    finally:
        node.signal(signal.SIGCONT)
    (second,) = eventually(lambda: planner.plan(PlanLimits(None, None), 0.2), 60)
    assert (second.planned.start, second.planned.end) == (1, 2)
    planner.acknowledge([second.planned])
    began = time.monotonic()
    assert planner.plan(PlanLimits(None, None), 0.5) == []
    assert time.monotonic() - began >= 0.5, "it waits for messages where there are none"
    planner.close()


@pytest.mark.conforms("E26")
def test_a_finite_plan_fails_if_no_leader_answers(database: str) -> None:
    with (
        contextlib.closing(
            MicroBatchPlanner("$share/g/#", database, name="q", hold_s=60.0, granted_within_s=0.5)
        ) as planner,
        pytest.raises(Unavailable, match=r"no leader has answered within 0\.5 s"),
    ):
        planner.plan(PlanLimits(None, None), finite=True)


@pytest.mark.conforms("P10")
def test_a_stream_of_another_timeline_has_its_space(fleet: Fleet, database: str, conn: Connection) -> None:
    """After a failover the stream of that number may be in another space."""
    stream = stream_of(conn, "default")
    with contextlib.closing(
        MicroBatchPlanner("$share/g/#", database, name="q", hold_s=60.0, settings=BorrowerSettings().scaled(SPEED))
    ) as planner:
        assert planner.spaces([(stream, 1)]) == {stream: "default"}
        conn.execute("update space set name = 'other' where name = 'default'")
        assert planner.spaces([(stream, 2)]) == {stream: "default"}
        assert planner.spaces([(stream, TIMELINE_US)]) == {stream: "other"}
