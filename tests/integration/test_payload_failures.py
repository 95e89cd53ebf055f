"""What can go wrong with payloads outside of Postgres, and must not go further; directories stand for all places."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

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
from sublet_storage.spaces.space_changes import alter_space, create_space, drop_space, rollover
from tests.integration.log_kit import Connection, Message, generation_of, in_epochs, read, stream_of, waiting_for_locks
from tests.interleavings.harness import Interleavings, Run
from tests.kit import WAIT_S, database_of, eventually
from tests.payload_kit import LocalWorld, a_closed_stream, a_space, fill, move, outside, swept, when_back

REPOSITORY = Path(__file__).parents[2]
BLOCKS = 6
NAME = "5/7-1-" + "0" * 32 + "-" + "0" * 16


class Eu:
    """The space `eu`, its place, and a closed stream of it, not moved yet."""

    def __init__(self, conn: Connection, world: LocalWorld) -> None:
        self.conn, self.world = conn, world
        self.space = a_space(conn, world)
        self.stream = a_closed_stream(conn, BLOCKS)

    def move(self) -> int:
        return move(self.conn, self.space)

    def tier(self, guard: Callable[[Connection], None] | None = None) -> int:
        """Move in one pass."""
        return tiering.tier_space(self.conn, self.space, guard).blocks

    def come_home(self) -> int:
        """Bring payloads back, of a space that has no place any more."""
        alter_space(self.conn, "eu", payload_location=None)
        return payload_restore.restore_payloads(self.conn, self.space.space_id)

    def orphan_all(self) -> None:
        """Payloads are moved out and brought back, so that no block names the objects any more."""
        self.move()
        self.come_home()

    def end_another(self, blocks: int = 1, space: str = "eu") -> int:
        """Close one more stream, with so many blocks; return it."""
        stream = stream_of(self.conn, space)
        fill(self.conn, stream, blocks, size=70_000)
        rollover(self.conn, space)
        return stream

    def read(self) -> list[Message]:
        return read(self.conn, self.stream)

    def named(self) -> set[str]:
        return outside(self.conn)

    def objects(self) -> int:
        """Return how many objects are to be deleted, or are being written."""
        return self.conn.execute("select from payload_object").rowcount

    def states(self) -> list[Severity]:
        """Return what the doctor says of the places."""
        return [each.state for each in location_checks.check_locations(self.conn)]


@pytest.fixture
def eu(conn: Connection, world: LocalWorld) -> Eu:
    return Eu(conn, world)


# --- a place that is not there, or another ----------------------------------------------------------------------------


def test_a_directory_that_is_not_there_is_not_made(eu: Eu) -> None:
    root = eu.world.root
    root.rmdir()
    with pytest.raises(PayloadUnavailable, match=rf"no directory {root}, and it must exist.*mkdir"):
        eu.move()
    (found,) = location_checks.check_locations(eu.conn)
    assert (found.state, f"no directory {root}, and it must exist" in found.detail) == (Severity.ERROR, True)
    assert str(found.hint).startswith("See that the directory is there on this machine")
    assert not any(word in str(found.hint) for word in ("doctor", "credentials"))
    assert not root.exists()
    assert (eu.named(), eu.objects()) == (set(), 0)
    root.mkdir()
    assert when_back(eu.move) == BLOCKS


def test_a_place_back_meanwhile_misses_nothing(eu: Eu, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is away when an object is looked for, and back when its marker is: twice, as who reads looks twice."""
    eu.move()
    before, reading, flaps = eu.read(), LocalBackend.read, 2

    def flapping(self: LocalBackend, name: str, limit: int) -> Any:
        nonlocal flaps
        if name == MARKER or not flaps:
            return reading(self, name, limit)
        flaps -= 1
        eu.world.go_away()
        try:
            return reading(self, name, limit)
        finally:
            eu.world.come_back()

    monkeypatch.setattr(LocalBackend, "read", flapping)
    name = min(eu.world.names())
    store = get_store(parse_location(eu.world.uri))
    with pytest.raises(PayloadObjectNotFound):  # both looks of this call
        store.get(name, 1 << 30)
    flaps = 1
    assert store.get(name, 1 << 30)
    assert eu.read() == before


@pytest.mark.parametrize("starts_away", [True, False])
def test_a_place_away_meanwhile_deletes_nothing(eu: Eu, monkeypatch: pytest.MonkeyPatch, starts_away: bool) -> None:

    eu.orphan_all()
    world, retained, deleting = eu.world, eu.world.names(), LocalBackend.delete

    def flapping(self: LocalBackend, name: str) -> None:
        is_away = world.is_away
        if not (is_away or starts_away):
            world.go_away()
        deleting(self, name)
        if is_away and starts_away:
            world.come_back()

    monkeypatch.setattr(LocalBackend, "delete", flapping)
    if starts_away:
        world.go_away()
    with pytest.raises(PayloadUnavailable):
        swept(eu.conn)
    assert eu.objects() == BLOCKS
    world.come_back()
    assert world.names() == retained


def test_a_place_not_mounted_is_away_to_all_spaces(eu: Eu) -> None:
    """Nothing is written to the empty directory."""
    eu.move()
    before, retained = eu.read(), eu.world.names()
    other = create_space(eu.conn, "us", "us/#", shards=1, payload_location=eu.world.uri)
    eu.end_another(BLOCKS, "us")
    eu.end_another()
    eu.world.go_away()
    for each in (eu.space, other):
        with pytest.raises(PayloadUnavailable):
            move(eu.conn, each)
    assert list(eu.world.root.iterdir()) == []
    with pytest.raises(PayloadUnavailable):
        eu.read()
    eu.world.come_back()
    assert when_back(lambda: move(eu.conn, other)) == BLOCKS
    assert eu.read() == before
    assert retained <= eu.world.names()


def test_orphans_at_a_foreign_place_stay_orphans(eu: Eu) -> None:
    """Another place, with an id of its own, lies where theirs should be mounted."""
    eu.orphan_all()
    eu.world.go_away()
    (eu.world.root / MARKER).write_text("sublet keeps payloads of messages here, id " + "0" * 32)
    with pytest.raises(PayloadUnavailable, match="is not the one that it was"):
        swept(eu.conn)
    assert eu.objects() == BLOCKS
    eu.world.come_back()
    assert when_back(lambda: swept(eu.conn)) == BLOCKS
    assert eu.world.names() == set()


def test_a_place_of_another_database_keeps_its_id(eu: Eu) -> None:
    ObjectStore(parse_location(eu.world.uri)).write_marker("a" * 32)
    assert eu.move() == BLOCKS
    assert eu.conn.execute("select marker from payload_location").fetchall() == [("a" * 32,)]


# --- backups, and going back ------------------------------------------------------------------------------------------


def test_a_restored_database_finds_its_objects(server_url: str, database: str, eu: Eu) -> None:
    """Within the grace it finds also those that were brought back since."""
    eu.move()
    before, name = eu.read(), eu.conn.info.dbname
    eu.conn.close()
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f'create database "{name}_backup" template "{name}"'.encode())
        try:
            with connect(database) as eu.conn:
                eu.come_home()
                assert unreferenced_objects.delete_expired_objects(eu.conn) == 0, "the grace is days"
                with connect(database_of(database, f"{name}_backup")) as restored:
                    assert read(restored, eu.stream) == before
                assert swept(eu.conn) == BLOCKS
        finally:
            server.execute(f'drop database "{name}_backup" with (force)'.encode())
    assert eu.world.names() == set()


def test_tables_stay_while_payloads_are_moved(database: str, eu: Eu, monkeypatch: pytest.MonkeyPatch) -> None:
    before, claim = eu.read(), unreferenced_objects.claim_objects
    with ThreadPoolExecutor(1) as pool:
        going_down: list[Future[None]] = []

        def slow(*args: Any) -> set[str]:
            found = claim(*args)
            going_down.append(pool.submit(downgrade, database))
            eventually(lambda: waiting_for_locks(database), WAIT_S)
            return found

        monkeypatch.setattr(unreferenced_objects, "claim_objects", slow)
        eu.tier()
        with pytest.raises(Conflict, match=f"^{BLOCKS} blocks"):
            going_down[0].result(WAIT_S)
    assert eu.read() == before


def test_tables_stay_while_retention_drops_a_partition(database: str, eu: Eu) -> None:
    """What it holds is seen by nobody then, and may name objects."""
    eu.move()
    generation_id = generation_of(eu.conn, eu.stream)
    eu.conn.execute("update generation set state = 'gone' where generation_id = %s", (generation_id,))
    eu.conn.execute(f"alter table block detach partition block_{generation_id}")
    assert eu.named() == set()
    with pytest.raises(Conflict, match="1 generations that retention is dropping may name more"):
        downgrade(database)
    drop_gone(eu.conn)
    with pytest.raises(Conflict, match=f"{BLOCKS} objects there are to be deleted.* 0 generations"):
        downgrade(database)


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


def test_a_deposed_mover_leaves_no_forgotten_object(database: str, eu: Eu, monkeypatch: pytest.MonkeyPatch) -> None:
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
        eu.tier(guard)
    assert (len(eu.world.names()), eu.named()) == (BLOCKS, set())
    assert unreferenced_objects.delete_expired_objects(eu.conn) == BLOCKS
    assert eu.world.names() == set()


def test_a_mover_locks_its_term_before_the_spaces(eu: Eu) -> None:
    """As all maintenance does: else two nodes, one of them deposed, could wait for each other."""

    def guard(mover: Connection) -> None:
        locked = "select from pg_locks where pid = pg_backend_pid() and relation = 'space'::regclass and mode = %s"
        assert mover.execute(locked, ("RowExclusiveLock",)).rowcount == 0

    assert eu.tier(guard) == BLOCKS


def test_nothing_is_written_where_a_space_was_to_move(database: str, eu: Eu) -> None:
    """Where it got no location, or another, before anything was there."""

    def guard(_: Connection) -> None:
        with connect(database) as other:
            alter_space(other, "eu", payload_location=None)

    assert eu.tier(guard) == 0
    assert eu.world.names() == set()


def test_nothing_is_moved_of_a_dropped_space(eu: Eu) -> None:
    drop_space(eu.conn, "eu")
    assert eu.tier() == 0


# --- one that fails ---------------------------------------------------------------------------------------------------


@pytest.mark.conforms("W4")
@pytest.mark.parametrize(
    "retained", [b"", b"10000\r\n", None, "away"], ids=["nothing", "another form", "not at all", "elsewhere"]
)
def test_a_careless_store_gets_nothing_named(
    eu: Eu, monkeypatch: pytest.MonkeyPatch, retained: bytes | str | None
) -> None:
    """It keeps something else than it was given, or nothing, or goes away while it is written to."""
    write, before = LocalBackend.write, eu.read()

    def careless(self: LocalBackend, name: str, payload: bytes) -> None:
        if name in (MARKER, WRITABLE):
            write(self, name, payload)
        elif isinstance(retained, bytes):
            write(self, name, retained + payload if retained else b"")
        elif retained == "away":
            if not eu.world.is_away:
                eu.world.go_away()
            write(self, name, payload)

    monkeypatch.setattr("sublet_storage.objects.parallel_calls.MAX_PARALLEL_CALLS", 1)
    monkeypatch.setattr(LocalBackend, "write", careless)
    with pytest.raises(
        PayloadUnavailable, match="mounted" if retained == "away" else "came back different|No such file"
    ):
        eu.tier()
    assert eu.named() == set()
    assert eu.read() == before


def test_all_but_what_cannot_be_written_is_moved(database: str, eu: Eu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full for the first block, in each pass, and not for later ones."""
    write, compact = LocalBackend.write, small_block_compaction.compact_stream
    before, compacted = eu.read(), list[int]()

    def full(self: LocalBackend, name: str, payload: bytes) -> None:
        if f"/{eu.stream}-2-" in name:
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
            eu.tier()
    assert len(eu.named()) == BLOCKS - 1
    assert compacted == [eu.stream], "once"
    alter_space(eu.conn, "eu", payload_location=None)
    assert eu.states() == [Severity.OK]
    remedy = "--no-payload-location --restore-payloads"
    with pytest.raises(Conflict, match=rf"{BLOCKS - 1} blocks have their payload outside.*{remedy}"):
        downgrade(database)
    assert eu.come_home() == BLOCKS - 1
    assert eu.named() == set()
    assert eu.read() == before


def test_what_ails_one_stream_holds_up_no_other(eu: Eu, monkeypatch: pytest.MonkeyPatch) -> None:
    eu.end_another(BLOCKS)
    compact = small_block_compaction.compact_stream

    def ailing(connection: Any, stream_id: int, **how: Any) -> int:
        if stream_id == eu.stream:
            raise ValueError("this one ails")
        return compact(connection, stream_id, **how)

    monkeypatch.setattr(small_block_compaction, "compact_stream", ailing)
    with pytest.raises(ValueError, match="this one ails"):
        eu.tier()
    assert len(eu.named()) == BLOCKS


def test_a_stuck_object_holds_up_no_other(eu: Eu, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that cannot be deleted is tried after all others, and reported by the doctor."""
    eu.orphan_all()
    stuck = eu.world.root / min(eu.world.names())
    stuck.unlink()
    stuck.mkdir()
    monkeypatch.setattr(unreferenced_objects, "MAX_OBJECTS", 1)
    with pytest.raises(PayloadUnavailable, match=stuck.name):
        swept(eu.conn)
    assert [swept(eu.conn) for _ in range(1, BLOCKS)] == [1] * (BLOCKS - 1)
    assert (eu.world.names(), eu.objects()) == (set(), 1)
    *_, last = location_checks.check_locations(eu.conn)
    assert last.detail.startswith("1 objects that no block names could not")
    stuck.rmdir()
    assert swept(eu.conn) == 1
    assert eu.objects() == 0


def test_a_sweep_reads_no_more_than_it_deletes(eu: Eu, tmp_path: Path) -> None:
    """There is one every 5 s; with a grace of 7 days millions wait."""
    place, conn = tmp_path / "x", eu.conn
    place.mkdir()
    conn.execute(
        "insert into payload_object (uri, space_id, generation_id, stream_id, end_offset, orphaned_at)"
        " select %s || '/1/1-' || n || '-' || repeat('0', 32) || '-' || repeat('0', 16), %s, 1, 1, n,"
        "        now() - n * interval '30 s' from generate_series(1, 20000) n",
        (f"file://{place}", eu.space.space_id),
    )
    conn.execute("analyze payload_object")

    def rows_read() -> int:
        conn.execute("select pg_stat_force_next_flush()")
        conn.execute("select pg_stat_clear_snapshot()")
        read = "select seq_tup_read + idx_tup_fetch from pg_stat_user_tables where relname = 'payload_object'"
        ((count,),) = conn.execute(read).fetchall()
        return int(count)

    before = rows_read()
    deleted = unreferenced_objects.delete_expired_objects(conn, grace_s=unreferenced_objects.GRACE_S - 7200)
    assert rows_read() - before < 1000 + 20 * deleted


def test_what_waits_for_its_grace_is_left_alone(eu: Eu) -> None:
    """No block may name it again, and it is not taken for abandoned; nor is what lies elsewhere."""
    eu.move()
    generation = generation_of(eu.conn, eu.stream)
    owner = unreferenced_objects.BlockOwner(eu.space.space_id, generation, eu.stream)
    places = (eu.world.uri, eu.world.uri, eu.world.uri, "file:///elsewhere")
    planned = [(f"{place}/1/1-{end}-{'0' * 32}-{'0' * 16}", end) for end, place in enumerate(places, 1)]
    named, claimed, abandoned, elsewhere = (uri for uri, _ in planned)
    unreferenced_objects.register_objects(eu.conn, owner, planned)
    unreferenced_objects.mark_for_deletion(eu.conn, owner, planned[:1], was_named=True)
    assert unreferenced_objects.claim_objects(eu.conn, [named, claimed]) == {claimed}
    assert unreferenced_objects.delete_expired_objects(eu.conn, abandoned_s=0) == 1
    left = eu.conn.execute("select uri from payload_object").fetchall()
    assert {uri for (uri,) in left} == {named, elsewhere} != {abandoned}


def test_a_sweep_of_nothing_opens_no_transaction(conn: Connection) -> None:
    def guard(_: Connection) -> None:
        raise AssertionError("a transaction")

    assert unreferenced_objects.delete_expired_objects(conn, guard) == 0


def test_a_place_gone_for_good_holds_up_no_other(eu: Eu, tmp_path: Path) -> None:
    eu.move()
    other = LocalWorld(tmp_path / "other")
    eu.space = alter_space(eu.conn, "eu", payload_location=other.uri)
    eu.end_another(BLOCKS)
    eu.move()
    eu.conn.execute("update generation set state = 'gone' where state = 'closed'")
    drop_gone(eu.conn)
    shutil.rmtree(eu.world.root)
    with pytest.raises(PayloadUnavailable):
        swept(eu.conn)
    assert other.names() == set()
    assert eu.objects() == BLOCKS


def test_a_directory_for_an_object_is_damage(eu: Eu) -> None:
    """The place is not taken for away."""
    eu.move()
    (name,) = [each for each in eu.world.names() if f"/{eu.stream}-6-" in each]
    eu.world.remove(name)
    (eu.world.root / name).mkdir()
    assert fetch(eu.conn, eu.stream, 0).position == 4
    with pytest.raises(PayloadDamaged, match=r"ends before offset 6 .*cannot be read"):
        fetch(eu.conn, eu.stream, 4)


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


@contextmanager
def maintained(database: str, conn: Connection, **settings: Any) -> Iterator[threading.Event]:
    """Have a node's maintenance at work; yield what is set once it has begun."""
    tried = threading.Event()
    term = leadership.claim(conn, MAINTENANCE, NodeIncarnation("n1", "n1-1", "localhost:1"), 60, None).term

    def term_of() -> int:
        tried.set()
        return term

    keeper = MaintenanceThreads(database, term_of, 86_400.0, every_s=0.05, **settings)
    keeper.start()
    try:
        yield tried
    finally:
        keeper.stop()


def test_while_a_place_hangs_maintenance_goes_on(database: str, eu: Eu, hang: Callable[[LocalWorld], None]) -> None:
    conn = eu.conn
    hang(eu.world)
    fill(conn, stream_of(conn, "default"), 1)
    alter_space(conn, "default", rollover_s=60)
    conn.execute("update generation set opened_at = opened_at - interval '1 h' where state = 'open'")
    old_write = "insert into sink_batch values ('write', 0, 1, true, clock_timestamp() - interval '2 d')"
    conn.execute(old_write)
    with maintained(database, conn) as tried:
        eventually(tried.is_set, WAIT_S)
        eventually(lambda: conn.execute("select from sink_batch").fetchone() is None, WAIT_S)
        conn.execute(old_write)
        eventually(lambda: conn.execute("select from sink_batch").fetchone() is None, WAIT_S)


def test_while_a_place_hangs_others_are_served(
    database: str, eu: Eu, tmp_path: Path, hang: Callable[[LocalWorld], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An NFS mount that is `hard`, as it is unless somebody says otherwise: to others payloads are moved, and deleted
    there."""
    other, conn = LocalWorld(tmp_path / "other"), eu.conn
    eu.orphan_all()
    alter_space(conn, "eu", payload_location=eu.world.uri)
    us = create_space(conn, "us", "us/#", shards=1, payload_location=other.uri)
    eu.end_another(BLOCKS, "us")
    hang(eu.world)
    monkeypatch.setattr("sublet_storage.objects.parallel_calls.RECEIVE_TIMEOUT_S", 0.3)
    with maintained(database, conn, grace_s=0.0):
        eventually(lambda: len(eu.named()) == BLOCKS, WAIT_S)
        alter_space(conn, "us", payload_location=None)
        assert payload_restore.restore_payloads(conn, us.space_id) == BLOCKS
        eventually(lambda: other.names() == set(), WAIT_S)


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


def test_tails_show_the_rest_while_a_place_is_away(eu: Eu) -> None:
    eu.move()
    create_space(eu.conn, "us", "us/#", shards=1)
    well, everything = stream_of(eu.conn, "us"), TopicFilter("#")
    fill(eu.conn, well, 1)
    eu.world.go_away()
    tail, reading = Tail(eu.conn, everything, "earliest"), EpochTailReader(eu.conn, everything, "earliest")
    for _ in range(2):
        assert streams_shown(tail.pages()) == [well, well]
        items = reading.read_available(eu.conn)
        assert streams_shown(each.table for each in items if isinstance(each, EpochTailMessages)) == [well, well]
        fill(eu.conn, well, 1)


def streams_shown(tables: Iterable[pa.Table]) -> list[int]:
    """Those of the messages that come before it is said that others cannot be had."""
    shown = list[int]()
    with pytest.raises(PayloadUnavailable):
        shown.extend(stream for table in tables for stream in table.column("stream").to_pylist())
    return shown


def test_a_place_that_hangs_counts_as_away(
    eu: Eu, tmp_path: Path, hang: Callable[[LocalWorld], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other places are read meanwhile."""
    theirs = create_space(eu.conn, "us", "us/#", shards=1, payload_location=LocalWorld(tmp_path / "other").uri)
    well = eu.end_another(BLOCKS, "us")
    assert (eu.move(), move(eu.conn, theirs)) == (BLOCKS, BLOCKS)
    hang(eu.world)
    monkeypatch.setattr("sublet_storage.objects.parallel_calls.RECEIVE_TIMEOUT_S", 0.5)
    with pytest.raises(PayloadUnavailable, match=r"has not answered for 0\.5 s"):
        fetch(eu.conn, eu.stream, 0)
    monkeypatch.setattr("sublet_storage.objects.parallel_calls.RECEIVE_TIMEOUT_S", 20.0)
    assert fetch(eu.conn, well, 0).position > 0


def test_a_sweep_has_an_end(eu: Eu, monkeypatch: pytest.MonkeyPatch) -> None:
    eu.orphan_all()
    monkeypatch.setattr(unreferenced_objects, "CHUNK", 1)
    assert unreferenced_objects.delete_expired_objects(eu.conn, grace_s=0.0, most_s=0.0) == 0
    assert swept(eu.conn) == BLOCKS


# --- what is not due --------------------------------------------------------------------------------------------------


def test_the_marker_is_written_once(eu: Eu, monkeypatch: pytest.MonkeyPatch) -> None:
    write, wrote = LocalBackend.write, list[str]()

    def noted(self: LocalBackend, name: str, payload: bytes) -> None:
        wrote.append(name)
        write(self, name, payload)

    monkeypatch.setattr(LocalBackend, "write", noted)
    eu.move()
    eu.end_another()
    eu.move()
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


def test_the_doctor_looks_at_old_places_in_use(eu: Eu) -> None:
    eu.move()
    alter_space(eu.conn, "eu", payload_location=None)
    assert eu.states() == [Severity.OK]
    eu.world.go_away()
    assert eu.states() == [Severity.ERROR]
    eu.world.come_back()
    eventually(lambda: eu.states() == [Severity.OK], WAIT_S)
    eu.come_home()
    shutil.rmtree(eu.world.root)
    (waits,) = location_checks.check_locations(eu.conn)
    assert (waits.state, f"{BLOCKS} objects wait" in waits.detail) == (Severity.WARNING, True)
    eu.conn.execute("delete from payload_object")
    assert eu.states() == []


def test_where_one_may_only_read_the_doctor_warns(eu: Eu, monkeypatch: pytest.MonkeyPatch) -> None:
    eu.move()

    def refused(self: LocalBackend, name: str, payload: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalBackend, "write", refused)
    (found,) = location_checks.check_locations(eu.conn)
    assert (found.state, "can be read, and not written" in found.detail) == (Severity.WARNING, True)
