"""Logs the events of groups: a sentence each, with ids as fields for log collectors.

They are many, so they are off by default: the logger is set to INFO by `sublet leader --log-format json`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sublet_leader.group.watch_events import GroupWatchEvent

LOGGER = "sublet.events"
log = logging.getLogger(LOGGER)


def log_history(events: Iterable[GroupWatchEvent]) -> None:
    """Write a record each, if they are enabled."""
    if not log.isEnabledFor(logging.INFO):
        return
    for each in events:
        log.info("%s: %s", each.record.event, each.record.reason, extra={"fields": log_fields(each)})


def log_fields(event: GroupWatchEvent) -> dict[str, object]:
    """Return the ids of the event, without those that do not apply."""
    line = event.record
    reported: dict[str, object] = {
        "event": line.event,
        "subscription": event.subscription,
        "group_id": line.group_id,
        "term": line.term,
        "stream_id": line.stream_id or None,
        "grant_id": line.grant_id or None,
        "position": line.position if line.stream_id else None,
        "redelivery_end": line.redelivery_end,
        "borrower_id": line.borrower_id,
        "agent": line.agent,
        "session": line.session,
    }
    return {name: value for name, value in reported.items() if value is not None}
