"""Retries with pauses that grow."""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable
from typing import TypeVar

from sublet_protocol.domain.errors import format_error

log = logging.getLogger(__name__)

INITIAL_PAUSE_S = 0.05
MAX_PAUSE_S = 2.0
JITTER = 0.5
WARN_AFTER_S = 5.0

_T = TypeVar("_T")


class Backoff:
    """Pauses in seconds, each twice as long as the one before, up to `max_s`; up to half of each is random, so that
    many clients do not come back at once. `total_s`: for how long it is tried, from now on."""

    def __init__(
        self, first_s: float = INITIAL_PAUSE_S, max_s: float = MAX_PAUSE_S, *, total_s: float = math.inf
    ) -> None:
        self._first_s, self._max_s = first_s, max_s
        self._next_s, self._deadline, self._not_before = first_s, time.monotonic() + total_s, -math.inf

    @property
    def left_s(self) -> float:
        """Return what is left of `total_s`."""
        return self._deadline - time.monotonic()

    @property
    def wait_s(self) -> float:
        """Return the remaining pause after an attempt that failed; not above 0 if there is none."""
        return self._not_before - time.monotonic()

    def reset(self) -> None:
        """Begin again with the first pause."""
        self._next_s = self._first_s

    def start_pause(self, least_s: float = 0.0) -> None:
        """Begin the next pause, or one of `least_s` if that is longer, unless one is under way."""
        if self.wait_s <= 0:  # else many tried at once
            self._not_before = time.monotonic() + max(self.draw_pause_s(), least_s)

    def next_pause_s(self, least_s: float) -> float | None:
        """Return how long to wait now, at least `least_s`; None if that is longer than what is left."""
        pause_s = max(self.draw_pause_s(), least_s)
        return None if pause_s > self.left_s else pause_s

    def draw_pause_s(self) -> float:
        """Return how long to wait now."""
        pause_s, self._next_s = self._next_s, min(2 * self._next_s, self._max_s)
        return pause_s * (1 - random.uniform(0, JITTER))


def call_with_retry(
    action: str,
    attempt: Callable[[], _T],
    retryable: Callable[[Exception], bool],
    backoff: Backoff,
    wait: Callable[[float], object] = time.sleep,
) -> _T:
    """Return the answer of an attempt, made again while what it raises is `retryable`, and the pause before the next,
    which is at least `after_s` of what was raised, ends within the time of the `backoff`. Raise what the last attempt
    raised. `retryable` may execute what is due between two attempts. That an `action` takes longer than 5 s is logged,
    once."""
    warn_at = time.monotonic() + WARN_AFTER_S
    while True:
        try:
            return attempt()
        except Exception as error:
            pause_s = backoff.next_pause_s(getattr(error, "after_s", 0.0))
            if not retryable(error) or pause_s is None:
                raise
            if time.monotonic() >= warn_at:
                log.warning(
                    "not done yet, retrying: action=%s took_s=%g: %s", action, WARN_AFTER_S, format_error(error)
                )
                warn_at = math.inf
        wait(pause_s)
