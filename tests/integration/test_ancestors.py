"""What was published first is consumed first, and read first, also where generations between are empty."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.subscriptions import Bookmark
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.log import fetch as message_log
from sublet_storage.readers.tail import MultiStreamReader
from sublet_storage.spaces.space_changes import rollover
from tests.integration.log_kit import Connection, put, stream_of
from tests.integration.sharing_kit import ALL as GROUP
from tests.integration.sharing_kit import Stage
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED

ALL = TopicFilter("#")


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with connect(database) as connection:
        connection.execute("update space set shards = 1")
        rollover(connection, "default")
        yield connection


def values(conn: Connection, reading: MultiStreamReader, steps: int = 1000) -> list[int]:
    """Read block by block, each turn in reverse: no order but that of the turns is promised."""
    found: list[int] = []
    for _ in range(steps):
        if reading.is_stale:
            reading.refresh_streams(conn)
        turn = reading.readable_cursors()
        for place in reversed(turn):
            batches = reading.read(conn, place, limit_bytes=1).batches
            found += [int(value.as_py()) for batch in batches for value in batch.column("value")]
        if not turn:
            break
    return found


def published(conn: Connection, first: int) -> None:
    for number in range(first, first + 3):
        put(conn, stream_of(conn, "default"), b"%d" % number)


def empty(conn: Connection) -> None:
    for _ in range(2):
        rollover(conn, "default")


def at_once(conn: Connection) -> list[int]:
    return values(conn, MultiStreamReader(conn, ALL, "earliest"))


def cut_off(conn: Connection) -> list[int]:
    before = MultiStreamReader(conn, ALL, "earliest")
    found = values(conn, before, steps=1)
    return found + values(conn, MultiStreamReader(conn, ALL, Bookmark.parse(str(before.bookmark))))


@pytest.mark.conforms("E33")
@pytest.mark.parametrize("read", [at_once, cut_off])
def test_empty_generations_let_nothing_pass(conn: Connection, read: Callable[[Connection], list[int]]) -> None:
    published(conn, 0)
    empty(conn)
    published(conn, 3)
    empty(conn)
    published(conn, 6)
    assert read(conn) == list(range(9))


@pytest.mark.conforms("E33")
def test_nor_do_those_that_end_before_a_reader(conn: Connection) -> None:
    published(conn, 0)
    rollover(conn, "default")
    reading = MultiStreamReader(conn, ALL, "earliest")
    found = values(conn, reading, steps=1)
    empty(conn)
    published(conn, 3)
    reading.update_heads(message_log.read_heads(conn, reading.open_streams))
    assert found + values(conn, reading) == list(range(6))


@pytest.mark.conforms("E33")
def test_a_group_is_not_granted_what_comes_after_them(conn: Connection, stage: Stage) -> None:
    stage.serve("n1")
    put(conn, stream_of(conn, "default"), b"0")
    settings = BorrowerSettings().scaled(SPEED)
    with Session(GROUP, stage.scene.url, starting_position="earliest", auto_ack=False, settings=settings) as one:
        slow = one.poll(WAIT_S)
        assert slow is not None
        empty(conn)
        put(conn, stream_of(conn, "default"), b"1")
        ended = "select count(*) from lending join stream using (stream_id) where head = 0 and status = 'finished'"
        eventually(lambda: conn.execute(ended).fetchone() == (17,), WAIT_S, stage.said)
        assert one.poll(2.0) is None
        slow.ack()
        later = one.poll(WAIT_S)
        assert later is not None
        assert later.table.column("value")[0].as_py() == b"1"
