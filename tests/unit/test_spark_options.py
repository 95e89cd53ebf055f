"""The options of `format("sublet")` for a stream, a batch and a sink: understood, or refused by name."""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa
import pytest
from pyspark.sql.types import LongType, StructField, StructType

from sublet_borrower.spark.common.source_columns import FEW_ROWS, all_columns, select_columns, to_output_batches
from sublet_borrower.spark.common.source_options import StreamingQueryOptions, stream_options
from sublet_borrower.spark.sink.options import WriteOptions, stream_write_options, write_options
from sublet_borrower.spark.source.batch_options import BatchQueryOptions, batch_options
from sublet_protocol.domain.errors import InvalidFilter, InvalidSetting, InvalidSubscription, InvalidTopic
from sublet_protocol.domain.limits import MAX_EPOCH, MIN_EPOCH
from sublet_protocol.domain.subscriptions import StartingPosition

LEAST = {"subscription": "$share/g/#", "sessionName": "etl"}
TIME = "2026-11-21T10:00:00Z"


def test_the_least_of_options() -> None:
    assert stream_options(LEAST) == StreamingQueryOptions("$share/g/#", "etl")
    options = batch_options({})
    assert options == BatchQueryOptions()
    assert (options.start, options.end, options.epochs) == (StartingPosition.EARLIEST, StartingPosition.LATEST, None)


@pytest.mark.parametrize("weight", ["0.001", "10000"])
def test_the_least_and_the_greatest_weight_are_taken(weight: str) -> None:
    assert stream_options({**LEAST, "weight": weight}).weight == float(weight)


def test_everything_of_a_stream_in_any_case() -> None:
    given = {
        "SUBSCRIPTION": "$queue/q/a",
        "sessionname": "etl",
        "url": "postgresql://here/db",
        "Nodes": "a:1, b:2",
        "startingposition": "offset:3",
        "weight": "2.5",
        "maxOffsetsPerTrigger": "10",
        "maxBytesPerTrigger": "20",
        "minPartitions": "4",
        "maxPartitions": "8",
        "wholeEpochs": "true",
        "inDoubtTimeout": "5 minutes",
        "onRangeLost": "fail",
        "failOnDataLoss": "FALSE",
        "availableNowWait": "1m",
    }
    where = "$queue/q/a", "etl", "postgresql://here/db", None, ("a:1", "b:2"), "offset:3"
    assert stream_options(given) == StreamingQueryOptions(*where, 2.5, 10, 20, 4, 8, True, 300.0, "fail", False, 60.0)


def test_everything_of_a_batch_in_any_case() -> None:
    given = {
        "FILTER": "orders/#",
        "url": "postgresql://here/db",
        "space": "eu",
        "startingposition": TIME,
        "endingPosition": "offset:7",
        "startingEpoch": "-3",
        "endingEpoch": "12",
        "minpartitions": "4",
        "maxPartitions": "8",
        "failOnDataLoss": "False",
        "pushDownPredicate": "true",
    }
    options = batch_options(given)
    expected = BatchQueryOptions(
        "orders/#", "postgresql://here/db", None, "eu", TIME, "offset:7", -3, 12, 4, 8, False, True
    )
    assert options == expected
    assert (str(options.start), options.end, options.epochs) == (TIME, StartingPosition.at_offset(7), (-3, 12))


def test_everything_of_a_sink_in_any_case() -> None:
    given = {"TOPIC": "a/b", "url": "postgresql://h/d", "space": "eu", "sinkname": "daily", "BatchId": "0"}
    assert write_options(given) == WriteOptions("a/b", "postgresql://h/d", None, "eu", "daily", 0)
    assert write_options({**given, "BatchId": str(2**53)}).batch_id == 2**53, "the greatest number"


def test_a_sink_passes_over_options_of_spark() -> None:
    given = {"checkpointlocation": "/there", "queryname": "q", "dataDir": "/data"}
    assert stream_write_options(given) == WriteOptions(data_dir="/data")


def test_epochs_without_one_end_go_on() -> None:
    assert batch_options({"startingEpoch": "5"}).epochs == (5, MAX_EPOCH + 1)
    assert batch_options({"endingEpoch": "5"}).epochs == (MIN_EPOCH, 5)
    both = {"startingEpoch": str(MIN_EPOCH), "endingEpoch": str(MAX_EPOCH)}
    assert batch_options(both).epochs == (MIN_EPOCH, MAX_EPOCH)


def test_the_end_may_be_just_behind_the_beginning() -> None:
    options = batch_options({"startingPosition": "offset:6", "endingPosition": "offset:7"})
    assert (options.start, options.end) == (StartingPosition.at_offset(6), StartingPosition.at_offset(7))


@pytest.mark.parametrize("given", [{"minPartitions": "4"}, {"maxPartitions": "4"}])
def test_one_number_of_partitions_is_enough(given: dict[str, str]) -> None:
    options = batch_options(given)
    assert {options.min_partitions, options.max_partitions} == {None, 4}
    same = batch_options({"minPartitions": "4", "maxPartitions": "4"})
    assert (same.min_partitions, same.max_partitions) == (4, 4)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("0", 0), ("90", 90), ("90 s", 90), ("1.5 minutes", 90), ("2m", 120)],
        *[("1 hour", 3600), ("250ms", 0.25), ("7d", 604800)],
    ],
)
def test_times(text: str, seconds: float) -> None:
    assert stream_options({**LEAST, "availableNowWait": text}).available_now_wait == seconds


def test_nothing_is_in_doubt_for_more_than_a_day() -> None:
    """Nodes take no more: a query would never begin a batch."""
    assert stream_options({**LEAST, "inDoubtTimeout": "1 day"}).in_doubt_timeout == 86400
    with pytest.raises(InvalidSetting, match="option inDoubtTimeout is 86401 s: it is at most 86400 s, a day"):
        stream_options({**LEAST, "inDoubtTimeout": "86401"})


@pytest.mark.parametrize(
    ("names", "reported"),
    [
        (["value", "value"], "column 'value': it is there twice"),
        (["offset", "value not null"], "column 'value' as not null: messages without it have null there"),
    ],
)
def test_columns_that_spark_could_not_read(names: list[str], reported: str) -> None:
    """It would fail by an error of Java's, or count rows that are not there."""
    known = {field.name: field.dataType for field in all_columns()}
    schema = StructType([StructField(name.split()[0], known[name.split()[0]], " " not in name) for name in names])
    with pytest.raises(InvalidSetting, match=reported):
        select_columns(schema)


def test_only_known_columns_are_read() -> None:
    """All of them as they are, and at least one."""
    assert select_columns(all_columns()) == all_columns()
    for schema, reported in (
        (StructType([StructField("price", LongType())]), "column 'price': there is none. There are: "),
        (StructType([StructField("value", LongType())]), "column 'value' as bigint: it is binary. Take it as that"),
        (StructType([]), "a schema without columns. There are: "),
    ):
        with pytest.raises(InvalidSetting, match=reported):
            select_columns(schema)


def test_small_batches_are_put_together() -> None:
    """And large ones are left as they are; each has the space's name."""

    def sizes(*counts: int) -> list[int]:
        batches = [pa.record_batch({"offset": pa.array(range(count), pa.int64())}) for count in counts]
        schema = pa.schema([("offset", pa.int64()), ("space", pa.string())])
        found = list(to_output_batches(batches, "eu", schema))
        assert {space for batch in found for space in batch.column("space").to_pylist()} <= {"eu"}
        assert sum(batch.num_rows for batch in found) == sum(counts)
        return [batch.num_rows for batch in found]

    assert sizes(1, 2, 3) == [6]
    assert sizes(FEW_ROWS - 1, FEW_ROWS) == [2 * FEW_ROWS - 1]
    assert sizes(FEW_ROWS, FEW_ROWS) == [FEW_ROWS, FEW_ROWS]
    assert (sizes(5), sizes(0), sizes()) == ([5], [], [])


def test_a_column_without_nulls_may_be_not_null() -> None:
    schema = StructType([StructField("offset", LongType(), nullable=False)])
    assert select_columns(schema) == schema


@pytest.mark.parametrize("missing", LEAST)
def test_what_must_be_there_is_asked_for(missing: str) -> None:
    with pytest.raises(InvalidSetting, match=f"option {missing} is missing. Give"):
        stream_options({name: value for name, value in LEAST.items() if name != missing})


STREAM: list[tuple[dict[str, str], str]] = [
    ({"linger.ms": "5"}, "option 'linger.ms': readStream has none of that name. It has: subscription, "),
    ({"kafka.bootstrap.servers": "x"}, "option 'kafka.bootstrap.servers' is one of Spark's Kafka source: readStream"),
    ({"startingOffsets": "earliest"}, "Kafka source: readStream has startingPosition."),
    ({"subscribe": "orders"}, "Kafka source: readStream has subscription."),
    ({"endingOffsets": "latest"}, "option 'endingOffsets': readStream has none of that name."),
    ({"maxOffsetsPerTrigger": "0"}, "option maxOffsetsPerTrigger is '0': it is a whole number from 1 to 46"),
    ({"maxOffsetsPerTrigger": "9" * 5000}, "9999': it is a whole number from 1 to 46"),
    ({"maxOffsetsPerTrigger": "ten"}, "option maxOffsetsPerTrigger is 'ten'"),
    ({"maxBytesPerTrigger": "-1"}, "option maxBytesPerTrigger is '-1'"),
    ({"minPartitions": "1.5"}, "option minPartitions is '1.5'"),
    ({"minPartitions": "²"}, "option minPartitions is '²'"),
    ({"maxPartitions": "0"}, "option maxPartitions is '0': it is a whole number from 1 to 46"),
    ({"minPartitions": "4", "maxPartitions": "3"}, "minPartitions 4 and maxPartitions 3: no number"),
    ({"inDoubtTimeout": "soon"}, "option inDoubtTimeout is 'soon': it is a time, such as 90"),
    ({"inDoubtTimeout": "5 fortnights"}, "option inDoubtTimeout is '5 fortnights'"),
    ({"inDoubtTimeout": "-5"}, "option inDoubtTimeout is '-5'"),
    ({"onRangeLost": "read"}, "option onRangeLost is 'read': it is drop or fail"),
    ({"failOnDataLoss": "maybe"}, "option failOnDataLoss is 'maybe': it is true or false"),
    ({"weight": "heavy"}, "option weight is 'heavy'"),
    ({"weight": "0"}, "weight is 0.0: it must be from 0.001"),
    ({"weight": "10000.1"}, "weight is 10000.1: it must be from 0.001 to 10000."),
    ({"startingPosition": "first"}, "start"),
    ({"nodes": "here"}, "node 'here': a leader node's address is HOST:PORT"),
    ({"sessionName": ""}, "option sessionName is empty"),
    ({"sessionName": "x" * 600}, "option sessionName: name is"),
    ({"url": "postgresql://x/y", "dataDir": "/z"}, "options url and dataDir: they are two databases"),
]
BATCH: list[tuple[dict[str, str], str]] = [
    ({"path": "x"}, "option 'path': read has none of that name. It has: filter, url"),
    ({"subscription": "$share/g/#"}, "option subscription: it is readStream's. History is read without a group. Gi"),
    ({"SessionName": "a"}, "option sessionName: it is readStream's. History is read without a group. Leave it out"),
    ({"maxoffsetspertrigger": "5"}, "endingPosition says how far to read"),
    ({"nodes": "here:1"}, "option nodes: it is readStream's"),
    ({"startingPosition": "latest"}, "option startingPosition is 'latest': it is earliest, a time with its zone"),
    ({"startingPosition": "2026-11-21"}, "option startingPosition is '2026-11-21'"),
    ({"startingPosition": "offset:-1"}, "option startingPosition is 'offset:-1'"),
    ({"endingPosition": "earliest"}, "option endingPosition is 'earliest': it is latest, a time with its zone"),
    ({"startingPosition": "offset:5", "endingPosition": "offset:5"}, "nothing lies between them"),
    ({"startingPosition": TIME, "endingPosition": "2026-11-21T10:30:00+01:00"}, "nothing lies between them"),
    ({"endingEpoch": "3", "startingEpoch": "3"}, "options startingEpoch 3 and endingEpoch 3: nothing lies between"),
    ({"startingEpoch": "1.5"}, "option startingEpoch is '1.5': it is an epoch of one number"),
    ({"endingEpoch": str(2**64)}, f"option endingEpoch is '{2**64}'"),
    ({"minPartitions": "0"}, "option minPartitions is '0': it is a whole number from 1 to 46"),
    ({"minPartitions": "4", "maxPartitions": "3"}, "minPartitions 4 and maxPartitions 3: no number"),
    ({"subscribePattern": "o.*"}, "option 'subscribePattern' is one of Spark's Kafka source: read has filter."),
    ({"endingTimestamp": "5"}, "Kafka source: read has endingPosition."),
    ({"pushDownPredicate": "all"}, "option pushDownPredicate is 'all': it is true or false"),
    ({"space": ""}, "option space is empty"),
    ({"url": "postgresql://x/y", "dataDir": "/z"}, "options url and dataDir: they are two databases"),
]
SINK: list[tuple[dict[str, str], str]] = [
    ({"path": "x"}, "option 'path': write has none of that name. It has: topic, url, dataDir, space, sinkName, bat"),
    ({"checkpointLocation": "x"}, "option 'checkpointLocation': write has none of that name"),
    ({"sinkName": "a"}, "option sinkName without batchId: together they say which batch this is"),
    ({"batchId": "1"}, "option batchId without sinkName"),
    ({"sinkName": "a", "batchId": "-1"}, "option batchId is '-1': it is a whole number from 0 to 46"),
    ({"sinkName": "a", "batchId": str(2**53 + 1)}, f"option batchId is {2**53 + 1}: it is at most {2**53}"),
    ({"sinkName": "a" * 600, "batchId": "1"}, "option sinkName: name is"),
    ({"sinkName": "", "batchId": "1"}, "option sinkName is empty"),
    ({"topic": ""}, "option topic is empty"),
    ({"url": "postgresql://x/y", "dataDir": "/z"}, "options url and dataDir: they are two databases"),
]
STREAMING_SINK: list[tuple[dict[str, str], str]] = [
    ({"sinkName": "a"}, "option sinkName: a streaming query is known by its own id"),
    ({"batchId": "1"}, "option batchId: a streaming query is known by its own id"),
    ({"asyncProgressTrackingEnabled": "true"}, "option 'asyncProgressTrackingEnabled': writeStream has none of"),
]


def stream(given: dict[str, str]) -> StreamingQueryOptions:
    return stream_options({**LEAST, **given})


@pytest.mark.parametrize(
    ("take", "given", "said"),
    [
        *((stream, *row) for row in STREAM),
        *((batch_options, *row) for row in BATCH),
        *((write_options, *row) for row in SINK),
        *((stream_write_options, *row) for row in STREAMING_SINK),
    ],
)
def test_options_are_refused_by_name(
    take: Callable[[dict[str, str]], object], given: dict[str, str], said: str
) -> None:
    with pytest.raises(InvalidSetting) as refused:
        take(given)
    assert said in str(refused.value)


def test_names_of_the_log_are_checked() -> None:
    with pytest.raises(InvalidSubscription):
        stream_options({**LEAST, "subscription": "orders"})
    with pytest.raises(InvalidFilter, match="filter 'a#'"):
        batch_options({"filter": "a#"})
    with pytest.raises(InvalidTopic, match="option topic: "):
        write_options({"topic": "a/#"})
