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
    for event in events:
        log.info("%s: %s", event.record.event, event.record.reason, extra={"fields": event.to_json()})
