"""Processes that are stopped for longer than every timeout, and go on: what they do then has no effect."""

from __future__ import annotations

import signal

import pytest

from sublet_borrower.settings import BorrowerSettings
from tests.integration.sharing_kit import LEADER, Stage, last
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED

FROZEN_S = 60.0 / SPEED
BORROWER = BorrowerSettings().scaled(SPEED)


@pytest.mark.long
@pytest.mark.conforms("E10", "E11", "E17")
def test_a_long_frozen_consumer_starts_anew(stage: Stage) -> None:
    assert (
        max(LEADER.eviction_timeout_s, LEADER.reclaim_grace_s, LEADER.lease_duration_s, BORROWER.disconnect_timeout_s)
        < FROZEN_S
    )
    stage.serve("n1", "n2")
    stage.share("a", "b", pause_s=0.05)
    with stage.scene.load(every_s=0.5):
        stage.more(4, of="a")
        stage.fleet.consumers["a"].signal(signal.SIGSTOP)
        last(FROZEN_S)
        assert stage.scene.shares() == [16], stage.said()
        taken = [line for line in stage.scene.history() if line.is_forced]
        before = stage.scene.grants()
        stage.fleet.consumers["a"].signal(signal.SIGCONT)
        eventually(lambda: stage.scene.shares() == [8, 8], WAIT_S, stage.said)
        stage.more(4, of="a")
    windows = {(line.stream_id, line.grant_id): (line.position, line.redelivery_end) for line in taken}
    assert len(windows) == 8
    assert {line.reason for line in taken} == {"evicted: no ping in time"}
    assert all(until is not None and position <= until for position, until in windows.values())
    assert {stream for stream, _ in windows} <= set(before)
    for line in stage.scene.history():
        if (line.stream_id, line.grant_id) in windows and line.at_us > min(t.at_us for t in taken):
            assert line.is_forced, f"written under a grant that was over: {line}"
    repeated = stage.verdict().explained
    assert {stream for stream, _ in repeated} <= {stream for stream, _ in windows}
    assert [line for line in stage.scene.history() if line.is_forced] == taken, "the way back was by force"
