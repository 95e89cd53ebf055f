"""What a group is created with: where it starts, and what it does about messages that are gone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sublet_protocol.domain.errors import Conflict, UsageError
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.model.desired_state import OverrideSessionWeight, PauseGroup, ResumeGroup
from sublet_storage.groups.model.options import MAX_SESSION_EXPIRY_S
from sublet_storage.groups.model.records import Group, GroupDesiredState, GroupOptions, OnDataLoss, OnPoison
from tests.contract.group_world import SHARE, Led, PostgresWorld, World, outcome, row_of

OTHERS = GroupOptions(StartingPosition.at_offset(5), OnDataLoss.SKIP, "load", 60.5)
EARLIEST = StartingPosition.EARLIEST


def positions(led: Led) -> dict[int, int]:
    return {stream: row.position for stream, row in led.rows().items()}


def starting(world: World, start: StartingPosition, name: object = "at") -> Led:
    """Return the group of that name, led, which starts there."""
    return world.lead(world.group(Subscription.parse(f"$share/{name}/#"), start))


def lost_messages(world: World, led: Led) -> dict[int, int]:
    """Return the lost messages in the store, those of finished rows included."""
    if isinstance(world, PostgresWorld):
        sql = "select stream_id, lost_message_count from lending where group_id = %s"
        return dict(world.connection.execute(sql, (led.group_id,)).fetchall())
    store: Any = world.store
    return {row.stream_id: row.lost_message_count for row in store.rows(led.group_id).values()}


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
        (replace(OTHERS, starting_position=EARLIEST), "starting position is offset:5, not earliest"),
        (replace(OTHERS, on_data_loss=OnDataLoss.FAIL), "its policy .* is skip, not fail"),
        (replace(OTHERS, strategy="even"), "its strategy is load, not even"),
        (replace(OTHERS, on_poison=OnPoison.SKIP), "that cannot be decoded is block, not skip"),
        (replace(OTHERS, holds_retention=True), "its hold on retention is off, not on"),
        (replace(OTHERS, session_expiry_s=60.0), "its session expiry is 60.5 s, not 60.0 s"),
    ):
        with pytest.raises(Conflict, match=named) as refused:
            world.store.declare_group(SHARE, other)
        assert str(refused.value).count("its ") == 1
    assert world.store.open_group(SHARE, EARLIEST) == group, "the first start wins"


def test_a_subscribers_group_has_the_defaults(world: World) -> None:
    world.add_space()
    group = world.group(start=EARLIEST)
    assert group.options == GroupOptions(EARLIEST)
    assert world.store.find_group(group.group_id) == group
    assert world.store.declare_group(SHARE, group.options) == group


def test_options_at_their_limits_are_accepted() -> None:
    most = GroupOptions(strategy="s" * 255, session_expiry_s=MAX_SESSION_EXPIRY_S)
    assert GroupOptions.from_row("latest", most.to_row()) == most


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        ({"atomic": True, "on_data_loss": OnDataLoss.SKIP}, "cannot skip"),
        ({"atomic": True, "on_poison": OnPoison.SKIP}, "cannot skip messages that cannot be decoded"),
        ({"strategy": "s" * 256}, "1 to 255 printable characters"),
        ({"strategy": ""}, "strategy .*: it is"),
        *(({"session_expiry_s": wrong}, "session expiry .*: it is") for wrong in (-1, float("nan"), 1e9)),
    ],
)
def test_options_that_can_never_work_are_refused(wrong: dict[str, Any], rule: str) -> None:
    with pytest.raises(UsageError, match=rule):
        GroupOptions(**wrong)
    assert GroupOptions(strategy="s" * 255)


# --- starts -------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("P9")
def test_a_start_in_time_begins_with_the_next_block(world: World) -> None:
    begun = world.clock()
    busy, idle = world.add_space(shards=2)
    for _ in range(3):
        world.append(busy, 10)
        world.clock.advance(1)
    for seconds, offset in ((-5, 0), (0, 0), (0.5, 10), (1, 10), (2, 20), (2.000001, 30), (60, 30)):
        led = starting(world, StartingPosition.at_time(begun + round(seconds * 1_000_000)), seconds)
        assert positions(led) == {busy: offset, idle: 0}, seconds


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
    led = starting(world, StartingPosition.at_time(since))
    assert positions(led) == {across: 4, after: 0, current: 0}
    everything = starting(world, StartingPosition.at_time(0), "all")
    assert positions(everything) == {before: 0, across: 0, after: 0, current: 0}
    world.append(current, 1)
    (later,) = world.rollover(1)
    led.sync()
    assert positions(led)[later] == 0


def test_a_start_at_an_offset_is_at_most_each_head(world: World) -> None:
    (closed,) = world.add_space()
    world.append(closed, 100)
    long, short, empty = world.rollover(1, shards=3)
    world.append(long, 50)
    world.append(short, 3)
    for offset, reached in ((7, 7), (2**63 - 1, 50)):
        led = starting(world, StartingPosition.at_offset(offset), offset)
        assert positions(led) == {long: reached, short: 3, empty: 0}


# --- messages that are gone ---------------------------------------------------------------------------------------


@pytest.mark.conforms("W4")
def test_who_skips_finishes_what_is_gone_and_counts_it(world: World) -> None:
    led = world.led(4, starting_position=EARLIEST, on_data_loss=OnDataLoss.SKIP)
    free, held, consumed, given = led.streams
    for stream in led.streams:
        world.append(stream, 9)
    grants = {stream: led.grant(stream) for stream in (held, consumed)}
    grants[held].advance(4)
    grants[consumed].advance(9)
    (child,) = world.rollover(1, shards=1)
    led.sync()
    world.retire(1)
    assert outcome(led.ask(given)) == "refused, finished at 9"
    synced = led.sync()
    assert {stream: row.status for stream, row in synced.items()} == {
        free: "finished", held: "finished", consumed: "held",
    }  # fmt: skip
    assert synced[held].grant_id > grants[held].grant_id
    assert synced[held].borrower_id is None
    skips = led.history("skip")
    assert [(line.stream_id, line.position, line.is_forced, line.redelivery_end) for line in skips] == [
        (given, 0, False, None), (free, 0, False, None), (held, 4, False, None),
    ]  # fmt: skip
    assert [line.reason.split(", ")[1] for line in skips] == [f"{n} messages in all; skipped" for n in (9, 9, 5)]
    assert lost_messages(world, led) == {free: 9, held: 5, consumed: 0, given: 9, child: 0}
    grants[consumed].force_release()
    assert led.grant(child).row.position == 0, "its parents hold it back no more"


@pytest.mark.conforms("W4")
def test_each_group_has_its_own_policy(world: World) -> None:
    skips = world.led(starting_position=EARLIEST, on_data_loss=OnDataLoss.SKIP)
    fails = starting(world, EARLIEST)
    world.append(skips.stream, 2)
    world.rollover(1)
    world.retire(1)
    assert [led.sync()[skips.stream].status for led in (skips, fails)] == ["finished", "blocked"]
    assert fails.events() == [("block", 0, False)]
    assert lost_messages(world, fails)[skips.stream] == 0


# --- blocks that cannot be decoded ----------------------------------------------------------------------------------


@pytest.mark.conforms("W10")
@pytest.mark.parametrize(
    ("skips", "found", "lost"), [(False, "applied, blocked at 4", 0), (True, "applied, free at 6", 2)]
)
def test_at_poison_a_row_is_blocked_or_goes_on_behind(world: World, skips: bool, found: str, lost: int) -> None:
    held = world.granted(8, starting_position=EARLIEST)
    other = held.of(held.grant_id + 1).release(4, "it is garbage.", poison=6, may_skip=skips)
    assert outcome(other) == "refused, held at 0"
    result = held.release(4, "it is garbage.", 0.0, 4, poison=6, may_skip=skips)
    assert outcome(result) == found
    assert row_of(result).grant_id > held.grant_id
    line = held.led.history()[-1]
    said = "it is garbage. Skipped: [4, 6), 2 messages" if skips else "it is garbage."
    event = "skip" if skips else "block"
    assert (line.event, line.position, line.reason, line.redelivery_end) == (event, 4, said, None)
    assert lost_messages(world, held.led) == {held.stream: lost}


@pytest.mark.conforms("W10")
def test_skipping_the_last_block_finishes_a_stream(world: World) -> None:
    """Nothing is skipped beyond the head."""
    led = world.led(2, starting_position=EARLIEST)
    closed, other = (led.grant(stream) for stream in led.streams)
    world.append(closed.stream, 8)
    world.rollover(1)
    assert outcome(closed.release(6, "garbage", poison=8, may_skip=True)) == "applied, finished at 8"
    assert outcome(other.release(0, "garbage", poison=1, may_skip=True)) == "invalid, held at 0"


# --- orders -------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("A5")
def test_commands_are_stored_and_recorded_once(world: World) -> None:
    other = world.declare(Subscription.parse("$share/other/#"))
    world.store.apply_command(other.subscription, PauseGroup("theirs"))
    led = world.led()
    assert led.write(sync=True).desired_state == led.group.desired_state == GroupDesiredState()
    paused = world.store.apply_command(SHARE, PauseGroup("the sink is repaired"))
    assert paused is not None
    assert (paused.desired_state.pause_reason, paused.revision) == ("the sink is repaired", 1)
    assert world.store.apply_command(SHARE, PauseGroup("again")) == paused
    assert world.store.apply_command(SHARE, OverrideSessionWeight("s", 2.5)) == world.store.find_live_group(SHARE)
    found = world.store.find_group(led.group_id)
    assert found is not None
    assert found.desired_state == GroupDesiredState("the sink is repaired", (("s", 2.5),))
    assert led.write().desired_state is None
    assert led.write(sync=True).desired_state == found.desired_state
    world.store.apply_command(SHARE, ResumeGroup())
    world.store.apply_command(SHARE, OverrideSessionWeight("s", None))
    assert led.write(sync=True).desired_state == GroupDesiredState()
    lines = led.history("command")
    assert [line.reason for line in lines] == [
        "paused: the sink is repaired",
        "weight of session 's': 2.5",
        "resumed",
        "weight of session 's': as requested",
    ]
    assert {(line.stream_id, line.term, line.is_forced) for line in lines} == {(0, led.term, False)}
    unchanged = world.store.find_group(other.group_id)
    assert unchanged is not None
    assert unchanged.desired_state == GroupDesiredState("theirs")


def test_looking_for_a_group_creates_none(world: World) -> None:
    """Nor does a command to a group that is not there."""

    def found() -> list[Group | None]:
        return [world.store.find_live_group(SHARE), world.store.apply_command(SHARE, PauseGroup())]

    world.add_space()
    assert found() == [None, None]
    group = world.group()
    assert world.store.find_live_group(SHARE) == group
    world.store.delete_group(SHARE)
    assert found() == [None, None]


def test_commands_without_a_leader_are_recorded(world: World) -> None:
    world.add_space()
    group = world.declare()
    world.store.apply_command(SHARE, PauseGroup())
    (line,) = world.store.history(group.group_id)
    assert (line.event, line.reason, line.term) == ("command", "paused", 0)
    assert world.store.declare_group(SHARE, group.options).desired_state.pause_reason == ""
