"""The database: the product's in-memory twin with checkers, each node's unreliable connection to it, and failovers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from msgspec import structs

from sublet_leader.node.database_request_executor import execute, failure_answer
from sublet_leader.node.events import DatabaseRequest, NodeEvent
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.admin.progress_transfer import ExportedPosition, ExportedProgress
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.model.history_record_builder import to_history_record
from sublet_storage.groups.model.lending_row import FAILED_OVER, LendingRow, make_history_event
from sublet_storage.groups.model.records import (
    ForceRelease,
    Group,
    GroupWriteResult,
    GroupWrites,
    HistoryRecord,
    LeaderLivenessLock,
    Leadership,
    LendingStatus,
)
from sublet_storage.node_directory import NodeIncarnation
from tests.simulation.publishing import PublisherFrontier
from tests.simulation.world import Happenings, World
from tests.support.memory_store.catalogue import MemoryCatalogue
from tests.support.memory_store.groups import MemoryGroupStore, _Life

if TYPE_CHECKING:
    from tests.simulation.checkers import Checkers
    from tests.simulation.simulation import Simulation


NO_ANSWER_S = 0.8
"""Timeout of a statement without a reply, as by the default settings."""
FENCED = True
"""Whether a term ends with its timeline."""
_RETRY_INTERVAL_S = 1.5


class WatchedGroups(MemoryGroupStore):
    """The twin, which passes requests and answers to the checkers."""

    checkers: Checkers

    def __init__(self, streams: MemoryCatalogue, world: World) -> None:
        super().__init__(streams, world.clock_us)
        self._world = world
        self.on_sync: Callable[[int], None] = lambda group_id: None
        self._timelines: dict[int, int] = {}

    @property
    def lines(self) -> Sequence[HistoryRecord]:
        """Return all of the history, oldest first."""
        return self._history

    def is_led(self, group_id: int, incarnation: str, term: int) -> bool:
        """Return whether that leadership is current and its lease valid; cheaper than reading it, for frequent
        checks."""
        held = self._leaderships[group_id]
        in_force = held.node.incarnation == incarnation and held.term == term
        return in_force and held.expires_us > self._world.clock_us()

    def opened(self, group: Group) -> None:
        self._timelines[group.group_id] = self.timeline
        self.checkers.opened(group)

    def delete_group(self, subscription: Subscription, user: str = "", group_id: int | None = None) -> int | None:
        group_id = super().delete_group(subscription, user, group_id)
        if group_id is not None:
            self.checkers.deleted(group_id)
        return group_id

    def claim(
        self,
        leadership_id: int,
        node: NodeIncarnation,
        lease_s: float,
        lock_key: int | None = None,
        rival: LeaderLivenessLock | None = None,
    ) -> Leadership:
        before = self.read_leaderships([leadership_id]).get(leadership_id)
        older = self.is_older(leadership_id)
        if before is not None and older:
            self._leaderships[leadership_id].expires_us = 0
        claim = super().claim(leadership_id, node, lease_s, lock_key, rival)
        self._timelines[leadership_id] = self.timeline
        self.checkers.claimed(before, claim)
        if before is not None and before.remaining_s > 0 and not older and claim.term != before.term:
            self.checkers.authority.claimed_by_lock(before)
        if older and leadership_id in self._lives:
            self._seize_all(leadership_id, claim.term)
        return claim

    def written(self, batch: Sequence[GroupWrites], results: Sequence[GroupWriteResult]) -> None:
        for writes, result in zip(batch, results, strict=True):
            if writes.needs_stream_sync and not result.has_stale_term:
                self.on_sync(writes.group_id)
        self.checkers.committed(batch, results)

    # --- failovers --------------------------------------------------------------------------------------------------

    def saved(self) -> tuple[Any, ...]:
        """Return a copy of what a standby has."""
        lives = {group_id: life.copied() for group_id, life in self._lives.items()}
        leaderships = {i: replace(row) for i, row in self._leaderships.items()}
        return lives, leaderships, list(self._history), dict(self._timelines)

    def restore(self, saved: tuple[Any, ...], fenced: bool) -> None:
        """Continue from that copy, as after a failover; `fenced`: terms end with their timeline."""
        lives, self._leaderships, self._history, self._timelines = saved
        # The ids of groups that it lacks are not reused, as with a sequence that is ahead of its rows.
        lost = {i: replace(life, deleted=True, rows={}) for i, life in self._lives.items() if i not in lives}
        self._lives = lives | lost
        self.timeline += fenced
        self.locked.clear()

    def is_older(self, leadership_id: int) -> bool:
        """Return whether it was elected on another timeline."""
        return self._timelines.get(leadership_id, 0) != self.timeline

    def _has_stale_term(self, leadership_id: int, term: int, now: int) -> bool:
        return self.is_older(leadership_id) or super()._has_stale_term(leadership_id, term, now)

    def _own(self, node: NodeIncarnation, terms: Mapping[int, int]) -> list[int]:
        return [i for i in super()._own(node, terms) if not self.is_older(i)]

    def _seize_all(self, group_id: int, term: int) -> None:
        """End all grants of the previous timeline; streams that were free may have been granted on it."""
        now, rows = self._clock(), self._lives[group_id].rows
        if not self._lives[group_id].deleted:
            self._add_rows(self._lives[group_id])
        for row in [row for row in rows.values() if row.status is not LendingStatus.FINISHED]:
            if not row.grant_id:
                rows[row.stream_id] = replace(row, grant_id=1)
            if row.status is LendingStatus.HELD:
                self._change(ForceRelease(row.stream_id, row.grant_id, FAILED_OVER), row, term, now)
                self.checkers.authority.was_seized((group_id, row.stream_id))
            after = rows[row.stream_id]
            if row.status is LendingStatus.HELD and after.status is not LendingStatus.RESERVED:
                continue
            if after.position < (head := self._facts(row.stream_id).head):
                event = make_history_event("failover", after, FAILED_OVER, head)
                self._history.append(to_history_record(after, event, term, now))

    # --- operators' actions that the twin does not have -------------------------------------------------------------

    def reset(
        self, group_id: int, target: ResetTarget, streams: Collection[int] = (), *, reason: str, force: bool = False
    ) -> dict[int, int]:
        leader, before = self._leaderships.get(group_id), self.rows(group_id)
        moves = super().reset(group_id, target, streams, reason=reason, force=force)
        group, after = self._lives[group_id].group, self.rows(group_id)
        if group.options.atomic:
            start = StartingPosition.LATEST if target.kind == "latest" else StartingPosition.EARLIEST
            group = structs.replace(group, options=structs.replace(group.options, starting_position=start))
        former = {stream_id: row.grant_id for stream_id, row in before.items()}
        taken = [stream_id for stream_id, row in after.items() if row.grant_id != former.get(stream_id, 0)]
        if leader is not None:
            self.checkers.authority.cut_short(group_id, leader.term)
        self.checkers.was_reset(group, after, moves, taken)
        return moves

    def advance(self, group_id: int, stream_id: int, grant_id: int, position: int) -> None:
        """Move the progress under that grant, as a user's transaction does."""
        rows = self._lives[group_id].rows
        rows[stream_id] = replace(rows[stream_id], position=position, lost_position=None)

    def export(self, group_id: int) -> ExportedProgress:
        """Return the group's progress, as `sublet_storage.groups.admin.progress_transfer.read_progress` does."""
        life = self._lives[group_id]
        places = [ExportedPosition(r.stream_id, r.position, r.status, r.consumed) for r in life.rows.values()]
        frontiers = tuple(life.frontiers.items())
        return ExportedProgress(
            life.after_generation, tuple(sorted(places, key=lambda place: place.stream_id)), frontiers
        )

    def has_lost(self, group: Group, progress: ExportedProgress) -> bool:
        """Whether rows were deleted of what that group has not consumed by its export: it is imported no more."""
        deleted = [g for g in self.streams.generations.values() if g.deleted]
        left = {s: self.streams.streams[s].head for g in deleted for s in g.stream_ids if self.streams.streams[s].head}
        unseen = (g for g in deleted if g.generation_id > progress.after_generation and left.keys() & set(g.stream_ids))
        return any(place.position < left.get(place.stream_id, 0) for place in progress.positions) or any(
            g.filter.intersects(group.subscription.filter) for g in unseen
        )

    def begin_with(self, before: Group, progress: ExportedProgress) -> Group:
        """Create a group that continues from that progress, as
        `sublet_storage.groups.admin.progress_transfer.create_from_progress` does."""
        group = Group(len(self._lives) + 1, before.subscription, before.options)
        life = _Life(group, progress.after_generation)
        for place in progress.to_initial.positions:
            if self.streams.streams[place.stream_id].generation.deleted:
                continue
            row = LendingRow(group.group_id, place.stream_id, place.status, place.position, consumed=place.consumed)
            life.rows[place.stream_id] = row
        life.rows = self._set_revoked_at(life, life.rows)
        life.frontiers, life.spaces = dict(progress.frontiers), self._spaces_of_rows(life)
        self._lives[group.group_id] = life
        self.checkers.opened(group, before, progress)
        return group


class StatementOutcome(Enum):
    ANSWERED = "answered"
    REFUSED = "refused"  # not executed, and the node knows it
    LOST = "lost"  # not executed, and the node does not know it
    SILENT = "silent"  # executed, and the node does not know it


class DatabaseLink:
    """One node's connection to the database. Statements are executed in order, one at a time; those already sent are
    executed even if the node dies meanwhile, as a real connection's would be, but not after a restart of the database.
    """

    def __init__(self, world: World, store: WatchedGroups) -> None:
        self._world, self._store = world, store
        self._free_at = 0.0
        self._bad_until = self._deaf_until = self._dumb_until = 0.0
        self._cut_until = self._down_until = 0.0
        self._cut = StatementOutcome.LOST
        self._restarts = 0

    def begin_life(self) -> None:
        """Begin a new connection, which waits for nothing."""
        self._free_at = self._world.now

    def ask(
        self, request: DatabaseRequest, ref: NodeIncarnation, lease_s: float, answer: Callable[[NodeEvent], object]
    ) -> None:
        """Execute the request; `answer` is called with what the node receives, if it still runs."""
        world = self._world
        there = max(world.now, self._free_at) + world.random.uniform(0.001, 0.004)
        back = there + self._slowness() + world.random.uniform(0.0005, 0.002)
        if there < self._deaf_until:
            back = max(back, self._deaf_until)
        elif there < self._dumb_until:
            there, back = self._dumb_until, self._dumb_until + back - there
        outcome = self._draw_outcome()
        if outcome in (StatementOutcome.LOST, StatementOutcome.SILENT):
            back = max(back, there + NO_ANSWER_S)
        self._free_at = back
        replies: list[NodeEvent] = []
        restarts = self._restarts

        def execute_now() -> None:
            actual_outcome = (
                outcome if self._restarts == restarts or outcome is StatementOutcome.REFUSED else StatementOutcome.LOST
            )
            replies.append(self._execute(request, ref, lease_s, actual_outcome))

        world.after(there - world.now, execute_now)
        world.after(back - world.now, lambda: answer(replies[0]))

    # --- faults -----------------------------------------------------------------------------------------------------

    def trouble(self, duration_s: float) -> None:
        """Be slow and unreliable for that long."""
        self._bad_until = self._world.now + duration_s

    def hang(self, deaf_s: float, dumb_s: float) -> None:
        """Send no reply for `deaf_s`, then receive no request for `dumb_s`: a node that counts its lease from the late
        reply would trust it for too long."""
        self._deaf_until = self._world.now + deaf_s
        self._dumb_until = self._deaf_until + dumb_s

    def cut(self, outcome: StatementOutcome, duration_s: float) -> None:
        """For that long, lose all statements (`LOST`), or all replies (`SILENT`)."""
        self._cut, self._cut_until = outcome, self._world.now + duration_s

    def down(self, duration_s: float) -> None:
        """For that long execute nothing, mostly with an error that says so."""
        self._restarts += 1
        self._down_until = self._world.now + duration_s

    def is_open(self) -> bool:
        """Return whether a connection other than that of statements works."""
        world = self._world
        return world.calm or world.now >= max(self._cut_until, self._down_until, self._deaf_until, self._dumb_until)

    def _is_bad(self) -> bool:
        return self._world.now < self._bad_until and not self._world.calm

    def _slowness(self) -> float:
        """Return a delay: now and then some seconds, rarely longer than a lease."""
        world = self._world
        if world.chance(0.35 if self._is_bad() else world.weather.stalled_database):
            return world.random.uniform(3.0, 14.0)
        return world.random.uniform(0.2, 2.5) if world.chance(world.weather.slow_database) else 0.0

    def _draw_outcome(self) -> StatementOutcome:
        world = self._world
        if world.calm:
            return StatementOutcome.ANSWERED
        if world.now < self._cut_until:
            return self._cut
        if world.now < self._down_until:
            return StatementOutcome.REFUSED if world.chance(0.7) else StatementOutcome.LOST
        if world.chance(0.3 if self._is_bad() else world.weather.failing_database):
            return world.random.choice((StatementOutcome.REFUSED, StatementOutcome.LOST, StatementOutcome.SILENT))
        return StatementOutcome.ANSWERED

    def _execute(
        self, request: DatabaseRequest, ref: NodeIncarnation, lease_s: float, outcome: StatementOutcome
    ) -> NodeEvent:
        jitter_s = self._world.random.uniform(0, 0.3)
        if outcome in (StatementOutcome.REFUSED, StatementOutcome.LOST):
            return failure_answer(request, unknown=outcome is StatementOutcome.LOST, jitter_s=jitter_s)
        answer = execute(request, self._store, ref, lease_s, jitter_s)
        return (
            answer if outcome is StatementOutcome.ANSWERED else failure_answer(request, unknown=True, jitter_s=jitter_s)
        )


@dataclass(frozen=True, slots=True)
class Standby:
    store: tuple[Any, ...]
    streams: dict[int, tuple[Any, ...]]
    gone: frozenset[tuple[int, bool]]
    journal: tuple[Any, ...]
    checkers: tuple[Any, ...]
    holding: dict[int, list[PublisherFrontier]]
    committed: frozenset[str]


class Failover(Happenings):
    """At most one failover per run, to a standby that is slightly behind: the last writes are lost. Nodes and consumers
    continue with what they remember. The database is on another timeline, by a clock that may be behind by more than
    that. It runs without queries. If streams were opened in the moments that would be lost, it is postponed.

    That a term of another timeline is over, and its grants with it, is implemented here (`FENCED`) as in the database's
    functions, which the twin does not have.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the failover")
        self.runs = self._random.random() < 0.1
        self.happened = 0

    def begin(self, until: float) -> None:
        if self.runs:
            self._until = until
            self._world.after(self._random.uniform(10.0, 35.0), self._fall_behind)

    def _fall_behind(self) -> None:
        if self._world.now < self._until - 4.0:
            standby = self._standby()
            self._world.after(self._random.uniform(0.1, 3.0), lambda: self._promote(standby))

    def _standby(self) -> Standby:
        simulation = self._simulation
        streams, journal = simulation.streams, simulation.journal
        return Standby(
            simulation.store.saved(),
            {i: (s.head, s.closed, s.blocks[:], s.block_summaries[:]) for i, s in streams.streams.items()},
            _gone(streams),
            (deepcopy(journal.parts), deepcopy(journal.appended), dict(streams.lowers)),
            simulation.checkers.saved(),
            simulation.publishing.saved(),
            frozenset(simulation.users.committed),
        )

    def _promote(self, standby: Standby) -> None:
        simulation, streams = self._simulation, self._simulation.streams
        if standby.streams.keys() != streams.streams.keys() or standby.gone != _gone(streams):
            self._world.after(_RETRY_INTERVAL_S, self._fall_behind)
            return
        lost = sum(s.head - standby.streams[i][0] for i, s in streams.streams.items())
        self._world.say("database", f"fails over to a standby: {lost} messages are lost")
        self.happened += 1
        for stream_id, stream in streams.streams.items():
            stream.head, stream.closed, stream.blocks, stream.block_summaries = standby.streams[stream_id]
            del simulation.journal.keys[stream_id][stream.head :]
        simulation.publishing.failed_over(standby.holding)
        simulation.users.committed = set(standby.committed)
        simulation.journal.parts, simulation.journal.appended, streams.lowers = standby.journal
        simulation.checkers.failed_over(standby.checkers, FENCED)
        simulation.store.restore(standby.store, FENCED)
        if self._random.random() < 0.5:
            self._world.set_clock_back(self._random.uniform(0.0, 20.0))
        down_s = self._random.uniform(0.1, 4.0)
        for node in simulation.nodes:
            node.way.down(down_s)
        simulation.lock_fault_injector.fail_over()


def _gone(streams: MemoryCatalogue) -> frozenset[tuple[int, bool]]:
    """What retention has taken, and whether its rows are deleted."""
    return frozenset((g.generation_id, g.deleted) for g in streams.generations.values() if g.gone)
