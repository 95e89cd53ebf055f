"""Writes, reads and deletes the objects of a payload location.

A write is complete and durable when it returns, or it is not there. On a file system that takes a temporary file,
fsync, a rename, and fsync of the directory, which pyarrow does not do; S3 comes from pyarrow, which every executor has.

A location has a marker with an id of its own, written before its first object and never again: where that is missing,
or has another id, the location is away (not mounted, or another bucket), and what is not found there is not lost.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, Protocol, TypeVar

import pyarrow as pa

from sublet_protocol.domain.errors import PayloadUnavailable, format_error
from sublet_storage.objects.allowed_locations import find_refusal
from sublet_storage.objects.location import PayloadStoreLocation
from sublet_storage.util.retry import Backoff

MARKER: Final = ".sublet"
WRITABLE: Final = ".sublet-writable"
"""An object that is written as a test."""

MARKER_BYTES: Final = 1000
CONNECT_TIMEOUT_S: Final = 5.0
REQUEST_TIMEOUT_S: Final = 10.0
ATTEMPTS: Final = 2
MAX_ERROR_CHARS: Final = 300

ASK_DOCTOR: Final = "`sublet doctor` says whether it can be used."
"""Follows each hint, except the doctor's own."""
_HINTS: Final = {
    "file": "See that the directory is there on this machine, mounted, and that this process's user may read and "
    "write in it",
    "s3": "See that it can be reached from here, with the right credentials in this process's environment",
}

_FOR_GOOD = (PermissionError, IsADirectoryError, NotADirectoryError)
_ID = re.compile(r"\bid ([0-9a-f]{32})\b")

Payload = bytes | memoryview
_T = TypeVar("_T")


class PayloadObjectNotFound(Exception):
    """An error for an object that does not exist, in a location that is available."""


class ObjectUnusable(PayloadUnavailable):
    """An error for an object that cannot be used, in a location that is available: others may be read, written and
    deleted.

    `is_permanent`: unless it is repaired.
    """

    is_permanent = False


class ObjectBackend(Protocol):
    """The interface to the objects of a location, by relative names. All raise `OSError`, `FileNotFoundError` for a
    missing object."""

    def write(self, name: str, payload: Payload) -> None:
        """Write it completely and durably, or not at all."""

    def read(self, name: str, limit: int) -> Payload:
        """Return its bytes, at most `limit` of them."""

    def delete(self, name: str) -> None:
        """Delete the object; return also if there is none."""


class LocalBackend:
    """A directory, which must exist. Operations stay below it, whatever links there are."""

    def __init__(self, location: PayloadStoreLocation) -> None:
        self._root = location.root

    def write(self, name: str, payload: Payload) -> None:
        with self._open_folder(name, make=True) as (folder, file_name):
            part = _format_part_name(file_name)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
            try:
                with open(os.open(part, flags, 0o666, dir_fd=folder), "wb") as file:
                    file.write(payload)
                    file.flush()
                    os.fsync(file.fileno())
                os.rename(part, file_name, src_dir_fd=folder, dst_dir_fd=folder)
            except OSError:
                with contextlib.suppress(OSError):
                    os.unlink(part, dir_fd=folder)
                raise
            os.fsync(folder)

    def read(self, name: str, limit: int) -> Payload:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with (
            self._open_folder(name) as (folder, file_name),
            open(os.open(file_name, flags, dir_fd=folder), "rb") as file,
        ):
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise IsADirectoryError(f"{self._root}/{name} is not a file")
            return file.read(limit)

    def delete(self, name: str) -> None:
        try:
            with self._open_folder(name) as (folder, file_name):
                for each in (file_name, f"{file_name}.part"):
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(each, dir_fd=folder)
        except FileNotFoundError:
            if not os.path.isdir(self._root):
                raise
        above = os.path.dirname(name)
        if above:
            with contextlib.suppress(OSError):  # there are others
                os.rmdir(f"{self._root}/{above}")

    @contextmanager
    def _open_folder(self, name: str, *, make: bool = False) -> Iterator[tuple[int, str]]:
        """Yield the open directory of an object, and the object's name in it; no link below the location is
        followed."""
        above, _, file_name = name.rpartition("/")
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        with contextlib.ExitStack() as opened:
            try:
                folder = os.open(self._root, flags)
            except FileNotFoundError:
                if not make:
                    raise
                raise OSError(
                    f"there is no directory {self._root}, and it must exist, as one that is not mounted would be made "
                    "on the bare disk: mount it, or make it there with mkdir"
                ) from None
            opened.callback(os.close, folder)
            for each in filter(None, above.split("/")):
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(each, dir_fd=folder)
                        os.fsync(folder)
                try:
                    folder = os.open(each, flags | os.O_NOFOLLOW, dir_fd=folder)
                except OSError as error:
                    if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                        raise
                    raise NotADirectoryError(f"{self._root}/{above} leads out of {self._root}") from None
                opened.callback(os.close, folder)
            yield folder, file_name


class S3Backend:
    """A bucket's objects below a prefix."""

    def __init__(self, location: PayloadStoreLocation) -> None:
        from pyarrow import fs

        self._root = location.root
        self._fs: Any = fs.S3FileSystem(
            **dict(location.options),
            background_writes=False,
            connect_timeout=CONNECT_TIMEOUT_S,
            request_timeout=REQUEST_TIMEOUT_S,
            retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        )

    def write(self, name: str, payload: Payload) -> None:
        with self._fs.open_output_stream(f"{self._root}/{name}") as stream:
            stream.write(payload)

    def read(self, name: str, limit: int) -> Payload:
        with self._fs.open_input_file(f"{self._root}/{name}") as file:
            return memoryview(file.read_buffer(limit))

    def delete(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.delete_file(f"{self._root}/{name}")


class ObjectStore:
    """The objects of a location, for any thread. Raises `PayloadUnavailable` while the location is away; for a short
    while after that it does so without trying, so that a reader of many streams is not held up by each."""

    def __init__(self, location: PayloadStoreLocation) -> None:
        self.location = location
        self._backend: ObjectBackend | None = None
        self._lock = threading.Lock()
        self._backoff, self._last_error = Backoff(0.2, 5.0), ""

    def put(self, name: str, payload: Payload) -> None:
        """Write an object that was not there, and see that it is there now. Raise `ObjectUnusable`."""
        self._call_backend(name, lambda backend: _write(backend, name, payload))

    def get(self, name: str, limit: int) -> Payload:
        """Return the bytes of an object, at most `limit`. Raise `PayloadObjectNotFound`, `ObjectUnusable`."""
        return self._call_backend(name, lambda backend: backend.read(name, limit), may_miss=True)

    def delete(self, name: str) -> None:
        """Delete the object, if it exists. Raise `ObjectUnusable`."""
        self._call_backend(name, lambda backend: backend.delete(name))

    def check_writable(self) -> None:
        """Raise `PayloadUnavailable` where nothing can be written."""
        self.put(WRITABLE, b"sublet\n")

    def write_marker(self, marker: str) -> str:
        """Return the id of the location, which is this one from now on if it had none."""
        stored_marker = self._read_marker_id()
        if stored_marker is None:
            text = f"sublet keeps payloads of messages here, id {marker}\n".encode()
            with self._map_errors():
                self._get_backend().write(MARKER, text)
            stored_marker = self._read_marker_id()
        if not stored_marker:
            raise self._unavailable_error(f"does not answer as it should: its object {MARKER} has no id")
        return stored_marker

    def check_marker(self) -> None:
        """Raise `PayloadUnavailable` unless the marker is there, with the id that it has had from the beginning."""
        stored_marker, expected_marker = self._read_marker_id(), self.location.marker
        if stored_marker is None:
            raise self._unavailable_error(
                f"is not there, or not mounted: it has no object {MARKER}, as all in use do"
                + (f" (one that says `id {expected_marker}` is this location's)" if expected_marker else "")
            )
        if expected_marker and stored_marker != expected_marker:
            raise self._unavailable_error(
                f"is not the one that it was: its object {MARKER} should have the id {expected_marker}"
            )
        self._backoff.reset()

    def note_timeout(self, seconds: float) -> PayloadUnavailable:
        """Return the error of a location that has not answered for `seconds`; it is not tried again for as long."""
        return self._unavailable_error(f"has not answered for {seconds:g} s", seconds)

    def _read_marker_id(self) -> str | None:
        """Return the id in the marker; empty if it is none of ours; None if there is no marker."""
        self._pause()
        with self._map_errors():
            try:
                content = bytes(memoryview(self._get_backend().read(MARKER, MARKER_BYTES)))
            except FileNotFoundError:
                return None
        matched = _ID.search(content.decode("ascii", "replace"))
        return matched[1] if matched else ""

    def _call_backend(
        self, name: str, work: Callable[[ObjectBackend], _T], *, may_miss: bool = False, is_repeated: bool = False
    ) -> _T:
        self._pause()
        try:
            answer = work(self._get_backend())
        except (OSError, pa.ArrowException) as error:
            if self.location.marker:
                self.check_marker()
            if may_miss and isinstance(error, FileNotFoundError):
                if is_repeated:
                    raise PayloadObjectNotFound from error
                # The location may have been away when the object was looked for, and be back by now.
                return self._call_backend(name, work, may_miss=True, is_repeated=True)
            if not self.location.marker:
                raise self._unavailable_error(
                    f"does not answer as it should: {format_error(error)[:MAX_ERROR_CHARS]}"
                ) from error
            refused = ObjectUnusable(
                f"the object {name} at the payload location {self.location} does not do as it should: "
                f"{format_error(error)[:MAX_ERROR_CHARS]}. It "
                "is tried again, and others are not held up. See to this object, and to who may do what there."
            )
            refused.is_permanent = isinstance(error, _FOR_GOOD) or getattr(error, "errno", None) == errno.ELOOP
            raise refused from error
        self._backoff.reset()
        return answer

    def _pause(self) -> None:
        if self._backoff.wait_s > 0:
            raise PayloadUnavailable(self._last_error)

    @contextmanager
    def _map_errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, pa.ArrowException) as error:
            raise self._unavailable_error(
                f"does not answer as it should: {format_error(error)[:MAX_ERROR_CHARS]}"
            ) from error

    def _get_backend(self) -> ObjectBackend:
        if self._backend is None and (problem := find_refusal(self.location)):
            raise self._unavailable_error(problem)
        with self._lock:
            if self._backend is None:
                self._backend = (
                    LocalBackend(self.location) if self.location.scheme == "file" else S3Backend(self.location)
                )
            return self._backend

    def _unavailable_error(self, problem: str, pause_s: float = 0.0) -> PayloadUnavailable:
        with self._lock:
            self._backoff.start_pause(pause_s)
        hint = _HINTS[self.location.scheme]
        self._last_error = f"the payload location {self.location} {problem}. It is tried again. {hint}. {ASK_DOCTOR}"
        return PayloadUnavailable(self._last_error)


def get_store(location: PayloadStoreLocation) -> ObjectStore:
    """Return this process's store for the location."""
    return _get_store(os.getpid(), location)


@lru_cache(maxsize=64)
def _get_store(pid: int, location: PayloadStoreLocation) -> ObjectStore:
    return ObjectStore(location)


def _write(backend: ObjectBackend, name: str, payload: Payload) -> None:
    """Write the object and read it back: a store may have stored something else, and soon there is no other copy."""
    backend.write(name, payload)
    expected = memoryview(payload).cast("B")
    actual = memoryview(backend.read(name, expected.nbytes + 1)).cast("B")
    if actual != expected:
        raise OSError(f"it came back different from what was written: {actual.nbytes} bytes, of {expected.nbytes}")


def _format_part_name(name: str) -> str:
    """Return the name of the file that is written first, and then renamed. It is free: an object's name is new, and one
    that is not, such as the marker's, gets a random part."""
    return f"{name}.{secrets.token_hex(8)}.part" if name.startswith(".") else f"{name}.part"
