"""The outbox relay moves messages published by SQL into the log, on the maintenance leader."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import psycopg

from sublet_leader.jobs.maintenance_thread import MaintenanceJobThread
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.notify.publisher import shared_publisher
from sublet_storage.producer.outbox_mover import OutboxMover, OutboxMoveResult
from sublet_storage.util.retry import Backoff

log = logging.getLogger(__name__)

BUSY_S = 0.02
"""Between two polls after messages were found."""

IDLE_S = 0.2
"""Maximum time between two polls; also between an error and the next try."""

LOCK_TIMEOUT_S = 0.3
STATEMENT_TIMEOUT_S = 10.0
STALLED_S = 2.0
"""Maximum time that a relay that freezes between two statements of a move blocks publishers from its streams."""

MAX_LISTED = 5
"""Maximum number of rejected messages of one move that are logged one by one."""


class OutboxRelay(MaintenanceJobThread):
    """Moves messages while this node leads the maintenance; a stop ends it after the move that is under way."""

    def __init__(
        self,
        url: str,
        term: Callable[[], int | None],
        on_connected: Callable[[str, BoundedConnection], object] = lambda *_: None,
    ) -> None:
        limited = partial(
            connect,
            url,
            lock_timeout_s=LOCK_TIMEOUT_S,
            statement_timeout_s=STATEMENT_TIMEOUT_S,
            idle_in_transaction_timeout_s=STALLED_S,
            transaction_timeout_s=STATEMENT_TIMEOUT_S,
            receive_timeout_s=2 * STATEMENT_TIMEOUT_S,
        )
        super().__init__("sublet relay", limited, term, IDLE_S, on_connected)
        self._url = url

    def _work(self, connection: psycopg.Connection[Any], term: int) -> None:
        """Poll and move messages for as long as this term is in force."""
        outbox = OutboxMover(connection, lambda inside: leadership.check_term(inside, MAINTENANCE, term))
        pauses = Backoff(BUSY_S, IDLE_S)
        while self._term() == term:
            moved = outbox.move()
            shared_publisher(self._url).publish_heads(moved.heads)
            _log_rejected(moved)
            if moved.messages or moved.rejected:
                pauses.reset()
            if self.sleep(0 if moved.has_more else pauses.draw_pause_s()):
                return


def _log_rejected(moved: OutboxMoveResult) -> None:
    for number, (outbox_id, reason) in enumerate(moved.rejected.items()):
        if number == MAX_LISTED:
            text = "more outbox messages rejected: message_count=%d: see `reason` in outbox_rejected"
            log.warning(text, len(moved.rejected) - MAX_LISTED)
            return
        log.warning("message moved to outbox_rejected: outbox_id=%d: %s", outbox_id, reason)
