"""Bad input in Python: an error by name with value, rule and remedy, before anything is written or joined.

The command line's half is `test_cli_errors.py`; `docs/guarantees.md` says which test is for what.
"""

from __future__ import annotations

import asyncio
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

import sublet
from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    EmbeddedDirectoryUnusable,
    InvalidFilter,
    InvalidSetting,
    InvalidSubscription,
    InvalidTopic,
    SchemaMismatch,
    SubletError,
    SubscriptionEnded,
    UnknownSpace,
    UsageError,
    ValueTooLarge,
)
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import MAX_ID, PROTOCOL_VERSION
from sublet_storage.bootstrap.migrate import current_version, migrate
from sublet_storage.db.connect import SCHEMA_VERSION, connect
from sublet_storage.readers.tail import Tail
from sublet_storage.spaces.space_changes import create_space
from tests.integration.cli_kit import Running, a_shell

GROUP = "$share/g/#"
Opener = Callable[[str], Any]

OPENERS: dict[str, Opener] = {
    "Publisher": sublet.Publisher,
    "AsyncPublisher": lambda url: asyncio.run(_opened(sublet.AsyncPublisher(url))),
    "Session": lambda url: sublet.Session(GROUP, url),
    "AsyncSession": lambda url: asyncio.run(_opened(sublet.AsyncSession(GROUP, url))),
    "connect": sublet.connect,
}
every_door = pytest.mark.parametrize("opens", OPENERS.values(), ids=OPENERS.keys())


async def _opened(door: Any) -> None:
    async with door:
        pass


@contextmanager
def refused(error: type[SubletError], *reported: str) -> Iterator[None]:
    """Raises this error, whose text has all of that."""
    with pytest.raises(error) as raised:
        yield
    assert type(raised.value) is error
    for text in reported:
        assert text in str(raised.value)


def stored(url: str) -> list[str]:
    """Every value in the log."""
    with connect(url) as conn:
        pages = Tail(conn, TopicFilter.parse("#"), "earliest").pages()
        return [value.decode() for page in pages for value in page.column("value").to_pylist()]


def groups(url: str) -> int:
    """How many groups there are."""
    with connect(url) as conn:
        row = conn.execute("select count(*) from consumer_group where kind <> 'internal'").fetchone()
        return int(row[0]) if row else 0


# --- topics, values, spaces -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("topic", "rule"),
    [
        ("orders/+/created", "a topic has no wildcards"),
        ("orders/#", "a topic has no wildcards"),
        ("$SYS/load", "what begins with $ is reserved"),
        ("", "is empty"),
    ],
)
def test_a_topic_that_is_none_is_refused_and_nothing_beside_it_is_lost(database: str, topic: str, rule: str) -> None:
    with sublet.Publisher(database) as publisher:
        publisher.publish("orders/eu", b"before")
        with refused(InvalidTopic, repr(topic), rule):
            publisher.publish(topic, b"bad")
        with refused(InvalidTopic, repr(topic), rule):
            publisher.publish_batch({"topic": ["orders/eu", topic], "value": [b"good row of a bad batch", b"bad"]})
        publisher.publish("orders/eu", b"after")
    assert stored(database) == ["before", "after"]


def test_a_topic_that_is_none_is_refused_in_an_async_publisher(database: str) -> None:
    async def publish() -> None:
        async with sublet.AsyncPublisher(database) as publisher:
            with refused(InvalidTopic, "'orders/+'", "a topic has no wildcards"):
                await publisher.publish("orders/+", b"bad")
            await publisher.publish("orders/eu", b"good")

    asyncio.run(publish())
    assert stored(database) == ["good"]


@pytest.mark.parametrize(
    ("bad", "error", "reported"),
    [
        ({"topic": None}, InvalidTopic, "topic None: a topic is text"),
        ({"topic": ["a"]}, InvalidTopic, "topic ['a']: a topic is text"),
        ({"value": 5}, UsageError, "value of type int"),
        ({"key": 5}, UsageError, "key of type int"),
        ({"headers": [("a",)]}, UsageError, "header ('a',)"),
        ({"headers": {"a": 5}}, UsageError, "header 'a' of type int"),
        ({"headers": {"a\ud800": b"x"}}, UsageError, "header name 'a\\ud800' holds a lone surrogate"),
        ({"timestamp": True}, UsageError, "timestamp True of type bool"),
        ({"timestamp": "2020"}, UsageError, "timestamp '2020' of type str"),
        (
            {"timestamp": datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))},
            UsageError,
            "outside of the years 1 to 9999",
        ),
    ],
    ids=ascii,
)
def test_a_bad_argument_is_refused_at_the_call_and_nothing_beside_it_is_lost(
    database: str, bad: dict[str, Any], error: type[SubletError], reported: str
) -> None:
    with sublet.Publisher(database, linger_ms=50) as publisher:
        publisher.publish("a", b"before", timestamp=np.int64(5))  # type: ignore[arg-type]
        with refused(error, reported):
            publisher.publish(**{"topic": "a", "value": b"bad", **bad})
        publisher.publish("a", b"after")
    assert stored(database) == ["before", "after"]


@pytest.mark.parametrize(
    "bad", [{"headers": [5]}, {"value": np.array([1])}, {"topic": pa.array([b"\xff"]).view(pa.string())}], ids=list
)
def test_a_bad_column_is_refused_at_the_call_and_nothing_beside_it_is_lost(database: str, bad: dict[str, Any]) -> None:
    with sublet.Publisher(database) as publisher:
        publisher.publish("a", b"before")
        with pytest.raises(UsageError, match=next(iter(bad))):
            publisher.publish_batch({"topic": "a", "value": [b"bad"], **bad})
        publisher.publish("a", b"after")
    assert stored(database) == ["before", "after"]


def test_a_value_over_the_limit_is_refused_with_the_limit_and_the_others_arrive(database: str) -> None:
    with sublet.Publisher(database) as publisher:
        publisher.publish("a", b"before")
        with refused(ValueTooLarge, "takes 1048632 bytes", "the limit is 1048576", "raise max_message_bytes"):
            publisher.publish("a", b"x" * 1048599)
        with refused(ValueTooLarge, "message 1 of the batch", "1048576"):
            publisher.publish_batch({"topic": "a", "value": [b"good row of a bad batch", b"x" * 1048599]})
        publisher.publish("a", b"after")
    assert stored(database) == ["before", "after"]


def test_an_unknown_space_is_refused_with_those_that_exist(database: str) -> None:
    with connect(database) as conn:
        create_space(conn, "orders", "orders/#", shards=1)
    with refused(UnknownSpace, "'odrers'", "There are: default, orders"):
        sublet.Publisher(database, space="odrers")
    with (
        sublet.Publisher(database, space="orders") as publisher,
        refused(UsageError, "'mails/1'", "space 'default'", "'orders'"),
    ):
        publisher.publish("mails/1", b"x")
    assert stored(database) == []


# --- groups and filters ---------------------------------------------------------------------------------------------


@pytest.mark.conforms("E24")
@pytest.mark.parametrize(
    ("subscription", "error", "rule"),
    [
        ("orders/#", InvalidSubscription, "$share/GROUP/FILTER"),
        ("$share//orders/#", InvalidSubscription, "a group's name is not empty"),
        ("$share/a+b/orders/#", InvalidSubscription, "a group's name has no /, + or #"),
        (f"$share/{'g' * 256}/a", InvalidSubscription, "at most 255 characters"),
        ("$share/g/orders/#/eu", InvalidFilter, "# stands alone in the last level"),
        ("$share/g/orders+/eu", InvalidFilter, "+ stands alone"),
    ],
)
def test_a_malformed_group_or_filter_is_refused_before_anything_is_joined(
    database: str, subscription: str, error: type[SubletError], rule: str
) -> None:
    with refused(error, rule):
        sublet.Session(subscription, database)
    assert groups(database) == 0


@pytest.mark.parametrize(
    "nodes",
    [
        ["foo"],
        ["127.0.0.1:7411", "127.0.0.1"],
        ["127.0.0.1:"],
        [":7411"],
        ["127.0.0.1:0"],
        ["127.0.0.1:65536"],
        ["127.0.0.1:http"],
        ["::1:7411"],
        ["http://127.0.0.1:7411"],
        [""],
        [7411],
    ],
    ids=str,
)
def test_a_malformed_address_of_a_node_is_refused_before_anything_is_opened(nodes: list[str]) -> None:
    reported = (f"node {nodes[-1]!r}: a leader node's address is HOST:PORT", "such as 127.0.0.1:7411 or [::1]:7411")
    with refused(InvalidSetting, *reported, "with a port from 1 to 65535", "looked up in the database"):
        sublet.Session(GROUP, "postgresql://me@127.0.0.1:1/x", nodes=nodes)
    with refused(InvalidSetting, *reported):
        asyncio.run(_opened(sublet.AsyncSession(GROUP, "postgresql://me@127.0.0.1:1/x", nodes=nodes)))


def test_an_address_alone_is_no_list_of_nodes() -> None:
    with refused(InvalidSetting, "nodes is the text '127.0.0.1:7411'", "such as ['127.0.0.1:7411']"):
        sublet.Session(GROUP, "postgresql://me@127.0.0.1:1/x", nodes="127.0.0.1:7411")


@pytest.mark.parametrize(
    ("setting", "reported"),
    [
        ({"name": ""}, "name is '': a session's name is not empty. Give a text such as billing-1"),
        ({"name": 5}, "name is 5: a session's name is a text. Give a text such as billing-1"),
        ({"name": "a\0b"}, "name is 'a\\x00b': the character NUL and lone surrogates are not allowed. Remove them."),
        ({"name": "\ud800"}, "name is '\\ud800': the character NUL and lone surrogates are not allowed. Remove them."),
        ({"name": "n" * (MAX_ID + 1)}, "it has 513 characters, and at most 512 are allowed. Shorten it."),
        ({"weight": "1"}, "weight is '1': it is a number. 1 is what everybody has"),
        ({"weight": True}, "weight is True: it is a number. 1 is what everybody has"),
        ({"weight": float("nan")}, "weight is nan: it must be above 0 and at most"),
        ({"weight": None}, "weight is None: it is a number."),
        ({"starting_position": 5}, "starting_position is 5: it is a text: latest, earliest, offset:N, or a time"),
        ({"max_batch_bytes": "1"}, "max_batch_bytes is '1': it is a whole number of bytes."),
        ({"max_batch_bytes": 1.5}, "max_batch_bytes is 1.5: it is a whole number of bytes."),
        ({"max_batch_bytes": True}, "max_batch_bytes is True: it is a whole number of bytes."),
        ({"max_batch_bytes": 0}, "max_batch_bytes is 0: it must be positive, and at most"),
        (
            {"max_batch_bytes": 1 << 80},
            "max_batch_bytes is 1208925819614629174706176: it must be positive, and at most",
        ),
        ({"nodes": 5}, "nodes is 5: it must be a list of addresses, such as ['127.0.0.1:7411']."),
        ({"auto_ack": "no"}, "auto_ack is 'no': it is True or False."),
        ({"transport": 1}, "transport is 1: it is 'database' or 'nodes'."),
        (
            {"transport": "nodes"},
            "transport 'nodes' without nodes: where they are is not looked up in a database. Give",
        ),
        (
            {"transport": "nodes", "nodes": ["127.0.0.1:1"]},
            "transport 'nodes' and url: one of them is enough. Leave one",
        ),
    ],
    ids=ascii,
)
def test_what_no_node_would_take_is_refused_before_anything_is_opened(setting: dict[str, Any], reported: str) -> None:
    with refused(InvalidSetting, reported):
        sublet.Session(GROUP, "postgresql://me@127.0.0.1:1/x", **setting)
    with refused(InvalidSetting, reported):
        asyncio.run(_opened(sublet.AsyncSession(GROUP, "postgresql://me@127.0.0.1:1/x", **setting)))


@pytest.mark.parametrize("url", [5, b"postgresql://me:s3cret-pw@db/x"], ids=["number", "bytes"])
def test_a_url_that_is_no_text_is_refused_and_not_shown(url: Any) -> None:
    with refused(InvalidSetting, f"url of type {type(url).__name__}: it is a text such as postgresql://USER@HOST/"):
        sublet.Session(GROUP, url)


@pytest.mark.parametrize("subscription", [5, None, b"$share/g/#"], ids=repr)
def test_a_subscription_that_is_no_text_is_refused(subscription: Any) -> None:
    with refused(InvalidSubscription, f"subscription {subscription!r}: it is a text, $share/GROUP/FILTER"):
        sublet.Session(subscription, "postgresql://me@127.0.0.1:1/x")
    with refused(InvalidSubscription, f"subscription {subscription!r}: it is a text, $share/GROUP/FILTER"):
        sublet.AsyncSession(subscription)


# --- the database ---------------------------------------------------------------------------------------------------


@every_door
def test_a_malformed_url_is_refused_without_its_password(opens: Opener) -> None:
    for url in ("postgresql://me:s3cret-pw@db:port/x", "postgresql://me:s3cret-pw@db/x?nonsense=1"):
        with pytest.raises(InvalidSetting) as raised:
            opens(url)
        assert url.replace("s3cret-pw", "***") in str(raised.value)
        assert "is malformed" in str(raised.value)
        assert "Write it as postgresql://" in str(raised.value)
        assert "s3cret-pw" not in str(raised.value)


@every_door
def test_a_database_that_cannot_be_reached_is_named_without_its_password(opens: Opener) -> None:
    with pytest.raises(DatabaseUnreachable) as raised:
        opens("postgresql://me:s3cret-pw@127.0.0.1:1/x")
    assert "cannot connect to postgresql://me:***@127.0.0.1:1/x" in str(raised.value)
    assert "Start Postgres there, or correct the URL" in str(raised.value)
    assert "s3cret-pw" not in str(raised.value)


@every_door
@pytest.mark.parametrize(
    ("version", "reported"),
    [
        (None, "has no sublet tables, this program needs version 0001. Run `sublet migrate`"),
        ("0003", "is at version 0003, of before the first release, 0001: nothing leads from it to this"),
        ("9999", "is at version 9999, newer than this program's 0001. Upgrade sublet here"),
    ],
)
def test_a_database_of_another_version_is_refused_and_not_changed(
    database: str, opens: Opener, version: str | None, reported: str
) -> None:
    with connect(database) as conn:
        conn.execute(
            "drop table alembic_version"
            if version is None
            else f"update alembic_version set version_num = '{version}', compatible_from = null"
        )
    with refused(SchemaMismatch, reported.replace("0001", SCHEMA_VERSION)):
        opens(database)
    with connect(database) as conn:
        row = conn.execute("select to_regclass('alembic_version') is null").fetchone()
        assert row == (version is None,)
        assert conn.execute("select count(*) from consumer_group").fetchone() == (0,)


def test_a_database_that_is_not_in_utf_8_gets_no_tables(empty_database: str) -> None:
    for encoding in ("SQL_ASCII", "LATIN1"):
        with connect(empty_database, own_search_path=False) as conn:
            conn.execute(f"create database other encoding '{encoding}' locale 'C' template template0")
        try:
            other = make_conninfo(empty_database, dbname="other")
            with refused(
                InvalidSetting, f"'other' has the encoding {encoding}", "which takes UTF8", "--encoding=UTF8 other"
            ):
                migrate(other)
            assert current_version(other) is None
        finally:
            with connect(empty_database, own_search_path=False) as conn:
                conn.execute("drop database other")


@pytest.mark.parametrize(
    "opens",
    [lambda directory: sublet.connect(data_dir=directory), lambda directory: sublet.Session(GROUP, data_dir=directory)],
    ids=["connect", "Session"],
)
def test_a_data_directory_that_the_servers_user_cannot_enter_is_named(opens: Callable[[Path], Any]) -> None:
    with a_closed_directory() as closed:
        with refused(EmbeddedDirectoryUnusable, str(closed), "--data-dir"):
            opens(closed / "data")
        closed.chmod(0o700)
        assert list(closed.iterdir()) == []


def test_a_data_directory_from_the_environment_is_refused_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with a_closed_directory() as closed:
        monkeypatch.setenv("SUBLET_DATA_DIR", str(closed / "data"))
        with refused(EmbeddedDirectoryUnusable, str(closed), "SUBLET_DATA_DIR"):
            sublet.Publisher()


@contextmanager
def a_closed_directory() -> Iterator[Path]:
    """Root's server runs as somebody else, who may not enter what is root's alone; others may not enter this at all."""
    with tempfile.TemporaryDirectory() as made:
        closed = Path(made) / "closed"
        closed.mkdir(mode=0o700)
        Path(made).chmod(0o755)
        if os.geteuid() != 0:
            closed.chmod(0)
        yield closed
        closed.chmod(0o700)


# --- a peer of another version --------------------------------------------------------------------------------------


OTHER_VERSION = (
    "import sublet_protocol.messages.borrower_leader as m, sys; m.PROTOCOL_VERSION += 1; sys.argv[0] = 'sublet'\n"
    "from sublet.cli import main\nmain()"
)
"""The command line of a release that speaks another protocol version."""


def address_of(node: Running) -> str:
    """Where it serves, once it does."""
    node.says("serves on")
    (address,) = re.findall(r"127\.0\.0\.1:\d+", node.err)
    return str(address)


@pytest.mark.conforms("E30")
def test_a_node_of_another_protocol_version_ends_the_session_with_both_numbers(database: str) -> None:
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        node = shell.start("leader", "--name", "n1", "--listen", "127.0.0.1:0", program=OTHER_VERSION)
        with sublet.Session(GROUP, database, nodes=[address_of(node)]) as session:
            with pytest.raises(SubscriptionEnded) as raised:
                session.poll(30)
            assert session.is_closed
        for text in (f"protocol version {PROTOCOL_VERSION}", str(PROTOCOL_VERSION + 1), "same release"):
            assert text in str(raised.value)
        assert node.process.poll() is None


@pytest.mark.conforms("E30")
def test_a_node_of_another_protocol_version_disturbs_nobody_whom_another_node_serves(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        good = shell.leader("n1")
        with sublet.Publisher(database) as publisher:
            publisher.publish("a", b"first")
        newer = shell.start("leader", "--name", "n2", "--listen", "127.0.0.1:0", program=OTHER_VERSION)
        nodes = [address_of(good), address_of(newer)]
        refused_by = f"node {nodes[1]} refuses this agent"
        for number in range(10):  # which of the two is asked first depends on group and address
            group = f"$share/g{number}/#"
            with sublet.Session(group, database, nodes=nodes[:1], starting_position="earliest") as opener:
                assert opener.poll(30) is not None, "n1 leads the group"
            caplog.clear()
            with sublet.Session(group, database, nodes=nodes, starting_position="earliest") as session:
                with sublet.Publisher(database) as publisher:
                    publisher.publish("a", b"%d" % number)
                assert session.poll(30) is not None
                assert not session.is_closed
            if refused_by in caplog.text:
                assert caplog.text.count(refused_by) == 1, "it was asked again"
                return
        pytest.fail("the node of another version was never asked")
