"""Whole epochs without a group: who joins when, across streams and spaces, and what is left out."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pytest

from sublet_protocol.domain.epoch_frontiers import Epoch, LowerFrontier, UpperFrontier
from sublet_protocol.domain.errors import InvalidEpoch, PoisonBlock, PositionBeyondHead, UsageError
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.db.connect import connect
from sublet_storage.log import fetch as message_log
from sublet_storage.log.append import BlockAppend, ProducerStamp, append
from sublet_storage.log.block_encoder import pack
from sublet_storage.log.column_encoding import BLOCK_SCHEMA
from sublet_storage.log.complete_epoch_filter import ExcludedEpochs
from sublet_storage.producer import Publisher
from sublet_storage.readers.complete_epoch_tail import (
    EpochTailItem,
    EpochTailMessages,
    EpochTailReader,
    FrontierSnapshot,
)
from sublet_storage.spaces.space_changes import alter_space, create_space, drop_space, reshard, rollover
from tests.integration.cli_kit import Shell
from tests.integration.epoch_kit import ALL, A, B, EpochBlocks, check_course, numbers, reported, seen
from tests.integration.log_kit import Connection, batch, put


def publish_late(story: EpochBlocks, epoch: Epoch) -> None:
    """Publish in a completed epoch, which no producer may: only who filters no more gets it."""
    story.conn.execute("update capability set least = %s", (json.dumps([epoch]),))
    story.publish(A, epoch)


@pytest.fixture
def story(conn: Connection) -> EpochBlocks:
    return EpochBlocks(conn)


# --- who joins ------------------------------------------------------------------------------------------------------


@pytest.mark.conforms("S1", "S2", "S4", "S7")
@pytest.mark.parametrize(
    ("begin", "at_first", "in_all"),
    [
        ("latest", {}, {6: 2, 7: 1, 8: 1}),
        ("active", {3: 1, 5: 1}, {3: 2, 4: 1, 5: 3, 6: 2, 7: 1, 8: 1}),
        ("earliest", {0: 1, 1: 1, 2: 1, 3: 1, 5: 1}, {0: 1, 1: 1, 2: 1, 3: 2, 4: 1, 5: 3, 6: 2, 7: 1, 8: 1}),
    ],
)
def test_where_a_reader_begins_it_gets_entire_epochs(
    conn: Connection, story: EpochBlocks, begin: str, at_first: dict[int | None, int], in_all: dict[int | None, int]
) -> None:
    """Live, nothing that had begun; of the active ones, all; from the beginning, the completed ones too."""
    story.three_and_five()
    reading = EpochTailReader(conn, ALL, begin)
    first = list(reading.read_available(conn))
    lower = None if begin == "earliest" else LowerFrontier(((3,),))
    assert first[0] == reading.snapshot == FrontierSnapshot(lower, UpperFrontier(((5,),)))
    assert numbers(seen(first)) == at_first
    assert reported(first) == ([((3,),)] if begin == "earliest" else []), "history is reported of what it was given"
    story.the_rest()
    rest = list(reading.read_available(conn))
    assert numbers(seen(first + rest)) == in_all
    assert reported(rest) == [((9,),)]
    check_course(first + rest)


@pytest.mark.conforms("S10", "P10")
def test_no_frontier_comes_from_another_timeline(database: str, conn: Connection) -> None:
    """Where a stream ends as before, other messages may lie in it."""
    reading = EpochTailReader(conn, ALL)
    with connect(database) as after:
        after.timeline = "another"
        with pytest.raises(PositionBeyondHead, match="gone over to another timeline"):
            list(reading.read_available(after))


@pytest.mark.conforms("S10")
def test_who_opts_out_gets_epochs_in_part(conn: Connection, story: EpochBlocks) -> None:
    story.three_and_five()
    reading = EpochTailReader(conn, ALL, entire=False)
    story.the_rest()
    messages = list(reading.read_available(conn))
    assert numbers(seen(messages)) == {3: 1, 4: 1, 5: 2, 6: 2, 7: 1, 8: 1}
    assert reported(messages) == [((9,),)]
    with pytest.raises(UsageError, match="'active' is for whole epochs"):
        EpochTailReader(conn, ALL, "active", entire=False)


@pytest.mark.conforms("S2", "S3")
def test_epochs_beside_the_filter_are_seen(conn: Connection, story: EpochBlocks) -> None:
    story.advance(A, (0, 0))
    story.publish(A, (1, 2), (2, 1))
    reading = EpochTailReader(conn, ALL)
    assert reading.snapshot.upper == UpperFrontier(((1, 2), (2, 1)))
    story.publish(A, (1, 1), (2, 2), (0, 3))
    story.publish(A, (1, 2), (0, 2))
    first = list(reading.read_available(conn))
    assert seen(first) == {(2, 2): 1, (0, 3): 1}
    story.advance(A, (2, 0))
    story.publish(A, (2, 1), (3, 0))
    assert seen(reading.read_available(conn)) == {(3, 0): 1}, "(2, 1) may still come: it is not retired"
    story.advance(A, (2, 2))
    assert reported(reading.read_available(conn)) == [((2, 2),)]
    publish_late(story, (1, 1))
    assert seen(reading.read_available(conn)) == {(1, 1): 1}, "nothing is filtered any more"


def test_messages_without_an_epoch_always_come(conn: Connection, story: EpochBlocks) -> None:
    story.three_and_five()
    reading = EpochTailReader(conn, ALL)
    put(conn, story.streams()[0], b"plain")
    plain = batch([b"in 3", b"without", b"in 5"])
    place = BLOCK_SCHEMA.get_field_index("epoch")
    column = pa.array([[3], None, [5]], BLOCK_SCHEMA.field(place).type)
    mixed = pack(plain.set_column(place, BLOCK_SCHEMA.field(place), column))
    append(conn, [BlockAppend(story.streams()[0], mixed, ProducerStamp("a", 1, 99))])
    story.publish(A, 6, stream=1)
    assert numbers(seen(reading.read_available(conn))) == {None: 2, 6: 1}


# --- several streams and spaces -------------------------------------------------------------------------------------


@pytest.mark.conforms("S5")
def test_frontiers_of_several_spaces_are_merged(conn: Connection, story: EpochBlocks) -> None:
    create_space(conn, "eu", "eu/#", shards=2)
    other = EpochBlocks(conn, "eu")
    story.advance(A, 4)
    story.publish(A, 4)
    other.advance(B, 3)
    other.publish(B, 6, stream=1)
    reading = EpochTailReader(conn, ALL)
    assert reading.snapshot == FrontierSnapshot(LowerFrontier(((3,),)), UpperFrontier(((6,),)))
    story.publish(A, 5, 6, 7)
    story.advance(A, 9)
    other.publish(B, 6, 7, 8)
    messages = list(reading.read_available(conn))
    assert numbers(seen(messages)) == {7: 2, 8: 1}
    assert reported(messages) == []
    other.advance(B, 8)
    assert reported(reading.read_available(conn)) == [((8,),)]


@pytest.mark.conforms("S4")
def test_a_frontier_comes_once_after_its_messages(conn: Connection, story: EpochBlocks) -> None:
    story.advance(A, 0)
    reading = EpochTailReader(conn, ALL)
    assert len(list(reading.read_available(conn))) == 1
    story.publish(A, 0, 1)
    rollover(conn, "default")
    story.publish(A, 1, 2, stream=1)
    reshard(conn, "default", 3)
    story.publish(A, 2, stream=2)
    story.advance(A, 5)
    messages = list(reading.read_available(conn))
    assert numbers(seen(messages)) == {0: 1, 1: 2, 2: 2}
    assert messages[-1] == LowerFrontier(((5,),)), "3 and 4 were skipped: they are completed, empty"
    assert reported(messages) == [((5,),)]
    assert list(reading.read_available(conn)) == []
    put(conn, story.streams()[0], b"plain")
    assert reported(reading.read_available(conn)) == []


@pytest.mark.conforms("S4")
def test_heads_pushed_while_reading_hold_nothing_back(conn: Connection, story: EpochBlocks) -> None:
    """The frontier is of the look: it does not wait for an end that never comes."""
    story.advance(A, 0)
    reading = EpochTailReader(conn, ALL)
    story.publish(A, 1)
    story.advance(A, 2)
    messages: list[EpochTailItem] = []
    for message in reading.read_available(conn):
        messages.append(message)
        if isinstance(message, EpochTailMessages):
            assert len(messages) < 20
            story.publish(A, 2)
    assert reported(messages) == [((2,),)]


@pytest.mark.conforms("S4")
def test_a_late_space_adds_nothing_to_what_is_reported(conn: Connection, story: EpochBlocks) -> None:
    story.advance(A, 5)
    reading = EpochTailReader(conn, ALL)
    first = list(reading.read_available(conn))
    create_space(conn, "eu", "eu/#", shards=1)
    other = EpochBlocks(conn, "eu")
    other.advance(B, 3)
    other.publish(B, 3, 6)
    messages = list(reading.read_available(conn))
    story.publish(A, 6)
    story.advance(A, 9)
    other.publish(B, 4, 6, 7)
    other.advance(B, 7)
    messages += list(reading.read_available(conn))
    assert numbers(seen(messages)) == {6: 3, 7: 1}
    assert reported(messages) == [((7,),)]
    check_course(first + messages)


@pytest.mark.conforms("S3")
def test_a_new_space_is_read_no_further_than_the_look(conn: Connection, story: EpochBlocks) -> None:
    """What it publishes meanwhile may be in epochs that are reported as completed at the end of this very round."""
    create_space(conn, "eu", "eu/#", shards=1)
    rollover(conn, "eu")
    other = EpochBlocks(conn, "eu")
    assert min(other.streams()) > max(story.streams()), "it is read after the others"
    story.advance(A, 2)
    reading = EpochTailReader(conn, ALL)
    put(conn, story.streams()[0], b"plain")
    put(conn, other.streams()[0], b"plain", topic="eu/1")
    story.advance(A, 5)
    messages: list[EpochTailItem] = []
    for message in reading.read_available(conn):
        if isinstance(message, EpochTailMessages) and not seen(messages):
            other.advance(B, 3)
            other.publish(B, 3, 6)
        messages.append(message)
    other.publish(B, 3, 6)
    messages += reading.read_available(conn)
    assert numbers(seen(messages)) == {None: 2, 6: 2}
    check_course(messages)


@pytest.mark.conforms("S5")
def test_spaces_beside_the_filter_are_not_compared(conn: Connection, story: EpochBlocks) -> None:
    story.advance(A, (10**9, 1))
    story.publish(A, (10**9, 1))
    create_space(conn, "eu", "eu/#", shards=1)
    other = EpochBlocks(conn, "eu")
    other.advance(B, 3)
    mine = TopicFilter("eu/#")
    live, history = EpochTailReader(conn, mine), EpochTailReader(conn, mine, "earliest")
    assert live.snapshot == FrontierSnapshot(LowerFrontier(((3,),)), UpperFrontier())
    other.publish(B, 3)
    other.advance(B, 4)
    for reading in (live, history):
        assert reported(reading.read_available(conn)) == [((4,),)]
    with pytest.raises(InvalidEpoch, match="Read each space by a filter of its own"):
        EpochTailReader(conn, ALL)
    drop_space(conn, "eu")
    with pytest.raises(InvalidEpoch):
        list(live.read_available(conn))


@pytest.mark.conforms("S2")
@pytest.mark.parametrize("begin", ["latest", "active", "earliest"])
def test_what_began_in_a_shadow_is_left_out(conn: Connection, story: EpochBlocks, begin: str) -> None:
    """Of a space whose topics come back: what had begun when a live reader began, or, from history, what is gone."""
    story.advance(A, 7)
    story.publish(A, 7)
    create_space(conn, "all", "+/#", shards=1)
    conn.execute("update generation set state = 'gone' where space_id = %s and state = 'closed'", (story.space,))
    reading = EpochTailReader(conn, TopicFilter("t"), begin)
    first = list(reading.read_available(conn))
    assert first == [FrontierSnapshot(None, UpperFrontier())]
    first += reading.read_available(conn)
    drop_space(conn, "all")
    story.publish(A, 7, 8)
    messages = list(reading.read_available(conn))
    story.advance(A, 8)
    messages += reading.read_available(conn)
    assert (numbers(seen(messages)), reported(messages)) == ({8: 1}, [((7,),), ((8,),)])
    story.publish(A, 9)
    assert numbers(seen(reading.read_available(conn))) == {9: 1}
    publish_late(story, (7,))
    late = numbers(seen(reading.read_available(conn)))
    assert late == {7: 1} or begin == "earliest", "nothing is filtered any more"


@pytest.mark.conforms("S3", "S7")
@pytest.mark.parametrize("lower", [3, 100])
@pytest.mark.parametrize(("begin", "completed"), [("active", {}), ("earliest", {6: 1})])
def test_history_in_a_shadow_has_no_epoch_in_part(
    conn: Connection, story: EpochBlocks, begin: str, completed: dict[int | None, int], lower: int
) -> None:
    """Of a space whose topics come back: what had begun and was not completed comes not at all, whatever the space that
    had them has completed meanwhile."""
    story.advance(A, 6)
    story.publish(A, 6, 7)
    story.advance(A, 7)
    put(conn, story.streams()[0], b"plain")
    create_space(conn, "all", "+/#", shards=1)
    EpochBlocks(conn, "all").advance(B, lower)
    reading = EpochTailReader(conn, TopicFilter("t"), begin)
    early = EpochTailReader(conn, TopicFilter("t"), begin)
    first = list(reading.read_available(conn))
    drop_space(conn, "all")
    story.publish(A, 7, 8)
    messages = [*first, *reading.read_available(conn)]
    assert numbers(seen(messages)) == {None: 1} | completed | ({8: 1} if lower == 3 else {})
    check_course(messages)
    assert numbers(seen(early.read_available(conn))) == {None: 1, 8: 1} | completed, "nothing was announced to it"


@pytest.mark.conforms("S3", "S7")
def test_history_of_a_dropped_space_is_entire(conn: Connection) -> None:
    """Its epochs are completed with it."""
    create_space(conn, "eu", "t/#", shards=1)
    ended = EpochBlocks(conn, "eu")
    ended.advance(A, 7)
    ended.publish(A, 7)
    drop_space(conn, "eu")
    reading = EpochTailReader(conn, TopicFilter("t/#"), "earliest")
    assert numbers(seen(reading.read_available(conn))) == {7: 1}


@pytest.mark.conforms("S2")
def test_what_began_under_another_filter_is_left_out(conn: Connection) -> None:
    create_space(conn, "eu", "t/#", shards=1)
    moving = EpochBlocks(conn, "eu")
    moving.advance(A, 7)
    moving.publish(A, 7)
    alter_space(conn, "eu", filter="u/#")
    conn.execute("update stream set upper_frontier = null where space_id = %s", (moving.space,))
    conn.execute("update space set lost_upper_frontier = '[[7]]' where space_id = %s", (moving.space,))
    conn.execute("update generation set filter = 'u/#' where space_id = %s", (moving.space,))  # its rows are deleted
    reading = EpochTailReader(conn, TopicFilter("t/#"))
    alter_space(conn, "eu", filter="t/#")
    moving.publish(A, 7, 8)
    messages = list(reading.read_available(conn))
    assert numbers(seen(messages)) == {8: 1}


# --- what is left out costs little ----------------------------------------------------------------------------------


@pytest.mark.conforms("S6")
def test_blocks_left_out_are_not_even_fetched(conn: Connection, story: EpochBlocks) -> None:
    story.three_and_five()
    reading = EpochTailReader(conn, ALL)
    stream = story.streams()[0]
    for _ in range(9):
        story.publish(A, 3, 5)
    conn.execute("update block set payload = '\\x00'")
    story.publish(A, 6)
    assert numbers(seen(reading.read_available(conn))) == {6: 1}
    excluded = ExcludedEpochs(UpperFrontier(((5,),)), None)
    page = message_log.fetch(conn, stream, 3, excluded=excluded, limit_bytes=1)
    assert page.position == page.head, "what is not fetched does not count as bytes of a page"
    with pytest.raises(PoisonBlock):
        message_log.fetch(conn, stream, 3)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.fixture
def publisher(database: str) -> Iterator[Publisher]:
    """It has completed 0, 1 and 2, and begun 3 and 5."""
    with Publisher(database, space="default") as publisher:
        for epoch in (0, 3, 5):
            publisher.in_epoch(epoch).publish("t", b"%d" % epoch)
        publisher.advance(3)
        yield publisher


@pytest.mark.conforms("S1", "S2", "A9")
def test_live_it_shows_entire_epochs_and_frontiers(shell: Shell, publisher: Publisher) -> None:
    live = shell.start("tail", "#", "--epochs", "--max-messages", "1", "--json")
    live.says('{"snapshot":{"lower":[[3]],"upper":[[5]]}}')
    publisher.in_epoch(4).publish("t", b"4")
    publisher.advance(5)
    live.says('{"lower":[[5]]}')
    publisher.in_epoch(6).publish("t", b"6")
    answer = live.end()
    assert answer.code == 0, answer.err
    assert [row.get("value") for row in answer.lines] == [None, None, "6"]


@pytest.mark.conforms("S7", "A9")
def test_from_history_it_ends_where_the_log_ends(shell: Shell, publisher: Publisher) -> None:
    publisher.flush()
    answer = shell.run("tail", "#", "--epochs", "--from", "active", "--no-follow", "--json")
    assert answer.code == 0, answer.err
    assert "snapshot" in answer.lines[0]
    assert sorted(row["value"] for row in answer.lines if "value" in row) == ["3", "5"]
    assert not [row for row in answer.lines if "lower" in row]


@pytest.mark.usefixtures("publisher")
def test_for_people_it_shows_what_is_completed(shell: Shell) -> None:
    answer = shell.run("tail", "#", "--epochs", "--from", "earliest", "--no-follow")
    lines = answer.out.splitlines()
    assert (lines[0], lines[-1]) == ("snapshot\tfrom any\tbegun 5", "completed\tbefore 3")
    assert sorted(lines[1:-1]) == ["t\t\t0", "t\t\t3", "t\t\t5"]
    assert shell.run("tail", "#", "--epochs", "--no-follow").out == "snapshot\tfrom 3\tbegun 5\n"


@pytest.mark.parametrize(
    ("arguments", "reported"),
    [
        (["--epochs", "--node", "127.0.0.1:1"], "--epochs and --node: nodes do not serve epochs yet"),
        (["--epochs", "--from", "15m"], "position '15m': whole epochs are read from latest, active, earliest"),
        (["--from", "active"], "--from 'active': is for whole epochs. Add --epochs"),
    ],
)
def test_what_does_not_go_together_is_refused(shell: Shell, arguments: list[str], reported: str) -> None:
    answer = shell.run("tail", "#", *arguments)
    assert (answer.code, answer.out) == (2, "")
    assert reported in answer.err
