"""What can go wrong with payloads outside of Postgres, and must not go further; directories stand for all places."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pyarrow as pa
import pytest

from sublet_leader.jobs.maintenance import MaintenanceThreads
from sublet_protocol.domain.errors import Conflict, PayloadDamaged, PayloadUnavailable, StaleTerm
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.bootstrap.migrate import downgrade
from sublet_storage.db.connect import connect
from sublet_storage.doctor import location_checks
from sublet_storage.doctor.checks import Severity
from sublet_storage.groups.coordinator import leadership
from sublet_storage.groups.model.records import MAINTENANCE
from sublet_storage.log import epoch_leases
from sublet_storage.log.append import BlockAppend, ProducerIdentity, ProducerStamp, register_producer
from sublet_storage.log.fetch import fetch
from sublet_storage.node_directory import NodeIncarnation
from sublet_storage.objects import unreferenced_objects
from sublet_storage.objects.location import parse_location
from sublet_storage.objects.object_stores import (
    MARKER,
    WRITABLE,
    LocalBackend,
    ObjectStore,
    PayloadObjectNotFound,
    get_store,
)
from sublet_storage.objects.parallel_calls import run_parallel
from sublet_storage.readers.complete_epoch_tail import EpochTailMessages, EpochTailReader
from sublet_storage.readers.tail import Tail
from sublet_storage.spaces import payload_restore, small_block_compaction, tiering
from sublet_storage.spaces.retention import drop_gone
from sublet_storage.spaces.routing import Space
from sublet_storage.spaces.space_changes import alter_space, create_space, drop_space, rollover
from tests.integration.log_kit import Connection, generation_of, in_epochs, read, stream_of
from tests.interleavings.harness import Interleavings, Run
from tests.kit import WAIT_S, eventually
from tests.payload_kit import LocalWorld, a_closed_stream, a_space, fill, move, swept
from tests.payload_kit import outside as named

REPOSITORY = Path(__file__).parents[2]
BLOCKS = 6
NAME = "5/7-1-" + "0" * 32 + "-" + "0" * 16


@pytest.fixture
def space(conn: Connection, world: LocalWorld) -> Space:
    return a_space(conn, world)


@pytest.fixture
def stream(conn: Connection, space: Space) -> int:
    """Closed, and not moved yet."""
    return a_closed_stream(conn, BLOCKS)


def again(conn: Connection, space: Space) -> int:
    """Move as a later pass does; return the number of blocks moved."""
    try:
        return move(conn, space)
    except PayloadUnavailable:
        return 0


def orphan_all(conn: Connection, space: Space) -> None:
    """Payloads are moved out and brought back, so that no block names the objects any more."""
    move(conn, space)
    alter_space(conn, "eu", payload_location=None)
    payload_restore.restore_payloads(conn, space.space_id)


def rows(conn: Connection) -> int:
    return conn.execute("select from payload_object").rowcount


# --- a place that is not there, or another ----------------------------------------------------------------------------


def test_a_directory_that_is_not_there_is_not_made(conn: Connection, world: LocalWorld, space: Space) -> None:
    a_closed_stream(conn, BLOCKS)
    world.root.rmdir()
    with pytest.raises(PayloadUnavailable, match=rf"no directory {world.root}, and it must exist.*mkdir"):
        move(conn, space)
    (found,) = location_checks.check_locations(conn)
    assert (found.state, f"no directory {world.root}, and it must exist" in found.detail) == (Severity.ERROR, True)
    assert str(found.hint).startswith("See that the directory is there on this machine")
    assert not any(word in str(found.hint) for word in ("doctor", "credentials"))
    assert not world.root.exists()
    assert (named(conn), rows(conn)) == (set(), 0)
    world.root.mkdir()
    assert eventually(lambda: again(conn, space), WAIT_S) == BLOCKS


def test_a_place_back_meanwhile_misses_nothing(
    conn: Connection, world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is away when an object is looked for, and back when its marker is: twice, as who reads looks twice."""
    move(conn, space)
    before, reading, flaps = read(conn, stream), LocalBackend.read, 2

    def flapping(self: LocalBackend, name: str, limit: int) -> Any:
        nonlocal flaps
        if name == MARKER or not flaps:
            return reading(self, name, limit)
        flaps -= 1
        world.go_away()
        try:
            return reading(self, name, limit)
        finally:
            world.come_back()

    monkeypatch.setattr(LocalBackend, "read", flapping)
    name = min(world.names())
    store = get_store(parse_location(world.uri))
    with pytest.raises(PayloadObjectNotFound):  # both looks of this call
        store.get(name, 1 << 30)
    flaps = 1
    assert store.get(name, 1 << 30)
    assert read(conn, stream) == before


@pytest.mark.parametrize("starts_away", [True, False])
def test_a_place_away_meanwhile_deletes_nothing(
    conn: Connection, world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch, starts_away: bool
) -> None:
    """What was not there is not deleted."""
    orphan_all(conn, space)
    retained, deleting = world.names(), LocalBackend.delete

    def flapping(self: LocalBackend, name: str) -> None:
        is_away = world.root.with_name("elsewhere").exists()
        if not (is_away or starts_away):
            world.go_away()
        deleting(self, name)
        if is_away and starts_away:
            world.come_back()

    monkeypatch.setattr(LocalBackend, "delete", flapping)
    if starts_away:
        world.go_away()
    with pytest.raises(PayloadUnavailable):
        swept(conn)
    assert rows(conn) == BLOCKS
    world.come_back()
    assert world.names() == retained


def test_a_place_not_mounted_is_away_to_all_spaces(
    conn: Connection, world: LocalWorld, space: Space, stream: int
) -> None:
    """Nothing is written to the empty directory."""
    move(conn, space)
    before, retained = read(conn, stream), world.names()
    other = create_space(conn, "us", "us/#", shards=1, payload_location=world.uri)
    theirs = stream_of(conn, "us")
    fill(conn, theirs, BLOCKS, size=70_000)
    rollover(conn, "us")
    world.go_away()
    for each in (space, other):
        fill(conn, stream_of(conn, "eu"), 1, size=70_000)
        rollover(conn, "eu")
        with pytest.raises(PayloadUnavailable):
            move(conn, each)
    assert list(world.root.iterdir()) == []
    with pytest.raises(PayloadUnavailable):
        read(conn, stream)
    world.come_back()
    assert eventually(lambda: again(conn, other), WAIT_S) == BLOCKS
    assert read(conn, stream) == before
    assert retained <= world.names()


def test_orphans_at_a_foreign_place_stay_orphans(
    conn: Connection, world: LocalWorld, space: Space, stream: int
) -> None:
    """Another place, with an id of its own, lies where theirs should be mounted."""
    orphan_all(conn, space)
    world.go_away()
    (world.root / MARKER).write_text("sublet keeps payloads of messages here, id " + "0" * 32)
    with pytest.raises(PayloadUnavailable, match="is not the one that it was"):
        swept(conn)
    assert rows(conn) == BLOCKS
    world.come_back()

    def deleted() -> int:
        try:
            return swept(conn)
        except PayloadUnavailable:
            return 0

    assert eventually(deleted, WAIT_S) == BLOCKS
    assert world.names() == set()


def test_a_place_that_has_an_id_keeps_it(tmp_path: Path) -> None:
    place = ObjectStore(parse_location(f"file://{tmp_path}"))
    first = place.write_marker("a" * 32)
    assert (first, place.write_marker("b" * 32)) == ("a" * 32, "a" * 32)


def test_a_place_of_another_database_keeps_its_id(
    conn: Connection, world: LocalWorld, space: Space, stream: int
) -> None:
    ObjectStore(parse_location(world.uri)).write_marker("a" * 32)
    assert move(conn, space) == BLOCKS
    assert conn.execute("select marker from payload_location").fetchall() == [("a" * 32,)]


def test_blocks_name_nothing_that_was_not_written(
    conn: Connection, world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The place goes away while it is written to."""
    write = LocalBackend.write

    def late(self: LocalBackend, name: str, payload: bytes) -> None:
        if name not in (MARKER, WRITABLE) and not world.root.with_name("elsewhere").exists():
            world.go_away()
        write(self, name, payload)

    monkeypatch.setattr("sublet_storage.objects.parallel_calls.MAX_PARALLEL_CALLS", 1)
    monkeypatch.setattr(LocalBackend, "write", late)
    with pytest.raises(PayloadUnavailable):
        tiering.tier_space(conn, space)
    assert named(conn) == set()
    assert len(read(conn, stream)) == 2 * BLOCKS


# --- backups, and going back ------------------------------------------------------------------------------------------


def test_a_restored_database_finds_its_objects(
    server_url: str, database: str, conn: Connection, world: LocalWorld, space: Space, stream: int
) -> None:
    """Within the grace it finds also those that were brought back since."""
    move(conn, space)
    before = read(conn, stream)
    conn.close()
    parts = urlsplit(database)
    backup = f"{parts.path[1:]}_backup"
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f'create database "{backup}" template "{parts.path[1:]}"'.encode())
        try:
            with connect(database) as original:
                alter_space(original, "eu", payload_location=None)
                payload_restore.restore_payloads(original, space.space_id)
                assert unreferenced_objects.delete_expired_objects(original) == 0, "the grace is days"
                with connect(urlunsplit(parts._replace(path=f"/{backup}"))) as restored:
                    assert read(restored, stream) == before
                assert swept(original) == BLOCKS
        finally:
            server.execute(f'drop database "{backup}" with (force)'.encode())
    assert world.names() == set()


def test_tables_stay_while_payloads_are_moved(
    database: str, conn: Connection, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, claim = read(conn, stream), unreferenced_objects.claim_objects
    said: list[str] = []

    def down() -> None:
        try:
            downgrade(database)
        except Conflict as conflict:
            said.append(str(conflict))

    other = threading.Thread(target=down)

    def slow(*args: Any) -> set[str]:
        found = claim(*args)
        other.start()
        eventually(lambda: waiting(database), WAIT_S)
        return found

    monkeypatch.setattr(unreferenced_objects, "claim_objects", slow)
    tiering.tier_space(conn, space)
    other.join()
    assert said
    assert said[0].startswith(f"{BLOCKS} blocks")
    assert read(conn, stream) == before


def test_tables_stay_while_retention_drops_a_partition(
    database: str, conn: Connection, space: Space, stream: int
) -> None:
    """What it holds is seen by nobody then, and may name objects."""
    move(conn, space)
    generation_id = generation_of(conn, stream)
    conn.execute("update generation set state = 'gone' where generation_id = %s", (generation_id,))
    conn.execute(f"alter table block detach partition block_{generation_id}")
    assert named(conn) == set()
    with pytest.raises(Conflict, match="1 generations that retention is dropping may name more"):
        downgrade(database)
    drop_gone(conn)
    with pytest.raises(Conflict, match=f"{BLOCKS} objects there are to be deleted.* 0 generations"):
        downgrade(database)


def waiting(database: str) -> bool:
    with connect(database) as other:
        return other.execute("select from pg_locks where not granted").rowcount > 0


# --- others at work ---------------------------------------------------------------------------------------------------


def test_who_advances_is_not_killed_by_who_moves(database: str, conn: Connection, world: LocalWorld) -> None:
    """Whatever the order of their locks: neither meets a deadlock."""
    space = a_space(conn, world, tier_after_s=60)
    stream = stream_of(conn, "eu")
    fill(conn, stream, BLOCKS)
    conn.execute("update block set appended_at = appended_at - interval '1 hour'")
    who = ProducerIdentity("p", register_producer(conn, "p"))
    epoch_leases.hold(conn, space.space_id, who, [(1,)])
    appends = [BlockAppend(stream, in_epochs((1,)), ProducerStamp("p", who.incarnation, 1))]

    def advance(other: Connection) -> object:
        return epoch_leases.append_and_advance(other, appends, space.space_id, who, [(2,)], 60).error

    def tier(other: Connection) -> int:
        return tiering.tier_space(other, space).blocks

    def judge(run: Run) -> None:
        assert (run.errors, run.answers) == ([], {"advance": None, "tier": BLOCKS})

    with Interleavings(database) as orders:
        assert orders.explore({"advance": advance, "tier": tier}, judge, {"tier": "for update"}) > 1


def test_a_deposed_mover_leaves_no_forgotten_object(
    database: str, conn: Connection, world: LocalWorld, space: Space, stream: int, monkeypatch: Any
) -> None:
    over: list[bool] = []

    def guard(_: Connection) -> None:
        if over:
            raise StaleTerm("the term is over")

    def frozen(*args: Any) -> Any:
        """An hour goes by before it writes."""
        with connect(database) as other:
            assert unreferenced_objects.delete_expired_objects(other, abandoned_s=0) == BLOCKS
        over.append(True)
        return run_parallel(*args)

    monkeypatch.setattr(tiering, "run_parallel", frozen)
    with pytest.raises(StaleTerm):
        tiering.tier_space(conn, space, guard)
    assert (len(world.names()), named(conn)) == (BLOCKS, set())
    assert unreferenced_objects.delete_expired_objects(conn) == BLOCKS
    assert world.names() == set()


def test_a_mover_locks_its_term_before_the_spaces(conn: Connection, space: Space, stream: int) -> None:
    """As all maintenance does: else two nodes, one of them deposed, could wait for each other."""

    def guard(mover: Connection) -> None:
        locked = "select from pg_locks where pid = pg_backend_pid() and relation = 'space'::regclass and mode = %s"
        assert mover.execute(locked, ("RowExclusiveLock",)).rowcount == 0

    assert tiering.tier_space(conn, space, guard).blocks == BLOCKS


def test_nothing_is_written_where_a_space_was_to_move(
    database: str, conn: Connection, world: LocalWorld, space: Space, stream: int
) -> None:
    """Where it got no location, or another, before anything was there."""

    def guard(_: Connection) -> None:
        with connect(database) as other:
            alter_space(other, "eu", payload_location=None)

    assert tiering.tier_space(conn, space, guard).blocks == 0
    assert world.names() == set()


def test_nothing_is_moved_of_a_dropped_space(conn: Connection, space: Space, stream: int) -> None:
    drop_space(conn, "eu")
    assert tiering.tier_space(conn, space).blocks == 0


# --- one that fails ---------------------------------------------------------------------------------------------------


@pytest.mark.conforms("W4")
@pytest.mark.parametrize("retained", [b"", b"10000\r\n", None], ids=["nothing", "another form", "not at all"])
def test_a_careless_store_gets_nothing_named(
    conn: Connection, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch, retained: bytes | None
) -> None:
    """It keeps something else than it was given, or nothing."""
    write, before = LocalBackend.write, read(conn, stream)

    def careless(self: LocalBackend, name: str, payload: bytes) -> None:
        if name in (MARKER, WRITABLE):
            write(self, name, payload)
        elif retained is not None:
            write(self, name, retained + payload if retained else b"")

    monkeypatch.setattr(LocalBackend, "write", careless)
    with pytest.raises(PayloadUnavailable, match=r"came back different|No such file"):
        tiering.tier_space(conn, space)
    assert named(conn) == set()
    assert read(conn, stream) == before


def test_all_but_what_cannot_be_written_is_moved(
    database: str, conn: Connection, world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full for the first block, in each pass, and not for later ones."""
    write, compact, before, compacted = (
        LocalBackend.write,
        small_block_compaction.compact_stream,
        read(conn, stream),
        list[int](),
    )

    def full(self: LocalBackend, name: str, payload: bytes) -> None:
        if f"/{stream}-2-" in name:
            raise OSError(28, "No space left on device")
        write(self, name, payload)

    def noted(connection: Any, stream_id: int, **how: Any) -> int:
        compacted.append(stream_id)
        return compact(connection, stream_id, **how)

    monkeypatch.setattr(LocalBackend, "write", full)
    monkeypatch.setattr(small_block_compaction, "compact_stream", noted)
    monkeypatch.setattr(tiering, "BATCH_BLOCKS", 2)
    for _ in range(2):
        with pytest.raises(PayloadUnavailable, match="No space left"):
            tiering.tier_space(conn, space)
    assert len(named(conn)) == BLOCKS - 1
    assert compacted == [stream], "once"
    alter_space(conn, "eu", payload_location=None)
    assert [each.state for each in location_checks.check_locations(conn)] == [Severity.OK]
    with pytest.raises(Conflict, match=rf"{BLOCKS - 1} blocks have their payload outside"):
        downgrade(database)
    assert payload_restore.restore_payloads(conn, space.space_id) == BLOCKS - 1
    assert named(conn) == set()
    assert read(conn, stream) == before


def test_what_ails_one_stream_holds_up_no_other(
    conn: Connection, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = stream_of(conn, "eu")
    fill(conn, later, BLOCKS, size=70_000)
    rollover(conn, "eu")
    compact = small_block_compaction.compact_stream

    def ailing(connection: Any, stream_id: int, **how: Any) -> int:
        if stream_id == stream:
            raise ValueError("this one ails")
        return compact(connection, stream_id, **how)

    monkeypatch.setattr(small_block_compaction, "compact_stream", ailing)
    with pytest.raises(ValueError, match="this one ails"):
        tiering.tier_space(conn, space)
    assert len(named(conn)) == BLOCKS


def test_a_stuck_object_holds_up_no_other(
    conn: Connection, world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that cannot be deleted is tried after all others, and reported by the doctor."""
    orphan_all(conn, space)
    stuck = world.root / min(world.names())
    stuck.unlink()
    stuck.mkdir()
    monkeypatch.setattr(unreferenced_objects, "MAX_OBJECTS", 1)
    with pytest.raises(PayloadUnavailable, match=stuck.name):
        swept(conn)
    assert [swept(conn) for _ in range(1, BLOCKS)] == [1] * (BLOCKS - 1)
    assert (world.names(), rows(conn)) == (set(), 1)
    assert [each.detail for each in location_checks.check_locations(conn)][-1].startswith(
        "1 objects that no block names could not"
    )
    stuck.rmdir()
    assert swept(conn) == 1
    assert rows(conn) == 0


def test_a_sweep_reads_no_more_than_it_deletes(conn: Connection, space: Space, tmp_path: Path) -> None:
    """There is one every 5 s; with a grace of 7 days millions wait."""
    place = tmp_path / "x"
    place.mkdir()
    conn.execute(
        "insert into payload_object (uri, space_id, generation_id, stream_id, end_offset, orphaned_at)"
        " select %s || '/1/1-' || n || '-' || repeat('0', 32) || '-' || repeat('0', 16), %s, 1, 1, n,"
        "        now() - n * interval '30 s' from generate_series(1, 20000) n",
        (f"file://{place}", space.space_id),
    )
    conn.execute("analyze payload_object")

    def rows_read() -> int:
        conn.execute("select pg_stat_force_next_flush()")
        conn.execute("select pg_stat_clear_snapshot()")
        read = "seq_tup_read + idx_tup_fetch"
        ((count,),) = conn.execute(
            f"select {read} from pg_stat_user_tables where relname = 'payload_object'"
        ).fetchall()
        return int(count)

    before = rows_read()
    deleted = unreferenced_objects.delete_expired_objects(conn, grace_s=unreferenced_objects.GRACE_S - 7200)
    assert rows_read() - before < 1000 + 20 * deleted


def test_a_sweep_of_nothing_opens_no_transaction(conn: Connection, space: Space) -> None:
    def guard(_: Connection) -> None:
        raise AssertionError("a transaction")

    assert unreferenced_objects.delete_expired_objects(conn, guard) == 0


def test_a_place_gone_for_good_holds_up_no_other(
    conn: Connection, world: LocalWorld, space: Space, stream: int, tmp_path: Path
) -> None:
    move(conn, space)
    other = LocalWorld(tmp_path / "other")
    space = alter_space(conn, "eu", payload_location=other.uri)
    fill(conn, stream_of(conn, "eu"), BLOCKS, size=70_000)
    rollover(conn, "eu")
    move(conn, space)
    conn.execute("update generation set state = 'gone' where state = 'closed'")
    drop_gone(conn)
    shutil.rmtree(world.root)
    with pytest.raises(PayloadUnavailable):
        swept(conn)
    assert other.names() == set()
    assert rows(conn) == BLOCKS


def test_a_directory_for_an_object_is_damage(conn: Connection, world: LocalWorld, space: Space, stream: int) -> None:
    """The place is not taken for away."""
    move(conn, space)
    (name,) = [each for each in world.names() if f"/{stream}-6-" in each]
    world.remove(name)
    (world.root / name).mkdir()
    assert fetch(conn, stream, 0).position == 4
    with pytest.raises(PayloadDamaged, match=r"ends before offset 6 .*cannot be read"):
        fetch(conn, stream, 4)


# --- a place that hangs -----------------------------------------------------------------------------------------------


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[LocalWorld], None]]:
    """Have nothing read or written at a place come to an end, until the test does."""
    over = threading.Event()
    read, write = LocalBackend.read, LocalBackend.write

    def hang(world: LocalWorld) -> None:
        def hanging(act: Callable[..., Any]) -> Callable[..., Any]:
            def late(self: LocalBackend, *what: Any) -> Any:
                if self._root == str(world.root):
                    over.wait(60)
                return act(self, *what)

            return late

        monkeypatch.setattr(LocalBackend, "read", hanging(read))
        monkeypatch.setattr(LocalBackend, "write", hanging(write))

    yield hang
    over.set()


def test_while_a_place_hangs_maintenance_goes_on(
    database: str, conn: Connection, world: LocalWorld, space: Space, stream: int, hang: Callable[[LocalWorld], None]
) -> None:
    tried = threading.Event()
    hang(world)
    conn.execute("insert into sink_batch values ('write', 0, 1, true, clock_timestamp() - interval '2 d')")
    fill(conn, stream_of(conn, "default"), 1)
    alter_space(conn, "default", rollover_s=60)
    conn.execute("update generation set opened_at = opened_at - interval '1 h' where state = 'open'")
    term = leadership.claim(conn, MAINTENANCE, NodeIncarnation("n1", "n1-1", "localhost:1"), 60, None).term

    def term_of() -> int:
        tried.set()
        return term

    keeper = MaintenanceThreads(database, term_of, 86_400.0, every_s=0.05)
    keeper.start()
    try:
        eventually(tried.is_set, WAIT_S)
        eventually(lambda: conn.execute("select from sink_batch").fetchone() is None, WAIT_S)
        conn.execute("insert into sink_batch values ('write', 0, 1, true, clock_timestamp() - interval '2 d')")
        eventually(lambda: conn.execute("select from sink_batch").fetchone() is None, WAIT_S)
    finally:
        keeper.stop()


def test_while_a_place_hangs_others_are_served(
    database: str,
    conn: Connection,
    world: LocalWorld,
    space: Space,
    stream: int,
    tmp_path: Path,
    hang: Callable[[LocalWorld], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An NFS mount that is `hard`, as it is unless somebody says otherwise: to others payloads are moved, and deleted
    there."""
    other = LocalWorld(tmp_path / "other")
    orphan_all(conn, space)
    alter_space(conn, "eu", payload_location=world.uri)
    us = create_space(conn, "us", "us/#", shards=1, payload_location=other.uri)
    fill(conn, stream_of(conn, "us"), BLOCKS, size=70_000)
    rollover(conn, "us")
    hang(world)
    monkeypatch.setattr("sublet_storage.objects.parallel_calls.RECEIVE_TIMEOUT_S", 0.3)
    term = leadership.claim(conn, MAINTENANCE, NodeIncarnation("n1", "n1-1", "localhost:1"), 60, None).term
    keeper = MaintenanceThreads(database, lambda: term, 86_400.0, every_s=0.05, grace_s=0.0)
    keeper.start()
    try:
        eventually(lambda: len(named(conn)) == BLOCKS, WAIT_S)
        alter_space(conn, "us", payload_location=None)
        assert payload_restore.restore_payloads(conn, us.space_id) == BLOCKS
        eventually(lambda: other.names() == set(), WAIT_S)
    finally:
        keeper.stop()


def test_a_process_ends_though_a_place_hangs(tmp_path: Path) -> None:
    hanging = """
import sys, time
from sublet_storage.objects import parallel_calls
from sublet_storage.objects.location import parse_location
from sublet_storage.objects.object_stores import LocalBackend, get_store
parallel_calls.RECEIVE_TIMEOUT_S = 0.1
LocalBackend.read = lambda *_: time.sleep(600)
there = get_store(parse_location(sys.argv[1]))
parallel_calls.run_single(there, parallel_calls.TO_READ, there.check_marker)
"""
    ended = subprocess.run(
        [sys.executable, "-c", hanging, f"file://{tmp_path}"], cwd=REPOSITORY, capture_output=True, timeout=60
    )
    assert b"has not answered for 0.1 s" in ended.stderr, ended.stderr


def test_tails_show_the_rest_while_a_place_is_away(
    conn: Connection, world: LocalWorld, space: Space, stream: int
) -> None:
    move(conn, space)
    create_space(conn, "us", "us/#", shards=1)
    well = stream_of(conn, "us")
    fill(conn, well, 1)
    world.go_away()
    tail, reading = Tail(conn, TopicFilter("#"), "earliest"), EpochTailReader(conn, TopicFilter("#"), "earliest")
    for _ in range(2):
        assert streams_shown(tail.pages()) == [well, well]
        assert streams_shown(
            each.table for each in reading.read_available(conn) if isinstance(each, EpochTailMessages)
        ) == [well, well]
        fill(conn, well, 1)


def streams_shown(tables: Iterable[pa.Table]) -> list[int]:
    """Those of the messages that come before it is said that others cannot be had."""
    shown = list[int]()
    with pytest.raises(PayloadUnavailable):
        shown.extend(stream for table in tables for stream in table.column("stream").to_pylist())
    return shown


def test_a_place_that_hangs_counts_as_away(
    database: str,
    conn: Connection,
    world: LocalWorld,
    space: Space,
    stream: int,
    tmp_path: Path,
    hang: Callable[[LocalWorld], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other places are read meanwhile."""
    other = LocalWorld(tmp_path / "other")
    theirs = create_space(conn, "us", "us/#", shards=1, payload_location=other.uri)
    well = stream_of(conn, "us")
    fill(conn, well, BLOCKS, size=70_000)
    rollover(conn, "us")
    assert (move(conn, space), move(conn, theirs)) == (BLOCKS, BLOCKS)
    hang(world)
    monkeypatch.setattr("sublet_storage.objects.parallel_calls.RECEIVE_TIMEOUT_S", 0.5)
    with pytest.raises(PayloadUnavailable, match=r"has not answered for 0\.5 s"):
        fetch(conn, stream, 0)
    monkeypatch.setattr("sublet_storage.objects.parallel_calls.RECEIVE_TIMEOUT_S", 20.0)
    assert fetch(conn, well, 0).position > 0


def test_a_sweep_has_an_end(
    conn: Connection, world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphan_all(conn, space)
    monkeypatch.setattr(unreferenced_objects, "CHUNK", 1)
    assert unreferenced_objects.delete_expired_objects(conn, grace_s=0.0, most_s=0.0) == 0
    assert swept(conn) == BLOCKS


# --- what is not due --------------------------------------------------------------------------------------------------


def test_the_marker_is_written_once(
    conn: Connection, world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, wrote = LocalBackend.write, list[str]()

    def noted(self: LocalBackend, name: str, payload: bytes) -> None:
        wrote.append(name)
        write(self, name, payload)

    monkeypatch.setattr(LocalBackend, "write", noted)
    move(conn, space)
    fill(conn, stream_of(conn, "eu"), 1, size=70_000)
    rollover(conn, "eu")
    move(conn, space)
    assert wrote.count(MARKER) == 1


# --- links ------------------------------------------------------------------------------------------------------------


def test_nothing_is_written_or_deleted_through_a_link(tmp_path: Path) -> None:
    root, victim, elsewhere = tmp_path / "place", tmp_path / "victim", tmp_path / "elsewhere"
    root.mkdir()
    elsewhere.mkdir()
    victim.write_text("precious")
    for name in (f"{MARKER}.part", MARKER, f"{WRITABLE}.part"):
        (root / name).symlink_to(victim)
    there = LocalBackend(parse_location(f"file://{root}"))
    there.write(MARKER, b"a marker")
    there.write(WRITABLE, b"")
    assert victim.read_text() == "precious"
    (root / "1").mkdir()
    (root / "1" / "link").symlink_to(victim)
    with pytest.raises(OSError, match="symbolic link"):
        there.read("1/link", 10)
    (root / "5").symlink_to(elsewhere)
    retained = elsewhere / NAME.partition("/")[2]
    retained.write_text("precious")
    for act in (lambda: there.write(NAME, b"x"), lambda: there.delete(NAME), lambda: there.read(NAME, 1)):
        with pytest.raises(OSError, match="leads out of"):
            act()
    assert retained.read_text() == "precious"
    assert len(list(elsewhere.iterdir())) == 1


# --- the doctor -------------------------------------------------------------------------------------------------------


def test_the_doctor_looks_at_old_places_in_use(conn: Connection, world: LocalWorld, space: Space, stream: int) -> None:
    move(conn, space)
    alter_space(conn, "eu", payload_location=None)
    assert [each.state for each in location_checks.check_locations(conn)] == [Severity.OK]
    world.go_away()
    assert [each.state for each in location_checks.check_locations(conn)] == [Severity.ERROR]
    world.come_back()
    eventually(lambda: [each.state for each in location_checks.check_locations(conn)] == [Severity.OK], WAIT_S)
    payload_restore.restore_payloads(conn, space.space_id)
    shutil.rmtree(world.root)
    (waits,) = location_checks.check_locations(conn)
    assert (waits.state, f"{BLOCKS} objects wait" in waits.detail) == (Severity.WARNING, True)
    conn.execute("delete from payload_object")
    assert list(location_checks.check_locations(conn)) == []


def test_where_one_may_only_read_the_doctor_warns(
    conn: Connection, world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(conn, space)

    def refused(self: LocalBackend, name: str, payload: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalBackend, "write", refused)
    (found,) = location_checks.check_locations(conn)
    assert (found.state, "can be read, and not written" in found.detail) == (Severity.WARNING, True)
