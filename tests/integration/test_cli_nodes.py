"""Nodes are drained and asked to step down from the command line, while a consumer works: real processes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from sublet_protocol.domain.errors import NotFound
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin import node_desired_state
from sublet_storage.node_directory import NodeIncarnation, list_live_nodes, register, renew
from tests.integration.cli_kit import Running, Shell, done, refused
from tests.integration.lending_kit import publish_numbers
from tests.integration.log_kit import Connection
from tests.kit import WAIT_S, eventually

pytestmark = pytest.mark.conforms("A6")
GROUPS = ("$share/a/#", "$share/b/#", "$share/c/#")
N1, N2 = (NodeIncarnation(name, f"a life of {name}", "127.0.0.1:1") for name in ("n1", "n2"))


def let_lead(conn: Connection, node: NodeIncarnation, term: int) -> None:
    """Have a node lead the group 7 for an hour."""
    conn.execute(
        "insert into leadership (leadership_id, node, incarnation, address, term, expires_at)"
        " values (7, %s, %s, '', %s, clock_timestamp() + interval '1 hour')",
        (node.name, node.incarnation, term),
    )


def leaders(shell: Shell) -> dict[str, str]:
    """Return {group: name of its leader}."""
    groups = done(shell.run("groups", "list", "--json"))["groups"]
    return {group["subscription"]: group["leader"]["node"] for group in groups if group["leader"]}


def consumed(consumers: dict[str, Running], count: int) -> None:
    """Each group has had so many, none of them twice."""
    eventually(
        lambda: all(consumer.out.count("\n") >= count for consumer in consumers.values()),
        60.0,
        lambda: "".join(consumer.err for consumer in consumers.values()),
    )
    assert {consumer.out.count("\n") for consumer in consumers.values()} == {count}


@pytest.mark.long
def test_nodes_hand_over_unnoticed(database: str, shell: Shell) -> None:
    nodes = {name: shell.leader(name) for name in ("n1", "n2")}
    consumers = {group: shell.start("consume", group, "--from", "earliest", "--json") for group in GROUPS}
    publish_numbers(database, range(100))
    consumed(consumers, 100)
    eventually(lambda: len(leaders(shell)) == len(GROUPS), 60.0)

    before = leaders(shell)
    reported = done(shell.run("nodes", "drain", "n1", "--json"))
    assert (reported["draining"], reported["changed"]) == (True, True)
    assert {each["subscription"] for each in reported["groups"]} == {g for g, node in before.items() if node == "n1"}
    eventually(lambda: leaders(shell) == dict.fromkeys(GROUPS, "n2"), 60.0)
    states = {node["name"]: node["draining"] for node in done(shell.run("nodes", "list", "--json"))["nodes"]}
    assert states == {"n1": True, "n2": False}
    assert "draining" in shell.run("nodes", "list").out
    publish_numbers(database, range(100))
    consumed(consumers, 200)

    refused(shell.run("nodes", "drain", "n2"), 4, "no other node is there to take over from n2", "--force")
    assert done(shell.run("nodes", "drain", "n1", "--undo", "--json"))["draining"] is False
    reported = done(shell.run("nodes", "step-down", "n2", "--group", GROUPS[0], "--json"))
    assert [each["subscription"] for each in reported["groups"]] == [GROUPS[0]]
    eventually(lambda: leaders(shell) == {**dict.fromkeys(GROUPS, "n2"), GROUPS[0]: "n1"}, 60.0)
    publish_numbers(database, range(100))
    consumed(consumers, 300)
    assert all(node.process.poll() is None for node in nodes.values())
    history = done(shell.run("groups", "history", GROUPS[0], "--json"))["history"]
    assert [line for line in history if line["forced"]] == []
    with connect(database) as conn:
        ((user,),) = conn.execute("select session_user").fetchall()
    ordered = [line["reason"] for line in history if line["event"] == "command"]
    assert ordered[-1] == f"node n2 is to step down, by database user {user}"
    drained = f"node n1 is to lead nothing any more, by database user {user}"
    for group, node in before.items():
        lines = done(shell.run("groups", "history", group, "--json"))["history"]
        assert (drained in [line["reason"] for line in lines]) is (node == "n1")


def test_what_cannot_be_ordered_is_refused(conn: Connection, shell: Shell) -> None:
    refused(shell.run("nodes", "drain", "n1"), 3, "no node 'n1' is there")
    register(conn, N1, 60, PROTOCOL_VERSION)
    refused(shell.run("nodes", "step-down", "n1"), 4, "no other node is there to take over from n1")
    register(conn, N2, 60, PROTOCOL_VERSION)
    refused(shell.run("nodes", "step-down", "n1", "--group", "$share/a/#"), 3, "node n1 does not lead $share/a/#")
    refused(shell.run("nodes", "step-down", "n1", "--group", "a"), 2, "'a'")
    let_lead(conn, N1, 1)
    conn.execute(
        "insert into consumer_group (group_id, kind, name, filter) overriding system value"
        " values (7, 'share', 'a', '#')"
    )
    refused(shell.run("nodes", "drain", "n1", "--wait", "1s"), 5, "node n1 still leads groups after 1 s")
    for command, reported in (
        ("drain n1 --undo", "n1 may lead again.\n"),
        ("drain n1 --undo", "n1 does not drain: nothing was changed.\n"),
        ("step-down n1 --wait 0", "n1 steps down from 1 group.\n"),
        ("step-down n2", "n2 has stepped down. It led no groups.\n"),
    ):
        answer = shell.run("nodes", *command.split())
        assert (answer.code, answer.err) == (0, reported)
    assert node_desired_state.read_desired_state(conn, N1) == node_desired_state.NodeDesiredState(False, {7: 1})


def terms_to_end(conn: Connection, node: NodeIncarnation) -> Mapping[int, int]:
    state = node_desired_state.read_desired_state(conn, node)
    assert state is not None
    return state.step_down


def test_orders_are_for_one_life_and_one_term(conn: Connection) -> None:
    for node in (N1, N2):
        register(conn, node, 60, PROTOCOL_VERSION)
    node_desired_state.set_draining(conn, N1, True)
    assert node_desired_state.read_desired_state(conn, N1) == node_desired_state.NodeDesiredState(True, {})
    assert list_live_nodes(conn) == [N2], "consumers do not go to it any more"
    assert renew(conn, N1, 60)
    register(conn, N1, 60, PROTOCOL_VERSION)
    assert list_live_nodes(conn) == [N2], "the same life"
    again = NodeIncarnation("n1", "another life of n1", "127.0.0.1:1")
    conn.execute("update node set expires_at = clock_timestamp() where name = 'n1'")
    register(conn, again, 60, PROTOCOL_VERSION)
    assert list_live_nodes(conn) == [again, N2]
    with pytest.raises(NotFound, match="node n1 has just ended"):
        node_desired_state.set_draining(conn, N1, True)
    assert node_desired_state.read_desired_state(conn, N1) is None
    conn.execute("update node set expires_at = clock_timestamp() where name = 'n1'")
    register(conn, N1, 60, PROTOCOL_VERSION, is_draining=True)
    assert list_live_nodes(conn) == [N2], "it goes on as it was, where another life had its name meanwhile"

    let_lead(conn, N2, 5)
    node_desired_state.request_step_down(conn, [node_desired_state.LedGroupRef(7, 4, "")])
    assert terms_to_end(conn, N2) == {}, "the term has passed"
    node_desired_state.request_step_down(conn, [node_desired_state.LedGroupRef(7, 5, "")])
    assert terms_to_end(conn, N2) == {7: 5}
    assert terms_to_end(conn, N1) == {}
    conn.execute("update leadership set term = 6")
    assert terms_to_end(conn, N2) == {}


def test_orders_concern_one_node_and_what_it_leads(conn: Connection) -> None:
    """Not another node's groups, what is over or was deleted, nor maintenance, which is no group."""
    for node in (N1, N2):
        register(conn, node, 60, PROTOCOL_VERSION)
    for name in "abcd":
        conn.execute("insert into consumer_group (kind, name, filter) values ('share', %s, '#')", (name,))
    conn.execute("update consumer_group set deleted_at = now() where name = 'c'")
    for leadership, node, hours in ((0, N1, 1), (1, N1, 1), (2, N2, 1), (3, N1, 1), (4, N1, -1)):
        conn.execute(
            "insert into leadership (leadership_id, node, incarnation, term, expires_at)"
            " values (%s, %s, %s, 5, clock_timestamp() + make_interval(hours => %s))",
            (leadership, node.name, node.incarnation, hours),
        )
    ours = [node_desired_state.LedGroupRef(1, 5, "$share/a/#")]
    assert node_desired_state.groups_led_by(conn, N1) == ours
    assert node_desired_state.leaders_of(conn, [1, 2, 4]) == {1: "n1", 2: "n2"}
    assert node_desired_state.leaders_of(conn, [2]) == {2: "n2"}
    for _ in range(2):
        others = (node_desired_state.LedGroupRef(0, 5, ""), node_desired_state.LedGroupRef(2, 4, "its former term"))
        node_desired_state.request_step_down(conn, [*ours, *others])
    assert [terms_to_end(conn, node) for node in (N1, N2)] == [{0: 5, 1: 5}, {}]
    history = "select group_id, split_part(reason, ',', 1) from lending_history order by history_id"
    asked = (1, "node n1 is to step down")
    assert conn.execute(history).fetchall() == [asked], "it is recorded once"
    nobody = NodeIncarnation("n2", N1.incarnation, "")
    with pytest.raises(NotFound, match="has just ended"):
        node_desired_state.set_draining(conn, nobody, True)
    node_desired_state.set_draining(conn, N1, True)
    noted = [(group_id, "node n1 is to lead nothing any more") for group_id in (1, 3)]
    assert sorted(conn.execute(history).fetchall()[1:]) == noted
    assert node_desired_state.read_desired_state(conn, nobody) is None
    assert list_live_nodes(conn) == [N2]
    node_desired_state.set_draining(conn, N1, False)
    assert len(conn.execute(history).fetchall()) == 3


def test_groups_of_a_drained_node_need_a_consumer(conn: Connection, shell: Shell) -> None:
    for node in (N1, N2):
        register(conn, node, 60, PROTOCOL_VERSION)
    for name in "ab":
        conn.execute("insert into consumer_group (kind, name, filter) values ('share', %s, '#')", (name,))
    for led, reported in (
        (1, "The group it led is led by another as soon as a consumer requests one.\n"),
        (2, "Of the 2 groups it led, 0 are led by others already, the rest as soon as a consumer requests one.\n"),
    ):
        conn.execute(
            "insert into leadership (leadership_id, node, incarnation, address, term, expires_at)"
            " select group_id, %s, %s, '', 1, 'infinity' from consumer_group order by group_id limit %s",
            (N1.name, N1.incarnation, led),
        )
        command = shell.start("nodes", "drain", "n1")
        eventually(lambda: list_live_nodes(conn) == [N2], WAIT_S)
        conn.execute("delete from leadership")
        answer = command.end()
        assert (answer.code, answer.err) == (0, f"n1 leads nothing any more, until it is stopped. {reported}")
        node_desired_state.set_draining(conn, N1, False)
