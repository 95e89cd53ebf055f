"""How a node is, judged from its vitals in one place: gRPC's health service, the HTTP probes, metrics and the page all
tell the same. Pure.

Three checks make a node fit to serve, and a fourth is about all nodes together: a group whose consumers have no leader
is nobody's failure in particular, so it is told, and does not take this node out of service.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from sublet_leader.observe.health_signals import Vitals
from sublet_leader.settings import LeaderSettings

STUCK_S = 5.0
"""A loop that has not come round for so long is stuck."""


class State(StrEnum):
    """What a probe is told, in words."""

    OK = "ok"
    STARTING = "starting"  # it does not serve yet
    STOPPING = "stopping"  # it hands over what it leads
    DRAINING = "draining"  # an operator wants it to lead nothing any more
    STUCK = "stuck"  # its event loop does not turn: only a restart helps
    UNREACHABLE = "database unreachable"  # it leads nothing beyond the end of its leases
    DENIED = "lease denied"  # the database answers, and does not grant it a lease that it asks for
    NO_LEADER = "no leader"  # there are groups that have consumers, and nobody leads them


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at. `needed`: unless it is well this node cannot serve."""

    name: str
    state: State
    why: str = ""
    needed: bool = True

    @property
    def well(self) -> bool:
        """Nothing is wrong with it."""
        return self.state is State.OK


@dataclass(frozen=True, slots=True)
class Health:
    """All checks, the gravest first."""

    checks: tuple[Check, ...]

    @property
    def worst(self) -> Check:
        """The first that is not well, else the first."""
        return next((check for check in self.checks if not check.well), self.checks[0])

    @property
    def alive(self) -> bool:
        """False where only a restart helps."""
        return self.named("loop").state is not State.STUCK

    @property
    def ready(self) -> bool:
        """It can serve."""
        return all(check.well for check in self.checks if check.needed)

    def named(self, name: str) -> Check:
        """The check of that name. Raises `KeyError`."""
        return {check.name: check for check in self.checks}[name]


CHECKS = ("loop", "database", "lease", "leaders")
"""Their names, in paths and for gRPC."""


def judge(vitals: Vitals, settings: LeaderSettings) -> Health:
    """How it is at this moment."""
    now = vitals.clock()
    away = _away(vitals, settings, now)
    return Health((_loop(vitals, now), away, _lease(vitals, settings, now), _leaders(vitals, away)))


def _loop(vitals: Vitals, now: float) -> Check:
    if vitals.turned_at is None:
        return Check("loop", State.STARTING, "it does not serve yet")
    if vitals.stopping:
        return Check("loop", State.STOPPING, "it hands over what it leads")
    if now - vitals.turned_at > STUCK_S:
        return Check("loop", State.STUCK, f"its event loop has not turned for {now - vitals.turned_at:.0f} s")
    if vitals.draining:
        return Check("loop", State.DRAINING, "an operator drains it: it leads nothing")
    return Check("loop", State.OK)


def _away(vitals: Vitals, settings: LeaderSettings, now: float) -> Check:
    """Each thread's last answer counts: what one is told says nothing of the other's connection. A request that is out
    for too long is not answered."""
    patience_s = settings.statement_timeout_s + settings.tcp_timeout_s
    for pulse in (vitals.worker, vitals.directory):
        if pulse.failed_at > pulse.answered_at:
            return Check("database", State.UNREACHABLE, pulse.problem)
        began_at = pulse.began_at
        if began_at is not None and now - began_at > patience_s:
            return Check("database", State.UNREACHABLE, f"it has not answered for {now - began_at:.1f} s")
    return Check("database", State.OK)


def _lease(vitals: Vitals, settings: LeaderSettings, now: float) -> Check:
    """A single failure is tried again: a row may be locked for a moment."""
    if vitals.name_taken is not None:
        return Check("lease", State.DENIED, vitals.name_taken)
    if vitals.failing is not None and now - vitals.failing.at >= settings.retry_s:
        return Check("lease", State.DENIED, vitals.failing.why)
    if taken := vitals.taken_since(now - settings.lease_s):
        more = f", and {len(taken) - 1} more" if len(taken) > 1 else ""
        return Check("lease", State.DENIED, taken[0].why + more)
    return Check("lease", State.OK)


def _leaders(vitals: Vitals, away: Check) -> Check:
    """What nobody can look up is not said to be well."""
    if not away.well:
        return Check("leaders", State.UNREACHABLE, "nobody can look it up", needed=False)
    if vitals.unled:
        said = "1 group has" if vitals.unled == 1 else f"{vitals.unled} groups have"
        return Check("leaders", State.NO_LEADER, f"{said} consumers and no leader", needed=False)
    return Check("leaders", State.OK, needed=False)
