"""Keeps a forked process from using what its parent made.

A fork has neither its parent's threads nor connections of its own. Whatever was queued there would go nowhere, and a
caller would wait for ever: so that raises. Closing the copy does nothing, since the connection it refers to is the
parent's.
"""

from __future__ import annotations

import os

from sublet_protocol.domain.errors import UsageError


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
