"""Reports what a kill led to: the new leader, and the new holders."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sublet.demo.holding_intervals import format_worker
from sublet_storage.groups.status.overview_model import GroupOverview


class TakeoverReporter:
    """Reports takeovers: `report` is called once with each step. It reads nothing: `update` gets every view of the
    group."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._leader: str | None = None
        self._dead: str | None = None
        self._orphans: frozenset[int] = frozenset()

    def on_kill(self, agent: str, streams: Iterable[int]) -> None:
        """Record that this agent's process was killed, which had these streams."""
        self._dead, self._orphans = agent, frozenset(streams)

    def update(self, overview: GroupOverview) -> None:
        """Report the changes in this view of the group."""
        self._report_leader(overview)
        self._report_streams(overview)

    def _report_leader(self, overview: GroupOverview) -> None:
        if overview.leader is None or not overview.has_leader or overview.leader.node == self._leader:
            return
        if self._leader is not None:
            self._report(f"{overview.leader.node} leads the group now; workers that live keep their streams")
        self._leader = overview.leader.node

    def _report_streams(self, overview: GroupOverview) -> None:
        if self._dead is None:
            return
        streams = [stream for stream in overview.streams if stream.stream_id in self._orphans]
        if all(stream.agent not in (None, self._dead) for stream in streams):
            successors = sorted({format_worker(stream.agent or "") for stream in streams})
            self._report(f"what {format_worker(self._dead)} held is with {', '.join(successors)} now")
            self._dead = None
