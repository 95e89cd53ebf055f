"""A group that is deleted and made anew: what its former members had is granted when they may begin no more calls.
What both group stores promise."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.admin import progress_transfer
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.model.records import Group, StartingPosition
from sublet_storage.groups.status.diagnosis_facts import StallReason
from sublet_storage.groups.status.diagnosis_queries import diagnose_group
from tests.contract.group_world import SHARE, PostgresWorld, World, granted


def since(world: World, group: Group) -> dict[int, float]:
    """Return {stream: how long ago it was taken from its holder}, as the group's next leader sees it."""
    term = world.lead(group)
    return {row.stream_id: -row.reserved_s for row in world.store.load(group.group_id, term) if row.reserved_s}


@pytest.mark.conforms("E23", "E34")
def test_the_next_life_knows_when_streams_were_taken(world: World) -> None:
    had, free = world.add_space(shards=2)
    world.append(had, 2)
    group = world.declare()
    granted(world, group, world.lead(group), had)
    other = world.group(Subscription.parse("$share/billing/#"))
    granted(world, other, world.lead(other), free)
    for subscription in (SHARE, other.subscription):
        world.store.delete_group(subscription)
    world.clock.advance(3)
    group = world.declare()
    assert since(world, group) == {had: 3.0}
    world.store.delete_group(SHARE)
    world.clock.advance(2)
    group = world.declare()
    assert since(world, group) == {had: 5.0}, "also if it is made anew twice"
    term = world.lead(group)
    assert granted(world, group, term, had).reserved_s == 0, "which is for the leader to see to"
    world.store.delete_group(SHARE)
    world.clock.advance(3600)
    assert since(world, world.declare()) == {}, "that is long ago"


@pytest.mark.conforms("E34")
def test_what_a_forced_reset_took_stays_taken(postgres: PostgresWorld) -> None:
    """Through further resets, and in the next life of the group."""
    (stream,) = postgres.add_space()
    group = postgres.declare()
    postgres.append(stream, 2)
    granted(postgres, group, postgres.lead(group), stream)
    postgres.rollover(1)

    def reset(target: ResetTarget) -> list[tuple[object, ...]]:
        postgres.reset(group, target, stream, force=True)
        return row()

    def row() -> list[tuple[object, ...]]:
        return postgres.connection.execute(
            "select status, held_until from lending where stream_id = %s", (stream,)
        ).fetchall()

    ((status, taken_at),) = reset(ResetTarget.latest())
    assert (status, taken_at is None) == ("finished", False)
    assert reset(ResetTarget.earliest()) == reset(ResetTarget.current()) == [("free", taken_at)]
    progress = progress_transfer.read_progress(postgres.connection, group)
    postgres.store.delete_group(SHARE)
    with postgres.connection.transaction():
        progress_transfer.create_from_progress(postgres.connection, SHARE, group.options, progress, "imported")
    assert row() == [("free", taken_at)]


@pytest.mark.conforms("E34")
def test_what_a_reset_gives_a_new_life_was_taken_too(postgres: PostgresWorld) -> None:
    (stream,) = postgres.add_space()
    postgres.append(stream, 2)
    group = postgres.declare()
    granted(postgres, group, postgres.lead(group), stream)
    postgres.rollover(1)
    postgres.store.delete_group(SHARE)
    postgres.connection.execute("update lending_history set at = clock_timestamp()")
    group = postgres.declare(starting_position=StartingPosition.LATEST)
    assert taken_at(postgres, stream) == [], "it has ended"
    postgres.reset(group, ResetTarget.earliest())
    assert None not in taken_at(postgres, stream) != []


@pytest.mark.conforms("E34")
def test_what_came_after_an_export_was_taken_too(postgres: PostgresWorld) -> None:
    group, term, _ = postgres.led()
    progress = progress_transfer.read_progress(postgres.connection, group)
    (stream,) = postgres.rollover(1)
    postgres.write(group, term, renew=True)
    postgres.append(stream, 2)
    granted(postgres, group, term, stream)
    postgres.store.delete_group(SHARE)
    with postgres.connection.transaction():
        group = progress_transfer.create_from_progress(postgres.connection, SHARE, group.options, progress, "imported")
    assert taken_at(postgres, stream) == [], "its leader sees it first"
    postgres.clock.advance(3)
    (renewed,) = [
        row for row in postgres.write(group, postgres.lead(group), renew=True).synced if row.stream_id == stream
    ]
    assert renewed.reserved_s == -3


def taken_at(world: PostgresWorld, stream_id: int) -> list[object]:
    """Return when the stream was taken from its holder, by its row, if it has one."""
    found = world.connection.execute("select held_until from lending where stream_id = %s", (stream_id,)).fetchall()
    return [at for (at,) in found]


@pytest.mark.conforms("E34", "A7")
def test_why_names_a_former_holder_that_may_not_know(postgres: PostgresWorld) -> None:
    (stream,) = postgres.add_space()
    postgres.append(stream, 2)
    group = postgres.declare()
    granted(postgres, group, postgres.lead(group), stream)
    postgres.connection.execute("update lending_history set at = clock_timestamp()")
    postgres.reset(group, ResetTarget.earliest(), force=True)
    postgres.connection.execute("update leadership set expires_at = clock_timestamp() + interval '1 minute'")
    (answer,) = diagnose_group(postgres.connection, SHARE)[1]
    assert answer.diagnosis.reason is StallReason.FORMER_HOLDER
    assert "begin" in answer.diagnosis.detail
