"""Reads a stream in entire epochs, each delivered once it is completed.

An epoch's messages lie wherever they were published, among those of others, and may be delivered once the epoch is
completed. Each block has the lower frontier that its writer saw: all messages of epochs completed by that lie before
the block. At the head the space's own frontier counts, read in the same statement. So a reader goes through the
*summaries* of the blocks, not through their messages, and what it reads then, in a *step*, are the blocks with messages
of epochs that are completed by the end of the step and were not at its beginning. A block with messages of later epochs
stays behind, and is read once more for these: nothing is kept in memory but summaries.

The first offset whose block stays behind is the position, and what is consumed beyond it a `ConsumedFrontier`; both
move on together, step by step.
"""

from __future__ import annotations

import functools
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import pairwise
from operator import attrgetter
from typing import Any, Final

import psycopg
import pyarrow as pa
from msgspec import Struct
from msgspec.structs import replace
from psycopg.types.numeric import Int8

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier, lower_frontier_from_text
from sublet_storage.log import fetch as message_log
from sublet_storage.log.block_encoder import BlockEpochRange, parsed_epoch_bounds
from sublet_storage.util import arrow_compute as pc

MAX_PAGE_SUMMARIES: Final = 2048
MAX_BLOCKS_SCANNED: Final = 20_000
"""How many blocks are looked at in vain before a step ends early, as among many of epochs far in the future."""

_FIRST, _END = attrgetter("first"), attrgetter("end")

_SUMMARIES = """
select s.head, s.state = 'closed', g.state = 'gone', space.lower_frontier::text, s.space_id,
       b.end_offset, b.count, b.size, b.lower_frontier::text, b.epoch_bounds::text
  from stream s join generation g using (generation_id) join space on space.space_id = s.space_id
  left join lateral (
    select end_offset, count, coalesce(octet_length(payload), uri_bytes) as size, lower_frontier, epoch_bounds
      from {block}
     where generation_id = %(generation)s and stream_id = %(stream)s and end_offset > %(offset)s
     order by end_offset limit %(blocks)s) b on true
 where s.stream_id = %(stream)s
 order by b.end_offset"""

_LOWERS = """
select s.stream_id, s.head, s.state = 'closed', space.lower_frontier::text, space_id
  from stream s join space using (space_id)
 where s.stream_id = any(%s::bigint[])"""


class BlockEpochSummary(Struct, frozen=True):
    """A block of [first, end): `size` in bytes, the lower frontier that its writer saw, and the epochs in it."""

    first: int
    end: int
    size: int
    lower: LowerFrontier | None
    epochs: BlockEpochRange | None

    def has_same_epochs(self, behind: BlockEpochSummary) -> bool:
        """Return whether the summary `behind`, which follows directly, is equal."""
        return (self.end, self.lower, self.epochs) == (behind.first, behind.lower, behind.epochs)


class BlockEpochSummaries(Struct, frozen=True):
    """Consecutive blocks, and the stream at that instant. `lower` is the lower frontier of its space, whose name may be
    another's as well, of one that was dropped."""

    blocks: tuple[BlockEpochSummary, ...]
    head: int
    is_closed: bool
    lower: LowerFrontier | None
    space_id: int


def read_block_summaries(
    conn: psycopg.Connection[Any], stream_id: int, generation_id: int, offset: int
) -> BlockEpochSummaries:
    """Return the summaries of the blocks behind an offset, of `MAX_PAGE_SUMMARIES` at most. Raise what
    `message_log.check_retained` raises, and `NotFound`."""
    parameters = {
        "generation": Int8(generation_id),
        "stream": Int8(stream_id),
        "offset": Int8(offset),
        "blocks": Int8(MAX_PAGE_SUMMARIES),
    }
    rows = message_log.read_stream_blocks(conn, _SUMMARIES, parameters, generation_id, stream_id, offset, 5)
    head, closed, _, lower, space_id = rows[0][:5]
    summaries = [] if rows[0][5] is None else [_make_block_summary(*row[5:]) for row in rows]
    behind = summaries[: message_log.count_contiguous([(summary.first, summary.end) for summary in summaries])]
    return BlockEpochSummaries(tuple(behind), head, closed, lower_frontier_from_text(lower), space_id)


def read_stream_frontiers(conn: psycopg.Connection[Any], stream_ids: Iterable[int]) -> dict[int, BlockEpochSummaries]:
    """Return where these streams end and what is completed in their spaces, without the summaries of their blocks."""
    rows = conn.execute(_LOWERS, (list(stream_ids),), prepare=True)
    return {
        stream_id: BlockEpochSummaries((), head, closed, lower_frontier_from_text(lower), space_id)
        for stream_id, head, closed, lower, space_id in rows
    }


class BlockRun(Struct, frozen=True):
    """Consecutive blocks of [start, end), to be read together. `is_fully_matching`: all messages in them match."""

    start: int
    end: int
    size: int
    is_fully_matching: bool


class EpochStep(Struct, frozen=True):
    """The messages delivered next, and the position and frontier after that.

    `start_frontier` is the frontier until then: the messages delivered are those it admits, and `consumed` no longer
    does.
    """

    runs: tuple[BlockRun, ...]
    start_frontier: ConsumedFrontier
    position: int
    consumed: ConsumedFrontier

    @property
    def max_messages(self) -> int:
        """Return how many messages the step has at most: its blocks may hold others beside those of its epochs."""
        return sum(run.end - run.start for run in self.runs)

    @property
    def size(self) -> int:
        """Return the bytes of the blocks to be read."""
        return sum(run.size for run in self.runs)

    def reads(self, start: int, end: int) -> bool:
        """Return whether it has to read any of those offsets."""
        return any(run.start < end and start < run.end for run in self.runs)

    def filter_batch(self, run: BlockRun, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Return the messages of a batch that are in the run and match."""
        offsets = batch.column("offset")
        if len(offsets) and offsets[-1].as_py() >= run.end:
            batch = batch.slice(0, pc.sum(pc.less(offsets, run.end)).as_py())
        return batch if run.is_fully_matching else batch.filter(self._make_row_mask(batch))

    def _make_row_mask(self, batch: pa.RecordBatch) -> pa.Array:
        column = batch.column("epoch")
        has_epoch = column.is_valid()
        unseen = pc.and_(pc.invert(has_epoch), pc.greater_equal(batch.column("offset"), self.start_frontier.upto))
        epochs = column.drop_null()
        completed = pc.invert(_admits(epochs, self.consumed.lower))
        return pc.replace_with_mask(unseen, has_epoch, pc.and_(_admits(epochs, self.start_frontier.lower), completed))


class EpochStepPlanner:
    """The planner of steps of one stream. Not thread-safe.

    `position` and `consumed` are those after the last step that was taken; `scanned` is the offset up to which
    summaries are known.
    """

    def __init__(self, position: int, consumed: ConsumedFrontier) -> None:
        self.position, self.consumed = position, consumed
        self.scanned = position
        self.lower: LowerFrontier | None = None
        self._waiting: list[BlockEpochSummary] = []
        self._draft, self._drafted = _Draft(consumed), 0

    def copy(self) -> EpochStepPlanner:
        """Return a copy."""
        planner = EpochStepPlanner(self.position, self.consumed)
        planner.scanned, planner.lower, planner._waiting = self.scanned, self.lower, self._waiting.copy()
        return planner

    @property
    def is_waiting(self) -> bool:
        """Return whether there are messages whose epochs are not completed, or that are in no step yet."""
        return self.position < self.scanned

    def add_summaries(self, summaries: BlockEpochSummaries) -> None:
        """Add the summaries behind the known ones. Their lower frontier counts only if they reach the head."""
        for summary in summaries.blocks:
            if summary.first <= self.scanned < summary.end:
                # Compaction makes one of several.
                self._append(summary if summary.first == self.scanned else replace(summary, first=self.scanned))
                self.scanned = summary.end
        if self.scanned == summaries.head:
            self.lower = summaries.lower

    def next_step(self, limit_bytes: int) -> EpochStep | None:
        """Return the furthest step of about `limit_bytes`, at least the smallest there is; None if there is none
        yet."""
        best = None
        for draft in self._draft_steps():
            if best is not None and (draft.size > limit_bytes or draft.scans > MAX_BLOCKS_SCANNED):
                break
            if draft.has_effect:
                best = draft.blocks, len(draft.blocks), draft.reached
        if best is None:
            return None
        blocks, count, reached = best  # a draft's list grows, and nothing else
        self._begin_draft()
        return self._make_step(blocks[:count], reached)

    def step_to(self, upto: int, lower: LowerFrontier | None) -> EpochStep:
        """Return the step to where all that lies before `offset_completed_by`, which is known, and is completed by
        `lower` is consumed."""
        reached = self.consumed.advanced_to(max(upto, self.consumed.upto), lower)
        preceding = (summary for summary in self._waiting if summary.first < reached.upto)
        cut = (summary if summary.end <= reached.upto else replace(summary, end=reached.upto) for summary in preceding)
        return self._make_step([summary for summary in cut if _is_in_step(summary, self.consumed, reached)], reached)

    def completed_frontiers(self) -> set[LowerFrontier]:
        """Return what the writers of the blocks that are left to read saw completed, and what is completed at the
        end."""
        return {lower for lower in (self.lower, *(summary.lower for summary in self._waiting)) if lower is not None}

    def offset_completed_by(self, lower: LowerFrontier) -> int:
        """Return an offset before which all lies that is completed by then."""
        offsets = (
            summary.first
            for summary in self._waiting
            if summary.lower is not None and lower.is_at_or_before(summary.lower)
        )
        return next(offsets, self.scanned)

    def list_ends(self, lower: LowerFrontier | None) -> list[int]:
        """Return the offset before which all lies that is completed by then, and where blocks with messages without an
        epoch end behind it: steps to these divide no epoch that is completed."""
        begin = self.consumed.upto if lower is None else max(self.consumed.upto, self.offset_completed_by(lower))
        has_unset = (s for s in self._waiting if s.epochs is None or s.epochs.has_unset)
        return [begin, *(summary.end for summary in has_unset if summary.end > begin)]

    def complete_step(self, step: EpochStep) -> None:
        """Complete the step, and continue behind it."""
        self.seek(step.position, step.consumed)

    def seek(self, position: int, consumed: ConsumedFrontier) -> None:
        """Continue from that position and frontier."""
        passed = self._count_blocks_before(consumed.upto)
        left = [summary for summary in self._waiting[:passed] if _has_remaining(summary, consumed)]
        self._waiting = left + self._waiting[passed:]
        self.position, self.consumed = position, consumed
        self._begin_draft()
        self.scanned = max(self.scanned, position)

    def _append(self, summary: BlockEpochSummary) -> None:
        """Merge summaries of blocks that are equal: one is enough, however long an epoch is."""
        last = self._waiting[-1] if self._waiting else None
        if (
            last is not None
            and summary.epochs is not None
            and last.first >= self.consumed.upto
            and last.has_same_epochs(summary)
        ):
            self._waiting[-1] = replace(last, end=summary.end, size=last.size + summary.size)
        else:
            self._waiting.append(summary)

    def _draft_steps(self) -> Iterator[_Draft]:
        """Yield the draft at each place where a step may end. Places where no step ended are not gone through again,
        however many blocks come while there is none."""
        for summary, behind in pairwise(self._waiting[self._drafted :]):
            self._draft.go_on((summary,), max(behind.first, self.consumed.upto), behind.lower)
            self._drafted += 1
            yield self._draft
        last = self._draft.fork()
        last.go_on(tuple(self._waiting[-1:]), max(self.scanned, self.consumed.upto), self.lower, is_last=True)
        yield last

    def _begin_draft(self) -> None:
        self._draft, self._drafted = _Draft(self.consumed), 0

    def _count_blocks_before(self, offset: int) -> int:
        """Return how many of the waiting blocks end there or before, without looking at the others."""
        return bisect_right(self._waiting, offset, key=_END)

    def _make_step(self, blocks: Iterable[BlockEpochSummary], reached: ConsumedFrontier) -> EpochStep:
        remaining_offsets = (
            summary.first
            for summary in self._waiting[: self._count_blocks_before(reached.upto) + 1]
            if _has_remaining(summary, reached)
        )
        position = max(self.position, next(remaining_offsets, reached.upto))
        runs = self._merge_runs(sorted(blocks, key=_FIRST), reached)
        return EpochStep(tuple(runs), self.consumed, position, reached)

    def _merge_runs(self, blocks: Iterable[BlockEpochSummary], reached: ConsumedFrontier) -> Iterator[BlockRun]:
        start, end, size, clean = -1, -1, 0, False
        for summary in blocks:
            is_clean = _is_clean(summary, self.consumed, reached)
            if (end, clean) == (summary.first, is_clean):
                end, size = summary.end, size + summary.size
                continue
            if end >= 0:
                yield BlockRun(start, end, size, clean)
            start, end, size, clean = max(summary.first, self.position), summary.end, summary.size, is_clean
        if end >= 0:
            yield BlockRun(start, end, size, clean)


class _Draft:
    """A step in construction, from one place where it may end to the next."""

    def __init__(self, begun: ConsumedFrontier) -> None:
        self._begun = self.reached = begun
        self._deferred_blocks: list[BlockEpochSummary] = []
        self.blocks: list[BlockEpochSummary] = []
        self.size = self.scans = 0
        self._skips = False

    @property
    def has_effect(self) -> bool:
        return self._skips or bool(self.blocks) or self.reached.lower != self._begun.lower

    def fork(self) -> _Draft:
        """Return a copy that may go on once, as the last."""
        draft = _Draft(self._begun)
        draft.reached, draft.size, draft.scans, draft._skips = self.reached, self.size, self.scans, self._skips
        draft.blocks, draft._deferred_blocks = list(self.blocks), self._deferred_blocks
        return draft

    def go_on(
        self,
        new_blocks: tuple[BlockEpochSummary, ...],
        upto: int,
        lower: LowerFrontier | None,
        *,
        is_last: bool = False,
    ) -> None:
        previous, self.reached = self.reached, self.reached.advanced_to(upto, lower)
        candidates = new_blocks
        if previous.lower != self.reached.lower:
            candidates, self._deferred_blocks = (*self._deferred_blocks, *new_blocks), []
        elif is_last:
            self._deferred_blocks = []  # which the copy shares
        self.scans += len(candidates)
        for summary in candidates:
            if _is_in_step(summary, self._begun, self.reached):
                self.blocks.append(summary)
                self.size += summary.size
            elif summary.end > self._begun.upto and not _has_remaining(summary, self.reached):
                self._skips = True
            else:
                self._deferred_blocks.append(summary)


def _is_in_step(summary: BlockEpochSummary, begun: ConsumedFrontier, reached: ConsumedFrontier) -> bool:
    """Return whether a step from `begun` to `reached` has to read the block."""
    epochs, is_new = summary.epochs, summary.end > begun.upto
    if epochs is None:
        return is_new
    if epochs.has_unset and is_new:
        return True
    if begun.lower == reached.lower:
        return False
    return any(map(begun.needs, epochs.greatest)) and not all(map(reached.needs, epochs.least))


def _has_remaining(summary: BlockEpochSummary, reached: ConsumedFrontier) -> bool:
    """Return whether something in the block is left to be read after a step up to `reached`."""
    if summary.end > reached.upto:
        return True
    return summary.epochs is not None and any(map(reached.needs, summary.epochs.greatest))


def _is_clean(summary: BlockEpochSummary, begun: ConsumedFrontier, reached: ConsumedFrontier) -> bool:
    epochs = summary.epochs
    if summary.first < begun.upto and (epochs is None or epochs.has_unset):
        return False  # of messages without an epoch only new ones match
    return epochs is None or (all(map(begun.needs, epochs.least)) and not any(map(reached.needs, epochs.greatest)))


def _admits(epochs: pa.Array, lower: LowerFrontier | None) -> pa.Array:
    """Return for each epoch (none is null) whether it is at or after one of the frontier's."""
    if lower is None:
        return pa.repeat(pa.scalar(True), len(epochs))
    mask = pa.repeat(pa.scalar(False), len(epochs))
    for least in lower.least:
        comparisons = [
            pc.greater_equal(pc.list_element(epochs, dimension), number) for dimension, number in enumerate(least)
        ]
        mask = pc.or_(mask, functools.reduce(pc.and_, comparisons))
    return mask


def _make_block_summary(
    end: int, count: int, size: int | None, lower: str | None, epochs: str | None
) -> BlockEpochSummary:
    bounds = None if epochs is None else parsed_epoch_bounds.get(epochs)
    return BlockEpochSummary(end - count, end, size or 0, lower_frontier_from_text(lower), bounds)
