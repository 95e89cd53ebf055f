"""Compaction changes blocks, and nothing that anybody can see of them."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pyarrow as pa
import pytest
from msgspec.structs import replace

from sublet_protocol.domain.errors import PoisonBlock, StaleTerm, ValueTooLarge
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.log.append import BlockAppend, ProducerStamp, append
from sublet_storage.log.block_encoder import pack
from sublet_storage.log.fetch import fetch
from sublet_storage.spaces import small_block_compaction
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.small_block_compaction import (
    CompactionProgress,
    compact_stream,
    list_newly_fragmented,
)
from sublet_storage.spaces.space_changes import alter_space, rollover
from tests.integration.log_kit import Connection, block, in_epochs, put, read, stamped
from tests.support.streams import open_streams

pytestmark = pytest.mark.shards(1)


@pytest.fixture
def stream(conn: Connection) -> int:
    return open_streams(conn)[0].stream_id


def blocks(conn: Connection) -> list[tuple[int, int]]:
    return conn.execute("select end_offset, count from block order by end_offset").fetchall()


def trickle(conn: Connection, stream: int, count: int) -> None:
    for index in range(count):
        put(conn, stream, b"%d" % index, topic=f"t/{index % 3}")


@pytest.mark.conforms("W5")
def test_offsets_content_and_order_stay(conn: Connection, stream: int) -> None:
    trickle(conn, stream, 50)
    append(conn, [BlockAppend(stream, block(*[b"big"] * 700)), BlockAppend(stream, block(b"a", b"b"))])
    trickle(conn, stream, 20)
    before = read(conn, stream)
    filtered = read(conn, stream, filter=TopicFilter("t/1"))
    assert compact_stream(conn, stream, older_than_s=0, block_messages=30) == 50 - 2 + 21 - 1
    assert blocks(conn) == [(30, 30), (50, 20), (750, 700), (772, 22)]
    assert read(conn, stream) == before
    assert read(conn, stream, filter=TopicFilter("t/1")) == filtered
    for offset in (1, 29, 30, 31, 49, 50, 51, 749, 751, 771, 772):
        assert read(conn, stream, offset) == before[offset:]
    assert compact_stream(conn, stream, older_than_s=0, block_messages=30) == 0


@pytest.mark.conforms("W5")
def test_readers_in_the_middle_do_not_notice(database: str, conn: Connection, stream: int) -> None:
    seen: list[list[dict[str, Any]]] = [[], []]
    done = threading.Event()

    def tail(mine: list[dict[str, Any]]) -> None:
        position = 0
        with connect(database) as other:
            while not (done.is_set() and position == 600):
                page = fetch(other, stream, position, limit_blocks=1)
                for batch in page.batches:
                    for row in batch.slice(0, 7).to_pylist():
                        mine.append(row)
                        position = row["offset"] + 1

    threads = [threading.Thread(target=tail, args=(mine,)) for mine in seen]
    for thread in threads:
        thread.start()
    for _ in range(12):
        trickle(conn, stream, 50)
        compact_stream(conn, stream, older_than_s=0, block_messages=200)
    done.set()
    for thread in threads:
        thread.join(30)
    entire = read(conn, stream)
    assert len(entire) == 600
    assert seen == [entire, entire]
    assert len(blocks(conn)) < 50


def test_young_blocks_and_other_frontiers_stay_apart(conn: Connection, stream: int) -> None:
    trickle(conn, stream, 4)
    assert compact_stream(conn, stream, older_than_s=3600) == 0
    conn.execute("update block set lower_frontier = '[5]' where end_offset > 2")
    compact_stream(conn, stream, older_than_s=0)
    assert blocks(conn) == [(2, 2), (4, 2)]
    found = conn.execute("select lower_frontier from block order by end_offset").fetchall()
    assert found == [(None,), ([5],)]


def test_large_frontiers_are_not_read_of_each_block(conn: Connection, stream: int) -> None:
    """They may be as large as what they stand beside is small: 112 blocks of a message took 4 GiB of a node."""
    trickle(conn, stream, 100)
    large = "(select jsonb_agg(jsonb_build_array(n, -n)) from generate_series(1, 1000) n)"
    conn.execute(f"update block set lower_frontier = {large}")
    tracemalloc.start()
    try:
        assert compact_stream(conn, stream, older_than_s=0) == 99
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    ((merged, size),) = conn.execute(f"select lower_frontier = {large}, octet_length(lower_frontier::text) from block")
    assert merged
    assert peak < 50 * size


def test_times_and_stamps_are_found_afterwards(conn: Connection, stream: int) -> None:
    for sequence in range(1, 4):
        append(conn, [stamped(stream, ProducerStamp("p", 1, sequence), b"x")])
    newest = conn.execute("select max(appended_at) from block").fetchone()
    compact_stream(conn, stream, older_than_s=0)
    assert conn.execute("select appended_at from block").fetchall() == [newest]
    assert append(conn, [stamped(stream, ProducerStamp("p", 1, 3), b"x")])[0].end_offset == 3


def test_pieces_of_one_time_need_no_times(conn: Connection, stream: int) -> None:
    """The block's own is theirs."""
    trickle(conn, stream, 3)
    conn.execute("update block set appended_at = now() - interval '1 min'")
    assert compact_stream(conn, stream, older_than_s=0) == 2
    assert conn.execute("select piece_starts, piece_times from block").fetchall() == [(None, None)]


@pytest.mark.conforms("W5")
@pytest.mark.shards(2)
def test_other_streams_keep_their_blocks(conn: Connection) -> None:
    """Which have the same offsets, in one generation. Those of each are found when it has new ones, and once."""
    first, second = (each.stream_id for each in open_streams(conn))
    trickle(conn, first, 20)
    trickle(conn, second, 15)
    read_before = [read(conn, each) for each in (first, second)]
    assert list_newly_fragmented(conn, at_least=15, older_than_s=0) == [first, second]
    newly = partial(list_newly_fragmented, conn, progress=CompactionProgress())
    assert newly(at_least=16, older_than_s=0) == [first]
    assert compact_stream(conn, first, older_than_s=0) == 19
    counted = "select stream_id, count(*), max(end_offset) from block group by 1 order by 1"
    assert conn.execute(counted).fetchall() == [(first, 1, 20), (second, 15, 15)]
    assert [read(conn, each) for each in (first, second)] == read_before
    assert newly(at_least=2, older_than_s=0) == [], "the second was looked at before"
    put(conn, second, b"one more")
    assert newly(at_least=2, older_than_s=3600) == []
    assert newly(at_least=2, older_than_s=0) == [second]


@pytest.mark.parametrize("is_far_apart", [False, True])
def test_blocks_are_merged_up_to_their_age_and_place(conn: Connection, stream: int, is_far_apart: bool) -> None:
    """What is stored elsewhere stays apart."""
    trickle(conn, stream, 6)
    if is_far_apart:
        conn.execute("update block set payload = null, uri = 'file:///x', uri_bytes = 1 where end_offset = 3")
    else:
        conn.execute("update block set appended_at = appended_at - interval '1 h' where end_offset < 4")
    assert compact_stream(conn, stream, older_than_s=0 if is_far_apart else 60) == (3 if is_far_apart else 2)
    assert blocks(conn) == ([(2, 2), (3, 1), (6, 3)] if is_far_apart else [(3, 3), (4, 1), (5, 1), (6, 1)])


def test_the_spaces_compression_is_used(conn: Connection, stream: int) -> None:
    trickle(conn, stream, 200)
    alter_space(conn, "default", compression="zstd")
    before = read(conn, stream)
    compact_stream(conn, stream, older_than_s=0)
    codecs = {row[0] & 3 for row in conn.execute("select codec from block")}
    assert codecs == {2}
    assert read(conn, stream) == before


def test_fragmented_streams_are_found(conn: Connection, stream: int) -> None:
    """And compaction merges no blocks of a stream whose generation is gone."""
    trickle(conn, stream, 20)
    assert list_newly_fragmented(conn, at_least=21, older_than_s=0) == []
    assert list_newly_fragmented(conn, at_least=20, older_than_s=0) == [stream]
    alter_space(conn, "default", retention_s=1)
    rollover(conn, "default")
    conn.execute("update generation set closed_at = closed_at - interval '1 h' where state = 'closed'")
    apply_retention(conn)
    assert list_newly_fragmented(conn, at_least=1, older_than_s=0) == []
    assert compact_stream(conn, stream, older_than_s=0) == 0


@pytest.mark.parametrize("kind", ["large", "far apart", "of different epochs"])
def test_what_cannot_be_merged_is_not_looked_at(conn: Connection, stream: int, kind: str) -> None:
    if kind == "large":
        for _ in range(30):
            put(conn, stream, b"x" * 300_000)
    else:
        for _ in range(20):
            put(conn, stream, b"x")
            if kind == "far apart":
                append(conn, [BlockAppend(stream, block(*[b"big"] * 800))])
    if kind == "of different epochs":
        bounds = "least", "greatest"
        ends = ", ".join(f"'{name}', jsonb_build_array(jsonb_build_array(end_offset))" for name in bounds)
        conn.execute(f"update block set epoch_bounds = jsonb_build_object({ends}, 'has_unset', false)")
    before = blocks(conn)
    assert list_newly_fragmented(conn, at_least=10, older_than_s=0) == []
    assert compact_stream(conn, stream, older_than_s=0) == 0
    assert blocks(conn) == before
    trickle(conn, stream, 9)
    assert list_newly_fragmented(conn, at_least=9, older_than_s=0) == [stream]
    assert compact_stream(conn, stream, older_than_s=0) > 0
    assert list_newly_fragmented(conn, at_least=2, older_than_s=0) == []


@pytest.mark.conforms("W5", "X7")
def test_epochs_that_a_row_does_not_have_stay_alone(conn: Connection, stream: int) -> None:
    """Merged, such a block would keep all messages beside it from being decoded."""
    trickle(conn, stream, 5)
    for epochs in ([(7,)], [(7, 8)]):
        append(conn, [BlockAppend(stream, replace(in_epochs(*epochs), epochs=None))])
    trickle(conn, stream, 5)
    with pytest.raises(PoisonBlock):
        compact_stream(conn, stream, older_than_s=0)
    assert blocks(conn) == [(5, 5), (6, 1), (7, 1), (12, 5)]


@pytest.mark.conforms("W5", "X7")
def test_a_pass_that_ends_early_is_gone_on_with(conn: Connection, stream: int) -> None:
    """What cannot be decoded is tried once, and the stream not listed again for it."""
    append(conn, [BlockAppend(stream, replace(block(b"x"), codec=3))] * 10)
    trickle(conn, stream, 30)
    before, progress = read(conn, stream, 10), CompactionProgress()
    compact = partial(compact_stream, conn, stream, older_than_s=0, block_messages=10, progress=progress)
    with pytest.raises(PoisonBlock):
        compact(most_s=0)
    assert list_newly_fragmented(conn, at_least=30, older_than_s=0) == [stream]
    for upto, is_unfinished in ((20, True), (30, True), (40, False)):
        assert compact(most_s=0) == 9
        merged, single = range(20, upto + 1, 10), range(upto + 1, 41)
        assert blocks(conn)[10:] == [*((end, 10) for end in merged), *((end, 1) for end in single)]
        assert list(progress.unfinished) == [stream] * is_unfinished
    assert compact() == 0
    assert read(conn, stream, 10) == before
    assert list_newly_fragmented(conn, at_least=1, older_than_s=0) == []


def store(conn: Connection, stream: int, ends: Iterable[int], count: int) -> None:
    """Store blocks of so many messages at once, which nobody decodes."""
    given = list(ends)
    conn.execute(
        "insert into block"
        " (generation_id, stream_id, end_offset, count, first_timestamp, last_timestamp, codec, payload)"
        " select generation_id, stream_id, unnest(%s::bigint[]), %s, now(), now(), 0, 'x' from stream"
        " where stream_id = %s",
        (given, count, stream),
    )
    conn.execute("update stream set head = %s where stream_id = %s", (given[-1], stream))
    conn.execute("analyze block")


def count_rows_read(conn: Connection, work: Callable[[], object]) -> int:
    """Return how many rows of blocks the work reads."""
    counts = []
    for act in (lambda: None, work):
        act()
        conn.execute("select pg_stat_force_next_flush()")
        counts += conn.execute(
            "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0)) from pg_stat_user_tables where relname ~ '^block_'"
        ).fetchall()
    return int(counts[1][0] - counts[0][0])


def test_what_was_seen_is_not_read_again(conn: Connection, stream: int) -> None:
    """A space without a rollover has all blocks that ever were in one generation."""
    costs, progress, head = list[int](), CompactionProgress(), 0
    newly = partial(list_newly_fragmented, conn, older_than_s=0, progress=progress)
    compact = partial(compact_stream, conn, stream, older_than_s=0, progress=progress)
    for count in (10, 2000):
        store(conn, stream, range(head + 600, head + 600 * count + 1, 600), 600)
        compact()
        trickle(conn, stream, 99)
        costs.append(count_rows_read(conn, newly))
        put(conn, stream, b"x")
        assert newly() == [stream]
        costs.append(count_rows_read(conn, compact))
        head = blocks(conn)[-1][0]
        assert blocks(conn)[-1] == (head, 100)
    assert costs[2] <= costs[0] + 20, costs
    assert costs[3] <= costs[1] + 20, costs


def test_what_has_nothing_to_merge_is_looked_at_once(conn: Connection, stream: int) -> None:
    newly = partial(list_newly_fragmented, conn, older_than_s=0, progress=CompactionProgress())
    store(conn, stream, range(600, 600 * 1000 + 1, 600), 600)
    assert newly() == []
    put(conn, stream, b"x")
    assert count_rows_read(conn, newly) < 10


def test_a_stream_is_looked_at_once_in_a_while(conn: Connection, stream: int) -> None:
    progress = CompactionProgress()
    store(conn, stream, range(600, 600 * 900 + 1, 600), 600)
    newly = partial(list_newly_fragmented, conn, progress=progress)
    assert newly(older_than_s=0) == []
    put(conn, stream, b"x")
    assert count_rows_read(conn, partial(newly, older_than_s=3600)) < 10
    assert count_rows_read(conn, partial(newly, older_than_s=0)) > 900


def test_unfinished_streams_take_turns(conn: Connection, stream: int) -> None:
    progress = CompactionProgress({stream: None, stream + 1: None})
    trickle(conn, stream, 30)
    compact_stream(conn, stream, older_than_s=0, block_messages=10, most_s=0, progress=progress)
    assert list(progress.unfinished) == [stream + 1, stream]
    list_newly_fragmented(conn, progress=progress)
    assert list(progress.unfinished) == [stream], "of the other nothing is to be done"


def test_a_run_too_large_when_joined_is_cut(conn: Connection, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns with nulls have more of Arrow's buffers than those without."""

    def refuse(batch: pa.RecordBatch, *args: Any, **options: Any) -> Any:
        if batch.num_rows > 7:
            raise ValueTooLarge("too large")
        return pack(batch, *args, **options)

    monkeypatch.setattr(small_block_compaction, "pack", refuse)
    trickle(conn, stream, 10)
    before = read(conn, stream, 0)
    compact_stream(conn, stream, older_than_s=0, block_messages=10)
    assert [count for _, count in blocks(conn)] == [7, 1, 1, 1]
    assert read(conn, stream, 0) == before


def test_a_few_are_merged_among_many(conn: Connection, stream: int) -> None:
    """Which are not looked at again."""
    newly = partial(list_newly_fragmented, conn, older_than_s=0, progress=CompactionProgress())
    trickle(conn, stream, 2)
    store(conn, stream, range(602, 600 * 997 + 3, 600), 600)
    assert newly() == []
    put(conn, stream, b"x")
    assert newly() == [stream]
    compact_stream(conn, stream, older_than_s=0)
    assert blocks(conn)[:2] == [(2, 2), (602, 600)]


def test_what_comes_is_merged_with_what_was_seen(conn: Connection, stream: int) -> None:
    """At each border between two looks."""
    newly = partial(list_newly_fragmented, conn, older_than_s=0, progress=CompactionProgress())
    for _ in range(10):
        trickle(conn, stream, 99)
        assert newly() == []
        put(conn, stream, b"x")
        assert newly() == [stream]
        compact_stream(conn, stream, older_than_s=0, progress=CompactionProgress())
    assert blocks(conn) == [(600, 600), (1000, 400)]
    store(conn, stream, range(1600, 1000 + 600 * 999 + 1, 600), 600)
    put(conn, stream, b"first")
    assert newly() == []
    trickle(conn, stream, 99)
    assert newly() == [stream], "the first is one of them"


def test_a_pass_ends_in_time_without_anything_to_merge(conn: Connection, stream: int) -> None:
    progress = CompactionProgress()
    compact = partial(compact_stream, conn, stream, older_than_s=0, most_s=0, progress=progress)
    store(conn, stream, range(600, 600 * 12_000 + 1, 600), 600)
    for is_unfinished in (True, True, False):
        assert count_rows_read(conn, compact) <= small_block_compaction.SCANNED
        assert list(progress.unfinished) == [stream] * is_unfinished


def test_what_changed_meanwhile_is_not_merged(conn: Connection, stream: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are decoded before they are locked: what few bytes stand for may take longer than locks are held."""
    trickle(conn, stream, 5)
    payload = block(b"repaired").payload.to_pybytes()

    def pack_meanwhile(*args: Any, **more: Any) -> Any:
        conn.execute("update block set payload = %s where end_offset = 3", (payload,))
        return pack(*args, **more)

    monkeypatch.setattr(small_block_compaction, "pack", pack_meanwhile)
    assert compact_stream(conn, stream, older_than_s=0) == 0
    assert [row["value"] for row in read(conn, stream)] == [b"0", b"1", b"repaired", b"3", b"4"]
    assert list_newly_fragmented(conn, at_least=5, older_than_s=0) == [stream], "it is tried again"


def test_a_deposed_maintainer_merges_nothing(conn: Connection, stream: int) -> None:
    def refuse_stale_term(_: Connection) -> None:
        raise StaleTerm("the term is over")

    trickle(conn, stream, 5)
    with pytest.raises(StaleTerm):
        compact_stream(conn, stream, older_than_s=0, guard=refuse_stale_term)
    assert len(blocks(conn)) == 5
