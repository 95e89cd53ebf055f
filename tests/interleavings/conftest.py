"""A database with the spaces `default`, and `eu` with retention, of one stream each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from tests.integration.log_kit import with_a_short_lived_space
from tests.interleavings.harness import Interleavings


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with with_a_short_lived_space(database) as connection:
        yield connection


@pytest.fixture
def orders(database: str) -> Iterator[Interleavings]:
    """Yield the schedules; each begins with what is in the database when the first of them is made."""
    with Interleavings(database) as orders:
        yield orders
