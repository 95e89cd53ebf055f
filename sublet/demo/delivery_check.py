"""Checks the demo's deliveries: tasks' records against the source and the history.

It also checks that the kills were in the middle of the run.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from msgspec import Struct, field

from sublet_storage.groups.model.records import HistoryRecord

KILLS_BETWEEN = 0.3, 0.7
"""A kill before or after that would not be in the middle of the work, and would prove little."""


class KillRecord(Struct, frozen=True):
    """The killed process, and the share of all messages that was durably consumed right before."""

    what: str
    consumed_share: float

    @property
    def is_mid_run(self) -> bool:
        """Return whether it was in the middle of the work."""
        min_share, max_share = KILLS_BETWEEN
        return min_share <= self.consumed_share <= max_share


class DeliveryRecord(Struct, frozen=True):
    """One batch delivered to one process."""

    worker: str
    stream: int
    grant: int
    offsets: tuple[int, ...]
    rows: tuple[int, ...]


class DeliveryCheckResult(Struct):
    """Counts of messages; a range is [from, to) of a stream that was delivered twice, under the grant that was lost."""

    published: int
    consumed: int = 0
    lost: int = 0
    duplicated: int = 0
    explained_duplicates: int = 0
    misplaced: int = 0
    """Source rows that turned up at more than one position, or positions with more than one row."""
    duplicate_ranges: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    """carrier: flights in the file, flights consumed, miles consumed."""
    kills: tuple[KillRecord, ...] = ()

    @property
    def is_ok(self) -> bool:
        """Return whether nothing was lost or misplaced, every repeat is explained, totals match, and the kills were in
        time."""
        entire = (
            all(published == consumed for published, consumed, _ in self.totals.values()) and not self.mistimed_kills
        )
        return not (self.lost or self.misplaced or self.duplicated - self.explained_duplicates) and entire

    @property
    def mistimed_kills(self) -> list[KillRecord]:
        """Return the kills that were not in the middle of the work."""
        return [kill for kill in self.kills if not kill.is_mid_run]


def read_delivered_batches(directory: Path) -> list[DeliveryRecord]:
    """Return all records; the last line of a killed process may be torn, and then its batch was not reported."""
    attempts = []
    for file in sorted(directory.glob("*.jsonl")):
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):
                delivery = json.loads(line)
                attempts.append(
                    DeliveryRecord(
                        file.stem,
                        delivery["stream_id"],
                        delivery["grant_id"],
                        tuple(delivery["offsets"]),
                        tuple(delivery["rows"]),
                    )
                )
    return attempts


def check_deliveries(
    source: pa.Table,
    heads: dict[int, int],
    attempts: list[DeliveryRecord],
    history: list[HistoryRecord],
    kills: Sequence[KillRecord] = (),
) -> DeliveryCheckResult:
    """Compare deliveries and source as multisets, by (stream, offset) and by source row; return the result."""
    findings = DeliveryCheckResult(source.num_rows, kills=tuple(kills))
    grants, row_at = _collect_deliveries(attempts)
    published_offsets = {(stream, offset) for stream, head in heads.items() for offset in range(head)}
    findings.consumed = len(grants.keys() & published_offsets)
    rows = Counter(row for delivered_rows in row_at.values() for row in delivered_rows)
    positions_lost = len(published_offsets - grants.keys())
    findings.lost = max(positions_lost, source.num_rows - len(rows))
    misplaced = sum(count > 1 for count in rows.values()) + sum(
        len(delivered_rows) > 1 for delivered_rows in row_at.values()
    )
    findings.misplaced = misplaced + len(grants.keys() - published_offsets)
    _explain(findings, grants, attempts, history)
    _set_totals(findings, source, rows)
    return findings


def _collect_deliveries(
    attempts: Iterable[DeliveryRecord],
) -> tuple[dict[tuple[int, int], list[int]], dict[tuple[int, int], set[int]]]:
    """Return, by position, the grants under which it was delivered, and the source rows delivered there."""
    grants: dict[tuple[int, int], list[int]] = defaultdict(list)
    rows: dict[tuple[int, int], set[int]] = defaultdict(set)
    for attempt in attempts:
        for offset, row in zip(attempt.offsets, attempt.rows, strict=True):
            grants[attempt.stream, offset].append(attempt.grant)
            rows[attempt.stream, offset].add(row)
    return grants, rows


def _explain(
    findings: DeliveryCheckResult,
    grants: dict[tuple[int, int], list[int]],
    attempts: list[DeliveryRecord],
    history: list[HistoryRecord],
) -> None:
    """Count repeats, and explain those inside [position at the forced move, highest offset that the loser
    delivered]."""
    highest: dict[tuple[int, int], int] = {}
    for attempt in attempts:
        key = (attempt.stream, attempt.grant)
        highest[key] = max(highest.get(key, -1), *attempt.offsets)
    forced = {(h.stream_id, h.grant_id): h.position for h in history if h.is_forced}
    repeated: dict[tuple[int, int], list[int]] = defaultdict(list)
    for (stream, offset), under in grants.items():
        for grant in sorted(under)[:-1]:
            findings.duplicated += 1
            if forced.get((stream, grant), 1 << 62) <= offset <= highest[stream, grant]:
                findings.explained_duplicates += 1
            repeated[stream, grant].append(offset)
    for (stream, grant), offsets in sorted(repeated.items()):
        explained = forced.get((stream, grant), 1 << 62) <= min(offsets)
        findings.duplicate_ranges.append(
            {
                "stream_id": stream,
                "grant_id": grant,
                "from": min(offsets),
                "to": max(offsets) + 1,
                "messages": len(offsets),
                "explained": explained,
            }
        )


def _set_totals(findings: DeliveryCheckResult, source: pa.Table, rows: Counter[int]) -> None:
    """Set the totals per carrier: the rows in the file, and what was consumed, each source row once."""
    published: Counter[str] = Counter()
    consumed: Counter[str] = Counter()
    miles: Counter[str] = Counter()
    columns = (source["carrier"].to_pylist(), source["distance"].to_pylist())
    for row, (carrier, distance) in enumerate(zip(*columns, strict=True)):
        published[carrier] += 1
        if rows[row]:
            consumed[carrier] += 1
            miles[carrier] += distance
    findings.totals = {c: (published[c], consumed[c], miles[c]) for c in sorted(published)}
