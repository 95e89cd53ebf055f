"""The consumer for asyncio: a `Session` on a worker thread of its own.

    async with AsyncSession("$share/billing/orders/#") as session:
        async for batch in session:
            await work(batch.table)

A session is used by one thread, so every call runs on that worker, which ends a wait for messages as soon as there is
another call. The event loop never waits for the network, the database or a lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sys
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, Self, TypeVar

import psycopg

from sublet_borrower.consumer.iterators import AsyncSessionIterator, SessionIterations
from sublet_borrower.consumer.session import Session
from sublet_borrower.streams.batch import Batch
from sublet_borrower.util.session_fork_guard import SessionForkGuard
from sublet_borrower.util.single_thread_executor import SingleThreadExecutor, wait_until_done
from sublet_borrower.util.unfinished_work import check_has_run
from sublet_protocol.domain.errors import InvalidSubscription, UnknownOutcome, UsageError
from sublet_protocol.domain.subscriptions import Subscription
from sublet_storage.util.fork_guard import describe_origin
from sublet_storage.util.timeouts import check_timeout

log = logging.getLogger(__name__)

POLL_INTERVAL_S = 0.1
"""How often the session is checked while it waits with a batch outstanding."""

_T = TypeVar("_T")


class AsyncSession:
    """The `Session` of asyncio programs, with the same arguments, settings and errors.

    Cancelling a wait for a batch loses none, nor does a timeout: the next call gets it. An `async for` that is left by
    an exception or by cancellation has failed: its batch is delivered again, as with `Session`. `poll` acknowledges the
    batch that it returned before. Several tasks may wait at once, and each batch goes to one of them: each `async for`
    acknowledges its own; tasks that call `poll` need `auto_ack=False`, since `poll` acknowledges the batch that it
    returned last, to any task.

    `batch.ack()` waits for nothing. Where it is refused the batch is still to be done, and what `Session` raises from
    it is raised by the next call of: `poll`, also in an `async for`, `ack` of that batch, or `close`.
    """

    def __init__(self, subscription: str, url: str | None = None, **settings: Any) -> None:
        if not isinstance(subscription, str):
            raise InvalidSubscription(f"subscription {subscription!r}: it is a text, $share/GROUP/FILTER or $queue/...")
        self.subscription = str(Subscription.parse(subscription))
        self._make: Callable[[], Session] = partial(Session, subscription, url, **settings)
        self._origin = describe_origin(f"an AsyncSession of {self.subscription}")
        self._fork_guard = SessionForkGuard()
        self._worker = SingleThreadExecutor("sublet-session")
        self._session: Session | None = None
        self._opening: Future[Session] | None = None
        self._fetching: Future[Batch | None] | None = None
        self._ending: Future[None] | None = None
        self._acknowledging: Future[None] | None = None
        """The last call that acknowledges a batch or ends a loop. Those before it end before it."""
        self._refused: dict[Batch, Exception] = {}
        """What acknowledging batches has raised, and nobody has got yet."""
        self._missed: Exception | None = None
        """What a `wait` has raised that may have been cancelled, until somebody gets it."""
        self._unsettled: list[tuple[Batch, Callable[[], None]]] = []
        """Acknowledgements that wait for an outcome. Of the worker's thread."""
        self._loops = SessionIterations()
        self._polled_batch: Batch | None = None
        self._has_polled = False
        self._draining = False

    # --- for the user -----------------------------------------------------------------------------------------------

    async def open(self) -> Self:
        """Join the group; `async with` does it. Raise what `Session` raises."""
        await self._open()
        return self

    async def __aenter__(self) -> Self:
        try:
            return await self.open()
        except BaseException:
            await self.close()  # also if the waiting was cancelled and it opens after all
            raise

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None and (batch := self._polled_batch) is not None and not self._loops.has(batch):  # `poll` gave it
            self._on_loop_left(batch, well=True)
        await self._close(aborted=False)
        if kind is None:
            self._raise_refused(*self._refused)

    def __aiter__(self) -> AsyncIterator[Batch]:
        self._loops.on_poll_elsewhere(frame := sys._getframe(1))
        return AsyncSessionIterator(self._poll_next, self._loops, self._on_loop_left, frame)

    async def poll(self, timeout_s: float | None = None) -> Batch | None:
        """Return the next batch; None once the session is drained or closed, or when the timeout is over.

        The call acknowledges the batch before, unless the session has auto_ack off. Raise `UsageError` after `close`,
        and what `ack` of a batch was refused with.
        """
        timeout_s = check_timeout(timeout_s)
        self._loops.on_poll_elsewhere(sys._getframe(1))
        session = await self._open()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while (fetching := self._begin_fetching(session)) is not None:
            if not (
                await self._wait_for_fetch(session, fetching, deadline) and await self._wait_for_acknowledging(deadline)
            ):
                return None
            if self._fetching is not fetching:
                continue  # another task took it
            self._fetching = None
            batch = fetching.result()
            if batch is not None and self._ending is None:
                if session.may_start(batch):  # it may have been fetched long ago, or acknowledged since
                    self._polled_batch, self._has_polled = batch, True
                    return batch
                self._fetching = self._worker.submit(partial(self._fetch, session, batch))
            elif self._refused:
                self._raise_refused(*self._refused)
            elif deadline is not None and time.monotonic() >= deadline:
                return None
        self._raise_missed()
        return None

    async def wait(self, timeout_s: float) -> None:
        """Pause between two calls on one batch, and act on what has arrived: its `is_lost` is up to date afterwards.

        Raise `SubscriptionEnded`.
        """
        checked_s = check_timeout(timeout_s)
        session, deadline = await self._open(), math.inf if checked_s is None else time.monotonic() + checked_s
        while self._ending is None and not session.is_closed:
            await asyncio.sleep(min(max(deadline - time.monotonic(), 0.0), POLL_INTERVAL_S))
            checking = self._worker.submit(partial(self._check_session, session))
            session.wakeup()
            await wait_until_done(checking)
            self._raise_missed()
            if time.monotonic() >= deadline:
                return

    async def run_in_transaction(self, work: Callable[[psycopg.Connection[Any]], _T], *batches: Batch) -> _T:
        """Call `work(connection)` on the session's thread, in a transaction that commits its output together with the
        progress of these batches; return its result. See `Session.transaction` for the rules and the errors.

        Cancelling the wait does not end the work: it is committed or rolled back as if it had been waited for.
        """
        session = await self._open()
        working = self._worker.submit(partial(_run_in_transaction, session, work, batches))
        session.wakeup()
        await wait_until_done(working)
        return working.result()

    def may_continue(self, batch: Batch) -> bool:
        """Return whether another user call may begin on this batch now: only while a leader grants the stream to this
        session."""
        self._fork_guard.check(self.subscription)
        return self._session is not None and self._session.may_continue(batch)

    def drain(self) -> None:
        """Finish what was given out, hand everything over, and let the iteration end. From any thread or handler."""
        self._fork_guard.check(self.subscription)
        self._draining = True
        if self._session is not None:
            self._session.drain()

    def leave(self) -> None:
        """Begin to hand over now, also in the middle of a batch, and let the iteration end. From any thread.

        A batch acknowledged within the unsubscribe timeout counts; one that is not will be delivered again.
        """
        self.drain()
        if self._session is not None:
            self._session.leave()

    def assignment(self) -> dict[int, int]:
        """Return {stream: next offset to deliver} of the streams this session holds now."""
        self._fork_guard.check(self.subscription)
        return {} if self._session is None else self._session.assignment()

    async def close(self, *, aborted: bool = False) -> None:
        """Leave the group and wait until the last progress is durable; see `Session.close`.

        It goes on when the waiting is cancelled. Closing again waits for the same end. Raise, once it is closed, what
        `ack` of a batch was refused with.
        """
        await self._close(aborted)
        self._raise_refused(*self._refused)

    @property
    def is_closed(self) -> bool:
        """Return whether the session holds no streams and will hold none."""
        if self._session is not None:
            return self._session.is_closed
        return self._ending is not None and self._ending.done()

    # --- inside -----------------------------------------------------------------------------------------------------

    async def _close(self, aborted: bool) -> None:
        if self._fork_guard.is_forked:
            self._refused.clear()
            return
        if self._ending is None:
            self._ending = self._worker.submit(partial(self._end, aborted))
            self._worker.stop()
            if self._session is not None:
                self._session.wakeup()
        await wait_until_done(self._ending)
        self._ending.result()

    async def _open(self) -> Session:
        self._fork_guard.check(self.subscription)
        if self._ending is not None:
            raise UsageError(f"{self.subscription}: this session is closed. Make another.")
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = self._worker.submit(self._begin)
        opening = self._opening
        await wait_until_done(opening)
        return opening.result()

    async def _poll_next(self) -> Batch | None:
        """Return the next batch of an iteration. Closing ends it, also between two batches."""
        if self._ending is not None and self._has_polled:
            return None
        return await self.poll()

    def _on_loop_left(self, batch: Batch, well: bool) -> None:
        """Note that a loop is over, as `Session.left` does. From any thread."""
        if self._polled_batch is batch:
            self._polled_batch = None
        if (session := self._session) is not None and not self._fork_guard.is_forked:
            self._acknowledging = self._worker.submit(
                partial(self._record, batch, partial(session.left, batch, well=well))
            )
            session.wakeup()

    def _begin_fetching(self, session: Session) -> Future[Batch | None] | None:
        """Return the fetch that is under way or done and not taken, or a new one; None once the session is drained or
        closed.
        """
        if self._fetching is None and self._ending is None and not session.is_closed:
            self._fetching = self._worker.submit(partial(self._fetch, session))
        return self._fetching

    async def _wait_for_fetch(self, session: Session, fetching: Future[Batch | None], deadline: float | None) -> bool:
        """Wait for the fetch, and return whether it is done. One that is not done when the wait ends, also by being
        cancelled, is ended, and what it has taken by then is kept."""
        try:
            return await wait_until_done(fetching, None if deadline is None else max(deadline - time.monotonic(), 0.0))
        finally:
            if not fetching.done():
                session.wakeup()

    async def _wait_for_acknowledging(self, deadline: float | None) -> bool:
        """Wait for what was acknowledged before, and return whether that is done: a batch that was fetched meanwhile
        may be among it."""
        acknowledging = self._acknowledging
        left_s = None if deadline is None else max(deadline - time.monotonic(), 0.0)
        return acknowledging is None or await wait_until_done(acknowledging, left_s)

    def _acknowledge(self, batch: Batch, up_to_offset: int | None) -> None:
        """Acknowledge the batch on the worker's thread. From any thread."""
        self._fork_guard.check(self.subscription)
        if self._worker.is_current:
            batch.acknowledge(up_to_offset)
            return
        self._raise_refused(batch)
        self._acknowledging = self._worker.submit(
            partial(self._settle, batch, partial(batch.acknowledge, up_to_offset))
        )
        if self._session is not None:
            self._session.wakeup()

    def _raise_missed(self) -> None:
        if (missed := self._missed) is not None and self._ending is None:
            self._missed = None
            raise missed

    def _raise_refused(self, *batches: Batch) -> None:
        """Raise what acknowledging the first of these batches raised that was refused. From any thread."""
        for batch in batches:
            if (refused := self._refused.pop(batch, None)) is not None:
                refused.add_note(f"Raised by batch.ack() of {batch!r}.")
                raise refused

    # --- on the worker's thread -------------------------------------------------------------------------------------

    def _begin(self) -> Session:
        session = self._session = self._make()
        session.loops = self._loops
        session._drop_monitor.origin = self._origin  # its own is a line of this thread
        if self._draining:
            session.drain()
        return session

    def _fetch(self, session: Session, given_back: Batch | None = None) -> Batch | None:
        """Return what `Session.poll` does. `given_back`: a batch that it has returned and that no task may have now."""
        if given_back is not None:
            session.give_back(given_back)
        self._settle_again()
        if self._refused:
            return None  # first of all that is raised
        batch = session.fetch_batch()
        if batch is not None:
            batch._delegate_ack, batch._transact = self._acknowledge, _refuse_transaction
        return batch

    def _check_session(self, session: Session) -> None:
        try:
            session.wait(0.0)
        except Exception as error:  # noqa: BLE001 raised where it is waited for, or by the next call
            self._missed = error

    def _settle(self, batch: Batch, acknowledge: Callable[[], None]) -> None:
        """Acknowledge the batch, unless that was refused and its user does not know it yet: to do it again would pass
        its messages over.
        """
        if batch not in self._refused:
            self._record(batch, acknowledge)
        if isinstance(self._refused.get(batch), UnknownOutcome):
            self._unsettled.append((batch, acknowledge))

    def _record(self, batch: Batch, acknowledge: Callable[[], None]) -> None:
        try:
            acknowledge()
        except Exception as error:  # noqa: BLE001 raised where its user calls next
            self._refused[batch] = error

    def _settle_again(self) -> None:
        """Acknowledge again what waits for an outcome, and forget what was refused of batches that are done by now."""
        unsettled, self._unsettled = self._unsettled, []
        waiting = {batch for batch, _ in unsettled if isinstance(self._refused.get(batch), UnknownOutcome)}
        for batch in tuple(self._refused):
            if batch in waiting or batch.is_done:
                self._refused.pop(batch, None)
        for batch, acknowledge in unsettled:
            if batch in waiting:
                self._settle(batch, acknowledge)

    def _end(self, aborted: bool) -> None:
        """Close the session after what was begun before: an opening whose waiter was cancelled has ended too."""
        if self._session is not None:
            self._settle_again()
            for batch, refused in tuple(self._refused.items()):  # `close` raises one, but not over a block's exception
                text = "acknowledgement refused: subscription=%s stream_id=%d start_offset=%d: %s"
                log.warning(text, self.subscription, batch.stream_id, batch.first, refused)
            self._session.close(aborted=aborted)


def _run_in_transaction(
    session: Session, work: Callable[[psycopg.Connection[Any]], _T], batches: tuple[Batch, ...]
) -> _T:
    with session.transaction(*batches) as connection:
        check_has_run(result := work(connection), "the function given to run_in_transaction")
        return result


def _refuse_transaction(batch: Batch) -> NoReturn:
    raise UsageError(
        f"{batch!r} is of an AsyncSession, whose transactions would hold up the event loop:"
        " write `await session.run_in_transaction(work, batch)`, where work(connection) is a plain function."
    )
