"""Postgres is stopped at once, and killed with -9, under nodes, consumers and a publisher: all go on by themselves."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from tests.integration.sharing_kit import WAIT_S, Stage
from tests.kit import eventually, server_directory


class Server:
    """An embedded Postgres that can be ended in unfriendly ways."""

    def __init__(self, directory: Path) -> None:
        self._data = directory / "data"
        self._postgres = EmbeddedPostgres(self._data)
        self.url = self._postgres.start()
        migrate(self.url)

    def end(self, number: signal.Signals) -> None:
        """SIGQUIT is an immediate stop; with SIGKILL the backends die of their postmaster's death."""
        pid = int(next(self._data.rglob("postmaster.pid")).read_text().split()[0])
        os.kill(pid, number)
        eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, WAIT_S)

    def start(self) -> None:
        """Start it again: it recovers."""
        self._postgres.start()

    def close(self) -> None:
        """Stop it for good."""
        self._postgres.stop()


@pytest.fixture
def server() -> Iterator[Server]:
    """A server of the test's own."""
    directory = server_directory()
    server = Server(directory)
    try:
        yield server
    finally:
        server.close()
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def database(server: Server) -> str:
    return server.url


@pytest.mark.conforms("W1", "W2", "E13", "E17")
def test_all_go_on_when_postgres_was_killed(stage: Stage, server: Server) -> None:
    stage.serve("n1", "n2")
    stage.share("a", "b")
    with stage.scene.load():
        for number in (signal.SIGQUIT, signal.SIGKILL):
            stage.more()
            server.end(number)
            server.start()
            stage.more(40)
    eventually(stage.scene.claim, WAIT_S)
    stage.verdict()
    eventually(lambda: stage.scene.shares() == [8, 8], WAIT_S, stage.said)
    assert all(process.alive for process in (*stage.fleet.nodes.values(), *stage.fleet.consumers.values()))
    stage.written_by_one_at_a_time()
