"""A streaming query at a block that cannot be decoded: it fails once, by name, and the next life goes on without."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sublet_borrower.spark.source import range_reader
from sublet_borrower.spark.source.range_reader import RangePartition, poison_in
from sublet_protocol.domain.errors import PoisonBlock
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.admin.admin import create_group
from sublet_storage.groups.coordinator.history_queries import read_history
from sublet_storage.groups.model.records import Group, GroupOptions, OnPoison
from sublet_storage.groups.status import diagnosis_queries
from sublet_storage.log.append import BlockAppend, append
from sublet_storage.log.block_encoder import pack
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space, rollover
from tests.integration.log_kit import Connection, batch
from tests.integration.query_kit import POINTS, Checkpoint, Died, Run
from tests.integration.test_guard import Guarded
from tests.kit import eventually
from tests.kit_nodes import Fleet
from tests.payload_kit import LocalWorld, a_closed_stream, a_space, move

GROUP = Subscription.parse("$share/g/#")
BAD = 6
"""The damaged block of a stream has the offsets 4 and 5; there are 8."""
LABEL = 7
"""Bytes by which a message is known; what follows makes blocks worth moving."""


@pytest.fixture(params=["in Postgres", "outside of it"])
def streams(request: pytest.FixtureRequest, conn: Connection, tmp_path: Path) -> list[int]:
    """Two with a damaged block, and one that is well."""
    world = LocalWorld(tmp_path) if request.param == "outside of it" else None
    space = create_space(conn, "eu", "eu/#", shards=3, payload_location=world.uri if world else None)
    found = [row[0] for row in conn.execute("select stream_id from stream where space_id = %s", (space.space_id,))]
    for stream in found:
        for first in range(0, 8, 2):
            values = [label + os.urandom(70_000) for label in labels([stream], range(first, first + 2))]
            append(conn, [BlockAppend(stream, pack(batch(values, "eu")))])
    if world is None:
        conn.execute("update block set payload = '?' where stream_id = any(%s) and end_offset = %s", (found[:-1], BAD))
        return found
    rollover(conn, "eu")
    assert move(conn, space) == 4 * len(found)
    for name in world.names():
        if any(f"/{stream}-{BAD}-" in name for stream in found[:-1]):
            world.write(name, b"something else")
    return found


@pytest.fixture
def lives(database: str, fleet: Fleet) -> Iterator[Lives]:
    lives = Lives(database)
    yield lives
    lives.end()


class Lives:
    """A query that is started again whenever it has failed by such a block, `failures` times so far."""

    def __init__(self, url: str, make: Callable[..., Run] = Run) -> None:
        self.url, self.make, self.checkpoint, self.failures = url, make, Checkpoint(), 0
        self.run: Run | None = None

    def until(self, there: Callable[[], bool], most: int, die: str = "") -> None:
        """Go on until it is there, with so many failures at most."""

        def goes_on() -> bool:
            if self.run is None:
                self.run = self.make(self.checkpoint, self.url, inDoubtTimeout="60 s", onRangeLost="fail")
            try:
                self.run.step(die)
            except PoisonBlock as problem:
                self.failures += 1
                self.end()
                if self.failures > most:
                    pytest.fail(f"round and round: {problem}")
            except Died:
                self.run = None
                raise
            return there()

        eventually(goes_on, 60.0, lambda: f"{self.failures=} {self.labels()}")

    def labels(self) -> list[bytes]:
        """Return the labels in the sink."""
        return sorted(value[:LABEL] for value in self.checkpoint.values())

    def end(self) -> None:
        """End the query, as Spark does after a failure."""
        run, self.run = self.run, None
        if run is not None:
            run.stop()


def labels(streams: Sequence[int], offsets: range) -> list[bytes]:
    return [b"%04d-%02d" % (stream, offset) for stream in streams for offset in offsets]


def wanted(streams: Sequence[int], policy: OnPoison) -> list[bytes]:
    """Return the rows that a query has of them in the end."""
    lost = range(4, 8) if policy is OnPoison.BLOCK else range(4, 6)
    return sorted(set(labels(streams, range(8))) - set(labels(streams[:-1], lost)))


def of_group(database: str, policy: OnPoison) -> Group:
    return create_group(database, GROUP, GroupOptions(StartingPosition.EARLIEST, on_poison=policy))[0]


def rows(conn: Connection, streams: Sequence[int]) -> list[tuple[str, int, int]]:
    """Return (status, position, lost messages) of each."""
    reported = "select status, position, lost_message_count from lending where stream_id = any(%s) order by stream_id"
    return conn.execute(reported, (list(streams),)).fetchall()


def is_past(conn: Connection, streams: Sequence[int], policy: OnPoison) -> bool:
    """Return whether the group has decided about the poisoned streams, and has consumed the rest."""
    *bad, well = rows(conn, streams) or [("", 0, 0)]
    if policy is OnPoison.BLOCK:
        return well[1] == 8 and bad == [("blocked", 4, 0)] * (len(streams) - 1)
    return well[1] == 8 and [row[1:] for row in bad] == [(8, 2)] * (len(streams) - 1)


@pytest.mark.conforms("W10")
@pytest.mark.parametrize("policy", OnPoison)
@pytest.mark.long
def test_a_query_goes_on_past_a_bad_block(
    database: str, conn: Connection, lives: Lives, streams: list[int], policy: OnPoison
) -> None:
    """Its group blocks the stream, or skips the block."""
    group, bad = of_group(database, policy), streams[:-1]
    lives.until(lambda: is_past(conn, streams, policy), most=len(bad))
    assert lives.failures > 0
    assert lives.labels() == wanted(streams, policy)
    if policy is OnPoison.BLOCK:
        answers = {each.stream.stream_id: each.diagnosis for each in diagnosis_queries.diagnose_group(conn, GROUP)[1]}
        for stream in bad:
            assert f"stream {stream}: the block that begins at offset 4 and ends before" in answers[stream].detail
    else:
        skips = [line for line in read_history(conn, group.group_id).records if line.event == "skip"]
        assert sorted((line.stream_id, line.position) for line in skips) == [(stream, 4) for stream in bad]
        assert all("Skipped: [4, 6), 2 messages" in line.reason for line in skips)
    failures = lives.failures
    with Publisher(database, block_messages=1) as publisher:
        publisher.publish("elsewhere", b"more")
    lives.until(lambda: b"more" in lives.labels(), most=failures)


@pytest.mark.conforms("W10", "E27")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("streams", ["in Postgres"], indirect=True)
@pytest.mark.long
def test_it_may_die_at_any_point_behind_that(
    database: str, conn: Connection, lives: Lives, streams: list[int], point: str
) -> None:
    """A range that is put off is not a lost one, also in the life after that."""
    of_group(database, OnPoison.SKIP)
    most = 2 * len(streams)
    lives.until(lambda: lives.failures > 0, most)
    with pytest.raises(Died):
        lives.until(lambda: False, most, die=point)
    lives.until(lambda: is_past(conn, streams, OnPoison.SKIP), most)
    assert lives.labels() == wanted(streams, OnPoison.SKIP)
    seen: dict[int, Any] = {}
    for number, found in lives.checkpoint.runs:
        assert seen.setdefault(number, found) == found, "a batch that is done again has the same messages"


@pytest.mark.conforms("W10", "E27")
@pytest.mark.parametrize("streams", ["in Postgres"], indirect=True)
def test_what_is_written_under_a_guard_is_written_once(
    database: str, conn: Connection, lives: Lives, streams: list[int], tmp_path: Path
) -> None:
    conn.execute("create table public.sunk (value bytea)")
    of_group(database, OnPoison.SKIP)
    lives.make = lambda checkpoint, url, **options: Guarded(checkpoint, url, tmp_path, **options)
    lives.until(lambda: is_past(conn, streams, OnPoison.SKIP), most=len(streams) - 1)
    written = [bytes(value[:LABEL]) for (value,) in conn.execute("select value from public.sunk")]
    assert sorted(written) == wanted(streams, OnPoison.SKIP)


@pytest.mark.conforms("W10", "S11")
def test_it_has_all_entire_epochs_before_that(database: str, conn: Connection, lives: Lives) -> None:
    create_group(database, GROUP, GroupOptions(StartingPosition.EARLIEST, atomic=True))
    create_space(conn, "eu", "eu/#", shards=2)
    epochs = [b"%07d" % epoch for epoch in range(6)]
    with Publisher(database, space="eu") as publisher:
        for epoch, value in enumerate(epochs):
            for number in range(16):
                publisher.in_epoch(epoch).publish("eu", value, key=b"k%d" % number)
            publisher.advance(epoch + 1)
    found = "select min(end_offset - count) from block where stream_id = %s and epoch_bounds->'least' = '[[3]]'"
    bad, well = (row[0] for row in conn.execute("select stream_id from block group by 1 order by 1").fetchall())
    ((first,),) = conn.execute(found, (bad,)).fetchall()
    conn.execute("update block set payload = '?' where stream_id = %s and end_offset > %s", (bad, first))
    ((head,),) = conn.execute("select head from stream where stream_id = %s", (well,)).fetchall()
    lives.until(lambda: [row[:2] for row in rows(conn, [bad, well])] == [("blocked", first), ("held", head)], most=1)
    assert lives.failures == 1
    for stream, had in ((bad, epochs[:3]), (well, epochs)):
        given = [{value for one, _, value in batch if one == stream} for batch in lives.checkpoint.sink.values()]
        assert sorted(value for values in given for value in values) == had, "each in one batch"


def test_what_is_away_or_gone_is_left_to_the_tasks(
    database: str, conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "DATABASE_TIMEOUT_S", 0.0)
    world = LocalWorld(tmp_path)
    space = a_space(conn, world)
    stream = a_closed_stream(conn, 4)
    move(conn, space)
    ((generation,),) = conn.execute("select generation_id from stream where stream_id = %s", (stream,)).fetchall()
    task = RangePartition(stream, generation, 0, 8, "#", "eu", database, "sublet", os.uname().nodename, True, 0)
    (third,) = [name for name in world.names() if f"/{stream}-{BAD}-" in name]
    world.write(third, b"something else")
    assert poison_in([task])[stream].offsets == (4, 6)
    conn.execute("delete from block where stream_id = %s and end_offset = 2", (stream,))
    assert poison_in([task]) == {}, "retention has taken its beginning"
    assert poison_in([task, replace(task, start=2)])[stream].offsets == (4, 6)
    world.go_away()
    assert poison_in([replace(task, start=2)]) == {}
