"""Creates, starts, shares and stops an embedded server."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from sublet_protocol.domain.errors import DatabaseUnreachable, EmbeddedDirectoryUnusable
from sublet_storage.bootstrap.embedded.binaries import find_binaries
from sublet_storage.bootstrap.embedded.data_directory_and_user import (
    PORT,
    PostgresOsUser,
    choose_socket_directory,
    chown_to,
    find_server_user,
    is_private_directory,
    list_other_owners,
    name_directory_in_errors,
)
from sublet_storage.bootstrap.embedded.trusted_path import open_directory, open_file
from sublet_storage.bootstrap.embedded.watchdog import (
    ZOMBIE_TIMEOUT_S,
    is_of_another,
    make_environment,
    may_be_stopped,
    remove_stale_lock_files,
)

LOCK_TIMEOUT_S = 120.0
START_TIMEOUT_S = 60.0

SUPERUSER = "postgres"
LOG = "server.log"
SETTINGS = """
# sublet's embedded server. Edit freely: this file is read at every start.
listen_addresses = ''
max_connections = 200
shared_buffers = 128MB
max_wal_size = 4GB
checkpoint_timeout = 15min
log_min_messages = warning
log_checkpoints = off
"""


class EmbeddedPostgres:
    """The server of one data directory, used by this process from `start` to `stop` (or as a context manager)."""

    def __init__(self, data_dir: Path | str) -> None:
        self.data_dir = Path(data_dir).expanduser().resolve()
        self._cluster = self.data_dir / "pg"
        self._users: int | None = None
        self._user: PostgresOsUser | None = None
        self._binaries = Path()
        self._sockets: Path | None = None

    def __enter__(self) -> EmbeddedPostgres:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Return the URL to connect to while the server is in use."""
        return f"postgresql://{SUPERUSER}@/postgres?host={quote(str(self._find_socket_directory()))}&port={PORT}"

    def start(self) -> str:
        """Join the server, starting it (and making its cluster) if it does not run; return its URL. Harmless when
        repeated.

        Raise `EmbeddedDirectoryUnusable`, or `DatabaseUnreachable` with the end of the server's log.
        """
        self._user = find_server_user(self.data_dir)
        _make(self.data_dir, self._user)
        with self._hold_server_lock():
            self._acquire_user_lock()
            try:
                self._binaries = find_binaries(self.data_dir, self._user)
                self._initialise()
                self._run()
                self._watch()
            except BaseException:
                self._close_locks()
                raise
        return self.url

    def stop(self) -> None:
        """Release the server; the last user stops it, and returns when it has stopped."""
        if self._users is None:
            return
        with self._hold_server_lock():
            self._close_locks()
            if self._has_no_user() and may_be_stopped(str(self._postmaster), str(self._cluster)):
                directory = self._find_socket_directory()
                self._run_program(self._make_stop_command())
                with contextlib.suppress(OSError):  # not empty: the server did not stop
                    directory.rmdir()

    def _acquire_user_lock(self) -> None:
        if self._users is None:
            self._users = self._open("users.lock", os.O_RDWR | os.O_CREAT)
            fcntl.flock(self._users, fcntl.LOCK_SH)

    def _open(self, name: str, flags: int) -> int:
        """Open a file in the data directory, after checking that no other user can have put it there. Return its
        descriptor."""
        with name_directory_in_errors(self.data_dir):
            return open_file(self.data_dir / name, flags, list_other_owners(self._user))

    def _close_locks(self) -> None:
        """Close the lock files without unlocking them: a forked child must not release its parent's locks."""
        if self._users is not None:
            os.close(self._users)
            self._users = None

    def _has_no_user(self) -> bool:
        """Return whether no process uses the server."""
        users = self._open("users.lock", os.O_RDWR)
        try:
            return _is_only_user(users)
        finally:
            os.close(users)

    @contextlib.contextmanager
    def _hold_server_lock(self) -> Iterator[None]:
        lock = self._open("server.lock", os.O_RDWR | os.O_CREAT)
        try:
            _lock_within(lock, self.data_dir, LOCK_TIMEOUT_S)
            yield
        finally:
            os.close(lock)

    def _initialise(self) -> None:
        """Create the cluster under another name first; remove what an interrupted attempt left."""
        if self._cluster.exists():
            return
        for remains in self.data_dir.glob("making-*"):
            shutil.rmtree(remains, ignore_errors=True)
        making = Path(tempfile.mkdtemp(prefix="making-", dir=self.data_dir))
        chown_to(making, self._user)
        options: list[str | Path] = ["--encoding=UTF8", "--locale=C", "--data-checksums", f"--username={SUPERUSER}"]
        options += ["--auth-local=trust", "--auth-host=scram-sha-256", "--no-instructions"]
        code, output = self._run_program([self._binaries / "initdb", "-D", making, *options])
        if code != 0:
            shutil.rmtree(making, ignore_errors=True)
            raise EmbeddedDirectoryUnusable(f"initdb failed for data directory {self.data_dir}: {output.strip()}")
        with open(self._open(f"{making.name}/postgresql.conf", os.O_WRONLY | os.O_APPEND), "a") as settings:
            settings.write(SETTINGS)
            settings.flush()
            os.fsync(settings.fileno())
        making.rename(self._cluster)
        _sync_directory(self.data_dir)

    def _run(self) -> None:
        """Start the server unless it answers; try again while it recovers, or its dead forerunner is being reaped."""
        began = time.monotonic()
        output = ""
        while (answer := self._is_ready()) != 0:
            elapsed_s = time.monotonic() - began
            if elapsed_s > START_TIMEOUT_S:
                raise DatabaseUnreachable(
                    f"the embedded server of {self.data_dir} did not start within {START_TIMEOUT_S:g} s: "
                    f"{output.strip()}\n{self._read_log_tail()}\nThe whole log is {self._log}."
                )
            if answer == 1:
                time.sleep(0.05)
                continue
            if elapsed_s > ZOMBIE_TIMEOUT_S:
                self._remove_stale_lock_files()
            code, output = self._run_program(self._make_start_command())
            if code != 0:
                time.sleep(0.1)

    def _is_ready(self) -> int:
        """Return the status of pg_isready: 0 accepts connections, 1 rejects them for now, 2 no response."""
        command: list[str | Path] = [
            self._binaries / "pg_isready",
            "-q",
            "-t",
            "3",
            "-h",
            self._find_socket_directory(),
            "-p",
            str(PORT),
        ]
        return self._run_program(command)[0]

    def _list_socket_locks(self) -> list[str]:
        return [str(self._find_socket_directory() / f".s.PGSQL.{PORT}.lock")]

    def _remove_stale_lock_files(self) -> None:
        """Drop lock files that keep the server from starting for ever. Numbers of other processes mean nothing where
        others use the directory: their server may run in another container, which numbers its processes itself."""
        files = [*self._list_socket_locks(), str(self._postmaster)]
        remove_stale_lock_files(files)
        assert self._users is not None
        if _is_only_user(self._users):
            for file in files:
                if is_of_another(file, str(self._cluster)):
                    os.unlink(file)

    def _watch(self) -> None:
        """Ensure that there is a watchdog: the process that gets its lock starts one, which inherits the lock."""
        lock = self._open("watchdog.lock", os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            subprocess.run(
                [sys.executable, "-I", "-S", Path(__file__).with_name("watchdog.py"), self._encode_watchdog_spec(lock)],
                check=True,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                cwd="/",
                pass_fds=[lock],
                start_new_session=True,
            )
        except BlockingIOError:
            pass
        finally:
            os.close(lock)

    def _encode_watchdog_spec(self, lock: int) -> str:
        spec = {
            "users": str(self.data_dir / "users.lock"),
            "server": str(self.data_dir / "server.lock"),
            "lock": lock,
            "cluster": str(self._cluster),
            "log": str(self._log),
            "sockets": self._list_socket_locks(),
            "start": self._make_server_user_command(self._make_start_command()),
            "stop": self._make_server_user_command(self._make_stop_command()),
        }
        return json.dumps(spec)

    def _make_start_command(self) -> Sequence[str | Path]:
        """Return the start command. pg_ctl runs a shell, so only the socket's path is in it, quoted for the shell and
        Postgres."""
        directory = '"' + str(self._find_socket_directory()).replace('"', '""') + '"'
        options = f"-k {shlex.quote(directory)} -p {PORT}"
        return [self._binaries / "pg_ctl", "start", "-w", "-t", "30", "-l", LOG, "-o", options]

    def _make_stop_command(self) -> Sequence[str | Path]:
        return [self._binaries / "pg_ctl", "stop", "-w", "-t", "60", "-m", "fast", "-D", self._cluster]

    def _run_program(self, command: Sequence[str | Path]) -> tuple[int, str]:
        """Run a program as the server's user; return its exit code and its output, which goes to a file: a pipe would
        be inherited by the server."""
        with tempfile.TemporaryFile() as output:
            done = subprocess.run(
                self._make_server_user_command(command),
                check=False,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=self._cluster if self._cluster.exists() else "/",
                env=make_environment(str(self._cluster)),
                start_new_session=True,
            )
            output.seek(0)
            return done.returncode, output.read().decode(errors="replace")

    def _make_server_user_command(self, command: Sequence[str | Path]) -> list[str]:
        parts = [str(part) for part in command]
        return parts if self._user is None else self._user.command(parts)

    def _find_socket_directory(self) -> Path:
        """Return the socket's directory from line 5 of a running server's lock file, if it is this directory's and the
        socket's is the server's own; else where it shall be."""
        with contextlib.suppress(OSError, ValueError):
            _, cluster, _, _, sockets, *_ = self._postmaster.read_text().split("\n")
            owner = self._cluster.stat().st_uid
            if sockets and self._cluster.samefile(cluster) and is_private_directory(Path(sockets), owner):
                return Path(sockets)
        if self._sockets is None or not self._sockets.is_dir():  # one of a taken name is made anew each time
            self._sockets = choose_socket_directory(self.data_dir, self._user)
        return self._sockets

    @property
    def _postmaster(self) -> Path:
        return self._cluster / "postmaster.pid"

    @property
    def _log(self) -> Path:
        return self._cluster / LOG

    def _read_log_tail(self) -> str:
        with (
            contextlib.suppress(EmbeddedDirectoryUnusable),
            open(self._open(f"pg/{LOG}", os.O_RDONLY), errors="replace") as log,
        ):
            return "".join(log.readlines()[-12:]).rstrip()
        return ""


def _make(data_dir: Path, user: PostgresOsUser | None) -> None:
    """Create the directory if it is missing, accessible for the server's user; one that exists is left as it is."""
    with name_directory_in_errors(data_dir):
        os.close(open_directory(data_dir, list_other_owners(user), make=True))
        if not os.access(data_dir, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"no right to write in {data_dir}")


def _is_only_user(users: int) -> bool:
    """Return whether no other process uses the server, and hold the lock as one that does. Retries, as the watchdog may
    hold it for a moment."""
    for _ in range(3):
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            pass
        finally:
            fcntl.flock(users, fcntl.LOCK_SH)
    return False


def _lock_within(lock: int, data_dir: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise DatabaseUnreachable(
                    f"another process has been starting or stopping the embedded server of {data_dir} for "
                    f"{timeout_s:g} s. Find it (`fuser {data_dir}/server.lock`) and end it."
                ) from None
            time.sleep(0.01)
        except OSError as error:
            raise EmbeddedDirectoryUnusable(
                f"data directory {data_dir} is on a filesystem without file locks ({error}). Choose a local one."
            ) from None


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
