"""A stream that was lent: how far it is read, how far acknowledged. Plain bookkeeping, no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sublet_borrower.machine.events import Progressed
from sublet_borrower.machine.read_failure import Trouble, plain
from sublet_protocol.domain.errors import PoisonBlock
from sublet_protocol.domain.topics import Filter


@dataclass(slots=True, eq=False)
class Lent:
    """A stream under one grant. `head`: where it ended when last looked at; None: not looked at yet. `said`: where it
    ends as somebody has said since, which is worth a look and nothing more.

    `outstanding`: {ticket of a batch: how far it is done}; tickets grow, here they are first offsets. `ticket`: that of
    what was taken last. `given_up`: nobody will acknowledge what is outstanding any more.
    `reading`: what follows is being read, and may be taken. `unreadable`: what comes next cannot be had, its messages
    are gone, or not to be had now: then it is tried `again_at`, and `trouble` knows what was said of it. `poison`: it
    cannot be decoded, and the stream is handed back once all before it is done. `size`: bytes given out so far.
    `most_bytes`: no more than this is worth reading at once.
    """

    stream_id: int
    grant_id: int
    generation_id: int
    filter: Filter
    read: int
    head: int | None = None
    said: int = 0
    outstanding: dict[int, int] = field(default_factory=dict)
    given_up: bool = False
    reading: bool = False
    stopping: bool = False
    over: bool = False
    lost: bool = False
    unreadable: bool = False
    again_at: float | None = None
    trouble: Trouble = field(default_factory=Trouble)
    poison: PoisonBlock | None = None
    size: int = 0
    ticket: int = 0
    most_bytes: int | None = None

    @property
    def acknowledged(self) -> int:
        """Everything before this offset is done. From any thread: the first of one copy is what counts."""
        read, outstanding = self.read, self.outstanding.copy()
        return outstanding[min(outstanding)] if outstanding else read

    @property
    def may_have_more(self) -> bool:
        """Worth reading now."""
        return not (self.stopping or self.over or self.unreadable) and self.goes_on

    @property
    def goes_on(self) -> bool:
        """There may be more than was read."""
        return self.head is None or max(self.head, self.said) > self.read

    def take(self, start: int, end: int, head: int) -> bool:
        """Move on behind what lies at [start, end) of a stream that ends at `head`.

        Only the direct successor of what was taken last is accepted. A repeat, and what lies further on, is to be
        discarded: False, and nothing has changed. What was taken is outstanding before anything else: whatever breaks
        off the session's thread here, nothing is lost.
        """
        if self.over or start != self.read or not start <= end <= head:
            return False
        if end > start:
            self.outstanding[start] = self.ticket = start
        self.read, self.head, self.said, self.reading = end, head, 0, False
        return True

    def done(self, ticket: int) -> bool:
        """The batch is done. False: it was before."""
        return self.outstanding.pop(ticket, None) is not None

    def done_upto(self, ticket: int, position: int) -> None:
        """The batch, which is outstanding, is done up to there."""
        self.outstanding[ticket] = max(self.outstanding[ticket], position)

    def place(self) -> tuple[Any, ...]:
        """Where it is read to; for `go_back`."""
        return self.read, self.ticket, self.size

    def go_back(self, place: tuple[Any, ...]) -> None:
        """As if nothing had been taken since it was there: nobody was given that."""
        self.read, self.ticket, self.size = place
        for ticket in [ticket for ticket in self.outstanding if ticket >= self.read]:
            del self.outstanding[ticket]

    @property
    def is_settled(self) -> bool:
        """Nothing will be acknowledged any more."""
        return self.given_up or not (self.outstanding or self.reading)

    @property
    def is_ending(self) -> bool:
        """Nothing more will be read: it was told to stop, or cannot be read on."""
        return self.stopping or self.poison is not None

    def progress(self) -> Progressed:
        """What to report; final once nothing more will be read and nothing is outstanding but what was given up."""
        final, position = self.is_ending and self.is_settled, self.acknowledged
        lag = None if self.head is None else max(self.head - position, 0)
        until = self.read if final and self.outstanding else 0
        said = Progressed(self.stream_id, self.grant_id, position, final, self.size, lag, until)
        return self.with_trouble(said)

    def with_trouble(self, said: Progressed) -> Progressed:
        """The same with what hinders the reading. Who gives up what was given out says nothing of what lies behind."""
        if self.poison is None or not said.final or self.outstanding:
            return replace(said, trouble=self.trouble.told)
        return replace(said, trouble=plain(str(self.poison)), poison=self.poison.offsets[1])
