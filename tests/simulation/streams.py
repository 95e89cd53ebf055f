"""What befalls streams: rollovers, moved topics, maintenance by the wall clock, and heads that are lowered."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import LendingStatus
from sublet_storage.readers.epoch_steps import BlockEpochSummary
from sublet_storage.spaces.small_block_compaction import BlockToMerge, compute_append_times, find_runs
from tests.simulation.world import Happenings
from tests.support.memory_store.catalogue import MemoryStream

if TYPE_CHECKING:
    from tests.simulation.simulation import Simulation


_MAX_STREAMS = 28
_HOUR_S = 3_600.0
_AT_REST = (LendingStatus.BLOCKED, LendingStatus.FINISHED)


class Rollovers(Happenings):
    """Rollovers without messages, also several in a row and with other widths; a space comes and goes, and its topics
    move with it. Acts in a part of all runs."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the turnover")

    def begin(self, until: float) -> None:
        self._until = until
        if self._random.random() < 0.5:
            self._later()

    def _later(self) -> None:
        self._world.after(self._random.expovariate(1 / 9.0), self._act)

    def _act(self) -> None:
        if self._world.now >= self._until:
            return
        if self._random.random() < 0.15:
            self._move_topics()
        else:
            self._roll_again(self._random.choice(self._streams.live_spaces()).space_id, self._random.randint(1, 4))
        self._later()

    def _roll_again(self, space_id: int, times: int) -> None:
        over = self._world.now >= self._until or space_id in self._streams.dropped
        if len(self._streams.streams) < _MAX_STREAMS and not over:
            self._world.say("operator", f"rolls space {space_id} over, and {times - 1} times more")
            self._streams.rollover(space_id, self._random.choice((None, None, 1, 2, 3, 5)))
            if times > 1 and self._random.random() < 0.7:
                self._roll_again(space_id, times - 1)
            elif times > 1:
                self._world.after(self._random.uniform(0.01, 1.5), lambda: self._roll_again(space_id, times - 1))

    def _move_topics(self) -> None:
        """Create a space for topics of another, or drop it, so that they move back."""
        other = next((space for space in self._streams.live_spaces() if space.name != "default"), None)
        if len(self._streams.streams) >= _MAX_STREAMS:
            return
        if other is not None:
            self._world.say("operator", f"drops space {other}")
            self._streams.drop_space(other.space_id, rolls=(1,))
            self._simulation.publishing.dropped(other.space_id)
        elif len(self._streams.spaces) < 3:
            name = f"other{len(self._streams.spaces)}"
            self._world.say("operator", f"creates space {name}")
            self._streams.add_space(name, "other/#", self._random.randint(1, 3), rolls=(1,))
            self._simulation.publishing.created(len(self._streams.spaces))


class Maintenance(Happenings):
    """What the maintenance leader does by the wall clock, in a part of all runs; in some hours pass between one step
    and the next. It rolls a space over when its generation is old, deletes what is older than the retention unless a
    group holds it back, then the rows of what is gone, and merges small blocks while others read them. Which blocks are
    merged, and what a merged one stores about when its pieces were appended, are the product's own rules. `merged`,
    `taken`: numbers of blocks and generations removed; `deleted`: of generations whose rows are deleted."""

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


class LoweredHeads(Happenings):
    """Streams that lose their last blocks under idle holders, on the same timeline. All that the stream had was
    consumed, and no process is notified. It is part of runs without failover and users' transactions, while there are
    no atomic groups and no queries.

    Nothing is published into the stream before a leader of each group has synced its streams: a loss that no process
    could see cannot be reported. What is published then are other messages, and none may be skipped. Some holders
    notice, and release the stream; others never check. `happened`: how often.
    """

    def __init__(self, simulation: Simulation) -> None:
        super().__init__(simulation, "the lowered heads")
        self._unseen: dict[int, set[int]] = {}
        self.happened = 0

    def begin(self, until: float) -> None:
        self._until = until
        if self._random.random() < 0.3 and not self._simulation.failover.runs and not self._simulation.users.runs:
            self._repeat(self._befall, 6.0)

    def holds(self, stream_id: int) -> bool:
        """Return whether nothing may be published there yet."""
        if not self._unseen.get(stream_id):
            return False
        head = self._streams.streams[stream_id].head
        beyond = {row.group_id for row in self._rows(stream_id) if row.position > head and row.status not in _AT_REST}
        return bool(beyond & self._unseen[stream_id])

    def synced(self, group_id: int) -> None:
        """Record that a leader has synced its group's streams, except rows locked by others."""
        for stream_id, groups in self._unseen.items():
            if (group_id, stream_id) not in self._simulation.store.locked:
                groups.discard(group_id)

    def concerns(self, group_id: int) -> bool:
        """Return whether a stream of the group is in a state that cannot be exported."""
        rows = self._simulation.store.rows(group_id)
        heads = self._streams.streams
        return any(
            row.position > heads[row.stream_id].head or row.status is LendingStatus.BLOCKED
            for row in rows.values()
            if row.stream_id in self._unseen
        )

    def _befall(self) -> None:
        groups = self._simulation.checkers.live_groups()
        has_query = any(agent.checkpoint is not None for agent in self._simulation.living())
        if has_query or any(group.options.atomic for group in groups):
            return
        found = [each for each in self._streams.streams.values() if self._is_quiet(each)]
        if found:
            self._lower(self._random.choice(found))

    def _is_quiet(self, stream: MemoryStream) -> bool:
        rows = self._rows(stream.stream_id)
        held = [row for row in rows if row.status is LendingStatus.HELD and row.agent in self._simulation.agents]
        consumed = all(row.position == stream.head and row.pending_in_doubt is None for row in rows)
        return bool(held) and consumed and not stream.closed and bool(stream.block_summaries)

    def _rows(self, stream_id: int) -> list[LendingRow]:
        """Return the stream's rows of all existing groups."""
        rows = (self._simulation.store.rows(group.group_id) for group in self._simulation.checkers.live_groups())
        return [own[stream_id] for own in rows if stream_id in own]

    def _lower(self, stream: MemoryStream) -> None:
        head = self._random.choice([0, *(each.end for each in stream.block_summaries[:-1])])
        self._world.say("database", f"loses the end of stream {stream.stream_id}: it ends at {head}, not {stream.head}")
        self.happened += 1
        self._unseen[stream.stream_id] = {row.group_id for row in self._rows(stream.stream_id)}
        self._streams.lower_head(stream.stream_id, head)
        self._simulation.journal.lower_head(stream.stream_id, head)
        del self._simulation.publishing.epochs[stream.stream_id][head:]
        self._simulation.checkers.deliveries.head_lowered(stream.stream_id, head)
        self._simulation.checkers.record.head_lowered(stream.stream_id, head)
