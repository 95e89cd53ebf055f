"""Publishing by SQL with real leader processes: killed, cut off, deposed, while spaces change and transactions wait."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable

import psycopg
import pytest

from sublet_storage.producer.outbox_mover import OutboxBacklog, read_backlog
from sublet_storage.spaces.space_changes import alter_space, create_space, drop_space, reshard, rollover
from tests.integration.cli_kit import a_shell
from tests.integration.log_kit import Connection, by_key, everything
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import Fleet

KEYS = 4
"""Even, as the topics are two: a key that had both would be in two spaces at once, and have no order between them."""
MANY = """
select sublet.publish('eu/' || n %% 2, n::text, %s::text || n %% %s) from generate_series(%s::int, %s::int) n"""
CUT = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'sublet relay'"


class Writer:
    """A thread with transactions of its own, one after the other; every fifth is rolled back."""

    def __init__(self, database: str, name: str) -> None:
        self.committed = 0
        self.failure: Exception | None = None
        self._database, self.name, self._stop = database, name, threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(WAIT_S)
        assert self.failure is None

    def more(self, count: int) -> None:
        """Wait until so many more messages have been committed."""
        least = self.committed + count
        eventually(lambda: self.committed >= least or self.failure, WAIT_S)

    def _run(self) -> None:
        try:
            self._write()
        except Exception as error:  # noqa: BLE001 reported where the test looks
            self.failure = error

    def _write(self) -> None:
        chance = random.Random(self.name)
        with psycopg.connect(self._database) as mine:
            for turn in itertools.count():
                if self._stop.wait(0.003):
                    return
                rows = chance.randint(1, 40)
                mine.execute(MANY, (self.name, KEYS, self.committed, self.committed + rows - 1))
                if turn % 5 == 4:
                    mine.rollback()
                else:
                    mine.commit()
                    self.committed += rows


def leader(conn: Connection) -> str | None:
    """The node that leads the maintenance now."""
    row = conn.execute("select node from leadership where leadership_id = 0 and expires_at > now()").fetchone()
    return None if row is None else str(row[0])


def all_moved(conn: Connection, fleet: Fleet) -> None:
    def story() -> str:
        return str(read_backlog(conn)) + "".join(node.output()[-1500:] for node in fleet.nodes.values())

    eventually(lambda: read_backlog(conn) == OutboxBacklog(0, None, 0), WAIT_S, story, every_s=0.05)


def exactly_once_in_order(conn: Connection, *writers: Writer) -> None:
    """Each writer counts through all its messages, and its keys take turns."""
    found = by_key(conn)
    for writer in writers:
        for key in range(KEYS):
            numbers = list(map(int, found.pop(f"{writer.name}{key}".encode())))
            assert numbers == list(range(key, writer.committed, KEYS)), writer.name
    assert not found


@pytest.mark.conforms("W7", "W3")
def test_each_message_is_moved_once_and_in_order(database: str, conn: Connection, empty_fleet: Fleet) -> None:
    """While leaders are killed and cut off from the database, and spaces change."""
    random.seed(11)
    changes: list[Callable[[], object]] = [
        lambda: rollover(conn, "default"),
        lambda: create_space(conn, "eu", "eu/#", shards=3, compression="zstd"),
        lambda: reshard(conn, "eu", 7),
        lambda: alter_space(conn, "eu", filter="+/1"),
        lambda: rollover(conn, "eu"),
        lambda: drop_space(conn, "eu"),
        lambda: reshard(conn, "default", 4),
    ]
    names = [f"n{number}" for number in range(6)]
    empty_fleet.serve(names.pop(0), names.pop(0))
    with Writer(database, "a") as one, Writer(database, "b") as two:
        for round_ in (changes[:2], changes[2:5], changes[5:]):
            one.more(300)
            for change in round_:
                change()
                conn.execute(CUT)
                one.more(random.randint(1, 100))
            doomed = eventually(lambda: leader(conn), WAIT_S)
            before = conn.execute("select from block").rowcount
            eventually(lambda before=before: conn.execute("select from block").rowcount > before, WAIT_S)  # type: ignore[misc]
            one.more(random.randint(1, 60))
            empty_fleet.nodes[doomed].kill()
            empty_fleet.serve(names.pop(0))
        two.more(100)
    all_moved(conn, empty_fleet)
    exactly_once_in_order(conn, one, two)


@pytest.mark.long
@pytest.mark.conforms("W7")
def test_a_large_transaction_comes_at_its_commit(database: str, conn: Connection, fleet: Fleet) -> None:
    with psycopg.connect(database) as user:
        many = "select sublet.publish('t', n::text, (n % 3)::text) from generate_series(0, 99999) n"
        user.execute(many)
        user.rollback()
        user.execute(many)
        assert not any(everything(conn).values())
        user.commit()
    all_moved(conn, fleet)
    for key, numbers in by_key(conn).items():
        assert numbers == [b"%d" % n for n in range(int(key), 100_000, 3)]
    assert leader(conn) == "n1"
    assert "Traceback" not in fleet.nodes["n1"].output()


def test_what_waits_and_what_was_set_aside_is_shown(database: str, conn: Connection, empty_fleet: Fleet) -> None:
    conn.execute("select publish('t', 'v') from generate_series(1, 3)")
    conn.execute("insert into outbox (topic) values ('t/#')")
    with a_shell(SUBLET_DATABASE_URL=database) as shell:
        reported = shell.run("spaces", "list")
        assert "4 published by SQL wait for a leader node to move them, the oldest for " in reported.err
        answer = shell.run("spaces", "list", "--json").object["outbox"]
        assert (answer["messages"], answer["rejected"]) == (4, 0)
        assert answer["oldest_age_s"] > 0
        empty_fleet.serve("n1")
        eventually(lambda: read_backlog(conn) == OutboxBacklog(0, None, 1), WAIT_S)
        reported = shell.run("spaces", "list")
        assert reported.err == "1 published by SQL could not be moved: see `reason` in the table outbox_rejected.\n"
    output = empty_fleet.nodes["n1"].output()
    assert output.count("message moved to outbox_rejected: outbox_id=4: topic 't/#'") == 1
