"""What a listener notices, and when it reads."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sublet_storage.notify import subscriber_machine as listener_module
from sublet_storage.notify.catch_up_scheduler import CatchUp, CatchUpCause
from sublet_storage.notify.changes import Change, Envelope, NotifySettings, PublisherHeartbeat, stream_change
from sublet_storage.notify.subscriber_machine import MAX_GAPS, SubscriberMachine
from sublet_storage.notify.subscriber_machine_events import (
    CatchUpCompleted,
    CatchUpRequested,
    Event,
    ListeningStarted,
    ListeningStopped,
    MalformedReceived,
    MessageReceived,
    SubscriberStarted,
    Tick,
    VersionAmbiguous,
)

SETTINGS = NotifySettings()
WINDOW = SETTINGS.gap_window_s


class Harness:
    """A listener whose catch-ups take no time."""

    def __init__(self, *, pushes: bool = True, channels: tuple[str, ...] = ("stream",)) -> None:
        self.machine = SubscriberMachine(SETTINGS, pushes=pushes, channels=channels)
        self.jitter = 0.0
        self.now = 0.0
        self.wake_at: float | None = None
        self.reads: list[tuple[float, frozenset[CatchUpCause]]] = []
        self.changes: list[Change] = []
        self.answers = True

    def do(self, *events: Event) -> None:
        for event in events:
            outcome = self.machine.decide(event, self.now, self.jitter)
            self.changes += outcome.changes
            self.wake_at = outcome.wake_at
            for catch_up in outcome.catch_ups:
                self.reads.append((round(self.now, 6), catch_up.causes))
                if self.answers:
                    self.do(CatchUpCompleted(catch_up.channel, True))

    def until(self, now: float) -> list[tuple[float, frozenset[CatchUpCause]]]:
        """Let time pass; the reads meanwhile."""
        before = len(self.reads)
        while self.wake_at is not None and self.wake_at <= now:
            assert self.wake_at >= self.now
            self.now = self.wake_at
            self.do(Tick())
        self.now = now
        return self.reads[before:]

    def receive(
        self, sequence: int, predecessor: int | None = None, publisher: str = "p", incarnation: str = "i"
    ) -> None:
        before = sequence - 1 if predecessor is None else predecessor
        change = stream_change(1, sequence, False)
        self.do(MessageReceived(Envelope(publisher, incarnation, "stream", sequence, before, (change,))))

    def hello(
        self, last: int | None = None, publisher: str = "p", incarnation: str = "i", leaving: bool = False
    ) -> None:
        self.do(
            MessageReceived(
                PublisherHeartbeat(publisher, incarnation, {} if last is None else {"stream": last}, leaving)
            )
        )

    @property
    def received(self) -> list[int]:
        return [change.version // 2 for change in self.changes]


def steady() -> Harness:
    """One publisher, known since its beginning, whose last message was number 1; at 10 s."""
    harness = Harness()
    harness.do(SubscriberStarted(), ListeningStarted())
    harness.hello()
    harness.until(9.0)
    harness.reads.clear()
    harness.hello()
    harness.until(10.0)
    harness.receive(1)
    return harness


@pytest.mark.conforms("D6")
def test_it_reads_once_it_listens() -> None:
    harness = Harness(channels=("stream", "space"))
    harness.do(SubscriberStarted())
    assert harness.reads == []
    harness.do(ListeningStarted())
    assert harness.reads == [(0.0, frozenset({CatchUpCause.CONNECTED}))] * 2


@pytest.mark.conforms("D6")
def test_it_reads_again_after_the_connection_was_lost() -> None:
    harness = steady()
    harness.jitter = 0.5
    harness.do(ListeningStopped(), ListeningStarted())
    assert harness.until(11.0) == [
        (10.0 + WINDOW + SETTINGS.catch_up_jitter_s / 2, frozenset({CatchUpCause.CONNECTED}))
    ]


@pytest.mark.conforms("D1", "D6")
def test_while_it_cannot_listen_it_polls() -> None:
    harness = Harness()
    harness.do(SubscriberStarted())
    assert [at for at, _ in harness.until(3.5)] == [1.0, 2.0, 3.0]
    harness.do(ListeningStarted())
    harness.until(10.0)
    harness.jitter = 0.5
    harness.do(ListeningStopped())
    assert [at for at, _ in harness.until(12.5)] == [10.5, 11.4, 12.3]


@pytest.mark.conforms("D1")
def test_with_a_driver_that_moves_nothing_it_polls() -> None:
    harness = Harness(pushes=False)
    harness.do(SubscriberStarted(), ListeningStarted())
    assert [at for at, _ in harness.until(3.5)] == [1.0, 2.0, 3.0]
    assert harness.reads[0] == (0.0, frozenset({CatchUpCause.CONNECTED}))


def test_with_push_it_reads_now_and_then() -> None:
    harness = Harness()
    harness.do(SubscriberStarted(), ListeningStarted())
    assert harness.until(65.0) == [
        (30.0, frozenset({CatchUpCause.PERIODIC})),
        (60.0, frozenset({CatchUpCause.PERIODIC})),
    ]


@pytest.mark.conforms("D3")
def test_successors_are_handed_on_and_nothing_is_read() -> None:
    harness = steady()
    for sequence in (2, 3, 4):
        harness.receive(sequence)
    assert harness.received == [1, 2, 3, 4]
    assert harness.until(14.0) == []


@pytest.mark.conforms("D4")
def test_a_gap_is_read_once_after_the_window() -> None:
    harness = steady()
    harness.receive(3)
    assert harness.received == [1, 3], "what came is not held back"
    assert harness.until(10.0 + WINDOW - 0.001) == []
    assert harness.until(14.0) == [(10.0 + WINDOW, frozenset({CatchUpCause.GAP}))]
    counters = harness.machine.counters
    assert (counters.gaps, counters.filled_gaps, counters.expired_gaps) == (1, 0, 1)


@pytest.mark.conforms("D4")
def test_a_gap_filled_in_the_window_is_not_read() -> None:
    harness = steady()
    harness.receive(5)
    harness.until(10.1)
    for sequence in (3, 2, 4):
        harness.receive(sequence)
    assert harness.received == [1, 5, 3, 2, 4]
    assert harness.until(14.0) == []
    counters = harness.machine.counters
    assert (counters.gaps, counters.filled_gaps, counters.expired_gaps, counters.duplicates) == (1, 1, 0, 0)


@pytest.mark.conforms("D4")
def test_a_gap_filled_in_part_is_read() -> None:
    harness = steady()
    harness.receive(4)
    harness.receive(2)
    assert harness.until(14.0) == [(10.2, frozenset({CatchUpCause.GAP}))]


@pytest.mark.conforms("D4")
def test_the_predecessor_counts_not_the_number() -> None:
    harness = steady()
    harness.receive(7, predecessor=1)
    harness.receive(9, predecessor=8)
    harness.receive(8, predecessor=7)
    assert harness.until(14.0) == []


@pytest.mark.conforms("D7")
def test_twice_or_too_late_is_not_handed_on() -> None:
    harness = steady()
    harness.receive(1)
    harness.receive(3)
    harness.until(11.0)
    harness.receive(2)
    assert harness.received == [1, 3]
    assert harness.machine.counters.duplicates == 2


@pytest.mark.conforms("D5")
def test_a_hello_shows_what_was_lost_before_it() -> None:
    harness = steady()
    harness.until(10.0 + SETTINGS.hello_interval_s)
    harness.hello(2)
    assert harness.until(19.0) == [(15.0 + WINDOW, frozenset({CatchUpCause.GAP}))]


@pytest.mark.conforms("D5")
def test_an_early_hello_is_no_loss() -> None:
    harness = steady()
    harness.hello(2)
    harness.receive(2)
    assert harness.received == [1, 2]
    assert harness.until(14.0) == []


@pytest.mark.conforms("D5")
def test_a_silent_publisher_is_read_for_once() -> None:
    harness = steady()
    assert harness.until(29.0) == [(10.0 + SETTINGS.publisher_timeout_s, frozenset({CatchUpCause.PUBLISHER_TIMEOUT}))]
    assert harness.machine.publishers == 1
    harness.until(10.0 + SETTINGS.publisher_expiry_s)
    assert (harness.machine.publishers, harness.machine.counters.expired_publishers) == (0, 1)
    assert harness.machine.counters.publisher_timeouts == 2  # the other was before its first message


def test_a_publisher_that_took_its_leave_is_not_missed() -> None:
    harness = steady()
    harness.hello(1, leaving=True)
    assert harness.until(29.0) == []
    harness.until(10.0 + SETTINGS.publisher_expiry_s)
    assert harness.machine.publishers == 0


def test_what_a_leaving_publisher_sent_is_missed() -> None:
    harness = steady()
    harness.hello(2, leaving=True)
    assert harness.until(29.0) == [(10.0 + WINDOW, frozenset({CatchUpCause.GAP}))]


@pytest.mark.conforms("D6")
def test_a_restart_is_read_for_on_every_channel() -> None:
    harness = Harness(channels=("stream", "space"))
    harness.do(SubscriberStarted(), ListeningStarted())
    harness.hello(5)
    harness.until(4.0)
    harness.reads.clear()
    harness.hello(incarnation="j")
    assert harness.until(6.0) == [(4.0 + WINDOW, frozenset({CatchUpCause.RESTARTED}))] * 2
    assert harness.machine.counters.restarts == 1
    harness.receive(1, incarnation="j")
    assert harness.received == [1]
    assert harness.until(9.0) == []


@pytest.mark.conforms("D6")
def test_a_publisher_that_was_not_known_is_read_for() -> None:
    harness = steady()
    harness.receive(7, publisher="q")
    assert harness.received == [1, 7]
    assert harness.until(14.0) == [(10.2, frozenset({CatchUpCause.NEW_PUBLISHER}))]


@pytest.mark.conforms("D6")
def test_a_channel_with_an_unknown_past_is_read() -> None:
    harness = Harness(channels=("stream", "space"))
    harness.do(SubscriberStarted(), ListeningStarted())
    harness.do(MessageReceived(Envelope("p", "i", "space", 1, 0, ())))
    harness.until(3.0)
    harness.reads.clear()
    harness.receive(5)
    assert harness.until(5.0) == [(3.2, frozenset({CatchUpCause.NEW_PUBLISHER}))]


def test_after_a_hello_a_channel_begins_at_one() -> None:
    harness = steady()
    harness.hello(publisher="q")
    harness.until(11.0)
    harness.reads.clear()
    harness.receive(2, publisher="q")
    assert harness.until(14.0) == [(11.2, frozenset({CatchUpCause.GAP}))]


@pytest.mark.conforms("D9")
def test_reads_are_put_off_and_not_dropped() -> None:
    harness = steady()
    for step in range(10):
        harness.until(10.0 + 0.1 * step)
        harness.receive(2 * step + 3)
    every = SETTINGS.catch_up_min_interval_s
    harness.until(16.0)
    assert [at for at, _ in harness.reads] == pytest.approx([10.2, 10.2 + every, 10.2 + 2 * every])
    assert harness.machine.counters.expired_gaps == 10
    assert harness.machine.catch_ups.deferred >= 8


@pytest.mark.conforms("D9")
def test_a_gap_during_a_read_is_read_after_it() -> None:
    harness = steady()
    harness.answers = False
    harness.receive(3)
    harness.until(10.3)
    harness.receive(5)
    assert harness.until(12.0) == []
    harness.do(CatchUpCompleted("stream", True))
    assert harness.reads[-1] == (12.0, frozenset({CatchUpCause.GAP}))


@pytest.mark.conforms("D9")
def test_a_failed_read_is_tried_again() -> None:
    harness = steady()
    harness.answers = False
    harness.receive(3)
    harness.until(10.2)
    harness.do(CatchUpCompleted("stream", False))
    assert harness.until(14.0) == [(10.7, frozenset({CatchUpCause.RETRY}))]


@pytest.mark.conforms("D9")
@pytest.mark.parametrize("loses", ["the publisher", "the connection"])
def test_a_thousand_spread_their_reads(loses: str) -> None:
    chance, reads = random.Random(1), []
    for _ in range(1000):
        harness = steady()
        harness.jitter = chance.random()
        if loses == "the connection":
            harness.do(ListeningStopped(), ListeningStarted())
        harness.until(10.0 + SETTINGS.publisher_timeout_s - 0.1 if loses == "the publisher" else 10.0)
        harness.jitter = chance.random()
        (at,) = [
            at
            for at, causes in harness.until(16.5)
            if causes & {CatchUpCause.PUBLISHER_TIMEOUT, CatchUpCause.CONNECTED}
        ][:1]
        reads.append(at)
    assert max(reads) - min(reads) == pytest.approx(SETTINGS.catch_up_jitter_s, rel=0.05)
    in_each_tenth = Counter(int((at - min(reads)) / SETTINGS.catch_up_jitter_s * 10) for at in reads)
    assert max(in_each_tenth.values()) < 150


def test_doubts_and_wishes_are_read_for() -> None:
    harness = steady()
    harness.do(CatchUpRequested("stream"), CatchUpRequested("unheard of"))
    assert harness.reads == [(10.0, frozenset({CatchUpCause.REQUESTED}))]
    harness.do(VersionAmbiguous("stream"))
    assert harness.until(14.0) == [(10.5, frozenset({CatchUpCause.AMBIGUOUS_VERSION}))]


def test_a_later_gap_needs_a_later_read() -> None:
    harness = steady()
    harness.receive(1, publisher="q")
    harness.until(10.1)
    harness.receive(1, publisher="r")
    at = [at for at, _ in harness.until(14.0)]
    assert at == pytest.approx([10.2, 10.7]), "the second was seen at 10.1, and is owed a read from 10.3 on"


def test_another_channel_is_a_sign_of_life() -> None:
    harness = steady()
    harness.until(14.0)
    harness.do(MessageReceived(Envelope("p", "i", "weather", 9, 3, (Change("weather", "a", 1),))))
    harness.do(MessageReceived(PublisherHeartbeat("p", "i", {"weather": 20, "stream": 1})))
    assert harness.received == [1]
    assert harness.until(18.0) == []


def test_what_is_no_message_is_counted() -> None:
    harness = steady()
    harness.do(MalformedReceived())
    assert harness.machine.counters.malformed == 1
    assert harness.until(14.0) == []


def test_what_it_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_PUBLISHERS", 10)
    harness = steady()
    for number in range(30):
        harness.hello(publisher=str(number))
    assert harness.machine.publishers == 10
    for sequence in range(3, 1000, 2):
        harness.receive(sequence, publisher="29")
    assert (harness.machine.counters.gaps, harness.machine.counters.expired_gaps) == (499, 499 - MAX_GAPS)


def test_a_catch_up_says_what_it_is_for() -> None:
    machine = SubscriberMachine(SETTINGS, pushes=True, channels=("stream",))
    machine.decide(SubscriberStarted(), 0.0, 0.0)
    assert machine.decide(ListeningStarted(), 0.0, 0.0).catch_ups == (
        CatchUp("stream", frozenset({CatchUpCause.CONNECTED})),
    )
    assert machine.catch_ups.counts_by_cause == {CatchUpCause.CONNECTED: 1}
