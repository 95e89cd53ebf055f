"""Postgres is stopped at once, and killed with -9, under nodes, consumers and a publisher: all go on by themselves."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import psutil
import psycopg
import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.errors import DatabaseUnreachable
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.producer import Publisher
from tests.integration.sharing_kit import Stage
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet
from tests.postgres_proxy import PostgresProxy


@pytest.fixture
def database(server: EmbeddedPostgres) -> str:
    return server.url


def end(server: EmbeddedPostgres, number: signal.Signals) -> None:
    """SIGQUIT is an immediate stop; with SIGKILL the backends die of their postmaster's death."""
    pid = int((server.data_dir / "pg" / "postmaster.pid").read_text().split()[0])
    os.kill(pid, number)
    eventually(lambda: not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, WAIT_S)


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.conforms("W1", "W7", "E25")
def test_a_number_given_again_proves_no_commit(server: EmbeddedPostgres, fleet: Fleet) -> None:
    """After a crash the numbers of transactions that had left nothing on disk are given to others."""

    def write(batch: Batch) -> None:
        with batch.transaction() as output:
            output.execute("insert into public.output values (1)")

    with psycopg.connect(server.url, autocommit=True) as conn:
        conn.execute("alter system set wal_writer_delay = '10s'")
        conn.execute("select pg_reload_conf()")
        conn.execute("create table public.output (n integer)")
    with Publisher(server.url) as publisher:
        publisher.publish("t", b"x").result(WAIT_S)
    with (
        PostgresProxy(server.url) as proxy,
        Session("$share/g/#", proxy.url, starting_position="earliest", auto_ack=False) as session,
        ThreadPoolExecutor(1) as pool,
    ):
        batch = session.poll(WAIT_S)
        assert batch is not None
        proxy.cut_commit(resume=False, arrives=False, holds=True)
        written = pool.submit(write, batch)
        assert proxy.was_cut.wait(WAIT_S)
        end(server, signal.SIGKILL)
        server.start()
        with psycopg.connect(server.url, autocommit=True) as others:
            for _ in range(20):
                others.execute("select pg_current_xact_id()")
        proxy.resume()
        with pytest.raises(DatabaseUnreachable, match="nothing was written"):
            written.result(WAIT_S)
        assert not batch.committed
