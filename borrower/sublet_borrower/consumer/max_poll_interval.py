"""Gives a session's streams up when its user has not polled for too long.

Pings go on by themselves, on the network's thread, and would do so for ever for a user function that hangs, or for a
session that is garbage. So that thread checks how long no call has come, and gives the streams up when that is too
long. It must not keep the session alive: it references this object, which does not reference the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec

from sublet_borrower.agent.event_queue import EventQueue
from sublet_borrower.agent.thread import AgentThread
from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.machine.events import SessionProgress
from sublet_borrower.streams.assignment import SessionAssignment
from sublet_borrower.util.network_loop import network_loop
from sublet_borrower.util.owner_process import OwnerProcess

log = logging.getLogger(__name__)

_P = ParamSpec("_P")
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_HERE = tuple(os.path.join(_PACKAGE, room) for room in ("consumer", "planner"))


class Attendance:
    """Of one session. `is_over`: its user has not come back in time, and what it had is given up."""

    def __init__(self, subscription: str, max_s: float) -> None:
        self.handler = SessionAssignment(self._report)
        self.handler.came_back = self.touch
        self.is_over = False
        self._subscription, self._max_s = subscription, max_s
        self._home, self._made_at = OwnerProcess(), _caller()
        self._agent: AgentThread | None = None
        self._handle = 0
        self._since, self._inside = time.monotonic(), False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, agent: AgentThread, handle: int) -> None:
        """A subscription begins; the user is there."""
        self._agent, self._handle, self.is_over = agent, handle, False
        self.touch()
        network_loop().call_soon_threadsafe(self._look, handle)

    def end(self) -> None:
        """There is nothing to be given up any more."""
        self._handle = 0

    def touch(self) -> None:
        """The user has come back."""
        self._since = time.monotonic()

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """The user is there as long as the block lasts."""
        self._inside = True
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """The user goes to work."""
        self._inside = False
        self.touch()

    def _report(self, progress: SessionProgress) -> None:
        self._home.check(self._subscription)
        assert self._agent is not None, "nothing is lent before the subscription begins"
        self._agent.report_progress(self._handle, progress)

    def _look(self, handle: int) -> None:
        """On the network's thread: come again when the time may be over."""
        if handle != self._handle or self.is_over:
            return
        absent_s = 0.0 if self._inside else time.monotonic() - self._since
        if absent_s < self._max_s:
            network_loop().call_later(max(self._max_s - absent_s, 0.001), self._look, handle)
            return
        self.is_over = True
        why = f"its user has not come back for {absent_s:.0f} s (max_poll_interval_s is {self._max_s:g})"
        given = self._give_up(why)
        log.warning(
            "%s: %s. Its streams are given to others%s. It joins again when it is asked for a batch; make "
            "SUBLET_MAX_POLL_INTERVAL_S longer if the work takes so long, or batches smaller.",
            self._subscription,
            why,
            f", and what it has in hand will be delivered again: {given}" if given else "",
        )

    def dropped(self, inbox: EventQueue, wait_s: float, close: Callable[[], None]) -> None:
        """The session is gone without having been closed. From any thread, and in the middle of anything."""
        if self._home.is_forked or not self._handle:
            return
        warnings.warn(
            f"a Session of {self._subscription}, made at {self._made_at}, was dropped without being closed: what it "
            "had is given to others. Close it, or use it in a with block.",
            ResourceWarning,
            stacklevel=2,
        )
        threading.Thread(target=self._see_out, args=(inbox, wait_s, close), name="sublet-dropped", daemon=True).start()

    def _see_out(self, inbox: EventQueue, wait_s: float, close: Callable[[], None]) -> None:
        if not self.is_over:
            network_loop().call_soon_threadsafe(self._give_up, "its session was dropped without being closed")
            deadline = time.monotonic() + wait_s
            while time.monotonic() < deadline:
                if any(isinstance(news, SubscriptionClosed) for news in inbox.take(0.1)):
                    break
        self._handle = 0
        close()

    def _give_up(self, why: str) -> str:
        """Describe what the user had outstanding."""
        assert self._agent is not None
        self.handler.abandon_outstanding()
        self._agent.give_up(self._handle, why)
        return self.handler.abandon()


def weakly(method: Callable[_P, Any]) -> Callable[_P, Any]:
    """Return the method, without keeping its object alive."""
    found = weakref.WeakMethod(method)

    def call(*arguments: _P.args, **named: _P.kwargs) -> Any:
        alive = found()
        return None if alive is None else alive(*arguments, **named)

    return call


def _caller() -> str:
    """FILE:LINE outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and os.path.dirname(frame.f_code.co_filename) in _HERE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
