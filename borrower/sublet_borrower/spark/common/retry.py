"""Retries in Spark's processes while a database, or a payload location, is away."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import psycopg

from sublet_protocol.domain.errors import DatabaseUnreachable, PayloadUnavailable
from sublet_storage.util.retry import Backoff, call_with_retry

log = logging.getLogger(__name__)

_T = TypeVar("_T")


def retry_while_unavailable(attempt: Callable[[], _T], away_s: float, action: str) -> _T:
    """Return the result of `attempt`, repeated for `away_s` while the database or a payload location is away; each
    failure is logged.

    Raise the error of the last attempt.
    """

    def is_away(error: Exception) -> bool:
        if not isinstance(error, (psycopg.OperationalError, DatabaseUnreachable, PayloadUnavailable)):
            return False
        log.warning("database or payloads unavailable, retrying: action=%s: %s", action, error)
        return True

    return call_with_retry(attempt, is_away, Backoff(total_s=away_s))
