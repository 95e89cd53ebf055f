"""Output and progress in one transaction, on a real node and Postgres: each message has its effect exactly once."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import psycopg
import pytest
from psycopg import transaction as psycopg_transaction

from sublet_borrower.consumer import transaction
from sublet_borrower.consumer.async_session import AsyncSession
from sublet_borrower.consumer.dead_letter import publish_dead_letter
from sublet_borrower.consumer.runner import RetryPolicy, run
from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.errors import DatabaseUnreachable, GrantLost, SubscriptionEnded, UnknownOutcome, UsageError
from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import create_space
from tests.interrupted_calls import run_interrupted
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED, Fleet
from tests.postgres_proxy import PostgresProxy

BORROWER = BorrowerSettings().scaled(SPEED)
_numbers = itertools.count()


class OutputStage:
    """A table for the output, a space for the messages, and a group of it."""

    def __init__(self, url: str) -> None:
        self.url, self.name = url, f"s{next(_numbers)}"
        self.topic, self.group = f"{self.name}/t", f"$share/{self.name}/{self.name}/#"
        self.connection = connect(url)
        self.connection.execute("drop table if exists public.output")
        self.connection.execute("create table public.output (stream bigint, value bytea)")
        create_space(self.connection, self.name, f"{self.name}/#")

    def session(self, url: str | None = None, **settings: object) -> Session:
        """One of the group, on the way to the database that is given."""
        return Session(self.group, url or self.url, settings=BORROWER, starting_position="earliest", **settings)  # type: ignore[arg-type]

    def publish(self, count: int, key: str | None = None, in_a_block: int = 1) -> None:
        """Messages `0` to `count`, so many in a block, and so in a batch."""
        with Publisher(self.url, block_messages=in_a_block) as publisher:
            for number in range(count):
                publisher.publish(self.topic, str(number), key=key or f"k{number}")

    def output(self) -> list[bytes]:
        """Return the written output, sorted."""
        return sorted(value for (value,) in self.connection.execute("select value from public.output").fetchall())

    def progress(self) -> int:
        """Messages that count as consumed."""
        positions = "select coalesce(sum(position), 0)::bigint from lending join consumer_group using (group_id)"
        ((total,),) = self.connection.execute(f"{positions} where name = '{self.name}'").fetchall()
        return int(total)

    def state(self) -> tuple[list[bytes], int]:
        return self.output(), self.progress()


@pytest.fixture(scope="module")
def url(shared_database: str, shared_fleet: Fleet) -> str:
    """The URL of a database with a node."""
    return shared_database


@pytest.fixture
def place(url: str) -> Iterator[OutputStage]:
    found = OutputStage(url)
    yield found
    found.connection.close()


def write(connection: psycopg.Connection[object], batch: Batch) -> None:
    for value in batch.table.column("value").to_pylist():
        connection.execute("insert into output values (%s, %s)", (batch.stream_id, value))


class Interrupted(Exception):
    """Raised by a signal handler, or in a transaction."""


def commit(session: Session, *batches: Batch, error: type[Exception] | None = None) -> None:
    """Write the batches in one transaction, and raise the error in it."""
    with session.transaction(*batches) as connection:
        for batch in batches:
            write(connection, batch)
        if error is not None:
            raise error


def get_no_answer(cutter: PostgresProxy, session: Session, *batches: Batch, arrives: bool = True) -> None:
    """Commit the batches, and get no answer; the database can be reached again then."""
    cutter.cut_commit(resume=False, arrives=arrives)
    with pytest.raises(UnknownOutcome):
        commit(session, *batches)
    cutter.resume()


def expected(count: int) -> list[bytes]:
    return sorted(str(number).encode() for number in range(count))


def first(session: Session) -> Batch:
    batch = session.poll(WAIT_S)
    assert batch is not None
    return batch


@pytest.mark.conforms("E25")
@pytest.mark.parametrize("up_to_offset", [None, 1])
def test_no_batch_is_acknowledged_in_its_transaction(place: OutputStage, up_to_offset: int | None) -> None:
    """It would count as done also where the block fails afterwards, or its progress is refused as it was passed."""
    place.publish(2, key="k", in_a_block=2)

    def acknowledge_too_soon(batch: Batch) -> None:
        with batch.transaction() as connection:
            write(connection, batch)
            batch.ack(up_to_offset)

    with place.session(auto_ack=False) as session:
        batch = first(session)
        with pytest.raises(UsageError, match="its transaction is open"):
            acknowledge_too_soon(batch)
        assert place.output() == []
        commit(session, batch)
        batch.ack()
    assert place.state() == (expected(2), 2)


@pytest.mark.conforms("E25")
def test_output_and_progress_are_committed_together(place: OutputStage) -> None:
    place.publish(20)
    with place.session() as session:
        done = 0
        while done < 20:
            batch = first(session)
            token = {
                b"sublet.stream_id": str(batch.stream_id).encode(),
                b"sublet.grant_id": str(batch.grant_id).encode(),
            }
            assert token.items() <= batch.table.schema.metadata.items(), "who writes elsewhere can fence by it"
            with batch.transaction() as connection:
                write(connection, batch)
                assert place.progress() == done, "nothing of it before the commit"
            done += len(batch)
            assert place.progress() == done, "and all of it with it, without a word of the leader's"
    assert place.output() == expected(20)


def test_a_late_change_of_the_schema_moves_no_session(place: OutputStage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor its transactions and dead letters, over a connection that is made later."""
    place.publish(1)
    with place.session() as session:
        monkeypatch.setenv("SUBLET_SCHEMA", "elsewhere")
        batch = first(session)
        with batch.transaction() as connection:
            write(connection, batch)
            publish_dead_letter(connection, place.topic, batch.table, batch.stream_id, "of no use")
        assert place.state() == (expected(1), 1)
        assert first(session).table["value"].to_pylist() == [b"0"], "the dead letter"


def interrupt(*_: object) -> NoReturn:
    raise Interrupted


def wait_for_a_signal(connection: psycopg.Connection[object]) -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    connection.execute("select pg_sleep(60)")


def roll_back_silently(connection: psycopg.Connection[object]) -> None:
    raise psycopg.Rollback


def be_cut_off(connection: psycopg.Connection[object]) -> None:
    info = connection.info
    with psycopg.connect(info.dsn, password=info.password, autocommit=True) as other:
        other.execute("select pg_terminate_backend(%s, 5000)", (info.backend_pid,))


ENDED = (UsageError, "the block has ended its transaction itself")
IN_VAIN: dict[str, tuple[Callable[[psycopg.Connection[object]], object], type[Exception], str | None]] = {
    "an exception": (lambda connection: 1 / 0, ZeroDivisionError, "division by zero"),
    "an exception out of a signal handler": (wait_for_a_signal, Interrupted, None),
    "psycopg.Rollback": (roll_back_silently, *ENDED),
    "rollback": (lambda connection: connection.execute("rollback"), *ENDED),
    "commit": (lambda connection: connection.execute("commit"), *ENDED),
    "the database is away": (be_cut_off, DatabaseUnreachable, "nothing was written"),
}


@pytest.mark.conforms("E17", "E25", "E37")
@pytest.mark.parametrize("way", IN_VAIN)
@pytest.mark.long
def test_a_transaction_in_vain_leaves_the_batch(place: OutputStage, way: str) -> None:
    """Output and progress are as before, and the batch is still to be done, whatever ends its transaction."""
    act, error, said = IN_VAIN[way]
    place.publish(1)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with place.session() as session:
            batch = first(session)

            def work() -> None:
                with batch.transaction() as connection:
                    if way != "commit":
                        write(connection, batch)
                    act(connection)

            with pytest.raises(error, match=said):
                work()
            assert place.state() == ([], 0)
            again = session.poll(0.5)
            assert again is not None, "to ask for more does not acknowledge it"
            assert again.is_same_as(batch)
            assert place.progress() == 0
            commit(session, batch)
            assert place.state() == (expected(1), 1)
            for each, refusal in ((batch, "committed already"), (again, "acknowledged already")):
                with pytest.raises(UsageError, match=refusal), each.transaction():
                    pass
            assert session.poll(0.5) is None
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.conforms("E25")
def test_a_batch_and_what_came_in_its_place_are_one(place: OutputStage) -> None:
    """A transaction with both would store their messages twice."""
    place.publish(4, key="k", in_a_block=4)
    with place.session() as session:
        former = first(session)
        with pytest.raises(Interrupted):
            commit(session, former, error=Interrupted)
        again = first(session)
        assert again.is_same_as(former)
        for both in ((former, again), (former.slice(0, 2), again.slice(0, 3)), (again.slice(1, 1), former.slice(0, 2))):
            with pytest.raises(UsageError, match="done already, or by another part"), session.transaction(*both):
                raise AssertionError("the block does not run")
        commit(session, former.slice(0, 2), again.slice(2, 2))
        assert place.state() == (expected(4), 4)
        with pytest.raises(UsageError, match="already"), again.transaction():
            pass


@pytest.mark.conforms("E11", "E25", "E30")
def test_of_two_of_one_name_the_newer_writes(place: OutputStage) -> None:
    """The older's transaction fails, as the stream went to the newer; its session is over for good."""
    place.publish(1)
    with place.session(name="worker") as old:
        batch = first(old)
        with place.session(name="worker") as new:
            theirs = first(new)
            assert theirs.grant_id > batch.grant_id
            with pytest.raises(GrantLost, match="Roll the transaction back"):
                commit(old, batch)
            commit(new, theirs)
            with pytest.raises(SubscriptionEnded, match="fenced"):
                list(old)
            assert new.poll(0.2) is None
            assert new.assignment()
    assert place.state() == (expected(1), 1)


TAKEN = """
update lending set status = 'free', grant_id = grant_id + 1, borrower_id = null, agent = null, session = null
 where stream_id = %s"""


@pytest.mark.conforms("E11", "E25", "E36")
def test_a_stream_taken_by_hand_is_granted_anew(place: OutputStage) -> None:
    place.publish(3, key="taken")
    place.publish(2, key="kept")
    lost: list[Batch] = []
    with place.session(max_batch_bytes=1) as session:
        for batch in session:
            if batch.table.column("key")[0].as_py() == b"taken" and not lost:
                place.connection.execute(TAKEN, (batch.stream_id,))
            try:
                commit(session, batch)
            except GrantLost:
                lost.append(batch)
                assert batch.is_lost
                assert batch.stream_id not in session.assignment()
            assert len(lost) <= 1, "what was taken is not given out under that grant again"
            if place.progress() == 5:
                break
    assert len(lost) == 1
    assert place.output() == [b"0", b"0", b"1", b"1", b"2"]
    said = place.connection.execute(
        "select reason, grant_id > %s from lending_history where stream_id = %s and event = 'grant' order by at",
        (lost[0].grant_id, lost[0].stream_id),
    ).fetchall()
    assert said == [("allocated", False), ("allocated", True)]


@pytest.mark.conforms("E35", "E37")
@pytest.mark.parametrize(("module", "lines"), [(transaction, 50), (psycopg_transaction, 20)], ids=["ours", "psycopg's"])
def test_a_transaction_broken_off_is_done_again(place: OutputStage, module: ModuleType, lines: int) -> None:
    """Wherever an exception of a signal handler comes from its code, and once."""
    assert module.__file__ is not None
    where = Path(module.__file__)
    place.publish(200, key="k")
    with place.session(auto_ack=False, max_batch_bytes=1) as session:
        broken, line = "?", 0
        while broken:
            batch, line, broken = first(session), line + 1, "?"
            with contextlib.suppress(DatabaseUnreachable):  # psycopg's own error may come instead
                _, broken = run_interrupted(partial(commit, session, batch), line, where)
            if broken and (batch.is_outstanding or batch.is_recovered):
                commit(session, batch)
    assert line > lines
    assert place.state() == (expected(line), line)


@pytest.mark.conforms("E35")
def test_a_commit_of_a_forgotten_grant_is_unknown(place: OutputStage) -> None:
    """Of one without an answer nobody says that nothing was written, where history does not have its grant."""
    place.publish(1)
    with PostgresProxy(place.url) as cutter, place.session(cutter.url, auto_ack=False) as session:
        batch = first(session)
        cutter.cut_commit(resume=False)
        with pytest.raises(UnknownOutcome, match="cannot be had again"):
            commit(session, batch)
        place.connection.execute("update lending set grant_id = grant_id + 1")
        place.connection.execute("delete from lending_history")
        cutter.resume()
        with pytest.raises(UnknownOutcome, match="granted anew since"):
            commit(session, batch)
        assert place.output() == [b"0"]


@pytest.mark.parametrize("away", [False, True], ids=["found out at once", "found out by the next try"])
def test_a_commit_without_an_answer_is_done_once(place: OutputStage, away: bool) -> None:
    place.publish(3, key="k")
    with PostgresProxy(place.url) as cutter, place.session(cutter.url) as session:
        calls = 0

        def work(batch: Batch) -> None:
            nonlocal calls
            calls += 1
            try:
                with batch.transaction() as connection:
                    write(connection, batch)
                    if calls == 1:
                        cutter.cut_commit(resume=not away)
            except UnknownOutcome:
                cutter.resume()
                raise

        def drain_when_done() -> None:
            eventually(lambda: place.progress() == 3, WAIT_S)
            session.drain()

        draining = threading.Thread(target=drain_when_done)
        draining.start()
        summary = run(session, work, policy=RetryPolicy(max_attempts=3, backoff_s=0.1, max_backoff_s=0.2))
        draining.join()
        assert (calls, summary.failures) == (2 if away else 1, 0)
    assert place.output() == expected(3)


@pytest.mark.conforms("E35", "E37")
@pytest.mark.parametrize("arrives", [False, True])
def test_an_outcome_is_found_out_while_polling(place: OutputStage, arrives: bool) -> None:
    """The database comes back when the next batch has been asked for, and nothing behind is given before."""
    place.publish(3, key="k")
    seen: list[int] = []
    with PostgresProxy(place.url) as cutter, place.session(cutter.url, max_batch_bytes=1) as session:

        def come_back() -> None:
            eventually(lambda: cutter.refused >= 4, WAIT_S)
            cutter.resume()

        coming = threading.Thread(target=come_back)
        for batch in session:
            seen.append(batch.first)
            with contextlib.suppress(UnknownOutcome), batch.transaction() as connection:
                write(connection, batch)
                if len(seen) == 1:
                    cutter.cut_commit(resume=False, arrives=arrives)
            if len(seen) == 1:
                cutter.resume()
                cutter.go_away()
                coming.start()
            if place.progress() == 3:
                break
        coming.join()
    assert (seen, place.output()) == ([0, 1, 2] if arrives else [0, 0, 1, 2], expected(3))


AGAIN: dict[str, Callable[[list[Batch], list[Batch]], tuple[Batch, ...]]] = {
    "the same": lambda a, b: (a[0], b[0]),
    "in another order": lambda a, b: (b[0], a[0]),
    "one more": lambda a, b: (a[0], b[0], b[1]),
    "one more and one fewer": lambda a, b: (a[0], a[1]),
    "one fewer": lambda a, b: (b[0],),
    "only others": lambda a, b: (a[1], b[1]),
}


@pytest.mark.conforms("E35")
@pytest.mark.parametrize(
    ("again", "arrives"),
    [
        *((again, True) for again in (*AGAIN, "acknowledged", "asked on")),
        *((again, False) for again in ("the same", "one fewer", "acknowledged")),
    ],
)
@pytest.mark.long
def test_after_an_unknown_outcome_each_counts_once(place: OutputStage, again: str, arrives: bool) -> None:
    """Two streams of two batches each; of both the first is in the transaction that gets no answer."""
    for key in ("a", "b"):
        place.publish(2, key)
    with PostgresProxy(place.url) as cutter, place.session(cutter.url, auto_ack=False, max_batch_bytes=1) as session:
        batches = sorted((first(session) for _ in range(4)), key=lambda batch: batch.first)
        a, b = (
            [batch for batch in batches if batch.stream_id == stream_id]
            for stream_id in {batch.stream_id for batch in batches}
        )

        get_no_answer(cutter, session, a[0], b[0], arrives=arrives)
        with contextlib.suppress(UsageError):
            if again == "acknowledged":
                b[0].ack()
                a[0].ack()
            elif again == "asked on":
                assert session.poll(0.3) is None
            else:
                commit(session, *AGAIN[again](a, b))
        for batch in (*a, *b):
            if not batch.committed:
                commit(session, batch)
    assert place.state() == (sorted(2 * expected(2)), 4)


@pytest.mark.conforms("E35", "E37")
@pytest.mark.parametrize("asks_on", [False, True])
def test_each_batch_not_committed_is_refused_once(place: OutputStage, asks_on: bool) -> None:
    """To acknowledge it passes it over only when its user knows, whoever has found the outcome out."""
    for key in ("a", "b"):
        place.publish(1, key)
    with PostgresProxy(place.url) as cutter, place.session(cutter.url, auto_ack=False) as session:
        batches = [first(session), first(session)]
        get_no_answer(cutter, session, *batches, arrives=False)
        if asks_on:
            assert session.poll(0.3) is None
        for batch in batches:
            with pytest.raises(UsageError, match="acknowledge it once more"):
                batch.ack()
        assert place.progress() == 0
        for batch in batches:
            batch.ack()
    assert place.progress() == 2


@pytest.mark.conforms("E35", "E37")
@pytest.mark.parametrize("of_one_batch", [False, True])
def test_a_batch_whose_block_did_not_run_is_refused(place: OutputStage, of_one_batch: bool) -> None:
    """A transaction whose block did not run, as the outcome of the one before could not be found out."""
    with Publisher(place.url) as publisher:
        for key in "aabb":
            publisher.publish(place.topic, key, key=key)
    with PostgresProxy(place.url) as cutter, place.session(cutter.url, auto_ack=False) as session:
        batch = first(session)
        done, left = (batch.slice(0, 1), batch.slice(1, 1)) if of_one_batch else (batch, first(session))
        cutter.cut_commit(resume=False)
        with pytest.raises(UnknownOutcome), done.transaction():
            pass
        cutter.go_away()
        with pytest.raises(UnknownOutcome), left.transaction():
            raise AssertionError("the block does not run")
        cutter.resume()
        with pytest.raises(UsageError, match="acknowledge it once more"):
            (batch if of_one_batch else left).ack()
        commit(session, left)
    assert place.state() == (left.table.column("value").to_pylist(), 2 if of_one_batch else 4)


@pytest.mark.conforms("E35")
@pytest.mark.parametrize("asks_on", [False, True])
def test_a_part_is_done_after_one_that_was_committed(place: OutputStage, asks_on: bool) -> None:
    """Its own block did not run, as the outcome of the one before was still unknown."""
    place.publish(2, key="k", in_a_block=2)
    with PostgresProxy(place.url) as cutter, place.session(cutter.url) as session:
        batch = first(session)
        done, left = batch.slice(0, 1), batch.slice(1, 1)
        get_no_answer(cutter, session, done)
        cutter.go_away()
        with pytest.raises(UnknownOutcome):
            commit(session, left)
        cutter.resume()
        commit(session, first(session) if asks_on else left)
    assert place.state() == (expected(2), 2)


@pytest.mark.conforms("E37")
def test_a_part_of_a_committed_batch_is_acknowledged(place: OutputStage) -> None:
    """The transaction got no answer, and had all of it."""
    place.publish(5, key="k", in_a_block=5)
    with PostgresProxy(place.url) as cutter, place.session(cutter.url) as session:
        batch = first(session)
        get_no_answer(cutter, session, batch)
        batch.ack(up_to_offset=3)
        assert place.progress() == 5


def test_a_function_that_commits_is_not_called_again(place: OutputStage) -> None:

    place.publish(4, key="k")
    with place.session(auto_ack=False, max_batch_bytes=1) as session:

        def work(batch: Batch) -> None:
            commit(session, batch)
            if place.progress() == 4:
                session.drain()
            raise ValueError("too late")

        summary = run(session, work)
    assert (summary.failures, summary.batches) == (4, 4)
    assert place.output() == expected(4)


@pytest.mark.conforms("E35")
def test_several_batches_in_one_transaction(place: OutputStage) -> None:
    """They are committed in the order of their streams."""
    for key in ("a", "b"):
        place.publish(3, key)
    with place.session(auto_ack=False, max_batch_bytes=1) as session:
        batches = [first(session) for _ in range(6)]
        second = next(batch for batch in batches if batch.first == 1)
        with pytest.raises(UsageError, match="begins at offset 0 is still to be done"), second.transaction():
            pass
        commit(session, *batches)
        assert place.state() == (sorted(2 * expected(3)), 6)
        with pytest.raises(UsageError, match="name the batches"), session.transaction():
            pass


def test_a_batch_of_another_session_is_refused(place: OutputStage) -> None:
    """Before anything is done with it: its own session commits it afterwards."""
    place.publish(1)
    other = OutputStage(place.url)
    with place.session(auto_ack=False) as session, other.session(auto_ack=False) as wrong:
        batch = first(session)
        for each in (batch, batch.slice(0, 1)):
            with pytest.raises(UsageError, match="is of another session"):
                commit(wrong, each)
        assert not batch.has_uncommitted_transaction
        commit(session, batch)
    assert place.state() == (expected(1), 1)
    other.connection.close()


@pytest.mark.conforms("E37")
def test_parts_of_a_batch_are_committed_in_order(place: OutputStage) -> None:

    place.publish(5, key="k", in_a_block=5)
    with place.session(auto_ack=False) as session:
        batch = first(session)
        assert len(batch) == 5
        with pytest.raises(UsageError, match="offset 0, which comes before it, is still to be done"):
            commit(session, batch.slice(2, 1))
        commit(session, batch.slice(0, 1), batch.slice(1, 1))
        left = batch.slice(2, 3)
        for twice in ([batch], [batch.slice(1, 2)], [batch.slice(5, 0)], [left, batch.slice(2, 1)], [left, left]):
            with pytest.raises(UsageError, match=r"batch\.slice\("):
                commit(session, *twice)
        assert place.state() == (expected(2), 2)
        commit(session, left)
    assert place.state() == (expected(5), 5)


@pytest.mark.conforms("E35", "E37")
@pytest.mark.parametrize("trouble", ["an exception", "not arrived", "arrived"])
@pytest.mark.parametrize("done_before", [pytest.param(0, marks=pytest.mark.long), 2])
def test_an_uncommitted_part_is_still_to_be_done(place: OutputStage, trouble: str, done_before: int) -> None:
    """A poll gives again what is left of a batch of which a part failed, or may have, and each part counts once."""
    place.publish(5, key="k", in_a_block=5)
    with PostgresProxy(place.url) as cutter, place.session(cutter.url) as session:
        batch = first(session)
        assert len(batch) == 5
        part = batch.slice(done_before, 1)
        if done_before:
            commit(session, batch.slice(0, done_before))
        if trouble == "an exception":
            with pytest.raises(Interrupted):
                commit(session, part, error=Interrupted)
        else:
            get_no_answer(cutter, session, part, arrives=trouble == "arrived")
        done = done_before + (trouble == "arrived")
        assert first(session).table["offset"].to_pylist() == list(range(done, 5))
        assert place.state() == (expected(done), done)
        commit(session, part)
        commit(session, batch.slice(done_before + 1, 4 - done_before))
        assert place.state() == (expected(5), 5)


@pytest.mark.conforms("E35", "E37")
@pytest.mark.parametrize("done_by", ["transactions", "ack"])
def test_a_loop_over_parts_goes_on_where_one_failed(place: OutputStage, done_by: str) -> None:
    """What is done of a batch does not come again, and the same code does the rest."""
    place.publish(5, key="k", in_a_block=5)
    seen: list[int] = []
    with place.session() as session:
        while len(seen) < 5:
            with contextlib.suppress(Interrupted):
                for batch in session:
                    for start in range(len(batch)):
                        part = batch.slice(start, 1)
                        if start and len(seen) < 4:
                            raise Interrupted
                        if done_by == "ack":
                            batch.ack(up_to_offset=part.end)
                        else:
                            commit(session, part)
                        seen += part.table["offset"].to_pylist()
                    break
    assert (seen, place.progress()) == (list(range(5)), 5)
    assert done_by == "ack" or place.output() == expected(5)


@pytest.mark.conforms("E35", "E37")
def test_a_failed_transaction_comes_again_in_a_loop(place: OutputStage) -> None:
    """Its exception was caught within the loop, before the next was asked for."""
    place.publish(3, key="k")
    seen: list[int] = []
    with place.session(max_batch_bytes=1) as session:
        for batch in session:
            seen.append(batch.first)
            with contextlib.suppress(Interrupted):
                commit(session, batch, error=Interrupted if seen in ([0], [0, 0, 1]) else None)
            if place.progress() == 3:
                break
    assert (seen, place.output()) == ([0, 0, 1, 1, 2], expected(3))


@pytest.mark.conforms("E25")
def test_an_async_session_commits_on_its_own_thread(place: OutputStage) -> None:
    place.publish(5, key="k")
    threads: set[int] = set()

    async def main() -> None:
        async with AsyncSession(
            place.group, place.url, settings=BORROWER, starting_position="earliest", max_batch_bytes=1
        ) as session:

            def work(batch: Batch, connection: psycopg.Connection[object]) -> str:
                threads.add(threading.get_ident())
                write(connection, batch)
                return "done"

            for number in range(5):
                batch = await session.poll(WAIT_S)
                assert batch is not None
                if number == 0:
                    with pytest.raises(UsageError, match=r"session\.run_in_transaction"):
                        batch.transaction()
                assert await session.run_in_transaction(partial(work, batch), batch) == "done"
                assert place.progress() == number + 1

    asyncio.run(main())
    assert place.output() == expected(5)
    assert threading.get_ident() not in threads
