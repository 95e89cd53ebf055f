"""Signals of a node's health: its loop, the database's answers, and its leases.

The node's threads write them, other threads read them. Each write is one assignment, so no thread waits for another.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg
from msgspec import Struct, field

from sublet_leader.node.events import (
    ClaimLeadership,
    DatabaseRequest,
    LeadershipClaimCompleted,
    LeadershipRenewalCompleted,
    NodeEvent,
    RenewLeaderships,
)
from sublet_protocol.domain.errors import DatabaseUnreachable, UnknownOutcome, format_error
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.store_connection import TransactionRolledBack
from sublet_storage.groups.model.records import MAINTENANCE, Leadership


class LeadershipLeaseFailure(Struct, frozen=True):
    """Leases that the database does not grant, and since when."""

    reason: str
    since: float


class DatabaseHealth(Struct):
    """The answers of the database to one thread of the node. `request_started_at`: when the request in flight was sent,
    None without one."""

    request_started_at: float | None = None
    last_answer_at: float = float("-inf")
    last_failure_at: float = float("-inf")
    last_error: str = ""

    def on_request(self, now: float) -> None:
        """Record that a request is sent."""
        self.request_started_at = now

    def on_answer(self, now: float, problem: Exception | None) -> None:
        """Record that it was answered, also by a rejection, or that it was not."""
        if is_unreachable(problem):
            self.last_failure_at, self.last_error = now, str(problem)
        else:
            self.last_answer_at = now
        self.request_started_at = None


class HealthSignals(Struct):
    """All signals, in seconds of the node's own `clock`. `leaderless_group_count`: groups that have consumers and no
    leader; None: not counted yet. `lease_failure`: a lease of groups was refused, but for a claim that one group's
    malformed row refuses: the node leads the others. `job_connections`: the latest connection of each job of the
    maintenance. `maintenance_failure`: the maintenance could not be claimed: groups do not depend on it."""

    clock: Callable[[], float]
    incarnation: str = ""
    last_loop_beat_at: float | None = None
    is_stopping: bool = False
    is_draining: bool = False
    worker: DatabaseHealth = field(default_factory=DatabaseHealth)
    directory: DatabaseHealth = field(default_factory=DatabaseHealth)
    name_conflict: str | None = None
    lost_leases: dict[int, LeadershipLeaseFailure] = field(default_factory=dict)
    lease_failure: LeadershipLeaseFailure | None = None
    maintenance_failure: LeadershipLeaseFailure | None = None
    leaderless_group_count: int | None = None
    job_connections: dict[str, BoundedConnection] = field(default_factory=dict)
    _lost: set[int] = field(default_factory=set)

    def beat(self) -> None:
        """Record that the loop has run."""
        self.last_loop_beat_at = self.clock()

    def on_job_connected(self, name: str, connection: BoundedConnection) -> None:
        """Record the connection that a job works on from now on."""
        self.job_connections[name] = connection

    def on_request(self, request: DatabaseRequest) -> None:
        """Record that the worker sends a request to the database."""
        self.worker.on_request(self.clock())

    def on_answer(self, request: DatabaseRequest, answer: NodeEvent, problem: Exception | None, took_s: float) -> None:
        """Record the answer, with its effect on the leases."""
        now = self.clock()
        self.worker.on_answer(now, problem)
        if isinstance(request, ClaimLeadership | RenewLeaderships) and not is_unreachable(problem):
            if isinstance(request, ClaimLeadership) and request.leadership_id == MAINTENANCE:
                self.maintenance_failure = _lease_outcome(problem, self.maintenance_failure, now)
            elif isinstance(request, RenewLeaderships) or not isinstance(problem, psycopg.DataError):
                self.lease_failure = _lease_outcome(problem, self.lease_failure, now)
        match answer:
            case LeadershipRenewalCompleted(RenewLeaderships(terms=terms), renewed) if renewed is not None:
                self._lost = (self._lost | set(terms)) - renewed
            case LeadershipClaimCompleted(ClaimLeadership(leadership_id), claim) if claim is not None:
                self._record_claim(leadership_id, claim, now)
            case _:
                pass

    def _record_claim(self, leadership_id: int, claim: Leadership, now: float) -> None:
        """Record the present holder of a lease. A lease that ended under the node counts as lost only if another node
        has it now: a reset or a deletion ends leases as well."""
        if claim.node.incarnation == self.incarnation:
            self.lost_leases.pop(leadership_id, None)
        elif leadership_id in self._lost:
            subject = "the maintenance" if leadership_id == MAINTENANCE else f"the leadership of group {leadership_id}"
            self.lost_leases[leadership_id] = LeadershipLeaseFailure(f"node {claim.node.name} has taken {subject}", now)
        self._lost -= {leadership_id}

    def leases_lost_since(self, cutoff: float) -> list[LeadershipLeaseFailure]:
        """Return the leases that other nodes took after that time and that are not back; drops older ones."""
        for leadership_id in [each for each, denied in tuple(self.lost_leases.items()) if denied.since < cutoff]:
            self.lost_leases.pop(leadership_id, None)
        return list(self.lost_leases.values())


def _lease_outcome(
    problem: Exception | None, last_failure: LeadershipLeaseFailure | None, now: float
) -> LeadershipLeaseFailure | None:
    """Return the failure there is after this outcome."""
    if problem is None:
        return None
    return LeadershipLeaseFailure(format_error(problem), now if last_failure is None else last_failure.since)


def is_unreachable(problem: Exception | None) -> bool:
    """Return whether the database did not answer at all; a rejected statement is an answer."""
    if isinstance(problem, TransactionRolledBack):
        return False
    return isinstance(problem, DatabaseUnreachable | UnknownOutcome | psycopg.OperationalError)
