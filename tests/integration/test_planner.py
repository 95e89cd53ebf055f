"""What a streaming query plans, while its leader does not answer."""

from __future__ import annotations

import signal

import pytest

from borrower import planner as module
from borrower.planner import Planner
from borrower.plans import Most
from borrower.settings import BorrowerSettings
from storage.publish import Publisher
from tests.kit import eventually
from tests.kit_nodes import SPEED, Fleet


@pytest.mark.conforms("E26")
def test_a_plan_that_nobody_writes_down_keeps_its_query_only_for_a_while_and_is_begun_later(
    fleet: Fleet, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WRITTEN_S", 0.5)
    settings = BorrowerSettings().scaled(SPEED)
    planner = Planner("$share/g/#", database, name="q", hold_s=60.0, start="earliest", settings=settings)
    with Publisher(database) as publisher:
        publisher.publish("t", b"1").result()
        (first,) = eventually(lambda: planner.plan(Most(None, None), 0.2), 60)
        publisher.publish("t", b"2").result()
    planner.acknowledge([first.planned])
    (node,) = fleet.nodes.values()
    node.signal(signal.SIGSTOP)
    try:
        assert planner.plan(Most(None, None), 0.1) == [], "nobody has written it down"
    finally:
        node.signal(signal.SIGCONT)
    (second,) = eventually(lambda: planner.plan(Most(None, None), 0.2), 60)
    assert (second.planned.start, second.planned.end) == (1, 2)
    planner.close()
