"""A consumption in Spark's executors, seen from its driver, where what serves the job does not end well."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from sublet_borrower.spark.job import cluster_checks
from sublet_borrower.spark.job.consumption import Consumption
from sublet_protocol.domain.errors import Unavailable


class Spark:
    """In the place of Spark: its jobs end at once, well or not."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def addTag(self, tag: str) -> None:  # noqa: N802 Spark's name
        """Nothing to be cancelled by."""

    def range(self, *bounds: int) -> Any:
        return SimpleNamespace(mapInArrow=lambda *_, **__: SimpleNamespace(collect=self._collect))

    def _collect(self) -> list[object]:
        if self._failure is not None:
            raise self._failure
        return []


JAVA = """An error occurred while calling o81.collectToPython.
: org.apache.spark.SparkException: [SPARK_JOB_CANCELLED] Job 3 cancelled as part of cancellation of all
\tat org.apache.spark.scheduler.DAGScheduler.failJobAndIndependentStages(DAGScheduler.scala:2935)"""


@pytest.mark.parametrize("failure", [None, RuntimeError("the job has failed")])
def test_whoever_waits_hears_of_the_end_though_what_served_the_job_does_not_end_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception | None
) -> None:
    def refuse() -> None:
        raise TimeoutError("it does not answer")

    monkeypatch.setattr(cluster_checks, "spark_context", lambda spark: None)
    consumption, resources = Consumption(Spark(failure), 2), contextlib.ExitStack()
    resources.callback(refuse)
    consumption._start(SimpleNamespace(name="a", subscription="b"), resources)  # type: ignore[arg-type]
    assert consumption.wait(30.0)
    if failure is None:
        assert consumption.result() == []
    else:
        with pytest.raises(Unavailable, match="the job has failed"):
            consumption.result()
    assert "it does not answer" in caplog.text


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
    ],
)
def test_what_ended_a_job_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, text: str, cause: str) -> None:
    monkeypatch.setattr(cluster_checks, "spark_context", lambda spark: None)
    consumption = Consumption(Spark(RuntimeError(text)), 2)
    consumption._start(SimpleNamespace(name="a", subscription="b"), contextlib.ExitStack())  # type: ignore[arg-type]
    with pytest.raises(Unavailable) as raised:
        consumption.result(30.0)
    assert str(raised.value) == f"the Spark job has failed: {cause}"
