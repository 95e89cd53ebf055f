"""Applies progress to lending rows and to consumed frontiers of groups: pure functions.

Progress needs the equal grant id and a held row, and never lowers the position. In a group that is atomic what is
consumed in whole epochs moves on together with the position.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from msgspec import structs

from sublet_protocol.domain.epoch_frontiers import (
    ConsumedFrontier,
    LowerFrontier,
    UpperFrontier,
    format_frontier,
    have_same_dimensions,
)
from sublet_protocol.domain.in_doubt_range import InDoubtRange, choose_latest_in_doubt
from sublet_protocol.domain.limits import MIN_EPOCH
from sublet_storage.groups.model.lending_row import (
    LendingRow,
    LendingTransitionResult,
    StreamFacts,
    block,
    find_redelivery_end,
    finish,
    format_beyond_head,
    is_consumed,
)
from sublet_storage.groups.model.records import (
    AdvancePosition,
    LendingOutcome,
    ReclaimStream,
    ReleaseStream,
    StartingPosition,
)


def merge_consumed_frontier(
    former: LowerFrontier | None, lower: LowerFrontier | None, held_back: Iterable[LowerFrontier | None]
) -> LowerFrontier | None:
    """Return the frontier up to which a group has consumed a space, where it was at `former`. It never moves back.

    `lower` is the space's lower frontier. `held_back` has, for each unfinished row of the space whose position is not
    the head, what is consumed of its stream, read after `lower`: a stream that is read to its head holds nothing back.
    """
    frontiers = set(held_back)
    if lower is None or not all(
        frontier is not None and have_same_dimensions(frontier, lower) for frontier in frontiers
    ):
        return former  # one that is not alike no honest consumer has reported
    everything = lower if former is None else former.intersect(lower)
    reached = everything.meet_within_limits(frontier for frontier in frontiers if frontier is not None)
    if reached is None:
        return former  # until less is held back
    return reached if former is None else former.intersect(reached)


def initial_frontier(
    start: StartingPosition, lower: LowerFrontier | None, begun_epochs: UpperFrontier
) -> LowerFrontier | None:
    """Return the frontier of the epochs of a space that a new group gets: those of which nothing
    had begun before its starting positions (`begun_epochs`), or is gone. None: all.

    A group that starts at the end also gets no completed epochs (`lower`).
    """
    if lower is None:
        return None
    if start.policy == "latest":
        return lower.after_completing(begun_epochs)
    if not begun_epochs.greatest:
        return None
    return LowerFrontier(((MIN_EPOCH,) * len(begun_epochs.greatest[0]),)).after_completing(begun_epochs)


def advance(change: AdvancePosition, row: LendingRow, stream: StreamFacts, now_us: int) -> LendingTransitionResult:
    if impossible := find_impossible(change, row, stream, now_us):
        return impossible
    position = max(row.position, change.position)
    row = with_consumed(row, change.consumed)
    if is_consumed(position, stream):
        return finish(row, position, "consumed to its head", now_us)
    planned = change.in_doubt
    if planned is not None and row.consumed is None:
        planned = structs.replace(planned, consumed=None)  # as of what is consumed itself: the group is not atomic
    doubt = choose_latest_in_doubt(planned, row.in_doubt, row.grant_id)
    return LendingTransitionResult(LendingOutcome.APPLIED, replace(row, position=position, in_doubt=doubt))


def with_consumed(row: LendingRow, consumed: ConsumedFrontier | None) -> LendingRow:
    """Return the row with what is consumed in entire epochs; unchanged in a group that is not atomic."""
    if row.consumed is None or consumed is None or (later := row.consumed.max_of(consumed)) == row.consumed:
        return row
    return replace(row, consumed=later, losses=0, lost_position=None)  # it goes on, though the position may not


def find_impossible(
    change: ReclaimStream | AdvancePosition | ReleaseStream, row: LendingRow, stream: StreamFacts, now_us: int
) -> LendingTransitionResult | None:
    """Return the result of a change that names what does not exist: it is invalid, and leaves the row as it is. Where
    the row itself is beyond the head, or its holder has found it to be, the stream has lost messages."""
    furthest = _find_furthest_offset(change)
    doubt = change.in_doubt if isinstance(change, AdvancePosition) else None
    if furthest > stream.head:
        problem = format_beyond_head(furthest, stream)
        is_found = isinstance(change, ReleaseStream) and change.is_beyond_head
        if is_found or row.furthest_offset > stream.head:
            return block(row, problem, now_us, find_redelivery_end(row, stream))
    elif doubt is not None and doubt.grant_id > row.grant_id:
        problem = f"in doubt is a range of grant {doubt.grant_id}, and the grant in force is {row.grant_id}"
    elif not (row.consumed is None or _are_of_space((change, doubt), stream.lower)):
        one = None if stream.lower is None else format_frontier(LowerFrontier(stream.lower.least[:1]))
        used = "no epoch was ever used" if one is None else f"an epoch is like {one}"
        problem = f"it names epochs as consumed that are of another kind than those of its space, where {used}"
    else:
        return None
    return LendingTransitionResult(LendingOutcome.INVALID, row, problem=f"stream {row.stream_id}: {problem}")


def _are_of_space(
    reports: Iterable[ReclaimStream | AdvancePosition | ReleaseStream | InDoubtRange | None],
    lower: LowerFrontier | None,
) -> bool:
    """Return whether all epochs that are reported have as many numbers as those of the space, where some are used."""
    reported = [each.consumed.lower for each in reports if each is not None and each.consumed is not None]
    frontiers = [frontier for frontier in reported if frontier is not None]
    return all(lower is not None and each.least and have_same_dimensions(each, lower) for each in frontiers)


def _find_furthest_offset(change: ReclaimStream | AdvancePosition | ReleaseStream) -> int:
    furthest = change.position if change.consumed is None else max(change.position, change.consumed.upto)
    if isinstance(change, ReleaseStream):
        return max(furthest, change.poison, change.delivered_end)
    doubt = change.in_doubt if isinstance(change, AdvancePosition) else None
    return furthest if doubt is None else max(furthest, doubt.end)
