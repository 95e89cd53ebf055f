"""The streams of one group and what is being written for each: at most one entry in flight per stream, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from sublet_leader.group.table import Status
from sublet_leader.group.throughput import Meter
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.epochs import ConsumedFrontier
from sublet_protocol.domain.in_doubt import InDoubt
from sublet_protocol.messages.messages import RevokedReason
from sublet_storage.groups.model.records import (
    Advance,
    Entry,
    EntryResult,
    Grant,
    Lending,
    LendingStatus,
    Release,
    Seize,
    Verdict,
)
from sublet_storage.groups.model.transitions import is_of_former_timeline

BUSY_RETRY_S = 0.1
"""After which an entry is written again whose row a user's transaction held locked."""


@dataclass(slots=True)
class Assignment:
    """A stream lent, or about to be, to a borrower. `grant_id` is 0 until the grant is written; `reason` says why it is
    to end, once that is decided; `until`: up to where it was given out and given up, as its holder's last word said;
    `trouble`: why its holder cannot read on, if it cannot; `poison`: up to before which offset nobody can."""

    stream_id: int
    borrower_id: str
    agent: str
    since: float
    status: Status = Status.GRANTING
    grant_id: int = 0
    resend_at: float = float("inf")
    deadline: float = float("inf")
    reason: str = ""
    final_queued: bool = False
    until: int = 0
    consumed: ConsumedFrontier | None = None
    in_doubt: InDoubt | None = None
    trouble: str = ""
    poison: int = 0
    broken_off: bool = False
    revoked: RevokedReason = RevokedReason.LOST


@dataclass(frozen=True, slots=True)
class Holder:
    """Who had a stream."""

    borrower_id: str
    agent: str
    session: str | None


@dataclass(frozen=True, slots=True)
class Seizure:
    """The end of a grant without its holder's word, to be written when the right that he was promised is over."""

    entry: Seize
    at: float
    borrower_id: str | None
    agent: str | None


@dataclass(slots=True)
class Slot:
    """One stream: its row as last seen, who has it, and the entries that wait for their turn.

    `kept_until`: until then the free or reserved row is kept for its session. `last`: who had it last, as far as this
    leader knows. `promised_until`: until then somebody else may begin calls on it, who was promised so.
    """

    lending: Lending
    kept_until: float = 0.0
    last: Holder | None = None
    meter: Meter = field(default_factory=Meter)
    assignment: Assignment | None = None
    in_flight: Entry | None = None
    queue: list[Entry] = field(default_factory=list)
    retry_at: float = 0.0
    promised_until: float = float("-inf")
    seizure: Seizure | None = None

    @property
    def quiet(self) -> bool:
        """Nothing is being written and nobody has it."""
        return self.assignment is None and self.in_flight is None and not self.queue

    @property
    def is_ending(self) -> bool:
        """The end of its grant is being written, or is to be."""
        ends = any(isinstance(entry, Release | Seize) for entry in (self.in_flight, *self.queue))
        return ends or self.seizure is not None


class Slots:
    """All unfinished streams of a group by id."""

    def __init__(self, rows: Iterable[Lending], term: int, now: float, settings: LeaderSettings) -> None:
        self._slots: dict[int, Slot] = {}
        self._by_session: dict[str, set[int]] = {}
        self._ready: set[int] = set()
        for row in rows:
            slot = self.note(row, now)
            if slot is None:
                continue
            if is_of_former_timeline(row.grant_id, term):  # its leader may not know yet, and have lent it last
                slot.promised_until = now + settings.lease_s + settings.promise_s
            elif row.status is LendingStatus.HELD:  # the leader before may have answered its ping till now
                slot.promised_until = now + settings.promise_s
            elif row.session is None and row.kept_s:  # or till its lease was over, though who took it had ended that
                since = now + min(row.kept_s, 0.0)  # above 0 where the database's clock was set back
                slot.promised_until = since + settings.lease_s + settings.promise_s

    def stuck(self) -> int:
        """How many have a holder who cannot read on."""
        lent = [slot.assignment for slot in tuple(self._slots.values())]  # in one step: metrics ask from another thread
        return sum(assignment is not None and assignment.trouble != "" for assignment in lent)

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots.values())

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, stream_id: int) -> Slot | None:
        """The stream's slot; None once it is finished, or if it never was ours."""
        return self._slots.get(stream_id)

    def assigned(self) -> list[int]:
        """The streams that are lent, or about to be."""
        return [stream_id for stream_id, slot in self._slots.items() if slot.assignment is not None]

    def of_session(self, session: str) -> list[Slot]:
        """The streams that the process of this name holds, or that are kept for it."""
        return [self._slots[stream_id] for stream_id in sorted(self._by_session.get(session, ()))]

    def grantable(self, slot: Slot, now: float) -> bool:
        """Nobody's for certain, and every parent consumed: one without a slot is finished or never was the group's.

        Reserved ones are among them: they are one session's to have.
        """
        if slot.promised_until > now:
            return False
        row = slot.lending
        held_back = slot.retry_at > now or any(p in self._slots for p in row.parents)
        return row.status in (LendingStatus.FREE, LendingStatus.RESERVED) and slot.quiet and not held_back

    def write(self, entry: Entry) -> None:
        """Queue an entry; progress that has not left yet is replaced by what comes after it."""
        slot = self._slots[entry.stream_id]
        last = slot.queue[-1] if slot.queue else None
        if isinstance(last, Advance) and isinstance(entry, Advance | Release) and last.grant_id == entry.grant_id:
            slot.queue.pop()
            consumed = last.consumed.later(entry.consumed) if last.consumed is not None else entry.consumed
            entry = replace(entry, position=max(last.position, entry.position), consumed=consumed)
            if isinstance(entry, Advance) and entry.in_doubt is None:
                entry = replace(entry, in_doubt=last.in_doubt)
        slot.queue.append(entry)
        self._ready.add(entry.stream_id)

    def take(self, now: float) -> tuple[Entry, ...]:
        """The entries to commit now, each stream's next; they are in flight until `answered` or `put_back`."""
        taken: list[Entry] = []
        for stream_id in sorted(self._ready):
            slot = self._slots.get(stream_id)
            if slot is None or not slot.queue or slot.in_flight is not None:
                self._ready.discard(stream_id)
            elif slot.retry_at <= now:
                slot.in_flight = slot.queue.pop(0)
                self._ready.discard(stream_id)
                taken.append(slot.in_flight)
        return tuple(taken)

    def answered(self, result: EntryResult, now: float) -> Slot | None:
        """Note the row an answer brings; the slot, or None where the entry is to be written again."""
        slot = self._slots.get(result.entry.stream_id)
        if slot is None:
            return None
        if result.verdict is Verdict.BUSY and not self._is_unwanted(slot, result.entry):
            self.put_back(result.entry, now + BUSY_RETRY_S)
            return None
        slot.in_flight = None
        if slot.queue:
            self._ready.add(result.entry.stream_id)
        if result.lending is not None:
            self._see(slot, result.lending, now)
        return slot

    def put_back(self, entry: Entry, retry_at: float) -> None:
        """The entry was not written: it is the next again."""
        slot = self._slots[entry.stream_id]
        slot.in_flight, slot.retry_at = None, retry_at
        slot.queue.insert(0, entry)
        self._ready.add(entry.stream_id)

    @staticmethod
    def _is_unwanted(slot: Slot, entry: Entry) -> bool:
        """A grant for a borrower that is gone by now: not to be tried again."""
        held = slot.assignment
        return isinstance(entry, Grant) and (held is None or held.borrower_id != entry.borrower_id)

    def retry_at(self) -> float:
        """When the earliest entry that has to wait may be taken again."""
        if not self._ready:
            return float("inf")
        waiting = (s.retry_at for s in map(self._slots.get, self._ready) if s and s.queue and s.in_flight is None)
        return min(waiting, default=float("inf"))

    def note(self, row: Lending, now: float) -> Slot | None:
        """A row that a renewal reported: new, closed by now, or finished. The slot, None once it is finished."""
        slot = self._slots.get(row.stream_id)
        if slot is None:
            if row.status is LendingStatus.FINISHED:
                return None
            slot = self._slots[row.stream_id] = Slot(row)
            self._see(slot, row, now)
        elif row.grant_id >= slot.lending.grant_id:
            self._see(slot, row, now)
        return slot

    def _see(self, slot: Slot, row: Lending, now: float) -> None:
        """The row as it was read just now."""
        before = slot.lending.session
        if row.grant_id != slot.lending.grant_id:
            slot.seizure = None
        slot.lending = row
        slot.kept_until = now + row.kept_s if row.kept_s > 0 else 0.0
        if before is not None and before != row.session:
            self._forget_name(before, row.stream_id)
        if row.session is not None:
            self._by_session.setdefault(row.session, set()).add(row.stream_id)

    def _forget_name(self, session: str, stream_id: int) -> None:
        """Names come and go as long as a leader leads: of one that has nothing here nothing is kept."""
        streams = self._by_session.get(session, set())
        streams.discard(stream_id)
        if not streams:
            self._by_session.pop(session, None)

    def drop_finished(self, slot: Slot) -> bool:
        """Forget a stream that is consumed to its end; True if it was."""
        if slot.lending.status is not LendingStatus.FINISHED or slot.in_flight is not None or slot.queue:
            return False
        self._slots.pop(slot.lending.stream_id, None)
        self._forget_name(slot.lending.session or "", slot.lending.stream_id)
        self._ready.discard(slot.lending.stream_id)
        return True
