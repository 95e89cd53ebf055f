"""Releases a lock that an exception left taken."""

from __future__ import annotations

import contextlib
from collections.abc import Callable


def release_fully(release: Callable[[], None]) -> None:
    """Release a reentrant lock where an exception interrupted its holder on this thread."""
    with contextlib.suppress(RuntimeError):  # this thread does not hold it
        while True:
            release()
