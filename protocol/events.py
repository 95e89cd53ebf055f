"""What travels on the channels that are not a borrower's: stream heads and what happens in groups."""

from __future__ import annotations

from dataclasses import dataclass, replace

from protocol.errors import UsageError

MAX_INLINE_BYTES = 64 << 10
"""Largest block that travels with a stream's head; a larger one is read from the log."""

MAX_OFFSET = 2**63 - 1
"""Greatest offset."""

MAX_CODEC = 2**15 - 1
"""Greatest number of a block's format."""


@dataclass(frozen=True, slots=True)
class InlineBlock:
    """The messages `start` to `end` - 1 of a stream, in the format `codec`, as the log stores them."""

    start: int
    end: int
    codec: int
    payload: bytes

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end <= MAX_OFFSET:
            raise UsageError(
                f"an inline block of the offsets {self.start} to {self.end}: it starts at 0 or later, and ends after "
                f"its start, at {MAX_OFFSET} or before. Give those of its first message and of the end."
            )
        if not 0 <= self.codec <= MAX_CODEC:
            raise UsageError(f"an inline block of codec {self.codec}: it is 0 to {MAX_CODEC}. Give that of its block.")
        if len(self.payload) > MAX_INLINE_BYTES:
            raise UsageError(
                f"an inline block of {len(self.payload)} bytes: at most {MAX_INLINE_BYTES}. Send the head without it."
            )


@dataclass(frozen=True, slots=True)
class StreamHead:
    """The newest that is known of a stream's end: the next offset to be appended, and whether nothing will be.

    `block`: some messages before the head, for who waits exactly at their start. It may always be missing.
    """

    stream_id: int
    head: int
    closed: bool = False
    block: InlineBlock | None = None

    def without_block(self) -> StreamHead:
        """The head alone, which is all that somebody who comes later needs."""
        return self if self.block is None else replace(self, block=None)


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """Something that happened in a group, for those who watch; `payload` is JSON, the session does not look inside.

    Two parties of their own carry in it whatever they like.
    """

    payload: bytes
