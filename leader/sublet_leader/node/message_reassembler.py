"""Reassembles a reclaim or a disconnect of more streams than one message may have."""

from __future__ import annotations

from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from sublet_leader.node.caller_count_limit import CallerCountLimit
from sublet_leader.node.events import AgentMessageReceived
from sublet_protocol.messages.agent_secret import is_borrower_of
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    HeldGrant,
    Invalidate,
    LeaderWanted,
    StreamProgress,
)

MAX_STREAMS_OF_AGENT, MAX_STREAMS_OF_NODE = 100_000, 500_000
"""Maximum number of streams that wait for a last part, of one agent and of all; a message without any counts for 1."""

EXPIRY_S = 60.0
"""After which parts whose last one has not come are dropped."""

Splittable = LeaderWanted | Disconnect
_Key = tuple[str, str, type[Splittable]]


class _PartialMessage(Struct):
    """The streams of the received parts, by id, and when the last of these came."""

    received_at: float = 0.0
    streams: dict[int, HeldGrant | StreamProgress] = field(default_factory=dict)

    @property
    def size(self) -> int:
        return max(len(self.streams), 1)


class MessageReassembler:
    """Collects the parts of split messages. A repeated part counts once. The cost of a part is its own size,
    however much waits."""

    def __init__(self) -> None:
        self._waiting: dict[_Key, _PartialMessage] = {}
        """The one whose last part came the longest time ago is the first."""
        self._counts = CallerCountLimit(MAX_STREAMS_OF_AGENT, MAX_STREAMS_OF_NODE)

    def admit(self, received: AgentMessageReceived, now: float) -> AgentMessageReceived | Invalidate | None:
        """Return the message once it is entire, else None; or the rejection if it names another agent's borrower, or
        too many streams wait."""
        agent, message = received.agent, received.message
        if not isinstance(message, LeaderWanted | Disconnect):
            return received
        if not is_borrower_of(agent, message.borrower_id):
            problem = f"borrower id {message.borrower_id!r}: it begins with the id of its agent, {agent}/"
            return Invalidate(message.borrower_id, 0, BorrowerEndReason.DENIED, problem)
        entire = self.merge(agent, message, now)
        return entire if entire is None or isinstance(entire, Invalidate) else replace(received, message=entire)

    def merge(self, agent: str, message: Splittable, now: float) -> Splittable | Invalidate | None:
        """Return the message with the streams of all its parts if this is the last, else None; or the rejection if too
        many streams wait."""
        key = agent, message.borrower_id, type(message)
        if not message.more and key not in self._waiting:
            return message
        self._expire(now - EXPIRY_S)
        waiting = self._take(key)
        waiting.received_at = now
        streams = message.reclaim if isinstance(message, LeaderWanted) else message.streams
        waiting.streams.update((stream.stream_id, stream) for stream in streams)
        if message.more:
            return self._store(key, waiting)
        entire: Any = tuple(waiting.streams.values())
        if isinstance(message, LeaderWanted):
            return replace(message, reclaim=entire)
        return replace(message, streams=entire)

    def __len__(self) -> int:
        return self._counts.total

    def _take(self, key: _Key) -> _PartialMessage:
        waiting = self._waiting.pop(key, None)
        if waiting is None:
            return _PartialMessage()
        self._counts.remove(key[0], waiting.size)
        return waiting

    def _store(self, key: _Key, waiting: _PartialMessage) -> Invalidate | None:
        if self._counts.add(key[0], waiting.size):
            self._waiting[key] = waiting
            return None
        detail = (
            f"{self._counts.count_for(key[0]) + waiting.size} streams in parts of messages: the limits are "
            f"{MAX_STREAMS_OF_AGENT} for an agent and {MAX_STREAMS_OF_NODE} for all. Hold fewer streams in one process."
        )
        return Invalidate(key[1], 0, BorrowerEndReason.DENIED, detail)

    def _expire(self, cutoff: float) -> None:
        while self._waiting and self._waiting[oldest := next(iter(self._waiting))].received_at < cutoff:
            self._take(oldest)
