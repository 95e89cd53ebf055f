"""A Postgres with default durability, in a directory that is removed afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psycopg
from psycopg.sql import SQL, Identifier

from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate


@contextmanager
def server(settings: Mapping[str, str] | None = None, password: str = "") -> Iterator[str]:
    """Yield the server's URL. `settings`: of Postgres, besides those of the embedded server. `password`: for clients
    without Unix sockets, for which it also listens on an address."""
    directory = Path(tempfile.mkdtemp(prefix="sublet-bench-"))
    directory.chmod(0o755)
    try:
        if settings:
            with EmbeddedPostgres(directory / "data") as server, psycopg.connect(server.url, autocommit=True) as conn:
                for name, value in settings.items():
                    conn.execute(SQL("alter system set {} = {}").format(Identifier(name), value))
                if password:
                    conn.execute(SQL("alter role current_user password {}").format(password))
        with EmbeddedPostgres(directory / "data") as server:
            yield server.url
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def quarter_of_memory() -> str:
    """Return what Postgres's documentation advises for `shared_buffers`; the embedded server's default is smaller."""
    pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    return f"{pages * page_bytes // 4 >> 20}MB"


@contextmanager
def place() -> Iterator[tuple[str, Path]]:
    """Yield the URL of a fresh database on a server of its own, and a directory; both are removed afterwards."""
    with tempfile.TemporaryDirectory(prefix="sublet-bench-") as directory, server() as url:
        yield database(url, 1), Path(directory)


def database(server_url: str, number: int) -> str:
    """Create a fresh database and return its URL; the one of the previous round is dropped."""
    with psycopg.connect(server_url, autocommit=True) as conn:
        conn.execute(f"drop database if exists bench_{max(0, number - 1)} with (force)")
        conn.execute(f"create database bench_{number}")
    url = urlunsplit(urlsplit(server_url)._replace(path=f"/bench_{number}"))
    migrate(url)
    return url
