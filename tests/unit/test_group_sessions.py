"""Sessions with a stable name: the newer process fences the older, and what was held waits for its return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from sublet_leader.allocation import AllocationPlan, EvenStrategy, StreamLoad
from sublet_leader.group.events import MemberRightRevoked
from sublet_leader.group.throughput import HALF_LIFE_S, ThroughputMeter
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.messages.borrower_leader import (
    BorrowerEndReason,
    Grant,
    Invalidate,
    Ping,
    Revoke,
    StreamProgress,
)
from sublet_storage.groups.model.records import ForceRelease, GrantStream, GroupOptions, LendingStatus, StartingPosition
from tests.unit.leader_bench import HOLD_S, Bench, granted, unwritten

STABLE = GroupOptions(StartingPosition.EARLIEST, session_expiry_s=HOLD_S)


def unshared() -> Bench:
    """Nobody has had the stream."""
    return Bench(options=STABLE)


def left() -> Bench:
    """A session has left, in a group that reserves its stream for its return."""
    bench = Bench(options=STABLE)
    bench.named("a/1", "etl")
    bench.hand_over("a/1")
    return bench


def lost() -> Bench:
    """A session has planned and was lost, which reserves its stream in any group."""
    bench = Bench()
    bench.named("a/1", "etl")
    bench.plan()
    bench.settle()
    bench.pass_time(bench.settings.eviction_timeout_s + 1)
    assert bench.row().status is LendingStatus.RESERVED
    return bench


def lose_its_right(bench: Bench, borrower_id: str) -> None:
    bench.give(MemberRightRevoked(borrower_id, "not any more"))


RESERVED = pytest.mark.parametrize("reserve", [left, lost])


@pytest.mark.conforms("E26", "E27")
@RESERVED
@pytest.mark.parametrize("is_led_anew", [False, True])
@pytest.mark.parametrize("after_s", [0.0, HOLD_S / 2])
def test_one_that_returns_in_time_gets_its_own_back(
    reserve: Callable[[], Bench], is_led_anew: bool, after_s: float
) -> None:
    """With what it had planned; at once also of a new leader, as who has left begins no more calls."""
    bench = reserve()
    before = bench.row()
    if is_led_anew:
        bench.lead()
    bench.named("b/1", "other")
    bench.pass_time(after_s, "b/1")
    assert bench.holders() == {}, "kept, although another member could take it"
    bench.sent.clear()
    bench.named("c/1", "etl", 2)
    (grant,) = bench.received(Grant)
    assert (grant.borrower_id, grant.position, grant.in_doubt) == ("c/1", before.position, before.in_doubt)
    assert grant.grant_id > before.grant_id


@pytest.mark.conforms("E26")
@RESERVED
@pytest.mark.parametrize("is_led_anew", [False, True])
@pytest.mark.parametrize("set_back_s", [0, 3600])
def test_what_is_reserved_is_given_away_in_time(
    reserve: Callable[[], Bench], set_back_s: int, is_led_anew: bool
) -> None:
    """A successor of the leader keeps it as long, by its own clock if the database's was set back."""
    bench = reserve()
    before = bench.row()
    assert before.held_until_us is not None
    bench.change_row(held_until_us=before.held_until_us + set_back_s * 1_000_000)
    bench.streams.rollover(1)
    if is_led_anew:
        bench.lead()
    bench.named("b/1", "other")
    bench.pass_time(HOLD_S - 2, "b/1")
    assert bench.holders() == {}
    bench.pass_time(3, "b/1")
    assert bench.holders() == {1: "b/1"}
    assert {(grant.position, grant.in_doubt) for grant in bench.received(Grant, "b")} == {(before.position, None)}


@RESERVED
def test_what_was_being_granted_stays_reserved(reserve: Callable[[], Bench]) -> None:
    """Its session was lost meanwhile: it waits for the session's next return."""
    bench = reserve()
    before = bench.row()
    bench.join("a/2", session="etl", session_epoch=2)
    bench.debounce()
    assert [type(entry).__name__ for entry in bench.entries] == ["GrantStream"]
    bench.evict()
    bench.settle()
    bench.named("b/1", "other", 3)
    assert (bench.holders(), bench.row().status, bench.row().in_doubt) == ({}, before.status, before.in_doubt)


@pytest.mark.conforms("E20", "E26")
@pytest.mark.parametrize(
    ("make", "goes"), [(unshared, Bench.leave), (unshared, lose_its_right), (left, lose_its_right)]
)
def test_a_grant_under_way_reserves_nothing(make: Callable[[], Bench], goes: Callable[..., None]) -> None:
    """Its session goes while it is written, and had not had the stream before, or may not come back."""
    bench = make()
    bench.join("a/2", session="etl", session_epoch=2)
    bench.debounce()
    goes(bench, borrower_id="a/2")
    bench.settle()
    bench.named("b/1", "other", 3)
    assert bench.holders() == {1: "b/1"}


def test_what_is_taken_from_one_that_stays_is_free() -> None:
    bench = Bench(2, options=STABLE)
    bench.named("a/1", "one")
    assert set(bench.holders().values()) == {"a/1"}
    bench.named("b/1", "two", 2)
    bench.pass_time(bench.settings.min_grant_duration_s + 1, "a/1", "b/1")
    (revoke,) = bench.received(Revoke)
    bench.save(3, revoke.stream_id, final=True, borrower_id="a/1")
    bench.share("a/1", "b/1")
    assert set(bench.holders().values()) == {"a/1", "b/1"}, "else it would go back for ever"


def test_history_records_why_a_grant_ended() -> None:
    bench = granted(2, "a/1")
    bench.leave(bench.said(5, 1), borrower_id="a/1")
    bench.settle()
    ends = {line.stream_id: line.reason for line in bench.history("release")}
    assert ends == {1: "its borrower left", 2: "its borrower does not have it"}


@pytest.mark.parametrize(
    ("options", "wanted"),
    [(STABLE, {}), (None, {"session": "one", "session_epoch": 1})],
    ids=["without a name", "not asked for"],
)
def test_nothing_is_reserved(options: GroupOptions | None, wanted: dict[str, Any]) -> None:
    bench = Bench(1, options=options)
    bench.join("a/1", **wanted)
    bench.share()
    bench.confirm()
    bench.hand_over("a/1")
    bench.joined("b/1")
    assert bench.holders() == {1: "b/1"}


@pytest.mark.conforms("E30", "E10")
def test_the_newer_process_of_a_name_fences_the_older() -> None:
    """At once, and it has its streams; what the older says changes nothing."""
    bench = Bench(3)
    bench.named("a/1", "worker", 1)
    bench.save(7, borrower_id="a/1")
    before = bench.grant_id()
    bench.sent.clear()
    bench.join("b/1", session="worker", session_epoch=2)
    ends = bench.received(Invalidate)
    assert [(end.borrower_id, end.reason) for end in ends] == [("a/1", BorrowerEndReason.FENCED)]
    bench.settle()
    bench.share("b/1")
    grants = bench.received(Grant)
    assert {(g.borrower_id, g.stream_id, g.position) for g in grants} == {("b/1", 1, 7), ("b/1", 2, 0), ("b/1", 3, 0)}
    forced = [(line.stream_id, line.position, line.redelivery_end) for line in bench.forced()]
    assert forced == [(1, 7, 100), (2, 0, 100), (3, 0, 100)]
    row = bench.row()
    bench.report(StreamProgress(1, before, 50, True), borrower_id="a/1")
    bench.settle()
    assert bench.row() == row


@pytest.mark.conforms("E30")
@pytest.mark.parametrize("has_left", [False, True])
def test_the_older_process_of_a_name_never_comes_back(has_left: bool) -> None:
    """Nor when the newer has left and others have its streams; the newer itself may."""
    bench = Bench(2)
    bench.named("a/1", "worker", 1)
    bench.named("b/1", "worker", 2)
    if has_left:
        bench.hand_over("b/1")
        bench.named("c/1", "another", 3)
        assert bench.holders() == {1: "c/1", 2: "c/1"}
    for borrower_id in ("a/2", "a/3"):
        bench.sent.clear()
        bench.join(borrower_id, session="worker", session_epoch=1)
        assert bench.ends() == [BorrowerEndReason.FENCED]
    if not has_left:
        bench.lead()
        bench.join("a/4", session="worker", session_epoch=1, reclaim=())
        assert bench.ends() == [BorrowerEndReason.FENCED], "the next leader reads it in the rows"
    bench.named("b/2", "worker", 2)
    assert bench.leader.members.get("b/2") is not None


@pytest.mark.conforms("X4")
def test_of_too_many_names_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sublet_leader.group.session_fencing.MAX_REMEMBERED", 2)
    bench = Bench()
    for name in ("one", "two", "one", "three"):
        bench.join(f"{name}/1", session=name, session_epoch=5)
        bench.hand_over(f"{name}/1")
    bench.sent.clear()
    for name in ("one", "two", "three"):
        bench.join(f"{name}/2", session=name, session_epoch=4)
    fenced = [(end.borrower_id, end.reason) for end in bench.received(Invalidate)]
    assert fenced == [("one/2", BorrowerEndReason.FENCED), ("three/2", BorrowerEndReason.FENCED)]


@pytest.mark.parametrize("epoch", [0, 1])
def test_two_borrowers_of_one_process_are_not_fenced(epoch: int) -> None:
    """Nor is one whose name is only shown."""
    bench = Bench(2)
    bench.named("a/1", "worker", epoch)
    bench.sent.clear()
    bench.named("a/2", "worker", 1)
    assert bench.received(Invalidate) == []
    assert bench.leader.members.get("a/1") is not None


def test_a_successor_of_its_process_reclaims_by_name() -> None:
    bench = Bench(2, options=STABLE)
    bench.named("a/1", "worker", 1)
    held = tuple(bench.held(stream) for stream in (1, 2))
    bench.lead()
    bench.join("a/2", session="worker", session_epoch=1, reclaim=held)
    bench.settle()
    bench.confirm()
    assert bench.holders() == {1: "a/2", 2: "a/2"}
    assert bench.history("force_release") == []


@pytest.mark.conforms("X5")
def test_a_name_for_display_gives_no_epoch_to_a_row() -> None:
    """Else an agent would fence another's session: with a row under its name, and the epoch of one of its own."""
    bench = Bench(options=STABLE)
    bench.joined("a/1")
    bench.change_row(session="worker")
    bench.lead()
    bench.join("a/2", session="own", session_epoch=9, reclaim=(bench.held(),))
    bench.settle()
    assert (bench.row().borrower_id, bench.row().session, bench.row().session_epoch) == ("a/2", "worker", None)
    bench.named("b/1", "worker", 5)
    assert bench.leader.members.get("b/1") is not None
    bench.pass_time(bench.settings.grant_validity_s + 1, "a/2", "b/1")
    assert (bench.row().borrower_id, bench.forced()) == ("a/2", []), "a process without an epoch is not older"


# --- the strategy, and what is recorded -------------------------------------------------------------------------------


def test_an_unknown_strategy_does_not_stop_the_group() -> None:
    bench = Bench(2, options=GroupOptions(StartingPosition.EARLIEST, strategy="astrology"))
    bench.joined("a/1")
    assert bench.holders() == {1: "a/1", 2: "a/1"}
    assert any("astrology" in story and "even" in story for story in bench.stories)


def test_a_strategy_that_breaks_is_replaced_and_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def plan(self, allocation_input: object) -> object:
            raise ZeroDivisionError("of the moon")

    monkeypatch.setattr("sublet_leader.group.rebalancer.load_strategy", lambda name: Broken())
    bench = Bench(2)
    bench.joined("a/1", "b/1")
    assert sorted(bench.holders().values(), key=str) == ["a/1", "b/1"]
    assert [story for story in bench.stories if "ZeroDivisionError: of the moon" in story]
    monkeypatch.setattr(EvenStrategy, "plan", lambda *_: AllocationPlan(((1, "a/1"),)))
    with pytest.raises(UsageError, match="stream 1, which is not free"):
        bench.joined("c/1")


@pytest.mark.parametrize("reserve", [left, lost])
@pytest.mark.parametrize("wanted", [{}, {"session_epoch": 2, "leaving": True}], ids=["for display", "leaving"])
def test_who_gets_nothing_reserved(wanted: dict[str, Any], reserve: Callable[[], Bench]) -> None:
    """A name for display, and a process that takes no more streams."""
    bench = reserve()
    bench.join("b/1", session="etl", **wanted)
    bench.pass_time(1.0, "b/1")
    assert bench.holders() == {}


@pytest.mark.conforms("E18")
def test_a_free_stream_goes_back_to_who_had_it() -> None:
    bench = granted(4, "a/1", "b/1")
    own = bench.streams_of("b/1")
    bench.hand_over("b/1")
    bench.join("b/2")
    bench.share("a/1", "b/2")
    bench.confirm()
    assert bench.streams_of("b/2") == own


@pytest.mark.conforms("E11")
def test_a_revoke_is_recorded_once_with_its_reason() -> None:
    bench = granted(1, "a/1")
    bench.revoke()
    bench.revoke()
    bench.settle()
    assert [line.reason for line in bench.history("revoke")] == ["operator"]


@pytest.mark.conforms("E11", "E30")
def test_a_stream_is_taken_from_a_fenced_process_once() -> None:
    """Also where two newer ones come before it may be granted again."""
    bench = Bench()
    bench.named("a/1", "etl", 1)
    bench.receive(Ping(("a/1",), bench.now))
    for borrower_id, epoch in (("b/1", 2), ("c/1", 3)):
        bench.join(borrower_id, session="etl", session_epoch=epoch)
        bench.settle()
    assert len(bench.history("revoke")) == 1


@pytest.mark.parametrize("fails", [False, True])
def test_an_end_under_way_is_not_begun_again(fails: bool) -> None:
    """That of a former leader's grant, whose session is fenced then."""
    bench = Bench()
    bench.named("a/1", "etl")
    bench.lead()
    bench.tick(bench.settings.reclaim_grace_s + bench.settings.grant_validity_s)
    if fails:
        bench.fail()
    bench.join("b/1", session="etl", session_epoch=2)
    assert [type(change) for change in bench.leader.pending_changes()] == [ForceRelease]


def test_a_revoke_of_an_unwritten_grant_waits_for_it() -> None:
    bench = unwritten()
    bench.revoke()
    assert [type(change) for change in bench.leader.pending_changes()] == [GrantStream]
    assert bench.received(Revoke) == []
    bench.settle()
    assert len(bench.received(Revoke)) == 1


def test_reports_of_size_and_lag_reach_the_strategy() -> None:
    bench = granted(2, "a/1", options=GroupOptions(StartingPosition.EARLIEST, strategy="load"))
    for second in range(1, 6):
        bench.pass_time(1.0, "a/1")
        reported = (
            StreamProgress(1, bench.grant_id(1), second, size=1000 * second, lag=95 - second),
            StreamProgress(2, bench.grant_id(2), second, size=10 * second, lag=None),
        )
        bench.report(*reported, borrower_id="a/1")
        bench.settle()
    loads = [entry.meter.load() for entry in bench.leader.streams]
    assert [(round(load.bytes_per_s), load.lag) for load in loads if load] == [(1000, 90), (10, -1)]


def test_a_meter_goes_on_under_the_next_grant() -> None:
    meter = ThroughputMeter()
    meter.record(1, 0, None, 0.0)
    assert meter.load() is None
    meter.record(1, 500, 7, 1.0)
    meter.record(2, 0, None, 2.0)
    assert meter.load() == StreamLoad(500.0, 7), "a new holder begins to count at nothing, and that is no pause"
    meter.record(2, 0, 3, 2.0 + HALF_LIFE_S)
    meter.record(2, 100, 4, 2.0 + HALF_LIFE_S)
    found = meter.load()
    assert found is not None
    assert (round(found.bytes_per_s), found.lag) == (250, 4), "of no time there is no rate"


@pytest.mark.conforms("E30")
@pytest.mark.parametrize("is_replaced", [False, True])
@pytest.mark.parametrize("trouble", ["locked", "failed", "fails later"])
def test_an_unwritten_grant_is_not_for_the_fenced(trouble: str, is_replaced: bool) -> None:
    bench = Bench(2)
    if trouble == "locked":
        bench.store.locked |= {(1, 1), (1, 2)}
    bench.join("a/1", session="worker", session_epoch=1)
    bench.debounce()
    assert len(bench.entries) == 2
    if trouble == "locked":
        bench.commit()
    elif trouble == "failed":
        bench.fail()
    if is_replaced:
        bench.join("a/2", session="worker", session_epoch=1, predecessor="a/1", borrower_number=2)
    bench.join("b/1", session="worker", session_epoch=2)
    if trouble == "fails later":
        bench.fail()
    bench.pass_time(bench.settings.resend_interval_s + 1.0, "b/1")
    bench.store.locked.clear()
    bench.pass_time(2.0, "b/1")
    assert bench.holders() == {1: "b/1", 2: "b/1"}
    assert {line.borrower_id for line in bench.history("grant")} == {"b/1"}
