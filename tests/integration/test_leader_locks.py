"""The lock of a node that leads: its process is killed or frozen, its connection is cut, Postgres is restarted.

Times are such that a machine that is busy misses none: leases last for minutes.
"""

from __future__ import annotations

import signal

import pytest

from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.db.liveness_lock import LOCK_CLASS
from tests.integration.sharing_kit import Stage, last
from tests.kit import WAIT_S, eventually

CUTS = 5
LEASES = {
    "LEASE_DURATION_S": "600",
    "LEASE_RENEW_INTERVAL_S": "1",
    "LEASE_MARGIN_S": "60",
    "HISTORY_RETENTION_S": "36000",
}
PATIENT = {"LOCK_CHECK_INTERVAL_S": "5", "LOCK_RECHECK_DELAY_S": "5"}
"""A leader has so long to take its lock again."""


@pytest.fixture
def database(server: EmbeddedPostgres) -> str:
    return server.url


@pytest.fixture
def stage_settings(request: pytest.FixtureRequest) -> dict[str, str]:
    settings = LEASES | getattr(request, "param", {})
    return {f"SUBLET_{name}": value for name, value in settings.items()}


def holder(stage: Stage) -> int | None:
    """The server's process that holds the lock of the group's leader."""
    key = stage.scene.claim().lock_key
    if key is None:
        return None
    asked = "select pid from pg_locks where locktype = 'advisory' and granted and classid = %s and objid = %s"
    rows = stage.scene.ask(asked, (LOCK_CLASS, key % 2**32))
    return rows[0][0] if rows else None


@pytest.mark.conforms("E15", "E16", "E38")
def test_a_killed_leader_is_succeeded_in_its_lease(stage: Stage) -> None:
    """Nothing is repeated, and nothing changes hands."""
    stage.serve("n1", "n2")
    stage.share("a", "b")
    granted = stage.scene.grants()
    with stage.scene.load():
        eventually(lambda: holder(stage), WAIT_S, stage.said)
        stage.more()
        before, leader = stage.leader()
        leader.kill()
        after = stage.next_leader(before)
        assert after.previous_leader_s > 0, "its lease had run out"
        stage.more(40)
    assert stage.verdict().explained == []
    assert stage.scene.grants() == granted, "a stream has changed hands"
    assert not any(line.is_forced for line in stage.scene.history())


@pytest.mark.long
@pytest.mark.conforms("E13", "E38")
def test_a_frozen_leader_has_its_lease(stage: Stage) -> None:
    stage.serve("n1", "n2")
    stage.share("a")
    eventually(lambda: holder(stage), WAIT_S, stage.said)
    before, leader = stage.leader()
    leader.signal(signal.SIGSTOP)
    last(3.0)
    assert holder(stage) is not None
    assert stage.scene.claim().term == before.term
    leader.signal(signal.SIGCONT)


@pytest.mark.long
@pytest.mark.parametrize("stage_settings", [PATIENT], ids=[""], indirect=True)
@pytest.mark.conforms("E13", "W1")
def test_a_leader_whose_lock_is_cut_takes_it_again(stage: Stage, server: EmbeddedPostgres) -> None:
    """Also when Postgres is restarted while it has nothing to commit: one whose commit gets no answer steps down."""
    stage.serve("n1", "n2")
    stage.share("a", "b")
    before = eventually(lambda: stage.scene.claim() if holder(stage) else None, WAIT_S, stage.said)
    with stage.scene.load() as load:
        for _ in range(CUTS):
            pid = eventually(lambda: holder(stage), WAIT_S, stage.said)
            stage.scene.ask("select pg_terminate_backend(%s)", (pid,))
            eventually(lambda pid=pid: holder(stage) not in (None, pid), WAIT_S, stage.said)  # type: ignore[misc]
            stage.more()
    assert (stage.scene.claim().term, stage.scene.claim().lock_key) == (before.term, before.lock_key)
    eventually(stage.scene.consumed, WAIT_S, stage.said)
    server.stop()
    server.start()
    eventually(lambda: holder(stage), WAIT_S, stage.said)
    stage.scene.publish(500, first=load.acknowledged)
    assert (stage.scene.claim().term, stage.scene.claim().lock_key) == (before.term, before.lock_key)
    assert stage.verdict().explained == []
