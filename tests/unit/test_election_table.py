"""The election's table: every pair leads where it says, every status is reached and left, and what it leaves out is
never asked of it.
"""

from __future__ import annotations

import pytest

from sublet_leader.election import (
    TABLE,
    Action,
    ClaimAnswered,
    Election,
    Event,
    Kind,
    Outcome,
    ReleaseAnswered,
    RenewAnswered,
    Status,
    Tick,
    Unwant,
    UnwantAll,
    Want,
)
from sublet_leader.election.machine import _Entry
from sublet_leader.settings import LeaderSettings
from sublet_storage.groups.model.records import Claim
from sublet_storage.nodes import NodeRef

PAIRS = [(status, kind) for status, row in TABLE.items() for kind in row]
NEVER = [(status, kind) for status in Status for kind in Kind if kind not in TABLE[status]]
ME, OTHER = NodeRef("me", "me-1", "here:1"), NodeRef("other", "other-1", "there:1")
OURS = ClaimAnswered(1, 0.0, Claim(1, ME, 100, 10.0))
THEIRS = ClaimAnswered(1, 0.0, Claim(1, OTHER, 100, 10.0))
WAYS: dict[Status, tuple[Event, ...]] = {
    Status.ABSENT: (),
    Status.CLAIMING: (Want(1),),
    Status.ABANDONING: (Want(1), Unwant(1)),
    Status.WAITING: (Want(1), THEIRS),
    Status.LED: (Want(1), OURS),
    Status.RELEASING: (Want(1), OURS, Unwant(1)),
    Status.RETURNING: (Want(1), OURS, Unwant(1), Want(1)),
}
"""How each status is come by."""


def come_to(status: Status) -> Election:
    """A machine whose leadership 1 has come to that status."""
    machine = Election(LeaderSettings(), ME.incarnation)
    for event in WAYS[status]:
        machine.decide(event, 0.1)
    assert machine.status(1) is status
    return machine


def at(status: Status) -> tuple[Election, _Entry]:
    """Such a machine, and what it remembers of leadership 1."""
    machine = come_to(status)
    entry = machine._entries.setdefault(1, _Entry(1))
    assert entry.status is status
    return machine, entry


ANSWERS: tuple[Event, ...] = (
    OURS,
    THEIRS,
    ClaimAnswered(1, 0.0, None),
    RenewAnswered(0.0, frozenset({1})),
    RenewAnswered(0.0, frozenset()),
    RenewAnswered(0.0, None),
    ReleaseAnswered({1: 100}, done=True),
    ReleaseAnswered({1: 100}, done=False),
)


@pytest.mark.parametrize("status", Status, ids=lambda status: status.name.lower())
@pytest.mark.parametrize("event", [*ANSWERS, Want(1), Unwant(1), UnwantAll(), Tick()], ids=str)
def test_nothing_that_comes_in_is_missing_in_the_table(status: Status, event: Event) -> None:
    """Late and repeated answers are weighed before it is asked: none raises, and the machine goes on."""
    for now in (0.2, 50.0):
        machine = come_to(status)
        machine.decide(event, now)
        machine.decide(event, now)
        machine.decide(Tick(), now + 50.0)


@pytest.mark.parametrize(("status", "kind"), NEVER, ids=lambda part: part.name.lower())
def test_what_cannot_happen_tells_its_story(status: Status, kind: Kind) -> None:
    machine, entry = at(status)
    with pytest.raises(AssertionError, match=rf"cannot happen to .*leadership_id=1.*{kind.value}"):
        machine._happen(entry, kind, 0.2, THEIRS)
    assert entry.status is status


@pytest.mark.parametrize(("status", "kind"), PAIRS, ids=lambda part: part.name.lower())
def test_each_pair_leads_where_the_table_says(status: Status, kind: Kind) -> None:
    """What is ignored says nothing, asks for nothing, sets no timer."""
    machine, entry = at(status)
    after, action = TABLE[status][kind]
    before = entry.wake_at
    machine._happen(entry, kind, 0.2, THEIRS)
    assert entry.status is after
    assert (1 in machine._led) == (after is Status.LED)
    if action is Action.IGNORE:
        outcome = machine.decide(Want(2), 0.2)
        assert outcome == Outcome(claims=(2,), wake_at=outcome.wake_at)
        assert entry.wake_at == before


def reachable(start: Status) -> set[Status]:
    """All statuses that some sequence of kinds leads to."""
    found, edge = {start}, [start]
    while edge:
        new = {after for after, _ in TABLE[edge.pop()].values()} - found
        found |= new
        edge += new
    return found


def test_every_status_is_reached_from_absent_and_returns_there() -> None:
    assert reachable(Status.ABSENT) == set(Status)
    for status in Status:
        assert Status.ABSENT in reachable(status)


def test_every_action_is_used_and_is_a_method() -> None:
    used = {action for row in TABLE.values() for _, action in row.values()}
    assert used == set(Action)
    for action in Action:
        assert callable(getattr(Election, action.value))


def test_leading_begins_only_with_a_claim_in_time() -> None:
    begins = {(s, k) for s, k in PAIRS if s is not Status.LED and TABLE[s][k][0] is Status.LED}
    assert begins == {(Status.CLAIMING, Kind.WON)}


@pytest.mark.conforms("E13")
def test_whatever_ends_leading_releases_the_term_before_the_next_claim() -> None:
    for kind, (after, action) in TABLE[Status.LED].items():
        assert after in (Status.LED, Status.RELEASING, Status.RETURNING), kind
        assert after is Status.LED or action in (Action.RELEASE, Action.LOSE), kind
    for status in (Status.RELEASING, Status.RETURNING):
        for kind, (after, _) in TABLE[status].items():
            assert kind is Kind.RELEASED or after in (Status.RELEASING, Status.RETURNING), (status, kind)
