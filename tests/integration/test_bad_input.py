"""Bad input in Python: an error by name with value, rule and a hint, before anything is written or joined.

The command line's half is `test_cli_errors.py`; `docs/guarantees.md` says which test is for what.
"""

from __future__ import annotations

import asyncio
import math
import os
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
from sublet_protocol.domain.limits import MAX_ID_BYTES
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.bootstrap.migrate import current_version, migrate
from sublet_storage.db.connect import SCHEMA_VERSION, connect
from sublet_storage.readers.tail import Tail
from sublet_storage.spaces.space_changes import create_space
from tests.integration.cli_kit import a_shell

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
    """Raises this error, whose text has all of that, and no password."""
    with pytest.raises(error) as raised:
        yield
    assert type(raised.value) is error
    assert [text for text in reported if text not in str(raised.value)] == []
    assert "s3cret-pw" not in str(raised.value)


def stored(url: str) -> list[str]:
    with connect(url) as conn:
        pages = Tail(conn, TopicFilter.parse("#"), "earliest").pages()
        return [value.decode() for page in pages for value in page.column("value").to_pylist()]


# --- topics, values, spaces -----------------------------------------------------------------------------------------

LATEST = datetime.max.replace(tzinfo=timezone(timedelta(hours=-12)))
BAD_MESSAGES: list[tuple[dict[str, Any], type[SubletError], str]] = [
    ({"topic": "orders/+/created"}, InvalidTopic, "'orders/+/created': a topic has no wildcards"),
    ({"topic": "$SYS/load"}, InvalidTopic, "'$SYS/load': what begins with $ is reserved"),
    ({"topic": ["a"]}, InvalidTopic, "topic ['a']: a topic is text"),
    ({"value": 5}, UsageError, "value of type int"),
    ({"value": b"x" * 1048599}, ValueTooLarge, "takes 1048632 bytes and the limit is 1048576. Publish a reference"),
    ({"key": 5}, UsageError, "key of type int"),
    ({"headers": [("a",)]}, UsageError, "header ('a',)"),
    ({"headers": {"a\ud800": b"x"}}, UsageError, "header name 'a\\ud800' holds a lone surrogate"),
    ({"timestamp": True}, UsageError, "timestamp True of type bool"),
    ({"timestamp": LATEST}, UsageError, "outside of the years 1 to 9999"),
]
BAD_COLUMNS: list[tuple[dict[str, Any], type[SubletError], str]] = [
    ({"topic": ["a", "orders/+"]}, InvalidTopic, "a topic has no wildcards"),
    ({"value": [b"good row of a bad batch", b"x" * 1048599]}, ValueTooLarge, "message 1 of the batch"),
    ({"headers": [5]}, UsageError, "headers"),
    ({"value": np.array([1])}, UsageError, "value"),
    ({"topic": pa.array([b"\xff"]).view(pa.string())}, UsageError, "topic"),
]


def test_bad_messages_are_refused_alone(database: str) -> None:
    """At the call, and nothing beside them is lost."""
    with sublet.Publisher(database, linger_ms=50) as publisher:
        publisher.publish("a", b"before", timestamp=np.int64(5))  # type: ignore[arg-type]
        for bad, error, reported in BAD_MESSAGES:
            with refused(error, reported):
                publisher.publish(**{"topic": "a", "value": b"bad", **bad})
        for bad, error, reported in BAD_COLUMNS:
            with refused(error, reported):
                publisher.publish_batch({"topic": "a", "value": [b"bad", b"bad"], **bad})
        publisher.publish("a", b"after")
    assert stored(database) == ["before", "after"]


def test_an_async_publisher_refuses_a_bad_topic_alone(database: str) -> None:
    async def publish() -> None:
        async with sublet.AsyncPublisher(database) as publisher:
            with refused(InvalidTopic, "'orders/+'", "a topic has no wildcards"):
                await publisher.publish("orders/+", b"bad")
            await publisher.publish("orders/eu", b"good")

    asyncio.run(publish())
    assert stored(database) == ["good"]


def test_an_unknown_space_lists_which_there_are(database: str) -> None:
    with connect(database) as conn:
        create_space(conn, "orders", "orders/#", shards=1)
    with refused(UnknownSpace, "'odrers'", "There are: default, orders"):
        sublet.Publisher(database, space="odrers")


# --- groups and filters ---------------------------------------------------------------------------------------------


@pytest.mark.conforms("E24")
def test_a_malformed_group_is_not_joined(database: str) -> None:
    """Which are malformed is in `tests/unit/test_topics.py`."""
    for subscription, error, rule in (
        ("$share//orders/#", InvalidSubscription, "a group's name is not empty"),
        ("$share/g/orders/#/eu", InvalidFilter, "# stands alone in the last level"),
    ):
        with refused(error, rule):
            sublet.Session(subscription, database)
    with connect(database) as conn:
        assert conn.execute("select from consumer_group where kind <> 'internal'").rowcount == 0


NOWHERE = "postgresql://me@127.0.0.1:1/x"
ADDRESS = "a leader node's address is HOST:PORT, such as 127.0.0.1:7411 or [::1]:7411, with a port from 1 to 65535"


@pytest.mark.parametrize(
    ("setting", "reported"),
    [
        ({"nodes": ["127.0.0.1:7411", "127.0.0.1"]}, f"node '127.0.0.1': {ADDRESS}"),
        ({"nodes": [":7411"]}, f"node ':7411': {ADDRESS}"),
        ({"nodes": ["127.0.0.1:0"]}, f"node '127.0.0.1:0': {ADDRESS}"),
        ({"nodes": ["127.0.0.1:65536"]}, f"node '127.0.0.1:65536': {ADDRESS}"),
        ({"nodes": ["::1:7411"]}, f"node '::1:7411': {ADDRESS}"),
        ({"nodes": ["http://127.0.0.1:7411"]}, f"node 'http://127.0.0.1:7411': {ADDRESS}"),
        ({"nodes": [7411]}, f"node 7411: {ADDRESS}"),
        ({"nodes": "127.0.0.1:7411"}, "nodes is the text '127.0.0.1:7411'"),
        ({"nodes": 5}, "nodes is 5: it must be a list of addresses, such as ['127.0.0.1:7411']."),
        ({"name": ""}, "name is '': a session's name is not empty. Give a text such as billing-1"),
        ({"name": 5}, "name is 5: a session's name is a text. Give a text such as billing-1"),
        ({"name": "a\0b"}, "name is 'a\\x00b': all of its characters must be printable. Remove the others."),
        ({"name": "n" * (MAX_ID_BYTES + 1)}, "it has 256 bytes of UTF-8, and at most 255 are allowed. Shorten it."),
        ({"weight": "1"}, "weight is '1': it is a number. 1 is what everybody has"),
        ({"weight": float("nan")}, "weight is nan: it must be from 0.001 to 10000."),
        ({"starting_position": 5}, "starting_position is 5: it is a text: latest, earliest, offset:N, or a time"),
        ({"max_batch_bytes": True}, "max_batch_bytes is True: it is a whole number of bytes."),
        ({"max_batch_bytes": 0}, "max_batch_bytes is 0: it must be positive, and at most"),
        ({"max_batch_bytes": 1 << 80}, f"max_batch_bytes is {1 << 80}: it must be positive, and at most"),
        ({"auto_ack": "no"}, "auto_ack is 'no': it is True or False."),
        ({"whole_epochs": 1}, "True or False"),
        ({"on_epochs_consumed": "later"}, "Give a function"),
        ({"settings": {}}, "settings is {}: it is a BorrowerSettings. Leave it out for those of the environment."),
        ({"transport": 1}, "transport is 1: it is 'database' or 'nodes'."),
        ({"transport": "nodes"}, "transport 'nodes' without nodes: where they are is not looked up in a database."),
        ({"transport": "nodes", "nodes": ["127.0.0.1:1"]}, "transport 'nodes' and url: one of them is enough."),
    ],
    ids=ascii,
)
def test_a_bad_setting_is_refused_before_opening(setting: dict[str, Any], reported: str) -> None:
    with refused(InvalidSetting, reported):
        sublet.Session(GROUP, NOWHERE, **setting)


def test_an_async_session_refuses_a_bad_setting() -> None:
    with refused(InvalidSetting, "weight is None: it is a number."):
        asyncio.run(_opened(sublet.AsyncSession(GROUP, NOWHERE, weight=None)))


@pytest.mark.parametrize("opens", [sublet.Session, sublet.AsyncSession])
def test_urls_and_subscriptions_are_text(opens: Callable[..., object]) -> None:
    with refused(InvalidSubscription, "subscription b'$share/g/#': it is a text, $share/GROUP/FILTER"):
        opens(b"$share/g/#", NOWHERE)
    for url in (5, b"postgresql://me:s3cret-pw@db/x"):
        with refused(InvalidSetting, f"url of type {type(url).__name__}: it is a text such as postgresql://USER@HOST/"):
            sublet.Session(GROUP, url)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [5, b"x", "a\0b", [1]], ids=ascii)
def test_a_data_directory_is_a_path(given: Any) -> None:
    with refused(InvalidSetting, f"data_dir {given!r}: it is the path of a directory, or left out."):
        sublet.connect(data_dir=given)
    with refused(InvalidSetting, "url of type int: it is a text such as postgresql://USER@HOST/DATABASE, or left out."):
        sublet.connect(5)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [None, 5, {"127.0.0.1:7411"}], ids=ascii)
def test_a_feeds_nodes_and_filter_are_text(given: Any) -> None:
    with refused(InvalidSetting, f"nodes {given!r}: give a list of addresses, such as ['127.0.0.1:7411']."):
        sublet.Feed(given)
    with (
        sublet.Feed("127.0.0.1:1") as feed,
        refused(InvalidFilter, f"filter {given!r}: it is a text, such as orders/#."),
    ):
        feed.history(given)


NO_TIMEOUT = "timeout_s nan: it is a number of seconds. Leave it out to wait as long as it takes."


def test_a_timeout_that_is_none_changes_nothing(database: str) -> None:
    """`poll` and `wait` waited for ever."""
    with sublet.Session(GROUP, database) as session, sublet.Publisher(database) as publisher:
        calls = session.poll, session.wait, publisher.close, publisher.flush, publisher.publish("a", b"1").result
        for call in calls:
            with refused(InvalidSetting, NO_TIMEOUT):
                call(math.nan)
        publisher.publish("a", b"2").result(math.inf)
        publisher.flush(math.inf)
        publisher.close(math.inf)
        with refused(UsageError, "'b' is no batch: name the session's batches, one after another."):
            session.transaction("b").__enter__()  # type: ignore[arg-type]
    assert stored(database) == ["1", "2"]


def test_an_event_loop_checks_timeouts_too(database: str) -> None:
    async def poll_and_wait() -> None:
        async with sublet.AsyncSession(GROUP, database) as session:
            for call in (session.poll, session.wait):
                with refused(InvalidSetting, NO_TIMEOUT):
                    await call(math.nan)

    asyncio.run(poll_and_wait())


# --- the database ---------------------------------------------------------------------------------------------------


@every_door
def test_an_unusable_url_is_shown_without_its_password(opens: Opener) -> None:
    for url, error, reported in (
        ("postgresql://me:s3cret-pw@db:port/x", InvalidSetting, "is malformed"),
        ("postgresql://me:s3cret-pw@db/x?nonsense=1", InvalidSetting, "Write it as postgresql://"),
        ("postgresql://me:s3cret-pw@127.0.0.1:1/x", DatabaseUnreachable, "cannot connect to me@127.0.0.1:1/x: "),
    ):
        with refused(error, reported):
            opens(url)


@every_door
def test_another_schema_version_is_refused(database: str, opens: Opener) -> None:
    with connect(database) as conn:
        for change, reported in (
            ("update alembic_version set version_num = '0003', compatible_from = null", "of before the first release"),
            ("update alembic_version set version_num = '9999'", "newer than this program's {}. Upgrade sublet here"),
            ("drop table alembic_version", "has no sublet tables, this program needs version {}. Run `sublet migrate`"),
        ):
            conn.execute(change)
            with refused(SchemaMismatch, reported.format(SCHEMA_VERSION)):
                opens(database)
        assert conn.execute("select to_regclass('alembic_version')").fetchone() == (None,)
        assert conn.execute("select count(*) from consumer_group").fetchone() == (0,)


def test_only_a_database_in_utf_8_gets_tables(empty_database: str) -> None:
    for encoding in ("SQL_ASCII", "LATIN1"):
        with connect(empty_database, own_search_path=False) as conn:
            conn.execute(f"create database other encoding '{encoding}' locale 'C' template template0")
        try:
            other = make_conninfo(empty_database, dbname="other")
            said = f"'other' has the encoding {encoding}", "which takes UTF8", "--encoding=UTF8 other"
            with refused(InvalidSetting, *said):
                migrate(other)
            assert current_version(other) is None
        finally:
            with connect(empty_database, own_search_path=False) as conn:
                conn.execute("drop database other")


@pytest.mark.parametrize("named", ["--data-dir", "SUBLET_DATA_DIR"])
def test_a_closed_data_directory_is_named(monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    with a_closed_directory() as closed:
        remedy = ["chmod o+x"] if os.geteuid() == 0 else []
        with refused(EmbeddedDirectoryUnusable, str(closed), named, *remedy):
            if named == "SUBLET_DATA_DIR":
                monkeypatch.setenv(named, str(closed / "data"))
                sublet.Publisher()
            else:
                sublet.Session(GROUP, data_dir=closed / "data")
        closed.chmod(0o700)
        assert list(closed.iterdir()) == []


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


@pytest.mark.conforms("E30")
def test_another_protocol_version_ends_the_session(database: str) -> None:
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        node = shell.newer_leader("n1")
        with sublet.Session(GROUP, database, nodes=[node.address]) as session:
            versions = f"protocol version {PROTOCOL_VERSION}", str(PROTOCOL_VERSION + 1)
            with refused(SubscriptionEnded, *versions, "same release"):
                session.poll(30)
            assert session.is_closed
        assert node.process.poll() is None


@pytest.mark.conforms("E30")
def test_another_protocol_version_harms_nobody_else(database: str, caplog: pytest.LogCaptureFixture) -> None:
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        good = shell.leader("n1")
        with sublet.Publisher(database) as publisher:
            publisher.publish("a", b"first")
        nodes = [good.address, shell.newer_leader("n2").address]
        refused_by = f"agent refused by node: address={nodes[1]}: "
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
