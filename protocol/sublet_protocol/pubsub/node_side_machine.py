"""The node's half of a connection: subscriptions, and the mailbox of each subscriber; a pure machine.

`receive` takes a batch of commands, `poll` returns messages, `publish` and `send` add them, `expire` forgets
subscribers that have been silent; times are passed in. `on_ready` is called with a subscriber id when a message waits
for it. `on_interest` is called with (channel, key or None for all, True or False) when the first subscriber of it has
come, or the last has gone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from weakref import WeakValueDictionary

from msgspec import Struct, field

from sublet_protocol.domain.limits import (
    MAX_FOLLOWERS_OF_PRINCIPAL,
    MAX_KEY_BYTES,
    MAX_SUBSCRIBERS,
    MAX_SUBSCRIPTIONS,
    MAX_UNREAD_BYTES_OF_PRINCIPAL,
    MAX_WATCHERS_OF_PRINCIPAL,
    MAX_WATCHES_OF_PRINCIPAL,
)
from sublet_protocol.pubsub.channel_subscribers import LatestValues, SubscriptionIndex
from sublet_protocol.pubsub.counters import NodeSideCounters
from sublet_protocol.pubsub.model import (
    CHANNELS,
    Channel,
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
from sublet_protocol.pubsub.node_side_replies import (
    CommandsAccepted,
    CommandsAlreadyExecuted,
    HoldPoll,
    PollReply,
    SubscriberRefused,
    UnknownSubscriber,
)
from sublet_protocol.pubsub.subscriber_mailbox import Mailbox, MailboxLimits, PrincipalUsage, QueuedMessage, Subscriber

MAX_SILENT_HOLDS = 3
"""A subscriber that has sent nothing for this many hold times is dropped."""

MAX_EXPIRED_SUBSCRIPTIONS = 2_000
"""After so many `expire` leaves the other silent subscribers to its next call; one may have five times as many."""

MAX_REMEMBERED = 10_000
"""How many dropped subscriber ids are stored, so that none of them can be used again."""


class SubscriberLimits(Struct, frozen=True):
    """The bounds on the cost of subscribers; `hold_s` is the longest that a poll is held. How many
    ids of one principal subscribe to the same key, or to all: `watchers_of_principal` of a log channel,
    `followers_of_principal` of a state channel."""

    hold_s: float = 5.0
    mailbox: MailboxLimits = field(default_factory=MailboxLimits)
    subscribers: int = MAX_SUBSCRIBERS
    subscriptions_each: int = MAX_SUBSCRIPTIONS
    key_bytes: int = MAX_KEY_BYTES
    unread_bytes_of_principal: int = MAX_UNREAD_BYTES_OF_PRINCIPAL
    watchers_of_principal: int = MAX_WATCHERS_OF_PRINCIPAL
    followers_of_principal: int = MAX_FOLLOWERS_OF_PRINCIPAL
    watches_of_principal: int = MAX_WATCHES_OF_PRINCIPAL


class NodeSideMachine:
    """The machine of all subscribers of one incarnation of a node. Not thread-safe: one thread (or event loop) calls
    it.

    `incarnation` is that of the node. `channels` are those that are served. `size_of` returns a body's size in bytes.
    """

    def __init__(
        self,
        incarnation: str,
        settings: SubscriberLimits | None = None,
        *,
        channels: Mapping[str, ChannelKind] = CHANNELS,
        size_of: Callable[[object], int] = lambda body: 256,
    ) -> None:
        self.incarnation = incarnation
        self.settings = settings or SubscriberLimits()
        self.on_ready: Callable[[str], None] = lambda subscriber_id: None
        self.on_interest: Callable[[str, str | None, bool], None] = lambda channel, key, is_subscribed: None
        self._channels = channels
        self._size_of = size_of
        self._counts: Counter[str] = Counter()
        self._subscribers: dict[str, Subscriber] = {}
        self._usages: WeakValueDictionary[str, PrincipalUsage] = WeakValueDictionary()
        self._expelled: list[str] = []
        self._past: OrderedDict[str, None] = OrderedDict()
        self._subscriber_ids: dict[str, str] = {}
        self._key_bytes = 0
        self._index = SubscriptionIndex()
        self._states = LatestValues()

    # --- from subscribers ---

    def admit_batch(self, subscriber_id: str, number: int, principal: str | None) -> SubscriberRefused | None:
        """Return the refusal of a batch whose principal leaves too much unread; None: it may be executed, or was. The
        errors of the batch before it are dropped.
        """
        subscriber = self._subscribers.get(subscriber_id)
        if subscriber is not None:
            if number <= subscriber.batch:
                return None
            subscriber.keep_errors(())  # the sender has them: else it would send that batch again
        usage = None if principal is None else self._usages.get(principal)
        if usage is None or usage.unread_bytes < usage.unread_limit / 2:
            return None
        return SubscriberRefused(
            f"{principal} leaves {usage.unread_bytes} bytes unread at this node, and may send no more from "
            f"{usage.unread_limit // 2} on. Poll with each subscriber id, acknowledge what comes, and send the batch "
            "again."
        )

    def receive(
        self,
        subscriber_id: str,
        number: int,
        commands: Sequence[ReceivedCommand],
        now: float,
        principal: str | None = None,
    ) -> CommandsAccepted | CommandsAlreadyExecuted | UnknownSubscriber | SubscriberRefused:
        """Execute batch `number` (1, 2, 3, ... per subscriber id), once. `principal`: whose id it is; None: unknown."""
        subscriber = self._find(subscriber_id, now, principal, may_be_new=number == 1)
        if isinstance(subscriber, UnknownSubscriber | SubscriberRefused):
            return subscriber
        if number == subscriber.batch:
            subscriber.received_at = now
            self._counts["duplicate_batches"] += 1
            return CommandsAlreadyExecuted(subscriber.errors)
        if number != subscriber.batch + 1:
            return self._expel(subscriber_id, f"batch {number} does not follow batch {subscriber.batch}")
        subscriber.received_at, subscriber.batch = now, number
        return self._execute(subscriber_id, subscriber, commands)

    def add_errors(
        self, subscriber_id: str, number: int, errors: Sequence[CommandRefusal]
    ) -> tuple[CommandRefusal, ...]:
        """Add the owner's errors with the messages of a batch, and return all its errors, by index."""
        subscriber = self._subscribers.get(subscriber_id)
        if subscriber is None or subscriber.batch != number:
            return tuple(errors)
        subscriber.keep_errors(tuple(sorted((*subscriber.errors, *errors), key=lambda error: error.index)))
        self._counts["rejected_commands"] += len(errors)
        return subscriber.errors

    def poll(
        self,
        subscriber_id: str,
        acknowledged: int,
        incarnation: str,
        now: float,
        hold_s: float,
        principal: str | None = None,
    ) -> PollReply | HoldPoll | UnknownSubscriber | SubscriberRefused:
        """Drop what is acknowledged and return what waits, or hold the poll."""
        self._counts["polls"] += 1
        if incarnation not in ("", self.incarnation):
            return self._reject_unknown(f"incarnation {incarnation} of this node is over")
        subscriber = self._find(subscriber_id, now, principal, may_be_new=not incarnation and not acknowledged)
        if isinstance(subscriber, UnknownSubscriber | SubscriberRefused):
            return subscriber
        subscriber.received_at = now
        if not subscriber.mailbox.acknowledge(acknowledged):
            return self._expel(subscriber_id, f"message {acknowledged} was acknowledged, and never sent")
        if subscriber.mailbox:
            return PollReply(self._take(subscriber.mailbox))
        return HoldPoll(now + min(max(hold_s, 0.0), self.settings.hold_s))

    def end_poll(self, subscriber_id: str, now: float) -> PollReply | UnknownSubscriber:
        """End a held poll; return what waits by now, which may be nothing."""
        subscriber = self._subscribers.get(subscriber_id)
        if subscriber is None:
            return self._reject_unknown("forgotten while its poll was held")
        subscriber.received_at = now
        deliveries = self._take(subscriber.mailbox)
        self._counts["empty_polls"] += not deliveries
        return PollReply(deliveries)

    # --- from the owner ---

    def publish(self, channel: str, key: str, body: object, version: int = 0) -> int:
        """Queue `body` once for each subscriber of this key or of the whole channel; return how many there are.

        On a state channel a version that is not above the key's current one is dropped.
        """
        is_state = self._channels[channel] is ChannelKind.STATE
        if is_state and not self._states.put(channel, key, body, version):
            return 0
        size = self._size_of(body) + len(key)
        readers = self._index.subscribers(channel, key)
        message = QueuedMessage(channel, key, body, size, is_state, version)
        for subscriber_id in readers:
            self._put(subscriber_id, message)
        return len(readers)

    def send(self, subscriber_id: str, channel: str, key: str, body: object) -> bool:
        """Queue `body` for one subscriber, also without a subscription; return False if the node does not know it.

        On a log channel, while an equal message is unacknowledged it is not queued again: resending is free.
        """
        if subscriber_id not in self._subscribers:
            return False
        is_state = self._channels[channel] is ChannelKind.STATE
        size = self._size_of(body) + len(key)
        self._put(subscriber_id, QueuedMessage(channel, key, body, size, is_state, is_deduplicated=not is_state))
        return True

    def clear_state(self, channel: str, key: str) -> None:
        """Drop the current value of a state that is over; a later subscriber gets none."""
        self._states.drop(channel, key)

    def expire(self, now: float) -> tuple[str, ...]:
        """Drop subscribers that were silent for three hold times, some at a time; return their ids, and those expelled
        since the last call.
        """
        since, gone, left = now - self._forgotten_after_s, list[str](), MAX_EXPIRED_SUBSCRIPTIONS
        for subscriber_id, subscriber in tuple(self._subscribers.items()):
            if subscriber.received_at <= since and left > 0:
                left -= 1 + sum(map(len, subscriber.subjects.values()))
                self._forget(subscriber_id, "expired")
                gone.append(subscriber_id)
        expelled, self._expelled = self._expelled, []
        return (*gone, *expelled)

    def expel(self, subscriber_id: str) -> None:
        """Drop a subscriber that must not have all that it subscribed to; it may come again, and subscribe again."""
        if subscriber_id in self._subscribers:
            self._forget(subscriber_id, "expelled")
            self._expelled.append(subscriber_id)

    @property
    def wake_at(self) -> float | None:
        """Return when `expire` may find a silent subscriber; None while there is no subscriber."""
        oldest = min((subscriber.received_at for subscriber in self._subscribers.values()), default=None)
        return None if oldest is None else oldest + self._forgotten_after_s

    @property
    def subscriber_ids(self) -> tuple[str, ...]:
        """Return the ids of all subscribers, in order of arrival."""
        return tuple(self._subscribers)

    def subscriptions(self, subscriber_id: str) -> Mapping[str, Collection[str | None]]:
        """Return the keys (None for all) by channel that this subscriber has subscribed to; none if it is not known."""
        subscriber = self._subscribers.get(subscriber_id)
        return {} if subscriber is None else {channel: keys for channel, keys in subscriber.subjects.items() if keys}

    def has_subscriber(self, subscriber_id: str) -> bool:
        """Return whether this subscriber id is alive."""
        return subscriber_id in self._subscribers

    @property
    def counters(self) -> NodeSideCounters:
        """Return the counters so far."""
        return NodeSideCounters(**self._counts)

    def find_leaks(self) -> tuple[str, ...]:
        """Return what is still stored of ended subscriptions and messages; empty unless there is a leak.

        The newest states are no leaks: they answer later subscriptions, until they are cleared.
        """
        subscriptions = {
            (name, *subject) for name, subscriber in self._subscribers.items() for subject in subscriber.list_subjects()
        }
        entries = set(self._index.entries())
        leaks = [f"subscription {entry}: nobody asked for it" for entry in entries - subscriptions]
        if self._key_bytes != sum(len(key or "") for _, _, key in subscriptions):
            leaks.append(
                f"{self._key_bytes} bytes of keys are counted, and {len(subscriptions)} subscriptions have others"
            )
        leaks += [f"subscription {entry}: messages pass it by" for entry in subscriptions - entries]
        for name, subscriber in self._subscribers.items():
            leaks += [f"mailbox of {name}: {leak}" for leak in subscriber.mailbox.find_leaks()]
        for principal, usage in self._usages.items():
            own = [each for each in self._subscribers.values() if each.usage is usage]
            held = [sum(map(of, own)) for of in (Subscriber.measure, Subscriber.measure_keys)]
            held.append(sum(map(Subscriber.count_watches, own)))
            if [usage.unread_bytes, usage.key_bytes, usage.watches] != held:
                leaks.append(f"{usage} is counted for {principal}, and {held} is held")
        return tuple(leaks)

    # --- inside ---

    def _find(
        self, subscriber_id: str, now: float, principal: str | None, *, may_be_new: bool
    ) -> Subscriber | UnknownSubscriber | SubscriberRefused:
        if (subscriber := self._subscribers.get(subscriber_id)) is not None:
            return subscriber
        if subscriber_id in self._past or not may_be_new:
            return self._reject_unknown("its incarnation has ended: it was silent for too long, or broke the rules")
        agent, incarnation = _parse_subscriber_id(subscriber_id)
        previous_id = self._subscriber_ids.get(agent, "")
        if previous_id and incarnation <= _parse_subscriber_id(previous_id)[1]:
            return self._reject_unknown("its incarnation has ended: a later one of the same agent has begun")
        # An agent has one incarnation at a time: the subscriptions of the former are not to be counted with it.
        if previous_id:
            self._forget(previous_id, "expired")
            self._expelled.append(previous_id)
        if len(self._subscribers) >= self.settings.subscribers:
            limit = self.settings.subscribers
            return SubscriberRefused(f"the node serves {limit} subscribers already, which is its limit")
        usage = self._find_usage(principal)
        subscriber = Subscriber(Mailbox(self.settings.mailbox, usage), usage, now)
        self._subscribers[subscriber_id] = subscriber
        if agent:
            self._subscriber_ids[agent] = subscriber_id
        self._counts["incarnations"] += 1
        return subscriber

    def _find_usage(self, principal: str | None) -> PrincipalUsage:
        if principal is None:
            return PrincipalUsage()
        limit = self.settings.unread_bytes_of_principal
        return self._usages.setdefault(principal, PrincipalUsage(True, limit))

    def _count_keys(self, subscriber: Subscriber, size: int, watches: int) -> None:
        self._key_bytes += size
        subscriber.usage.key_bytes += size
        subscriber.usage.watches += watches

    def _reject_unknown(self, reason: str) -> UnknownSubscriber:
        self._counts["unknown_subscriber_replies"] += 1
        return UnknownSubscriber(reason)

    def _expel(self, subscriber_id: str, reason: str) -> UnknownSubscriber:
        self._forget(subscriber_id, "expelled")
        self._expelled.append(subscriber_id)
        return self._reject_unknown(reason)

    def _forget(self, subscriber_id: str, counted_as: str) -> None:
        subscriber = self._subscribers.pop(subscriber_id)
        self._count_keys(subscriber, -subscriber.measure_keys(), -subscriber.count_watches())
        subscriber.close()
        subjects = tuple(subscriber.list_subjects())
        left = [subject for subject in subjects if self._index.remove(subscriber_id, *subject)]
        agent, _ = _parse_subscriber_id(subscriber_id)
        if self._subscriber_ids.get(agent) == subscriber_id:
            del self._subscriber_ids[agent]
        self._past[subscriber_id] = None
        if len(self._past) > MAX_REMEMBERED:
            self._past.popitem(last=False)
        self._counts[counted_as] += 1
        self.on_ready(subscriber_id)
        for channel, key in left:
            self.on_interest(channel, key, False)

    def _execute(
        self, subscriber_id: str, subscriber: Subscriber, commands: Sequence[ReceivedCommand]
    ) -> CommandsAccepted:
        errors: list[CommandRefusal] = []
        messages: list[tuple[int, object]] = []
        for index, command in enumerate(commands):
            match command:
                case MessageToNode(body):
                    messages.append((index, body))
                    refusal = None
                case UndecodableCommand(text):
                    refusal = text
                case Subscribe(channel, key):
                    refusal = self._subscribe(subscriber_id, subscriber, channel, key)
                case Unsubscribe(channel, key):
                    refusal = self._unsubscribe(subscriber_id, subscriber, channel, key)
            if refusal is not None:
                errors.append(CommandRefusal(index, refusal))
        subscriber.keep_errors(tuple(errors))
        self._counts.update(batches=1, commands=len(commands), rejected_commands=len(errors))
        return CommandsAccepted(tuple(messages), subscriber.errors)

    def _subscribe(self, subscriber_id: str, subscriber: Subscriber, channel: str, key: str | None) -> str | None:
        if (kind := self._channels.get(channel)) is None:
            return f"channel {channel!r} is not served here; these are: {', '.join(self._channels)}"
        keys = subscriber.subjects.setdefault(channel, {})
        if key not in keys:
            if (refusal := self._find_excess(subscriber, channel, key, kind)) is not None:
                return refusal
            keys[key] = None
            self._count_keys(subscriber, len(key or ""), channel == Channel.GROUP)
        is_first = self._index.add(subscriber_id, channel, key)
        if kind is ChannelKind.STATE:
            for state_key, body, version in self._states.list_values(channel, key):
                size = self._size_of(body) + len(state_key)
                self._put(subscriber_id, QueuedMessage(channel, state_key, body, size, is_state=True, version=version))
        if is_first:
            self.on_interest(channel, key, True)
        return None

    def _find_excess(self, subscriber: Subscriber, channel: str, key: str | None, kind: ChannelKind) -> str | None:
        """Return the refusal of one more subscription, of keys that are too long together, of one more watch of a
        principal that has as many as it may, and of one more id on this key: each message of the key is put into the
        mailbox of each of them. None: it may."""
        is_log, settings, usage = kind is ChannelKind.LOG, self.settings, subscriber.usage
        if sum(len(each) for each in subscriber.subjects.values()) >= (limit := settings.subscriptions_each):
            return f"a subscriber has at most {limit} subscriptions; unsubscribe from some, or subscribe to all keys"
        size = len(key or "")
        left_free = settings.key_bytes - self._key_bytes - size
        if size and (left_free < 0 or (usage.is_of_principal and usage.key_bytes + size > left_free)):
            return (
                f"the keys of all subscriptions at the node may have {settings.key_bytes} bytes, and those of one "
                "principal as many as are left free; unsubscribe from some, or try later"
            )
        if usage.is_of_principal and channel == Channel.GROUP and usage.watches >= settings.watches_of_principal:
            return (
                f"this principal has {usage.watches} subscriptions to channel {channel} at this node, which is the "
                "limit. Unsubscribe from some, or subscribe to all keys."
            )
        limit = settings.watchers_of_principal if is_log else settings.followers_of_principal
        readers = self._index.subscribers_of(channel, key)
        if len(readers) < limit or sum(self._subscribers[each].usage is usage for each in readers) < limit:
            return None
        subject = "all keys" if key is None else repr(key[:80])
        return (
            f"{limit} subscriber ids of this principal have subscribed to {subject} of channel {channel} at this node, "
            "which is the limit. Unsubscribe with one of them, or try later: one that has ended is forgotten after "
            f"{self._forgotten_after_s:g} s"
        )

    @property
    def _forgotten_after_s(self) -> float:
        return MAX_SILENT_HOLDS * self.settings.hold_s

    def _unsubscribe(self, subscriber_id: str, subscriber: Subscriber, channel: str, key: str | None) -> str | None:
        keys = subscriber.subjects.get(channel, {})
        if key in keys:
            del keys[key]
            self._count_keys(subscriber, -len(key or ""), -(channel == Channel.GROUP))
        if self._index.remove(subscriber_id, channel, key):
            self.on_interest(channel, key, False)
        return None

    def _put(self, subscriber_id: str, message: QueuedMessage) -> None:
        self._subscribers[subscriber_id].mailbox.put(message)
        self.on_ready(subscriber_id)

    def _take(self, mailbox: Mailbox) -> tuple[SequencedMessage, ...]:
        last_sequence = mailbox.sequence
        deliveries = mailbox.take()
        gaps = [
            message.body
            for message in deliveries
            if message.sequence > last_sequence and isinstance(message.body, MailboxOverflow)
        ]
        fresh = mailbox.sequence - last_sequence
        self._counts.update(deliveries=fresh, redeliveries=len(deliveries) - fresh)
        self._counts.update(gaps=len(gaps), dropped=sum(gap.dropped for gap in gaps))
        return deliveries


def _parse_subscriber_id(subscriber_id: str) -> tuple[str, int]:
    """Return the agent and the incarnation of an id AGENT.INCARNATION; no agent where it is not such an id."""
    agent, _, incarnation = subscriber_id.rpartition(".")
    return (agent, int(incarnation)) if incarnation.isdecimal() else ("", 0)
