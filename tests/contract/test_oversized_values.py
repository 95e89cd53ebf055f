"""A value that Postgres refuses as too large for a row of an index, such as a long filter that does not compress, is an
invalid request: nobody else notices it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from sublet_leader.feed.database_threads import DatabaseThreads
from sublet_leader.node.database_request_executor import execute
from sublet_leader.node.events import FindOrCreateGroup, GroupFoundOrCreated, ReadSessionEpoch, SessionEpochRead
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.limits import MAX_TOPIC_BYTES
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.db.store_connection import Connection, GroupStoreConnection
from sublet_storage.groups.consumer_progress import next_session_epoch
from sublet_storage.groups.model.records import StartingPosition
from tests.contract.group_world import LEASE_S, ONE, SHARE, PostgresWorld
from tests.contract.test_group_postgres import store_backends

pytestmark = pytest.mark.conforms("X4")

TOO_WIDE = """
create function random_text(text) returns text language sql immutable as
  $$ select string_agg(md5(i::text || $1), '') from generate_series(1, 100) i $$;
create index on consumer_group (random_text(name)) where name <> 'other';
create index on session_epoch (random_text(principal));"""


def test_a_filter_that_does_not_compress_is_refused(postgres: PostgresWorld) -> None:
    """One of the same length that does is taken."""
    rng = random.Random(7)
    longest = "".join(chr(rng.randrange(0x20000, 0x2A6D0)) for _ in range(MAX_TOPIC_BYTES // 4))
    with pytest.raises(UsageError, match="too large for Postgres"):
        postgres.store.open_group(Subscription("share", "g", TopicFilter(longest)))
    taken = Subscription("share", "g", TopicFilter("a" * MAX_TOPIC_BYTES))
    assert postgres.store.open_group(taken).subscription == taken


def test_a_value_too_large_keeps_the_connection(postgres: PostgresWorld) -> None:
    """It is shared by all that a node does, which would wait for another one."""
    other = Subscription.parse("$share/other/#")
    postgres.store.open_group(other)
    before = store_backends(postgres)
    postgres.connection.execute(TOO_WIDE)
    for _ in range(7):
        with pytest.raises(UsageError, match="too large for Postgres, and is not stored") as refused:
            postgres.store.open_group(SHARE)
        assert "index" not in str(refused.value)
        assert postgres.store.find_live_group(other) is not None
    postgres.connection.execute("drop function random_text cascade")
    assert postgres.store.open_group(SHARE).subscription == SHARE
    assert store_backends(postgres) == before


def test_what_follows_a_value_too_large_is_prepared(postgres: PostgresWorld) -> None:
    """The driver prepares a statement at the sixth time, also where the server has refused the one before it."""
    postgres.connection.execute(TOO_WIDE)
    store_connection = GroupStoreConnection(lambda: connect(postgres.url))

    def count_groups(connection: Connection) -> Any:
        return connection.execute("select count(*) from consumer_group").fetchone()

    def fail(connection: Connection) -> Any:
        connection.execute("insert into consumer_group (kind, name, filter) values ('share', 'a', '#')")
        return count_groups(connection)

    for times in (0, 5):
        for _ in range(times):
            assert store_connection.write(count_groups) == (0,)
        with pytest.raises(UsageError, match="too large for Postgres"):
            store_connection.write(fail)
    assert store_connection.write(count_groups) == (0,)
    store_connection.close()


def test_a_value_too_large_ends_its_borrower(postgres: PostgresWorld) -> None:
    """It is no lost database, after which the borrower would try again."""
    next_session_epoch(postgres.connection, SHARE, "etl")
    postgres.connection.execute(TOO_WIDE)
    opened = execute(FindOrCreateGroup(SHARE, StartingPosition.LATEST), postgres.store, ONE, LEASE_S)
    assert isinstance(opened, GroupFoundOrCreated)
    assert (opened.group, opened.is_final, "too large" in opened.error) == (None, True, True)
    read = execute(ReadSessionEpoch(SHARE, "etl", "user:a"), postgres.store, ONE, LEASE_S)
    assert isinstance(read, SessionEpochRead)
    assert read.last is not None
    assert "too large" in str(read.denied)


def test_a_call_with_a_value_too_large_is_invalid(postgres: PostgresWorld) -> None:
    """And the thread's connection is used again."""
    postgres.connection.execute(TOO_WIDE)
    threads = DatabaseThreads(postgres.url, 1, "feed")
    try:
        before = threads.submit(lambda conn: conn.info.backend_pid).result()
        group = "insert into consumer_group (kind, name, filter) values ('share', 'a', '#')"
        for _ in range(7):
            with pytest.raises(UsageError, match="too large for Postgres") as refused:
                threads.submit(lambda conn: conn.execute(group)).result()
            assert "index" not in str(refused.value)
        assert threads.submit(lambda conn: conn.info.backend_pid).result() == before
    finally:
        threads.close()
