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

from sublet_protocol.domain.epoch_frontiers import Epoch
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.lending_statements import query_facts
from sublet_storage.log.append import (
    UNNAMED,
    AppendOutcome,
    AppendResult,
    BlockAppend,
    ProducerIdentity,
    ProducerStamp,
    append,
    register_producer,
)
from sublet_storage.log.epoch_leases import hold
from sublet_storage.log.fetch import fetch, offset_at_time, read_heads
from sublet_storage.notify.catch_up_reads import read_streams
from sublet_storage.spaces.space_changes import create_space
from sublet_storage.spaces.space_queries import find_space
from tests.integration.log_kit import (
    Connection,
    beside_an_open_transaction,
    block,
    count_page_reads,
    in_epochs,
    stream_of,
)
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
IN_EPOCHS = [Sent(0, 3, in_epoch=True), Sent(0, 4), Sent(1, 3, in_epoch=True), Sent(1, 4, in_epoch=True)]


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
@given(st.lists(BATCH, min_size=1, max_size=3), st.sets(st.sampled_from(["closed", "fenced", "holding", "expired"])))
@example([FIRST, USUAL], set())
@example([FIRST, USUAL, USUAL], set())
@example([FIRST, FIRST], set())
@example([FIRST, [*USUAL[::-1], Sent(1, 1)]], set())
@example([FIRST, [Sent(0, 2), Sent(0, 2), Sent(1, 2)]], set())
@example([FIRST, [Sent(0, 2, incarnation=3), Sent(1, 2, incarnation=3)]], set())
@example([FIRST, [Sent(0, 2, incarnation=1), Sent(1, 2, incarnation=1)]], set())
@example([FIRST, [Sent(0, 2), Sent(1, 2, incarnation=3)]], set())
@example([FIRST, USUAL], {"closed"})
@example([FIRST, USUAL], {"fenced"})
@example([FIRST, [*USUAL, Sent(1, 3, in_epoch=True)]], set())
@example([[Sent(0, 0), Sent(1, 0), Sent(1, 0, 1)]], set())
@example([FIRST, [Sent(0, 2), *IN_EPOCHS], [Sent(0, 9, in_epoch=True), *IN_EPOCHS]], {"holding"})
@example([FIRST, [*IN_EPOCHS, Sent(0, 9), Sent(0, 10, in_epoch=True)]], {"holding"})
@example([FIRST, [Sent(0, 2), *IN_EPOCHS], [Sent(0, 9), Sent(1, 9, in_epoch=True)]], {"holding"})
@example([FIRST, [Sent(0, 2), *IN_EPOCHS]], {"holding", "closed"})
@example([FIRST, [Sent(0, 2), *IN_EPOCHS]], {"holding", "expired"})
@example([FIRST, [Sent(0, 2, incarnation=3), Sent(1, 3, in_epoch=True, incarnation=3)]], {"holding"})
def test_together_is_as_one_by_one(conn: Connection, batches: list[list[Sent]], states: set[str]) -> None:
    """`states` before the last batch; what is held is held from the beginning, from the epoch of a second block on."""
    streams = [each.stream_id for each in open_streams(conn)]
    with conn.transaction(force_rollback=True):
        for other in "oq":
            append(conn, [BlockAppend(stream, block(b"x"), ProducerStamp(other, 2, 1)) for stream in streams])
        if "holding" in states:
            hold(conn, find_space(conn, "default").space_id, ProducerIdentity("p", 2), [(10,)])
        for number, sent in enumerate(batches):
            if number == len(batches) - 1:
                if "closed" in states:
                    conn.execute("update stream set state = 'closed' where stream_id = %s", (streams[0],))
                if "expired" in states:
                    conn.execute("update capability set expired_at = clock_timestamp()")
                if "fenced" in states:
                    conn.execute("select register_producer('p')")
            appends = [each.to_append(streams, 10 * row) for row, each in enumerate(sent)]
            assert outcome_of(conn, appends, together=True) == outcome_of(conn, appends, together=False)
            event(" ".join(sorted({each.outcome for each in append(conn, appends)})))


@pytest.mark.conforms("S9")
def test_epochs_of_another_space_let_nothing_in(conn: Connection) -> None:
    """Though it has as many streams as are appended to."""
    create_space(conn, "other", "other/#", shards=2)
    other = find_space(conn, "other").space_id
    streams = [each.stream_id for each in open_streams(conn) if each.space_id != other]
    hold(conn, other, ProducerIdentity("p", 2), [(0,)])
    append(conn, [each.to_append(streams, 0) for each in FIRST])
    sent = [Sent(0, 2, in_epoch=True), Sent(1, 2, in_epoch=True)]
    appends = [each.to_append(streams, row) for row, each in enumerate(sent)]
    expected = outcome_of(conn, appends, together=False)
    assert {each.outcome for each in expected[0]} == {AppendOutcome.EXPIRED}
    assert outcome_of(conn, appends, together=True) == expected


@pytest.mark.conforms("W2", "S9")
def test_one_block_is_judged_by_its_own_rows(conn: Connection) -> None:
    """`append_block` and `append_blocks` look at no other producer, incarnation, stream or space; and what was refused
    stays refused."""
    create_space(conn, "other", "other/#", shards=1)
    here, there = (find_space(conn, name).space_id for name in ("default", "other"))
    elsewhere = stream_of(conn, "other")
    first, second = (each.stream_id for each in open_streams(conn) if each.stream_id != elsewhere)
    old, new = ProducerIdentity("p", 1), ProducerIdentity("p", 2)

    def send(who: ProducerIdentity, sequence: int, *epochs: Epoch, stream: int = first) -> tuple[str, int | None]:
        stamp = ProducerStamp(who.producer_id, who.incarnation, sequence)
        (answer,) = append(conn, [BlockAppend(stream, in_epochs(*epochs) if epochs else block(b"x"), stamp)])
        return answer.outcome.value, answer.end_offset

    # producers, their incarnations and streams
    assert [send(ProducerIdentity(name, 1), 9) for name in "oq"] == [("appended", 1), ("appended", 2)]
    assert [send(old, 1), send(old, 5, stream=second), send(old, 2)] == [("appended", n) for n in (3, 1, 4)]
    assert [send(old, 2), send(old, 1)] == [("duplicate", 4), ("duplicate", None)]
    assert send(new, 1, stream=second) == ("appended", 2)
    assert [send(old, 9, stream=second), send(old, 3)] == [("fenced", None), ("appended", 5)]
    hold(conn, here, old, [(0,)])
    newest = ProducerIdentity("p", register_producer(conn, "p"))
    for other in "oq":
        register_producer(conn, other)
    assert [send(old, 4), send(newest, 1), send(newest, 1)] == [("fenced", None), ("appended", 6), ("duplicate", 6)]
    # epochs
    assert send(newest, 2, (3,)) == ("expired", None), "what an earlier incarnation holds is not its own"
    hold(conn, there, newest, [(2,)])
    hold(conn, here, ProducerIdentity("r", newest.incarnation), [(0,)])
    conn.execute("delete from capability where producer_id = 'p' and space_id = %s", (here,))
    assert send(newest, 3, (3,)) == ("expired", None), "neither is what others hold, or the same one elsewhere"
    hold(conn, here, newest, [(3,)])
    assert [send(newest, 4, (3,)), send(newest, 5, (2,))] == [("appended", 7), ("completed", None)]
    assert [send(newest, 6), send(newest, 5, (2,)), send(newest, 6)] == [
        ("appended", 8),
        ("completed", None),
        ("duplicate", 8),
    ]
    conn.execute("update capability set expired_at = now() where producer_id = 'p' and space_id = %s", (here,))
    assert send(newest, 7, (9,)) == ("expired", None)
    # spaces
    assert [send(newest, 1, stream=second), send(newest, 1, stream=elsewhere)] == [("appended", 3), ("appended", 1)]
    stamp = ProducerStamp("p", newest.incarnation, 2)
    append(conn, [BlockAppend(stream, block(b"x"), stamp) for stream in (second, elsewhere)])
    stored = conn.execute(
        "select stream_id, end_offset, lower_frontier from block where (stream_id, end_offset) in"
        " ((%(here)s, 3), (%(here)s, 4), (%(there)s, 1), (%(there)s, 2)) order by lower_frontier, end_offset",
        {"here": second, "there": elsewhere},
    ).fetchall()
    assert stored == [(second, 3, [[0]]), (second, 4, [[0]]), (elsewhere, 1, [[2]]), (elsewhere, 2, [[2]])]
    conn.execute("update stream set state = 'closed' where stream_id = %s", (first,))
    assert [send(newest, 8), send(newest, 6)] == [("closed", None), ("duplicate", 8)]
    assert send(newest, 3, stream=second) == ("appended", 5)


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
def test_a_page_of_streams_is_one_call(database: str, conn: Connection) -> None:
    """Each with its own messages, in time order within a stream; one block, or large ones, are not."""
    streams = [each.stream_id for each in open_streams(conn)]
    for sequence in (1, 3):
        stamps = [ProducerStamp("p", 2, sequence), ProducerStamp("p", 2, sequence + 1)]
        appends = [BlockAppend(stream, block(b"%d" % stream), stamp) for stamp in stamps for stream in streams]
        answers = append(conn, appends)
        assert {each.outcome for each in answers} == {AppendOutcome.APPENDED}
        assert [each.end_offset for each in answers] == [sequence] * len(streams) + [sequence + 1] * len(streams)
    times = conn.execute("select array_agg(appended_at order by end_offset) from block group by stream_id").fetchall()
    assert all(each == sorted(each) for (each,) in times)
    for count_of, size, call in ((2, 1, "append_blocks"), (1, 1, "append_block"), (2, 1 << 18, "append_block")):
        with connect(database) as other:
            stamps = [ProducerStamp(f"{count_of} {size}", 2, sequence) for sequence in (1, 2)]
            appends = [
                BlockAppend(*each) for each in zip(streams, [block(bytes(size))] * count_of, stamps, strict=False)
            ]
            append(other, appends)
            calls = "select distinct substring(statement from 'append_blocks?') from pg_prepared_statements"
            assert other.execute(f"{calls} where statement like '%append_block%'").fetchall() == [(call,)]


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
    """Also where there are few: the thousand last numbers of this incarnation, producer and stream are remembered."""
    with conn.transaction(force_rollback=True):
        conn.execute(
            "insert into producer (producer_id, stream_id, incarnation, sequence, end_offset, rejected)"
            ' select name, stream, 1, 0, 0, \'{"0:5000": "expired"}\''
            " from unnest('{p,p,o,q}'::text[], '{7,8,7,7}'::bigint[]) as u (name, stream)"
        )
        for sequence in (first, 1_001):
            conn.execute("select record_rejection('p', 1, %s, 7, 'expired')", (sequence,))
        (rejected,), *others = conn.execute(
            "select rejected from producer order by (producer_id, stream_id) <> ('p', 7)"
        ).fetchall()
    assert rejected.keys() == stored
    assert others == [({"0:5000": "expired"},)] * 3


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
