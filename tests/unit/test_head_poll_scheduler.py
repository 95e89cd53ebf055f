"""When a session looks at the log: by push at once, without it after a silence that adapts; and what pushes heads."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest

from sublet_borrower.new_data.head_poll_scheduler import (
    HeadPollScheduler,
    HeadPollSchedulerEvent,
    HeadPollSchedulerOutcome,
    HeadPollSchedulerSettings,
    HeadPushed,
    HeadsRead,
    HeadSubscriptionId,
    StreamsCaughtUp,
)
from sublet_borrower.new_data.head_subscriptions import HeadSubscriptions
from sublet_borrower.new_data.monitor import NewDataMonitor
from sublet_protocol.messages.head_and_group_events import StreamHead
from sublet_protocol.tick import Tick
from tests.kit import eventually

S = HeadPollSchedulerSettings()
FIRST, AGAIN = HeadSubscriptionId(7, 50, 1), HeadSubscriptionId(7, 50, 2)
SELDOM = pytest.approx(S.poll_max_with_push_s)
"""How long a silence lasts in the end where push works."""


class Play:
    """A following and its last outcome."""

    def __init__(self) -> None:
        self.machine = HeadPollScheduler(S)
        self.now = 0.0
        self.last = HeadPollSchedulerOutcome()

    def do(self, event: HeadPollSchedulerEvent, at: float | None = None) -> HeadPollSchedulerOutcome:
        self.now = self.now if at is None else at
        self.last = self.machine.decide(event, self.now)
        return self.last

    def push(self, head: int, at: float | None = None, follow: HeadSubscriptionId = FIRST) -> dict[int, int]:
        """Somebody reports where the stream ends; what is new of it."""
        return dict(self.do(HeadPushed(follow, head), at).new_heads)

    def read_to(self, head: int) -> HeadPollSchedulerOutcome:
        """The stream is read to its end there."""
        return self.do(StreamsCaughtUp({7: (50, head)}))

    @property
    def looks(self) -> tuple[int, ...]:
        """The streams whose heads it asks for, or that it reads without."""
        return (*self.last.poll, *self.last.read)

    def wait(self) -> HeadPollSchedulerOutcome:
        """Until it wants to be woken."""
        assert self.last.wake_at is not None
        return self.do(Tick(), max(self.last.wake_at, self.now))

    def wait_for_look(self) -> HeadPollSchedulerOutcome:
        """Until it looks at the log."""
        while not (self.wait().poll or self.last.read):
            pass
        return self.last

    def silence(self, count: int) -> list[float]:
        """How long each of so many silences lasts, in which nothing comes."""
        lasted = []
        for _ in range(count):
            begun = self.now
            self.wait_for_look()
            lasted.append(self.now - begun)
            self.do(HeadsRead(dict.fromkeys(self.looks, 0)))
        return lasted


def followed() -> Play:
    play = Play()
    assert play.read_to(10).subscribe == (FIRST,)
    return play


@pytest.mark.conforms("D1", "P5")
def test_without_push_it_looks_less_and_less_often() -> None:
    """A look that finds nothing changes nothing else."""
    play = followed()
    lasted = play.silence(12)
    assert (play.last.subscribe, play.last.unsubscribe, play.last.new_heads) == ((), (), {})
    assert lasted[0] == pytest.approx(S.poll_initial_s)
    assert all(a <= b + 1e-9 for a, b in pairwise(lasted))
    assert lasted[-1] == pytest.approx(S.poll_max_s)


@pytest.mark.conforms("P5")
def test_a_slow_log_is_asked_less_often() -> None:
    play = followed()
    head = 10
    for took_s in (S.poll_initial_s, 0.02, 0.4):
        for _ in range(20):
            head += 1
            play.wait()
            play.do(HeadsRead({7: head}, took_s))
            play.read_to(head)
        assert play.silence(1) == pytest.approx([S.poll_cost_factor * took_s], rel=0.02)
        head += 1
        play.read_to(head)


def test_a_log_that_does_not_answer_is_asked_again() -> None:
    """And as often as before."""
    play = followed()
    for _ in range(2):
        assert play.wait().poll == (7,)
        play.do(HeadsRead({}, 5.0))
    play.read_to(11)
    assert play.silence(1) == pytest.approx([S.poll_initial_s])


@pytest.mark.conforms("P5")
def test_where_push_works_it_looks_but_now_and_then() -> None:
    play = followed()
    assert play.push(12, 0.001) == {7: 12}
    assert play.read_to(12).subscribe == ()
    play.do(HeadsRead({7: 12}), 0.01)
    assert play.silence(30)[-1] == SELDOM


@pytest.mark.conforms("P4", "P5")
def test_a_stream_that_outgrows_its_pushed_heads() -> None:
    """It is looked at soon, until nothing is new."""
    play = followed()
    play.push(12, 0.001)
    play.read_to(12)
    assert play.silence(30)[-1] == SELDOM
    play.push(20)
    play.do(StreamsCaughtUp({}))
    play.read_to(35)
    assert play.silence(1) == pytest.approx([S.poll_initial_s]), "35 were there, and 20 reported"
    assert play.silence(30)[-1] == SELDOM
    play.push(40)
    play.do(StreamsCaughtUp({}))
    play.read_to(40)
    assert play.silence(1) == [SELDOM], "as many were there as reported"


def test_an_answer_to_the_subscription_shows_push() -> None:
    """Somebody listens for all streams then."""
    play = Play()
    play.do(StreamsCaughtUp({7: (50, 10), 8: (60, 3)}))
    assert play.push(3, 0.001, HeadSubscriptionId(8, 60, 2)) == {}
    assert play.silence(30)[-1] == SELDOM


@pytest.mark.conforms("P5")
def test_a_stream_whose_pushes_were_missed_is_doubted() -> None:
    """Until one is pushed."""
    play = followed()
    play.push(10, 0.001)
    play.do(HeadsRead({7: 15}), 0.01)
    play.read_to(15)
    play.do(Tick(), 0.01 + S.push_late_s)
    play.push(15, follow=AGAIN)
    assert play.silence(30)[-1] == pytest.approx(S.poll_max_s), "that was but the answer to the new subscription"
    play.push(16, follow=AGAIN)
    play.read_to(16)
    assert play.silence(30)[-1] == SELDOM


@pytest.mark.conforms("P5")
def test_after_a_miss_it_follows_under_a_new_id() -> None:
    """It refuses the old one."""
    play = followed()
    play.push(12, 0.001)
    play.read_to(12)
    play.do(HeadsRead({7: 15}), 0.01)
    assert play.last.new_heads == {7: 15}
    assert play.last.unsubscribe == (), "it may be on its way"
    outcome = play.do(Tick(), 0.01 + S.push_late_s)
    assert (outcome.unsubscribe, outcome.subscribe) == ((FIRST,), (AGAIN,))
    assert play.push(99) == {}
    assert play.push(16, follow=AGAIN) in ({}, {7: 16})
    assert play.machine.counters.missed_pushes == 1
    assert play.machine.counters.rejected == 1


@pytest.mark.conforms("P5")
def test_a_head_found_first_and_pushed_soon_is_no_miss() -> None:
    """It shows that push works."""
    play = followed()
    play.do(HeadsRead({7: 15}), 0.01)
    play.push(15, 0.05)
    play.read_to(15)
    assert play.do(Tick(), 1.0).unsubscribe == ()
    assert play.machine.counters.missed_pushes == 0
    assert play.silence(30)[-1] == SELDOM


@pytest.mark.conforms("P5")
def test_a_push_of_less_than_was_found_is_a_miss() -> None:
    """What is pushed later may be what was found, and is none then."""
    for pushed, misses in ((14, 1), (15, 0), (16, 0)):
        play = followed()
        play.push(12, 0.001)
        play.read_to(12)
        play.do(HeadsRead({7: 15}), 0.01)
        play.push(pushed, 0.02)
        play.do(Tick(), 0.01 + S.push_late_s)
        assert play.machine.counters.missed_pushes == misses


def test_heads_of_a_dropped_stream_are_ignored() -> None:
    """They may have been asked for while it was followed."""
    play = followed()
    assert play.do(HeadsRead({99: 15})).new_heads == {}
    assert play.machine.counters.polled == 0


@pytest.mark.conforms("P8")
def test_heads_under_a_grant_that_is_over_are_refused() -> None:
    play = followed()
    outcome = play.do(StreamsCaughtUp({7: (51, 10)}))
    assert outcome.unsubscribe == (FIRST,)
    assert outcome.subscribe == (HeadSubscriptionId(7, 51, 2),)
    assert play.push(99) == {}
    assert play.push(99, follow=HeadSubscriptionId(7, 51, 2)) == {7: 99}


@pytest.mark.conforms("P4")
def test_a_busy_stream_is_followed_no_more() -> None:
    """One that is never read to its end; it is followed again when it is."""
    play = followed()
    assert play.do(StreamsCaughtUp({}), 0.1).unsubscribe == ()
    assert play.do(StreamsCaughtUp({}), 0.1 + S.busy_after_s).unsubscribe == (FIRST,)
    assert play.read_to(90).subscribe == (AGAIN,)


@pytest.mark.conforms("P1", "P4")
def test_what_is_pushed_while_reading_counts_later() -> None:
    """Once the stream is read up to there."""
    play = followed()
    play.do(StreamsCaughtUp({}), 0.1)
    assert play.push(20) == {}
    assert play.read_to(15).new_heads == {7: 20}
    assert play.read_to(20).new_heads == {}
    play.do(StreamsCaughtUp({}), 0.2)
    assert play.push(25) == {}
    assert play.read_to(25).new_heads == {}, "nothing of it is left"


@pytest.mark.conforms("P2")
def test_an_invented_head_costs_one_read() -> None:
    """One that is old costs none."""
    play = followed()
    assert [play.push(head) for head in (0, 9, 10)] == [{}] * 3
    assert play.push(1_000) == {7: 1_000}
    assert play.read_to(10).new_heads == {}, "the log has been asked, and knows better"
    assert play.push(11) == {7: 11}


@pytest.mark.conforms("P5")
def test_a_growing_stream_is_read_without_a_look() -> None:
    """Until it has not grown, or is not read to its end."""
    play = followed()
    assert (play.wait().poll, play.last.read) == ((7,), {})
    play.do(HeadsRead({7: 12}))
    play.read_to(12)
    for head in (12, 13):
        assert (play.wait().poll, play.last.read) == ((), {7: head})
        play.do(HeadsRead({7: 13}))
        play.read_to(13)
    assert (play.wait().poll, play.last.read) == ((7,), {})
    play.do(HeadsRead({7: 14}))
    play.read_to(14)
    assert play.wait().read == {7: 14}
    assert play.wait_for_look().poll == (7,)


def test_streams_due_together_are_polled_together() -> None:
    """Though they grow."""
    play = followed()
    play.do(StreamsCaughtUp({7: (50, 10), 8: (60, 0)}), 0.5 * S.poll_initial_s)
    assert set(play.wait().poll) == {7, 8}
    play.do(HeadsRead({7: 12, 8: 1}))
    play.do(StreamsCaughtUp({7: (50, 12), 8: (60, 1)}))
    assert (set(play.wait().poll), play.last.read) == ({7, 8}, {})


def test_with_nothing_to_follow_it_is_not_woken() -> None:
    assert Play().do(Tick()).wake_at is None


# --- who is notified of which stream by which node --------------------------------------------------------------------


class Desk:
    """Subscriptions of heads and what was asked of which node, in order."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []
        self.room = HeadSubscriptions(
            lambda node, stream_id: self.asked.append(("+", node, stream_id)),
            lambda node, stream_id: self.asked.append(("-", node, stream_id)),
        )

    def take(self) -> list[tuple[str, str, int]]:
        asked, self.asked = self.asked, []
        return asked

    def pushed(self, node: str, stream_id: int = 7) -> list[tuple[int, HeadPushed]]:
        return self.room.route_head(node, StreamHead(stream_id, 12))


@pytest.mark.conforms("P6")
def test_a_session_subscribes_at_its_leaders_node() -> None:
    """And goes on with the next one alone."""
    desk = Desk()
    desk.room.add(1, FIRST)
    assert desk.take() == []
    desk.room.set_leader_node(1, "n1:1")
    assert desk.take() == [("+", "n1:1", 7)]
    desk.room.set_leader_node(1, "n1:1")
    assert desk.take() == [], "it is that node already"
    assert desk.pushed("n1:1") == [(1, HeadPushed(FIRST, 12))]
    assert desk.pushed("n2:1") == desk.pushed("n1:1", 8) == []
    desk.room.set_leader_node(1, None)
    desk.room.set_leader_node(1, "n2:1")
    assert desk.take() == [("-", "n1:1", 7), ("+", "n2:1", 7)]
    assert desk.pushed("n2:1") == [(1, HeadPushed(FIRST, 12))]


@pytest.mark.conforms("P5")
def test_a_new_id_is_a_new_subscription() -> None:
    desk = Desk()
    desk.room.set_leader_node(1, "n1:1")
    desk.room.add(1, FIRST)
    desk.room.remove(1, FIRST)
    desk.room.add(1, AGAIN)
    assert desk.take() == [("+", "n1:1", 7), ("-", "n1:1", 7), ("+", "n1:1", 7)]
    assert desk.pushed("n1:1") == [(1, HeadPushed(AGAIN, 12))]
    desk.room.remove(1, FIRST)
    assert desk.take() == [], "the old one is over already"


@pytest.mark.conforms("R1")
def test_two_sessions_of_an_agent_share_one() -> None:
    desk = Desk()
    for handle in (1, 2):
        desk.room.set_leader_node(handle, "n1:1")
        desk.room.add(handle, HeadSubscriptionId(7, handle, handle))
    assert desk.take() == [("+", "n1:1", 7)]
    assert len(desk.pushed("n1:1")) == 2
    desk.room.remove_session(1)
    assert desk.take() == []
    desk.room.remove_session(2)
    assert desk.take() == [("-", "n1:1", 7)]


# --- the shell that asks the log where streams end, where it must -----------------------------------------------------


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
