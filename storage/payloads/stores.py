"""Writing, reading and deleting the objects of a place.

A write is whole and durable when it returns, or it is not there. On a file system that takes a file beside, fsync, a
rename, and fsync of the directory, which pyarrow does not do; S3 comes from pyarrow, which every executor has.

A place has a marker, written before its first object: where that is missing the place is away (not mounted, say, or
another bucket), and what is not found there is not lost.
"""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa

from protocol.errors import PayloadUnavailable
from storage.payloads.place import Place

MARKER: Final = ".sublet"
FIRST_PAUSE_S: Final = 0.2
LONGEST_PAUSE_S: Final = 5.0
CONNECT_TIMEOUT_S: Final = 5.0
REQUEST_TIMEOUT_S: Final = 10.0
ATTEMPTS: Final = 2

Payload = bytes | memoryview
_T = TypeVar("_T")


class Missing(Exception):
    """There is no such object, and its place is there."""


class Backend(Protocol):
    """Names are relative to the place. All raise `OSError`, `FileNotFoundError` where there is nothing."""

    def write(self, name: str, payload: Payload) -> None:
        """Whole and durable, or not at all."""

    def read(self, name: str, most: int) -> Payload:
        """Its bytes, of which at most so many."""

    def delete(self, name: str) -> None:
        """Nothing is left of it."""


class LocalBackend:
    """A directory, which is made when something is written to it."""

    def __init__(self, place: Place) -> None:
        self._root = Path(place.root)

    def write(self, name: str, payload: Payload) -> None:
        path = self._root / name
        self._make(path.parent)
        part = _part(path)
        with part.open("wb") as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        part.rename(path)
        _sync(path.parent)

    def read(self, name: str, most: int) -> Payload:
        path = self._root / name
        if not path.parent.resolve().is_relative_to(self._root.resolve()):
            raise OSError(f"{path.parent} leads out of {self._root}")
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise OSError(f"{path} is not a file")
            return file.read(most)

    def delete(self, name: str) -> None:
        path = self._root / name
        for each in (path, _part(path)):
            with contextlib.suppress(FileNotFoundError):
                each.unlink()
        if path.parent != self._root:
            with contextlib.suppress(OSError):  # there are others
                path.parent.rmdir()

    def _make(self, folder: Path) -> None:
        missing = [each for each in (folder, *folder.parents) if not each.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for each in missing:
            _sync(each.parent)


class S3Backend:
    """A bucket's objects below a prefix."""

    def __init__(self, place: Place) -> None:
        from pyarrow import fs

        self._root = place.root
        self._fs: Any = fs.S3FileSystem(
            **dict(place.options),
            background_writes=False,
            connect_timeout=CONNECT_TIMEOUT_S,
            request_timeout=REQUEST_TIMEOUT_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        )

    def write(self, name: str, payload: Payload) -> None:
        with self._fs.open_output_stream(f"{self._root}/{name}") as stream:
            stream.write(payload)

    def read(self, name: str, most: int) -> Payload:
        with self._fs.open_input_file(f"{self._root}/{name}") as file:
            return memoryview(file.read_buffer(most))

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(f"{self._root}/{name}")


class Store:
    """A place's objects, for any thread. Raises `PayloadUnavailable` while the place is away; for a short while after
    that it does so without a look, so that whoever reads many streams is not held up by each."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._backend: Backend | None = None
        self._lock = threading.Lock()
        self._not_before, self._pause_s, self._why = 0.0, 0.0, ""

    def put(self, name: str, payload: Payload) -> None:
        """Write an object that was not there."""
        self._attempt(lambda backend: backend.write(name, payload))

    def get(self, name: str, most: int) -> Payload:
        """The bytes of an object, of which at most so many. Raises `Missing`."""
        try:
            return self._attempt(lambda backend: backend.read(name, most), may_miss=True)
        except Missing:
            self.check()
            raise

    def delete(self, name: str) -> None:
        """Have no such object."""
        self._attempt(lambda backend: backend.delete(name))

    def prepare(self) -> None:
        """Write the marker."""
        self.put(MARKER, b"sublet keeps payloads of messages here\n")

    def check(self) -> None:
        """Raise `PayloadUnavailable` unless the marker is there."""
        try:
            self._attempt(lambda backend: backend.read(MARKER, 1), may_miss=True)
        except Missing:
            raise self._unavailable(
                f"is not there, or not mounted: it has no object {MARKER}, as all in use do"
            ) from None

    def _attempt(self, work: Callable[[Backend], _T], *, may_miss: bool = False) -> _T:
        if time.monotonic() < self._not_before:
            raise PayloadUnavailable(self._why)
        try:
            answer = work(self._opened())
        except (OSError, pa.ArrowException) as error:
            if may_miss and isinstance(error, FileNotFoundError):
                raise Missing from error
            raise self._unavailable(f"does not answer as it should: {_said(error)}") from error
        self._pause_s = 0.0
        return answer

    def _opened(self) -> Backend:
        with self._lock:
            if self._backend is None:
                self._backend = LocalBackend(self.place) if self.place.scheme == "file" else S3Backend(self.place)
            return self._backend

    def _unavailable(self, what: str) -> PayloadUnavailable:
        with self._lock:
            if time.monotonic() >= self._not_before:  # many may have tried at once
                self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
                self._not_before = time.monotonic() + self._pause_s
        self._why = (
            f"the place of payloads {self.place} {what}. It is tried again. See that it can be reached from here, with "
            "the right credentials in this process's environment; `sublet doctor` says whether it can."
        )
        return PayloadUnavailable(self._why)


def store(place: Place) -> Store:
    """This process's, for it."""
    return _store(os.getpid(), place)


@lru_cache(maxsize=64)
def _store(pid: int, place: Place) -> Store:
    return Store(place)


def _part(path: Path) -> Path:
    return path.with_name(f"{path.name}.part")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _said(error: Exception) -> str:
    return " ".join(str(error).split())[:300].rstrip(".")
