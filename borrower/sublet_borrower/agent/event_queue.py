"""A queue of events from the agent's thread to a session's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.machine.events import AssignmentUpdate, SavedProgress
from sublet_borrower.new_data.head_tracker import HeadPushed
from sublet_borrower.util.locks import let_go

SessionEvent = AssignmentUpdate | SubscriptionClosed | HeadPushed


class EventQueue:
    """A queue whose reader can wait, and can be woken without an event.

    Of several pushed heads of one stream it stores the farthest, so that it stays small however long its reader is
    busy. Changes of the assignment do not wait for the reader where `on_update` is given: it is called on the agent's
    thread.
    """

    def __init__(self, on_update: Callable[[AssignmentUpdate], None] | None = None) -> None:
        self._receive = on_update
        self._news: deque[AssignmentUpdate | SubscriptionClosed] = deque()
        self.end: SubscriptionClosed | None = None
        """The last event, once it has come; also for a reader whose taking of it was interrupted by an exception."""
        self._pushed: dict[int, HeadPushed] = {}
        self._condition = threading.Condition()
        self._woken = False

    def put(self, news: SessionEvent) -> None:
        """Add an event, or pass it to `on_update`."""
        if self._receive is not None and not isinstance(news, HeadPushed | SubscriptionClosed):
            self._receive(news)
            if not isinstance(news, SavedProgress):
                self.wakeup()
            return
        with self._condition:
            if isinstance(news, HeadPushed):
                before = self._pushed.get(news.subscription.stream_id)
                if before is None or before.subscription != news.subscription or before.head < news.head:
                    self._pushed[news.subscription.stream_id] = news
            else:
                if isinstance(news, SubscriptionClosed):
                    self.end = news
                self._news.append(news)
            self._condition.notify_all()

    def wakeup(self) -> None:
        """Let the reader look around; also from a signal handler's thread."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def let_go(self) -> None:
        """Release what an exception left taken by this thread."""
        let_go(self._condition.release)

    def take(self, wait_s: float = 0.0) -> tuple[SessionEvent, ...]:
        """Return all events so far; wait for one, at most `wait_s`."""
        with self._condition:
            if not (self._news or self._pushed or self._woken) and wait_s > 0:
                self._condition.wait(wait_s)
            self._woken = False
            taken = (*self._news, *self._pushed.values())
            self._news.clear()
            self._pushed.clear()
            return taken
