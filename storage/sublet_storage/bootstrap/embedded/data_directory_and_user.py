"""Where an embedded server is, and as which user it runs."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import pwd
import stat
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import Struct

from sublet_protocol.domain.errors import EmbeddedDirectoryUnusable
from sublet_storage.bootstrap.embedded.trusted_path import (
    check_directory,
    find_user_name,
    give_to,
    make_private_directory,
)

DEFAULT_DATA_DIR = Path(".sublet")
SYSTEM_DATA_DIR = Path("/var/lib/sublet")
PORT = 5432
_SERVER_ACCOUNTS = ("postgres", "nobody")
"""As one of which root starts a server in a directory of its own."""
SOCKET_PATH_LIMIT = 104
"""Bytes of a Unix socket's address, final zero included, on the systems we run on (Linux allows 108)."""

_log = logging.getLogger(__name__)


class PostgresOsUser(Struct, frozen=True):
    """The unprivileged account as which root starts the server."""

    name: str
    uid: int
    gid: int
    groups: tuple[int, ...]

    def command(self, command: Sequence[str]) -> list[str]:
        """Return the command that runs this one as this user.

        `subprocess` could do it, but by a plain fork, in which gRPC's handlers may end the child of a process that has
        gRPC's threads.
        """
        become = f"os.setgroups({list(self.groups)}); os.setgid({self.gid}); os.setuid({self.uid})"
        code = f"import os, sys; {become}; os.execv(sys.argv[1], sys.argv[1:])"
        return [sys.executable, "-I", "-S", "-c", code, *command]


def find_usable_data_dir() -> Path:
    """Return SUBLET_DATA_DIR, else `.sublet` in the working directory; where the server's user cannot access that, a
    directory of root below /var/lib, with a warning in the log.

    Every process of root with the same default gets the same other directory. A directory named in SUBLET_DATA_DIR is
    never exchanged. Raise `EmbeddedDirectoryUnusable` if another user has put the default directory, or a link, there.
    """
    if named := os.environ.get("SUBLET_DATA_DIR"):
        return Path(named).resolve()
    _check_not_planted(DEFAULT_DATA_DIR.absolute())
    data_dir = DEFAULT_DATA_DIR.resolve()
    if os.geteuid() != 0:
        return data_dir
    try:
        find_server_user(data_dir)
    except EmbeddedDirectoryUnusable as error:
        system_dir = SYSTEM_DATA_DIR / hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:12]
        _log.warning("data directory unusable, using another: data_dir=%s: %s", system_dir, error)
        return system_dir
    return data_dir


def _check_not_planted(data_dir: Path) -> None:
    """Raise if another user has put the default directory into a folder that everybody may write to."""
    try:
        owner, parent = data_dir.lstat().st_uid, data_dir.parent.stat()
    except OSError:
        return  # there is none, or it is refused by name later
    ours = {0, os.geteuid(), *(account.pw_uid for account in map(_find_account, _SERVER_ACCOUNTS) if account)}
    if parent.st_mode & stat.S_IWOTH and owner not in ours:
        raise EmbeddedDirectoryUnusable(
            f"data directory {data_dir}: user {find_user_name(owner)} has put it into {data_dir.parent}, where "
            "everybody may. Name it if it is meant, or choose another directory (--data-dir, SUBLET_DATA_DIR)."
        )


def has_cluster(data_dir: Path) -> bool:
    """Return whether a cluster was ever created in the directory."""
    return _read_cluster_owner(data_dir) is not None


def find_server_user(data_dir: Path) -> PostgresOsUser | None:
    """Return the account as which the server of this directory runs; None means the current user.

    Raise `EmbeddedDirectoryUnusable`, naming the directory or file that cannot be accessed.
    """
    _check_no_file(data_dir)
    if any("\ud800" <= character <= "\udfff" for character in str(data_dir)):
        raise EmbeddedDirectoryUnusable(
            f"data directory {str(data_dir)!r}: its name is not UTF-8, which the server's addresses have to be. Choose "
            "another directory (--data-dir, SUBLET_DATA_DIR)."
        )
    with name_directory_in_errors(data_dir):
        if (data_dir / "pg").is_symlink():
            raise PermissionError(f"{data_dir / 'pg'} is a symbolic link. Name the directory it leads to, or remove it")
    owner = _read_cluster_owner(data_dir)
    if os.geteuid() != 0:
        if owner is not None and owner != os.geteuid():
            raise EmbeddedDirectoryUnusable(
                f"data directory {data_dir} belongs to user {find_user_name(owner)}. Run as that user, or choose "
                "another directory (--data-dir, SUBLET_DATA_DIR)."
            )
        check_trusted(data_dir, None)
        return None
    users = list(_list_candidates(data_dir, owner))
    for user in users:
        if find_inaccessible(user, data_dir) is None:
            check_trusted(data_dir, user)
            return user
    raise _unusable_error(data_dir, users)


def check_trusted(data_dir: Path, user: PostgresOsUser | None) -> None:
    """Raise `EmbeddedDirectoryUnusable` where others can replace what is run, read or handed to the server's user."""
    with name_directory_in_errors(data_dir):
        check_directory(data_dir, list_other_owners(user))
        check_directory(data_dir / "pg", list_other_owners(user))


@contextlib.contextmanager
def name_directory_in_errors(data_dir: Path) -> Iterator[None]:
    """Raise an error that names the data directory for errors of the operating system."""
    try:
        yield
    except OSError as error:
        text = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        raise EmbeddedDirectoryUnusable(
            f"data directory {data_dir}: {text}. Or choose another directory (--data-dir, SUBLET_DATA_DIR)."
        ) from None


def list_other_owners(user: PostgresOsUser | None) -> tuple[int, ...]:
    """Return the ids of the other users that may own files in a data directory."""
    return () if user is None else (user.uid,)


def _check_no_file(data_dir: Path) -> None:
    for path in (data_dir, *data_dir.parents):
        if os.path.exists(path) and not os.path.isdir(path):  # False where one may not look
            raise EmbeddedDirectoryUnusable(
                f"data directory {data_dir}: {path} is a file. Choose a directory (--data-dir, SUBLET_DATA_DIR)."
            )


def find_inaccessible(user: PostgresOsUser, path: Path) -> Path | None:
    """Return the first directory on the way to `path`, or `path`, that exists and that the user cannot enter."""
    for directory in (*reversed(path.parents), path):
        try:
            status = directory.stat()
        except FileNotFoundError:
            return None
        if not status.st_mode & _search_bit(user, status):
            return directory
    return None


def choose_socket_directory(data_dir: Path, user: PostgresOsUser | None) -> Path:
    """Return where the socket shall be: in the data directory, or, if that path is too long, in a short private one."""
    uid, gid = (os.geteuid(), os.getegid()) if user is None else (user.uid, user.gid)
    directory = data_dir / "socket"
    if _is_usable_socket_path(directory):
        with name_directory_in_errors(data_dir):
            make_private_directory(directory, uid, gid)
        return directory
    # Not in XDG_RUNTIME_DIR, which ends with the login: the server may go on.
    directory = Path("/tmp").resolve() / f"sublet-{hashlib.sha256(os.fsencode(data_dir)).hexdigest()[:16]}"
    try:
        make_private_directory(directory, uid, gid)
    except OSError:  # the name is taken
        directory = Path(tempfile.mkdtemp(prefix="sublet-", dir="/tmp"))
        chown_to(directory, user)
    return directory


def is_private_directory(path: Path, owner: int) -> bool:
    """Return whether it is a directory that only this user can access. Raise `OSError`."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700 and status.st_uid == owner


def chown_to(path: Path, user: PostgresOsUser | None) -> None:
    """Change the owner of a path of ours to the server's user."""
    if user is not None:
        give_to(path, user.uid, user.gid)


def _is_usable_socket_path(directory: Path) -> bool:
    """Return whether the path is short enough, and has no comma, which separates hosts in libpq."""
    return "," not in str(directory) and len(os.fsencode(directory / f".s.PGSQL.{PORT}")) < SOCKET_PATH_LIMIT


def _search_bit(user: PostgresOsUser, status: os.stat_result) -> int:
    if status.st_uid == user.uid:
        return stat.S_IXUSR
    if status.st_gid == user.gid or status.st_gid in user.groups:
        return stat.S_IXGRP
    return stat.S_IXOTH


def _read_cluster_owner(data_dir: Path) -> int | None:
    try:
        return (data_dir / "pg").lstat().st_uid
    except OSError:
        return None


def _list_candidates(data_dir: Path, cluster_owner: int | None) -> Iterator[PostgresOsUser]:
    """Yield the owner of the cluster; without one, the owner of the directory, `postgres`, and `nobody`."""
    if cluster_owner is not None:
        entries = [_find_account(cluster_owner)]
    else:
        nearest = next(path for path in (data_dir, *data_dir.parents) if path.exists())
        entries = [_find_account(nearest.stat().st_uid), *map(_find_account, _SERVER_ACCOUNTS)]
    for entry in entries:
        if entry is not None and entry.pw_uid != 0:
            groups = tuple(os.getgrouplist(entry.pw_name, entry.pw_gid))
            yield PostgresOsUser(entry.pw_name, entry.pw_uid, entry.pw_gid, groups)


def _find_account(user: int | str) -> pwd.struct_passwd | None:
    try:
        return pwd.getpwuid(user) if isinstance(user, int) else pwd.getpwnam(user)
    except KeyError:
        return None


def _unusable_error(data_dir: Path, users: list[PostgresOsUser]) -> EmbeddedDirectoryUnusable:
    if not users:
        return EmbeddedDirectoryUnusable(
            f"data directory {data_dir}: Postgres does not run as root, and neither a user `postgres` nor `nobody` "
            "exists to run it as. Create one, run as another user, or give a database URL (SUBLET_DATABASE_URL)."
        )
    closed = find_inaccessible(users[-1], data_dir)
    names = " or ".join(user.name for user in users)
    return EmbeddedDirectoryUnusable(
        f"data directory {data_dir}: Postgres does not run as root, and user {names} cannot enter {closed}. Choose "
        f"a directory it can enter (--data-dir, SUBLET_DATA_DIR), run `chmod o+x {closed}`, or run as another user."
    )
