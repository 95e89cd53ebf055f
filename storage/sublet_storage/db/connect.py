"""Opens connections to Postgres, and reports failures as errors with a hint.

A connection is in UTC, sees the tables of one schema by their bare names, never idles in a transaction for long, and
notices within `tcp_timeout_s` that its peer is gone from the network. A server that is merely frozen still acknowledges
packets: a caller with a deadline keeps it on its own clock.

Its transactions are at the isolation level read committed, on which every statement here relies, whatever the server,
the role or the URL asks for: the settings travel as startup options behind those of the URL. A pooler in between must
let `options` through, and assign entire sessions; a query after the opening checks the first, and on which timeline the
server is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import make_conninfo

from sublet_protocol.domain.errors import DatabaseUnreachable, InvalidSetting, SchemaMismatch, SubletError, format_error
from sublet_protocol.domain.secret import hide_secrets
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.database_url import OpenedUrl, as_secret, format_url, parse_url

SCHEMA_VERSION = "0104"
"""The alembic revision this program is made for. It works with later ones that say so: see `check_schema`."""
FIRST_VERSION = "0101"
"""The first that was released: no migration leads on from one before it."""

DEFAULT_SCHEMA = "sublet"
CONNECT_TIMEOUT_S = 5
TCP_TIMEOUT_S = 10.0
IDLE_IN_TRANSACTION_TIMEOUT_S = 10.0
RECEIVE_TIMEOUT_S = 600.0
"""How long a server may be silent in the middle of a request before it is given up, unless another time is given."""

_REJECTED = "SB002"
"""The code of what a function rejects: its message has the value and the rule, its hint what to do."""
ISOLATION = "read committed"
_ISOLATION = r"-c default_transaction_isolation=read\ committed"
_RESULTS = ("DateStyle=ISO", "IntervalStyle=postgres", "extra_float_digits=1", "standard_conforming_strings=on")
"""The form in which results are understood and literals are meant."""
_PLANS = ("enable_seqscan=off", "enable_bitmapscan=off", "jit=off")
"""A table is small in one moment and has many versions of its rows in the next: a plan made before would read them all,
where one by an index backwards ends at the newest (see `newest_stream`). JIT would compile what has no other way."""
_MARK = "sublet.options"
"""A setting that nothing but the startup options can have given."""
_ARRIVED = (
    f"current_setting('default_transaction_isolation') = '{ISOLATION}' and current_setting('{_MARK}', true) is not null"
)
_READ = f"""
select {_ARRIVED}, pg_is_in_recovery(),
       case when not pg_is_in_recovery() then (select system_identifier::text from pg_control_system())
         || '/' || left(pg_walfile_name(pg_current_wal_lsn()), 8) end"""
_READ_SETTING = f"select {_ARRIVED}, pg_is_in_recovery(), null"

_SCHEMA_NAME = re.compile(r"[a-z_][a-z0-9_]{0,62}")
_HINTS = (
    ("password authentication failed", "Correct the user or the password in the URL"),
    (
        "no password supplied",
        "Give the password in SUBLET_DATABASE_URL or the file SUBLET_DATABASE_URL_FILE, in PGPASSWORD or ~/.pgpass",
    ),
    ("no pg_hba.conf entry", "Allow this user and address in the server's pg_hba.conf"),
    ("does not exist", "Create the database or the role, or correct the URL"),
    ("too many c", "Close other clients, or raise the server's max_connections"),
    ("remaining connection slots", "Close other clients, or raise the server's max_connections"),
    ("starting up", "Wait until the server has recovered, then try again"),
    ("shutting down", "Wait until the server is back, then try again"),
    ("could not translate host", "Correct the host in the URL"),
    ("failed to resolve host", "Correct the host in the URL"),
)


def prune_to(generations: Iterable[int]) -> list[int]:
    """Return the parameter for a statement that looks only into the partitions of these generations. It has the
    generation 0, too: an empty list would rule out no partition."""
    return [0, *generations]


def newest_stream(stream_id: str, columns: str = "*") -> str:
    """Return the SQL of a table, to be named by the caller, with these columns of the stream's row, or none.

    Each append updates it in place, and while a transaction stays open vacuum keeps all versions of it. An index that
    is read backwards has the newest first; for `stream_id = X` the planner would drop the order.
    """
    condition = f"stream_id between {stream_id} and {stream_id}"
    return f"(select {columns} from stream where {condition} order by stream_id desc limit 1)"


def connect(
    url: str,
    *,
    schema: str | None = None,
    application_name: str = "sublet",
    autocommit: bool = True,
    statement_timeout_s: float | None = None,
    lock_timeout_s: float | None = None,
    tcp_timeout_s: float = TCP_TIMEOUT_S,
    idle_in_transaction_timeout_s: float | None = IDLE_IN_TRANSACTION_TIMEOUT_S,
    transaction_timeout_s: float | None = None,
    own_search_path: bool = True,
    receive_timeout_s: float | None = RECEIVE_TIMEOUT_S,
) -> BoundedConnection:
    """Open a connection whose search_path is `schema` (default: see `resolve_schema_name`).

    `transaction_timeout_s` is for clients that send a whole transaction at once: if they freeze in the middle of
    sending, nothing else ends it. Servers before version 17 do not know it, and there it is left out. Without
    `own_search_path` it is the server's default, for statements of users on tables of theirs, as is the form of
    results. `receive_timeout_s`: how long a silent server is waited for, see `BoundedConnection`; None: for ever.

    Raise `InvalidSetting` for a malformed URL or schema name, and where something in between drops our settings;
    `DatabaseUnreachable` for every failure of the connection itself, and for a standby, on which nothing can be
    written. No message contains the password. The URL of a file is read anew, from its file.
    """
    url = as_secret(url)
    timeouts = _convert_timeouts(statement_timeout_s, lock_timeout_s, idle_in_transaction_timeout_s)
    schema = resolve_schema_name(schema, url)
    conninfo = _make_conninfo(url, schema if own_search_path else None, application_name, timeouts, tcp_timeout_s)
    try:
        connection = BoundedConnection.connect(conninfo, autocommit=True)
        connection.schema = schema
        connection.receive_timeout_s = float("inf") if receive_timeout_s is None else receive_timeout_s
        _check(connection, url)
        if transaction_timeout_s is not None and connection.info.server_version >= 170000:
            connection.execute(f"set transaction_timeout = {_to_milliseconds(transaction_timeout_s)}")
        connection.autocommit = autocommit
    except (psycopg.OperationalError, OSError) as error:  # of the system where no file is left to wait with
        if "unsupported startup parameter" in str(error):  # PgBouncer's words
            raise _pooler_error(url) from None
        raise _unreachable_error(url, error) from None
    return connection


def _check(connection: BoundedConnection, url: str) -> None:
    """Keep on which timeline the server is; close the connection and raise where it is none to be used."""
    try:
        has_options, is_standby, connection.timeline = connection.execute(_READ).fetchall()[0]
    except (psycopg.errors.InsufficientPrivilege, psycopg.errors.FeatureNotSupported):
        has_options, is_standby, _ = connection.execute(_READ_SETTING).fetchall()[0]
    if is_standby or not has_options:
        connection.close()
    if is_standby:
        raise DatabaseUnreachable(
            f"{format_url(url)} is a standby, on which nothing can be written. Give the address of the primary, or all "
            "addresses as HOST,HOST and target_session_attrs=read-write; or wait until it is promoted."
        )
    if not has_options:
        raise _pooler_error(url)


def resolve_schema_name(explicit: str | None = None, opened: object = None) -> str:
    """Return where the tables live: the given name, else that with which the connection, or the URL's database, was
    opened, else SUBLET_SCHEMA, else `sublet`. Raise `InvalidSetting`."""
    opened_with = opened.schema if isinstance(opened, OpenedUrl | BoundedConnection) else None
    name = explicit or opened_with or os.environ.get("SUBLET_SCHEMA") or DEFAULT_SCHEMA
    if not _SCHEMA_NAME.fullmatch(name) or name.startswith("pg_"):
        raise InvalidSetting(
            f"schema {name!r}: a schema is named with 1 to 63 of a-z, 0-9 and _, not starting with a digit "
            "or with pg_. Choose such a name in SUBLET_SCHEMA."
        )
    return name


def check_schema(conn: psycopg.Connection[Any]) -> str:
    """Raise `SchemaMismatch` unless this program works with the tables that are there. Two cheap reads.

    Return their version: this program's, or a newer one that declares itself compatible with this program's. So a
    schema is migrated first, and the programs that use it are replaced one by one afterwards.
    """
    location = f"schema {_read_search_path_schema(conn)!r} of database {conn.info.dbname!r}"
    version, compatible_from = read_schema_version(conn)
    if version is None:
        raise SchemaMismatch(
            f"{location} has no sublet tables, this program needs version {SCHEMA_VERSION}. Run `sublet migrate` "
            "on it (or correct SUBLET_SCHEMA, or grant this user the right to read it)."
        )
    check_released(version, location)
    if version < SCHEMA_VERSION:
        raise SchemaMismatch(
            f"{location} is at version {version}, older than this program's {SCHEMA_VERSION}. Run `sublet migrate` on "
            "it."
        )
    if not is_compatible(version, compatible_from):
        raise SchemaMismatch(
            f"{location} is at version {version}, newer than this program's {SCHEMA_VERSION}. Upgrade sublet here: "
            f"that schema works with programs of version {compatible_from or version} and later."
        )
    return version


def check_released(version: str, location: str) -> None:
    """Raise `SchemaMismatch` for a schema of a version that was never released, which cannot be migrated."""
    if version < FIRST_VERSION:
        raise SchemaMismatch(
            f"{location} is at version {version}, of before the first release, {FIRST_VERSION}: nothing leads from it "
            f"to this program's {SCHEMA_VERSION}. Make it anew: `drop schema ... cascade` (of an embedded database, "
            "delete its directory), then `sublet migrate`; what shall stay, export first, with the program it is of."
        )


def read_schema_version(conn: psycopg.Connection[Any]) -> tuple[str | None, str | None]:
    """Return (version, oldest version whose programs work with it) from the tables; (None, None) where there are none.

    A schema without the second works with the programs of its own version alone.
    """
    row = conn.execute("select to_regclass('alembic_version')").fetchone()
    if row is None or row[0] is None:
        return None, None
    row = conn.execute(
        "select version_num, to_jsonb(v) ->> 'compatible_from' from alembic_version v"  # the column may not be there
    ).fetchone()
    return (None, None) if row is None else (str(row[0]), row[1])


def is_compatible(version: str, compatible_from: str | None) -> bool:
    """Return whether this program works with a schema of that version, which is compatible with programs from
    `compatible_from` on."""
    if compatible_from is None or version < SCHEMA_VERSION:
        return version == SCHEMA_VERSION
    return compatible_from <= SCHEMA_VERSION


def _read_search_path_schema(conn: psycopg.Connection[Any]) -> str:
    """Return the first name of the search_path, whether or not it exists."""
    row = conn.execute("select current_setting('search_path')").fetchone()
    return str(row[0]).split(",")[0].strip(' "') if row else DEFAULT_SCHEMA


def _convert_timeouts(statement_s: float | None, lock_s: float | None, idle_s: float | None) -> dict[str, float]:
    limits = {
        "statement_timeout": statement_s,
        "lock_timeout": lock_s,
        "idle_in_transaction_session_timeout": idle_s,
    }
    return {name: seconds for name, seconds in limits.items() if seconds is not None}


def _make_conninfo(
    url: str, search_path: str | None, application_name: str, timeouts_s: dict[str, float], tcp_timeout_s: float
) -> str:
    parameters = parse_url(url)
    settings = [_ISOLATION, "-c timezone=UTC", f"-c {_MARK}=on"]
    if search_path is not None:
        settings += [f"-c {each}" for each in (f"search_path={search_path}", *_RESULTS, *_PLANS)]
        parameters["client_encoding"] = "UTF8"
    settings += [f"-c {name}={_to_milliseconds(seconds)}" for name, seconds in timeouts_s.items()]
    probe_s = max(1, round(tcp_timeout_s / 4))
    defaults: dict[str, Any] = {
        "application_name": application_name,
        "connect_timeout": CONNECT_TIMEOUT_S,
        "keepalives": 1,
        "keepalives_idle": probe_s,
        "keepalives_interval": probe_s,
        "keepalives_count": 3,
        "tcp_user_timeout": round(tcp_timeout_s * 1000),
    }
    options = " ".join([str(parameters.pop("options", "") or ""), *settings]).strip()
    return make_conninfo("", **{**defaults, **parameters, "options": options})


def _to_milliseconds(seconds: float) -> int:
    return max(1, round(seconds * 1000))


def _pooler_error(url: str) -> InvalidSetting:
    return InvalidSetting(
        f"what listens at {format_url(url)} drops the startup options of a connection, without which nothing of "
        "sublet's works: a pooler such as PgBouncer. Give the address of the server itself; programs that cannot reach "
        "that go through nodes, or publish by SQL."
    )


def _unreachable_error(url: str, error: psycopg.OperationalError | OSError) -> DatabaseUnreachable:
    text = format_error(error).split(" Is the server running")[0]
    return DatabaseUnreachable(f"cannot connect to {format_url(url)}: {hide_secrets(text)}. {_find_hint(url, text)}.")


def _find_hint(url: str, text: str) -> str:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as lack:  # libpq does not report that it got no socket
        return f"This process opens no more ({lack.strerror}): raise its limit of open files (LimitNOFILE, ulimit -n)"
    host = str(parse_url(url).get("host") or "")
    if host.startswith("/") and not Path(host).is_dir():
        return (
            "That is the Unix socket of a server (an embedded one, perhaps) on another machine, or of "
            "one that has stopped: give a URL with a host that can be reached from here"
        )
    matching = (hint for sign, hint in _HINTS if sign in text)
    return next(matching, "Start Postgres there, or correct the URL (--database-url, SUBLET_DATABASE_URL)")


@contextmanager
def map_loss(action: str) -> Iterator[None]:
    """Raise `DatabaseUnreachable` where the server goes away, or fails, in the middle of that."""
    try:
        yield
    except psycopg.OperationalError as error:
        raise DatabaseUnreachable(
            f"the database went away while {action}: {hide_secrets(format_error(error))}."
        ) from error


@contextmanager
def map_rejection(error_type: type[SubletError]) -> Iterator[None]:
    """Raise an error of that type where a function of the schema rejects what it is given."""
    try:
        yield
    except psycopg.Error as error:
        if error.sqlstate != _REJECTED:
            raise
        raise error_type(f"{error.diag.message_primary} {error.diag.message_hint}") from error
