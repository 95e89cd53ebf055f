"""What rows become when they are written, and which are refused by name."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import ArrayType, StructType

from sublet_borrower.spark.sink.sink_connection import SinkDatabaseAddress
from sublet_borrower.spark.sink.writer import batch_writer, stage_rows, stream_writer
from sublet_protocol.domain.errors import DatabaseUnreachable, InvalidSetting, SchemaMismatch, SubletError
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.spaces.space_changes import create_space
from tests.integration.log_kit import Connection, everything
from tests.integration.sink_kit import SCHEMA, left_staged, numbered, one_write

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
WHEN = datetime(2026, 11, 22, 10, 30, tzinfo=UTC)


def columns(*fields: str) -> StructType:
    """A schema from `name type` each."""
    found = StructType()
    for field in fields:
        name, kind = field.split(" ", 1)
        found.add(name, kind)
    return found


def test_a_message_is_what_the_row_was(database: str, conn: Connection) -> None:
    headers = [("h", b"1"), ("h", None)]
    rows = pa.record_batch(
        {
            "Topic": pa.array(["a/b", None], pa.string()),
            "key": pa.array(["k", None], pa.string()),
            "value": pa.array([b"one", None], pa.binary()),
            "headers": pa.array([headers, None], HEADERS),
            "timestamp": pa.array([WHEN, None], pa.timestamp("us", tz="Europe/Zurich")),
        }
    )
    schema = columns("Topic string", "key string", "value binary", "timestamp timestamp")
    schema.add("headers", ArrayType(columns("key string", "value binary")))
    one_write(database, iter([rows]), schema, topic="else")
    found = {row["topic"]: row for held in everything(conn).values() for row in held}
    one, two = found["a/b"], found["else"]
    assert (one["key"], one["value"], one["timestamp"]) == (b"k", b"one", WHEN)
    assert [(header["key"], header["value"]) for header in one["headers"]] == headers
    assert (two["key"], two["value"], two["headers"], two["epoch"]) == (None, None, None, None)
    assert abs((two["timestamp"] - datetime.now(UTC)).total_seconds()) < 60


@pytest.mark.parametrize(
    ("schema", "given", "said"),
    [
        (("key binary",), {}, "column 'value' is missing: what the messages hold. Columns are: value binary or string"),
        (("value binary",), {}, "there is neither a column 'topic' nor the option topic"),
        (("value integer",), {"topic": "t"}, "column 'value' as int: it is binary or string. Cast it in a `select`"),
        (("value binary", "timestamp date"), {"topic": "t"}, "column 'timestamp' as date: it is timestamp"),
        (("value binary", "headers binary"), {"topic": "t"}, "column 'headers' as binary: it is array<struct<key"),
        (("value binary", "offset long"), {"topic": "t"}, "column 'offset': a message has none. Columns are: value"),
        (("value binary", "epoch long"), {"topic": "t"}, "column 'epoch': epochs are published by a sublet.Publi"),
        (("value binary", "Value binary"), {"topic": "t"}, "column 'Value': it is there twice"),
        (("value binary",), {"topic": "a/#"}, "option topic: "),
    ],
)
def test_columns_that_cannot_be_are_refused_by_name(schema: tuple[str, ...], given: dict[str, str], said: str) -> None:
    for make in (batch_writer, stream_writer):
        with pytest.raises(SubletError) as refused:
            make(given, columns(*schema), False)
        assert said in str(refused.value)


@pytest.mark.parametrize(("make", "remedy"), [(batch_writer, 'Use mode("append")'), (stream_writer, 'or "update"')])
def test_nothing_is_overwritten(make: Any, remedy: str) -> None:
    with pytest.raises(InvalidSetting, match="messages that are published stay, and none is replaced") as refused:
        make({"topic": "t"}, SCHEMA, True)
    assert remedy in str(refused.value)


@pytest.mark.parametrize(
    ("topic", "said"),
    [
        ("$sys", "what begins with \\$ is reserved"),
        ("a/+", "wildcard"),
        ("", "empty"),
        ("eu/1", "topic 'eu/1' belongs to space 'eu', and this publisher is for space 'default'"),
        (None, "a topic in the batch is null"),
    ],
)
def test_a_row_that_cannot_be_a_message_fails_its_task(
    database: str, conn: Connection, topic: str | None, said: str
) -> None:
    create_space(conn, "eu", "eu/#", shards=1)
    rows = pa.record_batch({"topic": pa.array(["t", topic], pa.string()), "value": pa.array([b"1", b"2"])})
    with pytest.raises(SubletError, match=said):
        one_write(database, iter([rows]), columns("topic string", "value binary"), space="default")
    assert not any(everything(conn).values())
    assert left_staged(conn) == 0


def test_what_cannot_be_written_to_is_named(database: str, empty_database: str) -> None:
    too_large = pa.record_batch({"key": pa.nulls(2, pa.binary()), "value": pa.array([b"1", bytes(2 * 1024 * 1024)])})
    with pytest.raises(SubletError, match="message 1 of the batch takes 2097185 bytes and the limit is 1048576"):
        one_write(database, iter([too_large]), topic="t")
    with pytest.raises(SubletError, match="space 'nowhere': there is no such space"):
        one_write(database, iter([numbered(0, 1)]), topic="t", space="nowhere")
    with pytest.raises(SchemaMismatch, match="Run `sublet migrate`"):
        one_write(empty_database, iter([numbered(0, 1)]), topic="t")
    with pytest.raises(DatabaseUnreachable):
        one_write("postgresql://nobody@127.0.0.1:1/none", iter([numbered(0, 1)]), topic="t")


def test_an_embedded_server_is_written_to_where_it_is(server_home: Path) -> None:
    directory = server_home / "data"
    with EmbeddedPostgres(directory) as server:
        migrate(server.url)
        writer = batch_writer({"dataDir": str(directory), "topic": "t"}, SCHEMA, False)
        done = stage_rows(writer.target, writer.options, writer.batch, 0, iter([numbered(0, 10)]))
        writer.commit([done])
        with writer.target.open_connection() as (_, conn):
            assert sum(map(len, everything(conn).values())) == 10
        elsewhere = SinkDatabaseAddress(None, directory, None, "another-machine")
        with pytest.raises(InvalidSetting, match="was given a database that only another-machine can reach"):
            stage_rows(elsewhere, writer.options, writer.batch, 0, iter([numbered(0, 10)]))
