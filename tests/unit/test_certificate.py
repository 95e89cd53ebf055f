"""The principal that a certificate names: of which kind of name, and what can be nobody's; files that are replaced."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import random
import socket
import ssl
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from sublet_protocol.domain.access.certificate import parse_expiry, parse_principal
from sublet_protocol.domain.errors import InvalidSetting, Unauthenticated
from sublet_protocol.domain.limits import MAX_CERTIFICATE_BYTES
from sublet_protocol.gate.gate import AccessGate
from sublet_protocol.tls.channel import explain_failure
from sublet_protocol.tls.files import ReloadedFiles, TlsFiles
from tests.integration.tls_kit import HOST, Certificates
from tests.kit import WAIT_S

Issue = Callable[..., bytes]

URI, DNS = x509.UniformResourceIdentifier, x509.DNSName
IP = x509.IPAddress(ipaddress.ip_address("10.0.0.5"))
MAIL = x509.RFC822Name("user:admin@example")
OWNER = 1000
LONG = "spiffe://example/" + "x" * 239


@pytest.fixture(scope="module")
def issue(tmp_path_factory: pytest.TempPathFactory) -> Issue:
    """Return a certificate with these names, in DER."""
    authority = Certificates(tmp_path_factory.mktemp("tls") / "ours")

    def issued(*alternatives: x509.GeneralName, common_names: Sequence[str] = (), until: Any = None) -> bytes:
        with warnings.catch_warnings(action="ignore"):  # a CN has at most 64 characters
            certificate, _ = authority.write_named("client", *alternatives, common_names=common_names, until=until)
        return ssl.PEM_cert_to_DER_cert(Path(certificate).read_text())

    return issued


@pytest.mark.parametrize(
    ("alternatives", "common_name", "principal"),
    [
        ((DNS("a.example"), URI("spiffe://a/b"), URI("spiffe://a/c"), IP), "user:a", "spiffe://a/b"),
        ((MAIL, DNS("a.example"), DNS("b.example")), "user:a", "a.example"),
        ((IP, MAIL), "user:a", "user:a"),
        ((), "user:a", "user:a"),
        ((), "a.example", "a.example"),
        ((), "user:m\u00fcller", "user:m\u00fcller"),
        ((URI("urn:uuid:1"),), "", "urn:uuid:1"),
        ((URI(LONG[:255]),), "", LONG[:255]),
    ],
)
def test_a_uri_goes_before_dns_names_and_the_cn(
    issue: Issue, alternatives: tuple[x509.GeneralName, ...], common_name: str, principal: str
) -> None:
    assert parse_principal(issue(*alternatives, common_names=[common_name] if common_name else [])) == principal


NOBODY: dict[str, tuple[tuple[x509.GeneralName, ...], tuple[str, ...], str]] = {
    "no name": ((), (), "no name that can be read"),
    "an address": ((IP,), (), "no name that can be read"),
    "two CNs": ((), ("user:a", "user:admin"), "nor one CN"),
    "a CN of any kind": ((), ("etl",), "the CN 'etl': a principal is user:NAME"),
    "anybody": ((), ("*",), "the CN '\\*'"),
    "a wildcard": ((DNS("*.example"),), ("user:a",), "the DNS name '\\*.example'"),
    "user: as URI": ((URI("user:admin"),), (), "the URI 'user:admin': a URI has a scheme, which is not user"),
    "USER: as URI": ((URI("USER:admin"),), (), "which is not user"),
    "user: as DNS name": ((DNS("user:admin"),), (), "a DNS name has no colon"),
    "a URI as DNS name": ((DNS("spiffe://a/b"),), (), "a DNS name has no colon"),
    "a URI as CN": ((), ("spiffe://a/b",), "a CN names a principal as user:NAME"),
    "a DNS name as URI": ((URI("a.example"),), (), "a URI has a scheme"),
    "NUL in a URI": ((URI("spiffe://a/b\0.other"),), (), r"'spiffe://a/b\\x00.other': .* printable"),
    "NUL in a DNS name": ((DNS("a.example\0.other"),), (), "printable"),
    "NUL in a CN": ((), ("user:admin\0.other",), "printable"),
    "a line's end": ((URI("spiffe://a/b\n"),), (), "printable"),
    "a turned text": ((), ("user:\u202enimda",), "printable"),
    "a blank": ((), ("user:a b",), "without blanks"),
    "a long name": ((URI(LONG),), (), "1 to 255"),
    "empty": ((URI(""), URI("spiffe://a/b")), ("user:a",), "1 to 255"),
    "a bad name before good ones": ((URI("etl"), DNS("a.example")), ("user:a",), "the URI 'etl'"),
}


@pytest.mark.parametrize("what", NOBODY)
def test_a_certificate_that_names_no_principal(issue: Issue, what: str) -> None:
    alternatives, common_names, reason = NOBODY[what]
    with pytest.raises(Unauthenticated, match=reason):
        parse_principal(issue(*alternatives, common_names=common_names))


@pytest.mark.parametrize("year", [1950, 1960, 1999, 2001, 2049, 2050, 2068, 9999])
def test_a_certificate_says_when_it_expires(issue: Issue, year: int) -> None:
    """In either form: with two digits of the year, and from 2050 on with four."""
    until = datetime(year, 12, 31, 23, 59, 58, tzinfo=UTC)
    assert parse_expiry(issue(DNS("a.example"), until=until)) == until.timestamp()


def test_who_shows_an_expired_certificate_is_refused(issue: Issue) -> None:
    gate = AccessGate(by_certificate=True)
    assert gate.identify(None, "", "Publish", issue(DNS("a.example"))).principal is None
    with pytest.raises(Unauthenticated, match="expired at 2001-12-31T00:00:00"):
        gate.identify(None, "", "Publish", issue(DNS("a.example"), until=datetime(2001, 12, 31, tzinfo=UTC)))


@pytest.mark.parametrize(
    "until", [b"\x17\x0c260101000000", b"\x17\x0d261301000000Z", b"\x18\x0d260101000000Z", b"\x17\0"]
)
def test_an_expiry_that_cannot_be_read_is_refused(issue: Issue, until: bytes) -> None:
    good = issue(DNS("a.example"), until=datetime(2026, 1, 1, tzinfo=UTC))
    written = b"\x17\x0d260101000000Z"
    assert written in good
    with pytest.raises(Unauthenticated, match="until when it is valid"):
        parse_expiry(good.replace(written, until))


@pytest.mark.conforms("X4")
def test_a_certificate_of_many_names_is_refused(issue: Issue) -> None:
    """Its name is read in each call: one of 100 kB took 0.03 s of a node's loop."""
    fitting = issue(*[IP] * ((MAX_CERTIFICATE_BYTES - 500) // 6), DNS("a.example"))
    assert MAX_CERTIFICATE_BYTES - 1_000 < len(fitting) <= MAX_CERTIFICATE_BYTES
    assert parse_principal(padded(fitting, MAX_CERTIFICATE_BYTES)) == "a.example"
    with pytest.raises(Unauthenticated, match=f"the limit is {MAX_CERTIFICATE_BYTES}"):
        parse_principal(padded(fitting, MAX_CERTIFICATE_BYTES + 1))


def padded(certificate: bytes, size: int) -> bytes:
    """Return the certificate with so many bytes, the last of which say nothing."""
    content = certificate[4:]
    missing = size - 8 - len(content)
    content += b"\x04\x82" + missing.to_bytes(2) + bytes(missing)
    return b"\x30\x82" + len(content).to_bytes(2) + content


def test_bytes_that_are_no_certificate_name_nobody(issue: Issue) -> None:
    good, drawn = issue(DNS("a.example"), common_names=["user:a"]), random.Random(4)
    for end in range(len(good)):
        for parse in (parse_principal, parse_expiry):
            with pytest.raises(Unauthenticated):
                parse(good[:end])
    for _ in range(20_000):
        changed = bytearray(good)
        for _ in range(drawn.randint(1, 4)):
            changed[drawn.randrange(len(good))] = drawn.randrange(256)
        for parse in (parse_principal, parse_expiry):
            with contextlib.suppress(Unauthenticated):
                parse(bytes(changed))


def test_names_are_there_once_and_in_a_sequence() -> None:
    """Else another reader of the certificate may find another name."""

    def der(tag: int, *parts: bytes) -> bytes:
        content = b"".join(parts)
        return bytes((tag, len(content))) + content

    def certify(*names: bytes, tag: int = 0x30) -> bytes:
        extensions = (der(0x30, der(0x06, b"\x55\x1d\x11"), der(0x04, der(tag, each))) for each in names)
        return der(0x30, der(0x30, *[der(0x30)] * 6, der(0xA3, der(0x30, *extensions))))

    one, other = der(0x82, b"a.example"), der(0x82, b"b.example")
    assert parse_principal(certify(one)) == "a.example"
    for bad in (certify(one, other), certify(one, tag=0x31)):
        with pytest.raises(Unauthenticated, match="no name that can be read"):
            parse_principal(bad)


def test_a_certificate_needs_its_key(tmp_path: Path) -> None:
    certificate, key = Certificates(tmp_path / "ours").write("node", HOST)
    assert TlsFiles.of_server(None, None) is None
    assert TlsFiles.of_server(certificate, key) == TlsFiles(certificate, key)
    for one, other, authority in ((certificate, None, None), (None, key, None), (None, None, certificate)):
        with pytest.raises(InvalidSetting, match="one of them is missing"):
            TlsFiles.of_server(one, other, authority)
    for name in ("SUBLET_TLS_CERT", "SUBLET_TLS_KEY"):
        with pytest.raises(InvalidSetting, match="only one is set"):
            TlsFiles.of_client({name: certificate})


@pytest.mark.parametrize(
    ("owner", "mode", "is_taken"),
    [
        *((OWNER, mode, mode == 0o600) for mode in (0o600, 0o640, 0o604, 0o660)),
        *((0, mode, mode in (0o600, 0o640)) for mode in (0o600, 0o640, 0o604, 0o660)),
        *((OWNER + 1, mode, False) for mode in (0o600, 0o640)),
    ],
)
def test_a_key_is_its_users_or_roots(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, mode: int, is_taken: bool
) -> None:
    files, real = TlsFiles(*Certificates(tmp_path / "ours").write("node", HOST)), os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        status = list(real(path, **options))
        return os.stat_result([0o100000 | mode, *status[1:4], owner, *status[5:]] if path == files.key else status)

    monkeypatch.setattr(os, "geteuid", lambda: OWNER)
    monkeypatch.setattr(os, "stat", stat)
    if is_taken:
        assert files.read().key
    else:
        with pytest.raises(InvalidSetting, match=f"has the mode {mode:o}, or another owner"):
            files.read()


def test_files_are_read_again_when_they_change(tmp_path: Path) -> None:
    authority = Certificates(tmp_path / "ours")
    files = ReloadedFiles(TlsFiles(*authority.write("node", HOST), None))
    assert not files.reload()
    authority.write("node", HOST)
    assert (files.reload(), files.reload()) == (True, False)


@pytest.mark.parametrize("details", ["failed to connect: refused", "failed to connect: timed out", "it is draining"])
@pytest.mark.parametrize("address", ["tls://127.0.0.1:1", "127.0.0.1:1"])
def test_what_is_no_fault_of_tls_is_not_looked_into(
    monkeypatch: pytest.MonkeyPatch, address: str, details: str
) -> None:
    """Without a connection, which would take its time."""

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("socket.create_connection", never)
    assert explain_failure(address, details) is None


@pytest.mark.parametrize(
    ("greeted", "needs_certificate", "problem"),
    [
        ([False, True], False, None),
        ([False, False], False, "it closes the connection after the handshake"),
        ([False, False], True, "it closes the connection after the handshake"),
    ],
    ids=["let in at the second time", "never let in", "let in with a certificate"],
)
def test_who_is_not_let_in_tries_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greeted: list[bool], needs_certificate: bool, problem: str | None
) -> None:
    authority = Certificates(tmp_path / "ours")
    monkeypatch.setenv("SUBLET_TLS_CA", str(authority.ca))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority.ca)
    context.load_cert_chain(*authority.write("node", HOST))
    context.verify_mode = ssl.CERT_REQUIRED if needs_certificate else ssl.CERT_NONE

    def serve(listener: socket.socket) -> None:
        for is_let_in in greeted:
            with (
                contextlib.suppress(OSError),
                listener.accept()[0] as plain,
                context.wrap_socket(plain, server_side=True) as encrypted,
            ):
                encrypted.sendall(b"hello" * is_let_in)

    with socket.create_server((HOST, 0)) as listener, ThreadPoolExecutor(1) as executor:
        served = executor.submit(serve, listener)
        found = explain_failure(f"tls://{HOST}:{listener.getsockname()[1]}", "failed to connect: no reason")
        listener.shutdown(socket.SHUT_RDWR)  # it may wait for a second time
        served.result(WAIT_S)
    assert found is None if problem is None else problem in str(found)
