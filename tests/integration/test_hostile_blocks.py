"""What anybody who may publish can store: nothing that is refused later, and nothing that makes a process grow."""

from __future__ import annotations

import json
import sys
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from msgspec.structs import replace

from sublet_protocol.domain.errors import PoisonBlock, UsageError
from sublet_storage.log import arrow_batch_decoder
from sublet_storage.log import fetch as message_log
from sublet_storage.log.append import BlockAppend, append
from sublet_storage.log.arrow_batch_decoder import (
    MAX_BLOCK_BYTES,
    MAX_BLOCK_MESSAGES,
    MAX_PAYLOAD_BYTES,
    decode_block,
    is_decodable,
    validate_block,
)
from sublet_storage.log.block_encoder import MAX_PACKED_BYTES, PackedBlock, pack
from sublet_storage.log.fetch import fetch, read_heads
from sublet_storage.producer import Publisher
from sublet_storage.spaces.small_block_compaction import compact_stream
from tests.integration.log_kit import Connection, batch, in_epochs, read
from tests.support.streams import open_streams

pytestmark = [pytest.mark.conforms("X7"), pytest.mark.shards(1)]
MB = 1 << 20


@pytest.fixture
def stream(conn: Connection) -> int:
    (only,) = open_streams(conn)
    return only.stream_id


def decoded(conn: Connection) -> list[pa.RecordBatch]:
    """Every block that is stored, decoded."""
    rows = conn.execute("select codec, payload, stream_id, end_offset, count from block order by end_offset").fetchall()
    return [decode_block(*row) for row in rows]


def zeros(size: int) -> PackedBlock:
    """So many bytes of values in eighty messages, which are stored in next to none."""
    block = pack(batch([bytes(size // 80)] * 80), "zstd")
    assert len(block.payload) < 100_000
    return block


def test_a_few_large_messages_make_no_large_block(database: str, conn: Connection) -> None:
    """Their average with the small ones behind them is small."""
    with Publisher(database, block_messages=MAX_BLOCK_MESSAGES, block_bytes=16 * MB) as publisher:
        values = [b"x" * (MB - 100)] * 60 + [b"y"] * 60_000
        publisher.publish_batch({"topic": "t", "value": values}).result(60)
        for value in values[58:62]:
            publisher.publish("t", value)
    found = decoded(conn)
    assert sum(each.num_rows for each in found) == 60_064
    assert max(each.nbytes for each in found) <= MAX_PACKED_BYTES


def test_a_row_no_reader_reckons_with_is_refused(conn: Connection, stream: int) -> None:
    block, rule = pack(batch([b"1"])), r"a block has|record batch|ones, or null|topic|check constraint"
    for changes in (
        {"count": MAX_BLOCK_MESSAGES + 1},
        {"count": 0},
        {"payload": bytes(MAX_PAYLOAD_BYTES + 1)},
        {"topics": ["a", None]},
        {"topics": [["a"], ["b"]]},
        {"topics": [f"t{number}" for number in range(9)]},
        {"topics": ["t" * 600_000]},
    ):
        row = {"count": 1, "topics": ["t"], "payload": block.payload.to_pybytes(), **changes}
        with pytest.raises(psycopg.DatabaseError, match=rule):
            conn.execute(
                "select append_block(null, 0, 0, %s, %s, now(), now(), %s, %s::smallint, %s, null)",
                (stream, row["count"], row["topics"], block.codec, row["payload"]),
            )
    assert conn.execute("select head from stream where stream_id = %s", (stream,)).fetchone() == (0,)


def test_epochs_no_reader_reckons_with_are_refused(conn: Connection, stream: int) -> None:
    append(conn, [BlockAppend(stream, pack(batch([b"1"])))])

    def state(**changes: Any) -> None:
        bounds = {"least": [[1, 2], [2, 1]], "greatest": [[5, 6]], "has_unset": False, **changes}
        conn.execute("update block set epoch_bounds = %s", (json.dumps(bounds),))

    state()
    wrong: dict[str, list[Any]] = {
        "least": [5, [], [5], [[]], [[1]], [[1, 2], {"a": 1}]],
        "greatest": [{"a": [[1, 2]]}, [], [[1, "x"]], [[1, None]], [[1, 1.5]], [[1, 2.0]], [[1, [2]]], [[1, 2]] * 1001],
        "has_unset": [1, None],
        "note": ["of any size"],
    }
    both = [([[9], [1]], [[9]]), ([[1]], [[5], [7]]), ([[1] * 9], [[1] * 9]), ([[1, 2], [2, 1]], [[1, 2**63 - 1]])]
    changes = [{name: value} for name, values in wrong.items() for value in values]
    for each in [*changes, *({"least": least, "greatest": greatest} for least, greatest in both)]:
        with pytest.raises(psycopg.errors.CheckViolation):
            state(**each)


@pytest.mark.conforms("S9")
@pytest.mark.parametrize("count", [2, 8], ids=["each", "of all"])
def test_epochs_that_a_row_does_not_have_are_poison(conn: Connection, stream: int, count: int) -> None:
    """Else whoever may write blocks could publish in an epoch that is completed."""

    def state(least: Any, greatest: Any) -> None:
        bounds = None if least is None else json.dumps({"least": least, "greatest": greatest, "has_unset": False})
        conn.execute("update block set epoch_bounds = %s", (bounds,))

    for epoch, least, greatest in (
        ((1,), None, None),
        ((1,), [[2]], [[3]]),  # before
        ((4,), [[2]], [[3]]),  # behind
        ((2, 2), [[2]], [[3]]),
        ((2, 2), [[1, 3], [3, 1]], [[5, 5]]),  # before one of them
        ((6, 2), [[1, 1]], [[5, 7], [7, 1]]),  # behind one of them
    ):
        conn.execute("delete from block")
        head = read_heads(conn, [stream])[stream].head
        append(conn, [BlockAppend(stream, replace(in_epochs(*[epoch] * count), epochs=None))])
        state([epoch], [epoch])
        assert len(read(conn, stream, head)) == count
        state(least, greatest)
        with pytest.raises(PoisonBlock, match=r"that its row does not have|they have not as many dimensions"):
            fetch(conn, stream, head)


def test_an_endless_payload_is_not_fetched(conn: Connection, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever owns the table may have put it there."""
    append(conn, [BlockAppend(stream, pack(batch([b"1"])))])
    conn.execute("alter table block drop constraint block_check")
    conn.execute("update block set payload = %s", (bytes(2 * MAX_PAYLOAD_BYTES),))
    fetched = list[int]()

    def watched(codec: int, payload: Any, *rest: Any) -> Any:
        fetched.append(len(payload))
        return validate_block(codec, payload, *rest)

    monkeypatch.setattr(message_log, "validate_block", watched)
    with pytest.raises(PoisonBlock, match=f"more than {MAX_PAYLOAD_BYTES} bytes"):
        fetch(conn, stream, 0)
    assert fetched == [MAX_PAYLOAD_BYTES + 1]


def test_a_page_is_bounded_by_what_it_becomes(conn: Connection, stream: int) -> None:
    """Not by what is stored."""
    append(conn, [BlockAppend(stream, zeros(20 * MB)) for _ in range(10)])
    sizes, offset = list[int](), 0
    while offset < 800:
        page = fetch(conn, stream, offset)
        sizes.append(sum(each.nbytes for each in page.batches))
        offset = page.position
    assert sum(sizes) > 200 * MB
    assert max(sizes) <= message_log.MAX_DECODED_BYTES + MB
    assert len(sizes) == 4, "three blocks each"


def test_a_small_page_is_bounded_by_its_own_size(conn: Connection, stream: int) -> None:
    append(conn, [BlockAppend(stream, zeros(4 * MB)) for _ in range(10)])
    page = fetch(conn, stream, 0, limit_bytes=MB // 2)
    assert sum(each.nbytes for each in page.batches) <= message_log.MAX_EXPANSION * MB // 2 + MB


def test_many_bad_blocks_stop_no_compaction(conn: Connection, stream: int) -> None:
    """More of them than calls may be nested."""
    good = pack(batch([b"1"]))
    bad = replace(good, payload=b"\xff\xff\xff\xff\x18\0\0\0" + bytes(24))
    count = sys.getrecursionlimit()
    append(conn, [BlockAppend(stream, block) for block in (good, good, *[bad] * count, good, good)])
    with pytest.raises(PoisonBlock):
        compact_stream(conn, stream, older_than_s=0)
    assert conn.execute("select count(*) from block").fetchone() == (count + 2,)


def test_few_bad_blocks_are_decompressed_at_once(
    conn: Connection, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page of some that are large when they are decompressed took a minute, and each of its readers a connection."""
    good = zeros(20 * MB)
    bad, tried = replace(good, codec=good.codec | 3), list[int]()
    append(conn, [BlockAppend(stream, bad) for _ in range(10)])

    def count_tried(*args: Any) -> bool:
        tried.append(1)
        return is_decodable(*args)

    monkeypatch.setattr(arrow_batch_decoder, "is_decodable", count_tried)
    with pytest.raises(PoisonBlock) as raised:
        fetch(conn, stream, 0)
    assert len(tried) == 3
    assert raised.value.run_end == 4 * 80


def test_compaction_makes_no_block_too_large(conn: Connection, stream: int) -> None:
    """It merges what fits, and leaves the rest."""
    blocks = [zeros(20 * MB), pack(batch([b"1"])), zeros(20 * MB), zeros(9 * MB), pack(batch([b"2"])), zeros(20 * MB)]
    append(conn, [BlockAppend(stream, block) for block in blocks])
    before = [value for each in decoded(conn) for value in each.column("value").to_pylist()]
    assert compact_stream(conn, stream, older_than_s=0) == 3
    found = decoded(conn)
    assert [each.num_rows for each in found] == [81, 161, 80]
    assert [value for each in found for value in each.column("value").to_pylist()] == before
    assert max(each.nbytes for each in found) <= MAX_BLOCK_BYTES
    assert compact_stream(conn, stream, older_than_s=0) == 0
    assert len(read(conn, stream)) == len(before)


def test_a_publisher_is_not_made_for_larger_blocks(database: str) -> None:
    for name, most in (
        ("block_messages", MAX_BLOCK_MESSAGES),
        ("block_bytes", 16 * MB),
        ("max_message_bytes", 16 * MB),
    ):
        with Publisher(database, **{name: most}):  # type: ignore[arg-type]
            pass
        with pytest.raises(UsageError, match=f"{name} {most + 1}: must be at most {most}"):
            Publisher(database, **{name: most + 1})  # type: ignore[arg-type]


def test_the_largest_message_is_stored_and_read(database: str, conn: Connection, stream: int) -> None:
    with Publisher(database, max_message_bytes=16 * MB, block_bytes=16 * MB) as publisher:
        for letter in (b"a", b"b", b"c"):
            publisher.publish("t", letter * (16 * MB - 100))
    found = [each.column("value")[0].as_py()[:1] for each in decoded(conn)]
    assert b"".join(found) == b"abc"
    offset = 0
    while offset < 3:
        offset = fetch(conn, stream, offset).position
