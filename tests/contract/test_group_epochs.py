"""How far a group that is atomic has come in whole epochs, as both stores say it."""

from __future__ import annotations

import pytest

from sublet_protocol.domain import limits
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier, LowerFrontier
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.admin import progress_transfer
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.model import records
from tests.contract.group_world import (
    APPLIED,
    BLOCKED,
    FINISHED,
    FREE,
    INVALID,
    TWO,
    PostgresWorld,
    World,
    granted,
    outcome,
)


def frontier(epoch: int) -> LowerFrontier:
    return LowerFrontier(((epoch,),))


def consumed(upto: int, epoch: int | None) -> ConsumedFrontier:
    return ConsumedFrontier(upto, None if epoch is None else frontier(epoch))


def reached(world: World, group: records.Group, term: int) -> list[int]:
    """Return the consumed frontier of each space, by a renewal."""
    return [one.consumed.least[0][0] for one in world.write(group, term, renew=True).epochs]


def announced(world: World, group: records.Group) -> list[str]:
    return [line.reason for line in world.store.history(group.group_id) if line.event == records.EPOCHS_CONSUMED]


@pytest.mark.conforms("S2", "S5")
def test_who_starts_live_is_given_what_begins_later(world: World) -> None:
    """Later than what has begun in any stream."""
    first, second, third = world.add_space(shards=3)
    world.complete(3)
    world.append(first, 10, 3)
    world.append(second, 10, 5, 3)
    group = world.declare(atomic=True)
    term = world.lead(group)
    rows = {row.stream_id: row for row in world.store.load(group.group_id, term)}
    assert {stream: row.consumed for stream, row in rows.items()} == {
        first: consumed(10, 6),
        second: consumed(10, 6),
        third: consumed(0, 6),
    }
    assert reached(world, group, term) == [6], "the first epoch that it is given, and nothing before"


@pytest.mark.parametrize("deleted", [False, True])
def test_epochs_of_closed_and_gone_streams_have_begun(world: World, deleted: bool) -> None:
    (first,) = world.add_space()
    world.complete(3)
    world.append(first, 10, 7)
    (second,) = world.rollover(1)
    world.append(second, 10, 4)
    world.retire(1)
    assert not deleted or world.delete_past() == [1]
    live, history = world.declare(atomic=True), records.StartingPosition.parse("earliest")
    assert world.row(live, world.lead(live), second).consumed == consumed(10, 8)
    world.store.delete_group(live.subscription)
    entire = world.declare(atomic=True, starting_position=history)
    assert world.row(entire, world.lead(entire), second).consumed == consumed(0, 8), "a part of 7 is gone"


LATEST, MIDDLE, NEVER = (
    records.StartingPosition.parse(text) for text in ("latest", "offset:0", "2099-01-01T00:00:00Z")
)


@pytest.mark.conforms("S2")
@pytest.mark.parametrize("start", [LATEST, MIDDLE, NEVER], ids=str)
@pytest.mark.parametrize("deleted", [False, True])
def test_epochs_begun_in_the_shadow_are_left_out(world: World, start: records.StartingPosition, deleted: bool) -> None:
    """Of the space that takes the topics meanwhile all are delivered, and the other's frontier is not reported."""
    (first,) = world.add_space()
    world.complete(7)
    world.append(first, 5, 7)
    world.add_space("orders", "orders/#", rolls=(1,))
    if deleted:
        world.retire(1)
        assert world.delete_past() == [1]
    group = world.declare(atomic=True, starting_position=start)
    term = world.lead(group)
    world.complete(3, space_id=2)
    assert reached(world, group, term) == [3]
    world.rollover(1)
    assert reached(world, group, term) == [3], "it has nothing for the group"
    (again,) = world.drop_space(2, rolls=(1,))
    assert reached(world, group, term) == [8, 3]
    assert world.row(group, term, again).consumed == consumed(0, 8)


@pytest.mark.conforms("S2")
@pytest.mark.parametrize("deleted", [False, True])
def test_epochs_begun_under_another_filter_are_out(world: World, deleted: bool) -> None:
    world.add_space()
    world.add_space("moving", "orders/#", rolls=(1,))
    (stream,) = world.streams.open_streams(2)
    world.complete(7, space_id=2)
    world.append(stream, 5, 7)
    world.alter_space(2, "bills/#", rolls=(1,))
    if deleted:
        world.retire(3)
        assert 3 in world.delete_past()
    group = world.declare(atomic=True)
    term = world.lead(group)
    assert reached(world, group, term) == []
    again = world.alter_space(2, "orders/#", rolls=(1,))[-1]
    assert reached(world, group, term) == [8]
    assert world.row(group, term, again).consumed == consumed(0, 8)


def test_epochs_of_other_topics_take_no_history(world: World) -> None:
    """From a group that begins with it: they lie in a shadow, or are of another filter that the space had."""
    (first,) = world.add_space()
    world.complete(7)
    world.append(first, 5, 7)
    world.add_space("own", "bills/#", rolls=(1,))
    world.complete(7, space_id=2)
    world.append(world.streams.open_streams(2)[0], 5, 7)
    world.alter_space(2, "orders/#", rolls=(1,))
    (shadowed,), (own,) = map(world.streams.open_streams, (1, 2))
    world.append(shadowed, 5, 8)
    group = world.declare(atomic=True, starting_position=records.StartingPosition.parse("earliest"))
    term = world.lead(group)
    assert [world.row(group, term, stream).consumed for stream in (first, own)] == [consumed(0, None)] * 2


@pytest.mark.conforms("S2")
@pytest.mark.parametrize("target", [ResetTarget.latest(), ResetTarget.offset(0), ResetTarget.at_epoch(9)], ids=str)
def test_a_reset_leaves_out_what_the_shadow_has(postgres: PostgresWorld, target: ResetTarget) -> None:
    """What begins there after the group, and before the reset."""
    (first,) = postgres.add_space()
    postgres.complete(7)
    postgres.append(first, 5, 7)
    postgres.add_space("orders", "orders/#", rolls=(1,))
    postgres.complete(3, space_id=2)
    group = postgres.declare(atomic=True)
    postgres.append(*postgres.streams.open_streams(1), 5, 8)
    postgres.retire(1)
    assert postgres.delete_past() == [1]
    postgres.reset(group, target)
    (again,) = postgres.drop_space(2, rolls=(1,))
    first_epoch = {"latest": 9, "offset": 8, "epoch": 9}[target.kind]
    term = postgres.lead(group)
    assert reached(postgres, group, term) == [first_epoch, 9 if target.kind == "epoch" else 3]
    assert postgres.row(group, term, again).consumed == consumed(0, first_epoch)


@pytest.mark.conforms("S2")
def test_a_reset_leaves_out_what_is_gone_in_part(postgres: PostgresWorld) -> None:
    (first,) = postgres.add_space()
    postgres.complete(3)
    group = postgres.declare(atomic=True, starting_position=records.StartingPosition.EARLIEST)
    postgres.append(first, 10, 7)
    (second,) = postgres.rollover(1)
    postgres.append(second, 10, 7)
    postgres.retire(1)
    postgres.connection.execute("delete from block where stream_id = %s", (first,))
    postgres.reset(group, ResetTarget.earliest())
    assert postgres.row(group, postgres.lead(group), second).consumed == consumed(0, 8)


@pytest.mark.conforms("S2")
def test_a_copy_with_more_topics_gets_entire_epochs(postgres: PostgresWorld) -> None:
    """Of a space that its source had nothing of, those that begin later; of a new one, all."""
    postgres.add_space()
    postgres.add_space("bills", "bills/#", rolls=(1,))
    (bills,) = postgres.streams.open_streams(2)
    postgres.complete(7, space_id=2)
    postgres.append(bills, 5, 7)
    source, everything = postgres.declare(atomic=True), Subscription.parse("$share/copy/#")
    postgres.add_space("new", "new/#", rolls=(1,))
    (new,) = postgres.streams.open_streams(3)
    postgres.complete(3, space_id=3)
    postgres.append(new, 5, 3)
    with postgres.connection.transaction():
        copy, _ = progress_transfer.clone(postgres.connection, source.subscription, everything, "x")
    (again,) = postgres.rollover(2)
    term = postgres.lead(copy)
    assert reached(postgres, copy, term) == [8]
    assert postgres.row(copy, term, again).consumed == consumed(0, 8)
    assert postgres.row(copy, term, new).consumed == consumed(0, None)


def test_who_starts_in_the_middle_skips_what_had_begun(world: World) -> None:
    (stream,) = world.add_space()
    world.complete(0)
    for epoch in (1, 2, 3):
        world.append(stream, 10, epoch)
    group = world.declare(atomic=True, starting_position=records.StartingPosition.parse("offset:15"))
    assert world.row(group, world.lead(group), stream).consumed == consumed(15, 3)


def test_a_group_of_a_space_without_epochs_has_none(world: World) -> None:
    (stream,) = world.add_space()
    world.append(stream, 10)
    group = world.declare(atomic=True, starting_position=records.StartingPosition.parse("earliest"))
    term = world.lead(group)
    assert world.row(group, term, stream).consumed == consumed(0, None)
    assert world.write(group, term, renew=True).epochs == ()
    assert announced(world, group) == []


def test_only_an_atomic_group_reports_epochs(world: World) -> None:
    (stream,) = world.add_space()
    world.complete(3)
    group = world.group()
    term = world.lead(group)
    grant_id = granted(world, group, term, stream).grant_id
    world.append(stream, 10, 3)
    result = world.applied(group, term, records.AdvancePosition(stream, grant_id, 5, consumed(5, 9)))
    assert result.consumed is None
    assert world.write(group, term, renew=True).epochs == ()


@pytest.mark.conforms("S8", "S4")
def test_an_epoch_is_consumed_when_all_streams_are(world: World) -> None:
    """It is announced once."""
    first, second = world.add_space(shards=2)
    world.complete(3)
    group = world.declare(atomic=True)
    term = world.lead(group)
    grants = {stream: granted(world, group, term, stream).grant_id for stream in (first, second)}
    assert reached(world, group, term) == [3]
    world.append(first, 10, 3)
    world.append(second, 10, 4)
    world.complete(4)
    assert reached(world, group, term) == [3]
    world.apply(group, term, records.AdvancePosition(first, grants[first], 10, consumed(10, 4)))
    assert reached(world, group, term) == [3], "the second stream may have messages of 3, as far as is known"
    world.apply(group, term, records.AdvancePosition(second, grants[second], 0, consumed(10, 4)))
    assert reached(world, group, term) == [4]
    world.complete(5)
    world.apply(group, term, records.ReleaseStream(second, grants[second], 10, "leaves", consumed=consumed(10, 5)))
    assert reached(world, group, term) == [5]
    assert reached(world, group, term) == [5]
    assert announced(world, group) == [f"space default: consumed are all epochs before {n}" for n in (4, 5)]


@pytest.mark.conforms("S9", "S4")
def test_idle_streams_and_skipped_epochs_hold_nothing(world: World) -> None:
    first, _ = world.add_space(shards=2)
    world.complete(3)
    group = world.declare(atomic=True)
    term = world.lead(group)
    world.complete(9)
    assert reached(world, group, term) == [9], "nobody has been granted anything"
    world.append(first, 10, 9)
    assert reached(world, group, term) == [9], "what its row says is older"
    world.complete(12)
    assert reached(world, group, term) == [9]
    assert world.write(group, term, renew=True).epochs == (GroupFrontier("default", 1, frontier(9), frontier(12)),)


@pytest.mark.conforms("S9")
def test_a_closed_stream_holds_back_what_it_has(world: World) -> None:
    """Its children begin where the group is."""
    (parent,) = world.add_space()
    world.complete(3)
    group = world.declare(atomic=True)
    term = world.lead(group)
    world.complete(4)
    assert reached(world, group, term) == [4]
    world.append(parent, 10, 5)
    children = world.rollover(1, shards=2)
    world.append(children[0], 10, 5)
    assert reached(world, group, term) == [4]
    assert [world.row(group, term, child).consumed for child in children] == [consumed(0, 4)] * 2
    world.complete(6)
    grant_id = granted(world, group, term, parent).grant_id
    ended = world.apply(group, term, records.AdvancePosition(parent, grant_id, 10, consumed(10, 6)))
    assert outcome(ended) == (APPLIED, FINISHED, 10)
    assert reached(world, group, term) == [4], "its child has messages of 5"
    grant_id = granted(world, group, term, children[0]).grant_id
    world.apply(group, term, records.AdvancePosition(children[0], grant_id, 10, consumed(10, 6)))
    assert reached(world, group, term) == [6]


def test_what_is_consumed_is_handed_on(world: World) -> None:
    (stream,) = world.add_space()
    world.complete(3)
    group = world.declare(atomic=True)
    term = world.lead(group)
    grant_id = granted(world, group, term, stream).grant_id
    world.append(stream, 30, 3, 4)
    world.apply(group, term, records.AdvancePosition(stream, grant_id, 10, consumed(30, 4)))
    world.apply(group, term, records.AdvancePosition(stream, grant_id, 10, consumed(20, 4)))
    assert world.row(group, term, stream).consumed == consumed(30, 4), "an older word comes late"
    world.clock.advance(20)
    next_term = world.lead(group, TWO)
    reclaimed = world.applied(
        group, next_term, records.ReclaimStream(stream, grant_id, 10, "b2", "a1", consumed=consumed(30, 5))
    )
    assert reclaimed.consumed == consumed(30, 5)
    world.apply(group, next_term, records.ReleaseStream(stream, grant_id, 10, "leaves"))
    again = world.applied(group, next_term, records.GrantStream(stream, "b3", "a2", None, "share"))
    assert (again.position, again.consumed) == (10, consumed(30, 5))


@pytest.mark.parametrize(
    "said",
    [ConsumedFrontier(31, frontier(4)), *(ConsumedFrontier(20, LowerFrontier(least)) for least in (((4, 4),), ()))],
    ids=["beyond", "alien", "empty"],
)
@pytest.mark.parametrize("start", ["latest", "earliest"])
def test_impossible_progress_changes_nothing(world: World, said: ConsumedFrontier, start: str) -> None:
    """Not even where no epoch is consumed yet, to which it could be compared."""
    (stream,) = world.add_space()
    world.complete(3)
    group = world.declare(atomic=True, starting_position=records.StartingPosition.parse(start))
    term = world.lead(group)
    before = granted(world, group, term, stream)
    grant_id = before.grant_id
    world.append(stream, 30, 3)
    doubt = InDoubtRange(grant_id, 0, 31 if said.upto == 31 else 20, 60, said)
    for change in (
        records.AdvancePosition(stream, grant_id, 0, said),
        records.AdvancePosition(stream, grant_id, 0, in_doubt=doubt),
        records.ReclaimStream(stream, grant_id, 0, "b1", "a1", consumed=said),
        records.ReleaseStream(stream, grant_id, 0, "leaves", consumed=said),
    ):
        assert world.apply(group, term, change).outcome is INVALID, change
    row = world.row(group, term, stream)
    assert (row.consumed, row.in_doubt, row.grant_id) == (before.consumed, None, grant_id)


def test_a_space_without_epochs_has_none_consumed(world: World) -> None:
    group, term, stream, held = world.granted(10, atomic=True)
    answer = world.apply(group, term, records.AdvancePosition(stream, held.grant_id, 4, consumed(4, 9)))
    assert answer.outcome is INVALID
    assert "no epoch was ever used" in answer.problem
    assert (
        world.applied(group, term, records.AdvancePosition(stream, held.grant_id, 4, consumed(4, None))).position == 4
    )


@pytest.mark.conforms("S4")
@pytest.mark.parametrize(
    ("stored", "found"),
    [
        (("[]", "[]"), 7),
        (("[]", "[[6]]"), 6),
        (("[[5]]", "[[6]]"), 5),
        (("[[6], [5]]", "[[6]]"), 5),
        (("null", "[[6]]"), 3),
        (("[[5, 5]]", "[[6]]"), 3),
    ],
    ids=str,
)
def test_whatever_a_row_has_holds_back_its_group(postgres: PostgresWorld, stored: tuple[str, str], found: int) -> None:
    """What no reader reports holds all back that it may."""
    streams = postgres.add_space(shards=2)
    postgres.complete(3)
    group = postgres.declare(atomic=True)
    term = postgres.lead(group)
    assert reached(postgres, group, term) == [3]
    for stream in streams:
        postgres.append(stream, 10, 6)
    postgres.complete(7)
    postgres.connection.execute("update space set epoch_dimensions = 1")
    for stream, least in zip(streams, stored, strict=True):
        document = f'{{"upto": 5, "least": {least}}}'
        postgres.connection.execute("update lending set consumed = %s where stream_id = %s", (document, stream))
    assert reached(postgres, group, term) == [found]


def test_too_many_epochs_hold_back_until_consumed(postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no other group: they are counted for each."""
    streams = postgres.add_space(shards=2)
    postgres.complete(3)
    subscriptions = [Subscription.parse(f"$share/{name}/#") for name in ("many", "few")]
    many, few = (postgres.store.declare_group(each, records.GroupOptions(atomic=True)) for each in subscriptions)
    terms = {group.group_id: postgres.lead(group) for group in (many, few)}
    postgres.complete(7)
    for stream in streams:
        postgres.append(stream, 10, 6)
    held = {}
    for group, stream in ((many, streams[0]), (many, streams[1]), (few, streams[0])):
        held[group, stream] = granted(postgres, group, terms[group.group_id], stream).grant_id
        change = records.AdvancePosition(stream, held[group, stream], 1, consumed(9, 5))
        postgres.apply(group, terms[group.group_id], change)
    (size,) = postgres.connection.execute("select max(pg_column_size(consumed)) from lending").fetchone() or (0,)
    postgres.connection.execute(
        "update lending set position = 10 where group_id = %s and stream_id = %s", (few.group_id, streams[1])
    )
    monkeypatch.setattr(limits, "MAX_HELD_BACK_BYTES", 2 * size - 1)
    syncs = [records.GroupWrites(group_id, term, (), needs_stream_sync=True) for group_id, term in terms.items()]
    assert [one.epochs[0].consumed for one in postgres.store.commit(syncs)] == [frontier(3), frontier(5)]
    done = records.AdvancePosition(streams[0], held[many, streams[0]], 10, consumed(10, 7))
    postgres.apply(many, terms[many.group_id], done)
    assert reached(postgres, many, terms[many.group_id]) == [5]


def test_each_space_has_a_frontier_of_its_own(world: World) -> None:
    world.add_space()
    world.complete(3)
    group = world.declare(atomic=True)
    term = world.lead(group)
    assert reached(world, group, term) == [3]
    world.add_space("orders", "orders/#", rolls=(1,))
    (stream,) = world.streams.open_streams(2)
    world.complete(100, space_id=2)
    assert reached(world, group, term) == [3, 100], "a new space has nothing to be consumed"
    world.append(stream, 10, 100)
    world.complete(200, space_id=2)
    world.complete(4)
    assert reached(world, group, term) == [4, 100]


def test_a_deleted_group_leaves_no_frontier(world: World) -> None:
    world.add_space()
    world.complete(3)
    group = world.declare(atomic=True)
    assert reached(world, group, world.lead(group)) == [3]
    world.store.delete_group(group.subscription)
    again = world.declare(atomic=True)
    assert again.group_id != group.group_id
    assert reached(world, again, world.lead(again)) == [3]
    assert announced(world, again) == [], "that is where it begins"


@pytest.mark.conforms("E23")
def test_losses_count_between_entire_epochs(world: World) -> None:
    (stream,) = world.add_space()
    world.complete(3)
    group = world.declare(atomic=True)
    term = world.lead(group)
    world.append(stream, 10, 3, 1_000)
    for epoch in range(4, 4 + records.MAX_LOSSES):
        grant_id = granted(world, group, term, stream).grant_id
        world.apply(group, term, records.AdvancePosition(stream, grant_id, 0, consumed(10, epoch)))
        lost = world.apply(group, term, records.ForceRelease(stream, grant_id, "its consumer died"))
        assert outcome(lost) == (APPLIED, FREE, 0)
    for number in range(1, records.MAX_LOSSES):
        grant_id = granted(world, group, term, stream).grant_id
        lost = world.apply(group, term, records.ForceRelease(stream, grant_id, "its consumer died"))
        assert outcome(lost)[1] is (BLOCKED if number == records.MAX_LOSSES - 1 else FREE)


def test_reported_epochs_of_another_kind_break_nothing(world: World) -> None:
    """At most the group itself is held back."""
    (stream,) = world.add_space()
    world.complete(3)
    world.append(stream, 10, 3)
    group = world.declare(atomic=True, starting_position=records.StartingPosition.parse("earliest"))
    term = world.lead(group)
    grant_id = granted(world, group, term, stream).grant_id
    world.apply(
        group, term, records.AdvancePosition(stream, grant_id, 5, ConsumedFrontier(5, LowerFrontier(((1, 4),))))
    )
    world.complete(4)
    assert world.write(group, term, renew=True).has_stale_term is False
    assert announced(world, group) in ([], ["space default: consumed are all epochs before 1"])


@pytest.mark.conforms("S9")
def test_an_epoch_closed_by_expiry_is_announced_so(postgres: PostgresWorld) -> None:
    postgres.add_space()
    postgres.complete(3)
    group = postgres.declare(atomic=True)
    term = postgres.lead(group)
    for producer, least, begun, gone in (
        ("dead", 4, 5, "now()"),
        ("alive", 4, 5, "null"),
        ("gone before", 1, 2, "now()"),
        ("gone idle", 5, 4, "now()"),
        ("back", 5, 5, "now()"),
        ("back", 6, 6, "null"),
    ):
        postgres.connection.execute(
            "insert into capability (space_id, producer_id, incarnation, least, upper_frontier, expires_at, expired_at)"
            f" values (1, %s, %s, %s, %s, now(), {gone})",
            (producer, least, f"[[{least}]]", f"[[{begun}]]"),
        )
    postgres.complete(4)
    assert reached(postgres, group, term) == [4]
    postgres.complete(6)
    assert reached(postgres, group, term) == [6]
    postgres.complete(7)
    assert reached(postgres, group, term) == [7]
    said = "space default: consumed are all epochs before"
    closed = "; closed by expiry, and perhaps not whole: those of producer "
    assert announced(postgres, group) == [f"{said} 4", f"{said} 6{closed}back, dead", f"{said} 7"]


@pytest.mark.conforms("S8", "E20")
def test_deaths_while_waiting_for_an_epoch_count_not(world: World) -> None:
    group, term, (stream,) = world.led(atomic=True)
    world.complete(7)
    world.append(stream, 4, 7)
    waits = ConsumedFrontier(0, LowerFrontier(((7,),)))
    for _ in range(records.MAX_LOSSES + 1):
        held = granted(world, group, term, stream)
        world.apply(group, term, records.AdvancePosition(stream, held.grant_id, 0, waits))
        seized = world.apply(group, term, records.ForceRelease(stream, held.grant_id, "silent"))
        assert outcome(seized)[1] is FREE
    world.complete(8)
    for _ in range(records.MAX_LOSSES):
        held = granted(world, group, term, stream)
        seized = world.apply(group, term, records.ForceRelease(stream, held.grant_id, "silent"))
    assert outcome(seized)[1] is BLOCKED
