"""The session's own view of what it was lent: how far each stream is read, how far acknowledged, and what comes next.

Plain bookkeeping, no I/O. A stream may have batches outstanding: given out and not acknowledged. Progress stops before
the first of them, whatever is acknowledged behind it, and the last word can only be given when there is none, or when
they are given up: then it says what may be seen again.

What the agent says is heard on the agent's thread, at once: while the session's own thread works on a batch, its other
streams come and go. What one of the two does with a stream, the other sees whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import assert_never

from borrower.machine.events import Install, Progressed, Remove, Saved, Stop, Tell
from protocol.messages import Grant, RevokedReason
from protocol.words import Filter


@dataclass(slots=True, eq=False)
class Lent:
    """A stream under one grant. `head`: where it ended when last looked at; None: not looked at yet.

    `outstanding`: {first offset of a batch: how far it is done}. `given_up`: nobody will acknowledge these any more.
    `reading`: what follows is being read, and may be taken. `unreadable`: what comes next cannot be had, its messages
    are gone. `size`: bytes given out so far.
    """

    stream_id: int
    grant_id: int
    generation_id: int
    filter: Filter
    read: int
    head: int | None = None
    outstanding: dict[int, int] = field(default_factory=dict)
    given_up: bool = False
    reading: bool = False
    stopping: bool = False
    over: bool = False
    lost: bool = False
    unreadable: bool = False
    size: int = 0

    @property
    def acknowledged(self) -> int:
        """Everything before this offset is done. From any thread: the first of one copy is what counts."""
        read, outstanding = self.read, self.outstanding.copy()
        return outstanding[min(outstanding)] if outstanding else read

    @property
    def may_have_more(self) -> bool:
        """Worth reading now."""
        return not (self.stopping or self.over or self.unreadable) and (self.head is None or self.head > self.read)

    def take(self, start: int, end: int, head: int) -> bool:
        """Move on behind what lies at [start, end) of a stream that ends at `head`.

        Only the direct successor of what was taken last is accepted. A repeat, and what lies further on, is to be
        discarded: False, and nothing has changed. What was taken is outstanding before anything else: whatever breaks
        off the session's thread here, nothing is lost.
        """
        if self.over or start != self.read or not start <= end <= head:
            return False
        if end > start:
            self.outstanding[start] = start
        self.read, self.head, self.reading = end, head, False
        return True

    @property
    def is_settled(self) -> bool:
        """Nothing will be acknowledged any more."""
        return self.given_up or not (self.outstanding or self.reading)

    def progress(self) -> Progressed:
        """What to report; final once it was told to stop and nothing is outstanding but what was given up."""
        final, position = self.stopping and self.is_settled, self.acknowledged
        lag = None if self.head is None else max(self.head - position, 0)
        until = self.read if final and self.outstanding else 0
        return Progressed(self.stream_id, self.grant_id, position, final, self.size, lag, until)


class Handler:
    """All streams of one session. `take` is for the agent's thread, the rest for the session's; `report` for both."""

    def __init__(self, report: Callable[[Progressed], None]) -> None:
        self._report = report
        self._lock = threading.RLock()
        self._lent: dict[int, Lent] = {}
        self._turn: list[int] = []

    def take(self, tell: Tell) -> None:
        """Act on what the agent says."""
        with self._lock:
            match tell:
                case Install(grant):
                    self._install(grant)
                case Stop(stream_id, grant_id):
                    lent = self._under(stream_id, grant_id)
                    if lent is not None:
                        lent.stopping = True
                        if lent.is_settled:
                            self._report(lent.progress())
                case Remove(stream_id, grant_id, reason):
                    if self._under(stream_id, grant_id) is not None:
                        self._remove(stream_id, reason)
                case Saved():
                    pass
                case _:
                    assert_never(tell)

    def next_to_read(self, allowed: Callable[[Lent], bool]) -> Lent | None:
        """The next stream worth reading, each in its turn; it is being read until `Lent.take` or `not_read`."""
        with self._lock:
            for _ in range(len(self._turn)):
                stream_id = self._turn.pop(0)
                self._turn.append(stream_id)
                lent = self._lent[stream_id]
                if lent.may_have_more and allowed(lent):
                    lent.reading = True
                    return lent
        return None

    def ends(self) -> dict[int, tuple[int, int]]:
        """{stream: (grant id, head)} of those read to where they ended when last looked at."""
        with self._lock:
            return {
                stream_id: (lent.grant_id, lent.read)
                for stream_id, lent in self._lent.items()
                if not (lent.stopping or lent.unreadable or lent.may_have_more)
            }

    def note_heads(self, heads: Iterable[tuple[int, int]]) -> None:
        """(stream, head), as the log says or somebody who pushes."""
        with self._lock:
            for stream_id, head in heads:
                lent = self._lent.get(stream_id)
                if lent is not None:
                    lent.head = max(head, lent.read)

    def not_read(self, lent: Lent) -> None:
        """It is not being read any more."""
        with self._lock:
            lent.reading = False
            if lent.stopping and lent.is_settled and not lent.over:
                self._report(lent.progress())

    def skipped(self, lent: Lent, first: int) -> None:
        """What was taken from `first` on has nothing for this subscription."""
        with self._lock:
            is_news = lent.outstanding.pop(first, None) is not None
            if is_news and not (lent.outstanding or lent.over):
                self._report(lent.progress())

    def given(self, lent: Lent, size: int) -> None:
        """What was taken last, of `size` bytes, is a batch in the user's hands."""
        with self._lock:
            lent.size += size

    def acknowledged(self, lent: Lent, first: int) -> None:
        """The batch that begins at `first` is done."""
        with self._lock:
            lent.outstanding.pop(first, None)
            if not lent.over:
                self._report(lent.progress())

    def progressed(self, lent: Lent, first: int, position: int) -> None:
        """The batch that begins at `first` is done up to `position`, and still outstanding."""
        with self._lock:
            lent.outstanding[first] = max(lent.outstanding[first], position)
            if not lent.over:
                self._report(lent.progress())

    def give_up(self) -> None:
        """Nothing outstanding will be acknowledged any more."""
        with self._lock:
            for lent in self._lent.values():
                awaited, lent.given_up = lent.stopping and not lent.is_settled, True
                if awaited:
                    self._report(lent.progress())

    def streams(self) -> dict[int, int]:
        """{stream: next offset to deliver} of everything held; from any thread."""
        return {s: lent.acknowledged for s, lent in tuple(self._lent.items())}

    def _install(self, grant: Grant) -> None:
        self._remove(grant.stream_id, RevokedReason.LOST)
        self._lent[grant.stream_id] = Lent(
            grant.stream_id,
            grant.grant_id,
            grant.generation_id,
            Filter.parse(grant.filter),
            grant.position,
        )
        self._turn.append(grant.stream_id)

    def _under(self, stream_id: int, grant_id: int) -> Lent | None:
        lent = self._lent.get(stream_id)
        return lent if lent is not None and lent.grant_id == grant_id else None

    def _remove(self, stream_id: int, reason: RevokedReason) -> None:
        lent = self._lent.pop(stream_id, None)
        if lent is not None:
            lent.over, lent.lost = True, reason is RevokedReason.LOST
            self._turn.remove(stream_id)
