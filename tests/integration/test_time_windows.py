"""A window by time holds the same messages whatever becomes of the blocks that they were appended in."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sublet_borrower.node_client.feed_client import Feed
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_protocol.domain.topics import TopicFilter
from sublet_storage.groups.admin import reset_transaction
from sublet_storage.groups.admin.reset_target import ResetTarget
from sublet_storage.groups.coordinator import group_lifecycle
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.groups.status.overview import describe_group
from sublet_storage.log.fetch import offset_at_time
from sublet_storage.readers.offset_ranges import list_offset_ranges
from sublet_storage.readers.tail import Tail
from sublet_storage.spaces.payload_restore import restore_payloads
from sublet_storage.spaces.small_block_compaction import compact_stream
from sublet_storage.spaces.space_changes import alter_space, create_space, rollover
from sublet_storage.spaces.space_queries import list_spaces
from tests.integration.feed_kit import serving, values
from tests.integration.log_kit import Connection, generation_of, of_stream, put, stream_of
from tests.payload_kit import LocalWorld, a_space, fill, move
from tests.support.streams import open_streams

BEGUN = datetime(2026, 11, 24, tzinfo=UTC)
ALL = TopicFilter.parse("eu/#")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.integers(1, 3), st.integers(-2, 4)),  # so many messages, so many seconds later
        st.integers(2, 12),  # compaction to blocks of so many
    ),
    min_size=1,
    max_size=14,
)


def dated(conn: Connection, stream: int, seconds: int) -> None:
    """The last block was appended then."""
    conn.execute(
        "update block set appended_at = %s where stream_id = %s and end_offset = (select head from stream s"
        " where s.stream_id = block.stream_id)",
        (BEGUN + timedelta(seconds=seconds), stream),
    )


def answers(conn: Connection, stream: int, seconds: int) -> set[int]:
    """Return where each kind of query begins or ends at that time; one number, if they agree."""
    when = BEGUN + timedelta(seconds=seconds)
    start, name = StartingPosition.parse(when.isoformat()), Subscription.parse("$share/at/eu/#")
    begun = of_stream(list_offset_ranges(conn, ALL, start, StartingPosition.LATEST), stream).start
    ended = of_stream(list_offset_ranges(conn, ALL, StartingPosition.EARLIEST, start), stream).end
    with conn.transaction(force_rollback=True):
        group = group_lifecycle.create(conn, name, GroupOptions(start), None)
        assert group is not None
        granted_at = {at for (at,) in conn.execute("select position from lending where stream_id = %s", (stream,))}
        reset_to = of_stream(reset_transaction.plan_reset(conn, group, ResetTarget.time(when)), stream).after
        return {offset_at_time(conn, stream, when), begun, ended, reset_to, *(granted_at or {-1})}


@pytest.mark.conforms("W8")
def test_a_time_begins_with_what_was_appended_then(conn: Connection) -> None:
    create_space(conn, "eu", "eu/#", shards=1)
    stream = stream_of(conn, "eu")
    for second in (0, 1):
        put(conn, stream, b"v", topic="eu/t")
        dated(conn, stream, second)
    assert [answers(conn, stream, second) for second in (0, 1, 2)] == [{0}, {1}, {2}]


@pytest.mark.conforms("W8")
def test_each_message_of_a_merged_block_has_its_time(conn: Connection) -> None:
    """By `offset_at_time` and `appended_at`, where another stream has a block as well."""
    stream, other = (each.stream_id for each in open_streams(conn))
    put(conn, other, b"v")
    dated(conn, other, 10)
    put(conn, stream, b"v", b"v", b"v")
    dated(conn, stream, 2)
    times = [BEGUN + timedelta(seconds=second) for second in range(5)]
    conn.execute(
        "update block set piece_starts = '{0, 1, 2}', piece_times = %s where stream_id = %s", (times[:2], stream)
    )
    put(conn, stream, b"v")
    dated(conn, stream, 3)
    which = (generation_of(conn, stream), stream)
    offsets = [conn.execute("select offset_at_time(%s, %s, %s)", (*which, each)).fetchone() for each in times]
    assert offsets == [(0,), (1,), (2,), (3,), (None,)]
    found = [conn.execute("select appended_at(%s, %s, %s)", (*which, each)).fetchone() for each in range(5)]
    assert found == [*((each,) for each in times[:4]), (None,)]


@pytest.mark.long
@pytest.mark.conforms("W8")
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=STEPS)
def test_a_time_is_where_it_was_whatever_was_merged(conn: Connection, steps: list[tuple[int, int] | int]) -> None:
    """All ways to ask have the same answer."""
    if "eu" not in {space.name for space in list_spaces(conn)}:
        create_space(conn, "eu", "eu/#", shards=1)
    rollover(conn, "eu")
    stream, head, now = stream_of(conn, "eu"), 0, 0
    pieces: list[tuple[int, int]] = []
    for step in steps:
        if isinstance(step, int):
            compact_stream(conn, stream, older_than_s=-60.0, block_messages=step)
            continue
        count, later = step
        now += later
        pieces.append((head, now))
        put(conn, stream, *[b"v"] * count, topic="eu/t")
        dated(conn, stream, now)
        head += count
    for seconds in range(min((at for _, at in pieces), default=0) - 1, max((at for _, at in pieces), default=0) + 2):
        expected = next((begin for begin, at in pieces if at >= seconds), head)
        assert answers(conn, stream, seconds) == {expected}


@pytest.mark.conforms("W8")
def test_an_hour_stays_the_same(database: str, conn: Connection, tmp_path: Path) -> None:
    """It has the same messages after compaction, moved out, and brought back."""
    space = a_space(conn, LocalWorld(tmp_path))
    stream = stream_of(conn, "eu")
    for number in range(12):
        fill(conn, stream, 1, first=number)
        dated(conn, stream, 600 * number)
    hour = BEGUN + timedelta(minutes=25)

    with serving(database) as server, Feed([server.address]) as feed:

        def look(times: int) -> tuple[list[bytes], list[bytes], list[set[int]]]:
            """Return what a tail and a feed read from that time on, and where so many times are."""
            tailed, fed = values(list(Tail(conn, ALL, hour).pages())), values(list(feed.history("eu/#", hour)))
            return tailed, fed, [answers(conn, stream, 300 * number) for number in range(times)]

        before = look(30)
        assert [len(each) for each in before] == [18, 18, 30]
        assert compact_stream(conn, stream, older_than_s=0, block_messages=10) == 12 - 3
        assert look(30) == before
        rollover(conn, "eu")
        rolled_over = look(23)
        assert rolled_over[:2] == before[:2]
        assert move(conn, space) > 0
        assert look(23) == rolled_over
        alter_space(conn, "eu", payload_location=None)
        assert restore_payloads(conn, space.space_id) > 0
        assert look(23) == rolled_over


@pytest.mark.conforms("W8")
def test_the_age_of_what_waits_is_that_of_the_first(conn: Connection) -> None:
    create_space(conn, "eu", "eu/#", shards=1)
    stream = stream_of(conn, "eu")
    for number in range(6):
        put(conn, stream, b"v", topic="eu/t")
        dated(conn, stream, -86_400 * (6 - number))
    with conn.transaction():
        group = group_lifecycle.create(
            conn, Subscription.parse("$share/g/eu/#"), GroupOptions(StartingPosition.at_offset(2)), None
        )
    assert group is not None

    def age_s() -> float:
        return of_stream(describe_group(conn, group.subscription).streams, stream).age_s or 0.0

    before = age_s()
    assert compact_stream(conn, stream, older_than_s=0) == 5
    assert 0.0 < before <= age_s() < before + 3600
