"""Who may act, and for which grant: terms, leases, grant ids and positions (E10, E13, E14, E17, E21)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sublet_leader.settings import LeaderSettings
from sublet_storage.groups.model.records import (
    AdvancePosition,
    ForceRelease,
    FreeReservedStream,
    GrantStream,
    GroupWriteResult,
    GroupWrites,
    Leadership,
    Lending,
    LendingChangeResult,
    LendingOutcome,
    LendingStatus,
    ReclaimStream,
    RecordHistory,
    ReleaseStream,
)
from tests.simulation.checkers.lives import Key, Lives, Violation
from tests.simulation.world import MAX_DRIFT

if TYPE_CHECKING:
    from tests.simulation.processes import SimulatedNode
    from tests.simulation.sessions import Work
    from tests.simulation.simulation import Simulation


APART_S = LeaderSettings().lock_recheck_delay_s / (1 + MAX_DRIFT)
AGE_S = LeaderSettings().lock_watch_age_s / (1 + MAX_DRIFT)


class Authority:
    def __init__(self, simulation: Simulation, lives: Lives) -> None:
        self._simulation, self._lives = simulation, lives
        self.moves = self.claims_by_lock = self.claims_from_living = 0
        self._cut_short: set[tuple[int, int]] = set()
        self._deposed: dict[tuple[int, int], float] = {}
        self._positions: dict[Key, int] = {}
        self._grants: dict[Key, int] = {}
        self._in_force: dict[Key, int] = {}
        self._had: dict[Key, str | None] = {}
        self._reported: dict[tuple[int, int, int], int] = {}

    def saved(self) -> tuple[Any, ...]:
        return dict(self._positions), dict(self._in_force), dict(self._had)

    def failed_over(self, saved: tuple[Any, ...]) -> None:
        """The rows are as they were then; whoever leads does not know it yet. What was given stays given."""
        self._positions, self._in_force, self._had = saved
        for node in self._simulation.nodes:
            self._cut_short.update(node.machine.election.leaderships().items())

    def was_seized(self, key: Key) -> None:
        """No grant of the stream is in force any more."""
        self._in_force.pop(key, None)

    def cut_short(self, group_id: int, term: int) -> None:
        """An operator has ended this term."""
        self._cut_short.add((group_id, term))

    def claimed_by_lock(self, before: Leadership) -> None:
        """Somebody leads by the free lock of the leader before, whose lease runs: that lock was free twice, some time
        apart, and not only since the database was restarted. Until its lease ends that leader may not know."""
        assert before.lock_key is not None
        locks, now = self._simulation.locks, self._simulation.world.now
        freed_at = locks.first_freed_at.get(before.lock_key, locks.restarted_at if locks.timeline else now)
        if now - freed_at < APART_S:
            raise Violation(f"claimed from {before}, whose lock was held {now - freed_at:.3f} s ago")
        if freed_at == locks.restarted_at and now - freed_at < AGE_S:
            raise Violation(f"claimed from {before} {now - freed_at:.3f} s after a restart of the database")
        self._deposed[before.leadership_id, before.term] = now + before.remaining_s
        self.claims_by_lock += 1
        nodes = self._simulation.nodes
        self.claims_from_living += any(node.alive and node.machine.ref == before.node for node in nodes)

    def was_reset(self, key: Key, position: int) -> None:
        self._positions[key] = position

    def reported(self, work: Work) -> None:
        """A session says how far it is under this grant."""
        self.written(work.group_id, work.stream_id, work.grant_id, work.position)

    def written(self, group_id: int, stream_id: int, grant_id: int, position: int) -> None:
        """Progress under this grant, of a session or of a user's own transaction."""
        key = group_id, stream_id, grant_id
        self._reported[key] = max(self._reported.get(key, 0), position)

    def node_acted(self, node: SimulatedNode) -> None:
        """Who trusts itself to lead has a lease that runs, whatever its clock says. (The lease of a group that an
        operator deletes or resets is cut short under its leader, which can no longer write.)"""
        now, election = node.now, node.machine.election
        for group_id in node.machine.leaders:
            term = election.trusted_term(group_id, now)
            if term is None or self._lives.is_deleted(group_id) or (group_id, term) in self._cut_short:
                continue
            if self._simulation.world.now < self._deposed.get((group_id, term), 0.0):
                continue
            if not self._simulation.store.is_led(group_id, node.machine.ref.incarnation, term):
                claim = self._simulation.store.read_leaderships([group_id])[group_id]
                raise Violation(f"{node.machine.ref} trusts term {term} of group {group_id}, but the row is {claim}")

    def committed(self, batch: Sequence[GroupWrites], results: Sequence[GroupWriteResult]) -> None:
        """Only the term in force writes, grant ids only grow, progress never goes back."""
        for writes, result in zip(batch, results, strict=True):
            if result.has_stale_term:
                continue
            claim = self._simulation.store.read_leaderships([writes.group_id])[writes.group_id]
            if claim.term != writes.term or claim.remaining_s <= 0:
                raise Violation(f"group {writes.group_id}: written under term {writes.term}, in force is {claim}")
            for answer in result.results:
                if answer.lending is not None:
                    self._answered((writes.group_id, answer.lending.stream_id), answer, answer.lending)

    def _answered(self, key: Key, answer: LendingChangeResult, row: Lending) -> None:
        if self._lives.is_deleted(key[0]):
            raise Violation(f"{key}: {answer.change} found a row of a deleted group: {row}")
        if row.position < self._positions.get(key, 0):
            raise Violation(f"{key}: position went back to {row.position} by {answer.change}")
        self._positions[key] = row.position
        if isinstance(answer.change, GrantStream):
            if answer.outcome is LendingOutcome.APPLIED:
                self._granted(key, row)
        elif answer.outcome is LendingOutcome.APPLIED and not isinstance(answer.change, FreeReservedStream):
            self._under_its_grant(key, answer.change, row)
        if row.status is LendingStatus.HELD:
            self._in_force[key] = row.grant_id
        else:
            self._in_force.pop(key, None)

    def _under_its_grant(
        self,
        key: Key,
        entry: AdvancePosition | ReclaimStream | ReleaseStream | ForceRelease | RecordHistory,
        row: Lending,
    ) -> None:
        """What counts under a grant was said under that very grant, which is in force; what ends it ends its id."""
        if self._in_force.get(key) != entry.grant_id:
            raise Violation(f"{key}: {entry} was applied, but in force is {self._in_force.get(key)}")
        if row.status is not LendingStatus.HELD and row.grant_id <= entry.grant_id:
            raise Violation(f"{key}: {entry} ended the grant, but its id is still the row's: {row}")
        if isinstance(entry, ForceRelease | RecordHistory):
            return
        reported = self._reported.get((*key, entry.grant_id), 0)
        if entry.position > reported:
            raise Violation(f"{key}: {entry} was applied, but under that grant nobody is further than {reported}")

    def _granted(self, key: Key, row: Lending) -> None:
        """Grant ids only grow; a stream that somebody else had before has moved."""
        if row.grant_id <= self._grants.get(key, 0):
            raise Violation(f"{key}: grant id {row.grant_id} is not above {self._grants[key]}")
        self._grants[key] = row.grant_id
        self._reported[(*key, row.grant_id)] = row.position
        before = self._had.get(key)
        self.moves += before not in (None, row.borrower_id)
        self._had[key] = row.borrower_id
