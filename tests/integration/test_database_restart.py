"""Postgres is stopped at once, and killed with -9, under nodes, consumers and a publisher: all go on by themselves."""

from __future__ import annotations

import os
import signal

import psutil
import pytest

from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from tests.integration.sharing_kit import WAIT_S, Stage
from tests.kit import eventually


@pytest.fixture
def database(server: EmbeddedPostgres) -> str:
    return server.url


def end(server: EmbeddedPostgres, number: signal.Signals) -> None:
    """SIGQUIT is an immediate stop; with SIGKILL the backends die of their postmaster's death."""
    pid = int((server.data_dir / "pg" / "postmaster.pid").read_text().split()[0])
    os.kill(pid, number)
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, WAIT_S)


@pytest.mark.conforms("W1", "W2", "E13", "E17")
def test_all_go_on_when_postgres_was_killed(stage: Stage, server: EmbeddedPostgres) -> None:
    stage.serve("n1", "n2")
    stage.share("a", "b")
    with stage.scene.load():
        for number in (signal.SIGQUIT, signal.SIGKILL):
            stage.more()
            end(server, number)
            server.start()
            stage.more(40)
    eventually(stage.scene.claim, WAIT_S)
    stage.verdict()
    eventually(lambda: stage.scene.shares() == [8, 8], WAIT_S, stage.said)
    assert all(process.alive for process in (*stage.fleet.nodes.values(), *stage.fleet.consumers.values()))
    stage.written_by_one_at_a_time()
