"""Hands grant keys to the process that commits a plan, of the same user and machine.

Spark runs a query's source and its `foreachBatch` in two processes, and nothing secret may be in what it carries from
one to the other. So the planner writes each key that it gets to a file of its own, which it holds locked, in a
directory that is its user's alone; a file that is no longer locked is removed by the session's next planner.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import math
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path

from msgspec import Struct

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.grant_keys import GrantSecret
from sublet_protocol.messages.borrower_leader import Grant
from sublet_storage.groups.consumer_progress import SessionIdentity


class PlannerGrantKeys(Struct, frozen=True):
    """The identity of one planner of a session, and the key of each (stream, grant id) that its file has."""

    session: SessionIdentity
    keys: dict[tuple[int, int], GrantSecret]


class GrantKeyHandoffFile:
    """The file of one planner, from its beginning to its end. Raises `OSError`, and `InvalidSetting` for a directory
    that is not its user's alone.
    """

    def __init__(self, subscription: str, session: SessionIdentity) -> None:
        self._name = f"{_make_prefix(subscription, session.name)}{secrets.token_hex(8)}"
        self._epoch, self._lines, self._line_count = session.epoch, dict[int, str](), math.inf
        with _open_folder() as folder:
            _remove_abandoned(folder, _make_prefix(subscription, session.name))
            self._file = self._create(folder)

    def add(self, grant: Grant) -> None:
        """Hand on the key of a grant. Those of its stream's earlier grants may go: only the last is in force."""
        line = f"{grant.stream_id} {grant.grant_id} {grant.grant_key.reveal().hex()}\n"
        self._lines[grant.stream_id] = line
        count, self._line_count = self._line_count + 1, math.inf  # of a file whose last line may be cut
        if count < math.inf:
            _write(self._file, line)
            self._line_count = count
        if count > 2 * len(self._lines):
            with _open_folder() as folder:
                former, self._file = self._file, self._create(folder)
            os.close(former)

    def _create(self, folder: int) -> int:
        """Return the file, new and locked, with the last key of each stream."""
        fresh = f"new.{self._name}"
        flags = os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(fresh, flags, 0o600, dir_fd=folder)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write(file, "".join([f"{self._epoch}\n", *self._lines.values()]))
            os.rename(fresh, self._name, src_dir_fd=folder, dst_dir_fd=folder)
        except OSError:
            os.close(file)
            os.unlink(fresh, dir_fd=folder)
            raise
        self._line_count = len(self._lines)
        return file

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError, InvalidSetting), _open_folder() as folder:
            os.unlink(self._name, dir_fd=folder)
        os.close(self._file)


def read_grant_keys(subscription: str, session: str) -> list[PlannerGrantKeys]:
    """Return what planners of that session on this machine have written, of the newest first. Raise `InvalidSetting`
    for a directory that is not this user's alone.
    """
    prefix, grant_keys = _make_prefix(subscription, session), []
    with _open_folder() as folder:
        for name in os.listdir(folder):
            if name.startswith(prefix):
                with contextlib.suppress(FileNotFoundError):
                    grant_keys.append(_parse(session, _read(folder, name)))
    return sorted(grant_keys, key=lambda keys: keys.session.epoch, reverse=True)


def _make_prefix(subscription: str, session: str) -> str:
    return hashlib.sha256(f"{subscription}\n{session}".encode()).hexdigest()[:32] + "."


@contextlib.contextmanager
def _open_folder() -> Iterator[int]:
    """Yield the user's directory below that of temporary files, as a descriptor. Raise `InvalidSetting` if others can
    access it, or have made it.
    """
    path = Path(tempfile.gettempdir(), f"sublet-{os.getuid()}")
    with contextlib.suppress(FileExistsError):
        path.mkdir(0o700)
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (PermissionError, NotADirectoryError) as error:
        raise InvalidSetting(
            f"{path}: the keys of a query's grants are handed on in it, and another user made it ({error.strerror}). "
            "Have it removed, or set TMPDIR to a directory of this user's own, for the query's driver."
        ) from None
    try:
        status = os.fstat(folder)
        if status.st_uid != os.getuid() or status.st_mode & 0o077:
            raise InvalidSetting(
                f"{path}: the keys of a query's grants are handed on in it, and it must be this user's alone. Remove "
                f"it, or run `chmod 700 {path}` as its owner."
            )
        yield folder
    finally:
        os.close(folder)


def _remove_abandoned(folder: int, prefix: str) -> None:
    for name in os.listdir(folder):
        if name.removeprefix("new.").startswith(prefix):
            with contextlib.suppress(OSError):  # another process holds it, or has just removed it
                file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name, dir_fd=folder)
                finally:
                    os.close(file)


def _write(file: int, text: str) -> None:
    rest = text.encode()
    while rest:  # a full disk takes a part, and refuses the next
        rest = rest[os.write(file, rest) :]


def _read(folder: int, name: str) -> str:
    with open(os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder), encoding="ascii") as file:
        return file.read()


def _parse(session: str, text: str) -> PlannerGrantKeys:
    """Return the keys in a planner's file. A last line without an end is still being written, and is left out."""
    epoch, *lines = text.split("\n")[:-1]
    parts = [line.split() for line in lines]
    keys = {(int(stream), int(grant)): GrantSecret(bytes.fromhex(key)) for stream, grant, key in parts}
    return PlannerGrantKeys(SessionIdentity(session, int(epoch)), keys)
