"""Advances that nobody waits for: each is made once all that was published before it is durable, and publishing goes on
meanwhile. Of several whose time has come, the last is enough."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.epochs import Epoch
from protocol.errors import SubletError
from storage.publish.capability import Capability
from storage.publish.delivery import Ticket

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Queued:
    """`left`: so many of the tickets before it are not settled."""

    least: Sequence[Epoch]
    tickets: Sequence[Ticket]
    left: int

    @property
    def failed(self) -> bool:
        return any(ticket.error is not None for ticket in self.tickets)


class Advances:
    """In the order in which they are queued. Where something published before one has failed, that one and those behind
    it are given up: whoever flushes hears of it. Thread-safe; its thread begins with the first."""

    def __init__(self, capability: Capability) -> None:
        self._capability = capability
        self._queue: deque[_Queued] = deque()
        self._changed = threading.Condition()
        self._making = self._over = False
        self._failure: SubletError | None = None
        self._thread: threading.Thread | None = None

    def queue(self, least: Sequence[Epoch], tickets: Sequence[Ticket]) -> None:
        """Advance once these are settled. Raises why an earlier one came to nothing, if that was not raised yet."""
        self._raise_failure()
        queued = _Queued(least, tickets, len(tickets))
        with self._changed:
            self._queue.append(queued)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="sublet publisher advances", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        for ticket in tickets:
            ticket.when_settled(lambda: self._settled(queued))

    def wait(self, timeout_s: float | None = None) -> None:
        """Until all that are queued are made. Raises `TimeoutError`, or why one came to nothing."""
        with self._changed:
            if not self._changed.wait_for(lambda: not (self._queue or self._making), timeout_s):
                raise TimeoutError("not every epoch was advanced in time; it is still being tried")
        self._raise_failure()

    def close(self) -> None:
        """Make no more; what the publisher held is about to be given back."""
        with self._changed:
            self._over = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _raise_failure(self) -> None:
        with self._changed:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _settled(self, queued: _Queued) -> None:
        with self._changed:
            queued.left -= 1
            self._changed.notify_all()

    def _run(self) -> None:
        while (ready := self._ready()) is not None:
            failure = None
            try:
                self._capability.advance(ready.least)
            except SubletError as error:
                failure = error
            with self._changed:
                self._making = False
                if failure is not None:
                    self._give_up(failure)
                self._changed.notify_all()

    def _ready(self) -> _Queued | None:
        """The last of those whose time has come; None at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._over or (self._queue and not self._queue[0].left))
                if self._over:
                    return None
                if self._queue[0].failed:
                    self._give_up(None)
                    continue
                while len(self._queue) > 1 and not self._queue[1].left and not self._queue[1].failed:
                    self._queue.popleft()
                self._making = True
                return self._queue.popleft()

    def _give_up(self, failure: SubletError | None) -> None:
        self._queue.clear()
        self._failure = failure
        self._capability.forget_promises()
        self._changed.notify_all()
