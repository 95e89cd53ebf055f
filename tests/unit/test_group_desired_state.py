"""What an operator wants of a live group: its leader takes everything back, or shares by other weights."""

from __future__ import annotations

from collections import Counter

import pytest

from sublet_leader.group.events import StreamsChanged
from sublet_protocol.domain.errors import UsageError
from sublet_protocol.domain.limits import MAX_WEIGHTS
from sublet_protocol.messages.borrower_leader import Revoke
from sublet_storage.groups.model.desired_state import (
    MAX_TEXT,
    NO_DESIRED_STATE,
    GroupCommand,
    GroupDesiredState,
    OverrideSessionWeight,
    PauseGroup,
    ResumeGroup,
)
from tests.unit.leader_bench import BORROWER, HEAD, SUBSCRIPTION, Bench, granted

OTHER = "b/1"


def ordered(bench: Bench, order: GroupCommand) -> None:
    """The desired state is written, and read."""
    group = bench.store.apply_command(SUBSCRIPTION, order)
    assert group is not None
    bench.group = group
    bench.pass_time(1.0, BORROWER, OTHER)
    bench.give(StreamsChanged())
    bench.settle()


@pytest.mark.conforms("A5", "E18")
def test_the_weight_of_a_session_is_changed() -> None:
    """While it consumes."""
    bench = Bench(6)
    bench.join(BORROWER, session="first", session_epoch=1)
    bench.join(OTHER, session="second", session_epoch=1)
    bench.share()
    bench.confirm()
    assert Counter(bench.holders().values()) == {BORROWER: 3, OTHER: 3}
    ordered(bench, OverrideSessionWeight("first", 5.0))
    for _ in range(4):
        bench.pass_time(bench.settings.min_grant_duration_s + 1.0, BORROWER, OTHER)
        for revoke in bench.received(Revoke):
            bench.progress(0, revoke.stream_id, final=True, borrower_id=revoke.borrower_id)
        bench.settle()
        bench.pass_time(1.0, BORROWER, OTHER)
        bench.confirm()
    assert Counter(bench.holders().values()) == {BORROWER: 5, OTHER: 1}
    commands = [line.reason for line in bench.reported if line.event == "command"]
    assert commands == ["resumed; weight of session 'first': 5"]


@pytest.mark.conforms("A5")
def test_a_paused_group_lends_nothing_until_resumed() -> None:
    """It takes everything back first."""
    bench = granted(2)
    ordered(bench, PauseGroup("the sink is repaired"))
    assert {each.stream_id for each in bench.received(Revoke)} == {1, 2}
    for stream in (1, 2):
        bench.save(7, stream, final=True)
    bench.join("c/1")
    bench.pass_time(60.0, BORROWER, "c/1")
    assert bench.holders() == {}
    ordered(bench, ResumeGroup())
    bench.pass_time(5.0, BORROWER, "c/1")
    assert set(bench.holders()) == {1, 2}
    assert [bench.row(stream).position for stream in (1, 2)] == [7, 7]


@pytest.mark.conforms("A5")
def test_what_is_not_handed_over_in_time_is_taken() -> None:
    bench = granted()
    ordered(bench, PauseGroup())
    bench.pass_time(bench.settings.revoke_deadline_s + bench.settings.resend_interval_s, BORROWER)
    assert bench.holders() == {}
    (forced,) = bench.forced()
    assert (forced.reason, forced.position, forced.redelivery_end) == ("deadline: paused", 0, HEAD)


@pytest.mark.conforms("A5")
def test_the_next_leader_of_a_paused_group_keeps_to_it() -> None:
    """It takes back what is reclaimed."""
    bench = granted(2)
    group = bench.store.apply_command(SUBSCRIPTION, PauseGroup("maintenance"))
    assert group is not None
    bench.group = group
    bench.lead()
    bench.join("a/2", reclaim=(bench.held(1),), predecessor=BORROWER, borrower_number=2)
    bench.settle()
    assert {each.stream_id for each in bench.received(Revoke)} == {1}
    bench.progress(0, 1, final=True, borrower_id="a/2")
    bench.pass_time(bench.settings.reclaim_grace_s + 60.0, "a/2")
    assert bench.holders() == {}


def test_commands_are_distinct_where_they_differ() -> None:
    orders = NO_DESIRED_STATE.apply(PauseGroup("why"))
    assert orders.apply(PauseGroup("another")) == orders, "it is paused already"
    assert orders.apply(OverrideSessionWeight("s", 2)).apply(OverrideSessionWeight("s", None)) == orders
    assert orders.apply(ResumeGroup()) == NO_DESIRED_STATE
    weighted = orders.apply(OverrideSessionWeight("s", 2.5)).apply(OverrideSessionWeight("a", 1))
    for each in (NO_DESIRED_STATE, orders, weighted):
        assert GroupDesiredState.from_json(each.to_json()) == each


def test_commands_at_their_limits_are_applied() -> None:
    weights = [OverrideSessionWeight("s", weight) for weight in (0.001, 1e4)]
    commands: list[GroupCommand] = [PauseGroup("é" * MAX_TEXT), *weights]
    for command in commands:
        assert NO_DESIRED_STATE.apply(command) != NO_DESIRED_STATE


@pytest.mark.parametrize("weight", [0.0, -1.0, 0.0009, 10_001, float("nan"), float("inf")])
def test_a_weight_that_is_none_is_refused(weight: float) -> None:
    with pytest.raises(UsageError, match=r"a number from 0\.001 to 10000"):
        OverrideSessionWeight("s", weight)


@pytest.mark.conforms("X4")
def test_a_group_has_so_many_weights() -> None:
    """One more is refused; those that are there can be changed, and ended."""
    full = GroupDesiredState(weights=tuple(sorted((f"s{number}", 2.0) for number in range(MAX_WEIGHTS))))
    with pytest.raises(UsageError, match="has weights for 1000 sessions, which is the limit"):
        full.apply(OverrideSessionWeight("one more", 1))
    assert dict(full.apply(OverrideSessionWeight("s0", 1)).weights)["s0"] == 1
    exchanged = full.apply(OverrideSessionWeight("s0", None)).apply(OverrideSessionWeight("one more", 1))
    assert len(exchanged.weights) == MAX_WEIGHTS
    assert full.apply(PauseGroup("")).weights == full.weights


@pytest.mark.parametrize("text", ["x" * 256, "a\nb", "\x00"])
def test_a_text_that_cannot_be_shown_is_refused(text: str) -> None:
    for order in (lambda: PauseGroup(text), lambda: OverrideSessionWeight(text, 1)):
        with pytest.raises(UsageError, match="at most 255 characters"):
            order()


def test_an_unnamed_session_and_a_resets_reason() -> None:
    with pytest.raises(UsageError, match="without a name"):
        OverrideSessionWeight("", 1)
    with pytest.raises(UsageError, match="of which the next would resume the group"):
        PauseGroup("to be reset to earliest")
