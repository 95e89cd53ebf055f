"""What an entry does to a lending row: pure functions, shared by the truth and its twin.

A store locks the row, reads the facts of its stream in a later statement, asks here, and writes what comes back. So the
rules that the simulator runs a thousand times are the very rules that run on Postgres.

The rules, in one place:

- only a free row is granted, under a new grant id, from the position that the row has;
- not while an ancestor of its stream is unfinished, whatever lies between: what the group has not is finished;
- progress needs the equal grant id and a held row, and never lowers the position;
- whatever begins or ends a grant draws a new grant id; a reclaim by the same agent does neither;
- a row whose grant ends free may be kept for the session that had it; a grant, or an end for good, ends that;
- one whose grant ends while something is in doubt is reserved: until its time is over only that session is granted it;
- a position past the stream's head blocks the row: nobody guesses;
- so does one in a part that retention has taken, unless the group would rather skip it: then what was lost is counted;
- so does a block that its holder cannot decode, with the same choice;
- a closed stream consumed to its head is finished, and never granted again;
- in a group that is atomic what is consumed in whole epochs moves on together with the position;
- a deleted group has no rows, and history says of each that was held that its grant is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import assert_never

from sublet_protocol.domain.epochs import (
    SMALLEST,
    ConsumedFrontier,
    LowerFrontier,
    UpperFrontier,
    format_frontier,
    have_same_dimensions,
)
from sublet_protocol.domain.in_doubt import InDoubt, pending_in_doubt
from sublet_storage.groups.model.desired_state import GroupCommand
from sublet_storage.groups.model.options import MAX_SESSION_EXPIRY_S
from sublet_storage.groups.model.records import (
    COMMAND,
    EPOCHS_CONSUMED,
    MAX_LOSSES,
    TAKEOVER,
    AdvancePosition,
    ChangeOutcome,
    ForceRelease,
    GrantStream,
    HistoryRecord,
    Lending,
    LendingChange,
    LendingStatus,
    OnDataLoss,
    ReclaimStream,
    RecordHistory,
    ReleaseStream,
    StartingPosition,
    UnreserveStream,
)

MICROSECONDS = 1_000_000
"""In a second: times of the store are integers of microseconds since 1970."""

TIMELINE_US = 1 << 52
"""By so much each timeline of the database is ahead of the one before in terms and ids, whatever its clock says: for
longer than any clock has run since 1970. As the function `timeline_ahead` has it."""


@dataclass(frozen=True, slots=True)
class LendingRow:
    """A lending row as the table has it. `losses` counts forced ends at `lost_position`.

    `held_until_us` is there only for a free row that is, or was, kept for `session`, or a reserved one. Without a
    session it says when the row was taken from a holder who may not have heard: by a reset, or with a former group of
    the name. `consumed` is there only where the group is atomic. `in_doubt` is what a
    holder planned last: it stays when it is done, so that a holder who cannot know that it is can be told.
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
    in_doubt: InDoubt | None = None

    @property
    def pending_in_doubt(self) -> InDoubt | None:
        """What of it is not done."""
        return pending_in_doubt(self.in_doubt, self.position, self.consumed)


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """A stream at one instant. Once `is_closed`, its head is final; `is_gone`: retention has taken its messages.
    `lower`: what is completed in its space."""

    stream_id: int
    generation_id: int
    hash_from: int
    hash_to: int
    head: int
    is_closed: bool
    is_gone: bool
    lower: LowerFrontier | None = None


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """What history will say; grant id and holder are those of the grant that began or ended.

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


@dataclass(frozen=True, slots=True)
class Transition:
    """The answer, the row as it is from now on, and the event if there is one to record."""

    outcome: ChangeOutcome
    row: LendingRow
    event: HistoryEvent | None = None


def apply_change(
    entry: LendingChange,
    row: LendingRow,
    stream: StreamFacts,
    *,
    held_back: bool,
    term: int,
    now_us: int,
    on_data_loss: OnDataLoss = OnDataLoss.FAIL,
) -> Transition:
    """Apply one entry of who leads at that term. `held_back`: an ancestor of the stream has a row in this group that is
    not finished."""
    if isinstance(entry, GrantStream):
        return _grant(entry, row, stream, held_back, max(term, now_us), on_data_loss)
    if isinstance(entry, UnreserveStream):
        return _unreserve(entry, row, now_us)
    if row.status is not LendingStatus.HELD or row.grant_id != entry.grant_id:
        return Transition(ChangeOutcome.REFUSED, row)
    match entry:
        case ReclaimStream():
            return _reclaim(entry, row, stream, now_us)
        case AdvancePosition():
            return _advance(entry, row, stream, now_us)
        case ReleaseStream():
            return _release(entry, row, stream, now_us)
        case ForceRelease():
            return _seize(entry, row, stream, now_us)
        case RecordHistory():
            return Transition(ChangeOutcome.APPLIED, row, _event(entry.event, row, entry.reason))
        case _:
            assert_never(entry)


def close_out(
    row: LendingRow, stream: StreamFacts, now_us: int, on_data_loss: OnDataLoss = OnDataLoss.FAIL
) -> Transition | None:
    """What a renewal does to a row whose stream is closed: finish it, block it, or leave it (None)."""
    if row.status not in (LendingStatus.FREE, LendingStatus.HELD):
        return None
    if unreadable := _unreadable(row, stream, now_us, on_data_loss):
        return unreadable
    if row.status is LendingStatus.FREE and _consumed(row.position, stream):
        return _finish_unlent(row, ChangeOutcome.APPLIED)
    return None


def to_lending(row: LendingRow, stream: StreamFacts, now_us: int, parents: Sequence[int] = ()) -> Lending:
    """The row and its stream as the leader sees them at that time; `parents`: see `Lending`."""
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
    )


def merge_consumed_frontier(
    before: LowerFrontier | None, lower: LowerFrontier | None, held_back: Iterable[LowerFrontier | None]
) -> LowerFrontier | None:
    """How far a group has come in a space, where it was at `before`. It never goes back.

    `lower` is what was completed. `held_back` says, of each unfinished row of the space whose position is not the head,
    what is consumed of its stream, read after `lower`: a stream that is read to its head holds nothing back.
    """
    frontiers = set(held_back)
    if lower is None or not all(each is not None and have_same_dimensions(each, lower) for each in frontiers):
        return before  # one that is not alike no honest consumer has reported
    everything = lower if before is None else before.intersect(lower)
    reached = everything.meet(*(each for each in frontiers if each is not None))
    return reached if before is None else before.intersect(reached)


def initial_frontier(
    start: StartingPosition, lower: LowerFrontier | None, begun: UpperFrontier
) -> LowerFrontier | None:
    """Which epochs of a space a group is given that begins there: those of which nothing was `begun` before its start
    positions, or is gone. None: all.

    Who starts at the end also has nothing of what is completed (`lower`).
    """
    if lower is None:
        return None
    if start.policy == "latest":
        return lower.after_completing(begun)
    if not begun.greatest:
        return None
    return LowerFrontier(((SMALLEST,) * len(begun.greatest[0]),)).after_completing(begun)


def to_history_record(row: LendingRow, event: HistoryEvent, term: int, now_us: int) -> HistoryRecord:
    """The line of history for an event of this row."""
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
    )


def takeover_record(leadership_id: int, node: str, before: str | None, term: int, now_us: int) -> HistoryRecord:
    """The line of history for a node that leads from now on; `before`: who led, under another incarnation."""
    then = "first leader" if before is None else f"before: {before}"
    return HistoryRecord(
        now_us, leadership_id, 0, TAKEOVER, f"node {node} leads; {then}", 0, None, None, 0, term, is_forced=False
    )


def consumption_record(
    group_id: int, space: str, consumed: LowerFrontier, term: int, now_us: int, unfinished: Sequence[str] = ()
) -> HistoryRecord:
    """The line of history for a group that has consumed all epochs of a space that are not at or after these;
    `unfinished`: of producers whose lease had run out before they had finished with some of them."""
    said = f"space {space}: consumed are all epochs before {format_frontier(consumed)}"
    if unfinished:
        said += f"; closed by expiry, and perhaps not whole: those of producer {', '.join(unfinished)}"
    return HistoryRecord(now_us, group_id, 0, EPOCHS_CONSUMED, said, 0, None, None, 0, term, is_forced=False)


def apply_reset(row: LendingRow, stream: StreamFacts, position: int, reason: str, now_us: int) -> Transition:
    """An operator says where the group goes on. A grant in force ends by it, without its holder's word."""
    held = row.status is LendingStatus.HELD
    until = _twice(row, stream) if held or row.pending_in_doubt is not None else None
    status = LendingStatus.FINISHED if _consumed(position, stream) else LendingStatus.FREE
    after = replace(_ended(row, status, position, now_us), losses=0, lost_position=None, in_doubt=None)
    if until is not None:
        until = max(until, position)
    if held:
        after = replace(after, held_until_us=now_us)
    return Transition(ChangeOutcome.APPLIED, after, _event("reset", replace(row, position=position), reason, until))


def command_record(group_id: int, order: GroupCommand, term: int, now_us: int, who: str = "") -> HistoryRecord:
    """The line of history for what an operator, `who`, wants from now on; `term`: of who led last."""
    return HistoryRecord(
        now_us, group_id, 0, COMMAND, reason_with_user(str(order), who), 0, None, None, 0, term, is_forced=False
    )


def reason_with_user(reason: str, who: str) -> str:
    """A reason of history with who gave the order, where that is known."""
    return f"{reason}, by {who}" if who else reason


def deletion_records(rows: Iterable[LendingRow], term: int, now_us: int, who: str = "") -> list[HistoryRecord]:
    """A line for each grant that ends because its group is deleted. Nothing is seen twice in a group that is gone."""
    held = sorted((row for row in rows if row.status is LendingStatus.HELD), key=lambda row: row.stream_id)
    return [
        to_history_record(row, _event("delete", row, reason_with_user("its group was deleted", who)), term, now_us)
        for row in held
    ]


def next_id(last: int, now_us: int) -> int:
    """The next term or grant id: larger than the last, and than any that the database has forgotten since. `now_us`: by
    the database's clock and timeline (see `TIMELINE_US`), or the term, which was drawn by them."""
    return max(last + 1, now_us)


def is_of_former_timeline(grant_id: int, term: int) -> bool:
    """Whether nothing was lent under that row on the timeline of this term, but perhaps on the one before."""
    return grant_id > 0 and grant_id // TIMELINE_US < term // TIMELINE_US


def _grant(
    entry: GrantStream, row: LendingRow, stream: StreamFacts, held_back: bool, now_us: int, on_data_loss: OnDataLoss
) -> Transition:
    if held_back or not (row.status is LendingStatus.FREE or _is_reserved_for(row, entry)):
        return Transition(ChangeOutcome.REFUSED, row)
    if unreadable := _unreadable(row, stream, now_us, on_data_loss):
        return unreadable
    if _consumed(row.position, stream):
        return _finish_unlent(row, ChangeOutcome.REFUSED)
    after = replace(
        row,
        status=LendingStatus.HELD,
        grant_id=next_id(row.grant_id, now_us),
        borrower_id=entry.borrower_id,
        agent=entry.agent,
        session=entry.session,
        session_epoch=entry.session_epoch,
        held_until_us=None,
    )
    return Transition(ChangeOutcome.APPLIED, after, _event("grant", after, entry.reason))


def _is_reserved_for(row: LendingRow, entry: GrantStream) -> bool:
    return row.status is LendingStatus.RESERVED and entry.session is not None and row.session == entry.session


def _unreserve(entry: UnreserveStream, row: LendingRow, now_us: int) -> Transition:
    is_due = entry.is_forced or row.held_until_us is None or row.held_until_us <= now_us
    if row.status is not LendingStatus.RESERVED or row.grant_id != entry.grant_id or not is_due:
        return Transition(ChangeOutcome.REFUSED, row)
    after = replace(row, status=LendingStatus.FREE, session=None, session_epoch=None, held_until_us=None, in_doubt=None)
    doubt = row.pending_in_doubt
    until = None if doubt is None else max(doubt.end, doubt.consumed.upto if doubt.consumed is not None else 0)
    return Transition(ChangeOutcome.APPLIED, after, _event("unreserve", row, entry.reason, until))


def _reclaim(entry: ReclaimStream, row: LendingRow, stream: StreamFacts, now_us: int) -> Transition:
    if row.agent != entry.agent:
        return Transition(ChangeOutcome.REFUSED, row)
    if _reach(entry) > stream.head:
        return _block(row, _beyond(_reach(entry), stream), now_us, _twice(row, stream))
    after = replace(
        _consuming(row, entry.consumed),
        borrower_id=entry.borrower_id,
        position=max(row.position, entry.position),
        session_epoch=row.session_epoch if entry.session_epoch is None else entry.session_epoch,
    )
    if after == row:
        return Transition(ChangeOutcome.APPLIED, row)
    return Transition(ChangeOutcome.APPLIED, after, _event("reclaim", after, "reclaimed by its agent"))


def _advance(entry: AdvancePosition, row: LendingRow, stream: StreamFacts, now_us: int) -> Transition:
    if _reach(entry) > stream.head:
        return _block(row, _beyond(_reach(entry), stream), now_us, _twice(row, stream))
    position = max(row.position, entry.position)
    row = _consuming(row, entry.consumed)
    if _consumed(position, stream):
        return _finish(row, position, "consumed to its head", now_us)
    if entry.in_doubt not in (None, row.in_doubt) and not _is_earlier(entry.in_doubt, row.in_doubt):
        return Transition(ChangeOutcome.APPLIED, replace(row, position=position, in_doubt=entry.in_doubt))
    return Transition(ChangeOutcome.APPLIED, row if position == row.position else _moved(row, position))


def _is_earlier(plan: InDoubt | None, known: InDoubt | None) -> bool:
    """Return whether the plan was made before the one that is known: plans of one grant only move on."""
    return plan is not None and known is not None and plan.grant_id == known.grant_id and plan.start < known.start


def _release(entry: ReleaseStream, row: LendingRow, stream: StreamFacts, now_us: int) -> Transition:
    if _reach(entry) > stream.head:
        return _block(row, _beyond(_reach(entry), stream), now_us, _twice(row, stream))
    position = max(row.position, entry.position)
    row = _consuming(row, entry.consumed)
    if entry.poison > position:
        return _poisoned(entry, replace(row, position=position), stream, now_us)
    if _consumed(position, stream):
        return _finish(row, position, entry.reason, now_us)
    after = _freed(row, position, now_us, entry.reserve_s)
    given_up = min(entry.delivered_end, stream.head)
    until = given_up if given_up > position else None
    return _given_up("release", row, after, entry.reason, until)


def _seize(entry: ForceRelease, row: LendingRow, stream: StreamFacts, now_us: int) -> Transition:
    """Losses are counted only where there was a message to die of: an idle stream is never poisonous, nor is one that
    waits for epochs to be completed. What is reserved for a session's return is not blocked, however often that dies:
    nobody else is lent it, and what it does then must be the same again."""
    if _consumed(row.position, stream):
        return _finish(row, row.position, entry.reason, now_us)
    again = row.losses if row.lost_position == row.position else 0
    losses = again + 1 if row.position < stream.head and not _only_waits(row, stream) else 0
    counted = replace(row, losses=losses, lost_position=row.position if losses else None)
    after = _freed(counted, row.position, now_us, entry.reserve_s)
    if losses >= MAX_LOSSES and after.status is not LendingStatus.RESERVED:
        why = f"{entry.reason}; lost {losses} times at offset {row.position}"
        return replace(_block(counted, why, now_us, _twice(row, stream)), outcome=ChangeOutcome.APPLIED)
    return _given_up("force_release", row, after, entry.reason, _twice(row, stream))


def _poisoned(entry: ReleaseStream, row: LendingRow, stream: StreamFacts, now_us: int) -> Transition:
    """Its holder has done all that lies before a block that nobody can decode."""
    if not entry.skips:
        until = min(entry.delivered_end, stream.head)
        twice = until if until > row.position else None
        return replace(_block(row, entry.reason, now_us, twice), outcome=ChangeOutcome.APPLIED)
    lost = entry.poison - row.position
    why = f"{entry.reason} Skipped: [{row.position}, {entry.poison}), {lost} messages"
    counted = replace(row, lost_message_count=row.lost_message_count + lost)
    if _consumed(entry.poison, stream):
        after = _ended(counted, LendingStatus.FINISHED, entry.poison, now_us)
    else:
        after = _freed(counted, entry.poison, now_us, entry.reserve_s)
    return Transition(ChangeOutcome.APPLIED, after, _event("skip", row, why))


def _only_waits(row: LendingRow, stream: StreamFacts) -> bool:
    """All that is completed is consumed of it: what is left may not be given out yet."""
    return row.consumed is not None and row.consumed.lower is not None and row.consumed.lower == stream.lower


def _given_up(name: str, row: LendingRow, after: LendingRow, reason: str, until: int | None) -> Transition:
    """A grant has ended. What is reserved is not seen twice: who did it, or did not, does it again himself."""
    ended = replace(row, position=after.position)
    if after.status is LendingStatus.RESERVED and after.in_doubt is not None:
        doubt = after.in_doubt
        retained = (
            f"[{doubt.start}, {doubt.end}) is in doubt: kept for {doubt.hold_s:g} s for session {after.session!r}"
        )
        return Transition(ChangeOutcome.APPLIED, after, _event("reserve", ended, f"{reason}; {retained}"))
    return Transition(ChangeOutcome.APPLIED, after, _event(name, ended, reason, until))


def _finish(row: LendingRow, position: int, reason: str, now_us: int) -> Transition:
    """End a grant because nothing is left to lend."""
    after = _ended(row, LendingStatus.FINISHED, position, now_us)
    return Transition(ChangeOutcome.APPLIED, after, _event("finish", replace(row, position=position), reason))


def _finish_unlent(row: LendingRow, verdict: ChangeOutcome) -> Transition:
    """Finish a free row; it had no grant that could end, so its grant id stays."""
    taken_at = _taken_at(row)
    after = replace(row, status=LendingStatus.FINISHED, session=None, session_epoch=None, held_until_us=taken_at)
    return Transition(verdict, after, _event("finish", after, "nothing left"))


def _unreadable(row: LendingRow, stream: StreamFacts, now_us: int, on_data_loss: OnDataLoss) -> Transition | None:
    """What becomes of a row from whose position no borrower could read; None where it can."""
    twice = _twice(row, stream) if row.status is LendingStatus.HELD else None
    if row.position > stream.head:
        return _block(row, _beyond(row.position, stream), now_us, twice)
    if not stream.is_gone or row.position == stream.head:
        return None
    lost = stream.head - row.position
    why = f"offset {row.position} is gone by retention, {lost} messages in all"
    if on_data_loss is OnDataLoss.FAIL:
        return _block(row, why, now_us, twice)
    after = replace(
        _ended(row, LendingStatus.FINISHED, stream.head, now_us), lost_message_count=row.lost_message_count + lost
    )
    return Transition(ChangeOutcome.REFUSED, after, _event("skip", row, f"{why}; skipped"))


def _block(row: LendingRow, why: str, now_us: int, twice: int | None) -> Transition:
    """`twice`: up to where messages may be seen again, where a grant ends by it."""
    after = _ended(row, LendingStatus.BLOCKED, row.position, now_us)
    return Transition(ChangeOutcome.REFUSED, after, _event("block", row, why, twice))


def _moved(row: LendingRow, position: int) -> LendingRow:
    """`replace` spelled out: this is the hot path."""
    return LendingRow(
        row.group_id,
        row.stream_id,
        row.status,
        position,
        row.grant_id,
        row.borrower_id,
        row.agent,
        row.session,
        row.losses,
        row.lost_position,
        row.session_epoch,
        row.held_until_us,
        row.lost_message_count,
        row.consumed,
        row.in_doubt,
    )


def _consuming(row: LendingRow, consumed: ConsumedFrontier | None) -> LendingRow:
    """The row with what is consumed in whole epochs. A group that is not atomic has no such thing, whatever is said."""
    if row.consumed is None or consumed is None or (later := row.consumed.max_of(consumed)) == row.consumed:
        return row
    return replace(row, consumed=later, losses=0, lost_position=None)  # it goes on, though the position may not


def _reach(entry: ReclaimStream | AdvancePosition | ReleaseStream) -> int:
    """The furthest offset that it speaks of."""
    furthest = entry.position if entry.consumed is None else max(entry.position, entry.consumed.upto)
    if isinstance(entry, ReleaseStream):
        return max(furthest, entry.poison)
    doubt = entry.in_doubt if isinstance(entry, AdvancePosition) else None
    return furthest if doubt is None else max(furthest, doubt.end)


def _freed(row: LendingRow, position: int, now_us: int, keep_s: float) -> LendingRow:
    """The row after its grant, kept for its session where that has a name and is to be waited for."""
    after = _ended(row, LendingStatus.FREE, position, now_us)
    doubt = after.pending_in_doubt
    if doubt is not None and (row.session is None or row.session_epoch is None or doubt.hold_s <= 0):
        doubt, after = None, replace(after, in_doubt=None)
    if doubt is not None:
        after, keep_s = replace(after, status=LendingStatus.RESERVED), doubt.hold_s
    if row.session is None or keep_s <= 0:
        return after
    held_until_us = now_us + round(min(keep_s, MAX_SESSION_EXPIRY_S) * MICROSECONDS)
    return replace(after, session=row.session, session_epoch=row.session_epoch, held_until_us=held_until_us)


def _ended(row: LendingRow, status: LendingStatus, position: int, now_us: int) -> LendingRow:
    return replace(
        row,
        status=status,
        position=position,
        grant_id=next_id(row.grant_id, now_us),
        borrower_id=None,
        agent=None,
        session=None,
        session_epoch=None,
        held_until_us=_taken_at(row),
    )


def _taken_at(row: LendingRow) -> int | None:
    """When it was taken from a holder who may not have heard, whatever has become of it since: to be lent it waits."""
    return row.held_until_us if row.session is None else None


def _event(name: str, row: LendingRow, reason: str, until: int | None = None) -> HistoryEvent:
    return HistoryEvent(name, reason, row.grant_id, row.borrower_id, row.agent, row.session, row.position, until)


def _twice(row: LendingRow, stream: StreamFacts) -> int:
    """Up to where messages from the row's position on may be seen twice when its grant ends without a last word."""
    return max(row.position, stream.head)


def _consumed(position: int, stream: StreamFacts) -> bool:
    return stream.is_closed and position == stream.head


def _beyond(position: int, stream: StreamFacts) -> str:
    return f"offset {position} is beyond the head {stream.head}"
