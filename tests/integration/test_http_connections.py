"""The HTTP port's connections to the database: bounded in number and time, made anew when they are lost, and set up as
all of ours are."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import psycopg
import pytest

from sublet_leader.observe.health import Health, HealthCheck, HealthState
from sublet_leader.observe.http_database_pool import MAX_CONNECTIONS, RECEIVE_TIMEOUT_S, HttpDatabasePool
from sublet_protocol.domain.errors import SubletError, Unavailable
from sublet_storage.db.bounded_connection import BoundedConnection
from tests.integration.log_kit import Connection
from tests.kit import WAIT_S, eventually
from tests.postgres_proxy import PostgresProxy

ASKERS = 30
OURS = "select count(*) from pg_stat_activity where application_name = 'sublet http' and datname = current_database()"
END_THEM = OURS.replace("count(*)", "pg_terminate_backend(pid)")


@contextmanager
def a_pool(url: str, state: HealthState = HealthState.OK) -> Iterator[HttpDatabasePool]:
    pool = HttpDatabasePool(url, lambda: Health((HealthCheck("database", state, "as a test says"),)))
    try:
        yield pool
    finally:
        pool.close()


def ask(pool: HttpDatabasePool, statement: str = "select 1", principal: str | None = None) -> Any:
    with pool.connection(principal) as connection:
        row = connection.execute(statement).fetchone()
    assert row is not None
    return row[0]


@pytest.mark.long
def test_a_connection_is_set_up_as_all_of_ours_are(database: str) -> None:
    other = database + ("&" if "?" in database else "?")
    with a_pool(other + r"options=-c%20default_transaction_isolation%3Dserializable") as pool:
        assert ask(pool, "show transaction_isolation") == "read committed"
        assert ask(pool, "show statement_timeout") == "5s"
        with pool.connection() as connection:
            assert connection.autocommit
            assert isinstance(connection, BoundedConnection)
            assert connection.receive_timeout_s == RECEIVE_TIMEOUT_S
        with pytest.raises(psycopg.errors.QueryCanceled):
            ask(pool, "select 1 from pg_sleep(60)")
        assert ask(pool) == 1


def test_an_ended_connection_is_made_anew(database: str, conn: Connection) -> None:
    def ended() -> bool:
        return conn.execute(END_THEM).fetchall() == [] and conn.execute(OURS).fetchone() == (0,)

    with a_pool(database) as pool:
        for _ in range(3):
            assert ask(pool) == 1
            eventually(ended, WAIT_S)
        assert ask(pool) == 1


@pytest.mark.long
def test_beyond_a_few_connections_one_is_refused(database: str, conn: Connection) -> None:
    with a_pool(database) as pool, ThreadPoolExecutor(ASKERS) as threads, ExitStack() as stack:
        held = [stack.enter_context(pool.connection()) for _ in range(MAX_CONNECTIONS)]
        assert len({id(each) for each in held}) == MAX_CONNECTIONS
        for asked in [threads.submit(ask, pool) for _ in range(ASKERS)]:
            with pytest.raises(Unavailable, match=r"others|19 queries are under way"):
                asked.result()
        assert conn.execute(OURS).fetchone() == (MAX_CONNECTIONS,)
        waiting = threads.submit(ask, pool)
        stack.close()
        assert waiting.result() == 1


@pytest.mark.conforms("X4")
def test_one_principal_leaves_others_their_turn(database: str) -> None:
    with a_pool(database) as pool, ThreadPoolExecutor(ASKERS) as threads, ExitStack() as stack:
        for _ in range(MAX_CONNECTIONS):
            stack.enter_context(pool.connection("user:a"))
        asked = [threads.submit(ask, pool, principal="user:a") for _ in range(ASKERS - 1)]
        refused = eventually(lambda: [each for each in asked if each.done()])
        others = threads.submit(ask, pool, principal="user:b")
        stack.close()
        assert others.result() == 1
        for each in refused:
            with pytest.raises(Unavailable, match="under way of user:a"):
                each.result()


@pytest.mark.long
def test_without_a_database_the_answer_gives_the_cause(database: str) -> None:
    with PostgresProxy(database) as way, a_pool(way.url) as pool:
        assert ask(pool) == 1
        way.go_away()
        with suppress(psycopg.OperationalError, SubletError):  # what was open is lost
            ask(pool)
        with pytest.raises(SubletError, match="cannot connect"):
            ask(pool)
        way.resume()
        assert eventually(lambda: answer(pool), WAIT_S) == 1
    with a_pool(database, HealthState.UNREACHABLE) as pool, pytest.raises(Unavailable, match="as a test says"):
        ask(pool)


def answer(pool: HttpDatabasePool) -> Any:
    with suppress(SubletError, psycopg.OperationalError):
        return ask(pool)
    return None


@pytest.mark.long
def test_a_silent_database_holds_nobody_up(database: str) -> None:
    with PostgresProxy(database) as way, a_pool(way.url) as pool:
        assert ask(pool) == 1
        way.hold()
        with pytest.raises((SubletError, psycopg.OperationalError)):
            ask(pool)
        asking = threading.Thread(target=answer, args=(pool,))
        asking.start()
        pool.close()
        way.resume()
        asking.join()
