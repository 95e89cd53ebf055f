"""What a group is created with: where it starts, and what it does about messages that are gone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from sublet_protocol.domain.errors import Conflict, UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.model import records
from sublet_storage.groups.model.desired_state import OverrideSessionWeight, PauseGroup, ResumeGroup
from tests.contract.group_world import (
    APPLIED,
    BLOCKED,
    FINISHED,
    FREE,
    HELD,
    INVALID,
    REFUSED,
    SHARE,
    PostgresWorld,
    World,
    events,
    grant,
    granted,
    outcome,
)

OTHERS = records.GroupOptions(records.StartingPosition.at_offset(5), records.OnDataLoss.SKIP, "load", 60.5)


def positions(world: World, group: records.Group) -> dict[int, int]:
    return {row.stream_id: row.position for row in world.store.load(group.group_id, world.lead(group))}


def lost_messages(world: World, group: records.Group) -> dict[int, int]:
    """Return the lost messages in the store, those of finished rows included."""
    if isinstance(world, PostgresWorld):
        sql = "select stream_id, lost_message_count from lending where group_id = %s"
        return dict(world.connection.execute(sql, (group.group_id,)).fetchall())
    return {row.stream_id: row.lost_message_count for row in world.store.rows(group.group_id).values()}  # type: ignore[attr-defined]


# --- declaring ----------------------------------------------------------------------------------------------------


@pytest.mark.conforms("A1")
def test_declaring_again_is_a_no_op_or_a_conflict(world: World) -> None:
    """The error for whoever declares a group with other options names the one that differs."""
    world.add_space()
    group = world.store.declare_group(SHARE, OTHERS)
    assert group.options == OTHERS
    assert world.store.declare_group(SHARE, OTHERS) == group
    assert world.store.find_group(group.group_id) == group
    for other, named in (
        (
            replace(OTHERS, starting_position=records.StartingPosition.EARLIEST),
            "starting position is offset:5, not earliest",
        ),
        (replace(OTHERS, on_data_loss=records.OnDataLoss.FAIL), "its policy .* is skip, not fail"),
        (replace(OTHERS, strategy="even"), "its strategy is load, not even"),
        (replace(OTHERS, on_poison=records.OnPoison.SKIP), "that cannot be decoded is block, not skip"),
        (replace(OTHERS, holds_retention=True), "its hold on retention is off, not on"),
        (replace(OTHERS, session_expiry_s=60.0), "its session expiry is 60.5 s, not 60.0 s"),
    ):
        with pytest.raises(Conflict, match=named) as refused:
            world.store.declare_group(SHARE, other)
        assert str(refused.value).count("its ") == 1
    assert world.store.open_group(SHARE, records.StartingPosition.EARLIEST) == group, "the first start wins"


def test_a_subscribers_group_has_the_defaults(world: World) -> None:
    world.add_space()
    group = world.group(start=records.StartingPosition.EARLIEST)
    assert group.options == records.GroupOptions(records.StartingPosition.EARLIEST)
    assert world.store.find_group(group.group_id) == group
    assert world.store.declare_group(SHARE, group.options) == group


def test_an_atomic_group_does_not_skip_what_is_gone() -> None:
    with pytest.raises(UsageError, match="cannot skip"):
        records.GroupOptions(atomic=True, on_data_loss=records.OnDataLoss.SKIP)
    with pytest.raises(UsageError, match="cannot skip messages that cannot be decoded"):
        records.GroupOptions(atomic=True, on_poison=records.OnPoison.SKIP)


def test_the_name_of_a_strategy_is_bounded() -> None:
    assert records.GroupOptions(strategy="s" * 255)
    with pytest.raises(UsageError, match="1 to 255 printable characters"):
        records.GroupOptions(strategy="s" * 256)


@pytest.mark.parametrize(
    "wrong", [{"session_expiry_s": -1}, {"session_expiry_s": float("nan")}, {"session_expiry_s": 1e9}, {"strategy": ""}]
)
def test_options_that_can_never_work_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=r"(session expiry|strategy) .*: it is"):
        records.GroupOptions(**wrong)  # type: ignore[arg-type]


# --- starts -------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("P9")
def test_a_start_in_time_begins_with_the_next_block(world: World) -> None:
    begun = world.clock()
    busy, idle = world.add_space(shards=2)
    for _ in range(3):
        world.append(busy, 10)
        world.clock.advance(1)
    for seconds, offset in ((-5, 0), (0, 0), (0.5, 10), (1, 10), (2, 20), (2.000001, 30), (60, 30)):
        name = Subscription.parse(f"$share/at {seconds}/#")
        group = world.group(name, records.StartingPosition.at_time(begun + round(seconds * 1_000_000)))
        assert positions(world, group) == {busy: offset, idle: 0}, seconds


@pytest.mark.conforms("P9")
def test_a_start_in_time_takes_unread_closed_streams(world: World) -> None:
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
    group = world.group(start=records.StartingPosition.at_time(since))
    assert positions(world, group) == {across: 4, after: 0, current: 0}
    everything = world.group(Subscription.parse("$share/all/#"), records.StartingPosition.at_time(0))
    assert positions(world, everything) == {before: 0, across: 0, after: 0, current: 0}
    world.append(current, 1)
    (later,) = world.rollover(1)
    world.write(group, world.lead(group), renew=True)
    assert positions(world, group)[later] == 0


def test_a_start_at_an_offset_is_at_most_each_head(world: World) -> None:
    (closed,) = world.add_space()
    world.append(closed, 100)
    long, short, empty = world.rollover(1, shards=3)
    world.append(long, 50)
    world.append(short, 3)
    group = world.group(start=records.StartingPosition.at_offset(7))
    assert positions(world, group) == {long: 7, short: 3, empty: 0}
    huge = world.group(Subscription.parse("$share/huge/#"), records.StartingPosition.at_offset(2**63 - 1))
    assert positions(world, huge) == {long: 50, short: 3, empty: 0}


# --- messages that are gone ---------------------------------------------------------------------------------------


@pytest.mark.conforms("W4")
def test_who_skips_finishes_what_is_gone_and_counts_it(world: World) -> None:
    free, held, consumed, given_grant = world.add_space(shards=4)
    group = world.declare(starting_position=records.StartingPosition.EARLIEST, on_data_loss=records.OnDataLoss.SKIP)
    term = world.lead(group)
    for stream in (free, held, consumed, given_grant):
        world.append(stream, 9)
    grant_id = granted(world, group, term, held).grant_id
    world.apply(group, term, records.AdvancePosition(held, grant_id, 4))
    world.apply(group, term, records.AdvancePosition(consumed, granted(world, group, term, consumed).grant_id, 9))
    (child,) = world.rollover(1, shards=1)
    world.write(group, term, renew=True)
    world.retire(1)
    refused = world.apply(group, term, grant(given_grant))
    assert outcome(refused) == (REFUSED, FINISHED, 9)
    renewed = {row.stream_id: row for row in world.write(group, term, renew=True).synced}
    assert {stream: row.status for stream, row in renewed.items()} == {
        free: FINISHED, held: FINISHED, consumed: records.LendingStatus.HELD,
    }  # fmt: skip
    assert renewed[held].grant_id > grant_id
    assert renewed[held].borrower_id is None
    skips = [line for line in world.store.history(group.group_id) if line.event == "skip"]
    assert [(line.stream_id, line.position, line.is_forced, line.redelivery_end) for line in skips] == [
        (given_grant, 0, False, None), (free, 0, False, None), (held, 4, False, None),
    ]  # fmt: skip
    assert [line.reason.split(", ")[1] for line in skips] == [f"{n} messages in all; skipped" for n in (9, 9, 5)]
    assert lost_messages(world, group) == {free: 9, held: 5, consumed: 0, given_grant: 9, child: 0}
    world.apply(group, term, records.ForceRelease(consumed, renewed[consumed].grant_id, "silent"))
    assert granted(world, group, term, child).position == 0, "its parents hold it back no more"


@pytest.mark.conforms("W4")
def test_each_group_has_its_own_policy(world: World) -> None:
    (stream,) = world.add_space()
    skips = world.declare(starting_position=records.StartingPosition.EARLIEST, on_data_loss=records.OnDataLoss.SKIP)
    fails = world.group(Subscription.parse("$share/fails/#"), records.StartingPosition.EARLIEST)
    world.append(stream, 2)
    world.rollover(1)
    world.retire(1)
    rows: list[records.Lending] = []
    for group in (skips, fails):
        rows.extend(world.write(group, world.lead(group), renew=True).synced)
    assert [row.status for row in rows if row.stream_id == stream] == [FINISHED, BLOCKED]
    assert events(world, fails) == [("block", 0, False)]
    assert lost_messages(world, fails)[stream] == 0


# --- blocks that cannot be decoded ----------------------------------------------------------------------------------


@pytest.mark.conforms("W10")
@pytest.mark.parametrize(("skips", "found", "lost"), [(False, (APPLIED, BLOCKED, 4), 0), (True, (APPLIED, FREE, 6), 2)])
def test_at_poison_a_row_is_blocked_or_goes_on_behind(world: World, skips: bool, found: object, lost: int) -> None:
    (stream,) = world.add_space()
    world.append(stream, 8)
    group = world.group(start=records.StartingPosition.EARLIEST)
    term = world.lead(group)
    held = granted(world, group, term, stream)
    poison = records.ReleaseStream(stream, held.grant_id, 4, "it is garbage.", poison=6, may_skip=skips)
    assert outcome(world.apply(group, term, replace(poison, grant_id=held.grant_id + 1))) == (
        REFUSED, records.LendingStatus.HELD, 0,
    )  # fmt: skip
    result = world.apply(group, term, poison)
    assert outcome(result) == found
    assert result.lending is not None
    assert result.lending.grant_id > held.grant_id
    line = world.store.history(group.group_id)[-1]
    said = "it is garbage. Skipped: [4, 6), 2 messages" if skips else "it is garbage."
    assert (line.event, line.position, line.reason, line.redelivery_end) == (
        "skip" if skips else "block",
        4,
        said,
        None,
    )
    assert lost_messages(world, group) == {stream: lost}


@pytest.mark.conforms("W10")
def test_skipping_the_last_block_finishes_a_stream(world: World) -> None:
    """Nothing is skipped beyond the head."""
    closed, other = world.add_space(shards=2)
    world.append(closed, 8)
    group = world.group(start=records.StartingPosition.EARLIEST)
    term = world.lead(group)
    grants = [granted(world, group, term, each).grant_id for each in (closed, other)]
    world.rollover(1)
    last = records.ReleaseStream(closed, grants[0], 6, "garbage", poison=8, may_skip=True)
    assert outcome(world.apply(group, term, last)) == (APPLIED, FINISHED, 8)
    beyond = records.ReleaseStream(other, grants[1], 0, "garbage", poison=1, may_skip=True)
    assert outcome(world.apply(group, term, beyond)) == (INVALID, HELD, 0)


# --- orders -------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("A5")
def test_commands_are_stored_and_recorded_once(world: World) -> None:
    group, term, _ = world.led()
    assert world.write(group, term, renew=True).desired_state == group.desired_state == records.GroupDesiredState()
    paused = world.store.apply_command(SHARE, PauseGroup("the sink is repaired"))
    assert paused is not None
    assert (paused.desired_state.pause_reason, paused.revision) == ("the sink is repaired", 1)
    assert world.store.apply_command(SHARE, PauseGroup("again")) == paused
    assert world.store.apply_command(SHARE, OverrideSessionWeight("s", 2.5)) == world.store.find_live_group(SHARE)
    found = world.store.find_group(group.group_id)
    assert found is not None
    assert found.desired_state == records.GroupDesiredState("the sink is repaired", (("s", 2.5),))
    assert world.write(group, term).desired_state is None
    assert world.write(group, term, renew=True).desired_state == found.desired_state
    world.store.apply_command(SHARE, ResumeGroup())
    world.store.apply_command(SHARE, OverrideSessionWeight("s", None))
    assert world.write(group, term, renew=True).desired_state == records.GroupDesiredState()
    lines = [line for line in world.store.history(group.group_id) if line.event == "command"]
    assert [line.reason for line in lines] == [
        "paused: the sink is repaired",
        "weight of session 's': 2.5",
        "resumed",
        "weight of session 's': as requested",
    ]
    assert {(line.stream_id, line.term, line.is_forced) for line in lines} == {(0, term, False)}


def test_looking_for_a_group_creates_none(world: World) -> None:
    """Nor does a command to a group that is not there."""

    def is_missing() -> bool:
        return world.store.find_live_group(SHARE) is world.store.apply_command(SHARE, PauseGroup()) is None

    world.add_space()
    assert is_missing()
    group = world.group()
    assert world.store.find_live_group(SHARE) == group
    world.store.delete_group(SHARE)
    assert is_missing()


def test_commands_without_a_leader_are_recorded(world: World) -> None:
    world.add_space()
    group = world.declare()
    world.store.apply_command(SHARE, PauseGroup())
    (line,) = world.store.history(group.group_id)
    assert (line.event, line.reason, line.term) == ("command", "paused", 0)
    again = world.store.declare_group(SHARE, group.options)
    assert again.desired_state.pause_reason == ""
