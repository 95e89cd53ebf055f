"""What a node's log says while the database is away: every request fails then, many times a second."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator

import pytest

from sublet_leader.node import database_worker
from sublet_leader.node.database_worker import DatabaseWorker
from sublet_leader.node.events import (
    ClaimLeadership,
    CommitWrites,
    DatabaseRequest,
    FindOrCreateGroup,
    LeadershipClaimCompleted,
    LeadershipRenewalCompleted,
    LoadGroup,
    LookUpLeader,
    NodeEvent,
    ReadSessionEpoch,
    ReleaseLeaderships,
    RenewLeaderships,
)
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import Group, StartingPosition
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.util.log_throttle import LogThrottle

GROUP = Subscription.parse("$share/g/#")
NOBODY = "postgresql://me@127.0.0.1:1/x"
RENEW, CLAIM = RenewLeaderships({1: 1}, 0.0), ClaimLeadership(1, 0.0)


class Away:
    """Runs a worker whose database does not answer, and collects the worker's answers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(database_worker, "LogThrottle", lambda: LogThrottle(10.0, lambda: self.now))
        self.answers: queue.SimpleQueue[NodeEvent] = queue.SimpleQueue()
        self.store = PostgresGroupStore(NOBODY)
        self.worker = DatabaseWorker(self.store, NodeIncarnation("n", "i", "a:1"), LeaderSettings(), self.answers.put)

    def ask(self, *requests: DatabaseRequest) -> list[NodeEvent]:
        """Submit the requests; return their answers."""
        for request in requests:
            self.worker.submit(request)
        return [self.answers.get(timeout=30) for _ in requests]


@pytest.fixture
def away(monkeypatch: pytest.MonkeyPatch) -> Iterator[Away]:
    """Yield a node's worker that ends with the test."""
    away = Away(monkeypatch)
    away.worker.start()
    yield away
    away.worker.stop(10)
    away.store.close()


def test_a_database_away_is_logged_now_and_then(away: Away, caplog: pytest.LogCaptureFixture) -> None:
    """For each kind of request."""
    caplog.set_level(logging.WARNING, "sublet_leader.node.database_worker")
    answers = away.ask(*[RENEW] * 30, *[CLAIM] * 20)
    assert answers.count(LeadershipRenewalCompleted(RENEW, None)) == 30
    assert sum(isinstance(answer, LeadershipClaimCompleted) and answer.leadership is None for answer in answers) == 20
    reported = [record.getMessage() for record in caplog.records]
    assert [text.split(": ")[1] for text in reported] == ["request=RenewLeaderships", "request=ClaimLeadership"]
    assert all("cannot connect to me@127.0.0.1:1/x" in text for text in reported)
    caplog.clear()
    away.now += 10.0
    away.ask(RENEW, RENEW)
    (record,) = caplog.records
    assert record.getMessage().startswith("database request failed: request=RenewLeaderships: cannot connect")
    assert record.getMessage().endswith(" (29 similar suppressed)")


def test_what_nobody_foresaw_has_its_traceback(
    away: Away, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def surprise(*_: object) -> None:
        raise LookupError("a surprise")

    monkeypatch.setattr(away.store, "renew", surprise)
    assert away.ask(*[RENEW] * 5) == [LeadershipRenewalCompleted(RENEW, None)] * 5, "the worker goes on"
    (record,) = caplog.records
    reported = (logging.ERROR, "database request failed: request=RenewLeaderships: a surprise")
    assert (record.levelno, record.getMessage()) == reported
    assert record.exc_info
    assert len(away.ask(CLAIM)) == 1


@pytest.mark.conforms("X4")
def test_what_strangers_ask_waits_for_led_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Renewals go first; within what led groups need, and within the rest, the order stays."""
    away = Away(monkeypatch)
    asked = (ReadSessionEpoch(GROUP, "etl"), FindOrCreateGroup(GROUP, StartingPosition.LATEST), LookUpLeader(GROUP))
    needed = (CommitWrites(()), LoadGroup(Group(1, GROUP), 1), CLAIM, ReleaseLeaderships({1: 1}), CommitWrites(()))
    for request in (*asked, *needed, RENEW):
        away.worker.submit(request)
    away.worker.start()
    away.worker.stop(30)
    away.store.close()
    answers = [away.answers.get(timeout=30) for _ in range(9)]
    assert [getattr(answer, "request") for answer in answers] == [RENEW, *needed, *asked]  # noqa: B009 all have one
