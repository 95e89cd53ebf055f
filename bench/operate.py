"""Duration of operator commands with many groups, beside one count of the same rows.

`python -m bench operate --groups 10000 --streams 10`. A database with groups and a row for each of their streams, some
of them held, behind or blocked; commands run as processes, and the queries that they send.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import urlopen

import psycopg

from bench import _postgres as postgres
from bench import _report as report
from bench._report import Beside
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.db.connect import connect
from sublet_storage.doctor.checks import find_leaderless_groups
from sublet_storage.groups.status.lag_queries import read_total_lags
from sublet_storage.groups.status.overview import describe_group, list_groups
from sublet_storage.spaces.space_changes import reshard
from tests.kit import eventually
from tests.kit_nodes import ROOT, Process, environment

ONE_S = 1.0
PROSE = """A database with {groups:,} groups and {lendings:,} rows of lending: of ten streams, seven are held and
behind, one is free, one consumed, one blocked. *list* and *describe* as functions, on a connection that is
there, and as commands, processes of their own that begin with loading Python; *HTTP* is what a node's
page and scripts are answered by a process that is there, JSON and all; *no leader* is what each node looks
up three times per lease, *sample* what it samples for its page's curves; medians of {rounds} rounds in
which all take turns. Beside each stands one `select count(*)` of all rows of lending. The target is a
second for each; as the table shows ratios, what a second is beside that count stands as the limit."""

_GROUPS = """
insert into consumer_group (kind, name, filter, starting_position, after_generation)
select 'share', 'team' || to_char(i, 'FM00000'), '#', 'earliest', (select max(generation_id) from generation)
  from generate_series(1, %s) i"""

_LEADERS = """
insert into leadership (leadership_id, node, incarnation, address, term, expires_at)
select group_id, 'n' || group_id % 2, 'a life', '127.0.0.1:7411', 1, clock_timestamp() + interval '1 day'
  from consumer_group"""

_LENDINGS = """
insert into lending (group_id, stream_id, status, position, grant_id, borrower_id, agent, session, granted_at)
select g.group_id, s.stream_id,
       case when s.stream_id % 10 < 7 then 'held' when s.stream_id % 10 = 9 then 'blocked' else 'free' end,
       case when s.stream_id % 10 = 8 then s.head else s.head / 2 end, g.group_id * 1000 + s.stream_id,
       'b' || s.stream_id % 3, 'a' || s.stream_id % 3, 'worker' || s.stream_id % 3, clock_timestamp()
  from consumer_group g cross join stream s where s.state = 'open'"""


def main(arguments: list[str] | None = None) -> None:
    """Run, write the JSON and the page, print the table."""
    options = _options(arguments)
    with postgres.place() as (url, directory), connect(url) as conn, _node(url, directory) as http:
        _fill(conn, options.groups, options.streams)
        name = Subscription.parse(f"$share/team{options.groups // 2:05}/#")
        asked: dict[str, Callable[[], object]] = {
            "count": lambda: conn.execute("select count(*) from lending").fetchone(),
            "list": lambda: list_groups(conn),
            "describe": lambda: describe_group(conn, name),
            "sublet groups list": lambda: _command(url, "groups", "list"),
            "sublet groups list --json": lambda: _command(url, "groups", "list", "--json"),
            "sublet groups describe": lambda: _command(url, "groups", "describe", str(name)),
            "sublet doctor": lambda: _command(url, "doctor"),
            "no leader": lambda: find_leaderless_groups(conn),
            "sample": lambda: read_total_lags(conn),
            "HTTP: 50 groups by name": lambda: _get(http, "groups"),
            "HTTP: 50 groups by lag": lambda: _get(http, "groups?sort=lag&order=desc"),
            "HTTP: the last 50": lambda: _get(http, f"groups?offset={max(options.groups - 50, 0)}"),
            "HTTP: search": lambda: _get(http, "groups?search=77&sort=lag"),
            "HTTP: one group": lambda: _get(http, f"group?subscription={quote(str(name), safe='')}"),
        }
        ms = _medians(asked, options.rounds)
    limit = 1000 * ONE_S / ms["count"]
    figures = [Beside(what, ms[what], "ms", "select count(*)", ms["count"], limit) for what in asked if what != "count"]
    lendings = options.groups * options.streams
    settings = {"groups": options.groups, "lendings": lendings, "rounds": options.rounds}
    report.save("operate", settings, {"figures": [each.judged() for each in figures]}, options.json)
    section = report.table(figures)
    prose = PROSE.format(groups=options.groups, lendings=lendings, rounds=options.rounds)
    report.page(options.page, "operate", prose, section)
    print(section)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench operate", description=__doc__)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--streams", type=int, default=10, help="rows of lending for each group")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, default=None, help="where the results go")
    parser.add_argument("--page", type=Path, default=report.PAGE)
    return parser.parse_args(arguments)


def _fill(conn: psycopg.Connection[Any], groups: int, streams: int) -> None:
    reshard(conn, "default", streams)
    conn.execute("update stream set head = 1000")
    conn.execute(_GROUPS, (groups,))
    conn.execute(_LEADERS)
    conn.execute(_LENDINGS)
    conn.execute("vacuum analyze")


def _medians(asked: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return medians in milliseconds."""
    taken: dict[str, list[float]] = {}
    for _ in range(rounds):
        for what, ask in asked.items():
            begun = time.perf_counter()
            ask()
            taken.setdefault(what, []).append(1000 * (time.perf_counter() - begun))
    return {what: statistics.median(values) for what, values in taken.items()}


@contextmanager
def _node(url: str, directory: Path) -> Iterator[str]:
    """Yield the address of its HTTP port."""
    node = Process("tests.processes.node", url, "n1", log=directory / "node.log", extra={"SUBLET_HTTP": "yes"})
    try:
        yield eventually(lambda: re.findall(r"answers at (http://\S+/)", node.output()), 60.0, node.output)[0]
    finally:
        node.stop()


def _get(http: str, path: str) -> None:
    with urlopen(f"{http}api/v1/{path}", timeout=60) as answer:
        answer.read()


def _command(url: str, *arguments: str) -> None:
    """Run a command to its end; its exit code does not matter."""
    subprocess.run(
        [sys.executable, "-m", "sublet.cli", *arguments],
        cwd=ROOT,
        env=environment() | {"SUBLET_DATABASE_URL": url},
        capture_output=True,
        check=False,
    )


if __name__ == "__main__":
    main()
