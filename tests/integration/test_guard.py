"""`Guard`: what a micro-batch writes, and that it is done, are one commit; whoever dies, freezes or runs twice."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest

from sublet_borrower.consumer.member import Member
from sublet_borrower.machine.events import SessionProgress
from sublet_borrower.planner.plan_ledger import PlanLedger
from sublet_borrower.spark.source.exactly_once import Guard
from sublet_protocol.domain.errors import BatchLost, DatabaseUnreachable, InvalidSetting, UnknownOutcome, UsageError
from sublet_protocol.domain.subscriptions import StartingPosition, Subscription
from sublet_storage.groups import consumer_progress
from sublet_storage.groups.consumer_progress import TransactionIdentity
from sublet_storage.groups.coordinator.postgres_store import PostgresGroupStore
from sublet_storage.groups.model.records import GroupOptions
from sublet_storage.producer import Publisher
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
def url(database: str, fleet: Fleet, conn: psycopg.Connection[Any]) -> str:
    conn.execute("create table public.sunk (value bytea)")
    return database


@pytest.fixture
def runs(url: str) -> Iterator[list[Run]]:
    """Runs to be stopped at the end."""
    made: list[Run] = []
    yield made
    for run in made:
        run.stop()


def read_only(run: Run) -> None:
    """Let it read a batch, and die before it writes it."""
    with pytest.raises(Died):
        run.until(1_000, die="read")


def positions(conn: psycopg.Connection[Any]) -> set[int]:
    """Of all streams that are not finished."""
    return {position for _, position, _ in lending(conn).values()}


def fail(guard: Guard) -> None:
    """A function that raises after it has written."""
    with guard(0) as connection:
        connection.execute(INSERT, (b"x",))
        raise ZeroDivisionError


def sunk(conn: psycopg.Connection[Any]) -> list[bytes]:
    return [bytes(value) for (value,) in conn.execute("select value from public.sunk order by value")]


@pytest.mark.conforms("E26", "E27")
@pytest.mark.parametrize("point", POINTS)
def test_a_query_that_dies_writes_everything_once(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path, point: str
) -> None:
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    for _ in range(3):
        run = Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG, maxOffsetsPerTrigger=7)
        with pytest.raises(Died):
            run.until(1_000, die=point)
    runs.append(last := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG, maxOffsetsPerTrigger=7))
    eventually(lambda: [last.step(), len(sunk(conn)) >= 30][1], 30.0)
    assert not last.step()
    assert sunk(conn) == values


@pytest.mark.conforms("E26")
def test_what_is_written_is_not_in_doubt(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    ours, theirs = Checkpoint(), Checkpoint()
    values = publish(url, 0, 30)
    run = Guarded(ours, url, tmp_path / "ours", inDoubtTimeout=LONG)
    with pytest.raises(Died):
        run.until(1_000, die="sunk")
    publish(url, 30, 10)
    runs.append(other := Guarded(theirs, url, tmp_path / "theirs", sessionName="other"))
    eventually(lambda: [other.step(), len(sunk(conn)) >= 40][1], 30.0, lambda: str(lending(conn)))
    assert sunk(conn) == [*values, *(b"%06d" % number for number in range(30, 40))]
    assert "reserve" not in events(conn)


@pytest.mark.conforms("E26", "E27")
def test_with_a_guard_nothing_needs_to_be_kept(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    ours, theirs = Checkpoint(), Checkpoint()
    values = publish(url, 0, 30)
    gone = Guarded(ours, url, tmp_path / "ours", inDoubtTimeout="0 s", maxOffsetsPerTrigger=20)
    read_only(gone)
    runs.append(other := Guarded(theirs, url, tmp_path / "theirs", sessionName="other", inDoubtTimeout="0 s"))
    eventually(lambda: [other.step(), len(sunk(conn)) >= 30][1], 30.0)
    assert not {"reserve", "unreserve"} & set(events(conn))
    with pytest.raises(BatchLost):
        gone.sink(*ours.runs[-1])
    runs.append(back := Guarded(ours, url, tmp_path / "ours", inDoubtTimeout="0 s"))
    back.step()
    values += publish(url, 30, 10)
    eventually(lambda: [other.step(), back.step(), len(sunk(conn)) >= 40][2], 30.0)
    assert sunk(conn) == values


@pytest.mark.conforms("E27")
@pytest.mark.parametrize("first", ["older", "newer"])
def test_of_two_checkpoint_copies_one_writes(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path, first: str
) -> None:
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    older = Guarded(checkpoint, url, tmp_path / "older", inDoubtTimeout=LONG)
    read_only(older)
    copy = Checkpoint(list(checkpoint.offsets))
    newer = Guarded(copy, url, tmp_path / "newer", inDoubtTimeout=LONG)
    with pytest.raises(Died):
        newer.step(die="read")
    assert copy.runs == checkpoint.runs
    one, other = (older, newer) if first == "older" else (newer, older)
    number, rows = checkpoint.runs[-1]
    one.sink(number, rows)
    with pytest.raises(BatchLost, match="all of it was done before"):
        other.sink(number, rows)
    runs.append(last := Guarded(copy, url, tmp_path / "newer", inDoubtTimeout=LONG))
    last.step()
    assert copy.runs[-1] == (number, [])
    assert sunk(conn) == values


def test_a_batch_partly_ours_is_not_written(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    checkpoint = Checkpoint()
    publish(url, 0, 30)
    run = Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG)
    read_only(run)
    conn.execute(
        "update lending set in_doubt = null where stream_id ="
        " (select min(stream_id) from lending where in_doubt is not null)"
    )
    before = lending(conn)
    with pytest.raises(BatchLost, match="only a part is this query's to do now"):
        run.sink(*checkpoint.runs[-1])
    assert sunk(conn) == []
    assert lending(conn) == before


def test_a_process_that_lost_its_batch_cannot_write(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    run = Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG)
    read_only(run)
    eventually(lambda: "reserved" in {row[0] for row in lending(conn).values()}, 30.0)
    with pytest.raises(BatchLost, match="is not this query's to do now"):
        run.sink(*checkpoint.runs[-1])
    runs.append(again := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG))
    again.step()
    assert sunk(conn) == values


def test_an_exception_leaves_the_batch_to_be_done(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    runs.append(run := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG))
    read_only(run)
    runs[:] = [again := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG)]
    logged(tmp_path, 0, checkpoint.offsets[0])
    with pytest.raises(ZeroDivisionError):
        fail(again.guard)
    again.step()
    assert sunk(conn) == values


def slow_commit(conn: psycopg.Connection[Any]) -> None:
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
def test_a_commit_whose_answer_was_lost_is_found_out(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path, way: str
) -> None:
    away = way == "by the next process"
    checkpoint = Checkpoint()
    values = publish(url, 0, 30 if away else 3)
    with PostgresProxy(url) as cutter:
        runs.append(run := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG))
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
    runs.append(again := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG))
    eventually(lambda: not again.step(), 30.0)
    assert sunk(conn) == values


@pytest.mark.conforms("E36")
@pytest.mark.parametrize("where", ["in the block", "before the commit"])
def test_a_frozen_driver_gives_its_streams_up(
    url: str,
    runs: list[Run],
    conn: psycopg.Connection[Any],
    tmp_path: Path,
    where: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server gives it half a second before its commit, and in the block as long as a batch may take besides."""
    monkeypatch.setattr(consumer_progress, "BEFORE_COMMIT_S", 0.5)
    monkeypatch.setenv("SUBLET_MAX_POLL_INTERVAL_S", "1" if where == "in the block" else "600")
    checkpoint, settle = Checkpoint(), Guard._settle

    def freeze() -> None:
        there = "select from pg_stat_activity where application_name = 'sublet guard'"
        eventually(lambda: not conn.execute(there).fetchall(), 60.0)
        conn.execute("select from lending for update nowait")

    def settle_and_freeze(self: Guard, *arguments: Any) -> TransactionIdentity | None:
        attempt = settle(self, *arguments)
        freeze()
        return attempt

    values = publish(url, 0, 3)
    run = Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG)
    read_only(run)
    logged(tmp_path, 0, checkpoint.offsets[0])
    runs.append(again := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG))
    again.reader.partitions(again.reader.initialOffset(), checkpoint.offsets[0])
    with monkeypatch.context() as frozen, pytest.raises(DatabaseUnreachable, match="nothing of batch 0 was written"):  # noqa: PT012
        if where == "before the commit":
            frozen.setattr(Guard, "_settle", settle_and_freeze)
        with again.guard(0) as connection:
            connection.execute(INSERT, (values[0],))
            allowed = connection.execute("select current_setting('idle_in_transaction_session_timeout')").fetchone()
            assert allowed == ("1500ms" if where == "in the block" else "600500ms",)
            if where == "in the block":
                freeze()
    assert sunk(conn) == []
    again.until(len(values))
    assert sunk(conn) == values


@pytest.mark.conforms("S11")
@pytest.mark.parametrize("point", ["read", "sunk", "committed"])
def test_batches_of_whole_epochs_are_written_once(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path, point: str
) -> None:
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
        run = Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG, maxOffsetsPerTrigger=20)
        with pytest.raises(Died):
            run.until(1_000, die=point)
    runs.append(last := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG, maxOffsetsPerTrigger=20))
    eventually(lambda: [last.step(), len(sunk(conn)) >= 96][1], 30.0)
    assert sunk(conn) == sorted(b"%d" % epoch for epoch in range(8) for _ in range(12))


def test_two_sources_are_done_together(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    publish(url, 0, 10)
    ours, theirs = Checkpoint(), Checkpoint()
    for checkpoint, group in ((ours, "$share/g/#"), (theirs, "$share/h/#")):
        runs.append(run := Run(checkpoint, url, subscription=group))
        read_only(run)
    logged(tmp_path, 0, {"topic": {"0": 7}}, ours.offsets[0], theirs.offsets[0])
    guard = Guard(tmp_path, url)
    with pytest.raises(ZeroDivisionError):
        fail(guard)
    assert positions(conn) == {0}
    with guard(0) as connection:
        connection.execute(INSERT, (b"x",))
    guard.close()
    ends = conn.execute("select count(*) from lending where in_doubt is not null and position = (in_doubt->'end')::int")
    assert ends.fetchone() == (len(ours.offsets[0]["streams"]) + len(theirs.offsets[0]["streams"]),)


@pytest.mark.parametrize("end", ["commit", "rollback", "begin; commit; begin"])
def test_a_block_that_ends_itself_is_not_done(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path, end: str
) -> None:
    checkpoint = Checkpoint()
    publish(url, 0, 30)
    runs.append(run := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG))
    read_only(run)
    logged(tmp_path, 0, checkpoint.offsets[0])
    guard = Guard(tmp_path, url)

    def work() -> None:
        with guard(0) as connection:
            connection.execute(INSERT, (b"x",))
            connection.execute(end)

    with pytest.raises(UsageError, match="ended its transaction itself, by commit or rollback"):
        work()
    guard.close()
    assert positions(conn) == {0}


@pytest.mark.conforms("E26", "E27")
def test_a_checkpoint_belongs_to_one_session(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    run = Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG)
    read_only(run)
    logged(tmp_path, 0, checkpoint.offsets[0])
    for other in ({"sessionName": "other"}, {"subscription": "$share/h/#"}):
        runs.append(stranger := Guarded(checkpoint, url, tmp_path, **other))
        with pytest.raises(InvalidSetting, match=r"the checkpoint belongs to session 'etl' of \$share/g/#"):
            stranger.step()
        stranger.stop()
    runs.append(again := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG))
    again.until(30)
    assert sunk(conn) == values


@pytest.mark.conforms("E26")
def test_an_empty_batch_does_nothing_of_others(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    checkpoint = Checkpoint()
    publish(url, 0, 30)
    runs.append(run := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG))
    read_only(run)
    foreign = {**checkpoint.offsets[0], "session": "other"}
    logged(tmp_path, 0, foreign)
    guard = Guard(tmp_path, url)
    with guard(0):
        pass
    guard.close()
    assert positions(conn) == {0}


@pytest.mark.conforms("E27")
def test_what_is_written_last_is_not_planned_again(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    older = Guarded(checkpoint, url, tmp_path / "older", inDoubtTimeout=LONG)
    read_only(older)
    values += publish(url, 30, 10)
    anew = Checkpoint()
    runs.append(newer := Guarded(anew, url, tmp_path / "newer", inDoubtTimeout=LONG))
    plan, report = PlanLedger.plan, Member._report_progress
    over: list[bool] = []
    held_back: list[tuple[Member[PlanLedger], SessionProgress]] = []

    def report_later(self: Member[PlanLedger], progress: SessionProgress) -> None:
        report(self, progress) if over else held_back.append((self, progress))

    def plan_first(self: PlanLedger, ends: Mapping[int, int]) -> None:
        plan(self, ends)
        if ends and not over:
            older.sink(*checkpoint.runs[-1])
            over.append(True)
            for one in held_back:
                report(*one)

    monkeypatch.setattr(Member, "_report_progress", report_later)
    monkeypatch.setattr(PlanLedger, "plan", plan_first)
    eventually(lambda: [newer.step(), len(sunk(conn)) >= 40][1], 30.0, lambda: str(lending(conn)))
    assert over
    assert sunk(conn) == values


def test_a_source_without_news_is_not_judged_again(
    url: str, runs: list[Run], conn: psycopg.Connection[Any], tmp_path: Path
) -> None:
    checkpoint = Checkpoint()
    values = publish(url, 0, 30)
    runs.append(run := Guarded(checkpoint, url, tmp_path, inDoubtTimeout=LONG))
    run.until(30)
    logged(tmp_path, 7, checkpoint.offsets[-1], {"topic": {"0": 7}})
    logged(tmp_path, 8, checkpoint.offsets[-1], {"topic": {"0": 8}})
    with run.guard(8) as connection:
        connection.execute(INSERT, (b"zzz",))
    assert sunk(conn) == [*values, b"zzz"]


def test_a_first_batch_without_anything_may_be_guarded(url: str, tmp_path: Path) -> None:
    logged(tmp_path, 0, {})
    guard = Guard(tmp_path, url)
    with guard(0) as connection:
        connection.execute("select")
    guard.close()


def test_it_is_said_what_cannot_be_guarded(url: str, tmp_path: Path) -> None:
    guard = Guard(tmp_path, url)
    logged(tmp_path, 3, {"topic": {"0": 7}})
    with pytest.raises(UsageError, match=r"batch 3 in checkpoint .* has nothing that was read from sublet"), guard(3):
        pass
    with pytest.raises(UsageError, match="there is no batch 4 in checkpoint"), guard(4):
        pass
    (tmp_path / "state").mkdir()
    for checkpoint in (tmp_path, f"file:{tmp_path}", f"file://{tmp_path}"):
        with pytest.raises(UsageError, match="keeps state"), Guard(checkpoint, url)(3):
            pass
    guard.close()
