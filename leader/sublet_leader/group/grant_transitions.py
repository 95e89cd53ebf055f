"""The state transitions of an assignment (stream, borrower, grant id), as the leader sees it.

    absent -> granting -> granted -> revoking -> revoked -> absent

`granting` begins when the grant is decided; it is sent to the borrower when the row is written. `revoked` outlives the
grant, and its loss: the row is free again and may be granted under the next grant id while `revoked` is still sent to
the last borrower, until it confirms.

The table lists every message that a borrower may send. A pair that is missing can only be caused by the leader itself:
it is a broken invariant, and raises.
"""

from __future__ import annotations

from enum import Enum


class GrantStatus(Enum):
    """The status of an assignment."""

    GRANTING = "granting"  # being written, or written and the borrower has not answered yet
    GRANTED = "granted"  # the borrower has reported progress under this grant
    REVOKING = "revoking"  # the borrower was asked to stop and has not sent final progress
    REVOKED = "revoked"  # final progress is durable, the grant is over, the borrower was asked to forget it
    ABSENT = "absent"  # there is no assignment


class GrantTransitionEvent(Enum):
    """The events of an assignment."""

    GRANT_WRITTEN = "grant written"
    GRANT_REFUSED = "grant refused"
    PROGRESS = "progress"
    FINAL = "final progress"
    ABORTED = "aborted"
    SAVED = "progress saved"
    ENDED = "end of grant saved"
    LOST = "grant lost"
    REVOKE = "revoke decided"
    REVOKE_FINISHED = "revoke_finished"
    RESEND = "resend due"
    DEADLINE = "deadline"


class GrantAction(Enum):
    """The actions of the leader; each value is the name of a method of `GrantActionHandlers`."""

    IGNORE = "ignore"
    SEND_GRANT = "send_grant"
    SEND_REVOKE = "send_revoke"
    SEND_REVOKED = "send_revoked"
    SEND_LOST = "send_lost"
    SEND_PROGRESS_SAVED = "send_progress_saved"
    FORGET = "forget"
    WRITE_PROGRESS = "write_progress"
    WRITE_FINAL = "write_final"
    WRITE_NOT_HELD = "write_not_held"
    WRITE_ABORTED = "write_aborted"
    WRITE_FORCE_RELEASE = "write_force_release"


Transition = tuple[GrantStatus, GrantAction]


def _make_row(**steps: Transition) -> dict[GrantTransitionEvent, Transition]:
    """Return the transitions out of one status."""
    return {GrantTransitionEvent[name]: step for name, step in steps.items()}


TRANSITIONS: dict[GrantStatus, dict[GrantTransitionEvent, Transition]] = {
    GrantStatus.GRANTING: _make_row(
        GRANT_WRITTEN=(GrantStatus.GRANTING, GrantAction.SEND_GRANT),
        GRANT_REFUSED=(GrantStatus.ABSENT, GrantAction.FORGET),
        PROGRESS=(GrantStatus.GRANTED, GrantAction.WRITE_PROGRESS),
        FINAL=(GrantStatus.REVOKING, GrantAction.WRITE_FINAL),
        ABORTED=(GrantStatus.REVOKING, GrantAction.WRITE_ABORTED),
        SAVED=(GrantStatus.GRANTING, GrantAction.IGNORE),
        ENDED=(GrantStatus.REVOKED, GrantAction.SEND_REVOKED),
        LOST=(GrantStatus.REVOKED, GrantAction.SEND_LOST),
        REVOKE=(GrantStatus.REVOKING, GrantAction.SEND_REVOKE),
        REVOKE_FINISHED=(GrantStatus.REVOKING, GrantAction.WRITE_NOT_HELD),
        RESEND=(GrantStatus.GRANTING, GrantAction.SEND_GRANT),
    ),
    GrantStatus.GRANTED: _make_row(
        GRANT_WRITTEN=(
            GrantStatus.GRANTED,
            GrantAction.IGNORE,
        ),  # a reclaimed grant, used before the row has its holder
        PROGRESS=(GrantStatus.GRANTED, GrantAction.WRITE_PROGRESS),
        FINAL=(GrantStatus.REVOKING, GrantAction.WRITE_FINAL),
        ABORTED=(GrantStatus.REVOKING, GrantAction.WRITE_ABORTED),
        SAVED=(GrantStatus.GRANTED, GrantAction.SEND_PROGRESS_SAVED),
        ENDED=(GrantStatus.REVOKED, GrantAction.SEND_REVOKED),
        LOST=(GrantStatus.REVOKED, GrantAction.SEND_LOST),
        REVOKE=(GrantStatus.REVOKING, GrantAction.SEND_REVOKE),
        REVOKE_FINISHED=(GrantStatus.REVOKING, GrantAction.WRITE_NOT_HELD),
    ),
    GrantStatus.REVOKING: _make_row(
        GRANT_WRITTEN=(GrantStatus.REVOKING, GrantAction.SEND_REVOKE),
        GRANT_REFUSED=(GrantStatus.ABSENT, GrantAction.FORGET),
        PROGRESS=(GrantStatus.REVOKING, GrantAction.WRITE_PROGRESS),
        FINAL=(GrantStatus.REVOKING, GrantAction.WRITE_FINAL),
        ABORTED=(GrantStatus.REVOKING, GrantAction.WRITE_ABORTED),
        SAVED=(GrantStatus.REVOKING, GrantAction.SEND_PROGRESS_SAVED),
        ENDED=(GrantStatus.REVOKED, GrantAction.SEND_REVOKED),
        LOST=(GrantStatus.REVOKED, GrantAction.SEND_LOST),
        REVOKE=(GrantStatus.REVOKING, GrantAction.IGNORE),
        REVOKE_FINISHED=(GrantStatus.REVOKING, GrantAction.WRITE_NOT_HELD),
        RESEND=(GrantStatus.REVOKING, GrantAction.SEND_REVOKE),
        DEADLINE=(GrantStatus.REVOKING, GrantAction.WRITE_FORCE_RELEASE),
    ),
    GrantStatus.REVOKED: _make_row(
        PROGRESS=(GrantStatus.REVOKED, GrantAction.SEND_REVOKED),
        FINAL=(GrantStatus.REVOKED, GrantAction.SEND_REVOKED),
        REVOKE_FINISHED=(GrantStatus.ABSENT, GrantAction.FORGET),
        RESEND=(GrantStatus.REVOKED, GrantAction.SEND_REVOKED),
    ),
    GrantStatus.ABSENT: _make_row(
        PROGRESS=(GrantStatus.ABSENT, GrantAction.SEND_LOST),
        FINAL=(GrantStatus.ABSENT, GrantAction.SEND_LOST),
        REVOKE_FINISHED=(GrantStatus.ABSENT, GrantAction.IGNORE),
    ),
}
"""(status, event) -> (next status, action)."""
