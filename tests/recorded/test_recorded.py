"""Half a minute of the long run (`python -m tests.recorded`): real processes under random faults."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.recorded.anomaly_report import report_lines
from tests.recorded.checks import check
from tests.recorded.history import read
from tests.recorded.plan import draw
from tests.recorded.stage import Stage

SEED, SECONDS, DEED_EVERY_S, ORDER_EVERY_S, SPEED = 1, 25.0, 2.0, 2.5, 2.0


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.conforms("W1", "W2", "W3", "W7", "E10", "E11", "E13", "E25", "E29", "E33", "E34", "E37")
def test_half_a_minute_under_kills_breaks_no_promise(server_home: Path) -> None:
    said: list[str] = []
    stage = Stage(server_home, draw(SEED, SECONDS, DEED_EVERY_S, ORDER_EVERY_S), SPEED, said.append)
    stage.run()
    history = read(stage.records)
    reported = [f"{anomaly}\n" + "\n".join(report_lines(history, anomaly)) for anomaly in check(history)]
    assert not reported, "\n".join([*said, *reported[:5]])
    assert sum(stage.befell.values()) > SECONDS / DEED_EVERY_S / 3, said
    assert all(history.of_group(group) for group in history.groups)
