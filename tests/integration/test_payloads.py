"""Payloads outside of Postgres, as seen by consumers, operators and whoever is on call; a directory stands for all."""

from __future__ import annotations

import logging
import os
from typing import Any

import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.fetch.database_reader import DatabaseMessageReader
from sublet_borrower.fetch.node_reader import NodeMessageReader
from sublet_borrower.node_client.feed_client import Feed
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.spark.common.source_columns import all_columns, to_arrow_schema
from sublet_borrower.spark.source import range_reader
from sublet_borrower.spark.source.range_reader import RangePartition, read_task
from sublet_borrower.streams.granted_stream import GrantedStream
from sublet_leader.jobs.maintenance import MaintenanceThreads
from sublet_protocol.domain.errors import (
    Conflict,
    InvalidSetting,
    PayloadDamaged,
    PayloadObjectUnreadable,
    PayloadUnavailable,
    Unavailable,
)
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.doctor import location_checks
from sublet_storage.doctor.checks import DoctorCheckResult, Severity, run_checks
from sublet_storage.groups.coordinator.history_queries import delete_old_history, read_history
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import MAINTENANCE, RecordHistory
from sublet_storage.groups.status import diagnosis_queries, json_views
from sublet_storage.groups.status.diagnosis_facts import StallReason
from sublet_storage.groups.status.overview import describe_group, list_groups
from sublet_storage.log import fetch as message_log
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.objects.object_stores import LocalBackend
from sublet_storage.spaces import tiering
from sublet_storage.spaces.space_changes import alter_space, create_space, rollover
from sublet_storage.spaces.space_queries import find_space
from tests.integration.cli_kit import Shell
from tests.integration.feed_kit import read_values, serving
from tests.integration.http_kit import Http
from tests.integration.lending_kit import GROUP as LED_BY_HAND
from tests.integration.lending_kit import a_world, open_streams
from tests.integration.log_kit import Connection, generation_of, of_stream, stream_of
from tests.kit import GRANT_KEY, WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet
from tests.payload_kit import LocalWorld, a_closed_stream, a_space, fill, move, outside, when_back

BLOCKS = 6


@pytest.fixture
def stream(conn: Connection, world: LocalWorld) -> int:
    """Return a stream with all payloads outside."""
    space = a_space(conn, world)
    stream = a_closed_stream(conn, BLOCKS)
    assert move(conn, space) == BLOCKS
    return stream


@pytest.fixture
def well(conn: Connection, stream: int) -> int:
    """Return a stream of ten messages whose space has no such place."""
    create_space(conn, "us", "us/#", shards=1)
    well = stream_of(conn, "us")
    fill(conn, well, 5)
    return well


def granted_of(conn: Connection, stream: int) -> GrantedStream:
    return GrantedStream(stream, 1, generation_of(conn, stream), TopicFilter("#"), 0, grant_key=GRANT_KEY)


def next_page(reader: DatabaseMessageReader | NodeMessageReader, granted: GrantedStream) -> tuple[int, int]:
    """Return where the next page begins and ends."""
    page = reader.fetch(granted, lambda _: True)
    assert page is not None
    return page.start, page.position


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
    assert next_page(reader, granted) == (0, 2)
    world.go_away()
    for _ in range(3):
        with pytest.raises(PayloadUnavailable, match="the payload location"):
            reader.fetch(granted, lambda _: True)
    world.come_back()
    assert when_back(lambda: next_page(reader, granted)) == (2, 4)
    reader.close()


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
        assert next_page(reader, granted) == (0, 4), "what lies before it"
        with pytest.raises(PayloadObjectUnreadable, match=r"begins at offset 4 and ends before .*Input/output error"):
            reader.fetch(granted, lambda _: True)
    assert next_page(reader, granted) == (4, 2 * BLOCKS)
    reader.close()


def test_through_a_node_others_go_on(
    database: str, conn: Connection, world: LocalWorld, stream: int, well: int, caplog: pytest.LogCaptureFixture
) -> None:
    """While a place is away or a payload damaged, all other streams go on."""
    caplog.set_level(logging.INFO)
    with serving(database) as server:
        reader = NodeMessageReader([server.address], 1, 5.0)
        granted, other = granted_of(conn, stream), granted_of(conn, well)
        world.go_away()
        for _ in range(5):
            with pytest.raises(PayloadUnavailable, match="the payload location"):
                reader.fetch(granted, lambda _: True)
            assert reader.fetch(other, lambda _: True) is not None, "no pause and no other connection in between"
        assert [each for each in caplog.records if "node" in each.getMessage()] == []
        world.come_back()
        assert when_back(lambda: next_page(reader, granted)) == (0, 2)
        (third,) = [name for name in world.names() if f"/{stream}-6-" in name]
        world.write(third, b"something else")
        assert next_page(reader, granted) == (2, 4)
        with pytest.raises(PayloadDamaged, match=rf"stream {stream}: .*ends before offset 6"):
            reader.fetch(granted, lambda _: True)
        reader.close()


@pytest.mark.long
def test_a_feed_shows_the_rest_and_what_it_waits_for(
    database: str, conn: Connection, world: LocalWorld, stream: int, well: int
) -> None:
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
        when_back(lambda: next_page(DatabaseMessageReader(database, 1, 5.0), granted_of(conn, stream)))
        with feed.history("#", "earliest") as reader:
            assert len(read_values(reader, 2 * BLOCKS + 10)) == 2 * BLOCKS + 10


def test_a_spark_task_waits_for_the_place(
    database: str, conn: Connection, world: LocalWorld, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = (stream, generation_of(conn, stream), 0, 2 * BLOCKS)
    task = RangePartition(*place, "#", "eu", database, "sublet", os.uname().nodename, True, timeline_number=0)
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


BLOCKS = 6
GROUP = "$share/g/eu/#"
SUBSCRIPTION = Subscription.parse(GROUP)


# --- what whoever is on call sees -------------------------------------------------------------------------------------


def reason(conn: Connection, stream: int) -> StallReason | None:
    answers = diagnosis_queries.diagnose_group(conn, SUBSCRIPTION)[1]
    return next((each.diagnosis.reason for each in answers if each.stream.stream_id == stream), None)


def reading(conn: Connection) -> DoctorCheckResult:
    (finding,) = [each for each in run_checks(conn, 0.0, PROTOCOL_VERSION) if each.check == "reading"]
    return finding


def troubles(conn: Connection) -> list[str]:
    lines = read_history(conn, describe_group(conn, SUBSCRIPTION).group.group_id).records
    return [line.event for line in lines if line.event in ("unreadable", "readable")]


@pytest.mark.conforms("A7")
@pytest.mark.long
def test_an_unreadable_stream_is_named_until_read_on(
    database: str, conn: Connection, stream: int, empty_fleet: Fleet, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command names it, whoever leads the group."""
    monkeypatch.setattr("sublet_borrower.fetch.stream_fetcher.UNREADABLE_RETRY_S", 0.2)
    (third,) = [uri.partition("/payloads/")[2] for uri in outside(conn) if f"/{stream}-6-" in uri]
    act, sector, empty_fleet.extra = LocalBackend.read, {"is bad": True}, {"SUBLET_HTTP": "yes"}

    def read_of_disk(self: LocalBackend, name: str, most: int) -> Any:
        if name == third and sector["is bad"]:
            raise OSError(5, "Input/output error")
        return act(self, name, most)

    monkeypatch.setattr(LocalBackend, "read", read_of_disk)
    first = empty_fleet.node("n1")
    with Session(GROUP, database, starting_position="earliest", settings=BorrowerSettings().scaled(SPEED)) as session:

        def consume(until: Any) -> Any:
            def look() -> Any:
                session.poll(0.05)
                return until()

            return eventually(look, WAIT_S, first.output)

        consume(lambda: session.assignment().get(stream) == 4)
        consume(lambda: reason(conn, stream) is StallReason.UNREADABLE)
        (answer,) = diagnosis_queries.diagnose_group(conn, SUBSCRIPTION, stream)[1]
        assert "has it and cannot read on, for " in answer.diagnosis.detail
        assert third in answer.diagnosis.detail
        assert str(answer.diagnosis.hint).endswith(f": sublet groups reset '{GROUP}' --stream {stream} --to-offset 6")
        details = json_views.details_to_json(describe_group(conn, SUBSCRIPTION))
        (reported,) = [each for each in details["streams"] if each["unreadable_s"]]
        assert (reported["stream_id"], "ends before offset 6" in reported["unreadable_reason"]) == (stream, True)
        of_group = json_views.summary_to_json(list_groups(conn)[0])
        assert (of_group["state"], of_group["unreadable_streams"]) == ("unreadable", 1)
        assert Http.of(first).metric("sublet_consumergroup_unreadable_streams", subscription=GROUP) == 1
        found = reading(conn)
        assert (found.state, f"{stream} of {GROUP}" in found.detail) == (Severity.ERROR, True)
        assert f"unreadable stream {stream}, for " in shell.run("groups", "describe", GROUP).out
        assert f"unreadable: stream {stream}\n" in shell.run("groups", "why", GROUP).out

        first.kill()
        second = empty_fleet.node("n2")
        consume(lambda: troubles(conn) == ["unreadable"] * 2)
        consume(lambda: Http.of(second).metric("sublet_consumergroup_unreadable_streams", subscription=GROUP) == 1)
        assert reason(conn, stream) is StallReason.UNREADABLE
        again = of_stream(describe_group(conn, SUBSCRIPTION).streams, stream).unreadable_s
        assert (again or 0.0) > 0.5, "since it began, not since there is another leader"

        sector["is bad"] = False
        consume(lambda: reason(conn, stream) is StallReason.FINISHED)
        assert troubles(conn) == ["unreadable", "unreadable", "readable"]
        assert reading(conn).state is Severity.OK
        consume(lambda: Http.of(second).metric("sublet_consumergroup_unreadable_streams", subscription=GROUP) == 0)
        assert json_views.summary_to_json(list_groups(conn)[0])["unreadable_streams"] == 0


@pytest.mark.conforms("A7")
def test_trouble_belongs_to_grant_and_holder(database: str, conn: Connection) -> None:
    """It is remembered as long as that grant and its holder last."""
    first, second = open_streams(conn)[:2]
    with a_world(database, conn) as led:
        led.lead()
        grants = {each: led.lend(each).grant_id for each in (first, second)}
        for each in (first, second):
            led.write(RecordHistory(each, grants[each], "unreadable", "damaged."))
            led.write(RecordHistory(each, grants[each], "readable", "it can be read again"))
        led.write(RecordHistory(first, grants[first], "unreadable", "damaged."))
        conn.execute("update lending_history set at = at - interval '1 hour'")
        assert led.because(first) == "etl has it and cannot read on, for 3600 s now: damaged"
        assert led.why()[second] is StallReason.CONSUMING
        delete_old_history(conn, 60.0)
        assert conn.execute("select stream_id, event from lending_history").fetchall() == [(first, "unreadable")]
        assert led.why()[first] is StallReason.UNREADABLE
        conn.execute("update lending set borrower_id = 'b2' where stream_id = %s", (first,))
        assert led.why()[first] is StallReason.CONSUMING, "the next leader is notified again"
        conn.execute("update lending set borrower_id = 'b1', grant_id = grant_id + 1 where stream_id = %s", (first,))
        assert led.why()[first] is StallReason.CONSUMING
        delete_old_history(conn, 60.0)
        assert conn.execute("select from lending_history").rowcount == 0
        assert LED_BY_HAND not in reading(conn).detail


# --- what is late ----------------------------------------------------------------------------------------------------


def overdue(conn: Connection) -> list[str]:
    return [each.detail for each in location_checks.check_locations(conn) if each.state is Severity.WARNING]


def test_the_doctor_warns_of_late_payloads(conn: Connection, world: LocalWorld) -> None:
    space = a_space(conn, world)
    a_closed_stream(conn, BLOCKS)
    fill(conn, stream_of(conn, "eu"), BLOCKS)
    assert overdue(conn) == [], "a rollover a moment ago"
    conn.execute("update generation set closed_at = closed_at - interval '7 hours' where state = 'closed'")
    conn.execute("update block set appended_at = appended_at - interval '9 hours'")
    (said,) = overdue(conn)
    assert said.startswith(
        f"space eu: payloads of 1 streams should have been moved to {world.uri} long ago, the oldest 7"
    )
    alter_space(conn, "eu", tier_after_s=3600)
    (said,) = overdue(conn)
    assert "payloads of 2 streams" in said
    assert said.endswith("the oldest 8 h ago")
    alter_space(conn, "eu", tier_after_s=None)
    assert move(conn, space) == BLOCKS
    assert overdue(conn) == []
    assert move(conn, alter_space(conn, "eu", tier_after_s=3600)) == BLOCKS
    fill(conn, stream_of(conn, "eu"), 1)
    assert overdue(conn) == [], "what is left came a moment ago"


def test_what_is_too_small_to_be_moved_is_not_late(conn: Connection, world: LocalWorld) -> None:
    space = a_space(conn, world)
    fill(conn, stream_of(conn, "eu"), 1, size=10)
    rollover(conn, "eu")
    conn.execute("update generation set closed_at = closed_at - interval '7 hours' where state = 'closed'")
    assert len(overdue(conn)) == 1, "nobody has looked at it"
    assert move(conn, space) == 0
    assert overdue(conn) == []
    alter_space(conn, "eu", payload_location=None)
    conn.execute("update stream set tiered_offset = null")
    assert overdue(conn) == [], "nothing is to be moved any more"


def test_a_block_of_the_least_size_is_moved(
    conn: Connection, world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = a_space(conn, world)
    fill(conn, stream_of(conn, "eu"), 1)
    rollover(conn, "eu")
    ((size,),) = conn.execute("select octet_length(payload) from block").fetchall()
    monkeypatch.setattr(tiering, "MIN_BYTES", size)
    assert move(conn, space) == 1


# --- what a node's log says ------------------------------------------------------------------------------------------


def test_an_outage_of_a_place_and_its_end_are_logged(
    database: str, conn: Connection, world: LocalWorld, caplog: pytest.LogCaptureFixture
) -> None:
    """Each once, in however many passes; another outage is reported again."""
    caplog.set_level(logging.INFO, "sublet_leader.jobs.maintenance")
    a_space(conn, world)
    a_closed_stream(conn, BLOCKS)
    store = PostgresGroupStore(database)
    term = store.claim(MAINTENANCE, NodeIncarnation("n1", "a life", "127.0.0.1:1"), 60).term
    store.close()
    passes = 0

    def term_of() -> int:
        nonlocal passes
        passes += 1
        return term

    def said(level: int) -> list[str]:
        lines = [each.getMessage() for each in caplog.records if each.levelno == level]
        return [line for line in lines if "of space eu" in line]

    world.root.rmdir()
    keeper = MaintenanceThreads(database, term_of, 60.0, every_s=0.05)
    keeper.start()
    try:
        eventually(lambda: said(logging.WARNING) and passes > 10, WAIT_S)
        (warning,) = said(logging.WARNING)
        assert warning.startswith("maintenance steps failed, retrying: step_count=1: tiering of space eu: ")
        assert said(logging.INFO) == []
        world.root.mkdir()
        eventually(lambda: said(logging.INFO), WAIT_S)
        assert said(logging.INFO)[0] == "maintenance steps recovered: tiering of space eu"
        eventually(lambda: len(outside(conn)) == BLOCKS, WAIT_S)
        world.go_away()
        fill(conn, stream_of(conn, "eu"), 1, size=70_000)
        rollover(conn, "eu")
        eventually(lambda: len(said(logging.WARNING)) == 2, WAIT_S)
    finally:
        keeper.stop()
