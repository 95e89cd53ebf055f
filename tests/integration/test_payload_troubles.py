"""What can go wrong with payloads outside of Postgres, and must not go further; directories stand for all places."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from leader import maintenance
from leader.maintenance import Housekeeper
from protocol.errors import Conflict, LostLeadership, PayloadDamaged, PayloadUnavailable
from storage import compaction, epochs
from storage.checkup import State
from storage.compaction import compact_stream
from storage.connect import connect
from storage.groups import leadership
from storage.groups.model import MAINTENANCE, NodeRef
from storage.log import Append, Producer, Stamp, register_producer, since
from storage.migrate import downgrade
from storage.payloads import objects, outside, probe, recall, tiering
from storage.payloads.place import parse
from storage.payloads.stores import MARKER, WRITABLE, LocalBackend, Store
from storage.payloads.together import together
from storage.retention import drop_gone
from storage.routing import Space
from storage.spaces import alter_space, create_space, drop_space, rollover
from tests.integration.log_kit import in_epochs, read, stream_of
from tests.kit import eventually
from tests.payload_kit import LocalWorld, a_space, fill, move, swept
from tests.payload_kit import outside as named

BLOCKS = 6
WAIT_S = 20.0
NAME = "5/7-1-" + "0" * 32 + "-" + "0" * 16


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(database) as connection:
        yield connection


@pytest.fixture
def world(tmp_path: Path) -> LocalWorld:
    return LocalWorld(tmp_path)


@pytest.fixture
def space(conn: psycopg.Connection[Any], world: LocalWorld) -> Space:
    return a_space(conn, world)


@pytest.fixture
def stream(conn: psycopg.Connection[Any], space: Space) -> int:
    """Closed, and not moved yet."""
    stream = stream_of(conn, "eu")
    fill(conn, stream, BLOCKS, size=70_000)
    rollover(conn, "eu")
    return stream


def again(conn: psycopg.Connection[Any], space: Space) -> int:
    """As the next passes do; how many blocks were moved."""
    try:
        return move(conn, space)
    except PayloadUnavailable:
        return 0


def rows(conn: psycopg.Connection[Any]) -> int:
    return conn.execute("select from payload_object").rowcount


def age(conn: psycopg.Connection[Any]) -> None:
    conn.execute("update block set appended_at = appended_at - interval '1 hour'")


# --- a place that is not there, or another ----------------------------------------------------------------------------


def test_a_directory_that_is_not_there_is_not_made(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int
) -> None:
    world.root.rmdir()
    with pytest.raises(PayloadUnavailable, match=rf"no directory {world.root}, and it must exist.*mkdir"):
        move(conn, space)
    assert not world.root.exists()
    assert (named(conn), rows(conn)) == (set(), 0)
    world.root.mkdir()
    assert eventually(lambda: again(conn, space), WAIT_S) == BLOCKS


def test_a_place_that_is_not_mounted_is_away_to_all_spaces_and_nothing_is_written_there(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int
) -> None:
    move(conn, space)
    before, kept = read(conn, stream), world.names()
    other = create_space(conn, "us", "us/#", shards=1, payloads=world.uri)
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
    assert kept <= world.names()


def test_what_is_doomed_at_a_place_that_is_not_mounted_stays_doomed(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int
) -> None:
    move(conn, space)
    alter_space(conn, "eu", payloads=None)
    recall.recall(conn, space.space_id)
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
    place = Store(parse(f"file://{tmp_path}"))
    first = place.mark("a" * 32)
    assert (first, place.mark("b" * 32)) == ("a" * 32, "a" * 32)


def test_a_place_that_goes_away_while_it_is_written_to_has_nothing_named(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = LocalBackend.write

    def late(self: LocalBackend, name: str, payload: bytes) -> None:
        if name not in (MARKER, WRITABLE) and not world.root.with_name("elsewhere").exists():
            world.go_away()
        write(self, name, payload)

    monkeypatch.setattr("storage.payloads.together.AT_ONCE", 1)
    monkeypatch.setattr(LocalBackend, "write", late)
    with pytest.raises(PayloadUnavailable):
        tiering.tier_space(conn, space)
    assert named(conn) == set()
    assert len(read(conn, stream)) == 2 * BLOCKS


# --- backups, and going back ------------------------------------------------------------------------------------------


def test_a_database_that_is_restored_finds_what_was_recalled_since(
    server_url: str, database: str, conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int
) -> None:
    move(conn, space)
    before = read(conn, stream)
    conn.close()
    parts = urlsplit(database)
    backup = f"{parts.path[1:]}_backup"
    with psycopg.connect(server_url, autocommit=True) as server:
        server.execute(f'create database "{backup}" template "{parts.path[1:]}"'.encode())
        try:
            with connect(database) as original:
                alter_space(original, "eu", payloads=None)
                recall.recall(original, space.space_id)
                assert objects.sweep(original) == 0, "the grace is days"
                with connect(urlunsplit(parts._replace(path=f"/{backup}"))) as restored:
                    assert read(restored, stream) == before
                assert swept(original) == BLOCKS
        finally:
            server.execute(f'drop database "{backup}" with (force)'.encode())
    assert world.names() == set()


def test_an_older_schema_is_refused_also_to_who_asks_while_payloads_are_moved(
    database: str, conn: psycopg.Connection[Any], space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, claim = read(conn, stream), objects.claim
    said: list[str] = []

    def down() -> None:
        try:
            downgrade(database, to="0001")
        except Conflict as conflict:
            said.append(str(conflict))

    other = threading.Thread(target=down)

    def slow(*args: Any) -> set[str]:
        found = claim(*args)
        other.start()
        eventually(lambda: waiting(database), WAIT_S)
        return found

    monkeypatch.setattr(objects, "claim", slow)
    tiering.tier_space(conn, space)
    other.join()
    assert said
    assert said[0].startswith(f"{BLOCKS} blocks")
    assert read(conn, stream) == before


def waiting(database: str) -> bool:
    with connect(database) as other:
        return other.execute("select from pg_locks where not granted").rowcount > 0


# --- others at work ---------------------------------------------------------------------------------------------------


def test_who_appends_and_advances_is_not_killed_by_who_moves_payloads(
    database: str, conn: psycopg.Connection[Any], world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = a_space(conn, world, tier_after_s=60)
    stream = stream_of(conn, "eu")
    fill(conn, stream, BLOCKS)
    age(conn)
    who = Producer("p", register_producer(conn, "p"))
    epochs.hold(conn, space.space_id, who, [(1,)])
    moved: list[object] = []

    def tier() -> None:
        with connect(database) as other:
            try:
                moved.append(tiering.tier_space(other, space).blocks)
            except psycopg.Error as error:
                moved.append(error)

    mover, ask = threading.Thread(target=tier), epochs._ask_to_hold

    def late(*args: Any) -> Any:
        mover.start()
        eventually(lambda: waiting(database), WAIT_S)
        return ask(*args)

    monkeypatch.setattr(epochs, "_ask_to_hold", late)
    appends = [Append(stream, in_epochs((1,)), Stamp("p", who.incarnation, 1))]
    done = epochs.append_and_hold(conn, appends, space.space_id, who, [(2,)], 60)
    mover.join()
    assert (done.refusal, moved) == (None, [BLOCKS])


def test_compaction_leaves_what_was_moved_since_it_looked(
    conn: psycopg.Connection[Any], world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = a_space(conn, world, tier_after_s=60)
    stream = stream_of(conn, "eu")
    fill(conn, stream, BLOCKS)
    age(conn)
    before, scan = read(conn, stream), compaction._scan

    def late(*args: Any) -> Any:
        found = scan(*args)
        move(conn, space)
        return found

    monkeypatch.setattr(compaction, "_scan", late)
    assert compact_stream(conn, stream, older_than_s=0) == 0
    assert len(named(conn)) == BLOCKS
    assert read(conn, stream) == before


def test_who_was_deposed_and_comes_late_leaves_no_object_that_is_forgotten(
    database: str, conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int, monkeypatch: Any
) -> None:
    over: list[bool] = []

    def guard(_: psycopg.Connection[Any]) -> None:
        if over:
            raise LostLeadership("the term is over")

    def frozen(*args: Any) -> Any:
        """An hour goes by before it writes."""
        with connect(database) as other:
            assert objects.sweep(other, abandoned_s=0) == BLOCKS
        over.append(True)
        return together(*args)

    monkeypatch.setattr(tiering, "together", frozen)
    with pytest.raises(LostLeadership):
        tiering.tier_space(conn, space, guard)
    assert (len(world.names()), named(conn)) == (BLOCKS, set())
    assert objects.sweep(conn) == BLOCKS
    assert world.names() == set()


def test_a_place_that_is_taken_away_meanwhile_gets_nothing(
    database: str, conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int, monkeypatch: Any
) -> None:
    try_to_write = Store.try_to_write

    def altered(self: Store) -> None:
        try_to_write(self)
        with connect(database) as other:
            alter_space(other, "eu", payloads=None)

    monkeypatch.setattr(Store, "try_to_write", altered)
    assert tiering.tier_space(conn, space) == tiering.Moved(0, 0, True)
    assert (world.names(), rows(conn)) == (set(), 0)


def test_how_far_a_stream_is_moved_is_not_said_by_who_moves_nothing(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(conn, "eu")
    fill(conn, stream, 1, size=10)
    rollover(conn, "eu")
    monkeypatch.setattr(tiering._Mover, "_prepare", lambda _: True)
    alter_space(conn, "eu", payloads=None)
    tiering.tier_space(conn, space)
    assert conn.execute("select tiered_offset from stream where stream_id = %s", (stream,)).fetchone() == (0,)


def test_of_a_space_that_was_dropped_nothing_more_is_moved(
    conn: psycopg.Connection[Any], space: Space, stream: int
) -> None:
    assert [each.name for each in maintenance._with_a_place(conn)] == ["eu"]
    drop_space(conn, "eu")
    assert maintenance._with_a_place(conn) == []
    assert tiering.tier_space(conn, space).blocks == 0


# --- one that fails ---------------------------------------------------------------------------------------------------


def test_of_a_batch_of_which_one_object_cannot_be_written_the_others_are_moved(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, before = LocalBackend.write, read(conn, stream)

    def failing(self: LocalBackend, name: str, payload: bytes) -> None:
        if f"/{stream}-6-" in name:
            raise OSError("slow down")
        write(self, name, payload)

    with monkeypatch.context() as patched:
        patched.setattr(LocalBackend, "write", failing)
        with pytest.raises(PayloadUnavailable, match="slow down"):
            tiering.tier_space(conn, space)
    assert len(named(conn)) == BLOCKS - 1
    assert read(conn, stream) == before
    assert move(conn, space) == 1, "and the place was not taken for away"
    assert (read(conn, stream), len(world.names())) == (before, BLOCKS)


def test_what_ails_one_stream_holds_up_no_other(
    conn: psycopg.Connection[Any], space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = stream_of(conn, "eu")
    fill(conn, later, BLOCKS, size=70_000)
    rollover(conn, "eu")
    compact = compaction.compact_stream

    def ailing(connection: Any, stream_id: int, **how: Any) -> int:
        if stream_id == stream:
            raise ValueError("this one ails")
        return compact(connection, stream_id, **how)

    monkeypatch.setattr(compaction, "compact_stream", ailing)
    with pytest.raises(ValueError, match="this one ails"):
        tiering.tier_space(conn, space)
    assert len(named(conn)) == BLOCKS


def test_an_object_that_cannot_be_deleted_holds_up_no_other(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int
) -> None:
    move(conn, space)
    alter_space(conn, "eu", payloads=None)
    recall.recall(conn, space.space_id)
    stuck = world.root / min(world.names())
    stuck.unlink()
    stuck.mkdir()
    with pytest.raises(PayloadUnavailable, match=stuck.name):
        swept(conn)
    assert (world.names(), rows(conn)) == (set(), 1)
    assert [each.found for each in probe.examine(conn)][-1].startswith("1 objects that no block names could not")
    stuck.rmdir()
    assert swept(conn) == 1
    assert rows(conn) == 0


def test_a_place_that_is_gone_for_good_holds_up_no_other(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int, tmp_path: Path
) -> None:
    move(conn, space)
    other = LocalWorld(tmp_path / "other")
    space = alter_space(conn, "eu", payloads=other.uri)
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


def test_an_object_that_cannot_be_read_is_damaged_and_its_place_is_not_away(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int
) -> None:
    move(conn, space)
    (name,) = [each for each in world.names() if f"/{stream}-6-" in each]
    world.remove(name)
    (world.root / name).mkdir()
    with pytest.raises(PayloadDamaged, match=r"ends at offset 6 .*cannot be read"):
        since(conn, stream, 0)
    assert since(conn, stream, 0, limit_blocks=2).position == 4


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


def test_while_a_place_hangs_housekeeping_goes_on(
    database: str,
    conn: psycopg.Connection[Any],
    world: LocalWorld,
    space: Space,
    stream: int,
    hang: Callable[[LocalWorld], None],
) -> None:
    tried = threading.Event()
    hang(world)
    conn.execute("insert into sink_batch values ('write', 0, 1, true, clock_timestamp() - interval '2 d')")
    fill(conn, stream_of(conn, "default"), 1)
    alter_space(conn, "default", rollover_s=60)
    conn.execute("update generation set opened_at = opened_at - interval '1 h' where state = 'open'")
    term = leadership.claim(conn, MAINTENANCE, NodeRef("n1", "n1-1", "localhost:1"), 60, None).term

    def term_of() -> int:
        tried.set()
        return term

    keeper = Housekeeper(database, term_of, 86_400.0, every_s=0.05)
    keeper.start()
    try:
        eventually(tried.is_set, WAIT_S)
        eventually(lambda: conn.execute("select from sink_batch").fetchone() is None, WAIT_S)
        conn.execute("insert into sink_batch values ('write', 0, 1, true, clock_timestamp() - interval '2 d')")
        eventually(lambda: conn.execute("select from sink_batch").fetchone() is None, WAIT_S)
    finally:
        keeper.stop()


def test_while_a_place_hangs_others_are_read_and_it_counts_as_away(
    database: str,
    conn: psycopg.Connection[Any],
    world: LocalWorld,
    space: Space,
    stream: int,
    tmp_path: Path,
    hang: Callable[[LocalWorld], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = LocalWorld(tmp_path / "other")
    theirs = create_space(conn, "us", "us/#", shards=1, payloads=other.uri)
    well = stream_of(conn, "us")
    fill(conn, well, BLOCKS, size=70_000)
    rollover(conn, "us")
    assert (move(conn, space), move(conn, theirs)) == (BLOCKS, BLOCKS)
    hang(world)
    monkeypatch.setattr(outside, "SILENCE_S", 0.5)
    with pytest.raises(PayloadUnavailable, match=r"has not answered for 0\.5 s"):
        since(conn, stream, 0)
    monkeypatch.setattr(outside, "SILENCE_S", 30.0)
    assert since(conn, well, 0).position > 0


def test_a_sweep_has_an_end(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(conn, space)
    alter_space(conn, "eu", payloads=None)
    recall.recall(conn, space.space_id)
    monkeypatch.setattr(objects, "CHUNK", 1)
    assert objects.sweep(conn, grace_s=0.0, most_s=0.0) == 0
    assert swept(conn) == BLOCKS


# --- what is not due --------------------------------------------------------------------------------------------------


def test_of_what_is_young_nothing_is_fetched_and_nothing_written(
    conn: psycopg.Connection[Any], world: LocalWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = a_space(conn, world, tier_after_s=60)
    stream = stream_of(conn, "eu")
    fill(conn, stream, 4, size=70_000)
    looked: list[object] = []
    monkeypatch.setattr(tiering._Mover, "_prepare", lambda *_: looked.append("the place"))
    assert tiering.tier_space(conn, space) == tiering.Moved(0, 0, True)
    assert looked == []
    conn.execute("update block set appended_at = appended_at - interval '1 hour' where end_offset <= 4")
    monkeypatch.undo()
    parameters = {"generation": generation_of(conn, stream), "stream": stream, "offset": 0, "closed": False}
    limits = {"after": 60, "least": tiering.LEAST_BYTES, "blocks": 10, "bytes": 1 << 20}
    found = conn.execute(tiering._BLOCKS, {**parameters, **limits}).fetchall()
    assert [(row[0], row[3] is not None) for row in found] == [(2, True), (4, True), (6, False), (8, False)]
    assert move(conn, space) == 2


def generation_of(conn: psycopg.Connection[Any], stream: int) -> int:
    row = conn.execute("select generation_id from stream where stream_id = %s", (stream,)).fetchone()
    assert row is not None
    return int(row[0])


def test_the_marker_is_written_once(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
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
    there = LocalBackend(parse(f"file://{root}"))
    there.write(MARKER, b"a marker")
    there.write(WRITABLE, b"")
    assert victim.read_text() == "precious"
    (root / "5").symlink_to(elsewhere)
    kept = elsewhere / NAME.partition("/")[2]
    kept.write_text("precious")
    for act in (lambda: there.write(NAME, b"x"), lambda: there.delete(NAME), lambda: there.read(NAME, 1)):
        with pytest.raises(OSError, match="leads out of"):
            act()
    assert kept.read_text() == "precious"
    assert len(list(elsewhere.iterdir())) == 1


# --- the doctor -------------------------------------------------------------------------------------------------------


def test_an_old_place_matters_to_the_doctor_as_long_as_something_lies_there(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int
) -> None:
    move(conn, space)
    alter_space(conn, "eu", payloads=None)
    assert [each.state for each in probe.examine(conn)] == [State.OK]
    world.go_away()
    assert [each.state for each in probe.examine(conn)] == [State.ERROR]
    world.come_back()
    eventually(lambda: [each.state for each in probe.examine(conn)] == [State.OK], WAIT_S)
    recall.recall(conn, space.space_id)
    shutil.rmtree(world.root)
    (waits,) = probe.examine(conn)
    assert (waits.state, f"{BLOCKS} objects wait" in waits.found) == (State.WARNING, True)
    conn.execute("delete from payload_object")
    assert list(probe.examine(conn)) == []


def test_where_one_may_only_read_the_doctor_warns(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(conn, space)

    def refused(self: LocalBackend, name: str, payload: bytes) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalBackend, "write", refused)
    (found,) = probe.examine(conn)
    assert (found.state, "can be read, and not written" in found.found) == (State.WARNING, True)


def test_where_a_place_is_not_mounted_the_doctor_makes_nothing(
    conn: psycopg.Connection[Any], world: LocalWorld, space: Space
) -> None:
    world.root.rmdir()
    (found,) = probe.examine(conn)
    assert found.state is State.ERROR
    assert f"no directory {world.root}, and it must exist" in found.found
    assert not world.root.exists()
