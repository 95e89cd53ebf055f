"""Sessions in Spark's executors, on real Spark, real nodes, real Postgres, with real kills."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.job.cluster_checks import SparkSettingsWarning
from sublet_borrower.spark.job.consumption import Consumption, consume
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import InvalidSetting, Unavailable, UserFunctionFailed
from tests.kit import eventually
from tests.spark.stage import ALL, SPEED, WAIT_S, Stage
from tests.spark.work import AttemptRecord, Recorder

pytestmark = pytest.mark.spark

EVICTION_S = LeaderSettings().scaled(SPEED).eviction_timeout_s
Start = Callable[..., Consumption]


@pytest.fixture
def start(spark: Any, stage: Stage) -> Iterator[Start]:
    """Starts consumptions that end with the test."""
    begun: list[Consumption] = []

    def begin(recorder: Recorder, tasks: int = 2, **options: Any) -> Consumption:
        options = {"starting_position": "earliest", "settings": BorrowerSettings().scaled(SPEED), **options}
        options.setdefault("on_attempt", recorder.begin)
        begun.append(consume(spark, ALL, recorder, tasks=tasks, url=stage.url, **options))
        return begun[-1]

    yield begin
    for consumption in begun:
        consumption.stop(5.0)


def shared(stage: Stage, *counts: int) -> bool:
    """Whether so many streams each are held, by as many sessions."""
    return sorted(stage.holders().values()) == sorted(counts)


@pytest.mark.conforms("E18", "E25", "E29")
def test_tasks_share_the_streams_each_message_goes_to_one_and_a_drain_hands_all_over(
    stage: Stage, start: Start
) -> None:
    stage.serve("n1", "n2")
    stage.publish(2_000)
    running = start(Recorder(str(stage.records), pause_s=0.01), tasks=2)
    eventually(lambda: shared(stage, 8, 8), WAIT_S, lambda: str(stage.holders()))
    stage.publish(2_000, 2_000)
    eventually(stage.consumed, WAIT_S, lambda: str(stage.rows()))
    eventually(lambda: running.status().message_count == 4_000, WAIT_S, lambda: str(running.status()))
    assert (running.status().alive_count, running.status().stream_count) == (2, 16)
    eventually(lambda: running.status().lag == 0, WAIT_S)

    summaries = running.drain()
    assert not running.running
    assert [summary.attempt.partition for summary in summaries] == [0, 1]
    assert all(summary.failure is None and summary.summary.batches > 0 for summary in summaries)
    assert sum(summary.summary.messages for summary in summaries) == 4_000
    assert stage.holders() == {}
    assert stage.consumed()
    assert stage.verdict().explained == []
    assert not any(line.is_forced for line in stage.history())


@pytest.mark.conforms("E10", "E25")
def test_a_killed_worker_is_tried_again_and_only_the_living_attempts_progress_counts(
    stage: Stage, start: Start
) -> None:
    stage.serve("n1")
    stage.publish(6_000)
    running = start(Recorder(str(stage.records), pause_s=0.1), tasks=2, max_batch_bytes=20_000)
    eventually(lambda: shared(stage, 8, 8), WAIT_S, lambda: str(stage.holders()))
    victim = eventually(lambda: [a for a in stage.attempts() if a.lines], WAIT_S)[0]
    taken = {s: row for s, row in stage.rows().items() if row[3] == victim.session}
    killed_at = time.time()
    os.kill(victim.pid, signal.SIGKILL)
    published = 6_000

    def retried_at_work() -> list[AttemptRecord]:
        """Messages come in all the time, or the other task may have consumed them all before this one is back."""
        nonlocal published
        stage.publish(100, published)
        published += 100
        return [a for a in stage.attempts() if a.partition == victim.partition and a.pid != victim.pid and a.lines]

    retried = eventually(retried_at_work, WAIT_S, every_s=0.2)
    assert victim.session not in {attempt.session for attempt in retried}
    eventually(stage.consumed, WAIT_S, lambda: str(stage.rows()))
    running.drain()

    stage.verdict()
    forced_us = {(h.stream_id, h.grant_id): h.at_us for h in stage.history() if h.is_forced}
    assert taken
    for stream, (_, _, grant_id, _) in taken.items():
        assert forced_us[stream, grant_id] / 1e6 >= killed_at + EVICTION_S / 2, "moved before its eviction"
    dead = {(d.stream, d.grant) for d in stage.delivered() if d.consumer == victim.session}
    assert all(d.consumer == victim.session for d in stage.delivered() if (d.stream, d.grant) in dead)


@pytest.mark.conforms("E28")
def test_a_batch_longer_than_every_timeout_costs_its_task_nothing(stage: Stage, start: Start) -> None:
    stage.serve("n1")
    longest = max(
        EVICTION_S,
        LeaderSettings().scaled(SPEED).reclaim_grace_s,
        BorrowerSettings().scaled(SPEED).disconnect_timeout_s,
    )
    stage.publish(200)
    running = start(Recorder(str(stage.records), slow_value=b"0", slow_s=1.5 * longest), tasks=1)
    eventually(lambda: shared(stage, 16) and stage.delivered(), WAIT_S, lambda: str(stage.holders()))
    grants = {stream: row[2] for stream, row in stage.rows().items()}
    began = time.monotonic()
    eventually(stage.consumed, WAIT_S, lambda: str(stage.rows()))
    assert time.monotonic() - began > longest, "the batch was not slow at all"
    assert {stream: row[2] for stream, row in stage.rows().items()} == grants, "a stream changed hands"
    running.drain()
    assert stage.verdict().explained == []
    assert not any(line.is_forced for line in stage.history())


@pytest.mark.conforms("E25")
def test_a_failing_function_stops_the_job_and_names_the_record(stage: Stage, start: Start) -> None:
    stage.serve("n1")
    recorder = Recorder(str(stage.records), bad_value=b"777")
    running = start(recorder, tasks=2)
    eventually(lambda: shared(stage, 8, 8), WAIT_S, lambda: str(stage.holders()))
    stage.publish(1_000)
    with pytest.raises(UserFunctionFailed, match=r"offset \d+ \(topic 't/2', key 'k1'\): ValueError: cannot") as failed:
        running.result(WAIT_S)
    assert isinstance(failed.value.__cause__, ValueError)
    assert any("in __call__" in note for note in failed.value.__cause__.__notes__)
    assert len(stage.attempts()) == 2, "Spark has tried a task again"
    assert stage.holders() == {}, "released, not evicted"
    stream, offset = failed.value.stream_id, failed.value.offset
    assert stage.rows()[stream][1] == offset, "all before the record is done, and nothing after it"
    assert (stream, offset) not in {(d.stream, o) for d in stage.delivered() for o in d.offsets}


def test_a_function_that_exits_has_failed_and_is_named(stage: Stage, start: Start) -> None:
    stage.serve("n1")
    running = start(Recorder(str(stage.records), exit_value=b"7"), tasks=2)
    eventually(lambda: shared(stage, 8, 8), WAIT_S, lambda: str(stage.holders()))
    stage.publish(20)
    with pytest.raises(UserFunctionFailed, match=r"FunctionExited: the function asked .* SystemExit\(3\)") as failed:
        running.result(WAIT_S)
    assert len(stage.attempts()) == 2, "Spark has tried a task again"
    assert sum(task.failures for task in running.status().tasks) > 0
    assert stage.rows()[failed.value.stream_id][1] == failed.value.offset


def test_an_exit_where_an_attempt_begins_stops_the_job(stage: Stage, start: Start) -> None:
    stage.serve("n1")

    def leave(attempt: Any) -> None:
        raise SystemExit("no such model")

    running = start(Recorder(str(stage.records)), tasks=1, on_attempt=leave)
    with pytest.raises(RuntimeError, match=r"on_attempt asked for the end .* SystemExit\('no such model'\)"):
        running.result(WAIT_S)


def test_a_drain_waits_for_the_function_as_long_as_it_is_told_to(stage: Stage, start: Start) -> None:
    stage.serve("n1")
    stage.publish(1)
    running = start(
        Recorder(str(stage.records), pause_s=1.25 * BorrowerSettings().scaled(SPEED).unsubscribe_timeout_s), tasks=1
    )
    eventually(stage.delivered, WAIT_S)
    with pytest.raises(Unavailable, match=r"has not returned 0\.2 s after the drain began, in: spark-"):
        running.drain(0.2)
    (summary,) = running.drain()
    assert summary.summary.messages == 1
    assert stage.consumed()


def test_what_can_never_work_stops_the_job_instead_of_being_tried_again(stage: Stage, start: Start) -> None:
    stage.serve("n1")

    def refuse(attempt: Any) -> None:
        raise InvalidSetting("no such model: give another.")

    running = start(Recorder(str(stage.records)), tasks=1, on_attempt=refuse)
    with pytest.raises(InvalidSetting, match="no such model"):
        running.result(WAIT_S)
    assert not running.status().is_running


def test_more_tasks_than_slots_is_warned_of_and_they_start_as_others_end(stage: Stage, start: Start) -> None:
    stage.serve("n1")
    with pytest.warns(SparkSettingsWarning, match="4 tasks and 3 slots"):
        running = start(Recorder(str(stage.records)), tasks=4)
    eventually(lambda: running.status().alive_count == 3, WAIT_S)
    assert len(running.drain()) == 4


def test_enough_slots_and_retries_are_not_worth_a_word(stage: Stage, start: Start) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(Recorder(str(stage.records)), tasks=3).drain()
