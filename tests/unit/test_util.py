"""Small tools: a log that repeats little, lines for machines, calls made again, threads, and steps that never end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import select
import subprocess
import sys
import threading

import pytest

from sublet.cli.base.json_logging import JsonFormatter
from sublet_borrower.util.network_loop import network_loop
from sublet_leader.run_with_timeout import run_with_timeout
from sublet_protocol.domain.errors import UsageError
from sublet_storage.util import retry
from sublet_storage.util.log_throttle import CAUSES, MAX_CAUSES, MAX_ERROR_CHARS, LogThrottle, error_signature
from sublet_storage.util.retry import Backoff, call_with_retry
from sublet_storage.util.stoppable_thread import StoppableThread


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_line_has_how_often_it_was_suppressed() -> None:
    clock = Clock()
    asked = LogThrottle(10.0, clock)
    assert [asked.acquire("a") for _ in range(5)] == [0, None, None, None, None]
    clock.now += 9.9
    assert asked.acquire("a") is None
    clock.now += 0.1
    assert asked.acquire("a") == 5
    assert asked.acquire("a") is None
    clock.now += 100.0
    assert asked.acquire("a") == 1


def test_after_a_reset_a_line_is_logged_at_once() -> None:
    asked = LogThrottle(10.0, Clock())
    assert not asked.reset("a")
    assert [asked.acquire("a"), asked.acquire("a")] == [0, None]
    assert [asked.reset("a"), asked.reset("a")] == [True, False]
    assert asked.acquire("a") == 0


def test_only_so_many_subjects_are_remembered() -> None:
    asked = LogThrottle(10.0, Clock())
    for number in range(MAX_CAUSES + 5):
        assert asked.acquire(number) == 0
    assert [asked.acquire(5), asked.acquire(4)] == [None, 0], "the first five are forgotten"


def test_another_cause_is_logged_at_once() -> None:
    clock = Clock()
    asked = LogThrottle(10.0, clock)
    assert [asked.acquire("a", "full"), asked.acquire("a", "full"), asked.acquire("a", "away")] == [0, None, 0]
    assert [asked.acquire("a", "full"), asked.acquire("a", "away"), asked.acquire("b", "full")] == [None, None, 0]
    clock.now += 10.0
    assert [asked.acquire("a", "full"), asked.acquire("a", "away")] == [2, 1]
    assert asked.reset("a")
    assert [asked.acquire("a", "away"), asked.acquire("a", "full")] == [0, 0]


def test_a_subject_has_only_so_many_causes() -> None:
    clock = Clock()
    asked = LogThrottle(10.0, clock)
    reported = [asked.acquire("a", f"cause {number}") for number in range(CAUSES + 100)]
    assert reported == [0] * (CAUSES + 1) + [None] * 99, "the others are one more"
    assert asked.acquire("a", "cause 0") is None
    clock.now += 10.0
    assert asked.acquire("a", "one that is new") == 0
    assert asked.acquire("a", "cause 0") == 0, "what may be logged again is forgotten where there is no room"


def test_the_last_cause_that_there_is_room_for() -> None:
    """It is one of its own, in place of those that may be logged again."""
    clock = Clock()
    asked = LogThrottle(10.0, clock)
    assert [asked.acquire("a", f"cause {number}") for number in range(CAUSES)] == [0] * CAUSES
    clock.now += 10.0
    assert [asked.acquire("a", "new"), asked.acquire("a", "newer"), asked.acquire("a", "new")] == [0, 0, None]


def test_a_cause_is_the_same_whatever_ids_it_names() -> None:
    one, two = (error_signature(OSError(f"block_{n}: no space left at 12:0{n}:07 (/mnt/9f{n}e-{n})")) for n in (3, 4))
    assert one == two
    assert one != error_signature(OSError("block_3: read-only file system at 12:03:07 (/mnt/9f3e-3)"))
    assert one != error_signature(ValueError("block_3: no space left at 12:03:07 (/mnt/9f3e-3)"))
    assert len(error_signature(OSError("x" * 10**6))) < MAX_ERROR_CHARS + 20


# ---  -----------------------------------------------------------------------------------------------------------------


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


def test_a_forked_child_has_no_network_loop() -> None:
    """Its parent's is not there, and grpc would wait for ever on another."""
    network_loop()
    if (pid := os.fork()) == 0:
        is_refused = False
        try:
            network_loop()
        except UsageError:
            is_refused = True
        finally:
            os._exit(0 if is_refused else 1)
    assert os.waitpid(pid, 0)[1] == 0


LOOP_WITHOUT_THREAD = """
import asyncio, threading
from sublet_borrower.util.network_loop import network_loop

def refuse(thread):
    raise RuntimeError("can't start new thread")

start, threading.Thread.start = threading.Thread.start, refuse
try:
    network_loop()
except RuntimeError as error:
    print(error)
threading.Thread.start = start
asyncio.run_coroutine_threadsafe(asyncio.sleep(0), network_loop()).result(30)
print("runs")
"""


def test_a_network_loop_without_a_thread_is_none() -> None:
    """Where the system gives a process no thread: sessions waited on a loop that never ran."""
    done = subprocess.run(
        [sys.executable, "-c", LOOP_WITHOUT_THREAD], capture_output=True, text=True, timeout=90, check=False
    )
    assert (done.stdout, done.stderr) == ("can't start new thread\nruns\n", "")


# ---  -----------------------------------------------------------------------------------------------------------------


def test_what_takes_long_is_logged_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever waits for minutes, as for a database that is read-only, sees why."""
    failures = ["gone"] * 3

    def attempt() -> str:
        if failures:
            raise OSError(failures.pop())
        return "done"

    monkeypatch.setattr(retry, "WARN_AFTER_S", 0.0)
    with caplog.at_level(logging.WARNING):
        assert call_with_retry("publish", attempt, lambda error: True, Backoff(first_s=0.0)) == "done"
    assert [record.message for record in caplog.records] == ["not done yet, retrying: action=publish took_s=0: gone"]


# ---  -----------------------------------------------------------------------------------------------------------------


def test_a_line_for_machines_moves_no_cursor() -> None:
    said = "group a\u202eb\u2028\x9b2J \u00e9"
    line = JsonFormatter("n1").format(logging.makeLogRecord({"msg": "%s", "args": (said,)}))
    assert line.isprintable()
    assert json.loads(line)["message"] == said


# ---  -----------------------------------------------------------------------------------------------------------------


def test_what_ends_in_time_is_waited_for() -> None:
    done: list[bool] = []
    assert asyncio.run(run_with_timeout("the work", lambda: done.append(True)))
    assert done == [True]


def test_what_takes_longer_is_left_and_named(caplog: pytest.LogCaptureFixture) -> None:
    never = threading.Event()

    def wait() -> None:
        never.wait()

    assert not asyncio.run(run_with_timeout("closing the door", wait, 0.01))
    (left,) = [thread for thread in threading.enumerate() if "closing the door" in thread.name]
    never.set()
    left.join()
    assert left.daemon, "the process would wait for it"
    assert "shutdown step timed out, skipped: step='closing the door' timeout_s=0.01" in caplog.text


def test_what_fails_is_over_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise ValueError("ajar")

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(run_with_timeout("closing the door", fails))
    assert "shutdown step failed: step='closing the door'" in caplog.text
    assert "ajar" in caplog.text
