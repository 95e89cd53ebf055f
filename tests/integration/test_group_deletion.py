"""Groups that are deleted and made again, and sessions with a name: with processes that live on."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.model.records import GroupOptions
from tests.deliveries import judge
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually

SHARED = Subscription.parse(ALL)
STORED = GroupOptions(starting_position=StartingPosition.EARLIEST, session_expiry_s=60.0)


def ended(stage: Stage, *names: str) -> set[str | None]:
    """The reasons with which these processes have ended, all of them."""
    processes = [stage.fleet.consumers[name] for name in names]
    eventually(lambda: not any(process.alive for process in processes), WAIT_S, stage.said)
    return {stage.fleet.ended(name) for name in names}


# --- groups that are deleted ----------------------------------------------------------------------------------------


def living(stage: Stage) -> int:
    return int(stage.scene.ask("select count(*) from consumer_group where deleted_at is null")[0][0])


@pytest.mark.conforms("E23", "E30")
@pytest.mark.long
def test_a_deleted_group_ends_its_members(stage: Stage) -> None:
    """Its leader dies, too: they ask a node that has never led the group."""
    stage.serve("n1", "n2")
    stage.share("a", "b")
    with stage.scene.load():
        stage.more()
        _, leader = stage.leader()
        stage.scene.store.delete_group(SHARED)
        leader.kill()
        assert ended(stage, "a", "b") == {"deleted"}
    assert living(stage) == 0
    assert [node.alive for node in stage.fleet.nodes.values() if node is not leader] == [True]


@pytest.mark.long
@pytest.mark.conforms("E23")
def test_a_group_made_again_begins_anew(stage: Stage) -> None:
    stage.serve("n1", "n2")
    stage.share("a", "b")
    with stage.scene.load():
        stage.more()
        former = stage.scene.store.delete_group(SHARED)
        group = stage.scene.store.declare_group(SHARED, STORED)
        assert ended(stage, "a", "b") == {"deleted"}  # before that, who joins may join the former group's leader
        stage.fleet.consumer("c", ALL)
        stage.more(of="c")
    assert former is not None
    assert group.group_id > former
    assert living(stage) == 1
    positions = "select stream_id, position from lending where group_id = %s"
    eventually(lambda: dict(stage.scene.ask(positions, (group.group_id,))) == stage.scene.heads(), WAIT_S, stage.said)
    history = stage.scene.store.history(group.group_id)
    verdict = judge(stage.scene.heads(), stage.fleet.delivered("c"), history)
    assert (verdict.lost, verdict.unexplained, verdict.explained) == ([], [], [])
    assert len({line.agent for line in history if line.event == "grant"}) == 1, "a member of the former life"


# --- sessions with a name -------------------------------------------------------------------------------------------


@pytest.mark.conforms("E10")
@pytest.mark.long
def test_a_named_session_gets_its_own_streams_again(stage: Stage) -> None:
    stage.scene.store.declare_group(SHARED, STORED)
    stage.serve("n1", "n2")
    stage.fleet.consumer("worker-1", ALL, 0.01, session="worker")
    stage.share("other")
    with stage.scene.load():
        stage.more(of="worker-1")
        own = held(stage)["worker"].keys()
        stage.fleet.consumers["worker-1"].kill()
        retained = eventually(lambda: positions_retained(stage), WAIT_S, stage.said)
        assert retained.keys() == own
        stage.more(of="other")
        assert held(stage).keys() == {None}, "what is reserved for the session was granted to somebody else"
        assert positions_retained(stage) == retained
        stage.fleet.consumer("worker-2", ALL, 0.01, session="worker")
        eventually(lambda: held(stage).get("worker", {}).keys() == own, WAIT_S, stage.said)
        stage.more(40, of="worker-2")
    begun: dict[int, int] = {}
    for batch in stage.fleet.delivered("worker-2"):
        begun.setdefault(batch.stream, batch.offsets[0])
    assert begun == {stream: retained[stream] for stream in begun}
    stage.verdict()
    assert len(begun) == 8


@pytest.mark.conforms("E30", "E11")
@pytest.mark.long
def test_the_newer_of_two_of_a_name_fences_the_older(stage: Stage) -> None:
    stage.scene.store.declare_group(SHARED, STORED)
    stage.serve("n1", "n2")
    stage.fleet.consumer("older", ALL, 0.01, session="worker")
    eventually(lambda: stage.scene.shares() == [16], WAIT_S, stage.said)
    with stage.scene.load():
        stage.more(of="older")
        stage.fleet.consumer("newer", ALL, 0.01, session="worker")
        assert ended(stage, "older") == {"fenced"}
        stage.more(of="newer")
        assert stage.scene.shares() == [16]
    forced = {line.reason for line in stage.scene.history() if line.is_forced}
    assert forced <= {"fenced by a newer process of its session"}
    stage.verdict()
    assert stage.fleet.consumers["newer"].alive


def held(stage: Stage) -> dict[str | None, dict[int, int]]:
    """Return {session: {stream: position}} of the granted streams."""
    found: dict[str | None, dict[int, int]] = {}
    rows = stage.scene.ask("select session, stream_id, position from lending where status = 'held'")
    for session, stream, position in rows:
        found.setdefault(session, {})[stream] = position
    return found


def positions_retained(stage: Stage) -> dict[int, int]:
    """Return {stream: position} of those reserved for `worker`."""
    rows = "select stream_id, position from lending where status = 'free' and session = 'worker' and held_until > now()"
    return dict(stage.scene.ask(rows))
