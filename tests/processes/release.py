"""The command line of another release: `python -m tests.processes.release MIGRATIONS VERSION ARGUMENTS...`.

That release has the scripts in MIGRATIONS and is made for version VERSION of the schema; all else is this one's.
"""

from __future__ import annotations

import sys
from pathlib import Path

import sublet_storage.bootstrap.migrate
import sublet_storage.db.connect
from sublet.cli import main


def run(migrations: str, version: str, *arguments: str) -> None:
    sublet_storage.db.connect.SCHEMA_VERSION = version
    sublet_storage.bootstrap.migrate.scripts_path = lambda: Path(migrations)
    sys.argv = ["sublet", *arguments]
    main()


if __name__ == "__main__":
    run(*sys.argv[1:])
