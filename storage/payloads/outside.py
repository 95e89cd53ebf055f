"""Reading the payloads of blocks that lie outside: checked against the name, in the order of the blocks.

The row says where, and how many bytes; the name says which block, and the digest. What does not fit is an error that
says so: a block is never passed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from protocol.errors import PayloadDamaged
from storage.payloads.place import Place, digest, located, shown
from storage.payloads.stores import Missing, ObjectRefused, Payload, store
from storage.payloads.together import together

Row = tuple[Any, ...]
"""end_offset, count, codec, topics, payload, where. The last is null for a payload that is inside, else [uri, bytes,
place of its space, ...]."""

SILENCE_S: Final = 30.0
"""A place of which nothing comes for so long is away: whoever reads has other streams to see to."""

_REMEDY = (
    "Nothing of it is skipped: put the object back from a copy of the place; what cannot be put back ends with its "
    "generation, or a group goes past it with `sublet groups reset`"
)


def fetched(generation_id: int, stream_id: int, rows: list[Row]) -> list[Row]:
    """The rows with all payloads there. Raises `PayloadUnavailable`, `PayloadDamaged`."""
    by_place: dict[Place | None, list[int]] = {}
    for index, row in enumerate(rows):
        if row[5] is not None:
            found = located(row[5][0], row[5][2:])
            by_place.setdefault(found and found[0], []).append(index)
    if not by_place:
        return rows
    found_at: dict[int, Payload | Exception] = {}
    for place, indexes in by_place.items():
        found_at |= zip(
            indexes, _fetch(generation_id, stream_id, place, [rows[index] for index in indexes]), strict=True
        )
    whole = []
    for index, row in enumerate(rows):
        payload = found_at.get(index, row[4])
        if isinstance(payload, Exception):
            raise payload
        whole.append((*row[:4], payload, row[5]))
    return whole


def _fetch(generation_id: int, stream_id: int, place: Place | None, rows: list[Row]) -> list[Payload | Exception]:
    """Payloads, or what hinders, of what lies in the one place, or in none."""

    def one(row: Row) -> Payload:
        uri, size, *places = row[5]
        return fetch(generation_id, stream_id, row[0], uri, int(size), places)

    try:
        return together("nowhere" if place is None else f"{place.prefix} to read", one, rows, SILENCE_S)
    except TimeoutError:
        assert place is not None, "what is nowhere is not waited for"
        return [store(place).silent(SILENCE_S)] * len(rows)


def fetch(generation_id: int, stream_id: int, end_offset: int, uri: str, size: int, places: Sequence[str]) -> Payload:
    """The payload of one block. Raises `PayloadUnavailable`, `PayloadDamaged`."""

    def damaged(why: str) -> PayloadDamaged:
        return PayloadDamaged(
            f"stream {stream_id}: the payload of the block that ends at offset {end_offset} lies at {uri!r}, and {why}."
            f" {_REMEDY}."
        )

    found = located(uri, places)
    if found is None:
        raise damaged(
            f"that is not in a place of its space ({', '.join(map(shown, places)) or 'it has none'}): it is not read"
        )
    place, name = found
    if (name.generation_id, name.stream_id, name.end_offset) != (generation_id, stream_id, end_offset):
        raise damaged("that is the name of another block's: it is not read")
    try:
        payload = store(place).get(name.text, size + 1)
    except Missing:
        raise damaged("there is nothing") from None
    except ObjectRefused as refused:
        if refused.is_for_good:
            raise damaged(f"it cannot be read: {refused.__cause__}") from None
        raise
    if memoryview(payload).nbytes != size:
        raise damaged(f"it should have {size} bytes and has {_sized(payload, size)}")
    if digest(payload) != name.digest:
        raise damaged("its bytes are not those that were put there")
    return payload


def _sized(payload: Payload, size: int) -> str:
    found = memoryview(payload).nbytes
    return "more" if found > size else str(found)
