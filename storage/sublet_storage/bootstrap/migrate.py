"""Migrates a schema to this program's version; the only module that uses SQLAlchemy and alembic.

Import it where it is used, not at the top: a borrower's process does not have these libraries.

A script may declare `compatible_from = VERSION`: programs of that version and later work with the schema it makes. So
the schema is migrated while they run, and they are replaced one by one; a downgrade is the other way round.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
from alembic import command
from alembic.config import Config
from alembic.script import ScriptDirectory
from psycopg import sql
from sqlalchemy import Connection, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from sublet_protocol.domain.errors import Conflict, InvalidSetting, SchemaMismatch, Unavailable
from sublet_storage.db.connect import check_released, connect, is_compatible, read_schema_version, resolve_schema_name
from sublet_storage.db.roles import DatabaseRole, create_statements, grant_statements, read_existing_roles
from sublet_storage.node_directory import list_nodes
from sublet_storage.spaces.space_changes import ensure_default

LOCK_TIMEOUT_S = 60.0
TABLE_TIMEOUT_S = 1.0
"""How long a migration waits for a table that is in use, with all other users behind it; less than a lease allows
for."""
ATTEMPTS = 30
_IN_USE = (psycopg.errors.LockNotAvailable, psycopg.errors.DeadlockDetected)
_TAKEN = (psycopg.errors.DuplicateTable, psycopg.errors.DuplicateFunction, psycopg.errors.DuplicateObject)
"""A name that a script would create is taken."""
Check = Callable[[Any], None]
"""Raises where a migration must not be; with a connection of psycopg's."""

_alembic = threading.Lock()  # its `op` and `context` are one per process


def migrate(url: str, schema: str | None = None, to: str | None = None) -> str:
    """Bring the schema to a version, the newest if none is given, creating it if need be, with the space `default`.

    Return that version; of a schema that is newer than this program and works with it, which stays as it is, its own.
    Callers at the same time wait for each other. Raise `SchemaMismatch` where it is newer and does not work with this
    program or was never released, where `to` is older than it, where something else has the name of a table of ours,
    and where nodes are at work that do not work with that version; `Conflict` where this user may not create the
    tables, and where PUBLIC may create in the schema;
    `InvalidSetting` for a version of which nothing is known here, and for a database that is not in UTF-8.
    """
    schema, target = resolve_schema_name(schema), _check_version(to or latest_version())
    with _open_locked(url, schema) as conn:
        _refuse_encoding(conn)
        _create_schema(conn, schema)
        _refuse_public(conn, schema)
        version, compatible_from = read_schema_version(conn)
        if version is not None and to is None and version > target and is_compatible(version, compatible_from):
            return version
        _refuse_foreign(version, schema)
        if version is not None and version > target:
            raise SchemaMismatch(
                f"schema {schema!r} is at version {version}, newer than {target}. To go back, bring every node, "
                f"publisher and consumer to the release of {target} first, and then add --downgrade."
            )
        if version != target:
            compatible = _read_compatible_from(target)
            _run_alembic(
                url, schema, command.upgrade, target, partial(_refuse_under_nodes, version, target, compatible)
            )
        ensure_default(conn)
        return target


def downgrade(url: str, schema: str | None = None, to: str | None = None) -> None:
    """Bring the schema back to an older version. Without one: drop every table and function, and so all messages and
    progress.

    Raise `SchemaMismatch` where this program has no scripts for what it is, where `to` is newer than it, and where
    nodes are at work though programs of that version do not work with the schema as it is.
    """
    schema = resolve_schema_name(schema)
    target = None if to is None else _check_version(to)
    with _open_locked(url, schema) as conn:
        version, compatible_from = read_schema_version(conn)
        if version is None:
            return
        _refuse_foreign(version, schema)
        if target is not None and target >= version:
            raise SchemaMismatch(
                f"schema {schema!r} is at version {version}, and {target} is not older. Leave out --downgrade."
            )
        check = partial(_refuse_under_nodes, version, target, compatible_from)
        _run_alembic(url, schema, command.downgrade, target or "base", check)


def make_roles(url: str, schema: str | None = None) -> list[DatabaseRole]:
    """Create the roles of database users that are missing, and give all of them their rights; return the new ones.

    Raise `Conflict` where this user may not create roles, and where PUBLIC may create in the schema.
    """
    schema = resolve_schema_name(schema)
    with _open_locked(url, schema) as conn:
        _refuse_public(conn, schema)
        missing = [role for role in DatabaseRole if role not in read_existing_roles(conn)]
        try:
            with conn.transaction():
                for created in create_statements(conn, schema, missing):
                    conn.execute(created)
                _grant_rights(conn, schema)
        except psycopg.errors.InsufficientPrivilege as error:
            raise Conflict(
                f"roles {', '.join(missing) or 'of sublet'}: {error.diag.message_primary}. Have a superuser read and "
                "run what `sublet roles --sql` prints; `sublet migrate` keeps their rights from then on."
            ) from None
        return missing


def current_version(url: str, schema: str | None = None) -> str | None:
    """Return the version the database is at; None if it has none of our tables."""
    with connect(url, schema=schema) as conn:
        return read_schema_version(conn)[0]


def latest_version() -> str:
    """Return the newest version this program has scripts for."""
    return str(_open_scripts().get_current_head())


def scripts_path() -> Path:
    """Return where the migrations are: inside the installed wheel, else beside the packages in a checkout."""
    package_dir = Path(__file__).resolve().parent
    folders = (package_dir.parent / "_migrations", package_dir.parents[2] / "migrations")
    for folder in folders:
        if (folder / "env.py").is_file():
            return folder
    raise Unavailable(f"no migration scripts in {' or '.join(map(str, folders))}. Install sublet again.")


def _make_config() -> Config:
    config = Config()
    config.set_main_option("script_location", str(scripts_path()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config


def _open_scripts() -> ScriptDirectory:
    return ScriptDirectory.from_config(_make_config())


def _list_versions() -> list[str]:
    """Return all that this program has scripts for, oldest first."""
    return sorted(script.revision for script in _open_scripts().walk_revisions())


def _check_version(version: str) -> str:
    versions = _list_versions()
    if version not in versions:
        raise InvalidSetting(
            f"version {version!r}: this program knows {', '.join(versions)}. Give one of these, or install the release "
            "that has it."
        )
    return version


def _read_compatible_from(version: str) -> str | None:
    """Return the oldest version whose programs work with the schema of that one, by its script; None: only its own."""
    script = _open_scripts().get_revision(version)
    return getattr(script.module, "compatible_from", None)


def _run_alembic(url: str, schema: str, run: Any, revision: str, check: Check) -> None:
    """Try until the tables are free: a transaction that waits for a table makes all others wait behind it. Each time
    `check` may raise, before anything is done and again before the commit, as there may have been a wait."""
    for _ in range(ATTEMPTS):
        try:
            _try_alembic(url, schema, run, revision, check)
        except _IN_USE:
            time.sleep(TABLE_TIMEOUT_S)  # let the statements that had to wait go first
        except _TAKEN as error:
            raise SchemaMismatch(
                f"schema {schema!r}: {error.diag.message_primary}, and is none of sublet's; nothing was changed. "
                "Name another schema in SUBLET_SCHEMA, or move away what is there."
            ) from None
        else:
            return
    raise Unavailable(
        f"schema {schema!r}: a table was in use for all of {ATTEMPTS} tries of {TABLE_TIMEOUT_S:g} s, and nothing was "
        "changed. End what uses it for long, a dump or an open transaction (`sublet doctor` names it), and try again."
    )


def _try_alembic(url: str, schema: str, run: Any, revision: str, check: Check) -> None:
    engine = create_engine(
        "postgresql+psycopg://",
        creator=lambda: connect(
            url,
            schema=schema,
            application_name="sublet migrate",
            autocommit=False,
            lock_timeout_s=TABLE_TIMEOUT_S,
            receive_timeout_s=None,
        ),
        poolclass=NullPool,
    )
    try:
        with _alembic, engine.connect() as connection:
            config, driver = _make_config(), connection.connection.dbapi_connection

            def finish() -> None:
                _record_compatible_from(connection)
                _grant_rights(driver, schema)
                check(driver)

            check(driver)
            connection.rollback()
            config.attributes["connection"], config.attributes["finish"] = connection, finish
            run(config, revision)
    except DBAPIError as error:
        raise error.orig or error from None
    engine.dispose()


def _record_compatible_from(connection: Connection) -> None:
    """Write beside the version from which one on programs work with it; in the transaction of the migration."""
    version = connection.exec_driver_sql("select version_num from alembic_version").scalar()
    connection.exec_driver_sql("alter table alembic_version add column if not exists compatible_from text")
    if version is not None:
        declared = _read_compatible_from(str(version))
        connection.exec_driver_sql("update alembic_version set compatible_from = %s", (declared,))


def _grant_rights(driver: Any, schema: str) -> None:
    """Revoke everything from PUBLIC, and grant the roles their privileges. This is in the transaction of every
    migration, so that none can omit it."""
    for granted in grant_statements(driver, schema, read_existing_roles(driver)):
        driver.execute(granted)


@contextmanager
def _open_locked(url: str, schema: str) -> Iterator[psycopg.Connection[Any]]:
    """Provide a connection that holds the advisory lock of this schema's migrations; the server releases it if this
    process dies. Raise `Conflict` where its user may not do what is done meanwhile."""
    key = zlib.crc32(f"sublet migrate {schema}".encode())
    with connect(url, schema=schema, application_name="sublet migrate", receive_timeout_s=None) as conn:
        conn.execute("select set_config('lock_timeout', %s, false)", (f"{LOCK_TIMEOUT_S:g}s",))
        try:
            conn.execute("select pg_advisory_lock(%s)", (key,))
        except psycopg.errors.LockNotAvailable:
            raise Unavailable(
                f"another process has been migrating schema {schema!r} for {LOCK_TIMEOUT_S:g} s. Wait for its end, and "
                "try again; `select * from pg_stat_activity where application_name = 'sublet migrate'` shows it."
            ) from None
        try:
            yield conn
        except (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidSchemaName) as error:
            raise Conflict(
                f"schema {schema!r}: user {conn.info.user!r} may not change it ({error.diag.message_primary}), nothing "
                "was changed. Run `sublet migrate` as its owner, or as the owner of database "
                f"{conn.info.dbname!r} if there is none yet."
            ) from None
        finally:
            if not conn.broken:
                conn.execute("select pg_advisory_unlock(%s)", (key,))


def _create_schema(conn: psycopg.Connection[Any], schema: str) -> None:
    """Check first: `if not exists` demands the right to create even where there is nothing to do."""
    ((is_missing,),) = conn.execute("select to_regnamespace(%s) is null", (schema,)).fetchall()
    if is_missing:
        conn.execute(sql.SQL("create schema {}").format(sql.Identifier(schema)))


def _refuse_public(conn: psycopg.Connection[Any], schema: str) -> None:
    """Raise where PUBLIC may create in the schema: it is the search path of functions with the owner's rights."""
    ((may_create,),) = conn.execute("select has_schema_privilege('public', %s, 'create')", (schema,)).fetchall()
    if may_create:
        raise Conflict(
            f"schema {schema!r}: PUBLIC, that is every user, may create in it, nothing was changed. What is made there "
            "could run with the rights of the tables' owner. Have the schema's owner run `revoke create on schema "
            f'"{schema}" from public`, or name another schema in SUBLET_SCHEMA.'
        )


def _refuse_encoding(conn: psycopg.Connection[Any]) -> None:
    """Raise if the encoding is SQL_ASCII, as of a server without a locale: names are any text, and there it is bytes to
    a client."""
    encoding = conn.info.parameter_status("server_encoding")
    if encoding != "UTF8":
        raise InvalidSetting(
            f"database {conn.info.dbname!r} has the encoding {encoding}: topics and names may have any characters, "
            f"which takes UTF8. Make one that has it: createdb --template=template0 --encoding=UTF8 {conn.info.dbname}"
        )


def _refuse_foreign(version: str | None, schema: str) -> None:
    """Raise where no script of this program's leads to or from a schema."""
    if version is None:
        return
    check_released(version, f"schema {schema!r}")
    versions = _list_versions()
    if version not in versions:
        raise SchemaMismatch(
            f"schema {schema!r} is at version {version}, newer than the {versions[-1]} this program knows. "
            "Upgrade sublet here."
        )


def _refuse_under_nodes(
    version: str | None, target: str | None, compatible_from: str | None, conn: psycopg.Connection[Any]
) -> None:
    """Raise while nodes are registered, unless programs of the older version work with the schema of the newer."""
    if version is None or target is None or (compatible_from is not None and compatible_from <= min(version, target)):
        return
    if names := [entry.node.name for entry in list_nodes(conn) if entry.remaining_s > 0]:
        raise SchemaMismatch(
            f"version {target}: between it and the present {version} not all programs work with both, and nodes are at "
            f"work: {', '.join(names)}. Stop all nodes, publishers and consumers first, or go by a version between."
        )
