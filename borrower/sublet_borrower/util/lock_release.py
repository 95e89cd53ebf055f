"""Releases a lock that an exception left taken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable


def release_fully(release: Callable[[], None]) -> None:
    """Of a lock that can be taken again by who has it, where an exception broke off its holder on this thread."""
    with contextlib.suppress(RuntimeError):  # it is not ours
        while True:
            release()
