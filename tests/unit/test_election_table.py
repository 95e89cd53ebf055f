"""The election's table: every pair leads where it says, every status is reached and left, and what it leaves out is
never asked of it.
"""

from __future__ import annotations

import pytest

from sublet_leader.election import (
    TRANSITIONS,
    Action,
    Campaign,
    ClaimCompleted,
    Election,
    ElectionStatus,
    Event,
    EventKind,
    Outcome,
    ReleaseCompleted,
    RenewCompleted,
    Resign,
    ResignAll,
    Tick,
)
from sublet_leader.election.machine import _Record
from sublet_leader.settings import LeaderSettings
from sublet_storage.groups.model.records import Leadership
from sublet_storage.node_directory import NodeRef

PAIRS = [(status, kind) for status, row in TRANSITIONS.items() for kind in row]
NEVER = [(status, kind) for status in ElectionStatus for kind in EventKind if kind not in TRANSITIONS[status]]
ME, OTHER = NodeRef("me", "me-1", "here:1"), NodeRef("other", "other-1", "there:1")
OURS = ClaimCompleted(1, 0.0, Leadership(1, ME, 100, 10.0))
THEIRS = ClaimCompleted(1, 0.0, Leadership(1, OTHER, 100, 10.0))
PATHS: dict[ElectionStatus, tuple[Event, ...]] = {
    ElectionStatus.ABSENT: (),
    ElectionStatus.CLAIMING: (Campaign(1),),
    ElectionStatus.ABANDONING: (Campaign(1), Resign(1)),
    ElectionStatus.STANDBY: (Campaign(1), THEIRS),
    ElectionStatus.LEADING: (Campaign(1), OURS),
    ElectionStatus.RELEASING: (Campaign(1), OURS, Resign(1)),
    ElectionStatus.RELEASING_TO_RECLAIM: (Campaign(1), OURS, Resign(1), Campaign(1)),
}
"""How each status is come by."""


def come_to(status: ElectionStatus) -> Election:
    """A machine whose leadership 1 has come to that status."""
    machine = Election(LeaderSettings(), ME.incarnation)
    for event in PATHS[status]:
        machine.decide(event, 0.1)
    assert machine.status(1) is status
    return machine


def at(status: ElectionStatus) -> tuple[Election, _Record]:
    """Such a machine, and what it remembers of leadership 1."""
    machine = come_to(status)
    entry = machine._records.setdefault(1, _Record(1))
    assert entry.status is status
    return machine, entry


ANSWERS: tuple[Event, ...] = (
    OURS,
    THEIRS,
    ClaimCompleted(1, 0.0, None),
    RenewCompleted(0.0, frozenset({1})),
    RenewCompleted(0.0, frozenset()),
    RenewCompleted(0.0, None),
    ReleaseCompleted({1: 100}, is_done=True),
    ReleaseCompleted({1: 100}, is_done=False),
)


@pytest.mark.parametrize("status", ElectionStatus, ids=lambda status: status.name.lower())
@pytest.mark.parametrize("event", [*ANSWERS, Campaign(1), Resign(1), ResignAll(), Tick()], ids=str)
def test_nothing_that_comes_in_is_missing_in_the_table(status: ElectionStatus, event: Event) -> None:
    """Late and repeated answers are weighed before it is asked: none raises, and the machine goes on."""
    for now in (0.2, 50.0):
        machine = come_to(status)
        machine.decide(event, now)
        machine.decide(event, now)
        machine.decide(Tick(), now + 50.0)


@pytest.mark.parametrize(("status", "kind"), NEVER, ids=lambda part: part.name.lower())
def test_what_cannot_happen_tells_its_story(status: ElectionStatus, kind: EventKind) -> None:
    machine, entry = at(status)
    with pytest.raises(AssertionError, match=rf"cannot happen to .*leadership_id=1.*{kind.value}"):
        machine._happen(entry, kind, 0.2, THEIRS)
    assert entry.status is status


@pytest.mark.parametrize(("status", "kind"), PAIRS, ids=lambda part: part.name.lower())
def test_each_pair_leads_where_the_table_says(status: ElectionStatus, kind: EventKind) -> None:
    """What is ignored says nothing, asks for nothing, sets no timer."""
    machine, entry = at(status)
    after, action = TRANSITIONS[status][kind]
    before = entry.wake_at
    machine._happen(entry, kind, 0.2, THEIRS)
    assert entry.status is after
    assert (1 in machine._led) == (after is ElectionStatus.LEADING)
    if action is Action.IGNORE:
        outcome = machine.decide(Campaign(2), 0.2)
        assert outcome == Outcome(claims=(2,), wake_at=outcome.wake_at)
        assert entry.wake_at == before


def reachable(start: ElectionStatus) -> set[ElectionStatus]:
    """All statuses that some sequence of kinds leads to."""
    found, edge = {start}, [start]
    while edge:
        new = {after for after, _ in TRANSITIONS[edge.pop()].values()} - found
        found |= new
        edge += new
    return found


def test_every_status_is_reached_from_absent_and_returns_there() -> None:
    assert reachable(ElectionStatus.ABSENT) == set(ElectionStatus)
    for status in ElectionStatus:
        assert ElectionStatus.ABSENT in reachable(status)


def test_every_action_is_used_and_is_a_method() -> None:
    used = {action for row in TRANSITIONS.values() for _, action in row.values()}
    assert used == set(Action)
    for action in Action:
        assert callable(getattr(Election, action.value))


def test_leading_begins_only_with_a_claim_in_time() -> None:
    begins = {
        (s, k) for s, k in PAIRS if s is not ElectionStatus.LEADING and TRANSITIONS[s][k][0] is ElectionStatus.LEADING
    }
    assert begins == {(ElectionStatus.CLAIMING, EventKind.CLAIM_WON)}


@pytest.mark.conforms("E13")
def test_whatever_ends_leading_releases_the_term_before_the_next_claim() -> None:
    for kind, (after, action) in TRANSITIONS[ElectionStatus.LEADING].items():
        assert after in (ElectionStatus.LEADING, ElectionStatus.RELEASING, ElectionStatus.RELEASING_TO_RECLAIM), kind
        assert after is ElectionStatus.LEADING or action in (Action.RELEASE, Action.STEP_DOWN), kind
    for status in (ElectionStatus.RELEASING, ElectionStatus.RELEASING_TO_RECLAIM):
        for kind, (after, _) in TRANSITIONS[status].items():
            assert kind is EventKind.RELEASED or after in (
                ElectionStatus.RELEASING,
                ElectionStatus.RELEASING_TO_RECLAIM,
            ), (status, kind)
