"""Rows that wait for a session's return, and the lines of history that say who led and what may be seen twice."""

from __future__ import annotations

import math
from typing import Any

import pytest

from sublet_protocol.domain.errors import PermissionDenied
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.coordinator import session_name_owners
from sublet_storage.groups.model import group_errors
from sublet_storage.groups.model.records import (
    TAKEOVER,
    AdvancePosition,
    ForceRelease,
    Lending,
    LendingChangeResult,
    LendingOutcome,
    RecordHistory,
    ReleaseStream,
)
from sublet_storage.node_directory import NodeIncarnation
from tests.contract.group_world import LEASE_S, ONE, SHARE, TWO, Held, Led, World, grant, row_of
from tests.support.memory_store import groups as memory_groups

OTHER = Subscription.parse("$share/other/#")
NOTHING = (None, None, 0.0)


def named(led: Led, stream: int | None = None, epoch: int = 7) -> Held:
    """Grant the stream to the session etl."""
    return led.grant(stream, session="etl", epoch=epoch)


def reservation(row: Lending | None) -> tuple[str | None, int | None, float]:
    assert row is not None
    return row.session, row.session_epoch, row.reserved_s


# --- kept for a session -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "end",
    [lambda held, reserve_s: held.release(2, "leave", reserve_s), lambda held, s: held.force_release("silent", s)],
    ids=["release", "force release"],
)
def test_a_row_is_reserved_for_its_session_for_so_long(world: World, end: Any) -> None:
    led = world.led()
    held = named(led)
    assert reservation(held.row) == ("etl", 7, 0.0)
    world.append(held.stream, 3)
    freed = row_of(end(held, 30.5))
    assert (freed.status, freed.borrower_id, freed.agent) == ("free", None, None)
    assert reservation(freed) == ("etl", 7, 30.5)
    assert freed.grant_id > held.grant_id
    world.clock.advance(4.25)
    assert led.row().reserved_s == 26.25
    world.store.renew(ONE, {led.group_id: led.term}, 1000)
    world.clock.advance(30)
    assert reservation(led.row()) == ("etl", 7, -3.75)
    assert led.history()[-1].session == "etl"


def test_a_grant_ends_the_wait_whoever_gets_it(world: World) -> None:
    led = world.led(2)
    first, second = led.streams
    for stream in led.streams:
        named(led, stream).release(0, "leave", 60)
    back = named(led, first, 8)
    assert reservation(back.row) == ("etl", 8, 0.0)
    assert reservation(led.grant(second, session=None).row) == NOTHING
    assert reservation(row_of(back.release(0))) == NOTHING


@pytest.mark.parametrize(("session", "reserve_s"), [(None, 60.0), ("etl", 0.0), ("etl", -1.0)])
def test_nothing_is_reserved_for_the_nameless(world: World, session: str | None, reserve_s: float) -> None:
    held = world.led().grant(session=session, epoch=7)
    assert reservation(row_of(held.force_release("silent", reserve_s))) == NOTHING


def test_a_row_is_reserved_for_a_year_at_most(world: World) -> None:
    assert row_of(named(world.led()).force_release("silent", math.inf)).reserved_s == 366 * 86400


def test_what_ends_for_good_is_not_reserved(world: World) -> None:
    led = world.led(3)
    consumed, poisoned, idle = led.streams
    for stream in (consumed, poisoned):
        world.append(stream, 1)
    named(led, idle).release(0, "leave", 60)
    held, other = named(led, consumed), named(led, poisoned)
    held.advance(1)
    world.rollover(1, shards=1)
    ends = (held.release(1, "leave", 60), other.release(0, "garbage", 60, poison=1), led.ask(idle))
    assert [end.lending.status for end in ends if end.lending] == ["finished", "blocked", "finished"]
    assert [reservation(end.lending) for end in ends] == [NOTHING] * 3


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
    held = named(world.led())
    assert held.reclaim(0).lending == held.row
    newer = row_of(held.reclaim(0, session_epoch=9))
    assert (newer.session, newer.session_epoch, newer.grant_id) == ("etl", 9, held.grant_id)
    assert [event for event, _, _ in held.led.events()] == ["grant", "reclaim"]


# --- history ------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("A7")
def test_a_mark_is_a_line_of_history_and_nothing_else(world: World) -> None:
    held = named(world.led())
    world.append(held.stream, 5)
    held.advance(2)
    before = held.now()
    mark = RecordHistory(held.stream, held.grant_id, "revoke", "rebalance")
    assert held.led.apply(mark) == LendingChangeResult(mark, LendingOutcome.APPLIED, before)
    assert held.now() == before
    line = held.led.history()[-1]
    assert (line.event, line.reason, line.grant_id, line.borrower_id, line.session, line.position, line.term) == (
        "revoke", "rebalance", held.grant_id, "b1", "etl", 2, held.led.term
    )  # fmt: skip
    assert (line.is_forced, line.redelivery_end) == (False, None)


@pytest.mark.conforms("E11")
def test_a_forced_move_records_what_may_be_seen_twice(world: World) -> None:
    led = world.led(3)
    moved, blocked, left = (led.grant(stream) for stream in led.streams)
    for held in (moved, blocked, left):
        world.append(held.stream, 10)
        held.advance(3)
    moved.force_release("deadline")
    world.append(moved.stream, 5)
    blocked.release(3, "garbage", 0.0, 10, poison=4)
    left.release(4)
    windows = {line.stream_id: (line.is_forced, line.position, line.redelivery_end) for line in led.history()}
    assert windows[moved.stream] == (True, 3, 10), "what came later cannot have been seen"
    assert windows[blocked.stream] == (True, 3, 10)
    assert windows[left.stream] == (False, 4, None)


@pytest.mark.conforms("A7")
def test_history_records_who_leads_from_when_on(world: World) -> None:
    world.add_space()
    led = world.lead(world.group())
    world.lead(led.group, ONE)
    again = led.succeed(ONE)
    assert again.term > led.term, "its own lease had run out: a new term, but nobody took over"
    second = again.succeed(TWO)
    assert world.store.claim(led.group_id, ONE, LEASE_S).node == TWO
    world.store.release(TWO, {led.group_id: second.term})
    third = world.lead(led.group, NodeIncarnation("two", "its next life", "127.0.0.1:2"))
    reasons = ["node one leads; first leader", "node two leads; before: one", "node two leads; before: two"]
    takeovers = [(line.reason, line.term) for line in led.history(TAKEOVER)]
    assert takeovers == list(zip(reasons, [led.term, second.term, third.term], strict=True))
    line = led.history()[0]
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
    led = world.led()
    seen: list[int] = []
    for _ in range(3):
        held = named(led)
        seen += [held.grant_id, row_of(held.release(0, "leave", 60)).grant_id]
    assert seen == sorted(set(seen))


@pytest.mark.conforms("A7")
def test_a_commit_answers_with_the_history_it_wrote(world: World) -> None:
    led = world.led(3)
    other = world.lead(world.group(OTHER))
    first, second, third = led.streams
    held = {stream: led.grant(stream).grant_id for stream in (first, second)}
    world.append(first, 9)
    world.clock.advance(1.5)
    before = led.history(), other.history()
    batch = [
        led.writes(
            ForceRelease(first, held[first], "gone"),
            RecordHistory(second, held[second], "revoke", "rebalance"),
            grant(third, "b2", "a2"),
        ),
        other.writes(grant(first, "b3"), AdvancePosition(second, 17, 1)),
    ]
    ours, theirs = world.store.commit(batch)
    events = [(line.event, line.stream_id) for line in ours.history]
    assert events == [("force_release", first), ("revoke", second), ("grant", third)]
    assert [(line.event, line.group_id) for line in theirs.history] == [("grant", other.group_id)]
    assert (ours.history[0].position, ours.history[0].redelivery_end, ours.history[0].is_forced) == (0, 9, True)
    assert (led.history(), other.history()) == ([*before[0], *ours.history], [*before[1], *theirs.history])


def test_progress_and_past_terms_write_no_history(world: World) -> None:
    held = world.granted(5)
    led = held.led
    assert led.write(AdvancePosition(held.stream, held.grant_id, 3), sync=True).history == ()
    assert led.write(ReleaseStream(held.stream, held.grant_id - 1, 3, "late")).history == ()
    led.succeed()
    of_stale_term = led.write(ReleaseStream(held.stream, held.grant_id, 5, "left"))
    assert (of_stale_term.has_stale_term, of_stale_term.history) == (True, ())


def test_a_renewal_reports_last_what_it_ended(world: World) -> None:
    led = world.led(2)
    first, second = led.streams
    held = led.grant(first)
    for stream in led.streams:
        world.append(stream, 4)
    world.rollover(1)
    world.retire(1)
    reported = led.write(RecordHistory(first, held.grant_id, "revoke", "rebalance"), sync=True).history
    assert [(line.event, line.stream_id) for line in reported] == [
        ("revoke", first),
        ("block", first),
        ("block", second),
    ]
    assert list(reported) == led.history()[-3:]
