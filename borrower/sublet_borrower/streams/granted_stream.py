"""One granted stream: how far it is read, how far acknowledged; no I/O."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from msgspec.structs import replace

from sublet_borrower.machine.events import ProgressReported
from sublet_borrower.machine.read_failure_report import ReadFailureTracker, plain
from sublet_protocol.domain.errors import PoisonBlock, PositionBeyondHead
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.topics import TopicFilter

MAX_AWAITED: Final = 64
"""A stream with at most this many more messages counts as having little."""


@dataclass(slots=True, eq=False)
class GrantedStream:
    """A stream under one grant, which `grant_key` proves. `head`: where it ended when last looked at; None: not looked
    at yet. `head_hint`: an unverified later head, which is only a reason to poll.

    `outstanding`: {ticket of a batch: how far it is done}; tickets grow, here they are first offsets. `ticket`: that of
    what was taken last. `is_abandoned`: what is outstanding will not be acknowledged. `is_reading`: what follows is
    being read, and may be taken. `is_unreadable`: the next messages are gone, or cannot be read now: then it is tried
    at `retry_at`, and `read_failure` has what was reported of it. `final_error`: it cannot be decoded, or the stream
    ends before it, and is handed back once all before it is done. `size`: bytes given out so far. `max_bytes`: the most
    that is worth reading at once. `assignment`: the session's, which has it.
    """

    stream_id: int
    grant_id: int
    generation_id: int
    filter: TopicFilter
    next_read_offset: int
    grant_key: GrantSecret = field(kw_only=True)
    head: int | None = None
    head_hint: int = 0
    outstanding: dict[int, int] = field(default_factory=dict)
    is_abandoned: bool = False
    is_reading: bool = False
    is_stopping: bool = False
    is_ended: bool = False
    is_lost: bool = False
    is_unreadable: bool = False
    retry_at: float | None = None
    read_failure: ReadFailureTracker = field(default_factory=ReadFailureTracker)
    final_error: PoisonBlock | PositionBeyondHead | None = None
    size: int = 0
    ticket: int = 0
    max_bytes: int | None = None
    assignment: object = field(default=None, kw_only=True, repr=False)

    @property
    def acknowledged_offset(self) -> int:
        """Return the offset before which everything is done. From any thread, since it works on a copy."""
        read, outstanding = self.next_read_offset, self.outstanding.copy()
        return outstanding[min(outstanding)] if outstanding else read

    @property
    def may_have_more(self) -> bool:
        """Return whether reading is worthwhile now."""
        return not (self.is_stopping or self.is_ended or self.is_unreadable) and self.has_more

    @property
    def has_more(self) -> bool:
        """Return whether there may be more messages than were read."""
        return self.head is None or max(self.head, self.head_hint) > self.next_read_offset

    @property
    def is_awaited(self) -> bool:
        """Return whether it was read to its end, and little has come since by what is known."""
        return self.head is not None and max(self.head, self.head_hint) - self.next_read_offset <= MAX_AWAITED

    def advance_read(self, start: int, end: int, head: int) -> bool:
        """Move on behind what lies at [start, end) of a stream that ends at `head`; return whether it was accepted.

        Only the direct successor of what was taken last is accepted. A repeat, and what lies further on, is to be
        discarded: False, and nothing has changed. What was taken is outstanding before anything else, so that nothing
        is lost if an exception interrupts the session's thread here.
        """
        if self.is_ended or start != self.next_read_offset or not start <= end <= head:
            return False
        if end > start:
            self.outstanding[start] = self.ticket = start
        self.next_read_offset, self.head, self.head_hint, self.is_reading = end, head, 0, False
        return True

    def mark_done(self, ticket: int) -> bool:
        """Mark the batch as done; return False if it was before."""
        return self.outstanding.pop(ticket, None) is not None

    def mark_done_upto(self, ticket: int, position: int) -> None:
        """Mark the batch, which is outstanding, as done up to there."""
        self.outstanding[ticket] = max(self.outstanding[ticket], position)

    def read_state(self) -> tuple[Any, ...]:
        """Return where it is read to; for `go_back`."""
        return self.next_read_offset, self.ticket, self.size

    def go_back(self, read_state: tuple[Any, ...]) -> None:
        """Go back to that place, as if nothing had been taken since: it was not given to the user."""
        self.next_read_offset, self.ticket, self.size = read_state
        for ticket in [ticket for ticket in self.outstanding if ticket >= self.next_read_offset]:
            del self.outstanding[ticket]

    @property
    def is_quiescent(self) -> bool:
        """Return whether nothing will be acknowledged any more."""
        return self.is_abandoned or not (self.outstanding or self.is_reading)

    @property
    def is_ending(self) -> bool:
        """Return whether nothing more will be read: it is being revoked, or cannot be read on."""
        return self.is_stopping or self.final_error is not None

    @property
    def is_handed_back(self) -> bool:
        """Return whether its final progress was, or is being, reported: another session may hold the stream from then
        on.
        """
        return self.is_ending and self.is_quiescent

    def to_progress(self) -> ProgressReported:
        """Return what to report; final once nothing more will be read and nothing is outstanding but what was given
        up."""
        final, position = self.is_handed_back, self.acknowledged_offset
        lag = None if self.head is None else max(self.head - position, 0)
        delivered_end = self.next_read_offset if final and self.outstanding else 0
        progress = ProgressReported(self.stream_id, self.grant_id, position, final, self.size, lag, delivered_end)
        return self._add_read_error(progress)

    def _add_read_error(self, progress: ProgressReported) -> ProgressReported:
        """Return the progress with the read error and, once nothing delivered is outstanding, why the stream ends."""
        if self.final_error is None or not progress.is_final or self.outstanding:
            return replace(progress, read_error=self.read_failure.reported_error)
        return with_final_error(progress, self.final_error)


def with_final_error(progress: ProgressReported, error: PoisonBlock | PositionBeyondHead) -> ProgressReported:
    """Return the final progress of a stream that no session can read on, with the reason."""
    progress = replace(progress, read_error=plain(str(error)))
    if isinstance(error, PoisonBlock):
        return replace(progress, poison=error.run_end)
    return replace(progress, is_beyond_head=True)
