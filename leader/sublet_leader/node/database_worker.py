"""The thread that executes a node's database requests: renewals first, then what groups led here need, in order."""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from sublet_leader.node.database_request_executor import execute, failure_answer
from sublet_leader.node.events import (
    DatabaseRequest,
    FindOrCreateGroup,
    LookUpLeader,
    NodeEvent,
    ReadSessionEpoch,
    RenewLeaderships,
)
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.errors import SubletError, UnknownOutcome
from sublet_storage.groups.coordinator.store import GroupStore
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.util.log_throttle import LogThrottle, format_suppressed_count

log = logging.getLogger(__name__)

JITTER_S = 0.3
"""Maximum delay in seconds added before a lost election is tried again."""

_STOP = 3


class DatabaseRequestObserver(Protocol):
    """Observes requests: called on the worker's thread with each request, its result, and the seconds it took."""

    def on_request(self, request: DatabaseRequest) -> None:
        """Record that a request is sent."""

    def on_answer(self, request: DatabaseRequest, answer: NodeEvent, problem: Exception | None, took_s: float) -> None:
        """Record the answer of a request, or its failure."""


class DatabaseWorker:
    """A thread with a queue. `submit` is called from the node's loop; `answer` is called on the worker's thread with
    the answer to each request, and `on_failure` with the error that ended it early."""

    def __init__(
        self,
        store: GroupStore,
        ref: NodeIncarnation,
        settings: LeaderSettings,
        answer: Callable[[NodeEvent], None],
        observers: Sequence[DatabaseRequestObserver] = (),
        on_failure: Callable[[Exception], None] = lambda error: None,
    ) -> None:
        self._store, self._ref, self._settings, self._answer = store, ref, settings, answer
        self._observers, self._on_failure = observers, on_failure
        self._queue: queue.PriorityQueue[tuple[int, int, DatabaseRequest | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._log_throttle = LogThrottle()
        self._thread = threading.Thread(target=self._work, name="sublet-database", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, request: DatabaseRequest) -> None:
        """Queue a request. Renewals come first, so that leases do not run out behind a long queue, then what led groups
        need, then what callers need to join, then who leads."""
        self._queue.put((_choose_priority(request), next(self._order), request))

    def stop(self, timeout_s: float) -> None:
        """Finish the queued requests, then end."""
        self._queue.put((_STOP, next(self._order), None))
        self._thread.join(timeout_s)

    def _work(self) -> None:
        try:
            while (request := self._queue.get()[2]) is not None:
                self._answer(self._execute_observed(request))
        except Exception as error:  # noqa: BLE001 a node whose worker is gone is none
            self._on_failure(error)

    def _execute_observed(self, request: DatabaseRequest) -> NodeEvent:
        for observer in self._observers:
            observer.on_request(request)
        began = time.monotonic()
        answer, problem = self._execute(request)
        took_s = time.monotonic() - began
        for observer in self._observers:
            observer.on_answer(request, answer, problem, took_s)
        return answer

    def _execute(self, request: DatabaseRequest) -> tuple[NodeEvent, Exception | None]:
        jitter_s = random.uniform(0, JITTER_S)
        try:
            return execute(request, self._store, self._ref, self._settings.lease_duration_s, jitter_s), None
        except SubletError as error:
            self._report_failure(request, error)
            return failure_answer(request, unknown=isinstance(error, UnknownOutcome), jitter_s=jitter_s), error
        except Exception as error:  # noqa: BLE001 any error: this thread must continue
            self._report_failure(request, error, logging.ERROR)
            return failure_answer(request, unknown=True, jitter_s=jitter_s), error

    def _report_failure(self, request: DatabaseRequest, error: Exception, level: int = logging.WARNING) -> None:
        """Log each kind of failure of each kind of request once in a while: a database that is unavailable fails them
        all."""
        if (suppressed_count := self._log_throttle.acquire((type(request), type(error)))) is not None:
            text, name = "database request failed: request=%s: %s%s", type(request).__name__
            exc_info = error if level > logging.WARNING else None
            log.log(level, text, name, error, format_suppressed_count(suppressed_count), exc_info=exc_info)


def _choose_priority(request: DatabaseRequest) -> int:
    match request:
        case RenewLeaderships():
            return 0
        case ReadSessionEpoch() | FindOrCreateGroup():
            return 2
        case LookUpLeader():
            return 3
        case _:
            return 1
