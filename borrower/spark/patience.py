"""Waiting, in Spark's processes, for a database, or a place of payloads, that is away for a while."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

import psycopg

from protocol.errors import DatabaseUnreachable, PayloadUnavailable

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 2.0

_T = TypeVar("_T")


def patiently(attempt: Callable[[], _T], away_s: float, said: str) -> _T:
    """The answer of an attempt, which is made again while either is away, for so long; each time it is `said`.

    Raises what the last attempt raised.
    """
    give_up_at, pause_s = time.monotonic() + away_s, FIRST_PAUSE_S
    while True:
        try:
            return attempt()
        except (psycopg.OperationalError, DatabaseUnreachable, PayloadUnavailable) as error:
            if time.monotonic() > give_up_at:
                raise
            log.warning("%s: %s", said, error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
