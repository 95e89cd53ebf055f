"""PgQue: PgQ's ticks and batches in PL/pgSQL, for any Postgres; its one file of SQL is installed into a fresh database.

The publisher's thread sends all waiting messages in one call; the consumer waits for the notification of a tick, and
receives and acknowledges its batch. A loop of the bench ticks, in place of pg_cron.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psycopg

from bench import _postgres as postgres
from bench.peers.limit import POLL_INTERVAL_S, insert_load
from bench.peers.load import Load, Recorder
from bench.peers.system import Role

FILE = "PGQUE_SQL"
"""Variable with the path of its `sql/pgque.sql`."""
CONSUMER = "bench"
AS_TEXT, AS_BYTES = "encode(value, 'base64') from unnest(%b::bytea[]) as u (value)", "decode(payload, 'base64')"
"""It has texts only."""
MOST = 1_000_000
"""Messages that a call receives at most: an acknowledgement is of a whole batch."""


@dataclass(frozen=True, slots=True)
class PgQue:
    """PgQue with a tick each so many milliseconds; its own default is 100."""

    tick_ms: int
    name = "PgQue"
    role = Role.PEER
    is_durable = True

    @property
    def key(self) -> str:
        """Return its name on the command line."""
        return f"pgque-{self.tick_ms}"

    @property
    def setting(self) -> str:
        """Return how often it ticks."""
        return f"a tick each {self.tick_ms} ms"

    def missing(self) -> str | None:
        """Return what is missing: its SQL, which no package index has."""
        if not Path(os.environ.get(FILE, "")).is_file():
            return f"{FILE} names no file. Set it to the path of sql/pgque.sql in a checkout of PgQue"
        return None

    @contextlib.contextmanager
    def serve(self, directory: Path) -> Iterator[str]:
        """Yield the database's URL as the address, and tick until the end of the block."""
        over = threading.Event()
        with postgres.server() as server:
            url = postgres.database(server, 1)
            with psycopg.connect(url, autocommit=True) as connection:
                connection.execute(Path(os.environ[FILE]).read_bytes())
                ticker = threading.Thread(target=self._tick, args=(url, over), daemon=True)
                ticker.start()
                try:
                    yield url
                finally:
                    over.set()
                    ticker.join()

    def publish(self, address: str, topic: str, load: Load) -> None:
        """Publish by `send_batch`, as text."""
        insert_load(address, f"select pgque.send_batch('{topic}', 'default', array(select {AS_TEXT}))", load)

    def consume(self, address: str, topic: str, recorder: Recorder) -> None:
        """LISTEN, then receive a batch after every tick."""
        with psycopg.connect(address, autocommit=True) as connection:
            connection.execute("select pgque.create_queue(%s)", (topic,))
            connection.execute("select pgque.set_queue_config(%s, 'ticker_max_lag', '1 ms')", (topic,))
            connection.execute("select pgque.subscribe(%s, %s)", (topic, CONSUMER))
            connection.execute(f"listen pgque_{topic}")
            recorder.ready()
            while not recorder.over:
                rows = connection.execute(
                    f"select batch_id, {AS_BYTES} from pgque.receive(%s, %s, %s)", (topic, CONSUMER, MOST), binary=True
                ).fetchall()
                if rows:
                    recorder.take([value for _, value in rows])
                    connection.execute("select pgque.ack(%s)", (rows[0][0],))
                else:
                    for _ in connection.notifies(timeout=POLL_INTERVAL_S, stop_after=1):
                        pass

    def _tick(self, url: str, over: threading.Event) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            while not over.wait(self.tick_ms / 1000):
                connection.execute("select pgque.ticker()")
