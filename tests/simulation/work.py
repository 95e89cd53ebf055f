"""A stream held by a session."""

from __future__ import annotations

from dataclasses import dataclass, field

BEYOND_HEAD = "beyond the head"
"""The read error of a holder that finds a stream to end before its position."""


@dataclass(slots=True)
class Work:
    """A stream installed in a session: everything before `position` is done. `busy`: a call runs. `since`: the offset
    from which messages are in running calls. `read_at`: when it was last read; None: whenever a call begins."""

    group_id: int
    stream_id: int
    grant_id: int
    position: int
    busy: bool = field(default=False, kw_only=True)
    over: bool = field(default=False, kw_only=True)
    since: int | None = field(default=None, kw_only=True)
    read_at: float | None = field(default=None, kw_only=True)
