"""When a session looks at the log: by push at once, without it after a silence that adapts."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sublet_borrower.new_data.head_tracker import (
    HeadPushed,
    HeadsRead,
    HeadSubscriptionId,
    HeadTracker,
    HeadTrackerEvent,
    HeadTrackerOutcome,
    HeadTrackerSettings,
    StreamsCaughtUp,
    Tick,
)

S = HeadTrackerSettings()
FIRST = HeadSubscriptionId(7, 50, 1)


class Play:
    """A following and its last outcome."""

    def __init__(self) -> None:
        self.machine = HeadTracker(S)
        self.now = 0.0
        self.last = HeadTrackerOutcome()

    def do(self, event: HeadTrackerEvent, at: float | None = None) -> HeadTrackerOutcome:
        """One event."""
        self.now = self.now if at is None else at
        self.last = self.machine.decide(event, self.now)
        return self.last

    def wait(self) -> HeadTrackerOutcome:
        """Until it wants to be woken."""
        assert self.last.wake_at is not None
        return self.do(Tick(), max(self.last.wake_at, self.now))

    def silence(self, count: int) -> list[float]:
        """How long each of so many silences lasts, in which nothing comes."""
        lasted = []
        for _ in range(count):
            begun = self.now
            while not self.wait().poll:
                pass
            lasted.append(self.now - begun)
            self.do(HeadsRead(dict.fromkeys(self.last.poll, 0)))
        return lasted


def followed() -> Play:
    play = Play()
    play.do(StreamsCaughtUp({7: (50, 10)}))
    assert play.last.subscribe == (FIRST,)
    return play


@pytest.mark.conforms("D1", "P5")
def test_without_push_it_looks_soon_and_then_less_often() -> None:
    lasted = followed().silence(12)
    assert lasted[0] == pytest.approx(S.poll_initial_s)
    assert all(a <= b + 1e-9 for a, b in pairwise(lasted))
    assert lasted[-1] == pytest.approx(S.poll_max_s)


@pytest.mark.conforms("P5")
def test_the_longer_the_log_takes_to_answer_the_less_often_it_is_asked() -> None:
    play = followed()
    head = 10
    for took_s in (S.poll_initial_s, 0.02, 0.4):
        for _ in range(20):
            head += 1
            play.wait()
            play.do(HeadsRead({7: head}, took_s))
            play.do(StreamsCaughtUp({7: (50, head)}))
        assert play.silence(1) == pytest.approx([S.poll_cost_factor * took_s], rel=0.02)
        play.do(StreamsCaughtUp({7: (50, head + 1)}))
        head += 1


def test_a_database_that_was_away_is_asked_again_as_often_as_before() -> None:
    play = followed()
    play.wait()
    play.do(HeadsRead({}, 5.0))
    play.do(StreamsCaughtUp({7: (50, 11)}))
    assert play.silence(1) == pytest.approx([S.poll_initial_s])


@pytest.mark.conforms("P5")
def test_where_push_works_it_looks_but_now_and_then() -> None:
    play = followed()
    assert play.do(HeadPushed(FIRST, 12), 0.001).new_heads == {7: 12}
    assert play.do(StreamsCaughtUp({7: (50, 12)})).subscribe == ()
    play.do(HeadsRead({7: 12}), 0.01)
    lasted = play.silence(30)
    assert lasted[-1] == pytest.approx(S.poll_max_with_push_s)


@pytest.mark.conforms("P4", "P5")
def test_a_stream_that_grows_more_quickly_than_it_is_told_of_is_looked_at_soon_until_nothing_is_new() -> None:
    play = followed()
    play.do(HeadPushed(FIRST, 12), 0.001)
    play.do(StreamsCaughtUp({7: (50, 12)}))
    assert play.silence(30)[-1] == pytest.approx(S.poll_max_with_push_s)
    play.do(HeadPushed(FIRST, 20))
    play.do(StreamsCaughtUp({}))
    play.do(StreamsCaughtUp({7: (50, 35)}))
    assert play.silence(1) == pytest.approx([S.poll_initial_s]), "35 were there, and 20 told"
    assert play.silence(30)[-1] == pytest.approx(S.poll_max_with_push_s)
    play.do(HeadPushed(FIRST, 40))
    play.do(StreamsCaughtUp({}))
    play.do(StreamsCaughtUp({7: (50, 40)}))
    assert play.silence(1) == pytest.approx([S.poll_max_with_push_s]), "as many were there as told"


def test_an_answer_to_the_subscription_shows_that_somebody_listens_for_all_streams() -> None:
    play = Play()
    play.do(StreamsCaughtUp({7: (50, 10), 8: (60, 3)}))
    play.do(HeadPushed(HeadSubscriptionId(8, 60, 2), 3), 0.001)
    assert play.last.new_heads == {}
    assert play.silence(30)[-1] == pytest.approx(S.poll_max_with_push_s)


@pytest.mark.conforms("P5")
def test_a_stream_whose_news_were_missed_is_doubted_until_one_is_pushed() -> None:
    play = followed()
    play.do(HeadPushed(FIRST, 10), 0.001)
    play.do(HeadsRead({7: 15}), 0.01)
    play.do(StreamsCaughtUp({7: (50, 15)}))
    play.do(Tick(), 0.01 + S.push_late_s)
    again = HeadSubscriptionId(7, 50, 2)
    play.do(HeadPushed(again, 15))
    assert play.silence(30)[-1] == pytest.approx(S.poll_max_s), "that was but the answer to the new subscription"
    play.do(HeadPushed(again, 16))
    play.do(StreamsCaughtUp({7: (50, 16)}))
    assert play.silence(30)[-1] == pytest.approx(S.poll_max_with_push_s)


@pytest.mark.conforms("P5")
def test_a_silence_in_which_nothing_was_new_changes_nothing() -> None:
    play = followed()
    assert play.wait().poll == (7,)
    outcome = play.do(HeadsRead({7: 10}))
    assert (outcome.subscribe, outcome.unsubscribe, outcome.new_heads) == ((), (), {})


@pytest.mark.conforms("P5")
def test_after_a_miss_it_follows_under_a_new_id_and_refuses_the_old() -> None:
    play = followed()
    play.do(HeadPushed(FIRST, 12), 0.001)
    play.do(StreamsCaughtUp({7: (50, 12)}))
    play.do(HeadsRead({7: 15}), 0.01)
    assert play.last.new_heads == {7: 15}
    assert play.last.unsubscribe == (), "it may be on its way"
    outcome = play.do(Tick(), 0.01 + S.push_late_s)
    again = HeadSubscriptionId(7, 50, 2)
    assert (outcome.unsubscribe, outcome.subscribe) == ((FIRST,), (again,))
    assert play.do(HeadPushed(FIRST, 99)).new_heads == {}
    assert play.do(HeadPushed(again, 16)).new_heads == {} or play.last.new_heads == {7: 16}
    assert play.machine.counters.missed_pushes == 1
    assert play.machine.counters.rejected == 1


@pytest.mark.conforms("P5")
def test_news_that_we_found_first_and_that_is_pushed_soon_after_is_no_miss() -> None:
    play = followed()
    play.do(HeadPushed(FIRST, 12), 0.001)
    play.do(HeadsRead({7: 15}), 0.01)
    play.do(HeadPushed(FIRST, 15), 0.05)
    assert play.do(Tick(), 1.0).unsubscribe == ()
    assert play.machine.counters.missed_pushes == 0


def test_news_pushed_soon_after_we_found_it_shows_that_push_works() -> None:
    play = followed()
    play.do(HeadsRead({7: 15}), 0.01)
    play.do(HeadPushed(FIRST, 15), 0.02)
    play.do(StreamsCaughtUp({7: (50, 15)}))
    assert play.silence(30)[-1] == pytest.approx(S.poll_max_with_push_s)


@pytest.mark.conforms("P2")
@pytest.mark.parametrize("head", [0, 9, 10])
def test_old_news_is_none(head: int) -> None:
    assert followed().do(HeadPushed(FIRST, head)).new_heads == {}


@pytest.mark.conforms("P8")
def test_news_under_a_grant_that_is_over_is_refused() -> None:
    play = followed()
    outcome = play.do(StreamsCaughtUp({7: (51, 10)}))
    assert outcome.unsubscribe == (FIRST,)
    assert outcome.subscribe == (HeadSubscriptionId(7, 51, 2),)
    assert play.do(HeadPushed(FIRST, 99)).new_heads == {}
    assert play.do(HeadPushed(HeadSubscriptionId(7, 51, 2), 99)).new_heads == {7: 99}


@pytest.mark.conforms("P4")
def test_a_stream_that_is_never_at_its_end_is_followed_no_more_and_again_when_it_is() -> None:
    play = followed()
    assert play.do(StreamsCaughtUp({}), 0.1).unsubscribe == ()
    assert play.do(StreamsCaughtUp({}), 0.1 + S.busy_after_s).unsubscribe == (FIRST,)
    assert play.do(StreamsCaughtUp({7: (50, 90)})).subscribe == (HeadSubscriptionId(7, 50, 2),)


@pytest.mark.conforms("P1", "P4")
def test_what_is_pushed_while_the_stream_is_read_is_news_once_it_is_read_up_to_there() -> None:
    play = followed()
    play.do(StreamsCaughtUp({}), 0.1)
    assert play.do(HeadPushed(FIRST, 20)).new_heads == {}
    assert play.do(StreamsCaughtUp({7: (50, 15)})).new_heads == {7: 20}
    assert play.do(StreamsCaughtUp({7: (50, 20)})).new_heads == {}


@pytest.mark.conforms("P2")
def test_invented_news_costs_one_read_and_hides_nothing() -> None:
    play = followed()
    assert play.do(HeadPushed(FIRST, 1_000)).new_heads == {7: 1_000}
    assert play.do(StreamsCaughtUp({7: (50, 10)})).new_heads == {}, "the log has been asked, and knows better"
    assert play.do(HeadPushed(FIRST, 11)).new_heads == {7: 11}


def test_streams_that_are_due_at_about_the_same_time_are_looked_at_together() -> None:
    play = Play()
    play.do(StreamsCaughtUp({7: (50, 10)}))
    play.do(StreamsCaughtUp({7: (50, 10), 8: (60, 0)}), 0.4 * S.poll_initial_s)
    assert set(play.wait().poll) == {7, 8}


def test_where_the_log_does_not_answer_it_is_asked_again() -> None:
    play = followed()
    assert play.wait().poll == (7,)
    play.do(HeadsRead({}))
    assert play.wait().poll == (7,)


def test_with_nothing_to_follow_it_does_not_want_to_be_woken() -> None:
    assert Play().do(Tick()).wake_at is None
