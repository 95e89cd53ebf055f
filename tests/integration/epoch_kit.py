"""What the tests of whole epochs share: publishing in epochs by hand, and judging what a reader was given."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.log.append import AppendOutcome, BlockAppend, ProducerIdentity, ProducerStamp, append
from sublet_storage.log.epoch_leases import hold
from sublet_storage.readers.complete_epoch_tail import EpochTailItem, EpochTailMessages, FrontierSnapshot
from sublet_storage.spaces.space_queries import find_space
from tests.integration.log_kit import Connection, in_epochs
from tests.support.streams import open_streams

A, B = ProducerIdentity("a", 1), ProducerIdentity("b", 1)
ALL = TopicFilter("#")


class EpochBlocks:
    """Blocks in epochs, published by hand."""

    def __init__(self, conn: Connection, space: str = "default") -> None:
        self.conn, self.space = conn, find_space(conn, space).space_id
        self._stamps: Counter[str] = Counter()

    def publish(self, who: ProducerIdentity, *of: Epoch | int, stream: int = 0) -> None:
        """A block with a message in each of these epochs, in the space's stream of that place."""
        self._stamps[who.producer_id] += 1
        stamp = ProducerStamp(who.producer_id, who.incarnation, self._stamps[who.producer_id])
        block = in_epochs(*((each,) if isinstance(each, int) else each for each in of))
        (answer,) = append(self.conn, [BlockAppend(self.streams()[stream], block, stamp)])
        assert answer.outcome is AppendOutcome.APPENDED, answer

    def streams(self) -> list[int]:
        """Those that are open, in the order of ids."""
        return [each.stream_id for each in open_streams(self.conn) if each.space_id == self.space]

    def advance(self, who: ProducerIdentity, *to: Epoch | int) -> None:
        """Move, or take, the producer's capability."""
        hold(self.conn, self.space, who, [(each,) if isinstance(each, int) else each for each in to], lease_s=600)

    def three_and_five(self) -> None:
        """Completed 0, 1, 2; active 3 and 5; in both streams."""
        self.advance(A, 0)
        self.publish(A, 0, 1)
        self.publish(A, 2, 5, stream=1)
        self.publish(A, 3)
        self.advance(A, 3)

    def the_rest(self) -> None:
        """More of what was active, then what comes."""
        self.publish(A, 3, 4, 5, 6)
        self.publish(A, 5, 7, stream=1)
        self.advance(A, 6)
        self.publish(A, 6, 8)
        self.advance(A, 9)


def seen(messages: Iterable[EpochTailItem]) -> Counter[Epoch | None]:
    """Return {epoch: number of its messages}."""
    found: Counter[Epoch | None] = Counter()
    for message in messages:
        if isinstance(message, EpochTailMessages):
            found.update(None if epoch is None else tuple(epoch) for epoch in message.table.column("epoch").to_pylist())
    return found


def numbers(counted: Counter[Epoch | None]) -> dict[int | None, int]:
    """Return `seen` with the numbers of one-dimensional epochs as keys."""
    return {None if epoch is None else epoch[0]: count for epoch, count in counted.items()}


def reported(messages: Iterable[EpochTailItem]) -> list[tuple[Epoch, ...]]:
    """The lower frontiers, in their order."""
    return [message.least for message in messages if isinstance(message, LowerFrontier)]


def check_course(messages: list[EpochTailItem]) -> None:
    """The snapshot first and once; frontiers move on only; nothing of an epoch comes after it was completed."""
    assert isinstance(messages[0], FrontierSnapshot)
    assert not any(isinstance(each, FrontierSnapshot) for each in messages[1:])
    lower = messages[0].lower
    for message in messages[1:]:
        if isinstance(message, LowerFrontier):
            assert lower is None or (lower != message and lower.is_at_or_before(message))
            lower = message
        elif lower is not None:
            assert all(epoch is None or lower.admits(epoch) for epoch in seen([message]))
