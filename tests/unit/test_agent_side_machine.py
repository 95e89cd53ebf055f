"""The agent's half of the session: events in, instructions out."""

from __future__ import annotations

from typing import TypeVar

import pytest

from sublet_protocol.pubsub.agent_side_events import (
    CallPoll,
    CancelCommandsCall,
    CancelPollCall,
    CommandsReplied,
    CommandsUnanswered,
    ConnectionLostReason,
    ConnectionRejected,
    ConnectionStatus,
    Deliver,
    Event,
    Instruction,
    PollReplied,
    PollUnanswered,
    ReportConnectionLost,
    ReportConnectionStillLost,
    ReportRejectedCommands,
    SendCommands,
)
from sublet_protocol.pubsub.agent_side_machine import AgentConnectionSettings, AgentSideMachine
from sublet_protocol.pubsub.counters import AgentSideCounters
from sublet_protocol.pubsub.model import (
    ChannelKind,
    CommandRefusal,
    MailboxOverflow,
    MessageToNode,
    SequencedMessage,
    Subscribe,
    Unsubscribe,
)
from sublet_protocol.tick import Tick

I = TypeVar("I", bound=Instruction)  # noqa: E741

CHANNELS = {"logs": ChannelKind.LOG, "price": ChannelKind.STATE}
SETTINGS = AgentConnectionSettings(
    hold_s=5, retry_s=1, max_retry_s=4, batch_commands=3, batch_bytes=100, queued_commands=20
)


class Harness:
    """A machine with its clock, and all it ever said."""

    def __init__(self) -> None:
        self.machine = AgentSideMachine("agent", SETTINGS, channels=CHANNELS, size_of=lambda command: (10, 1))
        self.now = 0.0
        self.wake_at: float | None = None
        self.said: list[Instruction] = []

    def do(self, *events: Event) -> list[Instruction]:
        """Take in events; what the last one caused."""
        sends: list[Instruction] = []
        for event in events:
            outcome = self.machine.decide(event, self.now)
            sends, self.wake_at = list(outcome.sends), outcome.wake_at
            self.said += sends
        return sends

    def wait(self) -> list[Instruction]:
        assert self.wake_at is not None
        self.now = self.wake_at
        return self.do(Tick())

    def last(self, kind: type[I]) -> I:
        return next(one for one in reversed(self.said) if isinstance(one, kind))

    def all(self, kind: type[I]) -> list[I]:
        return [one for one in self.said if isinstance(one, kind)]

    def batch_ok(self, incarnation: str = "n1", errors: tuple[CommandRefusal, ...] = ()) -> list[Instruction]:
        batch = self.last(SendCommands)
        return self.do(CommandsReplied(batch.subscriber_incarnation, batch.number, incarnation, errors=errors))

    def poll_ok(
        self, *deliveries: SequencedMessage, incarnation: str = "n1", unknown: bool = False
    ) -> list[Instruction]:
        return self.do(PollReplied(self.last(CallPoll).subscriber_incarnation, incarnation, unknown, deliveries))

    def poll_fails(self, jitter: float = 0.0) -> list[Instruction]:
        return self.do(PollUnanswered(self.last(CallPoll).subscriber_incarnation, "refused", jitter))

    def lose(self) -> list[Instruction]:
        """Let two polls fail, one after the other."""
        self.poll_fails()
        return self.poll_fails()

    def losses(self) -> list[ConnectionLostReason]:
        return [one.reason for one in self.all(ReportConnectionLost)]

    def batch_fails(self) -> list[Instruction]:
        return self.do(CommandsUnanswered(self.last(SendCommands).subscriber_incarnation, "refused"))


def connected(*subjects: tuple[str, str | None]) -> Harness:
    harness = Harness()
    harness.do(*(Subscribe(*subject) for subject in subjects or (("logs", "k"),)))
    answered = 0
    while len(harness.all(SendCommands)) > answered:
        harness.batch_ok()
        answered += 1
    assert harness.machine.status is ConnectionStatus.CONNECTED
    assert harness.machine.find_leaks() == ()
    return harness


def message(sequence: int, predecessor: int) -> SequencedMessage:
    return SequencedMessage(sequence, "logs", "k", f"m{sequence}", predecessor)


@pytest.mark.conforms("R1")
def test_ten_thousand_subscriptions_hold_one_poll() -> None:
    harness = Harness()
    for number in range(10_000):
        harness.do(Subscribe("logs", str(number)))
    assert len(harness.all(CallPoll)) == 1


@pytest.mark.conforms("R2")
def test_one_batch_in_flight_and_commands_in_order() -> None:
    harness = Harness()
    commands: list[Event] = [Subscribe("logs", "a"), Unsubscribe("logs", "a"), Subscribe("logs", "a")]
    commands += [MessageToNode(number) for number in (1, 2, 3)]
    harness.do(*commands)
    assert harness.wake_at is None, "nothing was put off"
    assert [batch.commands for batch in harness.all(SendCommands)] == [(commands[0],)]
    for _ in range(3):
        harness.batch_ok()
    batches = harness.all(SendCommands)
    assert [(batch.number, len(batch.commands)) for batch in batches] == [(1, 1), (2, 3), (3, 2)]
    assert [command for batch in batches for command in batch.commands] == commands
    assert harness.machine.unacknowledged_count == 0


@pytest.mark.conforms("R2")
def test_a_failed_batch_is_repeated_unchanged() -> None:
    harness = Harness()
    harness.do(Subscribe("logs", "a"))
    first = harness.last(SendCommands)
    harness.do(MessageToNode("later"))
    assert harness.batch_fails() == [first]
    assert harness.batch_ok()
    again = harness.last(SendCommands)
    assert harness.batch_fails() == [], "not at once in a loop"
    assert harness.wait() == [again]


def test_a_poll_is_held_for_answers_to_a_message() -> None:
    """From the first message on, also without a subscription."""
    harness = Harness()
    assert [type(one) for one in harness.do(MessageToNode("m"))] == [SendCommands, CallPoll]
    harness.batch_ok()
    assert harness.machine.status is ConnectionStatus.CONNECTED


def test_a_life_ends_in_peace_when_nothing_is_wanted() -> None:
    harness = connected(("logs", "k"))
    old = harness.machine.subscriber_id
    assert CancelPollCall() in harness.do(Unsubscribe("logs", "k"))
    assert harness.do(Tick()) == []
    harness.batch_ok()
    assert harness.do(ConnectionRejected(harness.last(SendCommands).subscriber_incarnation, "late")) == []
    assert harness.machine.status is ConnectionStatus.IDLE
    harness.do(Subscribe("logs", "k"))
    assert harness.last(SendCommands).number == 1
    assert harness.last(SendCommands).subscriber_id != old
    assert not harness.all(ReportConnectionLost)


@pytest.mark.conforms("R5")
def test_deliveries_are_seen_once_and_acknowledged() -> None:
    harness = connected()
    one, two = message(1, 0), message(2, 1)
    assert harness.poll_ok(one)[0] == Deliver((one,))
    assert (harness.last(CallPoll).acknowledged, harness.last(CallPoll).node_incarnation) == (1, "n1")
    assert harness.poll_ok(one, two)[0] == Deliver((two,))
    assert [type(one) for one in harness.poll_ok(one, two)] == [CallPoll]
    assert harness.last(CallPoll).acknowledged == 2


@pytest.mark.conforms("R6")
def test_another_incarnation_ends_the_life() -> None:
    """Subscriptions are declared again."""
    harness = connected(("logs", "k"), ("price", None))
    harness.poll_ok(message(1, 0))
    old = harness.machine.subscriber_id
    sends = harness.poll_ok(incarnation="n2", unknown=True)
    assert [type(one) for one in sends] == [ReportConnectionLost, SendCommands, CallPoll]
    lost, batch, poll = harness.last(ReportConnectionLost), harness.last(SendCommands), harness.last(CallPoll)
    assert (lost.reason, lost.subscriptions) == (ConnectionLostReason.RESTARTED, (("logs", "k"), ("price", None)))
    assert batch.subscriber_id != old
    assert batch.commands == (Subscribe("logs", "k"), Subscribe("price", None))
    assert (poll.acknowledged, poll.node_incarnation) == (0, "")
    harness.batch_ok(incarnation="n2")
    assert harness.machine.status is ConnectionStatus.CONNECTED


@pytest.mark.conforms("R7")
def test_unknown_subscriber_ends_the_life() -> None:
    """Messages are dropped, and subscriptions declared again."""
    harness = connected()
    harness.do(MessageToNode("in flight"), MessageToNode("queued"))
    cancelled, lost = harness.poll_ok(unknown=True)[:2]
    assert cancelled == CancelCommandsCall()
    detail = "the node does not know agent.1"
    assert lost == ReportConnectionLost(ConnectionLostReason.EXPIRED, detail, (("logs", "k"),))
    assert harness.machine.unacknowledged_count == 0
    assert harness.last(SendCommands).subscriber_id == "agent.2"
    assert harness.last(SendCommands).commands == (Subscribe("logs", "k"),)


@pytest.mark.conforms("R7")
def test_unknown_again_and_again_is_slowed_down() -> None:
    harness = connected()
    harness.poll_ok(unknown=True)
    harness.poll_ok(unknown=True)
    waits = []
    for _ in range(4):
        before = harness.now
        harness.wait()
        waits.append(harness.now - before)
        harness.poll_ok(unknown=True)
    assert waits == [1, 2, 4, 4]
    assert len(harness.all(ReportConnectionLost)) == 2  # the life that was good, and the first that never was


@pytest.mark.conforms("R9")
def test_a_killed_node_is_reported_once() -> None:
    harness = connected(("logs", "k"), ("logs", None))
    harness.poll_fails()
    assert harness.last(CallPoll).hold_s == 0, "in doubt: ask, do not wait"
    lost = ReportConnectionLost(ConnectionLostReason.UNREACHABLE, "refused", (("logs", "k"), ("logs", None)))
    assert harness.poll_fails()[0] == lost
    for _ in range(5):
        harness.wait()
        harness.poll_fails()
    assert len(harness.all(ReportConnectionLost)) == 1
    harness.wait()
    harness.poll_ok(incarnation="n2")
    harness.batch_ok(incarnation="n2")
    assert harness.machine.status is ConnectionStatus.CONNECTED
    assert len(harness.all(ReportConnectionLost)) == 1
    assert harness.last(SendCommands).commands == (Subscribe("logs", "k"), Subscribe("logs", None))


def test_one_failed_poll_is_no_loss() -> None:
    harness = connected()
    harness.poll_fails()
    for _ in range(5):
        harness.poll_ok()
        assert harness.poll_fails() == [], "not at once in a loop"
        failed_at = harness.now
        harness.wait()
    harness.poll_ok()
    harness.now = failed_at + SETTINGS.max_retry_s
    assert [type(one) for one in harness.poll_fails()] == [CallPoll]
    assert not harness.all(ReportConnectionLost)


def test_a_poll_that_was_cancelled_fails_no_more() -> None:
    harness = connected()
    harness.poll_fails()
    harness.do(Unsubscribe("logs", "k"))
    assert harness.all(CancelPollCall)
    harness.poll_fails()
    assert not harness.all(ReportConnectionLost)


def test_answers_of_a_former_life_do_nothing() -> None:
    """Nor those to another batch."""
    harness = connected()
    harness.do(MessageToNode("x"))
    poll, batch = harness.last(CallPoll), harness.last(SendCommands)
    harness.do(CommandsReplied(batch.subscriber_incarnation, batch.number - 1, "n1"))
    assert harness.machine.unacknowledged_count == 1
    harness.poll_ok(unknown=True)
    for late in (
        PollReplied(poll.subscriber_incarnation, "n1", False, (message(1, 0),)),
        PollUnanswered(poll.subscriber_incarnation, "late"),
        CommandsReplied(batch.subscriber_incarnation, batch.number, "n1"),
        CommandsUnanswered(batch.subscriber_incarnation, "late"),
        ConnectionRejected(poll.subscriber_incarnation, "late"),
    ):
        assert harness.do(late) == []


@pytest.mark.conforms("P2", "R10")
@pytest.mark.parametrize(
    ("deliveries", "lost"),
    [
        ((message(1, 0), SequencedMessage(2, "", "", MailboxOverflow(5, ("logs",))), message(3, 2)), []),
        (tuple(SequencedMessage(number, "price", "gold", "g", version=number) for number in (7, 9)), []),
        ((message(3, 2),), [ConnectionLostReason.INCONSISTENT]),
    ],
    ids=["a gap", "a state, which needs no predecessor", "a missing message"],
)
def test_only_a_gap_stands_for_what_is_missing(
    deliveries: tuple[SequencedMessage, ...], lost: list[ConnectionLostReason]
) -> None:
    """A message that is missing without one ends the life."""
    harness = connected(("logs", "k"), ("price", "gold"))
    harness.poll_ok(*deliveries)
    assert harness.losses() == lost
    assert harness.all(Deliver) == ([] if lost else [Deliver(deliveries)])


@pytest.mark.conforms("R11")
def test_a_refused_subscription_is_not_declared_again() -> None:
    """A refusal of what was not sent is none."""
    harness = connected()
    bad = Subscribe("logs", "bad")
    harness.do(bad)
    errors = (CommandRefusal(0, "no such key"), CommandRefusal(1, "never sent"))
    assert harness.batch_ok(errors=errors)[0] == ReportRejectedCommands(((bad, "no such key"),))
    harness.poll_ok(unknown=True)
    assert harness.last(SendCommands).commands == (Subscribe("logs", "k"),)


@pytest.mark.conforms("X4")
def test_the_queue_is_bounded() -> None:
    """Beside one command of each subscription, and the batch that is under way."""
    harness = connected()
    harness.do(*(MessageToNode(number) for number in range(SETTINGS.queued_commands + 2)))
    assert harness.losses() == []
    harness.do(MessageToNode("one more"))
    assert harness.losses() == [ConnectionLostReason.OVERFLOW]


@pytest.mark.parametrize("size", [(50, 1), (1, 50)], ids=["bytes", "items"])
def test_a_batch_is_bounded_by(size: tuple[int, int]) -> None:
    settings = AgentConnectionSettings(batch_bytes=100, batch_items=100)
    machine = AgentSideMachine("agent", settings, size_of=lambda command: size)
    machine.decide(MessageToNode(0), 0)
    for number in range(1, 6):
        machine.decide(MessageToNode(number), 0)
    outcome = machine.decide(CommandsReplied(1, 1, "n1"), 0)
    assert outcome.sends == (SendCommands("agent.1", 1, 2, (MessageToNode(1), MessageToNode(2))),)


@pytest.mark.conforms("R9")
def test_who_subscribes_to_a_lost_node_learns_it_once() -> None:
    harness = connected(("logs", "k"))
    harness.lose()
    assert harness.machine.status is ConnectionStatus.DISCONNECTED
    harness.do(Subscribe("logs", "late"), Subscribe("logs", None), Subscribe("logs", "k"), Unsubscribe("logs", None))
    assert harness.machine.find_leaks() == ()
    for _ in range(3):
        harness.wait()
        harness.poll_fails()
    assert [one.lost.subscriptions for one in harness.all(ReportConnectionStillLost)] == [(("logs", "late"),)]
    assert len(harness.all(ReportConnectionLost)) == 1
    harness.do(Subscribe("logs", "in time"))
    harness.wait()
    harness.poll_ok()
    assert harness.machine.find_leaks() == ()
    harness.lose()
    everything = {("logs", "k"), ("logs", "late"), ("logs", "in time")}
    assert set(harness.all(ReportConnectionLost)[-1].subscriptions) == everything
    assert len(harness.all(ReportConnectionStillLost)) == 1


@pytest.mark.conforms("R9")
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_peer_that_refuses_us_is_not_asked_again(is_lost: bool) -> None:
    """That final loss is reported also after a loss."""
    harness = connected(("logs", "k"))
    if is_lost:
        harness.lose()
        harness.wait()
    harness.do(ConnectionRejected(harness.last(CallPoll).subscriber_incarnation, "version 2"))
    assert harness.losses() == [ConnectionLostReason.UNREACHABLE] * is_lost + [ConnectionLostReason.REJECTED]
    assert [one.is_final for one in harness.all(ReportConnectionLost)] == [False] * is_lost + [True]
    assert (harness.machine.find_leaks(), harness.do(MessageToNode("y"), Tick()), harness.wake_at) == ((), [], None)
    lost = ReportConnectionLost(ConnectionLostReason.REJECTED, "version 2", (("logs", "x"),))
    assert harness.do(Subscribe("logs", "x")) == [ReportConnectionStillLost(lost)]


@pytest.mark.conforms("R2")
def test_a_subscription_asked_for_again_is_wanted() -> None:
    """Though it was refused before."""
    harness = connected(("logs", "k"))
    harness.do(MessageToNode("busy"), Subscribe("logs", "x"), Unsubscribe("logs", "y"), Subscribe("logs", "z"))
    harness.batch_ok()
    harness.do(Unsubscribe("logs", "x"), Subscribe("logs", "x"))
    harness.batch_ok(errors=(CommandRefusal(0, "too many"), CommandRefusal(2, "too many")))
    assert harness.machine.is_subscribed("logs", "x")
    assert not harness.machine.is_subscribed("logs", "z")
    harness.batch_ok()
    harness.poll_ok(unknown=True)
    assert harness.last(SendCommands).commands == (Subscribe("logs", "k"), Subscribe("logs", "x"))


def test_an_agent_at_rest_keeps_nothing() -> None:
    harness = Harness()
    harness.do(Subscribe("logs", "k"), Subscribe("logs", "x"))
    assert harness.machine.find_leaks() == ()
    harness.machine.status = ConnectionStatus.IDLE
    assert len(harness.machine.find_leaks()) == 3, "had it come to rest with all that"
    harness.machine.status = ConnectionStatus.CONNECTING
    harness.do(Unsubscribe("logs", "k"), Unsubscribe("logs", "x"))
    harness.batch_ok()
    harness.batch_ok()
    assert harness.machine.status is ConnectionStatus.IDLE
    assert harness.machine.find_leaks() == ()
    harness.do(Subscribe("logs", "k"), ConnectionRejected(2, "version"))
    assert harness.all(ReportConnectionLost)[-1].is_final
    assert harness.machine.find_leaks() == ()


def test_jitter_spreads_retries_returns_and_holds() -> None:
    """But never the next poll."""
    harness = connected()
    life = harness.last(CallPoll).subscriber_incarnation
    for delivered, jitter, hold_s in (((), 0.5, 4.5), ((message(1, 0),), 0.25, 4.75)):
        sends = harness.do(PollReplied(life, "n1", deliveries=delivered, jitter=jitter))
        assert [one.hold_s for one in sends if isinstance(one, CallPoll)] == [hold_s]
    harness.poll_fails(jitter=0.5)
    sends = harness.do(PollReplied(life, "n2", is_unknown=True, jitter=0.5))
    assert [type(one) for one in sends] == [ReportConnectionLost]
    assert harness.wake_at == harness.now + SETTINGS.spread_s / 2
    assert [type(one) for one in harness.wait()] == [SendCommands, CallPoll]


def test_jitter_spreads_the_way_back_to_a_lost_node() -> None:
    harness = connected()
    harness.poll_fails(jitter=0.5)
    for delay_s in (1, 2, 4, 4):
        harness.poll_fails(jitter=0.5)
        assert harness.wake_at == harness.now + 1.5 * delay_s
        harness.wait()


def test_an_agent_counts_what_happens() -> None:
    agent = AgentSideMachine("agent", AgentConnectionSettings(batch_commands=2), channels=CHANNELS)
    assert agent.counters == AgentSideCounters(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, {})
    for number in range(3):
        agent.decide(Subscribe("logs", str(number)), 0)
    agent.decide(CommandsReplied(1, 1, "n1", errors=(CommandRefusal(0, "no"),)), 0)
    outcome = agent.decide(CommandsUnanswered(1, "lost"), 0)
    assert [one.number for one in outcome.sends if isinstance(one, SendCommands)] == [2]
    agent.decide(PollReplied(1, "n1"), 1)
    one, gap = SequencedMessage(1, "logs", "1", "m"), SequencedMessage(2, "", "", MailboxOverflow(7, ("logs",)))
    agent.decide(PollReplied(1, "n1", deliveries=(one,)), 1)
    agent.decide(PollReplied(1, "n1", deliveries=(one, gap)), 1)
    outcome = agent.decide(PollReplied(1, "n2", is_unknown=True), 1)
    assert [one.subscriber_incarnation for one in outcome.sends if isinstance(one, CallPoll)] == [2]
    agent.decide(PollReplied(2, "n2", is_unknown=True), 1)
    assert agent.counters == AgentSideCounters(
        batches=3, duplicate_batches=1, commands=5, rejected_commands=1, polls=5, empty_polls=1, deliveries=2,
        redeliveries=1, gaps=1, incarnations=3,
        connections_lost={ConnectionLostReason.RESTARTED: 1, ConnectionLostReason.EXPIRED: 1},
    )  # fmt: skip
