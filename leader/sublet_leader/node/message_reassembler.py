"""Reassembles a reclaim or a disconnect of more streams than one message may have."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from sublet_leader.node.caller_count_limit import CallerCountLimit
from sublet_leader.node.events import AgentMessageReceived
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.limits import MAX_PARTIAL_BYTES_OF_AGENT, MAX_PARTIAL_BYTES_OF_NODE, PARTIAL_TIMEOUT_S
from sublet_protocol.messages.agent_secret import is_borrower_of
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    HeldGrant,
    Invalidate,
    LeaderWanted,
    StreamProgress,
)

MESSAGE_BYTES, STREAM_BYTES, EPOCH_BYTES, NUMBER_BYTES = 1_024, 320, 64, 32
"""What a message that waits takes in memory beside its streams, a stream beside its epochs, an epoch, and each of its
numbers, in bytes, approximately."""

Splittable = LeaderWanted | Disconnect
_Key = tuple[str, str, type[Splittable]]
_Stream = HeldGrant | StreamProgress


class _PartialMessage(Struct):
    """The streams of the received parts, by id, and when the last of these came. `is_dropped`: there was no room for
    one of its parts; the others are dropped, too, up to its last."""

    caller: str
    received_at: float = 0.0
    size: int = MESSAGE_BYTES
    is_dropped: bool = False
    streams: dict[int, _Stream] = field(default_factory=dict)

    def add(self, streams: Collection[_Stream]) -> None:
        for stream in streams:
            if (known := self.streams.get(stream.stream_id)) is not None:
                self.size -= _measure(known)
            self.streams[stream.stream_id] = stream
            self.size += _measure(stream)


class MessageReassembler:
    """Collects the parts of split messages. A repeated part counts once. The cost of a part is its own size,
    however much waits."""

    def __init__(self) -> None:
        self._waiting: OrderedDict[_Key, _PartialMessage] = OrderedDict()
        """The one whose last part came the longest time ago is the first."""
        self._of_agents = CallerCountLimit(MAX_PARTIAL_BYTES_OF_AGENT, MAX_PARTIAL_BYTES_OF_NODE)
        self._of_callers = CallerCountLimit(MAX_PARTIAL_BYTES_OF_NODE, MAX_PARTIAL_BYTES_OF_NODE, keeps_rest_free=True)

    def admit(self, received: AgentMessageReceived, now: float) -> AgentMessageReceived | Invalidate | None:
        """Return the message with the streams of all its parts once it is entire, else None; or the rejection if it
        names another agent's borrower, or can never be kept. If there is no room for now, it is dropped up to its last
        part, and its sender, which is not answered, repeats it."""
        agent, message = received.agent, received.message
        if not isinstance(message, LeaderWanted | Disconnect):
            return received
        if not is_borrower_of(agent, message.borrower_id):
            problem = f"borrower id {message.borrower_id!r}: it begins with the id of its agent, {agent}/"
            return Invalidate(message.borrower_id, 0, BorrowerEndReason.DENIED, problem)
        key = agent, message.borrower_id, type(message)
        if not message.more and key not in self._waiting:
            return received
        waiting = self._take(key) or _PartialMessage(received.caller)
        waiting.received_at = now
        streams: Any = message.reclaim if isinstance(message, LeaderWanted) else message.streams
        if not waiting.is_dropped:
            waiting.add(streams)
        if message.more:
            return self._store(key, waiting)
        if waiting.is_dropped:
            return None
        entire: Any = tuple(waiting.streams.values())
        if isinstance(message, LeaderWanted):
            return replace(received, message=replace(message, reclaim=entire))
        return replace(received, message=replace(message, streams=entire))

    @property
    def size(self) -> int:
        """Return what waits, in bytes of memory, approximately."""
        return self._of_callers.total

    def wake_at(self) -> float:
        """Return when to call `expire` next."""
        return next((waiting.received_at + PARTIAL_TIMEOUT_S for waiting in self._waiting.values()), float("inf"))

    def expire(self, now: float) -> None:
        """Drop what waits for a part that has not come in time."""
        while self.wake_at() <= now:
            self._take(next(iter(self._waiting)))

    def remove_agents(self, agents: Collection[str]) -> None:
        """Drop what waits for parts of these agents."""
        for key in [key for key in self._waiting if key[0] in agents]:
            self._take(key)

    def _take(self, key: _Key) -> _PartialMessage | None:
        waiting = self._waiting.pop(key, None)
        if waiting is not None:
            self._of_agents.remove(key[0], waiting.size)
            self._of_callers.remove(waiting.caller, waiting.size)
        return waiting

    def _store(self, key: _Key, waiting: _PartialMessage) -> Invalidate | None:
        if self._add(key, waiting):
            return None
        dropped = _PartialMessage(waiting.caller, waiting.received_at, is_dropped=True)
        self._add(key, dropped)
        if waiting.size <= MAX_PARTIAL_BYTES_OF_AGENT:
            return None
        detail = (
            f"{len(waiting.streams)} streams in parts of a message take {waiting.size} bytes: the limit is "
            f"{MAX_PARTIAL_BYTES_OF_AGENT}. Hold fewer streams in one process."
        )
        return Invalidate(key[1], 0, BorrowerEndReason.DENIED, detail)

    def _add(self, key: _Key, waiting: _PartialMessage) -> bool:
        if not self._of_agents.add(key[0], waiting.size):
            return False
        if not self._of_callers.add(waiting.caller, waiting.size):
            self._of_agents.remove(key[0], waiting.size)
            return False
        self._waiting[key] = waiting
        return True


def _measure(stream: _Stream) -> int:
    """Return what the stream takes in memory, in bytes, approximately."""
    size = STREAM_BYTES + _measure_frontier(stream.consumed)
    if isinstance(stream, StreamProgress):
        size += sys.getsizeof(stream.read_error) if stream.read_error else 0
        size += STREAM_BYTES + _measure_frontier(stream.in_doubt.consumed) if stream.in_doubt is not None else 0
    return size


def _measure_frontier(consumed: ConsumedFrontier | None) -> int:
    if consumed is None:
        return 0
    least = () if consumed.lower is None else consumed.lower.least
    return STREAM_BYTES + sum(EPOCH_BYTES + NUMBER_BYTES * len(epoch) for epoch in least)
