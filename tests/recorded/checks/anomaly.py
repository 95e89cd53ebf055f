"""A promise that was broken, and by what."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Which promise."""

    LOST = "lost"  # acknowledged and not stored, or stored and never consumed by a group that was promised it
    TWICE = "stored twice"
    PHANTOM = "phantom"  # stored, given out or effective, though nobody asked for it, or at another place
    RESURRECTED = "resurrected"  # stored or effective, though the answer to whoever asked for it was that it is not
    TORN = "torn"  # a transaction that is there in part
    ORDER = "out of order"
    EARLY = "begun too early"  # a call, before what precedes its messages was done
    LATE = "begun too late"  # a call, when its stream was somebody else's
    CROSSED = "two holders"
    REPEATED = "unexplained repeat"
    BEFORE = "from before the start"  # of the group, or where a reset let it go on
    BACK = "progress that went back"  # or a grant id, or a term
    DOUBLE = "double effect"
    MISSING = "missing effect"
    FORKED = "forked effects"  # a transaction did not see the one before it


@dataclass(frozen=True, slots=True)
class Anomaly:
    """`group`: whose; empty: the log's. `messages`, `calls` and `streams` are those that its story is about."""

    kind: Kind
    what: str
    group: str = ""
    messages: tuple[str, ...] = ()
    streams: tuple[int, ...] = ()
    calls: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind}{f' in {self.group}' if self.group else ''}: {self.what}"
