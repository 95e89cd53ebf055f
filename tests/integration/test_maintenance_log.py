"""What the housekeeping says in its log of steps that fail again and again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from sublet_leader.jobs.maintenance import _Keeper
from sublet_storage.db.connect import connect
from sublet_storage.db.store_connection import Guard


def test_a_step_that_fails_for_another_reason_is_told_of_at_once(
    database: str, caplog: pytest.LogCaptureFixture
) -> None:
    causes = iter(
        ("block_1: no space left", "block_2: no space left", "read-only file system", "block_1: no space left")
    )

    def fail() -> None:
        raise OSError(next(causes))

    def steps(_: psycopg.Connection[Any], __: Guard) -> Iterator[tuple[str, Callable[[], None]]]:
        yield "retention", fail

    caplog.set_level(logging.WARNING, "sublet_leader")
    keeper = _Keeper(database, lambda: 1, 60.0, "sublet-maintenance", steps)
    with connect(database) as connection:
        for _ in range(4):
            keeper._run_steps(connection, 1)
    assert [record.getMessage().rpartition(": ")[2] for record in caplog.records] == [
        "no space left",
        "read-only file system",
    ]
