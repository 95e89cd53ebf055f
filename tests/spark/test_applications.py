"""Spark applications that stop, die and speculate: each a driver process of its own, killed for real."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from sublet_borrower.spark.job.consumption import Consumption
from tests.kit import eventually
from tests.kit_nodes import Process
from tests.spark.cluster import a_cluster
from tests.spark.stage import ALL, SPEED, WAIT_S, Stage
from tests.spark.work import Recorder

pytestmark = pytest.mark.spark

Start = Callable[..., Consumption]


def application(stage: Stage, tasks: int, *more: str, pause_s: float = 0.02) -> Process:
    """Another Spark application in the same group."""
    arguments = (stage.url, ALL, str(stage.records), str(tasks), str(pause_s), *more)
    process = Process("tests.spark.driver", *arguments, log=stage.records.parent / "driver.log", speed=SPEED)
    stage.fleet.consumers["driver"] = process
    return process


@pytest.fixture
def other(stage: Stage) -> Process:
    """One of a single task, which has all streams."""
    stage.serve("n1")
    process = application(stage, 1)
    eventually(lambda: shares(stage) == (0, 16), WAIT_S, process.output)
    return process


def shares(stage: Stage) -> tuple[int, int]:
    """(streams held here, streams held by the other application)."""
    held = stage.holders()
    mine = sum(count for session, count in held.items() if session and session.startswith("here"))
    return mine, sum(held.values()) - mine


def kill_everything(process: Process) -> None:
    """A machine that is gone: driver, JVM and Python workers, none with time for a last message."""
    everybody = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for one in everybody:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.suspend()
    for one in everybody:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.kill()


@pytest.mark.conforms("E26")
@pytest.mark.long
def test_other_application_takes_all_at_once(stage: Stage, other: Process, start: Start) -> None:
    """One application stops, then its driver dies: the other has its streams at once, without an eviction."""
    with start(Recorder(str(stage.records), 0.02), tasks=1, name="here"):
        eventually(lambda: shares(stage) == (8, 8), WAIT_S, lambda: str(stage.holders()))
        stage.publish(2_000)
    eventually(lambda: shares(stage) == (0, 16), WAIT_S, lambda: str(stage.holders()))
    with start(Recorder(str(stage.records), 0.02), tasks=1, name="here"):
        eventually(lambda: shares(stage) == (8, 8), WAIT_S, lambda: str(stage.holders()))
        stage.publish(2_000, 2_000)
        other.kill()
        eventually(lambda: shares(stage) == (16, 0), WAIT_S, lambda: str(stage.holders()))
        assert not any(line.is_forced for line in stage.history()), "it was evicted instead of handing over"
        eventually(stage.consumed, WAIT_S, lambda: str(stage.lendings()))
    stage.verdict()


@pytest.mark.long
@pytest.mark.conforms("E10", "E26")
def test_vanished_application_is_evicted(stage: Stage, other: Process, start: Start) -> None:
    """Driver, JVM and workers die without a word: their streams move at the eviction, and nothing is lost."""
    with start(Recorder(str(stage.records), 0.02), tasks=1, name="here"):
        eventually(lambda: shares(stage) == (8, 8), WAIT_S, lambda: str(stage.holders()))
        stage.publish(4_000)
        kill_everything(other)
        stage.publish(1_000, 4_000)
        eventually(lambda: shares(stage) == (16, 0), WAIT_S, lambda: str(stage.holders()))
        eventually(stage.consumed, WAIT_S, lambda: str(stage.lendings()))
    stage.verdict()
    assert len([line for line in stage.history() if line.is_forced]) == 8
    assert {line.reason for line in stage.history() if line.is_forced} == {"evicted: its process has ended"}


@pytest.mark.long
def test_ctrl_c_drains_the_application_of_the_image(stage: Stage) -> None:
    stage.serve("n1")
    log, settings = stage.records.parent / "job.log", {"SUBLET_DATABASE_URL": stage.url}
    job = stage.fleet.consumers["job"] = Process("deploy.spark_job", ALL, log=log, speed=SPEED, extra=settings)
    stage.publish(100)
    eventually(stage.consumed, 2 * WAIT_S, job.output)
    job.signal(signal.SIGINT)
    eventually(lambda: job.returncode is not None, WAIT_S, job.output)
    assert (job.returncode, "\n100 messages consumed\n" in job.output()) == (0, True), job.output()


@pytest.mark.long
@pytest.mark.conforms("E25")
def test_speculative_attempt_repeats_nothing(stage: Stage, tmp_path: Path) -> None:
    """Both attempts at a task have a session and streams of their own."""
    stage.serve("n1")
    settings = {
        "spark.speculation": "true",
        "spark.speculation.task.duration.threshold": "1s",
        "spark.executor.cores": "1",
        "spark.executor.memory": "512m",
        "spark.task.maxFailures": "1000",
    }
    with a_cluster(tmp_path) as master:
        driver = application(stage, 1, master, json.dumps(settings), pause_s=0.01)
        eventually(lambda: sorted(stage.holders().values()) == [8, 8], 2 * WAIT_S, driver.output)
        stage.publish(4_000)
        eventually(stage.consumed, WAIT_S, lambda: str(stage.lendings()))
        driver.signal(signal.SIGTERM)
        eventually(lambda: "drained" in driver.output(), WAIT_S, driver.output)
        assert stage.holders() == {}
        driver.stop()
    attempts = stage.attempts()
    assert len(attempts) == 2
    assert {attempt.partition for attempt in attempts} == {0}
    assert len({attempt.session for attempt in attempts}) == 2
    assert all(attempt.lines for attempt in attempts)
    assert stage.verdict().explained == []
