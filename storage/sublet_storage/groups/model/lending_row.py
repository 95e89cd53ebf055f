"""Lending rows, facts of their streams, and how rows end: pure values and functions.

Whatever begins or ends a grant draws a new grant id. A row whose position is past the stream's head is blocked. So is
one in a part that retention has taken, unless the group would rather skip it: then what was lost is counted. A closed
stream consumed to its head is finished, and never granted again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from msgspec import Struct

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.grant_keys import GrantSecret, timeline_number
from sublet_protocol.domain.in_doubt_range import InDoubtRange, pending_in_doubt
from sublet_storage.groups.model.records import SUSPECT_LOSSES, Lending, LendingOutcome, LendingStatus, OnDataLoss

MICROSECONDS = 1_000_000
"""Microseconds in a second: times of the store are integers of microseconds since 1970."""

FAILED_OVER = "the database has gone over to another timeline"


@dataclass(frozen=True, slots=True)
class LendingRow:
    """A row of the table `lending`. `losses` counts forced ends at `lost_position`.

    `held_until_us` is set only in a free row that is, or was, reserved for `session`, or a reserved one. Without a
    session it is when the row was taken from a holder that may not have stopped: by a reset, or with a former group of
    the name. `consumed` is set only in an atomic group. `in_doubt` is what a holder planned last: it stays when it is
    done, where its holder has no other way. `grant_key`: of the grant in force, random and different in each
    store, so that it is not compared. `key_digest`: its hash, where the row was read without the key. `lock_valid_s`:
    as of `Lending`; of a change that is to be written, by the borrower's word.
    """

    group_id: int
    stream_id: int
    status: LendingStatus
    position: int
    grant_id: int = 0
    borrower_id: str | None = None
    agent: str | None = None
    session: str | None = None
    losses: int = 0
    lost_position: int | None = None
    session_epoch: int | None = None
    held_until_us: int | None = None
    lost_message_count: int = 0
    consumed: ConsumedFrontier | None = None
    in_doubt: InDoubtRange | None = None
    grant_key: GrantSecret | None = field(default=None, compare=False)
    key_digest: bytes | None = field(default=None, compare=False)
    lock_valid_s: float = 0.0

    @property
    def pending_in_doubt(self) -> InDoubtRange | None:
        """Return the range in doubt, None if it is done or there is none."""
        return pending_in_doubt(self.in_doubt, self.position, self.consumed)

    @property
    def furthest_offset(self) -> int:
        """Return the furthest offset up to which its stream must have had messages."""
        doubt, consumed = self.pending_in_doubt, self.consumed
        return max(self.position, doubt.end if doubt else 0, consumed.upto if consumed else 0)


class StreamFacts(Struct, frozen=True):
    """The facts of a stream at one instant. Once `is_closed`, its head is final; `is_gone`: retention has taken its
    messages. `lower`: the lower frontier of its space."""

    stream_id: int
    generation_id: int
    hash_from: int
    hash_to: int
    head: int
    is_closed: bool
    is_gone: bool
    lower: LowerFrontier | None = None


@dataclass(frozen=True, slots=True)
class LendingEvent:
    """An event for the history; grant id and holder are those of the grant that began or ended.

    With `redelivery_end` the move was forced, and messages in [position, redelivery_end) may be seen twice.
    """

    name: str
    reason: str
    grant_id: int
    borrower_id: str | None
    agent: str | None
    session: str | None
    position: int
    redelivery_end: int | None = None
    key_digest: bytes | None = field(default=None, compare=False)


class LendingTransitionResult(Struct, frozen=True):
    """The outcome, the row as it is from now on, and the event if there is one to record. `problem`: of an invalid
    change."""

    outcome: LendingOutcome
    row: LendingRow
    event: LendingEvent | None = None
    problem: str = ""


def to_lending(row: LendingRow, stream: StreamFacts, now_us: int, parents: Sequence[int] = ()) -> Lending:
    """Return the row with its stream as the leader sees them at that time; `parents`: see `Lending`."""
    return Lending(
        stream_id=row.stream_id,
        status=row.status,
        position=row.position,
        grant_id=row.grant_id,
        borrower_id=row.borrower_id,
        agent=row.agent,
        session=row.session,
        generation_id=stream.generation_id,
        hash_from=stream.hash_from,
        hash_to=stream.hash_to,
        head=stream.head,
        is_closed=stream.is_closed,
        parents=tuple(parents),
        session_epoch=row.session_epoch,
        reserved_s=0.0 if row.held_until_us is None else (row.held_until_us - now_us) / MICROSECONDS,
        consumed=row.consumed,
        in_doubt=row.in_doubt,
        grant_key=row.grant_key,
        lock_valid_s=row.lock_valid_s,
        suspect_position=row.lost_position if row.losses >= SUSPECT_LOSSES else None,
    )


def compute_next_id(last_id: int, now_us: int) -> int:
    """Return the next term or grant id: larger than the last, and than any that the database has lost since. `now_us`:
    by the database's clock and timeline (see `TIMELINE_US`), or the term, which was drawn by them."""
    return max(last_id + 1, now_us)


def is_of_former_timeline(grant_id: int, term: int) -> bool:
    """Return whether nothing was granted under that row on the timeline of this term, but perhaps on the one before."""
    return grant_id > 0 and timeline_number(grant_id) < timeline_number(term)


def finish(row: LendingRow, position: int, reason: str, now_us: int) -> LendingTransitionResult:
    """End a grant because nothing is left to consume."""
    finished_row = end_grant(row, LendingStatus.FINISHED, position, now_us)
    return LendingTransitionResult(
        LendingOutcome.APPLIED, finished_row, make_history_event("finish", replace(row, position=position), reason)
    )


def finish_free(row: LendingRow, outcome: LendingOutcome) -> LendingTransitionResult:
    """Finish a free row; it had no grant that could end, so its grant id stays."""
    taken_at = _find_revoked_at(row)
    finished_row = replace(row, status=LendingStatus.FINISHED, session=None, session_epoch=None, held_until_us=taken_at)
    return LendingTransitionResult(outcome, finished_row, make_history_event("finish", finished_row, "nothing left"))


def end_unreadable(
    row: LendingRow, stream: StreamFacts, now_us: int, on_data_loss: OnDataLoss
) -> LendingTransitionResult | None:
    """Return the transition of a row whose position no borrower could read from; None if one could."""
    redelivery_end = find_redelivery_end(row, stream) if row.status is LendingStatus.HELD else None
    if row.furthest_offset > stream.head:
        return block(row, format_beyond_head(row.furthest_offset, stream), now_us, redelivery_end)
    if not stream.is_gone or row.position == stream.head:
        return None
    lost_count = stream.head - row.position
    reason = f"offset {row.position} is gone by retention, {lost_count} messages in all"
    if on_data_loss is OnDataLoss.FAIL:
        return block(row, reason, now_us, redelivery_end)
    finished_row = replace(
        end_without_report(row, LendingStatus.FINISHED, stream.head, now_us),
        in_doubt=None if row.pending_in_doubt else row.in_doubt,  # with the new position it would count as done
        lost_message_count=row.lost_message_count + lost_count,
    )
    return LendingTransitionResult(
        LendingOutcome.REFUSED, finished_row, make_history_event("skip", row, f"{reason}; skipped")
    )


def block(row: LendingRow, reason: str, now_us: int, redelivery_end: int | None) -> LendingTransitionResult:
    """Return the transition that blocks the row. `redelivery_end`: if a grant ends by it, the end of what
    may be seen again."""
    blocked_row = end_without_report(row, LendingStatus.BLOCKED, row.position, now_us)
    return LendingTransitionResult(
        LendingOutcome.REFUSED, blocked_row, make_history_event("block", row, reason, redelivery_end)
    )


def end_without_report(row: LendingRow, status: LendingStatus, position: int, now_us: int) -> LendingRow:
    """Return the row after a grant that ended without its holder's report: the next grant, also after a reset, waits
    until that holder must have stopped."""
    ended_row = end_grant(row, status, position, now_us)
    return replace(ended_row, held_until_us=now_us) if row.status is LendingStatus.HELD else ended_row


def end_grant(row: LendingRow, status: LendingStatus, position: int, now_us: int) -> LendingRow:
    return replace(
        row,
        status=status,
        position=position,
        grant_id=compute_next_id(row.grant_id, now_us),
        grant_key=None,
        key_digest=None,
        borrower_id=None,
        agent=None,
        session=None,
        session_epoch=None,
        held_until_us=_find_revoked_at(row),
        lock_valid_s=0.0,
    )


def _find_revoked_at(row: LendingRow) -> int | None:
    """Return when the row was taken from a holder that may not have stopped, which the next grant waits for; None if it
    was not."""
    return row.held_until_us if row.session is None else None


def make_history_event(name: str, row: LendingRow, reason: str, redelivery_end: int | None = None) -> LendingEvent:
    digest = row.key_digest if row.grant_key is None else row.grant_key.digest()
    return LendingEvent(
        name, reason, row.grant_id, row.borrower_id, row.agent, row.session, row.position, redelivery_end, digest
    )


def find_redelivery_end(row: LendingRow, stream: StreamFacts) -> int:
    """Return the offset up to which messages from the row's position on may be seen twice when its grant ends without a
    final report."""
    return max(row.position, stream.head)


def is_consumed(position: int, stream: StreamFacts) -> bool:
    return stream.is_closed and position == stream.head


def format_beyond_head(position: int, stream: StreamFacts) -> str:
    return f"offset {position} is beyond the head {stream.head}"
