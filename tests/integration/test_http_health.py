"""What a probe sees of a node that is well, and of one that is not; by HTTP and by gRPC alike."""

from __future__ import annotations

import os
import signal

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.http_kit import Http, served
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually
from tests.postgres_proxy import PostgresProxy

SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def stage_settings() -> dict[str, str]:
    return {"SUBLET_HTTP": "yes"}


def grpc_says(stage: Stage, node: str, service: str = "") -> bool:
    """Return whether the node's gRPC health service reports that it serves."""
    (address,) = [line[0] for line in stage.scene.ask("select address from node where name = %s", (node,))]
    with grpc.insecure_channel(address) as channel:
        answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return bool(answer.status == SERVING)


def state_of(node: Http) -> tuple[int, str, bool]:
    """Status and state of `/readyz`, and whether `/healthz` would have the process go on."""
    ready, live = node.ask("/readyz"), node.ask("/healthz")
    assert ready.object["ready"] is (ready.status == 200)
    return ready.status, ready.object["state"], live.status == 200


@pytest.mark.conforms("A8")
def test_a_probe_sees_the_database_go_and_return(stage: Stage) -> None:
    with PostgresProxy(stage.scene.url) as way:
        stage.serve("n1", url=way.url)
        node = Http.of(stage.fleet.nodes["n1"])
        eventually(lambda: state_of(node) == (200, "ok", True), WAIT_S, stage.said)
        for trouble in (PostgresProxy.go_away, PostgresProxy.hold):
            trouble(way)
            eventually(lambda: state_of(node) == (503, "database_unreachable", True), WAIT_S, stage.said)
            assert node.ask("/readyz/database").status == 503
            assert grpc_says(stage, "n1", "live"), "a restart would not help"
            eventually(lambda: node.metric("sublet_database_up") == 0, WAIT_S)
            eventually(lambda: not grpc_says(stage, "n1") and not grpc_says(stage, "n1", "database"), WAIT_S)
            eventually(lambda: node.metric("sublet_health_state", state="database_unreachable") == 1, WAIT_S)
            assert node.metric("sublet_groups_without_leader") is None
            way.resume()
            eventually(lambda: state_of(node) == (200, "ok", True), WAIT_S, stage.said)
            eventually(lambda: grpc_says(stage, "n1") and grpc_says(stage, "n1", "database"), WAIT_S)
            eventually(lambda: node.metric("sublet_database_up") == 1, WAIT_S)


@pytest.mark.conforms("A8")
@pytest.mark.long
def test_a_probe_sees_that_a_lease_is_denied_and_why(stage: Stage) -> None:
    node = served(stage)
    eventually(lambda: state_of(node) == (200, "ok", True), WAIT_S, stage.said)
    ask = stage.scene.connection.execute
    # Somebody else has its name.
    ask("update node set incarnation = 'another life', expires_at = clock_timestamp() + interval '1 hour'")
    eventually(lambda: state_of(node) == (503, "lease_denied", True), WAIT_S, stage.said)
    assert "n1" in node.ask("/readyz").object["detail"]
    eventually(lambda: not grpc_says(stage, "n1", "lease") and grpc_says(stage, "n1", "database"), WAIT_S)
    ask("delete from node")
    eventually(lambda: state_of(node) == (200, "ok", True), WAIT_S, stage.said)
    # The database refuses to write down who leads.
    ask(
        "create function deny() returns trigger language plpgsql as $$ begin raise 'the deputy says no'; end $$;"
        "create trigger deny before insert or update on leadership for each row execute function deny()"
    )
    eventually(lambda: state_of(node) == (503, "lease_denied", True), WAIT_S, stage.said)
    assert "the deputy says no" in node.ask("/readyz/lease").object["detail"]
    eventually(lambda: node.metric("sublet_database_up") == 1, WAIT_S)
    ask("drop function deny cascade")
    eventually(lambda: state_of(node) == (200, "ok", True), WAIT_S, stage.said)
    # Another node has taken it.
    eventually(lambda: node.metric("sublet_leaderships", status="leading") == 1, WAIT_S, stage.said)
    ask(
        "update leadership set incarnation = 'another life', node = 'other', term = term + 1,"
        " expires_at = clock_timestamp() + interval '1 hour'"
    )
    eventually(lambda: state_of(node) == (503, "lease_denied", True), WAIT_S, stage.said)
    assert node.ask("/readyz/lease").object["detail"] == "node other has taken the maintenance"


@pytest.mark.conforms("A8")
@pytest.mark.long
def test_a_probe_sees_a_job_without_answers(stage: Stage) -> None:
    """The relay of the maintenance. It takes another connection after a time, whose server process is frozen too."""
    node, stopped = served(stage), set[int]()
    idle = (
        "select pid from pg_stat_activity where application_name = 'sublet relay' and state = 'idle'"
        " and wait_event = 'ClientRead' and datname = current_database()"
    )

    def freeze() -> None:
        for (pid,) in set(stage.scene.ask(idle)) - {(pid,) for pid in stopped}:
            os.kill(pid, signal.SIGSTOP)
            if (pid,) in stage.scene.ask(idle):
                stopped.add(pid)
            else:
                os.kill(pid, signal.SIGCONT)

    def is_stalled() -> bool:
        freeze()
        one = node.ask("/readyz/maintenance").object["state"], grpc_says(stage, "n1", "maintenance")
        return one == ("maintenance_stalled", False) and state_of(node) == (200, "maintenance_stalled", True)

    try:
        eventually(is_stalled, 3 * WAIT_S, stage.said)
        assert grpc_says(stage, "n1"), "it serves its consumers"
    finally:
        for pid in stopped:
            os.kill(pid, signal.SIGCONT)
    eventually(lambda: state_of(node) == (200, "ok", True), WAIT_S, stage.said)


@pytest.mark.conforms("A8")
@pytest.mark.long
def test_a_probe_sees_a_group_without_a_leader(stage: Stage) -> None:
    stage.serve("n1")
    stage.share("a")
    node = Http.of(stage.fleet.nodes["n1"])
    eventually(lambda: node.metric("sublet_consumergroup_members", subscription=ALL) == 1, WAIT_S)
    stage.fleet.nodes["n1"].kill()
    stage.fleet.consumers["a"].kill()
    other = served(stage, "n2")  # nobody asks it for the group
    eventually(lambda: state_of(other) == (200, "no_leader", True), WAIT_S, stage.said)
    found = other.ask("/readyz/leaders")
    assert (found.status, found.object["detail"]) == (503, "1 group has consumers and no leader")
    eventually(lambda: not grpc_says(stage, "n2", "leaders"), WAIT_S)
    assert grpc_says(stage, "n2"), "a group without a leader is no failure of this node"
    eventually(lambda: other.metric("sublet_groups_without_leader") == 1, WAIT_S)
    stage.fleet.consumer("b", ALL)
    eventually(lambda: state_of(other) == (200, "ok", True), WAIT_S, stage.said)
    assert other.ask("/readyz/leaders").status == 200
