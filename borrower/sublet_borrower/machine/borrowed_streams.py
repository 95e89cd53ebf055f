"""The streams that a borrower holds, and the highest grant id that ended per stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from msgspec import Struct
from msgspec.structs import replace

from sublet_borrower.machine.events import ProgressReported
from sublet_borrower.machine.transitions import BorrowedStreamStatus
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import Grant, HeldGrant, StreamProgress


class BorrowedStream(Struct):
    """One stream under one grant. `is_confirmed`: this borrower's own leader has granted it, and not only a
    predecessor's, under whose grant it may be worked on until `inherited_until`. `ends_at`: the leader takes it by
    force, and no later answer to a ping covers it. `send_at`: when its progress is to be sent, if not saved by then."""

    stream_id: int
    grant_id: int
    position: int
    status: BorrowedStreamStatus = BorrowedStreamStatus.GRANTED
    is_confirmed: bool = True
    inherited_until: float = float("-inf")
    ends_at: float = float("inf")
    send_at: float = float("-inf")
    is_final: bool = False
    saved_position: int = -1
    size: int = 0
    lag: int | None = None
    delivered_end: int = 0
    consumed: ConsumedFrontier | None = None
    saved_consumed: ConsumedFrontier | None = None
    in_doubt: InDoubtRange | None = None
    saved_in_doubt: InDoubtRange | None = None
    read_error: str = ""
    sent_read_error: str = ""
    poison: int = 0
    is_beyond_head: bool = False

    @property
    def is_settled(self) -> bool:
        """Return whether nothing is left to report: the leader has confirmed this very progress as durable."""
        return (
            not self.is_final
            and self.saved_position >= self.position
            and self.in_doubt in (None, self.saved_in_doubt)
            and self._is_saved(self.consumed)
        )

    def record_progress(self, progress: ProgressReported) -> bool:
        """Record what the session has reported. A position before one that it reported before, as after a read that it
        took back, moves nothing, but the rest counts; return False if that has nothing new."""
        if progress.position >= self.position:
            self.position, self.consumed = progress.position, progress.consumed or self.consumed
        elif not progress.is_final and progress.read_error == self.read_error:
            return False
        self.is_final, self.in_doubt = self.is_final or progress.is_final, progress.in_doubt or self.in_doubt
        self.size, self.lag, self.delivered_end = progress.size, progress.lag, progress.delivered_end
        self.read_error, self.poison = progress.read_error, progress.poison
        self.is_beyond_head = progress.is_beyond_head
        return True

    def mark_saved(self, position: int, consumed: ConsumedFrontier | None, in_doubt: InDoubtRange | None) -> bool:
        """Record a durable position; return False if it was known."""
        if position <= self.saved_position and in_doubt in (None, self.saved_in_doubt) and self._is_saved(consumed):
            return False
        self.saved_position, self.saved_in_doubt = max(self.saved_position, position), in_doubt
        self.saved_consumed = consumed if self.saved_consumed is None else self.saved_consumed.max_of(consumed)
        return True

    def _is_saved(self, consumed: ConsumedFrontier | None) -> bool:
        if consumed is None:
            return True
        return self.saved_consumed is not None and self.saved_consumed.max_of(consumed) == self.saved_consumed

    def good_until(self, trusted_until: float) -> float:
        """Return until when user calls may begin on it, if its leader's ping answer is valid until then."""
        return min(trusted_until, self.ends_at) if self.is_confirmed else self.inherited_until

    def to_progress(self) -> StreamProgress:
        """Return what to report."""
        return StreamProgress(
            self.stream_id,
            self.grant_id,
            self.position,
            self.is_final,
            self.size,
            self.lag,
            self.delivered_end,
            self.consumed,
            self.in_doubt,
            self.read_error,
            self.poison,
            self.is_beyond_head,
        )

    def to_final_progress(self) -> StreamProgress:
        """Return the final progress of all streams, for one message. Texts of read errors and blocks that cannot be
        decoded are left out, as the next holder will find them.
        """
        return replace(self.to_progress(), read_error="", poison=0)


class BorrowedStreams:
    """All streams of one borrower.

    A grant id only grows per stream, so one number per stream stands for every grant that is over: a late or repeated
    `grant` at or below it must not bring the stream back.
    """

    def __init__(self, inherited: Iterable[BorrowedStream] = ()) -> None:
        self._held = {s.stream_id: s for s in inherited}
        self._over: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[BorrowedStream]:
        return iter(self._held.values())

    def limit(self, until: float) -> None:
        """Let no user call begin on any of them after that time."""
        for stream in self:
            stream.inherited_until, stream.ends_at = min(stream.inherited_until, until), min(stream.ends_at, until)

    def find(self, stream_id: int, grant_id: int) -> BorrowedStream | None:
        """Return the stream, if it is held under exactly this grant."""
        stream = self._held.get(stream_id)
        return stream if stream is not None and stream.grant_id == grant_id else None

    def find_any_grant(self, stream_id: int) -> BorrowedStream | None:
        """Return the stream under any grant."""
        return self._held.get(stream_id)

    def is_grant_ended(self, stream_id: int, grant_id: int) -> bool:
        """Return whether the grant has ended here before, or was refused."""
        return grant_id <= self._over.get(stream_id, -1)

    def add(self, grant: Grant) -> BorrowedStream:
        """Hold the stream from the grant's position."""
        stream = BorrowedStream(grant.stream_id, grant.grant_id, grant.position, consumed=grant.consumed)
        self._held[grant.stream_id] = stream
        return stream

    def drop(self, stream_id: int, grant_id: int) -> BorrowedStream | None:
        """Mark the grant as over; return the stream if it was held under it."""
        self._over[stream_id] = max(grant_id, self._over.get(stream_id, -1))
        stream = self.find(stream_id, grant_id)
        if stream is not None:
            del self._held[stream_id]
        return stream

    def held(self) -> tuple[HeldGrant, ...]:
        """Return what a successor requests the next leader to confirm."""
        return tuple(HeldGrant(s.stream_id, s.grant_id, s.position, s.consumed) for s in self._held.values())

    def inherit(self, trusted_until: float) -> tuple[BorrowedStream, ...]:
        """Return the same streams for a successor, none confirmed; each is valid as long as the leader that confirmed
        it allows.
        """
        return tuple(
            BorrowedStream(
                s.stream_id,
                s.grant_id,
                s.position,
                s.status,
                is_confirmed=False,
                inherited_until=s.good_until(trusted_until),
                is_final=s.is_final,
                size=s.size,
                lag=s.lag,
                delivered_end=s.delivered_end,
                consumed=s.consumed,
                in_doubt=s.in_doubt,
                read_error=s.read_error,
                poison=s.poison,
                is_beyond_head=s.is_beyond_head,
            )
            for s in self._held.values()
        )
