"""lending_history: complete, in order, and enough to say who has what (the issue's point 7; E11)."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from typing import TYPE_CHECKING, Any

from sublet_leader.group.watch_events import GroupWatchEvent
from sublet_storage.groups.model.records import (
    COMMAND,
    EPOCHS_CONSUMED,
    MAINTENANCE,
    TAKEOVER,
    HistoryRecord,
    Leadership,
    Lending,
    LendingStatus,
    OnDataLoss,
)
from tests.simulation.checkers.lives import Key, Lives, Violation
from tests.simulation.sessions import BEYOND_HEAD

if TYPE_CHECKING:
    from tests.simulation.database import WatchedGroups
    from tests.simulation.world import World

_ENDS = ("release", "force_release", "reserve", "finish", "skip", "block", "delete", "reset")
_REASONS_OF_GRANTS = ("allocated", "reserved for its session", "reclaimed")


class Record:
    """Plays history again as it grows: what it says is in force must be what the rows say.

    `twice`: (group, stream, grant id) -> the range that its forced end announced. `since_failover`: (group, stream) ->
    all ranges that were announced since the last one. `ended_without_report`: when a grant
    ended without a message to its holder, by retention, so that it is nobody's, by an operator's forced reset, or by a
    failover; its leader may not have received one either. `skipped`: up to where retention took what nobody had read.
    """

    def __init__(self, world: World, store: WatchedGroups, lives: Lives) -> None:
        self._world, self._store, self._lives = world, store, lives
        self._read = 0
        self._lines: set[HistoryRecord] = set()
        self._in_force: dict[Key, HistoryRecord] = {}
        self._terms: dict[int, int] = {}
        self._positions: dict[Key, int] = {}
        self.twice: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.since_failover: dict[Key, list[tuple[int, int]]] = {}
        self.ended_without_report: dict[tuple[int, int, int], float] = {}
        self.skipped: dict[Key, int] = {}
        self._lowest_head: dict[int, int] = {}
        self._reserved: dict[Key, set[int]] = {}

    def saved(self) -> tuple[Any, ...]:
        return deepcopy((self._read, self._in_force, self._positions, self.skipped, self._reserved))

    def failed_over(self, saved: tuple[Any, ...], fenced: bool) -> None:
        """History is as it was then; neither holders of what was granted nor leaders are notified of it."""
        self.since_failover.clear()
        grants = {(*key, line.grant_id) for key, line in self._in_force.items()} if fenced else set()
        self._read, self._in_force, self._positions, self.skipped, self._reserved = saved
        grants |= {(*key, line.grant_id) for key, line in self._in_force.items()} if fenced else set()
        self.ended_without_report.update(dict.fromkeys(grants, self._world.now))

    def claimed(self, before: Leadership | None, claim: Leadership) -> None:
        """Who takes a group from another incarnation, or is its first leader, is in history with its term."""
        taken = before is None or before.node.incarnation != claim.node.incarnation
        new = before is None or before.term != claim.term
        if new and before is not None and claim.term <= before.term:
            raise Violation(f"the term fell: {before}, then {claim}")
        if new and taken and claim.leadership_id != MAINTENANCE:
            last = self._store.lines[-1] if self._store.lines else None
            if last is None or (last.event, last.group_id, last.term) != (TAKEOVER, claim.leadership_id, claim.term):
                raise Violation(f"{claim} is not in history, the last line is {last}")
        self.read_on()

    def read_on(self) -> None:
        lines = self._store.lines
        while self._read < len(lines):
            self._take(lines[self._read])
            self._read += 1

    def deleted(self, group_id: int) -> None:
        """An operator has deleted the group: history has recorded the end of each of its grants."""
        self.read_on()
        left = [line for (group, _), line in self._in_force.items() if group == group_id]
        if left:
            raise Violation(f"group {group_id} is deleted, but history says that these are in force: {left}")

    def reported(self, happened: Iterable[GroupWatchEvent]) -> None:
        """Who watches a group receives what is in history, and of nothing that a leader merely wished."""
        for each in happened:
            if each.record.at_us and each.record not in self._lines:
                raise Violation(f"reported, but not in history: {each}")

    def compare(self, group_id: int, rows: Iterable[Lending]) -> None:
        """Rows that a transaction has just answered are as history says."""
        for row in rows:
            line = self._in_force.get((group_id, row.stream_id))
            held = row.status is LendingStatus.HELD
            said = (line.grant_id, line.borrower_id) if line else None
            if said != ((row.grant_id, row.borrower_id) if held else None):
                raise Violation(f"history says that in force is {said}, group {group_id} says {row}")

    def _take(self, line: HistoryRecord) -> None:
        if not line.reason or line.term < self._terms.get(line.group_id, 0):
            raise Violation(f"without a reason, or under an older term than the line before: {line}")
        self._terms[line.group_id] = line.term
        self._lines.add(line)
        key = line.group_id, line.stream_id
        before = self._in_force.get(key)
        if line.event in (TAKEOVER, EPOCHS_CONSUMED, COMMAND):
            return
        if line.redelivery_end is not None:
            self.since_failover.setdefault(key, []).append((line.position, line.redelivery_end))
        if line.event == "failover":
            return
        if line.event == "grant":
            if before is not None:
                raise Violation(f"granted anew, but nothing says that the last grant is over: {before}, then {line}")
            self._in_force[key] = line
        elif line.event in _ENDS:
            self._end(key, before, line)
        elif line.event == "unreserve":
            self._free(key, before, line)
        else:
            self._go_on(key, before, line)

    def _go_on(self, key: Key, before: HistoryRecord | None, line: HistoryRecord) -> None:
        if before is None or before.grant_id != line.grant_id:
            raise Violation(f"about a grant that is not in force: {line}, but {before}")
        if line.event == "reclaim":
            if before.agent != line.agent:
                raise Violation(f"reclaimed by another agent: {before}, then {line}")
            self._in_force[key] = line
        elif line.event != "revoke":
            raise Violation(f"nobody knows this event: {line}")

    def head_lowered(self, stream_id: int, head: int) -> None:
        """The stream has ended there for a while."""
        self._lowest_head[stream_id] = min(head, self._lowest_head.get(stream_id, head))

    def _check_gone(self, line: HistoryRecord) -> None:
        """Nothing is passed over, nor blocked, but what retention has taken, and passed over only where that is
        wanted; what a failover, or a lower head, has cost is blocked, where that was seen. (Here no block is broken,
        and no loss too many.)"""
        stream = self._store.streams.streams[line.stream_id]
        lowest = min(stream.head, self._lowest_head.get(line.stream_id, stream.head))
        if line.event == "block" and (line.position > lowest or line.reason == BEYOND_HEAD):
            return
        gone = stream.generation.gone
        skips = self._lives[line.group_id].group.options.on_data_loss is OnDataLoss.SKIP
        if not gone or skips != (line.event == "skip"):
            raise Violation(f"{line}, of messages that {'are gone' if gone else 'are there'}, in a group with {skips=}")

    def _free(self, key: Key, before: HistoryRecord | None, line: HistoryRecord) -> None:
        """What was kept for a session is kept no more, and what it had planned may be seen twice."""
        if before is not None or key not in self._reserved or line.redelivery_end is None:
            raise Violation(f"given up, but nothing was kept, or without saying what may be seen twice: {line}")
        self._announce(key, line, self._reserved.pop(key))

    def _announce(self, key: Key, line: HistoryRecord, grants: Iterable[int]) -> None:
        """What was seen under any of these may be seen twice, where the line says so."""
        if line.redelivery_end is not None:
            self.twice.update({(*key, grant_id): (line.position, line.redelivery_end) for grant_id in grants})

    def _end(self, key: Key, before: HistoryRecord | None, line: HistoryRecord) -> None:
        if (before is not None or line.event in ("release", "force_release", "reserve", "delete")) and (
            before is None or before.grant_id != line.grant_id or before.borrower_id != line.borrower_id
        ):
            raise Violation(f"the end of a grant that is not in force: {line}, but {before}")
        if line.reason in _REASONS_OF_GRANTS:
            raise Violation(f"why a grant began is not why it ended: {line}")
        if line.position < self._positions.get(key, 0) and line.event != "reset":
            raise Violation(f"a position of history went back from {self._positions[key]}: {line}")
        if line.is_forced != (line.redelivery_end is not None) or (line.event == "force_release") > line.is_forced:
            raise Violation(f"forced, or not, without saying what may be seen twice: {line}")
        self._positions[key] = line.position
        if before is not None and line.event == "reset":
            self.ended_without_report[(*key, before.grant_id)] = self._world.now
        self._in_force.pop(key, None)
        given_up = self._reserved.pop(key, set()) if line.event == "reset" else set()
        self._announce(key, line, {line.grant_id, *given_up})
        if line.event == "reserve":
            doubt = self._store.rows(line.group_id)[line.stream_id].in_doubt
            planned_under = {line.grant_id} if doubt is None else {line.grant_id, doubt.grant_id}
            self._reserved.setdefault(key, set()).update(planned_under)
        if line.event in ("skip", "block"):
            self._check_gone(line)
            self.ended_without_report[(*key, line.grant_id)] = self._world.now
        if line.event == "skip":
            self.skipped[key] = self._store.streams.streams[line.stream_id].head
