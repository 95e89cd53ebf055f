"""Threads that wait for others, and can be asked to end."""

from __future__ import annotations

import os
import select

from sublet_storage.util.stoppable_thread import StoppableThread


def test_a_thread_asked_to_end_calls_no_handler() -> None:
    thread, called = StoppableThread("listener"), list[int]()
    thread.call_handler(called.append, 1)
    thread.stop()
    thread.call_handler(called.append, 2)
    assert called == [1]


def test_a_fork_ends_no_thread_of_its_parent() -> None:
    thread = StoppableThread("listener")
    if (pid := os.fork()) == 0:
        thread.stop()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert select.select([thread.wakeup_socket], [], [], 0)[0] == []
    thread.stop()
