"""What a task's process does when it is told to end, signal by signal, and what tells one attempt from another."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from sublet_borrower.consumer.runner import RetryPolicy
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.job import task
from sublet_borrower.spark.job.shutdown_signals import ShutdownSignals
from sublet_borrower.streams.batch import Batch
from tests.kit import eventually

LONG_S = 10.0
"""No test waits for this to be over."""


@pytest.fixture(autouse=True)
def _no_handler_is_left_behind() -> Iterator[None]:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    yield
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before


@contextlib.contextmanager
def the_process_ends(number: signal.Signals) -> Iterator[None]:
    """With the exit code of this signal."""
    with pytest.raises(SystemExit) as ended:
        yield
    assert ended.value.code == 128 + number


@pytest.mark.conforms("E25")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_lets_the_running_call_finish(number: signal.Signals) -> None:
    left, finished = threading.Event(), []
    with the_process_ends(number), ShutdownSignals(left.set, LONG_S) as ending:
        with ending.user_call():
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGTERM)
            eventually(left.is_set)
            finished.append("the call")
        finished.append("the hand-over")
    assert finished == ["the call", "the hand-over"]
    assert not ending.cut


def test_it_leaves_once_and_on_the_network_thread() -> None:
    threads: list[str] = []
    with (
        the_process_ends(signal.SIGTERM),
        ShutdownSignals(lambda: threads.append(threading.current_thread().name), LONG_S),
    ):
        for _ in range(3):
            signal.raise_signal(signal.SIGTERM)
        eventually(lambda: threads)
    assert threads == ["sublet-network"]


@pytest.mark.conforms("E25")
def test_a_call_that_takes_too_long_is_cut_off() -> None:
    began = time.monotonic()
    with the_process_ends(signal.SIGHUP), ShutdownSignals(lambda: None, 0.05) as ending, ending.user_call():
        signal.raise_signal(signal.SIGHUP)
        time.sleep(LONG_S)
    assert time.monotonic() - began < LONG_S / 2
    assert ending.cut


def test_the_hand_over_is_not_cut_off() -> None:
    handed_over = False
    with the_process_ends(signal.SIGTERM), ShutdownSignals(lambda: None, 0.01) as ending:
        signal.raise_signal(signal.SIGTERM)
        eventually(lambda: ending._time_is_over)
        signal.raise_signal(signal.SIGTERM)
        handed_over = True
    assert handed_over
    assert not ending.cut


def test_only_the_main_thread_heeds_signals() -> None:
    with ShutdownSignals(lambda: None, 0.0) as ending, ending.user_call():
        pass
    assert (ending.received_signal, ending.cut) == (None, False)
    received: list[bool] = []

    def elsewhere() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with ShutdownSignals(lambda: None, 0.0):
            received.append(signal.getsignal(signal.SIGTERM) != before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert received == [False]


# --- names ----------------------------------------------------------------------------------------------------------


class Context:
    """What Spark tells a task about itself."""

    def __init__(self, partition: int, number: int, task_attempt: int) -> None:
        self._partition, self._number, self._task_attempt = partition, number, task_attempt

    def partitionId(self) -> int:  # noqa: N802 Spark's name
        return self._partition

    def attemptNumber(self) -> int:  # noqa: N802
        return self._number

    def taskAttemptId(self) -> int:  # noqa: N802
        return self._task_attempt


def some_work(name: str) -> task.TaskSpec:
    def nothing(batch: Batch) -> None:
        """Is not called."""

    facts = ("$share/g/#", nothing, "", "", "", "", name, None, 1.0, "latest", 1, False)
    return task.TaskSpec(*facts, RetryPolicy(), BorrowerSettings(), None, None)


def test_a_task_that_leaves_needs_no_database(caplog: pytest.LogCaptureFixture) -> None:
    work = replace(some_work("t"), url="postgresql:///x?host=/nonexistent")
    waiting = task._Task(work, task.Attempt(0, 0, "t"))
    with ThreadPoolExecutor(1) as threads:
        opening = threads.submit(waiting._open)
        eventually(lambda: caplog.text.count("no session yet") >= 2)
        waiting.leave()
        assert opening.result(LONG_S) is None


@pytest.mark.conforms("E25")
def test_each_attempt_is_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyspark

    reported: list[Any] = []
    monkeypatch.setattr(pyspark.TaskContext, "get", lambda: reported[-1])
    names = set()
    for job in ("spark-1f", "spark-2a"):
        for context in (
            Context(0, 0, 10),
            Context(1, 0, 11),
            Context(0, 1, 12),  # tried again
            Context(1, 0, 13),  # of a stage that is run again: the number starts anew
            Context(0, 1, 14),
        ):
            reported.append(context)
            attempt = task._this_attempt(some_work(job))
            assert (attempt.partition, attempt.number) == (context.partitionId(), context.attemptNumber())
            names.add(attempt.session)
    assert len(names) == 10
