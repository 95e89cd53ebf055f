"""Groups with a long history: each statement reads what it needs of it, by an index."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet_storage.groups.coordinator import group_lifecycle
from tests.contract.group_world import SHARE, Led, PostgresWorld
from tests.integration.log_kit import count_page_reads

_LINES = """
insert into lending_history (at, group_id, stream_id, event, reason, grant_id, position, term)
select clock_timestamp() - %(age)s::interval, %(group)s, %(stream)s, %(event)s, 'share', 1, 0, 1
  from generate_series(1, 100000)"""


def assert_reads_little(
    postgres: PostgresWorld, led: Led, work: Callable[[], object], event: str = "grant", age: str = "1 minute"
) -> None:
    """Assert that the work reads fewer than 100 pages beside 100 000 such events of the group's stream."""
    postgres.connection.execute(_LINES, {"group": led.group_id, "stream": led.stream, "event": event, "age": age})
    postgres.connection.execute("analyze")
    assert count_page_reads(postgres.connection, work) < 100 * 100


@pytest.mark.parametrize(("event", "age"), [("grant", "1 minute"), ("delete", "2 hours")])
def test_a_new_life_reads_little_of_a_long_one(postgres: PostgresWorld, event: str, age: str) -> None:
    led = postgres.led(2)
    led.grant()
    postgres.store.delete_group(SHARE)
    for changed in ("consumer_group set deleted_at", "lending_history set at"):
        postgres.connection.execute(f"update {changed} = clock_timestamp() - %s::interval", (age,))
    group = postgres.group()

    def set_revoked_at() -> None:
        group_lifecycle.set_revoked_at(postgres.connection, [group.group_id], None)

    assert_reads_little(postgres, led, set_revoked_at, event, age)
