"""How a node is, from what it noticed: what is an outage, what is a denial, and what is neither."""

from __future__ import annotations

import psycopg
import pytest

from sublet_leader.node.events import (
    ClaimLeadership,
    CommitWrites,
    DatabaseRequest,
    LeadershipClaimCompleted,
    LeadershipRenewalCompleted,
    RenewLeaderships,
    WritesCommitFailed,
    WritesCommitted,
)
from sublet_leader.observe.health import STUCK_S, Health, HealthState, evaluate_health
from sublet_leader.observe.health_signals import HealthSignals
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import DatabaseUnreachable, UnknownOutcome
from sublet_storage.db.store_connection import TransactionRolledBack
from sublet_storage.groups.model.records import MAINTENANCE, Leadership
from sublet_storage.node_directory import NodeIncarnation

SETTINGS = LeaderSettings()
OURS, OTHERS = NodeIncarnation("n1", "our life", "a:1"), NodeIncarnation("n2", "another life", "a:2")


class Watched:
    """A node that serves and is well, under a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0
        self.signals = HealthSignals(lambda: self.now, OURS.incarnation)
        self.signals.beat()
        self.renew({0: 1, 7: 1}, {0, 7})

    def wait(self, seconds: float = SETTINGS.claim_retry_interval_s) -> None:
        self.now += seconds
        self.signals.beat()

    def ask(
        self,
        request: DatabaseRequest,
        answer: LeadershipRenewalCompleted | LeadershipClaimCompleted | WritesCommitted | WritesCommitFailed,
        problem: Exception | None = None,
    ) -> None:
        self.signals.on_request(request)
        self.signals.on_answer(request, answer, problem, 0.001)

    def renew(self, terms: dict[int, int], renewed: set[int] | None, problem: Exception | None = None) -> None:
        request = RenewLeaderships(terms, 0.0)
        answer = LeadershipRenewalCompleted(request, None if renewed is None else frozenset(renewed))
        self.ask(request, answer, problem)

    def write(self, problem: Exception | None) -> None:
        request = CommitWrites(())
        self.ask(request, WritesCommitFailed(request, False) if problem else WritesCommitted(request, ()), problem)

    def claim(self, group_id: int, found: NodeIncarnation | Exception) -> None:
        """Claim it; the database names who has it, or fails."""
        request = ClaimLeadership(group_id, 0.0)
        problem = found if isinstance(found, Exception) else None
        leader = None if isinstance(found, Exception) else Leadership(group_id, found, 2, 10.0)
        self.ask(request, LeadershipClaimCompleted(request, leader), problem)

    def health(self) -> Health:
        return evaluate_health(self.signals, SETTINGS)

    def worst(self) -> tuple[HealthState, str]:
        return self.health().worst_check.state, self.health().worst_check.detail

    def state(self) -> HealthState:
        return self.worst()[0]


@pytest.fixture
def node() -> Watched:
    return Watched()


@pytest.mark.conforms("A8")
@pytest.mark.parametrize(
    "problem", [DatabaseUnreachable("gone"), UnknownOutcome("cut"), psycopg.OperationalError("closed")]
)
def test_no_answer_is_an_outage(node: Watched, problem: Exception) -> None:
    """Until the connection that got none gets one: an answer to the directory ends nothing."""
    assert node.state() is HealthState.OK
    node.signals.leaderless_group_count = 0
    node.now += 1
    node.renew({0: 1}, None, problem)
    assert node.worst() == (HealthState.UNREACHABLE, str(problem))
    assert node.health().check_named("leaders").state is HealthState.UNREACHABLE
    node.wait()
    assert node.health().check_named("lease").is_ok
    node.signals.directory.on_request(node.now)
    node.signals.directory.on_answer(node.now, None)
    assert node.state() is HealthState.UNREACHABLE, (
        "what is written into the directory says nothing of the worker's connection"
    )
    node.renew({0: 1}, {0})
    assert node.state() is HealthState.OK


@pytest.mark.conforms("A8")
def test_a_request_out_for_too_long_is_an_outage(node: Watched) -> None:
    node.now = 0.0
    node.signals.on_request(RenewLeaderships({0: 1}, 0.0))
    node.wait(SETTINGS.statement_timeout_s + SETTINGS.tcp_timeout_s)
    assert node.state() is HealthState.OK
    node.now += 0.1
    node.signals.directory.on_request(node.now)
    node.signals.directory.on_answer(node.now, None)
    assert node.state() is HealthState.UNREACHABLE


@pytest.mark.conforms("A8")
@pytest.mark.parametrize(
    "problem", [TransactionRolledBack("locked"), psycopg.errors.ReadOnlySqlTransaction("read only")]
)
def test_a_refusal_that_lasts_is_a_denial(node: Watched, problem: Exception) -> None:
    """It is no outage."""
    node.renew({0: 1}, None, problem)
    assert node.state() is HealthState.OK, "once is nothing: it is tried again"
    node.now += SETTINGS.claim_retry_interval_s
    node.renew({0: 1}, None, problem)
    assert node.worst() == (HealthState.DENIED, str(problem))
    node.write(None)
    assert node.state() is HealthState.DENIED, "other requests say nothing of leases"
    node.renew({0: 1}, {0})
    node.write(problem)
    node.wait()
    assert node.state() is HealthState.OK


def test_a_name_that_another_node_has_is_a_denial(node: Watched) -> None:
    node.signals.name_conflict = "another node is named n1"
    assert node.worst() == (HealthState.DENIED, "another node is named n1")


@pytest.mark.conforms("A8")
def test_one_groups_malformed_row_is_no_denial(node: Watched) -> None:
    """The node leads the others. Any other claim that is refused, and any renewal, is one."""
    out_of_range = psycopg.errors.NumericValueOutOfRange("bigint out of range")
    for _ in range(3):
        node.claim(7, out_of_range)
        node.wait()
    assert node.state() is HealthState.OK
    node.renew({7: 1}, None, out_of_range)
    node.wait()
    assert node.state() is HealthState.DENIED
    node.renew({7: 1}, {7})
    node.claim(7, psycopg.errors.InsufficientPrivilege("no"))
    node.now += SETTINGS.claim_retry_interval_s
    node.claim(7, out_of_range)
    assert node.worst() == (HealthState.DENIED, "no"), "that of one row ends no denial"


@pytest.mark.conforms("A8")
def test_a_maintenance_that_cannot_be_claimed_is_shown(node: Watched) -> None:
    """The node serves: a frozen process of Postgres of the node that runs the maintenance may hold the row."""
    node.claim(MAINTENANCE, TransactionRolledBack("locked"))
    assert node.state() is HealthState.OK, "once is nothing: it is tried again"
    node.wait()
    node.claim(MAINTENANCE, TransactionRolledBack("locked"))
    assert node.health().is_ready
    assert node.worst() == (HealthState.STALLED, "it cannot be claimed: locked")
    node.claim(MAINTENANCE, OTHERS)
    assert node.state() is HealthState.OK


@pytest.mark.conforms("A8")
def test_a_lease_lost_to_another_node_is_a_denial(node: Watched) -> None:
    """For as long as a lease is."""
    node.renew({0: 1, 7: 1}, {0})
    assert node.state() is HealthState.OK, "nobody has it, perhaps: a reset ends leases, too"
    node.claim(7, OTHERS)
    assert node.worst() == (HealthState.DENIED, "node n2 has taken the leadership of group 7")
    node.wait(SETTINGS.lease_duration_s)
    assert node.state() is HealthState.DENIED
    node.wait(0.1)
    assert node.state() is HealthState.OK


def test_a_lease_that_is_back_is_no_denial(node: Watched) -> None:
    """Nor is one that others have anyway."""
    node.renew({0: 1, 7: 1}, {0})
    node.claim(7, OURS)
    assert node.state() is HealthState.OK
    node.claim(8, OTHERS)
    assert node.state() is HealthState.OK


def test_the_loop_is_looked_at_first(node: Watched) -> None:
    node.signals.leaderless_group_count = 3
    health = node.health()
    assert (health.worst_check.state, health.is_ready, health.is_alive) == (HealthState.NO_LEADER, True, True)
    node.signals.is_draining = True
    assert (node.state(), node.health().is_ready) == (HealthState.DRAINING, False)
    node.signals.is_draining = False
    node.now += STUCK_S
    assert node.state() is HealthState.NO_LEADER
    node.now += 0.1
    health = node.health()
    assert (health.worst_check.state, health.is_ready, health.is_alive) == (HealthState.STUCK, False, False)
    node.signals.is_stopping = True
    assert (node.state(), node.health().is_alive) == (HealthState.STOPPING, True)
    starting = evaluate_health(HealthSignals(lambda: 100.0), SETTINGS)
    assert starting.worst_check.state is HealthState.STARTING
