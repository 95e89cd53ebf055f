"""How far a group that is atomic has come in whole epochs, as both stores say it."""

from __future__ import annotations

from typing import Any

import pytest

from sublet_protocol.domain import limits
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier, LowerFrontier
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.admin import progress_transfer
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.model.records import EPOCHS_CONSUMED, MAX_LOSSES, GroupOptions, GroupWrites
from sublet_storage.log.block_encoder import BlockEpochRange
from tests.contract.group_world import Led, PostgresWorld, World, outcome, row_of

EARLIEST = StartingPosition.EARLIEST
OTHER = Subscription.parse("$share/other/orders/#")
LATEST, MIDDLE, NEVER = map(StartingPosition.parse, ("latest", "offset:0", "2099-01-01T00:00:00Z"))


def frontier(epoch: int) -> LowerFrontier:
    return LowerFrontier(((epoch,),))


def consumed(upto: int, epoch: int | None) -> ConsumedFrontier:
    return ConsumedFrontier(upto, None if epoch is None else frontier(epoch))


def atomic(world: World, start: StartingPosition = LATEST) -> Led:
    """Return the group, atomic and led, of what is there."""
    return world.lead(world.declare(atomic=True, starting_position=start))


def reached(led: Led) -> list[int]:
    """Return the consumed frontier of each space, by a sync."""
    return [one.consumed.least[0][0] for one in led.write(sync=True).epochs]


def announced(led: Led) -> list[str]:
    return [line.reason for line in led.history(EPOCHS_CONSUMED)]


# --- where a group begins ---------------------------------------------------------------------------------------------


@pytest.mark.conforms("S2", "S5")
def test_who_starts_live_is_given_what_begins_later(world: World) -> None:
    """Later than what has begun in any stream."""
    first, second, third = world.add_space(shards=3)
    world.complete(3)
    world.append(first, 10, 3)
    world.append(second, 10, 5, 3)
    led = atomic(world)
    assert {stream: row.consumed for stream, row in led.rows().items()} == {
        first: consumed(10, 6), second: consumed(10, 6), third: consumed(0, 6),
    }  # fmt: skip
    assert reached(led) == [6], "the first epoch that it is given, and nothing before"


@pytest.mark.parametrize("deleted", [False, True])
def test_epochs_of_closed_and_gone_streams_have_begun(world: World, deleted: bool) -> None:
    (first,) = world.add_space()
    world.complete(3)
    world.append(first, 10, 7)
    (second,) = world.rollover(1)
    world.append(second, 10, 4)
    world.retire(1)
    assert not deleted or world.delete_past() == [1]
    live = atomic(world)
    assert live.row(second).consumed == consumed(10, 8)
    world.store.delete_group(live.group.subscription)
    assert atomic(world, EARLIEST).row(second).consumed == consumed(0, 8), "a part of 7 is gone"


@pytest.mark.conforms("S2")
@pytest.mark.parametrize("start", [LATEST, MIDDLE, NEVER], ids=str)
@pytest.mark.parametrize("deleted", [False, True])
def test_epochs_begun_in_the_shadow_are_left_out(world: World, start: StartingPosition, deleted: bool) -> None:
    """Of the space that takes the topics meanwhile all are delivered, and the other's frontier is not reported."""
    (first,) = world.add_space()
    world.complete(7)
    world.append(first, 5, 7)
    world.add_space("orders", "orders/#", rolls=(1,))
    if deleted:
        world.retire(1)
        assert world.delete_past() == [1]
    led = atomic(world, start)
    world.complete(3, space_id=2)
    assert reached(led) == [3]
    world.rollover(1)
    assert reached(led) == [3], "it has nothing for the group"
    (again,) = world.drop_space(2, rolls=(1,))
    assert reached(led) == [8, 3]
    assert led.row(again).consumed == consumed(0, 8)


@pytest.mark.conforms("S2")
@pytest.mark.parametrize("deleted", [False, True])
def test_epochs_begun_under_another_filter_are_out(world: World, deleted: bool) -> None:
    world.add_space()
    world.add_space("moving", "orders/#", rolls=(1,))
    world.complete(7, space_id=2)
    world.append(*world.streams.open_streams(2), 5, 7)
    world.alter_space(2, "bills/#", rolls=(1,))
    if deleted:
        world.retire(3)
        assert 3 in world.delete_past()
    led = atomic(world)
    assert reached(led) == []
    again = world.alter_space(2, "orders/#", rolls=(1,))[-1]
    assert reached(led) == [8]
    assert led.row(again).consumed == consumed(0, 8)


def test_epochs_of_other_topics_take_no_history(world: World) -> None:
    """From a group that begins with it: they lie in a shadow, or are of another filter that the space had."""
    (first,) = world.add_space()
    world.complete(7)
    world.append(first, 5, 7)
    world.add_space("own", "bills/#", rolls=(1,))
    world.complete(7, space_id=2)
    world.append(*world.streams.open_streams(2), 5, 7)
    world.alter_space(2, "orders/#", rolls=(1,))
    (shadowed,), (own,) = map(world.streams.open_streams, (1, 2))
    world.append(shadowed, 5, 8)
    led = atomic(world, EARLIEST)
    assert [led.row(stream).consumed for stream in (first, own)] == [consumed(0, None)] * 2


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
    postgres.rollover(1)
    postgres.lead(group).sync()
    postgres.retire(1)
    assert postgres.delete_past() == [1]
    postgres.reset(group, target)
    led = postgres.lead(group)
    of_own = {"latest": [3], "offset": [8, 3], "epoch": [9]}[target.kind]
    assert reached(led) == of_own, "an open stream of the shadow is none of its"
    (again,) = postgres.drop_space(2, rolls=(1,))
    first_epoch = {"latest": 9, "offset": 8, "epoch": 9}[target.kind]
    assert reached(led) == [first_epoch, of_own[-1]]
    assert led.row(again).consumed == consumed(0, first_epoch)


@pytest.mark.conforms("S2")
def test_a_reset_leaves_out_what_is_gone_in_part(postgres: PostgresWorld) -> None:
    led = postgres.led(completed=3, atomic=True, starting_position=EARLIEST)
    postgres.append(led.stream, 10, 7)
    (second,) = postgres.rollover(1)
    postgres.append(second, 10, 7)
    postgres.retire(1)
    postgres.connection.execute("delete from block where stream_id = %s", (led.stream,))
    postgres.reset(led, ResetTarget.earliest())
    assert postgres.lead(led.group).row(second).consumed == consumed(0, 8)


@pytest.mark.conforms("S2")
def test_a_copy_with_more_topics_gets_entire_epochs(postgres: PostgresWorld) -> None:
    """Of a space that its source had nothing of, those that begin later; of a new one, all."""
    postgres.add_space()
    postgres.add_space("bills", "bills/#", rolls=(1,))
    postgres.complete(7, space_id=2)
    postgres.append(*postgres.streams.open_streams(2), 5, 7)
    source, everything = postgres.declare(atomic=True), Subscription.parse("$share/copy/#")
    postgres.add_space("new", "new/#", rolls=(1,))
    (new,) = postgres.streams.open_streams(3)
    postgres.complete(3, space_id=3)
    postgres.append(new, 5, 3)
    with postgres.connection.transaction():
        copy, _ = progress_transfer.clone(postgres.connection, source.subscription, everything, "x")
    (again,) = postgres.rollover(2)
    led = postgres.lead(copy)
    assert reached(led) == [8]
    assert led.row(again).consumed == consumed(0, 8)
    assert led.row(new).consumed == consumed(0, None)


def test_who_starts_in_the_middle_skips_what_had_begun(world: World) -> None:
    (stream,) = world.add_space()
    world.complete(0)
    for epoch in (1, 2, 3):
        world.append(stream, 10, epoch)
    world.declare(OTHER, atomic=True)  # at the end
    assert atomic(world, StartingPosition.at_offset(15)).row(stream).consumed == consumed(15, 3)


def test_who_starts_at_a_time_skips_what_had_begun(world: World) -> None:
    """Not what begins later in another stream, at a lower offset."""
    first, second = world.add_space(shards=2)
    world.complete(0)
    world.append(first, 10, 1)
    world.clock.advance(10)
    world.append(first, 10, 3)
    world.append(second, 10, 5)
    led = atomic(world, StartingPosition.parse("2023-11-14T22:13:25Z"))
    assert [led.row(stream).consumed for stream in (first, second)] == [consumed(10, 2), consumed(0, 2)]


def test_each_group_begins_in_each_space_by_itself(world: World) -> None:
    (first,) = world.add_space()
    world.complete(3)
    world.append(first, 10, 3)
    other = world.lead(world.declare(OTHER, atomic=True))
    world.add_space("orders", "orders/#", rolls=(1,))
    (second,) = world.streams.open_streams(2)
    world.complete(20, space_id=2)
    world.append(second, 10, 20)
    other.sync()
    other.grant(second).advance(5, consumed(5, 20))
    before = other.rows()
    world.retire(1)
    led = atomic(world)
    assert led.row(second).consumed == consumed(10, 21)
    assert reached(led) == [21], "it has no streams of the other space, as another group does"
    assert other.rows() == before
    third = world.lead(world.declare(Subscription.parse("$share/third/#"), atomic=True))
    (shadow,) = world.streams.open_streams(1)
    assert [third.row(stream).consumed for stream in (shadow, second)] == [consumed(0, 4), consumed(10, 21)]


def test_a_group_of_a_space_without_epochs_has_none(world: World) -> None:
    (stream,) = world.add_space()
    world.append(stream, 10)
    led = atomic(world, EARLIEST)
    assert led.row(stream).consumed == consumed(0, None)
    assert led.write(sync=True).epochs == ()
    assert announced(led) == []


# --- how far it comes -------------------------------------------------------------------------------------------------


def test_only_an_atomic_group_reports_epochs(world: World) -> None:
    led = world.led(completed=3)
    held = led.grant()
    world.append(led.stream, 10, 3)
    assert row_of(held.advance(5, consumed(5, 9))).consumed is None
    assert led.write(sync=True).epochs == ()


@pytest.mark.conforms("S8", "S4")
def test_an_epoch_is_consumed_when_all_streams_are(world: World) -> None:
    """It is announced once."""
    led = world.led(2, completed=3, atomic=True)
    first, second = (led.grant(stream) for stream in led.streams)
    assert reached(led) == [3]
    world.append(first.stream, 10, 3)
    world.append(second.stream, 10, 4)
    world.complete(4)
    assert reached(led) == [3]
    first.advance(10, consumed(10, 4))
    assert reached(led) == [3], "the second stream may have messages of 3, as far as is known"
    second.advance(0, consumed(10, 4))
    assert reached(led) == [4]
    world.complete(5)
    second.release(10, consumed=consumed(10, 5))
    assert reached(led) == [5]
    assert reached(led) == [5]
    assert announced(led) == [f"space default: consumed are all epochs before {n}" for n in (4, 5)]


@pytest.mark.conforms("S9", "S4")
def test_idle_streams_and_skipped_epochs_hold_nothing(world: World) -> None:
    led = world.led(2, completed=3, atomic=True)
    world.complete(9)
    assert reached(led) == [9], "nobody has been granted anything"
    world.append(led.stream, 10, 9)
    assert reached(led) == [9], "what its row says is older"
    world.complete(12)
    assert reached(led) == [9]
    assert led.write(sync=True).epochs == (GroupFrontier("default", 1, frontier(9), frontier(12)),)


@pytest.mark.conforms("S9")
def test_a_closed_stream_holds_back_what_it_has(world: World) -> None:
    """Its children begin where the group is, each group by itself."""
    led = world.led(completed=3, atomic=True)
    other = world.lead(world.declare(OTHER, atomic=True))
    world.complete(4)
    assert reached(led) == [4]
    world.append(led.stream, 10, 5)
    children = world.rollover(1, shards=2)
    world.append(children[0], 10, 5)
    assert reached(led) == [4]
    other.sync()
    for each, epoch in ((led, 4), (other, 3)):
        assert [each.row(child).consumed for child in children] == [consumed(0, epoch)] * 2
    world.complete(6)
    assert outcome(led.grant().advance(10, consumed(10, 6))) == "applied, finished at 10"
    assert reached(led) == [4], "its child has messages of 5"
    led.grant(children[0]).advance(10, consumed(10, 6))
    assert reached(led) == [6]


def test_what_is_consumed_is_handed_on(world: World) -> None:
    led = world.led(completed=3, atomic=True)
    held = led.grant()
    world.append(led.stream, 30, 3, 4)
    held.advance(10, consumed(30, 4))
    held.advance(10, consumed(20, 4))
    assert led.row().consumed == consumed(30, 4), "an older word comes late"
    held = held.under(led.succeed())
    assert row_of(held.reclaim(10, "b2", consumed=consumed(30, 5))).consumed == consumed(30, 5)
    held.release(10)
    again = held.led.grant(None, "b3", "a2", None).row
    assert (again.position, again.consumed) == (10, consumed(30, 5))


@pytest.mark.parametrize(
    "said",
    [ConsumedFrontier(31, frontier(4)), *(ConsumedFrontier(20, LowerFrontier(least)) for least in (((4, 4),), ()))],
    ids=["beyond", "alien", "empty"],
)
@pytest.mark.parametrize("start", [LATEST, EARLIEST], ids=str)
def test_impossible_progress_changes_nothing(world: World, said: ConsumedFrontier, start: StartingPosition) -> None:
    """Not even where no epoch is consumed yet, to which it could be compared."""
    led = world.led(completed=3, atomic=True, starting_position=start)
    held = led.grant()
    world.append(led.stream, 30, 3)
    doubt = held.doubt(0, 31 if said.upto == 31 else 20, 60, said)
    for answer in (
        held.advance(0, said),
        held.advance(0, in_doubt=doubt),
        held.reclaim(0, consumed=said),
        held.release(0, consumed=said),
    ):
        assert answer.outcome == "invalid", answer
    row = led.row()
    assert (row.consumed, row.in_doubt, row.grant_id) == (held.row.consumed, None, held.grant_id)


def test_a_space_without_epochs_has_none_consumed(world: World) -> None:
    held = world.granted(10, atomic=True)
    answer = held.advance(4, consumed(4, 9))
    assert answer.outcome == "invalid"
    assert "no epoch was ever used" in answer.problem
    assert outcome(held.advance(4, consumed(4, None))) == "applied, held at 4"


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
    led = postgres.led(2, completed=3, atomic=True)
    assert reached(led) == [3]
    for stream in led.streams:
        postgres.append(stream, 10, 6)
    postgres.complete(7)
    postgres.connection.execute("update space set epoch_dimensions = 1")
    for stream, least in zip(led.streams, stored, strict=True):
        document = f'{{"upto": 5, "least": {least}}}'
        postgres.connection.execute("update lending set consumed = %s where stream_id = %s", (document, stream))
    assert reached(led) == [found]


@pytest.mark.parametrize("over", [0, 1])
def test_too_many_epochs_hold_back_until_consumed(
    postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch, over: int
) -> None:
    """And no other group: they are counted for each."""
    many = postgres.led(2, completed=3, atomic=True)
    few = postgres.lead(postgres.declare(Subscription.parse("$share/few/#"), atomic=True), streams=many.streams)
    postgres.complete(7)
    for stream in many.streams:
        postgres.append(stream, 10, 6)
    held = [many.grant(many.streams[0]), many.grant(many.streams[1]), few.grant()]
    for each in held:
        each.advance(1, consumed(9, 5))
    (size,) = postgres.connection.execute("select max(pg_column_size(consumed)) from lending").fetchone() or (0,)
    done = "update lending set position = 10 where group_id = %s and stream_id = %s"
    postgres.connection.execute(done, (few.group_id, few.streams[1]))
    monkeypatch.setattr(limits, "MAX_HELD_BACK_BYTES", 2 * size - over)
    syncs = [GroupWrites(led.group_id, led.term, (), needs_stream_sync=True) for led in (many, few)]
    assert [one.epochs[0].consumed for one in postgres.store.commit(syncs)] == [frontier(3 if over else 5), frontier(5)]
    held[0].advance(10, consumed(10, 7))
    assert reached(many) == [5]


def test_each_space_has_a_frontier_of_its_own(world: World) -> None:
    led = world.led(completed=3, atomic=True)
    assert reached(led) == [3]
    world.add_space("orders", "orders/#", rolls=(1,))
    (stream,) = world.streams.open_streams(2)
    world.complete(100, space_id=2)
    assert reached(led) == [3, 100], "a new space has nothing to be consumed"
    world.append(stream, 10, 100)
    world.complete(200, space_id=2)
    world.append(*world.streams.open_streams(1), 10, 3)
    world.complete(4)
    assert reached(led) == [4, 100], "what the shadow has holds nothing back"


def test_a_deleted_group_leaves_no_frontier(world: World) -> None:
    led = world.led(completed=3, atomic=True)
    assert reached(led) == [3]
    world.store.delete_group(led.group.subscription)
    again = atomic(world)
    assert again.group_id != led.group_id
    assert reached(again) == [3]
    assert announced(again) == [], "that is where it begins"


def test_a_copy_reports_a_space_that_it_has_done(postgres: PostgresWorld) -> None:
    """All of its streams are closed and finished."""
    led = postgres.led(completed=3, atomic=True)
    postgres.append(led.stream, 10, 3)
    postgres.complete(4)
    held = led.grant()
    postgres.drop_space(1)
    assert row_of(held.release(10, "leave", consumed(10, 4))).status == "finished"
    progress = progress_transfer.read_progress(postgres.connection, led.group)
    with postgres.connection.transaction():
        copy = progress_transfer.create_from_progress(
            postgres.connection, OTHER, GroupOptions(EARLIEST, atomic=True), progress, "imported"
        )
    assert reached(postgres.lead(copy)) == [4]


@pytest.mark.conforms("E23")
def test_losses_count_between_entire_epochs(world: World) -> None:
    led = world.led(completed=3, atomic=True)
    world.append(led.stream, 10, 3, 1_000)
    world.complete(1_000)
    for epoch in range(4, 4 + MAX_LOSSES):
        held = led.grant()
        held.advance(0, consumed(10, epoch))
        assert outcome(held.force_release()) == "applied, free at 0"
    statuses = [row_of(led.grant().force_release()).status for _ in range(1, MAX_LOSSES)]
    assert statuses == ["free"] * (MAX_LOSSES - 2) + ["blocked"]


@pytest.mark.conforms("S8", "E20")
def test_deaths_while_waiting_for_an_epoch_count_not(world: World) -> None:
    led = world.led(atomic=True)
    world.complete(7)
    world.append(led.stream, 4, 7)
    for _ in range(MAX_LOSSES + 1):
        held = led.grant()
        held.advance(0, consumed(0, 7))
        assert outcome(held.force_release()) == "applied, free at 0"
    world.complete(8)
    statuses: list[Any] = [row_of(led.grant().force_release()).status for _ in range(MAX_LOSSES)]
    assert statuses[-1] == "blocked"


@pytest.mark.conforms("S8", "E20")
def test_deaths_before_the_first_epoch_count_not(world: World) -> None:
    """A group that starts live begins with an epoch after those that are to be completed next."""
    (stream,) = world.add_space()
    world.complete(7)
    world.append(stream, 4, 7)
    led = atomic(world)
    world.append(stream, 4, 8)
    assert led.row(stream).consumed == consumed(4, 8)
    statuses = [row_of(led.grant(stream).force_release()).status for _ in range(MAX_LOSSES)]
    assert statuses[-1] == "free"
    world.complete(8)
    assert row_of(led.grant(stream).force_release()).status == "free"
    world.complete(9)
    statuses = [row_of(led.grant(stream).force_release()).status for _ in range(MAX_LOSSES)]
    assert statuses[-1] == "blocked"


@pytest.mark.conforms("E20", "E23")
@pytest.mark.parametrize("epochs", [None, BlockEpochRange(((7,),), ((8,),), has_unset=True)], ids=["all", "some"])
def test_deaths_of_messages_without_an_epoch_count(world: World, epochs: BlockEpochRange | None) -> None:
    """They are delivered while the other messages wait for their epochs; until they are consumed."""
    led = world.led(completed=7, atomic=True)

    def die(times: int) -> list[str]:
        return [row_of(led.grant().force_release()).status for _ in range(times)]

    def append_some() -> None:
        world.streams.append(led.stream, 4, world.clock(), epochs)
        world.publish_catalogue()

    world.append(led.stream, 4, 7)
    append_some()
    assert die(MAX_LOSSES - 1)[-1] == "free"
    held = led.grant()
    held.advance(0, consumed(8, 7))
    held.force_release()
    assert die(MAX_LOSSES)[-1] == "free"
    append_some()
    assert die(MAX_LOSSES) == ["free"] * (MAX_LOSSES - 1) + ["blocked"]


@pytest.mark.conforms("E20", "E39")
@pytest.mark.parametrize(("waiting", "status"), [(999, "blocked"), (1000, "free")])
def test_a_death_reads_few_waiting_blocks(postgres: PostgresWorld, waiting: int, status: str) -> None:
    """Of which there may be any number: what lies behind many of them counts once these are completed."""
    led = postgres.led(completed=7, atomic=True)
    for epochs in (*[BlockEpochRange(((7,),), ((7,),), has_unset=False)] * waiting, None):
        postgres.streams.append(led.stream, 1, postgres.clock(), epochs)
    postgres.publish_catalogue()
    statuses = [row_of(led.grant().force_release()).status for _ in range(MAX_LOSSES)]
    assert statuses[-1] == status


@pytest.mark.conforms("S8", "E20")
def test_deaths_where_no_epoch_was_used_count(world: World) -> None:
    """There is none to wait for."""
    led = world.led(atomic=True)
    world.append(led.stream, 4)
    statuses: list[Any] = [row_of(led.grant().force_release()).status for _ in range(MAX_LOSSES)]
    assert statuses[-1] == "blocked"


def test_reported_epochs_of_another_kind_break_nothing(world: World) -> None:
    """At most the group itself is held back."""
    (stream,) = world.add_space()
    world.complete(3)
    world.append(stream, 10, 3)
    led = atomic(world, EARLIEST)
    led.grant(stream).advance(5, ConsumedFrontier(5, LowerFrontier(((1, 4),))))
    world.complete(4)
    assert led.write(sync=True).has_stale_term is False
    assert announced(led) in ([], ["space default: consumed are all epochs before 1"])


@pytest.mark.conforms("S9")
def test_an_epoch_closed_by_expiry_is_announced_so(postgres: PostgresWorld) -> None:
    led = postgres.led(completed=3, atomic=True)
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
    for epoch in (4, 6, 7):
        postgres.complete(epoch)
        assert reached(led) == [epoch]
    said = "space default: consumed are all epochs before"
    closed = "; closed by expiry, and perhaps not whole: those of producer "
    assert announced(led) == [f"{said} 4", f"{said} 6{closed}back, dead", f"{said} 7"]
