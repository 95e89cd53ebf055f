"""Reads payloads outside of Postgres, checked against their names, in block order.

The row has the location and the size; the name has the block and the digest. A mismatch raises: a block is never passed
over, and what lies before it is read all the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from sublet_protocol.domain.errors import PayloadDamaged, PayloadObjectUnreadable, PayloadUnavailable
from sublet_storage.objects.location import (
    PayloadObjectName,
    PayloadStoreLocation,
    compute_digest,
    format_location,
    locate_object,
)
from sublet_storage.objects.object_stores import ObjectUnusable, Payload, PayloadObjectNotFound, get_store
from sublet_storage.objects.parallel_calls import TO_READ, run_parallel

Row = tuple[Any, ...]
"""end_offset, count, codec, topics, payload, where. The last is null for a payload that is inside, else [uri, bytes,
location of its space, ...]."""

_PUT_BACK = (
    "Nothing of it is given out: put the object back from a copy of the payload location; what cannot be put back ends "
    "with its generation, or a group goes past it with `sublet groups reset`"
)
_READ = "It is tried again. See to this object, and to who may read it"


def attach_payloads(generation_id: int, stream_id: int, rows: list[Row]) -> list[Row]:
    """Return the rows with their payloads, up to before the first whose payload cannot be read.

    Raise the error of the very first: `PayloadUnavailable`, `PayloadObjectUnreadable`, `PayloadDamaged`.
    """
    if all(row[5] is None for row in rows):
        return rows
    entire: list[Row] = []
    for row, payload in zip(rows, read_payloads(generation_id, stream_id, rows), strict=True):
        if isinstance(payload, Exception):
            if not entire:
                raise payload
            break
        entire.append((*row[:4], payload, *row[5:]))
    return entire


def read_payloads(generation_id: int, stream_id: int, rows: list[Row]) -> list[Payload | Exception | None]:
    """Return the payload of each row, or its error; null if a row has none."""
    payloads: list[Payload | Exception | None] = [row[4] for row in rows]
    by_location: dict[PayloadStoreLocation, list[tuple[int, PayloadObjectName]]] = {}
    for index, row in enumerate(rows):
        if row[5] is None:
            continue
        uri, _, *locations = row[5]
        reference = locate_object(uri, locations)
        if reference is None:
            listed = ", ".join(map(format_location, locations)) or "it has none"
            payloads[index] = _damaged_error(
                stream_id, row, f"that is not in a payload location of its space ({listed}): it is not read"
            )
        else:
            by_location.setdefault(reference[0], []).append((index, reference[1]))
    for location, references in by_location.items():
        outcomes = _fetch(generation_id, stream_id, location, [(rows[index], name) for index, name in references])
        for (index, _), outcome in zip(references, outcomes, strict=True):
            payloads[index] = outcome
    return payloads


def _fetch(
    generation_id: int, stream_id: int, location: PayloadStoreLocation, references: list[tuple[Row, PayloadObjectName]]
) -> Sequence[Payload | Exception]:
    """Return the payloads of one location, or the errors in their place."""
    try:
        return run_parallel(
            get_store(location), TO_READ, partial(_fetch_one, generation_id, stream_id, location), references
        )
    except PayloadUnavailable as silent:
        return [silent] * len(references)


def _fetch_one(
    generation_id: int, stream_id: int, location: PayloadStoreLocation, reference: tuple[Row, PayloadObjectName]
) -> Payload:
    """Return the payload of one block. Raise as `attach_payloads` does."""
    row, name = reference
    size = int(row[5][1])
    if (name.generation_id, name.stream_id, name.end_offset) != (generation_id, stream_id, row[0]):
        raise _damaged_error(stream_id, row, "that is the name of another block's: it is not read")
    try:
        payload = get_store(location).get(name.text, size + 1)
    except PayloadObjectNotFound:
        raise _damaged_error(stream_id, row, "there is nothing") from None
    except ObjectUnusable as unusable:
        detail = f"it cannot be read: {unusable.__cause__}"
        if unusable.is_permanent:
            raise _damaged_error(stream_id, row, detail) from None
        begin = row[0] - row[1]
        raise PayloadObjectUnreadable(
            f"stream {stream_id}: the block that begins at offset {begin} and ends before offset {row[0]} lies at "
            f"{row[5][0]!r}, and {detail}. {_READ}."
        ) from None
    if memoryview(payload).nbytes != size:
        raise _damaged_error(stream_id, row, f"it should have {size} bytes and has {_describe_size(payload, size)}")
    if compute_digest(payload) != name.digest:
        raise _damaged_error(stream_id, row, "its bytes are not those that were put there")
    return payload


def _damaged_error(stream_id: int, row: Row, detail: str) -> PayloadDamaged:
    return PayloadDamaged(stream_id, (row[0] - row[1], row[0]), f"lies at {row[5][0]!r}, and {detail}. {_PUT_BACK}.")


def _describe_size(payload: Payload, size: int) -> str:
    received_bytes = memoryview(payload).nbytes
    return "more" if received_bytes > size else str(received_bytes)
