"""Real nodes, real sessions, real Postgres, killed for real: who consumes what, and what is lost or seen twice."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from sublet_storage.spaces.space_changes import reshard, rollover
from sublet_storage.spaces.space_queries import find_space
from tests.integration.sharing_kit import ALL, WAIT_S, Scene, Stage
from tests.kit import eventually
from tests.kit_nodes import Fleet


@pytest.fixture
def stage(database: str, tmp_path: Path) -> Iterator[Stage]:
    """A database of the test's own."""
    stage = Stage(database, tmp_path)
    yield stage
    stage.close()


@pytest.fixture
def fleet(stage: Stage) -> Fleet:
    """Its processes."""
    return stage.fleet


@pytest.fixture
def scene(stage: Stage) -> Scene:
    """Its database's side."""
    return stage.scene


@pytest.mark.conforms("E1", "E18", "E29")
def test_consumers_share_the_work_and_each_message_goes_to_one(stage: Stage, fleet: Fleet, scene: Scene) -> None:
    stage.serve("n1")
    scene.publish(2_000)
    fleet.consumer("a", ALL, 0.02)
    fleet.consumer("b", ALL, 0.02)
    eventually(lambda: scene.shares() == [8, 8], WAIT_S, lambda: str(scene.shares()))
    scene.publish(2_000, 2_000)
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    assert stage.verdict().explained == []
    assert all(fleet.delivered(name) for name in ("a", "b"))


@pytest.mark.conforms("E8", "E31")
def test_a_graceful_leave_in_the_middle_of_a_batch_repeats_nothing(stage: Stage, fleet: Fleet, scene: Scene) -> None:
    stage.serve("n1")
    fleet.consumer("a", ALL, 0.05)
    fleet.consumer("b", ALL, 0.05)
    eventually(lambda: scene.shares() == [8, 8], WAIT_S, lambda: str(scene.shares()))
    scene.publish(6_000)
    eventually(lambda: fleet.delivered("a") and fleet.delivered("b"), WAIT_S)
    assert fleet.consumers["a"].stop() == 0
    scene.publish(1_000, 6_000)
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    assert stage.verdict().explained == []
    assert scene.shares() == [16]


@pytest.mark.conforms("E10", "E17")
def test_a_killed_consumers_streams_move_on(stage: Stage, fleet: Fleet, scene: Scene) -> None:
    stage.serve("n1")
    fleet.consumer("a", ALL, 0.05)
    fleet.consumer("b", ALL, 0.05)
    eventually(lambda: scene.shares() == [8, 8], WAIT_S, lambda: str(scene.shares()))
    scene.publish(6_000)
    eventually(lambda: fleet.delivered("a") and fleet.delivered("b"), WAIT_S)
    fleet.consumers["a"].kill()
    scene.publish(1_000, 6_000)
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    stage.verdict()
    assert scene.shares() == [16]
    assert any(h.is_forced for h in scene.history())


@pytest.mark.conforms("E5", "E15", "E16")
def test_a_killed_leader_costs_those_who_live_nothing(stage: Stage, fleet: Fleet, scene: Scene) -> None:
    stage.serve("n1", "n2")
    fleet.consumer("a", ALL, 0.05)
    fleet.consumer("b", ALL, 0.05)
    eventually(lambda: scene.shares() == [8, 8], WAIT_S, lambda: str(scene.shares()))
    scene.publish(8_000)
    eventually(lambda: len(fleet.delivered()) > 5, WAIT_S)
    before = scene.claim()
    grants = {h.grant_id for h in scene.history() if h.event == "grant"}
    fleet.nodes[before.node.name].kill()
    lease_ended_us = scene.us("expires_at")
    scene.publish(2_000, 8_000)
    after = eventually(lambda: scene.claim() if scene.claim().term > before.term else None, WAIT_S)
    assert after.node.name != before.node.name
    # A term is the database's time of the claim, in microseconds.
    assert lease_ended_us <= after.term <= lease_ended_us + 2_000_000
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    assert stage.verdict().explained == []
    assert grants == {h.grant_id for h in scene.history() if h.event == "grant"}, "a stream changed hands"


@pytest.mark.conforms("E15")
def test_a_leader_that_is_asked_to_stop_hands_over_before_its_lease_is_over(
    stage: Stage, fleet: Fleet, scene: Scene
) -> None:
    stage.serve("n1", "n2")
    fleet.consumer("a", ALL)
    eventually(lambda: scene.shares() == [16], WAIT_S)
    before, lease_ends_us = scene.claim(), scene.us("expires_at")
    assert fleet.nodes[before.node.name].stop() == 0
    after = eventually(lambda: scene.claim() if scene.claim().term > before.term else None, WAIT_S)
    assert after.term < lease_ends_us
    scene.publish(500)
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    assert stage.verdict().explained == []


@pytest.mark.conforms("E20")
def test_a_standby_takes_over_when_an_owner_leaves(stage: Stage, fleet: Fleet, scene: Scene) -> None:
    reshard(scene.connection, "default", 2)
    stage.serve("n1")
    scene.publish(200)
    for name in ("a", "b", "c"):
        fleet.consumer(name, ALL)
    eventually(lambda: scene.shares() == [1, 1], WAIT_S)
    owner = eventually(lambda: [d.consumer for d in fleet.delivered()], WAIT_S)[-1]
    assert fleet.consumers[owner].stop() == 0
    eventually(lambda: scene.shares() == [1, 1], WAIT_S)
    scene.publish(200, 200)
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    assert stage.verdict().explained == []


@pytest.mark.conforms("E21", "W3")
def test_key_order_holds_across_rollovers_and_finished_streams_stay_finished(
    stage: Stage, fleet: Fleet, scene: Scene
) -> None:
    stage.serve("n1", "n2")
    fleet.consumer("a", ALL, 0.01)
    fleet.consumer("b", ALL, 0.01)
    scene.publish(1_000)
    reshard(scene.connection, "default", 5)
    scene.publish(1_000, 1_000)
    rollover(scene.connection, find_space(scene.connection, "default"))
    scene.publish(1_000, 2_000)
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    finished = {h.stream_id for h in scene.history() if h.event == "finish"}
    fleet.nodes[scene.claim().node.name].kill()
    scene.publish(500, 3_000)
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    stage.verdict()
    ended: dict[int, int] = {}
    for batch in fleet.delivered():
        parents = scene.connection.execute(
            "select parents from stream where stream_id = %s", (batch.stream,)
        ).fetchone()
        assert parents
        for parent in parents[0]:
            delivered = {o for d in fleet.delivered() if d.stream == parent and d.at <= batch.at for o in d.offsets}
            assert len(delivered) == scene.heads()[parent], f"{batch.stream} before its parent {parent}"
        ended[batch.stream] = batch.offsets[-1]
    late = [h for h in scene.history() if h.event == "grant" and h.stream_id in finished]
    first_finish = {h.stream_id: h.at_us for h in reversed(scene.history()) if h.event == "finish"}
    assert all(h.at_us <= first_finish[h.stream_id] for h in late)


@pytest.mark.conforms("E32")
def test_an_open_transaction_on_one_stream_stalls_nobody_else(stage: Stage, fleet: Fleet, scene: Scene) -> None:
    stage.serve("n1")
    scene.publish(1_000)
    fleet.consumer("a", ALL)
    eventually(scene.consumed, WAIT_S)
    group = scene.group().group_id
    with psycopg.connect(scene.url, options="-csearch_path=sublet") as user:
        locked = user.execute(
            "select stream_id from lending where group_id = %s order by stream_id limit 1 for update", (group,)
        ).fetchone()
        assert locked
        scene.publish(1_000, 1_000)
        heads = scene.heads()
        eventually(
            lambda: all(p == heads[s] for s, _, p, _ in scene.rows() if s != locked[0]),
            WAIT_S,
            lambda: str(scene.rows()),
        )
        term, expiry = scene.claim().term, scene.us("expires_at")
        eventually(lambda: scene.us("expires_at") > expiry, WAIT_S)
        assert scene.claim().term == term
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    assert stage.verdict().explained == []


@pytest.mark.conforms("E13")
def test_a_leader_stopped_past_its_lease_changes_nothing_when_it_wakes(
    stage: Stage, fleet: Fleet, scene: Scene
) -> None:
    stage.serve("n1", "n2")
    scene.publish(1_000)
    fleet.consumer("a", ALL, 0.02)
    eventually(lambda: scene.shares() == [16], WAIT_S)
    before = scene.claim()
    fleet.nodes[before.node.name].signal(signal.SIGSTOP)
    after = eventually(lambda: scene.claim() if scene.claim().term > before.term else None, WAIT_S)
    fleet.nodes[before.node.name].signal(signal.SIGCONT)
    scene.publish(1_000, 1_000)
    eventually(scene.consumed, WAIT_S, lambda: str(scene.rows()))
    assert stage.verdict().explained == []
    assert scene.claim().term == after.term
    written = scene.connection.execute("select distinct term from lending").fetchall()
    assert {term for (term,) in written} <= {before.term, after.term}
