"""The columns that the sink accepts, and rows as Arrow batches of messages."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sublet_protocol.domain.errors import InvalidSetting

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

_TYPES = {
    "value": ("binary", "string"),
    "key": ("binary", "string"),
    "topic": ("string",),
    "headers": ("array<struct<key:string,value:binary>>",),
    "timestamp": ("timestamp",),
}
COLUMNS = "; ".join(f"{name} {' or '.join(types)}" for name, types in _TYPES.items())
"""The columns as text; all are nullable except the topic, and only value is required."""


def check_columns(schema: StructType, topic: str | None) -> None:
    """Raise `InvalidSetting` for the first column that cannot be written, or that is missing. `topic`: the option."""
    names: set[str] = set()
    for field in schema:
        name, kind = field.name.lower(), field.dataType.simpleString()
        _check_known(field.name, name)
        if name in names:
            raise InvalidSetting(f"column {field.name!r}: it is there twice. Drop one, or call it otherwise.")
        if kind not in _TYPES[name]:
            allowed_types = " or ".join(_TYPES[name])
            raise InvalidSetting(f"column {field.name!r} as {kind}: it is {allowed_types}. Cast it in a `select`.")
        names.add(name)
    if "value" not in names:
        raise InvalidSetting(f"column 'value' is missing: what the messages hold. Columns are: {COLUMNS}. Select it.")
    if "topic" not in names and topic is None:
        raise InvalidSetting(
            "there is neither a column 'topic' nor the option topic: each message needs one. Give one of them."
        )


def to_message_batches(batch: pa.RecordBatch, topic: str | None) -> list[pa.RecordBatch]:
    """Return the rows in `BLOCK_SCHEMA`, none empty; `topic` is that of rows without one. Raise `UsageError` for a row
    that cannot be a message.
    """
    import pyarrow as pa

    from sublet_storage.producer.batches.input_conversion import check_sizes, to_record_batches
    from sublet_storage.producer.publisher import MAX_MESSAGE_BYTES

    columns: dict[str, Any] = {
        name.lower(): column for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    if topic is not None:
        default = pa.scalar(topic, pa.string())
        topics = columns.get("topic")
        columns["topic"] = (
            pa.repeat(default, batch.num_rows) if topics is None else topics.cast(pa.string()).fill_null(default)
        )
    message_batches = to_record_batches(pa.table(columns))
    for each in message_batches:
        check_sizes(each, MAX_MESSAGE_BYTES)
    return message_batches


def _check_known(shown: str, name: str) -> None:
    if name == "epoch":
        raise InvalidSetting(
            f"column {shown!r}: epochs are published by a sublet.Publisher, which holds them open until it is done. "
            "Drop the column."
        )
    if name not in _TYPES:
        raise InvalidSetting(f"column {shown!r}: a message has none. Columns are: {COLUMNS}. Drop it.")
