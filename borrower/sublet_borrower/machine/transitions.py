"""Statuses of a borrower and its streams, and the action for each event in each.

The table is the protocol: every event, also a leader's message out of turn, has its pair, and `IGNORE` is an answer. A
borrower that has not begun, or is over, has no row: nothing reaches it. Tests read the table and the documentation
draws it.
"""

from __future__ import annotations

from enum import Enum


class BorrowerStatus(Enum):
    """The status of a borrower, which only ever moves down this list."""

    NEW = "new"  # made, nothing sent
    CONNECTING = "connecting"  # looks for its group's leader
    CONNECTED = "connected"  # a leader has answered; streams come and go
    UNSUBSCRIBING = "unsubscribing"  # collects last progress, then hands it over
    DESTROYED = "destroyed"  # answers nothing


class BorrowedStreamStatus(Enum):
    """The status of a stream at a borrower: absent -> granted -> revoking -> absent."""

    GRANTED = "granted"  # granted to us, the session consumes it
    REVOKING = "revoking"  # the leader wants it back, the session finishes its running batch


class BorrowerEventKind(Enum):
    """The kinds of events in the table."""

    CONNECT_RESPONSE = "leader_connect_response"
    PING_RESPONSE = "ping_response"
    GRANT = "grant"
    REVOKE = "revoke"
    REVOKED = "revoked"
    PROGRESS_SAVED = "progress_saved"
    INVALIDATE = "invalidate"
    NODE_LOST = "node lost"
    SESSION_PROGRESS = "progress of the session"
    UNSUBSCRIBE = "unsubscribe"
    TICK = "tick"


class BorrowerAction(Enum):
    """The actions of the borrower; the value is the name of its method."""

    IGNORE = "_ignore"
    CONNECT = "_connect"
    CONFIRM_CONNECTED = "_confirm_connected"
    ACCEPT_PING_RESPONSE = "_accept_ping_response"
    ADD_STREAM = "_add_stream"
    STOP_STREAM = "_stop_stream"
    DROP_STREAM = "_drop_stream"
    MARK_SAVED = "_mark_saved"
    END = "_end"
    TRY_OTHER_NODE = "_try_other_node"
    LOSE_LEADER = "_lose_leader"
    RECORD_PROGRESS = "_record_progress"
    REPORT_PROGRESS = "_report_progress"
    COLLECT_FINAL = "_collect_final"
    LEAVE_UNCONNECTED = "_leave_unconnected"
    LEAVE = "_leave"
    RETRY_LEADER_WANTED = "_retry_leader_wanted"
    PING_AND_RESEND = "_ping_and_resend"
    SEND_DISCONNECT = "_send_disconnect"


def _row(**actions: BorrowerAction) -> dict[BorrowerEventKind, BorrowerAction]:
    """Return a full row: what is not named is ignored."""
    return {kind: actions.get(kind.name, BorrowerAction.IGNORE) for kind in BorrowerEventKind}


ACTIONS: dict[BorrowerStatus, dict[BorrowerEventKind, BorrowerAction]] = {
    BorrowerStatus.CONNECTING: _row(
        CONNECT_RESPONSE=BorrowerAction.CONNECT,
        INVALIDATE=BorrowerAction.END,
        NODE_LOST=BorrowerAction.TRY_OTHER_NODE,
        SESSION_PROGRESS=BorrowerAction.RECORD_PROGRESS,
        UNSUBSCRIBE=BorrowerAction.LEAVE_UNCONNECTED,
        TICK=BorrowerAction.RETRY_LEADER_WANTED,
    ),
    BorrowerStatus.CONNECTED: _row(
        CONNECT_RESPONSE=BorrowerAction.CONFIRM_CONNECTED,
        PING_RESPONSE=BorrowerAction.ACCEPT_PING_RESPONSE,
        GRANT=BorrowerAction.ADD_STREAM,
        REVOKE=BorrowerAction.STOP_STREAM,
        REVOKED=BorrowerAction.DROP_STREAM,
        PROGRESS_SAVED=BorrowerAction.MARK_SAVED,
        INVALIDATE=BorrowerAction.END,
        NODE_LOST=BorrowerAction.LOSE_LEADER,
        SESSION_PROGRESS=BorrowerAction.REPORT_PROGRESS,
        UNSUBSCRIBE=BorrowerAction.LEAVE,
        TICK=BorrowerAction.PING_AND_RESEND,
    ),
    BorrowerStatus.UNSUBSCRIBING: _row(
        PING_RESPONSE=BorrowerAction.ACCEPT_PING_RESPONSE,
        PROGRESS_SAVED=BorrowerAction.MARK_SAVED,
        INVALIDATE=BorrowerAction.END,
        NODE_LOST=BorrowerAction.LOSE_LEADER,
        SESSION_PROGRESS=BorrowerAction.COLLECT_FINAL,
        TICK=BorrowerAction.SEND_DISCONNECT,
    ),
}

ALLOWED_TRANSITIONS: dict[BorrowerStatus, frozenset[BorrowerStatus]] = {
    BorrowerStatus.NEW: frozenset({BorrowerStatus.CONNECTING}),
    BorrowerStatus.CONNECTING: frozenset(
        {BorrowerStatus.CONNECTED, BorrowerStatus.UNSUBSCRIBING, BorrowerStatus.DESTROYED}
    ),
    BorrowerStatus.CONNECTED: frozenset({BorrowerStatus.UNSUBSCRIBING, BorrowerStatus.DESTROYED}),
    BorrowerStatus.UNSUBSCRIBING: frozenset({BorrowerStatus.DESTROYED}),
    BorrowerStatus.DESTROYED: frozenset(),
}
"""Where a status may go; never back."""
