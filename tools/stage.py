"""A Postgres of its own, with processes of sublet's commands on it: for a page's output and for pictures."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sublet.demo.child_processes import remove_settings
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.db.connect import connect
from tools.source_path import source_path

ROOT = Path(__file__).resolve().parent.parent
WAIT_S = 60.0


@contextmanager
def stage(settings: Mapping[str, str]) -> Iterator[Stage]:
    """Start a Postgres for the `with` block. `settings`: environment variables of the commands."""
    remove_settings()
    with tempfile.TemporaryDirectory(prefix="sublet-stage-") as directory:
        Path(directory).chmod(0o755)  # a server started by root runs as another user
        with EmbeddedPostgres(Path(directory) / "data") as server:
            migrate(server.url)
            play = Stage(server.url, Path(directory), settings)
            try:
                yield play
            finally:
                play.end(*play.running, kill=True)


class Stage:
    """Runs commands, in the foreground and the background."""

    def __init__(self, url: str, directory: Path, settings: Mapping[str, str]) -> None:
        self.url, self.running, self._directory = url, dict[str, subprocess.Popen[bytes]](), directory
        self._environment = {**os.environ, **settings, "SUBLET_DATABASE_URL": url, "PYTHONPATH": source_path(ROOT)}

    def run(self, command: str, stdin: bytes = b"") -> str:
        """Return what a command line prints, stdout first, with a last line for an exit code other than 0."""
        shell = command.replace("sublet ", f"{sys.executable} -m sublet.cli ")
        done = subprocess.run(
            ["bash", "-c", shell], env=self._environment, input=stdin, capture_output=True, timeout=WAIT_S, check=False
        )
        lines = (done.stdout + done.stderr).decode().splitlines()
        ending = [f"[exit code {done.returncode}]"] if done.returncode else []
        return "".join(f"{line.rstrip()}\n" for line in lines + ending)

    def start(self, name: str, *arguments: str) -> None:
        """Start a command in the background."""
        argv = [sys.executable, "-m", "sublet.cli", *arguments]
        with (self._directory / name).open("wb") as output:
            self.running[name] = subprocess.Popen(
                argv, env=self._environment, stdin=subprocess.DEVNULL, stdout=output, stderr=output
            )

    def output(self, name: str) -> str:
        """Return what a command in the background has printed."""
        return (self._directory / name).read_text()

    def end(self, *names: str, kill: bool = False) -> None:
        """Stop commands with SIGTERM, or with SIGKILL if `kill`."""
        for name in names:
            (self.running[name].kill if kill else self.running[name].terminate)()
        for name in names:
            self.running.pop(name).wait(WAIT_S)

    def serve(self, *names: str) -> None:
        """Start nodes with a web page, and wait until they are registered."""
        for name in names:
            self.start(name, "leader", "--name", name, "--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
        self.until(f"select count(*) >= {len(names)} from node where expires_at > clock_timestamp()")
        self.until("select exists (select from leadership where leadership_id = 0 and expires_at > clock_timestamp())")

    def until(self, question: str) -> None:
        """Wait until the query returns true. Raise `TimeoutError` if it does not."""
        deadline = time.monotonic() + WAIT_S
        with connect(self.url) as connection:
            while connection.execute(question).fetchone() != (True,):
                if time.monotonic() > deadline:
                    raise TimeoutError(question)
                time.sleep(0.05)
