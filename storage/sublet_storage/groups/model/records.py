"""Rows, changes and results of the group tables, as plain values without SQL."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from msgspec import Struct

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.domain.in_doubt_range import InDoubtRange, pending_in_doubt
from sublet_protocol.domain.subscriptions import StartingPosition as StartingPosition
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.liveness_lock import compute_lock_key
from sublet_storage.groups.model.desired_state import NO_DESIRED_STATE
from sublet_storage.groups.model.desired_state import GroupDesiredState as GroupDesiredState
from sublet_storage.groups.model.options import DEFAULTS
from sublet_storage.groups.model.options import GroupOptions as GroupOptions
from sublet_storage.groups.model.options import OnDataLoss as OnDataLoss
from sublet_storage.groups.model.options import OnPoison as OnPoison
from sublet_storage.node_directory import NodeIncarnation

MAINTENANCE = 0
"""The reserved leadership id under which one node runs the maintenance of the database."""

MAX_LOSSES = 5
"""Forced ends of grants at one and the same position after which the stream is blocked, not granted again."""

SUSPECT_LOSSES = 2
"""Those after which a borrower gets the stream only without another such one: which of its streams was the cause of its
end shows once it has one of them."""


TAKEOVER = "takeover"
"""The history event of a new leader; it is of the group, so its stream_id is 0."""


EPOCHS_CONSUMED = "epochs_consumed"
"""The history event of how far an atomic group has consumed a space; its stream_id is 0."""


CREATE = "create"
"""The history event of the progress that a group was made from; its stream_id is 0."""


COMMAND = "command"
"""The history event of an operator's command; its stream_id is 0."""


UNREADABLE, READABLE = "unreadable", "readable"
"""The history events of a holder that cannot read on, and that it can again."""


class LendingStatus(StrEnum):
    """The durable status of a stream in a group; the leader has the rest of its state in memory."""

    FREE = "free"  # not held; it may be granted once its ancestors are finished
    HELD = "held"  # granted under grant_id to borrower_id of agent
    RESERVED = "reserved"  # an in-doubt range waits for the session that may have committed it
    FINISHED = "finished"  # the stream is closed and consumed to its head
    BLOCKED = "blocked"  # not granted until an operator decides: beyond the head, gone, poison, or lost too often


AT_REST = (LendingStatus.FREE, LendingStatus.RESERVED)
"""Of such a stream the next messages may be granted."""


class Group(Struct, frozen=True):
    """One incarnation of a shared subscription; deleted and created again it has another group_id.

    `revision` counts the changes of its desired state.
    """

    group_id: int
    subscription: Subscription
    options: GroupOptions = DEFAULTS
    desired_state: GroupDesiredState = NO_DESIRED_STATE
    revision: int = 0

    @property
    def starting_position(self) -> StartingPosition:
        """Return its starting position."""
        return self.options.starting_position


class LeaderLivenessLock(Struct, frozen=True):
    """The advisory lock that a leader of this incarnation holds as long as its process lives."""

    incarnation: str
    key: int

    @classmethod
    def of(cls, incarnation: str) -> LeaderLivenessLock:
        """Return the lock of that incarnation."""
        return cls(incarnation, compute_lock_key(incarnation))


class Leadership(Struct, frozen=True):
    """A leadership row as the database sees it now; `remaining_s` <= 0 means the lease has run out.

    `lock_key`: of the lock that its leader has declared; None: its lease alone decides. `previous_leader_s`: for how
    long a leader from which it was claimed by its free lock may still act as the leader.
    """

    leadership_id: int
    node: NodeIncarnation
    term: int
    remaining_s: float
    lock_key: int | None = None
    previous_leader_s: float = 0.0

    @property
    def lock(self) -> LeaderLivenessLock | None:
        """Return the lock of its leader; None if the key is of another incarnation, left by a release without locks."""
        lock = LeaderLivenessLock.of(self.node.incarnation)
        return lock if lock.key == self.lock_key else None


class Lending(Struct, frozen=True):
    """A lending row together with the facts of its stream, read in one statement.

    `head` and `is_closed` are the stream's at that instant. `parents`: of a row that may be granted, the nearest
    ancestors of its stream that the group has not finished, for which it waits, also where streams between them have no
    row. Of other rows: none. `reserved_s`: how long the row, which is free or reserved, is still reserved for
    `session`; not, if it is not above 0. Below 0 and without a session: how long ago a reset, or the end of the former
    group of the name, took it from its holder. `consumed`: in an atomic group, what is consumed in entire epochs.
    `in_doubt`: what a holder planned last. `grant_key`: of the grant in force. `lock_valid_s`: for how long its
    holder's agent begins user calls after it last saw its lock held; 0: it has none that this database has seen held.
    `suspect_position`: at which it was taken from holders `SUSPECT_LOSSES` times or more.
    """

    stream_id: int
    status: LendingStatus
    position: int
    grant_id: int
    borrower_id: str | None
    agent: str | None
    session: str | None
    generation_id: int
    hash_from: int
    hash_to: int
    head: int
    is_closed: bool
    parents: tuple[int, ...]
    session_epoch: int | None = None
    reserved_s: float = 0.0
    consumed: ConsumedFrontier | None = None
    in_doubt: InDoubtRange | None = None
    grant_key: GrantSecret | None = None
    lock_valid_s: float = 0.0
    suspect_position: int | None = None

    @property
    def is_suspect(self) -> bool:
        """Return whether what comes next in it may end its holders. What is in doubt has to come back to its session
        all the same."""
        return self.suspect_position == self.position and self.pending_in_doubt is None

    @property
    def pending_in_doubt(self) -> InDoubtRange | None:
        """Return the range in doubt, None if it is done or there is none."""
        return pending_in_doubt(self.in_doubt, self.position, self.consumed)


class GrantStream(Struct, frozen=True):
    """Grants a free stream, or one that is reserved for the session. Applied: status held, a new grant id, position
    read from the row.

    The leader decides to which session a free row that is reserved may be granted. `lock_valid_s`, here and of a
    reclaim: as of `Lending`, by the borrower's word: it is stored if the agent's lock is held at this moment.
    """

    stream_id: int
    borrower_id: str
    agent: str
    session: str | None
    reason: str
    session_epoch: int | None = None
    lock_valid_s: float = 0.0


class ReclaimStream(Struct, frozen=True):
    """The same agent takes its stream over to a new borrower: the grant id stays, position only grows. Repeatable.

    `session_epoch` is written to the row unless it is None.
    """

    stream_id: int
    grant_id: int
    position: int
    borrower_id: str
    agent: str
    session_epoch: int | None = None
    consumed: ConsumedFrontier | None = None
    lock_valid_s: float = 0.0


class AdvancePosition(Struct, frozen=True):
    """Progress under a grant. A closed stream consumed to its head is finished by it, which ends the grant.

    `consumed`, here and elsewhere: what of it is consumed in entire epochs, where the group is atomic. `in_doubt`: what
    is planned next; None: unchanged.
    """

    stream_id: int
    grant_id: int
    position: int
    consumed: ConsumedFrontier | None = None
    in_doubt: InDoubtRange | None = None


class ReleaseStream(Struct, frozen=True):
    """The final progress of a grant: position, then free (or finished), under the next grant id.

    With `reserve_s` above 0 a row that is free afterwards is reserved that long for its holder's session, if it has a
    name. Where something is in doubt the row is reserved for that session afterwards. With `delivered_end` behind the
    position, what lies between them was delivered and given up: it may be delivered again. With `poison` the next
    messages cannot be decoded, up to before that offset: the row is blocked, or, with `may_skip`, goes on there, and
    what lies between is counted as lost. With `is_beyond_head` its holder found the stream to end before what it had
    read: the row is blocked, wherever the stream ends now. With `successor` a row that is free afterwards, and reserved
    for nobody, is granted in the same transaction.
    """

    stream_id: int
    grant_id: int
    position: int
    reason: str
    reserve_s: float = 0.0
    delivered_end: int = 0
    consumed: ConsumedFrontier | None = None
    poison: int = 0
    may_skip: bool = False
    is_beyond_head: bool = False
    successor: GrantStream | None = None


class ForceRelease(Struct, frozen=True):
    """Ends a grant without final progress: what follows the row's position may be delivered again. `reserve_s`: as of
    `ReleaseStream`. With `ends_doubt` the session may not come back, and what it left in doubt is not reserved for it.
    """

    stream_id: int
    grant_id: int
    reason: str
    reserve_s: float = 0.0
    ends_doubt: bool = False


class FreeReservedStream(Struct, frozen=True):
    """Frees a reserved stream for others, whose session has not come back in time, or by `is_forced`: what is in doubt
    may be seen twice."""

    stream_id: int
    grant_id: int
    reason: str
    is_forced: bool = False


class RecordHistory(Struct, frozen=True):
    """Writes a history record about a grant in force; nothing else changes."""

    stream_id: int
    grant_id: int
    event: str
    reason: str

    @property
    def is_of_reading(self) -> bool:
        """Return whether it says that the holder cannot read on, or can again."""
        return self.event in (UNREADABLE, READABLE)


LendingChange = (
    GrantStream | ReclaimStream | AdvancePosition | ReleaseStream | ForceRelease | FreeReservedStream | RecordHistory
)

HOLDING = AdvancePosition | ReclaimStream | RecordHistory
"""Changes that leave a stream with its holder: its ancestors do not matter."""


class LendingOutcome(StrEnum):
    """The outcome of one change."""

    APPLIED = "applied"
    REFUSED = "refused"  # its condition does not hold; `lending` is the row as it is
    INVALID = "invalid"  # it names offsets or a grant that cannot be; the row is untouched
    BUSY = "busy"  # the row is locked by a user's transaction; try again on the next tick


class LendingChangeResult(Struct, frozen=True):
    """The result of a change. `lending` is the row after the statement; None where there is no such row, where it was
    busy, or where progress was applied and changed nothing but the position, to the change's. `problem`: of an invalid
    change."""

    change: LendingChange
    outcome: LendingOutcome
    lending: Lending | None
    problem: str = ""


class GroupWrites(Struct, frozen=True):
    """The writes of one group's leader, under one term; at most one change per stream.

    `needs_stream_sync` also inserts rows for streams opened since, finishes free closed streams with nothing left, and
    reports every unfinished row whose stream is closed. Of an atomic group it advances the consumed frontier, and
    returns it.
    """

    group_id: int
    term: int
    changes: tuple[LendingChange, ...] = ()
    needs_stream_sync: bool = False


class GroupWriteResult(Struct, frozen=True):
    """The results in the order of the changes. `has_stale_term`: the term is over and nothing of this group was
    written. `is_outcome_unknown`: all of it was written, or nothing. `needs_stream_sync`: streams are
    still to be synced.

    `history`: the history records of this commit, in their order, those of the stream sync last. `desired_state`, of a
    stream sync: the present one.
    """

    group_id: int
    has_stale_term: bool
    results: tuple[LendingChangeResult, ...] = ()
    synced: tuple[Lending, ...] = ()
    history: tuple[HistoryRecord, ...] = ()
    epochs: tuple[GroupFrontier, ...] = ()
    desired_state: GroupDesiredState | None = None
    is_outcome_unknown: bool = False
    needs_stream_sync: bool = False


@dataclass(frozen=True, slots=True)
class HistoryRecord:
    """A row of lending_history. Of a `is_forced` move, messages in [position, redelivery_end) may be seen twice.

    `redelivery_end` is the stream's head at that moment (not below the position); None where nothing is seen twice.
    `key_digest`: of the key of the grant that it is about, to be written; it is not read again.
    """

    at_us: int
    group_id: int
    stream_id: int
    event: str
    reason: str
    grant_id: int
    borrower_id: str | None
    agent: str | None
    position: int
    term: int
    is_forced: bool
    redelivery_end: int | None = None
    session: str | None = None
    key_digest: bytes | None = field(default=None, compare=False, repr=False)
