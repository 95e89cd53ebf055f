"""A block that cannot be decoded is named, and kept or skipped as its group wants it; the streams beside it go on."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from sublet.cli.base.text_conversion import format_ranges
from sublet_borrower.consumer.session import Session
from sublet_borrower.node_client.feed_client import Feed
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.errors import PoisonBlock
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.db.connect import connect
from sublet_storage.doctor.checks import run_checks
from sublet_storage.groups.admin.admin import create_group
from sublet_storage.groups.coordinator.history_queries import read_history
from sublet_storage.groups.model.records import GroupOptions, OnPoison
from sublet_storage.groups.status import diagnosis_queries
from sublet_storage.log.append import BlockAppend, append
from sublet_storage.log.block_encoder import _serialize_compressed, encode, pack
from sublet_storage.log.column_encoding import strip_columns
from sublet_storage.log.fetch import fetch
from sublet_storage.producer import Publisher
from sublet_storage.readers.complete_epoch_tail import EpochTailReader
from sublet_storage.readers.tail import Tail
from sublet_storage.spaces.small_block_compaction import compact_stream, list_newly_fragmented
from sublet_storage.spaces.space_changes import create_space
from tests.integration.cli_kit import Shell
from tests.integration.feed_kit import address_of, serving
from tests.integration.log_kit import Connection, batch, read
from tests.integration.replay_kit import Plan
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet

GROUP = "$share/g/eu/#"
SUBSCRIPTION = Subscription.parse(GROUP)
BAD = 6
"""The damaged block of a stream has the offsets 4 and 5; there are 8."""


def garbage(payload: bytes) -> bytes:
    return b"?" * len(payload)


def truncated(payload: bytes) -> bytes:
    return payload[: len(payload) - 40]


def another(payload: bytes) -> bytes:
    other: bytes = pack(batch([b"a", b"b", b"c"], "eu")).payload.to_pybytes()
    return other


def offsets_elsewhere(payload: bytes) -> bytes:
    """The values' offsets point far behind them: whoever reads there without having looked dies by a signal."""
    before, first, behind = payload.rpartition(struct.pack("<3i", 0, 7, 14))
    assert first
    return before + struct.pack("<3i", 0, 1 << 30, 1 << 30) + behind


def bomb(payload: bytes) -> bytes:
    """A few kilobytes, of 40 MB."""
    _, lean = strip_columns(batch([bytes(20 << 20)] * 2, "eu"))
    data: bytes = _serialize_compressed(lean, "zstd").to_pybytes()
    return data


def time_far_away(payload: bytes) -> bytes:
    """Return a block with times of a year that no Python datetime has."""
    given = batch([b"a", b"b"], "eu")
    times = pa.array([1 << 62] * 2, pa.timestamp("us", tz="UTC"))
    place = given.schema.get_field_index("timestamp")
    data: bytes = encode(given.set_column(place, given.schema.field(place), times))[1].to_pybytes()
    return data


DAMAGES: list[Callable[[bytes], bytes]] = [garbage, truncated, another, offsets_elsewhere, bomb, time_far_away]


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with connect(database) as connection:
        create_space(connection, "eu", "eu/#", shards=len(DAMAGES) + 1)
        yield connection


@pytest.fixture
def streams(conn: Connection) -> list[int]:
    """A stream for each damage, in its third block of four, and one that is well."""
    found = [
        row[0]
        for row in conn.execute("select stream_id from stream join space using (space_id) where name = 'eu' order by 1")
    ]
    for stream in found:
        for first in range(0, 8, 2):
            values = [b"%04d-%02d" % (stream, first + place) for place in range(2)]
            append(conn, [BlockAppend(stream, pack(batch(values, "eu")))])
    where = "where stream_id = %s and end_offset = %s"
    for stream, damage in zip(found, DAMAGES, strict=False):
        ((payload,),) = conn.execute(f"select payload from block {where}", (stream, BAD)).fetchall()
        conn.execute(f"update block set payload = %s {where}", (damage(payload), stream, BAD))
    return found


def values_of(streams: list[int], offsets: range) -> list[bytes]:
    return [b"%04d-%02d" % (stream, offset) for stream in streams for offset in offsets]


Join = Callable[..., Session]


@pytest.fixture
def join(database: str, fleet: Fleet) -> Join:
    """Opens a session of the group, which may read through a node."""

    def join(*, via_nodes: bool = False, **more: Any) -> Session:
        way = {"nodes": [address_of(fleet.nodes["n1"])], "transport": "nodes"} if via_nodes else {"url": database}
        return Session(GROUP, settings=BorrowerSettings().scaled(SPEED), **way, **more)

    return join


def take(session: Session, seen: list[bytes], until: Callable[[], bool]) -> None:
    def look() -> bool:
        if (found := session.poll(0.05)) is not None:
            seen.extend(found.table.column("value").to_pylist())
        return found is None and until()

    eventually(look, WAIT_S, lambda: str(seen))


def statuses(conn: Connection) -> dict[int, tuple[str, int, int]]:
    rows = conn.execute(
        "select stream_id, status, position, lost_message_count from lending where position > 0"
    ).fetchall()
    return {stream: (status, position, lost) for stream, status, position, lost in rows}


@pytest.mark.conforms("W10", "X7")
@pytest.mark.parametrize("via_nodes", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_group_blocks_at_a_bad_block(
    conn: Connection, join: Join, streams: list[int], via_nodes: bool, shell: Shell
) -> None:
    """It says why and how to get past it, and all other streams go on."""
    bad, seen = streams[:-1], list[bytes]()
    blocked = dict.fromkeys(bad, ("blocked", 4, 0))
    for life in range(2):
        with join(via_nodes=via_nodes, starting_position="earliest") as session:
            take(session, seen, lambda: statuses(conn) == {**blocked, streams[-1]: ("held", 8, 0)})
        assert sorted(seen) == sorted(values_of(bad, range(4)) + values_of(streams[-1:], range(8))), f"{life=}"
    answers = [each for each in diagnosis_queries.diagnose_group(conn, SUBSCRIPTION)[1] if each.stream.stream_id in bad]
    (finding,) = [each for each in run_checks(conn, 0.0, PROTOCOL_VERSION) if each.check == "streams"]
    assert f"stream {bad[0]}: the block that begins at offset 4" in finding.detail
    for answer in answers:
        stream = answer.stream.stream_id
        reported = f"stream {stream}: the block that begins at offset 4 and ends before offset 6 cannot be decoded: "
        assert reported in answer.diagnosis.detail
        assert reported in shell.run("groups", "describe", GROUP).out
        way_past = f"sublet groups reset '{GROUP}' --stream {stream} --to-offset 6"
        assert str(answer.diagnosis.hint).endswith(way_past)
        assert shell.run("groups", "reset", GROUP, "--stream", str(stream), "--to-offset", "6", "--yes").code == 0
    with join(via_nodes=via_nodes) as session:
        take(session, seen, lambda: set(statuses(conn).values()) == {("held", 8, 0)})
    assert sorted(seen) == sorted(set(values_of(streams, range(8))) - set(values_of(bad, range(4, 6))))


@pytest.mark.conforms("W10", "X7")
def test_a_group_that_skips_goes_on_behind_a_bad_block(
    database: str, conn: Connection, join: Join, streams: list[int], shell: Shell
) -> None:
    """Its history has what it lost."""
    bad, seen = streams[:-1], list[bytes]()
    group, _ = create_group(database, SUBSCRIPTION, GroupOptions(StartingPosition.EARLIEST, on_poison=OnPoison.SKIP))
    with join() as session:
        lost = {stream: ("held", 8, 2 if stream in bad else 0) for stream in streams}
        take(session, seen, lambda: statuses(conn) == lost)
    assert sorted(seen) == sorted(set(values_of(streams, range(8))) - set(values_of(bad, range(4, 6))))
    skips = [line for line in read_history(conn, group.group_id).records if line.event == "skip"]
    assert sorted((line.stream_id, line.position) for line in skips) == [(stream, 4) for stream in bad]
    for line in skips:
        assert "Nothing of it is given out: put its payload back" in line.reason
        assert "Skipped: [4, 6), 2 messages" in line.reason
        assert "is skipped" not in line.reason
    lost_by_all = f"{2 * len(bad)} messages, which are gone or could not be decoded, of streams {format_ranges(bad)}\n"
    assert f"lost     {lost_by_all}" in shell.run("groups", "describe", GROUP).out


@pytest.mark.conforms("W10")
@pytest.mark.parametrize("via_nodes", [pytest.param(False, marks=pytest.mark.long), True])
def test_bad_blocks_in_a_row_are_skipped_at_once(
    database: str, conn: Connection, join: Join, streams: list[int], via_nodes: bool
) -> None:
    """Whoever may publish writes thousands in a second."""
    seen: list[bytes] = []
    conn.execute("update block set payload = '\\x00' where stream_id = %s and end_offset in (4, 6)", (streams[-1],))
    group, _ = create_group(database, SUBSCRIPTION, GroupOptions(StartingPosition.EARLIEST, on_poison=OnPoison.SKIP))
    with join(via_nodes=via_nodes) as session:
        lost = dict.fromkeys(streams[:-1], ("held", 8, 2)) | {streams[-1]: ("held", 8, 4)}
        take(session, seen, lambda: statuses(conn) == lost)
    assert seen.count(b"%04d-06" % streams[-1]) == 1
    skips = [line for line in read_history(conn, group.group_id).records if line.event == "skip"]
    (line,) = [line for line in skips if line.stream_id == streams[-1]]
    assert "ends before offset 4 cannot be decoded" in line.reason
    assert "None from there to offset 6 can be decoded. Skipped: [2, 6), 4 messages" in line.reason


@pytest.mark.conforms("W10", "S5")
@pytest.mark.parametrize("whole_epochs", [pytest.param(False, marks=pytest.mark.long), True])
def test_an_atomic_group_has_all_epochs_before_that(
    database: str, conn: Connection, join: Join, whole_epochs: bool, shell: Shell
) -> None:
    """However many are read together."""
    create_group(database, SUBSCRIPTION, GroupOptions(StartingPosition.EARLIEST, atomic=True))
    with Publisher(database, space="eu") as publisher:
        for epoch in range(4):
            publisher.in_epoch(epoch).publish("eu/t", b"%d" % epoch, key=b"k")
            publisher.advance(epoch + 1)
            publisher.flush()
    ((stream,),) = conn.execute("update block set payload = '?' where end_offset = 3 returning stream_id").fetchall()
    seen: list[bytes] = []
    with join(whole_epochs=whole_epochs) as session:
        take(session, seen, lambda: statuses(conn).get(stream) == ("blocked", 2, 0))
        assert shell.run("groups", "reset", GROUP, "--to-epoch", "3", "--yes").code == 0
        take(session, seen, lambda: b"3" in seen)
    assert seen == [b"0", b"1", b"3"]


@pytest.mark.conforms("W10", "S5")
def test_epochs_in_hand_before_a_bad_block_come_again(database: str, conn: Connection, join: Join) -> None:
    """All are read together, in several batches, of which the bad block is the last."""
    create_group(database, SUBSCRIPTION, GroupOptions(StartingPosition.EARLIEST, atomic=True))
    batches: list[Batch] = []
    with Publisher(database, space="eu") as publisher:  # which has epoch 9 open until the end
        for epoch in (1, 2, 3):
            publisher.advance(epoch)
            for each in (epoch, 9):  # so that what is read lies apart
                publisher.in_epoch(each).publish("eu/t", b"%d" % each, key=b"k")
                publisher.flush()
        publisher.advance(4)
        of_third = "update block set payload = '?' where end_offset = 5 returning stream_id"
        ((stream,),) = conn.execute(of_third).fetchall()

        def look() -> bool:
            if (batch := session.poll(0.05)) is not None:
                batches.append(batch)
                if batch.completes_epochs:
                    with session.transaction(*(each for each in batches if each.is_outstanding)):
                        pass
            return statuses(conn).get(stream) == ("blocked", 1, 0)

        with join(auto_ack=False) as session:
            eventually(look, WAIT_S, lambda: f"{batches}, {statuses(conn)}")
    assert [batch.table.column("value").to_pylist() for batch in batches] == [[b"1"], [b"1"], [b"2"]]


@pytest.mark.usefixtures("streams")
def test_tail_reads_no_further_than_it_prints(shell: Shell) -> None:
    assert shell.run("tail", "eu/#", "--from", "earliest", "--max-messages", "1").code == 0


@pytest.mark.conforms("W10", "X7")
def test_readers_without_a_group_see_all_else(database: str, conn: Connection, streams: list[int]) -> None:
    """The error then names the bad block."""
    entire = sorted(values_of(streams[:-1], range(4)) + values_of(streams[-1:], range(8)))
    for stream in streams[:-1]:
        assert fetch(conn, stream, 0).position == 4, "what lies before it"
        with pytest.raises(PoisonBlock, match=f"stream {stream}: .*offset 4 .*offset 6 ") as poison:
            fetch(conn, stream, 5)
        assert (poison.value.stream_id, poison.value.offsets) == (stream, (4, 6))
        assert fetch(conn, stream, 6).position == 8

    def drained(tables: Iterator[pa.Table]) -> list[bytes]:
        seen = list[bytes]()
        with pytest.raises(PoisonBlock, match=r"offset 4 .*offset 6 "):
            seen.extend(value for table in tables for value in table.column("value").to_pylist())
        return sorted(seen)

    filter = TopicFilter.parse("eu/#")
    assert drained(Tail(conn, filter, "earliest").pages()) == entire
    reading = EpochTailReader(conn, filter, "earliest")
    assert drained(said.table for said in reading.read_available(conn) if hasattr(said, "table")) == entire
    with serving(database) as server, Feed([server.address]) as feed:
        assert drained(feed.history("eu/#", "earliest")) == entire
    with pytest.raises(PoisonBlock, match=r"offset 4 .*offset 6 "):
        Plan(database, filter="eu/#").rows()


@pytest.mark.conforms("W10", "X7")
def test_compaction_leaves_a_bad_block_as_it_is(conn: Connection, streams: list[int]) -> None:
    """It says so, and merges all others."""
    before = dict(conn.execute("select stream_id, payload from block where end_offset = %s", (BAD,)).fetchall())
    for stream in streams[:-1]:
        ahead, behind = fetch(conn, stream, 0).batches, read(conn, stream, 6)
        with pytest.raises(PoisonBlock, match=r"offset 4 .*offset 6 "):
            compact_stream(conn, stream, older_than_s=0)
        rows = conn.execute("select end_offset, count from block where stream_id = %s order by 1", (stream,)).fetchall()
        assert rows == [(4, 4), (6, 2), (8, 2)]
        assert pa.Table.from_batches(fetch(conn, stream, 0).batches) == pa.Table.from_batches(ahead)
        assert read(conn, stream, 6) == behind
    listed = list_newly_fragmented(conn, at_least=1, older_than_s=0)
    assert not set(listed) & set(streams[:-1]), "they are not read again and again"
    assert streams[-1] in listed
    assert compact_stream(conn, streams[-1], older_than_s=0) == 3
    after = dict(conn.execute("select stream_id, payload from block where end_offset = %s", (BAD,)).fetchall())
    assert after == {stream: before[stream] for stream in streams[:-1]}
