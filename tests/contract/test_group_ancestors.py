"""A stream is granted when no ancestor of it is unfinished, whatever lies between: what both group stores promise."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from sublet_protocol.domain.errors import Conflict
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.admin import progress_transfer
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.model.records import (
    AdvancePosition,
    ForceRelease,
    Group,
    GroupOptions,
    LendingStatus,
    OnDataLoss,
    StartingPosition,
)
from sublet_storage.groups.status.diagnosis_facts import StallReason
from sublet_storage.groups.status.diagnosis_queries import diagnose_group
from tests.contract.group_world import (
    APPLIED,
    BLOCKED,
    FINISHED,
    FREE,
    HELD,
    REFUSED,
    SHARE,
    PostgresWorld,
    World,
    grant,
    granted,
)

QUEUE = Subscription.parse("$queue/billing/orders/#")


def is_granted(world: World, group: Group, term: int, stream: int) -> bool:
    return world.apply(group, term, grant(stream)).outcome is APPLIED


def consume(world: World, group: Group, term: int, stream: int) -> None:
    """Granted, consumed to its head, which ends it, and with it what was empty behind it."""
    held = granted(world, group, term, stream)
    done = world.applied(group, term, AdvancePosition(stream, held.grant_id, held.head))
    assert done.status is FINISHED


def empty_ones(world: World, count: int) -> None:
    for _ in range(count):
        world.rollover(1)


@pytest.mark.conforms("E33")
@pytest.mark.parametrize(("subscription", "between"), [(SHARE, 3), (QUEUE, 1)], ids=str)
def test_a_stream_waits_across_empty_generations(world: World, subscription: Subscription, between: int) -> None:
    (first,) = world.add_space()
    group = world.store.declare_group(subscription, GroupOptions())
    term = world.lead(group)
    world.append(first, 2)
    empty_ones(world, between)
    (last,) = world.rollover(1)
    world.append(last, 1)
    renewed = {row.stream_id: row for row in world.write(group, term, renew=True).synced}
    assert renewed[last].parents == (first,)
    assert not is_granted(world, group, term, last)
    consume(world, group, term, first)
    assert is_granted(world, group, term, last)


@pytest.mark.conforms("E33")
def test_it_waits_across_splits_and_merges(world: World) -> None:
    group, term, (left, right) = world.led(2)
    world.append(left, 1)
    world.append(right, 1)
    world.rollover(1, shards=1)
    last = world.rollover(1, shards=3)
    renewed = {row.stream_id: row for row in world.write(group, term, renew=True).synced}
    assert [renewed[stream].parents for stream in last] == [(left, right)] * 3
    consume(world, group, term, left)
    refused = world.apply(group, term, grant(last[0]))
    assert refused.outcome is REFUSED
    assert refused.lending is not None
    assert refused.lending.parents == (right,)
    consume(world, group, term, right)
    assert all(is_granted(world, group, term, stream) for stream in last)
    assert all(row.parents == () for row in world.store.load(group.group_id, term))


@pytest.mark.conforms("E33")
@pytest.mark.parametrize(
    "begin",
    [StartingPosition.EARLIEST, StartingPosition.at_offset(1), StartingPosition.at_time(1_700_000_000_000_000)],
    ids=str,
)
def test_a_group_that_begins_in_the_past_waits_too(world: World, begin: StartingPosition) -> None:
    (first,) = world.add_space()
    world.append(first, 2)
    empty_ones(world, 2)
    if begin.policy == "offset":  # it has nothing of closed streams, and so nothing waits
        group = world.group(start=begin)
        assert is_granted(world, group, world.lead(group), max(world.streams.streams))
        return
    (last,) = world.rollover(1)
    world.append(last, 1)
    group = world.group(start=begin)
    term = world.lead(group)
    assert world.row(group, term, last).parents != ()
    world.write(group, term, renew=True)
    assert world.row(group, term, last).parents == (first,)
    assert not is_granted(world, group, term, last)
    consume(world, group, term, first)
    assert is_granted(world, group, term, last)


@pytest.mark.conforms("E33", "W4")
@pytest.mark.parametrize("on_data_loss", OnDataLoss)
def test_an_ancestor_that_is_gone_is_waited_for(world: World, on_data_loss: OnDataLoss) -> None:
    """Until its group skips it, by policy or because somebody decides so."""
    (first,) = world.add_space()
    group = world.declare(on_data_loss=on_data_loss)
    term = world.lead(group)
    world.append(first, 2)
    empty_ones(world, 2)
    (last,) = world.rollover(1)
    world.retire(1)
    assert not is_granted(world, group, term, last)
    world.write(group, term, renew=True)
    assert is_granted(world, group, term, last) is (on_data_loss is OnDataLoss.SKIP)
    if on_data_loss is OnDataLoss.FAIL:
        (waits,) = (row for row in world.store.load(group.group_id, term) if row.status is BLOCKED)
        assert waits.stream_id == first


@pytest.mark.conforms("E33")
def test_a_space_that_loses_no_topics_is_no_parent(world: World) -> None:
    world.add_space("default", "#")
    (_, users) = world.add_space("users", "users/#", rolls=(1,))
    (_, orders) = world.add_space("orders", "orders/#", rolls=(1,))
    group = world.group(Subscription.parse("$share/all/#"))
    term = world.lead(group)
    world.append(users, 1)
    world.append(orders, 1)
    opened = world.drop_space(3, rolls=(1,))
    world.rollover(2)
    renewed = {row.stream_id: row for row in world.write(group, term, renew=True).synced}
    assert [renewed[stream].parents for stream in opened] == [(orders,)], "nothing of users went there"


def by_reset(world: PostgresWorld, group: Group, _: int) -> Group:
    world.reset(group, ResetTarget.earliest())
    return group


def by_reset_of_one(world: PostgresWorld, group: Group, first: int) -> Group:
    world.reset(group, ResetTarget.earliest(), first)
    return group


def by_import(world: PostgresWorld, group: Group, first: int) -> Group:
    by_reset_of_one(world, group, first)
    stored = json.loads(
        json.dumps(progress_transfer.progress_to_json(progress_transfer.read_progress(world.connection, group)))
    )
    with world.connection.transaction():
        return progress_transfer.create_from_progress(
            world.connection, QUEUE, group.options, progress_transfer.progress_from_json(stored), "imported"
        )


@pytest.mark.conforms("E33")
@pytest.mark.parametrize("how", [by_reset, by_reset_of_one, by_import])
def test_what_is_consumed_again_comes_before_its_heirs(
    postgres: PostgresWorld, how: Callable[[PostgresWorld, Group, int], Group]
) -> None:
    group, term, (first,) = postgres.led()
    postgres.append(first, 2)
    empty_ones(postgres, 2)
    (last,) = postgres.rollover(1)
    postgres.write(group, term, renew=True)
    consume(postgres, group, term, first)
    postgres.append(last, 1)
    group = how(postgres, group, first)
    term = postgres.lead(group)
    assert not is_granted(postgres, group, term, last)
    postgres.write(group, term, renew=True)
    assert not is_granted(postgres, group, term, last)
    consume(postgres, group, term, first)
    assert is_granted(postgres, group, term, last)


Descended = tuple[PostgresWorld, Group, int, tuple[int, int, int]]


@pytest.fixture
def descended(postgres: PostgresWorld) -> Descended:
    """A stream that is consumed, what follows on it across empty ones, one beside them; the last two are granted."""
    group, term, (first, beside) = postgres.led(2)
    postgres.append(first, 2)
    postgres.append(beside, 2)
    postgres.rollover(1)
    last = postgres.rollover(1)[0]
    postgres.append(last, 3)
    postgres.write(group, term, renew=True)
    consume(postgres, group, term, first)
    for stream in (last, beside):
        granted(postgres, group, term, stream)
    postgres.apply(group, term, AdvancePosition(last, postgres.row(group, term, last).grant_id, 1))
    return postgres, group, term, (first, last, beside)


@pytest.mark.conforms("E33", "E11", "A5")
def test_a_forced_reset_takes_back_what_follows(descended: Descended) -> None:
    """And nothing else: what is granted beside the stream stays so."""
    world, group, term, (first, last, beside) = descended
    before = {stream: world.row(group, term, stream) for stream in (last, beside)}
    world.reset(group, ResetTarget.earliest(), first, force=True)
    (line,) = (line for line in world.store.history(group.group_id) if line.stream_id == last and line.event == "reset")
    assert (line.grant_id, line.position, line.redelivery_end, line.is_forced) == (before[last].grant_id, 1, 3, True)
    assert str(first) in line.reason
    term = world.lead(group)
    assert world.row(group, term, beside).grant_id == before[beside].grant_id, "it has nothing to wait for"
    late = world.apply(group, term, AdvancePosition(last, before[last].grant_id, 3))
    assert (late.outcome, world.row(group, term, last).position) == (REFUSED, 1)
    assert not is_granted(world, group, term, last)
    consume(world, group, term, first)
    assert is_granted(world, group, term, last)


@pytest.mark.conforms("E33")
def test_a_reset_waits_for_holders_of_what_follows(descended: Descended) -> None:
    world, group, term, (first, last, _) = descended
    with pytest.raises(Conflict, match=f"1 of its streams are granted.* the first is {last}"):
        world.reset(group, ResetTarget.earliest(), first)
    assert not world.write(group, term).has_stale_term, "nothing was done"
    world.reset(group, ResetTarget.latest(), first)
    assert world.row(group, world.lead(group), last).status is HELD, "what stays consumed holds nobody back"


@pytest.mark.conforms("E33", "E27")
def test_doubt_behind_a_reset_stream_ends_by_force(descended: Descended) -> None:
    world, group, term, (first, last, _) = descended
    row = world.row(group, term, last)
    world.connection.execute(
        "update lending set session_epoch = 1 where (group_id, stream_id) = (%s, %s)", (group.group_id, last)
    )
    world.apply(group, term, AdvancePosition(last, row.grant_id, 1, in_doubt=InDoubtRange(row.grant_id, 1, 3, 60.0)))
    world.apply(group, term, ForceRelease(last, row.grant_id, "lost"))
    assert world.row(group, term, last).status is LendingStatus.RESERVED
    with pytest.raises(Conflict, match="in doubt"):
        world.reset(group, ResetTarget.earliest(), first)
    world.reset(group, ResetTarget.earliest(), first, force=True)
    row = world.row(group, world.lead(group), last)
    assert (row.status, row.position, row.in_doubt) == (FREE, 1, None)
    lines = world.store.history(group.group_id)
    (line,) = [line for line in lines if (line.event, line.stream_id) == ("reset", last)]
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
    by_reset_of_one(postgres, group, last)
    term = postgres.lead(group)
    assert not is_granted(postgres, group, term, last)
    postgres.write(group, term, renew=True)
    consume(postgres, group, term, second)
    assert is_granted(postgres, group, term, last)


@pytest.mark.conforms("E33", "A7")
def test_why_names_the_ancestor_that_is_waited_for(postgres: PostgresWorld) -> None:
    group, term, (first,) = postgres.led()
    postgres.append(first, 2)
    empty_ones(postgres, 2)
    (last,) = postgres.rollover(1)
    postgres.append(last, 1)
    postgres.write(group, term, renew=True)
    held = granted(postgres, group, term, first)
    postgres.apply(group, term, ForceRelease(first, held.grant_id, "lost"))
    postgres.connection.execute("update leadership set expires_at = clock_timestamp() + interval '1 minute'")
    (answer,) = diagnose_group(postgres.connection, SHARE, last)[1]
    assert answer.diagnosis.reason is StallReason.WAITING_FOR_PARENTS
    assert f"consumed first: {first} (free, at 0 of 2)" in answer.diagnosis.detail
