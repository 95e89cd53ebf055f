"""Receives notifications for all agents of a node, and passes them on.

Heads go to their subscribers, new streams to the node's leaders. Nothing here is trusted: a notification makes agents
and leaders read earlier than they would have read anyway.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Set

from msgspec import Struct

from sublet_protocol.domain.limits import parse_natural
from sublet_protocol.messages.field_checks import MAX_INT64
from sublet_protocol.messages.head_and_group_events import StreamHead
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine
from sublet_storage.notify import catch_up_reads
from sublet_storage.notify.changes import EPOCHS, GROUP, SPACE, STREAM, NotifySettings, ObjectChange
from sublet_storage.notify.drivers.base import NotificationDriver
from sublet_storage.notify.subscriber import NotificationSubscriber

PER_TURN = 200
"""Heads that are passed on before others have their turn on the loop, each counted for each of its subscribers."""
PROCESS_INTERVAL_S = 0.1
"""Least time between two looks of one group for notifications: what comes meanwhile is one look."""
MAX_HEADS = 10_000
"""Streams without a subscriber that wait at a time; of more nothing is passed on."""
MAX_GROUPS = 100
"""Groups that wait at a time; instead of more, all groups of the node look."""


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
        self._subscribed_streams: set[int] = set()
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
        return len(self._subscribed_streams)

    def set_interest(self, key: str, is_subscribed: bool) -> None:
        """Record that the first subscriber of the stream has come, which gets the known head, or the last has gone. A
        catch-up reads only streams with subscribers, and only their heads are kept for later subscribers."""
        stream_id = parse_stream_id(key)
        if stream_id is None:
            return
        with self._lock:
            (self._subscribed_streams.add if is_subscribed else self._subscribed_streams.discard)(stream_id)
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
            return frozenset(self._subscribed_streams)

    def _on_change(self, change: ObjectChange) -> None:
        """Add a change to what waits, on the subscriber's thread. The loop is woken once for all that waits."""
        if change.kind == STREAM:
            self._wake(self._pending.add_head(change, self._subscribed_streams), self._publish_heads)
        else:
            self._wake(self._pending.add_group_change(change), self._schedule_processing)

    def _wake(self, is_first: bool, turn: Callable[[], None]) -> None:
        if is_first:
            with contextlib.suppress(RuntimeError):  # the loop is closed: no subscriber is left
                self._loop.call_soon_threadsafe(turn)

    def _publish_heads(self) -> None:
        passed_on, has_more = 0, True
        while has_more and passed_on < PER_TURN:
            head, has_more = self._pending.take_head()
            if head is not None:
                passed_on += self._notify(*head)
        if has_more:
            self._loop.call_soon(self._publish_heads)

    def _schedule_processing(self) -> None:
        self._loop.call_at(self._processed_at + PROCESS_INTERVAL_S, self._process_changes)

    def _process_changes(self) -> None:
        self._processed_at = self._loop.time()
        changes = self._pending.take_group_changes()
        if changes.is_of_spaces or changes.is_of_epochs:
            self._on_streams_changed(not changes.is_of_spaces)
        for group_id in changes.group_ids:
            self._on_command(group_id)

    def _notify(self, stream_id: int, version: int) -> int:
        """Pass a head on, and return for how many it counts: its subscribers, at least 1. The head is in the version
        itself; other fields of the change are ignored."""
        self._on_growth(stream_id)
        if stream_id not in self._subscribed_streams:
            return 1
        head, closed = divmod(version, 2)
        body, key = StreamHead(stream_id, head, bool(closed)), str(stream_id)
        self._publisher.clear_state(Channel.STREAM, key)  # a catch-up may refute a head, and its own is lower then
        return max(self._publisher.publish(Channel.STREAM, key, body, min(version, MAX_INT64)), 1)


class ChangedGroups(Struct, frozen=True):
    """What groups are to look at. `is_of_spaces`: all of them at all; `is_of_epochs`: all of them at completed
    epochs."""

    group_ids: frozenset[int] = frozenset()
    is_of_spaces: bool = False
    is_of_epochs: bool = False


class PendingNotifications:
    """Thread-safe. `add_head` and `add_group_change` return whether the loop is to be woken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._heads: OrderedDict[int, int] = OrderedDict()
        self._for_groups = ChangedGroups()

    def add_head(self, change: ObjectChange, subscribed_streams: Set[int]) -> bool:
        """Add the change of a stream, instead of an earlier one; return whether it is now the only one that waits."""
        stream_id = parse_stream_id(change.key)
        if stream_id is None or change.is_deleted or change.version // 2 > MAX_INT64:
            return False
        with self._lock:
            if stream_id not in self._heads and stream_id not in subscribed_streams and len(self._heads) >= MAX_HEADS:
                return False
            self._heads[stream_id] = change.version
            return len(self._heads) == 1

    def add_group_change(self, change: ObjectChange) -> bool:
        """Add a change that groups are to look at; return whether it is the first that waits."""
        with self._lock:
            before = self._for_groups
            group_id = _parse_commanded_group(change) if change.kind == GROUP else None
            groups = before.group_ids if group_id is None else before.group_ids | {group_id}
            spaces = before.is_of_spaces or change.kind == SPACE or len(groups) > MAX_GROUPS
            self._for_groups = ChangedGroups(
                frozenset() if spaces else groups, spaces, before.is_of_epochs or change.kind == EPOCHS
            )
            return before == ChangedGroups() != self._for_groups

    def take_head(self) -> tuple[tuple[int, int] | None, bool]:
        """Return the stream that has waited for longest, with its version, and whether others wait."""
        with self._lock:
            taken = self._heads.popitem(last=False) if self._heads else None
            return taken, bool(self._heads)

    def take_group_changes(self) -> ChangedGroups:
        """Return all that groups are to look at."""
        with self._lock:
            taken, self._for_groups = self._for_groups, ChangedGroups()
            return taken


def _parse_commanded_group(change: ObjectChange) -> int | None:
    """Return the group whose desired state has changed; None for another change. Other fields are ignored."""
    data = change.data or {}
    group_id, revision = data.get("group_id"), data.get("revision")
    if not isinstance(group_id, int) or not isinstance(revision, int):
        return None
    return group_id if revision > 0 and 0 <= group_id <= MAX_INT64 else None


def parse_stream_id(key: str) -> int | None:
    """Return the stream's id; None for a key that is not a stream's, which any client may send."""
    return parse_natural(key, MAX_INT64)
