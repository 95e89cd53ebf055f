"""Whole epochs in Spark's executors: each call of the user's function is given what a stream has of them, all of it."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from sublet_borrower.spark.job.consumption import Consumption
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.model.records import EPOCHS_CONSUMED, GroupOptions
from sublet_storage.producer import Publisher
from tests.kit import eventually
from tests.spark.stage import ALL, WAIT_S, Stage
from tests.spark.work import Recorder

pytestmark = pytest.mark.spark

EPOCHS, OF_EACH = 12, 200


def calls(stage: Stage) -> list[dict[str, Any]]:
    return [line for attempt in stage.attempts() for line in attempt.lines]


@pytest.mark.conforms("S11", "S8")
@pytest.mark.long
def test_calls_have_entire_epochs(stage: Stage, start: Callable[..., Consumption]) -> None:
    """Each call has all that its stream has of an epoch, also when a worker is killed."""
    options = GroupOptions(starting_position=StartingPosition.parse("earliest"), atomic=True)
    stage.store.declare_group(Subscription.parse(ALL), options)
    stage.serve("n1")
    running = start(Recorder(str(stage.records), pause_s=0.05), max_batch_bytes=1, whole_epochs=True)
    eventually(lambda: sorted(stage.holders().values()) == [8, 8], WAIT_S, lambda: str(stage.holders()))
    parts: Counter[tuple[int, int]] = Counter()
    with Publisher(stage.url, space="default", block_messages=5) as publisher:
        for epoch in range(EPOCHS):
            sent = [publisher.in_epoch(epoch).publish("t", b"%d" % n, key=b"k%d" % (n % 97)) for n in range(OF_EACH)]
            for delivery in sent:
                parts[delivery.result().stream, epoch] += 1
            publisher.advance(epoch + 1)
            if epoch == EPOCHS // 2:
                victim = eventually(lambda: [a for a in stage.attempts() if a.lines], WAIT_S)[0]
                os.kill(victim.pid, signal.SIGKILL)
    eventually(stage.consumed, WAIT_S, lambda: str(stage.lendings()))
    running.drain()
    for call in calls(stage):
        for epoch, count in Counter(call["epochs"]).items():
            assert count == parts[call["stream"], epoch], f"a part of epoch {epoch}: {call}"
    seen = {(call["stream"], epoch) for call in calls(stage) for epoch in call["epochs"]}
    assert seen == set(parts)
    assert stage.verdict().lost == []
    (*_, last) = [line for line in stage.history() if line.event == EPOCHS_CONSUMED]
    assert last.reason.endswith(f"before {EPOCHS}")
