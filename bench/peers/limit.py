"""Postgres alone with LISTEN and NOTIFY: the limit of systems that store messages there.

The publisher's thread inserts all waiting messages in one statement and sends NOTIFY in the same transaction; the
consumer LISTENs and selects what is new. No group, no acknowledgement, no node; one publisher and one consumer only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from bench import _postgres as postgres
from bench.peers.load import Load, Recorder, keep_pace
from bench.peers.system import Role

POLL_INTERVAL_S = 1.0
"""Interval at which a consumer polls without a notification."""
RETRY_S = 0.1
"""Pause before a lost connection is opened again."""

_SETUP = "create table message (number bigint generated always as identity primary key, value bytea not null)"
_INSERT = (
    "with sent as (select pg_notify('message', '')) insert into message (value) select unnest(%b::bytea[]) from sent"
)
_SELECT = "select number, value from message where number > %s order by number"


@dataclass(frozen=True, slots=True)
class PostgresAlone:
    """Postgres alone, as durable as sublet's."""

    key = "postgres-alone"
    name = "Postgres alone"
    setting = "INSERT and NOTIFY, LISTEN and SELECT"
    role = Role.LIMIT
    is_durable = True

    def missing(self) -> str | None:
        """Return None: sublet needs it too."""
        return None

    @contextlib.contextmanager
    def serve(self, directory: Path) -> Iterator[str]:
        """Yield the database's URL as the address."""
        with postgres.server() as server:
            yield postgres.database(server, 1)

    def publish(self, address: str, topic: str, load: Load) -> None:
        """Publish; `topic` is ignored, since messages of other topics have been consumed."""
        insert_load(address, _INSERT, load)

    def consume(self, address: str, topic: str, recorder: Recorder) -> None:
        """LISTEN, then read after every notification."""
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("drop table if exists message")
            connection.execute(_SETUP)
            connection.execute("listen message")
            recorder.ready()
            number = 0
            while not recorder.over:
                rows = connection.execute(_SELECT, (number,), prepare=True, binary=True).fetchall()
                if rows:
                    number = rows[-1][0]
                    recorder.take([value for _, value in rows])
                for _ in connection.notifies(timeout=POLL_INTERVAL_S, stop_after=1):
                    pass


def insert_load(address: str, statement: str, load: Load) -> None:
    """Insert the messages of a load, until all are committed; `statement` takes those that wait."""
    with contextlib.closing(_Inserter(address, statement)) as inserter:
        last = keep_pace(load, inserter.add)
        inserter.settle()
        inserter.add(last)
        inserter.settle()


class _Inserter:
    """Takes messages from the caller's thread, and commits all waiting ones in its own by one statement."""

    def __init__(self, address: str, statement: str) -> None:
        self._address, self._statement = address, statement
        self._connection: psycopg.Connection[Any] = psycopg.connect(address, autocommit=True)
        self._waiting: deque[bytes] = deque()
        self._changed = threading.Condition()
        self._busy = self._over = False
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._insert, daemon=True)
        self._thread.start()

    def add(self, value: bytes) -> None:
        """Add a message to those that wait."""
        with self._changed:
            self._waiting.append(value)
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until all are committed."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or not (self._waiting or self._busy))
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Wait for the thread, and close the connection."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._thread.join()
        self._connection.close()

    def _insert(self) -> None:
        try:
            while values := self._take():
                self._store(values)
        except psycopg.Error as error:
            self._failure = error
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def _store(self, values: list[bytes]) -> None:
        """Commit the messages; again over another connection, if this one is lost."""
        while True:
            try:
                if self._connection.closed:
                    self._connection = psycopg.connect(self._address, autocommit=True)
                self._connection.execute(self._statement, (values,), prepare=True)
                return
            except psycopg.OperationalError:
                self._connection.close()
                time.sleep(RETRY_S)

    def _take(self) -> list[bytes]:
        with self._changed:
            self._busy = False
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._waiting or self._over)
            values = list(self._waiting)
            self._waiting.clear()
            self._busy = bool(values)
            return values
