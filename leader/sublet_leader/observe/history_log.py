"""What happens to groups as records of a log: a sentence, and its ids as fields for whoever collects logs.

They are many, so nobody gets them unasked: the logger is set to INFO by `sublet leader --log-format json`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from sublet_leader.group.history import Happened

LOGGER = "sublet.events"
log = logging.getLogger(LOGGER)


def write(happened: Iterable[Happened]) -> None:
    """A record each, if anybody wants them."""
    if not log.isEnabledFor(logging.INFO):
        return
    for each in happened:
        log.info("%s: %s", each.line.event, each.line.reason, extra={"fields": fields(each)})


def fields(happened: Happened) -> dict[str, object]:
    """The ids of what happened, without those that do not apply."""
    line = happened.line
    told: dict[str, object] = {
        "event": line.event,
        "group": happened.subscription,
        "group_id": line.group_id,
        "term": line.term,
        "stream": line.stream_id or None,
        "grant": line.grant_id or None,
        "position": line.position if line.stream_id else None,
        "until": line.until,
        "member": line.borrower_id,
        "agent": line.agent,
        "session": line.session,
    }
    return {name: value for name, value in told.items() if value is not None}
