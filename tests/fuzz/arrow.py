"""Real blocks, published batches and pages, mutated, and decoded by the one decoder; what comes out is used.

An execution is made from (seed, number) alone. Half of them change bytes anywhere; the others change the content of a
buffer and leave envelope and compression right, which bytes changed at random hardly ever do.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pyarrow as pa

from sublet_borrower.node_client.feed_reader import decode_messages
from sublet_leader.feed.batch_decoder import decode_batch
from sublet_leader.feed.history_and_follow import encode as encode_page
from sublet_protocol.domain.errors import PoisonBlock, UsageError, ValueTooLarge
from sublet_protocol.domain.topics import TopicFilter, check_topic
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_storage.log import arrow_batch_header as header
from sublet_storage.log.arrow_batch_decoder import decode_block
from sublet_storage.log.block_encoder import add_position_columns, encode, filter_by_topic, pack
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.log.fast_small_block_decoder import decode_small_blocks

BODY_LENGTH = 3
"""Where that field stands in the table `Message` of Arrow's Message.fbs."""

SHOWN = 500
"""Messages at either end of a batch that are looked at one by one."""

NUMBERS = (0, 1, -1, 2, 7, 127, 255, 1 << 15, 1 << 30, (1 << 31) - 1, -(1 << 31), 1 << 40, (1 << 63) - 1, -(1 << 63))


@dataclass(frozen=True, slots=True)
class Case:
    """Bytes, and how they are decoded: as a `block` with this codec and number of messages, `published`, or `page`."""

    kind: str
    payload: bytes
    codec: int = 0
    count: int = 0
    compression: str | None = None


def execute(seed: int, number: int) -> bool:
    """Return whether what came of this execution was decoded; if not, it was refused as it should be. Raises whatever
    else happens."""
    case = case_of(seed, number)
    try:
        found = _DECODERS[case.kind](case)
    except (PoisonBlock, MalformedMessage, UsageError) as refused:
        if not str(refused).isprintable():
            raise ValueError("a refusal that cannot be printed") from refused
        return False
    use(found)
    if case.kind != "page":
        compact(found)
    return True


def case_of(seed: int, number: int) -> Case:
    """Return what is decoded: a real one in each hundredth."""
    dice = random.Random(f"{seed}/{number}")
    case = dice.choice(corpus())
    if number % 100 == 0:
        return case
    mutate = dice.choice((_anywhere, _anywhere, _in_a_buffer, _in_a_buffer, _in_the_header))
    case = mutate(case, dice)
    if case.kind == "block":
        if not dice.randrange(8):
            case = replace(case, codec=dice.choice([each.codec for each in corpus()]))
        case = replace(case, count=_count(case, dice))
    return case


def use(found: pa.RecordBatch | pa.Table) -> None:
    """Look at what consumers, filters and compaction look at."""
    for part in (found.slice(0, SHOWN), found.slice(max(0, found.num_rows - SHOWN))):
        part.to_pylist()
    found.validate(full=True)


def compact(found: pa.RecordBatch) -> None:
    """Filter it, and pack it again: what was decoded is a block as good as any."""
    filter_by_topic(found, TopicFilter("orders/+/created"))
    rest = add_position_columns(found, 1, 0).slice(found.num_rows // 2)
    rest.to_pylist()[:SHOWN]
    assert decode_messages(encode_page(pa.Table.from_batches([rest]))).to_batches() == [rest], "a page"
    try:
        again = pack(found, "zstd")
    except ValueTooLarge:
        return
    count = found.num_rows
    assert decode_block(again.codec, again.payload, 1, count, count).equals(found)


# --- what is mutated --------------------------------------------------------------------------------------------------


@cache
def corpus() -> list[Case]:
    """Return one of each shape and compression."""
    found: list[Case] = []
    for batch in _batches():
        for compression in ("none", "lz4", "zstd"):
            codec, payload = encode(batch, compression)
            compressed = None if codec & 3 == 0 else compression
            found.append(Case("block", payload.to_pybytes(), codec, batch.num_rows, compressed))
        found.append(Case("published", batch.serialize().to_pybytes()))
        found.append(Case("page", encode_page(pa.Table.from_batches([add_position_columns(batch, 5, 40)] * 2))))
    return found


def _batches() -> Iterator[pa.RecordBatch]:
    dice = random.Random(1)
    for count in (1, 3, 40, 100, 300):
        for runs in (False, True):
            for rich in (False, True):
                yield pa.RecordBatch.from_pylist(
                    [_row(dice, number, runs, rich) for number in range(count)], BLOCK_SCHEMA
                )


def _row(dice: random.Random, number: int, runs: bool, rich: bool) -> dict[str, Any]:
    """`runs`: topics, keys, times and epochs repeat. `rich`: with keys, headers, epochs and nulls."""
    place = number // 25 if runs else number
    return {
        "topic": f"orders/{place % 7}/created",
        "key": b"key %d" % place if rich and place % 3 else None,
        "value": None if rich and not dice.randrange(9) else dice.randbytes(dice.randrange(30)),
        "headers": [{"key": "k", "value": None if place % 2 else b"h"}] * (number % 3) if rich else None,
        "timestamp": 1_700_000_000_000_000 + place,
        "epoch": [7, 8] if rich and (runs or number % 4) else None,
    }


# --- how --------------------------------------------------------------------------------------------------------------


def _anywhere(case: Case, dice: random.Random) -> Case:
    """Bytes changed, cut off, repeated or taken from another case, wherever that is."""
    return replace(case, payload=_changed(case.payload, dice))


def _in_the_header(case: Case, dice: random.Random) -> Case:
    """Numbers of the envelope changed, where they stand."""
    data = bytearray(case.payload)
    end = min(len(data), 8 + (struct.unpack_from("<I", data, 4)[0] if len(data) > 8 else 0))
    for _ in range(dice.randrange(1, 4)):
        form = dice.choice(("<b", "<h", "<i", "<q"))
        size = struct.calcsize(form)
        if end > size:
            place = dice.randrange(0, end - size) // size * size
            struct.pack_into(form, data, place, _number(dice, size))
    return replace(case, payload=bytes(data))


def _in_a_buffer(case: Case, dice: random.Random) -> Case:
    """The content of a buffer or two changed, under an envelope that fits; of a page any bytes."""
    if case.kind == "page":
        return _anywhere(case, dice)
    message = pa.ipc.read_message(case.payload)
    given, body = message.metadata.to_pybytes(), message.body.to_pybytes()
    root = header.read_offset(given, 0)
    table = header.read_offset(given, _there(given, root, header.HEADER))
    vector = header.read_offset(given, _there(given, table, header.BUFFERS))
    contents = [
        _content(body[start : start + size], case.compression)
        for start, size in header.read_spans(given, vector, len(body))
    ]
    for _ in range(dice.randrange(1, 3)):
        place = dice.choice([index for index, each in enumerate(contents) if each])
        contents[place] = _changed(contents[place], dice)
    metadata, packed = bytearray(given), b""
    for index, content in enumerate(contents):
        stored = _stored(content, case.compression, dice)
        struct.pack_into("<qq", metadata, vector + 4 + 16 * index, len(packed), len(stored))
        packed += stored + bytes(-len(stored) % 8)
    struct.pack_into("<q", metadata, _there(given, root, BODY_LENGTH), len(packed))
    metadata += bytes(-len(metadata) % 8)
    return replace(case, payload=b"\xff\xff\xff\xff" + struct.pack("<I", len(metadata)) + bytes(metadata) + packed)


def _there(metadata: bytes, table: int, index: int) -> int:
    found = header.find_field(metadata, table, index)
    assert found is not None
    return found


def _content(stored: bytes, compression: str | None) -> bytes:
    """Return the bytes of a buffer."""
    if compression is None or not stored:
        return stored
    (size,) = struct.unpack_from("<q", stored)
    if size == -1:
        return stored[8:]
    found: bytes = pa.decompress(stored[8:], size, compression, asbytes=True)
    return found


def _stored(content: bytes, compression: str | None, dice: random.Random) -> bytes:
    if compression is None or not content:
        return content
    size = len(content) if dice.randrange(50) else _number(dice, 8)
    packed: bytes = pa.compress(content, compression, asbytes=True)
    return struct.pack("<q", size) + packed


def _changed(data: bytes, dice: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        if not changed:
            break
        dice.choice(_CHANGES)(changed, dice)
    return bytes(changed)


def _flip(data: bytearray, dice: random.Random) -> None:
    data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)


def _byte(data: bytearray, dice: random.Random) -> None:
    data[dice.randrange(len(data))] = dice.randrange(256)


def _integer(data: bytearray, dice: random.Random) -> None:
    size = dice.choice((2, 4, 4, 4, 8))
    if len(data) >= size:
        place = dice.randrange(0, len(data) - size + 1) // size * size
        data[place : place + size] = _number(dice, size).to_bytes(size, "little", signed=True)


def _nudge(data: bytearray, dice: random.Random) -> None:
    """An offset that is off by a little."""
    if len(data) >= 4:
        place = dice.randrange(0, len(data) - 3) // 4 * 4
        (value,) = struct.unpack_from("<i", data, place)
        struct.pack_into("<I", data, place, (value + dice.randrange(-9, 10)) & 0xFFFFFFFF)


def _cut(data: bytearray, dice: random.Random) -> None:
    del data[dice.randrange(len(data)) :]


def _repeat(data: bytearray, dice: random.Random) -> None:
    start = dice.randrange(len(data))
    data[start:start] = data[start : start + dice.randrange(64)]


def _splice(data: bytearray, dice: random.Random) -> None:
    other = dice.choice(corpus()).payload
    start, taken = dice.randrange(len(data)), dice.randrange(len(other))
    length = dice.randrange(1, 128)
    data[start : start + length] = other[taken : taken + length]


_CHANGES = (_flip, _byte, _integer, _integer, _nudge, _nudge, _cut, _repeat, _splice)


def _number(dice: random.Random, size: int) -> int:
    half = 1 << 8 * size - 1
    return (dice.choice(NUMBERS) + half) % (2 * half) - half


def _count(case: Case, dice: random.Random) -> int:
    """Return the number in the row: mostly what the envelope says, else nothing beyond it is ever looked at."""
    try:
        return header.parse_envelope(pa.ipc.read_message(case.payload)).count if dice.randrange(8) else case.count
    except (pa.ArrowException, OSError, EOFError, ValueError):
        return case.count


def _decode_block(case: Case) -> pa.RecordBatch:
    """By both decoders of blocks: the one for small ones takes none that the other refuses, and reads the same."""
    small = decode_small_blocks(case.codec, [(case.count, case.payload)], 1, 0)
    try:
        found = decode_block(case.codec, case.payload, 1, case.count, case.count)
    except PoisonBlock as refused:
        if small is not None:
            raise ValueError("a small block that is taken and refused") from refused
        raise
    if small is not None and not small.equals(add_position_columns(found, 1, 0)):
        raise ValueError("a small block that is read in two ways")
    return found


def _decode_published(case: Case) -> pa.RecordBatch:
    """Return what a node would store of it."""
    batch = decode_batch(case.payload)
    for topic in batch.column("topic").unique().to_pylist():
        check_topic(topic)
    return batch


_DECODERS: dict[str, Callable[[Case], Any]] = {
    "block": _decode_block,
    "published": _decode_published,
    "page": lambda case: decode_messages(case.payload),
}
