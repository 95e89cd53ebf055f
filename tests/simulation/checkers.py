"""What must be true whatever happens, judged from outside: from what sessions did and what the store answered."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from borrower.machine.agent import Closed
from protocol.messages import EndReason
from storage.groups.model import (
    Advance,
    EntryResult,
    Grant,
    GroupResult,
    GroupWrites,
    Lending,
    LendingStatus,
    Mark,
    Reclaim,
    Release,
    Seize,
    Verdict,
)

if TYPE_CHECKING:
    from tests.simulation.agents import Work
    from tests.simulation.nodes import SimulatedNode
    from tests.simulation.simulation import Simulation


class Violation(AssertionError):
    """Something happened that must never happen."""


@dataclass(frozen=True, slots=True)
class Call:
    """One user call: offsets [start, end) of a stream, under a grant, by an agent."""

    stream_id: int
    grant_id: int
    agent: str
    start: int
    end: int


class Checkers:
    """Fed while the world runs, and asked at its end."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.calls: dict[int, list[Call]] = defaultdict(list)
        self.moves = 0
        self.repeats = 0
        self._positions: dict[tuple[int, int], int] = {}
        self._grants: dict[tuple[int, int], int] = {}
        self._in_force: dict[tuple[int, int], int] = {}
        self._had: dict[tuple[int, int], str | None] = {}
        self._holder: dict[tuple[int, int], str] = {}
        self._reported: dict[tuple[int, int], int] = {}
        self._taken: set[tuple[int, int]] = set()

    def reported(self, work: Work) -> None:
        """A session says how far it is under this grant."""
        self._reported[work.stream_id, work.grant_id] = work.position

    def taken(self, stream_id: int, grant_id: int) -> None:
        """Somebody ended this grant by force, and neither leader nor borrower has heard of it."""
        self._taken.add((stream_id, grant_id))

    # --- while it runs ----------------------------------------------------------------------------------------------

    def node_acted(self, node: SimulatedNode, stories: Sequence[str]) -> None:
        """No rule of the node's own is broken; and who trusts itself to lead has a lease that runs (E13, E14)."""
        if stories:
            raise Violation("\n".join(stories))
        for group_id in node.machine.leaders:
            term = node.machine.election.trusted(group_id, self.simulation.world.now)
            if term is None:
                continue
            claim = self.simulation.store.look([group_id])[group_id]
            if claim.node != node.machine.ref or claim.term != term or claim.remaining_s <= 0:
                raise Violation(f"{node.machine.ref} trusts term {term} of group {group_id}, but the row is {claim}")

    def committed(self, batch: Sequence[GroupWrites], results: Sequence[GroupResult]) -> None:
        """Only the term in force writes, grant ids only grow, progress never goes back (E13, E17)."""
        for writes, result in zip(batch, results, strict=True):
            if result.deposed:
                continue
            claim = self.simulation.store.look([writes.group_id])[writes.group_id]
            if claim.term != writes.term:
                raise Violation(f"group {writes.group_id}: written under term {writes.term}, in force is {claim.term}")
            for answer in result.results:
                if answer.lending is not None:
                    self._answered((writes.group_id, answer.lending.stream_id), answer, answer.lending)

    def _answered(self, key: tuple[int, int], answer: EntryResult, row: Lending) -> None:
        if row.position < self._positions.get(key, 0):
            raise Violation(f"{key}: position went back to {row.position} by {answer.entry}")
        self._positions[key] = row.position
        if isinstance(answer.entry, Grant):
            self._parents_first(answer.entry.stream_id)
            if answer.verdict is Verdict.APPLIED:
                self._granted(key, row)
        elif answer.verdict is Verdict.APPLIED:
            self._under_its_grant(key, answer.entry)
        if row.status is LendingStatus.HELD:
            self._in_force[key] = row.grant_id
        else:
            self._in_force.pop(key, None)

    def _under_its_grant(self, key: tuple[int, int], entry: Advance | Reclaim | Release | Seize | Mark) -> None:
        """What counts under a grant was said under that very grant, and that grant is in force (E10, E17)."""
        if self._in_force.get(key) != entry.grant_id:
            raise Violation(f"{key}: {entry} was applied, but in force is {self._in_force.get(key)}")
        if isinstance(entry, Seize | Mark):
            return
        reported = self._reported.get((entry.stream_id, entry.grant_id), 0)
        if entry.position > reported:
            raise Violation(f"{key}: {entry} was applied, but under that grant nobody is further than {reported}")

    def _parents_first(self, stream_id: int) -> None:
        """A leader does not even ask to lend a stream before all its parents are finished (E21)."""
        for parent in self.simulation.streams.streams[stream_id].parents:
            row = self.simulation.store.rows(1).get(parent)
            if row is not None and row.status is not LendingStatus.FINISHED:
                raise Violation(f"stream {stream_id} is to be lent before its parent: {row}")

    def _granted(self, key: tuple[int, int], row: Lending) -> None:
        """Grant ids only grow; a stream that somebody else had before has moved."""
        if row.grant_id <= self._grants.get(key, 0):
            raise Violation(f"{key}: grant id {row.grant_id} is not above {self._grants[key]}")
        self._grants[key] = row.grant_id
        self._reported[row.stream_id, row.grant_id] = row.position
        before = self._had.get(key)
        self.moves += before not in (None, row.borrower_id)
        self._had[key] = row.borrower_id

    def call_started(self, agent: str, work: Work, count: int) -> None:
        """A grant has one holder; a call begins only while the row says so; parents come first (E10, E21, E29)."""
        call = Call(work.stream_id, work.grant_id, agent, work.position, work.position + count)
        holder = self._holder.setdefault((call.stream_id, call.grant_id), agent)
        if holder != agent:
            raise Violation(f"{call}: the grant is {holder}'s")
        if (call.stream_id, call.grant_id) in self._taken:
            return  # it cannot know yet, and what it does counts for nothing
        row = self.simulation.row(call.stream_id)
        if row.grant_id != call.grant_id or row.status is not LendingStatus.HELD:
            raise Violation(f"{call} begins, but the row says {row}")
        for parent in self.simulation.streams.streams[call.stream_id].parents:
            if self._unread(parent):
                raise Violation(f"{call} begins before its parent {parent} is consumed: {self._unread(parent)}")
        self.calls[call.stream_id].append(call)
        self.simulation.world.say(agent, call)

    def removed(self, work: Work, lost: bool) -> None:
        """A stream taken off a session that had not finished is a loss it is told of."""
        if work.busy and not lost:
            raise Violation(f"{work} was taken off in the middle of a call, and not called lost")

    def closed(self, agent: str, closed: Closed) -> None:
        """Only those that asked to leave are closed here."""
        if closed.reason is not EndReason.DONE:
            raise Violation(f"{agent}: {closed}")

    # --- at the end -------------------------------------------------------------------------------------------------

    def _unread(self, stream_id: int) -> list[int]:
        seen = {o for call in self.calls[stream_id] for o in range(call.start, call.end)}
        return [o for o in range(self.simulation.streams.streams[stream_id].head) if o not in seen]

    def check_end(self) -> None:
        """Nothing lost, everything durable, repeats explained, streams spread evenly over whoever is left."""
        self.repeats = 0
        for stream_id, stream in self.simulation.streams.streams.items():
            if unread := self._unread(stream_id):
                raise Violation(f"stream {stream_id}: lost {unread[:10]}, row {self.simulation.row(stream_id)}")
            row = self.simulation.row(stream_id)
            done = LendingStatus.FINISHED if stream.closed else LendingStatus.HELD
            if row.position != stream.head or row.status is not done:
                raise Violation(f"stream {stream_id} (head {stream.head}) did not come to rest: {row}")
            self._check_repeats(stream_id)
        self._check_balance()

    def _check_repeats(self, stream_id: int) -> None:
        """An offset seen under two grants lies behind a forced end of the first of them."""
        forced = {h.grant_id: h.position for h in self.simulation.history() if h.forced and h.stream_id == stream_id}
        seen: dict[int, Call] = {}
        for call in self.calls[stream_id]:
            for offset in range(call.start, call.end):
                before = seen.get(offset)
                if before is not None and offset < forced.get(before.grant_id, 1 << 62):
                    raise Violation(f"offset {offset} repeated without a forced move: {before}, then {call}")
                self.repeats += before is not None
                seen[offset] = call

    def _check_balance(self) -> None:
        held: dict[str, int] = defaultdict(int)
        for stream_id in self.simulation.streams.streams:
            row = self.simulation.row(stream_id)
            if row.status is LendingStatus.HELD:
                held[row.borrower_id or ""] += 1
        shares = [held[b] for b in self.simulation.live_borrowers()]
        if max(shares) - min(shares) > 1 or sum(shares) != sum(held.values()):
            raise Violation(f"not balanced: {dict(held)} over {self.simulation.live_borrowers()}")
