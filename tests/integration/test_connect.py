"""What a connection is like, against a real server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from psycopg import sql

from sublet_borrower.consumer.session import Session
from sublet_protocol.domain.errors import DatabaseUnreachable
from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from tests.kit import WAIT_S, database_of
from tests.postgres_proxy import PostgresProxy


def settings(conn: psycopg.Connection[tuple[object, ...]], *names: str) -> list[object]:
    return [conn.execute("select current_setting(%s)", (name,)).fetchone()[0] for name in names]  # type: ignore[index]


def test_how_a_connection_is_set_up(database: str) -> None:
    with connect(database) as conn:
        elsewhere = sql.SQL("alter database {} set timezone to 'Asia/Tokyo'")
        conn.execute(elsewhere.format(sql.Identifier(conn.info.dbname)))
    with connect(database, statement_timeout_s=2.5, lock_timeout_s=0.5, application_name="a name \\ 'of' mine") as conn:
        assert conn.autocommit
        assert settings(conn, "timezone", "search_path", "application_name") == ["UTC", "sublet", "a name \\ 'of' mine"]
        assert settings(conn, "statement_timeout", "lock_timeout") == ["2500ms", "500ms"]
        assert settings(conn, "idle_in_transaction_session_timeout") == ["10s"]
        assert conn.execute("select count(*) from space").fetchone() == (1,)
    with connect(database, transaction_timeout_s=3.5) as conn:
        known = conn.execute("select setting from pg_settings where name = 'transaction_timeout'").fetchall()
        assert known == ([("3500",)] if conn.info.server_version >= 170_000 else [])


def test_the_schema_is_a_setting(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBLET_SCHEMA", "elsewhere")
    with connect(database) as conn:
        assert settings(conn, "search_path") == ["elsewhere"]
    with connect(database, schema="given", autocommit=False) as conn:
        assert settings(conn, "search_path") == ["given"]
        assert not conn.autocommit


def test_what_the_url_asks_for_is_respected(database: str) -> None:
    with connect(f"{database}&application_name=theirs&options=-c%20work_mem%3D9MB&connect_timeout=3") as conn:
        assert settings(conn, "application_name", "work_mem", "timezone") == ["theirs", "9MB", "UTC"]
        assert conn.info.get_parameters()["connect_timeout"] == "3"


def test_a_vanished_peer_is_noticed_in_time(database: str) -> None:
    with connect(database, tcp_timeout_s=8) as conn:
        given = conn.info.get_parameters()
    assert int(given["tcp_user_timeout"]) == 8000
    probes = int(given["keepalives_idle"]) + int(given["keepalives_interval"]) * int(given["keepalives_count"])
    assert probes <= 8


def test_a_missing_database_is_refused(server_url: str) -> None:
    missing = database_of(server_url, "missing")
    with pytest.raises(DatabaseUnreachable, match="Create the database or the role"):
        connect(missing)


@pytest.mark.parametrize("name", ["transaction_timeout", "idle_in_transaction_session_timeout"])
def test_a_transaction_cut_off_may_be_repeated(database: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(psycopg.errors, "TransactionTimeout", raising=False)  # as before psycopg 3.2.3
    with connect(database) as conn:
        if name == "transaction_timeout" and conn.info.server_version < 170_000:
            pytest.skip("Postgres 17 has it first")
        conn.execute(f"set {name} = 1")

        def run_late() -> None:
            conn.execute("begin")
            while True:
                time.sleep(0.01)
                conn.execute("select")

        with pytest.raises(psycopg.OperationalError, match="the server ended the connection: terminating"):
            run_late()


@pytest.mark.parametrize(
    ("opens", "at"),
    [
        (lambda url: Publisher(url), b"alembic_version"),
        (lambda url: Publisher(url, producer="p"), b"register_producer"),
        (lambda url: Session("$share/g/#", url), b"alembic_version"),
        (lambda url: Session("$share/g/#", url, name="s"), b"next_session_epoch"),
    ],
    ids=["publisher", "named publisher", "session", "named session"],
)
def test_a_loss_while_opening_is_named(database: str, opens: Callable[[str], object], at: bytes) -> None:
    """Wherever it comes: who tries again waits for one error, and no other."""
    with PostgresProxy(database) as proxy, ThreadPoolExecutor(1) as pool:
        proxy.freeze(at)
        opening = pool.submit(opens, proxy.url)
        assert proxy.frozen.wait(WAIT_S)
        proxy.thaw()
        with pytest.raises(DatabaseUnreachable, match=r"^the database went away while"):
            opening.result(WAIT_S)


def test_a_connection_in_use_is_closed_elsewhere(database: str) -> None:
    """At various moments: its statement ends with an error, and the process does not."""

    def query(connection: psycopg.Connection[object], begun: threading.Event) -> None:
        while True:
            connection.execute("select repeat('x', 1000000) from generate_series(1, 5)").fetchall()
            begun.set()

    with ThreadPoolExecutor(1) as other:
        for number in range(40):
            connection, begun = connect(database), threading.Event()
            call = other.submit(query, connection, begun)
            assert begun.wait(60)
            threading.Event().wait(number / 500)
            connection.close()
            with pytest.raises(psycopg.OperationalError):
                call.result(60)
            assert connection.closed
