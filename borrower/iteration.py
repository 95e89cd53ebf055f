"""The iterators over a session, which see how their loop was left: Python tells them no more than that it was.

A loop lets go of its iterator in the middle of one of its frame's instructions. After `break` and `return` that is the
one that drops it; after an exception it is the one that was being executed when that came. So it is on CPython; where
it cannot be seen, a loop has failed: what it was at work on comes again.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import inspect
import opcode
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import FrameType
from typing import Protocol

from borrower.batch import Batch


def _codes(*names: str) -> frozenset[int]:
    return frozenset(opcode.opmap[name] for name in names if name in opcode.opmap)


_ASKS = _codes("FOR_ITER", "GET_ANEXT", "SEND")
_DROPS = _codes("POP_TOP", "POP_ITER")
_YIELDS = _codes("YIELD_VALUE", "RESUME")
_CACHE = opcode.opname.index("CACHE") if "CACHE" in opcode.opname else -1
_CALLS = _codes("CALL", "CALL_FUNCTION_EX", "CALL_KW")


class Asked(Protocol):
    """A session, as its iterators see it. `left`: the loop that was at work on that batch is over; whether well."""

    def next_batch(self) -> Batch | None: ...

    def left(self, batch: Batch, *, well: bool) -> None: ...


class _Watch:
    """What is known of the loop: the batch that it is at work on, and whether it is a loop that asks."""

    def __init__(self, left: Callable[[Batch, bool], None]) -> None:
        self._left = left
        self._batch: Batch | None = None
        self._asking = self._loops = False
        self._asked_at, self._handled = (0, 0), 0

    def asks(self, frame: FrameType) -> None:
        """For the next, so what it was at work on has ended well."""
        self._asking, self._loops, self._handled = True, _opcode(frame) in _ASKS, id(sys.exc_info()[1])
        self._asked_at = _place(frame)

    def has(self, batch: Batch) -> None:
        """It has got it."""
        self._batch, self._asking = batch, False

    def missed(self, batch: Batch) -> None:
        """An exception has come before it had it."""
        self._left(batch, False)

    def ends(self, frame: FrameType | None, *, closed: bool = False) -> None:
        """Nobody has the iterator any more, or it is `closed`. A batch that was asked for by itself, with `next`, is
        still in its user's hands."""
        batch, self._batch = self._batch, None
        if batch is not None and (self._asking or self._loops):
            self._left(batch, self._asking or self._ended_well(frame, batch, closed))

    def _ended_well(self, frame: FrameType | None, batch: Batch, closed: bool) -> bool:
        while frame is not None and inspect.CO_GENERATOR & frame.f_code.co_flags and _opcode(frame) in _YIELDS:
            frame, closed = frame.f_back, False  # a generator between, which goes with the loop over it
        if frame is None:
            return False
        code = _opcode(frame)
        if _place(frame) == self._asked_at:  # what stands between has ended, and may have thrown the batch away
            return any(value is batch for value in frame.f_locals.values())
        return code in _DROPS or (closed and _closes(frame) and id(sys.exc_info()[1]) == self._handled)


class Iteration(Iterator[Batch]):
    """Over a session."""

    def __init__(self, session: Asked) -> None:
        self._ask = session.next_batch
        self._watch = _Watch(lambda batch, well: session.left(batch, well=well))
        self._over = False

    def __next__(self) -> Batch:
        if self._over:
            raise StopIteration
        self._watch.asks(sys._getframe(1))
        batch: Batch | None = None
        try:
            batch = self._ask()
            if batch is not None:
                self._watch.has(batch)
                return batch
        except BaseException:
            if batch is not None:
                self._watch.missed(batch)
            raise
        raise StopIteration

    def close(self) -> None:
        """It is over, as with `break`; where an exception is being handled, the batch has failed."""
        self._over = True
        self._watch.ends(sys._getframe(1), closed=True)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter is at its end, say
            self._watch.ends(sys._getframe(1))


class AsyncIteration(AsyncIterator[Batch]):
    """Over a session of an event loop."""

    def __init__(self, ask: Callable[[], Awaitable[Batch | None]], left: Callable[[Batch, bool], None]) -> None:
        self._ask = ask
        self._watch = _Watch(left)
        self._over = False

    def __anext__(self) -> Awaitable[Batch]:
        self._watch.asks(sys._getframe(1))
        return self._next()

    async def _next(self) -> Batch:
        if self._over:
            raise StopAsyncIteration
        batch: Batch | None = None
        try:
            batch = await self._ask()
            if batch is not None:
                self._watch.has(batch)
                return batch
        except BaseException:
            if batch is not None:
                self._watch.missed(batch)
            raise
        raise StopAsyncIteration

    def aclose(self) -> Awaitable[None]:
        """It is over, as with `break`; where an exception is being handled, the batch has failed."""
        self._over = True
        self._watch.ends(sys._getframe(1), closed=True)
        return asyncio.sleep(0)

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self._watch.ends(sys._getframe(1))


def _closes(frame: FrameType) -> bool:
    """Whether it calls `close`. An exception goes that way too through `yield from`, in another call."""
    before = [step for step in dis.get_instructions(frame.f_code) if step.offset < frame.f_lasti]
    named = [step.argval for step in before if step.opname.startswith("LOAD_")]
    return _opcode(frame) in _CALLS and bool(named) and named[-1] in ("close", "aclose")


def _place(frame: FrameType) -> tuple[int, int]:
    return id(frame.f_code), frame.f_lasti


def _opcode(frame: FrameType) -> int:
    """Of the instruction that is being executed; a call points behind itself, at its caches."""
    code, place = frame.f_code.co_code, frame.f_lasti
    while place > 0 and code[place] == _CACHE:
        place -= 2
    return code[place] if place >= 0 else -1
