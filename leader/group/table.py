"""The life of an assignment (stream, borrower, grant id), as the leader sees it.

    absent -> granting -> granted -> revoking -> revoked -> absent

`granting` begins when the grant is decided; the borrower hears of it when the row is written. `revoked` outlives the
lending: the row is free again and may be lent under the next grant id while the last borrower is still being told.
"""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """What is true of an assignment."""

    GRANTING = "granting"  # being written, or written and the borrower has not answered yet
    GRANTED = "granted"  # the borrower has reported progress under this grant
    REVOKING = "revoking"  # the borrower was told to stop and has not given its last word
    REVOKED = "revoked"  # the last word is durable, the grant is over, the borrower was told to forget it
    ABSENT = "absent"  # there is no assignment


class Kind(Enum):
    """What can happen to an assignment."""

    GRANT_WRITTEN = "grant written"
    GRANT_REFUSED = "grant refused"
    PROGRESS = "progress"
    FINAL = "final progress"
    SAVED = "progress saved"
    ENDED = "end of grant saved"
    LOST = "grant lost"
    REVOKE = "revoke decided"
    REVOKE_FINISHED = "revoke_finished"
    RESEND = "resend due"
    DEADLINE = "deadline"


class Action(Enum):
    """What the leader does; the value is the name of its method."""

    IGNORE = "_ignore"
    TELL_GRANT = "_tell_grant"
    TELL_REVOKE = "_tell_revoke"
    TELL_REVOKED = "_tell_revoked"
    TELL_LOST = "_tell_lost"
    TELL_SAVED = "_tell_saved"
    FORGET = "_forget"
    WRITE_PROGRESS = "_write_progress"
    WRITE_FINAL = "_write_final"
    WRITE_UNHELD = "_write_unheld"
    WRITE_SEIZURE = "_write_seizure"


Step = tuple[Status, Action]

_STAY_GRANTING = (Status.GRANTING, Action.IGNORE)
_STAY_GRANTED = (Status.GRANTED, Action.IGNORE)
_STAY_REVOKING = (Status.REVOKING, Action.IGNORE)
_STAY_REVOKED = (Status.REVOKED, Action.IGNORE)
_STAY_ABSENT = (Status.ABSENT, Action.IGNORE)

TABLE: dict[Status, dict[Kind, Step]] = {
    Status.GRANTING: {
        Kind.GRANT_WRITTEN: (Status.GRANTING, Action.TELL_GRANT),
        Kind.GRANT_REFUSED: (Status.ABSENT, Action.FORGET),
        Kind.PROGRESS: (Status.GRANTED, Action.WRITE_PROGRESS),
        Kind.FINAL: (Status.REVOKING, Action.WRITE_FINAL),
        Kind.SAVED: _STAY_GRANTING,
        Kind.ENDED: (Status.REVOKED, Action.TELL_REVOKED),
        Kind.LOST: (Status.ABSENT, Action.TELL_LOST),
        Kind.REVOKE: (Status.REVOKING, Action.TELL_REVOKE),
        Kind.REVOKE_FINISHED: (Status.REVOKING, Action.WRITE_UNHELD),
        Kind.RESEND: (Status.GRANTING, Action.TELL_GRANT),
        Kind.DEADLINE: _STAY_GRANTING,
    },
    Status.GRANTED: {
        Kind.GRANT_WRITTEN: _STAY_GRANTED,
        Kind.GRANT_REFUSED: (Status.ABSENT, Action.FORGET),
        Kind.PROGRESS: (Status.GRANTED, Action.WRITE_PROGRESS),
        Kind.FINAL: (Status.REVOKING, Action.WRITE_FINAL),
        Kind.SAVED: (Status.GRANTED, Action.TELL_SAVED),
        Kind.ENDED: (Status.REVOKED, Action.TELL_REVOKED),
        Kind.LOST: (Status.ABSENT, Action.TELL_LOST),
        Kind.REVOKE: (Status.REVOKING, Action.TELL_REVOKE),
        Kind.REVOKE_FINISHED: (Status.REVOKING, Action.WRITE_UNHELD),
        Kind.RESEND: _STAY_GRANTED,
        Kind.DEADLINE: _STAY_GRANTED,
    },
    Status.REVOKING: {
        Kind.GRANT_WRITTEN: (Status.REVOKING, Action.TELL_REVOKE),
        Kind.GRANT_REFUSED: (Status.ABSENT, Action.FORGET),
        Kind.PROGRESS: (Status.REVOKING, Action.WRITE_PROGRESS),
        Kind.FINAL: (Status.REVOKING, Action.WRITE_FINAL),
        Kind.SAVED: (Status.REVOKING, Action.TELL_SAVED),
        Kind.ENDED: (Status.REVOKED, Action.TELL_REVOKED),
        Kind.LOST: (Status.ABSENT, Action.TELL_LOST),
        Kind.REVOKE: _STAY_REVOKING,
        Kind.REVOKE_FINISHED: (Status.REVOKING, Action.WRITE_UNHELD),
        Kind.RESEND: (Status.REVOKING, Action.TELL_REVOKE),
        Kind.DEADLINE: (Status.ABSENT, Action.WRITE_SEIZURE),
    },
    Status.REVOKED: {
        Kind.GRANT_WRITTEN: _STAY_REVOKED,
        Kind.GRANT_REFUSED: _STAY_REVOKED,
        Kind.PROGRESS: (Status.REVOKED, Action.TELL_REVOKED),
        Kind.FINAL: (Status.REVOKED, Action.TELL_REVOKED),
        Kind.SAVED: _STAY_REVOKED,
        Kind.ENDED: _STAY_REVOKED,
        Kind.LOST: _STAY_REVOKED,
        Kind.REVOKE: _STAY_REVOKED,
        Kind.REVOKE_FINISHED: (Status.ABSENT, Action.FORGET),
        Kind.RESEND: (Status.REVOKED, Action.TELL_REVOKED),
        Kind.DEADLINE: _STAY_REVOKED,
    },
    Status.ABSENT: {
        Kind.GRANT_WRITTEN: _STAY_ABSENT,
        Kind.GRANT_REFUSED: _STAY_ABSENT,
        Kind.PROGRESS: (Status.ABSENT, Action.TELL_LOST),
        Kind.FINAL: (Status.ABSENT, Action.TELL_LOST),
        Kind.SAVED: _STAY_ABSENT,
        Kind.ENDED: _STAY_ABSENT,
        Kind.LOST: _STAY_ABSENT,
        Kind.REVOKE: _STAY_ABSENT,
        Kind.REVOKE_FINISHED: _STAY_ABSENT,
        Kind.RESEND: _STAY_ABSENT,
        Kind.DEADLINE: _STAY_ABSENT,
    },
}
"""(status, event) -> (next status, action). Every pair is answered; a test counts them."""
