"""Rows of which something is in doubt: reserved for the session that planned it, and for nobody else until its time."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.grant_keys import TIMELINE_US
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import MAX_OFFSET, StartingPosition, Subscription
from sublet_storage.groups.coordinator import lending_statements
from sublet_storage.groups.coordinator.leader_commits import elect
from sublet_storage.groups.model.lending_row import is_of_former_timeline
from sublet_storage.groups.model.records import (
    MAX_LOSSES,
    FreeReservedStream,
    GrantStream,
    LendingChangeResult,
    OnDataLoss,
)
from tests.contract.group_world import LEASE_S, ONE, TWO, Held, Led, PostgresWorld, World, outcome, row_of

HOLD_S = 90.0
SLOW = """
create function nap() returns trigger language plpgsql as $$ begin perform pg_sleep(0.05); return new; end $$;
create trigger nap before insert on lending_history for each row execute function nap();
create trigger nap before update on lending for each row when (new.grant_id = 1) execute function nap()"""


def to_etl(led: Led, stream: int | None = None, epoch: int | None = 7, session: str | None = "etl") -> Held:
    """Grant the stream to a process of a session."""
    return led.grant(stream, session=session, epoch=epoch)


def planned(world: World, hold_s: float = HOLD_S, **session: Any) -> tuple[Held, InDoubtRange]:
    """Return a grant of a session on a stream of ten messages, of which it has planned [2, 5), and that."""
    held = to_etl(world.led(), **session)
    world.append(held.stream, 10)
    world.store.renew(ONE, {held.led.group_id: held.led.term}, 1000)
    doubt = held.doubt(2, 5, hold_s)
    assert row_of(held.advance(2, in_doubt=doubt)).in_doubt == doubt
    return held, doubt


def free(held: Held, reason: str = "not back", is_forced: bool = False) -> LendingChangeResult:
    """End the reservation that the grant has become."""
    return held.led.apply(FreeReservedStream(held.stream, held.now().grant_id, reason, is_forced))


def last_event(led: Led) -> tuple[str, int, int | None, str | None]:
    line = led.history()[-1]
    return line.event, line.position, line.redelivery_end, line.session


def test_what_is_planned_is_in_the_row_and_stays_there(world: World) -> None:
    held, doubt = planned(world)
    assert (held.now().in_doubt, held.now().pending_in_doubt) == (doubt, doubt)
    assert row_of(held.advance(3)).pending_in_doubt == doubt
    done = row_of(held.advance(5))
    assert (done.in_doubt, done.pending_in_doubt) == (doubt, None)
    later = held.doubt(5, 10, HOLD_S)
    assert row_of(held.advance(5, in_doubt=later)).pending_in_doubt == later
    assert held.now().in_doubt == later


def test_a_grant_is_as_old_as_when_it_was_made(postgres: PostgresWorld) -> None:
    """Whatever is planned under it, also once it has ended and the row is reserved."""
    held, _ = planned(postgres)
    asked = "select extract(epoch from granted_at) * 1000000 from lending where status = %s"
    made_at = postgres.clock()
    postgres.clock.advance(1)
    held.advance(3, in_doubt=held.doubt(3, 6, HOLD_S))
    assert postgres.connection.execute(asked, ("held",)).fetchall() == [(made_at,)]
    held.force_release()
    assert postgres.connection.execute(asked, ("reserved",)).fetchall() == [(made_at,)]


def test_epochs_in_doubt_are_an_atomic_groups_alone(world: World) -> None:
    held, doubt = planned(world)
    reported = replace(doubt, end=8, consumed=ConsumedFrontier(8, LowerFrontier(((4, 5), (5, 4)))))
    written = row_of(held.advance(2, in_doubt=reported))
    assert written.in_doubt == held.now().in_doubt == replace(reported, consumed=None)


@pytest.mark.parametrize("end", [lambda held: held.release(2), Held.force_release], ids=["release", "force release"])
def test_when_the_grant_ends_it_is_reserved(world: World, end: Any) -> None:
    held, doubt = planned(world)
    led, ended = held.led, row_of(end(held))
    assert (ended.status, ended.session, ended.session_epoch, ended.reserved_s) == ("reserved", "etl", 7, HOLD_S)
    assert (ended.position, ended.pending_in_doubt, ended.borrower_id) == (2, doubt, None)
    assert ended.grant_id > held.grant_id
    assert last_event(led) == ("reserve", 2, None, "etl")
    assert held.now() == ended
    for session in ("other", None):
        asked = GrantStream(held.stream, "b1", "a1", session, "share", 7 if session else None)
        assert outcome(led.apply(asked)) == "refused, reserved at 2"
    back = to_etl(led, epoch=8)
    assert (back.row.status, back.row.position, back.row.pending_in_doubt) == ("held", 2, doubt)
    assert back.grant_id > ended.grant_id
    assert back.row.reserved_s == 0
    assert outcome(back.release(5)) == "applied, free at 5"


@pytest.mark.conforms("E10", "E27")
def test_an_older_plan_changes_nothing(world: World) -> None:
    held, doubt = planned(world)
    later = held.doubt(5, 8, HOLD_S)
    assert row_of(held.advance(5, in_doubt=later)).in_doubt == later
    assert row_of(held.advance(2, in_doubt=doubt)).in_doubt == later


def test_it_can_be_in_doubt_again_and_again(world: World) -> None:
    """And is never blocked for that."""
    held, doubt = planned(world)
    for epoch in range(8, 8 + MAX_LOSSES):
        assert row_of(held.force_release()).status == "reserved"
        held = to_etl(held.led, epoch=epoch)
        assert held.row.pending_in_doubt == doubt
    assert row_of(held.force_release()).status == "reserved"


def test_after_its_time_it_is_anybodys(world: World) -> None:
    """History then says what may be seen twice."""
    held, _ = planned(world)
    ended = row_of(held.force_release())
    world.clock.advance(HOLD_S - 1)
    assert outcome(free(held)) == "refused, reserved at 2"
    former = FreeReservedStream(held.stream, held.grant_id, "not back", is_forced=True)
    assert outcome(held.led.apply(former)) == "refused, reserved at 2"
    world.clock.advance(1)
    freed = row_of(free(held))
    assert (freed.status, freed.session, freed.in_doubt, freed.position) == ("free", None, None, 2)
    assert last_event(held.led) == ("unreserve", 2, 5, "etl")
    assert held.led.history()[-1].is_forced
    again = FreeReservedStream(held.stream, ended.grant_id, "not back")
    assert outcome(held.led.apply(again)) == "refused, free at 2"
    assert to_etl(held.led, session="other").row.in_doubt is None


def test_an_operator_may_end_it_before_its_time(world: World) -> None:
    held, _ = planned(world)
    held.force_release()
    assert outcome(free(held, "operator", is_forced=True)) == "applied, free at 2"


@pytest.mark.parametrize(
    ("session", "epoch", "hold_s"), [(None, None, HOLD_S), (None, 7, HOLD_S), ("etl", None, HOLD_S), ("etl", 7, 0.0)]
)
def test_nobody_is_waited_for_who_cannot_come_back(
    world: World, session: str | None, epoch: int | None, hold_s: float
) -> None:
    held, _ = planned(world, hold_s, session=session, epoch=epoch)
    freed = row_of(held.force_release())
    assert (freed.status, freed.in_doubt, freed.position) == ("free", None, 2)
    assert last_event(held.led)[:3] == ("force_release", 2, 10)


def test_a_session_that_may_not_return_is_not_awaited(world: World) -> None:
    held, _ = planned(world)
    freed = row_of(held.force_release("denied", 0.0, True))
    assert (freed.status, freed.in_doubt, freed.position) == ("free", None, 2)


def test_a_reservation_is_bounded(world: World) -> None:
    held, _ = planned(world, hold_s=0.0)
    assert row_of(held.release(5, "leave", 1e300)).reserved_s == 366 * 86_400


def test_a_plan_that_is_done_is_remembered(world: World) -> None:
    held, doubt = planned(world)
    freed = row_of(held.release(5))
    assert (freed.status, freed.in_doubt, freed.pending_in_doubt) == ("free", doubt, None)
    assert last_event(held.led)[0] == "release", "nothing is reserved"
    other = to_etl(held.led, session="other")
    assert other.row.in_doubt == doubt
    later = other.doubt(5, 6, HOLD_S)
    assert row_of(other.advance(5, in_doubt=later)).in_doubt == later


def test_what_was_never_begun_is_taken_back(world: World) -> None:
    """By the next process of the session, under the next grant."""
    held, _ = planned(world)
    assert row_of(held.force_release()).status == "reserved"
    held = to_etl(held.led, epoch=8)
    assert row_of(held.advance(2, in_doubt=held.doubt(2, 2, 0.0))).pending_in_doubt is None
    assert row_of(held.force_release()).status == "free"


@pytest.mark.conforms("X4")
def test_a_plan_that_cannot_be_changes_nothing(world: World) -> None:
    """Beyond the head, or of a grant that is to come."""
    held, _ = planned(world)
    before, own = held.now(), held.grant_id
    for grant_id, end in ((own, 11), (own, MAX_OFFSET), (own + 1, 10), (MAX_OFFSET, 10)):
        answer = held.advance(2, in_doubt=InDoubtRange(grant_id, 2, end, HOLD_S))
        assert answer.outcome == "invalid", answer
        assert answer.lending == before == held.now()
    fits = held.doubt(2, 10, HOLD_S)
    assert row_of(held.advance(2, in_doubt=fits)).in_doubt == fits


def test_entire_epochs_are_in_doubt_until_consumed(world: World) -> None:
    led = world.led(atomic=True)
    world.complete(1)
    world.append(led.stream, 4, 1, 9)
    held = to_etl(led)
    done = ConsumedFrontier(4, LowerFrontier(((2,),)))
    doubt = held.doubt(0, 0, HOLD_S, done)
    assert row_of(held.advance(0, ConsumedFrontier(0), doubt)).pending_in_doubt == doubt
    ended = row_of(held.force_release())
    assert (ended.status, ended.pending_in_doubt) == ("reserved", doubt)
    assert row_of(free(held, "operator", is_forced=True)).pending_in_doubt is None
    assert led.history()[-1].redelivery_end == 4
    back = to_etl(led, epoch=8)
    back.advance(0, ConsumedFrontier(0), doubt)
    saved = row_of(back.advance(0, done))
    assert (saved.in_doubt, saved.pending_in_doubt) == (doubt, None)


def test_a_closed_stream_ends_in_spite_of_a_plan(world: World) -> None:
    held, _ = planned(world)
    world.rollover(1)
    assert outcome(held.advance(10)) == "applied, finished at 10"


@pytest.mark.conforms("E26", "W4")
@pytest.mark.parametrize("position", [2, 5])
def test_what_is_skipped_does_not_count_as_done(world: World, position: int) -> None:
    """A plan is in doubt where retention takes the stream: its session finds nothing of it in the row, and not a
    position behind it."""
    led = world.led(starting_position=StartingPosition.EARLIEST, on_data_loss=OnDataLoss.SKIP)
    world.append(led.stream, 10)
    held = to_etl(led)
    doubt = held.doubt(2, 5, HOLD_S)
    held.advance(2, in_doubt=doubt)
    held.advance(position)
    world.rollover(1)
    world.retire(1)
    row = led.sync()[led.stream]
    assert (row.status, row.in_doubt) == ("finished", doubt if position == 5 else None)


@pytest.mark.parametrize(
    ("grant_id", "found"),
    [(0, False), (1, True), (TIMELINE_US - 1, True), (TIMELINE_US, False), (TIMELINE_US + 9, False)],
)
def test_a_grant_is_of_the_timeline_of_its_id(grant_id: int, found: bool) -> None:
    """Unless nothing was granted yet."""
    assert is_of_former_timeline(grant_id, TIMELINE_US + 5) is found


@pytest.mark.conforms("E11", "P10")
def test_a_failover_announces_what_may_come_again(postgres: PostgresWorld) -> None:
    """Of what nobody holds, too: on the former timeline it may have been consumed. Not what another group has."""
    streams = postgres.add_space(shards=5)
    held, planned, free, never, empty = streams
    other = postgres.lead(postgres.group(Subscription.parse("$share/other/#")))
    other.grant(free)
    other.succeed()
    led = postgres.lead(postgres.group(), streams=streams)
    of_other = f"select grant_id from lending where group_id = {other.group_id} order by stream_id"
    before = postgres.connection.execute(of_other).fetchall()
    for stream in (held, planned, free, never):
        postgres.append(stream, 10)
    grants = {held: led.grant(held).grant_id}
    with_plan = to_etl(led, planned)
    grants[planned] = with_plan.grant_id
    with_plan.advance(2, in_doubt=with_plan.doubt(2, 5, HOLD_S))
    led.grant(free).release(4)
    postgres.connection.execute("update leadership set timeline = 'the former'")
    now = postgres.lead(led.group, TWO)
    announced = [
        (line.stream_id, line.position, line.redelivery_end)
        for line in led.history()
        if line.is_forced and line.term == now.term
    ]
    assert sorted(announced) == [(held, 0, 10), (planned, 2, 10), (free, 4, 10), (never, 0, 10)]
    assert (now.row(planned).status, now.row(empty).status) == ("reserved", "free")
    assert all(now.row(stream).grant_id > grant_id for stream, grant_id in grants.items()), "no id is given twice"
    assert postgres.connection.execute(of_other).fetchall() == before


@pytest.mark.conforms("E11", "P10")
def test_a_claim_again_ends_no_grant_of_its_term(postgres: PostgresWorld) -> None:
    """The first leader after a failover, whose lease ran on meanwhile; the first grant has the number of its term."""
    led = postgres.led()
    postgres.connection.execute("update leadership set timeline = 'the former'")
    now = postgres.lead(led.group, TWO, led.streams)
    held = now.grant()
    assert held.grant_id == now.term
    with postgres.connection.transaction():
        elect(postgres.connection, led.group_id, TWO, LEASE_S, postgres.clock(), None, None)
    assert (held.now().status, held.now().grant_id) == ("held", held.grant_id)
    postgres.append(held.stream, 1)
    lines = led.history()
    with postgres.connection.transaction():
        elect(postgres.connection, led.group_id, ONE, LEASE_S, postgres.clock(), None, None)
    assert led.history() == lines, "who was not elected records nothing"


@pytest.mark.conforms("E11", "P10")
def test_a_failover_ends_grants_page_by_page(postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statements of a large group would be canceled, at each claim: here a line, or a mark, takes 0.05 s."""
    led = postgres.led(60)
    for stream in led.streams:
        postgres.append(stream, 1)
    for stream in led.streams[:30]:
        led.grant(stream)
    postgres.connection.execute("update leadership set timeline = 'the former'")
    postgres.connection.execute(SLOW)
    monkeypatch.setattr(lending_statements, "PAGE", 5)
    store = postgres.another_store(postgres.clock, statement_timeout_s=1.4)
    term = store.claim(led.group_id, TWO, LEASE_S).term
    assert {line.stream_id for line in led.history() if line.term == term} >= set(led.streams)
    rows = postgres.store.load(led.group_id, term)
    assert {row.status for row in rows} == {"free"}
