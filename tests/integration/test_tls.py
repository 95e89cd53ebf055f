"""TLS between real nodes and real clients: what is refused, by what name, and how certificates are replaced."""

from __future__ import annotations

import os
import socket
import ssl
import warnings
from pathlib import Path
from urllib.request import urlopen

import pytest

from sublet import Feed, Publisher, Session
from sublet_protocol.domain.errors import InvalidSetting, SubscriptionEnded, TlsFailed
from sublet_protocol.tls import channel
from sublet_storage.db.connect import connect
from sublet_storage.node_directory import NodeIncarnation, list_live_nodes, register
from tests.integration.cli_kit import Running, Shell, refused
from tests.integration.tls_kit import HOST, Certificates, shown
from tests.kit import eventually

SUBSCRIPTION = "$share/g/t/#"


def tls_node(shell: Shell, files: tuple[str, str], *arguments: str, name: str = "n1") -> Running:
    return shell.leader(name, "--tls-cert", files[0], "--tls-key", files[1], "--auth", "off", *arguments)


def publish(database: str, *values: bytes) -> None:
    with Publisher(database) as publisher:
        for value in values:
            publisher.publish("t/1", value)


def consumed(session: Session, count: int) -> list[bytes]:
    found: list[bytes] = []
    while len(found) < count:
        batch = session.poll(60)
        assert batch is not None
        found += batch.table.column("value").to_pylist()
        batch.ack()
    return found


def test_sessions_find_nodes_with_tls(shell: Shell, database: str, trusted: Certificates) -> None:
    node = tls_node(shell, trusted.write("node", HOST))
    with connect(database) as connection:
        (found,) = list_live_nodes(connection)
    assert found.address == node.address
    publish(database, b"1", b"2")
    with Session(SUBSCRIPTION, database, starting_position="earliest") as session:
        assert sorted(consumed(session, 2)) == [b"1", b"2"]
        assert list(session.connections) == [found.address]
    publish(database, b"3")
    with Session(SUBSCRIPTION, nodes=[found.address], transport="nodes") as session:
        assert consumed(session, 1) == [b"3"]
    with Feed([found.address]) as feed:
        assert feed.history("t/#").read() is not None


def test_a_client_certificate_lets_in(
    shell: Shell, database: str, trusted: Certificates, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = tls_node(shell, trusted.write("node", HOST), "--tls-client-ca", str(trusted.ca))
    address = node.address
    publish(database, b"1")
    certificate, key = trusted.write("client", "client.example")
    monkeypatch.setenv("SUBLET_TLS_CERT", certificate)
    with pytest.raises(InvalidSetting, match="only one is set"), Feed([address]) as feed:
        feed.history("t/#")
    monkeypatch.setenv("SUBLET_TLS_KEY", key)
    with Session(SUBSCRIPTION, database, starting_position="earliest") as session:
        assert consumed(session, 1) == [b"1"]


def mistaken(mistake: str, shell: Shell, ours: Certificates, other: Certificates) -> str:
    """Return the address of a node with which that is wrong."""
    if mistake == "plain node":
        return f"tls://{shell.leader('n1').address}"
    files = (other if mistake == "wrong authority" else ours).write(
        "node", "other.example" if mistake == "wrong host" else HOST, is_expired=mistake == "expired"
    )
    asks = ("--tls-client-ca", str(ours.ca)) if mistake == "no client certificate" else ()
    address = tls_node(shell, files, *asks).address
    return address.removeprefix("tls://") if mistake == "plain client" else address


MISTAKES = {
    "wrong authority": "unable to get local issuer",
    "expired": "certificate has expired",
    "wrong host": "certificate is not valid for '127.0.0.1'",
    "no client certificate": "asks for a client's certificate",
    "plain client": "it speaks TLS, and was asked without. Write its address as tls://",
    "plain node": "it does not speak TLS",
}


@pytest.mark.parametrize(("mistake", "reason"), MISTAKES.items(), ids=MISTAKES)
def test_what_hinders_tls_is_named(
    shell: Shell, trusted: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mistake: str, reason: str
) -> None:
    address = mistaken(mistake, shell, trusted, Certificates(tmp_path / "other"))
    tried: list[str] = []
    explain = channel.explain_failure

    def counting(address: str, details: str) -> str | None:
        tried.append(details)
        return explain(address, details)

    for module in ("sublet_protocol.pubsub.node_connection", "sublet_borrower.node_client.node_calls"):
        monkeypatch.setattr(f"{module}.explain_failure", counting)
    with pytest.raises(TlsFailed, match=reason), Feed([address]) as feed:
        feed.history("t/#")
    with pytest.raises(TlsFailed, match=reason):
        Session(SUBSCRIPTION, nodes=[address], transport="nodes").close()
    database = shell.environment["SUBLET_DATABASE_URL"]
    with pytest.raises(SubscriptionEnded, match=reason), Session(SUBSCRIPTION, database, nodes=[address]) as session:
        consumed(session, 1)
    assert 3 <= len(tried) <= 6, "nobody tries again and again"


def test_a_tls_session_goes_to_no_plain_leader(shell: Shell, database: str, trusted: Certificates) -> None:
    shell.leader("n1")
    publish(database, b"1")
    with Session(SUBSCRIPTION, database, starting_position="earliest") as session:
        consumed(session, 1)
        asked = tls_node(shell, trusted.write("node", HOST), name="n2")
        other = Session(SUBSCRIPTION, database, nodes=[asked.address])
        with pytest.raises(SubscriptionEnded, match=r"a node with TLS names 127.0.0.1:.* which has none"), other:
            consumed(other, 1)


def http_address(node: Running) -> str:
    node.says("answers at https://")
    return node.err.partition("answers at ")[2].split()[0]


def test_a_bad_certificate_leaves_the_one_before(shell: Shell, trusted: Certificates) -> None:
    """At both ports. That no call is lost when one is replaced is tested in test_rotation.py."""
    node = tls_node(shell, trusted.write("node", HOST), "--http", f"{HOST}:0")
    places = node.address, http_address(node)
    first = [shown(place) for place in places]
    trusted.write("node", HOST)
    for place, before in zip(places, first, strict=True):
        eventually(lambda place=place, before=before: shown(place) != before, 60)  # type: ignore[misc]
    second = [shown(place) for place in places]
    Path(trusted.directory / "node.crt").write_text("no certificate")
    assert [shown(place) for place in places] == second
    node.says("certificate invalid, previous one used: ")


def test_http_speaks_tls_1_2_and_later(shell: Shell, trusted: Certificates) -> None:
    node = tls_node(shell, trusted.write("node", HOST), "--http", f"{HOST}:0")
    url = http_address(node)
    context = ssl.create_default_context(cafile=str(trusted.ca))
    with urlopen(f"{url}readyz", context=context, timeout=60) as answer:
        assert answer.status == 200
    for port in (node.address, url):
        host, _, number = port.partition("://")[2].rstrip("/").rpartition(":")
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        with warnings.catch_warnings(action="ignore"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with socket.create_connection((host, int(number)), 60) as plain, pytest.raises(ssl.SSLError):
            old.wrap_socket(plain)
    with socket.create_connection((host, int(number)), 60) as silent:
        assert silent.recv(1) == b"", "who says nothing is let go in the time of a request's head"


def test_http_asks_for_a_client_certificate(shell: Shell, trusted: Certificates) -> None:
    node = tls_node(shell, trusted.write("node", HOST), "--http", f"{HOST}:0", "--tls-client-ca", str(trusted.ca))
    url = http_address(node)
    context = ssl.create_default_context(cafile=str(trusted.ca))
    with pytest.raises(OSError, match=r"CERTIFICATE|reset|closed|EOF"):
        urlopen(f"{url}readyz", context=context, timeout=60).close()
    context.load_cert_chain(*trusted.write("client", "client.example"))
    with urlopen(f"{url}readyz", context=context, timeout=60) as answer:
        assert answer.status == 200


@pytest.mark.conforms("X2")
def test_a_node_with_tls_listens_beyond_loopback(shell: Shell, ours: Certificates) -> None:
    files = ours.write("node", HOST)
    node = shell.start("leader", "--name", "n1", "--listen", "0.0.0.0:0", "--tls-cert", files[0], "--tls-key", files[1])
    node.says("serves on tls://0.0.0.0:")
    open_to_all = ("leader", "--listen", "0.0.0.0:0", "--tls-cert", files[0], "--tls-key", files[1], "--auth", "off")
    refused(shell.run(*open_to_all), 2, "--auth off at 0.0.0.0:0", "sublet access")
    refused(shell.run("leader", "--listen", f"{HOST}:0", "--http", "0.0.0.0:0"), 2, "address '0.0.0.0:0'", "--tls-cert")


@pytest.mark.conforms("X2")
def test_an_insecure_node_is_warned_of(shell: Shell, database: str) -> None:
    node = shell.start("leader", "--name", "n1", "--listen", "0.0.0.0:0", "--insecure")
    node.says("connections not encrypted: address=0.0.0.0:")
    node.says("serves on")
    assert "others reach without TLS: n1 (0.0.0.0:" in shell.run("doctor").out
    with connect(database) as connection:
        register(connection, NodeIncarnation("n2", "n2-1", "tls://10.0.0.5:7411"), 60.0, 1)
        assert "n2 (tls" not in shell.run("doctor").out


def test_files_that_cannot_be_used_are_named(shell: Shell, ours: Certificates, tmp_path: Path) -> None:
    certificate, key = ours.write("node", HOST)
    _, other_key = ours.write("other", HOST)

    def answer(*arguments: str, reported: str) -> None:
        refused(shell.run("leader", "--name", "n1", "--listen", f"{HOST}:0", *arguments), 2, reported)

    answer("--tls-cert", certificate, reported="one of them is missing")
    answer("--tls-client-ca", str(ours.ca), reported="one of them is missing")
    answer("--tls-cert", certificate, "--tls-key", other_key, reported="KEY_VALUES_MISMATCH")
    answer("--tls-cert", certificate, "--tls-key", str(tmp_path / "none"), reported="none: it cannot be read")
    answer("--tls-cert", key, "--tls-key", key, reported=f"certificate {key} with key {key}")
    os.chmod(key, 0o640)
    if os.geteuid() != 0:
        answer("--tls-cert", certificate, "--tls-key", key, reported=f"key {key} has the mode 640")
    os.chmod(key, 0o604)
    answer("--tls-cert", certificate, "--tls-key", key, reported=f"key {key} has the mode 604")
