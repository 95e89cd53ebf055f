"""Consumers whose user does not come back: they give up what they have within the declared time, and say so."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import sys
import threading
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from sublet_borrower.consumer.async_session import AsyncSession
from sublet_borrower.consumer.group_membership import GroupMembership
from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.errors import GrantLost
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions, StartingPosition
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.integration.feed_kit import address_of
from tests.integration.log_kit import Connection, put, stream_of
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet

GROUP = "$share/g/#"
FAST = replace(BorrowerSettings().scaled(SPEED), read_timeout_s=30.0)
INTERVAL_S = 2.0


@pytest.fixture
def conn(fleet: Fleet, conn: Connection) -> Connection:
    """A database with one stream and one message in it, and a node."""
    address_of(fleet.nodes["n1"])
    reshard(conn, "default", 1)
    put(conn, stream_of(conn, "default"), b"one", topic="a")
    return conn


def opened(database: str, max_poll_interval_s: float) -> tuple[Session, Batch]:
    settings = replace(FAST, max_poll_interval_s=max_poll_interval_s)
    session = Session(GROUP, database, starting_position="earliest", settings=settings)
    batch = session.poll(WAIT_S)
    assert batch is not None
    return session, batch


def given_up(conn: Connection) -> list[tuple[str, int, int]]:
    return conn.execute(
        "select reason, position, redelivery_end from lending_history where event = 'release'"
    ).fetchall()


@pytest.mark.conforms("E36")
def test_a_user_who_is_away_loses_the_streams(
    conn: Connection, database: str, caplog: pytest.LogCaptureFixture
) -> None:
    session, batch = opened(database, INTERVAL_S)
    with session, Session(GROUP, database, settings=FAST) as other, caplog.at_level(logging.WARNING):
        again = other.poll(WAIT_S)
        assert again is not None
        assert (again.stream_id, again.first) == (batch.stream_id, batch.first)
        ((reason, position, until),) = given_up(conn)
        assert "has not come back for 2 s (max_poll_interval_s is 2)" in reason
        assert (position, until) == (0, 1), "what may be seen twice is reported"
        assert batch.is_lost
        with pytest.raises(GrantLost), batch.transaction():
            pass
        (said,) = [record.getMessage() for record in caplog.records if "max_poll_interval_s" in record.getMessage()]
        assert f"max poll interval exceeded, streams released: subscription={GROUP} " in said
        assert f"stream {batch.stream_id} from offset 0" in said
        other.close()
        mine = session.poll(WAIT_S)
        assert mine is None or mine.first >= again.first
        eventually(lambda: bool(session.assignment()) or session.poll(0.1), WAIT_S)


@pytest.mark.conforms("E36")
def test_a_callback_that_hangs_costs_the_streams(conn: Connection, database: str) -> None:
    """It is called within a poll, which goes on with what is granted to it anew."""
    with contextlib.closing(PostgresGroupStore(database)) as store:
        store.declare_group(Subscription.parse(GROUP), GroupOptions(StartingPosition.EARLIEST, atomic=True))
    with Publisher(database, space="default") as publisher:
        publisher.in_epoch(1).publish("a", b"two")
        publisher.advance(2)
    hung = list[object]()

    def hang(frontier: object) -> None:
        hung.append(frontier)
        if len(hung) == 1:
            eventually(lambda: bool(given_up(conn)), WAIT_S)

    settings = replace(FAST, max_poll_interval_s=INTERVAL_S)
    with Session(GROUP, database, on_epochs_consumed=hang, settings=settings) as session:
        values = list[object]()
        while len(values) < 2 or not hung:
            if (batch := session.poll(0.5)) is not None:
                values += batch.table.column("value").to_pylist()
        eventually(lambda: session.poll(0.1) is None and session.assignment(), WAIT_S)
    assert values == [b"one", b"two"]


@pytest.mark.conforms("E35", "E36")
def test_no_lost_batch_is_committed_with_its_successor(conn: Connection, database: str) -> None:
    """Its messages are in the batch that the same session was given anew."""
    settings = replace(FAST, max_poll_interval_s=INTERVAL_S)
    with Session(GROUP, database, starting_position="earliest", settings=settings, auto_ack=False) as session:
        lost = session.poll(WAIT_S)
        eventually(lambda: bool(given_up(conn)), WAIT_S)
        again = session.poll(WAIT_S)
        assert lost is not None
        assert again is not None
        assert (lost.first, lost.grant_id < again.grant_id) == (again.first, True)
        with pytest.raises(GrantLost), session.transaction(lost, again):
            pass
        with session.transaction(again):
            pass
    assert conn.execute("select max(position) from lending").fetchall() == [(1,)]


@pytest.mark.conforms("E36")
def test_a_user_may_come_back_as_it_is_given_up(
    conn: Connection, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It polls when its time is over, and before its streams are given up."""
    overdue, polls = threading.Event(), threading.Event()
    give_up, receive = GroupMembership.give_up, GroupMembership.receive

    def give_up_late(member: GroupMembership[Any], reason: str) -> None:
        overdue.set()
        assert polls.wait(WAIT_S)
        give_up(member, reason)

    def receive_and_signal(member: GroupMembership[Any], wait_s: float = 0.0) -> None:
        if overdue.is_set():
            polls.set()
        receive(member, wait_s)

    session, _ = opened(database, INTERVAL_S)
    with session:
        monkeypatch.setattr(GroupMembership, "give_up", give_up_late)
        monkeypatch.setattr(GroupMembership, "receive", receive_and_signal)
        assert overdue.wait(WAIT_S)
        put(conn, stream_of(conn, "default"), b"two", topic="a")
        assert session.poll(WAIT_S) is not None


@pytest.mark.conforms("E36")
def test_a_given_up_session_can_leave(conn: Connection, database: str) -> None:
    session, _ = opened(database, INTERVAL_S)
    with session:
        eventually(lambda: bool(given_up(conn)), WAIT_S)
        session.leave()
        assert session.poll(WAIT_S) is None
        assert session.is_closed


@pytest.mark.conforms("E36", "E28")
@pytest.mark.long
def test_a_user_who_waits_keeps_the_streams(conn: Connection, database: str) -> None:
    session, batch = opened(database, INTERVAL_S)
    with session:
        session.wait(1.5 * INTERVAL_S)
        batch.ack()
        assert session.poll(1.5 * INTERVAL_S) is None, "it waits, which is not to be away"
        assert session.assignment()
        assert given_up(conn) == []


@pytest.mark.conforms("E36")
@pytest.mark.parametrize("action", ["always", "error"])
def test_a_dropped_session_leaves_at_once(
    conn: Connection, database: str, monkeypatch: pytest.MonkeyPatch, action: Literal["always", "error"]
) -> None:
    """Also where its warning is raised, out of the garbage collector."""
    raised = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: raised.append(unraisable.exc_value))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter(action)
        session, batch = opened(database, 3600.0)
        del session, batch
        gc.collect()
        texts = [str(each.message) for each in caught] + [str(each) for each in raised]
    (said,) = [text for text in texts if "was dropped without being closed" in text]
    assert GROUP in said
    assert f"{Path(__file__).name}:" in said
    with Session(GROUP, database, settings=FAST) as other:
        assert other.poll(WAIT_S) is not None
    assert given_up(conn)[0] == ("its session was dropped without being closed", 0, 1)


@pytest.mark.conforms("E36")
def test_a_dropped_async_session_names_its_line(conn: Connection, database: str) -> None:
    async def drop() -> None:
        session = AsyncSession(GROUP, database, settings=FAST)
        await session.open()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        asyncio.run(drop())

        def texts() -> list[str]:
            gc.collect()
            return [str(each.message) for each in caught if "was dropped without being closed" in str(each.message)]

        (said,) = eventually(texts, WAIT_S)
    line = drop.__code__.co_firstlineno + 1
    assert f"an AsyncSession of {GROUP}, made at {__file__}:{line}, was dropped" in said
