"""Whether an executor can reach the database that the driver named."""

from __future__ import annotations

import socket
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from protocol.errors import InvalidSetting


def check_socket(url: str, driver: str) -> None:
    """An embedded server's URL is the path of a Unix socket, which means nothing on another machine."""
    host = str(conninfo_to_dict(url).get("host") or "")
    if host.startswith("/") and not Path(host).is_dir():
        raise InvalidSetting(
            f"the executor on {socket.gethostname()} was given a database that only {driver} can reach: the "
            f"Unix socket in {host}, of an embedded server perhaps. Run Postgres where all executors can reach it, "
            "and give its URL (`url`, or SUBLET_DATABASE_URL on the driver)."
        )
