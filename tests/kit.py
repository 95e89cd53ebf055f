"""Helpers shared by all tests."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import tempfile
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast
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


def in_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test that is a coroutine in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


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
