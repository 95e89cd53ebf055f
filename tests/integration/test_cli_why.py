"""Why streams stand still, asked of a real database, with and without those who would know more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.desired_state import PauseGroup, ResumeGroup
from sublet_storage.groups.model.records import (
    AdvancePosition,
    ForceRelease,
    GroupOptions,
    RecordHistory,
    ReleaseStream,
)
from sublet_storage.groups.status import diagnosis_queries, overview
from sublet_storage.groups.status.diagnosis_facts import StallReason
from sublet_storage.node_directory import register
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space, rollover
from tests.integration.cli_kit import Shell, done, refused
from tests.integration.lending_kit import GROUP, NODE, SUBSCRIPTION, World, a_world, open_streams
from tests.integration.log_kit import Connection

SLOW_AGE = """
create or replace function appended_at(p_generation bigint, p_stream bigint, p_offset bigint) returns timestamptz
language plpgsql as $$ begin perform pg_sleep(0.1); return clock_timestamp(); end $$"""


@pytest.fixture
def streams(conn: Connection) -> tuple[int, ...]:
    return open_streams(conn)


@pytest.fixture
def world(database: str, conn: Connection, streams: tuple[int, ...]) -> Iterator[World]:
    with a_world(database, conn) as world:
        yield world


@pytest.mark.conforms("A7")
def test_from_nobody_there_to_everything_consumed(world: World, streams: tuple[int, ...]) -> None:
    first, second = streams
    assert set(world.why().values()) == {StallReason.NO_NODE}
    register(world.conn, NODE, 60, PROTOCOL_VERSION)
    assert set(world.why().values()) == {StallReason.NO_MEMBER}
    world.lead()
    assert set(world.why().values()) == {StallReason.MEMBERS_SILENT}
    held = world.lend(first)
    assert world.why() == {first: StallReason.CONSUMING, second: StallReason.GRANT_PENDING}
    world.rest()
    assert world.why()[first] is StallReason.STALLED
    assert world.because(first).startswith("etl has it and has reported nothing for 6")
    world.write(RecordHistory(first, held.grant_id, "revoke", "rebalance"))
    assert world.because(first) == "it is being taken back from etl: rebalance"
    world.write(ForceRelease(first, held.grant_id, "deadline"))
    again = world.lend(first)
    world.rest()
    assert world.why()[first] is StallReason.STALLED, "a revoke of an older grant is over"
    world.write(AdvancePosition(first, again.grant_id, again.head))
    assert world.why()[first] is StallReason.CAUGHT_UP
    world.store.apply_command(SUBSCRIPTION, PauseGroup("repairs"))
    assert world.because(first) == "the group is paused: repairs; etl has not handed it over yet"
    world.store.apply_command(SUBSCRIPTION, ResumeGroup())
    world.store.release(NODE, {world.group: world.term})
    assert world.why()[second] is StallReason.NO_LEADER
    world.conn.execute("update node set draining = true")
    assert world.because(second) == "nobody leads the group, and all nodes that are there drain: n1"


@pytest.mark.conforms("A7")
def test_reserved_blocked_and_behind_parents(database: str, world: World, streams: tuple[int, ...]) -> None:
    first, second = streams
    world.lead()
    held = world.lend(first, epoch=5)
    world.write(ReleaseStream(first, held.grant_id, 0, "left", 60.0))
    world.lend(second)
    assert world.why() == {first: StallReason.RESERVED_FOR_SESSION, second: StallReason.CONSUMING}
    held = world.lend(first, epoch=5)
    world.write(AdvancePosition(first, held.grant_id, 0, in_doubt=InDoubtRange(held.grant_id, 0, 1, 60.0)))
    world.write(ReleaseStream(first, held.grant_id, 0, "left"))
    assert world.why()[first] is StallReason.RESERVED
    assert "it waits for session etl, " in world.because(first)
    rollover(world.conn, "default")
    world.publish(database)
    reasons = world.why()
    children = set(reasons) - {first, second}
    assert {reasons[child] for child in children} == {StallReason.WAITING_FOR_PARENTS}
    child = min(child for child in children if f": {first} (reserved, at 0 of " in world.because(child))
    world.conn.execute("update lending set status = 'finished' where stream_id = %s", (first,))
    assert (world.why()[first], world.why()[child]) == (StallReason.FINISHED, StallReason.GRANT_PENDING)
    world.conn.execute("update lending set status = 'blocked' where stream_id = %s", (first,))
    assert world.because(first) == "it is blocked: no reason is recorded"
    world.conn.execute("update lending set status = 'free', held_until = null where stream_id = %s", (first,))
    world.conn.execute("update generation set state = 'gone' where state = 'closed'")
    assert world.why()[first] is StallReason.GONE


@pytest.mark.conforms("A7", "S9")
@pytest.mark.parametrize("is_new", [False, True])
@pytest.mark.usefixtures("streams")
def test_entire_epochs_wait_for_their_publisher(database: str, conn: Connection, is_new: bool) -> None:
    """Also where a group is new, and its first epoch comes after those that are to be completed next."""
    with (
        Publisher(database, space="default", producer="closing") as closing,
        Publisher(database, space="default", producer="other") as other,
    ):
        for publisher, epoch in ((closing, 7), (other, 9)):
            publisher.in_epoch(epoch).publish("orders/eu", b"1", key=b"k").result(60)
        store = PostgresGroupStore(database)
        group = store.declare_group(SUBSCRIPTION, GroupOptions(atomic=True))
        closing.in_epoch(7).publish("orders/eu", b"1", key=b"k").result(60)
        if not is_new:
            conn.execute(
                "update lending l set consumed = jsonb_set(consumed, '{least}', p.lower_frontier) from space p"
            )
        register(conn, NODE, 60, PROTOCOL_VERSION)
        store.claim(group.group_id, NODE, 60)
        store.close()
        found = [each.diagnosis for each in diagnosis_queries.diagnose_group(conn, SUBSCRIPTION)[1]]
        (detail,) = [each.detail for each in found if each.reason is StallReason.WAITING_FOR_EPOCHS]
        said = "the epochs of space default from 7 on are not completed: producer closing may still publish there"
        assert detail == said


@pytest.mark.conforms("A7", "A9")
def test_the_command_groups_streams_by_reason(shell: Shell, world: World, streams: tuple[int, ...]) -> None:
    first, second = streams
    answer = shell.run("groups", "why", GROUP)
    assert answer.out == (
        f"2 of 2 streams of {GROUP} are not consumed to their ends. Being consumed right now: 0.\n\n"
        f"no_node: streams {first}-{second}\n"
        "  nobody leads the group, and no node is there\n  -> Start one: sublet leader\n"
    )
    world.lead()
    world.lend(first)
    world.conn.execute("update lending set updated_at = updated_at + interval '1 hour'")  # never slow, on any machine
    reported = done(shell.run("groups", "why", GROUP, "--json"))
    assert (reported["subscription"], reported["consuming"]) == (GROUP, 1)
    assert [(each["stream_id"], each["reason"], each["owner"]) for each in reported["streams"]] == [
        (first, "consuming", "etl"), (second, "grant_pending", None),
    ]  # fmt: skip
    prose = shell.run("groups", "why", GROUP).out
    assert "right now: 1.\n" in prose
    assert f"stream {second}" in prose
    assert "consuming" not in prose
    assert f"consuming: stream {first}" in shell.run("groups", "why", GROUP, "--stream", str(first)).out
    for command in ("why", "history"):
        refused(shell.run("groups", command, GROUP, "--stream", "999"), 3, "stream 999 is none of")
    refused(shell.run("groups", "why", GROUP, "--stream", "x"), 2, "--stream 'x'")
    refused(shell.run("groups", "why", "$share/none/#"), 3, "there is no such group")


@pytest.mark.conforms("A7")
def test_a_group_that_is_well_does_not_sound_ill(shell: Shell, world: World, streams: tuple[int, ...]) -> None:
    first, second = streams

    def said(*more: str) -> str:
        answer = shell.run("groups", "why", GROUP, *more)
        assert answer.code == 0, answer.err
        return answer.out

    world.lead()
    held = {each: world.lend(each) for each in streams}
    world.write(AdvancePosition(first, held[first].grant_id, held[first].head))
    assert said() == f"1 of 2 streams of {GROUP} are not consumed to their ends. Being consumed right now: 1.\n"
    world.write(AdvancePosition(second, held[second].grant_id, held[second].head))
    all_is_well = f"Nothing waits: all 2 streams of {GROUP} are consumed to their ends. Held: "
    assert said() == f"{all_is_well}2.\n"
    world.conn.execute("update lending set status = 'finished', borrower_id = null where stream_id = %s", (first,))
    assert said() == f"{all_is_well}1, finished: 1.\n"
    assert said("--stream", str(first)) == f"finished: stream {first}\n  it is closed, and consumed to its end\n"
    world.write(ReleaseStream(second, held[second].grant_id, held[second].head, "left"))
    world.store.release(NODE, {world.group: world.term})
    assert said().startswith(f"{all_is_well}0, finished: 1.\n\nno_member: stream")


@pytest.mark.long
def test_a_statement_reads_a_page_of_streams(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ages of all streams in one statement would take longer than that may: here each takes 0.1 s."""
    monkeypatch.setattr(overview, "PAGE", 4)
    monkeypatch.setattr(overview, "STATEMENT_TIMEOUT_S", 4.0)
    create_space(world.conn, "wide", "orders/wide/#", shards=44)
    world.conn.execute("update stream set head = 1 where state = 'open'")
    world.conn.execute(SLOW_AGE)
    answers = diagnosis_queries.diagnose_group(world.conn, SUBSCRIPTION)[1]
    ids = [answer.stream.stream_id for answer in answers]
    assert len(ids) > 44
    assert ids == sorted(set(ids))
