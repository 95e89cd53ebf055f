"""Hundreds of agents of one node: what happens to all at once does not bring them back at once."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from sublet_protocol.pubsub.agent_side_events import (
    CallPoll,
    CommandsReplied,
    CommandsUnanswered,
    Event,
    PollReplied,
    PollUnanswered,
    SendCommands,
    Tick,
)
from sublet_protocol.pubsub.agent_side_machine import AgentSideMachine, AgentSideSettings
from sublet_protocol.pubsub.model import Subscribe

AGENTS = 300
SLICE_S = 0.05
"""What counts as one instant."""


class Herd:
    """The agents, and a node that answers all in the same way; `calls`: (time, kind) of each call made to it."""

    def __init__(self, spread: bool) -> None:
        self.random = random.Random(7)
        self.spread = spread
        self.now = 0.0
        self.agents = [AgentSideMachine(f"agent-{number}", AgentSideSettings()) for number in range(AGENTS)]
        self.calls: list[tuple[float, CallPoll | SendCommands]] = []
        self.polls: dict[int, CallPoll] = {}
        self.batches: dict[int, SendCommands] = {}
        self.wakes: list[tuple[float, int, int]] = []
        self._numbers = itertools.count()

    def decide(self, number: int, event: Event) -> None:
        outcome = self.agents[number].decide(event, self.now)
        for one in outcome.sends:
            if isinstance(one, CallPoll):
                self.polls[number] = one
            elif isinstance(one, SendCommands):
                self.batches[number] = one
            else:
                continue
            self.calls.append((self.now, one))
        if outcome.wake_at is not None:
            heapq.heappush(self.wakes, (outcome.wake_at, next(self._numbers), number))

    def jitter(self) -> float:
        return self.random.random() if self.spread else 0.0

    def answer_batches(self, incarnation: str) -> None:
        for number, batch in tuple(self.batches.items()):
            del self.batches[number]
            self.decide(
                number, CommandsReplied(batch.subscriber_incarnation, batch.number, incarnation, jitter=self.jitter())
            )

    def end_polls(self, answer: Callable[[CallPoll, float], Event]) -> None:
        """At one instant."""
        for number, poll in tuple(self.polls.items()):
            del self.polls[number]
            self.decide(number, answer(poll, self.jitter()))

    def connected(self) -> Herd:
        for number in range(AGENTS):
            self.decide(number, Subscribe("stream", "7"))
        self.answer_batches("n1")
        self.calls.clear()
        return self

    def dead_until(self, until_s: float) -> None:
        """The node is dead: each call fails at once."""
        while self.wakes and self.wakes[0][0] < until_s:
            self.now, _, number = heapq.heappop(self.wakes)
            self.decide(number, Tick())
            if (batch := self.batches.pop(number, None)) is not None:
                self.decide(number, CommandsUnanswered(batch.subscriber_incarnation, "refused", self.jitter()))
            if (poll := self.polls.pop(number, None)) is not None:
                self.decide(number, PollUnanswered(poll.subscriber_incarnation, "refused", self.jitter()))

    def woken(self) -> None:
        while self.wakes:
            self.now, _, number = heapq.heappop(self.wakes)
            self.decide(number, Tick())


def most_at_once(times: Iterable[float]) -> int:
    """The most of them in one slice."""
    return max(Counter(int(at / SLICE_S) for at in times).values())


def calls_to_a_lost_node(herd: Herd) -> list[float]:
    """Those of later than 3 s: when a node that was restarted may be back."""
    herd.end_polls(lambda poll, jitter: PollUnanswered(poll.subscriber_incarnation, "killed", jitter))
    herd.dead_until(6.0)
    return [at for at, _ in herd.calls if at > 3.0]


def subscriptions_to_a_node_that_forgot_them(herd: Herd) -> list[float]:
    herd.end_polls(lambda poll, jitter: PollReplied(poll.subscriber_incarnation, "n2", unknown=True, jitter=jitter))
    herd.woken()
    return [at for at, call in herd.calls if isinstance(call, SendCommands)]


def ends_of_polls_after_one_message(herd: Herd) -> list[float]:
    """Nobody waits with the next poll: more may be there."""
    herd.end_polls(lambda poll, jitter: PollReplied(poll.subscriber_incarnation, "n1", jitter=jitter))
    polls = [(at, call) for at, call in herd.calls if isinstance(call, CallPoll)]
    assert [at for at, _ in polls] == [0.0] * AGENTS
    return [at + call.hold_s for at, call in polls]


@pytest.mark.parametrize(
    "times_of", [calls_to_a_lost_node, subscriptions_to_a_node_that_forgot_them, ends_of_polls_after_one_message]
)
def test_agents_do_not_act_in_one_instant(times_of: Callable[[Herd], list[float]]) -> None:
    spread, together = (times_of(Herd(spread).connected()) for spread in (True, False))
    assert len(spread) >= AGENTS
    assert most_at_once(spread) < AGENTS / 4 < AGENTS <= most_at_once(together)
