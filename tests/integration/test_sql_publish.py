"""Publishing by SQL with real leader processes: killed, cut off, deposed, while spaces change and transactions wait."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import psycopg
import pytest

from sublet_storage.producer.outbox_mover import OutboxBacklog, read_backlog
from sublet_storage.spaces.space_changes import alter_space, create_space, drop_space, reshard, rollover
from tests.integration.cli_kit import Shell
from tests.integration.log_kit import Connection, by_key, everything
from tests.kit import WAIT_S, Background, eventually
from tests.kit_nodes import Fleet

KEYS = 4
"""Even, as the topics are two: a key that had both would be in two spaces at once, and have no order between them."""
MANY = """
select sublet.publish('eu/' || n %% 2, n::text, %s::text || n %% %s) from generate_series(%s::int, %s::int) n"""
CUT = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'sublet relay'"


class Writer(Background):
    """Transactions of its own, one after the other, every fifth rolled back; `done` are the messages committed."""

    def __init__(self, database: str, name: str) -> None:
        super().__init__(self._write, every_s=0.003)
        self.name, self._chance, self._turns = name, random.Random(name), itertools.count(1)
        self._mine = self.resources.enter_context(psycopg.connect(database))

    def _write(self) -> int:
        rows = self._chance.randint(1, 40)
        self._mine.execute(MANY, (self.name, KEYS, self.done, self.done + rows - 1))
        if next(self._turns) % 5 == 0:
            self._mine.rollback()
            return 0
        self._mine.commit()
        return rows


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
            assert numbers == list(range(key, writer.done, KEYS)), writer.name
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


def test_what_waits_and_what_was_set_aside_is_shown(conn: Connection, empty_fleet: Fleet, shell: Shell) -> None:
    conn.execute("select publish('t', 'v') from generate_series(1, 3)")
    conn.execute("insert into outbox (topic) values ('t/#')")
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
