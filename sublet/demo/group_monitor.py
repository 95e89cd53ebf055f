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

    def read_history(self) -> list[HistoryRecord]:
        """Return the history of its lendings, oldest first."""
        return list(self._groups.history(self._group.group_id))


def list_holders(overview: GroupOverview) -> set[str]:
    """Return the agents that hold streams."""
    return {stream.agent for stream in _list_held(overview) if stream.agent}


def count_consumed(overview: GroupOverview) -> int:
    """Return the number of messages that are durably consumed."""
    return sum(stream.position for stream in overview.streams)


def find_busiest(overview: GroupOverview) -> tuple[str, list[int]]:
    """Return the agent with the highest lag, and its streams that have some; ("", []) if there is none."""
    lags: dict[str, int] = {}
    streams: dict[str, list[int]] = {}
    for stream in _list_held(overview):
        if stream.agent and stream.lag:
            lags[stream.agent] = lags.get(stream.agent, 0) + stream.lag
            streams.setdefault(stream.agent, []).append(stream.stream_id)
    agent = max(lags, key=lambda a: lags[a], default="")
    return agent, streams.get(agent, [])


def _list_held(overview: GroupOverview) -> list[StreamView]:
    return [stream for stream in overview.streams if stream.status == LendingStatus.HELD]
