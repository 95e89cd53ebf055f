"""Which filters of Spark's decide over what is read, and what they leave of a stream.

That they give what Spark would have left is in `tests/integration/test_batch_filters.py`.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest
from pyspark.sql import datasource as spark

from sublet_borrower.spark.source.pushdown import NO_FILTERS, PushedFilters, split_filters
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.readers.offset_ranges import OffsetRange

WHEN, LATER = datetime(2026, 11, 22, tzinfo=UTC), datetime(2026, 11, 23, tzinfo=UTC)
BARE = datetime(2026, 11, 22)  # noqa: DTZ001 as one without a zone


def topic(kind: Any, value: Any) -> Any:
    return kind(("topic",), value)


def at(kind: Any, value: Any, column: str = "offset") -> Any:
    return kind((column,), value)


PREFIX, EQUAL, ONE_OF = spark.StringStartsWith, spark.EqualTo, spark.In


@pytest.mark.parametrize(
    ("filters", "pushed"),
    [
        ([spark.IsNotNull(("topic",))], NO_FILTERS),
        ([topic(PREFIX, "eu/")], PushedFilters(prefix="eu/")),
        ([topic(PREFIX, "eu/"), topic(PREFIX, "eu/a")], PushedFilters(prefix="eu/a")),
        ([topic(PREFIX, "eu/a"), topic(PREFIX, "eu/")], PushedFilters(prefix="eu/a")),
        ([topic(EQUAL, "a")], PushedFilters(topics=frozenset("a"))),
        ([topic(spark.EqualNullSafe, "a")], PushedFilters(topics=frozenset("a"))),
        ([topic(ONE_OF, ("a", "b")), topic(ONE_OF, ("b", "c"))], PushedFilters(topics=frozenset("b"))),
        (
            [at(EQUAL, "eu", "space"), at(EQUAL, 3, "stream")],
            PushedFilters(None, "", frozenset({"eu"}), frozenset({3})),
        ),
        ([at(EQUAL, 5)], PushedFilters(start=5, end=6)),
        ([at(spark.GreaterThan, 5), at(spark.GreaterThanOrEqual, 4)], PushedFilters(start=6)),
        ([at(spark.LessThan, 5), at(spark.LessThanOrEqual, 5)], PushedFilters(end=5)),
    ],
)
def test_what_is_understood_is_not_left_to_spark(filters: list[Any], pushed: PushedFilters) -> None:
    assert split_filters(filters) == (pushed, [])


@pytest.mark.parametrize(
    "left",
    [
        spark.IsNotNull(("key",)),
        spark.IsNull(("topic",)),
        topic(PREFIX, "a\0b"),
        at(PREFIX, "eu", "space"),
        at(PREFIX, "eu", "key"),
        topic(EQUAL, "a\0b"),
        topic(EQUAL, 5),
        topic(ONE_OF, ("a", "\0")),
        at(EQUAL, True, "stream"),
        at(EQUAL, b"1", "key"),
        at(EQUAL, 5.5),
        at(spark.GreaterThan, True),
        at(spark.GreaterThan, b"1", "value"),
        at(spark.GreaterThan, BARE, "timestamp"),
        at(spark.GreaterThan, "2026-11-22", "timestamp"),
        topic(spark.StringEndsWith, "a"),
        spark.Not(topic(EQUAL, "a")),
        spark.EqualTo(("headers", "key"), "x"),
    ],
    ids=str,
)
def test_what_is_not_understood_is_left_to_spark(left: Any) -> None:
    """And nothing else is decided by it."""
    both = [left, topic(EQUAL, "a")]
    assert split_filters(both) == (PushedFilters(topics=frozenset("a")), [left])


def test_times_decide_and_are_left_too() -> None:
    """As a block has messages of several."""
    filters = [
        at(spark.GreaterThan, WHEN, "timestamp"),
        at(spark.GreaterThanOrEqual, LATER, "timestamp"),
        at(spark.LessThan, LATER, "timestamp"),
        at(spark.LessThanOrEqual, WHEN, "timestamp"),
    ]
    pushed = PushedFilters(min_timestamp=LATER, max_timestamp=WHEN)
    assert split_filters(filters) == (pushed, filters)
    equal = [at(EQUAL, WHEN, "timestamp")]
    assert split_filters(equal) == (PushedFilters(min_timestamp=WHEN, max_timestamp=WHEN), equal)


def test_two_prefixes_that_exclude_each_other() -> None:
    """One of them is left to Spark."""
    first, second = topic(PREFIX, "eu/"), topic(PREFIX, "us/")
    assert split_filters([first, second]) == (PushedFilters(prefix="eu/"), [second])


OF_EU = OffsetRange(7, 1, "eu", TopicFilter("eu/#"), None, 10, 20)


@pytest.mark.parametrize(
    ("pushed", "left"),
    [
        (NO_FILTERS, (10, 20)),
        (PushedFilters(start=12, end=15), (12, 15)),
        (PushedFilters(start=0, end=MAX_OFFSET), (10, 20)),
        (PushedFilters(start=19), (19, 20)),
        (PushedFilters(start=20), None),
        (PushedFilters(end=10), None),
        (PushedFilters(end=11), (10, 11)),
        (PushedFilters(spaces=frozenset({"us"})), None),
        (PushedFilters(spaces=frozenset({"us", "eu"})), (10, 20)),
        (PushedFilters(streams=frozenset({8})), None),
        (PushedFilters(streams=frozenset({7})), (10, 20)),
        (PushedFilters(topics=frozenset({"us/a"})), None),
        (PushedFilters(topics=frozenset({"us/a", "eu/a"})), (10, 20)),
        (PushedFilters(frozenset({"eu/a"}), "", frozenset({"eu"}), frozenset({7})), (10, 20)),
    ],
)
def test_what_is_left_of_a_stream(pushed: PushedFilters, left: tuple[int, int] | None) -> None:
    assert [(each.start, each.end) for each in pushed.prune([OF_EU])] == ([] if left is None else [left])
