"""The election's table: every pair leads where it says, every status is reached and left, and what it leaves out is
never asked of it.
"""

from __future__ import annotations

import pytest

from sublet_leader.election import (
    TRANSITIONS,
    ClaimCompleted,
    Election,
    ElectionAction,
    ElectionEventKind,
    ElectionStatus,
    Event,
    PeerLocksChecked,
    ReleaseCompleted,
    RenewCompleted,
    Resign,
    ResignAll,
    StartCampaign,
)
from sublet_leader.settings import LeaderSettings
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.records import LeaderLivenessLock, Leadership
from sublet_storage.node_directory import NodeIncarnation

PAIRS = [(status, kind) for status, row in TRANSITIONS.items() for kind in row]
ME, OTHER = NodeIncarnation("me", "me-1", "here:1"), NodeIncarnation("other", "other-1", "there:1")
OURS = ClaimCompleted(1, 0.0, Leadership(1, ME, 100, 10.0))
RIVAL = LeaderLivenessLock.of(OTHER.incarnation)
THEIRS = ClaimCompleted(1, 0.0, Leadership(1, OTHER, 100, 10.0, RIVAL.key))
FREE = frozenset({RIVAL.key})
FAILED = ClaimCompleted(1, 0.0, None)
RELEASED = ReleaseCompleted({1: 100}, is_done=True)
NOT_RELEASED = ReleaseCompleted({1: 100}, is_done=False)
RELEASING = (ElectionStatus.RELEASING, ElectionStatus.RELEASING_TO_RECLAIM)
PATHS: dict[ElectionStatus, tuple[Event, ...]] = {
    ElectionStatus.ABSENT: (),
    ElectionStatus.CLAIMING: (StartCampaign(1),),
    ElectionStatus.ABANDONING: (StartCampaign(1), Resign(1)),
    ElectionStatus.STANDBY: (StartCampaign(1), THEIRS),
    ElectionStatus.LEADING: (StartCampaign(1), OURS),
    ElectionStatus.RELEASING: (StartCampaign(1), OURS, Resign(1)),
    ElectionStatus.RELEASING_TO_RECLAIM: (StartCampaign(1), OURS, Resign(1), StartCampaign(1)),
}
"""How each status is come by."""
HAPPENINGS: dict[ElectionEventKind, tuple[tuple[float, Event], ...]] = {
    ElectionEventKind.CAMPAIGN: ((0.2, StartCampaign(1)),),
    ElectionEventKind.RESIGN: ((0.2, Resign(1)),),
    ElectionEventKind.CLAIM_WON: ((0.2, OURS),),
    ElectionEventKind.CLAIM_WON_LATE: ((9.5, OURS),),
    ElectionEventKind.CLAIM_LOST: ((0.2, THEIRS),),
    ElectionEventKind.CLAIM_FAILED: ((0.2, FAILED),),
    ElectionEventKind.RENEWED: ((3.0, Tick()), (3.1, RenewCompleted(3.0, frozenset({1})))),
    ElectionEventKind.RENEWAL_REJECTED: ((3.0, Tick()), (3.1, RenewCompleted(3.0, frozenset()))),
    ElectionEventKind.RELEASED: ((0.2, RELEASED),),
    ElectionEventKind.RELEASE_FAILED: ((0.2, NOT_RELEASED),),
    ElectionEventKind.TRUST_EXPIRED: ((50.0, Tick()),),
    ElectionEventKind.TIMER_DUE: ((0.2, NOT_RELEASED), (50.0, Tick())),
    ElectionEventKind.RIVAL_GONE: (
        (2.2, PeerLocksChecked(0.0, 2.1, 2.2, FREE)),
        (2.5, PeerLocksChecked(0.0, 2.4, 2.5, FREE)),
    ),
}
"""How each kind comes about."""


def statuses(status: ElectionStatus) -> tuple[ElectionStatus, ...]:
    """Return the statuses of a machine that has one leadership, or had."""
    return () if status is ElectionStatus.ABSENT else (status,)


def come_to(status: ElectionStatus) -> Election:
    """A machine whose leadership 1 has come to that status."""
    machine = Election(LeaderSettings(), ME.incarnation)
    for event in PATHS[status]:
        machine.decide(event, 0.1)
    assert machine.statuses() == statuses(status)
    return machine


@pytest.mark.parametrize("status", ElectionStatus, ids=lambda status: status.name.lower())
@pytest.mark.parametrize(
    "event",
    [event for happening in HAPPENINGS.values() for _, event in happening] + [RenewCompleted(0.0, None), ResignAll()],
    ids=str,
)
def test_nothing_that_comes_in_is_missing_in_the_table(status: ElectionStatus, event: Event) -> None:
    """Late and repeated answers are weighed before it is asked: none raises, and the machine goes on."""
    for now in (0.2, 50.0):
        machine = come_to(status)
        machine.decide(event, now)
        machine.decide(event, now)
        machine.decide(Tick(), now + 50.0)


@pytest.mark.parametrize(("status", "kind"), PAIRS, ids=lambda part: part.name.lower())
def test_each_pair_leads_where_the_table_does(status: ElectionStatus, kind: ElectionEventKind) -> None:
    """What is ignored says nothing and asks for nothing."""
    machine = come_to(status)
    for now, event in HAPPENINGS[kind]:
        outcome = machine.decide(event, now)
    after, action = TRANSITIONS[status][kind]
    assert machine.statuses() == statuses(after)
    assert (1 in machine.leaderships()) == (after is ElectionStatus.LEADING)
    if action is ElectionAction.IGNORE:
        assert (outcome.claims, outcome.renew, outcome.release, outcome.notices) == ((), {}, {}, ())


def reachable(start: ElectionStatus) -> set[ElectionStatus]:
    """All statuses that some sequence of kinds leads to."""
    found, edge = {start}, [start]
    while edge:
        new = {after for after, _ in TRANSITIONS[edge.pop()].values()} - found
        found |= new
        edge += new
    return found


def test_every_status_is_reached_from_absent_and_back() -> None:
    assert reachable(ElectionStatus.ABSENT) == set(ElectionStatus)
    assert all(ElectionStatus.ABSENT in reachable(status) for status in ElectionStatus)


def test_every_action_is_used_and_is_a_method() -> None:
    assert {action for row in TRANSITIONS.values() for _, action in row.values()} == set(ElectionAction)
    assert all(callable(getattr(Election, action.value)) for action in ElectionAction)


def test_leading_begins_only_with_a_claim_in_time() -> None:
    leading = ElectionStatus.LEADING
    begins = [(s, k) for s, k in PAIRS if s is not leading and TRANSITIONS[s][k][0] is leading]
    assert begins == [(ElectionStatus.CLAIMING, ElectionEventKind.CLAIM_WON)]


@pytest.mark.conforms("E13")
def test_whatever_ends_leading_releases_the_term() -> None:
    """Before the next claim."""
    for kind, (after, action) in TRANSITIONS[ElectionStatus.LEADING].items():
        assert after in (ElectionStatus.LEADING, *RELEASING), kind
        assert after is ElectionStatus.LEADING or action in (ElectionAction.RELEASE, ElectionAction.STEP_DOWN), kind
    for status in RELEASING:
        for kind, (after, _) in TRANSITIONS[status].items():
            assert kind is ElectionEventKind.RELEASED or after in RELEASING, (status, kind)
