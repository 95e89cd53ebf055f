"""Which rights the commands of sessions need, also while a node's rules are too old."""

from __future__ import annotations

import pytest

from sublet_leader.node.caller_rights import CallerRights
from sublet_protocol.domain.access.rights import AccessRule, AccessSnapshot, Right, Rights, ValidToken
from sublet_protocol.domain.access.token import NewToken
from sublet_protocol.domain.errors import PermissionDenied
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate.access_cache import MAX_AGE_S, AccessCache
from sublet_protocol.gate.gate import Gate
from sublet_protocol.messages.borrower_leader import LeaderWanted, Ping
from sublet_protocol.messages.channel_messages import GroupEvent
from sublet_protocol.pubsub.model import Channel
from sublet_protocol.pubsub.server import new_publisher

GROUP, ELSEWHERE = "$share/billing/orders/#", "$share/billing/bills/#"
TOKENS = {name: NewToken.draw() for name in ("user:a", "user:b")}


class Node:
    """A node's rights, and who calls."""

    def __init__(self) -> None:
        self.now = 0.0
        valid = {new.token_id: ValidToken(new.digest, name, 1e6) for name, new in TOKENS.items()}
        orders = TopicFilter("orders/#")
        rules = [AccessRule("user:a", right, orders) for right in (Right.JOIN, Right.WATCH)]
        self.gate = Gate(AccessCache(AccessSnapshot(1, Rights(rules), valid), lambda: self.now))
        self.rights = CallerRights(self.gate, new_publisher("n1"))

    def call(self, name: str) -> CallerRights:
        self.gate.enter(self.gate.identify(f"Bearer {TOKENS[name].token.reveal()}", "", "Commands"))
        return self.rights


def wanted(subscription: str) -> LeaderWanted:
    return LeaderWanted("agent/1", subscription)


def watched(subscription: str) -> GroupEvent:
    return GroupEvent(f'{{"watch": "{subscription}"}}'.encode())


@pytest.fixture
def node() -> Node:
    return Node()


def test_joining_and_watching_need_a_rule(node: Node) -> None:
    for message in (wanted, watched):
        assert node.call("user:a").check_message("agent.1", message(GROUP))
        with pytest.raises(PermissionDenied, match="bills"):
            node.call("user:a").check_message("agent.1", message(ELSEWHERE))
        with pytest.raises(PermissionDenied, match="user:b"):
            node.call("user:b").check_message("another.1", message(GROUP))
    assert node.call("user:b").check_message("another.1", Ping(("another/1",), 1.0))


def test_an_agent_belongs_to_one_principal(node: Node) -> None:
    assert node.call("user:a").check_message("agent.1", Ping(("agent/1",), 1.0))
    with pytest.raises(PermissionDenied, match="not user:b's"):
        node.call("user:b").check_message("agent.2", Ping(("agent/1",), 1.0))
    node.rights.forget(["agent.1"])
    assert node.call("user:b").check_message("agent.2", Ping(("agent/1",), 1.0))


def test_old_rules_deny_nobody_and_let_nobody_in(node: Node) -> None:
    """A denial would be final; a request is repeated until it is answered."""
    node.now += MAX_AGE_S + 1
    assert not node.call("user:a").check_message("agent.1", wanted(GROUP))
    assert node.call("user:a").check_message("agent.1", Ping(("agent/1",), 1.0)), "what is granted goes on"
    node.rights.check_subscribe("agent.1", Channel.STREAM, "1")


def test_subscribing_needs_a_rule(node: Node) -> None:
    node.call("user:a").check_subscribe("agent.1", Channel.GROUP, GROUP)
    for subject in ((Channel.GROUP, ELSEWHERE), (Channel.GROUP, None)):
        with pytest.raises(PermissionDenied):
            node.rights.check_subscribe("agent.1", *subject)
    node.rights.check_subscribe("agent.1", Channel.STREAM, "1")
    node.call("user:b")
    for channel, key in ((Channel.GROUP, GROUP), (Channel.STREAM, "1"), (Channel.STREAM, None)):
        with pytest.raises(PermissionDenied):
            node.rights.check_subscribe("another.1", channel, key)
