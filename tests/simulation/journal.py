"""What publishers published: the key of each message, and the order of messages of a key.

A key is a topic and a position on the hash ring; all messages of one key come from one publisher. It records in which
streams publishers append a key, nothing else: parents of streams are not recorded.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_PLACES = 8
_RING = 1 << 64
_TOPICS = ("orders/new", "other/old")
Key = tuple[str, int]


@dataclass(slots=True)
class Part:
    """Messages of one key in one stream: the offset of the last one."""

    stream_id: int
    last: int


class Journal:
    """Has its own random generator. `keys`: {stream: the key of each message}; `parts`: {key: its parts in the order in
    which they were published}; `appended`: {stream: (end offset, time) of each block}."""

    def __init__(self, simulation: Simulation) -> None:
        self._streams = simulation.streams
        self._random = Random(f"the keys of {simulation.seed}")
        self.keys: dict[int, list[Key]] = defaultdict(list)
        self.parts: dict[Key, list[Part]] = defaultdict(list)
        self.appended: dict[int, list[tuple[int, int]]] = defaultdict(list)

    def append(self, stream_id: int, count: int, at_us: int) -> None:
        """Record a block of `count` messages, appended at that time."""
        own, keys = self._may_have(stream_id), self.keys[stream_id]
        for _ in range(count):
            key = own[int(self._random.random() * len(own))]
            parts = self.parts[key]
            if parts and parts[-1].stream_id == stream_id:
                parts[-1].last = len(keys)
            else:
                parts.append(Part(stream_id, len(keys)))
            keys.append(key)
        self.appended[stream_id].append((len(keys), at_us))

    def lower_head(self, stream_id: int, head: int) -> None:
        """Forget the messages from that offset on, which are lost."""
        keys = self.keys[stream_id]
        del keys[head:]
        last = {key: offset for offset, key in enumerate(keys)}
        self.appended[stream_id] = [(end, at_us) for end, at_us in self.appended[stream_id] if end <= head]
        for key, parts in self.parts.items():
            self.parts[key] = [part for part in parts if part.stream_id != stream_id or key in last]
            for part in self.parts[key]:
                part.last = last[key] if part.stream_id == stream_id else part.last

    def since(self, stream_id: int, at_us: int) -> int:
        """Return the offset of the first message appended at or after that time; the head, if there is none."""
        begin = 0
        for end, when in self.appended[stream_id]:
            if when >= at_us:
                return begin
            begin = end
        return begin

    def _may_have(self, stream_id: int) -> list[Key]:
        """Return the keys that publishers would now append to that stream."""
        stream, spaces = self._streams.streams[stream_id], self._streams.live_spaces()
        apart = any(space.filter.text.startswith("other/") for space in spaces)
        of_space = {space.space_id: space.filter.text for space in spaces}[stream.generation.space_id]
        topics = [t for t in _TOPICS if (t.startswith("other/") and apart) == of_space.startswith("other/")]
        places = [n * _RING // _PLACES + 1 for n in range(_PLACES)]
        return [(topic, place) for topic in topics for place in places if stream.hash_from <= place < stream.hash_to]
