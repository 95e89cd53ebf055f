"""Micro-batches of whole epochs: an epoch is in one batch with all its messages, whoever dies in between."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from sublet_protocol.domain.errors import InvalidSetting
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.admin.admin import create_group
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.integration.log_kit import Connection
from tests.integration.query_kit import Checkpoint, Start
from tests.kit import eventually
from tests.kit_nodes import Fleet

OF_EACH = 12


@pytest.fixture(autouse=True)
def _atomic_group(database: str, fleet: Fleet, conn: Connection) -> None:
    create_group(database, Subscription.parse("$share/g/#"), GroupOptions(StartingPosition.EARLIEST, atomic=True))


@pytest.fixture
def publisher(database: str) -> Iterator[Publisher]:
    with Publisher(database, space="default", block_messages=3) as publisher:
        yield publisher


def publish(publisher: Publisher, epoch: int, advance: bool = True) -> None:
    """An epoch's messages under many keys, and some without an epoch."""
    for number in range(OF_EACH):
        publisher.in_epoch(epoch).publish("t", b"%d" % epoch, key=b"k%d" % number)
    publisher.publish("t", b"-", key=b"k%d" % epoch)
    if advance:
        publisher.advance(epoch + 1)


def batches(checkpoint: Checkpoint) -> list[Counter[bytes]]:
    """Return the messages of each batch in the sink, by epoch."""
    return [Counter(value for _, _, value in rows) for _, rows in sorted(checkpoint.sink.items())]


def are_complete(checkpoint: Checkpoint, epochs: int) -> None:
    """Each epoch is in one batch with all its messages."""
    seen = [epoch for batch in batches(checkpoint) for epoch in batch if epoch != b"-"]
    assert sorted(seen) == sorted(b"%d" % epoch for epoch in range(epochs))
    assert all(count == OF_EACH for batch in batches(checkpoint) for epoch, count in batch.items() if epoch != b"-")


def consumed(conn: Connection) -> Any:
    return conn.execute("select least from consumed_frontier").fetchone()


@pytest.mark.conforms("S11", "S8")
def test_a_batch_has_entire_epochs_of_all_streams(start: Start, publisher: Publisher, conn: Connection) -> None:
    """It has none that is open."""
    checkpoint = Checkpoint()
    run = start(checkpoint, wholeEpochs=True)
    publish(publisher, 0)
    publish(publisher, 1, advance=False)
    publisher.flush()
    run.until(OF_EACH + 1)
    for _ in range(5):
        run.step()
    are_complete(checkpoint, 1)
    publisher.advance(2)
    publish(publisher, 2)
    run.until(3 * OF_EACH + 3)
    are_complete(checkpoint, 3)
    eventually(lambda: [run.step(), consumed(conn) == ([[3]],)][1], 20.0, lambda: str(consumed(conn)))


@pytest.mark.conforms("S11")
@pytest.mark.parametrize(("option", "most"), [("maxOffsetsPerTrigger", 30), ("maxBytesPerTrigger", 1)])
@pytest.mark.long
def test_a_limit_divides_between_epochs(start: Start, publisher: Publisher, option: str, most: int) -> None:
    checkpoint = Checkpoint()
    for epoch in range(8):
        publish(publisher, epoch)
    publisher.flush()
    run = start(checkpoint, **{option: most})
    run.until(8 * (OF_EACH + 1))
    are_complete(checkpoint, 8)
    per_batch = [sum(epoch != b"-" for epoch in batch) for batch in batches(checkpoint)]
    assert max(per_batch) <= 2
    assert sum(count > 0 for count in per_batch) >= 4


@pytest.mark.conforms("S11", "S8", "E27")
@pytest.mark.parametrize("point", ["logged", "read", "sunk"])
@pytest.mark.long
def test_a_batch_done_again_has_the_same_epochs(
    database: str, start: Start, publisher: Publisher, conn: Connection, point: str
) -> None:
    checkpoint = Checkpoint()
    for epoch in range(6):
        publish(publisher, epoch)
        if epoch == 2:
            reshard(conn, "default", 3)
    publisher.flush()
    for life in range(3):
        start(checkpoint, inDoubtTimeout=60, maxOffsetsPerTrigger=30).until_dead(point)
        publish(publisher, 6 + life)
    start(checkpoint, inDoubtTimeout=60, maxOffsetsPerTrigger=30).until(9 * (OF_EACH + 1))
    seen: dict[int, Any] = {}
    for number, rows in checkpoint.runs:
        assert seen.setdefault(number, rows) == rows
    places: dict[tuple[bytes, int], set[int]] = {}
    for number, rows in checkpoint.sink.items():
        for stream, _, value in rows:
            places.setdefault((value, stream), set()).add(number)
    assert all(len(numbers) == 1 for (value, _), numbers in places.items() if value != b"-"), "of a stream it is whole"
    counts = Counter(value for rows in checkpoint.sink.values() for _, _, value in rows)
    assert counts == {b"-": 9, **{b"%d" % epoch: OF_EACH for epoch in range(9)}}


@pytest.mark.conforms("S11")
def test_available_now_gives_out_what_was_there(start: Start, publisher: Publisher) -> None:
    """It gives out no more, and ends though an epoch is open."""
    checkpoint = Checkpoint()
    for epoch in range(3):
        publish(publisher, epoch)
    publish(publisher, 3, advance=False)
    publisher.flush()
    run = start(checkpoint, maxOffsetsPerTrigger=1)
    run.reader.prepareForTriggerAvailableNow()
    while run.step():
        publisher.publish("t", b"later", key=b"k0")
        publish(publisher, 2 + len(checkpoint.offsets))
        publisher.flush()
    are_complete(checkpoint, 3)
    assert b"later" not in checkpoint.values()


def test_a_group_that_is_not_atomic_is_refused(start: Start, publisher: Publisher) -> None:
    run = start(subscription="$share/other/#", wholeEpochs=True)
    with pytest.raises(InvalidSetting, match="option wholeEpochs is true, and the group of \\$share/other/# is not at"):
        eventually(lambda: run.step() and False, 20.0)
