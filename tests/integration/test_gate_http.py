"""Every route of the HTTP port of a node that asks who calls, with and without tokens and rights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.routing import Route

from sublet_leader.http.app import NodeHttpService
from sublet_leader.http.settings import HttpOptions
from sublet_leader.listen_address import ListenAddress
from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.limits import MAX_GROUP_CHARACTERS
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.gate.gate import AccessGate
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions
from tests.integration.access_kit import allow, expired_token, revoked_token, rule, token_of
from tests.integration.cli_kit import Running, Shell, a_shell
from tests.integration.http_kit import Answer, Http
from tests.integration.log_kit import Connection
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet, Process

pytestmark = pytest.mark.conforms("X1")

GROUP, HIDDEN = "$share/billing/orders/#", "$share/other/orders/#"
ON_GROUP = {"subscription": GROUP}
NAMED = "?subscription=$share/billing/orders/%23"
OPEN, KNOWN, SOME, ALL = "anybody", "its group", "some group", "all groups"

GETS = {
    "/": ("/", OPEN),
    "/static/{name}": ("/static/app.js", OPEN),
    "/healthz": ("/healthz", OPEN),
    "/readyz": ("/readyz", OPEN),
    "/readyz/{name}": ("/readyz/loop", OPEN),
    "/metrics": ("/metrics", ALL),
    "/api/v1/node": ("/api/v1/node", SOME),
    "/api/v1/nodes": ("/api/v1/nodes", ALL),
    "/api/v1/groups": ("/api/v1/groups", KNOWN),
    "/api/v1/group": (f"/api/v1/group{NAMED}", KNOWN),
    "/api/v1/group/history": (f"/api/v1/group/history{NAMED}", KNOWN),
}
POSTS: dict[str, tuple[dict[str, Any], str, int]] = {
    "/api/v1/group/create": (ON_GROUP, KNOWN, 200),
    "/api/v1/group/pause": (ON_GROUP, KNOWN, 200),
    "/api/v1/group/resume": (ON_GROUP, KNOWN, 200),
    "/api/v1/group/weight": ({**ON_GROUP, "session": "s", "weight": 2}, KNOWN, 200),
    "/api/v1/group/reset": ({**ON_GROUP, "to": "latest"}, KNOWN, 200),
    "/api/v1/group/step-down": (ON_GROUP, KNOWN, 409),
    "/api/v1/node/drain": ({"node": "n1"}, ALL, 409),
    "/api/v1/group/delete": (ON_GROUP, KNOWN, 200),
}
"""What is sent, who may, and the status for who may: in this order."""


Tokens = dict[str, str | None]


@pytest.fixture(scope="module")
def conn(shared_database: str) -> Iterator[Connection]:
    with connect(shared_database) as connection:
        yield connection


@pytest.fixture(scope="module")
def tokens(shared_database: str, conn: Connection) -> Tokens:
    with closing(PostgresGroupStore(shared_database)) as store:
        for group in (GROUP, HIDDEN):
            store.declare_group(Subscription.parse(group), GroupOptions())
    allow(conn, rule("user:operator", Right.OPERATE, "#", "billing"))
    allow(conn, rule("user:watcher", Right.WATCH, "orders/#", "bill*"))
    allow(conn, rule("user:all", Right.OPERATE, "#"))
    for right in (Right.PUBLISH, Right.READ, Right.JOIN):
        allow(conn, rule("user:reader", right, "#"))
    return {
        "none": None,
        "wrong": "sub_aaaaaaaa_" + "x" * 43,
        "expired": expired_token(conn, "user:all"),
        "revoked": revoked_token(conn, "user:all"),
        **{name: token_of(conn, f"user:{name}") for name in ("operator", "watcher", "all", "reader")},
    }


@pytest.fixture(scope="module")
def served(shared_database: str, tmp_path_factory: pytest.TempPathFactory, tokens: Tokens) -> Iterator[Process]:
    """Yield a node that asks who calls, one for all of these tests."""
    settings = {"SUBLET_AUTH": "required", "SUBLET_HTTP": "yes"}
    with closing(Fleet(shared_database, tmp_path_factory.mktemp("fleet"), extra=settings)) as fleet:
        fleet.serve("n1")
        yield fleet.nodes["n1"]


@pytest.fixture(scope="module")
def node(served: Process) -> Http:
    return Http.of(served)


@pytest.fixture
def shell(shared_database: str) -> Iterator[Shell]:
    with a_shell(SUBLET_DATABASE_URL=shared_database) as shell:
        yield shell


@pytest.fixture
def audited(shell: Shell, tokens: Tokens) -> Running:
    """Another node that asks who calls, with a log of its own."""
    return shell.leader("audited", "--http", "127.0.0.1:0", "--auth", "required")


def audit_lines(node: Running, mark: str = '"outcome"') -> list[dict[str, Any]]:
    return [json.loads(line[line.index("{") :]) for line in node.err.splitlines() if mark in line]


def get(node: Http, path: str, token: str | None) -> Answer:
    return node.ask(path, headers={} if token is None else {"Authorization": f"Bearer {token}"})


def post(node: Http, path: str, body: dict[str, Any], token: str | None) -> Answer:
    headers = {"Content-Type": "application/json"} | ({} if token is None else {"Authorization": f"Bearer {token}"})
    return node.ask(path, "POST", headers, json.dumps(body).encode())


def test_every_route_is_in_this_test() -> None:
    anything: Any = SimpleNamespace(ref=SimpleNamespace(name="n1"), health=None)
    with closing(NodeHttpService(HttpOptions(ListenAddress("127.0.0.1", 0)), "")) as port:
        routes = port.build_routes(anything, AccessGate(), anything, anything)
    assert {type(each) for each in routes} == {Route}, "nothing that has routes of its own, and no socket"
    found = {(each.path, *sorted(each.methods or ())) for each in routes if isinstance(each, Route)}
    assert found == {(path, "GET", "HEAD") for path in GETS} | {(path, "POST") for path in POSTS}


def test_reading_needs_watch(node: Http, tokens: Tokens) -> None:
    texts = set()
    for path, who in GETS.values():
        for kind in ("none", "wrong", "expired", "revoked"):
            answer = get(node, path, tokens[kind])
            assert answer.status == (200 if who == OPEN else 401), (path, kind)
            if who != OPEN:
                texts.add(answer.body)
                assert answer.headers["www-authenticate"].startswith("Bearer")
        allowed = {
            OPEN: ("reader", "watcher", "operator", "all"),
            SOME: ("watcher", "operator", "all"),
            KNOWN: ("watcher", "operator", "all"),
            ALL: ("all",),
        }[who]
        for kind in ("reader", "watcher", "operator", "all"):
            status = get(node, path, tokens[kind]).status
            shows_nothing = path == "/api/v1/groups" and kind == "reader"
            assert status == (200 if kind in allowed or shows_nothing else 403), (path, kind)
    assert len(texts) == 1


def test_probes_have_one_word_for_strangers(node: Http) -> None:
    for path in ("/healthz", "/readyz", "/readyz/loop"):
        assert node.ask(path).object == {"state": "ok"}


def test_lists_have_what_may_be_watched(node: Http, tokens: Tokens) -> None:
    found = {kind: get(node, "/api/v1/groups?sort=lag", tokens[kind]).object for kind in ("reader", "watcher", "all")}
    names = {kind: [group["name"] for group in page["groups"]] for kind, page in found.items()}
    assert names == {"reader": [], "watcher": ["billing"], "all": ["billing", "other"]}
    assert [page["total"] for page in found.values()] == [0, 1, 2]
    hidden = get(node, "/api/v1/group?subscription=$share/other/orders/%23", tokens["watcher"])
    nothing = get(node, "/api/v1/group?subscription=$share/othes/orders/%23", tokens["watcher"])
    assert (hidden.status, nothing.status) == (403, 403)
    assert hidden.body.replace(b"other", b"othes") == nothing.body


def test_acting_needs_operate(node: Http, tokens: Tokens, conn: Connection) -> None:
    for path, (body, who, _) in POSTS.items():
        for kind in ("none", "wrong", "expired", "revoked"):
            assert post(node, path, body, tokens[kind]).status == 401, (path, kind)
        for kind in ("reader", "watcher", *(("operator",) if who == ALL else ())):
            assert post(node, path, body, tokens[kind]).status == 403, (path, kind)
        elsewhere = {**body, "subscription": HIDDEN}
        if who != ALL:
            assert post(node, path, elsewhere, tokens["operator"]).status == 403, path
    for path, (body, who, status) in POSTS.items():
        kind = "all" if who == ALL else "operator"
        assert post(node, path, body, tokens[kind]).status == status, path
    assert post(node, "/api/v1/group/create", ON_GROUP, tokens["operator"]).status == 200
    found = conn.execute("select created_by from consumer_group where name = 'billing' and deleted_at is null")
    assert found.fetchall() == [("user:operator",)], "groups are counted by who had them created"


@pytest.mark.conforms("X4")
def test_actions_of_a_principal_are_bounded(node: Http, tokens: Tokens, conn: Connection) -> None:
    """Each has a connection of its own; others act meanwhile."""

    def pause(subscription: str, token: str) -> Answer:
        return post(node, "/api/v1/group/pause", {"subscription": subscription}, tokens[token])

    with ThreadPoolExecutor(6) as callers, conn.transaction():
        conn.execute("select from consumer_group where name = 'billing' for update")
        actions = [callers.submit(pause, GROUP, "operator") for _ in range(6)]
        for refused in islice(as_completed(actions), 2):
            assert refused.result().status == 503
            assert b"4 actions are under way of user:operator; the limit is 4" in refused.result().body
        assert pause(HIDDEN, "all").status == 200
    assert sorted(each.result().status for each in actions) == [200] * 4 + [503] * 2


def test_the_admin_token_is_not_used(shell: Shell, tokens: Tokens) -> None:
    """Of a node that asks who calls, which says so at its start."""
    shell.environment["SUBLET_ADMIN_TOKEN"] = "the-token-of-an-admin"
    process = shell.leader("administered", "--http", "127.0.0.1:0", "--auth", "required")
    assert "SUBLET_ADMIN_TOKEN ignored" in process.err
    node = Http.of(process)
    assert get(node, "/api/v1/groups", "the-token-of-an-admin").status == 401
    assert post(node, "/api/v1/group/pause", ON_GROUP, "the-token-of-an-admin").status == 401
    assert post(node, "/api/v1/group/pause", ON_GROUP, tokens["operator"]).status == 200


def test_the_audit_log_has_who_did_what(audited: Running, tokens: Tokens) -> None:
    node, reason = Http.of(audited), {**ON_GROUP, "reason": "the sink"}
    assert post(node, "/api/v1/group/pause", reason, tokens["operator"]).status == 200
    for _ in range(3):
        assert post(node, "/api/v1/group/pause", ON_GROUP, tokens["watcher"]).status == 403
    assert post(node, "/api/v1/group/pause", ON_GROUP, tokens["wrong"]).status == 401
    done, refused, unknown = audit_lines(audited)
    assert {name: done[name] for name in ("principal", "address", "action", "outcome")} == {
        "principal": "user:operator", "address": "127.0.0.1", "action": "group/pause", "outcome": "done (200)",
    }  # fmt: skip
    assert json.loads(done["object"]) == reason
    assert (refused["principal"], refused["outcome"]) == ("user:watcher", "refused")
    assert (unknown["principal"], unknown["object"]) == (None, "unknown caller")
    assert "SUBLET_ADMIN_TOKEN" not in audited.err, "there is none that would be ignored"
    assert not any(token in audited.err for token in tokens.values() if token is not None)


def test_a_caller_keeps_no_field_out_of_the_log(audited: Running, tokens: Tokens) -> None:
    """By what it writes before: the longest name that a group can have is there, and what is cut is the value alone."""
    group, node = "\N{LATIN SMALL LETTER U WITH DIAERESIS}" * MAX_GROUP_CHARACTERS, Http.of(audited)
    before: list[dict[str, Any]] = [
        {"reason": "x" * 250},
        {"reason": "\N{LATIN SMALL LETTER E WITH ACUTE}" * 250},
        {"streams": list(range(200)), "to": "x" * 250},
        {"x" * 400: 1},
    ]
    for fields in before:
        post(node, "/api/v1/group/pause", {**fields, "subscription": f"$share/{group}/orders/#"}, tokens["all"])
    body = {"streams": list(range(1, 200)), "to": "latest", **ON_GROUP}
    assert post(node, "/api/v1/group/reset", body, tokens["operator"]).status < 500
    *named, cut = eventually(lambda: lines if len(lines := audit_lines(audited)) == 5 else None, WAIT_S)
    assert [(line["principal"], group in line["object"]) for line in named] == [("user:all", True)] * 4
    shown = json.loads(cut["object"])
    assert shown == {**ON_GROUP, "streams": shown["streams"], "to": "latest"}
    assert shown["streams"].startswith("[1, 2, 3")


def test_the_audit_log_has_every_change_of_rights(shell: Shell, conn: Connection) -> None:
    """By the command line, or by SQL; those before the node was started are in the table alone."""
    made = shell.run("access", "token", "user:a").out.strip()
    process = shell.leader("audited", "--auth", "required")
    second = shell.run("access", "token", "user:a").out.strip()
    shell.run("access", "allow", "user:a", "read", "#")
    shell.run("access", "revoke-token", made[4:12])
    conn.execute("delete from access where principal = 'user:a'")
    process.says('"action": "revoke"')
    lines = audit_lines(process, '"action"')
    assert [(each["action"], each["object"], each["outcome"]) for each in lines] == [
        ("token", f"user:a {second[4:12]}", "done"),
        ("allow", "user:a read # *", "done"),
        ("revoke-token", f"user:a {made[4:12]}", "done"),
        ("revoke", "user:a read # *", "done"),
    ]
    assert all(each["principal"].startswith("database user ") for each in lines)
    assert second not in process.err
