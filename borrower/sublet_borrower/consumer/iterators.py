"""Iterators over a session, which detect how their loop was left.

Python reports no more than that it was left: a loop releases its iterator in the middle of one of its frame's
instructions. After `break` and `return` that is the instruction that drops it; after an exception it is the one that
was being executed when the exception came. So it is on CPython. Where it cannot be seen, the loop counts as failed and
its batch is delivered again. So it is with an iterator that outlives its loop, in a variable, a suspended generator,
the traceback of an exception or a cycle of references: as soon as the session is polled elsewhere, a loop that is not
around that place and not running in another task or thread has been left.
"""

from __future__ import annotations

import asyncio
import contextlib
import dis
import inspect
import opcode
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import FrameType
from typing import Any, Protocol

from sublet_borrower.streams.batch import Batch


def _codes(*names: str) -> frozenset[int]:
    return frozenset(opcode.opmap[name] for name in names if name in opcode.opmap)


_ASKS = _codes("FOR_ITER", "GET_ANEXT", "SEND")
_DROPS = _codes("POP_TOP", "POP_ITER")
_YIELDS = _codes("YIELD_VALUE", "RESUME")
_CACHE = opcode.opname.index("CACHE") if "CACHE" in opcode.opname else -1
_CALLS = _codes("PRECALL", "CALL", "CALL_FUNCTION_EX", "CALL_KW")
_TAKERS = frozenset({"next", "anext", "send", "asend", "list", "tuple", "set", "frozenset", "dict", "sum", "max"})
"""Names of the methods that advance a generator."""
_GENERATOR = inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR


class IterableSession(Protocol):
    """A session, as its iterators see it. `left`: a loop is over with that batch; whether well."""

    @property
    def loops(self) -> SessionLoops: ...

    def poll(self) -> Batch | None: ...

    def left(self, batch: Batch, *, well: bool) -> None: ...


class SessionLoops:
    """The loops over one session that are still alive."""

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[_Loop], ...] = ()

    def add(self, loop: _Loop) -> None:
        """Another begins."""
        self._known = (*(known for known in self._known if known() is not None), weakref.ref(loop))

    def has(self, batch: Batch) -> bool:
        """Return whether a loop is at work on it."""
        return any(loop.batch is batch for loop in self._living())

    def asked_beside(self, frame: FrameType) -> None:
        """In that frame another loop over the session begins, or a batch is polled."""
        for loop in self._living():
            loop.asked_beside(frame)

    def _living(self) -> Iterator[_Loop]:
        return (loop for known in self._known if (loop := known()) is not None)


class _Loop:
    """What is known of a loop. `batch`: it is at work on that. `left(batch, well)` is called when that is over."""

    def __init__(self, loops: SessionLoops, left: Callable[[Batch, bool], None]) -> None:
        self._left = left
        self.batch: Batch | None = None
        self._is_loop = False
        self._asked_at = self._frame = self._caller = (0, 0)
        self._handled = 0
        self._asker: weakref.ref[Any] | None = None
        loops.add(self)

    def asks(self, frame: FrameType) -> None:
        """Advance: the batch before has ended well if this call comes from the same place."""
        if self.batch is not None and _call_site(frame) == self._asked_at:
            self._ends(True)
        self.entered(frame)
        if self.batch is None:
            self._is_loop, self._handled = _opcode(frame) in _ASKS, id(sys.exc_info()[1])
            self._asked_at, self._frame, self._caller = _call_site(frame), _identity(frame), _identity(_caller(frame))
            self._asker = weakref.ref(_asker())

    def has(self, batch: Batch) -> None:
        """Record the batch. One that was fetched by itself, with `next`, is its user's to acknowledge."""
        if self._is_loop and self.batch is None:
            self.batch = batch

    def missed(self, batch: Batch) -> None:
        """An exception has come before it had it."""
        self._left(batch, False)

    def entered(self, frame: FrameType) -> None:
        """A loop over the iterator begins, or `next` is called by itself."""
        if self.batch is not None and not self._is_around(frame):
            self._ends(False)

    def asked_beside(self, frame: FrameType) -> None:
        """See `SessionLoops`. Another task or thread may advance it while this one is running."""
        asker = None if self._asker is None else self._asker()
        if asker is None or asker is _asker() or _has_ended(asker):
            self.entered(frame)

    def dropped(self, frame: FrameType | None, *, closed: bool = False) -> None:
        """The iterator is garbage, or is `closed`."""
        if (batch := self.batch) is not None:
            self._ends(frame is not None and self._ended_well(frame, batch, closed))

    def _ends(self, well: bool) -> None:
        batch, self.batch = self.batch, None
        if batch is not None:
            self._left(batch, well)

    def _ended_well(self, frame: FrameType, batch: Batch, closed: bool) -> bool:
        if closed and _called(frame) in ("close", "aclose"):
            return self._is_undisturbed()
        is_here = _identity(_caller(frame)) == self._caller  # not where the garbage collector was running
        if not _is_generator(frame):
            return is_here and self._is_left_at(frame, batch)
        # A loop within a generator is left with the loop over that. What the generator does when it is closed, a
        # `return` say, says nothing; what it does when it is asked for more does.
        dropped = _opcode(frame) in _DROPS
        while _is_generator(frame):
            if _opcode(frame) in _ASKS:
                return dropped
            if _opcode(frame) not in _DROPS | _YIELDS or frame.f_back is None:
                return False
            frame = frame.f_back
        if is_here and _opcode(frame) in _DROPS:
            return True
        return dropped and (_opcode(frame) in _ASKS or (_called(frame) in _TAKERS and self._is_undisturbed()))

    def _is_left_at(self, frame: FrameType, batch: Batch) -> bool:
        if _call_site(frame) == self._asked_at:  # what stands between has ended, and may have thrown the batch away
            return any(value is batch for value in frame.f_locals.values())
        return _opcode(frame) in _DROPS

    def _is_undisturbed(self) -> bool:
        """Return whether no exception is being handled that was not when it asked."""
        return id(sys.exc_info()[1]) == self._handled

    def _is_around(self, frame: FrameType | None) -> bool:
        """Return whether that frame, or one that called it, is in this loop: in its body, or where it advances one of
        several iterators."""
        while frame is not None and _identity(frame) != self._frame:
            frame = frame.f_back
        return frame is not None and self._asked_at[1] <= frame.f_lasti <= _end_of_body(frame, self._asked_at[1])


class _Deleted:
    """Whose loop is over when it is deleted, at the end of the interpreter too."""

    _loop: _Loop

    def __del__(self) -> None:
        try:  # noqa: SIM105 at the end of the interpreter `contextlib` may be gone
            self._loop.dropped(sys._getframe(1))
        except Exception:  # noqa: BLE001
            pass


class SessionIterator(_Deleted, Iterator[Batch]):
    """Over a session."""

    def __init__(self, session: IterableSession) -> None:
        self._ask = session.poll
        self._loop = _Loop(session.loops, lambda batch, well: session.left(batch, well=well))
        self._over = False

    def __iter__(self) -> Iterator[Batch]:
        self._loop.entered(sys._getframe(1))
        return self

    def __next__(self) -> Batch:
        if self._over:
            raise StopIteration
        self._loop.asks(sys._getframe(1))
        batch: Batch | None = None
        try:
            batch = self._ask()
            if batch is not None:
                self._loop.has(batch)
                return batch
        except BaseException:
            if batch is not None:
                self._loop.missed(batch)
            raise
        raise StopIteration

    def close(self) -> None:
        """It is over, as with `break`; where an exception is being handled, the batch has failed."""
        self._over = True
        self._loop.dropped(sys._getframe(1), closed=True)


class AsyncSessionIterator(_Deleted, AsyncIterator[Batch]):
    """Over a session of an event loop."""

    def __init__(
        self, ask: Callable[[], Awaitable[Batch | None]], loops: SessionLoops, left: Callable[[Batch, bool], None]
    ) -> None:
        self._ask = ask
        self._loop = _Loop(loops, left)
        self._over = False

    def __aiter__(self) -> AsyncIterator[Batch]:
        self._loop.entered(sys._getframe(1))
        return self

    def __anext__(self) -> Awaitable[Batch]:
        self._loop.asks(sys._getframe(1))
        return self._next()

    async def _next(self) -> Batch:
        if self._over:
            raise StopAsyncIteration
        batch: Batch | None = None
        try:
            batch = await self._ask()
            if batch is not None:
                self._loop.has(batch)
                return batch
        except BaseException:
            if batch is not None:
                self._loop.missed(batch)
            raise
        raise StopAsyncIteration

    def aclose(self) -> Awaitable[None]:
        """It is over, as with `break`; where an exception is being handled, the batch has failed."""
        self._over = True
        self._loop.dropped(sys._getframe(1), closed=True)
        return asyncio.sleep(0)


def _asker() -> asyncio.Task[Any] | threading.Thread:
    """Return the task that runs, or else the thread."""
    with contextlib.suppress(RuntimeError):
        if (task := asyncio.current_task()) is not None:
            return task
    return threading.current_thread()


def _has_ended(asker: asyncio.Task[Any] | threading.Thread) -> bool:
    return asker.done() if isinstance(asker, asyncio.Task) else not asker.is_alive()


def _called(frame: FrameType) -> str:
    """Return the name by which what the frame calls now was looked up; empty where it calls nothing."""
    if _opcode(frame) not in _CALLS:
        return ""
    before = [step for step in dis.get_instructions(frame.f_code) if step.offset <= frame.f_lasti]
    call = next(step.positions for step in reversed(before) if step.opcode in _CALLS)
    named = [
        step
        for step in before
        if step.opname.startswith("LOAD_") and call is not None and step.positions is not None
        if (step.positions.lineno, step.positions.col_offset) == (call.lineno, call.col_offset)
    ]
    return str(named[-1].argval) if named else ""


def _end_of_body(frame: FrameType, head: int) -> int:
    """Return where the loop ends that advances at offset `head`, with its exception handlers."""
    steps = list(dis.get_instructions(frame.f_code))
    back = [step.offset for step in steps if "JUMP_BACKWARD" in step.opname and step.argval == head]
    ahead = [step.argval for step in steps if step.offset == head and step.opname.startswith("FOR_ITER")]
    return max([*back, *ahead], default=head)


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & _GENERATOR)


def _caller(frame: FrameType) -> FrameType:
    """Return the function in which the loop is, or the one over the generator in which it is."""
    while _is_generator(frame) and frame.f_back is not None:
        frame = frame.f_back
    return frame


def _identity(frame: FrameType) -> tuple[int, int]:
    return id(frame), id(frame.f_code)


def _call_site(frame: FrameType) -> tuple[int, int]:
    return id(frame.f_code), frame.f_lasti


def _opcode(frame: FrameType) -> int:
    """Return the offset of the instruction that is being executed; a call points behind itself, at its caches."""
    code, index = frame.f_code.co_code, frame.f_lasti
    while index > 0 and code[index] == _CACHE:
        index -= 2
    return code[index] if index >= 0 else -1
