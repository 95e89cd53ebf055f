"""A server whose tables have an owner without superuser rights, and one user for each role."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psycopg
from psycopg.conninfo import make_conninfo

from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import make_roles, migrate
from sublet_storage.db.roles import DatabaseRole
from tests.kit import database_of, server_directory

OWNER = "keeper"
DATABASE = "app"


@dataclass(frozen=True, slots=True)
class RoleWorld:
    """URLs of one database, by user. `admin` is a superuser."""

    admin: str

    @property
    def owner(self) -> str:
        return self.of(OWNER)

    def of(self, user: str) -> str:
        """Return the URL of a user, or of the user who is a member of that role only."""
        return make_conninfo(self.admin, user=f"user_of_{user}" if user in list(DatabaseRole) else user)

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.admin, autocommit=True) as conn:
            conn.execute(statement)


@contextmanager
def a_role_world(*, migrated: bool = True) -> Iterator[RoleWorld]:
    """Yield a server of its own, as roles belong to a server."""
    directory = server_directory()
    try:
        with EmbeddedPostgres(directory / "data") as server:
            world = RoleWorld(database_of(server.url, DATABASE))
            with psycopg.connect(server.url, autocommit=True) as conn:
                conn.execute(f"create role {OWNER} login")
                conn.execute(f"create database {DATABASE} owner {OWNER} template template0")
            if migrated:
                migrate(world.owner)
                make_roles(world.admin)
                for role in DatabaseRole:
                    world.execute(f"create role user_of_{role} login; grant {role} to user_of_{role}")
            yield world
    finally:
        shutil.rmtree(directory, ignore_errors=True)
