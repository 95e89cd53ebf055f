"""The TLS of servers that are not gRPC's. Each connection has a handshake of its own: none resumes another's session.

A resumed session skips the check of the client's certificate, which may have expired since, or have lost its authority.
OpenSSL has two kinds, sessions in tickets and those that the server keeps. Python can turn off the first only; but both
belong to the context that a connection began with, and each begins with a new one.
"""

from __future__ import annotations

import contextlib
import ssl
from typing import Any, Self

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.tls.files import ReloadedFiles, TlsFiles


class _Connection(ssl.SSLObject):
    """A connection. `first`: the context that it began with, which OpenSSL goes on using and Python would free."""

    first: ssl.SSLContext


class ReloadingServerContext(ssl.SSLContext):
    """What `asyncio` makes connections with: each has the files as they are when it begins."""

    _reloaded: ReloadedFiles
    _latest: ssl.SSLContext

    @classmethod
    def of(cls, files: TlsFiles) -> Self:
        """Return one for these files. Raise `InvalidSetting`."""
        context = cls(ssl.PROTOCOL_TLS_SERVER)
        context._reloaded, context._latest = ReloadedFiles(files), files.make_server_context()
        return context

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *_: Any, **__: Any) -> ssl.SSLObject:
        """Return a new connection of this server."""
        first = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        first.minimum_version = ssl.TLSVersion.TLSv1_2
        first.options |= ssl.OP_NO_TICKET
        first.num_tickets = 0
        first.sni_callback = self._choose
        if self._reloaded.files.authorities is not None:
            first.verify_mode = ssl.CERT_REQUIRED
        first.sslobject_class = _Connection
        connection = first.wrap_bio(incoming, outgoing, server_side=True)
        assert isinstance(connection, _Connection)
        connection.first = first
        return connection

    def _choose(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        files = self._reloaded
        if files.reload():
            with contextlib.suppress(InvalidSetting):  # changed again since it was read: then at the next connection
                self._latest = files.files.make_server_context()
        connection.context = self._latest
