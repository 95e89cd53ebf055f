"""A stream in the hands of a session."""

from __future__ import annotations

from dataclasses import dataclass, field

BEYOND_HEAD = "beyond the head"
"""What a holder says that has found a stream to end before what it had read."""


@dataclass(slots=True)
class Work:
    """A stream installed in a session: everything before `position` is done. `busy`: a call runs. `since`:
    what follows from there on is in calls that run. `read_at`: when it was last read; None: whenever a call begins."""

    group_id: int
    stream_id: int
    grant_id: int
    position: int
    busy: bool = field(default=False, kw_only=True)
    over: bool = field(default=False, kw_only=True)
    since: int | None = field(default=None, kw_only=True)
    read_at: float | None = field(default=None, kw_only=True)
