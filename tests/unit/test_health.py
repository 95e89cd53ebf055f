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
from sublet_leader.observe.health import STUCK_S, HealthCheck, HealthState, evaluate_health
from sublet_leader.observe.health_signals import HealthSignals
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import DatabaseUnreachable, UnknownOutcome
from sublet_storage.db.store_connection import TransactionRolledBack
from sublet_storage.groups.model.records import MAINTENANCE, Leadership
from sublet_storage.node_directory import NodeIncarnation

SETTINGS = LeaderSettings()
OURS, OTHERS = NodeIncarnation("n1", "our life", "a:1"), NodeIncarnation("n2", "another life", "a:2")


class Time:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def time() -> Time:
    return Time()


@pytest.fixture
def signals(time: Time) -> HealthSignals:
    """Of a node that serves and is well."""
    signals = HealthSignals(time, OURS.incarnation)
    signals.beat()
    renew(signals, {0: 1, 7: 1}, {0, 7})
    return signals


def renew(
    signals: HealthSignals, terms: dict[int, int], renewed: set[int] | None, problem: Exception | None = None
) -> None:
    request = RenewLeaderships(terms, 0.0)
    ask(signals, request, LeadershipRenewalCompleted(request, None if renewed is None else frozenset(renewed)), problem)


def claim(signals: HealthSignals, leadership_id: int, node: NodeIncarnation) -> None:
    request = ClaimLeadership(leadership_id, 0.0)
    ask(signals, request, LeadershipClaimCompleted(request, Leadership(leadership_id, node, 2, 10.0)))


def ask(
    signals: HealthSignals,
    request: DatabaseRequest,
    answer: LeadershipRenewalCompleted | LeadershipClaimCompleted,
    problem: Exception | None = None,
) -> None:
    signals.on_request(request)
    signals.on_answer(request, answer, problem, 0.001)


def worst(signals: HealthSignals) -> HealthCheck:
    return evaluate_health(signals, SETTINGS).worst_check


def state(signals: HealthSignals) -> HealthState:
    return worst(signals).state


@pytest.mark.conforms("A8")
@pytest.mark.parametrize(
    "problem", [DatabaseUnreachable("gone"), UnknownOutcome("cut"), psycopg.OperationalError("closed")]
)
def test_no_answer_is_an_outage(signals: HealthSignals, time: Time, problem: Exception) -> None:
    """Until the connection that got none gets one: an answer to the directory ends nothing."""
    assert state(signals) is HealthState.OK
    time.now += 1
    renew(signals, {0: 1}, None, problem)
    assert (state(signals), worst(signals).detail) == (HealthState.UNREACHABLE, str(problem))
    time.now += 1
    signals.directory.on_request(time.now)
    signals.directory.on_answer(time.now, None)
    assert state(signals) is HealthState.UNREACHABLE, (
        "what is written into the directory says nothing of the worker's connection"
    )
    renew(signals, {0: 1}, {0})
    assert state(signals) is HealthState.OK


@pytest.mark.conforms("A8")
def test_a_request_out_for_too_long_is_an_outage(signals: HealthSignals, time: Time) -> None:
    signals.on_request(RenewLeaderships({0: 1}, 0.0))
    time.now += SETTINGS.statement_timeout_s
    signals.beat()
    assert state(signals) is HealthState.OK
    time.now += SETTINGS.tcp_timeout_s + 0.1
    signals.directory.on_request(time.now)
    signals.directory.on_answer(time.now, None)
    assert state(signals) is HealthState.UNREACHABLE


@pytest.mark.conforms("A8")
@pytest.mark.parametrize(
    "problem", [TransactionRolledBack("locked"), psycopg.errors.ReadOnlySqlTransaction("read only")]
)
def test_a_refusal_that_lasts_is_a_denial(signals: HealthSignals, time: Time, problem: Exception) -> None:
    """It is no outage."""
    renew(signals, {0: 1}, None, problem)
    assert state(signals) is HealthState.OK, "once is nothing: it is tried again"
    time.now += SETTINGS.claim_retry_interval_s
    renew(signals, {0: 1}, None, problem)
    assert (state(signals), worst(signals).detail) == (HealthState.DENIED, str(problem))
    renew(signals, {0: 1}, {0})
    assert state(signals) is HealthState.OK


@pytest.mark.conforms("A8")
def test_one_groups_malformed_row_is_no_denial(signals: HealthSignals, time: Time) -> None:
    """The node leads the others. Any other claim that is refused, and any renewal, is one."""
    request = ClaimLeadership(7, 0.0)
    failed = LeadershipClaimCompleted(request, None)
    for _ in range(3):
        ask(signals, request, failed, psycopg.errors.NumericValueOutOfRange("bigint out of range"))
        time.now += SETTINGS.claim_retry_interval_s
        signals.beat()
    assert state(signals) is HealthState.OK
    renew(signals, {7: 1}, None, psycopg.errors.NumericValueOutOfRange("bigint out of range"))
    time.now += SETTINGS.claim_retry_interval_s
    signals.beat()
    assert state(signals) is HealthState.DENIED
    renew(signals, {7: 1}, {7})
    ask(signals, request, failed, psycopg.errors.InsufficientPrivilege("no"))
    time.now += SETTINGS.claim_retry_interval_s
    ask(signals, request, failed, psycopg.errors.NumericValueOutOfRange("bigint out of range"))
    assert (state(signals), worst(signals).detail) == (HealthState.DENIED, "no"), "that of one row ends no denial"


@pytest.mark.conforms("A8")
def test_a_maintenance_that_cannot_be_claimed_is_shown(signals: HealthSignals, time: Time) -> None:
    """The node serves: a frozen process of Postgres of the node that runs the maintenance may hold the row."""
    request = ClaimLeadership(MAINTENANCE, 0.0)
    for attempt in range(2):
        ask(signals, request, LeadershipClaimCompleted(request, None), TransactionRolledBack("locked"))
        if not attempt:
            assert state(signals) is HealthState.OK, "once is nothing: it is tried again"
        time.now += SETTINGS.claim_retry_interval_s
        signals.beat()
    assert evaluate_health(signals, SETTINGS).is_ready
    assert (state(signals), worst(signals).detail) == (HealthState.STALLED, "it cannot be claimed: locked")
    claim(signals, MAINTENANCE, OTHERS)
    assert state(signals) is HealthState.OK


@pytest.mark.conforms("A8")
def test_a_lease_lost_to_another_node_is_a_denial(signals: HealthSignals, time: Time) -> None:
    """For as long as a lease is."""
    renew(signals, {0: 1, 7: 1}, {0})
    assert state(signals) is HealthState.OK, "nobody has it, perhaps: a reset ends leases, too"
    claim(signals, 7, OTHERS)
    assert (state(signals), worst(signals).detail) == (
        HealthState.DENIED,
        "node n2 has taken the leadership of group 7",
    )
    time.now += SETTINGS.lease_duration_s + 0.1
    signals.beat()
    assert state(signals) is HealthState.OK


def test_a_lease_that_is_back_is_no_denial(signals: HealthSignals) -> None:
    """Nor is one that others have anyway."""
    renew(signals, {0: 1, 7: 1}, {0})
    claim(signals, 7, OURS)
    assert state(signals) is HealthState.OK
    claim(signals, 8, OTHERS)
    assert state(signals) is HealthState.OK


def test_the_loop_is_looked_at_first(signals: HealthSignals, time: Time) -> None:
    signals.leaderless_group_count = 3
    health = evaluate_health(signals, SETTINGS)
    assert (health.worst_check.state, health.is_ready, health.is_alive) == (HealthState.NO_LEADER, True, True)
    signals.is_draining = True
    assert (state(signals), evaluate_health(signals, SETTINGS).is_ready) == (HealthState.DRAINING, False)
    signals.is_draining = False
    time.now += STUCK_S + 0.1
    health = evaluate_health(signals, SETTINGS)
    assert (health.worst_check.state, health.is_ready, health.is_alive) == (HealthState.STUCK, False, False)
    signals.is_stopping = True
    assert (state(signals), evaluate_health(signals, SETTINGS).is_alive) == (HealthState.STOPPING, True)
    assert state(HealthSignals(time)) is HealthState.STARTING
