"""Capabilities to publish epochs of a space, which determine its lower frontier.

A capability is given and changed under two locks: its producer's, which waits for what that is writing, and the space's
row. So when the frontier has passed an epoch, all that was published in it is in the log, and a reader of the frontier
sees that too. A producer that was fenced by a later incarnation changes none: the later one goes on with what was held,
or it ends with its lease.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import psycopg
from msgspec import Struct

from sublet_protocol.domain.epoch_frontiers import (
    Epoch,
    LowerFrontier,
    UpperFrontier,
    check_count,
    check_epoch,
    format_epoch,
    format_frontier,
    lower_frontier_from_json,
    upper_frontier_from_json,
)
from sublet_protocol.domain.errors import (
    EpochAlreadyCompleted,
    EpochCapabilityExpired,
    InvalidEpoch,
    SubletError,
    UnknownSpace,
)
from sublet_protocol.domain.limits import MAX_ANTICHAIN, MAX_EPOCH, MAX_HELD_EPOCHS
from sublet_storage.db.isolated_errors import select_done
from sublet_storage.db.store_connection import Guard
from sublet_storage.log.append import (
    STORED_OUTCOMES,
    AppendResult,
    BlockAppend,
    ProducerIdentity,
    append,
    map_append_errors,
    producer_fenced_error,
)
from sublet_storage.notify.changes import ObjectChange, epochs_change

LEASE_S = 30.0
"""Seconds without a renewal after which a publisher counts as dead, and its unfinished epochs are closed."""

MIN_LEASE_S, MAX_LEASE_S = 1.0, 7 * 86400.0
"""The bounds of a publisher's lease."""

LOCK_WAIT_S = 2.0
"""How long a pass waits for the locks of producers, where the leases of several have run out."""

_LOCK = "select lock_producer(%s)"
"""Locks the table of spaces and the producer, before its streams and the space's row, in the order of changes of
spaces."""

_HOLD = "select outcome, lower, moves from hold_epochs(%s, %s, %s, %s, %s)"

RETENTION_S = 7 * 86400.0
"""How long the producers whose epochs were closed are stored."""


def hold(
    conn: psycopg.Connection[Any],
    space_id: int,
    producer: ProducerIdentity,
    epochs: Iterable[Epoch],
    lease_s: float = LEASE_S,
) -> LowerFrontier:
    """Restrict the producer to these epochs and later ones; return the space's resulting lower frontier.

    A first capability may be for any epoch that is not completed; one that is held only moves on. A later incarnation
    of a named producer continues with that of the one before. Raise `EpochAlreadyCompleted`, `InvalidEpoch`,
    `ProducerFenced`, `EpochCapabilityExpired`, `UnknownSpace`.
    """
    frontier = LowerFrontier.from_epochs(map(check_epoch, epochs))
    check_count(frontier.least)
    return _hold(conn, space_id, producer, frontier, lease_s)[0]


class EpochAdvanceResult(Struct, frozen=True):
    """The outcome of appends, and of an advance behind them: `change` if it was made, `error` if it failed. If both are
    None, not all blocks before it were stored."""

    results: list[AppendResult]
    change: ObjectChange | None = None
    error: SubletError | None = None


def append_and_advance(
    conn: psycopg.Connection[Any],
    appends: Sequence[BlockAppend],
    space_id: int,
    producer: ProducerIdentity,
    epochs: Iterable[Epoch],
    lease_s: float,
) -> EpochAdvanceResult:
    """Append blocks, and if all of them are stored, `hold` what comes next, in one transaction. Raise what `append`
    raises: then nothing has happened, or it is unknown, and the call may be repeated."""
    frontier = LowerFrontier.from_epochs(epochs)
    with map_append_errors(conn), conn.pipeline(), conn.transaction():
        # Before an append shares it: else two attempts wait for each other.
        conn.execute(_LOCK, (producer.producer_id,))
        answers = append(conn, appends, in_pipeline=True)
        if any(answer.outcome not in STORED_OUTCOMES for answer in answers):
            return EpochAdvanceResult(answers)
        cursor = _query_hold(conn, space_id, producer, frontier, lease_s)
    try:
        return EpochAdvanceResult(answers, _fetch_hold(cursor, space_id, producer, frontier)[1])
    except SubletError as error:
        return EpochAdvanceResult(answers, error=error)


def release(conn: psycopg.Connection[Any], space_id: int, producer: ProducerIdentity) -> None:
    """Release the producer's capability: its open epochs are completed as far as it is concerned. Raise
    `ProducerFenced` if the capability is a later incarnation's, and changes nothing then."""
    released = "select release_epochs(%s, %s, %s)"
    if conn.execute(released, (space_id, producer.producer_id, producer.incarnation)).fetchone() != (True,):
        raise producer_fenced_error(producer.producer_id, producer.incarnation)


def renew(conn: psycopg.Connection[Any], producer: ProducerIdentity, lease_s: float = LEASE_S) -> frozenset[int]:
    """Extend the producer's capabilities by another lease; return their spaces. Raise `ProducerFenced`: a later
    incarnation continues with them, or they end with their lease."""
    parameters = (producer.producer_id, producer.incarnation, lease_s)
    ((spaces, is_over),) = conn.execute("select * from renew_epochs(%s, %s, %s)", parameters).fetchall()
    if is_over:
        raise producer_fenced_error(producer.producer_id, producer.incarnation)
    return frozenset(spaces)


def expire(conn: psycopg.Connection[Any], guard: Guard | None = None) -> Iterator[tuple[int, str]]:
    """Expire capabilities held beyond their lease; yield (space, producer) of each. One that is writing is left for
    the next pass. Raise an error with one after all others were done.

    Those of dropped spaces are deleted, as nothing is published there any more.
    """
    conn.execute(
        "delete from capability where expired_at < clock_timestamp() - make_interval(secs => %s)", (RETENTION_S,)
    )
    conn.execute(
        "delete from capability c using space p where p.space_id = c.space_id and p.dropped_at is not null"
        " and c.expires_at < clock_timestamp()"
    )
    overdue = conn.execute(
        "select space_id, producer_id from capability where expired_at is null and expires_at < clock_timestamp()"
        " order by space_id, producer_id"
    ).fetchall()
    wait_s = None if len(overdue) <= 1 else LOCK_WAIT_S / len(overdue)  # one transaction may hold the locks of all
    return select_done(conn, overdue, lambda capability: expire_one(conn, *capability, guard, wait_s))


def complete_space(conn: psycopg.Connection[Any], space_id: int) -> None:
    """Complete all epochs that have begun in a dropped space, whose streams this transaction has closed."""
    lower = read_lower_frontier(conn, space_id)
    if lower is not None:
        conn.execute(
            "update space set lower_frontier = %s, frontier_move_count = frontier_move_count + 1 where space_id = %s",
            (_encode_frontier(lower.after_completing(_read_upper_frontier(conn, space_id))), space_id),
        )


def read_lower_frontier(conn: psycopg.Connection[Any], space_id: int) -> LowerFrontier | None:
    """Return what may still be published in the space; None where no epoch was ever used."""
    row = conn.execute("select lower_frontier from space where space_id = %s", (space_id,)).fetchone()
    return lower_frontier_from_json(row[0]) if row is not None else None


def frontier_change(conn: psycopg.Connection[Any], space_id: int) -> ObjectChange:
    """Return the change that notifies of a moved lower frontier of the space."""
    row = conn.execute("select frontier_move_count from space where space_id = %s", (space_id,)).fetchone()
    assert row is not None, "spaces are dropped, not deleted"
    return epochs_change(space_id, *row)


def expire_one(
    conn: psycopg.Connection[Any],
    space_id: int,
    producer_id: str,
    guard: Guard | None = None,
    wait_s: float | None = None,
) -> bool:
    """End what a producer holds in a space if its lease has run out; return False if it has not, or is locked for
    `wait_s`, or as long as the connection waits."""
    try:
        with conn.transaction():
            if guard is not None:
                guard(conn)
            if wait_s is not None:
                conn.execute("select set_config('lock_timeout', %s, true)", (f"{math.ceil(wait_s * 1000)}ms",))
            conn.execute(_LOCK, (producer_id,))
            lock = "select from space where space_id = %s and dropped_at is null for no key update"
            if not conn.execute(lock, (space_id,)).rowcount:
                return False  # its drop has completed all
            marked = conn.execute(
                "update capability set expired_at = clock_timestamp(), upper_frontier = %s where space_id = %s"
                " and producer_id = %s and expired_at is null and expires_at < clock_timestamp()",
                (json.dumps(_read_upper_frontier(conn, space_id).greatest), space_id, producer_id),
            )
            if marked.rowcount:
                conn.execute("select settle_epochs(%s)", (space_id,))
            return bool(marked.rowcount)
    except psycopg.errors.LockNotAvailable:
        return False


def capability_expired_error(producer_id: str) -> EpochCapabilityExpired:
    """Return the error of an append or an advance when the lease has run out."""
    return EpochCapabilityExpired(
        f"producer {producer_id!r}: it holds no epochs, or its lease has run out, and the epochs "
        "that it held are closed. Make a new Publisher, and go on with an epoch that is not completed."
    )


def check_not_backwards(producer: ProducerIdentity, frontier: LowerFrontier, epochs: Iterable[Epoch]) -> None:
    """Raise `EpochAlreadyCompleted` for an epoch that is not at or after those that the producer holds."""
    for epoch in epochs:
        if not frontier.admits(epoch):
            raise EpochAlreadyCompleted(
                f"epoch {format_epoch(epoch)}: producer {producer.producer_id!r} has advanced to "
                f"{format_frontier(frontier)}, and does not "
                "go back. Give an epoch at or after that."
            )


def epoch_completed_error(producer_id: str) -> EpochAlreadyCompleted:
    """Return the error of an append whose producer has advanced beyond one of its epochs."""
    return EpochAlreadyCompleted(
        f"producer {producer_id!r}: a message is in an epoch that it has advanced beyond. Publish in an epoch before "
        "advancing from it."
    )


def _hold(
    conn: psycopg.Connection[Any], space_id: int, producer: ProducerIdentity, frontier: LowerFrontier, lease_s: float
) -> tuple[LowerFrontier, ObjectChange]:
    """Return the frontier that is left, and the change that announces it. Raise what `hold` raises."""
    return _fetch_hold(_query_hold(conn, space_id, producer, frontier, lease_s), space_id, producer, frontier)


def _query_hold(
    conn: psycopg.Connection[Any], space_id: int, producer: ProducerIdentity, frontier: LowerFrontier, lease_s: float
) -> psycopg.Cursor[Any]:
    return conn.execute(
        _HOLD, (space_id, producer.producer_id, producer.incarnation, _encode_frontier(frontier), lease_s), prepare=True
    )


def _fetch_hold(
    cursor: psycopg.Cursor[Any], space_id: int, producer: ProducerIdentity, frontier: LowerFrontier
) -> tuple[LowerFrontier, ObjectChange]:
    row = cursor.fetchone()
    assert row is not None
    outcome, stored, moves = row
    lower = lower_frontier_from_json(stored) or LowerFrontier()
    match outcome:
        case "held":
            return lower, epochs_change(space_id, moves)
        case "unknown":
            raise UnknownSpace(f"space {space_id} does not exist any more.")
        case "fenced":
            raise producer_fenced_error(producer.producer_id, producer.incarnation)
        case "expired":
            raise capability_expired_error(producer.producer_id)
        case "numbers":
            for epoch in frontier.least:
                check_epoch(epoch, len(lower.least[0]))
        case "backward":
            check_not_backwards(producer, lower, frontier.least)
        case "completed":
            _check_open(lower, frontier)
        case "many":
            raise InvalidEpoch(
                f"producer {producer.producer_id!r} with {len(frontier.least)} more: all publishers of space "
                f"{space_id} would hold over {MAX_ANTICHAIN} epochs, or {MAX_HELD_EPOCHS} with each counted for each "
                "that holds it, which is the limit of a space. Name fewer, or wait until others advance or are closed."
            )
    raise AssertionError(f"hold_epochs says {outcome}: {frontier} by {lower}")


def _read_upper_frontier(conn: psycopg.Connection[Any], space_id: int) -> UpperFrontier:
    ((greatest,),) = conn.execute("select space_upper_frontier(%s)", (space_id,)).fetchall()
    return upper_frontier_from_json(greatest)


def _check_open(lower: LowerFrontier, requested_frontier: LowerFrontier) -> None:
    for epoch in requested_frontier.least:
        if not lower.admits(epoch):
            is_over = all(number > MAX_EPOCH for lower_epoch in lower.least for number in lower_epoch)
            hint = "There is none left: take another space" if is_over else "Begin with such an epoch"
            raise EpochAlreadyCompleted(
                f"epoch {format_epoch(epoch)} is completed: in this space, what may still be published is at or after "
                f"{format_frontier(lower)}. {hint}."
            )


def _encode_frontier(lower: LowerFrontier) -> str:
    return json.dumps(lower.least)
