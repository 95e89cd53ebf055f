"""Who reads what, and what the newest states are: the two tables behind a publisher."""

from __future__ import annotations

from collections.abc import Iterator


class SubscriptionIndex:
    """Subscriber ids by (channel, key); key None stands for all of a channel."""

    def __init__(self) -> None:
        self._readers: dict[tuple[str, str | None], dict[str, None]] = {}

    def add(self, subscriber_id: str, channel: str, key: str | None) -> None:
        """Enter a subscription; entering it again changes nothing."""
        self._readers.setdefault((channel, key), {})[subscriber_id] = None

    def remove(self, subscriber_id: str, channel: str, key: str | None) -> None:
        """Take a subscription out, if it is there."""
        readers = self._readers.get((channel, key), {})
        readers.pop(subscriber_id, None)
        if not readers:
            self._readers.pop((channel, key), None)

    def readers(self, channel: str, key: str) -> dict[str, None]:
        """Who subscribed to this key, to all, or to both: each once."""
        return self._readers.get((channel, key), {}) | self._readers.get((channel, None), {})

    def __len__(self) -> int:
        return len(self._readers)


class StateValues:
    """The newest value of each key of the state channels."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, tuple[object, int]]] = {}

    def put(self, channel: str, key: str, body: object, version: int) -> bool:
        """Keep a value; False if one at least as new is there."""
        values = self._values.setdefault(channel, {})
        if key in values and values[key][1] >= version:
            return False
        values[key] = body, version
        return True

    def drop(self, channel: str, key: str) -> None:
        """Forget a key."""
        self._values.get(channel, {}).pop(key, None)

    def current(self, channel: str, key: str | None) -> Iterator[tuple[str, object, int]]:
        """(key, body, version) of one key or of all."""
        values = self._values.get(channel, {})
        for name in list(values) if key is None else [key] if key in values else []:
            body, version = values[name]
            yield name, body, version
