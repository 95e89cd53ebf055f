"""Polls the heads of all streams that feeds follow on this node, once for all.

It polls often while heads move, and seldom while they do not. `update_heads` takes heads that are known already: then
no waiter needs the next poll. `poll_soon` is a hint that a stream has grown, and the next poll comes soon. Correctness
depends on neither. A head below one that was known before the poll began shows that the stream has lost its end: it is
passed on at once, as a waiter that is busy finds only the newest head later.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import MappingProxyType

from sublet_protocol.domain.errors import SubletError
from sublet_storage.log.fetch import HeadState

log = logging.getLogger(__name__)

BACKOFF_INITIAL_S = 0.005
BACKOFF_MAX_S = 0.1
GROWTH = 1.5
"""Between two polls while no head moves."""

LONGEST_PAUSE_S = 1.0
"""After a poll that failed, or took long."""

ReadHeads = Callable[[list[int]], Awaitable[tuple[str | None, dict[int, HeadState]]]]
"""Returns the timeline of the database, None if unknown, and the heads of the streams."""

OnLowered = Callable[[Mapping[int, HeadState]], None]


class HeadWaiter:
    """Waits for new heads of some streams, and keeps the newest of each. `on_lowered` is called on the loop with those
    that are lower than before."""

    def __init__(self, poller: FeedHeadPoller, on_lowered: OnLowered) -> None:
        self._poller, self.on_lowered = poller, on_lowered
        self._new_heads: dict[int, HeadState] = {}
        self._wakeup = asyncio.Event()
        self.watched: frozenset[int] = frozenset()

    def set_streams(self, stream_ids: Iterable[int]) -> None:
        """Wait for heads of these streams only."""
        self._poller.register(self, frozenset(stream_ids))

    def update_heads(self, heads: Mapping[int, HeadState]) -> None:
        """Store new heads and wake the waiter."""
        self._new_heads.update(heads)
        self._wakeup.set()

    async def wait_for_heads(self, timeout_s: float) -> dict[int, HeadState]:
        """Wait for new heads, at most `timeout_s`; return them, empty if there are none."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._wakeup.wait()
        self._wakeup.clear()
        new_heads, self._new_heads = self._new_heads, {}
        return new_heads


class FeedHeadPoller:
    """Polls heads while there is a waiter. Made and used on one event loop; `update_heads` is called from any thread.

    `timeline`: of the database at the last poll, None if unknown or nobody follows. `heads`: the newest of the streams
    that are followed. `poll_count`: number of polls.
    """

    def __init__(self, read_heads: ReadHeads) -> None:
        self._read_heads = read_heads
        self._loop = asyncio.get_running_loop()
        self._waiters: dict[int, set[HeadWaiter]] = {}
        self.heads: dict[int, HeadState] = {}
        self._task: asyncio.Task[None] | None = None
        self._hurried = asyncio.Event()
        self.timeline: str | None = None
        self.poll_count = 0

    def add_waiter(self, on_lowered: OnLowered = lambda _: None) -> HeadWaiter:
        """Return a new waiter, which follows no stream yet."""
        return HeadWaiter(self, on_lowered)

    def register(self, waiter: HeadWaiter, stream_ids: frozenset[int]) -> None:
        """Set the waiter's streams (see `HeadWaiter.set_streams`). Added streams are polled soon and count as new:
        heads known before may be of a former timeline, and of another stream."""
        for stream_id in waiter.watched - stream_ids:
            self._waiters[stream_id].discard(waiter)
            if not self._waiters[stream_id]:
                del self._waiters[stream_id]
                self.heads.pop(stream_id, None)
        for stream_id in stream_ids - waiter.watched:
            self._waiters.setdefault(stream_id, set()).add(waiter)
            self.heads.pop(stream_id, None)
            if self._task is not None:
                self._hurried.set()
        waiter.watched = stream_ids
        if self._waiters and self._task is None:
            self._task = self._loop.create_task(self._run())

    def update_heads(self, heads: Mapping[int, int]) -> None:
        """Record known heads of streams, from any thread; heads older than the known ones are ignored."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: no waiter is left
            self._loop.call_soon_threadsafe(self._record_heads, dict(heads))

    def poll_soon(self, stream_id: int) -> None:
        """Poll soon, as the stream is reported to have grown. On the loop."""
        if stream_id in self._waiters:
            self._hurried.set()

    async def close(self) -> None:
        """Stop polling."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _record_heads(self, heads: Mapping[int, int]) -> None:
        for stream_id, head in heads.items():
            known_head = self.heads.get(stream_id)
            self._notify({stream_id: HeadState(head, known_head is not None and known_head.is_closed, False)})

    async def _run(self) -> None:
        pause_s = BACKOFF_INITIAL_S
        while self._waiters:
            began, previous_heads = self._loop.time(), self.heads.copy()
            heads = await self._try_read_heads(list(self._waiters))
            changed = self._notify(heads or {}, previous_heads)
            pause_s = BACKOFF_INITIAL_S if changed else min(pause_s * GROWTH, BACKOFF_MAX_S)
            took_s = self._loop.time() - began
            least_s = LONGEST_PAUSE_S if heads is None else min(4 * took_s, LONGEST_PAUSE_S)
            await self._wait_for_next_poll(least_s, pause_s)
        self._task = self.timeline = None

    async def _wait_for_next_poll(self, least_s: float, pause_s: float) -> None:
        """Wait until the next poll, which comes sooner after a hint, but not too soon for the database."""
        await asyncio.sleep(least_s)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause_s - least_s):
                await self._hurried.wait()
        self._hurried.clear()

    async def _try_read_heads(self, stream_ids: list[int]) -> dict[int, HeadState] | None:
        try:
            self.timeline, heads = await self._read_heads(stream_ids)
            return heads
        except SubletError as error:
            log.warning("stream heads not read, retrying: %s", error)
        except Exception:
            log.exception("stream heads not read, retrying")
        finally:
            self.poll_count += 1
        return None

    def _notify(
        self, heads: Mapping[int, HeadState], previous_heads: Mapping[int, HeadState] = MappingProxyType({})
    ) -> bool:
        """Pass heads that are newer than known, and those lower than `previous_heads`, to the waiters of these streams;
        return whether there were any."""
        by_waiter: dict[HeadWaiter, dict[int, HeadState]] = {}
        for stream_id, head in heads.items():
            is_lower = stream_id in previous_heads and head.head < previous_heads[stream_id].head
            if stream_id in self._waiters and (is_lower or _is_new(head, self.heads.get(stream_id))):
                self.heads[stream_id] = head
                for waiter in self._waiters[stream_id]:
                    by_waiter.setdefault(waiter, {})[stream_id] = head
                    if is_lower:
                        waiter.on_lowered({stream_id: head})
        for waiter, new_heads in by_waiter.items():
            waiter.update_heads(new_heads)
        return bool(by_waiter)


def _is_new(head: HeadState, known_head: HeadState | None) -> bool:
    return known_head is None or (head != known_head and head.head >= known_head.head)
