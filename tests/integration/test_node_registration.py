"""The directory of nodes: one living incarnation per name, by the database's clock; who lives stays listed, who died is
deregistered, by whoever is left."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest

from sublet_leader.http.nodes import NodeActionsApi
from sublet_leader.jobs import node_registration
from sublet_leader.jobs.node_registration import NodeRegistration
from sublet_leader.listen_address import ListenAddress
from sublet_leader.server import NodeServer
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import Conflict, InvalidSetting, NodeInvariantViolated, NodeNameTaken
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin.node_desired_state import set_draining
from sublet_storage.node_directory import (
    NodeIncarnation,
    delete_expired,
    deregister,
    list_live_nodes,
    list_nodes,
    list_notify_endpoints,
    node_to_json,
    register,
    renew,
)
from sublet_storage.notify import catch_up_reads
from sublet_storage.notify.changes import NODE, ObjectChange
from tests.integration.cli_kit import Shell
from tests.integration.log_kit import Connection
from tests.integration.notify_kit import SETTINGS, listening
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet

LEASE_S = 2.4
LEASES_WATCHED = 2
SLACK_S = 4.0
"""For a busy machine."""


def expiry(conn: Connection, name: str) -> float:
    """Return when a node's lease ends, in seconds of the database's clock."""
    row = conn.execute("select extract(epoch from expires_at)::float8 from node where name = %s", (name,)).fetchone()
    assert row is not None, f"{name} is not listed"
    return float(row[0])


def listed(url: str, name: str, **how: Any) -> NodeRegistration:
    """A listing that has begun."""
    listing = NodeRegistration(url, NodeIncarnation(name, f"{name}-1", "127.0.0.1:1"), LEASE_S, **how)
    listing.register(lambda text: None)
    return listing


@pytest.mark.conforms("D8")
@pytest.mark.long
def test_a_healthy_idle_node_never_expires(database: str, conn: Connection) -> None:
    listings = [listed(database, name) for name in ("a", "b", "c")]
    seen: list[list[str]] = []
    first = expiry(conn, "a")

    def lived_on() -> bool:
        seen.append([node.name for node in list_live_nodes(conn)])
        return expiry(conn, "a") > first + LEASES_WATCHED * LEASE_S

    eventually(lived_on, 30)
    assert seen == [["a", "b", "c"]] * len(seen)
    for listing in listings:
        listing.deregister()
    assert list_nodes(conn) == []


@pytest.mark.conforms("D8")
def test_a_killed_nodes_row_is_gone_in_time(conn: Connection, fleet: Fleet) -> None:
    lease_s = LeaderSettings().scaled(fleet.speed).lease_duration_s
    fleet.node("stays")
    eventually(lambda: {node.name for node in list_live_nodes(conn)} == {"n1", "stays"}, 30)
    fleet.nodes["n1"].kill()
    ends = expiry(conn, "n1")
    eventually(lambda: [entry.node.name for entry in list_nodes(conn)] == ["stays"], 3 * lease_s + SLACK_S)
    (now,) = conn.execute("select extract(epoch from clock_timestamp())::float8").fetchone() or (0.0,)
    assert ends <= now <= ends + lease_s / 3 + SLACK_S, "later than one collection after the end of its lease"


@pytest.mark.conforms("D8")
def test_too_rare_renewals_are_refused() -> None:
    seldom = replace(LeaderSettings(), lease_renew_interval_s=3.5)
    with pytest.raises(
        InvalidSetting,
        match=r"lease_renew_interval_s is 3.5 and lease_duration_s is 10.0: lease_renew_interval_s must be at most "
        "a third",
    ):
        NodeServer("postgresql:///x", "n", ListenAddress("127.0.0.1", 0), seldom)


@pytest.mark.conforms("D8")
def test_a_node_deregistered_by_mistake_comes_back(database: str, conn: Connection) -> None:
    listing = listed(database, "a", notify_endpoint="postgres:")
    (before,) = list_nodes(conn)
    assert before.notify_driver == "postgres"
    conn.execute("delete from node")
    eventually(lambda: [entry.notify_driver for entry in list_nodes(conn)] == ["postgres"])
    listing.deregister()
    assert "sublet-directory" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.conforms("A6", "D8")
def test_a_drained_node_stays_drained_without_its_row(database: str, conn: Connection) -> None:
    """Others delete the row of a node that was frozen for longer than its lease."""
    read: list[bool] = []
    listing = listed(database, "a", on_desired_state=lambda state: read.append(state.is_draining))
    set_draining(conn, NodeIncarnation("a", "a-1", ""), True)
    eventually(lambda: True in read)
    count = len(read)
    conn.execute("delete from node")
    eventually(lambda: [entry.is_draining for entry in list_nodes(conn)] == [True] and len(read) > count + 1)
    listing.deregister()
    assert False not in read[read.index(True) :]


def test_who_leaves_is_announced(database: str) -> None:
    """By a notification: what is listed is not read again for long."""
    with listening(database, settings=replace(SETTINGS, catch_up_min_interval_s=600, poll_interval_s=600)) as received:
        listing = listed(database, "a")
        eventually(lambda: received.of(NODE, "a"))
        listing.deregister()
        eventually(lambda: received.of(NODE, "a")[-1].is_deleted)


def test_a_node_ends_with_its_grpc_server(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody could reach it, and it would go on leading."""
    servers: list[grpc.aio.Server] = []
    make = grpc.aio.server

    def make_and_note(**options: Any) -> grpc.aio.Server:
        servers.append(make(**options))
        return servers[-1]

    def announce(text: str) -> None:
        if " serves on " in text:
            tasks.append(asyncio.get_running_loop().create_task(servers[0].stop(0)))

    tasks: list[asyncio.Task[None]] = []
    monkeypatch.setattr(grpc.aio, "server", make_and_note)
    node = NodeServer(database, "n", ListenAddress("127.0.0.1", 0), announce=announce)
    with pytest.raises(NodeInvariantViolated, match="the gRPC server has ended"):
        asyncio.run(asyncio.wait_for(node.run(), WAIT_S))


OLD = NodeIncarnation("a", "old", "127.0.0.1:1")
NEW = NodeIncarnation("a", "new", "127.0.0.1:2")


def test_a_node_that_waits_for_its_name_ends(conn: Connection, shell: Shell) -> None:
    """At once, with exit code 0, and leaves the name to whom it belongs."""
    register(conn, OLD, WAIT_S, 1)
    node = shell.start("leader", "--name", OLD.name, "--listen", "127.0.0.1:0")
    node.says("Waiting for its lease to end.")
    answer = node.ask(signal.SIGTERM)
    assert answer.code == 0, answer.err
    assert answer.err.endswith("node a has stopped\n")
    assert [entry.node for entry in list_nodes(conn)] == [OLD]


def test_a_node_stopped_early_serves_nobody(database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    announced: list[str] = []
    node = NodeServer(database, "n", ListenAddress("127.0.0.1", 0), announce=announced.append)

    async def stop() -> None:
        node.stop()

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def stop_and_read(connection: Connection) -> list[ObjectChange]:
            asyncio.run_coroutine_threadsafe(stop(), loop).result(WAIT_S)
            return catch_up_reads.read_nodes(connection)

        monkeypatch.setattr(node_registration, "catch_up_reads", SimpleNamespace(read_nodes=stop_and_read))
        await asyncio.wait_for(node.run(), WAIT_S)

    asyncio.run(run())
    assert announced == ["node n has stopped"]
    assert list_nodes(conn) == []


def expire(conn: Connection, node: NodeIncarnation) -> None:
    conn.execute("update node set expires_at = clock_timestamp() where incarnation = %s", (node.incarnation,))


def test_a_node_is_found_until_it_is_removed(conn: Connection) -> None:
    other = NodeIncarnation("b", "other", "127.0.0.1:3")
    register(conn, other, 10, 1)
    register(conn, OLD, 10, 1, http_address="127.0.0.1:8080")
    assert list_live_nodes(conn) == [OLD, other]
    (entry, _) = list_nodes(conn)
    assert (entry.node, entry.http_address, entry.protocol_version) == (OLD, "127.0.0.1:8080", 1)
    assert 9 < entry.remaining_s <= 10
    deregister(conn, OLD)
    assert list_live_nodes(conn) == [other]


def test_a_living_nodes_name_is_taken(conn: Connection) -> None:
    register(conn, OLD, 10, 1)
    with pytest.raises(NodeNameTaken, match=r"'a' belongs to the node at 127.0.0.1:1, whose lease has \d") as raised:
        register(conn, NEW, 10, 1)
    assert 9 < raised.value.remaining_s <= 10
    assert list_live_nodes(conn) == [OLD]


def test_a_node_may_register_a_new_address(conn: Connection) -> None:
    register(conn, OLD, 1, 1)
    started = list_nodes(conn)[0].started_at
    moved = NodeIncarnation(OLD.name, OLD.incarnation, "127.0.0.1:9")
    register(conn, moved, 10, 1)
    (entry,) = list_nodes(conn)
    assert entry.node == moved
    assert entry.started_at == started
    assert entry.remaining_s > 9


def test_a_name_is_free_once_its_lease_has_run_out(conn: Connection) -> None:
    """And who had it cannot touch its successor."""
    register(conn, OLD, 10, 1)
    started = list_nodes(conn)[0].started_at
    expire(conn, OLD)
    assert list_live_nodes(conn) == []
    register(conn, NEW, 10, 1)
    assert list_nodes(conn)[0].started_at > started
    assert not renew(conn, OLD, 10)
    deregister(conn, OLD)
    assert list_live_nodes(conn) == [NEW]
    assert renew(conn, NEW, 20)
    assert list_nodes(conn)[0].remaining_s > 19


def test_of_many_that_want_a_name_at_once_one_gets_it(database: str) -> None:
    def attempt(number: int) -> bool:
        with connect(database) as conn:
            try:
                register(conn, NodeIncarnation("a", str(number), "127.0.0.1:1"), 10, 1)
            except NodeNameTaken:
                return False
            return True

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(attempt, range(8))) == 1


@pytest.mark.conforms("D8")
def test_collection_takes_only_what_is_stale(database: str, conn: Connection) -> None:
    register(conn, OLD, 10, 1)
    dead = NodeIncarnation("b", "dead", "127.0.0.1:3")
    register(conn, dead, 10, 1)
    expire(conn, OLD)
    expire(conn, dead)
    with connect(database, autocommit=False) as reviving:
        assert renew(reviving, OLD, 10)
        with ThreadPoolExecutor(1) as threads, connect(database) as collector:
            collecting = threads.submit(delete_expired, collector)
            while not conn.execute("select count(*) from pg_locks where not granted").fetchone()[0]:  # type: ignore[index]
                assert not collecting.done()
            reviving.commit()
            assert collecting.result(10) == ["b"]
    assert list_live_nodes(conn) == [OLD]
    assert delete_expired(conn) == []


@pytest.mark.conforms("D8")
def test_each_notify_endpoint_is_notified_once(conn: Connection) -> None:
    for number, notify in enumerate(["postgres:", None, "postgres:", "zmq:tcp://127.0.0.1:7"]):
        register(conn, NodeIncarnation(f"n{number}", "i", f"127.0.0.1:{number}"), 10, 1, notify_endpoint=notify)
    register(conn, OLD, 10, 1, notify_endpoint="zmq:tcp://127.0.0.1:9")
    assert [entry.notify_driver for entry in list_nodes(conn) if entry.node == OLD] == ["zmq"]
    expire(conn, OLD)
    assert list_notify_endpoints(conn) == ["postgres:", "zmq:tcp://127.0.0.1:7"]
    register(conn, NEW, 10, 1)
    assert [entry.notify_driver for entry in list_nodes(conn) if entry.node == NEW] == ["poll"]


def test_programs_are_never_shown_an_endpoint(conn: Connection) -> None:
    """It ends in the key that lets in whoever has it."""
    register(conn, OLD, 10, 1, notify_endpoint="zmq:tcp://127.0.0.1:7?key=5ec2e7")
    register(conn, NodeIncarnation("silent", "i", "127.0.0.1:1"), 10, 1)
    shown = [node_to_json(entry, {OLD.incarnation: 2}) for entry in list_nodes(conn)]
    assert "5ec2e7" not in json.dumps(shown)
    assert {each["name"]: (each["notify_driver"], each["leads"]) for each in shown} == {
        OLD.name: ("zmq", 2),
        "silent": ("poll", 0),
    }


@pytest.mark.conforms("A6")
def test_the_last_node_is_drained_by_force_only(database: str, conn: Connection) -> None:
    """And goes on without asking for another."""
    register(conn, NodeIncarnation("n1", "n1-1", "127.0.0.1:1"), WAIT_S, 1)
    actions = NodeActionsApi(database)
    with pytest.raises(Conflict, match="no other node is there to take over from n1"):
        actions.drain({"node": "n1"})
    answers = [
        json.loads(bytes(actions.drain({"node": "n1", **more}).body))["changed"]
        for more in ({"draining": False}, {"force": True}, {"force": True}, {"draining": False})
    ]
    assert answers == [False, True, False, True]
