"""The streams of one group and their pending changes: at most one in flight per stream, in order."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from sublet_leader.group.table import AssignmentStatus
from sublet_leader.group.throughput import ThroughputMeter
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.epochs import ConsumedFrontier
from sublet_protocol.domain.in_doubt import InDoubt
from sublet_protocol.messages.messages import RevokedReason
from sublet_storage.groups.model.lending_row import is_of_former_timeline
from sublet_storage.groups.model.records import (
    AdvancePosition,
    ChangeOutcome,
    ChangeResult,
    ForceRelease,
    GrantStream,
    Lending,
    LendingChange,
    LendingStatus,
    ReleaseStream,
)

BUSY_RETRY_S = 0.1
"""After which an entry is written again whose row a user's transaction held locked."""


@dataclass(slots=True)
class Assignment:
    """A stream granted, or about to be, to a borrower. `grant_id` is 0 until the grant is written; `reason`: why it is
    to end, once that is decided; `delivered_end`: up to where it was delivered and given up, by its holder's final
    progress; `read_error`: why its holder cannot read on, if it cannot; `poison`: up to before which offset it cannot
    be decoded."""

    stream_id: int
    borrower_id: str
    agent: str
    granted_at: float
    status: AssignmentStatus = AssignmentStatus.GRANTING
    grant_id: int = 0
    resend_at: float = float("inf")
    deadline: float = float("inf")
    reason: str = ""
    is_final_queued: bool = False
    delivered_end: int = 0
    consumed: ConsumedFrontier | None = None
    in_doubt: InDoubt | None = None
    read_error: str = ""
    poison: int = 0
    is_aborted: bool = False
    revoked_reason: RevokedReason = RevokedReason.LOST


@dataclass(frozen=True, slots=True)
class Holder:
    """Who had a stream."""

    borrower_id: str
    agent: str
    session: str | None


@dataclass(frozen=True, slots=True)
class Seizure:
    """The end of a grant without final progress, to be written when the time promised to its holder is over."""

    entry: ForceRelease
    at: float
    borrower_id: str | None
    agent: str | None


@dataclass(slots=True)
class StreamEntry:
    """One stream: its row as last seen, its holder, and the changes that wait for their turn.

    `reserved_until`: until then the free or reserved row is reserved for its session. `last_holder`: its last holder,
    as far as this leader knows. `promised_until`: until then a former holder may begin calls on it, by a promise.
    """

    lending: Lending
    reserved_until: float = 0.0
    last_holder: Holder | None = None
    meter: ThroughputMeter = field(default_factory=ThroughputMeter)
    assignment: Assignment | None = None
    in_flight: LendingChange | None = None
    queue: list[LendingChange] = field(default_factory=list)
    retry_at: float = 0.0
    promised_until: float = float("-inf")
    seizure: Seizure | None = None

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is being written and it has no holder."""
        return self.assignment is None and self.in_flight is None and not self.queue

    @property
    def is_ending(self) -> bool:
        """The end of its grant is being written, or is to be."""
        ends = any(isinstance(entry, ReleaseStream | ForceRelease) for entry in (self.in_flight, *self.queue))
        return ends or self.seizure is not None


class StreamTable:
    """All unfinished streams of a group by id."""

    def __init__(self, rows: Iterable[Lending], term: int, now: float, settings: LeaderSettings) -> None:
        self._slots: dict[int, StreamEntry] = {}
        self._by_session: dict[str, set[int]] = {}
        self._ready: set[int] = set()
        self._term, self._settings = term, settings
        for row in rows:
            self.update_row(row, now)

    def unreadable_count(self) -> int:
        """Return how many have a holder who cannot read on."""
        granted = [
            slot.assignment for slot in tuple(self._slots.values())
        ]  # in one step: metrics read it from another thread
        return sum(assignment is not None and assignment.read_error != "" for assignment in granted)

    def __iter__(self) -> Iterator[StreamEntry]:
        return iter(self._slots.values())

    def __len__(self) -> int:
        return len(self._slots)

    def get(self, stream_id: int) -> StreamEntry | None:
        """Return the stream's slot; None once it is finished, or if it never was ours."""
        return self._slots.get(stream_id)

    def assigned_stream_ids(self) -> list[int]:
        """Return the streams that are granted, or about to be."""
        return [stream_id for stream_id, slot in self._slots.items() if slot.assignment is not None]

    def streams_of_session(self, session: str) -> list[StreamEntry]:
        """Return the streams that the session of this name holds, or that are reserved for it."""
        return [self._slots[stream_id] for stream_id in sorted(self._by_session.get(session, ()))]

    def is_grantable(self, slot: StreamEntry, now: float) -> bool:
        """Whether it is free for certain, and every parent consumed: one without a slot is finished or never was the
        group's.

        Reserved ones are among them: they are for one session.
        """
        if slot.promised_until > now:
            return False
        row = slot.lending
        held_back = slot.retry_at > now or any(p in self._slots for p in row.parents)
        return row.status in (LendingStatus.FREE, LendingStatus.RESERVED) and slot.is_quiet and not held_back

    def enqueue(self, entry: LendingChange) -> None:
        """Queue an entry; progress that has not left yet is replaced by what comes after it."""
        slot = self._slots[entry.stream_id]
        last = slot.queue[-1] if slot.queue else None
        if (
            isinstance(last, AdvancePosition)
            and isinstance(entry, AdvancePosition | ReleaseStream)
            and last.grant_id == entry.grant_id
        ):
            slot.queue.pop()
            consumed = last.consumed.max_of(entry.consumed) if last.consumed is not None else entry.consumed
            entry = replace(entry, position=max(last.position, entry.position), consumed=consumed)
            if isinstance(entry, AdvancePosition) and entry.in_doubt is None:
                entry = replace(entry, in_doubt=last.in_doubt)
        slot.queue.append(entry)
        self._ready.add(entry.stream_id)

    def take_writable(self, now: float) -> tuple[LendingChange, ...]:
        """Return the entries to commit now, each stream's next; they are in flight until `complete` or `put_back`."""
        taken: list[LendingChange] = []
        for stream_id in sorted(self._ready):
            slot = self._slots.get(stream_id)
            if slot is None or not slot.queue or slot.in_flight is not None:
                self._ready.discard(stream_id)
            elif slot.retry_at <= now:
                slot.in_flight = slot.queue.pop(0)
                self._ready.discard(stream_id)
                taken.append(slot.in_flight)
        return tuple(taken)

    def complete(self, result: ChangeResult, now: float) -> StreamEntry | None:
        """Note the row an answer brings; the slot, or None where the entry is to be written again."""
        slot = self._slots.get(result.change.stream_id)
        if slot is None:
            return None
        if result.outcome is ChangeOutcome.BUSY and not self._is_unwanted(slot, result.change):
            self.put_back(result.change, now + BUSY_RETRY_S)
            return None
        slot.in_flight = None
        if slot.queue:
            self._ready.add(result.change.stream_id)
        if result.lending is not None:
            self._see(slot, result.lending, now)
        return slot

    def put_back(self, entry: LendingChange, retry_at: float) -> StreamEntry:
        """The change was certainly not written: it is the next again, unless it is a grant that no borrower can take
        any more. Return the stream."""
        slot = self._slots[entry.stream_id]
        slot.in_flight, slot.retry_at = None, retry_at
        if not self._is_unwanted(slot, entry):
            slot.queue.insert(0, entry)
        self._ready.add(entry.stream_id)
        return slot

    def drop_waiting_grant(self, slot: StreamEntry) -> None:
        """Drop a grant that is not being written, as its borrower is gone."""
        waiting: list[LendingChange] = [entry for entry in slot.queue if not isinstance(entry, GrantStream)]
        if len(waiting) < len(slot.queue):
            slot.queue = waiting
            self.drop_finished(slot)  # a stream sync may have finished the stream meanwhile

    @staticmethod
    def _is_unwanted(slot: StreamEntry, entry: LendingChange) -> bool:
        """Whether the grant is for a borrower that is gone by now: not to be tried again."""
        held = slot.assignment
        return isinstance(entry, GrantStream) and (held is None or held.borrower_id != entry.borrower_id)

    def retry_at(self) -> float:
        """When the earliest entry that has to wait may be taken again."""
        if not self._ready:
            return float("inf")
        waiting = (s.retry_at for s in map(self._slots.get, self._ready) if s and s.queue and s.in_flight is None)
        return min(waiting, default=float("inf"))

    def update_row(self, row: Lending, now: float) -> StreamEntry | None:
        """Take a row that a stream sync reported: new, closed by now, or finished. Return the slot, None once it is
        finished."""
        slot = self._slots.get(row.stream_id)
        if slot is None:
            if row.status is LendingStatus.FINISHED:
                return None
            slot = self._slots[row.stream_id] = StreamEntry(row, promised_until=self._promised_until(row, now))
            self._see(slot, row, now)
        elif row.grant_id >= slot.lending.grant_id:
            self._see(slot, row, now)
        return slot

    def _promised_until(self, row: Lending, now: float) -> float:
        """Return until when a former holder may begin calls on it, by the promise of a former leader or group."""
        lease_s, promise_s = self._settings.lease_duration_s, self._settings.promise_s
        if is_of_former_timeline(row.grant_id, self._term):  # its leader may not know yet, and have granted it last
            return now + lease_s + promise_s
        if row.status is LendingStatus.HELD:  # the leader before may have answered its ping till now
            return now + promise_s
        if row.session is None and row.reserved_s:  # or till its lease was over, though who took it had ended that
            since = now + min(row.reserved_s, 0.0)  # above 0 where the database's clock was set back
            return since + lease_s + promise_s
        return float("-inf")

    def _see(self, slot: StreamEntry, row: Lending, now: float) -> None:
        """The row as it was read just now."""
        before = slot.lending.session
        if row.grant_id != slot.lending.grant_id:
            slot.seizure = None
        slot.lending = row
        slot.reserved_until = now + row.reserved_s if row.reserved_s > 0 else 0.0
        if before is not None and before != row.session:
            self._forget_name(before, row.stream_id)
        if row.session is not None:
            self._by_session.setdefault(row.session, set()).add(row.stream_id)

    def _forget_name(self, session: str, stream_id: int) -> None:
        """Drop names that have nothing here: they come and go as long as a leader leads."""
        streams = self._by_session.get(session, set())
        streams.discard(stream_id)
        if not streams:
            self._by_session.pop(session, None)

    def drop_finished(self, slot: StreamEntry) -> bool:
        """Forget a stream that is consumed to its end; True if it was."""
        if slot.lending.status is not LendingStatus.FINISHED or slot.in_flight is not None or slot.queue:
            return False
        self._slots.pop(slot.lending.stream_id, None)
        self._forget_name(slot.lending.session or "", slot.lending.stream_id)
        self._ready.discard(slot.lending.stream_id)
        return True
