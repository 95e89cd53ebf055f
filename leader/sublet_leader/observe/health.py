"""The health of a node, evaluated from its signals; pure.

It is used by gRPC's health service, probes, metrics and the page. Three checks are required for a node to serve. Two
more are reported, and do not take this node out of service: a group whose consumers have no leader is no failure of
this node in particular, and the jobs of the maintenance serve no consumer.
"""

from __future__ import annotations

from enum import StrEnum

from msgspec import Struct

from sublet_leader.observe.health_signals import HealthSignals
from sublet_leader.settings import LeaderSettings

STUCK_S = 5.0
"""A loop that has not run for this long is stuck."""


SILENT_SHARE = 0.5
"""Of the time after which a job gives a silent connection up: for longer, it is stalled."""


class HealthState(StrEnum):
    """The state of a check, as probes get it."""

    OK = "ok"
    STARTING = "starting"  # it does not serve yet
    STOPPING = "stopping"  # it hands over what it leads
    DRAINING = "draining"  # an operator drains it
    STUCK = "stuck"  # its event loop does not turn: only a restart helps
    UNREACHABLE = "database_unreachable"  # it leads nothing beyond the end of its leases
    DENIED = "lease_denied"  # the database answers, and does not grant it a lease that it claims
    NO_LEADER = "no_leader"  # there are groups that have consumers, and no leader
    STALLED = "maintenance_stalled"  # Postgres is silent to a job of it, or its lease cannot be claimed


class HealthCheck(Struct, frozen=True):
    """One check. `is_required`: this node cannot serve unless it is ok."""

    name: str
    state: HealthState
    detail: str = ""
    is_required: bool = True

    @property
    def is_ok(self) -> bool:
        """Return whether the check is ok."""
        return self.state is HealthState.OK


class Health(Struct, frozen=True):
    """All checks, the gravest first."""

    checks: tuple[HealthCheck, ...]

    @property
    def worst_check(self) -> HealthCheck:
        """Return the first check that is not ok, else the first."""
        return next((check for check in self.checks if not check.is_ok), self.checks[0])

    @property
    def is_alive(self) -> bool:
        """Return False if only a restart helps."""
        return self.check_named("loop").state is not HealthState.STUCK

    @property
    def is_ready(self) -> bool:
        """Return whether the node can serve."""
        return all(check.is_ok for check in self.checks if check.is_required)

    def check_named(self, name: str) -> HealthCheck:
        """Return the check of that name. Raise `KeyError`."""
        return {check.name: check for check in self.checks}[name]


CHECKS = ("loop", "database", "lease", "leaders", "maintenance")
"""The names of the checks, in paths and for gRPC."""


def evaluate_health(signals: HealthSignals, settings: LeaderSettings) -> Health:
    """Return the health at this moment."""
    now = signals.clock()
    database = _assess_database(signals, settings, now)
    return Health(
        (
            _assess_loop(signals, now),
            database,
            _assess_lease(signals, settings, now),
            _assess_leaders(signals, database),
            _assess_maintenance(signals, settings, now),
        )
    )


def _assess_loop(signals: HealthSignals, now: float) -> HealthCheck:
    if signals.last_loop_beat_at is None:
        return HealthCheck("loop", HealthState.STARTING, "it does not serve yet")
    if signals.is_stopping:
        return HealthCheck("loop", HealthState.STOPPING, "it hands over what it leads")
    if now - signals.last_loop_beat_at > STUCK_S:
        return HealthCheck(
            "loop",
            HealthState.STUCK,
            f"its event loop has not turned for {now - signals.last_loop_beat_at:.0f} s",
        )
    if signals.is_draining:
        return HealthCheck("loop", HealthState.DRAINING, "an operator drains it: it leads nothing")
    return HealthCheck("loop", HealthState.OK)


def _assess_database(signals: HealthSignals, settings: LeaderSettings, now: float) -> HealthCheck:
    """Return the database check. Each thread's last answer counts, as one connection does not stand for the other; a
    request in flight for too long counts as unanswered."""
    answer_timeout_s = settings.statement_timeout_s + settings.tcp_timeout_s
    for probe in (signals.worker, signals.directory):
        if probe.last_failure_at > probe.last_answer_at:
            return HealthCheck("database", HealthState.UNREACHABLE, probe.last_error)
        began_at = probe.request_started_at
        if began_at is not None and now - began_at > answer_timeout_s:
            return HealthCheck("database", HealthState.UNREACHABLE, f"it has not answered for {now - began_at:.1f} s")
    return HealthCheck("database", HealthState.OK)


def _assess_lease(signals: HealthSignals, settings: LeaderSettings, now: float) -> HealthCheck:
    """Return the lease check. A single failure does not count: a row may be locked for a moment."""
    if signals.name_conflict is not None:
        return HealthCheck("lease", HealthState.DENIED, signals.name_conflict)
    if signals.lease_failure is not None and now - signals.lease_failure.since >= settings.claim_retry_interval_s:
        return HealthCheck("lease", HealthState.DENIED, signals.lease_failure.reason)
    if failures := signals.leases_lost_since(now - settings.lease_duration_s):
        suffix = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
        return HealthCheck("lease", HealthState.DENIED, failures[0].reason + suffix)
    return HealthCheck("lease", HealthState.OK)


def _assess_leaders(signals: HealthSignals, database: HealthCheck) -> HealthCheck:
    """Return the leaders check; it is not ok while the database is unreachable."""
    if not database.is_ok:
        return HealthCheck("leaders", HealthState.UNREACHABLE, "nobody can look it up", is_required=False)
    if signals.leaderless_group_count:
        groups = (
            "1 group has" if signals.leaderless_group_count == 1 else f"{signals.leaderless_group_count} groups have"
        )
        return HealthCheck("leaders", HealthState.NO_LEADER, f"{groups} consumers and no leader", is_required=False)
    return HealthCheck("leaders", HealthState.OK, is_required=False)


def _assess_maintenance(signals: HealthSignals, settings: LeaderSettings, now: float) -> HealthCheck:
    """Return the maintenance check. A job itself may take long, at payloads for instance; Postgres answers."""
    for name, connection in tuple(signals.job_connections.items()):
        if (silent_s := connection.silent_s()) > SILENT_SHARE * connection.receive_timeout_s:
            detail = f"Postgres has been silent to {name!r} for {silent_s:.0f} s"
            return HealthCheck("maintenance", HealthState.STALLED, detail, is_required=False)
    failure = signals.maintenance_failure
    if failure is not None and now - failure.since >= settings.claim_retry_interval_s:
        detail = f"it cannot be claimed: {failure.reason}"
        return HealthCheck("maintenance", HealthState.STALLED, detail, is_required=False)
    return HealthCheck("maintenance", HealthState.OK, is_required=False)
