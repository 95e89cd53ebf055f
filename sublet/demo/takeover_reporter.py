"""Reports what a kill led to: the new leader, and the new holders."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from sublet.demo.holding_intervals import worker_of
from sublet_storage.groups.status.overview_model import GroupOverview


class TakeoverReporter:
    """Reports takeovers: `say` is called once with each step. It reads nothing: `update` gets every view of the
    group."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._leader: str | None = None
        self._dead: str | None = None
        self._orphans: frozenset[int] = frozenset()

    def on_kill(self, agent: str, streams: Iterable[int]) -> None:
        """Record that this agent's process was killed, which had these streams."""
        self._dead, self._orphans = agent, frozenset(streams)

    def update(self, seen: GroupOverview) -> None:
        """Report the changes in this view of the group."""
        self._report_leader(seen)
        self._report_streams(seen)

    def _report_leader(self, seen: GroupOverview) -> None:
        if seen.leader is None or not seen.has_leader or seen.leader.node == self._leader:
            return
        if self._leader is not None:
            self._report(f"{seen.leader.node} leads the group now; workers that live keep their streams")
        self._leader = seen.leader.node

    def _report_streams(self, seen: GroupOverview) -> None:
        if self._dead is None:
            return
        lines = [line for line in seen.streams if line.stream_id in self._orphans]
        if all(line.agent not in (None, self._dead) for line in lines):
            heirs = sorted({worker_of(line.agent or "") for line in lines})
            self._report(f"what {worker_of(self._dead)} held is with {', '.join(heirs)} now")
            self._dead = None
