"""The directory of nodes: one living incarnation per name, by the database's clock."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from sublet_protocol.domain.errors import NodeNameTaken
from sublet_storage.db.connect import connect
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
from tests.integration.log_kit import Connection

OLD = NodeIncarnation("a", "old", "127.0.0.1:1")
NEW = NodeIncarnation("a", "new", "127.0.0.1:2")


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
    register(conn, OLD, 10, 1)
    started = list_nodes(conn)[0].started_at
    expire(conn, OLD)
    assert list_live_nodes(conn) == []
    register(conn, NEW, 10, 1)
    assert list_live_nodes(conn) == [NEW]
    assert list_nodes(conn)[0].started_at > started


def test_a_replaced_node_cannot_touch_its_successor(conn: Connection) -> None:
    register(conn, OLD, 10, 1)
    expire(conn, OLD)
    register(conn, NEW, 10, 1)
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


def test_programs_are_never_shown_an_endpoint(
    conn: Connection,
) -> None:
    """It ends in the key that lets in whoever has it."""
    register(conn, OLD, 10, 1, notify_endpoint="zmq:tcp://127.0.0.1:7?key=5ec2e7")
    register(conn, NodeIncarnation("silent", "i", "127.0.0.1:1"), 10, 1)
    shown = [node_to_json(entry, {OLD.incarnation: 2}) for entry in list_nodes(conn)]
    assert "5ec2e7" not in json.dumps(shown)
    assert {each["name"]: (each["notify_driver"], each["leads"]) for each in shown} == {
        OLD.name: ("zmq", 2),
        "silent": ("poll", 0),
    }
