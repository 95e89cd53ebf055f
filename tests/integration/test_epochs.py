"""Who may publish which epochs, and what follows for the frontier of a space: on a real Postgres."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier
from sublet_protocol.domain.errors import (
    EpochAlreadyCompleted,
    EpochCapabilityExpired,
    InvalidEpoch,
    ProducerFenced,
    PublisherClosed,
    SubletError,
    UsageError,
)
from sublet_protocol.domain.limits import MAX_ANTICHAIN, MAX_EPOCH, MAX_HELD_EPOCHS, MIN_EPOCH
from sublet_storage.db.connect import connect
from sublet_storage.log import epoch_leases
from sublet_storage.log.append import AppendOutcome, BlockAppend, ProducerIdentity, ProducerStamp, append
from sublet_storage.log.epoch_leases import hold, read_lower_frontier, release, renew
from sublet_storage.notify.changes import ObjectChange
from sublet_storage.producer import Publisher
from sublet_storage.producer.batches.pending_block import PendingArrowBatch, split_into_blocks
from sublet_storage.producer.send_buffer import SendBuffer
from sublet_storage.spaces.space_changes import create_space, drop_space, rollover
from sublet_storage.spaces.space_queries import find_space
from tests.integration.log_kit import block, everything, in_epochs, waiting_for_locks
from tests.kit import eventually
from tests.postgres_proxy import PostgresProxy
from tests.support.streams import open_streams

A, B, C = (ProducerIdentity(name, 1) for name in "abc")
LONG_S = 600.0


@pytest.fixture
def space(conn: psycopg.Connection[Any]) -> int:
    return find_space(conn, "default").space_id


def least(frontier: LowerFrontier | None) -> list[Epoch]:
    return [] if frontier is None else list(frontier.least)


def sent(
    conn: psycopg.Connection[Any], who: ProducerIdentity, number: int, *of: Epoch, stream: int = 0
) -> AppendOutcome:
    """Append a block with a message in each of these epochs."""
    stamp = ProducerStamp(who.producer_id, who.incarnation, number)
    return append(conn, [BlockAppend(open_streams(conn)[stream].stream_id, in_epochs(*of), stamp)])[0].outcome


# --- the frontier ---------------------------------------------------------------------------------------------------


def test_in_product_order_it_is_an_antichain(conn: psycopg.Connection[Any], space: int) -> None:
    hold(conn, space, A, [(0, 3)])
    with pytest.raises(EpochAlreadyCompleted):
        hold(conn, space, B, [(2, 1)])
    hold(conn, space, B, [(2, 3)])
    assert least(hold(conn, space, A, [(1, 9), (3, 4)])) == [(1, 9), (2, 3)]
    assert least(hold(conn, space, B, [(2, 5)])) == [(1, 9), (2, 5), (3, 4)]


@pytest.mark.parametrize("wanted", [(2,), (-7,)])
def test_what_is_completed_is_not_held_again(conn: psycopg.Connection[Any], space: int, wanted: Epoch) -> None:
    hold(conn, space, A, [(3,)])
    with pytest.raises(
        EpochAlreadyCompleted, match=r"is completed: in this space.* at or after 3\. Begin with such an epoch"
    ):
        hold(conn, space, B, [wanted])
    with pytest.raises(EpochAlreadyCompleted, match="'a' has advanced to 3, and does not go back"):
        hold(conn, space, A, [wanted])
    assert least(read_lower_frontier(conn, space)) == [(3,)]


def test_all_epochs_of_a_space_have_as_many_numbers(conn: psycopg.Connection[Any], space: int) -> None:
    hold(conn, space, A, [(3,)])
    with pytest.raises(InvalidEpoch, match="1 number, and this one has 2"):
        hold(conn, space, B, [(3, 1)])


def test_who_leaves_holds_nothing_back(conn: psycopg.Connection[Any], space: int) -> None:
    hold(conn, space, A, [(3,)])
    hold(conn, space, B, [(5,)])
    assert sent(conn, B, 1, (7,), stream=1) is AppendOutcome.APPENDED
    release(conn, space, A)
    assert least(read_lower_frontier(conn, space)) == [(5,)]
    release(conn, space, B)
    release(conn, space, B)
    assert least(read_lower_frontier(conn, space)) == [(8,)]
    with pytest.raises(EpochAlreadyCompleted):
        hold(conn, space, C, [(7,)])
    assert least(hold(conn, space, C, [(8,)])) == [(8,)]


# --- appends --------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("S9")
def test_a_block_needs_epochs_its_producer_holds(conn: psycopg.Connection[Any], space: int) -> None:
    assert sent(conn, A, 1, (3,)) is AppendOutcome.EXPIRED, "it holds nothing"
    hold(conn, space, A, [(3,)])
    hold(conn, space, B, [(5,)])
    assert sent(conn, A, 2, (3,), (4,)) is AppendOutcome.APPENDED
    assert sent(conn, A, 2, (3,), (4,)) is AppendOutcome.DUPLICATE
    assert sent(conn, B, 1, (6,), (4,)) is AppendOutcome.COMPLETED
    hold(conn, space, A, [(4,)])
    assert sent(conn, A, 2, (3,), (4,)) is AppendOutcome.DUPLICATE, "an old attempt that was stored"
    assert sent(conn, A, 3, (3,)) is AppendOutcome.COMPLETED, "an old attempt that was not"
    release(conn, space, A)
    assert sent(conn, A, 4, (9,)) is AppendOutcome.EXPIRED
    assert sent(conn, C, 1, (9,)) is AppendOutcome.EXPIRED, "what others hold is not its own"
    assert sum(map(len, everything(conn).values())) == 2


@pytest.mark.conforms("S9", "W2")
def test_a_retry_learns_again_what_was_refused(conn: psycopg.Connection[Any], space: int) -> None:
    """As when the answer to a commit of several blocks got lost."""
    stream = open_streams(conn)[0].stream_id

    def attempt(incarnation: int, first: int) -> list[str]:
        blocks = [in_epochs((3,)), block(b"x"), in_epochs((9,)), block(b"y")]
        stamps = [ProducerStamp("a", incarnation, first + number) for number in range(len(blocks))]
        appends = [BlockAppend(stream, block, stamp) for block, stamp in zip(blocks, stamps, strict=True)]
        return [answer.outcome.value for answer in append(conn, appends)]

    hold(conn, space, A, [(3,)])
    hold(conn, space, A, [(5,)])
    assert attempt(1, 1) == ["completed", "appended", "appended", "appended"]
    assert attempt(1, 1) == ["completed", "duplicate", "duplicate", "duplicate"]
    release(conn, space, A)
    assert attempt(1, 5) == ["expired", "appended", "expired", "appended"]
    assert attempt(1, 1) == ["completed", "duplicate", "duplicate", "duplicate"]
    assert attempt(2, 5) == ["expired", "appended", "expired", "appended"], "another life has sequences of its own"
    hold(conn, space, ProducerIdentity("a", 2), [(20,)])
    assert attempt(2, 9) == ["completed", "appended", "completed", "appended"]
    assert attempt(2, 5) == ["expired", "duplicate", "expired", "duplicate"]
    assert sum(map(len, everything(conn).values())) == 3 + 2 + 2 + 2


def test_the_frontier_waits_for_an_open_append(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    """Whoever sees that an epoch is completed sees all of it."""
    hold(conn, space, A, [(3,)])
    moved = threading.Event()

    def advance() -> None:
        with connect(database) as other:
            hold(other, space, A, [(4,)])
        moved.set()

    with connect(database) as writer, writer.transaction():
        assert sent(writer, A, 1, (3,)) is AppendOutcome.APPENDED
        advancing = threading.Thread(target=advance)
        advancing.start()
        eventually(lambda: waiting_for_locks(database))
        assert least(read_lower_frontier(conn, space)) == [(3,)]
        assert not moved.is_set()
    advancing.join(30)
    assert least(read_lower_frontier(conn, space)) == [(4,)]


# --- leases ---------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("S9")
def test_a_silent_producer_holds_nothing_back(conn: psycopg.Connection[Any], space: int) -> None:
    hold(conn, space, A, [(3,)], lease_s=0.0)
    hold(conn, space, B, [(5,)], lease_s=LONG_S)
    assert epoch_leases.expire(conn) == [(space, "a")]
    assert epoch_leases.expire(conn) == []
    assert not epoch_leases.expire_one(conn, space, "a"), "another process has found it, too"
    assert least(read_lower_frontier(conn, space)) == [(5,)]
    assert sent(conn, A, 1, (5,)) is AppendOutcome.EXPIRED
    assert renew(conn, A) == frozenset()
    with pytest.raises(EpochCapabilityExpired, match="its lease has run out"):
        hold(conn, space, A, [(6,)])
    later = ProducerIdentity("a", 2)
    assert least(hold(conn, space, later, [(6,)])) == [(5,)], "a later life begins anew"


@pytest.mark.conforms("S9")
def test_a_later_life_keeps_what_is_known_of_earlier(conn: psycopg.Connection[Any], space: int) -> None:
    hold(conn, space, A, [(3,)], lease_s=0.0)
    epoch_leases.expire(conn)
    hold(conn, space, ProducerIdentity("a", 2), [(6,)], lease_s=0.0)
    epoch_leases.expire(conn)
    hold(conn, space, ProducerIdentity("a", 3), [(7,)])
    known = conn.execute(
        "select incarnation, least, expired_at is null from capability order by incarnation"
    ).fetchall()
    assert known == [(1, [[3]], False), (2, [[6]], False), (3, [[7]], True)]


@pytest.mark.conforms("S9")
def test_a_dropped_space_is_in_no_others_way(conn: psycopg.Connection[Any], space: int) -> None:
    create_space(conn, "other", "other/#", shards=1)
    hold(conn, find_space(conn, "other").space_id, A, [(3,)], lease_s=0.0)
    hold(conn, space, B, [(3,)], lease_s=0.0)
    drop_space(conn, "other")
    assert epoch_leases.expire(conn) == [(space, "b")]


@pytest.mark.conforms("S9")
def test_all_epochs_of_a_dropped_space_are_complete(conn: psycopg.Connection[Any], space: int) -> None:
    create_space(conn, "other", "other/#", shards=1)
    other = find_space(conn, "other").space_id
    hold(conn, other, A, [(3,)])
    (index,) = (place for place, stream in enumerate(open_streams(conn)) if stream.space_id == other)
    assert sent(conn, A, 1, (7,), stream=index) is AppendOutcome.APPENDED
    drop_space(conn, "other")
    assert least(read_lower_frontier(conn, other)) == [(8,)]


def test_one_that_renews_keeps_what_it_holds(conn: psycopg.Connection[Any], space: int) -> None:
    hold(conn, space, A, [(3,)], lease_s=0.0)
    assert renew(conn, A, LONG_S) == {space}
    assert epoch_leases.expire(conn) == []


def test_a_living_one_that_is_writing_delays_no_pass(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    hold(conn, space, A, [(3,)], LONG_S)
    conn.execute("set lock_timeout = 0; set statement_timeout = '10s'")
    with connect(database) as writer, writer.transaction():
        assert sent(writer, A, 1, (3,)) is AppendOutcome.APPENDED
        assert epoch_leases.expire(conn) == []


def test_one_that_is_writing_is_left_for_next_time(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    hold(conn, space, A, [(3,)], lease_s=0.0)
    conn.execute("set lock_timeout = 50")
    with connect(database) as writer, writer.transaction():
        assert sent(writer, A, 1, (3,)) is AppendOutcome.APPENDED
        assert epoch_leases.expire(conn) == []
    assert epoch_leases.expire(conn) == [(space, "a")]


def test_locked_producers_hold_up_no_others(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    """Whoever may append can lock all their names in one transaction, for as long as he likes."""
    for producer in (A, B):
        hold(conn, space, producer, [(3,)], lease_s=0.0)
    with connect(database) as other, other.transaction():
        other.execute("select lock_producer('a')")
        assert epoch_leases.expire(conn) == [(space, "b")]
    assert epoch_leases.expire(conn) == [(space, "a")]


def test_a_later_life_takes_over_what_was_held(conn: psycopg.Connection[Any], space: int) -> None:
    hold(conn, space, A, [(3,)])
    assert least(hold(conn, space, ProducerIdentity("a", 2), [(4,)])) == [(4,)]
    with pytest.raises(ProducerFenced):
        hold(conn, space, A, [(5,)])
    assert least(hold(conn, space, B, [(6,)])) == [(4,)], "no other producer is fenced"
    with pytest.raises(ProducerFenced):
        release(conn, space, A)
    assert least(read_lower_frontier(conn, space)) == [(4,)], "the earlier life gives nothing back"


def test_at_random_the_frontier_never_goes_back(conn: psycopg.Connection[Any], space: int) -> None:
    dice = random.Random(7)
    before, number = read_lower_frontier(conn, space), 0
    for _ in range(400):
        who, number = ProducerIdentity(dice.choice("abcd"), 1 + dice.randrange(2)), number + 1
        epoch = (dice.randrange(12), dice.randrange(12))
        try:
            match dice.randrange(5):
                case 0 | 1:
                    hold(conn, space, who, [epoch], lease_s=dice.choice([0.0, LONG_S]))
                case 2:
                    release(conn, space, who)
                case 3:
                    epoch_leases.expire(conn)
                case _:
                    if sent(conn, who, number, epoch) is AppendOutcome.APPENDED:
                        assert before is not None
                        assert before.admits(epoch)
        except (EpochAlreadyCompleted, EpochCapabilityExpired, ProducerFenced):
            pass
        now = read_lower_frontier(conn, space)
        assert before is None or (now is not None and before.is_at_or_before(now)), (before, now)
        before = now


# --- the publisher --------------------------------------------------------------------------------------------------


def delivered(conn: psycopg.Connection[Any]) -> list[tuple[bytes, list[int] | None]]:
    return sorted((m["value"], m["epoch"]) for messages in everything(conn).values() for m in messages)


def test_messages_are_published_in_their_epochs(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    with Publisher(database, space="default") as publisher:
        publisher.advance(3)
        publisher.publish("t", b"without")
        early = publisher.in_epoch(3)
        early.publish("t", b"one")
        publisher.in_epoch(4).publish_batch({"topic": "t", "value": [b"two", b"two"]})
        publisher.publish_batch({"topic": "t", "value": [b"x", b"y"], "epoch": [[5], None]})
        publisher.advance(4)
        assert least(read_lower_frontier(conn, space)) == [(4,)]
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
    assert delivered(conn) == found
    assert least(read_lower_frontier(conn, space)) == [(6,)], "the publisher has left"


def test_who_begins_with_an_epoch_notifies_of_it(
    database: str, conn: psycopg.Connection[Any], space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is completed then, not before."""
    sent: list[ObjectChange] = []

    class Recorder:
        def publish(self, changes: Iterable[ObjectChange]) -> None:
            sent.extend(changes)

    monkeypatch.setattr("sublet_storage.producer.epoch_lease.shared_publisher", lambda url: Recorder())
    with Publisher(database, space="default") as publisher:
        publisher.in_epoch(3)
        assert sent[0] == epoch_leases.frontier_change(conn, space)


def test_the_first_epoch_that_is_used_is_what_is_held(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    with Publisher(database, space="default") as publisher:
        publisher.in_epoch((1, 2))
        assert least(read_lower_frontier(conn, space)) == [(1, 2)]
        with pytest.raises(EpochAlreadyCompleted):
            publisher.in_epoch((0, 9))
        with pytest.raises(InvalidEpoch):
            publisher.in_epoch(3)
        publisher.advance((1, 5), (3, 2), (3, 9))
        assert least(read_lower_frontier(conn, space)) == [(1, 5), (3, 2)]
        publisher.in_epoch((1, 6))
        with pytest.raises(EpochAlreadyCompleted):
            publisher.in_epoch((2, 4))
        with pytest.raises(InvalidEpoch, match="2 numbers"):
            publisher.advance((4, 9), 7)


def test_threads_at_once_take_one_capability(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    with Publisher(database, space="default") as publisher, ThreadPoolExecutor(8) as pool:
        publisher.advance(0)
        asked = [pool.submit(lambda: publisher.in_epoch(7).publish("t", b"x").result(30)) for _ in range(8)]
        assert all(each.result(30) for each in asked)
        assert least(read_lower_frontier(conn, space)) == [(0,)]


def test_epochs_are_a_spaces_own(database: str) -> None:
    with Publisher(database) as publisher:
        with pytest.raises(UsageError, match=r"Publisher\(space='default'\)"):
            publisher.in_epoch(3)
        with pytest.raises(UsageError, match=r"Publisher\(space='default'\)"):
            publisher.advance(3)
        with pytest.raises(UsageError, match="give the one that is next"):
            publisher.advance()


def test_an_advance_is_made_behind_what_is_durable(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    with Publisher(database, space="default", linger_ms=10_000) as publisher:
        publisher.advance(3)
        delivery = publisher.in_epoch(3).publish("t", b"1")
        publisher.advance(4, wait=False)
        assert least(read_lower_frontier(conn, space)) == [(3,)]
        with pytest.raises(EpochAlreadyCompleted, match="has advanced to 4"):
            publisher.in_epoch(3)
        publisher.in_epoch(4).publish("t", b"2")
        publisher.flush()
        assert delivery.is_done
        assert least(read_lower_frontier(conn, space)) == [(4,)]
        publisher.advance(7, wait=False)
        publisher.advance(8)
        assert least(read_lower_frontier(conn, space)) == [(8,)]
        with pytest.raises(EpochAlreadyCompleted, match="has advanced to 8"):
            publisher.in_epoch(7)
        publisher.advance(20, wait=False)
    assert least(read_lower_frontier(conn, space)) == [(20,)], "closing makes it first"


@pytest.mark.conforms("S9")
def test_who_fails_does_not_finish_its_epochs(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    def fail() -> None:
        with Publisher(database, space="default") as publisher:
            publisher.in_epoch(3).publish("t", b"half").result()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert least(read_lower_frontier(conn, space)) == [(3,)]
    conn.execute("update capability set expires_at = clock_timestamp()")
    assert len(epoch_leases.expire(conn)) == 1
    assert least(read_lower_frontier(conn, space)) == [(4,)]
    assert conn.execute("select upper_frontier from capability").fetchall() == [([[3]],)]


def test_the_largest_number_is_refused(database: str, space: int) -> None:
    with Publisher(database, space="default") as publisher:
        for epoch in (2**63 - 1, (2**63 - 1,)):
            with pytest.raises(InvalidEpoch, match="64-bit integer, at most"):
                publisher.in_epoch(epoch)
        with pytest.raises(InvalidEpoch, match="64-bit integer, at most"):
            publisher.publish_batch({"topic": "t", "value": [b"x", b"y"], "epoch": [[1], [2**63 - 1]]})
        publisher.in_epoch(2**63 - 2).publish("t", b"x").result()
        publisher.advance(2**63 - 2)
        publisher.flush()
        with (
            Publisher(database, space="default") as other,
            pytest.raises(EpochAlreadyCompleted, match="Begin with such an epoch"),
        ):
            other.in_epoch(0)
    with (
        Publisher(database, space="default") as publisher,
        pytest.raises(EpochAlreadyCompleted, match="There is none left: take another space"),
    ):
        publisher.in_epoch(2**63 - 2)


@pytest.mark.conforms("X4")
def test_so_many_epochs_are_held_at_a_time(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    """One more is refused where it is given, and nothing is held of it."""
    antichain = [(number, -number) for number in range(MAX_ANTICHAIN + 1)]
    with Publisher(database, space="default") as publisher:
        publisher.advance(*antichain[:-1])
        with pytest.raises(InvalidEpoch, match="1001 epochs at a time, and the limit is 1000"):
            publisher.advance(*antichain)
        with pytest.raises(InvalidEpoch, match="1001 epochs at a time"):
            hold(conn, space, A, antichain)
        lower = read_lower_frontier(conn, space)
        assert lower is not None
        assert list(lower.least) == sorted(antichain[:-1])


@pytest.mark.conforms("X4")
def test_producers_hold_so_many_epochs_together(conn: psycopg.Connection[Any], space: int) -> None:
    """What would exceed the limit later, when others have left, is refused where it is given; nobody is kept from going
    on with as many, or from leaving."""
    theirs = [(number, -number) for number in range(1, MAX_ANTICHAIN - 400)]
    mine = [(number, -number) for number in range(-400, 0)]
    hold(conn, space, C, [(-MAX_ANTICHAIN, -MAX_ANTICHAIN)])  # before all others: alone in the frontier
    hold(conn, space, A, theirs)
    with pytest.raises(InvalidEpoch, match=r"over 1000 epochs, or 10000 .* which is the limit of a space"):
        hold(conn, space, B, [*mine, (0, 0)])
    assert least(hold(conn, space, B, mine)) == [(-MAX_ANTICHAIN, -MAX_ANTICHAIN)]
    with pytest.raises(InvalidEpoch, match="over 1000 epochs"):
        hold(conn, space, ProducerIdentity("d", 1), [(0, 0)])
    hold(conn, space, A, [(x, y + 1) for x, y in theirs])
    release(conn, space, C)
    assert len(least(read_lower_frontier(conn, space))) == MAX_ANTICHAIN - 1
    release(conn, space, A)
    assert least(hold(conn, space, ProducerIdentity("d", 1), [(0, 1)])) == mine


@pytest.mark.conforms("X4")
def test_producers_of_the_same_epochs_are_bounded(conn: psycopg.Connection[Any], space: int) -> None:
    """An advance compares what each of them holds, also where it is the same."""
    same = [(number, -number) for number in range(MAX_ANTICHAIN)]
    for number in range(MAX_HELD_EPOCHS // MAX_ANTICHAIN):
        hold(conn, space, ProducerIdentity(str(number), 1), same)
    with pytest.raises(InvalidEpoch, match="over 1000 epochs, or 10000 with each counted for each that holds it"):
        hold(conn, space, A, same[:1])
    hold(conn, space, ProducerIdentity("0", 1), same[1:])
    hold(conn, space, A, same[:1])


def test_the_least_epoch_is_the_least_number(conn: psycopg.Connection[Any], space: int) -> None:
    """However it is written, and whoever leaves."""
    for name, number in (("0", MIN_EPOCH), ("1", -20), ("2", -3), ("3", 10), ("4", 9), ("5", MAX_EPOCH)):
        hold(conn, space, ProducerIdentity(name, 1), [(number,)])
    frontiers = []
    for name in "01243":
        release(conn, space, ProducerIdentity(name, 1))
        frontiers.append(least(read_lower_frontier(conn, space)))
    assert frontiers == [[(-20,)], [(-3,)], [(9,)], [(10,)], [(MAX_EPOCH,)]]


def test_epochs_of_one_number_have_one_least(conn: psycopg.Connection[Any], space: int) -> None:
    """So many producers may use them as there are, and what is held is stored as its least."""
    conn.execute(
        "insert into capability (space_id, producer_id, incarnation, least, expires_at)"
        " select %s, 'p' || i, 1, jsonb_build_array(jsonb_build_array(i)), now() + interval '1 hour'"
        " from generate_series(1, %s) as i",
        (space, MAX_ANTICHAIN + 1),
    )
    assert least(hold(conn, space, A, [(5,), (6,)])) == [(1,)]
    assert conn.execute("select least from capability where producer_id = 'a'").fetchone() == ([[5]],)


def test_too_many_greatest_epochs_become_their_bound(conn: psycopg.Connection[Any], space: int) -> None:
    """Nothing is refused that was published in epochs that are held, and all that began is completed in the end."""
    hold(conn, space, A, [(0, 0)])
    epochs = [(number, 2 * MAX_ANTICHAIN - number) for number in range(MAX_ANTICHAIN + 1)]
    assert sent(conn, A, 1, *epochs[:600]) is AppendOutcome.APPENDED
    assert sent(conn, A, 2, *epochs[600:]) is AppendOutcome.APPENDED
    greatest = conn.execute("select upper_frontier from stream_upper_frontier where upper_frontier is not null")
    assert greatest.fetchall() == [([[MAX_ANTICHAIN, 2 * MAX_ANTICHAIN]],)]
    release(conn, space, A)
    assert least(read_lower_frontier(conn, space)) == [(0, 2 * MAX_ANTICHAIN + 1), (MAX_ANTICHAIN + 1, 0)]


def test_a_failed_advance_is_raised_by_the_next_flush(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    publisher = Publisher(database, space="default", epoch_lease_s=3600)
    publisher.advance(3)
    conn.execute("update capability set expires_at = clock_timestamp() - interval '1 s'")
    assert len(epoch_leases.expire(conn)) == 1
    publisher.advance(4, wait=False)
    with pytest.raises(EpochCapabilityExpired):
        publisher.flush()
    publisher.close()


def test_threads_undo_no_advance_of_another(
    database: str, conn: psycopg.Connection[Any], space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = SendBuffer.advance
    with Publisher(database, space="default") as publisher:
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
        assert least(read_lower_frontier(conn, space)) == [(6,)]


def test_an_advance_behind_a_failure_raises_why(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    publisher = Publisher(database, space="default", delivery_timeout_s=1)
    publisher.advance(3)
    conn.execute("alter table stream rename to stream_away")
    lost = publisher.in_epoch(3).publish("t", b"lost")
    with pytest.raises(SubletError):
        lost.result()
    conn.execute("alter table stream_away rename to stream")
    with pytest.raises(SubletError, match="the database refuses to store it"):
        publisher.advance(4, wait=False)
    publisher.flush()
    assert least(read_lower_frontier(conn, space)) == [(3,)]
    assert publisher.in_epoch(3).publish("t", b"again").result().offset == 0
    publisher.advance(4)
    publisher.close()
    assert least(read_lower_frontier(conn, space)) == [(4,)]


def test_an_advance_behind_a_broken_batch_ends(database: str, space: int, monkeypatch: pytest.MonkeyPatch) -> None:
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

    publisher = Publisher(database, space="default")
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
def test_an_advance_waits_for_rerouted_messages(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    with Publisher(database, space="default", linger_ms=10_000) as publisher:
        publisher.in_epoch(3).publish("t", b"in the parent").result()
        delivery = publisher.in_epoch(3).publish("t", b"in a child")
        publisher.advance(4, wait=False)
        rollover(conn, "default")
        publisher.flush()
        assert delivery.result().offset == 0
        assert least(read_lower_frontier(conn, space)) == [(4,)]


@pytest.mark.conforms("S12")
def test_a_fenced_publisher_leaves_its_epochs(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    former = Publisher(database, space="default", producer="meter")
    former.advance(3)
    with Publisher(database, space="default", producer="meter") as later:
        with pytest.raises(ProducerFenced):
            former.advance(7)
        former.close()
        assert least(read_lower_frontier(conn, space)) == [(3,)]
        later.advance(4)
        assert least(read_lower_frontier(conn, space)) == [(4,)]


@pytest.mark.conforms("S9")
def test_who_leaves_connects_again_for_that(database: str, conn: psycopg.Connection[Any], space: int) -> None:
    """The connection over which it has begun with epochs was cut while it was idle."""
    with PostgresProxy(database) as proxy:
        publisher = Publisher(proxy.url, space="default")
        publisher.in_epoch(3).publish("t", b"x").result()
        proxy.hang_up()
        publisher.close()
        assert least(read_lower_frontier(conn, space)) == [(4,)]
