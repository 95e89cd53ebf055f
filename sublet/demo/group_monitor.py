"""The demo's view of its group, from the tables that `sublet groups describe` reads."""

from __future__ import annotations

from typing import Self

from sublet.demo.flights import SUBSCRIPTION
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import HistoryRecord, LendingStatus
from sublet_storage.groups.status.overview import describe_group
from sublet_storage.groups.status.overview_model import GroupOverview, StreamView


class DemoGroupMonitor:
    """Reads the group; it changes nothing but creates the group."""

    def __init__(self, url: str) -> None:
        self._subscription = Subscription.parse(SUBSCRIPTION)
        self._groups = PostgresGroupStore(url)
        self._connection = connect(url, application_name="sublet demo")
        self._group = self._groups.open_group(self._subscription)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._groups.close()
        self._connection.close()

    def read(self) -> GroupOverview:
        """Return the present overview of the group."""
        return describe_group(self._connection, self._subscription)

    def history(self) -> list[HistoryRecord]:
        """Return the history of its lendings, oldest first."""
        return list(self._groups.history(self._group.group_id))


def list_holders(seen: GroupOverview) -> set[str]:
    """Return the agents that hold streams."""
    return {line.agent for line in _held(seen) if line.agent}


def count_consumed(seen: GroupOverview) -> int:
    """Return the number of messages that are durably consumed."""
    return sum(line.position for line in seen.streams)


def find_busiest(seen: GroupOverview) -> tuple[str, list[int]]:
    """Return the agent with the highest lag, and its streams that have some; ("", []) if there is none."""
    left: dict[str, int] = {}
    streams: dict[str, list[int]] = {}
    for line in _held(seen):
        if line.agent and line.lag:
            left[line.agent] = left.get(line.agent, 0) + line.lag
            streams.setdefault(line.agent, []).append(line.stream_id)
    agent = max(left, key=lambda a: left[a], default="")
    return agent, streams.get(agent, [])


def _held(seen: GroupOverview) -> list[StreamView]:
    return [line for line in seen.streams if line.status == LendingStatus.HELD]
