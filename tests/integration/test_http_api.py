"""The JSON API: any node shows all groups; reading is free, acting takes the token, and nothing else will do."""

from __future__ import annotations

import json
import time

import pytest

from sublet_leader.observe.lag_history import LagHistory
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import PROTOCOL_VERSION
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.node_directory import NodeIncarnation, register
from tests.integration.cli_kit import Shell
from tests.integration.http_kit import Http, served
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually

TOKEN = "the-token-of-an-admin"
STRANGE = '$share/<b>&"é/a/#'


@pytest.fixture
def stage_settings() -> dict[str, str]:
    return {"SUBLET_HTTP": "yes", "SUBLET_ADMIN_TOKEN": TOKEN}


def post(
    node: Http, what: str, reported: object, token: str | None = TOKEN, kind: str = "application/json"
) -> tuple[int, str]:
    """Status, and what was wrong."""
    headers = {"Content-Type": kind} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    path = f"/api/v1/{what}" if "/" in what else f"/api/v1/group/{what}"
    answer = node.ask(path, "POST", headers, json.dumps(reported).encode())
    return answer.status, answer.object.get("error", "")


@pytest.mark.conforms("A2", "A7", "A9")
@pytest.mark.long
def test_any_node_reports_any_group(stage: Stage, shell: Shell) -> None:
    nodes = {name: served(stage, name) for name in ("n1", "n2")}
    stage.share("a", "b")
    stage.scene.publish(100)
    eventually(stage.scene.consumed, WAIT_S, stage.said)
    said = shell.run("groups", "describe", ALL, "--json").object
    leader = stage.scene.claim().node.name
    for name, node in nodes.items():
        reported = node.get("/api/v1/group", subscription=ALL)
        for what in ("group_id", "state", "lag", "streams_by_status", "members", "subscription"):
            assert reported[what] == said[what], what
        assert reported["led_here"] is (name == leader)
        assert reported["standby_members"] == ([] if name == leader else None)
        found = node.get("/api/v1/group/history", subscription=ALL)
        assert [line["event"] for line in found["history"] if line["event"] == "grant"]
        assert node.get("/api/v1/group/history", subscription=ALL, after=found["next"])["history"] == []
        assert len(node.get("/api/v1/group/history", subscription=ALL, limit=2)["history"]) == 2
    listed = {each["name"]: each for each in nodes["n1"].get("/api/v1/nodes")["nodes"]}
    assert {name: each["http_address"] for name, each in listed.items()} == {n: h.address for n, h in nodes.items()}
    assert listed[leader]["leads"] == 1
    assert nodes["n2"].get("/api/v1/node")["state"] == "ok"
    eventually(lambda: 0 in nodes["n2"].get("/api/v1/group", subscription=ALL)["lag_history"], WAIT_S)


def test_groups_are_searched_sorted_and_paged(stage: Stage) -> None:
    for subscription in (*(f"$share/g{number}/a/#" for number in range(7)), STRANGE):
        stage.scene.store.declare_group(Subscription.parse(subscription), GroupOptions())
    stage.scene.ask("update lending set position = 99 where group_id = (select min(group_id) from lending) returning 1")
    node = served(stage)

    def names(**query: object) -> list[str]:
        return [group["name"] for group in node.get("/api/v1/groups", **query)["groups"]]

    assert names() == sorted(names())
    assert names(sort="created", order="desc", limit=2) == ['<b>&"é', "g6"]
    assert names(search="G3/A") == ["g3"]
    assert names(search='<B>&"') == ['<b>&"é']
    assert names(search="%") == []
    assert (names(offset=3, limit=2), node.get("/api/v1/groups", offset=3)["total"]) == (names()[3:5], 8)
    assert names(sort="lag", order="desc")[0] == "g0", "what is unknown may be the worst"
    assert names(sort="lag")[-1] == "g0"
    assert node.get("/api/v1/group", subscription=STRANGE)["subscription"] == STRANGE
    for path, status, said in (
        ("/api/v1/groups?limit=-1", 400, "whole number"),
        ("/api/v1/groups?limit=100000", 400, "500"),
        ("/api/v1/groups?sort=colour", 400, "one of name"),
        ("/api/v1/groups?search=a%00b", 400, "zero character"),
        ("/api/v1/group", 400, "needs subscription"),
        ("/api/v1/group?subscription=nonsense", 400, "nonsense"),
        ("/api/v1/group?subscription=$share/none/a", 404, "none"),
        ("/api/v1/group/history?subscription=$share/none/a", 404, "none"),
        ("/api/v1/group/history?subscription=$share/g0/a/%23&after=7", 400, "is no position in a history"),
        ("/static/../server.py", 404, "nothing"),
        ("/static/%2e%2e%2fserver.py", 404, "nothing"),
        ("/static/server.py", 404, "no file"),
    ):
        answer = node.ask(path)
        assert (answer.status, said in answer.object["error"]) == (status, True), (path, answer.body)


@pytest.mark.conforms("A5")
def test_who_has_the_token_may_act(stage: Stage) -> None:
    node = served(stage)
    stage.share("a")
    named = {"subscription": ALL}
    for token in (None, "", "wrong", TOKEN + "x", TOKEN[:-1]):
        assert post(node, "pause", named, token)[0] == 401
    assert post(node, "pause", named, kind="text/plain")[0] == 400, "what a form of another site could send"
    assert post(node, "pause", [])[0] == 400
    assert post(node, "pause", {"subscription": 3})[0] == 400
    assert post(node, "pause", {"subscription": "$share/none/a"})[0] == 404
    assert stage.scene.shares() == [16]
    assert post(node, "pause", {**named, "reason": "the sink"}) == (200, "")
    eventually(lambda: stage.scene.shares() == [], WAIT_S, stage.said)
    reported = node.get("/api/v1/group", subscription=ALL)
    assert (reported["state"], reported["paused"], len(reported["standby_members"])) == ("paused", "the sink", 1)
    assert post(node, "resume", named) == (200, "")
    eventually(lambda: stage.scene.shares() == [16], WAIT_S, stage.said)
    status, why = post(node, "step-down", named)
    assert (status, "no other node" in why) == (409, True)
    stage.serve("n2")
    before = stage.scene.claim()
    assert post(node, "step-down", named) == (200, "")
    assert stage.next_leader(before).node.name == "n2"


@pytest.mark.conforms("A1", "A4", "A5", "A6")
def test_a_group_is_managed_over_http(stage: Stage) -> None:
    node, named = served(stage), {"subscription": ALL}
    assert post(node, "create", {**named, "starting_position": "earliest"}) == (200, "")
    assert post(node, "create", {**named, "starting_position": "earliest"}) == (200, "")
    assert post(node, "create", {**named, "starting_position": "latest"})[0] == 409
    assert post(node, "step-down", named)[0] == 409, "nobody leads it"
    stage.share("a")
    stage.scene.publish(100)
    eventually(stage.scene.consumed, WAIT_S, stage.said)
    assert post(node, "weight", {**named, "session": "a", "weight": 2.5}) == (200, "")
    assert node.get("/api/v1/group", subscription=ALL)["weights"] == {"a": 2.5}
    before = stage.scene.rows()
    assert post(node, "reset", {**named, "to": "earliest", "dry_run": True}) == (200, "")
    assert stage.scene.rows() == before
    far, had = max(before, key=lambda row: row[2])[0], len(stage.fleet.delivered())
    assert post(node, "reset", {**named, "to": {"shift": -1}, "streams": [far]}) == (200, "")
    eventually(lambda: len(stage.fleet.delivered()) == had + 1, WAIT_S, stage.said)
    for what, reported, why in (
        ("reset", {"to": "somewhere"}, "earliest"),
        ("reset", {"to": {"offset": True}}, "earliest"),
        ("reset", {"to": {"offset": 1, "shift": 1}}, "earliest"),
        ("reset", {"to": {"time": "noon"}}, "2026-01-31T12:00:00Z"),
        ("reset", {"to": {"time": "9999-12-31T23:59:59-14:00"}, "dry_run": True}, "years 1 to 9999"),
        ("reset", {"to": {"time": "0001-01-01T00:00:00+14:00"}, "dry_run": True}, "years 1 to 9999"),
        ("reset", {"to": "latest", "streams": [2**63]}, "list"),
        ("reset", {"to": {"offsets": {"x": 1}}}, "a number"),
        ("reset", {"to": "latest", "streams": "1"}, "list"),
        ("reset", {"to": "latest", "dry-run": True}, "dry-run"),
        ("weight", {"session": "a"}, "weight"),
        ("weight", {"session": "a", "weight": "2"}, "number"),
        ("weight", {"session": "a", "weight": 10**400}, "300 digits"),
        ("weight", {"session": "a", "weight": float("nan")}, "from 0.001 to 10000"),
        ("create", {"on_data_loss": "cry"}, "on_data_loss"),
        ("create", {"atomic": 1}, "true or false"),
    ):
        status, said = post(node, what, {**named, **reported})
        assert (status, why in said) == (400, True), (what, reported, status, said)
    assert post(node, "delete", named) == (200, "")
    assert post(node, "delete", named)[0] == 404


@pytest.mark.conforms("A6")
@pytest.mark.long
def test_a_node_is_drained_over_http(stage: Stage) -> None:
    nodes = {name: served(stage, name) for name in ("n1", "n2")}

    def drain(**reported: object) -> tuple[int, str]:
        return post(nodes["n1"], "node/drain", reported)

    assert drain(node="n3")[0] == 404
    for changes in (True, False):
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
        answer = nodes["n1"].ask("/api/v1/node/drain", "POST", headers, b'{"node": "n2"}')
        assert (answer.status, answer.object["changed"]) == (200, changes)
    eventually(lambda: nodes["n2"].ask("/readyz").object["state"] == "draining", WAIT_S)
    status, why = drain(node="n1")
    assert (status, "no other node" in why) == (409, True)
    assert drain(node="n1", force=True) == (200, "")
    assert drain(node="n1", draining=False) == (200, ""), "without another node as well"
    assert drain(node="n2", draining=False) == (200, "")
    eventually(lambda: nodes["n2"].ask("/readyz").object["state"] == "ok", WAIT_S)


def test_a_leader_steps_down_for_another_node(stage: Stage) -> None:
    """Which the draining node cannot."""
    node, conn, named = served(stage), stage.scene.connection, {"subscription": ALL}
    register(conn, NodeIncarnation("n0", "a life of n0", "127.0.0.1:1"), 60, PROTOCOL_VERSION, is_draining=True)
    conn.execute(
        "insert into leadership (leadership_id, node, incarnation, term, expires_at)"
        " values (%s, 'n0', '', 1, 'infinity')",
        (stage.scene.store.open_group(Subscription.parse(ALL)).group_id,),
    )
    assert post(node, "step-down", named) == (200, "")
    conn.execute("update leadership set node = 'n1' where node = 'n0'")
    status, why = post(node, "step-down", named)
    assert (status, "no other node" in why) == (409, True)
    assert post(node, "step-down", {**named, "force": True}) == (200, "")


def test_without_a_token_nothing_can_be_done(shell: Shell) -> None:
    """And it is a secret."""
    node = Http.of(shell.leader("n1", "--http", "127.0.0.1:0"))
    assert node.get("/api/v1/node")["actions"] is False
    for what in ("create", "delete", "pause", "resume", "weight", "reset", "step-down", "node/drain"):
        status, why = post(node, what, {"subscription": ALL})
        assert (status, "SUBLET_ADMIN_TOKEN" in why) == (403, True), what
    shell.environment |= {"SUBLET_ADMIN_TOKEN": "xq7short", "SUBLET_LOG_FORMAT": "json"}
    refused = shell.run("leader", "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    assert refused.code == 2
    assert "SUBLET_ADMIN_TOKEN has 8 characters" in json.loads(refused.err)["message"], "its only line, and JSON"
    assert "xq7" not in refused.err


@pytest.mark.conforms("X1")
def test_without_auth_the_token_is_for_acting(shell: Shell) -> None:
    """All is shown to whoever asks, also with a wrong token."""
    shell.environment |= {"SUBLET_ADMIN_TOKEN": TOKEN, "SUBLET_AUTH": "off"}
    process = shell.leader("n1", "--http", "127.0.0.1:0")
    node, named = Http.of(process), {"subscription": ALL}
    assert "SUBLET_ADMIN_TOKEN" not in process.err
    for token in (None, "a wrong token of some length", f"{TOKEN}x"):
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        for path in ("/api/v1/groups", "/api/v1/nodes", "/api/v1/node", "/metrics"):
            assert node.ask(path, headers=headers).status == 200, path
        assert post(node, "create", named, token) == (
            401,
            "the admin token is missing or wrong: send Authorization: Bearer TOKEN.",
        )
    assert node.get("/api/v1/groups")["total"] == 0
    assert post(node, "create", named)[0] == 200
    assert node.get("/api/v1/groups")["total"] == 1


@pytest.mark.long
def test_a_port_on_all_addresses_is_advertised(shell: Shell) -> None:
    found: dict[str, str] = {}
    for name, listen in (("n1", "127.0.0.1:0"), ("n2", "0.0.0.0:0")):
        node = shell.start("leader", "--name", name, "--listen", listen, "--http", "0.0.0.0:0", "--insecure")
        node.says("serves on")
        found[name] = Http.of(node).address.removeprefix("0.0.0.0:")
    reported = Http(f"127.0.0.1:{found['n2']}").get("/api/v1/nodes")["nodes"]
    advertised = {each["name"]: each["http_address"] for each in reported}
    assert advertised == {"n1": f"127.0.0.1:{found['n1']}", "n2": None}


def test_the_log_records_who_did_what(shell: Shell) -> None:
    """With what outcome, and who was refused."""
    shell.environment["SUBLET_ADMIN_TOKEN"] = TOKEN
    process = shell.leader("n1", "--log-format", "json", "--http", "127.0.0.1:0")
    node, named = Http.of(process), {"subscription": ALL}
    for _ in range(3):
        assert post(node, "pause", named, "a wrong token of some length")[0] == 401
    assert post(node, "create", named)[0] == 200
    assert post(node, "pause", {**named, "why": "typed wrongly"})[0] == 400
    assert post(node, "delete", [])[0] == 400
    assert post(node, "delete", named)[0] == 200
    lines = [json.loads(line) for line in process.err.splitlines() if '"action"' in line]
    what = ("level", "action", "status", "subscription", "address")
    assert [tuple(line.get(name) for name in what) for line in lines] == [
        ("warning", "group/pause", 401, None, "127.0.0.1"),
        ("info", "group/create", 200, ALL, "127.0.0.1"),
        ("info", "group/pause", 400, ALL, "127.0.0.1"),
        ("info", "group/delete", 400, None, "127.0.0.1"),
        ("info", "group/delete", 200, ALL, "127.0.0.1"),
    ]
    said = [line["message"] for line in lines]
    assert ["refused" in said[2], "done" in said[2], "outcome=done status=200: " in said[4]] == [True, False, True]
    assert not any("a wrong token" in message or TOKEN in message for message in said)


@pytest.mark.parametrize(("minutes", "max_groups"), [(0, 2), (1, 0)])
def test_no_curves_where_none_are_wanted(minutes: int, max_groups: int) -> None:
    curves = LagHistory(pool=None, minutes=minutes, max_groups=max_groups)  # type: ignore[arg-type]
    curves.run()  # returns, and has looked for no connection
    assert curves.read((1,)) == ([], {1: []})


def test_curves_remember_what_was_not_known() -> None:
    curves = LagHistory(pool=None, minutes=1, max_groups=2)  # type: ignore[arg-type]
    now = time.time()
    curves.add_sample(now, {1: 5, 2: None})
    curves.add_sample(now + 10, {1: 6, 2: 7, 3: 8})
    times, found = curves.read((1, 2, 3))
    assert times == [round(now, 1), round(now + 10, 1)]
    assert found == {1: [5, 6], 2: [None, 7], 3: [None, None]}
    later = LagHistory(pool=None, minutes=1, max_groups=2)  # type: ignore[arg-type]
    later.add_sample(now, {1: 5})
    later.add_sample(now + 10, {1: 6, 2: 7})
    assert later.read((1, 2))[1] == {1: [5, 6], 2: [None, 7]}
    for number in range(20):
        curves.add_sample(now + number, {1: number})
    assert len(curves.read((1,))[0]) == 6
