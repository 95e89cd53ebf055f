"""What whoever is on call sees of payloads outside of Postgres: streams that are stuck, backlogs, logs of nodes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_leader.jobs.maintenance import MaintenanceThreads
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.doctor import location_checks
from sublet_storage.doctor.checks import DoctorCheckResult, Severity, run_checks
from sublet_storage.groups.coordinator.history_queries import delete_old_history, read_history
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import MAINTENANCE, RecordHistory
from sublet_storage.groups.status import diagnosis_queries, json_views
from sublet_storage.groups.status.diagnosis_facts import StallReason
from sublet_storage.groups.status.overview import describe_group, list_groups
from sublet_storage.groups.status.overview_model import StreamView
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.objects.object_stores import LocalBackend
from sublet_storage.spaces import tiering
from sublet_storage.spaces.space_changes import alter_space, rollover
from tests.integration.cli_kit import a_shell
from tests.integration.http_kit import Http
from tests.integration.lending_kit import GROUP as LED_BY_HAND
from tests.integration.lending_kit import a_world, open_streams
from tests.integration.log_kit import Connection, stream_of
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet
from tests.payload_kit import LocalWorld, a_closed_stream, a_space, fill, move, outside

BLOCKS = 6
GROUP = "$share/g/eu/#"
SUBSCRIPTION = Subscription.parse(GROUP)


@pytest.fixture
def fleet(database: str, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(database, tmp_path, extra={"SUBLET_HTTP": "yes"})
    yield fleet
    fleet.close()


def reason(conn: Connection, stream: int) -> StallReason | None:
    answers = diagnosis_queries.diagnose_group(conn, SUBSCRIPTION)[1]
    return next((each.diagnosis.reason for each in answers if each.stream.stream_id == stream), None)


def line_of(conn: Connection, stream: int) -> StreamView:
    (line,) = [each for each in describe_group(conn, SUBSCRIPTION).streams if each.stream_id == stream]
    return line


def reading(conn: Connection) -> DoctorCheckResult:
    (finding,) = [each for each in run_checks(conn, 0.0, PROTOCOL_VERSION) if each.check == "reading"]
    return finding


def troubles(conn: Connection) -> list[str]:
    lines = read_history(conn, describe_group(conn, SUBSCRIPTION).group.group_id).records
    return [line.event for line in lines if line.event in ("unreadable", "readable")]


@pytest.mark.long
@pytest.mark.conforms("A7")
@pytest.mark.conforms("W10")
def test_a_damaged_payload_blocks_its_stream(database: str, conn: Connection, fleet: Fleet, world: LocalWorld) -> None:
    """It goes on when the payload is put right and the stream is reset."""
    space = a_space(conn, world)
    stream = a_closed_stream(conn, BLOCKS)
    move(conn, space)
    (third,) = [name for name in world.names() if f"/{stream}-6-" in name]
    retained = world.read(third)
    world.write(third, b"something else")
    node = fleet.node("n1")
    with Session(GROUP, database, starting_position="earliest", settings=BorrowerSettings().scaled(SPEED)) as session:

        def consume(until: Any) -> Any:
            return eventually(lambda: session.poll(0.05) is None and until(), WAIT_S, node.output)

        consume(lambda: list_groups(conn) and reason(conn, stream) is StallReason.BLOCKED)
        (answer,) = diagnosis_queries.diagnose_group(conn, SUBSCRIPTION, stream)[1]
        assert third in answer.diagnosis.detail
        assert str(answer.diagnosis.hint).endswith(f": sublet groups reset '{GROUP}' --stream {stream} --to-offset 6")
        assert line_of(conn, stream).position == 4
        world.write(third, retained)
        with a_shell(SUBLET_DATABASE_URL=database) as shell:
            assert f"--stream {stream} --to-current" in str(answer.diagnosis.hint)
            assert shell.run("groups", "reset", GROUP, "--stream", str(stream), "--to-current", "--yes").code == 0
        consume(lambda: reason(conn, stream) is StallReason.FINISHED)
        assert line_of(conn, stream).lost_message_count == 0


@pytest.mark.conforms("A7")
@pytest.mark.long
def test_an_unreadable_stream_is_named_until_read_on(
    database: str, conn: Connection, fleet: Fleet, world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command names it, whoever leads the group."""
    monkeypatch.setattr("sublet_borrower.fetch.stream_fetcher.UNREADABLE_RETRY_S", 0.2)
    space = a_space(conn, world)
    stream = a_closed_stream(conn, BLOCKS)
    move(conn, space)
    (third,) = [name for name in world.names() if f"/{stream}-6-" in name]
    act, sector = LocalBackend.read, {"is bad": True}

    def read_of_disk(self: LocalBackend, name: str, most: int) -> Any:
        if name == third and sector["is bad"]:
            raise OSError(5, "Input/output error")
        return act(self, name, most)

    monkeypatch.setattr(LocalBackend, "read", read_of_disk)
    first = fleet.node("n1")
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
        (reported,) = [
            each
            for each in json_views.details_to_json(describe_group(conn, SUBSCRIPTION))["streams"]
            if each["unreadable_s"]
        ]
        assert (reported["stream_id"], "ends before offset 6" in reported["unreadable_reason"]) == (stream, True)
        of_group = json_views.summary_to_json(list_groups(conn)[0])
        assert (of_group["state"], of_group["unreadable_streams"]) == ("unreadable", 1)
        assert Http.of(first).metric("sublet_consumergroup_unreadable_streams", subscription=GROUP) == 1
        found = reading(conn)
        assert (found.state, f"{stream} of {GROUP}" in found.detail) == (Severity.ERROR, True)
        with a_shell(SUBLET_DATABASE_URL=database) as shell:
            assert f"unreadable stream {stream}, for " in shell.run("groups", "describe", GROUP).out
            assert f"unreadable: stream {stream}\n" in shell.run("groups", "why", GROUP).out

        first.kill()
        second = fleet.node("n2")
        consume(lambda: troubles(conn) == ["unreadable"] * 2)
        consume(lambda: Http.of(second).metric("sublet_consumergroup_unreadable_streams", subscription=GROUP) == 1)
        assert reason(conn, stream) is StallReason.UNREADABLE
        again = line_of(conn, stream).unreadable_s
        assert again is not None
        assert again > 0.5, "since it began, not since there is another leader"

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
        return [
            each.getMessage() for each in caplog.records if each.levelno == level and "of space eu" in each.getMessage()
        ]

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
