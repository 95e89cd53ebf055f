"""One suite, two places: what holds of payloads that lie on a file system, and in an S3-compatible store."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from sublet_protocol.domain.errors import InvalidSetting, PayloadDamaged, PayloadUnavailable, PositionGone
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.doctor import location_checks
from sublet_storage.doctor.checks import Severity
from sublet_storage.log.append import BlockAppend, append
from sublet_storage.log.block_encoder import pack
from sublet_storage.log.fetch import fetch, limit_ranges_by_size
from sublet_storage.objects import unreferenced_objects
from sublet_storage.objects.location import parse_location
from sublet_storage.objects.object_stores import ObjectStore
from sublet_storage.objects.parallel_calls import run_parallel
from sublet_storage.readers.complete_epoch_tail import EpochTailReader
from sublet_storage.readers.epoch_steps import read_block_summaries
from sublet_storage.readers.tail import Tail
from sublet_storage.spaces import payload_restore, tiering
from sublet_storage.spaces.retention import apply_retention, drop_gone
from sublet_storage.spaces.routing import Space
from sublet_storage.spaces.small_block_compaction import compact_stream
from sublet_storage.spaces.space_changes import alter_space, create_space, rollover
from sublet_storage.spaces.space_queries import find_space
from tests.integration.log_kit import batch, generation_of, read, stream_of
from tests.integration.session_kit import free_port
from tests.payload_kit import (
    LocalWorld,
    PlaceWorld,
    S3Server,
    S3World,
    a_closed_stream,
    a_space,
    fill,
    move,
    outside,
    s3_server,
    swept,
    when_back,
)
from tests.support.streams import open_streams

Connection = psycopg.Connection[Any]

REPOSITORY = Path(__file__).parents[2]
BLOCKS = 12
_buckets = itertools.count(1)


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with s3_server() as server:
        yield server


@pytest.fixture(params=["local", "s3"])
def world(request: pytest.FixtureRequest, tmp_path: Path) -> PlaceWorld:
    if request.param == "local":
        return LocalWorld(tmp_path)
    return S3World(request.getfixturevalue("s3"), f"bucket-{next(_buckets)}")


@pytest.fixture
def space(conn: Connection, world: PlaceWorld) -> Space:
    return a_space(conn, world, retention_s=100)


@pytest.fixture
def stream(conn: Connection, space: Space) -> int:
    """Closed, with blocks that are worth moving; the compaction that goes before has nothing to do."""
    return a_closed_stream(conn, BLOCKS)


def age(conn: Connection) -> None:
    conn.execute("update generation set closed_at = closed_at - interval '1 day' where state = 'closed'")


def prefix_of(world: PlaceWorld) -> str:
    return world.uri.partition("?")[0]


def name_at(conn: Connection, world: PlaceWorld, end_offset: int) -> str:
    asked = "select uri from block where end_offset = %s and uri is not null"
    ((uri,),) = conn.execute(asked, (end_offset,)).fetchall()
    return str(uri).removeprefix(prefix_of(world) + "/")


def waiting(conn: Connection) -> int:
    """Return how many objects are registered for deletion."""
    return conn.execute("select from payload_object").rowcount


# --- moving and reading ---------------------------------------------------------------------------------------------


def test_what_was_moved_is_read_as_it_was(conn: Connection, world: PlaceWorld, space: Space) -> None:
    stream = stream_of(conn, "eu")
    fill(conn, stream, BLOCKS, size=70_000)
    fill(conn, stream, 1, first=BLOCKS, size=10)
    rollover(conn, "eu")

    def found() -> list[object]:
        """By all readers."""
        wanted = TopicFilter("eu/#")
        return [
            read(conn, stream, 3, few=1000),
            [row["offset"] for row in read(conn, stream, filter=TopicFilter("eu/1"))],
            fetch(conn, stream, 0, end=3).position,
            read_block_summaries(conn, stream, generation_of(conn, stream), 0),
            pa.concat_tables(Tail(conn, wanted, "earliest").pages()).to_pylist(),
            list(EpochTailReader(conn, wanted, "earliest").read_available(conn)),
        ]

    before, in_postgres = read(conn, stream), found()
    assert in_postgres[:3] == [before[3:], [row["offset"] for row in before if row["topic"] == "eu/1"], 3]
    assert in_postgres[4] == before
    assert move(conn, space) == BLOCKS
    assert len(world.names()) == len(outside(conn)) == BLOCKS
    inside = conn.execute("select end_offset from block where payload is not null").fetchall()
    assert inside == [(2 * BLOCKS + 2,)], "a small block is not worth it"
    assert read(conn, stream) == before
    assert found() == in_postgres
    assert move(conn, space) == 0, "once is enough"


def test_a_page_has_as_many_bytes_outside_as_inside(conn: Connection, space: Space, stream: int) -> None:
    inside = fetch(conn, stream, 0, limit_bytes=300_000)
    extent = (stream, generation_of(conn, stream), 0, 2 * BLOCKS)
    planned = limit_ranges_by_size(conn, [extent], 300_000)
    move(conn, space)
    assert limit_ranges_by_size(conn, [extent], 300_000) == planned
    page = fetch(conn, stream, 0, limit_bytes=300_000)
    assert (page.position, len(page.batches)) == (inside.position, len(inside.batches))
    assert page.position < 2 * BLOCKS


def test_old_blocks_of_an_open_generation_move(conn: Connection, world: PlaceWorld, space: Space) -> None:
    """Compaction leaves them alone. Those of another space are moved as that is."""
    stream = stream_of(conn, "eu")
    create_space(conn, "us", "us/#", shards=1, payload_location=world.uri, tier_after_s=86_400)
    fill(conn, stream_of(conn, "us"), 4)
    fill(conn, stream, 4)
    assert move(conn, space) == 0
    space = alter_space(conn, "eu", tier_after_s=60)
    assert move(conn, space) == 0
    conn.execute("update block set appended_at = appended_at - interval '1 hour' where end_offset <= 6")
    before = read(conn, stream)
    assert move(conn, space) == 3
    fill(conn, stream, 4, first=4)
    compact_stream(conn, stream, older_than_s=0)
    assert read(conn, stream)[:8] == before
    assert len(outside(conn)) == 3


@pytest.mark.parametrize("is_poisoned", [False, True])
def test_small_blocks_are_merged_before_they_move(
    conn: Connection, world: PlaceWorld, space: Space, monkeypatch: pytest.MonkeyPatch, is_poisoned: bool
) -> None:
    """However long that takes, and though one cannot be decoded."""
    monkeypatch.setattr(tiering, "MAX_S", 0.0)
    stream = stream_of(conn, "eu")
    fill(conn, stream, 40, size=20_000)
    rollover(conn, "eu")
    before = read(conn, stream)
    if is_poisoned:
        conn.execute("update block set payload = 'x' where (stream_id, end_offset) = (%s, 2)", (stream,))
    assert move(conn, space) == len(world.names()) == 7
    assert is_poisoned or read(conn, stream) == before


# --- what is not as it should be --------------------------------------------------------------------------------------

DAMAGES: tuple[tuple[Callable[[bytes], bytes | None], str], ...] = (
    (lambda _: None, "there is nothing"),
    (lambda content: content[:-1], r"should have \d+ bytes and has \d+"),
    (lambda content: content + b"x", r"should have \d+ bytes and has more"),
    (lambda content: bytes([content[0] ^ 1]) + content[1:], "not those that were put there"),
)
FOREIGN = (
    "file:///etc/passwd",
    "{prefix}/../{name}",
    "{prefix}x/{name}",
    "{prefix}/{name}/../../x",
    "s3://another/{name}",
    "{prefix}/{other}",
)


def test_a_damaged_object_is_named_and_not_skipped(
    conn: Connection, world: PlaceWorld, space: Space, stream: int
) -> None:
    move(conn, space)
    before, name = read(conn, stream), name_at(conn, world, 6)
    entire = world.read(name)
    for change, said in DAMAGES:
        changed = change(entire)
        if changed is None:
            world.remove(name)
        else:
            world.write(name, changed)
        assert fetch(conn, stream, 0).position == 4, "what is before it can be read"
        where = rf"stream {stream}: .*begins at offset 4 and ends before offset 6 .*{name}"
        with pytest.raises(PayloadDamaged, match=rf"{where}.*{said}.*put the object back"):
            fetch(conn, stream, 4)
        world.write(name, entire)
        assert read(conn, stream) == before


def test_what_is_not_the_blocks_own_is_not_read(
    conn: Connection, world: PlaceWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(conn, space)
    asked: list[str] = []
    monkeypatch.setattr(ObjectStore, "get", lambda _, name, most: asked.append(name))
    own, other = name_at(conn, world, 2), name_at(conn, world, 4)
    for put in FOREIGN:
        uri = put.format(prefix=prefix_of(world), name=own, other=other)
        conn.execute("update block set uri = %s where end_offset = 2 and uri is not null", (uri,))
        with pytest.raises(PayloadDamaged, match="it is not read"):
            fetch(conn, stream, 0, limit_blocks=1)
    assert asked == []


def test_a_place_that_is_away_is_waited_for(conn: Connection, world: PlaceWorld, space: Space, stream: int) -> None:
    move(conn, space)
    before = read(conn, stream)
    world.go_away()
    with pytest.raises(PayloadUnavailable, match=r"the payload location .* It is tried again.*sublet doctor"):
        fetch(conn, stream, 0)
    world.come_back()
    assert when_back(lambda: read(conn, stream)) == before


def test_while_the_place_is_away_nothing_is_lost(
    conn: Connection, world: PlaceWorld, space: Space, stream: int
) -> None:
    move(conn, space)
    later = a_closed_stream(conn, BLOCKS)
    before = read(conn, later)
    world.go_away()
    with pytest.raises(PayloadUnavailable):
        move(conn, space)
    assert read(conn, later) == before
    world.come_back()
    assert when_back(lambda: move(conn, space)) == BLOCKS
    assert read(conn, later) == before


def test_who_may_not_write_there_leaves_nothing_behind(
    conn: Connection, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the first time, nor later."""

    def refused(self: ObjectStore, name: str, payload: object) -> None:
        raise PayloadUnavailable("a place to read only")

    before = read(conn, stream)
    for due in (BLOCKS, 1):
        with monkeypatch.context() as patched:
            patched.setattr(ObjectStore, "put", refused)
            with pytest.raises(PayloadUnavailable, match="to read only"):
                move(conn, space)
        assert waiting(conn) == 0
        assert move(conn, space) == due
        a_closed_stream(conn, 1)
    assert read(conn, stream) == before


# --- crashes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", ["intended", "written", "named"])
@pytest.mark.long
def test_a_mover_that_is_killed_loses_nothing(
    database: str, conn: Connection, world: PlaceWorld, space: Space, stream: int, point: str
) -> None:
    """What it leaves behind is collected."""
    before = read(conn, stream)
    _kill(database, point)
    assert read(conn, stream) == before
    named = len(outside(conn))
    assert (named, len(world.names())) == {"intended": (0, 0), "written": (0, 1), "named": (BLOCKS, BLOCKS)}[point]
    assert unreferenced_objects.delete_expired_objects(conn) == 0, "somebody may be at it still"
    assert unreferenced_objects.delete_expired_objects(conn, abandoned_s=0) == (0 if point == "named" else BLOCKS)
    assert len(world.names()) == named
    assert move(conn, space) == BLOCKS - named
    assert read(conn, stream) == before
    assert len(world.names()) == BLOCKS
    assert waiting(conn) == 0


@pytest.mark.conforms("W4")
@pytest.mark.parametrize("point", ["dropped", "deleted"])
@pytest.mark.long
def test_retention_that_is_killed_leaves_no_object(
    database: str, conn: Connection, world: PlaceWorld, space: Space, stream: int, point: str
) -> None:
    age(conn)
    retained = a_closed_stream(conn, 1)
    move(conn, space)
    _kill(database, point)
    with pytest.raises(PositionGone):
        fetch(conn, stream, 0)
    assert len(world.names()) == {"dropped": BLOCKS + 1, "deleted": 1}[point]
    assert swept(conn) == BLOCKS
    assert len(world.names()) == 1
    assert len(read(conn, retained)) == 2
    assert waiting(conn) == 0


def _kill(database: str, point: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.processes.moving", database, "eu", point], cwd=REPOSITORY, capture_output=True
    )
    assert done.returncode == -9, done.stderr.decode()


# --- others at work ---------------------------------------------------------------------------------------------------


def test_a_block_changed_meanwhile_keeps_its_payload(
    conn: Connection, world: PlaceWorld, space: Space, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = stream_of(conn, "eu")
    fill(conn, stream, 6)
    space = alter_space(conn, "eu", tier_after_s=60)
    conn.execute("update block set appended_at = appended_at - interval '1 hour'")
    before = read(conn, stream)
    _meanwhile(monkeypatch, lambda: compact_stream(conn, stream, older_than_s=0))
    tiering.tier_space(conn, space)
    assert outside(conn) == set()
    assert read(conn, stream) == before
    assert unreferenced_objects.delete_expired_objects(conn) == 6, "nobody names these"
    assert move(conn, space) == len(world.names()) == 1
    assert read(conn, stream) == before


def test_who_was_taken_for_dead_moves_nothing(
    conn: Connection, world: PlaceWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = read(conn, stream)
    _meanwhile(monkeypatch, lambda: unreferenced_objects.delete_expired_objects(conn, abandoned_s=0))
    assert tiering.tier_space(conn, space).blocks == 0
    assert (outside(conn), read(conn, stream)) == (set(), before)
    monkeypatch.undo()
    assert move(conn, space) == BLOCKS
    unreferenced_objects.delete_expired_objects(conn)
    assert len(world.names()) == BLOCKS
    assert read(conn, stream) == before


def test_what_a_block_names_is_not_deleted(conn: Connection, world: PlaceWorld, space: Space, stream: int) -> None:
    move(conn, space)
    uri = f"{prefix_of(world)}/{name_at(conn, world, 2)}"
    owner = unreferenced_objects.BlockOwner(space.space_id, generation_of(conn, stream), stream)
    unreferenced_objects.mark_for_deletion(conn, owner, [(uri, 2)], was_named=False)
    assert unreferenced_objects.delete_expired_objects(conn) == 0
    assert len(world.names()) == BLOCKS


def _meanwhile(monkeypatch: pytest.MonkeyPatch, happens: Callable[[], object]) -> None:
    """Call `happens` when the objects are written, and before blocks name them."""

    def written(*args: Any) -> Any:
        answer = run_parallel(*args)
        monkeypatch.setattr(tiering, "run_parallel", run_parallel)
        happens()
        return answer

    monkeypatch.setattr(tiering, "run_parallel", written)


# --- retention, and other places --------------------------------------------------------------------------------------


@pytest.mark.conforms("W4")
def test_objects_are_deleted_after_their_rows(conn: Connection, world: PlaceWorld, space: Space, stream: int) -> None:
    move(conn, space)
    age(conn)
    with conn.transaction():
        conn.execute("update generation set state = 'gone' where state = 'closed'")
        assert swept(conn) == 0
    assert len(world.names()) == BLOCKS
    world.go_away()
    assert drop_gone(conn) != []
    with pytest.raises(PositionGone):
        fetch(conn, stream, 0)
    with pytest.raises(PayloadUnavailable):
        swept(conn)
    world.come_back()
    assert when_back(lambda: swept(conn)) == BLOCKS
    assert world.names() == set()


def test_retention_during_a_read_is_no_damage(
    conn: Connection, space: Space, stream: int, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(conn, space)
    age(conn)
    get = ObjectStore.get

    def late(self: ObjectStore, name: str, most: int) -> Any:
        monkeypatch.setattr(ObjectStore, "get", get)
        with connect(database) as other:
            apply_retention(other)
            swept(other)
        return get(self, name, most)

    monkeypatch.setattr(ObjectStore, "get", late)
    with pytest.raises(PositionGone):
        fetch(conn, stream, 0, limit_blocks=1)


def test_a_space_whose_place_changes_is_read_from_both(
    conn: Connection, world: PlaceWorld, space: Space, stream: int, tmp_path: Path
) -> None:
    """And can come back to Postgres."""
    move(conn, space)
    other = LocalWorld(tmp_path / "other")
    space = alter_space(conn, "eu", payload_location=other.uri)
    later = a_closed_stream(conn, 3)
    before = [read(conn, stream), read(conn, later)]
    assert move(conn, space) == len(other.names()) == 3
    assert [read(conn, stream), read(conn, later)] == before
    alter_space(conn, "eu", payload_location=None)
    assert payload_restore.restore_payloads(conn, space.space_id) == BLOCKS + 3
    assert outside(conn) == set()
    assert swept(conn) == BLOCKS + 3
    assert [read(conn, stream), read(conn, later)] == before
    assert (world.names(), other.names()) == (set(), set())


def test_each_space_moves_its_own_streams(conn: Connection, world: PlaceWorld) -> None:
    """Though others have blocks with the same ends and bytes, in the same generation, and lie at the same place."""
    spaces = [a_space(conn, world, shards=2), create_space(conn, "us", "us/#", shards=1, payload_location=world.uri)]
    streams = [[each.stream_id for each in open_streams(conn) if each.space_id == space.space_id] for space in spaces]
    for stream in itertools.chain(*streams):
        fill(conn, stream, 2, size=70_000)
        for _ in range(2):
            append(conn, [BlockAppend(stream, pack(batch([b"same" * 40_000], "eu/0", b"k")))])
        fill(conn, stream, 1, size=10)  # which stays
    for space in spaces:
        rollover(conn, space.name)
    before = [read(conn, stream) for stream in itertools.chain(*streams)]

    def moved() -> list[tuple[int, int]]:
        counted = "select stream_id, count(distinct uri) from block where uri is not null group by 1 order by 1"
        return conn.execute(counted).fetchall()

    assert move(conn, spaces[0]) == 8
    assert moved() == [(stream, 4) for stream in streams[0]]
    assert move(conn, spaces[1]) == 4
    assert moved() == [(stream, 4) for stream in itertools.chain(*streams)]
    assert [read(conn, stream) for stream in itertools.chain(*streams)] == before
    alter_space(conn, "eu", payload_location=None)
    assert payload_restore.restore_payloads(conn, spaces[0].space_id) == 8
    assert moved() == [(stream, 4) for stream in streams[1]]
    assert swept(conn) == 8
    assert [read(conn, stream) for stream in itertools.chain(*streams)] == before


def test_what_cannot_come_back_holds_up_nothing_else(
    conn: Connection, world: PlaceWorld, space: Space, stream: int
) -> None:
    later = a_closed_stream(conn, 3)
    move(conn, space)
    lost = [name_at(conn, world, end_offset) for end_offset in (8, 2 * BLOCKS)]
    before, entire = [read(conn, stream), read(conn, later)], [world.read(name) for name in lost]
    for name in lost:
        world.remove(name)
    alter_space(conn, "eu", payload_location=None)
    with pytest.raises(PayloadDamaged, match=rf"^{BLOCKS + 1} payloads are back in Postgres, and 2 are not.*{lost[0]}"):
        payload_restore.restore_payloads(conn, space.space_id)
    assert {each.rpartition("/")[2] for each in outside(conn)} == {name.rpartition("/")[2] for name in lost}
    assert [each.state for each in location_checks.check_locations(conn)] == [Severity.OK]
    for name, content in zip(lost, entire, strict=True):
        world.write(name, content)
    assert payload_restore.restore_payloads(conn, space.space_id) == 2
    assert payload_restore.restore_payloads(conn, space.space_id) == 0
    assert list(location_checks.check_locations(conn)) == [], "nothing lies there"
    assert [read(conn, stream), read(conn, later)] == before


def test_what_is_gone_does_not_come_back(conn: Connection, space: Space, stream: int) -> None:
    move(conn, space)
    conn.execute("update generation set state = 'gone' where state = 'closed'")
    alter_space(conn, "eu", payload_location=None)
    assert payload_restore.restore_payloads(conn, space.space_id) == 0
    assert len(outside(conn)) == BLOCKS


def test_a_mover_without_its_place_moves_nothing(
    conn: Connection, world: PlaceWorld, space: Space, stream: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    alter_space(conn, "eu", payload_location=None)
    assert (tiering.tier_space(conn, space).blocks, waiting(conn)) == (0, 0)
    alter_space(conn, "eu", payload_location=world.uri)
    move(conn, space)
    a_closed_stream(conn, 3)
    _meanwhile(monkeypatch, lambda: alter_space(conn, "eu", payload_location=None))
    assert tiering.tier_space(conn, space).blocks == 0
    assert len(outside(conn)) == BLOCKS
    assert unreferenced_objects.delete_expired_objects(conn) == 3, "nobody names these"


def test_another_way_to_the_same_place_is_checked(conn: Connection, s3: S3Server) -> None:
    """A directory is reached in one way."""
    world = S3World(s3, f"bucket-{next(_buckets)}")
    space, stream = a_space(conn, world), stream_of(conn, "eu")
    fill(conn, stream, 2)
    rollover(conn, "eu")
    assert move(conn, space) > 0
    before = read(conn, stream)
    other = f"{world.uri}&region=eu-1"
    assert alter_space(conn, "eu", payload_location=other).payload_location == str(parse_location(other))
    ((locations,),) = conn.execute("select payload_locations from space where name = 'eu'").fetchall()
    assert locations == [str(parse_location(other))]
    assert read(conn, stream) == before
    wrong = f"{prefix_of(world)}?endpoint_override=127.0.0.1:{free_port()}&scheme=http"
    with pytest.raises(InvalidSetting, match=r"these options must lead to them: .*Correct the options.*nothing was"):
        alter_space(conn, "eu", payload_location=wrong)
    assert find_space(conn, "eu").payload_location == str(parse_location(other))
    assert read(conn, stream) == before


def test_the_doctor_sees_if_a_place_can_be_reached(
    conn: Connection, world: PlaceWorld, space: Space, stream: int
) -> None:
    (fresh,) = location_checks.check_locations(conn)
    assert (fresh.state, fresh.hint) == (Severity.OK, None)
    move(conn, space)
    assert [each.state for each in location_checks.check_locations(conn)] == [Severity.OK]
    assert len(world.names()) == BLOCKS, "the probe left something"
    world.go_away()
    (away,) = location_checks.check_locations(conn)
    assert (away.check, away.state) == ("payloads", Severity.ERROR)
    assert "space eu" in away.detail
    assert ("mounted" if isinstance(world, LocalWorld) else "credentials") in str(away.hint)
    world.come_back()
