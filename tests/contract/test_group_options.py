"""What a group is created with: where it starts, and what it does about messages that are gone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sublet_protocol.domain.errors import Conflict, UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.model.desired_state import Pause, Resume, Weigh
from sublet_storage.groups.model.records import (
    Advance,
    Grant,
    Group,
    GroupOptions,
    Lending,
    LendingStatus,
    OnPoison,
    Orders,
    Release,
    Seize,
    Start,
    Verdict,
    WhenGone,
)
from tests.contract.group_world import (
    BLOCKED,
    FINISHED,
    FREE,
    SHARE,
    PostgresWorld,
    World,
    events,
    grant,
    lent,
    outcome,
)

OTHERS = GroupOptions(Start.offset(5), WhenGone.SKIP, "load", 60.5)


def positions(world: World, group: Group) -> dict[int, int]:
    return {row.stream_id: row.position for row in world.store.load(group.group_id, world.lead(group))}


def lost_messages(world: World, group: Group) -> dict[int, int]:
    """As the store has them, finished rows included."""
    if isinstance(world, PostgresWorld):
        sql = "select stream_id, lost_messages from lending where group_id = %s"
        return dict(world.connection.execute(sql, (group.group_id,)).fetchall())
    return {row.stream_id: row.lost_messages for row in world.store.rows(group.group_id).values()}  # type: ignore[attr-defined]


# --- declaring ----------------------------------------------------------------------------------------------------


@pytest.mark.conforms("A1")
@pytest.mark.parametrize(
    ("other", "named"),
    [
        (GroupOptions(Start.EARLIEST, WhenGone.SKIP, "load", 60.5), "its start is offset:5, not earliest"),
        (GroupOptions(Start.offset(5), WhenGone.FAIL, "load", 60.5), "its policy .* is skip, not fail"),
        (GroupOptions(Start.offset(5), WhenGone.SKIP, "even", 60.5), "its strategy is load, not even"),
        (replace(OTHERS, on_poison=OnPoison.SKIP), "that cannot be decoded is block, not skip"),
        (replace(OTHERS, holds_retention=True), "its hold on retention is off, not on"),
        (GroupOptions(Start.offset(5), WhenGone.SKIP, "load", 60.0), "its session expiry is 60.5 s, not 60.0 s"),
    ],
)
def test_declaring_the_same_again_is_a_no_op_and_another_is_a_conflict_that_names_it(
    world: World, other: GroupOptions, named: str
) -> None:
    world.add_space()
    group = world.store.declare_group(SHARE, OTHERS)
    assert group.options == OTHERS
    assert world.store.declare_group(SHARE, OTHERS) == group
    assert world.store.find_group(group.group_id) == group
    with pytest.raises(Conflict, match=named) as refused:
        world.store.declare_group(SHARE, other)
    assert str(refused.value).count("its ") == 1
    assert world.store.open_group(SHARE) == group, "the first start wins"


def test_a_group_that_a_subscriber_creates_has_its_start_and_the_defaults(world: World) -> None:
    world.add_space()
    group = world.group(start=Start.EARLIEST)
    assert group.options == GroupOptions(Start.EARLIEST)
    assert world.store.find_group(group.group_id) == group


def test_an_atomic_group_does_not_skip_what_is_gone() -> None:
    with pytest.raises(UsageError, match="cannot skip"):
        GroupOptions(atomic=True, when_gone=WhenGone.SKIP)
    with pytest.raises(UsageError, match="cannot skip messages that cannot be decoded"):
        GroupOptions(atomic=True, on_poison=OnPoison.SKIP)


@pytest.mark.parametrize(
    "wrong",
    [
        {"session_expiry_s": -1},
        {"session_expiry_s": float("nan")},
        {"session_expiry_s": 1e9},
        {"strategy": ""},
    ],
)
def test_options_that_can_never_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"(session expiry|strategy) .*: it is"):
        GroupOptions(**wrong)  # type: ignore[arg-type]


# --- starts -------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("P9")
def test_a_start_in_time_begins_with_the_first_block_stored_at_or_after_it(world: World) -> None:
    begun = world.clock()
    busy, idle = world.add_space(shards=2)
    for _ in range(3):
        world.append(busy, 10)
        world.clock.advance(1)
    for seconds, offset in ((-5, 0), (0, 0), (0.5, 10), (1, 10), (2, 20), (2.000001, 30), (60, 30)):
        name = Subscription.parse(f"$share/at {seconds}/#")
        group = world.group(name, Start.at(begun + round(seconds * 1_000_000)))
        assert positions(world, group) == {busy: offset, idle: 0}, seconds


@pytest.mark.conforms("P9")
def test_a_start_in_time_takes_closed_streams_that_have_something_and_no_others(world: World) -> None:
    (gone,) = world.add_space()
    world.append(gone, 2)
    (before,) = world.rollover(1)
    world.append(before, 3)
    (across,) = world.rollover(1)
    world.append(across, 4)
    world.clock.advance(10)
    since = world.clock()
    world.append(across, 5)
    (after,) = world.rollover(1)
    world.append(after, 6)
    (current,) = world.rollover(1)
    world.retire(1)
    group = world.group(start=Start.at(since))
    assert positions(world, group) == {across: 4, after: 0, current: 0}
    everything = world.group(Subscription.parse("$share/all/#"), Start.at(0))
    assert positions(world, everything) == {before: 0, across: 0, after: 0, current: 0}
    world.append(current, 1)
    (later,) = world.rollover(1)
    world.write(group, world.lead(group), renew=True)
    assert positions(world, group)[later] == 0


def test_a_start_at_an_offset_is_each_open_streams_own_and_not_beyond_its_head(world: World) -> None:
    (closed,) = world.add_space()
    world.append(closed, 100)
    long, short, empty = world.rollover(1, shards=3)
    world.append(long, 50)
    world.append(short, 3)
    group = world.group(start=Start.offset(7))
    assert positions(world, group) == {long: 7, short: 3, empty: 0}
    huge = world.group(Subscription.parse("$share/huge/#"), Start.offset(2**63 - 1))
    assert positions(world, huge) == {long: 50, short: 3, empty: 0}


# --- messages that are gone ---------------------------------------------------------------------------------------


@pytest.mark.conforms("W4")
def test_a_group_that_skips_finishes_what_retention_took_and_counts_it(world: World) -> None:
    free, held, consumed, granted = world.add_space(shards=4)
    group = world.declare(start=Start.EARLIEST, when_gone=WhenGone.SKIP)
    term = world.lead(group)
    for stream in (free, held, consumed, granted):
        world.append(stream, 9)
    grant_id = lent(world, group, term, held).grant_id
    world.apply(group, term, Advance(held, grant_id, 4))
    world.apply(group, term, Advance(consumed, lent(world, group, term, consumed).grant_id, 9))
    (child,) = world.rollover(1, shards=1)
    world.write(group, term, renew=True)
    world.retire(1)
    refused = world.apply(group, term, grant(granted))
    assert outcome(refused) == (Verdict.REFUSED, FINISHED, 9)
    renewed = {row.stream_id: row for row in world.write(group, term, renew=True).renewed}
    assert {stream: row.status for stream, row in renewed.items()} == {
        free: FINISHED, held: FINISHED, consumed: LendingStatus.HELD,
    }  # fmt: skip
    assert renewed[held].grant_id > grant_id
    assert renewed[held].borrower_id is None
    skips = [line for line in world.store.history(group.group_id) if line.event == "skip"]
    assert [(line.stream_id, line.position, line.forced, line.until) for line in skips] == [
        (granted, 0, False, None), (free, 0, False, None), (held, 4, False, None),
    ]  # fmt: skip
    assert [line.reason.split(", ")[1] for line in skips] == [f"{n} messages in all; skipped" for n in (9, 9, 5)]
    assert lost_messages(world, group) == {free: 9, held: 5, consumed: 0, granted: 9, child: 0}
    world.apply(group, term, Seize(consumed, renewed[consumed].grant_id, "silent"))
    assert lent(world, group, term, child).position == 0, "its parents hold it back no more"


@pytest.mark.conforms("W4")
def test_a_group_that_fails_blocks_and_each_group_has_its_own_policy(world: World) -> None:
    (stream,) = world.add_space()
    skips = world.declare(start=Start.EARLIEST, when_gone=WhenGone.SKIP)
    fails = world.group(Subscription.parse("$share/fails/#"), Start.EARLIEST)
    world.append(stream, 2)
    world.rollover(1)
    world.retire(1)
    rows: list[Lending] = []
    for group in (skips, fails):
        rows.extend(world.write(group, world.lead(group), renew=True).renewed)
    assert [row.status for row in rows if row.stream_id == stream] == [FINISHED, BLOCKED]
    assert events(world, fails) == [("block", 0, False)]
    assert lost_messages(world, fails)[stream] == 0


@pytest.mark.conforms("W4")
def test_a_position_beyond_the_head_is_blocked_whatever_the_policy(world: World) -> None:
    (stream,) = world.add_space()
    group = world.declare(when_gone=WhenGone.SKIP)
    term = world.lead(group)
    held = lent(world, group, term, stream)
    assert outcome(world.apply(group, term, Advance(stream, held.grant_id, 3))) == (Verdict.REFUSED, BLOCKED, 0)
    assert outcome(world.apply(group, term, Grant(stream, "b", "a", None, "share"))) == (Verdict.REFUSED, BLOCKED, 0)


@pytest.mark.conforms("E23")
def test_a_second_life_has_options_and_positions_of_its_own(world: World) -> None:
    (stream,) = world.add_space()
    world.append(stream, 8)
    first = world.store.declare_group(SHARE, OTHERS)
    term = world.lead(first)
    held = lent(world, first, term, stream)
    world.apply(first, term, Advance(stream, held.grant_id, 7))
    assert world.store.delete_group(SHARE) == first.group_id
    second = world.group(start=Start.EARLIEST)
    assert second.options == GroupOptions(Start.EARLIEST)
    row = world.row(second, world.lead(second), stream)
    assert (row.status, row.position, row.grant_id, row.session) == (FREE, 0, 0, None)
    assert world.write(first, term, Advance(stream, held.grant_id, 8)).deposed


# --- blocks that cannot be decoded ----------------------------------------------------------------------------------


@pytest.mark.conforms("W10")
@pytest.mark.parametrize(
    ("skips", "found", "lost"),
    [(False, (Verdict.APPLIED, BLOCKED, 4), 0), (True, (Verdict.APPLIED, FREE, 6), 2)],
)
def test_at_a_block_that_cannot_be_decoded_a_row_is_blocked_or_goes_on_behind_it(
    world: World, skips: bool, found: object, lost: int
) -> None:
    (stream,) = world.add_space()
    world.append(stream, 8)
    group = world.group(start=Start.EARLIEST)
    term = world.lead(group)
    held = lent(world, group, term, stream)
    poison = Release(stream, held.grant_id, 4, "it is garbage.", poison=6, skips=skips)
    assert outcome(world.apply(group, term, replace(poison, grant_id=held.grant_id + 1))) == (
        Verdict.REFUSED, LendingStatus.HELD, 0,
    )  # fmt: skip
    result = world.apply(group, term, poison)
    assert outcome(result) == found
    assert result.lending is not None
    assert result.lending.grant_id > held.grant_id
    line = world.store.history(group.group_id)[-1]
    said = "it is garbage. Skipped: [4, 6), 2 messages" if skips else "it is garbage."
    assert (line.event, line.position, line.reason, line.until) == ("skip" if skips else "block", 4, said, None)
    assert lost_messages(world, group) == {stream: lost}


@pytest.mark.conforms("W10")
def test_a_closed_stream_whose_last_block_is_skipped_is_finished_and_none_is_skipped_beyond_the_head(
    world: World,
) -> None:
    closed, other = world.add_space(shards=2)
    world.append(closed, 8)
    group = world.group(start=Start.EARLIEST)
    term = world.lead(group)
    grants = [lent(world, group, term, each).grant_id for each in (closed, other)]
    world.rollover(1)
    last = Release(closed, grants[0], 6, "garbage", poison=8, skips=True)
    assert outcome(world.apply(group, term, last)) == (Verdict.APPLIED, FINISHED, 8)
    beyond = Release(other, grants[1], 0, "garbage", poison=1, skips=True)
    assert outcome(world.apply(group, term, beyond)) == (Verdict.REFUSED, BLOCKED, 0)


# --- orders -------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("A5")
def test_orders_are_kept_and_are_told_with_a_renewal_and_recorded_once(world: World) -> None:
    world.add_space()
    group = world.declare()
    term = world.lead(group)
    assert world.write(group, term, renew=True).orders == group.orders == Orders()
    paused = world.store.instruct(SHARE, Pause("the sink is repaired"))
    assert paused is not None
    assert (paused.orders.paused, paused.revision) == ("the sink is repaired", 1)
    assert world.store.instruct(SHARE, Pause("again")) == paused
    assert world.store.instruct(SHARE, Weigh("s", 2.5)) == world.store.live_group(SHARE)
    found = world.store.find_group(group.group_id)
    assert found is not None
    assert found.orders == Orders("the sink is repaired", (("s", 2.5),))
    assert world.write(group, term).orders is None
    assert world.write(group, term, renew=True).orders == found.orders
    world.store.instruct(SHARE, Resume())
    world.store.instruct(SHARE, Weigh("s", None))
    assert world.write(group, term, renew=True).orders == Orders()
    lines = [line for line in world.store.history(group.group_id) if line.event == "order"]
    assert [line.reason for line in lines] == [
        "paused: the sink is repaired",
        "weight of session 's': 2.5",
        "resumed",
        "weight of session 's': as it asks for",
    ]
    assert {(line.stream_id, line.term, line.forced) for line in lines} == {(0, term, False)}


def test_a_group_that_is_not_there_takes_no_orders(world: World) -> None:
    assert world.store.instruct(SHARE, Pause()) is None
    world.add_space()
    world.declare()
    world.store.delete_group(SHARE)
    assert world.store.instruct(SHARE, Pause()) is None


def test_orders_to_a_group_that_nobody_leads_are_recorded_without_a_term(world: World) -> None:
    world.add_space()
    group = world.declare()
    world.store.instruct(SHARE, Pause())
    (line,) = world.store.history(group.group_id)
    assert (line.event, line.reason, line.term) == ("order", "paused", 0)
    again = world.store.declare_group(SHARE, group.options)
    assert again.orders.paused == ""
