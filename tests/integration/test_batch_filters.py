"""Pushed filters: what they let through is what Spark would let through, and what they rule out is not fetched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import datasource as spark

from sublet_borrower.spark.source.range_reader import RangePartition
from sublet_protocol.domain.errors import SubletError
from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space, reshard
from tests.integration.replay_kit import Plan, Row, values

START = datetime(2026, 11, 22, 10, 0, tzinfo=UTC)
TOPICS = [f"{first}/{second}" for first in ("eu", "us", "e") for second in ("a", "b", "a/b", "é", "c", "d")]
COUNT = 300


def minute(number: int) -> datetime:
    return START + number * timedelta(minutes=1)


def publish(url: str, first: int, count: int, block: int = 8, stay: int = 7) -> None:
    """A message a minute, so many at once; the topic stays for some of them, so that blocks differ."""
    with Publisher(url) as publisher:
        for low in range(first, first + count, block):
            numbers = range(low, min(low + block, first + count))
            columns = {
                "topic": [TOPICS[number // stay % len(TOPICS)] for number in numbers],
                "key": [b"%d" % (number % 5) for number in numbers],
                "value": [b"%06d" % number for number in numbers],
                "timestamp": [minute(number) for number in numbers],
            }
            publisher.publish_batch(columns)
            publisher.flush()


def fill(url: str) -> None:
    """Two spaces, three generations, small blocks; in the last ones are so many topics that they have no index."""
    with connect(url) as conn:
        reshard(conn, "default", 2)
        publish(url, 0, 80)
        create_space(conn, "eu", "eu/#", shards=2)
        publish(url, 80, 80)
        reshard(conn, "default", 3)
        publish(url, 160, 40)
        publish(url, 200, COUNT - 200, block=100, stay=1)
        assert conn.execute("select from block where topics is null").rowcount > 0


@pytest.fixture(scope="module")
def world(shared_database: str) -> str:
    """A database that is not written to."""
    fill(shared_database)
    return shared_database


# --- the same as Spark ----------------------------------------------------------------------------------------------

COMPARED: dict[type, Callable[[Any, Any], bool]] = {
    spark.EqualTo: lambda have, value: have == value,
    spark.EqualNullSafe: lambda have, value: have == value,
    spark.In: lambda have, value: have in value,
    spark.GreaterThan: lambda have, value: have > value,
    spark.GreaterThanOrEqual: lambda have, value: have >= value,
    spark.LessThan: lambda have, value: have < value,
    spark.LessThanOrEqual: lambda have, value: have <= value,
    spark.StringStartsWith: lambda have, value: have.startswith(value),
    spark.StringEndsWith: lambda have, value: have.endswith(value),
    spark.StringContains: lambda have, value: value in have,
}
ORDERED = [spark.GreaterThan, spark.GreaterThanOrEqual, spark.LessThan, spark.LessThanOrEqual, spark.EqualTo]
TEXTS = [spark.StringStartsWith, spark.StringEndsWith, spark.StringContains]


def holds(each: Any, row: Row) -> bool:
    """Return the result of the filter as in Spark; null is never true."""
    if isinstance(each, spark.Not):
        child: Any = each.child
        is_known = isinstance(child, spark.IsNull | spark.IsNotNull) or row[child.attribute[0]] is not None
        return is_known and not holds(child, row)
    have = row[each.attribute[0]]
    if isinstance(each, spark.IsNotNull | spark.IsNull):
        return (have is not None) == isinstance(each, spark.IsNotNull)
    return have is not None and COMPARED[type(each)](have, each.value)


def compared(column: str, kinds: list[Any], value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(lambda kind, value: kind((column,), value), st.sampled_from(kinds), value)


def one_of(column: str, value: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    several = st.lists(value, min_size=1, max_size=3).map(tuple)
    return compared(column, [spark.EqualTo, spark.EqualNullSafe], value) | compared(column, [spark.In], several)


TOPIC = st.sampled_from([*TOPICS, "nobody", "+", "$x", "a\0b"])
TIME = st.integers(-1, COUNT).map(minute) | st.integers(0, COUNT).map(lambda n: minute(n) + timedelta(microseconds=1))
ONE = st.one_of(
    one_of("topic", TOPIC),
    compared("topic", TEXTS, st.sampled_from(["e", "eu", "eu/", "us/a", "b", "/", "é", "", "\0"])),
    one_of("space", st.sampled_from(["default", "eu", "none"])),
    one_of("stream", st.integers(16, 26)),
    compared("offset", ORDERED, st.integers(-1, 40) | st.just(2**63 - 1)),
    compared("timestamp", ORDERED, TIME),
    compared("value", ORDERED, st.integers(0, COUNT).map(lambda n: b"%06d" % n)),
    st.sampled_from([kind((c,)) for kind in (spark.IsNull, spark.IsNotNull) for c in ("topic", "key", "epoch")]),
)
FILTERS = st.lists(ONE | ONE.map(spark.Not), min_size=1, max_size=4)


@pytest.mark.long
def test_any_filters_give_what_spark_would_have_left(world: str) -> None:
    everything = Plan(world).rows()
    assert len(everything) == COUNT

    @settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow])
    @given(FILTERS)
    @example([spark.StringStartsWith(("topic",), "b"), spark.StringStartsWith(("topic",), "e")])
    def check(filters: list[Any]) -> None:
        plan = Plan(world, filters)
        left = [row for row in plan.rows() if all(holds(each, row) for each in plan.left)]
        wanted = [row for row in everything if all(holds(each, row) for each in filters)]
        assert sorted(left, key=position) == sorted(wanted, key=position)

    check()


def position(row: Row) -> tuple[int, int]:
    return row["stream"], row["offset"]


# --- what is not fetched --------------------------------------------------------------------------------------------


@contextmanager
def trapped(url: str, condition: str) -> Iterator[int]:
    """Have blocks under this condition not be fetched. Yield how many there are."""
    to_it = "b set payload = null, uri = 'elsewhere', uri_bytes = 1"
    back = "b set payload = s.payload, uri = null, uri_bytes = null from saved s"
    same = "(b.generation_id, b.stream_id, b.end_offset) = (s.generation_id, s.stream_id, s.end_offset)"
    with connect(url) as conn:
        conn.execute(f"create temporary table saved as select * from block where {condition}".encode())
        yield conn.execute(f"update block {to_it} where {condition}".encode()).rowcount
        conn.execute(f"update block {back} where {same}".encode())


NOT_OF_US = "topics is not null and not exists (select from unnest(topics) as t where t like 'us/%')"
SKIPPED: list[tuple[list[Any], dict[str, str], str]] = [
    ([spark.EqualTo(("topic",), "eu/a")], {}, "not topics @> '{eu/a}'"),
    ([spark.In(("topic",), ("eu/a", "e/b"))], {}, "not topics && '{eu/a,e/b}'"),
    ([spark.StringStartsWith(("topic",), "us/")], {}, NOT_OF_US),
    (
        [spark.EqualTo(("space",), "eu")],
        {},
        "generation_id not in (select generation_id from generation join space using (space_id) where name = 'eu')",
    ),
    ([spark.EqualTo(("stream",), 17)], {}, "stream_id <> 17"),
    ([spark.LessThan(("offset",), 10)], {}, "end_offset - count >= 10"),
    ([spark.GreaterThanOrEqual(("offset",), 10)], {}, "end_offset <= 10"),
    ([spark.GreaterThan(("timestamp",), minute(100))], {}, "last_timestamp < '2026-11-22T11:40Z'"),
    ([spark.LessThanOrEqual(("timestamp",), minute(100))], {}, "first_timestamp > '2026-11-22T11:40Z'"),
    ([], {"endingPosition": "offset:10", "minPartitions": "9"}, "end_offset - count >= 10"),
    ([], {"filter": "us/+"}, NOT_OF_US),
]


@pytest.mark.parametrize(("filters", "options", "unwanted"), SKIPPED, ids=[unwanted[:40] for _, _, unwanted in SKIPPED])
@pytest.mark.long
def test_unwanted_blocks_are_not_fetched(
    world: str, filters: list[Any], options: dict[str, Any], unwanted: str
) -> None:
    before = values(world, filters, **options)
    assert before
    with trapped(world, unwanted) as skipped:
        assert skipped > COUNT // 20, "blocks that are not fetched"
        assert values(world, filters, **options) == before
        with pytest.raises(SubletError, match=r"'elsewhere', .*it is not read"):
            values(world)


def test_a_topic_decides_which_streams_are_looked_at(world: str) -> None:
    def spaces(topic: str) -> set[str]:
        tasks = Plan(world, [spark.EqualTo(("topic",), topic)]).tasks
        return {task.space for task in tasks if isinstance(task, RangePartition)}

    assert spaces("us/a") == {"default"}
    assert spaces("eu/a") == {"default", "eu"}, "both, as the space eu came later"


def test_epochs_decide_which_blocks_are_fetched(database: str) -> None:
    fill(database)
    with Publisher(database, space="default") as publisher:
        for epoch in range(20):
            publisher.in_epoch(epoch).publish("e/a", b"%d" % epoch)
            publisher.flush()
    outside = "epoch_bounds #> '{greatest,0,0}' < '5' or epoch_bounds #> '{least,0,0}' >= '8'"
    with trapped(database, "epoch_bounds is null") as without, trapped(database, outside) as others:
        assert (without >= COUNT // 20, others) == (True, 17)
        assert values(database, startingEpoch=5, endingEpoch=8) == [b"5", b"6", b"7"]


# --- what Spark gets ------------------------------------------------------------------------------------------------


def test_what_is_decided_is_not_looked_at_again(world: str) -> None:
    decided = [
        spark.IsNotNull(("topic",)),
        spark.StringStartsWith(("topic",), "eu/"),
        spark.In(("topic",), ("eu/a", "us/a")),
        spark.EqualTo(("space",), "eu"),
        spark.GreaterThan(("offset",), 2),
    ]
    left = [
        spark.GreaterThan(("timestamp",), minute(3)),
        spark.StringEndsWith(("topic",), "a"),
        spark.EqualTo(("key",), b"1"),
        spark.Not(spark.EqualTo(("topic",), "eu/b")),
        spark.EqualTo(("headers", "key"), "x"),
        spark.GreaterThan(("timestamp",), datetime(2026, 11, 22)),  # noqa: DTZ001 as one without a zone
    ]
    plan = Plan(world, [*decided, *left])
    assert plan.left == left
    assert all(row["topic"] == "eu/a" and row["offset"] > 2 for row in plan.rows())


def test_what_contradicts_itself_makes_no_tasks(world: str) -> None:
    nothing: list[list[Any]] = [
        [spark.EqualTo(("topic",), "eu/a"), spark.EqualTo(("topic",), "eu/b")],
        [spark.GreaterThan(("offset",), 5), spark.LessThan(("offset",), 6)],
        [spark.EqualTo(("space",), "nowhere")],
        [spark.EqualTo(("stream",), 10**6)],
    ]
    assert [Plan(world, filters).tasks for filters in nothing] == [[], [], [], []]
