"""Who is notified of which stream by which node."""

from __future__ import annotations

import pytest

from sublet_borrower.new_data.head_poll_scheduler import HeadPushed, HeadSubscriptionId
from sublet_borrower.new_data.head_subscriptions import HeadSubscriptions
from sublet_protocol.messages.head_and_group_events import StreamHead


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


A, B = HeadSubscriptionId(7, 50, 1), HeadSubscriptionId(7, 50, 2)


def test_a_session_subscribes_at_its_leaders_node() -> None:
    desk = Desk()
    desk.room.add(1, A)
    assert desk.take() == []
    desk.room.set_leader_node(1, "n1:1")
    assert desk.take() == [("+", "n1:1", 7)]
    assert desk.room.route_head("n1:1", StreamHead(7, 12)) == [(1, HeadPushed(A, 12))]
    assert desk.room.route_head("n2:1", StreamHead(7, 12)) == []
    assert desk.room.route_head("n1:1", StreamHead(8, 12)) == []


@pytest.mark.conforms("P6")
def test_it_goes_on_with_the_next_node_alone() -> None:
    desk = Desk()
    desk.room.set_leader_node(1, "n1:1")
    desk.room.add(1, A)
    desk.take()
    desk.room.set_leader_node(1, None)
    desk.room.set_leader_node(1, "n2:1")
    assert desk.take() == [("-", "n1:1", 7), ("+", "n2:1", 7)]
    assert desk.room.route_head("n2:1", StreamHead(7, 12)) == [(1, HeadPushed(A, 12))]


@pytest.mark.conforms("P5")
def test_a_new_id_is_a_new_subscription() -> None:
    desk = Desk()
    desk.room.set_leader_node(1, "n1:1")
    desk.room.add(1, A)
    desk.room.remove(1, A)
    desk.room.add(1, B)
    assert desk.take() == [("+", "n1:1", 7), ("-", "n1:1", 7), ("+", "n1:1", 7)]
    assert desk.room.route_head("n1:1", StreamHead(7, 12)) == [(1, HeadPushed(B, 12))]
    desk.room.remove(1, A)
    assert desk.take() == [], "the old one is over already"


@pytest.mark.conforms("R1")
def test_two_sessions_of_an_agent_share_one() -> None:
    desk = Desk()
    for handle in (1, 2):
        desk.room.set_leader_node(handle, "n1:1")
        desk.room.add(handle, HeadSubscriptionId(7, handle, handle))
    assert desk.take() == [("+", "n1:1", 7)]
    assert len(desk.room.route_head("n1:1", StreamHead(7, 12))) == 2
    desk.room.remove_session(1)
    assert desk.take() == []
    desk.room.remove_session(2)
    assert desk.take() == [("-", "n1:1", 7)]
