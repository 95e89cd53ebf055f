"""Stops an embedded server when its last user is gone, however that user went. A program of its own.

Run as `python -I -S watchdog.py STORY` by whoever starts the server, with the locked `watchdog.lock` inherited. STORY
is a JSON object: `users` and `server` (the lock files), `lock` (the inherited descriptor), `postmaster` (the server's
own lock file), `stop` (the command) and `options` (as whom to run it). Standard library only: it must start in
milliseconds and outlive every environment.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from typing import Any


def main(story: dict[str, Any]) -> None:
    """Leave the starter's process tree, then wait."""
    if os.fork() != 0:
        os._exit(0)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    users = os.open(story["users"], os.O_RDWR)
    server = os.open(story["server"], os.O_RDWR)
    while not _stopped(story, users, server):
        pass


def _stopped(story: dict[str, Any], users: int, server: int) -> bool:
    """Wait until there seems to be no user; then look again with the server's lock held, and stop it."""
    fcntl.flock(users, fcntl.LOCK_EX)
    fcntl.flock(users, fcntl.LOCK_UN)
    fcntl.flock(server, fcntl.LOCK_EX)
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        fcntl.flock(server, fcntl.LOCK_UN)
        return False
    if _is_still(users, story["users"]) and not is_zombie(story["postmaster"]):
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                story["stop"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                check=False,
                cwd="/",
                timeout=120,
                **story["options"],
            )
    os.close(story["lock"])  # before the server's lock is dropped: the next starter must find it free
    return True


def _is_still(descriptor: int, path: str) -> bool:
    """False if the data directory was deleted, and perhaps made anew: that server is not ours to stop."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def is_zombie(lock_file: str) -> bool:
    """Whether the postmaster that wrote this file is dead and was not reaped: signals to it succeed, and do nothing."""
    try:
        with open(lock_file) as lines:
            pid = int(lines.readline())
        with open(f"/proc/{pid}/stat") as status:
            return status.read().rpartition(")")[2].split()[0] == "Z"
    except (OSError, ValueError, IndexError):
        return False


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
