"""Changes of lending rows by a reset, or by the end of their stream."""

from __future__ import annotations

from dataclasses import replace

from sublet_storage.groups.model.lending_row import (
    LendingRow,
    LendingTransitionResult,
    StreamFacts,
    end_unheard,
    end_unreadable,
    find_redelivery_end,
    finish_unlent,
    is_consumed,
    make_history_event,
)
from sublet_storage.groups.model.records import LendingOutcome, LendingStatus, OnDataLoss


def close_out(
    row: LendingRow, stream: StreamFacts, now_us: int, on_data_loss: OnDataLoss = OnDataLoss.FAIL
) -> LendingTransitionResult | None:
    """Return the transition of a row in a stream sync: finish it, block it, or leave it (None)."""
    if row.status not in (LendingStatus.FREE, LendingStatus.HELD):
        return None
    if unreadable := end_unreadable(row, stream, now_us, on_data_loss):
        return unreadable
    if row.status is LendingStatus.FREE and is_consumed(row.position, stream):
        return finish_unlent(row, LendingOutcome.APPLIED)
    return None


def apply_reset(
    row: LendingRow, stream: StreamFacts, position: int, reason: str, now_us: int
) -> LendingTransitionResult:
    """Return the transition of a row that an operator resets. A grant in force ends by it, without its holder's
    report."""
    is_held = row.status is LendingStatus.HELD
    redelivery_end = find_redelivery_end(row, stream) if is_held or row.pending_in_doubt is not None else None
    status = LendingStatus.FINISHED if is_consumed(position, stream) else LendingStatus.FREE
    reset_row = replace(end_unheard(row, status, position, now_us), losses=0, lost_position=None, in_doubt=None)
    return LendingTransitionResult(
        LendingOutcome.APPLIED,
        reset_row,
        make_history_event("reset", replace(row, position=position), reason, redelivery_end),
    )
