"""Runs maintenance of payloads until it is killed: `python -m tests.processes.moving URL SPACE POINT`.

POINT is where it kills itself: `intended`, objects are written down; `written`, the first object is there and no block
names it; `named`, blocks name theirs; `dropped`, retention has taken the rows; `deleted`, the objects too, which are
still written down.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from sublet_storage.db.connect import connect
from sublet_storage.objects import unreferenced_objects
from sublet_storage.spaces import tiering
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_queries import find_space


def main(url: str, space: str, point: str) -> None:
    if point == "intended":
        tiering.run_parallel = _dying(lambda *_: None)  # type: ignore[attr-defined]
    if point == "written":
        tiering.run_parallel = _dying(lambda _there, _what, work, blocks: work(blocks[0]))  # type: ignore[attr-defined]
    if point == "deleted":
        unreferenced_objects.run_parallel = _dying(unreferenced_objects.run_parallel)  # type: ignore[attr-defined]
    with connect(url) as connection:
        found = find_space(connection, space)
        tiering.tier_space(connection, found)
        if point == "named":
            _die()
        apply_retention(connection)
        if point == "dropped":
            _die()
        unreferenced_objects.delete_expired_objects(connection, grace_s=0.0)


def _dying(work: Callable[..., Any]) -> Callable[..., Any]:
    def die(*args: Any) -> None:
        work(*args)
        _die()

    return die


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main(*sys.argv[1:])
