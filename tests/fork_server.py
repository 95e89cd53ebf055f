"""A server that has imported what the tests start, and forks a process for each request.

This saves the half second of the imports. It receives requests on its stdin, a socket, and ends when that is closed.
"""

from __future__ import annotations

import atexit
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
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import pyarrow

PACKAGES = ("sublet.cli", "sublet_storage", "sublet_leader", "sublet_borrower")
LEFT_OUT = (".__main__", ".spark")
"""Parts of names of modules that are not imported: they are main programs, or need Spark."""
FROM_TYPER = ("typer._adapters", "rich.console")
"""Modules that typer imports for its first value and its first help."""
STREAMS = 3
NUMBER = struct.Struct("<i")


class Forked:
    """A process forked by a server, with the part of `subprocess.Popen` that tests use."""

    def __init__(self, module: str, channel: socket.socket, pid: int, handle: int) -> None:
        self._module, self._channel, self._handle = module, channel, handle
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code. Raise `subprocess.TimeoutExpired` if it still runs after that."""
        if self.returncode is None:
            self._channel.settimeout(timeout)
            try:
                code = os.waitstatus_to_exitcode(_number(self._channel))
            except (TimeoutError, BlockingIOError):
                raise subprocess.TimeoutExpired(self._module, timeout or 0) from None
            self._channel.close()
            os.close(self._handle)
            self.returncode = code
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send the signal, unless the process has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Starts its process with the first request and ends it by `close`, or with this process."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None

    def start(
        self, module: str, arguments: Sequence[str], cwd: Path, environment: Mapping[str, str], *streams: int
    ) -> Forked:
        """Return a process that runs a module as its main program; `streams` are its stdin, stdout and stderr."""
        if self._server is None or self._server.poll() is not None:
            self._start()
        assert self._channel is not None
        asking, answering = socket.socketpair()
        with answering:
            socket.send_fds(self._channel, [b"!"], [answering.fileno(), *streams])
        wanted = json.dumps([module, list(arguments), str(cwd), dict(environment)]).encode()
        asking.sendall(NUMBER.pack(len(wanted)) + wanted)
        pid, (handle,), _flags, _from = socket.recv_fds(asking, NUMBER.size, 1)
        return Forked(module, asking, NUMBER.unpack(pid)[0], handle)

    def close(self) -> None:
        if self._server is not None and self._channel is not None:
            self._channel.close()
            self._server.wait()
            self._server = self._channel = None

    def _start(self) -> None:
        self._channel, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, "-m", __name__]
            self._server = subprocess.Popen(command, stdin=theirs.fileno(), start_new_session=True)


FORK_SERVER = ForkServer()


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


def _serve() -> tuple[str, list[str]]:
    """Fork for each request. Return, in the child, its module and its arguments."""
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
                module, arguments, cwd, environment = json.loads(_read(connection, _number(connection)))
                if (pid := os.fork()) == 0:
                    connection.close()
                    _become(module, cwd, environment, streams)
                    return module, arguments
                for each in streams:
                    os.close(each)
                _report_end(selector, connection, pid)


def _report_end(selector: selectors.BaseSelector, connection: socket.socket, pid: int) -> None:
    """Send the child's pid, and its exit code once it has ended."""
    ending = os.pidfd_open(pid)
    with contextlib.suppress(BrokenPipeError):  # the requester does not wait any more
        socket.send_fds(connection, [NUMBER.pack(pid)], [ending])

    def ended() -> None:
        selector.unregister(ending)
        os.close(ending)
        with connection, contextlib.suppress(BrokenPipeError):
            connection.sendall(NUMBER.pack(os.waitpid(pid, 0)[1]))

    selector.register(ending, selectors.EVENT_READ, ended)


def _become(module: str, cwd: str, environment: dict[str, str], streams: list[int]) -> None:
    """Set up the process as if it had been started for this module."""
    for wanted, given in enumerate(streams):
        os.dup2(given, wanted)
        os.close(given)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path not in sys.path]
    Path("/proc/self/comm").write_text(module[-15:])  # its name in the list of leftover processes


def _import_all() -> None:
    """Import all modules. Arrow's threads survive a fork, and grpc's are not started before its first use."""
    for name in PACKAGES:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            if not any(part in module.name for part in LEFT_OUT):
                importlib.import_module(module.name)
    for name in FROM_TYPER:
        importlib.import_module(name)
    pyarrow.scalar(0)  # loads pandas, which takes a consumer half a second


def main() -> None:
    _import_all()
    gc.freeze()  # else a child that ends would collect garbage among all of it
    module, arguments = _serve()
    sys.argv = ["sublet", *arguments]
    code: object = 0
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as error:
        code = error.code
    _end(code)


def _end(code: object) -> NoReturn:
    """End as the interpreter does, but without taking down all modules, which would copy most pages of the server."""
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are not daemons
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    main()
