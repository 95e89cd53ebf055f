"""Real nodes, real sessions, real Postgres, killed for real: who consumes what, and what is lost or seen twice."""

from __future__ import annotations

import pytest

from sublet_storage.spaces.space_changes import reshard, rollover
from sublet_storage.spaces.space_queries import find_space
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually


@pytest.mark.conforms("E1", "E18", "E29")
def test_each_message_goes_to_one_of_those_who_share(stage: Stage) -> None:
    stage.serve("n1")
    stage.scene.publish(2_000)
    stage.share("a", "b", pause_s=0.02)
    stage.scene.publish(2_000, 2_000)
    assert stage.verdict().explained == []
    assert all(stage.fleet.delivered(name) for name in ("a", "b"))


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("leaves", marks=[pytest.mark.conforms("E8", "E31"), pytest.mark.long]),
        pytest.param("is killed", marks=pytest.mark.conforms("E10", "E17")),
    ],
)
def test_the_streams_of_one_that_ends_move_on(stage: Stage, end: str) -> None:
    """Who leaves in the middle of a batch repeats nothing; what one that was killed had in hand may be seen again."""
    stage.serve("n1")
    stage.share("a", "b", pause_s=0.05)
    stage.scene.publish(6_000)
    eventually(lambda: stage.fleet.delivered("a") and stage.fleet.delivered("b"), WAIT_S)
    if end == "leaves":
        assert stage.fleet.consumers["a"].stop() == 0
    else:
        stage.fleet.consumers["a"].kill()
    stage.scene.publish(1_000, 6_000)
    verdict = stage.verdict()
    assert stage.scene.shares() == [16]
    if end == "leaves":
        assert verdict.explained == []
    else:
        assert any(line.is_forced for line in stage.scene.history())


@pytest.mark.conforms("E5", "E15", "E16")
def test_a_killed_leader_costs_those_who_live_nothing(stage: Stage) -> None:
    scene = stage.scene
    stage.serve("n1", "n2")
    stage.share("a", "b", pause_s=0.05)
    scene.publish(8_000)
    eventually(lambda: len(stage.fleet.delivered()) > 5, WAIT_S)
    grants = {line.grant_id for line in scene.history() if line.event == "grant"}
    before, leader = stage.leader()
    leader.kill()
    lease_ended_us = scene.us("expires_at")
    scene.publish(2_000, 8_000)
    after = stage.next_leader(before)
    assert after.node.name != before.node.name
    # A term is the database's time of the claim, in microseconds.
    assert after.term <= lease_ended_us + 2_000_000
    assert stage.verdict().explained == []
    assert grants == {line.grant_id for line in scene.history() if line.event == "grant"}, "a stream changed hands"


@pytest.mark.conforms("E15")
def test_a_leader_that_stops_hands_over(stage: Stage) -> None:
    """Before its lease is over."""
    stage.serve("n1", "n2")
    stage.share("a")
    (before, leader), lease_ends_us = stage.leader(), stage.scene.us("expires_at")
    assert leader.stop() == 0
    assert stage.next_leader(before).term < lease_ends_us
    stage.scene.publish(500)
    assert stage.verdict().explained == []


@pytest.mark.conforms("E21", "W3")
def test_parents_are_consumed_before_children(stage: Stage) -> None:
    """Across rollovers, reshards and a leader's death; and what is finished stays finished."""
    scene = stage.scene
    stage.serve("n1", "n2")
    for name in ("a", "b"):
        stage.fleet.consumer(name, ALL, 0.01)
    scene.publish(1_000)
    reshard(scene.connection, "default", 5)
    scene.publish(1_000, 1_000)
    rollover(scene.connection, find_space(scene.connection, "default"))
    scene.publish(1_000, 2_000)
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    finished = {line.stream_id for line in scene.history() if line.event == "finish"}
    stage.leader()[1].kill()
    scene.publish(500, 3_000)
    stage.verdict()
    heads, parents = scene.heads(), dict(scene.ask("select stream_id, parents from stream"))
    for batch in stage.fleet.delivered():
        for parent in parents[batch.stream]:
            delivered = {
                o for d in stage.fleet.delivered() if d.stream == parent and d.at <= batch.at for o in d.offsets
            }
            assert len(delivered) == heads[parent], f"{batch.stream} before its parent {parent}"
    late = [line for line in scene.history() if line.event == "grant" and line.stream_id in finished]
    first_finish = {line.stream_id: line.at_us for line in reversed(scene.history()) if line.event == "finish"}
    assert all(line.at_us <= first_finish[line.stream_id] for line in late)
