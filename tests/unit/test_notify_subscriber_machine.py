"""What a listener notices, and when it reads."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from sublet_protocol.tick import Tick
from sublet_storage.notify import subscriber_machine as listener_module
from sublet_storage.notify.catch_up_scheduler import CatchUpCause, CatchUpScheduler
from sublet_storage.notify.changes import (
    ChangeNotification,
    NotificationHeartbeat,
    NotifySettings,
    ObjectChange,
    stream_change,
)
from sublet_storage.notify.subscriber_machine import MAX_GAPS, NotificationSubscriberMachine
from sublet_storage.notify.subscriber_machine_events import (
    CatchUpCompleted,
    CatchUpRequested,
    ChangeOrderUnknown,
    Event,
    ListeningStarted,
    ListeningStopped,
    MalformedNotificationReceived,
    NotificationReceived,
    SubscriberStarted,
)

SETTINGS = NotifySettings()
WINDOW = SETTINGS.gap_window_s


class Harness:
    """A listener whose catch-ups take no time."""

    def __init__(self, *, pushes: bool = True, channels: tuple[str, ...] = ("stream",)) -> None:
        self.machine = NotificationSubscriberMachine(SETTINGS, pushes=pushes, channels=channels)
        self.jitter = 0.0
        self.now = 0.0
        self.wake_at: float | None = None
        self.reads: list[tuple[float, frozenset[CatchUpCause]]] = []
        self.changes: list[ObjectChange] = []
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

    @property
    def received(self) -> list[int]:
        return [change.version // 2 for change in self.changes]


def envelope(sequence: int, predecessor: int | None = None, publisher: str = "p", incarnation: str = "i") -> Event:
    before = sequence - 1 if predecessor is None else predecessor
    return NotificationReceived(
        ChangeNotification(publisher, incarnation, "stream", sequence, before, (change(sequence),))
    )


def change(sequence: int) -> ObjectChange:
    return stream_change(1, sequence, False)


def hello(last: int | None = None, publisher: str = "p", incarnation: str = "i", leaving: bool = False) -> Event:
    known = {} if last is None else {"stream": last}
    return NotificationReceived(NotificationHeartbeat(publisher, incarnation, known, leaving))


def steady(*events: Event) -> Harness:
    """One publisher, known since its beginning, whose last message was number 1, and then these events; at 10 s."""
    harness = Harness()
    harness.do(SubscriberStarted(), ListeningStarted(), hello())
    harness.until(9.0)
    harness.reads.clear()
    harness.do(hello())
    harness.until(10.0)
    harness.do(envelope(1), *events)
    return harness


def listening(*channels: str) -> Harness:
    harness = Harness(channels=channels)
    harness.do(SubscriberStarted(), ListeningStarted())
    return harness


# --- when it reads without a message ----------------------------------------------------------------------------------


@pytest.mark.conforms("D6")
def test_it_reads_once_it_listens() -> None:
    harness = Harness(channels=("stream", "space"))
    harness.do(SubscriberStarted())
    assert harness.reads == []
    harness.do(ListeningStarted())
    assert harness.reads == [(0.0, frozenset({CatchUpCause.CONNECTED}))] * 2
    assert harness.machine.catch_ups.counts_by_cause == {CatchUpCause.CONNECTED: 2}


@pytest.mark.conforms("D6")
def test_it_reads_again_after_the_connection_was_lost() -> None:
    harness = steady()
    harness.jitter = 0.5
    harness.do(ListeningStopped(), ListeningStarted())
    at = 10.0 + WINDOW + SETTINGS.catch_up_jitter_s / 2
    assert harness.until(11.0) == [(at, frozenset({CatchUpCause.CONNECTED}))]


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
@pytest.mark.parametrize(
    ("pushes", "reads"), [(False, [0.0, *range(1, 66)]), (True, [0.0, 30.0, 60.0])], ids=["no push", "push"]
)
def test_it_reads_now_and_then(pushes: bool, reads: list[float]) -> None:
    """Often with a driver that pushes nothing, and seldom with one that does."""
    harness = Harness(pushes=pushes)
    harness.do(SubscriberStarted(), ListeningStarted())
    harness.until(65.5)
    assert [at for at, _ in harness.reads] == pytest.approx(reads)


# --- after a steady publisher's message number 1 ----------------------------------------------------------------------

GAP, SOON = CatchUpCause.GAP, 10.0 + WINDOW


@pytest.mark.conforms("D3", "D4", "D5", "D6")
@pytest.mark.parametrize(
    ("events", "received", "read"),
    [
        pytest.param([envelope(2), envelope(3), envelope(4)], [2, 3, 4], None, id="successors"),
        pytest.param([envelope(3)], [3], (SOON, GAP), id="a gap is read once after the window"),
        pytest.param([envelope(5), envelope(3), envelope(2), envelope(4)], [5, 3, 2, 4], None, id="a gap is filled"),
        pytest.param([envelope(4), envelope(2)], [4, 2], (SOON, GAP), id="a gap is filled in part"),
        pytest.param([envelope(7, 1), envelope(9, 8), envelope(8, 7)], [7, 9, 8], None, id="predecessors count"),
        pytest.param([hello(2)], [], (SOON, GAP), id="a hello shows what was lost before it"),
        pytest.param([hello(2), envelope(2)], [2], None, id="a hello comes before its message"),
        pytest.param([hello(1, leaving=True)], [], None, id="a publisher that left is not missed"),
        pytest.param([hello(2, leaving=True)], [], (SOON, GAP), id="its last message is missed"),
        pytest.param([envelope(7, publisher="q")], [7], (SOON, CatchUpCause.NEW_PUBLISHER), id="an unknown publisher"),
        pytest.param([MalformedNotificationReceived()], [], None, id="no message"),
    ],
)
def test_what_comes_after_a_message(
    events: list[Event], received: list[int], read: tuple[float, CatchUpCause] | None
) -> None:
    """It is handed on at once, and read if something is missing when the window has passed."""
    harness = steady(*events)
    assert harness.received == [1, *received]
    assert harness.until(14.0) == ([] if read is None else [(read[0], frozenset({read[1]}))])
    counters = harness.machine.counters
    assert counters.gaps == counters.filled_gaps + counters.expired_gaps
    assert counters.expired_gaps == (read is not None and read[1] is GAP)
    assert (counters.duplicates, counters.malformed) == (0, events == [MalformedNotificationReceived()])


@pytest.mark.conforms("D7")
def test_twice_or_too_late_is_not_handed_on() -> None:
    harness = steady(envelope(1), envelope(3))
    harness.until(11.0)
    harness.do(envelope(2))
    harness.do(envelope(6), envelope(5, 0))
    assert harness.received == [1, 3, 6]
    assert harness.machine.counters.duplicates == 3


@pytest.mark.conforms("D5")
@pytest.mark.parametrize("leaving", [False, True])
def test_a_silent_publisher_is_read_for_once(leaving: bool) -> None:
    """Not one that has taken its leave. Each is forgotten in time."""
    harness = steady()
    if leaving:
        harness.do(hello(1, leaving=True))
    missed = (10.0 + SETTINGS.publisher_timeout_s, frozenset({CatchUpCause.PUBLISHER_TIMEOUT}))
    assert harness.until(29.0) == ([] if leaving else [missed])
    assert harness.machine.publishers == 1
    harness.until(10.0 + SETTINGS.publisher_expiry_s)
    assert (harness.machine.publishers, harness.machine.counters.expired_publishers) == (0, 1)
    assert harness.machine.counters.publisher_timeouts == 1 + (not leaving), "one was before its first message"


@pytest.mark.conforms("D6")
def test_a_restart_is_read_for_on_every_channel() -> None:
    harness = listening("stream", "space")
    harness.do(hello(5))
    harness.until(4.0)
    harness.reads.clear()
    harness.do(hello(incarnation="j"))
    assert harness.until(6.0) == [(4.0 + WINDOW, frozenset({CatchUpCause.RESTARTED}))] * 2
    assert harness.machine.counters.restarts == 1
    harness.do(envelope(1, incarnation="j"))
    assert harness.received == [1]
    assert harness.until(9.0) == []
    harness.do(envelope(1, incarnation="k"))
    assert harness.until(12.0) == [(9.0 + WINDOW, frozenset({CatchUpCause.RESTARTED}))] * 2


@pytest.mark.conforms("D6")
@pytest.mark.parametrize(
    ("before", "first", "cause"),
    [
        (NotificationReceived(ChangeNotification("q", "i", "space", 1, 0, ())), 5, CatchUpCause.NEW_PUBLISHER),
        (hello(publisher="q"), 2, CatchUpCause.GAP),
    ],
    ids=["with an unknown past", "that began with a hello"],
)
def test_the_first_message_of_a_channel(before: Event, first: int, cause: CatchUpCause) -> None:
    """It is missed what may have been before it; after a hello, what is before number 1."""
    harness = listening("stream", "space")
    harness.do(before)
    harness.until(3.0)
    harness.reads.clear()
    harness.do(envelope(first, publisher="q"))
    assert harness.until(5.0) == [(3.0 + WINDOW, frozenset({cause}))]


def test_another_channel_is_a_sign_of_life() -> None:
    harness = steady()
    harness.until(14.0)
    harness.do(NotificationReceived(ChangeNotification("p", "i", "weather", 9, 3, (ObjectChange("weather", "a", 1),))))
    harness.do(NotificationReceived(NotificationHeartbeat("p", "i", {"weather": 20, "stream": 1})))
    assert harness.received == [1]
    assert harness.until(18.0) == []


# --- how often it reads -----------------------------------------------------------------------------------------------


@pytest.mark.conforms("D9")
def test_reads_are_put_off_and_not_dropped() -> None:
    harness = steady()
    for step in range(10):
        harness.until(10.0 + 0.1 * step)
        harness.do(envelope(2 * step + 3))
    every = SETTINGS.catch_up_min_interval_s
    harness.until(16.0)
    assert [at for at, _ in harness.reads] == pytest.approx([10.2, 10.2 + every, 10.2 + 2 * every])
    assert harness.machine.counters.expired_gaps == 10
    assert harness.machine.catch_ups.deferred >= 8


@pytest.mark.conforms("D9")
def test_a_failed_read_is_tried_again() -> None:
    """A gap during a read is read after it."""
    harness = steady()
    harness.answers = False
    harness.do(envelope(3))
    harness.until(10.2)
    harness.do(CatchUpCompleted("stream", False))
    assert harness.until(12.0) == [(10.7, frozenset({CatchUpCause.RETRY}))]
    harness.do(envelope(5))
    assert harness.until(14.0) == []
    harness.do(CatchUpCompleted("stream", True))
    assert harness.reads[-1] == (14.0, frozenset({GAP}))


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
        wanted = {CatchUpCause.PUBLISHER_TIMEOUT, CatchUpCause.CONNECTED}
        reads.append(next(at for at, causes in harness.until(16.5) if causes & wanted))
    assert max(reads) - min(reads) == pytest.approx(SETTINGS.catch_up_jitter_s, rel=0.05)
    in_each_tenth = Counter(int((at - min(reads)) / SETTINGS.catch_up_jitter_s * 10) for at in reads)
    assert max(in_each_tenth.values()) < 150


def test_doubts_and_requests_are_read_for() -> None:
    harness = steady(CatchUpRequested("stream"), CatchUpRequested("unknown"))
    assert harness.reads == [(10.0, frozenset({CatchUpCause.REQUESTED}))]
    harness.do(ChangeOrderUnknown("stream"))
    assert harness.until(14.0) == [(10.5, frozenset({CatchUpCause.AMBIGUOUS_VERSION}))]


def test_a_request_within_the_rate_is_not_put_off() -> None:
    harness = steady(CatchUpRequested("stream"))
    harness.until(10.0 + SETTINGS.catch_up_min_interval_s)
    deferred = harness.machine.catch_ups.deferred
    harness.do(CatchUpRequested("stream"))
    assert [at for at, _ in harness.reads] == [10.0, 10.5]
    assert harness.machine.catch_ups.deferred == deferred


def test_of_two_needs_the_later_has_its_own_read() -> None:
    """It is not tried before its time."""
    scheduler = CatchUpScheduler(SETTINGS, ["stream"])
    for at in (10.0, 12.0):
        scheduler.request("stream", GAP, at)
    for at in (10.0, 12.0):
        assert scheduler.wake_at() == at
        assert [each.causes for each in scheduler.take_due(at, 0.0)] == [{GAP}]
        scheduler.complete("stream", True, at)
    assert scheduler.wake_at() > 1e9


def test_a_later_gap_needs_a_later_read() -> None:
    harness = steady(envelope(1, publisher="q"))
    harness.until(10.1)
    harness.do(envelope(1, publisher="r"))
    at = [at for at, _ in harness.until(14.0)]
    assert at == pytest.approx([10.2, 10.7]), "the second was seen at 10.1, and is owed a read from 10.3 on"


def test_what_it_remembers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "MAX_PUBLISHERS", 10)
    harness = steady(*(hello(publisher=str(number)) for number in range(30)))
    assert harness.machine.publishers == 10
    harness.do(*(envelope(sequence, publisher="29") for sequence in range(3, 1000, 2)))
    assert (harness.machine.counters.gaps, harness.machine.counters.expired_gaps) == (499, 499 - MAX_GAPS)
