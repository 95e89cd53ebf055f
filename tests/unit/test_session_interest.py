"""Whoever publishes learns what is subscribed to: by asking, and by being told when it changes."""

from __future__ import annotations

import pytest

from sublet_protocol.pubsub.model import ChannelDelivery, Subscribe, Unsubscribe
from sublet_protocol.pubsub.node_side_machine import NodeSideMachine, NodeSideSettings
from sublet_protocol.pubsub.node_side_replies import SubscribedKeys

CHANNELS = {"news": ChannelDelivery.LOG, "price": ChannelDelivery.STATE}


class Owner:
    """A publisher whose owner keeps book of the interest that it is told of."""

    def __init__(self) -> None:
        self.node = NodeSideMachine("n1", NodeSideSettings(hold_s=5), channels=CHANNELS)
        self.node.on_interest = self.receive
        self.received: list[tuple[str, str | None, bool]] = []
        self._batches: dict[str, int] = {}

    def receive(self, channel: str, key: str | None, wanted: bool) -> None:
        self.received.append((channel, key, wanted))

    def do(self, name: str, *commands: Subscribe | Unsubscribe, now: float = 0.0) -> None:
        self._batches[name] = number = self._batches.get(name, 0) + 1
        self.node.receive(name, number, commands, now)


@pytest.mark.conforms("R3")
def test_only_first_and_last_subscriber_are_told() -> None:
    owner = Owner()
    for name in ("a", "b", "c"):
        owner.do(name, Subscribe("price", "gold"))
        owner.do(name, Subscribe("price", "gold"))
    assert owner.received == [("price", "gold", True)]
    for name in ("b", "a", "c"):
        assert owner.node.subscribed_keys("price") == SubscribedKeys(frozenset({"gold"}), False)
        owner.do(name, Unsubscribe("price", "gold"))
        owner.do(name, Unsubscribe("price", "gold"))
    assert owner.received == [("price", "gold", True), ("price", "gold", False)]
    assert owner.node.subscribed_keys("price") == SubscribedKeys(frozenset(), False)


def test_all_keys_and_other_channels_are_kept_apart() -> None:
    owner = Owner()
    owner.do("a", Subscribe("price", None), Subscribe("news", "gold"), Subscribe("price", "tin"))
    assert owner.node.subscribed_keys("price") == SubscribedKeys(frozenset({"tin"}), True)
    assert owner.node.subscribed_keys("news") == SubscribedKeys(frozenset({"gold"}), False)
    owner.do("a", Unsubscribe("price", None))
    assert owner.node.subscribed_keys("price") == SubscribedKeys(frozenset({"tin"}), False)
    assert owner.received[-1] == ("price", None, False)


@pytest.mark.conforms("R8")
def test_the_interest_of_the_silent_ends_with_them() -> None:
    owner = Owner()
    owner.do("dead", Subscribe("price", "gold"), Subscribe("price", "tin"))
    owner.do("alive", Subscribe("price", "tin"), now=10.0)
    assert owner.node.expire(16.0) == ("dead",)
    assert owner.received[-1] == ("price", "gold", False)
    assert owner.node.subscribed_keys("price") == SubscribedKeys(frozenset({"tin"}), False)


def test_what_interest_publishes_is_delivered() -> None:
    owner = Owner()

    def publish(channel: str, key: str | None, wanted: bool) -> None:
        assert key is not None
        if wanted:
            owner.node.publish(channel, key, "fetched", 1)
        else:
            owner.node.clear_state(channel, key)

    owner.node.on_interest = publish
    owner.do("a", Subscribe("price", "gold"))
    answer = owner.node.end_poll("a", 0.0)
    assert [one.body for one in getattr(answer, "deliveries", ())] == ["fetched"]
    owner.do("a", Unsubscribe("price", "gold"))
    owner.node.on_interest = owner.receive
    owner.do("b", Subscribe("price", "gold"))
    assert getattr(owner.node.end_poll("b", 0.0), "deliveries", None) == ()
