"""Trying again, with pauses that grow."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")


class Backoff:
    """Pauses in seconds, each twice as long as the one before, up to `max_s`; up to `jitter` of each is left to chance,
    so that many who lost the same thing do not come back at once."""

    def __init__(self, first_s: float, max_s: float, jitter: float = 0.0) -> None:
        self._first_s, self._max_s, self._jitter = first_s, max_s, jitter
        self._next_s = first_s

    def succeeded(self) -> None:
        """Begin again with the first."""
        self._next_s = self._first_s

    def next_s(self) -> float:
        """How long to wait now."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return pause_s * (1 - random.uniform(0, self._jitter))


def call_with_retry(
    attempt: Callable[[], _T],
    retryable: Callable[[Exception], bool],
    backoff: Backoff,
    deadline: float = math.inf,
    wait: Callable[[float], object] = time.sleep,
) -> _T:
    """The answer of an attempt, made again while what it raises is `retryable`, and the pause before the next ends
    before the `deadline` (of the monotonic clock). Raises what the last attempt raised. `retryable` may do what there
    is to be done between two attempts."""
    while True:
        try:
            return attempt()
        except Exception as error:
            pause_s = backoff.next_s()
            if not retryable(error) or time.monotonic() + pause_s > deadline:
                raise
        wait(pause_s)
