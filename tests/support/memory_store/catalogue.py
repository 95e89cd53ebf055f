"""A stream catalogue in memory: spaces, generations and streams without messages, for the twin of the group tables.

It knows what groups depend on: ids that only grow, heads, when what was appended, which streams are closed, whose
parents they are, what retention has taken, and where a reset sets streams. Rollovers are atomic, as the database's are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from msgspec.structs import replace

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, UpperFrontier
from sublet_protocol.domain.errors import NotFound
from sublet_protocol.domain.subscriptions import StartingPosition
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.model.lending_row import LendingRow, StreamFacts
from sublet_storage.groups.model.records import LendingStatus
from sublet_storage.log.block_encoder import BlockEpochRange
from sublet_storage.readers.epoch_steps import BlockEpochSummaries, BlockEpochSummary
from sublet_storage.spaces.routing import GenerationTopicFilters, Space, has_moved_topics, ranges_overlap, split_ring


@dataclass(slots=True)
class MemoryGeneration:
    """All streams of a space opened together."""

    generation_id: int
    space_id: int
    ordinal: int
    filter: TopicFilter
    stream_ids: list[int] = field(default_factory=list)
    closed: bool = False
    gone: bool = False
    deleted: bool = False
    """Its rows, and those of its streams, are: only who looks from outside still finds them here."""


@dataclass(slots=True)
class MemoryStream:
    """An ordered sequence of messages, of which only the count is kept; `blocks` are (end offset, when appended).

    `block_summaries` says what the blocks have of epochs.
    """

    stream_id: int
    generation: MemoryGeneration
    hash_from: int
    hash_to: int
    parents: tuple[int, ...]
    head: int = 0
    closed: bool = False
    blocks: list[tuple[int, int]] = field(default_factory=list)
    block_summaries: list[BlockEpochSummary] = field(default_factory=list)

    def facts(self, lower: LowerFrontier | None) -> StreamFacts:
        place = self.stream_id, self.generation.generation_id, self.hash_from, self.hash_to
        return StreamFacts(*place, self.head, self.closed, self.generation.gone, lower)

    def position_of(self, start: StartingPosition) -> int:
        """Where a group that starts so begins in this stream."""
        match start.policy:
            case "latest":
                return self.head
            case "earliest":
                return 0
            case "offset":
                return min(start.value, self.head)
            case "time":
                begins = (0, *(end for end, _ in self.blocks))
                since = (begin for begin, (_, at) in zip(begins, self.blocks, strict=False) if at >= start.value)
                return next(since, self.head)
            case _:
                assert_never(start.policy)


class MemoryCatalogue:
    """Spaces and their streams; ids start at 1 and are given in the order of the calls."""

    def __init__(self) -> None:
        self.spaces: dict[int, Space] = {}
        self.filters: dict[int, set[TopicFilter]] = {}
        """{space_id: every filter that it has had}."""
        self.dropped: set[int] = set()
        self.generations: dict[int, MemoryGeneration] = {}
        self.streams: dict[int, MemoryStream] = {}
        self.lowers: dict[int, LowerFrontier] = {}
        """{space_id: what may still be published}; spaces that are not in it have no epochs."""
        self.lost_uppers: dict[int, UpperFrontier] = {}
        """{space_id: the greatest epochs in streams whose rows are deleted}."""

    def add_space(
        self, name: str = "default", filter: str = "#", shards: int = 1, *, rolls: Iterable[int] = ()
    ) -> tuple[int, ...]:
        """Create a space and its first streams; the spaces in `rolls`, which lose topics to it, roll over with it."""
        space = Space(len(self.spaces) + 1, name, TopicFilter(filter), shards)
        self.spaces[space.space_id] = space
        self.filters[space.space_id] = {space.filter}
        rolled = {space_id: self.spaces[space_id].shards for space_id in rolls}
        return self._turn({**rolled, space.space_id: shards}, space.space_id)

    def drop_space(self, space_id: int, *, rolls: Iterable[int] = ()) -> tuple[int, ...]:
        """Close the space's streams for good; the spaces in `rolls`, which get its topics, roll over with it."""
        self.dropped.add(space_id)
        return self._turn({other: self.spaces[other].shards for other in rolls}, space_id)

    def alter_space(self, space_id: int, filter: str, *, rolls: Iterable[int] = ()) -> tuple[int, ...]:
        """Give the space another filter, in a new generation; the spaces in `rolls` roll over with it."""
        self.spaces[space_id] = replace(self.spaces[space_id], filter=TopicFilter(filter))
        self.filters[space_id].add(TopicFilter(filter))
        return self._turn({other: self.spaces[other].shards for other in (*rolls, space_id)}, space_id)

    def rollover(self, space_id: int, shards: int | None = None) -> tuple[int, ...]:
        """Close the space's open streams and open the next generation, of `shards` streams; the new stream ids."""
        return self._turn({space_id: self.spaces[space_id].shards if shards is None else shards}, space_id)

    def lower_head(self, stream_id: int, head: int) -> None:
        """The stream has lost its last blocks, behind `head`, where a block ends, and nobody is notified."""
        stream = self.streams[stream_id]
        stream.blocks = [(end, at) for end, at in stream.blocks if end <= head]
        stream.block_summaries = [each for each in stream.block_summaries if each.end <= head]
        stream.head = head

    def append(self, stream_id: int, count: int = 1, at_us: int = 0, epochs: BlockEpochRange | None = None) -> int:
        """Advance the head of an open stream, by a block of that time and these epochs; the head it then has.

        Raises `ValueError` where it is closed.
        """
        stream = self.streams[stream_id]
        if stream.closed:
            raise ValueError(f"stream {stream_id} is closed at {stream.head}: append to its children")
        lower = self.lowers.get(stream.generation.space_id)
        stream.block_summaries.append(BlockEpochSummary(stream.head, stream.head + count, count, lower, epochs))
        stream.head += count
        stream.blocks.append((stream.head, at_us))
        return stream.head

    def expire_generation(self, generation_id: int) -> None:
        """Retention takes a closed generation. Raises `ValueError` where it is open."""
        generation = self.generations[generation_id]
        if not generation.closed:
            raise ValueError(f"generation {generation_id} is open: roll its space over first")
        generation.gone = True

    def delete_generation(self, generation_id: int) -> None:
        """Delete the rows of a closed generation: what descends from its streams gets their parents."""
        generation = self.generations[generation_id]
        generation.gone = generation.deleted = True
        streams = {stream_id: self.streams[stream_id] for stream_id in generation.stream_ids}
        for child in self.streams.values():
            if streams.keys() & set(child.parents):
                above = {up for each in child.parents for up in (streams[each].parents if each in streams else (each,))}
                child.parents = tuple(sorted(up for up in above if _overlap(self.streams[up], child)))
        begun = [epoch for stream in streams.values() for epoch in greatest_epochs(stream, stream.head)]
        lost = self.lost_uppers.get(generation.space_id, UpperFrontier())
        self.lost_uppers[generation.space_id] = lost.join(UpperFrontier.from_epochs(begun))

    def facts(self, stream_id: int) -> StreamFacts | None:
        stream = self.streams.get(stream_id)
        return stream.facts(self.lowers.get(stream.generation.space_id)) if stream else None

    def block_summaries(self, stream_id: int, offset: int) -> BlockEpochSummaries:
        """What the blocks behind an offset have of epochs, all of them, as the log would say it now."""
        stream = self.streams[stream_id]
        found = tuple(mark for mark in stream.block_summaries if mark.end > offset)
        space_id = stream.generation.space_id
        return BlockEpochSummaries(found, stream.head, stream.closed, self.lowers.get(space_id), space_id)

    def open_streams(self, space_id: int) -> tuple[int, ...]:
        """The appendable streams of a space, in the order of their ids."""
        return tuple(s.stream_id for s in self._open((space_id,)))

    def live_spaces(self) -> tuple[Space, ...]:
        return tuple(space for space in self.spaces.values() if space.space_id not in self.dropped)

    def spaces_that_matched(self, filter: TopicFilter) -> set[int]:
        """The live spaces that may have had messages for the filter at any time."""
        live = {space.space_id for space in self.live_spaces()}
        return {space_id for space_id in live if any(one.intersects(filter) for one in self.filters[space_id])}

    def generation_filters(self) -> GenerationTopicFilters:
        """What the generations there are were filled under."""
        generations = [generation for generation in self.generations.values() if not generation.deleted]
        return GenerationTopicFilters(
            filters=tuple(dict.fromkeys(generation.filter for generation in generations)),
            open=frozenset(generation.filter for generation in generations if not generation.closed),
            newest_generation_id=max(self.generations, default=0),
        )

    def _open(self, space_ids: Iterable[int]) -> list[MemoryStream]:
        wanted = set(space_ids)
        return [s for s in self.streams.values() if not s.closed and s.generation.space_id in wanted]

    def _turn(self, opening: Mapping[int, int], changed: int) -> tuple[int, ...]:
        """Close the streams of these spaces and of the `changed` one, and open `{space_id: shards}`, in one step."""
        closed = self._open({*opening, changed})
        for stream in closed:
            stream.closed = stream.generation.closed = True
        return tuple(
            stream_id
            for space_id, shards in opening.items()
            for stream_id in self._begin(space_id, shards, closed, changed)
        )

    def _space_of(self, stream: MemoryStream) -> Space:
        """As it was when the stream was opened."""
        return replace(self.spaces[stream.generation.space_id], filter=stream.generation.filter)

    def _begin(self, space_id: int, shards: int, closed: list[MemoryStream], changed: int) -> list[int]:
        ordinal = sum(generation.space_id == space_id for generation in self.generations.values())
        generation = MemoryGeneration(len(self.generations) + 1, space_id, ordinal, self.spaces[space_id].filter)
        self.generations[generation.generation_id] = generation
        for start, end in split_ring(shards):
            parents = tuple(
                each.stream_id
                for each in closed
                if ranges_overlap((start, end), (each.hash_from, each.hash_to))
                and has_moved_topics(self._space_of(each), self.spaces[space_id], changed)
            )
            stream = MemoryStream(len(self.streams) + 1, generation, start, end, parents)
            self.streams[stream.stream_id] = stream
            generation.stream_ids.append(stream.stream_id)
        return generation.stream_ids


def greatest_epochs(stream: MemoryStream, position: int) -> list[Epoch]:
    """The greatest epochs that had begun in a stream before that position."""
    return [
        epoch
        for mark in stream.block_summaries
        if mark.first < position and mark.epochs
        for epoch in mark.epochs.greatest
    ]


def _overlap(one: MemoryStream, other: MemoryStream) -> bool:
    return ranges_overlap((one.hash_from, one.hash_to), (other.hash_from, other.hash_to))


def plan_reset(
    catalogue: MemoryCatalogue,
    wanted: Mapping[TopicFilter, bool],
    rows: Mapping[int, LendingRow],
    after_generation: int,
    target: ResetTarget,
    streams: Collection[int],
) -> dict[int, int]:
    """Return {stream: new position}, of all streams that the group has or may have, or of `streams`, as
    `sublet_storage.groups.admin.reset_transaction.plan_reset` has it. Raise `NotFound` for one of these that it does
    not have.

    `wanted`: the filters of generations with messages for the group, and whether those still open have some.
    `after_generation`: the last generation of which the group has its rows. A reset to epochs, or to offsets that are
    given, is not planned here.
    """
    known, moves = set[int](), dict[int, int]()
    for stream in catalogue.streams.values():
        row, generation = rows.get(stream.stream_id), stream.generation
        is_later = generation.generation_id > after_generation
        has_messages = generation.filter in wanted and (stream.closed or wanted[generation.filter])
        is_there = not generation.deleted and (not generation.gone or is_later)
        is_shadowed = (
            row is not None
            and row.status is LendingStatus.FINISHED
            and (not stream.closed or row.position < stream.head)
        )
        if (row is None and not (is_there and has_messages)) or is_shadowed:
            continue
        known.add(stream.stream_id)
        position = row.position if row is not None else 0 if is_later else None
        after = stream.head if generation.gone else _position_at(target, stream, position)
        would_be_read = is_later and stream.head > 0
        is_passed = row is None and stream.closed and after == stream.head and not would_be_read
        if after is not None and not is_passed and (not streams or stream.stream_id in streams):
            moves[stream.stream_id] = after
    if unknown := set(streams) - known:
        raise NotFound(f"stream {min(unknown)} is none of the group's")
    return moves


def _position_at(target: ResetTarget, stream: MemoryStream, position: int | None) -> int | None:
    match target.kind:
        case "current":
            return position
        case "shift":
            return None if position is None else min(max(position + target.value, 0), stream.head)
        case "earliest" | "latest" | "offset" | "time" as policy:
            return stream.position_of(StartingPosition(policy, target.value))
        case _:
            raise AssertionError(target)
