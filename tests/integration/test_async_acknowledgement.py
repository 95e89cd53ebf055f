"""What an `AsyncSession` does with a batch that was acknowledged, or was fetched and not taken: what `Session` does."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import psycopg
import pytest

from sublet_borrower.consumer.async_session import AsyncSession
from sublet_borrower.streams.batch import Batch
from sublet_borrower.util.single_thread_executor import SingleThreadExecutor
from sublet_protocol.domain.errors import SubscriptionEnded, UnknownOutcome, UsageError
from sublet_storage.producer import Publisher
from tests.integration.async_kit import Scene, in_a_loop, polled
from tests.integration.session_kit import until
from tests.kit import WAIT_S
from tests.postgres_proxy import PostgresProxy

pytestmark = pytest.mark.shards(1)

NOT_COMMITTED = "its transaction, whose outcome was unknown, was not committed"


@pytest.fixture(autouse=True)
def output(scene: Scene) -> None:
    scene.connection.execute("create table if not exists public.output (first bigint); truncate public.output")


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[Future[Any]]:
    """Return what runs on the threads of sessions, or has run."""
    found: list[Future[Any]] = []
    submit = SingleThreadExecutor.submit

    def noting(executor: SingleThreadExecutor, call: Callable[[], Any]) -> Future[Any]:
        found.append(submit(executor, call))
        return found[-1]

    monkeypatch.setattr(SingleThreadExecutor, "submit", noting)
    return found


def publish(scene: Scene, count: int) -> None:
    """Messages of one stream, each a batch of its own."""
    with Publisher(scene.url, block_messages=1) as publisher:
        for _ in range(count):
            publisher.publish(f"{scene.space}/t", b"", key=b"k")


def progress(scene: Scene) -> int:
    return sum(position for _, position in scene.rows().values())


def written(scene: Scene) -> list[int]:
    return [first for (first,) in scene.connection.execute("select first from public.output order by 1").fetchall()]


def write(batch: Batch, connection: psycopg.Connection[object]) -> None:
    connection.execute("insert into output values (%s)", (batch.first,))


async def commit(session: AsyncSession, batch: Batch) -> None:
    await session.run_in_transaction(partial(write, batch), batch)


async def commit_without_an_answer(session: AsyncSession, batch: Batch, cutter: PostgresProxy, arrives: bool) -> None:
    cutter.cut_commit(resume=False, arrives=arrives)
    with pytest.raises(UnknownOutcome):
        await commit(session, batch)


@contextlib.asynccontextmanager
async def in_doubt(
    scene: Scene, count: int, *, arrives: bool = False, auto_ack: bool = False
) -> AsyncIterator[tuple[AsyncSession, Batch, PostgresProxy]]:
    """A session of so many batches whose first was committed without an answer, and may be acknowledged now."""
    publish(scene, count)
    with PostgresProxy(scene.url) as cutter:
        async with scene.session(url=cutter.url, auto_ack=auto_ack) as session:
            batch = await polled(session)
            await commit_without_an_answer(session, batch, cutter, arrives)
            cutter.resume()
            yield session, batch, cutter


async def fetch_beside(session: AsyncSession, scene: Scene, submitted: list[Future[Any]]) -> None:
    """Have the session fetch one more batch, which nobody takes: the task that waits for it is cancelled."""
    waiting = asyncio.create_task(session.poll())
    await asyncio.sleep(0)
    publish(scene, 1)
    submitted[-1].result(WAIT_S)  # the loop stands still
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting


@pytest.mark.conforms("E25")
@in_a_loop
async def test_a_coroutine_is_no_work_for_a_transaction(scene: Scene) -> None:
    """Nobody would run it."""

    async def work(connection: psycopg.Connection[object]) -> None:
        write(batch, connection)

    work_of_no_thread: Callable[[psycopg.Connection[object]], object] = work
    publish(scene, 1)
    async with scene.session() as session:
        batch = await polled(session)
        with pytest.raises(UsageError, match="run_in_transaction returned a coroutine, which nobody runs"):
            await session.run_in_transaction(work_of_no_thread, batch)
        assert (written(scene), progress(scene)) == ([], 0)
        await commit(session, batch)
    assert (written(scene), progress(scene)) == ([0], 1)


@pytest.mark.conforms("E25", "E37")
@in_a_loop
async def test_the_next_poll_raises_what_an_ack_did(scene: Scene) -> None:
    """To acknowledge it twice before that does not pass it over; once more after it does."""
    async with in_doubt(scene, 2) as (session, batch, _):
        batch.ack()
        batch.ack()
        with pytest.raises(UsageError, match=NOT_COMMITTED) as raised:
            await session.poll(WAIT_S)
        assert raised.value.__notes__ == [f"Raised by batch.ack() of {batch!r}."]
        second = await polled(session)
        with pytest.raises(UsageError, match="offset 0 is still to be done"):
            await commit(session, second)
        assert progress(scene) == 0
        batch.ack()
        await commit(session, second)
    assert (written(scene), progress(scene)) == ([1], 2)


@pytest.mark.conforms("E25", "E37")
@in_a_loop
async def test_a_batch_whose_ack_is_refused_comes_again(scene: Scene) -> None:
    publish(scene, 3)
    with PostgresProxy(scene.url) as cutter:
        async with scene.session(url=cutter.url) as session:
            firsts: list[int] = []

            async def work() -> None:
                async for batch in session:
                    firsts.append(batch.first)
                    await commit_without_an_answer(session, batch, cutter, arrives=False)
                    cutter.resume()
                    batch.ack()

            with pytest.raises(UsageError, match=NOT_COMMITTED):
                await work()
            async for batch in session:
                firsts.append(batch.first)
                await commit(session, batch)
                if batch.first == 2:
                    break
    assert (firsts, written(scene), progress(scene)) == ([0, 0, 1, 2], [0, 1, 2], 3)


@pytest.mark.conforms("E25", "E37")
@pytest.mark.parametrize("auto_ack", [True, False])
@in_a_loop
async def test_an_ack_waits_for_an_unknown_outcome(scene: Scene, auto_ack: bool) -> None:
    """It was committed, and Postgres is away when it is acknowledged."""
    async with in_doubt(scene, 3, arrives=True, auto_ack=auto_ack) as (session, batch, cutter):
        cutter.go_away()
        batch.ack()
        await session.wait(0.0)  # what was acknowledged before is refused by then
        cutter.resume()
        for first in (1, 2):
            batch = await polled(session)
            assert batch.first == first
            batch.ack()
        await until(lambda: progress(scene) == 3, WAIT_S)
    assert written(scene) == [0]


@pytest.mark.conforms("E25", "E37")
@in_a_loop
async def test_an_ack_while_postgres_is_away_is_raised(scene: Scene) -> None:
    """By `poll`, or when it is acknowledged again."""
    async with in_doubt(scene, 1) as (session, batch, cutter):
        cutter.go_away()
        batch.ack()
        with pytest.raises(UnknownOutcome):
            await session.poll(WAIT_S)
        batch.ack()
        await session.wait(0.0)  # what was acknowledged before is refused by then
        with pytest.raises(UnknownOutcome):
            batch.ack()
        cutter.resume()
        batch.ack()
        await session.wait(0.0)
        with pytest.raises(UsageError, match=NOT_COMMITTED):
            batch.ack()
        await commit(session, batch)
    assert (written(scene), progress(scene)) == ([0], 1)


@pytest.mark.conforms("E25", "E37")
@pytest.mark.parametrize("fails", [False, True])
@in_a_loop
async def test_close_raises_what_an_ack_did(scene: Scene, fails: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Not over the exception that ended the block: then a warning says it."""

    async def work() -> None:
        async with in_doubt(scene, 1, auto_ack=True) as (_, batch, _):
            batch.ack()
            if fails:
                raise ValueError(NOT_COMMITTED)

    with pytest.raises(ValueError if fails else UsageError, match=NOT_COMMITTED):
        await work()
    assert f"acknowledgement refused: subscription={scene.group} stream_id=" in caplog.text
    assert progress(scene) == 0
    assert not scene.holders()


@pytest.mark.conforms("E37")
@in_a_loop
async def test_a_settled_batch_is_not_given_again(scene: Scene, submitted: list[Future[Any]]) -> None:
    """Its loop failed, and it was fetched again, when its user acknowledged it after all."""
    publish(scene, 1)
    async with scene.session() as session:
        with contextlib.suppress(ZeroDivisionError):
            async for batch in session:  # noqa: B007 used behind it
                raise ZeroDivisionError
        await fetch_beside(session, scene, submitted)
        batch.ack()
        assert (await polled(session)).first == 1
    assert progress(scene) == 2


@pytest.mark.conforms("E37")
@in_a_loop
async def test_a_failed_batch_comes_before_a_fetched_one(scene: Scene, submitted: list[Future[Any]]) -> None:
    publish(scene, 1)
    firsts: list[int] = []
    async with scene.session() as session:
        with contextlib.suppress(ZeroDivisionError):
            async for batch in session:
                firsts.append(batch.first)
                await fetch_beside(session, scene, submitted)
                raise ZeroDivisionError
        publish(scene, 1)
        async for batch in session:
            firsts.append(batch.first)
            if batch.first == 2:
                break
    assert (firsts, progress(scene)) == ([0, 0, 1, 2], 3)


@pytest.mark.conforms("E35", "E37")
@pytest.mark.parametrize("arrives", [True, False])
@in_a_loop
async def test_a_fetched_batch_waits_for_an_outcome(scene: Scene, submitted: list[Future[Any]], arrives: bool) -> None:
    """It lies behind one whose transaction got no answer, which may have to come first."""
    publish(scene, 1)
    with PostgresProxy(scene.url) as cutter:
        async with scene.session(url=cutter.url, auto_ack=False) as session:
            batch = await polled(session)
            await fetch_beside(session, scene, submitted)
            await commit_without_an_answer(session, batch, cutter, arrives)
            cutter.resume()
            cutter.go_away()
            assert await session.poll(0.3) is None
            cutter.resume()
            second = await polled(session)
            if not arrives:
                await commit(session, batch)
            await commit(session, second)
    assert (written(scene), progress(scene)) == ([0, 1], 2)


@pytest.mark.conforms("E29")
@in_a_loop
async def test_a_cancelled_wait_loses_no_end(scene: Scene, submitted: list[Future[Any]]) -> None:
    """That another session took its name is raised by the next call."""
    async with scene.session(name="n") as session:
        await until(session.assignment, WAIT_S)
        async with scene.session(name="n"):
            while not session.is_closed:
                waiting = asyncio.create_task(session.wait(0.0))
                await asyncio.sleep(0)
                await asyncio.sleep(0)
                submitted[-1].result(WAIT_S)  # it has looked, and the loop stands still
                waiting.cancel()
                await asyncio.wait({waiting})
            with pytest.raises(SubscriptionEnded, match="fenced"):
                await (session.poll() if waiting.cancelled() else waiting)


@pytest.mark.conforms("E37")
@in_a_loop
async def test_what_failed_in_a_loop_is_not_acknowledged(scene: Scene) -> None:
    """Nor by the end of the session, where the loop's iterator is stored and so has not noticed."""
    publish(scene, 1)
    async with scene.session() as session:
        batches = aiter(session)
        with contextlib.suppress(ZeroDivisionError):
            async for _ in batches:
                raise ZeroDivisionError
    assert progress(scene) == 0


@pytest.mark.conforms("E25", "E37")
@pytest.mark.parametrize("is_cancelled", [False, True])
@in_a_loop
async def test_another_loop_acknowledges_no_failed_batch(scene: Scene, is_cancelled: bool) -> None:
    """Its task raises, or is cancelled in its transaction, while the other's call waits for the session's thread."""
    publish(scene, 4)
    firsts: dict[str, list[int]] = {"well": [], "badly": []}
    go, thread_is_held, thread_may_go = asyncio.Event(), threading.Event(), threading.Event()

    def hold(connection: psycopg.Connection[object]) -> None:
        thread_is_held.set()
        assert thread_may_go.wait(WAIT_S)

    async def work_well() -> None:
        async for batch in session:
            firsts["well"].append(batch.first)
            if len(firsts["well"]) == 2:
                break
            await go.wait()

    async def work_badly() -> None:
        async for batch in session:
            firsts["badly"].append(batch.first)
            await go.wait()
            if is_cancelled:
                await commit(session, batch)
            raise ZeroDivisionError

    async with scene.session() as session:
        async for batch in session:
            working = asyncio.create_task(work_well())
            await until(lambda: firsts["well"], WAIT_S)
            failing = asyncio.create_task(work_badly())
            await until(lambda: firsts["badly"], WAIT_S)
            holding = asyncio.create_task(session.run_in_transaction(hold, batch))
            await until(thread_is_held.is_set, WAIT_S)
            go.set()
            await asyncio.sleep(0)  # what waited for it has run: one calls for its next batch, then the other ends
            failing.cancel()
            await asyncio.gather(failing, return_exceptions=True)
            thread_may_go.set()
            await asyncio.gather(holding, working)
            break
    assert firsts == {"well": [1, 3 if is_cancelled else 2], "badly": [2]}
    assert (written(scene), progress(scene)) == (([2], 4) if is_cancelled else ([], 3))
