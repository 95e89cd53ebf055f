"""A Postgres of the bench's own, durable as by default, in a directory that is removed afterwards."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg.sql import SQL

from storage.embedded import EmbeddedPostgres
from storage.migrate import migrate


@contextmanager
def server(address: str | None = None, password: str = "") -> Iterator[str]:
    """Its URL. `address`: where it listens besides, for clients that know no Unix sockets, and what they say there."""
    directory = Path(tempfile.mkdtemp(prefix="sublet-bench-"))
    directory.chmod(0o755)
    try:
        if address is not None:
            with EmbeddedPostgres(directory / "data") as server, psycopg.connect(server.url, autocommit=True) as conn:
                conn.execute(SQL("alter system set listen_addresses = {}").format(address))
                conn.execute(SQL("alter role current_user password {}").format(password))
        with EmbeddedPostgres(directory / "data") as server:
            yield server.url
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def place() -> Iterator[tuple[str, Path]]:
    """The URL of a fresh database on a server of its own, and a directory; both are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="sublet-bench-") as directory, server() as url:
        yield database(url, 1), Path(directory)


def database(server_url: str, number: int) -> str:
    """A fresh database; the one of the round before is dropped."""
    with psycopg.connect(server_url, autocommit=True) as conn:
        conn.execute(f"drop database if exists bench_{max(0, number - 1)} with (force)")
        conn.execute(f"create database bench_{number}")
    url = urlunsplit(urlsplit(server_url)._replace(path=f"/bench_{number}"))
    migrate(url)
    return url
