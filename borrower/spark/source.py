"""`format("sublet")`, to read and to write: what Spark finds, and what it is made of.

Nothing is loaded here that is not needed to say what there is: every Spark session imports this.
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
    """A group's messages as a stream of rows, history as a table, and rows as messages. The options are those of
    `borrower.spark.options`, `.batch_options` and `.sink_options`."""

    @classmethod
    def name(cls) -> str:
        """As in `format("sublet")`."""
        return "sublet"

    def schema(self) -> StructType:
        """All columns there are; a query that needs few of them says so with `.schema(...)`."""
        from borrower.spark.columns import all_columns

        return all_columns()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Of a plan."""
        from borrower.spark.batch_options import batch_options
        from borrower.spark.batch_reader import PushingBatchReader, SubletBatchReader
        from borrower.spark.columns import chosen

        options = batch_options(self.options)
        return (PushingBatchReader if options.push_filters else SubletBatchReader)(options, chosen(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 Spark's name
        """Of a query."""
        from borrower.spark.columns import chosen
        from borrower.spark.options import stream_options
        from borrower.spark.stream_reader import SubletStreamReader

        return SubletStreamReader(stream_options(self.options), chosen(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceArrowWriter:
        """Of a batch write."""
        from borrower.spark.sink import batch_writer

        return batch_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:  # noqa: N802 Spark's name
        """Of a streaming query."""
        from borrower.spark.sink import stream_writer

        return stream_writer(self.options, schema, overwrite)
