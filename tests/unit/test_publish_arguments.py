"""What a user gives to publish, and to make a publisher: taken, or refused by name with value, rule and a hint."""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from typing import Any

import numpy as np
import pandas as pd  # type: ignore[import-untyped]
import pyarrow as pa
import pytest

from sublet_protocol.domain.errors import InvalidEpoch, InvalidSetting, InvalidTopic, UsageError, ValueTooLarge
from sublet_protocol.domain.limits import MAX_DIMENSIONS
from sublet_storage.log.arrow_batch_decoder import FIRST_US, LAST_US
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.producer import Publisher
from sublet_storage.producer.arguments import check_duration, check_int, check_producer_name
from sublet_storage.producer.batches.input_conversion import (
    as_bytes,
    as_headers,
    as_timestamp_us,
    check_sizes,
    size_of,
    to_record_batches,
)
from tests.kit import same_name

WEST = timezone(timedelta(hours=-12))
NAIVE = datetime(2020, 1, 1)  # noqa: DTZ001 - that is what is refused
HEADERS = BLOCK_SCHEMA.field("headers").type
MISNAMED = pa.array([[{"data": b"1", "key": "trace"}]])
LIST_VIEWS = pa.ListViewArray.from_arrays([0], [1], pa.array([{"key": "a", "value": b"x"}], HEADERS.value_type))
EAST = timezone(timedelta(hours=12))


class Nowhere(tzinfo):
    """A zone that does not say how far it is."""

    def utcoffset(self, at: datetime | None) -> None:
        return None

    dst = tzname = utcoffset


def text_of(held: bytes) -> pa.Array:
    """A text column of one row with these bytes, true UTF-8 or not."""
    ends = pa.py_buffer(np.array([0, len(held)], np.int32).tobytes())
    return pa.StringArray.from_buffers(1, ends, pa.py_buffer(held))


@pytest.mark.parametrize(
    ("given", "micros"),
    [(5, 5), (np.int64(5), 5), (np.uint8(5), 5), (datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC), 1_000_000)],
)
def test_a_timestamp_is_a_number_or_aware_datetime(given: Any, micros: int) -> None:
    taken = as_timestamp_us(given)
    assert (taken, type(taken)) == (micros, int)


def test_the_first_and_the_last_time_are_taken() -> None:
    assert [as_timestamp_us(each) for each in (FIRST_US, LAST_US)] == [FIRST_US, LAST_US]
    assert as_timestamp_us(None) > 0, "now"
    for wrong in (FIRST_US - 1, LAST_US + 1):
        with pytest.raises(UsageError, match="outside of the years 1 to 9999"):
            as_timestamp_us(wrong)


def test_a_message_is_as_large_as_the_limit() -> None:
    (batch,) = to_record_batches({"topic": "t", "key": "k", "value": [b"", b"x" * 100], "headers": {"a": b"x"}})
    limit = size_of("t", b"k", b"x" * 100, [("a", b"x")])
    check_sizes(batch, limit)
    with pytest.raises(ValueTooLarge, match=f"message 1 of the batch takes {limit} bytes and the limit is {limit - 1}"):
        check_sizes(batch, limit - 1)


@pytest.mark.parametrize("given", [{"a": b"x"}, [("a", "x")], (("a", b"x"),), iter([["a", b"x"]]), None, {}, [], ()])
def test_headers_are_a_mapping_or_pairs(given: Any) -> None:
    expected = [("a", b"x")] if given else None
    assert as_headers(given) == expected


@pytest.mark.parametrize(
    ("take", "given", "reported"),
    [
        (as_timestamp_us, True, "timestamp True of type bool: neither a datetime nor a whole number. Give"),
        (as_timestamp_us, np.True_, "neither a datetime nor a whole number"),
        (as_timestamp_us, "2020", "timestamp '2020' of type str"),
        (as_timestamp_us, 1.5, "timestamp 1.5 of type float"),
        (as_timestamp_us, 2**80, "outside of the years 1 to 9999"),
        (as_timestamp_us, np.int64(2**62), "outside of the years 1 to 9999"),
        (as_timestamp_us, datetime.max.replace(tzinfo=WEST), "outside of the years 1 to 9999"),
        (as_timestamp_us, datetime.min.replace(tzinfo=EAST), "outside of the years 1 to 9999"),
        (as_timestamp_us, NAIVE, "has no time zone. Give an aware datetime"),
        (as_timestamp_us, datetime(2020, 1, 1, tzinfo=Nowhere()), "has no time zone"),
        (as_headers, 5, "headers 5: headers are names with bytes, text or None each. Give a mapping"),
        (as_headers, 0, "headers 0:"),
        (as_headers, "ab", "headers 'ab':"),
        (as_headers, [("a",)], "header ('a',): headers are names with bytes"),
        (as_headers, ["ab"], "header 'ab':"),
        (as_headers, [5], "header 5:"),
        (as_headers, {"a": 5}, "header 'a' of type int: give bytes or text"),
        (as_headers, {5: b"x"}, "header name 5: a name is text, not int. Give a str."),
        (as_headers, {"a\ud800": b"x"}, "header name 'a\\ud800' holds a lone surrogate"),
        (as_headers, {"a": "\ud800"}, "header 'a' '\\ud800' holds a lone surrogate"),
    ],
    ids=same_name,
)
def test_what_is_no_timestamp_or_header_is_refused(take: Callable[[Any], object], given: Any, reported: str) -> None:
    with pytest.raises(UsageError) as refusal:
        take(given)
    assert reported in str(refusal.value)


@pytest.mark.parametrize("topic", [None, 5, b"a", ["a"]])
def test_a_topic_that_is_not_text_is_refused(topic: Any) -> None:
    with pytest.raises(InvalidTopic, match=r"a topic is text, not \w+\. Give a str\.$"):
        size_of(topic, None, b"x", None)


@pytest.mark.parametrize("given", [5, 1.5, True, ["x"], {"x": 1}, np.zeros(2)])
def test_a_value_is_bytes_or_text(given: Any) -> None:
    with pytest.raises(UsageError, match=r"value of type .*: give bytes or text"):
        as_bytes("value", given)
    good = (None, b"x", "x", bytearray(b"x"), memoryview(b"x"))
    assert [as_bytes("value", each) for each in good] == [None, *[b"x"] * 4]


def test_headers_below_a_null_are_nobodys() -> None:
    """A column that is masked has such."""
    pairs = pa.array([{"key": "a", "value": b"x"}] * 2, HEADERS.value_type)
    masked = pa.ListArray.from_arrays(
        pa.array([0, 1, 2], pa.int32()), pairs, type=HEADERS, mask=pa.array([True, False])
    )
    (batch,) = to_record_batches({"topic": "a", "value": [b"x", b"y"], "headers": masked})
    assert batch.column("headers").to_pylist() == [None, [{"key": "a", "value": b"x"}]]


@pytest.mark.parametrize("headers", [[{"a": b"x"}, [("a", "x")]], {"a": b"x"}])
def test_columns_become_batches_of_one_schema(headers: Any) -> None:
    (batch,) = to_record_batches({"topic": "a", "key": "k", "value": [b"x", "y"], "headers": headers, "timestamp": 5})
    assert batch.schema == BLOCK_SCHEMA
    assert batch.column("key").to_pylist() == [b"k", b"k"]
    assert batch.column("headers").to_pylist() == [[{"key": "a", "value": b"x"}]] * 2


GOOD: dict[str, Any] = {"topic": "a", "value": [b"x"]}


@pytest.mark.parametrize(
    ("changes", "error", "reported"),
    [
        ({"topic": text_of(b"\xff")}, InvalidTopic, "column topic of type string: In chunk 0: Invalid: Invalid UTF8"),
        ({"topic": pa.array([b"\xff"])}, InvalidTopic, "column topic of type binary"),
        ({"topic": 5}, InvalidTopic, "column topic given as int"),
        ({"topic": [5]}, InvalidTopic, "column topic: "),
        ({"topic": "a\ud800"}, InvalidTopic, "column topic: 'a\\ud800' holds a lone surrogate"),
        ({"value": np.array([1, 2])}, UsageError, "column value given as ndarray: "),
        ({"value": [5]}, UsageError, "Give a list or an Arrow array of binary."),
        ({"key": "\ud800"}, UsageError, "column key: '\\ud800' holds a lone surrogate"),
        ({"headers": [5]}, UsageError, "headers 5: headers are names"),
        (
            {"headers": pa.MapArray.from_arrays([0, 1], text_of(b"\xff"), pa.array([b"x"]))},
            UsageError,
            "column headers of type list<",
        ),
        ({"timestamp": [True]}, UsageError, "column timestamp: "),
        ({"timestamp": [None, NAIVE]}, UsageError, "column timestamp: timestamp 2020-01-01 00:00:00 has no time zone."),
        ({"timestamp": [np.datetime64("2020-01-01T00", "us")]}, UsageError, "has no time zone. Give an aware datetime"),
        ({"timestamp": [pd.NaT]}, UsageError, "timestamp NaT has no time zone"),
        ({"timestamp": pa.array([NAIVE]).dictionary_encode()}, UsageError, "it has no time zone"),
        ({"headers": MISNAMED}, UsageError, "a header has the fields data, key. Name them key and value."),
        ({"headers": LIST_VIEWS}, UsageError, "a list view"),
        (
            {"timestamp": pa.array([NAIVE])},
            UsageError,
            "column timestamp of type timestamp[us]: it has no time zone. Say which it is in (pyarrow.compute.assume_",
        ),
        ({"timestamp": pa.array([NAIVE.date()])}, UsageError, "column timestamp of type date32[day]: it has no time"),
        ({"timestamp": pa.array([2**62], pa.timestamp("s", "UTC"))}, UsageError, "would result in out of bounds"),
        ({"timestamp": pa.array([2**40], pa.timestamp("s", "UTC"))}, UsageError, "outside of the years 1 to 9999"),
        ({"headers": pa.array([[None]], HEADERS)}, UsageError, "message 0 of the batch has a header without a name."),
        (
            {"headers": pa.array([[{"key": "a"}, {"value": b"x"}]], HEADERS)},
            UsageError,
            "column headers: message 0 of the batch has a header without a name. Name each.",
        ),
        ({"epoch": [[None]]}, InvalidEpoch, "column epoch: a null among the numbers of an epoch."),
        ({"key": [b"x", b"y"]}, UsageError, "columns of different lengths (topic 2, value 1, key 2)"),
        ({5: [b"x"]}, UsageError, "no such columns: 5"),
    ],
    ids=same_name,
)
def test_what_is_no_column_is_refused(changes: dict[Any, Any], error: type[UsageError], reported: str) -> None:
    with pytest.raises(UsageError) as refusal:
        to_record_batches({**GOOD, **changes})
    assert type(refusal.value) is error
    assert reported in str(refusal.value)


def test_a_table_with_a_column_twice_is_refused() -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array([b"x"]), pa.array([b"y"])], ["topic", "value", "value"])
    with pytest.raises(UsageError, match="columns topic, value, value: a name stands twice"):
        to_record_batches(table)


@pytest.mark.parametrize("numbers", [1, MAX_DIMENSIONS])
def test_epochs_of_one_to_so_many_numbers_are_taken(numbers: int) -> None:
    (batch,) = to_record_batches({"topic": ["t"], "value": [b"v"], "epoch": [[7] * numbers]})
    assert batch.column("epoch").to_pylist() == [[7] * numbers]
    for wrong in (0, MAX_DIMENSIONS + 1):
        with pytest.raises(InvalidEpoch, match=f"epochs of {wrong} to {wrong} numbers"):
            to_record_batches({"topic": ["t"], "value": [b"v"], "epoch": [[7] * wrong]})


def test_one_message_is_no_batch() -> None:
    with pytest.raises(UsageError, match=r"give the values as a list, or call publish\(\) for one"):
        to_record_batches({"topic": "a", "value": b"x"})
    assert to_record_batches({"topic": "a", "value": []}) == []
    with pytest.raises(UsageError, match="a batch of type list: give an Arrow table or a mapping"):
        to_record_batches([{"topic": "a", "value": b"x"}])


@pytest.mark.parametrize(
    ("unit", "given", "micros"), [("s", 7, 7_000_000), ("ms", 7, 7_000), ("us", 7, 7), ("ns", 7_999, 7)]
)
def test_times_of_every_unit_are_taken(unit: str, given: int, micros: int) -> None:
    times = pa.array([given, None], pa.timestamp(unit, "Europe/Berlin"))
    (batch,) = to_record_batches(pa.table({"topic": ["a", "a"], "value": [b"x", b"y"], "timestamp": times}))
    first, second = batch.column("timestamp").cast(pa.int64()).to_pylist()
    assert first == micros
    assert second > 1_700_000_000_000_000


def test_headers_may_be_empty() -> None:
    given = [None, [], [{"key": "a", "value": None}, {"key": "", "value": b"x"}]]
    (batch,) = to_record_batches({"topic": "a", "value": [b"x"] * 3, "headers": pa.array(given, HEADERS)})
    assert batch.column("headers").to_pylist() == given


# --- what a publisher is made with ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["block_messages", "block_bytes", "blocks_per_commit", "max_buffered_bytes", "max_message_bytes"]
)
@pytest.mark.parametrize(
    ("value", "rule"),
    [
        *((value, "must be at least 1") for value in (0, -(10**30))),
        (10**30, "must be at most"),
        *((value, "must be a whole number") for value in (None, 1.5, math.inf, True, "10")),
    ],
    ids=repr,
)
def test_counts_and_sizes(name: str, value: Any, rule: str) -> None:
    with pytest.raises(InvalidSetting) as refusal:
        Publisher("postgresql://nowhere", **{name: value})
    shown = str(refusal.value)
    assert shown.startswith(f"{name} {value!r}: {rule}")
    assert shown.endswith("Leave it out for the default.")


@pytest.mark.parametrize("name", ["linger_ms", "delivery_timeout_s"])
@pytest.mark.parametrize("value", [-1, math.nan, -math.inf, None, "5", True, [5]], ids=repr)
def test_durations(name: str, value: Any) -> None:
    with pytest.raises(
        InvalidSetting, match=rf"^{name} .*: must be a number from 0 to .* Leave it out for the default"
    ):
        Publisher("postgresql://nowhere", **{name: value})


def test_only_retrying_may_last_for_ever() -> None:
    with pytest.raises(InvalidSetting, match="linger_ms inf: must be a number from 0 to 86400000"):
        Publisher("postgresql://nowhere", linger_ms=math.inf)
    assert check_duration("delivery_timeout_s", math.inf, math.inf) == math.inf


@pytest.mark.parametrize("value", ["", "a\0", "a\n", "\ud800", "x" * 256, "é" * 128, 5, b"a", "feed/x"], ids=ascii)
def test_producers(value: Any) -> None:
    with pytest.raises(InvalidSetting, match=r"^producer .*: must be "):
        Publisher("postgresql://nowhere", producer=value)


@pytest.mark.parametrize("changes", [{"url": 5}, {"space": 5}, {"space": ["a"]}], ids=repr)
def test_what_is_no_text(changes: dict[str, Any]) -> None:
    (name,) = changes
    with pytest.raises(InvalidSetting, match=rf"^{name} of type \w+: must be text"):
        Publisher(**{"url": "postgresql://nowhere", **changes})


def test_what_is_fit_is_taken() -> None:
    assert [check_int("block_messages", value, 5) for value in (1, 5, np.int64(5))] == [1, 5, 5]
    assert check_duration("linger_ms", 0, 10.0) == 0
    for name in ("Zähler 1", "x" * 255):
        assert check_producer_name(name) == name
    assert check_producer_name(None) is None
