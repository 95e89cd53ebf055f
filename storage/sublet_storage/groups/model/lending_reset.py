"""The change of a lending row that an operator resets."""

from __future__ import annotations

from dataclasses import replace

from sublet_storage.groups.model.lending_row import (
    LendingRow,
    LendingTransitionResult,
    StreamFacts,
    end_without_report,
    find_redelivery_end,
    is_consumed,
    make_history_event,
)
from sublet_storage.groups.model.records import LendingOutcome, LendingStatus


def apply_reset(
    row: LendingRow, stream: StreamFacts, position: int, reason: str, now_us: int
) -> LendingTransitionResult:
    """Return the transition of a row that an operator resets. A grant in force ends by it, without its holder's
    report."""
    is_held = row.status is LendingStatus.HELD
    redelivery_end = find_redelivery_end(row, stream) if is_held or row.pending_in_doubt is not None else None
    status = LendingStatus.FINISHED if is_consumed(position, stream) else LendingStatus.FREE
    reset_row = replace(end_without_report(row, status, position, now_us), losses=0, lost_position=None, in_doubt=None)
    return LendingTransitionResult(
        LendingOutcome.APPLIED,
        reset_row,
        make_history_event("reset", replace(row, position=position), reason, redelivery_end),
    )
