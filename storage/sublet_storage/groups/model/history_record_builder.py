"""Builds the history records of lending changes and commands: pure functions.

A deleted group has no rows, and the history records the end of each grant in force.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from sublet_protocol.domain.epoch_frontiers import LowerFrontier, format_frontier
from sublet_storage.groups.model.desired_state import GroupCommand
from sublet_storage.groups.model.lending_row import LendingEvent, LendingRow, make_history_event
from sublet_storage.groups.model.records import COMMAND, EPOCHS_CONSUMED, HistoryRecord, LendingStatus


def to_history_record(row: LendingRow, event: LendingEvent, term: int, now_us: int) -> HistoryRecord:
    """Return the record of history for an event of this row."""
    return HistoryRecord(
        at_us=now_us,
        group_id=row.group_id,
        stream_id=row.stream_id,
        event=event.name,
        reason=event.reason,
        grant_id=event.grant_id,
        borrower_id=event.borrower_id,
        agent=event.agent,
        position=event.position,
        term=term,
        is_forced=event.redelivery_end is not None,
        redelivery_end=event.redelivery_end,
        session=event.session,
        key_digest=event.key_digest,
    )


def consumption_record(
    group_id: int, space: str, consumed: LowerFrontier, term: int, now_us: int, unfinished: Sequence[str] = ()
) -> HistoryRecord:
    """Return the record of history for a group that has consumed all epochs of a space that are not at or after these;
    `unfinished`: of producers whose lease had run out before they had finished with some of them."""
    reason = f"space {space}: consumed are all epochs before {format_frontier(consumed)}"
    if unfinished:
        reason += f"; closed by expiry, and perhaps not whole: those of producer {', '.join(unfinished)}"
    return HistoryRecord(now_us, group_id, 0, EPOCHS_CONSUMED, reason, 0, None, None, 0, term, is_forced=False)


def command_record(group_id: int, command: GroupCommand, term: int, now_us: int, user: str = "") -> HistoryRecord:
    """Return the record of history for the command of an operator, `user`; `term`: of the last leader."""
    return HistoryRecord(
        now_us, group_id, 0, COMMAND, reason_with_user(str(command), user), 0, None, None, 0, term, is_forced=False
    )


def reason_with_user(reason: str, user: str) -> str:
    """Return a reason of history with the user who gave the command, where that is known."""
    return f"{reason}, by {user}" if user else reason


def deletion_records(rows: Iterable[LendingRow], term: int, now_us: int, user: str = "") -> list[HistoryRecord]:
    """Return a record for each grant that ends because its group is deleted. Nothing is seen twice in one that is
    gone."""
    held_rows = sorted((row for row in rows if row.status is LendingStatus.HELD), key=lambda row: row.stream_id)
    return [
        to_history_record(
            row, make_history_event("delete", row, reason_with_user("its group was deleted", user)), term, now_us
        )
        for row in held_rows
    ]
