"""Groups from the command line, from their declaration to their end: real processes, a real database."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.history_queries import (
    MAX_RECENT_MOVES,
    HistoricalGroupState,
    has_owner,
    read_group_at,
)
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import (
    AdvancePosition,
    ForceRelease,
    GrantStream,
    GroupOptions,
    GroupWrites,
    HistoryRecord,
    Lending,
    ReclaimStream,
    RecordHistory,
    ReleaseStream,
)
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.producer import Publisher
from tests.integration.cli_kit import Shell, done, refused
from tests.integration.lending_kit import GROUP, NODE, SUBSCRIPTION, World, a_world, open_streams
from tests.integration.log_kit import Connection
from tests.kit import eventually

QUEUE = "$queue/mails/mail/#"


def listed(shell: Shell) -> list[str]:
    return [group["subscription"] for group in done(shell.run("groups", "list", "--json"))["groups"]]


# --- declaring ----------------------------------------------------------------------------------------------------


@pytest.mark.conforms("A1", "A9")
def test_creating_the_same_group_twice_is_no_change(shell: Shell) -> None:
    options = "--from offset:3 --on-data-loss skip --hold-retention --session-expiry"
    command = ("groups", "create", QUEUE, *options.split(), "1m")
    first = done(shell.run(*command, "--json"))
    assert first == {
        "subscription": QUEUE, "group_id": 1, "created": True, "starting_position": "offset:3", "on_data_loss": "skip",
        "strategy": "even", "session_expiry_s": 60.0, "atomic": False, "on_poison": "block",
        "holds_retention": True,
    }  # fmt: skip
    assert done(shell.run(*command, "--json")) == {**first, "created": False}
    again = shell.run(*command)
    assert (again.code, "nothing was changed" in again.err) == (0, True)
    refused(shell.run(*command[:-1], "30s"), 4, "its session expiry is 60.0 s, not 30.0 s")
    other = ("its starting position is offset:3, not latest", "is skip, not fail", "is on, not off")
    refused(shell.run("groups", "create", QUEUE), 4, *other)
    reported = done(shell.run("groups", "describe", QUEUE, "--json"))
    del first["created"]
    assert {name: reported[name] for name in first} == first
    assert done(shell.run("groups", "list", "--json"))["groups"][0]["kind"] == "queue"
    prose = shell.run("groups", "describe", QUEUE).out
    assert (
        "starting position offset:3, on data loss skip, strategy even, holds retention back, "
        "streams are reserved 60 s for a named session" in prose
    )


def test_a_group_may_begin_at_a_time(shell: Shell, database: str) -> None:
    shell.leader("n1")
    shell.run("publish", "orders/a", "--key", "k", stdin="old")
    with connect(database) as connection:
        row = connection.execute('select to_char(clock_timestamp(), \'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\')').fetchone()
    assert row is not None
    shell.run("publish", "orders/a", "--key", "k", stdin="new")
    answer = shell.run("consume", GROUP, "--from", row[0], "--max-messages", "1", "--json")
    assert [line["value"] for line in answer.lines] == ["new"]


# --- deleting -----------------------------------------------------------------------------------------------------


@pytest.mark.conforms("E23", "A9")
@pytest.mark.long
def test_deleting_a_group_ends_its_members(shell: Shell) -> None:
    shell.leader("n1")
    consumer = shell.start("consume", GROUP, "--name", "worker-1", "--json")

    def held() -> Any:
        answer = shell.run("groups", "describe", GROUP, "--json")
        return answer.code == 0 and answer.object["streams_by_status"] == {"held": 16} and answer.object

    group = eventually(held, 60)
    retained = shell.run("groups", "delete", GROUP, stdin="n\n")
    assert (retained.code, "Nothing was deleted" in retained.err) == (1, True)
    assert "the lending of 16 streams?" in retained.err
    assert shell.run("groups", "delete", GROUP).code == 1, "nobody answers"
    assert listed(shell) == [GROUP]
    deleted = done(shell.run("groups", "delete", GROUP, "--yes", "--json"))
    assert deleted == {"subscription": GROUP, "group_id": group["group_id"], "deleted": True}
    answer = consumer.end()
    assert (answer.code, "deleted" in answer.err) == (3, True), answer.err
    assert listed(shell) == []
    refused(shell.run("groups", "delete", GROUP, "--yes"), 3, "there is no such group")
    again = done(shell.run("groups", "create", GROUP, "--json"))
    assert again["group_id"] != group["group_id"]
    asked = shell.start("groups", "delete", GROUP, stdin=subprocess.PIPE)
    asked.says("streams?")
    done(shell.run("groups", "delete", GROUP, "--yes", "--json"))
    third = done(shell.run("groups", "create", GROUP, "--json"))
    asked.stdin.write(b"y\n")
    asked.stdin.flush()
    refused(asked.end(), 4, f"(id {again['group_id']}) is gone", f"(id {third['group_id']})")
    answered = shell.run("groups", "delete", GROUP, stdin="y\n")
    assert (answered.code, "is deleted" in answered.err) == (0, True)


@pytest.mark.conforms("E23")
def test_deleting_a_group_may_take_a_minute(shell: Shell, conn: Connection) -> None:
    """For its rows, however many they are."""
    done(shell.run("groups", "create", GROUP, "--json"))
    conn.execute(
        "create function check_timeout() returns trigger language plpgsql as $$ begin"
        " if current_setting('statement_timeout')::interval < interval '1 minute' then"
        " raise 'out of time' using errcode = 'query_canceled'; end if; return null; end $$;"
        " create trigger check_timeout before delete on lending execute function check_timeout()"
    )
    assert done(shell.run("groups", "delete", GROUP, "--yes", "--json"))["deleted"]


# --- what is shown of sessions and of what happened -----------------------------------------------------------------


@pytest.fixture
def unled(database: str, conn: Connection) -> Iterator[World]:
    """A group that keeps streams for named sessions."""
    with a_world(database, conn, session_expiry_s=60) as world:
        yield world


@pytest.fixture
def world(unled: World) -> World:
    """The group, with a leader."""
    unled.lead(listed=False)
    return unled


def rows(world: World) -> tuple[Lending, Lending]:
    first, second = world.store.load(world.group, world.term)
    return first, second


@pytest.mark.conforms("E11", "A2", "A9")
def test_reserved_streams_and_forced_moves_are_shown(shell: Shell, world: World) -> None:
    """Until they are long over, and who led until then."""
    retained, moved = rows(world)
    assert min(retained.head, moved.head) > 1
    ours = world.lend(retained.stream_id, epoch=5)
    world.write(ReleaseStream(retained.stream_id, ours.grant_id, 1, "left", 60.0))
    theirs = world.lend(moved.stream_id, None)
    world.write(AdvancePosition(moved.stream_id, theirs.grant_id, 1))
    world.write(ForceRelease(moved.stream_id, theirs.grant_id, "evicted: no ping in time"))
    reported = done(shell.run("groups", "describe", GROUP, "--json"))
    (waiting,) = reported["reserved_for_sessions"]
    assert (waiting["session"], waiting["streams"]) == ("etl", [retained.stream_id])
    assert 0 < waiting["remaining_s"] <= 60
    by_stream = {line["stream_id"]: line for line in reported["streams"]}
    assert 0 < by_stream[retained.stream_id]["reserved_s"] <= 60
    assert (by_stream[moved.stream_id]["reserved_s"], by_stream[moved.stream_id]["session"]) == (None, None)
    (forced,) = reported["forced_moves"]
    shown = [forced[name] for name in ("stream_id", "event", "position", "redelivery_end", "agent", "reason")]
    assert shown == [moved.stream_id, "force_release", 1, moved.head, "host:1:x", "evicted: no ping in time"]
    prose = shell.run("groups", "describe", GROUP).out
    (leader,) = (line for line in prose.splitlines() if line.startswith("leader"))
    assert "last was" not in leader
    assert "reserved for etl, " in prose
    assert "(reserved for etl)" in prose
    (line,) = (line.split()[1:] for line in prose.splitlines() if "evicted" in line)
    assert line == f"{moved.stream_id} 1 {moved.head} host:1:x evicted: no ping in time".split()
    world.conn.execute("update lending set held_until = held_until - interval '1 hour'")
    world.conn.execute("update lending_history set at = at - interval '2 days'")
    world.conn.execute("update leadership set expires_at = expires_at - interval '1 day'")
    reported = done(shell.run("groups", "describe", GROUP, "--json"))
    assert (reported["reserved_for_sessions"], reported["forced_moves"]) == ([], [])
    assert {(line["session"], line["reserved_s"]) for line in reported["streams"]} == {(None, None)}
    prose = shell.run("groups", "describe", GROUP).out
    assert ("etl" in prose, "evicted" in prose) == (False, False)
    assert f"leader   none (last was {leader.split()[1]}, term" in prose


@pytest.mark.conforms("A2")
def test_finished_streams_are_shown_if_wanted(shell: Shell, world: World) -> None:
    first, second = (row.stream_id for row in rows(world))

    def shown(*more: str) -> tuple[list[str], str]:
        answer = shell.run("groups", "describe", GROUP, *more)
        lines = answer.out.splitlines()
        table = lines[next(number for number, line in enumerate(lines) if line.split()[:1] == ["STREAM"]) + 1 :]
        return [line.split()[0] for line in table], answer.err

    assert shown() == ([str(first), str(second)], "")
    world.conn.execute("update lending set status = 'finished' where stream_id = %s", (first,))
    left_out = "Finished streams, which have nothing more for the group, left out: 1. --all shows them.\n"
    assert shown() == ([str(second)], left_out)
    assert shown("--all") == ([str(first), str(second)], "")
    reported = done(shell.run("groups", "describe", GROUP, "--json"))
    assert [line["stream_id"] for line in reported["streams"]] == [first, second]


@pytest.mark.conforms("A7", "A9")
def test_history_shows_who_led_and_had_what_and_why(shell: Shell, world: World) -> None:
    first, second = rows(world)
    ours = world.lend(first.stream_id)
    world.write(RecordHistory(first.stream_id, ours.grant_id, "revoke", "rebalance"))
    world.write(ForceRelease(first.stream_id, ours.grant_id, "deadline"))
    world.lend(second.stream_id, None)
    reported = done(shell.run("groups", "history", GROUP, "--json"))
    assert (reported["subscription"], reported["group_id"]) == (GROUP, world.group)
    assert [(line["event"], line["stream_id"]) for line in reported["history"]] == [
        ("takeover", None), ("grant", first.stream_id), ("revoke", first.stream_id), ("force_release", first.stream_id),
        ("grant", second.stream_id),
    ]  # fmt: skip
    takeover, _, revoke, force_release, _ = reported["history"]
    assert (takeover["reason"], takeover["term"]) == ("node n1 leads; first leader", world.term)
    assert (revoke["reason"], revoke["session"], revoke["grant_id"]) == ("rebalance", "etl", ours.grant_id)
    assert [force_release[name] for name in ("forced", "position", "redelivery_end")] == [True, 0, first.head]
    one = done(shell.run("groups", "history", GROUP, "--stream", str(first.stream_id), "--limit", "2", "--json"))
    assert [line["event"] for line in one["history"]] == ["revoke", "force_release"]
    assert (reported["total"], one["total"]) == (5, 3)
    cut, entire = (shell.run("groups", "history", GROUP, "--limit", limit) for limit in ("4", "5"))
    assert (len(cut.out.splitlines()), cut.err) == (5, "4 newest of 5 lines: --limit 5 shows more.\n")
    assert (len(entire.out.splitlines()), entire.err) == (6, "")
    table = shell.run("groups", "history", GROUP).out.splitlines()
    assert table[0].split() == ["AT", "EVENT", "STREAM", "POSITION", "TWICE", "OWNER", "REASON"]
    assert table[4].split()[1:] == f"force_release {first.stream_id} 0 [0, {first.head}) etl deadline".split()
    assert len(table) == 6
    world.conn.execute("update lending_history set redelivery_end = position where redelivery_end is not null")
    table = shell.run("groups", "history", GROUP).out.splitlines()
    assert table[4].split()[1:] == f"force_release {first.stream_id} 0 nothing etl deadline".split()
    for name in ("lending", "stream"):  # as maintenance does once every group is past it
        world.conn.execute(f"delete from {name} where stream_id = %s", (first.stream_id,))
    assert done(shell.run("groups", "history", GROUP, "--stream", str(first.stream_id), "--json"))["total"] == 3
    assert f" {NODE.name} " in shell.run("groups", "list").out
    world.store.release(NODE, {world.group: world.term})
    assert f" {NODE.name} " not in shell.run("groups", "list").out, "a former leader is not listed"


OTHER = NodeIncarnation("n2", "a life of n2", "127.0.0.1:2")


def owners(then: HistoricalGroupState) -> dict[int, str | None]:
    return {line.stream_id: (line.session or line.agent) if has_owner(line) else None for line in then.streams}


def led(then: HistoricalGroupState) -> str | None:
    return None if then.leader is None else then.leader.reason


@pytest.mark.conforms("A7")
def test_each_time_has_one_owner_or_none(unled: World) -> None:
    first, second = open_streams(unled.conn)
    group = unled.group
    times = [unled.now_us()]
    unled.lead()
    times.append(unled.now_us())
    held = unled.lend(first)
    times.append(unled.now_us())
    unled.write(RecordHistory(first, held.grant_id, "revoke", "rebalance"))
    unled.write(ReclaimStream(first, held.grant_id, 0, "b2", "host:1:x"))
    unled.lend(second, None)
    times.append(unled.now_us())
    unled.write(ReleaseStream(first, held.grant_id, 1, "left"))
    another = unled.store.declare_group(Subscription.parse("$share/another/#"), GroupOptions()).group_id
    claimed = unled.store.claim(another, NODE, 60)
    unled.store.commit([GroupWrites(another, claimed.term, (GrantStream(first, "b3", "theirs", None, "x"),), True)])
    unled.store.release(NODE, {group: unled.term})
    unled.term = unled.store.claim(group, OTHER, 60).term
    times.append(unled.now_us())
    again = unled.lend(first, "other")
    unled.write(AdvancePosition(first, again.grant_id, 2))
    times.append(unled.now_us())
    seen = [read_group_at(unled.conn, group, at_us) for at_us in times]
    assert [owners(then) for then in seen] == [
        {}, {}, {first: "etl"}, {first: "etl", second: "host:1:x"}, {first: None, second: "host:1:x"},
        {first: "other", second: "host:1:x"},
    ]  # fmt: skip
    assert [led(then) for then in seen] == [
        None, *["node n1 leads; first leader"] * 3, *["node n2 leads; before: n1"] * 2,
    ]  # fmt: skip
    one = read_group_at(unled.conn, group, times[3], first)
    assert (owners(one), led(one)) == ({first: "etl"}, "node n1 leads; first leader")
    granted = next(line for line in unled.store.history(group) if line.event == "grant")
    assert owners(read_group_at(unled.conn, group, granted.at_us)) == {first: "etl"}, "from that time on"


def test_after_the_end_of_a_grant_nobody_owns_it() -> None:
    def line(event: str) -> HistoryRecord:
        return HistoryRecord(0, 1, 2, event, "", 3, "b", "a", 0, 4, is_forced=False)

    ends = ("release", "finish", "force_release", "reserve", "unreserve", "block", "skip", "reset", "delete")
    assert [event for event in (*ends, "grant", "reclaim", "revoke") if has_owner(line(event))] == [
        "grant", "reclaim", "revoke",
    ]  # fmt: skip


@pytest.mark.conforms("A7", "A9")
def test_the_command_shows_one_stream_or_all(shell: Shell, unled: World) -> None:
    first, second = open_streams(unled.conn)
    before = str(StartingPosition.at_time(unled.now_us()))
    assert "Nothing has happened to it" in shell.run("groups", "history", GROUP).err
    unled.lead()
    unled.lend(first)
    unled.lend(second, "second")
    at = str(StartingPosition.at_time(unled.now_us()))
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


@pytest.mark.conforms("A2", "E11", "A9")
def test_more_forced_moves_than_are_shown_are_counted(shell: Shell, world: World) -> None:
    first, _ = rows(world)
    for position in range(MAX_RECENT_MOVES + 1):
        with_it = world.lend(first.stream_id, None)
        world.write(AdvancePosition(first.stream_id, with_it.grant_id, min(position // 2, first.head)))
        world.write(ForceRelease(first.stream_id, with_it.grant_id, "evicted: no ping in time"))
        if position == MAX_RECENT_MOVES - 1:
            assert shell.run("groups", "describe", GROUP).err == ""
    reported = done(shell.run("groups", "describe", GROUP, "--json"))
    assert (len(reported["forced_moves"]), reported["forced_move_count"]) == (MAX_RECENT_MOVES, MAX_RECENT_MOVES + 1)
    answer = shell.run("groups", "describe", GROUP)
    assert answer.out.count("evicted") == MAX_RECENT_MOVES
    assert f"20 newest of 21 forced moves: `sublet groups history '{GROUP}' --limit M` shows more" in answer.err


def consume_before_8(database: str) -> None:
    """Write as a leader does when the only message has been consumed."""
    store = PostgresGroupStore(database)
    group = store.open_group(SUBSCRIPTION)
    term = store.claim(group.group_id, NODE, 10.0).term
    (row,) = (row for row in store.load(group.group_id, term) if row.head)
    store.commit([GroupWrites(group.group_id, term, (GrantStream(row.stream_id, "b", "a", None, "r"),), False)])
    (row,) = (row for row in store.load(group.group_id, term) if row.head)
    consumed = AdvancePosition(row.stream_id, row.grant_id, 1, ConsumedFrontier(1, LowerFrontier(((8,),))))
    store.commit([GroupWrites(group.group_id, term, (consumed,), False)])
    store.commit([GroupWrites(group.group_id, term, (), True)])
    store.close()


@pytest.mark.conforms("S2")
def test_a_new_atomic_group_shows_which_epochs_it_gets(shell: Shell, database: str) -> None:
    with Publisher(database, space="default") as publisher:
        publisher.in_epoch(7).publish("orders/t", b"1").result()
        publisher.in_epoch(9000).publish("orders/t", b"far ahead").result()
        reported = shell.run("groups", "create", GROUP, "--atomic").err
        assert "starts at latest.\nOf space default it is given all epochs from 9001." in reported
        reported = shell.run("groups", "create", "$share/all/#", "--atomic", "--from", "earliest").err
        assert "Of space default it is given all epochs." in reported


@pytest.mark.conforms("S8")
def test_an_atomic_group_shows_how_far_it_has_come(shell: Shell, database: str) -> None:
    reported = done(shell.run("groups", "create", GROUP, "--atomic", "--from", "earliest", "--json"))
    assert reported["atomic"] is True
    refused(shell.run("groups", "create", GROUP, "--from", "earliest"), 4, "atomic")
    with Publisher(database, space="default") as publisher:
        publisher.in_epoch(7).publish("orders/t", b"1").result()
        publisher.advance(8)
        (line,) = done(shell.run("groups", "describe", GROUP, "--json"))["epochs"]
        assert (line["space"], line["consumed"], line["completed"]) == ("default", None, [[8]])
        prose = shell.run("groups", "describe", GROUP).out
        assert "epochs   space default: none consumed, all before 8 completed" in prose
        consume_before_8(database)
        assert "all before 8 consumed, all before 8 completed" in shell.run("groups", "describe", GROUP).out
    assert "consumed are all epochs before 8" in shell.run("groups", "history", GROUP).out


NO_ROWS: dict[str, list[str]] = {
    "options": [
        "[]", '{"on_data_loss": null}', '{"on_poison": ["skip"]}', '{"strategy": 1}', '{"session_expiry_s": "1"}',
        '{"session_expiry_s": -1}', '{"session_expiry_s": 1e400}', '{"other": 1e5000}', '{"atomic": 1}',
        '{"holds_retention": "true"}',
    ],
    "desired_state": [
        "[]", '{"paused": 1}', '{"weights": {"a": "1"}}', '{"weights": {"a": 0}}', '{"weights": {"a": 1e5000}}',
        '{"other": 1e5000}',
    ],
    "starting_position": [
        "", "x", "latest\n", "offset:", "offset:-1", "offset:" + "1" * 23, f"offset:{2**63}", "2026-11-21T10:00:00",
        "2026-02-29T10:00:00Z", "2026-04-31T10:00:00Z", "2026-13-01T10:00:00Z", "0000-01-01T10:00:00Z",
        "2026-11-21T24:00:00Z",
    ],
}  # fmt: skip
STARTS = (
    "latest", "earliest", "offset:0", f"offset:{2**63 - 1}", "2024-02-29T10:00:00Z", "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59.999999Z",
)  # fmt: skip


def test_an_operator_writes_no_row_that_is_none(conn: Connection) -> None:
    conn.execute("insert into consumer_group (kind, name, filter) values ('queue', 'mails', 'mail/#')")
    for column, values in NO_ROWS.items():
        for value in values:
            with pytest.raises(psycopg.errors.CheckViolation):
                conn.execute(f"update consumer_group set {column} = %s".encode(), (value,))
    for start in STARTS:
        assert str(StartingPosition.parse(start)) == start
        conn.execute("update consumer_group set starting_position = %s", (start,))


def test_groups_that_cannot_be_are_listed_as_stored(shell: Shell, conn: Connection) -> None:
    """As an operator can write them: a time that cannot be shown is left out."""
    times = {"a": "infinity", "b": "-infinity", "c": "10000-01-01", "d": "0001-01-01 BC", "e": "2026-01-01 00:00+00"}
    options = '{"atomic": true, "on_data_loss": "skip"}'
    for name, time in times.items():
        done(shell.run("groups", "create", f"$queue/{name}/#", "--json"))
        conn.execute("update consumer_group set created_at = %s where name = %s", (time, name))
    conn.execute("update consumer_group set options = %s where name = 'e'", (options,))
    groups = done(shell.run("groups", "list", "--json"))["groups"]
    fields = ("name", "created_at", "starting_position", "atomic", "strategy")
    assert [[group[field] for field in fields] for group in groups] == [
        *([name, None, "latest", False, "even"] for name in "abcd"),
        ["e", "2026-01-01T00:00:00+00:00", "latest", True, "even"],
    ]
    assert shell.run("groups", "list").out.count("$queue/") == 5
    assert done(shell.run("groups", "describe", "$queue/a/#", "--json"))["created_at"] is None
