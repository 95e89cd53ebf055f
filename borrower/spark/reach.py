"""Whether there is a database to go to: on the driver one that somebody has made, on an executor one it can reach."""

from __future__ import annotations

import socket
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from protocol.errors import InvalidSetting


def check_made(url: str | None, data_dir: str | None) -> None:
    """Raise `InvalidSetting` where an embedded database would be made anew: Spark's own Python processes have the
    environment in which Spark was started, and whoever names his database later would get an empty one, silently."""
    from storage.connect import database_url
    from storage.embedded import has_cluster, usable_data_dir

    if url or (data_dir is None and database_url(None)):
        return
    directory = Path(data_dir).resolve() if data_dir else usable_data_dir()
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


def check_socket(url: str, driver: str) -> None:
    """An embedded server's URL is the path of a Unix socket, which means nothing on another machine."""
    host = str(conninfo_to_dict(url).get("host") or "")
    if host.startswith("/") and not Path(host).is_dir():
        raise InvalidSetting(
            f"the executor on {socket.gethostname()} was given a database that only {driver} can reach: the "
            f"Unix socket in {host}, of an embedded server perhaps. Run Postgres where all executors can reach it, "
            "and give its URL (`url`, or SUBLET_DATABASE_URL on the driver)."
        )
