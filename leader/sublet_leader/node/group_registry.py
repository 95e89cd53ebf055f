"""Groups known to a node: their ids, waiting borrowers, and each borrower's group."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from msgspec import Struct, field

from sublet_leader.group.machine import GroupLeader
from sublet_leader.node.caller_count_limit import CallerCountLimit
from sublet_leader.node.events import AgentMessageReceived
from sublet_protocol.domain.limits import MAX_BORROWERS_OF_NODE, MAX_BORROWERS_OF_PRINCIPAL
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import LeaderWanted
from sublet_storage.groups.model.records import Group

REDIRECT_EXPIRY_S = 1.0
"""How long borrowers that were sent to another node are remembered; then they have found its leader, or retry."""

BorrowerKey = tuple[str, str]
"""(agent, borrower id): an agent cannot refer to another's borrower."""


class _GroupEntry(Struct):
    """One subscription that was requested."""

    group: Group | None = None
    opening_for: str | None = None
    asked_at: float = 0.0
    waiting: dict[BorrowerKey, tuple[AgentMessageReceived, float]] = field(default_factory=dict)
    sent_on: dict[BorrowerKey, tuple[AgentMessageReceived, float]] = field(default_factory=dict)


class GroupRegistry:
    """Tracks groups in memory only: everything in it can be requested again, so it may be dropped at any time.
    `query_counts`: the node's bound on concurrent queries."""

    def __init__(self, query_counts: CallerCountLimit) -> None:
        self._query_counts = query_counts
        self._entries: dict[Subscription, _GroupEntry] = {}
        self._by_id: dict[int, Group] = {}
        self._group_by_borrower: dict[BorrowerKey, int] = {}
        self._subscriptions: dict[BorrowerKey, Subscription] = {}
        self._callers: dict[BorrowerKey, str] = {}
        self._borrower_counts = CallerCountLimit(MAX_BORROWERS_OF_PRINCIPAL, MAX_BORROWERS_OF_NODE)
        self._check_at = float("inf")

    def __len__(self) -> int:
        return len(self._entries)

    def find_group(self, subscription: Subscription) -> Group | None:
        """Return the group as it was opened; None if it was not."""
        entry = self._entries.get(subscription)
        return entry.group if entry else None

    def find_group_by_id(self, group_id: int) -> Group | None:
        """Return the group of that id; None if it was not opened here."""
        return self._by_id.get(group_id)

    def add_waiter(
        self, subscription: Subscription, received: AgentMessageReceived, borrower_id: str, now: float
    ) -> str:
        """Add a borrower that waits for the leader; a repeated request replaces the one before, also for another
        group, and that of its predecessor. Return "", or why it cannot be added."""
        borrower = received.agent, borrower_id
        if borrower not in self._callers:
            if not self._borrower_counts.add(received.caller):
                return (
                    f"{received.caller} has as many sessions at this node as it may, or all together have. Close some."
                )
            self._callers[borrower] = received.caller
        if isinstance(received.message, LeaderWanted):
            self.remove_waiter(received.agent, received.message.predecessor or "")
        if self._subscriptions.get(borrower) != subscription:
            self.remove_waiter(*borrower)
        self._subscriptions[borrower] = subscription
        entry = self._entries.setdefault(subscription, _GroupEntry())
        entry.asked_at = now
        entry.waiting[borrower] = received, now
        entry.sent_on.pop(borrower, None)
        self._check_at = min(self._check_at, now + 1.0)
        return ""

    def remove_waiter(self, agent: str, borrower_id: str) -> None:
        """Remove a borrower that may be waiting."""
        subscription = self._subscriptions.pop((agent, borrower_id), None)
        if subscription is not None:
            entry = self._entries[subscription]
            entry.waiting.pop((agent, borrower_id), None)
            entry.sent_on.pop((agent, borrower_id), None)

    def remove_agents(self, agents: Collection[str]) -> None:
        """Remove what borrowers of these agents wait for."""
        for borrower in [borrower for borrower in self._subscriptions if borrower[0] in agents]:
            self.remove_waiter(*borrower)

    def remove_group(self, group: Group) -> tuple[AgentMessageReceived, ...]:
        """Remove a deleted group, so that its subscription can have a new one. Return all waiting requests, once."""
        waiting = self.take_waiters(group.subscription)
        self.finish_opening(group.subscription, None)
        self._by_id.pop(group.group_id, None)
        return tuple(received for received, _ in waiting)

    def begin_opening(self, subscription: Subscription, caller: str) -> bool:
        """Return whether the caller has to open the group; False while that is under way. At the bound on queries an
        unknown group is dropped: its borrowers request it again."""
        entry = self._entries[subscription]
        if entry.opening_for is not None:
            return False
        if not self._query_counts.add(caller):
            if entry.group is None:
                self.remove_subscription(subscription)
            return False
        entry.opening_for = caller
        return True

    def remove_subscription(self, subscription: Subscription) -> None:
        """Remove a subscription whose group is unknown, and what waits for it."""
        self.take_waiters(subscription)
        del self._entries[subscription]

    def finish_opening(self, subscription: Subscription, group: Group | None) -> None:
        """Store the opened group, None if that failed. Another one with its id was lost by a failover."""
        if group is not None:
            former_entry = self._entries.get(self._by_id.get(group.group_id, group).subscription)
            if former_entry is not None:
                former_entry.group = None
            self._by_id[group.group_id] = group
        entry = self._entries.setdefault(subscription, _GroupEntry())
        if entry.opening_for is not None:
            self._query_counts.remove(entry.opening_for)
        entry.group, entry.opening_for = group, None

    def take_waiters(
        self, subscription: Subscription, since: float = float("-inf")
    ) -> tuple[tuple[AgentMessageReceived, str], ...]:
        """Return the waiting requests, once, and those that were just sent on; not those older than `since`: their
        borrowers are gone, or will repeat them."""
        entry = self._entries.get(subscription)
        if entry is None:
            return ()
        requests = entry.sent_on | entry.waiting
        entry.sent_on, entry.waiting = {}, {}
        for borrower in requests:
            del self._subscriptions[borrower]
        return tuple((h, b) for (_, b), (h, at) in requests.items() if at >= since)

    def send_on(self, subscription: Subscription) -> tuple[tuple[AgentMessageReceived, str], ...]:
        """Return the waiting requests, once, as another node leads. They are kept for a while: if this node leads soon,
        they need not be repeated."""
        entry = self._entries.get(subscription)
        if entry is None:
            return ()
        requests, entry.waiting = entry.waiting, {}
        entry.sent_on |= requests
        return tuple((h, b) for (_, b), (h, _) in requests.items())

    def bind_borrower(self, agent: str, borrower_id: str, group_id: int) -> None:
        """Route the borrower's messages to that group's leader."""
        self._group_by_borrower[agent, borrower_id] = group_id

    def group_of_borrower(self, agent: str, borrower_id: str) -> int | None:
        """Return the id of the borrower's group; None if there is none."""
        return self._group_by_borrower.get((agent, borrower_id))

    def take_idle_groups(self, now: float, idle_s: float, leaders: Mapping[int, GroupLeader]) -> tuple[Group, ...]:
        """Remove and return groups that are not led here and were not requested for `idle_s`; also drops borrowers
        whose leaders are over or have dropped them, at once: many groups may end together. Checked once a second."""
        if now < self._check_at:
            return ()
        self._group_by_borrower = {
            borrower: group_id
            for borrower, group_id in self._group_by_borrower.items()
            if group_id in leaders and leaders[group_id].knows_borrower(borrower[1])
        }
        for entry in self._entries.values():
            for borrower in [b for b, (_, at) in entry.sent_on.items() if at <= now - REDIRECT_EXPIRY_S]:
                del entry.sent_on[borrower], self._subscriptions[borrower]
        stale = [s for s, k in self._entries.items() if self._is_stale(k, now - idle_s, leaders)]
        for subscription in stale:
            self.take_waiters(subscription)
        dropped = [self._entries.pop(subscription) for subscription in stale]
        members = {b for b, group_id in self._group_by_borrower.items() if leaders[group_id].members.get(b[1])}
        for borrower in self._callers.keys() - self._subscriptions.keys() - members:
            self._borrower_counts.remove(self._callers.pop(borrower))
        self._check_at = now + 1.0 if self._entries else float("inf")
        groups = tuple(entry.group for entry in dropped if entry.group is not None)
        for group in groups:
            self._by_id.pop(group.group_id, None)
        return groups

    @staticmethod
    def _is_stale(entry: _GroupEntry, cutoff: float, leaders: Mapping[int, GroupLeader]) -> bool:
        led = entry.group is not None and entry.group.group_id in leaders
        return not (led or entry.opening_for) and entry.asked_at <= cutoff

    def wake_at(self) -> float:
        """Return when to call `take_idle_groups` again."""
        return self._check_at
