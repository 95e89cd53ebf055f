"""A row says that its holder has a lock where that was held, in this very database, when the row was written for it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from sublet_storage.db.liveness_lock import acquire_lock, compute_lock_key
from sublet_storage.groups.model.records import GrantStream
from tests.contract.group_world import PostgresWorld, World

KEY = compute_lock_key("a1")
VALID_S = 0.7


@pytest.mark.conforms("E7")
@pytest.mark.parametrize(
    ("is_held", "declared", "found"), [(True, VALID_S, VALID_S), (False, VALID_S, 0.0), (True, 0.0, 0.0)]
)
def test_a_row_has_a_declared_lock_that_was_held(world: World, is_held: bool, declared: float, found: float) -> None:
    """The agent's database may be another one: then nobody holds it here, and its word does not count."""
    led = world.led()
    with world.leader_lock(KEY) if is_held else nullcontext():
        led.grant(lock_valid_s=declared)
    assert led.row().lock_valid_s == found


@pytest.mark.conforms("E7")
@pytest.mark.parametrize(("is_held", "found"), [(True, VALID_S), (False, 0.0)])
def test_a_successor_declares_its_own(world: World, is_held: bool, found: float) -> None:
    """What the former holder had is no proof of its successor's."""
    with world.leader_lock(compute_lock_key("a0")):
        held = world.led().grant(borrower="b0", agent="a0", lock_valid_s=VALID_S)
    successor = GrantStream(held.stream, "b1", "a1", None, "share", lock_valid_s=VALID_S)
    with world.leader_lock(KEY) if is_held else nullcontext():
        held.release(0, successor=successor)
    assert (held.now().agent, held.now().lock_valid_s) == ("a1", found)


@pytest.mark.conforms("E7")
def test_a_reclaim_declares_anew(world: World) -> None:
    """Each borrower for itself: its agent may have lost its lock, or have one now."""
    led = world.led()
    with world.leader_lock(KEY):
        held = led.grant(lock_valid_s=VALID_S)
        for borrower, valid_s in (("b2", 0.0), ("b3", VALID_S)):
            held.reclaim(0, borrower, lock_valid_s=valid_s)
            assert (led.row().borrower_id, led.row().lock_valid_s) == (borrower, valid_s)
    held.reclaim(0, "b4", lock_valid_s=VALID_S)
    assert (led.row().borrower_id, led.row().lock_valid_s) == ("b4", 0.0)


def test_a_lock_stays_in_the_row_with_its_holder(world: World) -> None:
    """Whatever is written of it, and though its lock is free by then; it ends with the grant."""
    led = world.led(session_expiry_s=60.0)
    with world.leader_lock(KEY):
        held = led.grant(lock_valid_s=VALID_S)
    held.reclaim(0, lock_valid_s=VALID_S)
    assert led.row().lock_valid_s == VALID_S
    held.force_release()
    assert led.row().lock_valid_s == 0.0
    assert led.grant(borrower="b5").now().lock_valid_s == 0.0


def test_anothers_lock_in_the_row_does_not_count(postgres: PostgresWorld) -> None:
    """A leader of a release before leaves it there when it grants the row."""
    led = postgres.led()
    with postgres.leader_lock(KEY):
        led.grant(lock_valid_s=VALID_S)
    postgres.connection.execute("update lending set borrower_id = 'b9'")
    assert led.row().lock_valid_s == 0.0


def test_a_write_takes_no_lock_for_long(postgres: PostgresWorld) -> None:
    """A free one is the agent's to take when the write is done."""
    postgres.led().grant(lock_valid_s=VALID_S)
    assert acquire_lock(postgres.connection, KEY)


@pytest.mark.conforms("E7", "E13")
def test_no_row_has_a_lock_of_a_former_timeline(postgres: PostgresWorld) -> None:
    """Its holder may see its lock held there; here it is free, as all are."""
    led = postgres.led(session_expiry_s=60.0)
    with postgres.leader_lock(KEY):
        led.grant(lock_valid_s=VALID_S)
    postgres.connection.execute("update leadership set timeline = 'the former'")
    row = led.succeed().row()
    assert (row.status, row.lock_valid_s) == ("free", 0.0)
