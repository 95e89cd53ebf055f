"""The shell that asks the log where streams end, where it must."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from sublet_borrower.new_data.head_poll_scheduler import HeadPushed, HeadSubscriptionId
from sublet_borrower.new_data.monitor import NewDataMonitor
from tests.kit import eventually


class Streams:
    """One stream, which is read up to `read`, and whose log ends at `head`."""

    def __init__(self) -> None:
        self.read, self.head, self.hinted, self.polls = 10, 10, 0, 0

    def caught_up_streams(self) -> dict[int, tuple[int, int]]:
        return {7: (50, self.read)}

    def update_heads(self, heads: Iterable[tuple[int, int]]) -> None:
        self.read = dict(heads)[7]

    def hint_heads(self, heads: Iterable[tuple[int, int]]) -> None:
        self.hinted = dict(heads).get(7, self.hinted)

    def read_heads(self, stream_ids: Iterable[int]) -> list[tuple[int, int]]:
        self.polls += 1
        return [(stream_id, self.head) for stream_id in stream_ids]


@pytest.mark.conforms("P11")
def test_what_is_pushed_is_read_without_a_poll() -> None:
    streams, subscriptions = Streams(), list[HeadSubscriptionId]()
    monitor = NewDataMonitor(streams, streams.read_heads, subscriptions.append, lambda _: None)
    assert not monitor.poll()
    for head in (11, 12, 20):
        monitor.on_head_pushed(HeadPushed(subscriptions[-1], head))
        assert streams.hinted == head
        streams.read = head
    assert (streams.polls, monitor.counters.pushed, monitor.counters.polled) == (0, 3, 0)


def test_a_growing_stream_is_read_without_a_poll() -> None:
    """Where it ends then counts as if it had been polled."""
    streams = Streams()
    monitor = NewDataMonitor(streams, streams.read_heads, lambda _: None, lambda _: None)
    assert not monitor.poll()
    streams.head = 12
    eventually(monitor.poll)
    for head in (13, 14):
        eventually(monitor.poll)
        assert (streams.hinted, streams.polls) == (head, 1)
        streams.read = head
        monitor.on_read(7, head)
        assert monitor.counters.polled == head - 11
