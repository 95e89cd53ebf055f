"""What was acknowledged is there: after kill -9 of the publisher, of a node, of whoever rolls over, and of Postgres."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest

from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.db.connect import connect
from tests.integration.log_kit import everything, kill_postgres
from tests.kit import eventually
from tests.kit_nodes import Fleet

ROLLER = """
import itertools, sys
from sublet_storage.db.connect import connect
from sublet_storage.spaces.space_changes import reshard
with connect(sys.argv[1]) as conn:
    for shards in itertools.cycle((2, 3)):
        reshard(conn, "default", shards)
"""


class Victims:
    """A publisher, a node and a process that reshards without end, all on one embedded Postgres."""

    def __init__(self, directory: Path, url: str) -> None:
        self.directory, self.url = directory, url
        self.fleet = Fleet(url, directory)
        self.acknowledged: list[int] = []
        command = [sys.executable, "-m", "tests.integration.publisher_process", url]
        self.publisher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        self._listener = threading.Thread(target=self._listen)
        self._listener.start()
        self.roller: subprocess.Popen[bytes] | None = None

    def _listen(self) -> None:
        assert self.publisher.stdout is not None
        self.acknowledged += (int(line) for line in self.publisher.stdout if line.endswith("\n"))

    def begin(self) -> None:
        """Start those that are not running."""
        self.fleet.serve("n1")
        self.roller = subprocess.Popen([sys.executable, "-c", ROLLER, self.url])

    def kill_helpers(self) -> None:
        """kill -9 the node and the roller, wherever they are."""
        for node in self.fleet.nodes.values():
            node.kill()
        if self.roller is not None:
            self.roller.kill()
            self.roller.wait()

    def kill_publisher(self) -> None:
        """kill -9, and read what it had said."""
        self.publisher.kill()
        self.publisher.wait()
        self._listener.join(20)

    def close(self) -> None:
        self.kill_publisher()
        self.kill_helpers()
        self.fleet.close()

    def published(self, more: int) -> None:
        """Wait until that many more are acknowledged."""
        least = len(self.acknowledged) + more
        eventually(lambda: len(self.acknowledged) >= least, 60)


STORED = ("topic", "value", "offset")


def stored(url: str) -> list[int]:
    with connect(url) as conn:
        return [int(message["value"]) for messages in everything(conn, STORED).values() for message in messages]


@pytest.mark.long
@pytest.mark.conforms("W1", "W2")
def test_nothing_acknowledged_is_ever_lost(server: EmbeddedPostgres, server_home: Path) -> None:
    """Whoever is killed."""
    with closing(Victims(server_home, server.url)) as scene:
        for _ in range(3):
            scene.begin()
            scene.published(200)
            scene.kill_helpers()
            scene.published(100)
            before = tuple(scene.acknowledged)
            kill_postgres(server_home / "data")
            server.start()
            assert set(before) <= set(stored(server.url)), "acknowledged before Postgres was killed"
        scene.published(100)
        scene.kill_publisher()
        eventually(lambda: not _publishing(server.url))
        found = stored(server.url)
        assert set(scene.acknowledged) <= set(found)
        assert len(found) == len(set(found)), "stored once"
        _in_order(server.url)


def _publishing(url: str) -> int:
    with connect(url) as conn:
        return conn.execute("select from pg_stat_activity where application_name = 'sublet publisher'").rowcount


def _in_order(url: str) -> None:
    """Check that messages without a key are in order by topic; streams of a topic follow each other by their ids."""
    topics: dict[str, list[int]] = defaultdict(list)
    with connect(url) as conn:
        for _, messages in sorted(everything(conn, STORED).items()):
            for message in messages:
                topics[message["topic"]].append(int(message["value"]))
    assert len(topics) == 3
    for values in topics.values():
        assert values == sorted(values)
