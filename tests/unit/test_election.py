"""One node's claims: claim, renew, lose, release, wait, and the table, of which each pair leads where it says,
and what it leaves out is never asked. Lease 10 s, renewal 3 s, margin 1 s, retry 1 s.
"""

from __future__ import annotations

import pytest

from sublet_leader.election import (
    TRANSITIONS,
    ClaimCompleted,
    Election,
    ElectionAction,
    ElectionEventKind,
    ElectionOutcome,
    ElectionStatus,
    Event,
    LeadershipAcquired,
    LeadershipHeldElsewhere,
    LeadershipLost,
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

ME = NodeIncarnation("me", "me-1", "here:1")
OTHER = NodeIncarnation("other", "other-1", "there:1")


RELEASED = ReleaseCompleted({5: 100}, is_done=True)


def election() -> Election:
    """A node that leads nothing."""
    return Election(LeaderSettings(), ME.incarnation)


def won(leadership_id: int, started: float, term: int = 100, remaining_s: float = 10.0) -> ClaimCompleted:
    """The claim was ours."""
    return ClaimCompleted(leadership_id, started, Leadership(leadership_id, ME, term, remaining_s))


def beaten(leadership_id: int, started: float, remaining_s: float, jitter_s: float = 0.0) -> ClaimCompleted:
    """The claim was the other's."""
    return ClaimCompleted(leadership_id, started, Leadership(leadership_id, OTHER, 7, remaining_s), jitter_s)


def play(machine: Election, *steps: tuple[float, Event]) -> ElectionOutcome:
    """Feed all steps; the last outcome."""
    outcome = ElectionOutcome()
    for now, event in steps:
        outcome = machine.decide(event, now)
    return outcome


def leading(*leadership_ids: int) -> Election:
    """A node that claimed these at 0 and got them at 0.1, under term 100."""
    machine = election()
    for leadership_id in leadership_ids:
        play(machine, (0.0, StartCampaign(leadership_id)), (0.1, won(leadership_id, 0.0)))
    return machine


def test_a_claim_that_is_ours_leads() -> None:
    """Wanted again before its answer it is one claim, even after it was given up."""
    machine = election()
    assert machine.decide(StartCampaign(5), 0.0) == ElectionOutcome(claims=(5,))
    for event in (StartCampaign(5), Resign(5), StartCampaign(5)):
        assert machine.decide(event, 0.05) == ElectionOutcome()
    assert machine.decide(won(5, 0.0), 0.1) == ElectionOutcome(notices=(LeadershipAcquired(5, 100),), wake_at=3.0)


@pytest.mark.conforms("E14")
def test_trust_counts_from_the_start_of_the_attempt() -> None:
    """Of the claim, and of each renewal that succeeds: not from when its answer comes."""
    claimed, renewed, failed = election(), leading(5), leading(5)
    play(claimed, (0.0, StartCampaign(5)), (8.0, won(5, 0.0)))
    play(renewed, (3.0, Tick()), (8.0, RenewCompleted(3.0, frozenset({5}))))
    play(failed, (3.0, Tick()), (8.0, RenewCompleted(3.0, None)))
    for machine, until in ((claimed, 9.0), (renewed, 12.0), (failed, 9.0)):
        assert [machine.trusted_term(5, at) for at in (until - 0.1, until)] == [100, None]


@pytest.mark.conforms("E14")
def test_an_old_claim_of_ours_is_trusted_to_its_end() -> None:
    machine = election()
    play(machine, (0.0, StartCampaign(5)), (0.1, ClaimCompleted(5, 0.0, None)), (1.1, Tick()))
    outcome = machine.decide(won(5, 1.1, remaining_s=4.0), 1.2)
    assert machine.trusted_term(5, 4.0) == 100
    assert machine.trusted_term(5, 4.1) is None
    assert outcome.renew == {5: 100}, "a third of the lease has gone: renew now"


@pytest.mark.parametrize(
    "steps", [((9.0, won(5, 0.0)),), ((0.1, Resign(5)), (0.2, won(5, 0.0)))], ids=["too late", "given up"]
)
def test_a_claim_that_may_not_lead_is_released(steps: tuple[tuple[float, Event], ...]) -> None:
    machine = election()
    assert play(machine, (0.0, StartCampaign(5)), *steps) == ElectionOutcome(release={5: 100})
    assert machine.leaderships() == {}


def test_all_leaderships_renew_in_one_batch() -> None:
    machine = leading(5, 6)
    assert machine.decide(Tick(), 2.9).renew == {}
    assert machine.decide(Tick(), 3.0).renew == {5: 100, 6: 100}
    assert machine.decide(Tick(), 7.0).renew == {}
    assert machine.decide(RenewCompleted(3.0, frozenset({5, 6})), 7.1).renew == {5: 100, 6: 100}


@pytest.mark.conforms("E13")
def test_a_refused_renewal_is_a_notice_and_a_release() -> None:
    machine = leading(5, 6)
    outcome = play(machine, (3.0, Tick()), (3.1, RenewCompleted(3.0, frozenset({6}))))
    assert (outcome.notices, outcome.release) == ((LeadershipLost(5),), {5: 100})
    assert [machine.trusted_term(each, 3.1) for each in (5, 6)] == [None, 100]


@pytest.mark.conforms("E13")
def test_a_pause_past_the_lease_steps_down() -> None:
    machine = leading(5)
    assert machine.trusted_term(5, 60.0) is None
    outcome = machine.decide(Tick(), 60.0)
    assert (outcome.notices, outcome.release, outcome.claims, outcome.renew) == ((LeadershipLost(5),), {5: 100}, (), {})
    assert machine.decide(RELEASED, 60.1).claims == (5,)
    assert machine.decide(won(5, 60.1, term=101), 60.2).notices == (LeadershipAcquired(5, 101),)


def test_an_answer_just_before_the_lapse_counts() -> None:
    machine = leading(5)
    outcome = play(machine, (3.0, Tick()), (9.5, RenewCompleted(3.0, frozenset({5}))))
    assert (outcome.notices, machine.trusted_term(5, 9.5)) == ((), 100)


@pytest.mark.conforms("E13")
def test_an_answer_is_about_its_own_term() -> None:
    machine = leading(5)
    play(machine, (8.9, Tick()), (9.0, Tick()), (9.1, RELEASED))
    play(machine, (9.2, won(5, 9.1, term=101)))
    outcome = machine.decide(RenewCompleted(8.9, frozenset()), 9.3)
    assert outcome.notices == ()
    assert machine.trusted_term(5, 9.3) == 101
    assert machine.decide(RELEASED, 9.4).notices == ()
    assert machine.statuses() == (ElectionStatus.LEADING,)


@pytest.mark.conforms("E12")
@pytest.mark.parametrize(("remaining_s", "retry_at"), [(8.0, 8.75), (3600.0, 10.75)], ids=["running", "clock set back"])
def test_the_loser_asks_again_when_that_lease_ends(remaining_s: float, retry_at: float) -> None:
    machine = election()
    outcome = play(machine, (0.0, StartCampaign(5)), (0.5, beaten(5, 0.0, remaining_s, jitter_s=0.25)))
    assert outcome == ElectionOutcome(notices=(LeadershipHeldElsewhere(5, "there:1"),), wake_at=retry_at)
    assert machine.decide(Tick(), retry_at - 0.05).claims == ()
    assert machine.decide(Tick(), retry_at).claims == (5,)


@pytest.mark.conforms("E15")
def test_wanted_again_the_claim_comes_sooner() -> None:
    machine = election()
    play(machine, (0.0, StartCampaign(5)), (0.1, beaten(5, 0.0, remaining_s=8.0)))
    assert machine.decide(StartCampaign(5), 0.2) == ElectionOutcome(wake_at=1.0)
    assert machine.decide(Tick(), 1.0).claims == (5,)
    play(machine, (1.1, beaten(5, 1.0, remaining_s=7.0)))
    assert machine.decide(StartCampaign(5), 5.0).claims == (5,)


CLAIMED, LED = (0.0, StartCampaign(5)), (0.1, won(5, 0.0))


@pytest.mark.parametrize(
    ("steps", "wake_at", "again"),
    [
        ((CLAIMED, (0.1, beaten(5, 0.0, remaining_s=-3.0))), 1.0, ElectionOutcome(claims=(5,))),
        ((CLAIMED, (0.1, ClaimCompleted(5, 0.0, None, jitter_s=0.1))), 1.2, ElectionOutcome(claims=(5,))),
        ((CLAIMED, LED, (3.0, Tick()), (3.5, RenewCompleted(3.0, None))), 4.5, ElectionOutcome(renew={5: 100})),
        (
            (CLAIMED, LED, (1.0, Resign(5)), (1.5, ReleaseCompleted({5: 100}, is_done=False))),
            2.5,
            ElectionOutcome(release={5: 100}),
        ),
    ],
    ids=["claim just run out", "claim", "renewal", "release"],
)
def test_what_failed_is_tried_again(
    steps: tuple[tuple[float, Event], ...], wake_at: float, again: ElectionOutcome
) -> None:
    """After a while: it does not spin."""
    machine = election()
    outcome = play(machine, *steps)
    assert (outcome.claims, outcome.renew, outcome.release) == ((), {}, {})
    assert outcome.wake_at == pytest.approx(wake_at)
    found = machine.decide(Tick(), wake_at + 0.001)
    assert (found.claims, found.renew, found.release) == (again.claims, again.renew, again.release)


@pytest.mark.conforms("E22")
@pytest.mark.parametrize("is_wanted_again", [False, True])
def test_giving_up_releases_and_forgets(is_wanted_again: bool) -> None:
    """Wanted again meanwhile it is claimed when the release is done."""
    machine = leading(5)
    assert machine.decide(Resign(5), 1.0).release == {5: 100}
    assert machine.trusted_term(5, 1.0) is None
    if is_wanted_again:
        assert machine.decide(StartCampaign(5), 1.05).claims == ()
    assert machine.decide(RELEASED, 1.1).claims == (5,) * is_wanted_again
    assert machine.is_busy() == is_wanted_again
    assert machine.trusted_term(5, 1.1) is None
    assert machine.decide(Tick(), 3.0) == ElectionOutcome(), "nothing is renewed any more"


@pytest.mark.conforms("E15")
def test_a_drain_releases_everything_in_one_batch() -> None:
    machine = leading(5, 6)
    play(machine, (0.2, StartCampaign(7)), (0.3, StartCampaign(8)), (0.4, beaten(8, 0.3, 5.0)))
    assert machine.decide(ResignAll(), 1.0).release == {5: 100, 6: 100}
    assert len(machine.statuses()) == 3, "of 8 nothing is left"
    assert machine.decide(won(7, 0.2), 1.1).release == {7: 100}, "a claim under way is released when it arrives"


def test_nobody_is_woken_for_a_renewal_under_way() -> None:
    """The next begins when it is answered."""
    machine = leading(5)
    play(machine, (3.0, Tick()), (3.1, StartCampaign(6)), (3.2, won(6, 3.1)))
    assert machine.decide(Tick(), 7.0).wake_at == 9.0, "the end of its trust"


def test_answers_to_nothing_are_ignored() -> None:
    machine = election()
    for event in (won(5, 0.0), RenewCompleted(0.0, frozenset({5})), ReleaseCompleted({5: 1}, is_done=True), Resign(5)):
        assert machine.decide(event, 1.0) == ElectionOutcome()


# --- the table --------------------------------------------------------------------------------------------------------

PAIRS = [(status, kind) for status, row in TRANSITIONS.items() for kind in row]
OURS = won(5, 0.0)
RIVAL = LeaderLivenessLock.of(OTHER.incarnation)
THEIRS = ClaimCompleted(5, 0.0, Leadership(5, OTHER, 100, 10.0, RIVAL.key))
FREE = frozenset({RIVAL.key})
FAILED = ClaimCompleted(5, 0.0, None)
NOT_RELEASED = ReleaseCompleted({5: 100}, is_done=False)
RELEASING = (ElectionStatus.RELEASING, ElectionStatus.RELEASING_TO_RECLAIM)
CAMPAIGN, RESIGN = StartCampaign(5), Resign(5)
PATHS: dict[ElectionStatus, tuple[Event, ...]] = {
    ElectionStatus.ABSENT: (),
    ElectionStatus.CLAIMING: (CAMPAIGN,),
    ElectionStatus.ABANDONING: (CAMPAIGN, RESIGN),
    ElectionStatus.STANDBY: (CAMPAIGN, THEIRS),
    ElectionStatus.LEADING: (CAMPAIGN, OURS),
    ElectionStatus.RELEASING: (CAMPAIGN, OURS, RESIGN),
    ElectionStatus.RELEASING_TO_RECLAIM: (CAMPAIGN, OURS, RESIGN, CAMPAIGN),
}
"""How each status is come by."""
HAPPENINGS: dict[ElectionEventKind, tuple[tuple[float, Event], ...]] = {
    ElectionEventKind.CAMPAIGN: ((0.2, CAMPAIGN),),
    ElectionEventKind.RESIGN: ((0.2, RESIGN),),
    ElectionEventKind.CLAIM_WON: ((0.2, OURS),),
    ElectionEventKind.CLAIM_WON_LATE: ((9.5, OURS),),
    ElectionEventKind.CLAIM_LOST: ((0.2, THEIRS),),
    ElectionEventKind.CLAIM_FAILED: ((0.2, FAILED),),
    ElectionEventKind.RENEWED: ((3.0, Tick()), (3.1, RenewCompleted(3.0, frozenset({5})))),
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
    """A machine whose leadership 5 has come to that status."""
    machine = election()
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
    assert (5 in machine.leaderships()) == (after is ElectionStatus.LEADING)
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
    """Every action is used, and is a method."""
    assert reachable(ElectionStatus.ABSENT) == set(ElectionStatus)
    assert all(ElectionStatus.ABSENT in reachable(status) for status in ElectionStatus)
    assert {action for row in TRANSITIONS.values() for _, action in row.values()} == set(ElectionAction)
    assert all(callable(getattr(Election, action.value)) for action in ElectionAction)


@pytest.mark.conforms("E13")
def test_whatever_ends_leading_releases_the_term() -> None:
    """Before the next claim. It begins only with a claim that was won in time."""
    begins = [(s, k) for s, k in PAIRS if s is not ElectionStatus.LEADING is TRANSITIONS[s][k][0]]
    assert begins == [(ElectionStatus.CLAIMING, ElectionEventKind.CLAIM_WON)]
    for kind, (after, action) in TRANSITIONS[ElectionStatus.LEADING].items():
        assert after in (ElectionStatus.LEADING, *RELEASING), kind
        assert after is ElectionStatus.LEADING or action in (ElectionAction.RELEASE, ElectionAction.STEP_DOWN), kind
    for status in RELEASING:
        for kind, (after, _) in TRANSITIONS[status].items():
            assert kind is ElectionEventKind.RELEASED or after in RELEASING, (status, kind)
