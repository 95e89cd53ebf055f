"""Plans of whole epochs: the last epoch of a batch, common to a space's streams.

What is completed is known of each stream up to its head. So a batch can end behind any epoch that is completed
everywhere, and has all messages of it that these streams have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce

from sublet_borrower.planner.planned_ranges import PlanLimits
from sublet_protocol.domain.epoch_frontiers import LowerFrontier
from sublet_storage.readers.epoch_steps import EpochStep, EpochStepPlanner


def plan_steps(
    streams: Mapping[int, EpochStepPlanner],
    limits: PlanLimits,
    last: LowerFrontier | None = None,
    poison: Mapping[int, tuple[int, int]] | None = None,
) -> dict[int, EpochStep]:
    """Return {stream: its step} for streams of one space, all known to their heads; streams without messages left, and
    those whose step would change nothing, are absent.

    A step has as many epochs as `limits` allows, at least one, and none behind `last`. Where nothing is left but
    messages without an epoch, it has blocks of these, at least one of each stream. As long as it can move anything, it
    reads none of the offsets of `poison`, by stream.
    """
    completed = meet_completed(streams)
    if completed is not None and last is not None and last.is_at_or_before(completed):
        completed = last
    entire_batch = {stream_id: atomic.step_to(atomic.scanned, completed) for stream_id, atomic in streams.items()}
    is_allowed = partial(_is_allowed, limits=limits, poison=poison or {})
    if not streams or is_allowed(entire_batch):
        return _keep_moving(entire_batch, streams)
    ends = [] if completed is None else _list_ends(streams, completed)
    return (
        _find_first_moving(streams, [partial(_plan_to, streams, end) for end in ends], is_allowed)
        or _find_first_moving(streams, _divide(streams, completed), is_allowed)
        or _keep_moving(entire_batch, streams)
    )


def meet_completed(streams: Mapping[int, EpochStepPlanner]) -> LowerFrontier | None:
    """Return what is completed according to all streams; None where there are no epochs."""
    known = [atomic.lower for atomic in streams.values() if atomic.lower is not None]
    return reduce(LowerFrontier.meet, known) if known and len(known) == len(streams) else None


def _find_first_moving(
    streams: Mapping[int, EpochStepPlanner],
    batches: Sequence[Callable[[], dict[int, EpochStep]]],
    is_allowed: Callable[[Mapping[int, EpochStep]], bool],
) -> dict[int, EpochStep] | None:
    """Return the last of these batches that is allowed, or else the first that moves anything; each has what those
    before it have."""
    low, high, best_batch = 0, len(batches), None
    while low < high:
        middle = (low + high) // 2
        batch = batches[middle]()
        if is_allowed(batch) or not any(step.runs for step in batch.values()):
            low, best_batch = middle + 1, batch
        else:
            high = middle
    if best_batch is not None and any(step.runs for step in best_batch.values()):
        return _keep_moving(best_batch, streams)
    return _keep_moving(batches[low](), streams) if low < len(batches) else None


def _list_ends(streams: Mapping[int, EpochStepPlanner], completed: LowerFrontier) -> list[LowerFrontier]:
    """Return where a batch may end, in order: what was completed one after the other."""
    frontiers = {
        lower
        for atomic in streams.values()
        for lower in atomic.completed_frontiers()
        if lower.is_at_or_before(completed)
    }
    # Each is at or before the next. So the first epoch in which they differ is less, or there is none any more.
    return sorted(frontiers, key=lambda lower: (*lower.least, (math.inf,)))


def _divide(
    streams: Mapping[int, EpochStepPlanner], completed: LowerFrontier | None
) -> list[Callable[[], dict[int, EpochStep]]]:
    """Return batches that have what is completed and one block more of each stream, two, and so on."""
    ends = {stream_id: atomic.list_ends(completed) for stream_id, atomic in streams.items()}

    def plan(count: int) -> dict[int, EpochStep]:
        upto = {stream_id: some[min(count, len(some) - 1)] for stream_id, some in ends.items()}
        return {stream_id: atomic.step_to(upto[stream_id], completed) for stream_id, atomic in streams.items()}

    return [partial(plan, count) for count in range(1, max(map(len, ends.values())))]


def _plan_to(streams: Mapping[int, EpochStepPlanner], lower: LowerFrontier) -> dict[int, EpochStep]:
    return {
        stream_id: atomic.step_to(atomic.offset_completed_by(lower), lower) for stream_id, atomic in streams.items()
    }


def _is_allowed(batch: Mapping[int, EpochStep], limits: PlanLimits, poison: Mapping[int, tuple[int, int]]) -> bool:
    messages, size = (sum(values) for values in zip(*((s.max_messages, s.size) for s in batch.values()), strict=True))
    return (
        (limits.max_messages is None or messages <= limits.max_messages)
        and (limits.max_bytes is None or size <= limits.max_bytes)
        and not any(batch[stream_id].reads(*offsets) for stream_id, offsets in poison.items())
    )


def _keep_moving(batch: Mapping[int, EpochStep], streams: Mapping[int, EpochStepPlanner]) -> dict[int, EpochStep]:
    return {stream_id: step for stream_id, step in batch.items() if step.runs or _is_moving(step, streams[stream_id])}


def _is_moving(step: EpochStep, atomic: EpochStepPlanner) -> bool:
    return atomic.is_waiting and (step.position, step.consumed) != (atomic.position, atomic.consumed)
