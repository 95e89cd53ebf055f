"""The thread that carries a node's requests to the database: in order, with renewals at the front."""

from __future__ import annotations

import itertools
import logging
import queue
import random
import threading
from collections.abc import Callable
from typing import assert_never

from leader.node_events import (
    Claimed,
    ClaimLeadership,
    Commit,
    Load,
    Loaded,
    NodeEvent,
    NotWritten,
    Open,
    Opened,
    Released,
    ReleaseLeaderships,
    Renewed,
    RenewLeaderships,
    Request,
    Written,
)
from leader.settings import LeaderSettings
from protocol.errors import LostLeadership, SubletError, UndeclaredQueue
from storage.connect import UnknownOutcome
from storage.groups.model import NodeRef
from storage.groups.store import GroupStore

log = logging.getLogger(__name__)

JITTER_S = 0.3
"""Greatest delay added before a lost election is tried again."""


class DatabaseWorker:
    """`submit` from the node's loop; `answer` is called on the worker's thread with what came of each request."""

    def __init__(
        self, store: GroupStore, ref: NodeRef, settings: LeaderSettings, answer: Callable[[NodeEvent], None]
    ) -> None:
        self._store, self._ref, self._settings, self._answer = store, ref, settings, answer
        self._queue: queue.PriorityQueue[tuple[int, int, Request | None]] = queue.PriorityQueue()
        self._order = itertools.count()
        self._thread = threading.Thread(target=self._work, name="sublet-database", daemon=True)

    def start(self) -> None:
        """Begin to work."""
        self._thread.start()

    def submit(self, request: Request) -> None:
        """Queue a request. A renewal goes before everything that waits: leases must not run out behind a long queue."""
        self._queue.put((0 if isinstance(request, RenewLeaderships) else 1, next(self._order), request))

    def stop(self, timeout_s: float) -> None:
        """Finish what is queued, then end."""
        self._queue.put((2, next(self._order), None))
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while (request := self._queue.get()[2]) is not None:
            try:
                event = self._execute(request)
            except SubletError as error:
                log.warning("%s failed: %s", type(request).__name__, error)
                event = _failed(request, unknown=isinstance(error, UnknownOutcome))
            except Exception:
                log.exception("%s failed", type(request).__name__)
                event = _failed(request, unknown=True)
            self._answer(event)

    def _execute(self, request: Request) -> NodeEvent:
        store, lease_s = self._store, self._settings.lease_s
        match request:
            case Open():
                return self._open(request)
            case ClaimLeadership():
                claim = store.claim(request.leadership_id, self._ref, lease_s)
                return Claimed(request, claim, random.uniform(0, JITTER_S))
            case RenewLeaderships():
                return Renewed(request, store.renew(self._ref, request.terms, lease_s))
            case ReleaseLeaderships():
                return Released(request, store.release(self._ref, request.terms))
            case Load():
                return self._load(request)
            case Commit():
                return Written(request, store.commit(request.batch))
            case _:
                assert_never(request)

    def _open(self, request: Open) -> Opened:
        if request.group_id is not None:
            group = self._store.find_group(request.group_id)
            return Opened(request, group, f"group {request.group_id} is deleted", final=group is None)
        try:
            return Opened(request, self._store.open_group(request.subscription, request.start))
        except UndeclaredQueue as problem:
            return Opened(request, None, str(problem), final=True)

    def _load(self, request: Load) -> Loaded:
        if self._store.find_group(request.group.group_id) is None:
            return Loaded(request, None, deleted=True)
        try:
            return Loaded(request, self._store.load(request.group.group_id, request.term))
        except LostLeadership:
            return Loaded(request, None)


def _failed(request: Request, unknown: bool) -> NodeEvent:
    """What the machine is told where the database did not answer."""
    match request:
        case Open():
            return Opened(request, None, "the database did not answer")
        case ClaimLeadership():
            return Claimed(request, None, random.uniform(0, JITTER_S))
        case RenewLeaderships():
            return Renewed(request, None)
        case ReleaseLeaderships():
            return Released(request, None)
        case Load():
            return Loaded(request, None)
        case Commit():
            return NotWritten(request, unknown)
        case _:
            assert_never(request)
