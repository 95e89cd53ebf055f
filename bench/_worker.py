"""A publisher or a consumer of `bench faults`, run as a process.

`python -m bench._worker publish SYSTEM URL RATE SECONDS` and `python -m bench._worker consume SYSTEM URL FILE`.
"""

from __future__ import annotations

import os
import struct
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.peers.load import MESSAGE_BYTES, Head, Load, read_head
from bench.peers.shared import SHARED_SYSTEMS

_RECORD = struct.Struct(f"<q{MESSAGE_BYTES}s")


def publish(system: str, url: str, rate: str, seconds: str) -> None:
    """Publish under this load."""
    SHARED_SYSTEMS[system].publish(url, Load(int(rate), 0.0, float(seconds)))


def consume(system: str, url: str, file: str) -> None:
    """Consume until it is killed; what it receives is in the file at once."""
    descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def record(messages: Sequence[bytes]) -> None:
        now = time.monotonic_ns()
        os.write(descriptor, b"".join(_RECORD.pack(now, message) for message in messages))

    SHARED_SYSTEMS[system].consume(url, record)


def read_received(file: Path) -> Iterator[tuple[int, Head]]:
    """Yield (time in nanoseconds, head) of each message that a consumer has received so far."""
    content = file.read_bytes() if file.exists() else b""
    for received_ns, message in _RECORD.iter_unpack(content[: len(content) // _RECORD.size * _RECORD.size]):
        yield received_ns, read_head(message)


if __name__ == "__main__":
    end = publish if sys.argv[1] == "publish" else consume
    end(*sys.argv[2:])
