"""The database's password is replaced while a node, a publisher and a consumer are at work, and no call fails."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet import Publisher, Session
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from tests.integration.cli_kit import a_shell, done
from tests.integration.test_rotation import GROUP, Exchange, Users
from tests.kit import WAIT_S, eventually

pytestmark = pytest.mark.conforms("X8")

FIRST = "first-password"
CONNECTED = "select pid, application_name from pg_stat_activity where usename = 'app'"


@pytest.fixture
def superuser(server_home: Path) -> Iterator[psycopg.Connection[Any]]:
    """Yield the superuser of a server that requires the password of the user `app`."""
    with EmbeddedPostgres(server_home / "data") as server:
        migrate(server.url)
        with psycopg.connect(server.url, autocommit=True) as connection:
            connection.execute(f"create role app superuser login password '{FIRST}'")
            ((path,),) = connection.execute("show hba_file").fetchall()
            rules = Path(path).read_text()
            Path(path).write_text(f"local all app scram-sha-256\n{rules}")
            connection.execute("select pg_reload_conf()")
            eventually(lambda: not is_let_in(server.url, ""), WAIT_S)
            yield connection


def url_of(server_url: str, password: str) -> str:
    return server_url.replace("postgres@", f"app:{password}@" if password else "app@", 1)


def is_let_in(server_url: str, password: str) -> bool:
    try:
        psycopg.connect(url_of(server_url, password)).close()
    except psycopg.OperationalError:
        return False
    return True


class Given:
    """Holds the password in the file with the database's URL, or in libpq's own."""

    def __init__(self, kind: str, path: Path, server_url: str) -> None:
        self._kind, self._path, self._url = kind, path, server_url
        if kind == "SUBLET_DATABASE_URL_FILE":
            self.settings = {kind: str(path)}
        else:
            self.settings = {kind: str(path), "SUBLET_DATABASE_URL": url_of(server_url, "")}

    def write(self, password: str) -> None:
        fresh = self._path.with_suffix(".new")
        is_url = self._kind == "SUBLET_DATABASE_URL_FILE"
        fresh.write_text(url_of(self._url, password) if is_url else f"*:*:*:*:{password}\n")
        fresh.chmod(0o600)
        os.replace(fresh, self._path)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["SUBLET_DATABASE_URL_FILE", "PGPASSFILE"])
def test_a_new_password_drops_no_call(
    kind: str, superuser: psycopg.Connection[Any], server_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/deploy.md has it: it is written into the file, then changed in Postgres. Then connections are ended."""
    server_url = EmbeddedPostgres(server_home / "data").url
    given = Given(kind, tmp_path / "secret", server_url)
    given.write(FIRST)
    for name, value in given.settings.items():
        monkeypatch.setenv(name, value)
    users = Users()
    with (
        a_shell(**given.settings) as shell,
        Publisher() as publisher,
        Session(GROUP, starting_position="earliest") as session,
    ):
        node = shell.leader("n1")

        exchange = Exchange(publisher, session)
        with users.at_work(publish=exchange.publish, consume=exchange.consume):
            users.go_on()
            for password in ("second-password", "third-password"):
                before: dict[int, str] = dict(superuser.execute(CONNECTED).fetchall())
                given.write(password)
                superuser.execute(f"alter role app password '{password}'")
                superuser.execute("select pg_terminate_backend(pid) from pg_stat_activity where usename = 'app'")
                assert is_let_in(server_url, password)

                def is_back(before: dict[int, str] = before) -> bool:
                    now: dict[int, str] = dict(superuser.execute(CONNECTED).fetchall())
                    return set(now.values()) >= set(before.values()) and not before.keys() & now.keys()

                eventually(is_back, WAIT_S, lambda: f"{superuser.execute(CONNECTED).fetchall()} {node.err}")
                users.go_on()
            users.over.set()
        eventually(exchange.consume, WAIT_S)
        assert not is_let_in(server_url, FIRST)
        assert done(shell.run("groups", "list", "--json"))
