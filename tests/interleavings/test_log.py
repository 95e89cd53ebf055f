"""Appends, their retries, rollovers, compaction and readers, all at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sublet_protocol.domain.epoch_frontiers import LowerFrontier
from sublet_storage.log import epoch_leases
from sublet_storage.log.append import AppendOutcome, AppendResult, BlockAppend, ProducerIdentity, ProducerStamp, append
from sublet_storage.producer import sink_staging
from sublet_storage.spaces import small_block_compaction, space_changes
from sublet_storage.spaces.space_queries import find_space
from tests.integration.log_kit import batch, block, everything, in_epochs, put, read, stamped, stream_of
from tests.interleavings.harness import Connection, Interleavings, Run, Work
from tests.support.streams import open_streams

WHO = ProducerIdentity("p", 1)


def values(run: Run) -> list[bytes]:
    """Return all stored values; check that offsets have no gap."""
    return sorted(message["value"] for messages in everything(run.conn).values() for message in messages)


@pytest.mark.conforms("W2", "W3")
@pytest.mark.parametrize("is_first", [True, False])
def test_an_append_in_a_rollover_is_stored_or_refused(conn: Connection, database: str, is_first: bool) -> None:
    """Those of a producer that has appended there before share one statement."""
    streams = [stream.stream_id for stream in open_streams(conn)]
    blocks = [stamped(stream, ProducerStamp("p", 1, 2), b"%d" % stream) for stream in streams]
    before = [] if is_first else [stamped(stream, ProducerStamp("p", 1, 1), b"before") for stream in streams]
    append(conn, before)

    def judge(run: Run) -> None:
        assert not run.errors
        appended = [b"%d" % one for one, each in zip(streams, run.answers["append"], strict=True) if is_stored([each])]
        assert values(run) == sorted(appended + [b"before"] * len(before))
        late = "select stream_id from block join stream using (stream_id) where appended_at > closed_at"
        assert not run.conn.execute(late).fetchall()
        closed = dict(run.conn.execute("select stream_id, state = 'closed' from stream").fetchall())
        reported = zip(streams, run.answers["append"], strict=True)
        assert all(closed[one] for one, each in reported if each.outcome is AppendOutcome.CLOSED)

    participants: Mapping[str, Work] = {
        "append": lambda conn: append(conn, blocks),
        "roll over": lambda conn: space_changes.rollover(conn, "eu"),
    }
    with Interleavings(database) as orders:
        assert orders.explore(participants, judge) > 1


@pytest.mark.conforms("W2", "W3")
def test_a_sink_batch_is_committed_in_a_rollover(conn: Connection, database: str) -> None:
    write = sink_staging.SinkBatchId("sink", 0)
    staged = sink_staging.stage(conn, write, 0, [batch([b"a", b"b"])])

    def judge(run: Run) -> None:
        assert not run.errors
        assert values(run) == [b"a", b"b"]

    participants: Mapping[str, Work] = {
        "commit": lambda conn: sink_staging.commit(conn, write, [staged]),
        "roll over": lambda conn: space_changes.rollover(conn, "default"),
    }
    with Interleavings(database) as orders:
        assert orders.explore(participants, judge) > 1


@pytest.mark.conforms("W3")
def test_a_rollover_locks_streams_as_appends_do(conn: Connection, database: str) -> None:
    """In the order of their ids, wherever their rows lie, and however Postgres finds them."""
    space_changes.reshard(conn, "eu", 2)
    eu = find_space(conn, "eu").space_id
    streams = [stream.stream_id for stream in open_streams(conn) if stream.space_id == eu]
    append(conn, [stamped(stream, ProducerStamp("p", 1, 1), b"x") for stream in streams])
    put(conn, streams[0], b"x")  # its row now lies behind that of the other
    blocks = [stamped(stream, ProducerStamp("p", 1, 2), b"y") for stream in streams]

    def scan_rows(conn: Connection) -> None:
        conn.execute("set enable_indexscan = off")
        conn.execute("set enable_bitmapscan = off")

    def append_all(conn: Connection) -> list[AppendResult]:
        scan_rows(conn)
        return append(conn, blocks)

    def roll_over(conn: Connection) -> int:
        scan_rows(conn)
        return space_changes.rollover(conn, "eu")

    def hold(conn: Connection) -> None:
        with conn.transaction():
            append(conn, [BlockAppend(streams[1], block(b"z"))])

    def judge(run: Run) -> None:
        assert not run.errors

    with Interleavings(database) as orders:
        assert orders.explore({"append": append_all, "roll over": roll_over, "hold": hold}, judge) > 1


@pytest.mark.conforms("W5")
def test_maintenance_locks_streams_as_appends_do(conn: Connection, database: str) -> None:
    """Where it notes how far it has examined them."""
    space_changes.reshard(conn, "eu", 2)
    eu = find_space(conn, "eu").space_id
    streams = [stream.stream_id for stream in open_streams(conn) if stream.space_id == eu]
    for stream in reversed(streams):
        put(conn, stream, b"x")  # the row of the first now lies behind that of the other
    blocks = [stamped(stream, ProducerStamp("p", 1, 1), b"y") for stream in streams]

    def examine(conn: Connection) -> list[int]:
        for way in ("indexscan", "bitmapscan", "sort", "nestloop", "mergejoin"):
            conn.execute(f"set enable_{way} = off")
        return small_block_compaction.list_newly_fragmented(conn, older_than_s=0)

    def judge(run: Run) -> None:
        assert not run.errors

    with Interleavings(database) as orders:
        assert orders.explore({"append": lambda conn: append(conn, blocks), "examine": examine}, judge) > 1


def is_stored(answers: list[AppendResult]) -> bool:
    return {each.outcome for each in answers} <= {AppendOutcome.APPENDED, AppendOutcome.DUPLICATE}


@pytest.mark.conforms("W2", "S9")
@pytest.mark.parametrize(
    ("advances", "before"),
    [(False, 0), (False, 1), (True, 0)],
    ids=["append", "append after another", "append and advance"],
)
def test_an_append_and_its_retry_store_it_once(conn: Connection, database: str, advances: bool, before: int) -> None:
    """Neither waits for the other for ever. `before`: so many blocks of the producer are stored already."""
    space, stream = find_space(conn, "eu").space_id, stream_of(conn, "eu")
    if before:
        append(conn, [stamped(stream, ProducerStamp("p", 1, before), b"before")])

    def attempt(conn: Connection) -> list[AppendResult]:
        if not advances:
            stamps = [ProducerStamp("p", 1, number) for number in (before + 1, before + 2)]
            blocks = [stamped(stream, stamp, b"%d" % stamp.sequence) for stamp in stamps]
            with conn.transaction():
                return append(conn, blocks)
        one = BlockAppend(stream, in_epochs((1,)), ProducerStamp("p", 1, 1))
        moved = epoch_leases.append_and_advance(conn, [one], space, WHO, [(5,)], 60)
        assert moved.change is not None
        return moved.results

    def judge(run: Run) -> None:
        assert not run.errors
        assert all(is_stored(answers) for answers in run.answers.values())
        assert len(values(run)) == (1 if advances else before + 2)
        assert not advances or epoch_leases.read_lower_frontier(run.conn, space) == LowerFrontier(((5,),))

    if advances:
        epoch_leases.hold(conn, space, WHO, [(1,)], 60)
    with Interleavings(database) as orders:
        assert orders.explore({"attempt": attempt, "retry": attempt}, judge) > 1


@pytest.mark.conforms("W5")
def test_compaction_changes_nothing_for_others(conn: Connection, database: str) -> None:
    stream = stream_of(conn, "eu")
    old = [b"%d" % number for number in range(3)]
    for value in old:
        put(conn, stream, value)

    def compact(conn: Connection) -> int:
        return small_block_compaction.compact_stream(conn, stream, older_than_s=0)

    def found(conn: Connection) -> list[Any]:
        return [message["value"] for message in read(conn, stream, limit_blocks=1)]

    def judge(run: Run) -> None:
        assert not run.errors
        assert run.answers.get("read", old) == old
        assert found(run.conn) == old + ([b"new"] if "append" in run.answers else [])

    others: Mapping[str, Work] = {
        "read": found,
        "append": lambda conn: append(conn, [BlockAppend(stream, block(b"new"))]),
        "compact again": compact,
    }
    with Interleavings(database) as orders:
        for name, other in others.items():
            assert orders.explore({"compact": compact, name: other}, judge) > 1, name
