"""What an idle group and housekeeping read, with few past generations and with very many.

`python -m bench idle --generations 10000`. For each number of past generations a database, a node that leads one group
and keeps house, and a consumer that waits. Past generations hold a message each, which is kept and which the group has
consumed; or they are empty, and gone.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from bench import _postgres as postgres
from bench import _report as report
from bench._report import Beside
from bench.peers.ours import POLL, node
from borrower.session import Session
from protocol.words import Subscription
from storage.connect import connect
from storage.groups.model import GroupOptions, GroupWrites, NodeRef, Start
from storage.groups.postgres import PostgresGroups
from storage.past import Collapse
from storage.retention import retain
from storage.spaces import reshard, rollover
from tests.integration.log_kit import put, stream_of

GROUP = Subscription.parse("$share/g/#")
FEW = 10
SETTLES_S = 10.0
SETTINGS = {"shared_preload_libraries": "pg_stat_statements", "autovacuum": "off"}
"""What the server reads to find out what is to be vacuumed is not ours."""
CATALOGUE = "pg_class, pg_attribute, pg_index, pg_inherits, pg_constraint, pg_type, pg_depend"
AT_MOST = 1.2
PROSE = """A node that leads one group and keeps house, and a consumer that waits, for {seconds:g} s, once with {few}
past generations behind the open one and once with {many:,}, made by as many rollovers. *Kept*: each holds a message,
which the group has consumed. *Gone*: they were empty. *Statements* are those that pg_stat_statements has counted, *rows
read* and *blocks* those of our tables and of the server's catalogue, but for what the bench
itself asks and what vacuuming reads, which is done before. Figures are
those of a minute."""

_READ = """
select coalesce(sum(s.seq_tup_read + coalesce(s.idx_tup_fetch, 0)), 0)::bigint,
       coalesce(sum(heap_blks_hit + heap_blks_read + coalesce(idx_blks_hit, 0) + coalesce(idx_blks_read, 0)), 0)::bigint
  from pg_stat_all_tables s join pg_statio_all_tables using (relid)
 where s.schemaname in ('sublet', 'pg_catalog')"""

_STATEMENTS = """
select coalesce(sum(calls), 0)::bigint from public.pg_stat_statements
 where dbid = (select oid from pg_database where datname = current_database()) and query not like '%pg_stat%'"""

# As their leader would have them, who takes a stream at a time.
_FINISH = """
update lending l set status = 'finished', position = s.head from stream s
 where s.stream_id = l.stream_id and s.state = 'closed'"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Of a minute."""

    statements: float
    rows: float
    blocks: float


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    options = _options(arguments)
    with postgres.server(SETTINGS) as server:
        figures = []
        for number, kind in enumerate(("kept", "gone")):
            few = _cost(postgres.database(server, 2 * number + 1), FEW, kind, options.seconds)
            many = _cost(postgres.database(server, 2 * number + 2), options.generations, kind, options.seconds)
            figures += _compared(kind, few, many, options.generations)
    settings = {"generations": options.generations, "seconds": options.seconds}
    report.save("idle", settings, {"figures": [each.judged() for each in figures]}, options.json)
    prose = PROSE.format(few=FEW, many=options.generations, seconds=options.seconds)
    report.page(options.page, "idle", " ".join(prose.split()), report.table(figures))
    print(report.table(figures))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench idle", description=__doc__)
    parser.add_argument("--generations", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    return parser.parse_args(arguments)


def _compared(kind: str, few: Cost, many: Cost, generations: int) -> list[Beside]:
    peer = f"with {FEW}"
    pairs = {
        "statements": (many.statements, few.statements),
        "rows read": (many.rows, few.rows),
        "blocks": (many.blocks, few.blocks),
    }
    return [
        Beside(f"{what} a minute, {generations:,} generations {kind}", value, "", peer, beside, AT_MOST)
        for what, (value, beside) in pairs.items()
    ]


def _cost(url: str, generations: int, kind: str, seconds: float) -> Cost:
    with connect(url) as conn:
        conn.execute("create extension pg_stat_statements schema public")
        _fill(url, conn, generations, kind)
        with _at_rest(url) as session:
            _wait(session, SETTLES_S)
            conn.execute("select public.pg_stat_statements_reset()")
            first, before, began = _read(conn), _read(conn), time.monotonic()
            _wait(session, seconds)
            counted, minutes = conn.execute(_STATEMENTS).fetchone(), (time.monotonic() - began) / 60
            rows, blocks = (c - b - (b - a) for a, b, c in zip(first, before, _read(conn), strict=True))
    assert counted is not None
    return Cost(counted[0] / minutes, rows / minutes, blocks / minutes)


def _fill(url: str, conn: psycopg.Connection[Any], generations: int, kind: str) -> None:
    """So many past generations, which the group has behind it and housekeeping has nothing left to do with."""
    reshard(conn, "default", 1)
    store = PostgresGroups(url)
    group = store.declare_group(GROUP, GroupOptions(Start.EARLIEST))
    for done in range(1, generations + 1):
        if kind == "kept":
            put(conn, stream_of(conn, "default"), b"x")
        rollover(conn, "default")
        if done % 1000 == 0 or done == generations:
            _settle(store, conn, group.group_id)
    store.close()
    conn.execute(f"vacuum analyze space, generation, stream, lending, {CATALOGUE}")


def _settle(store: PostgresGroups, conn: psycopg.Connection[Any], group_id: int) -> None:
    bench = NodeRef("bench", "bench#1", "127.0.0.1:1")
    term = store.claim(group_id, bench, 60).term
    store.commit([GroupWrites(group_id, term, (), True)])
    store.release(bench, {group_id: term})
    conn.execute(_FINISH)
    conn.execute("update generation set closed_at = closed_at - interval '1 hour'")
    conn.execute("update stream set seen_offset = head, is_compact = true where state = 'closed'")
    collapse, unseen = Collapse(step=1000), "select from generation where state = 'closed' and is_past is null"
    idle = 0
    while idle < 3:
        idle = 0 if retain(conn) or collapse(conn) or conn.execute(unseen).rowcount else idle + 1


@contextmanager
def _at_rest(url: str) -> Iterator[Session]:
    """A consumer that holds the open stream, beside a node."""
    with (
        tempfile.TemporaryDirectory(prefix="sublet-bench-") as directory,
        node(url, POLL, Path(directory) / "node.log"),
        Session(str(GROUP), url) as session,
    ):
        while not session.held():
            session.next_batch(0.1)
        yield session


def _wait(session: Session, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        session.next_batch(left)


def _read(conn: psycopg.Connection[Any]) -> tuple[int, int]:
    """(rows, blocks) that were read so far."""
    conn.execute("select pg_stat_force_next_flush()")
    conn.execute("select pg_stat_clear_snapshot()")
    row = conn.execute(_READ).fetchone()
    assert row is not None
    return int(row[0]), int(row[1])
