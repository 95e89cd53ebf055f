"""Elects leaders: the claims of one node incarnation on leaderships, as a pure machine."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Mapping
from typing import assert_never

from msgspec import Struct

from sublet_leader.election.dead_process_detectors import FreeLockDetector
from sublet_leader.election.events import (
    ClaimCompleted,
    ElectionOutcome,
    Event,
    LeadershipAcquired,
    LeadershipHeldElsewhere,
    LeadershipLost,
    Notice,
    ReleaseCompleted,
    RenewCompleted,
    Resign,
    ResignAll,
    StartCampaign,
)
from sublet_leader.election.transitions import TRANSITIONS, ElectionEventKind, ElectionStatus
from sublet_leader.settings import MIN_CLOCK_RATE, LeaderSettings
from sublet_protocol.domain.grant_keys import timeline_number
from sublet_protocol.tick import Tick
from sublet_storage.db.liveness_lock import LivenessLockLost, LockEvent, OwnLivenessLockAcquired, PeerLocksChecked
from sublet_storage.groups.model.records import LeaderLivenessLock


class _Record(Struct):
    """The state of one leadership. `term` is meaningful while leading or releasing; `rival`, the lock of the
    node that leads, and `rival_timeline`, of the database that says so, on standby; `claimed_from`, the free lock by
    which the last claim was made; `lock_key`, which this node has declared or may have, while leading."""

    leadership_id: int
    status: ElectionStatus = ElectionStatus.ABSENT
    term: int = 0
    attempted_at: float = -math.inf  # when the last claim was decided
    trusted_until: float = -math.inf
    wake_at: float = math.inf  # leading: the end of trust; else: when to try again
    rival: LeaderLivenessLock | None = None
    rival_timeline: int = 0
    claimed_from: LeaderLivenessLock | None = None
    lock_key: int | None = None


class _GoneLock(Struct, frozen=True):
    """When a leader's lock was found free twice, and on which timeline of the database (None: not known)."""

    at: float
    timeline: int | None


class Election:
    """The claims of one node incarnation. Pass every answer to `decide`, and a `Tick` at `wake_at`."""

    def __init__(self, settings: LeaderSettings, incarnation: str) -> None:
        self._settings = settings
        self._incarnation = incarnation
        self._records: dict[int, _Record] = {}
        self._led_terms: dict[int, int] = {}
        self._timers: list[tuple[float, int]] = []  # a heap; only a record's newest wake_at counts
        self._renewing: tuple[dict[int, int], int | None] | None = None  # the batch in flight, and the key it declares
        self._renew_at = math.inf
        self._claims: list[int] = []
        self._claims_by_lock: dict[int, LeaderLivenessLock] = {}
        self._rivals: dict[int, set[int]] = {}  # {key of a leader's lock: what it leads}
        self._free_locks = FreeLockDetector(settings, settings.lock_recheck_delay_s)
        self._gone_locks: dict[int, _GoneLock] = {}  # by the key of a leader's lock
        self._silent_from = math.inf
        self.lock_key: int | None = None
        self._release_now: dict[int, int] = {}
        self._notices: list[Notice] = []

    def trusted_term(self, leadership_id: int, now: float) -> int | None:
        """Return the term under which this node may act as the leader now; None if it may not."""
        term = self._led_terms.get(leadership_id)
        return term if term is not None and now < self._records[leadership_id].trusted_until else None

    def is_silent(self, leadership_id: int, now: float) -> bool:
        """Return whether this node must not answer as the leader, though it may write: it has lost its lock, so another
        node may lead at any moment."""
        record = self._records.get(leadership_id)
        return now >= self._silent_from and record is not None and record.lock_key is not None

    def rival_keys(self) -> tuple[int, ...]:
        """Return the keys of the locks to check: of the leaders that this node would succeed. Thread-safe."""
        return tuple(self._rivals)

    def leaderships(self) -> dict[int, int]:
        """Return {leadership: term} of all that this node leads, inside or outside the trust window."""
        return dict(self._led_terms)

    def is_busy(self) -> bool:
        """Return whether any leadership is led, campaigned for or under way."""
        return bool(self._records)

    def statuses(self) -> tuple[ElectionStatus, ...]:
        """Return the status of each leadership of this node. Thread-safe."""
        return tuple(record.status for record in tuple(self._records.values()))

    def decide(self, event: Event, now: float) -> ElectionOutcome:
        """Handle the event, then the timers that are due, as an answer may come just in time; return the outcome."""
        self._dispatch(event, now)
        self._run_timers(now)
        renew = self._renew(now)
        claims, release, notices = tuple(self._claims), self._release_now, tuple(self._notices)
        rivals = self._claims_by_lock
        self._claims, self._claims_by_lock, self._release_now, self._notices = [], {}, {}, []
        return ElectionOutcome(claims, rivals, renew, release, notices, self._wake_at())

    # --- events -----------------------------------------------------------------------------------------------------

    def _dispatch(self, event: Event, now: float) -> None:
        match event:
            case StartCampaign(leadership_id):
                self._apply_transition(
                    self._records.setdefault(leadership_id, _Record(leadership_id)), ElectionEventKind.CAMPAIGN, now
                )
            case Resign(leadership_id):
                self._resign((leadership_id,), now)
            case ResignAll():
                self._resign(tuple(self._records), now)
            case ClaimCompleted():
                self._on_claim_answered(event, now)
            case RenewCompleted():
                self._on_renew_answered(event, now)
            case ReleaseCompleted():
                self._on_release_answered(event, now)
            case OwnLivenessLockAcquired() | LivenessLockLost() | PeerLocksChecked():
                self._take_lock_event(event, now)
            case Tick():
                pass
            case _:
                assert_never(event)

    def _take_lock_event(self, event: LockEvent, now: float) -> None:
        match event:
            case OwnLivenessLockAcquired(lock_key):
                self.lock_key, self._silent_from = lock_key, math.inf
            case LivenessLockLost(at):
                self.lock_key, self._silent_from, self._gone_locks = None, at + self._settings.lock_grace_s, {}
                self._renew_no_later_than(self._silent_from)
            case PeerLocksChecked():
                gone_keys = sorted(self._free_locks.check(event))
                after = now - self._settings.lock_grace_s
                self._gone_locks = {key: gone for key, gone in self._gone_locks.items() if gone.at > after}
                self._gone_locks |= dict.fromkeys(gone_keys, _GoneLock(now, event.timeline))
                for lock_key in gone_keys:
                    for leadership_id in sorted(self._rivals.get(lock_key, ())):
                        self._succeed_gone_rival(self._records[leadership_id], now)
            case _:
                assert_never(event)

    def _resign(self, leadership_ids: Iterable[int], now: float) -> None:
        for leadership_id in leadership_ids:
            if record := self._records.get(leadership_id):
                self._apply_transition(record, ElectionEventKind.RESIGN, now)

    def _on_claim_answered(self, event: ClaimCompleted, now: float) -> None:
        record, claim = self._records.get(event.leadership_id), event.leadership
        if record is None or record.status not in (ElectionStatus.CLAIMING, ElectionStatus.ABANDONING):
            return
        if claim is None:
            self._apply_transition(record, ElectionEventKind.CLAIM_FAILED, now, event)
        elif claim.node.incarnation != self._incarnation:
            if record.claimed_from is not None:
                self._gone_locks.pop(record.claimed_from.key, None)  # it is held again
            record.rival, record.rival_timeline = claim.lock, timeline_number(claim.term)
            self._apply_transition(record, ElectionEventKind.CLAIM_LOST, now, event)
            if record.leadership_id in self._records:
                self._succeed_gone_rival(record, now)
        else:
            # An earlier claim of ours may have outlived its answer: then less than an entire lease is left.
            lease_s = min(self._settings.lease_duration_s, claim.remaining_s)
            record.term, record.lock_key = claim.term, claim.lock_key
            record.trusted_until = event.attempt_started + lease_s - self._settings.lease_margin_s
            self._apply_transition(
                record,
                ElectionEventKind.CLAIM_WON if now < record.trusted_until else ElectionEventKind.CLAIM_WON_LATE,
                now,
                event,
            )

    def _on_renew_answered(self, event: RenewCompleted, now: float) -> None:
        if self._renewing is None:
            return
        (attempted, lock_key), self._renewing = self._renewing, None
        if event.renewed is None:
            self._renew_no_later_than(now + self._settings.claim_retry_interval_s)
            return
        self._renew_no_later_than(event.attempt_started + self._settings.lease_renew_interval_s)
        trusted_until = event.attempt_started + self._settings.lease_duration_s - self._settings.lease_margin_s
        for record in self._find_awaiting(attempted, ElectionStatus.LEADING):
            if record.leadership_id in event.renewed:
                record.trusted_until = max(record.trusted_until, trusted_until)
                record.lock_key = lock_key
                self._apply_transition(record, ElectionEventKind.RENEWED, now)
            else:
                self._apply_transition(record, ElectionEventKind.RENEWAL_REJECTED, now)

    def _on_release_answered(self, event: ReleaseCompleted, now: float) -> None:
        for record in self._find_awaiting(event.terms, ElectionStatus.RELEASING, ElectionStatus.RELEASING_TO_RECLAIM):
            self._apply_transition(
                record, ElectionEventKind.RELEASED if event.is_done else ElectionEventKind.RELEASE_FAILED, now
            )

    def _find_awaiting(self, terms: Mapping[int, int], *waiting: ElectionStatus) -> list[_Record]:
        """Return the records that wait for this answer; an answer for an earlier term does not apply to a later one."""
        records = ((self._records.get(leadership_id), term) for leadership_id, term in terms.items())
        return [e for e, term in records if e is not None and e.term == term and e.status in waiting]

    def _apply_transition(
        self, record: _Record, kind: ElectionEventKind, now: float, answer: ClaimCompleted | None = None
    ) -> None:
        """Make one step of the table: set the next status, then run the action. Raise for a pair that the table lacks,
        which is a bug."""
        row = TRANSITIONS[record.status]
        if kind not in row:
            raise AssertionError(f"the table says that this cannot happen to {record}: {kind.value} at {now:.3f}")
        status, action = row[kind]
        was_led, record.status = record.status is ElectionStatus.LEADING, status
        self._watch_rival(record, status is ElectionStatus.STANDBY)
        if status is ElectionStatus.LEADING:
            self._led_terms[record.leadership_id] = record.term
        elif was_led:
            del self._led_terms[record.leadership_id]
        act: Callable[[_Record, float, ClaimCompleted | None], None] = getattr(self, action.value)
        act(record, now, answer)

    def _succeed_gone_rival(self, record: _Record, now: float) -> None:
        if self._has_rival_gone(record, now):
            self._apply_transition(record, ElectionEventKind.RIVAL_GONE, now)

    def _has_rival_gone(self, record: _Record, now: float) -> bool:
        """Return whether the lock of the node that leads was found free twice, a moment ago, perhaps because of another
        leadership; the claim tries the lock once more. Locks on another timeline are of another server."""
        if record.rival is None or (gone := self._gone_locks.get(record.rival.key)) is None:
            return False
        return now < gone.at + self._settings.lock_grace_s and gone.timeline in (None, record.rival_timeline)

    def _watch_rival(self, record: _Record, is_standby: bool) -> None:
        if record.rival is None:
            return
        waiting = self._rivals.setdefault(record.rival.key, set())
        if is_standby:
            waiting.add(record.leadership_id)
        else:
            waiting.discard(record.leadership_id)
            if not waiting:
                del self._rivals[record.rival.key]

    # --- actions of the table ---------------------------------------------------------------------------------------

    def _ignore(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        pass

    def _claim(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        record.attempted_at, record.claimed_from = now, None
        self._sleep(record, math.inf)
        self._claims.append(record.leadership_id)

    def _succeed(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        assert record.rival is not None
        self._claims_by_lock[record.leadership_id] = record.rival
        self._claim(record, now, answer)
        record.claimed_from = record.rival

    def _claim_sooner(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        self._sleep(record, min(record.wake_at, record.attempted_at + self._settings.claim_retry_interval_s))

    def _lead(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        self._sleep(record, record.trusted_until)
        start = record.trusted_until + self._settings.lease_margin_s - self._settings.lease_duration_s
        self._renew_no_later_than(start + self._settings.lease_renew_interval_s)
        assert answer is not None
        assert answer.leadership is not None
        # No lease has more left: above it, the database's clock was set back.
        previous_leader_s = min(answer.leadership.previous_leader_s, self._settings.lease_duration_s)
        previous_leader_until = now + previous_leader_s / MIN_CLOCK_RATE if previous_leader_s else -math.inf
        self._notices.append(LeadershipAcquired(record.leadership_id, record.term, previous_leader_until))

    def _wait(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        assert answer is not None
        assert answer.leadership is not None
        claim = answer.leadership
        remaining_s = min(claim.remaining_s, self._settings.lease_duration_s)  # above it, as in `_lead`
        self._sleep(
            record,
            max(now + remaining_s + answer.jitter_s, record.attempted_at + self._settings.claim_retry_interval_s),
        )
        if not self._has_rival_gone(record, now):
            self._notices.append(LeadershipHeldElsewhere(record.leadership_id, claim.node.address))

    def _retry(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        self._sleep(record, now + self._settings.claim_retry_interval_s + (answer.jitter_s if answer else 0.0))

    def _extend(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        self._sleep(record, record.trusted_until)

    def _lose(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        self._notices.append(LeadershipLost(record.leadership_id))
        self._release(record, now, answer)

    def _release(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        self._sleep(record, math.inf)
        self._release_now[record.leadership_id] = record.term

    def _forget(self, record: _Record, now: float, answer: ClaimCompleted | None) -> None:
        self._sleep(record, math.inf)
        del self._records[record.leadership_id]

    # --- time -------------------------------------------------------------------------------------------------------

    def _sleep(self, record: _Record, until: float) -> None:
        changed, record.wake_at = record.wake_at != until, until
        if changed and until < math.inf:
            heapq.heappush(self._timers, (until, record.leadership_id))

    def _run_timers(self, now: float) -> None:
        while (timer := self._find_next_timer()) is not None and timer.wake_at <= now:
            heapq.heappop(self._timers)
            self._apply_transition(
                timer,
                ElectionEventKind.TRUST_EXPIRED
                if timer.status is ElectionStatus.LEADING
                else ElectionEventKind.TIMER_DUE,
                now,
            )

    def _find_next_timer(self) -> _Record | None:
        """Return the record with the earliest timer; drops timers that were replaced since."""
        while self._timers:
            at, leadership_id = self._timers[0]
            record = self._records.get(leadership_id)
            if record is not None and record.wake_at == at:
                return record
            heapq.heappop(self._timers)
        return None

    def _renew_no_later_than(self, at: float) -> None:
        self._renew_at = min(self._renew_at, at)

    def _renew(self, now: float) -> Mapping[int, int]:
        """Return the next renewal batch if it is due: everything led, one batch in flight at a time."""
        if self._renewing is not None or now < self._renew_at:
            return {}
        self._renew_at = math.inf
        if self._led_terms:
            self._renewing = dict(self._led_terms), self.lock_key
        for leadership_id in self._led_terms if self.lock_key is not None else ():
            self._records[leadership_id].lock_key = self.lock_key  # though the answer may be lost
        return dict(self._led_terms)

    def _wake_at(self) -> float | None:
        timer = self._find_next_timer()
        times = [timer.wake_at] if timer else []
        if self._renewing is None and self._renew_at < math.inf:
            times.append(self._renew_at)
        return min(times, default=None)
