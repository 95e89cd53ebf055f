"""What the maintenance leader does by the wall clock: rollover, retention, deletion of past rows, compaction.

It rolls a space over when its generation is old, deletes what is older than the retention unless a group holds it back,
then the rows of what is gone, and merges small blocks while others read them. It has its own random generator; in some
runs hours pass between one step and the next.

Which blocks are merged, and what a merged one stores about when its pieces were appended, are the product's own rules.
"""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from sublet_storage.readers.epoch_steps import BlockEpochSummary
from sublet_storage.spaces.small_block_compaction import BlockToMerge, compute_append_times, find_runs
from tests.simulation.world import Happenings

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation

_HOUR_S = 3_600.0
_MAX_STREAMS = 28


class Maintenance(Happenings):
    """Runs in a part of all runs. `merged`, `taken`: numbers of blocks and generations removed; `deleted`: of
    generations whose rows are deleted."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the maintenance")
        self._deleting = Random(f"the rows that maintenance deletes of {simulation.seed}")
        self._hours = self._random.choice((0.0, 1.0, 3.0))
        self._retention_s = self._random.choice((None, 2 * _HOUR_S, 12 * _HOUR_S)) if self._hours else None
        self._since: dict[tuple[int, bool], int] = {}
        self.merged = self.taken = self.deleted = 0

    def begin(self, until: float) -> None:
        self._until = until
        if self._random.random() < 0.6:
            self._repeat(self._befall, 3.0, first_s=0.0)

    def _befall(self) -> None:
        self._world.let_hours_pass(self._random.uniform(0.0, self._hours))
        self._roll_over()
        self._retain()
        self._delete()
        for stream_id in self._streams.streams:
            if self._random.random() < 0.3:
                self._compact(stream_id)

    def _age_s(self, generation_id: int, closed: bool) -> float:
        """Return for how long it is known to be open, or closed."""
        now_us = self._world.wall_us()
        return (now_us - self._since.setdefault((generation_id, closed), now_us)) / 1_000_000

    def _roll_over(self) -> None:
        """Roll over every hour, if there are messages."""
        for generation in tuple(self._streams.generations.values()):
            if generation.closed or len(self._streams.streams) >= _MAX_STREAMS:
                continue
            has_messages = any(self._streams.streams[stream_id].head for stream_id in generation.stream_ids)
            if self._age_s(generation.generation_id, closed=False) >= _HOUR_S and has_messages:
                self._world.say("maintenance", f"rolls space {generation.space_id} over")
                self._streams.rollover(generation.space_id)

    def _retain(self) -> None:
        closed = [g.generation_id for g in self._streams.generations.values() if g.closed and not g.gone]
        old = [
            each
            for each in closed
            if self._retention_s is not None and self._age_s(each, closed=True) >= self._retention_s
        ]
        for generation_id in old:
            if not self._simulation.store.holds_back(generation_id) and not self._is_atomic_behind(generation_id):
                self._world.say("maintenance", f"takes generation {generation_id}")
                self._streams.expire_generation(generation_id)
                self._simulation.checkers.retired(generation_id)
                self.taken += 1

    def _delete(self) -> None:
        """Delete the rows of what is gone, or never had a message, and that every group is past."""
        for generation in tuple(self._streams.generations.values()):
            is_empty = not any(self._streams.streams[stream_id].head for stream_id in generation.stream_ids)
            ended = not generation.deleted and (generation.gone or (generation.closed and is_empty))
            if not ended or self._deleting.random() < 0.7:
                continue
            if self._simulation.store.delete_past(generation.generation_id):
                self._world.say("maintenance", f"deletes the rows of generation {generation.generation_id}")
                self.deleted += 1

    def _is_atomic_behind(self, generation_id: int) -> bool:
        """Return whether an atomic group is behind: here retention waits for it, as it would have to be reset as a
        whole."""
        checkers = self._simulation.checkers
        return any(life.group.options.atomic and checkers.unread(life, generation_id) for life in checkers.lives.live())

    def _compact(self, stream_id: int) -> None:
        """Merge blocks into blocks of a few messages or of many."""
        stream, most = self._streams.streams[stream_id], self._random.choice((8, 30, 1_000))
        if stream.generation.gone:
            return
        rows = [
            BlockToMerge(m.end, m.end - m.first, m.size, f"{m.lower}|{m.epochs}".encode())
            for m in stream.block_summaries
        ]
        for run in find_runs(rows, most, most):
            begin, end = run[0].end_offset - run[0].count, run[-1].end_offset
            old = [mark for mark in stream.block_summaries if begin <= mark.first < end]
            starts, times = compute_append_times([(m.end - m.first, *self._appended(stream.blocks, m)) for m in old])
            ends = [*(begin + start for start in starts[1:]), end]
            place = stream.block_summaries.index(old[0])
            entire = BlockEpochSummary(begin, end, sum(mark.size for mark in old), old[0].lower, old[0].epochs)
            stream.block_summaries[place : place + len(old)] = [entire]
            outside = [[b for b in stream.blocks if b[0] <= begin], [b for b in stream.blocks if b[0] > end]]
            stream.blocks = [*outside[0], *zip(ends, times, strict=True), *outside[1]]
            self.merged += len(run) - 1
            self._world.say("maintenance", f"merges [{begin}, {end}) of stream {stream_id}")
        self._simulation.checkers.compacted(stream_id)

    @staticmethod
    def _appended(blocks: list[tuple[int, int]], mark: BlockEpochSummary) -> tuple[int, list[int], list[int]]:
        """Return when a block was appended; for a merged one where its pieces begin and when they were appended."""
        own = [(end, at_us) for end, at_us in blocks if mark.first < end <= mark.end]
        starts = [0, *(end - mark.first for end, _ in own[:-1])]
        return own[-1][1], starts, [at_us for _, at_us in own]
