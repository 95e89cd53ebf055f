"""The queue from an agent's thread to the thread of a session."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.machine.events import AssignmentUpdate, SavedProgress
from sublet_borrower.new_data.head_poll_scheduler import HeadPushed
from sublet_borrower.util.interrupted_lock_release import release_fully

MIN_LISTEN_S = 0.002
"""For a shorter time the reader only waits: who listens waits for whole milliseconds."""

SessionEvent = AssignmentUpdate | SubscriptionClosed | HeadPushed


class EventListener(Protocol):
    """What a reader may listen to while it waits; see `PostgresHeadListener`, which puts what it receives here."""

    def wait(self, timeout_s: float) -> bool: ...

    def end_wait(self) -> None: ...

    def release_fully(self) -> None: ...


class SessionEventQueue:
    """A queue whose reader can wait, and can be woken without an event. While it waits it listens to the `listener`.

    Of the heads pushed for one stream it holds the highest, so that it stays small however long its reader is busy.
    Where there is `on_update`, updates of the assignment do not wait for the reader: it is called with them, on the
    agent's thread."""

    def __init__(self, on_update: Callable[[AssignmentUpdate], None] | None = None) -> None:
        self._on_update = on_update
        self._queued: deque[AssignmentUpdate | SubscriptionClosed] = deque()
        self.end: SubscriptionClosed | None = None
        """The last event of the newest subscription that has ended; also after an exception out of the `take` that
        returned it. Those before it may end later."""
        self._pushed: dict[int, HeadPushed] = {}
        self._condition = threading.Condition()
        self._is_woken = self._is_listening = False
        self.listener: EventListener | None = None

    def put(self, event: SessionEvent) -> None:
        """Add the event, or call `on_update` with it."""
        if self._on_update is not None and not isinstance(event, HeadPushed | SubscriptionClosed):
            self._on_update(event)
            if not isinstance(event, SavedProgress):
                self.wakeup()
            return
        with self._condition:
            if isinstance(event, HeadPushed):
                last_push = self._pushed.get(event.subscription.stream_id)
                if last_push is None or last_push.subscription != event.subscription or last_push.head < event.head:
                    self._pushed[event.subscription.stream_id] = event
            else:
                if isinstance(event, SubscriptionClosed) and (self.end is None or event.handle >= self.end.handle):
                    self.end = event
                self._queued.append(event)
            self._notify()

    def wakeup(self) -> None:
        """End the reader's wait; also from a signal handler's thread."""
        with self._condition:
            self._is_woken = True
            self._notify()

    def release_fully(self) -> None:
        """Release the locks after an exception out of `take` on this thread."""
        release_fully(self._condition.release)
        if self.listener is not None:
            self.listener.release_fully()

    def take(self, wait_s: float = 0.0) -> tuple[SessionEvent, ...]:
        """Return all events so far; where there are none, wait for one, for at most `wait_s`."""
        deadline = time.monotonic() + wait_s
        if wait_s > 0 and self.listener is not None:
            self._listen(self.listener, deadline)
        with self._condition:
            if not self._has_events() and (left_s := deadline - time.monotonic()) > 0:
                self._condition.wait(left_s)
            self._is_woken = False
            events = (*self._queued, *self._pushed.values())
            self._queued.clear()
            self._pushed.clear()
            return events

    def _listen(self, listener: EventListener, deadline: float) -> None:
        """Listen until there is an event, or the time is over, or as long as this thread may."""
        with self._condition:
            if self._is_listening:
                return
            self._is_listening = True
        try:
            while not self._has_events() and (left_s := deadline - time.monotonic()) > MIN_LISTEN_S:
                if not listener.wait(left_s):
                    return
        finally:
            self._is_listening = False

    def _has_events(self) -> bool:
        return bool(self._queued or self._pushed or self._is_woken)

    def _notify(self) -> None:
        self._condition.notify_all()
        if self._is_listening and self.listener is not None:
            self.listener.end_wait()
