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
from tests.interleavings.harness import Connection, Interleavings, Run, Work, in_transaction
from tests.support.streams import open_streams

WHO = ProducerIdentity("p", 1)


def stamps(streams: list[int], sequence: int, value: bytes | None = None) -> list[BlockAppend]:
    """Return a block of the producer for each stream; without a value each has that of its stream."""
    stamp = ProducerStamp("p", 1, sequence)
    return [stamped(stream, stamp, b"%d" % stream if value is None else value) for stream in streams]


def two_streams(conn: Connection) -> list[int]:
    """Return those of the space `eu`, which has two from now on."""
    space_changes.reshard(conn, "eu", 2)
    eu = find_space(conn, "eu").space_id
    return [stream.stream_id for stream in open_streams(conn) if stream.space_id == eu]


def roll_over(conn: Connection) -> int:
    return space_changes.rollover(conn, "eu")


def without(work: Work, *scans: str) -> Work:
    """Return the work done by a server that does without these kinds of scans and joins."""

    def done(conn: Connection) -> Any:
        conn.execute("set enable_seqscan = on")  # which our connections do without
        for scan in scans:
            conn.execute(f"set enable_{scan} = off")
        return work(conn)

    return done


def values(run: Run) -> list[bytes]:
    """Return all stored values; check that offsets have no gap."""
    return sorted(message["value"] for messages in everything(run.conn).values() for message in messages)


@pytest.mark.conforms("W2", "W3")
@pytest.mark.parametrize("is_first", [True, False])
def test_an_append_in_a_rollover_is_stored_or_refused(orders: Interleavings, conn: Connection, is_first: bool) -> None:
    """Those of a producer that has appended there before share one statement."""
    streams = [stream.stream_id for stream in open_streams(conn)]
    before = [] if is_first else stamps(streams, 1, b"before")
    append(conn, before)

    def judge(run: Run) -> None:
        assert not run.errors
        answers = dict(zip(streams, run.answers["append"], strict=True))
        appended = [b"%d" % one for one, each in answers.items() if is_stored([each])]
        assert values(run) == sorted(appended + [b"before"] * len(before))
        late = "select stream_id from block join stream using (stream_id) where appended_at > closed_at"
        assert not run.conn.execute(late).fetchall()
        closed = dict(run.conn.execute("select stream_id, state = 'closed' from stream").fetchall())
        assert all(closed[one] for one, each in answers.items() if each.outcome is AppendOutcome.CLOSED)

    orders.explore({"append": lambda conn: append(conn, stamps(streams, 2)), "roll over": roll_over}, judge)


@pytest.mark.conforms("W2", "W3")
def test_a_sink_batch_is_committed_in_a_rollover(orders: Interleavings, conn: Connection) -> None:
    write = sink_staging.SinkBatchId("sink", 0)
    staged = sink_staging.stage(conn, write, 0, [batch([b"a", b"b"])])

    def judge(run: Run) -> None:
        assert not run.errors
        assert values(run) == [b"a", b"b"]

    participants: Mapping[str, Work] = {
        "commit": lambda conn: sink_staging.commit(conn, write, [staged]),
        "roll over": lambda conn: space_changes.rollover(conn, "default"),
    }
    orders.explore(participants, judge)


@pytest.mark.conforms("W3")
def test_a_rollover_locks_streams_as_appends_do(orders: Interleavings, conn: Connection) -> None:
    """In the order of their ids, wherever their rows lie, and however Postgres finds them."""
    streams = two_streams(conn)
    append(conn, stamps(streams, 1))
    put(conn, streams[0], b"x")  # its row now lies behind that of the other
    scans = ("indexscan", "bitmapscan")
    participants: Mapping[str, Work] = {
        "append": without(lambda conn: append(conn, stamps(streams, 2)), *scans),
        "roll over": without(roll_over, *scans),
        "hold": in_transaction(lambda conn: append(conn, [BlockAppend(streams[1], block(b"z"))])),
    }
    orders.explore(participants)


@pytest.mark.conforms("W5")
def test_maintenance_locks_streams_as_appends_do(
    orders: Interleavings, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it notes how far it has examined them."""
    monkeypatch.setattr(small_block_compaction, "MAX_UNSETTLED", 1)
    streams = two_streams(conn)
    for stream in [*reversed(streams)] * 2:
        put(conn, stream, b"x")  # the row of the first now lies behind that of the other
    examine = without(
        lambda conn: small_block_compaction.list_newly_fragmented(conn, older_than_s=0),
        *("indexscan", "bitmapscan", "sort", "nestloop", "mergejoin"),
    )
    participants: Mapping[str, Work] = {
        "append": lambda conn: append(conn, stamps(streams, 1)),
        "examine": examine,
        "hold": in_transaction(lambda conn: append(conn, [BlockAppend(streams[1], block(b"z"))])),
    }
    orders.explore(participants)


def is_stored(answers: list[AppendResult]) -> bool:
    return {each.outcome for each in answers} <= {AppendOutcome.APPENDED, AppendOutcome.DUPLICATE}


@pytest.mark.conforms("W2", "S9")
@pytest.mark.parametrize(
    ("advances", "before", "has_epochs"),
    [(False, 0, False), (False, 1, False), (False, 1, True), (True, 0, True)],
    ids=["append", "append after another", "append in an epoch after another", "append and advance"],
)
def test_an_append_and_its_retry_store_it_once(
    orders: Interleavings, conn: Connection, advances: bool, before: int, has_epochs: bool
) -> None:
    """Neither waits for the other for ever. `before`: so many blocks of the producer are stored already."""
    space, stream = find_space(conn, "eu").space_id, stream_of(conn, "eu")
    if before:
        append(conn, stamps([stream], before))
    if has_epochs:
        epoch_leases.hold(conn, space, WHO, [(1,)], 60)
    one = BlockAppend(stream, in_epochs((1,)), ProducerStamp("p", 1, before + 1))

    def attempt(conn: Connection) -> list[AppendResult]:
        if not advances:
            more = [one] if has_epochs else [*stamps([stream], before + 1), *stamps([stream], before + 2)]
            with conn.transaction():
                return append(conn, more)
        moved = epoch_leases.append_and_advance(conn, [one], space, WHO, [(5,)], 60)
        assert moved.change is not None
        return moved.results

    def judge(run: Run) -> None:
        assert not run.errors
        assert all(is_stored(answers) for answers in run.answers.values())
        assert len(values(run)) == (before + 1 if has_epochs else before + 2)
        assert not advances or epoch_leases.read_lower_frontier(run.conn, space) == LowerFrontier(((5,),))

    orders.explore({"attempt": attempt, "retry": attempt}, judge)


@pytest.mark.conforms("W5")
def test_compaction_changes_nothing_for_others(orders: Interleavings, conn: Connection) -> None:
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
    for name, other in others.items():
        orders.explore({"compact": compact, name: other}, judge)
