"""Payloads outside of Postgres, as seen by those who operate it and by consumers; a directory stands for all places."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest

from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.fetch.node_reader import NodeMessageReader
from sublet_borrower.node_client.feed_client import Feed
from sublet_borrower.spark.source import range_reader
from sublet_borrower.spark.source.range_reader import RangePartition, read_task
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_protocol.domain.errors import (
    Conflict,
    InvalidSetting,
    PayloadDamaged,
    PayloadObjectUnreadable,
    PayloadUnavailable,
    Unavailable,
)
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.bootstrap.migrate import downgrade
from sublet_storage.log import fetch as message_log
from sublet_storage.objects.object_stores import LocalBackend
from sublet_storage.spaces.space_changes import alter_space, create_space, rollover
from sublet_storage.spaces.space_queries import find_space
from tests.integration.cli_kit import Shell
from tests.integration.feed_kit import read_values, serving
from tests.integration.log_kit import Connection, generation_of, read, stream_of
from tests.kit import GRANT_KEY, WAIT_S, eventually
from tests.kit_nodes import Fleet
from tests.payload_kit import LocalWorld, a_closed_stream, a_space, fill, move, outside

BLOCKS = 6


@pytest.fixture
def stream(conn: Connection, world: LocalWorld) -> int:
    """Return a stream with all payloads outside."""
    space = a_space(conn, world)
    stream = a_closed_stream(conn, BLOCKS)
    assert move(conn, space) == BLOCKS
    return stream


def granted_of(conn: Connection, stream: int) -> GrantedStream:
    return GrantedStream(stream, 1, generation_of(conn, stream), TopicFilter("#"), 0, grant_key=GRANT_KEY)


def test_a_group_consumes_what_nodes_have_moved(conn: Connection, fleet: Fleet, world: LocalWorld) -> None:
    """From the first message to the last: generations outside, and the open one in Postgres."""
    create_space(conn, "eu", "eu/#", shards=1, payload_location=world.uri)
    streams = []
    for generation in range(3):
        streams.append(stream_of(conn, "eu"))
        fill(conn, streams[-1], BLOCKS, first=BLOCKS * generation, size=70_000)
        if generation < 2:
            rollover(conn, "eu")
    eventually(lambda: len(outside(conn)) == 2 * BLOCKS, WAIT_S, lambda: fleet.nodes["n1"].output())
    fleet.consumer("c", "$share/g/eu/#")
    due = [(stream, offset) for stream in streams for offset in range(2 * BLOCKS)]

    def delivered() -> list[tuple[int, int]]:
        return [(each.stream, offset) for each in fleet.delivered("c") for offset in each.offsets]

    eventually(lambda: len(delivered()) >= len(due), WAIT_S, lambda: fleet.consumers["c"].output())
    assert fleet.consumers["c"].stop() == 0
    assert delivered() == due


def test_a_reader_waits_for_a_place_that_is_away(
    database: str, conn: Connection, world: LocalWorld, stream: int
) -> None:
    """It names the place, and goes on when it is back."""
    reader, granted = DatabaseMessageReader(database, 1, 5.0), granted_of(conn, stream)
    assert reader.fetch(granted, lambda _: True) is not None
    world.go_away()
    for _ in range(3):
        with pytest.raises(PayloadUnavailable, match="the payload location"):
            reader.fetch(granted, lambda _: True)
    assert granted.next_read_offset == 2
    world.come_back()
    page = eventually(lambda: page_of(reader, granted), WAIT_S)
    assert (page.start, page.position) == (2, 4)
    reader.close()


def page_of(reader: DatabaseMessageReader | NodeMessageReader, granted: GrantedStream) -> Any:
    """Return the page, or None while the location is away."""
    try:
        return reader.fetch(granted, lambda _: True)
    except PayloadUnavailable:
        return None


def test_an_unreadable_object_is_named(
    database: str, conn: Connection, world: LocalWorld, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bad sector, or an object that a lifecycle rule has archived."""
    act = LocalBackend.read

    def read_of_disk(self: LocalBackend, name: str, most: int) -> Any:
        if f"/{stream}-6-" in name:
            raise OSError(5, "Input/output error")
        return act(self, name, most)

    reader, granted = DatabaseMessageReader(database, 4 << 20, 5.0), granted_of(conn, stream)
    with monkeypatch.context() as bad:
        bad.setattr(LocalBackend, "read", read_of_disk)
        page = reader.fetch(granted, lambda _: True)
        assert page is not None
        assert page.position == 4, "what lies before it"
        with pytest.raises(PayloadObjectUnreadable, match=r"begins at offset 4 and ends before .*Input/output error"):
            reader.fetch(granted, lambda _: True)
    page = reader.fetch(granted, lambda _: True)
    assert page is not None
    assert (page.start, page.position) == (4, 2 * BLOCKS)
    reader.close()


def test_through_a_node_others_go_on(
    database: str, conn: Connection, world: LocalWorld, stream: int, caplog: pytest.LogCaptureFixture
) -> None:
    """While a place is away or a payload damaged, all other streams go on."""
    caplog.set_level(logging.INFO)
    create_space(conn, "us", "us/#", shards=1)
    well = stream_of(conn, "us")
    fill(conn, well, 5)
    with serving(database) as server:
        reader, granted, other = (
            NodeMessageReader([server.address], 1, 5.0),
            granted_of(conn, stream),
            granted_of(conn, well),
        )
        world.go_away()
        for _ in range(5):
            with pytest.raises(PayloadUnavailable, match="the payload location"):
                reader.fetch(granted, lambda _: True)
            assert reader.fetch(other, lambda _: True) is not None, "no pause and no other connection in between"
        assert [each for each in caplog.records if "node" in each.getMessage()] == []
        world.come_back()
        page = eventually(lambda: page_of(reader, granted), WAIT_S)
        assert page.position == 2
        (third,) = [name for name in world.names() if f"/{stream}-6-" in name]
        world.write(third, b"something else")
        assert reader.fetch(granted, lambda _: True) is not None
        with pytest.raises(PayloadDamaged, match=rf"stream {stream}: .*ends before offset 6"):
            reader.fetch(granted, lambda _: True)
        reader.close()


@pytest.mark.long
def test_a_feed_shows_the_rest_and_what_it_waits_for(
    database: str, conn: Connection, world: LocalWorld, stream: int
) -> None:
    create_space(conn, "us", "us/#", shards=1)
    well = stream_of(conn, "us")
    fill(conn, well, 5)
    world.go_away()
    with serving(database) as server, Feed(server.address, node_timeout_s=2.0) as feed:
        for read in (feed.history, feed.follow):
            with read("#", "earliest") as reader:
                assert len(read_values(reader, 10)) == 10
                before = server.feed.pages_written
                with pytest.raises(Unavailable, match="the payload location"):
                    reader.read(WAIT_S)
                assert server.feed.pages_written - before < 15, "the pauses grow"
                assert reader.bookmark.offsets[well] == 10
        world.come_back()
        eventually(lambda: page_of(DatabaseMessageReader(database, 1, 5.0), granted_of(conn, stream)), WAIT_S)
        with feed.history("#", "earliest") as reader:
            assert len(read_values(reader, 2 * BLOCKS + 10)) == 2 * BLOCKS + 10


def test_a_spark_task_waits_for_the_place(
    database: str, conn: Connection, world: LocalWorld, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sublet_borrower.spark.common.source_columns import all_columns, to_arrow_schema

    place = (stream, granted_of(conn, stream).generation_id, 0, 2 * BLOCKS)
    task = RangePartition(
        *place, "#", "eu", database, None, os.uname().nodename, fail_on_data_loss=True, timeline_number=0
    )
    schema = to_arrow_schema(all_columns())
    world.go_away()
    with monkeypatch.context() as impatient:
        impatient.setattr(range_reader, "DATABASE_TIMEOUT_S", 0.0)
        with pytest.raises(PayloadUnavailable):
            list(read_task(task, schema))
    since, asked = message_log.fetch, 0

    def looked(*args: Any, **kwargs: Any) -> message_log.LogPage:
        nonlocal asked
        asked += 1
        if asked == 2:
            world.come_back()
        return since(*args, **kwargs)

    monkeypatch.setattr(message_log, "fetch", looked)
    assert sum(batch.num_rows for batch in read_task(task, schema)) == 2 * BLOCKS


def test_tables_stay_while_payloads_are_outside(database: str, conn: Connection, stream: int) -> None:
    before = read(conn, stream)
    with pytest.raises(
        Conflict, match=rf"{BLOCKS} blocks have their payload outside.*--no-payload-location --restore-payloads"
    ):
        downgrade(database)
    assert read(conn, stream) == before
    conn.execute("delete from block where uri is not null")
    conn.close()
    downgrade(database)


def test_a_space_cannot_move_by_age_without_a_place(conn: Connection, world: LocalWorld) -> None:
    with pytest.raises(InvalidSetting, match="no payload location that its payloads could be moved to"):
        create_space(conn, "eu", "eu/#", tier_after_s=60)
    a_space(conn, world, tier_after_s=60)
    with pytest.raises(InvalidSetting, match="no payload location"):
        alter_space(conn, "eu", payload_location=None)
    with pytest.raises(Conflict, match=f"payload_location {world.uri}"):
        create_space(conn, "eu", "eu/#", shards=1)


# --- the command line -------------------------------------------------------------------------------------------------


def test_places_are_given_altered_and_taken_away(shell: Shell, conn: Connection, world: LocalWorld) -> None:
    place = ("--payload-location", world.uri, "--tier-after", "1d")
    created = shell.run("spaces", "create", "eu", "eu/#", "--shards", "1", *place, "--json").object
    assert (created["payload_location"], created["tier_after_s"]) == (world.uri, 86400)
    fill(conn, stream_of(conn, "eu"), BLOCKS, size=70_000)
    rollover(conn, "eu")
    assert move(conn, find_space(conn, "eu")) == BLOCKS
    answer = shell.run("doctor", "--json").object
    assert [each["state"] for each in answer["findings"] if each["check"] == "payloads"] == ["ok"]
    altered = shell.run("spaces", "alter", "eu", "--no-payload-location", "--restore-payloads", "--json")
    assert (altered.object["payload_location"], altered.object["tier_after_s"]) == (None, None)
    assert f"{BLOCKS} payloads are back" in altered.err
    assert outside(conn) == set()
    said = shell.run("spaces", "alter", "eu", *place).err
    assert f"Payloads of closed streams, and what is older than 86400 s of open ones go to {world.uri}." in said
    assert "Payloads" not in shell.run("spaces", "alter", "eu", "--no-payload-location").err
    said = shell.run("spaces", "create", "us", "us/#", "--payload-location", world.uri).err
    assert f"in 16 streams. Payloads of closed streams go to {world.uri}." in said
    for wrong in (
        ["--restore-payloads"],
        [],
        ["--no-payload-location", "--tier-after", "1d"],
        ["--payload-location", "s3://k:secret@b"],
    ):
        refused = shell.run("spaces", "alter", "eu", *wrong)
        assert refused.code == 2, wrong
        assert "secret" not in refused.err


@pytest.mark.parametrize("how", [(), ("--epochs",)])
@pytest.mark.long
def test_tail_waits_for_a_place_and_omits_nothing(
    shell: Shell, conn: Connection, world: LocalWorld, stream: int, how: tuple[str, ...]
) -> None:
    well = stream_of(conn, "default")
    fill(conn, well, 2)
    world.go_away()
    tail = shell.start("tail", "#", "--from", "earliest", "--no-follow", "--json", *how)
    tail.says("Waiting: the payload location")
    world.come_back()
    answer = tail.end()
    assert answer.code == 0, answer.err
    shown = [(line["stream_id"], line["offset"]) for line in answer.lines if "offset" in line]
    assert [at for at, _ in shown[:4]] == [well] * 4, "what lies elsewhere comes first"
    assert shown[4:] == [(stream, offset) for offset in range(2 * BLOCKS)]
