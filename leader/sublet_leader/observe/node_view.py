"""The read-only view of a node for its HTTP port, usable on any thread.

Dictionaries are copied in one step each, so a copy is of one moment, never torn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from msgspec import Struct
from msgspec.structs import asdict

from sublet_leader.group.machine import GroupLeader
from sublet_leader.node.machine import Node
from sublet_leader.node.notification_hub import NotificationHub
from sublet_leader.observe.health import Health, evaluate_health
from sublet_leader.observe.health_signals import HealthSignals
from sublet_leader.settings import LeaderSettings
from sublet_protocol.pubsub.server import PubSubServer
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.node_directory import NodeIncarnation


class NodeView(Struct, frozen=True):
    """One node."""

    ref: NodeIncarnation
    settings: LeaderSettings
    health_signals: HealthSignals
    machine: Node
    sessions: PubSubServer
    hub: NotificationHub | None

    @property
    def version(self) -> str:
        """Return the release that it runs."""
        return installed_version()

    def health(self) -> Health:
        """Return the health at this moment."""
        return evaluate_health(self.health_signals, self.settings)

    def leaders(self) -> dict[int, GroupLeader]:
        """Return {group id: leader} of the groups that it may act for now; two nodes never have the same."""
        now = self.health_signals.clock()
        leaders = tuple(self.machine.leaders.items())
        return {
            group_id: leader
            for group_id, leader in leaders
            if self.machine.election.trusted_term(group_id, now) == leader.term
        }

    def is_maintenance_leader(self) -> bool:
        """Return whether the node leads the maintenance."""
        return self.machine.election.trusted_term(MAINTENANCE, self.health_signals.clock()) is not None

    def leadership_counts(self) -> Mapping[str, int]:
        """Return {status: number of leaderships}."""
        return Counter(status.value for status in self.machine.election.statuses())

    def agent_count(self) -> int:
        """Return the number of connected agents."""
        return len(self.sessions.machine.subscriber_ids)

    def session_counters(self) -> dict[str, int]:
        """Return the counters of its node connections."""
        counts = {"foreign_pings": self.machine.foreign_pings, "dropped_requests": self.machine.query_counts.refused}
        return {**asdict(self.sessions.counters), **counts}

    def notification_counters(self) -> dict[str, int]:
        """Return the counters of notifications; empty where nothing is pushed."""
        return {} if self.hub is None else self.hub.subscriber.counters()

    def subscribed_stream_count(self) -> int:
        """Return the number of streams with subscribers here."""
        return 0 if self.hub is None else self.hub.subscribed_stream_count


@cache
def installed_version() -> str:
    """Return the version of the installed distribution."""
    try:
        return version("sublet")
    except PackageNotFoundError:
        return "unknown"
