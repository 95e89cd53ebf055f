"""Measures how soon other nodes lead the groups of a killed node, and at what cost.

Many groups on several real nodes. Times are in seconds of the database's clock. Transactions are those of the whole
database as `pg_stat_database` counts them, which a busy connection reports once a second; each is a few statements.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sublet_leader.settings import LeaderSettings
from sublet_storage.db.connect import connect
from sublet_storage.spaces.space_changes import reshard
from tests.kit import eventually
from tests.kit_nodes import Fleet

AGENTS = 2
WINDOW_S = 3.0
WAIT_S = 60.0

_SETTLED = """
select count(*), count(distinct l.leadership_id)
  from leadership l join lending r on r.group_id = l.leadership_id
 where r.status = 'held' and r.term = l.term and l.expires_at > clock_timestamp()"""

_LED = """
select incarnation, array_agg(leadership_id) from leadership where leadership_id > 0
 group by incarnation order by count(*) desc limit 1"""

_TAKEN = """
select extract(epoch from max(at))::float8 from lending_history
 where event = 'takeover' and group_id = any(%s) and at >= to_timestamp(%s)"""

_COUNTED = """
select extract(epoch from clock_timestamp())::float8, xact_commit + xact_rollback
  from pg_stat_database where datname = current_database()"""


@dataclass(frozen=True, slots=True)
class Takeover:
    """`moved`: groups of the killed node. `led_s`: from the kill until the last of them has a leader again.
    `per_group`: transactions from the kill until all its streams are reclaimed, beyond the usual rate, per group moved.
    `granted_anew`: streams that have another grant than before."""

    nodes: int
    groups: int
    moved: int
    lease_s: float
    led_s: float
    per_group: float
    granted_anew: int


class Town:
    """Nodes, and agents that subscribe to every group; each group has a stream for each agent."""

    def __init__(self, url: str, directory: Path, nodes: int, groups: int, speed: float) -> None:
        self.groups, self.fleet, self.connection = groups, Fleet(url, directory, speed), connect(url)
        reshard(self.connection, "default", AGENTS)
        try:
            self.fleet.serve(*(f"n{number}" for number in range(nodes)))
            for number in range(AGENTS):
                self.fleet.subscriber(f"agent{number}", "$share/group{}/#", groups)
            self.settle()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.fleet.close()
        self.connection.close()

    def settle(self) -> None:
        """Wait until every stream of every group is held under the grant of a leader with a valid lease."""
        entire = (self.groups * AGENTS, self.groups)
        eventually(lambda: self.row(_SETTLED) == entire, WAIT_S, lambda: f"{self.row(_SETTLED)} of {entire}", 0.05)

    def row(self, statement: str, *parameters: Any) -> Any:
        return self.connection.execute(statement, parameters).fetchone()

    def grants(self) -> dict[tuple[int, int], int]:
        """Return {(group, stream): grant id}."""
        found = self.connection.execute("select group_id, stream_id, grant_id from lending").fetchall()
        return {(group, stream): grant for group, stream, grant in found}

    def rate(self) -> float:
        """Measure transactions per second for a while."""
        began, counted = self.row(_COUNTED)
        over = f"select * from ({_COUNTED}) counted (at, number) where at >= %s"
        ended, after = eventually(lambda: self.row(over, began + WINDOW_S), 2 * WINDOW_S, every_s=0.2)
        return float((after - counted) / (ended - began))


def takeover(url: str, directory: Path, nodes: int = 5, groups: int = 200, speed: float = 2.0) -> Takeover:
    """Kill the node that leads most groups, and measure the takeover. All times are the defaults divided by `speed`."""
    lease_s = LeaderSettings().scaled(speed).lease_duration_s
    with closing(Town(url, directory, nodes, groups, speed)) as town:
        rate, grants = town.rate(), town.grants()
        incarnation, led = town.row(_LED)
        began, counted = town.row(_COUNTED)
        town.fleet.nodes[incarnation.rpartition("-")[0]].kill()
        eventually(lambda: not town.row("select 1 from leadership where incarnation = %s limit 1", incarnation), WAIT_S)
        town.settle()
        ended, after = town.row(_COUNTED)
        (taken,) = town.row(_TAKEN, led, began)
        per_group = max(0.0, after - counted - rate * (ended - began)) / len(led)
        granted_anew = sum(grants.get(key) != grant for key, grant in town.grants().items())
        return Takeover(nodes, groups, len(led), lease_s, taken - began, per_group, granted_anew)
