"""What a group's leader has to do is due at its very time: it is woken then, and no earlier."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from sublet_leader.group.group_timers import ANNOUNCEMENT_INTERVAL_S, GroupTimers
from sublet_leader.settings import LeaderSettings

SETTINGS = LeaderSettings()

Take = Callable[[GroupTimers, float], bool]

DUE: dict[str, tuple[Callable[[GroupTimers], object], Take, float]] = {
    "a change": (
        lambda timers: timers.note_membership_change(0.0),
        GroupTimers.take_rebalance_due,
        SETTINGS.rebalance_debounce_s,
    ),
    "a freed stream": (lambda timers: timers.note_stream_freed(1.0), GroupTimers.take_rebalance_due, 1.0),
    "the next balance": (lambda _: None, GroupTimers.take_rebalance_due, SETTINGS.rebalance_interval_s),
    "a sync": (lambda timers: timers.take_sync_due(0.0), GroupTimers.take_sync_due, SETTINGS.stream_sync_interval_s),
    "an announcement": (
        lambda timers: timers.note_announced(0.0, is_complete=False),
        GroupTimers.is_announcement_due,
        ANNOUNCEMENT_INTERVAL_S,
    ),
    "the grace": (lambda _: None, GroupTimers.take_grace_due, SETTINGS.reclaim_grace_s),
    "a sweep": (lambda _: None, GroupTimers.take_sweep_due, SETTINGS.resend_interval_s / 2),
    "idleness": (
        lambda _: None,
        lambda timers, now: timers.is_idle_timeout(True, now),
        SETTINGS.leader_idle_timeout_s,
    ),
}


@pytest.mark.parametrize("what", DUE)
def test_it_is_due_at_its_time(what: str) -> None:
    note, take, at = DUE[what]
    timers = GroupTimers(SETTINGS, 0.0)
    note(timers)
    assert not take(timers, math.nextafter(at, 0.0))
    assert take(timers, at)
