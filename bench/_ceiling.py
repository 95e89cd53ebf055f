"""A Spark data source that yields ready Arrow batches: the upper limit of a Python source.

`format("ceiling")` yields the same few Arrow batches again and again, as a stream and as a table. It builds them once
in each process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from sublet_borrower.spark.common.source_columns import all_columns, to_arrow_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

VALUE_BYTES = 100
KEY_BYTES = 8
TOPICS = ("orders/eu/created", "orders/us/created")
ARROW_ROWS = 10_000
"""Rows of a batch: about the best size for Spark."""
STORED = 16
"""Number of different batches: too many for the processor's cache."""
AT_US = 1_767_225_600_000_000


def payload(count: int) -> dict[str, pa.Array]:
    """Return `count` messages, in the columns that a publisher takes."""
    topics = pa.DictionaryArray.from_arrays(pa.array([row % len(TOPICS) for row in range(count)]), pa.array(TOPICS))
    return {
        "topic": topics.cast(pa.string()),
        "key": _random(KEY_BYTES, count),
        "value": _random(VALUE_BYTES, count),
    }


def _random(size: int, count: int) -> pa.Array:
    fixed = pa.Array.from_buffers(pa.binary(size), count, [None, pa.py_buffer(os.urandom(size * count))])
    return fixed.cast(pa.binary())


class Ceiling(DataSource):
    """Data source with the options `rows` in all, `partitions`, and for a stream `batchRows`, the rows of a
    micro-batch."""

    @classmethod
    def name(cls) -> str:
        """Return the name for `format(...)`."""
        return "ceiling"

    def schema(self) -> StructType:
        """Return the schema of sublet's source."""
        return all_columns()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a table."""
        return CeilingReader(int(self.options["rows"]), int(self.options["partitions"]))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 Spark's name
        """Return the reader of a stream."""
        options = self.options
        return CeilingStreamReader(int(options["rows"]), int(options["partitions"]), int(options["batchRows"]))


@dataclass(frozen=True)
class Rows(InputPartition):
    """A task of `count` rows."""

    count: int


class CeilingReader(DataSourceReader):
    """Reads all rows in one batch query."""

    def __init__(self, rows: int, partitions: int) -> None:
        self._rows, self._partitions = rows, partitions

    def partitions(self) -> Sequence[InputPartition]:
        """Return the tasks."""
        return _divided(self._rows, self._partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        return _read(partition)


class CeilingStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads one micro-batch after another."""

    def __init__(self, rows: int, partitions: int, batch_rows: int) -> None:
        self._rows, self._partitions, self._batch_rows = rows, partitions, batch_rows

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802 Spark's name
        """Return the offset before the first row."""
        return {"rows": 0}

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802 Spark's name
        """Return the offset after one more micro-batch."""
        return {"rows": min(start["rows"] + self._batch_rows, self._rows)}

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802 Spark's name
        """Do nothing: the stream ends by itself."""

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the tasks."""
        return _divided(end["rows"] - start["rows"], self._partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a task."""
        return _read(partition)


def _divided(rows: int, partitions: int) -> list[InputPartition]:
    return [Rows(rows * (number + 1) // partitions - rows * number // partitions) for number in range(partitions)]


def _read(partition: InputPartition) -> Iterator[pa.RecordBatch]:
    assert isinstance(partition, Rows)
    left = partition.count
    for batch in cycle(_reconnecting(STORED if left > ARROW_ROWS else 1)):
        if left <= 0:
            return
        yield batch.slice(0, left)
        left -= batch.num_rows


@lru_cache
def _reconnecting(count: int) -> list[pa.RecordBatch]:
    return [_ready(number) for number in range(count)]


def _ready(number: int) -> pa.RecordBatch:
    """Return a batch as sublet reads it from the log."""
    schema = to_arrow_schema(all_columns())
    first = number * ARROW_ROWS
    columns = {
        **payload(ARROW_ROWS),
        "timestamp": pa.array(range(AT_US + first, AT_US + first + ARROW_ROWS), pa.int64()),
        "headers": pa.nulls(ARROW_ROWS),
        "space": pa.repeat("default", ARROW_ROWS),
        "stream": pa.repeat(number, ARROW_ROWS),
        "offset": pa.array(range(first, first + ARROW_ROWS), pa.int64()),
        "epoch": pa.nulls(ARROW_ROWS),
    }
    return pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in schema], schema=schema)
