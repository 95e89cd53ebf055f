"""Certificates for tests of TLS, and what a server shows of its own."""

from __future__ import annotations

import socket
import ssl
from datetime import UTC, datetime
from pathlib import Path

import trustme

HOST = "127.0.0.1"
PAST = datetime(2020, 1, 1, tzinfo=UTC), datetime(2020, 1, 2, tzinfo=UTC)


class Certificates:
    """An authority, and files of what it has signed."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir()
        self.directory, self.authority = directory, trustme.CA()
        self.ca = directory / "ca.crt"
        self.authority.cert_pem.write_to_path(self.ca)

    def write(self, name: str, *hosts: str, is_expired: bool = False) -> tuple[str, str]:
        """Paths of a certificate for these names and of its key."""
        before, after = PAST if is_expired else (None, None)
        issued = self.authority.issue_cert(*hosts, not_before=before, not_after=after)
        certificate, key = (self.directory / f"{name}.{ending}" for ending in ("crt", "key"))
        key.unlink(missing_ok=True)
        issued.private_key_pem.write_to_path(key)
        key.chmod(0o600)
        certificate.write_bytes(b"".join(each.bytes() for each in issued.cert_chain_pems))
        return str(certificate), str(key)


def shown(address: str) -> bytes | None:
    """The certificate that a server shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = address.partition("://")[2].rstrip("/").rpartition(":")
    with socket.create_connection((host, int(port)), 30) as plain, context.wrap_socket(plain) as encrypted:
        return encrypted.getpeercert(binary_form=True)
