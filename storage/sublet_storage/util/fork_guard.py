"""Keeps a forked process from using what its parent made.

A fork has neither its parent's threads nor connections of its own. Whatever was queued there would go nowhere, and a
caller would wait for ever: so that raises. Closing the copy does nothing, since the connection it refers to is the
parent's. Nor does dropping it, which ends what this process has made and not closed.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Callable

from sublet_protocol.domain.errors import UsageError

_PACKAGES = ("sublet", "sublet_borrower", "sublet_storage")


class OwnerProcess:
    """The process in which an object was made: this one, or that of `pid`."""

    hint = "Make one in this process, after the fork."

    def __init__(self, pid: int | None = None) -> None:
        self.pid = pid or os.getpid()

    @property
    def is_forked(self) -> bool:
        """Return whether this is another process."""
        return os.getpid() != self.pid

    def check(self, subject: str, hint: str = "") -> None:
        """Raise `UsageError` if this is another process."""
        if self.is_forked:
            raise UsageError(
                f"{subject} was made in process {self.pid}, and this is process {os.getpid()}: its connection and its "
                f"thread do not come along when a process forks. {hint or self.hint}"
            )


class DropMonitor:
    """Monitor of a client, from `start` to `stop`: once it is collected, `end` runs on a thread of its own, and a
    `ResourceWarning` has the `origin` and the `consequence`. Not in a fork, nor at the end of the process.

    `end` must not keep the client alive. `origin` may be replaced, where one client makes another.
    """

    def __init__(self, owner: OwnerProcess, origin: str, consequence: str, end: Callable[[], None]) -> None:
        self.origin = origin
        self._owner, self._consequence, self._end = owner, consequence, end
        self._finalizer: weakref.finalize[..., object] | None = None

    def start(self, client: object) -> None:
        """Start monitoring the client, which is open now."""
        self._finalizer = weakref.finalize(client, self._on_dropped)
        self._finalizer.atexit = False

    def stop(self) -> None:
        """Stop monitoring: the client is closed."""
        if self._finalizer is not None:
            self._finalizer.detach()

    def _on_dropped(self) -> None:
        """End the client. From any thread, at any point of its execution, also while it holds a lock."""
        if self._owner.is_forked:
            return
        threading.Thread(target=self._end, name="sublet dropped", daemon=True).start()
        warnings.warn(  # raises where warnings are errors
            f"{self.origin}, was dropped without being closed: {self._consequence}. Close it, or use it in a with "
            "block.",
            ResourceWarning,
            stacklevel=2,
        )


def describe_origin(subject: str) -> str:
    """Return what is made now, and FILE:LINE of the caller outside of our packages."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PACKAGES:
        frame = frame.f_back
    return f"{subject}, made at {frame.f_code.co_filename}:{frame.f_lineno}"
