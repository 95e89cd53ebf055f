"""What the HTTP port may look at of the node it belongs to. Reading only, on any thread, without asking its loop.

Copies of dictionaries are made in one step each, so what is read is of one moment or the next, never torn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from sublet_leader.group.machine import GroupLeader
from sublet_leader.node.machine import Node
from sublet_leader.node.notification_hub import Hub
from sublet_leader.observe.health import Health, judge
from sublet_leader.observe.health_signals import Vitals
from sublet_leader.settings import LeaderSettings
from sublet_protocol.pubsub.server import SessionServer
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.nodes import NodeRef


@dataclass(frozen=True, slots=True)
class Facts:
    """One node."""

    ref: NodeRef
    settings: LeaderSettings
    vitals: Vitals
    machine: Node
    sessions: SessionServer
    hub: Hub | None

    @property
    def version(self) -> str:
        """The release that it runs."""
        return release()

    def health(self) -> Health:
        """How it is."""
        return judge(self.vitals, self.settings)

    def leaders(self) -> dict[int, GroupLeader]:
        """The groups that it may act for at this moment, by id; two nodes never have the same."""
        now = self.vitals.clock()
        found = tuple(self.machine.leaders.items())
        return {group_id: each for group_id, each in found if self.machine.election.trusted(group_id, now) == each.term}

    def keeps_house(self) -> bool:
        """It does what one node does for all."""
        return self.machine.election.trusted(MAINTENANCE, self.vitals.clock()) is not None

    def standings(self) -> Mapping[str, int]:
        """How many leaderships stand where."""
        return Counter(status.value for status in self.machine.election.statuses())

    def agents(self) -> int:
        """How many are connected."""
        return len(self.sessions.publisher.subscriber_ids)

    def session_counters(self) -> dict[str, int]:
        """What has happened between it and its agents."""
        return asdict(self.sessions.counters)

    def news(self) -> dict[str, int]:
        """How news came; empty where nothing is pushed."""
        return {} if self.hub is None else self.hub.ears.counters()

    def followed(self) -> int:
        """Streams that somebody here follows."""
        return 0 if self.hub is None else self.hub.following


@cache
def release() -> str:
    """Of the installed distribution."""
    try:
        return version("sublet")
    except PackageNotFoundError:
        return "unknown"
