"""Sessions with a stable name: the newer process fences the older, and what was held waits for its return."""

from __future__ import annotations

from typing import Any

import pytest

from sublet_leader.allocation import StreamLoad
from sublet_leader.group.throughput import HALF_LIFE_S, ThroughputMeter
from sublet_protocol.messages.borrower_leader import (
    Grant,
    Invalidate,
    InvalidateReason,
    Revoke,
    Revoked,
    StreamProgress,
    UpdateProgress,
)
from sublet_storage.groups.model.lending_row import LendingRow
from sublet_storage.groups.model.records import GroupOptions, LendingStatus, StartingPosition
from tests.unit.leader_bench import Bench

EXPIRY_S = 60.0
STABLE = GroupOptions(StartingPosition.EARLIEST, session_expiry_s=EXPIRY_S)


def named(bench: Bench, borrower_id: str, name: str = "worker", epoch: int = 1) -> None:
    """A process of that name joins and gets what there is for it."""
    bench.join(borrower_id, session=name, session_epoch=epoch)
    bench.pass_time(bench.settings.rebalance_debounce_s + 0.01)
    bench.confirm()


def leave(bench: Bench, borrower_id: str) -> None:
    """It hands over everything where it stands."""
    said = [bench.said(r.position, r.stream_id) for r in rows(bench) if r.borrower_id == borrower_id]
    bench.leave(*said, borrower_id=borrower_id)
    bench.settle()


def rows(bench: Bench) -> list[LendingRow]:
    return list(bench.store.rows(bench.group.group_id).values())


def test_a_named_session_that_returns_in_time_gets_its_own_streams_back() -> None:
    bench = Bench(4, options=STABLE)
    named(bench, "a/1", "one")
    named(bench, "b/1", "two", 2)
    bench.pass_time(bench.settings.min_grant_duration_s + 1, "a/1", "b/1")
    own = {stream for stream, holder in bench.holders().items() if holder == "a/1"}
    leave(bench, "a/1")
    bench.pass_time(EXPIRY_S / 2, "b/1")
    assert own.isdisjoint(bench.holders()), "kept, although another member could take them"
    named(bench, "c/1", "one", 3)
    assert {stream for stream, holder in bench.holders().items() if holder == "c/1"} == own


def test_what_is_kept_is_given_away_when_its_time_is_over() -> None:
    bench = Bench(2, options=STABLE)
    named(bench, "a/1", "one")
    leave(bench, "a/1")
    named(bench, "b/1", "two", 2)
    bench.pass_time(EXPIRY_S - 2, "b/1")
    assert bench.holders() == {}
    bench.pass_time(3, "b/1")
    assert bench.holders() == {1: "b/1", 2: "b/1"}


def test_a_stream_taken_from_a_session_that_stays_is_not_kept_for_it() -> None:
    bench = Bench(2, options=STABLE)
    named(bench, "a/1", "one")
    assert set(bench.holders().values()) == {"a/1"}
    named(bench, "b/1", "two", 2)
    bench.pass_time(bench.settings.min_grant_duration_s + 1, "a/1", "b/1")
    (revoke,) = bench.received(Revoke)
    bench.progress(3, revoke.stream_id, final=True, borrower_id="a/1")
    bench.settle()
    bench.pass_time(bench.settings.rebalance_debounce_s + 0.01, "a/1", "b/1")
    assert set(bench.holders().values()) == {"a/1", "b/1"}, "else it would go back for ever"


def test_what_was_being_granted_to_a_session_that_is_lost_is_kept_again() -> None:
    bench = Bench(1, options=STABLE)
    named(bench, "a/1", "one")
    leave(bench, "a/1")
    bench.join("a/2", session="one", session_epoch=2)
    bench.tick(bench.settings.rebalance_debounce_s + 0.01)
    assert [type(entry).__name__ for entry in bench.entries] == ["GrantStream"]
    bench.tick(bench.settings.eviction_timeout_s + 1)
    bench.settle()
    assert bench.holders() == {}
    named(bench, "b/1", "two", 3)
    assert bench.holders() == {}, "it waits for the session's next return"


def test_history_says_why_a_grant_ended_and_not_why_it_began() -> None:
    bench = Bench(2)
    bench.joined("a/1")
    bench.confirm()
    bench.leave(bench.said(5, 1), borrower_id="a/1")
    bench.settle()
    ends = {
        line.stream_id: line.reason for line in bench.store.history(bench.group.group_id) if line.event == "release"
    }
    assert ends == {1: "its borrower left", 2: "its borrower does not have it"}


def test_a_successor_of_the_leader_keeps_it_too() -> None:
    bench = Bench(2, options=STABLE)
    named(bench, "a/1", "one")
    leave(bench, "a/1")
    bench.lead()
    named(bench, "b/1", "two", 2)
    assert bench.holders() == {}
    named(bench, "a/2", "one", 3)
    assert set(bench.holders().values()) == {"a/2"}


def test_nothing_is_kept_for_the_nameless_nor_where_the_group_does_not_ask_for_it() -> None:
    cases: list[tuple[GroupOptions | None, dict[str, Any]]] = [
        (STABLE, {}),
        (None, {"session": "one", "session_epoch": 1}),
    ]
    for options, wanted in cases:
        bench = Bench(1, options=options)
        bench.join("a/1", **wanted)
        bench.pass_time(bench.settings.rebalance_debounce_s + 0.01)
        bench.confirm()
        leave(bench, "a/1")
        bench.joined("b/1")
        assert bench.holders() == {1: "b/1"}


@pytest.mark.conforms("E30")
def test_the_newer_process_of_a_name_fences_the_older_at_once_and_has_its_streams() -> None:
    bench = Bench(3)
    named(bench, "a/1", epoch=1)
    bench.progress(7, borrower_id="a/1")
    bench.settle()
    bench.sent.clear()
    bench.join("b/1", session="worker", session_epoch=2)
    ends = bench.received(Invalidate)
    assert [(end.borrower_id, end.reason) for end in ends] == [("a/1", InvalidateReason.FENCED)]
    bench.settle()
    bench.pass_time(bench.settings.rebalance_debounce_s + 0.01, "b/1")
    grants = bench.received(Grant)
    assert {(g.borrower_id, g.stream_id, g.position) for g in grants} == {("b/1", 1, 7), ("b/1", 2, 0), ("b/1", 3, 0)}
    forced = [line for line in bench.store.history(bench.group.group_id) if line.is_forced]
    assert [(line.stream_id, line.position, line.redelivery_end) for line in forced] == [
        (1, 7, 100),
        (2, 0, 100),
        (3, 0, 100),
    ]


@pytest.mark.conforms("E30")
def test_the_older_process_of_a_name_never_comes_back() -> None:
    bench = Bench(2)
    named(bench, "a/1", epoch=1)
    named(bench, "b/1", epoch=2)
    for borrower_id in ("a/2", "a/3"):
        bench.sent.clear()
        bench.join(borrower_id, session="worker", session_epoch=1)
        assert [end.reason for end in bench.received(Invalidate)] == [InvalidateReason.FENCED]
    bench.lead()
    bench.join("a/4", session="worker", session_epoch=1, reclaim=())
    assert [end.reason for end in bench.received(Invalidate)] == [InvalidateReason.FENCED], (
        "the rows tell the next leader"
    )
    named(bench, "b/2", epoch=2)
    assert bench.leader.members.get("b/2") is not None


@pytest.mark.conforms("E30")
def test_the_older_does_not_come_back_when_the_newer_has_left_and_others_have_its_streams() -> None:
    bench = Bench(2)
    named(bench, "a/1", epoch=1)
    named(bench, "b/1", epoch=2)
    leave(bench, "b/1")
    named(bench, "c/1", "another", epoch=3)
    assert bench.holders() == {1: "c/1", 2: "c/1"}
    bench.sent.clear()
    bench.join("a/2", session="worker", session_epoch=1)
    assert [end.reason for end in bench.received(Invalidate)] == [InvalidateReason.FENCED]
    named(bench, "b/2", epoch=2)
    assert bench.leader.members.get("b/2") is not None, "the newer itself may"


@pytest.mark.conforms("X4")
def test_of_too_many_names_the_one_let_in_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet_leader.group.session_fencing.MAX_REMEMBERED", 2)
    bench = Bench()
    for name in ("one", "two", "one", "three"):
        bench.join(f"{name}/1", session=name, session_epoch=5)
        leave(bench, f"{name}/1")
    bench.sent.clear()
    for name in ("one", "two", "three"):
        bench.join(f"{name}/2", session=name, session_epoch=4)
    fenced = [(end.borrower_id, end.reason) for end in bench.received(Invalidate)]
    assert fenced == [("one/2", InvalidateReason.FENCED), ("three/2", InvalidateReason.FENCED)]


@pytest.mark.conforms("E30", "E10")
def test_what_a_fenced_process_says_changes_nothing() -> None:
    bench = Bench()
    named(bench, "a/1", epoch=1)
    grant_id = bench.grant_id()
    named(bench, "b/1", epoch=2)
    before = bench.row()
    bench.receive(UpdateProgress("a/1", bench.term, (StreamProgress(1, grant_id, 50, True),)), "a")
    bench.settle()
    assert bench.row() == before


@pytest.mark.conforms("E34")
def test_the_successor_of_a_leader_takes_the_older_processs_streams_when_what_that_was_promised_is_over() -> None:
    bench = Bench(2)
    named(bench, "a/1", epoch=1)
    bench.lead()
    led_at = bench.now
    named(bench, "b/1", epoch=2)
    assert bench.holders() == {1: "a/1", 2: "a/1"}, "the leader before may have answered its ping"
    bench.pass_time(led_at + bench.settings.promise_s - bench.now + 1, "b/1")
    assert bench.holders() == {1: "b/1", 2: "b/1"}


def test_two_borrowers_of_one_process_do_not_fence_each_other() -> None:
    bench = Bench(2)
    named(bench, "a/1", epoch=1)
    bench.sent.clear()
    named(bench, "a/2", epoch=1)
    assert [m.reason for m in bench.received(Invalidate)] == []
    assert bench.leader.members.get("a/1") is not None


def test_a_borrower_that_succeeds_another_of_its_process_reclaims_under_the_name() -> None:
    bench = Bench(2, options=STABLE)
    named(bench, "a/1", epoch=1)
    held = tuple(bench.held(stream) for stream in (1, 2))
    bench.lead()
    bench.join("a/2", session="worker", session_epoch=1, reclaim=held)
    bench.settle()
    bench.confirm()
    assert bench.holders() == {1: "a/2", 2: "a/2"}
    assert all(line.event != "force_release" for line in bench.store.history(bench.group.group_id))


# --- the strategy, and what is recorded -------------------------------------------------------------------------------


def test_an_unknown_strategy_is_told_and_does_not_stop_the_group() -> None:
    bench = Bench(2, options=GroupOptions(StartingPosition.EARLIEST, strategy="astrology"))
    bench.joined("a/1")
    assert bench.holders() == {1: "a/1", 2: "a/1"}
    assert any("astrology" in story and "even" in story for story in bench.stories)


def test_a_strategy_that_breaks_its_rules_is_replaced_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def plan(self, situation: object) -> object:
            raise ZeroDivisionError("of the moon")

    monkeypatch.setattr("sublet_leader.group.rebalancer.load_strategy", lambda name: Broken())
    bench = Bench(2)
    bench.joined("a/1", "b/1")
    assert sorted(bench.holders().values(), key=str) == ["a/1", "b/1"]
    assert [story for story in bench.stories if "ZeroDivisionError: of the moon" in story]


def test_a_stream_that_comes_free_goes_back_to_the_process_that_had_it() -> None:
    bench = Bench(4)
    bench.joined("a/1", "b/1")
    bench.confirm()
    own = {stream for stream, holder in bench.holders().items() if holder == "b/1"}
    leave(bench, "b/1")
    bench.join("b/2")
    bench.pass_time(bench.settings.rebalance_debounce_s + 0.01, "a/1", "b/2")
    bench.confirm()
    assert {stream for stream, holder in bench.holders().items() if holder == "b/2"} == own


@pytest.mark.conforms("E11")
def test_a_revoke_is_recorded_when_it_is_decided_with_its_reason() -> None:
    bench = Bench()
    bench.joined("a/1")
    bench.confirm()
    bench.revoke()
    bench.revoke()
    bench.settle()
    events = [(line.event, line.reason) for line in bench.store.history(bench.group.group_id)]
    assert events[-1] == ("revoke", "operator")
    assert [name for name, _ in events].count("revoke") == 1
    bench.progress(5, final=True, borrower_id="a/1")
    bench.settle()
    assert bench.row().status in (LendingStatus.FREE, LendingStatus.HELD)
    assert bench.received(Revoked)


def test_what_holders_report_of_size_and_lag_reaches_the_strategy() -> None:
    bench = Bench(2, options=GroupOptions(StartingPosition.EARLIEST, strategy="load"))
    bench.joined("a/1")
    bench.confirm()
    for second in range(1, 6):
        bench.pass_time(1.0, "a/1")
        reported = (
            StreamProgress(1, bench.grant_id(1), second, size=1000 * second, lag=95 - second),
            StreamProgress(2, bench.grant_id(2), second, size=10 * second, lag=None),
        )
        bench.receive(UpdateProgress("a/1", bench.term, reported), "a")
        bench.settle()
    loads = [entry.meter.load() for entry in bench.leader.streams]
    assert [(round(load.bytes_per_s), load.lag) for load in loads if load] == [(1000, 90), (10, -1)]


def test_a_meter_goes_on_under_the_next_grant_and_forgets_slowly() -> None:
    meter = ThroughputMeter()
    meter.record(1, 0, None, 0.0)
    assert meter.load() is None
    meter.record(1, 500, 7, 1.0)
    meter.record(2, 0, None, 2.0)
    assert meter.load() == StreamLoad(500.0, 7), "a new holder begins to count at nothing, and that is no pause"
    meter.record(2, 0, 3, 2.0 + HALF_LIFE_S)
    found = meter.load()
    assert found is not None
    assert (round(found.bytes_per_s), found.lag) == (250, 3)


@pytest.mark.conforms("E30")
def test_a_grant_that_waits_for_a_lock_is_not_tried_again_for_an_older_process() -> None:
    bench = Bench()
    bench.store.locked.add((1, 1))
    bench.join("a/1", session="worker", session_epoch=1)
    bench.tick(bench.settings.rebalance_debounce_s)
    bench.commit()
    bench.join("b/1", session="worker", session_epoch=2)
    bench.pass_time(1.0, "b/1")
    bench.store.locked.clear()
    bench.pass_time(2.0, "b/1")
    assert bench.holders() == {1: "b/1"}
    grants = [line.borrower_id for line in bench.store.history(bench.group.group_id) if line.event == "grant"]
    assert grants == ["b/1"]


@pytest.mark.conforms("E30")
@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("fails_first", [False, True])
def test_a_grant_that_was_not_written_is_not_tried_again_for_an_older_process(
    fails_first: bool, is_replaced: bool
) -> None:
    bench = Bench(2)
    bench.join("a/1", session="worker", session_epoch=1)
    bench.tick(bench.settings.rebalance_debounce_s)
    assert len(bench.entries) == 2
    if fails_first:
        bench.fail()
    if is_replaced:
        bench.join("a/2", session="worker", session_epoch=1, predecessor="a/1", borrower_number=2)
    bench.join("b/1", session="worker", session_epoch=2)
    if not fails_first:
        bench.fail()
    bench.pass_time(bench.settings.resend_interval_s + 1.0, "b/1")
    assert bench.holders() == {1: "b/1", 2: "b/1"}
    grants = {line.borrower_id for line in bench.store.history(bench.group.group_id) if line.event == "grant"}
    assert grants == {"b/1"}


@pytest.mark.conforms("X4")
def test_of_names_that_have_gone_a_leader_keeps_nothing() -> None:
    bench = Bench(1)
    for number in range(1, 20):
        named(bench, f"a/{number}", f"name {number}", number)
        leave(bench, f"a/{number}")
    assert len(bench.leader.streams._by_session) <= 1
