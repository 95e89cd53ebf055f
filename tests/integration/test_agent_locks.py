"""A consumer that is killed, also together with its leader, frozen, or cut from its lock; nodes that restart under it.

Times are such that a machine that is busy misses none: the eviction time, and with it the pings' validity, is minutes.
"""

from __future__ import annotations

import signal
from collections.abc import Callable

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


def holder(stage: Stage, agent: str) -> int | None:
    """The server's process that holds the agent's lock."""
    asked = "select pid from pg_locks where locktype = 'advisory' and granted and classid = %s and objid = %s"
    rows = stage.scene.ask(asked, (LOCK_CLASS, compute_lock_key(agent) % 2**32))
    return rows[0][0] if rows else None


def start(stage: Stage, *nodes: str) -> dict[str, int]:
    """Start nodes and two consumers that share the streams; return who holds the lock of each, {agent: pid}."""
    for node in nodes:
        stage.serve(node)
    stage.share("a", "b")

    def locked() -> dict[str, int]:
        agents = {agent for _, status, _, agent in stage.scene.rows() if status == "held" and agent is not None}
        pids = {agent: pid for agent in agents if (pid := holder(stage, agent)) is not None}
        return pids if len(pids) == 2 else {}

    return eventually(locked, WAIT_S, stage.said)


def grants_at_work(stage: Stage) -> dict[int, int]:
    """Return the grants once each consumer has been given batches under its own: a grant is committed before it is
    sent, and one that has not arrived when its consumer or the leader is replaced is made anew."""
    for name in ("a", "b"):
        stage.more(of=name)
    return stage.scene.grants()


@pytest.mark.conforms("E7", "E16", "E38")
@pytest.mark.parametrize("leader_lives", [True, pytest.param(False, marks=pytest.mark.long)])
def test_streams_of_a_killed_consumer_move_soon(stage: Stage, leader_lives: bool) -> None:
    """And those alone, long before its eviction time or the next leader's reclaim grace is over; nothing is lost."""
    start(stage, *(("n1",) if leader_lives else ("n1", "n2")))
    with stage.scene.load():
        grants_at_work(stage)
        held = stage.scene.rows()
        if not leader_lives:
            stage.leader()[1].kill()
        stage.fleet.consumers["a"].kill()
        eventually(lambda: stage.scene.shares() == [16], WAIT_S, stage.said)
        stage.more(of="b")
    stage.verdict()
    lost = {line.stream_id: line.agent for line in stage.scene.history() if line.reason == GONE}
    assert len(set(lost.values())) == 1
    assert lost == {stream: agent for stream, _, _, agent in held if agent in lost.values()}


def freeze_one(stage: Stage, pids: dict[str, int]) -> None:
    """It closes nothing, and so keeps its lock."""
    granted = stage.scene.grants()
    stage.fleet.consumers["a"].signal(signal.SIGSTOP)
    last(5.0)
    assert stage.scene.grants() == granted
    stage.fleet.consumers["a"].signal(signal.SIGCONT)


def cut_their_locks(stage: Stage, pids: dict[str, int]) -> None:
    """They take them again."""
    stage.scene.ask("select pg_terminate_backend(pid) from unnest(%s::integer[]) pid", (list(pids.values()),))
    eventually(lambda: all(holder(stage, a) not in (None, pid) for a, pid in pids.items()), WAIT_S, stage.said)


def work_without_a_node(stage: Stage, pids: dict[str, int]) -> None:
    """They see their locks held."""
    last(1.5)
    for name in ("a", "b"):
        stage.more(4, of=name)


@pytest.mark.conforms("E7", "E16", "E38")
@pytest.mark.parametrize(
    ("nodes", "kills", "trouble"),
    [
        pytest.param(["n1"], False, freeze_one, marks=pytest.mark.long),
        pytest.param(["n1"], False, cut_their_locks, marks=pytest.mark.long),
        (["n1"], True, work_without_a_node),
        pytest.param(["n1", "n2"], True, freeze_one, marks=pytest.mark.long),
        pytest.param(["n1", "n2"], True, cut_their_locks, marks=pytest.mark.long),
    ],
)
def test_the_living_keep_their_streams(
    stage: Stage, nodes: list[str], kills: bool, trouble: Callable[[Stage, dict[str, int]], None]
) -> None:
    """Also under a new leader, or while there is no node at all."""
    pids = start(stage, *nodes)
    with stage.scene.load():
        granted = grants_at_work(stage)
        if kills:
            stage.leader()[1].kill()
        trouble(stage, pids)
        for name in ("a", "b"):
            stage.more(of=name)
    if kills and len(nodes) == 1:
        stage.serve("n2")
    assert stage.verdict().explained == []
    assert stage.scene.grants() == granted
