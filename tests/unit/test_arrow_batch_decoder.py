"""Arrow that others wrote: what is no batch, or becomes too large, is refused by name before anything is made of it."""

from __future__ import annotations

import struct
from typing import Any

import pyarrow as pa
import pytest

from sublet_borrower.node_client.feed_reader import decode_messages
from sublet_leader.feed.history_and_follow import encode as encode_page
from sublet_protocol.domain.errors import PoisonBlock, SchemaMismatch, ValueTooLarge
from sublet_protocol.messages.field_checks import MalformedMessage
from sublet_storage.log import arrow_batch_decoder, block_encoder
from sublet_storage.log.arrow_batch_decoder import (
    MAX_BLOCK_BYTES,
    MAX_BLOCK_MESSAGES,
    MAX_PAYLOAD_BYTES,
    MIN_ARROW_VALUES,
    InvalidRecordBatch,
    count_undecodable,
    decode_block,
    decode_stream,
)
from sublet_storage.log.arrow_batch_header import parse_envelope
from sublet_storage.log.block_encoder import DELIVERED_SCHEMA, MAX_PACKED_BYTES, add_position_columns, encode, pack
from sublet_storage.log.column_encoding import (
    BLOCK_SCHEMA,
    encode_codec,
    get_absent_flag,
    get_runs_flag,
    stored_schema,
)
from sublet_storage.log.fast_small_block_decoder import decode_small_blocks
from tests.unit.test_block import offsets_elsewhere

pytestmark = pytest.mark.conforms("X7")


def batch(count: int = 3, **columns: Any) -> pa.RecordBatch:
    """A column that is given holds in all messages, or is one value for each."""
    given = {"topic": "t", "value": b"v", "timestamp": 1, **columns}
    rows = [given.get(field.name) for field in BLOCK_SCHEMA]
    arrays = [
        each if isinstance(each, pa.Array) else pa.array(each if isinstance(each, list) else [each] * count, field.type)
        for each, field in zip(rows, BLOCK_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=BLOCK_SCHEMA)


def message(stored: pa.RecordBatch, compression: str | None = None, **metadata: Any) -> bytes:
    """The batch's message out of a stream, behind the schema's."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, stored.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_batch(stored, **metadata)
    entire: bytes = sink.getvalue().to_pybytes()
    return entire[stored.schema.serialize().size :]


def decode(flags: int, payload: bytes, count: int) -> pa.RecordBatch:
    return decode_block(encode_codec(0, flags), payload, 1, count, count)


def runs(stored: pa.RecordBatch, **columns: pa.Array) -> tuple[int, pa.RecordBatch]:
    """The batch with these columns as they are stored."""
    flags = sum(map(get_runs_flag, columns))
    arrays = [columns.get(name, stored.column(name)) for name in BLOCK_SCHEMA.names]
    return flags, pa.RecordBatch.from_arrays(arrays, schema=stored_schema(flags))


def run_of(count: int, values: pa.Array) -> pa.Array:
    return pa.RunEndEncodedArray.from_arrays(pa.array([count], pa.int32()), values)


HEADERS = BLOCK_SCHEMA.field("headers").type
EPOCHS = BLOCK_SCHEMA.field("epoch").type
NAMELESS = pa.array([[{"key": None, "value": b"1"}]] * 3, HEADERS)
NOTHING = pa.array([[None]] * 3, HEADERS)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"topic": "a/+"}, "column topic has a wildcard"),
        ({"topic": ["a", "#", "b"]}, "column topic has a wildcard"),
        ({"topic": ["a", "b", "b\0"]}, "column topic has a wildcard or a NUL"),
        ({"topic": ["a", None, "b"]}, "column topic has nulls"),
        ({"timestamp": [1, None, 1]}, "column timestamp has nulls"),
        ({"timestamp": 2**62}, "timestamp has a time outside of the years 1 to 9999"),
        ({"timestamp": [1, 1, -(2**63)]}, "timestamp has a time outside of the years 1 to 9999"),
        ({"headers": NAMELESS}, "headers has a header without a name"),
        ({"headers": NOTHING}, "headers has a header without a name"),
        ({"epoch": [[1], [1, 2], None]}, "column epoch has epochs"),
        ({"epoch": [[], None, None]}, "column epoch has epochs"),
        ({"epoch": [[None], None, None]}, "column epoch has epochs"),
        ({"epoch": [[1] * 9, None, None]}, "column epoch has epochs"),
    ],
)
def test_what_every_way_in_refuses_is_refused(columns: dict[str, Any], said: str) -> None:
    with pytest.raises(PoisonBlock, match=said):
        decode(0, message(batch(**columns)), 3)
    codec, payload = encode(batch(**columns))
    assert decode_small_blocks(codec, [(3, payload.to_pybytes())], 1, 0) is None, "which is left to that"


@pytest.mark.parametrize("count", [MIN_ARROW_VALUES - 1, MIN_ARROW_VALUES])
def test_one_time_of_many_is_refused(count: int) -> None:
    good = [arrow_batch_decoder.FIRST_US, *range(count - 2), arrow_batch_decoder.LAST_US]
    assert decode(0, message(batch(count, timestamp=good)), count).column("timestamp").cast("int64").to_pylist() == good
    for index, wrong in ((0, good[0] - 1), (count - 1, good[-1] + 1)):
        times = [*good[:index], wrong, *good[index + 1 :]]
        with pytest.raises(PoisonBlock, match="outside of the years"):
            decode(0, message(batch(count, timestamp=times)), count)


def test_columns_at_their_limits_are_read() -> None:
    first, last = arrow_batch_decoder.FIRST_US, arrow_batch_decoder.LAST_US
    good = batch(
        timestamp=[first, 0, last],
        epoch=[[1] * 8, None, [-(2**63)] * 8],
        headers=[[], None, [{"key": "", "value": b""}]],
    )
    assert decode(0, message(good), 3).equals(good)
    assert len(good.to_pylist()) == 3


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_compression_of_an_old_kind_is_refused(compression: str) -> None:
    """It stands beside the header that is looked at, and Arrow would decompress by it."""
    plain = batch()
    with pytest.raises(PoisonBlock, match="metadata of its own"):
        decode(0, message(plain, None, custom_metadata={"ARROW:experimental_compression": compression}), 3)


@pytest.mark.parametrize(("pairs", "first"), [(0, 1), (0, 2), (0, 1 << 30), (1, 1)])
@pytest.mark.parametrize("name", ["key", "value"])
def test_no_headers_begin_at_the_start(name: str, pairs: int, first: int) -> None:
    """Else Arrow writes such a column again with a size below 0, so that nobody can decode what a node or compaction
    makes of it. Also where there are headers that no message has, of which Arrow writes none."""
    payload = bytearray(batch(headers=[[{"key": "x", "value": b"y"}], [], []]).serialize())
    stored = pa.py_buffer(payload)
    headers = pa.ipc.read_record_batch(pa.ipc.read_message(stored), BLOCK_SCHEMA).column("headers")
    lengths = struct.pack("<6q", 1, 0, 1, 0, 1, 0)  # and no nulls: of the pairs, their keys and their values
    struct.pack_into("<6q", payload, payload.index(lengths), *[pairs, 0] * 3)
    struct.pack_into("<4i", payload, headers.buffers()[1].address - stored.address, *[0] * 4)
    struct.pack_into("<i", payload, headers.values.field(name).buffers()[1].address - stored.address, first)
    found = decode(0, bytes(payload), 3)
    assert found.column("headers").to_pylist() == [[]] * 3
    codec, again = encode(found)
    assert decode_block(codec, again, 1, 3, 3).equals(found)
    page = add_position_columns(found, 1, 0)
    assert decode_messages(encode_page(pa.Table.from_batches([page]))).to_batches() == [page]


@pytest.mark.parametrize("count", [2, MIN_ARROW_VALUES])
def test_a_wildcard_is_one_of_a_topic(count: int) -> None:
    """And not of what lies in the column before them."""
    topics = ["bb", *"c" * (count - 1)]
    for wrong in ("+", "#"):
        for place in (0, count - 1):
            with pytest.raises(PoisonBlock, match="a wildcard"):
                decode(0, message(batch(count, topic=[*topics[:place], wrong, *topics[place + 1 :]])), count)
    payload = message(batch(count, topic=topics))
    for before, after in ((struct.pack("<3i", 0, 2, 3), struct.pack("<3i", 1, 2, 3)), (b"bbc", b"+bc")):
        assert payload.count(before) == 1
        payload = payload.replace(before, after)
    assert decode(0, payload, count).column("topic").to_pylist() == ["b", *topics[1:]]


@pytest.mark.parametrize(("start", "size"), [(-8, 1234), (0, -8), (1 << 40, 1234)])
def test_a_buffer_lies_within_the_body(start: int, size: int) -> None:
    payload = bytearray(message(batch(1, value=[b"x" * 1234])))
    struct.pack_into("<qq", payload, payload.index(struct.pack("<q", 1234)) - 8, start, size)
    with pytest.raises(PoisonBlock, match=f"a buffer of {size} bytes at {start}, in a body of"):
        decode(0, bytes(payload), 1)
    codec, small = encode(batch(1, value=[b"x" * 1234]))
    payload = bytearray(small)
    struct.pack_into("<qq", payload, payload.index(struct.pack("<q", 1234)) - 8, start, size)
    ends = bytearray(small)
    struct.pack_into("<2i", ends, ends.rindex(struct.pack("<2i", 0, 1234)), 0, 2000)
    for wrong in (payload, ends):
        assert decode_small_blocks(codec, [(1, bytes(wrong))], 1, 0) is None


@pytest.mark.parametrize(
    ("size", "length", "said"),
    [
        (7, 1234, "a compressed buffer of 7 bytes"),
        (None, -2, "a buffer that decompresses to -2 bytes"),
        (None, -1, None),
    ],
)
def test_a_compressed_buffer_has_a_length(size: int | None, length: int, said: str | None) -> None:
    """One of -1 is not compressed."""
    payload = bytearray(message(batch(1, value=[b"x" * 1234]), "zstd"))
    at, body = payload.rindex(struct.pack("<q", 1234)), payload.index(pa.ipc.read_message(payload).body.to_pybytes())
    struct.pack_into("<q", payload, at, length)
    if size is not None:
        struct.pack_into("<q", payload, payload.index(struct.pack("<q", at - body)) + 8, size)
    if said is None:
        assert parse_envelope(pa.ipc.read_message(payload)).decoded_bytes < 1234
        return
    with pytest.raises(PoisonBlock, match=said):
        decode(0, bytes(payload), 1)


def test_an_epoch_for_all_is_small_and_one() -> None:
    """A million numbers, a hundred thousand times, would be all the memory there is."""
    many = batch(MAX_BLOCK_MESSAGES)
    flags, bomb = runs(many, epoch=run_of(MAX_BLOCK_MESSAGES, pa.array([[7] * 10**6], EPOCHS)))
    with pytest.raises(PoisonBlock, match="columns expand to 8000"):
        decode(flags, message(bomb, "zstd"), MAX_BLOCK_MESSAGES)
    two = pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array([[1], [2]], EPOCHS))
    flags, mixed = runs(batch(), epoch=two)
    with pytest.raises(PoisonBlock, match="column epoch has 2 runs"):
        decode(flags, message(mixed), 3)


def test_runs_are_bounded_all_together() -> None:
    """Each of three columns fits, and all of them do not."""
    count = MAX_BLOCK_MESSAGES
    text, data = pa.array(["t" * 200]), pa.array([b"k" * 200], pa.binary())
    flags, one = runs(batch(count), topic=run_of(count, text))
    assert decode(flags, message(one), count).num_rows == count
    flags, both = runs(batch(count), topic=run_of(count, text), key=run_of(count, data))
    with pytest.raises(PoisonBlock, match=f"columns expand to 4.*the limit is {MAX_BLOCK_BYTES}"):
        decode(flags, message(both), count)


def test_a_block_has_so_many_messages() -> None:
    for count in (MAX_BLOCK_MESSAGES, MAX_BLOCK_MESSAGES + 1):
        payload = message(batch(count))
        if count == MAX_BLOCK_MESSAGES:
            assert decode(0, payload, count).num_rows == count
            continue
        with pytest.raises(PoisonBlock, match="100001 messages: there must be 1 to 100000"):
            decode(0, payload, count)
        with pytest.raises(ValueTooLarge, match="100001 messages"):
            pack(batch(count))
    with pytest.raises(PoisonBlock, match="0 messages: there must be 1"):
        decode(0, message(batch(0)), 0)


@pytest.mark.parametrize("compression", ["none", "zstd"])
@pytest.mark.parametrize(
    ("count", "columns"),
    [
        (1, {"value": b"v" * (MAX_PACKED_BYTES - 200)}),
        (80, {"value": b"v" * (MAX_PACKED_BYTES // 80 - 100)}),
        (MAX_BLOCK_MESSAGES, {"topic": "t" * 280}),
        (1, {"headers": [[{"key": "", "value": b""}] * (MAX_PACKED_BYTES // 8 - 100)]}),
    ],
    ids=["one", "eighty", "runs", "headers"],
)
def test_what_can_be_packed_is_decoded(count: int, columns: dict[str, Any], compression: str) -> None:
    """Just below the limit; above it, it is refused where it is packed."""
    largest = batch(count, **columns)
    block = pack(largest, compression)
    assert MAX_PACKED_BYTES * 0.9 < largest.nbytes <= MAX_PACKED_BYTES
    assert decode_block(block.codec, block.payload, 1, count, count).equals(largest)
    assert len(block.payload) <= MAX_PAYLOAD_BYTES


def test_what_cannot_be_packed_is_refused() -> None:
    with pytest.raises(ValueTooLarge, match=f"it may have {MAX_BLOCK_MESSAGES} and {MAX_PACKED_BYTES}"):
        pack(batch(1, value=b"v" * MAX_PACKED_BYTES))


def test_a_batch_is_packed_up_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is a part of a larger one."""
    parts = batch(2, value=[b"v" * 1000, b"v" * 5000])
    one = parts.slice(0, 1)
    monkeypatch.setattr(block_encoder, "MAX_PACKED_BYTES", one.nbytes)
    assert pack(one).count == 1
    monkeypatch.setattr(block_encoder, "MAX_PACKED_BYTES", one.nbytes - 1)
    with pytest.raises(ValueTooLarge, match=f"and {one.nbytes} bytes"):
        pack(one)


def test_what_is_decoded_to_find_a_bad_run_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks that cannot be decoded, up to one that was not read; what is refused before it is decompressed counts
    as nothing."""
    payload = message(batch(timestamp=2**62))
    size = parse_envelope(pa.ipc.read_message(payload)).decoded_bytes
    blocks = [(encode_codec(0, 0), payload, 3)] * 4
    monkeypatch.setattr(arrow_batch_decoder, "MAX_BLOCK_BYTES", size)
    assert count_undecodable(blocks, 2 * size) == 2
    monkeypatch.setattr(arrow_batch_decoder, "MAX_BLOCK_BYTES", size - 1)
    assert count_undecodable(blocks, 2 * size) == 4
    assert count_undecodable([blocks[0], (0, None, 3), blocks[0]], 2 * size) == 1


def test_runs_of_nothing_are_left_to_arrow() -> None:
    """Which refuses them: a run has a message, and a block too."""
    topics = pa.RunEndEncodedArray.from_arrays(pa.array([1, 3], pa.int32()), pa.array(["a", "b"]))
    flags, stored = runs(batch(key=b"k"), topic=topics)
    flags |= get_absent_flag("headers") | get_absent_flag("epoch")
    stored = stored.drop_columns(["headers", "epoch"])
    payload, ends = stored.serialize().to_pybytes(), struct.pack("<2i", 1, 3)
    assert payload.count(ends) == 1
    codec = encode_codec(0, flags)
    assert decode_small_blocks(codec, [(3, payload)], 1, 0) is not None
    of_none = payload
    for nodes, none in (
        (struct.pack("<6q", 3, 0, 2, 0, 2, 0), struct.pack("<6q", 3, 0, 0, 0, 0, 0)),
        (struct.pack("<10q", 0, 0, 0, 8, 8, 0, 8, 12, 24, 2), struct.pack("<10q", 0, 0, 0, 0, 8, 0, 8, 4, 24, 2)),
    ):
        assert of_none.count(nodes) == 1
        of_none = of_none.replace(nodes, none)
    for count, wrong in (
        (3, payload.replace(ends, struct.pack("<2i", 0, 3))),
        (3, of_none),
        (2, payload),
        (0, stored.slice(0, 0).serialize().to_pybytes()),
    ):
        assert decode_small_blocks(codec, [(count, wrong)], 1, 0) is None
        with pytest.raises(PoisonBlock):
            decode_block(codec, wrong, 1, count, count)


@pytest.mark.parametrize(
    "columns",
    [{"timestamp": [arrow_batch_decoder.FIRST_US, 0, arrow_batch_decoder.LAST_US]}, {"value": [b"", b"v", b""]}],
)
def test_a_small_block_at_its_limits_needs_no_arrow(columns: dict[str, Any]) -> None:
    given = batch(**columns)
    codec, payload = encode(given)
    assert decode_small_blocks(codec, [(3, payload.to_pybytes())], 5, 40) == add_position_columns(given, 5, 40)


def test_a_payload_is_bounded_before_it_is_read() -> None:
    with pytest.raises(PoisonBlock, match=f"more than {MAX_PAYLOAD_BYTES} bytes"):
        decode(0, bytes(MAX_PAYLOAD_BYTES + 1), 1)
    with pytest.raises(PoisonBlock, match=r"^(?!.*more than)"):
        decode(0, bytes(MAX_PAYLOAD_BYTES), 1)


def test_causes_are_printable() -> None:
    """They go into Postgres, logs and messages."""
    payload, refused = batch().serialize().to_pybytes(), list[PoisonBlock]()
    for place in range(0, len(payload), 3):
        for text in (b"\0", b"\xff", b"\x1b"):
            try:
                decode(0, payload[:place] + text + payload[place + 1 :], 3)
            except PoisonBlock as poison:
                refused.append(poison)
    assert len(refused) > 100
    assert all(str(each).isprintable() and len(each.detail) < 700 for each in refused)


# --- pages of nodes ---------------------------------------------------------------------------------------------------


def page(*batches: pa.RecordBatch, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, batches[0].schema, options=options) as writer:
        for each in batches:
            writer.write_batch(each)
    entire: bytes = sink.getvalue().to_pybytes()
    return entire


def delivered(count: int = 3, **columns: Any) -> pa.RecordBatch:
    return add_position_columns(batch(count, **columns), 5, 40)


def test_a_page_is_read() -> None:
    one, two = delivered(), delivered(2, value=b"2")
    assert decode_messages(page(one, two)) == pa.Table.from_batches([one, two])


LONG = delivered(300, value=b"x" * 10)


@pytest.mark.parametrize(
    ("payload", "said"),
    [
        (b"", "page whose Arrow cannot be read"),
        (b"no arrow", "page whose Arrow cannot be read"),
        (offsets_elsewhere(page(LONG), LONG), "page whose Arrow cannot be read"),
        (page(delivered())[: len(page(delivered())) // 2], "page whose Arrow cannot be read"),
        (message(delivered()), "first message is not"),
        (page(delivered())[:-8] + page(delivered())[:-8], "'schema', and not a record batch"),
        (page(batch()), "another schema"),
        (page(delivered(timestamp=2**62)), "years 1 to 9999"),
        (page(delivered(300, value=bytes(300_000)), compression="zstd"), "decompresses to 9"),
    ],
    ids=["empty", "text", "offsets", "half", "no-schema", "two-schemas", "schema", "columns", "bomb"],
)
def test_a_page_that_cannot_be_is_refused(payload: bytes, said: str) -> None:
    with pytest.raises(MalformedMessage, match=said):
        decode_messages(payload)


def test_a_page_is_bounded_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    one = delivered(300, value=b"x" * 100)
    monkeypatch.setattr(arrow_batch_decoder, "MAX_PAGE_BYTES", 3 * one.nbytes)
    assert decode_stream(page(one, one), DELIVERED_SCHEMA).num_rows == 600
    with pytest.raises(InvalidRecordBatch, match="the limit is"):
        decode_stream(page(one, one, one, one), DELIVERED_SCHEMA)
    with pytest.raises(SchemaMismatch):
        decode_stream(page(one), BLOCK_SCHEMA)


def test_many_runs_are_read() -> None:
    """They are as large as their messages, whatever the product of runs and messages is."""
    count, of_each = MAX_BLOCK_MESSAGES, 50
    numbers = [number // of_each for number in range(count)]
    topics, keys = [f"topic/{number}" for number in numbers], [b"%d" % number for number in numbers]
    given = batch(count, topic=topics, key=keys, timestamp=numbers)
    codec, payload = encode(given)
    assert payload.size < 1 << 20, "they are stored as runs"
    assert decode_block(codec, payload, 1, count, count).equals(given)
