"""Several objects at once: what takes long is waiting for each."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import lru_cache
from typing import Final, TypeVar

AT_ONCE: Final = 8

_T = TypeVar("_T")
_R = TypeVar("_R")


def together(work: Callable[[_T], _R], items: Sequence[_T]) -> list[_R]:
    """What it makes of each, in their order, when all are done. Raises what the first that failed has raised."""
    if len(items) < 2:
        return [work(item) for item in items]
    futures: list[Future[_R]] = [_pool(os.getpid()).submit(work, item) for item in items]
    wait(futures)
    return [future.result() for future in futures]


@lru_cache(maxsize=1)
def _pool(pid: int) -> ThreadPoolExecutor:
    """A forked child has none of its parent's threads."""
    return ThreadPoolExecutor(AT_ONCE, thread_name_prefix="sublet payloads")
