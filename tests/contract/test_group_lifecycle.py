"""A group that is deleted and made anew: what its former members had is granted when they may begin no more calls.
What both group stores promise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pytest

from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.admin import progress_transfer
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.model.records import Group, GroupOptions
from sublet_storage.groups.status.diagnosis_facts import StallReason
from sublet_storage.groups.status.diagnosis_queries import diagnose_group
from tests.contract.group_world import SHARE, Led, PostgresWorld, World


def since(led: Led) -> dict[int, float]:
    """Return {stream: how long ago it was taken from its holder}, as the group's leader sees it."""
    return {stream: -row.reserved_s for stream, row in led.rows().items() if row.reserved_s}


@pytest.mark.conforms("E23", "E34")
def test_the_next_life_knows_when_streams_were_taken(world: World) -> None:
    first = world.led(4)
    had, free, freed, blocked = first.streams
    world.append(had, 2)
    first.grant(had)
    first.grant(freed).force_release()
    world.append(blocked, 2)
    first.grant(blocked).advance(2)
    world.lower_head(blocked, 1)
    first.sync()
    other = world.lead(world.group(Subscription.parse("$share/billing/#")))
    other.grant(free)
    third = world.group(Subscription.parse("$share/third/#"))
    for led in (first, other):
        world.store.delete_group(led.group.subscription)
    world.clock.advance(3)
    assert since(world.lead(world.declare())) == {had: 3.0, blocked: 3.0}
    assert since(world.lead(third)) == {}
    world.store.delete_group(SHARE)
    world.clock.advance(2)
    led = world.lead(world.declare())
    assert since(led) == {had: 5.0, blocked: 5.0}, "also if it is made anew twice"
    assert led.grant(had).row.reserved_s == 0, "which is for the leader to see to"
    world.rollover(1)
    assert led.sync()[had].reserved_s == 0, "what is granted is not marked again as streams come"
    world.store.delete_group(SHARE)
    world.clock.advance(3600)
    assert since(world.lead(world.declare())) == {}, "that is long ago"


def row_of(world: PostgresWorld, stream_id: int) -> list[tuple[object, ...]]:
    """Return the stream's status, and when it was taken from its holder, if it has a row."""
    asked = "select status, held_until from lending where stream_id = %s"
    return world.connection.execute(asked, (stream_id,)).fetchall()


def held_and_closed(world: PostgresWorld) -> Led:
    """Return a group whose one stream is granted, has two messages and is closed."""
    held = world.granted(2)
    world.rollover(1)
    return held.led


def imported(
    world: PostgresWorld,
    options: GroupOptions,
    progress: progress_transfer.ExportedProgress,
    *,
    is_deleted_now: bool = False,
) -> Group:
    """Delete the group, by the test's clock or (`is_deleted_now`) the database's, and make it anew."""
    (world.another_store() if is_deleted_now else world.store).delete_group(SHARE)
    with world.connection.transaction():
        return progress_transfer.create_from_progress(world.connection, SHARE, options, progress, "imported")


@pytest.mark.conforms("E34")
def test_what_a_forced_reset_took_stays_taken(postgres: PostgresWorld) -> None:
    """Through further resets, and in the next life of the group."""
    led = held_and_closed(postgres)

    def reset(target: ResetTarget) -> list[tuple[object, ...]]:
        postgres.reset(led, target, led.stream, force=True)
        return row_of(postgres, led.stream)

    ((status, taken_at),) = reset(ResetTarget.latest())
    assert (status, taken_at is None) == ("finished", False)
    assert reset(ResetTarget.earliest()) == reset(ResetTarget.current()) == [("free", taken_at)]
    progress = progress_transfer.read_progress(postgres.connection, led.group)
    imported(postgres, led.group.options, progress, is_deleted_now=True)
    assert row_of(postgres, led.stream) == [("free", taken_at)]


@pytest.mark.conforms("E34")
def test_what_a_reset_gives_a_new_life_was_taken_too(postgres: PostgresWorld) -> None:
    led = held_and_closed(postgres)
    postgres.another_store().delete_group(SHARE)
    postgres.connection.execute("update lending_history set at = clock_timestamp()")
    group = postgres.declare(starting_position=StartingPosition.LATEST)
    assert row_of(postgres, led.stream) == [], "it has ended"
    postgres.reset(group, ResetTarget.earliest())
    ((_, taken_at),) = row_of(postgres, led.stream)
    assert taken_at is not None


def test_a_deletion_reads_the_rows_that_are_held(postgres: PostgresWorld) -> None:
    """A group may have hundreds of thousands of others."""
    led = postgres.led(50)
    led.grant()
    read_rows: list[Any] = []

    def record_rows(cursor: psycopg.Cursor[Any]) -> psycopg.rows.RowMaker[Any]:
        make_row = psycopg.rows.tuple_row(cursor)

        def record(values: Sequence[Any]) -> Any:
            read_rows.append(make_row(values))
            return read_rows[-1]

        return record

    postgres.connection.row_factory = record_rows
    with postgres.connection.transaction():
        assert group_lifecycle.delete(postgres.connection, led.group_id, postgres.clock())
    assert [event for event, *_ in led.events()] == ["grant", "delete"]
    assert len(read_rows) < 10


@pytest.mark.conforms("A4")
def test_an_import_misses_nothing_that_it_had(postgres: PostgresWorld) -> None:
    """Of what is gone: what the group has read, what was over when it began, and what stayed empty."""
    (stream,) = postgres.add_space()
    (before,) = postgres.add_space("before", "orders/before/#")
    postgres.append(before, 3)
    postgres.drop_space(2)
    led = postgres.lead(postgres.declare(starting_position=StartingPosition.LATEST), streams=(stream,))
    postgres.append(stream, 2)
    led.grant().advance(2)
    progress = progress_transfer.read_progress(postgres.connection, led.group)
    (empty,) = postgres.rollover(1)
    postgres.rollover(1)
    for each in (stream, before, empty):
        postgres.retire(postgres.streams.streams[each].generation.generation_id)
    imported(postgres, led.group.options, progress)
    assert [status for status, _ in row_of(postgres, stream)] == ["free"]


@pytest.mark.conforms("E34")
def test_what_came_after_an_export_was_taken_too(postgres: PostgresWorld) -> None:
    led = postgres.led()
    progress = progress_transfer.read_progress(postgres.connection, led.group)
    (stream,) = postgres.rollover(1)
    led.sync()
    postgres.append(stream, 2)
    led.grant(stream)
    group = imported(postgres, led.group.options, progress)
    assert row_of(postgres, stream) == [], "its leader sees it first"
    postgres.clock.advance(3)
    assert postgres.lead(group).sync()[stream].reserved_s == -3


@pytest.mark.conforms("E34", "A7")
def test_why_names_a_former_holder_that_may_not_know(postgres: PostgresWorld) -> None:
    led = postgres.granted(2).led
    postgres.connection.execute("update lending_history set at = clock_timestamp()")
    postgres.reset(led, ResetTarget.earliest(), force=True)
    postgres.connection.execute("update leadership set expires_at = clock_timestamp() + interval '1 minute'")
    (answer,) = diagnose_group(postgres.connection, SHARE)[1]
    assert answer.diagnosis.reason is StallReason.FORMER_HOLDER
    assert "begin" in answer.diagnosis.detail
