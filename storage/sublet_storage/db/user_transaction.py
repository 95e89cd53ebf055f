"""Commits users' statements and ours in one transaction, and checks that it stays one."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from sublet_protocol.domain.errors import DatabaseUnreachable, UsageError

_STRICT = ("repeatable read", "serializable")
_CLIENT_SETTINGS = ("row_factory", "cursor_factory", "server_cursor_factory", "prepare_threshold", "prepared_max")
"""Attributes of a connection that a block may set."""
_LEVEL = (
    "transactions on this connection are at isolation level {level}, and whether the messages are still this "
    "consumer's is judged at read committed. Take back what sets another level, and lock the rows that the block "
    "relies on."
)
_ENDED = (
    "the block has ended its transaction itself, by {by}: what it has written may be committed or not, and its "
    "messages are not done. Leave commit and rollback to the block's end; to roll back raise another exception."
)


@contextmanager
def user_transaction(connection: psycopg.Connection[Any], settle: Callable[[], None]) -> Iterator[None]:
    """Run the block, and then `settle`, in one transaction. What the block sets on the connection itself, such as its
    row factory, holds until its end.

    Raise `UsageError` if the block has ended the transaction, was left by `psycopg.Rollback`, which raises nothing, or
    has set a stricter isolation level than read committed for later ones; and before the block if there is one already.
    Raise `DatabaseUnreachable` if the server is read-only, and close the connection: another server may take writes.

    An exception out of the begin, or one of a signal handler out of the end, closes the connection: psycopg's count of
    its open transactions may be wrong then, and it would refuse all later ones.
    """
    mark, is_begun, settled = secrets.token_hex(8), False, False
    inner: BaseException | None = None
    try:
        with connection.transaction():
            is_begun = True
            try:
                _set_up(connection, mark)
                with _unchanged_settings(connection):
                    yield
                _check_same(connection, mark)
                settle()
                settled = True
            except BaseException as error:
                inner = error
                raise
    except BaseException as error:
        is_answer = is_begun and isinstance(error, psycopg.Error) and error.sqlstate is not None
        is_read_only = isinstance(error.__cause__, psycopg.errors.ReadOnlySqlTransaction)
        if isinstance(error, psycopg.OperationalError) and is_read_only:
            connection.close()
            raise DatabaseUnreachable(f"nothing was written in this transaction: {error}.") from error
        if error is not inner and not is_answer:
            connection.close()
        raise
    if not settled:
        raise UsageError(_ENDED.format(by="psycopg.Rollback"))


@contextmanager
def _unchanged_settings(connection: psycopg.Connection[Any]) -> Iterator[None]:
    """Run the block, and set the connection's client settings to what they were before: our statements rely on them."""
    settings = {name: getattr(connection, name) for name in _CLIENT_SETTINGS}
    try:
        yield
    finally:
        for name, value in settings.items():
            setattr(connection, name, value)


def _set_up(connection: psycopg.Connection[Any], mark: str) -> None:
    set_up = "select set_config('sublet.transaction', %s, true), current_setting('transaction_isolation')"
    ((_, level),) = connection.execute(set_up, (mark,)).fetchall()
    _check_level(level)


def _check_same(connection: psycopg.Connection[Any], mark: str) -> None:
    state = "select current_setting('sublet.transaction', true), current_setting('default_transaction_isolation')"
    ((found, level),) = connection.execute(state).fetchall()
    if found != mark:
        raise UsageError(_ENDED.format(by="commit or rollback"))
    _check_level(level)


def _check_level(level: str) -> None:
    if level in _STRICT:
        raise UsageError(_LEVEL.format(level=level))


def has_written(connection: psycopg.Connection[Any]) -> bool:
    """Return whether the transaction that is open has written something."""
    ((is_assigned,),) = connection.execute("select pg_current_xact_id_if_assigned() is not null").fetchall()
    return bool(is_assigned)
