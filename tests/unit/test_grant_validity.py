"""A holder whose ping was answered may begin calls for a while: nobody else gets its streams meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial

import pytest

from sublet_borrower.machine.borrower import Borrower, SubscriptionRequest
from sublet_borrower.machine.events import BorrowerOutcome, LeaderMessageReceived, ProgressReported
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    Grant,
    Invalidate,
    LeaderConnectResponse,
    PingResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    StreamProgress,
)
from sublet_protocol.tick import Tick
from sublet_storage.groups.model.lending_reset import apply_reset
from sublet_storage.groups.model.lending_row import StreamFacts
from sublet_storage.groups.model.records import GroupOptions, GroupWrites, LendingStatus, StartingPosition
from tests.kit import GRANT_KEY
from tests.unit.leader_bench import AGENT, BORROWER, EPOCH_US, HEAD, SUBSCRIPTION, Bench, granted

NODE, OTHER = "n:1", "b/1"
STEP_S = 0.25
PINGS = (LeaderConnectResponse, PingResponse, ProgressSaved)
EVERYTHING = (*PINGS, Grant, Revoke, Revoked, Invalidate)


class Talk:
    """A leader and the product's own borrower, which receives only what the test lets through; another waits."""

    def __init__(self) -> None:
        self.bench = Bench(1, options=GroupOptions(StartingPosition.EARLIEST))
        wants = SubscriptionRequest(str(SUBSCRIPTION), session="worker", session_epoch=1)
        self.holder = Borrower(BORROWER, wants, BorrowerSettings())
        self.receives: tuple[type, ...] = EVERYTHING
        self._say(self.holder.start(self.bench.now))
        self.pass_time(3.0)
        self.grant_id = self.bench.grant_id()
        assert self.may_begin()

    def may_begin(self) -> bool:
        return self.holder.may_continue(1, self.grant_id, self.bench.now)

    def pass_time(self, seconds: float) -> None:
        for _ in range(round(seconds / STEP_S)):
            self.bench.tick(STEP_S)
            self.bench.settle()
            self._exchange()
            self._say(self.holder.decide(Tick(), self.bench.now))

    def _say(self, outcome: BorrowerOutcome) -> None:
        for send in outcome.sends:
            self.bench.receive(send.message, AGENT)
        self.bench.settle()
        self._exchange()

    def _exchange(self) -> None:
        sent, self.bench.sent = self.bench.sent, []
        for agent, message in sent:
            if agent == AGENT and isinstance(message, self.receives):
                self._say(self.holder.decide(LeaderMessageReceived(NODE, message), self.bench.now))

    def is_granted_anew(self) -> float:
        """How long that takes, be it to the same; then, and ever after, nothing may begin under the grant before."""
        began = self.bench.now
        while not self.look():
            self.pass_time(STEP_S)
            self.bench.join(OTHER)
            assert self.bench.now < began + 60, "it never moves"
        took_s = self.bench.now - began
        for _ in range(80):
            self.bench.join(OTHER)
            self.pass_time(STEP_S)
            self.look()
        return took_s

    def look(self) -> bool:
        """Whether it is granted again; then nothing may begin."""
        is_granted = 1 in self.bench.holders() and self.bench.grant_id() > self.grant_id
        assert not (is_granted and self.may_begin()), f"at {self.bench.now} two may begin calls"
        return is_granted


def operator(talk: Talk) -> None:
    talk.bench.join(OTHER)
    talk.bench.revoke(1)


def takeover(talk: Talk) -> None:
    talk.bench.join(OTHER, session="worker", session_epoch=2)


def takeover_under_a_new_leader(talk: Talk) -> None:
    talk.bench.lead()
    takeover(talk)


def taken_by_the_database(talk: Talk) -> None:
    """Retention has taken messages, say: the holder's next progress is refused."""
    talk.bench.join(OTHER)
    talk.bench.change_row(
        grant_id=talk.grant_id + 1, status=LendingStatus.FREE, borrower_id=None, agent=None, session=None
    )
    talk.bench.report(StreamProgress(1, talk.grant_id, 1))
    talk.bench.settle()


def confirmed_by_another(talk: Talk) -> None:
    taken_by_the_database(talk)
    talk.bench.finished(1, talk.grant_id, OTHER)


def takeover_while_another_leaves(talk: Talk) -> None:
    takeover(talk)
    talk.bench.join("c/1")
    talk.bench.leave(borrower_id="c/1")


def second_takeover(talk: Talk) -> None:
    takeover(talk)
    talk.bench.join("c/1", session="worker", session_epoch=3)


def takeover_during_a_reclaim(talk: Talk) -> None:
    """Its answer comes when the borrower that has reclaimed is fenced."""
    talk.bench.join("a/2", reclaim=(talk.bench.held(),), session="worker", session_epoch=1, borrower_number=2)
    written = talk.bench.write()
    takeover(talk)
    talk.bench.give(written)


def forced_reset(talk: Talk, set_back_s: float = 0.0) -> None:
    """It changes the rows and ends the lease, which the leader before trusts, and answers pings, as long as it may.
    The database's clock is set back then."""
    bench, row = talk.bench, talk.bench.row()
    facts = StreamFacts(1, 1, 0, 9, HEAD, is_closed=False, is_gone=False)
    after = apply_reset(row, facts, 0, "reset", EPOCH_US + round((bench.now + set_back_s) * 1_000_000)).row
    bench.change_row(**{field.name: getattr(after, field.name) for field in fields(after)})
    lead_beside_the_leader_before(talk)


def failover(talk: Talk) -> None:
    """On the new timeline the row is as it was before it was granted last."""
    talk.bench.change_row(grant_id=1, status=LendingStatus.FREE, borrower_id=None, agent=None, session=None)
    talk.bench.store.timeline += 1
    lead_beside_the_leader_before(talk)


def lead_beside_the_leader_before(talk: Talk) -> None:
    bench, term = talk.bench, talk.bench.term
    bench.now += 0.01
    bench.lead()
    for _ in range(round((bench.settings.lease_duration_s - bench.settings.lease_margin_s) / STEP_S)):
        if PingResponse in talk.receives:
            answer = PingResponse(BORROWER, term, bench.now, bench.settings.ping_valid_for_s)
            talk.holder.decide(LeaderMessageReceived(NODE, answer), bench.now)
        bench.join(OTHER)
        bench.tick(STEP_S)
        bench.settle()
        talk.look()


def new_leader(talk: Talk) -> None:
    talk.bench.lead()
    talk.bench.join(OTHER)


@pytest.mark.conforms("E34")
@pytest.mark.parametrize("receives", [PINGS, ()], ids=["pings", "silent"])
@pytest.mark.parametrize(
    "force",
    [
        operator,
        takeover,
        takeover_under_a_new_leader,
        taken_by_the_database,
        confirmed_by_another,
        takeover_while_another_leaves,
        second_takeover,
        takeover_during_a_reclaim,
        forced_reset,
        partial(forced_reset, set_back_s=4.0),
        failover,
        new_leader,
    ],
)
def test_two_may_never_begin_calls_on_a_stream(force: Callable[[Talk], None], receives: tuple[type, ...]) -> None:
    """Whoever receives no revoke may begin nothing once another is granted the stream."""
    talk = Talk()
    talk.receives = receives
    force(talk)
    deadline_s = talk.bench.settings.revoke_deadline_s
    assert talk.is_granted_anew() <= deadline_s + 2, "and it moves within a stated bound"


@pytest.mark.conforms("E34", "E30")
def test_a_fenced_process_that_answers_is_done() -> None:
    talk = Talk()
    takeover(talk)
    assert talk.is_granted_anew() <= 2


@pytest.mark.conforms("E34")
def test_a_forced_revoke_costs_no_other_stream() -> None:
    bench = granted(2)
    bench.revoke(1)
    borrower = Borrower(BORROWER, SubscriptionRequest(str(SUBSCRIPTION)), BorrowerSettings())
    borrower.start(0.0)
    ids = [(stream, bench.grant_id(stream)) for stream in (1, 2)]
    grants = [Grant(BORROWER, bench.term, *each, 0, 1, 0, 9, "#", grant_key=GRANT_KEY) for each in ids]
    borrower.decide(LeaderMessageReceived(NODE, LeaderConnectResponse(BORROWER, bench.term, 1)), 0.0)
    for grant in grants:
        borrower.decide(LeaderMessageReceived(NODE, grant), 0.0)
    for answered_at in (1.0, 20.5, 29.0):
        answer = PingResponse(BORROWER, bench.term, answered_at, 8.5, without=tuple(ids[:1]) * (answered_at > 20))
        borrower.decide(LeaderMessageReceived(NODE, answer), answered_at)
        assert borrower.may_start_call(*ids[1], answered_at)
        assert borrower.may_continue(*ids[0], answered_at) == (answered_at < 9.5)


@pytest.mark.conforms("E34")
def test_who_was_fenced_reports_that_it_begins_no_more() -> None:
    talk = Talk()
    talk.receives = ()
    end = Invalidate(BORROWER, talk.bench.term, BorrowerEndReason.FENCED)
    outcome = talk.holder.decide(LeaderMessageReceived(NODE, end), talk.bench.now)
    held = StreamProgress(1, talk.grant_id, 0)
    assert [send.message for send in outcome.sends] == [Disconnect(BORROWER, talk.bench.term, (held,))]
    assert not talk.may_begin()


@pytest.mark.conforms("E11", "E30")
@pytest.mark.parametrize("is_final", [False, True])
def test_who_is_fenced_elsewhere_is_announced(is_final: bool) -> None:
    """What may be seen twice is what its own leader announces, and no more."""
    talk = Talk()
    bench, elsewhere = talk.bench, Invalidate(BORROWER, 0, BorrowerEndReason.FENCED, "a newer process goes by the name")
    progress = ProgressReported(1, talk.grant_id, 7, is_final=is_final)
    talk.holder.decide(progress, bench.now)
    for send in talk.holder.decide(LeaderMessageReceived("m:1", elsewhere), bench.now).sends:
        assert send.node == NODE
        bench.receive(send.message, AGENT)
    bench.settle()
    assert (bench.row().position, 1 in bench.holders()) == (7, False)
    end = bench.store.history(bench.group.group_id)[-1]
    assert (end.position, end.is_forced, end.redelivery_end) == (7, not is_final, None if is_final else HEAD)
    assert end.reason == elsewhere.detail


@pytest.mark.conforms("E34")
def test_a_stream_in_a_renewal_waits_for_its_holder() -> None:
    """A member of a former group had it: it waits as what was there before."""
    bench = granted()
    (stream,) = bench.streams.add_space("eu", "eu/#", 1)
    bench.store.commit([GroupWrites(bench.group.group_id, bench.term, (), needs_stream_sync=True)])
    bench.change_row(stream, held_until_us=EPOCH_US + round(bench.now * 1_000_000))
    bench.streams.append(stream, HEAD)
    bench.streams.rollover(2)  # a renewal reports what has ended
    bench.pass_time(bench.settings.lease_duration_s + bench.settings.grant_validity_s - 0.1, BORROWER)
    assert stream not in bench.holders()
    bench.pass_time(bench.settings.stream_sync_interval_s, BORROWER)
    assert stream in bench.holders()


@pytest.mark.conforms("E34")
def test_who_was_succeeded_confirms_for_itself_alone() -> None:
    """The former leader may have let its process begin calls for longer than this one has."""
    bench, later_s = Bench(), 5.0
    bench.named(BORROWER, "worker")
    bench.lead(bench.now + later_s)
    for number in (2, 3):
        held = (bench.held(),)
        bench.join(f"a/{number}", reclaim=held, session="worker", session_epoch=1, borrower_number=number)
        bench.settle()
    bench.finished(borrower_id="a/2")
    bench.join(OTHER, session="worker", session_epoch=2)
    bench.pass_time(bench.settings.grant_validity_s + later_s - 0.1, OTHER)
    assert bench.holders() == {1: "a/3"}
    bench.pass_time(2.0, OTHER)
    assert bench.holders() == {1: OTHER}


@pytest.mark.conforms("E34")
def test_a_clock_set_back_keeps_no_stream_from_others() -> None:
    """By it, a stream without a session was taken from its holder in an hour."""
    bench = Bench()
    bench.change_row(held_until_us=EPOCH_US + 3_600_000_000)
    bench.lead()
    bench.joined()
    bench.pass_time(bench.settings.lease_duration_s + bench.settings.grant_validity_s, BORROWER)
    assert bench.holders() == {1: BORROWER}
