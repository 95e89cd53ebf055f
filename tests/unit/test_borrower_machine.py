"""A borrower, by transition: the table read as data, and the effect of each of its actions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from sublet_borrower.machine.borrower import Borrower, SubscriptionRequest
from sublet_borrower.machine.events import (
    Event,
    LeaderMessageReceived,
    NodeLost,
    Outcome,
    RevokeStarted,
    SavedProgress,
    Send,
    SessionProgress,
    StreamGranted,
    StreamRemoved,
    Tick,
    Unsubscribe,
)
from sublet_borrower.machine.transitions import (
    ACTIONS,
    ALLOWED_TRANSITIONS,
    Action,
    BorrowerStatus,
    EventKind,
    StreamStatus,
)
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.in_doubt import InDoubtRange
from sublet_protocol.messages.borrower_leader import (
    Disconnect,
    Grant,
    HeldGrant,
    Invalidate,
    InvalidateReason,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    PingResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    RevokedReason,
    RevokeFinished,
    StreamProgress,
    ToBorrower,
    ToLeader,
    UpdateProgress,
)

ME, NODE, TERM, GROUP = "a/1", "n1:1", 100, 7
SETTINGS = BorrowerSettings()
GOOD_S = 8.5
"""For how long its leader's answer to a ping is good."""
WANTS = SubscriptionRequest("a", "$share/g/#", 2.0, "stable", "earliest")
GRANT = Grant(ME, TERM, 5, 50, 10, 1, 0, 99, "#")
CONNECTED = LeaderConnectResponse(ME, TERM, GROUP)


class Play:
    """A borrower and all that came of its events."""

    def __init__(self, machine: Borrower | None = None) -> None:
        self.machine = machine or Borrower(ME, WANTS, SETTINGS)
        self.now = 0.0
        self.last = Outcome()

    def begin(self, at: float = 0.0) -> Outcome:
        """Let it look for its leader."""
        self.now, self.last = at, self.machine.start(at)
        return self.last

    def do(self, event: Event, at: float | None = None) -> Outcome:
        """One event."""
        self.now = self.now if at is None else at
        self.last = self.machine.decide(event, self.now)
        return self.last

    def receive(self, message: ToBorrower, at: float | None = None, node: str = NODE) -> Outcome:
        """A message from a node."""
        return self.do(LeaderMessageReceived(node, message), at)

    def said(self, kind: type[ToLeader]) -> list[ToLeader]:
        """What the last event made it send, of one type."""
        return [s.message for s in self.last.sends if isinstance(s.message, kind)]


def connecting() -> Play:
    play = Play()
    play.begin()
    return play


def connected(*grants: Grant) -> Play:
    play = connecting()
    play.receive(CONNECTED)
    play.receive(PingResponse(ME, TERM, 0.0, GOOD_S))
    for grant in grants:
        play.receive(grant)
    return play


def unsubscribing(*grants: Grant) -> Play:
    play = connected(*grants)
    play.do(Unsubscribe())
    return play


def destroyed() -> Play:
    play = connected()
    play.receive(Invalidate(ME, TERM, InvalidateReason.RETRY))
    return play


PLAYS: dict[BorrowerStatus, Callable[[], Play]] = {
    BorrowerStatus.CONNECTING: connecting,
    BorrowerStatus.CONNECTED: lambda: connected(GRANT),
    BorrowerStatus.UNSUBSCRIBING: lambda: unsubscribing(GRANT),
}
EVENTS: dict[EventKind, Event] = {
    EventKind.CONNECT_RESPONSE: LeaderMessageReceived(NODE, CONNECTED),
    EventKind.PING_RESPONSE: LeaderMessageReceived(NODE, PingResponse(ME, TERM, 0.0, GOOD_S)),
    EventKind.GRANT: LeaderMessageReceived(NODE, replace(GRANT, stream_id=6)),
    EventKind.REVOKE: LeaderMessageReceived(NODE, Revoke(ME, TERM, 5, 50)),
    EventKind.REVOKED: LeaderMessageReceived(NODE, Revoked(ME, TERM, 5, 50, RevokedReason.SAVED)),
    EventKind.PROGRESS_SAVED: LeaderMessageReceived(NODE, ProgressSaved(ME, TERM, 5, 50, 11)),
    EventKind.INVALIDATE: LeaderMessageReceived(NODE, Invalidate(ME, TERM, InvalidateReason.RETRY)),
    EventKind.NODE_LOST: NodeLost(NODE),
    EventKind.SESSION_PROGRESS: SessionProgress(5, 50, 12),
    EventKind.UNSUBSCRIBE: Unsubscribe(),
    EventKind.TICK: Tick(),
}
PAIRS = [(status, kind) for status, row in ACTIONS.items() for kind in row]

# --- the table, as data -----------------------------------------------------------------------------------------------


@pytest.mark.conforms("E3")
def test_every_pair_has_an_answer() -> None:
    assert set(ALLOWED_TRANSITIONS) == set(BorrowerStatus)
    assert set(ACTIONS) == set(BorrowerStatus) - {BorrowerStatus.NEW, BorrowerStatus.DESTROYED}
    assert all(set(row) == set(EventKind) for row in ACTIONS.values())


@pytest.mark.conforms("E3")
def test_statuses_never_go_back_and_all_are_reached() -> None:
    order = list(BorrowerStatus)
    assert all(
        order.index(after) > order.index(before) for before, afters in ALLOWED_TRANSITIONS.items() for after in afters
    )
    assert {after for afters in ALLOWED_TRANSITIONS.values() for after in afters} == set(BorrowerStatus) - {
        BorrowerStatus.NEW
    }


@pytest.mark.conforms("E3")
def test_a_move_back_tells_its_story() -> None:
    machine = connected().machine
    with pytest.raises(
        AssertionError, match=r"a/1: BorrowerStatus\.CONNECTED must not go to BorrowerStatus\.CONNECTING"
    ):
        machine._move(BorrowerStatus.CONNECTING)


def test_every_action_is_used_and_is_a_method() -> None:
    assert {action for row in ACTIONS.values() for action in row.values()} == set(Action)
    assert all(callable(getattr(Borrower, action.value)) for action in Action)


@pytest.mark.conforms("E3", "E6")
@pytest.mark.parametrize(("status", "kind"), PAIRS, ids=lambda part: part.name.lower())
def test_what_is_ignored_changes_nothing_and_what_is_not_moves_as_allowed(
    status: BorrowerStatus, kind: EventKind
) -> None:
    play = PLAYS[status]()
    assert play.machine.status is status
    streams = [(s.stream_id, s.grant_id, s.position, s.status) for s in play.machine.streams]
    outcome = play.do(EVENTS[kind])
    if ACTIONS[status][kind] is Action.IGNORE:
        assert (outcome.sends, outcome.updates, outcome.ended, play.machine.status) == ((), (), None, status)
        assert [(s.stream_id, s.grant_id, s.position, s.status) for s in play.machine.streams] == streams
    else:
        assert play.machine.status is status or play.machine.status in ALLOWED_TRANSITIONS[status]


@pytest.mark.conforms("E3", "E10")
@pytest.mark.parametrize("kind", EventKind, ids=lambda kind: kind.name.lower())
def test_one_that_is_not_begun_or_is_over_answers_nothing(kind: EventKind) -> None:
    for play, status in ((Play(), BorrowerStatus.NEW), (destroyed(), BorrowerStatus.DESTROYED)):
        assert play.do(EVENTS[kind]) == Outcome()
        assert play.machine.status is status


@pytest.mark.conforms("E3")
def test_it_begins_once() -> None:
    for play in (connecting(), connected(), unsubscribing(), destroyed()):
        with pytest.raises(AssertionError, match=r"must not go to BorrowerStatus\.CONNECTING"):
            play.begin()


@pytest.mark.conforms("E6")
def test_one_that_leaves_refuses_new_work() -> None:
    refused = {EventKind.GRANT, EventKind.REVOKE, EventKind.REVOKED, EventKind.CONNECT_RESPONSE, EventKind.UNSUBSCRIBE}
    assert {k for k, a in ACTIONS[BorrowerStatus.UNSUBSCRIBING].items() if a is Action.IGNORE} == refused


# --- connecting (ASK_AGAIN, CONNECT, LOOK_ELSEWHERE, LEAVE_UNCONNECTED, NOTE_PROGRESS) -------------------------


@pytest.mark.conforms("E4")
def test_it_asks_at_once_and_again_on_its_timer_until_a_leader_answers() -> None:
    play = connecting()
    wanted = LeaderWanted(ME, "a", "$share/g/#", None, 2.0, "stable", False, (), "earliest", None)
    assert play.said(LeaderWanted) == [wanted]
    assert play.last.wake_at == SETTINGS.leader_lookup_interval_s
    assert play.do(Tick(), 0.99).sends == ()
    play.do(Tick(), 1.0)
    assert play.said(LeaderWanted) == [wanted]
    assert play.last.sends[0].node is None
    play.receive(CONNECTED)
    assert play.machine.status is BorrowerStatus.CONNECTED


@pytest.mark.conforms("E4")
def test_the_timer_of_an_earlier_status_does_nothing() -> None:
    play = connected()
    play.do(Tick(), SETTINGS.leader_lookup_interval_s)
    assert play.said(LeaderWanted) == []
    play.do(Unsubscribe(), 1.0)
    play.do(Tick(), 2.0)
    assert play.said(LeaderWanted) == []
    assert play.said(UpdateProgress) == [], "nor does the one of the reports, in unsubscribing"


def test_a_redirect_is_followed_at_once() -> None:
    play = connecting()
    play.receive(LeaderConnectResponse(ME, 0, GROUP, "n2:1"))
    assert [s.node for s in play.last.sends] == ["n2:1"]
    assert play.machine.status is BorrowerStatus.CONNECTING


def test_a_dead_redirect_is_given_up_soon_but_not_at_once() -> None:
    play = connecting()
    play.receive(LeaderConnectResponse(ME, 0, GROUP, "n2:1"), 0.5)
    play.do(NodeLost("n2:1"), 0.6)
    assert play.last.sends == ()
    assert play.last.wake_at == pytest.approx(0.85)
    play.do(NodeLost("n9:1"), 0.7)
    outcome = play.do(Tick(), 0.85)
    assert [send.node for send in outcome.sends] == [None]
    assert len(play.said(LeaderWanted)) == 1


def test_connecting_pings_at_once_and_knows_the_group_from_then_on() -> None:
    play = connecting()
    play.receive(CONNECTED, 0.3)
    assert play.said(Ping) == [Ping((ME,), 0.3)]
    assert (play.machine.term, play.machine.group_id, play.machine.node) == (TERM, GROUP, NODE)
    assert play.machine.successor_state().group_id == GROUP


@pytest.mark.conforms("E6")
def test_leaving_before_a_leader_is_found_says_so_and_ends() -> None:
    play = connecting()
    play.do(Unsubscribe())
    assert play.said(Disconnect) == [Disconnect(ME, 0, ())]
    assert play.last.ended is not None
    assert play.last.ended.reason is InvalidateReason.DONE
    assert play.machine.status is BorrowerStatus.DESTROYED


@pytest.mark.conforms("E31")
def test_leaving_with_streams_while_there_is_no_leader_waits_for_one_but_not_for_ever() -> None:
    heir = successor(connected(GRANT), "lost")
    play = Play(heir)
    play.begin(1.0)
    play.do(Unsubscribe(), 1.5)
    assert [t for t in play.last.updates if isinstance(t, RevokeStarted)] == [RevokeStarted(5, 50)]
    [wanted] = play.said(LeaderWanted)
    assert isinstance(wanted, LeaderWanted)
    assert (wanted.leaving, wanted.reclaim, wanted.predecessor) == (True, (HeldGrant(5, 50, 10),), ME)
    play.do(SessionProgress(5, 50, 14, is_final=True), 1.6)
    play.do(Unsubscribe(), 9.0)
    assert play.last.sends == ()
    play.do(Tick(), 10.0)
    [wanted] = play.said(LeaderWanted)
    assert isinstance(wanted, LeaderWanted)
    assert wanted.reclaim == (HeldGrant(5, 50, 14),)
    play.do(Tick(), 1.5 + SETTINGS.unsubscribe_timeout_s + SETTINGS.disconnect_timeout_s)
    assert play.last.ended is not None
    assert "no leader confirmed" in play.last.ended.detail


@pytest.mark.conforms("E31")
def test_one_born_leaving_hands_over_as_soon_as_it_is_connected() -> None:
    leaving = unsubscribing(GRANT)
    leaving.do(SessionProgress(5, 50, 14, is_final=True))
    heir = successor(leaving, "lost")
    play = Play(heir)
    play.begin(1.0)
    play.receive(LeaderConnectResponse("a/2", 200, GROUP), 1.1)
    assert play.machine.status is BorrowerStatus.UNSUBSCRIBING
    assert play.said(Disconnect) == [Disconnect("a/2", 200, (StreamProgress(5, 50, 14, True),))]


# --- keeping in touch (KEEP_IN_TOUCH, HEAR_PING, LOSE_LEADER, CONNECT_AGAIN, END) -------------------------------------


@pytest.mark.conforms("E5")
def test_pings_on_its_timer() -> None:
    play = connected()
    assert play.last.wake_at == SETTINGS.resend_interval_s
    play.do(Tick(), 1.99)
    assert play.said(Ping) == []
    play.do(Tick(), 2.0)
    assert play.said(Ping) == [Ping((ME,), 2.0)]


@pytest.mark.conforms("E5")
def test_no_ping_answered_in_time_invalidates() -> None:
    play = connected(GRANT)
    play.do(Tick(), SETTINGS.ping_timeout_s - 0.01)
    assert play.last.ended is None
    ended = play.do(Tick(), SETTINGS.ping_timeout_s).ended
    assert ended is not None
    assert ended.reason is InvalidateReason.RETRY
    assert ended.held_grants == (HeldGrant(5, 50, 10),)


@pytest.mark.conforms("E5")
def test_what_counts_is_when_the_ping_was_sent_not_when_its_answer_came() -> None:
    play = connected()
    play.receive(PingResponse(ME, TERM, 2.0, GOOD_S), 5.5)
    play.do(Tick(), 7.99)
    assert play.last.ended is None
    play.do(Tick(), 8.0)
    assert play.last.ended is not None


@pytest.mark.conforms("E7", "E14")
def test_a_leaders_word_is_good_from_when_its_ping_was_sent_not_from_when_its_answer_came() -> None:
    play = connected(GRANT)
    play.receive(PingResponse(ME, TERM, 2.0, GOOD_S), 5.5)
    assert play.machine.may_start_call(5, 50, 2.0 + GOOD_S - 0.01)
    assert not play.machine.may_start_call(5, 50, 2.0 + GOOD_S)


@pytest.mark.conforms("E5")
@pytest.mark.parametrize("sent_at", [1e308, math.inf, math.nan, -math.inf])
def test_an_absurd_time_in_an_answer_is_trusted_no_longer_than_an_honest_one(sent_at: float) -> None:
    play = connected(GRANT)
    play.receive(PingResponse(ME, TERM, sent_at, GOOD_S), 1.0)
    assert not play.machine.may_start_call(5, 50, 1.0 + GOOD_S)
    play.do(Tick(), 7.0)
    assert play.last.ended is not None


@pytest.mark.conforms("E5")
def test_a_dead_connection_invalidates_at_once_if_it_is_the_leaders() -> None:
    play = connected()
    play.do(NodeLost("n2:1"), 0.1)
    assert play.last.ended is None
    ended = play.do(NodeLost(NODE), 0.1).ended
    assert ended is not None
    assert ended.reason is InvalidateReason.RETRY


def test_a_repeated_answer_of_the_same_leader_is_nothing_new_but_a_later_term_is() -> None:
    play = connected()
    assert play.receive(CONNECTED).ended is None
    assert play.receive(LeaderConnectResponse(ME, 0, GROUP, "n2:1")).ended is None
    assert play.receive(LeaderConnectResponse(ME, TERM - 1, GROUP)).ended is None
    ended = play.receive(LeaderConnectResponse(ME, TERM + 1, GROUP)).ended
    assert ended is not None
    assert ended.reason is InvalidateReason.RETRY


@pytest.mark.parametrize("reason", list(InvalidateReason))
def test_an_invalidate_ends_it_with_its_reason(reason: InvalidateReason) -> None:
    for play in (connecting(), connected(GRANT), unsubscribing(GRANT)):
        ended = play.receive(Invalidate(ME, TERM, reason, "why")).ended
        assert ended is not None
        assert (ended.reason, ended.detail) == (reason, "why")


def test_a_node_that_knows_no_leader_can_end_it_under_no_term() -> None:
    assert connected().receive(Invalidate(ME, 0, InvalidateReason.RETRY)).ended is not None


# --- streams (ADD_STREAM, STOP_STREAM, DROP_STREAM) -------------------------------------------------------------------


@pytest.mark.conforms("E7")
def test_a_grant_is_installed_and_answered_with_progress_at_once() -> None:
    play = connected(GRANT)
    assert play.last.updates == (StreamGranted(GRANT),)
    assert play.said(UpdateProgress) == [UpdateProgress(ME, TERM, (StreamProgress(5, 50, 10),))]


@pytest.mark.conforms("E7")
def test_a_repeated_grant_is_answered_again_and_installed_once() -> None:
    play = connected(GRANT)
    play.do(SessionProgress(5, 50, 12), 0.01)
    play.receive(GRANT, 0.02)
    assert play.last.updates == ()
    assert play.said(UpdateProgress) == [UpdateProgress(ME, TERM, (StreamProgress(5, 50, 12),))]


@pytest.mark.conforms("E7")
def test_a_revoke_stops_the_session_once_and_is_settled_by_the_final_progress() -> None:
    play = connected(GRANT)
    assert play.receive(Revoke(ME, TERM, 5, 50)).updates == (RevokeStarted(5, 50),)
    assert play.receive(Revoke(ME, TERM, 5, 50)).updates == ()
    [stream] = play.machine.streams
    assert stream.status is StreamStatus.REVOKING
    play.do(SessionProgress(5, 50, 15, is_final=True), 0.01)
    final = UpdateProgress(ME, TERM, (StreamProgress(5, 50, 15, True),))
    assert play.said(UpdateProgress) == [final]
    play.receive(Revoke(ME, TERM, 5, 50), 0.5)
    assert play.said(UpdateProgress) == [final], "the leader has not heard it"
    play.do(Tick(), 1.6)
    assert play.said(UpdateProgress) == [final], "nor confirmed it"


@pytest.mark.conforms("E7")
@pytest.mark.parametrize("reason", list(RevokedReason))
def test_a_revoked_stream_is_removed_with_the_reason_and_confirmed_each_time(reason: RevokedReason) -> None:
    play = connected(GRANT)
    revoked = Revoked(ME, TERM, 5, 50, reason)
    assert play.receive(revoked).updates == (StreamRemoved(5, 50, reason),)
    assert play.said(RevokeFinished) == [RevokeFinished(ME, TERM, 5, 50)]
    assert play.receive(revoked).updates == ()
    assert play.said(RevokeFinished) == [RevokeFinished(ME, TERM, 5, 50)]


@pytest.mark.conforms("E7")
def test_a_revoke_of_what_it_does_not_hold_is_answered_revoke_finished() -> None:
    play = connected()
    play.receive(Revoke(ME, TERM, 5, 50))
    assert play.said(RevokeFinished) == [RevokeFinished(ME, TERM, 5, 50)]
    play.receive(GRANT)
    assert play.last.updates == (), "the grant was overtaken by its revoke: it is over"
    assert play.said(RevokeFinished) == [RevokeFinished(ME, TERM, 5, 50)]


@pytest.mark.conforms("E10")
def test_a_grant_that_is_over_does_not_bring_the_stream_back() -> None:
    play = connected(GRANT)
    play.receive(Revoked(ME, TERM, 5, 50, RevokedReason.SAVED))
    for grant_id in (50, 49):
        assert play.receive(replace(GRANT, grant_id=grant_id)).updates == ()
        assert play.said(RevokeFinished) == [RevokeFinished(ME, TERM, 5, grant_id)]
    assert len(play.machine.streams) == 0


@pytest.mark.conforms("E10")
def test_a_word_about_a_newer_grant_ends_the_one_held() -> None:
    play = connected(GRANT)
    newer = replace(GRANT, grant_id=60, position=20)
    assert play.receive(newer).updates == (StreamRemoved(5, 50, RevokedReason.LOST), StreamGranted(newer))
    assert play.receive(GRANT).updates == ()
    assert play.receive(Revoke(ME, TERM, 5, 70)).updates == (StreamRemoved(5, 60, RevokedReason.LOST),)
    assert play.said(RevokeFinished) == [RevokeFinished(ME, TERM, 5, 70)]


@pytest.mark.conforms("E7")
def test_a_stream_that_ended_of_itself_needs_no_stop() -> None:
    play = connected(GRANT)
    play.do(SessionProgress(5, 50, 30, is_final=True), 0.01)
    assert play.receive(Revoke(ME, TERM, 5, 50)).updates == ()


# --- the past (E10) ---------------------------------------------------------------------------------------------------

STREAM_MESSAGES: list[ToBorrower] = [
    replace(GRANT, stream_id=6),
    Revoke(ME, TERM, 5, 50),
    Revoked(ME, TERM, 5, 50, RevokedReason.LOST),
    ProgressSaved(ME, TERM, 5, 50, 99),
    PingResponse(ME, TERM, 5.0, GOOD_S),
]


@pytest.mark.conforms("E10")
@pytest.mark.parametrize("message", STREAM_MESSAGES, ids=lambda m: type(m).__name__)
@pytest.mark.parametrize("change", [{"borrower_id": "a/0"}, {"term": TERM - 1}, {"term": TERM + 1}, {"term": 0}])
def test_messages_under_another_identity_have_no_effect(message: ToBorrower, change: dict[str, object]) -> None:
    play = connected(GRANT)
    outcome = play.receive(replace(message, **change), 0.5)  # type: ignore[arg-type]
    assert (outcome.sends, outcome.updates, outcome.ended) == ((), (), None)
    [stream] = play.machine.streams
    assert (stream.status, stream.saved_position) == (StreamStatus.GRANTED, -1)
    assert play.machine.trusted_until == GOOD_S


@pytest.mark.conforms("E10")
@pytest.mark.parametrize("change", [{"borrower_id": "a/0"}, {"term": TERM - 1}])
def test_an_invalidate_for_another_identity_has_no_effect(change: dict[str, object]) -> None:
    invalidate = replace(Invalidate(ME, TERM, InvalidateReason.DELETED), **change)  # type: ignore[arg-type]
    assert connected().receive(invalidate).ended is None


@pytest.mark.conforms("E10", "E17")
def test_progress_under_an_old_grant_is_not_reported() -> None:
    play = connected(replace(GRANT, grant_id=60))
    assert play.do(SessionProgress(5, 50, 99, is_final=True), 0.5).sends == ()
    [stream] = play.machine.streams
    assert (stream.position, stream.is_final) == (10, False)


# --- progress (REPORT_PROGRESS, NOTE_SAVED) ---------------------------------------------------------------------------


def test_progress_is_reported_no_oftener_than_the_setting_and_never_forgotten() -> None:
    play = connected(GRANT)
    assert play.do(SessionProgress(5, 50, 11), 0.01).sends == ()
    assert play.last.wake_at == pytest.approx(SETTINGS.progress_interval_s)
    play.do(SessionProgress(5, 50, 12), 0.02)
    play.do(Tick(), SETTINGS.progress_interval_s)
    assert play.said(UpdateProgress) == [UpdateProgress(ME, TERM, (StreamProgress(5, 50, 12),))]


@pytest.mark.conforms("E7")
def test_progress_is_reported_again_until_it_is_saved_and_then_not() -> None:
    play = connected(GRANT)
    play.do(Tick(), 1.0)
    assert play.said(UpdateProgress) == [UpdateProgress(ME, TERM, (StreamProgress(5, 50, 10),))]
    assert play.receive(ProgressSaved(ME, TERM, 5, 50, 10), 1.1).updates == (SavedProgress(5, 50, 10),)
    assert play.receive(ProgressSaved(ME, TERM, 5, 50, 10), 1.1).updates == (), "said once"
    play.do(Tick(), 2.1)
    assert play.said(UpdateProgress) == []


@pytest.mark.conforms("E27")
def test_a_plan_is_reported_at_once_and_again_until_it_is_saved() -> None:
    play = connected(GRANT)
    play.receive(ProgressSaved(ME, TERM, 5, 50, 10), 0.0)
    doubt = InDoubtRange(50, 10, 20, 60.0)
    planned = UpdateProgress(ME, TERM, (StreamProgress(5, 50, 10, in_doubt=doubt),))
    assert play.do(SessionProgress(5, 50, 10, in_doubt=doubt), 0.001).sends == (Send(NODE, planned),)
    assert play.receive(ProgressSaved(ME, TERM, 5, 50, 10), 0.01).updates == (), "that was of before"
    play.do(Tick(), 1.1)
    assert play.said(UpdateProgress) == [planned]
    assert play.receive(ProgressSaved(ME, TERM, 5, 50, 10, in_doubt=doubt), 1.2).updates == (
        SavedProgress(5, 50, 10, doubt),
    )
    assert play.receive(ProgressSaved(ME, TERM, 5, 50, 10, in_doubt=doubt), 1.3).updates == (), "said once"
    play.do(Tick(), 2.3)
    assert play.said(UpdateProgress) == []


@pytest.mark.conforms("E27")
def test_a_plan_stays_in_force_with_later_reports_and_is_told_to_the_next_leader() -> None:
    play = connected(GRANT)
    doubt = InDoubtRange(50, 10, 20, 60.0)
    play.do(SessionProgress(5, 50, 10, in_doubt=doubt), 0.001)
    play.receive(ProgressSaved(ME, TERM, 5, 50, 10, in_doubt=doubt), 0.01)
    [stream] = play.machine.successor_state().streams
    assert (stream.in_doubt, stream.is_settled) == (doubt, False)
    play.do(SessionProgress(5, 50, 20), 0.3)
    assert play.said(UpdateProgress) == [UpdateProgress(ME, TERM, (StreamProgress(5, 50, 20, in_doubt=doubt),))]


@pytest.mark.conforms("E17")
def test_progress_never_goes_back() -> None:
    play = connected(GRANT)
    play.do(SessionProgress(5, 50, 20), 0.5)
    assert play.do(SessionProgress(5, 50, 15), 0.6).sends == ()
    [stream] = play.machine.streams
    assert stream.position == 20


# --- leaving (LEAVE, COLLECT_FINAL, SAY_FAREWELL) ---------------------------------------------------------------------

TWO = (GRANT, replace(GRANT, stream_id=6, position=20))


@pytest.mark.conforms("E6", "E8")
def test_leaving_waits_for_every_streams_last_word_and_reports_them_all() -> None:
    play = connected(*TWO)
    assert play.do(Unsubscribe(), 0.5).updates == (RevokeStarted(5, 50), RevokeStarted(6, 50))
    assert play.last.sends == ()
    assert play.do(SessionProgress(5, 50, 13, is_final=True), 0.6).sends == ()
    play.do(SessionProgress(6, 50, 22, is_final=True), 0.7)
    goodbye = Disconnect(ME, TERM, (StreamProgress(5, 50, 13, True), StreamProgress(6, 50, 22, True)))
    assert play.said(Disconnect) == [goodbye]
    play.do(Tick(), 1.7)
    assert play.said(Disconnect) == [goodbye], "until it is confirmed"
    assert play.receive(Invalidate(ME, TERM, InvalidateReason.DONE)).ended is not None


@pytest.mark.conforms("E6")
def test_at_the_unsubscribe_timeout_it_reports_what_it_has() -> None:
    play = connected(*TWO)
    play.do(Unsubscribe(), 0.0)
    play.do(SessionProgress(5, 50, 13, is_final=True), 0.1)
    play.receive(PingResponse(ME, TERM, 4.9, GOOD_S), 4.9)
    play.do(Tick(), 4.99)
    assert play.said(Disconnect) == []
    play.do(Tick(), SETTINGS.unsubscribe_timeout_s)
    goodbye = Disconnect(ME, TERM, (StreamProgress(5, 50, 13, True), StreamProgress(6, 50, 20, False)))
    assert play.said(Disconnect) == [goodbye]


@pytest.mark.conforms("E29")
def test_no_user_call_begins_once_goodbye_is_said() -> None:
    play = connected(*TWO)
    play.do(Unsubscribe(), 0.0)
    play.receive(PingResponse(ME, TERM, 4.9, GOOD_S), 4.9)
    assert play.machine.may_continue(6, 50, 4.95), "it may finish what was given out"
    play.do(Tick(), SETTINGS.unsubscribe_timeout_s)
    assert not play.machine.may_continue(6, 50, SETTINGS.unsubscribe_timeout_s), (
        "whoever hears it may lend the stream anew"
    )


@pytest.mark.conforms("E6")
def test_leaving_without_streams_says_goodbye_at_once() -> None:
    play = unsubscribing()
    assert play.said(Disconnect) == [Disconnect(ME, TERM, ())]


@pytest.mark.conforms("E6", "E31")
def test_a_leader_lost_while_leaving_makes_a_successor_only_if_there_is_something_to_hand_over() -> None:
    ended = unsubscribing(GRANT).do(NodeLost(NODE)).ended
    assert ended is not None
    assert (ended.reason, ended.is_leaving) == (InvalidateReason.RETRY, True)
    ended = unsubscribing().do(NodeLost(NODE)).ended
    assert ended is not None
    assert ended.reason is InvalidateReason.DONE


@pytest.mark.conforms("E6")
def test_it_keeps_pinging_while_it_leaves_and_gives_up_at_last() -> None:
    play = unsubscribing(GRANT)
    for second in range(1, 15):
        play.do(Tick(), float(second))
        if play.said(Ping):
            play.receive(PingResponse(ME, TERM, float(second), GOOD_S))
        assert play.machine.status is BorrowerStatus.UNSUBSCRIBING
    ended = play.do(Tick(), SETTINGS.unsubscribe_timeout_s + SETTINGS.disconnect_timeout_s).ended
    assert ended is not None
    assert ended.reason is InvalidateReason.DONE


def test_a_leader_that_answers_no_ping_while_it_leaves_is_lost() -> None:
    play = unsubscribing(GRANT)
    ended = play.do(Tick(), SETTINGS.ping_timeout_s).ended
    assert ended is not None
    assert ended.reason is InvalidateReason.RETRY


# --- successors and trust ---------------------------------------------------------------------------------------------


def successor(play: Play, why: str) -> Borrower:
    """The borrower that follows one which is invalidated now."""
    assert why == "lost"
    play.do(NodeLost(NODE))
    assert play.machine.status is BorrowerStatus.DESTROYED
    return Borrower("a/2", WANTS, SETTINGS, play.machine.successor_state())


@pytest.mark.conforms("E16")
def test_a_successor_asks_to_keep_what_its_predecessor_held_and_installs_nothing_anew() -> None:
    play = Play(successor(connected(GRANT), "lost"))
    play.begin(1.0)
    [wanted] = play.said(LeaderWanted)
    assert isinstance(wanted, LeaderWanted)
    assert (wanted.borrower_id, wanted.group_id, wanted.predecessor) == ("a/2", GROUP, ME)
    assert wanted.reclaim == (HeldGrant(5, 50, 10),)
    play.do(SessionProgress(5, 50, 18), 1.1)
    play.receive(LeaderConnectResponse("a/2", 200, GROUP), 1.2)
    assert play.do(SessionProgress(5, 50, 19), 1.3).sends == (), "nobody has confirmed it yet"
    play.receive(replace(GRANT, borrower_id="a/2", term=200), 1.4)
    assert play.last.updates == ()
    assert play.said(UpdateProgress) == [UpdateProgress("a/2", 200, (StreamProgress(5, 50, 19),))]


@pytest.mark.conforms("E7", "E16")
def test_a_stream_on_which_the_new_leader_keeps_silent_is_asked_about() -> None:
    play = Play(successor(connected(GRANT), "lost"))
    play.begin(1.0)
    play.receive(LeaderConnectResponse("a/2", 200, GROUP), 1.2)
    play.do(Tick(), 2.2)
    assert play.said(UpdateProgress) == [UpdateProgress("a/2", 200, (StreamProgress(5, 50, 10),))]
    play.receive(Revoked("a/2", 200, 5, 50, RevokedReason.LOST), 2.3)
    assert play.last.updates == (StreamRemoved(5, 50, RevokedReason.LOST),)


@pytest.mark.conforms("E5", "E10")
def test_no_call_starts_when_the_word_of_the_last_answered_ping_is_no_longer_good() -> None:
    play = connected(GRANT)
    assert play.machine.may_start_call(5, 50, GOOD_S - 0.01)
    assert not play.machine.may_start_call(5, 50, GOOD_S)
    assert not play.machine.may_start_call(5, 49, 1.0)
    assert not play.machine.may_start_call(6, 50, 1.0)
    play.receive(Revoke(ME, TERM, 5, 50))
    assert not play.machine.may_start_call(5, 50, 1.0)
    assert play.machine.may_continue(5, 50, 1.0), "what was given out already may be finished"


@pytest.mark.conforms("E10", "E16")
def test_an_unconfirmed_stream_runs_on_the_word_of_the_leader_that_confirmed_it_and_no_later_ones() -> None:
    second = Play(successor(connected(GRANT), "lost"))
    second.begin(1.0)
    second.receive(LeaderConnectResponse("a/2", 200, GROUP), 1.1)
    second.receive(PingResponse("a/2", 200, 5.0, GOOD_S), 5.0)
    assert second.machine.may_start_call(5, 50, GOOD_S - 0.1)
    assert not second.machine.may_start_call(5, 50, GOOD_S), "the new leader has not said a word about it"
    second.do(NodeLost(NODE), 5.5)
    third = Borrower("a/3", WANTS, SETTINGS, second.machine.successor_state())
    assert third.may_start_call(5, 50, GOOD_S - 0.1)
    assert not third.may_start_call(5, 50, GOOD_S), "nor does its trust pass to what it never confirmed"


def test_a_borrower_that_is_asleep_or_over_does_not_want_to_be_woken() -> None:
    assert Play().do(Tick()).wake_at is None
    assert destroyed().last.wake_at is None
