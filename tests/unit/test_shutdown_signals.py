"""What a task's process does when it is to end, signal by signal, and what distinguishes one attempt from another."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest

from sublet_borrower.consumer.runner import RetryPolicy
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.job import driver_link, task
from sublet_borrower.spark.job.shutdown_signals import ShutdownSignalHandler
from sublet_borrower.streams.batch import Batch
from sublet_borrower.util.network_loop import network_loop
from sublet_storage.util import retry
from tests.kit import eventually

LONG_S = 60.0
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
    """It leaves once, on the network thread, and ends the process after the hand-over."""
    threads: list[str] = []
    finished: list[str] = []

    def leave() -> None:
        threads.append(threading.current_thread().name)

    with the_process_ends(number), ShutdownSignalHandler(leave, LONG_S) as ending:
        with ending.user_call():
            signal.raise_signal(number)
            signal.raise_signal(signal.SIGTERM)
            eventually(lambda: threads)
            finished.append("the call")
        finished.append("the hand-over")
    assert finished == ["the call", "the hand-over"]
    assert threads == ["sublet-network"]
    assert not ending.cut


@pytest.mark.conforms("E25")
def test_a_call_that_takes_too_long_is_cut_off() -> None:
    """Also in its sleep."""
    with the_process_ends(signal.SIGHUP), ShutdownSignalHandler(lambda: None, 0.05) as ending, ending.user_call():
        signal.raise_signal(signal.SIGHUP)
        time.sleep(LONG_S)
    assert ending.cut


def test_the_hand_over_is_not_cut_off() -> None:
    handed_over = False
    with the_process_ends(signal.SIGTERM), ShutdownSignalHandler(lambda: None, 0.01) as ending:
        signal.raise_signal(signal.SIGTERM)
        time_is_over = threading.Event()
        network_loop().call_soon_threadsafe(network_loop().call_later, 0.05, time_is_over.set)
        eventually(time_is_over.is_set)
        signal.raise_signal(signal.SIGTERM)
        handed_over = True
    assert handed_over
    assert not ending.cut


def test_only_the_main_thread_heeds_signals() -> None:
    with ShutdownSignalHandler(lambda: None, 0.0) as ending, ending.user_call():
        pass
    assert (ending.received_signal, ending.cut) == (None, False)
    received: list[bool] = []

    def elsewhere() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with ShutdownSignalHandler(lambda: None, 0.0):
            received.append(signal.getsignal(signal.SIGTERM) != before)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert received == [False]


# --- names ----------------------------------------------------------------------------------------------------------


def some_work(name: str, url: str, on_attempt: Callable[[task.TaskAttempt], object] | None = None) -> task.TaskSpec:
    def nothing(batch: Batch) -> None:
        """Is not called."""

    facts = ("$share/g/#", nothing, url, "127.0.0.1:1", "", "", name, None, 1.0, "latest", 1, False)
    return task.TaskSpec(*facts, RetryPolicy(), BorrowerSettings(), "sublet", on_attempt)


@pytest.fixture
def _no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """None to report to, so that nobody waits for its answer."""
    monkeypatch.setattr(driver_link, "LAST_REPORT_TIMEOUT_S", 0.0)


@pytest.mark.usefixtures("_no_driver")
def test_a_task_that_leaves_needs_no_database(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "WARN_AFTER_S", 0.0)
    work = some_work("t", "postgresql://127.0.0.1:1/none")

    def end_it() -> None:
        eventually(lambda: "action=open session" in caplog.text, LONG_S)
        os.kill(os.getpid(), signal.SIGTERM)

    with ThreadPoolExecutor(1) as threads, the_process_ends(signal.SIGTERM):
        ended = threads.submit(end_it)
        task.run_attempt(work, task.TaskAttempt(0, 0, "t"))
    ended.result()


@pytest.mark.usefixtures("_no_driver")
def test_a_call_that_is_cut_off_has_not_failed(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user's code has not asked for the end."""
    monkeypatch.setattr(task, "CALL_SHARE", 0.001)

    def take_long(attempt: task.TaskAttempt) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(LONG_S)

    with the_process_ends(signal.SIGTERM):
        task.run_attempt(some_work("t", "postgresql://127.0.0.1:1/none", take_long), task.TaskAttempt(0, 0, "t"))
    assert "task failed" not in caplog.text


@pytest.mark.parametrize("is_signalled", [False, True])
def test_a_signal_ends_a_task_beside_its_twin(monkeypatch: pytest.MonkeyPatch, is_signalled: bool) -> None:
    """Its executor is gone: it cannot wait until the other attempt has ended."""
    waits: list[float] = []

    class Link:
        """In the place of the link to the driver."""

        silence = None

        def __init__(self, *_: object) -> None:
            self.may_end = self

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) > 1

        def __enter__(self) -> Link:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing to end."""

        def report_now(self) -> None:
            """To nobody."""

    def begin(attempt: task.TaskAttempt) -> None:
        if is_signalled:
            signal.raise_signal(signal.SIGTERM)
        raise ValueError("seen")

    monkeypatch.setattr(driver_link, "SparkDriverLink", Link)
    work = some_work("t", "postgresql://127.0.0.1:1/none", begin)
    with the_process_ends(signal.SIGTERM) if is_signalled else contextlib.nullcontext():
        task.run_attempt(work, task.TaskAttempt(0, 0, "t"))
    assert waits == ([] if is_signalled else [driver_link.REPORT_INTERVAL_S] * 2)


@pytest.mark.usefixtures("_no_driver")
def test_a_session_is_drained_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by itself."""
    calls: list[str] = []
    session = SimpleNamespace(
        drain=lambda: calls.append("drain"),
        close=lambda aborted: calls.append(f"close {aborted}"),
        assignment=dict,
        lag=dict,
    )
    monkeypatch.setattr("sublet_borrower.consumer.session.Session", lambda *_, **__: session)
    monkeypatch.setattr(task, "run_function", lambda *_, **__: calls.append("run"))
    task.run_attempt(some_work("t", "postgresql://127.0.0.1:1/none"), task.TaskAttempt(0, 0, "t"))
    assert calls == ["run", "close False"]


@pytest.mark.conforms("E25")
@pytest.mark.usefixtures("_no_driver")
def test_each_attempt_is_another_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever job, task and stage it is of, and where the number of attempts begins anew."""
    import pyspark

    begun: list[task.TaskAttempt] = []

    def end_at_once(attempt: task.TaskAttempt) -> None:
        begun.append(attempt)
        raise ValueError("seen")

    attempts = [(0, 0), (1, 0), (0, 1), (1, 0), (0, 1)]
    for job in ("spark-1f", "spark-2a"):
        for id, (partition, number) in enumerate(attempts):
            facts = {"partitionId": partition, "attemptNumber": number, "taskAttemptId": id}
            context = partial(SimpleNamespace, **{name: partial(int, value) for name, value in facts.items()})
            monkeypatch.setattr(pyspark.TaskContext, "get", context)
            task.run(some_work(job, "postgresql://127.0.0.1:1/none", end_at_once))
    assert [(each.partition, each.number) for each in begun] == attempts * 2
    assert len({each.session for each in begun}) == 10
