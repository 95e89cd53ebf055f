"""What waits for a session's thread."""

from __future__ import annotations

from sublet_borrower.agent.event_queue import Inbox
from sublet_borrower.machine.events import Saved
from sublet_borrower.new_data.head_tracker import FollowId, Pushed


def test_of_what_is_pushed_about_a_stream_the_newest_is_kept_and_of_the_rest_all() -> None:
    inbox = Inbox()
    for head in range(1_000):
        inbox.put(Pushed(FollowId(7, 50, 1), head))
        inbox.put(Pushed(FollowId(8, 50, 2), head))
    inbox.put(Saved(7, 50, 1))
    inbox.put(Saved(7, 50, 2))
    assert inbox.take() == (
        Saved(7, 50, 1),
        Saved(7, 50, 2),
        Pushed(FollowId(7, 50, 1), 999),
        Pushed(FollowId(8, 50, 2), 999),
    )
    assert inbox.take() == ()


def test_news_that_came_the_longer_way_does_not_take_the_place_of_what_is_newer() -> None:
    inbox = Inbox()
    for follow, head in ((FollowId(7, 50, 1), 9), (FollowId(7, 50, 2), 5), (FollowId(7, 50, 2), 4)):
        inbox.put(Pushed(follow, head))
    assert inbox.take() == (Pushed(FollowId(7, 50, 2), 5),)


def test_what_is_pushed_wakes_whoever_waits() -> None:
    inbox = Inbox()
    inbox.put(Pushed(FollowId(7, 50, 1), 3))
    assert inbox.take(60.0) == (Pushed(FollowId(7, 50, 1), 3),)
