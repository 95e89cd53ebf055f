"""Ways to store messages that are not a publisher's: what would be refused later is refused by them too."""

from __future__ import annotations

import psycopg
import pyarrow as pa
import pytest

from sublet_borrower.consumer.dead_letter import SHOWN_ERROR, publish_dead_letter
from sublet_protocol.domain.limits import MAX_HEADER_BYTES, MAX_HEADERS
from sublet_storage.db.connect import connect
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.producer.batches.input_conversion import MESSAGE_OVERHEAD_BYTES
from sublet_storage.producer.publisher import MAX_MESSAGE_BYTES

TOPIC, ERROR = "t" * 4_096, "é" * 5_000
ADDED = {"topic": TOPIC, "stream_id": "3", "offset": "7", "error": ERROR[:SHOWN_ERROR]}
ROOM = MAX_HEADER_BYTES - sum(len(f"sublet.{name}{value}".encode()) for name, value in ADDED.items())


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("headers", "remaining"),
    [
        ([("a", b"1"), ("a", None)], 2),
        ([("n", None)] * MAX_HEADERS, MAX_HEADERS - 4),
        ([("a", b"x" * 100), ("b", b"x" * (MAX_HEADER_BYTES - 102))], 1),
        ([("a", b"x" * (ROOM - 1))], 1),
        ([("a", b"x" * ROOM)], 0),
        ([("a\0", b"1"), ("\0", b"x" * (ROOM - 5))], 1),
    ],
    ids=["few", "many", "large", "just fitting", "a byte too many", "NUL"],
)
def test_a_record_full_of_headers_is_published(
    database: str, headers: list[tuple[str, bytes | None]], remaining: int
) -> None:
    row = {"topic": TOPIC, "key": b"k", "value": b"v", "headers": headers, "timestamp": 0, "epoch": None}
    columns = {name: pa.array([value], BLOCK_SCHEMA.field(name).type) for name, value in row.items()}
    record = pa.table({**columns, "offset": pa.array([7], pa.int64())})
    with psycopg.connect(database) as connection:
        publish_dead_letter(connection, "failed", record, 3, ERROR)
        ((stored,),) = connection.execute("select headers from sublet.outbox").fetchall()
    names = [name for name, _ in stored]
    assert names[remaining:] == ["sublet.topic", "sublet.stream_id", "sublet.offset", "sublet.error"]
    assert names[:remaining] == [name.replace("\0", "\ufffd") for name, _ in headers][:remaining]


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(("room", "shown"), [(4_000, 2_000), (999, 499), (0, 0)])
def test_a_record_of_the_greatest_size_is_published(database: str, room: int, shown: int) -> None:
    """Its own headers give way, and then the error; it has its origin in any case."""
    origin_size = sum(len(f"sublet.{name}{value}") for name, value in {**ADDED, "topic": "t", "error": ""}.items())
    size = MAX_MESSAGE_BYTES - MESSAGE_OVERHEAD_BYTES - len("failed") - origin_size - room
    row = {"topic": "t", "key": None, "value": b"v" * size, "headers": [("own", b"x" * (room + 1))], "timestamp": 0}
    columns = {name: pa.array([value], BLOCK_SCHEMA.field(name).type) for name, value in row.items()}
    with psycopg.connect(database) as connection:
        publish_dead_letter(connection, "failed", pa.table({**columns, "offset": pa.array([7], pa.int64())}), 3, ERROR)
        ((stored, length),) = connection.execute("select headers, length(value) from sublet.outbox").fetchall()
    assert stored == [
        ["sublet.topic", "t"],
        ["sublet.stream_id", "3"],
        ["sublet.offset", "7"],
        ["sublet.error", "é" * shown],
    ]
    assert length == size


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(
    ("topics", "is_good"),
    [
        (["t" * 4_096, "/" * 127], True),
        (["t", "t" * 4_097], False),
        (["é" * 2_049], False),
        (["/" * 128], False),
        (None, True),
    ],
    ids=["longest", "long", "bytes", "levels", "many"],
)
def test_a_block_with_too_long_a_topic_is_refused(database: str, topics: list[str] | None, is_good: bool) -> None:
    """Where a block names its topics."""
    call = "select append_block(null, null, null, 1, 8, now(), now(), %s::text[], 0::smallint, %s, null)"
    payload = b"\xff\xff\xff\xff" + bytes(12)
    with connect(database) as connection:
        if is_good:
            connection.execute(call, (topics, payload))
        else:
            with pytest.raises(psycopg.Error, match=r"the limit is (4096|128)"):
                connection.execute(call, (topics, payload))
        assert connection.execute("select head from stream where stream_id = 1").fetchone() == (8 * is_good,)
