"""What travels on the channels that are not a borrower's: stream heads and what happens in groups."""

from __future__ import annotations

from dataclasses import dataclass

LEADER = "leader"
"""The event of a group that is none: a node's answer to who leads."""


@dataclass(frozen=True, slots=True)
class StreamHead:
    """The newest that is known of a stream's end: the next offset to be appended, and whether nothing will be."""

    stream_id: int
    head: int
    closed: bool = False


@dataclass(frozen=True, slots=True)
class GroupEvent:
    """Something that happened in a group, for those who watch; `payload` is JSON, the session does not look inside.

    Two parties of their own carry in it whatever they like.
    """

    payload: bytes
