"""Why what follows in a stream cannot be had for now, and what of that the stream's leader is told. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from sublet_protocol.domain.errors import PayloadUnavailable
from sublet_protocol.messages.messages import MAX_TROUBLE, StreamProgress

LASTING_S = 10.0
"""A place that is away for less than this is not worth a line in the group's history for each stream that waits."""

AGAIN_S = 60.0
"""What comes and goes is told no more often than so: each time is two lines of history."""

MOST_TOLD_BYTES = 512 * 1024
"""Of troubles in one message: a place that is away may be that of all of a member's streams, and a message that is too
large for a node ends the connection."""


@dataclass(slots=True)
class Trouble:
    """`said`: in the log, as it is now. `told`: to the leader, as it was first of its kind; both are empty where all is
    well. `since`: of whichever kind."""

    said: str = ""
    told: str = ""
    since: float = 0.0
    _kind: type[Exception] | None = None
    _told_at: float = -AGAIN_S

    def met(self, problem: Exception, now: float) -> bool:
        """It is tried again later; whether the leader is to be told now."""
        if not self.said:
            self.since = now
        self.said, kind = str(problem), type(problem)
        lasts_s = LASTING_S if kind is PayloadUnavailable else 0.0
        if kind is self._kind or now < max(self.since + lasts_s, self._told_at + AGAIN_S):
            return False
        self.told, self._kind, self._told_at = plain(self.said), kind, now
        return True

    def over(self) -> bool:
        """It can be read on; whether the leader is to be told."""
        was_told, self.said, self.told, self._kind = bool(self.told), "", "", None
        return was_told


def parcels(streams: Iterable[StreamProgress]) -> Iterator[tuple[StreamProgress, ...]]:
    """The same, in order, in as few messages as their troubles fit into."""
    parcel, size = list[StreamProgress](), 0
    for each in streams:
        more = len(each.trouble.encode())
        if parcel and size + more > MOST_TOLD_BYTES:
            yield tuple(parcel)
            parcel, size = [], 0
        parcel.append(each)
        size += more
    if parcel:
        yield tuple(parcel)


def plain(text: str) -> str:
    """As it may travel, whatever a store's library has to say."""
    return "".join(each if each.isprintable() else " " for each in text)[:MAX_TROUBLE]
