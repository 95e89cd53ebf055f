"""The database of a query, checked on driver and executors; keeps an embedded server running.

On the driver it must exist already, on an executor it must be reachable. The last user of an embedded server stops it:
a query's processes come and go, and without a process that holds it each would stop it at its end and have the next one
start it again.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from sublet_protocol.domain.errors import InvalidSetting
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.given_or_embedded_database import OpenedDatabase, open_database
from sublet_storage.db.database_url import parse_url


def check_database_exists(url: str | None, data_dir: str | None) -> None:
    """Raise `InvalidSetting` where an embedded database would be made anew: Spark's own Python processes have the
    environment in which Spark was started, so a database that is named later would be replaced by an empty one,
    silently."""
    from sublet_storage.bootstrap.embedded import find_usable_data_dir, has_cluster

    if url:
        return
    directory = Path(data_dir).resolve() if data_dir else find_usable_data_dir()
    if has_cluster(directory):
        return
    if data_dir:
        raise InvalidSetting(
            f"option dataDir is {data_dir!r}: there is no database in {directory}. Correct it, or make one there with "
            f"`sublet migrate --data-dir {data_dir}`."
        )
    raise InvalidSetting(
        f"no database is named, and there is no embedded one in {directory}. Give the option url, or set "
        "SUBLET_DATABASE_URL before Spark is started: what is set later does not reach the processes in which Spark "
        "plans. An embedded one is made by `sublet migrate`."
    )


def check_socket_reachable(url: str, driver: str) -> None:
    """Raise `InvalidSetting` for a URL with a Unix socket, as an embedded server's has, that is not on this machine."""
    host = str(parse_url(url).get("host") or "")
    if host.startswith("/") and not Path(host).is_dir():
        raise InvalidSetting(
            f"the executor on {socket.gethostname()} was given a database that only {driver} can reach: the "
            f"Unix socket in {host}, of an embedded server perhaps. Run Postgres where all executors can reach it, "
            "and give its URL (`url`, or SUBLET_DATABASE_URL on the driver)."
        )


_held: dict[tuple[int, str], EmbeddedPostgres] = {}
"""By process, as Spark forks its workers, and directory."""


def keep_server_running(data_dir: str | None, driver: str) -> None:
    """Use the embedded server of this directory until the process ends. On a machine other than the driver's there is
    no such server, and none is started.
    """
    if data_dir is not None and driver == socket.gethostname() and (os.getpid(), data_dir) not in _held:
        resolve_database(None, data_dir)


def resolve_database(url: str | None, data_dir: str | None) -> OpenedDatabase:
    """Return what `open_database` finds; an embedded server is held until the process ends."""
    with open_database(url, data_dir) as location:
        key = os.getpid(), str(location.data_dir)
        if location.data_dir is not None and key not in _held:
            _held[key] = EmbeddedPostgres(location.data_dir)
            _held[key].start()
    return location
