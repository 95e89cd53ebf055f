"""Who had a stream at a time in the past, and who led."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.coordinator.history_queries import HistoricalGroupState, has_owner, read_group_at
from sublet_storage.groups.model.records import (
    AdvancePosition,
    GrantStream,
    GroupOptions,
    GroupWrites,
    HistoryRecord,
    ReclaimStream,
    RecordHistory,
    ReleaseStream,
)
from sublet_storage.node_directory import NodeIncarnation
from tests.integration.cli_kit import Shell, done, refused
from tests.integration.lending_kit import GROUP, NODE, World, a_world, open_streams
from tests.integration.log_kit import Connection

OTHER = NodeIncarnation("n2", "a life of n2", "127.0.0.1:2")


@pytest.fixture
def world(database: str, conn: Connection) -> Iterator[World]:
    with a_world(database, conn) as world:
        yield world


def owners(then: HistoricalGroupState) -> dict[int, str | None]:
    return {line.stream_id: (line.session or line.agent) if has_owner(line) else None for line in then.streams}


def led(then: HistoricalGroupState) -> str | None:
    return None if then.leader is None else then.leader.reason


@pytest.mark.conforms("A7")
def test_each_time_has_one_owner_or_none(world: World) -> None:
    first, second = open_streams(world.conn)
    group = world.group
    times = [world.now_us()]
    world.lead()
    times.append(world.now_us())
    held = world.lend(first)
    times.append(world.now_us())
    world.write(RecordHistory(first, held.grant_id, "revoke", "rebalance"))
    world.write(ReclaimStream(first, held.grant_id, 0, "b2", "host:1:x"))
    world.lend(second, None)
    times.append(world.now_us())
    world.write(ReleaseStream(first, held.grant_id, 1, "left"))
    another = world.store.declare_group(Subscription.parse("$share/another/#"), GroupOptions()).group_id
    claimed = world.store.claim(another, NODE, 60)
    world.store.commit([GroupWrites(another, claimed.term, (GrantStream(first, "b3", "theirs", None, "x"),), True)])
    world.store.release(NODE, {group: world.term})
    world.term = world.store.claim(group, OTHER, 60).term
    times.append(world.now_us())
    again = world.lend(first, "other")
    world.write(AdvancePosition(first, again.grant_id, 2))
    times.append(world.now_us())
    seen = [read_group_at(world.conn, group, at_us) for at_us in times]
    assert [owners(then) for then in seen] == [
        {}, {}, {first: "etl"}, {first: "etl", second: "host:1:x"}, {first: None, second: "host:1:x"},
        {first: "other", second: "host:1:x"},
    ]  # fmt: skip
    assert [led(then) for then in seen] == [
        None, *["node n1 leads; first leader"] * 3, *["node n2 leads; before: n1"] * 2,
    ]  # fmt: skip
    one = read_group_at(world.conn, group, times[3], first)
    assert (owners(one), led(one)) == ({first: "etl"}, "node n1 leads; first leader")


def test_after_the_end_of_a_grant_nobody_owns_it() -> None:
    def line(event: str) -> HistoryRecord:
        return HistoryRecord(0, 1, 2, event, "", 3, "b", "a", 0, 4, is_forced=False)

    ends = ("release", "finish", "force_release", "reserve", "unreserve", "block", "skip", "reset", "delete")
    assert [event for event in (*ends, "grant", "reclaim", "revoke") if has_owner(line(event))] == [
        "grant", "reclaim", "revoke",
    ]  # fmt: skip


@pytest.mark.conforms("A7", "A9")
def test_the_command_shows_one_stream_or_all(shell: Shell, world: World) -> None:
    first, second = open_streams(world.conn)
    before = str(StartingPosition.at_time(world.now_us()))
    assert "Nothing has happened to it" in shell.run("groups", "history", GROUP).err
    world.lead()
    world.lend(first)
    world.lend(second, "second")
    at = str(StartingPosition.at_time(world.now_us()))
    reported = done(shell.run("groups", "history", GROUP, "--at", at, "--stream", str(first), "--json"))
    assert reported["at"] == at
    assert reported["leader"]["reason"] == "node n1 leads; first leader"
    assert [(each["stream_id"], each["session"], each["owned"]) for each in reported["streams"]] == [
        (first, "etl", True)
    ]
    answer = shell.run("groups", "history", GROUP, "--at", at)
    assert [line.split()[:2] for line in answer.out.splitlines()[1:]] == [[str(first), "etl"], [str(second), "second"]]
    assert "node n1 leads" in answer.err
    assert "none had been granted yet" in shell.run("groups", "history", GROUP, "--at", before).err
    refused(shell.run("groups", "history", GROUP, "--at", "noon"), 2, "--at 'noon': give a time such as")
