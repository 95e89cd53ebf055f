"""A node with many groups on the in-memory twin: no network, Postgres or real time."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from sublet_leader.node.database_request_executor import execute
from sublet_leader.node.events import AgentMessageReceived, DatabaseRequest, NodeEvent, NodeStarted
from sublet_leader.node.machine import Node
from sublet_leader.settings import LeaderSettings
from sublet_protocol.messages.borrower_leader import (
    Grant,
    LeaderWanted,
    Ping,
    StreamProgress,
    ToBorrower,
    UpdateProgress,
)
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.records import Lending
from sublet_storage.node_directory import NodeIncarnation
from tests.support.memory_store.catalogue import MemoryCatalogue
from tests.support.memory_store.groups import MemoryGroupStore

EPOCH_US = 1_700_000_000_000_000
HEAD = 1_000_000_000
SETTINGS = LeaderSettings()


@dataclass(frozen=True, slots=True)
class Size:
    """Size of a node. Every group has an equal share of the borrowers, and a lending for every stream."""

    groups: int
    borrowers: int
    lendings: int

    @property
    def agents(self) -> int:
        """Return the number of agents, each with a borrower in every group."""
        return max(self.borrowers // self.groups, 1)

    @property
    def streams(self) -> int:
        """Return the number of streams of each group."""
        return max(self.lendings // self.groups, 1)


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of processor time."""

    node: float
    twin: float


@dataclass(frozen=True, slots=True)
class ReportBatch:
    """Messages, and the number of streams or borrowers that they are about."""

    events: list[AgentMessageReceived]
    count: int


class Twin:
    """A node, and the store that answers it at once."""

    def __init__(self, size: Size) -> None:
        self.size, self.now = size, 0.0
        streams = MemoryCatalogue()
        streams.add_space(shards=size.streams)
        for stream_id in streams.streams:
            streams.append(stream_id, HEAD)
        self._store: MemoryGroupStore | None = MemoryGroupStore(streams, lambda: EPOCH_US + round(self.now * 1e6))
        self._ref = NodeIncarnation("n", "n#1", "n:1")
        self.node = Node(self._ref, SETTINGS)
        self.grants: dict[tuple[str, int], Grant] = {}
        """Grants by (borrower, stream)."""

    def fill(self) -> None:
        """Let all borrowers join, receive their share of the streams and report it."""
        self.give([NodeStarted()])
        groups = [f"$share/g{number}/#" for number in range(self.size.groups)]
        for agent in (f"agent-{number}" for number in range(self.size.agents)):
            for n, group in enumerate(groups):  # an agent may only wait for some at once
                wanted = LeaderWanted(f"{agent}/{n}", group, starting_position="earliest")
                self.give([AgentMessageReceived(agent, wanted)])
        self.now += SETTINGS.rebalance_debounce_s + 0.001
        self.give([Tick()])
        assert len(self.grants) == self.size.groups * self.size.streams, f"{len(self.grants)} streams are granted"
        self.give([self._report(grant, grant.position) for grant in self.grants.values()])

    def give(self, events: Iterable[NodeEvent]) -> Spent:
        """Process these events, then the store's answers until the node has no more requests."""
        node = twin = 0.0
        requests: list[DatabaseRequest] = []

        def decide(event: NodeEvent) -> float:
            started = time.process_time()
            outcome = self.node.decide(event, self.now)
            seconds = time.process_time() - started
            requests.extend(outcome.requests)
            self._take(outcome.sends)
            return seconds

        for event in events:
            node += decide(event)
        while requests:
            assert self._store is not None
            started = time.process_time()
            answer = execute(requests.pop(0), self._store, self._ref, SETTINGS.lease_duration_s)
            twin += time.process_time() - started
            node += decide(answer)
        return Spent(node, twin)

    def progress(self, count: int, together: int, position: int) -> ReportBatch:
        """Return reports of `count` streams, spread over groups, with `together` streams of one borrower in each
        message."""
        by_borrower: dict[str, list[Grant]] = {}
        for grant in self.grants.values():
            by_borrower.setdefault(grant.borrower_id, []).append(grant)
        reports = [
            UpdateProgress(some[0].borrower_id, some[0].term, _streams(some, position))
            for held in by_borrower.values()
            for some in (held[i : i + together] for i in range(0, len(held), together))
            if len(some) == together
        ]
        step = max(len(reports) // max(count // together, 1), 1)
        chosen = reports[::step][: count // together]
        events = [AgentMessageReceived(report.borrower_id.partition("/")[0], report) for report in chosen]
        return ReportBatch(events, sum(len(report.streams) for report in chosen))

    def pings(self, count: int) -> ReportBatch:
        """Return pings of `count` borrowers, one command for each agent."""
        groups = range(self.size.groups)
        agents = [f"agent-{n}" for n in range(min(self.size.agents, max(count // self.size.groups, 1)))]
        events = [AgentMessageReceived(agent, Ping(tuple(f"{agent}/{n}" for n in groups), 0.0)) for agent in agents]
        return ReportBatch(events, len(agents) * len(groups))

    def rows(self) -> list[Lending]:
        """Return the lendings of all groups as the store loads them."""
        assert self._store is not None
        leaders = self.node.leaders.items()
        return [row for group_id, leader in leaders for row in self._store.load(group_id, leader.term)]

    def forget_store(self) -> None:
        """Remove the store, so that only objects of the node are counted."""
        self._store = None
        self.grants.clear()

    def _take(self, sends: Iterable[tuple[str, ToBorrower]]) -> None:
        for _, message in sends:
            if isinstance(message, Grant):
                self.grants[message.borrower_id, message.stream_id] = message

    @staticmethod
    def _report(grant: Grant, position: int) -> AgentMessageReceived:
        return AgentMessageReceived(
            grant.borrower_id.partition("/")[0],
            UpdateProgress(grant.borrower_id, grant.term, _streams([grant], position)),
        )


def _streams(grants: Iterable[Grant], position: int) -> tuple[StreamProgress, ...]:
    return tuple(StreamProgress(g.stream_id, g.grant_id, position, size=position, lag=0) for g in grants)
