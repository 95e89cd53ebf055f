"""A consumption in Spark's executors, seen from its driver, where what serves the job does not end well."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from sublet_borrower.spark.job import cluster_checks, consumption, driver_endpoint
from sublet_borrower.spark.job.consumption import Consumption, consume
from sublet_borrower.spark.job.driver_endpoint import DriverReportServer
from sublet_borrower.spark.job.task import TaskSpec
from sublet_protocol.domain.errors import Unavailable


class Spark:
    """In the place of Spark: its jobs end at once, well or not; those that are `held`, when they are cancelled."""

    def __init__(self, failure: Exception | None, *, held: bool = False) -> None:
        self._failure = failure
        self._may_end = threading.Event()
        self.cancelled = 0
        if not held:
            self._may_end.set()

    def interruptTag(self, tag: str) -> None:  # noqa: N802 Spark's name
        self.cancelled += 1
        self._may_end.set()

    def addTag(self, tag: str) -> None:  # noqa: N802 Spark's name
        """Nothing to be cancelled by."""

    def range(self, *bounds: int) -> Any:
        return SimpleNamespace(mapInArrow=lambda *_, **__: SimpleNamespace(collect=self._collect))

    def _collect(self) -> list[object]:
        self._may_end.wait(20.0)
        if self._failure is not None:
            raise self._failure
        return []


JAVA = """An error occurred while calling o81.collectToPython.
: org.apache.spark.SparkException: [SPARK_JOB_CANCELLED] Job 3 cancelled as part of cancellation of all
\tat org.apache.spark.scheduler.DAGScheduler.failJobAndIndependentStages(DAGScheduler.scala:2935)"""


def started(
    monkeypatch: pytest.MonkeyPatch,
    failure: Exception | None,
    context: Any = None,
    speculation: str = "false",
    *,
    spark: Spark | None = None,
    host: str | None = None,
    **more: str,
) -> Consumption:
    """A consumption whose job ends so, and whose database does not end well. `more`: settings of Spark."""

    @contextlib.contextmanager
    def database(*_: object) -> Iterator[SimpleNamespace]:
        yield SimpleNamespace(url="postgresql://nobody@127.0.0.1:1/x")
        raise TimeoutError("it does not answer")

    monkeypatch.setattr(cluster_checks, "check_cluster", lambda *_: None)
    settings = {"spark.master": "local[2]", "spark.speculation": speculation}
    settings |= {f"spark.{name.replace('_', '.')}": value for name, value in more.items()}
    monkeypatch.setattr(cluster_checks, "read_setting", lambda _, key, default: settings.get(key, default))
    monkeypatch.setattr(cluster_checks, "spark_context", lambda spark: context)
    monkeypatch.setattr(consumption, "open_database", database)
    given = spark or Spark(failure)
    return consume(given, "$share/g/#", lambda batch: None, tasks=2, driver_host=host)


@pytest.mark.parametrize("failure", [None, RuntimeError("the job has failed")])
def test_whoever_waits_is_notified_of_the_end(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception | None
) -> None:
    """Even where what served the job does not end well."""
    running = started(monkeypatch, failure)
    assert running.wait(30.0)
    if failure is None:
        assert running.result() == []
    else:
        with pytest.raises(Unavailable, match="the job has failed"):
            running.result()
    assert "it does not answer" in caplog.text


@pytest.mark.parametrize("schema", [None, "other"])
def test_a_task_has_the_drivers_schema(monkeypatch: pytest.MonkeyPatch, schema: str | None) -> None:
    """Also the default: its worker may have had a job with another."""
    works: list[TaskSpec] = []
    monkeypatch.setattr(consumption, "make_task_function", works.append)
    monkeypatch.setenv("SUBLET_SCHEMA", schema or "")
    assert started(monkeypatch, None).wait(30.0)
    assert [work.schema for work in works] == [schema or "sublet"]


@pytest.mark.conforms("X3")
def test_names_and_tags_show_nothing_of_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """The name of a session is seen by all who may watch the group, and a tag on Spark's page."""
    tokens: list[str] = []
    shown: list[str] = []

    class Noted(DriverReportServer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            tokens.append(self.token)

    context = SimpleNamespace(addJobTag=shown.append, setJobDescription=shown.append)
    monkeypatch.setattr(driver_endpoint, "DriverReportServer", Noted)
    running = started(monkeypatch, None, context)
    assert running.wait(30.0)
    (token,), (tag, description) = tokens, shown
    assert tag.startswith("sublet-")
    assert description.startswith("spark-")
    parts = {token[at : at + 6] for at in range(len(token) - 5)}
    assert not any(part in text for part in parts for text in shown)


@pytest.mark.parametrize(("setting", "speculates"), [("false", False), ("true", True), ("TRUE", True)])
def test_driver_knows_of_speculation(monkeypatch: pytest.MonkeyPatch, setting: str, speculates: bool) -> None:
    """An attempt waits for the others at its task where Spark may have them."""
    received: list[bool] = []

    class Noted(DriverReportServer):
        def __init__(self, bind: str, advertised: str, on_failed: Any, speculates: bool) -> None:
            super().__init__(bind, advertised, on_failed, speculates)
            received.append(speculates)

    monkeypatch.setattr(driver_endpoint, "DriverReportServer", Noted)
    assert started(monkeypatch, None, speculation=setting).wait(30.0)
    assert received == [speculates]


@pytest.mark.parametrize(
    ("driver_host", "settings", "listens", "is_reached"),
    [
        ("h.example", {"driver_host": "other"}, "h.example", "h.example"),
        (None, {"driver_host": "other", "driver_bindAddress": "0.0.0.0"}, "127.0.0.1", "127.0.0.1"),
        (None, {"master": "yarn", "driver_host": "h"}, "h", "h"),
        (None, {"master": "yarn", "driver_host": "h", "driver_bindAddress": "0.0.0.0"}, "0.0.0.0", "h"),
        (None, {"master": "yarn"}, "127.0.0.1", "127.0.0.1"),
    ],
)
def test_driver_listens_where_its_tasks_reach_it(
    monkeypatch: pytest.MonkeyPatch, driver_host: str | None, settings: dict[str, Any], listens: str, is_reached: str
) -> None:
    """Where it is said, or on this machine alone, or where Spark's driver does."""
    received: list[str] = []

    class Noted(DriverReportServer):
        def __init__(self, bind: str, advertised: str, on_failed: Any, speculates: bool) -> None:
            received.extend((bind, advertised))
            super().__init__("127.0.0.1", "127.0.0.1", on_failed, speculates)

    monkeypatch.setattr(driver_endpoint, "DriverReportServer", Noted)
    assert started(monkeypatch, None, host=driver_host, **settings).wait(30.0)
    assert received == [listens, is_reached]


@pytest.mark.parametrize(("host", "shown"), [("localhost", "localhost:"), ("::1", "[::1]:"), ("[::1]", "[::1]:")])
def test_an_address_has_brackets_once(host: str, shown: str) -> None:
    server = DriverReportServer("127.0.0.1", host, lambda: None)
    assert server.address.startswith(shown)
    server.close()


def test_a_job_that_is_stopped_has_not_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark ends it by an error, and only if it does not end by itself."""
    spark = Spark(RuntimeError("cancelled"), held=True)
    running = started(monkeypatch, None, spark=spark)
    with pytest.raises(Unavailable, match="the job has not ended within 0 s"):
        running.result(0.0)
    with pytest.raises(Unavailable, match="has not returned 0 s after the drain began, in: none that has reported"):
        running.drain(0.0)
    assert (running.is_running, spark.cancelled) == (True, 0)
    running.stop(0.0)
    assert running.result(30.0) == []
    assert spark.cancelled == 1
    running.stop(30.0)
    assert spark.cancelled == 1


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (JAVA, "org.apache.spark.SparkException: [SPARK_JOB_CANCELLED] Job 3 cancelled as part of cancellation of all"),
        ("[INTERRUPTED] the operation is over\nand more", "[INTERRUPTED] the operation is over"),
        (
            "An error occurred while calling o81.collectToPython.",
            "An error occurred while calling o81.collectToPython.",
        ),
        ("", "RuntimeError"),
        (
            'An exception was thrown from the Python worker:\nTraceback (most recent call last):\n  File "a.py"\n'
            "    from there import work\nModuleNotFoundError: No module named 'there'\nand more",
            "An exception was thrown from the Python worker: ModuleNotFoundError: No module named 'there'",
        ),
    ],
)
def test_what_ended_a_job_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, text: str, cause: str) -> None:
    with pytest.raises(Unavailable) as raised:
        started(monkeypatch, RuntimeError(text)).result(30.0)
    assert str(raised.value) == f"the Spark job has failed: {cause}"
