"""What is promised where the server, the role or the URL asks for another isolation level than ours: the tests that
wait for each other's transactions once more, and a user's own transaction at that level, or with rows of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from urllib.parse import quote

import psycopg
import pytest
from psycopg import sql
from psycopg.rows import dict_row

from sublet_protocol.domain.errors import UsageError
from sublet_storage.db.connect import connect
from sublet_storage.db.user_transaction import user_transaction
from sublet_storage.doctor.checks import Severity, run_checks
from sublet_storage.groups import consumer_progress
from sublet_storage.log.append import BlockAppend, ProducerStamp, append
from sublet_storage.producer.outbox_mover import NOTHING, OutboxMover
from tests.contract.group_world import PostgresWorld
from tests.contract.test_fencing import test_a_position_is_read_after_who_moves_it
from tests.contract.test_group_postgres import (
    test_a_group_made_in_a_rollover_misses_no_stream,
    test_a_lease_that_ends_before_a_commit_is_over,
    test_many_first_subscribers_make_one_group,
    test_what_is_committed_while_a_leader_waits_stays,
)
from tests.integration.log_kit import block
from tests.integration.test_epochs import test_the_frontier_waits_for_an_open_append, world
from tests.integration.test_log import (
    stream,
    test_a_registration_waits_for_an_open_append,
    test_a_rollback_leaves_no_hole,
)

Connection = psycopg.Connection[Any]

# Where they are found, and what they are given.
__all__ = [
    "stream",
    "test_a_group_made_in_a_rollover_misses_no_stream",
    "test_a_lease_that_ends_before_a_commit_is_over",
    "test_a_position_is_read_after_who_moves_it",
    "test_a_registration_waits_for_an_open_append",
    "test_a_rollback_leaves_no_hole",
    "test_many_first_subscribers_make_one_group",
    "test_the_frontier_waits_for_an_open_append",
    "test_what_is_committed_while_a_leader_waits_stays",
    "world",
]

pytestmark = pytest.mark.conforms("W9")
STRICT = ("repeatable read", "serializable")


@pytest.fixture(params=[("server", "repeatable read"), ("role", "serializable"), ("url", "repeatable read")], ids=str)
def database(request: pytest.FixtureRequest, database: str) -> str:
    """A database that gives every session another level than ours, and results in another form."""
    where, level = request.param
    settings = {"default_transaction_isolation": level, "DateStyle": "German", "IntervalStyle": "sql_standard"}
    settings |= {"client_encoding": "LATIN1", "standard_conforming_strings": "off", "extra_float_digits": "-15"}
    if where == "url":
        given = " ".join(f"-c {name}={value.replace(' ', chr(92) + ' ')}" for name, value in settings.items())
        return f"{database}&options={quote(given)}"
    with psycopg.connect(database, autocommit=True) as admin:
        whose = "database {name}" if where == "server" else "role current_user in database {name}"
        for name, value in settings.items():
            change = sql.SQL("alter " + whose + " set {setting} to {value}")
            names = {"name": sql.Identifier(admin.info.dbname), "setting": sql.Identifier(name.lower())}
            admin.execute(change.format(**names, value=sql.Literal(value)))
    return database


def test_our_connections_are_at_read_committed(database: str) -> None:
    """And get their results in one form."""
    with connect(database) as ours:
        asked = "select current_setting('transaction_isolation'), now(), interval '1 day', 'ł', 0.1::float8 + 0.2"
        level, now, day, letter, number = ours.execute(f"{asked}::float8").fetchall()[0]
    assert (level, day, letter, number) == ("read committed", timedelta(days=1), "ł", 0.1 + 0.2)
    assert now.tzinfo is not None


@pytest.mark.parametrize("level", STRICT)
def test_progress_at_another_level_is_refused(postgres: PostgresWorld, level: str) -> None:
    """Its snapshot would be older than what was granted and appended meanwhile."""
    held = postgres.granted()
    with psycopg.connect(postgres.url, autocommit=True) as user:
        user.execute(f"begin isolation level {level}")
        user.execute("select 1")
        postgres.append(held.stream, 10)
        with pytest.raises(UsageError, match=f"at isolation level {level}.* read committed"):
            consumer_progress.advance(user, *held.uses, 4)
        user.rollback()
        user.execute("begin isolation level read committed")
        consumer_progress.advance(user, *held.uses, 4)
        user.execute("commit")
    assert postgres.connection.execute("select position from lending").fetchone() == (4,)


def test_no_block_begins_at_another_level(database: str) -> None:
    with connect(database, own_search_path=False) as connection:
        connection.execute("set session characteristics as transaction isolation level serializable")
        with (
            pytest.raises(UsageError, match=r"at isolation level serializable.* read committed"),
            user_transaction(connection, lambda: None),
        ):
            pytest.fail("the block has begun")


@pytest.mark.parametrize("level", STRICT)
def test_a_block_sets_no_level_for_later_ones(database: str, level: str) -> None:
    """It is rolled back, and that level with it: its connection is nobody else's to set it back."""
    with connect(database, own_search_path=False) as connection:
        with (
            pytest.raises(UsageError, match=f"at isolation level {level}.* read committed"),
            user_transaction(connection, lambda: pytest.fail("the block was settled")),
        ):
            connection.execute(f"set session characteristics as transaction isolation level {level}")
        with user_transaction(connection, lambda: None):
            connection.execute("select 1")


def test_a_blocks_settings_end_with_it(database: str) -> None:
    """Its rows are in another form than ours, also where it raises."""

    def settle() -> None:
        assert connection.execute("select %s::int", (1,)).fetchall() == [(1,)]

    def change(error: Exception | None = None) -> None:
        connection.row_factory, connection.cursor_factory = dict_row, psycopg.RawCursor
        connection.prepare_threshold, connection.prepared_max = 0, 0
        assert connection.execute("select $1::int as number", (1,)).fetchall() == [{"number": 1}]
        if error is not None:
            raise error

    with connect(database, own_search_path=False) as connection:
        limits = connection.prepare_threshold, connection.prepared_max
        with user_transaction(connection, settle):
            change()
        with pytest.raises(ZeroDivisionError), user_transaction(connection, settle):
            change(ZeroDivisionError())
        with user_transaction(connection, settle):
            settle()
        assert (connection.prepare_threshold, connection.prepared_max) == limits


@pytest.mark.parametrize("level", STRICT)
def test_appends_at_another_level_are_refused(conn: Connection, stream: int, level: str) -> None:
    """Those of an older release, which do not set it: what another level would make wrong stores nothing."""
    conn.execute(f"set session characteristics as transaction isolation level {level}")
    with pytest.raises(psycopg.Error, match=f"at isolation level {level}"):
        append(conn, [BlockAppend(stream, block(b"a"), ProducerStamp("p", 1, 1))])
    assert conn.execute("select head from stream where stream_id = %s", (stream,)).fetchone() == (0,)


@pytest.mark.parametrize("level", STRICT)
def test_sql_publishing_at_another_level_works(conn: Connection, level: str) -> None:
    outbox = OutboxMover(conn, lambda _: None)
    with psycopg.connect(conn.info.dsn, autocommit=True) as user:
        user.execute(f"begin isolation level {level}")
        user.execute("select sublet.publish('orders/eu', 'first'::text)")
        assert outbox.move() == NOTHING
        user.execute("commit")
    assert outbox.move().messages == 1


def test_the_doctor_names_whose_level_is_another(database: str) -> None:
    with connect(database) as connection:
        found = {finding.check: finding for finding in run_checks(connection, 0.0, 1)}["isolation"]
    assert found.state is Severity.OK
    assert "options" in database or "is used by nothing of sublet's" in found.detail
