"""`Guard`: what a micro-batch writes, and that it is done, are one commit; whoever dies, freezes or runs twice."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet_borrower.agent.agent_loop import AgentLoop
from sublet_borrower.machine.events import ProgressReported
from sublet_borrower.planner.plan_ledger import MicroBatchPlanLedger
from sublet_borrower.spark.source.micro_batch_transaction import Guard
from sublet_protocol.domain.errors import (
    DatabaseUnreachable,
    InvalidSetting,
    MicroBatchFenced,
    UnknownOutcome,
    UsageError,
)
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.producer import Publisher
from sublet_storage.spaces.empty_generation_cleanup import EmptyGenerationCleaner
from sublet_storage.spaces.retention import apply_retention
from sublet_storage.spaces.space_changes import create_space, rollover
from tests.integration.log_kit import Connection
from tests.integration.query_kit import POINTS, Checkpoint, Died, Rows, Run
from tests.integration.test_stream_reader import LONG, events, lending, publish
from tests.kit import eventually
from tests.kit_nodes import Fleet
from tests.postgres_proxy import PostgresProxy

INSERT = "insert into sunk values (%s)"


class Guarded(Run):
    """Its sink is a table without a key: what is written twice is there twice."""

    def __init__(self, checkpoint: Checkpoint, url: str, place: Path, **options: object) -> None:
        super().__init__(checkpoint, url, **options)
        self.guard, self._place = Guard(place, options.get("guard_url", url)), place  # type: ignore[arg-type]

    def sink(self, number: int, rows: Rows) -> None:
        logged(self._place, number, self.checkpoint.offsets[number])
        with self.guard(number) as connection:
            connection.cursor().executemany(INSERT, [(value,) for _, _, value in rows])
        super().sink(number, rows)

    def stop(self) -> None:
        super().stop()
        self.guard.close()


def logged(place: Path, number: int, *offsets: dict[str, Any]) -> None:
    """Spark's log of a batch, one line for each source of the query."""
    (place / "offsets").mkdir(parents=True, exist_ok=True)
    sources = [json.dumps(offset) for offset in offsets]
    if number:
        (place / "offsets" / str(number - 1)).touch()
    (place / "offsets" / str(number)).write_text("\n".join(["v1", '{"batchWatermarkMs":0}', *sources]))


@pytest.fixture
def url(database: str, fleet: Fleet, conn: Connection) -> str:
    conn.execute("create table public.sunk (value bytea)")
    return database


Make = Callable[..., Guarded]
Block = Callable[[Connection], object]


@pytest.fixture
def guarded(url: str, tmp_path: Path) -> Iterator[Make]:
    """Makes runs, whose checkpoints lie in the folder of that name, and stops them at the end."""
    made: list[Guarded] = []

    def make(checkpoint: Checkpoint, folder: str = "", **options: object) -> Guarded:
        made.append(Guarded(checkpoint, url, tmp_path / folder, **{"inDoubtTimeout": LONG, **options}))
        return made[-1]

    yield make
    for run in made:
        run.stop()


@pytest.fixture
def unwritten(url: str, guarded: Make, tmp_path: Path) -> Checkpoint:
    """A checkpoint with a batch of 30 messages, which its process has read and not written."""
    checkpoint = Checkpoint()
    publish(url, 0, 30)
    dies(guarded(checkpoint), "read", 30)
    logged(tmp_path, 0, checkpoint.offsets[0])
    return checkpoint


@pytest.fixture
def guard(url: str, tmp_path: Path) -> Iterator[Guard]:
    guard = Guard(tmp_path, url)
    yield guard
    guard.close()


VALUES = [b"%06d" % number for number in range(30)]
"""Of the batch of `unwritten`."""


def dies(run: Run, point: str, first_batch: int = 0) -> None:
    """It goes on until it dies there, with at least so many messages in its first batch."""
    if first_batch:
        run.wait_until_granted(first_batch)
    with pytest.raises(Died):
        run.until(1_000, die=point)


def go_on(conn: Connection, count: int, *runs: Run) -> None:
    """Run all of these, until that many messages are in the table."""

    def there() -> bool:
        for run in runs:
            run.step()
        return len(sunk(conn)) >= count

    eventually(there, 60.0, lambda: str(lending(conn)))


def positions(conn: Connection) -> set[int]:
    """Return the positions of all streams that are not finished."""
    return {position for _, position, _ in lending(conn).values()}


def write(guard: Guard, value: bytes = b"x", then: Block = lambda _: None) -> None:
    """One row of batch 0, and what else is done in the block."""
    with guard(0) as connection:
        connection.execute(INSERT, (value,))
        then(connection)


def fail(connection: object) -> None:
    raise ZeroDivisionError


def test_a_block_within_another_is_refused(unwritten: Checkpoint, guard: Guard, conn: Connection) -> None:
    with pytest.raises(UsageError, match="another block of this guard is under way"):
        write(guard, VALUES[0], lambda _: write(guard))
    assert not sunk(conn)
    write(guard)
    assert len(sunk(conn)) == 1


def sunk(conn: Connection) -> list[bytes]:
    return [bytes(value) for (value,) in conn.execute("select value from public.sunk order by value")]


@pytest.mark.conforms("E26", "E27")
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.long
def test_a_query_that_dies_writes_everything_once(url: str, guarded: Make, conn: Connection, point: str) -> None:
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    for _ in range(3):
        dies(guarded(checkpoint, maxOffsetsPerTrigger=7), point)
    last = guarded(checkpoint, maxOffsetsPerTrigger=7)
    go_on(conn, 30, last)
    assert not last.step()
    assert sunk(conn) == values


@pytest.mark.conforms("E26", "E27")
def test_what_is_written_is_done_when_others_went_on(url: str, guarded: Make, conn: Connection) -> None:
    """At once, as it is not in doubt. They have planned in its streams since: its rows say nothing of it any more."""
    ours = Checkpoint()
    values = publish(url, 0, 30)
    dies(guarded(ours, "ours"), "sunk")
    values += publish(url, 30, 30)
    go_on(conn, 60, guarded(Checkpoint(), "theirs", sessionName="other"))
    assert "reserve" not in events(conn)
    back = guarded(ours, "ours", onRangeLost="fail")
    assert back.step()
    assert ours.runs[-1] == (0, [])
    assert sunk(conn) == values


@pytest.mark.conforms("E26", "E27")
def test_what_is_written_is_done_when_retention_came(url: str, guarded: Make, conn: Connection) -> None:
    """The rows of its streams are deleted when it comes back."""
    create_space(conn, "t", "t/#", retention_s=86400)
    ours, values = Checkpoint(), publish(url, 0, 30)
    dies(guarded(ours), "sunk", 30)
    rollover(conn, "t")
    left = "select from lending join stream using (stream_id) where head > 0 and status <> 'finished'"
    eventually(lambda: not conn.execute(left).rowcount, 60.0, lambda: str(lending(conn)))
    conn.execute("update generation set closed_at = closed_at - interval '2 days'")
    collapse = EmptyGenerationCleaner(rest_s=0)
    while conn.execute("select from stream where head > 0").rowcount:
        apply_retention(conn)
        collapse(conn)
    back = guarded(ours, onRangeLost="fail")
    assert back.step()
    assert ours.runs[-1] == (0, [])
    assert sunk(conn) == values


@pytest.mark.conforms("E26", "E27")
@pytest.mark.long
def test_with_a_guard_nothing_needs_to_be_stored(url: str, guarded: Make, conn: Connection) -> None:
    ours = Checkpoint()
    values = publish(url, 0, 30)
    gone = guarded(ours, "ours", inDoubtTimeout="0 s", maxOffsetsPerTrigger=20)
    dies(gone, "read")
    other = guarded(Checkpoint(), "theirs", sessionName="other", inDoubtTimeout="0 s")
    go_on(conn, 30, other)
    assert not {"reserve", "unreserve"} & set(events(conn))
    with pytest.raises(
        MicroBatchFenced, match=r"batch 0 must not be written: stream \d+ .* is not this query's to do now"
    ):
        gone.sink(*ours.runs[-1])
    back = guarded(ours, "ours", inDoubtTimeout="0 s")
    back.step()
    values += publish(url, 30, 10)
    go_on(conn, 40, other, back)
    assert sunk(conn) == values


@pytest.mark.conforms("E27")
@pytest.mark.parametrize("first", ["older", "newer"])
@pytest.mark.long
def test_of_two_checkpoint_copies_one_writes(url: str, guarded: Make, conn: Connection, first: str) -> None:
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    older = guarded(checkpoint, "older")
    dies(older, "read")
    copy = Checkpoint(list(checkpoint.offsets))
    newer = guarded(copy, "newer")
    with pytest.raises(Died):
        newer.step(die="read")
    assert copy.runs == checkpoint.runs
    one, other = (older, newer) if first == "older" else (newer, older)
    number, rows = checkpoint.runs[-1]
    one.sink(number, rows)
    with pytest.raises(MicroBatchFenced, match="all of it was done before"):
        other.sink(number, rows)
    last = guarded(copy, "newer")
    last.step()
    assert copy.runs[-1] == (number, [])
    go_on(conn, len(values), last)
    assert sunk(conn) == values


def test_a_batch_partly_ours_is_not_written(unwritten: Checkpoint, guarded: Make, conn: Connection) -> None:
    conn.execute(
        "update lending set in_doubt = null where stream_id ="
        " (select min(stream_id) from lending where in_doubt is not null)"
    )
    before = lending(conn)
    with pytest.raises(MicroBatchFenced, match="only a part is this query's to do now"):
        guarded(unwritten).sink(*unwritten.runs[-1])
    assert sunk(conn) == []
    assert lending(conn) == before


@pytest.mark.long
def test_a_process_that_lost_its_batch_cannot_write(unwritten: Checkpoint, guarded: Make, conn: Connection) -> None:
    """Though it is kept for the query."""
    eventually(lambda: "reserved" in {row[0] for row in lending(conn).values()}, 30.0)
    with pytest.raises(MicroBatchFenced, match="is not this query's to do now"):
        guarded(unwritten).sink(*unwritten.runs[-1])
    guarded(unwritten).step()
    assert sunk(conn) == VALUES


@pytest.mark.long
def test_an_exception_leaves_the_batch_to_be_done(unwritten: Checkpoint, guarded: Make, conn: Connection) -> None:
    again = guarded(unwritten)
    with pytest.raises(ZeroDivisionError):
        write(again.guard, then=fail)
    again.step()
    assert sunk(conn) == VALUES


def slow_commit(conn: Connection) -> None:
    """The server takes a while to commit what is sunk."""
    conn.execute(
        "create function public.wait() returns trigger language plpgsql"
        " as 'begin perform pg_sleep(1); return null; end'"
    )
    conn.execute(
        "create constraint trigger slow after insert on public.sunk deferrable initially deferred"
        " for each row execute function public.wait()"
    )


@pytest.mark.conforms("E35")
@pytest.mark.parametrize("way", ["at once", "by the next process", "at once, while it is still being committed"])
@pytest.mark.long
def test_a_commit_whose_answer_was_lost_is_found_out(
    url: str, guarded: Make, conn: Connection, tmp_path: Path, way: str
) -> None:
    away = way == "by the next process"
    checkpoint = Checkpoint()
    values = publish(url, 0, 30 if away else 3)
    with PostgresProxy(url) as cutter:
        run = guarded(checkpoint)
        run.guard = Guard(tmp_path, cutter.url)
        if way == "at once, while it is still being committed":
            slow_commit(conn)
        cutter.cut_commit(resume=not away, at_once=way.startswith("at once,"))
        if away:
            with pytest.raises(UnknownOutcome, match="Start the query again"):
                run.until(1_000)
        else:
            run.until(len(values))
        run.guard.close()
    again = guarded(checkpoint)
    eventually(lambda: not again.step(), 30.0)
    assert sunk(conn) == values


@pytest.mark.conforms("E36")
@pytest.mark.long
def test_a_frozen_driver_gives_its_streams_up(
    url: str, guarded: Make, conn: Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the block the server gives it as long as a batch may take, and what it has before its commit."""
    monkeypatch.setattr(consumer_progress, "BEFORE_COMMIT_S", 0.5)
    monkeypatch.setenv("SUBLET_MAX_POLL_INTERVAL_S", "1")
    checkpoint = Checkpoint()
    values = publish(url, 0, 3)
    dies(guarded(checkpoint), "read")
    logged(tmp_path, 0, checkpoint.offsets[0])
    again = guarded(checkpoint)
    again.reader.partitions(again.reader.initialOffset(), checkpoint.offsets[0])

    def freeze(connection: Connection) -> None:
        allowed = connection.execute("select current_setting('idle_in_transaction_session_timeout')").fetchone()
        assert allowed == ("1500ms",)
        there = "select from pg_stat_activity where application_name = 'sublet guard'"
        eventually(lambda: not conn.execute(there).fetchall(), 60.0)
        conn.execute("select from lending for update nowait")

    with pytest.raises(DatabaseUnreachable, match="nothing of batch 0 was written"):
        write(again.guard, values[0], freeze)
    assert sunk(conn) == []
    again.until(len(values))
    assert sunk(conn) == values


@pytest.mark.conforms("S11")
@pytest.mark.parametrize("point", ["read", "sunk", "committed"])
@pytest.mark.long
def test_batches_of_entire_epochs_are_written_once(url: str, guarded: Make, conn: Connection, point: str) -> None:
    store = PostgresGroupStore(url)
    store.declare_group(
        Subscription.parse("$share/g/#"),
        GroupOptions(starting_position=StartingPosition.parse("earliest"), atomic=True),
    )
    store.close()
    with Publisher(url, space="default", block_messages=3) as publisher:
        for epoch in range(8):
            for number in range(12):
                publisher.in_epoch(epoch).publish("t", b"%d" % epoch, key=b"k%d" % number)
            publisher.advance(epoch + 1)
    checkpoint = Checkpoint()
    for _ in range(2):
        dies(guarded(checkpoint, maxOffsetsPerTrigger=20), point)
    go_on(conn, 96, guarded(checkpoint, maxOffsetsPerTrigger=20))
    assert sunk(conn) == sorted(b"%d" % epoch for epoch in range(8) for _ in range(12))


def test_two_sources_are_done_together(url: str, guard: Guard, conn: Connection, tmp_path: Path) -> None:
    publish(url, 0, 10)
    ours, theirs = Checkpoint(), Checkpoint()
    for checkpoint, group in ((ours, "$share/g/#"), (theirs, "$share/h/#")):
        dies(Run(checkpoint, url, subscription=group, inDoubtTimeout=LONG), "read")
    logged(tmp_path, 0, {"topic": {"0": 7}}, ours.offsets[0], theirs.offsets[0])
    with pytest.raises(ZeroDivisionError):
        write(guard, then=fail)
    assert positions(conn) == {0}
    write(guard)
    ends = conn.execute("select count(*) from lending where in_doubt is not null and position = (in_doubt->'end')::int")
    assert ends.fetchone() == (len(ours.offsets[0]["streams"]) + len(theirs.offsets[0]["streams"]),)


def roll_back(connection: object) -> None:
    raise psycopg.Rollback


@pytest.mark.usefixtures("unwritten")
@pytest.mark.parametrize(
    ("end", "said"),
    [
        (lambda connection: connection.execute("commit"), "by commit or rollback"),
        (lambda connection: connection.execute("rollback"), "by commit or rollback"),
        (lambda connection: connection.execute("begin; commit; begin"), "by commit or rollback"),
        (roll_back, "by psycopg"),
    ],
    ids=["commit", "rollback", "another transaction", "a silent rollback"],
)
@pytest.mark.long
def test_a_block_that_ends_itself_is_not_done(guard: Guard, conn: Connection, end: Block, said: str) -> None:
    with pytest.raises(UsageError, match=f"ended its transaction itself, {said}"):
        write(guard, then=end)
    assert positions(conn) == {0}


@pytest.mark.conforms("E26", "E27")
@pytest.mark.long
def test_a_checkpoint_belongs_to_one_session(unwritten: Checkpoint, guarded: Make, conn: Connection) -> None:
    for other in ({"sessionName": "other"}, {"subscription": "$share/h/#"}):
        stranger = guarded(unwritten, **other)
        with pytest.raises(InvalidSetting, match=r"the checkpoint belongs to session 'etl' of \$share/g/#"):
            stranger.step()
        stranger.stop()
    guarded(unwritten).until(30)
    assert sunk(conn) == VALUES


@pytest.mark.conforms("E26")
def test_an_empty_batch_does_nothing_of_others(
    unwritten: Checkpoint, guard: Guard, conn: Connection, tmp_path: Path
) -> None:
    logged(tmp_path, 0, {**unwritten.offsets[0], "session": "other"})
    with guard(0):
        pass
    assert positions(conn) == {0}


@pytest.mark.conforms("E27")
@pytest.mark.long
def test_what_is_written_last_is_not_planned_again(
    url: str, guarded: Make, conn: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The guard of an earlier process writes when the next has planned, and has not said so."""
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    older = guarded(checkpoint, "older")
    dies(older, "read")
    values += publish(url, 30, 10)
    newer = guarded(Checkpoint(), "newer")
    plan, report = MicroBatchPlanLedger.plan, AgentLoop.report_progress
    over: list[bool] = []
    held_back: list[tuple[AgentLoop, int, ProgressReported]] = []

    def report_later(self: AgentLoop, handle: int, progress: ProgressReported) -> None:
        report(self, handle, progress) if over else held_back.append((self, handle, progress))

    def plan_first(self: MicroBatchPlanLedger, ends: Mapping[int, int]) -> None:
        plan(self, ends)
        if ends and not over:
            older.sink(*checkpoint.runs[-1])
            over.append(True)
            for one in held_back:
                report(*one)

    monkeypatch.setattr(AgentLoop, "report_progress", report_later)
    monkeypatch.setattr(MicroBatchPlanLedger, "plan", plan_first)
    go_on(conn, 40, newer)
    assert over
    assert sunk(conn) == values


def test_a_source_without_new_data_is_not_judged_again(
    url: str, guarded: Make, conn: Connection, tmp_path: Path
) -> None:
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    run = guarded(checkpoint)
    run.until(30)
    logged(tmp_path, 7, checkpoint.offsets[-1], {"topic": {"0": 7}})
    logged(tmp_path, 8, checkpoint.offsets[-1], {"topic": {"0": 8}})
    with run.guard(8) as connection:
        connection.execute(INSERT, (b"zzz",))
    assert sunk(conn) == [*values, b"zzz"]


def test_it_is_said_what_cannot_be_guarded(guard: Guard, url: str, tmp_path: Path) -> None:
    logged(tmp_path, 0, {})
    with guard(0) as connection:
        connection.execute("select")  # a first batch without anything may be guarded
    logged(tmp_path, 3, {"topic": {"0": 7}})
    with pytest.raises(UsageError, match=r"batch 3 in checkpoint .* has nothing that was read from sublet"), guard(3):
        pass
    with pytest.raises(UsageError, match="there is no batch 4 in checkpoint"), guard(4):
        pass
    (tmp_path / "state").mkdir()
    for checkpoint in (tmp_path, f"file:{tmp_path}", f"file://{tmp_path}"):
        with pytest.raises(UsageError, match="keeps state"), Guard(checkpoint, url)(3):
            pass
