"""Rows of which something is in doubt: reserved for the session that planned it, and for nobody else until its time."""

from __future__ import annotations

from contextlib import closing

import pytest
from msgspec.structs import replace

from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.in_doubt_range import InDoubtRange
from sublet_protocol.domain.subscriptions import MAX_OFFSET, StartingPosition
from sublet_storage.groups.coordinator import lending_statements
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model import records
from tests.contract.group_world import (
    FINISHED,
    FREE,
    HELD,
    INVALID,
    LEASE_S,
    REFUSED,
    TWO,
    PostgresWorld,
    World,
    granted,
)

RESERVED = records.LendingStatus.RESERVED
HOLD_S = 90.0
SLOW_HISTORY = """
create function nap() returns trigger language plpgsql as $$ begin perform pg_sleep(0.05); return new; end $$;
create trigger nap before insert on lending_history for each row execute function nap()"""


def grant_to(stream_id: int, session: str | None = "etl", epoch: int | None = 7) -> records.GrantStream:
    return records.GrantStream(stream_id, "b1", "a1", session, "share", epoch)


class Etl:
    """A session that holds the stream of a group, of which it planned [2, 5)."""

    def __init__(
        self, world: World, session: str | None = "etl", epoch: int | None = 7, hold_s: float = HOLD_S
    ) -> None:
        self.world = world
        (self.stream,) = world.add_space()
        self.group: records.Group = world.group()
        self.term = world.lead(self.group)
        world.append(self.stream, 10)
        self.grant_id = self.apply(grant_to(self.stream, session, epoch)).grant_id
        self.doubt = InDoubtRange(self.grant_id, 2, 5, hold_s)
        self.planned = self.apply(records.AdvancePosition(self.stream, self.grant_id, 2, in_doubt=self.doubt))

    def apply(self, entry: records.LendingChange) -> records.Lending:
        return self.world.applied(self.group, self.term, entry)

    def refused(self, entry: records.LendingChange) -> records.Lending:
        answer = self.world.apply(self.group, self.term, entry)
        assert answer.outcome is REFUSED, answer
        assert answer.lending is not None
        return answer.lending

    def end(self, word: str = "force_release") -> records.Lending:
        if word == "release":
            return self.apply(records.ReleaseStream(self.stream, self.grant_id, 2, "leave"))
        return self.apply(records.ForceRelease(self.stream, self.grant_id, "silent"))

    def row(self) -> records.Lending:
        return self.world.row(self.group, self.term, self.stream)

    def last_event(self) -> tuple[str, int, int | None, str | None]:
        line = self.world.store.history(self.group.group_id)[-1]
        return line.event, line.position, line.redelivery_end, line.session

    def wait(self, seconds: float) -> None:
        self.world.store.renew(
            self.world.store.read_leaderships([self.group.group_id])[self.group.group_id].node,
            {self.group.group_id: self.term},
            1000,
        )
        self.world.clock.advance(seconds)


def test_what_is_planned_is_in_the_row_and_stays_there(world: World) -> None:
    etl = Etl(world)
    assert (etl.planned.in_doubt, etl.planned.pending_in_doubt) == (etl.doubt, etl.doubt)
    assert etl.row().in_doubt == etl.doubt
    assert etl.apply(records.AdvancePosition(etl.stream, etl.grant_id, 3)).pending_in_doubt == etl.doubt
    done = etl.apply(records.AdvancePosition(etl.stream, etl.grant_id, 5))
    assert (done.in_doubt, done.pending_in_doubt) == (etl.doubt, None)
    planned = InDoubtRange(etl.grant_id, 5, 10, HOLD_S)
    assert etl.apply(records.AdvancePosition(etl.stream, etl.grant_id, 5, in_doubt=planned)).pending_in_doubt == planned
    assert etl.row().in_doubt == planned


def test_epochs_in_doubt_are_an_atomic_groups_alone(world: World) -> None:
    etl = Etl(world)
    reported = replace(etl.doubt, end=8, consumed=ConsumedFrontier(8, LowerFrontier(((4, 5), (5, 4)))))
    written = etl.apply(records.AdvancePosition(etl.stream, etl.grant_id, 2, in_doubt=reported))
    assert written.in_doubt == etl.row().in_doubt == replace(reported, consumed=None)


@pytest.mark.parametrize("word", ["release", "force_release"])
def test_when_the_grant_ends_it_is_reserved(world: World, word: str) -> None:
    etl = Etl(world)
    ended = etl.end(word)
    assert (ended.status, ended.session, ended.session_epoch, ended.reserved_s) == (RESERVED, "etl", 7, HOLD_S)
    assert (ended.position, ended.pending_in_doubt, ended.borrower_id) == (2, etl.doubt, None)
    assert ended.grant_id > etl.grant_id
    assert etl.last_event() == ("reserve", 2, None, "etl")
    assert etl.row() == ended
    for entry in (grant_to(etl.stream, "other"), grant_to(etl.stream, None, None)):
        assert etl.refused(entry).status is RESERVED
    back = etl.apply(grant_to(etl.stream, "etl", 8))
    assert (back.status, back.position, back.pending_in_doubt) == (HELD, 2, etl.doubt)
    assert back.grant_id > ended.grant_id
    assert back.reserved_s == 0
    done = etl.apply(records.ReleaseStream(etl.stream, back.grant_id, 5, "leave"))
    assert (done.status, done.position) == (FREE, 5)


@pytest.mark.conforms("E10", "E27")
def test_an_older_plan_changes_nothing(world: World) -> None:
    etl = Etl(world)
    later = InDoubtRange(etl.grant_id, 5, 8, HOLD_S)
    assert etl.apply(records.AdvancePosition(etl.stream, etl.grant_id, 5, in_doubt=later)).in_doubt == later
    assert etl.apply(records.AdvancePosition(etl.stream, etl.grant_id, 2, in_doubt=etl.doubt)).in_doubt == later


def test_it_can_be_in_doubt_again_and_again(world: World) -> None:
    etl = Etl(world)
    for epoch in (8, 9, 10):
        etl.end()
        etl.grant_id = etl.apply(grant_to(etl.stream, "etl", epoch)).grant_id
        assert etl.row().pending_in_doubt == etl.doubt


def test_after_its_time_it_is_anybodys(world: World) -> None:
    """History then says what may be seen twice."""
    etl = Etl(world)
    ended = etl.end()
    due = records.FreeReservedStream(etl.stream, ended.grant_id, "not back")
    etl.wait(HOLD_S - 1)
    assert etl.refused(due).status is RESERVED
    assert etl.refused(replace(due, grant_id=etl.grant_id, is_forced=True)).status is RESERVED
    etl.wait(1)
    freed = etl.apply(due)
    assert (freed.status, freed.session, freed.in_doubt, freed.position) == (FREE, None, None, 2)
    assert etl.last_event() == ("unreserve", 2, 5, "etl")
    assert world.store.history(etl.group.group_id)[-1].is_forced
    assert etl.refused(due).status is FREE
    assert etl.apply(grant_to(etl.stream, "other")).in_doubt is None


def test_an_operator_may_end_it_before_its_time(world: World) -> None:
    etl = Etl(world)
    assert (
        etl.apply(records.FreeReservedStream(etl.stream, etl.end().grant_id, "operator", is_forced=True)).status is FREE
    )


@pytest.mark.parametrize(("session", "epoch", "hold_s"), [(None, None, HOLD_S), ("etl", None, HOLD_S), ("etl", 7, 0.0)])
def test_nobody_is_waited_for_who_cannot_come_back(
    world: World, session: str | None, epoch: int | None, hold_s: float
) -> None:
    etl = Etl(world, session, epoch, hold_s)
    freed = etl.end()
    assert (freed.status, freed.in_doubt, freed.position) == (FREE, None, 2)
    assert etl.last_event()[:3] == ("force_release", 2, 10)


def test_a_reservation_is_bounded(world: World) -> None:
    etl = Etl(world, hold_s=0.0)
    assert etl.apply(records.ReleaseStream(etl.stream, etl.grant_id, 5, "leave", 1e300)).reserved_s == 366 * 86_400


def test_a_plan_that_is_done_is_remembered(world: World) -> None:
    etl = Etl(world)
    freed = etl.apply(records.ReleaseStream(etl.stream, etl.grant_id, 5, "leave"))
    assert (freed.status, freed.in_doubt, freed.pending_in_doubt) == (FREE, etl.doubt, None)
    other = etl.apply(grant_to(etl.stream, "other"))
    assert other.in_doubt == etl.doubt
    planned = InDoubtRange(other.grant_id, 5, 6, HOLD_S)
    assert etl.apply(records.AdvancePosition(etl.stream, other.grant_id, 5, in_doubt=planned)).in_doubt == planned


def test_what_was_never_begun_is_taken_back(world: World) -> None:
    """By the next process of the session, under the next grant."""
    etl = Etl(world)
    assert etl.end().status is RESERVED
    etl.grant_id = etl.apply(grant_to(etl.stream, "etl", 8)).grant_id
    nothing = InDoubtRange(etl.grant_id, 2, 2, 0.0)
    assert etl.apply(records.AdvancePosition(etl.stream, etl.grant_id, 2, in_doubt=nothing)).pending_in_doubt is None
    assert etl.end().status is FREE


@pytest.mark.conforms("X4")
def test_a_plan_that_cannot_be_changes_nothing(world: World) -> None:
    """Beyond the head, or of a grant that is to come."""
    etl = Etl(world)
    before = etl.world.row(etl.group, etl.term, etl.stream)
    for grant_id, end in ((etl.grant_id, 11), (etl.grant_id, MAX_OFFSET), (etl.grant_id + 1, 10), (MAX_OFFSET, 10)):
        lie = InDoubtRange(grant_id, 2, end, HOLD_S)
        answer = etl.world.apply(
            etl.group, etl.term, records.AdvancePosition(etl.stream, etl.grant_id, 2, in_doubt=lie)
        )
        assert answer.outcome is INVALID, answer
        assert answer.lending == before == etl.world.row(etl.group, etl.term, etl.stream)
    fits = InDoubtRange(etl.grant_id, 2, 10, HOLD_S)
    assert etl.apply(records.AdvancePosition(etl.stream, etl.grant_id, 2, in_doubt=fits)).in_doubt == fits


def test_what_is_reserved_is_never_blocked(world: World) -> None:
    etl = Etl(world)
    for epoch in range(8, 8 + records.MAX_LOSSES):
        assert etl.end().status is RESERVED
        etl.grant_id = etl.apply(grant_to(etl.stream, "etl", epoch)).grant_id
    assert etl.end().status is RESERVED


def test_entire_epochs_are_in_doubt_until_consumed(world: World) -> None:
    group, term, (stream,) = world.led(atomic=True)
    world.complete(1)
    world.append(stream, 4, 1, 9)
    grant_id = world.apply(group, term, grant_to(stream)).lending.grant_id  # type: ignore[union-attr]
    done = ConsumedFrontier(4, LowerFrontier(((2,),)))
    doubt = InDoubtRange(grant_id, 0, 0, HOLD_S, done)
    planned = world.applied(group, term, records.AdvancePosition(stream, grant_id, 0, ConsumedFrontier(0), doubt))
    assert planned.pending_in_doubt == doubt
    ended = world.applied(group, term, records.ForceRelease(stream, grant_id, "silent"))
    assert (ended.status, ended.pending_in_doubt) == (RESERVED, doubt)
    freed = world.applied(group, term, records.FreeReservedStream(stream, ended.grant_id, "operator", is_forced=True))
    assert freed.pending_in_doubt is None
    assert world.store.history(group.group_id)[-1].redelivery_end == 4
    back = world.applied(group, term, grant_to(stream, "etl", 8))
    planned = world.applied(group, term, records.AdvancePosition(stream, back.grant_id, 0, ConsumedFrontier(0), doubt))
    saved = world.applied(group, term, records.AdvancePosition(stream, back.grant_id, 0, done))
    assert (saved.in_doubt, saved.pending_in_doubt) == (doubt, None)


def test_a_closed_stream_ends_in_spite_of_a_plan(world: World) -> None:
    etl = Etl(world)
    world.rollover(1)
    assert etl.apply(records.AdvancePosition(etl.stream, etl.grant_id, 10)).status is FINISHED


@pytest.mark.conforms("E26", "W4")
@pytest.mark.parametrize("position", [2, 5])
def test_what_is_skipped_does_not_count_as_done(world: World, position: int) -> None:
    """A plan is in doubt where retention takes the stream: its session finds nothing of it in the row, and not a
    position behind it."""
    (stream,) = world.add_space()
    group = world.declare(starting_position=StartingPosition.EARLIEST, on_data_loss=records.OnDataLoss.SKIP)
    term = world.lead(group)
    world.append(stream, 10)
    grant_id = world.applied(group, term, grant_to(stream)).grant_id
    doubt = InDoubtRange(grant_id, 2, 5, HOLD_S)
    world.applied(group, term, records.AdvancePosition(stream, grant_id, 2, in_doubt=doubt))
    world.applied(group, term, records.AdvancePosition(stream, grant_id, position))
    world.rollover(1)
    world.retire(1)
    (row,) = (row for row in world.write(group, term, renew=True).synced if row.stream_id == stream)
    assert (row.status, row.in_doubt) == (FINISHED, doubt if position == 5 else None)


@pytest.mark.conforms("E11", "P10")
def test_a_failover_announces_what_may_come_again(postgres: PostgresWorld) -> None:
    """Of what nobody holds, too: on the former timeline it may have been consumed."""
    group, term, (held, planned, free, never, empty) = postgres.led(5)
    for stream in (held, planned, free, never):
        postgres.append(stream, 10)
    granted(postgres, group, term, held)
    grant_id = postgres.applied(group, term, grant_to(planned)).grant_id
    doubt = InDoubtRange(grant_id, 2, 5, HOLD_S)
    postgres.applied(group, term, records.AdvancePosition(planned, grant_id, 2, in_doubt=doubt))
    grant_id = granted(postgres, group, term, free).grant_id
    postgres.applied(group, term, records.ReleaseStream(free, grant_id, 4, "leave"))
    postgres.connection.execute("update leadership set timeline = 'the former'")
    term = postgres.lead(group, TWO)
    announced = [
        (line.stream_id, line.position, line.redelivery_end)
        for line in postgres.store.history(group.group_id)
        if line.is_forced and line.term == term
    ]
    assert sorted(announced) == [(held, 0, 10), (planned, 2, 10), (free, 4, 10), (never, 0, 10)]
    assert postgres.row(group, term, planned).status is RESERVED
    assert postgres.row(group, term, empty).status is FREE


@pytest.mark.conforms("E11", "P10")
def test_a_failover_ends_grants_page_by_page(postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statements of a large group would be canceled, at each claim: here each line of history takes 0.05 s."""
    group, term, streams = postgres.led(60)
    held, free = streams[:30], streams[30:]
    for stream in streams:
        postgres.append(stream, 1)
    for stream in held:
        granted(postgres, group, term, stream)
    postgres.connection.execute("update leadership set timeline = 'the former'")
    postgres.connection.execute(SLOW_HISTORY)
    monkeypatch.setattr(lending_statements, "PAGE", 5)
    with closing(PostgresGroupStore(postgres.url, postgres.clock, statement_timeout_s=1.2)) as store:
        term = store.claim(group.group_id, TWO, LEASE_S).term
    announced = [line.stream_id for line in postgres.store.history(group.group_id) if line.term == term]
    assert set(announced) >= {*held, *free}
    assert {row.status for row in postgres.store.load(group.group_id, term)} == {FREE}
