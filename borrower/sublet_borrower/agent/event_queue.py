"""Where an agent leaves what it has to tell a session, for the session's own thread to pick up."""

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
    """A queue whose reader can wait, and can be woken without news.

    Of what is pushed about one stream it keeps the farthest, whichever way it came, so that it stays small however long
    its reader is busy. What is told of streams does not wait for the reader if there is somebody to `on_update` it, on
    the agent's thread."""

    def __init__(self, on_update: Callable[[AssignmentUpdate], None] | None = None) -> None:
        self._receive = on_update
        self._news: deque[AssignmentUpdate | SubscriptionClosed] = deque()
        self.end: SubscriptionClosed | None = None
        """The last there is to tell, once that has come; also to whom an exception broke off that took it."""
        self._pushed: dict[int, HeadPushed] = {}
        self._condition = threading.Condition()
        self._woken = False

    def put(self, news: SessionEvent) -> None:
        """Leave news, or have it heard."""
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
        """An exception broke off whoever took news on this thread."""
        let_go(self._condition.release)

    def take(self, wait_s: float = 0.0) -> tuple[SessionEvent, ...]:
        """All news so far; waits for some, at most so long."""
        with self._condition:
            if not (self._news or self._pushed or self._woken) and wait_s > 0:
                self._condition.wait(wait_s)
            self._woken = False
            taken = (*self._news, *self._pushed.values())
            self._news.clear()
            self._pushed.clear()
            return taken
