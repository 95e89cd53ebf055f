"""Retention: what is too old goes, generation by generation, and nothing else does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from sublet_protocol.domain.errors import MalformedRow, PositionGone, StaleTerm, SubletError
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.log.fetch import fetch
from sublet_storage.producer import Publisher
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.spaces.retention import IdleProducerCleaner, apply_retention, drop_gone, mark_expired_gone
from sublet_storage.spaces.space_changes import alter_space, drop_space, rollover
from tests.integration.log_kit import (
    Connection,
    generation_of,
    put,
    read,
    stream_of,
    waiting_for_locks,
    with_a_short_lived_space,
)
from tests.kit import Background, eventually


@pytest.fixture
def conn(database: str) -> Iterator[Connection]:
    with with_a_short_lived_space(database) as connection:
        yield connection


@pytest.fixture
def old(conn: Connection) -> int:
    """A closed stream of `eu` with one message, past its retention."""
    stream_id = stream_of(conn, "eu")
    put(conn, stream_id, b"old", topic="eu/1")
    rollover(conn, "eu")
    age(conn)
    return stream_id


def age(conn: Connection) -> None:
    conn.execute("update generation set closed_at = closed_at - interval '101 s' where state = 'closed'")


def is_gone(conn: Connection, stream_id: int) -> bool:
    try:
        fetch(conn, stream_id, 0)
    except PositionGone:
        return True
    return False


def partitions(conn: Connection) -> set[str]:
    return {row[0] for row in conn.execute("select relname from pg_class where relname ~ '^block_[0-9]+$'")}


def group(conn: Connection, kind: str, filter: str, options: str = "{}") -> int:
    ((group_id,),) = conn.execute(
        "insert into consumer_group (kind, name, filter, options, after_generation)"
        " select %s, 'g', %s, %s, max(generation_id) from generation returning group_id",
        (kind, filter, options),
    ).fetchall()
    return int(group_id)


def lend(conn: Connection, group_id: int, stream_id: int, status: str, position: int) -> None:
    conn.execute(
        "insert into lending (group_id, stream_id, status, position) values (%s, %s, %s, %s)"
        " on conflict (group_id, stream_id) do update set status = excluded.status, position = excluded.position",
        (group_id, stream_id, status, position),
    )


@pytest.mark.conforms("W4")
def test_retention_takes_what_is_old_in_its_space(conn: Connection, old: int) -> None:
    """What is open or young stays, and what is old in a space without retention."""
    new, other = stream_of(conn, "eu"), stream_of(conn, "default")
    put(conn, new, b"new", topic="eu/1")
    put(conn, other, b"kept for ever")
    rollover(conn, "default")
    age(conn)
    before = partitions(conn)
    assert len(apply_retention(conn)) == len(before - partitions(conn)) > 0
    assert is_gone(conn, old)
    rollover(conn, "eu")
    assert apply_retention(conn) == []
    assert [message["value"] for message in read(conn, new)] == [b"new"]
    assert [message["value"] for message in read(conn, other)] == [b"kept for ever"]
    age(conn)
    assert len(apply_retention(conn)) == 1
    assert is_gone(conn, new)
    conn.execute("update generation set state = 'gone' where state = 'open'")
    assert apply_retention(conn) == [], "what is published to has to stay"
    pending = generation_of(conn, stream_of(conn, "eu"))
    conn.execute(f"update pg_inherits set inhdetachpending = true where inhrelid = 'block_{pending}'::regclass")
    with pytest.raises(MalformedRow, match="space 'eu'"):
        PublisherRoutingTable.load(conn).find_stream("eu/1", None)
    assert apply_retention(conn) == [pending], "no other could be detached"


@pytest.mark.conforms("W4")
def test_a_dropped_space_keeps_its_retention(conn: Connection, old: int) -> None:
    drop_space(conn, "eu")
    apply_retention(conn)
    assert is_gone(conn, old)


@pytest.mark.conforms("W4")
@pytest.mark.parametrize(
    ("kind", "options", "end"),
    [
        ("queue", "{}", "finished"),
        ("queue", "{}", "free"),  # the next sync finishes it
        ("share", json.dumps(GroupOptions(holds_retention=True).to_row()), "finished"),
    ],
)
def test_an_unfinished_queue_holds_its_messages_back(
    conn: Connection, old: int, kind: str, options: str, end: str
) -> None:
    """Until it has consumed them; so does a group that was declared so."""
    holder = group(conn, kind, "eu/+", options)
    for status, position, is_over in (
        ("free", 0, False),
        ("held", 0, False),
        ("free", 2, False),  # beyond the head, and not blocked yet
        ("blocked", 1, False),
        (end, 1, True),
    ):
        lend(conn, holder, old, status, position)
        apply_retention(conn)
        assert is_gone(conn, old) == is_over


@pytest.mark.conforms("W4", "E2")
def test_a_queue_holds_back_what_it_has_not_had_alone(conn: Connection, old: int) -> None:
    """Not what it has consumed, whatever it or others have not of other streams, nor what was there before it."""
    reader, later = group(conn, "queue", "eu/#"), stream_of(conn, "eu")
    put(conn, later, b"x", topic="eu/1")
    rollover(conn, "eu")
    age(conn)
    lend(conn, reader, old, "finished", 1)
    lend(conn, reader, later, "free", 0)
    conn.execute(
        "insert into consumer_group (kind, name, filter, after_generation) values ('queue', 'h', 'eu/#', %s)",
        (generation_of(conn, old),),
    )
    lend(conn, group(conn, "share", "eu/#"), old, "free", 0)
    apply_retention(conn)
    assert (is_gone(conn, old), is_gone(conn, later)) == (True, False)


@pytest.mark.conforms("W4", "E2")
def test_a_queue_holds_what_it_has_not_noticed_yet(conn: Connection) -> None:
    holder = group(conn, "queue", "+/1")
    rollover(conn, "eu")
    later = stream_of(conn, "eu")
    put(conn, later, b"x", topic="eu/1")
    rollover(conn, "eu")
    empty = stream_of(conn, "eu")
    rollover(conn, "eu")
    age(conn)
    assert generation_of(conn, empty) in apply_retention(conn), "of nothing there is nothing to hold"
    assert not is_gone(conn, later)
    conn.execute("update consumer_group set deleted_at = clock_timestamp() where group_id = %s", (holder,))
    apply_retention(conn)
    assert is_gone(conn, later)


@pytest.mark.conforms("W4")
@pytest.mark.parametrize(("kind", "filter"), [("share", "eu/#"), ("queue", "us/#")])
def test_other_groups_hold_nothing_back(conn: Connection, old: int, kind: str, filter: str) -> None:
    lend(conn, group(conn, kind, filter), old, "free", 0)
    apply_retention(conn)
    assert is_gone(conn, old)


def test_a_deposed_maintainer_declares_nothing(conn: Connection, old: int) -> None:
    def refuse_stale_term(_: Connection) -> None:
        raise StaleTerm("the term is over")

    with pytest.raises(StaleTerm):
        apply_retention(conn, refuse_stale_term)
    assert not is_gone(conn, old)


@pytest.mark.conforms("W4")
@pytest.mark.long
def test_a_detach_left_pending_is_finished_first(
    database: str, conn: Connection, old: int, caplog: pytest.LogCaptureFixture
) -> None:
    """A reader outlives the lock timeout of a detach, and then an older generation becomes due as well."""
    drop_gone(conn)  # nothing is postponed before
    older = stream_of(conn, "default")
    put(conn, older, b"x")
    rollover(conn, "default")
    with psycopg.connect(database, options="-c search_path=sublet") as reader:
        reader.execute("lock table only block in access share mode")
        apply_retention(conn)
        assert is_gone(conn, old), "that is committed before anything is dropped"
        pending = "select inhrelid::regclass::text from pg_inherits where inhdetachpending"
        assert conn.execute(pending).fetchall() == [(f"block_{generation_of(conn, old)}",)], "begun and cut short"
        assert f"pid {reader.info.backend_pid} (user {reader.info.user!r}, block)" in caplog.text
        put(conn, stream_of(conn, "eu"), b"y", topic="eu/1")
        alter_space(conn, "default", retention_s=100)
        conn.execute("update generation set closed_at = closed_at - interval '1 h' where state = 'closed'")
        apply_retention(conn)
        assert is_gone(conn, older)
    apply_retention(conn)
    gone = {f"block_{row[0]}" for row in conn.execute("select generation_id from generation where state = 'gone'")}
    assert len(gone) > 2
    assert not gone & partitions(conn), "one pass is enough"


@pytest.mark.conforms("W4")
@pytest.mark.usefixtures("old")
def test_a_reader_of_one_partition_keeps_that_alone(
    database: str, shared_database: str, conn: Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """The log names who it is, once, and nobody who waits for a lock, or has one on its like in another database."""
    alter_space(conn, "default", retention_s=1)
    rollover(conn, "default")
    age(conn)
    drop_gone(conn)  # nothing is postponed before
    ((read,),) = conn.execute("select min(generation_id) from generation").fetchall()
    options = "-c search_path=sublet"
    with (
        ThreadPoolExecutor(1) as pool,
        psycopg.connect(database, options=options) as waiting,
        psycopg.connect(shared_database, options=options) as other,
        psycopg.connect(database, options=options) as reader,
    ):
        for each in (reader, other):
            each.execute(f"select from block_{read}")
        lock = pool.submit(waiting.execute, f"lock table block_{read}")
        eventually(lambda: waiting_for_locks(database))
        declared = apply_retention(conn)
        assert drop_gone(conn) == []
        assert {f"block_{each}" for each in declared} & partitions(conn) == {f"block_{read}"}
        assert len(declared) > 1
        (line,) = [record.getMessage() for record in caplog.records if "postponed" in record.getMessage()]
        holder = f"pid {reader.info.backend_pid} (user {reader.info.user!r}, block_{read})"
        assert line == f"drop of gone partitions postponed: partitions=block_{read} locked_by={holder}"
        waiting.cancel_safe()
        assert isinstance(lock.exception(), psycopg.errors.QueryCanceled)
    assert drop_gone(conn) == [read]


@pytest.mark.conforms("W4")
def test_what_ails_one_partition_holds_up_no_other(conn: Connection, old: int) -> None:
    """It is reported."""
    alter_space(conn, "default", retention_s=1)
    rollover(conn, "default")
    conn.execute("update generation set closed_at = closed_at - interval '1 h' where state = 'closed'")
    declared = mark_expired_gone(conn)
    assert len(declared) > 1
    viewed = generation_of(conn, old)
    conn.execute(f"create view kept as select * from block_{viewed}")
    with pytest.raises(SubletError, match=rf"1 gone partitions could not be dropped, .*block_{viewed}: cannot drop"):
        drop_gone(conn)
    assert {f"block_{each}" for each in declared} & partitions(conn) == {f"block_{viewed}"}
    conn.execute("drop view kept")
    assert drop_gone(conn) == [viewed]


def test_a_lost_connection_ends_a_pass_at_once(conn: Connection, old: int) -> None:
    """With its own error, and not as if each partition had one."""
    conn.execute(
        "create function die() returns event_trigger language plpgsql as"
        " $$ begin perform pg_terminate_backend(pg_backend_pid()); end $$;"
        " create event trigger die on ddl_command_start execute function die()"
    )
    mark_expired_gone(conn)
    with pytest.raises(psycopg.OperationalError):
        drop_gone(conn)
    assert conn.closed


def test_retention_disturbs_no_publisher(database: str, conn: Connection) -> None:
    gone = 0
    with Publisher(database) as publisher:

        def publish() -> None:
            publisher.publish("eu/1", b"x").result(30)

        with Background(publish) as sending:
            for _ in range(6):
                rollover(conn, "eu")
                age(conn)
                gone += len(apply_retention(conn))
    assert gone >= 6
    assert conn.execute("select sum(head) from stream").fetchone() == (sending.done,)


def test_idle_producers_are_forgotten(database: str, conn: Connection) -> None:
    """A registration only once nothing else of the name is left; the next one fences all the same."""
    with Publisher(database, producer="meter") as publisher:
        publisher.publish("eu/1", b"x").result(30)
    assert IdleProducerCleaner(idle_s=60)(conn) == 0
    conn.execute("update producer set updated_at = updated_at - interval '1 h'")
    with Publisher(database, producer="living") as publisher:
        publisher.publish("eu/1", b"x").result(30)
    living = "select count(*) from producer where producer_id = 'living'"
    assert IdleProducerCleaner(idle_s=60)(conn) == 1
    assert conn.execute("select stream_id from producer where producer_id = 'meter'").fetchall() == [(0,)]
    before = conn.execute("select incarnation from producer where producer_id = 'meter'").fetchall()
    assert IdleProducerCleaner(idle_s=60)(conn) == 1
    assert conn.execute(living).fetchone() == (2,)
    with Publisher(database, producer="meter") as publisher:
        publisher.publish("eu/1", b"x").result(30)
        registered = "select incarnation from producer where producer_id = 'meter' and stream_id = 0"
        assert conn.execute(registered).fetchall() > before


@pytest.mark.conforms("E39")
def test_idle_producers_are_found_some_at_a_time(conn: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them are found, whoever comes meanwhile."""

    def add(*names: str, idle: bool) -> None:
        for name in names:
            conn.execute(
                "insert into producer (producer_id, stream_id, incarnation, sequence, end_offset, updated_at)"
                " select %s, n, 1, 1, 1, now() - make_interval(hours => %s) from generate_series(1, 3) as n",
                (name, int(idle)),
            )

    add("a", "b", "d", idle=True)
    add("c", idle=False)
    monkeypatch.setattr("sublet_storage.spaces.retention.MAX_PRODUCER_STEPS", 1)
    passes = IdleProducerCleaner(idle_s=60, step=4)
    found = [passes(conn)]
    add("0", idle=True)  # behind where it is
    found += [passes(conn) for _ in range(6)]
    assert max(found) <= 4
    assert sum(found) == 12
    assert conn.execute("select distinct producer_id from producer").fetchall() == [("c",)]


@pytest.mark.conforms("E39")
def test_many_idle_producers_take_few_passes(conn: Connection) -> None:
    conn.execute(
        "insert into producer (producer_id, stream_id, incarnation, sequence, end_offset, updated_at)"
        " select 'p' || n, 0, 1, 1, 1, now() - interval '1 h' from generate_series(1, 50) as n"
    )
    assert IdleProducerCleaner(idle_s=60, step=10)(conn) == 50


GROUP = "$share/g/#"
