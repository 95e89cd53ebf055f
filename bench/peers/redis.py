"""Redis Streams: a consumer group, the append-only file synchronised each second or always.

The publisher sends every message at once and receives the acknowledgements in another thread. The consumer acknowledges
its messages in the round trip that fetches more, a thousand at most.
"""

from __future__ import annotations

import contextlib
import importlib.util
import shutil
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.load import Load, Recorder, keep_pace
from bench.peers.processes import free_port, listening
from bench.peers.system import MAX_UNACKNOWLEDGED, Role

SERVER = "redis-server"
GROUP = "bench"
FIELD = b"v"
READ_AT_ONCE = 1000
BLOCK_MS = 1000
ANSWER_S = 30.0


@dataclass(frozen=True, slots=True)
class Redis:
    """Redis with one value of `appendfsync`."""

    appendfsync: str
    name = "Redis Streams"
    role = Role.PEER

    @property
    def key(self) -> str:
        """Return its name on the command line."""
        return f"redis-{self.appendfsync}"

    @property
    def setting(self) -> str:
        """Return the setting as in its configuration."""
        return f"appendfsync {self.appendfsync}"

    @property
    def is_durable(self) -> bool:
        """Return whether it syncs always: otherwise it acknowledges first, and may lose a second."""
        return self.appendfsync == "always"

    def missing(self) -> str | None:
        """Return what is missing: the server or the client."""
        if shutil.which(SERVER) is None:
            return "there is no redis-server on the PATH. Install it: apt-get install redis-server"
        if importlib.util.find_spec("redis") is None or importlib.util.find_spec("hiredis") is None:
            return "the Python client is not installed. Install it: pip install 'redis[hiredis]'"
        return None

    @contextlib.contextmanager
    def serve(self, directory: Path) -> Iterator[str]:
        """Yield the port as the address."""
        port = free_port()
        settings = {
            "port": str(port),
            "bind": "127.0.0.1",
            "dir": str(directory),
            "appendonly": "yes",
            "appendfsync": self.appendfsync,
            "save": "",
            "daemonize": "no",
        }
        options = [word for name, value in settings.items() for word in (f"--{name}", value)]
        with listening([SERVER, *options], port, directory / "redis.log"):
            yield str(port)

    def publish(self, address: str, topic: str, load: Load) -> None:
        """Publish with one XADD per message."""
        adder = _Adder(int(address), topic)
        last = keep_pace(load, adder.add)
        adder.settle()
        adder.add(last)
        adder.settle()

    def consume(self, address: str, topic: str, recorder: Recorder) -> None:
        """Consume with XREADGROUP BLOCK, and XACK."""
        import redis

        client = redis.Redis(host="127.0.0.1", port=int(address), protocol=2, socket_timeout=ANSWER_S)
        client.xgroup_create(topic, GROUP, id="0", mkstream=True)
        recorder.ready()
        taken: list[bytes] = []
        while not recorder.over:
            entries = _read(client, topic, taken)
            recorder.take([fields[FIELD] for _, fields in entries])
            taken = [entry_id for entry_id, _ in entries]
        client.xack(topic, GROUP, *taken)


def _read(client: Any, topic: str, taken: list[bytes]) -> list[tuple[bytes, dict[bytes, bytes]]]:
    """Acknowledge the messages taken, and fetch what follows, in one round trip."""
    pipeline = client.pipeline(transaction=False)
    if taken:
        pipeline.xack(topic, GROUP, *taken)
    pipeline.xreadgroup(GROUP, "consumer", {topic: ">"}, count=READ_AT_ONCE, block=BLOCK_MS)
    found = pipeline.execute()[-1]
    return list(found[0][1]) if found else []


class _Adder:
    """Sends from the caller's thread, and receives the replies in its own."""

    def __init__(self, port: int, topic: str) -> None:
        import redis

        self._topic = topic
        self._connection: Any = redis.Connection(host="127.0.0.1", port=port, protocol=2, socket_timeout=None)
        self._connection.connect()
        self._room = threading.Semaphore(MAX_UNACKNOWLEDGED)
        self._failure: Exception | None = None
        threading.Thread(target=self._take_answers, daemon=True).start()

    def add(self, value: bytes) -> None:
        """Send it; wait only while too many are unacknowledged."""
        self._enter()
        self._connection.send_command("XADD", self._topic, "*", FIELD, value, check_health=False)

    def settle(self) -> None:
        """Wait until all are acknowledged."""
        for _ in range(MAX_UNACKNOWLEDGED):
            self._enter()
        self._room.release(MAX_UNACKNOWLEDGED)

    def _enter(self) -> None:
        entered = self._room.acquire(timeout=ANSWER_S)
        if self._failure is not None:
            raise self._failure
        if not entered:
            raise TimeoutError(f"Redis has acknowledged nothing for {ANSWER_S:g} s.")

    def _take_answers(self) -> None:
        try:
            while True:
                self._connection.read_response()
                self._room.release()
        except Exception as error:  # noqa: BLE001 the caller's thread raises it
            self._failure = error
            self._room.release(MAX_UNACKNOWLEDGED)
