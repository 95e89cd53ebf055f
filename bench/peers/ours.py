"""sublet itself, under each notification driver: a Postgres, a node, `Publisher`, and `Session` or a task of Spark."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from bench import _postgres as postgres
from bench.peers.load import Load, Recorder, keep_pace
from bench.peers.processes import Running, module
from bench.peers.system import Role, SystemUnavailable
from sublet import Publisher, Session
from sublet_protocol.domain.errors import SubletError
from sublet_storage.db.connect import connect
from sublet_storage.node_directory import list_nodes
from sublet_storage.notify.drivers import registry
from tests.kit import eventually

if TYPE_CHECKING:
    from sublet_borrower.streams.batch import Batch

WAIT_S = 60.0
POLL_INTERVAL_S = 0.05
POLL = "poll"
"""The driver of publishers without a node to notify."""


@dataclass(frozen=True, slots=True)
class Sublet:
    """sublet with one notification driver. `in_spark`: it consumes in a task of Spark, else in a session of its own."""

    driver: str
    in_spark: bool = False
    name = "sublet"
    role = Role.OURS
    is_durable = True

    @property
    def key(self) -> str:
        """Return its name on the command line."""
        return f"sublet-{self.driver}{'-spark' if self.in_spark else ''}"

    @property
    def setting(self) -> str:
        """Return the driver, and where it consumes."""
        return f"{self.driver}{', in a task of Spark' if self.in_spark else ''}"

    def missing(self) -> str | None:
        """Return what is missing: a driver's library."""
        try:
            registry.load_driver(self.driver)
        except SubletError as error:
            return str(error)
        return None

    @contextlib.contextmanager
    def serve(self, directory: Path) -> Iterator[str]:
        """Run a durable Postgres and a node; yield the database's URL as the address."""
        with postgres.server() as server:
            url = postgres.database(server, 1)
            with node(url, self.driver, directory / "node.log"):
                yield url

    def publish(self, address: str, topic: str, load: Load) -> None:
        """Publish by the public API."""
        with Publisher(address) as publisher:
            last = keep_pace(load, partial(publisher.publish, topic))
            publisher.flush()
            publisher.publish(topic, last)

    def consume(self, address: str, topic: str, recorder: Recorder) -> None:
        """Consume by the public API. The values are taken out of their Arrow column before the clock is read."""
        subscription = f"$share/{topic}/{topic}"
        if self.in_spark:
            _consume_in_spark(subscription, address, recorder)
            return
        with Session(subscription, address, starting_position="earliest") as session:
            while not session.assignment():
                session.poll(POLL_INTERVAL_S)
            recorder.ready()
            while not recorder.over:
                batch = session.poll(1.0)
                if batch is not None:
                    _take(recorder, batch)


def _consume_in_spark(subscription: str, address: str, recorder: Recorder) -> None:
    """Consume in one task of Spark, which has a copy of the recorder."""
    from bench._queries import spark_session  # with Spark, which the other ends are measured without
    from sublet.spark import consume

    with (
        spark_session({}) as spark,
        consume(
            spark, subscription, partial(_take, recorder), tasks=1, url=address, starting_position="earliest"
        ) as consumption,
    ):
        eventually(lambda: consumption.status().stream_count > 0, WAIT_S, every_s=POLL_INTERVAL_S)
        recorder.ready()
        while not recorder.has_result():
            consumption.wait(POLL_INTERVAL_S)
            assert consumption.status().is_running, consumption.result()


def _take(recorder: Recorder, batch: Batch) -> None:
    recorder.take(batch.table.column("value").to_pylist())


@contextlib.contextmanager
def node(url: str, driver: str, log: Path) -> Iterator[Running]:
    """Yield a node that serves, and listens by this driver. Raise `SystemUnavailable` if it listens by another."""
    arguments = ("leader", "--name", "bench", "--listen", "127.0.0.1:0")
    settings = {"SUBLET_DATABASE_URL": url, "SUBLET_NOTIFY": driver}
    with module("sublet.cli", *arguments, log=log, extra=settings) as process:

        def serves() -> bool:
            process.check()
            return "serves on" in process.said()

        eventually(serves, WAIT_S, process.said)
        _check_driver(url, driver)
        yield process


def _check_driver(url: str, driver: str) -> None:
    with connect(url) as connection:
        (entry,) = list_nodes(connection)
    in_force = entry.notify_driver
    if in_force != driver:
        raise SystemUnavailable(f"its node listens by {in_force!r}: this version does not take SUBLET_NOTIFY={driver}.")
