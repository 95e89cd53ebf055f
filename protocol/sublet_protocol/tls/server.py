"""The TLS credentials of a gRPC server."""

from __future__ import annotations

from typing import Any

import grpc

from sublet_protocol.tls.files import ReloadedFiles, TlsFiles


def make_server_credentials(files: TlsFiles) -> Any:
    """Return credentials that have the files read at each new connection, if they have changed. With authorities, a
    client must show a certificate of theirs. Raise `InvalidSetting`.
    """
    reloaded = ReloadedFiles(files)

    def read_configuration() -> Any:
        content = reloaded.content
        pairs = [(content.key, content.certificates)]
        return grpc.ssl_server_certificate_configuration(pairs, root_certificates=content.authorities)

    return grpc.dynamic_ssl_server_credentials(
        read_configuration(), lambda: read_configuration() if reloaded.reload() else None, files.authorities is not None
    )
