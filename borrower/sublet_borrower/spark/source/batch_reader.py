"""A batch query's side in Spark's driver: the ranges of streams to read, at one instant.

Spark plans in a process of its own: it makes a reader, perhaps pushes filters, and reads the partitions once. It keeps
them with what `load()` has returned: later actions read the same ranges, unless filters are pushed, when each plan
reads them anew. With filters pushed it mistakes the ranges of one plan for those of another, if both are of the same
`load()` (Spark 4.3): hence they are pushed only where the query has the option.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSourceReader, Filter, InputPartition

from sublet_borrower.spark.common.database_credentials import driver_url, task_address
from sublet_borrower.spark.common.database_reachability import check_database_exists, resolve_database
from sublet_borrower.spark.common.source_columns import to_arrow_schema
from sublet_borrower.spark.source.batch_options import BatchQueryOptions
from sublet_borrower.spark.source.pushdown import NO_FILTERS, split_filters
from sublet_borrower.spark.source.range_reader import RangePartition, plan_tasks, read_task
from sublet_protocol.domain import topics
from sublet_protocol.domain.errors import InvalidEpoch, UnknownSpace
from sublet_storage.db.connect import connect, resolve_schema_name
from sublet_storage.log.message_predicate import MessagePredicate
from sublet_storage.readers.offset_ranges import OffsetRange, list_offset_ranges
from sublet_storage.spaces.space_queries import list_spaces

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

    from sublet_storage.bootstrap.given_or_embedded_database import OpenedDatabase


class SubletBatchReader(DataSourceReader):
    """The reader of a batch query. It has nothing but the query's options, since Spark sends it to the executors."""

    def __init__(self, options: BatchQueryOptions, schema: StructType) -> None:
        self._options, self._schema, self._pushed = options, schema, NO_FILTERS

    def partitions(self) -> list[InputPartition]:
        """Return the tasks. Raise `UnknownSpace`, `InvalidEpoch`, and what `resolve_database` raises."""
        o = self._options
        url = driver_url(o.url, o.data_dir, o.credentials)
        check_database_exists(url, o.data_dir)
        database = resolve_database(url, o.data_dir)
        ranges, number = self._list_ranges(database)
        tasks = [self._make_partition(offset_range, database, number) for offset_range in self._pushed.prune(ranges)]
        return plan_tasks(tasks, o.min_partitions, o.max_partitions)

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Return the messages of a task."""
        return read_task(partition, to_arrow_schema(self._schema))

    def _list_ranges(self, database: OpenedDatabase) -> tuple[list[OffsetRange], int]:
        """Return the ranges, and the number of the timeline they are of."""
        o = self._options
        with connect(database.url, application_name="sublet spark") as conn:
            if o.space is not None:
                _check_space(o.space, {space.name for space in list_spaces(conn, include_dropped=True)})
            there = list_offset_ranges(conn, topics.TopicFilter.parse(o.filter), o.start, o.end)
            number = conn.timeline_number()
        of_space = [offset_range for offset_range in there if o.space in (None, offset_range.space)]
        return of_space if o.epochs is None else keep_ranges_with_epochs(of_space), number

    def _make_partition(self, offset_range: OffsetRange, database: OpenedDatabase, number: int) -> RangePartition:
        return RangePartition(
            stream_id=offset_range.stream_id,
            generation_id=offset_range.generation_id,
            start=offset_range.start,
            end=offset_range.end,
            filter=self._options.filter,
            space=offset_range.space,
            address=task_address(database.url),
            credentials=self._options.credentials,
            schema_name=resolve_schema_name(),
            driver_host=socket.gethostname(),
            fail_on_data_loss=self._options.fail_on_data_loss,
            predicate=self._make_predicate(),
            timeline_number=number,
            data_dir=None if database.data_dir is None else str(database.data_dir),
        )

    def _make_predicate(self) -> MessagePredicate | None:
        pushed = self._pushed
        predicate = MessagePredicate(
            pushed.topics, pushed.prefix, pushed.min_timestamp, pushed.max_timestamp, self._options.epochs
        )
        return None if predicate == MessagePredicate() else predicate


class PushdownBatchReader(SubletBatchReader):
    """A reader with pushed filters. Spark rejects it unless `spark.sql.python.filterPushdown.enabled`."""

    def pushFilters(self, filters: list[Filter]) -> Iterable[Filter]:  # noqa: N802 Spark's name
        """Take what decides over what is read, and return what Spark is to look at itself."""
        self._pushed, left = split_filters(filters)
        return left


def keep_ranges_with_epochs(ranges: Iterable[OffsetRange]) -> list[OffsetRange]:
    """Return those that can have messages in epochs. Raise `InvalidEpoch` where these have no order of before and
    after.
    """
    there = [offset_range for offset_range in ranges if offset_range.epoch_dimensions is not None]
    for offset_range in there:
        if offset_range.epoch_dimensions != 1:
            raise InvalidEpoch(
                f"options startingEpoch and endingEpoch: epochs of space {offset_range.space!r} have "
                f"{offset_range.epoch_dimensions} "
                "numbers, and of two of them neither may come first. Take epochs of one number, or choose the messages "
                "with a `where` on the column epoch."
            )
    return there


def _check_space(name: str, known: set[str]) -> None:
    if name not in known:
        have = ", ".join(sorted(known)) or "none"
        raise UnknownSpace(f"option space is {name!r}: there is no such space. There are: {have}. Correct the name.")
