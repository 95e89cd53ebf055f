"""Statuses of a borrower and of its streams, and which action answers each event in each status.

The table is the protocol: whatever may come in, a leader's words out of turn included, has its pair, and `IGNORE` is an
answer. One that has not begun, or is over, has no row: nothing reaches it. Tests read the table and the documentation
draws it.
"""

from __future__ import annotations

from enum import Enum


class Status(Enum):
    """A borrower's life; it only ever moves down this list."""

    NEW = "new"  # made, nothing sent
    CONNECTING = "connecting"  # looks for its group's leader
    CONNECTED = "connected"  # a leader has answered; streams come and go
    UNSUBSCRIBING = "unsubscribing"  # collects last progress, then hands it over
    DESTROYED = "destroyed"  # answers nothing


class StreamStatus(Enum):
    """A stream's life at a borrower: absent -> granted -> revoking -> absent."""

    GRANTED = "granted"  # lent to us, the session consumes it
    REVOKING = "revoking"  # the leader wants it back, the session finishes its running batch


class Kind(Enum):
    """What an event is to the table."""

    CONNECT_RESPONSE = "leader_connect_response"
    PING_RESPONSE = "ping_response"
    GRANT = "grant"
    REVOKE = "revoke"
    REVOKED = "revoked"
    PROGRESS_SAVED = "progress_saved"
    INVALIDATE = "invalidate"
    NODE_LOST = "node lost"
    PROGRESSED = "progress of the session"
    UNSUBSCRIBE = "unsubscribe"
    TICK = "tick"


class Action(Enum):
    """What the borrower does; the value is the name of its method."""

    IGNORE = "_ignore"
    CONNECT = "_connect"
    CONNECT_AGAIN = "_connect_again"
    HEAR_PING = "_hear_ping"
    ADD_STREAM = "_add_stream"
    STOP_STREAM = "_stop_stream"
    DROP_STREAM = "_drop_stream"
    NOTE_SAVED = "_note_saved"
    END = "_end"
    LOOK_ELSEWHERE = "_look_elsewhere"
    LOSE_LEADER = "_lose_leader"
    NOTE_PROGRESS = "_note_progress"
    REPORT_PROGRESS = "_report_progress"
    COLLECT_FINAL = "_collect_final"
    LEAVE_UNCONNECTED = "_leave_unconnected"
    LEAVE = "_leave"
    ASK_AGAIN = "_ask_again"
    KEEP_IN_TOUCH = "_keep_in_touch"
    SAY_FAREWELL = "_say_farewell"


def _row(**actions: Action) -> dict[Kind, Action]:
    """A full row: what is not named is ignored."""
    return {kind: actions.get(kind.name, Action.IGNORE) for kind in Kind}


TABLE: dict[Status, dict[Kind, Action]] = {
    Status.CONNECTING: _row(
        CONNECT_RESPONSE=Action.CONNECT,
        INVALIDATE=Action.END,
        NODE_LOST=Action.LOOK_ELSEWHERE,
        PROGRESSED=Action.NOTE_PROGRESS,
        UNSUBSCRIBE=Action.LEAVE_UNCONNECTED,
        TICK=Action.ASK_AGAIN,
    ),
    Status.CONNECTED: _row(
        CONNECT_RESPONSE=Action.CONNECT_AGAIN,
        PING_RESPONSE=Action.HEAR_PING,
        GRANT=Action.ADD_STREAM,
        REVOKE=Action.STOP_STREAM,
        REVOKED=Action.DROP_STREAM,
        PROGRESS_SAVED=Action.NOTE_SAVED,
        INVALIDATE=Action.END,
        NODE_LOST=Action.LOSE_LEADER,
        PROGRESSED=Action.REPORT_PROGRESS,
        UNSUBSCRIBE=Action.LEAVE,
        TICK=Action.KEEP_IN_TOUCH,
    ),
    Status.UNSUBSCRIBING: _row(
        PING_RESPONSE=Action.HEAR_PING,
        PROGRESS_SAVED=Action.NOTE_SAVED,
        INVALIDATE=Action.END,
        NODE_LOST=Action.LOSE_LEADER,
        PROGRESSED=Action.COLLECT_FINAL,
        TICK=Action.SAY_FAREWELL,
    ),
}

MOVES: dict[Status, frozenset[Status]] = {
    Status.NEW: frozenset({Status.CONNECTING}),
    Status.CONNECTING: frozenset({Status.CONNECTED, Status.UNSUBSCRIBING, Status.DESTROYED}),
    Status.CONNECTED: frozenset({Status.UNSUBSCRIBING, Status.DESTROYED}),
    Status.UNSUBSCRIBING: frozenset({Status.DESTROYED}),
    Status.DESTROYED: frozenset(),
}
"""Where a status may go; never back."""
