"""Waiting, in Spark's processes, for a database, or a place of payloads, that is away for a while."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeVar

import psycopg

from sublet_protocol.domain.errors import DatabaseUnreachable, PayloadUnavailable
from sublet_storage.util.retry import Backoff, call_with_retry

log = logging.getLogger(__name__)

BACKOFF_INITIAL_S = 0.1
BACKOFF_MAX_S = 2.0
JITTER = 0.5

_T = TypeVar("_T")


def retry_while_unavailable(attempt: Callable[[], _T], away_s: float, said: str) -> _T:
    """The answer of an attempt, which is made again while either is away, for so long; each time it is `said`.

    Raises what the last attempt raised.
    """

    def is_away(error: Exception) -> bool:
        if not isinstance(error, (psycopg.OperationalError, DatabaseUnreachable, PayloadUnavailable)):
            return False
        log.warning("%s: %s", said, error)
        return True

    return call_with_retry(attempt, is_away, Backoff(BACKOFF_INITIAL_S, BACKOFF_MAX_S, JITTER, away_s))
