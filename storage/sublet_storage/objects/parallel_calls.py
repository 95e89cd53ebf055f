"""Reads and writes several objects of a location in parallel, with bounded waits.

Each result is reported as it comes. A location that sends nothing for a while is away: the caller has other locations
to serve. Its threads are left to end when they can, and keep no process from ending.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import cache
from typing import Any, Final, TypeVar

from sublet_storage.objects.object_stores import ObjectStore

MAX_PARALLEL_CALLS: Final = 8
RECEIVE_TIMEOUT_S: Final = 20.0
"""Less than a member of a group waits for the node that reads for it."""

TO_READ: Final = "to read"
TO_CHANGE: Final = "to change"
"""The operations at a location: reads do not wait for changes, nor changes for reads."""

_T = TypeVar("_T")
_R = TypeVar("_R")


def run_parallel(
    store: ObjectStore, operation: str, work: Callable[[_T], _R], items: Sequence[_T]
) -> list[_R | Exception]:
    """Return what it makes of each, or has raised, in their order. `operation`: `TO_READ` or `TO_CHANGE`.

    Raise `PayloadUnavailable` where for `RECEIVE_TIMEOUT_S` none of them has ended.
    """
    pool = _get_pool(os.getpid(), store.location.prefix, operation)
    futures: list[Future[_R]] = [pool.submit(work, item) for item in items]
    waiting = set(futures)
    while waiting:
        ended, waiting = wait(waiting, timeout=RECEIVE_TIMEOUT_S, return_when=FIRST_COMPLETED)
        if not ended:
            for future in waiting:
                future.cancel()
            raise store.note_timeout(RECEIVE_TIMEOUT_S)
    errors = [future.exception() for future in futures]
    return [
        error if isinstance(error, Exception) else future.result()
        for future, error in zip(futures, errors, strict=True)
    ]


def run_single(store: ObjectStore, operation: str, work: Callable[[], _R]) -> _R:
    """Return the answer of a single call, as `run_parallel` does of several. Raise what it raises."""
    (outcome,) = run_parallel(store, operation, lambda _: work(), (None,))
    if isinstance(outcome, Exception):
        raise outcome
    return outcome


class _Pool:
    """A pool of threads that the interpreter does not wait for when it ends, unlike those of an executor."""

    def __init__(self) -> None:
        self._waiting: queue.SimpleQueue[tuple[Future[Any], Callable[[Any], Any], Any]] = queue.SimpleQueue()
        for _ in range(MAX_PARALLEL_CALLS):
            threading.Thread(target=self._run, name="sublet payloads", daemon=True).start()

    def submit(self, work: Callable[[_T], _R], item: _T) -> Future[_R]:
        future: Future[_R] = Future()
        self._waiting.put((future, work, item))
        return future

    def _run(self) -> None:
        while True:
            future, work, item = self._waiting.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work(item))
            except BaseException as error:  # noqa: BLE001 - raised where it is waited for
                future.set_exception(error)
            del future, work, item  # a payload may be large, and nothing more come for long


@cache
def _get_pool(pid: int, prefix: str, operation: str) -> _Pool:
    """Return the process's pool: a forked child has none of its parent's threads."""
    return _Pool()
