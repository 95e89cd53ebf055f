"""The monitor that gives up a session's streams when its user has not polled in time.

The network's thread keeps a session in touch by itself, and would do so for ever for a user function that hangs, or for
a session that was dropped. So it measures how long the user has not called, and gives the streams up when that is too
long. It must not keep the session alive: it refers to this object and the member, which do not refer to the session.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TypeVar

from sublet_borrower.consumer.group_membership import GroupMembership
from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.streams.session_assignment import SessionAssignment
from sublet_borrower.util.network_loop import network_loop
from sublet_borrower.util.unfinished_work import check_has_run
from sublet_protocol.domain.errors import UsageError

log = logging.getLogger(__name__)

T = TypeVar("T")


class PollMonitor:
    """Monitor of one session's user, from `start` to `stop`, that makes its member leave when the user does not
    poll.
    """

    def __init__(self, member: GroupMembership[SessionAssignment]) -> None:
        self._member, self._max_s = member, member.settings.max_poll_interval_s
        self._watched_handle = 0
        self._last_call_at = time.monotonic()
        self._calling_thread: threading.Thread | None = None
        member.assignment.came_back = self.touch

    def start(self) -> None:
        """Monitor the member's present subscription, beginning with the user present."""
        self._watched_handle = self._member.handle
        self.touch()
        network_loop().call_soon_threadsafe(self._check, self._watched_handle)

    def stop(self) -> None:
        """Stop monitoring: no streams are left to give up."""
        self._watched_handle = 0

    def touch(self) -> None:
        """Note that the user has polled."""
        self._last_call_at = time.monotonic()

    def check_thread(self) -> None:
        """Raise `UsageError` in the middle of another thread's call."""
        if (caller := self._calling_thread) not in (None, threading.current_thread()):
            raise UsageError(
                f"this session of {self._member.subscription} is in the middle of a call of thread {caller.name!r}: "
                "one thread at a time uses a session. Make a session for each thread, or let one thread poll and give "
                "the others its batches. Only drain, leave, wakeup and close may be called meanwhile."
            )

    @contextlib.contextmanager
    def user_call(self) -> Iterator[None]:
        """Count the user as present as long as the block lasts."""
        self._calling_thread = threading.current_thread()
        try:
            yield
        finally:
            self.end_call()

    def call_user(self, function: Callable[[T], object], argument: T) -> None:
        """Call a function of the user's from within a `user_call`; its time counts as the user's work."""
        self.end_call()
        try:
            check_has_run(function(argument), "on_epochs_consumed")
        finally:
            self._calling_thread = threading.current_thread()

    def end_call(self) -> None:
        """Note that the user begins to work outside of the session."""
        if self._calling_thread is threading.current_thread():
            self._calling_thread = None
        self.touch()

    def _check(self, handle: int) -> None:
        """Give the member up if the time is over, else check again when it may be; on the network's thread."""
        if handle != self._watched_handle or self._member.is_given_up:
            return
        absent_s = 0.0 if self._calling_thread is not None else time.monotonic() - self._last_call_at
        if absent_s < self._max_s:
            network_loop().call_later(max(self._max_s - absent_s, 0.001), _check_if_alive, weakref.ref(self), handle)
            return
        reason = f"its user has not come back for {absent_s:.0f} s (max_poll_interval_s is {self._max_s:g})"
        outstanding = self._give_up(reason)
        log.warning(
            "max poll interval exceeded, streams released: subscription=%s absent_s=%.0f max_poll_interval_s=%g: the "
            "next poll joins again; raise SUBLET_MAX_POLL_INTERVAL_S, or take smaller batches%s",
            self._member.subscription,
            absent_s,
            self._max_s,
            f". It will be delivered again: {outstanding}" if outstanding else "",
        )

    def end_dropped(self) -> None:
        """Leave for a session that was dropped without being closed, and close all it had."""
        if not self._member.is_given_up:
            settings = self._member.settings
            network_loop().call_soon_threadsafe(self._give_up, "its session was dropped without being closed")
            deadline = time.monotonic() + settings.unsubscribe_timeout_s + settings.disconnect_timeout_s
            while time.monotonic() < deadline:
                if any(isinstance(event, SubscriptionClosed) for event in self._member.events.take(0.1)):
                    break
        self._watched_handle = 0
        self._member.resources.close()

    def _give_up(self, reason: str) -> str:
        """Leave the group, and return a description of what the user had not acknowledged."""
        self._member.assignment.abandon_outstanding()
        self._member.give_up(reason)
        return self._member.assignment.abandon()


def _check_if_alive(monitor: weakref.ref[PollMonitor], handle: int) -> None:
    """Check again, unless the session is gone: a timer must not keep it."""
    if (alive := monitor()) is not None:
        alive._check(handle)
