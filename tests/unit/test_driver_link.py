"""The link between a Spark task's attempts and their driver: when an attempt may end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sublet_borrower.consumer.runner import RetryPolicy
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.job import driver_endpoint, task
from sublet_borrower.spark.job.driver_endpoint import DriverReportServer
from sublet_borrower.spark.job.driver_link import SparkDriverLink
from sublet_borrower.spark.job.task_reports import TaskReport
from sublet_borrower.streams.batch import Batch
from tests.kit import eventually

WAIT_S = 60.0


class Attempt:
    """One attempt at a task, which only reports. `drained` is set when the driver has asked for it."""

    def __init__(self, driver: DriverReportServer, partition: int, number: int) -> None:
        self.session, self.drained = f"p{partition}-a{number}", threading.Event()
        self._partition, self._number, self._state = partition, number, "running"
        self.link = SparkDriverLink(
            driver.address, driver.token, self.session, self._report, lambda reason: self.drained.set()
        )

    def end(self) -> None:
        self._state = "ended"
        self.link.report_now()

    def _report(self) -> TaskReport:
        return TaskReport(self.session, self._partition, self._number, self._state)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[DriverReportServer]:
    """On a busy machine no attempt passes for a dead one."""
    monkeypatch.setattr(driver_endpoint, "DRIVER_LOST_S", 3600.0)
    server = DriverReportServer("127.0.0.1", "127.0.0.1", lambda: None, True)
    yield server
    server.close()


@pytest.mark.conforms("E25")
def test_attempt_waits_for_its_twin(driver: DriverReportServer) -> None:
    """Spark kills what still works when one attempt has ended; those of other tasks need not wait."""
    first, second, other = attempts = [Attempt(driver, 0, 0), Attempt(driver, 0, 1), Attempt(driver, 1, 0)]
    with first.link, second.link, other.link:
        eventually(lambda: len(driver.last_reports()) == 3, WAIT_S)
        driver.drain()
        assert all(attempt.drained.wait(WAIT_S) for attempt in attempts)
        assert [attempt.link.may_end.is_set() for attempt in attempts] == [False, False, True]
        second.end()
        assert first.link.may_end.wait(WAIT_S)
        assert not second.link.may_end.is_set()
        first.end()
        assert second.link.may_end.wait(WAIT_S)


def test_nobody_waits_without_speculation() -> None:
    """The other attempt has died then, and would be waited for until it was silent for long."""
    driver = DriverReportServer("127.0.0.1", "127.0.0.1", lambda: None)
    dead, retried = Attempt(driver, 0, 0), Attempt(driver, 0, 1)
    with contextlib.closing(driver), dead.link, retried.link:
        eventually(lambda: len(driver.last_reports()) == 2, WAIT_S)
        driver.drain()
        assert retried.drained.wait(WAIT_S)
        assert retried.link.may_end.is_set()


@pytest.mark.conforms("E25")
def test_task_returns_after_its_twin(driver: DriverReportServer) -> None:
    """A second attempt that begins while its job is drained has nothing to do, and would be the first to end."""

    def nothing(batch: Batch) -> None:
        """Is not called."""

    facts = ("$share/g/#", nothing, "postgresql://127.0.0.1:1/none", driver.address, driver.token, "", "t", None, 1.0)
    work = task.TaskSpec(*facts, "latest", 1, False, RetryPolicy(), BorrowerSettings(), None, None)
    first = Attempt(driver, 0, 0)
    with first.link, ThreadPoolExecutor(1) as threads:
        eventually(lambda: len(driver.last_reports()) == 1, WAIT_S)
        driver.drain()
        second = threads.submit(task.run_attempt, work, task.TaskAttempt(0, 1, "second"))
        eventually(lambda: [r.state for r, _ in driver.last_reports().values()] == ["running", "ended"], WAIT_S)
        with pytest.raises(TimeoutError):
            second.result(1.0)
        first.end()
        assert second.result(WAIT_S).failure is None
