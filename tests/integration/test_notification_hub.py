"""A node's hub on a real database: what it passes on of what it receives, and what it stores."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import pytest

from sublet_leader.node.notification_hub import PER_TURN, NotificationHub
from sublet_protocol.messages.head_and_group_events import StreamHead
from sublet_protocol.pubsub.model import Channel, Subscribe
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine
from sublet_protocol.pubsub.node_side_replies import PollReply
from sublet_protocol.pubsub.server import make_node_side_machine
from sublet_storage.db.connect import connect
from sublet_storage.notify.changes import (
    GROUP,
    STREAM,
    ChangeNotification,
    NotifySettings,
    ObjectChange,
    group_change,
    stream_change,
)
from sublet_storage.notify.codec import encode
from sublet_storage.notify.drivers.registry import load_driver
from sublet_storage.notify.publisher import publish_once
from sublet_storage.spaces.space_changes import create_space
from tests.integration.log_kit import Connection
from tests.integration.notify_kit import Loose
from tests.integration.session_kit import until
from tests.kit import eventually

SETTINGS = NotifySettings().scaled(4)
ODD: list[dict[str, Any] | None] = [
    {"group_id": "7", "revision": 1},
    {"group_id": 7, "revision": "x"},
    {"group_id": 7},
    {"revision": 3},
    {},
    None,
]


def heads(publisher: NodeSideMachine, name: str) -> list[object]:
    found = publisher.poll(name, 0, "", 0.0, 0.0)
    return [delivery.body for delivery in found.deliveries] if isinstance(found, PollReply) else []


@pytest.mark.conforms("P1", "D6", "E21")
def test_a_hub_passes_on_what_is_followed(database: str, caplog: pytest.LogCaptureFixture) -> None:
    async def story(conn: Connection) -> None:
        publisher = make_node_side_machine("n1#1")
        grown: list[int] = []
        changed: list[bool] = []
        ordered: list[int] = []
        hub = NotificationHub(
            database,
            load_driver("postgres")(database),
            publisher,
            lambda _: changed.append(True),
            ordered.append,
            grown.append,
            SETTINGS,
        )
        publisher.on_interest = lambda channel, key, wanted: hub.set_interest(str(key), wanted)
        conn.execute(
            "insert into node (name, incarnation, address, protocol_version, notify_endpoint, expires_at)"
            " values ('n1', 'n1#1', 'h:1', 1, %s, clock_timestamp() + interval '1 hour')",
            (hub.endpoint,),
        )
        try:
            publisher.receive("a", 1, [Subscribe(Channel.STREAM, "1")], 0.0)
            await until(lambda: heads(publisher, "a"))  # no notification came: it was read
            changes: list[ObjectChange] = [stream_change(1, 40, closed=False), stream_change(2, 50, closed=False)]
            await asyncio.to_thread(publish_once, database, changes)
            await until(lambda: {1, 2} <= set(grown))
            assert heads(publisher, "a")[-1] == StreamHead(1, 40)
            nonsense = [ObjectChange("stream", key, 2**62) for key in ("1", "x", "9" * 19, "9" * 90, "٣")]
            await asyncio.to_thread(publish_once, database, [*nonsense, stream_change(3, 60, closed=False)])
            await until(lambda: 3 in grown)
            publisher.receive("b", 1, [Subscribe(Channel.STREAM, "2")], 0.0)
            assert heads(publisher, "b") == [StreamHead(2, 50)], "it was received before"
            assert publisher.subscribed_keys(Channel.STREAM).keys == {"1", "2"}
            odd = [ObjectChange("group", f"$share/g{n}/#", 1, data=data) for n, data in enumerate(ODD)]
            wanted = [group_change("$share/g/#", 7), group_change("$share/h/#", 8, revision=2)]
            await asyncio.to_thread(publish_once, database, [*odd, *wanted])
            await until(lambda: ordered)
            assert ordered == [8]
            assert not caplog.records
            before = len(changed)
            await asyncio.to_thread(create_space, conn, "eu", "eu/#")
            hub.subscriber.request_catch_up("space")
            await until(lambda: len(changed) > before)
        finally:
            await asyncio.to_thread(hub.close)

    with connect(database) as conn:
        asyncio.run(story(conn))


class Forged:
    """A hub, and what it has passed on. Changes are delivered as one publisher's."""

    def __init__(self, url: str) -> None:
        self.driver = Loose()
        self.publisher = make_node_side_machine("n1#1")
        self.looks: list[int] = []
        self.grown: list[int] = []
        self.hub = NotificationHub(
            url, self.driver, self.publisher, self.looks.append, self.looks.append, self.grown.append, SETTINGS
        )
        self._sent = 0

    def deliver(self, channel: str, *changes: ObjectChange) -> None:
        self._sent += 1
        self.driver.deliver(encode(ChangeNotification(channel, "i", channel, self._sent, self._sent - 1, changes)))

    def wait_until_taken(self) -> None:
        """Let the subscriber's thread take all of them while the loop stands still, as a busy one does."""
        self.deliver(STREAM)  # all before it have been handed on when it is taken
        eventually(lambda: self.hub.subscriber.counters()["received"] == self._sent)

    async def close(self) -> None:
        await asyncio.to_thread(self.hub.close)


@pytest.mark.conforms("X4")
def test_changes_that_wait_are_one_look_of_a_group(database: str) -> None:
    """However many there are, and under whatever keys; above so many groups it is one look of all."""

    async def story() -> None:
        forged = Forged(database)
        try:
            await until(lambda: forged.looks)  # at the spaces that it has read at first
            forged.looks.clear()
            for message in range(20):
                keys = [f"$share/{message}-{number}/#" for number in range(60)]
                forged.deliver(GROUP, *(group_change(key, 7, revision=1) for key in keys))
            forged.deliver(GROUP, group_change("$share/last/#", 8, revision=1))
            forged.wait_until_taken()
            await until(lambda: 8 in forged.looks)
            assert sorted(forged.looks) == [7, 8]
            forged.looks.clear()
            for first in range(0, 200, 50):
                many = [group_change(f"$share/g{n}/#", n, revision=1) for n in range(first, first + 50)]
                forged.deliver(GROUP, *many)
            forged.wait_until_taken()
            await until(lambda: forged.looks)
            assert forged.looks == [False]
        finally:
            await forged.close()

    asyncio.run(story())


@pytest.mark.conforms("X4")
def test_heads_are_passed_on_in_turns_with_others(database: str) -> None:
    async def story() -> None:
        forged = Forged(database)
        try:
            for first in range(0, 2_000, 100):
                forged.deliver(STREAM, *(stream_change(n, 1, closed=False) for n in range(first, first + 100)))
            forged.wait_until_taken()
            turns = [0]
            while len(forged.grown) < 2_000:
                await asyncio.sleep(0)
                turns.append(len(forged.grown))
            assert max(after - before for before, after in pairwise(turns)) <= PER_TURN
        finally:
            await forged.close()

    asyncio.run(story())


@pytest.mark.conforms("X4")
def test_a_turn_counts_each_subscriber_of_a_head(database: str) -> None:
    """Those of one stream have it in one turn."""
    streams, followers = range(20), 50

    async def story() -> None:
        forged = Forged(database)
        forged.publisher.on_interest = lambda channel, key, wanted: forged.hub.set_interest(str(key), wanted)
        ready: list[str] = []
        try:
            for follower in range(followers):
                wanted = [Subscribe(Channel.STREAM, str(stream)) for stream in streams]
                forged.publisher.receive(f"a{follower}", 1, wanted, 0.0)
            forged.publisher.on_ready = ready.append
            forged.deliver(STREAM, *(stream_change(stream, 1, closed=False) for stream in streams))
            forged.wait_until_taken()
            turns = [0]
            while len(ready) < len(streams) * followers:
                await asyncio.sleep(0)
                turns.append(len(ready))
            assert max(after - before for before, after in pairwise(turns)) <= PER_TURN
            assert heads(forged.publisher, "a0") == [StreamHead(stream, 1) for stream in streams]
        finally:
            await forged.close()

    asyncio.run(story())
