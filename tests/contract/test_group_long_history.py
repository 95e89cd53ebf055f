"""Groups with a long history: each statement reads what it needs of it, by an index."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet_storage.doctor.checks import run_checks
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.status.diagnosis_queries import diagnose_group
from sublet_storage.groups.status.overview import describe_group, list_groups
from tests.contract.group_world import SHARE, Led, PostgresWorld

_LINES = """
insert into lending_history (at, group_id, stream_id, event, reason, grant_id, position, term)
select clock_timestamp() - %(age)s::interval, %(group)s, %(stream)s, %(event)s, 'share', 1, 0, 1
  from generate_series(1, 100000)"""

_READS = """
select sum(pg_stat_get_blocks_fetched(relation)) from (
  select 'lending_history'::regclass union all
  select indexrelid from pg_index where indrelid = 'lending_history'::regclass) as of (relation)"""


def count_history_reads(postgres: PostgresWorld, work: Callable[[], object]) -> int:
    """Return how many pages of the history and its indexes are read, cached or not, while the work is done."""
    before = _read_page_count(postgres)
    work()
    return _read_page_count(postgres) - before


def _read_page_count(postgres: PostgresWorld) -> int:
    postgres.connection.execute("select pg_stat_force_next_flush()")
    ((count,),) = postgres.connection.execute(_READS).fetchall()
    return int(count)


def lengthen_history(postgres: PostgresWorld, led: Led, event: str = "grant", age: str = "1 minute") -> None:
    """Add 100 000 such events of the group's first stream."""
    postgres.connection.execute("alter table lending_history set (autovacuum_enabled = false)")
    postgres.connection.execute(_LINES, {"group": led.group_id, "stream": led.stream, "event": event, "age": age})
    postgres.connection.execute("analyze")


@pytest.mark.parametrize(("event", "age"), [("grant", "1 minute"), ("delete", "2 hours")])
def test_a_new_life_reads_little_of_a_long_one(postgres: PostgresWorld, event: str, age: str) -> None:
    led = postgres.led(2)
    led.grant()
    postgres.store.delete_group(SHARE)
    for changed in ("consumer_group set deleted_at", "lending_history set at"):
        postgres.connection.execute(f"update {changed} = clock_timestamp() - %s::interval", (age,))
    group = postgres.group()
    lengthen_history(postgres, led, event, age)
    reads = count_history_reads(
        postgres, lambda: group_lifecycle.set_revoked_at(postgres.connection, [group.group_id], None)
    )
    assert reads < 100


@pytest.mark.parametrize("event", ["grant", "revoke"])
def test_a_view_reads_little_of_a_long_history(postgres: PostgresWorld, event: str) -> None:
    led = postgres.led(3)
    _, bad, revoked = led.streams
    postgres.append(bad)
    led.grant(bad).release(0, "it is poison", poison=1)
    led.grant(revoked).record("revoke", "for others")
    lengthen_history(postgres, led, event)
    views = (
        lambda: list_groups(postgres.connection),
        lambda: describe_group(postgres.connection, SHARE),
        lambda: diagnose_group(postgres.connection, SHARE),
        lambda: list(run_checks(postgres.connection, 0.0, 1)),
    )
    assert max(count_history_reads(postgres, view) for view in views) < 100
