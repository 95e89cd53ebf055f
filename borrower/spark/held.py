"""The embedded server, where a batch query uses one: kept running by the processes that plan and read.

Its last user stops it. A query's processes come and go, and without this each would stop it behind itself and have the
next one start it again. Who is killed leaves it all the same.
"""

from __future__ import annotations

import os
import socket

from storage.database import Database, open_database
from storage.embedded import EmbeddedPostgres

_held: dict[tuple[int, str], EmbeddedPostgres] = {}
"""By process, as Spark forks its workers, and directory."""


def hold(data_dir: str | None, driver: str) -> None:
    """Use the embedded server of this directory until the process ends. On another machine than the driver there is no
    such server, and none is made."""
    if data_dir is not None and driver == socket.gethostname() and (os.getpid(), data_dir) not in _held:
        database(None, data_dir)


def database(url: str | None, data_dir: str | None) -> Database:
    """What `open_database` finds; an embedded server is held until the process ends."""
    with open_database(url, data_dir) as found:
        key = os.getpid(), str(found.data_dir)
        if found.data_dir is not None and key not in _held:
            _held[key] = EmbeddedPostgres(found.data_dir)
            _held[key].start()
    return found
