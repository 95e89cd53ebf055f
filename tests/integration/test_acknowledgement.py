"""Work that ended well is acknowledged and not repeated, work that failed comes again: however a loop is left.

How a loop was left is found out by its iterator: `tests/unit/test_loops.py` has all that it can be.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sublet_borrower.consumer.async_session import AsyncSession
from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_protocol.domain.errors import UsageError
from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.integration.sharing_kit import Stage
from tests.interrupted_calls import run_interrupted
from tests.kit import WAIT_S, eventually
from tests.kit_nodes import SPEED

ARGUMENTS: dict[str, Any] = {
    "starting_position": "earliest",
    "max_batch_bytes": 1,
    "settings": BorrowerSettings().scaled(SPEED),
}
BORROWER = Path(sys.modules[Session.__module__].__file__ or "").parents[1]


class ConsumerStage(Stage):
    """A node, and a stream of numbered messages, each a batch. Each test has a group of its own."""

    published = 0

    def publish(self, count: int) -> None:
        with Publisher(self.scene.url, block_messages=1) as publisher:
            for _ in range(count):
                publisher.publish("t", b"", key=b"k")
        self.published += count

    def session(self, group: str) -> Session:
        return Session(f"$share/{group}/#", self.scene.url, **ARGUMENTS)

    def of_a_loop(self, group: str) -> AsyncSession:
        return AsyncSession(f"$share/{group}/#", self.scene.url, **ARGUMENTS)

    def progress(self, group: str) -> int:
        """Return the position of a group, once no session holds its stream."""
        statement = "select status, position from lending join consumer_group using (group_id) where name = %s"

        def at_rest() -> list[tuple[str, int]]:
            rows = self.scene.ask(statement, (group,))
            return [] if any(status == "held" for status, _ in rows) else rows

        return max(position for _, position in eventually(at_rest, WAIT_S))


@pytest.fixture(scope="module")
def place(shared_database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ConsumerStage]:
    with connect(shared_database) as connection:
        reshard(connection, "default", 1)
        connection.execute("delete from stream where state <> 'open'")
    found = ConsumerStage(shared_database, tmp_path_factory.mktemp("place"))
    try:
        found.serve("n1")
        found.publish(6)
        yield found
    finally:
        found.close()


class Failed(Exception):
    """Work has."""


STORED: list[object] = []
SeenNumbers = list[int]
LeaveLoop = Callable[[Session, SeenNumbers], object]


def next_of(session: Session) -> Batch:
    batch = session.poll(WAIT_S)
    assert batch is not None
    return batch


def break_(session: Session, seen: SeenNumbers) -> None:
    for batch in session:
        seen.append(batch.first)
        if batch.first == 1:
            break


def by_hand(session: Session, seen: SeenNumbers) -> None:
    for _ in range(2):
        seen.append(next_of(session).first)


def fail(session: Session, seen: SeenNumbers, error: type[BaseException] = Failed) -> None:
    for batch in session:
        seen.append(batch.first)
        if batch.first == 1:
            raise error


def interrupted(session: Session, seen: SeenNumbers) -> None:
    fail(session, seen, KeyboardInterrupt)


def over_a_stored_iterator(session: Session, seen: SeenNumbers) -> None:
    batches = iter(session)
    STORED.append(batches)
    fail(batches, seen)  # type: ignore[arg-type]


def nested(session: Session, seen: SeenNumbers) -> None:
    for batch in session:
        seen.append(batch.first)
        fail(session, seen)


@pytest.mark.conforms("E37")
@pytest.mark.parametrize(("leave", "again"), [(break_, [2, 3]), (by_hand, [2, 3]), (fail, [1, 2]), (nested, [0, 1, 2])])
def test_what_failed_comes_again_and_no_more(place: ConsumerStage, leave: LeaveLoop, again: SeenNumbers) -> None:
    """Where a session goes on after its loop, in the order of its stream; what ended well is not repeated."""
    seen: SeenNumbers = []
    with place.session(f"again {leave.__name__}") as session:
        with contextlib.suppress(Failed):
            leave(session, seen)
        assert seen == [0, 1]
        assert [next_of(session).first for _ in again] == again


def with_it(session: Session, leave: LeaveLoop, seen: SeenNumbers) -> None:
    with session:
        leave(session, seen)


def caught_within(session: Session, leave: LeaveLoop, seen: SeenNumbers) -> None:
    with session, contextlib.suppress(Failed, KeyboardInterrupt):
        leave(session, seen)


def closed(session: Session, leave: LeaveLoop, seen: SeenNumbers) -> None:
    with contextlib.closing(session):
        leave(session, seen)


@pytest.mark.conforms("E37")
def test_the_end_of_a_session_acknowledges(place: ConsumerStage) -> None:
    """What ended well, and nothing else."""
    well, badly = (break_, by_hand), (fail, interrupted, over_a_stored_iterator)
    for end, leave in itertools.product((with_it, caught_within, closed), (*well, *badly)):
        seen: SeenNumbers = []
        group = f"{leave.__name__} {end.__name__}"
        with contextlib.suppress(Failed, KeyboardInterrupt):
            end(place.session(group), leave, seen)
        ended_well = leave in well and not (leave is by_hand and end is closed)
        assert (seen, place.progress(group)) == ([0, 1], 2 if ended_well else 1), group


def test_a_second_thread_is_refused(place: ConsumerStage) -> None:
    """In the middle of another's call, which goes on; later it may call."""
    with place.session("threads") as session, ThreadPoolExecutor(1, "other") as pool:
        batch = [next_of(session) for _ in range(place.published)][-1]
        waiting = pool.submit(session.poll)

        def refusal() -> str:
            try:
                session.wait(0.0)
            except UsageError as refused:
                return str(refused)
            return ""

        assert "in the middle of a call of thread 'other_0': one thread at a time uses" in eventually(refusal, WAIT_S)
        with pytest.raises(UsageError, match="one thread at a time"):
            session.poll(WAIT_S)
        with pytest.raises(UsageError, match="one thread at a time"), session.transaction(batch):
            pass
        session.wakeup()
        assert waiting.result(WAIT_S) is None
        place.publish(1)
        assert next_of(session).end == place.published
    assert place.progress("threads") == place.published


def plainly(session: AsyncSession) -> AsyncIterable[Batch]:
    return session


class AsyncWrapper(AsyncIterator[Batch]):
    def __init__(self, session: AsyncSession) -> None:
        self._batches = aiter(session)

    async def __anext__(self) -> Batch:
        return await anext(self._batches)


async def over_a_generator(session: AsyncSession) -> AsyncIterator[Batch]:
    async for batch in session:
        yield batch


BeginLoop = Callable[[AsyncSession], AsyncIterable[Batch]]
BEGIN: list[BeginLoop] = [plainly, AsyncWrapper, over_a_generator]


@pytest.mark.conforms("E37")
@pytest.mark.parametrize("end", ["entered again", "with", "closed"])
@pytest.mark.long
def test_an_event_loop_does_the_same(place: ConsumerStage, end: str) -> None:
    """But that how a loop over an asynchronous generator was left cannot be seen, and so it has failed."""

    async def loop(
        session: AsyncSession, begin: BeginLoop, error: type[BaseException] | None, seen: SeenNumbers
    ) -> None:
        async for batch in begin(session):
            seen.append(batch.first)
            await asyncio.sleep(0)
            if batch.first == 1:
                if error is not None:
                    raise error
                break

    async def story(session: AsyncSession, begin: BeginLoop, error: Any, seen: SeenNumbers) -> None:
        if end == "with":
            async with session:
                await loop(session, begin, error, seen)
            return
        try:
            with contextlib.suppress(Failed, asyncio.CancelledError):
                await loop(session, begin, error, seen)
            if end == "entered again":
                async for batch in session:
                    seen.append(batch.first)
                    break
        finally:
            await session.close()

    for begin, error in itertools.product(BEGIN, (None, Failed, asyncio.CancelledError)):
        seen: SeenNumbers = []
        group = f"{end} {begin.__name__} {error}"
        with contextlib.suppress(Failed, asyncio.CancelledError):
            asyncio.run(story(place.of_a_loop(group), begin, error, seen))
        done = 2 if error is None and begin is not over_a_generator else 1
        again = [done] if end == "entered again" else []
        assert (seen, place.progress(group)) == ([0, 1, *again], done + len(again)), group


@pytest.mark.conforms("E37")
def test_each_of_several_tasks_acknowledges_its_own(place: ConsumerStage) -> None:
    seen: SeenNumbers = []

    async def work(session: AsyncSession, both: asyncio.Barrier, error: type[BaseException] | None) -> None:
        async for batch in session:
            seen.append(batch.first)
            await both.wait()
            if error is not None:
                raise error
            break

    async def main() -> None:
        both = asyncio.Barrier(2)
        async with place.of_a_loop("tasks") as session:
            tasks = (work(session, both, error) for error in (Failed, None))
            errors = await asyncio.gather(*tasks, return_exceptions=True)
            assert [type(error) for error in errors] == [Failed, type(None)]
            batch = await session.poll(WAIT_S)
            assert batch is not None
            seen.append(batch.first)

    asyncio.run(main())
    assert (seen, place.progress("tasks")) == ([0, 1, 0], 2)


@pytest.mark.conforms("E37")
@pytest.mark.parametrize("ends", [False, True])
def test_a_task_acknowledges_no_others_batch(place: ConsumerStage, ends: bool) -> None:
    """Where they take turns at one generator; also if the first one ends before what it took is done."""

    async def take(batches: AsyncIterator[Batch]) -> int:
        return (await anext(batches)).first

    async def main() -> None:
        async with place.of_a_loop(f"turns {ends}") as session:
            batches = over_a_generator(session)
            first = await (asyncio.create_task(take(batches)) if ends else take(batches))
            assert (first, await asyncio.create_task(take(batches))) == (0, 1)
            raise Failed

    with pytest.raises(Failed):
        asyncio.run(main())
    assert place.progress(f"turns {ends}") == 0


@pytest.mark.conforms("E37")
def test_a_wait_that_is_broken_off_loses_no_batch(place: ConsumerStage) -> None:
    place.publish(600)
    seen: SeenNumbers = []
    with place.session("broken off") as session:
        seen.append(next_of(session).first)
        for line in itertools.count(1):
            batch, broken = run_interrupted(lambda: session.poll(WAIT_S), line, BORROWER, leave_out=["_recover"])
            if broken:
                batch = session.poll(WAIT_S)
            assert batch is not None, broken
            assert batch.first == len(seen), broken
            seen.append(batch.first)
            if not broken:
                break
        assert line > 60
    assert seen == list(range(len(seen)))
    assert place.progress("broken off") == len(seen)
