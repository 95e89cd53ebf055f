"""Commits the changes of a leader: many groups in one transaction of array statements.

Progress that does nothing but move a position is written by the first round trip, which locks the leadership rows. What
else there is takes two: lock the lending rows that are not locked and read the facts, by which the rules decide; then
write, record, commit. Where it is of several groups the commit takes one of its own. Stream syncs add round trips of
their own, every few seconds per group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeGuard

from msgspec import Struct

from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_storage.db.store_connection import Connection, TransactionRolledBack
from sublet_storage.groups.coordinator import leadership, lending_statements
from sublet_storage.groups.coordinator.lending_statements import Key
from sublet_storage.groups.coordinator.lending_write_batch import LendingWriteBatch
from sublet_storage.groups.coordinator.stream_sync import NOTHING, SyncResult, add_streams, sync_streams
from sublet_storage.groups.model.lending_row import (
    FAILED_OVER,
    LendingRow,
    StreamFacts,
    to_lending,
)
from sublet_storage.groups.model.lending_rules import apply_change, has_consumed_completed
from sublet_storage.groups.model.records import (
    HOLDING,
    MAINTENANCE,
    AdvancePosition,
    ForceRelease,
    GroupWriteResult,
    GroupWrites,
    LeaderLivenessLock,
    Leadership,
    LendingChange,
    LendingChangeResult,
    LendingOutcome,
    LendingStatus,
    OnDataLoss,
)
from sublet_storage.node_directory import NodeIncarnation

MAX_ID = 2**63 - 1
"""Postgres' largest bigint. No stream has a larger id, whatever a peer sends."""


class _Findings(Struct, frozen=True):
    """The facts by which the changes are judged: all rows as they were before the batch. `ancestors`: the unfinished
    ones. `unread_unset`: the rows behind which messages without an epoch lie, of those to be released by force whose
    completed epochs are consumed."""

    rows: Mapping[Key, LendingRow]
    facts: Mapping[int, StreamFacts]
    ancestors: Mapping[Key, tuple[int, ...]]
    unread_unset: frozenset[Key]
    busy: frozenset[Key]
    on_data_loss: Mapping[int, OnDataLoss]


def commit_batch(
    connection: Connection, batch: Sequence[GroupWrites], now_us: int | None
) -> tuple[GroupWriteResult, ...]:
    """Execute the batch in the open transaction; return the results in the order of the batch."""
    leaders = leadership.lock(connection, [w.group_id for w in batch], now_us)
    moved = _advance(connection, batch, now_us)
    other_changes = [
        (w.group_id, change)
        for w in batch
        if len(moved[w.group_id]) < len(w.changes)
        for change in w.changes
        if change.stream_id not in moved[w.group_id]
    ]
    terms = leadership.fetch_locked(leaders)
    findings = _find(connection, other_changes, {group_id: row.on_data_loss for group_id, row in terms.items()})

    valid = [w for w in batch if w.group_id in terms and _is_current_term(terms[w.group_id], w)]
    buffer = LendingWriteBatch(max((row.now_us for row in terms.values()), default=0))
    results = {
        w.group_id: tuple(
            LendingChangeResult(change, LendingOutcome.APPLIED, None)
            if change.stream_id in moved[w.group_id]
            else _apply_change(change, w, findings, buffer)
            for change in w.changes
        )
        for w in valid
    }
    buffer.flush(connection)
    renewed = _renew(connection, [w for w in valid if w.needs_stream_sync], findings.on_data_loss, buffer)
    if buffer.has_written and len(batch) > 1:  # a statement of one group must not leave the others' outcome unknown
        connection.execute("select").fetchall()
    return tuple(
        _make_result(w.group_id, results[w.group_id], renewed.get(w.group_id, NOTHING), buffer)
        if w.group_id in results
        else GroupWriteResult(w.group_id, has_stale_term=True)
        for w in batch
    )


def _advance(connection: Connection, batch: Sequence[GroupWrites], now_us: int | None) -> dict[int, set[int]]:
    """Write the progress that does nothing but move a position; return {group: the streams where it is done}."""
    plain = {w.group_id: [change for change in w.changes if _is_plain_advance(change)] for w in batch}
    moves = [(w.group_id, w.term, change) for w in batch for change in plain[w.group_id]]
    moved = {group_id: {change.stream_id for change in changes} for group_id, changes in plain.items()}
    if moves:
        for group_id, stream_id in lending_statements.advance_positions(connection, moves, now_us).fetchall():
            moved[group_id].remove(stream_id)
    return moved


def _is_plain_advance(change: LendingChange) -> TypeGuard[AdvancePosition]:
    """Return whether it is progress without more than a position, of which Postgres can take each number."""
    return (
        isinstance(change, AdvancePosition)
        and change.consumed is None
        and change.in_doubt is None
        and change.stream_id <= MAX_ID
        and change.grant_id <= MAX_ID
        and change.position <= MAX_ID
    )


def _find(
    connection: Connection,
    changes: Sequence[tuple[int, LendingChange]],
    on_data_loss: Mapping[int, OnDataLoss],
) -> _Findings:
    """Lock the rows of these changes and read what they are judged by."""
    keys = [(group_id, change.stream_id) for group_id, change in changes if 0 < change.stream_id <= MAX_ID]
    if not keys:
        return _Findings({}, {}, {}, frozenset(), frozenset(), on_data_loss)
    at_rest = {
        (group_id, change.stream_id) for group_id, change in changes if not isinstance(change, HOLDING)
    }.intersection(keys)
    locking = lending_statements.lock_rows(connection, keys)
    streams = lending_statements.query_facts(connection, (stream for _, stream in keys))
    ancestor_query = lending_statements.query_ancestors(connection, at_rest) if at_rest else None
    rows = {(row.group_id, row.stream_id): row for row in lending_statements.read_rows(locking)}
    facts, ancestors = (
        lending_statements.read_facts(streams),
        lending_statements.read_ancestors(ancestor_query) if ancestor_query else {},
    )
    forced = {(group_id, change.stream_id) for group_id, change in changes if isinstance(change, ForceRelease)}
    waiting = [
        (row, stream)
        for key, row in rows.items()
        if key in forced and has_consumed_completed(row, stream := facts[row.stream_id]) and row.position < stream.head
    ]
    unread_unset = lending_statements.find_unread_unset(connection, waiting) if waiting else frozenset[Key]()
    unlocked = set(keys) - rows.keys()
    busy = frozenset(lending_statements.find_existing(connection, unlocked)) if unlocked else frozenset[Key]()
    return _Findings(rows, facts, ancestors, unread_unset, busy, on_data_loss)


def elect(
    connection: Connection,
    leadership_id: int,
    node: NodeIncarnation,
    lease_s: float,
    now_us: int | None,
    lock_key: int | None,
    rival: LeaderLivenessLock | None,
) -> Leadership:
    """Claim the leadership. If the database is on another timeline since the last leader, all grants end with it: what
    their holders have read up to their positions may have been followed, on this one, by other messages at lower
    offsets. The last grants may be missing here: all rows that there should be are made, and count as granted before;
    and the last progress, so that what follows on any position may be seen twice."""
    claim = leadership.claim(connection, leadership_id, node, lease_s, now_us, lock_key, rival)
    if claim.node == node and leadership_id != MAINTENANCE and leadership.is_first_here(connection, leadership_id):
        results = _end_older_grants(connection, claim, now_us)
        if any(each.outcome is LendingOutcome.BUSY for each in results):
            raise TransactionRolledBack(
                f"group {leadership_id}: somebody keeps rows locked that its first leader here has to free"
            )
        recorded = [
            result.change.stream_id
            for result in results
            if result.lending is not None and result.lending.status is not LendingStatus.RESERVED
        ]
        lending_statements.note_failover(connection, leadership_id, claim.term, recorded, now_us)
    return claim


def _end_older_grants(connection: Connection, claim: Leadership, now_us: int | None) -> list[LendingChangeResult]:
    """End all grants of former leaders, page by page, then add streams; return the results of the ends."""
    group_id, results = claim.leadership_id, list[LendingChangeResult]()
    ends = [ForceRelease(*grant, FAILED_OVER) for grant in leadership.read_older_grants(connection, group_id)]
    for start in range(0, len(ends), lending_statements.PAGE):
        page = tuple(ends[start : start + lending_statements.PAGE])
        results += commit_batch(connection, (GroupWrites(group_id, claim.term, page),), now_us)[0].results
    add_streams(connection, [group_id], now_us, adds_all=False)
    return results


def _make_result(
    group_id: int, results: tuple[LendingChangeResult, ...], renewed: SyncResult, buffer: LendingWriteBatch
) -> GroupWriteResult:
    lendings, epochs, desired_state = renewed
    return GroupWriteResult(
        group_id, False, results, lendings, tuple(buffer.history_by_group.get(group_id, ())), epochs, desired_state
    )


def make_busy_result(writes: GroupWrites, *, is_outcome_unknown: bool = False) -> GroupWriteResult:
    """Return the answer for a group whose transaction the server rejected: nothing was written, try again on the next
    tick; unless its outcome is unknown."""
    return GroupWriteResult(
        writes.group_id,
        False,
        tuple(LendingChangeResult(change, LendingOutcome.BUSY, None) for change in writes.changes),
        is_outcome_unknown=is_outcome_unknown,
        needs_stream_sync=writes.needs_stream_sync,
    )


def _is_current_term(row: leadership.LockedLeadership, writes: GroupWrites) -> bool:
    return row.is_alive and row.term == writes.term


def _apply_change(
    change: LendingChange, writes: GroupWrites, findings: _Findings, buffer: LendingWriteBatch
) -> LendingChangeResult:
    key = (writes.group_id, change.stream_id)
    row = findings.rows.get(key)
    if row is None:
        return LendingChangeResult(
            change, LendingOutcome.BUSY if key in findings.busy else LendingOutcome.REFUSED, None
        )
    facts, parents = findings.facts[change.stream_id], findings.ancestors.get(key, ())
    transitions = apply_change(
        change,
        row,
        facts,
        held_back=bool(parents),
        has_unread_unset=key in findings.unread_unset,
        term=writes.term,
        now_us=buffer.now_us,
        draw_key=GrantSecret.draw,
        on_data_loss=findings.on_data_loss[writes.group_id],
    )
    for transition in transitions:
        buffer.add(row, transition, writes.term)
    last = transitions[-1]
    return LendingChangeResult(change, last.outcome, to_lending(last.row, facts, buffer.now_us, parents), last.problem)


def _renew(
    connection: Connection,
    renewing: Sequence[GroupWrites],
    on_data_loss: Mapping[int, OnDataLoss],
    buffer: LendingWriteBatch,
) -> dict[int, SyncResult]:
    if not renewing:
        return {}
    return sync_streams(connection, {w.group_id: w.term for w in renewing}, on_data_loss, buffer)
