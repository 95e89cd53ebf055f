"""How a node is, from what it noticed: what is an outage, what is a denial, and what is neither."""

from __future__ import annotations

import psycopg
import pytest

from sublet_leader.node.events import (
    ClaimLeadership,
    DatabaseRequest,
    LeadershipClaimCompleted,
    LeadershipRenewalCompleted,
    RenewLeaderships,
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


class Signals(HealthSignals):
    """Of a node that serves and is well, under a clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0
        super().__init__(lambda: self.now, OURS.incarnation)
        self.beat()
        self.renew({0: 1, 7: 1}, {0, 7})

    def wait(self, seconds: float = SETTINGS.claim_retry_interval_s) -> None:
        self.now += seconds
        self.beat()

    def ask(
        self,
        request: DatabaseRequest,
        answer: LeadershipRenewalCompleted | LeadershipClaimCompleted,
        problem: Exception | None = None,
    ) -> None:
        self.on_request(request)
        self.on_answer(request, answer, problem, 0.001)

    def renew(self, terms: dict[int, int], renewed: set[int] | None, problem: Exception | None = None) -> None:
        request = RenewLeaderships(terms, 0.0)
        answer = LeadershipRenewalCompleted(request, None if renewed is None else frozenset(renewed))
        self.ask(request, answer, problem)

    def claim(self, group_id: int, found: NodeIncarnation | Exception) -> None:
        """Claim it; the database names who has it, or fails."""
        request = ClaimLeadership(group_id, 0.0)
        problem = found if isinstance(found, Exception) else None
        leader = None if isinstance(found, Exception) else Leadership(group_id, found, 2, 10.0)
        self.ask(request, LeadershipClaimCompleted(request, leader), problem)

    @property
    def health(self) -> Health:
        return evaluate_health(self, SETTINGS)

    @property
    def worst(self) -> tuple[HealthState, str]:
        return self.health.worst_check.state, self.health.worst_check.detail

    @property
    def state(self) -> HealthState:
        return self.worst[0]


@pytest.fixture
def signals() -> Signals:
    return Signals()


@pytest.mark.conforms("A8")
@pytest.mark.parametrize(
    "problem", [DatabaseUnreachable("gone"), UnknownOutcome("cut"), psycopg.OperationalError("closed")]
)
def test_no_answer_is_an_outage(signals: Signals, problem: Exception) -> None:
    """Until the connection that got none gets one: an answer to the directory ends nothing."""
    assert signals.state is HealthState.OK
    signals.now += 1
    signals.renew({0: 1}, None, problem)
    assert signals.worst == (HealthState.UNREACHABLE, str(problem))
    signals.now += 1
    signals.directory.on_request(signals.now)
    signals.directory.on_answer(signals.now, None)
    assert signals.state is HealthState.UNREACHABLE, (
        "what is written into the directory says nothing of the worker's connection"
    )
    signals.renew({0: 1}, {0})
    assert signals.state is HealthState.OK


@pytest.mark.conforms("A8")
def test_a_request_out_for_too_long_is_an_outage(signals: Signals) -> None:
    signals.on_request(RenewLeaderships({0: 1}, 0.0))
    signals.wait(SETTINGS.statement_timeout_s)
    assert signals.state is HealthState.OK
    signals.now += SETTINGS.tcp_timeout_s + 0.1
    signals.directory.on_request(signals.now)
    signals.directory.on_answer(signals.now, None)
    assert signals.state is HealthState.UNREACHABLE


@pytest.mark.conforms("A8")
@pytest.mark.parametrize(
    "problem", [TransactionRolledBack("locked"), psycopg.errors.ReadOnlySqlTransaction("read only")]
)
def test_a_refusal_that_lasts_is_a_denial(signals: Signals, problem: Exception) -> None:
    """It is no outage."""
    signals.renew({0: 1}, None, problem)
    assert signals.state is HealthState.OK, "once is nothing: it is tried again"
    signals.now += SETTINGS.claim_retry_interval_s
    signals.renew({0: 1}, None, problem)
    assert signals.worst == (HealthState.DENIED, str(problem))
    signals.renew({0: 1}, {0})
    assert signals.state is HealthState.OK


@pytest.mark.conforms("A8")
def test_one_groups_malformed_row_is_no_denial(signals: Signals) -> None:
    """The node leads the others. Any other claim that is refused, and any renewal, is one."""
    out_of_range = psycopg.errors.NumericValueOutOfRange("bigint out of range")
    for _ in range(3):
        signals.claim(7, out_of_range)
        signals.wait()
    assert signals.state is HealthState.OK
    signals.renew({7: 1}, None, out_of_range)
    signals.wait()
    assert signals.state is HealthState.DENIED
    signals.renew({7: 1}, {7})
    signals.claim(7, psycopg.errors.InsufficientPrivilege("no"))
    signals.now += SETTINGS.claim_retry_interval_s
    signals.claim(7, out_of_range)
    assert signals.worst == (HealthState.DENIED, "no"), "that of one row ends no denial"


@pytest.mark.conforms("A8")
def test_a_maintenance_that_cannot_be_claimed_is_shown(signals: Signals) -> None:
    """The node serves: a frozen process of Postgres of the node that runs the maintenance may hold the row."""
    for attempt in range(2):
        signals.claim(MAINTENANCE, TransactionRolledBack("locked"))
        if not attempt:
            assert signals.state is HealthState.OK, "once is nothing: it is tried again"
        signals.wait()
    assert signals.health.is_ready
    assert signals.worst == (HealthState.STALLED, "it cannot be claimed: locked")
    signals.claim(MAINTENANCE, OTHERS)
    assert signals.state is HealthState.OK


@pytest.mark.conforms("A8")
def test_a_lease_lost_to_another_node_is_a_denial(signals: Signals) -> None:
    """For as long as a lease is."""
    signals.renew({0: 1, 7: 1}, {0})
    assert signals.state is HealthState.OK, "nobody has it, perhaps: a reset ends leases, too"
    signals.claim(7, OTHERS)
    assert signals.worst == (HealthState.DENIED, "node n2 has taken the leadership of group 7")
    signals.wait(SETTINGS.lease_duration_s + 0.1)
    assert signals.state is HealthState.OK


def test_a_lease_that_is_back_is_no_denial(signals: Signals) -> None:
    """Nor is one that others have anyway."""
    signals.renew({0: 1, 7: 1}, {0})
    signals.claim(7, OURS)
    assert signals.state is HealthState.OK
    signals.claim(8, OTHERS)
    assert signals.state is HealthState.OK


def test_the_loop_is_looked_at_first(signals: Signals) -> None:
    signals.leaderless_group_count = 3
    health = signals.health
    assert (health.worst_check.state, health.is_ready, health.is_alive) == (HealthState.NO_LEADER, True, True)
    signals.is_draining = True
    assert (signals.state, signals.health.is_ready) == (HealthState.DRAINING, False)
    signals.is_draining = False
    signals.now += STUCK_S + 0.1
    health = signals.health
    assert (health.worst_check.state, health.is_ready, health.is_alive) == (HealthState.STUCK, False, False)
    signals.is_stopping = True
    assert (signals.state, signals.health.is_alive) == (HealthState.STOPPING, True)
    starting = evaluate_health(HealthSignals(lambda: 100.0), SETTINGS)
    assert starting.worst_check.state is HealthState.STARTING
