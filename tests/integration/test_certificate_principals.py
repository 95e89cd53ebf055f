"""Nodes that ask for client certificates: its name is the principal, over gRPC and HTTP, and no token is needed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import psycopg
import pytest
from cryptography import x509

from sublet import Feed, Session
from sublet_protocol.domain.access.rights import Right
from sublet_protocol.domain.errors import PermissionDenied, SubscriptionEnded, Unauthenticated
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin.admin import create_group
from sublet_storage.groups.model.records import GroupOptions
from tests.integration.access_kit import allow, revoke, rule, token_of
from tests.integration.cli_kit import Running, Shell
from tests.integration.http_kit import Http
from tests.integration.test_auth_sessions import open_and_poll, poll_to_the_end, publish
from tests.integration.test_gate_http import GETS, KNOWN, OPEN, POSTS, get, post
from tests.integration.test_gate_rpcs import METHODS, REQUESTS, answers_all, call, denies_all, refusal
from tests.integration.test_request_bounds import refusal as refusal_of_bytes
from tests.integration.test_tls import consumed, http_address
from tests.integration.tls_kit import HOST, Certificates

pytestmark = pytest.mark.conforms("X1")

GROUP = "$share/billing/orders/#"
ETL, OTHER, DNS = "spiffe://example/etl", "spiffe://example/other", "etl.example"
JOIN = rule(ETL, Right.JOIN, "orders/#", "billing")
HISTORY = next((name, method) for name, method in METHODS if method.name == "History")

Files = tuple[str, str]


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(database) as connection:
        yield connection


@pytest.fixture
def clients(trusted: Certificates, tmp_path: Path) -> dict[str, Files | None]:
    """The files of one of each kind."""
    uri = x509.UniformResourceIdentifier
    foreign = Certificates(tmp_path / "foreign")
    return {
        "none": None,
        "another CA": foreign.write_named("etl", uri(ETL)),
        "nameless": trusted.write_named("nameless", common_names=["etl"]),
        "NUL": trusted.write_named("nul", uri(f"{ETL}\0.other")),
        "other": trusted.write_named("other", uri(OTHER)),
        "etl": trusted.write_named("etl", uri(ETL), x509.DNSName("x.example"), common_names=["user:x"]),
        "dns": trusted.write_named("dns", x509.DNSName(DNS), common_names=["user:x"]),
        "cn": trusted.write_named("cn", common_names=["user:cn"]),
    }


@pytest.fixture
def node(shell: Shell, trusted: Certificates, database: str, conn: psycopg.Connection[Any]) -> Running:
    """It asks for a certificate, on both ports. The rules are there before it starts."""
    create_group(database, Subscription.parse(GROUP), GroupOptions())
    for right in Right:
        allow(conn, rule(ETL, right, "orders/#", *(("billing",) if right.is_on_groups else ())))
        allow(conn, rule(OTHER, right, "bills/#"))
    certificate, key = trusted.write("node", HOST)
    tls = ("--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", str(trusted.ca))
    return shell.leader("n1", *tls, "--http", f"{HOST}:0")


@pytest.fixture
def shows(monkeypatch: pytest.MonkeyPatch, clients: dict[str, Files | None]) -> Any:
    """Has clients of this process show a certificate."""

    def shown(kind: str) -> None:
        for name, value in zip(("CERT", "KEY"), clients[kind] or ("", ""), strict=True):
            monkeypatch.setenv(f"SUBLET_TLS_{name}", value)

    monkeypatch.delenv("SUBLET_TOKEN", raising=False)
    return shown


def test_every_rpc_asks_whose_certificate_it_is(
    node: Running, trusted: Certificates, clients: dict[str, Files | None], conn: psycopg.Connection[Any]
) -> None:
    for kind in ("none", "another CA"):
        with trusted.channel(node.address, clients[kind]) as channel:
            for name, method in METHODS:
                code, _ = refusal(channel, name, method, REQUESTS[method.name]("orders/#"), None)
                assert code is grpc.StatusCode.UNAVAILABLE, (name, kind)
    for kind, shown in (("nameless", "CN 'etl'"), ("NUL", f"URI '{ETL}\\x00.other'")):
        with trusted.channel(node.address, clients[kind]) as channel:
            for name, method in METHODS:
                code, text = refusal(channel, name, method, REQUESTS[method.name]("orders/#"), None)
                assert (code, shown in text) == (grpc.StatusCode.UNAUTHENTICATED, True), (name, text)
                code, _ = refusal_of_bytes(channel, name, b"\xff")
                assert code is grpc.StatusCode.UNAUTHENTICATED, "before it is parsed"
    with trusted.channel(node.address, clients["other"]) as channel:
        denies_all(channel, OTHER)
    with trusted.channel(node.address, clients["etl"]) as channel:
        answers_all(channel)
    found = conn.execute("select distinct producer_id from producer where producer_id like 'feed/%'").fetchall()
    assert found == [("feed/spiffe:%2F%2Fexample%2Fetl/p",)]


def test_a_token_is_not_looked_at(
    node: Running, trusted: Certificates, clients: dict[str, Files | None], conn: psycopg.Connection[Any]
) -> None:
    """Neither one that counts, nor what is none."""
    token = token_of(conn, ETL)
    with trusted.channel(node.address, clients["other"]) as channel:
        denies_all(channel, OTHER, token)
    with trusted.channel(node.address, clients["nameless"]) as channel:
        code, _ = refusal(channel, *HISTORY, REQUESTS["History"]("orders/#"), token)
        assert code is grpc.StatusCode.UNAUTHENTICATED
    with trusted.channel(node.address, clients["etl"]) as channel:
        call(channel, *HISTORY, REQUESTS["History"]("orders/#"), "nonsense")
    with trusted.channel(node.address, clients["none"]) as channel:
        code, _ = refusal(channel, *HISTORY, REQUESTS["History"]("orders/#"), token)
        assert code is grpc.StatusCode.UNAVAILABLE
    url = http_address(node).removeprefix("https://").rstrip("/")
    assert get(Http(url, trusted.context(clients["other"])), "/api/v1/nodes", token_of(conn, ETL)).status == 403


def test_a_uri_goes_before_a_dns_name_and_the_cn(
    node: Running, trusted: Certificates, clients: dict[str, Files | None]
) -> None:
    """On both ports."""
    url = http_address(node).removeprefix("https://").rstrip("/")
    for kind, principal in (("etl", ETL), ("dns", DNS), ("cn", "user:cn")):
        with trusted.channel(node.address, clients[kind]) as channel:
            code, text = refusal(channel, *HISTORY, REQUESTS["History"]("nothing/#"), None)
        assert (code, text.split()[0]) == (grpc.StatusCode.PERMISSION_DENIED, principal)
        answer = get(Http(url, trusted.context(clients[kind])), "/metrics", None)
        assert (answer.status, answer.object["error"].split()[0]) == (403, principal)


def test_http_asks_whose_certificate_it_is(
    node: Running, trusted: Certificates, clients: dict[str, Files | None], conn: psycopg.Connection[Any]
) -> None:
    url = http_address(node).removeprefix("https://").rstrip("/")
    at = {kind: Http(url, trusted.context(files)) for kind, files in clients.items()}
    for path, who in GETS.values():
        for kind in ("none", "another CA"):
            with pytest.raises(AssertionError, match="does not answer"):
                get(at[kind], path, None)
        for kind in ("nameless", "NUL"):
            assert get(at[kind], path, None).status == (200 if who == OPEN else 401), (path, kind)
        if who == KNOWN:
            assert get(at["etl"], path, None).status == 200, path
            if path != "/api/v1/groups":
                assert get(at["other"], path, None).status == 403, path
    assert [each["name"] for each in get(at["etl"], "/api/v1/groups", None).object["groups"]] == ["billing"]
    assert get(at["other"], "/api/v1/groups", None).object["groups"] == []
    for path, (body, who, status) in POSTS.items():
        with pytest.raises(AssertionError, match="does not answer"):
            post(at["none"], path, body, None)
        assert post(at["nameless"], path, body, None).status == 401, path
        assert post(at["other"], path, body, None).status == 403, path
        if who == KNOWN:
            from_a_form = at["etl"].ask(path, "POST", {"Content-Type": "text/plain"}, json.dumps(body).encode())
            assert from_a_form.status == 400, "as a browser sends it for another site's page, with its certificate"
            assert post(at["etl"], path, body, None).status == status, path
    node.says('"action": "group/delete"')
    lines = [json.loads(line[line.index("{") :]) for line in node.err.splitlines() if '"principal"' in line]
    assert {each["principal"] for each in lines if each["outcome"] == "done (200)"} == {ETL}
    assert {each["principal"] for each in lines if each["outcome"] == "refused"} == {None, OTHER}


@pytest.mark.parametrize("transport", ["database", "nodes"])
def test_a_session_consumes_under_its_certificate(
    node: Running, database: str, conn: psycopg.Connection[Any], shows: Any, transport: str
) -> None:
    """Until its right is revoked, which ends it. Its name is its principal's."""
    for each in (rule(OTHER, Right.JOIN, "orders/#", "billing"), rule(ETL, Right.JOIN, "bills/#")):
        allow(conn, each)
    publish(database, 100)
    shows("etl")
    where: dict[str, Any] = {"nodes": [node.address]} if transport == "nodes" else {"url": database}
    through = {"transport": transport, **where}
    with Session(GROUP, **through, name="etl", starting_position="earliest") as session:
        assert sorted(consumed(session, 100), key=int) == [b"%d" % number for number in range(100)]
        owned = conn.execute("select session, principal from session_epoch").fetchall()
        assert owned == [("etl", ETL)]
        shows("other")
        with pytest.raises((PermissionDenied, SubscriptionEnded), match=r"'etl' of .* is another principal's"):
            open_and_poll(through)
        shows("etl")
        assert session.poll(0) is None
        revoke(conn, JOIN)
        why = poll_to_the_end(session)
        assert "denied" in why
        assert f"{ETL} has no right to join" in why


def test_clients_need_no_token(
    node: Running, shell: Shell, database: str, clients: dict[str, Files | None], shows: Any, trusted: Certificates
) -> None:
    """A feed and the command line."""
    shows("etl")
    with Feed(node.address) as feed:
        feed.publish("orders/eu", b"1").result()
        with feed.follow("orders/#", "earliest") as reader:
            assert reader.read(60) is not None
    shows("nameless")
    with pytest.raises(Unauthenticated, match="certificate has the CN 'etl'"), Feed(node.address) as feed:
        feed.publish("orders/eu", b"1").result()
    certificate, key = clients["etl"] or ("", "")
    shell.environment |= {"SUBLET_TLS_CA": str(trusted.ca), "SUBLET_TLS_CERT": certificate, "SUBLET_TLS_KEY": key}
    del shell.environment["SUBLET_DATABASE_URL"]
    answer = shell.run("consume", GROUP, "--node", node.address, "--from", "earliest", "--max-messages", "1")
    assert answer.code == 0, answer.err


def test_access_check_knows_names_of_certificates(shell: Shell, conn: psycopg.Connection[Any]) -> None:
    for principal in (ETL, DNS):
        asked = (principal, "join", "orders/#", "--group", "billing")
        assert shell.run("access", "check", *asked).code == 1
        assert shell.run("access", "allow", *asked).code == 0
        answer = shell.run("access", "check", *asked)
        assert (answer.code, f"yes: {principal} join orders/# --group billing" in answer.out) == (0, True)
        shell.run("access", "revoke", *asked)
        assert shell.run("access", "check", *asked).code == 1
    answer = shell.run("access", "allow", "etl", "join", "#")
    assert (answer.code, "the URI or DNS name of a certificate" in answer.err) == (2, True)
