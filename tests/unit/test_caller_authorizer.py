"""Which rights the commands of sessions need, also while a node's rules are too old."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from sublet_leader.node.caller_authorizer import CallerAuthorizer
from sublet_leader.node.events import GroupLeaderEvent
from sublet_protocol.domain.access.rights import AccessRule, AccessRules, AccessSnapshot, Right, ValidToken
from sublet_protocol.domain.access.token import NewToken
from sublet_protocol.domain.errors import PermissionDenied, UsageError
from sublet_protocol.domain.limits import MAX_SUBSCRIPTIONS, MAX_WATCHES_OF_PRINCIPAL, SLICE_ITEMS
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.gate.access_cache import MAX_AGE_S, AccessCache
from sublet_protocol.gate.gate import AccessGate
from sublet_protocol.messages.borrower_leader import Disconnect, LeaderWanted, Ping
from sublet_protocol.messages.head_and_group_events import GroupEventPayload
from sublet_protocol.pubsub.model import Channel, Subscribe
from sublet_protocol.pubsub.server import make_node_side_machine

GROUP, ELSEWHERE = "$share/billing/orders/#", "$share/billing/bills/#"
TOKENS = {name: NewToken.draw() for name in ("user:a", "user:b")}


class CountingCache(AccessCache):
    """Counts how often rules are looked for."""

    lookups = 0

    def find_rule(self, *asked: Any) -> AccessRule | None:
        self.lookups += 1
        return super().find_rule(*asked)

    def has_right(self, *asked: Any) -> bool:
        self.lookups += 1
        return super().has_right(*asked)


class Node:
    """A node's rights, and who calls."""

    def __init__(self) -> None:
        self.now = 0.0
        valid = {new.token_id: ValidToken(new.digest, name, 1e6) for name, new in TOKENS.items()}
        orders = TopicFilter("orders/#")
        rules = [AccessRule("user:a", right, orders) for right in (Right.JOIN, Right.WATCH)]
        self._valid = valid
        self.access = CountingCache(AccessSnapshot("1", AccessRules(rules), valid), lambda: self.now)
        self.gate = AccessGate(self.access)
        self.publisher = make_node_side_machine("n1")
        self.ended: list[GroupLeaderEvent] = []
        self.rights = CallerAuthorizer(self.gate, self.publisher, self.ended.append)

    def take_rules(self) -> None:
        """Nobody has a right from now on."""
        self.access.replace(AccessSnapshot("2", AccessRules(), self._valid))

    def limit_watch(self, filter: str, principal: str = "user:a") -> None:
        """From now on only this principal has a right, to watch this."""
        rules = AccessRules([AccessRule(principal, Right.WATCH, TopicFilter(filter))])
        self.access.replace(AccessSnapshot("2", rules, self._valid))

    def call(self, name: str) -> CallerAuthorizer:
        self.gate.enter(self.gate.identify(f"Bearer {TOKENS[name].token.reveal()}", "", "Commands"))
        return self.rights


def wanted(subscription: str) -> LeaderWanted:
    return LeaderWanted("agent/1", subscription)


def watched(subscription: str) -> GroupEventPayload:
    return GroupEventPayload(f'{{"watch": "{subscription}"}}'.encode())


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


def test_parts_need_a_right_to_join_somewhere(node: Node) -> None:
    """A caller without any keeps nothing at a node. It may say that it leaves."""
    for more in (False, True):
        assert node.call("user:a").check_message("agent.1", Disconnect("agent/1", 1, (), more=more))
    assert node.call("user:b").check_message("another.1", Disconnect("another/1", 1, ()))
    with pytest.raises(PermissionDenied, match="user:b has no right to join"):
        node.call("user:b").check_message("another.1", Disconnect("another/1", 1, (), more=True))


def test_an_agent_belongs_to_one_principal(node: Node) -> None:
    assert node.call("user:a").check_message("agent.1", Ping(("agent/1",), 1.0))
    with pytest.raises(PermissionDenied, match="not user:b's"):
        node.call("user:b").check_message("agent.2", Ping(("agent/1",), 1.0))
    with pytest.raises(PermissionDenied, match="not user:b's"):
        node.rights.check_agent("agent.2")
    node.rights.check_agent("another.1")  # it only polls, which makes it nobody's
    node.call("user:a").check_agent("agent.1")
    node.rights.check_agent("another.1")
    node.rights.forget(["agent.1"])
    assert node.call("user:b").check_message("agent.2", Ping(("agent/1",), 1.0))


def leads(agent: str) -> list[Any]:
    """A leader with one member."""
    group = SimpleNamespace(group_id=7, subscription=Subscription.parse(GROUP))
    return [SimpleNamespace(group=group, members=[SimpleNamespace(agent=agent, borrower_id=f"{agent}/1")])]


def test_a_member_that_was_away_is_judged_again(node: Node) -> None:
    leaders = leads("agent")
    node.call("user:a").check_message("agent.1", wanted(GROUP))
    node.rights.forget(["agent.1"])
    assert not list(node.rights.find_denied_on_return("agent", leaders)), "nothing has changed"
    node.take_rules()
    recheck(node, leaders)
    assert not node.ended, "nobody knows whose it is"
    node.call("user:a").check_message("agent.2", Ping(("agent/1",), 1.0))
    node.now += MAX_AGE_S + 1
    assert not list(node.rights.find_denied_on_return("agent", leaders)), "while the rules are too old"
    node.take_rules()
    (denied,) = node.rights.find_denied_on_return("agent", leaders)
    assert (denied.group_id, getattr(denied.event, "borrower_id", "")) == (7, "agent/1")
    assert not list(node.rights.find_denied_on_return("agent", leaders)), "once"


@pytest.mark.conforms("X4")
def test_members_are_judged_together_in_slices(node: Node) -> None:
    """A rule is looked for once for each group, however many sessions it has there; they end one after the other."""
    (leader,) = leads("agent")
    leader.members *= 1_000
    node.call("user:a").check_message("agent.1", Ping(("agent/1",), 1.0))
    recheck(node, [leader, leader])
    assert (node.access.lookups, node.ended) == (2, [])
    node.take_rules()
    rounds = recheck(node, [leader])
    assert len(node.ended) == 1_000
    assert max(rounds) <= SLICE_ITEMS + 1


@pytest.mark.conforms("X1")
def test_rules_too_old_to_judge_members_end_none(node: Node) -> None:
    """They are judged when they send something."""
    leaders = leads("agent")
    node.call("user:a").check_message("agent.1", Ping(("agent/1",), 1.0))
    node.take_rules()
    node.now += MAX_AGE_S + 1
    recheck(node, leaders)
    assert not node.ended
    node.take_rules()
    assert len(list(node.rights.find_denied_on_return("agent", leaders))) == 1


def recheck(node: Node, leaders: Sequence[Any] = (), *, until: str = "") -> list[int]:
    """Have all members and subscribers checked again; return how many rules were looked for, and members ended, in each
    round of the loop. `until`: only until this one was checked, as for a poll of it."""
    rounds: list[int] = []

    async def run() -> None:
        node.rights.recheck_all(leaders)
        checks = [node.rights.recheck(each) for each in ([until] if until else node.publisher.subscriber_ids)]
        checking = asyncio.gather(*checks, *([] if until else asyncio.all_tasks() - {asyncio.current_task()}))
        while not checking.done():
            before = node.access.lookups + len(node.ended)
            await asyncio.sleep(0)
            rounds.append(node.access.lookups + len(node.ended) - before)

    asyncio.run(run())
    return rounds


def test_a_watcher_that_is_nobodys_is_let_go_of(node: Node) -> None:
    """It comes again, and is asked."""
    publisher = node.publisher
    publisher.receive("agent.1", 1, [Subscribe(Channel.GROUP, GROUP)], 0.0)
    publisher.receive("other.1", 1, [], 0.0)
    node.limit_watch("#", "*")
    recheck(node)
    assert publisher.subscriber_ids == ("other.1",)


def subscribe(node: Node, agent: str, channel: Channel, *keys: str) -> None:
    for key in keys:
        node.call("user:a").check_subscribe(f"{agent}.1", channel, key)
    node.publisher.receive(f"{agent}.1", 1, [Subscribe(channel, key) for key in keys], 0.0, "user:a")
    node.rights.on_subscribed(f"{agent}.1")


@pytest.mark.conforms("X4")
def test_subscribers_are_checked_again_in_slices(node: Node) -> None:
    """A change of a rule stops the loop for nobody; the keys of streams take one check together."""
    watched = [f"$share/billing/orders/{number}" for number in range(MAX_WATCHES_OF_PRINCIPAL)]
    subscribe(node, "watcher", Channel.GROUP, *watched)
    subscribe(node, "member", Channel.STREAM, *map(str, range(MAX_SUBSCRIPTIONS)))
    node.access.lookups = 0
    lookups = recheck(node)
    assert node.publisher.subscriber_ids == ("watcher.1", "member.1")
    assert len(watched) < sum(lookups) <= 2 * (len(watched) + 1), "by its poll, and beside it"
    assert max(lookups) <= SLICE_ITEMS


@pytest.mark.conforms("X1")
def test_a_poll_is_answered_by_the_new_rules(node: Node) -> None:
    """Also while there are others that are not checked yet."""
    for number in range(10):
        keys = [f"$share/billing/orders/0/{number}/{key}" for key in range(90)]
        subscribe(node, f"before{number}", Channel.GROUP, *keys)
    subscribe(node, "last", Channel.GROUP, GROUP[:-1] + "last")
    node.limit_watch("orders/0/#")
    recheck(node, until="last.1")
    assert not node.publisher.has_subscriber("last.1")
    assert node.publisher.has_subscriber("before0.1")


@pytest.mark.conforms("X1")
def test_a_batch_that_was_checked_before_is_again(node: Node) -> None:
    """It has subscribed after the rights had changed, and after its subscriber was checked."""
    node.publisher.receive("agent.1", 1, [], 0.0, "user:a")
    node.call("user:a").check_subscribe("agent.1", Channel.GROUP, GROUP)
    node.take_rules()
    recheck(node)
    node.publisher.receive("agent.1", 2, [Subscribe(Channel.GROUP, GROUP)], 0.0, "user:a")

    async def poll() -> None:
        node.rights.on_subscribed("agent.1")
        await node.rights.recheck("agent.1")

    asyncio.run(poll())
    assert node.publisher.subscriber_ids == ()


def test_old_rules_deny_nobody_and_let_nobody_in(node: Node) -> None:
    """A denial would be final; a request is repeated until it is answered."""
    node.now += MAX_AGE_S + 1
    assert not node.call("user:a").check_message("agent.1", wanted(GROUP))
    assert node.call("user:a").check_message("agent.1", Ping(("agent/1",), 1.0)), "what is granted goes on"
    node.rights.check_subscribe("agent.1", Channel.STREAM, "1")


def test_subscribing_needs_a_rule(node: Node) -> None:
    node.call("user:a").check_subscribe("agent.1", Channel.GROUP, GROUP)
    with pytest.raises(UsageError):
        node.rights.check_subscribe("agent.1", Channel.GROUP, "no subscription")
    for subject in ((Channel.GROUP, ELSEWHERE), (Channel.GROUP, None)):
        with pytest.raises(PermissionDenied):
            node.rights.check_subscribe("agent.1", *subject)
    node.rights.check_subscribe("agent.1", Channel.STREAM, "1")
    node.call("user:b")
    node.rights.check_subscribe("another.1", Channel.BORROWER, "another/1")
    for channel, key in ((Channel.GROUP, GROUP), (Channel.STREAM, "1"), (Channel.STREAM, None)):
        with pytest.raises(PermissionDenied):
            node.rights.check_subscribe("another.1", channel, key)
