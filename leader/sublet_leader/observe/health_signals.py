"""What a node notices of its own life: whether its loop turns, the database answers, and its leases are granted.

Its threads tell it here, whoever asks reads it here. Each fact is one assignment, so nobody waits for anybody.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import psycopg

from sublet_leader.node.events import Claimed, ClaimLeadership, NodeEvent, Renewed, RenewLeaderships, Request
from sublet_protocol.domain.errors import DatabaseUnreachable, UnknownOutcome
from sublet_storage.db.store_connection import RolledBack
from sublet_storage.groups.model.records import MAINTENANCE, Claim


@dataclass(frozen=True, slots=True)
class Denied:
    """Leases that the database does not grant, and since when."""

    why: str
    at: float


@dataclass(slots=True)
class Pulse:
    """How the database answers one thread of the node. `began_at`: there is a request under way since then."""

    began_at: float | None = None
    answered_at: float = float("-inf")
    failed_at: float = float("-inf")
    problem: str = ""

    def begin(self, now: float) -> None:
        """A request goes out."""
        self.began_at = now

    def end(self, now: float, problem: Exception | None) -> None:
        """It was answered, were it by a refusal; or it was not."""
        if problem is not None and is_away(problem):
            self.failed_at, self.problem = now, str(problem)
        else:
            self.answered_at = now
        self.began_at = None


@dataclass(slots=True)
class Vitals:
    """All that is noticed, in seconds of the node's own `clock`. `unled`: groups that have consumers and no leader;
    None: nobody has looked yet."""

    clock: Callable[[], float]
    incarnation: str = ""
    turned_at: float | None = None
    stopping: bool = False
    draining: bool = False
    worker: Pulse = field(default_factory=Pulse)
    directory: Pulse = field(default_factory=Pulse)
    name_taken: str | None = None
    taken: dict[int, Denied] = field(default_factory=dict)
    failing: Denied | None = None
    unled: int | None = None
    _lost: set[int] = field(default_factory=set)

    def turn(self) -> None:
        """The loop has come round."""
        self.turned_at = self.clock()

    def begin(self, request: Request) -> None:
        """The worker asks the database."""
        self.worker.begin(self.clock())

    def end(self, request: Request, answer: NodeEvent, problem: Exception | None, took_s: float) -> None:
        """What came of it; leases are looked at closely."""
        now = self.clock()
        self.worker.end(now, problem)
        if isinstance(request, ClaimLeadership | RenewLeaderships) and not (problem and is_away(problem)):
            self._failed(problem, now)
        match answer:
            case Renewed(RenewLeaderships(terms=terms), renewed) if renewed is not None:
                self._lost = (self._lost | set(terms)) - renewed
            case Claimed(ClaimLeadership(leadership_id), claim) if claim is not None:
                self._claimed(leadership_id, claim, now)
            case _:
                pass

    def _failed(self, problem: Exception | None, now: float) -> None:
        if problem is None:
            self.failing = None
        else:
            since = now if self.failing is None else self.failing.at
            self.failing = Denied(" ".join(str(problem).split()), since)

    def _claimed(self, leadership_id: int, claim: Claim, now: float) -> None:
        """A lease that ended under the node was not taken by anybody, unless it is somebody else's now: a reset or a
        deletion ends leases as well."""
        if claim.node.incarnation == self.incarnation:
            self.taken.pop(leadership_id, None)
        elif leadership_id in self._lost:
            what = "the housekeeping" if leadership_id == MAINTENANCE else f"the leadership of group {leadership_id}"
            self.taken[leadership_id] = Denied(f"node {claim.node.name} has taken {what}", now)
        self._lost -= {leadership_id}

    def taken_since(self, then: float) -> list[Denied]:
        """The leases that somebody else took after that, and that are not back; older ones are forgotten."""
        for leadership_id in [each for each, denied in tuple(self.taken.items()) if denied.at < then]:
            self.taken.pop(leadership_id, None)
        return list(self.taken.values())


def is_away(problem: Exception) -> bool:
    """Whether the database did not answer at all; a statement that it refuses is an answer."""
    if isinstance(problem, RolledBack):
        return False
    return isinstance(problem, DatabaseUnreachable | UnknownOutcome | psycopg.OperationalError)
