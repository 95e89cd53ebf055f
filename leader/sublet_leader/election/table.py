"""The life of one node's claim on one leadership, as data.

    absent -> claiming -> led -> releasing -> absent
              |  ^  ^      |
              v  |  |      v
            waiting  returning

A leadership that is over on this node, for whatever reason, is *released* before it is claimed again: what the node
remembers of a term may be out of date, so it never leads twice under one. `returning` is a release under way whose
leadership is wanted again. A release of a term that somebody has succeeded does nothing.

The table has what may happen. Answers that nobody waits for (any more) are dropped before it is asked, and a timer runs
only where a time was set: a pair that is missing would be a mistake of the machine's own, and raises.
"""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """What is true of one leadership on this node."""

    ABSENT = "absent"  # not wanted, nothing under way; the machine remembers nothing of it
    CLAIMING = "claiming"  # wanted, and a claim is under way
    ABANDONING = "abandoning"  # a claim is under way, and is not wanted any more
    WAITING = "waiting"  # wanted; another node leads or the claim failed; the next claim has its time
    LED = "led"  # ours, and to be trusted until the trust window ends
    RELEASING = "releasing"  # not wanted; its release is under way, or is tried again at its time
    RETURNING = "returning"  # as releasing, but wanted: claimed as soon as the old term is over for certain


class Kind(Enum):
    """What can happen to it."""

    WANT = "want"
    UNWANT = "unwant"
    WON = "claim answered: ours, and the trust window is open"
    WON_LATE = "claim answered: ours, but too late to be trusted"
    BEATEN = "claim answered: another node leads"
    CLAIM_FAILED = "claim failed"
    RENEWED = "renewed"
    REFUSED = "renewal refused"
    RELEASED = "released: the term is over"
    RELEASE_FAILED = "release failed"
    LAPSED = "trust window ended"
    DUE = "time to try again"


class Action(Enum):
    """What the machine does; the value is the name of its method."""

    IGNORE = "_ignore"
    CLAIM = "_claim"
    RECONSIDER = "_reconsider"  # claim sooner than planned
    LEAD = "_lead"
    WAIT = "_wait"
    RETRY = "_retry"
    EXTEND = "_extend"
    LOSE = "_lose"
    RELEASE = "_release"
    FORGET = "_forget"


Step = tuple[Status, Action]


TABLE: dict[Status, dict[Kind, Step]] = {
    Status.ABSENT: {
        Kind.WANT: (Status.CLAIMING, Action.CLAIM),
    },
    Status.CLAIMING: {
        Kind.WANT: (Status.CLAIMING, Action.IGNORE),
        Kind.UNWANT: (Status.ABANDONING, Action.IGNORE),
        Kind.WON: (Status.LED, Action.LEAD),
        Kind.WON_LATE: (Status.RETURNING, Action.RELEASE),
        Kind.BEATEN: (Status.WAITING, Action.WAIT),
        Kind.CLAIM_FAILED: (Status.WAITING, Action.RETRY),
    },
    Status.ABANDONING: {
        Kind.WANT: (Status.CLAIMING, Action.IGNORE),
        Kind.UNWANT: (Status.ABANDONING, Action.IGNORE),
        Kind.WON: (Status.RELEASING, Action.RELEASE),
        Kind.WON_LATE: (Status.RELEASING, Action.RELEASE),
        Kind.BEATEN: (Status.ABSENT, Action.FORGET),
        Kind.CLAIM_FAILED: (Status.ABSENT, Action.FORGET),
    },
    Status.WAITING: {
        Kind.WANT: (Status.WAITING, Action.RECONSIDER),
        Kind.UNWANT: (Status.ABSENT, Action.FORGET),
        Kind.DUE: (Status.CLAIMING, Action.CLAIM),
    },
    Status.LED: {
        Kind.WANT: (Status.LED, Action.IGNORE),
        Kind.UNWANT: (Status.RELEASING, Action.RELEASE),
        Kind.RENEWED: (Status.LED, Action.EXTEND),
        Kind.REFUSED: (Status.RETURNING, Action.LOSE),
        Kind.LAPSED: (Status.RETURNING, Action.LOSE),
    },
    Status.RELEASING: {
        Kind.WANT: (Status.RETURNING, Action.IGNORE),
        Kind.UNWANT: (Status.RELEASING, Action.IGNORE),
        Kind.RELEASED: (Status.ABSENT, Action.FORGET),
        Kind.RELEASE_FAILED: (Status.RELEASING, Action.RETRY),
        Kind.DUE: (Status.RELEASING, Action.RELEASE),
    },
    Status.RETURNING: {
        Kind.WANT: (Status.RETURNING, Action.IGNORE),
        Kind.UNWANT: (Status.RELEASING, Action.IGNORE),
        Kind.RELEASED: (Status.CLAIMING, Action.CLAIM),
        Kind.RELEASE_FAILED: (Status.RETURNING, Action.RETRY),
        Kind.DUE: (Status.RETURNING, Action.RELEASE),
    },
}
