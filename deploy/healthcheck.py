"""`python healthcheck.py [HOST:PORT]`: ends with 0 if a node serves there, else with 1. By default: this host, 7411,
with TLS where SUBLET_TLS_CERT is set; SUBLET_TLS_CA then names the authority to trust.

It asks by the standard gRPC health service, which says NOT_SERVING from the moment a node begins to stop. It opens no
connection to the database, and takes about a third of a second, most of it to start Python.
"""

from __future__ import annotations

import os
import socket
import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from sublet_protocol.domain.address import TLS_SCHEME
from sublet_protocol.tls.channel import open_channel

TIMEOUT_S = 3.0


def main(address: str | None = None) -> int:
    """The exit code."""
    scheme = TLS_SCHEME if os.environ.get("SUBLET_TLS_CERT") else ""
    where = address or f"{scheme}{socket.gethostname()}:7411"
    with open_channel(where, ()) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            sys.stderr.write(f"{where}: {error.code().name}\n")
            return 1
    return 0 if answer.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
