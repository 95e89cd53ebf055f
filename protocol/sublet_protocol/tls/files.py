"""Certificates, keys and certificate authorities in files, which are read again when they have changed."""

from __future__ import annotations

import logging
import os
import ssl
import stat
import threading
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from sublet_protocol.domain.errors import InvalidSetting

log = logging.getLogger(__name__)

Signature = tuple[tuple[int, ...] | None, ...]


class TlsContent(Struct, frozen=True):
    """The content of the files."""

    certificates: bytes | None
    key: bytes | None
    authorities: bytes | None


class TlsFiles(Struct, frozen=True):
    """The paths of PEM files: one's own certificates, the first of them one's own and then those between it and the
    authority; its key; the authorities that the other side's certificate is checked against.
    """

    certificates: str | None = None
    key: str | None = None
    authorities: str | None = None

    @classmethod
    def of_server(cls, certificates: str | None, key: str | None, client_ca: str | None = None) -> TlsFiles | None:
        """Return what a server is given; None where that is nothing. Raise `InvalidSetting`."""
        if certificates is None and key is None and client_ca is None:
            return None
        if certificates is None or key is None:
            raise InvalidSetting(
                "TLS takes a certificate and its key, and one of them is missing. Give --tls-cert FILE and --tls-key "
                "FILE, or SUBLET_TLS_CERT and SUBLET_TLS_KEY."
            )
        return cls(certificates, key, client_ca)

    @classmethod
    def of_client(cls, environ: Mapping[str, str] = os.environ) -> TlsFiles:
        """Return this process's certificates, and the authorities that it trusts nodes by. Raise `InvalidSetting`."""
        certificates, key = environ.get("SUBLET_TLS_CERT") or None, environ.get("SUBLET_TLS_KEY") or None
        if (certificates is None) != (key is None):
            raise InvalidSetting(
                "of SUBLET_TLS_CERT and SUBLET_TLS_KEY only one is set, and a certificate is of no use without its "
                "key. Set both, or none."
            )
        system = ssl.get_default_verify_paths().cafile
        return cls(certificates, key, environ.get("SUBLET_TLS_CA") or system)

    def signature(self) -> Signature:
        """Return what changes when a file is replaced or written to."""
        return tuple(_read_signature(path) for path in (self.certificates, self.key, self.authorities))

    def read(self) -> TlsContent:
        """Return the content of the files. Raise `InvalidSetting`, with the file's name, unless all can be used
        together.
        """
        if self.key is not None:
            _check_key(self.key)
        self.fill(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        return TlsContent(*(_read_content(path) for path in (self.certificates, self.key, self.authorities)))

    def make_server_context(self) -> ssl.SSLContext:
        """Return a context for servers that are not gRPC's. Raise `InvalidSetting`."""
        if self.key is not None:
            _check_key(self.key)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.fill(context)
        return context

    def fill(self, context: ssl.SSLContext) -> None:
        """Load the files into it. Raise `InvalidSetting`."""
        path, files = "", f"certificate {self.certificates} with key {self.key}"
        try:
            for path in filter(None, (self.certificates, self.key, self.authorities)):
                open(path, "rb").close()
            if self.certificates is not None:
                context.load_cert_chain(self.certificates, self.key, password=lambda: b"")
            files = f"certificate authorities {self.authorities}"
            if self.authorities is not None:
                context.load_verify_locations(self.authorities)
        except ssl.SSLError as error:
            raise InvalidSetting(
                f"{files}: they cannot be used ({error.reason or error}). Give files in PEM: one's own certificate "
                "first, and the key that it was made for, without a passphrase."
            ) from None
        except OSError as error:
            raise InvalidSetting(
                f"{path}: it cannot be read ({error.strerror}). Correct the path, or its owner and mode."
            ) from None


class ReloadedFiles:
    """The files of a server. Where they cannot be used any more a warning is logged, and what they had before stays in
    use.
    """

    def __init__(self, files: TlsFiles) -> None:
        self.files = files
        self._lock = threading.Lock()
        self._signature = files.signature()
        self.content = files.read()

    def reload(self) -> bool:
        """Read the files if they have changed, and return whether there is a new `content`. From any thread."""
        with self._lock:
            signature = self.files.signature()
            if signature == self._signature:
                return False
            self._signature = signature
            try:
                self.content = self.files.read()
            except InvalidSetting as error:
                log.warning("certificate invalid, previous one used: %s", error)
                return False
            if self.files.signature() != signature:
                self._signature = ()  # it was written to meanwhile: the next connection reads it again
            log.info("certificate reloaded: path=%s", self.files.certificates)
            return True


def _read_signature(path: str | None) -> tuple[int, ...] | None:
    try:
        status = None if path is None else os.stat(path)
    except OSError:
        return ()
    return (
        None if status is None else (status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size, status.st_mode)
    )


def _read_content(path: str | None) -> bytes | None:
    return None if path is None else Path(path).read_bytes()


def _check_key(path: str) -> None:
    """Raise `InvalidSetting` unless the key is readable by its owner alone, as Postgres requires; one of root's may be
    readable by a group, as Kubernetes mounts it.
    """
    try:
        status = os.stat(path)
    except OSError:
        return  # raised where it is read
    is_own_key = status.st_uid == os.geteuid() and not status.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    is_root_key = status.st_uid == 0 and not status.st_mode & (stat.S_IWGRP | stat.S_IRWXO)
    if not (is_own_key or is_root_key):
        raise InvalidSetting(
            f"key {path} has the mode {stat.S_IMODE(status.st_mode):o}, or another owner: a key is its user's alone, "
            f"or root's and readable by a group. Run `chmod 600 {path}` as this process's user."
        )
