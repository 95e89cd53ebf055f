"""How a node is, from what it noticed: what is an outage, what is a denial, and what is neither."""

from __future__ import annotations

import psycopg
import pytest

from sublet_leader.node.events import Claimed, ClaimLeadership, Renewed, RenewLeaderships, Request
from sublet_leader.observe.health import STUCK_S, Check, State, judge
from sublet_leader.observe.health_signals import Vitals
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import DatabaseUnreachable, UnknownOutcome
from sublet_storage.db.store_connection import RolledBack
from sublet_storage.groups.model.records import Claim
from sublet_storage.nodes import NodeRef

SETTINGS = LeaderSettings()
OURS, OTHERS = NodeRef("n1", "our life", "a:1"), NodeRef("n2", "another life", "a:2")


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
def vitals(time: Time) -> Vitals:
    """Of a node that serves and is well."""
    vitals = Vitals(time, OURS.incarnation)
    vitals.turn()
    renew(vitals, {0: 1, 7: 1}, {0, 7})
    return vitals


def renew(vitals: Vitals, terms: dict[int, int], renewed: set[int] | None, problem: Exception | None = None) -> None:
    request = RenewLeaderships(terms, 0.0)
    ask(vitals, request, Renewed(request, None if renewed is None else frozenset(renewed)), problem)


def claim(vitals: Vitals, leadership_id: int, node: NodeRef) -> None:
    request = ClaimLeadership(leadership_id, 0.0)
    ask(vitals, request, Claimed(request, Claim(leadership_id, node, 2, 10.0)))


def ask(vitals: Vitals, request: Request, answer: Renewed | Claimed, problem: Exception | None = None) -> None:
    vitals.begin(request)
    vitals.end(request, answer, problem, 0.001)


def worst(vitals: Vitals) -> Check:
    return judge(vitals, SETTINGS).worst


def state(vitals: Vitals) -> State:
    return worst(vitals).state


@pytest.mark.conforms("A8")
@pytest.mark.parametrize(
    "problem", [DatabaseUnreachable("gone"), UnknownOutcome("cut"), psycopg.OperationalError("closed")]
)
def test_no_answer_is_an_outage_until_the_same_thread_gets_one(vitals: Vitals, time: Time, problem: Exception) -> None:
    assert state(vitals) is State.OK
    time.now += 1
    renew(vitals, {0: 1}, None, problem)
    assert (state(vitals), worst(vitals).why) == (State.UNREACHABLE, str(problem))
    time.now += 1
    vitals.directory.begin(time.now)
    vitals.directory.end(time.now, None)
    assert state(vitals) is State.UNREACHABLE, "what the directory is told says nothing of the worker's connection"
    renew(vitals, {0: 1}, {0})
    assert state(vitals) is State.OK


@pytest.mark.conforms("A8")
def test_a_request_that_is_out_for_too_long_is_an_outage(vitals: Vitals, time: Time) -> None:
    vitals.begin(RenewLeaderships({0: 1}, 0.0))
    time.now += SETTINGS.statement_timeout_s
    vitals.turn()
    assert state(vitals) is State.OK
    time.now += SETTINGS.tcp_timeout_s + 0.1
    vitals.directory.begin(time.now)
    vitals.directory.end(time.now, None)
    assert state(vitals) is State.UNREACHABLE


@pytest.mark.conforms("A8")
@pytest.mark.parametrize("problem", [RolledBack("locked"), psycopg.errors.ReadOnlySqlTransaction("read only")])
def test_a_refusal_is_a_denial_if_it_lasts_and_no_outage(vitals: Vitals, time: Time, problem: Exception) -> None:
    renew(vitals, {0: 1}, None, problem)
    assert state(vitals) is State.OK, "once is nothing: it is tried again"
    time.now += SETTINGS.retry_s
    renew(vitals, {0: 1}, None, problem)
    assert (state(vitals), worst(vitals).why) == (State.DENIED, str(problem))
    renew(vitals, {0: 1}, {0})
    assert state(vitals) is State.OK


@pytest.mark.conforms("A8")
def test_a_lease_that_another_node_took_is_a_denial_for_as_long_as_a_lease_is(vitals: Vitals, time: Time) -> None:
    renew(vitals, {0: 1, 7: 1}, {0})
    assert state(vitals) is State.OK, "nobody has it, perhaps: a reset ends leases, too"
    claim(vitals, 7, OTHERS)
    assert (state(vitals), worst(vitals).why) == (State.DENIED, "node n2 has taken the leadership of group 7")
    time.now += SETTINGS.lease_s + 0.1
    vitals.turn()
    assert state(vitals) is State.OK


def test_a_lease_that_ended_and_is_back_is_no_denial_nor_is_one_that_others_have_anyway(vitals: Vitals) -> None:
    renew(vitals, {0: 1, 7: 1}, {0})
    claim(vitals, 7, OURS)
    assert state(vitals) is State.OK
    claim(vitals, 8, OTHERS)
    assert state(vitals) is State.OK


def test_the_loop_is_looked_at_first(vitals: Vitals, time: Time) -> None:
    vitals.unled = 3
    health = judge(vitals, SETTINGS)
    assert (health.worst.state, health.ready, health.alive) == (State.NO_LEADER, True, True)
    vitals.draining = True
    assert (state(vitals), judge(vitals, SETTINGS).ready) == (State.DRAINING, False)
    vitals.draining = False
    time.now += STUCK_S + 0.1
    health = judge(vitals, SETTINGS)
    assert (health.worst.state, health.ready, health.alive) == (State.STUCK, False, False)
    vitals.stopping = True
    assert (state(vitals), judge(vitals, SETTINGS).alive) == (State.STOPPING, True)
    assert state(Vitals(time)) is State.STARTING
