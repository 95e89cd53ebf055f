"""Work that ended well is acknowledged and not repeated, work that failed comes again: however a loop is left."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import itertools
import sys
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
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
    """A node, and a stream of numbered messages, each a batch."""

    def publish(self, count: int) -> None:
        with Publisher(self.scene.url, block_messages=1) as publisher:
            for _ in range(count):
                publisher.publish("t", b"", key=b"k")

    def session(self, group: str = "g") -> Session:
        return Session(f"$share/{group}/#", self.scene.url, **ARGUMENTS)

    def of_a_loop(self, group: str = "g") -> AsyncSession:
        return AsyncSession(f"$share/{group}/#", self.scene.url, **ARGUMENTS)

    def progress(self, group: str = "g") -> int:
        """Return the position of a group, once no session holds its stream."""
        statement = "select status, position from lending join consumer_group using (group_id) where name = %s"

        def at_rest() -> list[tuple[str, int]]:
            rows = self.scene.ask(statement, (group,))
            return [] if any(status == "held" for status, _ in rows) else rows

        return max(position for _, position in eventually(at_rest, WAIT_S))


@pytest.fixture
def place(database: str, tmp_path: Path) -> Iterator[ConsumerStage]:
    with connect(database) as connection:
        reshard(connection, "default", 1)
        connection.execute("delete from stream where state <> 'open'")
    found = ConsumerStage(database, tmp_path)
    try:
        found.serve("n1")
        found.publish(6)
        yield found
    finally:
        found.close()


class Failed(Exception):
    """Work has."""


SeenNumbers = list[int]
LeaveLoop = Callable[[Session, SeenNumbers], object]


def break_(session: Session, seen: SeenNumbers) -> None:
    for batch in session:
        seen.append(batch.first)
        with contextlib.nullcontext():
            if batch.first == 1:
                break


def return_(session: Session, seen: SeenNumbers) -> int:
    for batch in session:
        seen.append(batch.first)
        if batch.first == 1:
            return len(batch)
    raise AssertionError


def break_out_of_a_generator(session: Session, seen: SeenNumbers) -> None:
    def batches() -> Iterator[Batch]:
        for batch in session:  # noqa: UP028 `yield from` is another way
            yield batch

    for batch in batches():
        seen.append(batch.first)
        if batch.first == 1:
            break


def break_out_of_a_finally(session: Session, seen: SeenNumbers) -> None:
    def batches() -> Iterator[Batch]:
        for batch in session:
            try:
                yield batch
            finally:
                with contextlib.suppress(KeyError):
                    dict[str, int]().pop("no key")

    for _, batch in enumerate(batches()):
        seen.append(batch.first)
        if batch.first == 1:
            break


def break_where_the_close_is_raised_again(session: Session, seen: SeenNumbers) -> None:
    def batches() -> Iterator[Batch]:
        for batch in session:
            try:
                yield batch
            except GeneratorExit:
                seen.append(-1)
                raise

    for batch in batches():
        seen.append(batch.first)
        if batch.first == 1:
            break
    assert seen.pop() == -1


def break_out_of_yield_from(session: Session, seen: SeenNumbers) -> None:
    def batches() -> Iterator[Batch]:
        yield from session

    for batch in batches():
        seen.append(batch.first)
        if batch.first == 1:
            break


def return_out_of_two_generators(session: Session, seen: SeenNumbers) -> int:
    def batches() -> Iterator[Batch]:
        yield from session

    for batch in (each for each in batches()):
        seen.append(batch.first)
        if batch.first == 1:
            return len(batch)
    raise AssertionError


def list_(session: Session, seen: SeenNumbers) -> None:
    def batches() -> Iterator[Batch]:
        for batch in session:
            yield batch
            if batch.first == 1:
                break

    seen.extend([batch.first for batch in list(batches())])


def one_by_one(session: Session, seen: SeenNumbers) -> None:
    @contextlib.contextmanager
    def one() -> Iterator[Batch]:
        for batch in session:
            yield batch
            break

    for _ in range(2):
        with one() as batch:
            seen.append(batch.first)


def slice_(session: Session, seen: SeenNumbers) -> None:
    for batch in itertools.islice(session, 2):
        seen.append(batch.first)


def zip_(session: Session, seen: SeenNumbers) -> None:
    """The third is thrown away by `zip`, and nobody was at work on it."""
    for batch, _ in zip(session, range(2), strict=False):
        seen.append(batch.first)


def close(session: Session, seen: SeenNumbers) -> None:
    with contextlib.closing(iter(session)) as batches:  # type: ignore[type-var]
        for batch in batches:
            seen.append(batch.first)
            if batch.first == 1:
                break


def by_hand(session: Session, seen: SeenNumbers) -> None:
    for _ in range(2):
        seen.append(next_of(session).first)


def next_of(session: Session) -> Batch:
    batch = session.poll(WAIT_S)
    assert batch is not None
    return batch


class Peekable(Iterator[Batch]):
    """A class of the user's own around the iterator."""

    def __init__(self, batches: Iterable[Batch]) -> None:
        self._batches = iter(batches)
        self._ahead: list[Batch] = []

    def __next__(self) -> Batch:
        return self._ahead.pop() if self._ahead else next(self._batches)

    def peek(self) -> Batch:
        if not self._ahead:
            self._ahead.append(next(self._batches))
        return self._ahead[0]


def break_out_of_a_wrapper(session: Session, seen: SeenNumbers) -> None:
    for batch in Peekable(session):
        seen.append(batch.first)
        if batch.first == 1:
            break


def next_by_hand(session: Session, seen: SeenNumbers) -> None:
    batches = iter(session)
    seen.append(next(batches).first)
    seen.append(batches.__next__().first)


WELL: list[LeaveLoop] = [
    break_, return_, break_out_of_a_generator, break_out_of_yield_from, return_out_of_two_generators,
    break_out_of_a_wrapper, list_, one_by_one, slice_, zip_, next_by_hand, break_out_of_a_finally,
    break_where_the_close_is_raised_again,
]  # fmt: skip


def fail(batch: Batch, error: type[BaseException] = Failed) -> None:
    if batch.first == 1:
        raise error


def in_a_call(session: Session, seen: SeenNumbers) -> None:
    for batch in session:
        seen.append(batch.first)
        fail(batch)


def interrupted(session: Session, seen: SeenNumbers) -> None:
    for batch in session:
        seen.append(batch.first)
        fail(batch, KeyboardInterrupt)


def in_an_inner_loop(session: Session, seen: SeenNumbers) -> None:
    def rows(batch: Batch) -> Iterator[int]:
        yield 1
        fail(batch)

    for batch in session:
        seen.append(batch.first)
        for _ in rows(batch):
            pass


def within_with(session: Session, seen: SeenNumbers) -> None:
    for batch in session:
        with contextlib.closing(contextlib.ExitStack()):
            seen.append(batch.first)
            if batch.first == 1:
                raise Failed


def around_a_generator(session: Session, seen: SeenNumbers) -> None:
    def batches() -> Iterator[Batch]:
        yield from session

    for batch in batches():
        seen.append(batch.first)
        fail(batch)


def around_a_finally(session: Session, seen: SeenNumbers) -> None:
    def batches() -> Iterator[Batch]:
        for batch in session:
            try:
                yield batch
            finally:
                STORED.clear()

    for batch in batches():
        seen.append(batch.first)
        fail(batch)


def before_the_yield_of_a_finally(session: Session, seen: SeenNumbers) -> None:
    def batches() -> Iterator[Batch]:
        for batch in session:
            try:
                seen.append(batch.first)
                fail(batch)
                yield batch
            finally:
                STORED.clear()

    for _ in batches():
        pass


def around_map(session: Session, seen: SeenNumbers) -> None:
    def work(batch: Batch) -> None:
        seen.append(batch.first)
        fail(batch)

    for _ in map(work, session):
        pass


def around_map_over_a_function_with_state(session: Session, seen: SeenNumbers) -> None:
    current: Batch | None = None

    def work(batch: Batch) -> None:
        nonlocal current
        current = batch
        seen.append(batch.first)
        fail(batch)

    for _ in map(work, session):
        assert current is not None


def twice_around_a_wrapper(session: Session, seen: SeenNumbers, wrapper: Callable[..., Iterable[Any]]) -> None:
    """The second loop's variable still holds the batch of the first when the wrapper raises."""

    def work(batch: Batch) -> Batch:
        seen.append(batch.first)
        if seen == [0, 1, 1]:
            raise Failed
        return batch

    for _ in range(2):
        with contextlib.suppress(Failed):
            for batch in wrapper(work, session):
                if seen == [0, 1]:
                    fail(batch if isinstance(batch, Batch) else batch[1])


WRAPPERS: dict[str, Callable[..., Iterable[Any]]] = {
    "map": map,
    "filter": filter,
    "takewhile": itertools.takewhile,
    "enumerate": lambda work, batches: enumerate(map(work, batches)),
    "chain": lambda work, batches: itertools.chain.from_iterable([map(work, batches)]),
    "generator": lambda work, batches: (work(batch) for batch in batches),
}


def while_closing(session: Session, seen: SeenNumbers) -> None:
    with contextlib.closing(iter(session)) as batches:  # type: ignore[type-var]
        for batch in batches:
            seen.append(batch.first)
            fail(batch)


STORED: list[object] = []
"""Longer than the loops over it."""


def over_a_stored_iterator(session: Session, seen: SeenNumbers) -> None:
    batches = iter(session)
    STORED.append(batches)
    for batch in batches:
        seen.append(batch.first)
        fail(batch)


def over_what_is_thrown_away_later(session: Session, seen: SeenNumbers) -> None:
    """By an instruction like that of a `break`, in the function of the loop."""
    batches = [iter(session)]
    with contextlib.suppress(Failed):
        for batch in batches[0]:
            seen.append(batch.first)
            fail(batch)
    batches.pop()


def over_a_generator_that_is_closed_later(session: Session, seen: SeenNumbers) -> None:
    def generator() -> Iterator[Batch]:
        yield from session

    batches = [generator()]
    with contextlib.suppress(Failed):
        for batch in batches[0]:
            seen.append(batch.first)
            fail(batch)
    batches.pop()


def break_when_it_has_failed(session: Session, seen: SeenNumbers) -> None:
    for batch in session:
        seen.append(batch.first)
        try:
            fail(batch)
        except Failed:
            break


def over_a_stored_generator(session: Session, seen: SeenNumbers) -> None:
    batches = (batch for batch in session)
    STORED.append(batches)
    for batch in batches:
        seen.append(batch.first)
        fail(batch)


def over_a_generator_that_goes_on(session: Session, seen: SeenNumbers) -> None:
    """At another place of the code."""
    batches = (batch for batch in session)
    with contextlib.suppress(Failed):
        for batch in batches:
            seen.append(batch.first)
            fail(batch)
    for batch in batches:
        assert batch.first == 1
        raise Failed


def over_what_a_traceback_keeps(session: Session, seen: SeenNumbers) -> None:
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


def over_a_generator_that_ends_when_it_is_closed(session: Session, seen: SeenNumbers) -> None:
    def batches() -> Iterator[Batch]:
        for batch in session:
            try:
                yield batch
            except GeneratorExit:
                return

    for batch in batches():
        seen.append(batch.first)
        fail(batch)


def within_a_context_manager(session: Session, seen: SeenNumbers) -> None:
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


def within_a_context_manager_with_a_finally(session: Session, seen: SeenNumbers) -> None:
    @contextlib.contextmanager
    def one() -> Iterator[Batch]:
        for batch in session:
            try:
                yield batch
            finally:
                STORED.clear()
            return

    for _ in range(2):
        with one() as batch:
            seen.append(batch.first)
            fail(batch)


def close_later(session: Session, seen: SeenNumbers) -> None:
    batches = iter(session)
    with contextlib.suppress(Failed):
        in_a_call(batches, seen)  # type: ignore[arg-type]
    batches.close()  # type: ignore[attr-defined]


def over_a_wrapper(session: Session, seen: SeenNumbers) -> None:
    for batch in Peekable(session):
        seen.append(batch.first)
        fail(batch)


def over_a_wrapper_that_looks_ahead(session: Session, seen: SeenNumbers) -> None:
    batches = Peekable(session)
    for batch in batches:
        seen.append(batch.first)
        batches.peek()
        fail(batch)


Taker = Callable[[Callable[[Batch], int], Iterable[Batch]], object]
TAKERS: dict[str, Taker] = {
    "list": lambda work, batches: list(map(work, batches)),
    "star": lambda work, batches: [*map(work, batches)],
    "arguments": lambda work, batches: min(*map(work, batches)),
    "deque": lambda work, batches: collections.deque(map(work, batches), maxlen=0),
    "sum": lambda work, batches: sum(map(work, batches)),
    "max": lambda work, batches: max(batches, key=work),
    "dict": lambda work, batches: dict((work(batch), 0) for batch in batches),  # noqa: C402 it is what is tried
    "reduce": lambda work, batches: functools.reduce(lambda total, batch: total + work(batch), batches, 0),
    "next": lambda work, batches: [next(mapped) for mapped in [map(work, batches)] for _ in range(3)],
    "a wrapper": lambda work, batches: list(map(work, Peekable(batches))),
}


def by(taker: Taker) -> LeaveLoop:
    def leave(session: Session, seen: SeenNumbers) -> None:
        def work(batch: Batch) -> int:
            seen.append(batch.first)
            fail(batch)
            return batch.first

        taker(work, session)

    return leave


BADLY: list[LeaveLoop] = [
    close, close_later, over_a_wrapper, over_a_wrapper_that_looks_ahead, *map(by, TAKERS.values()),
    in_a_call, interrupted, in_an_inner_loop, within_with, around_a_generator, around_map, while_closing,
    around_a_finally, before_the_yield_of_a_finally, within_a_context_manager_with_a_finally,
    over_a_stored_iterator, over_what_is_thrown_away_later, over_a_generator_that_is_closed_later,
    break_when_it_has_failed, over_a_stored_generator, over_a_generator_that_goes_on,
    around_map_over_a_function_with_state, over_what_a_traceback_keeps,
    over_a_generator_that_ends_when_it_is_closed, within_a_context_manager,
]  # fmt: skip


@pytest.mark.conforms("E37")
@pytest.mark.long
def test_what_failed_comes_again_and_no_more(place: ConsumerStage) -> None:
    """Where a session goes on after its loop; what ended well is not repeated."""
    for number, leave in enumerate((*WELL, *BADLY)):
        seen: SeenNumbers = []
        with place.session(f"{number} {leave.__name__}") as session:
            with contextlib.suppress(Failed, KeyboardInterrupt):
                leave(session, seen)
            assert seen == [0, 1], leave
            again = [next_of(session).first for _ in range(2)] if leave in WELL else [next(iter(session)).first]
            assert again == ([2, 3] if leave in WELL else [1]), leave


@pytest.mark.conforms("E37")
def test_what_failed_twice_comes_a_third_time(place: ConsumerStage) -> None:
    for name, wrapper in WRAPPERS.items():
        seen: SeenNumbers = []
        with place.session(name) as session:
            twice_around_a_wrapper(session, seen, wrapper)
            assert seen == [0, 1, 1], name
            assert next_of(session).first == 1, name


def groups(given: Iterable[Batch], work: Callable[[Batch], None]) -> None:
    """None of which its loop asks for again: what comes next has been read by then."""
    for _, batches in itertools.groupby(given, lambda batch: batch.first // 2):
        for batch in batches:
            work(batch)


def headers(given: Iterable[Batch], work: Callable[[Batch], None]) -> None:
    """Each is in use as long as what belongs to it is read."""
    batches = iter(given)
    for header in batches:
        work(header)
        for batch in batches:
            work(batch)


@pytest.mark.conforms("E37")
@pytest.mark.parametrize("generator", [False, True])
@pytest.mark.parametrize(("loops", "again"), [(groups, [4, 5]), (headers, [0, 4, 5])])
def test_a_loop_in_a_loop_acknowledges(
    place: ConsumerStage,
    loops: Callable[[Iterable[Batch], Callable[[Batch], None]], None],
    again: list[int],
    generator: bool,
) -> None:
    """All but the last two, and what the outer loop has in a variable."""

    def work(batch: Batch) -> None:
        if batch.first == 5:
            raise Failed

    with place.session("nested") as session:
        with pytest.raises(Failed):
            loops((batch for batch in session) if generator else session, work)
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
    for end, leave in itertools.product(
        (with_it, caught_within, closed),
        (
            break_,
            break_out_of_yield_from,
            by_hand,
            in_a_call,
            interrupted,
            over_a_stored_iterator,
            over_what_is_thrown_away_later,
        ),
    ):
        seen: SeenNumbers = []
        group = f"{leave.__name__} {end.__name__}"
        with contextlib.suppress(Failed, KeyboardInterrupt):
            end(place.session(group), leave, seen)
        ended_well = leave in WELL or (leave is by_hand and end is not closed)
        assert (seen, place.progress(group)) == ([0, 1], 2 if ended_well else 1), group


def test_a_second_thread_is_refused(place: ConsumerStage) -> None:
    """In the middle of another's call, which goes on; later it may call."""
    with place.session() as session, ThreadPoolExecutor(1, "other") as pool:
        batch = [session.poll(WAIT_S) for _ in range(6)][-1]
        assert batch is not None
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
        again = session.poll(WAIT_S)
        assert (again and again.first) == 6
    assert place.progress() == 7


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
        group = f"{begin.__name__} {error}"
        with contextlib.suppress(Failed, asyncio.CancelledError):
            asyncio.run(story(place.of_a_loop(group), begin, error, seen))
        done = 2 if error is None and begin is not over_a_generator else 1
        again = [done] if end == "entered again" else []
        assert (seen, place.progress(group)) == ([0, 1, *again], done + len(again)), group


def nested(session: Session, seen: SeenNumbers) -> None:
    for batch in session:
        seen.append(batch.first)
        in_a_call(session, seen)


def by_recursion(batches: Iterable[Batch], seen: SeenNumbers) -> None:
    for batch in batches:
        seen.append(batch.first)
        fail(batch)
        by_recursion(batches, seen)


def recursive(session: Session, seen: SeenNumbers) -> None:
    by_recursion(iter(session), seen)


@pytest.mark.conforms("E37")
@pytest.mark.parametrize("leave", [nested, recursive])
def test_loops_within_loops_fail_together(place: ConsumerStage, leave: LeaveLoop) -> None:
    """Their batches come again in the order of their stream."""
    seen: SeenNumbers = []
    with place.session() as session:
        with contextlib.suppress(Failed):
            leave(session, seen)
        assert seen == [0, 1]
        assert [next_of(session).first for _ in range(3)] == [0, 1, 2]


@pytest.mark.conforms("E37")
def test_an_iterator_goes_on_with_what_failed(place: ConsumerStage) -> None:
    seen: SeenNumbers = []
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
def test_asking_for_more_within_a_loop_is_no_ack(place: ConsumerStage) -> None:
    with place.session() as session, contextlib.suppress(Failed):
        for batch in session:
            assert (batch.first, next_of(session).first, next_of(session).first) == (0, 1, 2)
            raise Failed
    assert place.progress() == 0


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
@pytest.mark.parametrize("ends", [False, True])
def test_a_task_acknowledges_no_others_batch(place: ConsumerStage, ends: bool) -> None:
    """Where they take turns at one generator; also if the first one ends before what it took is done."""

    async def take(batches: AsyncIterator[Batch]) -> int:
        return (await anext(batches)).first

    async def main() -> None:
        async with place.of_a_loop() as session:
            batches = over_a_generator(session)
            first = await (asyncio.create_task(take(batches)) if ends else take(batches))
            assert (first, await asyncio.create_task(take(batches))) == (0, 1)
            raise Failed

    with pytest.raises(Failed):
        asyncio.run(main())
    assert place.progress() == 0


@pytest.mark.conforms("E37")
def test_a_wait_that_is_broken_off_loses_no_batch(place: ConsumerStage) -> None:
    place.publish(600)
    seen: SeenNumbers = []
    with place.session() as session:
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
    assert place.progress() == len(seen)
