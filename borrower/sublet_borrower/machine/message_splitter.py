"""Splits a borrower's reports and requests into messages within the limits of one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.limits import MAX_ITEMS, MAX_STREAMS
from sublet_protocol.messages.borrower_leader import HeldGrant, StreamProgress

MAX_PART_BYTES = 512 * 1024
"""Approximate maximum size of one part: half of what a node reads at once."""

STREAM_BYTES, NUMBER_BYTES = 120, 11
"""The most that the numbers of one stream, and one number of an epoch, take on the wire, in bytes."""

_Stream = TypeVar("_Stream", HeldGrant, StreamProgress)


def split_into_parts(streams: Iterable[_Stream]) -> Iterator[tuple[_Stream, ...]]:
    """Yield the same, in order, in as few parts as they fit into."""
    part, size, items = list[_Stream](), 0, 0
    for stream in streams:
        frontiers = _frontiers(stream)
        more_items = 1 + sum(max(len(epochs) - 1, 0) for epochs in frontiers)
        more = STREAM_BYTES + sum(len(epochs) * (len(epochs[0]) + 1) * NUMBER_BYTES for epochs in frontiers if epochs)
        if isinstance(stream, StreamProgress):
            more += len(stream.read_error.encode())
        is_full = size + more > MAX_PART_BYTES or items + more_items > MAX_ITEMS or len(part) == MAX_STREAMS
        if part and is_full:
            yield tuple(part)
            part, size, items = [], 0, 0
        part.append(stream)
        size, items = size + more, items + more_items
    if part:
        yield tuple(part)


def _frontiers(stream: HeldGrant | StreamProgress) -> list[tuple[tuple[int, ...], ...]]:
    doubt = stream.in_doubt if isinstance(stream, StreamProgress) else None
    consumed = (stream.consumed, None if doubt is None else doubt.consumed)
    return [each.lower.least for each in consumed if isinstance(each, ConsumedFrontier) and each.lower is not None]
