"""What a streaming query plans, while its leader does not answer."""

from __future__ import annotations

import contextlib
import signal

import pytest

from sublet_borrower.planner import micro_batch_planner as module
from sublet_borrower.planner.micro_batch_planner import MicroBatchPlanner
from sublet_borrower.planner.planned_ranges import PlanLimits
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.errors import Unavailable
from sublet_protocol.domain.grant_keys import TIMELINE_US
from sublet_storage.producer import Publisher
from tests.integration.log_kit import Connection, stream_of
from tests.kit import eventually
from tests.kit_nodes import SPEED, Fleet


@pytest.mark.conforms("E26")
@pytest.mark.parametrize("finite", [False, True])
def test_a_plan_that_is_not_written_is_begun_later(
    fleet: Fleet, database: str, monkeypatch: pytest.MonkeyPatch, finite: bool
) -> None:
    """A plan that no leader writes down keeps its query for a while only."""
    monkeypatch.setattr(module, "PLAN_SAVED_TIMEOUT_S", 0.5)
    settings = BorrowerSettings().scaled(SPEED)
    planner = MicroBatchPlanner(
        "$share/g/#",
        database,
        name="q",
        hold_s=60.0,
        starting_position="earliest",
        granted_within_s=1.0,
        settings=settings,
    )
    with Publisher(database) as publisher:
        for value in (b"1", b"2"):
            publisher.publish("t", value).result()
    (first,) = eventually(lambda: planner.plan(PlanLimits(1, None), 0.2), 60)
    planner.acknowledge([first.planned])
    (node,) = fleet.nodes.values()
    node.signal(signal.SIGSTOP)
    try:
        if finite:
            with pytest.raises(Unavailable, match=r"no leader has written down .* within 1 s"):
                planner.plan(PlanLimits(None, None), finite=True)
        else:
            assert planner.plan(PlanLimits(None, None), 0.1) == [], "nobody has written it down"
    finally:
        node.signal(signal.SIGCONT)
    (second,) = eventually(lambda: planner.plan(PlanLimits(None, None), 0.2), 60)
    assert (second.planned.start, second.planned.end) == (1, 2)
    planner.close()


@pytest.mark.conforms("E26")
def test_a_finite_plan_fails_if_no_leader_answers(database: str) -> None:
    with (
        contextlib.closing(
            MicroBatchPlanner("$share/g/#", database, name="q", hold_s=60.0, granted_within_s=0.5)
        ) as planner,
        pytest.raises(Unavailable, match=r"no leader has answered within 0\.5 s"),
    ):
        planner.plan(PlanLimits(None, None), finite=True)


@pytest.mark.conforms("P10")
def test_a_stream_of_another_timeline_has_its_space(fleet: Fleet, database: str, conn: Connection) -> None:
    """After a failover the stream of that number may be in another space."""
    stream = stream_of(conn, "default")
    with contextlib.closing(
        MicroBatchPlanner("$share/g/#", database, name="q", hold_s=60.0, settings=BorrowerSettings().scaled(SPEED))
    ) as planner:
        assert planner.spaces([(stream, 1)]) == {stream: "default"}
        conn.execute("update space set name = 'other' where name = 'default'")
        assert planner.spaces([(stream, 2)]) == {stream: "default"}
        assert planner.spaces([(stream, TIMELINE_US)]) == {stream: "other"}
