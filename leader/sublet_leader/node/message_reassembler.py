"""Reassembles a reclaim or a disconnect of more streams than one message may have."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    HeldGrant,
    Invalidate,
    LeaderWanted,
    StreamProgress,
)

MAX_STREAMS_OF_AGENT, MAX_STREAMS_OF_NODE = 100_000, 500_000
"""Maximum number of streams that wait for the last part, of one agent and of all."""

EXPIRY_S = 60.0
"""After which parts whose last one has not come are dropped."""

Splittable = LeaderWanted | Disconnect


@dataclass(slots=True)
class _Waiting:
    """The streams of the received parts, by id, and when the last of these came."""

    received_at: float = 0.0
    streams: dict[int, HeldGrant | StreamProgress] = field(default_factory=dict)


class MessageReassembler:
    """Collects the parts of split messages. A repeated part counts once."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, str, type[Splittable]], _Waiting] = {}

    def merge(self, agent: str, message: Splittable, now: float) -> Splittable | Invalidate | None:
        """Return the message with the streams of all its parts if this is the last, else None; or the rejection if too
        many streams wait."""
        key = agent, message.borrower_id, type(message)
        if not message.more and key not in self._waiting:
            return message
        self._expire(now - EXPIRY_S)
        waiting = self._waiting.setdefault(key, _Waiting())
        waiting.received_at = now
        streams = message.reclaim if isinstance(message, LeaderWanted) else message.streams
        waiting.streams.update((stream.stream_id, stream) for stream in streams)
        if message.more:
            return self._check_room(agent, key)
        del self._waiting[key]
        entire: Any = tuple(waiting.streams.values())
        if isinstance(message, LeaderWanted):
            return replace(message, reclaim=entire)
        return replace(message, streams=entire)

    def __len__(self) -> int:
        return sum(len(waiting.streams) for waiting in self._waiting.values())

    def _check_room(self, agent: str, key: tuple[str, str, type[Splittable]]) -> Invalidate | None:
        own = sum(len(waiting.streams) for (name, _, _), waiting in self._waiting.items() if name == agent)
        if own > MAX_STREAMS_OF_AGENT or len(self) > MAX_STREAMS_OF_NODE:
            del self._waiting[key]
            detail = (
                f"{own} streams in parts of messages: the limits are {MAX_STREAMS_OF_AGENT} for an agent and "
                f"{MAX_STREAMS_OF_NODE} for all. Hold fewer streams in one process."
            )
            return Invalidate(key[1], 0, BorrowerEndReason.DENIED, detail)
        return None

    def _expire(self, before: float) -> None:
        self._waiting = {key: waiting for key, waiting in self._waiting.items() if waiting.received_at >= before}
