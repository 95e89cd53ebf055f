"""The watchdog's program, with a server that is only a lock file and commands that note that they were run."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from sublet_storage.bootstrap.embedded import watchdog
from tests.kit import eventually, waiting_for


class Watched:
    """A data directory with a watchdog. The caller uses the server, and holds the lock of who starts and stops it."""

    def __init__(self, home: Path) -> None:
        self.cluster = home / "pg"
        self.cluster.mkdir()
        self.pid_file, self.log = self.cluster / "postmaster.pid", self.cluster / "server.log"
        self.ran, self.users_lock = home / "ran", home / "users.lock"
        self.log.touch()
        self.ran.touch()
        self.users, self.server, self.alive = map(self._locked, (self.users_lock, home / "server.lock", home / "alive"))
        spec = {
            "users": str(self.users_lock), "server": str(home / "server.lock"), "lock": self.alive.fileno(),
            "cluster": str(self.cluster), "log": str(self.log), "sockets": [],
            **{each: ["/bin/sh", "-c", f"echo {each} >> '{self.ran}'"] for each in ("start", "stop")},
        }  # fmt: skip
        command = [sys.executable, "-I", "-S", watchdog.__file__, json.dumps(spec)]
        subprocess.run(command, check=True, pass_fds=[self.alive.fileno()], start_new_session=True)
        self.alive.close()
        self.looks()

    def _locked(self, path: Path) -> TextIO:
        file = path.open("w")
        fcntl.flock(file, fcntl.LOCK_SH if path == self.users_lock else fcntl.LOCK_EX)
        return file

    def looks(self, times: int = 1) -> None:
        """It has seen that the server is gone, or that nobody uses it, and waits for the lock."""
        eventually(lambda: waiting_for(self.server) == times)

    def acts(self, *ran: str) -> None:
        """Let it do what it waits to do, after which it has run these commands in all."""
        fcntl.flock(self.server, fcntl.LOCK_UN)
        eventually(lambda: self.ran.read_text().split() == [*ran])
        fcntl.flock(self.server, fcntl.LOCK_EX)

    def end(self) -> list[str]:
        """Leave; return all commands that it has run, when it has ended."""
        self.users.close()
        self.looks(2)
        self.server.close()
        with (self.ran.parent / "alive").open() as alive:
            fcntl.flock(alive, fcntl.LOCK_EX)
        return self.ran.read_text().split()


@pytest.fixture
def postgres(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Yield a process of that name, which ends with its stdin."""
    shutil.copy("/bin/cat", tmp_path / "postgres")
    with subprocess.Popen([tmp_path / "postgres"], stdin=subprocess.PIPE) as process:
        yield process


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    watched = Watched(tmp_path)
    yield watched
    if not watched.users.closed:
        watched.end()


def test_the_watchdog_starts_what_is_gone(watched: Watched) -> None:
    """Also where its process id is another program's by now, which is not stopped."""
    watched.acts("start")  # there is no lock file
    assert "watchdog: server restarted" in watched.log.read_text()
    watched.pid_file.write_text(f"{os.getpid()}\n")
    watched.looks()
    watched.acts("start", "start")
    assert watched.end() == ["start"] * 2


def test_the_watchdog_takes_a_zombies_lock(watched: Watched, postgres: subprocess.Popen[bytes]) -> None:
    """Nobody reaps it; to stop it would take a minute."""
    watched.pid_file.write_text(f"{postgres.pid}\n")
    assert postgres.stdin is not None
    postgres.stdin.close()
    eventually(lambda: watchdog.is_zombie(str(watched.pid_file)))
    watched.acts("start")
    assert not watched.pid_file.exists()
    watched.looks()
    watched.pid_file.write_text(f"{postgres.pid}\n")
    assert watched.end() == ["start"]


def test_the_watchdog_leaves_a_new_directory(watched: Watched) -> None:
    """The one that it was for was deleted."""
    watched.users_lock.unlink()
    watched.users_lock.touch()
    assert watched.end() == []


def test_the_watchdog_writes_to_its_own_log(watched: Watched) -> None:
    """Not into a file that has another name."""
    (watched.cluster / "another").hardlink_to(watched.log)
    watched.acts("start")
    assert watched.log.read_text() == ""
