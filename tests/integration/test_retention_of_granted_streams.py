"""Retention that takes a stream while it is granted: reported to its consumer, shown to the operator, counted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.status.overview import describe_group
from sublet_storage.groups.status.overview_model import StreamView
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import rollover
from tests.integration.cli_kit import a_shell
from tests.integration.log_kit import Connection, put, read, stream_of, with_a_short_lived_space
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet

GROUP = "$share/g/#"


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with with_a_short_lived_space(database) as connection:
        yield connection


def lines(conn: Connection) -> dict[int, StreamView]:
    return {line.stream_id: line for line in describe_group(conn, Subscription.parse(GROUP)).streams}


@pytest.mark.conforms("W4")
@pytest.mark.long
def test_what_is_taken_from_a_consumer_is_counted(conn: Connection, fleet: Fleet, database: str) -> None:
    """Its stream is blocked, with the reason, and all others go on."""
    doomed, other = stream_of(conn, "eu"), stream_of(conn, "default")
    for number in range(10):
        put(conn, doomed, b"%d" % number, topic="eu/1")
    node = fleet.nodes["n1"]
    eventually(lambda: "serves on" in node.output(), WAIT_S, node.output)
    slow = fleet.consumer("slow", GROUP, pause_s=1.5)
    eventually(lambda: fleet.delivered("slow"), WAIT_S, slow.output)
    put(conn, other, b"kept", topic="us")
    rollover(conn, "eu")
    conn.execute("update generation set closed_at = closed_at - interval '101 s' where state = 'closed'")
    assert apply_retention(conn)
    eventually(lambda: lines(conn)[doomed].status == "blocked", WAIT_S, lambda: str(lines(conn)))

    line = lines(conn)[doomed]
    assert 0 <= line.position < 10
    assert (line.lag, line.lost_message_count, line.head_state) == (None, 10 - line.position, "gone")
    (blocked,) = conn.execute(
        "select reason, position from lending_history where stream_id = %s and event = 'block'", (doomed,)
    ).fetchall()
    assert blocked[0].startswith(f"offset {line.position} is gone by retention, {10 - line.position} messages")
    assert blocked[1] == line.position
    assert line.blocked_reason == blocked[0]
    assert lines(conn)[other].blocked_reason is None
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        said = " ".join(shell.run("groups", "describe", GROUP).out.split())
        assert f"blocked stream {doomed}: {blocked[0]}" in said
        answer = shell.run("groups", "describe", GROUP, "--json").object
    reasons = {each["stream_id"]: each["blocked_reason"] for each in answer["streams"]}
    assert (reasons[doomed], reasons[other]) == (blocked[0], None)

    fresh = fleet.consumer("fresh", GROUP)
    young = stream_of(conn, "eu")
    put(conn, young, b"held back", topic="eu/1")
    eventually(lambda: lines(conn)[other].lag == 0, WAIT_S, lambda: str(lines(conn)) + fresh.output())
    seen = {(each.stream, offset) for each in fleet.delivered() for offset in each.offsets}
    assert {(other, offset) for offset in range(len(read(conn, other)))} <= seen
    assert (doomed, 9) not in seen
    assert slow.alive
    assert "Traceback" not in slow.output()
    assert lines(conn)[young].status != "held", "its key order would be broken: it waits for the operator"
