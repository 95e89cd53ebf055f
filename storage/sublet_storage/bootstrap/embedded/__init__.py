"""An embedded Postgres server in the data directory, shared by all processes that name it.

It is found by its directory alone. Three lock files in it are the entire protocol, because the kernel drops a lock
however its process ends:

- `users.lock`: every process that uses the server holds it shared. A process that gets it exclusively is the only user.
- `server.lock`: held exclusively while a cluster is made, a server started or stopped. Always taken before
  `users.lock`.
- `watchdog.lock`: held by the one process that waits for `users.lock` and stops the server when the last user is gone,
  also when that user was killed and could not do it. While there are users it restarts a server that died, and writes
  so to the server's log (`pg/server.log`).

A cluster is made in a temporary directory and renamed, so a cluster that exists is complete. Whether a server runs is
seen at its socket, never by a process id: ids are reused, and a dead postmaster keeps its id until it is reaped.

Postgres refuses to run as root. Started by root, the server runs as the owner of the directory, `postgres` or `nobody`,
whichever can get there; no permission of any directory that exists is changed.

The server listens on a Unix socket in a directory of mode 0700 and on nothing else, with fsync on: it is a real
database, with one machine's durability. `data_directory_and_user` finds the directory, user and socket, `binaries` the
programs, `server` runs them.
"""

from sublet_storage.bootstrap.embedded.data_directory_and_user import (
    DEFAULT_DATA_DIR,
    find_usable_data_dir,
    has_cluster,
)
from sublet_storage.bootstrap.embedded.server import EmbeddedPostgres

__all__ = ["DEFAULT_DATA_DIR", "EmbeddedPostgres", "find_usable_data_dir", "has_cluster"]
