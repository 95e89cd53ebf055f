"""How a loop over a session was left: by its iterator, without a session."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import itertools
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from functools import partial
from typing import Any

import pytest

from sublet_borrower.consumer.iterators import AsyncSessionIterator, SessionIterations, SessionIterator

pytestmark = pytest.mark.conforms("E37")

Seen = list[int]
STORED: list[object] = []
"""Longer than the loops over it."""


class Failed(Exception):
    """Work has, or what comes after it."""


class Numbered:
    """In place of a batch."""

    def __init__(self, first: int) -> None:
        self.first = first


class Source:
    """In place of a session: numbered batches, of which those that failed come again."""

    def __init__(self) -> None:
        self.loops, self.done = SessionIterations(), set[int]()
        self._new = map(Numbered, itertools.count())
        self._failed: list[Any] = []
        self._last: Any = None

    def __iter__(self) -> SessionIterator:
        self.loops.on_poll_elsewhere(frame := sys._getframe(1))
        return SessionIterator(self, frame)

    def __aiter__(self) -> AsyncSessionIterator:
        async def poll() -> Any:
            return self.poll()

        self.loops.on_poll_elsewhere(frame := sys._getframe(1))
        return AsyncSessionIterator(poll, self.loops, lambda batch, well: self.left(batch, well=well), frame)

    def poll(self) -> Any:
        self.loops.on_poll_elsewhere(sys._getframe(1))
        if self._last is not None and not self.loops.has(self._last):
            self.left(self._last, well=True)
        self._failed.sort(key=lambda batch: batch.first)
        self._last = self._failed.pop(0) if self._failed else next(self._new)
        return self._last

    def left(self, batch: Any, *, well: bool) -> None:
        self.loops.release(batch)
        if well:
            self.done.add(batch.first)
        else:
            self._failed.append(Numbered(batch.first))
            self._last = None if self._last is batch else self._last


Over = Callable[[Source], Iterable[Any]]
Leave = Callable[[Source, Seen], object]
"""Leaves a loop in which it has seen the batches 0 and 1."""


def fail(batch: Any, error: type[BaseException] = Failed) -> None:
    if batch.first == 1:
        raise error


def work(batch: Any, seen: Seen) -> None:
    """Fails with batch 1."""
    seen.append(batch.first)
    fail(batch)


# --- what a loop goes over ------------------------------------------------------------------------------------------


def itself(source: Source) -> Iterable[Any]:
    return source


def generator(source: Source) -> Iterator[Any]:
    for batch in source:  # noqa: UP028 `yield from` is another way
        yield batch


def yield_from(source: Source) -> Iterator[Any]:
    yield from source


def two_generators(source: Source) -> Iterator[Any]:
    return (batch for batch in yield_from(source))


def filtered(source: Source) -> Iterator[Any]:
    return filter(None, source)


def with_finally(source: Source) -> Iterator[Any]:
    for batch in source:
        try:
            yield batch
        finally:
            with contextlib.suppress(KeyError):
                dict[str, int]().pop("no key")


def closed_and_raised(source: Source) -> Iterator[Any]:
    for batch in source:
        try:
            yield batch
        except GeneratorExit:
            STORED.clear()
            raise


def closed_and_returned(source: Source) -> Iterator[Any]:
    for batch in source:
        try:
            yield batch
        except GeneratorExit:
            return


def closed_and_failed(source: Source) -> Iterator[Any]:
    for batch in source:
        try:
            yield batch
        except GeneratorExit:
            raise Failed from None


def closed_and_left(source: Source) -> Iterator[Any]:
    for batch in source:
        is_closed = True
        with contextlib.suppress(GeneratorExit):
            yield batch
            is_closed = False
        if is_closed:
            break


def two_of(source: Source) -> Iterator[Any]:
    for batch in itertools.islice(source, 2):  # noqa: UP028 `yield from` is another way
        yield batch


def with_a_finally_that_fails(source: Source) -> Iterator[Any]:
    for batch in source:
        try:
            yield batch
        finally:
            partial(fail, batch)()


class Peekable(Iterator[Any]):
    """A class of the user's own around the iterator."""

    def __init__(self, batches: Iterable[Any]) -> None:
        self._batches = iter(batches)
        self._ahead: list[Any] = []

    def __next__(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self._batches)

    def peek(self) -> None:
        if not self._ahead:
            self._ahead.append(next(self._batches))


OVER: list[Over] = [itself, generator, yield_from, two_generators, with_finally, closed_and_raised, Peekable]


def each(loop: Callable[..., object], over: Iterable[Callable[[Source], object]]) -> list[Any]:
    """Return it as a case over each of these."""
    return [pytest.param(partial(loop, over=one), id=f"{loop.__name__}-{one.__name__}") for one in over]


# --- loops that end well --------------------------------------------------------------------------------------------


def break_(source: Source, seen: Seen, over: Over) -> None:
    for batch in over(source):
        seen.append(batch.first)
        if batch.first == 1:
            break


def break_behind_a_loop(source: Source, seen: Seen) -> None:
    """And behind instructions that move what is on the stack."""
    for batch in source:
        for _ in range(2):
            STORED.clear()
        seen[len(seen) :] += [batch.first]
        if batch.first == 1:
            break


def break_in_with(source: Source, seen: Seen) -> None:
    for batch in source:
        seen.append(batch.first)
        with contextlib.nullcontext():
            if batch.first == 1:
                break


def return_(source: Source, seen: Seen, over: Over) -> int:
    for batch in over(source):
        seen.append(batch.first)
        if batch.first == 1:
            return len(seen)
    raise AssertionError


def list_(source: Source, seen: Seen) -> None:
    def batches() -> Iterator[Any]:
        for batch in source:
            yield batch
            if batch.first == 1:
                break

    seen.extend([batch.first for batch in list(batches())])


def to_the_end(source: Source, seen: Seen, over: Over) -> None:
    seen.extend(batch.first for batch in over(source))


def first_two(source: Source) -> Iterator[Any]:
    for batch in source:
        yield batch
        if batch.first == 1:
            break


def one_by_one(source: Source, seen: Seen) -> None:
    @contextlib.contextmanager
    def one() -> Iterator[Any]:
        for batch in source:
            yield batch
            break

    for _ in range(2):
        with one() as batch:
            seen.append(batch.first)


def slice_(source: Source, seen: Seen) -> None:
    for batch in itertools.islice(source, 2):
        seen.append(batch.first)


def zip_(source: Source, seen: Seen) -> None:
    """The third is thrown away by `zip`, and nobody was at work on it."""
    for batch, _ in zip(source, range(2), strict=False):
        seen.append(batch.first)


def zip_two(source: Source, seen: Seen) -> None:
    """Two loops at one place."""
    for one, other in zip(source, source, strict=False):
        seen += [one.first, other.first]
        break


def next_by_hand(source: Source, seen: Seen) -> None:
    batches = iter(source)
    seen.append(next(batches).first)
    seen.append(batches.__next__().first)


class AsyncWrapper(AsyncIterator[Any]):
    """A class of the user's own around the iterator."""

    def __init__(self, batches: Source) -> None:
        self._batches = aiter(batches)

    async def __anext__(self) -> Any:
        return await anext(self._batches)


def run(leave: Callable[..., Coroutine[Any, Any, None]]) -> Leave:
    """Return a case that runs in an event loop."""

    @functools.wraps(leave)
    def run_it(source: Source, seen: Seen, **over: Any) -> None:
        asyncio.run(leave(source, seen, **over))

    return run_it


@run
async def async_break(source: Source, seen: Seen, over: Callable[[Source], AsyncIterator[Any]]) -> None:
    async for batch in over(source):
        seen.append(batch.first)
        if batch.first == 1:
            break


@run
async def async_next_by_hand(source: Source, seen: Seen) -> None:
    async def take() -> None:
        seen.append((await anext(batches)).first)

    batches = aiter(source)
    await take()
    await take()


WELL = [
    *each(break_, OVER),
    *each(return_, OVER),
    *each(to_the_end, [two_of, first_two, lambda source: (batch for batch in first_two(source))]),
    *each(async_break, [aiter, AsyncWrapper]),
    break_behind_a_loop, break_in_with, list_, one_by_one, slice_, zip_, zip_two, next_by_hand, async_next_by_hand,
]  # fmt: skip


@pytest.mark.parametrize("leave", WELL)
def test_what_ended_well_is_acknowledged(leave: Leave) -> None:
    source, seen = Source(), Seen()
    leave(source, seen)
    assert seen == [0, 1]
    assert [source.poll().first for _ in range(2)] == [2, 3]
    assert source.done == {0, 1, 2}


# --- loops that fail ------------------------------------------------------------------------------------------------


def work_(source: Source, seen: Seen, over: Over) -> None:
    for batch in over(source):
        work(batch, seen)


def interrupted(source: Source, seen: Seen) -> None:
    for batch in source:
        seen.append(batch.first)
        fail(batch, KeyboardInterrupt)


def in_an_inner_loop(source: Source, seen: Seen) -> None:
    def rows(batch: Any) -> Iterator[int]:
        yield 1
        fail(batch)

    for batch in source:
        seen.append(batch.first)
        for _ in rows(batch):
            pass


def in_with(source: Source, seen: Seen) -> None:
    for batch in source:
        with contextlib.closing(contextlib.ExitStack()):
            seen.append(batch.first)
            if batch.first == 1:
                raise Failed


def before_the_yield(source: Source, seen: Seen) -> None:
    def batches() -> Iterator[Any]:
        for batch in source:
            try:
                work(batch, seen)
                yield batch
            finally:
                STORED.clear()

    for _ in batches():
        pass


def map_(source: Source, seen: Seen) -> None:
    for _ in map(partial(work, seen=seen), source):
        pass


def map_with_state(source: Source, seen: Seen) -> None:
    current: Any = None

    def stateful(batch: Any) -> None:
        nonlocal current
        current = batch
        work(batch, seen)

    for _ in map(stateful, source):
        assert current is not None


def closing(source: Source, seen: Seen) -> None:
    with contextlib.closing(iter(source)) as batches:
        for batch in batches:
            work(batch, seen)


def break_in_closing(source: Source, seen: Seen) -> None:
    """How the loop was left cannot be seen."""
    with contextlib.closing(iter(source)) as batches:
        for batch in batches:
            seen.append(batch.first)
            if batch.first == 1:
                break


def closed_later(source: Source, seen: Seen, over: Over) -> None:
    batches: Any = over(source)
    with contextlib.suppress(Failed):
        work_(source, seen, lambda _: batches)
    batches.close()
    assert next(batches, None) is None


def break_in_except(source: Source, seen: Seen) -> None:
    for batch in source:
        try:
            work(batch, seen)
        except Failed:
            break


def stored(source: Source, seen: Seen, over: Over) -> None:
    batches = over(source)
    STORED.append(batches)
    for batch in batches:
        work(batch, seen)


def thrown_away_later(source: Source, seen: Seen, over: Over) -> None:
    """By an instruction like that of a `break`, in the function of the loop."""
    batches = [over(source)]
    with contextlib.suppress(Failed):
        for batch in batches[0]:
            work(batch, seen)
    batches.pop()


def thrown_away_by_another_loop(source: Source, seen: Seen) -> None:
    def all_batches() -> Iterator[Iterator[Any]]:
        batches = map(partial(work, seen=seen), source)
        yield batches

    for batches in all_batches():
        try:
            list(batches)
        except Failed:
            STORED.clear()
        del batches
        break


def resumed_elsewhere(source: Source, seen: Seen) -> None:
    batches = filtered(source)
    for _ in range(2):
        seen.append(next(batches).first)
    next(batches)


def going_on_elsewhere(source: Source, seen: Seen, over: Over) -> None:
    batches = over(source)
    with contextlib.suppress(Failed):
        for batch in batches:
            work(batch, seen)
    for batch in batches:
        assert batch.first == 1
        raise Failed


def going_on_in_except(source: Source, seen: Seen) -> None:
    batches = first_two(source)
    work(next(batches), seen)
    try:
        work(next(batches), seen)
    except Failed:
        next(batches, None)


def in_a_traceback(source: Source, seen: Seen) -> None:
    def loop() -> None:
        batches = enumerate(source)
        for _, batch in batches:
            work(batch, seen)

    try:
        loop()
    except Failed as error:
        STORED.append(error)
        raise


def in_a_manager_that_swallows(source: Source, seen: Seen) -> None:
    @contextlib.contextmanager
    def one() -> Iterator[Any]:
        for batch in source:
            try:
                yield batch
            finally:
                break  # noqa: B012 it swallows what came, and says nothing of how the work ended

    for _ in range(2):
        with one() as batch:
            work(batch, seen)


def in_a_manager_that_catches(source: Source, seen: Seen) -> None:
    @contextlib.contextmanager
    def one() -> Iterator[Any]:
        for batch in source:
            with contextlib.suppress(Failed):
                yield batch
            break

    for _ in range(2):
        with one() as batch:
            work(batch, seen)


def in_a_manager_with_finally(source: Source, seen: Seen) -> None:
    @contextlib.contextmanager
    def one() -> Iterator[Any]:
        for batch in source:
            try:
                yield batch
            finally:
                STORED.clear()
            return

    for _ in range(2):
        with one() as batch:
            work(batch, seen)


@run
async def async_work(source: Source, seen: Seen, over: Callable[[Source], AsyncIterator[Any]]) -> None:
    async for batch in over(source):
        work(batch, seen)


@run
async def async_closed(source: Source, seen: Seen) -> None:
    batches = aiter(source)
    async for batch in batches:
        seen.append(batch.first)
        if batch.first == 1:
            await batches.aclose()
    assert await anext(batches, None) is None


def looking_ahead(source: Source, seen: Seen) -> None:
    batches = Peekable(source)
    for batch in batches:
        seen.append(batch.first)
        batches.peek()
        fail(batch)


def taken(source: Source, seen: Seen, taker: Callable[[Callable[[Any], int], Iterable[Any]], object]) -> None:
    def number(batch: Any) -> int:
        work(batch, seen)
        return int(batch.first)

    taker(number, source)


TAKERS: dict[str, Callable[[Callable[[Any], int], Iterable[Any]], object]] = {
    "list": lambda number, batches: list(map(number, batches)),
    "star": lambda number, batches: [*map(number, batches)],
    "arguments": lambda number, batches: min(*map(number, batches)),
    "deque": lambda number, batches: collections.deque(map(number, batches), maxlen=0),
    "sum": lambda number, batches: sum(map(number, batches)),
    "max": lambda number, batches: max(batches, key=number),
    "dict": lambda number, batches: dict((number(batch), 0) for batch in batches),  # noqa: C402 it is what is tried
    "reduce": lambda number, batches: functools.reduce(lambda total, batch: total + number(batch), batches, 0),
    "next": lambda number, batches: [next(mapped) for mapped in [map(number, batches)] for _ in range(3)],
    "wrapper": lambda number, batches: list(map(number, Peekable(batches))),
}
BADLY = [
    *each(work_, [*OVER, closed_and_returned, closed_and_left]),
    *each(break_, [closed_and_failed, with_a_finally_that_fails]),
    *each(stored, [iter, generator]),
    *each(closed_later, [iter, closed_and_left]),
    *each(going_on_elsewhere, [generator, filtered]),
    *each(async_work, [aiter, AsyncWrapper]),
    *each(thrown_away_later, [iter, yield_from]),
    *(pytest.param(partial(taken, taker=taker), id=f"taken-{name}") for name, taker in TAKERS.items()),
    interrupted, in_an_inner_loop, in_with, before_the_yield, map_, map_with_state, closing, break_in_closing,
    thrown_away_by_another_loop, resumed_elsewhere, break_in_except, going_on_in_except, in_a_traceback,
    in_a_manager_that_swallows, in_a_manager_that_catches, in_a_manager_with_finally, async_closed, looking_ahead,
]  # fmt: skip


@pytest.mark.parametrize("leave", BADLY)
def test_what_failed_comes_again(leave: Leave, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: None)
    source, seen = Source(), Seen()
    with contextlib.suppress(Failed, KeyboardInterrupt):
        leave(source, seen)
    assert seen == [0, 1]
    assert next(iter(source)).first == 1
    assert source.done == {0}


# --- loops around, within and behind loops --------------------------------------------------------------------------

WRAPPERS: dict[str, Callable[..., Iterable[Any]]] = {
    "map": map,
    "filter": filter,
    "takewhile": itertools.takewhile,
    "enumerate": lambda work, batches: enumerate(map(work, batches)),
    "chain": lambda work, batches: itertools.chain.from_iterable([map(work, batches)]),
    "generator": lambda work, batches: (work(batch) for batch in batches),
}


@pytest.mark.parametrize("wrapper", WRAPPERS.values(), ids=WRAPPERS)
def test_what_failed_twice_comes_a_third_time(wrapper: Callable[..., Iterable[Any]]) -> None:
    """The second loop's variable still holds the batch of the first when the wrapper raises."""
    source, seen = Source(), Seen()

    def work(batch: Any) -> Any:
        seen.append(batch.first)
        if seen == [0, 1, 1]:
            raise Failed
        return batch

    for _ in range(2):
        with contextlib.suppress(Failed):
            for batch in wrapper(work, source):
                if seen == [0, 1]:
                    fail(batch if isinstance(batch, Numbered) else batch[1])
    assert seen == [0, 1, 1]
    assert source.poll().first == 1


def groups(given: Iterable[Any], work: Callable[[Any], None]) -> None:
    """None of which its loop asks for again: what comes next has been read by then."""
    for _, batches in itertools.groupby(given, lambda batch: batch.first // 2):
        for batch in batches:
            work(batch)


def headers(given: Iterable[Any], work: Callable[[Any], None]) -> None:
    """Each is in use as long as what belongs to it is read."""
    batches = iter(given)
    for header in batches:
        work(header)
        for batch in batches:
            work(batch)


@pytest.mark.parametrize("over", [itself, generator])
@pytest.mark.parametrize(("loops", "again"), [(groups, [4, 5]), (headers, [0, 4, 5])])
def test_a_loop_in_a_loop_acknowledges(loops: Callable[..., None], again: Seen, over: Over) -> None:
    """All but the last two, and what the outer loop has in a variable."""
    source = Source()

    def work(batch: Any) -> None:
        if batch.first == 5:
            raise Failed

    with pytest.raises(Failed):
        loops(over(source), work)
    assert [source.poll().first for _ in again] == again


def nested(source: Source, seen: Seen) -> None:
    for batch in source:
        seen.append(batch.first)
        work_(source, seen, itself)


def recursive(source: Iterable[Any], seen: Seen) -> None:
    batches = iter(source)
    for batch in batches:
        work(batch, seen)
        recursive(batches, seen)


@pytest.mark.parametrize("leave", [nested, recursive])
def test_loops_within_loops_fail_together(leave: Leave) -> None:
    source, seen = Source(), Seen()
    with contextlib.suppress(Failed):
        leave(source, seen)
    assert seen == [0, 1]
    assert [source.poll().first for _ in range(3)] == [0, 1, 2]


def test_an_iterator_goes_on_with_what_failed() -> None:
    source, seen = Source(), Seen()
    batches = iter(source)
    with contextlib.suppress(Failed):
        for batch in batches:
            work(batch, seen)
    for batch in batches:
        seen.append(batch.first)
        if batch.first == 2:
            break
    assert (seen, source.done) == ([0, 1, 1, 2], {0, 1})


def for_(work: Callable[[Any], None], batches: Iterable[Any]) -> None:
    for batch in batches:
        work(batch)


@pytest.mark.parametrize("loop", [for_, lambda work, batches: list(map(work, batches))], ids=["for", "list"])
@pytest.mark.parametrize(("over", "polled"), [(itself, [1, 2]), (generator, [0, 1])])
def test_asking_for_more_within_a_loop_is_no_ack(loop: Callable[..., object], over: Over, polled: Seen) -> None:
    """That a loop over a generator is around it cannot be seen."""
    source, seen = Source(), Seen()

    def work(batch: Any) -> None:
        seen.extend([batch.first, source.poll().first, source.poll().first])
        raise Failed

    with contextlib.suppress(Failed):
        loop(work, over(source))
    assert (seen, source.done) == ([0, *polled], {polled[0]})


def test_another_thread_acknowledges_nothing() -> None:
    """It advances the same generator."""
    source = Source()
    batches = generator(source)
    next(batches)
    (thread := threading.Thread(target=next, args=(batches,))).start()
    thread.join()
    assert source.done == set()
