"""A primary dies, and a standby is promoted that lacks what was committed last: two real servers, streaming
replication, asynchronous, one address for all clients. Nobody passes silently over a message of the new timeline."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.node_client.feed_client import Feed
from sublet_borrower.settings import BorrowerSettings
from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    GrantLost,
    PositionBeyondHead,
    ProducerFenced,
    UnknownOutcome,
)
from sublet_protocol.domain.subscriptions import Bookmark, Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.bootstrap.embedded import EmbeddedPostgres
from sublet_storage.bootstrap.embedded.binaries import find_binaries
from sublet_storage.bootstrap.embedded.data_directory_and_user import chown_to, find_server_user
from sublet_storage.bootstrap.migrate import migrate
from sublet_storage.db.connect import connect
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.admin import progress_transfer, reset_transaction
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.consumer_progress import next_session_epoch
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.lending_row import is_of_former_timeline
from sublet_storage.groups.model.records import AdvancePosition, GroupWrites, LendingChange
from sublet_storage.log.append import (
    AppendOutcome,
    BlockAppend,
    ProducerIdentity,
    ProducerStamp,
    append,
    register_again,
    register_producer,
)
from sublet_storage.log.fetch import read_heads
from sublet_storage.producer import Publisher
from sublet_storage.readers.tail import MultiStreamReader, Tail
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import reshard, rollover
from tests.contract.group_world import LEASE_S, ONE, SHARE, TWO, grant
from tests.integration.feed_kit import address_of
from tests.integration.log_kit import block, kill_postgres
from tests.integration.query_kit import Checkpoint, Died
from tests.integration.test_guard import Guarded
from tests.integration.test_stream_reader import publish
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet
from tests.postgres_proxy import PostgresProxy
from tests.support.streams import open_streams

SETTINGS = BorrowerSettings().scaled(SPEED)


@dataclass
class Pair:
    """A primary, a standby that follows it, and the address `url` of whoever is primary."""

    primary: EmbeddedPostgres
    standby: EmbeddedPostgres
    clients: PostgresProxy
    replication: PostgresProxy

    @property
    def url(self) -> str:
        return self.clients.url

    def replicated(self) -> None:
        """Wait until the standby has all there is."""
        first = psycopg.connect(self.primary.url, autocommit=True)
        second = psycopg.connect(self.standby.url, autocommit=True)
        with first, second:
            (end,) = first.execute("select pg_current_wal_insert_lsn()::text").fetchall()[0]
            behind = "select pg_last_wal_replay_lsn() >= %s::pg_lsn"
            eventually(lambda: second.execute(behind, (end,)).fetchall()[0][0], WAIT_S)

    def part(self) -> None:
        """The standby gets nothing any more."""
        self.replicated()
        self.replication.go_away()

    def fail_over(self) -> None:
        """The primary dies, the standby takes over."""
        kill_postgres(self.primary.data_dir)
        self.clients.go_away()
        with psycopg.connect(self.standby.url, autocommit=True) as standby:
            assert standby.execute("select pg_promote()").fetchall() == [(True,)]
        self.clients.lead_to(self.standby.url)
        self.clients.resume()


@pytest.fixture
def pair(server_home: Path) -> Iterator[Pair]:
    primary = EmbeddedPostgres(server_home / "primary")
    migrate(primary.start())
    with PostgresProxy(primary.url) as replication, PostgresProxy(primary.url) as clients:
        user = find_server_user(primary.data_dir)
        standby = EmbeddedPostgres(server_home / "standby")
        standby.data_dir.mkdir(mode=0o755)
        copy = standby.data_dir / "pg"
        source = urlsplit(replication.url)
        basebackup = find_binaries(primary.data_dir, user) / "pg_basebackup"
        where = f"host={source.hostname} port={source.port} user={source.username} sslmode=disable"
        command = [str(basebackup), "-D", str(copy), "-d", where, "-R", "-c", "fast", "-X", "stream"]
        subprocess.run(command, check=True, capture_output=True)
        for path in [copy, *copy.rglob("*")]:
            chown_to(path, user)
        chown_to(standby.data_dir, user)
        with (copy / "postgresql.conf").open("a") as settings:
            settings.write("max_standby_streaming_delay = -1\n")  # a query of ours is never broken off by the replay
        standby.start()
        yield Pair(primary, standby, clients, replication)
    for server in (primary, standby):
        with contextlib.suppress(DatabaseUnreachable):
            server.start()  # one that was killed has left shared memory, which it removes when it starts
            server.stop()


@pytest.fixture
def database(pair: Pair) -> str:
    """Return the database for the node of `fleet`."""
    return pair.url


@pytest.mark.conforms("P10")
@pytest.mark.long
def test_the_former_timeline_is_fenced(pair: Pair) -> None:
    groups = PostgresGroupStore(pair.url)
    with connect(pair.url) as conn:
        reshard(conn, "default", 1)
        (stream,) = (each.stream_id for each in open_streams(conn))
        older = register_producer(conn, "p")
        group = groups.open_group(SHARE)
        term = groups.claim(group.group_id, ONE, LEASE_S * 60).term

        def write(*entries: LendingChange) -> None:
            (result,) = groups.commit([GroupWrites(group.group_id, term, entries)])
            assert not result.has_stale_term

        write(grant(stream))
        held = groups.load(group.group_id, term)[0]
        append(conn, [BlockAppend(stream, block(*[b"kept"] * 10))])
        write(AdvancePosition(stream, held.grant_id, 6))
        tail = MultiStreamReader(conn, TopicFilter.parse("#"), "earliest")
        pair.part()
        newer = register_producer(conn, "p")
        append(conn, [BlockAppend(stream, block(*[b"lost"] * 10), ProducerStamp("p", newer, 1))])
        write(AdvancePosition(stream, held.grant_id, 15))
        for place in tail.readable_cursors():
            tail.read(conn, place)
        watching = Tail(conn, TopicFilter.parse("#"))
        exported = progress_transfer.progress_from_json(
            json.loads(json.dumps(progress_transfer.progress_to_json(progress_transfer.read_progress(conn, group))))
        )
    with pytest.raises(DatabaseUnreachable, match="is a standby"):
        connect(pair.standby.url)
    pair.fail_over()

    assert held.grant_key is not None
    ours = (group.group_id, stream, held.grant_id, held.grant_key)
    with connect(pair.url) as conn:
        watching.conn = conn
        with pytest.raises(PositionBeyondHead, match=f"stream {stream}: offset 20 is beyond the head 10"):
            next(watching.pages())
        append(conn, [BlockAppend(stream, block(*[b"new"] * 20))])
        with pytest.raises(
            PositionBeyondHead, match=r"bookmark is of timeline [0-9]+/00000001 .*, and this is [0-9]+/00000002"
        ):
            MultiStreamReader(conn, TopicFilter.parse("#"), Bookmark.parse(str(tail.bookmark)))
        with pytest.raises(PositionBeyondHead, match=r"the file is of timeline [0-9]+/00000001"):
            progress_transfer.create_from_progress(
                conn, Subscription.parse("$share/copy/#"), group.options, exported, "imported"
            )
        offsets = {place.stream_id: place.position for place in exported.positions}
        with pytest.raises(PositionBeyondHead, match=r"the file is of timeline [0-9]+/00000001"):
            reset_transaction.plan_reset(conn, group, ResetTarget.offsets(offsets, exported.timeline))
        assert reset_transaction.plan_reset(conn, group, ResetTarget.offsets(offsets)), (
            "who says that nothing was lost goes on"
        )
        unnamed = Bookmark(tail.bookmark.known, tail.bookmark.offsets)
        assert MultiStreamReader(conn, TopicFilter.parse("#"), unnamed).readable_cursors(), (
            "who says that nothing was lost goes on"
        )
        tail.update_heads(read_heads(conn, [stream]))
        with pytest.raises(PositionBeyondHead, match="another timeline since the reading began"):
            tail.read(conn, tail.readable_cursors()[0])
        with pytest.raises(GrantLost), conn.transaction():
            consumer_progress.advance(conn, *ours, 18)
        with pytest.raises(DatabaseUnreachable):
            groups.renew(ONE, {group.group_id: term}, LEASE_S)  # over the connection to the one that is dead
        assert groups.renew(ONE, {group.group_id: term}, LEASE_S) == frozenset(), "its lease has not run out"
        claim = groups.claim(group.group_id, TWO, LEASE_S)
        assert claim.node == TWO
        with pytest.raises(GrantLost), conn.transaction():
            consumer_progress.advance(conn, *ours, 18)
        (row,) = groups.load(group.group_id, claim.term)
        assert (row.status, row.position) == ("free", 6)
        last = groups.history(group.group_id)[-1]
        assert (last.position, last.redelivery_end, last.reason) == (
            6,
            30,
            "the database has gone over to another timeline",
        )
        register_again(conn, ProducerIdentity("p", newer))
        assert (
            append(conn, [BlockAppend(stream, block(b"x"), ProducerStamp("p", older, 1))])[0].outcome
            is AppendOutcome.FENCED
        )
    groups.close()


AHEAD_S = 86_400.0


@pytest.mark.conforms("E13", "E34", "P10")
@pytest.mark.parametrize(("led", "restored"), [(True, False), (False, False), (False, True)])
@pytest.mark.long
def test_a_standby_a_day_behind_gives_no_id_twice(pair: Pair, led: bool, restored: bool) -> None:
    """It has neither what was given last nor a clock that says so: also of a group, a stream and a producer of which it
    has nothing yet. `led`: it knows of a leader. `restored`: the database comes from another server, and
    nobody was elected here before what it lacks."""

    def given(url: str, ahead_s: float) -> list[int]:
        """A term, a grant id, a session epoch and an incarnation, by a clock that is so far ahead."""
        groups = PostgresGroupStore(url, clock=lambda: round((time.time() + ahead_s) * 1_000_000))
        with connect(url) as conn:
            term = groups.claim(group.group_id, ONE, LEASE_S).term
            (result,) = groups.commit([GroupWrites(group.group_id, term, (grant(stream),))])
            (granted,) = [answer.lending for answer in result.results if answer.lending is not None]
            conn.execute(
                "update session_epoch set last = last + %s", (ahead := round(ahead_s * 1_000_000),)
            )  # as if drawn by that clock
            groups.close()
            return [
                term,
                granted.grant_id,
                next_session_epoch(conn, SHARE, "etl"),
                register_producer(conn, "p") + ahead,
            ]

    with connect(pair.url) as conn:
        reshard(conn, "default", 1)
        (stream,) = (each.stream_id for each in open_streams(conn))
        if restored:
            conn.execute("update timeline set (name, number) = ('1/00000007', 7)")
        next_session_epoch(conn, SHARE, "etl")
        groups = PostgresGroupStore(pair.url)
        group = groups.open_group(SHARE)
        if led:
            groups.release(TWO, {group.group_id: groups.claim(group.group_id, TWO, LEASE_S).term})
        groups.close()
        append(conn, [BlockAppend(stream, block(b"x"))])
    pair.part()
    lost = given(pair.url, AHEAD_S)
    pair.fail_over()
    groups = PostgresGroupStore(pair.url)
    term = groups.claim(group.group_id, ONE, LEASE_S).term
    rows = groups.load(group.group_id, term)
    assert [is_of_former_timeline(row.grant_id, term) for row in rows] == [True], "and may have been granted there"
    groups.close()
    assert [new > old for new, old in zip(given(pair.url, 0.0), lost, strict=True)] == [True] * 4
    with connect(pair.url) as conn:
        assert register_producer(conn, "q") > lost[-1], "one that it did not know"


@pytest.mark.conforms("P10")
@pytest.mark.parametrize("transport", ["database", pytest.param("nodes", marks=pytest.mark.long)])
def test_consumers_and_publishers_go_on(pair: Pair, fleet: Fleet, transport: str) -> None:
    """And pass over nothing of the new timeline: what is published there before its streams are granted anew comes in
    its order to a session that polls at once."""
    nodes = [address_of(fleet.nodes["n1"])] if transport == "nodes" else None
    named: dict[str, Any] = {"transport": transport, "starting_position": "earliest", "settings": SETTINGS}
    with (
        Publisher(pair.url, producer="p", delivery_timeout_s=WAIT_S) as publisher,
        Session("$share/g/#", None if nodes else pair.url, nodes=nodes, **named) as session,
    ):

        def go_through(word: str, count: int) -> None:
            wanted = [f"{word} {number}".encode() for number in range(count)]
            seen: list[bytes] = []
            for value in wanted:
                publisher.publish("t", value)
            publisher.flush()

            def is_consumed() -> bool:
                if (batch := session.poll(1.0)) is not None:
                    values = batch.table.column("value").to_pylist()
                    seen.extend(value for value in values if value in wanted and value not in seen)
                return len(seen) == count

            eventually(is_consumed, WAIT_S, lambda: f"missing: {sorted(set(wanted) - set(seen))}")
            assert seen == wanted

        go_through("kept", 10)
        pair.part()
        go_through("lost", 10)
        pair.fail_over()
        go_through("new", 30)


@pytest.mark.conforms("P10")
@pytest.mark.long
def test_a_publisher_whose_stream_was_lost_is_fenced(pair: Pair, fleet: Fleet) -> None:
    """A stream that was opened last is missing on the new timeline, and its number may become another's."""
    address = address_of(fleet.nodes["n1"])
    pair.part()
    with connect(pair.url) as conn:
        rollover(conn, "default")
    publisher = Publisher(pair.url, delivery_timeout_s=WAIT_S)
    with Feed(address, node_timeout_s=WAIT_S) as feed:
        pages = feed.follow(starting_position="earliest")
        publisher.publish("t", b"lost").result()
        assert next(pages).column("value").to_pylist() == [b"lost"]
        pair.fail_over()
        with pytest.raises(ProducerFenced, match="another timeline, where stream"):
            publisher.publish("t", b"new").result(WAIT_S)
        with pytest.raises(PositionBeyondHead, match="a standby was promoted"):
            next(pages)
    with pytest.raises(ProducerFenced):
        publisher.close()


@pytest.mark.conforms("P10")
@pytest.mark.long
def test_a_publisher_outlives_its_deleted_streams(pair: Pair) -> None:
    """Nothing is lost: they were closed while it was idle, and housekeeping has deleted their rows."""
    with Publisher(pair.url, space="default", delivery_timeout_s=WAIT_S) as publisher, connect(pair.url) as conn:
        former = open_streams(conn)[0].stream_id
        rollover(conn, "default")
        clean = EmptyGenerationCleaner(rest_s=0)

        def is_deleted() -> bool:
            apply_retention(conn)
            clean(conn)
            return not conn.execute("select from stream where stream_id = %s", (former,)).fetchall()

        eventually(is_deleted, WAIT_S)
        pair.replicated()
        pair.fail_over()
        assert publisher.publish("t", b"new").result(WAIT_S).offset == 0
        publisher.in_epoch(1).publish("t", b"in an epoch").result(WAIT_S)


@pytest.mark.conforms("E35", "P10")
def test_a_lost_transaction_is_not_taken_for_done(pair: Pair, tmp_path: Path) -> None:
    """Of a single message: where it begins is one before where it ends. The node reaches the primary by another way."""
    fleet = Fleet(pair.primary.url, tmp_path)
    fleet.node("n1")
    with (
        contextlib.closing(fleet),
        connect(pair.url) as conn,
        Session("$share/g/#", pair.url, starting_position="earliest", settings=SETTINGS, auto_ack=False) as session,
    ):
        reshard(conn, "default", 1)
        append(conn, [BlockAppend(open_streams(conn)[0].stream_id, block(b"x"))])
        batch = session.poll(WAIT_S)
        assert batch is not None
        pair.part()
        pair.clients.cut_commit(resume=False, arrives=False)
        with pytest.raises(UnknownOutcome), batch.transaction() as output:
            output.execute("create table public.output ()")
        pair.fail_over()
        with pytest.raises(GrantLost), batch.transaction():
            pass
        assert not batch.committed


@pytest.mark.conforms("P10", "E27")
@pytest.mark.long
def test_a_guards_lost_commit_is_not_taken_for_done(pair: Pair, tmp_path: Path) -> None:
    """The standby lacks the plan of the batch, too, and has the one before, which is done."""
    (nodes := tmp_path / "nodes").mkdir()
    checkpoint, fleet = Checkpoint(), Fleet(pair.primary.url, nodes)
    fleet.node("n1")
    with contextlib.closing(fleet), connect(pair.url) as conn:
        reshard(conn, "default", 1)
        conn.execute("create table public.sunk (value bytea)")
        run = Guarded(checkpoint, pair.url, tmp_path)
        publish(pair.url, 0, 10)
        run.until(10)
        publish(pair.url, 10, 10)
        pair.part()
        with pytest.raises(Died):
            run.until(20, die="read")
        pair.clients.cut_commit(resume=False, holds=True)
        with ThreadPoolExecutor(1) as pool:
            written = pool.submit(run.sink, *checkpoint.runs[-1])
            assert pair.clients.was_cut.wait(WAIT_S)
            pair.fail_over()
            with pytest.raises(UnknownOutcome, match=r"another range than \[10, 20\)"):
                written.result(WAIT_S)
        run.stop()
