"""Head subscriptions of an agent's sessions, each at the node of its leader.

Plain bookkeeping. A stream is subscribed to once per node, however many sessions subscribe to it there.
"""

from __future__ import annotations

from collections.abc import Callable

from sublet_borrower.new_data.head_poll_scheduler import HeadPushed, HeadSubscriptionId
from sublet_protocol.messages.head_and_group_events import StreamHead

NodeStreamCall = Callable[[str, int], None]
"""(node address, stream id)."""


class HeadSubscriptions:
    """Head subscriptions by session and node. `subscribe` and `unsubscribe` are called in the order in which the node
    has to receive them.
    """

    def __init__(self, subscribe: NodeStreamCall, unsubscribe: NodeStreamCall) -> None:
        self._subscribe, self._unsubscribe = subscribe, unsubscribe
        self._nodes: dict[int, str] = {}
        self._subscriptions: dict[int, dict[int, HeadSubscriptionId]] = {}
        self._readers: dict[tuple[str, int], set[int]] = {}

    def add(self, handle: int, subscription: HeadSubscriptionId) -> None:
        """Subscribe the session to the stream's head from now on, under this id."""
        self._subscriptions.setdefault(handle, {})[subscription.stream_id] = subscription
        self._add_reader(handle, subscription.stream_id)

    def remove(self, handle: int, subscription: HeadSubscriptionId) -> None:
        """Remove the subscription with this id."""
        if self._subscriptions.get(handle, {}).get(subscription.stream_id) == subscription:
            self._remove_reader(handle, subscription.stream_id)
            del self._subscriptions[handle][subscription.stream_id]

    def set_leader_node(self, handle: int, node: str | None) -> None:
        """Move the session's subscriptions to its leader's node; None: to no node."""
        if self._nodes.get(handle) == node:
            return
        for stream_id in self._subscriptions.get(handle, {}):
            self._remove_reader(handle, stream_id)
        if node is None:
            self._nodes.pop(handle, None)
        else:
            self._nodes[handle] = node
        for stream_id in self._subscriptions.get(handle, {}):
            self._add_reader(handle, stream_id)

    def remove_session(self, handle: int) -> None:
        """Remove all subscriptions of a session."""
        self.set_leader_node(handle, None)
        self._subscriptions.pop(handle, None)

    def route_head(self, node: str, head: StreamHead) -> list[tuple[int, HeadPushed]]:
        """Return the sessions that a head pushed by a node is for."""
        readers = self._readers.get((node, head.stream_id), ())
        return [(handle, HeadPushed(self._subscriptions[handle][head.stream_id], head.head)) for handle in readers]

    def _add_reader(self, handle: int, stream_id: int) -> None:
        node = self._nodes.get(handle)
        if node is not None:
            readers = self._readers.setdefault((node, stream_id), set())
            if not readers:
                self._subscribe(node, stream_id)
            readers.add(handle)

    def _remove_reader(self, handle: int, stream_id: int) -> None:
        node = self._nodes.get(handle)
        readers = self._readers.get((node, stream_id)) if node is not None else None
        if node is not None and readers is not None and handle in readers:
            readers.remove(handle)
            if not readers:
                del self._readers[node, stream_id]
                self._unsubscribe(node, stream_id)
