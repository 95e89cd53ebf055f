"""The node's half of the session: the machine alone, with made-up channels and bodies."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sublet_protocol.pubsub.channel_subscribers import SubscriptionIndex
from sublet_protocol.pubsub.counters import NodeSideCounters
from sublet_protocol.pubsub.model import (
    ChannelKind,
    CommandRefusal,
    MailboxOverflow,
    MessageToNode,
    ReceivedCommand,
    SequencedMessage,
    Subscribe,
    UndecodableCommand,
    Unsubscribe,
)
from sublet_protocol.pubsub.node_side_machine import MAX_EXPIRED_SUBSCRIPTIONS, NodeSideMachine, SubscriberLimits
from sublet_protocol.pubsub.node_side_replies import (
    CommandsAccepted,
    CommandsAlreadyExecuted,
    HoldPoll,
    PollReply,
    SubscriberRefused,
    UnknownSubscriber,
)
from sublet_protocol.pubsub.subscriber_mailbox import MESSAGE_BYTES, MailboxLimits

CHANNELS = {"logs": ChannelKind.LOG, "chat": ChannelKind.LOG, "price": ChannelKind.STATE}
INCARNATION = "node-1"


def publisher(*names: str, **limits: int) -> NodeSideMachine:
    """Return a node of which these have subscribed to all logs."""
    settings = SubscriberLimits(hold_s=5, mailbox=MailboxLimits(**limits), subscribers=3, subscriptions_each=5)
    node = NodeSideMachine(INCARNATION, settings, channels=CHANNELS, size_of=lambda body: len(str(body)))
    for name in names:
        subscribed(node, name, ("logs", None))
    return node


def subscribed(node: NodeSideMachine, name: str, *subjects: tuple[str, str | None]) -> None:
    received = node.receive(name, 1, [Subscribe(*subject) for subject in subjects], now=0)
    assert received == CommandsAccepted((), ())


def refused(
    node: NodeSideMachine, name: str, number: int, *commands: ReceivedCommand, principal: str | None = None
) -> list[str]:
    """Execute a batch; what is said of the commands in it that are refused."""
    answer = node.receive(name, number, commands, 0, principal)
    assert isinstance(answer, CommandsAccepted)
    return [error.text for error in answer.errors]


def on(channel: str, keys: Iterable[str | None]) -> list[Subscribe]:
    return [Subscribe(channel, key) for key in keys]


def taken(node: NodeSideMachine, name: str, acknowledged: int = 0) -> tuple[SequencedMessage, ...]:
    answer = node.poll(name, acknowledged, INCARNATION if acknowledged else "", 0, 5)
    return answer.deliveries if isinstance(answer, PollReply) else ()


def bodies(deliveries: tuple[SequencedMessage, ...]) -> list[object]:
    return [delivery.body for delivery in deliveries]


@pytest.mark.conforms("R3")
def test_each_message_comes_once_and_in_order() -> None:
    """To who reads one key, all keys, or both."""
    node = publisher()
    subscribed(node, "key", ("logs", "eu"))
    subscribed(node, "all", ("logs", None))
    subscribed(node, "both", ("logs", "eu"), ("logs", None))
    for number in range(50):
        node.publish("logs", "eu", f"eu{number}")
        node.publish("logs", "us", f"us{number}")
    eu = [f"eu{number}" for number in range(50)]
    assert bodies(taken(node, "key")) == eu
    everything = [f"{key}{number}" for number in range(50) for key in ("eu", "us")]
    assert bodies(taken(node, "all")) == everything
    assert bodies(taken(node, "both")) == everything


@pytest.mark.conforms("R5")
def test_messages_are_given_until_acknowledged() -> None:
    node = publisher("a")
    node.publish("logs", "k", "one")
    first = taken(node, "a")
    node.publish("logs", "k", "two")
    again = taken(node, "a")
    assert again[0] == first[0]
    assert bodies(again) == ["one", "two"]
    assert bodies(taken(node, "a", acknowledged=first[-1].sequence)) == ["two"]
    assert isinstance(node.poll("a", again[-1].sequence, INCARNATION, 0, 5), HoldPoll)


@pytest.mark.conforms("R3")
def test_log_messages_name_their_predecessor() -> None:
    node = publisher()
    subscribed(node, "a", ("logs", "k"), ("chat", None))
    node.publish("logs", "k", 1)
    node.publish("chat", "x", 2)
    node.publish("logs", "other", "not for us")
    node.publish("logs", "k", 3)
    found = [(one.sequence, one.channel, one.predecessor) for one in taken(node, "a")]
    assert found == [(1, "logs", 0), (2, "chat", 0), (3, "logs", 1)]


def test_a_subscription_gets_the_newest_state() -> None:
    node = publisher()
    subscribed(node, "early", ("price", None))
    assert [node.publish("price", "gold", f"g{version}", version) for version in (1, 3, 2, 3, 4)] == [1, 1, 0, 0, 1]
    node.publish("price", "tin", "t9", 9)
    node.publish("price", "lead", "l1", 1)
    assert [(one.body, one.version) for one in taken(node, "early")] == [("g4", 4), ("t9", 9), ("l1", 1)]
    node.clear_state("price", "lead")
    subscribed(node, "one", ("price", "gold"))
    assert bodies(taken(node, "one")) == ["g4"]
    subscribed(node, "all", ("price", None), ("price", "lead"))
    assert bodies(taken(node, "all")) == ["g4", "t9"]


@pytest.mark.conforms("R10")
def test_overflow_turns_into_one_gap_at_its_place() -> None:
    node = publisher("slow", "fast", messages=10)
    node.publish("logs", "k", "first")
    handed_out = taken(node, "slow")
    seen: list[object] = bodies(taken(node, "fast"))
    for number in range(100):
        node.publish("logs", "k", number)
        seen += bodies(taken(node, "fast", acknowledged=len(seen)))
    assert seen == ["first", *range(100)]

    deliveries = taken(node, "slow", acknowledged=handed_out[-1].sequence)
    gaps = [one for one in deliveries if isinstance(one.body, MailboxOverflow)]
    assert deliveries[0] is gaps[0]
    assert len(gaps) == 1
    rest = bodies(deliveries[1:])
    assert gaps[0].body == MailboxOverflow(100 - len(rest), ("logs",))
    assert rest == list(range(100 - len(rest), 100))
    assert deliveries[1].predecessor == gaps[0].sequence  # nobody can overlook it


def test_a_gap_that_is_sent_again_counts_once() -> None:
    """Also where nothing comes behind it."""
    node = publisher("a", bytes=100)
    node.publish("logs", "k", "x" * 200)
    first = taken(node, "a")
    assert [type(one.body) for one in first] == [MailboxOverflow]
    assert taken(node, "a") == first
    assert (node.counters.gaps, node.counters.redeliveries) == (1, 1)


@pytest.mark.conforms("R10", "X4")
def test_a_reply_is_bounded_and_the_next_one_goes_on() -> None:
    node = publisher("a", reply_messages=3, reply_bytes=100)
    for number in range(5):
        node.publish("logs", "k", number)
    node.publish("logs", "k", "x" * 500)
    assert bodies(taken(node, "a")) == [0, 1, 2]
    assert bodies(taken(node, "a", acknowledged=3)) == [3, 4]
    assert bodies(taken(node, "a", acknowledged=5)) == ["x" * 500]


def test_a_directed_message_is_queued_once() -> None:
    node = publisher()
    node.poll("a", 0, "", now=0, hold_s=5)
    assert node.send("a", "logs", "k", "grant")
    assert node.send("a", "logs", "k", "grant")
    assert node.send("a", "logs", "k", "revoke")
    assert not node.send("nobody", "logs", "k", "grant")
    first = taken(node, "a")
    assert bodies(first) == ["grant", "revoke"]
    node.send("a", "logs", "k", "grant")  # handed out, not acknowledged: still there
    assert taken(node, "a") == first
    taken(node, "a", acknowledged=2)
    node.send("a", "logs", "k", "grant")
    assert bodies(taken(node, "a", acknowledged=2)) == ["grant"]
    node = publisher(messages=1)  # where a gap has taken its place it is queued again
    node.poll("a", 0, "", now=0, hold_s=5)
    node.send("a", "logs", "k", "one")
    node.send("a", "logs", "k", "two")
    node.send("a", "logs", "k", "one")
    assert bodies(taken(node, "a")) == [MailboxOverflow(2, ("logs",)), "one"]


@pytest.mark.conforms("R2")
def test_a_repeated_batch_is_not_executed_again() -> None:
    node = publisher()
    batch: list[ReceivedCommand] = [MessageToNode("hello"), Subscribe("logs", "k"), UndecodableCommand("it is broken")]
    first = node.receive("a", 1, batch, now=0)
    assert isinstance(first, CommandsAccepted)
    assert first.messages == ((0, "hello"),)
    assert node.receive("a", 2, [Unsubscribe("logs", "k")], now=0) == CommandsAccepted((), ())
    assert node.subscriptions("a") == {}
    assert node.receive("a", 2, [Unsubscribe("logs", "k")], now=0) == CommandsAlreadyExecuted(())
    node = publisher()
    node.receive("a", 1, batch, now=0)
    assert node.receive("a", 1, batch, now=0) == CommandsAlreadyExecuted(first.errors)


@pytest.mark.conforms("R2")
def test_the_last_command_wins() -> None:
    node = publisher()
    node.receive("a", 1, [Subscribe("logs", "k"), Unsubscribe("logs", "k"), Subscribe("logs", "k")], now=0)
    node.receive("b", 1, [Subscribe("logs", "k"), Unsubscribe("logs", "k")], now=0)
    assert node.publish("logs", "k", "x") == 1
    assert bodies(taken(node, "a")) == ["x"]


@pytest.mark.conforms("R7")
@pytest.mark.parametrize("number", [2, 3, 10])
def test_a_batch_that_does_not_follow_is_unknown(number: int) -> None:
    node = publisher()
    assert isinstance(node.receive("a", number, [Subscribe("logs", "k")], now=0), UnknownSubscriber)
    subscribed(node, "b", ("logs", "k"))
    assert isinstance(node.receive("b", number + 1, [], now=0), UnknownSubscriber)
    assert node.subscriber_ids == ()


@pytest.mark.conforms("R11")
def test_a_bad_command_gets_an_error_for_itself() -> None:
    node = publisher()
    batch = Subscribe("nonsense", "k"), UndecodableCommand("broken"), Subscribe("logs", "k"), MessageToNode("m")
    answer = node.receive("a", 1, batch, now=0)
    assert isinstance(answer, CommandsAccepted)
    assert ([error.index for error in answer.errors], answer.messages) == ([0, 1], ((3, "m"),))
    assert "nonsense" in answer.errors[0].text
    assert "price" in answer.errors[0].text
    assert node.subscriptions("a") == {"logs": {"k": None}}
    assert len(node.add_errors("a", 1, [])) == 2


@pytest.mark.conforms("X4")
def test_errors_of_another_batch_are_not_added() -> None:
    """Such as of one whose subscriber has sent the next meanwhile, or is gone."""
    node, late = publisher(), [CommandRefusal(0, "late")]
    subscribed(node, "a", ("logs", "eu"))
    assert node.receive("a", 2, [], now=0) == CommandsAccepted((), ())
    for name, number in (("a", 1), ("nobody", 1)):
        assert node.add_errors(name, number, late) == tuple(late)
    assert node.receive("a", 2, [], now=0) == CommandsAlreadyExecuted(())


def test_subscriptions_and_subscribers_are_bounded() -> None:
    node = publisher()
    answer = node.receive("a", 1, on("logs", "0123456"), now=0)
    assert isinstance(answer, CommandsAccepted)
    assert [error.index for error in answer.errors] == [5, 6]
    assert refused(node, "a", 2, Subscribe("logs", "0")) == [], "it has this one"
    subscribed(node, "b")
    subscribed(node, "c")
    assert isinstance(node.receive("d", 1, [], now=0), SubscriberRefused)
    assert isinstance(node.poll("d", 0, "", 0, 5), SubscriberRefused)
    assert node.subscriber_ids == ("a", "b", "c"), "who is there stays"
    assert node.expire(now=100) == ("a", "b", "c")
    assert isinstance(node.receive("d", 1, [], now=100), CommandsAccepted)


@pytest.mark.conforms("X4")
def test_the_keys_of_all_are_bounded_by_their_bytes() -> None:
    node = NodeSideMachine(INCARNATION, SubscriberLimits(key_bytes=10), channels=CHANNELS)
    subscribed(node, "a", ("logs", "123456"), ("logs", "123456"), ("logs", None))
    (problem,) = refused(node, "b", 1, *on("logs", ("12345", "1234")))
    assert "10 bytes" in problem
    assert node.subscriptions("b") == {"logs": {"1234": None}}
    assert node.receive("a", 2, [Unsubscribe("logs", "123456"), Unsubscribe("logs", "never")], now=0)
    assert refused(node, "b", 2, Subscribe("logs", "123456")) == []
    node.expire(now=100)
    assert node.find_leaks() == ()
    subscribed(node, "c", ("logs", "1234567890"))


@pytest.mark.conforms("X4")
def test_keys_of_a_principal_are_bounded() -> None:
    """With all its ids it has as many bytes as are left free; other principals have theirs."""
    node = NodeSideMachine(INCARNATION, SubscriberLimits(key_bytes=12), channels=CHANNELS)

    def subscribe(name: str, number: int, key: str, principal: str | None) -> int:
        return len(refused(node, name, number, Subscribe("logs", key), principal=principal))

    assert [subscribe(name, 1, "123", "user:a") for name in ("a", "b", "c")] == [0, 0, 1]
    assert [subscribe("d", 1, "123", "user:b"), subscribe("e", 1, "1234", None)] == [0, 1]
    assert isinstance(node.receive("a", 2, [Unsubscribe("logs", "123")], 0, "user:a"), CommandsAccepted)
    assert [subscribe("c", 2, "1", "user:a"), subscribe("e", 2, "123", None)] == [0, 0]
    assert [subscribe("c", 3, "1", "user:a"), subscribe("c", 4, "2", "user:a")] == [0, 1], "it has that key"
    assert refused(node, "c", 5, Subscribe("logs", None), principal="user:a") == []
    assert node.find_leaks() == ()
    node.expire(now=100)
    assert node.find_leaks() == ()
    assert subscribe("f", 1, "123456", "user:a") == 0


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(("channel", "limit"), [("logs", 2), ("price", 3)])
@pytest.mark.parametrize("key", ["k", None])
def test_so_many_ids_of_a_principal_are_on_a_key(channel: str, limit: int, key: str | None) -> None:
    """What is published is queued for each of them. Other principals have as many; where it is unknown, all may."""
    settings = SubscriberLimits(watchers_of_principal=2, followers_of_principal=3)
    node = NodeSideMachine(INCARNATION, settings, channels=CHANNELS)

    def subscribe(name: str, *keys: str | None, number: int = 1, principal: str | None = "user:a") -> list[str]:
        return refused(node, name, number, *on(channel, keys), principal=principal)

    names = [f"a{number}" for number in range(5)]
    problems = [subscribe(name, key, "other" + name, key) for name in names]
    assert [len(each) for each in problems] == limit * [0] + (5 - limit) * [2]
    rule = f"{limit} subscriber ids of this principal have subscribed to {repr(key) if key else 'all keys'} of channel"
    assert rule in problems[-1][0]
    assert node.publish(channel, "k", "body", 1) == limit
    assert [subscribe(f"b{number}", key, principal="user:b") for number in range(limit)] == limit * [[]]
    assert len(subscribe("b", key, principal="user:b")) == 1
    assert [subscribe(f"c{number}", key, principal=None) for number in range(5)] == 5 * [[]]
    assert node.publish(channel, "k", "body", 2) == 2 * limit + 5
    node.receive("a0", 2, [Unsubscribe(channel, key)], 0, "user:a")
    assert [subscribe(names[-1], key, number=2), len(subscribe("a0", key, number=3))] == [[], 1]
    node.expel(names[-1])
    assert subscribe("a0", key, number=4) == []
    assert node.find_leaks() == ()


@pytest.mark.conforms("X4")
def test_a_principal_watches_so_many_groups() -> None:
    """With all its ids: each is checked again when a rule changes. Where it is unknown, all may."""
    channels = {"group": ChannelKind.LOG, "chat": ChannelKind.LOG}
    node = NodeSideMachine(INCARNATION, SubscriberLimits(watches_of_principal=3), channels=channels)

    def subscribe(name: str, number: int, *keys: str | None, principal: str | None = "user:a") -> list[str]:
        return refused(node, name, number, *on("group", keys), principal=principal)

    assert subscribe("a", 1, "k", "k", "l") == []
    assert "this principal has 3 subscriptions to channel group at this node" in subscribe("b", 1, None, "k", "l")[0]
    assert node.receive("b", 2, [Subscribe("chat", "k")], 0, "user:a") == CommandsAccepted((), ())
    assert [len(subscribe("c", 1, *"klmn", principal="user:c")), subscribe("d", 1, *"klmn", principal=None)] == [1, []]
    assert node.find_leaks() == ()
    node.receive("a", 2, [Unsubscribe("group", "k"), Unsubscribe("group", "never")], 0, "user:a")
    assert [len(subscribe("b", 3, "k", "l"))] == [1]
    node.expel("b")
    assert [len(subscribe("a", 3, *"mno"))] == [1]
    assert node.find_leaks() == ()


@pytest.mark.conforms("X4")
def test_the_silent_are_dropped_some_at_a_time() -> None:
    """However many subscriptions they have; the others are due at once."""
    node = NodeSideMachine(INCARNATION, channels=CHANNELS)
    for name in "abcd":
        assert refused(node, name, 1, *on("logs", map(str, range(MAX_EXPIRED_SUBSCRIPTIONS // 2)))) == []
    assert [node.expire(now=100) for _ in range(3)] == [("a", "b"), ("c", "d"), ()]
    assert refused(node, "e", 1, *on("logs", map(str, range(2 * MAX_EXPIRED_SUBSCRIPTIONS)))) == []
    subscribed(node, "f")
    assert [node.expire(now=100), node.wake_at, node.expire(now=100)] == [("e",), 15, ("f",)]
    assert node.find_leaks() == ()


@pytest.mark.conforms("X4", "R10")
def test_a_principal_leaves_so_much_unread() -> None:
    """At all its ids together: from half of it on no new batch is executed, and what is beyond it is a gap."""
    settings = SubscriberLimits(unread_bytes_of_principal=3 * 1_000 + 6 * MESSAGE_BYTES)
    node = NodeSideMachine(INCARNATION, settings, channels=CHANNELS, size_of=lambda body: len(str(body)))
    for name, principal in {"a": "user:etl", "b": "user:etl", "c": "user:other", "d": None}.items():
        assert node.receive(name, 1, [], 0, principal) == CommandsAccepted((), ())
    for name in "acd":
        node.send(name, "logs", "", "1" * 1_000)
    assert node.admit_batch("a", 2, "user:etl") is None
    for name in "ad":
        node.send(name, "logs", "", "2" * 1_000)
    problem = node.admit_batch("new", 1, "user:etl")
    assert isinstance(problem, SubscriberRefused)
    assert f"user:etl leaves {2 * (1_000 + MESSAGE_BYTES)} bytes unread" in problem.reason
    assert node.admit_batch("a", 1, "user:etl") is None, "it was executed, and is answered again"
    assert node.admit_batch("c", 2, "user:other") is node.admit_batch("d", 2, None) is None
    for name, text in (("b", "3"), ("b", "4"), ("c", "3"), ("d", "3")):
        node.send(name, "logs", "", text * 1_000)
    assert node.find_leaks() == ()
    assert [len(taken(node, name)) for name in ("a", "c", "d")] == [2, 2, 3]
    assert bodies(taken(node, "b")) == [MailboxOverflow(2, ("logs",))]
    taken(node, "a", acknowledged=2)
    assert node.admit_batch("new", 1, "user:etl") is None
    node.expire(now=1e9)
    subscribed(node, "e", ("logs", None))
    assert node.find_leaks() == ()


@pytest.mark.conforms("X4")
def test_errors_count_until_the_next_batch() -> None:
    """A text is counted as Python stores it: four bytes a character, if one of them is an emoji."""
    node = NodeSideMachine(INCARNATION, SubscriberLimits(unread_bytes_of_principal=8_000), channels=CHANNELS)
    node.receive("a", 1, [UndecodableCommand("x" * 899 + "\U0001f600")], 0, "user:etl")
    assert node.admit_batch("b", 1, "user:etl") is None
    node.add_errors("a", 1, [CommandRefusal(1, "x" * 400)])
    assert node.find_leaks() == ()
    assert isinstance(node.admit_batch("b", 1, "user:etl"), SubscriberRefused)
    assert node.admit_batch("a", 2, "user:etl") is None, "who sends the next batch has the errors of this one"
    assert node.admit_batch("b", 1, "user:etl") is None
    assert node.find_leaks() == ()


@pytest.mark.conforms("X4")
def test_an_agent_has_one_life_at_a_time() -> None:
    """A later life takes the place of the one before, whose subscriptions do not count any more."""
    node = publisher()
    for name in ("agent.9", "agent.10"):
        assert refused(node, name, 1, *on("logs", "01234")) == []
    assert set(node.subscriber_ids) == {"agent.10"}
    assert isinstance(node.receive("agent.9", 2, [], now=0), UnknownSubscriber)
    for late in ("agent.8", "agent.010"):
        assert isinstance(node.receive(late, 1, [], now=0), UnknownSubscriber), "however late it comes"
    subscribed(node, "other.1")
    assert set(node.subscriber_ids) == {"agent.10", "other.1"}
    assert node.expire(now=0) == ("agent.9",)


@pytest.mark.conforms("R4")
def test_poll_before_command_and_command_before_poll() -> None:
    node = publisher()
    assert node.poll("early", 0, "", now=10, hold_s=60) == HoldPoll(hold_until=15)
    subscribed(node, "early", ("logs", None))
    subscribed(node, "late", ("logs", None))
    ready: list[str] = []
    node.on_ready = ready.append
    node.publish("logs", "k", "x")
    assert ready == ["early", "late"]
    assert node.end_poll("early", now=11) == node.poll("late", 0, "", now=11, hold_s=5)


@pytest.mark.conforms("R6")
def test_another_incarnation_is_unknown_at_once() -> None:
    node = publisher("a")
    assert isinstance(node.poll("a", 0, "node-0", now=0, hold_s=5), UnknownSubscriber)
    assert list(node.subscriber_ids) == ["a"]
    assert isinstance(node.poll("a", 5, INCARNATION, now=0, hold_s=5), UnknownSubscriber)
    assert node.subscriber_ids == (), "it acknowledges what was never sent"


@pytest.mark.conforms("R7", "R8")
def test_the_forgotten_are_notified_and_never_revived() -> None:
    node = publisher("a")
    node.poll("a", 0, INCARNATION, now=1, hold_s=5)
    assert node.wake_at == 16
    assert node.expire(now=15.9) == ()
    assert node.expire(now=16) == ("a",)
    assert isinstance(node.poll("a", 0, INCARNATION, now=17, hold_s=5), UnknownSubscriber)
    assert isinstance(node.poll("a", 0, "", now=17, hold_s=5), UnknownSubscriber)
    assert isinstance(node.receive("a", 1, [], now=17), UnknownSubscriber)
    assert isinstance(node.end_poll("a", now=17), UnknownSubscriber)
    assert isinstance(node.poll("b", 0, INCARNATION, now=17, hold_s=5), UnknownSubscriber)
    assert isinstance(node.poll("b", 7, "", now=17, hold_s=5), UnknownSubscriber)
    assert node.expire(now=17) == (), "who was unknown has not gone"


@pytest.mark.conforms("R8")
def test_the_silent_go_and_the_quiet_stay() -> None:
    node = publisher()
    subscribed(node, "dead", ("logs", None), ("price", "gold"))
    subscribed(node, "quiet", ("logs", "k"))
    for now in range(0, 100, 5):
        node.poll("quiet", 0, INCARNATION, now, hold_s=5)
        node.end_poll("quiet", now + 5)
        node.expire(now + 5)
    assert node.subscriber_ids == ("quiet",)
    assert [node.publish(*each, "x") for each in (("logs", "k"), ("logs", "l"), ("price", "gold"))] == [1, 0, 0]


@pytest.mark.conforms("R8")
def test_nothing_is_stored_of_who_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    node = publisher()
    for name in ("a", "b"):
        subscribed(node, name, ("logs", "k"), ("logs", None), ("price", "gold"))
    node.publish("logs", "k", "m")
    node.publish("price", "gold", "g", 1)
    node.send("a", "logs", "k", "once")
    assert node.find_leaks() == ()
    node.receive("a", 2, [Unsubscribe("logs", "k"), Unsubscribe("logs", "never")], 0.0)
    node.poll("a", 0, INCARNATION, 0.0, 5.0)
    assert node.find_leaks() == ()
    node.poll("a", 99, INCARNATION, 0.0, 5.0)  # breaks a rule
    assert node.find_leaks() == ()
    monkeypatch.setattr(SubscriptionIndex, "remove", lambda *_: False)
    assert node.expire(1e9) == ("b", "a"), "whoever stores names of them is notified of both"
    assert len(node.find_leaks()) == 3, "had nobody removed what b subscribed to"
    monkeypatch.undo()
    assert node.expire(1e9) == ()


def test_a_node_counts_what_happens() -> None:
    node = publisher(messages=2)
    batch = Subscribe("logs", None), UndecodableCommand("broken"), MessageToNode("owner refuses it")
    node.receive("a", 1, batch, 0)
    node.add_errors("a", 1, [CommandRefusal(2, "no")])
    node.receive("a", 1, batch, 0)
    node.poll("a", 0, INCARNATION, 0, 5)
    node.end_poll("a", 5)  # the hold is over, and nothing came
    for _ in range(4):
        node.publish("logs", "k", "m")
    node.poll("a", 0, INCARNATION, 5, 5)  # a gap of 3 and a message
    node.poll("a", 0, INCARNATION, 5, 5)  # the reply was lost: both again
    node.poll("a", 1, INCARNATION, 5, 5)
    node.poll("b", 0, "", 5, 5)
    node.poll("b", 9, INCARNATION, 5, 5)  # breaks a rule
    node.poll("c", 7, INCARNATION, 5, 5)  # never known
    node.poll("a", 2, "node-0", 5, 5)  # meant for another life
    node.expire(100)
    assert node.counters == NodeSideCounters(
        batches=1,
        duplicate_batches=1,
        commands=3,
        rejected_commands=2,
        polls=8,
        empty_polls=1,
        deliveries=2,
        redeliveries=3,
        gaps=1,
        dropped=3,
        incarnations=2,
        expired=1,
        expelled=1,
        unknown_subscriber_replies=3,
    )


# --- who learns what is subscribed to ---------------------------------------------------------------------------------


GOLD = Subscribe("price", "gold")


def interested() -> tuple[NodeSideMachine, list[tuple[str, str | None, bool]]]:
    """Return a node, and what its owner is notified of."""
    node, notified = publisher(), list[tuple[str, str | None, bool]]()
    node.on_interest = lambda *interest: notified.append(interest)
    return node, notified


@pytest.mark.conforms("R3")
def test_only_first_and_last_subscriber_are_reported() -> None:
    """All keys are apart from a key, and so are other channels."""
    node, notified = interested()
    for name in "abc":
        assert refused(node, name, 1, GOLD, GOLD) == []
    for name in "bac":
        assert notified == [("price", "gold", True)]
        assert refused(node, name, 2, *[Unsubscribe("price", "gold")] * 2) == []
    assert notified == [("price", "gold", True), ("price", "gold", False)]
    assert refused(node, "a", 3, Subscribe("price", None), Subscribe("logs", "gold"), Subscribe("price", "tin")) == []
    assert notified[2:] == [("price", None, True), ("logs", "gold", True), ("price", "tin", True)]
    assert refused(node, "a", 4, Unsubscribe("price", None)) == []
    assert notified[5:] == [("price", None, False)]


@pytest.mark.conforms("R8")
def test_the_interest_of_the_silent_ends_with_them() -> None:
    node, notified = interested()
    node.receive("dead", 1, [GOLD, Subscribe("price", "tin")], 0)
    node.receive("alive", 1, [Subscribe("price", "tin")], 10)
    assert node.expire(16.0) == ("dead",)
    assert notified[2:] == [("price", "gold", False)]


def test_what_interest_publishes_is_delivered() -> None:
    node, _ = interested()
    ignore = node.on_interest

    def publish(channel: str, key: str | None, wanted: bool) -> None:
        assert key is not None
        if wanted:
            node.publish(channel, key, "fetched", 1)
        else:
            node.clear_state(channel, key)

    node.on_interest = publish
    assert refused(node, "a", 1, GOLD) == []
    assert bodies(taken(node, "a")) == ["fetched"]
    assert refused(node, "a", 2, Unsubscribe("price", "gold")) == []
    node.on_interest = ignore
    assert refused(node, "b", 1, GOLD) == []
    assert node.end_poll("b", 0.0) == PollReply(())
