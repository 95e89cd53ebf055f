"""A batch query without Spark: what Spark calls, in Spark's order, on one side of a process only."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

from pyspark.sql.datasource import Filter, InputPartition

from sublet_borrower.spark.common.source_columns import all_columns
from sublet_borrower.spark.format import DefaultSource
from sublet_borrower.spark.source.range_reader import MultiRangePartition, RangePartition

Row = dict[str, Any]


class Plan:
    """What Spark has of a query when it is planned. `left`: the filters that it is to look at itself."""

    def __init__(self, url: str | None, filters: Sequence[Filter] = (), **options: object) -> None:
        given = {name: str(value) for name, value in options.items()}
        if url is not None:
            given["url"] = url
        if filters:
            given["pushDownPredicate"] = "true"
        self.reader: Any = DefaultSource(given).reader(all_columns())
        self.left: list[Filter] = list(self.reader.pushFilters(list(filters))) if filters else []
        self.tasks: list[InputPartition] = list(self.reader.partitions())

    @property
    def ranges(self) -> list[tuple[int, int, int]]:
        """Return (stream, start, end) of the tasks."""
        return [part for task in self.tasks for part in self.ranges_of(task)]

    def ranges_of(self, task: InputPartition) -> list[tuple[int, int, int]]:
        parts = task.ranges if isinstance(task, MultiRangePartition) else (task,)
        return [(part.stream_id, part.start, part.end) for part in parts if isinstance(part, RangePartition)]

    def rows(self) -> list[Row]:
        """Return the rows that the tasks read, each in an executor that was sent it."""
        reader, tasks = pickle.loads(pickle.dumps((self.reader, self.tasks)))
        return [row for task in tasks for batch in reader.read(task) for row in batch.to_pylist()]

    def values(self) -> list[bytes]:
        return sorted(row["value"] for row in self.rows())


def values(url: str, filters: Sequence[Filter] = (), **options: object) -> list[bytes]:
    return Plan(url, filters, **options).values()
