"""A consumer that is killed, also together with its leader, frozen, or cut from its lock; nodes that restart under it.

Times are such that a machine that is busy misses none: the eviction time, and with it the pings' validity, is minutes.
"""

from __future__ import annotations

import signal

import pytest

from sublet_leader.group.watch_events import GONE
from sublet_storage.db.liveness_lock import LOCK_CLASS, compute_lock_key
from tests.integration.sharing_kit import Stage, last
from tests.kit import WAIT_S, eventually

LONG = {
    "SUBLET_EVICTION_TIMEOUT_S": "600",
    "SUBLET_RECLAIM_GRACE_S": "600",
    "SUBLET_REVOKE_DEADLINE_S": "600",
    "SUBLET_LEADER_IDLE_TIMEOUT_S": "1200",
}


@pytest.fixture
def stage_settings() -> dict[str, str]:
    return LONG


def agents(stage: Stage) -> set[str]:
    return {agent for _, status, _, agent in stage.scene.rows() if status == "held" and agent is not None}


def holder(stage: Stage, agent: str) -> int | None:
    """The server's process that holds the agent's lock."""
    asked = "select pid from pg_locks where locktype = 'advisory' and granted and classid = %s and objid = %s"
    rows = stage.scene.ask(asked, (LOCK_CLASS, compute_lock_key(agent) % 2**32))
    return rows[0][0] if rows else None


def locked(stage: Stage, count: int) -> set[str]:
    """So many agents, each of which holds streams and its lock."""
    return eventually(
        lambda: found if len(found := {a for a in agents(stage) if holder(stage, a)}) == count else None,
        WAIT_S,
        stage.said,
    )


def grants_at_work(stage: Stage) -> dict[int, int]:
    """Return the grants once each consumer has been given batches under its own: a grant is committed before it is
    sent, and one that has not arrived when its consumer or the leader is replaced is made anew."""
    for name in ("a", "b"):
        stage.more(of=name)
    return stage.scene.grants()


@pytest.mark.conforms("E7", "E38")
def test_streams_of_a_killed_consumer_move_soon(stage: Stage) -> None:
    """Long before its eviction time is over; nothing is lost."""
    stage.serve("n1")
    stage.share("a", "b")
    locked(stage, 2)
    with stage.scene.load():
        stage.more()
        stage.fleet.consumers["a"].kill()
        eventually(lambda: stage.scene.shares() == [16], WAIT_S, stage.said)
        stage.more(of="b")
    stage.verdict()
    assert any(line.reason == GONE for line in stage.scene.history())


@pytest.mark.long
@pytest.mark.conforms("E7", "E38")
def test_a_frozen_consumer_keeps_its_streams(stage: Stage) -> None:
    """Until its eviction time is over: it closes nothing."""
    stage.serve("n1")
    stage.share("a", "b")
    locked(stage, 2)
    granted = stage.scene.grants()
    frozen = stage.fleet.consumers["a"]
    frozen.signal(signal.SIGSTOP)
    last(4.0)
    assert stage.scene.grants() == granted
    frozen.signal(signal.SIGCONT)
    with stage.scene.load():
        stage.more(of="a")
    assert stage.verdict().explained == []


@pytest.mark.long
@pytest.mark.conforms("E7")
def test_a_consumer_whose_lock_is_cut_goes_on(stage: Stage) -> None:
    """It takes it again, and keeps its streams."""
    stage.serve("n1")
    stage.share("a", "b")
    pids = {agent: holder(stage, agent) for agent in locked(stage, 2)}
    with stage.scene.load():
        granted = grants_at_work(stage)
        for agent, pid in pids.items():
            stage.scene.ask("select pg_terminate_backend(%s)", (pid,))
            eventually(lambda a=agent, p=pid: holder(stage, a) not in (None, p), WAIT_S, stage.said)  # type: ignore[misc]
        stage.more(of="a")
        stage.more(of="b")
    assert stage.verdict().explained == []
    assert stage.scene.grants() == granted


@pytest.mark.conforms("E16")
def test_a_nodes_restart_pauses_nobody(stage: Stage) -> None:
    """Consumers go on while there is no node at all: they see their locks held."""
    stage.serve("n1")
    stage.share("a", "b")
    locked(stage, 2)
    with stage.scene.load():
        granted = grants_at_work(stage)
        stage.fleet.nodes["n1"].kill()
        last(1.5)
        for name in ("a", "b"):
            stage.more(4, of=name)
    stage.serve("n2")
    assert stage.verdict().explained == []
    assert stage.scene.grants() == granted


@pytest.mark.long
@pytest.mark.conforms("E7", "E16", "E38")
def test_a_leader_and_a_consumer_are_killed_at_once(stage: Stage) -> None:
    """The next leader takes the streams of the dead one, and those alone, long before its reclaim grace is over."""
    for node in ("n1", "n2"):
        stage.serve(node)
    stage.share("a", "b")
    locked(stage, 2)
    with stage.scene.load():
        grants_at_work(stage)
        held = stage.scene.rows()
        stage.fleet.nodes[stage.scene.claim().node.name].kill()
        stage.fleet.consumers["a"].kill()
        eventually(lambda: stage.scene.shares() == [16], WAIT_S, stage.said)
        stage.more(of="b")
    stage.verdict()
    lost = {line.stream_id: line.agent for line in stage.scene.history() if line.reason == GONE}
    assert len(set(lost.values())) == 1
    assert lost == {stream: agent for stream, _, _, agent in held if agent in lost.values()}


@pytest.mark.long
@pytest.mark.conforms("E7", "E16")
@pytest.mark.parametrize("trouble", ["frozen", "cut"])
def test_a_new_leader_leaves_the_living_their_streams(stage: Stage, trouble: str) -> None:
    """A frozen consumer keeps its lock, and so its streams; one whose lock is cut takes it again, and reclaims."""
    for node in ("n1", "n2"):
        stage.serve(node)
    stage.share("a", "b")
    pids = {agent: holder(stage, agent) for agent in locked(stage, 2)}
    with stage.scene.load():
        granted = grants_at_work(stage)
        stage.fleet.nodes[stage.scene.claim().node.name].kill()
        if trouble == "frozen":
            stage.fleet.consumers["a"].signal(signal.SIGSTOP)
            last(5.0)
            assert stage.scene.grants() == granted
            stage.fleet.consumers["a"].signal(signal.SIGCONT)
        else:
            stage.scene.ask("select pg_terminate_backend(pid) from unnest(%s::integer[]) pid", (list(pids.values()),))
            eventually(lambda: all(holder(stage, a) not in (None, pid) for a, pid in pids.items()), WAIT_S, stage.said)
        for name in ("a", "b"):
            stage.more(of=name)
    assert stage.verdict().explained == []
    assert stage.scene.grants() == granted
