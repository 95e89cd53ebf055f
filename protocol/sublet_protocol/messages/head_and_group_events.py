"""Messages on the channels of streams and groups: stream heads, and events of groups."""

from __future__ import annotations

from msgspec import Struct

LEADER = "leader"
"""The kind of a group event that answers which node leads."""


class StreamHead(Struct, frozen=True):
    """The newest known end of a stream: the next offset to be appended, and whether the stream is closed."""

    stream_id: int
    head: int
    closed: bool = False


class GroupEventPayload(Struct, frozen=True):
    """An event of a group for its watchers; `payload` is JSON, opaque to the connection.

    Two parties of your own may use it for any content.
    """

    payload: bytes
