"""Rejects the use of a publisher in a forked process, which lacks its sending thread.

Whatever was queued there would go nowhere, and a caller would wait for ever: so that raises. Closing the copy does
nothing, since the connection it refers to is the parent's.
"""

from __future__ import annotations

import os

from sublet_protocol.domain.errors import UsageError

HINT = "Make one in this process, after the fork."


def check_not_forked(made_in: int, what: str, hint: str = HINT) -> None:
    """Raise `UsageError` in any process but the one of that id."""
    here = os.getpid()
    if here != made_in:
        raise UsageError(
            f"{what} was made in process {made_in}, and this is process {here}: its connection and its thread do not "
            f"come along when a process forks. {hint}"
        )
