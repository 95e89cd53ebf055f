"""A session whose user is in the middle of a batch: its other streams move, what it gives up is reported exactly."""

from __future__ import annotations

import contextlib

import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_storage.producer import Publisher
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED

SETTINGS = BorrowerSettings().scaled(SPEED)


@pytest.fixture
def stage(stage: Stage) -> Stage:
    stage.serve("n1")
    with Publisher(stage.scene.url) as publisher:
        for number in range(2000):
            publisher.publish("t", b"%d" % number, key=b"%d" % number)
    return stage


def first_batch(session: Session) -> Batch:
    batch = session.poll(WAIT_S)
    assert batch is not None
    return batch


@pytest.mark.conforms("E8")
def test_other_streams_move_while_a_call_runs(stage: Stage, database: str) -> None:
    with Session(ALL, database, starting_position="earliest", auto_ack=False, settings=SETTINGS) as session:
        batch = first_batch(session)
        stage.fleet.consumer("other", ALL)
        eventually(lambda: stage.scene.shares() == [8, 8], WAIT_S, lambda: f"{stage.scene.rows()}{stage.said()}")
        assert len(session.assignment()) == 8
        batch.ack()
    eventually(stage.scene.consumed, WAIT_S, stage.said)
    assert not any(line.is_forced for line in stage.scene.history())


@pytest.mark.conforms("E8", "E11")
@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_an_error_leaves_undone_is_announced(stage: Stage, database: str, error: type[BaseException]) -> None:
    with (
        contextlib.suppress(error),
        Session(ALL, database, starting_position="earliest", settings=SETTINGS) as session,
    ):
        batch = first_batch(session)
        batch.ack(batch.first + 3)
        raise error
    (forced,) = [line for line in stage.scene.history() if line.is_forced]
    assert (forced.event, forced.stream_id, forced.grant_id) == ("release", batch.stream_id, batch.grant_id)
    assert (forced.position, forced.redelivery_end) == (batch.first + 3, batch.end)
    assert forced.reason == "left in the middle of a batch"


@pytest.mark.conforms("E8", "E37")
def test_a_break_announces_nothing(stage: Stage, database: str) -> None:
    with Session(ALL, database, starting_position="earliest", settings=SETTINGS) as session:
        for batch in session:  # noqa: B007 used behind it
            break
    assert not [line for line in stage.scene.history() if line.is_forced]
    assert (batch.stream_id, batch.end) in [(stream, position) for stream, _, position, _ in stage.scene.rows()]
