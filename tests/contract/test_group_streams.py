"""What both group stores promise about streams that come, end, and disappear."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.model.records import AdvancePosition, ForceRelease, Lending
from tests.contract.group_world import SHARE, Held, PostgresWorld, World, grant, outcome


def statuses(rows: Mapping[int, Lending]) -> list[tuple[int, str]]:
    return [(stream, row.status) for stream, row in rows.items()]


@pytest.mark.conforms("E21")
def test_a_closed_stream_consumed_is_finished_for_ever(world: World) -> None:
    held = world.granted(5)
    world.rollover(1)
    assert outcome(held.advance(4)) == "applied, held at 4"
    done = held.advance(5)
    assert outcome(done) == "applied, finished at 5"
    assert done.lending is not None
    assert done.lending.grant_id > held.grant_id
    assert done.lending.borrower_id is None
    assert held.led.events() == [("grant", 0, False), ("finish", 5, False)]
    assert outcome(held.advance(5)) == "refused, finished at 5"
    successor = held.led.succeed()
    assert held.stream not in successor.rows()
    assert outcome(successor.ask()) == "refused, finished at 5"
    assert held.stream not in successor.sync()


@pytest.mark.conforms("E21")
@pytest.mark.parametrize("end", [lambda held: held.release(5), Held.force_release], ids=["release", "force release"])
def test_a_grant_ended_at_the_end_finishes_a_stream(world: World, end: Any) -> None:
    held = world.granted(5)
    held.advance(5)
    world.rollover(1)
    assert outcome(end(held)) == "applied, finished at 5"
    assert held.led.events()[-1] == ("finish", 5, False)


@pytest.mark.conforms("E21")
def test_children_wait_for_all_their_parents(world: World) -> None:
    led = world.led(2)
    left, right = led.streams
    grants = [led.grant(stream) for stream in led.streams]
    for stream in led.streams:
        world.append(stream, 1)
    (child,) = world.rollover(1, shards=1)
    synced = led.sync()
    assert statuses(synced) == [(left, "held"), (right, "held"), (child, "free")]
    assert [row.parents for row in synced.values()] == [(), (), (left, right)]
    assert outcome(led.ask(child)) == "refused, free at 0"
    grants[0].advance(1)
    assert outcome(led.ask(child)) == "refused, free at 0"
    together = led.write(AdvancePosition(right, grants[1].grant_id, 1), grant(child)).results
    assert [result.outcome for result in together] == ["applied", "refused"]  # judged as it was before
    assert led.grant(child).row.position == 0


@pytest.mark.conforms("E21")
def test_each_group_waits_for_its_own_parents(world: World) -> None:
    led = world.led(2)
    world.group(Subscription.parse("$share/other/orders/#"))  # which reads nothing
    for stream in led.streams:
        world.append(stream, 1)
    children = world.rollover(1, shards=2)
    led.sync()
    led.consume(led.streams[1])
    assert [led.is_granted(child) for child in children] == [False, True]


@pytest.mark.conforms("E21", "W3")
def test_a_blocked_parent_holds_its_children_back(world: World) -> None:
    held = world.granted(3)
    (child,) = world.rollover(1)
    held.led.sync()
    assert outcome(held.release(0, "garbage", poison=1)) == "applied, blocked at 0"
    assert outcome(held.led.ask(child)) == "refused, free at 0"


@pytest.mark.conforms("E21")
def test_a_sync_reports_what_its_batch_has_changed(world: World) -> None:
    held = world.granted(3)
    (child,) = world.rollover(1)
    synced = held.led.write(AdvancePosition(held.stream, held.grant_id, 3), sync=True).synced
    assert [(row.stream_id, row.status, row.parents) for row in synced] == [(child, "free", ())]


def test_a_parent_without_a_row_counts_as_consumed(world: World) -> None:
    (parent,) = world.add_space()
    world.append(parent, 3)
    (child,) = world.rollover(1)
    led = world.lead(world.group())
    assert led.row(child).parents == ()
    assert led.is_granted(child)


@pytest.mark.conforms("E21", "W6")
def test_a_renewal_adds_new_generations_and_none_older(world: World) -> None:
    (old,) = world.add_space()
    world.append(old, 5)
    (current,) = world.rollover(1)
    world.append(current, 2)
    led = world.lead(world.group())
    assert led.sync() == {}
    skipped = world.rollover(1, shards=2)
    for stream in skipped:
        world.append(stream, 3)
    (newest,) = world.rollover(1, shards=1)
    synced = led.sync()
    assert statuses(synced) == [(current, "finished"), *((s, "free") for s in skipped), (newest, "free")]
    assert {row.position for stream, row in synced.items() if stream != current} == {0}
    assert statuses(led.sync()) == [(s, "free") for s in skipped]
    assert old not in led.rows()


def test_closed_streams_with_no_rest_are_not_granted(world: World) -> None:
    led = world.led(3)
    empty, consumed, held = led.streams
    for stream in (consumed, held):
        world.append(stream, 2)
        grant = led.grant(stream)
        grant.advance(2)
        if stream == consumed:
            grant.release(2)
    (child,) = world.rollover(1, shards=1)
    assert outcome(led.ask(empty)) == "refused, finished at 0"
    synced = led.sync()
    assert statuses(synced) == [(consumed, "finished"), (held, "held"), (child, "free")]
    assert [line.event for line in led.history()][-2:] == ["finish", "finish"]
    assert (synced[held].is_closed, synced[held].position, synced[held].head) == (True, 2, 2)
    assert outcome(grant.advance(2)) == "applied, finished at 2"


@pytest.mark.conforms("W4")
def test_what_retention_took_blocks_its_rows(world: World) -> None:
    led = world.led(3)
    free, held, consumed = led.streams
    for stream in led.streams:
        world.append(stream, 4)
    led.grant(held)
    led.grant(consumed).advance(4)
    (unseen,) = world.rollover(1, shards=1)
    world.append(unseen, 1)
    (last,) = world.rollover(1, shards=1)
    world.retire(1)
    world.retire(2)
    other = world.lead(world.group(Subscription.parse("$share/other/#"), StartingPosition.EARLIEST))
    assert statuses(other.rows()) == [(last, "free")]
    assert outcome(led.ask(free)) == "refused, blocked at 0"
    assert [(stream, row.status, row.position) for stream, row in led.sync().items()] == [
        (free, "blocked", 0), (held, "blocked", 0), (consumed, "held", 4), (unseen, "blocked", 0), (last, "free", 0),
    ]  # fmt: skip
    blocks = led.history("block")
    assert [(line.stream_id, line.is_forced) for line in blocks] == [(free, False), (held, True), (unseen, False)]
    for line, lost in zip(blocks, (4, 4, 1), strict=True):
        assert f"offset 0 is gone by retention, {lost} messages in all" in line.reason


def test_a_group_gets_the_streams_that_may_match(world: World) -> None:
    (default,) = world.add_space("default", "#")
    orders, users = (Subscription.parse(f"$share/g/{filter}") for filter in ("orders/eu", "users/#"))
    led, bystander = world.lead(world.group(orders)), world.lead(world.group(users))
    world.append(default, 2)
    (next_default, own) = world.add_space("orders", "orders/#", rolls=(1,))
    assert statuses(led.sync()) == [(default, "free"), (own, "free")]
    assert statuses(bystander.sync()) == [(default, "free"), (next_default, "free")]
    # In the shadow of the space `orders`, the default space has nothing for the group; also once it is closed.
    world.append(next_default, 3)
    world.rollover(1)
    assert statuses(led.sync()) == [(default, "free")]
    # A dropped space's last streams are still read.
    world.append(own, 1)
    (heir,) = world.drop_space(2, rolls=(1,))
    assert statuses(led.sync()) == [(default, "free"), (own, "free"), (heir, "free")]
    fresh = world.lead(world.group(Subscription.parse("$share/fresh/orders/eu"), StartingPosition.EARLIEST))
    assert list(fresh.rows()) == [default, next_default, own, 4, heir]


@pytest.mark.conforms("E21", "W3", "W6")
def test_what_a_former_filter_filled_is_granted(world: World) -> None:
    world.add_space("default", "#")
    (_, first) = world.add_space("orders", "orders/#", rolls=(1,))
    group = world.group()
    (second,) = world.rollover(2)
    world.append(second, 3)
    (default, elsewhere) = world.alter_space(2, "users/#", rolls=(1,))
    world.append(elsewhere, 1)
    led = world.lead(group)
    assert statuses(led.sync()) == [(first, "finished"), (second, "free"), (default, "free")]
    assert led.grant(second).row.position == 0
    late = world.lead(world.group(Subscription.parse("$share/late/orders/#"), StartingPosition.EARLIEST)).rows()
    assert {first, second, default} < late.keys()
    assert elsewhere not in late


def test_a_locked_row_is_renewed_later(world: World) -> None:
    led = world.led()
    world.rollover(1)
    with world.locked(led.group_id, led.stream):
        assert statuses(led.sync()) == [(led.stream, "free"), (2, "free")]
    assert statuses(led.sync()) == [(led.stream, "finished")]
    assert world.store.delete_group(SHARE) == led.group_id


@pytest.mark.conforms("E33")
def test_groups_synced_together_have_their_own_pasts(world: World) -> None:
    """One has noticed the generation that was the newest, and over, when the other began."""
    (first,) = world.add_space()
    older = world.lead(world.group(Subscription.parse("$share/older/#")))
    (before,) = world.add_space("before", "orders/before/#")
    world.append(before, 3)
    world.drop_space(2)
    younger = world.lead(world.group())
    (last,) = world.rollover(1)
    world.store.commit([led.writes(sync=True) for led in (older, younger)])
    assert set(older.rows()) - {first} == {before, last}
    assert set(younger.rows()) - {first} == {last}


def test_a_sync_reports_what_its_commit_has_changed(world: World) -> None:
    held = world.granted(3)
    world.rollover(1)
    release = ForceRelease(held.stream, held.grant_id, "gone")
    (result,) = world.store.commit([held.led.writes(release, sync=True)])
    assert [row.status for row in result.synced if row.stream_id == held.stream] == ["free"]


def test_a_sync_that_finds_nothing_writes_no_group(postgres: PostgresWorld) -> None:
    """Or whoever has its row locked, for a command say, would hold the leader up."""
    led = postgres.led()
    written = postgres.connection.execute("select ctid from consumer_group").fetchall()
    led.sync()
    assert postgres.connection.execute("select ctid from consumer_group").fetchall() == written
