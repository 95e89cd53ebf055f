"""Calls that are made again until they are done."""

from __future__ import annotations

import logging

import pytest

from sublet_storage.util import retry
from sublet_storage.util.retry import Backoff, call_with_retry


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
