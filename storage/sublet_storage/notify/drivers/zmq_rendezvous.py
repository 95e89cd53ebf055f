"""Where the processes of a user meet to share one publisher, and the lock that says which of them it is."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict

from sublet_protocol.domain.errors import InvalidSetting

MAX_PATH = 100
"""Of a Unix socket; the system's limit is 107."""
AWAKE_S = 0.5
"""Between two signs of life of the holder."""
STALE_S = 3.0
"""After which a holder without any is replaced."""


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the processes that share a publisher meet."""

    directory: Path
    key: str

    @classmethod
    def for_database(cls, url: str, schema: str) -> Rendezvous:
        """The place of one database's schema: the same for all who reach it by the same URL, password aside."""
        named = {key: value for key, value in conninfo_to_dict(url).items() if not key.endswith("password")}
        text = json.dumps([named, schema], sort_keys=True, default=str)
        return cls(private_directory(), hashlib.sha256(text.encode()).hexdigest()[:16])

    @property
    def lock(self) -> Path:
        """Whoever has it locked is the publisher."""
        return self.directory / f"{self.key}.lock"

    @property
    def socket(self) -> Path:
        """Where the publisher is handed messages."""
        return self.directory / f"{self.key}.sock"


def private_directory() -> Path:
    """`sublet-UID` in XDG_RUNTIME_DIR, else in the directory for temporary files, made if it is not there.

    Raises `InvalidSetting` if somebody else's, or open to others.
    """
    for base in (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir(), "/tmp"):
        directory = Path(base or "/", f"sublet-{os.geteuid()}")
        if base and len(os.fsencode(directory)) + len("/0123456789abcdef.sock") <= MAX_PATH:
            with contextlib.suppress(OSError):
                directory.mkdir(0o700, exist_ok=True)
                return _checked(directory)
    raise InvalidSetting(
        "there is no directory for the sockets of the notification driver 'zmq': XDG_RUNTIME_DIR, TMPDIR and /tmp are "
        f"not writable, or their names are longer than {MAX_PATH - 40} bytes. Set XDG_RUNTIME_DIR to one that is."
    )


def _checked(directory: Path) -> Path:
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise InvalidSetting(
            f"{directory} (owner {found.st_uid}, mode {stat.filemode(found.st_mode)}) must be a directory of user "
            f"{os.geteuid()} that nobody else may enter: messages are handed over in it. Remove it, or make it yours "
            "with mode 0700, or set XDG_RUNTIME_DIR to a private directory."
        )
    return directory


def file_inode(path: Path) -> int | None:
    """Which file is there now; None: none."""
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


class FileLock:
    """A lock on a file that ends with its process, and that no fork of that process shares. Its file's time is its
    holder's last sign of life; whoever finds that too old makes a new file, and the old one is worth nothing."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd: int | None = None
        self._next_sign_at = 0.0

    def acquire(self) -> bool:
        """True if it is ours now. Once per process: POSIX locks do not keep a process from itself."""
        self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._let_go()
            self._remove_stale()
            return False
        return self.refresh()

    def refresh(self) -> bool:
        """Give a sign of life; False if the lock is not ours any more, and let go of."""
        if self._fd is not None and time.monotonic() >= self._next_sign_at:
            self._next_sign_at = time.monotonic() + AWAKE_S
            os.utime(self._fd)
            if not self._is_current():
                self._let_go()
        return self._fd is not None

    def release(self) -> None:
        """Remove the file, if it is still ours, then let go of it."""
        if self._fd is not None:
            if self._is_current():
                self._path.unlink(missing_ok=True)
            self._let_go()

    def _is_current(self) -> bool:
        return self._fd is not None and os.fstat(self._fd).st_ino == file_inode(self._path)

    def _remove_stale(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self._path.stat().st_mtime < time.time() - STALE_S:
                self._path.unlink()

    def _let_go(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._next_sign_at = None, 0.0
