"""What users got: one holder per grant, in order, nothing lost, nothing twice that was not announced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from sublet_borrower.planner.planned_ranges import RunnablePlannedRange
from sublet_storage.groups.model.records import LendingStatus
from tests.simulation.checkers.epochs import Epochs
from tests.simulation.checkers.lives import Key, Lives, Violation
from tests.simulation.checkers.record import Record
from tests.simulation.publishing import Key as Named
from tests.simulation.world import MAX_DRIFT

if TYPE_CHECKING:
    from tests.simulation.sessions import Work
    from tests.simulation.simulation import Simulation


class Order:
    """The messages of one key come in the order in which they were published, whatever lies between their streams (W3,
    E21, E33). Known are what publishers wrote, and what users have had; not who is whose parent.

    `is_over(group and stream, key, offset)`: whether the group has nothing more to come of that key up to there.
    """

    def __init__(self, simulation: Simulation, lives: Lives, is_over: Callable[[Key, Named, int], bool]) -> None:
        self._journal = simulation.journal
        self._lives, self._is_over = lives, is_over
        self._passed: dict[tuple[int, Named], int] = {}
        self._granted: set[tuple[int, int, int]] = set()

    def was_reset(self, at: Key) -> None:
        """An operator has set the stream to another position: what was had may come again."""
        self._passed = {known: count for known, count in self._passed.items() if known[0] != at[0]}

    def granted(self) -> set[tuple[int, int, int]]:
        """(group, stream, grant id) of all grants so far."""
        return set(self._granted)

    def failed_over(self) -> None:
        """What was had may come again."""
        self._passed.clear()

    def check_grant(self, at: Key, grant_id: int) -> None:
        """A stream is granted: of the keys that it has, everything that was published before is over."""
        self._granted.add((*at, grant_id))
        for key in set(self._journal.keys.get(at[1], ())):
            self._check(f"{at} is granted", at, key)

    def check_call(self, what: object, at: Key, offsets: Sequence[int]) -> None:
        """A call begins: of the keys in it, everything that was published before is over."""
        keys = self._journal.keys[at[1]]
        for key in {keys[offset] for offset in offsets}:
            self._check(what, at, key)

    def _check(self, what: object, at: Key, key: Named) -> None:
        parts, known = self._journal.parts[key], (at[0], key)
        passed = self._passed.get(known, 0)
        for part in parts[passed:]:
            before = at[0], part.stream_id
            if part.stream_id == at[1]:
                break
            if self._lives[at[0]].start(part.stream_id) is not None and not self._is_over(before, key, part.last):
                raise Violation(f"{what}, but of key {key} stream {part.stream_id}, to {part.last}, comes before")
            passed += 1
        self._passed[known] = passed


@dataclass(frozen=True, slots=True)
class Call:
    """One user call: these offsets of a stream, under a grant, by an agent."""

    group_id: int
    stream_id: int
    grant_id: int
    agent: str
    offsets: Sequence[int]


class Deliveries:
    """All calls of all users.

    Some begin that cannot know better: their grant was ended over their heads, by retention, by the deletion of their
    group, or by an operator's hand. They count for nothing here, and end when
    trust does.
    """

    def __init__(self, simulation: Simulation, lives: Lives, record: Record, epochs: Epochs) -> None:
        self._simulation, self._lives, self._record, self._epochs = simulation, lives, record, epochs
        self.repeats = self.unaware = self.stored = 0
        self._holder: dict[tuple[int, int, int], str] = {}
        self._taken: set[tuple[int, int, int]] = set()
        self._seen: dict[Key, dict[int, Call]] = {}
        self._seen_before: dict[Key, dict[int, Call]] = {}
        self._done: dict[Key, int] = {}
        self._reset: dict[Key, int] = {}
        self._ended: set[tuple[int, int, int]] = set()
        self._failed_over_at = 0.0
        self.order = Order(simulation, lives, self._is_over)
        self._unnoticed_s = simulation.lease_s + simulation.trust_s / (1 - MAX_DRIFT)

    def taken(self, group_id: int, stream_id: int, grant_id: int) -> None:
        self._taken.add((group_id, stream_id, grant_id))

    def was_reset(self, key: Key, position: int, grant_id: int) -> None:
        """An operator wants what follows again, and what comes before no more. Grants up to that one are over."""
        self._done.pop(key, None)
        self.order.was_reset(key)
        self._record.skipped.pop(key, None)
        self._reset[key] = grant_id
        for seen in (self._seen, self._seen_before):
            seen[key] = {offset: call for offset, call in seen.get(key, {}).items() if offset < position}

    def head_lowered(self, stream_id: int, head: int) -> None:
        """What the stream had from there on is lost; who has had it is to have what comes in its place, or nothing more
        before an operator says where to go on."""
        for life in self._lives.live():
            key = life.group.group_id, stream_id
            if life.start(stream_id) is not None:
                self._done[key] = min(self.consumed(*key), head)
                self._seen[key] = {offset: call for offset, call in self._seen.get(key, {}).items() if offset < head}

    def is_over(self, work: Work) -> bool:
        """An operator has set the stream to another position since it was granted so, or a failover has ended that."""
        grant = work.group_id, work.stream_id, work.grant_id
        return grant in self._ended or work.grant_id < self._reset.get(grant[:2], 0)

    def written(self, key: Key, position: int) -> None:
        """Everything before that position was written in users' transactions, or done before."""
        self._done[key] = max(self._done.get(key, 0), position)

    def saved(self) -> dict[Key, int]:
        return dict(self._done)

    def failed_over(self, saved: dict[Key, int], fenced: bool) -> None:
        """What was had since is lost, in users' output too, and comes again, as is announced. Calls that run count for
        nothing. What lay at an offset that the standby lacks is nothing that could come again."""
        self.order.failed_over()
        for key, seen in self._seen.items():
            head = self._simulation.streams.streams[key[1]].head
            before = self._seen_before.setdefault(key, {})
            before.update({offset: call for offset, call in seen.items() if offset < head})
            self._seen_before[key] = {offset: call for offset, call in before.items() if offset < head}
        self._seen.clear()
        self._done = saved
        self._failed_over_at = self._simulation.world.now
        if fenced:
            self._ended |= self.order.granted()

    def consumed(self, group_id: int, stream_id: int) -> int:
        """Everything before this offset, from the group's start on, was in a call that ended, or was skipped."""
        start = self._lives[group_id].start(stream_id) or 0
        done = self._done.get((group_id, stream_id), start)
        return max(done, self._record.skipped.get((group_id, stream_id), 0))

    def is_consumed(self, group_id: int, stream_id: int) -> bool:
        """All that the group wants of the stream, to its head, was in calls that ended, or was skipped."""
        if self._lives[group_id].group.options.atomic:
            return self._epochs.is_consumed((group_id, stream_id))
        return self.consumed(group_id, stream_id) >= self._simulation.streams.streams[stream_id].head

    def first_missing(self, group_id: int, stream_id: int) -> int | None:
        """The first offset that the group wants and that was in no call that ended, nor skipped; None if there is
        none."""
        if self._lives[group_id].start(stream_id) is None or self.is_consumed(group_id, stream_id):
            return None
        if self._lives[group_id].group.options.atomic:
            return self._epochs.first_missing((group_id, stream_id))
        return self.consumed(group_id, stream_id)

    def _is_over(self, key: Key, named: Named, last: int) -> bool:
        if self._lives[key[0]].group.options.atomic:
            return self._epochs.is_over(key, named, last)
        return self.consumed(*key) > last

    def call_started(self, agent: str, work: Work, offsets: Sequence[int]) -> bool:
        """A grant has one holder; a call begins only while the row says so; the order of each key is kept, and no
        message is left out, also of what was read after the failover that ended its grant. False: it counts for
        nothing."""
        key = work.group_id, work.stream_id
        call = Call(*key, work.grant_id, agent, offsets)
        holder = self._holder.setdefault((*key, call.grant_id), agent)
        if holder != agent:
            raise Violation(f"{call}: the grant is {holder}'s")
        is_atomic = self._lives[call.group_id].group.options.atomic
        if (*key, call.grant_id) in self._ended and (work.read_at or inf) > self._failed_over_at:
            self._check_order(call, work, is_atomic)
        if self._cannot_know(call):
            self.unaware += 1
            return False
        self._check_row(call)
        self._check_order(call, work, is_atomic)
        if is_atomic:
            self._epochs.call_started(key, offsets)
        self._note(key, call)
        self._simulation.world.say(agent, call)
        return True

    def _check_order(self, call: Call, work: Work, is_atomic: bool) -> None:
        key = call.group_id, call.stream_id
        self.order.check_call(f"{call} begins", key, call.offsets)
        if not is_atomic and (call.offsets[0] if work.since is None else work.since) > self.consumed(*key):
            raise Violation(f"{call} leaves out what follows {self.consumed(*key)}: it is lost")

    def call_finished(self, work: Work, offsets: Sequence[int]) -> None:
        key = work.group_id, work.stream_id
        if self.is_over(work):
            return
        if self._lives[work.group_id].group.options.atomic:
            self._epochs.call_finished(key, offsets)
        else:
            self._done[key] = max(self._done.get(key, 0), offsets[-1] + 1)

    def batch_stored(self, query: str, group_id: int, begun: RunnablePlannedRange) -> None:
        """A query has put a range of a stream into its sink, which takes each batch once. Whether its process still has
        the stream does not matter, as long as the range is kept for its name. If it is not, others may have got it
        too, as was announced."""
        planned = begun.planned
        key = group_id, planned.stream_id
        if self._lives[group_id].deleted_at is not None or planned.grant_id < self._reset.get(key, 0):
            return
        call = Call(*key, planned.grant_id, query, range(begun.position, planned.end))
        row = self._simulation.store.rows(group_id).get(planned.stream_id)  # None: finished by others, and deleted
        doubt = None if row is None else row.pending_in_doubt
        self._simulation.world.say(query, call)
        self.stored += len(call.offsets)
        if row is not None and doubt is not None and planned.matches(doubt) and row.session == query:
            if begun.position > self.consumed(*key):
                raise Violation(f"{call} leaves out what follows {self.consumed(*key)}: it is lost")
            self.order.check_call(f"{call} is stored", key, call.offsets)
            self._note(key, call)
        else:
            self.unaware += 1
            self._note_late(key, call)
        if begun.position <= self.consumed(*key):
            self._done[key] = max(self._done.get(key, 0), planned.end)

    def _note_late(self, key: Key, call: Call) -> None:
        """Whoever had it besides was granted it later, as the query's own range was given up, or had lost it before."""
        seen = self._seen.setdefault(key, {})
        for offset in call.offsets:
            before = seen.setdefault(offset, call)
            if before is not call:
                self._repeated(offset, *sorted((before, call), key=lambda one: one.grant_id))

    def _check_row(self, call: Call) -> None:
        row = self._simulation.store.rows(call.group_id).get(call.stream_id)
        if row is None or row.grant_id != call.grant_id or row.status is not LendingStatus.HELD:
            raise Violation(f"{call} begins, but the row says {row}")

    def _cannot_know(self, call: Call) -> bool:
        now = self._simulation.world.now
        deleted_at = self._lives[call.group_id].deleted_at
        if deleted_at is not None:
            if now > deleted_at + self._unnoticed_s:
                raise Violation(f"{call} begins, but its group is gone since {deleted_at:.3f}")
            self._check_next_life(call)
            return True
        grant = call.group_id, call.stream_id, call.grant_id
        ended_at = self._record.ended_without_report.get(grant)
        if ended_at is None:
            return grant in self._taken
        if now > ended_at + self._unnoticed_s:
            raise Violation(f"{call} begins, but its grant is over since {ended_at:.3f}")
        row = self._simulation.store.rows(call.group_id).get(call.stream_id)
        is_granted = row is not None and row.status is LendingStatus.HELD and row.grant_id > call.grant_id
        if is_granted and grant not in self._taken:
            raise Violation(f"{call} begins, but the stream is granted again: {row}")
        return True

    def _check_next_life(self, call: Call) -> None:
        """Its group is deleted; in a group that goes by its name now the stream is nobody's. (Of a group that it has
        lost the new server cannot know.)"""
        if self._lives[call.group_id].lost or (call.group_id, call.stream_id, call.grant_id) in self._taken:
            return
        name = self._lives[call.group_id].group.subscription
        for life in self._lives.live():
            row = self._simulation.store.rows(life.group.group_id).get(call.stream_id)
            if life.group.subscription == name and row is not None and row.status is LendingStatus.HELD:
                raise Violation(f"{call} begins, but in the next life of its group {row} is granted")

    def _note(self, key: Key, call: Call) -> None:
        """What was seen before was seen under a grant that ended by force, and in the range announced then."""
        seen = self._seen.setdefault(key, {})
        for offset in call.offsets:
            before = seen.get(offset)
            if before is not None:
                self._repeated(offset, before, call)
            elif (lost := self._seen_before.get(key, {}).pop(offset, None)) is not None:
                self._repeated_after_failover(offset, lost, call)
            seen[offset] = call

    def _repeated_after_failover(self, offset: int, before: Call, call: Call) -> None:
        self.repeats += 1
        announced = self._record.since_failover.get((call.group_id, call.stream_id), ())
        if not any(begin <= offset < end for begin, end in announced):
            raise Violation(f"offset {offset} comes again after a failover, announced is {announced}: {before}, {call}")

    def _repeated(self, offset: int, before: Call, call: Call) -> None:
        self.repeats += 1
        window = self._record.twice.get((call.group_id, call.stream_id, before.grant_id))
        if before.grant_id == call.grant_id or window is None:
            raise Violation(f"offset {offset} repeated without a forced move: {before}, then {call}")
        if not window[0] <= offset < window[1]:
            raise Violation(f"offset {offset} repeated outside of what was announced, {window}: {before}, then {call}")


class Transactions:
    """What users wrote in their own transactions: each message once, and none passed over (E25, E35). Of each stream
    that was written so, the offsets that are in users' output."""

    def __init__(self, deliveries: Deliveries) -> None:
        self._deliveries = deliveries
        self._stored: dict[Key, set[int]] = {}
        self.stored = 0

    def saved(self) -> dict[Key, set[int]]:
        return deepcopy(self._stored)

    def failed_over(self, saved: dict[Key, set[int]]) -> None:
        """What was written since is lost."""
        self._stored = saved

    def was_reset(self, at: Key, position: int) -> None:
        """An operator wants what follows again."""
        self._stored[at] = {offset for offset in self._stored.get(at, ()) if offset < position}

    def committed(
        self, advances: Sequence[tuple[int, int, int, int]], stored: Sequence[tuple[int, int, range]]
    ) -> None:
        """A transaction was, with what it wrote."""
        for group_id, stream_id, offsets in stored:
            had = self._stored.setdefault((group_id, stream_id), set())
            if twice := had.intersection(offsets):
                raise Violation(f"{group_id, stream_id}: {sorted(twice)} are written twice, by {advances}, {stored}")
            had.update(offsets)
            self.stored += len(offsets)
        for group_id, stream_id, _, position in advances:
            self._check((group_id, stream_id), position, f"progress to {position} is committed with {stored}")
            self._deliveries.written((group_id, stream_id), position)

    def reported(self, work: Work) -> None:
        """A session says that everything before its position is done."""
        if not self._deliveries.is_over(work):
            self._check((work.group_id, work.stream_id), work.position, work)

    def _check(self, at: Key, position: int, what: object) -> None:
        had, begin = self._stored.get(at, set()), self._deliveries.consumed(*at)
        if left_out := [offset for offset in range(begin, position) if offset not in had]:
            raise Violation(f"{what}, but {left_out} of {at} were never written")
