"""The data source `format("sublet")`, for reading and writing.

Nothing is loaded here that is not needed for its names: every Spark session imports this.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pyspark.sql.datasource import DataSource

if TYPE_CHECKING:
    from pyspark.sql.datasource import (
        DataSourceArrowWriter,
        DataSourceReader,
        DataSourceStreamArrowWriter,
        DataSourceStreamReader,
    )
    from pyspark.sql.types import StructType


class DefaultSource(DataSource):
    """The data source `sublet`: a group's messages as a stream of rows, history as a table, and rows as messages. The
    options are those of `sublet_borrower.spark.common.source_options`, `.source.batch_options` and `.sink.options`.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name in `format("sublet")`."""
        return "sublet"

    def schema(self) -> StructType:
        """Return all columns; a query that needs few of them selects them with `.schema(...)`."""
        from sublet_borrower.spark.common.source_columns import all_columns

        return all_columns()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a plan."""
        from sublet_borrower.spark.common.source_columns import select_columns
        from sublet_borrower.spark.source.batch_options import batch_options
        from sublet_borrower.spark.source.batch_reader import PushdownBatchReader, SubletBatchReader

        options = batch_options(self.options)
        return (PushdownBatchReader if options.push_down_predicate else SubletBatchReader)(
            options, select_columns(schema)
        )

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 Spark's name
        """Return the reader of a query."""
        from sublet_borrower.spark.common.source_columns import select_columns
        from sublet_borrower.spark.common.source_options import stream_options
        from sublet_borrower.spark.source.stream_reader import SubletStreamReader

        return SubletStreamReader(stream_options(self.options), select_columns(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Return the writer of a batch write."""
        from sublet_borrower.spark.sink.writer import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 Spark's name
        """Return the writer of a streaming query."""
        from sublet_borrower.spark.sink.writer import stream_writer

        return stream_writer(self.options, schema, overwrite)
