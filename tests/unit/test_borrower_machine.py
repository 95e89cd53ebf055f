"""A borrower, by transition: the table read as data, and the effect of each of its actions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

import pytest
from msgspec.structs import replace

from sublet_borrower.machine.borrowed_streams import BorrowedStream
from sublet_borrower.machine.borrower import Borrower, SubscriptionRequest
from sublet_borrower.machine.events import (
    BorrowerOutcome,
    Event,
    LeaderMessageReceived,
    LeaveRequested,
    NodeLost,
    ProgressReported,
    RevokeStarted,
    SavedProgress,
    Send,
    StreamGranted,
    StreamRemoved,
)
from sublet_borrower.machine.transitions import (
    ACTIONS,
    ALLOWED_TRANSITIONS,
    BorrowedStreamStatus,
    BorrowerAction,
    BorrowerEventKind,
    BorrowerStatus,
)
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    Grant,
    GrantEndOutcome,
    HeldGrant,
    Invalidate,
    LeaderConnectResponse,
    LeaderWanted,
    Ping,
    PingResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    RevokeFinished,
    StreamProgress,
    ToBorrower,
    UpdateProgress,
)
from sublet_protocol.tick import Tick
from tests.kit import GRANT_KEY

ME, NODE, TERM, GROUP = "a/1", "n1:1", 100, 7
SETTINGS = BorrowerSettings()
GOOD_S = 8.5
"""For how long its leader's answer to a ping is good."""
WANTS = SubscriptionRequest("$share/g/#", 2.0, "stable", "earliest")
GRANT = Grant(ME, TERM, 5, 50, 10, 1, 0, 99, "#", grant_key=GRANT_KEY)
CONNECTED = LeaderConnectResponse(ME, TERM, GROUP)
REVOKE = Revoke(ME, TERM, 5, 50)
FINISHED = RevokeFinished(ME, TERM, 5, 50)
SAVED = GrantEndOutcome.SAVED

M = TypeVar("M")


class Play:
    """A borrower and all that came of its events."""

    def __init__(self, machine: Borrower | None = None) -> None:
        self.machine = machine or Borrower(ME, WANTS, SETTINGS)
        self.now = 0.0
        self.last = BorrowerOutcome()

    def begin(self, at: float = 0.0) -> BorrowerOutcome:
        """Let it look for its leader."""
        self.now, self.last = at, self.machine.start(at)
        return self.last

    def do(self, event: Event, at: float | None = None) -> BorrowerOutcome:
        self.now = self.now if at is None else at
        self.last = self.machine.decide(event, self.now)
        return self.last

    def receive(self, message: ToBorrower, at: float | None = None, node: str = NODE) -> BorrowerOutcome:
        return self.do(LeaderMessageReceived(node, message), at)

    def said(self, kind: type[M]) -> list[M]:
        """What the last event made it send, of one type."""
        return [s.message for s in self.last.sends if isinstance(s.message, kind)]

    def reported(self) -> list[StreamProgress]:
        """The progress that the last event made it send."""
        return [stream for message in self.said(UpdateProgress) for stream in message.streams]

    @property
    def stream(self) -> BorrowedStream:
        """Its only one."""
        [stream] = self.machine.streams
        return stream

    @property
    def end(self) -> BorrowerEndReason | None:
        """Why the last event ended it; None if it did not."""
        return None if self.last.ended is None else self.last.ended.reason


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
    play.do(LeaveRequested())
    return play


def destroyed() -> Play:
    play = connected()
    play.receive(Invalidate(ME, TERM, BorrowerEndReason.RETRY))
    return play


def successor(play: Play, borrower_id: str = "a/2", at: float = 1.0) -> Play:
    """The borrower that follows one whose leader is lost now, looking for another."""
    play.do(NodeLost(NODE))
    assert play.machine.status is BorrowerStatus.DESTROYED
    heir = Play(Borrower(borrower_id, WANTS, SETTINGS, play.machine.successor_state()))
    heir.begin(at)
    return heir


PLAYS: dict[BorrowerStatus, Callable[[], Play]] = {
    BorrowerStatus.CONNECTING: connecting,
    BorrowerStatus.CONNECTED: lambda: connected(GRANT),
    BorrowerStatus.UNSUBSCRIBING: lambda: unsubscribing(GRANT),
}
OTHER = dataclasses.replace(GRANT, stream_id=6)
MESSAGES: dict[BorrowerEventKind, ToBorrower] = {
    BorrowerEventKind.CONNECT_RESPONSE: CONNECTED,
    BorrowerEventKind.PING_RESPONSE: PingResponse(ME, TERM, 5.0, GOOD_S),
    BorrowerEventKind.GRANT: OTHER,
    BorrowerEventKind.REVOKE: REVOKE,
    BorrowerEventKind.REVOKED: Revoked(ME, TERM, 5, 50, GrantEndOutcome.SAVED),
    BorrowerEventKind.PROGRESS_SAVED: ProgressSaved(ME, TERM, 5, 50, 99),
    BorrowerEventKind.INVALIDATE: Invalidate(ME, TERM, BorrowerEndReason.RETRY),
}
EVENTS: dict[BorrowerEventKind, Event] = {
    **{kind: LeaderMessageReceived(NODE, message) for kind, message in MESSAGES.items()},
    BorrowerEventKind.NODE_LOST: NodeLost(NODE),
    BorrowerEventKind.SESSION_PROGRESS: ProgressReported(5, 50, 12),
    BorrowerEventKind.UNSUBSCRIBE: LeaveRequested(),
    BorrowerEventKind.TICK: Tick(),
}
PAIRS = [(status, kind) for status, row in ACTIONS.items() for kind in row]

# --- the table, as data -----------------------------------------------------------------------------------------------


@pytest.mark.conforms("E3")
def test_every_pair_has_an_answer_and_none_goes_back() -> None:
    """All statuses are reached, and every action is used and is a method."""
    assert set(ACTIONS) == set(BorrowerStatus) - {BorrowerStatus.NEW, BorrowerStatus.DESTROYED}
    assert all(set(row) == set(BorrowerEventKind) for row in ACTIONS.values())
    assert {action for row in ACTIONS.values() for action in row.values()} == set(BorrowerAction)
    assert all(callable(getattr(Borrower, action.value)) for action in BorrowerAction)
    order = list(BorrowerStatus)
    moves = [(before, after) for before, afters in ALLOWED_TRANSITIONS.items() for after in afters]
    assert set(ALLOWED_TRANSITIONS) == set(order)
    assert all(order.index(after) > order.index(before) for before, after in moves)
    assert {after for _, after in moves} == set(BorrowerStatus) - {BorrowerStatus.NEW}


@pytest.mark.conforms("E3", "E6")
@pytest.mark.parametrize(("status", "kind"), PAIRS, ids=lambda part: part.name.lower())
def test_each_pair_is_ignored_or_moves_as_allowed(status: BorrowerStatus, kind: BorrowerEventKind) -> None:
    play = PLAYS[status]()
    assert play.machine.status is status
    streams = [(s.stream_id, s.grant_id, s.position, s.status) for s in play.machine.streams]
    outcome = play.do(EVENTS[kind])
    if ACTIONS[status][kind] is BorrowerAction.IGNORE:
        assert (outcome.sends, outcome.updates, outcome.ended, play.machine.status) == ((), (), None, status)
        assert [(s.stream_id, s.grant_id, s.position, s.status) for s in play.machine.streams] == streams
    else:
        assert play.machine.status is status or play.machine.status in ALLOWED_TRANSITIONS[status]


@pytest.mark.conforms("E3", "E10")
@pytest.mark.parametrize("kind", BorrowerEventKind, ids=lambda kind: kind.name.lower())
def test_one_that_is_not_begun_or_is_over_is_silent(kind: BorrowerEventKind) -> None:
    for play, status in ((Play(), BorrowerStatus.NEW), (destroyed(), BorrowerStatus.DESTROYED)):
        assert play.do(EVENTS[kind]) == BorrowerOutcome(), "nor does it want to be woken"
        assert play.machine.status is status


@pytest.mark.conforms("E3")
def test_it_begins_once() -> None:
    """A move back is a fault of this library, and is described in the error."""
    for play in (connecting(), connected(), unsubscribing(), destroyed()):
        with pytest.raises(AssertionError, match=r"a/1: BorrowerStatus\.\w+ must not go to BorrowerStatus\.CONNECTING"):
            play.begin()


@pytest.mark.conforms("E6")
def test_one_that_leaves_refuses_new_work() -> None:
    refused = {k.name for k, a in ACTIONS[BorrowerStatus.UNSUBSCRIBING].items() if a is BorrowerAction.IGNORE}
    assert refused == {"GRANT", "REVOKE", "REVOKED", "CONNECT_RESPONSE", "UNSUBSCRIBE"}


# --- connecting (RETRY_LEADER_WANTED, CONNECT, TRY_OTHER_NODE, LEAVE_UNCONNECTED, RECORD_PROGRESS) --------------------


@pytest.mark.conforms("E4")
def test_it_asks_again_until_a_leader_answers() -> None:
    play = connecting()
    wanted = LeaderWanted(ME, "$share/g/#", None, 2.0, "stable", False, (), "earliest", None)
    assert play.said(LeaderWanted) == [wanted]
    assert play.last.wake_at == SETTINGS.leader_lookup_interval_s
    assert play.do(Tick(), 0.99).sends == ()
    assert play.do(Tick(), 1.0).sends == (Send(None, wanted),)
    play.receive(CONNECTED)
    assert play.said(Ping) == [Ping((ME,), 1.0)]
    assert play.machine.status is BorrowerStatus.CONNECTED
    assert (play.machine.term, play.machine.group_id, play.machine.node) == (TERM, GROUP, NODE)
    assert play.machine.successor_state().group_id == GROUP


@pytest.mark.conforms("E4")
def test_the_timer_of_an_earlier_status_does_nothing() -> None:
    play = connected()
    play.do(Tick(), SETTINGS.leader_lookup_interval_s)
    assert play.said(LeaderWanted) == []
    play.do(LeaveRequested(), 1.0)
    play.do(Tick(), 2.0)
    assert play.said(LeaderWanted) == []
    assert play.said(UpdateProgress) == [], "nor does the one of the reports, in unsubscribing"


def test_a_redirect_is_followed_a_dead_one_given_up() -> None:
    """At once the one, and soon the other."""
    play = connecting()
    play.receive(LeaderConnectResponse(ME, 0, GROUP, "n2:1"), 0.5)
    assert [s.node for s in play.last.sends] == ["n2:1"]
    assert play.machine.status is BorrowerStatus.CONNECTING
    play.do(NodeLost("n2:1"), 0.6)
    assert play.last.sends == ()
    assert play.last.wake_at == pytest.approx(0.85)
    play.do(NodeLost("n9:1"), 0.7)
    assert [each.node for each in play.do(Tick(), 0.85).sends] == [None]
    assert len(play.said(LeaderWanted)) == 1


@pytest.mark.conforms("E6")
def test_leaving_before_a_leader_is_found_ends_it() -> None:
    play = connecting()
    play.do(LeaveRequested())
    assert play.said(Disconnect) == [Disconnect(ME, 0, ())]
    assert play.end is BorrowerEndReason.DONE
    assert play.machine.status is BorrowerStatus.DESTROYED


@pytest.mark.conforms("E31")
def test_one_that_leaves_waits_for_a_leader() -> None:
    """But not for ever."""
    play = successor(connected(GRANT))
    play.do(LeaveRequested(), 1.5)
    assert [t for t in play.last.updates if isinstance(t, RevokeStarted)] == [RevokeStarted(5, 50)]
    [wanted] = play.said(LeaderWanted)
    assert (wanted.leaving, wanted.reclaim, wanted.predecessor) == (True, (HeldGrant(5, 50, 10),), ME)
    play.do(ProgressReported(5, 50, 14, is_final=True), 1.6)
    assert play.do(LeaveRequested(), 9.0).sends == ()
    play.do(Tick(), 10.0)
    [wanted] = play.said(LeaderWanted)
    assert wanted.reclaim == (HeldGrant(5, 50, 14),)
    play.do(Tick(), 1.5 + SETTINGS.unsubscribe_timeout_s + SETTINGS.disconnect_timeout_s)
    assert play.last.ended is not None
    assert "no leader confirmed" in play.last.ended.detail


# --- pings (PING_AND_RESEND, ACCEPT_PING_RESPONSE, LOSE_LEADER, END) --------------------------------------------------


@pytest.mark.conforms("E5")
@pytest.mark.parametrize("begin", [connected, unsubscribing])
def test_no_ping_answered_in_time_invalidates(begin: Callable[[Grant], Play]) -> None:
    play = begin(GRANT)
    play.do(Tick(), SETTINGS.ping_timeout_s - 0.01)
    assert play.end is None
    play.do(Tick(), SETTINGS.ping_timeout_s)
    assert play.machine.streams.held() == (HeldGrant(5, 50, 10),)
    assert play.end is BorrowerEndReason.RETRY


@pytest.mark.conforms("E5", "E7", "E14")
def test_what_counts_is_when_the_ping_was_sent() -> None:
    """Not when its answer came: neither for its leader's life, nor for how long that one's word is good."""
    play = connected(GRANT)
    play.receive(PingResponse(ME, TERM, 2.0, GOOD_S), 5.5)
    assert play.machine.may_start_call(5, 50, 2.0 + GOOD_S - 0.01)
    assert not play.machine.may_start_call(5, 50, 2.0 + GOOD_S)
    play.do(Tick(), 7.99)
    assert play.end is None
    play.do(Tick(), 8.0)
    assert play.end is BorrowerEndReason.RETRY


@pytest.mark.conforms("E5")
@pytest.mark.parametrize("sent_at", [1e308, math.inf, math.nan, -math.inf])
def test_an_absurd_time_is_trusted_no_longer(sent_at: float) -> None:
    play = connected(GRANT)
    play.receive(PingResponse(ME, TERM, sent_at, GOOD_S), 1.0)
    assert not play.machine.may_start_call(5, 50, 1.0 + GOOD_S)
    play.do(Tick(), 7.0)
    assert play.end is BorrowerEndReason.RETRY


@pytest.mark.conforms("E5")
def test_a_dead_connection_to_its_leader_invalidates() -> None:
    play = connected()
    play.do(NodeLost("n2:1"), 0.1)
    assert play.end is None
    play.do(NodeLost(NODE), 0.1)
    assert play.end is BorrowerEndReason.RETRY


def test_only_a_later_term_of_its_leader_counts() -> None:
    play = connected()
    elsewhere = [LeaderConnectResponse(ME, term, GROUP, "n2:1") for term in (0, TERM + 1)]
    for known in (CONNECTED, *elsewhere, replace(CONNECTED, term=TERM - 1)):
        assert play.receive(known).ended is None
    play.receive(replace(CONNECTED, term=TERM + 1))
    assert play.end is BorrowerEndReason.RETRY


@pytest.mark.parametrize("reason", list(BorrowerEndReason))
def test_an_invalidate_ends_it_with_its_reason(reason: BorrowerEndReason) -> None:
    """Except that one that leaves with nothing to hand over needs no successor."""
    empty = [] if reason is BorrowerEndReason.RETRY else [unsubscribing()]
    for play in (connecting(), connected(GRANT), unsubscribing(GRANT), *empty):
        ended = play.receive(Invalidate(ME, TERM, reason, "why")).ended
        assert ended is not None
        assert (ended.reason, ended.detail) == (reason, "why")


@pytest.mark.conforms("E10")
@pytest.mark.parametrize(
    ("borrower_id", "term", "is_accepted"), [(ME, 0, True), ("a/0", TERM, False), (ME, TERM - 1, False)]
)
def test_an_invalidate_is_for_one_identity_or_any_term(borrower_id: str, term: int, is_accepted: bool) -> None:
    """A node that knows no leader can end it under no term."""
    invalidate = Invalidate(borrower_id, term, BorrowerEndReason.DELETED)
    assert (connected().receive(invalidate).ended is not None) == is_accepted


# --- streams (ADD_STREAM, STOP_STREAM, DROP_STREAM) -------------------------------------------------------------------


@pytest.mark.conforms("E7")
def test_a_revoke_is_settled_by_the_final_progress() -> None:
    """It stops the session once; the final progress is sent again until it is confirmed."""
    play = connected(GRANT)
    assert play.receive(REVOKE).updates == (RevokeStarted(5, 50),)
    assert play.receive(REVOKE).updates == ()
    assert play.stream.status is BorrowedStreamStatus.REVOKING
    final = StreamProgress(5, 50, 15, True)
    play.do(ProgressReported(5, 50, 15, is_final=True), 0.01)
    assert play.reported() == [final]
    play.receive(REVOKE, 0.5)
    assert play.reported() == [final], "the leader has not received it"
    play.do(Tick(), 1.6)
    assert play.reported() == [final], "nor confirmed it"


@pytest.mark.conforms("E7")
@pytest.mark.parametrize("reason", list(GrantEndOutcome))
def test_a_revoked_stream_is_removed_and_confirmed(reason: GrantEndOutcome) -> None:
    """With the reason, and each time it is reported."""
    play = connected(GRANT)
    for updates in ((StreamRemoved(5, 50, reason),), ()):
        assert play.receive(Revoked(ME, TERM, 5, 50, reason)).updates == updates
        assert play.said(RevokeFinished) == [FINISHED]


@pytest.mark.conforms("E7", "E10")
@pytest.mark.parametrize(
    ("begin", "end", "updates"),
    [
        (connected, REVOKE, ()),
        (lambda: connected(GRANT), Revoked(ME, TERM, 5, 50, SAVED), (StreamRemoved(5, 50, SAVED),)),
    ],
    ids=["a revoke overtakes it", "revoked"],
)
def test_a_grant_that_is_over_does_not_come_back(
    begin: Callable[[], Play], end: ToBorrower, updates: tuple[StreamRemoved, ...]
) -> None:
    """Its end is confirmed each time."""
    play = begin()
    assert (play.receive(end).updates, play.said(RevokeFinished)) == (updates, [FINISHED])
    for grant_id in (50, 49):
        assert play.receive(dataclasses.replace(GRANT, grant_id=grant_id)).updates == ()
        assert play.said(RevokeFinished) == [RevokeFinished(ME, TERM, 5, grant_id)]
    assert len(play.machine.streams) == 0


@pytest.mark.conforms("E10")
def test_a_newer_grant_ends_the_one_held() -> None:
    play = connected(GRANT)
    newer = dataclasses.replace(GRANT, grant_id=60, position=20)
    assert play.receive(newer).updates == (StreamRemoved(5, 50, GrantEndOutcome.LOST), StreamGranted(newer))
    for grant_id in (50, 55):
        assert play.receive(dataclasses.replace(GRANT, grant_id=grant_id)).updates == ()
    assert play.receive(Revoke(ME, TERM, 5, 70)).updates == (StreamRemoved(5, 60, GrantEndOutcome.LOST),)
    assert play.said(RevokeFinished) == [RevokeFinished(ME, TERM, 5, 70)]


@pytest.mark.conforms("E7")
def test_a_stream_that_ended_of_itself_needs_no_stop() -> None:
    play = connected(GRANT)
    play.do(ProgressReported(5, 50, 30, is_final=True), 0.01)
    assert play.receive(REVOKE).updates == ()


# --- the past (E10) ---------------------------------------------------------------------------------------------------

OF_STREAMS = ("GRANT", "REVOKE", "REVOKED", "PROGRESS_SAVED", "PING_RESPONSE")


@pytest.mark.conforms("E10")
@pytest.mark.parametrize("kind", OF_STREAMS)
@pytest.mark.parametrize("change", [{"borrower_id": "a/0"}, {"term": TERM - 1}, {"term": TERM + 1}, {"term": 0}])
def test_messages_for_another_identity_have_no_effect(kind: str, change: dict[str, object]) -> None:
    play, message = connected(GRANT), MESSAGES[BorrowerEventKind[kind]]
    substitute: Any = dataclasses.replace if isinstance(message, Grant) else replace
    outcome = play.receive(substitute(message, **change), 0.5)
    assert (outcome.sends, outcome.updates, outcome.ended) == ((), (), None)
    found = play.stream.status, play.stream.saved_position, play.machine.trusted_until
    assert found == (BorrowedStreamStatus.GRANTED, -1, GOOD_S)


# --- progress (REPORT_PROGRESS, MARK_SAVED) ---------------------------------------------------------------------------


@pytest.mark.conforms("E10", "E17")
@pytest.mark.parametrize("late", [ProgressReported(5, 50, 15), ProgressReported(5, 49, 99, is_final=True)])
def test_progress_never_goes_back_nor_to_an_old_grant(late: ProgressReported) -> None:
    play = connected(GRANT)
    play.do(ProgressReported(5, 50, 20), 0.5)
    assert play.do(late, 0.6).sends == ()
    assert (play.stream.position, play.stream.is_final) == (20, False)


@pytest.mark.conforms("E7", "E10")
def test_what_else_a_late_report_has_counts() -> None:
    """A session that takes a read back after it was reported reports a position before that one."""
    play = connected(GRANT)
    play.do(ProgressReported(5, 50, 20, consumed=ConsumedFrontier(20)), 0.5)
    play.do(ProgressReported(5, 50, 15, consumed=ConsumedFrontier(15), read_error="away"), 0.6)
    reached = StreamProgress(5, 50, 20, consumed=ConsumedFrontier(20))
    assert play.reported() == [replace(reached, read_error="away")]
    play.receive(REVOKE, 0.7)
    play.do(ProgressReported(5, 50, 15, is_final=True, consumed=ConsumedFrontier(15)), 0.8)
    assert play.reported() == [replace(reached, final=True)]


def test_progress_is_reported_no_oftener_than_is_set() -> None:
    """None is forgotten."""
    play = connected(GRANT)
    assert play.do(ProgressReported(5, 50, 11), 0.01).sends == ()
    assert play.last.wake_at == pytest.approx(SETTINGS.progress_interval_s)
    play.do(ProgressReported(5, 50, 12), 0.02)
    play.do(Tick(), SETTINGS.progress_interval_s)
    assert play.reported() == [StreamProgress(5, 50, 12)]


def test_progress_of_many_streams_is_one_report() -> None:
    """The leader makes one commit of it, however many streams messages come from."""
    play = connected(GRANT, OTHER)
    assert play.do(ProgressReported(5, 50, 11), 0.1).sends != ()
    for stream_id, at in ((6, 0.11), (5, 0.12)):
        assert play.do(ProgressReported(stream_id, 50, 12), at).sends == ()
    play.do(Tick(), 0.1 + SETTINGS.progress_interval_s)
    both = (StreamProgress(5, 50, 12), StreamProgress(6, 50, 12))
    assert play.said(UpdateProgress)[-1] == UpdateProgress(ME, TERM, both)


@pytest.mark.conforms("E7")
def test_progress_is_reported_until_it_is_saved() -> None:
    play = connected(GRANT)
    play.do(Tick(), 1.0)
    assert play.reported() == [StreamProgress(5, 50, 10)]
    saved = ProgressSaved(ME, TERM, 5, 50, 10)
    assert play.receive(saved, 1.1).updates == (SavedProgress(5, 50, 10),)
    assert play.receive(saved, 1.1).updates == (), "said once"
    assert play.receive(replace(saved, stream_id=6), 1.1).updates == (), "it has none such"
    play.do(Tick(), 2.1)
    assert play.reported() == []


@pytest.mark.conforms("E7")
@pytest.mark.parametrize(
    "change",
    [
        {"is_final": True},
        {"position": 11},
        {"in_doubt": InDoubtRange(50, 10, 20, 60.0)},
        {"consumed": ConsumedFrontier(13)},
        {"saved_consumed": None},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_is_not_saved_is_still_to_be_reported(change: dict[str, Any]) -> None:
    stream = BorrowedStream(5, 50, 10, saved_position=10, consumed=ConsumedFrontier(12))
    assert stream.mark_saved(10, ConsumedFrontier(12), None)
    assert not stream.mark_saved(10, ConsumedFrontier(12), None), "it was known"
    assert stream.is_settled
    assert not replace(stream, **change).is_settled


def test_unsaved_progress_is_not_in_each_report() -> None:
    """It is sent again after the resend interval; thousands of streams would keep a slow leader from all else."""
    play = connected(GRANT, OTHER)
    play.do(ProgressReported(5, 50, 11), 0.1)
    play.do(ProgressReported(6, 50, 12), 0.11)
    play.do(Tick(), 0.1 + SETTINGS.progress_interval_s)
    assert play.reported() == [StreamProgress(6, 50, 12)]
    play.do(Tick(), 0.1 + SETTINGS.progress_interval_s + SETTINGS.resend_interval_s)
    assert play.reported() == [StreamProgress(5, 50, 11), StreamProgress(6, 50, 12)]


@pytest.mark.conforms("E27")
def test_a_plan_is_reported_at_once_until_it_is_saved() -> None:
    """It stays in force with later reports, and is sent to the next leader."""
    play = connected(GRANT)
    before = ProgressSaved(ME, TERM, 5, 50, 10)
    play.receive(before, 0.0)
    doubt = InDoubtRange(50, 10, 20, 60.0)
    planned = UpdateProgress(ME, TERM, (StreamProgress(5, 50, 10, in_doubt=doubt),))
    assert play.do(ProgressReported(5, 50, 10, in_doubt=doubt), 0.001).sends == (Send(NODE, planned),)
    assert play.receive(before, 0.01).updates == (), "that was of before"
    play.do(Tick(), 1.1)
    assert play.said(UpdateProgress) == [planned]
    saved = replace(before, in_doubt=doubt)
    assert play.receive(saved, 1.2).updates == (SavedProgress(5, 50, 10, doubt),)
    assert play.receive(saved, 1.3).updates == (), "said once"
    play.do(Tick(), 2.3)
    assert play.reported() == []
    [stream] = play.machine.successor_state().streams
    assert (stream.in_doubt, stream.is_settled) == (doubt, False)
    play.do(ProgressReported(5, 50, 20), 2.5)
    assert play.reported() == [StreamProgress(5, 50, 20, in_doubt=doubt)]


# --- leaving (LEAVE, COLLECT_FINAL, SEND_DISCONNECT) ------------------------------------------------------------------

TWO = (GRANT, dataclasses.replace(GRANT, stream_id=6, position=20))


@pytest.mark.conforms("E6", "E8")
def test_leaving_waits_for_final_progress_of_all() -> None:
    """It reports them all, until that is confirmed."""
    play = connected(*TWO)
    assert play.do(LeaveRequested(), 0.5).updates == (RevokeStarted(5, 50), RevokeStarted(6, 50))
    assert play.last.sends == ()
    assert play.do(ProgressReported(5, 50, 13, is_final=True), 0.6).sends == ()
    play.do(ProgressReported(6, 50, 22, is_final=True), 0.7)
    goodbye = Disconnect(ME, TERM, (StreamProgress(5, 50, 13, True), StreamProgress(6, 50, 22, True)))
    assert play.said(Disconnect) == [goodbye]
    play.do(Tick(), 1.7)
    assert play.said(Disconnect) == [goodbye]
    play.receive(Invalidate(ME, TERM, BorrowerEndReason.DONE))
    assert play.end is BorrowerEndReason.DONE


@pytest.mark.conforms("E6", "E29")
def test_at_the_timeout_a_leaver_reports_what_it_has() -> None:
    """No user call begins once it has said that it leaves: the leader may then grant the stream to another."""
    play = connected(*TWO)
    play.do(LeaveRequested(), 0.0)
    play.do(ProgressReported(5, 50, 13, is_final=True), 0.1)
    play.receive(PingResponse(ME, TERM, 4.9, GOOD_S), 4.9)
    play.do(Tick(), 4.99)
    assert play.said(Disconnect) == []
    assert play.machine.may_continue(6, 50, 4.99), "it may finish what was given out"
    play.do(Tick(), SETTINGS.unsubscribe_timeout_s)
    goodbye = Disconnect(ME, TERM, (StreamProgress(5, 50, 13, True), StreamProgress(6, 50, 20, False)))
    assert play.said(Disconnect) == [goodbye]
    assert not play.machine.may_continue(6, 50, SETTINGS.unsubscribe_timeout_s)


@pytest.mark.conforms("E6", "E31")
def test_a_leader_lost_while_leaving() -> None:
    """It is succeeded only if there is something to hand over."""
    ended = unsubscribing(GRANT).do(NodeLost(NODE)).ended
    assert ended is not None
    assert ended.reason is BorrowerEndReason.RETRY
    play = unsubscribing()
    play.do(NodeLost(NODE))
    assert play.end is BorrowerEndReason.DONE


@pytest.mark.conforms("E6")
def test_it_pings_while_it_leaves_and_gives_up_at_last() -> None:
    play, pinged = unsubscribing(GRANT), list[float]()
    for second in range(1, 15):
        play.do(Tick(), float(second))
        if play.said(Ping):
            pinged.append(second)
            play.receive(PingResponse(ME, TERM, float(second), GOOD_S))
        assert play.machine.status is BorrowerStatus.UNSUBSCRIBING
    assert pinged[:2] == [SETTINGS.ping_interval_s, 2 * SETTINGS.ping_interval_s]
    play.do(Tick(), SETTINGS.unsubscribe_timeout_s + SETTINGS.disconnect_timeout_s)
    assert play.end is BorrowerEndReason.DONE


# --- successors and trust ---------------------------------------------------------------------------------------------


@pytest.mark.conforms("E16")
def test_a_successor_asks_to_keep_what_was_held() -> None:
    """It installs nothing anew."""
    play = successor(connected(GRANT))
    [wanted] = play.said(LeaderWanted)
    named = wanted.borrower_id, wanted.group_id, wanted.predecessor, wanted.reclaim
    assert named == ("a/2", GROUP, ME, (HeldGrant(5, 50, 10),))
    play.do(ProgressReported(5, 50, 18), 1.1)
    play.receive(LeaderConnectResponse("a/2", 200, GROUP), 1.2)
    assert play.do(ProgressReported(5, 50, 19), 1.3).sends == (), "nobody has confirmed it yet"
    assert play.receive(dataclasses.replace(GRANT, borrower_id="a/2", term=200), 1.4).updates == ()
    assert play.said(UpdateProgress) == [UpdateProgress("a/2", 200, (StreamProgress(5, 50, 19),))]


@pytest.mark.conforms("E7", "E16")
def test_a_silent_new_leader_is_asked_about_a_stream() -> None:
    play = successor(connected(GRANT))
    play.receive(LeaderConnectResponse("a/2", 200, GROUP), 1.2)
    play.do(Tick(), 2.2)
    assert play.said(UpdateProgress) == [UpdateProgress("a/2", 200, (StreamProgress(5, 50, 10),))]
    lost = play.receive(Revoked("a/2", 200, 5, 50, GrantEndOutcome.LOST), 2.3)
    assert lost.updates == (StreamRemoved(5, 50, GrantEndOutcome.LOST),)


@pytest.mark.conforms("E5", "E10")
def test_no_call_starts_once_the_lease_is_stale() -> None:
    """Nor under another grant, nor once it is revoked."""
    play = connected(GRANT)
    calls = ((5, 50, GOOD_S - 0.01), (5, 50, GOOD_S), (5, 49, 1.0), (6, 50, 1.0))
    for may in (play.machine.may_start_call, play.machine.may_continue):
        assert [may(*each) for each in calls] == [True, False, False, False]
    play.receive(REVOKE)
    assert not play.machine.may_start_call(5, 50, 1.0)
    assert play.machine.may_continue(5, 50, 1.0), "what was given out already may be finished"


@pytest.mark.conforms("E10", "E16")
def test_an_unconfirmed_stream_runs_on_the_old_lease() -> None:
    """And on no later one's."""
    second = successor(connected(GRANT))
    second.receive(LeaderConnectResponse("a/2", 200, GROUP), 1.1)
    second.receive(PingResponse("a/2", 200, 5.0, GOOD_S), 5.0)
    assert second.machine.may_start_call(5, 50, GOOD_S - 0.1)
    assert not second.machine.may_start_call(5, 50, GOOD_S), "the new leader has not said a word about it"
    third = successor(second, "a/3", 5.5)
    assert third.machine.may_start_call(5, 50, GOOD_S - 0.1)
    assert not third.machine.may_start_call(5, 50, GOOD_S), "nor does its trust pass to what it never confirmed"
