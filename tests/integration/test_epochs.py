"""Who may publish which epochs (`hold_epochs`, `renew_epochs`, `release_epochs`), and what follows for the frontier of
a space (`settle_epochs`): on a real Postgres."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import pkgutil
import random
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from queue import SimpleQueue
from typing import Any

import pytest

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier
from sublet_protocol.domain.errors import (
    EpochAlreadyCompleted,
    EpochCapabilityExpired,
    InvalidEpoch,
    MalformedRow,
    ProducerFenced,
    PublisherClosed,
    SubletError,
    UnknownSpace,
    UsageError,
)
from sublet_protocol.domain.limits import MAX_ANTICHAIN, MAX_EPOCH, MAX_HELD_EPOCHS, MIN_EPOCH
from sublet_storage.db.connect import connect
from sublet_storage.log import epoch_leases
from sublet_storage.log.append import (
    AppendOutcome,
    BlockAppend,
    ProducerIdentity,
    ProducerStamp,
    append,
    register_producer,
)
from sublet_storage.log.epoch_leases import hold, read_lower_frontier, release, renew
from sublet_storage.notify.changes import ObjectChange
from sublet_storage.producer import Publisher
from sublet_storage.producer.batches.pending_block import PendingArrowBatch, split_into_blocks
from sublet_storage.producer.epoch_lease import EpochCapability
from sublet_storage.producer.send_buffer import SendBuffer
from sublet_storage.spaces.space_changes import create_space, drop_space, rollover
from sublet_storage.spaces.space_queries import find_space
from tests.integration.log_kit import Connection, block, everything, in_epochs, stream_of, waiting_for_locks
from tests.kit import WAIT_S, eventually
from tests.postgres_proxy import PostgresProxy

A, B, C = (ProducerIdentity(name, 1) for name in "abc")
A2 = ProducerIdentity("a", 2)
LONG_S = 600.0


class World:
    """The space `default`, of two streams, and who holds which of its epochs."""

    def __init__(self, url: str, conn: Connection) -> None:
        self.url, self.conn, self.space = url, conn, find_space(conn, "default").space_id
        self.connections = ExitStack()

    def writer(self) -> Connection:
        """Return another connection, in a transaction until `connections` is closed."""
        writer = self.connections.enter_context(connect(self.url))
        self.connections.enter_context(writer.transaction())
        return writer

    def hold(self, who: ProducerIdentity, *epochs: Epoch, lease_s: float = LONG_S) -> list[Epoch]:
        """Return the space's frontier after that."""
        return list(hold(self.conn, self.space, who, epochs, lease_s).least)

    def release(self, *who: ProducerIdentity) -> None:
        for each in who:
            release(self.conn, self.space, each)

    def expire(self) -> list[str]:
        """Return whose leases have run out, all of this space."""
        expired = list(epoch_leases.expire(self.conn))
        assert {space for space, _ in expired} <= {self.space}
        return [producer for _, producer in expired]

    def frontier(self) -> list[Epoch]:
        frontier = read_lower_frontier(self.conn, self.space)
        return [] if frontier is None else list(frontier.least)

    def insert(self, count: int, least: str, *given: object) -> None:
        """Insert so many producers, `p1` and so on, that hold what the expression gives for their number `i`."""
        self.conn.execute(
            "insert into capability (space_id, producer_id, incarnation, least, expires_at)"
            f" select %s, 'p' || i, 1, {least}, now() + interval '1 hour' from generate_series(1, %s) i",
            (self.space, *given, count),
        )

    def send(self, who: ProducerIdentity, number: int, *of: Epoch, conn: Connection | None = None) -> AppendOutcome:
        """Append a block with a message in each of these epochs."""
        stamp = ProducerStamp(who.producer_id, who.incarnation, number)
        appended = append(conn or self.conn, [BlockAppend(stream_of(self.conn, "default"), in_epochs(*of), stamp)])
        return appended[0].outcome

    def stored(self) -> list[tuple[bytes, list[int] | None]]:
        """Return value and epoch of all messages."""
        return sorted((m["value"], m["epoch"]) for messages in everything(self.conn).values() for m in messages)

    def publisher(self, **settings: Any) -> Publisher:
        return Publisher(self.url, space="default", **settings)


@pytest.fixture
def world(database: str, conn: Connection) -> Iterator[World]:
    world = World(database, conn)
    with world.connections:
        yield world


# --- the frontier ---------------------------------------------------------------------------------------------------


def test_in_product_order_it_is_an_antichain(world: World) -> None:
    world.hold(A, (0, 3))
    with pytest.raises(EpochAlreadyCompleted):
        world.hold(B, (2, 1))
    world.hold(B, (2, 3))
    assert world.hold(A, (1, 9), (3, 4)) == [(1, 9), (2, 3)]
    assert world.hold(B, (2, 5)) == [(1, 9), (2, 5), (3, 4)]
    with pytest.raises(InvalidEpoch, match="2 numbers, and this one has 1"):
        world.hold(C, (3,))


def test_what_is_completed_is_not_held_again(world: World) -> None:
    world.hold(A, (3,))
    completed = r"is completed: in this space.* at or after 3\. Begin with such an epoch"
    for wanted in ((2,), (-7,)):
        with pytest.raises(EpochAlreadyCompleted, match=completed):
            world.hold(B, wanted)
        with pytest.raises(EpochAlreadyCompleted, match="'a' has advanced to 3, and does not go back"):
            world.hold(A, wanted)
    assert world.frontier() == [(3,)]


def test_who_leaves_holds_nothing_back(world: World) -> None:
    world.hold(A, (3,))
    world.hold(B, (5,))
    assert world.send(B, 1, (7,)) is AppendOutcome.APPENDED
    world.release(A)
    assert world.frontier() == [(5,)]
    world.release(B, B)
    assert world.frontier() == [(8,)]
    with pytest.raises(EpochAlreadyCompleted):
        world.hold(C, (7,))
    assert world.hold(C, (8,)) == [(8,)]


# --- appends --------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("S9")
def test_a_block_needs_epochs_its_producer_holds(world: World) -> None:
    assert world.send(A, 1, (3,)) is AppendOutcome.EXPIRED, "it holds nothing"
    world.hold(A, (3,))
    world.hold(B, (5,))
    assert world.send(A, 2, (3,), (4,)) is AppendOutcome.APPENDED
    assert world.send(A, 2, (3,), (4,)) is AppendOutcome.DUPLICATE
    assert world.send(B, 1, (6,), (4,)) is AppendOutcome.COMPLETED
    world.hold(A, (4,))
    assert world.send(A, 2, (3,), (4,)) is AppendOutcome.DUPLICATE, "an old attempt that was stored"
    assert world.send(A, 3, (3,)) is AppendOutcome.COMPLETED, "an old attempt that was not"
    world.release(A)
    assert world.send(A, 4, (9,)) is AppendOutcome.EXPIRED
    assert world.send(C, 1, (9,)) is AppendOutcome.EXPIRED, "what others hold is not its own"
    assert len(world.stored()) == 2


@pytest.mark.conforms("S9", "W2")
def test_a_retry_learns_again_what_was_refused(world: World) -> None:
    """As when the answer to a commit of several blocks got lost."""

    def attempt(incarnation: int, first: int) -> list[str]:
        blocks = [in_epochs((3,)), block(b"x"), in_epochs((9,)), block(b"y")]
        stream, numbers = stream_of(world.conn, "default"), itertools.count(first)
        appends = [BlockAppend(stream, each, ProducerStamp("a", incarnation, next(numbers))) for each in blocks]
        return [answer.outcome.value for answer in append(world.conn, appends)]

    world.hold(A, (3,))
    world.hold(A, (5,))
    assert attempt(1, 1) == ["completed", "appended", "appended", "appended"]
    assert attempt(1, 1) == ["completed", "duplicate", "duplicate", "duplicate"]
    world.release(A)
    assert attempt(1, 5) == ["expired", "appended", "expired", "appended"]
    assert attempt(1, 1) == ["completed", "duplicate", "duplicate", "duplicate"]
    assert attempt(2, 5) == ["expired", "appended", "expired", "appended"], "another life has sequences of its own"
    world.hold(A2, (20,))
    assert attempt(2, 9) == ["completed", "appended", "completed", "appended"]
    assert attempt(2, 5) == ["expired", "duplicate", "expired", "duplicate"]
    assert len(world.stored()) == 3 + 2 + 2 + 2


def test_the_frontier_waits_for_an_open_append(world: World) -> None:
    """Whoever sees that an epoch is completed sees all of it."""
    world.hold(A, (3,))
    with connect(world.url) as other, ThreadPoolExecutor(1) as pool:
        with world.connections:
            assert world.send(A, 1, (3,), conn=world.writer()) is AppendOutcome.APPENDED
            advancing = pool.submit(hold, other, world.space, A, [(4,)])
            eventually(lambda: waiting_for_locks(world.url))
            assert world.frontier() == [(3,)]
            assert not advancing.done()
        advancing.result(30)
    assert world.frontier() == [(4,)]


# --- leases ---------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("S9")
def test_a_silent_producer_holds_nothing_back(world: World) -> None:
    for who, epoch in ((A, 3), (B, 5)):
        world.hold(who, (epoch,), lease_s=0.0)
    assert renew(world.conn, B, LONG_S) == {world.space}
    assert (world.expire(), world.expire()) == (["a"], [])
    assert not epoch_leases.expire_one(world.conn, world.space, "a"), "another process has found it, too"
    assert not epoch_leases.expire_one(world.conn, world.space, "b"), "it was renewed meanwhile"
    list(epoch_leases.expire(world.conn, lambda _: pytest.fail("nothing is due any more")))
    assert world.frontier() == [(5,)]
    assert world.send(A, 1, (5,)) is AppendOutcome.EXPIRED
    assert renew(world.conn, A) == frozenset()
    with pytest.raises(EpochCapabilityExpired, match="its lease has run out"):
        world.hold(A, (6,))
    assert world.hold(A2, (6,)) == [(5,)], "a later life begins anew"


@pytest.mark.conforms("S9", "X4")
def test_a_malformed_space_keeps_no_other_from_expiry(world: World) -> None:
    later = create_space(world.conn, "later", "later/#", shards=1).space_id
    for space_id in (world.space, later):
        hold(world.conn, space_id, A, [(3, 1)], lease_s=0.0)
    world.send(A, 1, (5, 1))
    world.conn.execute("update space set lost_upper_frontier = '[[1, 9, 0]]' where space_id = %s", (world.space,))
    expired = epoch_leases.expire(world.conn)
    assert next(expired) == (later, "a")
    with pytest.raises(MalformedRow, match="stored as a frontier"):
        next(expired)


@pytest.mark.conforms("S9")
def test_a_later_life_keeps_what_is_known_of_earlier(world: World) -> None:
    for who, epoch in ((A, 3), (A2, 6)):
        world.hold(who, (epoch,), lease_s=0.0)
        world.expire()
    world.hold(ProducerIdentity("a", 3), (7,))
    asked = "select incarnation, least, expired_at is null from capability order by incarnation"
    known = [(1, [[3]], False), (2, [[6]], False)]
    assert world.conn.execute(asked).fetchall() == [*known, (3, [[7]], True)]
    world.release(ProducerIdentity("a", 3))
    assert world.conn.execute(asked).fetchall() == known


@pytest.mark.conforms("S9")
def test_all_epochs_of_a_dropped_space_are_complete(world: World) -> None:
    """And its producers are in no others' way."""
    create_space(world.conn, "other", "other/#", shards=1)
    other = find_space(world.conn, "other").space_id
    hold(world.conn, other, A, [(3,)], lease_s=0.0)
    hold(world.conn, other, C, [(20,)], LONG_S)
    late = BlockAppend(stream_of(world.conn, "other"), in_epochs((7,)), ProducerStamp("a", 1, 1))
    assert append(world.conn, [late])[0].outcome is AppendOutcome.APPENDED
    world.hold(B, (3,), lease_s=0.0)
    drop_space(world.conn, "other")
    assert not epoch_leases.expire_one(world.conn, other, "a"), "it is over"
    release(world.conn, other, A)
    assert read_lower_frontier(world.conn, other) == LowerFrontier(((8,),))
    assert world.expire() == ["b"]
    assert renew(world.conn, C) == {other}, "it is not fenced"


def test_nothing_advances_past_what_is_not_stored(world: World) -> None:
    world.hold(A, (3,))
    stream = stream_of(world.conn, "default")
    world.conn.execute("update stream set state = 'closed' where stream_id = %s", (stream,))
    refused = BlockAppend(stream, in_epochs((3,)), ProducerStamp("a", 1, 1))
    moved = epoch_leases.append_and_advance(world.conn, [refused], world.space, A, [(4,)], LONG_S)
    assert ([each.outcome for each in moved.results], moved.change) == ([AppendOutcome.CLOSED], None)
    assert world.frontier() == [(3,)]


def test_a_living_one_that_is_writing_delays_no_pass(world: World) -> None:
    world.hold(A, (3,))
    world.conn.execute("set lock_timeout = 0; set statement_timeout = '10s'")
    assert world.send(A, 1, (3,), conn=world.writer()) is AppendOutcome.APPENDED
    assert world.expire() == []


def test_one_that_is_writing_is_left_for_next_time(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """One alone is waited for as long as the connection says."""
    monkeypatch.setattr(epoch_leases, "LOCK_WAIT_S", math.inf)
    world.hold(A, (3,), lease_s=0.0)
    world.conn.execute("set lock_timeout = 50")
    with world.connections:
        assert world.send(A, 1, (3,), conn=world.writer()) is AppendOutcome.APPENDED
        assert world.expire() == []
    assert world.expire() == ["a"]


def test_locked_producers_hold_up_no_others(world: World) -> None:
    """Whoever may append can lock all their names in one transaction, for as long as he likes."""
    for producer in (A, B):
        world.hold(producer, (3,), lease_s=0.0)
    with world.connections:
        world.writer().execute("select lock_producer('a')")
        assert world.expire() == ["b"]
    assert world.expire() == ["a"]


def test_a_later_life_takes_over_what_was_held(world: World) -> None:
    world.hold(A, (3,))
    assert world.hold(A2, (4,)) == [(4,)]
    with pytest.raises(ProducerFenced):
        world.hold(A, (5,))
    world.hold(C, (9,))
    register_producer(world.conn, "c")
    lease = world.conn.execute("select expires_at from capability where producer_id = 'c'").fetchall()
    with pytest.raises(ProducerFenced):
        renew(world.conn, C)
    assert world.conn.execute("select expires_at from capability where producer_id = 'c'").fetchall() == lease
    assert world.hold(B, (6,)) == [(4,)], "no other producer is fenced"
    with pytest.raises(ProducerFenced):
        world.release(A)
    assert world.frontier() == [(4,)], "the earlier life gives nothing back"


@pytest.mark.conforms("S9", "S12")
@pytest.mark.parametrize("dimensions", [1, 2])
def test_each_space_and_producer_has_its_own(world: World, dimensions: int) -> None:
    """What another holds, or the same one elsewhere, and what of it has expired, is neither counted nor changed."""

    def at(number: int) -> Epoch:
        return (number,) * dimensions

    def others() -> list[Any]:
        asked = "select space_id, lower_frontier, frontier_move_count from space where space_id <> %s order by 1"
        held = "select space_id, producer_id, incarnation, least from capability where space_id <> %s order by 1, 2, 3"
        return [world.conn.execute(each, (world.space,)).fetchall() for each in (asked, held)]

    names = ("later", "other", "odd", "unused")
    for name in names:
        create_space(world.conn, name, f"{name}/#", shards=1)
    later, other, odd, unused = (find_space(world.conn, name).space_id for name in names)
    hold(world.conn, later, B, [at(50)], LONG_S)
    for who in (A2, B, C):
        hold(world.conn, other, who, [at(0)], LONG_S)
    hold(world.conn, odd, A, [(0, 0, 0)], lease_s=0.0)
    assert (odd, "a") in epoch_leases.expire(world.conn)
    before = others()
    assert world.hold(B, at(3)) == [at(3)]
    assert world.hold(A, at(9), lease_s=0.0) == [at(3)]
    assert world.hold(B, at(4)) == [at(4)]
    assert renew(world.conn, A2) == {other}
    assert world.expire() == ["a"], "which a later life has not renewed"
    assert world.hold(A2, at(5), lease_s=0.0) == [at(4)], "what an earlier life held is over"
    assert renew(world.conn, A) == frozenset()
    assert world.hold(A2, at(6)) == [at(4)]
    assert world.hold(C, at(4)) == [at(4)]
    world.release(A2, A)
    asked = "select producer_id, incarnation from capability where space_id = %s order by 1, 2"
    assert world.conn.execute(asked, (world.space,)).fetchall() == [("a", 1), ("b", 1), ("c", 1)]
    moves = epoch_leases.frontier_change(world.conn, world.space)
    world.release(C)
    assert epoch_leases.frontier_change(world.conn, world.space) == moves, "it has not moved"
    assert others() == before
    assert world.hold(ProducerIdentity("d", 1), at(4), lease_s=0.0) == [at(4)]
    assert world.hold(B, at(8)) == [at(4)]
    assert world.expire() == ["d"]
    assert world.frontier() == [at(8)]
    drop_space(world.conn, "unused")
    with pytest.raises(UnknownSpace):
        hold(world.conn, unused, A, [at(9)], LONG_S)


def test_anothers_later_life_fences_nobody(world: World) -> None:
    later = ProducerIdentity("a", 9)
    world.hold(later, (3,))
    world.hold(B, (5,))
    world.release(B)
    assert world.conn.execute("select producer_id from capability").fetchall() == [("a",)]
    world.hold(C, (5,))
    world.release(later)
    assert world.frontier() == [(5,)]


def test_a_capability_by_sql_takes_nothing_back(world: World) -> None:
    world.hold(A, (3,))
    world.insert(1, "'[[0]]'::jsonb")
    assert world.hold(A, (4,)) == [(3,)]


def test_at_random_the_frontier_never_goes_back(world: World) -> None:
    dice = random.Random(7)
    before, number = read_lower_frontier(world.conn, world.space), 0
    for _ in range(400):
        who, number = ProducerIdentity(dice.choice("abcd"), 1 + dice.randrange(2)), number + 1
        epoch = (dice.randrange(12), dice.randrange(12))
        try:
            match dice.randrange(5):
                case 0 | 1:
                    world.hold(who, epoch, lease_s=dice.choice([0.0, LONG_S]))
                case 2:
                    world.release(who)
                case 3:
                    world.expire()
                case _:
                    if world.send(who, number, epoch) is AppendOutcome.APPENDED:
                        assert before is not None
                        assert before.admits(epoch)
        except (EpochAlreadyCompleted, EpochCapabilityExpired, ProducerFenced):
            pass
        now = read_lower_frontier(world.conn, world.space)
        assert before is None or (now is not None and before.is_at_or_before(now)), (before, now)
        before = now


# --- the publisher --------------------------------------------------------------------------------------------------


def test_messages_are_published_in_their_epochs(world: World) -> None:
    with world.publisher() as publisher:
        publisher.advance(3)
        publisher.publish("t", b"without")
        early = publisher.in_epoch(3)
        early.publish("t", b"one")
        publisher.in_epoch(4).publish_batch({"topic": "t", "value": [b"two", b"two"]})
        publisher.publish_batch({"topic": "t", "value": [b"x", b"y"], "epoch": [[5], None]})
        publisher.advance(4)
        assert world.frontier() == [(4,)]
        with pytest.raises(EpochAlreadyCompleted, match="has advanced to 4, and does not go back"):
            publisher.in_epoch(3)
        for too_late in (
            lambda: early.publish("t", b"late"),
            lambda: early.publish_batch({"topic": "t", "value": [b"late"]}),
            lambda: publisher.publish_batch({"topic": "t", "value": [b"x"], "epoch": [[3]]}),
        ):
            with pytest.raises(EpochAlreadyCompleted):
                too_late()
        with pytest.raises(UsageError, match="some have one"):
            publisher.in_epoch(4).publish_batch({"topic": "t", "value": [b"x"], "epoch": [[5]]})
    found = [(b"one", [3]), (b"two", [4]), (b"two", [4]), (b"without", None), (b"x", [5]), (b"y", None)]
    assert world.stored() == found
    assert world.frontier() == [(6,)], "the publisher has left"


def test_who_begins_with_an_epoch_notifies_of_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what is completed then, not before."""
    sent: list[ObjectChange] = []

    class Recorder:
        def publish(self, changes: Iterable[ObjectChange]) -> None:
            sent.extend(changes)

    monkeypatch.setattr("sublet_storage.producer.epoch_lease.shared_publisher", lambda url: Recorder())
    with world.publisher() as publisher:
        publisher.in_epoch(3)
        assert sent[0] == epoch_leases.frontier_change(world.conn, world.space)


def test_the_first_epoch_that_is_used_is_what_is_held(world: World) -> None:
    with world.publisher() as publisher:
        publisher.in_epoch((1, 2))
        assert world.frontier() == [(1, 2)]
        with pytest.raises(EpochAlreadyCompleted):
            publisher.in_epoch((0, 9))
        with pytest.raises(InvalidEpoch):
            publisher.in_epoch(3)
        publisher.advance((1, 5), (3, 2), (3, 9))
        assert world.frontier() == [(1, 5), (3, 2)]
        publisher.in_epoch((1, 6))
        with pytest.raises(EpochAlreadyCompleted):
            publisher.in_epoch((2, 4))
        with pytest.raises(InvalidEpoch, match="2 numbers"):
            publisher.advance((4, 9), 7)


def test_threads_at_once_take_one_capability(world: World) -> None:
    with world.publisher() as publisher, ThreadPoolExecutor(8) as pool:
        publisher.advance(0)
        asked = [pool.submit(lambda: publisher.in_epoch(7).publish("t", b"x").result(30)) for _ in range(8)]
        assert all(each.result(30) for each in asked)
        assert world.frontier() == [(0,)]


@pytest.mark.parametrize(
    ("point", "call"),
    [
        ("epoch_leases.hold", lambda publisher: publisher.close()),
        ("epoch_leases.hold", lambda publisher: publisher.in_epoch(5)),
        ("check_count", lambda publisher: publisher.advance(5)),
    ],
    ids=["close", "in_epoch", "advance"],
)
def test_a_handler_waits_for_no_call_in_epochs(
    database: str, monkeypatch: pytest.MonkeyPatch, point: str, call: Callable[[Publisher], object]
) -> None:
    """In the middle of the one that it interrupts: that raises, and the publisher goes on."""
    name = f"sublet_storage.producer.epoch_lease.{point}"
    function = pkgutil.resolve_name(name)

    def call_interrupted(*arguments: object) -> object:
        signal.raise_signal(signal.SIGUSR1)
        return function(*arguments)

    with Publisher(database, space="default") as publisher:
        handler = signal.signal(signal.SIGUSR1, lambda *_: call(publisher))
        try:
            with monkeypatch.context() as patch:
                patch.setattr(name, call_interrupted)
                with pytest.raises(UsageError, match="Set a flag in the handler"):
                    publisher.advance(4)
        finally:
            signal.signal(signal.SIGUSR1, handler)
        publisher.advance(3)
        publisher.in_epoch(3).publish("t", b"x").result(30)


def test_epochs_are_a_spaces_own(database: str) -> None:
    with Publisher(database) as publisher:
        for use in (publisher.in_epoch, publisher.advance):
            with pytest.raises(UsageError, match=r"Publisher\(space='default'\)"):
                use(3)
        with pytest.raises(UsageError, match="give the one that is next"):
            publisher.advance()


def test_an_advance_is_made_behind_what_is_durable(world: World) -> None:
    with world.publisher(linger_ms=10_000) as publisher:
        publisher.advance(3)
        delivery = publisher.in_epoch(3).publish("t", b"1")
        publisher.advance(4, wait=False)
        assert world.frontier() == [(3,)]
        with pytest.raises(EpochAlreadyCompleted, match="has advanced to 4"):
            publisher.in_epoch(3)
        publisher.in_epoch(4).publish("t", b"2")
        publisher.flush()
        assert delivery.is_done
        assert world.frontier() == [(4,)]
        publisher.advance(7, wait=False)
        publisher.advance(8)
        assert world.frontier() == [(8,)]
        with pytest.raises(EpochAlreadyCompleted, match="has advanced to 8"):
            publisher.in_epoch(7)
        publisher.advance(20, wait=False)
    assert world.frontier() == [(20,)], "closing makes it first"


@pytest.mark.conforms("S9")
def test_who_fails_does_not_finish_its_epochs(world: World) -> None:
    def fail() -> None:
        with world.publisher() as publisher:
            publisher.in_epoch(3).publish("t", b"half").result()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert world.frontier() == [(3,)]
    world.conn.execute("update capability set expires_at = clock_timestamp()")
    assert world.expire()
    assert world.frontier() == [(4,)]
    assert world.conn.execute("select upper_frontier from capability").fetchall() == [([[3]],)]


def test_the_largest_number_is_refused(world: World) -> None:
    with world.publisher() as publisher:
        for epoch in (2**63 - 1, (2**63 - 1,)):
            with pytest.raises(InvalidEpoch, match="64-bit integer, at most"):
                publisher.in_epoch(epoch)
        with pytest.raises(InvalidEpoch, match="64-bit integer, at most"):
            publisher.publish_batch({"topic": "t", "value": [b"x", b"y"], "epoch": [[1], [2**63 - 1]]})
        publisher.in_epoch(2**63 - 2).publish("t", b"x").result()
        publisher.advance(2**63 - 2)
        publisher.flush()
        with world.publisher() as other, pytest.raises(EpochAlreadyCompleted, match="Begin with such an epoch"):
            other.in_epoch(0)
    with world.publisher() as publisher, pytest.raises(EpochAlreadyCompleted, match="There is none left: take another"):
        publisher.in_epoch(2**63 - 2)


@pytest.mark.conforms("X4")
def test_so_many_epochs_are_held_at_a_time(world: World) -> None:
    """One more is refused where it is given, and nothing is held of it."""
    antichain = [(number, -number) for number in range(MAX_ANTICHAIN + 1)]
    with world.publisher() as publisher:
        publisher.advance(*antichain[:-1])
        with pytest.raises(InvalidEpoch, match="1001 epochs at a time, and the limit is 1000"):
            publisher.advance(*antichain)
        with pytest.raises(InvalidEpoch, match="1001 epochs at a time"):
            world.hold(A, *antichain)
        assert world.frontier() == sorted(antichain[:-1])


@pytest.mark.parametrize("singly", [False, True])
def test_more_epochs_than_a_block_has_fill_several(world: World, singly: bool) -> None:
    epochs = [(number, -number) for number in range(MAX_ANTICHAIN + 1)]
    with world.publisher(block_messages=100_000, linger_ms=86_400_000) as publisher:
        publisher.advance((0, -MAX_ANTICHAIN))
        if singly:
            for epoch in epochs:
                publisher.in_epoch(epoch).publish("t", b"x")
        else:
            publisher.publish_batch({"topic": "t", "value": [b"x"] * len(epochs), "epoch": epochs})
    assert len(world.stored()) == len(epochs)


@pytest.mark.conforms("X4")
def test_producers_hold_so_many_epochs_together(world: World) -> None:
    """What would exceed the limit later, when others have left, is refused where it is given; nobody is kept from going
    on with as many, or from leaving."""
    theirs = [(number, -number) for number in range(1, MAX_ANTICHAIN - 400)]
    mine = [(number, -number) for number in range(-400, 0)]
    world.hold(C, (-MAX_ANTICHAIN, -MAX_ANTICHAIN))  # before all others: alone in the frontier
    world.hold(A, *theirs)
    with pytest.raises(InvalidEpoch, match=r"over 1000 epochs, or 10000 .* which is the limit of a space"):
        world.hold(B, *mine, (0, 0))
    assert world.hold(B, *mine) == [(-MAX_ANTICHAIN, -MAX_ANTICHAIN)]
    with pytest.raises(InvalidEpoch, match="over 1000 epochs"):
        world.hold(ProducerIdentity("d", 1), (0, 0))
    world.hold(A, *((x, y + 1) for x, y in theirs))
    world.release(C)
    assert len(world.frontier()) == MAX_ANTICHAIN - 1
    world.release(A)
    assert world.hold(ProducerIdentity("d", 1), (0, 1)) == mine


@pytest.mark.conforms("X4")
def test_producers_of_the_same_epochs_are_bounded(world: World) -> None:
    """An advance compares what each of them holds, also where it is the same."""
    same = [(number, -number) for number in range(MAX_ANTICHAIN)]
    world.insert(MAX_HELD_EPOCHS // MAX_ANTICHAIN - 1, "%s::jsonb", json.dumps(same))
    world.hold(ProducerIdentity("p0", 1), *same)
    with pytest.raises(InvalidEpoch, match="over 1000 epochs, or 10000 with each counted for each that holds it"):
        world.hold(A, *same[:1])
    world.hold(ProducerIdentity("p0", 1), *same[1:])
    world.hold(A, *same[:1])
    with pytest.raises(InvalidEpoch, match="over 1000 epochs"):
        world.hold(B, (MAX_ANTICHAIN, MAX_ANTICHAIN))
    world.conn.execute("update capability set expired_at = now() where producer_id < 'p2'")
    create_space(world.conn, "other", "other/#", shards=1)
    other = find_space(world.conn, "other").space_id
    world.conn.execute("update capability set space_id = %s where expired_at is null", (other,))
    world.hold(B, (MAX_ANTICHAIN, MAX_ANTICHAIN))


def test_the_least_epoch_is_the_least_number(world: World) -> None:
    """However it is written, and whoever leaves."""
    for name, number in (("0", MIN_EPOCH), ("1", -20), ("2", -3), ("3", 10), ("4", 9), ("5", MAX_EPOCH)):
        world.hold(ProducerIdentity(name, 1), (number,))
    frontiers = []
    for name in "01243":
        world.release(ProducerIdentity(name, 1))
        frontiers.append(world.frontier())
    assert frontiers == [[(-20,)], [(-3,)], [(9,)], [(10,)], [(MAX_EPOCH,)]]


def test_epochs_of_one_number_have_one_least(world: World) -> None:
    """So many producers may use them as there are, and what is held is stored as its least."""
    world.insert(MAX_ANTICHAIN + 1, "jsonb_build_array(jsonb_build_array(i))")
    assert world.hold(A, (5,), (6,)) == [(1,)]
    assert world.conn.execute("select least from capability where producer_id = 'a'").fetchone() == ([[5]],)


def test_too_many_greatest_epochs_become_their_bound(world: World) -> None:
    """Nothing is refused that was published in epochs that are held, and all that began is completed in the end."""
    world.hold(A, (0, 0))
    epochs = [(number, 2 * MAX_ANTICHAIN - number) for number in range(MAX_ANTICHAIN + 1)]
    assert world.send(A, 1, *epochs[:600]) is AppendOutcome.APPENDED
    assert world.send(A, 2, *epochs[600:]) is AppendOutcome.APPENDED
    greatest = world.conn.execute("select upper_frontier from stream_upper_frontier where upper_frontier is not null")
    assert greatest.fetchall() == [([[MAX_ANTICHAIN, 2 * MAX_ANTICHAIN]],)]
    world.release(A)
    assert world.frontier() == [(0, 2 * MAX_ANTICHAIN + 1), (MAX_ANTICHAIN + 1, 0)]


def test_threads_undo_no_advance_of_another(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = SendBuffer.advance
    with world.publisher() as publisher:
        publisher.advance(3)
        other = threading.Thread(target=publisher.advance, args=(6,), kwargs={"wait": False})

        def interrupted(self: SendBuffer, least: Sequence[Any]) -> Any:
            if other.ident is None:
                other.start()
                other.join(0.2)  # it would be through by then if it could
            return advance(self, least)

        monkeypatch.setattr(SendBuffer, "advance", interrupted)
        publisher.advance(5, wait=False)
        other.join()
        publisher.flush()
        assert world.frontier() == [(6,)]


def test_an_advance_behind_a_failure_raises_why(world: World) -> None:
    publisher = world.publisher(delivery_timeout_s=1)
    publisher.advance(3)
    world.conn.execute("alter table stream rename to stream_away")
    lost = publisher.in_epoch(3).publish("t", b"lost")
    with pytest.raises(SubletError):
        lost.result()
    world.conn.execute("alter table stream_away rename to stream")
    with pytest.raises(SubletError, match="the database refuses to store it"):
        publisher.advance(4, wait=False)
    publisher.flush()
    assert world.frontier() == [(3,)]
    assert publisher.in_epoch(3).publish("t", b"again").result().offset == 0
    publisher.advance(4)
    publisher.close()
    assert world.frontier() == [(4,)]


def test_an_advance_behind_a_broken_batch_ends(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch stops between its two messages, and the publisher is closed before it goes on."""
    first, between, go_on = threading.Event(), threading.Event(), threading.Event()

    def halting(piece: PendingArrowBatch, messages: int, size: int) -> Iterator[PendingArrowBatch]:
        if first.is_set():
            between.set()
            go_on.wait(20)
        first.set()
        return split_into_blocks(piece, messages, size)

    def has_advanced() -> bool:
        try:
            publisher.in_epoch(3)
        except EpochAlreadyCompleted:
            return True
        return False

    publisher = world.publisher()
    publisher.advance(3)
    monkeypatch.setattr("sublet_storage.producer.send_buffer.split_into_blocks", halting)
    monkeypatch.setattr("sublet_storage.producer.send_buffer.MAX_ROUTED_ROWS", 1)
    with ThreadPoolExecutor(2) as pool:
        batch = pool.submit(publisher.publish_batch, {"topic": "t", "value": [b"1", b"2"]})
        assert between.wait(20)
        advance = pool.submit(publisher.advance, 4)
        eventually(has_advanced)
        with contextlib.suppress(SubletError):
            publisher.close()
        go_on.set()
        for each in (batch, advance):
            with pytest.raises(PublisherClosed):
                each.result(20)


@pytest.mark.conforms("S9")
@pytest.mark.long
def test_an_advance_waits_for_rerouted_messages(world: World) -> None:
    with world.publisher(linger_ms=10_000) as publisher:
        publisher.in_epoch(3).publish("t", b"in the parent").result()
        delivery = publisher.in_epoch(3).publish("t", b"in a child")
        publisher.advance(4, wait=False)
        rollover(world.conn, "default")
        publisher.flush()
        assert delivery.result().offset == 0
        assert world.frontier() == [(4,)]


@pytest.mark.conforms("S12")
def test_a_fenced_publisher_leaves_its_epochs(world: World, caplog: pytest.LogCaptureFixture) -> None:
    former = world.publisher(producer="meter")
    former.advance(3)
    with world.publisher(producer="meter") as later:
        with pytest.raises(ProducerFenced):
            former.advance(7)
        with pytest.raises(ProducerFenced):
            former.in_epoch(8)
        former.close()
        assert "not released" not in caplog.text, "they are those of the later one"
        assert world.frontier() == [(3,)]
        later.advance(4)
        assert world.frontier() == [(4,)]


@pytest.mark.conforms("S9")
def test_a_lease_is_renewed_until_it_is_lost(world: World) -> None:
    """And that is found out where nothing is published."""
    capability = EpochCapability(world.url, world.space, A, 10.0, 0.3, None, lambda conn: None)
    capability.check([(3,)])
    for _ in range(2):
        lease = world.conn.execute("select expires_at from capability").fetchone()
        eventually(lambda: world.conn.execute("select expires_at from capability").fetchone() != lease)  # noqa: B023
    world.conn.execute("update capability set expired_at = now()")

    def is_lost() -> bool:
        try:
            capability.check([(3,)])
        except EpochCapabilityExpired:
            return True
        return False

    eventually(is_lost)
    capability.close()


@pytest.mark.conforms("S9")
def test_a_lease_outlives_a_shorter_outage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is over two thirds of the lease after the last renewal: by a clock of what the lease's thread waits."""
    wait, clock_s, outage_s, lease_s = threading.Event.wait, 0.0, 21.0, 30.0
    expiries, renewed_at = list[object](), SimpleQueue[float]()

    def expires_at() -> object:
        return world.conn.execute("select expires_at from capability").fetchone()

    with PostgresProxy(world.url) as proxy:

        def wait_by_clock(event: threading.Event, timeout: float | None = None) -> bool:
            nonlocal clock_s
            if threading.current_thread().name != "sublet publisher lease" or timeout is None:
                return wait(event, timeout)
            if clock_s >= outage_s:
                renewed_at.put(clock_s)
                return wait(event)
            if not expiries:
                expiries.append(expires_at())
                proxy.go_away()
            clock_s += timeout
            if clock_s >= outage_s:
                proxy.resume()
            return event.is_set()

        monkeypatch.setattr(threading.Event, "wait", wait_by_clock)
        capability = EpochCapability(proxy.url, world.space, A, 10.0, lease_s, None, lambda conn: None)
        with contextlib.closing(capability):
            capability.check([(3,)])
            assert renewed_at.get(timeout=WAIT_S) < lease_s
            assert expires_at() != expiries[0]


@pytest.mark.conforms("S9")
def test_who_has_left_takes_no_epochs(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """And who has taken none leaves without a word to the database."""
    nowhere = EpochCapability("postgresql://127.0.0.1:1/none", world.space, A, 1.0, LONG_S, None, lambda conn: None)
    nowhere.close()
    assert "not released" not in caplog.text
    left = EpochCapability(world.url, world.space, A, 10.0, LONG_S, None, lambda conn: None)
    left.check([(3,)])
    left.close()
    assert isinstance(left.advance(world.conn, [], [(9,)]).error, EpochCapabilityExpired)
    closed = world.publisher()
    closed.close()
    with pytest.raises(EpochCapabilityExpired):
        closed.in_epoch(5)
    assert world.conn.execute("select from capability").fetchall() == []


@pytest.mark.conforms("S9")
def test_who_leaves_connects_again_for_that(world: World) -> None:
    """The connection over which it has begun with epochs was cut while it was idle."""
    with PostgresProxy(world.url) as proxy:
        publisher = Publisher(proxy.url, space="default")
        publisher.in_epoch(3).publish("t", b"x").result()
        proxy.hang_up()
        publisher.close()
        assert world.frontier() == [(4,)]
