"""One group's leader: who joins, who gets what, what is said again, who is put out, and what of the past is refused."""

from __future__ import annotations

import math

import pytest

from sublet_leader.group.events import CommitFailed, StreamsChanged
from sublet_protocol.domain.epochs import ConsumedFrontier, GroupFrontier, LowerFrontier
from sublet_protocol.messages.borrower_leader import (
    Disconnect,
    Grant,
    HeldGrant,
    Invalidate,
    InvalidateReason,
    LeaderConnectResponse,
    Ping,
    PingResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    RevokedReason,
    StreamProgress,
    UpdateProgress,
)
from sublet_storage.groups.model.records import (
    AdvancePosition,
    ForceRelease,
    GrantStream,
    GroupOptions,
    LendingStatus,
    OnDataLoss,
    ReleaseStream,
    StartingPosition,
)
from tests.unit.leader_bench import AGENT, BORROWER, HEAD, Bench

# --- joining and sharing ----------------------------------------------------------------------------------------------


@pytest.mark.conforms("E1")
def test_a_member_is_answered_at_once_and_gets_every_stream_after_the_debounce() -> None:
    bench = Bench(shards=3)
    bench.join()
    assert bench.received(LeaderConnectResponse) == [LeaderConnectResponse(BORROWER, bench.term, 1)]
    bench.pass_time(bench.settings.rebalance_debounce_s - 0.01)
    assert bench.received(Grant) == []
    bench.pass_time(0.02)
    grants = bench.received(Grant)
    assert [g.stream_id for g in grants] == [1, 2, 3]
    assert {(g.position, g.filter, g.end_offset) for g in grants} == {(0, "#", None)}


def test_a_grant_is_told_only_when_it_is_written() -> None:
    bench = Bench()
    bench.join()
    bench.sent.clear()
    bench.tick(bench.settings.rebalance_debounce_s)
    assert bench.sent == []
    bench.commit()
    assert [g.grant_id for g in bench.received(Grant)] == [bench.grant_id()]


def test_the_end_of_a_closed_stream_is_told_with_the_grant() -> None:
    bench = Bench()
    bench.streams.rollover(1)
    bench.joined()
    assert [g.end_offset for g in bench.received(Grant)] == [HEAD]


@pytest.mark.conforms("E19")
def test_a_hundred_joins_within_a_second_move_each_stream_once() -> None:
    bench = Bench(shards=64)
    for number in range(100):
        bench.join(f"a{number}/1")
        bench.pass_time(0.01)
    everybody = tuple(f"a{n}/1" for n in range(100))
    bench.pass_time(10.0, *everybody)
    moves = [line for line in bench.store.history(1) if line.event == "grant"]
    assert len(moves) == 64
    assert len(set(bench.holders().values())) == 64


@pytest.mark.conforms("E19")
def test_a_chain_of_joins_cannot_put_the_sharing_off_beyond_the_cap() -> None:
    bench = Bench()
    for number in range(30):
        bench.join(f"a{number}/1")
        bench.pass_time(0.1)
        if bench.now >= bench.settings.rebalance_debounce_max_s + 0.1:
            break
    assert bench.holders()


@pytest.mark.conforms("E18")
def test_a_second_member_gets_half_and_only_what_has_been_held_long_enough_is_taken() -> None:
    bench = Bench(shards=4)
    bench.joined()
    bench.confirm()
    bench.join("b/1")
    bench.pass_time(1.0, BORROWER, "b/1")
    assert bench.received(Revoke) == []
    bench.pass_time(bench.settings.min_grant_duration_s, BORROWER, "b/1")
    taken = {r.stream_id for r in bench.received(Revoke)}
    assert len(taken) == 2
    for stream_id in taken:
        bench.progress(10, stream_id, final=True)
    bench.settle()
    bench.pass_time(0.01, BORROWER, "b/1")
    assert {s for s, b in bench.holders().items() if b == "b/1"} == taken


@pytest.mark.conforms("E18")
def test_unchanged_membership_moves_nothing() -> None:
    bench = Bench(shards=5)
    bench.joined(BORROWER, "b/1")
    bench.confirm()
    before = bench.holders()
    bench.sent.clear()
    bench.pass_time(120.0, BORROWER, "b/1")
    assert bench.holders() == before
    assert bench.received(Revoke) == []


@pytest.mark.conforms("E18")
def test_what_is_set_free_goes_back_to_who_had_it_last() -> None:
    bench = Bench(shards=4)
    bench.joined()
    bench.confirm()
    bench.join("b/1")
    bench.pass_time(bench.settings.min_grant_duration_s + 1.0, BORROWER, "b/1")
    taken = {r.stream_id for r in bench.received(Revoke)}
    _hand_over(bench, *taken)
    shared = {stream_id: "b/1" if stream_id in taken else BORROWER for stream_id in (1, 2, 3, 4)}
    assert bench.holders() == shared
    bench.revoke(1, 2, 3, 4)
    _hand_over(bench, 1, 2, 3, 4)
    assert bench.holders() == shared, "shared out afresh they would have changed hands"


def _hand_over(bench: Bench, *streams: int) -> None:
    """Their holders say their last word, and they are granted anew."""
    holders = bench.holders()
    for stream_id in streams:
        bench.progress(0, stream_id, final=True, borrower_id=str(holders[stream_id]))
    bench.settle()
    bench.pass_time(1.0, BORROWER, "b/1")
    bench.confirm()


@pytest.mark.conforms("E20")
def test_standby_takes_over_at_once_when_an_owner_leaves() -> None:
    bench = Bench(shards=2)
    bench.joined(BORROWER, "b/1", "c/1")
    bench.confirm()
    owners = bench.holders()
    standby = ({BORROWER, "b/1", "c/1"} - set(owners.values())).pop()
    leaver = str(owners[1])
    bench.leave(bench.said(42), borrower_id=leaver)
    bench.settle()
    bench.sent.clear()
    bench.pass_time(bench.settings.rebalance_debounce_s + 0.01)
    assert [(g.borrower_id, g.stream_id, g.position) for g in bench.received(Grant)] == [(standby, 1, 42)]


@pytest.mark.conforms("E20")
def test_standby_takes_over_as_soon_as_a_slow_write_has_set_the_stream_free() -> None:
    bench = Bench()
    bench.joined(BORROWER, "b/1")
    bench.confirm()
    standby = ({BORROWER, "b/1"} - {str(bench.holders()[1])}).pop()
    bench.leave(bench.said(42), borrower_id=str(bench.holders()[1]))
    bench.tick(bench.settings.rebalance_debounce_s + 0.01)
    bench.commit()
    assert [(e.borrower_id, e.stream_id) for e in bench.entries if isinstance(e, GrantStream)] == [(standby, 1)]


@pytest.mark.conforms("E20")
def test_a_member_without_streams_stays_a_member() -> None:
    bench = Bench(shards=1)
    bench.joined(BORROWER, "b/1")
    idle = "b/1" if bench.holders()[1] == BORROWER else BORROWER
    bench.sent.clear()
    bench.receive(Ping((idle,), 1.0), idle.partition("/")[0])
    assert len(bench.received(PingResponse)) == 1


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_a_weight_that_is_none_is_refused_with_the_rule(weight: float) -> None:
    bench = Bench()
    bench.join(weight=weight)
    [answer] = bench.received(Invalidate)
    assert answer.reason is InvalidateReason.DENIED
    assert "finite number above 0" in answer.detail
    assert len(bench.leader.members) == 0


@pytest.mark.parametrize("weight", [5e-324, 1e308])
def test_extreme_weights_share_without_an_error(weight: float) -> None:
    bench = Bench(shards=4)
    bench.join(BORROWER, weight=weight)
    bench.join("b/1")
    bench.pass_time(1.0)
    assert len(bench.holders()) == 4


# --- streams that come and end ----------------------------------------------------------------------------------------


@pytest.mark.conforms("E21")
def test_a_stream_opened_later_is_granted_within_the_renew_interval() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.streams.add_space("eu", "eu/#", 2)
    bench.pass_time(bench.settings.stream_sync_interval_s, BORROWER)
    assert set(bench.holders()) == {1, 2, 3}


@pytest.mark.conforms("E21")
def test_a_stream_that_was_announced_is_granted_at_once() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.pass_time(1.0, BORROWER)
    bench.streams.add_space("eu", "eu/#", 2)
    bench.give(StreamsChanged())
    bench.settle()
    assert set(bench.holders()) == {1, 2, 3}


def test_news_of_streams_said_again_and_again_cost_one_look_each_debounce() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.pass_time(1.0, BORROWER)
    assert bench.give(StreamsChanged()).sync_streams
    assert not bench.give(StreamsChanged()).sync_streams
    assert bench.wake_at <= bench.now + bench.settings.rebalance_debounce_s


@pytest.mark.conforms("E21")
def test_children_are_held_back_until_every_parent_is_consumed() -> None:
    bench = Bench(shards=2)
    bench.joined()
    bench.confirm()
    bench.streams.rollover(1, 1)
    bench.pass_time(6.0, BORROWER)
    assert set(bench.holders()) == {1, 2}
    bench.progress(HEAD, 1)
    bench.settle()
    bench.pass_time(1.0, BORROWER)
    assert set(bench.holders()) == {2}
    bench.progress(HEAD, 2)
    bench.settle()
    bench.pass_time(0.01, BORROWER)
    assert set(bench.holders()) == {3}


@pytest.mark.conforms("E21")
def test_a_finished_stream_is_told_as_finished_and_never_granted_again() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.streams.rollover(1)
    bench.progress(HEAD)
    bench.settle()
    assert [r.reason for r in bench.received(Revoked)] == [RevokedReason.FINISHED]
    bench.lead()
    bench.joined("b/1")
    assert set(bench.holders()) == {2}


@pytest.mark.conforms("E21")
def test_a_stream_closed_after_its_holder_reported_the_end_is_finished_by_the_renewal() -> None:
    bench = Bench()
    bench.joined()
    bench.progress(HEAD)
    bench.settle()
    bench.streams.rollover(1)
    bench.pass_time(bench.settings.stream_sync_interval_s + 0.01, BORROWER)
    assert bench.row(1).status is LendingStatus.FINISHED
    assert [r.reason for r in bench.received(Revoked)] == [RevokedReason.FINISHED]


def test_a_stream_that_a_renewal_blocks_is_taken_off_its_holder() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.streams.rollover(1)
    bench.streams.expire_generation(1)
    bench.pass_time(bench.settings.stream_sync_interval_s + 0.01, BORROWER)
    assert bench.row(1).status is LendingStatus.BLOCKED
    assert [(r.stream_id, r.reason) for r in bench.received(Revoked)] == [(1, RevokedReason.LOST)]


@pytest.mark.conforms("E10")
def test_a_loss_is_sent_again_until_its_borrower_confirms() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    lost = bench.grant_id()
    bench.streams.rollover(1)
    bench.streams.expire_generation(1)
    bench.pass_time(bench.settings.stream_sync_interval_s + 0.01, BORROWER)
    for _ in range(3):
        bench.sent.clear()
        bench.tick(bench.settings.resend_interval_s)
        assert [(r.grant_id, r.reason) for r in bench.received(Revoked)] == [(lost, RevokedReason.LOST)]
    bench.finished(grant_id=lost)
    bench.sent.clear()
    bench.tick(bench.settings.resend_interval_s)
    assert bench.received(Revoked) == []
    assert bench.leader.members.unconfirmed == {}


@pytest.mark.conforms("W4")
def test_a_stream_whose_messages_are_gone_and_skipped_is_taken_from_its_holder_and_its_children_are_lent() -> None:
    bench = Bench(options=GroupOptions(StartingPosition.EARLIEST, on_data_loss=OnDataLoss.SKIP))
    bench.joined()
    bench.confirm()
    bench.streams.rollover(1)
    bench.streams.expire_generation(1)
    bench.pass_time(bench.settings.stream_sync_interval_s + 0.5, BORROWER)
    assert bench.row(1).status is LendingStatus.FINISHED
    assert [(r.stream_id, r.reason) for r in bench.received(Revoked)] == [(1, RevokedReason.LOST)]
    assert bench.holders() == {2: BORROWER}


def test_a_stream_finished_while_its_grant_waits_for_a_lock_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.store.locked.add((1, 1))
    bench.join()
    bench.tick(bench.settings.rebalance_debounce_s)
    bench.settle()
    bench.streams.rollover(1)
    bench.change_row(status=LendingStatus.FINISHED, position=HEAD)
    bench.pass_time(7.0, BORROWER)
    bench.store.locked.clear()
    bench.pass_time(1.0, BORROWER)
    bench.leave(bench.said(0, 2))
    bench.settle()
    assert [m.reason for m in bench.received(Invalidate)] == [InvalidateReason.DONE]


# --- what is said again -----------------------------------------------------------------------------------------------


@pytest.mark.conforms("E7")
def test_a_lost_grant_is_told_again_until_it_is_confirmed() -> None:
    bench = Bench()
    bench.joined()
    bench.sent.clear()
    bench.pass_time(3.2, BORROWER)
    assert len(bench.received(Grant)) >= 2
    bench.confirm()
    bench.sent.clear()
    bench.pass_time(3.0, BORROWER)
    assert bench.received(Grant) == []


@pytest.mark.conforms("E7")
def test_a_lost_revoke_is_told_again_until_the_last_word() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.sent.clear()
    bench.revoke()
    bench.pass_time(3.2, BORROWER)
    assert len(bench.received(Revoke)) >= 3
    bench.progress(9, final=True)
    bench.sent.clear()
    bench.tick(5.0)
    assert bench.received(Revoke) == []


@pytest.mark.conforms("E7")
def test_a_lost_revoked_is_told_again_until_it_is_confirmed() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.join("b/1")
    bench.revoke()
    grant = bench.grant_id()
    bench.progress(9, final=True)
    bench.settle()
    bench.sent.clear()
    bench.pass_time(3.2, BORROWER, "b/1")
    assert len(bench.received(Revoked)) >= 2
    bench.finished(grant_id=grant)
    bench.pass_time(3.0, BORROWER, "b/1")
    assert bench.received(Revoked) == []


@pytest.mark.conforms("E8")
def test_repeated_progress_and_goodbyes_change_nothing_more() -> None:
    bench = Bench()
    bench.joined()
    bench.progress(5)
    bench.progress(5)
    bench.settle()
    goodbye = bench.said(7)
    bench.leave(goodbye)
    bench.leave(goodbye)
    bench.settle()
    bench.sent.clear()
    bench.leave(goodbye)
    assert [m.reason for m in bench.received(Invalidate)] == [InvalidateReason.DONE]
    assert (bench.row().position, bench.row().status) == (7, LendingStatus.FREE)
    assert [line.event for line in bench.store.history(1) if line.stream_id] == ["grant", "release"]


@pytest.mark.conforms("E8")
def test_a_leaving_borrower_is_told_done_only_when_its_last_words_are_durable() -> None:
    bench = Bench(shards=2)
    bench.joined()
    bench.confirm()
    bench.sent.clear()
    bench.leave(bench.said(5, 1), bench.said(6, 2))
    assert bench.received(Invalidate) == []
    bench.settle()
    assert [m.reason for m in bench.received(Invalidate)] == [InvalidateReason.DONE]
    assert [bench.row(s).position for s in (1, 2)] == [5, 6]
    assert not any(line.is_forced for line in bench.store.history(1))


@pytest.mark.conforms("E8")
def test_a_grant_under_way_to_a_borrower_that_leaves_goes_back_without_being_used() -> None:
    bench = Bench()
    bench.join()
    bench.tick(bench.settings.rebalance_debounce_s)
    bench.leave()
    bench.settle()
    assert bench.row().status is LendingStatus.FREE
    assert [m.reason for m in bench.received(Invalidate)] == [InvalidateReason.DONE]
    assert not any(line.is_forced for line in bench.store.history(1))


def test_progress_that_waits_is_overtaken_by_newer_progress_but_never_lowered_by_older() -> None:
    bench = Bench()
    bench.joined()
    bench.progress(5)
    bench.progress(20)
    bench.progress(10)
    bench.commit()
    assert bench.entries == [AdvancePosition(1, bench.grant_id(), 20)]
    bench.progress(30)
    bench.finished()
    bench.settle()
    assert bench.row().position == 30


# --- deadlines and evictions ------------------------------------------------------------------------------------------


@pytest.mark.conforms("E11")
def test_an_operators_revoke_is_forced_at_its_deadline_and_the_range_reported() -> None:
    bench = Bench()
    bench.joined(BORROWER)
    bench.progress(5)
    bench.settle()
    bench.join("b/1")
    first = bench.grant_id()
    bench.revoke()
    bench.pass_time(bench.settings.revoke_deadline_s - 0.1, BORROWER, "b/1")
    assert bench.grant_id() == first
    bench.pass_time(1.0, BORROWER, "b/1")
    assert bench.grant_id() > first
    assert [(h.position, h.grant_id) for h in bench.store.history(1) if h.is_forced] == [(5, first)]


@pytest.mark.conforms("E11")
def test_a_revoke_said_again_and_again_is_forced_no_later() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    first = bench.grant_id()
    for _ in range(4):
        bench.revoke()
        bench.pass_time(10.0, BORROWER)
    assert bench.grant_id() > first


@pytest.mark.conforms("E11")
def test_a_holder_that_starts_again_does_not_get_round_a_forced_revoke() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    first = bench.grant_id()
    bench.revoke()
    bench.pass_time(20.0, BORROWER)
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(),))
    bench.settle()
    assert bench.received(Revoke)[-1].borrower_id == "a/2"
    bench.pass_time(11.0, "a/2")
    assert bench.grant_id() > first
    assert any(line.is_forced for line in bench.store.history(1))


@pytest.mark.conforms("E11", "E28")
def test_a_balance_revoke_of_a_holder_that_pings_waits_for_its_batch() -> None:
    bench = Bench(shards=2)
    bench.joined()
    bench.confirm()
    bench.join("b/1")
    before = dict(bench.holders())
    bench.pass_time(300.0, BORROWER, "b/1")
    assert bench.holders() == before


@pytest.mark.conforms("E10")
def test_a_borrower_unheard_of_is_evicted_with_a_reported_move() -> None:
    bench = Bench()
    bench.joined()
    bench.progress(5)
    bench.settle()
    bench.sent.clear()
    bench.pass_time(bench.settings.eviction_timeout_s - 0.1)
    assert len(bench.leader.members) == 1
    bench.pass_time(1.0)
    [reported] = bench.received(Invalidate)
    assert (reported.borrower_id, reported.reason) == (BORROWER, InvalidateReason.RETRY)
    assert bench.row().status is LendingStatus.FREE
    assert [h.position for h in bench.store.history(1) if h.is_forced] == [5]


def test_an_evicted_borrowers_last_word_under_way_is_not_taken_back() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.revoke()
    bench.progress(5, final=True)
    bench.tick(bench.settings.eviction_timeout_s + 1)
    bench.settle()
    assert bench.row().position == 5
    assert not any(line.is_forced for line in bench.store.history(1))


@pytest.mark.conforms("E10")
def test_a_grant_under_way_to_an_evicted_borrower_goes_back() -> None:
    bench = Bench()
    bench.join()
    bench.tick(bench.settings.rebalance_debounce_s)
    bench.tick(bench.settings.eviction_timeout_s + 1)
    bench.settle()
    assert bench.row().status is LendingStatus.FREE
    assert not any(line.is_forced for line in bench.store.history(1)), "nobody ever heard of it"


# --- trouble with the database ----------------------------------------------------------------------------------------


@pytest.mark.conforms("E32")
def test_a_locked_row_is_written_again_soon_and_holds_nobody_up() -> None:
    bench = Bench(shards=2)
    bench.joined()
    bench.confirm()
    bench.store.locked.add((1, 1))
    bench.sent.clear()
    bench.progress(5, 1)
    bench.progress(6, 2)
    bench.settle()
    assert [(m.stream_id, m.position) for m in bench.received(ProgressSaved)] == [(2, 6)]
    bench.progress(7, 2)
    bench.settle()
    assert [(m.stream_id, m.position) for m in bench.received(ProgressSaved)] == [(2, 7)]
    bench.pass_time(0.5, BORROWER)
    assert bench.row(1).position == 0
    bench.store.locked.clear()
    bench.pass_time(0.11, BORROWER)
    assert bench.row(1).position == 5


def test_what_was_certainly_not_written_is_written_again() -> None:
    bench = Bench()
    bench.joined()
    bench.progress(5)
    bench.fail()
    bench.progress(9)
    bench.pass_time(bench.settings.resend_interval_s + 0.1, BORROWER)
    assert bench.row().position == 9


def test_a_grant_that_was_not_written_is_dropped_with_its_borrower() -> None:
    bench = Bench()
    bench.join()
    bench.tick(bench.settings.rebalance_debounce_s)
    bench.fail()
    bench.leave()
    assert [m.reason for m in bench.received(Invalidate)] == [InvalidateReason.DONE], "there is nothing to write"
    bench.pass_time(bench.settings.resend_interval_s + 1.0)
    assert not any(line.event == "grant" for line in bench.store.history(1))


@pytest.mark.parametrize("fails_first", [False, True])
@pytest.mark.conforms("E21")
def test_a_stream_finished_before_its_grant_is_dropped_holds_its_children_back_no_longer(fails_first: bool) -> None:
    bench = Bench()
    bench.streams.rollover(1)
    bench.give(StreamsChanged())
    bench.pass_time(bench.settings.rebalance_debounce_s)
    bench.join()
    bench.tick(bench.settings.rebalance_debounce_s)
    [grant], bench.entries = bench.entries, []
    assert isinstance(grant, GrantStream)
    if fails_first:
        bench.give(CommitFailed((grant,)))
    bench.change_row(position=HEAD)
    bench.give(StreamsChanged())
    bench.tick(bench.settings.rebalance_debounce_s)
    bench.settle()
    assert bench.row().status is LendingStatus.FINISHED
    bench.leave()
    if not fails_first:
        bench.give(CommitFailed((grant,)))
    bench.join("b/1")
    bench.pass_time(bench.settings.resend_interval_s + 1.0, "b/1")
    assert bench.holders() == {2: "b/1"}


def test_a_stream_whose_grant_was_not_written_goes_to_another_without_delay() -> None:
    bench = Bench()
    bench.join()
    bench.tick(bench.settings.rebalance_debounce_s)
    bench.join("b/1")
    bench.leave()
    bench.tick(bench.settings.rebalance_debounce_s)
    bench.fail()
    bench.pass_time(bench.settings.resend_interval_s + 0.1, "b/1")
    assert bench.holders() == {1: "b/1"}
    assert [line.borrower_id for line in bench.store.history(1) if line.event == "grant"] == ["b/1"]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.conforms("E11")
def test_what_was_not_written_comes_before_what_waited_for_it(busy: bool) -> None:
    """The holder is put out while its progress is not written yet: what it reported is not announced as repeated."""
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.progress(50)
    bench.tick(bench.settings.eviction_timeout_s + 1)
    if busy:
        bench.store.locked.add((1, 1))
        bench.commit()
        bench.store.locked.clear()
    else:
        bench.fail()
    bench.pass_time(bench.settings.resend_interval_s + 1.0)
    assert [h.position for h in bench.store.history(1) if h.is_forced] == [50]


def test_a_refused_grant_is_tried_again_even_while_others_join() -> None:
    bench = Bench()
    bench.change_row(status=LendingStatus.BLOCKED)
    bench.join()
    bench.tick(bench.settings.rebalance_debounce_s)
    bench.join("b/1")
    bench.change_row(status=LendingStatus.RESERVED)
    bench.commit()
    bench.leader.streams.get(1).lending = bench.store.load(1, bench.term)[0]  # type: ignore[union-attr]
    bench.change_row(status=LendingStatus.FREE)
    entry = bench.leader.streams.get(1)
    assert entry is not None
    entry.lending = bench.store.load(1, bench.term)[0]
    bench.pass_time(2.0, BORROWER, "b/1")
    assert bench.holders(), "not only when the balance is looked at anyway"


def test_a_deposed_leader_stops() -> None:
    bench = Bench()
    bench.joined()
    bench.progress(5)
    bench.store.release(bench._ref, {1: bench.term})
    bench.commit()
    assert bench.stopped == "deposed"


# --- leader changes ---------------------------------------------------------------------------------------------------


@pytest.mark.conforms("E16")
def test_a_reclaim_keeps_the_grant_id_and_the_position_and_can_be_repeated() -> None:
    bench = Bench()
    bench.joined()
    bench.progress(5)
    bench.settle()
    grant = bench.grant_id()
    bench.lead()
    for _ in range(2):
        bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(position=8),))
        bench.settle()
    assert [(g.borrower_id, g.grant_id, g.position) for g in bench.received(Grant)] == [("a/2", grant, 8)]
    assert (bench.row().grant_id, bench.row().borrower_id, bench.row().position) == (grant, "a/2", 8)


@pytest.mark.conforms("E16")
def test_streams_of_the_last_leaders_time_wait_for_their_borrower_until_the_grace_ends() -> None:
    bench = Bench()
    bench.joined()
    bench.progress(5)
    bench.settle()
    bench.lead()
    bench.joined("b/1")
    bench.pass_time(bench.settings.reclaim_grace_s - 0.3, "b/1")
    assert bench.holders() == {1: BORROWER}
    bench.pass_time(0.5, "b/1")
    assert bench.holders() == {1: "b/1"}
    assert [h.position for h in bench.store.history(1) if h.is_forced] == [5]


@pytest.mark.conforms("E10", "E17")
def test_a_reclaim_of_another_agents_stream_or_of_an_old_grant_is_lost() -> None:
    bench = Bench(shards=2)
    bench.joined()
    bench.confirm()
    bench.lead()
    bench.join("b/1", reclaim=(bench.held(1, 50), HeldGrant(99, 1, 1)))
    bench.join("a/2", predecessor=BORROWER, reclaim=(HeldGrant(2, bench.grant_id(2) - 1, 50),))
    bench.settle()
    lost = {(m.borrower_id, m.stream_id) for m in bench.received(Revoked) if m.reason is RevokedReason.LOST}
    assert lost == {("b/1", 1), ("b/1", 99), ("a/2", 2)}
    assert [bench.row(s).position for s in (1, 2)] == [0, 0]


@pytest.mark.conforms("E16")
def test_a_reclaim_overtaken_by_another_is_not_taken_back() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.lead()
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(),))
    bench.join("a/3", predecessor="a/2", reclaim=(bench.held(),))
    bench.settle()
    assert bench.holders() == {1: "a/3"}
    assert not any(line.is_forced for line in bench.store.history(1))


@pytest.mark.conforms("E16")
@pytest.mark.parametrize("written", [True, False])
def test_a_late_word_of_an_earlier_borrower_takes_nothing_from_a_later_one(written: bool) -> None:
    """Neither the one that the later replaced, nor one before, of which this leader never heard."""
    bench = Bench()
    bench.join(borrower_number=1)
    bench.pass_time(bench.settings.rebalance_debounce_s + 0.001)
    bench.confirm()
    bench.lead()
    held = (bench.held(),)
    bench.join("a/4", predecessor="a/3", reclaim=held, borrower_number=4)
    if written:
        bench.settle()
    for number in (3, 2):
        bench.sent.clear()
        bench.join(f"a/{number}", predecessor=f"a/{number - 1}", reclaim=held, borrower_number=number)
        detail = "a later borrower of its agent has what it held"
        assert bench.sent == [("a", Invalidate(f"a/{number}", 0, InvalidateReason.RETRY, detail))]
    bench.settle()
    assert bench.holders() == {1: "a/4"}
    bench.join("a/6", predecessor="a/5", reclaim=held, borrower_number=6)
    bench.settle()
    assert bench.holders() == {1: "a/6"}


@pytest.mark.conforms("E9")
def test_what_a_successor_does_not_name_goes_back_exactly() -> None:
    bench = Bench(shards=2)
    bench.joined()
    bench.progress(5, 1)
    bench.progress(6, 2)
    bench.settle()
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(1, 5),))
    bench.settle()
    assert bench.holders() == {1: "a/2"}
    assert bench.row(2).position == 6
    assert not any(line.is_forced for line in bench.store.history(1))


@pytest.mark.conforms("E9")
def test_two_borrowers_of_one_agent_do_not_mix() -> None:
    bench = Bench(shards=2)
    bench.joined("a/1", "a/2")
    bench.confirm()
    mine = next(s for s, b in bench.holders().items() if b == "a/1")
    bench.sent.clear()
    bench.progress(9, mine, borrower_id="a/2")
    assert [(m.borrower_id, m.reason) for m in bench.received(Revoked)] == [("a/2", RevokedReason.LOST)]
    bench.settle()
    assert bench.row(mine).position == 0
    assert bench.holders()[mine] == "a/1"


@pytest.mark.conforms("E31")
def test_one_born_leaving_hands_over_and_is_given_nothing() -> None:
    bench = Bench(shards=2)
    bench.joined()
    bench.confirm()
    bench.lead()
    held = (bench.held(1, 5), bench.held(2, 6))
    bench.join("a/2", predecessor=BORROWER, leaving=True, reclaim=held)
    bench.leave(bench.said(7, 1), bench.said(8, 2), borrower_id="a/2")
    bench.settle()
    bench.pass_time(1.0, "a/2")
    assert bench.holders() == {}
    assert [bench.row(s).position for s in (1, 2)] == [7, 8]
    assert [m.reason for m in bench.received(Invalidate)] == [InvalidateReason.DONE]


# --- the past, and strangers ------------------------------------------------------------------------------------------


@pytest.mark.conforms("E10")
def test_a_ping_from_an_unknown_borrower_is_answered_invalidate() -> None:
    bench = Bench()
    bench.receive(Ping(("a/1", "a/9"), 3.0))
    assert [type(m) for _, m in bench.sent] == [Invalidate, Invalidate]
    assert {m.term for m in bench.received(Invalidate)} == {0}, "whatever term it believes in, it must not ignore this"


@pytest.mark.conforms("E10", "E17")
def test_words_under_another_term_have_no_effect_but_an_invalidate() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    said = bench.said(50)
    for message in (
        UpdateProgress(BORROWER, bench.term - 1, (said,)),
        Disconnect(BORROWER, bench.term - 1, (said,)),
    ):
        bench.sent.clear()
        bench.receive(message)
        [reported] = bench.received(Invalidate)
        assert (reported.reason, reported.term) == (InvalidateReason.RETRY, bench.term - 1)
        assert bench.entries == []


@pytest.mark.conforms("E10", "E17")
def test_words_under_an_old_grant_write_nothing() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    old = bench.grant_id() - 1
    for last in (False, True):
        bench.sent.clear()
        bench.receive(UpdateProgress(BORROWER, bench.term, (StreamProgress(1, old, 50, last),)))
        assert [m.reason for m in bench.received(Revoked)] == [RevokedReason.LOST]
        assert bench.entries == []
    bench.finished(grant_id=old)
    assert bench.entries == []
    bench.leave(StreamProgress(1, old, 50, True))
    assert bench.entries == [ReleaseStream(1, bench.grant_id(), 0, "its borrower does not have it")], (
        "what it does not name"
    )


@pytest.mark.conforms("E11")
def test_what_was_given_up_is_written_with_the_last_word() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.receive(
        UpdateProgress(BORROWER, bench.term, (StreamProgress(1, bench.grant_id(), 50, True, delivered_end=60),))
    )
    assert bench.entries == [ReleaseStream(1, bench.grant_id(), 50, "handed back by its borrower", 0.0, 60)]


@pytest.mark.conforms("E11", "E16")
def test_nobody_is_told_of_a_loss_before_it_is_written() -> None:
    """Else he drops the stream with what he has not reported, and a leader who never wrote it is followed by one to
    whom the grant is in force."""
    bench = Bench()
    bench.joined()
    bench.confirm()
    held, word = bench.held(position=5), StreamProgress(1, bench.grant_id(), 5)
    bench.tick(bench.settings.eviction_timeout_s + 1)
    bench.sent.clear()
    bench.join("a/2", predecessor=BORROWER, reclaim=(held,))
    bench.receive(UpdateProgress("a/2", bench.term, (word,)))
    assert bench.received(Revoked) == []
    bench.settle()
    bench.receive(UpdateProgress("a/2", bench.term, (word,)))
    assert [m.reason for m in bench.received(Revoked)] == [RevokedReason.LOST]


@pytest.mark.conforms("E11")
def test_a_forced_revoke_is_told_when_it_is_written() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.revoke()
    bench.settle()
    while not any(isinstance(entry, ForceRelease) for entry in bench.entries):
        bench.leader.members.get(BORROWER).last_heard_at = bench.now  # type: ignore[union-attr]
        bench.tick(1.0)
        assert bench.received(Revoked) == []
    bench.settle()
    assert [m.reason for m in bench.received(Revoked)] == [RevokedReason.LOST]


@pytest.mark.conforms("E11")
def test_a_leaver_says_what_it_gave_up() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.leave(StreamProgress(1, bench.grant_id(), 50, True, delivered_end=60))
    assert bench.entries == [ReleaseStream(1, bench.grant_id(), 50, "left in the middle of a batch", 0.0, 60)]


@pytest.mark.conforms("E10")
@pytest.mark.parametrize("last", [False, True])
def test_nobody_can_speak_of_a_grant_that_is_not_written_yet(last: bool) -> None:
    bench = Bench()
    bench.join()
    bench.tick(bench.settings.rebalance_debounce_s)
    bench.receive(UpdateProgress(BORROWER, bench.term, (StreamProgress(1, 0, 5, last),)))
    bench.finished(grant_id=0)
    bench.settle()
    bench.confirm()
    assert bench.holders() == {1: BORROWER}
    assert bench.row().position == 0


@pytest.mark.conforms("E10", "X4")
def test_no_agent_speaks_for_anothers_borrower() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    before = bench.row()
    for message in (
        UpdateProgress(BORROWER, bench.term, (bench.said(50),)),
        Disconnect(BORROWER, bench.term, (bench.said(50),)),
        Disconnect(BORROWER, 0, ()),
        Ping((BORROWER,), 1.0),
    ):
        bench.sent.clear()
        bench.receive(message, agent="evil")
        assert {to for to, _ in bench.sent} == {"evil"}
        assert next(m.reason for m in bench.received(Invalidate)) in (InvalidateReason.RETRY, InvalidateReason.DONE)
    bench.join(BORROWER, agent="evil", reclaim=(bench.held(1, 50),))
    assert [to for to, m in bench.sent if isinstance(m, Invalidate)] == ["evil"]
    bench.settle()
    assert bench.row() == before
    assert len(bench.leader.members) == 1


@pytest.mark.conforms("E10")
def test_a_late_request_of_one_that_left_or_was_replaced_does_not_bring_it_back() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(),))
    bench.settle()
    bench.sent.clear()
    bench.join(BORROWER, reclaim=(bench.held(),))
    assert [m.reason for m in bench.received(Invalidate)] == [InvalidateReason.RETRY]
    bench.leave(bench.said(3), borrower_id="a/2")
    bench.settle()
    bench.sent.clear()
    bench.join("a/2")
    assert [m.reason for m in bench.received(Invalidate)] == [InvalidateReason.DONE]
    assert len(bench.leader.members) == 0


def test_a_leader_with_nobody_left_stops_after_the_idle_time_and_not_before() -> None:
    bench = Bench()
    bench.joined()
    bench.confirm()
    bench.pass_time(100.0, BORROWER)
    assert bench.stopped is None
    bench.leave(bench.said(1))
    bench.settle()
    bench.pass_time(bench.settings.leader_idle_timeout_s - 1)
    assert bench.stopped is None
    bench.pass_time(2.0)
    assert bench.stopped == "idle"


def test_what_it_remembers_of_those_that_left_is_forgotten() -> None:
    bench = Bench()
    for number in range(1, 50):
        bench.join(f"a/{number}", predecessor=f"a/{number - 1}")
    bench.leave(borrower_id="a/49")
    bench.pass_time(bench.settings.eviction_timeout_s + 1)
    assert not bench.leader.knows_borrower("a/1")
    assert not bench.leader.knows_borrower("a/49")
    assert bench.leader.members.unconfirmed == {}


# --- atomic groups --------------------------------------------------------------------------------------------------

ATOMIC = GroupOptions(StartingPosition.EARLIEST, atomic=True)


def before(epoch: int) -> LowerFrontier:
    return LowerFrontier(((epoch,),))


def atomic_bench() -> Bench:
    """One stream, of which all is in epochs before 8, and a borrower that has it."""
    bench = Bench(options=ATOMIC)
    bench.streams.lowers[1] = before(8)
    bench.joined()
    bench.confirm()
    bench.receive(Ping((BORROWER,), sent_at=17.0))
    bench.pass_time(1.0, BORROWER)
    bench.sent.clear()
    return bench


def consume_all(bench: Bench) -> None:
    reported = StreamProgress(1, bench.grant_id(), HEAD, consumed=ConsumedFrontier(HEAD, before(8)))
    bench.receive(UpdateProgress(BORROWER, bench.term, (reported,)), AGENT)


@pytest.mark.conforms("S8")
def test_progress_of_an_atomic_group_is_followed_by_a_look_at_its_frontier() -> None:
    bench = atomic_bench()
    consume_all(bench)
    bench.commit()
    assert bench.renew
    (saved,) = bench.received(ProgressSaved)
    assert (saved.position, saved.consumed) == (HEAD, ConsumedFrontier(HEAD, before(8)))


@pytest.mark.conforms("S8")
def test_members_are_told_at_once_how_far_an_atomic_group_has_come() -> None:
    bench = atomic_bench()
    consume_all(bench)
    bench.settle()
    (reported,) = bench.received(PingResponse)
    assert reported.epochs == (GroupFrontier("default", 1, before(8), before(8)),)
    assert reported.sent_at == 17.0, "the answer to the last ping: nobody is trusted for longer"
    bench.pass_time(bench.settings.stream_sync_interval_s, BORROWER)
    assert bench.received(PingResponse) == [], "it has not moved"
    bench.receive(Ping((BORROWER,), sent_at=18.0))
    (reported,) = bench.received(PingResponse)
    assert reported.epochs == (GroupFrontier("default", 1, before(8), before(8)),)


def test_a_grant_of_an_atomic_group_says_from_which_epochs_on() -> None:
    bench = Bench(options=ATOMIC)
    bench.joined()
    (grant,) = bench.received(Grant)
    assert grant.consumed == ConsumedFrontier(0)
