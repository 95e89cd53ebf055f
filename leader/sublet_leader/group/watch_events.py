"""Events of a group, for its history and for watchers.

Most are history records as a commit has written them. Joins and leaves of members, and leader changes, are only in a
leader's memory: those records are in no table, and have the time of the node's clock when they are sent.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct

from sublet_storage.groups.model.records import HistoryRecord
from sublet_storage.groups.status.json_views import history_to_json

JOIN, LEAVE, EVICT, FENCE = "join", "leave", "evict", "fence"
"""Events of members."""
STEP_DOWN = "step_down"
"""A leader is over; the next one begins with a takeover."""
GONE = "evicted: its process has ended"
"""Why a holder whose lock is free loses its streams."""


def transient_record(
    group_id: int,
    term: int,
    event: str,
    reason: str,
    borrower_id: str | None = None,
    agent: str | None = None,
    session: str | None = None,
) -> HistoryRecord:
    """Return a record that is in no table, and so has no time."""
    return HistoryRecord(
        0,
        group_id,
        0,
        event,
        reason,
        0,
        borrower_id,
        agent,
        0,
        term,
        is_forced=False,
        redelivery_end=None,
        session=session,
    )


class GroupWatchEvent(Struct, frozen=True):
    """An event of the group of that subscription that has happened."""

    subscription: str
    record: HistoryRecord

    def to_json(self) -> dict[str, Any]:
        """Return the fields that apply to the event, without its time (docs/groups.md)."""
        group_fields = {"group_id": self.record.group_id, "subscription": self.subscription, "at": None}
        fields = history_to_json(self.record) | group_fields
        return {name: value for name, value in fields.items() if value is not None}
