"""A thread that works on the database while its node leads the maintenance."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import psycopg

from sublet_protocol.domain.errors import StaleTerm, SubletError, format_error
from sublet_storage.db.bounded_connection import BoundedConnection
from sublet_storage.util.log_throttle import error_signature, format_suppressed_count
from sublet_storage.util.stoppable_thread import StoppableThread

log = logging.getLogger(__name__)


class MaintenanceJobThread(StoppableThread):
    """A thread that connects and calls `_work` every `every_s`, also after an error. `term` returns the term under
    which this node leads the maintenance at this moment, None if it does not. `on_connected` is called with the name
    and the connection, each time that it connects."""

    def __init__(
        self,
        name: str,
        connect: Callable[..., BoundedConnection],
        term: Callable[[], int | None],
        every_s: float,
        on_connected: Callable[[str, BoundedConnection], object],
    ) -> None:
        super().__init__(name.replace(" ", "-"))
        self._job, self._connect, self._term, self._every_s = name, connect, term, every_s
        self._on_connected = on_connected

    def run(self) -> None:
        """Work while this node leads the maintenance; a stop ends it after the step that is under way."""
        while not self.sleep(self._every_s):
            if (term := self._term()) is None:
                continue
            try:
                with self._connect(application_name=self._job) as connection:
                    self._on_connected(self._job, connection)
                    self._work(connection, term)
            except StaleTerm as over:
                log.info("maintenance leadership lost: job=%s: %s", self._job, over)
            except Exception as error:  # noqa: BLE001 any error: this thread must continue
                self._warn(error)

    def _work(self, connection: psycopg.Connection[Any], term: int) -> None:
        """Do what is to be done under this term. Raise `StaleTerm` once it is over."""
        raise NotImplementedError

    def _warn(self, error: Exception) -> None:
        """Log the error; an unforeseen one with its traceback."""
        if (suppressed := self._log_throttle.acquire(self._job, error_signature(error))) is not None:
            log.warning(
                "maintenance job failed, retrying: job=%s: %s%s",
                self._job,
                format_error(error),
                format_suppressed_count(suppressed),
                exc_info=None if isinstance(error, SubletError | psycopg.Error) else error,
            )
