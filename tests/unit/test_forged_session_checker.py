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


def admitted(play: Play) -> list[str]:
    """Who was let in since the last look."""
    found = [message.borrower_id for message in play.received(LeaderConnectResponse)]
    play.sent.clear()
    return found


def ask(play: Play, borrower_id: str, epoch: int, session: str | None = "etl", principal: str | None = None) -> None:
    wanted = LeaderWanted(borrower_id, SUBSCRIPTION, session=session, session_epoch=epoch)
    play.do(AgentMessageReceived(borrower_id.partition("/")[0], wanted, principal))


def join(
    play: Play, borrower_id: str, epoch: int, session: str | None = "etl", principal: str | None = None
) -> list[str]:
    """Who is let in."""
    ask(play, borrower_id, epoch, session, principal)
    play.settle()
    return admitted(play)


def denied(play: Play, borrower_id: str, epoch: int, principal: str | None = None) -> str:
    """Why it is denied."""
    ask(play, borrower_id, epoch, principal=principal)
    play.settle()
    (end,) = play.received(Invalidate)
    assert (end.borrower_id, end.reason) == (borrower_id, BorrowerEndReason.DENIED)
    assert admitted(play) == []
    return end.detail


def test_a_drawn_epoch_is_let_in() -> None:
    play = Play()
    assert join(play, "a/1", drawn(play)) == ["a/1"]
    assert join(play, "b/1", 0) == ["b/1"], "a name that is only for people has none"


@pytest.mark.parametrize("led", [True, False])
@pytest.mark.parametrize("ahead", [1, 2**62])
def test_an_epoch_that_was_not_drawn_is_denied(led: bool, ahead: int) -> None:
    """The bearer of the name stays, and so does who comes after it."""
    play = Play()
    first = drawn(play)
    if led:
        assert join(play, "a/1", first) == ["a/1"]
    drawn(play, "another's")
    why = f"session epoch {first + ahead}: the last that was drawn for session 'etl' of {SUBSCRIPTION} is {first}"
    assert why in denied(play, "x/1", first + ahead)
    assert not led or play.machine.leaders[1].members.get("a/1") is not None
    assert join(play, "b/1", drawn(play)) == ["b/1"]


def test_an_epoch_without_a_name_is_denied() -> None:
    play = Play()
    ask(play, "x/1", 5, session=None)
    play.settle()
    assert [one.reason for one in play.received(Invalidate)] == [BorrowerEndReason.DENIED]


def test_an_epoch_drawn_during_a_query_is_let_in() -> None:
    """The answer is older than the draw."""
    play = Play()
    ask(play, "a/1", drawn(play))
    ask(play, "a/1", 1)
    old = play.execute(play.requests.pop(0))
    ask(play, "b/1", drawn(play))
    ask(play, "x/1", 99)
    assert play.requests == [], "one query at a time"
    play.do(old)
    play.settle()
    assert {"b/1"} <= set(admitted(play)) <= {"a/1", "b/1"}
    denied(play, "x/1", 99)


def test_without_an_answer_nobody_is_denied() -> None:
    play = Play()
    epoch = drawn(play)
    ask(play, "a/1", epoch)
    request = play.requests.pop(0)
    assert isinstance(request, ReadSessionEpoch)
    play.do(SessionEpochRead(request, None))
    assert (play.requests, play.sent) == ([], [])
    assert join(play, "a/1", epoch) == ["a/1"]


def test_who_leaves_meanwhile_is_not_let_in() -> None:
    play = Play()
    ask(play, "a/1", drawn(play))
    play.receive(Disconnect("a/1", 0, ()))
    play.settle()
    assert admitted(play) == []


@pytest.mark.conforms("X4")
def test_queries_of_session_names_are_bounded() -> None:
    """Of one caller and of all; who is dropped asks again, and a borrower waits under its last name only."""
    play = Play()
    for number in range(MAX_QUERIES_OF_CALLER + 5):
        ask(play, f"x{number % 2}/1", 1, f"s{number}", "user:x")
    assert len(play.requests) == MAX_QUERIES_OF_CALLER
    ask(play, "a/1", 1, "etl", "user:a")
    assert len(play.requests) == MAX_QUERIES_OF_CALLER + 1, "another principal has room"
    for number in range(MAX_QUERIES):
        ask(play, f"y{number}/1", 1, f"etl{number}")
    assert len(play.requests) == MAX_QUERIES
    assert play.machine.query_counts.refused == 5 + MAX_QUERIES_OF_CALLER + 1
    play.settle()
    assert play.machine.query_counts.total == 0
    refused = [one.borrower_id for one in play.received(Invalidate)]
    assert len(refused) == len(set(refused)) == 3 + MAX_QUERIES - MAX_QUERIES_OF_CALLER - 1
    for agent in ("x0", "x1"):
        ask(play, f"{agent}/1", 1, "again", "user:x")
    assert play.machine.query_counts.total == len(play.waiting(ReadSessionEpoch)) == 1


def test_another_principal_takes_over_no_name() -> None:
    """With an epoch that was drawn for it, too."""
    play = Play()
    first = drawn(play)
    assert join(play, "a/1", first, principal="user:a") == ["a/1"]
    for epoch in (first, drawn(play)):
        why = denied(play, "x/1", epoch, "user:b")
        assert f"session 'etl' of {SUBSCRIPTION} is another principal's" in why
        assert play.machine.leaders[1].members.get("a/1") is not None
    assert join(play, "b/1", drawn(play), principal="user:a") == ["b/1"], "the newer of its own"


def test_a_name_for_people_is_anybodys_until_drawn() -> None:
    play = Play()
    for borrower_id, principal in (("a/1", "user:a"), ("b/1", "user:b")):
        assert join(play, borrower_id, 0, principal=principal) == [borrower_id]
    assert join(play, "a/2", drawn(play), principal="user:a") == ["a/2"]
    assert join(play, "b/2", 0, principal="user:b") == ["b/2"], "who used it before another drew for it goes on"
    names = {member.borrower_id: member.session for member in play.machine.leaders[1].members}
    assert names == {"a/1": "etl", "b/1": "etl", "a/2": "etl", "b/2": None}, "and is not shown as its owner"
    assert join(play, "a/3", 0, principal="user:a") == ["a/3"], "its own"


def test_where_nobody_is_known_the_newest_has_the_name() -> None:
    play = Play()
    assert join(play, "a/1", drawn(play), principal="user:a") == ["a/1"]
    assert join(play, "b/1", drawn(play)) == ["b/1"]


def test_few_names_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forged_session_checker, "MAX_REMEMBERED", 2)
    play = Play()
    epochs = {name: drawn(play, name) for name in ("one", "two", "three")}
    for name, epoch in epochs.items():
        assert join(play, f"{name}/1", epoch, name) == [f"{name}/1"]
    for name, epoch in epochs.items():
        ask(play, f"{name}/1", epoch, name)
    read = [request.session for request in play.requests if isinstance(request, ReadSessionEpoch)]
    assert read == ["one"], "the others are remembered"
