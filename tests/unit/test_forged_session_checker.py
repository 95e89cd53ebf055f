"""A node lets no session in with an epoch that was never drawn for its name, and nobody out by another's draw."""

from __future__ import annotations

import pytest

from sublet_leader.node import forged_session_checker
from sublet_leader.node.events import AgentMessageReceived, ReadSessionEpoch, SessionEpochRead
from sublet_leader.node.group_event_publisher import MAX_QUERIES, MAX_QUERIES_OF_CALLER
from sublet_protocol.domain.subscriptions import Subscription
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
)
from tests.unit.test_node_machine import SUBSCRIPTION, Play

pytestmark = pytest.mark.conforms("E30", "X5")

GROUP = Subscription.parse(SUBSCRIPTION)


def drawn(play: Play, session: str = "etl") -> int:
    return play.store.next_session_epoch(GROUP, session)


def names(play: Play) -> dict[str, str | None]:
    return {member.borrower_id: member.session for member in play.machine.leaders[1].members}


def admitted(play: Play) -> list[str]:
    found = [message.borrower_id for message in play.received(LeaderConnectResponse)]
    play.sent.clear()
    return found


def test_a_drawn_epoch_is_let_in() -> None:
    play = Play()
    play.want("a/1", session="etl", session_epoch=drawn(play))
    play.settle()
    assert admitted(play) == ["a/1"]
    play.want("b/1", session="etl")
    play.settle()
    assert admitted(play) == ["b/1"], "a name that is only for people has none"


@pytest.mark.parametrize("led", [True, False])
@pytest.mark.parametrize("ahead", [1, 2**62])
def test_an_epoch_that_was_not_drawn_is_denied(led: bool, ahead: int) -> None:
    """The bearer of the name stays, and so does who comes after it."""
    play = Play()
    first = drawn(play)
    if led:
        play.want("a/1", session="etl", session_epoch=first)
        play.settle()
        assert admitted(play) == ["a/1"]
    drawn(play, "another's")
    play.want("x/1", session="etl", session_epoch=first + ahead)
    play.settle()
    (denied,) = play.received(Invalidate)
    assert (denied.borrower_id, denied.reason) == ("x/1", BorrowerEndReason.DENIED)
    assert (
        f"session epoch {first + ahead}: the last that was drawn for session 'etl' of {SUBSCRIPTION} is {first}"
        in denied.detail
    )
    assert admitted(play) == []
    assert not led or play.machine.leaders[1].members.get("a/1") is not None
    play.want("b/1", session="etl", session_epoch=drawn(play))
    play.settle()
    assert admitted(play) == ["b/1"]


def test_an_epoch_without_a_name_is_denied() -> None:
    play = Play()
    play.want("x/1", session_epoch=5)
    play.settle()
    assert [one.reason for one in play.received(Invalidate)] == [BorrowerEndReason.DENIED]


def test_an_epoch_drawn_during_a_query_is_let_in() -> None:
    """The answer is older than the draw."""
    play = Play()
    play.want("a/1", session="etl", session_epoch=drawn(play))
    play.want("a/1", session="etl", session_epoch=1)
    old = play.execute(play.requests.pop(0))
    play.want("b/1", session="etl", session_epoch=drawn(play))
    play.want("x/1", session="etl", session_epoch=99)
    assert play.requests == [], "one query at a time"
    play.do(old)
    play.settle()
    assert {"b/1"} <= set(admitted(play)) <= {"a/1", "b/1"}
    play.want("x/1", session="etl", session_epoch=99)
    play.settle()
    assert [one.borrower_id for one in play.received(Invalidate)] == ["x/1"]


def test_without_an_answer_nobody_is_denied() -> None:
    play = Play()
    epoch = drawn(play)
    play.want("a/1", session="etl", session_epoch=epoch)
    request = play.requests.pop(0)
    assert isinstance(request, ReadSessionEpoch)
    play.do(SessionEpochRead(request, None))
    assert (play.requests, play.sent) == ([], [])
    play.want("a/1", session="etl", session_epoch=epoch)
    play.settle()
    assert admitted(play) == ["a/1"]


def test_who_leaves_meanwhile_is_not_let_in() -> None:
    play = Play()
    play.want("a/1", session="etl", session_epoch=drawn(play))
    play.receive(Disconnect("a/1", 0, ()))
    play.settle()
    assert admitted(play) == []


@pytest.mark.conforms("X4")
def test_queries_of_session_names_are_bounded() -> None:
    """Of one caller and of all; who is dropped asks again, and a borrower waits under its last name only."""
    play = Play()

    def ask(agent: str, principal: str | None, name: str) -> None:
        wanted = LeaderWanted(f"{agent}/1", SUBSCRIPTION, session=name, session_epoch=1)
        play.do(AgentMessageReceived(agent, wanted, principal))

    for number in range(MAX_QUERIES_OF_CALLER + 5):
        ask(f"x{number % 2}", "user:x", f"s{number}")
    assert len(play.requests) == MAX_QUERIES_OF_CALLER
    ask("a", "user:a", "etl")
    assert len(play.requests) == MAX_QUERIES_OF_CALLER + 1, "another principal has room"
    for number in range(MAX_QUERIES):
        ask(f"y{number}", None, f"etl{number}")
    assert len(play.requests) == MAX_QUERIES
    assert play.machine.query_counts.refused == 5 + MAX_QUERIES_OF_CALLER + 1
    play.settle()
    assert play.machine.query_counts.total == 0
    denied = [one.borrower_id for one in play.received(Invalidate)]
    assert len(denied) == len(set(denied)) == 3 + MAX_QUERIES - MAX_QUERIES_OF_CALLER - 1
    ask("x0", "user:x", "again")
    ask("x1", "user:x", "again")
    assert play.machine.query_counts.total == len(play.waiting(ReadSessionEpoch)) == 1


def want_as(play: Play, principal: str | None, borrower_id: str, epoch: int) -> None:
    wanted = LeaderWanted(borrower_id, SUBSCRIPTION, session="etl", session_epoch=epoch)
    play.do(AgentMessageReceived(borrower_id.partition("/")[0], wanted, principal))
    play.settle()


def test_another_principal_takes_over_no_name() -> None:
    """With an epoch that was drawn for it, too."""
    play = Play()
    first = drawn(play)
    want_as(play, "user:a", "a/1", first)
    assert admitted(play) == ["a/1"]
    for epoch in (first, drawn(play)):
        want_as(play, "user:b", "x/1", epoch)
        (denied,) = play.received(Invalidate)
        assert (denied.borrower_id, denied.reason) == ("x/1", BorrowerEndReason.DENIED)
        assert f"session 'etl' of {SUBSCRIPTION} is another principal's" in denied.detail
        assert play.machine.leaders[1].members.get("a/1") is not None
    want_as(play, "user:a", "b/1", drawn(play))
    assert admitted(play) == ["b/1"], "the newer of its own"


def test_a_name_for_people_is_anybodys_until_drawn() -> None:
    play = Play()
    want_as(play, "user:a", "a/1", 0)
    want_as(play, "user:b", "b/1", 0)
    assert admitted(play) == ["a/1", "b/1"]
    want_as(play, "user:a", "a/2", drawn(play))
    assert admitted(play) == ["a/2"]
    want_as(play, "user:b", "b/2", 0)
    assert admitted(play) == ["b/2"], "who used it before another drew for it goes on"
    assert names(play) == {"a/1": "etl", "b/1": "etl", "a/2": "etl", "b/2": None}, "and is not shown as its owner"
    want_as(play, "user:a", "a/3", 0)
    assert admitted(play) == ["a/3"], "its own"


def test_where_nobody_is_known_the_newest_has_the_name() -> None:
    play = Play()
    want_as(play, "user:a", "a/1", drawn(play))
    want_as(play, None, "b/1", drawn(play))
    assert admitted(play) == ["a/1", "b/1"]


def test_few_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forged_session_checker, "MAX_REMEMBERED", 2)
    play = Play()
    epochs = {name: drawn(play, name) for name in ("one", "two", "three")}
    for name, epoch in epochs.items():
        play.want(f"{name}/1", session=name, session_epoch=epoch)
        play.settle()
    assert admitted(play) == ["one/1", "two/1", "three/1"]
    for name, epoch in epochs.items():
        play.want(f"{name}/1", session=name, session_epoch=epoch)
    read = [request.session for request in play.requests if isinstance(request, ReadSessionEpoch)]
    assert read == ["one"], "the others are remembered"
