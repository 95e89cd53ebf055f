"""Leader election: the leaderships that a node has claimed, and their trust windows.

`Election.decide(event, now) -> ElectionOutcome`; `now` and all other times are seconds of the node's monotonic clock.
The shell makes the attempts that an outcome names and answers each with an event, also when it failed.

The database counts `lease_duration_s` of a claim or renewal from when it received it, which is some time after the
attempt *started*: so the trust window is attempt started + lease - margin, however long the answer took. The database's
clock is never compared with the node's. Check `trusted_term` before acting as a leader; no tick is needed for it.

A node holds a lock of its own in the database, which ends with its process, and declares its key with what it leads. A
leadership held elsewhere is claimed before its lease runs out where that leader's lock was found free twice. A leader
that has lost its own lock, and has not got it back in a moment, may be succeeded at any time: it is silent until it has
the lock again, or has renewed its leases without one.

Losing a leadership is no error: it is reported as `LeadershipLost`, and as long as the node campaigns it claims it
again.
"""

from sublet_leader.election.dead_process_detectors import DeadAgentDetector
from sublet_leader.election.events import (
    ClaimCompleted,
    ElectionOutcome,
    Event,
    LeadershipAcquired,
    LeadershipHeldElsewhere,
    LeadershipLost,
    Notice,
    ReleaseCompleted,
    RenewCompleted,
    Resign,
    ResignAll,
    StartCampaign,
)
from sublet_leader.election.machine import Election
from sublet_leader.election.transitions import TRANSITIONS, ElectionAction, ElectionEventKind, ElectionStatus
from sublet_storage.db.liveness_lock import LivenessLockLost, LockEvent, OwnLivenessLockAcquired, PeerLocksChecked

__all__ = [
    "TRANSITIONS",
    "ClaimCompleted",
    "DeadAgentDetector",
    "Election",
    "ElectionAction",
    "ElectionEventKind",
    "ElectionOutcome",
    "ElectionStatus",
    "Event",
    "LeadershipAcquired",
    "LeadershipHeldElsewhere",
    "LeadershipLost",
    "LivenessLockLost",
    "LockEvent",
    "Notice",
    "OwnLivenessLockAcquired",
    "PeerLocksChecked",
    "ReleaseCompleted",
    "RenewCompleted",
    "Resign",
    "ResignAll",
    "StartCampaign",
]
