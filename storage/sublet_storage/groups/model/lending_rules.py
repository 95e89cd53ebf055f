"""Applies a leader's changes to lending rows: pure functions, shared by all stores.

A store locks the row, reads the facts of its stream in a later statement, calls `apply_change`, and writes what comes
back. So the rules that the simulator runs a thousand times are the very rules that run on Postgres. With those of
`lending_row`, `progress_rules` and `lending_reset`:

- only a free row is granted, under a new grant id, from the position that the row has;
- not while an ancestor of its stream is unfinished, also where streams between them have no row in the group: such
  streams count as finished;
- a reclaim by the same agent draws no new grant id;
- a row whose grant ends free may be reserved for the session that had it; a grant, or an end for good, ends that;
- one whose grant ends while something is in doubt is reserved: until its time is over only that session is granted it;
  not, if that session may not come back;
- a block that its holder cannot decode blocks the row, or is skipped, as the group was created;
- a stream that its holder found to end before what it had read blocks the row, though others have appended since;
- a row that a release leaves free, and reserved for nobody, is granted to the release's successor at once;
- what names offsets beyond the head, or a grant that is to come, is invalid and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import assert_never

from msgspec import structs

from sublet_protocol.domain.epoch_frontiers import have_same_dimensions
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_storage.groups.model.lending_row import (
    MICROSECONDS,
    LendingRow,
    LendingTransitionResult,
    StreamFacts,
    block,
    compute_next_id,
    end_grant,
    end_unreadable,
    find_redelivery_end,
    finish,
    finish_free,
    is_consumed,
    make_history_event,
)
from sublet_storage.groups.model.options import MAX_SESSION_EXPIRY_S
from sublet_storage.groups.model.progress_rules import advance, find_impossible, with_consumed
from sublet_storage.groups.model.records import (
    MAX_LOSSES,
    AdvancePosition,
    ForceRelease,
    FreeReservedStream,
    GrantStream,
    LendingChange,
    LendingOutcome,
    LendingStatus,
    OnDataLoss,
    ReclaimStream,
    RecordHistory,
    ReleaseStream,
)


def apply_change(
    change: LendingChange,
    row: LendingRow,
    stream: StreamFacts,
    *,
    held_back: bool,
    has_unread_unset: bool,
    term: int,
    now_us: int,
    draw_key: Callable[[], GrantSecret],
    on_data_loss: OnDataLoss = OnDataLoss.FAIL,
) -> tuple[LendingTransitionResult, ...]:
    """Return what one change does, of the leader at that term, and then the grant to a release's successor, where there
    is one that can be. `held_back`: an ancestor of the stream has a row in this group that is not finished.
    `has_unread_unset`: messages without an epoch lie behind what the row has consumed, asked only
    of a `ForceRelease` where `has_consumed_completed` is true. `draw_key` returns the key of a new grant."""

    def grant(granting: GrantStream, current: LendingRow) -> LendingTransitionResult:
        return _grant(granting, current, stream, held_back, max(term, now_us), on_data_loss, draw_key)

    transition = (
        grant(change, row) if isinstance(change, GrantStream) else _apply(change, row, stream, now_us, has_unread_unset)
    )
    successor = change.successor if isinstance(change, ReleaseStream) else None
    is_reserved = transition.row.session is not None
    if successor is None or transition.outcome is not LendingOutcome.APPLIED or is_reserved:
        return (transition,)
    granted = grant(successor, transition.row)
    return (transition, granted) if granted.outcome is LendingOutcome.APPLIED else (transition,)


def _apply(
    change: ReclaimStream | AdvancePosition | ReleaseStream | ForceRelease | FreeReservedStream | RecordHistory,
    row: LendingRow,
    stream: StreamFacts,
    now_us: int,
    has_unread_unset: bool,
) -> LendingTransitionResult:
    """Return what a change does that grants nothing."""
    if isinstance(change, FreeReservedStream):
        return _unreserve(change, row, now_us)
    if row.status is not LendingStatus.HELD or row.grant_id != change.grant_id:
        return LendingTransitionResult(LendingOutcome.REFUSED, row)
    match change:
        case ReclaimStream():
            return _reclaim(change, row, stream, now_us)
        case AdvancePosition():
            return advance(change, row, stream, now_us)
        case ReleaseStream():
            return _release(change, row, stream, now_us)
        case ForceRelease():
            return _force_release(change, row, stream, now_us, has_unread_unset)
        case RecordHistory():
            return LendingTransitionResult(
                LendingOutcome.APPLIED, row, make_history_event(change.event, row, change.reason)
            )
        case _:
            assert_never(change)


def has_consumed_completed(row: LendingRow, stream: StreamFacts) -> bool:
    """Return whether all completed epochs of the stream are consumed, or none of the group's is completed: no message
    of an epoch may be delivered yet."""
    least = None if row.consumed is None else row.consumed.lower
    if least is None or stream.lower is None or not have_same_dimensions(least, stream.lower):
        return False
    return stream.lower.is_at_or_before(least)


def close_out(
    row: LendingRow, stream: StreamFacts, now_us: int, on_data_loss: OnDataLoss = OnDataLoss.FAIL
) -> LendingTransitionResult | None:
    """Return the transition of a row in a stream sync: finish it, block it, or leave it (None)."""
    if row.status not in (LendingStatus.FREE, LendingStatus.HELD):
        return None
    if unreadable := end_unreadable(row, stream, now_us, on_data_loss):
        return unreadable
    if row.status is LendingStatus.FREE and is_consumed(row.position, stream):
        return finish_free(row, LendingOutcome.APPLIED)
    return None


def _grant(
    change: GrantStream,
    row: LendingRow,
    stream: StreamFacts,
    held_back: bool,
    now_us: int,
    on_data_loss: OnDataLoss,
    draw_key: Callable[[], GrantSecret],
) -> LendingTransitionResult:
    if held_back or not (row.status is LendingStatus.FREE or _is_reserved_for(row, change)):
        return LendingTransitionResult(LendingOutcome.REFUSED, row)
    if unreadable := end_unreadable(row, stream, now_us, on_data_loss):
        return unreadable
    if is_consumed(row.position, stream):
        return finish_free(row, LendingOutcome.REFUSED)
    granted_row = replace(
        row,
        status=LendingStatus.HELD,
        grant_id=compute_next_id(row.grant_id, now_us),
        grant_key=draw_key(),
        borrower_id=change.borrower_id,
        agent=change.agent,
        session=change.session,
        session_epoch=change.session_epoch,
        held_until_us=None,
        lock_valid_s=change.lock_valid_s,
    )
    return LendingTransitionResult(
        LendingOutcome.APPLIED, granted_row, make_history_event("grant", granted_row, change.reason)
    )


def _is_reserved_for(row: LendingRow, change: GrantStream) -> bool:
    return row.status is LendingStatus.RESERVED and change.session is not None and row.session == change.session


def _unreserve(change: FreeReservedStream, row: LendingRow, now_us: int) -> LendingTransitionResult:
    reserved_us = (row.held_until_us or now_us) - now_us
    max_reserved_us = MICROSECONDS * (0 if row.in_doubt is None else row.in_doubt.hold_s)
    is_early = 0 < reserved_us <= round(max_reserved_us) and not change.is_forced  # above it, the clock was set back
    if row.status is not LendingStatus.RESERVED or row.grant_id != change.grant_id or is_early:
        return LendingTransitionResult(LendingOutcome.REFUSED, row)
    free_row = replace(
        row, status=LendingStatus.FREE, session=None, session_epoch=None, held_until_us=None, in_doubt=None
    )
    doubt = row.pending_in_doubt
    redelivery_end = None if doubt is None else max(doubt.end, doubt.consumed.upto if doubt.consumed is not None else 0)
    return LendingTransitionResult(
        LendingOutcome.APPLIED, free_row, make_history_event("unreserve", row, change.reason, redelivery_end)
    )


def _reclaim(change: ReclaimStream, row: LendingRow, stream: StreamFacts, now_us: int) -> LendingTransitionResult:
    if row.agent != change.agent:
        return LendingTransitionResult(LendingOutcome.REFUSED, row)
    if impossible := find_impossible(change, row, stream, now_us):
        return impossible
    reclaimed_row = replace(
        with_consumed(row, change.consumed),
        borrower_id=change.borrower_id,
        position=max(row.position, change.position),
        session_epoch=row.session_epoch if change.session_epoch is None else change.session_epoch,
        lock_valid_s=change.lock_valid_s if change.borrower_id != row.borrower_id else row.lock_valid_s,
    )
    if reclaimed_row == row:
        return LendingTransitionResult(LendingOutcome.APPLIED, row)
    return LendingTransitionResult(
        LendingOutcome.APPLIED, reclaimed_row, make_history_event("reclaim", reclaimed_row, "reclaimed by its agent")
    )


def _release(change: ReleaseStream, row: LendingRow, stream: StreamFacts, now_us: int) -> LendingTransitionResult:
    if impossible := find_impossible(change, row, stream, now_us):
        return impossible
    position = max(row.position, change.position)
    row = with_consumed(row, change.consumed)
    if change.is_beyond_head:
        return block(replace(row, position=position), change.reason, now_us, find_redelivery_end(row, stream))
    if change.poison > position:
        return _end_at_poison(change, replace(row, position=position), stream, now_us)
    if is_consumed(position, stream):
        return finish(row, position, change.reason, now_us)
    released_row = _free(row, position, now_us, change.reserve_s)
    redelivery_end = change.delivered_end if change.delivered_end > position else None
    return _make_end_transition("release", row, released_row, change.reason, redelivery_end)


def _force_release(
    change: ForceRelease, row: LendingRow, stream: StreamFacts, now_us: int, has_unread_unset: bool
) -> LendingTransitionResult:
    """Free or block the row. Losses count only if there was a message that may have caused them: not in an idle stream,
    nor in one where all that is left waits for epochs to be completed. A row that is reserved for its session is never
    blocked, as it is granted to no other session, which has to process the same range again."""
    if is_consumed(row.position, stream):
        return finish(row, row.position, change.reason, now_us)
    former_losses = row.losses if row.lost_position == row.position else 0
    is_waiting = has_consumed_completed(row, stream) and not has_unread_unset
    losses = former_losses + 1 if row.position < stream.head and not is_waiting else 0
    counted = replace(row, losses=losses, lost_position=row.position if losses else None)
    released_row = _free(counted, row.position, now_us, change.reserve_s, ends_doubt=change.ends_doubt)
    if losses >= MAX_LOSSES and released_row.status is not LendingStatus.RESERVED:
        reason = f"{change.reason}; lost {losses} times at offset {row.position}"
        return structs.replace(
            block(counted, reason, now_us, find_redelivery_end(row, stream)), outcome=LendingOutcome.APPLIED
        )
    return _make_end_transition("force_release", row, released_row, change.reason, find_redelivery_end(row, stream))


def _end_at_poison(change: ReleaseStream, row: LendingRow, stream: StreamFacts, now_us: int) -> LendingTransitionResult:
    """Return the transition after the holder has consumed everything before a block that cannot be decoded."""
    if not change.may_skip:
        redelivery_end = change.delivered_end if change.delivered_end > row.position else None
        return structs.replace(block(row, change.reason, now_us, redelivery_end), outcome=LendingOutcome.APPLIED)
    lost_count = change.poison - row.position
    reason = f"{change.reason} Skipped: [{row.position}, {change.poison}), {lost_count} messages"
    counted = replace(row, lost_message_count=row.lost_message_count + lost_count)
    if is_consumed(change.poison, stream):
        released_row = end_grant(counted, LendingStatus.FINISHED, change.poison, now_us)
    else:
        released_row = _free(counted, change.poison, now_us, change.reserve_s)
    return LendingTransitionResult(LendingOutcome.APPLIED, released_row, make_history_event("skip", row, reason))


def _make_end_transition(
    name: str, row: LendingRow, released_row: LendingRow, reason: str, redelivery_end: int | None
) -> LendingTransitionResult:
    """Return the transition for the end of a grant. A reserved range is not redelivered: its own session resolves
    it."""
    ended_row = replace(row, position=released_row.position)
    if (doubt := released_row.pending_in_doubt) is not None:
        session = f"session {released_row.session!r}"
        detail = f"[{doubt.start}, {doubt.end}) is in doubt: reserved for {doubt.hold_s:g} s for {session}"
        return LendingTransitionResult(
            LendingOutcome.APPLIED, released_row, make_history_event("reserve", ended_row, f"{reason}; {detail}")
        )
    return LendingTransitionResult(
        LendingOutcome.APPLIED, released_row, make_history_event(name, ended_row, reason, redelivery_end)
    )


def _free(row: LendingRow, position: int, now_us: int, reserve_s: float, *, ends_doubt: bool = False) -> LendingRow:
    """Return the row after its grant, reserved for its session if that has a name and `reserve_s` or, unless it
    `ends_doubt`, an in-doubt range."""
    free_row = end_grant(row, LendingStatus.FREE, position, now_us)
    doubt = free_row.pending_in_doubt
    is_waited_for = row.session is not None and row.session_epoch is not None and not ends_doubt
    if doubt is not None and not (is_waited_for and doubt.hold_s > 0):
        doubt, free_row = None, replace(free_row, in_doubt=None)
    if doubt is not None:
        free_row, reserve_s = replace(free_row, status=LendingStatus.RESERVED), doubt.hold_s
    if row.session is None or reserve_s <= 0:
        return free_row
    held_until_us = now_us + round(min(reserve_s, MAX_SESSION_EXPIRY_S) * MICROSECONDS)
    return replace(free_row, session=row.session, session_epoch=row.session_epoch, held_until_us=held_until_us)
