"""The state transitions of one node's claim on one leadership, as data.

    absent -> claiming -> led -> releasing -> absent
              |  ^  ^      |
              v  |  |      v
            waiting  returning

A leadership that is over on this node, for any reason, is *released* before it is claimed again: the node's state
of a term may be out of date, so it never leads twice under one. `returning` is a release under way whose leadership is
campaigned for again. A release of a term that has a successor does nothing.

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


class Action(Enum):
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


Transition = tuple[ElectionStatus, Action]


TRANSITIONS: dict[ElectionStatus, dict[ElectionEventKind, Transition]] = {
    ElectionStatus.ABSENT: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.CLAIMING, Action.CLAIM),
    },
    ElectionStatus.CLAIMING: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.CLAIMING, Action.IGNORE),
        ElectionEventKind.RESIGN: (ElectionStatus.ABANDONING, Action.IGNORE),
        ElectionEventKind.CLAIM_WON: (ElectionStatus.LEADING, Action.LEAD),
        ElectionEventKind.CLAIM_WON_LATE: (ElectionStatus.RELEASING_TO_RECLAIM, Action.RELEASE),
        ElectionEventKind.CLAIM_LOST: (ElectionStatus.STANDBY, Action.WAIT),
        ElectionEventKind.CLAIM_FAILED: (ElectionStatus.STANDBY, Action.RETRY),
    },
    ElectionStatus.ABANDONING: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.CLAIMING, Action.IGNORE),
        ElectionEventKind.RESIGN: (ElectionStatus.ABANDONING, Action.IGNORE),
        ElectionEventKind.CLAIM_WON: (ElectionStatus.RELEASING, Action.RELEASE),
        ElectionEventKind.CLAIM_WON_LATE: (ElectionStatus.RELEASING, Action.RELEASE),
        ElectionEventKind.CLAIM_LOST: (ElectionStatus.ABSENT, Action.FORGET),
        ElectionEventKind.CLAIM_FAILED: (ElectionStatus.ABSENT, Action.FORGET),
    },
    ElectionStatus.STANDBY: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.STANDBY, Action.CLAIM_SOONER),
        ElectionEventKind.RESIGN: (ElectionStatus.ABSENT, Action.FORGET),
        ElectionEventKind.TIMER_DUE: (ElectionStatus.CLAIMING, Action.CLAIM),
        ElectionEventKind.RIVAL_GONE: (ElectionStatus.CLAIMING, Action.SUCCEED),
    },
    ElectionStatus.LEADING: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.LEADING, Action.IGNORE),
        ElectionEventKind.RESIGN: (ElectionStatus.RELEASING, Action.RELEASE),
        ElectionEventKind.RENEWED: (ElectionStatus.LEADING, Action.EXTEND_TRUST),
        ElectionEventKind.RENEWAL_REJECTED: (ElectionStatus.RELEASING_TO_RECLAIM, Action.STEP_DOWN),
        ElectionEventKind.TRUST_EXPIRED: (ElectionStatus.RELEASING_TO_RECLAIM, Action.STEP_DOWN),
    },
    ElectionStatus.RELEASING: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.RELEASING_TO_RECLAIM, Action.IGNORE),
        ElectionEventKind.RESIGN: (ElectionStatus.RELEASING, Action.IGNORE),
        ElectionEventKind.RELEASED: (ElectionStatus.ABSENT, Action.FORGET),
        ElectionEventKind.RELEASE_FAILED: (ElectionStatus.RELEASING, Action.RETRY),
        ElectionEventKind.TIMER_DUE: (ElectionStatus.RELEASING, Action.RELEASE),
    },
    ElectionStatus.RELEASING_TO_RECLAIM: {
        ElectionEventKind.CAMPAIGN: (ElectionStatus.RELEASING_TO_RECLAIM, Action.IGNORE),
        ElectionEventKind.RESIGN: (ElectionStatus.RELEASING, Action.IGNORE),
        ElectionEventKind.RELEASED: (ElectionStatus.CLAIMING, Action.CLAIM),
        ElectionEventKind.RELEASE_FAILED: (ElectionStatus.RELEASING_TO_RECLAIM, Action.RETRY),
        ElectionEventKind.TIMER_DUE: (ElectionStatus.RELEASING_TO_RECLAIM, Action.RELEASE),
    },
}
