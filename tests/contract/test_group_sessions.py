"""Rows that wait for a session's return, and the lines of history that say who led and what may be seen twice."""

from __future__ import annotations

import math

import pytest

from sublet_protocol.domain.errors import PermissionDenied
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator import session_name_owners
from sublet_storage.groups.model import group_errors, records
from sublet_storage.node_directory import NodeIncarnation
from tests.contract.group_world import (
    APPLIED,
    BLOCKED,
    FINISHED,
    FREE,
    HELD,
    LEASE_S,
    ONE,
    SHARE,
    TWO,
    World,
    events,
    grant,
    granted,
    outcome,
)
from tests.support.memory_store import groups as memory_groups

OTHER = Subscription.parse("$share/other/#")


def named(stream_id: int, session: str | None = "etl", epoch: int | None = 7) -> records.GrantStream:
    return records.GrantStream(stream_id, "b1", "a1", session, "share", epoch)


def takeovers(world: World, group_id: int) -> list[tuple[str, int]]:
    return [(line.reason, line.term) for line in world.store.history(group_id) if line.event == records.TAKEOVER]


# --- kept for a session -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("word", ["release", "force_release"])
def test_a_row_is_reserved_for_its_session_for_so_long(world: World, word: str) -> None:
    (stream,) = world.add_space()
    group = world.group()
    term = world.lead(group, ONE)
    held = world.applied(group, term, named(stream))
    assert (held.session, held.session_epoch, held.reserved_s) == ("etl", 7, 0.0)
    world.append(stream, 3)
    end = (
        records.ReleaseStream(stream, held.grant_id, 2, "leave", 30.5)
        if word == "release"
        else records.ForceRelease(stream, held.grant_id, "silent", 30.5)
    )
    freed = world.applied(group, term, end)
    assert (freed.status, freed.session, freed.session_epoch, freed.reserved_s) == (FREE, "etl", 7, 30.5)
    assert (freed.borrower_id, freed.agent) == (None, None)
    assert freed.grant_id > held.grant_id
    world.clock.advance(4.25)
    assert world.row(group, term, stream).reserved_s == 26.25
    world.store.renew(ONE, {group.group_id: term}, 1000)
    world.clock.advance(30)
    row = world.row(group, term, stream)
    assert (row.session, row.reserved_s) == ("etl", -3.75)
    assert world.store.history(group.group_id)[-1].session == "etl"


def test_a_grant_ends_the_wait_whoever_gets_it(world: World) -> None:
    group, term, (first, second) = world.led(2)
    for stream in (first, second):
        held = world.applied(group, term, named(stream))
        world.apply(group, term, records.ReleaseStream(stream, held.grant_id, 0, "leave", 60))
    back = world.applied(group, term, named(first, "etl", 8))
    assert (back.session, back.session_epoch, back.reserved_s) == ("etl", 8, 0.0)
    other = world.applied(group, term, named(second, None, None))
    assert (other.session, other.session_epoch, other.reserved_s) == (None, None, 0.0)
    ended = world.applied(group, term, records.ReleaseStream(first, back.grant_id, 0, "leave"))
    assert (ended.session, ended.session_epoch, ended.reserved_s) == (None, None, 0.0)


@pytest.mark.parametrize(("session", "reserve_s"), [(None, 60.0), ("etl", 0.0), ("etl", -1.0)])
def test_nothing_is_reserved_for_the_nameless(world: World, session: str | None, reserve_s: float) -> None:
    group, term, (stream,) = world.led()
    held = world.applied(group, term, named(stream, session))
    freed = world.applied(group, term, records.ForceRelease(stream, held.grant_id, "silent", reserve_s))
    assert (freed.session, freed.session_epoch, freed.reserved_s) == (None, None, 0.0)


def test_a_row_is_reserved_for_a_year_at_most(world: World) -> None:
    group, term, (stream,) = world.led()
    held = world.applied(group, term, named(stream))
    freed = world.applied(group, term, records.ForceRelease(stream, held.grant_id, "silent", math.inf))
    assert freed.reserved_s == 366 * 86400


def test_what_ends_for_good_is_not_reserved(world: World) -> None:
    group, term, (consumed, poisoned, idle) = world.led(3)
    for stream in (consumed, poisoned):
        world.append(stream, 1)
    retained = world.applied(group, term, named(idle))
    world.apply(group, term, records.ReleaseStream(idle, retained.grant_id, 0, "leave", 60))
    held = world.applied(group, term, named(consumed))
    world.apply(group, term, records.AdvancePosition(consumed, held.grant_id, 1))
    held_too = world.applied(group, term, named(poisoned))
    world.rollover(1, shards=1)
    ends = (
        world.apply(group, term, records.ReleaseStream(consumed, held.grant_id, 1, "leave", 60)),
        world.apply(group, term, records.ReleaseStream(poisoned, held_too.grant_id, 0, "garbage", 60, poison=1)),
        world.apply(group, term, named(idle)),
    )
    assert [end.lending.status for end in ends if end.lending] == [FINISHED, BLOCKED, FINISHED]
    for end in ends:
        assert end.lending is not None
        assert (end.lending.session, end.lending.session_epoch, end.lending.reserved_s) == (None, None, 0.0)


@pytest.mark.conforms("X5")
def test_a_sessions_name_is_its_first_principals(world: World) -> None:
    world.store.bind_session(SHARE, "etl", "user:b")  # nothing is drawn for it: it stays nobody's
    epoch = world.next_session_epoch("etl")
    world.store.bind_session(SHARE, "etl", "user:a")
    world.store.bind_session(OTHER, "etl", "user:b")  # a name is a group's
    for _ in range(2):
        with pytest.raises(PermissionDenied, match=r"session 'etl' of .* is another principal's"):
            world.store.bind_session(SHARE, "etl", "user:b")
        world.store.bind_session(SHARE, "etl", "user:a")
        assert world.next_session_epoch("etl") > epoch


@pytest.mark.conforms("X4")
def test_a_principal_has_so_many_session_names(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (session_name_owners, memory_groups, group_errors):
        monkeypatch.setattr(module, "MAX_SESSION_NAMES_OF_PRINCIPAL", 2)
    for name in ("a", "b", "c"):
        world.next_session_epoch(name)
    for name in ("a", "b", "a"):
        world.store.bind_session(SHARE, name, "user:a")
    with pytest.raises(PermissionDenied, match="session 'c': user:a has 2 names of sessions, which is the limit"):
        world.store.bind_session(SHARE, "c", "user:a")
    world.store.bind_session(SHARE, "b", "user:a")
    world.store.bind_session(SHARE, "c", "user:b")


@pytest.mark.conforms("E16")
def test_a_reclaim_may_bring_a_newer_session_epoch(world: World) -> None:
    group, term, (stream,) = world.led()
    held = world.applied(group, term, named(stream))
    silent = world.apply(group, term, records.ReclaimStream(stream, held.grant_id, 0, "b1", "a1"))
    assert silent.lending == held
    newer = world.applied(group, term, records.ReclaimStream(stream, held.grant_id, 0, "b1", "a1", 9))
    assert (newer.session, newer.session_epoch, newer.grant_id) == ("etl", 9, held.grant_id)
    assert [event for event, _, _ in events(world, group)] == ["grant", "reclaim"]


# --- history ------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("A7")
def test_a_mark_is_a_line_of_history_and_nothing_else(world: World) -> None:
    group, term, (stream,) = world.led()
    held = world.applied(group, term, named(stream))
    world.append(stream, 5)
    world.apply(group, term, records.AdvancePosition(stream, held.grant_id, 2))
    before = world.row(group, term, stream)
    mark = records.RecordHistory(stream, held.grant_id, "revoke", "rebalance")
    assert world.apply(group, term, mark) == records.LendingChangeResult(mark, APPLIED, before)
    assert world.row(group, term, stream) == before
    line = world.store.history(group.group_id)[-1]
    assert (line.event, line.reason, line.grant_id, line.borrower_id, line.session, line.position, line.term) == (
        "revoke", "rebalance", held.grant_id, "b1", "etl", 2, term
    )  # fmt: skip
    assert (line.is_forced, line.redelivery_end) == (False, None)


@pytest.mark.conforms("E11")
def test_a_forced_move_records_what_may_be_seen_twice(world: World) -> None:
    group, term, (moved, blocked, left) = world.led(3)
    grants = {stream: granted(world, group, term, stream).grant_id for stream in (moved, blocked, left)}
    for stream in grants:
        world.append(stream, 10)
        world.apply(group, term, records.AdvancePosition(stream, grants[stream], 3))
    world.apply(group, term, records.ForceRelease(moved, grants[moved], "deadline"))
    world.append(moved, 5)
    world.apply(group, term, records.ReleaseStream(blocked, grants[blocked], 3, "garbage", 0.0, 10, poison=4))
    world.apply(group, term, records.ReleaseStream(left, grants[left], 4, "leave"))
    windows = {
        line.stream_id: (line.is_forced, line.position, line.redelivery_end)
        for line in world.store.history(group.group_id)
    }
    assert windows[moved] == (True, 3, 10), "what came later cannot have been seen"
    assert windows[blocked] == (True, 3, 10)
    assert windows[left] == (False, 4, None)


@pytest.mark.conforms("A7")
def test_history_records_who_leads_from_when_on(world: World) -> None:
    world.add_space()
    group = world.group()
    terms = [world.lead(group, ONE)]
    world.lead(group, ONE)
    world.clock.advance(LEASE_S)
    again = world.lead(group, ONE)
    assert again > terms[0], "its own lease had run out: a new term, but nobody took over"
    world.clock.advance(LEASE_S)
    terms.append(world.lead(group, TWO))
    assert world.store.claim(group.group_id, ONE, LEASE_S).node == TWO
    world.store.release(TWO, {group.group_id: terms[1]})
    terms.append(world.lead(group, NodeIncarnation("two", "its next life", "127.0.0.1:2")))
    reasons = ["node one leads; first leader", "node two leads; before: one", "node two leads; before: two"]
    assert takeovers(world, group.group_id) == list(zip(reasons, terms, strict=True))
    line = world.store.history(group.group_id)[0]
    assert (line.stream_id, line.grant_id, line.borrower_id, line.agent, line.session, line.position) == (
        0, 0, None, None, None, 0
    )  # fmt: skip
    assert (line.is_forced, line.redelivery_end) == (False, None)


def test_who_keeps_house_is_no_history(world: World) -> None:
    world.store.claim(0, ONE, LEASE_S)
    world.clock.advance(LEASE_S)
    world.store.claim(0, TWO, LEASE_S)
    assert world.store.history(0) == ()


def test_no_grant_id_is_drawn_twice(world: World) -> None:
    group, term, (stream,) = world.led()
    seen: list[int] = []
    for _ in range(3):
        held = world.applied(group, term, named(stream))
        ended = world.apply(group, term, records.ReleaseStream(stream, held.grant_id, 0, "leave", 60))
        assert outcome(ended) == (APPLIED, FREE, 0)
        assert ended.lending is not None
        seen += [held.grant_id, ended.lending.grant_id]
    assert seen == sorted(set(seen))
    assert held.status is HELD


@pytest.mark.conforms("A7")
def test_a_commit_answers_with_the_history_it_wrote(world: World) -> None:
    first, second, third = world.add_space(shards=3)
    group, other = world.group(), world.group(OTHER)
    term, other_term = world.lead(group), world.lead(other)
    held = {stream: granted(world, group, term, stream).grant_id for stream in (first, second)}
    world.append(first, 9)
    world.clock.advance(1.5)
    before = world.store.history(group.group_id), world.store.history(other.group_id)
    entries = (
        records.ForceRelease(first, held[first], "gone"),
        records.RecordHistory(second, held[second], "revoke", "rebalance"),
        grant(third, "b2", "a2"),
    )
    batch = [
        records.GroupWrites(group.group_id, term, entries),
        records.GroupWrites(other.group_id, other_term, (grant(first, "b3"), records.AdvancePosition(second, 17, 1))),
    ]
    ours, theirs = world.store.commit(batch)
    assert [(line.event, line.stream_id) for line in ours.history] == [
        ("force_release", first),
        ("revoke", second),
        ("grant", third),
    ]
    assert [(line.event, line.group_id) for line in theirs.history] == [("grant", other.group_id)]
    assert (ours.history[0].position, ours.history[0].redelivery_end, ours.history[0].is_forced) == (0, 9, True)
    assert world.store.history(group.group_id) == before[0] + ours.history
    assert world.store.history(other.group_id) == before[1] + theirs.history


def test_progress_and_past_terms_write_no_history(world: World) -> None:
    group, term, stream, held = world.granted(5)
    assert world.write(group, term, records.AdvancePosition(stream, held.grant_id, 3), renew=True).history == ()
    assert world.write(group, term, records.ReleaseStream(stream, held.grant_id - 1, 3, "late")).history == ()
    world.clock.advance(LEASE_S)
    world.lead(group, TWO)
    of_stale_term = world.write(group, term, records.ReleaseStream(stream, held.grant_id, 5, "left"))
    assert (of_stale_term.has_stale_term, of_stale_term.history) == (True, ())


def test_a_renewal_reports_last_what_it_ended(world: World) -> None:
    group, term, (first, second) = world.led(2)
    held = granted(world, group, term, first)
    for stream in (first, second):
        world.append(stream, 4)
    world.rollover(1)
    world.retire(1)
    reported = world.write(
        group, term, records.RecordHistory(first, held.grant_id, "revoke", "rebalance"), renew=True
    ).history
    assert [(line.event, line.stream_id) for line in reported] == [
        ("revoke", first),
        ("block", first),
        ("block", second),
    ]
    assert reported == world.store.history(group.group_id)[-3:]
