"""Whole epochs without a group: live and from history, across streams, rollovers, deaths and restarts."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from protocol.epochs import Epoch, LowerFrontier, UpperFrontier
from protocol.errors import Gone, InvalidEpoch, UsageError
from protocol.words import Filter
from storage import epochs, log
from storage.block import pack
from storage.catalogue import find_space, open_streams
from storage.connect import connect
from storage.epoch_selection import LeftOut
from storage.epoch_tail import Data, EpochReading, Message, Snapshot
from storage.epochs import hold, release
from storage.layout import BLOCK_SCHEMA
from storage.log import Append, Outcome, Producer, Stamp, append
from storage.publish import Publisher
from storage.retention import retain
from storage.spaces import create_space, drop_space, reshard, rollover
from tests.integration.log_kit import batch, in_epochs, put
from tests.kit import eventually
from tests.kit_nodes import ROOT

A, B = Producer("a", 1), Producer("b", 1)
ALL = Filter("#")


@pytest.fixture
def conn(database: str) -> Iterator[psycopg.Connection[Any]]:
    with connect(database) as connection:
        reshard(connection, "default", 2)
        yield connection


@pytest.fixture
def space(conn: psycopg.Connection[Any]) -> int:
    return find_space(conn, "default").space_id


class Story:
    """Blocks in epochs, published by hand."""

    def __init__(self, conn: psycopg.Connection[Any], space: str = "default") -> None:
        self.conn, self.space = conn, find_space(conn, space).space_id
        self._stamps: Counter[str] = Counter()

    def publish(self, who: Producer, *of: Epoch | int, stream: int = 0) -> None:
        """A block with a message in each of these epochs, in the space's stream of that place."""
        self._stamps[who.producer_id] += 1
        stamp = Stamp(who.producer_id, who.incarnation, self._stamps[who.producer_id])
        block = in_epochs(*((each,) if isinstance(each, int) else each for each in of))
        (answer,) = append(self.conn, [Append(self.streams()[stream], block, stamp)])
        assert answer.outcome is Outcome.APPENDED, answer

    def streams(self) -> list[int]:
        """Those that are open, in the order of ids."""
        return [each.stream_id for each in open_streams(self.conn) if each.space_id == self.space]

    def advance(self, who: Producer, *to: Epoch | int) -> None:
        """Move, or take, the producer's capability."""
        hold(self.conn, self.space, who, [(each,) if isinstance(each, int) else each for each in to], lease_s=600)

    def three_and_five(self) -> None:
        """Completed 0, 1, 2; active 3 and 5; in both streams."""
        self.advance(A, 0)
        self.publish(A, 0, 1)
        self.publish(A, 2, 5, stream=1)
        self.publish(A, 3)
        self.advance(A, 3)

    def the_rest(self) -> None:
        """More of what was active, then what comes."""
        self.publish(A, 3, 4, 5, 6)
        self.publish(A, 5, 7, stream=1)
        self.advance(A, 6)
        self.publish(A, 6, 8)
        self.advance(A, 9)


@pytest.fixture
def story(conn: psycopg.Connection[Any]) -> Story:
    return Story(conn)


def seen(messages: Iterable[Message]) -> Counter[Epoch | None]:
    """{epoch: how many messages of it}."""
    found: Counter[Epoch | None] = Counter()
    for message in messages:
        if isinstance(message, Data):
            found.update(None if epoch is None else tuple(epoch) for epoch in message.table.column("epoch").to_pylist())
    return found


def numbers(counted: Counter[Epoch | None]) -> dict[int | None, int]:
    """`seen`, of epochs of one number."""
    return {None if epoch is None else epoch[0]: count for epoch, count in counted.items()}


def told(messages: Iterable[Message]) -> list[tuple[Epoch, ...]]:
    """The lower frontiers, in their order."""
    return [message.least for message in messages if isinstance(message, LowerFrontier)]


def check_course(messages: list[Message]) -> None:
    """The snapshot first and once; frontiers move on only; nothing of an epoch comes after it was completed."""
    assert isinstance(messages[0], Snapshot)
    assert not any(isinstance(each, Snapshot) for each in messages[1:])
    lower = messages[0].lower
    for message in messages[1:]:
        if isinstance(message, LowerFrontier):
            assert lower is None or (lower != message and lower.is_at_or_before(message))
            lower = message
        elif lower is not None:
            assert all(epoch is None or lower.may_come(epoch) for epoch in seen([message]))


# --- who joins ------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("S1", "S2")
def test_a_live_reader_sees_what_begins_after_it_has_come_and_nothing_of_what_had_begun(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    story.three_and_five()
    reading = EpochReading(conn, ALL)
    first = list(reading.messages(conn))
    assert first == [Snapshot(LowerFrontier(((3,),)), UpperFrontier(((5,),)))]
    story.the_rest()
    rest = list(reading.messages(conn))
    assert numbers(seen(rest)) == {6: 2, 7: 1, 8: 1}
    assert told(rest) == [((9,),)]
    check_course(first + rest)


@pytest.mark.conforms("S7", "S1")
def test_from_history_a_reader_gets_the_active_epochs_whole_and_no_completed_ones(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    story.three_and_five()
    reading = EpochReading(conn, ALL, "active")
    assert reading.snapshot == Snapshot(LowerFrontier(((3,),)), UpperFrontier(((5,),)))
    first = list(reading.messages(conn))
    assert numbers(seen(first)) == {3: 1, 5: 1}
    story.the_rest()
    rest = list(reading.messages(conn))
    assert numbers(seen(first + rest)) == {3: 2, 4: 1, 5: 3, 6: 2, 7: 1, 8: 1}
    check_course(first + rest)


@pytest.mark.conforms("S1", "S4")
def test_from_the_beginning_all_epochs_come_and_are_completed_once(conn: psycopg.Connection[Any], story: Story) -> None:
    story.three_and_five()
    reading = EpochReading(conn, ALL, "earliest")
    first = list(reading.messages(conn))
    assert first[0] == Snapshot(None, UpperFrontier(((5,),)))
    assert told(first) == [((3,),)], "a reader of history is told of its epochs after it was given them"
    story.the_rest()
    rest = list(reading.messages(conn))
    assert numbers(seen(first + rest)) == {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 3, 6: 2, 7: 1, 8: 1}
    assert told(rest) == [((9,),)]
    check_course(first + rest)


@pytest.mark.conforms("S10")
def test_who_opts_out_gets_epochs_in_part_and_hears_of_the_frontier(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    story.three_and_five()
    reading = EpochReading(conn, ALL, whole=False)
    story.the_rest()
    messages = list(reading.messages(conn))
    assert numbers(seen(messages)) == {3: 1, 4: 1, 5: 2, 6: 2, 7: 1, 8: 1}
    assert told(messages) == [((9,),)]
    with pytest.raises(UsageError, match="'active' is for whole epochs"):
        EpochReading(conn, ALL, "active", whole=False)


@pytest.mark.conforms("S2", "S3")
def test_in_product_order_what_lies_beside_the_filter_is_seen(conn: psycopg.Connection[Any], story: Story) -> None:
    story.advance(A, (0, 0))
    story.publish(A, (1, 2), (2, 1))
    reading = EpochReading(conn, ALL)
    assert reading.snapshot.upper == UpperFrontier(((1, 2), (2, 1)))
    story.publish(A, (1, 1), (2, 2), (0, 3))
    story.publish(A, (1, 2), (0, 2))
    first = list(reading.messages(conn))
    assert seen(first) == {(2, 2): 1, (0, 3): 1}
    story.advance(A, (2, 0))
    story.publish(A, (2, 1), (3, 0))
    assert seen(reading.messages(conn)) == {(3, 0): 1}, "(2, 1) may still come: it is not retired"
    story.advance(A, (2, 2))
    assert told(reading.messages(conn)) == [((2, 2),)]
    assert not reading.filtering


def test_messages_without_an_epoch_always_come_also_out_of_blocks_that_have_others(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    story.three_and_five()
    reading = EpochReading(conn, ALL)
    put(conn, story.streams()[0], b"plain")
    plain = batch([b"in 3", b"without", b"in 6"])
    place = BLOCK_SCHEMA.get_field_index("epoch")
    column = pa.array([[3], None, [6]], BLOCK_SCHEMA.field(place).type)
    mixed = pack(plain.set_column(place, BLOCK_SCHEMA.field(place), column))
    append(conn, [Append(story.streams()[0], mixed, Stamp("a", 1, 99))])
    assert numbers(seen(reading.messages(conn))) == {None: 2, 6: 1}


# --- several streams and spaces -------------------------------------------------------------------------------------


@pytest.mark.conforms("S5")
def test_the_frontiers_of_several_spaces_are_merged_and_epochs_whole_across_them(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    create_space(conn, "eu", "eu/#", shards=2)
    other = Story(conn, "eu")
    story.advance(A, 4)
    story.publish(A, 4)
    other.advance(B, 3)
    other.publish(B, 6, stream=1)
    reading = EpochReading(conn, ALL)
    assert reading.snapshot == Snapshot(LowerFrontier(((3,),)), UpperFrontier(((6,),)))
    story.publish(A, 5, 6, 7)
    story.advance(A, 9)
    other.publish(B, 6, 7, 8)
    messages = list(reading.messages(conn))
    assert numbers(seen(messages)) == {7: 2, 8: 1}
    assert told(messages) == []
    other.advance(B, 8)
    assert told(reading.messages(conn)) == [((8,),)]


@pytest.mark.conforms("S4")
def test_a_frontier_is_told_once_and_after_all_it_completes_also_across_a_rollover(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    story.advance(A, 0)
    reading = EpochReading(conn, ALL)
    assert len(list(reading.messages(conn))) == 1
    story.publish(A, 0, 1)
    rollover(conn, "default")
    story.publish(A, 1, 2, stream=1)
    reshard(conn, "default", 3)
    story.publish(A, 2, stream=2)
    story.advance(A, 5)
    messages = list(reading.messages(conn))
    assert numbers(seen(messages)) == {0: 1, 1: 2, 2: 2}
    assert messages[-1] == LowerFrontier(((5,),)), "3 and 4 were skipped: they are completed, empty"
    assert told(messages) == [((5,),)]
    assert list(reading.messages(conn)) == []
    put(conn, story.streams()[0], b"plain")
    assert told(reading.messages(conn)) == []


@pytest.mark.conforms("S4")
def test_what_is_published_while_it_reads_does_not_hold_the_frontier_back(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    """The frontier is of the look: it does not wait for an end that never comes."""
    story.advance(A, 0)
    reading = EpochReading(conn, ALL)
    story.publish(A, 1)
    story.advance(A, 2)
    messages: list[Message] = []
    for message in reading.messages(conn):
        messages.append(message)
        if isinstance(message, Data):
            assert len(messages) < 20
            story.publish(A, 2)
    assert told(messages) == [((2,),)]


@pytest.mark.conforms("S4")
def test_of_a_space_that_begins_late_nothing_comes_that_was_told_to_be_completed(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    story.advance(A, 5)
    reading = EpochReading(conn, ALL)
    first = list(reading.messages(conn))
    create_space(conn, "eu", "eu/#", shards=1)
    other = Story(conn, "eu")
    other.advance(B, 3)
    other.publish(B, 3, 6)
    messages = list(reading.messages(conn))
    story.publish(A, 6)
    story.advance(A, 9)
    other.publish(B, 4, 6, 7)
    other.advance(B, 7)
    messages += list(reading.messages(conn))
    assert numbers(seen(messages)) == {6: 3, 7: 1}
    assert told(messages) == [((7,),)]
    check_course(first + messages)


@pytest.mark.conforms("S5")
def test_spaces_of_which_only_history_matches_are_not_compared(conn: psycopg.Connection[Any], story: Story) -> None:
    story.advance(A, (10**9, 1))
    story.publish(A, (10**9, 1))
    create_space(conn, "eu", "eu/#", shards=1)
    other = Story(conn, "eu")
    other.advance(B, 3)
    mine = Filter("eu/#")
    live, history = EpochReading(conn, mine), EpochReading(conn, mine, "earliest")
    assert live.snapshot == Snapshot(LowerFrontier(((3,),)), UpperFrontier())
    other.publish(B, 3)
    other.advance(B, 4)
    for reading in (live, history):
        assert told(reading.messages(conn)) == [((4,),)]
    with pytest.raises(InvalidEpoch, match="Read each space by a filter of its own"):
        EpochReading(conn, ALL)
    drop_space(conn, "eu")
    assert list(live.messages(conn)) == []


# --- what is left out costs little ----------------------------------------------------------------------------------


@pytest.mark.conforms("S6")
def test_blocks_that_are_left_out_are_neither_fetched_nor_decoded(conn: psycopg.Connection[Any], story: Story) -> None:
    story.three_and_five()
    reading = EpochReading(conn, ALL)
    stream = story.streams()[0]
    for _ in range(9):
        story.publish(A, 3, 5)
    conn.execute("update block set payload = '\\x00'")
    story.publish(A, 6)
    assert numbers(seen(reading.messages(conn))) == {6: 1}
    left_out = LeftOut(UpperFrontier(((5,),)), None)
    page = log.since(conn, stream, 3, left_out=left_out, limit_bytes=1)
    assert page.position == page.head, "what is not fetched does not count as bytes of a page"
    with pytest.raises(pa.ArrowInvalid):
        log.since(conn, stream, 3)


@pytest.mark.conforms("S6")
def test_with_the_frontier_past_it_there_is_no_filter_any_more(
    conn: psycopg.Connection[Any], story: Story, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    since = log.since

    def noted(*args: Any, **kwargs: Any) -> log.Page:
        asked.append(kwargs["left_out"])
        return since(*args, **kwargs)

    monkeypatch.setattr(log, "since", noted)
    story.three_and_five()
    reading = EpochReading(conn, ALL)
    story.publish(A, 5)
    list(reading.messages(conn))
    assert reading.filtering
    story.advance(A, 6)
    list(reading.messages(conn))
    assert not reading.filtering
    story.publish(A, 6)
    assert numbers(seen(reading.messages(conn))) == {6: 1}
    assert asked == [LeftOut(UpperFrontier(((5,),)), None), None]


# --- retention ------------------------------------------------------------------------------------------------------


def take_what_is_closed(conn: psycopg.Connection[Any]) -> None:
    conn.execute("update space set retention_s = 1")
    conn.execute("update generation set closed_at = closed_at - interval '9 s' where state = 'closed'")
    assert retain(conn)


@pytest.mark.conforms("S7")
@pytest.mark.parametrize(("begin", "wanted"), [("earliest", {6: 3, 7: 1}), ("active", {6: 3, 7: 1})])
def test_of_epochs_that_retention_has_taken_in_part_nothing_comes(
    conn: psycopg.Connection[Any], story: Story, begin: str, wanted: dict[int | None, int]
) -> None:
    story.three_and_five()
    rollover(conn, "default")
    story.publish(A, 5, 6)
    take_what_is_closed(conn)
    reading = EpochReading(conn, ALL, begin)
    messages = list(reading.messages(conn))
    story.publish(A, 4, 5, 6, stream=1)
    story.publish(A, 6, 7)
    assert numbers(seen([*messages, *reading.messages(conn)])) == wanted


@pytest.mark.conforms("S3")
def test_where_retention_takes_what_was_to_come_reading_ends_with_the_reason(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    story.three_and_five()
    gone: list[Gone] = []
    torn, partial = EpochReading(conn, ALL), EpochReading(conn, ALL, whole=False, on_gone=gone.append)
    untouched = EpochReading(conn, ALL, on_gone=gone.append)
    story.publish(A, 5)
    list(untouched.messages(conn))
    story.publish(A, 6)
    list(partial.messages(conn))
    story.publish(A, 6)
    list(untouched.messages(conn))
    rollover(conn, "default")
    take_what_is_closed(conn)
    story.publish(A, 6)
    for _ in range(2):
        with pytest.raises(Gone):
            list(torn.messages(conn))
    assert numbers(seen(partial.messages(conn))) == {6: 1}
    assert numbers(seen(untouched.messages(conn))) == {6: 1}
    assert len(gone) == 1


def test_what_retention_has_taken_of_left_out_epochs_is_told_and_harms_nothing(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    story.three_and_five()
    gone: list[Gone] = []
    reading = EpochReading(conn, ALL, on_gone=gone.append)
    story.publish(A, 3, 5)
    rollover(conn, "default")
    take_what_is_closed(conn)
    story.publish(A, 5, 6)
    assert numbers(seen(reading.messages(conn))) == {6: 1}
    assert len(gone) == 1


# --- deaths and restarts --------------------------------------------------------------------------------------------

DYING = """
import os, signal, sys
from storage.publish import Publisher

publisher = Publisher(sys.argv[1], space="default", epoch_lease_s=1)
publisher.advance(3)
publisher.at(4).publish("t", b"unfinished").result(30)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.conforms("S4")
def test_a_publisher_that_dies_holds_the_frontier_back_for_its_lease_and_what_it_left_is_completed(
    database: str, conn: psycopg.Connection[Any], story: Story
) -> None:
    story.advance(A, 2)
    reading = EpochReading(conn, ALL)
    messages = list(reading.messages(conn))
    subprocess.run([sys.executable, "-c", DYING, database], cwd=ROOT, check=False, timeout=60)
    story.publish(A, 7)
    story.advance(A, 9)
    messages += reading.messages(conn)
    assert numbers(seen(messages)) == {4: 1, 7: 1}
    assert told(messages) == [((3,),)]
    eventually(lambda: epochs.expire(conn), 30)
    assert told(reading.messages(conn)) == [((9,),)]


def test_it_goes_on_over_another_connection_where_it_was(
    database: str, conn: psycopg.Connection[Any], story: Story
) -> None:
    story.three_and_five()
    story.publish(A, 5, stream=1)
    with connect(database) as first:
        reading = EpochReading(first, ALL, "active")
        course = reading.messages(first)
        messages = [next(course), next(course)]
        conn.execute("select pg_terminate_backend(%s)", (first.info.backend_pid,))
        with pytest.raises(psycopg.OperationalError):
            list(course)
    story.the_rest()
    messages += reading.messages(conn)
    assert numbers(seen(messages)) == {3: 2, 4: 1, 5: 4, 6: 2, 7: 1, 8: 1}
    check_course(messages)


@pytest.mark.conforms("S7")
def test_a_durable_reader_that_begins_again_gets_what_was_not_completed_whole(
    conn: psycopg.Connection[Any], story: Story
) -> None:
    story.three_and_five()
    first = EpochReading(conn, ALL, "active")
    assert numbers(seen(first.messages(conn))) == {3: 1, 5: 1}
    story.publish(A, 4, 5)
    story.advance(A, 4)
    again = EpochReading(conn, ALL, "active")
    messages = list(again.messages(conn))
    assert numbers(seen(messages)) == {4: 1, 5: 2}
    check_course(messages)


@pytest.mark.conforms("S3", "S4", "S5")
def test_under_load_with_rollovers_and_deaths_every_reader_gets_whole_epochs(
    database: str, conn: psycopg.Connection[Any]
) -> None:
    """Three publishers in two spaces, of which one leaves early; readers join all the time."""
    create_space(conn, "eu", "eu/#", shards=2)
    for space, each in (("default", A), ("eu", B)):
        hold(conn, find_space(conn, space).space_id, each, [(0,)], lease_s=600)
    over = threading.Event()
    courses: list[tuple[str, list[Message]]] = []

    def publish(space: str, topic: str, until: int) -> None:
        publisher = Publisher(database, space=space, epoch_lease_s=1, linger_ms=1)
        for epoch in range(until):
            for early in range(3):
                publisher.publish_batch({"topic": topic, "value": [b"x"] * 5, "epoch": [[epoch + early]] * 5})
            publisher.advance(epoch + 1)
        publisher.close()

    def read(begin: str) -> None:
        with connect(database) as mine:
            reading, messages = EpochReading(mine, ALL, begin), list[Message]()
            courses.append((begin, messages))
            while not over.is_set():
                messages += reading.messages(mine)
            messages += reading.messages(mine)

    def churn() -> None:
        with connect(database) as mine:
            for shards in (3, 1, 2):
                eventually(lambda: _published(mine) > 100 * (4 - shards), 60)
                reshard(mine, "default", shards)

    work = [("default", "t", 40), ("default", "u", 25), ("eu", "eu/1", 40)]
    writers = [threading.Thread(target=publish, args=each) for each in work]
    writers.append(threading.Thread(target=churn))
    readers = []
    for writer in writers:
        writer.start()
    for number in range(9):
        readers.append(threading.Thread(target=read, args=(("latest", "active", "earliest")[number % 3],)))
        readers[-1].start()
        eventually(lambda: _published(conn) > 100 * number or not any(w.is_alive() for w in writers), 60)
    for writer in writers:
        writer.join(60)
    for space, each in (("default", A), ("eu", B)):
        release(conn, find_space(conn, space).space_id, each)
    over.set()
    for reader in readers:
        reader.join(60)
    assert not any(thread.is_alive() for thread in (*writers, *readers))
    had = _had(conn)
    assert len(courses) == 9
    for begin, messages in courses:
        check_course(messages)
        assert all(had[epoch] == count for epoch, count in seen(messages).items() if epoch is not None), begin
        if begin == "earliest":
            assert seen(messages) == had
    assert any(seen(messages) for begin, messages in courses if begin == "latest")


def _published(conn: psycopg.Connection[Any]) -> int:
    row = conn.execute("select sum(head)::bigint from stream").fetchone()
    return int(row[0] or 0) if row else 0


def _had(conn: psycopg.Connection[Any]) -> Counter[Epoch | None]:
    return seen(EpochReading(conn, ALL, "earliest", whole=False).messages(conn))
