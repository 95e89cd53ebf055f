"""The two tables of a `NodeSideMachine`: subscriptions, and the newest states.

Both are as small as possible: a node has an entry for each subscription of each agent.
"""

from __future__ import annotations

from collections.abc import Iterator


class SubscriptionIndex:
    """Subscriber ids by channel and key; key None stands for all of a channel."""

    def __init__(self) -> None:
        # A single reader, which is the rule, stands for itself: a table of one would take most of the memory.
        self._channels: dict[str, dict[str | None, str | dict[str, None]]] = {}

    def add(self, subscriber_id: str, channel: str, key: str | None) -> bool:
        """Add a subscription, and return whether it is the first of its key; adding it again changes nothing."""
        keys = self._channels.setdefault(channel, {})
        readers = keys.get(key)
        if readers is None:
            keys[key] = subscriber_id
        elif isinstance(readers, dict):
            readers[subscriber_id] = None
        elif readers != subscriber_id:
            keys[key] = {readers: None, subscriber_id: None}
        return readers is None

    def remove(self, subscriber_id: str, channel: str, key: str | None) -> bool:
        """Remove a subscription, if it is there, and return whether it was the last of its kind."""
        keys = self._channels.get(channel, {})
        readers = keys.get(key)
        if isinstance(readers, dict):
            readers.pop(subscriber_id, None)
        if readers not in ({}, subscriber_id):
            return False
        del keys[key]
        if not keys:
            del self._channels[channel]
        return True

    def subscribers(self, channel: str, key: str) -> dict[str, None]:
        """Return each subscriber of this key or of all keys, once."""
        return self.subscribers_of(channel, key) | self.subscribers_of(channel, None)

    def subscribers_of(self, channel: str, key: str | None) -> dict[str, None]:
        """Return the subscribers of this key alone, or of all keys where it is None."""
        readers = self._channels.get(channel, {}).get(key, {})
        return readers if isinstance(readers, dict) else {readers: None}

    def entries(self) -> Iterator[tuple[str, str, str | None]]:
        """Yield every (subscriber id, channel, key or None)."""
        for channel, keys in self._channels.items():
            for key in keys:
                for subscriber_id in self.subscribers_of(channel, key):
                    yield subscriber_id, channel, key

    def __len__(self) -> int:
        return sum(len(keys) for keys in self._channels.values())


class LatestValues:
    """The newest value of each key of the state channels."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, tuple[object, int]]] = {}

    def put(self, channel: str, key: str, body: object, version: int) -> bool:
        """Store a value; return False if one at least as new is there."""
        values = self._values.setdefault(channel, {})
        if key in values and values[key][1] >= version:
            return False
        values[key] = body, version
        return True

    def drop(self, channel: str, key: str) -> None:
        """Remove a key."""
        self._values.get(channel, {}).pop(key, None)

    def list_values(self, channel: str, key: str | None) -> Iterator[tuple[str, object, int]]:
        """Yield (key, body, version) of one key or of all."""
        values = self._values.get(channel, {})
        for name in list(values) if key is None else [key] if key in values else []:
            body, version = values[name]
            yield name, body, version
