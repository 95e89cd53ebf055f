"""Watches the events of a group, whichever node leads it.

Every node publishes the events of the groups that it leads. So a watcher subscribes at all nodes that it knows: when
the leader changes, the next one's events arrive without a search. If a node leads that is not known, the others have
its address, for which they are queried now and then, and it is subscribed to too.

A watcher never slows a group: its mailbox at the node is bounded, and so are the events not taken here. Lost events are
counted.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import json
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import Any, Self

from msgspec import Struct

from sublet_borrower.util.network_loop import network_loop
from sublet_borrower.util.session_fork_guard import new_agent_key
from sublet_protocol.domain.address import is_tls
from sublet_protocol.gate.client_access_token import load_access_token
from sublet_protocol.messages.head_and_group_events import LEADER, GroupEventPayload
from sublet_protocol.pubsub.agent_side_events import ConnectionLostReason, ConnectionStatus
from sublet_protocol.pubsub.model import Channel, Command, MailboxOverflow, SequencedMessage, Subscribe
from sublet_protocol.pubsub.node_connection import NodeConnection, truncate

WAITING = 10_000
"""Events that may wait to be taken."""
CLOSE_S = 1.0


class WatchedGroupEvent(Struct, frozen=True):
    """An event, as the object that docs/groups.md describes."""

    event: dict[str, Any]


class GroupEventsDropped(Struct, frozen=True):
    """The number of events lost here because they were not taken in time."""

    count: int


class GroupEventsUnavailable(Struct, frozen=True):
    """The event that a node does not answer, or rejects the watcher (`is_refusal`). Its events meanwhile are lost."""

    address: str
    reason: str
    is_refusal: bool = False


class FindLeaderResponse(Struct, frozen=True):
    """A node's answer to which node leads; None: no node. No `group_id`: the group does not exist. `is_led_here`: it is
    that node itself, so that no event can be missed from now on, and `members` are connected to it: {borrower_id,
    agent, session} of each.
    """

    group_id: int | None
    node: str | None
    term: int | None
    is_led_here: bool
    members: tuple[dict[str, Any], ...] | None = None


WatchEvent = WatchedGroupEvent | GroupEventsDropped | GroupEventsUnavailable | FindLeaderResponse


def list_connected_members(subscription: str, address: str, wait_s: float) -> tuple[dict[str, Any], ...] | None:
    """Return the members connected to the group's leader, which is at that address; None where it does not answer in
    time.
    """
    give_up_at = time.monotonic() + wait_s
    with GroupEventWatcher(subscription, is_query_only=True) as watch:
        watch.set_nodes([address])
        while (left_s := give_up_at - time.monotonic()) > 0:
            match watch.next_event(left_s):
                case FindLeaderResponse(is_led_here=True, members=members):
                    return members
                case FindLeaderResponse() | GroupEventsUnavailable():
                    return None
                case _:
                    pass
    return None


class GroupEventWatcher:
    """Watches a group's events; thread-safe. `set_nodes` sets the addresses of nodes, `query_leader` queries one of
    them for the leader, `next_event` returns the next event. `is_query_only`: it receives answers, and no events, of
    which a principal has only so many watchers at a node.
    """

    def __init__(self, subscription: str, waiting: int = WAITING, *, is_query_only: bool = False) -> None:
        self._subscription, self._waiting, self._is_query_only = subscription, waiting, is_query_only
        self._key, self._token = new_agent_key(), load_access_token()
        self._loop = network_loop()
        self._connections: dict[str, NodeConnection] = {}
        self._names: dict[str, str] = {}
        self._unanswered: set[str] = set()
        self._unsubscribed: set[str] = set()
        self._leader_address: str | None = None
        self._turn = 0
        self._events: deque[WatchEvent] = deque()
        self._missed = 0
        self._condition = threading.Condition()

    def set_nodes(self, addresses: Iterable[str]) -> None:
        """Set the addresses of the nodes. One that is no longer among them is dropped once it does not answer;
        one that has rejected the watcher is tried again."""
        self._loop.call_soon_threadsafe(self._follow, tuple(addresses))

    def query_leader(self) -> None:
        """Query a node for the leader, each time another."""
        self._loop.call_soon_threadsafe(self._query_leader)

    def next_event(self, wait_s: float) -> WatchEvent | None:
        """Return the next thing, in its order; None where nothing comes within that time."""
        with self._condition:
            if not (self._events or self._missed):
                self._condition.wait(wait_s)
            if self._events:
                return self._events.popleft()
            missed, self._missed = self._missed, 0
            return GroupEventsDropped(missed) if missed else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            closing.result(CLOSE_S)

    # --- on the loop ------------------------------------------------------------------------------------------------

    def _follow(self, addresses: tuple[str, ...]) -> None:
        for address, connection in tuple(self._connections.items()):
            is_listed = address in (*addresses, self._leader_address)
            if connection.status is ConnectionStatus.REJECTED or (
                connection.status is ConnectionStatus.DISCONNECTED and not is_listed
            ):
                self._let_go(address)
        for address in addresses:
            if address not in self._connections:
                self._connect(address)

    def _connect(self, address: str) -> None:
        connection = NodeConnection(
            address,
            self._key,
            lambda delivery: self._on_delivery(address, delivery),
            lambda lost: self._on_lost(address, lost.detail, is_refusal=lost.reason is ConnectionLostReason.REJECTED),
            on_refused=lambda command, text: self._on_refused(address, command, text),
            token=self._token,
        )
        self._connections[address] = connection
        self._unanswered.add(address)
        if not self._is_query_only:
            connection.subscribe(Channel.GROUP, self._subscription)
        self._send_query(connection)

    def _send_query(self, connection: NodeConnection) -> None:
        connection.send(GroupEventPayload(json.dumps({"watch": self._subscription}).encode()))

    def _query_leader(self) -> None:
        """Query one of the connected nodes for the leader, in turn; messages to others would be dropped. Where the
        subscription was refused, subscribe again: there may be room by now."""
        for address in self._unsubscribed & self._connections.keys():
            self._connections[address].subscribe(Channel.GROUP, self._subscription)
        self._unsubscribed.clear()
        connected = [
            connection for connection in self._connections.values() if connection.status is ConnectionStatus.CONNECTED
        ]
        if connected:
            self._turn += 1
            self._send_query(connected[self._turn % len(connected)])

    def _let_go(self, address: str) -> None:
        if address == self._leader_address:
            self._leader_address = None
        self._unanswered.discard(address)
        self._names.pop(address, None)
        self._loop.create_task(self._connections.pop(address).close(0.0))

    def _on_delivery(self, address: str, delivery: SequencedMessage) -> None:
        match delivery.body:
            case MailboxOverflow(dropped=dropped):
                self._put(GroupEventsDropped(dropped))
            case GroupEventPayload(payload):
                content = json.loads(payload)
                if content.get("event") == LEADER:
                    self._on_leader_info(address, content)
                else:
                    self._put(WatchedGroupEvent(content))

    def _on_leader_info(self, address: str, answer: dict[str, Any]) -> None:
        node, by = answer.get("node"), answer.get("answered_by", "")
        self._names[address] = by
        self._unanswered.discard(address)
        if node is not None:
            self._find(node, answer.get("address"))
        members = None if "members" not in answer else tuple(answer["members"])
        self._put(FindLeaderResponse(answer.get("group_id"), node, answer.get("term"), node == by, members))

    def _find(self, leader: str, address: str | None) -> None:
        """Follow the node that leads, under one of its addresses: over two, all would be seen twice."""
        known = [
            known_address
            for known_address, name in self._names.items()
            if name == leader and known_address != self._leader_address
        ]
        if known and self._leader_address is not None and self._names.get(self._leader_address) in (None, leader):
            self._let_go(self._leader_address)
        elif not known and not self._unanswered and address is not None and address not in self._connections:
            if not is_tls(address) and any(is_tls(known_address) for known_address in self._names):
                self._put(GroupEventsUnavailable(address, "a node with TLS names it as the leader's, and it has none"))
                return
            self._leader_address = address
            self._connect(address)

    def _on_refused(self, address: str, command: Command, reason: str) -> None:
        if isinstance(command, Subscribe):
            self._unsubscribed.add(address)
        self._on_lost(address, reason, is_refusal=True)

    def _on_lost(self, address: str, reason: str, *, is_refusal: bool = False) -> None:
        self._unanswered.discard(address)
        self._names.pop(address, None)
        self._put(GroupEventsUnavailable(address, truncate(reason), is_refusal))

    def _put(self, event: WatchEvent) -> None:
        """Drop what comes while too much waits, until all of that is taken: so the loss is reported where it was."""
        with self._condition:
            if self._missed or len(self._events) >= self._waiting:
                self._missed += (
                    event.count if isinstance(event, GroupEventsDropped) else isinstance(event, WatchedGroupEvent)
                )
            else:
                self._events.append(event)
            self._condition.notify()

    async def _close(self) -> None:
        connections, self._connections = list(self._connections.values()), {}
        await asyncio.gather(*(connection.close(0.0) for connection in connections), return_exceptions=True)
