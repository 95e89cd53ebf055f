"""What `append_block` refuses of whoever may call it: rows that no reader could make sense of."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, LiteralString
from uuid import UUID

import psycopg
import pytest

from sublet_storage.db.connect import connect
from sublet_storage.log.append import register_producer
from sublet_storage.spaces.space_changes import create_space, reshard
from tests.integration.log_kit import Connection, block, read
from tests.support.streams import open_streams

pytestmark = pytest.mark.conforms("X4")

APPEND = """
select outcome from append_block(null, null, null, %(stream)s::bigint, %(count)s::integer, %(first)s::timestamptz,
  %(last)s::timestamptz, %(topics)s::text[], %(codec)s::smallint, %(payload)s::bytea, null)"""

APPEND_AS = APPEND.replace("null, null, null", "%(name)s, 1, 1", 1)
STAGE = """
insert into staged_block (sink, batch, attempt, ordinal, stream_id, count, first_timestamp, last_timestamp, topics,
  codec, payload) values ('s', 1, %(attempt)s, 0, %(stream)s, %(count)s, %(first)s, %(last)s, %(topics)s, %(codec)s,
  %(payload)s)"""
PUBLISH = "select total from append_staged_blocks('s', 1, %(attempts)s)"
CHECK = "check_block(%(count)s, %(first)s::timestamptz, %(last)s::timestamptz, %(topics)s::text[], %(payload)s)"
ATTEMPT = UUID(int=1)
HOLD = "select outcome from hold_epochs(%(space)s, 'etl', %(incarnation)s, %(epochs)s, 60)"
APPEND_OF = APPEND.replace("null, null, null", "'etl', %(incarnation)s, 1", 1)


@pytest.fixture
def conn(shared_database: str) -> Iterator[Connection]:
    """In a transaction that is rolled back."""
    with connect(shared_database) as connection, connection.transaction(force_rollback=True):
        yield connection


@pytest.fixture
def good(conn: Connection) -> dict[str, Any]:
    one = block(b"x")
    return {
        "stream": open_streams(conn)[0].stream_id, "count": one.count, "first": one.first_timestamp,
        "last": one.last_timestamp,
        "topics": one.topics, "codec": one.codec, "payload": bytes(one.payload), "space": 1, "epochs": "[[4]]",
    }  # fmt: skip


def refused(conn: Connection, row: dict[str, Any], statement: LiteralString = APPEND) -> str:
    with pytest.raises(psycopg.Error) as raised, conn.transaction():
        conn.execute(statement, row)
    assert raised.value.sqlstate == "SB002", raised.value
    return f"{raised.value.diag.message_primary} {raised.value.diag.message_hint}"


@pytest.mark.parametrize(
    ("wrong", "story"),
    [
        ({"count": 0}, "count 0: a block has 1 to 100000 messages"),
        ({"count": -1}, "count -1: a block has 1 to"),
        ({"count": 1_000_001}, "count 1000001: a block has"),
        ({"count": 2**31 - 1}, "count 2147483647: a block has"),
        ({"count": None}, "count null: a block has"),
        ({"payload": None}, "payload of no bytes: an Arrow record batch has 16 to 34603008"),
        ({"payload": b""}, "payload of 0 bytes: an Arrow record batch has 16"),
        ({"payload": b"\xff" * 15}, "payload of 15 bytes"),
        ({"payload": b"x" * 64}, "payload of 64 bytes: it begins with ffffffff and the length of its metadata"),
        ({"payload": b"\xff\xff\xff\xff\x39\0\0\0" + bytes(56)}, "payload of 64 bytes: it begins with ffffffff"),
        ({"payload": b"\xff" * 64}, "payload of 64 bytes: it begins with ffffffff"),
        ({"first": None}, "timestamps null to 1970.*: the first is not after the last"),
        ({"last": None}, "timestamps 1970.* to null: the first"),
        ({"first": datetime(9000, 1, 1, tzinfo=UTC)}, "timestamps 9000-01-01.*: the first is not after the last"),
        ({"first": "-infinity"}, "timestamps -infinity to .*the years 1 to 9999"),
        ({"last": "infinity"}, "to infinity: .*the years 1 to 9999"),
        ({"first": "0001-12-31 00:00:00+00 BC"}, "BC to .*the years 1 to 9999"),
        ({"topics": []}, "0 topics: a block of 1 names 1 to 1 distinct ones in a plain list, or null"),
        ({"topics": ["a", "b"]}, "2 topics: a block of 1 names"),
        ({"topics": [f"t/{number}" for number in range(9)], "count": 99}, "9 topics: a block of 99 names 1 to 8"),
        ({"topics": ["a/#"]}, r"topic 'a/#': a topic has no wildcards, and this one contains #"),
        ({"topics": [""]}, "topic '': it is empty"),
        ({"topics": [None]}, "topic NULL: each message needs a topic"),
        ({"topics": [["a"], ["b"]], "count": 2}, "2 topics: a block of 2 names 1 to 2 distinct ones in a plain list"),
        ({"topics": ["$a"]}, r"topic '\$a': what begins with \$ is reserved"),
        ({"topics": ["x" * 4_097]}, "it is 4097 bytes of UTF-8 and the limit is 4096"),
    ],
)
def test_a_row_that_cannot_be_is_not_appended(
    conn: Connection, good: dict[str, Any], wrong: dict[str, Any], story: str
) -> None:
    """And the stream has no message more."""
    before = conn.execute("select head from stream where stream_id = %(stream)s", good).fetchone()
    text = refused(conn, {**good, **wrong})
    assert re.search(story, text), text
    assert conn.execute("select head from stream where stream_id = %(stream)s", good).fetchone() == before


def test_topics_that_are_staged_are_a_plain_list(conn: Connection, good: dict[str, Any]) -> None:
    """Readers compare each with a filter: a list in the list ended every consumer that was granted the stream."""
    conn.execute(STAGE, {**good, "attempt": ATTEMPT, "count": 2, "topics": [["a"], ["b"]]})
    assert "distinct ones in a plain list" in refused(conn, {"attempts": [ATTEMPT]}, PUBLISH)


@pytest.mark.parametrize(
    "right", [{}, {"topics": None}, {"first": "0001-01-01 00:00:00+00"}, {"last": "9999-12-31 23:59:59+00"}]
)
def test_a_row_at_its_limits_is_appended(conn: Connection, good: dict[str, Any], right: dict[str, Any]) -> None:
    assert conn.execute(APPEND, {**good, **right}).fetchone() == ("appended",)
    assert [message["value"] for message in read(conn, good["stream"])] == [b"x"]


HEADER = b"\xff\xff\xff\xff%c\0\0\0" + bytes(8)
LIMITS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"count": 1}, {"count": 0}),
    ({"count": 100_000}, {"count": 100_001}),
    ({"first": "0001-01-01 00:00:00+00"}, {"first": "0001-12-31 23:59:59.999999+00 BC"}),
    ({"last": "9999-12-31 23:59:59.999999+00"}, {"last": "10000-01-01 00:00:00+00"}),
    ({"first": "1970-01-02 00:00:00+00", "last": "1970-01-02 00:00:00+00"},
     {"first": "1970-01-02 00:00:00.000001+00", "last": "1970-01-02 00:00:00+00"}),
    ({"payload": HEADER % 8}, {"payload": HEADER % 9}),
    ({"topics": ["x" * 4096]}, {"topics": ["x" * 4097]}),
    ({"topics": ["/" * 127]}, {"topics": ["/" * 128]}),
]  # fmt: skip


@pytest.mark.parametrize(("right", "wrong"), LIMITS, ids=range(8))
def test_a_block_at_a_limit_needs_no_second_check(
    conn: Connection, good: dict[str, Any], right: dict[str, Any], wrong: dict[str, Any]
) -> None:
    """It is plain; and one beyond it is neither plain nor valid."""
    is_plain = f"select {CHECK.replace('check', 'is_plain')}"
    assert conn.execute(is_plain, {**good, **right}).fetchone() == (True,)
    conn.execute(f"select {CHECK}", {**good, **right})
    assert conn.execute(is_plain, {**good, **wrong}).fetchone() == (False,)
    refused(conn, {**good, **wrong}, f"select {CHECK}")


@pytest.mark.parametrize("incarnation", [2**63 - 1, 2**63 - 2**51, 0, -1])
def test_no_incarnation_leaves_none_to_be_drawn(conn: Connection, good: dict[str, Any], incarnation: int) -> None:
    """Neither one that is registered, nor that of a block or a capability."""
    register, wrong = "select register_producer('etl', %(incarnation)s)", {**good, "incarnation": incarnation}
    assert "it is one that was drawn" in refused(conn, wrong, register)
    assert "it is one that was drawn" in refused(conn, wrong, APPEND_OF)
    assert "it is one that was drawn" in refused(conn, wrong, HOLD)
    last_timeline = (2047 << 52) + register_producer(conn, "other")
    conn.execute(register, {"incarnation": last_timeline})
    assert register_producer(conn, "etl") == last_timeline + 1


@pytest.mark.parametrize("ahead_us", [1, 2047 << 52])
def test_no_block_fences_what_is_drawn_next(conn: Connection, good: dict[str, Any], ahead_us: int) -> None:
    """Before a producer is registered, its incarnation is one that may be drawn by now."""
    if ahead_us > 1:
        wrong = {**good, "incarnation": register_producer(conn, "other") + ahead_us}
        assert "it is one that was drawn" in refused(conn, wrong, APPEND_OF)
    for _ in range(2):
        drawn = register_producer(conn, "etl")
        assert "it is one that was drawn" in refused(conn, {**good, "incarnation": drawn + ahead_us}, APPEND_OF)
        assert conn.execute(APPEND_OF, {**good, "incarnation": drawn}).fetchone() == ("appended",)


@pytest.mark.parametrize(
    ("held", "appended"), [("[[4]]", "[[9, 1]]"), ("[[4, 1]]", "[[9]]"), (f"[[4, {10**16}, {10**16}]]", "[[9]]")]
)
def test_epochs_of_a_block_have_the_spaces_numbers(
    conn: Connection, good: dict[str, Any], held: str, appended: str
) -> None:
    """What is completed had others then, and honest publishers were refused."""
    space = conn.execute("select space_id from stream where stream_id = %(stream)s", good).fetchall()[0][0]
    row = {**good, "space": space, "incarnation": register_producer(conn, "etl"), "epochs": held}
    assert conn.execute(HOLD, row).fetchone() == ("held",)
    bounds = f'{{"has_unset": false, "least": {appended}, "greatest": {appended}}}'
    statement = APPEND_OF.replace("bytea, null)", "bytea, %(epochs)s)")
    assert "all of a space have as many numbers as" in refused(conn, {**row, "epochs": bounds}, statement)
    row["epochs"] = bounds.replace(appended, held)
    assert conn.execute(statement, row).fetchone() == ("appended",)


@pytest.mark.parametrize("numbers", [1, 2])
def test_too_many_epochs_are_refused_before_a_lock(
    shared_database: str, conn: Connection, good: dict[str, Any], numbers: int
) -> None:
    """To compare them took half a minute, and all other appends to the stream waited."""
    epochs = json.dumps([[k, 9_000 - k][:numbers] for k in range(1_001)])
    bounds = f'{{"has_unset": false, "least": [{[4] * numbers}], "greatest": {epochs}}}'
    with connect(shared_database) as committed:
        row = {**good, "incarnation": register_producer(committed, "etl"), "epochs": bounds}
    conn.execute("set local lock_timeout = '1s'")
    with psycopg.connect(shared_database) as other:
        other.execute("select sublet.register_producer('etl')")
        said = refused(conn, row, APPEND_OF.replace("bytea, null)", "bytea, %(epochs)s)"))
    assert "the greatest of its epochs, each a list of 1 to 1000" in said


def test_an_attempt_is_appended_once(conn: Connection, good: dict[str, Any]) -> None:
    """One staged megabyte named 300 times stored 300."""
    conn.execute(STAGE, {**good, "attempt": ATTEMPT})
    said = refused(conn, {"attempts": [UUID(int=2), ATTEMPT, ATTEMPT]}, PUBLISH)
    given = f"attempt {ATTEMPT} is given more than once"
    assert said == f"{given}: what it has staged is appended once. Give each attempt once."
    assert conn.execute(PUBLISH, {"attempts": [ATTEMPT, UUID(int=2)]}).fetchall() == [(1,)]


@pytest.mark.parametrize("batch", [2**63 - 1, 2**53 + 1, -1, None])
def test_a_sinks_batch_has_a_number_in_bounds(conn: Connection, batch: int | None) -> None:
    enter = "select * from enter_sink_batch('orders', %(batch)s, 10, false)"
    assert "its number is from 0 to 2^53" in refused(conn, {"batch": batch}, enter)
    for good in (0, 2**53):
        assert conn.execute(enter, {"batch": good}).fetchone() == (None, None)
    assert conn.execute(enter, {"batch": 1}).fetchone() == (2**53, 10)


@pytest.mark.conforms("X7")
@pytest.mark.parametrize("name", ["é" * 128, "a" * 256, "", None, "a\n", "feed/" + "a" * 1277])
def test_a_producers_name_has_a_bound_at_each_way(conn: Connection, good: dict[str, Any], name: str | None) -> None:
    said = "its name has 1 to .* bytes of UTF-8, all of them printable"
    for statement in (
        "select register_producer(%(name)s)",
        "select * from hold_epochs(1, %(name)s, 1, '[[1]]', 60)",
        *([APPEND_AS] if name is not None else []),
    ):
        assert re.search(said, refused(conn, {**good, "name": name}, statement))


def test_a_producers_longest_name_is_taken(conn: Connection, good: dict[str, Any]) -> None:
    register_producer(conn, "é" * 127 + "a")
    conn.execute("update producer set incarnation = 1")
    for name in ("é" * 127 + "a", "feed/" + "a" * 1276):
        assert conn.execute(APPEND_AS, {**good, "name": name}).fetchone() == ("appended",)


@pytest.mark.conforms("X5")
def test_a_nodes_producer_is_not_registered(conn: Connection, good: dict[str, Any]) -> None:
    """A registration would fence it for longer than its own numbers can grow. It has the row of stream 0."""
    assert "names that begin with feed/" in refused(conn, {}, "select register_producer('feed/user:etl/p')")
    for stream in (0, -1):
        row = {**good, "stream": stream, "name": "feed/user:etl/p"}
        assert conn.execute(APPEND_AS, row).fetchone() == ("closed",)
    assert conn.execute("select from producer where producer_id like 'feed/%'").fetchone() is None


@pytest.mark.parametrize("sink", ["é" * 130 + "a", "", None])
def test_a_sinks_name_has_a_bound(conn: Connection, sink: str | None) -> None:
    assert "its name has 1 to 260 bytes" in refused(
        conn, {"sink": sink}, "select * from enter_sink_batch(%(sink)s, 1, 10, false)"
    )


def test_what_others_have_staged_is_left_alone(conn: Connection, good: dict[str, Any]) -> None:
    """The same attempt of another sink or batch, another attempt, another stream."""
    closed = good["stream"]
    create_space(conn, "other", "other/#")
    conn.execute("update space set (lower_frontier, epoch_dimensions) = ('[[7]]', 1) where name = 'other'")
    reshard(conn, "default", 1)
    stream = max(each.stream_id for each in open_streams(conn))
    own, broken = {**good, "stream": stream}, {**good, "payload": b"x" * 64, "stream": 2**40}
    rows = [("s", 1, ATTEMPT, own), ("s", 1, ATTEMPT, {**own, "stream": closed}), ("s", 1, UUID(int=2), broken)]
    rows += [("t", 1, ATTEMPT, broken), ("s", 2, ATTEMPT, broken), ("s", 0, ATTEMPT, broken)]
    stage = STAGE.replace("('s', 1, %(attempt)s, 0", "(%(sink)s, %(batch)s, %(attempt)s, %(ordinal)s")
    for ordinal, (sink, batch, attempt, row) in enumerate(rows):
        conn.execute(stage, {**row, "sink": sink, "batch": batch, "attempt": attempt, "ordinal": ordinal})

    def found(statement: LiteralString) -> list[int]:
        asked = {"attempt": ATTEMPT, "stream": stream, "all": [stream, closed, 2**40]}
        return sorted(row[0] for row in conn.execute(statement, asked).fetchall())

    assert found("select lock_staged_streams('s', 1, array[%(attempt)s::uuid])") == [closed]
    read = "select ordinal from read_staged_blocks('s', 1, %(attempt)s, "
    assert found(read + "%(all)s, -1)") == [0, 1]
    assert found(read + "%(all)s, 0)") == [1]
    assert found(read + "array[%(stream)s::bigint], -1)") == [0]
    assert found("select of_stream from append_staged_blocks('s', 1, array[%(attempt)s::uuid])") == [stream]
    assert conn.execute("select lower_frontier from block where stream_id = %s", (stream,)).fetchall() == [(None,)]
    left = "select ordinal from staged_block"
    conn.execute("select delete_staged_blocks('s', 1, %s, %s)", (ATTEMPT, [stream, 2**40]))
    assert found(left) == [1, 2, 3, 4, 5]
    conn.execute("select discard_staged_blocks('s', 1)")
    assert found(left) == [3, 4]
