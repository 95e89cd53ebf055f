"""The queue between those who publish and the sender: which advances are due with what was taken."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.errors import SubletError
from sublet_protocol.domain.topics import Filter
from sublet_storage.producer import buffer as module
from sublet_storage.producer.batches.pending_blocks import Load
from sublet_storage.producer.batches.routing_table import Routes
from sublet_storage.producer.buffer import Buffer, Limits
from sublet_storage.spaces.routing import Space, StreamInfo, ranges

ONE_MESSAGE = Limits(block_messages=1, block_bytes=1 << 20, blocks_per_commit=1, buffered_bytes=1 << 20, linger_s=0.0)


@pytest.fixture
def buffer(monkeypatch: pytest.MonkeyPatch) -> Buffer:
    """Of a space of one stream; each message is a load of its own, and the pause between two advances is a day."""
    monkeypatch.setattr(module, "ADVANCE_PAUSE_S", 86_400.0)
    return a_buffer(ONE_MESSAGE)


def a_buffer(limits: Limits) -> Buffer:
    ((low, high),) = ranges(1)
    streams = [StreamInfo(1, 1, 1, low, high, 0, False)]
    return Buffer(Routes([Space(1, "default", Filter("#"), 1)], streams, None), limits)


def publish_in(buffer: Buffer, *epochs: int) -> None:
    """A message in each, and an advance behind it."""
    for epoch in epochs:
        buffer.add("t", None, b"", None, 0, (epoch,))
        buffer.advance([(epoch + 1,)])


def send(buffer: Buffer) -> int | None:
    """As the sender does: the epoch that is advanced to with the next load, if one is."""
    loads = buffer.take()
    assert loads is not None
    least = buffer.due(loads)
    settle(buffer, loads)
    if least is None:
        return None
    buffer.advanced(least)
    return least[0][0]


def settle(buffer: Buffer, loads: list[Load]) -> None:
    for load in loads:
        load.stored(0)
    buffer.settled(loads)


def test_under_load_an_advance_that_nobody_waits_for_waits_for_the_next(buffer: Buffer) -> None:
    publish_in(buffer, 1, 2, 3, 4)
    assert [send(buffer) for _ in range(4)] == [2, None, None, 5], (
        "the last has nothing behind it that it could wait for"
    )
    assert not buffer._advances


def test_an_advance_comes_alone_if_what_came_before_it_is_stored(buffer: Buffer) -> None:
    publish_in(buffer, 1)
    assert send(buffer) == 2
    buffer.advance([(3,)])
    assert send(buffer) == 3


def test_an_advance_waits_for_no_message_that_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ADVANCE_PAUSE_S", 86_400.0)
    buffer = a_buffer(Limits(2, 1 << 20, blocks_per_commit=1, buffered_bytes=1 << 20, linger_s=86_400.0))
    publish_in(buffer, 1)
    buffer.add("t", None, b"", None, 0, (2,))
    assert send(buffer) == 2
    publish_in(buffer, 2)
    for value in (b"fills the block", b"the next of its block may come in a day"):
        buffer.add("t", None, value, None, 0, (3,))
    assert send(buffer) == 3


def test_an_advance_that_was_put_off_is_made_though_something_later_fails(buffer: Buffer) -> None:
    publish_in(buffer, 1, 2, 3)
    assert [send(buffer) for _ in range(2)] == [2, None]
    lost = SubletError("it is lost")
    loads = buffer.take()
    assert loads is not None
    buffer.failed(loads, lost)
    assert buffer.take() == []
    least = buffer.due([])
    assert least == [(3,)], "the advance behind what was lost is given up"
    buffer.advanced(least)
    assert not buffer._advances
    assert buffer.pop_error() is lost


def test_an_advance_that_cannot_be_made_takes_all_with_it(buffer: Buffer) -> None:
    publish_in(buffer, 1)
    assert send(buffer) == 2
    buffer.advance([(3,)])
    publish_in(buffer, 3)
    buffer.failed([], SubletError("refused"))
    assert not buffer._advances


def test_the_first_failure_is_known_before_anybody_is_woken_by_it(
    buffer: Buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who flushes is woken by the last ticket, and asks at once."""
    publish_in(buffer, 1)
    loads, lost = buffer.take(), SubletError("it is lost")
    assert loads is not None
    known: list[Exception | None] = []
    monkeypatch.setattr(Load, "failed", lambda load, error: known.append(buffer.pop_error()))
    buffer.failed(loads, lost)
    assert known == [lost]


def test_whoever_flushes_waits_for_no_other_advance(buffer: Buffer) -> None:
    publish_in(buffer, 1, 2, 3)
    buffer._flushing += 1
    assert [send(buffer) for _ in range(3)] == [2, 3, 4]
