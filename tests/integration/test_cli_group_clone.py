"""Groups that begin where another is, or was: cloned, and imported from what was exported."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, LowerFrontier
from sublet_protocol.domain.errors import Conflict, NotFound, UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.groups.admin import progress_transfer
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import (
    AdvancePosition,
    Group,
    GroupOptions,
    GroupWrites,
    OnDataLoss,
    StartingPosition,
)
from sublet_storage.producer import Publisher
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import rollover
from tests.integration.cli_kit import Shell, done, refused
from tests.integration.lending_kit import GROUP, SUBSCRIPTION, World, a_world, open_streams
from tests.kit import eventually
from tests.kit_nodes import SPEED, Fleet

TARGET = "$queue/billing-v2/orders/#"
OPTIONS = {"on_data_loss": OnDataLoss.SKIP, "strategy": "load", "session_expiry_s": 60.0}


@pytest.fixture
def world(database: str, conn: psycopg.Connection[Any]) -> Iterator[World]:
    with a_world(database, conn, **OPTIONS) as world:
        yield world


def group_of(conn: psycopg.Connection[Any], subscription: str = GROUP) -> Group:
    group = group_lifecycle.find_live(conn, Subscription.parse(subscription))
    assert group is not None
    return group


def clone(conn: psycopg.Connection[Any], source: Group, target: str = TARGET) -> Group:
    with conn.transaction():
        return progress_transfer.create_from_progress(
            conn, Subscription.parse(target), source.options, progress_transfer.read_progress(conn, source), "a clone"
        )


def half_way(world: World) -> dict[int, tuple[str, int]]:
    """One stream is held, after two messages, the other consumed and closed; what a copy of that begins with."""
    first, second = open_streams(world.conn)
    world.lead(listed=False)
    held = world.lend(first)
    world.write(AdvancePosition(first, held.grant_id, 2))
    entire = world.lend(second)
    rollover(world.conn, "default")
    world.write(AdvancePosition(second, entire.grant_id, entire.head))
    return {first: ("free", 2), second: ("finished", entire.head)}


def places(progress: progress_transfer.ExportedProgress) -> dict[int, tuple[str, int]]:
    return {place.stream_id: (place.status.value, place.position) for place in progress.positions}


@pytest.mark.conforms("A1")
def test_a_clone_has_the_options_and_progress(world: World) -> None:
    conn, expected = world.conn, half_way(world)
    source = group_of(conn)
    taken = progress_transfer.read_progress(conn, source)
    held = min(expected)
    assert places(taken) == {**expected, held: ("held", 2)}
    made = clone(conn, source)
    assert group_of(conn, TARGET) == made
    assert (made.options, made.group_id != source.group_id) == (source.options, True)
    assert places(progress_transfer.read_progress(conn, made)) == expected
    assert progress_transfer.read_progress(conn, made).after_generation == taken.after_generation
    assert progress_transfer.read_progress(conn, source) == taken, "its source goes on as it was"
    (line,) = world.store.history(made.group_id)
    assert (line.event, line.stream_id, line.reason) == ("create", 0, "a clone")
    with pytest.raises(Conflict, match="exists already, and has its own progress"):
        clone(conn, source)
    world.store.delete_group(SUBSCRIPTION)
    with pytest.raises(NotFound, match="there is no such group"):
        clone(conn, source, "$share/third/orders/#")


@pytest.mark.conforms("S5", "S8")
def test_a_clone_of_an_atomic_group_has_its_epochs(database: str, conn: psycopg.Connection[Any]) -> None:
    store = PostgresGroupStore(database)
    with Publisher(database, space="default") as publisher:
        publisher.in_epoch(7).publish("orders/eu", b"1", key=b"k").result(60)
        source = store.declare_group(
            SUBSCRIPTION, GroupOptions(atomic=True, starting_position=StartingPosition.EARLIEST)
        )
        publisher.in_epoch(8).publish("orders/eu", b"2", key=b"k").result(60)
    conn.execute(
        "update lending l set consumed = %s from stream s where s.stream_id = l.stream_id and s.head > 0",
        (json.dumps({"upto": 1, "least": [[8]]}),),
    )
    conn.execute("update consumed_frontier set least = '[[8]]'")
    store.close()
    made = clone(conn, source)
    taken = progress_transfer.read_progress(conn, made)
    assert taken == progress_transfer.read_progress(conn, source)
    assert [least for _, least in taken.frontiers] == [LowerFrontier(((8,),))]
    assert ConsumedFrontier(1, LowerFrontier(((8,),))) in [place.consumed for place in taken.positions]


@pytest.mark.conforms("A4")
def test_a_clone_goes_on_where_its_source_was(database: str, world: World, fleet: Fleet, shell: Shell) -> None:
    half_way(world)
    reported = done(shell.run("groups", "clone", GROUP, TARGET, "--json"))
    assert (reported["subscription"], reported["created"], reported["strategy"]) == (TARGET, True, "load")
    assert "would_create" not in reported, "it was no dry run"
    left = done(shell.run("groups", "describe", TARGET, "--json"))["lag"]
    seen: list[int] = []
    with Session(TARGET, database, settings=BorrowerSettings().scaled(SPEED)) as session:

        def read() -> bool:
            batch = session.poll(0.05)
            seen.extend(batch.table.column("offset").to_pylist() if batch is not None else [])
            return len(seen) >= int(left)

        eventually(read, 60)
        assert session.poll(0.5) is None
    assert len(seen) == left
    assert min(seen) == 2, "from where the source was"


@pytest.mark.conforms("A4", "A9")
def test_what_was_exported_is_imported_the_same(shell: Shell, world: World, tmp_path: Path) -> None:
    expected = half_way(world)
    file = tmp_path / "billing.json"
    file.write_text(shell.run("groups", "export", GROUP).out)
    exported = json.loads(file.read_text())
    before = progress_transfer.read_progress(world.conn, group_of(world.conn))
    refused(shell.run("groups", "clone", GROUP, "$share/v2/other/#"), 2, "has the filter of its source, orders/#")
    world.store.delete_group(SUBSCRIPTION)
    tried = done(shell.run("groups", "import", str(file), "--dry-run", "--json"))
    assert (tried["created"], tried["would_create"], tried["group_id"]) == (False, True, None)
    assert group_lifecycle.find_live(world.conn, SUBSCRIPTION) is None, "a dry run changes nothing"
    reported = done(shell.run("groups", "import", str(file), "--json"))
    assert (reported["created"], reported["on_data_loss"], reported["strategy"]) == (True, "skip", "load")
    after = progress_transfer.read_progress(world.conn, group_of(world.conn))
    assert (places(after), after) == (expected, before.to_initial)
    again = json.loads(shell.run("groups", "export", GROUP).out)
    assert {**again, "exported_at": "", "streams": []} == {**exported, "exported_at": "", "streams": []}
    answer = shell.run("groups", "import", str(file))
    assert (answer.code, "nothing was changed" in answer.err) == (0, True)
    exported["streams"][0]["position"] = 1
    file.write_text(json.dumps(exported))
    refused(shell.run("groups", "import", str(file)), 4, "is elsewhere than", f"reset '{GROUP}' --from-file")
    file.write_text(json.dumps({**exported, "options": {**exported["options"], "strategy": "even"}}))
    refused(shell.run("groups", "import", str(file)), 4, "its strategy is load, not even")
    file.write_text(json.dumps({**exported, "subscription": "$share/billing/#"}))
    refused(shell.run("groups", "import", str(file)), 2, "positions are those of the filter 'orders/#'")
    file.write_text(json.dumps({**exported, "filter": "x\x1b]0;p\a\nsublet: done"}))
    answer = shell.run("groups", "import", str(file), "--debug")
    assert (answer.code, "\x1b" in answer.err, "\nsublet: done" in answer.err) == (2, False, False)
    for unusable in ([], *({**exported, "exported_at": at} for at in ("x" * 2_000_000, "\0", None))):
        file.write_text(json.dumps(unusable))
        refused(shell.run("groups", "import", str(file)), 2, "not what `sublet groups export` writes")


@pytest.mark.conforms("A4", "E39")
def test_an_import_over_an_unmoved_group(database: str, shell: Shell, world: World, tmp_path: Path) -> None:
    """Though rows have come and gone: of streams that were new, that are closed, and that are deleted."""
    conn, file, clean = world.conn, tmp_path / "billing.json", EmptyGenerationCleaner(rest_s=0)
    open_ended, unread, partial = (tmp_path / name for name in ("open.json", "unread.json", "partial.json"))
    world.lead(listed=False)

    def sync() -> None:
        world.store.commit([GroupWrites(world.group, world.term, (), True)])

    def keep() -> None:
        """Delete what ended, as maintenance does in some passes."""
        conn.execute("update space set retention_s = 1")
        conn.execute("update generation set closed_at = closed_at - interval '1 hour'")
        for _ in range(5):
            apply_retention(conn)
            clean(conn)

    def is_same(exported: Path = file) -> bool:
        return done(shell.run("groups", "import", str(exported), "--json"))["created"] is False

    first = open_streams(conn)
    granted = [world.lend(stream) for stream in first]
    for grant in granted:
        world.write(AdvancePosition(grant.stream_id, grant.grant_id, grant.head))
    open_ended.write_text(shell.run("groups", "export", GROUP).out)
    rollover(conn, "default")
    for grant in granted:  # its holder reports that it is at the end
        world.write(AdvancePosition(grant.stream_id, grant.grant_id, grant.head))
    file.write_text(shell.run("groups", "export", GROUP).out)
    statuses = [stream["status"] for stream in json.loads(file.read_text())["streams"]]
    assert statuses == ["finished", "finished", "new", "new"]
    sync()
    assert is_same()
    assert is_same(open_ended)
    unread.write_text(shell.run("groups", "export", GROUP).out)
    *others, last = json.loads(unread.read_text())["streams"]
    partial.write_text(json.dumps({**json.loads(unread.read_text()), "streams": others}))
    refused(shell.run("groups", "import", str(partial)), 4, f"in 1 streams; the first is {last['stream_id']}")
    rollover(conn, "default")
    sync()
    assert is_same()
    keep()
    assert not set(first).intersection(row[0] for row in conn.execute("select stream_id from stream"))
    assert is_same()
    assert is_same(unread)
    refused(shell.run("groups", "import", str(open_ended)), 4, "is elsewhere than", f"the first is {first[0]}")
    world.publish(database)
    assert is_same()
    later = open_streams(conn)
    granted = [world.lend(stream) for stream in later]
    rollover(conn, "default")
    for grant in granted:
        world.write(AdvancePosition(grant.stream_id, grant.grant_id, grant.head))
    refused(shell.run("groups", "import", str(file)), 4, "is elsewhere than", f"the first is {later[0]}")
    sync()
    keep()
    assert not set(later).intersection(row[0] for row in conn.execute("select stream_id from stream"))
    refused(shell.run("groups", "import", str(file)), 4, "is elsewhere than", f"the first is {later[1]}")


@pytest.mark.conforms("A4", "S5")
def test_a_conflict_of_an_atomic_group_has_its_hint(
    database: str, conn: psycopg.Connection[Any], shell: Shell, tmp_path: Path
) -> None:
    """Which is no reset from a file, and not to skip what is gone."""
    file = tmp_path / "billing.json"
    with a_world(database, conn, atomic=True) as world:
        world.lead(listed=False)
        rollover(conn, "default")
        file.write_text(shell.run("groups", "export", GROUP).out)
        exported = json.loads(file.read_text())
        world.store.commit([GroupWrites(world.group, world.term, (), True)])
        assert done(shell.run("groups", "import", str(file), "--json"))["created"] is False, "it has new rows alone"
        exported["streams"][0]["position"] = 1
        file.write_text(json.dumps(exported))
        answer = shell.run("groups", "import", str(file))
        deletion, epoch = f"groups delete '{GROUP}', then sublet groups import {file}", f"'{GROUP}' --to-epoch EPOCH"
        refused(answer, 4, "is elsewhere than", deletion, epoch)
        assert "--from-file" not in answer.err
        world.store.delete_group(SUBSCRIPTION)
        conn.execute("update generation set state = 'gone' where state = 'closed'")
        answer = shell.run("groups", "import", str(file))
        refused(answer, 4, "is gone by retention", "Take a later one or create the group anew with --from earliest")
        assert "skip" not in answer.err


@pytest.mark.conforms("A4")
def test_progress_from_elsewhere_is_refused(world: World) -> None:
    conn = world.conn
    good = progress_transfer.progress_to_json(progress_transfer.read_progress(conn, group_of(conn)))
    first = good["streams"][0]

    def tried(changed: dict[str, Any], subscription: str = TARGET, **options: Any) -> None:
        with conn.transaction():
            progress = progress_transfer.progress_from_json({**good, **changed})
            progress_transfer.create_from_progress(
                conn, Subscription.parse(subscription), GroupOptions(**options), progress, "x"
            )

    for changed, said in (
        ({"streams": [{**first, "stream_id": 999}]}, "stream 999: it is none of"),
        ({"streams": [{**first, "position": 99}]}, "offset 99 is beyond its end"),
        ({"after_generation": 99}, "is of another database"),
        ({"epochs": [{"space_id": 99, "least": None}]}, "is of another database"),
    ):
        with pytest.raises(UsageError, match=said):
            tried(changed)
    with pytest.raises(UsageError, match="exactly where a group is atomic"):
        tried({}, atomic=True)
    for wrong in (
        {"streams": [first, first]}, {"streams": [{**first, "position": -1}]}, {"streams": None},
        {"streams": [{**first, "status": "odd"}]}, {"streams": ["x"]}, {"streams": [{**first, "position": 0.5}]},
        {"streams": [{**first, "position": True}]}, {"streams": [{**first, "position": "0"}]},
        {"streams": [{**first, "position": 10**20}]}, {"after_generation": 1.5},
    ):  # fmt: skip
        with pytest.raises((TypeError, KeyError, ValueError, AttributeError)):
            tried(wrong)
    assert group_lifecycle.find_live(conn, Subscription.parse(TARGET)) is None
    tried({"streams": [{**first, "status": "new", "stream_id": 999}]})
    assert progress_transfer.read_progress(conn, group_of(conn, TARGET)).positions == ()
