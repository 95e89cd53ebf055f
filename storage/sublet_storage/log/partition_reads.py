"""Executes statements on the blocks of one generation, by its partition where possible.

Planning such a statement takes longer than executing it. A plan that is kept for the table itself would be for any
generation and lock all partitions, more than a server has locks for: so for the table the server plans anew each time,
and for a partition it keeps the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakKeyDictionary

import psycopg
from psycopg.errors import InsufficientPrivilege, UndefinedTable
from psycopg.pq import TransactionStatus

_MAX_GENERATIONS: Final = 1_000
"""The number of generations of which a connection caches that their partitions cannot be named."""

_PLANNED_ANEW: Final = 5
"""So often Postgres plans a prepared statement anew before it keeps a plan."""

_unnamed: WeakKeyDictionary[psycopg.Connection[Any], set[int]] = WeakKeyDictionary()


def format_partition_name(generation_id: int) -> str:
    """Return the name of the table that holds the blocks of a generation."""
    return f"block_{generation_id}"


def read_blocks(
    conn: psycopg.Connection[Any], statement: str, parameters: Mapping[str, Any] | Sequence[Any], generation_id: int
) -> list[tuple[Any, ...]]:
    """Return the rows, in binary, of a statement that has `{block}` in place of the table of blocks."""
    if _is_read_by_name(conn, generation_id):
        try:
            return read_partition(conn, statement, parameters, generation_id)
        except UndefinedTable:  # dropped by retention, or a client's number of one that is still to come
            pass
        except InsufficientPrivilege:  # a user who may read the table only
            _unnamed[conn].add(generation_id)
    return conn.execute(statement.replace("{block}", "block"), parameters, prepare=False, binary=True).fetchall()


def read_partition(
    conn: psycopg.Connection[Any], statement: str, parameters: Mapping[str, Any] | Sequence[Any], generation_id: int
) -> list[tuple[Any, ...]]:
    """Return the rows of the statement, as `read_blocks` does, from the partition by its name."""
    partition = statement.replace("{block}", format_partition_name(generation_id))
    return conn.execute(partition, parameters, binary=True).fetchall()


def keep_plan(conn: psycopg.Connection[Any], read: Callable[[], object]) -> None:
    """Repeat a read of a partition until the server has a plan that it keeps for the reads to come."""
    threshold = conn.prepare_threshold
    if threshold is not None:
        conn.prepare_threshold = 0
    try:
        for _ in range(_PLANNED_ANEW + 1):
            read()
    finally:
        conn.prepare_threshold = threshold


def _is_read_by_name(conn: psycopg.Connection[Any], generation_id: int) -> bool:
    """Return whether the partition is read by its name, which is so unless that has failed.

    Not within a transaction, which would end if the partition were dropped meanwhile.
    """
    if not conn.autocommit or conn.info.transaction_status != TransactionStatus.IDLE:
        return False
    unnamed = _unnamed.setdefault(conn, set())
    if len(unnamed) >= _MAX_GENERATIONS:
        unnamed.clear()
    return generation_id not in unnamed
