"""Settings of malloc and of the garbage collector, made once in each Python worker of Spark: it runs many tasks."""

from __future__ import annotations

import gc
from functools import cache

FREED_BYTES = 31 * 1024 * 1024
"""Just below the size that glibc always treats as large."""


@cache
def keep_freed_memory() -> None:
    """Have the memory of one page reused for the next: once glibc has seen a piece of this size freed, which is never
    touched and costs nothing, it no longer returns a page's memory to the system, to get it back zeroed.
    """
    bytes(FREED_BYTES)


@cache
def freeze_loaded_objects() -> None:
    """Have collections skip what is loaded by the end of the first task: a worker collects all after each task, and
    traversing all modules took three quarters of its time in small micro-batches.
    """
    gc.collect()
    gc.freeze()
