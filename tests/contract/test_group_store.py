"""What both group stores promise: who leads, what an entry does, and what a sync finds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest
from msgspec.structs import replace

from sublet_protocol.domain.errors import Conflict, StaleTerm, TooManyGroups, UndeclaredQueue
from sublet_protocol.domain.limits import MAX_GROUPS_PER_MINUTE
from sublet_protocol.domain.subscriptions import MAX_OFFSET, StartingPosition, Subscription
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model import records
from sublet_storage.groups.model.records import MAX_LOSSES, Leadership, LendingChangeResult
from sublet_storage.node_directory import NodeIncarnation
from tests.contract.group_world import LEASE_S, ONE, SHARE, TWO, Held, PostgresWorld, World, grant, outcome

OTHER = Subscription.parse("$share/other/#")

# --- groups -------------------------------------------------------------------------------------------------------


def test_latest_is_at_the_heads_earliest_at_the_start(world: World) -> None:
    first, second = world.add_space(shards=2)
    world.append(first, 5)
    latest, earliest = world.group(), world.group(OTHER, StartingPosition.EARLIEST)
    for group, positions in ((latest, {first: 5, second: 0}), (earliest, {first: 0, second: 0})):
        rows = world.lead(group).rows()
        assert {stream: row.position for stream, row in rows.items()} == positions
        assert all(row.status == "free" and row.head >= row.position for row in rows.values())


def test_earliest_includes_what_is_closed_and_not_gone(world: World) -> None:
    world.add_space()
    for stream in (1, 2):
        world.append(stream, 3)
        world.rollover(1)
    world.retire(1)
    assert list(world.lead(world.group(start=StartingPosition.EARLIEST)).rows()) == [2, 3]
    latest = world.lead(world.group(OTHER))
    latest.sync()
    assert list(latest.rows()) == [3]


@pytest.mark.conforms("E2")
def test_a_queue_must_be_declared(world: World) -> None:
    (stream,) = world.add_space()
    queue = Subscription.parse("$queue/billing/orders/#")
    with pytest.raises(UndeclaredQueue, match="groups create"):
        world.store.open_group(queue)
    declared = world.store.declare_group(queue)
    world.append(stream, 4)
    assert world.store.open_group(queue) == declared
    assert world.lead(declared).row(stream).position == 0


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
    world.clock.advance(60.0)
    open_all("user:a", "one more")


@pytest.mark.conforms("E23")
def test_a_deleted_groups_second_life_is_another(world: World) -> None:
    held = world.granted(7, on_data_loss=records.OnDataLoss.SKIP)
    former = held.led
    assert world.store.delete_group(SHARE) == former.group_id
    assert world.store.delete_group(SHARE) is None
    assert world.store.find_group(former.group_id) is None
    assert former.write(records.AdvancePosition(held.stream, held.grant_id, 3)).has_stale_term
    again = world.group()
    assert again.group_id != former.group_id
    with pytest.raises(
        Conflict, match=rf"id {former.group_id}\) is gone, and another has its name .*{again.group_id}\)"
    ):
        world.store.delete_group(SHARE, group_id=former.group_id)
    assert again.options == records.GroupOptions()
    row = world.lead(again).row(held.stream)
    assert (row.status, row.position, row.grant_id, row.session) == ("free", 7, 0, None)
    never_elected = world.lead(former.group, TWO)
    synced = never_elected.write(grant(held.stream), sync=True)
    assert (synced.synced, synced.desired_state) == ((), None)
    assert never_elected.rows() == {}


@pytest.mark.conforms("A7", "E23")
def test_history_ends_each_grant_of_a_deleted_group(world: World) -> None:
    led = world.led(3)
    _, first, second = led.streams
    grants = {stream: led.grant(stream) for stream in (second, first)}
    world.append(first, 10)
    grants[first].advance(4)
    newest = led.succeed()
    before = led.history()
    world.store.delete_group(SHARE)
    lines = led.history()[len(before) :]
    assert [(line.stream_id, line.grant_id, line.position) for line in lines] == [
        (first, grants[first].grant_id, 4), (second, grants[second].grant_id, 0),
    ]  # fmt: skip
    for line in lines:
        assert (line.event, line.reason, line.is_forced) == ("delete", "its group was deleted", False)
        assert (line.borrower_id, line.agent, line.session) == ("b1", "a1", "session")
        assert (line.term, line.at_us) == (newest.term, world.clock.now_us)
    world.store.delete_group(SHARE)
    assert len(led.history()) == len(before) + 2


@pytest.mark.conforms("E23", "W4")
def test_blocked_streams_begin_again_in_a_second_life(world: World) -> None:
    bad, gone = world.add_space("orders", "orders/#")[0], world.add_space("others", "orders/eu")[0]
    led = world.lead(world.group())
    for stream in (bad, gone):
        world.append(stream, 3)
    assert outcome(led.grant(bad).release(0, "garbage", poison=1)) == "applied, blocked at 0"
    world.rollover(2)
    world.retire(2)
    led.sync()
    assert led.row(gone).status == "blocked"
    world.store.delete_group(SHARE)
    rows = world.lead(world.declare(starting_position=StartingPosition.EARLIEST)).rows()
    assert {row.status for row in rows.values()} == {"free"}
    assert rows[bad].position == 0
    assert gone not in rows


@pytest.mark.conforms("E24")
def test_names_and_filters_never_collide(world: World) -> None:
    (stream,) = world.add_space()
    names = ["g", "G", "g ", "ü", "u\u0308", "日本語", "%", "_", "\\", "'", '"', "$share", "x" * 255]
    filters = ["#", "+", "+/#", "a/#", "a/+", "a", "a/", "/a", "a//b", "日本/+"]
    texts = [f"$share/{name}/{filter}" for name in names for filter in filters] + ["$queue/g/a", "$queue/a/b"]
    groups = [world.declare(Subscription.parse(text)) for text in texts]
    assert len({group.group_id for group in groups}) == len(texts)
    found = [world.store.find_group(group.group_id) for group in groups]
    assert [str(group.subscription) for group in found if group is not None] == texts
    world.lead(groups[0]).grant(stream)
    assert world.lead(groups[1]).row(stream).status == "free"


# --- leadership ---------------------------------------------------------------------------------------------------


@pytest.mark.conforms("E12")
def test_of_fifty_claiming_at_once_one_leads(world: World) -> None:
    nodes = [NodeIncarnation(f"n{i}", f"i{i}", f"127.0.0.1:{i}") for i in range(50)]
    for term in range(2):
        start = Barrier(len(nodes))

        def claim(node: NodeIncarnation, start: Barrier = start) -> Leadership:
            store = world.store
            if isinstance(world, PostgresWorld):
                store = world.another_store(world.clock, lock_timeout_s=60, statement_timeout_s=60)
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
    led = world.lead(world.group())
    terms = {led.group_id: led.term}
    if ended == "deleted":
        world.store.delete_group(SHARE)
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
    found = world.store.read_leaderships([1, 2, 3, 4])
    assert {i: c.remaining_s for i, c in found.items()} == {1: 10.0, 2: -1.0, 3: 8.0}


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
    led = world.led()
    world.clock.advance(-5.0)
    assert led.grant().grant_id >= led.term


@pytest.mark.conforms("E13", "E10")
@pytest.mark.parametrize("succeeded", [True, False])
def test_nothing_is_written_under_a_term_that_is_over(world: World, succeeded: bool) -> None:
    """Though another group is led under a term of that number."""
    led, other = world.led(2), world.lead(world.group(Subscription.parse("$share/other/#")))
    first, second = led.streams
    held = led.grant(first)
    world.append(first, 5)
    world.clock.advance(LEASE_S / 2)
    assert other.term == led.term
    assert world.store.renew(ONE, {other.group_id: other.term}, LEASE_S) == {other.group_id}
    world.clock.advance(LEASE_S / 2)
    if succeeded:
        world.lead(led.group, TWO)
    entries = (records.AdvancePosition(first, held.grant_id, 4), grant(second))
    stale = led.write(*entries, sync=True)
    assert (stale.has_stale_term, stale.results, stale.synced) == (True, (), ())
    with pytest.raises(StaleTerm):
        led.rows()
    now = world.lead(led.group, TWO)
    rows = [(row.status, row.position, row.grant_id) for row in now.rows().values()]
    assert rows == [("held", 0, held.grant_id), ("free", 0, 0)]
    now.term += 1
    assert now.write(*entries).has_stale_term
    assert [event for event, _, _ in led.events()] == ["grant"]


def test_a_past_term_disturbs_no_other_of_a_batch(world: World) -> None:
    groups = world.several(3)
    groups[1].term -= 1
    results = world.store.commit([led.writes(grant(led.stream)) for led in groups])
    assert [result.group_id for result in results] == [led.group_id for led in groups]
    assert [result.has_stale_term for result in results] == [False, True, False]
    groups[1].term += 1
    assert groups[1].row().status == "free"


# --- entries ------------------------------------------------------------------------------------------------------


def test_a_grant_has_the_rows_position_and_a_new_id(world: World) -> None:
    (stream,) = world.add_space()
    world.append(stream, 9)
    led = world.lead(world.group())
    held = led.grant(stream)
    row = held.row
    assert (row.status, row.position, row.borrower_id, row.agent, row.session) == ("held", 9, "b1", "a1", "session")
    assert held.grant_id == world.clock.now_us
    assert led.ask(stream, "b2") == LendingChangeResult(grant(stream, "b2"), records.LendingOutcome.REFUSED, row)
    held.release(9)
    assert led.row(stream).grant_id == held.grant_id + 1
    assert led.grant(stream).grant_id == held.grant_id + 2
    assert led.ask(99).lending is None


@pytest.mark.conforms("E17")
def test_progress_never_goes_back(world: World) -> None:
    held = world.granted(10)
    for said, stored in ((4, 4), (2, 4), (4, 4), (10, 10), (0, 10)):
        assert outcome(held.advance(said)) == f"applied, held at {stored}"
    assert outcome(held.reclaim(3, "b2")) == "applied, held at 10"
    assert outcome(held.release(1)) == "applied, free at 10"
    assert held.now().position == 10


WORDS: dict[str, Callable[[Held], LendingChangeResult]] = {
    "advance": lambda held: held.advance(5),
    "release": lambda held: held.release(5),
    "force release": lambda held: held.force_release(),
    "reclaim": lambda held: held.reclaim(5),
    "record": lambda held: held.record(),
}


@pytest.mark.conforms("E17", "E10")
@pytest.mark.parametrize("old", [0, -1, 1])
def test_a_report_of_another_grant_changes_nothing(world: World, old: int) -> None:
    led = world.led()
    first = led.grant()
    world.append(led.stream, 10)
    first.force_release()
    held = led.grant()
    other, recorded = held.of(first.grant_id if old == 0 else held.grant_id + old), led.events()
    for name, word in WORDS.items():
        answer = word(other)
        assert (answer.outcome, answer.lending) == ("refused", held.now()), name
    assert outcome(held.advance(0)) == "applied, held at 0"
    assert led.events() == recorded


@pytest.mark.conforms("E16")
def test_a_reclaim_keeps_the_grant_of_the_same_agent(world: World) -> None:
    held = world.granted(10)
    later = held.under(held.led.succeed())
    assert outcome(later.reclaim(6, "b2", "another")) == "refused, held at 0"
    for _ in range(2):
        assert later.reclaim(6, "b2").outcome == "applied"
        row = later.now()
        assert (row.grant_id, row.borrower_id, row.position) == (held.grant_id, "b2", 6)
    assert held.led.events() == [("grant", 0, False), ("reclaim", 6, False)]


def test_a_release_frees_at_the_exact_position(world: World) -> None:
    held = world.granted(10)
    assert outcome(held.release(7)) == "applied, free at 7"
    row, line = held.now(), held.led.history()[-1]
    assert (row.borrower_id, row.agent, row.session) == (None, None, None)
    assert (line.event, line.reason, line.grant_id, line.borrower_id, line.position, line.term, line.is_forced) == (
        "release", "leave", held.grant_id, "b1", 7, held.led.term, False
    )  # fmt: skip
    assert line.at_us == world.clock.now_us


@pytest.mark.conforms("E10", "E17")
def test_a_release_grants_to_its_successor_at_once(world: World) -> None:
    """In one transaction, under a grant of its own: the former holder's has ended."""
    held = world.granted(10)
    answer = held.release(7, successor=grant(held.stream, "b2", "a2"))
    assert outcome(answer) == "applied, held at 7"
    row = held.now()
    assert answer.lending == row
    assert (row.borrower_id, row.agent, row.grant_id) == ("b2", "a2", held.grant_id + 2)
    assert row.grant_key is not None
    assert row.grant_key != held.key
    lines = [(line.event, line.grant_id, line.borrower_id, line.position) for line in held.led.history()[-2:]]
    assert lines == [("release", held.grant_id, "b1", 7), ("grant", row.grant_id, "b2", 7)]
    assert outcome(held.advance(9)) == "refused, held at 7"


@pytest.mark.conforms("E10", "E33")
@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"reserve_s": 9.0}, "applied, free at 7"),
        ({"poison": 9}, "applied, blocked at 7"),
        ({"is_beyond_head": True}, "refused, blocked at 7"),
        ({"position": 11}, "invalid, held at 0"),
        ({"grant_id": 1}, "refused, held at 0"),
        ({"position": 10}, "applied, finished at 10"),
    ],
    ids=str,
)
def test_a_row_that_is_not_free_has_no_successor(world: World, fields: dict[str, Any], found: str) -> None:
    led = world.led()
    held = led.grant(session="etl", epoch=1)
    world.append(held.stream, 10)
    if fields.get("position") == 10:
        world.rollover(1)
    final = records.ReleaseStream(held.stream, held.grant_id, 7, "leave", successor=grant(held.stream, "b2", "a2"))
    assert outcome(led.apply(replace(final, **fields))) == found
    assert [line.borrower_id for line in led.history("grant")] == ["b1"]


def test_what_is_released_already_has_no_successor(world: World) -> None:
    held = world.granted(10)
    held.release(7)
    assert outcome(held.release(7, successor=grant(held.stream, "b2", "a2"))) == "refused, free at 7"


def test_a_successor_does_not_get_what_is_in_doubt(world: World) -> None:
    held = world.led().grant(session="etl", epoch=1)
    world.append(held.stream, 10)
    held.advance(2, in_doubt=held.doubt(2, 5))
    assert outcome(held.release(2, successor=grant(held.stream, "b2", "a2"))) == "applied, reserved at 2"


@pytest.mark.conforms("E33")
def test_a_successor_waits_for_ancestors(postgres: PostgresWorld) -> None:
    """As any grant, though its stream is held while one of them is not finished."""
    world, led = postgres, postgres.led()
    first = led.grant()
    world.append(led.stream, 1)
    (heir,) = world.rollover(1)
    world.append(heir, 1)
    assert outcome(first.advance(1)) == "applied, finished at 1"
    led.sync()
    held = led.grant(heir)
    world.connection.execute("update lending set status = 'free' where stream_id = %s", (led.stream,))
    assert outcome(held.release(1, successor=grant(heir, "b2", "a2"))) == "applied, free at 1"


@pytest.mark.conforms("E11")
@pytest.mark.parametrize(("until", "announced"), [(0, None), (7, None), (9, 9), (10, 10)])
def test_a_release_records_what_was_given_up(world: World, until: int, announced: int | None) -> None:
    held = world.granted(10)
    for _ in range(MAX_LOSSES + 1):
        assert outcome(held.release(7, "leave", 0.0, until)) == "applied, free at 7", "it is no reason to block"
        line = held.led.history()[-1]
        assert (line.event, line.position) == ("release", 7)
        assert (line.redelivery_end, line.is_forced) == (announced, announced is not None)
        held = held.led.grant()


def test_a_stream_lost_too_often_is_blocked(world: World) -> None:
    """That is, at one position."""
    led = world.led()
    for _ in range(MAX_LOSSES + 1):  # nothing to die of: never blocked
        assert outcome(led.grant().force_release()) == "applied, free at 0"
    world.append(led.stream, 10)
    for position, losses in ((1, MAX_LOSSES - 1), (2, MAX_LOSSES)):
        held = led.grant()
        held.advance(position)
        for number in range(1, losses + 1):
            status = "blocked" if number == MAX_LOSSES else "free"
            assert outcome(held.force_release()) == f"applied, {status} at {position}"
            if status == "free":
                held = led.grant()
        if position == 1:
            held.release(1)
    assert led.events()[-1] == ("block", 2, True)
    assert outcome(led.ask()) == "refused, blocked at 2"


@pytest.mark.conforms("P10", "X4")
@pytest.mark.parametrize("word", [Held.advance, Held.reclaim, Held.release])
def test_what_lies_beyond_the_head_changes_nothing(world: World, word: Any) -> None:
    """At the head it is good, one behind it and at the end of its type it is its sender's fault, and the row is as it
    was."""
    held = world.granted(5)
    held.advance(2)
    before, lines = held.now(), held.led.history()
    for position in (6, MAX_OFFSET):
        answer = word(held, position)
        assert (answer.outcome, answer.lending) == ("invalid", before)
        assert answer.problem == f"stream {held.stream}: offset {position} is beyond the head 5"
        given_up = held.release(2, "leave", 0.0, position)
        assert outcome(given_up) == "invalid, held at 2"
    assert (held.now(), held.led.history()) == (before, lines)
    assert outcome(word(held, 5)).endswith("at 5")


@pytest.mark.conforms("P10", "X4")
def test_beyond_the_head_from_the_head_is_invalid(world: World) -> None:
    """The row itself is not beyond it, so that the stream has lost nothing."""
    held = world.granted(5)
    held.advance(5)
    assert outcome(held.advance(6)) == "invalid, held at 5"


@pytest.mark.conforms("P10")
def test_a_sync_blocks_rows_beyond_a_lowered_head(world: World) -> None:
    """Held and free ones of open streams, and those with a plan that reaches beyond; all others stay."""
    led = world.led(4)
    held, planned, free, fine = led.streams
    grants = {stream: led.grant(stream) for stream in led.streams}
    for stream in led.streams:
        world.append(stream, 6)
        world.append(stream, 4)
        is_planned = stream == planned
        doubt = grants[stream].doubt(6, 10) if is_planned else None
        grants[stream].advance(6 if is_planned else 10, None, doubt)
    grants[free].release(10)
    assert led.sync() == {}
    for stream in (held, planned, free):
        world.lower_head(stream, 6)
    synced = led.sync()
    assert {stream: (row.status, row.position) for stream, row in synced.items()} == {
        held: ("blocked", 10), planned: ("blocked", 6), free: ("blocked", 10),
    }  # fmt: skip
    assert all(row.grant_id > grants[stream].grant_id for stream, row in synced.items())
    said = [(line.stream_id, line.reason) for line in led.history("block")]
    assert said == [(stream, "offset 10 is beyond the head 6") for stream in (held, planned, free)]
    for stream in led.streams:
        world.append(stream, 10)
    assert led.sync() == {}, "what others append does not unblock them"
    assert led.row(fine).status == "held"
    assert outcome(led.ask(free)) == "refused, blocked at 10"


@pytest.mark.conforms("P10")
def test_a_holders_report_beyond_the_head_blocks(world: World) -> None:
    """Others have appended since, so that only its holder can know."""
    held, reason = world.granted(10), "offset 8 is beyond the head 3"
    assert outcome(held.release(8, reason, is_beyond_head=True)) == "refused, blocked at 8"
    last = held.led.history()[-1]
    assert (last.event, last.reason, last.position) == ("block", reason, 8)


@pytest.mark.conforms("P10")
@pytest.mark.parametrize(
    ("word", "position"), [(Held.advance, 10), (Held.reclaim, 10), (Held.release, 10), (Held.release, 2)]
)
def test_a_report_from_before_a_lowered_head_blocks(world: World, word: Any, position: int) -> None:
    """Where it is no further than the row, or its holder has found out."""
    held = world.granted()
    for count in (6, 4):
        world.append(held.stream, count)
    held.advance(position)
    world.lower_head(held.stream, 6)
    found = {"is_beyond_head": True} if position == 2 else {}
    assert outcome(word(held, 10, **found)) == f"refused, blocked at {position}"
    assert held.led.history()[-1].reason == "offset 10 is beyond the head 6"


@pytest.mark.conforms("E32")
def test_a_locked_row_is_busy_and_harms_no_other(world: World) -> None:
    led = world.led(2)
    other = world.lead(world.group(OTHER))
    first, second = led.streams
    held = led.grant(first)
    world.append(first, 5)
    with world.locked(led.group_id, first):
        entries = (records.AdvancePosition(first, held.grant_id, 5), grant(second))
        results = world.store.commit([led.writes(*entries, sync=True), other.writes(grant(first))])
        assert [[r.outcome for r in result.results] for result in results] == [["busy", "applied"], ["applied"]]
        assert results[0].results[0].lending is None
        assert [(line.event, line.stream_id) for line in results[0].history] == [("grant", second)]
        assert world.store.renew(ONE, {led.group_id: led.term}, LEASE_S) == {led.group_id}
        led = led.succeed()
        assert len(led.rows()) == 2
    assert outcome(held.under(led).advance(5)) == "applied, held at 5"


def test_a_batch_names_each_group_and_stream_once(world: World) -> None:
    with pytest.raises(ValueError, match="twice"):
        world.store.commit([records.GroupWrites(1, 1), records.GroupWrites(1, 1)])
    with pytest.raises(ValueError, match="two changes"):
        world.store.commit([records.GroupWrites(1, 1, (grant(1), records.ForceRelease(1, 1, "x")))])
    assert world.store.commit([]) == ()
