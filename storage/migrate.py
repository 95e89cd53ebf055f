"""Bringing a schema to this program's version. The only module of the house that knows SQLAlchemy and alembic.

Import it where it is used, not at the top: a borrower's process does not have these libraries.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg import sql
from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from protocol.errors import SchemaMismatch, Unavailable
from storage.connect import connect, schema_name
from storage.spaces import ensure_default

LOCK_TIMEOUT_S = 60.0
_alembic = threading.Lock()  # its `op` and `context` are one per process


def migrate(url: str, schema: str | None = None) -> str:
    """Bring the schema to the newest version, creating it if need be, with the space `default`; that version.

    Callers at the same time wait for each other. Raises `SchemaMismatch` if the database is newer than this program.
    """
    schema = schema_name(schema)
    with connect(url, schema=schema, application_name="sublet migrate") as conn, _alone(conn, schema):
        _create_schema(conn, schema)
        _refuse_newer(_version(conn), schema)
        _alembic_command(url, schema, command.upgrade, "head")
        ensure_default(conn)
        return str(_version(conn))


def downgrade(url: str, schema: str | None = None) -> None:
    """Drop every table and function of the schema, and with them all messages and progress."""
    schema = schema_name(schema)
    with connect(url, schema=schema, application_name="sublet migrate") as conn, _alone(conn, schema):
        if (version := _version(conn)) is not None:
            _refuse_newer(version, schema)
            _alembic_command(url, schema, command.downgrade, "base")


def current(url: str, schema: str | None = None) -> str | None:
    """The version the database is at; None if it has none of our tables."""
    with connect(url, schema=schema) as conn:
        return _version(conn)


def head() -> str:
    """The newest version this program has scripts for."""
    return str(ScriptDirectory.from_config(_config()).get_current_head())


def scripts() -> Path:
    """Where the migrations are: inside the installed wheel, else beside the packages in a checkout."""
    here = Path(__file__).resolve().parent
    places = (here / "_migrations", here.parent / "migrations")
    for place in places:
        if (place / "env.py").is_file():
            return place
    raise Unavailable(f"no migration scripts in {' or '.join(map(str, places))}. Install sublet again.")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(scripts()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _alembic_command(url: str, schema: str, run: Any, revision: str) -> None:
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(url, schema=schema, application_name="sublet migrate", autocommit=False),
        poolclass=NullPool,
    )
    with _alembic, engine.connect() as connection:
        config = _config()
        config.attributes["connection"] = connection
        run(config, revision)
    engine.dispose()


@contextmanager
def _alone(conn: psycopg.Connection[Any], schema: str) -> Iterator[None]:
    """Hold the advisory lock of this schema's migrations; the server drops it if we die."""
    key = zlib.crc32(f"sublet migrate {schema}".encode())
    conn.execute("select set_config('lock_timeout', %s, false)", (f"{LOCK_TIMEOUT_S:g}s",))
    try:
        conn.execute("select pg_advisory_lock(%s)", (key,))
    except psycopg.errors.LockNotAvailable:
        raise Unavailable(
            f"another process has been migrating schema {schema!r} for {LOCK_TIMEOUT_S:g} s. Wait for its end, and try "
            "again; `select * from pg_stat_activity where application_name = 'sublet migrate'` shows it."
        ) from None
    try:
        yield
    finally:
        if not conn.broken:
            conn.execute("select pg_advisory_unlock(%s)", (key,))


def _create_schema(conn: psycopg.Connection[Any], schema: str) -> None:
    """Asked first: `if not exists` demands the right to create even where there is nothing to do."""
    row = conn.execute("select to_regnamespace(%s) is null", (schema,)).fetchone()
    if row is not None and row[0]:
        conn.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))


def _version(conn: psycopg.Connection[Any]) -> str | None:
    row = conn.execute("select to_regclass('alembic_version')").fetchone()
    if row is None or row[0] is None:
        return None
    row = conn.execute("select version_num from alembic_version").fetchone()
    return None if row is None else str(row[0])


def _refuse_newer(version: str | None, schema: str) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(_config()).walk_revisions()}
    if version is not None and version not in known:
        raise SchemaMismatch(
            f"schema {schema!r} is at version {version}, newer than the {max(known)} this program knows. "
            "Upgrade sublet here."
        )
