"""Several blocks in one call: the same is stored and answered as if they were appended one by one."""

from __future__ import annotations

from datetime import UTC, datetime
from itertools import count
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, event, example, given, settings
from hypothesis import strategies as st
from msgspec import Struct

from sublet_storage.groups.coordinator.lending_statements import query_facts
from sublet_storage.log.append import UNNAMED, AppendOutcome, AppendResult, BlockAppend, ProducerStamp, append
from sublet_storage.log.fetch import fetch, offset_at_time, read_heads
from sublet_storage.notify.catch_up_reads import read_streams
from tests.integration.log_kit import Connection, beside_an_open_transaction, block, count_page_reads, in_epochs
from tests.support.streams import open_streams

STORED = (
    "select generation_id, stream_id, end_offset, count, first_timestamp, last_timestamp, topics, lower_frontier,"
    " epoch_bounds, codec, payload from block order by 1, 2, 3",
    "select producer_id, stream_id, incarnation, sequence, end_offset, rejected from producer order by 1, 2",
    "select stream_id, head, upper_frontier from stream order by 1",
)
BYTES = bytes(block(b"x").payload)
TOPICS = [["t"], ["eu/a", "line\nbreak"], [f"t/{number}" for number in range(9)]]


class Sent(Struct, frozen=True):
    """A block of a batch, by the number of its stream; `sequence` 0 is without a stamp."""

    stream: int
    sequence: int
    topics: int = 0
    in_epoch: bool = False
    incarnation: int = 2

    def to_append(self, streams: list[int], row: int) -> BlockAppend:
        values = [b"%d" % (row + number) for number in range(len(TOPICS[self.topics]))]
        packed = in_epochs((row,)) if self.in_epoch else block(*values, topic=TOPICS[self.topics])
        stamp = ProducerStamp("p", self.incarnation, self.sequence) if self.sequence else None
        return BlockAppend(streams[self.stream], packed, stamp)


SENT = st.builds(Sent, st.integers(0, 1), st.integers(0, 5), st.integers(0, 2))
UNUSUAL = st.builds(Sent, st.integers(0, 1), st.integers(0, 5), st.integers(0, 2), st.booleans(), st.integers(1, 3))
BATCH = st.lists(st.one_of(SENT, UNUSUAL), min_size=2, max_size=5)
USUAL = [Sent(0, 2), Sent(0, 3, 1), Sent(1, 2, 2)]
FIRST = [Sent(0, 1), Sent(1, 1)]


def outcome_of(conn: Connection, appends: list[BlockAppend], *, together: bool) -> tuple[list[AppendResult], list[Any]]:
    """What is answered, and stored, which is rolled back."""
    with conn.transaction(force_rollback=True):
        answers = append(conn, appends) if together else one_by_one(conn, appends)
        return answers, [conn.execute(query).fetchall() for query in STORED]


def one_by_one(conn: Connection, appends: list[BlockAppend]) -> list[AppendResult]:
    answers = {
        each: append(conn, [appends[each]])
        for each in sorted(range(len(appends)), key=lambda each: appends[each].stream_id)
    }
    return [answers[each][0] for each in range(len(appends))]


@pytest.mark.conforms("W1", "W2")
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(BATCH, min_size=1, max_size=3), st.sets(st.sampled_from(["closed", "fenced"])))
@example([FIRST, USUAL], set())
@example([FIRST, USUAL, USUAL], set())
@example([FIRST, FIRST], set())
@example([FIRST, [*USUAL[::-1], Sent(1, 1)]], set())
@example([FIRST, [Sent(0, 2), Sent(0, 2), Sent(1, 2)]], set())
@example([FIRST, [Sent(0, 2, incarnation=3), Sent(1, 2, incarnation=3)]], set())
@example([FIRST, [Sent(0, 2, incarnation=1), Sent(1, 2, incarnation=1)]], set())
@example([FIRST, USUAL], {"closed"})
@example([FIRST, USUAL], {"fenced"})
@example([FIRST, [*USUAL, Sent(1, 3, in_epoch=True)]], set())
@example([[Sent(0, 0), Sent(1, 0), Sent(1, 0, 1)]], set())
def test_together_is_as_one_by_one(conn: Connection, batches: list[list[Sent]], before_last: set[str]) -> None:
    streams = [each.stream_id for each in open_streams(conn)]
    with conn.transaction(force_rollback=True):
        for number, sent in enumerate(batches):
            if number == len(batches) - 1:
                if "closed" in before_last:
                    conn.execute("update stream set state = 'closed' where stream_id = %s", (streams[0],))
                if "fenced" in before_last:
                    conn.execute("select register_producer('p')")
            appends = [each.to_append(streams, 10 * row) for row, each in enumerate(sent)]
            assert outcome_of(conn, appends, together=True) == outcome_of(conn, appends, together=False)
            event(" ".join(sorted({each.outcome for each in append(conn, appends)})))


@pytest.mark.conforms("W1")
@pytest.mark.parametrize("is_first", [True, False])
def test_one_that_is_invalid_stores_none(conn: Connection, is_first: bool) -> None:
    streams = [each.stream_id for each in open_streams(conn)]
    if not is_first:
        append(conn, [each.to_append(streams, 0) for each in FIRST])
    stored = [conn.execute(query).fetchall() for query in STORED]
    bad, good = (block(b"x", topic=topic) for topic in ("$reserved", "t"))
    with pytest.raises(psycopg.Error, match="reserved"):
        append(
            conn,
            [
                BlockAppend(stream, packed, ProducerStamp("p", 2, 2))
                for stream, packed in zip(streams, (good, bad), strict=True)
            ],
        )
    assert [conn.execute(query).fetchall() for query in STORED] == stored


@pytest.mark.parametrize(
    ("counts", "payloads", "error"),
    [
        ([1, None], [BYTES, BYTES], "count null: a block has 1 to 100000"),
        ([1], [BYTES, BYTES], "count null: a block has 1 to 100000"),
        ([1, 1], [BYTES, None], "payload of no bytes"),
        ([1, 1], [BYTES, b"short"], "payload of 5 bytes"),
    ],
)
def test_a_value_that_is_missing_is_named(
    conn: Connection, counts: list[int | None], payloads: list[bytes | None], error: str
) -> None:
    streams = [each.stream_id for each in open_streams(conn)]
    times = [datetime(2026, 1, 1, tzinfo=UTC)] * 2
    call = "select append_blocks(null, 0, null, %s, %s::integer[], %s, %s, null, '{0, 0}', %s::bytea[], null)"
    with pytest.raises(psycopg.DatabaseError, match=error):
        conn.execute(call, (streams, counts, times, times, payloads))
    assert conn.execute("select count(*) from block").fetchone() == (0,)


@pytest.mark.conforms("W2")
def test_a_page_of_streams_is_one_call(conn: Connection) -> None:
    """Each with its own messages, in time order within a stream."""
    streams = [each.stream_id for each in open_streams(conn)]
    for sequence in (1, 3):
        stamps = [ProducerStamp("p", 2, sequence), ProducerStamp("p", 2, sequence + 1)]
        appends = [BlockAppend(stream, block(b"%d" % stream), stamp) for stamp in stamps for stream in streams]
        answers = append(conn, appends)
        assert {each.outcome for each in answers} == {AppendOutcome.APPENDED}
        assert [each.end_offset for each in answers] == [sequence] * len(streams) + [sequence + 1] * len(streams)
    times = conn.execute("select array_agg(appended_at order by end_offset) from block group by stream_id").fetchall()
    assert all(each == sorted(each) for (each,) in times)


@pytest.mark.conforms("X4")
@pytest.mark.parametrize("first_step_last", [(1, 1, 1_100), (10**9, -1, 10**9 - 1_100), (10**9, -3, 10**9 - 3_300)])
def test_few_rejections_of_a_producer_are_stored(conn: Connection, first_step_last: tuple[int, int, int]) -> None:
    """Whatever numbers it gives its blocks: each call reads and writes them all. The last one is among them."""
    first, step, last = first_step_last
    with conn.transaction(force_rollback=True):
        conn.execute(
            "insert into producer (producer_id, stream_id, incarnation, sequence, end_offset, rejected)"
            " select 'p', 7, 1, 0, 0, jsonb_object_agg('1:' || n, 'expired')"
            " from generate_series(%s::bigint, %s, %s) as n",
            (first, first + 999 * step, step),
        )
        conn.execute(
            "select record_rejection('p', 1, n, 7, 'expired') from generate_series(%s::bigint, %s, %s) as n",
            (first + 1_000 * step, last, step),
        )
        ((rejected,),) = conn.execute("select rejected from producer where producer_id = 'p'").fetchall()
    assert len(rejected) == 1_000
    assert rejected[f"1:{last}"] == "expired"


@pytest.mark.conforms("X4")
@pytest.mark.parametrize(("first", "stored"), [(1, {"1:1001"}), (2, {"1:2", "1:1001"})])
def test_an_old_rejection_is_forgotten(conn: Connection, first: int, stored: set[str]) -> None:
    """Also where there are few: the thousand last numbers are remembered."""
    with conn.transaction(force_rollback=True):
        conn.execute(
            "insert into producer (producer_id, stream_id, incarnation, sequence, end_offset) values ('p', 7, 1, 0, 0)"
        )
        for sequence in (first, 1_001):
            conn.execute("select record_rejection('p', 1, %s, 7, 'expired')", (sequence,))
        ((rejected,),) = conn.execute("select rejected from producer where producer_id = 'p'").fetchall()
    assert rejected.keys() == stored


@pytest.mark.parametrize("streams", [1, 2])
def test_an_open_transaction_costs_appends_little(database: str, conn: Connection, streams: int) -> None:
    """It keeps a version of the stream and of the producer for each append; an append does not read them all."""
    ids = [stream.stream_id for stream in open_streams(conn)][:streams]
    assert len(ids) == streams
    sequence = count(1)

    def append_next() -> None:
        number = next(sequence)
        append(conn, [BlockAppend(stream, block(b"x"), ProducerStamp("p", UNNAMED, number)) for stream in ids])

    with beside_an_open_transaction(database, conn, append_next) as (first, last):
        assert last <= 1.5 * first
        reads = [
            lambda: read_heads(conn, ids),
            lambda: read_streams(conn, ids),
            lambda: query_facts(conn, ids),
            lambda: offset_at_time(conn, ids[0], datetime(2020, 1, 1, tzinfo=UTC)),
            lambda: fetch(conn, ids[0], 0, limit_blocks=1),
        ]
        for read in reads:
            assert count_page_reads(conn, read) <= first
