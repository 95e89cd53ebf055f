"""The life of one node's claim on one leadership, as data.

    absent -> claiming -> led -> releasing -> absent
              |  ^  ^      |
              v  |  |      v
            waiting  returning

A leadership that is over on this node, for whatever reason, is *released* before it is claimed again: the node's state
of a term may be out of date, so it never leads twice under one. `returning` is a release under way whose leadership is
campaigned for again. A release of a term that has a successor does nothing.

The table has what may happen. Answers that are not (or no longer) waited for are dropped before the look-up, and a
timer runs only where a time was set: a pair that is missing would be a mistake of the machine's own, and raises.
"""

from __future__ import annotations

from enum import Enum


class ElectionStatus(Enum):
    """What is true of one leadership on this node."""

    ABSENT = "absent"  # not campaigned for, nothing under way; the machine has no state of it
    CLAIMING = "claiming"  # campaigned for, and a claim is under way
    ABANDONING = "abandoning"  # a claim is under way, and is not campaigned for any more
    STANDBY = "standby"  # campaigned for; another node leads or the claim failed; the next claim has its time
    LEADING = "leading"  # ours, and to be trusted until the trust window ends
    RELEASING = "releasing"  # resigned; its release is under way, or is tried again at its time
    RELEASING_TO_RECLAIM = "releasing_to_reclaim"  # as releasing, but claimed again once the old term is over


class EventKind(Enum):
    """What can happen to it."""

    CAMPAIGN = "want"
    RESIGN = "unwant"
    CLAIM_WON = "claim answered: ours, and the trust window is open"
    CLAIM_WON_LATE = "claim answered: ours, but too late to be trusted"
    CLAIM_LOST = "claim answered: another node leads"
    CLAIM_FAILED = "claim failed"
    RENEWED = "renewed"
    RENEWAL_REJECTED = "renewal refused"
    RELEASED = "released: the term is over"
    RELEASE_FAILED = "release failed"
    TRUST_EXPIRED = "trust window ended"
    TIMER_DUE = "time to try again"


class Action(Enum):
    """What the machine does; the value is the name of its method."""

    IGNORE = "_ignore"
    CLAIM = "_claim"
    CLAIM_SOONER = "_claim_sooner"  # claim sooner than planned
    LEAD = "_lead"
    WAIT = "_wait"
    RETRY = "_retry"
    EXTEND_TRUST = "_extend"
    STEP_DOWN = "_lose"
    RELEASE = "_release"
    FORGET = "_forget"


Transition = tuple[ElectionStatus, Action]


TRANSITIONS: dict[ElectionStatus, dict[EventKind, Transition]] = {
    ElectionStatus.ABSENT: {
        EventKind.CAMPAIGN: (ElectionStatus.CLAIMING, Action.CLAIM),
    },
    ElectionStatus.CLAIMING: {
        EventKind.CAMPAIGN: (ElectionStatus.CLAIMING, Action.IGNORE),
        EventKind.RESIGN: (ElectionStatus.ABANDONING, Action.IGNORE),
        EventKind.CLAIM_WON: (ElectionStatus.LEADING, Action.LEAD),
        EventKind.CLAIM_WON_LATE: (ElectionStatus.RELEASING_TO_RECLAIM, Action.RELEASE),
        EventKind.CLAIM_LOST: (ElectionStatus.STANDBY, Action.WAIT),
        EventKind.CLAIM_FAILED: (ElectionStatus.STANDBY, Action.RETRY),
    },
    ElectionStatus.ABANDONING: {
        EventKind.CAMPAIGN: (ElectionStatus.CLAIMING, Action.IGNORE),
        EventKind.RESIGN: (ElectionStatus.ABANDONING, Action.IGNORE),
        EventKind.CLAIM_WON: (ElectionStatus.RELEASING, Action.RELEASE),
        EventKind.CLAIM_WON_LATE: (ElectionStatus.RELEASING, Action.RELEASE),
        EventKind.CLAIM_LOST: (ElectionStatus.ABSENT, Action.FORGET),
        EventKind.CLAIM_FAILED: (ElectionStatus.ABSENT, Action.FORGET),
    },
    ElectionStatus.STANDBY: {
        EventKind.CAMPAIGN: (ElectionStatus.STANDBY, Action.CLAIM_SOONER),
        EventKind.RESIGN: (ElectionStatus.ABSENT, Action.FORGET),
        EventKind.TIMER_DUE: (ElectionStatus.CLAIMING, Action.CLAIM),
    },
    ElectionStatus.LEADING: {
        EventKind.CAMPAIGN: (ElectionStatus.LEADING, Action.IGNORE),
        EventKind.RESIGN: (ElectionStatus.RELEASING, Action.RELEASE),
        EventKind.RENEWED: (ElectionStatus.LEADING, Action.EXTEND_TRUST),
        EventKind.RENEWAL_REJECTED: (ElectionStatus.RELEASING_TO_RECLAIM, Action.STEP_DOWN),
        EventKind.TRUST_EXPIRED: (ElectionStatus.RELEASING_TO_RECLAIM, Action.STEP_DOWN),
    },
    ElectionStatus.RELEASING: {
        EventKind.CAMPAIGN: (ElectionStatus.RELEASING_TO_RECLAIM, Action.IGNORE),
        EventKind.RESIGN: (ElectionStatus.RELEASING, Action.IGNORE),
        EventKind.RELEASED: (ElectionStatus.ABSENT, Action.FORGET),
        EventKind.RELEASE_FAILED: (ElectionStatus.RELEASING, Action.RETRY),
        EventKind.TIMER_DUE: (ElectionStatus.RELEASING, Action.RELEASE),
    },
    ElectionStatus.RELEASING_TO_RECLAIM: {
        EventKind.CAMPAIGN: (ElectionStatus.RELEASING_TO_RECLAIM, Action.IGNORE),
        EventKind.RESIGN: (ElectionStatus.RELEASING, Action.IGNORE),
        EventKind.RELEASED: (ElectionStatus.CLAIMING, Action.CLAIM),
        EventKind.RELEASE_FAILED: (ElectionStatus.RELEASING_TO_RECLAIM, Action.RETRY),
        EventKind.TIMER_DUE: (ElectionStatus.RELEASING_TO_RECLAIM, Action.RELEASE),
    },
}
