"""What a watcher takes and what it loses: in order, and counted; and what is shown of it."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, Self

import pytest

from sublet.cli.base.command import NODE_TIMEOUT_S, CliCommandContext
from sublet_borrower.node_client import group_event_watcher
from sublet_borrower.node_client.group_event_watcher import (
    FindLeaderResponse,
    GroupEventsDropped,
    GroupEventsUnavailable,
    GroupEventWatcher,
    WatchedGroupEvent,
    WatchEvent,
)
from sublet_borrower.util.network_loop import network_loop
from sublet_protocol.domain.errors import NotFound, Unavailable
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_protocol.pubsub.agent_side_events import ConnectionStatus
from sublet_protocol.pubsub.model import Channel, MailboxOverflow, MessageToNode, SequencedMessage, Subscribe

GROUP = "$share/g/#"
watch = importlib.import_module("sublet.cli.groups.watch")


class Watch:
    """A watch of nodes, and what they send it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *addresses: str, waiting: int = 100) -> None:
        self.followed: dict[str, SimpleNamespace] = {}
        self.subscribed: list[str] = []
        monkeypatch.setattr(group_event_watcher, "NodeConnection", self.connect)
        self.watcher = GroupEventWatcher(GROUP, waiting)
        self.watcher.set_nodes(addresses or ("n1:1",))

    def connect(self, address: str, agent: str, deliver: Any, lose: Any, **more: Any) -> SimpleNamespace:
        """In the place of a connection to a node: the test says what comes from there."""

        async def close(wait_s: float) -> None:
            if self.followed.get(address) is connection:
                del self.followed[address]

        def ignore(*_: object) -> None:
            """Nothing to send."""

        connection = self.followed[address] = SimpleNamespace(
            deliver=deliver,
            lose=lose,
            refuse=more["on_refused"],
            subscribe=lambda channel, key: self.subscribed.append(address),
            send=ignore,
            close=close,
            status=ConnectionStatus.CONNECTED,
        )
        return connection

    def on_loop(self, call: Callable[[], object]) -> None:
        """As it comes from the network, and once all that it causes is done."""

        async def run() -> None:
            call()
            await asyncio.sleep(0)

        asyncio.run_coroutine_threadsafe(run(), network_loop()).result()

    def receives(self, *bodies: object, address: str = "n1:1") -> None:
        for body in bodies:
            message = SequencedMessage(1, Channel.GROUP, GROUP, body)
            self.on_loop(lambda message=message: self.followed[address].deliver(message))  # type: ignore[misc]

    def loses(self, address: str) -> None:
        self.on_loop(lambda: self.followed[address].lose(SimpleNamespace(detail="silent", reason=None)))

    def queries(self) -> list[str]:
        """It queries for the leader; where it subscribes by then."""
        self.subscribed.clear()
        self.on_loop(self.watcher.query_leader)
        self.on_loop(lambda: None)
        return self.subscribed

    def leads(self, address: str, by: str, leader: str | None, at: str | None = None) -> list[str]:
        """The node at that address says who leads; whom it follows then."""
        reported = {"event": "leader", "group_id": 1, "node": leader, "term": 7, "address": at, "answered_by": by}
        self.receives(GroupEventPayload(json.dumps(reported).encode()), address=address)
        return list(self.followed)

    def taken(self) -> list[Any]:
        """Numbers of events, and what was missed between them."""
        sights: list[WatchEvent] = []
        while (sight := self.watcher.next_event(0)) is not None:
            sights.append(sight)
        return [sight.event["stream_id"] if isinstance(sight, WatchedGroupEvent) else sight for sight in sights]


def event(number: int) -> GroupEventPayload:
    return GroupEventPayload(json.dumps({"event": "grant", "stream_id": number}).encode())


def test_events_come_in_order_with_their_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    watch.receives(event(1), MailboxOverflow(7, (Channel.GROUP,)), event(2))
    assert watch.taken() == [1, GroupEventsDropped(7), 2]


def test_what_is_too_much_is_lost_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, waiting=3)
    watch.receives(*map(event, range(8)), MailboxOverflow(10, (Channel.GROUP,)))
    assert watch.taken() == [0, 1, 2, GroupEventsDropped(15)]
    watch.receives(event(9))
    assert watch.taken() == [9]
    watch.receives(*map(event, range(4)))
    assert watch.watcher.next_event(0) == WatchedGroupEvent({"event": "grant", "stream_id": 0})
    watch.receives(event(4))
    assert watch.taken() == [1, 2, GroupEventsDropped(2)], "what comes after a loss is part of the gap"


def test_a_refused_watch_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the next query, and only if it was not the query that was refused."""
    watch = Watch(monkeypatch, "n1:1", "n2:1")
    refusal, query = Subscribe(Channel.GROUP, GROUP), MessageToNode(event(1))
    watch.on_loop(lambda: watch.followed["n1:1"].refuse(query, "no right"))
    watch.on_loop(lambda: watch.followed["n2:1"].refuse(refusal, "16 watch it"))
    refusals = [("n1:1", "no right"), ("n2:1", "16 watch it")]
    assert watch.taken() == [GroupEventsUnavailable(*each, is_refusal=True) for each in refusals]
    assert watch.queries() == ["n2:1"]
    assert watch.queries() == []


def test_a_look_at_members_watches_no_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of watchers a principal has only so many."""
    watch = Watch(monkeypatch)
    watch.on_loop(lambda: None)
    assert watch.subscribed == ["n1:1"]
    watch.subscribed.clear()
    assert group_event_watcher.list_connected_members(GROUP, "n2:1", wait_s=0.01) is None
    assert watch.subscribed == []


# --- where the leader is ----------------------------------------------------------------------------------------------


def test_an_unknown_leader_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once all nodes that are known have said who they are."""
    watch = Watch(monkeypatch, "localhost:1", "localhost:2", "localhost:3")
    assert watch.leads("localhost:2", "n2", "n1", "127.0.0.1:1") == ["localhost:1", "localhost:2", "localhost:3"]
    watch.loses("localhost:3")
    assert len(watch.leads("localhost:1", "n1", "n1", "127.0.0.1:1")) == 3, "it is known, by another address"
    assert watch.leads("localhost:2", "n2", "n4", "127.0.0.1:4")[3:] == ["127.0.0.1:4"]
    assert watch.leads("localhost:2", "n2", None)[3:] == ["127.0.0.1:4"]


def test_a_leader_is_not_followed_over_two_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, "localhost:1", "localhost:2")
    watch.loses("localhost:1")
    assert watch.leads("localhost:2", "n2", "n1", "127.0.0.1:1")[2:] == ["127.0.0.1:1"]
    assert watch.leads("127.0.0.1:1", "n1", "n1", "127.0.0.1:1")[2:] == ["127.0.0.1:1"]
    assert watch.leads("localhost:1", "n1", "n1", "127.0.0.1:1") == ["localhost:1", "localhost:2"]


def test_a_known_node_that_leads_is_not_followed_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one before stays followed while it is another node; and nothing is connected to twice."""
    watch = Watch(monkeypatch, "localhost:1", "localhost:2")
    watch.leads("localhost:1", "n1", "n1", "127.0.0.1:1")
    assert watch.leads("localhost:2", "n2", "n4", "127.0.0.1:4")[2:] == ["127.0.0.1:4"]
    assert watch.leads("127.0.0.1:4", "n4", "n1", "127.0.0.1:1")[2:] == ["127.0.0.1:4"]
    watch.loses("localhost:1")
    assert watch.leads("localhost:2", "n2", "n1", "localhost:1")[2:] == ["127.0.0.1:4"]
    assert watch.subscribed == ["localhost:1", "localhost:2", "127.0.0.1:4"]


def test_a_leader_must_have_tls_where_others_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch, "tls://localhost:1")
    assert watch.leads("tls://localhost:1", "n1", "n2", "127.0.0.1:2") == ["tls://localhost:1"]
    refused, answer = watch.taken()
    assert (refused.address, "it has none" in refused.reason) == ("127.0.0.1:2", True)
    assert answer.node == "n2"
    assert watch.leads("tls://localhost:1", "n1", "n2", "tls://127.0.0.1:2")[1:] == ["tls://127.0.0.1:2"]


def test_a_node_that_is_gone_is_followed_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it does not answer; one that is still listed may come back."""
    watch = Watch(monkeypatch, "n1:1", "n2:1", "n3:1")
    watch.on_loop(lambda: None)
    for address in ("n1:1", "n3:1"):
        watch.followed[address].status = ConnectionStatus.DISCONNECTED
    watch.watcher.set_nodes(["n1:1"])
    watch.on_loop(lambda: None)
    assert list(watch.followed) == ["n1:1", "n2:1"]


def test_a_node_that_rejected_a_watcher_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that is not listed, once it is named as the leader's again."""
    watch = Watch(monkeypatch, "n1:1", "n2:1")
    watch.loses("n1:1")
    watch.leads("n2:1", "n2", "n3", "n3:1")
    for address in ("n1:1", "n3:1"):
        watch.followed[address].status = ConnectionStatus.REJECTED
    watch.watcher.set_nodes(["n1:1", "n2:1"])
    watch.on_loop(lambda: None)
    assert watch.subscribed == ["n1:1", "n2:1", "n3:1", "n1:1"]
    watch.loses("n1:1")
    watch.leads("n2:1", "n2", "n3", "n3:1")
    assert watch.subscribed[4:] == ["n3:1"]


def test_who_leads_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    for leader in ("n1", "n2", None):
        watch.leads("n1:1", "n1", leader)
    assert watch.taken() == [
        FindLeaderResponse(1, "n1", 7, is_led_here=True),
        FindLeaderResponse(1, "n2", 7, is_led_here=False),
        FindLeaderResponse(1, None, 7, is_led_here=False),
    ]


# --- what is shown ----------------------------------------------------------------------------------------------------


class Script(GroupEventWatcher):
    """Has these things to take, one at each look, and then Ctrl-C; None: nothing comes in time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *sights: WatchEvent | None) -> None:
        super().__init__(GROUP)
        self._script: Iterator[WatchEvent | None] = iter(sights)
        self.now = 100.0
        monkeypatch.setattr(group_event_watcher, "GroupEventWatcher", lambda subscription: self)
        monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: self.now))

    def set_nodes(self, addresses: object) -> None:
        """There is none."""

    def next_event(self, wait_s: float) -> WatchEvent | None:
        self.now += wait_s
        try:
            return next(self._script)
        except StopIteration:
            raise KeyboardInterrupt from None

    def __enter__(self) -> Self:
        return self

    def show(self, *, as_json: bool = False) -> int:
        """Run the command."""
        return int(watch.watch(CliCommandContext(None, None, json=as_json, debug=False), GROUP, ["n1:1"]))


def test_a_line_moves_no_cursor(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """And says what may be seen again."""
    of_stream = {"stream_id": 3, "position": 5, "redelivery_end": 8}
    seized: dict[str, Any] = {"at": "T", "event": "force_release", "agent": "a", "reason": "x\x1b[2J", **of_stream}
    stepped_down: dict[str, Any] = {"at": "T", "event": "step_down", "node": "n1", "reason": "idle"}
    events = (seized, seized | {"redelivery_end": 5}, stepped_down)
    assert Script(monkeypatch, *(WatchedGroupEvent(each) for each in events)).show() == 0
    assert capsys.readouterr().out.splitlines() == [
        "T  force_release  stream 3 at 5  [5, 8) may be seen again  a  x\\x1b[2J",
        "T  force_release  stream 3 at 5  a  x\\x1b[2J",
        "T  step_down      n1  idle",
    ]


def test_each_refusal_is_shown_once(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Of each node, which refuses at each query, also before one has answered."""
    refusals = [GroupEventsUnavailable(address, "no right", is_refusal=True) for address in ("n1:1", "n2:1")]
    Script(monkeypatch, *refusals, FindLeaderResponse(1, "n3", 7, is_led_here=False), *refusals * 3).show()
    assert [line.split(".")[0] for line in capsys.readouterr().err.splitlines()] == [
        f"Node {address} refuses: no right" for address in ("n1:1", "n2:1")
    ]


@pytest.mark.parametrize("as_json", [False, True])
def test_a_gap_has_how_much_was_lost(
    monkeypatch: pytest.MonkeyPatch, as_json: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    Script(monkeypatch, GroupEventsDropped(7)).show(as_json=as_json)
    said = capsys.readouterr()
    assert "7 events were lost; `sublet groups history '$share/g/#'` has all that is durable." in said.err
    assert said.out == ('{"event":"gap","subscription":"$share/g/#","lost":7}\n' if as_json else "")


def test_a_watch_gives_up_where_no_node_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where one does that does not lead."""
    waits = [None] * int(NODE_TIMEOUT_S)
    for as_json in (False, True):
        with pytest.raises(
            Unavailable, match=rf"no node has said who leads .* within {NODE_TIMEOUT_S:g} s\. Start one"
        ):
            Script(monkeypatch, *waits).show(as_json=as_json)
    answered = FindLeaderResponse(1, "n2", 7, is_led_here=False)
    assert Script(monkeypatch, answered, *waits).show() == 0
    with pytest.raises(NotFound, match="was deleted"):
        Script(monkeypatch, answered, FindLeaderResponse(None, None, None, is_led_here=False)).show()
