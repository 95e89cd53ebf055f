"""Rows of generations of which nothing is left: they go, nothing is believed lost by it, and nothing costs more."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from psycopg.errors import CheckViolation

from sublet_leader.group.events import BorrowerMessageReceived, Event, WritesCommitted
from sublet_leader.group.machine import GroupLeader
from sublet_leader.settings import LeaderSettings
from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier
from sublet_protocol.domain.errors import (
    Conflict,
    EpochAlreadyCompleted,
    NotFound,
    PositionBeyondHead,
    PositionGone,
    ProducerFenced,
)
from sublet_protocol.domain.subscriptions import Bookmark, Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_protocol.messages.borrower_leader import LeaderWanted, Ping
from sublet_protocol.tick import Tick
from sublet_storage.db.connect import connect
from sublet_storage.doctor import location_checks
from sublet_storage.doctor.checks import find_leaderless_groups
from sublet_storage.groups.admin import progress_transfer
from sublet_storage.groups.admin.access_snapshot import read_deleted_groups
from sublet_storage.groups.admin.node_desired_state import read_desired_state
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.admin.reset_transaction import plan_reset
from sublet_storage.groups.consumer_progress import SessionIdentity, next_session_epoch, read_lagging_streams
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.coordinator.history_queries import delete_old_session_epochs
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.coordinator.stream_sync import add_streams
from sublet_storage.groups.model.records import (
    AdvancePosition,
    GrantStream,
    GroupOptions,
    GroupWrites,
    OnDataLoss,
    StartingPosition,
)
from sublet_storage.groups.status.lag_queries import (
    list_unconsumed_groups,
    read_lags_by_status,
    read_stream_lags,
    read_total_lags,
)
from sublet_storage.groups.status.overview import list_leaderless_groups
from sublet_storage.log import epoch_leases
from sublet_storage.log import fetch as message_log
from sublet_storage.log.append import BlockAppend, append
from sublet_storage.node_directory import NodeIncarnation, register
from sublet_storage.objects.unreferenced_objects import BlockOwner, delete_expired_objects, mark_for_deletion
from sublet_storage.producer import Publisher
from sublet_storage.producer.batches.routing_table import PublisherRoutingTable
from sublet_storage.readers.complete_epoch_tail import EpochTailReader
from sublet_storage.readers.epoch_steps import read_block_summaries
from sublet_storage.readers.tail import MultiStreamReader, Tail, list_matching_streams
from sublet_storage.spaces import payload_restore, tiering
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.retention import IdleProducerCleaner, apply_retention, drop_gone, mark_expired_gone
from sublet_storage.spaces.routing import Space
from sublet_storage.spaces.small_block_compaction import BLOCK_BYTES, list_newly_fragmented
from sublet_storage.spaces.space_changes import alter_space, create_space, drop_space, reshard, roll_over_due, rollover
from sublet_storage.spaces.tiering import tier_space
from tests.integration.epoch_kit import A, B, EpochBlocks, seen
from tests.integration.log_kit import Connection, block, generation_of, put, stream_of, swap_filters, waiting_for_locks
from tests.kit import eventually
from tests.payload_kit import LocalWorld

GROUP = Subscription.parse("$share/g/#")
OWN = Subscription.parse("$share/g/own/#")
NODE = NodeIncarnation("n1", "i1", "127.0.0.1:1")
ALL = TopicFilter("#")
UNSEEN = "select from generation where state = 'closed' and is_past is null"


class GroupWorld:
    """A database with one group, its leader, and maintenance that is done when it is called for."""

    def __init__(self, url: str, conn: Connection) -> None:
        self.url, self.conn, self.store = url, conn, PostgresGroupStore(url)
        reshard(conn, "default", 1)
        self.group = self.store.declare_group(GROUP, GroupOptions(StartingPosition.EARLIEST))
        self.collapse = EmptyGenerationCleaner(rest_s=0)

    def keep(self) -> set[int]:
        """Maintenance until there is nothing to do; the generations that are left."""
        idle = 0
        while idle < 3:  # found to be past, dropped, deleted
            is_at_work = apply_retention(self.conn) or self.collapse(self.conn) or self.conn.execute(UNSEEN).rowcount
            idle = 0 if is_at_work else idle + 1
        return {row[0] for row in self.conn.execute("select generation_id from generation")}

    def ended(self, *values: bytes) -> int:
        """A generation with these messages, closed; its stream."""
        stream = stream_of(self.conn, "default")
        for value in values:
            put(self.conn, stream, value)
        rollover(self.conn, "default")
        return stream

    def age(self) -> None:
        """Make all that is closed an hour older."""
        self.conn.execute("update generation set closed_at = closed_at - interval '1 hour'")

    def retire(self) -> None:
        """Make the closed generations older than their retention."""
        self.conn.execute("update space set retention_s = 1")
        self.age()

    def take(self) -> None:
        """Have retention take what is due, and delete no row."""
        self.retire()
        while apply_retention(self.conn):
            pass

    def be_atomic(self) -> None:
        """Go on with an atomic group."""
        options = GroupOptions(StartingPosition.EARLIEST, atomic=True)
        self.group = self.store.declare_group(Subscription.parse("$share/a/#"), options)

    def exported(self) -> progress_transfer.ExportedProgress:
        return progress_transfer.read_progress(self.conn, self.group)

    def begin(
        self, progress: progress_transfer.ExportedProgress, group: str = "$share/imported/#", **options: Any
    ) -> None:
        """Begin a group with that progress."""
        subscription = Subscription.parse(group)
        with self.conn.transaction():
            progress_transfer.create_from_progress(
                self.conn, subscription, GroupOptions(**options), progress, "imported"
            )

    def renew(self) -> Any:
        term = self.store.claim(self.group.group_id, NODE, 60).term
        return self.store.commit([GroupWrites(self.group.group_id, term, (), True)])[0]

    def consume(self, stream: int) -> None:
        term = self.store.claim(self.group.group_id, NODE, 60).term
        grant = GrantStream(stream, "b", "a", None, "x")
        (granted,) = self.store.commit([GroupWrites(self.group.group_id, term, (grant,))])[0].results
        assert granted.outcome == "applied"
        assert granted.lending is not None
        done = AdvancePosition(stream, granted.lending.grant_id, granted.lending.head)
        self.store.commit([GroupWrites(self.group.group_id, term, (done,))])

    def forget(self, stream: int, had_messages: bool) -> None:
        """It is consumed, past its retention, and deleted."""
        self.renew()
        if had_messages:
            self.consume(stream)
        self.retire()
        self.keep()

    def lose(self, space: str) -> int:
        """A generation of the space with a message, of which nothing is left; its stream."""
        self.store.delete_group(GROUP)
        stream = stream_of(self.conn, space)
        put(self.conn, stream, b"lost")
        rollover(self.conn, space)
        self.conn.execute("update space set retention_s = 1 where name = %s", (space,))
        self.age()
        self.keep()
        return stream

    def open_stream(self) -> int:
        return stream_of(self.conn, "default")

    def rows(self) -> set[int]:
        return {row[0] for row in self.conn.execute("select stream_id from lending")}


@pytest.fixture
def house(database: str) -> Iterator[GroupWorld]:
    with connect(database) as conn:
        house = GroupWorld(database, conn)
        yield house
        house.store.close()


@pytest.mark.conforms("E39")
def test_rows_of_the_past_go_unless_unread(house: GroupWorld) -> None:
    """What is empty or gone leaves no rows, and what is unread keeps all of them."""
    first = house.ended(b"0")
    for _ in range(5):
        house.ended()
    last = house.ended(b"1")
    house.renew()
    left = house.keep()
    assert house.rows() >= {first, last}
    assert len(left) == 3, "the two with messages, and the open one"
    house.renew()
    parents = house.conn.execute("select parents from stream where stream_id = %s", (last,)).fetchone()
    assert parents == ([first],), "order survives"
    house.consume(first)
    house.consume(last)
    house.retire()
    assert house.keep() == {max(left)}
    house.renew()
    assert house.rows() == {house.open_stream()}


def test_what_has_ended_is_looked_at_once_after_a_rest(house: GroupWorld) -> None:
    """As much of it as fits into a pass: what was seen does not stand before the rest."""
    house.ended(b"0")
    house.ended()
    clean = EmptyGenerationCleaner(rest_s=1800, step=1)
    clean(house.conn)
    assert house.conn.execute(UNSEEN).rowcount == 3, "before these the first, of two streams"
    house.age()
    for left in (2, 1, 0):
        clean(house.conn)
        assert house.conn.execute(UNSEEN).rowcount == left
    house.retire()
    gone = mark_expired_gone(house.conn)
    clean(house.conn)
    assert gone
    assert set(gone) <= set(drop_gone(house.conn)), "its partition goes first"
    for _ in range(6):
        clean(house.conn)
    assert house.conn.execute("select from generation").rowcount == 2, "the unread one holds up no other"


def test_a_group_is_not_behind_what_it_noticed_last(house: GroupWorld) -> None:
    began = house.ended(b"0")
    house.renew()
    house.consume(began)
    noticed = "update consumer_group set after_generation = (select generation_id from stream where stream_id = %s)"
    house.conn.execute(noticed, (began,))
    house.retire()
    assert len(house.keep()) == 1
    assert house.conn.execute("select from stream where stream_id = %s", (began,)).fetchall() == []


def test_a_child_inherits_from_whom_it_has_keys(house: GroupWorld) -> None:
    """Not from grandparents whose keys only lie next to its own."""
    asked = "select stream_id, parents from stream where state = 'open' order by hash_from"
    reshard(house.conn, "default", 2)
    grandparents = [stream for stream, _ in house.conn.execute(asked)]
    for stream in grandparents:
        put(house.conn, stream, b"0")
    for shards in (1, 2):
        reshard(house.conn, "default", shards)
    house.renew()
    assert len(house.keep()) == 2
    assert [parents for _, parents in house.conn.execute(asked)] == [[each] for each in grandparents]


def test_a_child_inherits_only_of_those_deleted(house: GroupWorld) -> None:
    """It has parents of two spaces, and only those of one of them are deleted."""
    before = house.ended(b"0")
    create_space(house.conn, "eu", "eu/#", shards=1)
    put(house.conn, stream_of(house.conn, "eu"), b"1")
    rollover(house.conn, "eu")
    last = stream_of(house.conn, "eu")
    put(house.conn, last, b"2")
    drop_space(house.conn, "eu")
    house.renew()
    house.keep()
    asked = "select parents from stream where stream_id = %s"
    assert house.conn.execute(asked, (house.open_stream(),)).fetchone() == (sorted((before, last)),)


def test_a_partition_that_is_missing_is_no_end(house: GroupWorld) -> None:
    """Its generation is not gone, as somebody has dropped its table."""
    stream = house.ended(b"0")
    house.renew()
    house.consume(stream)
    house.conn.execute(f"drop table block_{generation_of(house.conn, stream)}")
    house.keep()
    assert stream in house.rows()


@pytest.mark.conforms("E39", "W4")
def test_lost_messages_are_not_forgotten(house: GroupWorld) -> None:
    """Those that a group was to have, and retention has taken, block their stream until the group is gone."""
    unread = house.ended(b"0")
    house.retire()
    left = house.keep()
    assert len(left) == 2, "nobody has noticed that it is gone"
    house.renew()
    assert house.keep() == left
    blocked = "select status from lending where stream_id = %s"
    assert house.conn.execute(blocked, (unread,)).fetchone() == ("blocked",)
    past = "select generation_id, xmin::text from generation where is_past"
    seen = house.conn.execute(past).fetchall()
    house.collapse(house.conn)
    assert house.conn.execute(past).fetchall() == seen != [], "what was seen is not written again"
    house.collapse = EmptyGenerationCleaner(rest_s=0, step=1)
    house.ended()
    house.renew()
    assert len(house.keep()) == 2, "one that stays keeps no later one"
    house.store.delete_group(GROUP)
    assert len(house.keep()) == 1
    for _ in range(2):  # also one that it has not noticed
        house.ended(b"0")
    house.retire()
    assert len(house.keep()) == 1


@pytest.mark.conforms("X4")
def test_a_malformed_space_stops_no_other_cleanup(house: GroupWorld) -> None:
    house.store.delete_group(GROUP)
    create_space(house.conn, "own", "own/#", shards=1)
    story = EpochBlocks(house.conn, "own")
    story.advance(A, (5, 1))
    story.publish(A, (5, 1))
    rollover(house.conn, "own")
    house.conn.execute("update space set lost_upper_frontier = '[[1, 9, 0]]' where name = 'own'")
    house.ended()
    last = house.ended(b"0")
    house.take()
    with pytest.raises(CheckViolation):
        house.collapse(house.conn)
    assert not house.conn.execute("select from stream where stream_id = %s", (last,)).rowcount


@pytest.mark.conforms("P10")
def test_a_stream_that_never_was_is_beyond_all(house: GroupWorld) -> None:
    """As after a restore of an older state of the database, under the same timeline."""
    newest = house.conn.execute("select max(stream_id) from stream").fetchone()[0]  # type: ignore[index]
    with pytest.raises(PositionBeyondHead, match=f"stream {newest + 1}: messages of it were read, and this database"):
        Tail(house.conn, ALL, Bookmark(newest + 1, {newest + 1: 3}))
    unread = Tail(house.conn, ALL, Bookmark(newest + 1, {newest + 1: 0}))
    assert unread.bookmark.known == newest, "what opens under that number is read"


@pytest.mark.conforms("E39", "E18")
def test_a_leader_drops_streams_that_are_deleted(house: GroupWorld) -> None:
    """They were free and at their ends; they were closed, and deleted, before the leader has looked."""
    create_space(house.conn, "eu", "eu/#", shards=2)
    house.renew()
    term = house.store.claim(house.group.group_id, NODE, 60).term
    leader = GroupLeader(house.group, term, house.store.load(house.group.group_id, term), LeaderSettings(), 0.0)
    drop_space(house.conn, "eu", purge=True)
    house.keep()
    granted: list[int] = []

    def give(event: Event, now: float) -> None:
        outcome = leader.decide(event, now)
        granted.extend(each.stream_id for each in outcome.changes if isinstance(each, GrantStream))
        if outcome.changes or outcome.needs_stream_sync:
            writes = GroupWrites(house.group.group_id, term, outcome.changes, outcome.needs_stream_sync)
            give(WritesCommitted(house.store.commit([writes])[0]), now)

    give(BorrowerMessageReceived("a", LeaderWanted("a/1", str(GROUP))), 0.0)
    for now in map(float, range(20)):
        give(BorrowerMessageReceived("a", Ping(("a/1",), now)), now)
        give(Tick(), now)
    assert {each.lending.stream_id for each in leader.streams} == {house.open_stream()}
    assert len(granted) == len(set(granted)), "none is tried again"


@pytest.mark.conforms("E39", "P10")
def test_a_position_in_a_deleted_stream_is_gone(house: GroupWorld) -> None:
    """A position in a stream that never was is unknown."""
    stream = house.ended(b"0", b"1")
    house.forget(stream, had_messages=True)
    with pytest.raises(PositionGone):
        message_log.fetch(house.conn, stream, 1)
    with pytest.raises(NotFound):
        message_log.fetch(house.conn, 10_000, 0)
    gone: list[PositionGone] = []
    assert list(Tail(house.conn, ALL, Bookmark(stream, {stream: 1}), gone.append).pages()) == []
    assert [each.stream_id for each in gone] == [stream]


def test_an_open_stream_without_its_blocks_is_followed(house: GroupWorld) -> None:
    gone: list[PositionGone] = []
    tail = Tail(house.conn, ALL, "earliest", gone.append)
    put(house.conn, house.open_stream(), b"0")
    house.conn.execute("delete from block")
    assert list(tail.pages()) == []
    put(house.conn, house.open_stream(), b"1")
    assert [table.column("value").to_pylist() for table in tail.pages()] == [[b"1"]]
    assert len(gone) == 1


@pytest.mark.conforms("E39")
@pytest.mark.parametrize("had_messages", [False, True])
def test_a_reader_goes_on_behind_deleted_streams(house: GroupWorld, had_messages: bool) -> None:
    """Another that begins has listed the streams, and then finds its place in each by the time."""
    gone: list[PositionGone] = []
    tail = Tail(house.conn, ALL, "earliest", gone.append)
    assert list(tail.pages()) == []
    stream = house.ended(*([b"0"] if had_messages else []))
    streams = list_matching_streams(house.conn, ALL)
    house.forget(stream, had_messages)
    reader = MultiStreamReader(house.conn, ALL, datetime(2020, 1, 1, tzinfo=UTC), streams)
    assert reader.bookmark.offsets == {house.open_stream(): 0}
    put(house.conn, house.open_stream(), b"1")
    found = [value.as_py() for table in [*tail.pages(), *tail.pages()] for value in table.column("value")]
    assert found == [b"1"]
    assert [each.stream_id for each in gone] == ([stream] if had_messages else [])


@pytest.mark.conforms("E39", "P10")
def test_deleted_streams_fence_no_publisher(house: GroupWorld) -> None:
    """After a failover: their numbers are given to no others. It may be a lost one where its space is another, or its
    number is yet to be given."""
    create_space(house.conn, "eu", "eu/#", shards=1)
    create_space(house.conn, "us", "us/#", shards=1)
    routes = PublisherRoutingTable.load(house.conn)
    for space in ("eu", "us", "default"):
        rollover(house.conn, space)
    house.keep()
    newer = PublisherRoutingTable.load(house.conn)
    left = {stream_id for (stream_id,) in house.conn.execute("select stream_id from stream").fetchall()}
    assert left.isdisjoint(routes.find_stream(topic, None) for topic in ("eu/1", "us/1", "t"))
    routes.check_timeline(house.conn, "p")
    house.conn.execute("delete from stream where stream_id = %s", (newer.find_stream("t", None),))
    with pytest.raises(ProducerFenced, match="another timeline, where stream"):
        newer.check_timeline(house.conn, "p")
    swap_filters(house.conn)
    with pytest.raises(ProducerFenced, match="another timeline, where stream"):
        routes.check_timeline(house.conn, "p")


def tail_by_bookmark(house: GroupWorld, tail: Tail, on_data_loss: Callable[[PositionGone], None]) -> Tail:
    return Tail(house.conn, ALL, Bookmark.parse(str(tail.bookmark)), on_data_loss)


def tail_on(house: GroupWorld, tail: Tail, on_data_loss: Callable[[PositionGone], None]) -> Tail:
    tail.on_data_loss = on_data_loss
    return tail


@pytest.mark.conforms("E39", "W4")
@pytest.mark.parametrize("go_on", [tail_by_bookmark, tail_on])
def test_a_loss_in_an_unknown_space_is_reported(house: GroupWorld, go_on: Callable[..., Tail]) -> None:
    """Once, before what was published after it, also where the space's filter is another by now."""
    put(house.conn, house.open_stream(), b"0")
    tail = Tail(house.conn, ALL, "latest")
    create_space(house.conn, "b", "b/#", shards=1)
    stream = house.lose("b")
    alter_space(house.conn, "b", filter="other/#")
    put(house.conn, stream_of(house.conn, "b"), b"1")
    found: list[object] = []
    tail = go_on(house, tail, lambda gone: found.append(gone.stream_id))
    for _ in range(3):
        found += [value.as_py() for table in tail.pages() for value in table.column("value")]
    assert found == [stream, b"1"]
    assert list(tail_by_bookmark(house, tail, found.append).pages()) == []
    assert found == [stream, b"1"]


@pytest.mark.conforms("E39", "W4")
@pytest.mark.parametrize("entire", [False, True])
def test_epoch_tails_report_losses_in_new_spaces(house: GroupWorld, entire: bool) -> None:
    found: list[PositionGone] = []
    put(house.conn, house.open_stream(), b"0")
    tail = EpochTailReader(house.conn, ALL, entire=entire, on_data_loss=found.append)
    list(tail.read_available(house.conn))
    create_space(house.conn, "b", "b/#", shards=1)
    stream = house.lose("b")
    with pytest.raises(PositionGone, match=f"stream {stream}") if entire else contextlib.nullcontext():
        list(tail.read_available(house.conn))
    assert [gone.stream_id for gone in found] == ([] if entire else [stream])


@pytest.mark.conforms("E39", "W4")
def test_a_loss_beside_a_reader_is_not_reported(house: GroupWorld) -> None:
    """Of other topics, among them such as a more specific space had then, of before the reading began, or of what was
    read to its end."""
    found: list[PositionGone] = []
    conn = house.conn
    newest = Tail(conn, ALL).bookmark.known
    create_space(conn, "a", "a/#", shards=1)
    tails = [Tail(conn, TopicFilter(filter), "earliest", found.append) for filter in ("a/#", "a/x", "+/x/y")]
    create_space(conn, "b", "b/#", shards=1)
    lost = [house.lose(space) for space in ("b", "default")]
    rollover(conn, "a")
    tails[2] = Tail(conn, TopicFilter("+/x/y"), "latest", found.append)
    tails += [Tail(conn, ALL, begin, found.append) for begin in ("latest", "earliest", datetime.now(UTC), 0)]
    tails.append(Tail(conn, ALL, tails[-1].bookmark, found.append))
    tails.append(Tail(conn, TopicFilter("a/#"), Bookmark(newest, {}), found.append))
    tails.append(Tail(conn, ALL, Bookmark(max(lost), {}), found.append))
    assert [table for tail in tails for table in [*tail.pages(), *tail.pages()]] == []
    assert found == []


def test_a_bookmark_of_the_newest_stream_goes_on_there(house: GroupWorld) -> None:
    """What it does not name was read to its end, and of what it names nothing was read yet."""
    stream = house.open_stream()
    put(house.conn, stream, b"0")
    tail = Tail(house.conn, ALL, Bookmark(stream, {stream + 1: 0}))
    assert list(tail.pages()) == []
    put(house.conn, stream, b"1")
    assert [value.as_py() for table in tail.pages() for value in table.column("value")] == [b"1"]


@pytest.mark.conforms("E39", "W4")
@pytest.mark.parametrize("comes_back", [True, False])
def test_a_space_that_was_away_hides_no_loss(house: GroupWorld, comes_back: bool) -> None:
    """Meanwhile its topics were another's."""
    found: list[PositionGone] = []
    create_space(house.conn, "a", "a/#", shards=1)
    tail = Tail(house.conn, TopicFilter("a/#"), "earliest", found.append)
    if comes_back:
        alter_space(house.conn, "a", filter="other/#")
    else:
        drop_space(house.conn, "a", purge=True)
    stream = house.lose("default")
    if comes_back:
        alter_space(house.conn, "a", filter="a/#")
    assert list(tail.pages()) == []
    assert stream in [gone.stream_id for gone in found]


@pytest.mark.conforms("E39", "A4")
@pytest.mark.parametrize("on_data_loss", OnDataLoss)
@pytest.mark.parametrize("had_messages", [False, True])
def test_exported_progress_outlives_deleted_streams(
    house: GroupWorld, on_data_loss: OnDataLoss, had_messages: bool
) -> None:
    """It is taken where nothing of it was lost."""
    house.renew()
    stored = json.dumps(progress_transfer.progress_to_json(house.exported()))
    stream = house.ended(*([b"0"] if had_messages else []))
    house.forget(stream, had_messages)
    is_refused = had_messages and on_data_loss is OnDataLoss.FAIL
    with pytest.raises(Conflict, match="gone by retention") if is_refused else contextlib.nullcontext():
        house.begin(progress_transfer.progress_from_json(json.loads(stored)), on_data_loss=on_data_loss)


@pytest.mark.conforms("E39", "A4")
def test_streams_that_ended_hinder_no_copy(house: GroupWorld) -> None:
    """Neither one that was read to its end when it was exported, nor a row that has lost its stream."""
    house.renew()
    stream = house.ended()
    house.renew()
    conn, group = house.conn, house.group.group_id
    conn.execute("update lending set status = 'free' where stream_id = %s", (stream,))  # before the leader sees its end
    progress = house.exported()
    house.forget(stream, had_messages=False)
    conn.execute("insert into lending (group_id, stream_id, position) values (%s, %s, 0)", (group, stream))
    conn.execute("insert into lost_generation values ('b/#', 0, %s)", (stream,))  # as by one with messages
    house.begin(progress)
    with conn.transaction():
        progress_transfer.clone(conn, GROUP, Subscription.parse("$share/cloned/#"), "x")


@pytest.mark.conforms("E39", "A4")
def test_an_import_in_time_finds_what_it_has_lost(house: GroupWorld) -> None:
    """A pass of maintenance waits for its transaction, and keeps what the new group has not noticed."""
    house.renew()
    progress = house.exported()
    house.store.delete_group(GROUP)
    rollover(house.conn, "default")
    lost, open_stream = house.ended(b"0"), house.open_stream()
    house.take()
    house.conn.execute("update generation set is_past = true where state = 'gone'")
    with ThreadPoolExecutor(1) as cleaner, connect(house.url) as importing, importing.transaction():
        options = GroupOptions(on_data_loss=OnDataLoss.SKIP)
        progress_transfer.create_from_progress(importing, GROUP, options, progress, "imported")
        cleaner.submit(house.collapse, house.conn)
        eventually(lambda: waiting_for_locks(house.url), 20.0)
    left = {row[0] for row in house.conn.execute("select stream_id from stream")}
    assert left >= {lost, open_stream}


@pytest.mark.conforms("E39", "A4")
@pytest.mark.parametrize("is_listed", [False, True])
def test_an_import_finds_what_is_gone_and_not_deleted(house: GroupWorld, is_listed: bool) -> None:
    """Its stream was exported, or is of a generation that came later; what was consumed before hinders nothing."""
    lost = house.ended(b"0") if is_listed else 0
    house.renew()
    progress = house.exported()
    lost = lost or house.ended(b"0")
    house.renew()
    house.consume(lost)
    consumed = house.exported()
    house.store.delete_group(GROUP)
    house.take()
    state = "select n.state from stream s join generation n using (generation_id) where s.stream_id = %s"
    assert house.conn.execute(state, (lost,)).fetchone() == ("gone",)
    with pytest.raises(Conflict, match="gone by retention"):
        house.begin(progress)
    house.begin(progress, "$share/skipping/#", on_data_loss=OnDataLoss.SKIP)
    house.begin(consumed)


@pytest.mark.conforms("E39", "A4")
def test_an_import_of_what_was_read_has_lost_nothing(house: GroupWorld) -> None:
    """Though its stream was open, and held, when it was exported, and is gone by now."""
    stream = house.open_stream()
    put(house.conn, stream, b"0")
    house.renew()
    house.consume(stream)
    progress = house.exported()
    house.store.delete_group(GROUP)
    rollover(house.conn, "default")
    house.retire()
    assert apply_retention(house.conn)
    house.begin(progress)


@pytest.mark.conforms("E39", "A4")
def test_an_import_judges_by_what_was_lost(house: GroupWorld) -> None:
    """Not by the filter that the space has by now, which may be another."""
    house.renew()
    progress = house.exported()
    house.store.delete_group(GROUP)
    put(house.conn, house.open_stream(), b"kept")
    create_space(house.conn, "a", "a/#", shards=1, retention_s=1)
    put(house.conn, stream_of(house.conn, "a"), b"0", topic="a/x")
    alter_space(house.conn, "a", filter="other/#")
    house.age()
    house.keep()
    with pytest.raises(Conflict, match=r"a/#.*gone by retention"):
        house.begin(progress, "$share/g/a/#")
    house.begin(progress, "$share/g/other/#")


def rows_read(conn: Connection) -> int:
    """Rows of our tables that were read so far, and what the server had to look up about the partitions of blocks."""
    conn.execute("select pg_stat_force_next_flush()")
    conn.execute("select pg_stat_clear_snapshot()")
    (row,) = conn.execute(
        "select sum(seq_tup_read + coalesce(idx_tup_fetch, 0))::bigint from pg_stat_all_tables"
        " where relname ~ '^(generation|stream|lending|consumed_frontier|consumer_group|space|leadership|block.*)$'"
        "    or relname in ('pg_inherits', 'pg_constraint')"
    ).fetchall()
    return int(row[0])


def renew_once(house: GroupWorld) -> None:
    """Renew over a connection of its own, and wait until it has ended and left its statistics."""

    def others() -> int:
        with connect(house.url) as conn:
            (row,) = conn.execute(
                "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
            ).fetchall()
            return int(row[0])

    before = others()
    with closing(PostgresGroupStore(house.url)) as store:
        term = store.claim(house.group.group_id, NODE, 60).term
        store.commit([GroupWrites(house.group.group_id, term, (), True)])
    eventually(lambda: others() <= before, 60)


def idle_cost(house: GroupWorld) -> int:
    """Rows that a renewal and a round of maintenance read while nothing happens."""
    for _ in range(2):  # the second finds what the first has left
        with connect(house.url) as conn:
            before = rows_read(conn)
        renew_once(house)
        with connect(house.url) as conn:
            roll_over_due(conn)
            apply_retention(conn)
            EmptyGenerationCleaner(rest_s=0)(conn)
            list_newly_fragmented(conn)
            IdleProducerCleaner()(conn)
        with connect(house.url) as conn:
            after = rows_read(conn)
    return after - before


@pytest.mark.conforms("E39")
@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.long
def test_idle_costs_do_not_grow_with_what_has_been(house: GroupWorld, retained: bool) -> None:
    """`retained`: of each generation a message is still there, which the group has consumed."""
    found = []
    for count in (10, 290):
        streams = [house.ended(*([b"0"] if retained else [])) for _ in range(count)]
        house.renew()
        for stream in streams if retained else []:
            house.consume(stream)
        house.age()
        house.conn.execute("update block set appended_at = appended_at - interval '1 hour'")
        assert (len(house.keep()) > count) == retained
        house.conn.execute("analyze generation, stream, lending")
        idle_cost(house)
        found.append(idle_cost(house))
    assert found[1] <= found[0] * 1.2 + 20, found


# Rows as of the last closed generation: so many are soon there, as none has a partition.
COPIES = (
    """
insert into generation (space_id, ordinal, filter, state, is_past, closed_at)
select space_id, newest + n, filter, state, is_past, closed_at
  from generation, generate_series(1, %(times)s) as n, (select max(ordinal) as newest from generation) newest
 where generation_id = %(last)s""",
    """
insert into stream (space_id, generation_id, hash_from, hash_to, state, closed_at, head, tiered_offset, seen_offset,
                    is_compact)
select s.space_id, g.generation_id, hash_from, hash_to, s.state, s.closed_at, head, tiered_offset, seen_offset,
       is_compact
  from stream s, generation g where s.generation_id = %(last)s and g.generation_id > %(last)s + 1""",
    """
insert into lending (group_id, stream_id, status, position, consumed)
select l.group_id, s.stream_id, l.status, l.position, l.consumed
  from lending l join stream t using (stream_id), stream s
 where t.generation_id = %(last)s and s.generation_id > %(last)s + 1""",
)
CONSUMED = """
update lending l set status = 'finished', position = head from stream s
 where s.stream_id = l.stream_id and s.state = 'closed'"""
OVER = "update leadership set expires_at = clock_timestamp() - interval '1 hour'"


@pytest.mark.conforms("E39")
def test_an_atomic_group_alone_adds_all_streams(house: GroupWorld) -> None:
    """One that is synced together with it gets the oldest generations first, as ever."""
    atomic = house.store.declare_group(
        Subscription.parse("$share/a/#"), GroupOptions(StartingPosition.EARLIEST, atomic=True)
    )
    groups = house.group.group_id, atomic.group_id
    syncs = [GroupWrites(group, house.store.claim(group, NODE, 60).term, (), True) for group in groups]
    reshard(house.conn, "default", 2000)
    reshard(house.conn, "default", 1)
    streams = house.conn.execute("select count(*) from stream").fetchall()[0][0]
    for missing in (1, 0):
        house.store.commit(syncs)
        counts = house.conn.execute("select group_id, count(*) from lending group by 1").fetchall()
        assert dict(counts) == dict(zip(groups, (streams - missing, streams), strict=True))


@pytest.mark.conforms("E39")
def test_regular_queries_read_only_what_is_live(house: GroupWorld, tmp_path: Path) -> None:
    """What is asked again and again reads as many rows after 3000 generations as after ten."""
    conn = house.conn
    space = alter_space(conn, "default", payload_location=LocalWorld(tmp_path).uri)
    atomic = house.store.declare_group(
        Subscription.parse("$share/a/#"), GroupOptions(StartingPosition.EARLIEST, atomic=True)
    )

    def reads() -> dict[str, int]:
        """Rows, with ten generations more that are consumed and one that is new."""
        for _ in range(10):
            house.ended(b"0")
        add_streams(conn, [atomic.group_id], 0)
        for _ in range(2):  # a sync takes up 2000 streams
            house.renew()
            conn.execute(CONSUMED)
        conn.execute(OVER)
        while not tier_space(conn, space).is_complete:
            pass
        reading = MultiStreamReader(conn, ALL, "earliest")
        house.ended(b"0")
        tier_space(conn, space)
        conn.execute("vacuum analyze generation, stream, lending")
        epoch = next_session_epoch(conn, house.group.subscription, "etl")
        looks: dict[str, Callable[[], object]] = {
            "groups without a leader": lambda: find_leaderless_groups(conn),
            "lags of all groups": lambda: read_total_lags(conn),
            "lags of the streams of a group": lambda: read_stream_lags(conn, [house.group.group_id]),
            "lags of a group in sums": lambda: read_lags_by_status(conn, [house.group.group_id]),
            "lags of groups that nobody leads": lambda: list_leaderless_groups(conn, 10),
            "lags of groups that nobody consumes": lambda: list_unconsumed_groups(conn),
            "streams that have opened": lambda: reading.refresh_streams(conn),
            "what is unread": lambda: read_lagging_streams(
                conn, house.group.group_id, SessionIdentity("etl", epoch), ALL
            ),
            "payloads to be moved": lambda: tier_space(conn, space),
            "payloads that should have been moved": lambda: list(location_checks.check_locations(conn)),
            "streams of an atomic group": lambda: add_streams(conn, [atomic.group_id], 0),
            "a rollover": lambda: rollover(conn, "default"),
        }
        found = {}
        for what, look in looks.items():
            before = rows_read(conn)
            look()
            found[what] = rows_read(conn) - before
        return found

    few = reads()
    conn.execute(CONSUMED)
    ((last,),) = conn.execute("select max(generation_id) from generation where state = 'closed'").fetchall()
    for copy in COPIES:
        conn.execute(copy, {"times": 3000, "last": last})
    many = reads()
    assert {what: (few[what], rows) for what, rows in many.items() if rows > few[what] * 1.2 + 20} == {}


@pytest.mark.conforms("E39")
@pytest.mark.parametrize(
    "look",
    [tier_space, lambda conn, _: list(location_checks.check_locations(conn))],
    ids=["payloads to be moved", "payloads that should have been moved"],
)
def test_of_an_open_stream_one_block_is_looked_at(
    house: GroupWorld, tmp_path: Path, look: Callable[[Connection, Space], object]
) -> None:
    conn, stream = house.conn, house.open_stream()
    space = alter_space(conn, "default", payload_location=LocalWorld(tmp_path).uri, tier_after_s=86_400)
    append(conn, [BlockAppend(stream, block(b"0")) for _ in range(500)])
    conn.execute("analyze block")
    look(conn, space)
    before = rows_read(conn)
    look(conn, space)
    assert rows_read(conn) < before + 100


# Copies of a space that was dropped long ago; a group has consumed all its epochs.
DROPPED = """
with dropped as (
  insert into space (name, filter, shards, retention_s, epoch_dimensions, lower_frontier, dropped_at)
  select name, filter, shards, 3600, 1, '[[5]]', now() - interval '2 days'
    from space, generate_series(1, %(times)s) where name = 'default' returning space_id)
insert into consumed_frontier (group_id, space_id, least) select %(group)s, space_id, '[[5]]' from dropped"""


@pytest.mark.conforms("E39", "S5")
@pytest.mark.parametrize(
    "look", [renew_once, lambda house: apply_retention(house.conn)], ids=["a renewal", "retention"]
)
def test_looks_cost_nothing_per_dropped_space(house: GroupWorld, look: Callable[[GroupWorld], object]) -> None:
    conn, found = house.conn, []
    house.be_atomic()
    for times in (10, 1000):
        conn.execute(DROPPED, {"times": times, "group": house.group.group_id})
        look(house)
        conn.execute("vacuum analyze space, consumed_frontier, generation, stream, lending")
        before = rows_read(conn)
        look(house)
        found.append(rows_read(conn) - before)
    assert found[1] <= found[0] * 1.2 + 20, found


# Groups of the same subscription that were deleted long ago, and streams that a live one has finished.
DELETED = """
with deleted as (
  insert into consumer_group (kind, name, filter, deleted_at)
  select kind, name, filter, now() - interval '2 days' from consumer_group, generate_series(1, %(times)s)
   where deleted_at is null returning group_id),
led as (
  insert into leadership (leadership_id, node, incarnation, term, expires_at)
  select group_id, 'n1', 'i1', 1, 'epoch' from deleted)
insert into lending (group_id, stream_id, status, position)
select %(group)s, group_id + 1000000, 'finished', 0 from deleted"""


@pytest.mark.conforms("E39")
@pytest.mark.parametrize(
    "look",
    [
        lambda house: read_desired_state(house.conn, NODE),
        lambda house: group_lifecycle.set_revoked_at(house.conn, [house.group.group_id], None),
        lambda house: delete_old_session_epochs(house.conn, 3600),
        lambda house: read_deleted_groups(house.conn),
    ],
    ids=["a node's desired state", "what was revoked", "epochs of sessions", "a refused read"],
)
def test_looks_cost_nothing_per_deleted_group(house: GroupWorld, look: Callable[[GroupWorld], object]) -> None:
    conn, found = house.conn, []
    register(conn, NODE, 60, 1)
    house.renew()
    next_session_epoch(conn, GROUP, "etl")
    conn.execute("update session_epoch set drawn_at = now() - interval '2 days'")
    conn.execute("update lending set session = 'etl', status = 'held'")
    for times in (10, 3000):
        conn.execute(DELETED, {"times": times, "group": house.group.group_id})
        conn.execute("vacuum analyze consumer_group, leadership, lending, lending_history, session_epoch")
        look(house)
        before = rows_read(conn)
        look(house)
        found.append(rows_read(conn) - before)
    assert found[1] <= found[0] * 1.2 + 20, found
    assert conn.execute("select from session_epoch where session = 'etl'").rowcount, "it has a stream"


@pytest.mark.conforms("S5")
def test_epochs_of_a_dropped_space_come_at_its_end(house: GroupWorld) -> None:
    """Once, when the group has consumed all of it."""
    conn = house.conn
    create_space(conn, "eu", "eu/#", shards=1)
    house.be_atomic()
    stream = stream_of(conn, "eu")
    put(conn, stream, b"0")
    conn.execute("update space set epoch_dimensions = 1, lower_frontier = '[[5]]' where name = 'eu'")
    drop_space(conn, "eu")
    conn.execute("update space set dropped_at = dropped_at - interval '2 days' where name = 'eu'")

    def received() -> list[tuple[str, LowerFrontier]]:
        return [(each.space, each.consumed) for each in house.renew().epochs]

    assert received() == []
    house.consume(stream)
    assert received() == [("eu", LowerFrontier(((5,),)))]
    assert [received(), received()] == [[], []]


def begun_and_deleted(house: GroupWorld, held: Epoch, *begun: Epoch) -> EpochBlocks:
    """A space of which `A` holds `held`; the rows of the streams in which these have begun, each in its own, are
    deleted."""
    create_space(house.conn, "own", "own/#", shards=1)
    story = EpochBlocks(house.conn, "own")
    story.advance(A, held)
    for epoch in begun:
        (stream,) = story.streams()
        story.publish(A, epoch)
        rollover(house.conn, "own")
        house.forget(stream, had_messages=True)
        assert not house.conn.execute("select from stream where stream_id = %s", (stream,)).rowcount
    return story


@pytest.mark.conforms("S2", "S5", "E39")
def test_nobody_gets_the_rest_of_a_deleted_epoch(house: GroupWorld) -> None:
    story, conn, found = begun_and_deleted(house, (7,), (7,)), house.conn, {}
    for start in (StartingPosition.LATEST, StartingPosition.EARLIEST):
        atomic = GroupOptions(start, atomic=True)
        group = house.store.declare_group(Subscription.parse(f"$share/{start.policy}/own/#"), atomic)
        first = "select least from consumed_frontier where group_id = %s and space_id = %s"
        found[start.policy] = conn.execute(first, (group.group_id, story.space)).fetchall()
    assert found == {"latest": [([[8]],)], "earliest": [([[8]],)]}
    readers = [EpochTailReader(conn, ALL, begin) for begin in ("latest", "active", "earliest")]
    story.publish(A, 7, 8)
    story.advance(A, 9)
    assert [seen(reader.read_available(conn)) for reader in readers] == [{(8,): 1}] * 3


def expire(conn: Connection, space_id: int) -> None:
    conn.execute("update capability set expires_at = clock_timestamp()")
    assert list(epoch_leases.expire(conn)) == [(space_id, "a")]
    assert conn.execute("select upper_frontier from capability").fetchall() == [([[9]],)]


@pytest.mark.conforms("S9", "E39")
@pytest.mark.parametrize(
    "end",
    [
        lambda conn, space_id: epoch_leases.release(conn, space_id, A),
        expire,
        lambda conn, _: drop_space(conn, "own"),
    ],
    ids=["closed", "expired", "dropped"],
)
def test_epochs_of_deleted_streams_are_completed(house: GroupWorld, end: Callable[[Connection, int], None]) -> None:
    space_id = begun_and_deleted(house, (5,), (9,)).space
    end(house.conn, space_id)
    assert epoch_leases.read_lower_frontier(house.conn, space_id) == LowerFrontier(((10,),))


@pytest.mark.conforms("S9", "E39")
def test_an_epoch_of_a_deleted_stream_is_not_reused(house: GroupWorld) -> None:
    space_id = begun_and_deleted(house, (1, 1), (1, 5), (2, 4), (1, 3), (2, 4)).space
    epoch_leases.release(house.conn, space_id, A)
    for epoch in ((1, 5), (2, 4)):
        with pytest.raises(EpochAlreadyCompleted):
            epoch_leases.hold(house.conn, space_id, B, [epoch])
    stored = "select lost_upper_frontier from space where lost_upper_frontier is not null"
    assert house.conn.execute(stored).fetchall() == [([[1, 5], [2, 4]],)], "the greatest ones, of that space"


@pytest.mark.conforms("S9", "E39")
@pytest.mark.parametrize("had_messages", [False, True])
def test_epochs_are_rerouted_past_deleted_streams(house: GroupWorld, had_messages: bool) -> None:
    with Publisher(house.url, space="default") as publisher:
        publisher.advance(7)
        if had_messages:
            publisher.in_epoch(7).publish("t", b"0").result(60)
        former = house.ended()
        house.forget(former, had_messages)
        assert publisher.in_epoch(7).publish("t", b"1").result(60).stream == house.open_stream() != former


OTHER_PARTITIONS = """
select generation_id from pg_locks join generation on relation = to_regclass('block_' || generation_id)
  join space using (space_id) where pid = pg_backend_pid() and name = 'other'"""


def end_others(conn: Connection) -> None:
    create_space(conn, "other", "other/#", shards=1)
    for _ in range(5):
        put(conn, stream_of(conn, "other"), b"0", topic="other/t")
        rollover(conn, "other")


def reset_to_epoch(conn: Connection) -> None:
    plan_reset(conn, group_lifecycle.get_live(conn, OWN), ResetTarget.at_epoch([1]))


def begin_atomic_group(conn: Connection) -> None:
    options = GroupOptions(StartingPosition("offset", 1), atomic=True)
    group_lifecycle.create(conn, Subscription.parse("$share/atomic/own/#"), options, None)


@pytest.mark.conforms("E39")
@pytest.mark.parametrize(
    "look",
    [
        lambda conn, stream, _: message_log.fetch(conn, stream, 0),
        lambda conn, stream, generation: read_block_summaries(conn, stream, generation, 0),
        lambda conn, stream, _: message_log.offset_at_time(conn, stream, datetime.now(UTC)),
        lambda conn, stream, generation: conn.execute("select appended_at(%s, %s, 0)", (generation, stream)),
        lambda conn, stream, generation: message_log.limit_ranges_by_size(conn, [(stream, generation, 0, 2)], 1),
        lambda conn, *_: reset_to_epoch(conn),
        lambda conn, *_: begin_atomic_group(conn),
    ],
    ids=["messages", "marks of blocks", "positions by time", "when appended", "sizes", "a reset", "a new group"],
)
def test_reading_a_stream_locks_no_other_generation(
    house: GroupWorld, look: Callable[[Connection, int, int], object]
) -> None:
    """A plan for any generation would lock all of them, and a server has not so many locks."""
    end_others(house.conn)
    house.store.declare_group(OWN, GroupOptions())
    stream = house.ended(b"0", b"1")
    generation = generation_of(house.conn, stream)
    with house.conn.transaction():
        for _ in range(20):  # the server makes such a plan at the sixth
            look(house.conn, stream, generation)
        assert house.conn.execute(OTHER_PARTITIONS).fetchall() == []


@pytest.mark.conforms("E39")
def test_moving_payloads_locks_no_other_generation(
    house: GroupWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does deleting objects, a look for those at a former location, or having payloads back."""
    conn = house.conn
    space = alter_space(conn, "default", payload_location=LocalWorld(tmp_path).uri)
    end_others(conn)
    stream = house.ended(*(os.urandom(BLOCK_BYTES) for _ in range(12)))  # not to be merged
    generation = generation_of(conn, stream)
    for module in (tiering, payload_restore):
        monkeypatch.setattr(module, "BATCH_BLOCKS", 1)
    with conn.transaction():
        assert tier_space(conn, space).blocks == 12
        ((uri, end),) = conn.execute(f"select uri, end_offset from block_{generation} limit 1").fetchall()
        mark_for_deletion(conn, BlockOwner(space.space_id, generation, stream), [(uri, end)], was_named=False)
        assert delete_expired_objects(conn) == 0, "a block names it"
        conn.execute("update space set payload_location = null")
        assert any("nothing is moved" in finding.detail for finding in location_checks.check_locations(conn))
        assert payload_restore.restore_payloads(conn, space.space_id) == 12
        assert conn.execute(OTHER_PARTITIONS).fetchall() == []


@pytest.mark.conforms("E39")
@pytest.mark.parametrize(
    "read",
    [
        lambda conn, stream, _: message_log.fetch(conn, stream, 0).position,
        lambda conn, stream, generation: len(read_block_summaries(conn, stream, generation, 0).blocks),
    ],
    ids=["messages", "marks of blocks"],
)
def test_a_partition_that_cannot_be_named(house: GroupWorld, read: Callable[[Connection, int, int], int]) -> None:
    """What is read is read by the partition's name: not one that one may not name, or that is dropped."""
    house.conn.execute("create role reader")
    try:
        house.conn.execute("grant usage on schema sublet to reader")
        house.conn.execute("grant select on all tables in schema sublet to reader")
        house.conn.execute("grant execute on function payload_locations_of to reader")
        stream = house.ended(b"0")
        asked = "select generation_id from stream where stream_id = %s"
        ((generation,),) = house.conn.execute(asked, (stream,)).fetchall()
        may = "select has_table_privilege('reader', %s, 'select')"
        assert house.conn.execute(may, (f"block_{generation}",)).fetchone() == (True,)
        house.conn.execute("set role reader")
        assert [read(house.conn, stream, generation) for _ in range(3)] == [1] * 3
        house.conn.execute("reset role")
        house.conn.execute(f"revoke select on block_{generation} from reader")
        house.conn.execute("set role reader")
        assert [read(house.conn, stream, generation) for _ in range(3)] == [1] * 3
    finally:
        house.conn.execute("reset role")
        house.conn.execute("drop owned by reader")
        house.conn.execute("drop role reader")
    with closing(connect(house.url)) as inside, closing(connect(house.url)) as outside:
        inside.autocommit = outside.autocommit = True
        assert [read(each, stream, generation) for each in (inside, outside) for _ in range(3)] == [1] * 6
        with inside.transaction():
            inside.execute(f"drop table block_{generation}")
            with pytest.raises(PositionGone):
                read(inside, stream, generation)
            assert inside.execute("select 1").fetchone() == (1,)
        with pytest.raises(PositionGone):
            read(outside, stream, generation)
