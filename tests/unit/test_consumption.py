"""A consumption in Spark's executors, seen from its driver, where what serves the job does not end well."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from sublet_borrower.spark.job import cluster_checks
from sublet_borrower.spark.job.executors import Consumption
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


@pytest.mark.parametrize("failure", [None, RuntimeError("the job has failed")])
def test_whoever_waits_hears_of_the_end_though_what_served_the_job_does_not_end_well(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, failure: Exception | None
) -> None:
    def refuse() -> None:
        raise TimeoutError("it does not answer")

    monkeypatch.setattr(cluster_checks, "context", lambda spark: None)
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
