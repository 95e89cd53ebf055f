"""The life of an assignment (stream, borrower, grant id), as the leader sees it.

    absent -> granting -> granted -> revoking -> revoked -> absent

`granting` begins when the grant is decided; it is sent to the borrower when the row is written. `revoked` outlives the
grant, and its loss: the row is free again and may be granted under the next grant id while `revoked` is still sent to
the last borrower, until it confirms.

The table has what may happen, with every message that a borrower may send. A pair that is missing is one that only the
leader itself could cause: it would be a broken invariant, and raises.
"""

from __future__ import annotations

from enum import Enum


class AssignmentStatus(Enum):
    """What is true of an assignment."""

    GRANTING = "granting"  # being written, or written and the borrower has not answered yet
    GRANTED = "granted"  # the borrower has reported progress under this grant
    REVOKING = "revoking"  # the borrower was asked to stop and has not sent final progress
    REVOKED = "revoked"  # final progress is durable, the grant is over, the borrower was asked to forget it
    ABSENT = "absent"  # there is no assignment


class EventKind(Enum):
    """What can happen to an assignment."""

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


class Action(Enum):
    """What the leader does; the value is the name of its method."""

    IGNORE = "_ignore"
    SEND_GRANT = "_send_grant"
    SEND_REVOKE = "_send_revoke"
    SEND_REVOKED = "_send_revoked"
    SEND_LOST = "_send_lost"
    SEND_PROGRESS_SAVED = "_send_progress_saved"
    FORGET = "_forget"
    WRITE_PROGRESS = "_write_progress"
    WRITE_FINAL = "_write_final"
    WRITE_NOT_HELD = "_write_not_held"
    WRITE_ABORTED = "_write_aborted"
    WRITE_FORCE_RELEASE = "_write_force_release"


Transition = tuple[AssignmentStatus, Action]


def _row(**steps: Transition) -> dict[EventKind, Transition]:
    """Return what may happen in one status."""
    return {EventKind[name]: step for name, step in steps.items()}


TRANSITIONS: dict[AssignmentStatus, dict[EventKind, Transition]] = {
    AssignmentStatus.GRANTING: _row(
        GRANT_WRITTEN=(AssignmentStatus.GRANTING, Action.SEND_GRANT),
        GRANT_REFUSED=(AssignmentStatus.ABSENT, Action.FORGET),
        PROGRESS=(AssignmentStatus.GRANTED, Action.WRITE_PROGRESS),
        FINAL=(AssignmentStatus.REVOKING, Action.WRITE_FINAL),
        ABORTED=(AssignmentStatus.REVOKING, Action.WRITE_ABORTED),
        SAVED=(AssignmentStatus.GRANTING, Action.IGNORE),
        ENDED=(AssignmentStatus.REVOKED, Action.SEND_REVOKED),
        LOST=(AssignmentStatus.REVOKED, Action.SEND_LOST),
        REVOKE=(AssignmentStatus.REVOKING, Action.SEND_REVOKE),
        REVOKE_FINISHED=(AssignmentStatus.REVOKING, Action.WRITE_NOT_HELD),
        RESEND=(AssignmentStatus.GRANTING, Action.SEND_GRANT),
    ),
    AssignmentStatus.GRANTED: _row(
        GRANT_WRITTEN=(
            AssignmentStatus.GRANTED,
            Action.IGNORE,
        ),  # a reclaimed grant, used before the row has its holder
        PROGRESS=(AssignmentStatus.GRANTED, Action.WRITE_PROGRESS),
        FINAL=(AssignmentStatus.REVOKING, Action.WRITE_FINAL),
        ABORTED=(AssignmentStatus.REVOKING, Action.WRITE_ABORTED),
        SAVED=(AssignmentStatus.GRANTED, Action.SEND_PROGRESS_SAVED),
        ENDED=(AssignmentStatus.REVOKED, Action.SEND_REVOKED),
        LOST=(AssignmentStatus.REVOKED, Action.SEND_LOST),
        REVOKE=(AssignmentStatus.REVOKING, Action.SEND_REVOKE),
        REVOKE_FINISHED=(AssignmentStatus.REVOKING, Action.WRITE_NOT_HELD),
    ),
    AssignmentStatus.REVOKING: _row(
        GRANT_WRITTEN=(AssignmentStatus.REVOKING, Action.SEND_REVOKE),
        GRANT_REFUSED=(AssignmentStatus.ABSENT, Action.FORGET),
        PROGRESS=(AssignmentStatus.REVOKING, Action.WRITE_PROGRESS),
        FINAL=(AssignmentStatus.REVOKING, Action.WRITE_FINAL),
        ABORTED=(AssignmentStatus.REVOKING, Action.WRITE_ABORTED),
        SAVED=(AssignmentStatus.REVOKING, Action.SEND_PROGRESS_SAVED),
        ENDED=(AssignmentStatus.REVOKED, Action.SEND_REVOKED),
        LOST=(AssignmentStatus.REVOKED, Action.SEND_LOST),
        REVOKE=(AssignmentStatus.REVOKING, Action.IGNORE),
        REVOKE_FINISHED=(AssignmentStatus.REVOKING, Action.WRITE_NOT_HELD),
        RESEND=(AssignmentStatus.REVOKING, Action.SEND_REVOKE),
        DEADLINE=(AssignmentStatus.REVOKING, Action.WRITE_FORCE_RELEASE),
    ),
    AssignmentStatus.REVOKED: _row(
        PROGRESS=(AssignmentStatus.REVOKED, Action.SEND_REVOKED),
        FINAL=(AssignmentStatus.REVOKED, Action.SEND_REVOKED),
        REVOKE_FINISHED=(AssignmentStatus.ABSENT, Action.FORGET),
        RESEND=(AssignmentStatus.REVOKED, Action.SEND_REVOKED),
    ),
    AssignmentStatus.ABSENT: _row(
        PROGRESS=(AssignmentStatus.ABSENT, Action.SEND_LOST),
        FINAL=(AssignmentStatus.ABSENT, Action.SEND_LOST),
        REVOKE_FINISHED=(AssignmentStatus.ABSENT, Action.IGNORE),
    ),
}
"""(status, event) -> (next status, action)."""
