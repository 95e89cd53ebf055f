"""What is read of a query's checkpoint, on this machine or by Spark's own means."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyspark
import pytest
from pyspark.errors import AnalysisException, PySparkRuntimeError
from pyspark.sql import SparkSession

from sublet_borrower.spark.source.spark_checkpoint_reader import check_checkpoint, read_offsets
from sublet_protocol.domain.errors import UsageError


class Spark:
    """In the place of a session: it has these files, by their URLs."""

    def __init__(self, **files: list[str]) -> None:
        self.files: dict[str, list[str]] = files
        self.read = SimpleNamespace(text=self._text)

    def _text(self, location: str) -> Any:
        if location not in self.files:
            raise AnalysisException(message="there is no such path")
        rows = [SimpleNamespace(value=line) for line in self.files[location]]
        return SimpleNamespace(schema=["value"], collect=lambda: rows)


@pytest.fixture
def spark(monkeypatch: pytest.MonkeyPatch) -> Spark:
    spark = Spark()
    monkeypatch.setattr(SparkSession, "active", lambda: spark)
    return spark


ON_SPARKS_DEFAULT = "billing-checkpoint"
"""Without a scheme, on a cluster whose default file system is not this machine's."""


@pytest.fixture(params=["{}", "file:{}", "file://{}", "hdfs:/{}", ON_SPARKS_DEFAULT])
def place(request: pytest.FixtureRequest, spark: Spark, tmp_path: Path) -> Any:
    """Where a checkpoint is: its URL, and a function that writes a file of it."""
    url = request.param.format(tmp_path / "a b")

    def write(name: str, *lines: str) -> None:
        if url == ON_SPARKS_DEFAULT or url.startswith("hdfs"):
            spark.files[f"{url}/{name}"] = list(lines)
        else:
            (tmp_path / "a b" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "a b" / name).write_text("\n".join(lines))

    return url, write


def test_offsets_are_read_wherever_they_are(place: Any) -> None:
    """One that is no JSON is of another source."""
    url, write = place
    with pytest.raises(UsageError, match="there is no batch 3 in checkpoint"):
        read_offsets(url, 3)
    write("offsets/3", "v1", "{}", '{"a": 1}', "-", "17")
    assert read_offsets(url, 3) == {"0": {"a": 1}, "1": None, "2": 17}
    write("offsets/4", "v2", "{}", "2:17", '0:{"a": 1}', "1:-")
    assert read_offsets(url, 4) == read_offsets(url, 3)
    write("offsets/5", "v3", "{}")
    with pytest.raises(UsageError, match="'v3', and a guard reads v1 and v2"):
        read_offsets(url, 5)


def test_a_bare_path_may_be_on_sparks_default(spark: Spark, tmp_path: Path) -> None:
    """Which is another file system than this machine's where a cluster says so."""
    spark.files[f"{tmp_path}/offsets/0"] = ["v1", "{}", "5"]
    assert read_offsets(str(tmp_path), 0) == {"0": 5}
    with pytest.raises(UsageError, match="there is no batch 0"):
        read_offsets(f"file:{tmp_path}", 0)


def test_a_query_that_keeps_state_is_refused(place: Any) -> None:
    url, write = place
    check_checkpoint(url)
    write("state", "")
    with pytest.raises(UsageError, match="keeps state"):
        check_checkpoint(url)


def test_without_a_checkpoint_there_is_no_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def raise_error() -> None:
        raise PySparkRuntimeError(message="there is no session")

    monkeypatch.setattr(SparkSession, "active", raise_error)
    check_checkpoint(ON_SPARKS_DEFAULT)


def test_the_checkpoint_of_another_query_is_refused(
    spark: Spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is known which query calls."""
    (tmp_path / "metadata").write_text(json.dumps({"id": "mine"}))
    for query, is_refused in ((None, False), ("mine", False), ("another", True)):
        context = SimpleNamespace(getLocalProperty=lambda name, query=query: query)
        monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", context)
        if is_refused:
            with pytest.raises(UsageError, match="is not that of the query that calls the guard"):
                check_checkpoint(str(tmp_path))
        else:
            check_checkpoint(str(tmp_path))
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", None)
    check_checkpoint(str(tmp_path))
    monkeypatch.setattr(pyspark.SparkContext, "_active_spark_context", SimpleNamespace(getLocalProperty=lambda _: None))
    check_checkpoint(str(tmp_path / "without metadata"))
