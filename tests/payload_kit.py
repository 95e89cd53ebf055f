"""Payload locations of tests: a directory and an S3 bucket, both of which can fail."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import psycopg
from pyarrow import fs

from sublet_protocol.domain.errors import PayloadUnavailable
from sublet_storage.log.append import BlockAppend, append
from sublet_storage.log.block_encoder import pack
from sublet_storage.objects import unreferenced_objects
from sublet_storage.objects.object_stores import MARKER, WRITABLE
from sublet_storage.spaces.routing import Space
from sublet_storage.spaces.space_changes import create_space, rollover
from sublet_storage.spaces.tiering import tier_space
from tests.integration.log_kit import batch, stream_of
from tests.integration.session_kit import free_port
from tests.kit import WAIT_S, eventually

T = TypeVar("T")
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "somebody",
    "AWS_SECRET_ACCESS_KEY": "a secret",
    "AWS_EC2_METADATA_DISABLED": "true",
}
VALUE = 3000
"""Bytes of a message: two of them make a block large enough to be moved."""


class LocalWorld:
    """A directory that is mounted, and can be unmounted. Names of objects are relative to it."""

    def __init__(self, directory: Path) -> None:
        self.root = directory / "mounted" / "payloads"
        self.root.mkdir(parents=True)
        self.uri = f"file://{self.root}"

    def names(self) -> set[str]:
        """Return the names of all objects, without the marker and the files written to test whether it is writable."""
        # `rglob` raises if a directory is removed meanwhile, and maintenance removes empty ones.
        found = {Path(folder, name) for folder, _, names in os.walk(self.root) for name in names}
        return _objects({str(each.relative_to(self.root)) for each in found})

    def read(self, name: str) -> bytes:
        return (self.root / name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        (self.root / name).write_bytes(content)

    def remove(self, name: str) -> None:
        (self.root / name).unlink()

    @property
    def is_away(self) -> bool:
        return self.root.with_name("elsewhere").exists()

    def go_away(self) -> None:
        self.root.rename(self.root.with_name("elsewhere"))
        self.root.mkdir()

    def come_back(self) -> None:
        """Make it reachable again, with the content it had."""
        shutil.rmtree(self.root)
        self.root.with_name("elsewhere").rename(self.root)


def _objects(names: set[str]) -> set[str]:
    return names - {MARKER, WRITABLE}


class S3Server:
    """Server of moto: it keeps objects in memory, also while it is stopped."""

    def __init__(self) -> None:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.port = free_port()
        self.start()

    def start(self) -> None:
        """Serve, at the same port as before."""
        from moto.server import ThreadedMotoServer

        self._server = ThreadedMotoServer("127.0.0.1", self.port, verbose=False)
        self._server.start()

    def stop(self) -> None:
        self._server.stop()


class S3World:
    """The same in a bucket."""

    def __init__(self, server: S3Server, bucket: str) -> None:
        self._server, self._root = server, f"{bucket}/some/where"
        endpoint = f"127.0.0.1:{server.port}"
        self._fs: Any = fs.S3FileSystem(endpoint_override=endpoint, scheme="http", allow_bucket_creation=True)
        self._fs.create_dir(bucket)
        self.uri = f"s3://{self._root}?endpoint_override={endpoint}&scheme=http"

    def names(self) -> set[str]:
        found = self._fs.get_file_info(fs.FileSelector(self._root, recursive=True, allow_not_found=True))
        return _objects({each.path.removeprefix(f"{self._root}/") for each in found if each.type == fs.FileType.File})

    def read(self, name: str) -> bytes:
        with self._fs.open_input_stream(f"{self._root}/{name}") as stream:
            return bytes(stream.read())

    def write(self, name: str, content: bytes) -> None:
        with self._fs.open_output_stream(f"{self._root}/{name}") as stream:
            stream.write(content)

    def remove(self, name: str) -> None:
        self._fs.delete_file(f"{self._root}/{name}")

    def go_away(self) -> None:
        self._server.stop()

    def come_back(self) -> None:
        self._server.start()


PlaceWorld = LocalWorld | S3World


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Yield a running server, with credentials for it in the environment."""
    before = {name: os.environ.get(name) for name in CREDENTIALS}
    os.environ.update(CREDENTIALS)
    server = S3Server()
    try:
        yield server
    finally:
        server.stop()
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def a_space(conn: psycopg.Connection[Any], world: PlaceWorld, **settings: Any) -> Space:
    """Return the space `eu` with one stream and that location."""
    return create_space(conn, "eu", "eu/#", **{"shards": 1, "payload_location": world.uri, **settings})


def fill(conn: psycopg.Connection[Any], stream_id: int, blocks: int, first: int = 0, size: int = VALUE) -> None:
    """Append `blocks` blocks of two numbered messages each."""
    for number in range(first, first + blocks):
        values = [b"%06d" % message + os.urandom(size) for message in (2 * number, 2 * number + 1)]
        append(conn, [BlockAppend(stream_id, pack(batch(values, f"eu/{number % 2}", b"k")))])


def move(conn: psycopg.Connection[Any], space: Space) -> int:
    """Move all that is due, in as many passes as needed; return the number of blocks."""
    blocks = 0
    while True:
        moved = tier_space(conn, space)
        blocks += moved.blocks
        if moved.is_complete:
            return blocks


def swept(conn: psycopg.Connection[Any], grace_s: float = 0.0) -> int:
    """Delete orphaned objects, by default without the grace; return how many."""
    return unreferenced_objects.delete_expired_objects(conn, grace_s=grace_s)


def when_back(work: Callable[[], T]) -> T:
    """Return what the work returns, other than None, once its place answers again."""

    def tried() -> tuple[T] | None:
        with suppress(PayloadUnavailable):
            found = work()
            return None if found is None else (found,)
        return None

    return eventually(tried, WAIT_S)[0]


def a_closed_stream(conn: psycopg.Connection[Any], blocks: int) -> int:
    """Return a closed stream of `a_space`, with blocks large enough to be moved and nothing left to compact."""
    stream = stream_of(conn, "eu")
    fill(conn, stream, blocks, size=70_000)
    rollover(conn, "eu")
    return stream


def outside(conn: psycopg.Connection[Any]) -> set[str]:
    """Return the object names that blocks refer to."""
    return {row[0] for row in conn.execute("select uri from block where uri is not null")}
