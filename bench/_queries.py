"""Spark queries into a sink that discards all rows, and their durations."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench._ceiling import Ceiling
from bench._report import ROOT
from sublet.demo.java import find_java_home
from tests.kit import eventually
from tools.source_path import source_path

if TYPE_CHECKING:
    from sublet_borrower.streams.batch import Batch

SLOTS = 2
WAIT_S = 300.0
PARTS = ("latestOffset", "queryPlanning", "walCommit", "addBatch", "commitOffsets")
"""Phases of a micro-batch, by Spark's names."""
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-Xss8m",
    "spark.log.level": "OFF",
    "spark.sql.streaming.numRecentProgressUpdates": "1000",
}


@contextmanager
def spark_session(settings: Mapping[str, str]) -> Iterator[Any]:
    """Yield a Spark session with two slots and Java's best compiler; its workers can import the bench's modules."""
    os.environ["JAVA_HOME"] = str(find_java_home(ROOT / ".cache"))
    os.environ["PYTHONPATH"] = source_path(ROOT)
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master(f"local[{SLOTS},1000]").appName("sublet bench")
    for key, value in {**SETTINGS, **settings}.items():
        builder = builder.config(key, value)
    session = builder.getOrCreate()
    try:
        session.dataSource.register(Ceiling)
        yield session
    finally:
        session.stop()


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch with rows. `began` in seconds; `parts` in milliseconds, with Spark's names."""

    began: float
    rows: int
    parts: Mapping[str, float]

    @property
    def took_ms(self) -> float:
        """Return the duration of the whole micro-batch."""
        return self.parts["triggerExecution"]


def stream_to_end(frame: Any, place: Path) -> tuple[int, float]:
    """Return the rows of all micro-batches but the first, and the seconds from the second's start to the last one's
    end."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=place) as checkpoint:
        query = _sunk(frame, checkpoint).trigger(availableNow=True).start()
        try:
            assert query.awaitTermination(WAIT_S), f"the query has not ended within {WAIT_S:g} s"
        finally:
            query.stop()
        _, *counted = micro_batches(query)
    assert counted, "the query had one micro-batch only: let them be smaller, or give it more rows"
    rows = sum(batch.rows for batch in counted)
    return rows, counted[-1].began + counted[-1].took_ms / 1000 - counted[0].began


def stream_for(frame: Any, place: Path, warm_up: int, counted: int) -> list[MicroBatch]:
    """Return `counted` micro-batches, run without a pause after `warm_up` others."""
    with tempfile.TemporaryDirectory(prefix="checkpoint-", dir=place) as checkpoint:
        query = _sunk(frame, checkpoint).trigger(processingTime="0 seconds").start()
        try:
            eventually(lambda: _ended(query) or len(micro_batches(query)) >= warm_up + counted, WAIT_S, every_s=0.5)
            found = micro_batches(query)
        finally:
            query.stop()
    return found[warm_up : warm_up + counted]


def batch(frame: Any) -> float:
    """Return the seconds of a batch query into the sink."""
    started = time.perf_counter()
    frame.write.format("noop").mode("overwrite").save()
    return time.perf_counter() - started


def micro_batches(query: Any) -> list[MicroBatch]:
    """Return the query's micro-batches that had rows, as far back as Spark keeps them."""
    return [_micro_batch(progress) for progress in query.recentProgress if progress.numInputRows]


def _sunk(frame: Any, checkpoint: str) -> Any:
    return frame.writeStream.format("noop").option("checkpointLocation", checkpoint)


def _ended(query: Any) -> bool:
    if query.isActive:
        return False
    raise RuntimeError("the query has ended by itself") from query.exception()


def _micro_batch(progress: Any) -> MicroBatch:
    began = datetime.fromisoformat(progress.timestamp).timestamp()
    return MicroBatch(began, progress.numInputRows, dict(progress.durationMs))


class Counting:
    """Counts the rows of batches; after the last it writes to a file how many came after the first batch, and in how
    many seconds."""

    def __init__(self, file: Path, rows: int) -> None:
        self._file, self._rows = file, rows
        self._seen = self._first = 0
        self._first_at = 0.0

    @property
    def complete(self) -> bool:
        """Return whether all rows have come."""
        return self._seen >= self._rows

    def __call__(self, batch: Batch) -> None:
        if not self._first:
            self._first, self._first_at = batch.table.num_rows, time.perf_counter()
        self._seen += batch.table.num_rows
        if self.complete:
            making = self._file.with_suffix(".making")
            making.write_text(json.dumps([self._seen - self._first, time.perf_counter() - self._first_at]))
            making.replace(self._file)


def counted(file: Path) -> tuple[int, float]:
    """Wait for the file of a `Counting`, and return its rows and seconds."""
    eventually(file.exists, WAIT_S, "the messages did not all come")
    rows, seconds = json.loads(file.read_text())
    return int(rows), float(seconds)
