"""A stream is granted when no ancestor of it is unfinished, whatever lies between: what both group stores promise."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sublet_protocol.domain.errors import Conflict
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.admin import progress_transfer
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.admin.reset_transaction import count_held
from sublet_storage.groups.model.records import Group, OnDataLoss
from sublet_storage.groups.status.diagnosis_facts import StallReason
from sublet_storage.groups.status.diagnosis_queries import diagnose_group
from tests.contract.group_world import SHARE, Held, Led, PostgresWorld, World

QUEUE = Subscription.parse("$queue/billing/orders/#")


def behind_empty(world: World, count: int = 2) -> int:
    """Return a stream that follows on so many empty generations."""
    for _ in range(count):
        world.rollover(1)
    return world.rollover(1)[0]


def waits_for_first(led: Led, last: int) -> None:
    """Check that the last stream is granted once the first is consumed, and not before; nor if a sync was made."""
    assert not led.is_granted(last)
    led.sync()
    assert not led.is_granted(last)
    led.consume()
    assert led.is_granted(last)


@pytest.mark.conforms("E33")
@pytest.mark.parametrize(("subscription", "between"), [(SHARE, 3), (QUEUE, 1)], ids=str)
def test_a_stream_waits_across_empty_generations(world: World, subscription: Subscription, between: int) -> None:
    (first,) = streams = world.add_space()
    led = world.lead(world.declare(subscription), streams=streams)
    world.append(first, 2)
    last = behind_empty(world, between)
    world.append(last, 1)
    assert led.sync()[last].parents == (first,)
    waits_for_first(led, last)


@pytest.mark.conforms("E33")
def test_it_waits_across_splits_and_merges(world: World) -> None:
    led = world.led(2)
    left, right = led.streams
    world.append(left, 1)
    world.append(right, 1)
    world.rollover(1, shards=1)
    last = world.rollover(1, shards=3)
    synced = led.sync()
    assert [synced[stream].parents for stream in last] == [(left, right)] * 3
    led.consume(left)
    refused = led.ask(last[0])
    assert refused.outcome == "refused"
    assert refused.lending is not None
    assert refused.lending.parents == (right,)
    led.consume(right)
    assert all(led.is_granted(stream) for stream in last)
    assert all(row.parents == () for row in led.rows().values())


@pytest.mark.conforms("E33")
@pytest.mark.parametrize("begin", [StartingPosition.EARLIEST, StartingPosition.at_time(1_700_000_000_000_000)], ids=str)
def test_a_group_that_begins_in_the_past_waits_too(world: World, begin: StartingPosition) -> None:
    (first,) = streams = world.add_space()
    world.append(first, 2)
    last = behind_empty(world)
    world.append(last, 1)
    led = world.lead(world.group(start=begin), streams=streams)
    assert led.row(last).parents != ()
    led.sync()
    assert led.row(last).parents == (first,)
    waits_for_first(led, last)


@pytest.mark.conforms("E33")
def test_a_group_begun_at_an_offset_waits_for_none(world: World) -> None:
    """It has nothing of closed streams."""
    (first,) = world.add_space()
    world.append(first, 2)
    last = behind_empty(world, 1)
    assert world.lead(world.group(start=StartingPosition.at_offset(1))).is_granted(last)


@pytest.mark.conforms("E33", "W4")
@pytest.mark.parametrize("on_data_loss", OnDataLoss)
def test_an_ancestor_that_is_gone_is_waited_for(world: World, on_data_loss: OnDataLoss) -> None:
    """Until its group skips it, by policy or because somebody decides so."""
    led = world.led(on_data_loss=on_data_loss)
    world.append(led.stream, 2)
    last = behind_empty(world)
    world.retire(1)
    assert not led.is_granted(last)
    led.sync()
    assert led.is_granted(last) is (on_data_loss is OnDataLoss.SKIP)
    blocked = [stream for stream, row in led.rows().items() if row.status == "blocked"]
    assert blocked == ([led.stream] if on_data_loss is OnDataLoss.FAIL else [])


@pytest.mark.conforms("E33")
def test_a_space_that_loses_no_topics_is_no_parent(world: World) -> None:
    world.add_space("default", "#")
    (_, users) = world.add_space("users", "users/#", rolls=(1,))
    (_, orders) = world.add_space("orders", "orders/#", rolls=(1,))
    led = world.lead(world.group(Subscription.parse("$share/all/#")))
    world.append(users, 1)
    world.append(orders, 1)
    opened = world.drop_space(3, rolls=(1,))
    world.rollover(2)
    synced = led.sync()
    assert [synced[stream].parents for stream in opened] == [(orders,)], "nothing of users went there"


def by_reset(world: PostgresWorld, led: Led) -> Group:
    world.reset(led, ResetTarget.earliest())
    return led.group


def by_reset_of_one(world: PostgresWorld, led: Led) -> Group:
    world.reset(led, ResetTarget.earliest(), led.stream)
    return led.group


def by_import(world: PostgresWorld, led: Led) -> Group:
    group = by_reset_of_one(world, led)
    exported = progress_transfer.progress_to_json(progress_transfer.read_progress(world.connection, group))
    progress = progress_transfer.progress_from_json(json.loads(json.dumps(exported)))
    with world.connection.transaction():
        return progress_transfer.create_from_progress(world.connection, QUEUE, group.options, progress, "imported")


@pytest.mark.conforms("E33")
@pytest.mark.parametrize("how", [by_reset, by_reset_of_one, by_import])
def test_what_is_consumed_again_comes_before_its_heirs(
    postgres: PostgresWorld, how: Callable[[PostgresWorld, Led], Group]
) -> None:
    led = postgres.led()
    postgres.append(led.stream, 2)
    last = behind_empty(postgres)
    led.sync()
    led.consume()
    postgres.append(last, 1)
    waits_for_first(postgres.lead(how(postgres, led), streams=led.streams), last)


Descended = tuple[PostgresWorld, Led, Held, Held]


@pytest.fixture
def descended(postgres: PostgresWorld) -> Descended:
    """A stream that is consumed; grants of what follows on it across empty ones, and of one beside them."""
    led = postgres.led(2)
    first, beside = led.streams
    postgres.append(first, 2)
    postgres.append(beside, 2)
    postgres.rollover(1)
    last = postgres.rollover(1)[0]
    postgres.append(last, 3)
    led.sync()
    led.consume(first)
    held = led.grant(last), led.grant(beside)
    held[0].advance(1)
    return postgres, led, *held


@pytest.mark.conforms("E33", "E11", "A5")
def test_a_forced_reset_takes_back_what_follows(descended: Descended) -> None:
    """And nothing else: what is granted beside the stream stays so."""
    world, led, last, beside = descended
    world.reset(led, ResetTarget.earliest(), led.stream, force=True)
    (line,) = (line for line in led.history("reset") if line.stream_id == last.stream)
    assert (line.grant_id, line.position, line.redelivery_end, line.is_forced) == (last.grant_id, 1, 3, True)
    assert str(led.stream) in line.reason
    now = world.lead(led.group, streams=led.streams)
    assert now.row(beside.stream).grant_id == beside.grant_id, "it has nothing to wait for"
    late = last.under(now).advance(3)
    assert (late.outcome, now.row(last.stream).position) == ("refused", 1)
    waits_for_first(now, last.stream)


@pytest.mark.conforms("E33")
def test_a_reset_waits_for_holders_of_what_follows(descended: Descended) -> None:
    world, led, last, _ = descended
    assert count_held(world.connection, led.group, (led.stream,)) == 1, "what is beside it is not waited for"
    with pytest.raises(Conflict, match=f"1 of its streams are granted.* the first is {last.stream}"):
        world.reset(led, ResetTarget.earliest(), led.stream)
    assert not led.write().has_stale_term, "nothing was done"
    world.reset(led, ResetTarget.latest(), led.stream)
    assert world.lead(led.group).row(last.stream).status == "held", "what stays consumed holds nobody back"


@pytest.mark.conforms("E33", "E27")
def test_doubt_behind_a_reset_stream_ends_by_force(descended: Descended) -> None:
    world, led, last, _ = descended
    own = (led.group_id, last.stream)
    world.connection.execute("update lending set session_epoch = 1 where (group_id, stream_id) = (%s, %s)", own)
    last.advance(1, in_doubt=last.doubt(1, 3))
    last.force_release("lost")
    assert last.now().status == "reserved"
    with pytest.raises(Conflict, match="in doubt"):
        world.reset(led, ResetTarget.earliest(), led.stream)
    world.reset(led, ResetTarget.earliest(), led.stream, force=True)
    row = world.lead(led.group).row(last.stream)
    assert (row.status, row.position, row.in_doubt) == ("free", 1, None)
    (line,) = [line for line in led.history("reset") if line.stream_id == last.stream]
    assert line.position == 1
    assert line.redelivery_end is not None, "what was planned may have been done"
    assert line.redelivery_end >= 3


@pytest.mark.conforms("E33")
def test_a_reset_of_an_unnoticed_stream_forgets_none(postgres: PostgresWorld) -> None:
    """Streams before it, of which no leader has been notified yet, are consumed first."""
    postgres.add_space()
    group = postgres.declare()
    (second,) = postgres.rollover(1)
    postgres.append(second, 2)
    (last,) = postgres.rollover(1)
    postgres.append(last, 1)
    postgres.reset(group, ResetTarget.earliest(), last)
    waits_for_first(postgres.lead(group, streams=(second,)), last)


@pytest.mark.conforms("E33", "A7")
def test_why_names_the_ancestor_that_is_waited_for(postgres: PostgresWorld) -> None:
    led = postgres.led()
    postgres.append(led.stream, 2)
    last = behind_empty(postgres)
    postgres.append(last, 1)
    led.sync()
    led.grant().force_release("lost")
    postgres.connection.execute("update leadership set expires_at = clock_timestamp() + interval '1 minute'")
    (answer,) = diagnose_group(postgres.connection, SHARE, last)[1]
    assert answer.diagnosis.reason is StallReason.WAITING_FOR_PARENTS
    assert f"consumed first: {led.stream} (free, at 0 of 2)" in answer.diagnosis.detail
