"""Work that ended well is acknowledged and not repeated, work that failed comes again: however a loop is left."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from sublet_borrower.consumer.async_session import AsyncSession
from sublet_borrower.consumer.session import Session
from sublet_borrower.settings import BorrowerSettings
from sublet_borrower.streams.batch import Batch
from sublet_storage.db.connect import connect
from sublet_storage.producer import Publisher
from sublet_storage.spaces.space_changes import reshard
from tests.broken_off import broken_off
from tests.integration.sharing_kit import ALL, WAIT_S
from tests.kit import eventually
from tests.kit_nodes import SPEED, Fleet

SETTINGS = BorrowerSettings().scaled(SPEED)
BORROWER = Path(sys.modules[Session.__module__].__file__ or "").parents[1]


class Place:
    """A node, and a stream of numbered messages, each a batch."""

    def __init__(self, url: str, directory: Path) -> None:
        self.url, self.fleet = url, Fleet(url, directory)
        with connect(url) as connection:
            reshard(connection, "default", 1)
            connection.execute("delete from stream where state <> 'open'")
        node = self.fleet.node("n1")
        eventually(lambda: "serves on" in node.output(), WAIT_S, node.output)

    def publish(self, count: int) -> None:
        with Publisher(self.url, block_messages=1) as publisher:
            for _ in range(count):
                publisher.publish("t", b"", key=b"k")

    def session(self, subscription: str = ALL) -> Session:
        return Session(subscription, self.url, starting_position="earliest", max_batch_bytes=1, settings=SETTINGS)

    def of_a_loop(self) -> AsyncSession:
        return AsyncSession(ALL, self.url, starting_position="earliest", max_batch_bytes=1, settings=SETTINGS)

    def progress(self) -> int:
        """Once nobody holds the stream."""
        with connect(self.url) as connection:

            def at_rest() -> list[tuple[int]]:
                assert not connection.execute("select from lending where status = 'held'").fetchall()
                return connection.execute("select max(position) from lending").fetchall()

            return int(eventually(at_rest, WAIT_S)[0][0])


@pytest.fixture
def place(database: str, tmp_path: Path) -> Iterator[Place]:
    found = Place(database, tmp_path)
    found.publish(6)
    yield found
    found.fleet.close()


class Failed(Exception):
    """Work has."""


Seen = list[int]
Leave = Callable[[Session, Seen], object]


def break_(session: Session, seen: Seen) -> None:
    for batch in session:
        seen.append(batch.first)
        with contextlib.nullcontext():
            if batch.first == 1:
                break


def return_(session: Session, seen: Seen) -> int:
    for batch in session:
        seen.append(batch.first)
        if batch.first == 1:
            return len(batch)
    raise AssertionError


def break_out_of_a_generator(session: Session, seen: Seen) -> None:
    def batches() -> Iterator[Batch]:
        for batch in session:  # noqa: UP028 `yield from` is another way
            yield batch

    for batch in batches():
        seen.append(batch.first)
        if batch.first == 1:
            break


def list_(session: Session, seen: Seen) -> None:
    def batches() -> Iterator[Batch]:
        for batch in session:
            yield batch
            if batch.first == 1:
                break

    seen.extend([batch.first for batch in list(batches())])


def one_by_one(session: Session, seen: Seen) -> None:
    @contextlib.contextmanager
    def one() -> Iterator[Batch]:
        for batch in session:
            yield batch
            break

    for _ in range(2):
        with one() as batch:
            seen.append(batch.first)


def slice_(session: Session, seen: Seen) -> None:
    for batch in itertools.islice(session, 2):
        seen.append(batch.first)


def zip_(session: Session, seen: Seen) -> None:
    """The third is thrown away by `zip`, and nobody was at work on it."""
    for batch, _ in zip(session, range(2), strict=False):
        seen.append(batch.first)


def close(session: Session, seen: Seen) -> None:
    with contextlib.closing(iter(session)) as batches:  # type: ignore[type-var]
        for batch in batches:
            seen.append(batch.first)
            if batch.first == 1:
                break


def by_hand(session: Session, seen: Seen) -> None:
    for _ in range(2):
        seen.append(next_of(session).first)


def next_of(session: Session) -> Batch:
    batch = session.poll(WAIT_S)
    assert batch is not None
    return batch


WELL: list[Leave] = [break_, return_, break_out_of_a_generator, list_, one_by_one, slice_, zip_, close]


def fail(batch: Batch, error: type[BaseException] = Failed) -> None:
    if batch.first == 1:
        raise error


def in_a_call(session: Session, seen: Seen) -> None:
    for batch in session:
        seen.append(batch.first)
        fail(batch)


def interrupted(session: Session, seen: Seen) -> None:
    for batch in session:
        seen.append(batch.first)
        fail(batch, KeyboardInterrupt)


def in_an_inner_loop(session: Session, seen: Seen) -> None:
    def rows(batch: Batch) -> Iterator[int]:
        yield 1
        fail(batch)

    for batch in session:
        seen.append(batch.first)
        for _ in rows(batch):
            pass


def within_with(session: Session, seen: Seen) -> None:
    for batch in session:
        with contextlib.closing(contextlib.ExitStack()):
            seen.append(batch.first)
            if batch.first == 1:
                raise Failed


def around_a_generator(session: Session, seen: Seen) -> None:
    def batches() -> Iterator[Batch]:
        yield from session

    for batch in batches():
        seen.append(batch.first)
        fail(batch)


def around_map(session: Session, seen: Seen) -> None:
    def work(batch: Batch) -> None:
        seen.append(batch.first)
        fail(batch)

    for _ in map(work, session):
        pass


def while_closing(session: Session, seen: Seen) -> None:
    with contextlib.closing(iter(session)) as batches:  # type: ignore[type-var]
        for batch in batches:
            seen.append(batch.first)
            fail(batch)


STORED: list[object] = []
"""Longer than the loops over it."""


def over_a_stored_iterator(session: Session, seen: Seen) -> None:
    batches = iter(session)
    STORED.append(batches)
    for batch in batches:
        seen.append(batch.first)
        fail(batch)


def over_a_stored_generator(session: Session, seen: Seen) -> None:
    batches = (batch for batch in session)
    STORED.append(batches)
    for batch in batches:
        seen.append(batch.first)
        fail(batch)


def over_what_a_traceback_keeps(session: Session, seen: Seen) -> None:
    def loop() -> None:
        batches = enumerate(session)
        for _, batch in batches:
            seen.append(batch.first)
            fail(batch)

    try:
        loop()
    except Failed as error:
        STORED.append(error)
        raise


def over_a_generator_that_ends_when_it_is_closed(session: Session, seen: Seen) -> None:
    def batches() -> Iterator[Batch]:
        for batch in session:
            try:
                yield batch
            except GeneratorExit:
                return

    for batch in batches():
        seen.append(batch.first)
        fail(batch)


def within_a_context_manager(session: Session, seen: Seen) -> None:
    @contextlib.contextmanager
    def one() -> Iterator[Batch]:
        for batch in session:
            try:
                yield batch
            finally:
                break  # noqa: B012 it swallows what came, and says nothing of how the work ended

    for _ in range(2):
        with one() as batch:
            seen.append(batch.first)
            fail(batch)


BADLY: list[Leave] = [
    in_a_call, interrupted, in_an_inner_loop, within_with, around_a_generator, around_map, while_closing,
    over_a_stored_iterator, over_a_stored_generator, over_what_a_traceback_keeps,
    over_a_generator_that_ends_when_it_is_closed, within_a_context_manager,
]  # fmt: skip


@pytest.mark.conforms("E37")
def test_what_ended_well_is_not_repeated_and_what_failed_comes_again_when_a_loop_is_entered_again(place: Place) -> None:
    for leave in (*WELL, *BADLY):
        seen: Seen = []
        with place.session(f"$share/{leave.__name__}/#") as session:
            with contextlib.suppress(Failed, KeyboardInterrupt):
                leave(session, seen)
            assert seen == [0, 1], leave
            again = [next_of(session).first for _ in range(2)] if leave in WELL else [next(iter(session)).first]
            assert again == ([2, 3] if leave in WELL else [1]), leave


@pytest.mark.conforms("E37")
@pytest.mark.parametrize(
    "leave", [break_, by_hand, in_a_call, interrupted, over_a_stored_iterator], ids=lambda leave: leave.__name__
)
@pytest.mark.parametrize("way", ["with", "caught within", "closed"])
def test_what_ended_well_is_acknowledged_by_the_end_of_a_session_and_what_failed_is_not(
    place: Place, leave: Leave, way: str
) -> None:
    seen: Seen = []
    with contextlib.suppress(Failed, KeyboardInterrupt):
        if way == "closed":
            session = place.session()
            try:
                leave(session, seen)
            finally:
                session.close()
        else:
            with place.session() as session:
                if way == "with":
                    leave(session, seen)
                else:
                    with contextlib.suppress(Failed, KeyboardInterrupt):
                        leave(session, seen)
    retained = leave is break_ or (leave is by_hand and way != "closed")
    assert (seen, place.progress()) == ([0, 1], 2 if retained else 1)


@pytest.mark.conforms("E37")
@pytest.mark.parametrize("error", [None, Failed, asyncio.CancelledError])
@pytest.mark.parametrize("way", ["entered again", "with", "closed"])
def test_so_it_is_in_an_event_loop(place: Place, error: type[BaseException] | None, way: str) -> None:
    seen: Seen = []

    async def loop(session: AsyncSession) -> None:
        async for batch in session:
            seen.append(batch.first)
            await asyncio.sleep(0)
            if batch.first == 1:
                if error is not None:
                    raise error
                break

    async def main() -> None:
        session = place.of_a_loop()
        if way == "with":
            async with session:
                await loop(session)
            return
        try:
            with contextlib.suppress(Failed, asyncio.CancelledError):
                await loop(session)
            if way == "entered again":
                async for batch in session:
                    seen.append(batch.first)
                    break
        finally:
            await session.close()

    with contextlib.suppress(Failed, asyncio.CancelledError):
        asyncio.run(main())
    again = [] if way != "entered again" else [1 if error else 2]
    assert (seen, place.progress()) == ([0, 1, *again], (2 if error else 3) if again else (1 if error else 2))


@pytest.mark.conforms("E37")
@pytest.mark.parametrize("error", [None, Failed])
@pytest.mark.parametrize("way", ["entered again", "with"])
def test_how_a_loop_over_an_asynchronous_generator_was_left_cannot_be_seen(
    place: Place, error: type[BaseException] | None, way: str
) -> None:
    seen: Seen = []

    async def batches(session: AsyncSession) -> AsyncIterator[Batch]:
        async for batch in session:
            yield batch

    async def main() -> None:
        async with place.of_a_loop() as session:
            with contextlib.suppress(Failed):
                async for batch in batches(session):
                    seen.append(batch.first)
                    if batch.first == 1:
                        if error is not None:
                            raise error
                        break
            if way == "entered again":
                async for batch in session:
                    seen.append(batch.first)
                    break

    asyncio.run(main())
    again = [1] if way == "entered again" else []
    assert (seen, place.progress()) == ([0, 1, *again], 1 + len(again))


@pytest.mark.conforms("E37")
def test_an_iterator_whose_loop_failed_begins_another_with_what_failed(place: Place) -> None:
    seen: Seen = []
    with place.session() as session:
        batches = iter(session)
        with contextlib.suppress(Failed):
            for batch in batches:
                seen.append(batch.first)
                fail(batch)
        for batch in batches:
            seen.append(batch.first)
            if batch.first == 2:
                break
    assert (seen, place.progress()) == ([0, 1, 1, 2], 2)


@pytest.mark.conforms("E37")
def test_what_a_loop_is_at_work_on_is_not_acknowledged_by_asking_for_more_in_its_body(place: Place) -> None:
    with place.session() as session, contextlib.suppress(Failed):
        for batch in session:
            assert (batch.first, next_of(session).first, next_of(session).first) == (0, 1, 2)
            raise Failed
    assert place.progress() == 0


@pytest.mark.conforms("E37")
def test_each_of_several_tasks_acknowledges_its_own(place: Place) -> None:
    seen: Seen = []

    async def work(session: AsyncSession, both: asyncio.Barrier, error: type[BaseException] | None) -> None:
        async for batch in session:
            seen.append(batch.first)
            await both.wait()
            if error is not None:
                raise error
            break

    async def main() -> None:
        both = asyncio.Barrier(2)
        async with place.of_a_loop() as session:
            errors = await asyncio.gather(
                work(session, both, Failed), work(session, both, None), return_exceptions=True
            )
            assert [type(error) for error in errors] == [Failed, type(None)]
            seen.extend([batch.first async for batch in limited(session)])

    async def limited(session: AsyncSession) -> AsyncIterator[Batch]:
        batch = await session.poll(WAIT_S)
        assert batch is not None
        yield batch

    asyncio.run(main())
    assert (seen, place.progress()) == ([0, 1, 0], 2)


@pytest.mark.conforms("E37")
def test_wherever_an_exception_breaks_off_the_wait_for_a_batch_the_next_call_gets_it(place: Place) -> None:
    place.publish(600)
    seen: Seen = []
    with place.session() as session:
        seen.append(next_of(session).first)
        for line in itertools.count(1):
            batch, broken = broken_off(lambda: session.poll(WAIT_S), line, BORROWER, leave_out=["_recover"])
            if broken:
                batch = session.poll(WAIT_S)
            assert batch is not None, broken
            assert batch.first == len(seen), broken
            seen.append(batch.first)
            if not broken:
                break
        assert line > 60
    assert seen == list(range(len(seen)))
    assert place.progress() == len(seen)
