"""The outbox relay moves messages published by SQL into the log, on the maintenance leader."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psycopg

from sublet_protocol.domain.errors import StaleTerm, SubletError, format_error
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.notify.publisher import shared_publisher
from sublet_storage.producer.outbox_mover import OutboxMover, OutboxMoveResult
from sublet_storage.util.log_throttle import format_suppressed_count
from sublet_storage.util.retry import Backoff
from sublet_storage.util.stoppable_thread import StoppableThread

log = logging.getLogger(__name__)

APPLICATION = "sublet relay"

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


class OutboxRelay(StoppableThread):
    """The thread that moves the messages.

    `term` returns the term under which this node leads the maintenance at this moment, None if it does not.
    `on_connected` is called with the name and the connection, each time that it connects.
    """

    def __init__(
        self,
        url: str,
        term: Callable[[], int | None],
        on_connected: Callable[[str, BoundedConnection], object] = lambda *_: None,
    ) -> None:
        super().__init__("sublet-relay")
        self._url, self._term, self._on_connected = url, term, on_connected

    def run(self) -> None:
        """Move messages while this node leads the maintenance; a stop ends it after the move that is under way."""
        while not self.sleep(IDLE_S):
            term = self._term()
            if term is None:
                continue
            try:
                with _connect(self._url) as connection:
                    self._on_connected(APPLICATION, connection)
                    self._relay(connection, term)
            except StaleTerm as over:
                log.info("maintenance leadership lost, outbox relay stopped: %s", over)
            except Exception as error:  # noqa: BLE001 any error: this thread must continue
                self._notify(error)

    def _relay(self, connection: psycopg.Connection[Any], term: int) -> None:
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

    def _notify(self, error: Exception) -> None:
        """Log the error; an unforeseen one with its traceback."""
        if (suppressed_count := self._quiet.acquire(type(error).__name__)) is not None:
            exc_info = None if isinstance(error, SubletError | psycopg.Error) else error
            text, detail = "outbox relay failed, retrying: %s%s", format_error(error)
            log.warning(text, detail, format_suppressed_count(suppressed_count), exc_info=exc_info)


def _connect(url: str) -> BoundedConnection:
    return connect(
        url,
        application_name=APPLICATION,
        lock_timeout_s=LOCK_TIMEOUT_S,
        statement_timeout_s=STATEMENT_TIMEOUT_S,
        idle_in_transaction_timeout_s=STALLED_S,
        transaction_timeout_s=STATEMENT_TIMEOUT_S,
        silence_s=2 * STATEMENT_TIMEOUT_S,
    )


def _log_rejected(moved: OutboxMoveResult) -> None:
    for number, (outbox_id, reason) in enumerate(moved.rejected.items()):
        if number == MAX_LISTED:
            text = "more outbox messages rejected: message_count=%d: see `reason` in outbox_rejected"
            log.warning(text, len(moved.rejected) - MAX_LISTED)
            return
        log.warning("message moved to outbox_rejected: outbox_id=%d: %s", outbox_id, reason)
