"""Publishing by SQL: what the function takes and refuses, and what the relay does with its rows."""

from __future__ import annotations

import json
import random
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from typing import Any, LiteralString

import psycopg
import pytest

from sublet_leader.jobs.outbox_relay import OutboxRelay
from sublet_protocol.domain.errors import StaleTerm, UsageError
from sublet_protocol.domain.limits import MAX_HEADER_BYTES, MAX_HEADERS
from sublet_protocol.domain.topics import check_topic
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.notify.changes import ObjectChange, stream_change
from sublet_storage.notify.publisher import NotificationPublisher
from sublet_storage.producer import outbox_conversion, outbox_mover
from sublet_storage.producer.batches.input_conversion import as_headers, check_size, size_of, to_record_batches
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.producer.outbox_mover import NOTHING, OutboxBacklog, OutboxMover, read_backlog
from sublet_storage.producer.publisher import MAX_MESSAGE_BYTES
from sublet_storage.spaces.space_changes import alter_space, create_space, reshard, rollover
from tests.integration.log_kit import Message, by_key, everything
from tests.kit import eventually
from tests.kit_nodes import ROOT
from tests.postgres_proxy import PostgresProxy

Connection = psycopg.Connection[Any]

HERE = NodeIncarnation("n1", "n1-1", "localhost:1")


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with connect(database, lock_timeout_s=0.2) as connection:
        yield connection


@pytest.fixture
def user(database: str) -> Iterator[Connection]:
    """Somebody's own connection, not in autocommit, whose search_path knows nothing of ours."""
    with psycopg.connect(database) as connection:
        yield connection


def free(_: object) -> None:
    """Let every call pass, as a guard."""


def move_all(conn: Connection, relay: OutboxMover | None = None, rows: int = outbox_mover.MOVED_ROWS) -> int:
    """Have everything moved; the number of messages."""
    relay, total = relay or OutboxMover(conn, free), 0
    while (moved := relay.move(rows=rows)) != NOTHING:
        total += moved.messages
    return total


def values(conn: Connection) -> list[bytes]:
    return sorted(message["value"] for found in everything(conn).values() for message in found)


def in_one_stream(conn: Connection) -> list[Message]:
    """Return the messages of the one stream that has some, in their order."""
    (messages,) = [found for found in everything(conn).values() if found]
    return messages


def check_order(conn: Connection) -> None:
    """Check that the numbers of each key are in their order."""
    for key, numbers in by_key(conn).items():
        assert list(map(int, numbers)) == sorted(map(int, numbers)), key


def publish(conn: Connection, *arguments: object) -> int:
    marks = ", ".join(["%s"] * len(arguments))
    row = conn.execute(f"select sublet.publish({marks})", arguments).fetchone()
    assert row is not None
    return int(row[0])


# --- the function -----------------------------------------------------------------------------------------------------


@pytest.mark.conforms("W7")
def test_what_is_committed_is_there_once(conn: Connection, user: Connection) -> None:
    """What is rolled back is never seen."""
    publish(user, "a", "rolled back")
    assert move_all(conn) == 0
    user.rollback()
    first = publish(user, "a", "committed")
    with suppress(ZeroDivisionError), user.transaction():
        publish(user, "a", "rolled back to a savepoint")
        raise ZeroDivisionError
    assert publish(user, "a", "committed too") > first
    assert move_all(conn) == 0
    user.commit()
    assert move_all(conn) == 2
    assert move_all(conn) == 0
    assert values(conn) == [b"committed", b"committed too"]
    assert read_backlog(conn) == OutboxBacklog(0, None, 0)


CALLS = [
    ("literals are text", "publish('a', 'v\\x', 'k')", (), (b"v\\x", b"k")),
    ("no key", "publish('a', 'v')", (), (b"v", None)),
    ("null", "publish('a', null)", (), (None, None)),
    ("bytes", "publish('a', '\\x0001'::bytea, '\\x02'::bytea)", (), (b"\0\1", b"\2")),
    ("bytes without a key", "publish('a', '\\x0001'::bytea)", (), (b"\0\1", None)),
    ("bytes under a literal", "publish('a', '\\x0001'::bytea, 'k\\1')", (), (b"\0\1", b"k\\1")),
    ("text under bytes", "publish('a', 'v', '\\x02'::bytea)", (), (b"v", b"\2")),
    ("text and varchar", "publish('a'::varchar, 'v'::text, 'k'::varchar)", (), (b"v", b"k")),
    ("json", "publish('a', json_build_object('n', 1)::text)", (), (b'{"n" : 1}', None)),
    ("by name", "publish(topic => 'a', key => 'k', value => 'v')", (), (b"v", b"k")),
    ("by name, bytes", "publish(topic => 'a', key => 'k', value => '\\x00'::bytea)", (), (b"\0", b"k")),
    ("by name, without a key", "publish(topic => 'a', value => 'v', headers => '{}')", (), (b"v", None)),
    ("parameters", "publish(%s, %s, %s)", ("a", "grün", "k"), ("grün".encode(), b"k")),
    ("parameters of bytes", "publish(%s, %s, %s)", ("a", b"\0", b"\1"), (b"\0", b"\1")),
    ("parameters of both", "publish(%s, %s, %s)", ("a", b"\0", "k\\x"), (b"\0", b"k\\x")),
    ("no parameters", "publish(%s, %s, %s)", ("a", None, None), (None, None)),
    ("typed parameters", "publish(%b, %b, %b)", ("a", "v", "k"), (b"v", b"k")),
]


def test_values_and_keys_are_text_or_bytes(conn: Connection, user: Connection) -> None:
    reshard(conn, "default", 1)
    for _, call, parameters, _ in CALLS:
        user.execute(f"select sublet.{call}", parameters or None)
    user.commit()
    assert move_all(conn) == len(CALLS)
    messages = in_one_stream(conn)
    found = {each[0]: (message["value"], message["key"]) for each, message in zip(CALLS, messages, strict=True)}
    assert found == {name: expected for name, _, _, expected in CALLS}
    assert {message["topic"] for message in messages} == {"a"}


def test_a_prepared_statement_may_declare_its_types(conn: Connection, user: Connection) -> None:
    user.execute("prepare ours (varchar, bytea, varchar) as select sublet.publish($1, $2, $3)")
    user.execute("execute ours ('a', 'v', 'k')")
    user.execute("prepare unknown as select sublet.publish($1, $2)")
    user.execute("execute unknown ('a', 'w')")
    user.commit()
    move_all(conn)
    assert values(conn) == [b"v", b"w"]


def test_headers_and_times_come_as_they_were_given(conn: Connection, user: Connection) -> None:
    reshard(conn, "default", 1)
    alter_space(conn, "default", compression="zstd")
    user.execute(
        "select sublet.publish('t/' || i % 3, 'value', 'key',"
        " jsonb_build_object('n', i, 'none', null, 'bytes', jsonb_build_object('base64', encode(%b, 'base64'))),"
        " timestamptz '2026-01-01 00:00Z' + i * interval '1 s') from generate_series(0, 2499) i".replace("% 3", "%% 3"),
        (bytes(range(100)),),
    )
    publish(user, "a", "b", None, '[["same", "1"], ["same", true]]')
    for other in ('{"base64": 1234}', '{"base64": "", "more": 1}'):
        with pytest.raises(psycopg.Error, match='"n" of type object: a value is'), user.transaction():
            publish(user, "a", "b", None, f'[["n", {other}]]')
    user.commit()
    before = datetime.now(UTC)
    assert move_all(conn) == 2501
    found = in_one_stream(conn)
    assert [message["timestamp"].second for message in found[:100]] == [i % 60 for i in range(100)]
    headers = {pair["key"]: pair["value"] for pair in found[7]["headers"]}
    assert headers == {"n": b"7", "none": None, "bytes": bytes(range(100))}
    assert [(pair["key"], pair["value"]) for pair in found[-1]["headers"]] == [("same", b"1"), ("same", b"true")]
    assert abs((found[-1]["timestamp"] - before).total_seconds()) < 60
    counts = conn.execute("select codec & 3, count from block").fetchall()
    assert max(count for _, count in counts) == 1000
    assert {codec for codec, count in counts if count >= 64} == {2}, "in the compression of the space"


REFUSED = [
    ("publish(null, 'v')", "topic NULL: each message needs a topic", "such as orders/eu"),
    ("publish('', 'v')", "topic '': it is empty", "such as orders/eu"),
    ("publish('a/+', 'v')", "topic 'a/+': a topic has no wildcards, and this one contains +", "one exact topic"),
    ("publish('a/#', 'v')", "contains #", "one exact topic"),
    ("publish('$SYS/x', 'v')", "what begins with $ is reserved", "leading $"),
    ("publish(repeat('é', 2049), 'v')", "it is 4098 bytes of UTF-8 and the limit is 4096", "Shorten it"),
    ("publish(repeat('/', 128), 'v')", "it has 129 levels and the limit is 128", "Put the rest"),
    ("publish('a', repeat('x', 1048576))", "it takes 1048609 bytes and the limit is 1048576", "a reference to where"),
    ("publish('a', 'v', null, '3')", "headers 3: headers are an object, or a list of", '{"name": "text"}'),
    ("publish('a', 'v', null, '[[\"n\"]]')", 'header ["n"]: headers are', '{"name": "text"}'),
    ("publish('a', 'v', null, '[[1, \"x\"]]')", 'header [1, "x"]: headers are', '{"name": "text"}'),
    ("publish('a', 'v', null, '{\"n\": [1]}')", 'header "n" of type array: a value is text', "into text"),
    ("publish('a', 'v', null, '{\"n\": {\"base64\": \"a\"}}')", 'header "n": its value is not base64', "encode("),
    ("publish('a', 'v', null, '{\"n\": {\"base64\": 1234}}')", 'header "n" of type object: a value is', "into text"),
    ('publish(\'a\', \'v\', null, \'{"n": {"base64": "", "x": 1}}\')', 'header "n" of type object', "into text"),
    ("publish('a', 'v', null, null, 'infinity')", "timestamp infinity: it is outside of the years", "Correct it"),
    ("publish('a', 'v', null, null, '10000-01-01')", "outside of the years 1 to 9999", "Correct it"),
    ("publish('a', 'v', null, null, '0001-12-31 BC')", "outside of the years 1 to 9999", "Correct it"),
]


def test_a_refusal_has_value_rule_and_remedy(conn: Connection, user: Connection) -> None:
    user.execute("set timezone = 'UTC'")
    user.commit()
    for call, story, remedy in REFUSED:
        with pytest.raises(psycopg.Error, match=re.escape(story)) as refusal:
            user.execute(f"select sublet.{call}")
        assert refusal.value.sqlstate == "SB002"
        assert story in str(refusal.value.diag.message_primary)
        assert remedy in str(refusal.value.diag.message_hint)
        assert len(str(refusal.value.diag.message_primary)) < 250
        user.rollback()
    assert move_all(conn) == 0


TOPICS = ["a", "/", "a//b", "/a/", "a$b", "$", "grüße/东京", "+", "a+b", "#", " "]
TOPICS += ["x" * 4096, "/" * 127, "x" * 65536, "é" * 32767]


def test_topics_are_judged_as_by_every_publisher(user: Connection) -> None:
    by_sql = [_accepts(lambda: publish(user, topic, "v"), user) for topic in TOPICS]  # noqa: B023
    assert by_sql == [_accepts(lambda: check_topic(topic)) for topic in TOPICS]  # noqa: B023


@pytest.mark.parametrize("part", ["value", "key"])
def test_sizes_are_judged_as_by_every_publisher(conn: Connection, user: Connection, part: str) -> None:
    """What just fits is moved."""
    for over in (0, 1):
        topic, spare = "grün", MAX_MESSAGE_BYTES - size_of("grün", None, None, None) + over
        given = {name: b"x" * spare if part == name else None for name in ("key", "value")}
        size = size_of(topic, given["key"], given["value"], None)
        call = "select sublet.publish(%b, %b::bytea, %b::bytea)"
        assert _accepts(lambda: user.execute(call, (topic, given["value"], given["key"])), user) == (not over)  # noqa: B023
        assert _accepts(lambda: check_size(size, MAX_MESSAGE_BYTES, "it")) == (not over)  # noqa: B023
        user.commit()
    assert move_all(conn) == 1
    assert read_backlog(conn).rejected == 0


@pytest.mark.conforms("X4")
def test_headers_are_judged_as_by_every_publisher(conn: Connection, user: Connection) -> None:
    """As many as there may be, and as large; a name counts by its bytes, as does what a value decodes to."""
    encoded = "jsonb_build_array(jsonb_build_array('é', jsonb_build_object('base64', encode(%b::bytea, 'base64'))))"
    for over in (0, 1):
        large = b"x" * (MAX_HEADER_BYTES - len("é".encode()) + over)
        many: list[tuple[str, bytes | None]] = [("n", None)] * (MAX_HEADERS + over)
        for headers, given, pairs in (("%s::jsonb", json.dumps(many), many), (encoded, large, [("é", large)])):
            call = f"select sublet.publish('t', 'v', headers => {headers})"
            column = {"topic": ["a", "t"], "value": ["v", "v"], "headers": [None, pairs]}
            assert _accepts(lambda: user.execute(call, (given,)), user) == (not over)  # noqa: B023
            assert _accepts(lambda: as_headers(pairs)) == (not over)  # noqa: B023
            assert _accepts(lambda: to_record_batches(column)) == (not over)  # noqa: B023
        user.commit()
    assert move_all(conn) == 2
    assert read_backlog(conn).rejected == 0


def test_the_largest_that_is_fetched_is_entire(
    conn: Connection, user: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(user, "t", "value", "key", json.dumps([["name", "x"]]))
    user.commit()
    sizes = ("octet_length(topic)", "octet_length(key)", "octet_length(value)", "pg_column_size(headers)")
    ((size,),) = conn.execute(f"select {' + '.join(sizes)} from outbox").fetchall()
    for module in (outbox_mover, outbox_conversion):
        monkeypatch.setattr(module, "FETCHED_BYTES", size)
    moved = OutboxMover(conn, free).move(bytes=size)
    assert (moved.messages, moved.has_more) == (1, True), "so many bytes are as many as are moved at once"
    (message,) = in_one_stream(conn)
    headers = [{"key": "name", "value": b"x"}]
    assert (message["key"], message["value"], message["headers"]) == (b"key", b"value", headers)


def test_the_first_and_the_last_moment_are_times(conn: Connection, user: Connection) -> None:
    reshard(conn, "default", 1)
    user.execute("set timezone = 'UTC'")
    moments = [datetime.min.replace(tzinfo=UTC), datetime.max.replace(tzinfo=UTC)]
    for moment in moments:
        publish(user, "a", "v", None, None, moment.replace(tzinfo=None).isoformat(" ") + "+00")
    with pytest.raises(psycopg.Error, match="years 1 to 9999"), user.transaction():
        publish(user, "a", "v", None, None, "10000-01-01 00:00:00+00")
    user.commit()
    assert move_all(conn) == 2
    assert [message["timestamp"] for message in in_one_stream(conn)] == moments


def test_a_role_that_may_only_execute_may_publish(conn: Connection, user: Connection) -> None:
    conn.execute("drop role if exists a_publisher")
    conn.execute("create role a_publisher")
    conn.execute("grant usage on schema sublet to a_publisher")
    user.execute("set role a_publisher")
    user.commit()
    with pytest.raises(psycopg.errors.InsufficientPrivilege):
        publish(user, "a", "v")
    user.rollback()
    conn.execute("grant execute on function sublet.publish(text, text, text, jsonb, timestamptz) to a_publisher")
    publish(user, "a", "v")
    user.commit()
    for forbidden in ("select * from sublet.outbox", "insert into sublet.outbox (topic) values ('a')"):
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            user.execute(forbidden)
        user.rollback()
    user.execute("reset role")
    user.commit()
    assert move_all(conn) == 1
    conn.execute("drop owned by a_publisher")
    conn.execute("drop role a_publisher")


def test_a_callers_temporary_tables_do_not_shadow_ours(conn: Connection, user: Connection) -> None:
    user.execute("create temporary table outbox (like sublet.outbox including all)")
    user.execute("create function pg_temp.check_topic(text) returns void language sql as 'select'")
    publish(user, "a", "v")
    with pytest.raises(psycopg.Error, match="wildcards"), user.transaction():
        publish(user, "#", "v")
    user.commit()
    assert move_all(conn) == 1


# --- the relay --------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("W7", "W3")
def test_order_is_that_of_transactions(database: str, conn: Connection) -> None:
    reshard(conn, "default", 4)
    relay = OutboxMover(conn, free)
    with psycopg.connect(database) as one, psycopg.connect(database) as two:
        for number in range(60):
            writer = one if number % 2 else two
            writer.execute(
                "select sublet.publish('t', (%s * 5 + i)::text, (i %% 2)::text) from generate_series(0, 4) i", (number,)
            )
            writer.commit()
            if number % 7 == 0:
                relay.move(rows=13)
    move_all(conn, relay, rows=13)
    check_order(conn)
    assert len(values(conn)) == 300


def test_order_is_that_of_numbers_not_of_their_digits(conn: Connection) -> None:
    reshard(conn, "default", 1)
    for xact in (998, 999, 1000, 99, 100):
        conn.execute("insert into outbox (xact, topic, value) values (%s::text::xid8, 't', %s)", (xact, b"%d" % xact))
    assert move_all(conn) == 5
    found = [message["value"] for message in in_one_stream(conn)]
    assert found == [b"99", b"100", b"998", b"999", b"1000"]


@pytest.mark.conforms("W7")
def test_a_long_transaction_keeps_nobody_waiting(database: str, conn: Connection, user: Connection) -> None:
    """Its messages come when it commits."""
    relay = OutboxMover(conn, free)
    publish(user, "a", "first of the long")
    with psycopg.connect(database) as quick, psycopg.connect(database) as middle:
        publish(middle, "a", "of the middle")
        for number in range(3):
            publish(quick, "a", f"quick {number}")
            quick.commit()
            assert relay.move().messages == 1
            assert relay.move() == NOTHING
        publish(user, "a", "second of the long")
        middle.commit()
        assert relay.move().messages == 1
        assert relay.move() == NOTHING
        user.commit()
        publish(quick, "a", "after all")
        quick.commit()
        assert relay.move().messages == 3
    assert len(values(conn)) == 7


def test_a_look_does_not_walk_over_what_was_moved(database: str, conn: Connection, user: Connection) -> None:
    """Postgres may not forget the deleted rows before that transaction ends, nor who looks skip them."""
    user.execute("set transaction isolation level repeatable read")
    user.execute("select from sublet.outbox")
    relay = OutboxMover(conn, free)
    conn.execute("select publish('t', 'v') from generate_series(1, 20000)")
    move_all(conn, relay)
    assert _pages_read(conn, relay) < 50
    assert _pages_read(conn, OutboxMover(conn, free)) > 100, "there is something to walk over"


def test_no_plan_for_an_empty_outbox_reads_a_long_one(conn: Connection) -> None:
    """A query plan, that is: it must not stay with reading the whole table."""
    relay = OutboxMover(conn, free)
    for _ in range(8):
        publish(conn, "t", "v")
        assert relay.move().messages == 1
        assert relay.move() == NOTHING
    conn.execute("select publish('t', 'v') from generate_series(1, 3000)")
    move_all(conn, relay, rows=300)
    conn.execute("select pg_stat_force_next_flush()")
    scans = conn.execute("select seq_scan, idx_scan > 20 from pg_stat_user_tables where relname = 'outbox'").fetchone()
    assert scans == (0, True)


def test_a_row_under_a_number_to_come_hides_none(conn: Connection) -> None:
    relay = OutboxMover(conn, free)
    conn.execute("insert into outbox (xact, topic, value) values ('9000000000', 't', 'restored')")
    assert relay.move().messages == 1
    publish(conn, "t", "new")
    assert relay.move().messages == 1


@pytest.mark.conforms("W7")
def test_a_bad_row_is_set_aside_and_stops_no_other(conn: Connection) -> None:
    publish(conn, "t", "first")
    bad = {
        "topic 'a/#': a topic has no wildcards": "('a/#', 'v', null, null)",
        "takes 1048609 bytes and the limit is 1048576": "('t', repeat('x', 1048576)::bytea, null, null)",
        "takes 3000001 bytes and the limit is 2097152": "('t', repeat('x', 3000000)::bytea, null, null)",
        "not as publish() writes them": "('t', 'v', '{\"ab\": \"c\"}', null)",
        "headers '[\"ab\"]': not as": "('t', 'v', '[\"ab\"]', null)",
        "headers '[[\"a\", {}]]'": "('t', 'v', '[[\"a\", {}]]', null)",
        "outside of the years 1 to 9999": "('t', 'v', null, 'infinity')",
        "years 1 to 9999": "('t', 'v', null, '-infinity')",
    }
    for row in bad.values():
        conn.execute(f'insert into outbox (topic, value, headers, "timestamp") values {row}')
    publish(conn, "t", "last")
    moved = [OutboxMover(conn, free).move() for _ in range(3)]
    assert sum(each.messages for each in moved) == 2
    assert values(conn) == [b"first", b"last"]
    reasons = [row[0] for row in conn.execute("select reason from outbox_rejected order by outbox_id")]
    assert reasons == [why for each in moved for why in each.rejected.values()]
    for expected, reason in zip(bad, reasons, strict=True):
        assert expected in reason
    assert read_backlog(conn) == OutboxBacklog(0, None, len(bad))
    retained = conn.execute("select topic, value, \"timestamp\" = 'infinity' from outbox_rejected").fetchall()
    assert retained[0] == ("a/#", b"v", None)


OF_SPACE = "(select {}(g.generation_id) from generation g where g.space_id = stream.space_id)"


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("change", "mend"),
    [
        ("hash_to = 5", f"hash_to = {2**64}"),
        (f"generation_id = {OF_SPACE.format('max')}", f"generation_id = {OF_SPACE.format('min')}"),
    ],
    ids=["hashes", "partition"],
)
def test_a_malformed_space_delays_no_other(conn: Connection, change: str, mend: str) -> None:
    """Its streams have not each hash, or no partition."""
    space_id = create_space(conn, "eu", "eu/#", shards=1).space_id
    conn.execute("insert into generation (space_id, ordinal, filter) values (%s, 1, 'eu/#')", (space_id,))
    conn.execute(f"update stream set {change} where space_id = {space_id}".encode())
    for topic in ("us/1", "eu/1", "us/2"):
        publish(conn, topic, topic)
    publish(conn, "eu/1", "second")
    moved = OutboxMover(conn, free).move()
    assert values(conn) == [b"us/1", b"us/2"]
    assert len(moved.rejected) == 2
    for reason in moved.rejected.values():
        assert reason.startswith("space 'eu': the open streams do not tile the ring")
    PublisherRoutingTable.load(conn).check_timeline(conn, "p")  # the stream is no other
    conn.execute(f"update stream set {mend} where space_id = {space_id}".encode())
    page = (ROOT / "docs" / "sql-publishing.md").read_text()
    (again,) = re.findall(r"^with gone as .*?;", page, re.DOTALL | re.MULTILINE)
    conn.execute(again.encode())
    OutboxMover(conn, free).move()
    stored = [message for found in everything(conn).values() for message in found if message["topic"] == "eu/1"]
    assert [message["value"] for message in stored] == [b"eu/1", b"second"], "in their order"
    assert read_backlog(conn).rejected == 0


def test_a_locked_row_is_moved_when_it_is_free(
    conn: Connection, user: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_mover, "LOCKED_S", 2.0)
    held = publish(conn, "t", "held")
    publish(conn, "t", "free")
    user.execute("delete from sublet.outbox where outbox_id = %s", (held,))
    relay = OutboxMover(conn, free)
    assert [relay.move().messages, relay.move().messages, relay.move().messages] == [0, 1, 0]
    user.rollback()
    assert relay.move().messages == 1
    assert values(conn) == [b"free", b"held"]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ("delete from outbox", [b"two"]),
        ("update outbox set value = 'new'", [b"new", b"two"]),
        ("update outbox set outbox_id = default", [b"one", b"two"]),
    ],
    ids=["deleted", "changed", "replaced"],
)
def test_a_row_changed_after_it_was_read_is_read_again(
    database: str, conn: Connection, change: LiteralString, found: list[bytes]
) -> None:
    publish(conn, "t", "one")
    publish(conn, "t", "two")

    def meanwhile(_: object) -> None:
        with connect(database) as other:
            other.execute(f"{change} where value = 'one'")

    assert OutboxMover(conn, meanwhile).move() == NOTHING
    assert move_all(conn) == len(found)
    assert values(conn) == found


@pytest.mark.conforms("W7", "E13")
def test_a_deposed_relay_moves_nothing(conn: Connection) -> None:
    publish(conn, "t", "v")
    old = leadership.claim(conn, MAINTENANCE, HERE, 0.0, None).term
    term = leadership.claim(conn, MAINTENANCE, HERE, 60.0, None).term
    with pytest.raises(StaleTerm):
        OutboxMover(conn, lambda inside: leadership.check_term(inside, MAINTENANCE, old)).move()
    assert read_backlog(conn).messages == 1
    assert OutboxMover(conn, lambda inside: leadership.check_term(inside, MAINTENANCE, term)).move().messages == 1


def test_readers_are_notified_of_what_was_moved(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And operators of what was not, in some lines."""
    reported: list[ObjectChange] = []
    monkeypatch.setattr(NotificationPublisher, "publish", lambda _, changes: reported.extend(changes))
    conn.execute("insert into outbox (topic, value) select 'a/#', 'v' from generate_series(1, 7)")
    term = leadership.claim(conn, MAINTENANCE, HERE, 60.0, None).term
    keeper = OutboxRelay(database, lambda: term)
    keeper.start()
    try:
        conn.execute("select publish('t', 'v', 'k' || i) from generate_series(1, 40) i")
        eventually(lambda: read_backlog(conn).messages == 0)
        heads = conn.execute("select stream_id, head from stream where head > 0").fetchall()
        eventually(lambda: reported == [stream_change(stream, head, closed=False) for stream, head in sorted(heads)])
    finally:
        keeper.stop()
    assert not keeper.is_alive()
    assert [caplog.text.count(text) for text in ("moved to outbox_rejected: ", "rejected: message_count=2")] == [5, 1]


@pytest.mark.conforms("W7", "W3")
def test_what_a_closed_stream_refuses_its_heirs_take(database: str, conn: Connection) -> None:
    changes: list[Callable[[Connection], object]] = [
        lambda other: rollover(other, "default"),
        lambda other: reshard(other, "default", 3),
        lambda other: create_space(other, "eu", "eu/#", shards=2),
        lambda other: alter_space(other, "eu", filter="+/1"),
    ]
    due: list[Callable[[Connection], object]] = []

    def meanwhile(_: object) -> None:
        with connect(database) as other:
            while due:
                due.pop()(other)

    relay, publishing = OutboxMover(conn, meanwhile), "select publish('eu/' || i %% 3, %s || '', 'k' || i)"
    for number, change in enumerate(changes):
        conn.execute(f"{publishing} from generate_series(1, 50) i", (str(number),))
        due.append(change)
        assert relay.move() == NOTHING, "nothing of it: the streams are not what they were"
        moved = relay.move()
        assert moved.messages == 50
        heads = dict(conn.execute("select stream_id, head from stream where state = 'open' and head > 0").fetchall())
        assert moved.heads == heads
    assert all(numbers == [b"0", b"1", b"2", b"3"] for numbers in by_key(conn).values())


@pytest.mark.conforms("W7", "W2")
def test_a_cut_connection_loses_and_doubles_nothing(database: str, conn: Connection) -> None:
    chance, stop = random.Random(7), threading.Event()

    def relay() -> None:
        while not stop.is_set():
            with suppress(Exception), connect(proxy.url) as connection:
                mover = OutboxMover(connection, free)
                while not stop.is_set():
                    mover.move(rows=70)

    with PostgresProxy(database) as proxy:
        mover = threading.Thread(target=relay)
        mover.start()
        try:
            for number in range(60):
                text = "select publish('t', i::text, (i %% 5)::text) from generate_series(%s::int, %s) i"
                conn.execute(text, (number * 50, number * 50 + 49))
                if number % 3 == 0:
                    proxy.cut_commit(resume=True)
                if number % 4 == 0:
                    stop.wait(chance.uniform(0, 0.02))
                    proxy.hang_up()
        finally:
            stop.set()
            proxy.resume()
            mover.join(30)
    move_all(conn)
    assert sorted(map(int, values(conn))) == list(range(3000))
    check_order(conn)


def _accepts(publishing: Callable[[], object], user: Connection | None = None) -> bool:
    """Return whether it raises nothing; if it does, roll back to the savepoint before it."""
    try:
        with nullcontext() if user is None else user.transaction():
            publishing()
    except (UsageError, psycopg.Error):
        return False
    return True


def _pages_read(conn: Connection, relay: OutboxMover) -> int:
    """Return how many pages of the outbox and its indexes a poll of the relay reads."""

    def so_far() -> int:
        conn.execute("select pg_stat_force_next_flush()")
        counted = "heap_blks_read + heap_blks_hit + idx_blks_read + idx_blks_hit"
        row = conn.execute(f"select {counted} from pg_statio_user_tables where relname = 'outbox'").fetchone()
        assert row is not None
        return int(row[0])

    before = so_far()
    assert relay.move() == NOTHING
    return so_far() - before
