"""Spaces are altered and dropped from the command line, whoever uses them: real processes, real sessions."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin.admin import create_group
from sublet_storage.groups.model.records import GroupOptions, StartingPosition
from sublet_storage.log.append import ProducerIdentity
from sublet_storage.log.epoch_leases import hold
from sublet_storage.notify.changes import SPACE
from sublet_storage.producer import Publisher
from sublet_storage.spaces.drop_check import list_dropped_spaces
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import create_space, drop_space
from sublet_storage.spaces.space_queries import find_space, list_spaces
from tests.integration.cli_kit import Shell, done, refused
from tests.integration.lending_kit import NumberConsumer, publish_numbers
from tests.integration.log_kit import Connection, put, stream_of
from tests.integration.notify_kit import SETTINGS, listening
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet
from tests.payload_kit import LocalWorld, a_closed_stream, a_space, move, outside, swept

pytestmark = pytest.mark.conforms("A9")
ALL, BEHIND = "$share/all/#", "$share/behind/#"
DROP = ("spaces", "drop", "orders")


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with connect(database) as connection:
        create_space(connection, "orders", "orders/#", shards=2)
        yield connection


def declare(url: str, *groups: str, at: StartingPosition = StartingPosition.EARLIEST) -> None:
    for group in groups:
        create_group(url, Subscription.parse(group), GroupOptions(at))


def described(shell: Shell, group: str) -> Any:
    return done(shell.run("groups", "describe", group, "--json"))


def test_a_space_is_altered_only_in_what_is_given(shell: Shell, conn: Connection) -> None:
    done(shell.run("spaces", "create", "bills", "bills/#", "--shards", "2", "--rollover", "1d", "--json"))
    reported = done(shell.run("spaces", "alter", "bills", "--retention", "7d", "--compression", "zstd", "--json"))
    altered = [reported[name] for name in ("retention_s", "rollover_s", "compression", "shards")]
    assert altered == [604_800, 86_400, "zstd", 2]
    assert done(shell.run("spaces", "reshard", "bills", "5", "--json"))["shards"] == 5
    assert shell.run("spaces", "alter", "bills", "--rollover", "none", "--filter", "bills/eu/#").code == 0
    space = find_space(conn, "bills")
    assert (space.retention_s, space.rollover_s, space.filter.text) == (604_800, None, "bills/eu/#")
    answer = shell.run("spaces", "alter", "bills", "--retention", "none")
    assert (answer.code, "kept for ever" in answer.err) == (0, True)
    assert find_space(conn, "bills").retention_s is None
    for code, arguments, reported in (
        (2, "bills", "nothing to change. Give --retention"),
        (2, "bills --retention 0", "must be above 0 seconds. Leave it out for no limit, or alter it to none"),
        (2, "bills --retention -5d", "duration '-5d': give a number and s, m, h"),
        (2, "bills --retention 7", "duration '7': it has no unit. Say of what: 7s, 7m, 7h"),
        (2, "bills --no-such", "No such option: --no-such"),
        (3, "none --retention 7d", "there is no such space. There are: bills, default, orders"),
    ):
        refused(shell.run("spaces", "alter", *arguments.split()), code, reported)


@pytest.mark.conforms("D10")
def test_nodes_are_notified_of_a_changed_space(shell: Shell, database: str) -> None:
    """Of what it is now; they do not read it again for long."""
    with listening(database, settings=replace(SETTINGS, catch_up_min_interval_s=600, poll_interval_s=600)) as received:
        done(shell.run("spaces", "create", "orders", "orders/#", "--json"))
        eventually(lambda: received.of(SPACE, "orders"))


def test_a_missing_payload_location_is_a_warning(shell: Shell, tmp_path: Path) -> None:
    there, missing = tmp_path / "there", tmp_path / "no such"
    there.mkdir()
    reported = f"file://{missing}: the directory is not there, or not to be seen, on this machine."
    remedy = f"mkdir -p '{missing}'"
    made = shell.run("spaces", "create", "orders", "orders/#", "--payload-location", f"file://{missing}")
    assert (made.code, f"Warning: {reported}" in made.err, remedy in made.err) == (0, True, True), made.err
    altered = shell.run("spaces", "alter", "orders", "--payload-location", f"file://{missing}", "--json")
    assert reported in done(altered)["warning"]
    assert altered.err == ""
    found = shell.run("spaces", "alter", "orders", "--payload-location", f"file://{there}", "--json")
    assert done(found)["warning"] is None
    there.rmdir()
    later = shell.run("spaces", "alter", "orders", "--tier-after", "1d")
    assert (later.code, "Warning" in later.err) == (0, False), "it was not given now"
    listed = shell.run("spaces", "list").out
    assert re.search(rf"^orders .* file://{there} +86400 s$", listed, re.MULTILINE), listed


def test_a_space_is_rolled_over_now(shell: Shell, conn: Connection) -> None:
    reported = done(shell.run("spaces", "rollover", "orders", "--json"))
    opened = "select generation_id, count(*) from stream where state = 'open' group by generation_id order by 1 desc"
    ((newest, streams), *_) = conn.execute(opened).fetchall()
    assert (reported["name"], reported["generation_id"], streams) == ("orders", newest, 2)
    assert "2 new streams" in shell.run("spaces", "rollover", "orders").err
    refused(shell.run("spaces", "rollover", "none"), 3, "there is no such space")


# --- dropping --------------------------------------------------------------------------------------------------------


def test_an_unused_space_is_dropped(shell: Shell, conn: Connection) -> None:
    before = find_space(conn, "orders").space_id
    reported = done(shell.run(*DROP, "--dry-run", "--json"))
    assert (reported["dropped"], reported["messages"], reported["groups"]) == (False, 0, [])
    assert reported["fallback_spaces"] == ["default"]
    answer = shell.run(*DROP, stdin="n\n")
    assert (answer.code, "Nothing was dropped" in answer.err) == (1, True)
    assert find_space(conn, "orders").space_id == before
    answer = shell.run(*DROP, stdin="y\n")
    assert answer.code == 0
    assert "The space orders is dropped. Its topics go on in default." in answer.err
    assert len(apply_retention(conn)) == 1, "its table is taken away though the space had no retention"
    refused(shell.run(*DROP, "--yes"), 3, "there is no such space. There are: default")
    refused(shell.run("spaces", "drop", "default", "--force", "--yes"), 2, "space 'default' cannot be dropped")
    assert done(shell.run("spaces", "create", "orders", "orders/#", "--json"))["space_id"] > before


def test_a_used_space_is_dropped_only_by_force(shell: Shell, conn: Connection, database: str) -> None:
    space = find_space(conn, "orders")
    hold(conn, space.space_id, ProducerIdentity("holder", 1), [(1,)], 60.0)
    refused(shell.run(*DROP, "--yes"), 4, "space 'orders' is in use: producers publish to it: holder", "--force")
    conn.execute("delete from capability")
    declare(database, ALL, "$queue/jobs/orders/+/x", "$share/elsewhere/us/#")
    used = "groups use it: $share/all/# (0 of its streams granted), $queue/jobs/orders/+/x (0 of its streams granted)"
    refused(shell.run(*DROP), 4, used)  # and nobody is asked
    with Publisher(database, producer="till") as publisher:
        publisher.publish("orders/eu", b"x")
    refused(shell.run(*DROP, "--yes"), 4, "it holds 1 messages", used, "producers publish to it: till")
    assert "It would be refused" in shell.run(*DROP, "--dry-run").err
    assert "would be dropped" in shell.run(*DROP, "--dry-run", "--force").err
    reported = done(shell.run(*DROP, "--dry-run", "--json"))
    assert (reported["dropped"], reported["messages"], reported["producers"]) == (False, 1, ["till"])
    assert [group["subscription"] for group in reported["groups"]] == [ALL, "$queue/jobs/orders/+/x"]
    assert find_space(conn, "orders") == space
    assert len(apply_retention(conn)) == 0


def test_what_groups_would_lose_is_shown_before(shell: Shell, conn: Connection, database: str) -> None:
    publish_numbers(database, range(30))
    done_with, new = "$share/done/#", "$share/new/orders/#"
    declare(database, BEHIND, done_with)
    declare(database, new, at=StartingPosition.LATEST)
    for group in (done_with, new):
        assert shell.run("groups", "reset", group, "--to-latest", "--yes").code == 0
    assert shell.run("spaces", "rollover", "orders").code == 0
    publish_numbers(database, range(3))
    losses = {BEHIND: 33, done_with: 3, new: 3}
    reported = done(shell.run(*DROP, "--force", "--dry-run", "--json"))
    assert {group["subscription"]: group["unread_messages"] for group in reported["groups"]} == losses
    assert all(0 < group["unread_streams"] <= 4 for group in reported["groups"])
    asked = shell.run(*DROP, "--force", stdin="n\n")
    assert asked.code == 1
    for said in (shell.run(*DROP, "--force", "--dry-run").err, asked.err):
        for group, messages in losses.items():
            assert f"The space orders: {group} loses {messages} unread messages, in " in said
    assert shell.run("spaces", "alter", "orders", "--retention", "7d").code == 0
    retained = shell.run(*DROP, "--keep", "--dry-run")
    assert (retained.code, "unread" in retained.err) == (0, False), "nobody loses anything"
    conn.execute("update generation set state = 'gone' where closed_at is not null")
    reported = done(shell.run(*DROP, "--force", "--dry-run", "--json"))
    assert [group["unread_messages"] for group in reported["groups"]] == [3, 3, 3], "the others are lost already"
    assert shell.run("spaces", "alter", "orders", "--filter", "bills/#").code == 0
    declare(database, "$share/later/orders/#", at=StartingPosition.LATEST)
    reported = done(shell.run(*DROP, "--dry-run", "--json"))
    losses = dict.fromkeys(losses, 3)
    assert {group["subscription"]: group["unread_messages"] for group in reported["groups"]} == losses, "of the past"


def test_why_reports_that_the_space_was_dropped(shell: Shell, conn: Connection, database: str) -> None:
    declare(database, BEHIND)
    publish_numbers(database, range(30))
    streams = [row[0] for row in conn.execute(
        "select stream_id from stream join space using (space_id) where name = 'orders' and head > 0 order by 1"
    )]  # fmt: skip
    assert len(streams) == 2
    assert shell.run(*DROP, "--force", "--yes").code == 0
    reported = shell.run("groups", "why", BEHIND).out
    entry = f"gone: streams {streams[0]}-{streams[1]}\n  messages that the group had not consumed are gone, with the "
    assert f"{entry}space orders" in reported, reported
    assert "retention has taken" not in reported
    assert reported.count(f"sublet groups reset '{BEHIND}' --to-current") == 1


def test_a_space_made_anew_meanwhile_is_not_dropped(shell: Shell, conn: Connection) -> None:
    dropping = shell.start(*DROP, stdin=subprocess.PIPE)
    dropping.says("[y/N]")
    before = find_space(conn, "orders").space_id
    drop_space(conn, "orders")
    after = create_space(conn, "orders", "orders/#").space_id
    dropping.stdin.write(b"y\n")
    dropping.stdin.close()
    reported = f"the one that was meant (id {before}) is gone, and another has its name by now (id {after})"
    refused(dropping.end(), 4, reported)
    assert find_space(conn, "orders").space_id == after


def test_what_is_published_meanwhile_is_not_lost(shell: Shell, conn: Connection) -> None:
    stream = stream_of(conn, "orders")
    with connect(conn.info.dsn) as watching, conn.transaction():
        put(conn, stream, b"late", topic="orders/eu")
        dropping = shell.start(*DROP, "--yes")
        waits = "select from pg_stat_activity where application_name = 'sublet cli' and wait_event_type = 'Lock'"
        eventually(lambda: bool(watching.execute(waits).fetchall()), WAIT_S, lambda: dropping.err)
    answer = dropping.end()
    assert (answer.code, "it holds 1 messages" in answer.err) == (4, True), answer.err
    assert find_space(conn, "orders").shards == 2
    assert stream_of(conn, "orders") == stream, "nothing has happened"


def test_who_keeps_what_it_holds_loses_nothing(shell: Shell, conn: Connection, database: str) -> None:
    refused(shell.run(*DROP, "--keep", "--force", "--yes"), 2, "Leave one of them out")
    refused(shell.run(*DROP, "--keep", "--yes"), 4, "sublet spaces alter orders --retention 7d")
    assert shell.run("spaces", "alter", "orders", "--retention", "7d").code == 0
    publish_numbers(database, range(20))
    stream = stream_of(conn, "orders")
    assert shell.run("spaces", "rollover", "orders").code == 0
    conn.execute("update generation set closed_at = closed_at - interval '6 days' where state = 'closed'")
    reported = done(shell.run(*DROP, "--keep", "--yes", "--json"))
    assert (reported["dropped"], reported["retained"], reported["messages"]) == (True, True, 20)
    assert "orders" not in {space.name for space in list_spaces(conn)}
    assert apply_retention(conn) == [], "its retention is not over"
    listed = done(shell.run("spaces", "list", "--json"))
    assert [(space["name"], space["state"]) for space in listed["spaces"]] == [("default", "live")]
    (left,) = listed["dropped"]
    assert (left["name"], left["state"], left["messages"]) == ("orders", "dropped", 20)
    retained = datetime.fromisoformat(left["until"]) - datetime.fromisoformat(left["dropped_at"])
    assert abs(retained - timedelta(days=1)) < timedelta(seconds=60), "its last generation had nothing"
    create_space(conn, "empty", "empty/#")
    drop_space(conn, "empty")
    assert [each.space.name for each in list_dropped_spaces(conn)] == ["orders"], "an empty one has nothing to keep"
    assert re.search(rf"^orders +dropped +orders/# +20 {left['until']}$", shell.run("spaces", "list").out, re.MULTILINE)
    states = "select s.state, g.state from stream s join generation g using (generation_id) where stream_id = %s"
    assert conn.execute(states, (stream,)).fetchone() == ("closed", "closed")
    conn.execute("update generation set closed_at = closed_at - interval '8 days' where state = 'closed'")
    assert apply_retention(conn)
    assert done(shell.run("spaces", "list", "--json"))["dropped"] == [], "nothing is left of it"


@pytest.mark.long
def test_a_forced_drop_beside_live_groups(shell: Shell, conn: Connection, database: str, fleet: Fleet) -> None:
    generations = [row[0] for row in conn.execute(
        "select generation_id from generation join space using (space_id) where name = 'orders'"
    )]  # fmt: skip
    declare(database, ALL, BEHIND)
    publish_numbers(database, range(40))
    consumer = NumberConsumer(database, ALL)
    with consumer.session, Publisher(database) as publisher:
        consumer.until(40)
        publisher.publish("orders/eu", b"40", key=b"0")
        publisher.flush()
        consumer.until(41)
        # What is in hand and not acknowledged when it goes is lost to the group, which blocks the stream.
        eventually(lambda: consumer.session.poll(0.05) is None and described(shell, ALL)["lag"] == 0, WAIT_S)
        reported = done(shell.run(*DROP, "--force", "--yes", "--json"))
        assert (reported["dropped"], reported["messages"]) == (True, 41)
        granted = {group["subscription"]: group["granted_streams"] > 0 for group in reported["groups"]}
        assert granted == {ALL: True, BEHIND: False}
        publish_numbers(database, range(41, 60))
        consumer.until(60)
    assert sorted(consumer.seen) == list(range(60))
    assert "blocked" not in described(shell, ALL)["streams_by_status"]
    tables = [f"block_{generation}" for generation in generations]
    left = "select from pg_tables where tablename = any(%s)"
    eventually(lambda: not conn.execute(left, (tables,)).fetchall(), WAIT_S)

    late = NumberConsumer(database, BEHIND)
    with late.session:
        eventually(lambda: "blocked" in described(shell, BEHIND)["streams_by_status"], WAIT_S)
        why = "it is blocked: messages that the group had not consumed are gone, with the space orders"
        eventually(lambda: shell.run("groups", "why", BEHIND).out.count(why) == 1, WAIT_S)
        assert shell.run("groups", "reset", BEHIND, "--to-current", "--yes", "--timeout", "30s").code == 0
        late.until(19)
    assert sorted(late.seen) == list(range(41, 60))


def test_payloads_outside_are_deleted_later(shell: Shell, conn: Connection, tmp_path: Path) -> None:
    world = LocalWorld(tmp_path)
    space = a_space(conn, world)
    a_closed_stream(conn, 6)
    assert move(conn, space) == 6
    assert len(world.names()) == len(outside(conn)) == 6
    refused(shell.run("spaces", "drop", "eu", "--yes"), 4, "it holds 12 messages")
    assert shell.run("spaces", "drop", "eu", "--yes", "--force").code == 0
    assert len(world.names()) == 6
    assert swept(conn) == 0, "as long as a table names them they stay"
    apply_retention(conn)
    assert outside(conn) == set()
    assert swept(conn, grace_s=3600) == 0, "a backup may name them"
    assert swept(conn) == 6
    assert world.names() == set()
