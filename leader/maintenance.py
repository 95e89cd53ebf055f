"""Housekeeping of the whole database by whichever node leads the reserved leadership row, under its term."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import psycopg

from protocol.errors import LostLeadership, SubletError
from storage import compaction, retention, spaces
from storage.connect import connect
from storage.groups import leadership
from storage.groups.model import MAINTENANCE

log = logging.getLogger(__name__)

EVERY_S = 5.0
"""Between two passes."""


class Housekeeper:
    """A thread. `term` answers under which term this node leads the maintenance at this moment, None if it does not."""

    def __init__(self, url: str, term: Callable[[], int | None], every_s: float = EVERY_S) -> None:
        self._url, self._term, self._every_s = url, term, every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="sublet-maintenance", daemon=True)

    def start(self) -> None:
        """Begin to look after the database."""
        self._thread.start()

    def stop(self) -> None:
        """End after the step that is under way."""
        self._stop.set()

    def _keep(self) -> None:
        while not self._stop.wait(self._every_s):
            term = self._term()
            if term is None:
                continue
            try:
                with connect(self._url, application_name="sublet maintenance", lock_timeout_s=2.0) as connection:
                    self._keep_house(connection, term)
            except LostLeadership as over:
                log.info("maintenance goes on at another node: %s", over)
            except (SubletError, psycopg.Error) as error:
                log.warning("a maintenance pass was cut short, the next goes on: %s", error)

    def _keep_house(self, connection: psycopg.Connection[Any], term: int) -> None:
        def guard(inside: psycopg.Connection[Any]) -> None:
            leadership.guard(inside, MAINTENANCE, term)

        for name in spaces.rollover_due(connection, guard):
            log.info("space %s has rolled over", name)
        if dropped := retention.retain(connection, guard):
            log.info("generations %s are past their retention", dropped)
        for stream_id in compaction.fragmented_streams(connection):
            if self._stop.is_set():
                return
            saved = compaction.compact_stream(connection, stream_id, guard=guard)
            log.info("stream %d: compaction saved %d blocks", stream_id, saved)
        retention.forget_producers(connection, guard=guard)
