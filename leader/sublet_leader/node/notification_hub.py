"""Receives notifications for all agents of a node, and passes them on.

Heads go to their subscribers, new streams to the node's leaders. Nothing here is trusted: a notification makes agents
and leaders read earlier than they would have read anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from sublet_leader.node.pending_changes import PendingNotifications, parse_stream_id
from sublet_protocol.messages.field_checks import MAX_INT64
from sublet_protocol.messages.head_and_group_events import StreamHead
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine
from sublet_storage.notify import catch_up_reads
from sublet_storage.notify.changes import STREAM, NotifySettings, ObjectChange
from sublet_storage.notify.drivers.base import NotificationDriver
from sublet_storage.notify.subscriber import NotificationSubscriber

PER_TURN = 200
"""Heads that are passed on before others have their turn on the loop."""
PROCESS_INTERVAL_S = 0.1
"""Least time between two looks of one group for notifications: what comes meanwhile is one look."""


class NotificationHub:
    """Made and used on the node's loop; listens from the beginning to `close`. Raises what the driver raises.

    On the loop it calls `on_streams_changed(False)` when some were opened or closed, `on_streams_changed(True)` when
    only epochs were completed, `on_command(group_id)` when a group's desired state has changed, and
    `on_growth(stream_id)`. Changes that wait are merged by object, and the first three are `PROCESS_INTERVAL_S` apart.
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
        self._pending = PendingNotifications()
        self._processed_at = float("-inf")
        self._subscriber = NotificationSubscriber(
            url,
            driver,
            catch_up_reads.make_snapshot_reader(self._copy_subscribed_streams),
            self._on_change,
            settings=settings,
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
        stream_id = parse_stream_id(key)
        if stream_id is None:
            return
        with self._lock:
            (self._followed.add if is_subscribed else self._followed.discard)(stream_id)
        if not is_subscribed:
            self._publisher.clear_state(Channel.STREAM, key)
        elif (change := self._subscriber.get(STREAM, key)) is not None:
            self._notify(stream_id, change.version)
        else:
            self._subscriber.request_catch_up(STREAM)

    def known_heads(self) -> dict[int, int]:
        """Return the known heads of streams with subscribers: {stream: head}."""
        changes = {key: self._subscriber.get(STREAM, key) for key in map(str, self._copy_subscribed_streams())}
        return {int(key): change.version // 2 for key, change in changes.items() if change is not None}

    def close(self) -> None:
        """Stop listening; blocks for a moment."""
        self._subscriber.close()

    def _copy_subscribed_streams(self) -> frozenset[int]:
        with self._lock:
            return frozenset(self._followed)

    def _on_change(self, change: ObjectChange) -> None:
        """Add a change to what waits, on the subscriber's thread. The loop is woken once for all that waits."""
        if change.kind == STREAM:
            self._wake(self._pending.add_head(change, self._followed), self._publish_heads)
        else:
            self._wake(self._pending.add_group_change(change), self._schedule_processing)

    def _wake(self, is_first: bool, turn: Callable[[], None]) -> None:
        if is_first:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no subscriber is left
                self._loop.call_soon_threadsafe(turn)

    def _publish_heads(self) -> None:
        heads, has_more = self._pending.take_heads(PER_TURN)
        if has_more:
            self._loop.call_soon(self._publish_heads)
        for stream_id, version in heads.items():
            self._notify(stream_id, version)

    def _schedule_processing(self) -> None:
        self._loop.call_at(self._processed_at + PROCESS_INTERVAL_S, self._process_changes)

    def _process_changes(self) -> None:
        self._processed_at = self._loop.time()
        changes = self._pending.take_group_changes()
        if changes.is_of_spaces or changes.is_of_epochs:
            self._on_streams_changed(not changes.is_of_spaces)
        for group_id in changes.group_ids:
            self._on_command(group_id)

    def _notify(self, stream_id: int, version: int) -> None:
        """Pass a head on. It is in the version itself; other fields of the change are ignored."""
        self._on_growth(stream_id)
        if stream_id in self._followed:
            head, closed = divmod(version, 2)
            self._publisher.publish(
                Channel.STREAM, str(stream_id), StreamHead(stream_id, head, bool(closed)), min(version, MAX_INT64)
            )
