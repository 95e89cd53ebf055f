"""Restarts an embedded server that dies in use, and stops it after its last user.

This also holds if users or the server are killed. It is a separate program, run as `python -I -S watchdog.py CONFIG` by
the process that starts the server, with the locked `watchdog.lock` inherited. CONFIG is a JSON object: `users` and
`server` (the lock files), `lock` (the inherited descriptor), `cluster` (the server's directory), `log` (the server's
log file in it), `sockets` (lock files of its sockets), `start` and `stop` (commands). Standard library only: it must
start in milliseconds and outlive every environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

POLL_INTERVAL_S = 0.5
"""Between two checks of a server that is used."""

BACKOFF_MAX_S = 30.0
"""Between two attempts to start one that dies again and again; the first is made at once."""

STEADY_S = 60.0
"""Seconds after which a running server counts as steady, and the backoff starts again."""

ZOMBIE_TIMEOUT_S = 2.0
"""How long a dead postmaster may wait to be reaped before its lock files are taken away."""


def main(spec: dict[str, Any]) -> None:
    """Leave the starter's process tree, then wait."""
    if os.fork() != 0:
        os._exit(0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    users = os.open(spec["users"], os.O_RDWR | os.O_NOFOLLOW)
    server = os.open(spec["server"], os.O_RDWR | os.O_NOFOLLOW)
    threading.Thread(target=_revive, args=(spec,), daemon=True).start()
    while not _try_stop(spec, users, server):
        pass


# --- the last user is gone --------------------------------------------------------------------------------------------


def _try_stop(spec: dict[str, Any], users: int, server: int) -> bool:
    """Wait until there seems to be no user; then look again with the server's lock held, and stop it if there is
    none. Return whether there was none."""
    fcntl.flock(users, fcntl.LOCK_EX)
    fcntl.flock(users, fcntl.LOCK_UN)
    fcntl.flock(server, fcntl.LOCK_EX)
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(server, fcntl.LOCK_UN)
        return False
    if _is_still(users, spec["users"]) and may_be_stopped(_format_pid_path(spec), spec["cluster"]):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            _run_command(spec, "stop", subprocess.DEVNULL)
    os.close(spec["lock"])  # before the server's lock is dropped: the next starter must find it free
    return True


# --- the server is gone -----------------------------------------------------------------------------------------------


def _revive(spec: dict[str, Any]) -> None:
    """Start the server whenever it is found dead while it is used; a thread, which ends with the process."""
    users = os.open(spec["users"], os.O_RDWR | os.O_NOFOLLOW)
    server = os.open(spec["server"], os.O_RDWR | os.O_NOFOLLOW)
    pause_s, started_at = 0.0, time.monotonic()
    while True:
        time.sleep(POLL_INTERVAL_S)
        if _is_running(spec):
            continue
        if time.monotonic() - started_at > STEADY_S:
            pause_s = 0.0
        time.sleep(pause_s)
        fcntl.flock(server, fcntl.LOCK_EX)  # a process that starts or stops it now comes first
        try:
            if _is_used(users, spec["users"]) and not _is_running(spec):
                _start(spec)
                pause_s, started_at = min(max(POLL_INTERVAL_S, 2 * pause_s), BACKOFF_MAX_S), time.monotonic()
        finally:
            fcntl.flock(server, fcntl.LOCK_UN)


def _is_running(spec: dict[str, Any]) -> bool:
    """Return whether the process of the server's lock file runs and is a Postgres: process ids are reused."""
    pid = _read_pid(_format_pid_path(spec))
    if pid is None:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    status = _read_status(pid)
    return status is None or (status[0] == "postgres" and status[1] != "Z")


def _is_used(users: int, path: str) -> bool:
    """Return whether a process uses the server; called with the server's lock held."""
    if not _is_still(users, path):
        return False
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    fcntl.flock(users, fcntl.LOCK_UN)
    return False


def _start(spec: dict[str, Any]) -> None:
    """Make one attempt; it is written to the server's log with the programs' output."""
    with _open_log(spec) as log:
        _write_log(log, "server ended unexpectedly, restarting")
        deadline = time.monotonic() + ZOMBIE_TIMEOUT_S
        while is_zombie(_format_pid_path(spec)) and time.monotonic() < deadline:
            time.sleep(0.05)
        remove_stale_lock_files([*spec["sockets"], _format_pid_path(spec)])
        try:
            code = _run_command(spec, "start", log)
            _write_log(log, "server restarted" if code == 0 else "server not restarted, retrying")
        except (OSError, subprocess.SubprocessError) as error:
            _write_log(log, f"server not restarted, retrying: {error}")


def _write_log(log: int, text: str) -> None:
    when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
    with contextlib.suppress(OSError):
        os.write(log, f"{when} [{os.getpid()}] watchdog: {text}\n".encode())


@contextlib.contextmanager
def _open_log(spec: dict[str, Any]) -> Iterator[int]:
    """Yield the descriptor of the server's log, or of the null device if it cannot be opened: that must not keep the
    server down."""
    try:
        log = os.open(spec["log"], os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
        status = os.fstat(log)
        if status.st_nlink > 1 or status.st_uid != os.stat(spec["cluster"], follow_symlinks=False).st_uid:
            os.close(log)
            raise PermissionError
    except OSError:
        log = os.open(os.devnull, os.O_WRONLY)
    try:
        yield log
    finally:
        os.close(log)


# --- what both need, and the users of this module ---------------------------------------------------------------------


def make_environment(cluster: str) -> dict[str, str]:
    """Return what the programs of a server are run with: of ours only what they need, as other programs of its user can
    read it."""
    variables = {name: os.environ[name] for name in ("LD_LIBRARY_PATH", "PATH", "TZ") if name in os.environ}
    return variables | {"LC_ALL": "C", "PGDATA": cluster}


def is_zombie(lock_file: str) -> bool:
    """Return whether the postmaster that wrote this file is dead but not reaped: signals to it succeed and have no
    effect."""
    pid = _read_pid(lock_file)
    status = None if pid is None else _read_status(pid)
    return status is not None and status[1] == "Z"


def is_of_another(lock_file: str, cluster: str) -> bool:
    """Return whether the process that has the number in this file is certainly none of the server in that directory:
    numbers are used again, and files are copied with their directory."""
    pid = _read_pid(lock_file)
    status = None if pid is None else _read_status(pid)
    if status is None:
        return False
    if status[0] != "postgres":
        return True
    for directory in (_read_directory(lock_file), f"/proc/{pid}/cwd"):
        with contextlib.suppress(OSError):  # gone, or another user's
            if not os.path.samefile(directory, cluster):
                return True
    return False


def may_be_stopped(lock_file: str, cluster: str) -> bool:
    """Return whether a signal to the process with the number in this file can stop the server, and nobody else."""
    return not (is_zombie(lock_file) or is_of_another(lock_file, cluster))


def remove_stale_lock_files(lock_files: Iterable[str]) -> None:
    """Drop the lock files of a postmaster that is a zombie: an init that does not reap would keep it for ever.

    Its children, if any lived, still hold the shared memory segment, and the next server refuses to start.
    """
    for lock_file in lock_files:
        if is_zombie(lock_file):
            os.unlink(lock_file)


def _run_command(spec: dict[str, Any], which: str, output: int) -> int:
    return subprocess.run(
        spec[which],
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        check=False,
        cwd=spec["cluster"],
        env=make_environment(spec["cluster"]),
        timeout=120,
        start_new_session=True,
    ).returncode


def _format_pid_path(spec: dict[str, Any]) -> str:
    return os.path.join(spec["cluster"], "postmaster.pid")


def _is_still(descriptor: int, path: str) -> bool:
    """Return False if the data directory was deleted, and perhaps created anew: that server is another one."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def _read_pid(lock_file: str) -> int | None:
    try:
        with open(lock_file) as file:
            return int(file.readline())
    except (OSError, ValueError):
        return None


def _read_directory(lock_file: str) -> str:
    """Return the directory of the server that wrote it; "" if it has none."""
    try:
        with open(lock_file) as file:
            return [*file.read().split("\n"), ""][1]
    except OSError:
        return ""


def _read_status(pid: int) -> tuple[str, str] | None:
    """Return a process's name and state, where there is a /proc."""
    try:
        with open(f"/proc/{pid}/stat") as status:
            name_part, _, state_part = status.read().rpartition(")")
            return name_part.partition("(")[2], state_part.split()[0]
    except (OSError, IndexError):
        return None


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
