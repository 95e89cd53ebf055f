"""Runs the command line as real processes."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tests.fork_server import FORK_SERVER, Forked
from tests.kit import eventually

REPOSITORY = Path(__file__).parents[2]
TIMEOUT_S = 60.0
COMMAND_LINE = "sublet.cli"

QUICK = {
    "SUBLET_LEASE_DURATION_S": "3",
    "SUBLET_LEASE_RENEW_INTERVAL_S": "1",
    "SUBLET_LEASE_MARGIN_S": "0.9",
    "SUBLET_POLL_HOLD_S": "1",
}
"""A lease short enough to be waited for, and long enough for a busy machine."""


@dataclass(frozen=True, slots=True)
class Answer:
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def object(self) -> Any:
        (found,) = self.lines
        return found


class Running:
    """A command under way. Its stdout and stderr go to files, so that it never waits for a reader. `argv`: a program to
    begin anew, instead of a command in a process that begins with all imported."""

    def __init__(
        self, arguments: Sequence[str], environment: dict[str, str], argv: Sequence[str] = (), stdin: int | None = None
    ) -> None:
        self._out, self._err = (tempfile.TemporaryFile("w+") for _ in range(2))  # noqa: SIM115 - they outlive this
        self.process: Forked | subprocess.Popen[bytes]
        if argv:
            self.process = subprocess.Popen(
                [*argv, *arguments],
                cwd=REPOSITORY,
                env=environment,
                stdin=subprocess.DEVNULL if stdin is None else stdin,
                stdout=self._out,
                stderr=self._err,
            )
            return
        with Path(os.devnull).open() as nothing:
            streams = nothing.fileno(), self._out.fileno(), self._err.fileno()
            self.process = FORK_SERVER.start(COMMAND_LINE, arguments, REPOSITORY, environment, *streams)

    @property
    def stdin(self) -> IO[bytes]:
        """Return its input, if it was started with a pipe."""
        assert isinstance(self.process, subprocess.Popen)
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def out(self) -> str:
        return _text(self._out)

    @property
    def err(self) -> str:
        return _text(self._err)

    def output(self) -> str:
        return self.out + self.err

    def says(self, text: str) -> None:
        """Wait until it has said that on stdout or stderr."""
        eventually(
            lambda: text in self.out + self.err or self._is_over(), TIMEOUT_S, lambda: self.out[-500:] + self.err
        )
        assert text in self.out + self.err, self.out[-500:] + self.err

    @property
    def address(self) -> str:
        """Return the address of a node, once it serves."""
        self.says("serves on")
        (address,) = re.findall(r"serves on (\S+:\d+)", self.out + self.err)
        return str(address)

    def ask(self, number: signal.Signals) -> Answer:
        self.process.send_signal(number)
        return self.end()

    def end(self) -> Answer:
        code = self.process.wait(TIMEOUT_S)
        return Answer(code, self.out, self.err)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def _is_over(self) -> bool:
        return self.process.poll() is not None


class Shell:
    """Commands in one environment, `database` or `data_dir`; those still running when it ends are stopped."""

    def __init__(self, **settings: str) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith("SUBLET_")}
        self.environment = clean | QUICK | settings
        self.directory = REPOSITORY
        self.forks = True  # a forked process has another command line and environment in /proc
        self._running: list[Running] = []

    @staticmethod
    def argv(*arguments: str) -> list[str]:
        return [sys.executable, "-m", COMMAND_LINE, *arguments]

    def start(self, *arguments: str, stdin: int | None = None, program: str | None = None) -> Running:
        """Begin a command; `program` is a Python text to run instead of the command line itself."""
        argv = [] if self.forks and stdin is None else self.argv()
        if program is not None:
            argv = [sys.executable, "-c", program]
        running = Running(arguments, self.environment, argv, stdin)
        self._running.append(running)
        return running

    def run(self, *arguments: str, stdin: str | bytes = b"") -> Answer:
        """Run a command to its end, in a process that begins with all imported."""
        with (
            tempfile.TemporaryFile() as given,
            tempfile.TemporaryFile("w+") as out,
            tempfile.TemporaryFile("w+") as err,
        ):
            given.write(stdin.encode() if isinstance(stdin, str) else stdin)
            given.seek(0)
            streams = given.fileno(), out.fileno(), err.fileno()
            command = FORK_SERVER.start(COMMAND_LINE, arguments, self.directory, self.environment, *streams)
            try:
                return Answer(command.wait(TIMEOUT_S), _text(out), _text(err))
            finally:
                command.kill()
                command.wait()

    def leader(self, name: str, *arguments: str) -> Running:
        node = self.start("leader", "--name", name, "--listen", "127.0.0.1:0", *arguments)
        node.says(f"node {name} serves on")
        return node

    def newer_leader(self, name: str) -> Running:
        """A node of a release that speaks another protocol version."""
        program = (
            "import sublet_protocol.messages.borrower_leader as m, sys; m.PROTOCOL_VERSION += 1\n"
            "sys.argv[0] = 'sublet'\nfrom sublet.cli import main\nmain()"
        )
        return self.start("leader", "--name", name, "--listen", "127.0.0.1:0", program=program)

    def stop(self) -> None:
        """End what runs: nodes last, so that consumers can leave."""
        for running in reversed(self._running):
            if running.process.poll() is None:
                running.process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    running.process.wait(20)
                running.kill()


@contextlib.contextmanager
def a_shell(**settings: str) -> Iterator[Shell]:
    shell = Shell(**settings)
    try:
        yield shell
    finally:
        shell.stop()


def done(answer: Answer) -> Any:
    """Return the output of a command that succeeded."""
    assert answer.code == 0, answer.err
    return answer.object


def refused(answer: Answer, code: int, *reported: str) -> None:
    """One sentence that names everything it should."""
    assert (answer.code, answer.out) == (code, ""), answer.err
    assert "Traceback" not in answer.err
    for text in reported:
        assert text in answer.err, answer.err


def _text(file: IO[str]) -> str:
    """Return the text from the beginning, without moving the end at which the process writes."""
    return os.pread(file.fileno(), os.fstat(file.fileno()).st_size, 0).decode()
