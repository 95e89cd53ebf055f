"""Groups that are atomic: sessions in this process, real nodes, a real Postgres."""

from __future__ import annotations

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest

from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.epoch_frontiers import ConsumedFrontier, GroupFrontier, LowerFrontier
from sublet_protocol.domain.errors import GrantLost, UnknownOutcome, UsageError
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.db.connect import connect
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.node_directory import list_live_nodes
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space, drop_space
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet
from tests.postgres_proxy import PostgresProxy

FAST = BorrowerSettings().scaled(SPEED)
_numbers = itertools.count(1)


class AtomicWorld:
    """A space, and a group of its own, at a node that other tests use too."""

    def __init__(self, url: str) -> None:
        self.url, self.space = url, f"s{next(_numbers)}"
        self.group, self.group_id = f"$share/g/{self.space}/#", 0
        self.connection, self.store = connect(url), PostgresGroupStore(url)
        create_space(self.connection, self.space, f"{self.space}/#")
        self.connection.execute("create table if not exists public.seen (number text); truncate public.seen")

    def close(self) -> None:
        self.store.close()
        self.connection.close()

    def declare(self, start: str = "latest") -> None:
        options = GroupOptions(starting_position=StartingPosition.parse(start), atomic=True)
        self.group_id = self.store.declare_group(Subscription.parse(self.group), options).group_id

    def publisher(self, **how: Any) -> Publisher:
        return Publisher(self.url, space=self.space, **how)

    def publish(self, publisher: Publisher, epoch: int | tuple[int, int], count: int = 10) -> None:
        for number in range(count):
            publisher.in_epoch(epoch).publish(f"{self.space}/t", b"%d" % number, key=b"%d" % number)
        publisher.flush()

    def one_stream(self, messages: int) -> None:
        """Epoch 1, completed, in one stream, in blocks of 10 messages."""
        self.declare("earliest")
        with self.publisher(block_messages=10) as publisher:
            for number in range(messages):
                publisher.in_epoch(1).publish(f"{self.space}/t", b"%d" % number, key=b"same").result()
            publisher.advance(2)

    def session(self, url: str = "", **arguments: Any) -> Session:
        return Session(self.group, url or self.url, settings=FAST, **arguments)

    def reader(self, url: str = "", **arguments: Any) -> Reader:
        announced: list[GroupFrontier] = []
        return Reader(self.session(url, on_epochs_consumed=announced.append, **arguments), announced)

    def rows(self) -> list[tuple[int, Any]]:
        moved = "(position > 0 or consumed ->> 'upto' <> '0')"
        statement = f"select position, consumed from lending where group_id = %s and {moved} order by stream_id"
        return self.connection.execute(statement.encode(), (self.group_id,)).fetchall()

    def grant_anew(self, batch: Batch) -> None:
        statement = "update lending set grant_id = grant_id + 1 where stream_id = %s"
        self.connection.execute(statement, (batch.stream_id,))


class Reader:
    """A session, the batches that it was given, and what was announced to it."""

    def __init__(self, session: Session, announced: list[GroupFrontier]) -> None:
        self.session, self.announced = session, announced
        self.batches: list[Batch] = []

    def until(self, fact: Callable[[], bool]) -> None:
        def read_on() -> bool:
            batch = self.session.poll(0.05)
            self.batches += [batch] if batch is not None else []
            return fact()

        eventually(read_on, WAIT_S, lambda: f"given {self.given()}, announced {self.announced}")

    def given(self) -> dict[int | None, int]:
        """Return {first number of an epoch: number of delivered messages}."""
        epochs = (epoch for batch in self.batches for epoch in batch.table.column("epoch").to_pylist())
        return Counter(None if epoch is None else epoch[0] for epoch in epochs)

    def reached(self) -> LowerFrontier | None:
        return self.announced[-1].consumed if self.announced else None

    def gets(self, given: dict[int | None, int], reached: tuple[int, ...] | None = None) -> None:
        """Read until it has been given these, and the group has consumed all epochs before that one."""
        consumed = None if reached is None else LowerFrontier((reached,))
        self.until(lambda: self.given() == given and consumed in (None, self.reached()))


@pytest.fixture
def world(shared_fleet: Fleet) -> Iterator[AtomicWorld]:
    with contextlib.closing(AtomicWorld(shared_fleet.url)) as world:
        yield world


def test_completed_epochs_come_and_are_announced(world: AtomicWorld) -> None:
    world.declare()
    reader = world.reader()
    with reader.session, world.publisher() as publisher:
        publisher.advance(7)
        world.publish(publisher, 7, 100)
        world.publish(publisher, 8, 100)
        world.publish(publisher, 7, 50)
        publisher.publish(f"{world.space}/t", b"in no epoch").result()
        reader.gets({None: 1})
        publisher.advance(8)
        reader.gets({None: 1, 7: 150}, reached=(8,))
        publisher.advance(9)
        reader.gets({None: 1, 7: 150, 8: 100}, reached=(9,))
        publisher.advance(20)
        reader.gets({None: 1, 7: 150, 8: 100}, reached=(20,))
    again = world.reader()
    with again.session, world.publisher() as publisher:
        publisher.advance(20)
        world.publish(publisher, 20)
        publisher.advance(21)
        again.gets({20: 10})


@pytest.mark.conforms("S2")
def test_a_live_group_gets_the_epochs_after_it(world: AtomicWorld) -> None:
    with world.publisher() as publisher:
        for epoch in (0, 1, 2, 3, 5):
            world.publish(publisher, epoch)
        publisher.advance(3)
        world.declare()
        reader = world.reader()
        with reader.session:
            reader.gets({}, reached=(6,))
            for epoch in (3, 4, 5, 6, 7, 8):
                world.publish(publisher, epoch)
            publisher.advance(8)
            reader.gets({6: 10, 7: 10})
            publisher.advance(9)
            reader.gets({6: 10, 7: 10, 8: 10})


def test_epochs_of_two_numbers_come_in_product_order(world: AtomicWorld) -> None:
    world.declare("earliest")
    reader = world.reader()
    with reader.session, world.publisher() as publisher:
        for epoch in ((0, 0), (1, 0), (0, 1), (1, 1)):
            world.publish(publisher, epoch)
        publisher.advance((0, 1))
        reader.gets({0: 10, 1: 10})
        assert {epoch[1] for batch in reader.batches for epoch in batch.table.column("epoch").to_pylist()} == {0}
        publisher.advance((1, 1))
        reader.gets({0: 20, 1: 10}, reached=(1, 1))


@pytest.mark.conforms("S10")
def test_a_group_that_is_not_atomic_gets_all_at_once(world: AtomicWorld) -> None:
    with world.publisher() as publisher:
        world.publish(publisher, 7)
        with world.session(starting_position="earliest") as session:
            found: list[Batch] = []
            while sum(map(len, found)) < 10:
                batch = session.poll(WAIT_S)
                assert batch is not None
                found.append(batch)
        assert not any(batch.is_atomic or batch.completes_epochs for batch in found)


def test_output_and_epochs_are_committed_together(world: AtomicWorld) -> None:
    world.one_stream(20)
    reader = world.reader(auto_ack=False)
    reader.until(lambda: len(reader.batches) == 1)
    (batch,) = reader.batches
    assert batch.completes_epochs
    values = [value.decode() for value in batch.table.column("value").to_pylist()]
    with batch.transaction() as output:
        output.execute("insert into public.seen select unnest(%s::text[])", (values,))
    assert world.rows() == [(20, {"upto": 20, "least": [[2]]})], "before anything is reported"
    with pytest.raises(UsageError, match="committed already"), batch.transaction():
        pass
    grant = (world.group_id, batch.stream_id, batch.grant_id, batch.grant_key)
    earlier = ConsumedFrontier(5, LowerFrontier(((9,),)))
    for consumed in (batch.consumed_frontier, earlier):
        with pytest.raises(GrantLost):
            consumer_progress.advance(world.connection, *grant, batch.next_offset, consumed=consumed)
    odd = '{"upto": "20", "least": [[2]]}', '{"upto": 20, "least": [["2"]]}', '{"upto": 20, "least": [[null]]}'
    for text in odd:  # leaders read the row: a text in it ended each of their writes for the group
        given = (*grant[:3], batch.next_offset, batch.grant_key.reveal(), text)
        with pytest.raises(psycopg.Error, match="is not held under grant"):
            world.connection.execute("select advance(%s, %s, %s, %s, %s, %s::jsonb)", given)
    reader.session.close()


@pytest.mark.conforms("E13")
def test_a_commit_under_a_past_grant_stays_unknown(world: AtomicWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one without an answer nobody says that nothing was written, when its stream was granted anew since."""
    world.one_stream(20)
    with PostgresProxy(world.url) as proxy:
        reader = world.reader(proxy.url, auto_ack=False)
        reader.until(lambda: len(reader.batches) == 1)
        (batch,) = reader.batches

        def is_unknown_to_another_server(*_: object) -> None:
            world.grant_anew(batch)

        monkeypatch.setattr(consumer_progress, "is_committed", is_unknown_to_another_server)
        with pytest.raises(UnknownOutcome, match="granted anew since"), batch.transaction():
            proxy.cut_commit(resume=True)
        reader.session.close()


@pytest.mark.conforms("E13", "E35")
def test_a_valid_grant_shows_what_was_committed(world: AtomicWorld) -> None:
    """Of two streams in a transaction without an answer, one is granted anew before it is found out."""
    world.declare("earliest")
    with world.publisher() as publisher:
        world.publish(publisher, 1, 20)
        publisher.advance(2)
    with PostgresProxy(world.url) as proxy:
        reader = world.reader(proxy.url, auto_ack=False)
        reader.until(
            lambda: len({batch.stream_id for batch in reader.batches}) > 1 and sum(reader.given().values()) == 20
        )
        batches = reader.batches
        proxy.cut_commit(resume=False)
        with pytest.raises(UnknownOutcome), reader.session.transaction(*batches) as output:
            output.execute("insert into public.seen values ('once')")
        world.grant_anew(batches[0])
        proxy.resume()
        with reader.session.transaction(*batches) as output:
            output.execute("insert into public.seen values ('twice')")
        assert all(batch.committed for batch in batches)
        assert world.connection.execute("select number from public.seen").fetchall() == [("once",)]
        reader.session.close()


def test_a_transaction_ends_where_epochs_do(world: AtomicWorld) -> None:
    world.one_stream(20)
    reader = world.reader(max_batch_bytes=1, auto_ack=False)
    with reader.session:
        reader.until(lambda: sum(map(len, reader.batches)) == 20)
        assert [batch.completes_epochs for batch in reader.batches] == [False] * (len(reader.batches) - 1) + [True]
        with pytest.raises(UsageError, match="its epochs go on in the next batch"), reader.batches[0].transaction():
            pass
        last = reader.batches[-1]
        with pytest.raises(UsageError, match="that begins at offset 0 is still to be done"), last.transaction():
            pass
        assert world.rows() == []
        with reader.session.transaction(*reader.batches):
            pass
        assert world.rows() == [(20, {"upto": 20, "least": [[2]]})]


@pytest.mark.conforms("S11")
def test_a_batch_may_be_bounded_to_entire_epochs(world: AtomicWorld) -> None:
    world.one_stream(30)
    reader = world.reader(max_batch_bytes=1, whole_epochs=True)
    with reader.session:
        reader.until(lambda: sum(map(len, reader.batches)) == 30)
        (batch,) = reader.batches
        assert batch.completes_epochs
        assert (batch.first, batch.end) == (0, 30)
        assert batch.table.column("offset").to_pylist() == list(range(30))
        reader.until(lambda: world.rows() == [(30, {"upto": 30, "least": [[2]]})])


def test_who_leaves_in_an_epoch_leaves_all_of_it(world: AtomicWorld) -> None:
    world.one_stream(50)
    reader = world.reader(max_batch_bytes=1)
    reader.until(lambda: len(reader.batches) == 2)
    reader.session.close()
    assert world.rows() == []
    (line,) = [line for line in world.store.history(world.group_id) if line.is_forced]
    assert (line.event, line.position, line.redelivery_end) == ("release", 0, reader.batches[-1].end)
    again = world.reader()
    with again.session:
        again.gets({1: 50})


def test_through_nodes_there_are_no_epochs(world: AtomicWorld) -> None:
    world.one_stream(10)
    (node,) = list_live_nodes(world.connection)
    with (
        Session(world.group, nodes=[node.address], transport="nodes", settings=FAST) as session,
        pytest.raises(UsageError, match="is of an atomic group"),
    ):
        session.poll(WAIT_S)


def test_entire_epochs_need_an_atomic_group(world: AtomicWorld) -> None:
    with (
        world.session(whole_epochs=True) as session,
        pytest.raises(UsageError, match="whole epochs are asked for, and its group is not atomic"),
    ):
        eventually(lambda: session.poll(0.05), WAIT_S)


async def later(found: GroupFrontier) -> None:
    """Do nothing, unless somebody awaits it."""


def refuse(found: GroupFrontier) -> None:
    raise ValueError("not now")


@pytest.mark.parametrize(("announce", "text"), [(refuse, "not now"), (later, "on_epochs_consumed returned a cor")])
def test_an_announcement_that_raises_hinders_no_close(
    world: AtomicWorld, announce: Callable[[GroupFrontier], object], text: str
) -> None:
    world.declare("earliest")
    session = world.session(on_epochs_consumed=announce)
    with world.publisher() as publisher:
        publisher.in_epoch(1).publish(f"{world.space}/t", b"1")
        publisher.advance(2)
        with pytest.raises((ValueError, UsageError), match=text):
            eventually(lambda: session.poll(0.05) and False, WAIT_S)
    session.close()
    assert session.is_closed


@pytest.mark.conforms("S4", "S9")
def test_a_space_made_anew_has_epochs_of_its_own(world: AtomicWorld) -> None:
    world.declare()
    reader = world.reader()
    with reader.session:
        with world.publisher() as publisher:
            world.publish(publisher, 7, 1)
        drop_space(world.connection, world.space)
        reader.gets({7: 1}, reached=(8,))
        create_space(world.connection, world.space, f"{world.space}/#")
        with world.publisher() as publisher:
            world.publish(publisher, (1, 2), 1)
            publisher.advance((2, 2))
        reader.gets({7: 1, 1: 1}, reached=(2, 2))
    assert {found.space for found in reader.announced} == {world.space}
