"""Spark's writes in small: the calls that it makes of a writer, in its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
from pyspark.sql.types import StructType

from sublet_borrower.spark.sink.writer import (
    SinkBatchWriter,
    SinkStreamWriter,
    StagedTaskMessage,
    batch_writer,
    stage_rows,
    stream_writer,
)
from sublet_storage.producer.sink_staging import SinkBatchId
from tests.integration.log_kit import Connection, by_key

KEYS = 7
SCHEMA = StructType().add("key", "binary").add("value", "binary")


def columns(*fields: str) -> StructType:
    """A schema from `name type` each."""
    found = StructType()
    for field in fields:
        name, kind = field.split(" ", 1)
        found.add(name, kind)
    return found


def numbered(first: int, count: int) -> pa.RecordBatch:
    """Rows of consecutive numbers under `KEYS` keys."""
    numbers = range(first, first + count)
    keys = pa.array([b"k%d" % (number % KEYS) for number in numbers], pa.binary())
    return pa.record_batch({"key": keys, "value": pa.array([b"%d" % number for number in numbers], pa.binary())})


class Query:
    """One process of a streaming query. Several of one name are what a restart makes, or a zombie."""

    def __init__(self, url: str, name: str = "query 1", schema: StructType = SCHEMA, **options: str) -> None:
        self._given = {"url": url, "topic": "t", "checkpointlocation": "there", **options}
        self._name, self._schema = name, schema

    def write(self, batch: int, *tasks: Sequence[pa.RecordBatch]) -> list[StagedTaskMessage]:
        """Each task of the micro-batch once."""
        return [self.task(batch, number, rows) for number, rows in enumerate(tasks)]

    def task(self, batch: int, number: int, rows: Sequence[pa.RecordBatch]) -> StagedTaskMessage:
        """One attempt at a task."""
        writer = self._writer()
        return stage_rows(writer.target, writer.options, SinkBatchId(self._name, batch), number, iter(rows))

    def commit(self, done: Sequence[StagedTaskMessage | None], batch: int) -> None:
        """Commit as Spark does, by a new writer."""
        self._writer().commit(done, batch)

    def abort(self, done: Sequence[StagedTaskMessage | None], batch: int) -> None:
        self._writer().abort(done, batch)

    def _writer(self) -> SinkStreamWriter:
        return stream_writer(self._given, self._schema, overwrite=False)


def one_write(url: str, rows: Iterator[pa.RecordBatch], schema: StructType = SCHEMA, **options: str) -> SinkBatchWriter:
    """A batch write of one task, whose commit comes next."""
    writer = batch_writer({"url": url, **options}, schema, overwrite=False)
    done = stage_rows(writer.target, writer.options, writer.batch, 0, rows)
    writer.commit([done])
    return writer


def stored(conn: Connection) -> list[int]:
    """Return all published numbers, with repeats; assert that those of a key are in order."""
    found = {key: [int(value) for value in values] for key, values in by_key(conn).items()}
    for key, numbers in found.items():
        assert numbers == sorted(numbers), key
    return sorted(number for numbers in found.values() for number in numbers)


def left_staged(conn: Connection) -> int:
    """Blocks that nobody has published or removed."""
    row = conn.execute("select count(*) from staged_block").fetchone()
    assert row is not None
    return int(row[0])
