"""What waits for a session's thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from sublet_borrower.agent.session_event_queue import MIN_LISTEN_S, SessionEventQueue
from sublet_borrower.machine.agent import SubscriptionClosed
from sublet_borrower.machine.events import AssignmentUpdate, SavedProgress, StreamRemoved
from sublet_borrower.new_data.head_poll_scheduler import HeadPushed, HeadSubscriptionId
from sublet_protocol.messages.borrower_leader import BorrowerEndReason, GrantEndOutcome


def pushed(head: int, number: int = 1, stream_id: int = 7) -> HeadPushed:
    return HeadPushed(HeadSubscriptionId(stream_id, 50, number), head)


PUSHED = pushed(3)


def test_of_what_is_pushed_the_newest_remains() -> None:
    inbox = SessionEventQueue()
    for head in range(1_000):
        inbox.put(pushed(head))
        inbox.put(pushed(head, 2, 8))
    saved = SavedProgress(7, 50, 1), SavedProgress(7, 50, 2)
    for each in saved:
        inbox.put(each)
    assert inbox.take() == (*saved, pushed(999), pushed(999, 2, 8))
    assert inbox.take(2 * MIN_LISTEN_S) == ()


def test_a_late_change_does_not_replace_newer() -> None:
    inbox = SessionEventQueue()
    for number, head in ((1, 9), (2, 5), (2, 4)):
        inbox.put(pushed(head, number, 7))
    assert inbox.take() == (pushed(5, 2, 7),)


def test_what_is_pushed_wakes_whoever_waits() -> None:
    inbox = SessionEventQueue()
    inbox.put(PUSHED)
    assert inbox.take(60.0) == (PUSHED,)


def test_updates_go_past_who_does_not_wait_for_them() -> None:
    """All but the end, and but heads; what was saved wakes nobody."""
    updates = list[AssignmentUpdate]()
    inbox, saved = SessionEventQueue(updates.append), SavedProgress(7, 50, 1)
    removed, end = StreamRemoved(7, 50, GrantEndOutcome.SAVED), SubscriptionClosed(1, BorrowerEndReason.DONE, "")
    for event in (saved, removed, end, PUSHED):
        inbox.put(event)
    assert (updates, inbox.take()) == ([saved, removed], (end, PUSHED))
    inbox.put(removed)
    assert inbox.take(60.0) == ()


def test_a_former_subscription_hides_no_end() -> None:
    """The one before may still be handing over when its successor, which has nothing yet, is over."""
    events = SessionEventQueue()
    ends = [SubscriptionClosed(handle, BorrowerEndReason.DONE, "") for handle in (1, 2)]
    events.put(ends[1])
    events.put(ends[0])
    assert events.end == ends[1]
    assert events.take() == (ends[1], ends[0])


class ScriptedListener:
    """A listener that runs the next of these calls each time it is waited for; the last wait has to be ended."""

    def __init__(self, *calls: Callable[[], object]) -> None:
        self._calls = list(calls)
        self.is_released, self.ended_waits = True, 0
        self._is_ended = threading.Event()

    def wait(self, timeout_s: float) -> bool:
        self.is_released = False
        call = self._calls.pop(0)
        if call() is False:
            return False
        if not self._calls:
            assert self._is_ended.wait(timeout_s)
        self.is_released = True
        return True

    def end_wait(self) -> None:
        self.ended_waits += 1
        self._is_ended.set()

    def release_fully(self) -> None:
        self.is_released = True


def test_a_reader_listens_until_there_is_something() -> None:
    """What is not for it, and an event on another thread, are no end and an end."""
    inbox = SessionEventQueue()
    put = threading.Thread(target=inbox.put, args=(PUSHED,)).start
    inbox.listener = ScriptedListener(lambda: None, lambda: None, put)
    assert inbox.take(60.0) == (PUSHED,)
    inbox.listener = ScriptedListener(inbox.wakeup)
    assert inbox.take(60.0) == ()


def test_one_thread_at_a_time_listens() -> None:
    """Whoever waits meanwhile does not, and nobody who listens is disturbed by what comes before."""
    inbox, taken = SessionEventQueue(), list[object]()
    inbox.listener = listener = ScriptedListener(
        lambda: taken.append(inbox.take(2 * MIN_LISTEN_S)), lambda: inbox.put(PUSHED)
    )
    inbox.put(pushed(2))
    assert (inbox.take(), listener.ended_waits) == ((pushed(2),), 0)
    assert (inbox.take(60.0), taken, listener.ended_waits) == ((PUSHED,), [()], 1)


def test_a_reader_that_may_not_listen_waits() -> None:
    inbox = SessionEventQueue()

    def refuse() -> bool:
        threading.Thread(target=inbox.put, args=(PUSHED,)).start()
        return False

    inbox.listener = ScriptedListener(refuse)
    assert inbox.take(60.0) == (PUSHED,)


def test_a_short_wait_listens_to_nothing() -> None:
    inbox = SessionEventQueue()
    inbox.listener = ScriptedListener(lambda: pytest.fail("it would wait for a whole millisecond"))
    assert inbox.take(MIN_LISTEN_S / 2) == ()


def test_a_reader_that_is_interrupted_listens_again() -> None:
    inbox = SessionEventQueue()

    def interrupt() -> None:
        raise KeyboardInterrupt

    inbox.listener = listener = ScriptedListener(interrupt, lambda: inbox.put(PUSHED))
    with pytest.raises(KeyboardInterrupt):
        inbox.take(60.0)
    inbox.release_fully()
    assert listener.is_released
    assert inbox.take(60.0) == (PUSHED,)
