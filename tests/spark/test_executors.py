"""Sessions in Spark's executors, on real Spark, real nodes, real Postgres, with real kills."""

from __future__ import annotations

import os
import signal
import time
from asyncio import CancelledError
from collections.abc import Callable
from typing import Any

import pytest

from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.job.cluster_checks import SparkSettingsWarning
from sublet_borrower.spark.job.consumption import Consumption
from sublet_borrower.spark.job.exception_transport import TaskFailed
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import InvalidSetting, Unavailable, UserFunctionFailed
from tests.kit import eventually
from tests.spark.stage import SPEED, WAIT_S, Stage
from tests.spark.work import AttemptRecord, Recorder

pytestmark = pytest.mark.spark

GRACE_S = LeaderSettings().reconnect_grace_s
Start = Callable[..., Consumption]


def shared(stage: Stage, *counts: int) -> bool:
    """Whether so many streams each are held, by as many sessions."""
    return sorted(stage.holders().values()) == sorted(counts)


@pytest.mark.conforms("E18", "E25", "E29")
def test_tasks_share_streams_until_a_drain(stage: Stage, start: Start) -> None:
    """Each message goes to one task, and a drain hands all streams over."""
    stage.serve("n1", "n2")
    stage.publish(2_000)
    running = start(Recorder(str(stage.records), pause_s=0.01), tasks=2)
    eventually(lambda: shared(stage, 8, 8), WAIT_S, lambda: str(stage.holders()))
    stage.publish(2_000, 2_000)
    eventually(stage.consumed, WAIT_S, lambda: str(stage.lendings()))
    eventually(lambda: running.status().message_count == 4_000, WAIT_S, lambda: str(running.status()))
    assert (running.status().alive_count, running.status().stream_count) == (2, 16)
    eventually(lambda: running.status().lag == 0, WAIT_S)

    summaries = running.drain()
    assert not running.is_running
    assert [summary.attempt.partition for summary in summaries] == [0, 1]
    assert all(summary.failure is None and summary.summary.batches > 0 for summary in summaries)
    assert sum(summary.summary.messages for summary in summaries) == 4_000
    assert stage.holders() == {}
    assert stage.consumed()
    assert stage.verdict().explained == []
    assert not any(line.is_forced for line in stage.history())


@pytest.mark.conforms("E10", "E25")
def test_killed_worker_is_tried_again(stage: Stage, start: Start) -> None:
    """Only the living attempt's progress counts, and what the dead one had moves when it is known to be gone."""
    stage.serve("n1")
    stage.publish(6_000)
    running = start(Recorder(str(stage.records), pause_s=0.1), tasks=2, max_batch_bytes=20_000)
    eventually(lambda: shared(stage, 8, 8), WAIT_S, lambda: str(stage.holders()))
    victim = eventually(lambda: [a for a in stage.attempts() if a.lines], WAIT_S)[0]
    taken = {s: row for s, row in stage.lendings().items() if row[3] == victim.session}
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
    eventually(stage.consumed, WAIT_S, lambda: str(stage.lendings()))
    running.drain()

    stage.verdict()
    forced_us = {(h.stream_id, h.grant_id): h.at_us for h in stage.history() if h.is_forced}
    assert taken
    for stream, (_, _, grant_id, _) in taken.items():
        assert forced_us[stream, grant_id] / 1e6 >= killed_at + GRACE_S, "moved before it was known to be gone"
    dead = {(d.stream, d.grant) for d in stage.delivered() if d.consumer == victim.session}
    assert all(d.consumer == victim.session for d in stage.delivered() if (d.stream, d.grant) in dead)


@pytest.mark.conforms("E25")
@pytest.mark.parametrize(
    ("values", "cause_class", "said", "note"),
    [
        ({"bad_value": b"777"}, "builtins.ValueError", "ValueError: cannot", "in __call__"),
        (
            {"exit_value": b"777"},
            ".UserCodeCalledExit",
            r"UserCodeCalledExit: the function asked .* SystemExit\(3\)",
            "In the task:",
        ),
    ],
    ids=["raises", "exits"],
)
def test_failing_function_names_the_record(
    stage: Stage, start: Start, values: dict[str, Any], cause_class: str, said: str, note: str
) -> None:
    """The job stops, no task is tried again, and progress ends before the record."""
    stage.serve("n1")
    running = start(Recorder(str(stage.records), **values), tasks=2)
    eventually(lambda: shared(stage, 8, 8), WAIT_S, lambda: str(stage.holders()))
    stage.publish(1_000)
    with pytest.raises(UserFunctionFailed, match=r"offset \d+ \(topic 't/2', key 'k1'\): " + said) as failed:
        running.result(WAIT_S)
    cause = failed.value.__cause__
    assert isinstance(cause, TaskFailed)
    assert cause.class_name.endswith(cause_class)
    assert said.startswith(f"{cause_class.rpartition('.')[2]}: {cause.message[:6]}")
    assert any(note in each for each in cause.__notes__)
    assert sum(task.failures for task in running.status().tasks) > 0
    assert len(stage.attempts()) == 2, "Spark has tried a task again"
    assert stage.holders() == {}, "released, not evicted"
    stream, offset = failed.value.stream_id, failed.value.offset
    assert stage.lendings()[stream][1] == offset, "all before the record is done, and nothing after it"
    assert (stream, offset) not in {(d.stream, o) for d in stage.delivered() for o in d.offsets}


@pytest.mark.long
def test_drain_waits_for_the_function(stage: Stage, start: Start) -> None:
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


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (InvalidSetting("no such model: give another."), InvalidSetting, "no such model"),
        (SystemExit("no such model"), RuntimeError, r"on_attempt asked for the end .* SystemExit\('no such model'\)"),
        (CancelledError("no such model"), RuntimeError, "on_attempt raised CancelledError, which is no Exception"),
    ],
    ids=["raises", "exits", "cancels"],
)
def test_failing_on_attempt_stops_the_job(
    stage: Stage, start: Start, error: BaseException, raised: type[Exception], said: str
) -> None:
    stage.serve("n1")

    def fail(attempt: Any) -> None:
        raise error

    running = start(Recorder(str(stage.records)), tasks=1, on_attempt=fail)
    with pytest.raises(raised, match=said):
        running.result(WAIT_S)
    assert not running.status().is_running


@pytest.mark.long
def test_more_tasks_than_slots(stage: Stage, start: Start) -> None:
    """It is warned of, and those that wait for a slot end with the drain too."""
    stage.serve("n1")
    with pytest.warns(SparkSettingsWarning, match="4 tasks and 3 slots"):
        running = start(Recorder(str(stage.records)), tasks=4)
    eventually(lambda: running.status().alive_count == 3, WAIT_S)
    assert len(running.drain()) == 4
