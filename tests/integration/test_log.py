"""Appending to and reading from a real Postgres."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    NotFound,
    PoisonBlock,
    PositionGone,
    Unavailable,
    UnknownOutcome,
)
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.log.append import AppendOutcome, AppendResult, BlockAppend, ProducerStamp, append, register_producer
from sublet_storage.log.fetch import (
    MATCH_ALL,
    NEXT_BLOCK_BYTES,
    NEXT_BLOCKS,
    fetch,
    fetch_next,
    limit_ranges_by_size,
    offset_at_time,
    read_heads,
)
from sublet_storage.readers.epoch_steps import read_block_summaries
from sublet_storage.readers.tail import Tail
from sublet_storage.spaces.retention import drop_gone
from sublet_storage.spaces.space_changes import rollover
from tests.integration.log_kit import (
    Connection,
    block,
    generation_of,
    in_epochs,
    put,
    read,
    stamped,
    stream_of,
    waiting_for_locks,
)
from tests.kit import eventually
from tests.support.streams import open_streams


@pytest.fixture
def stream(conn: Connection) -> int:
    return open_streams(conn)[0].stream_id


def values(messages: list[dict[str, Any]]) -> list[bytes]:
    return [message["value"] for message in messages]


# --- append ---------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("W2")
def test_the_four_outcomes_of_an_append(conn: Connection, stream: int) -> None:
    def send(incarnation: int, sequence: int, value: bytes) -> AppendResult:
        return append(conn, [stamped(stream, ProducerStamp("p", incarnation, sequence), value)])[0]

    assert send(5, 1, b"a") == AppendResult(AppendOutcome.APPENDED, 1)
    assert send(5, 1, b"a") == AppendResult(AppendOutcome.DUPLICATE, 1)
    assert send(5, 2, b"b") == AppendResult(AppendOutcome.APPENDED, 2)
    assert send(5, 1, b"a") == AppendResult(AppendOutcome.DUPLICATE, None)
    assert send(4, 9, b"x") == AppendResult(AppendOutcome.FENCED, None)
    assert send(6, 1, b"c") == AppendResult(AppendOutcome.APPENDED, 3)
    rollover(conn, "default")
    assert send(6, 1, b"c") == AppendResult(AppendOutcome.DUPLICATE, 3), "duplicate wins over closed"
    assert send(6, 2, b"d") == AppendResult(AppendOutcome.CLOSED, None)
    assert send(5, 3, b"x") == AppendResult(AppendOutcome.FENCED, None)
    assert values(read(conn, stream)) == [b"a", b"b", b"c"]


@pytest.mark.conforms("W2", "W4")
def test_a_server_process_may_not_know_a_partition(conn: Connection, stream: int) -> None:
    """As one that looked for partitions while it was attached: nothing is taken for gone, nor refused for good."""
    put(conn, stream, b"1", b"2")
    generation = generation_of(conn, stream)
    conn.execute(f"alter table block detach partition block_{generation}")
    for within in (nullcontext(), conn.transaction()):
        with within:
            assert values(read(conn, stream)) == [b"1", b"2"]
            assert read_block_summaries(conn, stream, generation, 0).blocks[0].end == 2
    with pytest.raises(DatabaseUnreachable, match=r'no partition of relation "block" found.*another connection'):
        put(conn, stream, b"3")


@pytest.mark.conforms("W2")
def test_a_registration_waits_for_an_open_append(database: str, conn: Connection, stream: int) -> None:
    other_stream = open_streams(conn)[1].stream_id
    older = register_producer(conn, "p")
    with connect(database) as second, connect(database) as third, ThreadPoolExecutor(2) as pool:
        with conn.transaction():
            append(conn, [stamped(stream, ProducerStamp("p", older, 1), b"a")])
            registering = pool.submit(
                lambda: (register_producer(second, "p"), read_heads(second, [stream])[stream].head)
            )
            eventually(lambda: waiting_for_locks(database))
            late = pool.submit(append, third, [stamped(other_stream, ProducerStamp("p", older, 1), b"x")])
            eventually(lambda: waiting_for_locks(database) == 2)
            assert append(conn, [stamped(stream, ProducerStamp("p", older, 2), b"b")]) == [
                AppendResult(AppendOutcome.APPENDED, 2)
            ]
            assert not registering.done()
        newer, seen = registering.result(10)
        assert (newer > older, seen) == (True, 2)
        assert late.result(10) == [AppendResult(AppendOutcome.FENCED, None)]
    assert append(conn, [stamped(stream, ProducerStamp("p", older, 3), b"c")]) == [
        AppendResult(AppendOutcome.FENCED, None)
    ]
    assert values(read(conn, stream)) == [b"a", b"b"]


def test_a_registration_does_not_wait_for_ever(database: str, conn: Connection, stream: int) -> None:
    with connect(database, lock_timeout_s=0.2) as second, conn.transaction():
        append(conn, [stamped(stream, ProducerStamp("p", 1, 1), b"a")])
        with pytest.raises(Unavailable, match="producer 'p': an earlier incarnation of it is still writing"):
            register_producer(second, "p")
        assert register_producer(second, "q")
    assert append(conn, [stamped(stream, ProducerStamp("p", 1, 2), b"b")]) == [AppendResult(AppendOutcome.APPENDED, 2)]


def test_a_dead_connection_leaves_it_unknown(database: str, conn: Connection, stream: int) -> None:
    with connect(database) as other:
        other.execute("select pg_terminate_backend(%s)", (conn.info.backend_pid,))
    with pytest.raises(UnknownOutcome):
        append(conn, [BlockAppend(stream, block(b"x"))])


# --- since ----------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("P3")
def test_since_is_what_lies_later_in_order_paged(conn: Connection, stream: int) -> None:
    sent = [b"%d" % index for index in range(30)]
    for index in range(0, 30, 3):
        put(conn, stream, *sent[index : index + 3])
    for offset in range(31):
        assert values(read(conn, stream, offset)) == sent[offset:]
        assert values(read(conn, stream, offset, limit_blocks=2)) == sent[offset:]
        assert values(read(conn, stream, offset, limit_bytes=1)) == sent[offset:]


def test_a_block_may_reach_the_limit_in_bytes(conn: Connection, stream: int) -> None:
    """Then the next is left out. What lies before a range does not count, nor what is in other streams."""
    for each in (stream, stream, stream, open_streams(conn)[1].stream_id):
        put(conn, each, b"x" * 100)
    ((size,),) = conn.execute("select distinct octet_length(payload) from block where stream_id = %s", (stream,))
    for limit, blocks in ((1, 1), (size, 1), (size + 1, 2)):
        assert fetch(conn, stream, 0, limit_bytes=limit).position == blocks
        for start in (0, 1):
            extent = (stream, generation_of(conn, stream), start, 3)
            assert limit_ranges_by_size(conn, [extent], limit) == {stream: start + blocks}


@pytest.mark.conforms("P3")
def test_small_blocks_of_one_kind_come_together(conn: Connection, stream: int) -> None:
    some, other = [b"%d" % number for number in range(5)], [b"%d" % number for number in range(5, 105)]
    for value in some:
        put(conn, stream, value)
    put(conn, stream, *other)
    for epoch in (1, 1, 2, 3):
        append(conn, [BlockAppend(stream, in_epochs(*[(epoch,)] * 8))])
    put(conn, stream, *some)
    alone, together = fetch(conn, stream, 2, end=140), fetch(conn, stream, 2, end=140, few=50)
    assert (len(together.batches), together.position) == (len(alone.batches) - 2, alone.position)
    assert pa.Table.from_batches(together.batches).equals(pa.Table.from_batches(alone.batches))
    few = fetch(conn, stream, 0, filter=TopicFilter("t"), few=50).batches
    assert len(few) == len(fetch(conn, stream, 0).batches)


@pytest.mark.conforms("P3")
def test_since_the_latest_there_is_nothing(conn: Connection, stream: int) -> None:
    put(conn, stream, b"a", b"b")
    head = read_heads(conn, [stream, 999]).pop(stream)
    assert (head.head, head.is_closed, head.is_gone) == (2, False, False)
    page = fetch(conn, stream, 2)
    assert (page.batches, page.start, page.position, page.head) == ((), 2, 2, 2)
    assert not page.is_closed
    assert not page.is_finished
    rollover(conn, "default")
    assert fetch(conn, stream, 2).is_finished
    assert fetch(conn, stream, 0, limit_blocks=0).position == 2, "at least one block is read"
    conn.execute("update generation set state = 'gone' where state = 'closed'")
    heads = read_heads(conn, [stream, 999])
    assert {each: (head.is_closed, head.is_gone) for each, head in heads.items()} == {stream: (True, True)}


def test_what_is_there_or_gone_is_read_once(conn: Connection, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what should be there and is not is looked for again, in the partition."""
    generation = generation_of(conn, stream)
    put(conn, stream, b"a", b"b")
    monkeypatch.setattr("sublet_storage.log.fetch.read_partition", lambda *_: pytest.fail("it is read again"))
    assert [fetch(conn, stream, offset, generation_id=generation).position for offset in (0, 2)] == [2, 2]
    conn.execute("update generation set state = 'gone'")
    conn.execute("delete from block")
    with pytest.raises(PositionGone):
        fetch(conn, stream, 0, generation_id=generation)
    with pytest.raises(NotFound, match="stream 999: there is no such stream"):
        fetch(conn, 999, 0, generation_id=generation)


def test_a_generation_that_was_to_come_is_read_by_name(conn: Connection, stream: int) -> None:
    """A client that named it before made a node read it the slow way."""
    to_come = generation_of(conn, stream) + 1
    assert fetch(conn, stream, 0, generation_id=to_come).position == 0
    rollover(conn, "default")
    for _ in range(7):
        assert fetch(conn, stream_of(conn, "default"), 0, generation_id=to_come).position == 0
    by_name = "select from pg_prepared_statements where strpos(statement, %s) > 0"
    assert conn.execute(by_name, (f"block_{to_come}",)).rowcount


@pytest.mark.conforms("P2", "P3")
@pytest.mark.parametrize("filter", ["#", "t", "other"])
def test_a_page_ends_before_a_hole(conn: Connection, stream: int, filter: str) -> None:
    for value in (b"a", b"b", b"c", b"d"):
        put(conn, stream, value)
    conn.execute("delete from block where end_offset = 3")
    page = fetch(conn, stream, 0, filter=TopicFilter(filter))
    assert (page.start, page.position, page.head) == (0, 2, 4)
    assert [row for batch in page.batches for row in batch["value"].to_pylist()] == [b"a", b"b"] * (filter != "other")
    with pytest.raises(PositionGone) as gone:
        fetch(conn, stream, page.position, filter=TopicFilter(filter))
    assert (gone.value.offset, gone.value.oldest) == (2, 3)
    assert values(read(conn, stream, 3)) == [b"d"]


@pytest.mark.conforms("P3", "W4")
def test_a_gone_generation_is_gone(conn: Connection, stream: int) -> None:
    put(conn, stream, b"a")
    rollover(conn, "default")
    conn.execute("update generation set state = 'gone' where state = 'closed'")
    for _ in range(2):
        with pytest.raises(PositionGone) as gone:
            fetch(conn, stream, 0)
        assert gone.value.oldest is None
        drop_gone(conn)
    assert fetch(conn, stream, 1).is_finished, "who had read all of it lost nothing"


def test_a_filter_skips_blocks_on_the_server(conn: Connection, stream: int) -> None:
    put(conn, stream, b"1", topic="a/x")
    put(conn, stream, b"2", topic="b")
    put(conn, stream, b"3", topic="a.x")
    append(
        conn, [BlockAppend(stream, block(*[b"4"] * 20, topic=[*["z"] * 10, *(f"a/{index}" for index in range(10))]))]
    )
    put(conn, stream, b"5", topic="b/c")
    page = fetch(conn, stream, 0, filter=TopicFilter("a/+"))
    found = [row for each in page.batches for row in each.to_pylist()]
    assert [row["offset"] for row in found] == [0, *range(13, 23)]
    assert page.position == page.head == 24
    none = fetch(conn, stream, 0, filter=TopicFilter("nothing/#"), limit_blocks=2)
    assert (none.batches, none.position) == ((), 2)


MANY_LETTERS = "".join(chr(0xA0 + number * 1_001 % 1_901) for number in range(1_900))


@pytest.mark.parametrize("text", ["+/" * 127 + "#", "/".join("+" * 128), "l" * 4_096, "+/" * 125 + MANY_LETTERS])
def test_filters_at_their_limits_work(conn: Connection, stream: int, text: str) -> None:
    """Within the time of a statement: the last one, as a pattern, takes Postgres much longer."""
    conn.execute("set statement_timeout = '5s'")
    meant = text.replace("+", "a").replace("#", "b")
    append(conn, [BlockAppend(stream, block(b"1", topic="other")), BlockAppend(stream, block(b"2", topic=meant))])
    page = fetch(conn, stream, 0, filter=TopicFilter(text))
    assert [row["value"] for batch in page.batches for row in batch.to_pylist()] == [b"2"]
    assert page.position == 2


@pytest.mark.conforms("P9")
def test_a_time_is_a_position_by_the_time_of_appending(conn: Connection, stream: int) -> None:
    put(conn, stream, b"a", b"b")
    row = conn.execute("select clock_timestamp()").fetchone()
    assert row is not None
    put(conn, stream, b"c")
    assert offset_at_time(conn, stream, datetime(2000, 1, 1, tzinfo=UTC)) == 0
    assert offset_at_time(conn, stream, row[0]) == 2
    assert offset_at_time(conn, stream, datetime(2200, 1, 1, tzinfo=UTC)) == 3


# --- together -------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("P7")
def test_a_rollback_leaves_no_hole(database: str, conn: Connection, stream: int) -> None:
    committed: list[list[bytes]] = [[] for _ in range(4)]
    finished = threading.Event()
    tails: list[list[dict[str, Any]]] = [[], []]
    writers = [threading.Thread(target=_write, args=(database, stream, n, committed[n])) for n in range(4)]
    readers = [threading.Thread(target=_tail, args=(database, stream, finished, tail)) for tail in tails]
    for thread in [*readers, *writers]:
        thread.start()
    for thread in writers:
        thread.join(60)
    finished.set()
    for thread in readers:
        thread.join(60)
    for seen in [*tails, read(conn, stream)]:
        assert [message["offset"] for message in seen] == list(range(sum(map(len, committed))))
        for number, mine in enumerate(committed):
            assert [value for value in values(seen) if value.startswith(b"%d:" % number)] == mine


@pytest.mark.conforms("P7")
def test_a_late_commit_is_read(database: str, stream: int) -> None:
    """Of two writers the first to write would be the last to commit; the append of the second waits for it."""
    with connect(database) as one, connect(database) as two, connect(database) as reader:
        with one.transaction():
            put(one, stream, b"first")
            second = threading.Thread(target=put, args=(two, stream, b"second"))
            second.start()
            eventually(lambda: waiting_for_locks(database))
            early = fetch(reader, stream, 0)
        second.join(30)
        assert (early.batches, early.position) == ((), 0)
        assert values(read(reader, stream, early.position)) == [b"first", b"second"]


def _write(database: str, stream: int, number: int, committed: list[bytes]) -> None:
    dice = random.Random(number)
    with connect(database) as conn:
        for index in range(150):
            sent = [b"%d:%d:%d" % (number, index, each) for each in range(dice.randint(1, 4))]
            with suppress(_Regret), conn.transaction():
                append(conn, [BlockAppend(stream, block(*sent), ProducerStamp(f"w{number}", 1, index + 1))])
                if dice.random() < 0.2:
                    raise _Regret
                conn.execute("select pg_sleep(%s)", (dice.random() / 500,))
            if conn.execute(
                "select 1 from producer where producer_id = %s and sequence = %s", (f"w{number}", index + 1)
            ).fetchone():
                committed += sent


def _tail(database: str, stream: int, finished: threading.Event, seen: list[dict[str, Any]]) -> None:
    position = 0
    with connect(database) as conn:
        while True:
            over = finished.is_set()
            page = fetch(conn, stream, position)
            seen += [row for each in page.batches for row in each.to_pylist()]
            if over and page.position == position:
                return
            position = page.position


class _Regret(Exception):
    """The writer rolls back."""


# --- what follows directly --------------------------------------------------------------------------------------------


@pytest.mark.conforms("P2", "P3")
@pytest.mark.parametrize("filter", [MATCH_ALL, TopicFilter("t/1")])
def test_little_that_follows_is_read_alike(conn: Connection, stream: int, filter: TopicFilter) -> None:
    chosen, generation = random.Random(27), generation_of(conn, stream)
    ends = [0]
    for count in (chosen.choice((1, 1, 2, 70)) for _ in range(2 * NEXT_BLOCKS)):
        ends.append(put(conn, stream, *(b"%d" % number for number in range(count)), topic=f"t/{count}"))
    found = {offset: fetch_next(conn, stream, offset, generation, filter) for offset in range(ends[-1] + 1)}
    for offset, page in found.items():
        assert page is None or page == fetch(conn, stream, offset, filter=filter)
    assert [offset for offset, page in found.items() if page is not None] == ends[-NEXT_BLOCKS:-1]


@pytest.mark.conforms("P2", "P3")
def test_all_else_that_follows_is_for_the_other_read(conn: Connection, stream: int) -> None:
    generation = generation_of(conn, stream)
    next_page = partial(fetch_next, conn, stream, generation_id=generation)
    assert next_page(offset=0) is None, "there is nothing"
    assert next_page(offset=0, may_be_empty=True) == fetch(conn, stream, 0)
    put(conn, stream, b"0", b"1")
    assert next_page(offset=0, may_be_empty=True) == fetch(conn, stream, 0)
    assert next_page(offset=1) is None, "it begins in a block"
    assert next_page(offset=7) is None, "it is beyond the head"
    put(conn, stream, bytes(NEXT_BLOCK_BYTES))
    assert next_page(offset=2) is None, "it is large"
    assert next_page(offset=0) is None, "what comes behind it is large"
    put(conn, stream, b"3")
    conn.execute("update block set payload = '' where end_offset = 4")
    with pytest.raises(PoisonBlock, match="begins at offset 3 "):
        next_page(offset=3)
    assert fetch(conn, stream, 0).position == 3, "a page ends before it"
    conn.execute("delete from block where end_offset <= 3")
    assert next_page(offset=0) is None, "there is a hole"
    conn.execute("update block set uri = 'elsewhere', uri_bytes = 1, payload = null where end_offset = 4")
    assert next_page(offset=3) is None, "it is not here"


def test_a_tail_from_the_end_has_open_streams_alone(conn: Connection) -> None:
    """Of a closed one nothing is left to read."""
    put(conn, open_streams(conn)[0].stream_id, b"x")
    rollover(conn, "default")
    assert Tail(conn, TopicFilter("#")).bookmark.offsets.keys() == {each.stream_id for each in open_streams(conn)}
