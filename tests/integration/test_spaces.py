"""Spaces: what a change closes and opens, and that keys keep their order through it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from sublet_leader.jobs import maintenance
from sublet_leader.jobs.maintenance import MaintenanceThreads
from sublet_protocol.domain.errors import Conflict, InvalidFilter, InvalidSetting, Unavailable, UnknownSpace
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.producer import Publisher
from sublet_storage.readers.tail import Tail
from sublet_storage.spaces import rollover as rollovers
from sublet_storage.spaces import small_block_compaction
from sublet_storage.spaces.retention import mark_expired_gone
from sublet_storage.spaces.routing import RING
from sublet_storage.spaces.space_changes import (
    MAX_S,
    alter_space,
    create_space,
    drop_space,
    ensure_default,
    reshard,
    roll_over_due,
    rollover,
)
from sublet_storage.spaces.space_queries import find_space, list_spaces
from tests.integration.log_kit import Connection, put, read
from tests.kit import WAIT_S, eventually
from tests.support.streams import open_streams


def streams(conn: Connection, space: str) -> list[int]:
    space_id = find_space(conn, space).space_id
    return [stream.stream_id for stream in open_streams(conn) if stream.space_id == space_id]


def parents(conn: Connection, stream_ids: list[int]) -> set[int]:
    rows = conn.execute("select unnest(parents) from stream where stream_id = any(%s)", (stream_ids,))
    return {row[0] for row in rows}


def states(conn: Connection, stream_ids: list[int]) -> set[str]:
    return {row[0] for row in conn.execute("select state from stream where stream_id = any(%s)", (stream_ids,))}


def test_the_default_space_is_made_once(conn: Connection) -> None:
    before = find_space(conn, "default")
    assert before.filter.text == "#"
    ensure_default(conn)
    assert find_space(conn, "default") == before
    assert len(list_spaces(conn)) == 1


@pytest.mark.conforms("A1")
def test_creating_the_same_twice_changes_nothing(conn: Connection) -> None:
    settings = {"shards": 3, "retention_s": 60, "rollover_s": 10, "compression": "zstd"}
    made = create_space(conn, "eu", "eu/#", **settings)  # type: ignore[arg-type]
    before = open_streams(conn)
    assert create_space(conn, "eu", "eu/#", **settings) == made  # type: ignore[arg-type]
    assert open_streams(conn) == before
    for other in ({"filter": "us/#"}, {"shards": 4}, {"retention_s": None}, {"compression": "none"}):
        with pytest.raises(Conflict, match="'eu' exists with other settings"):
            create_space(conn, "eu", **({"filter": "eu/#", **settings} | other))  # type: ignore[arg-type]
    with pytest.raises(Conflict, match="filter 'eu/#' is that of space 'eu'"):
        create_space(conn, "other", "eu/#")


def test_an_unknown_space_is_named_with_the_others(conn: Connection) -> None:
    create_space(conn, "eu", "eu/#")
    for change in (lambda: rollover(conn, "ue"), lambda: reshard(conn, "ue", 2), lambda: drop_space(conn, "ue")):
        with pytest.raises(UnknownSpace, match=r"'ue'.*default, eu"):
            change()


BAD_SETTINGS: dict[str, tuple[Callable[..., object], tuple[str, ...], dict[str, Any]]] = {
    "shards 0": (create_space, ("x", "x/#"), {"shards": 0}),
    "space name 'a/b'": (create_space, ("a/b", "x/#"), {}),
    "space name ''": (create_space, ("", "x/#"), {}),
    "rollover_s 0: must be above 0 seconds": (create_space, ("x", "x/#"), {"rollover_s": 0}),
    "gzip": (create_space, ("x", "x/#"), {"compression": "gzip"}),
    "retention_s -1": (create_space, ("x", "x/#"), {"retention_s": -1}),
    f"retention_s {MAX_S + 1}: must be at most 31536000000 s": (create_space, ("x", "x/#"), {"retention_s": MAX_S + 1}),
    f"rollover_s {MAX_S + 1}: must be at most 31536000000 s": (create_space, ("x", "x/#"), {"rollover_s": MAX_S + 1}),
    "retention_s 8639999999913600: .* Leave it out": (alter_space, ("default",), {"retention_s": 99999999999 * 86400}),
    "cannot be dropped": (drop_space, ("default",), {}),
    "filter #": (alter_space, ("default",), {"filter": "a/#"}),
    "colour": (alter_space, ("default",), {"colour": "red"}),
}


def test_bad_settings_are_refused_and_change_nothing(conn: Connection) -> None:
    before = open_streams(conn)
    with pytest.raises(InvalidFilter):
        create_space(conn, "x", "a/#/b")
    for said, (change, names, settings) in BAD_SETTINGS.items():
        with pytest.raises(InvalidSetting, match=said):
            change(conn, *names, **settings)
    assert open_streams(conn) == before


@pytest.mark.conforms("W3")
def test_a_rollover_closes_streams_and_opens_children(conn: Connection) -> None:
    old = streams(conn, "default")
    rollover(conn, "default")
    new = streams(conn, "default")
    assert states(conn, old) == {"closed"}
    assert [parents(conn, [child]) for child in new] == [{parent} for parent in old]


@pytest.mark.conforms("W3", "W4")
def test_what_ended_before_a_rollover_stays_as_it_is(database: str, conn: Connection) -> None:
    """Its retention goes on, and what is gone stays so; other spaces go on. Neither is waited for."""
    create_space(conn, "n" * 63, "n/#", shards=1)
    rollover(conn, "default")
    conn.execute("update generation set state = 'gone' where generation_id = 1")
    rollover(conn, "default")
    ended = [
        "select generation_id, state, closed_at from generation where state <> 'open' order by 1",
        "select stream_id, closed_at from stream where state <> 'open' order by 1",
    ]
    before = [conn.execute(each).fetchall() for each in ended]
    others = streams(conn, "n" * 63)
    with connect(database) as busy, busy.transaction():
        busy.execute("select from stream where state = 'closed' or space_id <> 1 for update")
        rollover(conn, "default")
    after = [{row[0]: row for row in conn.execute(each)} for each in ended]
    for found, rows in zip(after, before, strict=True):
        assert [found[row[0]] for row in rows] == rows
    assert streams(conn, "n" * 63) == others
    counted = "select count(*) from generation g join space using (space_id) where name = %s and state = 'open'"
    assert [conn.execute(counted, (name,)).fetchone() for name in ("default", "n" * 63)] == [(1,), (1,)]


@pytest.mark.conforms("W3")
def test_a_reshard_makes_parents_of_the_overlapping(conn: Connection) -> None:
    one, two = streams(conn, "default")
    reshard(conn, "default", 3)
    assert [parents(conn, [child]) for child in streams(conn, "default")] == [{one}, {one, two}, {two}]
    before = open_streams(conn)
    reshard(conn, "default", 3)
    assert open_streams(conn) == before, "the same number is a no-op"
    assert sum(each.hash_to - each.hash_from for each in before) == RING


@pytest.mark.conforms("W3")
def test_only_spaces_whose_topics_move_roll_over(conn: Connection) -> None:
    """The parents of new streams are of these spaces."""
    create_space(conn, "us", "us/#", shards=1)
    create_space(conn, "de", "eu/de/#", shards=1)
    before = {name: streams(conn, name) for name in ("default", "us", "de")}
    create_space(conn, "eu", "eu/#", shards=1)
    assert streams(conn, "us") == before["us"]
    assert streams(conn, "de") == before["de"], "a more specific space keeps its topics"
    assert parents(conn, streams(conn, "eu")) == set(before["default"])
    assert parents(conn, streams(conn, "default")) == set(before["default"])

    middle = {name: streams(conn, name) for name in ("default", "us", "de", "eu")}
    alter_space(conn, "eu", filter="us/+")
    assert streams(conn, "de") == middle["de"]
    assert parents(conn, streams(conn, "eu")) == {*middle["default"], *middle["us"], *middle["eu"]}
    assert parents(conn, streams(conn, "us")) == {*middle["us"]}, "eu had none of its topics before"

    last = {name: streams(conn, name) for name in ("default", "us", "eu")}
    drop_space(conn, "eu")
    assert states(conn, last["eu"]) == {"closed"}
    assert parents(conn, streams(conn, "default")) == {*last["default"], *last["eu"]}
    assert "eu" not in {space.name for space in list_spaces(conn)}
    assert "eu" in {space.name for space in list_spaces(conn, include_dropped=True)}


@pytest.mark.conforms("W3", "W4")
def test_a_generation_is_judged_by_its_own_filter(conn: Connection) -> None:
    """What was filled under a former filter is found, and held for a queue, by that."""
    create_space(conn, "eu", "eu/#", shards=1, retention_s=100)
    conn.execute("insert into consumer_group (kind, name, filter) values ('queue', 'g', 'eu/#')")
    held = rollover(conn, "eu")
    put(conn, streams(conn, "eu")[0], b"old", topic="eu/1")
    alter_space(conn, "eu", filter="us/#")
    put(conn, streams(conn, "eu")[0], b"new", topic="us/1")
    of_eu = "select filter from generation where space_id = %s order by ordinal"
    filled_under = conn.execute(of_eu, (find_space(conn, "eu").space_id,)).fetchall()
    assert [text for (text,) in filled_under] == ["eu/#", "eu/#", "us/#"]
    tail = Tail(conn, TopicFilter("eu/1"), "earliest")
    assert [value for page in tail.pages() for value in page["value"].to_pylist()] == [b"old"]
    conn.execute("update generation set closed_at = closed_at - interval '101 s' where state = 'closed'")
    assert held not in mark_expired_gone(conn)
    conn.execute("update consumer_group set deleted_at = now()")
    assert held in mark_expired_gone(conn)


def test_altering_retention_moves_no_stream(conn: Connection) -> None:
    before = open_streams(conn)
    altered = alter_space(conn, "default", retention_s=5, compression="lz4")
    assert find_space(conn, "default") == altered
    assert (altered.retention_s, altered.compression) == (5, "lz4")
    assert open_streams(conn) == before


def test_a_space_rolls_over_when_due_unless_empty(conn: Connection) -> None:
    late = create_space(conn, "late", "late/#", shards=1, retention_s=8 * 86400)
    put(conn, streams(conn, "late")[0], b"x", topic="late/1")
    conn.execute("update generation set opened_at = '294276-12-31' where space_id = %s", (late.space_id,))
    alter_space(conn, "default", retention_s=40)
    age = "update generation set opened_at = opened_at - interval '11 s' where state = 'open'"
    conn.execute(age)
    assert roll_over_due(conn) == [], "nothing is in it"
    put(conn, streams(conn, "default")[0], b"x")
    assert roll_over_due(conn) == ["default"]
    put(conn, streams(conn, "default")[0], b"x")
    assert roll_over_due(conn) == [], "it is young again"
    alter_space(conn, "default", rollover_s=3600)
    conn.execute(age)
    assert roll_over_due(conn) == [], "rollover_s is asked before retention_s"


def test_the_longest_times_harm_nothing(conn: Connection) -> None:
    create_space(conn, "eu", "eu/#", shards=1, retention_s=MAX_S, rollover_s=MAX_S)
    put(conn, streams(conn, "eu")[0], b"x", topic="eu/1")
    rollover(conn, "eu")
    assert roll_over_due(conn) == []
    assert mark_expired_gone(conn) == []


def test_a_failing_step_of_maintenance_stops_no_other(
    database: str, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    create_space(conn, "eu", "eu/#", shards=1)
    with Publisher(database) as publisher:
        publisher.publish("eu/1", b"x")
        publisher.publish("a", b"x")
    rollover(conn, "eu")
    alter_space(conn, "default", rollover_s=60)
    conn.execute("update space set retention_s = 1 where name = 'eu'")
    conn.execute("update generation set closed_at = closed_at - interval '1 h' where filter = 'eu/#'")
    conn.execute("alter table generation add check (state <> 'gone' or filter <> 'eu/#')")  # retention fails now
    conn.execute("update generation set opened_at = opened_at - interval '1 h' where state = 'open'")
    conn.execute("update producer set updated_at = updated_at - interval '8 d'")
    conn.execute(
        "insert into lending_history (at, group_id, stream_id, event, reason, grant_id, position, term)"
        " values (clock_timestamp() - interval '2 d', 1, 1, 'grant', 'allocated', 1, 0, 1)"
    )
    conn.execute("insert into sink_batch values ('write', 0, 1, true, clock_timestamp() - interval '2 d')")
    conn.execute("insert into token values ('t', sha256('t'), 'user:a', 'us', now(), now() - interval '2 d')")
    old = streams(conn, "default")
    term = leadership.claim(conn, MAINTENANCE, NodeIncarnation("n1", "n1-1", "localhost:1"), 60, None).term
    keeper = MaintenanceThreads(database, lambda: term, 86_400.0, every_s=0.05)
    keeper.start()
    try:
        eventually(lambda: states(conn, old) == {"closed"}, message="the rollover before it")
        steps_behind = "select from producer union all select from sink_batch union all select from lending_history"
        left = f"{steps_behind} union all select from token"
        eventually(lambda: conn.execute(left).rowcount == 0, message="what the steps behind it delete")
        eventually(lambda: "step_count=1: retention: new row" in caplog.text)
    finally:
        keeper.stop()


def test_compaction_holds_up_no_other_step(database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever publishes decides how long it takes: it is the last of each pass, and has its time, however long the
    search for it takes."""
    stuck, over, now, search = threading.Event(), threading.Event(), [0.0], small_block_compaction.list_newly_fragmented

    def search_for_long(*asked: Any) -> list[int]:
        now[0] += maintenance.COMPACTION_S
        return search(*asked)

    def wait(*_: object, **__: object) -> int:
        stuck.set()
        assert over.wait(WAIT_S)
        return 0

    for _ in range(100):
        put(conn, streams(conn, "default")[0], b"x")
    conn.execute("update block set appended_at = appended_at - interval '1 h'")
    conn.execute("insert into sink_batch values ('write', 0, 1, true, clock_timestamp() - interval '2 d')")
    monkeypatch.setattr(small_block_compaction, "compact_stream", wait)
    monkeypatch.setattr(small_block_compaction, "list_newly_fragmented", search_for_long)
    monkeypatch.setattr(maintenance, "time", SimpleNamespace(monotonic=lambda: now[0]))
    term = leadership.claim(conn, MAINTENANCE, NodeIncarnation("n1", "n1-1", "localhost:1"), 60, None).term
    keeper = MaintenanceThreads(database, lambda: term, 86_400.0, every_s=0.05)
    keeper.start()
    try:
        assert stuck.wait(WAIT_S)
        assert conn.execute("select from sink_batch").rowcount == 0
    finally:
        over.set()
        keeper.stop()


def test_maintenance_asks_its_guard_first(conn: Connection) -> None:
    def refuse_stale_term(_: Connection) -> None:
        raise Unavailable("the term is over")

    alter_space(conn, "default", rollover_s=1)
    conn.execute("update generation set opened_at = opened_at - interval '1 h'")
    put(conn, streams(conn, "default")[0], b"x")
    before = open_streams(conn)
    with pytest.raises(Unavailable):
        roll_over_due(conn, refuse_stale_term)
    assert open_streams(conn) == before


def test_a_change_and_a_reader_do_not_wait(database: str, conn: Connection) -> None:

    old = streams(conn, "default")[0]
    put(conn, old, b"x")
    with connect(database) as reader, reader.transaction():
        reader.execute("select count(*) from block")
        rollover(conn, "default")
        assert len(read(reader, old)) == 1
    put(conn, streams(conn, "default")[0], b"y")


def test_a_lock_that_is_not_to_be_had_is_an_error(
    database: str, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollovers, "LOCK_TIMEOUT_S", 0.05)
    monkeypatch.setattr(rollovers, "RETRY_TIMEOUT_S", 0.3)
    with connect(database) as other, other.transaction():
        other.execute("lock table space in share row exclusive mode")
        with pytest.raises(Unavailable, match="locked by others"):
            rollover(conn, "default")
