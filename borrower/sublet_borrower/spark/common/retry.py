"""Retries in Spark's processes while a database, or a payload location, is away."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import psycopg

from sublet_protocol.domain.errors import DatabaseUnreachable, PayloadUnavailable
from sublet_storage.util.retry import Backoff, call_with_retry

_AWAY = (psycopg.OperationalError, DatabaseUnreachable, PayloadUnavailable)

_T = TypeVar("_T")


def retry_while_unavailable(attempt: Callable[[], _T], away_s: float, action: str) -> _T:
    """Return the result of `attempt`, repeated for `away_s` while the database or a payload location is away. Raise the
    error of the last attempt.
    """
    return call_with_retry(action, attempt, lambda error: isinstance(error, _AWAY), Backoff(total_s=away_s))
