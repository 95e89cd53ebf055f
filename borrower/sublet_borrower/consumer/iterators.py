"""Iterators over a session, which detect how their loop was left.

Python reports no more than that it was left: a loop releases its iterator in the middle of one of its frame's
instructions. After `break` and `return` that is the loop's instruction that drops it; after an exception it is the one
that was being executed when the exception came. So it is on CPython. Where it cannot be seen, the loop counts as failed
and its batch is delivered again. So it is with an iterator that outlives its loop, in a variable, a suspended
generator, the traceback of an exception or a cycle of references: as soon as the session is polled elsewhere, a loop
that is not around that place and not running in another task or thread has been left.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import FrameType
from typing import Any, Protocol

from sublet_borrower.streams.batch import Batch
from sublet_borrower.util.loop_frames import (
    CALLS,
    NEXT_NAMES,
    POLLS,
    find_body_end,
    find_called_name,
    find_caller,
    find_drop_offsets,
    find_loop_frame,
    find_loop_variables,
    get_call_site,
    get_frame_id,
    get_loop_offsets,
    get_offset,
    get_opcode,
    is_at_loop_head,
    is_closing,
    walk_back,
    walk_over,
)

_TAKERS = frozenset({"next", "anext", "send", "asend", "list", "tuple", "set", "frozenset", "dict", "sum", "max"})
"""Names of the functions that advance a generator."""
_ITER = frozenset({"iter", "__iter__", "aiter", "__aiter__"})


class IteratedSession(Protocol):
    """A session, as its iterators see it. `left` reports that a loop is over with that batch, and whether it ended
    well.
    """

    @property
    def loops(self) -> SessionIterations: ...

    def poll(self) -> Batch | None: ...

    def left(self, batch: Batch, *, well: bool) -> None: ...


class SessionIterations:
    """The loops over one session that are still alive, and the batches that are theirs to acknowledge. A batch is so
    until `release`, which may come after the end of its loop: an `AsyncSession` acts on that on another thread, later.
    """

    def __init__(self) -> None:
        self._known: tuple[weakref.ref[_Loop], ...] = ()
        self._batches = weakref.WeakSet[Batch]()

    def add(self, loop: _Loop) -> None:
        """Add a loop that begins."""
        self._known = (*(known for known in self._known if known() is not None), weakref.ref(loop))

    def take(self, batch: Batch) -> None:
        """Note that a loop has the batch."""
        self._batches.add(batch)

    def release(self, batch: Batch) -> None:
        """Note that the session knows how the loop was left that had the batch."""
        self._batches.discard(batch)

    def has(self, batch: Batch) -> bool:
        """Return whether a loop has the batch. From any thread."""
        return batch in self._batches

    def on_poll_elsewhere(self, frame: FrameType) -> None:
        """Note that in that frame another loop over the session begins, or a batch is polled."""
        for loop in self._list_loops():
            loop.on_poll_elsewhere(frame)

    def _list_loops(self) -> Iterator[_Loop]:
        return (loop for known in self._known if (loop := known()) is not None)


class _Loop:
    """One loop over a session. `batches`: those it is processing, as a rule one. `left(batch, well)` is called when it
    is done with a batch.

    Its place is where the nearest `for` around the call that advances it is, so that a wrapper with a `__next__` of its
    own makes no difference, else where that call is: a function in C that takes all there is, as `list(map(...))` does.
    Only `next` called by hand makes no loop: its batch is acknowledged as that of `poll` is.
    """

    def __init__(self, loops: SessionIterations, left: Callable[[Batch, bool], None]) -> None:
        self._loops, self._left = loops, left
        self.batches: list[Batch] = []
        self._is_over_for = self._is_by_hand = self._is_taken_by_hand = False
        self._polled_at = self._frame_id = self._caller_id = self._read_ahead_at = (0, 0)
        self._loop_offsets: dict[tuple[int, int], int] = {}
        self._handled = 0
        self._task: weakref.ref[Any] | None = None
        loops.add(self)

    def on_poll(self, frame: FrameType) -> None:
        """Advance: acknowledge the batch before if this call comes from the same place or, where the loop is in a
        generator that a `for` goes over, if that generator is advanced from the same place.
        """
        loop_frame = find_loop_frame(frame)
        offsets, over = get_loop_offsets(loop_frame), find_caller(loop_frame)
        self._is_by_hand = self._is_taken_by_hand and loop_frame is frame and find_called_name(frame) in NEXT_NAMES
        if self._is_here(loop_frame):
            if not self._is_over_for or offsets == self._loop_offsets:
                self.end(True)
            elif not self._is_in_body(over):
                self.end(False)
        self.on_enter(frame)
        if not self.batches:
            self._is_over_for, self._handled = is_at_loop_head(over), id(sys.exc_info()[1])
            self._polled_at, self._loop_offsets = get_call_site(loop_frame), offsets
            self._frame_id, self._caller_id = get_frame_id(loop_frame), get_frame_id(over)
            self._task, self._read_ahead_at = weakref.ref(_get_current_task()), (0, 0)
        elif is_at_loop_head(frame):
            self._record_read_ahead(get_call_site(frame), self._find_values_in_use(frame))
        elif get_frame_id(frame) != self._frame_id:
            self._record_read_ahead(get_call_site(frame), frozenset())

    def add_batch(self, batch: Batch) -> None:
        """Record the batch. One that was fetched by hand is acknowledged by its user, unless that is in a loop."""
        if self.batches or not self._is_by_hand:
            self._loops.take(batch)
            self.batches.append(batch)

    def on_failed(self, batch: Batch) -> None:
        """Report the batch as failed, since an exception came before the loop received it."""
        self._left(batch, False)

    def on_iter(self, frame: FrameType) -> None:
        """Note that the iterator is requested: `iter` called by hand, a loop, or a wrapper."""
        if get_opcode(frame) in CALLS:
            self._is_taken_by_hand = find_called_name(frame) in _ITER
        self.on_enter(frame)

    def _is_here(self, frame: FrameType) -> bool:
        """Return whether that frame is the loop's, at its head, and advanced by the same task or thread."""
        task = None if self._task is None else self._task()
        is_same = get_call_site(frame) == self._polled_at and get_frame_id(frame) == self._frame_id
        return is_same and task is _get_current_task()

    def _record_read_ahead(self, site: tuple[int, int], in_use: frozenset[int]) -> None:
        """Record that a wrapper, or a loop within this one, takes another batch while this one is processed. The batch
        before may still be processed; those before that are done when it happens again, except those that are `in_use`.
        """
        if site == self._read_ahead_at:
            *earlier_batches, last = self.batches
            self.batches = [*(batch for batch in earlier_batches if id(batch) in in_use), last]
            for batch in earlier_batches:
                if id(batch) not in in_use:
                    self._left(batch, True)
        self._read_ahead_at = site

    def _find_values_in_use(self, frame: FrameType | None) -> frozenset[int]:
        """Return the ids of the values of variables in the loop's frame, and in those that it called, down to this
        one.
        """
        value_ids = set[int]()
        while frame is not None:
            value_ids |= {id(value) for value in frame.f_locals.values()}
            frame = frame.f_back if get_frame_id(frame) != self._caller_id else None
        return frozenset(value_ids)

    def on_enter(self, frame: FrameType) -> None:
        """Note that a loop over the iterator begins, or that `next` is called by hand."""
        if not self._is_around(frame):
            self.end(False)

    def on_poll_elsewhere(self, frame: FrameType) -> None:
        """Note it as `SessionIterations` does. Another task or thread may advance the loop while this one is
        running.
        """
        task = None if self._task is None else self._task()
        if task is None or task is _get_current_task() or _has_ended(task):
            self.on_enter(frame)

    def on_dropped(self, frame: FrameType) -> None:
        """Note that in that frame the iterator is dropped, or closed."""
        self.end(self._has_ended_well(frame))

    def end(self, well: bool) -> None:
        """Be done with all batches."""
        batches, self.batches = self.batches, []
        for batch in batches:
            self._left(batch, well)

    def _has_ended_well(self, frame: FrameType) -> bool:
        # A loop within a generator is left with the loop over that. How the generator reacts to its close, by a
        # `return` for example, shows nothing; how it reacts to `next` does.
        dropped = self._is_dropping(frame) or self._is_exhausted(frame)
        *generators, caller = walk_over(frame)
        for generator in generators:
            if get_opcode(generator) in POLLS:
                return dropped
            if not (self._is_dropping(generator) or is_closing(generator)):
                return False
        return self._is_dropping(caller) or (
            dropped
            and (get_opcode(caller) in POLLS or (find_called_name(caller) in _TAKERS and self._is_undisturbed()))
        )

    def _is_exhausted(self, frame: FrameType) -> bool:
        """Return whether that is the loop's frame, at its head, with the last batch in a variable of the loop: a
        wrapper has ended. Otherwise it has failed, and may have dropped the batch."""
        names = find_loop_variables(frame.f_code, get_offset(frame)) if self._is_here(frame) else ()
        return any(frame.f_locals.get(name) is batch for name in names for batch in self.batches[-1:])

    def _is_dropping(self, frame: FrameType) -> bool:
        """Return whether a loop in that frame, this one or one over the generator that it is in, drops its iterator."""
        if (head := self._loop_offsets.get(get_frame_id(frame))) is None:
            return False
        return get_offset(frame) in find_drop_offsets(frame.f_code, head)

    def _is_in_body(self, frame: FrameType) -> bool:
        """Return whether that frame is in the body of one of its loops."""
        if (head := self._loop_offsets.get(get_frame_id(frame))) is None:
            return False
        return head <= get_offset(frame) <= find_body_end(frame.f_code, head)

    def _is_undisturbed(self) -> bool:
        """Return whether the exception that is being handled, if any, is the same as when the loop asked."""
        return id(sys.exc_info()[1]) == self._handled

    def _is_around(self, frame: FrameType) -> bool:
        """Return whether that frame, or one that called it, is in this loop: in its body, or where it advances one of
        several iterators."""
        return any(self._is_in_body(each) for each in walk_back(frame) if get_frame_id(each) == self._frame_id)


class _Deleted:
    """An iterator whose loop is over when it is deleted, at the end of the interpreter too."""

    _loop: _Loop

    def __del__(self) -> None:
        try:  # noqa: SIM105 at the end of the interpreter `contextlib` may be gone
            self._loop.on_dropped(sys._getframe(1))
        except Exception:  # noqa: BLE001
            pass


class SessionIterator(_Deleted, Iterator[Batch]):
    """An iterator over a `Session`."""

    def __init__(self, session: IteratedSession, frame: FrameType) -> None:
        self._poll = session.poll
        self._loop = _Loop(session.loops, lambda batch, well: session.left(batch, well=well))
        self._loop.on_iter(frame)
        self._over = False

    def __iter__(self) -> Iterator[Batch]:
        self._loop.on_iter(sys._getframe(1))
        return self

    def __next__(self) -> Batch:
        if self._over:
            raise StopIteration
        self._loop.on_poll(sys._getframe(1))
        batch: Batch | None = None
        try:
            batch = self._poll()
            if batch is not None:
                self._loop.add_batch(batch)
                return batch
        except BaseException:
            if batch is not None:
                self._loop.on_failed(batch)
            raise
        raise StopIteration

    def close(self) -> None:
        """End the loop. Its batch has failed, since how the loop was left cannot be seen, unless this is the close of a
        generator that its loop drops: `yield from` closes the iterator it delegates to.
        """
        self._over = True
        self._loop.on_dropped(sys._getframe(1))


class AsyncSessionIterator(_Deleted, AsyncIterator[Batch]):
    """An iterator over an `AsyncSession`."""

    def __init__(
        self,
        poll: Callable[[], Awaitable[Batch | None]],
        loops: SessionIterations,
        left: Callable[[Batch, bool], None],
        frame: FrameType,
    ) -> None:
        self._poll = poll
        self._loop = _Loop(loops, left)
        self._loop.on_iter(frame)
        self._over = False

    def __aiter__(self) -> AsyncIterator[Batch]:
        self._loop.on_iter(sys._getframe(1))
        return self

    def __anext__(self) -> Awaitable[Batch]:
        self._loop.on_poll(sys._getframe(1))
        return self._poll_next()

    async def _poll_next(self) -> Batch:
        if self._over:
            raise StopAsyncIteration
        batch: Batch | None = None
        try:
            batch = await self._poll()
            if batch is not None:
                self._loop.add_batch(batch)
                return batch
        except BaseException:
            if batch is not None:
                self._loop.on_failed(batch)
            raise
        raise StopAsyncIteration

    def aclose(self) -> Awaitable[None]:
        """End the loop. Its batch has failed, since how the loop was left cannot be seen."""
        self._over = True
        self._loop.end(False)
        return asyncio.sleep(0)


def _get_current_task() -> asyncio.Task[Any] | threading.Thread:
    """Return the task that runs, or else the thread."""
    with contextlib.suppress(RuntimeError):
        if (task := asyncio.current_task()) is not None:
            return task
    return threading.current_thread()


def _has_ended(task: asyncio.Task[Any] | threading.Thread) -> bool:
    return task.done() if isinstance(task, asyncio.Task) else not task.is_alive()
