"""A node stops though something that it waits for never ends."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from sublet_leader.run_with_timeout import run_with_timeout


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
