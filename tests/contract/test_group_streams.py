"""What both group stores promise about streams that come, end, and disappear."""

from __future__ import annotations

import pytest

from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.model.records import (
    AdvancePosition,
    ForceRelease,
    Lending,
    LendingStatus,
    ReleaseStream,
    StartingPosition,
)
from tests.contract.group_world import (
    APPLIED,
    BLOCKED,
    FINISHED,
    FREE,
    HELD,
    REFUSED,
    SHARE,
    TWO,
    World,
    events,
    grant,
    granted,
    outcome,
)


def statuses(rows: tuple[Lending, ...]) -> list[tuple[int, LendingStatus]]:
    return [(row.stream_id, row.status) for row in rows]


@pytest.mark.conforms("E21")
def test_a_closed_stream_consumed_is_finished_for_ever(world: World) -> None:
    group, term, stream, held = world.granted(5)
    world.rollover(1)
    assert outcome(world.apply(group, term, AdvancePosition(stream, held.grant_id, 4))) == (APPLIED, HELD, 4)
    done = world.apply(group, term, AdvancePosition(stream, held.grant_id, 5))
    assert outcome(done) == (APPLIED, FINISHED, 5)
    assert done.lending is not None
    assert done.lending.grant_id > held.grant_id
    assert done.lending.borrower_id is None
    assert events(world, group) == [("grant", 0, False), ("finish", 5, False)]
    assert outcome(world.apply(group, term, AdvancePosition(stream, held.grant_id, 5))) == (REFUSED, FINISHED, 5)
    world.clock.advance(60)
    successor = world.lead(group, TWO)
    assert stream not in [row.stream_id for row in world.store.load(group.group_id, successor)]
    assert outcome(world.apply(group, successor, grant(stream))) == (REFUSED, FINISHED, 5)
    assert stream not in [row.stream_id for row in world.write(group, successor, renew=True).synced]


@pytest.mark.conforms("E21")
@pytest.mark.parametrize("last_word", ["release", "force_release"])
def test_a_grant_ended_at_the_end_finishes_a_stream(world: World, last_word: str) -> None:
    group, term, stream, held = world.granted(5)
    world.apply(group, term, AdvancePosition(stream, held.grant_id, 5))
    world.rollover(1)
    word = (
        ReleaseStream(stream, held.grant_id, 5, "x")
        if last_word == "release"
        else ForceRelease(stream, held.grant_id, "x")
    )
    assert outcome(world.apply(group, term, word)) == (APPLIED, FINISHED, 5)
    assert events(world, group)[-1] == ("finish", 5, False)


@pytest.mark.conforms("E21")
def test_children_wait_for_all_their_parents(world: World) -> None:
    group, term, (left, right) = world.led(2)
    grants = {stream: granted(world, group, term, stream).grant_id for stream in (left, right)}
    for stream in (left, right):
        world.append(stream, 1)
    (child,) = world.rollover(1, shards=1)
    renewed = world.write(group, term, renew=True).synced
    assert statuses(renewed) == [(left, HELD), (right, HELD), (child, FREE)]
    assert [row.parents for row in renewed] == [(), (), (left, right)]
    assert outcome(world.apply(group, term, grant(child))) == (REFUSED, FREE, 0)
    world.apply(group, term, AdvancePosition(left, grants[left], 1))
    assert outcome(world.apply(group, term, grant(child))) == (REFUSED, FREE, 0)
    together = world.write(group, term, AdvancePosition(right, grants[right], 1), grant(child)).results
    assert [result.outcome for result in together] == [APPLIED, REFUSED]  # judged as it was before
    assert granted(world, group, term, child).position == 0


@pytest.mark.conforms("E21", "W3")
def test_a_blocked_parent_holds_its_children_back(world: World) -> None:
    group, term, parent, held = world.granted(3)
    (child,) = world.rollover(1)
    world.write(group, term, AdvancePosition(parent, held.grant_id, 99), renew=True)
    assert outcome(world.apply(group, term, grant(child))) == (REFUSED, FREE, 0)


@pytest.mark.conforms("E21")
def test_a_sync_reports_what_its_batch_has_changed(world: World) -> None:
    group, term, parent, held = world.granted(3)
    (child,) = world.rollover(1)
    synced = world.write(group, term, AdvancePosition(parent, held.grant_id, 3), renew=True).synced
    assert [(row.stream_id, row.status, row.parents) for row in synced] == [(child, FREE, ())]


def test_a_parent_without_a_row_counts_as_consumed(world: World) -> None:
    (parent,) = world.add_space()
    world.append(parent, 3)
    (child,) = world.rollover(1)
    group = world.group()
    term = world.lead(group)
    assert world.row(group, term, child).parents == ()
    assert granted(world, group, term, child).status is HELD


@pytest.mark.conforms("E21", "W6")
def test_a_renewal_adds_new_generations_and_none_older(world: World) -> None:
    (old,) = world.add_space()
    world.append(old, 5)
    (current,) = world.rollover(1)
    world.append(current, 2)
    group = world.group()
    term = world.lead(group)
    assert world.write(group, term, renew=True).synced == ()
    skipped = world.rollover(1, shards=2)
    for stream in skipped:
        world.append(stream, 3)
    (newest,) = world.rollover(1, shards=1)
    renewed = world.write(group, term, renew=True).synced
    assert statuses(renewed) == [(current, FINISHED), *((s, FREE) for s in skipped), (newest, FREE)]
    assert {row.position for row in renewed[1:]} == {0}
    assert statuses(world.write(group, term, renew=True).synced) == [(s, FREE) for s in skipped]
    assert old not in [row.stream_id for row in world.store.load(group.group_id, term)]


def test_closed_streams_with_no_rest_are_not_granted(world: World) -> None:
    group, term, (empty, consumed, held) = world.led(3)
    world.append(consumed, 2)
    world.append(held, 2)
    for stream in (consumed, held):
        grant_id = granted(world, group, term, stream).grant_id
        world.apply(group, term, AdvancePosition(stream, grant_id, 2))
    world.apply(group, term, ReleaseStream(consumed, world.row(group, term, consumed).grant_id, 2, "leave"))
    (child,) = world.rollover(1, shards=1)
    refused = world.apply(group, term, grant(empty))
    assert outcome(refused) == (REFUSED, FINISHED, 0)
    renewed = world.write(group, term, renew=True).synced
    assert statuses(renewed) == [(consumed, FINISHED), (held, HELD), (child, FREE)]
    assert [line.event for line in world.store.history(group.group_id)][-2:] == ["finish", "finish"]
    held_row = renewed[1]
    assert (held_row.is_closed, held_row.position, held_row.head) == (True, 2, 2)
    ended = world.apply(group, term, AdvancePosition(held, held_row.grant_id, 2))
    assert outcome(ended) == (APPLIED, FINISHED, 2)


@pytest.mark.conforms("W4")
def test_what_retention_took_blocks_its_rows(world: World) -> None:
    group, term, (free, held, consumed) = world.led(3)
    for stream in (free, held, consumed):
        world.append(stream, 4)
    granted(world, group, term, held)
    world.apply(group, term, AdvancePosition(consumed, granted(world, group, term, consumed).grant_id, 4))
    (unseen,) = world.rollover(1, shards=1)
    world.append(unseen, 1)
    (last,) = world.rollover(1, shards=1)
    world.retire(1)
    world.retire(2)
    other = world.group(Subscription.parse("$share/other/#"), StartingPosition.EARLIEST)
    assert statuses(world.store.load(other.group_id, world.lead(other))) == [(last, FREE)]
    assert outcome(world.apply(group, term, grant(free))) == (REFUSED, BLOCKED, 0)
    renewed = world.write(group, term, renew=True).synced
    assert statuses(renewed) == [(free, BLOCKED), (held, BLOCKED), (consumed, HELD), (unseen, BLOCKED), (last, FREE)]
    assert [row.position for row in renewed] == [0, 0, 4, 0, 0]
    blocks = [line for line in world.store.history(group.group_id) if line.event == "block"]
    assert [(line.stream_id, line.is_forced) for line in blocks] == [(free, False), (held, True), (unseen, False)]
    lost = {free: 4, held: 4, unseen: 1}
    for line in blocks:
        assert f"offset 0 is gone by retention, {lost[line.stream_id]} messages in all" in line.reason


def test_a_group_gets_the_streams_that_may_match(world: World) -> None:
    (default,) = world.add_space("default", "#")
    orders = Subscription.parse("$share/g/orders/eu")
    group, bystander = world.group(orders), world.group(Subscription.parse("$share/g/users/#"))
    terms = {g.group_id: world.lead(g) for g in (group, bystander)}
    world.append(default, 2)
    (next_default, own) = world.add_space("orders", "orders/#", rolls=(1,))
    mine = world.write(group, terms[group.group_id], renew=True).synced
    assert statuses(mine) == [(default, FREE), (own, FREE)]
    theirs = world.write(bystander, terms[bystander.group_id], renew=True).synced
    assert statuses(theirs) == [(default, FREE), (next_default, FREE)]
    # In the shadow of the space `orders`, the default space has nothing for the group; also once it is closed.
    world.append(next_default, 3)
    world.rollover(1)
    assert statuses(world.write(group, terms[group.group_id], renew=True).synced) == [(default, FREE)]
    # A dropped space's last streams are still read.
    world.append(own, 1)
    (heir,) = world.drop_space(2, rolls=(1,))
    assert statuses(world.write(group, terms[group.group_id], renew=True).synced) == [
        (default, FREE),
        (own, FREE),
        (heir, FREE),
    ]
    fresh = world.group(Subscription.parse("$share/fresh/orders/eu"), StartingPosition.EARLIEST)
    rows = world.store.load(fresh.group_id, world.lead(fresh))
    assert [row.stream_id for row in rows] == [default, next_default, own, 4, heir]


@pytest.mark.conforms("E21", "W3", "W6")
def test_what_a_former_filter_filled_is_granted(world: World) -> None:
    world.add_space("default", "#")
    (_, first) = world.add_space("orders", "orders/#", rolls=(1,))
    group = world.group()
    (second,) = world.rollover(2)
    world.append(second, 3)
    (default, elsewhere) = world.alter_space(2, "users/#", rolls=(1,))
    world.append(elsewhere, 1)
    term = world.lead(group)
    renewed = world.write(group, term, renew=True).synced
    assert statuses(renewed) == [(first, FINISHED), (second, FREE), (default, FREE)]
    assert granted(world, group, term, second).position == 0
    late = world.group(Subscription.parse("$share/late/orders/#"), StartingPosition.EARLIEST)
    rows = world.store.load(late.group_id, world.lead(late))
    assert {first, second, default} < {row.stream_id for row in rows}
    assert elsewhere not in {row.stream_id for row in rows}


def test_a_locked_row_is_renewed_later(world: World) -> None:
    group, term, (stream,) = world.led()
    world.rollover(1)
    with world.locked(group.group_id, stream):
        assert statuses(world.write(group, term, renew=True).synced) == [(stream, FREE), (2, FREE)]
    assert statuses(world.write(group, term, renew=True).synced) == [(stream, FINISHED)]
    assert world.store.find_group(group.group_id) is not None
    assert world.store.delete_group(SHARE) == group.group_id
