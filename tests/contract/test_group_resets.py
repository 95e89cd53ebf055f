"""Resets on Postgres: what is planned is what is done, and leaders and holders are notified that it is over."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.errors import Conflict, InvalidEpoch, NotFound, UsageError
from sublet_protocol.domain.subscriptions import MAX_OFFSET, StartingPosition, Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin import live_reset
from sublet_storage.groups.admin.admin import send_command
from sublet_storage.groups.admin.progress_transfer import list_moved_streams, read_progress
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.admin.reset_transaction import count_held, plan_reset
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.desired_state import PauseGroup, ResumeGroup
from sublet_storage.groups.model.lending_reset import apply_reset
from sublet_storage.groups.model.lending_row import LendingRow, StreamFacts, end_unreadable
from sublet_storage.groups.model.records import Group, LendingStatus, OnDataLoss
from tests.contract.group_world import LEASE_S, TWO, Led, PostgresWorld, outcome
from tests.integration.log_kit import waiting_for_locks
from tests.kit import database_of, eventually

LONG_AGO, FAR = (ResetTarget.time(datetime(year, 1, 1, tzinfo=UTC)) for year in (2000, 9000))


def places(world: PostgresWorld, group: Group) -> dict[int, str]:
    """Return {stream: such as "free at 4"} of all rows."""
    asked = "select stream_id, status, position from lending where group_id = %s"
    found = world.connection.execute(asked, (group.group_id,))
    return {stream_id: f"{status} at {position}" for stream_id, status, position in found}


def consumed(led: Led, stream: int, position: int) -> None:
    """Granted, consumed up to there and handed back."""
    held = led.grant(stream)
    held.advance(position)
    held.release(position)


Halfway = tuple[PostgresWorld, Group, Led, int, int]


@pytest.fixture
def halfway(postgres: PostgresWorld) -> Halfway:
    """Two streams of ten messages, consumed up to 4, and to 10. An older group holds both at 2."""
    other = postgres.group(Subscription.parse("$share/other/#"))
    led = postgres.led(2)
    older = postgres.lead(other, streams=led.streams)
    older.sync()
    for stream, position in zip(led.streams, (4, 10), strict=True):
        postgres.append(stream, 10)
        older.grant(stream).advance(2)
        consumed(led, stream, position)
    return postgres, led.group, led, led.streams[0], led.streams[1]


@pytest.mark.conforms("A4")
def test_a_plan_shows_where_a_group_will_go_on(halfway: Halfway) -> None:
    world, group, _, first, second = halfway
    for target, expected in (
        (ResetTarget.earliest(), (0, 0)),
        (ResetTarget.latest(), (10, 10)),
        (ResetTarget.current(), (4, 10)),
        (ResetTarget.offset(7), (7, 7)),
        (ResetTarget.offset(11), (10, 10)),
        (ResetTarget.shift(-5), (0, 5)),
        (ResetTarget.shift(3), (7, 10)),
        (ResetTarget.shift(MAX_OFFSET), (10, 10)),
        (ResetTarget.shift(-MAX_OFFSET), (0, 0)),
        (LONG_AGO, (0, 0)),
        (FAR, (10, 10)),
    ):
        planned = plan_reset(world.connection, group, target)
        assert [(move.after, move.redelivered_count, move.skipped_count) for move in planned] == [
            (place, max(before - place, 0), max(place - before, 0))
            for before, place in zip((4, 10), expected, strict=True)
        ], target
    assert places(world, group) == {first: "free at 4", second: "free at 10"}, "to plan changes nothing"


@pytest.mark.conforms("A4")
@pytest.mark.parametrize("target", [ResetTarget.offset(7), ResetTarget.current()], ids=str)
def test_a_group_goes_on_from_where_it_is_reset_to(halfway: Halfway, target: ResetTarget) -> None:
    world, group, led, _, _ = halfway
    assert count_held(world.connection, group, ()) == 0
    planned = plan_reset(world.connection, group, target)
    assert world.reset(group, target) == {move.stream_id: (move.before, move.after) for move in planned}
    assert places(world, group) == {move.stream_id: f"free at {move.after}" for move in planned}
    assert led.write().has_stale_term, "whoever led has rows that are not true any more"
    lines = led.history("reset")
    assert [(line.stream_id, line.position, line.is_forced) for line in lines] == [
        (move.stream_id, move.after, False) for move in planned
    ]
    assert lines[0].reason == f"to {target}; was at 4"


@pytest.mark.conforms("A4")
def test_one_stream_may_be_reset_alone(halfway: Halfway) -> None:
    world, group, _, first, second = halfway
    assert world.reset(group, ResetTarget.shift(1), first) == {first: (4, 5)}
    assert world.reset(group, ResetTarget.offsets({second: 3})) == {second: (10, 3)}
    for target, streams, error, story in (
        (ResetTarget.offsets({second: 11}), (), UsageError, f"stream {second}: offset 11 is beyond its end, 10"),
        (ResetTarget.earliest(), (999,), NotFound, "stream 999 is none of"),
    ):
        with pytest.raises(error, match=story):
            world.reset(group, target, *streams)
        assert places(world, group) == {first: "free at 5", second: "free at 3"}


@pytest.mark.conforms("A4", "E33")
@pytest.mark.parametrize("is_noticed", [False, True])
@pytest.mark.parametrize("target", [ResetTarget.earliest(), ResetTarget.latest(), ResetTarget.current()], ids=str)
def test_a_reset_goes_past_what_is_gone(postgres: PostgresWorld, target: ResetTarget, is_noticed: bool) -> None:
    """Whether a leader has noticed the stream before retention took it, or not."""
    postgres.add_space()
    group = postgres.declare(on_data_loss=OnDataLoss.FAIL)
    (gone,) = postgres.rollover(1)
    postgres.append(gone, 3)
    (last,) = postgres.rollover(1)
    if is_noticed:
        postgres.lead(group).sync()
    postgres.retire(2)
    assert postgres.reset(group, target)[gone] == (0 if is_noticed else None, 3)
    led = postgres.lead(group)
    led.sync()
    assert led.row(last).parents == ()
    assert "blocked" not in [row.status for row in led.rows().values()]


@pytest.mark.conforms("A5", "E7")
def test_a_granted_stream_is_reset_by_force_alone(halfway: Halfway) -> None:
    """Its grant is then over; the leader before may answer pings of holders of others till its lease would be."""
    world, group, led, first, second = halfway
    held = led.grant(first)
    with pytest.raises(Conflict, match=f"1 of its streams are granted.* the first is {first}"):
        world.reset(group, ResetTarget.earliest())
    assert not led.write().has_stale_term, "nothing was done"
    world.reset(group, ResetTarget.earliest(), force=True)
    assert places(world, group) == {first: "free at 0", second: "free at 0"}
    (forced,) = [line for line in led.history("reset") if line.is_forced]
    assert (forced.stream_id, forced.grant_id, forced.redelivery_end) == (first, held.grant_id, 10)
    world.clock.advance(1)
    assert world.store.claim(group.group_id, TWO, LEASE_S).previous_leader_s == LEASE_S - 1
    assert outcome(held.under(world.lead(group, TWO)).advance(9)) == "refused, free at 0"


@pytest.mark.conforms("A4")
@pytest.mark.parametrize("force", [False, True])
def test_a_locked_row_is_named_with_who_locks_it(postgres: PostgresWorld, force: bool) -> None:
    """Not with who waits for that, in an older transaction."""
    first, second = postgres.add_space(shards=2)
    group, lock = postgres.declare(), f"select from sublet.lending where stream_id = {second} for update"
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(postgres.url) as waiting,
        psycopg.connect(postgres.url) as user,
    ):
        waiting.execute("select")
        user.execute(lock)
        pool.submit(waiting.execute, lock)
        eventually(lambda: waiting_for_locks(postgres.url))
        named = f"the first is {second}, have a row that an open transaction keeps locked: process"
        with pytest.raises(Conflict, match=f"{named} {user.info.backend_pid}"):
            postgres.reset(group, ResetTarget.latest(), force=force)
    assert set(postgres.reset(group, ResetTarget.latest(), force=force)) == {first, second}


def test_while_it_waits_a_reset_holds_up_nobody(halfway: Halfway) -> None:
    """Rollovers, retention and new groups would wait with it."""
    world, group, *_ = halfway
    locked = "select from pg_locks where relation = 'space'::regclass and mode = 'ShareLock'"
    with connect(world.url) as leader, connect(world.url) as looking, ThreadPoolExecutor(1) as pool:
        with leader.transaction():
            leadership.lock(leader, (group.group_id,), None)
            resetting = pool.submit(world.reset, group, ResetTarget.earliest())
            eventually(lambda: waiting_for_locks(world.url))
            assert looking.execute(locked).rowcount == 0
        assert resetting.result()


def with_a_finished_parent(postgres: PostgresWorld) -> tuple[Led, int, int]:
    """Return a group with a stream that it has consumed to its end, at 5, and that stream's child."""
    held = postgres.granted(5)
    (child,) = postgres.rollover(1)
    held.advance(5)
    held.led.sync()
    return held.led, held.stream, child


@pytest.mark.conforms("A4")
def test_finished_streams_go_again_parents_first(postgres: PostgresWorld) -> None:
    led, parent, child = with_a_finished_parent(postgres)
    postgres.append(child, 3)
    consumed(led, child, 2)
    assert places(postgres, led.group) == {parent: "finished at 5", child: "free at 2"}
    postgres.reset(led, ResetTarget.earliest())
    assert places(postgres, led.group) == {parent: "free at 0", child: "free at 0"}
    led = postgres.lead(led.group)
    assert led.ask(child).outcome == "refused", "its parent is not consumed any more"
    led.grant(parent).force_release("left")
    postgres.reset(led, ResetTarget.latest())
    assert places(postgres, led.group) == {parent: "finished at 5", child: "free at 3"}


@pytest.mark.conforms("A4")
def test_what_nobody_holds_is_not_taken_back(postgres: PostgresWorld) -> None:
    """Although it comes after what is unfinished again, and another group holds it."""
    led, parent, child = with_a_finished_parent(postgres)
    postgres.lead(postgres.declare(Subscription.parse("$share/other/#")), streams=(child,)).grant(child)
    postgres.reset(led, ResetTarget.offsets({parent: 0}))
    assert [line.stream_id for line in led.history("reset")] == [parent]


@pytest.mark.conforms("A4")
def test_a_group_goes_back_to_what_was_there_before_it(postgres: PostgresWorld) -> None:
    (parent,) = postgres.add_space()
    postgres.append(parent, 5)
    (child,) = postgres.rollover(1)
    group = postgres.declare(starting_position=StartingPosition.LATEST)
    assert set(places(postgres, group)) == {child}
    assert postgres.reset(group, ResetTarget.earliest()) == {parent: (None, 0), child: (0, 0)}
    assert places(postgres, group) == {parent: "free at 0", child: "free at 0"}


PLACES = [
    (ResetTarget.current(), {"finished": 5, "unfinished": 6, "later": 0}),
    (ResetTarget.shift(0), {"finished": 5, "unfinished": 6, "later": 0}),
    (ResetTarget.shift(-2), {"finished": 3, "unfinished": 4, "later": 0}),
    (ResetTarget.shift(2), {"finished": 5, "unfinished": 8, "later": 2}),
    (ResetTarget.earliest(), {"former": 0, "finished": 0, "unfinished": 0, "later": 0}),
    (ResetTarget.latest(), {"finished": 5, "unfinished": 10, "later": 7}),
    (ResetTarget.offset(2), {"former": 2, "finished": 2, "unfinished": 2, "later": 2}),
    (LONG_AGO, {"former": 0, "finished": 0, "unfinished": 0, "later": 0}),
]


@pytest.mark.conforms("A4")
@pytest.mark.parametrize(("target", "expected"), PLACES[3:6], ids=str)
def test_a_place_in_history_brings_what_ended_before(
    postgres: PostgresWorld, target: ResetTarget, expected: dict[str, int]
) -> None:
    """A place that is counted from where the group is, or its end, does not."""
    (former,) = postgres.add_space()
    postgres.append(former, 3)
    (finished,) = postgres.rollover(1)
    led = postgres.lead(postgres.declare(starting_position=StartingPosition.LATEST))
    postgres.append(finished, 5)
    held = led.grant(finished)
    (unfinished,) = postgres.rollover(1)
    held.advance(5)
    led.sync()
    postgres.append(unfinished, 10)
    consumed(led, unfinished, 6)
    (later,) = postgres.rollover(1)
    postgres.append(later, 7)
    names = {former: "former", finished: "finished", unfinished: "unfinished", later: "later"}
    for planned, places_then in PLACES:
        moves = plan_reset(postgres.connection, led.group, planned)
        assert {names[move.stream_id]: move.after for move in moves} == places_then, planned
    postgres.reset(led, target)
    postgres.lead(led.group).sync()
    found = {names[stream]: int(place.split()[-1]) for stream, place in places(postgres, led.group).items()}
    assert found == expected, "and whoever leads next gives nothing else"


@pytest.mark.conforms("A4")
def test_a_plan_passes_what_has_nothing_for_the_group(postgres: PostgresWorld) -> None:
    """The newest generation where that was over when the group began, and a later one that stayed empty."""
    (first,) = postgres.add_space()
    (before,) = postgres.add_space("before", "orders/before/#")
    postgres.append(before, 3)
    postgres.drop_space(2)
    group = postgres.declare(starting_position=StartingPosition.LATEST)
    postgres.rollover(1)
    (last,) = postgres.rollover(1)
    moves = plan_reset(postgres.connection, group, ResetTarget.latest())
    assert {move.stream_id for move in moves} == {first, last}


@pytest.mark.conforms("A4")
def test_what_is_not_given_counts_as_skipped(postgres: PostgresWorld) -> None:
    """Also in streams that came later."""
    (before,) = postgres.add_space()
    postgres.append(before, 5)
    (first,) = postgres.rollover(1)
    group = postgres.declare(starting_position=StartingPosition.LATEST)
    postgres.append(first, 10, 1)
    (new,) = postgres.rollover(1)
    postgres.append(new, 7)
    latest, offset, epoch = (
        {move.stream_id: move for move in plan_reset(postgres.connection, group, target)}
        for target in (ResetTarget.latest(), ResetTarget.offset(2), ResetTarget.at_epoch(1))
    )
    counts = {stream: (move.before, move.skipped_count) for stream, move in latest.items()}
    assert counts == {first: (0, 10), new: (None, 7)}
    assert {stream: move.skipped_count for stream, move in offset.items()} == {before: 0, first: 2, new: 2}
    places_then = {stream: (move.after, move.has_epochs) for stream, move in epoch.items()}
    assert places_then == {first: (0, True), new: (7, False)}


@pytest.mark.conforms("A4")
def test_a_reset_to_the_end_passes_unnoticed_streams(postgres: PostgresWorld) -> None:
    """Also those that came and ended since a leader looked."""
    (first,) = postgres.add_space()
    group = postgres.declare()
    (second,) = postgres.rollover(1)
    postgres.append(second, 100)
    (third,) = postgres.rollover(1)
    postgres.append(third, 50)
    moves = plan_reset(postgres.connection, group, ResetTarget.latest())
    assert {move.stream_id: move.skipped_count for move in moves} == {first: 0, second: 100, third: 50}
    postgres.reset(group, ResetTarget.latest())
    postgres.lead(group).sync()
    ends = [place.rpartition(" at ")[2] for _, place in sorted(places(postgres, group).items())]
    assert ends == ["0", "100", "50"]


@pytest.mark.conforms("A4")
def test_a_stream_that_was_blocked_is_granted_again(postgres: PostgresWorld) -> None:
    led = postgres.led()
    postgres.append(led.stream, 5)
    for _ in range(5):
        led.grant().force_release("died")
    assert places(postgres, led.group) == {led.stream: "blocked at 0"}
    postgres.reset(led, ResetTarget.current())
    assert places(postgres, led.group) == {led.stream: "free at 0"}
    postgres.lead(led.group, streams=led.streams).grant().force_release("died")
    assert places(postgres, led.group) == {led.stream: "free at 0"}, "its losses are counted from the beginning"
    postgres.reset(led, ResetTarget.shift(1))
    assert places(postgres, led.group) == {led.stream: "free at 1"}


@pytest.mark.conforms("A4", "S5")
def test_a_reset_by_epoch_begins_at_its_first_block(postgres: PostgresWorld) -> None:
    """An atomic group goes on with whole epochs."""
    atomic = postgres.led(completed=1, atomic=True, starting_position=StartingPosition.EARLIEST)
    plain = postgres.group(Subscription.parse("$share/plain/#"))
    for epoch in (1, 2, 3, 2):
        postgres.append(atomic.stream, 10, epoch)
    postgres.complete(5)
    for epoch, offset in ((3, 20), (9, 40)):
        assert plan_reset(postgres.connection, plain, ResetTarget.at_epoch(epoch))[0].after == offset
    postgres.connection.execute("update space set epoch_dimensions = 1")
    for target, offset, epoch in ((ResetTarget.at_epoch(2), 10, 2), (ResetTarget.latest(), 40, 5)):
        postgres.reset(atomic, target)
        led = postgres.lead(atomic.group)
        assert led.row(atomic.stream).consumed == ConsumedFrontier(offset, LowerFrontier(((epoch,),)))
    assert led.write(sync=True).epochs[0].consumed == LowerFrontier(((5,),))


@pytest.mark.conforms("A4")
def test_each_stream_is_planned_by_itself(postgres: PostgresWorld) -> None:
    """Not by the epochs of another one of its generation. What another space has, or was gone before, is none of it."""
    postgres.add_space("other", "other/#")
    postgres.connection.execute("update space set epoch_dimensions = 2")
    first, second = postgres.add_space(shards=2)
    (gone,) = postgres.add_space("before", "orders/before/#")
    postgres.append(gone, 3)
    postgres.rollover(3)
    postgres.retire(3)
    group = postgres.declare(starting_position=StartingPosition.LATEST)
    for stream, count, *epochs in ((first, 10, 1), (second, 5), (first, 10, 2)):
        postgres.append(stream, count, *epochs)
    moves = {each.stream_id: each for each in plan_reset(postgres.connection, group, ResetTarget.at_epoch(2))}
    assert len(moves) == 3
    assert [(moves[each].after, moves[each].has_epochs) for each in (first, second)] == [(10, True), (5, False)]
    with pytest.raises(NotFound, match=f"stream {gone} is none of"):
        plan_reset(postgres.connection, group, ResetTarget.offsets({gone: 3}))


@pytest.mark.conforms("A4", "S5")
def test_no_reset_tears_an_atomic_groups_epochs(postgres: PostgresWorld) -> None:
    led = postgres.led(completed=1, atomic=True, starting_position=StartingPosition.EARLIEST)
    postgres.append(led.stream, 10, 1)
    for target, streams in (
        (ResetTarget.current(), ()),
        (ResetTarget.shift(1), ()),
        (ResetTarget.offsets({led.stream: 3}), ()),
        (ResetTarget.earliest(), led.streams),
    ):
        with pytest.raises(UsageError, match="is atomic"):
            postgres.reset(led, target, *streams)
    postgres.connection.execute("update space set epoch_dimensions = 1")
    with pytest.raises(InvalidEpoch, match="have 1 number, and this one has 2"):
        postgres.reset(led, ResetTarget.at_epoch((3, 1)))
    assert places(postgres, led.group) == {led.stream: "free at 0"}


@pytest.mark.conforms("A4")
def test_initial_frontiers_have_epochs_of_their_space(postgres: PostgresWorld) -> None:
    """Also where the epoch of a reset is shorter, and no stream of the space is left: else it is refused."""
    led = postgres.led(atomic=True)
    postgres.streams.lowers[1] = LowerFrontier(((3, 1),))
    postgres.publish_catalogue()
    postgres.reset(led, ResetTarget.at_epoch(7))
    (frontier,) = postgres.lead(led.group).write(sync=True).epochs
    assert frontier.consumed == LowerFrontier(((3, 1),))


@pytest.mark.conforms("A4")
def test_a_reset_of_given_streams_touches_no_other(postgres: PostgresWorld) -> None:
    """Not even one that is gone."""
    led = postgres.led()
    gone, group = led.stream, led.group
    postgres.append(gone, 5)
    (child,) = postgres.rollover(1)
    postgres.connection.execute("insert into lending (group_id, stream_id, position) values (1, %s, 0)", (child,))
    postgres.append(child, 4)
    postgres.retire(1)
    postgres.connection.execute("update lending set status = 'blocked', position = 7 where stream_id = %s", (gone,))
    assert postgres.reset(group, ResetTarget.offsets({child: 2})) == {child: (0, 2)}
    assert postgres.reset(group, ResetTarget.current(), child) == {child: (2, 2)}, "another is beyond its end"
    with pytest.raises(UsageError, match=f"stream {gone}: retention has taken offset 3"):
        postgres.reset(group, ResetTarget.offsets({gone: 3}))
    assert places(postgres, group)[gone] == "blocked at 7"
    moved = postgres.reset(group, ResetTarget.earliest())
    assert moved == {gone: (7, 5), child: (2, 0)}, "it begins behind what is gone"


@pytest.mark.conforms("A4")
def test_a_group_deleted_meanwhile_gets_no_rows(postgres: PostgresWorld) -> None:
    postgres.add_space()
    group = postgres.declare()
    postgres.declare(Subscription.parse("$share/other/#"))
    postgres.store.delete_group(group.subscription)
    with pytest.raises(NotFound):
        postgres.reset(group, ResetTarget.earliest())
    assert places(postgres, group) == {}


def test_targets_that_are_none_are_refused() -> None:
    with pytest.raises(UsageError, match="offset -1"):
        ResetTarget.offset(-1)
    with pytest.raises(UsageError, match="no time zone"):
        ResetTarget.time(datetime(2026, 1, 1))  # noqa: DTZ001
    with pytest.raises(InvalidEpoch):
        ResetTarget.at_epoch("x")
    with pytest.raises(UsageError, match="no stream is given"):
        ResetTarget.offsets({})
    with pytest.raises(UsageError, match="stream 0, offset 1"):
        ResetTarget.offsets({0: 1})
    with pytest.raises(UsageError, match="no stream is so long"):
        ResetTarget.shift(2**64)


def pause_reason(store: PostgresGroupStore, group: Group) -> str | None:
    found = store.find_group(group.group_id)
    assert found is not None
    return found.desired_state.pause_reason


@pytest.mark.conforms("A4", "A5")
@pytest.mark.parametrize("when", ["before", "as it begins", "meanwhile", "never"])
def test_an_operators_pause_outlives_a_reset(
    postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    group = postgres.group(Subscription.parse("$share/g/#"))
    look = PostgresGroupStore.find_live_group

    def pause(now: str) -> None:
        if now == when:
            send_command(postgres.url, group.subscription, PauseGroup("repairs"))

    def look_and_be_slow(store: PostgresGroupStore, wanted: Subscription) -> Group | None:
        found = look(store, wanted)
        monkeypatch.setattr(PostgresGroupStore, "find_live_group", look)
        pause("as it begins")
        return found

    pause("before")
    monkeypatch.setattr(PostgresGroupStore, "find_live_group", look_and_be_slow)
    with live_reset.pause_during_reset(postgres.url, group, ResetTarget("earliest")):
        pause("meanwhile")
        assert pause_reason(postgres.store, group) is not None
    assert pause_reason(postgres.store, group) == (None if when == "never" else "repairs")


@pytest.mark.conforms("A5")
def test_resuming_the_group_ends_a_waiting_reset(halfway: Halfway) -> None:
    world, group, led, first, _ = halfway
    led.grant(first)
    world.lead(world.group(Subscription.parse("$share/another/#"), StartingPosition.EARLIEST)).grant(first)
    found = places(world, group)

    def resume(held: int) -> None:
        assert held == 1
        send_command(world.url, group.subscription, ResumeGroup())

    waits: dict[str, Any] = {"force": False, "drain_timeout_s": 20.0, "waiting": resume}
    with pytest.raises(Conflict, match=r"it was resumed .* nothing was changed.*groups history"):
        live_reset.reset_live_group(world.url, world.connection, group, ResetTarget.earliest(), (), **waits)
    assert places(world, group) == found
    assert pause_reason(world.store, group) is None


@pytest.mark.conforms("A5")
def test_a_group_made_anew_is_not_reset(postgres: PostgresWorld) -> None:
    former = postgres.declare()
    postgres.store.delete_group(former.subscription)
    group = postgres.declare()
    with (
        pytest.raises(NotFound, match="was deleted and made anew meanwhile"),
        live_reset.pause_during_reset(postgres.url, former, ResetTarget.earliest()),
    ):
        pass
    assert pause_reason(postgres.store, group) is None


@pytest.mark.conforms("A5")
@pytest.mark.parametrize(("sync_interval_s", "is_too_short"), [(5.0, True), (0.0, False)])
def test_a_wait_that_is_too_short_is_named(
    halfway: Halfway, monkeypatch: pytest.MonkeyPatch, sync_interval_s: float, is_too_short: bool
) -> None:
    """A leader reads of a pause after that interval at the latest."""
    world, group, led, first, _ = halfway
    led.grant(first)
    monkeypatch.setattr(live_reset, "LEADER_SYNC_INTERVAL_S", sync_interval_s)
    waits: dict[str, Any] = {"force": False, "drain_timeout_s": 0.01}
    with pytest.raises(Conflict, match="1 of its streams are granted") as refused:
        live_reset.reset_live_group(world.url, world.connection, group, ResetTarget.earliest(), (), **waits)
    assert ("wait for longer than 0.01 s" in str(refused.value)) is is_too_short


@pytest.mark.conforms("A5")
def test_the_running_reset_is_named(postgres: PostgresWorld) -> None:
    """Not that of another group, nor of a group with the same number in another database."""
    groups = [postgres.declare(Subscription.parse(f"$share/{name}/#")) for name in "abcd"]
    guards = "select pid from pg_stat_activity where application_name = 'sublet reset' and datname = current_database()"
    locks = "select classid::int, objid::int from pg_locks where locktype = 'advisory' and pid = any(%s)"
    pids: list[int] = []
    with ExitStack() as stack:
        before = stack.enter_context(psycopg.connect(database_of(postgres.url, "postgres")))
        for group in groups:
            stack.enter_context(live_reset.hold_reset_lock(postgres.url, group))
            pids += [pid for (pid,) in postgres.connection.execute(guards) if pid not in pids]
        after = stack.enter_context(psycopg.connect(database_of(postgres.url, "postgres")))
        for lock in postgres.connection.execute(locks, (pids,)).fetchall():
            for elsewhere in (before, after):
                elsewhere.execute("select pg_advisory_xact_lock_shared(%s, %s)", lock)
        for group, pid in zip(groups, pids, strict=True):
            with (
                pytest.raises(Conflict, match=f"it is being reset already by database user .*, process {pid} of"),
                live_reset.hold_reset_lock(postgres.url, group),
            ):
                pass


@pytest.mark.parametrize("timeout", ["idle_in_transaction_session_timeout", "transaction_timeout"])
def test_no_timeout_ends_the_guard_of_a_reset(postgres: PostgresWorld, timeout: str) -> None:
    """Although it ends a transaction that began later."""
    if not postgres.connection.execute("select from pg_settings where name = %s", (timeout,)).fetchall():
        pytest.skip(f"the server has no {timeout}")
    postgres.connection.execute(f'alter database "{postgres.connection.info.dbname}" set {timeout} = 200')
    alive = "select application_name from pg_stat_activity where application_name in ('sublet reset', 'later')"
    with (
        live_reset.hold_reset_lock(postgres.url, postgres.group()),
        closing(psycopg.connect(postgres.url, application_name="later")) as later,
    ):
        later.execute("select")
        eventually(lambda: ("later",) not in postgres.connection.execute(alive).fetchall())
        assert postgres.connection.execute(alive).fetchall() == [("sublet reset",)]


@pytest.mark.conforms("W6")
def test_what_another_space_took_over_is_not_reset(postgres: PostgresWorld) -> None:
    """An open stream that is finished: all that the group matches there comes by the other space's streams."""
    postgres.add_space()
    group = postgres.declare()
    postgres.connection.execute("update lending set status = 'finished'")
    for target in (ResetTarget.earliest(), ResetTarget.current()):
        postgres.reset(group, target)
        assert postgres.connection.execute("select status from lending").fetchall() == [("finished",)]


def in_the_shadow(postgres: PostgresWorld, fate: str) -> tuple[Led, int, int]:
    """Return a group, a stream of its own at 2, and one of the default space, with three messages for others, which it
    noticed while that was open; then it became what `fate` says."""
    postgres.add_space()
    (_, own) = postgres.add_space("orders", "orders/#", rolls=(1,))
    led = postgres.lead(postgres.declare(Subscription.parse("$share/g/orders/#")))
    (shadowed,) = postgres.rollover(1)
    led.sync()
    postgres.append(shadowed, 3)
    postgres.append(own, 5)
    consumed(led, own, 2)
    if fate != "open":
        postgres.rollover(1)
        led.sync()
    if fate == "gone":
        postgres.retire(postgres.streams.streams[shadowed].generation.generation_id)
    assert places(postgres, led.group)[shadowed] == "finished at 0"
    return led, own, shadowed


@pytest.mark.conforms("A4", "W6")
@pytest.mark.parametrize("fate", ["open", "closed", "gone"])
def test_what_was_exported_can_be_reset_to(postgres: PostgresWorld, fate: str) -> None:
    """It has nothing of a shadow; and what has, such as what `describe` shows, changes nothing there."""
    led, own, shadowed = in_the_shadow(postgres, fate)
    exported = {each.stream_id: each.position for each in read_progress(postgres.connection, led.group).positions}
    assert exported == {own: 2}
    for offsets in (exported, {**exported, shadowed: 0}):
        postgres.reset(led, ResetTarget.latest(), own)
        assert postgres.reset(led, ResetTarget.offsets(offsets)) == {own: (5, 2)}
        assert places(postgres, led.group)[own] == "free at 2"
        assert places(postgres, led.group)[shadowed] == "finished at 0"


@pytest.mark.conforms("A4", "W6")
def test_an_empty_shadow_that_ended_is_no_move(postgres: PostgresWorld) -> None:
    postgres.add_space()
    postgres.add_space("orders", "orders/#", rolls=(1,))
    led = postgres.lead(postgres.declare(Subscription.parse("$share/g/orders/#")))
    postgres.rollover(1)
    led.sync()
    exported = read_progress(postgres.connection, led.group)
    postgres.rollover(1)
    led.sync()
    assert read_progress(postgres.connection, led.group) != exported
    assert list_moved_streams(postgres.connection, led.group, exported) == []


@pytest.mark.conforms("A4", "W6")
@pytest.mark.parametrize("fate", ["open", "closed", "gone"])
@pytest.mark.parametrize(
    "target",
    [
        ResetTarget.current(),
        ResetTarget.shift(-1),
        ResetTarget.earliest(),
        ResetTarget.latest(),
        ResetTarget.offset(1),
        LONG_AGO,
        ResetTarget.at_epoch(1),
    ],
    ids=str,
)
def test_what_lay_in_a_shadow_stays_finished(postgres: PostgresWorld, target: ResetTarget, fate: str) -> None:
    """Also when it is closed: it has nothing for the group, which would have to read through it, and keep it."""
    led, own, shadowed = in_the_shadow(postgres, fate)
    assert set(postgres.reset(led, target)) == {own}
    assert places(postgres, led.group)[shadowed] == "finished at 0"
    with pytest.raises(NotFound, match=f"stream {shadowed} is none of"):
        postgres.reset(led, target, shadowed)


@pytest.mark.conforms("E34")
def test_who_held_a_blocked_stream_may_not_know() -> None:
    """After a reset its next holder waits for that, as for a grant that was ended by the reset itself."""
    row = LendingRow(1, 2, LendingStatus.HELD, 5, grant_id=7)
    stream = StreamFacts(2, 1, 0, 1, head=0, is_closed=False, is_gone=False)
    blocked = end_unreadable(row, stream, 1_000, OnDataLoss.FAIL)
    assert blocked is not None
    assert blocked.row.status is LendingStatus.BLOCKED
    assert apply_reset(blocked.row, stream, 0, "reset", 2_000).row.held_until_us == 1_000
