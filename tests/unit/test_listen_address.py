"""Where a node may listen: on loopback freely, anywhere else only where an operator has said that it is insecure."""

from __future__ import annotations

import socket
from typing import Any

import pytest
from starlette.responses import PlainTextResponse

from sublet.cli.server.leader import AuthMode, is_auth_required, parse_addresses
from sublet_leader.http.server import UvicornThread
from sublet_leader.listen_address import ListenAddress, is_wildcard
from sublet_leader.server import compute_max_connections
from sublet_protocol.domain.errors import InvalidSetting

NAMES = {
    "one.test": ["127.0.0.1"],
    "both.test": ["127.0.0.1", "::1"],
    "scoped.test": ["::1%lo"],
    "lan.test": ["192.168.0.7"],
    "mixed.test": ["127.0.0.1", "192.168.0.7"],
    "mixed6.test": ["::1", "fe80::1%eth0"],
}
LOOPBACK = [
    ("127.0.0.1", 7411), ("127.0.0.1", 0), ("127.0.0.1", 65535), ("127.255.3.4", 1), ("::1", 7411),
    ("localhost", 7411), ("one.test", 1), ("both.test", 1), ("scoped.test", 1),
]  # fmt: skip
BEYOND = [
    ("0.0.0.0", 7411), ("0", 7411), ("::", 7411), ("10.0.0.5", 7411), ("128.0.0.1", 1), ("192.168.0.7", 0),
    ("8.8.8.8", 53), ("fe80::1", 1), ("2001:db8::1", 1), ("::ffff:10.0.0.5", 1), ("lan.test", 1), ("mixed.test", 1),
    ("mixed6.test", 1),
]  # fmt: skip
NO_ADDRESS = [
    "", ":", "7411", ":7411", "127.0.0.1", "127.0.0.1:", "127.0.0.1:-1", "127.0.0.1:+1", "127.0.0.1:http",
    "127.0.0.1:65536", "127.0.0.1:070000", "127.0.0.1:²", "127.0.0.1:٣", "127.0.0.1: 1", " 127.0.0.1:1",
    "127.0.0.1:1\n", "::1:7411", "[::1]", "[::1]7411", "[]:7411", "[::1:7411", "::1]:7411", "[[::1]]:7411",
    "http://127.0.0.1:7411", "unix:/tmp/x:1", "ipv4:127.0.0.1:7411", "dns:///0.0.0.0:1",
]  # fmt: skip


@pytest.fixture(autouse=True)
def _names(monkeypatch: pytest.MonkeyPatch) -> None:
    """A resolver of our own for the names of this page; numbers and localhost go to the system's."""
    real = socket.getaddrinfo

    def resolve(host: str, port: None, **kinds: Any) -> Any:
        if host not in NAMES:
            return real(host, port, **kinds)
        return [(socket.AF_UNSPEC, socket.SOCK_STREAM, 6, "", (address, 0)) for address in NAMES[host]]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)


def written(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


@pytest.mark.conforms("X2")
@pytest.mark.parametrize(("host", "port"), LOOPBACK)
def test_loopback_needs_no_leave(host: str, port: int) -> None:
    text = written(host, port)
    for insecure in (False, True):
        address = ListenAddress.parse(text, insecure=insecure)
        assert address == ListenAddress(host, port)
        assert str(address) == text


@pytest.mark.conforms("X2")
@pytest.mark.parametrize(("host", "port"), BEYOND)
def test_beyond_loopback_needs_tls_or_insecure(host: str, port: int) -> None:
    text = written(host, port)
    with pytest.raises(InvalidSetting) as refused:
        ListenAddress.parse(text, insecure=False)
    said = f"address {text!r} can be reached from other machines", "without TLS this node neither encrypts"
    for part in (*said, "--tls-cert", "127.0.0.1", "--insecure"):
        assert part in str(refused.value)
    assert ListenAddress.parse(text, insecure=True) == ListenAddress(host, port)
    assert ListenAddress.parse(text, insecure=False, has_tls=True) == ListenAddress(host, port)


@pytest.mark.conforms("X2")
@pytest.mark.parametrize("insecure", [False, True])
@pytest.mark.parametrize("text", NO_ADDRESS)
def test_what_is_no_address_is_refused(text: str, insecure: bool) -> None:
    with pytest.raises(InvalidSetting, match="give HOST:PORT, such as") as refused:
        ListenAddress.parse(text, insecure=insecure)
    assert repr(text) in str(refused.value)


@pytest.mark.conforms("X2")
@pytest.mark.parametrize("host", ["no-such-host.invalid", "*", "a" * 70, "a\0b", "..", "::1::2", "127.0.0.1%lo"])
def test_an_unknown_host_is_not_loopback(host: str) -> None:
    with pytest.raises(InvalidSetting, match="cannot be resolved") as refused:
        ListenAddress.parse(written(host, 1), insecure=False)
    assert repr(host) in str(refused.value)


@pytest.mark.parametrize(
    ("host", "expected"),
    [("0.0.0.0", True), ("::", True), ("0", True), ("127.0.0.1", False), ("::1", False), ("localhost", False)],
)
def test_a_wildcard_is_no_address_to_send_to(host: str, expected: bool) -> None:
    assert is_wildcard(host) is expected


def test_a_port_is_free_until_another_listens_there() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = ListenAddress("127.0.0.1", taken.getsockname()[1])
        assert not where.is_free()
        with pytest.raises(InvalidSetting, match=f"cannot listen for HTTP on {where}"):
            UvicornThread(where, PlainTextResponse("hello"))
    assert where.is_free()
    assert ListenAddress("127.0.0.1", 0).is_free()
    assert not ListenAddress("192.0.2.1", 0).is_free(), "not an address of this machine"
    assert not ListenAddress("no-such-host.invalid", 0).is_free()


@pytest.mark.parametrize("has_dualstack", [False, True])
def test_a_port_is_on_both_protocols_where_that_can_be(monkeypatch: pytest.MonkeyPatch, has_dualstack: bool) -> None:
    monkeypatch.setattr(socket, "has_dualstack_ipv6", lambda: has_dualstack)
    thread = UvicornThread(ListenAddress("::1", 0), PlainTextResponse("hello"))
    assert not thread.address.is_free()
    thread.close()


@pytest.mark.conforms("X2")
@pytest.mark.parametrize(
    ("listen", "http", "has_tls", "warned"),
    [
        ("127.0.0.1:0", "127.0.0.1:0", False, 0),
        ("0.0.0.0:1", None, False, 1),
        ("127.0.0.1:0", "0.0.0.0:1", False, 1),
        ("0.0.0.0:1", "0.0.0.0:2", True, 0),
    ],
)
def test_what_others_reach_in_the_clear_is_warned_of(
    caplog: pytest.LogCaptureFixture, listen: str, http: str | None, has_tls: bool, warned: int
) -> None:
    parse_addresses(listen, http, insecure=True, has_tls=has_tls)
    assert caplog.text.count("connections not encrypted: address=0.0.0.0:1") == warned
    assert len(caplog.records) == warned


@pytest.mark.conforms("X1", "X2")
@pytest.mark.parametrize(
    ("auth", "host", "has_tls", "insecure", "expected"),
    [
        (None, "127.0.0.1", False, False, False),
        (None, "127.0.0.1", True, False, True),
        (None, "0.0.0.0", True, False, True),
        (None, "0.0.0.0", False, True, False),
        (AuthMode.REQUIRED, "127.0.0.1", False, False, True),
        (AuthMode.OFF, "127.0.0.1", True, False, False),
        (AuthMode.OFF, "0.0.0.0", True, True, False),
    ],
)
def test_with_tls_callers_prove_who_they_are(
    auth: AuthMode | None, host: str, has_tls: bool, insecure: bool, expected: bool
) -> None:
    """Unless it is turned off, which others reach only with `--insecure`."""
    address = ListenAddress(host, 0)
    assert is_auth_required(auth, address, None, insecure=insecure, has_tls=has_tls) == expected


@pytest.mark.conforms("X2")
def test_a_node_that_others_reach_asks_who_calls() -> None:
    here, there = ListenAddress("127.0.0.1", 1), ListenAddress("0.0.0.0", 2)
    for listen, http in ((there, None), (here, there)):
        with pytest.raises(InvalidSetting, match=r"--auth off at 0\.0\.0\.0:2"):
            is_auth_required(AuthMode.OFF, listen, http, insecure=False, has_tls=True)


# ---  -----------------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("X4")
def test_connections_leave_files_for_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, expected in ((256, 128), (1024, 624), (-1, 1 << 20)):
        monkeypatch.setattr("resource.getrlimit", lambda _, most=most: (most, most))
        assert compute_max_connections() == expected
