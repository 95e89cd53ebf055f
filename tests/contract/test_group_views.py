"""What is shown of one group, where another one has other rows of the same streams, and a third was deleted."""

from __future__ import annotations

from typing import Any

import pytest

from sublet_protocol.domain.errors import NotFound
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.admin import access_snapshot
from sublet_storage.groups.model.desired_state import PauseGroup
from sublet_storage.groups.status import overview
from sublet_storage.groups.status.diagnosis_queries import diagnose_group
from sublet_storage.groups.status.group_pages import GroupSort, list_group_page
from sublet_storage.groups.status.lag_queries import (
    LagByStatus,
    list_unconsumed_groups,
    read_lags_by_status,
    read_stream_lags,
    read_total_lags,
    sum_by_status,
)
from sublet_storage.groups.status.overview import describe_group, list_groups, list_leaderless_groups
from tests.contract.group_world import SHARE, Held, Led, PostgresWorld

EARLIEST = StartingPosition.EARLIEST
OTHER, IDLE, PAUSED, DELETED = (Subscription.parse(f"$share/{name}/#") for name in ("other", "idle", "paused", "gone"))
FACTS = ("status", "position", "lag", "borrower_id", "session", "blocked_reason", "unreadable_reason")


def declared(postgres: PostgresWorld, subscription: Subscription, streams: tuple[int, ...]) -> Led:
    return postgres.lead(postgres.declare(subscription, starting_position=EARLIEST), streams=streams)


def blocked(held: Held, reason: str) -> None:
    held.release(0, reason, poison=1)


@pytest.fixture
def ours(postgres: PostgresWorld) -> Led:
    """Return a group with each of eight streams of ten messages in another state. Who holds streams of the others has
    reported them as unreadable, or is to give them back, where it is not so here."""
    streams = postgres.add_space(shards=8)
    led, theirs, deleted = (declared(postgres, name, streams) for name in (SHARE, OTHER, DELETED))
    idle, paused = (declared(postgres, name, streams) for name in (IDLE, PAUSED))
    postgres.store.apply_command(PAUSED, PauseGroup("why"))
    for stream in streams:
        postgres.append(stream, 10)
    taken = {}
    for stream in streams[1:]:
        for other in (deleted, theirs):
            taken[stream] = other.grant(stream)
            taken[stream].record("unreadable", "theirs")
            taken[stream].record("revoke", "theirs")
    postgres.store.delete_group(DELETED)
    taken[streams[0]] = theirs.grant(streams[0])
    taken[streams[0]].record("unreadable", "theirs")

    broken, again, moved, revoked, well, bad, left, read = streams
    for stream in (broken, again, revoked):
        before = led.grant(stream)
        for event in ("unreadable", "revoke"):
            before.record(event, "before")
        before.release(0)
    led.grant(again).record("unreadable", "damaged")
    damaged = led.grant(broken)
    damaged.advance(4)
    for event in ("unreadable", "readable", "command"):
        damaged.record(event, "before")
    damaged.record("unreadable", "damaged")
    held = led.grant(moved)
    held.record("unreadable", "before")
    held.reclaim(0, borrower="b2")
    led.grant(revoked).record("revoke", "rebalance")
    held = led.grant(well)
    for event in ("unreadable", "readable"):
        held.record(event, "as it was")
    blocked(led.grant(bad), "the first")
    postgres.connection.execute(
        "update lending set status = 'free' where status = 'blocked' and stream_id = %s", (bad,)
    )
    blocked(led.grant(bad), "the last")
    held.record("block", "another's")
    later = "insert into lending_history (at, group_id, stream_id, event, reason, grant_id, position, term)"
    values = " values (now(), %s, %s, 'command', 'no block', 0, 0, 1)"
    postgres.connection.execute((later + values).encode(), (led.group_id, bad))
    held = led.grant(left, session="left")
    for event in ("revoke", "unreadable"):
        held.record(event, "as it was")
    free = "update lending set status = 'free', position = 7, held_until = now() + interval '1 h'"
    where = " where group_id = %s and stream_id = %s"  # by SQL: the holder and its grant are left in the row
    postgres.connection.execute((free + where).encode(), (led.group_id, left))
    led.grant(read).advance(10)
    taken[broken].record("readable", "theirs")
    for stream in (broken, bad):
        blocked(taken[stream], "theirs")
    past = "update lending set session = 'past', held_until = now() where group_id = %s"
    postgres.connection.execute(past, (idle.group_id,))
    postgres.connection.execute("update lending set held_until = now() where group_id = %s", (paused.group_id,))
    finished = "update lending set status = 'finished' where group_id = %s and stream_id = %s"
    postgres.connection.execute(finished, (idle.group_id, broken))
    postgres.connection.execute("update lending_history set at = now() - interval '9 h'")
    since = "update lending_history set at = now() - interval '1 h' where reason = 'damaged'"
    postgres.connection.execute(since)
    alive = "update leadership set expires_at = now() + interval '1 h' where leadership_id = %s"
    postgres.connection.execute(alive, (theirs.group_id,))
    return led


def test_each_stream_is_shown_as_its_group_has_it(postgres: PostgresWorld, ours: Led) -> None:
    overview = describe_group(postgres.connection, SHARE)
    assert [tuple(getattr(each, fact) for fact in FACTS) for each in overview.streams] == [
        ("held", 4, 6, "b1", "session", None, "damaged"),
        ("held", 0, 10, "b1", "session", None, "damaged"),
        ("held", 0, 10, "b2", "session", None, None),
        ("held", 0, 10, "b1", "session", None, None),
        ("held", 0, 10, "b1", "session", None, None),
        ("blocked", 0, None, None, None, "the last", None),
        ("free", 7, 3, "b1", "left", None, None),
        ("held", 10, 0, "b1", "session", None, None),
    ]
    assert [each.age_s is not None for each in overview.streams] == [True] * 5 + [False, True, False]
    assert [(each.session, len(each.streams)) for each in overview.reserved_sessions] == [("left", 1)]
    assert overview.counts.unreadable_count == 2
    since = [each.unreadable_s for each in overview.streams if each.unreadable_s is not None]
    assert [round(each / 3600) for each in since] == [1, 1]
    _, diagnoses = diagnose_group(postgres.connection, SHARE)
    assert {each.diagnosis.reason.value for each in diagnoses} == {"no_node", "blocked"}, "its lease has run out"
    postgres.connection.execute("update leadership set expires_at = now() + interval '1 h'")
    _, diagnoses = diagnose_group(postgres.connection, SHARE)
    assert [each.diagnosis.reason.value for each in diagnoses] == [
        *("unreadable", "unreadable", "stalled", "revoked", "stalled", "blocked", "reserved_for_session", "caught_up"),
    ]
    _, diagnoses = diagnose_group(postgres.connection, IDLE)
    reasons = [each.diagnosis.reason.value for each in diagnoses]
    assert reasons == ["finished", *["members_silent"] * 7], "it is reserved for nobody any more"


def test_groups_are_counted_each_by_itself(postgres: PostgresWorld, ours: Led) -> None:
    conn = postgres.connection
    counts = {each.group.name: (each.statuses, each.known_lag, each.counts.max_lag) for each in list_groups(conn)}
    assert counts == {
        "billing": ({"held": 6, "blocked": 1, "free": 1}, 49, 10),
        "idle": ({"free": 7, "finished": 1}, 70, 10),
        "other": ({"held": 6, "blocked": 2}, 60, 10),
        "paused": ({"free": 8}, 80, 10),
    }
    unreadable = {each.group.name: each.counts.unreadable_count for each in list_groups(conn)}
    assert unreadable == {"billing": 2, "idle": 0, "other": 6, "paused": 0}
    assert [each.group.name for each in list_groups(conn) if each.has_leader] == ["other"]
    leaderless, total = list_leaderless_groups(conn, 2)
    assert ([each.group.name for each in leaderless], total) == (["billing", "idle"], 3)
    assert leaderless[1].statuses == {"free": 7}, "without what is finished"
    assert list_leaderless_groups(conn, 0) == ((), 3)
    assert describe_group(conn, IDLE).reserved_sessions == ()
    assert {each.reserved_s for each in describe_group(conn, IDLE).streams} == {None}
    conn.execute("update lending set held_until = now() + interval '1 h' where session is null and status = 'free'")
    assert describe_group(conn, PAUSED).reserved_sessions == (), "taken from somebody, and for nobody"
    assert list_unconsumed_groups(conn) == [(str(IDLE), 70)]
    sums = [
        LagByStatus(ours.group_id, "blocked", 1, 0, None, 1),
        LagByStatus(ours.group_id, "free", 1, 3, 3, 0),
        LagByStatus(ours.group_id, "held", 6, 46, 10, 0),
    ]
    assert read_lags_by_status(conn, [ours.group_id]) == sums
    assert sum_by_status(read_stream_lags(conn, [ours.group_id])) == sums
    assert read_lags_by_status(conn, [ours.group_id + 3]) == [LagByStatus(ours.group_id + 3, "free", 7, 70, 10, 0)]
    lags = {ours.group_id: None, ours.group_id + 1: None, ours.group_id + 3: 70, ours.group_id + 4: 80}
    assert read_total_lags(conn) == lags
    for sort, names in ((GroupSort.LAG, ["idle", "paused", "billing", "other"]), (GroupSort.NAME, list(counts))):
        page = list_group_page(conn, "share", sort, limit=4)
        assert (page.total, [each.group.name for each in page.groups]) == (4, names), sort
    for search, is_visible, names in (
        ("SHARE/OTHER", None, ["other"]),
        ("e/#", None, ["idle"]),
        ("", lambda name, _: name in ("idle", "billing"), ["billing", "idle"]),
    ):
        page = list_group_page(conn, search, is_visible=is_visible)
        assert (page.total, [each.group.name for each in page.groups]) == (len(names), names), search
    (unnoticed,) = postgres.rollover(1, 1)
    postgres.append(unnoticed, 5)
    assert list_unconsumed_groups(conn) == [(str(IDLE), 75)], "and not one that was deleted"
    conn.execute("delete from lending where group_id = %s", (ours.group_id,))
    assert ours.group_id not in read_total_lags(conn)


def test_who_holds_the_next_epochs_back_is_named(postgres: PostgresWorld) -> None:
    led = postgres.led(completed=3, atomic=True)
    postgres.append(led.stream, 10, 3)
    postgres.add_space("other", "other/#")
    led.grant()
    postgres.connection.execute("update leadership set expires_at = now() + interval '1 h'")
    for space, name, least, expired in (
        (1, "holds", 3, "null"),
        (1, "holds later ones", 4, "null"),
        (1, "expired", 3, "now()"),
        (2, "elsewhere", 3, "null"),
    ):
        postgres.connection.execute(
            "insert into capability (space_id, producer_id, incarnation, least, expires_at, expired_at)"
            f" values (%s, %s, 1, %s, now(), {expired})",
            (space, name, f"[[{least}]]"),
        )
    _, (found,) = diagnose_group(postgres.connection, SHARE, led.stream)
    assert found.diagnosis.reason.value == "waiting_for_epochs"
    assert found.diagnosis.detail == (
        "the epochs of space default from 3 on are not completed: producer holds may still publish there"
    )
    with pytest.raises(NotFound, match="stream 999"):
        diagnose_group(postgres.connection, SHARE, 999)
    postgres.connection.execute("delete from lending")
    assert diagnose_group(postgres.connection, SHARE)[1] == ()


def test_epochs_are_shown_of_the_groups_own_spaces(postgres: PostgresWorld) -> None:
    postgres.led(completed=3, atomic=True)
    postgres.add_space("other", "other/#")
    postgres.complete(5)
    postgres.declare(OTHER, atomic=True)
    assert [(each.space, each.consumed) for each in describe_group(postgres.connection, SHARE).epochs] == [
        ("default", [[3]])
    ]
    postgres.connection.execute("update consumed_frontier set has_streams = false")
    assert describe_group(postgres.connection, SHARE).epochs == ()
    with pytest.raises(NotFound):
        describe_group(postgres.connection, IDLE)


@pytest.mark.parametrize(
    ("status", "position", "is_gone", "lag", "lost"),
    [
        ("free", 4, False, 6, 0),
        ("free", 4, True, None, 6),
        ("free", 10, True, 0, 0),
        ("free", 10, False, 0, 0),
        ("free", 11, False, None, 0),
        ("finished", 4, True, 0, 0),
        ("finished", 4, False, 0, 0),
        ("blocked", 10, False, None, 0),
        ("blocked", 4, True, None, 6),
    ],
)
def test_lag_is_known_where_all_of_it_can_be_read(
    postgres: PostgresWorld, status: str, position: int, is_gone: bool, lag: int | None, lost: int
) -> None:
    led = postgres.led(starting_position=EARLIEST)
    postgres.append(led.stream, 10)
    if is_gone:
        postgres.rollover(1)
        postgres.retire(1)
    write = "update lending set status = %s, position = %s"
    postgres.connection.execute(write, (status, position))
    stream: Any = describe_group(postgres.connection, SHARE).streams[0]
    assert (stream.lag, stream.lost_message_count) == (lag, lost)


def test_a_group_is_found_by_all_of_its_name(postgres: PostgresWorld) -> None:
    """Not another kind, name or filter, nor one of the same name that was deleted."""
    names = [SHARE, *map(Subscription.parse, ("$queue/billing/orders/#", "$share/billing/#", "$share/sales/orders/#"))]
    postgres.add_space()
    for name in names:
        postgres.declare(name)
        postgres.store.delete_group(name)
    groups = {postgres.declare(name).group_id: str(name) for name in names}
    found = [describe_group(postgres.connection, name).group for name in names]
    assert {each.group_id: each.subscription for each in found} == groups
    assert not any(describe_group(postgres.connection, name).has_leader for name in names), "nobody has ever led them"
    assert [postgres.store.find_group(group_id) is None for group_id in range(1, 9)] == [True] * 4 + [False] * 4
    assert [postgres.store.open_group(name, EARLIEST).group_id for name in names] == list(groups)


def test_who_reads_a_stream_is_found(postgres: PostgresWorld) -> None:
    first, second = (postgres.add_space(name, f"{name}/#")[0] for name in ("a", "b"))
    names = {stream: Subscription.parse(f"$share/of-{name}/{name}/#") for stream, name in ((first, "a"), (second, "b"))}
    groups = {stream: postgres.declare(name).group_id for stream, name in names.items()}
    for stream, name in names.items():
        found = access_snapshot.read_groups_of_streams(postgres.connection, [stream])
        assert found == [(groups[stream], name.group, name.filter)]
        asked = [first, second], [groups[stream]]
        assert access_snapshot.find_streams_of_groups(postgres.connection, *asked) == {stream: groups[stream]}
    postgres.connection.execute("update consumer_group set deleted_at = now() where group_id = %s", (groups[first],))
    assert access_snapshot.read_groups_of_streams(postgres.connection, [first]) == []


def test_a_group_is_shown_with_all_pages_of_streams(postgres: PostgresWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview, "PAGE", 2)
    streams = postgres.led(4).streams
    assert [each.stream_id for each in describe_group(postgres.connection, SHARE).streams] == sorted(streams)


@pytest.mark.conforms("A7")
def test_who_reports_the_same_offset_stands_still(postgres: PostgresWorld) -> None:
    """The row is not written anew, by whose age a holder is called slow."""
    held = postgres.granted(5)
    held.advance(3)
    written = postgres.connection.execute("select ctid from lending").fetchall()
    assert held.advance(3).outcome == "applied"
    assert postgres.connection.execute("select ctid from lending").fetchall() == written
