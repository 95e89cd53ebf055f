"""Epochs stay whole, whoever dies: real consumers, nodes and publishers, killed and moved about."""

from __future__ import annotations

import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable

import pytest

from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.model.records import EPOCHS_CONSUMED, GroupOptions
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.integration.log_kit import everything
from tests.integration.sharing_kit import ALL, Stage
from tests.kit import WAIT_S, eventually

LAST = 24


class EpochLoad:
    """Two publishers that go through the epochs, each at its own pace, one epoch apart at most; then all are completed.

    `completed_at`: {epoch: when the first of them said that it has finished with it}: nothing of the epoch may be
    delivered before.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self.completed_at: dict[int, float] = {}
        self.failures: list[BaseException] = []
        self._lock = threading.Lock()
        self._both_here = threading.Barrier(2)
        self._threads = [threading.Thread(target=self._publish, args=(number,)) for number in range(2)]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        for thread in self._threads:
            thread.join()
        assert not self.failures

    @property
    def is_over(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)

    def _publish(self, number: int) -> None:
        try:
            with Publisher(self._url, space="default", block_messages=7) as publisher:
                publisher.advance(0)
                self._both_here.wait(WAIT_S)  # else the first completes epochs without the other
                for epoch in range(LAST):
                    for message in range(60):
                        late = epoch + message % 2  # half of them are in the next epoch already
                        publisher.in_epoch(late).publish("t", b"%d" % message, key=b"%d-%d" % (number, message))
                    with self._lock:
                        self.completed_at.setdefault(epoch, time.time())
                    publisher.advance(epoch + 1)
                publisher.advance(LAST + 1)
        except BaseException as error:  # noqa: BLE001 raised by `end`
            self.failures.append(error)


@pytest.fixture
def stage(stage: Stage) -> Stage:
    options = GroupOptions(starting_position=StartingPosition.parse("earliest"), atomic=True)
    stage.scene.store.declare_group(Subscription.parse(ALL), options)
    return stage


def kill_a_consumer(stage: Stage) -> None:
    stage.fleet.consumers["a"].kill()
    stage.fleet.consumer("c", ALL, 0.01)


def let_a_consumer_leave(stage: Stage) -> None:
    stage.fleet.consumers["a"].stop()


def add_a_consumer(stage: Stage) -> None:
    stage.fleet.consumer("c", ALL, 0.01)


def freeze_a_consumer(stage: Stage) -> None:
    consumer = stage.fleet.consumers["a"]
    consumer.signal(signal.SIGSTOP)
    eventually(lambda: any(line.is_forced for line in stage.scene.history()), WAIT_S)
    consumer.signal(signal.SIGCONT)


def kill_the_leader(stage: Stage) -> None:
    claim, leader = stage.leader()
    leader.kill()
    stage.next_leader(claim)


def change_the_streams(stage: Stage) -> None:
    with connect(stage.scene.url) as connection:
        reshard(connection, "default", 5)


@pytest.mark.conforms("S8", "S4")
@pytest.mark.long
@pytest.mark.parametrize(
    "trouble",
    [kill_a_consumer, let_a_consumer_leave, add_a_consumer, freeze_a_consumer, kill_the_leader, change_the_streams],
)
def test_epochs_stay_entire_and_are_announced_once(stage: Stage, trouble: Callable[[Stage], None]) -> None:
    stage.serve("n1", "n2")
    stage.share("a", "b")
    load = EpochLoad(stage.scene.url)
    stage.more(30)
    trouble(stage)
    load.end()
    verdict = stage.verdict()
    if trouble in (let_a_consumer_leave, add_a_consumer, kill_the_leader, change_the_streams):
        assert verdict.explained == [], "nothing was forced"
    _check_epochs(stage, load)


def _check_epochs(stage: Stage, load: EpochLoad) -> None:
    with connect(stage.scene.url) as connection:
        messages = everything(connection)
    epochs = {(stream, row["offset"]): row["epoch"][0] for stream, rows in messages.items() for row in rows}
    parts: dict[tuple[int, int], set[int]] = defaultdict(set)
    for (stream, offset), epoch in epochs.items():
        parts[stream, epoch].add(offset)
    given: dict[tuple[int, int], dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
    for batch in stage.fleet.delivered():
        for offset in batch.offsets:
            epoch = epochs[batch.stream, offset]
            assert batch.at > load.completed_at.get(epoch, 0.0), f"epoch {epoch} was given out before it was completed"
            given[batch.stream, epoch][batch.grant].add(offset)
    for place, part in parts.items():
        assert part in given[place].values(), f"(stream, epoch) {place} was split"
    _check_announcements(stage, epochs)


def _check_announcements(stage: Stage, epochs: dict[tuple[int, int], int]) -> None:
    """History says each step of the frontier once, after all before it was delivered; as consumers are notified."""

    def steps() -> list[tuple[int, int]]:
        lines = [line for line in stage.scene.history() if line.event == EPOCHS_CONSUMED]
        return [(int(line.reason.rsplit(" ", 1)[1]), line.at_us) for line in lines]

    eventually(lambda: steps() and steps()[-1][0] == LAST + 1, WAIT_S, lambda: f"{steps()}{stage.said()}")
    frontiers = [frontier for frontier, _ in steps()]
    assert frontiers == sorted(set(frontiers)), "one was announced twice, or it went back"
    first: dict[tuple[int, int], float] = {}
    for batch in stage.fleet.delivered():
        for offset in batch.offsets:
            first.setdefault((batch.stream, offset), batch.at)
    for frontier, at_us in steps():
        late = [place for place, epoch in epochs.items() if epoch < frontier and first[place] > at_us / 1e6]
        assert late == [], f"{frontier} was announced before these were delivered"
    for name, process in stage.fleet.consumers.items():
        if process.alive:
            eventually(lambda name=name: stage.fleet.consumed(name)[-1] == [[LAST + 1]], WAIT_S)  # type: ignore[misc]
        reported = [least[0][0] for least in stage.fleet.consumed(name)]
        assert reported == sorted(set(reported))
        assert set(reported) <= set(frontiers)
