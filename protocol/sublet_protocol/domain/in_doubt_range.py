"""Ranges of messages that a consumer has planned to process, and may have processed.

A Spark query that reads from sublet commits each micro-batch to its own sink and its own checkpoint. If it dies, the
batch may be in the sink or not, and only the query itself can find out, by repeating the batch under the same number.
So what it plans is made durable before it begins, and is reserved for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, StoredOffset, convert_stored
from sublet_protocol.domain.limits import MAX_HOLD_S


class InDoubtRange(Struct, frozen=True):
    """Messages [start, end) of a stream, planned under `grant_id`; open until progress has passed them.

    `hold_s`: how long after the end of the grant they are reserved for the session of their holder. `consumed`: in an
    atomic group, what is consumed in entire epochs once they are done.
    """

    grant_id: int
    start: int
    end: int
    hold_s: float
    consumed: ConsumedFrontier | None = None

    def is_pending(self, position: int, consumed: ConsumedFrontier | None) -> bool:
        """Return whether progress has not come so far."""
        if position < self.end:
            return True
        return consumed is not None and consumed.max_of(self.consumed) != consumed

    def is_earlier(self, known: InDoubtRange, grant_id: int) -> bool:
        """Return whether this report was made before that of `known`, however late it comes; `grant_id` is the grant in
        force. Plans of one grant only move on. What an earlier grant left may also be cut, once, by the next one."""
        if self.grant_id != known.grant_id:
            return self.grant_id < known.grant_id
        if self.grant_id != grant_id:
            return self.start < known.start
        if (self.start, self.end) != (known.start, known.end):
            return (self.start, self.end) < (known.start, known.end)
        if known.consumed is None or self.consumed == known.consumed:
            return False
        return self.consumed is None or known.consumed.max_of(self.consumed) == known.consumed

    def to_json(self) -> dict[str, Any]:
        """Return the range as it is stored."""
        return {
            "grant_id": self.grant_id,
            "start": self.start,
            "end": self.end,
            "hold_s": self.hold_s,
            "consumed": None if self.consumed is None else self.consumed.to_json(),
        }

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> InDoubtRange:
        """Return a stored range. Raise `MalformedRow`."""
        known = convert_stored(stored, _StoredInDoubtRange, "a range in doubt")
        consumed = None if known.consumed is None else ConsumedFrontier.from_json(known.consumed)
        return cls(known.grant_id, known.start, known.end, known.hold_s, consumed)


class _StoredInDoubtRange(Struct):
    grant_id: StoredOffset
    start: StoredOffset
    end: StoredOffset
    hold_s: Annotated[float, Meta(ge=0, le=MAX_HOLD_S)]
    consumed: dict[str, Any] | None


def pending_in_doubt(
    doubt: InDoubtRange | None, position: int, consumed: ConsumedFrontier | None
) -> InDoubtRange | None:
    """Return what was planned, unless progress has passed it."""
    return doubt if doubt is not None and doubt.is_pending(position, consumed) else None


def choose_latest_in_doubt(
    reported_range: InDoubtRange | None, known_range: InDoubtRange | None, grant_id: int
) -> InDoubtRange | None:
    """Return what was planned last, of what is reported under that grant and what was reported before."""
    if reported_range is None or (known_range is not None and reported_range.is_earlier(known_range, grant_id)):
        return known_range
    return reported_range
