"""What Spark's sink is given: columns and modes that it takes, and those that it refuses by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pyspark
import pytest

from sublet_borrower.spark.sink.writer import batch_writer, stream_writer
from sublet_protocol.domain.errors import InvalidSetting, SubletError
from tests.integration.sink_kit import SCHEMA, columns

URL = {"url": "postgresql://ann@host/db"}


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


@pytest.mark.parametrize("make", [batch_writer, stream_writer])
def test_a_topic_is_a_column_or_an_option(make: Any) -> None:
    """Or both, of which the column comes first."""
    for schema, given in (
        (("topic string", "value binary"), {}),
        (("value string",), {"topic": "t"}),
        (("TOPIC string", "value binary", "key string"), {"topic": "t"}),
    ):
        make({**URL, **given}, columns(*schema), False)


@pytest.mark.parametrize("make", [batch_writer, stream_writer])
@pytest.mark.parametrize("schema", [None, "other"])
def test_a_task_has_the_drivers_schema(monkeypatch: pytest.MonkeyPatch, make: Any, schema: str | None) -> None:
    """Also the default: its worker may have had a job with another."""
    monkeypatch.setenv("SUBLET_SCHEMA", schema or "")
    assert make({**URL, "topic": "t"}, SCHEMA, False).target.schema_name == (schema or "sublet")


@pytest.mark.parametrize("missing", ["sql.streaming.queryId", "streaming.sql.batchId"])
def test_a_batch_without_its_query_is_refused(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """It could not be stored once."""
    known = {"sql.streaming.queryId": "q", "streaming.sql.batchId": "1", missing: None}
    context = SimpleNamespace(getLocalProperty=known.get, partitionId=lambda: 0)
    monkeypatch.setattr(pyspark.TaskContext, "get", lambda: context)
    with pytest.raises(InvalidSetting, match="do not have the id of their query"):
        stream_writer({**URL, "topic": "t"}, SCHEMA, False).write(iter(()))
