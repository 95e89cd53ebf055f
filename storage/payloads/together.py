"""Several objects at once: what takes long is waiting for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Final, TypeVar

AT_ONCE: Final = 8

_T = TypeVar("_T")
_R = TypeVar("_R")


def together(
    where: str, work: Callable[[_T], _R], items: Sequence[_T], silence_s: float | None = None
) -> list[_R | Exception]:
    """What it makes of each, or has raised, in their order. `where`: those at one do not wait for those at another.

    Raises `TimeoutError` where for `silence_s` none of them has ended: their threads are left to end when they can.
    """
    pool = _pool(os.getpid(), where)
    futures: list[Future[_R]] = [pool.submit(work, item) for item in items]
    waiting = set(futures)
    while waiting:
        ended, waiting = wait(waiting, timeout=silence_s, return_when=FIRST_COMPLETED)
        if not ended:
            for future in waiting:
                future.cancel()
            raise TimeoutError
    errors = [future.exception() for future in futures]
    return [
        error if isinstance(error, Exception) else future.result()
        for future, error in zip(futures, errors, strict=True)
    ]


@lru_cache(maxsize=64)
def _pool(pid: int, where: str) -> ThreadPoolExecutor:
    """A forked child has none of its parent's threads."""
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sublet payloads")
