"""Follows what happens in a group, whichever node leads it.

Every node publishes what happens in the groups that it leads. So a watcher subscribes at all nodes that it knows: when
the leader changes, the next one's first word is heard without looking for it. Where a node that is not known leads, the
others say so, whom it asks now and then, and it is followed too.

Nobody waits for a watcher: at the node its mailbox is bounded, and here what is not taken is. What is lost is counted.
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
from dataclasses import dataclass
from typing import Any, Self

from sublet_borrower.util.network_loop import network_loop
from sublet_borrower.util.owner_process import new_agent_id
from sublet_protocol.messages.events import LEADER, GroupEvent
from sublet_protocol.pubsub.model import Channel, Delivery, Gap
from sublet_protocol.pubsub.node_connection import NodeConnection, shortened
from sublet_protocol.pubsub.subscriber_events import Status

WAITING = 10_000
"""Events that may wait to be taken."""
CLOSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Seen:
    """An event, as the object that docs/groups.md describes."""

    event: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Missed:
    """So many events were lost here, because they were not taken in time."""

    count: int


@dataclass(frozen=True, slots=True)
class Silent:
    """That node does not answer, or refuses. What it told meanwhile is lost."""

    address: str
    why: str


@dataclass(frozen=True, slots=True)
class Answer:
    """A node says who leads; None: nobody. No `group_id`: there is no such group. `here`: it is that node itself, so
    that nothing can happen from now on without being seen, and which `members` are connected to it: {borrower_id,
    agent, session} of each."""

    group_id: int | None
    node: str | None
    term: int | None
    here: bool
    members: tuple[dict[str, Any], ...] | None = None


Sight = Seen | Missed | Silent | Answer


def connected(subscription: str, address: str, wait_s: float) -> tuple[dict[str, Any], ...] | None:
    """Who is connected to the group's leader, which is at that address; None where it does not say so in time."""
    give_up_at = time.monotonic() + wait_s
    with Watch(subscription) as watch:
        watch.follow([address])
        while (left_s := give_up_at - time.monotonic()) > 0:
            match watch.take(left_s):
                case Answer(here=True, members=members):
                    return members
                case Answer() | Silent():
                    return None
                case _:
                    pass
    return None


class Watch:
    """Thread-safe. `follow` says where nodes are, `ask` asks one of them who leads, `take` has what came of it."""

    def __init__(self, subscription: str, waiting: int = WAITING) -> None:
        self._subscription, self._waiting = subscription, waiting
        self._agent = new_agent_id()
        self._loop = network_loop()
        self._connections: dict[str, NodeConnection] = {}
        self._names: dict[str, str] = {}
        self._unheard: set[str] = set()
        self._told: str | None = None
        self._turn = 0
        self._sights: deque[Sight] = deque()
        self._missed = 0
        self._condition = threading.Condition()

    def follow(self, addresses: Iterable[str]) -> None:
        """These are the nodes. One that is not among them any more is let go once it does not answer."""
        self._loop.call_soon_threadsafe(self._follow, tuple(addresses))

    def ask(self) -> None:
        """Ask a node who leads, each time another."""
        self._loop.call_soon_threadsafe(self._ask)

    def take(self, wait_s: float) -> Sight | None:
        """The next thing, in its order; None where nothing comes within that time."""
        with self._condition:
            if not (self._sights or self._missed):
                self._condition.wait(wait_s)
            if self._sights:
                return self._sights.popleft()
            missed, self._missed = self._missed, 0
            return Missed(missed) if missed else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        with contextlib.suppress(concurrent.futures.TimeoutError):
            closing.result(CLOSE_S)

    # --- on the loop ------------------------------------------------------------------------------------------------

    def _follow(self, addresses: tuple[str, ...]) -> None:
        for address in addresses:
            if address not in self._connections:
                self._connect(address)
        for address, connection in tuple(self._connections.items()):
            if address not in (*addresses, self._told) and connection.status is Status.DOWN:
                self._let_go(address)

    def _connect(self, address: str) -> None:
        connection = NodeConnection(
            address,
            self._agent,
            lambda delivery: self._delivered(address, delivery),
            lambda lost: self._lost(address, lost.detail),
            on_refused=lambda command, text: self._lost(address, text),
        )
        self._connections[address] = connection
        self._unheard.add(address)
        connection.subscribe(Channel.GROUP, self._subscription)
        self._question(connection)

    def _question(self, connection: NodeConnection) -> None:
        connection.send(GroupEvent(json.dumps({"watch": self._subscription}).encode()))

    def _ask(self) -> None:
        """Of one to whom the way is open; messages to another would be dropped."""
        connected = [one for one in self._connections.values() if one.status is Status.CONNECTED]
        if connected:
            self._turn += 1
            self._question(connected[self._turn % len(connected)])

    def _let_go(self, address: str) -> None:
        self._unheard.discard(address)
        self._names.pop(address, None)
        self._loop.create_task(self._connections.pop(address).close(0.0))

    def _delivered(self, address: str, delivery: Delivery) -> None:
        match delivery.body:
            case Gap(dropped=dropped):
                self._put(Missed(dropped))
            case GroupEvent(payload):
                told = json.loads(payload)
                if told.get("event") == LEADER:
                    self._answered(address, told)
                else:
                    self._put(Seen(told))

    def _answered(self, address: str, told: dict[str, Any]) -> None:
        node, by = told.get("node"), told.get("answered_by", "")
        self._names[address] = by
        self._unheard.discard(address)
        if node is not None:
            self._find(node, told.get("address"))
        members = None if "members" not in told else tuple(told["members"])
        self._put(Answer(told.get("group_id"), node, told.get("term"), node == by, members))

    def _find(self, leader: str, address: str | None) -> None:
        """Follow the node that leads, under one of its addresses: over two, all would be seen twice."""
        known = [one for one, name in self._names.items() if name == leader and one != self._told]
        if known and self._told is not None and self._names.get(self._told) in (None, leader):
            self._let_go(self._told)
            self._told = None
        elif not known and not self._unheard and address is not None and address not in self._connections:
            self._told = address
            self._connect(address)

    def _lost(self, address: str, why: str) -> None:
        self._unheard.discard(address)
        self._names.pop(address, None)
        self._put(Silent(address, shortened(why)))

    def _put(self, sight: Sight) -> None:
        """What comes when too much waits is lost, until all of that is taken: so the loss is told where it was."""
        with self._condition:
            if self._missed or len(self._sights) >= self._waiting:
                self._missed += sight.count if isinstance(sight, Missed) else isinstance(sight, Seen)
            else:
                self._sights.append(sight)
            self._condition.notify()

    async def _close(self) -> None:
        connections, self._connections = list(self._connections.values()), {}
        await asyncio.gather(*(connection.close(0.0) for connection in connections), return_exceptions=True)
