"""A client's certificate counts until it expires or its authority is removed, also in a resumed session."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cryptography import x509

from sublet import Feed, Session
from sublet_protocol.domain.access.rights import Right
from sublet_storage.db.connect import connect
from tests.integration.access_kit import allow, rule
from tests.integration.cli_kit import Running, Shell
from tests.integration.log_kit import Connection
from tests.integration.test_gate_rpcs import METHODS, REQUESTS, refusal, refused_code
from tests.integration.test_tls import consumed, http_address
from tests.integration.tls_kit import HOST, Certificates
from tests.kit import WAIT_S, eventually

pytestmark = pytest.mark.conforms("X1")

ETL = "spiffe://example/etl"
NAME = x509.UniformResourceIdentifier(ETL)
VALID_S = 10
"""In which the first calls are made, and which is then waited for."""
REQUEST = f"GET /api/v1/groups HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode()


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with connect(database) as connection:
        for right in Right:
            allow(connection, rule(ETL, right, "#"))
        yield connection


@pytest.fixture
def clients(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path / "clients")


@pytest.fixture(params=["required", "off"])
def node(shell: Shell, trusted: Certificates, clients: Certificates, conn: Connection, request: Any) -> Running:
    """It asks for a certificate, on both ports, also where it authenticates nobody."""
    certificate, key = trusted.write("node", HOST)
    tls = ("--tls-cert", certificate, "--tls-key", key, "--tls-client-ca", str(clients.ca))
    return shell.leader("n1", *tls, "--http", f"{HOST}:0", "--auth", request.param)


def ask(node: Running, context: ssl.SSLContext, session: ssl.SSLSession | None = None) -> tuple[bool, bytes, Any]:
    """Return whether the session was resumed, the status of an answer over HTTP (empty: there is none), and the session
    of TLS that it was made in.
    """
    host, _, port = http_address(node).removeprefix("https://").rstrip("/").rpartition(":")
    with (
        socket.create_connection((host, int(port)), 30) as plain,
        context.wrap_socket(plain, server_hostname=HOST, session=session) as encrypted,
    ):
        encrypted.sendall(REQUEST)
        answer = b""
        while (more := encrypted.recv(65536)) != b"":
            answer += more
        return bool(encrypted.session_reused), answer[9:12], encrypted.session


@pytest.mark.parametrize("node", ["required"], indirect=True)
@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_http_resumes_no_session(
    node: Running, trusted: Certificates, clients: Certificates, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """Neither by a ticket nor by its id: a client's authority may have been removed since."""
    context = trusted.context(clients.write_named("etl", NAME))
    context.maximum_version = version
    _, status, session = ask(node, context)
    assert status == b"200"
    assert ask(node, context, session)[:2] == (False, b"200")
    Certificates(tmp_path / "others").authority.cert_pem.write_to_path(clients.ca)
    for each in (None, session):
        with contextlib.suppress(ssl.SSLError, ConnectionError):
            assert ask(node, context, each)[1] == b"", "no answer"


def test_an_expired_certificate_counts_no_more(
    node: Running, trusted: Certificates, clients: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over a connection that was made with it; a client whose files have another one by then goes on with that."""
    until = datetime.now(UTC) + timedelta(seconds=VALID_S)
    files = clients.write_named("etl", NAME, until=until)
    for name, value in zip(("CERT", "KEY"), files, strict=True):
        monkeypatch.setenv(f"SUBLET_TLS_{name}", value)
    history = next((name, method) for name, method in METHODS if method.name == "History")
    with (
        trusted.channel(node.address, files) as channel,
        Feed(node.address) as feed,
        feed.follow("t/#", "earliest") as reader,
        Session(
            "$share/g/t/#", nodes=[node.address], transport="nodes", starting_position="earliest", name="s"
        ) as session,
    ):
        feed.publish("t/1", b"before").result()
        assert consumed(session, 1) == [b"before"]
        assert reader.read(60) is not None
        grpc.channel_ready_future(channel).result(60)
        clients.write_named("etl", NAME)
        eventually(lambda: refused_code(channel, None) is grpc.StatusCode.UNAUTHENTICATED, WAIT_S)
        code, text = refusal(channel, *history, REQUESTS["History"]("t/#"), None)
        assert (code, "certificate expired at" in text) == (grpc.StatusCode.UNAUTHENTICATED, True), text
        feed.publish("t/1", b"after").result()
        assert consumed(session, 1) == [b"after"]
        assert reader.read(60) is not None
