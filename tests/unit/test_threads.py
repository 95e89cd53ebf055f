"""Threads that wait for others, and can be asked to end."""

from __future__ import annotations

from sublet_storage.util.threads import StoppableThread


def test_a_thread_asked_to_end_calls_no_handler() -> None:
    thread, called = StoppableThread("listener"), list[int]()
    thread.call_handler(called.append, 1)
    thread.stop()
    thread.call_handler(called.append, 2)
    assert called == [1]
