"""Time in SQL: the database's own, or the one a test gives.

Statements contain `NOW` where they need the time and take the parameter `now_us`, null in production.
`clock_timestamp()` is read where it stands: above a lock it is the time after the wait.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg

Clock = Callable[[], int]
"""Microseconds since 1970; for tests."""

NOW = "coalesce(timestamptz 'epoch' + %(now_us)s::bigint * interval '1 microsecond', clock_timestamp())"


DATABASE_USER = "'database user ' || session_user"
"""The user of a command, as recorded in the history: the login role, whatever role was set since."""


def read_database_user(connection: psycopg.Connection[Any]) -> str:
    """Return the user of the connection, as recorded in the history."""
    (row,) = connection.execute(f"select {DATABASE_USER}").fetchall()
    return str(row[0])


def format_microseconds(timestamp: str) -> str:
    """Return an SQL timestamptz as an integer."""
    return f"(extract(epoch from {timestamp}) * 1000000)::bigint"
