"""One node's claims on leaderships: which it leads, and until when it may believe so.

`Election.decide(event, now) -> Outcome`; `now` and all other times are seconds of the node's monotonic clock. The shell
makes the attempts that an outcome names and answers every one of them with an event, if only to say that it failed.

A claim or renewal is worth `lease_duration_s` to the database from when it got it, which is some time after the attempt
*started*: so the trust window is attempt started + lease - margin, however long the answer took. The database's clock
is never compared with the node's. Ask `trusted` before answering anything as a leader; nothing needs to have ticked.

Losing a leadership is not an error: a notice says so, and as long as it is wanted the node claims it again.
"""

from sublet_leader.election.events import (
    Campaign,
    ClaimCompleted,
    Event,
    LeadershipAcquired,
    LeadershipHeldElsewhere,
    LeadershipLost,
    Notice,
    Outcome,
    ReleaseCompleted,
    RenewCompleted,
    Resign,
    ResignAll,
    Tick,
)
from sublet_leader.election.machine import Election
from sublet_leader.election.table import TRANSITIONS, Action, ElectionStatus, EventKind

__all__ = [
    "TRANSITIONS",
    "Action",
    "Campaign",
    "ClaimCompleted",
    "Election",
    "ElectionStatus",
    "Event",
    "EventKind",
    "LeadershipAcquired",
    "LeadershipHeldElsewhere",
    "LeadershipLost",
    "Notice",
    "Outcome",
    "ReleaseCompleted",
    "RenewCompleted",
    "Resign",
    "ResignAll",
    "Tick",
]
