"""Systems whose consumers share the messages, and may be killed: sublet, and a table of jobs with SKIP LOCKED."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import psycopg

from bench.peers.limit import RETRY_S, insert_load
from bench.peers.load import Load, keep_pace
from bench.peers.ours import node
from sublet import Publisher, Session

JOBS = 100
"""Jobs that a worker takes at once."""
IDLE_S = 0.01
"""Pause of a worker that finds no job."""

_INSERT = "insert into job (value) select unnest(%b::bytea[])"
_TAKE = """
delete from job where job_id in (select job_id from job order by job_id limit %s for update skip locked)
returning value"""


class SharedSystem(Protocol):
    """A system under faults. `table`: of its messages, with its schema."""

    @property
    def table(self) -> tuple[str, str]: ...

    def serve(self, url: str, directory: Path) -> contextlib.AbstractContextManager[object]:
        """Set it up in a database, and run what it needs besides."""
        ...

    def publish(self, url: str, load: Load) -> None:
        """Publish under a load, until all messages are acknowledged, and then the last."""
        ...

    def consume(self, url: str, record: Callable[[Sequence[bytes]], None]) -> None:
        """Consume until the process is killed, each batch recorded before it is acknowledged."""
        ...


class SharedSublet:
    """A group of sessions, one node and a publisher."""

    table = ("sublet", "block")

    def serve(self, url: str, directory: Path) -> contextlib.AbstractContextManager[object]:
        return node(url, "postgres", directory / "node.log")

    def publish(self, url: str, load: Load) -> None:
        with Publisher(url) as publisher:
            last = keep_pace(load, lambda value: publisher.publish("jobs", value, key=value[8:16]))
            publisher.flush()
            publisher.publish("jobs", last)

    def consume(self, url: str, record: Callable[[Sequence[bytes]], None]) -> None:
        with Session("$share/workers/jobs", url, starting_position="earliest") as session:
            for batch in session:
                record(batch.table.column("value").to_pylist())


class SkipLocked:
    """What most queues on Postgres do: workers lock rows that nobody has locked, and delete them."""

    table = ("public", "job")

    def serve(self, url: str, directory: Path) -> contextlib.AbstractContextManager[object]:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(
                "create table job (job_id bigint generated always as identity primary key, value bytea not null)"
            )
        return contextlib.nullcontext()

    def publish(self, url: str, load: Load) -> None:
        insert_load(url, _INSERT, load)

    def consume(self, url: str, record: Callable[[Sequence[bytes]], None]) -> None:
        while True:
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(url) as connection:
                while True:
                    with connection.transaction():
                        values = [value for (value,) in connection.execute(_TAKE, (JOBS,), binary=True)]
                        record(values)
                    if not values:
                        time.sleep(IDLE_S)
            time.sleep(RETRY_S)


SHARED_SYSTEMS: dict[str, SharedSystem] = {"sublet": SharedSublet(), "SKIP LOCKED": SkipLocked()}
"""By their names on the page."""
