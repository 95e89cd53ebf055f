"""The lags of groups over the last minutes, in memory, for the page's curves.

One statement samples all groups, less often the longer it takes. A sample is a flat array, with a column per group.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import deque
from collections.abc import Iterable

import psycopg

from sublet_leader.observe.http_database_pool import HttpDatabasePool
from sublet_protocol.domain.errors import SubletError
from sublet_storage.groups.status.lag_queries import read_total_lags
from sublet_storage.util.stoppable_thread import StoppableThread

log = logging.getLogger(__name__)

SAMPLE_INTERVAL_S = 10.0
MAX_OF_TIME = 0.02
"""Maximum fraction of the time for which sampling keeps one connection busy."""
_UNKNOWN = -1
_Sample = tuple[int, float, "array[int]"]
"""Its number, its time, and a lag in each column."""


class LagHistory(StoppableThread):
    """Samples on a thread of its own from `start` to `stop`; read on any thread."""

    def __init__(self, pool: HttpDatabasePool, minutes: int, max_groups: int) -> None:
        super().__init__("sublet-lag-history")
        self._pool, self._max_groups = pool, max_groups
        self._samples: deque[_Sample] = deque(maxlen=max(int(minutes * 60 / SAMPLE_INTERVAL_S), 1))
        self._columns: dict[int, tuple[int, int]] = {}
        self._count = 0
        self._is_enabled = minutes > 0 and max_groups > 0

    def read(self, group_ids: Iterable[int]) -> tuple[list[float], dict[int, list[int | None]]]:
        """Return when samples were taken, in seconds since 1970, and {group: its lag then, None if unknown}."""
        samples = tuple(self._samples)
        return [round(at, 1) for _, at, _ in samples], {each: self._compute_series(each, samples) for each in group_ids}

    def _compute_series(self, group_id: int, samples: tuple[_Sample, ...]) -> list[int | None]:
        column, since = self._columns.get(group_id, (0, self._count + 1))
        series = [lags[column] if number >= since else _UNKNOWN for number, _, lags in samples]
        return [None if lag == _UNKNOWN else lag for lag in series]

    def add_sample(self, at: float, lags: dict[int, int | None]) -> None:
        """Add one sample. Groups that are gone free their columns, which are others' from this sample on."""
        self._count += 1
        for group_id in self._columns.keys() - lags.keys():
            del self._columns[group_id]
        taken = {column for column, _ in self._columns.values()}
        free = (column for column in range(self._max_groups) if column not in taken)
        for group_id in lags:
            if group_id not in self._columns and len(self._columns) < self._max_groups:
                self._columns[group_id] = next(free), self._count
        row = array("q", [_UNKNOWN]) * (1 + max((column for column, _ in self._columns.values()), default=-1))
        for group_id, lag in lags.items():
            if lag is not None and group_id in self._columns:
                row[self._columns[group_id][0]] = lag
        self._samples.append((self._count, at, row))

    def run(self) -> None:
        """Sample, if samples are to be kept."""
        wait_s = 0.5
        while self._is_enabled and not self.sleep(wait_s):
            began = time.monotonic()
            try:
                with self._pool.connection() as connection:
                    lags = read_total_lags(connection)
                self.add_sample(time.time(), lags)
            except (SubletError, psycopg.Error) as error:
                log.debug("group lag not sampled: %s", error)
            wait_s = max(SAMPLE_INTERVAL_S, (time.monotonic() - began) / MAX_OF_TIME)
