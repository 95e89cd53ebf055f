"""Events and outcomes of the election machine, as frozen values."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct, field

from sublet_protocol.tick import Tick
from sublet_storage.db.liveness_lock import LockEvent
from sublet_storage.groups.model.records import LeaderLivenessLock, Leadership


class StartCampaign(Struct, frozen=True):
    """This node should lead if no other node does. Repeated while waiting, it brings the next claim forward."""

    leadership_id: int


class Resign(Struct, frozen=True):
    """This node should not lead: release what it has and stop trying."""

    leadership_id: int


class ResignAll(Struct, frozen=True):
    """The node is drained or shut down: release everything it leads in one statement."""


class ClaimCompleted(Struct, frozen=True):
    """The row as the claim left it, or None where the claim failed or its outcome is unknown.

    `attempt_started`: taken before the statement was sent. `jitter_s`: a small random delay for the next attempt.
    """

    leadership_id: int
    attempt_started: float
    leadership: Leadership | None
    jitter_s: float = 0.0


class RenewCompleted(Struct, frozen=True):
    """Which of the batch were renewed, or None where the renewal failed or its outcome is unknown."""

    attempt_started: float
    renewed: frozenset[int] | None


class ReleaseCompleted(Struct, frozen=True):
    """The terms of one release batch are over; or, not `is_done`, the release failed or its outcome is unknown."""

    terms: Mapping[int, int]
    is_done: bool


Event = StartCampaign | Resign | ResignAll | ClaimCompleted | RenewCompleted | ReleaseCompleted | LockEvent | Tick


# --- outcomes -------------------------------------------------------------------------------------------------------


class LeadershipAcquired(Struct, frozen=True):
    """This node leads under `term`: load the rows and begin. Until `previous_leader_until` the previous leader may
    still act as the leader."""

    leadership_id: int
    term: int
    previous_leader_until: float = float("-inf")


class LeadershipHeldElsewhere(Struct, frozen=True):
    """The node of that address leads; this one claims again in time."""

    leadership_id: int
    address: str


class LeadershipLost(Struct, frozen=True):
    """This node does not lead any more, though it did not resign: step down."""

    leadership_id: int


Notice = LeadershipAcquired | LeadershipHeldElsewhere | LeadershipLost


class ElectionOutcome(Struct, frozen=True):
    """The attempts to make now, and the changes of leadership.

    `claims`: leadership ids, one claim each; `rivals`: of those, the leaders whose locks were found free. `renew` and
    `release`: {leadership id: term}, one statement each, nothing to do where empty. `wake_at`: when to send the next
    `Tick`, at the latest; None: no timer is pending.
    """

    claims: tuple[int, ...] = ()
    rivals: Mapping[int, LeaderLivenessLock] = field(default_factory=dict)
    renew: Mapping[int, int] = field(default_factory=dict)
    release: Mapping[int, int] = field(default_factory=dict)
    notices: tuple[Notice, ...] = ()
    wake_at: float | None = None
