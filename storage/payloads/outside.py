"""Reading the payloads of blocks that lie outside: checked against the name, in the order of the blocks.

The row says where, and how many bytes; the name says which block, and the digest. What does not fit is an error that
says so: a block is never passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from protocol.errors import PayloadDamaged
from storage.payloads.place import digest, located
from storage.payloads.stores import Missing, Payload, store
from storage.payloads.together import together

Row = tuple[Any, ...]
"""end_offset, count, codec, topics, payload, where. The last is null for a payload that is inside, else [uri, bytes,
place of its space, ...]."""

_REMEDY = (
    "Nothing of it is skipped: put the object back from a copy of the place; what cannot be put back ends with its "
    "generation, or a group goes past it with `sublet groups reset`"
)


def fetched(generation_id: int, stream_id: int, rows: list[Row]) -> list[Row]:
    """The rows with all payloads there. Raises `PayloadUnavailable`, `PayloadDamaged`."""
    outside = [row for row in rows if row[5] is not None]
    if not outside:
        return rows
    found = iter(together(partial(_fetch, generation_id, stream_id), outside))
    return [row if row[5] is None else (*row[:4], next(found), row[5]) for row in rows]


def _fetch(generation_id: int, stream_id: int, row: Row) -> Payload:
    uri, size, *places = row[5]
    return fetch(generation_id, stream_id, row[0], uri, int(size), places)


def fetch(generation_id: int, stream_id: int, end_offset: int, uri: str, size: int, places: Sequence[str]) -> Payload:
    """The payload of one block. Raises `PayloadUnavailable`, `PayloadDamaged`."""

    def damaged(why: str) -> PayloadDamaged:
        return PayloadDamaged(
            f"stream {stream_id}: the payload of the block that ends at offset {end_offset} lies at {uri!r}, and {why}."
            f" {_REMEDY}."
        )

    found = located(uri, places)
    if found is None:
        raise damaged(f"that is not in a place of its space ({', '.join(places) or 'it has none'}): it is not read")
    place, name = found
    if (name.generation_id, name.stream_id, name.end_offset) != (generation_id, stream_id, end_offset):
        raise damaged("that is the name of another block's: it is not read")
    try:
        payload = store(place).get(name.text, size + 1)
    except Missing:
        raise damaged("there is nothing") from None
    if memoryview(payload).nbytes != size:
        raise damaged(f"it should have {size} bytes and has {_sized(payload, size)}")
    if digest(payload) != name.digest:
        raise damaged("its bytes are not those that were put there")
    return payload


def _sized(payload: Payload, size: int) -> str:
    found = memoryview(payload).nbytes
    return "more" if found > size else str(found)
