"""`spark.readStream.format("sublet")` in a real Spark: what its rows are, and what becomes of one that is killed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from sublet.spark import Guard
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups.model.records import GroupOptions, OnPoison
from sublet_storage.log.append import BlockAppend, append
from sublet_storage.log.block_encoder import pack
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space
from tests.integration.log_kit import batch as batch_of
from tests.kit import eventually
from tests.kit_nodes import Process
from tests.spark.session import streamed, to_its_end
from tests.spark.stage import ALL, SPEED, WAIT_S, Stage

pytestmark = pytest.mark.spark

KILLS = (
    "driver:behind:1",
    "jvm:before:3",
    "source:behind:5",
    "worker:before:7",
    "jvm:behind:8",
    "driver:before:10",
    "source:before:11",
    "jvm:behind:13",
    "driver:behind:15",
    "jvm:before:17",
)
"""Which process gets kill -9, before or behind the sink of which batch: behind it is the window of doubt. All of them
take some minutes: QUERY_KILLS says how many."""
MAX_KILLS = int(os.environ.get("QUERY_KILLS", "2"))


def collected(spark: Any, stage: Stage, place: Path, schema: str | None = None, **options: str) -> list[Any]:
    """All that there is now, through a query that ends."""
    rows: list[Any] = []
    frame = streamed(spark, "spark", "#", schema, url=stage.url, **options)
    to_its_end(frame.writeStream.foreachBatch(lambda batch, _: rows.extend(batch.collect())), place / "checkpoint")
    return rows


def test_a_row_is_what_was_published(spark: Any, stage: Stage, tmp_path: Path) -> None:
    """By a publisher, or by a row that is written."""
    stage.serve("n1")
    when = datetime(2026, 11, 22, 10, 30, tzinfo=UTC)
    with Publisher(stage.url, space="default") as publisher:
        publisher.publish("a/b", b"one", key=b"k", headers=[("h", b"1"), ("h", b"2")], timestamp=when)
        publisher.publish("a/c", b"two")
        publisher.in_epoch(7).publish("a/d", b"three")
    headers = "array(named_struct('key', 'h', 'value', cast('1' as binary))) as headers"
    at = "timestamp '2026-11-22 10:30:00Z' timestamp"
    written = spark.sql(f"select 'a/e' topic, 'k' key, 'one' value, {at}, {headers}")
    written.write.format("sublet").option("url", stage.url).mode("append").save()
    rows = sorted(collected(spark, stage, tmp_path), key=lambda row: row.topic)
    one, two, three, four = rows
    for row, topic, found in ((one, "a/b", [("h", b"1"), ("h", b"2")]), (four, "a/e", [("h", b"1")])):
        assert (row.topic, row.key, row.value, row.space, row.epoch) == (topic, b"k", b"one", "default", None)
        assert row.timestamp.astimezone(UTC) == when
        assert [(header.key, header.value) for header in row.headers] == found
    assert (two.key, two.headers, two.epoch, three.epoch) == (None, None, None, [7])
    heads = stage.heads()
    assert all(0 <= row.offset < heads[row.stream] for row in rows)


def test_a_query_takes_the_columns_it_wants(spark: Any, stage: Stage, tmp_path: Path) -> None:
    stage.serve("n1")
    stage.publish(20)
    rows = collected(spark, stage, tmp_path, "offset bigint, value binary")
    assert sorted(int(row.value) for row in rows) == list(range(20))
    assert rows[0].__fields__ == ["offset", "value"]


@pytest.mark.parametrize(
    ("schema", "options", "said"),
    [
        (None, {"minOffsetsPerTrigger": "5"}, "option 'minoffsetspertrigger': readStream has none of that name"),
        ("value string", {}, "column 'value' as string: it is binary. Take it as that, and cast it"),
        ("partition int", {}, "column 'partition': there is none"),
    ],
)
def test_what_cannot_be_is_said_by_name(
    spark: Any, stage: Stage, tmp_path: Path, schema: str | None, options: dict[str, str], said: str
) -> None:
    with pytest.raises(Exception) as refused:  # noqa: PT011 Spark wraps it in errors of its own
        collected(spark, stage, tmp_path, schema, **options)
    assert said in str(refused.value)


@pytest.mark.conforms("W10")
@pytest.mark.long
def test_broken_block_fails_a_query_once(stage: Stage, tmp_path: Path) -> None:
    """The next life goes on as the group's policy says: here without the block."""
    options = GroupOptions(starting_position=StartingPosition.parse("earliest"), on_poison=OnPoison.SKIP)
    stage.store.declare_group(Subscription.parse(ALL), options)
    create_space(stage.connection, "eu", "eu/#", shards=2)
    found = "select stream_id from stream join space using (space_id) where name = 'eu' order by 1"
    bad, well = (row[0] for row in stage.connection.execute(found).fetchall())
    for one in (bad, well) * 3:
        append(stage.connection, [BlockAppend(one, pack(batch_of([b"1", b"2"], "eu")))])
    stage.connection.execute("update block set payload = '?' where (stream_id, end_offset) = (%s, 4)", (bad,))
    stage.serve("n1")
    query = Query(stage, tmp_path / "query")
    first = query.start()
    eventually(lambda: not first.alive, 2 * WAIT_S, first.output)
    assert f"PoisonBlock: stream {bad}: the block that begins at offset 2 and ends before offset 4" in first.output()
    second = query.start()
    eventually(stage.consumed, 2 * WAIT_S, second.output)
    second.signal(signal.SIGTERM)
    eventually(lambda: not second.alive, WAIT_S, second.output)
    wanted = [(bad, offset) for offset in (0, 1, 4, 5)] + [(well, offset) for offset in range(6)]
    assert sorted((stream, offset) for rows in query.batches().values() for stream, offset, _ in rows) == wanted
    assert stage.connection.execute("select sum(lost_message_count) from lending").fetchone() == (2,)


@pytest.mark.conforms("E27")
@pytest.mark.long
def test_a_guard_is_for_the_query_of_its_checkpoint(spark: Any, stage: Stage, tmp_path: Path) -> None:
    stage.serve("n1")
    stage.publish(200)
    stage.connection.execute("create table public.sunk (query text, value int)")
    places = {name: str(tmp_path / name) for name in ("one", "two", "three")}
    guards = {name: Guard(places["one" if name == "three" else name], stage.url) for name in places}

    def store(name: str) -> Any:
        def write(frame: Any, batch: int) -> None:
            rows = [(name, int(row.value)) for row in frame.select("value").collect()]
            with guards[name](batch) as connection:
                connection.cursor().executemany("insert into public.sunk values (%s, %s)", rows)

        return write

    started = [
        streamed(spark, name, "#", url=stage.url, maxOffsetsPerTrigger="50")
        .writeStream.foreachBatch(store(name))
        .option("checkpointLocation", places[name])
        .trigger(availableNow=True)
        .start()
        for name in places
    ]
    for query in started[:2]:
        assert query.awaitTermination(int(2 * WAIT_S))
    with pytest.raises(Exception, match="is not that of the query that calls the guard"):
        started[2].awaitTermination(int(2 * WAIT_S))
    rows = stage.connection.execute("select query, count(*), count(distinct value) from public.sunk group by query")
    assert sorted(rows) == [("one", 200, 200), ("two", 200, 200)]


class Query:
    """A query in a driver process of its own, and what is in its sink."""

    sink = "files"

    def __init__(self, stage: Stage, place: Path, **options: object) -> None:
        self._stage, self._place, self._options = stage, place, {name: str(value) for name, value in options.items()}
        place.mkdir(exist_ok=True)
        self.starts = 0

    def start(self, die: str = "") -> Process:
        self.starts += 1
        arguments = (self._stage.url, str(self._place), json.dumps(self._options), die, self.sink)
        log = self._place / f"driver-{self.starts}.log"
        process = Process("tests.spark.query", *arguments, log=log, speed=SPEED)
        self._stage.fleet.consumers[f"{self._place.name}-{self.starts}"] = process
        return process

    def batches(self) -> dict[int, list[tuple[int, int, int]]]:
        """{batch: (stream, offset, value) of each row} as they are in the sink."""
        found = sorted((self._place / "sink").glob("*.json"))
        return {int(file.stem): [tuple(row) for row in json.loads(file.read_text())] for file in found}

    def runs(self) -> dict[int, list[list[tuple[int, int, int]]]]:
        """{batch: what each run of it was given}"""
        runs: dict[int, list[list[tuple[int, int, int]]]] = {}
        for file in sorted((self._place / "sink").glob("*.run-*")):
            rows = [tuple(row) for row in json.loads(file.read_text())]
            runs.setdefault(int(file.stem), []).append(rows)
        return runs

    def values(self) -> list[int]:
        return sorted(value for rows in self.batches().values() for _, _, value in rows)


class TableQuery(Query):
    """The same with the table as its sink, which other queries write to as well."""

    sink = "table"

    def batches(self) -> dict[int, list[tuple[int, int, int]]]:
        """What this query has written."""
        found: dict[int, list[tuple[int, int, int]]] = {}
        written = "select batch, stream, at, value from public.sunk where query = %s"
        for batch, *row in self._stage.connection.execute(written, (self._place.name,)):
            found.setdefault(batch, []).append(tuple(row))
        return found

    def values(self) -> list[int]:
        return [value for (value,) in self._stage.connection.execute("select value from public.sunk order by value")]


class Trickle:
    """Messages, a hundred at a time."""

    def __init__(self, stage: Stage) -> None:
        self._stage, self.sent = stage, 0

    def go_on(self) -> None:
        self._stage.publish(100, self.sent)
        self.sent += 100

    def until_dead(self, query: Query, driver: Process, batch: int) -> None:
        """Go on until the query has died in that batch; one that gets over it is killed in a later one."""

        def is_over() -> bool:
            return not driver.alive or "failed" in driver.output() or max(query.batches(), default=0) > batch

        while not is_over():
            self.go_on()
            eventually(
                lambda: is_over() or len(query.values()) > self.sent - 150, 3 * WAIT_S, lambda: self._story(driver)
            )
        driver.kill()

    def _story(self, driver: Process) -> str:
        doubts = self._stage.connection.execute("select stream_id, in_doubt from lending").fetchall()
        return f"{driver.output()}\n{self._stage.lendings()}\n{doubts}\n{self._stage.heads()}"


@pytest.mark.conforms("E26", "E27")
@pytest.mark.timeout(200 * (2 + MAX_KILLS))
@pytest.mark.parametrize("kills", [1, pytest.param(MAX_KILLS, marks=pytest.mark.long)])
def test_killed_query_writes_everything_once(stage: Stage, tmp_path: Path, kills: int) -> None:
    """Whatever process dies, before or behind the sink: a batch done again has the same rows."""
    stage.serve("n1")
    query, messages = (
        Query(stage, tmp_path / "query", maxOffsetsPerTrigger=60, inDoubtTimeout="5 minutes"),
        Trickle(stage),
    )
    messages.go_on()
    for die in KILLS[:kills]:
        messages.until_dead(query, query.start(die), int(die.rpartition(":")[2]))
    messages.go_on()
    driver = query.start()
    eventually(lambda: len(query.values()) >= messages.sent, 3 * WAIT_S, driver.output)
    assert query.values() == list(range(messages.sent))
    again = [runs for runs in query.runs().values() if len(runs) > 1]
    assert len(again) >= max(1, kills // 2)
    assert all(rows == runs[0] for runs in again for rows in runs), "a batch done again has the same rows"
    assert not any(line.event == "unreserve" for line in stage.history())
    assert driver.stop() == 0


@pytest.mark.long
@pytest.mark.conforms("E26", "E27")
@pytest.mark.timeout(200 * (2 + MAX_KILLS))
def test_two_queries_write_each_message_once(stage: Stage, tmp_path: Path) -> None:
    """Their table has no key, and one of them is killed again and again."""
    stage.serve("n1")
    stage.connection.execute("create table public.sunk (query text, batch int, stream bigint, at bigint, value int)")
    query = TableQuery(stage, tmp_path / "query", maxOffsetsPerTrigger=60, inDoubtTimeout="5 minutes")
    other = TableQuery(stage, tmp_path / "other", maxOffsetsPerTrigger=60, sessionName="other")
    messages, others = Trickle(stage), other.start()
    messages.go_on()
    for die in KILLS[:MAX_KILLS][::-1]:
        batch = max(query.batches(), default=0) + 2
        messages.until_dead(query, query.start(f"{die.rpartition(':')[0]}:{batch}"), batch)
    messages.go_on()
    driver = query.start()
    eventually(lambda: len(query.values()) >= messages.sent, 3 * WAIT_S, driver.output)
    assert query.values() == list(range(messages.sent))
    assert query.batches()
    assert other.batches()
    assert driver.stop() == 0
    assert others.stop() == 0


@pytest.mark.long
@pytest.mark.conforms("E10", "E26")
@pytest.mark.parametrize("what", ["driver", "jvm"])
def test_dead_query_frees_its_streams_at_once(stage: Stage, tmp_path: Path, what: str) -> None:
    stage.serve("n1")
    stage.publish(200)
    query = Query(stage, tmp_path / "query")
    driver = query.start()
    eventually(lambda: len(query.values()) == 200, 3 * WAIT_S, driver.output)
    for victim in [psutil.Process(driver.pid)] if what == "driver" else psutil.Process(driver.pid).children():
        victim.kill()
    eventually(lambda: stage.holders() == {}, WAIT_S, lambda: str(stage.lendings()))
    assert not {"force_release", "unreserve"} & {line.event for line in stage.history()}


@pytest.mark.long
@pytest.mark.conforms("E27", "E30")
def test_frozen_driver_writes_nothing_twice(stage: Stage, tmp_path: Path) -> None:
    """It wakes beside a driver that goes on with a copy of its checkpoint."""
    stage.serve("n1")
    stage.connection.execute("create table public.sunk (query text, batch int, stream bigint, at bigint, value int)")
    older = TableQuery(stage, tmp_path / "older", maxOffsetsPerTrigger=20, inDoubtTimeout="5 minutes")
    stage.publish(400)
    frozen = older.start()
    eventually(lambda: len(older.values()) >= 60, 3 * WAIT_S, frozen.output)
    everybody = [psutil.Process(frozen.pid), *psutil.Process(frozen.pid).children(recursive=True)]
    for one in everybody:
        with contextlib.suppress(psutil.NoSuchProcess):  # a Python worker may have ended meanwhile
            one.suspend()
    assert len(older.values()) < 400
    newer = TableQuery(stage, tmp_path / "newer", maxOffsetsPerTrigger=20, inDoubtTimeout="5 minutes")
    shutil.copytree(tmp_path / "older" / "checkpoint", tmp_path / "newer" / "checkpoint")
    driver = newer.start()
    before = len(older.values())
    eventually(lambda: len(older.values()) > before, 3 * WAIT_S, driver.output)
    for one in everybody:
        with contextlib.suppress(psutil.NoSuchProcess):
            one.resume()
    eventually(lambda: "failed" in frozen.output(), 3 * WAIT_S, frozen.output)
    assert "fenced" in frozen.output() or "must not be written" in frozen.output()
    eventually(lambda: len(older.values()) >= 400, 3 * WAIT_S, driver.output)
    assert older.values() == list(range(400))
    assert driver.stop() == 0
