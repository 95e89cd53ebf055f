"""One suite, two stores."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.contract.group_world import MemoryWorld, PostgresWorld, World


@pytest.fixture(params=["memory", "postgres"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Yield a group store with streams to grant; each test runs in memory and in Postgres."""
    if request.param == "memory":
        yield MemoryWorld()
        return
    postgres = PostgresWorld(request.getfixturevalue("shared_database"))
    yield postgres
    postgres.close()


@pytest.fixture
def postgres(database: str) -> Iterator[PostgresWorld]:
    """Yield the world of the store in Postgres."""
    world = PostgresWorld(database)
    yield world
    world.close()
