"""Receives notifications for all agents of a node, and passes them on.

Heads go to their subscribers, new streams to the node's leaders. Nothing here is trusted: a notification makes agents
and leaders read earlier than they would have read anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable

from sublet_protocol.messages.channel_payloads import StreamHead
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine
from sublet_storage.notify import catch_up_reads
from sublet_storage.notify.changes import EPOCHS, GROUP, SPACE, STREAM, NotifySettings, ObjectChange
from sublet_storage.notify.drivers.base import NotificationDriver
from sublet_storage.notify.subscriber import NotificationSubscriber

LARGEST = 2**63 - 1
"""The largest stream id and head; larger ones do not exist."""


class NotificationHub:
    """Made and used on the node's loop; listens from the beginning to `close`. Raises what the driver raises.

    On the loop it calls `on_streams_changed(False)` when some were opened or closed, `on_streams_changed(True)` when
    only epochs were completed, `on_command(group_id)` when a group's desired state has changed, and
    `on_growth(stream_id)`.
    """

    def __init__(
        self,
        url: str,
        driver: NotificationDriver,
        publisher: NodeSideMachine,
        on_streams_changed: Callable[[bool], None],
        on_command: Callable[[int], None],
        on_growth: Callable[[int], None],
        settings: NotifySettings | None = None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._publisher, self._on_streams_changed = publisher, on_streams_changed
        self._on_command, self._on_growth = on_command, on_growth
        self._lock = threading.Lock()
        self._followed: set[int] = set()
        self._news: deque[ObjectChange] = deque()
        self._subscriber = NotificationSubscriber(
            url, driver, catch_up_reads.make_snapshot_reader(self._wanted), self._received, settings=settings
        )

    @property
    def endpoint(self) -> str:
        """Return the endpoint by which publishers reach this node."""
        return self._subscriber.endpoint

    @property
    def subscriber(self) -> NotificationSubscriber:
        """Return the subscriber, with its state and counters."""
        return self._subscriber

    @property
    def subscribed_stream_count(self) -> int:
        """Return the number of streams with subscribers."""
        return len(self._followed)

    def set_interest(self, key: str, is_subscribed: bool) -> None:
        """Record that the first subscriber of the stream has come, which gets the known head, or the last has gone. A
        catch-up reads only streams with subscribers, and only their heads are kept for later subscribers."""
        stream_id = _stream_id(key)
        if stream_id is None:
            return
        with self._lock:
            (self._followed.add if is_subscribed else self._followed.discard)(stream_id)
        if not is_subscribed:
            self._publisher.clear_state(Channel.STREAM, key)
        elif (change := self._subscriber.get(STREAM, key)) is not None:
            self._notify(change)
        else:
            self._subscriber.request_catch_up(STREAM)

    def known_heads(self) -> dict[int, int]:
        """Return the known heads of streams with subscribers: {stream: head}."""
        changes = {key: self._subscriber.get(STREAM, key) for key in map(str, self._wanted())}
        return {int(key): change.version // 2 for key, change in changes.items() if change is not None}

    def close(self) -> None:
        """Stop listening; blocks for a moment."""
        self._subscriber.close()

    def _wanted(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._followed)

    def _received(self, change: ObjectChange) -> None:
        """Queue a change, on the subscriber's thread. The loop is woken once for all changes until it runs."""
        self._news.append(change)
        if len(self._news) == 1:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no subscriber is left
                self._loop.call_soon_threadsafe(self._pass_on)

    def _pass_on(self) -> None:
        changed: set[str] = set()
        while self._news:
            change = self._news.popleft()
            if change.kind == STREAM:
                self._notify(change)
            elif change.kind == GROUP and (group_id := _commanded_group(change)) is not None:
                self._on_command(group_id)
            changed.add(change.kind)
        if changed & {SPACE, EPOCHS}:
            self._on_streams_changed(SPACE not in changed)

    def _notify(self, change: ObjectChange) -> None:
        """Pass a change on. A head is in the version itself; other fields of the change are ignored."""
        stream_id = _stream_id(change.key)
        head, closed = divmod(change.version, 2)
        if stream_id is None or change.is_deleted or not 0 <= head <= LARGEST:
            return
        self._on_growth(stream_id)
        if stream_id in self._followed:
            stream_head = StreamHead(stream_id, head, bool(closed))
            self._publisher.publish(Channel.STREAM, change.key, stream_head, min(change.version, LARGEST))


def _commanded_group(change: ObjectChange) -> int | None:
    """Return the group whose desired state has changed; None for another change. Other fields are ignored."""
    data = change.data or {}
    group_id, revision = data.get("group_id"), data.get("revision")
    return group_id if isinstance(group_id, int) and isinstance(revision, int) and revision > 0 else None


def _stream_id(key: str) -> int | None:
    """Return the stream's id; None for a key that is not a stream's, which any client may send."""
    number = int(key) if key.isdecimal() and len(key) <= len(str(LARGEST)) else -1
    return number if 0 <= number <= LARGEST else None
