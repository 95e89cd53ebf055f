"""Which streams the messages of a pending piece go to."""

from __future__ import annotations

import contextlib

import pyarrow as pa

from sublet_protocol.domain.errors import SubletError
from sublet_storage.producer.batches.pending_block import PendingArrowBatch, count_slice_bytes
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable, pick_rows


def route_piece(routes: PublisherRoutingTable, piece: PendingArrowBatch) -> list[tuple[int, PendingArrowBatch]]:
    """Return the piece by stream."""
    routed = routes.partition_rows(piece.batch, piece.rows)
    if len(routed) == 1:
        return [(routed[0][0], piece)]
    sizes = count_slice_bytes([batch for _, batch, _ in routed])
    return [
        (stream_id, PendingArrowBatch(batch, rows, piece.ticket, nbytes))
        for (stream_id, batch, rows), nbytes in zip(routed, sizes, strict=True)
    ]


def reroute_piece(
    routes: PublisherRoutingTable, anywhere: PublisherRoutingTable, piece: PendingArrowBatch
) -> tuple[list[tuple[int, PendingArrowBatch]], list[tuple[PendingArrowBatch, SubletError]]]:
    """Return the piece by stream, and what has none, with the first reason: messages in epochs go by `routes`, others
    `anywhere`."""
    in_epoch = piece.batch["epoch"].is_valid()
    with contextlib.suppress(SubletError):
        return route_piece(routes if in_epoch.true_count else anywhere, piece), []
    kinds = list(zip(piece.batch["topic"].to_pylist(), in_epoch.to_pylist(), strict=True))
    errors = {(topic, strict): _find_error(routes if strict else anywhere, topic) for topic, strict in set(kinds)}
    failed = {number: error for number, kind in enumerate(kinds) if (error := errors[kind]) is not None}
    routable = [number for number in range(piece.count) if number not in failed]
    parts = route_piece(anywhere, _pick(piece, routable)) if routable else []
    return parts, [(_pick(piece, [*failed]), next(iter(failed.values())))] if failed else []


def _find_error(routes: PublisherRoutingTable, topic: str) -> SubletError | None:
    try:
        routes.find_stream(topic, None)
    except SubletError as error:
        return error
    return None


def _pick(piece: PendingArrowBatch, numbers: list[int]) -> PendingArrowBatch:
    order = pa.array(numbers)
    return PendingArrowBatch(piece.batch.take(order), pick_rows(piece.rows, order), piece.ticket)
