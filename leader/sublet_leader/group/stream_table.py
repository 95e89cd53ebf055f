"""The streams of one group and their pending changes: at most one in flight per stream."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

from msgspec import Struct, field
from msgspec.structs import replace

from sublet_leader.group.grant_transitions import GrantStatus
from sublet_leader.group.throughput import ThroughputMeter
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.grant_keys import timeline_number
from sublet_protocol.domain.in_doubt_range import InDoubtRange, choose_latest_in_doubt
from sublet_protocol.messages.borrower_leader import GrantEndOutcome
from sublet_storage.groups.model.lending_row import is_of_former_timeline
from sublet_storage.groups.model.records import (
    AdvancePosition,
    ForceRelease,
    FreeReservedStream,
    GrantStream,
    Lending,
    LendingChange,
    LendingChangeResult,
    LendingOutcome,
    LendingStatus,
    ReclaimStream,
    RecordHistory,
    ReleaseStream,
)

P = TypeVar("P", AdvancePosition, ReleaseStream, ReclaimStream)

BUSY_RETRY_S = 0.1
"""After which a change is retried whose row a user's transaction held locked."""


class StreamAssignment(Struct):
    """A stream granted, or about to be, to a borrower. `grant_id` is 0 until the grant is written; `reason`: why it is
    to end, once that is decided; `delivered_end`: the offset up to which it was delivered, by its holder's final
    progress; `read_error`: why its holder cannot read on, if it cannot; `recorded_read_error`: the last in
    history; `poison`: the offset before which it cannot be decoded; `is_beyond_head`: it was found to end before what
    was read of it."""

    stream_id: int
    borrower_id: str
    agent: str
    granted_at: float
    status: GrantStatus = GrantStatus.GRANTING
    grant_id: int = 0
    resend_at: float = float("inf")
    deadline: float = float("inf")
    reason: str = ""
    is_final_queued: bool = False
    delivered_end: int = 0
    consumed: ConsumedFrontier | None = None
    in_doubt: InDoubtRange | None = None
    read_error: str = ""
    recorded_read_error: str = ""
    poison: int = 0
    is_beyond_head: bool = False
    is_aborted: bool = False
    revoked_reason: GrantEndOutcome = GrantEndOutcome.LOST


class LastHolder(Struct, frozen=True):
    """The last holder of a stream."""

    borrower_id: str
    agent: str
    session: str | None


class DeferredForceRelease(Struct, frozen=True):
    """The end of a grant without final progress, to be written when its holder may begin no more calls."""

    change: ForceRelease
    at: float
    borrower_id: str | None
    agent: str | None


class StreamEntry(Struct):
    """One stream: its row as last seen, its holder, and the changes that wait for their turn.

    `reserved_until`: until then the free or reserved row is reserved for its session. `last_holder`: its last holder,
    as far as this leader knows. `valid_until`: until then a former holder may begin calls on it. `denied_session`: the
    session that had it and may not come back. `read_error_recorded_at`: when a read error was last queued.
    """

    lending: Lending
    reserved_until: float = 0.0
    last_holder: LastHolder | None = None
    meter: ThroughputMeter = field(default_factory=ThroughputMeter)
    assignment: StreamAssignment | None = None
    in_flight: LendingChange | None = None
    queue: list[LendingChange] = field(default_factory=list)
    retry_at: float = 0.0
    valid_until: float = float("-inf")
    pending_release: DeferredForceRelease | None = None
    denied_session: str | None = None
    read_error_recorded_at: float = float("-inf")

    @property
    def is_quiet(self) -> bool:
        """Return whether nothing is being written and it has no holder."""
        return self.assignment is None and self.in_flight is None and not self.queue

    @property
    def is_unclaimed(self) -> bool:
        """Return whether it is held by the row, and nobody here has it."""
        return self.lending.status is LendingStatus.HELD and self.is_quiet and self.pending_release is None

    @property
    def successor(self) -> GrantStream | None:
        """Return the grant that is to be written with the end of the present one."""
        ends = (c.successor for c in (self.in_flight, *self.queue) if isinstance(c, ReleaseStream))
        return next(ends, None)

    def is_held_by(self, agent: str) -> bool:
        """Return whether the agent holds it, by the row, and its end is not being written."""
        return self.lending.status is LendingStatus.HELD and self.lending.agent == agent and not self.is_ending

    @property
    def is_ending(self) -> bool:
        """Return whether the end of its grant is being written, or is queued."""
        ends = any(isinstance(change, ReleaseStream | ForceRelease) for change in (self.in_flight, *self.queue))
        return ends or self.pending_release is not None


class StreamTable:
    """All unfinished streams of a group by id."""

    def __init__(
        self,
        rows: Iterable[Lending],
        term: int,
        now: float,
        settings: LeaderSettings,
        previous_leader_until: float,
        session_expiry_s: float,
    ) -> None:
        self._max_reserved_s = max(session_expiry_s, settings.eviction_timeout_s)
        self._streams: dict[int, StreamEntry] = {}
        self._by_session: dict[str, set[int]] = {}
        self._ready: set[int] = set()
        self._term, self._settings, self._previous_leader_until = term, settings, previous_leader_until
        for row in rows:
            self.update_row(row, now)

    def unreadable_count(self) -> int:
        """Return the number of streams that their holders cannot read."""
        granted = [
            entry.assignment for entry in tuple(self._streams.values())
        ]  # in one step: metrics read it from another thread
        return sum(assignment is not None and assignment.read_error != "" for assignment in granted)

    def __iter__(self) -> Iterator[StreamEntry]:
        return iter(self._streams.values())

    def __len__(self) -> int:
        return len(self._streams)

    def get(self, stream_id: int) -> StreamEntry | None:
        """Return the stream's entry; None once it is finished, or if it never was in the group."""
        return self._streams.get(stream_id)

    def assigned_stream_ids(self) -> list[int]:
        """Return the streams that are granted, or about to be."""
        return [stream_id for stream_id, entry in self._streams.items() if entry.assignment is not None]

    def find_assigned(self, stream_ids: Iterable[int]) -> list[tuple[StreamEntry, StreamAssignment]]:
        """Return those of these streams that are granted, or about to be, with who has them."""
        entries = [entry for stream_id in stream_ids if (entry := self._streams.get(stream_id)) is not None]
        return [(entry, entry.assignment) for entry in entries if entry.assignment is not None]

    def streams_of_session(self, session: str) -> list[StreamEntry]:
        """Return the streams that the session of this name holds, or that are reserved for it."""
        return [self._streams[stream_id] for stream_id in sorted(self._by_session.get(session, ()))]

    def find_unclaimed(self, agents: Collection[str] | None = None) -> list[StreamEntry]:
        """Return the streams that former holders have not reclaimed; `agents`: of these, if they begin calls only for
        a short time after they last saw their locks held."""
        unclaimed = [entry for entry in self._streams.values() if entry.is_unclaimed]
        if agents is None:
            return unclaimed
        return [each for each in unclaimed if each.lending.agent in agents and self._has_short_lock(each.lending)]

    def absent_holders(self) -> dict[str, set[str]]:
        """Return the former holders that have not reclaimed streams, and are gone if their agents' locks are free, as
        {agent: borrowers}."""
        holders: dict[str, set[str]] = {}
        timeline = timeline_number(self._term)
        for row in (entry.lending for entry in self.find_unclaimed()):
            if row.agent is None or row.borrower_id is None or not self._has_short_lock(row):
                continue
            if timeline_number(row.grant_id) == timeline:
                holders.setdefault(row.agent, set()).add(row.borrower_id)
        return holders

    def _has_short_lock(self, row: Lending) -> bool:
        return self._settings.is_lock_short(row.lock_valid_s)

    def is_grantable(self, entry: StreamEntry, now: float) -> bool:
        """Return whether it is certainly free or reserved, and every parent consumed: a parent without an entry is
        finished or never was the group's.

        Reserved streams are included: they may be granted to their session.
        """
        if entry.valid_until > now:
            return False
        row = entry.lending
        held_back = entry.retry_at > now or any(p in self._streams for p in row.parents)
        return row.status in (LendingStatus.FREE, LendingStatus.RESERVED) and entry.is_quiet and not held_back

    def enqueue(self, change: LendingChange) -> None:
        """Queue a change behind those that wait, joined with those of them that it makes needless: what waits for one
        stream is bounded, whatever its holder sends."""
        entry = self._streams[change.stream_id]
        others: list[LendingChange] = []
        for earlier in entry.queue:
            joined = _join(earlier, change)
            if joined is None:
                others.append(earlier)
            else:
                change = joined
        entry.queue = [*others, change]
        self._ready.add(change.stream_id)

    def take_writable(self, now: float) -> tuple[LendingChange, ...]:
        """Return the changes to commit now, each stream's next; they are in flight until `complete` or `put_back`."""
        changes: list[LendingChange] = []
        for stream_id in sorted(self._ready):
            entry = self._streams.get(stream_id)
            if entry is None or not entry.queue or entry.in_flight is not None:
                self._ready.discard(stream_id)
            elif entry.retry_at <= now:
                entry.in_flight = entry.queue.pop(0)
                self._ready.discard(stream_id)
                changes.append(entry.in_flight)
        return tuple(changes)

    def complete(self, result: LendingChangeResult, now: float) -> StreamEntry | None:
        """Record the row of an answer; return the entry, None if the change is to be retried or the stream is gone."""
        entry = self._streams.get(result.change.stream_id)
        if entry is None:
            return None
        if result.outcome is LendingOutcome.BUSY and not self._is_unwanted(entry, result.change):
            self.put_back(result.change, now + BUSY_RETRY_S)
            return None
        entry.in_flight = None
        if entry.queue:
            self._ready.add(result.change.stream_id)
        change = result.change
        if result.lending is not None:
            self._store_row(entry, result.lending, now)
        elif result.outcome is LendingOutcome.REFUSED:
            # Maintenance has deleted the row before a sync has seen its end: it was free, and nothing was left in it.
            entry.lending = replace(entry.lending, status=LendingStatus.FINISHED)
            entry.queue.clear()
        elif isinstance(change, AdvancePosition):  # which changed nothing but the position
            entry.lending = replace(entry.lending, position=change.position)
        return entry

    def put_back(self, change: LendingChange, retry_at: float) -> StreamEntry:
        """Requeue a change that was certainly not written, unless it is a grant that no borrower can take any more;
        return the entry."""
        entry = self._streams[change.stream_id]
        entry.in_flight, entry.retry_at = None, retry_at
        if not self._is_unwanted(entry, change):
            entry.queue.insert(0, change)
        self._ready.add(change.stream_id)
        return entry

    def drop_waiting_grant(self, entry: StreamEntry) -> None:
        """Drop a grant that is not being written, as its borrower is gone."""
        waiting: list[LendingChange] = [change for change in entry.queue if not isinstance(change, GrantStream)]
        if len(waiting) < len(entry.queue):
            entry.queue = waiting
            self.drop_finished(entry)  # a stream sync may have finished the stream meanwhile

    @staticmethod
    def _is_unwanted(entry: StreamEntry, change: LendingChange) -> bool:
        """Return whether the grant is for a borrower that is gone by now: not to be retried."""
        assignment = entry.assignment
        return isinstance(change, GrantStream) and (assignment is None or assignment.borrower_id != change.borrower_id)

    def retry_at(self) -> float:
        """Return when the earliest change that has to wait may be taken again, right after `take_writable`."""
        return min((self._streams[stream_id].retry_at for stream_id in self._ready), default=float("inf"))

    def update_row(self, row: Lending, now: float) -> StreamEntry:
        """Store a row that a stream sync reported: new, closed by now, or finished. Return the entry."""
        entry = self._streams.get(row.stream_id)
        if entry is None:
            entry = self._streams[row.stream_id] = StreamEntry(row, valid_until=self._compute_valid_until(row, now))
            self._store_row(entry, row, now)
        elif row.grant_id >= entry.lending.grant_id:
            until = entry.reserved_until if row.grant_id == entry.lending.grant_id else float("inf")
            self._store_row(entry, row, now)
            entry.reserved_until = min(entry.reserved_until, until)
        return entry

    def _compute_valid_until(self, row: Lending, now: float) -> float:
        """Return until when a holder of a former leader or group may begin calls on it."""
        lease_s, grant_validity_s = self._settings.lease_duration_s, self._settings.grant_validity_s
        if is_of_former_timeline(row.grant_id, self._term):  # that timeline's leader may have granted it, unknown here
            return now + lease_s + grant_validity_s
        if row.status is LendingStatus.HELD:  # the previous leader may have answered its ping till now, or may yet
            return max(now, self._previous_leader_until) + grant_validity_s
        if row.session is None and row.reserved_s:  # or till its lease was over, though who took it had ended that
            since = now + min(row.reserved_s, 0.0)  # above 0 where the database's clock was set back
            return since + lease_s + grant_validity_s
        return float("-inf")

    def _compute_reserved_until(self, row: Lending, now: float) -> float:
        if row.reserved_s <= 0:
            return 0.0
        doubt = row.pending_in_doubt  # none is reserved for longer: then the database's clock was set back
        return now + min(row.reserved_s, self._max_reserved_s if doubt is None else doubt.hold_s)

    def _store_row(self, entry: StreamEntry, row: Lending, now: float) -> None:
        """Store the row as it was just read."""
        previous_session = entry.lending.session
        if row.grant_id != entry.lending.grant_id:
            entry.pending_release = None
        entry.lending = row
        entry.reserved_until = self._compute_reserved_until(row, now)
        if previous_session is not None:
            self._forget_name(previous_session, row.stream_id)
        if row.session is not None:
            self._by_session.setdefault(row.session, set()).add(row.stream_id)

    def _forget_name(self, session: str, stream_id: int) -> None:
        """Drop names without a stream here, as new names keep coming during a leader's term."""
        streams = self._by_session.get(session, set())
        streams.discard(stream_id)
        if not streams:
            self._by_session.pop(session, None)

    def drop_finished(self, entry: StreamEntry) -> bool:
        """Remove a stream that is consumed to its end; return whether it was."""
        if entry.lending.status is not LendingStatus.FINISHED or entry.in_flight is not None or entry.queue:
            return False
        self._streams.pop(entry.lending.stream_id, None)
        self._forget_name(entry.lending.session or "", entry.lending.stream_id)
        self._ready.discard(entry.lending.stream_id)
        return True


def _join(earlier: LendingChange, change: LendingChange) -> LendingChange | None:
    """Return the change that does what both do, one after the other, if the earlier need not be written by itself; else
    None. The end of a grant needs no line that says whether it could be read; that it was revoked is a line before."""
    if isinstance(earlier, GrantStream | FreeReservedStream) or isinstance(change, GrantStream | FreeReservedStream):
        return None
    if earlier.grant_id != change.grant_id:
        return None
    match earlier, change:
        case AdvancePosition(), AdvancePosition():
            in_doubt = choose_latest_in_doubt(change.in_doubt, earlier.in_doubt, change.grant_id)
            return replace(_join_progress(earlier, change), in_doubt=in_doubt)
        case AdvancePosition(), ReleaseStream():
            return _join_progress(earlier, change)
        case ReclaimStream(), ReclaimStream():
            epoch = earlier.session_epoch if change.session_epoch is None else change.session_epoch
            return replace(_join_progress(earlier, change), session_epoch=epoch)
        case RecordHistory(), RecordHistory() if earlier.is_of_reading == change.is_of_reading:
            return change
        case RecordHistory(is_of_reading=True), ReleaseStream() | ForceRelease():
            return change
        case _:
            return None


def _join_progress(earlier: AdvancePosition | ReclaimStream, change: P) -> P:
    """Return the change with the further progress of both."""
    consumed = change.consumed if earlier.consumed is None else earlier.consumed.max_of(change.consumed)
    return replace(change, position=max(earlier.position, change.position), consumed=consumed)


def give_back(
    entry: StreamEntry, change: GrantStream | ReclaimStream, reserve_s: float
) -> ReleaseStream | ForceRelease:
    """Return the change that ends a grant whose borrower was lost while it was written. A new one was never sent: its
    position is exact."""
    row = entry.lending
    if isinstance(change, GrantStream):
        return ReleaseStream(row.stream_id, row.grant_id, row.position, "its borrower left before the grant", reserve_s)
    return ForceRelease(row.stream_id, row.grant_id, "its borrower was lost while it reclaimed", reserve_s)
