"""Reads of an idle group and of maintenance, with few and with very many past generations.

`python -m bench idle --generations 10000`. For each number of past generations there are a database, a node that leads
one group and runs the maintenance, and a consumer that waits. Past generations have a message each, which is retained
and which the group has consumed; or they are empty, and gone.
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
from sublet_borrower.consumer.session import Session
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions, GroupWrites, StartingPosition
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import reshard, rollover
from tests.integration.log_kit import put, stream_of

GROUP = Subscription.parse("$share/g/#")
FEW = 10
SETTLES_S = 10.0
SETTINGS = {"shared_preload_libraries": "pg_stat_statements", "autovacuum": "off"}
"""Settings without autovacuum's checks, which would be counted as ours."""
COPIED = 100
"""Generations per transaction: each creates tables, which are locked until its end."""
AT_MOST = 1.2
PROSE = """A node that leads one group and runs the maintenance, and a consumer that waits, for {seconds:g} s, once
with {few} past generations behind the open one and once with {many:,}: {few} made by rollovers, the others copies of
one of them, in rows and, where there is a message, a partition each. *Kept*: each holds a message, which the group has
consumed. *Gone*: they were empty. *Statements* are those that pg_stat_statements has counted, *rows read* what was
found in tables and indexes, ours and the server's catalogue, as the server has counted it for the database, to which
nobody else is connected. *Blocks*, the pages that were looked at for it, have no limit: an index over more rows is a
page deeper, and most are the catalogue's, for each new connection. Figures are those of a minute."""

# Queried over a connection to another database, so that no query is counted by the next.
_COUNTED = """
select (select coalesce(sum(calls), 0)::bigint from pg_stat_statements where dbid = d.datid),
       d.tup_returned, d.blks_hit + d.blks_read from pg_stat_database d where d.datname = %s"""

# As the leader would change them, but all streams in one statement.
_FINISH = """
update lending l set status = 'finished', position = s.head from stream s
 where s.stream_id = l.stream_id and s.state = 'closed'"""

# {last}: the generation to be copied, {count}: how often.
_COPY = """
do $$
declare
  g generation;
  s stream;
  b block;
  has_messages boolean;
begin
  select * into g from generation where generation_id = {last};
  select * into s from stream where generation_id = g.generation_id;
  select * into b from block where generation_id = g.generation_id;
  has_messages := found;
  select max(ordinal) into g.ordinal from generation where space_id = g.space_id;
  for n in 1..{count} loop
    g.generation_id := nextval(pg_get_serial_sequence('generation', 'generation_id'));
    g.ordinal := g.ordinal + 1;
    s.generation_id := g.generation_id;
    s.parents := array[s.stream_id];
    s.stream_id := nextval(pg_get_serial_sequence('stream', 'stream_id'));
    insert into generation overriding system value select g.*;
    insert into stream (stream_id, space_id, generation_id, hash_from, hash_to, state, head, parents, opened_at,
                        closed_at)
    overriding system value
    values (s.stream_id, s.space_id, s.generation_id, s.hash_from, s.hash_to, s.state, s.head, s.parents, s.opened_at,
            s.closed_at);
    if has_messages then
      execute format('create table block_%1$s (like block including all)', g.generation_id);
      execute format('alter table block_%1$s alter payload set storage external', g.generation_id);
      execute format('alter table block attach partition block_%1$s for values in (%1$s)', g.generation_id);
      b.generation_id := g.generation_id;
      b.stream_id := s.stream_id;
      execute format('insert into block_%s select $1.*', g.generation_id) using b;
    end if;
  end loop;
end $$"""


@dataclass(frozen=True, slots=True)
class Cost:
    """Cost of a minute."""

    statements: float
    rows: float
    blocks: float


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    options = _options(arguments)
    with postgres.server(SETTINGS) as server, psycopg.connect(server, autocommit=True) as counts:
        counts.execute("create extension pg_stat_statements")
        figures = []
        for number, kind in enumerate(("kept", "gone")):
            few = _cost(counts, postgres.database(server, 2 * number + 1), FEW, kind, options.seconds)
            many = _cost(counts, postgres.database(server, 2 * number + 2), options.generations, kind, options.seconds)
            figures += _compared(kind, few, many, options.generations)
    settings = {"generations": options.generations, "seconds": options.seconds}
    report.save("idle", settings, {"figures": [each.judged() for each in figures]}, options.json)
    prose = PROSE.format(few=FEW, many=options.generations, seconds=options.seconds)
    report.page(options.page, "idle", " ".join(prose.split()), report.table(figures))
    print(report.table(figures))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench idle", description=__doc__)
    parser.add_argument("--generations", type=int, default=3_000)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    return parser.parse_args(arguments)


def _compared(kind: str, few: Cost, many: Cost, generations: int) -> list[Beside]:
    peer = f"with {FEW}"
    pairs = {
        "statements": (many.statements, few.statements, AT_MOST),
        "rows read": (many.rows, few.rows, AT_MOST),
        "blocks": (many.blocks, few.blocks, None),
    }
    return [
        Beside(f"{what} a minute, {generations:,} generations {kind}", value, "", peer, beside, at_most)
        for what, (value, beside, at_most) in pairs.items()
    ]


def _cost(counts: psycopg.Connection[Any], url: str, generations: int, kind: str, seconds: float) -> Cost:
    with connect(url) as conn:
        _fill(url, conn, generations, kind)
        name = conn.info.dbname
    with _at_rest(url) as session:
        _wait(session, SETTLES_S)
        before, began = _counted(counts, name), time.monotonic()
        _wait(session, seconds)
        after, minutes = _counted(counts, name), (time.monotonic() - began) / 60
    return Cost(*((now - then) / minutes for then, now in zip(before, after, strict=True)))


def _counted(counts: psycopg.Connection[Any], name: str) -> tuple[int, ...]:
    """Return the (statements, rows, blocks) of a database so far."""
    row = counts.execute(_COUNTED, (name,)).fetchone()
    assert row is not None
    return tuple(map(int, row))


def _fill(url: str, conn: psycopg.Connection[Any], generations: int, kind: str) -> None:
    """Create that many past generations, which the group has consumed and which need no maintenance."""
    conn.execute("set synchronous_commit = off")
    reshard(conn, "default", 1)
    store = PostgresGroupStore(url)
    group = store.declare_group(GROUP, GroupOptions(StartingPosition.EARLIEST))
    _roll_over(conn, FEW // 2, kind)
    _copy(conn, generations - FEW)
    _roll_over(conn, FEW - FEW // 2, kind)
    _settle(store, conn, group.group_id)
    store.close()
    conn.execute("vacuum (analyze)")


def _roll_over(conn: psycopg.Connection[Any], times: int, kind: str) -> None:
    for _ in range(times):
        if kind == "kept":
            put(conn, stream_of(conn, "default"), b"x")
        rollover(conn, "default")


def _copy(conn: psycopg.Connection[Any], times: int) -> None:
    """Copy the last closed generation."""
    last = conn.execute("select max(generation_id) from generation where state = 'closed'").fetchone()
    assert last is not None
    for done in range(0, times, COPIED):
        conn.execute(_COPY.format(last=last[0], count=min(COPIED, times - done)))


def _settle(store: PostgresGroupStore, conn: psycopg.Connection[Any], group_id: int) -> None:
    bench = NodeIncarnation("bench", "bench#1", "127.0.0.1:1")
    term = store.claim(group_id, bench, 60).term
    store.commit([GroupWrites(group_id, term, (), True)])
    store.release(bench, {group_id: term})
    conn.execute(_FINISH)
    conn.execute("update generation set closed_at = closed_at - interval '1 hour'")
    conn.execute("update stream set seen_offset = head, is_compact = true where state = 'closed'")
    collapse, unseen = (
        EmptyGenerationCleaner(step=1000),
        "select from generation where state = 'closed' and is_past is null",
    )
    idle = 0
    while idle < 3:
        idle = 0 if apply_retention(conn) or collapse(conn) or conn.execute(unseen).rowcount else idle + 1


@contextmanager
def _at_rest(url: str) -> Iterator[Session]:
    """Yield a consumer that holds the open stream, next to a node."""
    with (
        tempfile.TemporaryDirectory(prefix="sublet-bench-") as directory,
        node(url, POLL, Path(directory) / "node.log"),
        Session(str(GROUP), url) as session,
    ):
        while not session.assignment():
            session.poll(0.1)
        yield session


def _wait(session: Session, seconds: float) -> None:
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        session.poll(left)
