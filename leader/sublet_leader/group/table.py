"""The life of an assignment (stream, borrower, grant id), as the leader sees it.

    absent -> granting -> granted -> revoking -> revoked -> absent

`granting` begins when the grant is decided; the borrower hears of it when the row is written. `revoked` outlives the
lending: the row is free again and may be lent under the next grant id while the last borrower is still being told.

The table has what may happen, and whatever a borrower may say is among it. A pair that is missing is one that only the
leader itself could cause: it would be a broken rule of its own, and raises.
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
    BROKEN_OFF = "left unfinished"
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
    WRITE_BROKEN_OFF = "_write_broken_off"
    WRITE_SEIZURE = "_write_seizure"


Step = tuple[Status, Action]


def _row(**steps: Step) -> dict[Kind, Step]:
    """What may happen in one status."""
    return {Kind[name]: step for name, step in steps.items()}


TABLE: dict[Status, dict[Kind, Step]] = {
    Status.GRANTING: _row(
        GRANT_WRITTEN=(Status.GRANTING, Action.TELL_GRANT),
        GRANT_REFUSED=(Status.ABSENT, Action.FORGET),
        PROGRESS=(Status.GRANTED, Action.WRITE_PROGRESS),
        FINAL=(Status.REVOKING, Action.WRITE_FINAL),
        BROKEN_OFF=(Status.REVOKING, Action.WRITE_BROKEN_OFF),
        SAVED=(Status.GRANTING, Action.IGNORE),
        ENDED=(Status.REVOKED, Action.TELL_REVOKED),
        LOST=(Status.ABSENT, Action.TELL_LOST),
        REVOKE=(Status.REVOKING, Action.TELL_REVOKE),
        REVOKE_FINISHED=(Status.REVOKING, Action.WRITE_UNHELD),
        RESEND=(Status.GRANTING, Action.TELL_GRANT),
    ),
    Status.GRANTED: _row(
        GRANT_WRITTEN=(Status.GRANTED, Action.IGNORE),  # a reclaimed grant, used before the row says whose it is
        PROGRESS=(Status.GRANTED, Action.WRITE_PROGRESS),
        FINAL=(Status.REVOKING, Action.WRITE_FINAL),
        BROKEN_OFF=(Status.REVOKING, Action.WRITE_BROKEN_OFF),
        SAVED=(Status.GRANTED, Action.TELL_SAVED),
        ENDED=(Status.REVOKED, Action.TELL_REVOKED),
        LOST=(Status.ABSENT, Action.TELL_LOST),
        REVOKE=(Status.REVOKING, Action.TELL_REVOKE),
        REVOKE_FINISHED=(Status.REVOKING, Action.WRITE_UNHELD),
    ),
    Status.REVOKING: _row(
        GRANT_WRITTEN=(Status.REVOKING, Action.TELL_REVOKE),
        GRANT_REFUSED=(Status.ABSENT, Action.FORGET),
        PROGRESS=(Status.REVOKING, Action.WRITE_PROGRESS),
        FINAL=(Status.REVOKING, Action.WRITE_FINAL),
        BROKEN_OFF=(Status.REVOKING, Action.WRITE_BROKEN_OFF),
        SAVED=(Status.REVOKING, Action.TELL_SAVED),
        ENDED=(Status.REVOKED, Action.TELL_REVOKED),
        LOST=(Status.ABSENT, Action.TELL_LOST),
        REVOKE=(Status.REVOKING, Action.IGNORE),
        REVOKE_FINISHED=(Status.REVOKING, Action.WRITE_UNHELD),
        RESEND=(Status.REVOKING, Action.TELL_REVOKE),
        DEADLINE=(Status.REVOKING, Action.WRITE_SEIZURE),
    ),
    Status.REVOKED: _row(
        PROGRESS=(Status.REVOKED, Action.TELL_REVOKED),
        FINAL=(Status.REVOKED, Action.TELL_REVOKED),
        REVOKE_FINISHED=(Status.ABSENT, Action.FORGET),
        RESEND=(Status.REVOKED, Action.TELL_REVOKED),
    ),
    Status.ABSENT: _row(
        PROGRESS=(Status.ABSENT, Action.TELL_LOST),
        FINAL=(Status.ABSENT, Action.TELL_LOST),
        REVOKE_FINISHED=(Status.ABSENT, Action.IGNORE),
    ),
}
"""(status, event) -> (next status, action)."""
