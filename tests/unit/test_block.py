"""Blocks: what is stored, and what comes back."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable

import pyarrow as pa
import pytest

from sublet_protocol.domain.errors import InvalidSetting, PoisonBlock, SubletError
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_storage.log.arrow_batch_decoder import MIN_ARROW_VALUES, decode_block, is_decodable
from sublet_storage.log.block_encoder import (
    DELIVERED_SCHEMA,
    MAX_INDEXED_TOPICS,
    BlockEpochRange,
    add_position_columns,
    build_topic_index,
    check_epoch_bounds,
    drop_before,
    encode,
    pack,
)
from sublet_storage.log.column_encoding import (
    BLOCK_SCHEMA,
    decode_flags,
    encode_codec,
    get_absent_flag,
    get_runs_flag,
    has_one_epoch,
    stored_schema,
)


def batch(topics: list[str], **columns: list[object]) -> pa.RecordBatch:
    count = len(topics)
    given: dict[str, list[object]] = {
        "topic": list(topics),
        "key": [None] * count,
        "value": [f"value {index}".encode() for index in range(count)],
        "headers": [None] * count,
        "timestamp": list(range(1_000_000, 1_000_000 + count)),
        "epoch": [None] * count,
    }
    given |= columns
    arrays = [pa.array(given[field.name], field.type) for field in BLOCK_SCHEMA]
    return pa.RecordBatch.from_arrays(arrays, schema=BLOCK_SCHEMA)


FEW_AND_MANY_RUNS = ("a" * 7, "a" * 8, "aaaabbbb", "aaaabbbc")


def test_what_is_absent_or_repeats_takes_no_room() -> None:
    lean = batch(["orders/eu/created"] * 1000, timestamp=[7] * 1000)
    values = sum(len(value) for value in lean.column("value").to_pylist())
    assert encode(lean)[1].size < values + 4 * 1001 + 600
    runs = [bool(decode_flags(encode(batch([*topics]))[0]) & get_runs_flag("topic")) for topics in FEW_AND_MANY_RUNS]
    assert runs == [False, True, True, False]
    assert [has_one_epoch(encode(batch(["a"] * count, epoch=[[1]] * count))[0]) for count in (3, 4)] == [False, True]


@pytest.mark.parametrize("size", [14 << 20, 30 << 20])
def test_whatever_is_packed_can_be_decoded(size: int) -> None:
    """Also where a column has few runs, and one of them is most of the block."""
    given = batch(["t"] * 32, key=[bytes(size), *[b"k"] * 31])
    block = pack(given)
    assert decode_block(block.codec, block.payload, 1, 32, 32).equals(given)


@pytest.mark.conforms("X7")
def test_epochs_are_not_compared_with_each_other() -> None:
    """Whoever may append may write any number of them: 100 000, of which none is before another, took minutes."""
    count = 50_000
    epochs: list[object] = [[number, -number, number % 7, number % 11] for number in range(count)]
    stored = batch(["t"] * count, epoch=epochs)
    with pytest.raises(ValueError, match="epochs that its row does not have"):
        check_epoch_bounds(None, stored)
    check_epoch_bounds(None, batch(["t"]))
    bounds: dict[str, object] = {"least": [[0, -count, 0, 0]], "greatest": [[count, 0, 6, 10]], "has_unset": False}
    check_epoch_bounds(json.dumps(bounds), stored)
    for end in ({"least": [[0, 1 - count, 1, 0]]}, {"greatest": [[count, 0, 6, 9]]}):
        with pytest.raises(ValueError, match="epochs that its row does not have"):
            check_epoch_bounds(json.dumps(bounds | end), stored)


def test_decoding_copies_no_value() -> None:
    codec, payload = encode(batch(["a"] * 500, value=[b"x" * 100] * 500))
    stored = payload.to_pybytes()
    start = pa.py_buffer(stored).address
    data = decode_block(codec, stored, 1, 500, 500).column("value").buffers()[2]
    assert start <= data.address < start + len(stored)


def test_only_a_large_block_is_compressed() -> None:
    few, many = batch(["a"] * 10, value=[bytes(1000)] * 10), batch(["a"] * 1000)
    assert encode(few, "zstd") == encode(few, "none")
    assert encode(many, "zstd")[1].size < encode(many, "none")[1].size / 2


def test_an_unknown_codec_is_refused_by_name() -> None:
    for codec in (0, 0x403, 0x203, 0x100, 0x400):
        with pytest.raises(PoisonBlock, match=f"codec {codec}"):
            decode_block(codec, b"", 1, 1, 1)
    with pytest.raises(InvalidSetting, match="brotli"):
        encode(batch(["a"]), "brotli")


@pytest.mark.conforms("X7")
@pytest.mark.parametrize("flags", range(128))
def test_a_codec_of_whatever_flags_is_read_or_poison(flags: int) -> None:
    """One that says of a column that it is stored as runs, and that it is not stored, is refused."""
    given = batch(["a"] * 8, key=[b"k"] * 8, timestamp=[7] * 8, epoch=[[3]] * 8)
    schema = stored_schema(flags)
    columns = [given[field.name] for field in schema]
    entire = pa.array([8], pa.int32())
    stored = [
        pa.RunEndEncodedArray.from_arrays(entire, column.slice(0, 1)) if field.type != column.type else column
        for field, column in zip(schema, columns, strict=True)
    ]
    payload = pa.RecordBatch.from_arrays(stored, schema=schema).serialize().to_pybytes()
    codec = encode_codec(0, flags)
    is_odd = any(flags & get_absent_flag(name) and flags & get_runs_flag(name) for name in ("key", "epoch"))
    if is_odd:
        with pytest.raises(PoisonBlock, match="both stored as runs and not stored"):
            decode_block(codec, payload, 1, 8, 8)
        assert not is_decodable(codec, payload, 8)
    else:
        found = decode_block(codec, payload, 1, 8, 8)
        for name in BLOCK_SCHEMA.names:
            is_absent = name in ("key", "headers", "epoch") and flags & get_absent_flag(name)
            assert found[name].to_pylist() == ([None] * 8 if is_absent else given[name].to_pylist())


def test_delivered_batches_carry_stream_and_offset() -> None:
    found = add_position_columns(batch(["a", "b", "c"]), 7, 40)
    assert found.schema == DELIVERED_SCHEMA
    assert found.column("stream").to_pylist() == [7, 7, 7]
    assert found.column("offset").to_pylist() == [40, 41, 42]
    assert drop_before(found, 40, 42).column("topic").to_pylist() == ["c"]
    assert drop_before(found, 40, 40).num_rows == 3


@pytest.mark.parametrize("count", [1, MIN_ARROW_VALUES - 1, MIN_ARROW_VALUES, 500])
def test_positions_are_the_same_for_few_and_many(count: int) -> None:
    first = MAX_OFFSET - count
    found = add_position_columns(batch(["a"] * count), MAX_OFFSET, first)
    assert found.column("stream").to_pylist() == [MAX_OFFSET] * count
    assert found.column("offset").to_pylist() == list(range(first, MAX_OFFSET))
    found.validate(full=True)


def test_the_skip_index_has_few_topics_or_none() -> None:
    assert build_topic_index(batch(["a", "b", "a"])) == ["a", "b"]
    many = [f"t{index}" for index in range(MAX_INDEXED_TOPICS + 1)]
    assert build_topic_index(batch(many[:-1])) == many[:-1]
    assert build_topic_index(batch(many)) is None


def test_a_packed_block_knows_the_span_of_its_times() -> None:
    block = pack(batch(["a", "a", "b"], timestamp=[5_000_000, 3_000_000, 4_000_000]))
    assert (block.count, block.topics, block.epochs) == (3, ["a", "b"], None)
    assert pack(batch(["a", "b"], epoch=[[1], [2]])).epochs == BlockEpochRange(((1,),), ((2,),), False)
    assert block.first_timestamp.timestamp() == 3
    assert block.last_timestamp.timestamp() == 5


def offsets_elsewhere(payload: bytes, given: pa.RecordBatch) -> bytes:
    """Its envelope is right, and an offset of its values points anywhere: to read it would end the process."""
    offsets = given.column("value").buffers()[1].to_pybytes()
    return payload.replace(offsets, offsets[:4] + struct.pack("<i", 1 << 30) + offsets[8:])


def run_ends_elsewhere(payload: bytes, given: pa.RecordBatch) -> bytes:
    before, count, behind = payload.rpartition(struct.pack("<i", given.num_rows) + b"\0" * 4)
    return before + struct.pack("<i", 7) + count[4:] + behind


SAME = batch(["a"] * 300, value=[b"x" * 10] * 300)


@pytest.mark.conforms("W10")
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda payload, _: b"", "End of Arrow stream"),
        (lambda payload, _: b"nothing of Arrow's at all", "cannot be decoded"),
        (lambda payload, _: payload[: len(payload) // 2], "Expected"),
        (lambda payload, _: bytes(len(payload)), "cannot be decoded"),
        (lambda payload, _: BLOCK_SCHEMA.serialize().to_pybytes(), "'schema', and not a record batch"),
        (lambda payload, _: encode(SAME.slice(0, 299))[1].to_pybytes(), "299 messages, and its row says 300"),
        (offsets_elsewhere, "cannot be decoded"),
        (run_ends_elsewhere, "run end"),
        (lambda payload, given: payload.replace(b"x" * 10, b"\xff" * 10, 1), None),
        (lambda payload, given: payload.replace(b"a\0\0\0", b"\xff\0\0\0", 1), "UTF8|UTF-8"),
    ],
)
def test_what_cannot_be_decoded_is_named(damage: Callable[[bytes, pa.RecordBatch], bytes], said: str | None) -> None:
    """By its stream and offsets; a node forwards it as it is."""
    codec, payload = encode(SAME)
    bad = damage(payload.to_pybytes(), SAME)
    assert bad != payload.to_pybytes(), "it was damaged"
    if said is None:
        assert decode_block(codec, bad, 7, 1300, 300).num_rows == 300
        return
    with pytest.raises(PoisonBlock, match=said) as raised:
        decode_block(codec, bad, 7, 1300, 300)
    poison = raised.value
    assert (poison.stream_id, poison.offsets) == (7, (1000, 1300))
    where = "the block that begins at offset 1000 and ends before offset 1300 cannot be decoded"
    assert f"stream 7: {where}" in str(poison)
    for sent in (poison, PoisonBlock(7, poison.offsets, poison.detail, run_end=1500)):
        reported = PoisonBlock.from_text(str(sent))
        assert (str(reported), reported.__dict__) == (str(sent), sent.__dict__)
    assert type(PoisonBlock.from_text("another text")) is SubletError


@pytest.mark.conforms("W10")
def test_what_grows_beyond_the_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    runs, zeros = batch(["a" * 100] * 300), batch([f"t{n}" for n in range(300)], value=[bytes(1000)] * 300)
    monkeypatch.setattr("sublet_storage.log.arrow_batch_decoder.MAX_BLOCK_BYTES", 20_000)
    for given, said in ((runs, "columns expand to 3"), (zeros, "decompresses to 3")):
        codec, payload = encode(given, "zstd")
        assert payload.size < 20_000
        with pytest.raises(PoisonBlock, match=said) as refused:
            decode_block(codec, payload, 1, 300, 300)
        size = re.search(r"(?:expand|decompresses) to (\d+) bytes", refused.value.detail)
        assert size is not None
        with monkeypatch.context() as enough:
            enough.setattr("sublet_storage.log.arrow_batch_decoder.MAX_BLOCK_BYTES", int(size[1]))
            assert decode_block(codec, payload, 1, 300, 300).equals(given)
