"""The agent's half of a connection to one node: a pure machine, `decide(event, now) -> Outcome`.

An *incarnation* of the agent is the time under one subscriber id. It begins when something is subscribed or sent, and
ends when nothing is needed any more, or with doubt: two failed calls of a kind in a row, another incarnation of the
node, a node that does not know this subscriber. The next one begins with every subscription declared again. A batch is
repeated under its number with the same content only within an incarnation, so no command is ever executed twice.

What many agents would do at the same instant is spread by the `jitter` that comes with each answer: retries, the return
to a node that has restarted, and the length of a hold (else all subscribers that one message woke would poll in step
for ever).
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from typing import assert_never

from msgspec import Struct, field
from msgspec.structs import fields

from sublet_protocol.domain.limits import MAX_COMMAND_BYTES, MAX_COMMANDS, MAX_ITEMS
from sublet_protocol.pubsub.agent_side_events import (
    AgentSideOutcome,
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
from sublet_protocol.pubsub.counters import AgentSideCounters
from sublet_protocol.pubsub.model import (
    CHANNELS,
    ChannelKind,
    Command,
    MailboxOverflow,
    MessageToNode,
    SequencedMessage,
    Subject,
    Subscribe,
    Unsubscribe,
)
from sublet_protocol.tick import Tick

FAILURES_TO_LOSE = 2
"""The number of failed calls of a kind in a row that ends an incarnation."""

HOLD_SPREAD = 0.2
"""The maximum fraction by which jitter shortens a hold."""


class AgentConnectionSettings(Struct, frozen=True):
    """Times in seconds, and bounds of one batch and of the queue. With jitter a retry takes up to twice as long.

    `spread_s`: over this time the agents of a node that has restarted, or dropped them, come back.
    """

    hold_s: float = 5.0
    retry_s: float = 0.1
    max_retry_s: float = 2.0
    spread_s: float = 0.5
    batch_commands: int = MAX_COMMANDS
    batch_bytes: int = MAX_COMMAND_BYTES
    batch_items: int = MAX_ITEMS
    queued_commands: int = 200_000


class _CallState(Struct):
    """One of the two calls that may be under way: a batch or a poll."""

    is_busy: bool = False
    failures: int = 0
    not_before: float = 0.0
    failed_at: float = -math.inf


class _SubscriberState(Struct):
    """State under one subscriber id. `number`: of the last batch; `flight`: its commands if unanswered."""

    id: int
    number: int = 0
    flight: tuple[Command, ...] = ()
    acknowledged: int = 0
    incarnation: str = ""
    last_on: dict[str, int] = field(default_factory=dict)
    batch: _CallState = field(default_factory=_CallState)
    poll: _CallState = field(default_factory=_CallState)


class AgentSideMachine:
    """The machine between one agent and one node. `agent` names this incarnation of the agent's process. `size_of`: the
    bytes of a command, and for how many items of a batch it counts. `last_incarnation`: not below any
    that the agent has had at the node.
    """

    def __init__(
        self,
        agent: str,
        settings: AgentConnectionSettings | None = None,
        *,
        channels: Mapping[str, ChannelKind] = CHANNELS,
        size_of: Callable[[Command], tuple[int, int]] = lambda command: (256, 1),
        last_incarnation: int = 0,
    ) -> None:
        self.status = ConnectionStatus.IDLE
        self._agent = agent
        self._settings = settings or AgentConnectionSettings()
        self._channels = channels
        self._size_of = size_of
        self._subscriptions: dict[Subject, None] = {}
        self._unreported: dict[Subject, None] = {}  # subscribed since the loss was reported
        self._listening = False
        self._queue: deque[Command] = deque()
        self._setbacks = 0
        self._jitter = 0.0
        self._counts: Counter[str] = Counter()
        self._lost: Counter[ConnectionLostReason] = Counter()
        self._refusal = ""
        self._subscriber = _SubscriberState(last_incarnation)
        self._out: list[Instruction] = []

    def decide(self, event: Event, now: float) -> AgentSideOutcome:
        """Apply one event, and return the outcome; times are seconds of a monotonic clock."""
        self._out = []
        if self.status is not ConnectionStatus.REJECTED:
            self._handle_event(event, now)
            self._advance(now)
        elif isinstance(event, Subscribe):
            self._out.append(
                ReportConnectionStillLost(
                    ReportConnectionLost(ConnectionLostReason.REJECTED, self._refusal, ((event.channel, event.key),))
                )
            )
        return AgentSideOutcome(tuple(self._out), self._wake_at(now))

    @property
    def subscriber_id(self) -> str:
        """Return the id of the present incarnation."""
        return f"{self._agent}.{self._subscriber.id}"

    @property
    def unacknowledged_count(self) -> int:
        """Return the number of messages without the node's receipt."""
        return sum(isinstance(command, MessageToNode) for command in (*self._queue, *self._subscriber.flight))

    def is_subscribed(self, channel: str, key: str | None) -> bool:
        """Return whether this is subscribed to, now or as soon as the node is there."""
        return (channel, key) in self._subscriptions

    @property
    def counters(self) -> AgentSideCounters:
        """Return the counters so far."""
        names = (field.name for field in fields(AgentSideCounters) if field.name != "connections_lost")
        return AgentSideCounters(**{name: self._counts[name] for name in names}, connections_lost=dict(self._lost))

    def find_leaks(self) -> tuple[str, ...]:
        """Return what is still stored though nothing is subscribed; empty unless there is a leak."""
        unsubscribed = self._unreported.keys() - self._subscriptions
        leaks = [f"{subject}: a loss to be reported, and not subscribed" for subject in unsubscribed]
        if self.status in (ConnectionStatus.IDLE, ConnectionStatus.REJECTED):
            leftovers = {
                "subscriptions": self._subscriptions,
                "commands": self._queue,
                "a batch": self._subscriber.flight,
            }
            leaks += [f"{name}: kept while {self.status.value}" for name, items in leftovers.items() if items]
        elif self._unreported and self.status is not ConnectionStatus.DISCONNECTED:
            leaks.append(f"{len(self._unreported)} subscriptions: a loss to be reported that is over")
        return tuple(leaks)

    # --- events ---

    def _handle_event(self, event: Event, now: float) -> None:
        match event:
            case Subscribe(channel, key):
                self._add_subscription((channel, key))
                self._enqueue(event, now)
            case Unsubscribe(channel, key):
                self._remove_subscription((channel, key))
                self._enqueue(event, now)
            case MessageToNode():
                self._listening = True  # for what is answered, also without a subscription
                self._enqueue(event, now)
            case CommandsReplied() | CommandsUnanswered() | PollReplied() | PollUnanswered() | ConnectionRejected():
                if event.subscriber_incarnation == self._subscriber.id and self.status is not ConnectionStatus.IDLE:
                    self._handle_answer(event, now)
            case Tick():
                pass
            case _:
                assert_never(event)

    def _handle_answer(
        self,
        event: CommandsReplied | CommandsUnanswered | PollReplied | PollUnanswered | ConnectionRejected,
        now: float,
    ) -> None:
        if not isinstance(event, ConnectionRejected):
            self._jitter = event.jitter
        match event:
            case CommandsReplied():
                self._on_batch_answered(event, now)
            case PollReplied():
                self._on_poll_answered(event, now)
            case CommandsUnanswered():
                self._on_call_failed(self._subscriber.batch, event, now)
            case PollUnanswered():
                self._on_call_failed(self._subscriber.poll, event, now)
            case ConnectionRejected(reason=reason):
                self._lose(ConnectionLostReason.REJECTED, reason, now)
            case _:
                assert_never(event)

    def _add_subscription(self, subject: Subject) -> None:
        if self.status is ConnectionStatus.DISCONNECTED and subject not in self._subscriptions:
            self._unreported[subject] = None
        self._subscriptions[subject] = None

    def _remove_subscription(self, subject: Subject) -> None:
        self._subscriptions.pop(subject, None)
        self._unreported.pop(subject, None)

    def _enqueue(self, command: Command, now: float) -> None:
        self._queue.append(command)
        if len(self._queue) > self._settings.queued_commands + len(self._subscriptions):
            self._lose(ConnectionLostReason.OVERFLOW, f"{len(self._queue)} commands wait for the node", now)

    def _on_batch_answered(self, event: CommandsReplied, now: float) -> None:
        if event.number != self._subscriber.number or not self._accept_answer(event, self._subscriber.batch, now):
            return
        flight, self._subscriber.flight = self._subscriber.flight, ()
        refused = tuple((error.index, error.text) for error in event.errors if error.index < len(flight))
        if refused:
            self._counts["rejected_commands"] += len(refused)
            self._forget_refused(flight, {index for index, _ in refused})
            self._out.append(ReportRejectedCommands(tuple((flight[index], text) for index, text in refused)))

    def _forget_refused(self, flight: tuple[Command, ...], refused: set[int]) -> None:
        """Drop each rejected subscription, unless it was requested once more after the rejected one."""
        commands = (*flight, *self._queue)
        last = {
            (command.channel, command.key): index
            for index, command in enumerate(commands)
            if isinstance(command, Subscribe)
        }
        for subject, index in last.items():
            if index in refused:
                self._remove_subscription(subject)

    def _on_poll_answered(self, event: PollReplied, now: float) -> None:
        if not self._subscriber.poll.is_busy or not self._accept_answer(event, self._subscriber.poll, now):
            return
        fresh = tuple(delivery for delivery in event.deliveries if delivery.sequence > self._subscriber.acknowledged)
        self._counts.update(empty_polls=not event.deliveries, redeliveries=len(event.deliveries) - len(fresh))
        if not all(self._accept_successor(delivery) for delivery in fresh):
            self._lose(ConnectionLostReason.INCONSISTENT, "the node left out a message and did not say so", now)
        elif fresh:
            self._subscriber.acknowledged = fresh[-1].sequence
            self._counts.update(
                deliveries=len(fresh), gaps=sum(isinstance(delivery.body, MailboxOverflow) for delivery in fresh)
            )
            self._out.append(Deliver(fresh))

    def _accept_answer(self, event: CommandsReplied | PollReplied, call: _CallState, now: float) -> bool:
        """Return whether the answer is from the expected incarnation of the node, which has this subscriber; else
        report the loss.
        """
        call.is_busy, call.failures = False, 0
        if self._subscriber.incarnation not in ("", event.node_incarnation):
            detail = f"incarnation {event.node_incarnation} instead of {self._subscriber.incarnation}"
            self._lose(ConnectionLostReason.RESTARTED, detail, now)
            return False
        if event.is_unknown:
            self._lose(ConnectionLostReason.EXPIRED, f"the node does not know {self.subscriber_id}", now)
            return False
        self._subscriber.incarnation = event.node_incarnation
        self._setbacks = 0
        self._unreported.clear()
        self.status = ConnectionStatus.CONNECTED
        return True

    def _accept_successor(self, delivery: SequencedMessage) -> bool:
        """Return whether this is the direct successor on its channel of the last one seen."""
        if isinstance(delivery.body, MailboxOverflow):
            self._subscriber.last_on.update((channel, delivery.sequence) for channel in delivery.body.channels)
            return True
        if self._channels.get(delivery.channel) is not ChannelKind.LOG:
            return True
        predecessor = self._subscriber.last_on.get(delivery.channel, 0)
        self._subscriber.last_on[delivery.channel] = delivery.sequence
        return delivery.predecessor == predecessor

    def _on_call_failed(self, call: _CallState, event: CommandsUnanswered | PollUnanswered, now: float) -> None:
        if not call.is_busy:
            return
        call.is_busy = False
        call.failures += 1
        if self.status is ConnectionStatus.DISCONNECTED or call.failures >= FAILURES_TO_LOSE:
            self._lose(ConnectionLostReason.UNREACHABLE, event.reason, now)
            return
        # At once, as mostly the connection has ended, and a node that is dead is known to be so then; but in no loop.
        is_lone_failure = now >= call.failed_at + self._settings.max_retry_s
        call.failed_at, call.not_before = now, now if is_lone_failure else now + self._compute_delay()

    def _compute_delay(self) -> float:
        longest = self._settings.retry_s * float(2 ** min(self._setbacks, 16))
        return min(longest, self._settings.max_retry_s) * (1 + self._jitter)

    # --- incarnations ---

    def _lose(self, reason: ConnectionLostReason, detail: str, now: float) -> None:
        """End this incarnation and report it once to each subscription; the next one begins soon, or after a longer
        delay."""
        self._give_up_calls()
        self._lost[reason] += 1
        self._send_lost(reason, detail)
        if reason is ConnectionLostReason.REJECTED:
            self._end(detail)
            return
        if self.status is ConnectionStatus.CONNECTED and reason is not ConnectionLostReason.UNREACHABLE:
            begins_at = now + self._settings.spread_s * self._jitter
            self.status = ConnectionStatus.CONNECTING
        else:
            begins_at = now + self._compute_delay()
            self.status = ConnectionStatus.DISCONNECTED
            self._setbacks += 1
        self._queue = deque(Subscribe(channel, key) for channel, key in self._subscriptions)
        self._begin_subscriber(begins_at)

    def _send_lost(self, reason: ConnectionLostReason, detail: str) -> None:
        """Report the loss once; a final loss is reported also to subscriptions to which a loss was reported."""
        if self.status is not ConnectionStatus.DISCONNECTED or reason is ConnectionLostReason.REJECTED:
            self._out.append(ReportConnectionLost(reason, detail, tuple(self._subscriptions)))
        elif self._unreported:
            self._out.append(ReportConnectionStillLost(ReportConnectionLost(reason, detail, tuple(self._unreported))))
        self._unreported.clear()

    def _end(self, refusal: str) -> None:
        """Drop everything: nothing will be tried any more."""
        self.status = ConnectionStatus.REJECTED
        self._refusal = refusal
        self._subscriptions.clear()
        self._queue.clear()
        self._subscriber = _SubscriberState(self._subscriber.id)

    def _give_up_calls(self) -> None:
        if self._subscriber.batch.is_busy:
            self._out.append(CancelCommandsCall())
        if self._subscriber.poll.is_busy:
            self._out.append(CancelPollCall())

    def _begin_subscriber(self, not_before: float) -> None:
        self._subscriber = _SubscriberState(self._subscriber.id + 1)
        self._counts["incarnations"] += 1
        self._subscriber.batch.not_before = self._subscriber.poll.not_before = not_before

    # --- what to do next ---

    def _advance(self, now: float) -> None:
        if self.status is ConnectionStatus.REJECTED:
            return
        if not (self._subscriptions or self._listening or self._queue or self._subscriber.flight):
            self._become_idle()
            return
        if self.status is ConnectionStatus.IDLE:
            self.status = ConnectionStatus.CONNECTING
            self._begin_subscriber(now)
        self._advance_batch(now)
        self._advance_poll(now)

    def _become_idle(self) -> None:
        """End this incarnation regularly, as nothing is subscribed, so that the node can drop it."""
        self._give_up_calls()
        self._subscriber = _SubscriberState(self._subscriber.id)
        self.status = ConnectionStatus.IDLE

    def _advance_batch(self, now: float) -> None:
        if self._subscriber.batch.is_busy or now < self._subscriber.batch.not_before:
            return
        repeated = bool(self._subscriber.flight)
        if not self._subscriber.flight and self._queue:
            self._subscriber.flight = self._take_next_commands()
            self._subscriber.number += 1
        if self._subscriber.flight:
            self._count_batch(repeated)
            self._subscriber.batch.is_busy = True
            self._out.append(
                SendCommands(self.subscriber_id, self._subscriber.id, self._subscriber.number, self._subscriber.flight)
            )

    def _count_batch(self, repeated: bool) -> None:
        if repeated:
            self._counts["duplicate_batches"] += 1
        else:
            self._counts.update(batches=1, commands=len(self._subscriber.flight))

    def _take_next_commands(self) -> tuple[Command, ...]:
        """Return as many commands as one batch may hold, and at least one."""
        commands = [self._queue.popleft()]
        size, items = self._size_of(commands[0])
        while self._queue and len(commands) < self._settings.batch_commands:
            more, more_items = self._size_of(self._queue[0])
            size, items = size + more, items + more_items
            if size > self._settings.batch_bytes or items > self._settings.batch_items:
                break
            commands.append(self._queue.popleft())
        return tuple(commands)

    def _advance_poll(self, now: float) -> None:
        needs_poll = bool(self._subscriptions) or self._listening
        if self._subscriber.poll.is_busy and not needs_poll:
            self._subscriber.poll.is_busy = False
            self._out.append(CancelPollCall())
        if not needs_poll or self._subscriber.poll.is_busy or now < self._subscriber.poll.not_before:
            return
        self._subscriber.poll.is_busy = True
        in_doubt = self._subscriber.poll.failures > 0 or self.status is ConnectionStatus.DISCONNECTED
        hold_s = 0.0 if in_doubt else self._settings.hold_s * (1 - HOLD_SPREAD * self._jitter)
        self._counts["polls"] += 1
        poll = CallPoll(
            self.subscriber_id, self._subscriber.id, self._subscriber.acknowledged, self._subscriber.incarnation, hold_s
        )
        self._out.append(poll)

    def _wake_at(self, now: float) -> float | None:
        """Return the earliest time at which a call that is put off may be made."""
        times = (self._subscriber.batch.not_before, self._subscriber.poll.not_before)
        return min((at for at in times if at > now), default=None)
