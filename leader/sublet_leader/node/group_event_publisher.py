"""Publishes group events to watchers as JSON, and answers leader queries; pure.

Most are history records as a commit has written them. Joins and leaves of members, and leader changes, are only in a
leader's memory: those records are in no table, and have the time of the node's clock when they are sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct

from sublet_leader.group.members import Member
from sublet_leader.group.watch_events import GroupWatchEvent
from sublet_leader.node.caller_count_limit import CallerCountLimit
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_protocol.messages.head_and_group_events import LEADER, GroupEventPayload
from sublet_protocol.pubsub.model import Channel
from sublet_storage.groups.model.lending_row import MICROSECONDS
from sublet_storage.groups.model.records import Group, Leadership

MAX_MEMBERS = 1_000
"""Maximum number of members listed of a group; of more, these."""
MAX_QUERIES = 1_000
MAX_QUERIES_OF_CALLER = 50
"""Most groups, leaders and names of sessions queried at a time for one principal, or agent of none; `MAX_QUERIES` for
all. Further queries are repeated."""


class WatcherLeaderQueryReply(Struct, frozen=True):
    """The answer to the leader queries of these subscribers, the same for all of them: no `group` of that subscription,
    or no `leadership` on it that is in force. `members`: all that are connected, if it is led here."""

    subscriber_ids: tuple[str, ...]
    subscription: str
    group: Group | None
    leadership: Leadership | None
    members: tuple[Member, ...] | None = None


class LeaderLookups:
    """Leader queries in progress; each subscription is looked up once for all queries meanwhile. `query_counts`: the
    node's bound on concurrent queries."""

    def __init__(self, query_counts: CallerCountLimit) -> None:
        self._query_counts = query_counts
        self._waiting: dict[Subscription, tuple[str, dict[str, None]]] = {}

    def add(self, subscription: Subscription, subscriber_id: str | None, caller: str) -> bool:
        """Add a query; return whether it is to be looked up now. Subscriber None: the node itself. A lookup counts for
        the first caller."""
        is_first = subscription not in self._waiting
        if is_first and not self._query_counts.add(caller):
            return False
        _, subscribers = self._waiting.setdefault(subscription, (caller, {}))
        if subscriber_id is not None:
            subscribers[subscriber_id] = None
        return is_first

    def complete(
        self,
        subscription: Subscription,
        group: Group | None,
        claim: Leadership | None,
        members: Iterable[Member] | None,
    ) -> list[WatcherLeaderQueryReply]:
        """Return the answer to all queries of that subscription; none where nobody but the node has queried."""
        alive = claim if claim is not None and claim.remaining_s > 0 else None
        connected = None if alive is None or members is None else tuple(members)
        subscriber_ids = self.cancel(subscription)
        answer = WatcherLeaderQueryReply(subscriber_ids, str(subscription), group, alive, connected)
        return [answer] if subscriber_ids else []

    def cancel(self, subscription: Subscription) -> tuple[str, ...]:
        """Drop the queries of that subscription, and return whose they were. Without an answer of the database they are
        repeated."""
        if subscription not in self._waiting:
            return ()
        caller, subscribers = self._waiting.pop(subscription)
        self._query_counts.remove(caller)
        return tuple(subscribers)


class GroupEventPublisher:
    """Publishes the events of watched groups only. `node`: its name; `now_us`: microseconds since 1970 by the node's
    clock."""

    def __init__(self, node: str, publish: Callable[[str, str, object], object], now_us: Callable[[], int]) -> None:
        self._node, self._publish, self._now_us = node, publish, now_us
        self._keys: set[str | None] = set()

    def set_interest(self, key: str | None, is_watched: bool) -> None:
        """Record that a watcher of that group (None: of all) has come, or the last has gone."""
        (self._keys.add if is_watched else self._keys.discard)(key)

    def publish(self, events: Iterable[GroupWatchEvent]) -> None:
        """Send the events to all watchers, in this order."""
        for event in events:
            if event.subscription in self._keys or None in self._keys:
                payload = to_group_event(event, self._node, event.record.at_us or self._now_us())
                self._publish(Channel.GROUP, event.subscription, payload)

    def leader_event(self, whereabouts: WatcherLeaderQueryReply) -> GroupEventPayload:
        """Return the answer to a leader query."""
        group, claim = whereabouts.group, whereabouts.leadership
        fields: dict[str, Any] = {
            "at": str(StartingPosition.at_time(self._now_us())),
            "event": LEADER,
            "group_id": group.group_id if group else None,
            "subscription": whereabouts.subscription,
            "node": claim.node.name if claim else None,
            "term": claim.term if claim else None,
            "address": claim.node.address if claim else None,
            "answered_by": self._node,
        }
        if whereabouts.members is not None:
            members = sorted(whereabouts.members, key=lambda member: member.borrower_id)[:MAX_MEMBERS]
            fields["members"] = [member.to_public_dict for member in members]
        return GroupEventPayload(json.dumps(fields).encode())


def to_group_event(event: GroupWatchEvent, node: str, at_us: int) -> GroupEventPayload:
    """Return the record as JSON, without the fields that do not apply to it (docs/groups.md)."""
    fields = {**event.to_json(), "at": str(StartingPosition.at_time(at_us)), "node": node}
    return GroupEventPayload(json.dumps(fields).encode())


def parse_leader_query(event: GroupEventPayload) -> Subscription:
    """Return the subscription that an agent queries, `{"watch": SUBSCRIPTION}`. Raise `UsageError`."""
    try:
        query = json.loads(event.payload)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"an agent's event must be JSON: {error}") from None
    if not isinstance(query, dict) or not isinstance(query.get("watch"), str):
        raise UsageError('a node takes no events from agents but {"watch": SUBSCRIPTION}: the others are its own.')
    return Subscription.parse_stored(query["watch"])  # it may be an old group, with control characters


def to_microseconds(seconds: float) -> int:
    """Return a time of the system's clock in microseconds, as the store has it."""
    return round(seconds * MICROSECONDS)
