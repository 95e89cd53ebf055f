"""What a drop of a space would cost: its own messages and users, and those of no other space."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.spaces.drop_check import DropAffectedGroup, SpaceDropImpact, list_dropped_spaces, read_usage
from sublet_storage.spaces.space_changes import MAX_S
from sublet_storage.spaces.space_queries import find_space
from tests.contract.group_world import PostgresWorld

EARLIEST = StartingPosition.EARLIEST
ALL, OTHER, AHEAD, LATER, DELETED = (
    Subscription.parse(text)
    for text in ("$share/all/#", "$share/other/other/#", "$share/ahead/#", "$queue/later/#", "$share/deleted/#")
)


@pytest.fixture
def usage(postgres: PostgresWorld) -> SpaceDropImpact:
    """Return the usage of the space `default`, which has streams of 10, 10 and 5 messages, beside another's of 7."""
    (gone,) = postgres.add_space()
    postgres.append(gone, 99)
    first, second = postgres.rollover(1, 2)
    postgres.retire(1)
    (other,) = postgres.add_space("other", "other/#")
    for stream, count in ((first, 10), (second, 10), (other, 7)):
        postgres.append(stream, count)
    for subscription in (ALL, OTHER, DELETED):
        led = postgres.lead(postgres.declare(subscription, starting_position=EARLIEST))
        for stream in led.rows():
            led.grant(stream).advance(4)
    postgres.store.delete_group(DELETED)
    postgres.lead(postgres.declare(AHEAD))
    for space, count in ((1, 5), (2, 3)):
        (newest,) = postgres.rollover(space, 1)
        postgres.append(newest, count)
    later = postgres.declare(LATER, starting_position=StartingPosition.LATEST)
    execute = postgres.connection.execute
    for stream, status in ((gone, "free"), (first, "finished")):
        insert = "insert into lending (group_id, stream_id, status, position) values (%s, %s, %s, 0)"
        execute(insert, (later.group_id, stream, status))
    for name, stream, age in (("recent", first, 0), ("idle", second, 2), ("elsewhere", other, 0)):
        execute(
            "insert into producer (producer_id, stream_id, incarnation, sequence, end_offset, updated_at)"
            " values (%s, %s, 1, 1, 1, now() - make_interval(hours => %s))",
            (name, stream, age),
        )
    for name, space, expired in (("holds", 1, "null"), ("expired", 1, "now()"), ("holds elsewhere", 2, "null")):
        execute(
            "insert into capability (space_id, producer_id, incarnation, least, expires_at, expired_at)"
            f" values (%s, %s, 1, '[[1]]', now(), {expired})",
            (space, name),
        )
    return read_usage(postgres.connection, find_space(postgres.connection, "default"))


def test_what_a_drop_costs_is_of_its_space(usage: SpaceDropImpact) -> None:
    """What nobody has noticed yet is unread, and what is gone is lost already."""
    assert usage == SpaceDropImpact(
        messages=25,
        groups=(
            DropAffectedGroup(str(AHEAD), 0, 1, 5),
            DropAffectedGroup(str(ALL), 2, 3, 17),
            DropAffectedGroup(str(LATER), 0, 0, 0),
        ),
        producers=("holds", "recent"),
    )


def test_dropped_spaces_are_listed_while_they_retain(postgres: PostgresWorld) -> None:
    """With what they have, and not spaces that are there still."""
    (gone,) = postgres.add_space()
    (retained,) = postgres.add_space("dropped", "a/#")
    postgres.add_space("empty", "b/#")
    for stream in (gone, retained):
        postgres.append(stream, 10)
    (more,) = postgres.rollover(2, 1)
    postgres.append(more, 3)
    postgres.rollover(2, 1)
    for space in (2, 3):
        postgres.drop_space(space)
    last = postgres.streams.streams[more].generation.generation_id
    postgres.connection.execute(
        "update generation set closed_at = case generation_id when %s then 'epoch'::timestamptz else now() end"
        " where generation_id >= %s",
        (last, last),
    )
    postgres.connection.execute("update space set retention_s = 60")
    (found,) = list_dropped_spaces(postgres.connection)
    assert (found.space.name, found.messages) == ("dropped", 13)
    assert found.retained_until == datetime(1970, 1, 1, 0, 1, tzinfo=UTC), "what had no message is not retained"
    postgres.connection.execute("update generation set closed_at = '294276-12-31'")
    postgres.connection.execute(f"update space set retention_s = {MAX_S}")
    (found,) = list_dropped_spaces(postgres.connection)
    assert found.retained_until is not None
    assert found.retained_until.year == 9999, "later than any that can be shown"
    postgres.retire(postgres.streams.streams[retained].generation.generation_id)
    assert [each.messages for each in list_dropped_spaces(postgres.connection)] == [3]
