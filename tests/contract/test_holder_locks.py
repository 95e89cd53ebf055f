"""A row says that its holder has a lock where that was held, in this very database, when the row was written for it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
from msgspec.structs import replace

from sublet_storage.db.liveness_lock import acquire_lock, compute_lock_key
from sublet_storage.groups.model import records
from tests.contract.group_world import LEASE_S, TWO, PostgresWorld, World, grant

KEY = compute_lock_key("a1")
VALID_S = 0.7


def declared(stream_id: int, borrower_id: str = "b1") -> records.GrantStream:
    return replace(grant(stream_id, borrower_id), lock_valid_s=VALID_S)


def reclaim(held: records.Lending, borrower_id: str, lock_valid_s: float = 0.0) -> records.ReclaimStream:
    return records.ReclaimStream(held.stream_id, held.grant_id, 0, borrower_id, "a1", lock_valid_s=lock_valid_s)


def lock_valid_s(world: World, group: records.Group, term: int, stream_id: int) -> float:
    return world.row(group, term, stream_id).lock_valid_s


@pytest.mark.conforms("E7")
@pytest.mark.parametrize("is_held", [True, False])
def test_a_row_has_a_lock_that_was_held(world: World, is_held: bool) -> None:
    """The agent's database may be another one: then nobody holds it here, and its word does not count."""
    group, term, (stream,) = world.led()
    with world.leader_lock(KEY) if is_held else nullcontext():
        world.applied(group, term, declared(stream))
    assert lock_valid_s(world, group, term, stream) == (VALID_S if is_held else 0.0)


def test_an_undeclared_lock_is_not_in_the_row(world: World) -> None:
    group, term, (stream,) = world.led()
    with world.leader_lock(KEY):
        world.applied(group, term, grant(stream))
    assert lock_valid_s(world, group, term, stream) == 0.0


@pytest.mark.conforms("E7")
def test_a_reclaim_declares_anew(world: World) -> None:
    """Each borrower for itself: its agent may have lost its lock, or have one now."""
    group, term, (stream,) = world.led()
    with world.leader_lock(KEY):
        held = world.applied(group, term, declared(stream))
        world.applied(group, term, reclaim(held, "b2"))
        assert lock_valid_s(world, group, term, stream) == 0.0
        world.applied(group, term, reclaim(held, "b3", VALID_S))
        assert lock_valid_s(world, group, term, stream) == VALID_S
    world.applied(group, term, reclaim(held, "b4", VALID_S))
    assert lock_valid_s(world, group, term, stream) == 0.0


def test_a_lock_stays_in_the_row_with_its_holder(world: World) -> None:
    """Whatever is written of it, and though its lock is free by then; it ends with the grant."""
    group, term, (stream,) = world.led(session_expiry_s=60.0)
    with world.leader_lock(KEY):
        held = world.applied(group, term, declared(stream))
    world.applied(group, term, reclaim(held, "b1", VALID_S))
    assert lock_valid_s(world, group, term, stream) == VALID_S
    world.applied(group, term, records.ForceRelease(stream, held.grant_id, "silent"))
    assert lock_valid_s(world, group, term, stream) == 0.0
    world.applied(group, term, grant(stream, "b5"))
    assert lock_valid_s(world, group, term, stream) == 0.0


def test_anothers_lock_in_the_row_does_not_count(postgres: PostgresWorld) -> None:
    """A leader of a release before leaves it there when it grants the row."""
    group, term, (stream,) = postgres.led()
    with postgres.leader_lock(KEY):
        postgres.applied(group, term, declared(stream))
    postgres.connection.execute("update lending set borrower_id = 'b9'")
    assert lock_valid_s(postgres, group, term, stream) == 0.0


def test_a_write_takes_no_lock_for_long(postgres: PostgresWorld) -> None:
    """A free one is the agent's to take when the write is done."""
    group, term, (stream,) = postgres.led()
    postgres.applied(group, term, declared(stream))
    assert acquire_lock(postgres.connection, KEY)


@pytest.mark.conforms("E7", "E13")
def test_no_row_has_a_lock_of_a_former_timeline(postgres: PostgresWorld) -> None:
    """Its holder may see its lock held there; here it is free, as all are."""
    group, term, (stream,) = postgres.led(session_expiry_s=60.0)
    with postgres.leader_lock(KEY):
        postgres.applied(group, term, declared(stream))
    postgres.connection.execute("update leadership set timeline = 'the former'")
    postgres.clock.advance(LEASE_S)
    term = postgres.lead(group, TWO)
    row = postgres.row(group, term, stream)
    assert (row.status, row.lock_valid_s) == (records.LendingStatus.FREE, 0.0)
