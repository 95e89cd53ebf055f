"""Where an agent leaves what it has to tell a session, for the session's own thread to pick up."""

from __future__ import annotations

import threading
from collections import deque

from borrower.machine.agent import Closed
from borrower.machine.events import Tell
from borrower.machine.following import Pushed

News = Tell | Closed | Pushed


class Inbox:
    """A queue whose reader can wait, and can be woken without news."""

    def __init__(self) -> None:
        self._news: deque[News] = deque()
        self._condition = threading.Condition()
        self._woken = False

    def put(self, news: News) -> None:
        """Leave news."""
        with self._condition:
            self._news.append(news)
            self._condition.notify_all()

    def wake(self) -> None:
        """Let the reader look around; also from a signal handler's thread."""
        with self._condition:
            self._woken = True
            self._condition.notify_all()

    def take(self, wait_s: float = 0.0) -> tuple[News, ...]:
        """All news so far; waits for some, at most so long."""
        with self._condition:
            if not self._news and not self._woken and wait_s > 0:
                self._condition.wait(wait_s)
            self._woken = False
            taken = tuple(self._news)
            self._news.clear()
            return taken
