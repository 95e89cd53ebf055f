"""Claims by a leader's free lock, against each other and against that leader."""

from __future__ import annotations

from functools import partial

import pytest

from sublet_storage.groups.coordinator.leadership import claim, renew
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import LeaderLivenessLock, Leadership
from sublet_storage.node_directory import NodeIncarnation
from tests.interleavings.harness import Connection, Interleavings, Run

ONE, TWO, THREE = (NodeIncarnation(name, f"{name}-1", f"{name}:1") for name in ("n1", "n2", "n3"))
LEASE_S = 3600.0


def lock_of(node: NodeIncarnation) -> LeaderLivenessLock:
    return LeaderLivenessLock.of(node.incarnation)


@pytest.fixture
def term(conn: Connection) -> int:
    """Return the term of a leader whose lock nobody holds."""
    return PostgresGroupStore(lambda: conn).claim(1, ONE, LEASE_S / 2, lock_of(ONE).key).term


def claim_by_lock(node: NodeIncarnation, conn: Connection) -> Leadership:
    """Claim after that leader's lock was found free."""
    with conn.transaction():
        return claim(conn, 1, node, LEASE_S, None, lock_of(node).key, lock_of(ONE))


@pytest.mark.usefixtures("term")
@pytest.mark.conforms("E12", "E13")
def test_of_two_that_found_a_lock_free_one_leads(orders: Interleavings) -> None:
    """Nobody holds the lock of the first to claim, either: it has just been cut off."""

    def judge(run: Run) -> None:
        assert not run.errors
        nodes = {run.answers[each].node for each in ("two", "three")}
        assert len(nodes) == 1, "one has taken from the other what it saw of a leader before"

    orders.explore({"two": partial(claim_by_lock, TWO), "three": partial(claim_by_lock, THREE)}, judge)


@pytest.mark.conforms("E7", "E13")
def test_a_renewal_before_a_claim_by_lock_counts(orders: Interleavings, term: int) -> None:
    """A leader that has renewed may answer pings for as long; one that has not, was deposed."""

    def renew_own(conn: Connection) -> frozenset[int]:
        with conn.transaction():
            return renew(conn, ONE, {1: term}, LEASE_S, None, lock_of(ONE).key, wait=True)

    def judge(run: Run) -> None:
        assert not run.errors
        claimed, is_renewed = run.answers["two"], run.answers["renew"] == {1}
        assert claimed.node == TWO
        assert (claimed.previous_leader_s > LEASE_S / 2) == is_renewed
        assert claimed.previous_leader_s > LEASE_S / 4

    orders.explore({"two": partial(claim_by_lock, TWO), "renew": renew_own}, judge)
