"""Resets on Postgres: what is planned is what is done, and leaders and holders are notified that it is over."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import psycopg
import pytest

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.errors import Conflict, InvalidEpoch, NotFound, UsageError
from sublet_protocol.domain.subscriptions import MAX_OFFSET, Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups.admin import live_reset
from sublet_storage.groups.admin.admin import send_command
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.admin.reset_transaction import plan_reset
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model import records
from sublet_storage.groups.model.desired_state import PauseGroup, ResumeGroup
from sublet_storage.groups.model.lending_reset import apply_reset
from sublet_storage.groups.model.lending_row import LendingRow, StreamFacts, end_unreadable
from tests.contract.group_world import BLOCKED, FINISHED, FREE, REFUSED, PostgresWorld, grant, granted, outcome
from tests.kit import eventually

WAITING = "select from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
PLAIN = Subscription.parse("$share/plain/#")


def places(world: PostgresWorld, group: records.Group) -> dict[int, tuple[records.LendingStatus, int]]:
    found = world.connection.execute(
        "select stream_id, status, position from lending where group_id = %s", (group.group_id,)
    )
    return {stream_id: (records.LendingStatus(status), position) for stream_id, status, position in found}


def consumed(world: PostgresWorld, group: records.Group, term: int, stream: int, position: int) -> None:
    """Granted, consumed up to there and handed back."""
    held = granted(world, group, term, stream)
    world.apply(group, term, records.AdvancePosition(stream, held.grant_id, position))
    row = world.row(group, term, stream)
    if row.status is records.LendingStatus.HELD:
        world.apply(group, term, records.ForceRelease(stream, row.grant_id, "left"))


Halfway = tuple[PostgresWorld, records.Group, int, tuple[int, ...]]


@pytest.fixture
def halfway(postgres: PostgresWorld) -> Halfway:
    """Two streams of ten messages, consumed up to 4, and to 10."""
    group, term, streams = postgres.led(2)
    for stream, position in zip(streams, (4, 10), strict=True):
        postgres.append(stream, 10)
        consumed(postgres, group, term, stream, position)
    return postgres, group, term, streams


@pytest.mark.conforms("A4")
def test_a_plan_shows_where_a_group_will_go_on(halfway: Halfway) -> None:
    world, group, _, streams = halfway
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
        (ResetTarget.time(datetime(2000, 1, 1, tzinfo=UTC)), (0, 0)),
        (ResetTarget.time(datetime(9000, 1, 1, tzinfo=UTC)), (10, 10)),
    ):
        planned = plan_reset(world.connection, group, target)
        assert [(move.after, move.redelivered_count, move.skipped_count) for move in planned] == [
            (place, max(before - place, 0), max(place - before, 0))
            for before, place in zip((4, 10), expected, strict=True)
        ], target
    assert places(world, group) == {streams[0]: (FREE, 4), streams[1]: (FREE, 10)}, "to plan changes nothing"


@pytest.mark.conforms("A4")
@pytest.mark.parametrize("target", [ResetTarget.offset(7), ResetTarget.current()], ids=str)
def test_a_group_goes_on_from_where_it_is_reset_to(halfway: Halfway, target: ResetTarget) -> None:
    world, group, term, _ = halfway
    planned = plan_reset(world.connection, group, target)
    assert world.reset(group, target) == {move.stream_id: (move.before, move.after) for move in planned}
    assert places(world, group) == {move.stream_id: (FREE, move.after) for move in planned}
    assert world.write(group, term).has_stale_term, "whoever led has rows that are not true any more"
    lines = [line for line in world.store.history(group.group_id) if line.event == "reset"]
    assert [(line.stream_id, line.position, line.is_forced) for line in lines] == [
        (move.stream_id, move.after, False) for move in planned
    ]
    assert lines[0].reason == f"to {target}; was at 4"


@pytest.mark.conforms("A4")
def test_one_stream_may_be_reset_alone(halfway: Halfway) -> None:
    world, group, _, (first, second) = halfway
    assert world.reset(group, ResetTarget.shift(1), first) == {first: (4, 5)}
    assert world.reset(group, ResetTarget.offsets({second: 3})) == {second: (10, 3)}
    assert places(world, group) == {first: (FREE, 5), second: (FREE, 3)}
    with pytest.raises(UsageError, match=f"stream {second}: offset 11 is beyond its end, 10"):
        world.reset(group, ResetTarget.offsets({second: 11}))
    with pytest.raises(NotFound, match="stream 999 is none of"):
        world.reset(group, ResetTarget.earliest(), 999)
    assert places(world, group) == {first: (FREE, 5), second: (FREE, 3)}


@pytest.mark.conforms("A4", "E33")
@pytest.mark.parametrize("is_noticed", [False, True])
@pytest.mark.parametrize("target", [ResetTarget.earliest(), ResetTarget.latest(), ResetTarget.current()], ids=str)
def test_a_reset_goes_past_what_is_gone(postgres: PostgresWorld, target: ResetTarget, is_noticed: bool) -> None:
    """Whether a leader has noticed the stream before retention took it, or not."""
    postgres.add_space()
    group = postgres.declare(on_data_loss=records.OnDataLoss.FAIL)
    (gone,) = postgres.rollover(1)
    postgres.append(gone, 3)
    (last,) = postgres.rollover(1)
    if is_noticed:
        postgres.write(group, postgres.lead(group), renew=True)
    postgres.retire(2)
    assert postgres.reset(group, target)[gone] == (0 if is_noticed else None, 3)
    term = postgres.lead(group)
    postgres.write(group, term, renew=True)
    assert postgres.row(group, term, last).parents == ()
    assert not [row for row in postgres.store.load(group.group_id, term) if row.status is BLOCKED]


@pytest.mark.conforms("A5", "E7")
def test_a_granted_stream_is_reset_by_force_alone(halfway: Halfway) -> None:
    """Its grant is then over."""
    world, group, term, (first, second) = halfway
    held = granted(world, group, term, first)
    with pytest.raises(Conflict, match=f"1 of its streams are granted.* the first is {first}"):
        world.reset(group, ResetTarget.earliest())
    assert not world.write(group, term).has_stale_term, "nothing was done"
    world.reset(group, ResetTarget.earliest(), force=True)
    assert places(world, group) == {first: (FREE, 0), second: (FREE, 0)}
    (forced,) = [line for line in world.store.history(group.group_id) if line.event == "reset" and line.is_forced]
    assert (forced.stream_id, forced.grant_id, forced.redelivery_end) == (first, held.grant_id, 10)
    term = world.lead(group)
    assert outcome(world.apply(group, term, records.AdvancePosition(first, held.grant_id, 9))) == (REFUSED, FREE, 0)


@pytest.mark.conforms("A4")
@pytest.mark.parametrize("force", [False, True])
def test_a_locked_row_is_named_with_who_locks_it(postgres: PostgresWorld, force: bool) -> None:
    first, second = postgres.add_space(shards=2)
    group = postgres.declare()
    with psycopg.connect(postgres.url) as user:
        user.execute("select from sublet.lending where stream_id = %s for update", (second,))
        named = f"the first is {second}, have a row that an open transaction keeps locked: process"
        with pytest.raises(Conflict, match=f"{named} {user.info.backend_pid}"):
            postgres.reset(group, ResetTarget.latest(), force=force)
    assert set(postgres.reset(group, ResetTarget.latest(), force=force)) == {first, second}


def test_while_it_waits_a_reset_holds_up_nobody(halfway: Halfway) -> None:
    """Rollovers, retention and new groups would wait with it."""
    world, group, _, _ = halfway
    locked = "select from pg_locks where relation = 'space'::regclass and mode = 'ShareLock'"
    with connect(world.url) as leader, connect(world.url) as looking, ThreadPoolExecutor(1) as pool:
        with leader.transaction():
            leadership.lock(leader, (group.group_id,), None)
            resetting = pool.submit(world.reset, group, ResetTarget.earliest())
            eventually(lambda: looking.execute(WAITING).rowcount)
            assert looking.execute(locked).rowcount == 0
        assert resetting.result()


@pytest.mark.conforms("A4")
def test_finished_streams_go_again_parents_first(postgres: PostgresWorld) -> None:
    group, term, parent, held = postgres.granted(5)
    (child,) = postgres.rollover(1)
    postgres.apply(group, term, records.AdvancePosition(parent, held.grant_id, 5))
    postgres.write(group, term, renew=True)
    postgres.append(child, 3)
    consumed(postgres, group, term, child, 2)
    assert places(postgres, group) == {parent: (FINISHED, 5), child: (FREE, 2)}
    postgres.reset(group, ResetTarget.earliest())
    assert places(postgres, group) == {parent: (FREE, 0), child: (FREE, 0)}
    term = postgres.lead(group)
    assert postgres.apply(group, term, grant(child)).outcome == "refused", "its parent is not consumed any more"
    granted(postgres, group, term, parent)
    postgres.apply(group, term, records.ForceRelease(parent, postgres.row(group, term, parent).grant_id, "left"))
    postgres.reset(group, ResetTarget.latest())
    assert places(postgres, group) == {parent: (FINISHED, 5), child: (FREE, 3)}


@pytest.mark.conforms("A4")
def test_a_group_goes_back_to_what_was_there_before_it(postgres: PostgresWorld) -> None:
    (parent,) = postgres.add_space()
    postgres.append(parent, 5)
    (child,) = postgres.rollover(1)
    group = postgres.declare(starting_position=records.StartingPosition.LATEST)
    assert set(places(postgres, group)) == {child}
    assert postgres.reset(group, ResetTarget.earliest()) == {parent: (None, 0), child: (0, 0)}
    assert places(postgres, group) == {parent: (FREE, 0), child: (FREE, 0)}


PLACES = [
    (ResetTarget.current(), {"finished": 5, "unfinished": 6, "later": 0}),
    (ResetTarget.shift(0), {"finished": 5, "unfinished": 6, "later": 0}),
    (ResetTarget.shift(-2), {"finished": 3, "unfinished": 4, "later": 0}),
    (ResetTarget.shift(2), {"finished": 5, "unfinished": 8, "later": 2}),
    (ResetTarget.earliest(), {"former": 0, "finished": 0, "unfinished": 0, "later": 0}),
    (ResetTarget.latest(), {"finished": 5, "unfinished": 10, "later": 7}),
    (ResetTarget.offset(2), {"former": 2, "finished": 2, "unfinished": 2, "later": 2}),
    (ResetTarget.time(datetime(2000, 1, 1, tzinfo=UTC)), {"former": 0, "finished": 0, "unfinished": 0, "later": 0}),
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
    group = postgres.declare(starting_position=records.StartingPosition.LATEST)
    postgres.append(finished, 5)
    term = postgres.lead(group)
    held = granted(postgres, group, term, finished)
    (unfinished,) = postgres.rollover(1)
    postgres.apply(group, term, records.AdvancePosition(finished, held.grant_id, 5))
    postgres.write(group, term, renew=True)
    postgres.append(unfinished, 10)
    consumed(postgres, group, term, unfinished, 6)
    (later,) = postgres.rollover(1)
    postgres.append(later, 7)
    names = {former: "former", finished: "finished", unfinished: "unfinished", later: "later"}
    for planned, places_then in PLACES:
        moves = plan_reset(postgres.connection, group, planned)
        assert {names[move.stream_id]: move.after for move in moves} == places_then, planned
    postgres.reset(group, target)
    term = postgres.lead(group)
    postgres.write(group, term, renew=True)
    found = {names[stream]: position for stream, (_, position) in places(postgres, group).items()}
    assert found == expected, "and whoever leads next gives nothing else"


@pytest.mark.conforms("A4")
def test_what_is_not_given_counts_as_skipped(postgres: PostgresWorld) -> None:
    """Also in streams that came later."""
    (before,) = postgres.add_space()
    postgres.append(before, 5)
    (first,) = postgres.rollover(1)
    group = postgres.declare(starting_position=records.StartingPosition.LATEST)
    postgres.append(first, 10, 1)
    (new,) = postgres.rollover(1)
    postgres.append(new, 7)
    found = {move.stream_id: move for move in plan_reset(postgres.connection, group, ResetTarget.latest())}
    assert {stream: (move.before, move.skipped_count) for stream, move in found.items()} == {
        first: (0, 10),
        new: (None, 7),
    }
    found = {move.stream_id: move for move in plan_reset(postgres.connection, group, ResetTarget.offset(2))}
    assert {stream: move.skipped_count for stream, move in found.items()} == {before: 0, first: 2, new: 2}
    found = {move.stream_id: move for move in plan_reset(postgres.connection, group, ResetTarget.at_epoch(1))}
    assert {stream: (move.after, move.has_epochs) for stream, move in found.items()} == {
        first: (0, True), new: (7, False),
    }  # fmt: skip


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
    term = postgres.lead(group)
    postgres.write(group, term, renew=True)
    assert {stream: position for stream, (_, position) in places(postgres, group).items()} == {
        first: 0, second: 100, third: 50,
    }  # fmt: skip


@pytest.mark.conforms("A4")
def test_a_stream_that_was_blocked_is_granted_again(postgres: PostgresWorld) -> None:
    group, term, (stream,) = postgres.led()
    postgres.append(stream, 5)
    for _ in range(5):
        held = granted(postgres, group, term, stream)
        postgres.apply(group, term, records.ForceRelease(stream, held.grant_id, "died"))
    assert places(postgres, group) == {stream: (BLOCKED, 0)}
    postgres.reset(group, ResetTarget.current())
    assert places(postgres, group) == {stream: (FREE, 0)}
    term = postgres.lead(group)
    held = granted(postgres, group, term, stream)
    postgres.apply(group, term, records.ForceRelease(stream, held.grant_id, "died"))
    assert places(postgres, group) == {stream: (FREE, 0)}, "its losses are counted from the beginning"
    postgres.reset(group, ResetTarget.shift(1))
    assert places(postgres, group) == {stream: (FREE, 1)}


@pytest.mark.conforms("A4", "S5")
def test_a_reset_by_epoch_begins_at_its_first_block(postgres: PostgresWorld) -> None:
    """An atomic group goes on with whole epochs."""
    (stream,) = postgres.add_space()
    postgres.complete(1)
    plain, atomic = (
        postgres.group(PLAIN),
        postgres.declare(atomic=True, starting_position=records.StartingPosition.EARLIEST),
    )
    for epoch in (1, 2, 3, 2):
        postgres.append(stream, 10, epoch)
    postgres.complete(5)
    assert plan_reset(postgres.connection, plain, ResetTarget.at_epoch(3))[0].after == 20
    assert plan_reset(postgres.connection, plain, ResetTarget.at_epoch(9))[0].after == 40
    postgres.connection.execute("update space set epoch_dimensions = 1")
    postgres.reset(atomic, ResetTarget.at_epoch(2))
    term = postgres.lead(atomic)
    assert postgres.row(atomic, term, stream).consumed == ConsumedFrontier(10, LowerFrontier(((2,),)))
    postgres.reset(atomic, ResetTarget.latest())
    term = postgres.lead(atomic)
    assert postgres.row(atomic, term, stream).consumed == ConsumedFrontier(40, LowerFrontier(((5,),)))
    assert postgres.write(atomic, term, renew=True).epochs[0].consumed == LowerFrontier(((5,),))


@pytest.mark.conforms("A4", "S5")
def test_no_reset_tears_an_atomic_groups_epochs(postgres: PostgresWorld) -> None:
    (stream,) = postgres.add_space()
    postgres.complete(1)
    group = postgres.declare(atomic=True, starting_position=records.StartingPosition.EARLIEST)
    postgres.append(stream, 10, 1)
    for target, streams in (
        (ResetTarget.current(), ()),
        (ResetTarget.shift(1), ()),
        (ResetTarget.offsets({stream: 3}), ()),
        (ResetTarget.earliest(), (stream,)),
    ):
        with pytest.raises(UsageError, match="is atomic"):
            postgres.reset(group, target, *streams)
    postgres.connection.execute("update space set epoch_dimensions = 1")
    with pytest.raises(InvalidEpoch, match="have 1 number, and this one has 2"):
        postgres.reset(group, ResetTarget.at_epoch((3, 1)))
    assert places(postgres, group) == {stream: (FREE, 0)}


@pytest.mark.conforms("A4")
def test_a_reset_of_given_streams_touches_no_other(postgres: PostgresWorld) -> None:
    """Not even one that is gone."""
    (gone,) = postgres.add_space()
    group = postgres.declare()
    postgres.append(gone, 5)
    (child,) = postgres.rollover(1)
    postgres.lead(group)
    postgres.connection.execute("insert into lending (group_id, stream_id, position) values (1, %s, 0)", (child,))
    postgres.append(child, 4)
    postgres.retire(1)
    postgres.connection.execute("update lending set status = 'blocked', position = 7 where stream_id = %s", (gone,))
    assert postgres.reset(group, ResetTarget.offsets({child: 2})) == {child: (0, 2)}
    assert postgres.reset(group, ResetTarget.current(), child) == {child: (2, 2)}, "another is beyond its end"
    with pytest.raises(UsageError, match=f"stream {gone}: retention has taken offset 3"):
        postgres.reset(group, ResetTarget.offsets({gone: 3}))
    assert places(postgres, group)[gone] == (BLOCKED, 7)
    assert postgres.reset(group, ResetTarget.earliest()) == {gone: (7, 5), child: (2, 0)}, (
        "it begins behind what is gone"
    )


@pytest.mark.conforms("A4")
def test_a_group_deleted_meanwhile_gets_no_rows(postgres: PostgresWorld) -> None:
    postgres.add_space()
    group = postgres.declare()
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

    def look_and_be_slow(store: PostgresGroupStore, wanted: Subscription) -> records.Group | None:
        found = look(store, wanted)
        monkeypatch.setattr(PostgresGroupStore, "find_live_group", look)
        pause("as it begins")
        return found

    pause("before")
    monkeypatch.setattr(PostgresGroupStore, "find_live_group", look_and_be_slow)
    with live_reset.pause_during_reset(postgres.url, group, ResetTarget("earliest")):
        pause("meanwhile")
        found = look(postgres.store, group.subscription)
        assert found is not None
        assert found.desired_state.pause_reason is not None
    found = look(postgres.store, group.subscription)
    assert found is not None
    assert found.desired_state.pause_reason == (None if when == "never" else "repairs")


@pytest.mark.conforms("A5")
def test_resuming_the_group_ends_a_waiting_reset(halfway: Halfway) -> None:
    world, group, term, (first, _) = halfway
    granted(world, group, term, first)
    another = world.group(Subscription.parse("$share/another/#"), records.StartingPosition.EARLIEST)
    granted(world, another, world.lead(another), first)
    found = places(world, group)

    def resume(held: int) -> None:
        assert held == 1
        send_command(world.url, group.subscription, ResumeGroup())

    with pytest.raises(Conflict, match=r"it was resumed .* nothing was changed.*groups history"):
        live_reset.reset_live_group(
            world.url,
            world.connection,
            group,
            ResetTarget.earliest(),
            (),
            force=False,
            drain_timeout_s=20.0,
            waiting=resume,
        )
    assert places(world, group) == found
    after = world.store.find_live_group(group.subscription)
    assert after is not None
    assert after.desired_state.pause_reason is None


@pytest.mark.conforms("W6")
def test_what_another_space_took_over_is_not_reset(postgres: PostgresWorld) -> None:
    """An open stream that is finished: all that the group matches there comes by the other space's streams."""
    postgres.add_space()
    group = postgres.declare()
    postgres.connection.execute("update lending set status = 'finished'")
    for target in (ResetTarget.earliest(), ResetTarget.current()):
        postgres.reset(group, target)
        assert postgres.connection.execute("select status from lending").fetchall() == [("finished",)]


@pytest.mark.conforms("E34")
def test_who_held_a_blocked_stream_may_not_know() -> None:
    """After a reset its next holder waits for that, as for a grant that was ended by the reset itself."""
    row = LendingRow(1, 2, records.LendingStatus.HELD, 5, grant_id=7)
    stream = StreamFacts(2, 1, 0, 1, head=0, is_closed=False, is_gone=False)
    blocked = end_unreadable(row, stream, 1_000, records.OnDataLoss.FAIL)
    assert blocked is not None
    assert blocked.row.status is records.LendingStatus.BLOCKED
    assert apply_reset(blocked.row, stream, 0, "reset", 2_000).row.held_until_us == 1_000
