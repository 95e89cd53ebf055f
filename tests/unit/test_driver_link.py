"""The link between a Spark task's attempts and their driver: when an attempt may end."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from sublet_borrower.consumer.runner import RetryPolicy
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.job import driver_endpoint, driver_link, task
from sublet_borrower.spark.job.driver_endpoint import DriverReportServer
from sublet_borrower.spark.job.driver_link import SparkDriverLink
from sublet_borrower.spark.job.status import REPORT_TIMEOUT_S, ConsumptionStatus, TaskStatus
from sublet_borrower.spark.job.task_reports import TaskReport, make_drain_event
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.errors import InvalidSetting, Unavailable
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_protocol.pubsub.agent_side_events import ConnectionStatus
from sublet_protocol.pubsub.model import Channel, MailboxOverflow, SequencedMessage
from tests.kit import eventually

WAIT_S = 60.0


class Attempt:
    """One attempt at a task, which only reports. `drained` is set when the driver has asked for it."""

    def __init__(self, driver: DriverReportServer, partition: int, number: int) -> None:
        self.session, self.drained = f"p{partition}-a{number}", threading.Event()
        self._partition, self._number, self._state = partition, number, "running"
        self.failure: str | None = None
        self.link = SparkDriverLink(
            driver.address, driver.token, self.session, self._report, lambda reason: self.drained.set()
        )

    def end(self) -> None:
        self._state = "ended"
        self.link.report_now()

    def _report(self) -> TaskReport:
        return TaskReport(self.session, self._partition, self._number, self._state, failure=self.failure)


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


def some_work(driver: str, token: str, on_attempt: Callable[[task.TaskAttempt], object] | None = None) -> task.TaskSpec:
    """The arguments of a task whose database is away."""

    def nothing(batch: Batch) -> None:
        """Is not called."""

    facts = ("$share/g/#", nothing, "postgresql://127.0.0.1:1/none", driver, token, "", "t", None, 1.0)
    return task.TaskSpec(*facts, "latest", 1, False, RetryPolicy(), BorrowerSettings(), "sublet", on_attempt)


@pytest.mark.conforms("E25")
def test_task_returns_after_its_twin(driver: DriverReportServer) -> None:
    """A second attempt that begins while its job is drained has nothing to do, and would be the first to end."""
    work = some_work(driver.address, driver.token)
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


def test_attempt_that_is_silent_is_not_waited_for(driver: DriverReportServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver_endpoint, "DRIVER_LOST_S", 0.0)
    dead, retried = Attempt(driver, 0, 0), Attempt(driver, 0, 1)
    with dead.link, retried.link:
        eventually(lambda: len(driver.last_reports()) == 2, WAIT_S)
        driver.drain()
        assert retried.drained.wait(WAIT_S)
        assert retried.link.may_end.is_set()


def test_first_failure_drains_all() -> None:
    """And is reported once; those that have not failed drain nobody."""
    failures: list[str] = []
    driver = DriverReportServer("127.0.0.1", "127.0.0.1", lambda: failures.append("failed"))
    first, second = attempts = [Attempt(driver, 0, 0), Attempt(driver, 1, 0)]
    with contextlib.closing(driver), first.link, second.link:
        eventually(lambda: len(driver.last_reports()) == 2, WAIT_S)
        assert (failures, first.drained.is_set(), second.drained.is_set()) == ([], False, False)
        for attempt in attempts:
            attempt.failure = "it broke"
            attempt.link.report_now()
            eventually(lambda attempt=attempt: driver.last_reports()[attempt.session][0].failure, WAIT_S)  # type: ignore[misc]
            assert all(attempt.drained.wait(WAIT_S) for attempt in attempts)
        assert failures == ["failed"]


def test_driver_needs_an_address_of_its_own() -> None:
    with pytest.raises(InvalidSetting, match=r"cannot listen on 192\.0\.2\.1 for .* reports\. Give `driver_host`"):
        DriverReportServer("192.0.2.1", "192.0.2.1", lambda: None)


class Connection:
    """In the place of a connection to the driver: connected or not, and the test says what comes."""

    def __init__(self, status: ConnectionStatus) -> None:
        self.status, self.reports = status, 0
        self.deliver: Callable[[SequencedMessage], None] = print

    def __call__(self, address: str, secret: object, deliver: Any, **_: object) -> Connection:
        self.deliver = deliver
        return self

    def send(self, message: object) -> None:
        self.reports += 1

    async def close(self, timeout_s: float) -> None:
        """Nothing to close."""


@pytest.mark.parametrize(
    ("status", "lost_after_s", "drained"),
    [
        (ConnectionStatus.DISCONNECTED, 0.0, 1),
        (ConnectionStatus.DISCONNECTED, 3600.0, 0),
        (ConnectionStatus.CONNECTED, 0.0, 0),
    ],
)
def test_task_drains_when_its_driver_is_lost(
    monkeypatch: pytest.MonkeyPatch, status: ConnectionStatus, lost_after_s: float, drained: int
) -> None:
    """Once, after a time, and waits for no other attempt then."""
    connection, reasons = Connection(status), list[str]()
    monkeypatch.setattr(driver_link, "NodeConnection", connection)
    link = SparkDriverLink("d:1", "t", "s", lambda: TaskReport("s", 0, 0, "running"), reasons.append, lost_after_s)
    link.may_end.clear()

    def has_reported(count: int) -> bool:
        link.report_now()
        return connection.reports >= count

    with link:
        eventually(lambda: has_reported(5), WAIT_S)
    assert reasons == ["the driver at d:1 was silent for 0 s"] * drained
    assert link.may_end.is_set() == bool(drained)


@pytest.mark.parametrize("is_drain_requested", [False, True])
def test_task_fails_when_its_driver_is_lost(monkeypatch: pytest.MonkeyPatch, is_drain_requested: bool) -> None:
    """A driver that is there all the same would take its end for the job's, unless it has asked for that."""
    connection = Connection(ConnectionStatus.DISCONNECTED)
    monkeypatch.setattr(driver_link, "NodeConnection", connection)
    monkeypatch.setattr(driver_link, "SparkDriverLink", partial(SparkDriverLink, lost_after_s=0.0))

    def begin(attempt: task.TaskAttempt) -> None:
        if is_drain_requested:
            eventually(lambda: connection.reports, WAIT_S)
            connection.deliver(SequencedMessage(1, Channel.GROUP, "command", make_drain_event(is_alone=False)))

    work = some_work("d:1", "t", begin)
    if is_drain_requested:
        assert task.run_attempt(work, task.TaskAttempt(0, 0, "t")).failure is None
        return
    with pytest.raises(Unavailable, match="the driver at d:1 was silent for 0 s, and the task has handed over"):
        task.run_attempt(work, task.TaskAttempt(0, 0, "t"))


def test_task_obeys_its_driver_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """What is no command has no effect."""
    connection, reasons = Connection(ConnectionStatus.CONNECTED), list[str]()
    monkeypatch.setattr(driver_link, "NodeConnection", connection)
    with SparkDriverLink("d:1", "t", "s", lambda: TaskReport("s", 0, 0, "running"), reasons.append) as link:
        eventually(lambda: connection.reports, WAIT_S)
        for body in (MailboxOverflow(1, (Channel.GROUP,)), GroupEventPayload(b'{"command": "rest"}')):
            connection.deliver(SequencedMessage(1, Channel.GROUP, "command", body))
        assert (reasons, link.may_end.is_set()) == ([], True)
        assert "unknown command of the driver ignored: command='rest'" in caplog.text
        for is_alone in (False, True):
            connection.deliver(SequencedMessage(1, Channel.GROUP, "command", make_drain_event(is_alone=is_alone)))
            assert link.may_end.is_set() == is_alone
    assert reasons == ["the driver asked for it"] * 2


@pytest.mark.parametrize(
    ("state", "age_s", "is_alive"),
    [
        ("running", 0.0, True),
        ("opening", 4.9, True),
        ("ended", 0.0, False),
        ("running", REPORT_TIMEOUT_S, False),
    ],
)
def test_attempt_is_alive_while_it_reports(state: str, age_s: float, is_alive: bool) -> None:
    """Of the others nothing is held, and what they have done counts."""
    report = TaskReport("s", 0, 0, state, messages=7, dead_lettered=2, streams=3, lag=5)
    status = ConsumptionStatus(True, (TaskStatus.of(report, age_s),) * 2)
    assert (status.alive_count, status.lag, status.stream_count) == ((2, 10, 6) if is_alive else (0, 0, 0))
    assert (status.message_count, status.dead_letter_count) == (14, 4)
