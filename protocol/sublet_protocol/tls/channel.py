"""Channels to nodes, plain or with TLS, and the reason where none can be made."""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Sequence
from typing import Any

import grpc
import grpc.aio

from sublet_protocol.domain.address import TLS_SCHEME, is_tls, split_node_address
from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.tls.files import Signature, TlsFiles

PROBE_S = 2.0
"""The timeout for finding out why a connection failed."""

_lock = threading.Lock()
_cached_credentials: dict[tuple[TlsFiles, Signature], Any] = {}
"""The latest credentials: channels that share them share connections."""


def open_channel(address: str, options: Sequence[tuple[str, int]]) -> Any:
    """Return a channel to a node. Raise `InvalidSetting` where the files for TLS cannot be used."""
    if is_tls(address):
        return grpc.secure_channel(address.removeprefix(TLS_SCHEME), _load_credentials(), options=options)
    return grpc.insecure_channel(address, options=options)


def open_aio_channel(address: str, options: Sequence[tuple[str, int]]) -> Any:
    """Return a channel to the address for asyncio, as `open_channel` does."""
    if is_tls(address):
        return grpc.aio.secure_channel(address.removeprefix(TLS_SCHEME), _load_credentials(), options=options)
    return grpc.aio.insecure_channel(address, options=options)


def compute_channel_signature(address: str) -> object:
    """Return what changes when a channel to this address would be made with other files."""
    return TlsFiles.of_client().signature() if is_tls(address) else None


def is_outdated(address: str, signature: object) -> bool:
    """Return whether a channel to this address, opened with this signature, would be made with other files by now: a
    call that was refused over it is made again over a new one.
    """
    try:
        return compute_channel_signature(address) != signature
    except InvalidSetting:
        return False


def explain_failure(address: str, details: str) -> str | None:
    """Return why TLS makes it useless to try again; None where it may be something else. `details`: gRPC's text,
    which is the same for a missing client certificate and a dead node. Blocks for twice `PROBE_S` at most."""
    if "failed to connect" not in details or "refused" in details or "timed out" in details:
        return None  # no server, or no answer: not a failure of TLS
    reason = _explain_tls(address) if is_tls(address) else _explain_plain(address)
    return None if reason is None else f"no connection to node {address}: {reason}"


def _load_credentials() -> Any:
    files = TlsFiles.of_client()
    cache_key = (files, files.signature())
    with _lock:
        if cache_key not in _cached_credentials:
            content = files.read()
            _cached_credentials.clear()
            _cached_credentials[cache_key] = grpc.ssl_channel_credentials(
                content.authorities, content.key, content.certificates
            )
        return _cached_credentials[cache_key]


def _explain_plain(address: str) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _is_let_in(address, context)
    except OSError:
        return None
    return f"it speaks TLS, and was asked without. Write its address as {TLS_SCHEME}{address}"


def _explain_tls(address: str) -> str | None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        TlsFiles.of_client().fill(context)
        if not _is_let_in(address, context) and not _is_let_in(address, context):
            return (
                "it closes the connection after the handshake: it asks for a client's certificate, of the authorities "
                "of its --tls-client-ca. Set SUBLET_TLS_CERT and SUBLET_TLS_KEY to such a one"
            )
    except InvalidSetting as error:
        return str(error)
    except ssl.SSLCertVerificationError as error:
        return (
            f"its certificate is not accepted ({error.verify_message.rstrip('.')}). SUBLET_TLS_CA names the "
            "authorities that are trusted, the address must be one of its names, and it must not have expired"
        )
    except ssl.SSLEOFError:
        return None
    except ssl.SSLError as error:
        if error.reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE"):
            return f"it does not speak TLS. Give it a certificate, or write its address without {TLS_SCHEME}"
        return f"the handshake fails ({error.reason})"
    except OSError:
        return None
    return None


def _is_let_in(address: str, context: ssl.SSLContext) -> bool:
    """Return whether an HTTP/2 server sends something after the handshake, as it does unless it rejects the client.
    Raise `OSError`, of which `SSLError` is one.
    """
    endpoint = split_node_address(address)
    assert endpoint is not None, "addresses are checked where they are given"
    context.set_alpn_protocols(["h2"])
    with (
        socket.create_connection(endpoint, PROBE_S) as plain,
        context.wrap_socket(plain, server_hostname=endpoint[0]) as encrypted,
    ):
        try:
            return encrypted.recv(1) != b""
        except TimeoutError:
            return True
        except ssl.SSLError as error:
            if "CERTIFICATE" in (error.reason or ""):
                return False
            raise
        except ConnectionError:
            return False
