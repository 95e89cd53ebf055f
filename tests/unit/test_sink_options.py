"""The options of writing to `format("sublet")`: what is understood, and what is refused by name."""

from __future__ import annotations

import pytest

from sublet_borrower.spark.sink.options import WriteOptions, stream_write_options, write_options
from sublet_protocol.domain.errors import InvalidSetting, InvalidTopic


def test_everything_and_in_any_case() -> None:
    given = {"TOPIC": "a/b", "url": "postgresql://h/d", "space": "eu", "sinkname": "daily", "BatchId": "0"}
    assert write_options(given) == WriteOptions("a/b", "postgresql://h/d", None, "eu", "daily", 0)


def test_what_spark_keeps_among_them_is_passed_over() -> None:
    given = {"checkpointlocation": "/there", "queryname": "q", "dataDir": "/data"}
    assert stream_write_options(given) == WriteOptions(data_dir="/data")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            {"path": "x"},
            "option 'path': write has none of that name. It has: topic, url, dataDir, space, sinkName, bat",
        ),
        ({"checkpointLocation": "x"}, "option 'checkpointLocation': write has none of that name"),
        ({"sinkName": "a"}, "option sinkName without batchId: together they say which batch this is"),
        ({"batchId": "1"}, "option batchId without sinkName"),
        ({"sinkName": "a", "batchId": "-1"}, "option batchId is '-1': it is a whole number from 0 to 46"),
        ({"sinkName": "a" * 600, "batchId": "1"}, "option sinkName: name is"),
        ({"sinkName": "", "batchId": "1"}, "option sinkName is empty"),
        ({"topic": ""}, "option topic is empty"),
        ({"url": "postgresql://x/y", "dataDir": "/z"}, "options url and dataDir: they are two databases"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        write_options(given)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sinkName": "a"}, "option sinkName: a streaming query is known by its own id"),
        ({"batchId": "1"}, "option batchId: a streaming query is known by its own id"),
        ({"asyncProgressTrackingEnabled": "true"}, "option 'asyncProgressTrackingEnabled': writeStream has none of"),
    ],
)
def test_what_a_query_cannot_say(given: dict[str, str], said: str) -> None:
    with pytest.raises(InvalidSetting) as refused:
        stream_write_options(given)
    assert said in str(refused.value)


def test_a_topic_is_one() -> None:
    with pytest.raises(InvalidTopic, match="option topic: "):
        write_options({"topic": "a/#"})
