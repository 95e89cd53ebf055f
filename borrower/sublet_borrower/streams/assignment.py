"""The session's own view of what it was lent: how far each stream is read, how far acknowledged, and what comes next.

Plain bookkeeping, no I/O. A stream may have batches outstanding: given out and not acknowledged. Progress stops before
the first of them, whatever is acknowledged behind it, and the last word can only be given when there is none, or when
they are given up: then it says what may be seen again.

What the agent says is heard on the agent's thread, at once: while the session's own thread works on a batch, its other
streams come and go. What one of the two does with a stream, the other sees whole.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, assert_never

from sublet_borrower.machine.events import Announced, Install, Progressed, Remove, Saved, Stop, Tell
from sublet_borrower.streams.atomic_stream import WholeLent
from sublet_borrower.streams.granted_stream import Lent
from sublet_borrower.util.locks import let_go
from sublet_protocol.domain.epochs import GroupFrontier
from sublet_protocol.domain.errors import PoisonBlock
from sublet_protocol.domain.topics import Filter
from sublet_protocol.messages.messages import Grant, RevokedReason
from sublet_storage.readers.epoch_steps import Marks, WholeEpochs


class Handler:
    """All streams of one session. `take` is for the agent's thread, the rest for the session's; `report` for both.

    `epochs`: {space id: how far its group has come}, where that is atomic. `came_back` is called with each
    acknowledgement.
    """

    def __init__(self, report: Callable[[Progressed], None]) -> None:
        self._report = report
        self.came_back: Callable[[], None] = lambda: None
        self.epochs: dict[int, GroupFrontier] = {}
        self._lock = threading.RLock()
        self._lent: dict[int, Lent] = {}
        self._turn: deque[int] = deque()
        self._again_at = math.inf

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
                case Announced(epochs):
                    self._note_epochs(epochs)
                case Saved():
                    pass
                case _:
                    assert_never(tell)

    def next_to_read(self, allowed: Callable[[Lent], bool]) -> Lent | None:
        """The next stream worth reading, each in its turn; it is being read until `Lent.take` or `not_read`."""
        with self._lock:
            for _ in range(len(self._turn)):
                lent = self._lent[self._turn[0]]
                self._turn.rotate(-1)  # at once: what breaks off here must not leave a stream out
                if lent.may_have_more and allowed(lent):
                    lent.reading = True
                    return lent
        return None

    def try_later(self, lent: Lent, problem: Exception, now: float, after_s: float) -> bool:
        """What comes next in the stream cannot be had for so long. Its leader is told; whether this is news, of any of
        the streams."""
        with self._lock:
            lent.unreadable, lent.again_at = True, now + after_s
            self._again_at = min(self._again_at, lent.again_at)
            is_news = str(problem) not in self.troubles()
            if lent.trouble.met(problem, now):
                self.moved(lent)
            return is_news

    def poisoned(self, lent: Lent, problem: PoisonBlock) -> bool:
        """What comes next in the stream cannot be decoded: it is handed back when all before that is done. Whether this
        is news."""
        with self._lock:
            is_news, lent.unreadable, lent.again_at = lent.poison is None, True, None
            lent.poison = problem
            if isinstance(lent, WholeLent):
                lent.cut_short()
            return is_news

    def read_again(self, lent: Lent) -> bool:
        """What comes next in the stream was had; whether it could not be before, and its leader is told so."""
        with self._lock:
            if not lent.trouble.said:
                return False
            if lent.trouble.over():
                self.moved(lent)
            return True

    def try_again(self, now: float) -> None:
        """Streams whose time has come are read again, though they could not be."""
        if now < self._again_at:
            return
        with self._lock:
            for lent in self._lent.values():
                if lent.again_at is not None and lent.again_at <= now:
                    lent.unreadable, lent.again_at = False, None
            waiting = (lent.again_at for lent in self._lent.values() if lent.again_at is not None)
            self._again_at = min(waiting, default=math.inf)

    def troubles(self) -> set[str]:
        """What is said of streams that are tried again."""
        with self._lock:
            return {lent.trouble.said for lent in self._lent.values() if lent.trouble.said}

    def ends(self) -> dict[int, tuple[int, int]]:
        """{stream: (grant id, head)} of those read to where they ended when last looked at."""
        with self._lock:
            return {
                stream_id: (lent.grant_id, lent.read)
                for stream_id, lent in self._lent.items()
                if not (lent.stopping or lent.unreadable or lent.may_have_more)
            }

    def has_plain(self) -> bool:
        """Whether there is a stream of a group that is not atomic."""
        with self._lock:
            return any(not isinstance(lent, WholeLent) for lent in self._lent.values())

    def waiting(self) -> list[WholeLent]:
        """Streams with messages of epochs that are not completed."""
        with self._lock:
            return [lent for lent in self._lent.values() if isinstance(lent, WholeLent) and lent.waits]

    def note_completed(self, found: Mapping[int, Marks]) -> None:
        """Where streams end and what is completed in their spaces."""
        with self._lock:
            for lent in self.waiting():
                if lent.stream_id in found and found[lent.stream_id].lower != lent.plan.lower:
                    lent.told = True

    @property
    def is_within_a_step(self) -> bool:
        """Whether some epochs are given out in part."""
        with self._lock:
            return any(isinstance(lent, WholeLent) and lent.is_within_a_step for lent in self._lent.values())

    def cut_short(self) -> None:
        """Nothing more is read: epochs that are given out in part are left."""
        with self._lock:
            for lent in self._lent.values():
                if isinstance(lent, WholeLent):
                    lent.cut_short()

    def moved(self, lent: Lent) -> None:
        """Report it, as it may have moved on."""
        with self._lock:
            if not lent.over:
                self._report(lent.progress())

    def note_heads(self, heads: Iterable[tuple[int, int]]) -> None:
        """(stream, head), as the log says. One that ends before what was read of it is read, which says so."""
        with self._lock:
            for stream_id, head in heads:
                lent = self._lent.get(stream_id)
                if lent is not None:
                    lent.head, lent.said = None if head < lent.read and not lent.reading else max(head, lent.read), 0

    def note_said(self, heads: Iterable[tuple[int, int]]) -> None:
        """(stream, head), as somebody says who may be wrong."""
        with self._lock:
            for stream_id, head in heads:
                lent = self._lent.get(stream_id)
                if lent is not None:
                    lent.said = head

    def not_read(self, lent: Lent) -> None:
        """It is not being read any more."""
        with self._lock:
            lent.reading = False
            if lent.is_ending and lent.is_settled and not lent.over:
                self._report(lent.progress())

    def go_back(self, lent: Lent, place: tuple[Any, ...]) -> None:
        """What was taken of the stream since it was there was given to nobody."""
        with self._lock:
            if not lent.over:
                lent.go_back(place)

    def look_again(self) -> None:
        """Reading was broken off, nobody knows where: nothing is being read, and where streams end is to be seen."""
        let_go(self._lock.release)
        with self._lock:
            for lent in tuple(self._lent.values()):
                lent.head = None
                self.not_read(lent)

    def skipped(self, lent: Lent, ticket: int) -> None:
        """What was taken under that ticket has nothing for this subscription."""
        with self._lock:
            is_news = lent.done(ticket)
            if is_news and not (lent.outstanding or lent.over):
                self._report(lent.progress())

    def given(self, lent: Lent, size: int) -> None:
        """What was taken last, of `size` bytes, is a batch in the user's hands."""
        with self._lock:
            lent.size += size

    def acknowledged(self, lent: Lent, ticket: int) -> None:
        """The batch is done."""
        self.came_back()
        with self._lock:
            lent.done(ticket)
            self.moved(lent)

    def progressed(self, lent: Lent, ticket: int, position: int) -> None:
        """The batch is done up to `position`, and still outstanding."""
        self.came_back()
        with self._lock:
            lent.done_upto(ticket, position)
            self.moved(lent)

    def give_up(self) -> None:
        """Nothing outstanding will be acknowledged any more."""
        with self._lock:
            for lent in self._lent.values():
                awaited, lent.given_up = lent.is_ending and not lent.is_settled, True
                if awaited:
                    self._report(lent.progress())

    def lose(self, stream_id: int, grant_id: int) -> None:
        """The database says that this grant is over. Its leader need not know: it is told that nothing more comes."""
        with self._lock:
            lent = self._under(stream_id, grant_id)
            if lent is not None:
                lent.stopping = lent.given_up = True
                self._report(lent.progress())
                self._remove(stream_id, RevokedReason.LOST)

    def abandon(self) -> str:
        """All streams are lost. What was given out of them and not acknowledged, in words."""
        with self._lock:
            given = [
                f"stream {s} from offset {lent.acknowledged}" for s, lent in self._lent.items() if lent.outstanding
            ]
            for stream_id in tuple(self._lent):
                self._remove(stream_id, RevokedReason.LOST)
            return ", ".join(given)

    def lags(self) -> dict[int, int]:
        """{stream: messages that it had to do when it was last looked at}, of those that were."""
        with self._lock:
            found = {stream_id: lent.progress().lag for stream_id, lent in self._lent.items()}
        return {stream_id: lag for stream_id, lag in found.items() if lag is not None}

    def streams(self) -> dict[int, int]:
        """{stream: next offset to deliver} of everything held; from any thread."""
        return {s: lent.acknowledged for s, lent in tuple(self._lent.items())}

    def _install(self, grant: Grant) -> None:
        self._remove(grant.stream_id, RevokedReason.LOST)
        facts = (grant.stream_id, grant.grant_id, grant.generation_id, Filter.parse(grant.filter), grant.position)
        if grant.consumed is None:
            self._lent[grant.stream_id] = Lent(*facts)
        else:
            self._lent[grant.stream_id] = WholeLent(*facts, plan=WholeEpochs(grant.position, grant.consumed))
        self._turn.append(grant.stream_id)

    def _note_epochs(self, epochs: tuple[GroupFrontier, ...]) -> None:
        """What is completed by now may be what streams wait for."""
        for one in epochs:
            known = self.epochs.get(one.space_id)
            if known is None or one.lower != known.lower:
                for lent in self.waiting():
                    lent.told = True
            if known is None or known.consumed.is_at_or_before(one.consumed):
                self.epochs[one.space_id] = one

    def _under(self, stream_id: int, grant_id: int) -> Lent | None:
        lent = self._lent.get(stream_id)
        return lent if lent is not None and lent.grant_id == grant_id else None

    def _remove(self, stream_id: int, reason: RevokedReason) -> None:
        lent = self._lent.pop(stream_id, None)
        if lent is not None:
            lent.over, lent.lost = True, reason is RevokedReason.LOST
            self._turn.remove(stream_id)
