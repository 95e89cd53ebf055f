"""What Prometheus gets of groups: right for those that are empty, caught up, trimmed and unknown; bounded; and known by
the names that the dashboard and the docs use."""

from __future__ import annotations

import json
import re
from contextlib import closing

import pytest

from sublet_leader.observe.metric_definitions import METRIC_DEFINITIONS
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import RecordHistory
from sublet_storage.groups.status.lag_queries import (
    read_lags_by_status,
    read_stream_lags,
    read_total_lags,
    sum_by_status,
)
from sublet_storage.groups.status.overview import list_groups
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.integration.cli_kit import Shell
from tests.integration.http_kit import Http, served
from tests.integration.lending_kit import GROUP as LED_BY_HAND
from tests.integration.lending_kit import NODE as LED_BY
from tests.integration.lending_kit import a_world, open_streams
from tests.integration.log_kit import Connection
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually

LIMITS = {"SUBLET_HTTP_MAX_STREAM_SERIES": "3", "SUBLET_HTTP_MAX_GROUP_SERIES": "2"}


@pytest.fixture
def stage_settings(request: pytest.FixtureRequest) -> dict[str, str]:
    """A test may be parametrized with more of them."""
    return {"SUBLET_HTTP": "yes", **getattr(request, "param", {})}


@pytest.fixture
def stage(stage: Stage) -> Stage:
    reshard(stage.scene.connection, "default", 2)
    return stage


def lags(node: Http, group: str) -> dict[str, float]:
    """Return {stream: lag} of a group."""
    return {
        dict(labels)["stream_id"]: value
        for (name, labels), value in node.metrics().items()
        if name == "sublet_consumergroup_lag" and dict(labels)["subscription"] == group
    }


@pytest.mark.conforms("A3")
def test_lag_is_right_or_absent(stage: Stage) -> None:
    node = served(stage)
    stage.fleet.consumer("a", ALL)
    group = stage.scene.group()
    streams = [str(stream) for stream, *_ in eventually(stage.scene.rows, WAIT_S)]
    eventually(lambda: lags(node, ALL) == dict.fromkeys(streams, 0), WAIT_S, stage.said)  # empty
    stage.scene.publish(200)
    eventually(lambda: sum(position for _, _, position, _ in stage.scene.rows()) == 200, WAIT_S, stage.said)
    heads = {str(stream): head for stream, head in stage.scene.heads().items() if str(stream) in streams}
    assert sum(heads.values()) == 200

    def offsets(name: str, **group: str) -> dict[str, float | None]:
        return {stream: node.metric(name, space="default", stream_id=stream, **group) for stream in streams}

    eventually(lambda: offsets("sublet_consumergroup_current_offset", subscription=ALL) == heads, WAIT_S)  # caught up
    assert offsets("sublet_stream_head_offset") == heads
    assert lags(node, ALL) == dict.fromkeys(streams, 0)
    assert node.metric("sublet_consumergroup_lag_sum", subscription=ALL) == 0
    # Behind: nobody consumes, and the leader stays for a while.
    stage.fleet.consumers["a"].stop()
    stage.scene.publish(100)
    eventually(lambda: sum(lags(node, ALL).values()) == 100, WAIT_S, stage.said)
    metrics = node.metrics()
    assert metrics[("sublet_consumergroup_lag_sum", (("subscription", ALL),))] == 100
    assert metrics[("sublet_consumergroup_lag_max", (("subscription", ALL),))] == max(lags(node, ALL).values())
    # Unknown: a position that is beyond the head.
    first = streams[0]
    others = sum(lag for stream, lag in lags(node, ALL).items() if stream != first)
    stage.scene.ask(
        "update lending set position = 1000000 where group_id = %s and stream_id = %s returning 1",
        (group.group_id, int(first)),
    )
    eventually(lambda: set(lags(node, ALL)) == set(streams[1:]), WAIT_S)
    metrics = node.metrics()
    assert metrics[("sublet_consumergroup_unknown_lag_streams", (("subscription", ALL),))] == 1
    assert metrics[("sublet_consumergroup_known_lag_sum", (("subscription", ALL),))] == others
    assert ("sublet_consumergroup_lag_sum", (("subscription", ALL),)) not in metrics


@pytest.mark.conforms("A3")
def test_lag_of_what_retention_has_taken_is_unknown(conn: Connection, database: str) -> None:
    """Without a node, which would tidy up at once."""
    with closing(PostgresGroupStore(database)) as store:
        group_id = store.open_group(Subscription.parse(ALL)).group_id
    with Publisher(database) as publisher:
        for number in range(100):
            publisher.publish("t", b"m", key=b"%d" % number)
    lines = read_stream_lags(conn, [group_id])
    assert sum(line.lag or 0 for line in lines) == 100
    assert read_lags_by_status(conn, [group_id]) == sum_by_status(lines)
    assert read_total_lags(conn) == {group_id: 100}
    conn.execute("update generation set state = 'gone' where state = 'open'")
    lines = read_stream_lags(conn, [group_id])
    assert [line.lag for line in lines] == [None, None]
    (line,) = read_lags_by_status(conn, [group_id])
    assert (line.streams, line.lag, line.largest, line.unknown) == (2, 0, None, 2)
    assert read_total_lags(conn) == {group_id: None}
    assert list_groups(conn)[0].unknown_lag_count == 2, "the command line says the same"


def test_a_group_is_exported_by_its_leader_alone(stage: Stage) -> None:
    nodes = {name: served(stage, name) for name in ("n1", "n2")}
    stage.fleet.consumer("a", ALL)
    eventually(lambda: stage.scene.shares() == [2], WAIT_S, stage.said)
    claim = stage.scene.claim()
    (other,) = set(nodes) - {claim.node.name}
    leader = nodes[claim.node.name]
    eventually(lambda: leader.metric("sublet_consumergroup_term", subscription=ALL) == claim.term, WAIT_S)
    assert not [name for name, _ in nodes[other].metrics() if name.startswith("sublet_consumergroup")]
    granted = leader.metric(
        "sublet_lending_events_total", subscription=ALL, event="grant", reason="allocated", forced="false"
    )
    assert granted == 2
    stage.fleet.nodes[claim.node.name].kill()
    stage.next_leader(claim)
    eventually(
        lambda: nodes[other].metric("sublet_consumergroup_streams", subscription=ALL, status="held") == 2, WAIT_S
    )
    assert nodes[other].metric("sublet_leader_events_total", event="takeover") == 1


@pytest.mark.conforms("A3")
@pytest.mark.long
def test_a_group_without_a_leader_is_exported(stage: Stage) -> None:
    """Its consumers are all gone: what lag is watched for."""
    stage.scene.store.open_group(Subscription.parse(ALL))
    stage.scene.publish(100)
    nodes = [served(stage, name) for name in ("n1", "n2")]

    def exporting(name: str, **labels: str) -> list[float]:
        return [found for node in nodes if (found := node.metric(name, subscription=ALL, **labels)) is not None]

    eventually(lambda: exporting("sublet_consumergroup_lag_sum") == [100], WAIT_S, stage.said)
    assert exporting("sublet_consumergroup_members") == [0]
    assert exporting("sublet_consumergroup_streams", status="free") == [2]
    assert exporting("sublet_consumergroup_term") == []
    assert sum(sum(lags(node, ALL).values()) for node in nodes) == 100
    # What came into a generation that no leader has noticed yet is unread as well.
    reshard(stage.scene.connection, "default", 4)
    stage.scene.publish(50, first=100)
    eventually(lambda: exporting("sublet_consumergroup_lag_sum") == [150], WAIT_S, stage.said)
    assert exporting("sublet_consumergroup_streams", status="new") == [4]
    stage.fleet.consumer("a", ALL)
    eventually(lambda: exporting("sublet_consumergroup_members") == [1], WAIT_S, stage.said)
    eventually(lambda: exporting("sublet_consumergroup_lag_sum") == [0], WAIT_S, stage.said)
    finished = [stream for stream, status, *_ in stage.scene.rows() if status == "finished"]
    assert len(finished) == 2
    assert exporting("sublet_consumergroup_streams", status="finished") == []
    assert not {str(stream) for stream in finished} & {stream for node in nodes for stream in lags(node, ALL)}
    assert not [name for node in nodes for name, _ in node.metrics() if name.endswith("_created")]


def test_stuck_streams_without_a_leader_are_counted(stage: Stage, database: str, conn: Connection) -> None:
    with a_world(database, conn) as led:
        led.lead(listed=False)
        first = open_streams(conn)[0]
        led.write(RecordHistory(first, led.lend(first).grant_id, "unreadable", "damaged"))
        led.store.release(LED_BY, {led.group: led.term})
    node = served(stage)
    stuck = ("sublet_consumergroup_unreadable_streams", (("subscription", LED_BY_HAND),))
    assert eventually(lambda: node.metrics().get(stuck), WAIT_S, stage.said) == 1


@pytest.mark.parametrize("stage_settings", [LIMITS], indirect=True, ids=["limits"])
@pytest.mark.parametrize("led", [True, False], ids=["led", "nobody leads"])
def test_beyond_the_limits_groups_are_counted(stage: Stage, led: bool) -> None:
    """Of some there are sums only, and of others nothing."""
    node = served(stage)
    if led:
        stage.fleet.subscriber("many", "$share/g{}/#", 3)
        eventually(lambda: node.metric("sublet_leader_events_total", event="takeover") == 3, WAIT_S, stage.said)
    else:
        for number in range(3):
            stage.scene.store.open_group(Subscription.parse(f"$share/g{number}/#"))

    def groups(name: str) -> int:
        return len({dict(labels)["subscription"] for each, labels in node.metrics() if each == name})

    eventually(lambda: node.metric("sublet_groups_not_exported", series="all") == 1, WAIT_S, stage.said)
    assert node.metric("sublet_groups_not_exported", series="streams") == 2
    for name in ("members", "streams", "lag_sum"):
        assert groups(f"sublet_consumergroup_{name}") == 2
    assert groups("sublet_consumergroup_lag") == 1


@pytest.mark.parametrize("stage_settings", [{"SUBLET_NOTIFY": "postgres"}], indirect=True, ids=["push"])
def test_all_that_is_exported_is_declared(stage: Stage) -> None:
    node = served(stage)
    stage.fleet.consumer("a", ALL)
    eventually(lambda: stage.scene.shares() == [2], WAIT_S, stage.said)
    declared = {name: set(family.labels) for family in METRIC_DEFINITIONS for name in family.exported_names}

    def is_all_there() -> bool:
        found = {name for name, _ in node.metrics()}
        never = {"sublet_database_request_failures_total", "sublet_invariant_violations_total"}
        return set(declared) - found <= never

    eventually(is_all_there, WAIT_S, lambda: f"{sorted(set(declared) - {name for name, _ in node.metrics()})}")
    for name, labels in node.metrics():
        if name.startswith("sublet_"):
            assert set(dict(labels)) - {"le"} == declared[name], name


@pytest.mark.long
def test_logs_are_json_with_the_ids_of_what_happened(shell: Shell) -> None:
    node = shell.leader("n1", "--log-format", "json", "--http", "127.0.0.1:0")
    shell.run("publish", "t", stdin="one\n")
    consumed = shell.run("consume", "$share/g/#", "--from", "earliest", "--max-messages", "1", "--name", "worker-1")
    assert consumed.code == 0, consumed.err
    eventually(lambda: '"event": "release"' in node.err, 20, lambda: node.err)
    lines = [json.loads(line) for line in node.err.splitlines()]
    assert {line["node"] for line in lines} == {"n1"}
    grant = next(line for line in lines if line.get("event") == "grant")
    assert {"term", "stream_id", "grant_id", "borrower_id", "agent", "position"} <= set(grant)
    assert (grant["subscription"], grant["session"], grant["level"]) == ("$share/g/#", "worker-1", "info")
    text = shell.leader("n2")
    assert re.fullmatch(r"node n2 serves on \S+", text.err.splitlines()[-1])


def test_a_port_that_others_can_reach_must_be_wanted(shell: Shell) -> None:
    refused = shell.run("leader", "--listen", "127.0.0.1:0", "--http", "0.0.0.0:0")
    assert refused.code == 2
    assert "--insecure" in refused.err
    node = shell.leader("n1", "--http", "127.0.0.1:0")
    refused = shell.run("leader", "--name", "n2", "--listen", "127.0.0.1:0", "--http", Http.of(node).address)
    assert refused.code == 2
    assert "the port is in use" in refused.err
