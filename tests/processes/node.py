"""A leader node: `python -m tests.processes.node URL NAME [FILE]`. Prints its address once it serves.

FILE is written anew about every `EVERY_S`: what the node says of itself (`NodeSnapshot`), as JSON. With SUBLET_HTTP it
has an HTTP port, whatever the value.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

import msgspec

from sublet_leader.http.settings import HttpOptions, read_admin_token
from sublet_leader.listen_address import ListenAddress
from sublet_leader.observe.metrics_settings import MetricsSettings
from sublet_leader.server import NodeServer
from sublet_leader.settings import LeaderSettings
from sublet_protocol.tls.files import TlsFiles

INTERVAL_S = 0.1


def main(url: str, name: str, file: str = "") -> None:
    def announce(text: str) -> None:
        sys.stdout.write(text + "\n")
        sys.stdout.flush()
        if file and " serves on " in text:
            asyncio.get_running_loop().call_soon(watch)

    def watch() -> None:
        entire = Path(f"{file}.new")
        entire.write_text(json.dumps(msgspec.to_builtins(node.state())))
        entire.replace(file)
        asyncio.get_running_loop().call_later(INTERVAL_S, watch)

    notify = os.environ.get("SUBLET_NOTIFY", "postgres")
    listen = ListenAddress.parse("127.0.0.1:0", insecure=False)
    port = HttpOptions(listen, MetricsSettings.from_env(), read_admin_token())
    tls = TlsFiles.of_server(*(os.environ.get(f"SUBLET_TLS_{each}") for each in ("CERT", "KEY", "CLIENT_CA")))
    is_auth_required = os.environ.get("SUBLET_AUTH") == "required"
    http = port if "SUBLET_HTTP" in os.environ else None
    node = NodeServer(url, name, listen, LeaderSettings.from_env(), announce, notify, http, tls, is_auth_required)
    asyncio.run(node.run())


if __name__ == "__main__":
    main(*sys.argv[1:])
