"""Chooses the database: the one given, or an embedded server.

A given database is checked, never changed unasked. The embedded server is ours: it is started and migrated to this
program's version.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.errors import InvalidSetting, SchemaMismatch, Unavailable
from sublet_protocol.domain.secret import Secret
from sublet_storage.db.connect import check_schema, connect, map_loss, resolve_schema_name
from sublet_storage.db.database_url import OpenedUrl, as_secret, format_url, resolve_database_url


class OpenedDatabase(Struct, frozen=True):
    """A database that is reachable and at the right schema version: later connections to its `url` are to the same
    schema. `data_dir` is that of the embedded server, which only processes of this machine can reach, else None."""

    url: Secret
    data_dir: Path | None = None

    def __str__(self) -> str:
        return format_url(self.url)


@contextmanager
def open_database(
    url: str | None = None, data_dir: Path | str | None = None, migrate_embedded: bool = True
) -> Iterator[OpenedDatabase]:
    """Yield the database of `url`, else of `data_dir`, else of SUBLET_DATABASE_URL or SUBLET_DATABASE_URL_FILE, else of
    the default data directory.

    The embedded server runs at least as long as the context. The `url` of a database that was opened in `data_dir`
    gives only its schema. Raise `SchemaMismatch`, `DatabaseUnreachable`, `EmbeddedDirectoryUnusable`, and
    `InvalidSetting` if two databases are named at once.
    """
    _check_types(url, data_dir)
    if url and data_dir and not isinstance(url, OpenedUrl):
        raise InvalidSetting(f"both a database URL and a data directory ({data_dir}) are given. Give one of them.")
    configured_url = None if data_dir else resolve_database_url(url)
    if configured_url:
        opened_url = OpenedUrl(as_secret(configured_url), resolve_schema_name(opened=configured_url))
        check_database(opened_url)
        yield OpenedDatabase(opened_url)
        return
    from sublet_storage.bootstrap.embedded import EmbeddedPostgres, find_usable_data_dir

    with EmbeddedPostgres(Path(data_dir) if data_dir else find_usable_data_dir()) as server:
        opened_url = OpenedUrl(as_secret(server.url), resolve_schema_name(opened=url))
        if migrate_embedded:
            _bring_up_to_date(opened_url)
        yield OpenedDatabase(opened_url, server.data_dir)


def _check_types(url: object, data_dir: object) -> None:
    if not (url is None or isinstance(url, str)):
        kind = type(url).__name__
        raise InvalidSetting(f"url of type {kind}: it is a text such as postgresql://USER@HOST/DATABASE, or left out.")
    if not (data_dir is None or isinstance(data_dir, str | Path)) or "\0" in str(data_dir):
        raise InvalidSetting(f"data_dir {ascii(data_dir)[:60]}: it is the path of a directory, or left out.")


@contextmanager
def open_connection(url: str | None, data_dir: Path | None, application_name: str) -> Iterator[psycopg.Connection[Any]]:
    """Yield a connection to the database that `open_database` would open; a given database is checked first."""
    configured_url = None if data_dir else resolve_database_url(url)
    if configured_url:
        with connect(configured_url, application_name=application_name) as connection:
            check_schema(connection)
            yield connection
        return
    with open_database(url, data_dir) as database, connect(database.url, application_name=application_name) as opened:
        yield opened


def check_database(url: str) -> None:
    """Raise unless the database can be reached and has this program's schema."""
    with map_loss("looking at its schema"), connect(url) as conn:
        check_schema(conn)


def _bring_up_to_date(url: OpenedUrl) -> None:
    """Migrate if need be; the libraries for it are loaded only then."""
    try:
        check_database(url)
    except SchemaMismatch as mismatch:
        try:
            from sublet_storage.bootstrap.migrate import migrate
        except ModuleNotFoundError as missing:
            raise Unavailable(
                f"{mismatch} That takes the package {missing.name}, which is not installed: "
                "run `pip install 'sublet[leader]'`."
            ) from None
        migrate(url, url.schema)
