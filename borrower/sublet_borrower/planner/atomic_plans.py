"""Micro-batches of whole epochs: up to which epoch a batch goes, the same for all streams of a space that a query has.

What is completed is known of each stream up to its head. So a batch can end behind any epoch that is completed
everywhere, and has all messages of it that these streams have.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

from sublet_borrower.planner.micro_batch import Most
from sublet_protocol.domain.epochs import LowerFrontier
from sublet_storage.readers.epoch_steps import Step, WholeEpochs


def steps(streams: Mapping[int, WholeEpochs], most: Most, last: LowerFrontier | None = None) -> dict[int, Step]:
    """{stream: its step} of streams of one space, all known to their heads; those that would change nothing are absent.

    As many epochs as `most` allows, at least one; not behind `last`.
    """
    completed = first_completed(streams)
    if completed is not None and last is not None and last.is_at_or_before(completed):
        completed = last
    whole_batch = {stream_id: whole.step_to(whole.scanned, completed) for stream_id, whole in streams.items()}
    if completed is None or _fits(whole_batch, most):
        return _moving(whole_batch, streams)
    return _first_that_moves(streams, _ends(streams, completed), most) or _moving(whole_batch, streams)


def first_completed(streams: Mapping[int, WholeEpochs]) -> LowerFrontier | None:
    """What is completed according to all of them; None where there are no epochs."""
    known = [whole.lower for whole in streams.values() if whole.lower is not None]
    return reduce(LowerFrontier.meet, known) if known and len(known) == len(streams) else None


def _first_that_moves(
    streams: Mapping[int, WholeEpochs], ends: Sequence[LowerFrontier], most: Most
) -> dict[int, Step] | None:
    """The furthest of these ends that is allowed, or else the first that moves anything."""
    low, high, found = 0, len(ends), None
    while low < high:
        middle = (low + high) // 2
        batch = _to(streams, ends[middle])
        if _fits(batch, most) or not any(step.runs for step in batch.values()):
            low, found = middle + 1, batch
        else:
            high = middle
    if found is not None and any(step.runs for step in found.values()):
        return _moving(found, streams)
    return _moving(_to(streams, ends[low]), streams) if low < len(ends) else None


def _ends(streams: Mapping[int, WholeEpochs], completed: LowerFrontier) -> list[LowerFrontier]:
    """Where a batch may end, of epochs that follow one another; elsewhere only at the end."""
    found = {lower for whole in streams.values() for lower in whole.lowers() if lower.is_at_or_before(completed)}
    if any(len(lower.least) != 1 or len(lower.least[0]) != 1 for lower in found):
        return []
    return sorted(found, key=lambda lower: lower.least)


def _to(streams: Mapping[int, WholeEpochs], lower: LowerFrontier) -> dict[int, Step]:
    return {stream_id: whole.step_to(whole.upto(lower), lower) for stream_id, whole in streams.items()}


def _fits(batch: Mapping[int, Step], most: Most) -> bool:
    messages, size = (sum(values) for values in zip(*((s.messages, s.size) for s in batch.values()), strict=True))
    return (most.messages is None or messages <= most.messages) and (most.bytes is None or size <= most.bytes)


def _moving(batch: Mapping[int, Step], streams: Mapping[int, WholeEpochs]) -> dict[int, Step]:
    return {
        stream_id: step
        for stream_id, step in batch.items()
        if step.runs or (step.position, step.consumed) != (streams[stream_id].position, streams[stream_id].consumed)
    }
