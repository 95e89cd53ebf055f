"""A process that has imported the command line, and forks for each command: a process of its own, without the half
second that the imports take.

It is asked through its stdin, a socket, and ends with it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import sublet.cli
import sublet_storage

FROM_TYPER = ("typer._adapters", "rich.console")
"""What it loads for its first value and its first help."""
STREAMS = 3
NUMBER = struct.Struct("<i")


class CommandServer:
    """Starts one with its first command; it ends by `close`, or with this process."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def run(
        self, argv: list[str], cwd: Path, environment: dict[str, str], streams: tuple[int, int, int], timeout_s: float
    ) -> int:
        """Return the exit code of a command, negative for a signal. Raise `TimeoutError`, and kill it, after that."""
        if self._server is None or self._server.poll() is not None:
            self._start()
        assert self._channel is not None
        asking, answering = socket.socketpair()
        with asking:
            asking.settimeout(timeout_s)
            with answering:
                socket.send_fds(self._channel, [b"!"], [answering.fileno(), *streams])
            wanted = json.dumps([argv, str(cwd), environment]).encode()
            asking.sendall(NUMBER.pack(len(wanted)) + wanted)
            pid = _number(asking)
            try:
                return os.waitstatus_to_exitcode(_number(asking))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise

    def close(self) -> None:
        """End it, if there is one."""
        if self._server is not None and self._channel is not None:
            self._channel.close()
            self._server.wait()
            self._server = self._channel = None

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __name__]
            self._server = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)


def _number(connection: socket.socket) -> int:
    return int(NUMBER.unpack(_read(connection, NUMBER.size))[0])


def _read(connection: socket.socket, size: int) -> bytes:
    taken = b""
    while len(taken) < size:
        more = connection.recv(size - len(taken))
        if not more:
            raise ConnectionError("the other side has gone")
        taken += more
    return taken


def _serve() -> list[str]:
    """Fork for whoever asks. Return, in the child, its arguments."""
    with selectors.DefaultSelector() as selector, socket.socket(fileno=os.dup(sys.stdin.fileno())) as channel:
        selector.register(channel, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not channel:
                    key.data()
                    continue
                _asked, given, _flags, _from = socket.recv_fds(channel, 1, 1 + STREAMS)
                if not given:
                    sys.exit()
                answering, *streams = given
                connection = socket.socket(fileno=answering)
                argv, cwd, environment = json.loads(_read(connection, _number(connection)))
                if (pid := os.fork()) == 0:
                    connection.close()
                    _become(cwd, environment, streams)
                    return list(argv)
                for each in streams:
                    os.close(each)
                connection.sendall(NUMBER.pack(pid))
                _report_end(selector, connection, pid)


def _report_end(selector: selectors.BaseSelector, connection: socket.socket, pid: int) -> None:
    """Once that child has ended, say how."""
    ending = os.pidfd_open(pid)

    def ended() -> None:
        selector.unregister(ending)
        os.close(ending)
        with connection, contextlib.suppress(BrokenPipeError):  # who asked does not wait any more
            connection.sendall(NUMBER.pack(os.waitpid(pid, 0)[1]))

    selector.register(ending, selectors.EVENT_READ, ended)


def _become(cwd: str, environment: dict[str, str], streams: list[int]) -> None:
    """What a process has that was started for this command."""
    for wanted, given in enumerate(streams):
        os.dup2(given, wanted)
        os.close(given)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)


def _import_all() -> None:
    """All but grpc: Arrow's threads are made for a fork, those of grpc are not."""
    for package in (sublet.cli, sublet_storage):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name in FROM_TYPER:
        importlib.import_module(name)
    assert "grpc" not in sys.modules


def main() -> None:
    _import_all()
    gc.freeze()  # or a child that ends would look for garbage among all of it
    sys.argv = ["sublet", *_serve()]
    runpy.run_module("sublet.cli", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
