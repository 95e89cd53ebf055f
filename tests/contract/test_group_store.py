"""What both group stores promise: who leads, what an entry does, and what a renewal finds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from sublet_protocol.domain.errors import StaleTerm, TooManyGroups, UndeclaredQueue
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.limits import MAX_GROUPS_PER_MINUTE
from sublet_protocol.domain.subscriptions import MAX_OFFSET, Subscription
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import (
    MAX_LOSSES,
    AdvancePosition,
    ForceRelease,
    GroupOptions,
    GroupWrites,
    Leadership,
    LendingChangeResult,
    OnDataLoss,
    ReclaimStream,
    RecordHistory,
    ReleaseStream,
    StartingPosition,
)
from sublet_storage.node_directory import NodeIncarnation
from tests.contract.group_world import (
    APPLIED,
    BLOCKED,
    BUSY,
    FREE,
    HELD,
    INVALID,
    LEASE_S,
    ONE,
    REFUSED,
    SHARE,
    TWO,
    PostgresWorld,
    World,
    events,
    grant,
    granted,
    outcome,
)

# --- groups -------------------------------------------------------------------------------------------------------


def test_latest_is_at_the_heads_earliest_at_the_start(world: World) -> None:
    first, second = world.add_space(shards=2)
    world.append(first, 5)
    latest = world.group()
    earliest = world.group(Subscription.parse("$share/other/#"), StartingPosition.EARLIEST)
    for group, positions in ((latest, {first: 5, second: 0}), (earliest, {first: 0, second: 0})):
        rows = world.store.load(group.group_id, world.lead(group))
        assert {row.stream_id: row.position for row in rows} == positions
        assert all(row.status is FREE and row.head >= row.position for row in rows)


def test_earliest_includes_what_is_closed_and_not_gone(world: World) -> None:
    world.add_space()
    for stream in (1, 2):
        world.append(stream, 3)
        world.rollover(1)
    world.retire(1)
    earliest, latest = world.group(start=StartingPosition.EARLIEST), world.group(Subscription.parse("$share/other/#"))
    assert [row.stream_id for row in world.store.load(earliest.group_id, world.lead(earliest))] == [2, 3]
    term = world.lead(latest)
    world.write(latest, term, renew=True)
    assert [row.stream_id for row in world.store.load(latest.group_id, term)] == [3]


@pytest.mark.conforms("E2")
def test_a_queue_must_be_declared(world: World) -> None:
    (stream,) = world.add_space()
    queue = Subscription.parse("$queue/billing/orders/#")
    with pytest.raises(UndeclaredQueue, match="groups create"):
        world.store.open_group(queue)
    declared = world.store.declare_group(queue)
    world.append(stream, 4)
    assert world.store.open_group(queue) == declared
    assert world.row(declared, world.lead(declared), stream).position == 0


@pytest.mark.conforms("X4")
def test_a_principal_has_so_many_groups_made_a_minute(world: World) -> None:
    """Those that are deleted count, those that it finds there do not."""

    def open_all(principal: str | None, *names: object) -> None:
        for name in names:
            world.store.open_group(Subscription.parse(f"$share/{name}/#"), principal=principal)

    open_all("user:a", *range(MAX_GROUPS_PER_MINUTE - 1))
    world.store.declare_group(Subscription.parse("$queue/q/#"), principal="user:a")
    world.store.delete_group(Subscription.parse("$share/0/#"))
    for create in (world.store.open_group, world.store.declare_group):
        with pytest.raises(TooManyGroups, match="user:a has had 60 groups made in a minute"):
            create(Subscription.parse("$share/one more/#"), principal="user:a")
    open_all("user:a", 1, 2)
    open_all("user:b", "b")
    open_all(None, "n")
    world.clock.advance(61.0)
    open_all("user:a", "one more")


@pytest.mark.conforms("E23")
def test_a_deleted_groups_second_life_is_another(world: World) -> None:
    group, term, stream, held = world.granted(7, on_data_loss=OnDataLoss.SKIP)
    assert world.store.delete_group(SHARE) == group.group_id
    assert world.store.delete_group(SHARE) is None
    assert world.store.find_group(group.group_id) is None
    assert world.write(group, term, AdvancePosition(stream, held.grant_id, 3)).has_stale_term
    again = world.group()
    assert again.group_id != group.group_id
    assert again.options == GroupOptions()
    row = world.row(again, world.lead(again), stream)
    assert (row.status, row.position, row.grant_id, row.session) == (FREE, 7, 0, None)
    never_elected = world.lead(group, TWO)
    assert world.write(group, never_elected, grant(stream), renew=True).synced == ()
    assert world.store.load(group.group_id, never_elected) == ()


@pytest.mark.conforms("A7", "E23")
def test_history_ends_each_grant_of_a_deleted_group(world: World) -> None:
    group, term, (free, first, second) = world.led(3)
    grants = {stream: granted(world, group, term, stream).grant_id for stream in (second, first)}
    world.append(first, 10)
    world.apply(group, term, AdvancePosition(first, grants[first], 4))
    world.clock.advance(LEASE_S)
    newest = world.lead(group, TWO)
    before = world.store.history(group.group_id)
    world.store.delete_group(SHARE)
    lines = world.store.history(group.group_id)[len(before) :]
    assert [(line.stream_id, line.grant_id, line.position) for line in lines] == [
        (first, grants[first], 4), (second, grants[second], 0),
    ]  # fmt: skip
    for line in lines:
        assert (line.event, line.reason, line.is_forced) == ("delete", "its group was deleted", False)
        assert (line.borrower_id, line.agent, line.session) == ("b1", "a1", "session")
        assert (line.term, line.at_us) == (newest, world.clock.now_us)
    assert free not in grants
    world.store.delete_group(SHARE)
    assert len(world.store.history(group.group_id)) == len(before) + 2


@pytest.mark.conforms("E23", "W4")
def test_blocked_streams_begin_again_in_a_second_life(world: World) -> None:
    bad, gone = world.add_space("orders", "orders/#")[0], world.add_space("others", "orders/eu")[0]
    group = world.group()
    term = world.lead(group)
    for stream in (bad, gone):
        world.append(stream, 3)
    poison = ReleaseStream(bad, granted(world, group, term, bad).grant_id, 0, "garbage", poison=1)
    assert outcome(world.apply(group, term, poison))[1] is BLOCKED
    world.rollover(2)
    world.retire(2)
    world.write(group, term, renew=True)
    assert world.row(group, term, gone).status is BLOCKED
    world.store.delete_group(SHARE)
    again = world.declare(starting_position=StartingPosition.EARLIEST)
    rows = world.store.load(again.group_id, world.lead(again))
    assert {row.status for row in rows} == {FREE}
    assert {row.stream_id: row.position for row in rows}[bad] == 0
    assert gone not in {row.stream_id for row in rows}


@pytest.mark.conforms("E24")
def test_names_and_filters_never_collide(world: World) -> None:
    (stream,) = world.add_space()
    names = ["g", "G", "g ", "ü", "u\u0308", "日本語", "%", "_", "\\", "'", '"', "$share", "x" * 255]
    filters = ["#", "+", "+/#", "a/#", "a/+", "a", "a/", "/a", "a//b", "日本/+"]
    texts = [f"$share/{name}/{filter}" for name in names for filter in filters] + ["$queue/g/a", "$queue/a/b"]
    groups = [world.store.declare_group(Subscription.parse(text)) for text in texts]
    assert len({group.group_id for group in groups}) == len(texts)
    for text, group in zip(texts, groups, strict=True):
        found = world.store.find_group(group.group_id)
        assert found is not None
        assert str(found.subscription) == text
    one, other = groups[0], groups[1]
    granted(world, one, world.lead(one), stream)
    assert world.row(other, world.lead(other), stream).status is FREE


# --- leadership ---------------------------------------------------------------------------------------------------


@pytest.mark.conforms("E12")
def test_of_fifty_claiming_at_once_one_leads(world: World) -> None:
    nodes = [NodeIncarnation(f"n{i}", f"i{i}", f"127.0.0.1:{i}") for i in range(50)]
    for term in range(2):
        start = Barrier(len(nodes))

        def claim(node: NodeIncarnation, start: Barrier = start) -> Leadership:
            store = world.store
            if isinstance(world, PostgresWorld):
                store = PostgresGroupStore(world.url, world.clock, lock_timeout_s=60, statement_timeout_s=60)
                store.read_leaderships([7])
                start.wait(timeout=60)
            seen = store.claim(7, node, LEASE_S)
            if isinstance(store, PostgresGroupStore):
                store.close()
            return seen

        with ThreadPoolExecutor(len(nodes)) as pool:
            claims = list(pool.map(claim, nodes))
        assert len(set(claims)) == 1, f"round {term}"
        assert claims[0].node in nodes
        assert world.store.read_leaderships([7]) == {7: claims[0]}
        world.clock.advance(LEASE_S)


@pytest.mark.conforms("E14", "E23")
@pytest.mark.parametrize("ended", ["deleted", "released"])
def test_a_clock_set_back_revives_nothing(world: World, ended: str) -> None:
    group = world.group()
    terms = {group.group_id: world.lead(group)}
    if ended == "deleted":
        world.store.delete_group(group.subscription)
    else:
        world.store.release(ONE, terms)
    world.clock.now_us -= 3_600_000_000
    assert world.store.renew(ONE, terms, LEASE_S) == frozenset()


def test_a_claim_waits_for_the_lease(world: World) -> None:
    """Terms only grow, even where the clock is set back."""
    first = world.store.claim(3, ONE, LEASE_S)
    assert world.store.claim(3, TWO, LEASE_S) == first
    world.clock.advance(4)
    again = world.store.claim(3, ONE, LEASE_S)
    assert (again.term, again.remaining_s) == (first.term, LEASE_S - 4)
    world.clock.advance(6)
    second = world.store.claim(3, TWO, LEASE_S)
    assert second.node == TWO
    assert second.term > first.term
    world.clock.now_us -= 3_600_000_000
    world.store.release(TWO, {3: second.term})
    assert world.store.claim(3, ONE, LEASE_S).term == second.term + 1


def test_renewal_extends_only_what_is_ours_and_alive(world: World) -> None:
    ours, late = world.store.claim(1, ONE, LEASE_S), world.store.claim(2, ONE, 1.0)
    theirs = world.store.claim(3, TWO, LEASE_S)
    world.clock.advance(2)
    terms = {1: ours.term, 2: late.term, 3: theirs.term, 4: 1}
    assert world.store.renew(ONE, terms, LEASE_S) == {1}
    assert world.store.renew(ONE, {1: ours.term - 1}, LEASE_S) == frozenset()
    assert {i: c.remaining_s for i, c in world.store.read_leaderships([1, 2, 3, 4]).items()} == {
        1: 10.0,
        2: -1.0,
        3: 8.0,
    }


@pytest.mark.conforms("E13")
def test_a_deposed_leaders_clean_up_harms_nobody(world: World) -> None:
    old = world.store.claim(1, ONE, LEASE_S)
    world.clock.advance(LEASE_S)
    new = world.store.claim(1, TWO, LEASE_S)
    assert world.store.release(ONE, {1: old.term}) == frozenset()
    assert world.store.release(ONE, {1: new.term}) == frozenset()
    assert world.store.renew(ONE, {1: old.term}, LEASE_S) == frozenset()
    assert world.store.read_leaderships([1]) == {1: new}


@pytest.mark.conforms("E15")
def test_a_released_claim_can_be_had_at_once(world: World) -> None:
    claim = world.store.claim(1, ONE, LEASE_S)
    assert world.store.release(ONE, {1: claim.term}) == {1}
    assert world.store.read_leaderships([1])[1].remaining_s <= 0
    assert world.store.claim(1, TWO, LEASE_S).node == TWO


@pytest.mark.conforms("E13")
def test_a_grant_id_is_above_its_leaders_term(world: World) -> None:
    """A term is above all that was given before, also on a timeline of which the end is lost."""
    group, term, (stream,) = world.led()
    world.clock.advance(-5.0)
    assert granted(world, group, term, stream).grant_id >= term


@pytest.mark.conforms("E13", "E10")
@pytest.mark.parametrize("succeeded", [True, False])
def test_nothing_is_written_under_a_term_that_is_over(world: World, succeeded: bool) -> None:
    group, term, (first, second) = world.led(2)
    held = granted(world, group, term, first)
    world.append(first, 5)
    world.clock.advance(LEASE_S)
    if succeeded:
        world.lead(group, TWO)
    entries = (AdvancePosition(first, held.grant_id, 4), grant(second))
    stale = world.write(group, term, *entries, renew=True)
    assert (stale.has_stale_term, stale.results, stale.synced) == (True, (), ())
    with pytest.raises(StaleTerm):
        world.store.load(group.group_id, term)
    now = world.lead(group, TWO)
    rows = world.store.load(group.group_id, now)
    assert [(row.status, row.position, row.grant_id) for row in rows] == [(HELD, 0, held.grant_id), (FREE, 0, 0)]
    assert world.write(group, now + 1, *entries).has_stale_term
    assert [event for event, _, _ in events(world, group)] == ["grant"]


def test_a_past_term_disturbs_no_other_of_a_batch(world: World) -> None:
    (stream,) = world.add_space()
    groups = [world.group(Subscription.parse(f"$share/g{i}/#")) for i in range(3)]
    terms = [world.lead(group) for group in groups]
    batch = [GroupWrites(g.group_id, t, (grant(stream),)) for g, t in zip(groups, terms, strict=True)]
    batch[1] = GroupWrites(groups[1].group_id, terms[1] - 1, (grant(stream),))
    results = world.store.commit(batch)
    assert [result.group_id for result in results] == [group.group_id for group in groups]
    assert [result.has_stale_term for result in results] == [False, True, False]
    assert world.row(groups[1], terms[1], stream).status is FREE


# --- entries ------------------------------------------------------------------------------------------------------


def test_a_grant_has_the_rows_position_and_a_new_id(world: World) -> None:
    (stream,) = world.add_space()
    world.append(stream, 9)
    group = world.group()
    term = world.lead(group)
    held = granted(world, group, term, stream)
    assert (held.status, held.position, held.borrower_id, held.agent, held.session) == (HELD, 9, "b1", "a1", "session")
    assert held.grant_id == world.clock.now_us
    assert world.apply(group, term, grant(stream, "b2")) == LendingChangeResult(grant(stream, "b2"), REFUSED, held)
    freed = world.applied(group, term, ReleaseStream(stream, held.grant_id, 9, "leave"))
    assert freed.grant_id == held.grant_id + 1
    assert granted(world, group, term, stream).grant_id == held.grant_id + 2
    assert world.apply(group, term, grant(99)).lending is None


@pytest.mark.conforms("E17")
def test_progress_never_goes_back(world: World) -> None:
    group, term, stream, held = world.granted(10)
    for said, stored in ((4, 4), (2, 4), (4, 4), (10, 10), (0, 10)):
        word = AdvancePosition(stream, held.grant_id, said)
        assert outcome(world.apply(group, term, word)) == (APPLIED, HELD, stored)
    assert outcome(world.apply(group, term, ReclaimStream(stream, held.grant_id, 3, "b2", "a1"))) == (APPLIED, HELD, 10)
    assert outcome(world.apply(group, term, ReleaseStream(stream, held.grant_id, 1, "leave"))) == (APPLIED, FREE, 10)
    assert world.row(group, term, stream).position == 10


@pytest.mark.conforms("E17", "E10")
@pytest.mark.parametrize("old", [0, -1, 1])
def test_a_report_of_another_grant_changes_nothing(world: World, old: int) -> None:
    group, term, (stream,) = world.led()
    first = granted(world, group, term, stream)
    world.append(stream, 10)
    world.apply(group, term, ForceRelease(stream, first.grant_id, "silent"))
    held = granted(world, group, term, stream)
    grant_id = first.grant_id if old == 0 else held.grant_id + old
    recorded = events(world, group)
    for entry in (
        AdvancePosition(stream, grant_id, 5),
        ReleaseStream(stream, grant_id, 5, "leave"),
        ForceRelease(stream, grant_id, "silent"),
        ReclaimStream(stream, grant_id, 5, "b1", "a1"),
        RecordHistory(stream, grant_id, "revoke", "x"),
    ):
        assert world.apply(group, term, entry) == LendingChangeResult(entry, REFUSED, world.row(group, term, stream))
    assert outcome(world.apply(group, term, AdvancePosition(stream, held.grant_id, 0))) == (APPLIED, HELD, 0)
    assert events(world, group) == recorded


@pytest.mark.conforms("E16")
def test_a_reclaim_keeps_the_grant_of_the_same_agent(world: World) -> None:
    group, term, stream, held = world.granted(10)
    world.clock.advance(LEASE_S)
    term = world.lead(group, TWO)
    stranger = world.apply(group, term, ReclaimStream(stream, held.grant_id, 6, "b2", "another"))
    assert outcome(stranger) == (REFUSED, HELD, 0)
    for _ in range(2):
        retained = world.applied(group, term, ReclaimStream(stream, held.grant_id, 6, "b2", "a1"))
        assert (retained.grant_id, retained.borrower_id, retained.position) == (held.grant_id, "b2", 6)
    assert events(world, group) == [("grant", 0, False), ("reclaim", 6, False)]


def test_a_release_frees_at_the_exact_position(world: World) -> None:
    group, term, stream, held = world.granted(10)
    released = world.apply(group, term, ReleaseStream(stream, held.grant_id, 7, "leave"))
    assert outcome(released) == (APPLIED, FREE, 7)
    assert released.lending is not None
    assert (released.lending.borrower_id, released.lending.agent, released.lending.session) == (None, None, None)
    line = world.store.history(group.group_id)[-1]
    assert (line.event, line.reason, line.grant_id, line.borrower_id, line.position, line.term, line.is_forced) == (
        "release", "leave", held.grant_id, "b1", 7, term, False
    )  # fmt: skip
    assert line.at_us == world.clock.now_us


@pytest.mark.conforms("E11")
@pytest.mark.parametrize(("until", "announced"), [(0, None), (7, None), (9, 9), (10, 10)])
def test_a_release_records_what_was_given_up(world: World, until: int, announced: int | None) -> None:
    group, term, stream, held = world.granted(10)
    for _ in range(MAX_LOSSES + 1):
        released = world.apply(group, term, ReleaseStream(stream, held.grant_id, 7, "leave", 0.0, until))
        assert outcome(released) == (APPLIED, FREE, 7), "to give up is no reason to block"
        line = world.store.history(group.group_id)[-1]
        assert (line.event, line.position) == ("release", 7)
        assert (line.redelivery_end, line.is_forced) == (announced, announced is not None)
        held = granted(world, group, term, stream)


def test_a_stream_lost_too_often_is_blocked(world: World) -> None:
    """That is, at one position."""
    group, term, (stream,) = world.led()
    for _ in range(MAX_LOSSES + 1):  # nothing to die of: never blocked
        assert world.apply(group, term, ForceRelease(stream, granted(world, group, term, stream).grant_id, "silent"))
    world.append(stream, 10)
    for position in (1, 2):
        grant_id = granted(world, group, term, stream).grant_id
        world.apply(group, term, AdvancePosition(stream, grant_id, position))
        for losses in range(1, MAX_LOSSES + (position == 2)):
            seized = world.apply(group, term, ForceRelease(stream, grant_id, "silent"))
            blocked = losses == MAX_LOSSES
            assert outcome(seized) == (APPLIED, BLOCKED if blocked else FREE, position)
            if not blocked:
                grant_id = granted(world, group, term, stream).grant_id
        if position == 1:
            world.apply(group, term, ReleaseStream(stream, grant_id, 1, "leave"))
    assert events(world, group)[-1] == ("block", 2, True)
    assert outcome(world.apply(group, term, grant(stream))) == (REFUSED, BLOCKED, 2)


@pytest.mark.conforms("P10", "X4")
def test_what_lies_beyond_the_head_changes_nothing(world: World) -> None:
    """At the head it is good, one behind it and at the end of its type it is its sender's fault, and the row is as it
    was."""
    group, term, streams = world.led(3)
    for stream, word in zip(streams, (AdvancePosition, ReclaimStream, ReleaseStream), strict=True):
        world.append(stream, 5)
        grant_id = granted(world, group, term, stream).grant_id
        world.apply(group, term, AdvancePosition(stream, grant_id, 2))
        before, lines = world.row(group, term, stream), len(world.store.history(group.group_id))
        extra = {AdvancePosition: (), ReleaseStream: ("leave",), ReclaimStream: ("b1", "a1")}[word]
        for position in (6, MAX_OFFSET):
            answer = world.apply(group, term, word(stream, grant_id, position, *extra))
            assert (answer.outcome, answer.lending) == (INVALID, before)
            assert answer.problem == f"stream {stream}: offset {position} is beyond the head 5"
        assert (world.row(group, term, stream), len(world.store.history(group.group_id))) == (before, lines)
        assert outcome(world.apply(group, term, word(stream, grant_id, 5, *extra)))[::2] == (APPLIED, 5)


@pytest.mark.conforms("X4")
def test_what_was_given_up_beyond_the_head_cannot_be(world: World) -> None:
    group, term, stream, held = world.granted(10)
    for given_up in (11, MAX_OFFSET):
        answer = world.apply(group, term, ReleaseStream(stream, held.grant_id, 7, "leave", 0.0, given_up))
        assert outcome(answer) == (INVALID, HELD, 0)


@pytest.mark.conforms("P10")
def test_a_sync_blocks_rows_beyond_a_lowered_head(world: World) -> None:
    """Held and free ones of open streams, and those with a plan that reaches beyond; all others stay."""
    group, term, streams = world.led(4)
    held, planned, free, fine = streams
    grants = {stream: granted(world, group, term, stream).grant_id for stream in streams}
    for stream in streams:
        world.append(stream, 6)
        world.append(stream, 4)
        position = 6 if stream == planned else 10
        doubt = InDoubtRange(grants[stream], 6, 10, 60.0) if stream == planned else None
        world.apply(group, term, AdvancePosition(stream, grants[stream], position, None, doubt))
    world.apply(group, term, ReleaseStream(free, grants[free], 10, "leave"))
    assert world.write(group, term, renew=True).synced == ()
    for stream in (held, planned, free):
        world.lower_head(stream, 6)
    synced = {row.stream_id: row for row in world.write(group, term, renew=True).synced}
    assert {stream: (row.status, row.position) for stream, row in synced.items()} == {
        held: (BLOCKED, 10),
        planned: (BLOCKED, 6),
        free: (BLOCKED, 10),
    }
    assert all(row.grant_id > grants[stream] for stream, row in synced.items())
    said = [(line.stream_id, line.reason) for line in world.store.history(group.group_id) if line.event == "block"]
    assert said == [(stream, "offset 10 is beyond the head 6") for stream in (held, planned, free)]
    for stream in streams:
        world.append(stream, 10)
    assert world.write(group, term, renew=True).synced == (), "what others append does not unblock them"
    assert world.row(group, term, fine).status is HELD
    assert outcome(world.apply(group, term, grant(free))) == (REFUSED, BLOCKED, 10)


@pytest.mark.conforms("P10")
def test_a_holders_report_beyond_the_head_blocks(world: World) -> None:
    """Others have appended since, so that only its holder can know."""
    group, term, stream, row = world.granted(10)
    found = ReleaseStream(stream, row.grant_id, 8, "offset 8 is beyond the head 3", is_beyond_head=True)
    assert outcome(world.apply(group, term, found)) == (REFUSED, BLOCKED, 8)
    last = world.store.history(group.group_id)[-1]
    assert (last.event, last.reason, last.position) == ("block", "offset 8 is beyond the head 3", 8)


@pytest.mark.conforms("E32")
def test_a_locked_row_is_busy_and_harms_no_other(world: World) -> None:
    first, second = world.add_space(shards=2)
    group, other = world.group(), world.group(Subscription.parse("$share/other/#"))
    term, other_term = world.lead(group), world.lead(other)
    held = granted(world, group, term, first)
    world.append(first, 5)
    entry = AdvancePosition(first, held.grant_id, 5)
    with world.locked(group.group_id, first):
        batch = [
            GroupWrites(group.group_id, term, (entry, grant(second)), needs_stream_sync=True),
            GroupWrites(other.group_id, other_term, (grant(first),)),
        ]
        results = world.store.commit(batch)
        assert [[r.outcome for r in result.results] for result in results] == [[BUSY, APPLIED], [APPLIED]]
        assert results[0].results[0].lending is None
        assert [(line.event, line.stream_id) for line in results[0].history] == [("grant", second)]
        assert world.store.renew(ONE, {group.group_id: term}, LEASE_S) == {group.group_id}
        world.clock.advance(LEASE_S)
        term = world.lead(group, TWO)
        assert len(world.store.load(group.group_id, term)) == 2
    assert outcome(world.apply(group, term, entry)) == (APPLIED, HELD, 5)


def test_a_batch_names_each_group_and_stream_once(world: World) -> None:
    with pytest.raises(ValueError, match="twice"):
        world.store.commit([GroupWrites(1, 1), GroupWrites(1, 1)])
    with pytest.raises(ValueError, match="two changes"):
        world.store.commit([GroupWrites(1, 1, (grant(1), ForceRelease(1, 1, "x")))])
    assert world.store.commit([]) == ()
