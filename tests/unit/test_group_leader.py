"""One group's leader: who joins, who gets what, what is said again, who is put out, and what of the past is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from sublet_leader.allocation import AllocationInput, AllocationPlan, EvenStrategy
from sublet_leader.group.events import StreamsChanged, WritesCommitted, WritesNotCommitted
from sublet_leader.group.rebalancer import ISOLATION_S
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier, LowerFrontier
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.limits import SLICE_ITEMS
from sublet_protocol.domain.subscriptions import MAX_OFFSET
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Disconnect,
    Grant,
    GrantEndOutcome,
    HeldGrant,
    Invalidate,
    LeaderConnectResponse,
    Ping,
    PingResponse,
    ProgressSaved,
    Revoke,
    Revoked,
    StreamProgress,
    ToLeader,
    UpdateProgress,
)
from sublet_storage.groups.coordinator.leader_commits import make_busy_result
from sublet_storage.groups.model.records import (
    SUSPECT_LOSSES,
    AdvancePosition,
    ForceRelease,
    GrantStream,
    GroupOptions,
    GroupWriteResult,
    GroupWrites,
    LendingStatus,
    OnDataLoss,
    RecordHistory,
    ReleaseStream,
    StartingPosition,
)
from tests.unit.leader_bench import AGENT, BORROWER, EPOCH_US, HEAD, Bench, granted, unwritten

OTHER = "b/1"


def lose_messages(bench: Bench) -> None:
    """The messages of stream 1 are gone before they are consumed, and it has a child."""
    bench.streams.rollover(1)
    bench.streams.expire_generation(1)


def expire(bench: Bench) -> None:
    """The same, and its leader has found that out."""
    lose_messages(bench)
    bench.pass_time(bench.settings.stream_sync_interval_s + 0.5, BORROWER)


# --- joining and sharing ----------------------------------------------------------------------------------------------


@pytest.mark.conforms("E1")
@pytest.mark.parametrize("end", [None, HEAD], ids=["open", "closed"])
def test_a_member_gets_every_stream_after_the_debounce(end: int | None) -> None:
    """It is answered at once, and is notified of its grants when they are written."""
    bench = Bench(shards=3)
    if end is not None:
        bench.streams.rollover(1)
    bench.join()
    assert bench.received(LeaderConnectResponse) == [LeaderConnectResponse(BORROWER, bench.term, 1)]
    bench.pass_time(bench.settings.rebalance_debounce_s - 0.01)
    bench.tick(0.01)
    assert bench.sent == []
    bench.commit()
    grants = [(g.stream_id, g.grant_id, g.position, g.filter, g.end_offset) for g in bench.received(Grant)]
    assert grants == [(s, bench.grant_id(s), 0, "#", end) for s in (1, 2, 3)]


@pytest.mark.conforms("E19")
def test_a_hundred_joins_move_each_stream_once() -> None:
    bench = Bench(shards=64)
    everybody = [f"a{number}/1" for number in range(100)]
    for borrower_id in everybody:
        bench.join(borrower_id)
        bench.pass_time(0.01)
    bench.pass_time(10.0, *everybody)
    assert len(bench.history("grant")) == 64
    assert len(set(bench.holders().values())) == 64


@pytest.mark.conforms("E19")
def test_a_chain_of_joins_puts_sharing_off_so_long() -> None:
    bench = Bench()
    while bench.now < bench.settings.rebalance_debounce_max_s + 0.1:
        bench.join(f"a{bench.now}/1")
        bench.pass_time(0.1)
    assert bench.holders()


@pytest.mark.conforms("E20")
def test_a_standby_takes_over_from_a_leaver() -> None:
    """That is decided when the slow write has set the stream free, not only at the next look."""
    bench = granted(1, BORROWER, OTHER)
    owner = str(bench.holders()[1])
    (standby,) = {BORROWER, OTHER} - {owner}
    bench.receive(Ping((standby,), 1.0), standby.partition("/")[0])
    assert len(bench.received(PingResponse)) == 1, "without streams it stays a member"
    bench.leave(bench.said(42), borrower_id=owner)
    bench.tick(bench.settings.rebalance_debounce_s + 0.01)
    bench.commit()
    assert [(e.borrower_id, e.stream_id) for e in bench.entries if isinstance(e, GrantStream)] == [(standby, 1)]
    bench.settle()
    assert [(g.borrower_id, g.stream_id, g.position) for g in bench.received(Grant)] == [(standby, 1, 42)]


# --- streams that come and end ----------------------------------------------------------------------------------------


@pytest.mark.conforms("E21")
@pytest.mark.parametrize("is_announced", [False, True])
def test_a_stream_opened_later_is_granted(is_announced: bool) -> None:
    """At once where it is announced, else within the interval of the looks."""
    bench = granted()
    bench.pass_time(1.0, BORROWER)
    bench.streams.add_space("eu", "eu/#", 2)
    if is_announced:
        bench.give(StreamsChanged())
        bench.settle()
    else:
        bench.pass_time(bench.settings.stream_sync_interval_s, BORROWER)
    assert set(bench.holders()) == {1, 2, 3}


def test_stream_changes_cost_one_look_each_debounce() -> None:
    bench = granted()
    bench.pass_time(1.0, BORROWER)
    assert bench.give(StreamsChanged()).needs_stream_sync
    assert not bench.give(StreamsChanged()).needs_stream_sync
    assert bench.wake_at <= bench.now + bench.settings.rebalance_debounce_s


@pytest.mark.conforms("E21")
def test_children_wait_until_every_parent_is_consumed() -> None:
    bench = granted(2)
    bench.streams.rollover(1, 1)
    bench.pass_time(6.0, BORROWER)
    assert set(bench.holders()) == {1, 2}
    for stream_id, left in ((1, {2}), (2, {3})):
        bench.save(HEAD, stream_id)
        bench.pass_time(1.0, BORROWER)
        assert set(bench.holders()) == left


@pytest.mark.conforms("E21")
def test_a_finished_stream_is_never_granted_again() -> None:
    """As it is closed after its end was reported, the next look finishes it."""
    bench = granted()
    bench.save(HEAD)
    bench.streams.rollover(1)
    bench.pass_time(bench.settings.stream_sync_interval_s + 0.01, BORROWER)
    assert bench.row(1).status is LendingStatus.FINISHED
    assert bench.losses() == [GrantEndOutcome.FINISHED]
    bench.lead()
    bench.joined(OTHER)
    assert set(bench.holders()) == {2}


def test_a_closed_stream_being_read_is_not_written() -> None:
    """Until its holder reports."""
    bench = granted()
    bench.streams.rollover(1)
    bench.tick(bench.settings.stream_sync_interval_s + 0.01)
    bench.commit()
    entry = bench.leader.streams.get(1)
    assert (entry and entry.lending.is_closed, bench.entries) == (True, [])


def test_what_waits_finishes_a_closed_stream() -> None:
    """Nothing is written behind it for that."""
    bench = granted()
    bench.save(HEAD)
    bench.progress(HEAD)
    bench.progress(HEAD, final=True)
    bench.streams.rollover(1)
    sync = GroupWrites(bench.group.group_id, bench.term, (), needs_stream_sync=True)
    bench.give(WritesCommitted(bench.store.commit([sync])[0]))
    bench.commit()
    assert [type(change) for change in bench.entries] == [ReleaseStream]
    bench.commit()
    assert bench.row().status is LendingStatus.FINISHED
    assert [change for change in bench.entries if change.stream_id == 1] == []


def test_the_end_of_a_former_grant_ends_no_other() -> None:
    """Its late answer says that it was over before."""
    bench = granted()
    bench.entries.append(ForceRelease(1, bench.grant_id() - 1, "late"))
    bench.commit()
    assert (bench.losses(), bench.holders()) == ([], {1: BORROWER})


def test_an_unwritten_grant_ends_when_it_is_written() -> None:
    """Its borrower is put out meanwhile: nothing is forced, as it never was sent."""
    bench = unwritten()
    written = bench.write()
    bench.evict()
    bench.give(written)
    assert [type(change) for change in bench.entries] == [ReleaseStream]
    bench.settle()
    assert [line.event for line in bench.history("grant", "release", "revoke")] == ["grant", "release"]
    assert bench.forced() == []


def test_a_blocked_stream_is_not_written() -> None:
    """When a leader finds it, when it closes, and when a member waits for streams."""
    bench = Bench()
    bench.change_row(status=LendingStatus.BLOCKED, position=HEAD, grant_id=7)
    bench.lead()
    bench.join()
    bench.streams.rollover(1)
    bench.tick(bench.settings.reclaim_grace_s)
    written = [*bench.entries]
    bench.commit()
    bench.tick(bench.settings.lease_duration_s + bench.settings.grant_validity_s)
    written += bench.entries
    bench.commit()
    bench.join("a/2")
    bench.debounce()
    assert [change for change in (*written, *bench.entries) if change.stream_id == 1] == []


def test_a_stream_closes_while_its_grant_is_written() -> None:
    bench = granted()
    bench.hand_over()
    bench.sent.clear()
    bench.streams.rollover(1)
    sync = GroupWrites(bench.group.group_id, bench.term, (), needs_stream_sync=True)
    bench.join(OTHER)
    bench.debounce()
    bench.give(WritesCommitted(bench.store.commit([sync])[0]))
    bench.settle()
    assert (bench.holders(), bench.losses()) == ({1: OTHER}, [])


@pytest.mark.parametrize("on_data_loss", OnDataLoss)
@pytest.mark.parametrize("what", ["progress", "revoke", "leave"])
def test_that_all_is_gone_crosses_a_write(what: str, on_data_loss: OnDataLoss) -> None:
    """Which is refused then; the holder learns of the loss once, and may leave."""
    bench = granted(options=GroupOptions(StartingPosition.EARLIEST, on_data_loss=on_data_loss))
    lose_messages(bench)
    bench.tick(bench.settings.stream_sync_interval_s + 0.01)
    position, synced = bench.said(5, final=what == "leave"), bench.write()
    if what == "progress":
        bench.report(position)
    elif what == "revoke":
        bench.revoke()
    else:
        bench.leave(position)
    bench.give(synced)
    bench.settle()
    if what != "leave":
        assert bench.losses() == [GrantEndOutcome.LOST]
        bench.leave()
        bench.settle()
    assert bench.ends() == [BorrowerEndReason.DONE]


def test_a_stream_finished_while_its_grant_waits() -> None:
    """Nothing of it is left behind."""
    bench = Bench()
    bench.store.locked.add((1, 1))
    bench.join()
    bench.debounce()
    bench.settle()
    bench.streams.rollover(1)
    bench.change_row(status=LendingStatus.FINISHED, position=HEAD)
    bench.pass_time(7.0, BORROWER)
    bench.store.locked.clear()
    bench.pass_time(1.0, BORROWER)
    bench.leave(bench.said(0, 2))
    bench.settle()
    assert bench.ends() == [BorrowerEndReason.DONE]


def test_children_of_lost_streams_are_granted() -> None:
    """Also a generation that is first read when its streams are finished."""
    bench = granted(options=GroupOptions(StartingPosition.EARLIEST, on_data_loss=OnDataLoss.SKIP))
    for generation in (1, 2):
        bench.streams.rollover(1)
        bench.streams.expire_generation(generation)
    bench.pass_time(bench.settings.stream_sync_interval_s + 0.5, BORROWER)
    assert bench.holders() == {3: BORROWER}
    assert [entry.lending.stream_id for entry in bench.leader.streams] == [3]


def test_an_unconfirmed_grant_is_not_moved() -> None:
    """However long ago it was made."""
    bench = Bench(2)
    bench.joined(BORROWER)
    bench.pass_time(bench.settings.min_grant_duration_s + 1.0, BORROWER)
    bench.join(OTHER)
    bench.share(BORROWER, OTHER)
    assert bench.received(Revoke) == []
    bench.confirm()
    bench.pass_time(bench.settings.min_grant_duration_s + 1.0, BORROWER, OTHER)
    assert bench.received(Revoke) != []


# --- what is said again -----------------------------------------------------------------------------------------------


def hand_over(bench: Bench) -> None:
    """Its final progress is durable, and another has the stream."""
    bench.join(OTHER)
    bench.revoke()
    bench.save(9, final=True)


@pytest.mark.conforms("E7", "E10")
@pytest.mark.parametrize(
    ("before", "kind", "answer"),
    [
        (lambda bench: None, Grant, lambda bench, _: bench.confirm()),
        (Bench.revoke, Revoke, lambda bench, _: bench.progress(9, final=True)),
        (hand_over, Revoked, lambda bench, grant_id: bench.finished(grant_id=grant_id)),
        (expire, Revoked, lambda bench, grant_id: bench.finished(grant_id=grant_id)),
    ],
    ids=["grant", "revoke", "revoked", "loss"],
)
def test_the_lost_is_said_again_until_answered(
    before: Callable[[Bench], None], kind: type[Grant | Revoke | Revoked], answer: Callable[[Bench, int], None]
) -> None:
    bench = Bench()
    bench.joined()
    if kind is not Grant:
        bench.confirm()
    grant_id = bench.grant_id()
    before(bench)
    bench.sent.clear()
    bench.pass_time(3.2, BORROWER, OTHER)
    said = [message.grant_id for message in bench.received(kind, AGENT)]
    assert said in ([grant_id] * 2, [grant_id] * 3)
    answer(bench, grant_id)
    bench.sent.clear()
    bench.tick(bench.settings.resend_interval_s)
    assert bench.received(kind, AGENT) == []
    assert bench.leader.members.unconfirmed == {}


@pytest.mark.conforms("E8")
def test_a_leaver_is_done_when_that_is_durable() -> None:
    """Progress and a goodbye that are said again change nothing."""
    bench = granted(2)
    for _ in range(2):
        bench.progress(5)
    bench.settle()
    goodbye = bench.said(7), bench.said(6, 2)
    bench.sent.clear()
    for _ in range(2):
        bench.leave(*goodbye)
    assert bench.ends() == []
    bench.settle()
    assert set(bench.ends()) == {BorrowerEndReason.DONE}
    bench.leave(*goodbye)
    assert bench.ends() == [BorrowerEndReason.DONE]
    assert [(bench.row(s).position, bench.row(s).status) for s in (1, 2)] == [
        (7, LendingStatus.FREE), (6, LendingStatus.FREE),
    ]  # fmt: skip
    assert [line.event for line in bench.history() if line.stream_id] == ["grant"] * 2 + ["release"] * 2
    assert bench.forced() == []


def test_a_leaver_need_not_confirm() -> None:
    """While the end of another of its grants is still to be written."""
    bench = granted(2)
    bench.store.locked.add((1, 2))
    bench.leave(bench.said(7), bench.said(6, 2))
    bench.commit()
    assert bench.holders() == {2: BORROWER}
    assert bench.leader.members.unconfirmed == {}


@pytest.mark.conforms("E8", "E10")
@pytest.mark.parametrize(
    ("end", "reason"), [(Bench.leave, BorrowerEndReason.DONE), (Bench.evict, BorrowerEndReason.RETRY)]
)
def test_a_grant_under_way_to_one_that_is_over(end: Callable[[Bench], None], reason: BorrowerEndReason) -> None:
    """It goes back."""
    bench = unwritten()
    end(bench)
    bench.settle()
    assert (bench.row().status, bench.ends()) == (LendingStatus.FREE, [reason])
    assert bench.forced() == [], "nobody was ever notified of it"


@pytest.mark.parametrize("fail", [Bench.fail, Bench.commit])
def test_a_grant_that_is_not_written_is_retried(fail: Callable[[Bench], None]) -> None:
    """As the transaction failed, or its row was locked."""
    bench = unwritten()
    bench.store.locked.add((1, 1))
    fail(bench)
    assert [type(change) for change in bench.leader.pending_changes()] == [GrantStream]


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_grant_under_way_delays_the_next(is_locked: bool) -> None:
    """Its borrower has left meanwhile, and another waits."""
    bench = unwritten()
    if is_locked:
        bench.store.locked.add((1, 1))
    bench.leave()
    bench.join(OTHER)
    bench.debounce()
    assert [type(change) for change in bench.leader.pending_changes()] == [GrantStream]
    bench.commit()
    bench.store.locked.clear()
    bench.pass_time(1.0, OTHER)
    assert bench.holders() == {1: OTHER}


def test_progress_that_waits_is_replaced_by_newer_only() -> None:
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
@pytest.mark.parametrize("restarts", [False, True])
def test_a_revoke_said_again_is_forced_no_later(restarts: bool) -> None:
    """Nor where its holder starts again, and is revoked again."""
    bench = granted()
    first, holder = bench.grant_id(), BORROWER
    for turn in range(4):
        bench.revoke()
        if restarts and turn == 2:
            holder = "a/2"
            bench.join(holder, predecessor=BORROWER, reclaim=(bench.held(),))
            bench.settle()
            assert bench.received(Revoke)[-1].borrower_id == holder
        bench.pass_time(10.0, holder)
    assert bench.grant_id() > first
    assert bench.forced()


def test_an_evicted_borrowers_final_progress_counts() -> None:
    bench = granted()
    bench.revoke()
    bench.progress(5, final=True)
    bench.evict()
    assert [type(change) for change in bench.leader.pending_changes()] == [RecordHistory, ReleaseStream]
    bench.settle()
    assert (bench.row().position, bench.forced()) == (5, [])


def test_a_refused_grant_of_a_leaver_is_over() -> None:
    bench = unwritten()
    bench.leave()
    bench.change_row(status=LendingStatus.BLOCKED)
    bench.commit()
    bench.tick(bench.settings.resend_interval_s + 0.1)
    assert bench.entries == [], "there is no grant to end"


@pytest.mark.conforms("E10", "E33")
@pytest.mark.conforms("X4")
@pytest.mark.parametrize("left", [0, 1])
def test_the_silent_are_put_out_some_at_a_time(left: int) -> None:
    """However many they are: between two steps the other groups of the node go on."""
    bench = Bench()
    for number in range(SLICE_ITEMS + left):
        bench.join(f"{number}/1")
    bench.tick(bench.settings.eviction_timeout_s)
    assert (len(bench.leader.members), bench.wake_at == bench.now) == (left, left > 0)
    bench.tick()
    assert len(bench.leader.members) == 0


def test_an_evicted_borrower_needs_a_new_id() -> None:
    """Else it would take a grant for its own that was under way to it and is over."""
    bench = granted()
    bench.evict()
    bench.settle()
    bench.join(BORROWER)
    bench.settle()
    assert bench.received(Invalidate)[-1].reason is BorrowerEndReason.RETRY
    assert bench.received(LeaderConnectResponse)[1:] == []
    bench.join("a/2", predecessor=BORROWER)
    bench.settle()
    assert bench.received(LeaderConnectResponse)[-1].borrower_id == "a/2"


# --- trouble with the database ----------------------------------------------------------------------------------------


@pytest.mark.conforms("E32")
def test_a_locked_row_holds_nobody_up() -> None:
    bench = granted(2)
    bench.store.locked.add((1, 1))
    bench.progress(5, 1)
    for position in (6, 7):
        bench.save(position, 2)
        assert [(m.stream_id, m.position) for m in bench.received(ProgressSaved)] == [(2, position)]
    bench.pass_time(0.5, BORROWER)
    assert bench.row(1).position == 0
    bench.store.locked.clear()
    bench.pass_time(0.11, BORROWER)
    assert bench.row(1).position == 5


def test_what_was_not_written_is_written_again() -> None:
    bench = Bench()
    bench.joined()
    bench.progress(5)
    bench.fail()
    bench.progress(9)
    bench.pass_time(bench.settings.resend_interval_s + 0.1, BORROWER)
    assert bench.row().position == 9


@pytest.mark.parametrize("fails_first", [False, True])
@pytest.mark.conforms("E21")
def test_a_stream_finished_before_its_grant_is_dropped(fails_first: bool) -> None:
    """It holds its children back no longer."""
    bench = Bench()
    bench.streams.rollover(1)
    bench.give(StreamsChanged())
    bench.pass_time(bench.settings.rebalance_debounce_s)
    bench.join()
    bench.debounce()
    [grant], bench.entries = bench.entries, []
    assert isinstance(grant, GrantStream)
    if fails_first:
        bench.give(WritesNotCommitted(GroupWrites(bench.group.group_id, bench.term, (grant,))))
    bench.change_row(position=HEAD)
    bench.give(StreamsChanged())
    bench.debounce()
    bench.settle()
    assert bench.row().status is LendingStatus.FINISHED
    bench.leave()
    if not fails_first:
        bench.give(WritesNotCommitted(GroupWrites(bench.group.group_id, bench.term, (grant,))))
    bench.join(OTHER)
    bench.pass_time(bench.settings.resend_interval_s + 1.0, OTHER)
    assert bench.holders() == {2: OTHER}


@pytest.mark.parametrize("fails_first", [False, True])
def test_an_unwritten_grants_stream_goes_elsewhere(fails_first: bool) -> None:
    """Its borrower, which leaves, has nothing to wait for."""
    bench = unwritten()
    bench.join(OTHER)
    if fails_first:
        bench.fail()
    bench.leave()
    assert bench.ends() == [BorrowerEndReason.DONE]
    bench.debounce()
    if not fails_first:
        bench.fail()
    bench.pass_time(bench.settings.resend_interval_s + 0.1, OTHER)
    assert bench.holders() == {1: OTHER}
    assert [line.borrower_id for line in bench.history("grant")] == [OTHER]


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.conforms("E11")
def test_the_unwritten_comes_before_what_waited_for_it(busy: bool) -> None:
    """The holder is put out while its progress is not written yet: what it reported is not announced as repeated."""
    bench = granted()
    bench.progress(50)
    bench.evict()
    if busy:
        bench.store.locked.add((1, 1))
        bench.commit()
        bench.store.locked.clear()
    else:
        bench.fail()
    bench.pass_time(bench.settings.resend_interval_s + 1.0)
    assert [h.position for h in bench.forced()] == [50]


def test_a_refused_grant_is_tried_again() -> None:
    """Even while others join."""
    bench = Bench()
    bench.change_row(status=LendingStatus.BLOCKED)
    bench.join()
    bench.debounce()
    bench.join(OTHER)
    bench.change_row(status=LendingStatus.RESERVED)
    bench.commit()
    bench.change_row(status=LendingStatus.FREE)
    entry = bench.leader.streams.get(1)
    assert entry is not None
    entry.lending = bench.store.load(1, bench.term)[0]
    bench.pass_time(2.0, BORROWER, OTHER)
    assert bench.holders(), "not only when the balance is looked at anyway"


def test_a_deposed_leader_stops() -> None:
    bench = Bench()
    bench.joined()
    bench.progress(5)
    bench.store.release(bench.ref, {1: bench.term})
    bench.commit()
    assert bench.stopped == "stale_term"


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> list[AllocationInput]:
    """What the strategy is asked, each time."""
    inputs: list[AllocationInput] = []
    plan = EvenStrategy.plan

    def record(self: EvenStrategy, allocation_input: AllocationInput) -> AllocationPlan:
        inputs.append(allocation_input)
        return plan(self, allocation_input)

    monkeypatch.setattr(EvenStrategy, "plan", record)
    return inputs


def test_a_strategy_gets_no_home_that_leaves(inputs: list[AllocationInput]) -> None:
    """A stream's last holder is a place for it only if it may get streams."""
    bench = granted()
    bench.join(leaving=True)
    bench.save(7, final=True)
    bench.join(OTHER)
    bench.share(OTHER)
    assert (bench.holders(), [*inputs[-1].free_streams]) == ({1: OTHER}, [1])
    assert (dict(inputs[-1].last_holders), [*inputs[-1].weights]) == ({}, [OTHER])


def test_a_write_tried_again_is_no_time_to_share(inputs: list[AllocationInput]) -> None:
    """It is tried again ten times a second, and what has a holder is not free then."""
    bench = granted()
    bench.store.locked.add((1, 1))
    bench.progress(5)
    bench.commit()
    bench.now += 0.05
    bench.join(OTHER)
    inputs.clear()
    bench.pass_time(bench.settings.rebalance_debounce_s + 2.0, BORROWER, OTHER)
    assert len(inputs) == 1


# --- leader changes ---------------------------------------------------------------------------------------------------


@pytest.mark.conforms("E16")
def test_a_reclaim_keeps_the_grant_and_can_be_repeated() -> None:
    bench = Bench()
    bench.joined()
    bench.save(5)
    grant = bench.grant_id()
    bench.lead()
    for _ in range(2):
        bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(position=8),))
        bench.settle()
    assert [(g.borrower_id, g.grant_id, g.position) for g in bench.received(Grant)] == [("a/2", grant, 8)]
    assert (bench.row().grant_id, bench.row().borrower_id, bench.row().position) == (grant, "a/2", 8)


@pytest.mark.conforms("E16")
def test_a_new_leader_waits_until_the_grace_ends() -> None:
    bench = Bench()
    bench.joined()
    bench.save(5)
    bench.lead()
    bench.joined(OTHER)
    bench.pass_time(bench.settings.reclaim_grace_s - 0.3, OTHER)
    assert bench.holders() == {1: BORROWER}
    bench.pass_time(0.5, OTHER)
    assert bench.holders() == {1: OTHER}
    assert [h.position for h in bench.forced()] == [5]


@pytest.mark.conforms("E10", "E17")
def test_a_reclaim_of_what_is_not_its_own_is_lost() -> None:
    """Another agent's stream, or an old grant."""
    bench = granted(2)
    bench.lead()
    bench.join(OTHER, reclaim=(bench.held(1, 50), HeldGrant(99, 1, 1)))
    bench.join("a/2", predecessor=BORROWER, reclaim=(HeldGrant(2, bench.grant_id(2) - 1, 50),))
    bench.settle()
    lost = {(m.borrower_id, m.stream_id) for m in bench.received(Revoked) if m.reason is GrantEndOutcome.LOST}
    assert lost == {(OTHER, 1), (OTHER, 99), ("a/2", 2)}
    assert [bench.row(s).position for s in (1, 2)] == [0, 0]


@pytest.mark.conforms("E10")
def test_who_reports_an_old_grant_is_answered_at_once() -> None:
    """Also while the end of the holder's grant is written."""
    bench = granted()
    bench.join(OTHER)
    bench.progress(5, final=True)
    bench.sent.clear()
    bench.report(StreamProgress(1, bench.grant_id() - 1, 5), borrower_id=OTHER)
    assert [lost.borrower_id for lost in bench.received(Revoked)] == [OTHER]


@pytest.mark.conforms("E10")
def test_a_report_of_anothers_stream_ends_no_grant() -> None:
    """Who reports it has lost it: its holder has not."""
    bench = granted(2)
    bench.join(OTHER)
    bench.settle()
    stream = next(stream for stream, holder in bench.holders().items() if holder == BORROWER)
    bench.report(StreamProgress(stream, bench.grant_id(stream) - 1, 5), borrower_id=OTHER)
    (lost,) = (m for m in bench.received(Revoked) if m.reason is GrantEndOutcome.LOST)
    assert (lost.borrower_id, lost.stream_id) == (OTHER, stream)
    bench.report(StreamProgress(stream, bench.grant_id(stream), 5), borrower_id=BORROWER)
    bench.settle()
    assert bench.row(stream).position == 5
    assert bench.holders()[stream] == BORROWER


@pytest.mark.conforms("E10", "X4")
def test_what_is_lost_is_answered_in_slices() -> None:
    """A reclaim may name a hundred thousand grants: what is not answered at once is when its borrower reports it."""
    bench = granted(2)
    bench.lead()
    made_up = tuple(HeldGrant(number, 1, 1) for number in range(100, 100 + 3 * SLICE_ITEMS))
    bench.join("a/2", predecessor=BORROWER, reclaim=(*made_up, bench.held(1)))
    bench.settle()
    assert bench.holders()[1] == "a/2", "what it has is confirmed, wherever it is named"
    assert len(bench.received(Revoked)) == SLICE_ITEMS
    last = made_up[-1].stream_id
    bench.report(StreamProgress(last, 1, 1), borrower_id="a/2")
    assert [(m.stream_id, m.reason) for m in bench.received(Revoked)] == [(last, GrantEndOutcome.LOST)]


@pytest.mark.conforms("E16")
def test_a_reclaim_overtaken_by_another_stands() -> None:
    bench = granted()
    bench.lead()
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(),))
    bench.join("a/3", predecessor="a/2", reclaim=(bench.held(),))
    bench.settle()
    assert (bench.holders(), bench.forced()) == ({1: "a/3"}, [])


@pytest.mark.conforms("E16")
@pytest.mark.parametrize("written", [True, False])
def test_an_earlier_borrower_takes_nothing(written: bool) -> None:
    """Neither the one that the later replaced, nor one before, which this leader never received."""
    bench = Bench()
    bench.join(borrower_number=1)
    bench.share()
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
        assert bench.sent == [("a", Invalidate(f"a/{number}", 0, BorrowerEndReason.RETRY, detail))]
    bench.settle()
    assert bench.holders() == {1: "a/4"}
    bench.join("a/6", predecessor="a/5", reclaim=held, borrower_number=6)
    bench.settle()
    assert bench.holders() == {1: "a/6"}


@pytest.mark.conforms("E9")
def test_what_a_successor_does_not_name_goes_back() -> None:
    bench = Bench(shards=2)
    bench.joined()
    bench.progress(5, 1)
    bench.save(6, 2)
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(1, 5),))
    bench.settle()
    assert (bench.holders(), bench.row(2).position, bench.forced()) == ({1: "a/2"}, 6, [])


# --- the past, and strangers ------------------------------------------------------------------------------------------


@pytest.mark.conforms("E10", "E17")
def test_messages_of_another_grant_write_nothing() -> None:
    """Of one that is over, or was never given, or of another term."""
    bench = granted()
    for grant_id in (0, bench.grant_id() - 1, bench.grant_id() + 1, MAX_OFFSET):
        for last in (False, True):
            bench.report(StreamProgress(1, grant_id, 50, last))
            assert [(m.grant_id, m.reason) for m in bench.received(Revoked)] == [(grant_id, GrantEndOutcome.LOST)]
        bench.finished(grant_id=grant_id)
    for term in (0, bench.term - 1, bench.term + 1, MAX_OFFSET):
        bench.receive(UpdateProgress(BORROWER, term, (bench.said(50),)))
        assert bench.ends() == [BorrowerEndReason.RETRY]
    assert bench.entries == []
    bench.leave(StreamProgress(1, bench.grant_id() - 1, 50, True))
    assert bench.entries == [ReleaseStream(1, bench.grant_id(), 0, "its borrower does not have it")]


@pytest.mark.conforms("E11")
@pytest.mark.parametrize(
    ("kind", "reason"),
    [(UpdateProgress, "handed back by its borrower"), (Disconnect, "left in the middle of a batch")],
)
def test_what_was_given_up_is_written(
    kind: Callable[[str, int, tuple[StreamProgress, ...]], ToLeader], reason: str
) -> None:
    bench = granted()
    grant_id = bench.grant_id()
    bench.receive(kind(BORROWER, bench.term, (StreamProgress(1, grant_id, 50, True, delivered_end=60),)))
    assert bench.entries == [ReleaseStream(1, grant_id, 50, reason, 0.0, 60)]


@pytest.mark.conforms("E11", "E16")
def test_nobody_learns_of_a_loss_before_it_is_written() -> None:
    """Else he drops the stream with what he has not reported, and a leader who never wrote it is followed by one to
    whom the grant is in force."""
    bench = granted()
    held, word = bench.held(position=5), StreamProgress(1, bench.grant_id(), 5)
    bench.evict()
    bench.sent.clear()
    bench.join("a/2", predecessor=BORROWER, reclaim=(held,))
    bench.report(word, borrower_id="a/2")
    assert bench.losses() == []
    bench.settle()
    bench.report(word, borrower_id="a/2")
    assert bench.losses() == [GrantEndOutcome.LOST]


@pytest.mark.conforms("E10")
def test_a_loss_is_sent_while_a_revoke_is_recorded() -> None:
    """A stream sync finds it while an operator's revoke is recorded."""
    bench = granted()
    lose_messages(bench)
    writes = GroupWrites(bench.group.group_id, bench.term, (), needs_stream_sync=True)
    answer = WritesCommitted(bench.store.commit([writes])[0])
    bench.revoke()
    bench.sent.clear()
    bench.give(answer)
    assert bench.losses() == [GrantEndOutcome.LOST]


@pytest.mark.conforms("E11")
def test_a_forced_revoke_is_sent_when_it_is_written() -> None:
    bench = granted()
    bench.revoke()
    bench.settle()
    while not any(isinstance(entry, ForceRelease) for entry in bench.entries):
        bench.leader.members.get(BORROWER).last_message_at = bench.now  # type: ignore[union-attr]
        bench.tick(1.0)
        assert bench.losses() == []
    bench.settle()
    assert bench.losses() == [GrantEndOutcome.LOST]


@pytest.mark.conforms("E10")
@pytest.mark.parametrize("last", [False, True])
def test_nobody_can_speak_of_an_unwritten_grant(last: bool) -> None:
    bench = unwritten()
    bench.report(StreamProgress(1, 0, 5, last))
    bench.finished(grant_id=0)
    assert [type(change) for change in bench.leader.pending_changes()] == [GrantStream]
    bench.settle()
    bench.confirm()
    assert (bench.holders(), bench.row().position) == ({1: BORROWER}, 0)


@pytest.mark.conforms("E10", "X4", "X5")
def test_no_agent_reports_for_anothers_borrower() -> None:
    bench = granted()
    before = bench.row()
    for message in (
        UpdateProgress(BORROWER, bench.term, (bench.said(50),)),
        Disconnect(BORROWER, bench.term, (bench.said(50),)),
        Disconnect(BORROWER, 0, ()),
        Ping((BORROWER,), 1.0),
    ):
        bench.receive(message, agent="evil")
        assert {to for to, _ in bench.sent} == {"evil"}
        assert bench.ends()[0] in (BorrowerEndReason.RETRY, BorrowerEndReason.DONE)
    bench.join(BORROWER, agent="evil", reclaim=(bench.held(1, 50),))
    assert [to for to, m in bench.sent if isinstance(m, Invalidate)] == ["evil"]
    bench.settle()
    assert bench.row() == before
    assert len(bench.leader.members) == 1


@pytest.mark.conforms("E10", "X5")
def test_no_agent_succeeds_anothers_borrower() -> None:
    """Neither by naming it, nor by its grant; and its reports do not count."""
    bench = granted()
    bench.join(OTHER, predecessor=BORROWER, reclaim=(bench.held(1, 50),), borrower_number=9)
    for size in (0, 1000):
        bench.now += 0.1
        bench.progress(0, borrower_id=OTHER, size=size)
    bench.settle()
    assert {member.borrower_id for member in bench.leader.members} == {BORROWER, OTHER}
    assert (bench.holders(), bench.row().position) == ({1: BORROWER}, 0)
    assert [entry.meter.load() for entry in bench.leader.streams] == [None]


@pytest.mark.conforms("E10")
def test_a_late_request_brings_nobody_back() -> None:
    """Neither one that was replaced nor one that left."""
    bench = granted()
    bench.join(BORROWER)
    assert bench.ends() == [], "it is a member"
    bench.join("a/2", predecessor=BORROWER, reclaim=(bench.held(),))
    bench.settle()
    bench.sent.clear()
    bench.join(BORROWER, reclaim=(bench.held(),))
    assert bench.ends() == [BorrowerEndReason.RETRY]
    bench.leave(bench.said(3), borrower_id="a/2")
    bench.settle()
    bench.sent.clear()
    bench.join("a/2")
    assert bench.ends() == [BorrowerEndReason.DONE]
    assert len(bench.leader.members) == 0


def test_a_leader_with_nobody_left_stops_in_time() -> None:
    bench = granted()
    bench.pass_time(100.0, BORROWER)
    assert bench.stopped is None
    bench.leave(bench.said(1))
    bench.settle()
    bench.pass_time(bench.settings.leader_idle_timeout_s - 1)
    assert bench.stopped is None
    bench.pass_time(2.0)
    assert bench.stopped == "idle"


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_leader_with_something_to_write_goes_on(is_locked: bool) -> None:
    bench = granted()
    bench.evict()
    if is_locked:
        bench.store.locked.add((1, 1))
    for _ in range(round(bench.settings.leader_idle_timeout_s / 0.05) + 20):
        bench.tick(0.05)
        if is_locked and bench.entries:
            bench.commit()
    assert (bench.stopped, len(bench.leader.members)) == (None, 0)


def test_those_that_left_are_forgotten_in_time() -> None:
    bench = Bench()
    for number in range(1, 50):
        bench.join(f"a/{number}", predecessor=f"a/{number - 1}")
    bench.leave(borrower_id="a/49")
    bench.tick(bench.settings.eviction_timeout_s)
    assert bench.leader.knows_borrower("a/1")
    assert bench.leader.knows_borrower("a/49")
    bench.pass_time(bench.settings.resend_interval_s)
    assert not bench.leader.knows_borrower("a/1")
    assert not bench.leader.knows_borrower("a/49")
    assert bench.leader.members.unconfirmed == {}


# --- atomic groups --------------------------------------------------------------------------------------------------

ATOMIC = GroupOptions(StartingPosition.EARLIEST, atomic=True)
BEFORE_8 = LowerFrontier(((8,),))


@pytest.mark.conforms("S8")
def test_members_receive_how_far_an_atomic_group_is() -> None:
    """By their grants; and once progress is written its frontier is looked at, and what is found reported at once."""
    bench = Bench(options=ATOMIC)
    bench.streams.lowers[1] = BEFORE_8
    bench.joined()
    assert [grant.consumed for grant in bench.received(Grant)] == [ConsumedFrontier(0)]
    bench.confirm()
    bench.receive(Ping((BORROWER,), sent_at=17.0))
    bench.pass_time(1.0, BORROWER)
    bench.sent.clear()
    consumed = ConsumedFrontier(HEAD, BEFORE_8)
    bench.progress(HEAD, consumed=consumed)
    bench.commit()
    assert bench.renew
    assert [(saved.position, saved.consumed) for saved in bench.received(ProgressSaved)] == [(HEAD, consumed)]
    bench.settle()
    (answer,) = bench.received(PingResponse)
    assert answer.epochs == (GroupFrontier("default", 1, BEFORE_8, BEFORE_8),)
    assert answer.sent_at == 17.0, "the answer to the last ping: nobody is trusted for longer"
    bench.pass_time(bench.settings.stream_sync_interval_s, BORROWER)
    assert bench.received(PingResponse) == [], "it has not moved"
    bench.receive(Ping((BORROWER,), sent_at=18.0))
    assert [each.epochs for each in bench.received(PingResponse)] == [answer.epochs]


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_sync_that_fails_is_soon_made_again(is_busy: bool) -> None:
    bench = Bench()
    lost = GroupWrites(bench.group.group_id, bench.term, needs_stream_sync=True)
    bench.give(WritesCommitted(make_busy_result(lost)) if is_busy else WritesNotCommitted(lost))
    bench.tick(bench.settings.resend_interval_s)
    assert bench.renew


def test_only_written_progress_causes_a_sync() -> None:
    bench = Bench(options=ATOMIC)
    bench.joined()
    bench.confirm()
    bench.pass_time(1.0, BORROWER)
    for refused in (False, True):
        if refused:
            bench.change_row(grant_id=bench.grant_id() + 1, status=LendingStatus.FREE, borrower_id=None, agent=None)
            bench.report(StreamProgress(1, bench.grant_id() - 1, 5))
        else:
            bench.revoke()
        bench.commit()
        bench.tick(bench.settings.rebalance_debounce_s)
        assert not bench.renew


def test_frontiers_are_announced_in_slices() -> None:
    """Who has waited longest comes first, also where they move on meanwhile, and is sent the last ones alone."""
    bench = Bench(options=ATOMIC)
    borrower_ids = [f"a/{number}" for number in range(2 * SLICE_ITEMS + 1)]
    bench.joined(*borrower_ids)
    bench.receive(Ping(tuple(borrower_ids), sent_at=17.0))
    bench.sent.clear()

    def announce(epoch: int) -> list[str]:
        frontier = GroupFrontier("default", 1, LowerFrontier(((epoch,),)), BEFORE_8)
        result = GroupWriteResult(bench.group.group_id, False, epochs=(frontier,))
        bench.give(WritesCommitted(result))
        return answered(epoch)

    def answered(epoch: int) -> list[str]:
        answers = bench.received(PingResponse)
        assert {answer.epochs[0].consumed.least for answer in answers} <= {((epoch,),)}
        return [answer.borrower_id for answer in answers]

    assert announce(5) == borrower_ids[:SLICE_ITEMS]
    assert announce(6) == borrower_ids[SLICE_ITEMS:-1]
    bench.receive(Ping((borrower_ids[-1],), sent_at=18.0))
    assert answered(6) == borrower_ids[-1:]
    gone = borrower_ids[1]
    bench.leave(borrower_id=gone)
    bench.sent.clear()
    bench.tick(bench.wake_at - bench.now)
    assert answered(6) == [each for each in borrower_ids[:SLICE_ITEMS] if each != gone], "which have those from before"
    bench.pass_time(0.1, *borrower_ids)
    assert answered(6) == []


def test_what_ends_holders_blocks_its_stream_alone() -> None:
    """A process that ends as soon as it has that stream, before it reports anything of others, is started again."""
    bench, life = Bench(8), 0
    while bench.row(3).status is not LendingStatus.BLOCKED:
        life += 1
        borrower_id = f"a{life}/1"
        bench.join(borrower_id)
        bench.share(borrower_id)
        while bench.row(3).status is LendingStatus.FREE:
            for stream_id in bench.streams_of(borrower_id):
                bench.save(bench.row(stream_id).position + 1, stream_id, borrower_id=borrower_id)
            bench.share(borrower_id)
        bench.evict()
        bench.pass_time(60.0)
    blocked = {row.stream_id for row in bench.store.rows(1).values() if row.status is LendingStatus.BLOCKED}
    assert blocked == {3}


@pytest.mark.parametrize(("moves", "waited_s", "held"), [(False, 0.0, 1), (True, 0.0, 4), (False, ISOLATION_S, 2)])
def test_a_borrower_has_one_suspect_at_a_time(moves: bool, waited_s: float, held: int) -> None:
    """Until that moves on; or another one each time that it had long enough to end its holder."""
    bench = Bench(4)
    for stream_id in bench.streams.streams:
        bench.change_row(stream_id, losses=SUSPECT_LOSSES, lost_position=0)
    bench.lead()
    bench.join()
    bench.share(BORROWER)
    assert len(bench.holders()) == 1
    for _ in range(4 * moves):
        for stream_id in bench.holders():
            bench.save(bench.row(stream_id).position + 1, stream_id)
        bench.share(BORROWER)
    bench.pass_time(waited_s + 2 * bench.settings.rebalance_debounce_s, BORROWER)
    assert len(bench.holders()) == held


def test_each_borrower_has_a_suspect_and_all_others() -> None:
    bench = Bench(4)
    for stream_id in (1, 2, 3):
        bench.change_row(stream_id, losses=SUSPECT_LOSSES, lost_position=0)
    bench.change_row(4, losses=SUSPECT_LOSSES - 1, lost_position=0)
    bench.lead()
    bench.join()
    bench.join(OTHER)
    bench.share(BORROWER, OTHER)
    assert sorted(len(bench.streams_of(each) - {4}) for each in (BORROWER, OTHER)) == [1, 1]
    assert 4 in bench.holders()


def test_what_is_in_doubt_comes_back_together() -> None:
    bench = Bench(2)
    for stream_id in (1, 2):
        bench.change_row(
            stream_id,
            status=LendingStatus.RESERVED,
            session="red",
            held_until_us=EPOCH_US + 10**9,
            in_doubt=InDoubtRange(1, 0, 5, 60.0),
            losses=SUSPECT_LOSSES,
            lost_position=0,
        )
    bench.lead()
    bench.named(BORROWER, "red")
    assert bench.streams_of(BORROWER) == {1, 2}
