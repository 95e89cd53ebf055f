"""Helpers shared by all tests."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ParamSpec, Self, TextIO, TypeVar, cast
from urllib.parse import urlsplit, urlunsplit

import pytest

from sublet_protocol.domain.grant_keys import GrantSecret

P = ParamSpec("P")
T = TypeVar("T")

GRANT_KEY = GrantSecret(bytes(range(GrantSecret.BYTES)))
"""Key of grants whose key does not matter."""

REMARKS = pytest.StashKey[list[str]]()
"""Lines that a test leaves in its config's stash, to be shown at the end of the run."""


def same_name(value: object) -> str:
    """Return the `repr` for a test's id, without addresses, so that all workers use the same name."""
    return re.sub(r" at 0x[0-9a-f]+", "", ascii(value))


WAIT_S = 90.0
"""How long a fact is waited for that a quiet machine makes true within a second or a few."""


def eventually(
    fact: Callable[[], T | None], timeout_s: float = 10.0, message: str | Callable[[], str] = "", every_s: float = 0.01
) -> T:
    """Poll until `fact()` is true, and return what it returned; fail after `timeout_s`.

    An AssertionError inside `fact` counts as "not yet"; the last one is shown if the time runs out. `message` may be a
    function, called only then.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        failure: AssertionError | None = None
        value: T | None = None
        try:
            value = fact()
            if value:
                return value
        except AssertionError as error:
            failure = error
        if time.monotonic() > deadline:
            said = message() if callable(message) else message
            raise AssertionError(
                f"not true within {timeout_s:g} s: {said or fact!r} (last value: {value!r})"
            ) from failure
        time.sleep(every_s)


def waiting_for(locked: TextIO) -> int:
    """Return how many processes wait for a lock on this file."""
    inode = f":{os.fstat(locked.fileno()).st_ino} "
    return sum("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


def private_file(path: Path, content: str | bytes) -> Path:
    """Write a file that its user alone can read, and return its path."""
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    path.chmod(0o600)
    return path


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test that is a coroutine in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Background:
    """Does something again and again in a thread of its own while a block runs, until it fails, which the block raises.

    A step may return how much it has done. `resources` are closed when the thread has ended.
    """

    def __init__(self, step: Callable[[], int | None], every_s: float = 0.0) -> None:
        self.done = 0
        self.resources = ExitStack()
        self._step, self._every_s, self._over = step, every_s, threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(WAIT_S)
        self.resources.close()
        self._check()

    def more(self, count: int) -> None:
        """Wait until so much more has been done."""
        least = self.done + count
        eventually(lambda: self.done >= least or self._failure, WAIT_S, lambda: f"{self.done} of {least}")
        self._check()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            while not self._over.wait(self._every_s):
                count = self._step()
                self.done += 1 if count is None else count
        except BaseException as error:  # noqa: BLE001 raised where the block is
            self._failure = error


def for_root(test: Callable[P, None]) -> Callable[P, None]:
    """Collect a test only if it runs as root, for a server that root starts and that runs as another user."""
    return test if os.geteuid() == 0 else cast("Callable[P, None]", None)


def server_directory() -> Path:
    """Return a new temporary directory that a server started by root can enter too (unlike `tmp_path`)."""
    directory = Path(tempfile.mkdtemp(prefix="sublet-tests-"))
    directory.chmod(0o755)
    return directory


def database_of(server_url: str, name: str) -> str:
    """Return the URL of another database of the same server."""
    return urlunsplit(urlsplit(server_url)._replace(path=f"/{name}"))
