"""The state transitions of one node's claim on one leadership, as data.

    absent -> claiming -> leading -> releasing -> absent
              |  ^  ^        |
              v  |  |        v
           standby  releasing to reclaim

A leadership that is over on this node, for any reason, is *released* before it is claimed again: the node's state
of a term may be out of date, so it never leads twice under one. `RELEASING_TO_RECLAIM` is a release under way whose
leadership is campaigned for again, `ABANDONING` a claim under way whose leadership is not. A release of a term that has
a successor does nothing.

The table lists every valid pair. Answers that are not (or no longer) waited for are dropped before the look-up, and a
timer runs only where a time was set: a pair that is missing is a bug of the machine, and raises.
"""

from __future__ import annotations

from enum import Enum


class ElectionStatus(Enum):
    """The status of one leadership on this node."""

    ABSENT = "absent"  # not campaigned for, nothing under way; the machine has no state of it
    CLAIMING = "claiming"  # campaigned for, and a claim is under way
    ABANDONING = "abandoning"  # a claim is under way, and is not campaigned for any more
    STANDBY = "standby"  # campaigned for; another node leads or the claim failed; the next claim has its time
    LEADING = "leading"  # ours, and to be trusted until the trust window ends
    RELEASING = "releasing"  # resigned; its release is under way, or is tried again at its time
    RELEASING_TO_RECLAIM = "releasing_to_reclaim"  # as releasing, but claimed again once the old term is over


class ElectionEventKind(Enum):
    """The events of one leadership."""

    CAMPAIGN = "campaign"
    RESIGN = "resign"
    CLAIM_WON = "claim answered: ours, and the trust window is open"
    CLAIM_WON_LATE = "claim answered: ours, but too late to be trusted"
    CLAIM_LOST = "claim answered: another node leads"
    CLAIM_FAILED = "claim failed"
    RENEWED = "renewed"
    RENEWAL_REJECTED = "renewal rejected"
    RELEASED = "released: the term is over"
    RELEASE_FAILED = "release failed"
    TRUST_EXPIRED = "trust window ended"
    TIMER_DUE = "time to try again"
    RIVAL_GONE = "the lock of the node that leads was found free twice"


class ElectionAction(Enum):
    """The actions of the machine; each value is the name of a method."""

    IGNORE = "_ignore"
    CLAIM = "_claim"
    SUCCEED = "_succeed"  # claim before the lease of the node that leads has run out
    CLAIM_SOONER = "_claim_sooner"  # claim sooner than planned
    LEAD = "_lead"
    WAIT = "_wait"
    RETRY = "_retry"
    EXTEND_TRUST = "_extend"
    STEP_DOWN = "_lose"
    RELEASE = "_release"
    FORGET = "_forget"


Transition = tuple[ElectionStatus, ElectionAction]


TRANSITIONS: dict[ElectionStatus, dict[ElectionEventKind, Transition]] = {
    ElectionStatus.ABSENT: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.CLAIMING, ElectionAction.CLAIM),
    },
    ElectionStatus.CLAIMING: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.CLAIMING, ElectionAction.IGNORE),
        ElectionEventKind.RESIGN: (ElectionStatus.ABANDONING, ElectionAction.IGNORE),
        ElectionEventKind.CLAIM_WON: (ElectionStatus.LEADING, ElectionAction.LEAD),
        ElectionEventKind.CLAIM_WON_LATE: (ElectionStatus.RELEASING_TO_RECLAIM, ElectionAction.RELEASE),
        ElectionEventKind.CLAIM_LOST: (ElectionStatus.STANDBY, ElectionAction.WAIT),
        ElectionEventKind.CLAIM_FAILED: (ElectionStatus.STANDBY, ElectionAction.RETRY),
    },
    ElectionStatus.ABANDONING: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.CLAIMING, ElectionAction.IGNORE),
        ElectionEventKind.RESIGN: (ElectionStatus.ABANDONING, ElectionAction.IGNORE),
        ElectionEventKind.CLAIM_WON: (ElectionStatus.RELEASING, ElectionAction.RELEASE),
        ElectionEventKind.CLAIM_WON_LATE: (ElectionStatus.RELEASING, ElectionAction.RELEASE),
        ElectionEventKind.CLAIM_LOST: (ElectionStatus.ABSENT, ElectionAction.FORGET),
        ElectionEventKind.CLAIM_FAILED: (ElectionStatus.ABSENT, ElectionAction.FORGET),
    },
    ElectionStatus.STANDBY: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.STANDBY, ElectionAction.CLAIM_SOONER),
        ElectionEventKind.RESIGN: (ElectionStatus.ABSENT, ElectionAction.FORGET),
        ElectionEventKind.TIMER_DUE: (ElectionStatus.CLAIMING, ElectionAction.CLAIM),
        ElectionEventKind.RIVAL_GONE: (ElectionStatus.CLAIMING, ElectionAction.SUCCEED),
    },
    ElectionStatus.LEADING: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.LEADING, ElectionAction.IGNORE),
        ElectionEventKind.RESIGN: (ElectionStatus.RELEASING, ElectionAction.RELEASE),
        ElectionEventKind.RENEWED: (ElectionStatus.LEADING, ElectionAction.EXTEND_TRUST),
        ElectionEventKind.RENEWAL_REJECTED: (ElectionStatus.RELEASING_TO_RECLAIM, ElectionAction.STEP_DOWN),
        ElectionEventKind.TRUST_EXPIRED: (ElectionStatus.RELEASING_TO_RECLAIM, ElectionAction.STEP_DOWN),
    },
    ElectionStatus.RELEASING: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.RELEASING_TO_RECLAIM, ElectionAction.IGNORE),
        ElectionEventKind.RESIGN: (ElectionStatus.RELEASING, ElectionAction.IGNORE),
        ElectionEventKind.RELEASED: (ElectionStatus.ABSENT, ElectionAction.FORGET),
        ElectionEventKind.RELEASE_FAILED: (ElectionStatus.RELEASING, ElectionAction.RETRY),
        ElectionEventKind.TIMER_DUE: (ElectionStatus.RELEASING, ElectionAction.RELEASE),
    },
    ElectionStatus.RELEASING_TO_RECLAIM: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.RELEASING_TO_RECLAIM, ElectionAction.IGNORE),
        ElectionEventKind.RESIGN: (ElectionStatus.RELEASING, ElectionAction.IGNORE),
        ElectionEventKind.RELEASED: (ElectionStatus.CLAIMING, ElectionAction.CLAIM),
        ElectionEventKind.RELEASE_FAILED: (ElectionStatus.RELEASING_TO_RECLAIM, ElectionAction.RETRY),
        ElectionEventKind.TIMER_DUE: (ElectionStatus.RELEASING_TO_RECLAIM, ElectionAction.RELEASE),
    },
}
