"""Where a reset sets the streams of a group, as `sublet_storage.groups.admin.reset_transaction.plan_reset` has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from sublet_protocol.domain.errors import NotFound
from sublet_protocol.domain.subscriptions import StartingPosition
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import LendingStatus
from tests.support.memory_store.catalogue import MemoryCatalogue, MemoryStream


def plan_reset(
    catalogue: MemoryCatalogue,
    wanted: Mapping[TopicFilter, bool],
    rows: Mapping[int, LendingRow],
    after_generation: int,
    target: ResetTarget,
    streams: Collection[int],
) -> dict[int, int]:
    """Return {stream: new position}, of all streams that the group has or may have, or of `streams`. Raise `NotFound`
    for one of these that it does not have.

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
        is_shadowed = row is not None and row.status is LendingStatus.FINISHED and not stream.closed
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
