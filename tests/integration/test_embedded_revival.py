"""An embedded server that dies while it is used comes back by itself, and whoever uses it gets over it."""

from __future__ import annotations

import fcntl
import os
import signal
import threading
from pathlib import Path

import psycopg
import pytest

from sublet_borrower.consumer.session import Session
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.producer import Publisher
from tests.integration.cli_kit import a_shell
from tests.integration.log_kit import kill_postgres
from tests.kit import eventually


def answers(url: str) -> bool:
    try:
        psycopg.connect(url, connect_timeout=2).close()
    except psycopg.OperationalError:
        return False
    return True


def postmaster(data_dir: Path) -> int:
    return int((data_dir / "pg" / "postmaster.pid").read_text().split()[0])


def kill_and_see_it_come_back(server: EmbeddedPostgres) -> None:
    before = postmaster(server.data_dir)
    kill_postgres(server.data_dir)
    eventually(lambda: answers(server.url) and postmaster(server.data_dir) != before, 30)


@pytest.mark.conforms("W1")
def test_a_server_in_use_comes_back_by_itself(server_home: Path) -> None:
    with EmbeddedPostgres(server_home / "data") as server:
        with psycopg.connect(server.url, autocommit=True) as conn:
            conn.execute("create table kept as select 42 as answer")
        for _ in range(2):
            kill_and_see_it_come_back(server)
        with psycopg.connect(server.url) as conn:
            assert conn.execute("select answer from kept").fetchone() == (42,)
        log = (server.data_dir / "pg" / "server.log").read_text()
        assert log.count("watchdog: the server was gone while it was used: starting it again") >= 2
        assert "watchdog: it is back" in log
        url = server.url
    assert not answers(url), "the last one out stops it, as ever"


def test_a_server_that_ends_in_order_comes_back_too_while_it_is_used(server_home: Path) -> None:
    with EmbeddedPostgres(server_home / "data") as server:
        before = postmaster(server.data_dir)
        os.kill(before, signal.SIGINT)
        eventually(lambda: answers(server.url) and postmaster(server.data_dir) != before, 30)


def test_a_server_nobody_uses_stays_away(server_home: Path) -> None:
    """It dies, and its user leaves before the watchdog gets to it."""
    server = EmbeddedPostgres(server_home / "data")
    url = server.start()
    with open(server.data_dir / "server.lock") as lock, open(server.data_dir / "watchdog.lock") as watchdog:
        fcntl.flock(lock, fcntl.LOCK_EX)
        kill_postgres(server.data_dir)
        eventually(lambda: waiting(lock.fileno()) == 1, 30, "the watchdog does not see that it is gone")
        server._leave()
        eventually(lambda: waiting(lock.fileno()) == 2, 30, "the watchdog does not see that nobody is left")
        fcntl.flock(lock, fcntl.LOCK_UN)
        fcntl.flock(watchdog, fcntl.LOCK_EX)
        eventually(lambda: waiting(lock.fileno()) == 0)
    assert not answers(url)
    assert "starting it again" not in (server.data_dir / "pg" / "server.log").read_text()


def waiting(descriptor: int) -> int:
    """How many wait for a lock on this file."""
    inode = f":{os.fstat(descriptor).st_ino} "
    return sum("->" in line and inode in line for line in Path("/proc/locks").read_text().splitlines())


@pytest.mark.long
@pytest.mark.conforms("W1")
def test_publishers_nodes_and_sessions_get_over_it(server_home: Path) -> None:
    sent: list[bytes] = []
    failed: list[BaseException] = []
    stop = threading.Event()

    def publish(url: str) -> None:
        try:
            with Publisher(url) as publisher:
                while not stop.wait(0.002):
                    sent.append(b"%d" % len(sent))
                    publisher.publish(f"t/{len(sent) % 5}", sent[-1]).result(60)
        except BaseException as error:  # noqa: BLE001 - shown by the test
            failed.append(error)

    with EmbeddedPostgres(server_home / "data") as server:
        migrate(server.url)
        with a_shell(SUBLET_DATABASE_URL=server.url) as shell:
            shell.leader("n1")
            caller = threading.Thread(target=publish, args=(server.url,))
            with Session("$share/g/t/#", url=server.url, starting_position="earliest") as session:
                caller.start()
                seen = consumed(session, 50)
                for _ in range(2):
                    kill_and_see_it_come_back(server)
                    seen |= consumed(session, 50)
                stop.set()
                caller.join(60)
                assert not failed
                while seen != set(sent):
                    seen |= consumed(session, 1)


def consumed(session: Session, least: int) -> set[bytes]:
    """So many values more, at least."""
    seen: set[bytes] = set()

    def more() -> bool:
        batch = session.poll(1)
        if batch is not None:
            seen.update(batch.table.column("value").to_pylist())
        return len(seen) >= least

    eventually(more, 60, lambda: f"{len(seen)} of {least}")
    return seen
