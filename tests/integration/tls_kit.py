"""Certificates for tests of TLS, and what a server shows of its own."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

import grpc
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

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
        chain = b"".join(each.bytes() for each in issued.cert_chain_pems)
        return self._store(name, chain, issued.private_key_pem.bytes())

    def write_named(
        self,
        name: str,
        *alternatives: x509.GeneralName,
        common_names: Sequence[str] = (),
        until: datetime | None = None,
    ) -> tuple[str, str]:
        """The same, of a client's: with these subject alternative names, and with these CNs. Nothing is checked.
        `until`: when it expires; None: in a day."""
        signer = serialization.load_pem_private_key(self.authority.private_key_pem.bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
        made = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, each) for each in common_names]))
            .issuer_name(x509.load_pem_x509_certificate(self.authority.cert_pem.bytes()).subject)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(min(now, until or now) - timedelta(days=1))
            .not_valid_after(until or now + timedelta(days=1))
        )
        if alternatives:
            made = made.add_extension(x509.SubjectAlternativeName(alternatives), critical=not common_names)
        form = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        private = key.private_bytes(serialization.Encoding.PEM, *form)
        return self._store(name, made.sign(signer, hashes.SHA256()).public_bytes(serialization.Encoding.PEM), private)

    def context(self, files: tuple[str, str] | None) -> ssl.SSLContext:
        """Return an SSL context that trusts the authority, and has this certificate."""
        made = ssl.create_default_context(cafile=str(self.ca))
        if files is not None:
            made.load_cert_chain(*files)
        return made

    def channel(self, address: str, files: tuple[str, str] | None) -> grpc.Channel:
        """The same to a node."""
        certificate, key = (None, None) if files is None else [Path(each).read_bytes() for each in files]
        shown = grpc.ssl_channel_credentials(self.ca.read_bytes(), key, certificate)
        own = (("grpc.use_local_subchannel_pool", 1),)
        return grpc.secure_channel(address.removeprefix("tls://"), shown, own)

    def _store(self, name: str, chain: bytes, private: bytes) -> tuple[str, str]:
        certificate, key = (self.directory / f"{name}.{ending}" for ending in ("crt", "key"))
        key.unlink(missing_ok=True)
        key.write_bytes(private)
        key.chmod(0o600)
        certificate.write_bytes(chain)
        return str(certificate), str(key)


def shown(address: str) -> bytes | None:
    """The certificate that a server shows."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    host, _, port = address.partition("://")[2].rstrip("/").rpartition(":")
    with socket.create_connection((host, int(port)), 30) as plain, context.wrap_socket(plain) as encrypted:
        return encrypted.getpeercert(binary_form=True)
