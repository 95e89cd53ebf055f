"""The one way a leader writes: many groups in one transaction of array statements.

First round trip: lock the leadership rows, then the lending rows that nobody else holds, then read the facts. The rules
decide. Second round trip: write, record, commit. Renewals add round trips of their own, every few seconds per group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sublet_storage.db.store_connection import Connection, RolledBack
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.coordinator import lending_rows as rows
from sublet_storage.groups.coordinator.lending_rows import Key
from sublet_storage.groups.coordinator.stream_sync import NOTHING, Renewed, renew_streams
from sublet_storage.groups.coordinator.write_buffer import Pen
from sublet_storage.groups.model.records import (
    HOLDING,
    MAINTENANCE,
    Advance,
    Claim,
    Entry,
    EntryResult,
    GroupResult,
    GroupWrites,
    Seize,
    Verdict,
    WhenGone,
)
from sublet_storage.groups.model.transitions import Row, StreamFacts, judge, lending
from sublet_storage.nodes import NodeRef

MAX_ID = 2**63 - 1
"""Postgres' largest bigint. No stream has a larger id, whatever a peer says."""


@dataclass(frozen=True, slots=True)
class _Findings:
    """What the entries are judged by: all rows as they were before the batch. `ancestors`: the unfinished ones."""

    rows: Mapping[Key, Row]
    facts: Mapping[int, StreamFacts]
    ancestors: Mapping[Key, tuple[int, ...]]
    busy: frozenset[Key]
    when_gone: Mapping[int, WhenGone]


def write_batch(connection: Connection, batch: Sequence[GroupWrites], now_us: int | None) -> tuple[GroupResult, ...]:
    """Do all of it in the transaction that is open."""
    keys = [(w.group_id, e.stream_id) for w in batch for e in w.entries if 0 < e.stream_id <= MAX_ID]
    at_rest = {(w.group_id, e.stream_id) for w in batch for e in w.entries if not isinstance(e, HOLDING)} & set(keys)
    leaders = leadership.lock(connection, [w.group_id for w in batch], now_us)
    ours = rows.lock(connection, keys)
    streams = rows.facts(connection, (stream for _, stream in keys))
    waiting = rows.ancestors(connection, at_rest) if at_rest else None
    terms = leadership.locked(leaders)
    found = {(row.group_id, row.stream_id): row for row in rows.read_rows(ours)}
    facts, ancestors = rows.read_facts(streams), rows.read_ancestors(waiting) if waiting else {}
    missing = set(keys) - found.keys()
    busy = frozenset(rows.existing(connection, missing)) if missing else frozenset()
    when_gone = {group_id: row.when_gone for group_id, row in terms.items()}
    findings = _Findings(found, facts, ancestors, busy, when_gone)

    valid = [w for w in batch if w.group_id in terms and _leads(terms[w.group_id], w)]
    pen = Pen(max((row.now_us for row in terms.values()), default=0))
    results = {w.group_id: tuple(_judge(entry, w, findings, pen) for entry in w.entries) for w in valid}
    pen.write(connection)
    renewed = _renew(connection, [w for w in valid if w.renew], when_gone, pen)
    return tuple(
        _result(w.group_id, results[w.group_id], renewed.get(w.group_id, NOTHING), pen)
        if w.group_id in results
        else GroupResult(w.group_id, deposed=True)
        for w in batch
    )


def elect(connection: Connection, leadership_id: int, node: NodeRef, lease_s: float, now_us: int | None) -> Claim:
    """Claim the leadership. Where the database has gone over to another timeline all grants end with it: what their
    holders have read up to their positions may have been followed, on this one, by other messages at lower offsets.
    What was lent last is not known here: all rows that there should be are made, and count as lent before."""
    claim = leadership.claim(connection, leadership_id, node, lease_s, now_us)
    if claim.node == node and leadership_id != MAINTENANCE and leadership.is_first_here(connection, leadership_id):
        older = leadership.older_grants(connection, leadership_id)
        ends = tuple(Seize(*each, "the database has gone over to another timeline") for each in older)
        (result,) = write_batch(connection, (GroupWrites(leadership_id, claim.term, ends, renew=True),), now_us)
        if any(each.verdict is Verdict.BUSY for each in result.results):
            raise RolledBack(
                f"group {leadership_id}: somebody keeps rows locked that its first leader here has to free"
            )
        leadership.mark_never_lent(connection, leadership_id)
    return claim


def _result(group_id: int, results: tuple[EntryResult, ...], renewed: Renewed, pen: Pen) -> GroupResult:
    lendings, epochs, orders = renewed
    return GroupResult(group_id, False, results, lendings, tuple(pen.recorded.get(group_id, ())), epochs, orders)


def busy_result(writes: GroupWrites) -> GroupResult:
    """The answer for a group whose transaction the server refused: nothing was written, ask again on the next tick."""
    return GroupResult(
        writes.group_id, False, tuple(EntryResult(entry, Verdict.BUSY, None) for entry in writes.entries)
    )


def _leads(row: leadership.Locked, writes: GroupWrites) -> bool:
    return row.alive and row.term == writes.term


def _judge(entry: Entry, writes: GroupWrites, findings: _Findings, pen: Pen) -> EntryResult:
    key = (writes.group_id, entry.stream_id)
    row = findings.rows.get(key)
    if row is None:
        return EntryResult(entry, Verdict.BUSY if key in findings.busy else Verdict.REFUSED, None)
    facts, parents = findings.facts[entry.stream_id], findings.ancestors.get(key, ())
    ruling = judge(
        entry,
        row,
        facts,
        held_back=bool(parents),
        term=writes.term,
        now_us=pen.now_us,
        when_gone=findings.when_gone[writes.group_id],
    )
    pen.note(row, ruling, writes.term, moves=isinstance(entry, Advance))
    return EntryResult(entry, ruling.verdict, lending(ruling.row, facts, pen.now_us, parents))


def _renew(
    connection: Connection, renewing: Sequence[GroupWrites], when_gone: Mapping[int, WhenGone], pen: Pen
) -> dict[int, Renewed]:
    if not renewing:
        return {}
    return renew_streams(connection, {w.group_id: w.term for w in renewing}, when_gone, pen)
