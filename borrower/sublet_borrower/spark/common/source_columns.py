"""The columns of sublet's rows in Spark, and messages as Arrow batches of them.

Those that Spark's Kafka source has too are called and typed as there. With `.schema(...)` a query takes only some of
them, and what it does not take is not converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from sublet_protocol.domain.errors import InvalidSetting

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

COLUMNS = (
    "key binary, value binary, topic string, timestamp timestamp, headers array<struct<key string, value binary>>,"
    " space string, stream bigint, offset bigint, epoch array<bigint>"
)
"""The schema as text; all columns are nullable, as in Spark."""

NEVER_NULL = ("topic", "timestamp", "space", "stream", "offset")

FEW_ROWS = 2048
"""Batches with fewer rows on average are put together: for Spark each costs as much as some hundred rows."""


def all_columns() -> StructType:
    """Return the schema with every column. (Spark reads DDL with a JVM, which a source's process has not.)"""
    from pyspark.sql import types

    header = types.StructType().add("key", types.StringType()).add("value", types.BinaryType())
    return (
        types.StructType()
        .add("key", types.BinaryType())
        .add("value", types.BinaryType())
        .add("topic", types.StringType())
        .add("timestamp", types.TimestampType())
        .add("headers", types.ArrayType(header))
        .add("space", types.StringType())
        .add("stream", types.LongType())
        .add("offset", types.LongType())
        .add("epoch", types.ArrayType(types.LongType()))
    )


def select_columns(schema: StructType) -> StructType:
    """Return the schema that a user gave, if all its columns are sublet's. Raise `InvalidSetting`."""
    known = {field.name: field.dataType for field in all_columns()}
    if twice := {name for name in schema.names if schema.names.count(name) > 1}:
        raise InvalidSetting(f"column {min(twice)!r}: it is there twice. Name it once, and copy it in a `select`.")
    for field in schema:
        if field.name not in known:
            raise InvalidSetting(f"column {field.name!r}: there is none. There are: {COLUMNS}. Leave it out.")
        if field.dataType != known[field.name]:
            column_type = known[field.name].simpleString()
            raise InvalidSetting(
                f"column {field.name!r} as {field.dataType.simpleString()}: it is {column_type}. Take it as that, and "
                "cast it in a `select`."
            )
        if not field.nullable and field.name not in NEVER_NULL:
            raise InvalidSetting(
                f"column {field.name!r} as not null: messages without it have null there. Leave out `not null`."
            )
    if not len(schema):
        raise InvalidSetting(f"a schema without columns. There are: {COLUMNS}. Name at least one.")
    return schema


def to_arrow_schema(schema: StructType) -> pa.Schema:
    """Return the schema that Spark expects of each batch, exactly."""
    from pyspark.sql.pandas.types import to_arrow_schema

    arrow_schema: pa.Schema = to_arrow_schema(schema, timezone="UTC")
    return arrow_schema


def to_output_batches(batches: Iterable[pa.RecordBatch], space: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the messages of one space in the columns of the schema; batches of few rows together."""
    import pyarrow as pa

    input_batches = list(batches)
    if len(input_batches) > 1 and sum(batch.num_rows for batch in input_batches) < FEW_ROWS * len(input_batches):
        input_batches = pa.Table.from_batches(input_batches).combine_chunks().to_batches()
    for batch in input_batches:
        if batch.num_rows:
            columns = [_make_column(batch, field, space) for field in schema]
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


def _make_column(batch: pa.RecordBatch, field: Any, space: str) -> Any:
    import pyarrow as pa

    if field.name == "space":
        return pa.repeat(pa.scalar(space, field.type), batch.num_rows)
    column = batch.column(field.name)
    return column if column.type == field.type else column.cast(field.type)
