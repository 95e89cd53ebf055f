"""The consumer for asyncio: a `Session` on a worker thread of its own.

    async with AsyncSession("$share/billing/orders/#") as session:
        async for batch in session:
            await work(batch.table)

A session is used by one thread, so everything is carried to that worker: also acknowledgements, which take effect
within `TURN_S` while the worker waits for messages, and at once otherwise.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, ParamSpec, Self, TypeVar

from borrower.batch import Batch
from borrower.session import Session
from protocol.errors import UsageError
from protocol.words import Subscription

TURN_S = 0.2
"""Longest wait of the worker in one go, before it looks at what was acknowledged meanwhile."""

_P = ParamSpec("_P")
_T = TypeVar("_T")


class AsyncSession:
    """`Session` for asyncio, with the same arguments, settings and errors.

    Cancelling what waits for a batch loses none, nor does a timeout: the next call gets it.
    """

    def __init__(self, subscription: str, url: str | None = None, **settings: Any) -> None:
        self.subscription = str(Subscription.parse(subscription))
        self._make: Callable[[], Session] = lambda: Session(subscription, url, **settings)
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sublet-session")
        self._session: Session | None = None
        self._opening: asyncio.Future[Session] | None = None
        self._fetching: asyncio.Future[Batch | None] | None = None
        self._closing = False
        self._acknowledged: deque[Callable[[], None]] = deque()

    async def open(self) -> Self:
        """Join the group; `async with` does it. Raises what `Session` raises."""
        await self._opened()
        return self

    def __aiter__(self) -> AsyncIterator[Batch]:
        return self._iterate()

    async def next_batch(self, timeout_s: float | None = None) -> Batch | None:
        """The next batch; None once the session is drained or closed, or when the timeout is over."""
        session = await self._opened()
        if self._fetching is None:
            self._fetching = self._carry(lambda: self._fetch(session))
        fetching = self._fetching
        await asyncio.wait({fetching}, timeout=timeout_s)
        if not fetching.done():
            return None
        if self._fetching is fetching:
            self._fetching = None
        return fetching.result()

    def drain(self) -> None:
        """Finish what was given out, hand everything over, and let the iteration end. From any thread or handler."""
        if self._session is not None:
            self._session.drain()

    def held(self) -> dict[int, int]:
        """{stream: next offset to deliver} of the streams this session holds now."""
        return {} if self._session is None else self._session.held()

    async def close(self) -> None:
        """Leave the group and wait until the last progress is durable. Closing again has no effect."""
        if not self._closing:
            self._closing = True
            if self._opening is not None:
                await asyncio.shield(self._carry(self._end))
            self._worker.shutdown(wait=False)

    @property
    def closed(self) -> bool:
        """True once nothing is held and nothing will be."""
        return self._closing or (self._session is not None and self._session.closed)

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def _opened(self) -> Session:
        if self._closing:
            raise UsageError(f"{self.subscription}: this session is closed. Make another.")
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._opening = self._carry(self._begin)
        return await asyncio.shield(self._opening)

    async def _iterate(self) -> AsyncIterator[Batch]:
        while (batch := await self.next_batch()) is not None:
            yield batch

    def _carry(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        return asyncio.get_running_loop().run_in_executor(self._worker, work)

    # --- on the worker's thread -------------------------------------------------------------------------------------

    def _begin(self) -> Session:
        self._session = self._make()
        return self._session

    def _fetch(self, session: Session) -> Batch | None:
        while not (self._closing or session.closed):
            self._carry_out_acknowledgements()
            batch = session.next_batch(TURN_S)
            if batch is not None:
                batch._acknowledge = self._later(batch._acknowledge)
                batch._progressed = self._later(batch._progressed)
                return batch
        return None

    def _later(self, acknowledge: Callable[_P, None] | None) -> Callable[_P, None]:
        """The same, from any thread, carried to this one."""
        assert acknowledge is not None

        def later(*arguments: _P.args, **named: _P.kwargs) -> None:
            self._acknowledged.append(lambda: acknowledge(*arguments, **named))
            if not self._closing:
                self._worker.submit(self._carry_out_acknowledgements)

        return later

    def _carry_out_acknowledgements(self) -> None:
        while self._acknowledged:
            self._acknowledged.popleft()()

    def _end(self) -> None:
        """Runs after what the worker was doing: an opening whose waiter was cancelled has come to its end too."""
        self._carry_out_acknowledgements()
        if self._session is not None:
            self._session.close()
