"""Keeps the error of one space or generation from holding up the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import psycopg

from sublet_protocol.domain.errors import MalformedRow

_T = TypeVar("_T")


def select_done(conn: psycopg.Connection[Any], items: Iterable[_T], act: Callable[[_T], bool]) -> Iterator[_T]:
    """Yield the items for which `act` returns True. Raise the first error of the database, or of a stored value, after
    all others were done; a lock that others hold is waited for once."""
    errors: list[Exception] = []
    for item in items:
        try:
            if act(item):
                yield item
        except (psycopg.Error, MalformedRow) as error:
            if conn.closed:
                raise
            errors.append(error)
            if isinstance(error, psycopg.errors.LockNotAvailable):
                break
    if errors:
        raise errors[0]
